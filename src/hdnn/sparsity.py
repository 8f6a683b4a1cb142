"""Which node may talk to which: block patterns R of K and T of X or J, and the locality condition.

Nodes are numbered from 0. Patterns are `(M, M)` matrices of 0 and 1, or `(N, M, M)` for one a
layer, as tensors, arrays or nested lists. A layer computes `K^T sigma(K y + b)`, so two nodes meet
if a row of R has both. Updates need linked nodes only if `T R^T R + R^T R T <= S`, where S is the
graph: S(i, k) = 1 if node i hears node k (eq:sparsity_invariance).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import OptionError, choose, positive_int, require

__all__ = [
    "Breach",
    "Explanation",
    "Sparsity",
    "components",
    "dependency",
    "design",
    "explain",
    "free_weights",
    "from_networkx",
    "is_local",
    "mask",
]

Links = Sequence[
    Collection[int]
]  # the neighbours of each node, itself among them

MOST_PAIRS = 5 * 10**7  # pairs of nodes that rows of R link: more take minutes
CLIQUE_WORK = 10_000  # cliques that are tried around one node


def binary(name: str, pattern: Any) -> Tensor:
    """A pattern as a boolean tensor (M, M) or (N, M, M)."""
    try:
        A = torch.as_tensor(pattern, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptionError(
            f"{name} must be an (M, M) array of 0 and 1: {error}."
        ) from error
    if A.ndim not in (2, 3) or A.shape[-1] != A.shape[-2] or A.numel() == 0:
        raise OptionError(
            f"{name} must be (M, M), or (N, M, M) for a pattern a layer, "
            f"but has shape {tuple(A.shape)}."
        )
    if not bool(((A == 0) | (A == 1)).all()):
        raise OptionError(f"{name} must hold 0 and 1 only; use (matrix != 0).")
    return A.bool()


def mask(
    R: Tensor, rows: Sequence[int], columns: Sequence[int] | None = None
) -> Tensor:
    """The entries that the pattern R leaves free, where node i has `rows[i]` rows.

    Args:
        R: a pattern `(..., M, M)`.
        rows: the rows of each node.
        columns: the columns of each node; by default the same.

    Returns:
        True where an entry is free, `(..., sum(rows), sum(columns))`.
    """
    heights = torch.tensor(rows, device=R.device)
    widths = (
        heights if columns is None else torch.tensor(columns, device=R.device)
    )
    return R.bool().repeat_interleave(heights, -2).repeat_interleave(widths, -1)


def dependency(T: Any, R: Any) -> Tensor:
    """The nodes that each node's updates depend on, forward and backward: `T R^T R + R^T R T`.

    Args:
        T: the pattern of X or J.
        R: the pattern of K.

    Returns:
        True at (i, k) where node i needs node k.

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
    near = (R.mT.float() @ R.float() > 0).float()
    return (T.float() @ near > 0) | (near @ T.float() > 0)


def is_local(T: Any, R: Any, S: Any) -> bool:
    """True if updates need linked nodes only: `T R^T R + R^T R T <= S`, in every layer.

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


def components(T: Any, R: Any) -> list[list[int]]:
    """The connected components: the groups of nodes that hear of each other, at any depth.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> sparsity.components(torch.eye(3), [[1, 1, 0], [1, 1, 0], [0, 0, 1]])
        [[0, 1], [2]]
    """
    needed = dependency(T, R)
    needed = needed.reshape(-1, *needed.shape[-2:]).any(0)
    return groups(links_of(needed | needed.mT))


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
    """For each node, the nodes that have it in their rows."""
    result: list[list[int]] = [[] for _ in links]
    for i, row in enumerate(links):
        for k in row:
            result[k].append(i)
    return result


# The locality condition


@dataclass(frozen=True)
class Breach:
    """A node that needs another one which the graph does not link to it.

    Attributes:
        node: the number i of the node.
        needs: the number k of the other.
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
        """One line that says what is needed and why; `label` gives a node its name."""
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
    """All breaches of the locality condition, a line for each; empty if the patterns are local."""

    def __str__(self) -> str:
        return (
            "\n".join(map(str, self))
            or "local: all updates need neighbours only"
        )


