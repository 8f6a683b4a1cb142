"""How much faster, and in how much memory, a fused stack runs than what one would write instead.

    python benchmarks/engine.py --device cpu
    python benchmarks/engine.py --device cuda --out docs/results

Everything that is compared runs in one process, in turns, so that a busy machine slows all alike:
read the ratios, with their quartiles. The plain loop indexes K[j] in Python, with autograd.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hdnn
from hdnn import functional

Step = Callable[[], object]


def weights(kind: str, n: int, batch: int, N: int, device: str) -> list[Tensor]:
    """y and the weights of a stack, all with gradients."""
    generator = torch.Generator().manual_seed(0)
    m = n // 2
    shapes = [(N, n, n), (N, n)] if kind == "h1" else [(N, m, m), (N, m, m), (N, m), (N, m)]
    scale = (n if kind == "h1" else m) ** -0.5
    tensors = [torch.randn(batch, n, generator=generator)]
    tensors += [
        (scale if len(shape) == 3 else 0.1) * torch.randn(shape, generator=generator)
        for shape in shapes
    ]
    return [t.to(device).requires_grad_() for t in tensors]


def plain_h2(y: Tensor, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h: float) -> Tensor:
    p, q = y.chunk(2, -1)
    for j in range(len(K_p)):
        p = p - h * torch.tanh(q @ K_q[j].T + b_q[j]) @ K_q[j]
        q = q + h * torch.tanh(p @ K_p[j].T + b_p[j]) @ K_p[j]
    return torch.cat([p, q], -1)


def plain_h1(y: Tensor, K: Tensor, b: Tensor, h: float) -> Tensor:
    J = hdnn.interconnection.canonical(y.shape[-1], device=y.device)
    for j in range(len(K)):
        y = y + h * (torch.tanh(y @ K[j].T + b[j]) @ K[j]) @ J.T
    return y


def training_step(function: Callable[..., Tensor], tensors: list[Tensor], **options: Any) -> Step:
    """Forwards and backwards, as one trains."""

    def step() -> None:
        for t in tensors:
            t.grad = None
        function(*tensors, 0.1, **options).sum().backward()

    return step


def interleaved(steps: dict[str, Step], device: str, seconds: float) -> dict[str, list[float]]:
    """Times in milliseconds of each, taken in turns until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
        step()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, step in steps.items():
            _wait(device)
            start = time.perf_counter()
            step()
            _wait(device)
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def row(what: str, base: list[float], other: list[float], target: str) -> dict[str, Any]:
    """The ratio of the two, turn by turn, so that noise common to both cancels."""
    low, middle, high = quartiles([a / b for a, b in zip(base, other, strict=True)])
    return {
        "what": what,
        "plain_ms": quartiles(base)[1],
        "hdnn_ms": quartiles(other)[1],
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "turns": len(base),
        "target": target,
    }


CPU = [
    ("h2", 4, 125, 64, ">= 50"),
    ("h1", 4, 125, 64, ">= 50"),
    ("h2", 16, 125, 64, ">= 20"),
    ("h1", 16, 125, 64, ">= 20"),
    ("h2", 64, 1000, 64, ">= 2"),
    ("h1", 64, 1000, 64, ">= 2"),
    ("h2", 256, 1000, 64, ">= 1.1"),
    ("h1", 256, 1000, 64, ">= 1.1"),
]
CUDA = [
    ("h2", 64, 8192, 256, "tf32", ">= 100"),
    ("h2", 64, 8192, 256, "ieee", ">= 20"),
    ("h2", 64, 8192, 256, "bf16", ""),
    ("h1", 64, 8192, 256, "tf32", ">= 30"),
    ("h2", 64, 8192, 64, "tf32", ""),
]


def speed(device: str, seconds: float) -> list[dict[str, Any]]:
    """Against the plain loop."""
    rows = []
    cases = [(*c[:4], "ieee", c[4]) for c in CPU] if device == "cpu" else CUDA
    for kind, n, batch, N, precision, target in cases:
        tensors = weights(kind, n, batch, N, device)
        plain = plain_h1 if kind == "h1" else plain_h2
        with hdnn.engine.use(precision=precision, check=False):
            steps = {
                "plain": training_step(plain, tensors),
                "hdnn": training_step(getattr(functional, kind), tensors),
            }
            times = interleaved(steps, device, seconds)
        what = f"{kind.upper()}, n = {n}, batch {batch}, {N} layers, {precision}"
        rows.append(row(what, times["plain"], times["hdnn"], target))
        print(_line(rows[-1]), flush=True)
    return rows


