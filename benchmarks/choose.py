"""The fused kernels of a GPU against each other: the table that `engine="auto"` decides by.

    python benchmarks/engine.py --device cuda --choose

writes src/hdnn/engine/choices.json: milliseconds of a step forwards and backwards, for each scheme,
precision, batch, width and depth, by each kernel that can run it. All kernels are compiled first,
by as many processes as there are cores.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
from rivals import say

from hdnn.engine import choice
from hdnn.engine.dispatch import FUSED_KERNELS
from hdnn.engine.kernels.protocol import Stack

SCHEMES = {"euler": (), "alternating": (0, 1), "shears": (0, 1, 0)}
PRECISIONS = ("ieee", "tf32", "bf16")
WIDTHS = (32, 64, 96, 128, 192, 256)
DEPTHS = (16, 128)
TURNS = 5  # measurements of each, of which the median counts
BLOCK = 0.004  # seconds of one


class Case(NamedTuple):
    """A stack to be measured."""

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
        where = torch.device("cuda", torch.cuda.current_device())
        sizes = (self.batch, self.n, rows, torch.float32, where, False)
        return Stack("tanh", kind, self.layers, turns, False, *sizes)

    def kernels(self) -> dict[str, Any]:
        """By the names of the table."""
        made, stack = FUSED_KERNELS["cuda"][0], self.stack()
        one = made["shears" if stack.turns else "euler"]
        return {
            "one kernel": one(stack, self.precision, False),
            "products": made["products"](stack, self.precision, False),
        }

    def tensors(self) -> tuple[Any, ...]:
        stack = self.stack()
        options: Any = {"device": stack.device}
        width, N = stack.width, self.layers
        K = [torch.randn(N, r, width, **options) / width**0.5 for r in stack.rows]
        b = [torch.zeros(N, r, **options) for r in stack.rows]
        c = torch.full((stack.steps,), 0.05, **options)
        return *K, *b, *[None] * len(K), c


def cases(quick: bool) -> Iterator[Case]:
    """All that are measured."""
    for scheme in SCHEMES:
        for precision in PRECISIONS[1:2] if quick else PRECISIONS:
            for n in WIDTHS[:2] if quick else WIDTHS:
                for batch in choice.BATCHES[:2] if quick else choice.BATCHES:
                    for layers in DEPTHS[:1] if quick else DEPTHS:
                        yield Case(scheme, precision, batch, n, layers)


def step_of(case: Case, kernel: Any) -> Callable[[], None]:
    tensors = case.tensors()
    y = torch.randn(case.batch, case.n, device="cuda")

    def step() -> None:
        y_N, kept = kernel.forward(y, tensors, True)
        kernel.backward(kept, y_N, tensors)

    return step


def compile_one(case: Case) -> None:
    """Run a case once, so that its kernels lie in Triton's cache on disk."""
    step_of(case, case.kernels()["one kernel"])()
    torch.cuda.synchronize()


def milliseconds(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median time of a step of each, in turns."""
    counts = {}
    for name, step in steps.items():
        for _ in range(4):  # compiles, and captures what is launched
            step()
        counts[name] = max(1, round(BLOCK / max(_seconds(step, 1), 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(TURNS):
        for name, step in steps.items():
            times[name].append(1e3 * _seconds(step, counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _seconds(step: Callable[[], None], count: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def measure(quick: bool) -> dict[str, Any]:
    """The table of one device, as `hdnn.engine.choice` reads it."""
    wanted = list(cases(quick))
    # Depths share their kernels.
    first = [case for case in wanted if case.layers == wanted[0].layers]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(min(len(first), max(1, (os.cpu_count() or 1) - 1))) as pool:
        pool.map(compile_one, first, chunksize=1)
    say(f"compiled the kernels of {len(first)} cases")
    ms: dict[str, Any] = {}
    for case in wanted:
        found = milliseconds({k: step_of(case, made) for k, made in case.kernels().items()})
        best = min(found, key=lambda name: found[name])
        for name, time_ in found.items():
            at = ms.setdefault(case.scheme, {}).setdefault(case.precision, {}).setdefault(name, {})
            by_width = at.setdefault(str(case.batch), {}).setdefault(str(case.n), {})
            by_width[str(case.layers)] = float(f"{time_:.3g}")
        if case.layers == DEPTHS[0]:
            each = ", ".join(f"{name} {t:.3f}" for name, t in found.items())
            say(f"{' '.join(map(str, case))}: {each} -> {best}")
    device = torch.cuda.get_device_name()
    measured = f"{device}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}"
    return {"measured": measured, "ms": ms}


def write(table: dict[str, Any]) -> None:
    """Put the figures of this kind of device into the table."""
    known = json.loads(choice.TABLE.read_text()) if choice.TABLE.exists() else {}
    text = json.dumps({**known, "cuda": table}, separators=(",", ":"))
    choice.TABLE.write_text(
        text.replace('"shears"', '\n"shears"').replace('{"32"', '\n{"32"') + "\n"
    )
