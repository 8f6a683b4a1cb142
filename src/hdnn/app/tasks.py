"""What the commands do: train a run, predict with it, certify its gradients.

Nothing here needs the command-line extra; `hdnn.app.cli` turns flags into calls, and results into
text.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

import hdnn
from hdnn import analysis, plotting, serialization
from hdnn.analysis import Certificate
from hdnn.analysis.image_certificate import Certificates
from hdnn.app import runfiles
from hdnn.app.runs import DTYPES, Run, TrainConfig, find_device, usable_folder, write_json
from hdnn.base.files import write_atomically
from hdnn.base.memory import check_memory
from hdnn.data import planar, table
from hdnn.errors import CheckpointError, DataError, MissingExtraError, OptionError
from hdnn.errors import require as require_extra
from hdnn.heads import Augment, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.model import Model
from hdnn.models import ImageModel
from hdnn.networks import BY_NAME, Network
from hdnn.training import Callback, EarlyStopping, History, TensorBoard, fit, fit_multilevel
from hdnn.training.checkpoint import locked
from hdnn.training.multilevel import joined
from hdnn.training.processes.launch import Launch, Single

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 1000  # for a certificate, at the most
PICTURES = 4 * 2**20  # bytes that the pictures of a run may take, with a margin


@dataclass(frozen=True, eq=False)
class Problem:
    """Data to train on and to test with, and the config with all its blanks filled in."""

    config: TrainConfig
    columns: table.Columns
    x_train: Tensor
    t_train: Tensor
    x_test: Tensor
    t_test: Tensor
    planar: planar.PlanarData | None


def prepare(config: TrainConfig) -> Problem:
    """Read or make the data of a config, on the CPU."""
    dtype = DTYPES[config.dtype]
    if not config.is_table:
        data = planar.load(config.data, seed=config.seed, dtype=dtype)
        columns = table.Columns(
            "classification", "class", ["x1", "x2"], [0.0] * 2, [1.0] * 2, ["0", "1"]
        )
        config = config.resolved(columns)
        return Problem(config, columns, data.x_train, data.t_train, data.x_test, data.t_test, data)
    source = table.read(config.data)
    if config.target is None:
        raise OptionError(
            f"say with --target which column of {source.path} to predict; "
            f"it has {', '.join(map(repr, [*source.columns][:20]))}."
        )
    columns, x, t = table.Columns.learn(source, config.target, task=config.task, drop=config.drop)
    train, test = table.split(
        t, config.test_fraction or 0.0, config.seed, classes=bool(columns.classes)
    )
    columns = columns.standardised(x[train], t[train])
    config = config.resolved(columns, len(train))
    x = torch.from_numpy(columns.of(source, x)).to(dtype)
    if columns.classes:
        t = torch.from_numpy(t)
    else:
        t = torch.from_numpy(columns.values(source, t)).to(dtype)
    return Problem(config, columns, x[train], t[train], x[test], t[test], None)


def build(config: TrainConfig, columns: table.Columns) -> Model:
    """The model that a training starts with: its shallowest, with the weights of its seed."""
    features, inputs = config.features, len(columns.names)
    assert features is not None
    _check_memory(config, features)
    generator = torch.Generator().manual_seed(config.seed)
    like: dict[str, Any] = {"generator": generator, "dtype": DTYPES[config.dtype]}
    options: dict[str, Any] = {"activation": config.activation, "init": config.init, **like}
    times = math.prod(config.refinements)
    if config.network != "mlp":
        options |= {"T": config.T, "step": None if config.step is None else times * config.step}
    net = BY_NAME[config.network](features, config.layers // times, **options)
    if not columns.classes:
        head = RegressionHead(features, 1, **like)
    elif len(columns.classes) == 2:
        head = SigmoidHead(features, **like)
    else:
        head = SoftmaxHead(features, len(columns.classes), **like)
    return Model(Augment(inputs, features), net, head)


def _check_memory(config: TrainConfig, n: int) -> None:
    # Weights, gradients and two moments of Adam; then the states of a minibatch.
    weights = config.layers * n * (n / 2 if config.network in ("h2", "verlet") else n) * 4
    states = config.layers * n * min(config.batch, 10**6)
    needed = (weights + states) * DTYPES[config.dtype].itemsize
    check_memory(needed, f"{config.layers} layers of {n} features", "layers or features")


# Training


def train(
    config: TrainConfig,
    run: Run,
    callbacks: Iterable[Callback] = (),
    *,
    tensorboard: bool = False,
    processes: Single | Launch | None = None,
) -> dict[str, Any]:
    """Train, measure, draw and save in the folder of `run`; return its metrics.

    A run that was started there with the same config goes on; a complete one stays as it is. Of
    several processes the first reads and writes, and all of them train.
    """
    processes, start = processes or Single(), time.perf_counter()
    known = processes.first(lambda: known_metrics(run))
    if known is not None:
        return known
    callbacks = [*callbacks, *([EarlyStopping(config.patience)] if config.patience else [])]
    board = TensorBoard(run.folder / "tensorboard") if tensorboard else nullcontext()
    config = replace(config, device=processes.first(lambda: find_device(config.device)))
    device = processes.device(config.device)
    problem = processes.first(lambda: prepare(config))
    config = problem.config
    model = build(config, problem.columns)
    with ExitStack() as lock, threads_for(config), board:
        processes.first(lambda: _claim(run, problem, model, lock))
        callbacks += [board] if isinstance(board, TensorBoard) else []
        options = {"callbacks": callbacks, "parallel": processes.several}
        model, history = _fit(model.to(device), problem, run, device, options)
        trained = model.to("cpu")

        def finish() -> dict[str, Any]:
            known = {"columns": runfiles.fingerprint(problem.columns)}
            serialization.write(trained, run.model_file, known)
            metrics = _measure(run, problem, trained, history)
            if processes.several:
                metrics["processes"] = processes.size
            return complete(run, metrics, start, config.device)

        return processes.first(finish)


def complete(run: Run, metrics: dict[str, Any], start: float, device: str) -> dict[str, Any]:
    """Write what a run came to, which completes it, and return it."""
    metrics |= {
        "seconds": round(time.perf_counter() - start, 2),
        "device": device,
        "versions": {"hdnn": hdnn.__version__, "torch": torch.__version__},
    }
    write_json(run.metrics_file, metrics)
    return metrics


def known_metrics(run: Run) -> dict[str, Any] | None:
    """What a complete run came to; None for one to start or to go on with."""
    if not run.exists:
        run.check_free()
    return run.result() if run.exists and run.complete else None


def _claim(run: Run, problem: Problem, model: Model, lock: ExitStack) -> None:
    """Make the folder of a run, keep others out of it, and write down what is to be done."""
    config = problem.config
    size = sum(p.numel() for p in model.parameters()) * DTYPES[config.dtype].itemsize
    # The model, and at each level a checkpoint, which is there twice while it is written anew.
    usable_folder(run.folder, PICTURES + 12 * size * math.prod(config.refinements))
    lock.enter_context(locked(run.folder))
    run.start(config, problem.columns)


def _measure(run: Run, problem: Problem, model: Model, history: History) -> dict[str, Any]:
    """All that is to be known of a trained model, and pictures of it."""
    config = problem.config
    metrics: dict[str, Any] = {
        "run": str(run.folder),
        "data": config.data,
        "task": problem.columns.task,
        "network": repr(model.net),
        "layers": config.layers,
        "features": config.features,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": config.seed,
        "epochs": len(history.loss),
        "train_rows": len(problem.t_train),
        "test_rows": len(problem.t_test),
        "loss": history.loss[-1],
        **_scores("train", model, problem.x_train, problem.t_train, problem.columns),
        **_scores("test", model, problem.x_test, problem.t_test, problem.columns),
        "training_seconds": round(history.seconds, 2),
    }
    x = problem.x_test if len(problem.x_test) else problem.x_train
    metrics["certificate"] = analysis.certify(model, x, samples=SAMPLES).to_dict()
    return metrics | _pictures(run.folder, model, problem, history, metrics["certificate"])


def _fit(
    model: Model, problem: Problem, run: Run, device: str, options: dict[str, Any]
) -> tuple[Model, History]:
    """Train as the config says, in levels or not; the last model, and one history of all."""
    config = problem.config
    data = problem.x_train.to(device), problem.t_train.to(device)
    options = {**config.fit_options(len(data[0])), "folder": run.folder, "resume": True, **options}
    options["progress"] = False
    if not config.refinements:
        return model, fit(model, *data, **options)
    model, histories = fit_multilevel(model, *data, refinements=config.refinements, **options)
    return model, joined(histories)


def threads_for(config: TrainConfig) -> AbstractContextManager[None]:
    """Small tensors gain nothing from more threads, and on a busy machine these wait for ages."""
    small = config.batch * (config.features or 0) < 100_000
    return one_thread() if small else nullcontext()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _scores(
    part: str, model: Model, x: Tensor, t: Tensor, columns: table.Columns
) -> dict[str, float]:
    """Accuracy; or root mean square error, in units of the target, and R^2."""
    if not len(x):
        return {}
    found = torch.cat([model.predict(some) for some in x.split(4096)])
    if columns.classes:
        return {f"{part}_accuracy": (found == t).double().mean().item()}
    error = (found - t).double().square().mean()
    spread = (t - t.mean()).double().square().mean()
    scores = {f"{part}_rmse": math.sqrt(error) * columns.target_scale}
    if len(t) > 1 and spread > 0:
        scores[f"{part}_r2"] = 1 - (error / spread).item()
    return scores


def _pictures(
    folder: Path, model: Model, problem: Problem, history: Any, certified: dict[str, Any]
) -> dict[str, Any]:
    """PNG files, or the reason why there are none."""
    try:
        require_extra("matplotlib", extra="plot")
    except MissingExtraError as error:
        return {"pictures": {}, "no_pictures_because": str(error)}
    pictures = {}
    if problem.planar is not None:
        ax = plotting.decision_regions(model, problem.planar)
        pictures["decision_regions"] = save_picture(ax, folder / "decision_regions.png")
    pictures["training"] = save_picture(plotting.training_history(history), folder / "training.png")
    curve = certified["by_layer"]
    if all(math.isfinite(norm) for norm in curve["largest"]):
        norms = torch.tensor([curve["smallest"], curve["median"], curve["largest"]]).T
        if curve["layers"] == list(range(len(norms))):
            ax = plotting.sensitivity_norms(norms)
            ax.set_title(f"Sensitivity of the output, {certified['samples']} samples")
            pictures["bsm_norms"] = save_picture(ax, folder / "bsm_norms.png")
    return {"pictures": pictures}


def save_picture(ax: Axes, path: Path) -> str:
    """Write the figure of `ax` as a PNG, all of it or nothing."""
    picture = io.BytesIO()
    ax.figure.canvas.print_figure(picture, format="png")
    write_atomically(path, picture.getvalue())
    return str(path)


# Predicting


def load_model(run: Run) -> Model | Network | ImageModel:
    """The trained model of a run, on the CPU."""
    if not run.exists:
        run.config()  # which says so
    if not run.model_file.is_file():
        raise CheckpointError(
            f"the run in {run.folder} has no model yet; finish it by "
            f"hdnn train --resume --out {run.folder}."
        )
    return serialization.load(run.model_file)


def load_columns(run: Run, model: object) -> tuple[Model, table.Columns]:
    """A model on rows of a table or on points, and how they become its inputs."""
    columns = run.columns()
    if not isinstance(model, Model) or model.augment is None:
        raise CheckpointError(f"{run.model_file} does not hold the model of a run.")
    note = serialization.read_note(run.model_file)
    known = note.get("columns") if isinstance(note, dict) else None
    runfiles.check_columns(run.columns_file, columns, model.augment.inputs, model.head, known)
    return model, columns


def predict(run: Run, data: str, *, proba: bool = False) -> dict[str, Any]:
    """Predictions for all rows of a file; with its score, if the file has the target too.

    Of a run on images, `data` is the name of a set, and the rows are its test images.
    """
    model = load_model(run)
    if isinstance(model, ImageModel):
        return image_tasks().predict(model, data, proba=proba)
    model, columns = load_columns(run, model)
    if proba and not columns.classes:
        raise OptionError("the run is a regression: it has values, but no probabilities.")
    source = table.read(data)
    x = torch.from_numpy(columns.of(source)).to(next(model.parameters()).dtype)
    with torch.no_grad():
        scores = torch.cat([model(part) for part in x.split(4096)])
    result: dict[str, Any] = {"rows": len(x), "target": columns.target}
    if columns.classes:
        assert isinstance(model.head, (SigmoidHead, SoftmaxHead))
        result["predictions"] = [columns.classes[i] for i in model.head.predict(scores).tolist()]
        if proba:
            chances = model.head.probabilities(scores).double().T.tolist()
            result["probabilities"] = dict(zip(columns.classes, chances, strict=True))
        found = np.array(result["predictions"], dtype=object)
    else:
        found = scores[:, 0].double().numpy() * columns.target_scale + columns.target_mean
        result["predictions"] = found.tolist()
    return result | _truth(source, columns, found)


def _truth(source: table.Table, columns: table.Columns, found: np.ndarray) -> dict[str, float]:
    """How good predictions are, where the truth stands beside them."""
    try:
        if columns.classes:
            true = np.array(source.classes(columns.target), dtype=object)
            if not set(true) <= set(columns.classes):
                return {}
            return {"accuracy": float((true == found).mean())}
        true = source.numbers(columns.target)
        return {"rmse": float(np.sqrt(np.mean((true - found) ** 2)))}
    except DataError:  # no such column, or holes in it: then nothing is known
        return {}


def image_tasks() -> Any:
    """`hdnn.app.image_tasks`, which is made of what is here."""
    from hdnn.app import image_tasks

    return image_tasks


# Certifying


def certify(
    checkpoint: str | os.PathLike[str], data: str | None = None, *, samples: int = SAMPLES
) -> Certificate | Certificates:
    """The certificate of a run, or of a saved model, at its own points or at those of a file."""
    if samples < 1:
        raise OptionError(f"samples must be a whole number >= 1, but got {samples}.")
    file = Path(checkpoint).is_file()
    model = serialization.load(checkpoint) if file else load_model(Run(checkpoint))
    if isinstance(model, ImageModel):
        name = data if file or data is not None else Run(checkpoint).config().data
        return image_tasks().certify(model, name, samples=samples)
    if file:
        x, where = _points(data)
    else:
        model, x, where = _run_points(Run(checkpoint), model, data)
    with one_thread():
        return analysis.certify(model, x, samples=samples, points=where)


def _points(data: str | None) -> tuple[Tensor | None, str]:
    """The points of a data set or of a file whose columns are the inputs of a model."""
    if data is None:
        return None, ""
    if data in planar.SETS:
        return planar.load(data).x_test, f"test points of {data}"
    rows = table.read(data)
    x = np.stack([rows.numbers(name) for name in rows.columns], 1)
    return torch.from_numpy(x), f"rows of {data}"


def _run_points(run: Run, model: object, data: str | None) -> tuple[Model, Tensor, str]:
    """The model of a run with its own test points, or with the rows of a file."""
    model, columns = load_columns(run, model)
    if data is None:
        config = run.config()
        if not isinstance(config, TrainConfig):
            raise CheckpointError(f"{run.config_file} and {run.model_file} do not fit together.")
        problem = prepare(config)
        if problem.columns != columns:
            raise DataError(
                f"{problem.config.data} has changed since the run; name the rows with --data."
            )
        x = problem.x_test if len(problem.x_test) else problem.x_train
        where = "test points" if len(problem.x_test) else "training points"
    elif data in planar.SETS:
        x, where = planar.load(data).x_test, f"test points of {data}"
    else:
        x, where = torch.from_numpy(columns.of(table.read(data))), f"rows of {data}"
    if x.shape[1] != len(columns.names):
        raise DataError(f"{data} has {x.shape[1]} inputs, but the run {len(columns.names)}.")
    return model, x, where
