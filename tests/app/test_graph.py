"""`hdnn launch` and `hdnn train --graph`: trainings on a graph as runs like any other."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("pandas")

import pandas as pd

from hdnn import io
from hdnn.__main__ import main

PLANT = """
names = ["pump", "valve", "tank"]
edges = [["pump", "valve"], ["valve", "tank"]]
columns = {pump = ["flow", "power"], valve = ["angle"], tank = ["level", "kind"]}
"""


@pytest.fixture(autouse=True)
def plant(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("plant.toml").write_text(PLANT)
    # A folder with data from elsewhere may hold programs, which must not be run.
    for name in ("torch", "json", "hdnn", "sitecustomize"):
        Path(f"{name}.py").write_text("raise SystemExit('it was run')\n")
    random = np.random.default_rng(0)
    columns = dict(
        zip(
            ("flow", "power", "angle", "level"),
            random.normal(size=(4, 120)),
            strict=True,
        )
    )
    frame = pd.DataFrame({**columns, "kind": random.choice(["a", "b"], 120)})
    frame["fault"] = np.where(frame.flow + frame.level > 0, "yes", "no")
    frame.to_csv("log.csv", index=False)
    return tmp_path


def run(capsys, *arguments: str, code: int = 0) -> str:
    result = main(list(arguments))
    printed = capsys.readouterr()
    assert result == code, printed.err
    return printed.out if code == 0 else printed.err


def test_a_graph_without_data_says_what_it_needs(capsys):
    facts = json.loads(run(capsys, "launch", "--graph", "plant.toml", "--json"))
    assert facts["nodes"] == 3
    assert facts["missing_links"] == []
    assert facts["columns"]["level"] == 2
    Path("bad.toml").write_text(
        "nodes = 3\nedges = [[0, 1], [1, 2]]\nR = [[0, 1], [0, 2]]\n"
    )
    facts = json.loads(run(capsys, "launch", "--graph", "bad.toml", "--json"))
    assert facts["missing_links"]


@pytest.mark.slow
def test_a_table_is_shared_out_to_nodes_and_its_run_predicts(capsys):
    options = [
        "--graph",
        "plant.toml",
        "--data",
        "log.csv",
        "--target",
        "fault",
        "--out",
        "run",
    ]
    metrics = json.loads(
        run(
            capsys,
            "launch",
            *options,
            "--parts",
            "2",
            "--epochs",
            "5",
            "--json",
        )
    )
    assert metrics["processes"] == 2
    assert "always answering" in metrics["baseline"]
    assert metrics["certificate"]["holds"] is True
    config = tomllib.loads(Path("run/config.toml").read_text())["launch"]
    assert config["graph"]["names"] == ["pump", "valve", "tank"]
    answer = json.loads(
        run(capsys, "predict", "--run", "run", "--data", "log.csv", "--json")
    )
    assert answer["rows"] == 120
    assert json.loads(run(capsys, "certify", "run", "--json"))["holds"] is True
    run(capsys, "report", "run")
    assert "3 nodes" in run(capsys, "launch", "--resume", "--out", "run")


def test_one_process_trains_the_same_as_a_part_of_torchrun(capsys):
    options = ["--data", "double_moons", "--epochs", "1", "--layers", "2"]
    Path("ring.toml").write_text(
        "nodes = 4\nR = [[0, 1], [1, 2], [2, 3], [3, 0]]\n"
    )
    run(capsys, "train", "--graph", "ring.toml", *options, "--out", "alone")
    run(capsys, "train", "--graph", "ring.toml", *options, "--out", "again")
    first, second = (
        io.load_tensors(f"{name}/model.safetensors")[0]
        for name in ("alone", "again")
    )
    assert all(first[name].equal(tensor) for name, tensor in second.items())
    error = run(
        capsys,
        "train",
        "--graph",
        "ring.toml",
        *options,
        "--patience",
        "2",
        code=2,
    )
    assert "--patience" in error


def test_a_column_without_a_node_is_named(capsys):
    Path("half.toml").write_text(PLANT.replace(', "kind"', ""))
    options = ["--graph", "half.toml", "--data", "log.csv", "--target", "fault"]
    assert "'kind'" in run(capsys, "launch", *options, code=2)
    assert not Path("runs").exists()
