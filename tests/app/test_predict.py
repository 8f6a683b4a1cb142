"""`hdnn predict`, `certify` and `report` on finished runs."""

from __future__ import annotations

import contextlib
import csv
import io as text_io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("pandas")

import pandas as pd

import hdnn
from hdnn import io
from hdnn.__main__ import main
from hdnn.app import predict

NAMES = ["=cmd|' /C calc'!A0", "+cmd", "-1+1", "@sum", "plain"]


def run(folder: Path, *arguments: str, code: int = 0) -> str:
    out, error = text_io.StringIO(), text_io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(out), redirect_stderr(error):
        result = main(list(arguments))
    assert result == code, error.getvalue()
    return out.getvalue() if code == 0 else error.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs on classes with dangerous names, on values (two seeds), and on points."""
    folder = tmp_path_factory.mktemp("runs")
    random = np.random.default_rng(1)
    a, b = random.normal(size=(2, 150))
    label = np.array(NAMES)[
        np.clip(np.digitize(a, [-0.8, -0.25, 0.25, 0.8]), 0, 4)
    ]
    frame = pd.DataFrame({"a": a, "b": b, "label": label, "value": 5 * a + b})
    frame.to_csv(folder / "table.csv", index=False)
    data = ["train", "--data", "table.csv", "--epochs", "8"]
    run(
        folder,
        *data,
        "--target",
        "label",
        "--drop",
        "value",
        "--out",
        "runs/classes",
    )
    more = [
        "--target",
        "value",
        "--drop",
        "label",
        "--seeds",
        "2",
        "--out",
        "runs/values",
    ]
    run(folder, *data, *more)
    points = [
        "--data",
        "swiss_roll",
        "--layers",
        "8",
        "--epochs",
        "2",
        "--out",
        "runs/points",
    ]
    run(folder, "train", *points)
    return folder


def test_predict_and_certify_take_a_run_alike(folder):
    """`predict RUN FILE` is `predict --run RUN --data FILE`."""
    short = run(folder, "predict", "runs/classes", "table.csv")
    long = ["--run", "runs/classes", "--data", "table.csv"]
    assert short == run(folder, "predict", *long)
    for arguments in (["predict"], ["predict", "runs/classes"]):
        assert "RUN FILE" in run(folder, *arguments, code=2)


def test_predictions_agree_with_the_model_and_its_score(folder):
    result = json.loads(
        run(
            folder,
            "predict",
            "--run",
            "runs/classes",
            "--data",
            "table.csv",
            "--json",
        )
    )
    truth = pd.read_csv(folder / "table.csv")["label"]
    assert result["accuracy"] == pytest.approx(
        (truth == result["predictions"]).mean()
    )
    assert result["accuracy"] > 0.6
    assert "always answering" in result["baseline"]


def test_a_spreadsheet_runs_nothing_of_a_prediction(folder):
    text = run(
        folder,
        "predict",
        "--run",
        "runs/classes",
        "--data",
        "table.csv",
        "--proba",
    )
    rows = list(csv.reader(text.splitlines()))
    assert len(rows) == 151
    for row in rows:
        for cell in row:
            assert not re.match(r"[=+@]|-.*[^\d.e-]", cell)
    safe = {f"'{name}" for name in NAMES[:-1]} | {"plain"}
    assert {row[0] for row in rows[1:]} == safe
    chances = np.array([row[1:] for row in rows[1:]], float)
    assert np.allclose(chances.sum(1), 1)


@pytest.mark.parametrize(
    "name",
    ["=1", "+1+1", "-cmd|x", "@sum", "\tx", "\rx", "\r=x", " =1", "＝1+1", "-"],  # noqa: RUF001
)
def test_no_cell_and_no_heading_is_a_formula(name):
    chances = {"x": [-3.5]}
    result = {"target": name, "predictions": [name], "probabilities": chances}
    heading, cells = csv.reader(
        text_io.StringIO(predict.csv_text(result), newline="")
    )
    assert heading[0] == cells[0] == f"'{name}".replace("\r", "\n")
    assert cells[1] == "-3.5"


@pytest.mark.parametrize("name", ["-3.5", "+1e-5", "-3,5", "12", "x=1", "a-b"])
def test_numbers_and_harmless_names_stay_as_they_are(name):
    result = {"target": "y", "predictions": [name]}
    rows = list(csv.reader(predict.csv_text(result).splitlines()))
    assert rows == [["y"], [name]]


def test_rows_without_the_target_are_predicted_without_a_score(folder):
    pd.read_csv(folder / "table.csv").drop(columns=["label"]).to_csv(
        folder / "new.csv", index=False
    )
    printed = run(
        folder,
        "predict",
        "--run",
        "runs/classes",
        "--data",
        "new.csv",
        "--out",
        "a.csv",
    )
    assert "accuracy" not in printed
    assert len((folder / "a.csv").read_text().splitlines()) == 151
    again = [
        "predict",
        "--run",
        "runs/classes",
        "--data",
        "new.csv",
        "--out",
        "a.csv",
    ]
    assert "--overwrite" in run(folder, *again, code=2)
    run(folder, *again, "--overwrite")


def test_a_missing_column_is_named(folder):
    pd.DataFrame({"a": [1.0]}).to_csv(folder / "short.csv", index=False)
    error = run(
        folder,
        "predict",
        "--run",
        "runs/classes",
        "--data",
        "short.csv",
        code=2,
    )
    assert "'b'" in error


def test_points_of_a_plane_are_predicted_from_a_set_or_a_file(folder):
    first = json.loads(
        run(
            folder,
            "predict",
            "--run",
            "runs/points",
            "--data",
            "swiss_roll",
            "--json",
        )
    )
    assert first["rows"] == 4000
    data = hdnn.data.planar.load("swiss_roll", seed=0)
    x = data.x_test.double().numpy()
    pd.DataFrame({"x1": x[:, 0], "x2": x[:, 1]}).to_csv(
        folder / "points.csv", index=False
    )
    again = json.loads(
        run(
            folder,
            "predict",
            "--run",
            "runs/points",
            "--data",
            "points.csv",
            "--json",
        )
    )
    assert again["predictions"] == first["predictions"]


def test_certify_looks_at_a_run_at_other_rows_and_at_a_model(folder):
    for place, more in (
        ("runs/classes", []),
        ("runs/classes", ["--data", "table.csv"]),
        ("runs/points/model.safetensors", ["--data", "double_moons"]),
        ("runs/points/model.safetensors", []),
    ):
        result = json.loads(
            run(folder, "certify", place, *more, "--samples", "10", "--json")
        )
        assert result["holds"] is True
        assert result["samples"] <= 10


def test_a_network_without_a_guarantee_is_not_an_error(folder):
    model = hdnn.Model(hdnn.Augment(2, 4), hdnn.MLP(4, 8), hdnn.SigmoidHead(4))
    io.save(model, folder / "mlp.safetensors")
    result = json.loads(run(folder, "certify", "mlp.safetensors", "--json"))
    assert result["guaranteed"] is False


def test_the_report_shows_every_run_and_escapes_names(folder):
    hostile = folder / "runs" / "<script>alert(1)"
    io_folder = folder / "runs" / "classes"
    hostile.mkdir(exist_ok=True)
    for name in ("config.toml", "metrics.json"):
        (hostile / name).write_bytes((io_folder / name).read_bytes())
    run(folder, "report", "--out", "all.html")
    page = (folder / "all.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<section") == 5
    assert "data:image/png;base64" in page
    assert "always answering" in page
    assert "Confusion table" in page
    assert "at least one direction of the gradient is not shrunk" in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page)
    for name in ("config.toml", "metrics.json"):
        (hostile / name).unlink()
    hostile.rmdir()


def test_the_report_replaces_its_own_file_and_no_other(folder):
    run(folder, "report", "runs/classes", "--out", "mine.html")
    run(folder, "report", "runs/points", "--out", "mine.html")
    assert "classes</a>" not in (folder / "mine.html").read_text()
    (folder / "other.html").write_text("<html>my page</html>")
    assert "--overwrite" in run(folder, "report", "--out", "other.html", code=2)


def test_a_damaged_run_is_a_sentence_on_the_page(folder, tmp_path):
    for name, content in (("open", None), ("torn", "{"), ("list", "[]")):
        place = tmp_path / name
        place.mkdir()
        config = (folder / "runs" / "classes" / "config.toml").read_bytes()
        (place / "config.toml").write_bytes(config)
        if content is not None:
            (place / "metrics.json").write_text(content)
    run(tmp_path, "report", ".")
    page = (tmp_path / "report.html").read_text()
    assert "has not ended" in page
    assert "cannot read" in page
    assert "is damaged" in page


def test_a_model_of_another_kind_is_refused(folder, tmp_path):
    place = tmp_path / "runs"
    place.mkdir()
    for name in ("config.toml", "metrics.json"):
        (place / name).write_bytes(
            (folder / "runs" / "classes" / name).read_bytes()
        )
    io.save(hdnn.H2(4, 2), place / "model.safetensors")
    error = run(
        folder, "predict", "--run", str(place), "--data", "table.csv", code=2
    )
    assert "columns" in error