def others(device: str, seconds: float) -> list[dict[str, Any]]:
    """Against what one would pick instead, for one H2 of a usual size."""
    n, batch, N = (64, 8192, 64) if device == "cuda" else (16, 125, 64)
    tensors = weights("h2", n, batch, N, device)
    rivals: dict[str, Callable[[], Step]] = {
        "torch.compile": lambda: training_step(torch.compile(plain_h2), tensors),
        "torch.utils.checkpoint": lambda: training_step(_checkpointed, tensors),
        "torchdiffeq, adjoint": lambda: _torchdiffeq(tensors),
        "memcnn": lambda: _memcnn(tensors),
        "revlib": lambda: _revlib(tensors),
    }
    rows = []
    for name, make in rivals.items():
        try:
            steps = {"rival": make(), "hdnn": training_step(functional.h2, tensors)}
            times = interleaved(steps, device, seconds)
        except Exception as error:  # a rival that does not run is a result too
            reason = " ".join(str(error).split())[:160]
            rows.append({"what": name, "failed": f"{type(error).__name__}: {reason}"})
            print(f"{name}: does not run here ({rows[-1]['failed']})", flush=True)
            continue
        rows.append(row(name, times["rival"], times["hdnn"], ""))
        print(_line(rows[-1]), flush=True)
    return rows


