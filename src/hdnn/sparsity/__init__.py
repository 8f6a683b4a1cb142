"""Which node may talk to which: block patterns R of K and T of J, and the locality condition.

Nodes are numbered from 0. Patterns are binary `(M, M)` matrices with the paper's algebra: a sum or
a product is 1 where the ordinary one is not 0.
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
from hdnn.sparsity.links import LinkChoice as LinkChoice
from hdnn.sparsity.links import choose_links as choose_links
from hdnn.sparsity.locality import Breach as Breach
from hdnn.sparsity.trials import LinkTrial as LinkTrial

__all__ = [
    "BlkSprs",
    "Breach",
    "Explanation",
    "LinkChoice",
    "LinkTrial",
    "Sparsity",
    "choose_links",
    "components",
    "dependency",
    "design",
    "design_R",
    "design_T",
    "explain",
    "free_weights",
    "from_networkx",
    "is_local",
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
    """Which nodes each node's updates depend on, forward and backward: `T R^T R + R^T R T`.

    Args:
        T: the pattern of X or J: `(M, M)`, or `(N, M, M)` for one a layer, of 0 and 1.
        R: the pattern of K, likewise.

    Returns:
        True at (i, k) where node i needs node k, `(M, M)` or `(N, M, M)`.

    Raises:
        SparsityError: if a pattern is not binary and square, or they are not for the same nodes.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> R = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
        >>> sparsity.dependency(torch.eye(3), R).int()  # a chain: its ends do not need each other
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    T, R = binary("T", T), binary("R", R)
    _check_alike(T=T, R=R)
    return product(T, R.mT, R) | product(R.mT, R, T)


def is_local(T: Any, R: Any, S: Any) -> bool:
    """Whether updates need neighbours only: `T R^T R + R^T R T <= S` (eq:sparsity_invariance).

    Args:
        T: the pattern of X or J: `(M, M)`, or `(N, M, M)` for one a layer, of 0 and 1.
        R: the pattern of K, likewise.
        S: the communication graph, likewise: S(i, k) = 1 where node i hears node k.

    Returns:
        Whether the condition holds, in every layer.

    Raises:
        SparsityError: if a pattern is not binary and square, or they are not for the same nodes.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> R = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
        >>> sparsity.is_local(torch.eye(3), R, S=torch.ones(3, 3))
        True
        >>> sparsity.is_local(torch.eye(3), R, S=torch.eye(3))
        False
    """
    needed, S = dependency(T, R), binary("S", S)
    _check_alike(R=needed, S=S)
    return bool((needed <= S).all())


