"""Closed loops of many agents: the crossing of twelve robots, trained, tried and timed.

    python benchmarks/control.py --quick
    python benchmarks/control.py --work runs/control --out docs/results

Trainings and parts that are done are kept in the folder `--work` and not done again. The time of a
training is compared with the authors' algorithm, for which torchdiffeq is needed; without it that
row is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import control_page
import control_random
import control_trained
import control_whole
import torch
from control_rivals import Dense, Perceptrons
from report import keep, machine, processor_time, taken_by_others

import hdnn
from hdnn import control, functional

SIZES = {
    "full": {
        "iterations": 300,
        "seeds": 5,
        "stopped": 25,
        "runs": 200,
        "more_runs": 1000,
        "random": 1000,
        "large": 200,
        "rates": [0.1, 0.03, 0.01, 0.003, 0.001],
        "turns": 15,
    },
    "quick": {
        "iterations": 4,
        "seeds": 1,
        "stopped": 2,
        "runs": 10,
        "more_runs": 10,
        "random": 10,
        "large": 3,
        "rates": [0.01],
        "turns": 2,
    },
}
Sizes = dict[str, Any]


def collisions(sizes: Sizes, work: Path) -> list[dict[str, Any]]:
    """Runs of trained controllers, seed by seed: over one horizon, and over ten."""
    found = []
    for seed in range(sizes["seeds"]):
        training = control_trained.trained(seed, sizes["iterations"], work)
        row: dict[str, Any] = {"seed": seed, "seconds": training.seconds}
        row["cost"] = statistics.mean(training.history["cost"][-20:])
        row |= control_trained.collisions(training.problem, sizes["runs"])
        row["more"] = control_trained.collisions(training.problem, sizes["more_runs"])
        row["ten"] = control_trained.ten_horizons(training.problem, sizes["runs"])
        certificate = training.certify()
        row |= {"violation": certificate.violation, "bound": certificate.bound}
        row |= {"raised": certificate.raised, "holds": certificate.holds}
        row["norms"] = [certificate.smallest_norm, certificate.largest_norm]
        found.append(row)
    return found


def perceptrons(sizes: Sizes, work: Path) -> dict[str, Any]:
    """Perceptrons on the same problem with the same recipe, by the best of several rates."""
    del work
    tried, rows = {}, []
    for rate in sizes["rates"]:
        net = Perceptrons(control.crossing("ring", 0))
        tried[rate] = net.train_all(sizes["iterations"], rate)
    best = min(tried, key=lambda rate: tried[rate])
    for seed in range(sizes["seeds"]):
        problem = control.crossing("ring", seed)
        net = Perceptrons(problem, seed=seed)
        row: dict[str, Any] = {"seed": seed}
        row["cost"] = net.train_all(sizes["iterations"], best, seed=seed)
        y = problem.starts(sizes["runs"], seed=control_trained.STARTS, shape="disc")[..., :4]
        with torch.no_grad():
            states, forces = net(y, 10)
            one, ten = net.terms(states[:101], forces[:100]), net.terms(states, forces)
        row |= control_trained.growth(one, ten)
        hit = control.costs.collisions(states[:101], problem.collision)
        row |= {"runs": len(y), "collisions": int(hit.sum())}
        row["furthest"] = float((states[-1] - net.target)[..., :2].norm(dim=-1).amax())
        rows.append(row)
    return {"tried": {str(rate): cost for rate, cost in tried.items()}, "rate": best, "seeds": rows}


def random_controllers(sizes: Sizes, work: Path) -> dict[str, Any]:
    """The balance for any weights, and how often forward Euler blows up."""
    del work
    usual = 0.01, 10.0
    rows = [control_random.balanced(sizes["random"], usual, 10)]
    rows += [control_random.balanced(sizes["large"], s, 10) for s in ((10, 100.0), (100, 1000.0))]
    euler = [control_random.blown(row["controllers"], row["scales"], 10) for row in rows]
    return {"balance": rows, "euler": euler}


def stopped(sizes: Sizes, work: Path) -> list[dict[str, Any]]:
    """Controllers of unfinished trainings over twenty horizons."""
    found = []
    for seed in range(sizes["stopped"]):
        whole = seed < sizes["seeds"]
        control_trained.trained(seed, sizes["iterations"], work, whole=whole)
        problems = control_trained.stopped(seed, sizes["iterations"], work)
        for stop, problem in zip(control_trained.STOPS, problems, strict=True):
            found.append({"seed": seed, "stop": stop, **control_trained.bounded(problem, 8, 20)})
    return found


def discrete_gradient(sizes: Sizes, work: Path) -> dict[str, Any]:
    """Its order, and the energy of a deep network."""
    del work
    source = torch.Generator().manual_seed(0)
    K, b, y = (torch.randn(s, generator=source).double() for s in ((1, 4, 4), (1, 4), (4,)))

    def end(N: int) -> torch.Tensor:
        return functional.discrete_gradient(y, K.expand(N, 4, 4), b.expand(N, 4), 1 / N)

    exact = end(320)
    errors = [float((end(N) - exact).norm()) for N in (10, 20, 40)]
    layers = 2000 if sizes["turns"] > 2 else 100
    net = hdnn.HamiltonianNet(
        *(6, layers, "discrete_gradient"), T=layers / 10, tied=True, dtype=torch.float64,
        init="paper", generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    field = net.field()
    with torch.no_grad():
        states = net.trajectory(torch.randn(16, 6, generator=source).double())
        H = functional.energy(states, field["K"][0], field["b"][0])
    drift = float(((H - H[0]) / H[0]).abs().max())
    orders = [float(torch.tensor(a / b).log2()) for a, b in pairwise(errors)]
    return {"orders": orders, "layers": layers, "drift": drift}


def trainings(sizes: Sizes, work: Path) -> list[dict[str, Any]]:
    """Whole trainings of ours and of the authors, and how many runs collide afterwards."""
    del work
    return control_whole.trainings(sizes["seeds"], sizes["iterations"], sizes["runs"])


def contestants(batch: int) -> dict[str, Callable[[], object]]:
    """One iteration of a training each: simulation, cost, gradients, Adam."""
    problem = dataclasses.replace(control.crossing("ring", 0), radius=0.0 if batch == 1 else 0.5)
    training = control.LoopTraining(problem, iterations=10**6, batch=batch)
    found: dict[str, Callable[[], object]] = {
        "hdnn": lambda: training.run(progress=False, until=training.done + 1)
    }
    ways: dict[str, Any] = {"good": None}
    if importlib.util.find_spec("torchdiffeq"):
        ways["authors"] = importlib.import_module("torchdiffeq").odeint
    for name, integrate in ways.items():
        for dtype in (torch.float32, torch.float64):
            net = Dense(control.crossing("ring", 0), dtype, integrate)
            optimizer = torch.optim.Adam(net.parameters(), lr=1e-6)
            parts = problem.starts(batch).to(dtype).split(4, -1)
            start = [part.flatten(1) for part in parts]

            def step(net: Dense = net, start: Any = start, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                net.loss(net(*start)).backward()
                optimizer.step()

            found[f"{name} {str(dtype)[6:]}"] = step
    return found


def speed(sizes: Sizes, work: Path) -> dict[str, Any]:
    """The time of an iteration of each, in turns."""
    del work
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    before = processor_time()
    for batch in (*control_whole.BATCHES, 16):
        steps = contestants(batch)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        for turn in range(sizes["turns"] + 1):
            for name, step in steps.items():
                repeated = 5 if name == "hdnn" else 1
                start = time.perf_counter(), time.process_time()
                for _ in range(repeated):
                    step()
                end = time.perf_counter(), time.process_time()
                if turn:  # the first one compiles
                    wall, cpu = ((b - a) / repeated for a, b in zip(start, end, strict=True))
                    times[name].append((wall, cpu))
        found[str(batch)] = {name: _against(rows, times["hdnn"]) for name, rows in times.items()}
    found["others_cores"] = taken_by_others(before)
    return found


def _against(rows: list[tuple[float, float]], ours: list[tuple[float, float]]) -> dict[str, Any]:
    """Milliseconds by the clock and of the processor, and how often ours fit into them."""
    found: dict[str, Any] = {}
    for k, kind in enumerate(("wall", "cpu")):
        ratios = [a[k] / b[k] for a, b in zip(rows, ours, strict=True)]
        found[f"{kind}_ms"] = 1e3 * statistics.median(row[k] for row in rows)
        found[f"{kind}_ratio"] = statistics.median(ratios)
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        found[f"{kind}_quartiles"] = quartiles[::2]
    return found


PARTS: dict[str, Callable[[Sizes, Path], Any]] = {
    "collisions": collisions,
    "perceptrons": perceptrons,
    "random": random_controllers,
    "stopped": stopped,
    "discrete_gradient": discrete_gradient,
    "speed": speed,
    "trainings": trainings,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="does it run? Small sizes")
    parser.add_argument("--work", type=Path, default=Path("runs/control"), help="what is done")
    parser.add_argument("--again", nargs="*", default=[], choices=PARTS, help="parts to do again")
    parser.add_argument("--only", nargs="*", choices=PARTS, help="do these parts, write no page")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and the picture")
    options = parser.parse_args()
    name = "quick" if options.quick else "full"
    sizes, work = SIZES[name], options.work / name
    work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"sizes": sizes}
    for part, function in PARTS.items():
        if options.only is not None and part not in options.only:
            continue
        file = work / f"{part}.json"
        if part in options.again or not file.exists():
            print(f"{part} ..", flush=True)
            file.write_text(json.dumps(function(sizes, work)))
        result[part] = json.loads(file.read_text())
    if options.only is not None:
        return 0
    result["command"] = "python benchmarks/control.py" + " --quick" * options.quick
    result["machine"] = machine("cpu")
    page = control_page.markdown(result)
    print(page)
    keep(result, page, "control", options.out)
    if options.out is not None:
        problems = [control_trained.stopped(0, sizes["iterations"], work)[0]]
        problems.append(control_trained.trained(0, sizes["iterations"], work).problem)
        control_page.plot(problems, options.out / "control.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
