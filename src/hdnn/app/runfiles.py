"""What the files of a run must hold: each file is checked when it is read.

A file that was edited or damaged is refused in one sentence that names it, and the entry.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from hdnn.base.config import BaseConfig, fits
from hdnn.base.files import parse_json, read_bytes, read_json
from hdnn.data import encoding
from hdnn.data.table import Columns
from hdnn.errors import CheckpointError, as_float, quoted
from hdnn.heads import LinearHead, RegressionHead, SigmoidHead, SoftmaxHead

PARTS = ("train", "validation", "test")  # of the rows
SCORES = [f"{part}_{name}" for part in PARTS for name in ("accuracy", "rmse", "r2")]
SAME = ("data", "seed", "layers")  # in the metrics of a run and in its config


class Certified(TypedDict):
    """What is shown of a certificate; JSON has None in place of numbers that are not finite."""

    smallest_norm: float | None
    largest_norm: float | None
    guaranteed: bool
    guarantee: str
    holds: bool | None


class Metrics(TypedDict):
    """What the results of tables and of images have in common."""

    run: str
    data: str
    network: str
    seed: int
    epochs: int
    layers: int | None
    training_seconds: float
    pictures: dict[str, str]


class TableMetrics(Metrics):
    certificate: Certified


class ImageMetrics(Metrics):
    parameters: int
    train_images: int
    test_images: int
    set: str
    remark: str | None
    epoch_seconds: float
    certificates: list[Certified]
    no_certificate_because: str | None


class GraphMetrics(TypedDict):
    parts: int
    nodes: int
    layers: int
    messages: int
    bytes: int
    data: str
    network: str
    seconds: float
    traffic: list[tuple[int, int, int, int]]


OF_KIND = {"table": TableMetrics, "images": ImageMetrics, "graph": GraphMetrics}
OF_ANY: dict[str, Any] = {**dict.fromkeys(SCORES, float | None), "no_pictures_because": str}
OF_ANY |= {"validation_rows": int, "validation_loss": float | None, "kept_epoch": int}
OF_ANY |= {"patience": int, "watched": str}
OF_OWN = {**OF_ANY, **get_type_hints(TableMetrics), **get_type_hints(ImageMetrics)}
# What graphs have besides, of which older runs lack some.
MORE = {"epochs": int, "restarts": int, "parameters": int, "training_seconds": float}
MORE |= {"certificate": Certified, "no_certificate_because": str}
OF_GRAPH = {**OF_ANY, **get_type_hints(GraphMetrics), **MORE}


def check(path: Path, given: Any, kinds: dict[str, Any], *, needed: bool) -> None:
    """Refuse a file with an entry of another type, or without one that is needed."""
    if not isinstance(given, dict):
        raise CheckpointError(f"{path} is damaged or was edited: it holds no entries by name.")
    for name, kind in kinds.items():
        if needed and name not in given:
            raise CheckpointError(f"{path} is damaged or was edited: it has no {name}.")
        if name in given and not fits(given[name], kind):
            raise _impossible(path, name, given[name])


def _impossible(path: Path, name: str, value: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged or was edited: its {name} cannot be {quoted(value)}."
    )


def read_columns(path: Path) -> Columns:
    """How rows of a table become inputs."""
    given = read_json(path)
    kinds = get_type_hints(Columns)
    learned = {"encoding": kinds.pop("encoding")}  # which earlier versions did not write
    check(path, given, kinds, needed=True)
    check(path, given, learned, needed=False)
    names, classes = given["names"], given["classes"]
    lengths = {len(given[name]) for name in ("names", "mean", "scale")}
    many = {"classification": len(set(classes)) >= 2, "regression": not classes}
    right = {
        "task": given["task"] in many,
        "scale": all(scale > 0 for scale in given["scale"]),
        "target_scale": given["target_scale"] > 0,
        "encoding": all(map(encoding.is_possible, given.get("encoding", []))),
    }
    for name, is_right in right.items():
        if not is_right:
            raise _impossible(path, name, given[name])
    if len(lengths) != 1 or not names or not many[given["task"]]:
        raise CheckpointError(f"{path} is damaged or was edited: its lists do not fit together.")
    if len(set(names)) != len(names) or len(set(classes)) != len(classes):
        raise CheckpointError(f"{path} is damaged or was edited: it has a name twice.")
    return Columns.from_json(given, path)


def check_columns(path: Path, columns: Columns, inputs: int, head: LinearHead, known: Any) -> None:
    """Refuse columns that are not those of the model, if it has their fingerprint."""
    classes = len(columns.classes)
    fits = {
        RegressionHead: not classes,
        SigmoidHead: classes == 2,
        SoftmaxHead: classes == head.outputs,
    }
    if len(columns.names) != inputs or not fits.get(type(head), False):
        raise CheckpointError(
            f"{path} and the model of this run do not fit together: it has {len(columns.names)} "
            f"columns and {classes} classes, but the model {inputs} inputs and "
            f"{head.outputs} outputs."
        )
    if known is not None and known != columns.digest():
        raise CheckpointError(
            f"{path} is not the one that the model of this run was trained with: it was edited, or "
            "is of another run; put the old one back."
        )


def read_metrics(path: Path, kind: str | None) -> dict[str, Any]:
    """The results of a run of this kind; entries may be missing, but none has a wrong type."""
    metrics = read_json(path)
    check(path, metrics, OF_GRAPH if kind == "graph" else OF_OWN, needed=False)
    return metrics


def check_complete(path: Path, metrics: dict[str, Any], config: BaseConfig) -> None:
    """Refuse metrics that lack something, or that are of another run than the config."""
    check(path, metrics, get_type_hints(OF_KIND[config.kind]), needed=True)
    for name in SAME:
        if name in metrics and metrics[name] != getattr(config, name):
            raise CheckpointError(
                f"{path} is of another run: its {name} is {quoted(metrics[name])}, not "
                f"{quoted(getattr(config, name))}."
            )


def read_log(path: Path, counted: str = "epoch") -> tuple[list[dict[str, Any]], int]:
    """The entries of a log, and the number of invalid lines but for a last one that was cut off."""
    content = read_bytes(path)
    entries, wrong = [], 0
    lines = content.decode("utf-8", errors="replace").splitlines()
    for k, line in enumerate(lines):
        try:
            entry = parse_json(line)
            if not (fits(entry, dict[str, Any]) and type(entry[counted]) is int):
                raise ValueError(line)
            # Any number will do: a gradient that is not finite is logged too.
            if not all(value is None or as_float(value) is not None for value in entry.values()):
                raise ValueError(line)
            entries.append(entry)
        except (ValueError, KeyError):
            wrong += k < len(lines) - 1 or content.endswith(b"\n")
    return entries, wrong
