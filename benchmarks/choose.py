"""The fused kernels of a device against each other: the table that `engine="auto"` decides by.

    python benchmarks/engine.py --device cuda --choose
    python benchmarks/engine.py --device cpu --choose

writes src/hdnn/engine/choices.json: milliseconds of a step forwards and backwards, for each scheme,
precision (or dtype, on a CPU), batch, width and depth, by each kernel that can run it. All kernels
of a GPU are compiled first, by as many processes as there are cores. A CPU has two tables, for one
thread and for all. Large stacks are measured with fewer layers there, since each of them takes as
long as the others. Nothing else should run then: threads that have to wait for a core make matrix
products several times slower, and single kernels hardly.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from random import Random
from typing import Any, NamedTuple

import report
import torch
from rivals import say

from hdnn.engine import choice
from hdnn.engine.dispatch import FUSED_KERNELS
from hdnn.engine.kernels.protocol import Stack

SCHEMES = {"euler": (), "alternating": (0, 1), "shears": (0, 1, 0)}
PRECISIONS = {"cuda": ("ieee", "tf32", "bf16"), "cpu": ("float32", "float64")}
WIDTHS = {"cuda": (32, 64, 96, 128, 192, 256), "cpu": choice.WIDTHS}
DEPTHS = {"cuda": (16, 64), "cpu": (16,)}
TURNS = 5  # measurements of each, of which the median counts
BLOCK = 0.004  # seconds of one
HOPELESS = 4  # times the best, after which one measurement is enough
# On a CPU, which other programs use too, the least counts of at least three in this many seconds,
# and of so many passes over all cases.
PATIENCE, PASSES = 0.15, 2
LARGEST = 2048 * 384**2  # products of a layer on a CPU; what has more is like the next smaller
MUCH = 2**28  # products of a stack on a CPU; fewer layers are measured than would take more


class Case(NamedTuple):
    """A stack to be measured."""

    device: str
    scheme: str
    precision: str
    batch: int
    n: int
    layers: int

    def stack(self) -> Stack:
        """Its description: that of H1 with the canonical J, H2 or Verlet."""
        turns = SCHEMES[self.scheme]
        width = self.n // 2 if turns else self.n
        kind, rows = ("same", (width, width)) if turns else ("canonical", (width,))
        where = torch.device("cpu")
        if self.device == "cuda":
            where = torch.device("cuda", torch.cuda.current_device())
        dtype = torch.float64 if self.precision == "float64" else torch.float32
        sizes = (self.batch, self.n, rows, dtype, where, False)
        return Stack("tanh", kind, self.layers, turns, False, *sizes)

    def kernels(self) -> dict[str, Any]:
        """By the names of the table."""
        made, stack = FUSED_KERNELS[self.device][0], self.stack()
        if self.device == "cpu":
            return {name: kernel(stack) for name, kernel in made.items()}
        one = made["shears" if stack.turns else "euler"]
        return {
            "one kernel": one(stack, self.precision, False),
            "products": made["products"](stack, self.precision, False),
        }

    def tensors(self) -> tuple[Any, ...]:
        stack = self.stack()
        options: Any = {"device": stack.device, "dtype": stack.dtype}
        width, N = stack.width, self.layers
        K = [torch.randn(N, r, width, **options) / width**0.5 for r in stack.rows]
        b = [torch.zeros(N, r, **options) for r in stack.rows]
        c = torch.full((stack.steps,), 0.05, **options)
        return *K, *b, *[None] * len(K), c

    def measured(self) -> Case:
        """The same, with as many layers as are measured."""
        if self.device == "cuda":
            return self
        most = MUCH // (max(32, self.batch) * self.n**2)  # a tile is never less
        return self._replace(layers=max(1, min(self.layers, most)))


def cases(device: str, quick: bool) -> Iterator[Case]:
    """All that are measured."""
    batches, widths = choice.BATCHES[device], WIDTHS[device]
    precisions, depths = PRECISIONS[device], DEPTHS[device]
    for scheme in SCHEMES:
        for precision in precisions[1:2] if quick else precisions:
            for n in widths[:2] if quick else widths:
                for batch in batches[:2] if quick else batches:
                    for layers in depths[:1] if quick else depths:
                        if device == "cuda" or batch * n**2 <= LARGEST:
                            yield Case(device, scheme, precision, batch, n, layers)


def step_of(case: Case, kernel: Any) -> Callable[[], None]:
    tensors = case.tensors()
    y = torch.randn(case.batch, case.n, device=case.device, dtype=tensors[0].dtype)

    def step() -> None:
        y_N, kept = kernel.forward(y, tensors, True)
        kernel.backward(kept, y_N, tensors)

    return step


def compile_one(case: Case) -> None:
    """Run a case once, so that its kernels lie in Triton's cache on disk."""
    step_of(case, case.kernels()["one kernel"])()
    torch.cuda.synchronize()


def milliseconds(steps: dict[str, Callable[[], None]], device: str) -> dict[str, float]:
    """The time of a step of each, in turns."""
    wait, typical = torch.cuda.synchronize, statistics.median
    if device == "cpu":
        wait, typical = _nothing, min
    counts, once = {}, {}
    for name, step in steps.items():
        for _ in range(4 if device == "cuda" else 1):  # compiles, and captures what is launched
            step()
        once[name] = max(_seconds(step, 1, wait), 1e-6)
        counts[name] = max(1, round(BLOCK / once[name]))
    hopeless = {name: 1e3 * s for name, s in once.items() if s > HOPELESS * min(once.values())}
    steps = {name: step for name, step in steps.items() if name not in hopeless}
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + PATIENCE
    while len(next(iter(times.values()))) < (TURNS if device == "cuda" else 3) or (
        device == "cpu" and time.perf_counter() < end
    ):
        for name, step in steps.items():
            times[name].append(1e3 * _seconds(step, counts[name], wait))
    return {name: typical(found) for name, found in times.items()} | hopeless


