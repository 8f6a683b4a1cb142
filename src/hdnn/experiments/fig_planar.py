"""The decision regions of two H1 networks (fig:examplesClassification), with test points.

hdnn reproduce fig-planar
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from hdnn.data import planar
from hdnn.experiments import runner, table_planar
from hdnn.plotting import decision_regions

NAME = "fig-planar"
FIGURES = {  # data: layers of an H1
    "swiss_roll": 64,
    "double_moons": 4,
}


def draw(table: Any, cells: Iterable[tuple[str, str, int]], title: str, options: Any) -> int:
    """Train the networks of these cells of a table, and draw their decision regions."""
    for network, name, layers in cells:
        data = planar.load(name, seed=options.seed)
        job = table.job_of(network, name, layers, options.seed)
        model, _ = table.trained(job, data.x_train, data.t_train)
        accuracy = runner.accuracy(model, data.x_test, data.t_test)
        ax = decision_regions(model, data)
        ax.set_title(f"{name.replace('_', ' ')}, {layers} layers: {accuracy:.2f}%")
        path = options.out / f"{options.file}-{name}.png"
        runner.save_figure(ax.figure, path, dpi=150)
        text = f"{path}: {title}, {layers} layers, {accuracy:.2f}% of the test points"
        runner.say({"picture": str(path), "accuracy": accuracy}, text, options)
    return 0


def main(argv: list[str] | None = None) -> int:
    options = runner.figure_arguments(__doc__, NAME).parse_args(argv)
    cells = [("H1", data, layers) for data, layers in FIGURES.items()]
    return draw(table_planar, cells, "H1", options)


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
