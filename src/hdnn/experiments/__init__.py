"""The paper's tables and figures: `hdnn reproduce NAME`."""

from __future__ import annotations

from hdnn.errors import choose

NAMES = (
    "table-planar",
    "table-distributed",
    "table-mnist",
    "table-cifar",
    "fig-planar",
    "fig-distributed",
    "fig-gradients",
    "fig-exploding",
)


def main(name: str, argv: list[str]) -> int:
    """Run an experiment with these options, and return the exit code."""
    from hdnn.experiments import exploding, images, planar, runner

    choose("experiment", name, NAMES)
    experiments = {
        **planar.EXPERIMENTS,
        **images.EXPERIMENTS,
        **exploding.EXPERIMENTS,
    }
    return runner.run(name, experiments[name], argv)
