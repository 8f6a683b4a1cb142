"""One HTML page of runs, without external files: scores, tables, pictures and certificates."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdnn import __version__
from hdnn.app.runs import Run, find_runs
from hdnn.app.scores import score_rows, score_text
from hdnn.errors import HDNNError, require

MARK = "<!-- a report of hdnn -->"
TESTED = ("test_accuracy", "test_r2", "test_rmse")
PICTURES = {
    "decision_regions": "Decision regions and test points.",
    "training": "Training, epoch by epoch.",
    "norms": "Norm of dy_N/dy_j over the layers: below 1, a gradient shrinks in every direction.",
    "contrast": "H2 and a perceptron of the same depth, whose gradients vanish.",
}


def is_report(path: str | Path) -> bool:
    """True for a page that `hdnn report` wrote."""
    try:
        with open(path, encoding="utf-8") as file:
            return MARK in file.read(200)
    except (OSError, ValueError):
        return False


def page(folders: Sequence[str]) -> tuple[str, int]:
    """The page of all runs in these folders, and their number."""
    jinja2 = require("jinja2", extra="cli")
    runs = [RunOnPage(run) for run in find_runs(folders)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["score"] = score_text
    text = environment.get_template("report.html.jinja").render(
        mark=MARK,
        version=__version__,
        runs=runs,
        differing=differing([run.options for run in runs]),
    )
    return text, len(runs)


class RunOnPage:
    """The part of the page about one run; a damaged file becomes a message."""

    def __init__(self, run: Run) -> None:
        self.name = str(run.folder)
        self.options: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.fault = "" if run.complete else "This run has not ended."
        try:
            self.options = run.options()
            if run.complete:
                self.metrics = run.metrics()
        except HDNNError as error:
            self.fault = str(error)
        self.pictures = {}
        for path in sorted(run.folder.glob("*.png")):
            caption = PICTURES.get(path.stem, path.stem)
            content = base64.b64encode(path.read_bytes())
            self.pictures[caption] = content.decode()
        certificate = self.metrics.get("certificate")
        self.certificate: dict[str, Any] = certificate or {}
        measures = [k for k in TESTED if self.metrics.get(k) is not None]
        self.measure = measures[0] if measures else ""
        rows = score_rows(self.metrics)
        names = ("never predicted", "try")
        self.warnings = {k: rows[k] for k in names if k in rows}

    @property
    def score(self) -> str:
        """The score on test rows by which runs are compared."""
        name = self.measure
        if not name:
            return ""
        return score_text(name, self.metrics[name])

    @property
    def baseline(self) -> str:
        """The same score for always answering the most frequent class, or the mean."""
        name = self.measure.replace("test", "baseline")
        value = 0.0 if name == "baseline_r2" else self.metrics.get(name)
        return "" if value is None else score_text(name, value)


def differing(options: Sequence[dict[str, Any]]) -> list[str]:
    """The options in which runs differ."""
    seen: dict[str, set[str]] = {}
    for values in options:
        for name in values:
            seen[name] = {str(each.get(name, "")) for each in options}
    return [name for name, texts in seen.items() if len(texts) > 1]
