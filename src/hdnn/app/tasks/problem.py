"""The data of a training on a table or on points: rows to train on, to hold out, to test with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import points_columns
from hdnn.base.sent import portable
from hdnn.data import class_weights, planar, table
from hdnn.errors import OptionError

portable(table.Columns)
portable(planar.PlanarData)


@portable
@dataclass(frozen=True, eq=False)
class Problem:
    """Data to train on and to test with, and the config with all its blanks filled in."""

    config: TableConfig
    columns: table.Columns
    x_train: Tensor
    t_train: Tensor
    x_test: Tensor
    t_test: Tensor
    planar: planar.PlanarData | None
    notes: list[str] = field(default_factory=list)  # what a person should know of the columns
    weight: Tensor | None = None  # of the rows to train on
    validation: tuple[Tensor, ...] = ()  # inputs, targets and weights of rows held out of these

    @property
    def parts(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Rows and targets of each part of the data, some of which may be empty."""
        found = {"test": (self.x_test, self.t_test)}
        if self.validation:
            found["validation"] = self.validation[0], self.validation[1]
        return {**found, "train": (self.x_train, self.t_train)}

    @property
    def points(self) -> Tensor:
        """What a certificate is taken at: the rows to test with, if there are any."""
        return self.x_test if len(self.x_test) else self.x_train


def prepare(config: TableConfig) -> Problem:
    """Read or make the data of a config, on the CPU."""
    dtype = getattr(torch, config.dtype)
    if not config.is_table:
        data = planar.load(config.data, seed=config.seed, dtype=dtype)
        columns = points_columns()
        rows = data.x_train, data.t_train, data.x_test, data.t_test
        return held_out(Problem(config.resolved(columns), columns, *rows, data))
    source = table.read(config.data)
    if config.target is None:
        raise OptionError(
            f"say with --target which column of {source.path} to predict; "
            f"it has {', '.join(map(repr, [*source.columns][:20]))}."
        )
    notes: list[str] = []
    _, classes, t = table.find_target(source, config.target, config.task)
    train, test = table.split(t, config.test_fraction or 0.0, config.seed, classes=bool(classes))
    columns, x, t = table.Columns.learn(
        source,
        config.target,
        task=config.task,
        drop=config.drop,
        categorical=config.categorical,
        missing=config.missing,
        rows=train,
        notes=notes,
    )
    columns = columns.standardised(x[train], t[train], config.scaling)
    config = config.resolved(columns, len(train))
    x = torch.from_numpy(columns.of(source, x)).to(dtype)
    if columns.classes:
        t = torch.from_numpy(t)
    else:
        t = torch.from_numpy(columns.values(source, t)).to(dtype)
    return held_out(Problem(config, columns, x[train], t[train], x[test], t[test], None, notes))


def held_out(problem: Problem) -> Problem:
    """The same problem with weights of classes and held-out rows, if its config asks for them."""
    config, x, t = problem.config, problem.x_train, problem.t_train
    weight = _weights(config, problem.columns, t, x.dtype)
    if not config.validation:
        return replace(problem, weight=weight)
    classes = bool(problem.columns.classes)
    counted = None if weight is None else weight.numpy()
    rows = table.hold_out(
        t.numpy(), config.validation, config.seed, classes=classes, weight=counted
    )
    train, held = map(torch.from_numpy, rows)
    out = tuple(one[held] for one in (x, t, weight) if one is not None)
    weight = None if weight is None else weight[train]
    return replace(problem, x_train=x[train], t_train=t[train], weight=weight, validation=out)


def _weights(
    config: TableConfig, columns: table.Columns, t: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """The weight of each row to train on, that of its class."""
    if config.class_weight is None:
        return None
    if not columns.classes:
        raise OptionError(f"{columns.target!r} has values, not classes: leave class-weight out.")
    given, count = class_weights.read(config.class_weight), len(columns.classes)
    if isinstance(given, str):
        factors = class_weights.balanced(t.numpy(), count)
    else:
        factors = class_weights.named(given, columns.classes)
    return torch.from_numpy(factors).to(dtype)[t]
