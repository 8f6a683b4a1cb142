"""Runs on a graph and folders of seeds are predicted with, certified and reported as any run is."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")

import torch
from safetensors.torch import save_file

import hdnn
from hdnn.__main__ import main
from hdnn.app.report import page
from hdnn.app.runs import Run, find_runs
from hdnn.app.tasks.answers import Answer, together
from hdnn.distributed.graph import file as gf
from hdnn.errors import CheckpointError
from hdnn.serialization import load
from kept.small import FILES, without_pictures
from said import told

QUICK = ["--layers", "2", "--epochs", "2", "--quiet"]
RING4 = [[0, 1], [1, 2], [2, 3], [3, 0]]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run on a graph, runs on node files, and folders of seeds."""
    folder = tmp_path_factory.mktemp("asked")
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 2))
    for name, target in (("classes", np.where(x[:, 0] > 0, "up", "down")), ("values", x @ [1, 2])):
        rows = [f"{a},{b},{t}" for (a, b), t in zip(x, target, strict=True)]
        (folder / f"{name}.csv").write_text("\n".join(["a,b,t", *rows]) + "\n")
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.chdir(folder)
        Path("ring.toml").write_text(gf.to_toml({"nodes": 4, "R": RING4}))
        write_nodes(Path("nodes"))
        graph = ["train", "--graph", "ring.toml", "--batch", "2000", *QUICK]
        assert main([*graph, "--data", "double_moons", "--out", "ring"]) == 0
        assert main([*graph, "--data", "nodes", "--batch", "8", "--out", "by-node"]) == 0
        for name in ("classes", "values"):
            data = ["--data", f"{name}.csv", "--target", "t", "--features", "4"]
            assert main(["train", *data, *QUICK, "--seeds", "3", "--out", f"{name}-all"]) == 0
    return folder


@pytest.fixture(autouse=True)
def in_that_folder(place, monkeypatch):
    monkeypatch.chdir(place)


def write_nodes(home):
    for part, count in (("train", 24), ("test", 8)):
        (home / part).mkdir(parents=True)
        x = torch.randn(count, 4, 2, generator=torch.Generator().manual_seed(count))
        for node in range(4):
            path = home / part / f"node-{node:05d}.safetensors"
            save_file({"x": x[:, node].contiguous()}, path)
        t = (x[:, 0, 0] + x[:, 2, 1] > 0).long()
        save_file({"t": t}, home / part / "labels.safetensors")
    (home / "classes.json").write_text("2\n")


def asked(capsys, *command):
    capsys.readouterr()
    code = main([*map(str, command), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def columns_of(text):
    rows = [*csv.reader(io.StringIO(text))]
    return dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))


# Runs on a graph


def test_a_run_on_a_graph_predicts_as_it_was_tested(capsys):
    known = Run("ring").metrics()
    found = asked(capsys, "predict", "--run", "ring", "--data", "double_moons", "--proba")
    assert found["accuracy"] == pytest.approx(known["test_accuracy"], abs=1e-3)
    assert found["probabilities"].keys() == {"0", "1"}
    Path("points.csv").write_text("x1,x2\n0.5,1\n-1,0\n")
    found = asked(capsys, "predict", "--run", "ring", "--data", "points.csv")
    y = load("ring/model.safetensors").predict(torch.tensor([[0.5, 1.0], [-1.0, 0.0]]))
    assert found["predictions"] == [str(k) for k in y.tolist()]
    Path("other.csv").write_text("x1,b\n0.5,1\n")
    assert main(["predict", "--run", "ring", "--data", "other.csv"]) == 2
    assert "has no column 'x2'" in told(capsys)


def test_a_run_on_node_files_is_asked_about_node_files(capsys):
    known = Run("by-node").metrics()
    for data in ("nodes", "nodes/test"):
        found = asked(capsys, "predict", "--run", "by-node", "--data", data)
        assert found["accuracy"] == pytest.approx(known["test_accuracy"], abs=1e-3)
        assert found["rows"] == 8
    assert asked(capsys, "predict", "--run", "by-node", "--data", "nodes/train")["rows"] == 24
    for data, words in (("classes.csv", "which node has which column"), (".", "no node files")):
        assert main(["predict", "--run", "by-node", "--data", data]) == 2
        assert words in told(capsys)