def explain(T: Any, R: Any, S: Any) -> Explanation:
    """Where and why the locality condition fails: which node needs which, and by which path.

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
    patterns = [binary(name, A) for name, A in (("T", T), ("R", R), ("S", S))]
    for (a, A), (b, B) in combinations(zip("TRS", patterns, strict=True), 2):
        _check_alike(a, A, b, B)
    layered = any(A.ndim == 3 for A in patterns)
    stacks = torch.broadcast_tensors(
        *(A.reshape(-1, *A.shape[-2:]) for A in patterns)
    )
    result: list[Breach] = []
    for layer, alike in enumerate(zip(*stacks, strict=True)):
        result += breaches(
            *map(links_of, alike), layer=layer if layered else None
        )
    return Explanation(result)


def breaches(
    T: Links, R: Links, S: Links, layer: int | None = None
) -> Iterator[Breach]:
    """The breaches of the locality condition, for patterns as lists of neighbours."""
    pairs = sum(len(row) ** 2 for row in R)
    if pairs > MOST_PAIRS:
        raise OptionError(
            f"rows of R link {pairs} pairs of nodes, which is too much to check; the longest row "
            f"has {max(map(len, R))} nodes: give it fewer links."
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
    pairs = dict.fromkeys((breach.node, breach.needs) for breach in found)
    shown = ", ".join(f"{label(i)} -> {label(k)}" for i, k in list(pairs)[:4])
    more = " .." if len(pairs) > 4 else ""
    raise OptionError(
        f"the patterns break the locality condition T R^T R + R^T R T <= S: nodes would need "
        f"{shown}{more}, which S does not link ({found[0].text(label)}); remove links from R or T, "
        "or add links to S. hdnn.sparsity.explain lists them all."
    )


def _check_alike(first: str, a: Tensor, name: str, b: Tensor) -> None:
    """Raise unless two patterns have the same nodes and, where stacked, equally many layers."""
    if a.shape[-1] != b.shape[-1]:
        raise OptionError(
            f"{name} is for {b.shape[-1]} nodes, but {first} is for {a.shape[-1]}."
        )
    if a.ndim == b.ndim == 3 and len(a) != len(b):
        raise OptionError(
            f"{name} is for {len(b)} layers, but {first} is for {len(a)}."
        )


class Sparsity:
    """Block patterns of a distributed network: R of K, T of X or J.

    A network takes it as its option `sparsity`; entries outside the patterns do not exist. The
    sizes of nodes add up to n/2 if node i owns the pair `(p[i], q[i])`, or to n if it owns the i-th
    piece of y (forward Euler and midpoint only).

    Args:
        R: the pattern of K, with ones on its diagonal.
        T: the pattern of X or J, symmetric; by default what X or J uses.
        S: the graph; if given, the locality condition is checked.
        sizes: the features of each node; by default all alike.

    Raises:
        OptionError: if the patterns or sizes do not fit together, or break the condition.

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
        for name, pattern in (("R", self.R), ("T", self.T), ("S", self.S)):
            if pattern is not None:
                _check_alike("R", self.R, name, pattern)
                _check_diagonal(name, pattern)
        if self.T is not None:
            if not bool((self.T.mT == self.T).all()):
                raise OptionError(
                    "T must be symmetric, because J is skew-symmetric; use T + T^T."
                )
            self.check_local(self.T)

    def check_local(self, T: Tensor) -> None:
        """Raise an `OptionError` if S is given and lacks links that updates with this T need."""
        if self.S is not None:
            check_no_breach(explain(T, self.R, self.S))

    def node_sizes(self, features: int) -> tuple[int, ...]:
        """The sizes as given, or else equal shares of the features."""
        if self.sizes is not None:
            return self.sizes
        if features % self.nodes:
            raise OptionError(
                f"{features} features cannot be shared alike by {self.nodes} nodes; give sizes."
            )
        return (features // self.nodes,) * self.nodes

    def to_config(self) -> dict[str, Any]:
        """The arguments, as JSON can hold them."""
        config: dict[str, Any] = {}
        for name, pattern in (("R", self.R), ("T", self.T), ("S", self.S)):
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
            f"sizes must be {nodes} whole numbers, one a node, but got {sizes!r}."
        )
    return tuple(positive_int("the size of a node", size) for size in sizes)


