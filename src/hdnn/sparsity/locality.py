"""Which node needs which: the locality condition T R^T R + R^T R T <= S on neighbour lists.

The work is counted before it is done: a star becomes a complete graph in two steps, so even a small
file can describe a graph with more pairs of nodes than fit into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from hdnn.errors import SparsityError

Links = tuple[tuple[int, ...], ...]  # for each node, the nodes in its row, itself included

WORK = 2 * 10**8  # steps from node to node: half a minute at the most
CHUNK = 2**20  # steps at once
DENSE = 4096  # nodes: up to this many, a product of matrices is quicker than many steps


class Rows(NamedTuple):
    """A pattern: row i is `nodes[first[i] : first[i + 1]]`, in ascending order."""

    first: np.ndarray
    nodes: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.first)

    def row(self, i: int) -> np.ndarray:
        return self.nodes[self.first[i] : self.first[i + 1]]

    def sizes_of(self, nodes: np.ndarray) -> np.ndarray:
        return self.first[nodes + 1] - self.first[nodes]

    @property
    def keys(self) -> np.ndarray:
        """One number for each link, in ascending order."""
        M = len(self.first) - 1
        return np.repeat(np.arange(M) * M, self.sizes) + self.nodes

    def sums(self, values: np.ndarray) -> np.ndarray:
        """For each node, the sum of the values of the nodes in its row."""
        total = np.concatenate([[0], np.cumsum(values[self.nodes], dtype=np.float64)])
        return total[self.first[1:]] - total[self.first[:-1]]


def rows_of(links: Links) -> Rows:
    """From lists of neighbours."""
    sizes = np.fromiter(map(len, links), np.int64, len(links))
    first = np.concatenate([[0], np.cumsum(sizes)])
    return Rows(first, np.fromiter(chain.from_iterable(links), np.int64, int(first[-1])))


def of_keys(keys: np.ndarray, nodes: int) -> Rows:
    """From numbers i M + k of links, in ascending order."""
    sizes = np.bincount(keys // nodes, minlength=nodes)
    return Rows(np.concatenate([[0], np.cumsum(sizes)]), keys % nodes)


def of_matrix(matrix: Any) -> Rows:
    """From a binary matrix."""
    found = np.asarray(matrix)
    return of_keys(np.flatnonzero(found), len(found))


def links_of_rows(rows: Rows) -> Links:
    """As lists of neighbours."""
    nodes, first = rows.nodes.tolist(), rows.first.tolist()
    return tuple([tuple(nodes[a:b]) for a, b in pairwise(first)])


def once(keys: np.ndarray) -> np.ndarray:
    """Each number once, in ascending order; np.unique is several times slower."""
    keys = np.sort(keys)
    new = np.ones(len(keys), dtype=bool)
    new[1:] = keys[1:] != keys[:-1]
    return keys[new]


def transpose(rows: Rows) -> Rows:
    """For each node, the nodes whose rows contain it."""
    M = len(rows.first) - 1
    order = np.argsort(rows.nodes, kind="stable")
    owners = np.repeat(np.arange(M), rows.sizes)
    sizes = np.bincount(rows.nodes, minlength=M)
    return Rows(np.concatenate([[0], np.cumsum(sizes)]), owners[order])


def follow(rows: Rows, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All nodes one link further, and for each the position in `at` that it was reached from."""
    counts = rows.sizes_of(at)
    begin = np.cumsum(counts) - counts
    where = np.repeat(rows.first[at] - begin, counts) + np.arange(int(counts.sum()))
    return np.repeat(np.arange(len(at)), counts), rows.nodes[where]


