"""Which node may talk to which: block patterns R of K and T of J, and the locality condition.

Nodes are numbered from 0. Patterns are binary (M, M) matrices with the paper's algebra: a sum or a
product is 1 where the ordinary one is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hdnn.base import search
from hdnn.errors import ShapeError, SparsityError, choose, flag, positive_int
from hdnn.operators import block_sparse
from hdnn.sparsity import best, locality
from hdnn.sparsity.locality import Breach as Breach

__all__ = [
    "BlkSprs",
    "Breach",
    "Explanation",
    "Sparsity",
    "components",
    "dependency",
    "design",
    "design_R",
    "design_T",
    "explain",
    "free_weights",
    "from_networkx",
    "is_local",
    "product",
]


def binary(name: str, pattern: Any) -> Tensor:
    """A pattern given as a tensor, an array or nested lists, as a boolean tensor (..., M, M)."""
    try:
        A = torch.as_tensor(pattern, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SparsityError(
            f"{name} must be a binary matrix, but got {type(pattern).__name__}; "
            "give an (M, M) array of 0 and 1."
        ) from error
    if A.ndim not in (2, 3) or A.shape[-1] != A.shape[-2] or A.numel() == 0:
        raise SparsityError(
            f"{name} must be (M, M), or (N, M, M) for a pattern a layer, "
            f"but has shape {tuple(A.shape)}."
        )
    if not bool(((A == 0) | (A == 1)).all()):
        raise SparsityError(f"{name} must hold 0 and 1 only; use (matrix != 0).")
    return A.bool()


def product(*patterns: Tensor) -> Tensor:
    """The binary product of patterns."""
    result = patterns[0].float()
    for pattern in patterns[1:]:
        result = ((result @ pattern.float()) > 0).float()
    return result > 0


def dependency(T: Any, R: Any) -> Tensor:
    """T R^T R + R^T R T: the nodes that each node's forward and backward updates depend on."""
    T, R = binary("T", T), binary("R", R)
    _check_alike(T=T, R=R)
    return product(T, R.mT, R) | product(R.mT, R, T)


def is_local(T: Any, R: Any, S: Any) -> bool:
    """Whether T R^T R + R^T R T <= S: all updates use neighbours only (eq:sparsity_invariance)."""
    needed, S = dependency(T, R), binary("S", S)
    _check_alike(R=needed, S=S)
    return bool((needed <= S).all())


