"""Graphs that were tried, with their costs and the scores of links; kept in a file, or not."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hdnn.base.files import as_path, read_json, write_atomically
from hdnn.errors import CheckpointError, ShapeError, TrainingError, as_float, quoted

FORMAT = 1

Link = tuple[int, int]
Links = tuple[Link, ...]


class LinkTrial(NamedTuple):
    """A graph that `choose_links` tried, and what it cost.

    Args:
        links: pairs (i, k), i < k, in order.
        cost: without the price of links.

    Examples:
        >>> from hdnn import sparsity
        >>> found = sparsity.choose_links(3, lambda links: float(len(links)), links=3)
        >>> found.history[0]
        LinkTrial(links=((0, 1), (0, 2), (1, 2)), cost=3.0)
    """

    links: Links
    cost: float


class Trials:
    """Costs and scores, each computed once."""

    def __init__(
        self,
        cost: Callable[[Links], float],
        agents: int,
        candidates: Links,
        file: str | os.PathLike[str] | None,
    ) -> None:
        self.candidates, self._cost = candidates, cost
        self._about = {
            "format": FORMAT,
            "agents": agents,
            "candidates": [list(link) for link in candidates],
            "identity": str(getattr(cost, "identity", "")),
        }
        self._path = None if file is None else as_path(file)
        self._costs: dict[Links, float] = {}
        self._scores: list[float] | None = None
        if self._path is not None and self._path.exists():
            self._read(self._path)
        self._write()  # now, so that a file that cannot be written costs no training

    def cost(self, links: Links) -> float:
        """What the links cost."""
        if links not in self._costs:
            self._costs[links] = _finite(f"the cost of {len(links)} links", self._cost(links))
            self._write()
        return self._costs[links]

    def scores(self, relaxed: Callable[[Links], Sequence[float]]) -> dict[Link, float]:
        """What each candidate is worth."""
        if self._scores is None:
            given = list(relaxed(self.candidates))
            if len(given) != len(self.candidates):
                raise ShapeError(
                    f"relaxed must return a score for each of the {len(self.candidates)} "
                    f"candidates, but returned {len(given)}."
                )
            self._scores = [_finite("a score of relaxed", score) for score in given]
            self._write()
        return dict(zip(self.candidates, self._scores, strict=True))

    def _write(self) -> None:
        if self._path is None:
            return
        tried = [{"links": list(links), "cost": cost} for links, cost in self._costs.items()]
        content = {**self._about, "scores": self._scores, "tried": tried}
        write_atomically(self._path, json.dumps(content).encode())

    def _read(self, path: Path) -> None:
        kept: Any = read_json(path)
        try:
            about = {name: kept[name] for name in self._about}
            costs = {
                tuple((int(i), int(k)) for i, k in trial["links"]): float(trial["cost"])
                for trial in kept["tried"]
            }
            scores = kept["scores"]
            self._scores = None if scores is None else [float(score) for score in scores]
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is no file of a search for links.") from error
        for name, ours in self._about.items():
            if about[name] != ours:
                raise CheckpointError(
                    f"{path} is of a search with other {name}: it has {quoted(about[name])}, but "
                    f"this one {quoted(ours)}; give another file."
                )
        self._costs = costs


def _finite(what: str, given: Any) -> float:
    number = as_float(given.item() if hasattr(given, "item") else given)
    if number is None or not math.isfinite(number):
        raise TrainingError(f"{what} must be a finite number, but is {quoted(given)}.")
    return number
