"""One HTML page of runs: tables, curves and certificates, with nothing outside of the file.

Here is what the page says of each run; how it looks is in `report.html.jinja`. Files may hold
anything: what cannot be read is reported, and the rest is shown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hdnn
from hdnn.app import reproduced, results
from hdnn.app.reproduced import Picture
from hdnn.app.runs import Run
from hdnn.app.runs import find_runs as find_runs
from hdnn.app.svg_curves import Curve, Line, curve
from hdnn.errors import HDNNError, require

TEMPLATE = Path(__file__).with_name("report.html.jinja")
TESTED = ("test_accuracy", "test_r2", "test_rmse")  # the first that there is compares runs
# Colours of Okabe and Ito, safe for colour-blind readers; lines differ in their dashes too.
BLUE, RED, GREEN = "var(--blue)", "var(--red)", "var(--green)"


def page(runs: Sequence[Run], folder: Path | None = None) -> str:
    """The whole page, with what a folder of results has of the paper's tables and figures."""
    jinja2 = require("jinja2", extra="cli")
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    shown = [
        RunOnPage(run, f"run-{index}", short)
        for index, (run, short) in enumerate(zip(runs, short_names(runs), strict=True))
    ]
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        version=hdnn.__version__,
        runs=shown,
        over_seeds=_over_seeds(shown),
        pages=[] if folder is None else reproduced.pages(folder),
        pictures=[] if folder is None else reproduced.pictures(folder),
    )


def faults(runs: Sequence[Run]) -> list[str]:
    """What is wrong with the files of each run that is damaged."""
    return [fault for run in runs for fault in RunOnPage(run).faults]


def short_names(runs: Sequence[Run]) -> list[str]:
    """The names of the folders, without what all of them begin with."""
    folders = [run.folder for run in runs]
    try:
        common = os.path.commonpath([folder.parent for folder in folders])
    except ValueError:  # some are absolute, some are not
        return [str(folder) for folder in folders]
    return [os.path.relpath(folder, common or ".") for folder in folders]


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
        self.certificates = _certificates(self.metrics)

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

    @property
    def overview(self) -> list[str]:
        """The row of the first table, after the name."""
        options, metrics = self.options, self.metrics
        norms = [one.smallest for one in self.certificates if one.smallest is not None]
        return [
            Path(str(options.get("data", ""))).name,
            str(options.get("network", "")),
            *(_value(options.get(name)) for name in ("layers", "features")),
            *(_value(metrics.get(name)) for name in ("parameters", "epochs")),
            _score(metrics, "train"),
            _score(metrics, "test"),
            _value(min(norms, default=None)),
            _value(metrics.get("training_seconds")),
        ]

    @property
    def about(self) -> str:
        if not self.metrics:
            return ""
        what = "images" if "train_images" in self.metrics else "rows"
        train, test = (_value(self.metrics.get(f"{part}_{what}")) for part in ("train", "test"))
        network = self.metrics.get("network", "")
        return f"{network}; {train} training {what}, {test} test {what}"

    @property
    def training(self) -> Curve | None:
        """Loss and wrong labels against the epoch."""
        epochs = [e for e in self._logged("epoch") if e is not None]
        if len(epochs) != len(self.log) or not epochs:
            return None
        lines = [Line("loss", epochs, self._logged("loss"), BLUE)]
        if any(w is not None for w in self.wrong):
            lines.append(Line("fraction of wrong labels", epochs, self.wrong, RED, "6 4"))
        test = _complements(self._logged("test_accuracy"))
        if any(w is not None for w in test):
            lines.append(Line("the same on test images", epochs, test, GREEN, "8 3 2 3"))
        return curve(lines, "epoch")

    @property
    def wrong(self) -> list[float | None]:
        """The fraction of wrong labels after each epoch, on the training data."""
        return _complements(self._logged("accuracy"))

    def _logged(self, name: str) -> list[float | None]:
        return [_number(entry.get(name)) for entry in self.log]

    @property
    def picture(self) -> Picture | None:
        """The decision regions; the other pictures of a run show what the curves show."""
        file = self.run.folder / "decision_regions.png"
        return reproduced.picture(file, "Decision regions", "Test points on the predicted classes.")

    @property
    def no_certificate_because(self) -> str:
        return str(self.metrics.get("no_certificate_because") or "")


