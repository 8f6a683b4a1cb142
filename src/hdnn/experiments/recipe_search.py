"""How our recipe of table-planar and table-distributed was chosen: on other seeds than theirs.

The cells are some of those where the previous recipe stayed below the paper's figure. No seed is
used in the tables, so the tables' test points have decided nothing. Results are kept, and an
interrupted run continues where it stopped.

    python -m hdnn.experiments.recipe_search
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from typing import Any

from hdnn.experiments import runner, table_distributed, table_planar
from hdnn.experiments.cells import reached
from hdnn.experiments.runner import Job

NAME = "recipe-search"
Cell = tuple[str, str, int]  # network, data, layers
Options = dict[str, Any]
FIRST = {"planar": 5000, "distributed": 7000, "general": 7000}  # seeds
CELLS: dict[str, list[Cell]] = {
    "planar": [
        ("H2", "swiss_roll", 16),
        ("MS1", "swiss_roll", 32),
        ("MS3", "double_moons", 1),
        ("H1", "double_moons", 2),
        ("MS2", "double_moons", 4),
        ("MS3", "double_moons", 4),
        ("H2", "double_moons", 4),
    ],
    "distributed": [
        ("centralised", "swiss_roll", 2),
        ("centralised", "swiss_roll", 3),
        ("masked", "swiss_roll", 4),
        ("centralised", "double_circles", 2),
        ("centralised", "double_circles", 4),
    ],
    "general": [  # the layer with a full K
        ("centralised, full K", "swiss_roll", 3),
        ("centralised, full K", "double_circles", 2),
        ("centralised, full K", "double_circles", 4),
    ],
}
TABLES = {"planar": table_planar, "distributed": table_distributed, "general": table_distributed}
TAKEN = "points moved, several starts (taken)"
PLAIN: Options = {"copies": 1, "moved": 0.0, "starts": 1}
MOVED_LESS: Options = {"moved": 2 / 3, "epochs": 5}
# What was tried instead of the final recipe; `moved` is a factor of how far that moves the points.
TRIED: dict[str, dict[str, Options]] = {
    "planar": {
        "minibatches of 50, 50 epochs (before)": {**PLAIN, "batch": 50, "epochs": 50},
        "minibatches of 100, 100 epochs": {**PLAIN, "epochs": 100},
        "half the rate, 200 epochs": {**PLAIN, "epochs": 200, "learning_rate": 3e-2},
        "points moved, one start": {"starts": 1},
        "points not moved, several starts": {"moved": 0.0},
        TAKEN: {},
    },
    "distributed": {
        "50 epochs (before)": {**PLAIN, "epochs": 50},
        "points moved half as far, one start": {"moved": 1 / 2, "starts": 1},
        "points moved, one start": {"starts": 1},
        "points moved 2/3 as far, 5 epochs": MOVED_LESS,
        TAKEN: {},
    },
    "general": {
        "50 epochs (before)": {**PLAIN, "epochs": 50},
        "points moved 2/3 as far, 5 epochs": MOVED_LESS,
        TAKEN: {},
    },
}
OTHERS = """The choice itself was made by a faster program of the same recipe, which is no part of
this project and moved the points anew in each minibatch, on the seeds 5000 to 5009 for Table I, and
by this one on 7000 to 7005 for Table II; 6000 to 6003 then showed the same. That the double circles
are moved by 0.3 in 10 epochs, not by 0.2 in 5, was chosen on 7000 to 7009, after the table had been
made with the latter: 20 copies instead of 10, or half the rate, did less. The tables above are for
whoever wants to see it again. With four layers on the double moons there was also tried: a ridge of
1e-4, a weight decay of 1e-4 (points not moved), which gained nothing; a rate of 0.1, minibatches of
200 (points moved), by which fewer starts came to a loss of next to nothing. Points of the double
moons moved by 0.03, 0.06 or 0.15 did less than by 0.1; those of the Swiss roll less by 0.1 than by
0.05. The layer with a full K, which takes twenty times as long, has the recipe of H2, with one
start."""


def job_of(table: str, cell: Cell, change: Options, seed: int) -> Job:
    """A training of a table, with another recipe."""
    job = TABLES[table].job_of(*cell, seed)
    moved = job["more"]["moved"] * change.get("moved", 1.0)
    return {**job, "more": {**job["more"], **change, "moved": moved}}


def train(job: Job) -> Job:
    """One training of either table."""
    return (table_planar if "network" in job else table_distributed).train(job)


def markdown(result: dict[str, Any]) -> str:
    seeds, firsts = result["seeds"], sorted(set(FIRST.values()))
    lines = ["# How our recipe of Tables I and II was chosen", "", f"`{result['command']}`, on"]
    lines += [f"{seeds} seeds from {' and from '.join(map(str, firsts))} on. The tables are"]
    lines += ["of the seeds 0 to 9, whose test points have decided nothing. Mean of the test"]
    lines += ["accuracy in %, and on how many seeds it is 100%; bold where the mean is at or above"]
    lines += ["the paper's figure.", ""]
    for rows in result["tables"].values():
        heads = [
            f"{row['network']}, {row['data'].replace('_', ' ')}, {row['layers']} [{row['paper']:g}]"
            for row in rows[TAKEN]
        ]
        body = []
        for name, found in rows.items():
            marks = ["**" if reached(row["mean"], row["paper"]) else "" for row in found]
            parts = [
                f"{mark}{row['mean']:.3f}{mark}, {row['right']} of {seeds}"
                for mark, row in zip(marks, found, strict=True)
            ]
            body.append(" | ".join([name, *parts]))
        lines += [*runner.table("| " + " | ".join(heads), body), ""]
    return "\n".join([*lines, OTHERS]) + "\n"


def searched(options: argparse.Namespace) -> dict[str, Any]:
    tables: dict[str, dict[str, list[Options]]] = {}
    keys = [
        (table, name, cell)
        for table, tried in TRIED.items()
        for name in tried
        for cell in CELLS[table]
    ]
    jobs = [
        job_of(table, cell, TRIED[table][name], FIRST[table] + k)
        for table, name, cell in keys
        for k in range(options.seeds)
    ]
    done = iter(runner.run_with(options, jobs, train))
    for table, name, cell in keys:
        values = [result["accuracy"] for _, result in islice(done, options.seeds)]
        row = dict(zip(("network", "data", "layers"), cell, strict=True))
        row |= {"paper": TABLES[table].paper(*cell), "right": values.count(100.0)}
        tables.setdefault(table, {}).setdefault(name, []).append({**row, **runner.summary(values)})
    return {"seeds": options.seeds, "tables": tables}


def main(argv: list[str] | None = None) -> int:
    program = "python -m hdnn.experiments.recipe_search"
    return runner.arguments(__doc__, NAME, program, seeds=4).run(argv, searched, markdown, "seeds")


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