class Explanation(tuple[Breach, ...]):
    """All breaches of the locality condition: empty, so false, where the patterns are local.

    It is a tuple, which `explain` returns, and its text has a line for each breach.

    Args:
        iterable: the breaches.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> found = sparsity.explain(torch.eye(2), torch.ones(2, 2), torch.eye(2))
        >>> len(found), found[0].node, found[0].needs
        (2, 0, 1)
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "local: all updates need neighbours only"


def explain(T: Any, R: Any, S: Any) -> Explanation:
    """Where and why the locality condition fails: which node needs which, and by which path.

    Args:
        T: the pattern of X or J: `(M, M)`, or `(N, M, M)` for one a layer, of 0 and 1.
        R: the pattern of K, likewise.
        S: the communication graph, likewise: S(i, k) = 1 where node i hears node k.

    Returns:
        A tuple with a `Breach` for each pair that breaks `T R^T R + R^T R T <= S`. It is empty, so
        false, where the patterns are local; printed, it has a line for each.

    Raises:
        SparsityError: if a pattern is not binary and square, or they are not for the same nodes.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> R = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
        >>> S = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
        >>> print(sparsity.explain(torch.eye(3), R, S))
        node 1 needs node 2 forward and backward: row 1 of R has 1 and 2
        node 2 needs node 1 forward and backward: row 1 of R has 2 and 1
    """
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
    """The groups of nodes that hear of each other at all, however many layers there are.

    Args:
        T: the pattern of X or J: `(M, M)`, or `(N, M, M)` for one a layer, of 0 and 1.
        R: the pattern of K, likewise.

    Returns:
        A list of the nodes of each group.

    Raises:
        SparsityError: if a pattern is not binary and square, or they are not for the same nodes.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> sparsity.components(torch.eye(3), [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
        [[0, 1], [2]]
    """
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

    A network takes it as its option `sparsity`; entries that the patterns mask do not exist. The
    sizes of nodes add up to m = n/2 where node i owns the pair `(p[i], q[i])`, or to n where it
    owns the i-th piece of y (forward Euler and midpoint only).

    Args:
        R: the pattern of K: `(M, M)`, or `(N, M, M)` for one a layer, of 0 and 1.
        T: the pattern of X or J, symmetric; by default what X or J uses.
        S: the communication graph; where given, the locality condition is checked.
        sizes: the features of each node; by default all alike: pairs of H2 and its relatives,
            pieces of H1 and midpoint networks.

    Raises:
        SparsityError: if a pattern is not binary or has a 0 on its diagonal, patterns or sizes are
            not for the same nodes, T is not symmetric, or S does not have all links that updates
            need.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> ring = torch.eye(8) + torch.eye(8).roll(1, 0) + torch.eye(8).roll(-1, 0)
        >>> net = hdnn.H2(features=16, layers=4, sparsity=hdnn.Sparsity(R=ring))
        >>> net
        H2(16 features, 4 layers, ..., 256 parameters)
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
        """Raise a `SparsityError` if S is given and lacks links that updates with this T need."""
        if self.S is None or is_local(T, self.R, self.S):
            return
        first = list(islice(_breaches(T, self.R, self.S, 5), 5))
        pairs = [*dict.fromkeys((breach.node, breach.needs) for breach in first)]
        raise locality.broken(pairs, f" ({first[0]})", " hdnn.sparsity.explain lists them all.")

    def node_sizes(self, features: int) -> tuple[int, ...]:
        """The sizes as given, or else all equal: `features` shared out to the nodes."""
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
    """The set of matrices whose blocks are zero where the pattern R is.

    K is in BlkSprs(R) if and only if R(i, k) = 0 makes its block K(i, k) zero. Matrices have the
    shape `(..., sum(rows), sum(columns))`, layers before that.

    Args:
        R: the pattern: `(M, M)`, or `(N, M, M)` for one a layer, of 0 and 1.
        rows: how many rows the blocks of each node have.
        columns: how many columns; by default the same.

    Raises:
        SparsityError: if R is not binary, or there is not one size >= 1 for each node.
        ShapeError: in its methods, if K has another shape.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> block = sparsity.BlkSprs([[1, 0], [1, 1]], rows=[1, 2])
        >>> K = torch.ones(3, 3)
        >>> K in block, block.project(K) in block, block.free
        (False, True, 7)
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
    """The R that frees most weights if T = I: `R^T R <= S`, with cliques of S as its rows.

    Of equals, it is the R whose ones come first. Most weights need not use every link, so nodes
    that S joins may never hear of each other (see `components`), unless `connected`.

    Args:
        S: the communication graph `(M, M)`, with ones on its diagonal.
        sizes: the features of each node; by default one each.
        connected: give up as many weights as it takes, found greedily, so that nodes that S joins
            hear of each other.

    Returns:
        The patterns, for the option `sparsity` of a network.

    Raises:
        SparsityError: if S is not binary and `(M, M)` with ones on its diagonal, or sizes do not
            fit.
        OptionError: if connected is not True or False.

    Examples:
        >>> from hdnn import sparsity
        >>> chain = [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
        >>> sparsity.design_R(chain, connected=True).R.int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    S, sizes = _graph(S, sizes)
    R = best.best_R(S, sizes, flag("connected", connected))
    return Sparsity(R, torch.eye(len(S)), S, sizes)


def design_T(S: Any, sizes: Sequence[int] | None = None) -> Sparsity:
    """R = I, and T all mutual links of S: nodes are joined by X or J alone, so learn it.

    Args:
        S: the communication graph `(M, M)`, with ones on its diagonal.
        sizes: the features of each node; by default one each.

    Returns:
        The patterns, for the option `sparsity` of a network with `learn_X` or `learn_J`.

    Raises:
        SparsityError: if S is not binary and `(M, M)` with ones on its diagonal, or sizes do not
            fit.

    Examples:
        >>> from hdnn import sparsity
        >>> sparsity.design_T([[1, 1, 0], [1, 1, 1], [0, 1, 1]]).T.int()
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    S, sizes = _graph(S, sizes)
    return Sparsity(torch.eye(len(S)), S & S.mT, S, sizes)


def design(
    S: Any, sizes: Sequence[int] | None = None, *, layers: int = 1, connected: bool = False
) -> Sparsity:
    """The T and R with `T R^T R + R^T R T <= S` that free most weights of H2 with a learned X.

    They are counted by `free_weights`. Of equals, those whose ones come first, in R and then in T.
    Up to 12 mutual links in S, no pair has more; for larger graphs it is a local optimum: no change
    of a single link in T frees more. (Dense graphs of hundreds of nodes meet a limit on the work.)
    If X is not learned, it has no weights: use `design_R`.

    Args:
        S: the communication graph `(M, M)`, with ones on its diagonal.
        sizes: the features of each node; by default one each.
        layers: N, of the network that they are for.
        connected: give up as many weights as it takes, found greedily, so that nodes that S joins
            hear of each other.

    Returns:
        The patterns, for the option `sparsity` of a network.

    Raises:
        SparsityError: if S is not binary and `(M, M)` with ones on its diagonal, or sizes do not
            fit.
        ShapeError: if layers is no whole number >= 1.
        OptionError: if connected is not True or False.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> S = torch.eye(6) + torch.eye(6).roll(1, 0) + torch.eye(6).roll(-1, 0)  # a ring
        >>> found = sparsity.design(S, layers=4)
        >>> sparsity.is_local(found.T, found.R, S)
        True
    """
    S, sizes = _graph(S, sizes)
    layers, connected = positive_int("layers", layers), flag("connected", connected)
    R, T = best.best_patterns(S, sizes, layers, connected)
    return Sparsity(R, T, S, sizes)


def free_weights(sparsity: Sparsity, *, layers: int = 1) -> int:
    """How many weights patterns leave free: `2 N s^T R s + s^T T s`, for node sizes s.

    These are the entries of K_p and K_q in N layers and of one X. Without sizes every node counts
    as one feature, and without T, X as block-diagonal.

    Args:
        sparsity: the patterns.
        layers: N, where all layers share one R.

    Returns:
        Their number.

    Raises:
        ShapeError: if layers is no whole number >= 1.

    Examples:
        >>> from hdnn import sparsity
        >>> sparsity.free_weights(sparsity.Sparsity(R=[[1, 0], [1, 1]]), layers=4)  # 2 * 4 * 3 + 2
        26
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
    gradients go back where states came from. For other patterns, take the S of the result.

    Args:
        graph: a networkx graph.
        size: the name of the attribute with the features of a node; by default all are alike.
        design: "R" (T = I, for networks that do not learn X), "T" (R = I) or "both"; all join what
            the graph joins.

    Returns:
        The patterns, for the option `sparsity` of a network.

    Raises:
        SparsityError: if graph is no networkx graph with nodes, or a node has no such attribute.
        OptionError: if there is no such design.
        MissingExtraError: if networkx is not installed.

    Examples:
        >>> import networkx
        >>> from hdnn import sparsity
        >>> sparsity.from_networkx(networkx.cycle_graph(8))
        Sparsity(8 nodes, 8 links in R)
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
