"""One run as the page shows it: files may hold anything, and what cannot be read is reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

from hdnn.analysis.words import at_least_text
from hdnn.app import reproduced, results
from hdnn.app.onpage.certificate import certificates
from hdnn.app.onpage.command import command
from hdnn.app.onpage.predictions import Predictions
from hdnn.app.onpage.values import NONE, counted, listed, number, score, text
from hdnn.app.reproduced import Picture
from hdnn.app.runs import Run
from hdnn.app.svg_curves import BLUE, GREEN, RED, Curve, Line, curve
from hdnn.errors import HDNNError

MOST, LETTERS = 8, 90  # classes that are named, and letters of their names
PARTS = {"test": "test", "validation": "held out", "train": "trained on"}
MEASURES = {"accuracy": "accuracy", "r2": "R²", "rmse": "RMSE"}


class RunOnPage:
    """The results of a run so far; `anchor` is its place on the page."""

    def __init__(self, run: Run, anchor: str = "", short: str = "") -> None:
        self.run = run
        self.anchor = anchor
        self.name, self.short = str(run.folder), short
        self.faults: list[str] = []
        self.config: str = self._read(run.config_text, "")
        self.options: dict[str, Any] = self._read(run.options, {})
        self.log, wrong = self._read(run.log_and_faults, ([], 0))
        if wrong:
            self.faults.append(f"{run.log_file} has {wrong} lines that hdnn did not write.")
        self.metrics: dict[str, Any] = self._read(run.metrics, {}) if run.complete else {}
        self.command = "" if self.faults else self._read(lambda: command(run, self.metrics), "")
        self.certificates = certificates(self.metrics)
        self.predictions = Predictions(self.metrics)
        self.what = "image" if "train_images" in self.metrics else "row"

    def _read(self, make: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return make()
        except (HDNNError, OSError) as error:
            self.faults.append(str(error))
            return otherwise

    @property
    def note(self) -> str:
        if self.faults:
            return f"damaged: {' '.join(self.faults)}"
        return "" if self.run.complete else "not complete"

    # What it is

    @property
    def data(self) -> str:
        return Path(str(self.options.get("data") or self.metrics.get("data") or "")).name

    @property
    def target(self) -> str:
        return text(self.metrics.get("target") or self.options.get("target"))

    @property
    def task(self) -> str:
        """What it predicts, from what, in a sentence."""
        kind = self.metrics.get("task") or self.options.get("task")
        classes = number(self.predictions.given.get("classes"))
        what = f"“{self.target}”, " if self.target else ""
        if classes:
            what += f"one of {classes:g} classes ({self._classes()}),"
        else:
            what += "a number," if kind == "regression" else "a class,"
        columns, inputs = (number(self.metrics.get(name)) for name in ("columns", "inputs"))
        source = self.data
        if inputs:
            source = f"{counted(columns or inputs, 'column')} of {self.data}"
        if columns and inputs != columns:
            source += f" ({inputs:g} inputs)"
        return f"Predicts {what} from {source}." if source else ""

    def _classes(self) -> str:
        names = [text(one.get("class")) for one in self.predictions.classes]
        shown = ", ".join(names)
        if len(names) <= MOST and len(shown) <= LETTERS:
            return shown
        return f"{shorten(', '.join(names[:MOST]), LETTERS, placeholder='')}, ..."

    @property
    def about(self) -> str:
        """The network, and how much data there was."""
        if not self.metrics:
            return ""
        train, test = (_count(self.metrics, part, self.what) for part in ("train", "test"))
        network = self.metrics.get("network", "")
        rows = f"; {train} training {self.what}s, {test} test {self.what}s" if train else ""
        return f"{network}{rows}{self._trained()}"

    def _trained(self) -> str:
        epochs, seconds = (self.metrics.get(name) for name in ("epochs", "training_seconds"))
        if number(epochs) is None:
            return ""
        took = "" if number(seconds) is None else f" in {text(seconds)} s"
        kept = number(self.metrics.get("kept_epoch"))
        which = (
            f", of which the model of epoch {kept:g} was kept" if kept not in (None, epochs) else ""
        )
        return f"; trained for {counted(epochs, 'epoch')}{took}{which}"

    @property
    def notes(self) -> list[str]:
        """What became of the columns, if there is something to know."""
        return [str(note) for note in listed(self.metrics, "notes")]

    # How good it is

    @property
    def test(self) -> str:
        return score(self.metrics, "test")

    @property
    def headline(self) -> tuple[str, str] | None:
        """The score on the test rows, or without such rows on others, and what it is."""
        for part, word in PARTS.items():
            found = score(self.metrics, part)
            if not found:
                continue
            rows = _count(self.metrics, part, self.what)
            where = " ".join(filter(None, (rows, word.replace(" ", "-"), f"{self.what}s")))
            if part == "train":
                where = f"the {self.what}s trained on"
            means = f"of {where} predicted right"
            if f"{part}_accuracy" not in self.metrics:
                means = f"on {where} (1 is perfect, 0 is no better than the mean)"
                means = means if "R²" in found else f"on {where}, in units of the target"
            return found, means
        return None

    @property
    def scores(self) -> list[list[str]]:
        """A row for each part of the data, after the names of the measures."""
        names = [name for name in MEASURES if any(f"{p}_{name}" in self.metrics for p in PARTS)]
        rows = []
        for part, word in PARTS.items():
            values = [self.metrics.get(f"{part}_{name}") for name in names]
            if any(value is not None for value in values):
                shown = (
                    NONE if value is None else results.measure_text(name, value)
                    for name, value in zip(names, values, strict=True)
                )
                rows.append([word, _count(self.metrics, part, self.what) or NONE, *shown])
        return [["", f"{self.what}s", *(MEASURES[name] for name in names)], *rows]

    # How it was trained

    @property
    def flattering(self) -> str:
        """A warning where the training curves look better than the model is."""
        if self.options.get("solver") not in ("newton", "adam"):
            return ""
        return (
            " The output layer has just been fitted to each minibatch, so that this is lower than "
            "on all rows."
        )

    @property
    def best_epoch(self) -> float | None:
        """Of the lowest held-out loss, if rows were held out."""
        losses = self._logged("validation_loss")
        kept = [
            (loss, epoch)
            for epoch, loss in zip(self.epochs, losses, strict=False)
            if loss is not None
        ]
        return min(kept)[1] if kept else None

    @property
    def epochs(self) -> list[float]:
        found = [epoch for epoch in self._logged("epoch") if epoch is not None]
        return found if len(found) == len(self.log) else []

    @property
    def loss(self) -> Curve | None:
        """The loss against the epoch, on the rows trained on and on those held out."""
        return self._curve(
            [
                ("loss", self._logged("loss"), BLUE, ""),
                ("loss on held-out rows", self._logged("validation_loss"), RED, "6 4"),
            ],
            upright=self.best_epoch,
        )

    @property
    def wrong(self) -> Curve | None:
        """The fraction of wrong labels after each epoch."""
        held_out = _complements(self._logged("validation_score"))
        if not self._any("accuracy"):
            held_out = []
        return self._curve(
            [
                ("fraction of wrong labels", _complements(self._logged("accuracy")), BLUE, ""),
                ("the same on held-out rows", held_out, RED, "6 4"),
                (
                    "the same on test images",
                    _complements(self._logged("test_accuracy")),
                    GREEN,
                    "8 3 2 3",
                ),
            ],
            upright=self.best_epoch,
            linear=True,
        )

    @property
    def held_out(self) -> Curve | None:
        """R^2 on the held-out rows, where values are predicted."""
        if self._any("accuracy"):
            return None
        return self._curve(
            [("R² on held-out rows", self._logged("validation_score"), RED, "6 4")],
            upright=self.best_epoch,
        )

    def _curve(
        self,
        given: list[tuple[str, list[float | None], str, str]],
        *,
        upright: float | None,
        linear: bool = False,
    ) -> Curve | None:
        lines = [
            Line(name, self.epochs, values, colour, dash)
            for name, values, colour, dash in given
            if any(value is not None for value in values)
        ]
        if not self.epochs or not lines:
            return None
        inside = upright is not None and self.epochs[0] <= upright <= self.epochs[-1]
        return curve(lines, "epoch", upright=upright if inside else None, linear=linear)

    def _logged(self, name: str) -> list[float | None]:
        return [number(one.get(name)) for one in self.log]

    def _any(self, name: str) -> bool:
        return any(value is not None for value in self._logged(name))

    @property
    def picture(self) -> Picture | None:
        """The decision regions; the other pictures of a run show what the curves show."""
        file = self.run.folder / "decision_regions.png"
        return reproduced.picture(
            file,
            "Decision regions of the network, with test points",
            "Test points on the predicted classes.",
        )

    @property
    def no_certificate_because(self) -> str:
        return str(self.metrics.get("no_certificate_because") or "")

    @property
    def smallest(self) -> str:
        """The smallest norm, for the table of all runs."""
        norms = [one.smallest for one in self.certificates if one.smallest is not None]
        least = at_least_text(min(norms), 4) if norms else text(None)
        return f"{least} (linear)" if any(one.linear for one in self.certificates) else least


def _complements(fractions: list[float | None]) -> list[float | None]:
    return [None if value is None else 1 - value for value in fractions]


def _count(metrics: dict[str, Any], part: str, what: str) -> str:
    return text(metrics.get(f"{part}_{what}s"))
