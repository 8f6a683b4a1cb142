"""Norms of dy_N/dy_j through the training of an H2 and of two MLPs (fig:gradients).

Per sample, not of the mean over a minibatch as in the paper's figure, which can be below 1 where no
sample is, and which hides the largest; --mean draws the paper's curves too. Double moons, the
paper's training, 960 iterations.

    hdnn reproduce fig-gradients
    hdnn reproduce fig-gradients -- --mean
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch

import hdnn
from hdnn.analysis import GradientMonitor, GradientWarning
from hdnn.data import planar
from hdnn.errors import require
from hdnn.experiments import runner
from hdnn.experiments.table_planar import RECIPES
from hdnn.files import finite, write_atomically
from hdnn.plotting import gradient_surface
from hdnn.training import fit
from hdnn.training.progress import Line

NAME = "fig-gradients"
EPOCHS = 30
SAMPLES = 250  # of the test points
NETWORKS = {"H2, 32 layers": ("H2", 32), "MLP, 8 layers": ("MLP", 8), "MLP, 32 layers": ("MLP", 32)}


def network(kind: str, layers: int, seed: int) -> hdnn.Model:
    generator = torch.Generator().manual_seed(seed)
    net: Any
    if kind == "MLP":
        net = hdnn.MLP(4, layers, init="paper", generator=generator)
    else:
        net = hdnn.H2(4, layers, T=0.8, init="paper", generator=generator)
    return hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, generator=generator))


def train(kind: str, layers: int, seed: int, every: int) -> tuple[GradientMonitor, dict[str, Any]]:
    """A training with its gradients watched, and what came out of it."""
    data = planar.double_moons(seed=seed)
    model = network(kind, layers, seed)
    monitor = GradientMonitor(x=data.x_test, every=every, samples=SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GradientWarning)  # that is what the figure is about
        options = {**RECIPES["paper"], "epochs": EPOCHS, "seed": seed, "progress": False}
        fit(model, data.x_train, data.t_train, callbacks=[monitor], **options)
    accuracy = 100 * float((model.predict(data.x_test) == data.t_test).double().mean())
    found = {
        "accuracy": accuracy,
        "iterations": monitor.steps,
        "smallest": monitor.table("smallest")[:, :-1].min().item(),
        "largest": monitor.table("largest")[:, :-1].max().item(),
        "smallest_of_mean": monitor.table("of_mean")[:, :-1].min().item(),
        "last_smallest": min(monitor.records[-1].smallest[:-1]),
        "findings": monitor.findings,
    }
    return monitor, found


def markdown(result: dict[str, Any]) -> str:
    lines = ["# Gradients through a training (fig:gradients)", "", f"`{result['command']}`, seed "]
    lines[-1] += f"{result['seed']}: norm(dy_N/dy_j) over {SAMPLES} test points, all layers j < N"
    lines[-1] += f" and every {result['every']}. of {EPOCHS * 32} iterations."
    lines += ["", "| | test accuracy | smallest | largest | smallest of the batch mean |"]
    lines += ["| --- |" + " --- |" * 4]
    for name, found in result["networks"].items():
        lines.append(
            f"| {name} | {found['accuracy']:.2f}% | {_exactly(found['smallest'])} | "
            f"{found['largest']:.4g} | {found['smallest_of_mean']:.4g} |"
        )
    lines += ["", f"![]({NAME}.png)"]
    for name, found in result["networks"].items():
        lines += ["", *(f"{name}: {text}" for text in found["findings"])]
    return "\n".join(lines).rstrip() + "\n"


def _exactly(norm: float) -> str:
    """Four digits, and more where they tell on which side of 1 a norm is."""
    return f"{norm:.15g}" if abs(norm - 1) < 1e-3 else f"{norm:.4g}"


def main(argv: list[str] | None = None) -> int:
    parser = runner.figure_arguments(__doc__, NAME)
    parser.add_argument("--every", type=runner.count, default=16, help="iterations between looks")
    parser.add_argument("--mean", action="store_true", help="also the norms of batch means")
    options = parser.parse_args(argv)
    figures = require("matplotlib.figure", extra="plot")
    start, line = time.perf_counter(), Line(not options.quiet)
    monitors, networks = {}, {}
    for name, (kind, layers) in NETWORKS.items():
        line.show(f"training {name}")
        monitors[name], networks[name] = train(kind, layers, options.seed, options.every)
    line.close()
    for shown in ("smallest", *(["of_mean"] if options.mean else [])):
        figure = figures.Figure(figsize=(5.4 * len(monitors), 3.9), layout="constrained")
        axes = figure.subplots(1, len(monitors))
        for ax, (name, monitor) in zip(axes, monitors.items(), strict=True):
            gradient_surface(monitor, ax, name=shown)
            ax.set_title(f"{name}: {networks[name]['accuracy']:.1f}% right")
        options.out.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out / f"{NAME}{'-mean' * (shown == 'of_mean')}.png", dpi=110)
    for name, monitor in monitors.items():
        file = f"{NAME}-{name.split(',')[0].lower()}-{name.split()[1]}.csv"
        write_atomically(options.out / file, monitor.to_csv().encode())
    result = {
        "command": f"hdnn reproduce {NAME}",
        "seed": options.seed,
        "every": options.every,
        "networks": finite(networks),
        "seconds": round(time.perf_counter() - start, 1),
    }
    runner.finish(result, markdown(result), NAME, options)
    return 0


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
