"""Answers of trained models, and scores: never alone, but beside what is easy to reach."""

from __future__ import annotations

import csv
import io as text_io
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from hdnn import analysis, io
from hdnn.app import train
from hdnn.app.config import IMAGE_SETS, PLANAR_SETS
from hdnn.app.runs import Run, members
from hdnn.app.scores import evaluate, lines, outputs, score_rows
from hdnn.data import planar, tables
from hdnn.data.tables import Target
from hdnn.errors import CheckpointError, DataError, OptionError
from hdnn.progress import CLEAR

# A spreadsheet would run a text that begins so; in some countries the signs are full-width.
FORMULA = tuple("=+-@＝＋－＠")  # noqa: RUF001
CONTROL = tuple("\t\r\n")
NUMBER = r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?"
ANSWERS = ("predictions", "probabilities", "agreement", "spread")


# Prediction


def run(folder: str, data: str, *, proba: bool = False) -> dict[str, Any]:
    """Predictions of a run for data; of several seeds, their mean and how far they agree."""
    runs = members(folder)
    answers = []
    for member in runs:
        member.check_complete()
        answers.append(_answers(member, data))
    _, truth, target = answers[0]
    if any(other.classes != target.classes for _, _, other in answers):
        raise CheckpointError(
            f"the runs in {folder} predict different classes; they have no mean."
        )
    if proba and not target.classes:
        raise OptionError(
            "the run predicts values, which have no probabilities."
        )
    each = np.stack([answer for answer, _, _ in answers])
    mean = each.mean(0)
    result = {"rows": len(mean), "target": target.name}
    if target.classes:
        labels = mean.argmax(1)
        result["predictions"] = [target.classes[label] for label in labels]
    else:
        result["predictions"] = mean.tolist()
    if len(runs) > 1:
        result["runs"] = len(runs)
        result |= _agreement(each, mean)
    if proba:
        chances = mean.T.tolist()
        result["probabilities"] = dict(
            zip(target.classes, chances, strict=True)
        )
    if truth is not None:
        common = runs[0].metrics()["common"]
        result |= evaluate(mean, truth, target.classes, common)
    return result


def _agreement(each: np.ndarray, mean: np.ndarray) -> dict[str, list[float]]:
    """The share of runs with the same class as their mean, or the spread of their values."""
    if mean.ndim > 1:
        alike = each.argmax(2) == mean.argmax(1)
        return {"agreement": alike.mean(0).tolist()}
    return {"spread": each.std(0, ddof=1).tolist()}


def _answers(run: Run, data: str) -> tuple[np.ndarray, np.ndarray | None, Any]:
    """Outputs of one run in units of the target, the truth if it is known, and the target."""
    model = run.model()
    options = run.options()
    if options["data"] in IMAGE_SETS:
        if data not in IMAGE_SETS:
            raise OptionError(
                f"the run is about images; give mnist or cifar10, not {data}."
            )
        images = train.load_images(data)
        x = images.normalised(images.images_test, torch.float32)
        target = Target("class", "classification", list(images.classes))
        return outputs(model, x), images.t_test.numpy(), target
    encoder, target = run.columns()
    frame = read_rows(data, options.get("seed", 0))
    x = torch.from_numpy(encoder.transform(frame))
    answers = outputs(model, x)
    truth = None
    with suppress(DataError):  # no such column, or it has gaps or other classes
        truth = target.encode(frame)
    if not target.classes:
        answers = target.decode(answers)
        truth = None if truth is None else target.decode(truth)
    return answers, truth, target


def read_rows(data: str, seed: int) -> Any:
    """The rows of a file, or the test points of a planar set, as a data frame."""
    if data not in PLANAR_SETS:
        return tables.read(data)
    points = planar.load(data, seed=seed)
    x1, x2 = points.x_test.double().numpy().T
    labels = points.t_test.numpy()
    return tables.pd.DataFrame(
        {
            "x1": x1,
            "x2": x2,
            "class": labels,
        }
    )


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """A result without its long lists."""
    return {k: value for k, value in result.items() if k not in ANSWERS}


def text(result: dict[str, Any]) -> str:
    """Lines for people."""
    by = f" by {result['runs']} runs together" if "runs" in result else ""
    first = f"{result['rows']} predictions of {result['target']}{by} in {result['out']}"
    return f"{first}\n{lines(score_rows(result))}".rstrip()


def csv_text(result: dict[str, Any]) -> str:
    """A CSV table with a row for each prediction."""
    target = result["target"]
    columns = {target: result["predictions"]}
    if "agreement" in result:
        columns[f"agreement({target})"] = result["agreement"]
    if "spread" in result:
        columns[f"std({target})"] = result["spread"]
    for name, chances in result.get("probabilities", {}).items():
        columns[f"p({name})"] = chances
    file = text_io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for row in (columns, *zip(*columns.values(), strict=True)):
        writer.writerow(map(_safe, row))
    return file.getvalue()


def _safe(cell: Any) -> Any:
    """A text that a spreadsheet takes as text, also where it looks like a formula."""
    if not isinstance(cell, str) or re.fullmatch(NUMBER, cell):
        return cell  # a number such as -3.5 is harmless
    cell = cell.replace("\r", "\n")  # the writer quotes this one only
    risky = cell.strip().startswith(FORMULA) or cell.startswith(CONTROL)
    return f"'{cell}" if risky else cell


# Certificates


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Show on a terminal that work goes on, and for how long, from the second second on."""
    done = threading.Event()

    def tick() -> None:
        start = time.monotonic()
        while not done.wait(1.0):
            seconds = time.monotonic() - start
            sys.stderr.write(f"{CLEAR}{label}, {seconds:.0f} s")
            sys.stderr.flush()
        sys.stderr.write(CLEAR)

    if not sys.stderr.isatty():
        yield
        return
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def certify(place: str, data: str | None, *, samples: int) -> Any:
    """The certificate of a run or a saved model: at named points, else at its own test points."""
    run = None if os.path.isfile(place) else members(place)[0]
    model = io.load(place) if run is None else run.model()
    source = data
    if run is not None and data is None:
        source = run.options()["data"]
    if source is None or os.path.isdir(source):
        return analysis.certify(model, samples=samples)
    where = f"rows of {source}"
    if source in IMAGE_SETS:
        images = train.load_images(source)
        x = images.normalised(images.images_test[:samples], torch.float32)
        where = f"test images of {source}"
    elif run is not None and data is None:
        rows = train.load(run.config())
        if source not in PLANAR_SETS:
            rows.project(run.columns()[0].directions)
        x = rows.points
        where = "test points"
    elif run is not None:
        frame = read_rows(source, run.options().get("seed", 0))
        encoder, _ = run.columns()
        x = torch.from_numpy(encoder.transform(frame))
    else:
        frame = read_rows(source, 0).select_dtypes("number")
        frame = frame.drop(columns="class", errors="ignore")
        x = torch.from_numpy(frame.to_numpy("float64", copy=True))
    if x is not None:
        x = x.to(next(model.parameters()).dtype)
    return analysis.certify(model, x, samples=samples, points=where)
