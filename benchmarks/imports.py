"""Who imports whom: one picture of the package, floor by floor, and how long its import takes.

    python benchmarks/imports.py
    python benchmarks/imports.py --source ../before/src --out docs/results --name imports-before

A dot is a module, a row a package or a file of the top level, lines go from a module to what it
imports. Lines that go up, and imports that are hidden in functions other than those of the command
line, are red: there should be none.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[1]
sys.path.insert(0, str(HERE / "tests"))

import house  # noqa: E402

TIMED = """
import time, torch, numpy, safetensors.torch
start = time.process_time(); import hdnn; print(time.process_time() - start)
"""


def hidden(tree: ast.Module) -> set[str]:
    """What is imported inside functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.update(house.imports(node))
    return found


PROGRAM = ("hdnn.__main__", "hdnn.app", "hdnn.cli")  # where a quick start is worth it
FLOORS = (  # from the ground up; what is not named has a row of its own
    ("_version", "errors", "base"),
    ("activations", "interconnection", "operators", "integrators", "sparsity", "reference"),
    ("functional",),
    ("engine",),
    ("networks",),
    ("heads", "regularization", "model", "models", "serialization"),
)


def row_of(name: str) -> str:
    top = name.split(".")[1] if "." in name else name
    return next((", ".join(floor) for floor in FLOORS if top in floor), top)


def order(edges: dict[str, set[str]]) -> list[str]:
    """The rows from the ground up: each as high as what it imports makes it."""
    needed: dict[str, set[str]] = {}
    for name, imported in edges.items():
        rows = {row_of(one) for one in imported} - {row_of(name), "hdnn"}
        needed.setdefault(row_of(name), set()).update(rows)
    done: list[str] = []
    while len(done) < len(needed):
        left = [row for row in sorted(needed) if row not in done]
        # In a cycle, the row with the fewest missing imports goes first.
        done.append(min(left, key=lambda row: len(needed[row] - {*done})))
    return done


def draw(edges: dict[str, set[str]], secret: dict[str, set[str]], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for row in order(edges) if row != "hdnn"]
    names = {row: sorted(name for name in edges if row_of(name) == row) for row in rows}
    widest = max(map(len, names.values()))
    place = {
        name: ((k + 0.5) * widest / len(members), rows.index(row))
        for row, members in names.items()
        for k, name in enumerate(members)
    }
    figure = Figure(figsize=(11, 0.42 * len(rows) + 1))
    ax = figure.add_subplot()
    for name, imported in edges.items():
        for other in imported:
            if name in place and other in place:
                (x, y), (u, v) = place[name], place[other]
                wrong = v > y or (other in secret[name] and not house.inside(name, *PROGRAM))
                ax.plot(
                    [x, u],
                    [y, v],
                    color="#D55E00" if wrong else "#0072B2",
                    alpha=0.8 if wrong else 0.12,
                    linewidth=1.1 if wrong else 0.7,
                    zorder=2 if wrong else 1,
                )
    ax.scatter(*zip(*place.values(), strict=True), s=14, color="black", zorder=3)
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks([])
    for side in ("top", "right", "bottom", "left"):
        ax.spines[side].set_visible(False)
    figure.savefig(path, dpi=72, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=house.SOURCE, help="the folder of `hdnn`")
    parser.add_argument("--out", type=Path, help="a folder for the picture")
    parser.add_argument("--name", default="imports", help="of the picture")
    options = parser.parse_args()
    house.SOURCE = options.source.resolve()
    trees = house.modules()
    edges = {name: {*house.imports(tree)} - {name} for name, tree in trees.items()}
    secret = {name: hidden(tree) for name, tree in trees.items()}
    lines = sum(len(file.read_text().splitlines()) for file in house.SOURCE.rglob("*.py"))
    inside = {name: s for name, s in secret.items() if not house.inside(name, *PROGRAM)}
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", TIMED],
                env={"PYTHONPATH": str(house.SOURCE), "PATH": ""},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(7)
    ]
    print(
        f"{len(trees)} modules, {lines} lines, "
        f"{sum(map(len, inside.values()))} imports in functions outside the command line, "
        f"import of hdnn {1e3 * statistics.median(times):.0f} ms of CPU time after torch"
    )
    if options.out is not None:
        draw(edges, secret, options.out / f"{options.name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
