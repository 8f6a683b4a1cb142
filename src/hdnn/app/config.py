"""Options of training runs, in a dataclass for each kind of data and in TOML files.

Fields with a help text are options of the command line. None means chosen for the data.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from hdnn.errors import CheckpointError, OptionError, choose, positive_int

PLANAR_SETS = ("swiss_roll", "double_moons", "double_circles")
IMAGE_SETS = ("mnist", "cifar10")
TASKS = ("auto", "classification", "regression")
SOLVERS = ("newton", "adam", "joint")
SEEDS = 2**32
LAYERS = {**dict.fromkeys(PLANAR_SETS, 64), "mnist": 8, "cifar10": 6}


# Options that are shown only by --help-all.
RARE = {
    *("T", "activation", "batch", "weight_decay", "smoothness", "features"),
    *("solver", "ridge", "categorical", "task", "images", "graph", "quiet"),
    "config",
}


def option(help: str, default: Any = None) -> Any:
    """A field that is a command-line option."""
    return field(default=default, metadata={"help": help})


def many(help: str) -> Any:
    """An option that takes several names."""
    return field(default_factory=list, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of all training runs."""

    kind: ClassVar[str]

    data: str = option(
        "swiss_roll, double_moons, double_circles, mnist, cifar10, FILE.csv or FILE.parquet",
        "",
    )
    network: str = option(
        "h2 (default), h1, verlet, yoshida4, implicit_h2, midpoint, discrete_gradient, ms1, ms2, "
        "ms3, mlp; for images also h1_paper, resnet56, alexnet",
        "h2",
    )
    layers: int | None = option(
        "number of layers (default: 64; for a file 16, for images as in the paper)"
    )
    T: float | None = option("time that all layers span; a step is T / layers")
    activation: str | None = option(
        "tanh, relu, sigmoid, softplus, gelu, silu, sin or identity"
    )
    epochs: int | None = option(
        "passes over the data (default: 50; for a file 120 or fewer, for images 40)"
    )
    batch: int | None = option("samples in a minibatch")
    learning_rate: float | None = option(
        "learning rate of the first step; it falls to zero"
    )
    weight_decay: float | None = option(
        "weight decay of the hidden layers (for a file, chosen on held-out rows)"
    )
    smoothness: float | None = option(
        "penalty on differences between neighbouring layers"
    )
    seed: int = option(
        "seed of the split, the weights and the order of the data (default: 0)",
        0,
    )

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> Self:
        """The config of these options, checked as far as possible without data."""
        types = get_type_hints(cls)
        for name, value in values.items():
            if name not in types or name == "kind":
                raise OptionError(
                    f"--{name.replace('_', '-')} does not apply to {cls.kind} data; leave it out."
                )
            if not _fits(value, types[name]):
                raise OptionError(f"{name} cannot be {value!r}.")
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Refuse options out of range; layers and training check their own options."""
        if not self.data:
            raise OptionError(
                "--data is missing; name a data set or a file: --data swiss_roll."
            )
        options = self.options()
        for name in ("layers", "epochs", "batch", "images"):
            positive_int(name, options.get(name, 1))
        choose("task", options.get("task", "auto"), TASKS)
        choose("solver", options.get("solver", "newton"), SOLVERS)
        limits = {"test_fraction": 1, "validation": 1, "seed": SEEDS}
        for name, limit in limits.items():
            number = options.get(name, 0)
            if not 0 <= number < limit:
                raise OptionError(
                    f"{name} must be at least 0 and below {limit}, but got {number}."
                )

    def run_name(self, graph: str = "") -> str:
        """The name of the run's folder, such as swiss_roll-h2-64-0 or iris-species-h2-16-0."""
        target = getattr(self, "target", None) or ""
        layers = self.layers or LAYERS.get(self.data, 16)
        parts = [graph, Path(self.data).stem, target, self.network]
        names = [plain_name(part) for part in parts if part]
        return "-".join([*names, str(layers), str(self.seed)])

    def options(self) -> dict[str, Any]:
        """All options that have a value."""
        return {
            name: value
            for name, value in asdict(self).items()
            if value not in (None, [])
        }


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options for reading a file."""

    target: str | None = option("column of the file to predict")
    drop: list[str] = many("columns to leave out")  # noqa: RUF009
    categorical: list[str] = many("columns whose numbers are categories")  # noqa: RUF009
    task: str = option("auto (default), classification or regression", "auto")
    test_fraction: float = option(
        "fraction of the rows to test with (default: 0.2)", 0.2
    )


@dataclass(frozen=True, kw_only=True)
class PlaneConfig(Config):
    """Options of training on points in the plane."""

    kind: ClassVar[str] = "planar"

    validation: float | None = option(
        "fraction of the training rows to hold out, measured after each epoch"
    )
    patience: int | None = option(
        "stop after this many epochs without a lower loss (on held-out rows, with --validation)"
    )
    features: int | None = option(
        "size of a state (default: 4; for a file, from its columns)"
    )
    solver: str | None = option(
        "how the output layer is trained: newton, adam or joint"
    )
    ridge: float | None = option("penalty on the output layer")
    device: str = option("cpu (default), cuda or auto", "cpu")


@dataclass(frozen=True, kw_only=True)
class TableConfig(FileOptions, PlaneConfig):
    """Options of training on a file."""

    kind: ClassVar[str] = "table"

    class_weight: str | None = option(
        "balanced, or a weight for each class: yes=2,no=1"
    )

    def check(self) -> None:
        super().check()
        if not Path(self.data).suffix:
            choose("data (or a file)", self.data, (*PLANAR_SETS, *IMAGE_SETS))
        if self.target is None:
            raise OptionError(
                f"--target is missing; name the column of {self.data} to predict."
            )

    def weights(self) -> str | dict[str, float] | None:
        """The class weights: a word, or a number for each name."""
        if self.class_weight is None or "=" not in self.class_weight:
            return self.class_weight
        weights = {}
        for entry in self.class_weight.split(","):
            name, _, number = entry.rpartition("=")
            try:
                weights[name] = float(number)
            except ValueError as error:
                raise OptionError(
                    f"class-weight must be balanced, or a list like yes=2,no=1, but got {entry!r}."
                ) from error
        return weights


@dataclass(frozen=True, kw_only=True)
class ImageConfig(Config):
    """Options of training on the images of mnist or cifar10, with the recipes of the paper."""

    kind: ClassVar[str] = "image"

    images: int | None = option(
        "use only this many training and test images, for a quick look"
    )
    device: str = option("cpu (default), cuda or auto", "cpu")


@dataclass(frozen=True, kw_only=True)
class GraphConfig(FileOptions, Config):
    """Options of training on a graph."""

    kind: ClassVar[str] = "graph"

    data: str = option(
        "swiss_roll (default), double_moons, double_circles, FILE.csv or FILE.parquet",
        "swiss_roll",
    )
    layers: int | None = option("number of layers (default: 4)", 4)
    solver: str | None = option(
        "how the output layer is trained: newton, adam or joint"
    )
    ridge: float | None = option("penalty on the output layer")
    graph: dict | None = None  # the arguments of `hdnn.distributed.Graph`


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options for results and their display."""

    graph: str | None = option(
        "TOML file with nodes and edges (see hdnn launch)"
    )
    out: str | None = option(
        "folder of the run (default: runs/DATA-NETWORK-LAYERS-SEED)"
    )
    resume: bool = option("continue the run in the folder", False)
    overwrite: bool = option("replace the run in the folder", False)
    json: bool = option("print one JSON object", False)
    quiet: bool = option("show no progress", False)


