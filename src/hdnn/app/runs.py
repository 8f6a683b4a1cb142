"""Runs on disk: what a training was asked to do, and the folder that holds all it came to.

A folder has config.toml (every option, as `train --config` reads it), columns.json (how rows of a
table become inputs), log.jsonl and checkpoint.safetensors (written by `hdnn.training.fit`; in
folders level-0, level-1 .. of their own where `fit_multilevel` wrote them), and at the end
model.safetensors, the pictures and metrics.json, which is written last: it says that a run is
complete.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import re
import tempfile
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import torch

from hdnn import activations
from hdnn.app import runfiles
from hdnn.base.files import finite, read_bytes, write_atomically
from hdnn.base.files import read_json as read_json
from hdnn.data import planar, table
from hdnn.errors import (
    SENSIBLE,
    CheckpointError,
    DataError,
    HDNNError,
    OptionError,
    as_float,
    choose,
    positive_int,
    quoted,
)
from hdnn.networks import BY_NAME
from hdnn.networks.initial import INITS
from hdnn.training import fit, table_recipe
from hdnn.training.checks import check_options, whole_number

if TYPE_CHECKING:
    from hdnn.app.image_runs import ImageConfig

CONFIG = 2**20  # bytes of a config file
DTYPES = MappingProxyType({"float32": torch.float32, "float64": torch.float64})
IMAGE_SETS = ("mnist", "cifar10")  # see `hdnn.app.image_runs`

# For a file: what serves most tables. What depends on the task is filled in by `resolved`.
_PENALTIES = ("weight_decay", "ridge")
TABLE_DEFAULTS: MappingProxyType[str, Any] = MappingProxyType(
    {
        **{k: v for k, v in table_recipe.CLASSES.items() if k not in ("T", *_PENALTIES)},
        **dict.fromkeys(_PENALTIES),
        "layers": table_recipe.RUN_LAYERS,
        "penalties": "sum",
        "init": "scaled",
        "test_fraction": 0.2,
    }
)
PLANAR_T = 2.4
PENALTIES = ("mean", "sum")  # of the losses, beside which weight decay and ridge stand

# What a config file may hold besides the options of the training itself.
RUN_OPTIONS: MappingProxyType[str, type] = MappingProxyType(
    {"out": str, "seeds": int, "resume": bool, "tensorboard": bool, "json": bool, "quiet": bool}
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a training comes to; the defaults are for the planar sets.

    What is None or "auto" depends on the data, and is filled in by `resolved`.
    """

    data: str
    target: str | None = None
    drop: list[str] = field(default_factory=list)
    task: str = "auto"
    test_fraction: float | None = None
    network: str = "h2"
    layers: int = 64
    features: int | None = None
    T: float | None = None
    step: float | None = None
    activation: str = "tanh"
    init: str = "paper"
    multilevel: str | None = None  # such as 2,2: a quarter of the layers first, then half, then all
    epochs: int = 50
    patience: int | None = None
    batch: int = 125
    optimizer: str = "adam"
    learning_rate: float = 5e-2
    schedule: str = "cosine"
    warmup: float = 0.0
    weight_decay: float | None = 0.0
    clip: float | None = None
    solver: str = "newton"
    ridge: float | None = 1e-4
    penalties: str = "mean"  # "sum": weight decay and ridge are divided by the rows to train on
    smoothness: float = 5e-4
    smoothing: str = "constant"
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"

    @property
    def is_table(self) -> bool:
        """Whether the data are a file."""
        return is_table(self.data)

    @property
    def refinements(self) -> list[int]:
        """How many times the layers of the level before each further level of training has."""
        return [] if self.multilevel is None else [int(k) for k in self.multilevel.split(",")]

    def fit_options(self, rows: int = 1) -> dict[str, Any]:
        """The arguments of `hdnn.training.fit`, for so many rows to train on."""
        names = ("epochs", "batch", "optimizer", "learning_rate", "schedule", "warmup")
        names += ("weight_decay", "clip", "solver", "ridge", "smoothness", "smoothing", "seed")
        options = {name: getattr(self, name) for name in names}
        if self.penalties == "sum":
            given = [name for name in _PENALTIES if options[name] is not None]
            options |= {name: table_recipe.share(options[name], rows) for name in given}
        return options

    def checked(self) -> Self:
        """The same with the network's plain name, or an error before any work is done."""
        network = choose("network", self.network.lower().replace("-", "_"), BY_NAME)
        activations.registered(self.activation)
        choose("dtype", self.dtype, DTYPES)
        choose("task", self.task, table.TASKS)
        choose("init", self.init, INITS)
        for name, count in (("layers", self.layers), ("features", self.features)):
            if count is not None:
                positive_int(name, count)
        for name, number in (("T", self.T), ("step", self.step)):
            check_time(name, number)
        if self.T is not None and self.step is not None:
            raise OptionError("give T or step (h = T/N), but not both.")
        if network == "mlp" and not (self.T is None and self.step is None):
            raise OptionError("an mlp is no time-stepping network: it takes neither T nor step.")
        levels = None if self.multilevel is None else _levels(self.multilevel)
        if levels is not None and network == "mlp":
            raise OptionError("an mlp is no time-stepping network: it has no multilevel training.")
        if levels is not None and self.layers % (times := math.prod(map(int, levels.split(",")))):
            raise OptionError(
                f"layers must be a multiple of {times} for multilevel {levels}, but got "
                f"{self.layers}."
            )
        if self.patience is not None:
            whole_number("patience", self.patience, 1)
        if not 0 <= self.seed < 2**63:
            raise OptionError(f"seed must be from 0 to 2^63 - 1, but got {self.seed}.")
        if self.test_fraction is not None and not 0 <= self.test_fraction < 1:
            raise OptionError(
                f"test-fraction must be at least 0 and less than 1, but got {self.test_fraction}."
            )
        choose("penalties", self.penalties, PENALTIES)
        given = {k: v for k, v in self.fit_options().items() if v is not None}
        check_training({**given, "solver": "newton" if self.solver == "auto" else self.solver})
        self._check_data()
        return replace(self, network=network, multilevel=levels)

    def _check_data(self) -> None:
        try:
            self.data.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the name of the data, {self.data!r}, is not valid text.") from error
        if self.data in IMAGE_SETS:
            raise DataError(f"{self.data} is a set of images: hdnn.app.image_runs has its configs.")
        if self.is_table and not table.is_file_name(self.data):
            choose("data set (or file)", self.data, (*planar.SETS, *IMAGE_SETS))
        if self.is_table:
            return
        if self.target is not None or self.drop:
            raise OptionError(f"{self.data} needs no target and no drop: those are for files.")
        if self.task == "regression":
            raise OptionError(f"{self.data} has two classes; leave the task out.")
        if self.test_fraction not in (None, 0.5):
            raise OptionError(f"{self.data} has a test half of its own; leave test-fraction out.")

    def run_name(self) -> str:
        """The name of the run's folder, such as swiss_roll-h2-64-0."""
        stem = Path(self.data).stem if self.is_table else self.data
        stem = re.sub(r"[^\w.-]+", "_", stem, flags=re.ASCII).strip("._-") or "data"
        return f"{stem[:64]}-{self.network}-{self.layers}-{self.seed}"

    def to_toml(self) -> str:
        """The text of a file that `--config` reads back to the same config."""
        return to_toml(self)

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """From options by their names, checked."""
        if not options.get("data"):
            raise OptionError(
                "say what to train on: --data swiss_roll, or --data FILE.csv --target COLUMN."
            )
        if "images" in options:
            raise OptionError(f"images is for {' and '.join(IMAGE_SETS)}; leave it out.")
        blanks = TABLE_DEFAULTS if is_table(options["data"]) else {}
        return cls(**{**blanks, **options}).checked()

    def resolved(self, columns: table.Columns, rows: int = 1) -> Self:
        """The same with all blanks filled in, now that columns and rows to train on are known."""
        inputs, outputs = len(columns.names), max(len(columns.classes), 1)
        outputs = 1 if outputs == 2 else outputs
        features = self.features
        if features is None:
            features = table_recipe.width(inputs) if self.is_table else 4
        elif features < inputs:
            raise OptionError(
                f"features must be at least {inputs}, one for each input, but got {features}."
            )
        T = self.T
        if T is None and self.step is None and self.network != "mlp":
            T = table_recipe.CLASSES["T"] if self.is_table else PLANAR_T
        recipe = table_recipe.CLASSES if columns.classes else table_recipe.VALUES
        rows = 1 if self.penalties == "sum" else rows
        blanks = [name for name in _PENALTIES if getattr(self, name) is None]
        solver = table_recipe.solver_of(
            self.solver, batch=self.batch, features=features, outputs=outputs
        )
        return replace(
            self,
            data=os.path.abspath(self.data) if self.is_table else self.data,
            test_fraction=self.test_fraction if self.is_table else 0.5,
            task=columns.task,
            features=features,
            T=T,
            solver=solver,
            **{name: table_recipe.share(recipe[name], rows) for name in blanks},
        )