def test_a_run_on_a_graph_is_certified_as_it_was_at_its_end(capsys):
    for name, samples in (("ring", 1000), ("by-node", 8)):
        found, known = asked(capsys, "certify", name), Run(name).result()["certificate"]
        assert found["samples"] == samples
        assert found["holds"] is True
        assert found["smallest_norm"] == pytest.approx(known["smallest_norm"], rel=1e-9)
    assert asked(capsys, "certify", "ring", "--data", "swiss_roll")["samples"] == 1000
    assert asked(capsys, "certify", "by-node", "--data", "nodes/train")["samples"] == 24


def test_an_epoch_of_a_graph_is_a_line_of_its_log_also_after_a_resume():
    log, known = Run("ring").log(), Run("ring").metrics()
    assert [entry["epoch"] for entry in log] == [1, 2]
    assert log[-1]["loss"] == known["loss"]
    before = Path("ring/log.jsonl").read_bytes()
    for wrong in (None, before + b'{"epoch": 3}\n', before[:-5]):
        Path("ring/metrics.json").unlink()
        if wrong is None:  # as older versions leave it
            Path("ring/log.jsonl").unlink()
        else:
            Path("ring/log.jsonl").write_bytes(wrong)
        assert main(["train", "--resume", "--out", "ring", "--quiet"]) == 0
        assert Path("ring/log.jsonl").read_bytes() == before


def test_a_run_on_a_graph_of_an_old_version_is_asked_too(tmp_path, capsys):
    run = tmp_path / "old"
    (run).mkdir()
    for name in ("config.json", "metrics.json", "model.safetensors"):
        (run / name).write_bytes((FILES / "done" / "graph" / name).read_bytes())
    known = Run(run).metrics()
    found = asked(capsys, "predict", "--run", run, "--data", "double_circles")
    assert found["accuracy"] == pytest.approx(known["test_accuracy"], abs=1e-3)
    assert asked(capsys, "certify", run)["holds"] is True
    (run / "model.safetensors").unlink()
    assert main(["certify", str(run)]) == 2
    assert "has no model in one file" in told(capsys)
    (run / "metrics.json").unlink()
    assert main(["predict", "--run", str(run), "--data", "points.csv"]) == 2
    assert f"hdnn launch --resume --out {run}" in told(capsys)


# Folders of seeds


def test_a_folder_of_seeds_predicts_the_mean_of_its_runs(capsys):
    each = [
        asked(capsys, "predict", "--run", one, "--data", "classes.csv", "--proba")
        for one in ("classes-all/seed-0", "classes-all/seed-1", "classes-all/seed-2")
    ]
    found = asked(capsys, "predict", "--run", "classes-all", "--data", "classes.csv", "--proba")
    mean = np.mean([[one["probabilities"][c] for c in ("down", "up")] for one in each], axis=0)
    assert found["runs"] == 3
    assert np.array(list(found["probabilities"].values())) == pytest.approx(mean)
    assert found["predictions"] == [("down", "up")[k] for k in mean.argmax(0)]
    votes = zip(found["predictions"], *(one["predictions"] for one in each), strict=True)
    assert found["agreement"] == pytest.approx([row[1:].count(row[0]) / 3 for row in votes])
    assert main(["predict", "--run", "classes-all", "--data", "classes.csv"]) == 0
    assert columns_of(capsys.readouterr().out).keys() == {"t", "agreement(t)"}


def test_values_of_a_folder_of_seeds_come_with_their_spread(capsys):
    each = [
        asked(capsys, "predict", "--run", f"values-all/seed-{k}", "--data", "values.csv")
        for k in range(3)
    ]
    found = asked(capsys, "predict", "--run", "values-all", "--data", "values.csv")
    values = np.array([one["predictions"] for one in each])
    assert found["predictions"] == pytest.approx(values.mean(0))
    assert found["spread"] == pytest.approx(values.std(0, ddof=1))
    assert found["rmse"] < np.mean([one["rmse"] for one in each])
    flags = ["predict", "--run", "values-all", "--data", "values.csv", "--out", "told.csv"]
    assert main(flags) == 0
    assert "60 predictions of t by 3 runs together in told.csv" in capsys.readouterr().out
    assert columns_of(Path("told.csv").read_text()).keys() == {"t", "std(t)"}
    assert main(["predict", "--run", "values-all", "--data", "values.csv", "--proba"]) == 2
    assert "no probabilities" in told(capsys)


