"""The config of a training on a graph; the options of `hdnn launch` are made of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from hdnn.base.config import BaseConfig, option

INITS = ("auto", "masked", "scaled", "paper")
NETWORKS = ("h1", "h2", "verlet", "yoshida4")

_data, _network, _run = (
    partial(option, panel=panel) for panel in ("Graph and data", "Network", "Run")
)


@dataclass(frozen=True, kw_only=True)
class Config(BaseConfig):
    """All that decides the result of a training on a graph.

    Args:
        graph: what a graph file says, as a dict: `nodes`, `R` and so on.
        data: "swiss_roll", "double_moons", "double_circles", or a folder of node files.
        network: "h1", "h2", "verlet" or "yoshida4".
        layers: their number N.
        step: h.
        activation: the name of sigma.
        init: the initial weights: "masked" (those of one network of all nodes), "scaled", "paper",
            or "auto": masked up to 1024 features, else scaled.
        gain: by which the initial weights are multiplied.
        dtype: "float32" or "float64".
        seed: of data, weights and shuffle.
        options: of `hdnn.training.fit`, such as `{"epochs": 10}`.

    Examples:
        >>> from hdnn.distributed import Config
        >>> config = Config(graph={"nodes": 2, "R": [[0, 1]]}, layers=8)
        >>> config.network, config.layers, config.step
        ('h2', 8, 0.5)
        >>> Config.from_json(config.to_json()) == config
        True
    """

    kind: ClassVar[str] = "graph"

    graph: dict[str, Any]  # as in a graph file
    data: str = _data(
        "swiss_roll",
        "swiss_roll (default), double_moons, double_circles, a folder of node files, or FILE.csv "
        "or FILE.parquet if the graph has columns",
    )
    network: str = _network("h2", "h1, h2 (default), verlet or yoshida4", choices=NETWORKS)
    layers: int = _network(4, "their number N (default: 4)")
    step: float = _network(0.5, "h (default: 0.5)")
    activation: str = _network("tanh", "tanh (default), relu, sigmoid ..")
    init: str = _network(
        "auto",
        "weights: auto (default), masked (as one network), scaled or paper",
        choices=INITS,
    )
    gain: float = 2.0
    dtype: str = _run("float32", "float32 (default) or float64", choices=("float32", "float64"))
    seed: int = _run(0, "of data, weights and shuffle (default: 0)")
    options: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The content of config.json."""
        return json.dumps(self.to_json(), indent=1, sort_keys=True)
