"""`hdnn predict`: what a trained network says of the rows of a table, or of images."""

from __future__ import annotations

import csv
import io
import sys
from typing import Annotated, Any

from hdnn.app import progress, terminal
from hdnn.app.options import json_flag, option, overwrite_flag
from hdnn.base.files import write_atomically

EXAMPLES = (
    "hdnn predict --run runs/iris-species-h2-16-0 --data new.csv --out answers.csv",
    "hdnn predict --run runs/iris-species-h2-16-0 --data new.csv --proba",
    "hdnn predict --run runs/mnist-h1-8-0 --data mnist --out answers.csv",
)
ANSWERS = ("predictions", "probabilities", "agreement", "spread")


def predict(
    run: Annotated[str, option("folder of a complete run, or of the runs of --seeds: their mean")],
    data: Annotated[
        str,
        option(
            "FILE.csv or FILE.parquet with the same columns; for a run on images, mnist or "
            "cifar10: the test images; for points, swiss_roll ..; for a graph also a folder of "
            "node files"
        ),
    ],
    out: Annotated[str | None, option("CSV to write; default: print it")] = None,
    proba: Annotated[bool, option("probability of each class", "--proba")] = False,
    overwrite: Annotated[bool, overwrite_flag()] = False,
    as_json: Annotated[bool, json_flag()] = False,
) -> None:
    """Predict the target for each row of a table, or test image, as CSV in their order."""
    from hdnn.app.runs import Run
    from hdnn.app.tasks import kinds

    path = None if out is None else terminal.new_file(out, overwrite)
    with progress.waiting("predicting", not as_json):
        result = kinds.predict(Run(run), data, proba=proba)
    terminal.say_notes(result.get("notes", []))
    if path is not None:
        write_atomically(path, _prediction_csv(result).encode())
        result = {name: value for name, value in result.items() if name not in ANSWERS}
        result["out"] = str(path)
    if as_json:
        print(terminal.json_text(result))
    elif path is None:
        sys.stdout.write(_prediction_csv(result))
    else:
        by = f" by {result['runs']} runs together" if "runs" in result else ""
        terminal.print_text(
            f"{result['rows']} predictions of {result['target']}{by} in {path}{_score(result)}"
        )


def _prediction_csv(result: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    target, chances = result["target"], result.get("probabilities", {})
    columns = {target: result["predictions"]}
    if "agreement" in result:
        columns[f"agreement({target})"] = result["agreement"]
    if "spread" in result:
        columns[f"std({target})"] = result["spread"]
    columns |= {f"p({name})": chance for name, chance in chances.items()}
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def _score(result: dict[str, Any]) -> str:
    from hdnn.app.results import measure_text

    for name in ("accuracy", "rmse"):
        if name in result:
            return f" ({name} {measure_text(name, result[name])})"
    return ""
