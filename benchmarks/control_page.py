"""The page and the picture of control.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from hdnn.control.objective import rest
from report import on_one_line, table

from hdnn import control, plotting
from hdnn.app.predict import score_text

NAMES = {
    "authors": "as the authors do it (torchdiffeq)",
    "good": "as a good engineer would, plain PyTorch",
}


def _share(good: int, of: int) -> str:
    return f"{score_text('accuracy', good / of)} ({good} of {of})"


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    lines = ["# Closed loops: twelve robots that cross", ""]
    lines += [f"`{result['command']}`, {on_one_line(result['machine'])}", ""]
    lines += _what() + _targets(result) + _seeds(result) + _random(result) + _speed(result)
    return "\n".join(lines) + "\n"


def _what() -> list[str]:
    cost = control.Cost()
    return [
        "Twelve robots in two columns change places through the middle: the problem of Furieri, "
        "Galimberti, Zakwan and Ferrari-Trecate, 'Distributed neural network control with "
        "dependability guarantees'. Controllers talk along a ring. Ours is "
        '`control.crossing("ring")`, trained by `control.LoopTraining` with its defaults: 300 '
        "iterations of Adam at rate 0.1, 4 fresh starts each. Weights of the cost, which were "
        f"searched for: distance from the target {cost.state:g} (discount {cost.discount:g}), "
        f"effort {cost.effort:g}, barrier {cost.barrier:g} below a distance of {cost.distance:g}, "
        f"smoothness {cost.smoothness:g}, energy at the end {cost.end:g}. The barrier reaches "
        "further than the authors' 0.7, so that robots turn away in time.",
        "",
        "![Paths before and after training; rings show where robots first collide](control.png)",
    ]


def _targets(result: dict[str, Any]) -> list[str]:
    seeds, late = result["collisions"], result["stopped"]
    runs = sum(r["runs"] for r in seeds)
    free = runs - sum(r["collisions"] for r in seeds)
    more, hit = (sum(r["more"][name] for r in seeds) for name in ("runs", "collisions"))
    worst = max(seeds, key=lambda r: r["collisions"])
    grown = max(r["ten"]["growth"] for r in seeds)
    nets = [r["growth"] + 1 for r in result["perceptrons"]["seeds"]]
    usual, euler = result["random"]["balance"][0], result["random"]["euler"][0]
    held = sum(r["holds"] and r["late_rise"] <= 1e-12 for r in late)
    deep = result["discrete_gradient"]
    orders = " and ".join(f"{order:.2f}" for order in deep["orders"])
    rows = [
        [
            "runs from random starts within 0.5 without a collision",
            "95%",
            ">= 99%",
            f"{_share(free, runs)}; worst of {len(seeds)} trainings "
            f"{_share(worst['runs'] - worst['collisions'], worst['runs'])}; with more runs "
            f"{_share(more - hit, more)}",
        ],
        [
            "cost over ten horizons against one",
            "+3.7%",
            "<= +3.7%",
            f"at most +{100 * grown:.3f}%; perceptrons {min(nets):.3g} to {max(nets):.3g} times",
        ],
        [
            f"energy balance of every step, {usual['controllers']} random controllers, weights of "
            "scale 0.01 to 10, h from 0.001 to 1",
            "none in discrete time",
            "rounding only",
            f"violated by {usual['violation']:.1e} at most, {usual['unsolved']} unsolved; forward "
            f"Euler: {euler['blown']} of {euler['controllers']} blow up",
        ],
        [
            "stopped at 0, 25, 50, 75% of trainings: bounded over 20 horizons",
            "shown for one",
            "100 of 100",
            f"{held} of {len(late)}",
        ],
        [
            "discrete gradient",
            "",
            "order 2, energy to 1e-12",
            f"order {orders}; energy of {deep['layers']} layers kept to {deep['drift']:.1e}",
        ],
    ]
    rows[4:4] = [
        [f"time of a training, {batch} start{'s' * (batch != 1)} an iteration", "", ">= 10x", found]
        for batch, found in _ratios(result["trainings"]).items()
    ]
    return table("what | the authors' report | target | found", rows)


def _ratios(trainings: list[dict[str, Any]]) -> dict[int, str]:
    """How many times longer the authors' trainings take, by batch; and how many runs collide."""
    found = {}
    for batch in sorted({r["batch"] for r in trainings}):
        ours, theirs = (
            [r for r in trainings if (r["way"], r["batch"]) == (way, batch)]
            for way in ("hdnn", "authors")
        )
        if not theirs:
            continue
        ratios = sorted(r["against_ours"] for r in theirs)
        runs = sum(r["runs"] for r in ours)
        free = _share(runs - sum(r["collisions"] for r in ours), runs)
        found[batch] = (
            f"{statistics.median(ratios):.1f} times ({ratios[0]:.1f} to {ratios[-1]:.1f}) as fast "
            f"as the authors' way; without a collision afterwards {free}"
        )
    return found


