"""`hdnn train`: load data, build a model, fit, evaluate, certify, write: one path for all data.

A job is a training on data of one kind. It has a config with all options filled in, a model and a
history, and can `fit`, `certify`, list its `metrics` and draw `pictures`.
"""

from __future__ import annotations

import io as byte_io
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn import __version__, analysis, io, plotting
from hdnn.app.config import (
    Config,
    ImageConfig,
    PlaneConfig,
    RunOptions,
    TableConfig,
    all_options,
    config_for,
    read_options,
)
from hdnn.app.runs import Run
from hdnn.app.scores import (
    evaluate,
    lines,
    outputs,
    score_rows,
    score_text,
    spread,
)
from hdnn.data import ImageData, load_cifar10, load_mnist, planar
from hdnn.errors import (
    CheckpointError,
    MissingExtraError,
    OptionError,
    choose,
    positive_int,
    require,
)
from hdnn.heads import Augment, Model, SigmoidHead
from hdnn.networks import BY_NAME
from hdnn.training import History, fit, fit_images, recipes
from hdnn.training.images import image_scores

SCORES = (
    "test_accuracy",
    "test_rmse",
    "test_r2",
    "train_accuracy",
    "train_rmse",
)
NETWORK_OPTIONS = ("layers", "features", "activation", "T")
FIT_OPTIONS = (
    "epochs",
    "batch",
    "learning_rate",
    "weight_decay",
    "ridge",
    "smoothness",
)
PLANAR: dict[str, Any] = {
    "features": 4,
    "layers": 64,
    "activation": "tanh",
    "T": 2.4,
    "epochs": 50,
    "batch": 125,
    "learning_rate": 0.05,  # the cosine halves it on average
    "weight_decay": 0.0,
    "solver": "newton",
    "ridge": 1e-4,
    "smoothness": 5e-4,
}
STEPS = 20  # in an epoch of few images
SMALL = 8  # features, up to which a certificate looks at many points
MANY = 1000
FEW = 50


def plan(values: Mapping[str, Any]) -> list[tuple[Config, Run]]:
    """The config and the folder of each run, all of them checked before the first one starts."""
    options = dict(values)
    if "config" in options:
        options = {**read_options(options["config"]), **options}
    run_options = all_options(RunOptions)
    own = {k: v for k, v in options.items() if k not in run_options}
    out = options.get("out")
    count = positive_int("seeds", options.get("seeds", 1))
    if "resume" in options and out is not None and count == 1:
        run = Run(out)
        if run.exists:
            run.check_same(own)
            return [(run.config(), run)]
        if not own:
            raise CheckpointError(f"there is no run in {out} to go on with.")
    first = own.get("seed", 0)
    jobs = []
    for seed in range(first, first + count):
        config = config_for({**own, "seed": seed})
        place = Path(out or Path("runs") / config.run_name())
        if out is not None and count > 1:
            place /= f"seed-{seed}"
        jobs.append((config, Run(place)))
    check_folders([run for _, run in jobs], options)
    return jobs


def check_folders(runs: list[Run], options: Mapping[str, Any]) -> None:
    """Refuse to write over runs unless asked to."""
    if "resume" in options and "overwrite" in options:
        raise OptionError(
            "--resume goes on with a run and --overwrite replaces it; give one."
        )
    if "resume" not in options and "overwrite" not in options:
        for run in runs:
            run.check_free()


