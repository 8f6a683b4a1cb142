"""Speed and memory of a fused stack, against what one would write instead.

    python benchmarks/engine.py --device cpu
    python benchmarks/engine.py --device cuda --out docs/results

All that is compared runs in one process and in turns, so that slow drifts of the machine cancel. In
its turn a contestant takes as many steps in a row as fill about 30 ms, after one that does not
count, and waits for the device once at the end; a step that is longer than that has the turn to
itself. The time of a step is that of its turn over the number of steps, a ratio is taken turn by
turn, and medians and quartiles are over the turns. A "single call" is one step right after one of
the other contestant, which has just emptied the caches: a call that is not in a hot loop.

The plain loop is the fastest found in plain PyTorch (see `rivals.plain_h2`), with autograd. "auto"
is the default: gradients are those of stored states. "reversible" has to be asked for: its memory
does not grow with depth, and each reversal is checked.

Other programs do not slow all contestants alike: many small operations wait for threads that have
no core, one kernel hardly does, and ratios become several times too large. The last line says how
much of the machine others used; keep figures only if that is next to nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import choose
import floor
import report
import rivals
import torch
import width
from rivals import PLAIN, Row, Step, say, training_step, weights
from torch import Tensor

import hdnn
from hdnn import functional
from hdnn.engine import fixed
from hdnn.engine.kernels.protocol import Stack

BLOCK = 0.03  # seconds of a turn
median = statistics.median

# Timing


def in_turns(
    steps: dict[str, Step], device: str, seconds: float, *, block: float = BLOCK, least: int = 5
) -> dict[str, list[float]]:
    """Milliseconds a step of each contestant, turn by turn, until the time is up."""
    counts = {name: _steps_that_fill(step, block, device) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, step in steps.items():
            if counts[name] > 1:
                step()
            times[name].append(1e3 * _clock(step, counts[name], device))
    return times


def _steps_that_fill(step: Step, block: float, device: str) -> int:
    step()  # compiles
    once = min(_clock(step, 1, device) for _ in range(2))
    return max(1, round(block / once))


def _clock(step: Step, count: int, device: str) -> float:
    """Seconds a step, averaged over `count` in a row."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return (time.perf_counter() - start) / count


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(what: str, steps: dict[str, Step], device: str, seconds: float, target: str) -> Row:
    """How many times as fast the second contestant is as the first."""
    times = in_turns(steps, device, seconds)
    single = in_turns(steps, device, seconds / 4, block=0.0)
    (low, middle, high), (base, ours) = _ratio(times), (median(t) for t in times.values())
    row = {"what": what, "instead_ms": base, "hdnn_ms": ours, "ratio": middle}
    row |= {"ratio_quartiles": [low, high], "turns": len(next(iter(times.values())))}
    row |= {"alone": _ratio(single)[1], "target": target}
    say(
        f"{what}: {base:.2f} ms / {ours:.3f} ms = {middle:.1f}x ({low:.1f} .. {high:.1f}), "
        f"single calls {row['alone']:.1f}x {target}"
    )
    return row


def _ratio(times: dict[str, list[float]]) -> tuple[float, float, float]:
    """Quartiles of the ratio, turn by turn, so that noise common to both cancels."""
    base, other = times.values()
    low, middle, high = statistics.quantiles([a / b for a, b in zip(base, other, strict=True)], n=4)
    return low, middle, high


# What is measured

CPU = [
    ("h2", 4, 125, 64, "ieee", ">= 50"),
    ("h1", 4, 125, 64, "ieee", ">= 50"),
    ("h2", 16, 125, 64, "ieee", ">= 20"),
    ("h1", 16, 125, 64, "ieee", ">= 20"),
    ("h2", 64, 1000, 64, "ieee", ">= 2"),
    ("h1", 64, 1000, 64, "ieee", ">= 2"),
    ("h2", 256, 1000, 64, "ieee", ">= 1.1"),
    ("h1", 256, 1000, 64, "ieee", ">= 1.1"),
]
CUDA = [
    ("h2", 64, 8192, 256, "tf32", ">= 100"),
    ("h2", 64, 8192, 256, "ieee", ">= 20"),
    ("h2", 64, 8192, 256, "bf16", ""),
    ("h1", 64, 8192, 256, "tf32", ">= 30"),
    ("h1", 64, 8192, 256, "ieee", ""),
    ("h2", 64, 8192, 64, "tf32", ""),
]


