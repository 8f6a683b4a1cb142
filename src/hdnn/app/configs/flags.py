"""Options that do not change what is trained: where results go, and what is shown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from hdnn.base.config import option

TIMEOUT = 60.0  # seconds until a silent process counts as lost
OVERWRITE = "replace the run that is in the folder, if the folder holds nothing else"

_data, _training, _run = (
    partial(option, panel=panel) for panel in ("Graph and data", "Training", "Run")
)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `hdnn train` that may also stand in its config file."""

    seeds: int | None = _run(None, "that many runs: seed, seed + 1 ..")
    out: str | None = _run(
        None,
        "new folder (default: runs/DATA-NETWORK-N-SEED, for a file runs/DATA-TARGET-NETWORK ..)",
    )
    resume: bool = _run(False, "go on where a run stopped")
    tensorboard: bool = _run(False, "write its curves to the folder tensorboard in it")
    json: bool = _run(False, "print one JSON object")
    quiet: bool = _run(False, "no progress display")


@dataclass(frozen=True, kw_only=True)
class TrainFlags:
    """Options of `hdnn train` that only the command line has."""

    graph: str | None = option(
        None,
        "TOML file: train on its nodes, by one process or many (see hdnn launch --help)",
        panel="Data",
    )
    config: str | None = _run(None, "TOML file, options under \\[train]")
    overwrite: bool = _run(False, OVERWRITE)
    save_every: int | None = _run(None, "with --graph: steps between two shards")
    timeout: float | None = _run(
        None, "with --graph: seconds until a silent process counts as lost"
    )


@dataclass(frozen=True, kw_only=True)
class GraphTraining:
    """The options of the training in the config of a graph, each with a default of its own."""

    epochs: int | None = _training(None, "default: 50")
    batch: int | None = _training(None, "minibatch size (default: 125)")
    learning_rate: float | None = _training(None, "default: 0.02")
    schedule: str | None = _training(None, "cosine (default) or constant")
    warmup: float | None = _training(None, "fraction of steps with a rising rate (default: 0.2)")
    weight_decay: float | None = _training(None, "of hidden layers (default: 0)")
    clip: float | None = _training(None, "largest gradient norm (default: 0.1)")
    solver: str | None = _training(
        None, "of the output layer: newton (default for few features), adam, joint"
    )
    ridge: float | None = _training(None, "on the output layer (default: 5e-5)")
    smoothness: float | None = _training(None, "of weights over layers (default: 5e-3)")
    smoothing: str | None = _training(None, "that is cosine (default) or constant")


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """Options of `hdnn launch` besides."""

    nodes: int | None = _data(None, "of a ring; or, to be sure, of the graph that --graph names")
    graph: str | None = _data(None, "TOML file; see hdnn graph")
    parts: int | None = _run(None, "processes that share the nodes (default: one for each node)")
    replicas: int = _run(
        1, "of the graph, each with its share of every minibatch and processes of its own"
    )
    out: str | None = _run(None, "new folder (default: runs/GRAPH-DATA-NETWORK-N-SEED)")
    resume: bool = _run(False, "go on where a training stopped")
    overwrite: bool = _run(False, OVERWRITE)
    save_every: int | None = _run(None, "steps between two shards (default: an epoch)")
    restarts: int = _run(0, "after a fault, start again so many times")
    timeout: float = _run(TIMEOUT, "seconds until a silent process counts as lost")
    json: bool = _run(False, "print one JSON object")
    quiet: bool = _run(False, "no progress display")
