"""Speed, memory and accuracy of a stack of layers, against what one would write instead.

    python benchmarks/engine.py --device cpu
    python benchmarks/engine.py --device cuda --out docs/results

All contestants run in one process and in turns, so that slow drifts of the machine cancel. A turn
has as many steps as fill about 30 ms. The time of a step is the time of its turn divided by the
number of steps; ratios are taken turn by turn, and medians and quartiles are over the turns. A step
is a forward and a backward pass with default options. "Plain" is the fastest loop that was found in
plain PyTorch (`PLAIN`); "matrix products" are only the products of a step, which no program can
avoid; "hdnn compiled" is the network inside `torch.compile`; "plain, CUDA graph" is the plain loop
recorded by hand, and "plain, compiled" that loop with `torch.compile(mode="reduce-overhead")`.

Other programs do not slow all contestants alike. The last line says how much of the machine they
used; keep figures only if that is next to nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
import torch
from report import say
from torch import Tensor

import hdnn
from hdnn import functional

BLOCK = 0.03  # seconds of a turn
H = 0.1  # the step of every layer

Step = Callable[[], object]
Row = dict[str, Any]

# kind, features, batch, layers, precision, the ratio to the plain loop that is aimed at
STACKS: dict[str, list[tuple[Any, ...]]] = {
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
        ("h2", 64, 8192, 64, "tf32", 20.0),
        ("h2", 16, 512, 64, "tf32", 20.0),
        ("h2", 128, 8192, 64, "tf32", 30.0),
        ("h2", 256, 8192, 64, "tf32", 7.0),
        ("h2", 256, 512, 64, "tf32", 7.0),
        ("h2", 512, 8192, 64, "tf32", 3.0),
        ("h2", 1024, 8192, 64, "tf32", 2.0),
        ("h2", 2048, 8192, 64, "tf32", 1.2),
        ("h1", 64, 8192, 256, "tf32", 30.0),
        ("h1", 128, 8192, 64, "tf32", 10.0),
        ("h1", 1024, 8192, 64, "tf32", 1.2),
    ],
}
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "seconds": 3.0,
        "stacks": 13,
        "depths": (16, 4096),
        "compiled": "yes",
    },
    "quick": {"seconds": 0.1, "stacks": 2, "depths": (16,), "compiled": "no"},
}


# Where the plain loop is compiled too, which takes half a minute each
COMPILED = (("h2", 256, 8192), ("h2", 1024, 8192))


# Contestants


def weights(kind: str, n: int, batch: int, N: int, device: str) -> list[Tensor]:
    """y and the weights of a stack, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    features = n if kind == "h1" else n // 2
    count = 1 if kind == "h1" else 2
    shapes = count * [(N, features, features)] + count * [(N, features)]
    tensors = [torch.randn(batch, n, generator=generator)]
    for shape in shapes:
        scale = features**-0.5 if len(shape) == 3 else 0.1
        tensors.append(scale * torch.randn(shape, generator=generator))
    return [tensor.to(device).requires_grad_() for tensor in tensors]


def plain_h2(
    y: Tensor, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h: float
) -> Tensor:
    """The loop that ratios refer to.

    The stacks are taken apart once (the gradient of K_p[j] would be a whole stack for each j), and
    each shear is two fused products with one activation between them.
    """
    p, q = y.chunk(2, -1)
    for Kp, Kq, bp, bq in zip(K_p, K_q, b_p, b_q, strict=True):
        p = torch.addmm(p, torch.addmm(bq, q, Kq.T).tanh(), Kq, alpha=-h)
        q = torch.addmm(q, torch.addmm(bp, p, Kp.T).tanh(), Kp, alpha=h)
    return torch.cat([p, q], -1)


def plain_h1(y: Tensor, K: Tensor, b: Tensor, h: float) -> Tensor:
    """The same for forward Euler, with K J^T made once for all layers."""
    K_p, K_q = K.chunk(2, -1)
    moves = torch.cat([-K_q, K_p], -1)
    for Kj, bj, Vj in zip(K, b, moves, strict=True):
        y = torch.addmm(y, torch.addmm(bj, y, Kj.T).tanh(), Vj, alpha=h)
    return y


PLAIN: dict[str, Callable[..., Tensor]] = {"h1": plain_h1, "h2": plain_h2}


