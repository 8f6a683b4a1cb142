"""Graphs that were tried, with their costs and the scores of links; kept in a file, or not."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        self._keep()  # now, so that a file that cannot be written costs no training

    def cost(self, links: Links) -> float:
        """What the links cost."""
        if links not in self._costs:
            found = self._cost(links)
            self._costs[links] = _finite(f"the cost of {links_text(len(links))}", found)
            self._keep()
        return self._costs[links]

    def scores(self, relaxed: Callable[[Links], Sequence[float]]) -> dict[Link, float]:
        """What each candidate is worth."""
        if self._scores is None:
            given: Any = relaxed(self.candidates)
            asked = f"relaxed must return a score for each of the {len(self.candidates)} candidates"
            if not isinstance(given, Iterable) or getattr(given, "ndim", 1) != 1:
                raise ShapeError(f"{asked}, but returned {quoted(given)}.")
            found: list[Any] = list(given)
            if len(found) != len(self.candidates):
                raise ShapeError(f"{asked}, but returned {len(found)}.")
            self._scores = [_finite("a score of relaxed", score) for score in found]
            self._keep()
        return dict(zip(self.candidates, self._scores, strict=True))

    def _keep(self) -> None:
        """Add what the file has, of another search perhaps, and write all of it."""
        if self._path is None:
            return
        with _alone(self._path):
            if self._path.exists() and not _is_empty(self._path):
                self._read(self._path)
            tried = [{"links": list(links), "cost": cost} for links, cost in self._costs.items()]
            content = {**self._about, "scores": self._scores, "tried": tried}
            write_atomically(self._path, json.dumps(content).encode())

    def _read(self, path: Path) -> None:
        kept: Any = read_json(path)
        try:
            about = {name: kept[name] for name in self._about}
            tried = [
                (tuple((int(i), int(k)) for i, k in one["links"]), one["cost"])
                for one in kept["tried"]
            ]
            scores = None if kept["scores"] is None else list(kept["scores"])
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} is no file of a search for links.") from error
        for name, ours in self._about.items():
            if about[name] != ours:
                raise CheckpointError(
                    f"{path} is of a search with other {name}: it has {quoted(about[name])}, but "
                    f"this one {quoted(ours)}; give another file."
                )
        known = {*self.candidates}
        for links, cost in tried:
            if not known.issuperset(links):
                raise CheckpointError(f"{path} is damaged: it has a cost of other links.")
            _check_kept(path, "a cost", cost)
        if scores is not None:
            if len(scores) != len(known):
                raise CheckpointError(
                    f"{path} is damaged: it has {len(scores)} scores for {len(known)} candidates."
                )
            for score in scores:
                _check_kept(path, "a score", score)
            self._scores = self._scores or [float(score) for score in scores]
        self._costs = {**{links: float(cost) for links, cost in tried}, **self._costs}


def links_text(count: int) -> str:
    """So many links, in words."""
    return f"{count} link{'s' * (count != 1)}"


def _finite(what: str, given: Any) -> float:
    number = None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of several numbers
        number = as_float(given.item() if hasattr(given, "item") else given)
    if number is None or not math.isfinite(number):
        raise TrainingError(f"{what} must be a finite number, but is {quoted(given)}.")
    return number


def _check_kept(path: Path, what: str, given: object) -> None:
    number = as_float(given)
    if number is None or not math.isfinite(number):
        raise CheckpointError(
            f"{path} is damaged: {what} must be a finite number, but is {quoted(given)}."
        )


def _is_empty(path: Path) -> bool:
    """Whether a search has just made the file, to lock it."""
    return path.is_file() and not path.stat().st_size


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let other searches wait until the file is written, where the system has locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError, ValueError):  # writing says why
            _lock(path, stack)
        yield


def _lock(path: Path, stack: contextlib.ExitStack) -> None:
    import fcntl

    while True:
        held = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NONBLOCK, 0o666)
        stack.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_EX)
        if os.path.samestat(os.fstat(held), path.stat()):  # else another one replaced it meanwhile
            return
        stack.close()
