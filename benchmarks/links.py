"""Which graph? Links that were searched for, against a ring, random and other links.

    python benchmarks/links.py
    python benchmarks/links.py --quick
    python benchmarks/links.py --only loads --kept SOME_FOLDER --out docs/results

Two problems of twelve robots: the crossing, where all meet in the middle, and three loads of four
robots each, where it counts where the loads are. Controllers are first trained without links, then
for a while with those of a graph: with the same weights to begin with, starts and iterations for
all graphs. Two questions: which links are best for this training, and do links that were found on
one training carry over to others? Graphs are chosen by starts that no training takes, and compared
by starts that neither trainings nor choices took, the same for all graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import links_page
import report
import torch
from torch import Tensor

from hdnn import control, sparsity
from hdnn.control.objective import rest

AGENTS = 12
BUDGETS = (12, 18)
TEAMS = ((0, 4, 7, 9), (1, 2, 6, 11), (3, 5, 8, 10))
SEARCH = 100  # the seed of the training whose links are carried over to others
PAIRS = [(i, k) for i in range(AGENTS) for k in range(i + 1, AGENTS)]
RANDOM = 5  # random graphs of a seed, to be compared; more are tried by the judge
BLOCK = 16  # starts whose mean cost is one number, for standard errors
FRESH = 100_000  # the draw of the starts that compare; trainings and judges take those before
SIZES: dict[str, dict[str, Any]] = {
    "full": {"seeds": 5, "graphs": 25, "before": 150, "iterations": 40, "samples": 128},
    "quick": {"seeds": 2, "graphs": 2, "before": 2, "iterations": 2, "samples": 4},
}
STARTS = {"full": 512, "quick": 64}

# The problems


@dataclass(frozen=True, kw_only=True)
class Loads(control.Cost):
    """Each load hangs in the middle of its team: how far it is from there counts, with effort."""

    load: float = 4.0

    def terms(self, loop: control.ClosedLoop, trajectory: Tensor) -> dict[str, Tensor]:
        apart = trajectory[..., :2] - rest(loop.plant)[:, :2]
        teams = torch.stack([apart[..., list(team), :].sum(-2) for team in TEAMS], -2)
        squares = teams.square().sum((-2, -1)).reshape(len(apart), -1).mean(1) / len(TEAMS[0])
        return super().terms(loop, trajectory) | {"state": self.load * loop.step * squares.sum()}


def loads(seed: int) -> control.LoopProblem:
    """Robots on a circle, at rest up to 1 off their targets; teams are spread over the circle."""
    source = torch.Generator().manual_seed(seed)
    one = torch.eye(2, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return 0.1 * torch.randn(*shape, generator=source, dtype=torch.float64)

    angles = 2 * math.pi * torch.arange(AGENTS).double() / AGENTS
    target = 4 * torch.stack([angles.cos(), angles.sin()], 1)
    controller = control.Controller(AGENTS, 50, dissipation=[0.0, 0.0, 12.0, 12.0])
    with torch.no_grad():
        controller.K.copy_(torch.block_diag(0.5 * one, 2 * one) + normal(AGENTS, 4, 4))
        controller.G.copy_(torch.cat([one, 3 * one]) + normal(AGENTS, 4, 2))
        controller.b.copy_(normal(AGENTS, 4).expand(50, AGENTS, 4))
    loop = control.ClosedLoop(control.robots(target), controller, 0.1)
    cost = Loads(state=0.0, effort=1.0, barrier=0.0, end=0.0)
    z = torch.cat([target, torch.zeros_like(target)], 1)
    return control.LoopProblem(loop, z, cost=cost, radius=1.0, collision=0.0)


def crossing(seed: int) -> control.LoopProblem:
    return control.crossing(seed=seed)


PROBLEMS = {"crossing": crossing, "loads": loads}
BATCHES = {"crossing": 4, "loads": 8}
RATES = {"crossing": 0.03, "loads": 0.05}  # with links; 0.1 before


@dataclass(frozen=True)
class Trainings:
    """A problem, from which seed on, and whether links are searched for on each of them."""

    problem: str
    first: int
    each: bool


PARTS = {
    "crossing": Trainings("crossing", 0, each=True),
    "crossing, other seeds": Trainings("crossing", 50, each=True),
    "loads": Trainings("loads", 0, each=False),
}


# Graphs


def given(z: Tensor) -> dict[str, list[tuple[int, int]]]:
    """Graphs that nobody has to search for."""
    angles = torch.atan2(*z[:, :2].T.flip(0)).argsort(stable=True).tolist()
    ring = [_pair(i, k) for i, k in zip(angles, angles[1:] + angles[:1], strict=True)]
    across = [_pair(i, k) for i, k in zip(angles[:6], angles[6:], strict=True)]
    far = torch.cdist(z[:, :2], z[:, :2])
    near = sorted(PAIRS, key=lambda pair: (round(float(far[pair]), 6), pair))
    graphs = {"no links": [], "ring": ring, "ring and diameters": ring + across}
    return graphs | {f"nearest {n}": near[:n] for n in BUDGETS} | {"complete": PAIRS}


def drawn(seed: int, budget: int, count: int) -> list[list[tuple[int, int]]]:
    """Random graphs; each seed and budget has its own."""
    source = random.Random(1000 * seed + budget)
    return [source.sample(PAIRS, budget) for _ in range(count)]


def _pair(i: int, k: int) -> tuple[int, int]:
    return min(i, k), max(i, k)


# Costs, kept so that an interrupted run goes on


class Kept:
    """Trained problems, searches and costs of one problem, in a folder."""

    def __init__(self, name: str, sizes: dict[str, Any], starts: int, folder: Path) -> None:
        self.name, self.sizes, self.starts = name, sizes, starts
        text = json.dumps([name, sizes, starts, BATCHES[name], RATES[name]], sort_keys=True)
        self.folder = folder / f"{name}-{zlib.crc32(text.encode()):08x}"
        self.folder.mkdir(parents=True, exist_ok=True)

    def before(self, seed: int) -> control.LoopProblem:
        """The problem, trained without links."""
        problem, batch = PROBLEMS[self.name](seed), BATCHES[self.name]
        options = {"iterations": self.sizes["before"], "batch": batch, "seed": seed}
        folder = self.folder / f"before-{seed}"
        training = control.LoopTraining(problem, **options, folder=folder, resume=True)
        training.run(progress=False)
        return problem

    def judge(self, seed: int) -> control.LinkCost:
        taken = {name: self.sizes[name] for name in ("iterations", "samples")}
        taken |= {"batch": BATCHES[self.name], "rate": RATES[self.name], "seed": 1000 + seed}
        return control.LinkCost(self.before(seed), **taken)

    def search(self, judge: control.LinkCost, seed: int, budget: int) -> sparsity.LinkChoice:
        known = given(judge.problem.z)
        first = [known["ring" if budget == AGENTS else "ring and diameters"]]
        first.append(known[f"nearest {budget}"])
        options = {"relaxed": judge.relaxed, "rounds": self.sizes["graphs"] - 1, "first": first}
        file = self.folder / f"search-{seed}.json"
        found = sparsity.choose_links(AGENTS, judge, links=budget, file=file, **options)
        print(f"{self.name}, seed {seed}: {found}", flush=True)
        return found

    def best_drawn(self, judge: control.LinkCost, seed: int, budget: int) -> Any:
        """The best of as many random graphs as the search tries, by the same judge."""
        graphs, file = drawn(seed, budget, self.sizes["graphs"]), self.folder / f"drawn-{seed}.json"
        costs = _read(file)
        for graph in graphs:
            if str(sorted(graph)) not in costs:
                costs[str(sorted(graph))] = judge(graph)
                file.write_text(json.dumps(costs))
        return min(graphs, key=lambda graph: costs[str(sorted(graph))])

    def compare(self, judge: control.LinkCost, seed: int, graphs: dict[str, Any]) -> dict[str, Any]:
        """Costs of blocks of fresh starts by graph."""
        file = self.folder / f"costs-{seed}.json"
        costs, found = _read(file), {}
        y = judge.problem.starts(self.starts, seed=1000 + seed, draw=FRESH)
        for name, links in graphs.items():
            key = str(sorted(links))
            if key not in costs:
                costs[key] = _blocks(judge.trained(links), y)
                file.write_text(json.dumps(costs))
            found[name] = costs[key]
            mean = statistics.mean(found[name])
            print(f"{self.name}, seed {seed}, {name}: {mean:.3f}", flush=True)
        return found


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.exists() else {}


def _blocks(problem: control.LoopProblem, y: Tensor) -> list[float]:
    """Mean costs of one block of starts after another."""
    with torch.no_grad():
        found = problem.loop(y).split(BLOCK, 1)
        return [round(float(problem.cost(problem.loop, block)), 6) for block in found]


def run(part: str, sizes: dict[str, Any], starts: int, folder: Path) -> dict[str, Any]:
    """What all graphs cost on some trainings, and which links were found."""
    about = PARTS[part]
    kept = Kept(about.problem, sizes, starts, folder)
    judge = kept.judge(SEARCH)
    carried = {f"carried over {n}": kept.search(judge, SEARCH, n).links for n in BUDGETS}
    seeds = range(about.first, about.first + sizes["seeds"])
    costs: dict[str, list[Any]] = {}
    links: dict[str, Any] = {name: [graph] for name, graph in carried.items()}
    for seed in seeds:
        judge = kept.judge(seed)
        graphs = given(judge.problem.z) | carried
        for n in BUDGETS:
            some = drawn(seed, n, RANDOM)
            graphs |= {f"random {n}, {k + 1}": graph for k, graph in enumerate(some)}
            if about.each:
                chosen = {
                    f"searched {n}": kept.search(judge, seed, n).links,
                    f"best of random {n}": kept.best_drawn(judge, seed, n),
                }
                graphs |= chosen
                for name, graph in chosen.items():
                    links.setdefault(name, []).append(graph)
        for name, blocks in kept.compare(judge, seed, graphs).items():
            costs.setdefault(name, []).append(blocks)
    compared = [*["searched"] * about.each, "carried over"]
    teams = {_pair(i, k) for team in TEAMS for i in team for k in team if i != k}
    inside = {name: sum(link in teams for link in graph) for name, graph in carried.items()}
    return {
        "seeds": list(seeds),
        "costs": {
            name: [round(statistics.mean(one), 6) for one in many] for name, many in costs.items()
        },
        "less": {f"{name} {n}": less(costs, name, n) for name in compared for n in BUDGETS},
        "links": {name: [_text(graph) for graph in many] for name, many in links.items()},
        "within teams": inside if about.problem == "loads" else {},
    }


def _text(links: Any) -> str:
    return " ".join(f"{i}-{k}" for i, k in sorted(links))


def less(costs: dict[str, Any], name: str, budget: int) -> dict[str, list[list[float]]]:
    """How much less than others a graph costs, seed by seed, with its standard error."""
    best = costs[f"{name} {budget}"]
    few = [f"random {budget}, {k + 1}" for k in range(RANDOM)]
    others = {other: costs[other] for other in others_of(name, budget)}
    seeds = range(len(best))
    middle = [[*map(statistics.mean, zip(*(costs[r][s] for r in few), strict=True))] for s in seeds]
    least = [min((costs[r][s] for r in few), key=statistics.mean) for s in seeds]
    others |= {f"mean of random {budget}": middle, f"luckiest of random {budget}": least}
    return {
        other: [_difference(a, b) for a, b in zip(theirs, best, strict=True)]
        for other, theirs in others.items()
    }


def others_of(name: str, budget: int) -> list[str]:
    """Graphs that a budget is compared with, apart from the random ones."""
    found = ["no links", "ring", *["ring and diameters"] * (budget > AGENTS)]
    found += [f"nearest {budget}", "complete"]
    return found + [f"best of random {budget}"] * (name == "searched")


def _difference(a: list[float], b: list[float]) -> list[float]:
    """The mean of a - b on paired blocks, and its standard error."""
    apart = [x - y for x, y in zip(a, b, strict=True)]
    error = statistics.stdev(apart) / len(apart) ** 0.5
    return [round(statistics.mean(apart), 6), round(error, 6)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="does it run? Small sizes")
    parser.add_argument("--kept", type=Path, help="folder of a run to go on with")
    parser.add_argument("--out", type=Path, help="folder for links.json, .md and .png")
    options = parser.parse_args()
    size = "quick" if options.quick else "full"
    sizes, starts = SIZES[size], STARTS[size]
    with TemporaryDirectory() as folder:
        kept = options.kept or Path(folder)
        parts = {part: run(part, sizes, starts, kept) for part in options.only}
    command = "python benchmarks/links.py" + " --quick" * options.quick
    result = {"command": command, "machine": report.machine("cpu"), "parts": parts}
    result |= {"sizes": sizes, "starts": starts, "block": BLOCK, "random": RANDOM}
    print(links_page.markdown(result))
    report.keep(result, links_page.markdown(result), "links", options.out)
    if options.out is not None:
        links_page.plot(result, options.out / "links.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
