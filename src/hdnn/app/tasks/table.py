"""Trainings on a table or on points of the plane: train a run, predict with it, certify it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn import analysis, plotting, serialization
from hdnn.analysis import Certificate
from hdnn.analysis.scores import scored
from hdnn.app import results, runfiles, terminal
from hdnn.app.configs.table import TableConfig
from hdnn.app.progress import TrainingBar
from hdnn.app.runs import Run
from hdnn.app.tasks.answers import Answer, answer_of
from hdnn.app.tasks.problem import Problem, prepare
from hdnn.app.tasks.task import OwnTask
from hdnn.base.memory import check_memory
from hdnn.base.parts import in_parts
from hdnn.base.threads import one_thread, threads_for
from hdnn.data import planar, table
from hdnn.errors import CheckpointError, DataError, OptionError
from hdnn.heads import Augment, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.model import Model
from hdnn.networks import BY_NAME
from hdnn.training import TensorBoard, fit, fit_multilevel
from hdnn.training.multilevel import joined
from hdnn.training.processes.torchrun import Processes
from hdnn.training.start import begin


def build(config: TableConfig, columns: table.Columns) -> Model:
    """The model that a training starts with: its shallowest, with the weights of its seed."""
    features, inputs = config.features, len(columns.names)
    assert features is not None
    _check_memory(config, features)
    generator = torch.Generator().manual_seed(config.seed)
    common: dict[str, Any] = {"generator": generator, "dtype": getattr(torch, config.dtype)}
    options: dict[str, Any] = {"activation": config.activation, "init": config.init, **common}
    times = math.prod(config.refinements)
    if config.network != "mlp":
        options |= {"T": config.T, "step": None if config.step is None else times * config.step}
    net = BY_NAME[config.network](features, config.layers // times, **options)
    if not columns.classes:
        head = RegressionHead(features, 1, **common)
    elif len(columns.classes) == 2:
        head = SigmoidHead(features, **common)
    else:
        head = SoftmaxHead(features, len(columns.classes), **common)
    return Model(Augment(inputs, features), net, head)


def _check_memory(config: TableConfig, n: int) -> None:
    # Weights, gradients and two moments of Adam; then the states of a minibatch.
    weights = config.layers * n * (n / 2 if config.network in ("h2", "verlet") else n) * 4
    states = config.layers * n * min(config.batch or 0, 10**6)
    needed = (weights + states) * getattr(torch, config.dtype).itemsize
    check_memory(needed, f"{config.layers} layers of {n} features", "layers or features")


class TableTask(OwnTask):
    """A training on a table or on points of the plane."""

    config: TableConfig

    def load(self, processes: Processes, bar: TrainingBar) -> None:
        self.find_device(processes)
        self.problem: Problem = processes.first(lambda: prepare(self.config))
        self.config, self.columns = self.problem.config, self.problem.columns
        self.device = processes.device(self.config.device)
        if processes.is_first:
            terminal.say_notes(self.problem.notes, self.said)

    def claim(self, run: Run, stack: ExitStack) -> None:
        super().claim(run, stack)
        self.columns = run.columns()  # a resumed run may be of an earlier version

    def build(self) -> None:
        self.model: Model = build(self.config, self.problem.columns)

    def room(self) -> int:
        # The model, and a checkpoint at each level, which is there twice while it is replaced.
        size = sum(p.numel() * p.itemsize for p in self.model.parameters())
        return 12 * size * math.prod(self.config.refinements)

    def threads(self) -> AbstractContextManager[None]:
        return threads_for((self.config.batch or 0) * (self.config.features or 0))

    def fit(
        self, run: Run, bar: TrainingBar, board: TensorBoard | None, processes: Processes
    ) -> None:
        """Train as the config says, in levels or not."""
        config, problem, device = self.config, self.problem, self.device
        callbacks = [bar if bar.on else None, board]
        options = {
            **config.fit_options(len(problem.x_train)),
            "folder": run.folder,
            "resume": True,
            "callbacks": [one for one in callbacks if one is not None],
            "patience": config.patience,
            "parallel": processes.several,
            "progress": False,
        }
        if problem.weight is not None:
            options["weight"] = problem.weight.to(device)
        if problem.validation:
            options["validation"] = tuple(one.to(device) for one in problem.validation)
        model = self.model.to(device)
        data = problem.x_train.to(device), problem.t_train.to(device)
        if config.is_table and config.solver == "joint":
            begin(model, *data, options["ridge"], options.get("weight"))
        if config.refinements:
            refinements = config.refinements
            model, histories = fit_multilevel(model, *data, refinements=refinements, **options)
            self.history = joined(histories)
        else:
            self.history = fit(model, *data, **options)
        self.model = model.to("cpu")

    def certify(self) -> Certificate:
        where = "test points" if len(self.problem.x_test) else "training points"
        return analysis.certify(self.model, self.problem.points, points=where)

    def note(self) -> dict[str, Any]:
        return {"columns": (self.columns or self.problem.columns).digest()}

    def measured(self, certified: Certificate) -> dict[str, Any]:
        problem = self.problem
        return {
            "task": problem.columns.task,
            "target": problem.columns.target,
            "columns": problem.columns.used,
            "inputs": len(problem.columns.names),
            "network": repr(self.model.net),
            "features": self.config.features,
            "train_rows": len(problem.t_train),
            "test_rows": len(problem.t_test),
            "notes": problem.notes,
            **self._stopping(),
            **scores(self.model, problem, detailed=True),
            "certificate": certified.to_dict(),
        }

    def _stopping(self) -> dict[str, Any]:
        """What was held out, what was watched, and which epoch's model was kept."""
        config, history, found = self.config, self.history, {}
        last = len(history.loss)
        if history.validation_loss:
            kept = (history.best_epoch or last) if config.patience else last
            rows = len(self.problem.validation[0])
            loss = history.validation_loss[kept - 1]
            found = {"validation_rows": rows, "validation_loss": loss, "kept_epoch": kept}
        if config.patience:
            watched = "held-out loss" if history.validation_loss else "training loss"
            found |= {"patience": config.patience, "watched": watched}
        return found

    def pictures(self, certified: Certificate) -> dict[str, Any]:
        found = {}
        if self.problem.planar is not None:
            found["decision_regions"] = plotting.decision_regions(self.model, self.problem.planar)
        found["training"] = plotting.training_history(self.history)
        curve = certified.by_layer
        if all(math.isfinite(norm) for norm in curve["largest"]):
            norms = torch.tensor([curve["smallest"], curve["median"], curve["largest"]]).T
            if curve["layers"] == list(range(len(norms))):
                found["bsm_norms"] = plotting.sensitivity_norms(norms)
                title = f"Sensitivity of the output, {certified.samples} samples"
                found["bsm_norms"].set_title(title)
        return found

    @staticmethod
    def text(metrics: dict[str, Any]) -> str:
        seconds = metrics["training_seconds"]
        return terminal.rows_text(
            [
                ("network", f"{metrics['network']} on {metrics['data']}"),
                ("trained", f"{metrics['epochs']} epochs in {seconds:.1f} s"),
                *results.stopping_rows(metrics),
                *results.measure_rows(metrics),
                *results.gradient_rows(metrics["certificate"]),
                ("run", metrics["run"]),
                *results.picture_rows(metrics),
            ]
        )


