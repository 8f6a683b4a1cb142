"""What the files of a run must hold: each file is checked when it is read.

A file that was edited or damaged is refused in one sentence that names it, and the entry.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hdnn.base.config import BaseConfig
from hdnn.base.files import parse_json, read_bytes, read_json
from hdnn.data.table import Columns
from hdnn.errors import CheckpointError, as_float, quoted
from hdnn.heads import LinearHead, RegressionHead, SigmoidHead, SoftmaxHead

Kind = Callable[[Any], bool]


def text(value: Any) -> bool:
    return isinstance(value, str)


def whole(value: Any) -> bool:
    return type(value) is int


def number(value: Any) -> bool:
    found = as_float(value)
    return found is not None and math.isfinite(found)


def truth(value: Any) -> bool:
    return isinstance(value, bool)


def table(value: Any) -> bool:
    return isinstance(value, dict)


def maybe(kind: Kind) -> Kind:
    """Allow None too, which JSON has in place of numbers that are not finite."""
    return lambda value: value is None or kind(value)


def each(kind: Kind) -> Kind:
    """A list of such values."""
    return lambda value: isinstance(value, list) and all(map(kind, value))


def record(kinds: dict[str, Kind]) -> Kind:
    """An object that has all of these entries."""
    return lambda value: table(value) and all(k in value and kinds[k](value[k]) for k in kinds)


def named(kind: Kind) -> Kind:
    """An object of any names."""
    return lambda value: table(value) and all(map(kind, value.values()))


COLUMNS: dict[str, Kind] = {
    "task": lambda value: value in ("classification", "regression"),
    "target": text,
    "names": each(text),
    "mean": each(number),
    "scale": each(lambda value: number(value) and value > 0),
    "classes": each(text),
    "target_mean": number,
    "target_scale": lambda value: number(value) and value > 0,
}
CERTIFICATE = record(
    {
        "smallest_norm": maybe(number),
        "largest_norm": maybe(number),
        "guaranteed": truth,
        "guarantee": text,
        "holds": maybe(truth),
    }
)
SCORES = [f"{part}_{name}" for part in ("train", "test") for name in ("accuracy", "rmse", "r2")]
METRICS: dict[str, Kind] = {
    "run": text,
    "data": text,
    "network": text,
    "seed": whole,
    "epochs": whole,
    "layers": maybe(whole),
    "training_seconds": number,
    "pictures": named(text),
}
OF_TABLES: dict[str, Kind] = {"certificate": CERTIFICATE}
OF_IMAGES: dict[str, Kind] = {
    **dict.fromkeys(("parameters", "train_images", "test_images"), whole),
    "set": text,
    "remark": maybe(text),
    "epoch_seconds": number,
    "certificates": each(CERTIFICATE),
    "no_certificate_because": maybe(text),
}
OF_KIND = {"table": OF_TABLES, "images": OF_IMAGES}
OTHERS: dict[str, Kind] = {**dict.fromkeys(SCORES, maybe(number)), "no_pictures_because": text}
OF_GRAPHS: dict[str, Kind] = {
    **dict.fromkeys(("parts", "nodes", "layers", "messages", "bytes"), whole),
    **dict.fromkeys(("data", "network"), text),
    "seconds": number,
    "traffic": each(lambda row: each(whole)(row) and len(row) == 4),
}
OF_SOME_GRAPHS: dict[str, Kind] = {**OTHERS, "epochs": whole, "restarts": whole}
SAME = ("data", "seed", "layers")  # in the metrics of a run and in its config


def check(path: Path, given: Any, needed: dict[str, Kind], others: dict[str, Kind]) -> None:
    """Refuse a file without an entry that is needed, or with one of another kind."""
    if not table(given):
        raise CheckpointError(f"{path} is damaged or was edited: it holds no entries by name.")
    for name in (*needed, *others):
        if name in needed and name not in given:
            raise CheckpointError(f"{path} is damaged or was edited: it has no {name}.")
        if name in given and not (needed.get(name) or others[name])(given[name]):
            raise CheckpointError(
                f"{path} is damaged or was edited: its {name} cannot be {quoted(given[name])}."
            )


def read_columns(path: Path) -> Columns:
    """How rows of a table become inputs."""
    given = read_json(path)
    check(path, given, COLUMNS, {})
    names, classes = given["names"], given["classes"]
    lengths = {len(given[name]) for name in ("names", "mean", "scale")}
    many = len(set(classes)) >= 2 if given["task"] == "classification" else not classes
    if len(lengths) != 1 or not names or not many:
        raise CheckpointError(f"{path} is damaged or was edited: its lists do not fit together.")
    if len(set(names)) != len(names) or len(set(classes)) != len(classes):
        raise CheckpointError(f"{path} is damaged or was edited: it has a name twice.")
    return Columns.from_json(given, path)


def fingerprint(columns: Columns) -> str:
    """A digest by which a model recognises the columns that it was trained on."""
    return hashlib.sha256(json.dumps(columns.to_json(), sort_keys=True).encode()).hexdigest()


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
    if known is not None and known != fingerprint(columns):
        raise CheckpointError(
            f"{path} is not the one that the model of this run was trained with: it was edited, or "
            "is of another run; put the old one back."
        )


def read_metrics(path: Path) -> dict[str, Any]:
    """The results of a run; entries may be missing, but none has a wrong type."""
    metrics = read_json(path)
    check(path, metrics, {}, {**METRICS, **OF_TABLES, **OF_IMAGES, **OTHERS})
    return metrics


def check_complete(path: Path, metrics: dict[str, Any], config: BaseConfig) -> None:
    """Refuse metrics that lack something, or that are of another run than the config."""
    check(path, metrics, {**METRICS, **OF_KIND[config.kind]}, {})
    for name in SAME:
        if metrics[name] != getattr(config, name):
            raise CheckpointError(
                f"{path} is of another run: its {name} is {quoted(metrics[name])}, not "
                f"{quoted(getattr(config, name))}."
            )


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The entries of a log, and the number of invalid lines but for a last one that was cut off."""
    content = read_bytes(path)
    entries, wrong = [], 0
    lines = content.decode("utf-8", errors="replace").splitlines()
    for k, line in enumerate(lines):
        try:
            entry = parse_json(line)
            if not (named(_logged)(entry) and whole(entry["epoch"])):
                raise ValueError(line)
            entries.append(entry)
        except (ValueError, KeyError):
            wrong += k < len(lines) - 1 or content.endswith(b"\n")
    return entries, wrong


def _logged(value: Any) -> bool:
    """Any number: a gradient that is not finite is logged too."""
    return value is None or as_float(value) is not None