def step_of(function: Callable[..., Tensor], leaves: list[Any]) -> Step:
    """A training step without the optimiser; gradients start from None, as after zero_grad."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves, H).sum().backward()

    return step


def plain_compiled(kind: str) -> Callable[..., Tensor]:
    """The plain loop compiled, in a CUDA graph."""
    loop = torch.compile(PLAIN[kind], mode="reduce-overhead")

    def forward(*tensors: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return loop(*tensors)

    return forward


def plain_graph(kind: str, leaves: list[Any]) -> Step:
    """A step of the plain loop as a CUDA graph, recorded by hand."""

    def step() -> None:
        torch.autograd.grad(PLAIN[kind](*leaves, H).sum(), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def peak(step: Step) -> float:
    """MiB on the GPU at the peak of a step."""
    step()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**20


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
    while time.perf_counter() < end or len(min(times.values())) < 5:
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
    functions = {"hdnn": getattr(functional, kind), "plain": PLAIN[kind]}
    if n <= 64 and N <= 64:
        torch._dynamo.reset()
        functions["compiled"] = torch.compile(functions["hdnn"], fullgraph=True)
    steps = {name: step_of(f, tensors) for name, f in functions.items()}
    steps["products"] = products(kind, tensors)
    memory = {}
    if device == "cuda":
        memory = {name: peak(steps[name]) for name in ("hdnn", "plain")}
        steps["plain, CUDA graph"] = plain_graph(kind, tensors)
    times = in_turns(steps, device, seconds)
    ratios = [b / a for a, b in zip(times["hdnn"], times["plain"], strict=True)]
    row: Row = {
        "what": f"{kind.upper()}, {n} features, batch {batch}, {N} layers, {precision}",
        "ms": {name: statistics.median(each) for name, each in times.items()},
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "target": target,
        "MiB": memory,
        "turns": len(ratios),
    }
    figures = ", ".join(f"{name} {t:.3f}" for name, t in row["ms"].items())
    say(f"{row['what']}: {figures} ms; {row['ratio']:.1f} times the plain loop")
    return row


def add_compiled(rows: list[Row], device: str, seconds: float) -> None:
    """The plain loop compiled, beside hdnn: last, for no graph can be recorded after it."""
    for size, row in zip(STACKS[device], rows, strict=False):
        kind, n, batch, N, _, _ = size
        if (kind, n, batch) in COMPILED:
            torch.set_float32_matmul_precision("high")
            tensors = weights(kind, n, batch, N, device)
            steps = {
                "hdnn": step_of(getattr(functional, kind), tensors),
                "compiled": step_of(plain_compiled(kind), tensors),
            }
            times = in_turns(steps, device, seconds)
            ratio = statistics.median(times["compiled"])
            ratio /= statistics.median(times["hdnn"])
            row["ms"]["plain, compiled"] = ratio * row["ms"]["hdnn"]
            say(f"{row['what']}: compiled {ratio:.2f} times as long as hdnn")


# Memory, accuracy, and the time until the first result

MEMORY = """
import sys, torch
sys.path.insert(0, {here!r})
from engine import H, weights
from hdnn import functional
tensors = weights("h2", 16, 4000, {N}, {device!r})
for _ in range(2):
    for leaf in tensors:
        leaf.grad = None
    functional.h2(*tensors, H / {N}, backprop={backprop!r}).sum().backward()
if {device!r} == "cuda":
    print(torch.cuda.max_memory_allocated() / 2**20)
else:
    print(int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 2**10)
