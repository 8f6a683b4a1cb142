"""The decision regions of two 4-layer H2 networks on a ring (fig:doublecircles_swissroll).

hdnn reproduce fig-distributed
"""

from __future__ import annotations

import sys

from hdnn.experiments import runner, table_distributed
from hdnn.experiments.fig_planar import draw

NAME = "fig-distributed"


def main(argv: list[str] | None = None) -> int:
    options = runner.figure_arguments(__doc__, NAME).parse_args(argv)
    cells = [("masked", data, 4) for data in ("swiss_roll", "double_circles")]
    return draw(table_distributed, cells, "H2 on a ring of 8 nodes", options)


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
