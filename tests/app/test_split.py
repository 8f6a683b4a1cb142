"""A table that is shared out to the nodes of a graph: trained on, predicted with, resumed."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")

import torch

import hdnn
from hdnn.__main__ import main
from hdnn.app import progress
from hdnn.app.runs import Run
from hdnn.app.tasks import graph, launched
from hdnn.base import cores as machine
from hdnn.data import table
from hdnn.distributed import Config, read_graph, train
from hdnn.distributed.graph.file import graph_of
from hdnn.serialization import read
from said import files, started_alone, told

PLANT = """
names = ["pump", "valve", "tank"]
R = [["pump", "valve"], ["valve", "tank"]]
[columns]
flow = "pump"
tank = ["kind", "level"]
"""
QUICK = ["--layers", "2", "--epochs", "2", "--quiet"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started_alone(monkeypatch)
    random = np.random.default_rng(0)
    lines = ["time,flow,kind,level,load,fault"]
    for k, (a, b) in enumerate(random.normal(size=(50, 2))):
        kind, level = ("red", "blue")[k % 2], "" if k == 7 else b
        lines.append(f"{k},{a},{kind},{level},{a - b},{'leak' if a + b > 0 else 'fine'}")
    Path("log.csv").write_text("\n".join(lines) + "\n")
    Path("plant.toml").write_text(PLANT)


def run(*words):
    with redirect_stdout(io.StringIO()) as printed:
        code = main([*words])
    return code, printed.getvalue()


def asked(capsys, *words):
    code, printed = run(*words, "--json")
    assert code == 0, capsys.readouterr().err
    capsys.readouterr()
    return json.loads(printed)


SPLIT = ("graph", "split", "plant.toml", "--data", "log.csv", "--target", "fault")
TRAIN = ("train", "--graph", "plant.toml", "--data", "log.csv")


def test_each_node_gets_the_columns_that_are_its_own(capsys):
    code, printed = run(*SPLIT, "--out", "nodes")
    assert code == 0
    said = capsys.readouterr().err
    assert "no node of plant.toml has the columns 'time', 'load': left out" in said
    assert "hdnn launch --graph nodes/graph.toml --data nodes" in printed
    plant = read_graph("nodes/graph.toml")
    assert plant.names == ("pump", "valve", "tank")
    assert plant.sizes == (2, 2, 4)  # twice their inputs, and at least four features
    columns = table.Columns.from_json(json.loads(Path("nodes/columns.json").read_text()), Path())
    facts = json.loads(Path("nodes/nodes.json").read_text())
    names = ["flow", "kind=blue", "kind=red", "level", "level is missing"]
    assert columns.names == names
    assert facts["inputs"] == {"pump": ["flow"], "valve": [], "tank": names[1:]}
    assert facts["placement"] == [0, 4, 5, 14, 15]  # p of all nodes, then q
    whole = torch.from_numpy(columns.of(table.read("log.csv")))
    for part, rows in (("train", 40), ("test", 10)):
        pump, valve, tank = (
            read(Path(f"nodes/{part}/node-{name}.safetensors"))[1]["x"] for name in plant.names
        )
        t = read(Path(f"nodes/{part}/labels.safetensors"))[1]["t"]
        assert (len(t), pump.shape, valve.shape, tank.shape) == (
            *(rows, (rows, 4), (rows, 4), (rows, 8)),
        )
        assert not valve.any()
        assert not pump[:, 1:].any()
        where = [int((whole[:, 0] == flow).nonzero()[0]) for flow in pump[:, 0]]
        assert torch.equal(tank[:, [0, 1, 6, 7]], whole[where, 1:])
        assert not tank[:, 2:6].any()


def test_a_run_on_shared_out_columns_is_the_same_either_way_and_is_asked_with_the_table(capsys):
    assert run(*SPLIT, "--out", "nodes")[0] == 0
    by_hand = ("train", "--graph", "nodes/graph.toml", "--data", "nodes", *QUICK, "--out", "a")
    assert run(*by_hand)[0] == 0
    assert run(*TRAIN, "--target", "fault", *QUICK)[0] == 0
    folder = Path("runs/plant-log-fault-h2-2-0")
    one, other = (hdnn.load(home / "model.safetensors") for home in (Path("a"), folder))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    about = Run(folder).options()
    assert (about["data"], about["target"]) == (str(Path("log.csv").absolute()), "fault")
    assert '[columns]\n"flow" = "pump"' in Run(folder).config_text()
    known = Run(folder).result()
    assert (known["columns"], known["inputs"]) == (3, 5)
    for data in ("nodes", str(folder / "data")):
        found = asked(capsys, "predict", "--run", str(folder), "--data", data)
        assert found["accuracy"] == pytest.approx(known["test_accuracy"])
    found = asked(capsys, "predict", "--run", str(folder), "--data", "log.csv", "--proba")
    right = (40 * known["train_accuracy"] + 10 * known["test_accuracy"]) / 50
    assert found["accuracy"] == pytest.approx(right)
    assert found["probabilities"].keys() == {"fine", "leak"}
    assert asked(capsys, "certify", str(folder))["samples"] == 10
    folder.rename("moved")
    assert asked(capsys, "certify", "moved")["samples"] == 10


def test_values_are_learned_on_a_graph_too(capsys):
    known = asked(capsys, *TRAIN, "--target", "load", "--drop", "fault", *QUICK, "--out", "r")
    found = asked(capsys, "predict", "--run", "r", "--data", "r/data/test")
    assert found["rmse"] == pytest.approx(known["test_rmse"], rel=1e-4)
    assert known["test_r2"] < 1
    found = asked(capsys, "predict", "--run", "r", "--data", "log.csv")
    squares = (40 * known["train_rmse"] ** 2 + 10 * known["test_rmse"] ** 2) / 50
    assert found["rmse"] == pytest.approx(squares**0.5, rel=1e-4)
    assert run("predict", "--run", "r", "--data", "r/data", "--proba")[0] == 2
    assert "no probabilities" in told(capsys)


def test_a_run_on_a_table_goes_on_and_is_replaced(capsys):
    flags = (*TRAIN, "--target", "fault", *QUICK)
    assert run(*flags)[0] == 0
    folder = Path("runs/plant-log-fault-h2-2-0")
    before = (folder / "model.safetensors").read_bytes()
    (folder / "metrics.json").unlink()
    for again in (flags, ("train", "--quiet", "--out", str(folder))):
        assert run(*again, "--resume")[0] == 0
        assert (folder / "model.safetensors").read_bytes() == before
    capsys.readouterr()
    Path("other.csv").write_bytes(Path("log.csv").read_bytes())
    for words, name in (
        ((*TRAIN, "--target", "load"), "target"),
        (("train", "--graph", "plant.toml", "--data", "other.csv", "--target", "fault"), "data"),
    ):
        assert run(*words, "--resume", "--out", str(folder))[0] == 2
        assert f"has {name} = " in told(capsys)
    assert run(*flags)[0] == 2
    assert "holds a run already" in told(capsys)
    assert run(*flags, "--overwrite", "--seed", "3", "--out", str(folder))[0] == 0
    assert Run(folder).config().seed == 3


@pytest.mark.parametrize(
    ("plant", "flags", "words"),
    [
        ("", ["--target", "fault"], "does not say how many nodes"),
        (PLANT.split("[columns]")[0], ["--target", "fault"], "add [columns] and lines such as"),
        (PLANT, [], "say with --target"),
        (PLANT, ["--target", "nothing"], "has no column 'nothing'"),
        (PLANT, ["--target", "flow"], "gives the target 'flow' to a node"),
        (PLANT + 'volume = "pump"', ["--target", "fault"], "has no column 'volume'"),
        ("sizes = 1\n" + PLANT, ["--target", "fault"], "node tank has 4 inputs"),
    ],
)
def test_a_table_that_does_not_fit_is_one_sentence_and_leaves_nothing(plant, flags, words, capsys):
    Path("plant.toml").write_text(plant)
    before = files(Path())
    for command in (["train", "--graph"], ["launch", "--graph"], ["graph", "split"]):
        assert run(*command, "plant.toml", "--data", "log.csv", *flags)[0] == 2
        assert words in told(capsys)
        assert files(Path()) == before


def test_node_files_are_replaced_only_if_that_is_asked_for(capsys):
    assert run(*SPLIT, "--out", "nodes")[0] == 0
    capsys.readouterr()
    assert run(*SPLIT, "--out", "nodes")[0] == 2
    assert "replace them by --overwrite" in told(capsys)
    Path("plant.toml").write_text(PLANT.replace('"valve"', '"hose"'))
    assert run(*SPLIT, "--out", "nodes", "--overwrite")[0] == 0
    assert not Path("nodes/train/node-valve.safetensors").exists()
    Path("nodes/mine.txt").write_text("mine")
    capsys.readouterr()
    assert run(*SPLIT, "--out", "nodes", "--overwrite")[0] == 2
    assert "holds mine.txt" in told(capsys)
    assert run(*SPLIT, "--out", "log.csv")[0] == 2
    assert "is a file" in told(capsys)


def test_a_table_for_a_ring_or_for_several_processes_is_refused(capsys, monkeypatch):
    assert run("launch", "--nodes", "3", "--data", "log.csv", "--target", "fault")[0] == 2
    assert "--graph FILE.toml with [columns]" in told(capsys)
    assert run("train", "--graph", "plant.toml", "--target", "fault")[0] == 2
    assert "--target is not for a training on a graph" in told(capsys)
    monkeypatch.setenv("WORLD_SIZE", "3")
    given = {"graph": "plant.toml", "data": "log.csv", "target": "fault"}
    with pytest.raises(hdnn.HDNNError, match="hdnn graph split"):
        graph.asked(graph.PartTask, given)


# Cores, and time left


def test_a_launch_shows_the_time_that_is_left(monkeypatch):
    shown = []
    monkeypatch.setattr(progress.terminal, "at_terminal", lambda: True)
    bar = progress.TrainingBar("ring", True, epochs=50)
    monkeypatch.setattr(bar, "show", lambda step, steps, words, **_: shown.append(words))
    bar.tell({"epoch": 1, "loss": 0.5, "accuracy": 0.75, "seconds_left": 150.2})
    bar.tell({"epoch": 50, "loss": 0.5, "seconds_left": 0.0})
    assert shown == [
        "loss 0.5000, accuracy 75.0%, epoch 1/50, 3 min left",
        "loss 0.5000, epoch 50/50",
    ]
    words = {0.2: "1 s", 99: "99 s", 100: "2 min", 3600: "1 h", 3700: "1 h 2 min", 86400: "24 h"}
    assert {seconds: progress.time_text(seconds) for seconds in words} == words


def test_the_root_tells_how_long_the_rest_will_take():
    told = []
    config = Config(graph={"nodes": 2, "R": [[0, 1]]}, options={"epochs": 2, "batch": 2000})
    train(config, graph_of(config.graph), tell=told.append)
    assert [news["epoch"] for news in told] == [1, 2]
    assert told[0]["seconds_left"] > told[1]["seconds_left"] == 0


@pytest.mark.parametrize(
    ("flags", "found", "words"),
    [
        ([], 2, "3 processes, one for each node, share 2 cores"),
        ([], 1, "share 1 core and will wait for each other; --parts 1 gives the same results"),
        ([], 3, ""),
        (["--parts", "3"], 2, ""),
        (["--replicas", "2"], 3, "6 processes"),
    ],
)
def test_fewer_parts_are_proposed_where_nodes_outnumber_cores(flags, found, words, monkeypatch):
    said = []
    monkeypatch.setattr(launched, "cores", lambda: found)
    monkeypatch.setattr(launched.terminal, "say", said.append)
    monkeypatch.setattr(
        launched.LaunchedTask, "_start", lambda *_: launched.Ended(2, "", "enough", 0)
    )
    plain = ["launch", "--graph", "plant.toml", "--data", "swiss_roll"]
    assert run(*plain, *flags)[0] == 2
    notes = [one for one in said if str(one).startswith("note")]
    assert bool(notes) == bool(words)
    assert words in "".join(notes)
    assert run(*plain, *flags, "--quiet")[0] == 2
    assert len([one for one in said if str(one).startswith("note")]) == len(notes)


def test_cores_are_those_that_this_process_may_use(tmp_path, monkeypatch):
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(machine, "LIMIT", limit)
    whole = machine.cores()
    assert whole >= 1
    for text, expected in (
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("150000 100000", min(2, whole)),
        ("max 100000", whole),
        ("", whole),
    ):
        limit.write_text(text)
        assert machine.cores() == expected
