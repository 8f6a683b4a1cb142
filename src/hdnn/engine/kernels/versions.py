"""Where the versions of a state lie in memory: each step writes a new one of the part it moves.

The E steps of a layer fill E places in a row, forwards and backwards alike. So what the e-th steps
of some layers have read, or got as gradients, is every E-th place: a batch of matrices, without a
copy. Before the first layer (or behind the last, backwards) E more places hold what the pass
starts from.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor


class Places:
    """Which places the steps of a layer read and write, for the first layer of a span.

    Those of the next layers are `steps` further on, each.
    """

    def __init__(self, turns: tuple[int, ...]) -> None:
        self.turns = turns or (0,)
        self.parts = 2 if turns else 1
        self.steps = E = len(self.turns)
        sources = [(part - 1) % self.parts for part in self.turns]
        # Forwards, step e writes place E + e, after the E places of the start.
        self.start = [self._last(self.turns, part, E) for part in range(self.parts)]
        self.read = [self._last(self.turns, sources[e], E + e) for e in range(E)]
        # Backwards, step e writes the gradient of its source, and the state that it undoes, to
        # place e; the E places behind the last layer are those of the start.
        self.start_grad = [self._next(sources, part, -1) for part in range(self.parts)]
        self.read_grad = [self._next(sources, self.turns[e], e) for e in range(E)]
        self.start_undone = [self._next(self.turns, part, -1) for part in range(self.parts)]
        self.read_undone = [self._next(self.turns, sources[e], e) for e in range(E)]

    def _last(self, parts: Any, part: int, before: int) -> int:
        """The last step before `before` that has to do with a part, in two layers."""
        return max(k for k in range(before) if parts[k % self.steps] == part)

    def _next(self, parts: Any, part: int, after: int) -> int:
        """The first step after `after`, in two layers."""
        return min(k for k in range(after + 1, 2 * self.steps) if parts[k % self.steps] == part)


places = functools.lru_cache(maxsize=64)(Places)


class Ring(NamedTuple):
    """What the weight gradients of a few layers are made of; u and z are by step of a layer."""

    u: list[Tensor]
    z: list[Tensor]
    sums: list[Tensor]
    dots: list[Tensor]
    grads: Tensor
    states: Tensor | None  # only where they are rebuilt

    def cut(self, rows: slice, tile: int) -> Ring:
        """The part of some samples, which begin with a tile of so many."""
        tiles = slice(rows.start // tile, -(-rows.stop // tile))
        return Ring(
            [t[:, rows] for t in self.u],
            [t[:, rows] for t in self.z],
            [t[:, tiles] for t in self.sums],
            [t[:, tiles] for t in self.dots],
            self.grads[:, rows],
            None if self.states is None else self.states[:, rows],
        )