def test_a_folder_of_seeds_is_certified_run_by_run(capsys):
    found = asked(capsys, "certify", "classes-all", "--samples", "5")
    norms = {name: one["smallest_norm"] for name, one in found["runs"].items()}
    assert [*norms] == ["seed-0", "seed-1", "seed-2"]
    assert found["smallest_norm"] == min(norms.values())
    assert norms[found["smallest_in"]] == found["smallest_norm"]
    assert (found["broken"], found["unknown"]) == ([], "")
    assert main(["certify", "classes-all", "--samples", "5"]) == 0
    printed = capsys.readouterr().out
    assert f"in {found['smallest_in']}" in printed
    assert "guaranteed for all 3 runs, and it holds" in printed
    assert printed.startswith("In each of the 3 runs, from every layer on, some direction of the")


def test_runs_that_do_not_belong_together_have_no_mean(tmp_path, capsys):
    (tmp_path / "mixed").mkdir()
    for k, name in enumerate(("classes", "values")):
        (tmp_path / "mixed" / f"seed-{k}").symlink_to(Path(f"{name}-all/seed-{k}").absolute())
    asking = ["predict", "--run", str(tmp_path / "mixed"), "--data", "classes.csv"]
    assert main(asking) == 2
    assert "so they have no mean" in told(capsys)
    (tmp_path / "mixed" / "seed-1").unlink()
    # As 2 seeds leave it where 3 seeds of another training had been.
    shutil.copytree("classes-all/seed-1", tmp_path / "mixed" / "seed-1")
    assert main(asking) == 0
    config = tmp_path / "mixed" / "seed-1" / "config.toml"
    config.write_text(config.read_text().replace("epochs = ", "epochs = 1"))
    capsys.readouterr()
    assert main(asking) == 2
    found = told(capsys)
    assert "seed-1 has epochs = 1" in found
    assert "so they have no mean" in found


def test_networks_of_other_classes_have_no_mean():
    one, other = (Answer("t", list(names), np.zeros((1, 2)), np.zeros(1)) for names in ("ab", "ac"))
    with pytest.raises(CheckpointError, match="predict different things"):
        together(["one", "other"], [one, other], proba=False)


def test_a_run_that_is_not_complete_is_not_left_out_of_a_mean(tmp_path, capsys):
    for k in range(2):
        (tmp_path / f"seed-{k}").mkdir()
        config = Path(f"classes-all/seed-{k}/config.toml").read_bytes()
        (tmp_path / f"seed-{k}" / "config.toml").write_bytes(config)
    for command in (["certify", str(tmp_path)], ["predict", "--run", str(tmp_path)]):
        assert main([*command, "--data", "classes.csv"]) == 2
        assert f"hdnn train --resume --out {tmp_path / 'seed-0'}" in told(capsys)


def test_a_folder_of_several_runs_is_no_run(capsys):
    assert main(["predict", "--run", ".", "--data", "classes.csv"]) == 2
    assert "name one of the runs in it, such as by-node" in told(capsys)


# Reports


def test_runs_of_all_kinds_are_found_and_reported(tmp_path):
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "config.json").write_text('{"model_type": "bert"}')
    found = find_runs([".", tmp_path, "ring"])
    names = [str(run.folder) for run in found]
    seeds = [f"{name}-all/seed-{k}" for name in ("classes", "values") for k in range(3)]
    assert names == ["by-node", *seeds[:3], "ring", *seeds[3:]]
    assert [run.group == Run("classes-all") for run in found] == [n in seeds[:3] for n in names]
    with pytest.raises(hdnn.HDNNError, match="there is no run"):
        find_runs([tmp_path])
    text = page(found)
    assert "damaged" not in text
    assert all(name in text for name in names)
    about = Run("ring").options()
    assert (about["features"], about["epochs"]) == (8, 2)
    assert about["graph"].startswith("4 nodes, 4 links")
    assert 'graph = "4 nodes, 4 links' in Run("ring").config_text()
