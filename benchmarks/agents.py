"""Closed loops on processes: the bits of one process, neighbours only, and what an agent costs.

    python benchmarks/agents.py --out docs/results
    python benchmarks/agents.py --quick

First the twelve robots of the reference problem on a ring, a process each, against one process that
has them all: their weights must be equal bit for bit. While the twelve are at work, their TCP
connections are read from /proc: there may be those to two neighbours, and one to the store. Then
crowds of 100, 300 and 1,000 robots, each linked to the up to eight around it, on two ranks. Their
cost compares each robot with the up to 24 within two places, whose positions it has to hear.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch

from hdnn import control

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import audit

FULL: dict[str, Any] = {
    "ring": {"steps": 100, "iterations": 10, "batch": 16},
    "ranks": {"agents": 1000, "steps": 100, "iterations": 2, "batch": 4},
    "crowds": [100, 300, 1000],
    "times": {"steps": 100, "iterations": 2, "batch": 16},
    "training": {"steps": 100, "iterations": 120, "batch": 4, "rate": 0.05},
}
QUICK: dict[str, Any] = {
    "ring": {"steps": 10, "iterations": 2, "batch": 2},
    "ranks": {"agents": 25, "steps": 10, "iterations": 2, "batch": 2},
    "crowds": [9, 25],
    "times": {"steps": 10, "iterations": 2, "batch": 2},
    "training": {"steps": 10, "iterations": 3, "batch": 2},
}
RANKS = (2, 4, 8)
TESTED = 20  # fresh starts, of a seed by which nothing was chosen


class Watch:
    """All connections that processes were seen to have; a `with` ends it."""

    def __init__(self) -> None:
        self.seen: list[set[tuple[Any, Any]]] = []
        self.done = threading.Event()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()

    def started(self, processes: list[subprocess.Popen[str]]) -> None:
        self.seen = [set() for _ in processes]
        threading.Thread(target=self._look, args=(processes,), daemon=True).start()

    def _look(self, processes: list[subprocess.Popen[str]]) -> None:
        while not self.done.wait(0.5):
            for seen, process in zip(self.seen, processes, strict=True):
                with contextlib.suppress(OSError):  # it has ended
                    seen |= audit.connections(process.pid)

    def found(self) -> tuple[set[tuple[int, int]], int]:
        """Which processes were connected, and how many other far ends one of them had at most."""
        owner = {pair: k for k, pairs in enumerate(self.seen) for pair in pairs}
        links, most = set(), 0
        for k, pairs in enumerate(self.seen):
            known = {owner[far, near] for near, far in pairs if (far, near) in owner}
            links |= {(min(k, other), max(k, other)) for other in known}
            most = max(most, len({far for near, far in pairs if (far, near) not in owner}))
        return links, most


def ring(steps: int, **options: Any) -> dict[str, Any]:
    """Twelve processes against one."""

    def problem() -> control.LoopProblem:
        links = control.crossing("ring").loop.controller.links
        return control.crossing("ring", steps=steps, cost=control.Cost(pairs=links))

    one, twelve, ordinary = problem(), problem(), problem()
    alone = control.train_on_processes(one, 1, **options)
    with Watch() as watch:
        run = control.train_on_processes(twelve, 12, **options, started=watch.started)
    control.LoopTraining(ordinary, **{k: options[k] for k in ("iterations", "batch")}).run(False)
    apart = [
        float((a - b).detach().abs().max())
        for a, b in zip(one.loop.parameters(), ordinary.loop.parameters(), strict=True)
    ]
    links, (seen, others) = {*one.loop.controller.links}, watch.found()
    return {
        "same_bits": same(one, twelve) and alone.history == run.history,
        "ordinary": max(apart),
        "cost": [run.history["cost"][0], run.history["cost"][-1]],
        "only_neighbours": seen == links == run.talked,
        "other_connections_each": others,
        "messages": sum(row[2] for row in run.traffic),
        "megabytes": sum(row[3] for row in run.traffic) / 1e6,
        "seconds": [alone.seconds, run.seconds],
    }


def same(a: control.LoopProblem, b: control.LoopProblem) -> bool:
    pairs = zip(a.loop.parameters(), b.loop.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def shared(agents: int, steps: int, **options: Any) -> list[dict[str, Any]]:
    """One crowd on more and more ranks: the same bits, and what is sent."""
    one = control.crowd(agents, steps=steps)
    alone, rows = control.train_on_processes(one, 1, **options), []
    for ranks in RANKS:
        problem = control.crowd(agents, steps=steps)
        run = control.train_on_processes(problem, ranks, **options)
        rows.append(
            {
                "ranks": ranks,
                "same_bits": same(one, problem) and run.history == alone.history,
                "kilobytes": sum(row[3] for row in run.traffic) / 1e3 / counted(agents, options),
                "messages": sum(row[2] for row in run.traffic) / options["iterations"],
                "processor": run.processor_seconds / alone.processor_seconds,
            }
        )
    return rows


def counted(agents: int, options: dict[str, Any]) -> int:
    """Agents times iterations."""
    return agents * options["iterations"]


def timed(agents: int, steps: int, **options: Any) -> dict[str, Any]:
    """What an agent and a step take, in microseconds, by one process and by two."""
    busy, found = report.processor_time(), {"agents": agents}
    for ranks in (1, 2):
        run = control.train_on_processes(control.crowd(agents, steps=steps), ranks, **options)
        each = 1e6 / steps / counted(agents, options)
        found[f"processor_{ranks}"] = run.processor_seconds * each
        found[f"clock_{ranks}"] = run.seconds * each
    return found | {"others_cores": report.taken_by_others(busy)}


def trained(agents: int, steps: int, **options: Any) -> dict[str, Any]:
    """A crowd on two ranks, before and after."""
    problem = control.crowd(agents, steps=steps)
    before, run = tested(problem), control.train_on_processes(problem, 2, **options)
    return {
        "agents": agents,
        "links": len(problem.loop.controller.links),
        "before": before,
        "after": tested(problem),
        "history": [cost / agents for cost in run.history["cost"]],
        "minutes": run.seconds / 60,
    }


@torch.no_grad()
def tested(problem: control.LoopProblem) -> dict[str, float]:
    """The cost of an agent from fresh starts, and how many of them collide with any other."""
    trajectory = problem.loop(problem.starts(TESTED, seed=7))
    terms = {
        k: float(v) / problem.agents
        for k, v in problem.cost.terms(problem.loop, trajectory).items()
    }
    collided = control.costs.colliding(trajectory, problem.collision).any(0).double().mean()
    return {"cost": sum(terms.values()), **terms, "collided": float(collided)}


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    lines = ["# Agents shared out to processes", ""]
    lines += [f"`{result['command']}`, {report.on_one_line(result['machine'])}.", ""]
    lines += [
        "Every process has some of the agents and hears their neighbours only: states before each",
        "substep along a link, gradients on the way back, weights and positions once an iteration.",
        "",
        f"Twelve robots on a ring, a process each, {in_words(sizes['ring'])}:",
    ]
    if r := result.get("ring"):
        seen = "ring neighbours" if r["only_neighbours"] else "OTHERS"
        store = f"{r['other_connections_each']} other (the store)"
        rows = [
            ["weights and history", _bits(r["same_bits"]), "the bits of one process"],
            ["a process is connected to", f"{seen} and {store}", "neighbours"],
            ["weights beside those of `LoopTraining`", f"within {r['ordinary']:.0e}", "rounding"],
            ["cost, first and last iteration", " and ".join(f"{c:.0f}" for c in r["cost"]), ""],
            ["messages", f"{r['messages']}, {r['megabytes']:.1f} MB in all", ""],
            ["seconds, one process and twelve", " and ".join(f"{s:.0f}" for s in r["seconds"]), ""],
        ]
        lines += report.table("what | found | target", rows)
    if rows := result.get("ranks"):
        about = f"{sizes['ranks']['agents']:,} robots, {in_words(sizes['ranks'])}"
        lines += ["", f"A crowd, in which robots are linked to the up to eight around: {about}."]
        head = "ranks | weights and history | messages an iteration | kB an agent and iteration | "
        head += "processor time of all against one process"
        lines += report.table(
            head,
            [
                [
                    *(r["ranks"], _bits(r["same_bits"]), f"{r['messages']:.0f}"),
                    *(f"{r['kilobytes']:.1f}", f"{r['processor']:.2f}"),
                ]
                for r in rows
            ],
        )
    lines += ["", f"Crowds on two ranks, trained by {in_words(sizes['training'])}. Costs are those"]
    lines += [f"of an agent from {TESTED} fresh starts; a robot collides if any other one comes"]
    lines += [
        "closer than 0.5 at any time. What is paid for is how near a robot comes to the up to"
    ]
    lines += [
        "24 within two places: with the eight around it alone, a fifth of them still collided."
    ]
    rows = list(result["trained"].values())
    head = "robots | links | cost an agent before | after | of it barrier | state | "
    head += "robots that collide before | after | minutes"
    lines += report.table(
        head,
        [
            [
                *(r["agents"], r["links"]),
                *(f"{r[when]['cost']:.1f}" for when in ("before", "after")),
                *(f"{r['after'][term]:.1f}" for term in ("barrier", "state")),
                *(f"{100 * r[when]['collided']:.1f}%" for when in ("before", "after")),
                f"{r['minutes']:.1f}",
            ]
            for r in rows
        ],
    )
    lines += ["", f"What an agent and a step of a training take, {in_words(sizes['times'])}, in µs"]
    lines += ["for the whole batch: forwards and backwards, with the cost and Adam. Processor time"]
    lines += ["is that of all ranks together, which look for messages for up to 0.2 ms at a time"]
    lines += ["before they sleep: two ranks take more of it on cores that others use too."]
    times = list(result["timed"].values())
    names = [f"{what}_{ranks}" for ranks in (1, 2) for what in ("processor", "clock")]
    head = "robots | one process, processor | by the clock | two ranks, processor | by the clock | "
    lines += report.table(
        head + "cores that others took",
        [
            [r["agents"], *(f"{r[k]:.0f}" for k in names), f"{r['others_cores'] or 0:.1f}"]
            for r in times
        ],
    )
    ratios = []
    if len(rows) > 1:
        ratios = [("trained cost", rows[-1]["after"]["cost"] / rows[0]["after"]["cost"])]
    if len(times) > 1:
        words = ("one process, processor", "one process, clock")
        words += ("two ranks, processor", "two ranks, clock")
        ratios += [
            (f"time: {w}", times[-1][k] / times[0][k]) for w, k in zip(words, names, strict=True)
        ]
    lines += report.table(
        "an agent among the most robots against one among the fewest | ratio | target",
        [[what, f"{ratio:.2f}", "flat: 0.8 to 1.2"] for what, ratio in ratios],
    )
    return "\n".join(lines) + "\n"


def in_words(sizes: dict[str, Any]) -> str:
    rate = f" at rate {sizes['rate']}" if "rate" in sizes else ""
    return (
        f"{sizes['iterations']} iterations{rate} of {sizes['steps']} steps, batch {sizes['batch']}"
    )


def _bits(same: bool) -> str:
    return "the same bits" if same else "OTHER BITS"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="does it run? Small sizes")
    parser.add_argument("--out", type=Path, help="folder for agents.json and agents.md")
    parser.add_argument("--more", action="store_true", help="keep what agents.json has already")
    options = parser.parse_args()
    sizes = QUICK if options.quick else FULL
    torch.set_num_threads(1)
    result: dict[str, Any] = {"trained": {}, "timed": {}}
    file = None if options.out is None else options.out / "agents.json"
    if options.more and file is not None and file.exists():
        result |= json.loads(file.read_text())
    result |= {"sizes": sizes, "machine": report.machine("cpu")}
    result["command"] = "python benchmarks/agents.py" + " --quick" * options.quick
    tasks = {
        "ring": partial(ring, **sizes["ring"], progress=False),
        "ranks": partial(shared, **sizes["ranks"], progress=False),
    }
    for kind, run, given in (("timed", timed, "times"), ("trained", trained, "training")):
        for agents in sizes["crowds"]:
            tasks[f"{kind} {agents}"] = partial(run, agents, **sizes[given], progress=False)
    for name, task in tasks.items():
        kind, _, agents = name.partition(" ")
        if (agents in result[kind]) if agents else (kind in result):
            continue
        found = task()
        if agents:
            result[kind][agents] = found
        else:
            result[kind] = found
        print(name, json.dumps(found), flush=True)
        report.keep(result, page(result), "agents", options.out)
    print(page(result))
    return 0 if result["ring"]["same_bits"] and result["ring"]["only_neighbours"] else 1


if __name__ == "__main__":
    sys.exit(main())
