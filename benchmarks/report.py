"""What benchmarks say about the machine, and how they are kept; the pages of engine.py."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hdnn


def machine(device: str) -> dict[str, str]:
    chip = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    threads = torch.get_num_threads()
    found = {"machine": f"{chip}, {threads} thread{'s' * (threads != 1)}"}
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    return found | {"hdnn": hdnn.__version__, "date": time.strftime("%Y-%m-%d")}


def on_one_line(about: dict[str, str]) -> str:
    """The machine and its versions, for the head of a page."""
    return ", ".join(f"{name} {value}" for name, value in about.items())


def keep(result: Any, page: str, name: str, out: Path | None) -> None:
    """Write a result as JSON and as a page into the folder, if there is one."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(page, encoding="utf-8")


def command(
    name: str,
    about: str | None,
    sizes: dict[str, Any],
    run: Callable[[Any, str], dict[str, Any]],
    page: Callable[[dict[str, Any]], str],
) -> int:
    """A benchmark of its sizes "full" or "quick" on a device, printed and kept."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="does it run? Small sizes")
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args()
    device, quick = options.device, options.quick
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; use --device cpu --quick", file=sys.stderr)
        return 2
    taken = sizes["quick" if quick else "full"]
    result = {"sizes": taken} | run(taken, device)
    result["command"] = f"python benchmarks/{name}.py --device {device}" + " --quick" * quick
    result["machine"] = machine(device)
    print(page(result))
    keep(result, page(result), f"{name}-{device}", options.out)
    return 0


def processor_time() -> tuple[float, float, float] | None:
    """Seconds by the clock, of all programs on all cores, and of this one with its children."""
    try:
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    except (OSError, ValueError):
        return None  # known on Linux only
    tick, own = os.sysconf("SC_CLK_TCK"), os.times()
    return time.perf_counter(), (user + nice + system + sum(rest)) / tick, sum(own[:4])


def taken_by_others(before: tuple[float, float, float] | None) -> float | None:
    """How many cores other programs kept busy since then, on average."""
    if before is None or (now := processor_time()) is None:
        return None
    clock, everyone, own = (b - a for a, b in zip(before, now, strict=True))
    return max(0.0, (everyone - own) / clock)


def _cpu_name() -> str:
    if platform.processor() not in ("", platform.machine()):
        return platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine() or "CPU"


def table(head: str, rows: list[list[Any]]) -> list[str]:
    names = head.split(" | ")
    lines = ["", f"| {head} |", "|" + " --- |" * len(names)]
    return lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    about = on_one_line(result["machine"])
    lines = [f"# Engine, on {result['machine']['machine']}", "", f"`{result['command']}`, {about}"]
    if result["others_cores"] is not None:
        lines[-1] += f"; other programs took {result['others_cores']:.2f} cores meanwhile"
    rows: list[list[Any]] = []
    for r in result["speed"] + result["others"]:
        if "failed" in r:
            rows.append([r["what"], r["failed"], "", "", "", ""])
            continue
        low, high = r["ratio_quartiles"]
        times = [f"{r['instead_ms']:.2f} ms", f"{r['hdnn_ms']:.3f} ms"]
        ratio = f"{r['ratio']:.1f} ({low:.1f} to {high:.1f})"
        rows.append([r["what"], *times, ratio, f"{r['alone']:.1f}", r["target"]])
    lines += table(
        "forwards and backwards | instead | hdnn | ratio (quartiles) | single calls | target", rows
    )
    if "floor" in result:
        r = result["floor"]
        bounds = f"products {r['products_ms']:.3f} ms, exponentials {r['special_ms']:.3f} ms"
        row = [r["what"], bounds, f"{r['kernel_ms']:.3f} ms by {r['by']}", f"{r['ratio']:.1f}"]
        lines += table("floor | the larger of | kernels | ratio | target", [[*row, r["target"]]])
    if "products" in result:
        rows = []
        for r in result["products"]:
            low, high = r["ratio_quartiles"]
            times = [f"{r['products_ms']:.0f} ms", f"{r['hdnn_ms']:.0f} ms"]
            ratio = f"{r['ratio']:.2f} ({low:.2f} to {high:.2f})"
            rows.append([r["what"], *times, ratio, r["target"]])
        lines += table("wide stacks | their products alone | hdnn | ratio | target", rows)
    by_size: dict[tuple[str, int], list[str]] = {}
    for r in result["sweep"]:
        cell = f"{r['ratio']:.2f}{' slower' if r['slower'] else ''}"
        by_size.setdefault((r["kind"], r["n"]), []).append(cell)
    rows = [[kind, n, *cells] for (kind, n), cells in by_size.items()]
    lines += table("auto against the plain loop | n | batch 32 | batch 1000", rows)
    rows = [
        [r["layers"], r["engine"], f"{r['ms']:.2f}", f"{r['MiB']:.2f}"] for r in result["depth"]
    ]
    lines += table(f"layers | engine | ms | MiB {result['memory_is']}", rows)
    r = result["peak"]
    peaks = zip(r["layers"], r["MiB"], strict=True)
    row = [", ".join(f"{MiB:.2f} at {N} layers" for N, MiB in peaks), f"{r['state_MiB']:.2f}"]
    row += ["" if r["ratio"] is None else f"{r['ratio']:.3f}", r["target"]]
    head = (
        "peak of a reversible step beyond weights and gradients, MiB | one state | ratio | target"
    )
    lines += table(head, [row])
    rows = [[r["precision"], f"{r['error']:.1e}", f"{r['target']:.0e}"] for r in result["accuracy"]]
    lines += table("precision | relative error of gradients | target", rows)
    r, s = result["import"], result["fixed_state"]
    brought = ", ".join(r["numba_or_triton"]) or "neither"
    lines += table(
        "what | found | target",
        [
            ["`import hdnn` after torch", f"{r['seconds']:.3f} s, {brought} imported", r["target"]],
            [f'reversal, `state="fixed"`, {s["layers"]} layers', s["bit_exact"], s["target"]],
        ],
    )
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Time and memory against depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for ax, key, label in zip(
        figure.subplots(1, 2), ("ms", "MiB"), ("time, ms", "memory, MiB"), strict=True
    ):
        for name, colour, mark in (
            ("plain", "#D55E00", "s"),
            ("auto", "#0072B2", "o"),
            ("checkpoint", "#56B4E9", "v"),
            ("reversible", "#009E73", "^"),
        ):
            rows = [r for r in result["depth"] if r["engine"] == name]
            ax.loglog(
                [r["layers"] for r in rows],
                [r[key] for r in rows],
                color=colour,
                marker=mark,
                label="plain loop" if name == "plain" else f"hdnn, {name}",
            )
        ax.set(xlabel="layers", ylabel=label)
        ax.grid(alpha=0.3)
        ax.legend()
    figure.savefig(path, dpi=150)
