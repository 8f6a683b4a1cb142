"""A closed loop as one kernel over all steps, or phase by phase for a process with some agents."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from hdnn.base.notice import said_if_slow
from hdnn.base.threads import threads_allowed
from hdnn.control import elimination, step
from hdnn.control.links import Edges
from hdnn.control.step import System
from hdnn.engine import jit
from hdnn.engine.kernels import closed_loop, closed_loop_lanes
from hdnn.engine.kernels.closed_loop_lanes import LANES
from hdnn.engine.twice import differentiable
from hdnn.errors import ConvergenceError

UNROLLED = 4  # states of a controller up to which loops are compiled for just that number
GIVEN = ("A", "a", "J", "R", "g", "couplings", "J_c", "R_c")  # of no gradients here
GRADED = ("M", "U", "u", "W")  # the matrices of agents by themselves that change with the weights
NONE, START = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
COMPILING = "hdnn: compiling the kernels of closed loops for this processor (once, a minute)"

# Read now: sources may change before the first use, and then code of the old ones would be kept on
# disk as that of the new ones.
_njit = partial(
    jit.compiled,
    made_of=jit.digest(closed_loop.__name__, closed_loop_lanes.__name__),
)
_lock = threading.Lock()


def why_not(y: Tensor, system: System) -> str:
    """Why the kernel cannot run; empty if it can."""
    if not jit.installed():
        return "it needs numba; pip install 'hdnn[fast]'"
    if y.device.type != "cpu" or system.K.dtype != torch.float64:
        return f"it is for float64 on a CPU, but states are {system.K.dtype} on {y.device.type}"
    if {*system.activation} - {"identity"}:
        return "it is for plants of a quadratic energy only"
    if any(getattr(system, name).requires_grad for name in GIVEN):
        return "it has gradients of the controllers' weights only, not of plants, J or R"
    return ""


def trajectory(system: System, y: Tensor, steps: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """As `hdnn.control.step.trajectory`."""
    weights = system.K, system.b, system.G, system.C
    found: Any = _Run.apply(y, *weights, (system, steps, first))
    return found[0].transpose(0, 1), found[1].transpose(0, 1)


class Phases:
    """One phase of a step at a time, for some of the agents: what a process does that has them.

    A phase is: agents by themselves, one colour of the plants' edges, or one colour of the
    controllers' edges. Agents in a phase do not depend on each other, and the bits of each do not
    depend on which others are in the call: all phases one by one, in any split of the agents, give
    the states and gradients of `trajectory` to the last bit. A process has its own agents and those
    at the other ends of their edges, and both ends compute an edge:

        kept = [phases.own(y, t, agents), phases.edges(y, t, which), ..]  # reversed if t is odd
        for each in reversed(kept):
            phases.adjoint(each, g)
        gradients = phases.gradients()  # of K, b, G, C

    y and g are NumPy arrays that change in place. Agents of others go wrong in y and g wherever an
    edge of theirs is not computed here, which is why they are exchanged before each phase. The
    gradient of K and b is complete for agents all of whose edges are computed here, and that of C
    for each edge.

    Args:
        system: the agents of this process and those at the other ends of their edges.
        batch: how many samples.
        names: the numbers of the agents as errors tell them; by default 0, 1, ..
    """

    def __init__(self, system: System, batch: int, names: Sequence[int] | None = None) -> None:
        self.system, self.same = system, batch >= LANES
        self.names = list(names) if names is not None else list(range(len(system.A)))
        self.parts, self.rest = _eliminated(system)
        self.found = _sums(self.parts, len(groups(batch)))

    def own(self, y: np.ndarray, t: int, agents: Sequence[int] | np.ndarray) -> Phase:
        """These agents by themselves in step t."""
        which = _whole(agents)
        before = y[:, which]
        self._run(y, t, (which, NONE, NONE, START))
        return Phase("own", t, which, (before, y[:, which]))

    def plant_edges(self, y: np.ndarray, t: int, which: Sequence[int] | np.ndarray) -> Phase:
        """These edges of plants, which share no agent, in step t."""
        edges = _whole(which)
        self._run(y, t, (NONE, edges, NONE, START))
        return Phase("plant_edges", t, edges, ())

    def edges(self, y: np.ndarray, t: int, which: Sequence[int] | np.ndarray) -> Phase:
        """These edges of controllers, which share no agent, in step t."""
        edges = _whole(which)
        before = self._both(y, edges)
        self._run(y, t, (NONE, NONE, edges, np.array([0, len(edges)])))
        return Phase("edges", t, edges, (before, self._both(y, edges)))

    def adjoint(self, phase: Phase, g: np.ndarray) -> None:
        """From gradients after a phase to those before it, in place; those of weights are added."""
        B, n, c = len(g), g.shape[2], self._c
        which, count = phase.which, len(phase.which)
        states, mids, before = (np.empty(s) for s in ((B, 2, 0, n), (B, 1, 0, n), (B, 1, 0, 2 * c)))
        after = np.empty((B, 0, 2 * c))
        chosen = NONE, which, NONE, START
        if phase.kind == "own":
            chosen = which, NONE, NONE, START
            states = np.stack(phase.kept, 1)
            mids = states[:, :1].copy() if phase.t % 2 else states[:, 1:].copy()
        elif phase.kind == "edges":
            chosen = NONE, NONE, which, np.array([0, count])
            before, after = phase.kept[0].reshape(B, 1, count, 2 * c), phase.kept[1]
        dK, db, *to_own, dC = self.found
        found, grads = ((dK, db), tuple(to_own), dC), np.empty((0, 1, 1, 1))
        given = (states, mids, before, after), grads, found
        kernels()["backward"](size_of(c), g, phase.t, chosen, *self.parts, self.same, *given)

    def gradients(self) -> dict[str, Tensor]:
        """Those of K, b, G and C, of all that was run backwards so far."""
        return _of_weights(self.system, [*self.found], self.rest)

    @property
    def _c(self) -> int:
        return self.parts[0][1].shape[-1]

    def _both(self, y: np.ndarray, edges: np.ndarray) -> np.ndarray:
        """The controllers at both ends of edges, `(B, E, 2 c)`."""
        pairs, xi = self.parts[3][0][edges], y[:, :, -self._c :]
        return np.concatenate([xi[:, pairs[:, 0]], xi[:, pairs[:, 1]]], -1)

    def _run(self, y: np.ndarray, t: int, chosen: tuple[np.ndarray, ...]) -> None:
        failed = np.zeros(3, dtype=np.int64)
        kept = np.empty((0, 2, 1, 1)), np.empty((0, 1, 1, 1)), np.empty((0, 1, 1, 1))
        run, size = kernels()["forward"], size_of(self._c)
        run(size, y, t, chosen, *self.parts, self.same, kept, failed)
        if failed[0]:
            _fail(int(failed[0]), t, int(failed[2]), self.system, self.names)


@dataclass(frozen=True, eq=False)
class Phase:
    """What was run, and what its adjoint needs."""

    kind: str
    t: int
    which: np.ndarray
    kept: tuple[np.ndarray, ...]


def colours(links: Edges) -> list[list[int]]:
    """The numbers of edges phase by phase: those of one share no agent, and all keep their order.

    Examples:
        >>> colours(((0, 1), (2, 3), (1, 2)))
        [[0, 1], [2]]
    """
    found: list[list[int]] = []
    busy: set[int] = set()
    for e, pair in enumerate(links):
        if not found or busy & {*pair}:
            found.append([])
            busy = set()
        found[-1].append(e)
        busy |= {*pair}
    return found


class _Run(torch.autograd.Function):
    """All steps of all samples: states and ends of substeps, `(B, steps + 1, N, n)` and `steps`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        *weights, (system, steps, first) = given
        start = _array(y)
        (B, N, n), c = start.shape, system.K.shape[-1]
        keep = B if any(ctx.needs_input_grad) else 0
        if keep:  # copies: weights may be changed in place before the backward pass
            ctx.save_for_backward(y, *weights)  # for gradients of gradients
            K, b, G, C = (t.detach().clone() for t in weights)
            system = replace(system, K=K, b=b, G=G, C=C)
        parts, rest = _eliminated(system)
        kept = (
            np.empty((B, steps + 1, N, n)),
            np.empty((B, steps, N, n)),
            np.empty((keep, steps, len(system.links), 2 * c)),
        )
        failed = np.zeros((len(groups(B)), 3), dtype=np.int64)
        run, size = kernels()["forward"], size_of(c)

        y_now, chosen = start.copy(), _everything(system)

        def group(j: int, low: int, high: int) -> None:
            ours = tuple(k[low:high] for k in kept)
            run(size, y_now[low:high], first, chosen, *parts, B >= LANES, ours, failed[j])

        each_group(B, run, group, together=True)
        for kind, t, which in failed.tolist():
            if kind:
                _fail(kind, first + t, which, system, range(N))
        ctx.given, ctx.parts, ctx.kept = (system, first, rest), parts, kept
        states, ends = (torch.from_numpy(k.copy() if keep else k) for k in kept[:2])
        ctx.mark_non_differentiable(ends)
        return states, ends

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            return _twice(ctx, grads[0])
        return _gradients(ctx, *grads)


