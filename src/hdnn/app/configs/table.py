"""The config of a training on a table or on points of the plane."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

from hdnn.app.configs.common import (
    DTYPES,
    IMAGE_SETS,
    check_time,
    check_training,
    is_table,
    plain_name,
    target_text,
)
from hdnn.base.config import BaseConfig, option
from hdnn.base.sent import portable
from hdnn.errors import DataError, OptionError, choose, positive_int, quoted

if TYPE_CHECKING:
    from hdnn.data import table

_PENALTIES = ("weight_decay", "ridge")
_NOT_SO = ("T", "early_stopping", "validation_fraction", "n_iter_no_change")
PLANAR_T = 2.4
PENALTIES = ("mean", "sum")  # of the losses, to which weight decay and ridge are added


def table_defaults() -> dict[str, Any]:
    """For a file: options that suit most tables. `resolved` adds what depends on its rows."""
    from hdnn.training import table_recipe

    return {
        **{k: v for k, v in table_recipe.DEFAULTS.items() if k not in _NOT_SO},
        "penalties": "sum",
        "scaling": "bounded",
        "init": "scaled",
        "dtype": "float64",
        "test_fraction": 0.2,
    }


def _networks() -> Collection[str]:
    from hdnn.networks import BY_NAME

    return BY_NAME


def _inits() -> Collection[str]:
    from hdnn.networks.initial import INITS

    return INITS


def _tasks() -> Collection[str]:
    from hdnn.data import table

    return table.TASKS


def _gaps() -> Collection[str]:
    from hdnn.data import table

    return table.GAPS


def _scalings() -> Collection[str]:
    from hdnn.data import table

    return table.SCALINGS


_data, _network, _training, _run = (
    partial(option, panel=panel) for panel in ("Data", "Network", "Training", "Run")
)


@portable
@dataclass(frozen=True, kw_only=True)
class TableConfig(BaseConfig):
    """Everything that decides the result of a training; the defaults are for the planar sets.

    What is None or "auto" depends on the data, and is filled in by `resolved`.
    """

    kind: ClassVar[str] = "table"

    data: str = _data(
        MISSING,
        "swiss_roll, double_moons, double_circles, mnist, cifar10, or FILE.csv or FILE.parquet",
    )
    target: str | None = _data(None, "column of the file to predict")
    drop: list[str] = field(
        default_factory=list,
        metadata={"help": "column to leave out (may be repeated)", "panel": "Data"},
    )
    categorical: list[str] = field(
        default_factory=list,
        metadata={
            "help": "column whose numbers are categories, or whose many texts or dates are "
            "(may be repeated)",
            "panel": "Data",
        },
    )
    missing: str = _data(
        "fill",
        "values: fill (default: by the median, and one more input says where) or refuse",
        choices=_gaps,
    )
    task: str = _data("auto", "auto (default), classification or regression", choices=_tasks)
    class_weight: str | None = _data(
        None, "balanced, or a weight for each class such as yes=2,no=1 (1 where none is given)"
    )
    scaling: str = _data(
        "deviation",
        "of numbers: deviation, or bounded (default for a file): rare values are at most 4",
        choices=_scalings,
    )
    test_fraction: float | None = _data(None, "of the rows, kept for testing (default: 0.2)")
    validation: float | None = _data(
        None, "fraction of the other rows to hold out, and to measure after each epoch (default: 0)"
    )
    network: str = _network(
        "h2",
        "h1, h2 (default), ms1, ms2, ms3, implicit_h2, mlp, verlet, yoshida4, midpoint, "
        "discrete_gradient; for mnist h1, h2, ms1, ms2, ms3; for cifar10 h1, h2, h1_paper, "
        "resnet56, alexnet",
        choices=_networks,
    )
    layers: int = _network(
        64, "their number N (default: 64; for a file 4, for mnist 8; a unit for cifar10: 6)"
    )
    features: int | None = _network(
        None, "of a state, n (default: 4; for a file up to 24 more than its inputs)"
    )
    T: float | None = _network(None, "time span, h = T/N (default: 2.4; for a file 4)")
    step: float | None = _network(None, "h itself, instead of T")
    activation: str = _network(
        "tanh", "tanh (default), relu (default for a file), sigmoid ..; cifar10: its recipe's"
    )
    init: str = _network(
        "paper",
        "weights: paper (default) or scaled (default for a file); images: as their recipe",
        choices=_inits,
    )
    multilevel: str | None = _training(
        None, "2,2: train a quarter of the layers, then half, then all; that many epochs each"
    )
    epochs: int | None = _training(
        50, "default: 50; for a file 40 or fewer; for images 40, with the recipe of the paper"
    )
    patience: int | None = _training(
        None,
        "end after so many epochs in which the held-out loss did not fall, and keep the best "
        "model; without --validation it is the training loss",
    )
    batch: int | None = _training(
        125, "minibatch size (default: 125; for a file about sqrt(2 rows))"
    )
    optimizer: str = _training("adam", "adam (default) or sgd")
    learning_rate: float | None = _training(
        5e-2, "default: 0.05; for a file 0.02, if it is wide smaller"
    )
    schedule: str = _training("cosine", "cosine (default) or constant")
    warmup: float = _training(0.0, "fraction of steps with a rising rate")
    weight_decay: float | None = _training(
        0.0, "of hidden layers (default: 0; for a file half of features, if it is wide less)"
    )
    clip: float | None = _training(None, "largest gradient norm")
    solver: str = _training(
        "newton",
        "of the output layer: newton (default), adam, joint, or auto (joint; default for a file)",
    )
    ridge: float | None = _training(
        1e-4, "on the output layer (default: 1e-4; for a file 0.01 of features)"
    )
    penalties: str = _training(
        "mean",
        "weight decay and ridge stand beside the mean of the losses, or beside their sum "
        "(default for a file: they are divided by its rows)",
        choices=PENALTIES,
    )
    smoothness: float = _training(5e-4, "of weights over layers (default: 5e-4; for a file 0)")
    smoothing: str = _training("constant", "that is constant (default) or cosine")
    seed: int = _run(0, "of split, weights and shuffle (default: 0)")
    device: str = _run("cpu", "cpu (default), cuda or auto")
    dtype: str = _run(
        "float32", "float32 (default) or float64 (default for a file)", choices=DTYPES
    )

    @property
    def is_table(self) -> bool:
        """Whether the data are a file."""
        return is_table(self.data)

    @property
    def refinements(self) -> list[int]:
        """By which factor each further level of training multiplies the number of layers."""
        return [] if self.multilevel is None else [int(k) for k in self.multilevel.split(",")]

    def fit_options(self, rows: int = 1) -> dict[str, Any]:
        """The arguments of `hdnn.training.fit`, for so many rows to train on."""
        names = ("epochs", "batch", "optimizer", "learning_rate", "schedule", "warmup")
        names += ("weight_decay", "clip", "solver", "ridge", "smoothness", "smoothing", "seed")
        options = {name: getattr(self, name) for name in names}
        if self.penalties == "sum":
            from hdnn.training import table_recipe

            given = [name for name in _PENALTIES if options[name] is not None]
            options |= {name: table_recipe.share(options[name], rows) for name in given}
        return options

    def checked(self) -> Self:
        """The same with the network's plain name, or an error before any work is done."""
        from hdnn import activations
        from hdnn.data import class_weights
        from hdnn.training.checks import whole_number

        network = self.network.lower().replace("-", "_")
        replace(self, network=network).check_choices()
        activations.registered(self.activation)
        for name, count in (("layers", self.layers), ("features", self.features)):
            if count is not None:
                positive_int(name, count)
        check_time(self.T, self.step)
        if network == "mlp" and not (self.T is None and self.step is None):
            raise OptionError("an mlp is no time-stepping network: it takes neither T nor step.")
        refined = None if self.multilevel is None else levels(self.multilevel)
        if refined is not None and network == "mlp":
            raise OptionError("an mlp is no time-stepping network: it has no multilevel training.")
        if refined is not None and self.layers % (times := math.prod(map(int, refined.split(",")))):
            raise OptionError(
                f"layers must be a multiple of {times} for multilevel {refined}, but got "
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
        if self.class_weight is not None:
            class_weights.read(self.class_weight)
            if self.task == "regression":
                raise OptionError("a regression has no classes: leave class-weight out.")
        if self.validation is not None and not 0 <= self.validation < 1:
            raise OptionError(
                f"validation must be at least 0 and less than 1, but got {self.validation}."
            )
        given = {k: v for k, v in self.fit_options().items() if v is not None}
        check_training({**given, "solver": "newton" if self.solver == "auto" else self.solver})
        self._check_data()
        return replace(self, network=network, multilevel=refined)

    def _check_data(self) -> None:
        from hdnn.data import planar, table

        try:
            self.data.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"the name of the data, {self.data!r}, is not valid text.") from error
        if self.data in IMAGE_SETS:
            raise DataError(
                f"{self.data} is a set of images: hdnn.app.configs.images has its configs."
            )
        if self.is_table and not table.is_file_name(self.data):
            choose("data set (or file)", self.data, (*planar.SETS, *IMAGE_SETS))
        if self.is_table:
            if self.target in self.drop:
                raise OptionError(
                    f"--drop {self.target} would leave out the target, which is never an input; "
                    "drop other columns, or name another --target."
                )
            return
        if self.target is not None or self.drop:
            raise OptionError(f"{self.data} needs no target and no drop: those are for files.")
        if self.categorical or self.missing != "fill":
            raise OptionError(
                f"{self.data} is complete and has numbers only: categorical and missing are for "
                "files."
            )
        if self.task == "regression":
            raise OptionError(f"{self.data} has two classes; leave the task out.")
        if self.test_fraction not in (None, 0.5):
            raise OptionError(f"{self.data} has a test half of its own; leave test-fraction out.")

    def run_name(self) -> str:
        """The name of the run's folder: swiss_roll-h2-64-0, or for a file iris-species-h2-4-0."""
        if self.target is None:
            return self.name_without_target()
        target = target_text(self.target)
        return f"{plain_name(self.data, 'data')}-{target}-{self.network}-{self.layers}-{self.seed}"

    def name_without_target(self) -> str:
        """The name of the run's folder in earlier versions."""
        return f"{plain_name(self.data, 'data')}-{self.network}-{self.layers}-{self.seed}"

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """From options by their names, checked."""
        if not options.get("data"):
            raise OptionError(
                "say what to train on: --data swiss_roll, or --data FILE.csv --target COLUMN."
            )
        if "images" in options:
            raise OptionError(f"images is for {' and '.join(IMAGE_SETS)}; leave it out.")
        options = cls.without_kind(options)
        if is_table(options["data"]):
            options = {**table_defaults(), **_stopping(options), **options}
        return cls(**options).checked()

    def resolved(self, columns: table.Columns, rows: int = 1) -> Self:
        """The same with all blanks filled in, now that columns and rows to train on are known."""
        from hdnn.training import table_recipe

        inputs, features = len(columns.names), self.features
        if features is None:
            features = table_recipe.width(inputs) if self.is_table else 4
        elif features < inputs:
            raise OptionError(
                f"features must be at least {inputs}, one for each input, but got {features}."
            )
        T = self.T
        if T is None and self.step is None and self.network != "mlp":
            T = table_recipe.DEFAULTS["T"] if self.is_table else PLANAR_T
        rate = self.learning_rate
        rate = table_recipe.learning_rate(features) if rate is None else rate
        counted = 1 if self.penalties == "sum" else rows
        blanks = {
            name: table_recipe.share(table_recipe.penalty(name, features), counted)
            for name in _PENALTIES
            if getattr(self, name) is None
        }
        return replace(
            self,
            data=os.path.abspath(self.data) if self.is_table else self.data,
            test_fraction=self.test_fraction if self.is_table else 0.5,
            task=columns.task,
            features=features,
            T=T,
            epochs=table_recipe.epochs(features) if self.epochs is None else self.epochs,
            batch=table_recipe.batch(rows) if self.batch is None else self.batch,
            learning_rate=rate,
            solver=table_recipe.solver_of(self.solver),
            **blanks,
        )


_TYPES = get_type_hints(TableConfig)
# How a table becomes inputs, which is shared out to nodes: the options of `hdnn train` for it.
TableData = make_dataclass(
    "TableData",
    [
        (each.name, _TYPES[each.name], each)
        for each in fields(TableConfig)
        if each.name in ("target", "drop", "categorical", "missing", "task", "test_fraction")
    ],
    bases=(BaseConfig,),
    kw_only=True,
    frozen=True,
)


def _stopping(options: dict[str, Any]) -> dict[str, Any]:
    """What is held out of a file, and how long is waited, where nothing else is said.

    The fraction is written to every run, so that a default that changes does not change old ones.
    """
    from hdnn.training import table_recipe

    recipe = table_recipe.DEFAULTS
    usual = recipe["validation_fraction"] if recipe["early_stopping"] else 0.0
    fraction = options.get("validation", usual)
    waits = recipe["early_stopping"] and fraction
    return {"validation": fraction, "patience": recipe["n_iter_no_change"] if waits else None}


def levels(text: str) -> str:
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


def before_penalties(options: dict[str, Any]) -> bool:
    """Whether the options are from an old version, which did not divide penalties by the rows."""
    return "penalties" not in options and any(name in options for name in _PENALTIES)
