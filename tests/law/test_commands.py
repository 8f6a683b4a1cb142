"""Each command, called as a newcomer would: exit codes, files and basic facts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

pytest.importorskip("typer")

import hdnn
from hdnn.__main__ import main


def run(*arguments: str, folder: Path, code: int = 0) -> str:
    """What `hdnn` prints, or says if it fails, after it ended with that exit code."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(out), redirect_stderr(err):
        found = main(list(arguments))
    assert found == code, err.getvalue()
    return out.getvalue() if code == 0 else err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """With a table of classes and one of values, and a run on each."""
    folder = tmp_path_factory.mktemp("commands")
    draw = random.Random(0)
    for name in ("classes", "values"):
        lines = ["a,b,c,target"]
        for _ in range(60):
            a, b, c = (draw.gauss(0, 1) for _ in range(3))
            target = f"{a - 2 * c:.6f}" if name == "values" else "left" if a + b < 0 else "right"
            lines.append(f"{a:.6f},{b:.6f},{c:.6f},{target}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        table = ["--data", f"{name}.csv", "--target", "target", "--out", name, "--epochs", "10"]
        printed = json.loads(run("train", *table, "--json", folder=folder))
        assert printed["epochs"] == 10
    return folder


@pytest.mark.parametrize("name", ["classes", "values"])
def test_train_keeps_a_model_its_config_and_its_results_in_a_folder(folder, name):
    assert isinstance(hdnn.load(folder / name / "model.safetensors"), hdnn.Model)
    assert (folder / name / "config.toml").is_file()
    result = json.loads((folder / name / "metrics.json").read_text())
    if name == "classes":
        assert result["test_accuracy"] > 0.7
    else:
        assert result["test_r2"] > 0.5


def test_train_does_not_write_over_another_run(folder):
    table = ["--data", "values.csv", "--target", "target", "--out", "classes", "--epochs", "1"]
    before = (folder / "classes" / "metrics.json").read_bytes()
    run("train", *table, folder=folder, code=2)
    assert (folder / "classes" / "metrics.json").read_bytes() == before


def test_mistakes_are_one_line_and_exit_code_2(folder):
    for arguments in (
        ["train", "--data", "nowhere.csv", "--target", "target"],
        ["train", "--data", "classes.csv", "--target", "nothing"],
        ["predict", "--run", "nowhere", "--data", "classes.csv"],
        ["certify", "nowhere"],
    ):
        said = run(*arguments, folder=folder, code=2)
        assert "Traceback" not in said
        assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["classes", "values"])
def test_predict_writes_a_row_for_each_row(folder, name):
    out = f"{name}-predicted.csv"
    run("predict", "--run", name, "--data", f"{name}.csv", "--out", out, folder=folder)
    lines = (folder / out).read_text().splitlines()
    assert len(lines) == 61
    assert lines[0].split(",")[0] == "target"
    first = {line.split(",")[0] for line in lines[1:]}
    if name == "classes":
        assert first == {"left", "right"}
    else:
        assert all(abs(float(value)) < 20 for value in first)


def test_certify_measures_what_is_guaranteed(folder):
    found = json.loads(run("certify", "classes", "--json", folder=folder))
    assert found["holds"] is True
    assert found["smallest_norm"] >= 1 - 1e-9
    model = str(Path("classes") / "model.safetensors")
    assert json.loads(run("certify", model, "--json", folder=folder))["holds"] is True


def test_report_is_one_page_that_needs_no_network(folder):
    run("report", "classes", "values", "--out", "report.html", folder=folder)
    page = (folder / "report.html").read_text("utf-8")
    assert "<html" in page
    assert "classes" in page
    assert "values" in page
    assert 'src="http' not in page


def test_demo_trains_certifies_and_draws(tmp_path):
    found = json.loads(run("demo", "--epochs", "1", "--out", "demo", "--json", folder=tmp_path))
    assert found["smallest_bsm_norm"] >= 1 - 1e-9
    assert 0.3 < found["test_accuracy"] <= 1
    assert isinstance(hdnn.load(tmp_path / "demo" / "model.safetensors"), hdnn.Model)
    assert list((tmp_path / "demo").glob("*.png"))


def test_launch_trains_on_a_ring_by_processes_and_weights_keep_to_it(tmp_path):
    flags = ["--nodes", "4", "--data", "swiss_roll", "--epochs", "1", "--out", "ring", "--json"]
    found = json.loads(run("launch", *flags, folder=tmp_path))
    assert found["nodes"] == 4
    assert 0.3 < found["test_accuracy"] <= 1
    net = hdnn.load(tmp_path / "ring" / "model.safetensors").net
    m = net.features // 2
    assert net.K_p.shape[-1] == m
    size = m // 4
    for K in (net.K_p, net.K_q):
        blocks = K.unflatten(-1, (4, size)).unflatten(-3, (4, size))
        for i in range(4):
            assert not blocks[:, i, :, (i + 2) % 4].any()  # the node that is no neighbour
            assert blocks[:, i, :, (i + 1) % 4].any()
    assert json.loads(run("certify", "ring", "--json", folder=tmp_path))["holds"] is True


def test_reproduce_writes_figures_and_tables_of_the_paper(tmp_path):
    run("reproduce", "fig-exploding", "--out", "results", folder=tmp_path)
    written = {path.suffix for path in (tmp_path / "results").iterdir()}
    assert {".md", ".png"} <= written


def test_play_writes_its_page_to_a_file(tmp_path):
    run("play", "--out", "play.html", folder=tmp_path)
    assert "<html" in (tmp_path / "play.html").read_text("utf-8")


def test_info_tells_versions_and_hdnn_is_a_module_to_run(tmp_path):
    path = os.pathsep.join(map(str, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "hdnn", "info", "--json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["hdnn"] == hdnn.__version__


def test_help_names_every_command(tmp_path):
    said = run("--help", folder=tmp_path)
    for command in (
        *("demo", "train", "predict", "certify", "launch", "reproduce", "report", "play", "info"),
    ):
        assert command in said