def _twice(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """Gradients that have gradients themselves: those of the definition, which takes longer."""
    system, first, _ = ctx.given

    def states(y: Tensor, K: Tensor, b: Tensor, G: Tensor, C: Tensor) -> Tensor:
        same = replace(system, K=K, b=b, G=G, C=C)
        return step.trajectory(same, y, g.shape[1] - 1, first)[0].transpose(0, 1)

    return *differentiable(states, ctx.saved_tensors, g), None


def _gradients(ctx: Any, *grads: Any) -> Any:
    (system, first, rest), parts, kept = ctx.given, ctx.parts, ctx.kept
    g, run, size = _array(grads[0]), kernels()["backward"], size_of(system.K.shape[-1])
    B, dy, chosen = len(g), g[:, -1].copy(), _everything(system)
    ahead, found = np.empty((0, 1, 1)), _sums(parts, len(groups(B)))

    def group(j: int, low: int, high: int) -> None:
        dK, db, *to_own, dC = (each[j : j + (high - low if B < LANES else 1)] for each in found)
        to, ours = ((dK, db), tuple(to_own), dC), (*(k[low:high] for k in kept), ahead)
        run(size, dy[low:high], first, chosen, *parts, B >= LANES, ours, g[low:high], to)

    each_group(B, run, group, together=True)
    to_weights = _of_weights(system, found, rest)
    return torch.from_numpy(dy), *to_weights.values(), None


def _fail(kind: int, t: int, which: int, system: System, names: Sequence[int]) -> NoReturn:
    if kind > 1:
        i, k = (system.links if kind == 2 else system.plant_links)[which]
        where = f"link ({names[i]}, {names[k]})"
    else:
        where = f"agent {names[which]}"
    raise ConvergenceError(
        f"step {t}, {where}: no solution of the step was found to rounding; states or weights are "
        "NaN, infinite or far too large, or the plant is too stiff for the fused engine: take "
        'engine="reference".'
    )


def _eliminated(system: System) -> tuple[tuple[Any, ...], elimination.Rest]:
    """Weights, own matrices, plant edges and edges as the kernel takes them; what G is used by."""
    own, rest = elimination.eliminate(system)
    K, b, C = (_array(t) for t in (system.K, system.b, system.C))
    weights, C = (K.reshape(*b.shape[:2], -1), b), system.h * C.reshape(len(C), K.shape[-1] ** 2)
    plant = _indices(system.plant_links), *elimination.plant_edges(system)
    links = _indices(system.links), C
    return (weights, tuple(own), plant, links), rest


def _sums(parts: tuple[Any, ...], groups: int) -> list[np.ndarray]:
    """Room for the gradients of K, b, M, U, u, W and C of each group of samples."""
    (K, b), own, _, (_, C) = parts
    graded = (getattr(elimination.Own(*own), name) for name in GRADED)
    return [np.zeros((groups, *a.shape)) for a in (K, b, *graded, C)]


def _of_weights(system: System, found: list[np.ndarray], rest: Any) -> dict[str, Tensor]:
    """Gradients of K, b, G, C from those that the groups of samples found."""
    K, b, M, U, u, W, C = (summed(each) for each in found)
    G = elimination.eliminate_adjoint(system, rest, (M, U, u, W))
    shaped = K.reshape(system.K.shape), b, G, system.h * C.reshape(system.C.shape)
    return {n: torch.from_numpy(a) for n, a in zip(("K", "b", "G", "C"), shaped, strict=True)}


def summed(each: np.ndarray) -> np.ndarray:
    """The sum over groups, one after the other, so that its bits do not depend on shapes."""
    total = each[0].copy()
    for part in each[1:]:
        total += part
    return total


def _array(given: Tensor) -> np.ndarray:
    return given.detach().contiguous().numpy()


def _indices(links: Edges) -> np.ndarray:
    return np.array(links, dtype=np.int64).reshape(-1, 2)


def _everything(system: System) -> tuple[np.ndarray, ...]:
    """All agents, edges of plants and edges, and where the colours of these begin, and end."""
    cuts = np.cumsum([0, *(len(which) for which in colours(system.links))], dtype=np.int64)
    numbers = (len(system.A), len(system.plant_links), len(system.links))
    return *(np.arange(each) for each in numbers), cuts


def _whole(which: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(which, dtype=np.int64)


def size_of(c: int) -> Any:
    """c as the kernel takes it: small ones are compiled each by itself."""
    return (0,) * c if c <= UNROLLED else np.zeros(c)


def kernels() -> dict[str, Any]:
    """By name; numba compiles each when it is first called."""
    with _lock:
        return closed_loop.compiled(_njit)


def groups(B: int) -> list[tuple[int, int, int]]:
    """Groups of samples that share sums: number, first sample, end.

    As many as there are lanes, or each by itself if they are fewer: fixed, so that the bits do not
    depend on threads.
    """
    width = LANES if B >= LANES else 1
    return [(j, low, min(B, low + width)) for j, low in enumerate(range(0, B, width))]


def each_group(
    B: int, kernel: Any, run: Callable[[int, int, int], None], *, together: bool = False
) -> None:
    """Run groups of samples by as many threads as PyTorch may use: who is free takes the next.

    Groups of one sample are run several at a time if `together`, because they fill lanes: `run`
    gets the number of the first of them.
    """
    bounds, threads = groups(B), threads_allowed()
    if together and 0 < B < LANES:
        cuts = [B * k // min(B, threads) for k in range(min(B, threads) + 1)]
        bounds = [(low, low, high) for low, high in pairwise(cuts)]
    waiting = iter(bounds)

    def share() -> None:
        for bound in waiting:  # an iterator of a list gives each to one thread
            run(*bound)

    with nullcontext() if kernel.signatures else said_if_slow(COMPILING):
        rest = [_pool().submit(share) for _ in range(1, min(len(bounds), threads))]
        try:
            share()
        finally:
            for future in rest:
                future.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "hdnn-control")


def _after_fork() -> None:
    """Threads, and the lock that one of them may hold, stayed in the parent."""
    global _lock
    _lock = threading.Lock()
    _pool.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