def _nothing() -> None:
    pass


def _seconds(step: Callable[[], None], count: int, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return (time.perf_counter() - start) / count


def tables(device: str, quick: bool) -> dict[str, dict[str, Any]]:
    """The tables of a device by name, as `hdnn.engine.choice` reads them."""
    found, threads = {device: measure(device, quick)}, torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
        try:
            found[choice.ONE_THREAD] = measure(device, quick)
        finally:
            torch.set_num_threads(threads)
    return found


def measure(device: str, quick: bool) -> dict[str, Any]:
    """One table, with the threads that PyTorch has now."""
    wanted = list(cases(device, quick))
    if device == "cuda":
        compile_all(wanted)
    ms: dict[str, Any] = {}
    for case in wanted * (1 if device == "cuda" else PASSES):
        less = case.measured()
        found = milliseconds({k: step_of(less, made) for k, made in less.kernels().items()}, device)
        best = min(found, key=lambda name: found[name])
        for name, time_ in found.items():
            at = ms.setdefault(case.scheme, {}).setdefault(case.precision, {}).setdefault(name, {})
            by_width = at.setdefault(str(case.batch), {}).setdefault(str(case.n), {})
            new, depth = float(f"{time_ * case.layers / less.layers:.3g}"), str(case.layers)
            by_width[depth] = min(new, by_width.get(depth, new))
        if case.layers == wanted[0].layers:
            each = ", ".join(f"{name} {t:.3f}" for name, t in found.items())
            say(f"{' '.join(map(str, less[1:]))}: {each} -> {best}")
    machine = torch.cuda.get_device_name() if device == "cuda" else _processor()
    measured = f"{machine}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    return {"measured": measured, "ms": ms}


def _processor() -> str:
    kind = torch.backends.cpu.get_cpu_capability()
    return f"{report.machine('cpu')['machine']}, {kind}"


def compile_all(wanted: list[Case]) -> None:
    """Compile the kernels of a GPU in many processes at once."""
    different = {}
    for case in wanted:  # depths share kernels, and up to 128 features batches do too
        batch = case.batch if case.n > 128 else 0
        different.setdefault(case._replace(layers=0, batch=batch), case)
    first = [*different.values()]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(min(len(first), max(1, (os.cpu_count() or 1) - 1))) as pool:
        pool.map(compile_one, first, chunksize=1)
    say(f"compiled the kernels of {len(first)} cases")


def check(device: str, count: int = 60) -> float:
    """The most that the kernel which `auto` takes is slower than the best, between known points."""
    random, worst, drawn = Random(0), 1.0, []
    batches, widths = choice.BATCHES[device], WIDTHS[device]
    for _ in range(count):
        n = 2 * round(math.exp(random.uniform(math.log(2), math.log(widths[-1] / 2))))
        batch = round(math.exp(random.uniform(math.log(batches[0]), math.log(batches[-1]))))
        scheme, precision = random.choice([*SCHEMES]), random.choice(PRECISIONS[device])
        drawn.append(Case(device, scheme, precision, batch, n, random.choice((16, 64, 256))))
    if device == "cuda":
        compile_all(drawn)
    for case in [one.measured() for one in drawn]:
        n, batch = case.n, case.batch
        found = milliseconds({k: step_of(case, v) for k, v in case.kernels().items()}, device)
        taken = choice.best(device, case.scheme, case.precision, n, batch, case.layers)
        slower = found[taken] / min(found.values())
        worst = max(worst, slower)
        if slower > 1.1:
            say(f"{' '.join(map(str, case))}: {taken}, {slower:.2f} times the best, {found}")
    say(f"{count} other cases: auto takes at most {worst:.2f} times as long as the best kernel")
    return worst


def packed(grid: dict[str, dict[str, dict[str, float]]]) -> list[Any]:
    """times[batch][width][depth] as lists; the widest states may be missing in large batches."""
    widths = max(([*each] for each in grid.values()), key=len)
    for each in grid.values():
        assert [*each] == widths[: len(each)]
        assert all([*map(int, row)] == [*choice.DEPTHS[: len(row)]] for row in each.values())
    rows = {batch: [[*row.values()] for row in each.values()] for batch, each in grid.items()}
    return [[*map(int, widths)], rows]


def write(made: dict[str, dict[str, Any]]) -> None:
    """Put the tables of a device into the file."""
    known = json.loads(choice.TABLE.read_text()) if choice.TABLE.exists() else {}
    for device, about in made.items():
        ms = {
            scheme: {
                precision: {name: packed(grid) for name, grid in rows.items()}
                for precision, rows in by_precision.items()
            }
            for scheme, by_precision in about["ms"].items()
        }
        known[device] = {**about, "ms": ms}
    text = json.dumps(known, separators=(",", ":"))
    for start in ('"shears"', '"alternating"', '"cpu"', f'"{choice.ONE_THREAD}"'):
        text = text.replace(start, f"\n{start}")
    choice.TABLE.write_text(f"{text}\n")
    for known in (choice._table, choice._best):
        known.cache_clear()