def _check_diagonal(name: str, pattern: Tensor) -> None:
    if not bool(pattern.diagonal(dim1=-2, dim2=-1).all()):
        raise OptionError(
            f"every node is its own neighbour, but {name} has a 0 on its diagonal; use {name} + I."
        )


def free_weights(sparsity: Sparsity, *, layers: int = 1) -> int:
    """The number of free weights of K_p and K_q in N layers and of one X.

    Args:
        sparsity: the patterns; without sizes every node counts as one feature.
        layers: N, if all layers share one R.

    Examples:
        >>> from hdnn import sparsity
        >>> sparsity.free_weights(sparsity.Sparsity(R=[[1, 0], [1, 1]]), layers=4)  # 2 * 4 * 3 + 2
        26
    """
    sizes = sparsity.sizes or (1,) * sparsity.nodes
    N = layers if sparsity.R.ndim == 2 else 1
    T = torch.eye(sparsity.nodes) if sparsity.T is None else sparsity.T
    return 2 * N * int(mask(sparsity.R, sizes).sum()) + int(
        mask(T, sizes).sum()
    )


# Patterns for a graph. For a fixed T the condition says that each row of R is a set of nodes which
# are pairwise near: all T-neighbours of either are linked to the other. So the best R has, row by
# row, the heaviest clique of near nodes around its node, and only T has to be searched for.


