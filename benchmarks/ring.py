"""Table II, trained by eight processes on a ring: the results of one process, neighbours only.

    python benchmarks/ring.py
    python benchmarks/ring.py --epochs 5 --out docs/results

Each cell is trained by eight processes and by one that owns all nodes, in float64 and from the same
weights. Long training magnifies rounding. A third run shows how much: one process, whose first
weights are larger by the factor 1 + 2^-52, the smallest there is (`--cells 1 --epochs 50` is a cell
in which rounding grows much). While the eight processes work, their TCP connections are read from
/proc: each may have connections to two neighbours on the ring, and one to the store.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from report import command, head, say, table, text_of

from hdnn.distributed import Graph, launch, train

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import audit

PAPER = {
    ("swiss_roll", 2): 91.05,
    ("swiss_roll", 3): 99.08,
    ("swiss_roll", 4): 100.0,
    ("double_circles", 2): 98.65,
    ("double_circles", 3): 99.42,
    ("double_circles", 4): 99.70,
}
RING = Graph.ring(8)
SIZES = {"full": {"epochs": 50, "cells": 6}, "quick": {"epochs": 2, "cells": 1}}


def workers() -> list[int]:
    """The process ids of the eight that are at work, by their ranks."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            text = (entry / "environ").read_text(errors="replace")
            lines = [line for line in text.split("\0") if "=" in line]
            variables = dict(line.split("=", 1) for line in lines)
            if variables.get("RING_OF") == str(os.getpid()):
                ranks[int(variables.get("RANK", "none"))] = int(entry.name)
    return [ranks[rank] for rank in sorted(ranks)]


class Watch:
    """Looks at the connections of the eight after each epoch."""

    def __init__(self) -> None:
        self.links: set[tuple[int, int]] = set()
        self.strangers = 0

    def __call__(self, news: dict[str, Any]) -> None:
        processes = workers()
        if len(processes) < RING.nodes or news["epoch"] == news["epochs"]:
            return  # some are about to end
        with contextlib.suppress(OSError):
            linked, others = audit.linked(processes)
            self.links |= linked
            self.strangers = max(self.strangers, *map(len, others))


def apart(a: dict[str, Any], b: dict[str, Any]) -> list[float]:
    """The differences of the losses of two trainings, epoch by epoch."""
    pairs = zip(a["history"]["loss"], b["history"]["loss"], strict=True)
    return [abs(first - second) for first, second in pairs]


def cell(data: str, layers: int, epochs: int) -> dict[str, Any]:
    """One cell of the table, by eight processes and by one."""
    os.environ["RING_OF"] = str(os.getpid())
    options = {"layers": layers, "epochs": epochs, "dtype": "float64"}
    watch = Watch()
    eight = launch(RING, data, tell=watch, **options)
    one = train(RING, data, **options)
    nudged = train(RING, data, gain=1 + 2**-52, **options)
    differences = apart(eight, one)
    rounding = apart(nudged, one)
    neighbours = {
        (i, k) for i, row in enumerate(RING.used) for k in row if i < k
    }
    talked = {(min(i, k), max(i, k)) for i, k, *_ in eight["traffic"]}
    return {
        "cell": f"{data.replace('_', ' ')}, {layers}",
        "eight": 100 * eight["test_accuracy"],
        "one": 100 * one["test_accuracy"],
        "first_difference": differences[0],
        "last_difference": differences[-1],
        "largest_difference": max(differences),
        "largest_by_rounding": max(rounding),
        "paper": PAPER[data, layers],
        "messages": eight["messages"],
        "megabytes": eight["bytes"] / 1e6,
        "seconds": eight["seconds"],
        "only_neighbours": watch.links == neighbours == talked,
        "other_connections_each": watch.strangers,
    }


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = []
    for data, layers in list(PAPER)[: sizes["cells"]]:
        rows.append(cell(data, layers, sizes["epochs"]))
        say(str(rows[-1]))
    return {"rows": rows, "ok": all(row["only_neighbours"] for row in rows)}


def found(result: dict[str, Any]) -> str:
    rows = result["rows"]
    equal = sum(row["eight"] == row["one"] for row in rows)
    largest = max(row["largest_difference"] for row in rows)
    rounding = max(row["largest_by_rounding"] for row in rows)
    near = "neighbours and the store only" if result["ok"] else "OTHERS too"
    return (
        f"after {result['sizes']['epochs']} epochs, the accuracy of one process in {equal} of "
        f"{len(rows)} cells; losses differ by at most {largest:.0e}, and by {rounding:.0e} in one "
        f"process with a changed bit; connections to {near}"
    )


def page(result: dict[str, Any]) -> str:
    lines = head("Table II, trained by eight processes", result)
    epochs = result["sizes"]["epochs"]
    lines += ["", f"Seed 0, {epochs} epochs, float64, test accuracy in %."]
    rows = []
    for r in result["rows"]:
        others = "ring neighbours" if r["only_neighbours"] else "OTHERS"
        accuracies = [f"{r[name]:.2f}" for name in ("eight", "one", "paper")]
        apart = (
            "first_difference",
            "largest_difference",
            "largest_by_rounding",
        )
        differences = [f"{r[name]:.0e}" for name in apart]
        traffic = [
            r["messages"],
            f"{r['megabytes']:.0f}",
            f"{r['seconds']:.0f}",
        ]
        others += f" and {r['other_connections_each']} more (the store)"
        rows.append([r["cell"], *accuracies, *differences, *traffic, others])
    names = "cell | eight processes | one process | paper | loss difference, first epoch | "
    names += "largest | largest in one process with a changed bit | "
    names += "messages | MB | s | connected to"
    lines += table(names, rows)
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command(
            "ring", __doc__, SIZES, run, page, devices=("cpu",), found=found
        )
    )
