"""Speed, memory and accuracy of a stack of layers, against what one would write instead.

    python benchmarks/engine.py --device cpu
    python benchmarks/engine.py --device cuda --out docs/results

All that is compared runs in one process and in turns, so that slow drifts of the machine cancel. A
turn is as many steps as fill about 30 ms; the time of a step is that of its turn over the number of
steps, a ratio is taken turn by turn, and medians and quartiles are over the turns. A step is a
forward and a backward pass by default. "Plain" is the fastest loop that was found in plain PyTorch
(`rivals.py`); "products" are the matrix products of a step alone, which no program can do without;
"compiled" is the network inside `torch.compile`.

Other programs do not slow all contestants alike. The last line says how much of the machine they
used; keep figures only if that is next to nothing.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
from rivals import PLAIN, H, Row, Step, say, step_of, weights

import hdnn
from hdnn import functional

BLOCK = 0.03  # seconds of a turn

# kind, features, batch, layers, precision, the ratio to the plain loop that is aimed at
SIZES: dict[str, list[tuple[Any, ...]]] = {
    "cpu": [
        ("h2", 4, 125, 64, "ieee", 25.0),
        ("h2", 16, 125, 64, "ieee", 15.0),
        ("h2", 64, 1000, 64, "ieee", 1.8),
        ("h2", 256, 1000, 64, "ieee", 1.0),
        ("h2", 1024, 200, 64, "ieee", 1.0),
        ("h1", 4, 125, 64, "ieee", 15.0),
    ],
    "cuda": [
        ("h2", 64, 8192, 256, "tf32", 80.0),
        ("h2", 64, 8192, 256, "ieee", 20.0),
        ("h2", 128, 8192, 64, "tf32", 30.0),
        ("h2", 256, 8192, 64, "tf32", 7.0),
        ("h2", 256, 512, 64, "tf32", 7.0),
        ("h2", 1024, 8192, 64, "tf32", 2.0),
        ("h2", 2048, 8192, 64, "tf32", 2.0),
        ("h1", 64, 8192, 256, "tf32", 30.0),
        ("h1", 128, 8192, 64, "tf32", 10.0),
        ("h1", 1024, 8192, 64, "tf32", 2.0),
    ],
}
DEPTHS = (16, 256, 4096)  # layers whose memory is measured


# Contestants


def default(kind: str, tensors: list[Any]) -> Step:
    function = getattr(functional, kind)
    return step_of(lambda: function(*tensors, H), tensors)


def plain(kind: str, tensors: list[Any]) -> Step:
    return step_of(lambda: PLAIN[kind](*tensors, H), tensors)


def compiled(kind: str, tensors: list[Any]) -> Step:
    torch._dynamo.reset()
    function = torch.compile(getattr(functional, kind), fullgraph=True)
    return step_of(lambda: function(*tensors, H), tensors)


def products(kind: str, tensors: list[Any]) -> Step:
    """The matrix products of a step: two forwards and four backwards for each force."""
    y, K = tensors[0].detach(), tensors[1].detach()
    x = y[:, : K.shape[-1]].contiguous()
    forces = 1 if kind == "h1" else 2
    z = x @ K[0].mT

    def step() -> None:
        for layer in K.unbind(0):
            for _ in range(forces):
                for _ in range(2):
                    torch.mm(x, layer.mT)
                    torch.mm(z, layer)
                    torch.mm(z.mT, x)

    return step


# Timing


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def turn(step: Step, count: int, device: str) -> float:
    """Milliseconds a step, over so many steps after one that does not count."""
    step()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start) / count


def in_turns(
    steps: dict[str, Step], device: str, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds a step of each contestant, turn by turn, until the time is up."""
    counts = {}
    for name, step in steps.items():
        step()
        counts[name] = max(1, int(1e3 * BLOCK / turn(step, 1, device)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[name]) < 5:
        for name, step in steps.items():
            times[name].append(turn(step, counts[name], device))
    return times


def compare(size: tuple[Any, ...], device: str, seconds: float) -> Row:
    """All contestants on one stack."""
    kind, n, batch, N, precision, target = size
    torch.set_float32_matmul_precision(
        "high" if precision == "tf32" else "highest"
    )
    tensors = weights(kind, n, batch, N, device)
    steps = {"hdnn": default(kind, tensors), "plain": plain(kind, tensors)}
    steps["products"] = products(kind, tensors)
    if n <= 64 and N <= 64:
        steps["compiled"] = compiled(kind, tensors)
    times = in_turns(steps, device, seconds)
    ratios = [b / a for a, b in zip(times["hdnn"], times["plain"], strict=True)]
    row: Row = {
        "what": f"{kind.upper()}, {n} features, batch {batch}, {N} layers, {precision}",
        "ms": {name: statistics.median(each) for name, each in times.items()},
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "target": target,
        "turns": len(ratios),
    }
    figures = ", ".join(
        f"{name} {value:.3f}" for name, value in row["ms"].items()
    )
    say(f"{row['what']}: {figures} ms; {row['ratio']:.1f} times the plain loop")
    return row


# Memory, accuracy, and the time until the first result

MEMORY = """
import resource, sys, torch
sys.path.insert(0, {here!r})
from rivals import H, weights
from hdnn import functional
tensors = weights("h2", 16, 4000, {N}, {device!r})
for _ in range(2):
    for leaf in tensors:
        leaf.grad = None
    functional.h2(*tensors, H / {N}, backprop={backprop!r}).sum().backward()
if {device!r} == "cuda":
    print(torch.cuda.max_memory_allocated() / 2**20)
else:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
"""

FIRST = """
import os, time
start = time.perf_counter()
import torch, hdnn
after = time.perf_counter()
net = hdnn.H2(features=4, layers=8)
net(torch.randn(100, 4)).sum().backward()
print(time.perf_counter() - after)
"""


def in_process(code: str, **environment: str) -> float:
    import os

    command = [sys.executable, "-c", code]
    variables = os.environ | environment
    done = subprocess.run(
        command, env=variables, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def memory(device: str, depths: tuple[int, ...]) -> list[Row]:
    """MiB at the peak of a process, by depth and method."""
    rows = []
    here = str(Path(__file__).parent)
    for N in depths:
        row: Row = {"layers": N}
        for backprop in ("auto", "checkpoint", "reversible"):
            code = MEMORY.format(
                here=here, N=N, device=device, backprop=backprop
            )
            row[backprop] = in_process(code)
        say(f"memory: {row}")
        rows.append(row)
    return rows


def accuracy(device: str) -> Row:
    """The relative error of gradients in float32, against the definition in float64."""
    row: Row = {}
    for precision in (
        ("ieee", "tf32x3", "tf32", "bf16") if device == "cuda" else ("ieee",)
    ):
        tensors = weights("h2", 64, 500, 64, device)
        exact = [t.detach().double().requires_grad_() for t in tensors]
        with hdnn.engine.use(engine="reference"):
            out = functional.h2(*exact, H)
        wanted = torch.autograd.grad(out.sum(), exact)
        with hdnn.engine.use(precision=precision):
            ours = torch.autograd.grad(
                functional.h2(*tensors, H).sum(), tensors
            )
        errors = [
            float((a - b).norm() / b.norm())
            for a, b in zip(ours, wanted, strict=True)
        ]
        row[precision] = max(errors)
    say(f"relative error of gradients: {row}")
    return row


def first_call() -> Row:
    """Seconds of the first step with no compiled kernel on disk, and with."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (
            in_process(FIRST, NUMBA_CACHE_DIR=folder) for _ in range(2)
        )
    say(f"first step: {cold:.1f} s, with kernels on disk {warm:.2f} s")
    return {"cold": cold, "warm": warm}


# The page and the command


def page(result: dict[str, Any]) -> str:
    about = report.on_one_line(result["machine"])
    lines = [
        f"# Engine, on {result['machine']['machine']}",
        "",
        f"`{result['command']}`, {about}",
    ]
    if result["others_cores"] is not None:
        lines[-1] += (
            f"; other programs took {result['others_cores']:.2f} cores meanwhile"
        )
    names = ("hdnn", "plain", "products", "compiled")
    rows = []
    for row in result["speed"]:
        low, high = row["quartiles"]
        times = [
            f"{row['ms'][name]:.3f}" if name in row["ms"] else ""
            for name in names
        ]
        missed = " (missed)" if row["ratio"] < row["target"] else ""
        ratio = f"{row['ratio']:.1f} ({low:.1f} to {high:.1f})"
        rows.append([row["what"], *times, ratio, f"{row['target']:g}{missed}"])
    head = "stack | hdnn, ms | plain loop | products alone | compiled | plain / hdnn | target"
    lines += report.table(head, rows)
    lines += [
        "",
        "Memory of a process at its peak, MiB (H2, 16 features, batch 4000):",
    ]
    methods = ("auto", "checkpoint", "reversible")
    depths = [
        [row["layers"], *[f"{row[name]:.0f}" for name in methods]]
        for row in result["memory"]
    ]
    lines += report.table("layers | " + " | ".join(methods), depths)
    errors = ", ".join(
        f"{name} {error:.1e}" for name, error in result["accuracy"].items()
    )
    lines += ["", f"Relative error of gradients against float64: {errors}."]
    first = result["first"]
    if first is not None:
        text = f"First step without compiled kernels on disk: {first['cold']:.1f} s"
        lines += ["", f"{text}; with them {first['warm']:.2f} s."]
    return "\n".join(lines) + "\n"


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time for each comparison"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for engine-DEVICE.json and .md"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="does it run? The figures are rough",
    )
    options = parser.parse_args()
    device = options.device
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is available; use --device cpu", file=sys.stderr)
        return 2
    before = report.processor_time()
    sizes = SIZES[device][:2] if options.quick else SIZES[device]
    seconds = 0.1 if options.quick else options.seconds
    result: dict[str, Any] = {
        "command": f"python benchmarks/engine.py --device {device}"
        + " --quick" * options.quick,
        "machine": report.machine(device),
        "speed": [compare(size, device, seconds) for size in sizes],
        "accuracy": accuracy(device),
        "memory": memory(device, DEPTHS[:1] if options.quick else DEPTHS),
        "first": first_call()
        if device == "cpu" and not options.quick
        else None,
    }
    result["others_cores"] = report.taken_by_others(before)
    say(
        f"other programs took {result['others_cores'] or 0:.2f} cores (keep figures if <= 0.05)"
    )
    report.keep(result, page(result), f"engine-{device}", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
