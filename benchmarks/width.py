"""Wide stacks on a GPU: `auto` against the best plain loop, and against its matrix products alone.

    python benchmarks/engine.py --device cuda --widths [--compiled] [--out docs/results]

A training step of 64 layers, forwards and backwards, at batch 8192 and 512. "Products alone" are
the matrix products that a step cannot do without (12 a layer of H2, 6 of H1, at full size), as one
CUDA graph: the floor. The compiled loop is the plain one by
`torch.compile(mode="reduce-overhead")`, which takes minutes to compile. Rivals are the libraries
that one would use instead, where they are installed.
"""

from __future__ import annotations

import multiprocessing
from importlib import import_module
from pathlib import Path
from typing import Any

import report
import rivals
import torch
from rivals import PLAIN, Row, Step, say, step_of, training_step, weights
from torch import Tensor

import hdnn
from hdnn import functional

LAYERS = 64
CASES = [
    *(("h2", n, 8192, precision) for precision in ("tf32", "bf16") for n in (256, 512, 1024, 2048)),
    *(("h2", n, 512, "tf32") for n in (256, 1024)),
    *(("h1", n, 8192, precision) for precision in ("tf32", "bf16") for n in (256, 512, 1024)),
    ("h2", 512, 8192, "ieee"),
]
COMPILED = [case for case in CASES if case[1] <= 1024 and case[3] != "ieee"]
TARGETS = {  # milliseconds
    ("h2", 8192, "tf32"): {256: 4.5, 512: 11, 1024: 22, 2048: 62},
    ("h2", 8192, "bf16"): {256: 3.5, 512: 6, 1024: 11, 2048: 28},
    ("h2", 512, "tf32"): {256: 3, 1024: 8},
}
FROM_PRODUCTS, FROM_COMPILED = 1.5, 2  # of H1 by its products; and what the compiled loop takes
RIVALS = ("torch.utils.checkpoint", "memcnn", "revlib")
DEPTHS = (16, 256)
WARM = 8  # steps of each before the first that counts
TOLERANCES = {"ieee": 1e-5, "tf32": 3e-3, "bf16": 5e-2}


