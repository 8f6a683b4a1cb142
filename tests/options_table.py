"""The table of docs/options.md, which `PYTHONPATH=src:tests python -m options_table` writes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from hdnn import HDNNClassifier, HDNNRegressor
from hdnn.app.configs.table import TableConfig
from hdnn.training import table_recipe

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
START, END = "<!-- options -->\n", "<!-- end -->\n"
FILE = {"data": "a.csv", "target": "y"}

# Of hdnn train, of the estimators, and what both mean.
SAME = (
    ("network", "network", "the kind of layers"),
    ("layers", "layers", "their number N"),
    (
        "features",
        "features",
        "the width n of a state; by default three times the inputs, 16 at least, at most 24 more",
    ),
    ("T", "T", "the time that all layers span; a step is T/N"),
    ("activation", "activation", "of the layers"),
    (
        "epochs",
        "epochs",
        "passes over the rows to train on, at most; by default 40, or 2560 / n if that is less, "
        "but at least 10",
    ),
    (
        "batch",
        "batch",
        "rows of a minibatch; by default sqrt(2 rows), rounded up to a multiple of 32, or all of "
        "up to 64",
    ),
    (
        "learning_rate",
        "learning_rate",
        "at the start, by default 0.02, times sqrt(24 / n) if n > 24; it falls to zero as a cosine",
    ),
    (
        "weight_decay",
        "weight_decay",
        "of the hidden layers, by default 0.5 n, or 3.3 sqrt(n) if that is less; divided by the "
        "rows to train on",
    ),
    ("solver", "solver", "of the output layer: newton, adam or joint, which auto is"),
    (
        "ridge",
        "ridge",
        "penalty on the output layer, by default 0.01 n; divided by the rows to train on",
    ),
    ("smoothness", "smoothness", "penalty on differences between neighbouring layers"),
    ("class_weight", "class_weight", "balanced, or a weight for each class"),
    ("categorical", "categorical", "columns of numbers that are categories"),
    ("missing", "missing", "fill in what is missing, or refuse it"),
    ("validation", "validation_fraction", "fraction of the rows to hold out of the training"),
    ("patience", "n_iter_no_change", "epochs without a lower held-out loss that end the training"),
    ("seed", "random_state", "of initial weights, held-out rows and order of the rows"),
    ("device", "device", "where to train"),
)


def table() -> str:
    """Both names of each option, its default, which is that of both tasks, and its meaning."""
    lines = ["| `hdnn train` | estimators | default | meaning |", "| --- " * 4 + "|"]
    config, doors = TableConfig.of(FILE), (HDNNClassifier, HDNNRegressor)
    for flag, name, meaning in SAME:
        shown = {_shown(flag, name, getattr(config, flag), door) for door in doors}
        assert len(shown) == 1, name
        cells = f"`--{flag.replace('_', '-')}`", f"`{name}`", *shown, meaning
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(flag: str, name: str, ours: Any, door: type) -> str:
    """The default of an option for one task, after both doors were found to agree."""
    known = {each.name: each.default for each in fields(door)}
    if name not in known:
        return ""
    theirs = known[name]
    if name in ("validation_fraction", "n_iter_no_change"):
        if not table_recipe.DEFAULTS["early_stopping"]:
            assert not ours, name
            return f"none ({theirs} with `early_stopping`)"
        assert ours == theirs, name
    elif name == "random_state":
        return "0 (estimators: `None`)"
    elif ours not in (None, [], theirs):
        raise AssertionError(f"{flag} is {ours!r} by default, but {name} {theirs!r}")
    return f"{theirs:g}" if isinstance(theirs, float) else "" if theirs is None else str(theirs)


def page(text: str) -> str:
    """The page with its table renewed."""
    before, _, rest = text.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