@dataclass(frozen=True, kw_only=True)
class RunOptions(OutputOptions):
    """Further options of `hdnn train`."""

    config: str | None = option(
        "TOML file with options under [train]; flags override them"
    )
    seeds: int | None = option(
        "train this many runs, with seed, seed + 1, and so on"
    )


@dataclass(frozen=True, kw_only=True)
class LaunchOptions(OutputOptions):
    """Further options of `hdnn launch`."""

    nodes: int | None = option("train on a ring of this many nodes")
    parts: int | None = option(
        "processes that share the nodes (default: one for each node)"
    )
    restarts: int | None = option(
        "restart up to this many times after a process is lost"
    )


def config_for(options: Mapping[str, Any]) -> Config:
    """The config of a training run, by its graph or the name of its data."""
    data = options.get("data")
    if "graph" in options:
        return GraphConfig.build(options)
    if data in IMAGE_SETS:
        return ImageConfig.build(options)
    if data in PLANAR_SETS:
        return PlaneConfig.build(options)
    return TableConfig.build(options)


def all_options(*configs: type) -> dict[str, tuple[Any, str]]:
    """The type and the help of each option of these dataclasses, by name."""
    options = {}
    for config in configs:
        types = get_type_hints(config)
        for entry in fields(config):
            if "help" in entry.metadata and entry.name not in options:
                options[entry.name] = (
                    types[entry.name],
                    entry.metadata["help"],
                )
    return options


def _fits(value: Any, annotation: Any) -> bool:
    """True if a value of a TOML file has the type of an option."""
    if get_origin(annotation) is list:
        return isinstance(value, list) and all(
            isinstance(item, str) for item in value
        )
    kinds = get_args(annotation) or (annotation,)
    if float in kinds and type(value) is int:
        return True
    if type(value) is float and not math.isfinite(value):
        return False
    return type(value) in kinds


def plain_name(text: str) -> str:
    """A text without the characters that a folder's name should not contain."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._-")[:64] or "data"


# Files


def read_options(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in a TOML file, under [train] or [launch]."""
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path}, a TOML file: {error}."
        ) from error
    options = content.get("train", content.get("launch"))
    if not isinstance(options, dict):
        raise OptionError(
            f"{path} has no table [train]; write [train] and the options below it."
        )
    return {name.replace("-", "_"): value for name, value in options.items()}


def write_options(path: Path, table: str, options: Mapping[str, Any]) -> None:
    """Write options as a TOML file with one table."""
    from hdnn.io import (
        write_atomically,
    )  # imports torch, which the help does not need

    lines = [f"[{table}]"]
    lines += [f"{name} = {_toml(value)}" for name, value in options.items()]
    write_atomically(path, "\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        entries = [
            f"{json.dumps(name)} = {_toml(entry)}"
            for name, entry in value.items()
        ]
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(entry) for entry in value) + "]"
    if isinstance(value, float):
        return repr(value)  # JSON has no infinity
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