@torch.no_grad()
def scores(model: Model, problem: Problem, *, detailed: bool = False) -> dict[str, Any]:
    """Accuracy; or root mean square error, in units of the target, and R^2.

    `detailed`: also all that there is to say of the first part of the data that has rows.
    """
    head, columns, found = model.head, problem.columns, {}
    assert isinstance(head, (RegressionHead, SigmoidHead, SoftmaxHead))
    parts = {part: rows for part, rows in problem.parts.items() if len(rows[0])}
    usual = int(torch.bincount(problem.t_train).argmax()) if columns.classes else None
    for part, (x, t) in reversed(parts.items()):
        last = detailed and part == next(iter(parts))
        given: dict[str, Any] = {"detailed": last, "usual": usual}
        found |= scored(part, head, in_parts(model, x), t, columns, **given)
    return found


def load_columns(run: Run, model: object) -> tuple[Model, table.Columns]:
    """The model of a run on a table or on points, and how rows become its inputs."""
    columns = run.columns()
    if not isinstance(model, Model) or model.augment is None:
        raise CheckpointError(f"{run.model_file} does not hold the model of a run.")
    note = serialization.read_note(run.model_file)
    known = note.get("columns") if isinstance(note, dict) else None
    runfiles.check_columns(run.columns_file, columns, model.augment.inputs, model.head, known)
    return model, columns