def speed(device: str, seconds: float, quick: bool) -> list[Row]:
    """Against the plain loop."""
    rows = []
    cases = CPU if device == "cpu" else CUDA
    for kind, n, batch, N, precision, target in cases[:2] if quick else cases:
        tensors = weights(kind, n, batch, N, device)
        steps = {
            "plain": training_step(PLAIN[kind], tensors),
            "hdnn": training_step(getattr(functional, kind), tensors),
        }
        what = f"{kind.upper()}, n = {n}, batch {batch}, {N} layers, {precision}"
        with hdnn.engine.use(precision=precision):
            rows.append(compare(what, steps, device, seconds, target))
    return rows


def others(device: str, seconds: float, quick: bool) -> list[Row]:
    """Against the libraries one would use instead, for one H2 of a usual size."""
    n, batch, N = (64, 8192, 64) if device == "cuda" else (16, 125, 64)
    tensors = weights("h2", n, batch, 8 if quick else N, device)
    rows = []
    for name, products, precision, target in _rivals(device):
        make = rivals.RIVALS[name]
        what = f"{name}, {products}, ours {precision}" if device == "cuda" else name
        if quick and name == "torch.compile":
            rows.append({"what": what, "failed": "left out of a quick run"})
            continue
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if products == "tf32" else "highest")
        try:
            with hdnn.engine.use(precision=precision):
                steps = {
                    "rival": rivals.step_of(*make(tensors)),
                    "hdnn": training_step(functional.h2, tensors),
                }
                rows.append(compare(what, steps, device, seconds, target))
        except Exception as error:  # a rival that does not run is a result too
            rows.append({"what": what, "failed": f"does not run: {rivals.why_not(error)}"})
            say(f"{what}: {rows[-1]['failed']}")
        finally:
            torch.set_float32_matmul_precision(before)
    return rows


def _rivals(device: str) -> list[tuple[str, str, str, str]]:
    """Name, precision of its products, precision of ours, target."""
    rest = [(name, "ieee", "ieee", "") for name in rivals.RIVALS]
    if device == "cpu":
        return rest
    name = rest[0][0]
    return [(name, "ieee", "tf32", ">= 50"), (name, "tf32", "tf32", ">= 50"), *rest[1:]]


