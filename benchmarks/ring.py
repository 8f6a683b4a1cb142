"""Table II by eight processes on a ring: the results of one process, neighbours only.

    python benchmarks/ring.py
    python benchmarks/ring.py --epochs 5 --cells 1 --out docs/results

Each cell is trained by eight processes and by one that owns all nodes, in float64 and from the same
weights. A long training magnifies rounding, so the loss is compared after the first epoch as well.
While the eight are at work, their TCP connections are read from /proc: there may be those to two
neighbours on the ring, and one to the store.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import report
import torch

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


def workers() -> dict[int, int]:
    """The process ids of the eight, by their ranks."""
    ranks = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            named = dict(line.split("=", 1) for line in variables if "=" in line)
            if "RANK" in named and named.get("RING_OF") == str(os.getpid()):
                ranks[int(named["RANK"])] = int(entry.name)
    return ranks


class Watch:
    """Looks at the connections of the eight after each epoch."""

    def __init__(self) -> None:
        self.links: set[tuple[int, int]] = set()
        self.strangers = 0

    def __call__(self, news: dict[str, Any]) -> None:
        ranks = workers()
        if len(ranks) < RING.nodes or news["epoch"] == news["epochs"]:
            return  # some are about to end
        with contextlib.suppress(OSError):
            linked, others = audit.linked([ranks[rank] for rank in sorted(ranks)])
            self.links |= linked
            self.strangers = max(self.strangers, *(len(ends) for ends in others))


def cell(data: str, layers: int, epochs: int) -> dict[str, Any]:
    """One cell of the table, by eight processes and by one."""
    os.environ["RING_OF"] = str(os.getpid())
    options = {"layers": layers, "epochs": epochs, "dtype": "float64"}
    watch = Watch()
    eight = launch(RING, data, tell=watch, **options)
    one = train(RING, data, **options)
    pairs = zip(eight["history"]["loss"], one["history"]["loss"], strict=True)
    differences = [abs(a - b) for a, b in pairs]
    neighbours = {(min(i, k), max(i, k)) for i, row in enumerate(RING.used) for k in row if i != k}
    talked = {(min(i, k), max(i, k)) for i, k, *_ in eight["traffic"]}
    return {
        "cell": f"{data.replace('_', ' ')}, {layers}",
        "eight": 100 * eight["test_accuracy"],
        "one": 100 * one["test_accuracy"],
        "first_difference": differences[0],
        "last_difference": differences[-1],
        "paper": PAPER[data, layers],
        "messages": eight["messages"],
        "megabytes": eight["bytes"] / 1e6,
        "seconds": eight["seconds"],
        "only_neighbours": watch.links == neighbours == talked,
        "other_connections_each": watch.strangers,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--cells", type=int, default=6, help="of the table, from its first")
    parser.add_argument("--out", type=Path, help="folder for ring.json and ring.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for data, layers in [*PAPER][: options.cells]:
        rows.append(cell(data, layers, options.epochs))
        print(json.dumps(rows[-1]), flush=True)
    about = report.on_one_line(report.machine("cpu"))
    table = []
    for r in rows:
        others = "ring neighbours" if r["only_neighbours"] else "OTHERS"
        table.append(
            [
                r["cell"],
                f"{r['eight']:.2f}",
                f"{r['one']:.2f}",
                f"{r['first_difference']:.0e} to {r['last_difference']:.0e}",
                f"{r['paper']:.2f}",
                r["messages"],
                f"{r['megabytes']:.0f}",
                f"{r['seconds']:.0f}",
                f"{others} and {r['other_connections_each']} other (the store)",
            ]
        )
    page = [
        "# Table II by eight processes",
        "",
        f"`python benchmarks/ring.py --epochs {options.epochs}`, {about}.",
        "",
    ]
    page += [f"Seed 0, {options.epochs} epochs, float64, test accuracy in %."]
    head = "cell | eight processes | one process | difference of the loss, first to last epoch | "
    head += "paper | messages | MB | s | connected to"
    text = "\n".join([*page, *report.table(head, table)]) + "\n"
    print(text)
    report.keep(rows, text, "ring", options.out)
    return 0 if all(r["only_neighbours"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