class Explanation(tuple[Breach, ...]):
    """All breaches of the locality condition: empty, so false, where the patterns are local."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "local: all updates need neighbours only"


def explain(T: Any, R: Any, S: Any) -> Explanation:
    """Where and why T R^T R + R^T R T <= S fails: which node needs which, and by which path."""
    return Explanation(_breaches(T, R, S))


def _breaches(T: Any, R: Any, S: Any, most: float = math.inf) -> Iterator[Breach]:
    """The first breaches of each layer."""
    T, R, S = binary("T", T), binary("R", R), binary("S", S)
    _check_alike(T=T, R=R)
    _check_alike(R=R if R.ndim == 3 else T, S=S)
    layered = 3 in (T.ndim, R.ndim, S.ndim)
    stacks = torch.broadcast_tensors(*(A.reshape(-1, *A.shape[-2:]) for A in (T, R, S)))
    for j, patterns in enumerate(zip(*stacks, strict=True)):
        needs = locality.Needs(*map(locality.of_matrix, patterns))
        yield from needs.breaches(most, math.inf).explained(j if layered else None)


def components(T: Any, R: Any) -> list[list[int]]:
    """The groups of nodes that hear of each other at all, however many layers there are."""
    needed = dependency(T, R)
    needed = needed.reshape(-1, *needed.shape[-2:]).any(0)
    joined = needed | needed.mT
    return search.components([row.nonzero()[:, 0].tolist() for row in joined])


def _check_alike(**patterns: Tensor) -> None:
    """Raise unless all patterns have the same nodes and, where stacked, equally many layers."""
    (first, a), *others = patterns.items()
    for name, b in others:
        if a.shape[-1] != b.shape[-1]:
            raise SparsityError(
                f"{name} is for {b.shape[-1]} nodes, but {first} is for {a.shape[-1]}."
            )
        if a.ndim == b.ndim == 3 and len(a) != len(b):
            raise SparsityError(f"{name} is for {len(b)} layers, but {first} is for {len(a)}.")


def _check_diagonal(name: str, pattern: Tensor) -> None:
    if not bool(pattern.diagonal(dim1=-2, dim2=-1).all()):
        raise SparsityError(
            f"every node is its own neighbour, but {name} has a 0 on its diagonal; use {name} + I."
        )


def _whole(sizes: Any, nodes: int, name: str = "sizes") -> tuple[int, ...]:
    """The features of each node, checked: one size a node."""
    given: list[Any] = list(sizes) if isinstance(sizes, Iterable) else []
    if len(given) != nodes or not all(isinstance(k, Integral) and int(k) >= 1 for k in given):
        raise SparsityError(
            f"{name} must be {nodes} whole numbers >= 1, one a node, but got {sizes!r}."
        )
    return tuple(int(size) for size in given)


class Sparsity:
    """Block patterns of a distributed H-DNN: K in BlkSprs(R), X or J in BlkSprs(T).

    `R` is (M, M), or (N, M, M) for one a layer. `T`, symmetric, is by default what X or J uses.
    `S` is the communication graph; where given, the locality condition is checked. `sizes` are the
    features of each node: they add up to m = n/2 where node i owns the pair (p[i], q[i]), or to n
    where it owns the i-th piece of y (forward Euler and midpoint only). By default all alike: pairs
    of H2 and its relatives, pieces of H1 and midpoint networks.
    """

    def __init__(
        self, R: Any, T: Any = None, S: Any = None, sizes: Sequence[int] | None = None
    ) -> None:
        self.R = binary("R", R)
        self.T = None if T is None else binary("T", T)
        self.S = None if S is None else binary("S", S)
        self.nodes = self.R.shape[-1]
        self.sizes = None if sizes is None else _whole(sizes, self.nodes)
        for name, pattern in (("R", self.R), ("T", self.T), ("S", self.S)):
            if pattern is None:
                continue
            if name != "R":
                _check_alike(**{"R": self.R, name: pattern})
            _check_diagonal(name, pattern)
        if self.T is not None and not bool((self.T.mT == self.T).all()):
            raise SparsityError("T must be symmetric, because J is skew-symmetric; use T + T^T.")
        if self.T is not None:
            self.check_local(self.T)

    def check_local(self, T: Tensor) -> None:
        """Raise if S is given and the updates need nodes that it does not link."""
        if self.S is None or is_local(T, self.R, self.S):
            return
        first = list(islice(_breaches(T, self.R, self.S, 5), 5))
        pairs = [*dict.fromkeys((breach.node, breach.needs) for breach in first)]
        raise locality.broken(pairs, f" ({first[0]})", " hdnn.sparsity.explain lists them all.")

    def node_sizes(self, features: int) -> tuple[int, ...]:
        """The sizes as given, or else all equal."""
        if self.sizes is not None:
            return self.sizes
        if features % self.nodes:
            raise SparsityError(
                f"{features} features cannot be shared alike by {self.nodes} nodes; give sizes."
            )
        return (features // self.nodes,) * self.nodes

    def to_config(self) -> dict[str, Any]:
        """As JSON can hold it."""
        patterns = {"R": self.R, "T": self.T, "S": self.S}
        lists = {name: None if A is None else A.int().tolist() for name, A in patterns.items()}
        return {**lists, "sizes": None if self.sizes is None else list(self.sizes)}

    def __repr__(self) -> str:
        own = self.R.reshape(-1, self.nodes, self.nodes)
        links = int(own.any(0).sum()) - self.nodes
        return f"Sparsity({self.nodes} nodes, {links} links in R)"


class BlkSprs:
    """K is in BlkSprs(R) if and only if R(i, k) = 0 makes its block K(i, k) zero.

    `R` is (M, M), or (N, M, M) for one a layer; `rows` and `columns` are the sizes of the blocks,
    `columns` by default the same. Matrices are (..., sum(rows), sum(columns)), layers before that.
    """

    def __init__(self, R: Any, rows: Sequence[int], columns: Sequence[int] | None = None) -> None:
        self.R = binary("R", R)
        self.rows = _whole(rows, self.R.shape[-1], "rows")
        self.columns = self.rows if columns is None else _whole(columns, len(self.rows), "columns")
        self.mask = block_sparse.mask(self.R, self.rows, self.columns)

    @property
    def free(self) -> int:
        """How many entries may differ from zero."""
        return int(self.mask.sum())

    def contains(self, K: Tensor) -> bool:
        """Whether all masked blocks of K are exactly zero; `K in self` is the same."""
        return not bool(K[..., self._masked(K)].any())

    def __contains__(self, K: Tensor) -> bool:
        return self.contains(K)

    def project(self, K: Tensor) -> Tensor:
        """The nearest matrix of the set: K with its masked blocks set to zero."""
        masked = self._masked(K)  # first, as K may be no tensor
        return K.masked_fill(masked, 0)

    def _masked(self, K: Tensor) -> Tensor:
        shape = self.mask.shape
        if not isinstance(K, Tensor) or K.shape[-len(shape) :] != shape:
            given = tuple(K.shape) if isinstance(K, Tensor) else type(K).__name__
            size = ", ".join(map(str, shape))
            raise ShapeError(f"K must be a tensor (..., {size}), as R has it, but got {given}.")
        return ~self.mask.to(K.device)

    def __repr__(self) -> str:
        return f"BlkSprs({self.R.shape[-1]} nodes, {self.free} of {self.mask.numel()} entries free)"


# Patterns for a graph


def design_R(S: Any, sizes: Sequence[int] | None = None, *, connected: bool = False) -> Sparsity:
    """T = I, and the R with R^T R <= S that frees most weights: cliques of S as its rows.

    Of equals, the R whose ones come first. Most weights need not use every link, so nodes that S
    joins may never hear of each other (see `components`). `connected=True` gives up as many weights
    as it takes, found greedily, so that they do.
    """
    S, sizes = _graph(S, sizes)
    R = best.best_R(S, sizes, flag("connected", connected))
    return Sparsity(R, torch.eye(len(S)), S, sizes)


def design_T(S: Any, sizes: Sequence[int] | None = None) -> Sparsity:
    """R = I, and T all mutual links of S: nodes are joined by X or J alone, so learn it."""
    S, sizes = _graph(S, sizes)
    return Sparsity(torch.eye(len(S)), S & S.mT, S, sizes)


def design(
    S: Any, sizes: Sequence[int] | None = None, *, layers: int = 1, connected: bool = False
) -> Sparsity:
    """The T and R with T R^T R + R^T R T <= S that free most weights of H2 with a learned X.

    They are counted by `free_weights`. Of equals, those whose ones come first, in R and then in T.
    Up to 12 mutual links in S, no pair has more; for larger graphs it is a local optimum: no change
    of a single link in T frees more. (Dense graphs of hundreds of nodes meet a limit on the work.)
    `connected` is as in `design_R`. If X is not learned, it has no weights: use `design_R`.
    """
    S, sizes = _graph(S, sizes)
    layers, connected = positive_int("layers", layers), flag("connected", connected)
    R, T = best.best_patterns(S, sizes, layers, connected)
    return Sparsity(R, T, S, sizes)


def free_weights(sparsity: Sparsity, *, layers: int = 1) -> int:
    """2 N s^T R s + s^T T s: entries of K_p and K_q in N layers and of one X, for node sizes s.

    `layers` is N where all share one R. Without sizes every node counts as one feature, and without
    T, X as block-diagonal.
    """
    sizes = sparsity.sizes or (1,) * sparsity.nodes
    N = positive_int("layers", layers) if sparsity.R.ndim == 2 else 1
    T = torch.eye(sparsity.nodes) if sparsity.T is None else sparsity.T
    return 2 * N * BlkSprs(sparsity.R, sizes).free + BlkSprs(T, sizes).free


_DESIGNS = {
    "R": partial(design_R, connected=True),
    "T": design_T,
    "both": partial(design, connected=True),
}


def from_networkx(graph: Any, *, size: str | None = None, design: str = "R") -> Sparsity:
    """Patterns for a networkx graph: node i is the i-th of `graph.nodes`, and its own neighbour.

    An edge of a `DiGraph` from u to v lets v hear u; only links both ways can be used, because
    gradients go back where states came from. `size` names the attribute with the features of a
    node. `design` is "R" (T = I, for networks that do not learn X), "T" (R = I) or "both"; all
    join what the graph joins. For other patterns, take the S of the result.
    """
    make = _DESIGNS[choose("design", design, _DESIGNS)]
    return make(*best.links_and_sizes(graph, size))


def _graph(S: Any, sizes: Sequence[int] | None) -> tuple[Tensor, tuple[int, ...] | None]:
    """A communication graph and the sizes of its nodes, checked."""
    S = binary("S", S)
    if S.ndim == 3:
        raise SparsityError(f"S must be (M, M), one graph, but has shape {tuple(S.shape)}.")
    _check_diagonal("S", S)
    return S, None if sizes is None else _whole(sizes, len(S))