def read_rows(data: str, run: Run) -> table.Table:
    """The rows of a file, or the test points of a planar set for the seed of the run."""
    if data not in planar.SETS:
        return table.read(data)
    points = planar.load(data, seed=run.config().seed)
    columns = {f"x{k + 1}": x.tolist() for k, x in enumerate(points.x_test.double().T)}
    return table.Table(Path(data), {**columns, "class": points.t_test.tolist()}, [])


def answer(run: Run, model: object, read: Callable[[Run], table.Table], proba: bool) -> Answer:
    """What the model of a run says of all rows of a table, and their truth if the table has it.

    The rows are read after all else is checked.
    """
    model, columns = load_columns(run, model)
    if proba and not columns.classes:
        raise OptionError("the run is a regression: it has values, but no probabilities.")
    rows = read(run)
    notes: list[str] = []
    x = torch.from_numpy(columns.of(rows, notes=notes)).to(next(model.parameters()).dtype)
    return answer_of(model, x, columns, _truth(rows, columns), {"notes": notes})


def _truth(source: table.Table, columns: table.Columns) -> np.ndarray | None:
    """What is to be predicted, if the table has the whole column."""
    try:
        if not columns.classes:
            return source.numbers(columns.target)
        number = {name: k for k, name in enumerate(columns.classes)}
        true = [number.get(name) for name in source.classes(columns.target)]
        return None if None in true else np.array(true)
    except DataError:  # without the whole column there is no score
        return None


def certify(model: Any, run: Run | None, data: str | None, *, samples: int) -> Certificate:
    """The certificate of a model at the points of a run, of a file, or of its own choice."""
    x, where, columns = None, "", None
    if run is not None:
        model, columns = load_columns(run, model)
    if data in planar.SETS:
        x, where = planar.load(data).x_test, f"test points of {data}"
    elif data is not None:
        rows = table.read(data)
        if columns is None:  # all columns of the file are inputs
            x = torch.from_numpy(
                np.stack(
                    [rows.numbers(name) for name in rows.columns if name not in table.INDEX], 1
                )
            )
        else:
            notes: list[str] = []
            x = torch.from_numpy(columns.of(rows, notes=notes))
            terminal.say_notes(notes)
        where = f"rows of {data}"
    elif run is not None:
        x, where = _own_points(run, columns)
    if columns is not None and x is not None and x.shape[1] != len(columns.names):
        raise DataError(f"{data} has {x.shape[1]} inputs, but the run {len(columns.names)}.")
    with one_thread():
        return analysis.certify(model, x, samples=samples, points=where)


def _own_points(run: Run, columns: table.Columns | None) -> tuple[Tensor, str]:
    """The points that a run is tested with, if its data are still the same."""
    config = run.config()
    if not isinstance(config, TableConfig):
        raise CheckpointError(f"{run.config_file} and {run.model_file} do not fit together.")
    problem = prepare(config)
    if columns is None or not problem.columns.agree(columns):
        raise DataError(
            f"{problem.config.data} has changed since the run; name the rows with --data."
        )
    return problem.points, "test points" if len(problem.x_test) else "training points"