def sweep(device: str, seconds: float, quick: bool) -> list[Row]:
    """`auto` against the plain loop from narrow to wide: it should never be slower."""
    rows = []
    sizes = (2, 16) if quick else (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    for kind in ("h2", "h1"):
        for n in sizes:
            for batch in (32, 1000):
                tensors = weights(kind, n, batch, 16, device)
                steps = {
                    "plain": training_step(PLAIN[kind], tensors),
                    "hdnn": training_step(getattr(functional, kind), tensors),
                }
                times = in_turns(steps, device, seconds / 8, least=3)
                low, middle, high = _ratio(times)
                row: Row = {"kind": kind.upper(), "n": n, "batch": batch, "ratio": middle}
                rows.append(row | {"ratio_quartiles": [low, high], "slower": high < 1})
                say(
                    f"auto, {kind.upper()}, n = {n}, batch {batch}: {middle:.2f}x "
                    f"({low:.2f} .. {high:.2f}){' SLOWER' if high < 1 else ''}"
                )
    return rows


def depth(device: str, seconds: float, quick: bool) -> list[Row]:
    """Time and memory of a training step against the number of layers, at T = 6.4 for all."""
    n, batch = (64, 8192) if device == "cuda" else (16, 1000)
    rows = []
    for N in (4, 16) if quick else (16, 64, 256, 1024, 4096):
        tensors, h = weights("h2", n, batch, N, device), 6.4 / N
        steps = {
            "auto": training_step(functional.h2, tensors, h),
            "checkpoint": training_step(functional.h2, tensors, h, backprop="checkpoint"),
            "reversible": training_step(functional.h2, tensors, h, backprop="reversible"),
        }
        if N <= 1024:
            steps["plain"] = training_step(rivals.plain_h2, tensors, h)
        times = in_turns(steps, device, seconds / 2)
        memory = {name: _memory(step, tensors, device) for name, step in steps.items()}
        for name in steps:
            ms = median(times[name])
            rows.append({"layers": N, "engine": name, "ms": ms, "MiB": memory[name]})
            say(f"{N:5d} layers, {name:10s}: {ms:9.2f} ms, {memory[name]:9.2f} MiB")
    return rows


def _memory(step: Step, tensors: list[Tensor], device: str) -> float:
    """MiB beyond weights and their gradients: the peak on a GPU, what autograd keeps on a CPU."""
    if device == "cuda":
        step()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    kept: dict[int, int] = {}
    own = {t.untyped_storage().data_ptr() for t in tensors[1:]}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step()
    return sum(kept.values()) / 2**20


# In a process of its own, because the peak is that of its whole life. Linux can reset it.
PEAK = """
import resource, sys
import torch, hdnn
from rivals import training_step, weights
from hdnn import functional

def resident(field):
    try:
        lines = open("/proc/self/status").read().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

N, batch = int(sys.argv[1]), int(sys.argv[2])
step = lambda t: training_step(functional.h2, t, 6.4 / N, backprop="reversible")()
step(weights("h2", 16, batch, 2, "cpu"))  # compiles, starts threads
tensors = weights("h2", 16, batch, N, "cpu")
try:
    open("/proc/self/clear_refs", "w").write("5")
except OSError:
    pass
before = resident("VmRSS")
step(tensors)
grads = sum(t.grad.numel() * t.grad.element_size() for t in tensors)
print((resident("VmHWM") - before - grads) / 2**20)
"""


def peak(rows: list[Row], device: str, quick: bool) -> Row:
    """The peak of a reversible step from shallow to deep, beyond weights and gradients."""
    depths = (4, 16) if quick else (16, 256, 4096)
    if device == "cuda":
        n, batch = 64, 8192
        found = [r["MiB"] for r in rows if r["engine"] == "reversible" and r["layers"] in depths]
    else:
        n, batch = 16, 1000 if quick else 50_000
        found = [float(_python(PEAK, str(N), str(batch))) for N in depths]
    state = batch * n * 4 / 2**20
    row: Row = {"layers": list(depths), "batch": batch, "MiB": found, "state_MiB": state}
    row |= {"ratio": found[-1] / found[0] if found[0] > 0 else None, "target": "<= 1.05"}
    listed = ", ".join(f"{MiB:.2f} MiB at {N}" for N, MiB in zip(depths, found, strict=True))
    say(
        f"peak of a reversible step, n = {n}, batch {batch}: {listed} layers; one state is "
        f"{state:.1f} MiB (target: last <= 1.05 times first)"
    )
    return row


def _python(program: str, *arguments: str) -> str:
    """The last line that a fresh Python prints."""
    paths = Path(__file__).resolve().parent, Path(hdnn.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
    )
    if done.returncode:
        raise RuntimeError(f"a measurement in its own process failed: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1]


def accuracy(device: str) -> list[Row]:
    """Gradients against the float64 reference: K = randn/sqrt(m), h = 0.1, N = 64."""
    rows = []
    targets = {"ieee": 1e-5, "tf32x3": 1e-5, "tf32": 3e-3, "bf16": 5e-2}
    for precision in ["ieee"] if device == "cpu" else list(targets):
        tensors = weights("h2", 64, 1000, 64, device)
        exact = [t.detach().double().requires_grad_() for t in tensors]
        training_step(functional.h2, exact, engine="reference", backprop="stored")()
        with hdnn.engine.use(precision=precision):
            training_step(functional.h2, tensors)()
        error = max(
            float((t.grad - e.grad).norm() / e.grad.norm())  # pyright: ignore
            for t, e in zip(tensors, exact, strict=True)
        )
        rows.append({"precision": precision, "error": error, "target": targets[precision]})
        say(f"gradients, {precision}: {error:.1e} (target {targets[precision]:.0e})")
    return rows


def fixed_state(device: str, quick: bool) -> Row:
    """Forwards and back on the integer grid: tanh, h = 0.5, K = 2 randn/sqrt(m), m = 8."""
    N, m, generator = 64 if quick else 4096, 8, torch.Generator().manual_seed(0)
    y, K_p, K_q = (
        scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for scale, *shape in ((1, 10, 2 * m), (2 * m**-0.5, N, m, m), (2 * m**-0.5, N, m, m))
    )
    b = torch.zeros(N, m, dtype=torch.float64)
    y, *stack = (t.to(device) for t in (y, K_p, K_q, b, b))
    exact = {str(t)[6:]: _comes_back(y.to(t), [w.to(t) for w in stack]) for t in DTYPES}
    h2, h2_inverse = (
        cast(Callable[..., Tensor], f) for f in (functional.h2, functional.h2_inverse)
    )
    with hdnn.engine.use(engine="reference"):
        drift = float((h2_inverse(h2(y, *stack, 0.5), *stack, 0.5) - y).abs().max())
    say(f'state="fixed", {N} layers, bit-exact: {exact}; a float64 state drifts by {drift:.1e}')
    row: Row = {"layers": N, "bit_exact": all(exact.values()), "by_dtype": exact}
    return row | {"float64_drift": drift, "target": "bit-exact"}


DTYPES = (torch.float32, torch.bfloat16)


def _comes_back(y: Tensor, stack: list[Tensor]) -> bool:
    """Whether the reversal inside of the backward pass ends with the very integers of y."""
    N = len(stack[0])
    coef = torch.tensor([-0.5, 0.5], dtype=y.dtype, device=y.device).repeat(N)  # p, then q
    rows = (stack[0].shape[1], stack[1].shape[1])
    sizes = (*y.shape, rows, y.dtype, y.device)
    kernel = fixed.FixedShears(Stack("tanh", "same", N, (0, 1), False, *sizes))
    tensors = (*stack, None, None, coef)
    _, Y_N = kernel.forward(y, tensors, True)
    assert Y_N is not None
    Y_0, _ = kernel.undo(Y_N, torch.ones_like(y), tensors)
    return torch.equal(Y_0, fixed.to_grid(y))


IMPORT = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import hdnn
seconds = time.perf_counter() - start
print(seconds, *({"numba", "triton"} & (sys.modules.keys() - before)))
"""


def import_time(quick: bool) -> Row:
    """The time of `import hdnn` after `import torch`, in fresh processes, and what it imports."""
    found = [_python(IMPORT).split() for _ in range(2 if quick else 7)]
    low, middle, high = statistics.quantiles([float(line[0]) for line in found], n=4)
    brought = sorted({module for line in found for module in line[1:]})
    say(f"import hdnn after torch: {middle:.3f} s ({low:.3f} .. {high:.3f}) < 0.1; {brought=}")
    row: Row = {"seconds": middle, "quartiles": [low, high], "runs": len(found)}
    return row | {"numba_or_triton": brought, "target": "< 0.1 s, numba and triton not imported"}


def widths(seconds: float, out: Path | None, compiled: bool) -> int:
    result: dict[str, Any] = {
        "command": "python benchmarks/engine.py --device cuda --widths" + " --compiled" * compiled,
        "machine": report.machine("cuda"),
        "accuracy": width.accuracy(),
        "memory": width.memory(),
        "speed": width.speed(in_turns, seconds),
        "rivals": width.against_rivals(in_turns, seconds),
    }
    if compiled:
        result["compiled"] = width.against_compiled(in_turns, seconds)
    report.keep(result, width.page(result), "engine-width", out)
    if out is not None:
        try:
            width.plot(result, out / "engine-width.png")
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


# The command


def positive(text: str) -> float:
    if not 0 < (value := float(text)) < 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=positive, default=3.0, help="time for each comparison")
    parser.add_argument("--out", type=Path, help="folder for engine-DEVICE.json, .md and .png")
    parser.add_argument("--quick", action="store_true", help="does it run? The figures are rough")
    parser.add_argument("--choose", action="store_true", help="measure what auto decides by, only")
    parser.add_argument("--widths", action="store_true", help="wide stacks on a GPU, only")
    parser.add_argument(
        "--compiled", action="store_true", help="with them, the compiled loop: some minutes more"
    )
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; use --device cpu", file=sys.stderr)
        return 2
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"--out {options.out} cannot be a folder: {error.strerror}", file=sys.stderr)
            return 2
    device, quick = options.device, options.quick
    if options.widths and device != "cuda":
        print("--widths needs --device cuda", file=sys.stderr)
        return 2
    if options.widths:
        return widths(0.05 if quick else options.seconds / 8, options.out, options.compiled)
    if options.choose:
        made = choose.tables(device, quick)
        if not quick:
            choose.write(made)
            choose.check(device)
        return 0
    before = report.processor_time()
    seconds = 0.2 if quick else options.seconds
    result: dict[str, Any] = {
        "command": f"python benchmarks/engine.py --device {device}" + " --quick" * quick,
        "machine": report.machine(device),
        "import": import_time(quick),
        "accuracy": accuracy(device),
        "fixed_state": fixed_state(device, quick),
        "speed": speed(device, seconds, quick),
        "depth": depth(device, seconds, quick),
        "memory_is": "at the peak" if device == "cuda" else "that autograd keeps",
    }
    if device == "cuda":
        result["floor"] = floor.distance(seconds, quick)
    else:
        result["products"] = floor.against_products(seconds, quick)
    result["peak"] = peak(result["depth"], device, quick)
    result["sweep"] = sweep(device, seconds, quick)
    result["others"] = others(device, seconds, quick)
    result["others_cores"] = report.taken_by_others(before)
    if result["others_cores"] is not None:
        say(f"other programs took {result['others_cores']:.2f} cores (keep figures if <= 0.05)")
    report.keep(result, report.markdown(result), f"engine-{device}", options.out)
    if options.out is not None:
        try:
            report.plot(result, options.out / f"engine-{device}.png")
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
