"""The locality condition, and block patterns that meet it: R for K, and T for X or J.

Nodes are numbered from 0. Patterns are `(M, M)` matrices of 0 and 1, or `(N, M, M)` for one per
layer, as tensors, arrays or nested lists. A layer computes `K^T sigma(K y + b)`, so two nodes
interact if a row of R contains both. All updates stay between linked nodes if
`T R^T R + R^T R T <= S`, where S is the graph: S(i, k) = 1 if node i receives from node k
(eq:sparsity_invariance).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import OptionError, positive_int

__all__ = [
    "Breach",
    "Explanation",
    "Sparsity",
    "dependency",
    "design",
    "explain",
    "is_local",
]

# The neighbours of each node, including itself
Links = Sequence[Collection[int]]

MOST_PAIRS = 5 * 10**7  # pairs linked by rows of R; more take minutes


def binary(name: str, pattern: Any) -> Tensor:
    """A pattern as a boolean tensor (M, M) or (N, M, M)."""
    try:
        A = torch.as_tensor(pattern, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"{name} must be an (M, M) array of 0 and 1: {error}."
        ) from error
    square = A.ndim in (2, 3) and A.numel() and A.shape[-1] == A.shape[-2]
    zero_or_one = (A == 0) | (A == 1)
    if not square or not bool(zero_or_one.all()):
        raise OptionError(
            f"{name} must be (M, M), or (N, M, M) for one pattern per layer, and contain only 0 "
            f"and 1, but has shape {tuple(A.shape)}; use (matrix != 0)."
        )
    return A.bool()


def dependency(T: Any, R: Any) -> Tensor:
    """The dependencies of nodes in forward and backward updates: `T R^T R + R^T R T`.

    Args:
        T: the pattern of X or J.
        R: the pattern of K.

    Returns:
        True at (i, k) if node i needs node k.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> R = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
        >>> sparsity.dependency(torch.eye(3), R).int()  # a chain: its ends do not need each other
        tensor([[1, 1, 0],
                [1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """
    T = binary("T", T)
    R = binary("R", R)
    _check_alike("T", T, "R", R)
    T = T.float()
    R = R.float()
    near = (R.mT @ R > 0).float()
    return (T @ near > 0) | (near @ T > 0)


def is_local(T: Any, R: Any, S: Any) -> bool:
    """True if updates need only linked nodes: `T R^T R + R^T R T <= S`, in every layer.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> sparsity.is_local(torch.eye(2), torch.ones(2, 2), S=torch.eye(2))
        False
    """
    needed = dependency(T, R)
    S = binary("S", S)
    _check_alike("R", needed, "S", S)
    return bool((needed <= S).all())


def groups(links: Links) -> list[list[int]]:
    """The connected components of a symmetric pattern."""
    seen: set[int] = set()
    result = []
    for start in range(len(links)):
        if start in seen:
            continue
        group = {start}
        frontier = [start]
        while frontier:
            new = set(links[frontier.pop()]) - group
            group |= new
            frontier += new
        seen |= group
        result.append(sorted(group))
    return result


def links_of(pattern: Tensor) -> list[list[int]]:
    """The neighbours of each node in a pattern (M, M)."""
    return [row.nonzero()[:, 0].tolist() for row in pattern]


def transposed(links: Links) -> list[list[int]]:
    """For each node, the nodes whose rows contain it."""
    result: list[list[int]] = [[] for _ in links]
    for i, row in enumerate(links):
        for k in row:
            result[k].append(i)
    return result


# The locality condition


@dataclass(frozen=True)
class Breach:
    """A node that needs another node although the graph does not link them.

    Attributes:
        node: the number i of the node.
        needs: the number k of the other node.
        forward: True if the forward update needs it.
        backward: True if the backward update does.
        path: i, a, l, k with T(i, a) = R(l, a) = R(l, k) = 1 if the forward update needs it;
            i, l, a, k with R(l, i) = R(l, a) = T(a, k) = 1 if only the backward update does.
        layer: the number of the layer if patterns differ by layer, else None.
    """

    node: int
    needs: int
    forward: bool
    backward: bool
    path: tuple[int, int, int, int]
    layer: int | None = None

    def __str__(self) -> str:
        return self.text()

    def text(self, label: Callable[[int], str] = str) -> str:
        """One line with the need and its reason; `label` returns the name of a node."""
        i, a, row, k = self.path if self.forward else self.path[::-1]
        why = []
        if a != i:
            why.append(f"T links {label(i)} and {label(a)}")
        if a != k or not why:
            why.append(f"row {label(row)} of R has {label(a)} and {label(k)}")
        ways = ["forward"] * self.forward + ["backward"] * self.backward
        layer = "" if self.layer is None else f"layer {self.layer}: "
        need = f"{layer}node {label(self.node)} needs node {label(self.needs)}"
        return f"{need} {' and '.join(ways)}: {', and '.join(why)}"


class Explanation(tuple[Breach, ...]):
    """All breaches of the locality condition, one per line; empty if the patterns are local."""

    def __str__(self) -> str:
        if not self:
            return "local: all updates need neighbours only"
        return "\n".join(map(str, self))


def explain(T: Any, R: Any, S: Any) -> Explanation:
    """The breaches of the locality condition: which node needs which, and along which path.

    Args:
        T: the pattern of X or J.
        R: the pattern of K.
        S: the graph.

    Returns:
        A tuple with a `Breach` for each pair, empty if the patterns are local.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> R = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 1]])
        >>> S = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]])
        >>> print(sparsity.explain(torch.eye(3), R, S))
        node 1 needs node 2 forward and backward: row 1 of R has 1 and 2
        node 2 needs node 1 forward and backward: row 1 of R has 2 and 1
    """
    T = binary("T", T)
    R = binary("R", R)
    S = binary("S", S)
    _check_alike("T", T, "R", R)
    _check_alike("T", T, "S", S)
    _check_alike("R", R, "S", S)
    patterns = (T, R, S)
    layered = any(A.ndim == 3 for A in patterns)
    stacks = [A.reshape(-1, *A.shape[-2:]) for A in patterns]
    stacks = torch.broadcast_tensors(*stacks)
    result: list[Breach] = []
    for number, layer in enumerate(zip(*stacks, strict=True)):
        links = map(links_of, layer)
        result += breaches(*links, layer=number if layered else None)
    return Explanation(result)


def breaches(
    T: Links, R: Links, S: Links, layer: int | None = None
) -> Iterator[Breach]:
    """The breaches of the locality condition, for patterns as lists of neighbours."""
    pairs = sum(len(row) ** 2 for row in R)
    if pairs > MOST_PAIRS:
        raise OptionError(
            f"rows of R link {pairs} pairs of nodes, which are too many to check; the longest row "
            f"has {max(map(len, R))} nodes: give that row fewer links."
        )
    holding = [set(rows) for rows in transposed(R)]
    near = [set().union(*(R[row] for row in rows)) for rows in holding]
    for i, linked in enumerate(S):
        forward = set().union(*(near[a] for a in T[i]))
        backward = set().union(*(T[a] for a in near[i]))
        for k in sorted((forward | backward).difference(linked)):
            between = [a for a in T[i] if k in near[a]] or [
                a for a in near[i] if k in T[a]
            ]
            a = i if i in between else min(between)
            row = min(holding[a] & holding[k if k in forward else i])
            path = (i, a, row, k) if k in forward else (i, row, a, k)
            yield Breach(i, k, k in forward, k in backward, path, layer)


def check_no_breach(
    found: Sequence[Breach], label: Callable[[int], str] = str
) -> None:
    """Raise an error that names the first breaches, if there are any."""
    if not found:
        return
    pairs = dict.fromkeys(
        f"{label(breach.node)} -> {label(breach.needs)}" for breach in found
    )
    shown = ", ".join(list(pairs)[:4])
    more = " .." if len(pairs) > 4 else ""
    raise OptionError(
        f"the patterns break the locality condition T R^T R + R^T R T <= S: nodes would need "
        f"{shown}{more}, which S does not link ({found[0].text(label)}); remove links from R or T, "
        "or add links to S. hdnn.sparsity.explain lists them all."
    )


def _check_alike(first: str, a: Tensor, name: str, b: Tensor) -> None:
    """Raise unless two patterns have the same nodes and, where stacked, equally many layers."""
    layers = {len(pattern) for pattern in (a, b) if pattern.ndim == 3}
    if a.shape[-1] != b.shape[-1] or len(layers) > 1:
        raise OptionError(
            f"{name} and {first} must be for the same nodes and layers, but have shapes "
            f"{tuple(b.shape)} and {tuple(a.shape)}."
        )


class Sparsity:
    """Block patterns of a distributed network: R of K, T of X or J.

    Pass it to a network as the option `sparsity`; entries outside the patterns do not exist. The
    sizes of nodes add up to n/2 if node i owns the pair `(p[i], q[i])`, or to n if it owns the i-th
    piece of y (forward Euler and midpoint only).

    Args:
        R: the pattern of K, with ones on its diagonal.
        T: the pattern of X or J, symmetric; by default the links that X or J uses.
        S: the graph; with it, the locality condition is checked.
        sizes: the number of features of each node; by default all equal.

    Raises:
        OptionError: if the patterns or sizes do not fit together, or break the locality condition.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> ring = torch.eye(8) + torch.eye(8).roll(1, 0) + torch.eye(8).roll(-1, 0)
        >>> net = hdnn.H2(features=16, layers=4, sparsity=hdnn.Sparsity(R=ring))
        >>> net
        H2(16 features, 4 layers, ..., 256 parameters)
    """

    def __init__(
        self,
        R: Any,
        T: Any = None,
        S: Any = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.R = binary("R", R)
        self.T = None if T is None else binary("T", T)
        self.S = None if S is None else binary("S", S)
        self.nodes = self.R.shape[-1]
        self.sizes = None if sizes is None else node_sizes(sizes, self.nodes)
        for name, pattern in self._patterns().items():
            if pattern is not None:
                _check_alike("R", self.R, name, pattern)
                _check_diagonal(name, pattern)
        if self.T is not None:
            if not bool((self.T.mT == self.T).all()):
                raise OptionError(
                    "T must be symmetric, because J is skew-symmetric; use T + T^T."
                )
            if self.S is not None:
                check_no_breach(explain(self.T, self.R, self.S))

    def _patterns(self) -> dict[str, Tensor | None]:
        return {"R": self.R, "T": self.T, "S": self.S}

    def node_sizes(self, features: int) -> tuple[int, ...]:
        """The given sizes, or equal shares of the features."""
        if self.sizes is not None:
            return self.sizes
        if features % self.nodes:
            raise OptionError(
                f"{features} features cannot be split equally among {self.nodes} nodes; give sizes."
            )
        return (features // self.nodes,) * self.nodes

    def to_config(self) -> dict[str, Any]:
        """The arguments, in a form that JSON can hold."""
        config: dict[str, Any] = {}
        for name, pattern in self._patterns().items():
            config[name] = None if pattern is None else pattern.int().tolist()
        config["sizes"] = None if self.sizes is None else list(self.sizes)
        return config

    def __repr__(self) -> str:
        used = self.R.reshape(-1, self.nodes, self.nodes).any(0)
        return f"Sparsity({self.nodes} nodes, {int(used.sum()) - self.nodes} links in R)"


def node_sizes(sizes: Sequence[int], nodes: int) -> tuple[int, ...]:
    """One size >= 1 for each node, checked."""
    if isinstance(sizes, int) or len(sizes) != nodes:
        raise OptionError(
            f"sizes must be {nodes} whole numbers, one per node, but got {sizes!r}."
        )
    return tuple(positive_int("the size of a node", size) for size in sizes)


def _check_diagonal(name: str, pattern: Tensor) -> None:
    if not bool(pattern.diagonal(dim1=-2, dim2=-1).all()):
        raise OptionError(
            f"every node is its own neighbour, but {name} has a 0 on its diagonal; use {name} + I."
        )


# Patterns for a graph. For T = I the condition says that the nodes of each row of R are pairwise
# linked: each row is a clique.


def design(S: Any, sizes: Sequence[int] | None = None) -> Sparsity:
    """Design patterns for T = I that are local to the graph S and leave many weights free.

    Only links in both directions are used, because gradients travel back along the path of the
    states. Nodes in the same component of S always reach each other, even if this leaves fewer
    weights free.

    Args:
        S: the graph `(M, M)`, with ones on its diagonal.
        sizes: the number of features of each node; by default 1.

    Returns:
        The patterns, for the option `sparsity` of a network.

    Examples:
        >>> from hdnn import sparsity
        >>> chain = [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
        >>> sparsity.design(chain).R.int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """
    S = binary("S", S)
    if S.ndim == 3:
        raise OptionError(
            f"S must be (M, M), one graph, but has shape {tuple(S.shape)}."
        )
    _check_diagonal("S", S)
    M = len(S)
    weight = [1] * M if sizes is None else node_sizes(sizes, M)
    near = [set(row) for row in links_of(S & S.mT)]
    R = torch.zeros(M, M, dtype=torch.bool)
    for node, row in _joining_rows(near, weight).items():
        R[node, list(row)] = True
    return Sparsity(R, torch.eye(M), S, sizes)


def _joining_rows(
    near: list[set[int]], weight: Sequence[int]
) -> dict[int, set[int]]:
    """A clique around each node; the nodes of a connected graph are joined by them."""
    largest_first = sorted(range(len(near)), key=lambda node: -weight[node])
    rows: dict[int, set[int]] = {}
    joined: set[int] = set()
    for start in largest_first:
        queue = [(start, start)]
        for node, source in queue:
            if node in rows:
                continue
            row = _clique(near, weight, {node})
            if not row & joined:
                row = _clique(near, weight, {node, source})
            rows[node] = row
            joined |= row
            queue += [(neighbour, node) for neighbour in sorted(near[node])]
    return rows


def _clique(
    near: list[set[int]], weight: Sequence[int], clique: set[int]
) -> set[int]:
    """A clique around linked nodes, built one node after the other."""
    candidates = set.intersection(*(near[node] for node in clique)) - clique
    while candidates:
        # The node that leaves the most choice; among equals, the first.
        best = max(
            sorted(candidates),
            key=lambda node: sum(weight[u] for u in near[node] & candidates),
        )
        clique = clique | {best}
        candidates = candidates & near[best] - {best}
    return clique
