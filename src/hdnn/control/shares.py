"""Agents shared out to processes: what each of them has, and whom it hears before which substep."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hdnn.base.search import components
from hdnn.control.fused import colours
from hdnn.control.links import Edges
from hdnn.control.problems import LoopProblem
from hdnn.distributed.graph.graph import Graph, from_edges
from hdnn.distributed.graph.plan import Part, Plan, Round, partition, rows_at
from hdnn.errors import OptionError, SparsityError, positive_int


def shared_out(problem: LoopProblem, ranks: int) -> Plan:
    """Which process owns which agent: with few links between processes.

    Neighbours are those along links of the plant or of the controllers, and the pairs that the cost
    names: agents whose distance is priced have to hear each other. A cost that names no pairs would
    make neighbours of all agents, and is refused unless all are linked.
    """
    agents, ranks = problem.agents, positive_int("ranks", ranks)
    if ranks > agents:
        raise OptionError(f"{agents} agents cannot be shared out to {ranks} ranks; use fewer.")
    plant, controllers = problem.loop.plant.links, problem.loop.controller.links
    known = {*plant, *controllers}
    compared = {(min(pair), max(pair)) for pair in priced(problem)}
    if problem.cost.pairs is not None:
        known |= compared
    if strangers := sorted(compared - known):
        i, k = strangers[0]
        raise SparsityError(
            f"the cost compares agents {i} and {k}, which no link of the plant or of the "
            "controllers joins; give the cost pairs of neighbours, or add the link."
        )
    graph = Graph(from_edges(agents, sorted(known)))
    first, *others = components(graph.used)
    if others:
        raise SparsityError(
            f"no links lead from agent {first[0]} to agent {others[0][0]}, so that processes that "
            "hear their neighbours only cannot train them together; add links."
        )
    return Plan(graph, partition(graph, ranks))


def priced(problem: LoopProblem) -> Edges:
    """The pairs of agents whose distance the cost looks at, as it names them."""
    N, cost = problem.agents, problem.cost
    if not cost.barrier:
        return ()
    if cost.pairs is None:
        return tuple((i, k) for i in range(N) for k in range(i + 1, N))
    return tuple(cost.pairs)


class Colour(NamedTuple):
    """Edges without an agent in common: those of own agents alone, and those to other processes.

    Attributes:
        inner: the numbers of those alone.
        crossing: the numbers of those to others.
        messages: who sends which agents to whom before them.
        leaving: what is sent, by the places of agents as NumPy takes them.
        coming: what is received, likewise.
    """

    inner: np.ndarray
    crossing: np.ndarray
    messages: Round
    leaving: list[tuple[int, np.ndarray]]
    coming: list[tuple[int, np.ndarray]]


class Lines:
    """All edges of one kind that have an end here, in the order of all.

    Attributes:
        which: their numbers among all edges.
        ends: the places of both ends of each.
        colours: groups of them that are moved at once, and what is sent before.
    """

    def __init__(self, share: Share, edges: Edges) -> None:
        here = {*share.own}
        self.which = [e for e, (i, k) in enumerate(edges) if i in here or k in here]
        local = {e: number for number, e in enumerate(self.which)}
        pairs = (edges[e] for e in self.which)
        self.ends: Edges = tuple((share.place[i], share.place[k]) for i, k in pairs)
        self.colours = []
        for group in colours(edges):
            near = [e for e in group if e in local]
            inner = [local[e] for e in near if {*edges[e]} <= here]
            crossing = [local[e] for e in near if not {*edges[e]} <= here]
            messages = share.messages(edges[e] for e in group)
            ways = ([(r, at.numpy()) for r, at in way] for way in messages)
            self.colours.append(Colour(_array(inner), _array(crossing), messages, *ways))


class Share:
    """What one process has: its own agents, and ghosts of those that they hear at others.

    Attributes:
        own: its agents.
        agents: the same, then the ghosts.
        place: where each of them is kept here.
        plant: edges of plants.
        controllers: edges of controllers.
        pairs: the places of agents whose distance is priced.
        weights: who sends which agents' weights to whom.
        positions: who sends which agents' positions to whom.
    """

    def __init__(self, problem: LoopProblem, part: Part) -> None:
        self.part, self.own = part, part.nodes
        plant, controllers = problem.loop.plant.links, problem.loop.controller.links
        here, pairs = {*self.own}, priced(problem)
        near = [pair for pair in (*plant, *controllers, *pairs) if here & {*pair}]
        ghosts = {agent for pair in near for agent in pair} - here
        self.agents = (*self.own, *sorted(ghosts))
        self.place = {agent: place for place, agent in enumerate(self.agents)}
        self.plant, self.controllers = Lines(self, plant), Lines(self, controllers)
        self.pairs = [(self.place[i], self.place[k]) for i, k in pairs if here & {i, k}]
        self.weights, self.positions = self.messages(controllers), self.messages(pairs)

    def messages(self, pairs: Iterable[tuple[int, int]]) -> Round:
        """Own agents that other processes need for these pairs, and theirs that are needed here."""
        owner, number = self.part.plan.owner, self.part.number
        out: dict[int, set[int]] = {}
        into: dict[int, set[int]] = {}
        for pair in pairs:
            for here, there in (pair, pair[::-1]):
                if owner[here] == number != owner[there]:
                    out.setdefault(owner[there], set()).add(here)
                    into.setdefault(owner[there], set()).add(there)
        ways = (
            [(r, rows_at((self.place[i], 1) for i in sorted(some))) for r, some in sorted(way)]
            for way in (out.items(), into.items())
        )
        return Round(*ways)


def _array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)
