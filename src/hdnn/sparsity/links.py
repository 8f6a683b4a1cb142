"""Which graph? Search for the links between agents that make a trained cost best."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hdnn.base.listed import listed
from hdnn.base.progress import ProgressLine
from hdnn.errors import (
    SENSIBLE,
    OptionError,
    SparsityError,
    as_float,
    flag,
    int_from,
    quoted,
)
from hdnn.sparsity.trials import Link, Links, LinkTrial, Trials, links_text

REDRAWS = 100  # how often a graph is drawn again that was tried before
DRAWN = 4  # the first of so many parts of the rounds tries graphs drawn at random


@dataclass(frozen=True, eq=False, kw_only=True)
class LinkChoice:
    """The links that `choose_links` found, and all that it tried; print it to read it.

    Args:
        agents: how many there are.
        links: pairs (i, k), i < k, in order.
        cost: theirs, without the price.
        price: of a link; 0 where their number was given.
        history: all graphs that were tried, in order, each with its cost.
        scores: what `relaxed` said of each candidate; empty without it.

    Examples:
        >>> from hdnn import sparsity
        >>> found = sparsity.choose_links(4, lambda links: 5.0 - ((0, 2) in links), links=1)
        >>> found.links, found.cost
        (((0, 2),), 4.0)
        >>> found.S.int()
        tensor([[1, 0, 1, 0],
                [0, 1, 0, 0],
                [1, 0, 1, 0],
                [0, 0, 0, 1]], dtype=torch.int32)
    """

    agents: int
    links: Links
    cost: float
    price: float
    history: tuple[LinkTrial, ...]
    scores: dict[Link, float]

    @property
    def S(self) -> Tensor:
        """The communication graph `(M, M)`, with ones on its diagonal, for `design`."""
        S = torch.eye(self.agents, dtype=torch.bool)
        for i, k in self.links:
            S[i, k] = S[k, i] = True
        return S

    @property
    def total(self) -> float:
        """The cost with the price of all links, which was minimised."""
        return self.cost + self.price * len(self.links)

    def __str__(self) -> str:
        costs = [trial.cost for trial in self.history]
        paid = f", with {self.price:g} a link {self.total:.6g}" if self.price else ""
        many = links_text(len(self.links))
        return "\n".join(
            [
                f"{many} of {self.agents} agents: cost {self.cost:.6g}{paid}",
                " ".join(f"{i}-{k}" for i, k in self.links) or "nobody hears anybody",
                f"of {len(costs)} graphs with costs from {min(costs):.6g} to {max(costs):.6g}, "
                f"the first {costs[0]:.6g}",
            ]
        )


def choose_links(
    agents: int,
    cost: Callable[[Links], float],
    *,
    links: int | None = None,
    price: float | None = None,
    relaxed: Callable[[Links], Sequence[float]] | None = None,
    candidates: Iterable[tuple[int, int]] | None = None,
    first: Iterable[Iterable[tuple[int, int]]] = (),
    rounds: int = 20,
    seed: int = 0,
    file: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> LinkChoice:
    """Search for the graph with so many links, or at such a price a link, whose cost is least.

    It begins with the links of the highest scores, or with links drawn at random where there are
    none. The first quarter of the rounds tries the graphs that are given to be tried `first`, all
    of them, and then graphs with as many links that are drawn at random, because scores may
    mislead: if one of these costs less, scores are not used from then on. Each round that follows
    tries a change of the best graph so far: it takes some links away, rather those of low scores,
    and adds others, rather those of high ones; what costs less is kept. At first a quarter of the
    links change; half as many after each round in vain, down to one. At a price, rounds may also
    add or take away a link, and the beginning is the best of the 0, 1, 2, 4, .. highest scores.
    Where no change of one link leads to a graph that was not tried, two change at least, then four,
    and so on, until a graph is better. The search ends after its rounds, or when all graphs were
    tried.

    The same seed gives the same search. With a file, a search that was interrupted goes on from
    there when it is called again, and other searches find the costs that are known, also while
    both of them run.

    Args:
        agents: M.
        cost: trains with the given links, pairs (i, k) in order, and returns what they cost. An
            attribute `identity`, a text, keeps its file from being used for another cost.
        links: how many to choose.
        price: of a link, if their number is free: `cost + price * links` is minimised.
        relaxed: scores of candidates, the higher the better, one for each: such as how strongly
            they are used in a training with all of them. It is called once.
        candidates: pairs of agents that may be linked; by default all.
        first: graphs to try first, such as a ring, so that what is found is no worse than they are;
            each counts as a round, and they are all tried even if there are fewer rounds.
        rounds: graphs to try after the first, at most.
        seed: of what is drawn.
        file: where to keep scores and costs as JSON; by default nowhere.
        progress: show one line while a person waits at a terminal.

    Returns:
        The best links of all that were tried.

    Raises:
        ShapeError: if a number is not whole or out of range, or relaxed does not return a list of
            one score a candidate.
        OptionError: if not just one of links and price is given, the price is negative, or cost
            or relaxed cannot be called.
        SparsityError: if candidates are no pairs of agents, or fewer than the links, or a graph to
            try first has links that are no candidates, or another number of them.
        TrainingError: if a cost or a score is not a finite number.
        CheckpointError: if the file cannot be used, is damaged, or is of another search.

    Examples:
        >>> from hdnn import sparsity
        >>> def cost(links):  # the first agent should be heard by all others
        ...     return 10.0 - sum(0 in pair for pair in links)
        >>> found = sparsity.choose_links(5, cost, links=4, rounds=60)
        >>> print(found)
        4 links of 5 agents: cost 6
        0-1 0-2 0-3 0-4
        of ... graphs with costs from 6 to ..., the first ...
        >>> sparsity.design(found.S).S.equal(found.S)
        True
        >>> ring = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
        >>> sparsity.choose_links(5, cost, links=5, first=[ring], rounds=20).cost <= cost(ring)
        True
    """
    M, rounds = int_from(2, "agents", agents), int_from(0, "rounds", rounds)
    source = random.Random(int_from(0, "seed", seed))
    known = _candidates(candidates, M)
    budget, paid = _limits(links, price, len(known))
    given = _graphs(first, known, budget, M)
    for name, function in (("cost", cost), ("relaxed", relaxed)):
        if not (callable(function) or (name == "relaxed" and function is None)):
            raise OptionError(f"{name} must be a function of links, but got {quoted(function)}.")
    line = ProgressLine(flag("progress", progress))
    trials = Trials(cost, M, known, file)
    try:
        line.show(f"scores of {len(known)} links")
        scores = {} if relaxed is None else trials.scores(relaxed)
        search = _Search(source, trials, scores, paid)
        search.begin(budget)
        rounds = max(rounds, len(given))
        for k in range(rounds):
            best = search.current
            many = links_text(len(best.links))
            line.show(f"round {k + 1}/{rounds}, {many}, cost {best.cost:.4g}")
            if k < len(given):
                search.take(given[k])
                continue
            if k < rounds // DRAWN and search.draw():
                continue
            if not search.change(free=budget is None):
                break
    finally:
        line.close()
    found = search.current
    tried = tuple(search.tried.values())
    return LinkChoice(
        agents=M, links=found.links, cost=found.cost, price=paid, history=tried, scores=scores
    )


class _Search:
    """The best graph so far, and changes of it."""

    def __init__(
        self, source: random.Random, trials: Trials, scores: dict[Link, float], price: float
    ) -> None:
        self.source, self.trials, self.price = source, trials, price
        drawn = source.sample(trials.candidates, len(trials.candidates))
        self.order = sorted(drawn, key=lambda link: -scores.get(link, 0.0))
        self.ranked = bool(scores)
        self.tried: dict[Links, LinkTrial] = {}
        self.size = self.least = 1  # links that change, and how many do so at least
        self.current: LinkTrial

    def begin(self, budget: int | None) -> None:
        """The links of the highest scores: so many, or the best number of some."""
        sizes = [budget] if budget is not None else _doubling(len(self.order))
        found = [self._try(self.order[:size]) for size in sizes]
        self.current = min(found, key=self._total)
        self.size = max(1, len(self.current.links) // 4)

    def take(self, links: Links) -> None:
        """Try a graph that was not made by scores.

        If it is better, the scores were wrong, and changes are drawn without them.
        """
        found = self.tried.get(links) or self._try(links)
        if self._total(found) < self._total(self.current):
            self.current, self.ranked = found, False

    def draw(self) -> bool:
        """Try a graph drawn at random, of the current size; False if none is left to be drawn."""
        for _ in range(REDRAWS):
            links = tuple(sorted(self.source.sample(self.order, len(self.current.links))))
            if links not in self.tried:
                self.take(links)
                return True
        return False

    def change(self, free: bool) -> bool:
        """Try a change and keep it if it is better; False if all graphs were tried."""
        links = self._untried(free)
        if links is None:
            return False
        found = self._try(links)
        if self._total(found) < self._total(self.current):
            self.current, self.least = found, 1
        else:
            self.size = max(self.least, self.size // 2)
        return True

    def _untried(self, free: bool) -> Links | None:
        """A graph that was not tried, by a small change if there is one."""
        inside = len(self.current.links)
        outside = len(self.order) - inside
        most = max(inside, outside) if free else min(inside, outside)
        while True:
            for _ in range(REDRAWS):
                links = self._changed(free)
                if links not in self.tried:
                    return links
                self.size = max(self.least, self.size // 2)
            if self.least >= most:
                break
            self.size = self.least = 2 * self.least
        # One after another: as few of them were tried as there are trials, so this is quick.
        sizes = range(len(self.order) + 1) if free else [inside]
        graphs = itertools.chain.from_iterable(
            itertools.combinations(self.order, size) for size in sizes
        )
        left = (tuple(sorted(graph)) for graph in graphs)
        return next((graph for graph in left if graph not in self.tried), None)

    def _changed(self, free: bool) -> Links:
        inside = [link for link in self.order if link in self.current.links]
        outside = [link for link in self.order if link not in self.current.links]
        swapped = min(self.size, len(inside), len(outside))
        some = [(0, self.least), (self.least, 0)] if free else []
        away, new = self.source.choice([(swapped, swapped), *some])
        added, taken = self._drawn(outside, new), self._drawn(inside[::-1], away)
        return tuple(sorted({*inside, *added} - {*taken}))

    def _drawn(self, links: list[Link], count: int) -> list[Link]:
        """Some of these, the first of them most often; any of them alike without scores."""
        left, found = list(links), []
        for _ in range(min(count, len(left))):
            weights = [1 / (1 + k) if self.ranked else 1.0 for k in range(len(left))]
            found.append(left.pop(self.source.choices(range(len(left)), weights)[0]))
        return found

    def _try(self, links: Iterable[Link]) -> LinkTrial:
        given = tuple(sorted(links))
        found = self.tried[given] = LinkTrial(given, self.trials.cost(given))
        return found

    def _total(self, trial: LinkTrial) -> float:
        return trial.cost + self.price * len(trial.links)


def _doubling(most: int) -> list[int]:
    """0, 1, 2, 4, .. and the most."""
    return [0, *(2**k for k in range(most.bit_length()) if 2**k < most), most]


def _limits(links: Any, price: Any, candidates: int) -> tuple[int | None, float]:
    """The number of links, or None, and their price."""
    if (links is None) == (price is None):
        given = "neither" if links is None else "both"
        raise OptionError(f"give either links, how many, or the price of one, but got {given}.")
    if price is not None:
        number = as_float(price)
        if number is None or not 0 <= number <= SENSIBLE:
            raise OptionError(f"price must be finite and not negative, but got {quoted(price)}.")
        return None, number
    budget = int_from(0, "links", links)
    if budget > candidates:
        raise SparsityError(f"there are {candidates} candidates, but {budget} links are asked for.")
    return budget, 0.0


def _candidates(given: Any, agents: int) -> Links:
    """Pairs (i, k), i < k, in order."""
    if given is None:
        return tuple((i, k) for i in range(agents) for k in range(i + 1, agents))
    found = _pairs("candidates", given, agents)
    if not found:
        raise SparsityError("there are no candidates; give at least one pair of agents.")
    return found


def _pairs(name: str, given: Any, agents: int) -> Links:
    """Pairs (i, k), i < k, in order, each once."""
    entries = listed(given)
    if entries is None:
        raise SparsityError(f"{name} must be pairs of agents, but got {quoted(given)}.")
    found: set[Link] = set()
    for shown in entries:
        pair = listed(shown) or []
        ends = sorted({int(i) for i in pair if isinstance(i, Integral) and 0 <= int(i) < agents})
        if len(pair) != 2 or len(ends) != 2:
            raise SparsityError(
                f"{name} must be pairs of two of the agents 0 .. {agents - 1}, but one is "
                f"{quoted(shown)}."
            )
        found.add((ends[0], ends[1]))
    return tuple(sorted(found))


def _graphs(given: Any, candidates: Links, budget: int | None, agents: int) -> list[Links]:
    """The graphs to try first, each once."""
    entries = listed(given)
    if entries is None:
        raise SparsityError(f"first must be graphs, lists of pairs, but got {quoted(given)}.")
    graphs = [_pairs("the graphs of first", graph, agents) for graph in entries]
    for graph in graphs:
        unknown = sorted({*graph} - {*candidates})
        if unknown:
            raise SparsityError(f"first has a graph with {unknown[0]}, which is no candidate.")
        if budget is not None and len(graph) != budget:
            raise SparsityError(
                f"first has a graph of {links_text(len(graph))}, but {budget} are to be chosen."
            )
    return list(dict.fromkeys(graphs))
