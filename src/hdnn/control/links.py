"""Who is linked with whom: edges of a graph, coloured so that those of a colour share no agent."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
from torch import Tensor

from hdnn.base.listed import listed
from hdnn.errors import SparsityError, quoted
from hdnn.sparsity import Sparsity, binary

Edges = tuple[tuple[int, int], ...]


def edges(links: Any, agents: int) -> Edges:
    """Pairs (i, k), i < k, of a list of pairs, a symmetric 0-1 matrix or a `hdnn.Sparsity`."""
    return coloured({(min(pair), max(pair)) for pair in pairs_of(links, agents)})


def pairs_of(links: Any, agents: int) -> list[tuple[int, int]]:
    """The same in the order, and from the ends, that they are given; a matrix row by row."""
    if links is None:
        return []
    if isinstance(links, Sparsity):
        links = links.R if links.S is None else links.S
    if isinstance(links, Tensor | np.ndarray):
        return _of_pattern(links, agents)
    pairs: list[tuple[int, int]] = []
    given = listed(links)
    for shown in [links] if given is None else given:
        pair = listed(shown) or []
        known = [int(i) for i in pair if isinstance(i, Integral) and 0 <= int(i) < agents]
        if len(pair) != 2 or len(set(known)) != 2:
            raise SparsityError(
                f"links must be pairs of two of the agents 0 .. {agents - 1}, "
                f"but one is {quoted(shown)}."
            )
        pairs.append((known[0], known[1]))
    return pairs


def _of_pattern(links: Any, agents: int) -> list[tuple[int, int]]:
    pattern = binary("links", links)
    if pattern.shape != (agents, agents):
        raise SparsityError(
            f"links must be ({agents}, {agents}), a row an agent, but are {tuple(pattern.shape)}."
        )
    if not bool((pattern == pattern.mT).all()):
        raise SparsityError("links must be symmetric: neighbours move each other; use S | S.T.")
    return [(i, k) for i, k in pattern.triu(1).nonzero().tolist()]


def coloured(pairs: Iterable[tuple[int, int]]) -> Edges:
    """The pairs colour by colour: each gets the first colour that neither of its ends has."""
    used: dict[int, set[int]] = {}
    colours = []
    for i, k in sorted(pairs):
        taken = used.setdefault(i, set()) | used.setdefault(k, set())
        colour = next(c for c in range(len(taken) + 1) if c not in taken)
        used[i].add(colour)
        used[k].add(colour)
        colours.append((colour, i, k))
    return tuple((i, k) for _, i, k in sorted(colours))
