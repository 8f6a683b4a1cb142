"""How good the predictions of a run are, as the page shows it.

All comes from the `evaluation` in the metrics of a run, which runs of older versions lack.
"""

from __future__ import annotations

import math
from typing import Any

from hdnn.app.onpage.values import (
    counted,
    dicts,
    entry,
    interval,
    listed,
    number,
    percent,
    text,
)
from hdnn.app.svg_charts import Chart, histogram, with_diagonal

PARTS = {"train": "training", "validation": "held-out"}
MOST = 60  # classes in the table, those with most rows
SHORT = 20  # letters of a name that fits beside an axis
FEW, LETTERS = 10, 60  # classes, and letters of their names, that fit above a table
DEEPEST = 45  # per cent of colour in a cell of the confusion matrix


class Predictions:
    """What was found on the test rows, or without such rows on those trained on."""

    def __init__(self, metrics: dict[str, Any]) -> None:
        self.given = entry(metrics, "evaluation")
        self.what = "image" if "train_images" in metrics else "row"
        self.target = text(metrics.get("target"))
        part = str(self.given.get("part"))
        self.tested = part != "train"
        word = PARTS.get(part, "test")
        self.rows = counted(self.given.get("rows"), f"{word} {self.what}")
        self.classes = dicts(self.given, "by_class")

    def __bool__(self) -> bool:
        return bool(self.given)

    # Classes

    @property
    def baseline(self) -> str:
        """What the score means: its spread over other rows, and what no model at all would get."""
        right, rows = number(self.given.get("accuracy")), number(self.given.get("rows"))
        found = []
        if right is not None and 0 <= right <= 1 and rows is not None and rows > 0 and self.tested:
            low, high = interval(right, rows)
            others = f"Other {self.what}s of the same kind would give"
            digits = 2 if high > 0.99 else 1
            low, high = percent(low, digits), percent(high, digits)
            found.append(f"{others} {low} to {high} (95% interval).")
        usual = entry(self.given, "usual")
        if number(usual.get("accuracy")) is not None:
            always = f"Always saying “{text(usual.get('class'))}”"
            found.append(f"{always} would be right in {percent(usual['accuracy'])}.")
        return " ".join(found)

    @property
    def scores(self) -> list[tuple[str, str, str]]:
        """Names, values and meanings of further scores."""
        many = number(self.given.get("classes"))
        known = [
            ("balanced_accuracy", "balanced accuracy", "mean recall, each class counting alike"),
            ("macro_f1", "mean F1", "each class counting alike"),
            ("log_loss", "log loss", _log_loss_text(many)),
            ("brier", "Brier score", "squared error of the probabilities; 0 is best"),
        ]
        told = [
            (name, percent(self.given[key]) if key == "balanced_accuracy" else value, meaning)
            for key, name, meaning in known
            if (value := text(number(self.given.get(key))))
        ]
        error = number(entry(self.given, "calibration").get("error"))
        if error is not None:
            told.append(("calibration error (ECE)", percent(error), "see the picture; 0 is best"))
        known = [
            (
                "rmse",
                "root mean square error (RMSE)",
                "in units of the target; large errors count more",
            ),
            ("mae", "mean absolute error", "in units of the target"),
        ]
        told += [
            (name, value, meaning)
            for key, name, meaning in known
            if not self.classes and (value := text(number(self.given.get(key))))
        ]
        return told

    @property
    def by_class(self) -> list[list[str]]:
        """The table of classes: precision, recall, F1 and rows."""
        shown = self.classes
        if len(shown) > MOST:
            shown = sorted(shown, key=lambda one: -(number(one.get("rows")) or 0))[:MOST]
        measures = ("precision", "recall", "f1")
        return [
            [
                text(one.get("class")),
                *(percent(one.get(name)) for name in measures),
                *(text(one.get(name)) for name in ("rows", "predicted")),
            ]
            for one in shown
        ]

    @property
    def left_out(self) -> int:
        """Classes that the table does not show."""
        return max(0, int(number(self.given.get("classes")) or 0) - len(self.by_class))

    @property
    def confusion(self) -> Confusion | None:
        """Which classes are taken for which, if there are not too many of them."""
        names = [text(one.get("class")) for one in self.classes]
        table = listed(self.given, "confusion")
        counts = [[number(cell) for cell in row] if isinstance(row, list) else [] for row in table]
        if not names or len(counts) != len(names) or {len(row) for row in counts} != {len(names)}:
            return None
        return Confusion(names, counts)

    @property
    def mistakes(self) -> list[list[str]]:
        """The most frequent mistakes, where the matrix would be too large."""
        if self.confusion is not None:
            return []
        names = ("true", "predicted", "rows")
        return [[text(one.get(name)) for name in names] for one in dicts(self.given, "mistakes")]

    @property
    def reliability(self) -> Chart | None:
        """How often predictions are right, against how sure they are."""
        points, spans, told = [], [], []
        for one in dicts(entry(self.given, "calibration"), "bins"):
            sure, right = number(one.get("confidence")), number(one.get("accuracy"))
            rows = number(one.get("rows"))
            if sure is None or right is None or rows is None or rows < 1 or not 0 <= right <= 1:
                continue
            points.append((sure, right))
            spans.append((sure, *interval(right, rows)))
            told.append(f"sure to {percent(sure, 0)}: {percent(right, 0)} of {rows:,.0f} right")
        if not points:
            return None
        low = math.floor(10 * min(sure for sure, _ in points)) / 10
        labels = ("how sure it was", "how often it was right")
        ends = ((low if low < 1 else 0.9, 1.0), (0.0, 1.0))
        return with_diagonal(points, labels, "; ".join(told), spans=spans, ends=ends)

    @property
    def calibration_text(self) -> str:
        error = number(entry(self.given, "calibration").get("error"))
        return "" if error is None else f"Calibration error (ECE): {percent(error)}."

    # Values

    @property
    def against_true(self) -> Chart | None:
        """Predicted against true values."""
        points = []
        for pair in listed(self.given, "points"):
            values = [number(value) for value in pair] if isinstance(pair, list) else []
            if len(values) == 2 and values[0] is not None and values[1] is not None:
                points.append((values[0], values[1]))
        title = f"predicted against true values of {self.target} for {len(points)} {self.what}s"
        name = self.target if 0 < len(self.target) <= SHORT else "value"
        return with_diagonal(points, (f"true {name}", f"predicted {name}"), title)

    @property
    def some_points(self) -> str:
        """How many of the rows the picture shows, if not all."""
        shown, rows = len(listed(self.given, "points")), number(self.given.get("rows")) or 0
        return f" {shown} of {rows:,.0f} {self.what}s are shown." if shown < rows else ""

    @property
    def spread(self) -> Chart | None:
        """The histogram of residuals."""
        given = entry(self.given, "residuals")
        edges, counts = (
            [found for value in listed(given, name) if (found := number(value)) is not None]
            for name in ("edges", "counts")
        )
        labels = ("true minus predicted value", f"{self.what}s")
        return histogram(edges, counts, labels, f"histogram of errors: {self.spread_text}")

    @property
    def spread_text(self) -> str:
        """Where most of the residuals lie."""
        quantiles = entry(entry(self.given, "residuals"), "quantiles")
        low, first, third, high = (text(quantiles.get(q), 3) for q in ("5", "25", "75", "95"))
        if not all((low, first, third, high)):
            return ""
        return (
            f"Half of the errors lie between {first} and {third}, 90% between {low} and {high}. "
            "Right of 0 the prediction was too low."
        )


class Confusion:
    """The confusion matrix; rows and columns of many classes, or of long names, are numbered."""

    def __init__(self, names: list[str], counts: list[list[float | None]]) -> None:
        self.large = len(names) > FEW
        numbered = self.large or sum(map(len, names)) > LETTERS
        self.columns = [str(k) for k in range(1, len(names) + 1)] if numbered else names
        self.names = names
        self.rows: list[tuple[str, list[tuple[str, int, bool]]]] = []
        for k, row in enumerate(counts):
            whole = sum(cell or 0 for cell in row)
            cells = [
                (
                    f"{cell:,.0f}" if cell else "0",
                    round(DEEPEST * (cell or 0) / whole) if whole else 0,  # colour, in per cent
                    j == k,
                )
                for j, cell in enumerate(row)
            ]
            self.rows.append((f"{k + 1} {names[k]}" if numbered else names[k], cells))


def _log_loss_text(classes: float | None) -> str:
    """What to compare a log loss with."""
    if classes is None or classes < 2:
        return "of the probabilities; 0 is best"
    return f"of the probabilities; 0 is best, guessing gets {math.log(classes):.3g}"
