"""Answers of trained models, and scores, which are always shown with a simple baseline."""

from __future__ import annotations

import csv
import io as text_io
import os
import re
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from hdnn import analysis, io
from hdnn.app import train
from hdnn.app.config import IMAGE_SETS, PLANAR_SETS
from hdnn.app.runs import Run
from hdnn.app.scores import evaluate, lines, outputs, score_rows
from hdnn.data import planar, tables
from hdnn.data.tables import Target
from hdnn.errors import DataError, OptionError

# A spreadsheet would run a text with such a first character; some countries use full-width signs.
FORMULA = tuple("=+-@＝＋－＠")  # noqa: RUF001
CONTROL = tuple("\t\r\n")
NUMBER = r"[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?"
ANSWERS = ("predictions", "probabilities")


# Prediction


def predict(folder: str, data: str, *, proba: bool = False) -> dict[str, Any]:
    """The predictions of a run for data, with scores if the truth is known."""
    run = Run(folder)
    answers, truth, target = _answers(run, data)
    if proba and not target.classes:
        raise OptionError(
            "the run predicts values, which have no probabilities."
        )
    result = {"rows": len(answers), "target": target.name}
    if target.classes:
        labels = answers.argmax(1)
        result["predictions"] = [target.classes[label] for label in labels]
    else:
        result["predictions"] = answers.tolist()
    if proba:
        chances = answers.T.tolist()
        result["probabilities"] = dict(
            zip(target.classes, chances, strict=True)
        )
    if truth is not None:
        common = run.metrics()["common"]
        result |= evaluate(answers, truth, target.classes, common)
    return result


def _answers(run: Run, data: str) -> tuple[np.ndarray, np.ndarray | None, Any]:
    """The outputs of one run in units of the target, the truth if known, and the target."""
    model = run.model()
    options = run.options()
    if options["data"] in IMAGE_SETS:
        if data not in IMAGE_SETS:
            raise OptionError(
                f"the run was trained on images; pass mnist or cifar10, not {data}."
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
    with suppress(
        DataError
    ):  # no such column, or a column with gaps or other classes
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
    return tables.pd.DataFrame({"x1": x1, "x2": x2, "class": labels})


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """A result without its long lists."""
    return {k: value for k, value in result.items() if k not in ANSWERS}


def text(result: dict[str, Any]) -> str:
    """The result as text."""
    target = result["target"]
    first = f"{result['rows']} predictions of {target} in {result['out']}"
    return f"{first}\n{lines(score_rows(result))}".rstrip()


def csv_text(result: dict[str, Any]) -> str:
    """A CSV table with a row for each prediction."""
    target = result["target"]
    columns = {target: result["predictions"]}
    for name, chances in result.get("probabilities", {}).items():
        columns[f"p({name})"] = chances
    file = text_io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    rows = [columns, *zip(*columns.values(), strict=True)]
    for row in rows:
        cells = [_safe(cell) for cell in row]
        writer.writerow(cells)
    return file.getvalue()


def _safe(cell: Any) -> Any:
    """A text that a spreadsheet reads as text, even if it looks like a formula."""
    if not isinstance(cell, str) or re.fullmatch(NUMBER, cell):
        return cell  # a number such as -3.5 is harmless
    cell = cell.replace("\r", "\n")  # the writer quotes this one only
    risky = cell.strip().startswith(FORMULA) or cell.startswith(CONTROL)
    return f"'{cell}" if risky else cell


# Certificates


def certify(place: str, data: str | None, *, samples: int) -> Any:
    """The certificate of a run or a saved model, at named points or at its own test points."""
    run = None if os.path.isfile(place) else Run(place)
    model = io.load(place) if run is None else run.model()
    source = data
    if run is not None and data is None:
        source = run.options()["data"]
    if source is None or os.path.isdir(source):
        return analysis.certify(model, samples=samples)
    if run is not None and data is None and source not in IMAGE_SETS:
        x = train.load(run.config(), run.columns()[0]).points
        where = "test points"
    else:
        x = inputs(run, source, samples)
        where = f"rows of {source}"
    if x is not None:
        x = x.to(next(model.parameters()).dtype)
    return analysis.certify(model, x, samples=samples, points=where)


def inputs(run: Run | None, data: str, samples: int) -> torch.Tensor:
    """Images, or table rows encoded by a run; without a run, the numbers in the rows."""
    if data in IMAGE_SETS:
        images = train.load_images(data)
        return images.normalised(images.images_test[:samples], torch.float32)
    if run is not None:
        frame = read_rows(data, run.options().get("seed", 0))
        encoder, _ = run.columns()
        return torch.from_numpy(encoder.transform(frame))
    frame = read_rows(data, 0).select_dtypes("number")
    frame = frame.drop(columns="class", errors="ignore")
    return torch.from_numpy(frame.to_numpy("float64", copy=True))
