"""How our recipe of table-planar and table-distributed was chosen: on other seeds than theirs.

The cells are some of those where the previous recipe stayed below the paper's figure. No seed is
used in the tables, so the tables' test points have decided nothing. Results are kept, and an
interrupted run continues where it stopped.

    python -m hdnn.experiments.recipe_search
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from hdnn.experiments import runner, table_distributed, table_planar
from hdnn.experiments.counted import reached
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
PLAIN: Options = {"copies": 1, "moved": 0.0, "starts": 1}
TAKEN = "points moved, several starts (taken)"


def _moved_less(taken: Options) -> Options:
    return {**taken, "moved": taken["moved"] / 1.5, "epochs": 5}


TRIED: dict[str, dict[str, Callable[[Options], Options]]] = {  # given the final recipe
    "planar": {
        "minibatches of 50, 50 epochs (before)": lambda _: {**PLAIN, "batch": 50, "epochs": 50},
        "minibatches of 100, 100 epochs": lambda _: {**PLAIN, "epochs": 100},
        "half the rate, 200 epochs": lambda _: {**PLAIN, "epochs": 200, "learning_rate": 3e-2},
        "points moved, one start": lambda taken: {**taken, "starts": 1},
        "points not moved, several starts": lambda taken: {**taken, "moved": 0.0},
        TAKEN: lambda taken: taken,
    },
    "distributed": {
        "50 epochs (before)": lambda _: {**PLAIN, "epochs": 50},
        "points moved half as far, one start": lambda taken: {
            **taken,
            "moved": taken["moved"] / 2,
            "starts": 1,
        },
        "points moved, one start": lambda taken: {**taken, "starts": 1},
        "points moved 2/3 as far, 5 epochs": _moved_less,
        TAKEN: lambda taken: taken,
    },
    "general": {
        "50 epochs (before)": lambda _: {**PLAIN, "epochs": 50},
        "points moved 2/3 as far, 5 epochs": _moved_less,
        TAKEN: lambda taken: taken,
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


def job_of(table: str, cell: Cell, change: Callable[[Options], Options], seed: int) -> Job:
    """A training of a table, with another recipe."""
    network, data, layers = cell
    if table == "planar":
        place = {"network": network, "data": data, "layers": layers}
        job = table_planar.job_of(place, "ours", table_planar.T_ours(layers), seed)
    else:
        job = table_distributed.job_of(network, data, layers, seed)
    return {**job, "more": change(job["more"])}


def train(job: Job) -> Job:
    """One training of either table."""
    return (table_planar if "network" in job else table_distributed).train(job)


def paper(table: str, cell: Cell) -> float:
    """The paper's figure."""
    network, data, layers = cell
    if table == "planar":
        return table_planar.PAPER[data, layers][table_planar.NETWORKS.index(network)]
    return table_distributed.PAPER[data, layers][network.startswith("centralised")]


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


def main(argv: list[str] | None = None) -> int:
    parser = runner.arguments(__doc__, NAME)
    parser.set_defaults(seeds=4)
    options = parser.parse_args(argv)
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
    done = [result for _, result in runner.run_with(options, jobs, train)]
    tables: dict[str, dict[str, list[Options]]] = {table: {} for table in TRIED}
    for number, (table, name, cell) in enumerate(keys):
        found = done[number * options.seeds : (number + 1) * options.seeds]
        values = [one["accuracy"] for one in found]
        row = dict(zip(("network", "data", "layers"), cell, strict=True))
        row |= {"paper": paper(table, cell), "right": values.count(100.0)}
        tables[table].setdefault(name, []).append({**row, **runner.summary(values)})
    command = f"python -m hdnn.experiments.{NAME.replace('-', '_')}"
    command += f" --seeds {options.seeds}" * (options.seeds != parser.get_default("seeds"))
    result = {"command": command, "seeds": options.seeds, "tables": tables}
    runner.finish(result, markdown(result), NAME, options)
    return 0


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