def is_table(data: str | None) -> bool:
    """Whether data of that name are a file."""
    return data is not None and data not in (*planar.SETS, *IMAGE_SETS)


def before_penalties(options: dict[str, Any]) -> bool:
    """Whether options of a file are of a time when no penalty was divided by the rows."""
    return "penalties" not in options and any(name in options for name in _PENALTIES)


def config_of(options: dict[str, Any]) -> TrainConfig | ImageConfig:
    """The config that options ask for, of the kind that their data need."""
    from hdnn.app.image_runs import ImageConfig  # which is made of what is here

    kind = ImageConfig if options.get("data") in IMAGE_SETS else TrainConfig
    return kind.of(options)


def to_toml(config: TrainConfig | ImageConfig) -> str:
    """The text of a file that `--config` reads back to the same config."""
    lines = ["[train]"]
    for option in fields(config):
        value = getattr(config, option.name)
        if value is not None and value != []:
            lines.append(f"{option.name.replace('_', '-')} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def check_training(options: dict[str, Any]) -> None:
    """Check those of the options of `hdnn.training.fit` that are given."""
    check_options(**{**_fit_defaults(), **options})


def check_time(name: str, number: float | None) -> None:
    """Refuse a step or a time span that no layers can have."""
    if number is not None and not 0 < number <= SENSIBLE:
        raise OptionError(
            f"{name} must be finite and > 0, and at most {SENSIBLE:g}, but got {number}."
        )


def _levels(text: str) -> str:
    """How often to refine, however it is written, as 2,2."""
    try:
        times = [int(part) for part in text.split(",")]
    except ValueError:
        times = [0]
    if min(times) < 2:
        raise OptionError(
            f"multilevel must be whole numbers >= 2 with commas, such as 2,2, but got "
            f"{quoted(text)}."
        )
    return ",".join(map(str, times))


def _fit_defaults() -> dict[str, Any]:
    """The options of `hdnn.training.fit` that it has a default for, also those without a flag."""
    given = inspect.signature(fit).parameters.values()
    return {option.name: option.default for option in given if option.default is not option.empty}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in the [train] table of a TOML file, by their names with _ for -."""
    try:
        document = tomllib.loads(read_bytes(Path(path), CONFIG).decode())
    except (ValueError, RecursionError) as error:  # of which a TOMLDecodeError is one
        reason = str(error).removeprefix(f"cannot read {path}: ")
        reason = reason.removeprefix(f"{path} cannot be read: ").rstrip(".")
        raise OptionError(f"cannot read the config file {path}: {reason}.") from error
    for name in document:
        _known(path, name, ["train"], "table")
    if not isinstance(document.get("train"), dict):
        raise OptionError(f"{path} has no table [train]; put the options under that line.")
    kinds = {option.name: str(option.type) for option in fields(TrainConfig)}
    kinds |= {"images": "int", **{name: kind.__name__ for name, kind in RUN_OPTIONS.items()}}
    options: dict[str, Any] = {}
    for key, value in document["train"].items():
        name = key.replace("-", "_")
        _known(path, name, kinds, "option")
        if name in options:
            raise OptionError(f"{path} gives {key} twice, with - and with _.")
        options[name] = _as_kind(path, key, value, kinds[name])
    return options


def _known(path: Any, name: str, names: Any, what: str) -> None:
    try:
        choose(what, name, names)
    except OptionError as error:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}."
        raise OptionError(f"{path} has an unknown {what} {name!r}; {hint}") from error


def _as_kind(path: Any, key: str, value: Any, kind: str) -> Any:
    """A value of a config file, if it is of the kind that the option has."""
    kind = kind.removesuffix(" | None")
    if kind == "float" and type(value) is int:
        return as_float(value)
    if kind == "list[str]" and isinstance(value, list) and all(type(v) is str for v in value):
        return value
    words = {
        "str": "a text",
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "list[str]": "a list of texts",
    }
    if type(value).__name__ != kind:
        raise OptionError(f"{path}: {key} must be {words[kind]}, but is {quoted(value)}.")
    return value


def _toml(value: Any) -> str:
    """One value as TOML writes it."""
    if isinstance(value, list):
        return f"[{', '.join(_toml(entry) for entry in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the one control character that JSON leaves alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def find_device(name: str) -> str:
    """The device, if this machine has it; "auto" is a GPU where there is one."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        return "cuda" if gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"device {name!r} is not known; try cpu, cuda or auto.") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise OptionError(f"device {name!r} is not for training; try cpu, cuda or auto.")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise OptionError(f"there is no device {name!r} here: PyTorch finds {gpus} GPUs.")
    return name


@dataclass(frozen=True, init=False)
class Run:
    """The folder of one run."""

    folder: Path

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "folder", Path(folder))

    config_file = property(lambda self: self.folder / "config.toml")
    columns_file = property(lambda self: self.folder / "columns.json")
    checkpoint_file = property(lambda self: self.folder / "checkpoint.safetensors")
    model_file = property(lambda self: self.folder / "model.safetensors")
    metrics_file = property(lambda self: self.folder / "metrics.json")
    log_file = property(lambda self: self.folder / "log.jsonl")

    @property
    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.config_file.is_file()

    @property
    def complete(self) -> bool:
        """Whether it came to its end."""
        return self.metrics_file.is_file()

    def check_free(self) -> None:
        """Refuse a folder that holds anything: nothing is ever overwritten."""
        # A temporary file is what a kill in the middle of the first write leaves behind.
        taken = os.path.lexists(self.folder) and not (
            self.folder.is_dir()
            and all(re.fullmatch(r"\..*\.tmp", file.name) for file in self.folder.iterdir())
        )
        if not taken:
            return
        if self.exists:
            raise CheckpointError(
                f"{self.folder} holds a run already; go on with it by --resume, or name another "
                "folder with --out."
            )
        raise CheckpointError(
            f"{self.folder} is {'not empty' if self.folder.is_dir() else 'a file'}; name another "
            "folder with --out."
        )

    def start(
        self, config: TrainConfig | ImageConfig, columns: table.Columns | None = None
    ) -> None:
        """Write down what is about to be done, or was begun; images have no columns."""
        if not self.exists:
            write_atomically(self.config_file, config.to_toml().encode())
        if columns is None:
            return
        if not self.columns_file.is_file():
            write_json(self.columns_file, columns.to_json())
        elif self.columns() != columns:
            raise DataError(
                f"{config.data} has changed since the run in {self.folder} was started; start "
                "another one."
            )

    def config(self) -> TrainConfig | ImageConfig:
        """The config that the run was started with."""
        if not self.exists:
            raise CheckpointError(
                f"{self.folder} is not the folder of a run: it has no config.toml; "
                "make one by hdnn train."
            )
        options = read_config(self.config_file)
        if before_penalties(options) and is_table(options.get("data")):
            options["penalties"] = "mean"
        try:
            return config_of(options)
        except HDNNError as error:
            raise CheckpointError(f"{self.config_file} was edited: {error}") from error

    def resumed(self, given: dict[str, Any]) -> TrainConfig | ImageConfig:
        """The same, unless the options that were given ask for something else."""
        config = self.config()
        for name, new in given.items():
            if not hasattr(config, name):
                config_of({"data": config.data, name: new})  # which says that there is none
            old = getattr(config, name)
            if name == "data" and new not in (*planar.SETS, *IMAGE_SETS):
                new = os.path.abspath(new)
            if name == "network":
                new = new.lower().replace("-", "_")
            if name == "multilevel":
                new = _levels(new)
            if new not in (old, "auto"):
                raise OptionError(
                    f"the run in {self.folder} has {name.replace('_', '-')} = {old!r}, not "
                    f"{new!r}; resume it with the options that it was started with, or name "
                    "another folder with --out."
                )
        return config

    def columns(self) -> table.Columns:
        """How rows become inputs."""
        return runfiles.read_columns(self.columns_file)

    def metrics(self) -> dict[str, Any]:
        """What it came to, as far as its file has it."""
        return runfiles.read_metrics(self.metrics_file)

    def result(self) -> dict[str, Any]:
        """What it came to, all of it, if it is complete."""
        metrics, config = self.metrics(), self.config()
        images = config.data in IMAGE_SETS
        runfiles.check_complete(self.metrics_file, metrics, config, images)
        return metrics

    def log(self) -> list[dict[str, Any]]:
        """One entry an epoch, counted on over levels; a last line that was cut off is left out."""
        return self.log_and_faults()[0]

    def log_and_faults(self) -> tuple[list[dict[str, Any]], int]:
        """The log, and how many of its lines are none of hdnn's."""
        if os.path.lexists(self.log_file):
            return runfiles.read_log(self.log_file)
        entries: list[dict[str, Any]] = []
        faults, files = 0, self.folder.glob(f"level-*/{self.log_file.name}")
        for file in sorted(files, key=lambda file: (len(str(file)), file)):
            before, (found, wrong) = len(entries), runfiles.read_log(file)
            entries += [{**entry, "epoch": entry["epoch"] + before} for entry in found]
            faults += wrong
        return entries, faults


def usable_folder(folder: Path, room: int) -> None:
    """Make a folder and try it out: better to know before the training than after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            for _ in range(-(-room // 2**22)):
                probe.write(bytes(2**22))
            probe.flush()
            os.fsync(probe.fileno())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(
            f"cannot write to the folder {folder}: {reason}; choose one that you "
            f"may write to and that has {max(room // 2**20, 1)} MiB of room."
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(finite(value), indent=2) + "\n").encode())
