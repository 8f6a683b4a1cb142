"""Block-sparse weights: K, X and J that are zero between nodes that a pattern does not link."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn.errors import SparsityError, choose
from hdnn.networks.ode import ODENetwork
from hdnn.networks.schemes import SCHEMES, Scheme
from hdnn.networks.weights import filled, refresh, store
from hdnn.operators import block_sparse
from hdnn.sparsity import Sparsity


class BlockSparseNetwork(ODENetwork):
    """A network that stores only the free entries of its block-sparse weights.

    They are the parameter `K_free`; `K` reads like a stored one, zeros included. Where there is no
    `sparsity`, weights are stored whole.
    """

    integrator: str
    sparsity: Sparsity | None

    @property
    def scheme(self) -> Scheme:
        """How a layer steps, and what it needs of K and J."""
        return SCHEMES[self.integrator]

    def _set_sparsity(self, given: Any) -> None:
        """Take the patterns, if this network can have them."""
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the block-sparse weights
        self.sparsity = None if given is None else _as_sparsity(given)
        if self.sparsity is None:
            return
        sparsity, R, stored = self.sparsity, self.sparsity.R, self.stored
        if R.ndim == 3 and R.shape[0] != stored:
            raise SparsityError(
                f"R has a pattern for each of {R.shape[0]} layers, but the network has "
                f"{stored} layers with weights of their own."
            )
        if sparsity.S is not None and self.scheme.implicit:
            raise SparsityError(
                f"an implicit layer ({self.integrator}) couples all nodes that are linked at all, "
                "so it is not local to any graph S; give no S (masked only), or use H1 or H2."
            )

    def node_sizes(self) -> tuple[tuple[int, ...], bool]:
        """The sizes of all nodes, and whether node i owns (p[i], q[i]) rather than a piece of y."""
        assert self.sparsity is not None
        n, scheme = self.features, self.scheme
        paired = scheme.interconnection == "X"
        sizes = self.sparsity.node_sizes(n // 2 if paired else n)
        paired = paired or 2 * sum(sizes) == n
        if sum(sizes) != (n // 2 if paired else n):
            pieces = "" if scheme.interconnection == "X" else f" or n = {n} (pieces of y)"
            raise SparsityError(
                f"node sizes {sizes} add up to {sum(sizes)}, but must add up to "
                f"m = n/2 = {n // 2} (pairs (p, q)){pieces}."
            )
        return sizes, paired

    def _mask(self, pattern: Tensor, rows: int) -> Tensor:
        """The entries that a block pattern frees in a square matrix of n or m = n/2 rows."""
        sizes, paired = self.node_sizes()
        if paired and rows == self.features:  # (p[i], q[i]) on both sides
            return block_sparse.mask(pattern.tile(2, 2), 2 * sizes, 2 * sizes)
        return block_sparse.mask(pattern, sizes, sizes)

    def _restrict(self, name: str, matrix: Tensor) -> Tensor:
        """Check X or J against the pattern T and return which of its entries are free."""
        assert self.sparsity is not None
        given, M = self.sparsity, self.sparsity.nodes
        sizes, paired = self.node_sizes()
        halves = 2 if paired and name == "J" else 1  # J has a block of T in each of its quarters
        quarters = [
            part for rows in matrix.cpu().chunk(halves, -2) for part in rows.chunk(halves, -1)
        ]
        patterns = [block_sparse.block_pattern(part, sizes, sizes) for part in quarters]
        used = torch.cat([pattern.reshape(-1, M, M) for pattern in patterns]).any(0)
        if given.T is None:  # then T is what X or J uses already
            T = used | used.mT | torch.eye(M, dtype=torch.bool, device="cpu")
            self.sparsity = given = Sparsity(given.R, T, given.S, given.sizes)
        assert given.T is not None
        if given.T.ndim == 3:
            raise SparsityError("T must be (M, M): one pattern for all layers.")
        if bool((used & ~given.T).any()):
            i, k = (used & ~given.T).nonzero()[0].tolist()
            raise SparsityError(
                f"{name} links nodes {i} and {k}, but T does not; add that link to T, or give "
                f"{'an X' if name == 'X' else 'a J (hdnn.interconnection.block_diagonal)'} "
                "that is zero there."
            )
        return self._mask(given.T, matrix.shape[-1])

    def _add_K(self, name: str, K: Tensor) -> None:
        if self.sparsity is None:
            self.register_parameter(name, nn.Parameter(K))
            return
        self._add_sparse(name, K, self._mask(self.sparsity.R, K.shape[-1]))

    def _add_sparse(self, name: str, matrix: Tensor, free: Tensor) -> None:
        """Store only the free entries: as `name_free`, with `name` the matrices that they fill."""
        self._shapes[name] = tuple(matrix.shape)
        store(self, name, matrix, free)

    def weight(self, name: str) -> Tensor:
        """One stack of weights, (N, ...), or (1, ...) if tied; of a block-sparse one the whole.

        Args:
            name: one of `names_by_layer()`, or "X".
        """
        if name not in self._shapes:
            return super().weight(name)
        refresh(self)
        return filled(self, name, self._shapes[name])

    def learns(self, name: str) -> bool:
        """Whether a weight, K for instance, is to be learned."""
        name = f"{name}_free" if name in self._shapes else name
        return getattr(self, name).requires_grad

    def _whole_shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def __getattr__(self, name: str) -> Any:
        # A block-sparse K, or X, reads like a stored one: the whole matrices, zeros included.
        if name in self.__dict__.get("_shapes", {}):
            return self.weight(name)
        return super().__getattr__(name)

    def assign(self, name: str, value: Tensor) -> None:
        """Overwrite one stack of weights, in its own memory; of a sparse one its free entries.

        Args:
            name: one of `names_by_layer()`, or a learned "X".
            value: the new weights, (N, ...), or (1, ...) if tied.
        """
        if name in self._shapes:
            value = block_sparse.values(value, self.get_buffer(f"_{name}_index"))
            name = f"{name}_free"
        super().assign(name, value)


def _as_sparsity(given: Any) -> Sparsity:
    if isinstance(given, Sparsity):
        return given
    if isinstance(given, dict):
        for name in given:
            choose("part of a sparsity", name, ("R", "T", "S", "sizes"))
        return Sparsity(**given)
    return Sparsity(given)
