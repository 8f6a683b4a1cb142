"""One HTML page of runs: tables, curves and certificates, with nothing outside of the file.

Curves are drawn as SVG in the page itself, so that the page needs no plotting library; pictures of
a run are put in as data. All that comes from files is escaped, and the page allows no script.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import hdnn
from hdnn.app import reproduced
from hdnn.app.runs import CONFIG, Run
from hdnn.base.files import read_bytes
from hdnn.errors import CheckpointError, HDNNError

# Colours of Okabe and Ito, told apart by colour-blind readers; lines differ in their dashes too.
BLUE, RED, GREEN = "var(--blue)", "var(--red)", "var(--green)"
WIDTH, HEIGHT = 380, 240  # of a curve: small, so that its text can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40
FLAT = 5e-3  # of their size: values that differ by less are drawn as a flat line

STYLE = """
:root { color-scheme: light; --ink: #1a1a1a; --faint: #444; --page: #fff; --shade: #f2f2f2;
  --line: #d8d8d8; --link: #0b5394; --blue: #0072b2; --red: #d55e00; --green: #009e73;
  --good: #00664b; --bad: #a83c00; }
@media screen and (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --ink: #e6e6e6; --faint: #b4b4b4; --page: #16181a; --shade: #25282b;
    --line: #3c4043; --link: #8ab8ee; --blue: #56b4e9; --red: #f0883e; --green: #2fc29a;
    --good: #4fd1a5; --bad: #ff9a62; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; color: var(--ink); background: var(--page);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
section { border-top: 2px solid var(--line); margin-top: 2.5rem; }
section h2 { margin-top: 1rem; }
p { margin: .25rem 0; max-width: 45rem; overflow-wrap: anywhere; }
sub { line-height: 0; }
a { color: var(--link); }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { background: var(--shade); }
th.text, td.text { text-align: left; }
td:first-child, th:first-child { position: sticky; left: 0; }
td:first-child { background: var(--page); }
.grid { display: grid; gap: 1.25rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; max-width: 34rem; }
figcaption { font-size: .9rem; color: var(--faint); }
svg, img { display: block; width: 100%; height: auto; }
img { background: #fff; }
svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.mark { stroke: var(--line); }
.level { stroke: var(--ink); }
.key { display: inline-block; margin-right: 1rem; white-space: nowrap; }
.key svg { display: inline-block; width: 2rem; height: .75rem; vertical-align: middle; }
summary { font-weight: 600; margin: 1.25rem 0 .25rem; cursor: pointer; }
pre { font-size: .8rem; line-height: 1.4; background: var(--shade); padding: .75rem; margin: 0;
  overflow-x: auto; }
.holds { color: var(--good); font-weight: 600; }
.broken { color: var(--bad); font-weight: 600; }
@media (max-width: 30rem) {
  body { padding: .75rem; }
  th, td { padding: .3rem .5rem; }
  td:first-child { max-width: 9rem; white-space: normal; overflow-wrap: break-word; }
}
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  th, td { padding: .15rem .35rem; white-space: normal; }
  td:first-child, th:first-child { position: static; }
  pre { white-space: pre-wrap; }
  details::details-content { content-visibility: visible; height: auto; }
  figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
"""


@dataclass(frozen=True)
class Line:
    """One line of a curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: str
    dash: str = ""


def find_runs(places: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs in these folders, and in the folders below them; at least one."""
    found: dict[str, Run] = {}
    for place in places:
        folder = Path(place)
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {folder}; name one that holds runs.")
        for file in [folder / "config.toml", *sorted(folder.rglob("config.toml"))]:
            if Run(file.parent).exists:
                found.setdefault(os.path.realpath(file.parent), Run(file.parent))
    if not found:
        raise CheckpointError(
            f"there is no run in {', '.join(map(str, places))}; make one by hdnn train."
        )
    return list(found.values())


def page(runs: Sequence[Run], results: Path | None = None) -> str:
    """The whole page, with what a folder of results has of the paper's tables and figures."""
    known = [_read(run) for run in runs]
    for one, name in zip(known, _short_names(runs), strict=True):
        one["short"] = name
    body = "\n".join(
        [
            "<h1>Runs</h1>",
            f"<p>{len(runs)} run{'s' * (len(runs) != 1)}, hdnn {escape(hdnn.__version__)}. Norms "
            "are those of dy<sub>N</sub>/dy<sub>j</sub>, how the last state depends on an earlier "
            "one: at least 1 means that gradients cannot vanish.</p>",
            _overview(known),
            _over_seeds(known),
            *(_section(index, one) for index, one in enumerate(known)),
            "" if results is None else reproduced.section(results),
        ]
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>Runs of hdnn</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n</body>\n</html>\n"
    )


def faults(runs: Sequence[Run]) -> list[str]:
    """What is wrong with the files of each run that is damaged."""
    return [fault for run in runs for fault in _read(run)["faults"]]


def _read(run: Run) -> dict[str, Any]:
    """What a run has come to so far; what cannot be read is told, and the rest is shown."""
    known: dict[str, Any] = {"run": run, "name": str(run.folder), "log": [], "metrics": {}}
    known |= {"config": "", "options": {}, "faults": []}

    def read(name: str, make: Callable[[], Any]) -> None:
        try:
            known[name] = make()
        except (HDNNError, OSError) as error:
            known["faults"].append(str(error))

    read("config", lambda: read_bytes(run.config_file, CONFIG).decode("utf-8", "replace"))
    read("options", lambda: vars(run.config()))
    read("lines", run.log_and_faults)
    known["log"], wrong = known.pop("lines", ([], 0))
    if wrong:
        known["faults"].append(f"{run.log_file} has {wrong} lines that hdnn did not write.")
    if run.complete:
        read("metrics", run.metrics)
    known["note"] = "" if run.complete else "not complete"
    if known["faults"]:
        known["note"] = f"damaged: {' '.join(known['faults'])}"
    return known


def _short_names(runs: Sequence[Run]) -> list[str]:
    """The names of the folders, without what all of them begin with."""
    folders = [run.folder for run in runs]
    try:
        common = os.path.commonpath([folder.parent for folder in folders])
    except ValueError:  # some are absolute, some are not
        return [str(folder) for folder in folders]
    return [os.path.relpath(folder, common or ".") for folder in folders]


# Tables


def _overview(known: list[dict[str, Any]]) -> str:
    rows = []
    for index, one in enumerate(known):
        options, metrics = one["options"], one["metrics"]
        norms = [_number(part.get("smallest_norm")) for part in _certified(metrics)]
        norms = [norm for norm in norms if norm is not None]
        link = f'<a href="#run-{index}">{escape(one["short"])}</a>'
        rows.append(
            [
                link + (f" ({escape(one['note'])})" if one["note"] else ""),
                escape(Path(str(options.get("data", ""))).name),
                escape(str(options.get("network", ""))),
                *(_value(options.get(name)) for name in ("layers", "features")),
                *(_value(metrics.get(name)) for name in ("parameters", "epochs")),
                _score(metrics, "train"),
                _score(metrics, "test"),
                _value(min(norms, default=None)),
                _value(metrics.get("training_seconds")),
            ]
        )
    head = ["run", "data", "network", "layers", "features", "parameters", "epochs", "train"]
    return _table([*head, "test", "smallest norm", "seconds"], rows, text=3)


def _over_seeds(known: list[dict[str, Any]]) -> str:
    """Mean and spread of runs that differ in nothing but their seed."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in known:
        if one["metrics"] and one["options"]:
            alike = {k: v for k, v in one["options"].items() if k not in ("seed", "device")}
            groups.setdefault(tuple((k, str(v)) for k, v in alike.items()), []).append(one)
    rows = []
    for group in groups.values():
        measures = [_measure(one["metrics"], "test") for one in group]
        values = [value for _, value in measures if value is not None]
        if len(values) < 2:
            continue
        options, name = group[0]["options"], measures[0][0]
        rows.append(
            [
                escape(Path(str(options["data"])).name),
                escape(str(options["network"])),
                escape(name),
                _value(options["layers"]),
                _value(len(values)),
                _as_measure(name, statistics.fmean(values)),
                _as_measure(name, statistics.stdev(values)),
                _as_measure(name, min(values)),
                _as_measure(name, max(values)),
            ]
        )
    if not rows:
        return ""
    head = ["data", "network", "on test rows", "layers", "runs", "mean", "std"]
    return "<h2>Over seeds</h2>" + _table([*head, "smallest", "largest"], rows, text=3)


def _table(head: list[str], rows: list[list[str]], *, text: int = 1) -> str:
    """A table that scrolls by itself; the first `text` columns hold words."""

    def cells(kind: str, row: list[str]) -> str:
        style = [' class="text"' if i < text else "" for i in range(len(row))]
        return "".join(f"<{kind}{s}>{cell}</{kind}>" for s, cell in zip(style, row, strict=True))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        '<div class="scroll" tabindex="0"><table>\n'
        f"<thead><tr>{cells('th', head)}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


# One run


def _section(index: int, one: dict[str, Any]) -> str:
    metrics = one["metrics"]
    parts = [f'<section id="run-{index}">', f"<h2>{escape(one['name'])}</h2>"]
    if one["note"]:
        parts.append(f'<p class="broken">{escape(one["note"])}</p>')
    if metrics:
        what = "images" if "train_images" in metrics else "rows"
        rows = f"{_value(metrics.get(f'train_{what}'))} training {what}, "
        rows += f"{_value(metrics.get(f'test_{what}'))} test {what}"
        parts.append(f"<p>{escape(str(metrics.get('network', '')))}; {rows}.</p>")
    certified = _certified(metrics)
    figures = [_learning_curve(one["log"]), *_pictures(one)]
    figures += [_norm_curve(part, _unit(k, certified)) for k, part in enumerate(certified, 1)]
    parts.append(f'<div class="grid">{"".join(figures)}</div>')
    parts += [_certificate(part, _unit(k, certified)) for k, part in enumerate(certified, 1)]
    if metrics.get("no_certificate_because"):
        parts.append(f"<p>Gradients: {escape(str(metrics['no_certificate_because']))}.</p>")
    if one["config"]:
        config = f"<summary>Config</summary><pre>{escape(one['config'])}</pre>"
        parts.append(f"<details>{config}</details>")
    return "\n".join([*(part for part in parts if part), "</section>"])


def _learning_curve(log: list[dict[str, Any]]) -> str:
    epochs = [e for e in (_number(entry.get("epoch")) for entry in log) if e is not None]
    if len(epochs) != len(log) or not log:
        return ""
    lines = [Line("loss", epochs, [_number(entry.get("loss")) for entry in log], BLUE)]
    right = [_number(entry.get("accuracy")) for entry in log]
    caption = "Training, mean over the minibatches of an epoch."
    if any(value is not None for value in right):
        wrong = [None if value is None else 1 - value for value in right]
        lines.append(Line("fraction of wrong labels", epochs, wrong, RED, "6 4"))
        if any(w == 0 for w in wrong):
            caption += " Without a wrong label, the line is at the lower edge."
    test = [_number(entry.get("test_accuracy")) for entry in log]
    if any(value is not None for value in test):
        wrong = [None if value is None else 1 - value for value in test]
        lines.append(Line("the same on test images", epochs, wrong, GREEN, "8 3 2 3"))
    return _curve(lines, "epoch", caption)


def _certified(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """The certificates of a run: one, or one for each Hamiltonian part of an image classifier."""
    several = [part for part in _list(metrics, "certificates") if isinstance(part, dict)]
    one = _part(metrics, "certificate")
    return several or ([one] if one else [])


def _unit(k: int, certified: list[dict[str, Any]]) -> str:
    return f"Unit {k}. " if len(certified) > 1 else ""


def _norm_curve(certified: dict[str, Any], unit: str) -> str:
    by_layer = _part(certified, "by_layer")
    names = {"largest": (RED, "6 4"), "median": (BLUE, ""), "smallest": (GREEN, "8 3 2 3")}
    layers = [_number(j) for j in _list(by_layer, "layers")]
    x = [j for j in layers if j is not None]
    lines = []
    for name, (colour, dash) in names.items():
        y = [_number(norm) for norm in _list(by_layer, name)]
        if x and len(x) == len(layers) == len(y):
            lines.append(Line(name, x, y, colour, dash))
    if not lines:
        return ""
    samples = _value(certified.get("samples"))
    caption = f"{unit}Norm of dy<sub>N</sub>/dy<sub>j</sub> over {samples} points."
    return _curve(lines, "layer j", caption, level=1.0)


def _certificate(certified: dict[str, Any], unit: str) -> str:
    holds, why = certified.get("holds"), escape(str(certified.get("guarantee", "")))
    verdict = f"No guarantee: {why}."
    if holds is None and certified.get("unknown"):
        unknown = escape(str(certified["unknown"]))
        verdict = f'<span class="broken">COULD NOT BE COMPUTED</span>: {unknown}.'
    elif holds is True:
        verdict = f'<span class="holds">Norm at least 1: holds</span>, guaranteed {why}.'
    elif holds is False:
        verdict = f'<span class="broken">Norm at least 1: DOES NOT HOLD</span>, guaranteed {why}.'
    parts = [f"<h3>Certificate</h3><p>{unit}{verdict}</p>"]
    defect = _number(certified.get("symplectic_defect"))
    if defect is not None:
        text = f"norm(Phi^T J Phi - J) is up to {defect:.1e}, relative"
        word = {True: "yes", False: "NO"}.get(certified.get("symplectic"), "not promised")  # pyright: ignore
        parts.append(f"<p>Symplectic: {word}, {escape(text)}.</p>")
    texts = [bound.get("text") for bound in _list(certified, "bounds") if isinstance(bound, dict)]
    parts += [f"<p>{escape(str(text)[0].upper() + str(text)[1:])}.</p>" for text in texts if text]
    rows = [
        [
            " to ".join(dict.fromkeys(_value(part.get(end)) for end in ("from", "to"))),
            _value(part.get("smallest")),
            _value(part.get("largest")),
        ]
        for part in _list(certified, "ranges")
        if isinstance(part, dict)
    ]
    if rows:
        parts.append(_table(["layers j", "smallest norm", "largest norm"], rows))
    return "\n".join(parts)


def _pictures(one: dict[str, Any]) -> list[str]:
    """The decision regions; the other pictures of a run show what the curves show."""
    file = one["run"].folder / "decision_regions.png"
    shown = reproduced.picture(file, "Decision regions", "Test points on the predicted classes.")
    return [shown] if shown else []


# Curves


def _curve(lines: list[Line], label: str, caption: str, *, level: float | None = None) -> str:
    """A figure of lines over one axis, logarithmic upwards where nothing is negative.

    There, zeros are at the lower edge. The caption is HTML.
    """
    points = [y for line in lines for y in line.y if y is not None]
    positive = [y for y in points if y > 0]
    if not positive and not points:
        return ""
    log = len(positive) == len([y for y in points if y != 0]) and bool(positive)
    shown = positive if log else points
    low, high = min(shown), max(shown)
    if level is not None:
        low, high = min(low, level), max(high, level)
    log = log and high > 3 * low  # less of a range is easier to read without
    if log and len(points) > len(positive):
        low = max(low / 2, 5e-324)
    if high - low < FLAT * abs(high):  # rounding would be all there is to see
        low, high = low - FLAT * abs(low), high + FLAT * abs(high)
    marks = _log_marks(low, high) if log else _marks(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])
    x_low, x_high = min(lines[0].x), max(lines[0].x)

    def across(x: float) -> float:
        share = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        a, b, c = (math.log10(v) for v in (low, high, max(y, low))) if log else (low, high, y)
        return HEIGHT - BOTTOM - ((c - a) / (b - a) if b > a else 0.5) * (HEIGHT - TOP - BOTTOM)

    drawn = []
    for mark in marks:
        y = down(mark)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="mark"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{mark:g}</text>')
    for mark in _marks(x_low, x_high, whole=True):
        x, base = across(mark), HEIGHT - BOTTOM
        drawn.append(f'<path d="M{x:.1f} {base}v4" class="level"/>')
        drawn.append(f'<text x="{x:.1f}" y="{base + 17}" text-anchor="middle">{mark:g}</text>')
    if level is not None:
        y = down(level)
        drawn.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" class="level"/>')
    for line in lines:
        drawn += _strokes(line, across, down)
    drawn.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{escape(label)}</text>"
    )
    keys = "".join(
        '<span class="key"><svg viewBox="0 0 32 12" aria-hidden="true"><path d="M0 6H32" '
        f"{_stroke(line)}/></svg> {escape(line.name)}</span>"
        for line in lines
    )
    title = f"{', '.join(line.name for line in lines)} against the {label}"
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>'
        f"{''.join(drawn)}</svg><figcaption>{keys}<br>{caption}</figcaption></figure>"
    )


def _strokes(line: Line, across: Any, down: Any) -> list[str]:
    """The line in pieces: where a value is missing it is open, a point by itself is a dot."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            pieces.append([])
        else:
            pieces[-1].append((across(x), down(y)))
    drawn = []
    for piece in pieces:
        if len(piece) == 1:
            (x, y) = piece[0]
            drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{line.colour}"/>')
        elif piece:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in piece)
            drawn.append(f'<path d="M{path}" fill="none" {_stroke(line)}/>')
    return drawn


def _stroke(line: Line) -> str:
    dash = f' stroke-dasharray="{line.dash}"' if line.dash else ""
    return f'style="stroke:{line.colour}" stroke-width="2"{dash}'


def _marks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """About five round numbers around `low` to `high`, or whole ones inside."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if whole:
        step = max(step, 1.0)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)] or [low]


def _log_marks(low: float, high: float) -> list[float]:
    """Powers of ten, or 1, 2, 5, 10 .. where these would be too few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if high <= 100 * low:
        fine = [m * 10.0**k for k in range(first, last + 1) for m in (1, 2, 5)]
        inside = [mark for mark in fine if low * 0.999 <= mark <= high * 1.001]
        below = [mark for mark in fine if mark < low * 0.999][-1:]
        above = [mark for mark in fine if mark > high * 1.001][:1]
        return [*below, *inside, *above] or [low]
    every = -(-(last - first) // 6)
    powers = [10.0**k for k in range(first, last + 1) if k % every == 0 and k < 308]
    return [mark for mark in powers if low * 0.999 <= mark <= high * 1.001] or [low]


# Values from files, which may hold anything


def _part(given: Any, name: str) -> dict[str, Any]:
    value = given.get(name) if isinstance(given, dict) else None
    return value if isinstance(value, dict) else {}


def _list(given: dict[str, Any], name: str) -> list[Any]:
    value = given.get(name)
    return value if isinstance(value, list) else []


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
        return "" if value is None else escape(str(value))
    return str(value) if isinstance(value, int) else f"{number:.4g}"


def _measure(metrics: dict[str, Any], part: str) -> tuple[str, float | None]:
    for name in ("accuracy", "r2", "rmse"):
        value = _number(metrics.get(f"{part}_{name}"))
        if value is not None:
            return name, value
    return "", None


def _as_measure(name: str, value: float) -> str:
    return f"{value:.2%}" if name == "accuracy" else f"{value:.4g}"


def _score(metrics: dict[str, Any], part: str) -> str:
    name, value = _measure(metrics, part)
    if value is None:
        return ""
    words = {"accuracy": "", "r2": "R² ", "rmse": "rmse "}
    return words[name] + _as_measure(name, value)