@dataclass(frozen=True)
class Breach:
    """Node `node` needs node `needs` in its forward or backward update, but S does not link them.

    Attributes:
        node: the number i of the node.
        needs: the number k of the other.
        forward: whether the forward update needs it.
        backward: whether the backward update does.
        path: i, a, l, k with T(i, a) = R(l, a) = R(l, k) = 1 where the forward update needs it, and
            i, l, a, k with R(l, i) = R(l, a) = T(a, k) = 1 where only the backward update does.
        layer: the number of the layer, where layers have patterns of their own, else None.

    Examples:
        >>> import torch
        >>> from hdnn import sparsity
        >>> breach, _ = sparsity.explain(torch.eye(2), torch.ones(2, 2), torch.eye(2))
        >>> print(breach)
        node 0 needs node 1 forward and backward: row 0 of R has 0 and 1
        >>> breach.path
        (0, 0, 0, 1)
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
        """What breaks the condition and why; `label` gives each node a name, else its number."""
        i, a, row, k = map(label, self.path if self.forward else self.path[::-1])
        why = [f"T links {i} and {a}"] * (a != i)
        why += [f"row {row} of R has {a} and {k}"] * (a != k or not why)
        ways = [way for way in ("forward", "backward") if getattr(self, way)]
        layer = "" if self.layer is None else f"layer {self.layer}: "
        node, needs = label(self.node), label(self.needs)
        need = f"{layer}node {node} needs node {needs} {' and '.join(ways)}"
        return f"{need}: {', and '.join(why)}"


class Needs:
    """T R^T R + R^T R T, node by node, and which of its links S does not have."""

    def __init__(self, T: Rows, R: Rows, S: Rows | None = None) -> None:
        self.T, self.R, self.S, self.C = T, R, S, transpose(R)
        self.nodes = len(R.first) - 1
        self.ways = (T, self.C, R), (self.C, R, T)  # forward and backward, three steps each
        # A set of nodes has each of them once, so no step goes along more links than there are.
        self.cost = np.zeros(self.nodes)
        for steps in self.ways:
            for k, last in enumerate(steps):
                reached = np.ones(self.nodes)
                for step in reversed(steps[: k + 1]):
                    reached = step.sums(reached)
                self.cost += np.minimum(reached, len(last.nodes))
        self.work = float(self.cost.sum())

    def sets(self) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
        """For some nodes i at a time the cost, and the keys i M + k needed forward and backward."""
        done, total = 0, np.concatenate([[0.0], np.cumsum(self.cost)])
        while done < self.nodes:
            end = max(done + 1, int(np.searchsorted(total, total[done] + CHUNK, "right")) - 1)
            forward, backward = (self._reach(np.arange(done, end), *way) for way in self.ways)
            yield float(total[end] - total[done]), forward, backward
            done = end

    def _reach(self, start: np.ndarray, *steps: Rows) -> np.ndarray:
        keys = start * self.nodes + start
        for step in steps:
            origin = keys // self.nodes
            position, reached = follow(step, keys % self.nodes)
            keys = once(origin[position] * self.nodes + reached)
        return keys

    def rows(self) -> Rows:
        """All links as one pattern, if they are not too many."""
        if self.work > WORK:
            raise SparsityError(f"{self.crowd()}, which is too much to list.")
        keys = [once(np.concatenate(both)) for _, *both in self.sets()]
        return of_keys(np.concatenate(keys), self.nodes)

    def crowd(self) -> str:
        """The longest row of R, and how many pairs of nodes it links, in words."""
        row = int(self.R.sizes.argmax())
        size = int(self.R.sizes[row])
        pairs = size * (size - 1) // 2
        return f"row {row} of R has {size} nodes, which all need each other: {pairs} pairs"

    def breaches(self, most: float = np.inf, work: float = WORK) -> Breaches:
        """The links that S does not have: the first ones, and how many there are.

        If that is too much work, it stops early, and sooner if some were found.
        """
        assert self.S is not None
        found, spent, links = Breaches(self), 0.0, self.S.keys
        by_matrices = self.work > work and self.nodes <= DENSE
        for cost, forward, backward in self._by_matrices() if by_matrices else self.sets():
            keys = once(np.concatenate([forward, backward]))
            keys = keys[~_within(keys, links)]
            found.count += len(keys)
            if len(keys) and len(found.pairs) < most:
                some = keys[: int(min(most - len(found.pairs), len(keys)))]
                ends = (part.tolist() for part in divmod(some, self.nodes))
                ways = (_within(some, way).tolist() for way in (forward, backward))
                found.pairs += zip(*ends, *ways, strict=True)
            spent += cost
            if self.work > work and spent > (work / 40 if found.count else work):
                found.complete = by_matrices
                break
        if not (found.count or found.complete):
            raise SparsityError(
                f"{self.crowd()}; whether S has them all cannot be found in a short time: give "
                "rows of R that are shorter."
            )
        return found

    def _by_matrices(self) -> Iterator[tuple[float, np.ndarray, np.ndarray]]:
        """The same for all nodes at once."""
        T, R = (np.zeros((self.nodes, self.nodes), dtype=np.float32) for _ in "TR")
        for matrix, rows in ((T, self.T), (R, self.R)):
            matrix.reshape(-1)[rows.keys] = 1
        near = np.minimum(R.T @ R, 1)
        yield self.work, np.flatnonzero(T @ near), np.flatnonzero(near @ T)

    def path(self, i: int, k: int, forward: bool) -> tuple[int, int, int, int]:
        """The first path by which node i needs node k, with a = i if possible."""
        if not forward:  # seen from its other end, a backward path is a forward one
            a, row = self._between(self._T_back, k, i)
            return i, row, a, k
        a, row = self._between(self.T, i, k)
        return i, a, row, k

    def _between(self, T: Rows, i: int, k: int) -> tuple[int, int]:
        """The a and l with T(i, a) = R(l, a) = R(l, k) = 1, from the end with fewer links."""
        near, holding = T.row(i), self.C.row(k)
        if self.C.sizes_of(near).sum() < self.R.sizes_of(holding).sum():
            position, row = follow(self.C, near)
            a = near[position]
            good = _within(row, holding)
        else:
            position, a = follow(self.R, holding)
            row = holding[position]
            good = _within(a, near)
        a, row = a[good], row[good]
        best = i if (a == i).any() else int(a.min())
        return best, int(row[a == best].min())

    @cached_property
    def _T_back(self) -> Rows:
        return transpose(self.T)


@dataclass
class Breaches:
    """Some pairs that break the condition (node, needs, forward, backward), and their `count`.

    Unless `complete`, the search stopped early, and there are more than `count`.
    """

    needs: Needs
    pairs: list[tuple[int, int, bool, bool]] = field(default_factory=list)
    count: int = 0
    complete: bool = True

    def explained(self, layer: int | None = None) -> Iterator[Breach]:
        """Each pair with a path."""
        for i, k, forward, backward in self.pairs:
            yield Breach(i, k, forward, backward, self.needs.path(i, k, forward), layer)

    @property
    def why(self) -> str:
        """Why not all could be counted, if so."""
        return "" if self.complete else f" ({self.needs.crowd()})"


def broken(
    pairs: Sequence[tuple[int, int]],
    why: str,
    advice: str = "",
    label: Callable[[int], str] = str,
) -> SparsityError:
    """The error for patterns that break the condition, with some of the pairs."""
    shown = ", ".join(f"{label(i)} -> {label(k)}" for i, k in pairs[:4])
    return SparsityError(
        "the patterns break the locality condition T R^T R + R^T R T <= S: nodes would need "
        f"{shown}{' ...' if len(pairs) > 4 else ''}, which S does not link{why}; remove edges from "
        f"R or T, or add links to S.{advice}"
    )


def _within(keys: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Whether each key is one of the known ones, which are in ascending order."""
    if not len(known):
        return np.zeros(len(keys), dtype=bool)
    return known[np.searchsorted(known, keys).clip(max=len(known) - 1)] == keys