def train(
    config: Config, run: Run, values: Mapping[str, Any], job_of: Any = None
) -> dict[str, Any]:
    """Train, certify and write one run; a complete one that is resumed stays as it is.

    Args:
        config: the options of the training.
        run: its folder.
        values: options of the command: resume, overwrite, quiet, json.
        job_of: makes the job of a config; by default for its kind of data.
    """
    resume = "resume" in values
    if resume and run.complete:
        return run.metrics()
    start = time.perf_counter()
    job = (job_of or JOBS[type(config)])(config)
    options = job.config.options()
    overwrite = "overwrite" in values
    with run.opened(options, resume=resume, overwrite=overwrite):
        quiet = "quiet" in values or "json" in values
        job.fit(run.training_folder, not quiet)
        certificate = job.certify()
        io.save(job.model, run.model_file, note=job.note())
        net = getattr(job.model, "net", job.model)
        metrics = {
            "run": str(run.folder),
            **options,
            "network": repr(net).partition("\n")[0],
            "parameters": sum(p.numel() for p in job.model.parameters()),
            **job.metrics(),
            "epochs": len(job.history.loss),
            "training_seconds": round(job.history.seconds, 2),
            "history": job.history.curves(),
            "certificate": certificate and certificate.to_dict(),
            "pictures": draw(job, certificate, run.folder),
            "versions": {"hdnn": __version__, "torch": torch.__version__},
            "seconds": round(time.perf_counter() - start, 2),
        }
        io.write_json(run.metrics_file, metrics)
    return metrics


