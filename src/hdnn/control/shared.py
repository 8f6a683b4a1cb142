"""The training of a closed loop as one process sees it that has some of the agents.

Every process owns agents and holds ghosts of those that they hear at other processes. In a step its
agents move by themselves; then edges, colour by colour. Before a colour both ends of an edge
between two processes send their states to each other, and both compute the edge: the same bits from
the same numbers, of which each keeps its own agent's. Backwards it is the same with gradients.
Weights of ghosts are sent once an iteration, and so are the positions that the barrier compares.

Agents are summed up for the history alone, in an order of their own. So the bits of a training do
not depend on how agents are shared out.

A training that is kept goes on, is kept or ends by a wish that all processes agree on after each
iteration. To be kept, weights and moments of all agents go along the tree to the root.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn.base.threads import one_thread
from hdnn.control import fused
from hdnn.control.fused import Phase, Phases
from hdnn.control.gathered import Gathered
from hdnn.control.kept import SAVE_EVERY, Keeping, State
from hdnn.control.objective import Cost
from hdnn.control.problems import LoopProblem
from hdnn.control.shared_costs import AgentCosts
from hdnn.control.shares import Colour, Share
from hdnn.control.step import System
from hdnn.control.training import BETAS, TERMS, factor, in_range
from hdnn.distributed.graph.plan import Part, Plan, Round
from hdnn.distributed.messages.handshake import shake_hands
from hdnn.distributed.messages.tree import Spanning
from hdnn.distributed.training.training import NodeAdam
from hdnn.distributed.transport import Transport
from hdnn.errors import OptionError, TrainingError
from hdnn.training import checkpoint, identity
from hdnn.training.interrupt import DeferredInterrupt

EVERY = 10  # iterations after which the history is summed up along the tree
OWN = "own"  # the phase of agents by themselves
GO_ON, KEEP, END = range(3)  # wishes: the largest of any process holds for all
NAMES = ("cost", *TERMS, "rate")  # of the history
OF_AGENTS, OF_EDGES = ("K", "b", "G"), ("C",)


class SharedTraining:
    """A training of which this process has one part; `run` does it, together with the others.

    Args:
        problem: all of it, with its first weights.
        plan: which process owns which agent.
        transport: to the other processes.
        iterations, batch, rate, seed: as `LoopTraining` takes them.
        tell: called by the root with a dict, every few iterations.
        keeping: where the root keeps the training; by default nowhere.

    Raises:
        OptionError: if the kernels of closed loops cannot run here.
        DistributedError: if other processes have another problem, other options or versions, or are
            lost.
    """

    def __init__(
        self,
        problem: LoopProblem,
        plan: Plan,
        transport: Transport,
        *,
        iterations: int = 300,
        batch: int = 4,
        rate: float = 0.1,
        seed: int = 0,
        tell: Callable[[dict[str, Any]], None] | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        options = in_range(iterations, batch, rate, seed)
        self.iterations, self.batch, self.rate, self.seed = options.values()
        check(problem)
        self.problem, self.transport, self.tell, self.keeping = problem, transport, tell, keeping
        self.part = Part(plan, transport.part)
        self.share, self.tree = Share(problem, self.part), Spanning(self.part, transport)
        self.own = len(self.share.own)
        about = identity.digest([problem.z, problem.xi, *problem.loop.state_dict().values()])
        given = [about, problem.cost, problem.loop.step, problem.radius, problem.collision]
        stages = None if keeping is None else keeping.stages
        facts = {"options": [options, stages], "data": given}
        shake_hands(transport, plan, facts, name_of(plan))
        self._take()
        self.gathered = Gathered(self.tree, self.share, problem.loop.controller.links)
        self.costs = AgentCosts(problem, self.share, self.weights)
        self.done, self.seconds, self.processor = 0, 0.0, 0.0
        self.before = 0.0  # processor time of all that was kept
        self.shares: list[Tensor] = []  # what each agent cost in iterations not yet summed up
        self.summed = 0  # iterations that were summed up last
        self.history: dict[str, list[float]] = {name: [] for name in NAMES}

    def _take(self) -> None:
        """This process's part of the plant and of the weights, in which agents lead."""
        loop, share = self.problem.loop, self.share
        plant, controller, agents = loop.plant, loop.controller, [*share.agents]
        self.fixed: dict[str, Any] = {
            **{name: getattr(plant, name)[agents] for name in ("A", "a", "J", "R", "g")},
            "couplings": plant.couplings[share.plant.which],
            "plant_links": share.plant.ends,
            "J_c": controller.J,
            "R_c": controller.R[agents],
            "links": share.controllers.ends,
            "h": loop.step,
        }
        K, b = (t.detach().transpose(0, 1)[agents] for t in (controller.K, controller.b))
        G, C = controller.G.detach()[agents], controller.C.detach()[share.controllers.which]
        self.weights = {"K": K.contiguous(), "b": b.contiguous(), "G": G, "C": C}
        own = {name: self.weights[name][: self.own] for name in ("K", "b", "G")}
        self.adam = NodeAdam({**own, "C": C}, BETAS)

    def run(self) -> dict[str, list[float]]:
        """Train to the end, or go on with what is kept.

        Returns:
            The cost of each iteration, its terms, and the rate: those of all agents together. Of a
            training that goes on only the root has those from before.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when the training is kept.
            TrainingError: if a cost is not finite.
            ConvergenceError: if a step of the loop has no solution.
            CheckpointError: if what is kept is damaged or of another training, or nothing can be
                written.
            DistributedError: if another process is lost, or cannot go on.
        """
        keeping = self.keeping
        with checkpoint.locked(keeping.folder if keeping and self.tree.is_root else None):
            if keeping is not None:
                self._go_on(keeping)
            start, spent = time.perf_counter(), self.seconds
            processor, saved = time.process_time(), time.monotonic()
            log = self._log()
            # A Ctrl-C at a terminal reaches a process twice: from there, and from the launcher.
            patience = 0.0 if self.transport.parts == 1 else math.inf
            waiting = nullcontext() if keeping is None else DeferredInterrupt(patience)
            with one_thread(), waiting as interrupt:
                while self.done < self.iterations:
                    self._iterate()
                    wish = self._wish(interrupt is not None and interrupt.came, saved)
                    if wish or len(self.shares) == EVERY or self.done == self.iterations:
                        self._sum_up()
                        self.seconds = spent + time.perf_counter() - start
                        self.processor = time.process_time() - processor
                        self._write(log)
                    if wish and keeping is not None:
                        self._keep(keeping)
                        saved = time.monotonic()
                    if self.tell is not None and self.tree.is_root and not self.shares:
                        now = {name: values[-1] for name, values in self.history.items()}
                        self.tell({"iteration": self.done, "seconds": self.seconds, **now})
                    if wish == END:
                        raise KeyboardInterrupt
        return self.history

    def _iterate(self) -> None:
        y = self.problem.starts(self.batch, seed=self.seed, draw=self.done)[:, [*self.share.own]]
        self._hear_weights()
        K, b, G, C = self.weights.values()
        system = System(**self.fixed, K=K.transpose(0, 1), b=b.transpose(0, 1), G=G, C=C)
        phases = Phases(system, self.batch, self.share.agents)
        trajectory, tape = self._forward(phases, y)
        gradients, slopes = self._priced(trajectory)
        self._backward(phases, tape, slopes)
        found = phases.gradients()
        found |= {name: found[name].transpose(0, 1) for name in ("K", "b")}
        for name, gradient in gradients.items():
            gradient += found[name][: self.own]
        rate = self.rate * factor(self.done, self.iterations)
        self.adam.step({**gradients, "C": found["C"]}, rate)
        self.history["rate"].append(rate)
        self.done += 1

    # One horizon

    def _phases(self, t: int) -> Iterator[tuple[str, Colour | None]]:
        """The phases of step t in their order."""
        share = self.share
        order: list[tuple[str, Colour | None]] = [
            (OWN, None),
            *(("plant_edges", colour) for colour in share.plant.colours),
            *(("edges", colour) for colour in share.controllers.colours),
        ]
        yield from reversed(order) if t % 2 else order

    def _forward(self, phases: Phases, start: Tensor) -> tuple[Tensor, list[_Done]]:
        """The states of own agents, `(own, steps + 1, B, n)`, and what backwards needs."""
        steps, own = self.weights["K"].shape[1], range(self.own)
        y = start.new_zeros(len(start), len(self.share.agents), start.shape[2])
        y[:, : self.own] = start
        states, tape = start.new_empty(self.own, steps + 1, *start.shape[::2]), []
        states[:, 0], array = start.transpose(0, 1), y.numpy()
        for t in range(steps):
            for kind, colour in self._phases(t):
                if colour is None:
                    tape.append(_Done(t, kind, None, [phases.own(array, t, own)]))
                    continue
                run, heard = getattr(phases, kind), self._hear(array, colour, kind)
                inner = [run(array, t, colour.inner)] if len(colour.inner) else []
                heard()
                crossing = [run(array, t, colour.crossing)] if len(colour.crossing) else []
                tape.append(_Done(t, kind, colour, [*inner, *crossing]))
            states[:, t + 1] = y[:, : self.own].transpose(0, 1)
        return states, tape

    def _backward(self, phases: Phases, tape: list[_Done], slopes: Tensor) -> None:
        """From gradients in all states, `(own, steps + 1, B, n)`, to those that phases keep."""
        slopes = slopes.transpose(0, 2).contiguous()  # (B, steps + 1, own, n)
        g = slopes.new_zeros(len(slopes), len(self.share.agents), slopes.shape[3])
        g[:, : self.own], array = slopes[:, -1], g.numpy()
        while tape:
            step = tape.pop()
            if step.colour is None:
                phases.adjoint(step.phases[0], array)
            else:
                heard = self._hear(array, step.colour, step.kind)
                inner = len(step.colour.inner) > 0
                for phase in step.phases[:inner]:
                    phases.adjoint(phase, array)
                heard()
                for phase in step.phases[inner:]:
                    phases.adjoint(phase, array)
            if not tape or tape[-1].t < step.t:
                g[:, : self.own] += slopes[:, step.t]

    # What it costs

    def _priced(self, trajectory: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of own agents' weights and states."""
        d = self.problem.cost.dimensions
        positions = trajectory.new_zeros(len(self.share.agents), *trajectory.shape[1:3], d)
        positions[: self.own] = trajectory[..., :d]
        heard = self._exchange(positions, self.share.positions)
        slopes = torch.empty_like(trajectory)
        gradients = {n: torch.empty_like(self.weights[n][: self.own]) for n in ("K", "b", "G")}
        terms = trajectory.new_empty(self.own, len(TERMS))
        for k in range(self.own):
            terms[k], found = self.costs.own(k, trajectory[k])
            slopes[k] = found["y"]
            for name, gradient in gradients.items():
                gradient[k] = found[name]
        heard()
        price, slope = self.costs.near(positions)
        terms[:, TERMS.index("barrier")] += price
        slopes[..., :d] += slope[: self.own]
        if not bool(torch.isfinite(terms).all()):
            raise TrainingError(
                f"the cost is not finite in iteration {self.done + 1}: the training has diverged; "
                "lower the rate, or the weights of the cost."
            )
        self.shares.append(terms)
        return gradients, slopes

    def _sum_up(self) -> None:
        """The history of the last iterations, summed over all agents along the tree."""
        total = self.tree.sum(torch.stack(self.shares, 1))
        for row in total.tolist():
            for name, value in zip(TERMS, row, strict=True):
                self.history[name].append(value)
            self.history["cost"].append(math.fsum(row))
        self.summed, self.shares = len(self.shares), []

    # Messages

    def _hear(self, y: np.ndarray, colour: Colour, kind: str) -> Callable[[], None]:
        """Begin to hear ghosts' columns of y, for plants or for controllers; call it to wait."""
        if not colour.messages.out:
            return _nothing
        p = self.fixed["A"].shape[2]
        columns = y[..., :p] if kind == "plant_edges" else y[..., p:]
        shape = len(y), columns.shape[2]
        out = [
            (r, torch.from_numpy(np.ascontiguousarray(columns[:, at]))) for r, at in colour.leaving
        ]
        into = [
            (r, torch.empty(shape[0], len(at), shape[1], dtype=torch.float64))
            for r, at in colour.coming
        ]
        pending = self.transport.start(out, into)

        def wait() -> None:
            pending.wait()
            for (_, at), (_, found) in zip(colour.coming, into, strict=True):
                columns[:, at] = found.numpy()

        return wait

    def _hear_weights(self) -> None:
        """Weights of controllers at other processes, as they are now."""
        K, b = self.weights["K"], self.weights["b"]
        flat = torch.cat([K.flatten(1), b.flatten(1)], 1)
        self._exchange(flat, self.share.weights)()
        sizes = [K[0].numel(), b[0].numel()]
        for weight, found in zip((K, b), flat.split(sizes, 1), strict=True):
            weight[self.own :] = found[self.own :].reshape(weight[self.own :].shape)

    def _exchange(self, rows: Tensor, messages: Round) -> Callable[[], None]:
        """Send rows of own agents and begin to receive those of ghosts; call it to wait."""
        if not messages.out:
            return _nothing
        out = [(r, rows[places].contiguous()) for r, places in messages.out]
        into = [(r, rows.new_empty(len(places), *rows.shape[1:])) for r, places in messages.into]
        pending = self.transport.start(out, into)

        def wait() -> None:
            pending.wait()
            for (_, places), (_, found) in zip(messages.into, into, strict=True):
                rows[places] = found

        return wait

    # What is kept, and the end

    def _wish(self, interrupted: bool, saved: float) -> int:
        """What all do after this iteration, as any of them wishes."""
        keeping, wish = self.keeping, GO_ON
        if keeping is None:
            return GO_ON
        if self.tree.is_root and time.monotonic() - saved > SAVE_EVERY:
            wish = KEEP
        if self.done == self.iterations or self.done in keeping.stages:
            wish = KEEP
        if interrupted or keeping.launcher not in (0, os.getppid()):
            wish = END
        return -self.tree.minimum(-wish)

    def _go_on(self, keeping: Keeping) -> None:
        """Take weights, moments and the history from where they are kept, if they are."""
        state = State(self.problem) if self.tree.is_root else None
        if state is not None:
            state.history = {name: [] for name in self.history}
            state.read(keeping)
            self.history, self.before = state.history, state.processor_seconds
            self.seconds = state.seconds
        self.done = int(self.tree.broadcast(torch.tensor([state.done if state else 0])))
        self.adam.count = self.done
        agents, edges = (
            None if state is None else [_lead(n, t) for n in names for t in state.get(n)]
            for names in (OF_AGENTS, OF_EDGES)
        )
        held = self._held(OF_AGENTS)
        for mine, found in zip(held, self.gathered.agents_here(agents, held), strict=True):
            mine.copy_(found)
        held = self._held(OF_EDGES)
        for mine, found in zip(held, self.gathered.edges_here(edges, held), strict=True):
            mine.copy_(found)

    def _held(self, names: tuple[str, ...]) -> list[Tensor]:
        """Weights and moments of own agents, or of the edges here."""
        adam = self.adam
        return [each[n] for n in names for each in (adam.weights, adam.m, adam.v)]

    def _all(self) -> dict[str, list[Tensor]] | None:
        """Weights and moments of all, as controllers have them; None but at the root."""
        agents = self.gathered.agents_at_root(self._held(OF_AGENTS))
        edges = self.gathered.edges_at_root(self._held(OF_EDGES))
        if agents is None or edges is None:
            return None
        found, names = iter([*agents, *edges]), (*OF_AGENTS, *OF_EDGES)
        return {name: [_lead(name, next(found)) for _ in range(3)] for name in names}

    def _keep(self, keeping: Keeping) -> None:
        """Write all of the training, at the root."""
        found, taken = self._all(), self.processors()
        if found is None:
            return
        state = State(self.problem)
        state.done, state.history, state.seconds = self.done, self.history, self.seconds
        state.processor_seconds = taken
        for name, tensors in found.items():
            state.put(name, *tensors)
        state.write(keeping)

    def _log(self) -> checkpoint.Log | None:
        """A line an iteration, at the root."""
        if self.keeping is None or not self.tree.is_root:
            return None
        return checkpoint.Log(self.keeping.folder, self.done)

    def _write(self, log: checkpoint.Log | None) -> None:
        """The lines of the iterations that were summed up just now."""
        if log is None:
            return
        first = self.done - self.summed
        for k in range(first, self.done):
            now = {name: values[k] for name, values in self.history.items()}
            log.write({"iteration": k + 1, **now, "seconds": self.seconds})

    def collect(self) -> None:
        """Bring all weights to the root, and write them into its problem."""
        found = self._all()
        if found is None:
            return
        with torch.no_grad():
            for name, (weight, *_) in found.items():
                getattr(self.problem.loop.controller, name).copy_(weight)

    def processors(self) -> float:
        """The processor time that all processes took for `run` and before, at the root."""
        taken = torch.zeros(self.own, dtype=torch.float64)
        taken[0] = self.processor
        return self.before + float(self.tree.sum(taken.unsqueeze(1)))

    def traffic(self) -> list[tuple[int, int, int, int]]:
        """`(from, to, messages, bytes)` of all processes that talked; the root's only."""
        return self.tree.traffic()


class _Done(NamedTuple):
    """Phases that were run in step t, of a colour or of agents by themselves."""

    t: int
    kind: str
    colour: Colour | None
    phases: list[Phase]


def check(problem: LoopProblem) -> None:
    """Raise unless processes can train this problem here."""
    loop = problem.loop
    missing = fused.why_not(problem.z, loop.system())
    if missing:
        raise OptionError(f"processes train closed loops by kernels: {missing}.")
    if type(problem.cost) is not Cost:
        raise OptionError("processes know a Cost, and nothing that extends it.")
    if not all(weight.requires_grad for weight in loop.controller.parameters()):
        raise TrainingError("processes train all weights of controllers, but some are frozen.")


def name_of(plan: Plan) -> Callable[[int], str]:
    """How to call a process: by its agents."""

    def name(part: int) -> str:
        agents = plan.nodes_of[part]
        shown = ", ".join(map(str, agents[:4])) + (", .." if len(agents) > 4 else "")
        return f"the process of agent{'s' if len(agents) > 1 else ''} {shown}"

    return name


def _nothing() -> None:
    """There is nobody to wait for."""


def _lead(name: str, tensor: Tensor) -> Tensor:
    """Agents lead here, but in K and b of controllers time does: from one to the other."""
    return tensor.transpose(0, 1) if name in ("K", "b") else tensor