class CertificateOnPage:
    """A certificate as it was written to the metrics of a run; `unit` names the part it is for."""

    def __init__(self, given: dict[str, Any], unit: str) -> None:
        self.given = given
        self.unit = unit
        self.smallest = _number(given.get("smallest_norm"))
        self.samples = _value(given.get("samples"))
        self.why = str(given.get("guarantee", ""))
        holds = given.get("holds")
        if holds is None and given.get("unknown"):
            self.verdict, self.why = "unknown", str(given["unknown"])
        else:
            self.verdict = "holds" if holds is True else "broken" if holds is False else "none"

    @property
    def sentences(self) -> list[str]:
        """Whether it is symplectic, and its bounds."""
        found = []
        defect = _number(self.given.get("symplectic_defect"))
        if defect is not None:
            symplectic = self.given.get("symplectic")
            word = "yes" if symplectic is True else "NO" if symplectic is False else "not promised"
            found.append(
                f"Symplectic: {word}, norm(Phi^T J Phi - J) is up to {defect:.1e}, relative"
            )
        texts = [str(bound["text"]) for bound in _dicts(self.given, "bounds") if bound.get("text")]
        return found + [text[0].upper() + text[1:] for text in texts]

    @property
    def ranges(self) -> list[list[str]]:
        """Smallest and largest norm of several layers each."""
        return [
            [
                " to ".join(dict.fromkeys(_value(part.get(end)) for end in ("from", "to"))),
                _value(part.get("smallest")),
                _value(part.get("largest")),
            ]
            for part in _dicts(self.given, "ranges")
        ]

    @property
    def norms(self) -> Curve | None:
        """The norms of dy_N/dy_j against j."""
        by_layer = self.given.get("by_layer")
        if not isinstance(by_layer, dict):
            return None
        names = {"largest": (RED, "6 4"), "median": (BLUE, ""), "smallest": (GREEN, "8 3 2 3")}
        layers = [_number(j) for j in _list(by_layer, "layers")]
        x = [j for j in layers if j is not None]
        lines = []
        for name, (colour, dash) in names.items():
            y = [_number(norm) for norm in _list(by_layer, name)]
            if x and len(x) == len(layers) == len(y):
                lines.append(Line(name, x, y, colour, dash))
        return curve(lines, "layer j", level=1.0) if lines else None


def _certificates(metrics: dict[str, Any]) -> list[CertificateOnPage]:
    """The certificates of a run: one, or one for each Hamiltonian part of an image classifier."""
    several, one = _dicts(metrics, "certificates"), metrics.get("certificate")
    if not several:
        several = [one] if isinstance(one, dict) and one else []
    units = [f"Unit {k}. " if len(several) > 1 else "" for k in range(1, len(several) + 1)]
    return [CertificateOnPage(one, unit) for one, unit in zip(several, units, strict=True)]


def _over_seeds(runs: list[RunOnPage]) -> list[list[str]]:
    """Mean and spread of runs that differ in nothing but their seed."""
    groups: dict[tuple[Any, ...], list[RunOnPage]] = {}
    for one in runs:
        if one.metrics and one.options:
            alike = {k: v for k, v in one.options.items() if k not in ("seed", "device")}
            groups.setdefault(tuple((k, str(v)) for k, v in alike.items()), []).append(one)
    rows = []
    for group in groups.values():
        summary = results.spread([one.metrics for one in group])
        name = next((name for name in TESTED if name in summary), None)
        if name is None or summary[name]["runs"] < 2:
            continue
        options, (count, *figures) = group[0].options, summary[name].values()
        rows.append(
            [
                Path(str(options["data"])).name,
                str(options["network"]),
                name.removeprefix("test_"),
                _value(options["layers"]),
                _value(count),
                *(results.measure_text(name, value) for value in figures),
            ]
        )
    return rows


# Values from files, which may hold anything


def _complements(fractions: list[float | None]) -> list[float | None]:
    return [None if value is None else 1 - value for value in fractions]


def _list(given: dict[str, Any], name: str) -> list[Any]:
    value = given.get(name)
    return value if isinstance(value, list) else []


def _dicts(given: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [one for one in _list(given, name) if isinstance(one, dict)]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _value(value: Any) -> str:
    number = _number(value)
    if number is None:
        return "" if value is None else str(value)
    return str(value) if isinstance(value, int) else f"{number:.4g}"


def _score(metrics: dict[str, Any], part: str) -> str:
    for name, word in (("accuracy", ""), ("r2", "R² "), ("rmse", "rmse ")):
        value = metrics.get(f"{part}_{name}")
        if value is not None:
            return word + results.measure_text(name, value)
    return ""
