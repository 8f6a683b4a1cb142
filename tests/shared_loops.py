"""Closed loops whose agents are shared out to threads or processes, for tests."""

from __future__ import annotations

import itertools
import queue
import threading

import torch

from closed_loops import random_loop
from hdnn import control
from hdnn.control import processes
from hdnn.control.shares import shared_out
from hdnn.distributed import Local, Transport

TINY = {"iterations": 3, "batch": 2}


def ring(steps: int = 4) -> control.LoopProblem:
    """Twelve robots on a ring whose neighbours keep apart."""
    links = control.crossing("ring").loop.controller.links
    cost = control.Cost(pairs=links, distance=5.0)
    return control.crossing("ring", steps=steps, horizon=0.1 * steps, cost=cost)


def random_problem(seed: int, N: int) -> control.LoopProblem:
    """Agents on a line and along random links, some of their plants coupled, some pairs priced."""
    loop, normal = random_loop(seed, N, 1.0, 0.1)
    line = [(i, i + 1) for i in range(N - 1)]
    links = sorted({*line, *((min(pair), max(pair)) for pair in loop.controller.links)})
    more = control.Controller(
        *(N, 3), links=links, J=loop.controller.J, dissipation=loop.controller.R
    )
    with torch.no_grad():
        for parameter in more.parameters():
            parameter.copy_(normal(*parameter.shape))
    pairs = [pair[:: 1 if e % 2 else -1] for e, pair in enumerate(links) if e % 3]
    cost = control.Cost(pairs=pairs, distance=3.0, barrier=2.0, dimensions=2)
    joined = control.ClosedLoop(loop.plant, more, 0.1)
    return control.LoopProblem(joined, normal(N, 3), normal(N, 4), cost, collision=0.0)


class Threads(Transport):
    """Parts as threads of this process: quick to start, and as strict about who talks to whom."""

    def __init__(self, part: int, parts: int, lines: dict[tuple[int, int], queue.Queue]) -> None:
        super().__init__(part, parts)
        self.lines = lines

    def start(self, out, into):
        self.traffic.count(out)
        for other, tensor in out:
            self.lines[self.part, other].put(tensor.clone())
        return Waiting(self, into)


class Waiting:
    def __init__(self, transport: Threads, into) -> None:
        self.transport, self.into = transport, into

    def wait(self) -> None:
        for other, tensor in self.into:
            found = self.transport.lines[other, self.transport.part].get(timeout=60)
            assert found.shape == tensor.shape
            tensor.copy_(found)


def train(
    make, ranks: int, keeping=None, **options
) -> tuple[control.LoopProblem, control.ProcessRun]:
    """The problem as trained by so many threads, and what they say."""
    plan, options = shared_out(make(), ranks), {"rate": 0.1, "seed": 0, **TINY, **options}
    pairs = itertools.product(range(ranks), repeat=2)
    lines = {pair: queue.Queue() for pair in pairs}
    found: dict[int, tuple[control.LoopProblem, control.ProcessRun]] = {}

    def work(part: int) -> None:
        problem, transport = make(), Threads(part, ranks, lines) if ranks > 1 else Local()
        given = problem, plan, transport, options, lambda _: None, keeping
        found[part] = problem, processes.part_of(*given)

    threads = [threading.Thread(target=work, args=(part,), daemon=True) for part in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[plan.owner[plan.tree.root]]


def weights(problem: control.LoopProblem) -> list[torch.Tensor]:
    return [weight.detach() for weight in problem.loop.controller.parameters()]


def same(a: control.LoopProblem, b: control.LoopProblem) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))