def find_device(name: str) -> str:
    """A device of this machine; "auto" is a GPU where there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    choose("device", name.partition(":")[0], ("cpu", "cuda"))
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise OptionError("no CUDA device is available; use --device cpu.")
    return name


# Tables and points of the plane


@dataclass
class Problem:
    """Rows to train on and to test with, and how they are made of columns."""

    x: Tensor
    t: Tensor
    x_test: Tensor
    t_test: Tensor
    encoder: Any
    target: Any
    plane: Any = None  # points of the plane
    frame: Any = None  # the rows of a file to train on
    notes: list[str] = field(default_factory=list)

    @property
    def points(self) -> Tensor:
        """The rows that a certificate looks at."""
        return self.x_test if len(self.x_test) else self.x

    def note(self) -> dict[str, Any]:
        """The columns, which the file of the model remembers."""
        return {"inputs": self.encoder.config(), "target": self.target.config()}

    def truth(self, t: Tensor) -> np.ndarray:
        """Labels, or values in their own units."""
        if self.target.classes:
            return t.numpy()
        return self.target.decode(t[:, 0].numpy())

    def scores(self, model: Any) -> dict[str, Any]:
        """Scores on training and test rows; baseline and confusion table on the test rows."""
        target = self.target
        metrics: dict[str, Any] = {
            "task": target.task,
            "inputs": len(self.encoder.names),
            "train_rows": len(self.x),
            "test_rows": len(self.x_test),
            "notes": self.notes,
        }
        train = self.truth(self.t)
        if target.classes:
            metrics["common"] = int(np.bincount(train).argmax())
        else:
            metrics["common"] = float(train.mean())
            metrics["target_mean"] = target.center
            metrics["target_std"] = target.scale
        rows = {"train": (self.x, self.t), "test": (self.x_test, self.t_test)}
        for part, (x, t) in rows.items():
            if not len(x):
                continue
            answers = outputs(model, x)
            if not target.classes:
                answers = target.decode(answers)
            scores = evaluate(
                answers, self.truth(t), target.classes, metrics["common"]
            )
            for name in ("accuracy", "rmse", "r2"):
                if name in scores:
                    metrics[f"{part}_{name}"] = scores.pop(name)
            metrics |= scores
        return metrics


def load(config: Any) -> Problem:
    """Read or compute the rows of a config, on the CPU."""
    if config.data in planar.SETS:
        return load_points(config.data, config.seed)
    return load_table(config)


def load_table(config: Any) -> Problem:
    """The rows of a file; columns are learned from the rows to train on."""
    from hdnn.data import tables

    frame = tables.read(config.data)
    target = tables.Target.fit(frame, config.target, config.task)
    for name in config.drop:
        if name not in frame.columns:
            raise OptionError(f"--drop: {config.data} has no column {name!r}.")
    inputs = frame.drop(columns=[target.name, *config.drop])
    labels = target.encode(frame)
    share = 0.2 if config.test_fraction is None else config.test_fraction
    train, test = tables.hold_out(
        labels, share, config.seed, classes=bool(target.classes)
    )
    encoder = tables.Encoder.fit(
        inputs.iloc[train], categorical=config.categorical
    )
    if not target.classes:  # its units are those of the training rows
        target = tables.Target.fit(
            frame.iloc[train], config.target, "regression"
        )
        labels = target.encode(frame)[:, None]
    x = torch.from_numpy(encoder.transform(inputs))
    t = torch.from_numpy(labels)
    problem = Problem(x[train], t[train], x[test], t[test], encoder, target)
    problem.frame = inputs.iloc[train]
    problem.notes = list(encoder.notes)
    return problem


def load_points(name: str, seed: int) -> Problem:
    """Points of the plane, with two classes."""
    from hdnn.data import tables

    points = planar.load(name, seed=seed)
    plain = {
        "kind": "number",
        "gaps": False,
        "fill": 0.0,
        "center": 0.0,
        "scale": 1.0,
    }
    encoder = tables.Encoder([{"name": "x1", **plain}, {"name": "x2", **plain}])
    target = tables.Target("class", "classification", ["0", "1"])
    rows = (points.x_train, points.t_train, points.x_test, points.t_test)
    return Problem(*rows, encoder, target, plane=points)


class PlaneJob:
    """A training on points of the plane, by the recipe of the paper."""

    config: Any
    model: Any
    problem: Problem
    held_out: Any = None

    def __init__(self, config: PlaneConfig) -> None:
        chosen = {k: v for k, v in PLANAR.items() if getattr(config, k) is None}
        if config.network == "mlp":
            chosen.pop("T", None)
        device = find_device(config.device)
        self.config = replace(config, device=device, **chosen)
        self.problem = load(config)
        self.history = History()
        generator = torch.Generator().manual_seed(config.seed)
        options = {k: getattr(self.config, k) for k in NETWORK_OPTIONS}
        if options["T"] is None:
            del options["T"]
        network = BY_NAME[choose("network", config.network, BY_NAME)]
        net = network(init="paper", generator=generator, **options)
        head = SigmoidHead(net.features, generator=generator)
        self.model = Model(Augment(2, net.features), net, head)

    def fit(self, folder: Path, progress: bool) -> None:
        config = self.config
        self.model.to(config.device)
        x = self.problem.x.to(config.device)
        t = self.problem.t.to(config.device)
        if config.validation:
            from hdnn.data.tables import hold_out

            train, held = hold_out(
                t.numpy(force=True),
                config.validation,
                config.seed,
                classes=True,
            )
            self.held_out = (x[held], t[held])
            x = x[train]
            t = t[train]
        names = (*FIT_OPTIONS, "solver", "patience", "seed")
        self.history = fit(
            self.model,
            x,
            t,
            validation=self.held_out,
            folder=folder,
            resume=True,
            progress=progress,
            **{name: getattr(config, name) for name in names},
        )
        self.model.to("cpu")

    def certify(self) -> Any:
        points = self.problem.points
        where = "test points" if len(self.problem.x_test) else "training points"
        samples = MANY if self.model.net.features <= SMALL else FEW
        x = points.to(next(self.model.parameters()).dtype)
        return analysis.certify(self.model, x, samples=samples, points=where)

    def note(self) -> Any:
        """What the file of the model says about its inputs and outputs."""
        return self.problem.note()

    def metrics(self) -> dict[str, Any]:
        metrics = self.problem.scores(self.model)
        if self.held_out is not None:
            metrics["validation_rows"] = len(self.held_out[0])
            metrics["best_epoch"] = self.history.best_epoch
        return metrics

    def pictures(self, certificate: Any) -> dict[str, Any]:
        axes = {"training": plotting.training_history(self.history)}
        if self.problem.plane is not None:
            axes["decision_regions"] = plotting.decision_regions(
                self.model, self.problem.plane
            )
        if certificate.by_layer:
            axes["norms"] = certificate.plot()
        return axes


class TableJob(PlaneJob):
    """A training on a file: the same as that of the estimators, of which it keeps a run."""

    def __init__(self, config: TableConfig) -> None:
        config = replace(config, device=find_device(config.device))
        self.problem = load_table(config)
        self.estimator = estimator(config, self.problem)
        labels = self.problem.truth(self.problem.t)
        self.rows = self.estimator._begin(self.problem.frame, labels, None)
        decay = self.estimator._shrinkage(self.rows)
        self.model = self.estimator.model_
        self.history = History()
        chosen = {k: getattr(self.estimator, k) for k in NETWORK_OPTIONS}
        chosen["features"] = self.model.net.features
        if config.network == "mlp":
            chosen["T"] = None
        self.config = replace(
            config,
            data=os.path.abspath(config.data),
            task=self.problem.target.task,
            weight_decay=decay,
            **chosen,
        )

    def fit(self, folder: Path, progress: bool) -> None:
        config = self.config
        rows = self.rows
        options: dict[str, Any] = {"patience": config.patience}
        if config.solver is not None:
            options["solver"] = config.solver
        if config.validation:
            rows, self.held_out = self.estimator._hold_out(
                rows, config.validation
            )
            options["validation"] = self.held_out
        options |= {"folder": folder, "resume": True, "progress": progress}
        self.history = self.estimator._train(
            self.model, rows, config.weight_decay, **options
        )
        self.model.to("cpu")


def estimator(config: TableConfig, problem: Problem) -> Any:
    """The estimator with the options of a config."""
    from hdnn.estimators import HDNNClassifier, HDNNRegressor

    options = {}
    names = (*NETWORK_OPTIONS, *FIT_OPTIONS, "network", "categorical", "device")
    for name in names:
        value = getattr(config, name)
        if value not in (None, []):
            options[name] = value
    classes = problem.target.classes
    weights = config.weights()
    if weights is not None:
        if not classes:
            raise OptionError(
                f"{config.target} has values, not classes: no --class-weight."
            )
        if isinstance(weights, dict):
            for name in weights:
                choose("class of --class-weight", name, classes)
            weights = {classes.index(k): v for k, v in weights.items()}
        options["class_weight"] = weights
    kind = HDNNClassifier if classes else HDNNRegressor
    return kind(random_state=config.seed, **options)


# Images


def load_images(name: str) -> ImageData:
    """MNIST or CIFAR-10, from the folder that HDNN_DATA names."""
    return load_mnist() if name == "mnist" else load_cifar10()


class ImageJob:
    """A training on images, by a recipe of the paper's tables."""

    def __init__(self, config: ImageConfig) -> None:
        epochs = config.epochs or 40
        device = find_device(config.device)
        self.data = load_images(config.data)
        names = ("batch", "learning_rate", "weight_decay", "smoothness")
        chosen: dict[str, Any] = {"epochs": epochs, "seed": config.seed}
        for name in names:
            if getattr(config, name) is not None:
                chosen[name] = getattr(config, name)
        if config.images is not None:
            self.data = self.data.first(config.images)
            chosen.setdefault("batch", max(1, config.images // STEPS))
        if device == "cpu":
            chosen["bf16"] = False  # slow on most CPUs
        self.recipe = recipes.image_recipe(
            config.data, config.network, **chosen
        )
        settings = recipes.image_settings(
            config.data, config.network, epochs=epochs
        )
        if not settings and (config.layers or config.T or config.activation):
            raise OptionError(
                f"{config.network} has no Hamiltonian layers to set."
            )
        for name in ("layers", "activation"):
            if getattr(config, name) is not None:
                settings[name] = getattr(config, name)
        if config.T is not None:
            settings["step"] = config.T / settings["layers"]
        self.model = recipes.image_network(
            config.data, config.network, seed=config.seed, **settings
        )
        layers = settings.get("layers")
        self.config = replace(
            config, device=device, epochs=epochs, layers=layers
        )
        self.history = History()

    def fit(self, folder: Path, progress: bool) -> None:
        self.model.to(self.config.device)
        self.history = fit_images(
            self.model,
            self.data,
            self.recipe,
            folder=folder,
            resume=True,
            progress=progress,
        )
        self.model.to("cpu")

    def certify(self) -> Any:
        """The certificate of the Hamiltonian parts; None if there are none."""
        x = self.data.normalised(self.data.images_test[:100], torch.float32)
        try:
            return analysis.certify(
                self.model, x, points=f"test images of {self.data.name}"
            )
        except OptionError:
            return None

    def note(self) -> Any:
        """What the file of the model says about its inputs and outputs."""
        return None

    def metrics(self) -> dict[str, Any]:
        data = self.data
        scores = image_scores(self.model, data, data.images_test).double()
        common = int(torch.bincount(data.t_train.cpu()).argmax())
        truth = data.t_test.numpy(force=True)
        tested = evaluate(
            scores.softmax(1).numpy(), truth, data.classes, common
        )
        return {
            "task": "classification",
            "target": "class",
            "train_images": len(data.t_train),
            "test_images": len(data.t_test),
            "common": common,
            "train_accuracy": self.history.accuracy[-1],
            "test_accuracy": tested.pop("accuracy"),
            **tested,
        }

    def pictures(self, certificate: Any) -> dict[str, Any]:
        axes = {"training": plotting.training_history(self.history)}
        if certificate is not None:
            axes["norms"] = certificate.plot()
        return axes


JOBS: dict[type, Any] = {
    PlaneConfig: PlaneJob,
    TableConfig: TableJob,
    ImageConfig: ImageJob,
}

# Results


def draw(job: Any, certificate: Any, folder: Path) -> list[str]:
    """Write the pictures of a job as PNG files; none where matplotlib is missing."""
    try:
        require("matplotlib", extra="plot")
    except MissingExtraError:
        return []
    files = []
    for name, axes in job.pictures(certificate).items():
        content = byte_io.BytesIO()
        axes.figure.canvas.print_figure(content, format="png", dpi=120)
        io.write_atomically(folder / f"{name}.png", content.getvalue())
        files.append(f"{name}.png")
    return files


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The result of one run, or of several with mean and spread of their scores."""
    if len(results) == 1:
        return results[0]
    scores = {}
    for name in SCORES:
        values = [r[name] for r in results if r.get(name) is not None]
        if len(values) > 1:
            scores[name] = spread(values)
    return {"runs": results, "summary": scores}


def text(result: Mapping[str, Any]) -> str:
    """A result for people."""
    if "runs" in result:
        rows = {}
        for each in result["runs"]:
            scores = score_rows(each, "test_") or score_rows(each, "train_")
            rows[each["run"]] = ", ".join(map(" ".join, scores.items()))
        for name, facts in result["summary"].items():
            shown = [f"{k} {score_text(name, v)}" for k, v in facts.items()]
            rows[name.replace("_", " ")] = ", ".join(shown)
        return lines(rows)
    seconds = result["training_seconds"]
    rows = {
        "network": result["network"],
        "trained": f"{result['epochs']} epochs in {seconds:.1f} s",
    }
    if "processes" in result:
        rows["network"] += f" on {result['nodes']} nodes"
        rows["trained"] += f" by {result['processes']} processes"
        size = result["bytes"] / 2**20
        count = f"{result['messages']:,}, {size:.1f} MiB"
        rows["messages"] = f"{count}, between neighbours only"
    if result.get("best_epoch"):
        rows["held out"] = f"lowest loss in epoch {result['best_epoch']}"
    rows |= score_rows(result, "test_") or score_rows(result, "train_")
    if result.get("notes"):
        rows["note"] = f"\n{'note':<16} ".join(result["notes"])
    if result["certificate"]:
        rows["gradients"] = result["certificate"]["summary"]
    return lines({**rows, "run": result["run"]})