def _seeds(result: dict[str, Any]) -> list[str]:
    rows = [
        [
            r["seed"],
            f"{r['cost']:.0f}",
            f"{r['collisions']} of {r['runs']}",
            f"{r['more']['collisions']} of {r['more']['runs']}",
            f"{r['ten']['collisions']} of {r['ten']['runs']}",
            f"{r['more']['nearest']:.3f}",
            f"+{100 * r['ten']['growth']:.3f}%",
            f"{r['raised']:.3g} of {r['bound']:.3g}",
            f"{r['seconds']:.0f} s",
        ]
        for r in result["collisions"]
    ]
    lines = ["", "## Trainings", ""]
    lines += [
        "Collisions are counted strictly: a run counts if any two robots are closer than 0.5 after "
        "any step. Starts are uniform in a disc of 0.5 around each place, with a seed that no "
        "training has seen. The running cost (distance, effort and barrier) goes on without "
        "discount after the first horizon. New weights can raise the energy by a bound that the "
        "certificate computes, and did so by less.",
    ]
    lines += table(
        "seed | cost | collisions | of more runs | over ten horizons | nearest | running cost over "
        "ten horizons | energy raised, bound | time",
        rows,
    )
    nets = result["perceptrons"]
    lines += [
        "",
        "Perceptrons beside it: one a robot, three hidden layers of 32 tanh, which sees the ",
    ]
    lines[-1] += (
        "positions and velocities of its robot and of both ring neighbours; the same cost, starts "
        f"and iterations, at the best of the rates {', '.join(nets['tried'])} ({nets['rate']:g}), "
        "with clipped gradients; the plant takes implicit midpoint steps."
    )
    rows = [
        [
            r["seed"],
            f"{r['cost']:.0f}",
            f"{r['collisions']} of {r['runs']}",
            f"{r['growth'] + 1:.3g} times",
            f"{r['furthest']:.3g}",
        ]
        for r in nets["seeds"]
    ]
    head = (
        "seed | cost | collisions | running cost over ten horizons | furthest from its target then"
    )
    return lines + table(head, rows)


def _random(result: dict[str, Any]) -> list[str]:
    lines = ["", "## Any weights, any step", ""]
    lines += [
        "Four robots on a ring, new random weights in each of 20 steps, then the last ones for 180 "
        "more; h from 0.001 to 1. The violation is relative to the terms that the energies sum up. "
        "Forward Euler has blown up where a state is not finite or the energy has grown "
        "thousandfold.",
    ]
    rows = []
    for ours, euler in zip(result["random"]["balance"], result["random"]["euler"], strict=True):
        low, high = ours["scales"]
        solved = f"{ours['unsolved']} of {ours['controllers']}"
        blown = f"{euler['blown']} of {euler['controllers']}"
        rows.append([f"{low:g} to {high:g}", f"{ours['violation']:.1e}", solved, blown])
    head = "scale of weights | largest violation | a step without solution | Euler blows up"
    lines += table(head, rows)
    late = result["stopped"]
    lines += ["", "Controllers of unfinished trainings, over 20 horizons from 8 starts each:"]
    rows = []
    for stop in sorted({r["stop"] for r in late}):
        group = [r for r in late if r["stop"] == stop]
        largest = max(r["largest"] for r in group)
        ratio = max(r["largest"] / r["ceiling"] for r in group)
        rows.append(
            [
                f"{100 * stop:.0f}%",
                f"{sum(r['holds'] for r in group)} of {len(group)}",
                f"{largest:.4g}, {ratio:.2f} of its bound",
                f"{max(r['late_rise'] for r in group):.1e}",
                f"{max(r['violation'] for r in group):.1e}",
                f"{max(r['state'] for r in group):.3g}",
            ]
        )
    return lines + table(
        "stopped at | bounded | largest energy | largest change in a step after the horizon, "
        "relative | violation | largest state",
        rows,
    )