"""

FIRST = """
import time, torch, hdnn
after = time.perf_counter()
net = hdnn.H2(features=4, layers=8)
net(torch.randn(100, 4)).sum().backward()
print(time.perf_counter() - after)
"""


def in_process(code: str, **environment: str) -> float:
    how: Any = {"env": os.environ | environment, "check": True, "text": True}
    command = [sys.executable, "-c", code]
    return float(subprocess.run(command, stdout=subprocess.PIPE, **how).stdout)


def memory(device: str, depths: tuple[int, ...]) -> list[Row]:
    """MiB at the peak of a process, by depth and method."""
    rows = []
    here = str(Path(__file__).parent)
    for N in depths:
        row: Row = {"layers": N}
        for backprop in ("auto", "checkpoint", "reversible"):
            options = {"N": N, "device": device, "backprop": backprop}
            row[backprop] = in_process(MEMORY.format(here=here, **options))
        say(f"memory: {row}")
        rows.append(row)
    return rows


def accuracy(device: str) -> Row:
    """The relative error of gradients in float32, against the definition in float64."""
    row: Row = {}
    tensors: Any = weights("h2", 64, 500, 64, device)
    exact: Any = [t.detach().double().requires_grad_() for t in tensors]
    out = functional.h2(*exact, H, engine="reference")
    pairs = list(
        zip(tensors, torch.autograd.grad(out.sum(), exact), strict=True)
    )
    cuda = ("ieee", "tf32x3", "tf32", "bf16")
    for precision in cuda if device == "cuda" else cuda[:1]:
        with hdnn.engine.use(precision=precision):
            step_of(functional.h2, tensors)()
        errors = [float((t.grad - g).norm() / g.norm()) for t, g in pairs]
        row[precision] = max(errors)
    say(f"relative error of gradients: {row}")
    return row


def first_call() -> Row:
    """Seconds of the first step with no compiled kernel on disk, and with."""
    with tempfile.TemporaryDirectory() as folder:
        cold = in_process(FIRST, NUMBA_CACHE_DIR=folder)
        warm = in_process(FIRST, NUMBA_CACHE_DIR=folder)
    say(f"first step: {cold:.1f} s, with kernels on disk {warm:.2f} s")
    return {"cold": cold, "warm": warm}


# The page and the command


def found(result: dict[str, Any]) -> str:
    rows = result["speed"]
    ratios = [row["ratio"] for row in rows]
    text = f"{min(ratios):.1f} to {max(ratios):.0f} times as fast as the plain loop"
    graphs = []
    for row in rows:
        if "plain, CUDA graph" in row["ms"]:
            ms = row["ms"]
            graphs.append(ms["plain, CUDA graph"] / ms["hdnn"])
    if graphs:
        text += f" and {min(graphs):.1f} to {max(graphs):.0f} times as fast as its CUDA graph"
    return f"{text}, on {len(rows)} stacks"


def page(result: dict[str, Any]) -> str:
    lines = report.head(f"Engine, on {result['machine']['machine']}", result)
    names = ["hdnn", "plain", "products", "compiled"]
    heads = ["hdnn, ms", "plain loop", "matrix products", "hdnn compiled"]
    cuda = bool(result["speed"][0]["MiB"])
    if cuda:
        names[2:2] = ["plain, CUDA graph", "plain, compiled"]
        heads[2:2] = ["plain, CUDA graph", "plain, compiled"]
    rows = []
    for row in result["speed"]:
        low, high = row["quartiles"]
        ms = [row["ms"].get(name) for name in names]
        times = ["" if t is None else f"{t:.3f}" for t in ms]
        missed = " (missed)" if row["ratio"] < row["target"] else ""
        ratio = f"{row['ratio']:.1f} ({low:.1f} to {high:.1f})"
        cells = [row["what"], *times, ratio, f"{row['target']:g}{missed}"]
        if cuda:
            cells.append("{hdnn:.0f}, {plain:.0f}".format(**row["MiB"]))
        rows.append(cells)
    heads += ["plain / hdnn", "target"]
    if cuda:
        heads.append("MiB: hdnn, plain loop")
    lines += report.table(" | ".join(["stack", *heads]), rows)
    title = "Peak memory of a process, MiB"
    lines += ["", f"{title} (H2, 16 features, batch 4000):"]
    methods = ("auto", "checkpoint", "reversible")
    rows = []
    for row in result["memory"]:
        rows.append([row["layers"], *[f"{row[name]:.0f}" for name in methods]])
    lines += report.table("layers | " + " | ".join(methods), rows)
    errors = [f"{name} {e:.1e}" for name, e in result["accuracy"].items()]
    errors = ", ".join(errors)
    lines += ["", f"Relative error of gradients against float64: {errors}."]
    first = result["first"]
    if first is not None:
        text = f"The first step takes {first['cold']:.1f} s without compiled kernels on disk"
        lines += ["", f"{text}, and {first['warm']:.2f} s with them."]
    return report.text_of(lines)


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    stacks = STACKS[device][: sizes["stacks"]]
    first = device == "cpu" and len(sizes["depths"]) > 1
    speed = [compare(size, device, sizes["seconds"]) for size in stacks]
    if device == "cuda" and sizes["compiled"] == "yes":
        add_compiled(speed, device, sizes["seconds"])
    return {
        "speed": speed,
        "accuracy": accuracy(device),
        "memory": memory(device, sizes["depths"]),
        "first": first_call() if first else None,
    }


def main() -> int:
    return report.command("engine", __doc__, SIZES, run, page, found=found)


if __name__ == "__main__":
    sys.exit(main())
