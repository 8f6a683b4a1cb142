"""The decision regions of two H1 networks (fig:examplesClassification), with test points.

hdnn reproduce fig-planar
"""

from __future__ import annotations

import sys
from pathlib import Path

import hdnn
from hdnn.data import planar
from hdnn.experiments import runner, table_planar
from hdnn.plotting import decision_regions

NAME = "fig-planar"
FIGURES = {  # data: layers of an H1
    "swiss_roll": 64,
    "double_moons": 4,
}


def draw(model: hdnn.Model, data: planar.PlanarData, path: Path) -> float:
    """Draw the decision regions of a trained network; return its test accuracy in per cent."""
    accuracy = runner.accuracy(model, data.x_test, data.t_test)
    ax = decision_regions(model, data)
    ax.set_title(f"{data.name.replace('_', ' ')}, {model.net.layers} layers: {accuracy:.2f}%")
    runner.save_figure(ax.figure, path, dpi=150)
    return accuracy


def main(argv: list[str] | None = None) -> int:
    options = runner.figure_arguments(__doc__, NAME).parse_args(argv)
    for data, layers in FIGURES.items():
        points = planar.load(data, seed=options.seed)
        cell = {"network": "H1", "data": data, "layers": layers}
        job = table_planar.job_of(cell, "ours", table_planar.T_ours(layers), options.seed)
        model, _ = table_planar.trained(job, points.x_train, points.t_train)
        path = options.out / f"{NAME}-{data}.png"
        accuracy = draw(model, points, path)
        text = f"{path}: H1, {layers} layers, {accuracy:.2f}% of the test points"
        runner.say({"picture": str(path), "accuracy": accuracy}, text, options)
    return 0


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