def products(kind: str, n: int, batch: int, precision: str) -> Step:
    """The products of a training step and nothing else, captured in a CUDA graph."""
    m, each = (n // 2, 4) if kind == "h2" else (n, 2)
    half = torch.bfloat16 if precision == "bf16" else torch.float32
    options: Any = {"device": "cuda", "dtype": half}
    K, x = torch.randn(LAYERS, m, m, **options), torch.randn(batch, m, **options)
    z, d = torch.empty(batch, m, **options), torch.empty(m, m, **options)

    def all_of_them() -> None:
        for j in range(LAYERS):
            for _ in range(each):
                torch.mm(x, K[j].mT, out=z)
                torch.mm(x, K[j], out=z)
                torch.mm(z.mT, x, out=d)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        all_of_them()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_of_them()

    def replay(memory: Any = (K, x, z, d)) -> None:  # which the graph alone would not keep alive
        graph.replay()

    return replay


def speed(in_turns: Any, seconds: float) -> list[Row]:
    """Each case, all contestants in turns."""
    rows = []
    for kind, n, batch, precision in CASES:
        torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
        tensors = weights(kind, n, batch, LAYERS, "cuda")
        steps: dict[str, Step] = {"products": products(kind, n, batch, precision)}
        with hdnn.engine.use(precision=precision):
            steps["auto"] = training_step(getattr(functional, kind), tensors)
            if precision != "bf16":
                steps["plain"] = training_step(PLAIN[kind], tensors)
            try:
                for _ in range(WARM):  # until memory is given out in the same places again
                    for step in steps.values():
                        step()
                times = in_turns(steps, "cuda", seconds, least=5)
            except Exception as error:  # a contestant that does not run is a result too
                say(f"{kind} {n} {batch} {precision}: {rivals.why_not(error)}")
                continue
        found = {name: sorted(ms) for name, ms in times.items()}
        row: Row = {"kind": kind, "n": n, "batch": batch, "precision": precision}
        row |= {name: ms[len(ms) // 2] for name, ms in found.items()}
        row |= {"spread": {name: [ms[0], ms[-1]] for name, ms in found.items()}}
        rows.append(row)
        say(f"{kind} {n} {batch} {precision}: " + ", ".join(f"{k} {row[k]:.2f}" for k in found))
    torch.set_float32_matmul_precision("highest")
    return rows


def against_compiled(in_turns: Any, seconds: float) -> list[Row]:
    """`auto` against the compiled plain loop.

    A process for each case: they compile side by side, then wait for all, and measure one by one.
    """
    spawn = multiprocessing.get_context("spawn")
    ready, alone = spawn.Barrier(len(COMPILED)), spawn.Lock()
    given = (ready, alone, in_turns, seconds)
    with spawn.Pool(len(COMPILED), _keep, given) as pool:
        return [row for row in pool.map(_compiled_row, COMPILED, chunksize=1) if row is not None]


_kept: list[Any] = []


def _keep(*given: Any) -> None:
    """What a process of the pool cannot be sent later."""
    _kept[:] = given


def _compiled_row(case: tuple[str, int, int, str]) -> Row | None:
    ready, alone, in_turns, seconds = _kept
    kind, n, batch, precision = case
    steps: dict[str, Step] = {}
    try:
        steps["compiled"] = _compile(case)
        tensors = weights(kind, n, batch, LAYERS, "cuda")
        steps["auto"] = training_step(getattr(functional, kind), tensors)
    except Exception as error:  # a contestant that does not run is a result too
        say(f"compiled {kind} {n} {batch} {precision}: {rivals.why_not(error)}")
    ready.wait()
    what = {"kind": kind, "n": n, "batch": batch, "precision": precision}
    with alone, hdnn.engine.use(precision=precision):
        return _row(what, steps, in_turns, seconds) if "auto" in steps else None


def _compile(case: tuple[str, int, int, str]) -> Step:
    """A step of the compiled loop, after some that compile and record it."""
    torch.set_float32_matmul_precision("high")
    kind, n, batch, precision = case
    loop = torch.compile(PLAIN[kind], mode="reduce-overhead", fullgraph=True)

    def forward(*tensors: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            return loop(*tensors)

    step = training_step(forward, weights(kind, n, batch, LAYERS, "cuda"))
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step


def against_rivals(in_turns: Any, seconds: float) -> list[Row]:
    """`auto` against other libraries, in tf32."""
    rows = []
    torch.set_float32_matmul_precision("high")
    for n in (64, 512):
        tensors = weights("h2", n, 8192, LAYERS, "cuda")
        for name in RIVALS:
            steps: dict[str, Step] = {}
            try:
                steps[name] = step_of(*rivals.RIVALS[name](tensors))
                steps["auto"] = training_step(functional.h2, tensors)
                rows.append(_row({"n": n, "rival": name}, steps, in_turns, seconds))
            except Exception as error:  # a rival that does not run is a result too
                say(f"{name}, n = {n}: {rivals.why_not(error)}")
    torch.set_float32_matmul_precision("highest")
    return rows


def _row(what: Row, steps: dict[str, Step], in_turns: Any, seconds: float) -> Row:
    """Medians of the steps, in turns, and the ratio of the first to `auto`, turn by turn."""
    for _ in range(WARM):
        for step in steps.values():
            step()
    times = in_turns(steps, "cuda", seconds, least=5)
    base, ours = times.values()
    ratios = sorted(a / b for a, b in zip(base, ours, strict=True))
    row = what | {name: sorted(ms)[len(ms) // 2] for name, ms in times.items()}
    row |= {"ratio": ratios[len(ratios) // 2], "ratios": [ratios[0], ratios[-1]]}
    say(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
    return row


def memory() -> list[Row]:
    """MiB at the peak of a step by default, beyond weights and gradients."""
    rows = []
    torch.set_float32_matmul_precision("high")
    for kind, n in (("h2", 512), ("h2", 2048), ("h1", 512)):
        row: Row = {"kind": kind, "n": n, "batch": 8192}
        for N in DEPTHS:
            tensors = weights(kind, n, 8192, N, "cuda")
            step = training_step(getattr(functional, kind), tensors, 6.4 / N)
            for _ in range(3):
                step()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            step()
            row[str(N)] = (torch.cuda.max_memory_allocated() - held) / 2**20
            del tensors, step
            torch.cuda.empty_cache()
        rows.append(row)
        say(f"memory, {kind} {n}: " + ", ".join(f"{row[str(N)]:.0f} MiB at {N}" for N in DEPTHS))
    torch.set_float32_matmul_precision("highest")
    return rows


def accuracy() -> list[Row]:
    """Gradients against float64, at every width and precision: the worst of all tensors."""
    rows = []
    for kind in ("h2", "h1"):
        for n in (128, 256, 512, 2048):
            tensors = weights(kind, n, 1000, 8, "cuda")
            exact = [t.detach().double().requires_grad_() for t in tensors]
            training_step(getattr(functional, kind), exact, engine="reference")()
            for precision, target in TOLERANCES.items():
                with hdnn.engine.use(precision=precision):
                    training_step(getattr(functional, kind), tensors)()
                error = max(_error(t, e) for t, e in zip(tensors, exact, strict=True))
                rows.append({"kind": kind, "n": n, "precision": precision, "error": error})
                met = "" if error < target else " MISSED"
                say(f"gradients, {kind} {n} {precision}: {error:.1e} ({target:.0e}){met}")
    return rows


def _error(t: Tensor, exact: Tensor) -> float:
    assert t.grad is not None
    assert exact.grad is not None
    return float((t.grad - exact.grad).norm() / exact.grad.norm())


def page(result: dict[str, Any]) -> str:
    about = report.on_one_line(result["machine"])
    lines = [
        "# Wide stacks on a GPU",
        "",
        f"`{result['command']}`, {about}",
        "",
        f"A training step of {LAYERS} layers, forwards and backwards, in milliseconds: the median "
        "of turns taken by all in one process. The products alone are those that a step cannot do "
        "without, as one CUDA graph. In tf32 the gradients of weights are products of bf16 "
        "factors, which is how `auto` can be faster.",
        "",
        "![Time against width](engine-width.png)",
    ]
    rows = []
    for row in result["speed"]:
        low, high = row["spread"]["auto"]
        over = f"{row['auto'] / row['products']:.2f}"
        ours = f"{row['auto']:.2f} ({low:.2f} .. {high:.2f})"
        plain = f"{row['plain']:.1f}" if "plain" in row else ""
        what = [row["kind"].upper(), row["n"], row["batch"], row["precision"]]
        rows.append([*what, ours, _target(row), f"{row['products']:.2f}", over, plain])
    head = "network | n | batch | precision | auto | target | products alone | auto / products"
    lines += report.table(f"{head} | plain loop", rows)
    if result.get("compiled"):
        lines += ["", "## Against the compiled loop", ""]
        lines += [
            f"The plain loop of {LAYERS} layers by `torch.compile(mode="
            '"reduce-overhead")`, in bf16 by autocast; the ratio turn by turn, with least and '
            f"most. The target is {FROM_COMPILED}. The last column is the ratio that the products "
            "alone would have."
        ]
        floors = {_case(r): r["products"] for r in result["speed"]}
        rows = [
            [
                *(_case(r)[0].upper(), *_case(r)[1:], f"{r['compiled']:.2f}", *_against(r)),
                "met" if r["ratio"] >= FROM_COMPILED else "missed",
                f"{r['compiled'] / floors[_case(r)]:.1f}" if _case(r) in floors else "",
            ]
            for r in result["compiled"]
        ]
        head = "network | n | batch | precision | compiled, ms | auto, ms | ratio | target"
        lines += report.table(f"{head} | products alone", rows)
    lines += ["", "## Against other libraries", ""]
    lines += [f"H2, batch 8192, {LAYERS} layers, tf32."]
    rows = [[r["rival"], r["n"], f"{r[r['rival']]:.2f}", *_against(r)] for r in result["rivals"]]
    lines += report.table("library | n | its ms | auto, ms | ratio", rows)
    lines += ["", "## Memory by default, at the peak, beyond weights and gradients", ""]
    lines += [f"MiB, batch 8192, tf32, T = 6.4, {DEPTHS[0]} and {DEPTHS[1]} layers."]
    rows = [
        [r["kind"].upper(), r["n"], *(f"{r[str(N)]:.0f}" for N in DEPTHS)] for r in result["memory"]
    ]
    lines += report.table(f"network | n | {DEPTHS[0]} layers | {DEPTHS[1]} layers", rows)
    lines += ["", "## Gradients against float64, the worst of all tensors", ""]
    rows = []
    for r in result["accuracy"]:
        bound = TOLERANCES[r["precision"]]
        met = "yes" if r["error"] < bound else "no"
        rows.append([r["kind"].upper(), r["n"], r["precision"], f"{r['error']:.1e}", bound, met])
    lines += report.table("network | n | precision | relative error | bound | met", rows)
    return "\n".join(lines) + "\n"


def _case(row: Row) -> tuple[str, int, int, str]:
    return row["kind"], row["n"], row["batch"], row["precision"]


def _target(row: Row) -> str:
    """What `auto` may take, and whether it does."""
    kind, n, batch, precision = _case(row)
    most = TARGETS.get((kind, batch, precision), {}).get(n)
    if kind == "h1":
        most = FROM_PRODUCTS * row["products"]
    if most is None:
        return ""
    return f"{most:.3g}" + ("" if row["auto"] <= most else ", **missed**")


def _against(row: Row) -> list[str]:
    low, high = row["ratios"]
    return [f"{row['auto']:.2f}", f"{row['ratio']:.1f} ({low:.1f} .. {high:.1f})"]


def plot(result: dict[str, Any], path: Path) -> None:
    """Time against width at batch 8192, H2, with the products alone as the floor."""
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    for precision, colour in (("tf32", "#0072b2"), ("bf16", "#d55e00")):
        rows = [
            r
            for r in result["speed"]
            if (r["kind"], r["batch"], r["precision"]) == ("h2", 8192, precision)
        ]
        for name, style, label in (
            ("auto", "o-", "hdnn"),
            ("products", "s:", "products alone"),
            ("plain", "^--", "plain loop"),
        ):
            known = [r for r in rows if name in r]
            if known:
                times = [r[name] for r in known]
                label = f"{label}, {precision}"
                axes.plot([r["n"] for r in known], times, style, color=colour, label=label)
    axes.set(xscale="log", yscale="log", xlabel="features n", ylabel="ms a training step")
    ticks = sorted({r["n"] for r in result["speed"]})
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_yticks(times := [2, 5, 10, 20, 50], [str(ms) for ms in times])
    axes.minorticks_off()
    axes.set_title(f"H2, {LAYERS} layers, batch 8192")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)