def design(
    S: Any,
    sizes: Sequence[int] | None = None,
    *,
    keep: str = "R",
    layers: int = 1,
) -> Sparsity:
    """Patterns that need no more than the graph S and leave many weights free.

    Only links both ways can be used, because gradients go back where states came from. Nodes that S
    joins hear of each other; rows of R give up as many weights as that takes.

    Args:
        S: the graph `(M, M)`, with ones on its diagonal.
        sizes: the features of each node; by default one each.
        keep: "R" finds the R with most free weights for T = I; "T" takes R = I and all links for
            T, for networks that learn X or J; "both" searches T and R together, until no change of
            a single link of T frees more weights.
        layers: N of the network, which "both" counts weights for.

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
    choose("keep", keep, ("R", "T", "both"))
    S = binary("S", S)
    if S.ndim == 3:
        raise OptionError(
            f"S must be (M, M), one graph, but has shape {tuple(S.shape)}."
        )
    _check_diagonal("S", S)
    eye = torch.eye(len(S), dtype=torch.bool)
    if keep == "T":
        return Sparsity(eye, S & S.mT, S, sizes)
    weight = [1] * len(S) if sizes is None else list(node_sizes(sizes, len(S)))
    search = _Search([set(row) for row in links_of(S & S.mT)], weight, layers)
    T = [{i} for i in range(len(S))]
    free, R = search.best_R(T)
    if keep == "both":
        climbs = [
            search.climb(T, free, R),
            search.climb(search.S, *search.best_R(search.S)),
        ]
        _, R, T = max(climbs, key=lambda climb: climb[0])
    return Sparsity(_matrix(R), _matrix(T), S, sizes)


def _matrix(rows: Sequence[set[int]]) -> Tensor:
    pattern = torch.zeros(len(rows), len(rows), dtype=torch.bool)
    for i, row in enumerate(rows):
        pattern[i, list(row)] = True
    return pattern


Rows = list[set[int]]


class _Search:
    """The search for patterns of one graph, whose links are all mutual."""

    def __init__(self, S: Rows, weight: list[int], layers: int) -> None:
        self.S = S
        self.weight = weight
        self.layers = layers

    def climb(self, T: Rows, free: int, R: Rows) -> tuple[int, Rows, Rows]:
        """Change one link of T at a time, as long as that frees weights."""
        links = [
            (i, k) for i, k in combinations(range(len(T)), 2) if k in self.S[i]
        ]
        better = True
        while better:
            better = False
            for i, k in links:
                trial = [set(row) for row in T]
                trial[i] ^= {k}
                trial[k] ^= {i}
                trial_free, trial_R = self.best_R(trial)
                if trial_free > free:
                    free, R, T = trial_free, trial_R, trial
                    better = True
        return free, R, T

    def best_R(self, T: Rows) -> tuple[int, Rows]:
        """The R for a T, and the free weights; -1 if it cannot join what S joins."""
        linked = [set.intersection(*(self.S[a] for a in row)) for row in T]
        near = [
            {v for v in row if a in linked[v]} for a, row in enumerate(linked)
        ]
        R = [self.clique(near, v) for v in range(len(T))]
        self.join(R, T, near)
        needed = [
            set().union(*(R[a] | T[a] for a in row)) for row in transposed(R)
        ]
        if len(groups(needed)) > len(groups(self.S)):
            return -1, R
        return 2 * self.layers * self.entries(R) + self.entries(T), R

    def entries(self, rows: Rows) -> int:
        """The entries of a matrix with this pattern."""
        return sum(self.row_weight(v, row) for v, row in enumerate(rows))

    def row_weight(self, v: int, row: set[int]) -> int:
        return self.weight[v] * sum(self.weight[u] for u in row)

    def clique(self, near: Rows, v: int, also: int | None = None) -> set[int]:
        """The heaviest clique with v, and another node; of equals, the one with the first nodes."""
        best = {v}
        among = near[v]
        if also is not None:
            best = {v, also}
            among = among & near[also]
        most = sum(self.weight[u] for u in best)
        stack = [(best, sorted(among - best))]
        work = 0
        while stack and work < CLIQUE_WORK:
            work += 1
            clique, candidates = stack.pop()
            total = sum(self.weight[u] for u in clique)
            if total > most:
                best = clique
                most = total
            if total + sum(self.weight[u] for u in candidates) > most:
                u, *others = candidates
                stack.append((clique, others))
                stack.append(
                    (clique | {u}, [w for w in others if w in near[u]])
                )
        return set(best)

    def join(self, R: Rows, T: Rows, near: Rows) -> None:
        """Replace rows of R, at the least loss, until R and T join all nodes they can.

        Nodes outside the group take in a member of it, so the group only grows.
        """
        reached: set[int] = set()
        while len(reached) < len(R):
            options = []
            for v in set(range(len(R))) - reached:
                for u in near[v] & reached:
                    row = self.clique(near, v, u)
                    loss = self.row_weight(v, R[v]) - self.row_weight(v, row)
                    options.append((loss, v, sorted(row)))
            if options:
                _, v, row = min(options)
                R[v] = set(row)
            else:
                v = min(set(range(len(R))) - reached)
            reached |= self.group(R, T, reached | {v})

    def group(self, R: Rows, T: Rows, nodes: set[int]) -> set[int]:
        """All nodes that hear of these through T and R."""
        size = 0
        while len(nodes) != size:
            size = len(nodes)
            for row, neighbours in zip(R, T, strict=True):
                if row & nodes:
                    nodes |= row | neighbours
        return nodes


def from_networkx(
    graph: Any, *, size: str | None = None, keep: str = "R"
) -> Sparsity:
    """Patterns for a networkx graph: node i is the i-th of `graph.nodes`, and its own neighbour.

    An edge of a `DiGraph` from u to v lets v hear u.

    Args:
        graph: a networkx graph.
        size: the attribute with the features of a node; by default all have one.
        keep: as in `design`.

    Examples:
        >>> import networkx
        >>> from hdnn import sparsity
        >>> sparsity.from_networkx(networkx.cycle_graph(8))
        Sparsity(8 nodes, 8 links in R)
    """
    networkx = require("networkx", extra="graph")
    heard = torch.from_numpy(
        networkx.to_numpy_array(graph, dtype=bool, weight=None)
    ).mT
    S = heard | torch.eye(len(graph), dtype=torch.bool)
    if size is None:
        return design(S, keep=keep)
    sizes = networkx.get_node_attributes(graph, size)
    if len(sizes) < len(graph):
        raise OptionError(
            f"not all nodes have an attribute {size!r}; give each one its features."
        )
    return design(S, [sizes[node] for node in graph], keep=keep)