def _checkpointed(y: Tensor, K_p: Tensor, K_q: Tensor, b_p: Tensor, b_q: Tensor, h: float):
    from torch.utils.checkpoint import checkpoint

    for part in torch.arange(len(K_p)).split(8):
        chosen = [w[part] for w in (K_p, K_q, b_p, b_q)]
        y = checkpoint(plain_h2, y, *chosen, h, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
    return y


def _torchdiffeq(tensors: list[Tensor]) -> Step:
    from torchdiffeq import odeint_adjoint  # pyright: ignore[reportMissingImports]

    class Field(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.ParameterList([torch.nn.Parameter(t) for t in tensors[1:]])

        def forward(self, t: Tensor, y: Tensor) -> Tensor:
            K_p, K_q, b_p, b_q = self.w
            j = min(int(t / 0.1), len(K_p) - 1)
            p, q = y.chunk(2, -1)
            f_p = -torch.tanh(q @ K_q[j].T + b_q[j]) @ K_q[j]
            return torch.cat([f_p, torch.tanh(p @ K_p[j].T + b_p[j]) @ K_p[j]], -1)

    field, N = Field().to(tensors[0].device), len(tensors[1])
    grid = torch.linspace(0, 0.1 * N, N + 1, device=tensors[0].device)

    def step() -> None:
        odeint_adjoint(field, tensors[0], grid, method="euler")[-1].sum().backward()

    return step


class _Half(torch.nn.Module):
    """One half step, for reversible wrappers."""

    def __init__(self, K: Tensor, b: Tensor, sign: float) -> None:
        super().__init__()
        self.K, self.b = (
            torch.nn.Parameter(K.detach().clone()),
            torch.nn.Parameter(b.detach().clone()),
        )
        self.sign = sign

    def forward(self, x: Tensor) -> Tensor:
        return self.sign * 0.1 * torch.tanh(x @ self.K.T + self.b) @ self.K


def _memcnn(tensors: list[Tensor]) -> Step:
    import memcnn  # pyright: ignore[reportMissingImports]

    y, K_p, K_q, b_p, b_q = tensors
    blocks = [
        memcnn.InvertibleModuleWrapper(
            memcnn.AdditiveCoupling(
                _Half(K_q[j], b_q[j], -1), _Half(K_p[j], b_p[j], 1), split_dim=-1
            ),
            keep_input=False,
        )
        for j in range(len(K_p))
    ]
    net = torch.nn.Sequential(*blocks).to(y.device)
    return lambda: net(y.detach().clone().requires_grad_()).sum().backward()


def _revlib(tensors: list[Tensor]) -> Step:
    import revlib  # pyright: ignore[reportMissingImports]

    y, K_p, K_q, b_p, b_q = tensors
    halves = [
        half
        for j in range(len(K_p))
        for half in (_Half(K_q[j], b_q[j], -1), _Half(K_p[j], b_p[j], 1))
    ]
    net = revlib.ReversibleSequential(*halves, split_dim=-1).to(y.device)
    return lambda: net(y.detach().clone().requires_grad_()).sum().backward()


def depth(device: str, seconds: float) -> list[dict[str, Any]]:
    """Time and memory of a training step against the number of layers."""
    n, batch = (64, 8192) if device == "cuda" else (16, 1000)
    rows = []
    for N in (16, 64, 256, 1024, 4096):
        tensors = weights("h2", n, batch, N, device)
        steps = {"hdnn": training_step(functional.h2, tensors, backprop="reversible")}
        if N <= 1024:
            steps["plain"] = training_step(plain_h2, tensors)
        with hdnn.engine.use(check=False):
            times = interleaved(steps, device, seconds / 2)
            memory = {name: _memory(step, tensors, device) for name, step in steps.items()}
        for name in steps:
            ms = quartiles(times[name])[1]
            rows.append({"layers": N, "engine": name, "ms": ms, "MiB": memory[name]})
            print(f"{N:5d} layers, {name:5s}: {ms:9.2f} ms, {memory[name]:9.2f} MiB", flush=True)
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


def accuracy(device: str) -> list[dict[str, Any]]:
    """Gradients against the float64 reference: K = randn/sqrt(m), h = 0.1, N = 64."""
    rows = []
    targets = {"ieee": 1e-5, "tf32x3": 1e-5, "tf32": 3e-3, "bf16": 5e-2}
    for precision in ["ieee"] if device == "cpu" else list(targets):
        tensors = weights("h2", 64, 1000, 64, device)
        exact = [t.detach().double().requires_grad_() for t in tensors]
        functional.h2(*exact, 0.1, engine="reference", backprop="stored").sum().backward()  # pyright: ignore
        with hdnn.engine.use(precision=precision, check=False):
            functional.h2(*tensors, 0.1).sum().backward()  # pyright: ignore
        error = max(
            float((t.grad - e.grad).norm() / e.grad.norm())  # pyright: ignore
            for t, e in zip(tensors, exact, strict=True)
        )
        rows.append({"precision": precision, "error": error, "target": targets[precision]})
        print(f"gradients, {precision}: {error:.1e} (target {targets[precision]:.0e})", flush=True)
    return rows


def _line(r: dict[str, Any]) -> str:
    low, high = r["ratio_quartiles"]
    return (
        f"{r['what']}: {r['plain_ms']:.2f} ms / {r['hdnn_ms']:.3f} ms = {r['ratio']:.1f}x "
        f"({low:.1f} .. {high:.1f}) {r['target']}"
    )


def machine(device: str) -> dict[str, str]:
    chip = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return {
        "machine": f"{chip}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hdnn": hdnn.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = ["# Engine, on " + result["machine"]["machine"], ""]
    lines += [
        f"`{result['command']}`, " + ", ".join(f"{k} {v}" for k, v in result["machine"].items())
    ]
    lines += ["", "| forwards and backwards | instead | hdnn | ratio (quartiles) | target |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for r in result["speed"] + result["others"]:
        if "failed" in r:
            lines.append(f"| {r['what']} | does not run: {r['failed']} | | | |")
            continue
        low, high = r["ratio_quartiles"]
        lines.append(
            f"| {r['what']} | {r['plain_ms']:.2f} ms | {r['hdnn_ms']:.3f} ms "
            f"| {r['ratio']:.1f} ({low:.1f} to {high:.1f}) | {r['target']} |"
        )
    lines += ["", "| layers | engine | ms | MiB |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {r['layers']} | {r['engine']} | {r['ms']:.2f} | {r['MiB']:.2f} |"
        for r in result["depth"]
    ]
    lines += ["", "| precision | relative error of gradients | target |", "| --- | --- | --- |"]
    lines += [
        f"| {r['precision']} | {r['error']:.1e} | {r['target']:.0e} |" for r in result["accuracy"]
    ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Time and memory against depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for ax, key, label in zip(
        figure.subplots(1, 2), ("ms", "MiB"), ("time, ms", "memory, MiB"), strict=True
    ):
        for name, colour, mark in (("plain", "#D55E00", "s"), ("hdnn", "#0072B2", "o")):
            rows = [r for r in result["depth"] if r["engine"] == name]
            ax.loglog(
                [r["layers"] for r in rows],
                [r[key] for r in rows],
                color=colour,
                marker=mark,
                label={"plain": "plain loop", "hdnn": "hdnn, reversible"}[name],
            )
        ax.set(xlabel="layers", ylabel=label)
        ax.grid(alpha=0.3)
        ax.legend()
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each comparison")
    parser.add_argument("--out", type=Path, help="folder for engine-DEVICE.json, .md and .png")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; use --device cpu", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "command": f"python benchmarks/engine.py --device {options.device}",
        "machine": machine(options.device),
        "accuracy": accuracy(options.device),
        "speed": speed(options.device, options.seconds),
        "depth": depth(options.device, options.seconds),
        "others": others(options.device, options.seconds),
    }
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        stem = options.out / f"engine-{options.device}"
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(result))
        try:
            plot(result, stem.with_suffix(".png"))
        except ImportError:
            print("no plot: matplotlib is not installed", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
