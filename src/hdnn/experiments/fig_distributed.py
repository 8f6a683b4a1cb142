"""The decision regions of two 4-layer H2 networks on a ring (fig:doublecircles_swissroll).

hdnn reproduce fig-distributed
"""

from __future__ import annotations

import sys

from hdnn.data import planar
from hdnn.experiments import runner, table_distributed
from hdnn.experiments.fig_planar import draw

NAME = "fig-distributed"


def main(argv: list[str] | None = None) -> int:
    options = runner.figure_arguments(__doc__, NAME).parse_args(argv)
    for data in ("swiss_roll", "double_circles"):
        points = planar.load(data, seed=options.seed)
        job = table_distributed.job_of("masked", data, 4, options.seed)
        model, _ = table_distributed.trained(job, points)
        path = options.out / f"{NAME}-{data}.png"
        accuracy = draw(model, points, path)
        text = f"{path}: H2 on a ring of 8 nodes, 4 layers, {accuracy:.2f}% of the test points"
        runner.say({"picture": str(path), "accuracy": accuracy}, text, options)
    return 0


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