def _speed(result: dict[str, Any]) -> list[str]:
    found = result["speed"]
    lines = ["", "## Time of a training", ""]
    lines += [
        "Whole trainings of ours and of the authors' algorithm (torchdiffeq, forward Euler, "
        "float32), in turns: the same problem, cost, random starts, iterations and rates. Each is "
        "then tried from fresh starts in the way in which it was trained. The authors train from "
        "one start; `LoopTraining` takes 4 unless told otherwise. The recipe is ours, also Adam's "
        "betas of 0.8, and was searched for with our steps: collisions of the authors' "
        "way say nothing about what it could do with a recipe of its own.",
    ]
    rows = [
        [
            *(r["seed"], r["batch"], "hdnn" if r["way"] == "hdnn" else NAMES[r["way"]]),
            *(f"{r['seconds']:.1f} s", f"{r['against_ours']:.1f}"),
            f"{r['collisions']} of {r['runs']}",
        ]
        for r in result["trainings"]
    ]
    lines += table("seed | batch | what | time | against ours | runs that collide", rows)
    lines += ["", "## Time of an iteration", ""]
    lines += [
        "Simulation of 100 steps, cost, gradients and Adam, in turns; hdnn in float64. Batch 1 is "
        "one start, as the authors train. Both rivals simulate all robots as one system by forward "
        "Euler; the authors' way finds the gradient of the energy by autograd inside the field, "
        "applies masks in every step and sums up the smoothness in a loop. They solve no "
        "equations; what they simulate has no guarantee, and is of order 1.",
    ]
    if found["others_cores"] is not None:
        lines[-1] += (
            f" Threads: {found['threads']}; other programs took {found['others_cores']:.2f} cores "
            "meanwhile, so that processor time says more than the clock."
        )
    rows = []
    for batch in (name for name in found if name.isdecimal()):
        for name, r in found[batch].items():
            way, _, dtype = name.partition(" ")
            low, high = r["cpu_quartiles"]
            rows.append(
                [
                    batch,
                    f"{NAMES[way]}, {dtype}" if way in NAMES else "hdnn",
                    f"{r['cpu_ms']:.1f} ms",
                    f"{r['cpu_ratio']:.1f} ({low:.1f} to {high:.1f})",
                    f"{r['wall_ms']:.1f} ms",
                    f"{r['wall_ratio']:.1f}",
                ]
            )
    lines += table("batch | what | processor time | ratio (quartiles) | by the clock | ratio", rows)
    if "authors float32" not in found["1"]:
        lines += ["", "torchdiffeq is not installed, so that the authors' way was not timed."]
    return lines


def plot(problems: list[control.LoopProblem], path: Path) -> None:
    """Paths of the robots from their places, before and after training."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    both = figure.subplots(1, 2, sharex=True, sharey=True)
    for ax, problem, when in zip(both, problems, ("before", "after"), strict=True):
        with torch.no_grad():
            q = problem.loop(problem.start())[..., :2]
        target = rest(problem.loop.plant)[:, :2]
        plotting.agent_paths(q, target, ax, distance=problem.collision)
        ax.set_title(f"{when} training")
    figure.savefig(path, dpi=100)
