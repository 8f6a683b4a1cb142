"""How far kernels are from what cannot be less: the limits of a GPU, matrix products on a CPU."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from typing import cast

import rivals
import torch
from rivals import Row, say, weights
from torch import Tensor

import hdnn
from hdnn import functional


def distance(seconds: float, quick: bool) -> Row:
    """How far the kernels are from the limits of the chip: H2, n = 64, batch 8192, tf32.

    Of each half step a sample needs eight products by an m x m matrix: two forwards, two to
    rebuild the state, two for the adjoint, two for the gradient of K. And a hidden unit needs one
    exponential forwards, and one backwards.
    """
    n, batch, N = 64, 8192, 16 if quick else 256
    m, tensors = n // 2, weights("h2", n, batch, N, "cuda")
    rate, special = _tf32_rate(), _special_rate()
    operations, exponentials = batch * N * 2 * 8 * 2 * m**2, batch * N * 2 * m * 2
    bounds = {"products_ms": 1e3 * operations / rate, "special_ms": 1e3 * exponentials / special}
    with hdnn.engine.use(precision="tf32", check=False):
        times, way = _kernel_times(tensors, seconds)
    lowest, kernel = max(bounds.values()), statistics.median(times)
    row: Row = {"what": f"H2, n = {n}, batch {batch}, {N} layers, tf32", "floor_ms": lowest}
    row |= bounds | {"tf32_rate": rate, "special_rate": special, "kernel_ms": kernel, "by": way}
    row |= {"ratio": kernel / lowest, "target": "report it; <= 3"}
    say(
        f"floor: {lowest:.3f} ms (products {bounds['products_ms']:.3f} at {rate / 1e12:.0f} "
        f"TFLOP/s, exponentials {bounds['special_ms']:.3f}); kernels {kernel:.3f} ms by {way}: "
        f"{row['ratio']:.1f} times the floor, moonshot 3"
    )
    return row


def _elapsed(run: Callable[[], object], count: int) -> float:
    """Milliseconds of device time of each of so many runs, queued one behind the other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / count


def _tf32_rate() -> float:
    """Operations a second of a large product."""
    a, b = torch.randn(2, 8192, 8192, device="cuda").unbind(0)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        _elapsed(lambda: a @ b, 3)
        return 2 * 8192**3 / (1e-3 * min(_elapsed(lambda: a @ b, 10) for _ in range(3)))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _special_rate() -> float:
    """Exponentials a second: 16 for each multiprocessor and clock."""
    properties = torch.cuda.get_device_properties(0)
    clock = 1e3 * getattr(properties, "clock_rate", 0)
    if not clock:
        query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
        try:
            clock = 1e6 * float(subprocess.check_output(query, text=True).split()[0])
        except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
            clock = 1.98e9
    return properties.multi_processor_count * 16 * clock


def _kernel_times(tensors: list[Tensor], seconds: float) -> tuple[list[float], str]:
    """Milliseconds on the device of forwards and backwards, and how they were taken."""
    g = torch.ones_like(tensors[0])

    h2 = cast(Callable[..., Tensor], functional.h2)

    def step() -> object:
        out = h2(*tensors, rivals.H, backprop="reversible")
        return torch.autograd.grad(out, tensors, g)

    run: Callable[[], object] = step
    way = "events around queued steps"
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run, way = graph.replay, "replays of a CUDA graph"
    except RuntimeError as error:
        say(f"no CUDA graph ({rivals.why_not(error)})")
    count = max(1, round(30 / _elapsed(run, 3)))
    end, times = time.perf_counter() + seconds, []
    while time.perf_counter() < end or len(times) < 5:
        times.append(_elapsed(run, count))
    return times, way


# Matrix products alone, on a CPU

WIDE = [(kind, n, threads) for n in (256, 1024) for threads in (None, 1) for kind in ("h2", "h1")]


def against_products(seconds: float, quick: bool) -> list[Row]:
    """Wide stacks against their matrix products alone, with all threads and with one."""
    rows: list[Row] = []
    before = torch.get_num_threads()
    for kind, n, threads in WIDE[:1] if quick else WIDE:
        batch, N = 1000, 4 if quick else 64
        torch.set_num_threads(threads or before)
        try:
            tensors = weights(kind, n, batch, N, "cpu")
            steps = {
                "products": products(kind, n, batch, N),
                "hdnn": rivals.training_step(getattr(functional, kind), tensors),
            }
            times = _in_turns(steps, seconds)
        finally:
            torch.set_num_threads(before)
        ratios = [b / a for a, b in zip(*times.values(), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        alone, ours = (statistics.median(each) for each in times.values())
        what = f"{kind.upper()}, n = {n}, batch {batch}, {N} layers, {threads or before} threads"
        row: Row = {"what": what, "products_ms": alone, "hdnn_ms": ours, "ratio": middle}
        rows.append(row | {"ratio_quartiles": [low, high], "target": "<= 1.3"})
        ratio = f"{middle:.2f} ({low:.2f} .. {high:.2f})"
        say(f"{what}: {ours:.0f} ms, products {alone:.0f} ms, {ratio}")
    return rows


def products(kind: str, n: int, batch: int, N: int) -> rivals.Step:
    """The products of a training step: two forwards and four backwards a step, and no more."""
    m, steps = (n // 2, 2 * N) if kind == "h2" else (n, N)
    K, d_K = torch.randn(2, steps, m, m) / m**0.5
    x, z, a, b = torch.randn(4, batch, m)
    other = torch.empty(m, m)

    def step() -> None:
        for j in range(steps):
            torch.mm(x, K[j].mT, out=a)
            torch.mm(z, K[j], out=b)
        for j in range(steps):
            torch.mm(x, K[j].mT, out=a)
            torch.mm(z.mT, x, out=d_K[j])
            torch.mm(x.mT, z, out=other)
            torch.mm(z, K[j], out=b)

    return step


def _in_turns(steps: dict[str, rivals.Step], seconds: float) -> dict[str, list[float]]:
    """Milliseconds of each, one after the other; at least five of each."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["hdnn"]) < 5:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times
