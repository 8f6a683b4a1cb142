"""The commands, from a table to a report, and every way to get them wrong."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import random
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("typer")

import numpy as np
import torch

import hdnn
from hdnn.__main__ import main
from hdnn.app import progress, terminal
from hdnn.app.commands import info, reproduce
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run
from hdnn.app.tasks import kinds
from hdnn.app.tasks import table as table_task
from hdnn.base import memory
from hdnn.base.progress import ProgressLine
from hdnn.data.table import split
from hdnn.training import Moment, fit, fit_multilevel, schedule
from said import files, told, trained_elsewhere

QUICK = ["--layers", "2", "--epochs", "2"]


def table(rows=40, *, kind="classes", seed=0):
    """A small CSV: three numbers, and a target that depends on them."""
    draw = random.Random(seed)
    lines = ["a,b,c,target"]
    for _ in range(rows):
        a, b, c = (draw.gauss(0, 1) for _ in range(3))
        target = ("left" if a + b < 0 else "right") if kind == "classes" else f"{a - 2 * c:.6f}"
        lines.append(f"{a:.6f},{b:.6f},{c:.6f},{target}")
    return "\n".join(lines) + "\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a table and a run of each kind."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "matplotlib", None)
        Path("classes.csv").write_text(table())
        Path("values.csv").write_text(table(kind="values"))
        for name in ("classes", "values"):
            flags = ["--data", f"{name}.csv", "--target", "target", "--out", name, *QUICK]
            assert main(["train", *flags]) == 0
    return folder


# What works


def hard_table(name):
    """Data that no linear model can learn: 1000 rows, and which of them are classes."""
    datasets = pytest.importorskip("sklearn.datasets")
    if name == "circles":
        return datasets.make_circles(1000, noise=0.1, factor=0.5, random_state=0)
    if name == "friedman1":
        return datasets.make_friedman1(1000, noise=1.0, random_state=0)
    X = np.random.default_rng(0).uniform(-1, 1, (1000, int(name[-1])))
    return X, (X > 0).sum(1) % 2


# At least so much better than a linear model, as a fraction of 1: accuracy, or R^2.
HARD = {"circles": 0.4, "xor3": 0.35, "friedman1": 0.15}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", HARD)
def test_both_doors_learn_what_no_linear_model_can_and_agree(name, capsys):
    linear_model = pytest.importorskip("sklearn.linear_model")
    X, y = hard_table(name)
    values = name == "friedman1"
    cells = [*([f"{x:.9g}" for x in row] for row in X)]
    lines = [",".join([*row, str(t)]) for row, t in zip(cells, y.tolist(), strict=True)]
    header = ",".join([*(f"x{i}" for i in range(X.shape[1])), "target"])
    Path("t.csv").write_text("\n".join([header, *lines]) + "\n")
    door = hdnn.HDNNRegressor if values else hdnn.HDNNClassifier
    line = linear_model.LinearRegression if values else linear_model.LogisticRegression
    from_cli, from_python, linear = [], [], []
    for seed in range(2):
        flags = ["--data", "t.csv", "--target", "target", "--seed", str(seed), "--json"]
        assert main(["train", *flags]) == 0
        result = json.loads(capsys.readouterr().out)
        from_cli.append(result["test_r2" if values else "test_accuracy"])
        train, test = split(y, 0.2, seed, classes=not values)
        ours = door(layers=result["layers"], random_state=seed).fit(X[train], y[train])
        from_python.append(ours.score(X[test], y[test]))
        linear.append(line().fit(X[train], y[train]).score(X[test], y[test]))
    cli_mean, python_mean = np.mean(from_cli), np.mean(from_python)
    assert min(cli_mean, python_mean) > np.mean(linear) + HARD[name]
    # The file has nine digits of the numbers, and a training can make a row or two of that.
    assert cli_mean == pytest.approx(python_mean, abs=0.006)


OLD_RUN = """[train]
data = "t.csv"
target = "target"
task = "classification"
test-fraction = 0.2
layers = 2
features = 16
T = 1.0
init = "scaled"
batch = 64
epochs = 1
learning-rate = 0.02
weight-decay = 2.0
solver = "newton"
ridge = 0.01
"""


@pytest.mark.usefixtures("no_pictures")
def test_a_run_of_before_goes_on_with_penalties_that_are_not_divided(capsys):
    Path("t.csv").write_text(table())
    Path("old").mkdir()
    Path("old/config.toml").write_text(OLD_RUN)
    old = Run("old").config()
    options = old.fit_options(32)
    assert (options["weight_decay"], options["ridge"]) == (2.0, 0.01)
    assert [old.scaling, TableConfig.of({"data": "t.csv"}).scaling] == ["deviation", "bounded"]
    flags = ["--resume", "--out", "old", "--weight-decay", "2.0", "--json"]
    assert main(["train", *flags]) == 0
    assert capsys.readouterr().err == ""
    assert main(["train", *flags, "--penalties", "sum"]) == 2
    assert "has penalties = 'mean', not 'sum'" in told(capsys)


@pytest.mark.usefixtures("no_pictures")
def test_penalties_of_a_file_mean_what_those_of_the_estimators_do_and_that_is_said(capsys):
    Path("t.csv").write_text(table())
    Path("old.toml").write_text(OLD_RUN)
    train = ["train", "--data", "t.csv", "--target", "target", *QUICK, "--weight-decay", "2"]
    for number, (flags, decay, words) in enumerate(
        [
            (train, 2 / 32, "are divided by its rows"),
            ([*train, "--penalties", "sum"], 2 / 32, ""),
            ([*train, "--penalties", "mean"], 2.0, ""),
            (["train", "--config", "old.toml"], 2.0, "old.toml has weight-decay or ridge"),
            (["train", "--config", "old.toml", "--penalties", "sum"], 2 / 32, ""),
        ]
    ):
        assert main([*flags, "--out", f"run{number}", "--json"]) == 0
        said = capsys.readouterr().err
        assert words in said
        assert said.count("\n") == bool(words)
        assert Run(f"run{number}").config().fit_options(32)["weight_decay"] == decay


def test_a_planar_run_has_everything_in_its_folder(capsys):
    pytest.importorskip("matplotlib")
    flags = ["--data", "swiss_roll", "--network", "verlet", *QUICK, "--json"]
    assert main(["train", *flags]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    folder = Path("runs/swiss_roll-verlet-2-0")
    assert {p.name for p in folder.iterdir()} == {
        "config.toml",
        "columns.json",
        "log.jsonl",
        "checkpoint.safetensors",
        "model.safetensors",
        "metrics.json",
        "decision_regions.png",
        "training.png",
        "bsm_norms.png",
    }
    assert json.loads((folder / "metrics.json").read_text()) == result
    assert result["certificate"]["holds"]
    assert result["certificate"]["samples"] == 1000
    assert len((folder / "log.jsonl").read_text().splitlines()) == 2
    data = hdnn.data.planar.swiss_roll(seed=0)
    model = hdnn.load(folder / "model.safetensors")
    assert isinstance(model, hdnn.Model)
    accuracy = (model.predict(data.x_test) == data.t_test).double().mean().item()
    assert accuracy == result["test_accuracy"]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    "network", ["h1", "MS1", "ms2", "ms3", "implicit-h2", "mlp", "yoshida4", "midpoint"]
)
def test_every_network_trains_and_is_certified(network, capsys):
    Path("t.csv").write_text(table(20))
    flags = ["--data", "t.csv", "--target", "target", "--network", network, "--features", "4"]
    assert main(["train", *flags, *QUICK, "--dtype", "float64", "--out", "r"]) == 0
    printed = capsys.readouterr().out
    assert "hdnn[plot]" in printed
    assert ("no guarantee" if network == "mlp" else ">= 1: holds") in printed
    assert main(["certify", "--run", "r", "--data", "t.csv", "--samples", "5"]) == 0
    printed = capsys.readouterr().out
    assert "5 rows of t.csv" in printed
    assert "0 .. 0" in printed


@pytest.mark.usefixtures("no_pictures")
def test_several_seeds_give_mean_and_spread(capsys):
    flags = ["--data", "double_moons", *QUICK, "--seeds", "3", "--seed", "4"]
    assert main(["train", *flags, "--out", "all", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    accuracies = [run["test_accuracy"] for run in result["runs"]]
    assert [run["seed"] for run in result["runs"]] == [4, 5, 6]
    assert result["summary"]["test_accuracy"]["mean"] == pytest.approx(sum(accuracies) / 3)
    assert {p.name for p in Path("all").iterdir()} == {"seed-4", "seed-5", "seed-6"}
    assert main(["train", *flags, "--out", "all", "--resume"]) == 0  # all are there already
    assert "mean" in capsys.readouterr().out


@pytest.mark.usefixtures("no_pictures")
def test_a_config_file_equals_the_flags_and_flags_override_it(capsys):
    Path("c.toml").write_text('[train]\ndata = "double_moons"\nlayers = 3\nepochs = 1\nseed = 2\n')
    assert main(["train", "--config", "c.toml", "--layers", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["layers"], result["seed"], result["epochs"]) == (2, 2, 1)
    saved = Path("runs/double_moons-h2-2-2/config.toml")
    assert main(["train", "--config", str(saved), "--out", "again", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["test_accuracy"] == result["test_accuracy"]
    assert Path("again/config.toml").read_bytes() == saved.read_bytes()
    for name in ("model", "checkpoint"):
        one, two = (Path(f, f"{name}.safetensors") for f in ("again", saved.parent))
        assert name == "checkpoint" or one.read_bytes() == two.read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_was_interrupted_goes_on_to_the_same_bytes(monkeypatch, capsys):
    flags = ["--data", "double_moons", *QUICK, "--smoothness", "0"]
    assert main(["train", *flags, "--out", "whole"]) == 0
    assert "smoothness = 0.0\n" in Path("whole/config.toml").read_text()  # zero is no blank

    def stop(moment):
        if moment.step == 40:
            raise KeyboardInterrupt

    def interrupted(*args, **options):
        return fit(*args, **{**options, "callbacks": [stop]})

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(table_task, "fit", interrupted)
        assert main(["train", *flags, "--out", "part"]) == 130
    assert told(capsys) == "hdnn: interrupted; go on with: hdnn train --resume --out part\n"
    assert not Path("part/metrics.json").exists()
    assert main(["certify", "--run", "part"]) == 2
    assert "has no model yet" in told(capsys)
    assert main(["train", "--resume", "--out", "part"]) == 0
    one, two = Path("whole/model.safetensors"), Path("part/model.safetensors")
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_gets_no_better_ends_before_its_epochs_are_over(capsys):
    flags = ["--data", "double_moons", "--layers", "2", "--patience", "1", "--epochs", "60"]
    flags += ["--learning-rate", "1", "--schedule", "constant"]
    assert main(["train", *flags, "--out", "r", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    losses = [json.loads(line)["loss"] for line in Path("r/log.jsonl").read_text().splitlines()]
    assert result["epochs"] == len(losses) < 60
    assert losses[-1] >= losses[-2]
    assert sorted(losses[:-1], reverse=True) == losses[:-1]
    assert main(["train", "--resume", "--out", "r", "--patience", "2"]) == 2
    assert "has patience = 1, not 2" in told(capsys)


@pytest.mark.usefixtures("no_pictures")
def test_a_run_in_levels_ends_with_all_its_layers_and_can_be_interrupted(monkeypatch, capsys):
    flags = ["--data", "double_moons", "--layers", "4", "--epochs", "2", "--multilevel", " 2,2"]
    assert main(["train", *flags, "--out", "whole", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["layers"], result["epochs"]) == (4, 6)
    assert result["certificate"]["holds"]
    model = hdnn.load("whole/model.safetensors")
    assert isinstance(model, hdnn.Model)
    assert (model.net.layers, model.net.T) == (4, pytest.approx(2.4))
    assert [entry["epoch"] for entry in Run("whole").log()] == [1, 2, 3, 4, 5, 6]

    def stop(moment):
        if moment.model.net.layers == 2 and moment.step == 40:
            raise KeyboardInterrupt

    def interrupted(*args, **options):
        return fit_multilevel(*args, **{**options, "callbacks": [stop]})

    with monkeypatch.context() as patch:
        patch.setattr(table_task, "fit_multilevel", interrupted)
        assert main(["train", *flags, "--out", "part"]) == 130
    assert main(["train", "--resume", "--out", "part", "--multilevel", "2,2", "--step", "1"]) == 2
    assert main(["train", "--resume", "--out", "part", "--multilevel", "2, 2"]) == 0
    one, two = Path("whole/model.safetensors"), Path("part/model.safetensors")
    assert one.read_bytes() == two.read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_the_step_of_a_run_in_levels_is_that_of_its_last_one(capsys):
    flags = ["--data", "double_moons", "--layers", "4", "--epochs", "1", "--step", "0.1"]
    assert main(["train", *flags, "--multilevel", "2", "--out", "r", "--json"]) == 0
    assert "4 layers, tanh, h = 0.1," in json.loads(capsys.readouterr().out)["network"]


@pytest.mark.usefixtures("no_pictures")
def test_curves_go_to_tensorboard_or_the_extra_is_named(monkeypatch, capsys):
    flags = ["--data", "double_moons", *QUICK, "--out", "r", "--tensorboard"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        assert main(["train", *flags]) == 2
        assert "pip install 'hdnn[tensorboard]'" in told(capsys)
        assert files() == {}
    pytest.importorskip("tensorboard")
    assert main(["train", *flags]) == 0
    assert list(Path("r/tensorboard").glob("events.*"))
    assert "tensorboard" not in Path("r/config.toml").read_text()


def test_a_folder_in_which_another_process_trains_is_left_to_it(trained, capsys):
    pytest.importorskip("fcntl")
    shutil.copytree(trained / "classes", "r")
    Path("r/metrics.json").unlink()
    before = files("r")
    with trained_elsewhere("r"):
        assert main(["train", "--resume", "--out", "r"]) == 2
    assert "another process is training in r" in told(capsys)
    assert files("r") == before
    assert main(["train", "--resume", "--out", "r"]) == 0


def test_an_interruption_before_the_start_says_so(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(table_task, "prepare", interrupted)
    assert main(["train", "--data", "swiss_roll"]) == 130
    assert "before anything was written" in told(capsys)
    assert files() == {}


@pytest.mark.usefixtures("no_pictures")
def test_three_classes_and_no_test_rows(capsys):
    lines = table(30).splitlines()
    names = ["0", "1", "2"] * 10
    rows = [f"{line.rpartition(',')[0]},{t}" for line, t in zip(lines[1:], names, strict=True)]
    Path("t.csv").write_text("\n".join([lines[0], *rows]))
    flags = ["--data", "t.csv", "--target", "target", "--test-fraction", "0", "--batch", "9999"]
    assert main(["train", *flags, *QUICK, "--out", "r", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["train_rows"], result["test_rows"]) == (30, 0)
    assert "test_accuracy" not in result
    assert main(["certify", "--run", "r"]) == 0
    assert "30 training points" in capsys.readouterr().out
    assert main(["predict", "--run", "r", "--data", "t.csv", "--proba"]) == 0
    assert capsys.readouterr().out.startswith("target,p(0),p(1),p(2)\n")


def test_a_regression_has_no_probabilities(trained, capsys):
    data = str(trained / "values.csv")
    assert main(["predict", "--run", str(trained / "values"), "--data", data, "--proba"]) == 2
    assert "no probabilities" in told(capsys)


def test_several_runs_that_are_interrupted_say_how_to_go_on(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(table_task, "fit", interrupted)
    assert main(["train", "--data", "swiss_roll", "--seeds", "2", "--out", "all"]) == 130
    assert "give the same command with --resume" in told(capsys)


def test_predictions_come_row_by_row(trained, capsys):
    os.chdir(trained)
    assert main(["predict", "--run", "classes", "--data", "classes.csv", "--proba"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "target,p(left),p(right)"
    assert len(lines) == 41
    for line in lines[1:]:
        label, left, right = line.split(",")
        assert label == ("left" if float(left) > float(right) else "right")
        assert float(left) + float(right) == pytest.approx(1)


def test_predictions_go_to_a_new_file(trained, tmp_path, capsys):
    for name, score in (("classes", "accuracy"), ("values", "rmse")):
        run, data, out = trained / name, trained / f"{name}.csv", tmp_path / f"{name}-out.csv"
        flags = ["--run", str(run), "--data", str(data), "--out", str(out)]
        assert main(["predict", *flags]) == 0
        assert f"({score} " in capsys.readouterr().out
        assert len(out.read_text().splitlines()) == 41
        assert main(["predict", *flags]) == 2
        assert "exists already" in told(capsys)
        assert main(["predict", *flags, "--overwrite", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["rows"] == 40
        assert "predictions" not in result
    Path("only.csv").write_text("c,b,a\n1,2,3\n")
    assert main(["predict", "--run", str(trained / "values"), "--data", "only.csv", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["predictions"]) == 1
    assert "rmse" not in result


def test_a_certificate_is_printed_and_is_json(trained, capsys):
    assert main(["certify", "--run", str(trained / "classes")]) == 0
    printed = capsys.readouterr().out
    assert "8 test points; weights float64, norms in float64" in printed
    assert "and it holds" in printed
    assert main(["certify", "--run", str(trained / "classes"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["symplectic_defect"] < 1e-14
    assert result["smallest_norm"] >= 1 - 1e-12
    bounds = {bound["name"]: bound for bound in result["bounds"]}
    assert bounds["budget exp(-B)"]["value"] < 1 < bounds["budget exp(B)"]["value"]
    assert all(bound["holds"] is not False for bound in result["bounds"])


def test_a_broken_guarantee_is_exit_code_1(trained, monkeypatch, capsys):
    certify = kinds.certify

    def broken(*args, **options):
        return replace(certify(*args, **options), holds=False, smallest_norm=0.5)

    monkeypatch.setattr(kinds, "certify", broken)
    assert main(["certify", "--run", str(trained / "classes")]) == 1
    assert "BROKEN: norm(dy_N/dy_j) >= 1, but it is 0.5" in capsys.readouterr().out


def test_a_saved_model_is_certified_without_its_run(trained, capsys):
    model = str(trained / "classes" / "model.safetensors")
    assert main(["certify", model]) == 0
    assert "100 random points" in capsys.readouterr().out
    Path("rows.csv").write_text("a,b,c\n1,2,3\n4,5,6\n")
    assert main(["certify", model, "--data", "rows.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 2
    Path("rows.csv").write_text("a,b\n1,2\n")
    assert main(["certify", model, "--data", "rows.csv"]) == 2
    assert "y must be a tensor (*batch, 3)" in told(capsys)
    assert main(["certify"]) == 2
    assert "name one run or saved model" in told(capsys)


def test_a_run_is_certified_on_other_points_but_not_on_changed_ones(trained, capsys):
    Path("t.csv").write_text(table())
    flags = ["--data", "t.csv", "--target", "target", "--out", "r", *QUICK]
    assert main(["train", *flags]) == 0
    Path("t.csv").write_text(table(seed=1))
    capsys.readouterr()
    assert main(["certify", "--run", "r"]) == 2
    assert "has changed since the run" in told(capsys)
    assert main(["certify", "--run", "r", "--data", "swiss_roll"]) == 2
    assert "has 2 inputs, but the run 3" in told(capsys)


def test_the_report_is_written_once(trained, capsys):
    assert main(["report", str(trained), "--out", "r.html"]) == 0
    assert capsys.readouterr().out == "2 runs in r.html\n"
    before = Path("r.html").read_bytes()
    assert main(["report", str(trained), "--out", "r.html"]) == 2
    assert "exists already" in told(capsys)
    assert main(["report", str(trained), "--out", "r.html", "--overwrite"]) == 0
    assert Path("r.html").read_bytes() == before


def test_info_tells_what_is_here(monkeypatch, capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"torch        {torch.__version__}" in printed
    assert "swiss_roll" in printed
    monkeypatch.setitem(sys.modules, "numba", None)
    assert main(["info", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "hdnn[fast]" in result["engines"]["fused, cpu"]
    assert result["versions"]["hdnn"] == hdnn.__version__


@pytest.mark.parametrize(
    "command", ["demo", "train", "predict", "certify", "reproduce", "bench", "report", "info"]
)
def test_every_command_explains_itself_with_examples(command, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.partition("examples:")[2].count(f"hdnn {command}") >= 2


def test_the_version_is_printed(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hdnn {hdnn.__version__}\n"
    assert main([]) == 0
    assert "Usage: hdnn" in capsys.readouterr().out


# Experiments and benchmarks


def test_experiments_get_what_follows(monkeypatch, capsys):
    class Experiment:
        @staticmethod
        def main(argv):
            sys.stdout.write(f"ran {argv}\n")
            if "--help" in argv:
                raise SystemExit(0)
            return 3 if "--fail" in argv else None

    there = {"table-planar": "there", "fig-planar": "there"}
    monkeypatch.setattr(reproduce, "_experiment", lambda name: there.get(name, ""))
    # Not import_module itself: the command imports other modules by it.
    importer = SimpleNamespace(import_module=lambda name: Experiment)
    monkeypatch.setattr(reproduce, "importlib", importer)
    assert main(["reproduce", "table-planar", "--", "--seeds", "3"]) == 0
    assert capsys.readouterr().out == "ran ['--seeds', '3']\n"
    assert main(["reproduce", "table-planar", "--", "--help"]) == 0
    capsys.readouterr()
    assert main(["reproduce", "all", "--", "--fail"]) == 3
    captured = capsys.readouterr()
    assert captured.out == "ran ['--fail']\n" * 2
    assert "reproducing fig-planar" in captured.err
    assert main(["reproduce", "table-mnist"]) == 2
    assert "not there yet" in told(capsys)


def test_experiments_are_looked_for_in_the_package():
    assert reproduce._experiment("no-such-thing") == ""
    assert reproduce._experiment("fig-exploding") == "hdnn.experiments.fig_exploding"


def test_benchmarks_are_listed_run_or_pointed_to(monkeypatch, tmp_path, capfd):
    folder = tmp_path / "clone" / "benchmarks"
    folder.mkdir(parents=True)
    monkeypatch.setattr(hdnn, "__file__", str(tmp_path / "clone" / "src" / "hdnn" / "__init__.py"))
    assert main(["bench"]) == 2
    assert "python benchmarks/engine.py" in told(capfd)
    code = "import sys\nif __name__ == '__main__':\n    print(sys.argv[1:])\n    sys.exit(4)\n"
    (folder / "some.py").write_text(code)
    (folder / "helper.py").write_text("")
    assert main(["bench"]) == 0
    assert capfd.readouterr().out == "hdnn bench some\n"
    assert main(["bench", "some", "--", "--fast"]) == 4
    assert capfd.readouterr().out == "['--fast']\n"
    assert main(["bench", "other"]) == 2
    assert "benchmark 'other' is not known" in told(capfd)


# Progress


def moment(step, accuracy=0.5):
    return Moment(None, 1, 2, step, 10, 0.25, accuracy, 1e-3, 0.1, False)  # type: ignore[arg-type]


def test_the_bar_shows_loss_accuracy_and_gradient(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "at_terminal", lambda: True)
    with progress.TrainingBar("name", True) as bar:
        bar(moment(1))
        assert bar.progress is None  # not before two seconds
        bar.due = 0.0
        bar(moment(3))
        assert bar.progress is not None
        (task,) = bar.progress.tasks
        assert task.completed == 3
        assert task.fields["values"] == "loss 0.2500, accuracy 50.0%, gradient 1.00e-03, epoch 1/2"
        bar.due = math.inf
        bar(moment(5))
        assert task.completed == 3
        bar(moment(10, accuracy=None))
        assert task.completed == 10
        assert "accuracy" not in task.fields["values"]
    assert not progress.TrainingBar("name", False).on


def test_a_sign_of_life_appears_for_who_waits(monkeypatch):
    shown = threading.Event()

    class Status:
        def start(self):
            shown.set()

        def stop(self):
            pass

    monkeypatch.setattr("rich.console.Console.status", lambda *_: Status())
    monkeypatch.setattr(terminal, "at_terminal", lambda: True)
    monkeypatch.setattr(progress, "WAIT", 1000.0)
    with progress.waiting("working"):
        assert not shown.is_set()
    monkeypatch.setattr(progress, "WAIT", 0.0)
    with progress.waiting("working", False):
        assert not shown.is_set()
    with progress.waiting("working"):
        assert shown.wait(60)


# What goes wrong


def test_a_folder_that_holds_something_is_left_alone(trained, capsys):
    before = files(trained)
    for out in ("classes", "classes.csv", "."):
        assert main(["train", "--data", "swiss_roll", "--out", str(trained / out)]) == 2
        told(capsys)
    assert main(["train", "--resume", "--layers", "3", "--out", str(trained / "classes")]) == 2
    assert "has layers = 2, not 3" in told(capsys)
    assert main(["train", "--resume", "--out", "nowhere"]) == 2
    assert "holds no run to resume" in told(capsys)
    assert files(trained) == before


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("call", range(1, 12))
def test_a_full_disk_is_told_and_loses_nothing(call, trained, monkeypatch, capsys):
    """The disk is full from the `call`-th flush on: each write in turn is the first to fail."""
    Path("precious").write_text("here before")
    flush, count = os.fsync, iter(range(1, 1000))

    def full(descriptor):
        if next(count) >= call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(descriptor)

    data = str(trained / "classes.csv")
    flags = ["--data", data, "--target", "target", "--out", "r", *QUICK]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        code = main(["train", *flags])
        needed = next(count) - 1
    if code == 0:
        assert needed < call  # it was never full
        return
    assert code == 2
    assert "No space left" in told(capsys)
    assert Path("precious").read_text() == "here before"
    assert not list(Path().rglob("*.tmp"))
    assert not Path("r/metrics.json").exists()
    assert main(["train", *flags, "--resume"]) == 0  # there is room again
    assert Path("r/metrics.json").exists()


def test_output_that_cannot_be_written_is_told(monkeypatch, capsys):
    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def flush(self):
            pass

    monkeypatch.setattr(sys, "stdout", Full())
    assert main(["info"]) == 2
    assert "No space left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (BrokenPipeError(), 0, ""),
        (MemoryError("too much"), 2, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 2, "not enough memory"),
        (PermissionError(13, "Permission denied", "x"), 2, "file x: Permission denied"),
        (ZeroDivisionError("oh"), 1, "a mistake in hdnn itself, ZeroDivisionError: oh"),
    ],
)
def test_other_failures_are_one_sentence_too(error, code, words, monkeypatch, capfd):
    def fail():
        raise error

    monkeypatch.setattr(info, "_about", fail)
    monkeypatch.setattr(terminal, "forget_output", lambda: None)
    monkeypatch.delenv("HDNN_TRACEBACK", raising=False)
    assert main(["info"]) == code
    assert words in capfd.readouterr().err
    if code == 1:
        monkeypatch.setenv("HDNN_TRACEBACK", "1")
        with pytest.raises(ZeroDivisionError):
            main(["info"])


def test_what_does_not_fit_into_memory_is_refused(capsys):
    for flags in (["--layers", str(10**15)], ["--features", str(10**9)]):
        assert main(["train", "--data", "swiss_roll", *flags]) == 2
        assert "this machine has" in told(capsys)
    assert files() == {}


NUMBERS = {
    "--layers": ["0", "-1", "1.5", "many", "", "1e3", "0x10"],
    "--features": ["0", "-4", "1", "3", "x"],
    "--T": ["0", "-1", "nan", "inf", "x", ""],
    "--step": ["0", "-0.1", "nan", "-inf", "h"],
    "--epochs": ["0", "-5", "2.5", "all", "nan"],
    "--patience": ["0", "-1", "2.5", "x", ""],
    "--batch": ["0", "-1", "half"],
    "--learning-rate": ["0", "-1", "nan", "inf", "fast"],
    "--ridge": ["0", "-1", "nan", "inf", "x"],
    "--smoothness": ["-1", "nan", "inf", "x"],
    "--warmup": ["1", "-0.5", "nan", "x"],
    "--weight-decay": ["-1", "nan", "inf", "x"],
    "--clip": ["0", "-1", "nan", "inf", "x"],
    "--seed": ["-1", "1.5", "x", "9223372036854775808", str(10**30)],
    "--seeds": ["0", "-1", "x", "1.5", str(10**9)],
    "--test-fraction": ["-0.1", "1", "2", "nan", "x"],
}
WORDS = {
    "--network": ["h3", "", "resnet", "H 2"],
    "--activation": ["tahn", "", "TANH", "step"],
    "--init": ["zeros", "", "xavier"],
    "--multilevel": ["2", "1", "0", "", ",", "2,", "2;2", "two", "1.5", "-2"],
    "--schedule": ["linear", ""],
    "--smoothing": ["linear", "none"],
    "--optimizer": ["lbfgs", "", "Adam"],
    "--solver": ["exact", "", "qr"],
    "--task": ["cluster", "", "regression"],
    "--device": ["tpu", "", "cuda:99", "cpu:7", "meta", "gpu"],
    "--dtype": ["int8", "float16", "", "double"],
    "--data": ["swiss", "", "mnits", "nothing.csv", "nothing.parquet", "a.xlsx", "."],
    "--images": ["10", "x"],
    "--target": ["class", ""],
    "--drop": ["x1"],
    "--config": ["nothing.toml", ".", ""],
    "--out": ["/dev/null", "/dev/null/x", "/proc/x", "f/g", "x" * 300, "taken"],
}
STRAY = [
    ["train"],
    ["train", "--data"],
    ["train", "swiss_roll"],
    ["train", "--data", "swiss_roll", "--nonsense"],
    ["train", "--data", "swiss_roll", "--T", "1", "--step", "0.1"],
    ["train", "--data", "swiss_roll", "--network", "mlp", "--T", "1"],
    ["train", "--data", "swiss_roll", "--network", "mlp", "--multilevel", "2"],
    ["train", "--data", "swiss_roll", "--layers", "10", "--multilevel", "2,2"],
    ["train", "--data", "good.csv"],
    ["train", "--data", "good.csv", "--target", "tarjet"],
    ["train", "--data", "good.csv", "--target", "target", "--drop", "d"],
    ["train", "--data", "good.csv", "--target", "target", "--features", "2"],
    ["train", "--data", "good.csv", "--target", "target", "--task", "regression"],
    ["train", "--resume"],
    ["train", "--seeds", "2"],
    ["predict"],
    ["predict", "--run", "nowhere", "--data", "good.csv"],
    ["predict", "--run", "taken", "--data", "good.csv"],
    ["certify"],
    ["certify", "--run", "taken"],
    ["certify", "--run", ""],
    ["reproduce"],
    ["reproduce", "table"],
    ["reproduce", "table-planar", "--", "--nonsense"],
    ["reproduce", "table-planar", "--nonsense"],
    ["reproduce", "table-planar", "--", "--seeds", "0"],
    ["reproduce", "fig-planar", "--", "--seed", "x"],
    ["reproduce", "fig-exploding", "--", "--seeds", "2"],
    ["bench", "nothing"],
    ["report"],
    ["report", "taken"],
    ["report", "nowhere"],
    ["report", "taken", "--out", "good.csv"],
    ["report", "taken", "--out", "taken"],
    ["report", "taken", "--out", "no/such/r.html"],
    ["info", "--xml"],
    ["info", "extra"],
    ["trian"],
    ["--nonsense"],
    ["demo", "--layers", "x"],
]


def bad_flags():
    for option, values in (*NUMBERS.items(), *WORDS.items()):
        for value in values:
            data = [] if option == "--data" else ["--data", "swiss_roll"]
            if option not in ("--target", "--drop", "--test-fraction"):
                data += ["--layers", "1"] * (option != "--layers")
            yield ["train", *data, option, value]
    yield from STRAY


@pytest.mark.parametrize("arguments", [*bad_flags()], ids=" ".join)
def test_bad_flags_are_one_sentence_and_exit_code_2(arguments, capsys):
    if "/x" in arguments[-1] and not sys.platform.startswith("linux"):
        pytest.skip("there is no /proc")
    Path("f").write_text("a file")
    Path("good.csv").write_text(table())
    Path("taken").mkdir()
    Path("taken", "notes").write_text("precious")
    before = files()
    assert main(arguments) == 2
    told(capsys)
    assert files() == before


WHOLE = ["--layers", "--features", "--epochs", "--patience", "--batch", "--seed", "--seeds"]
REAL = ["--T", "--step", "--learning-rate", "--ridge", "--smoothness", "--weight-decay", "--clip"]
REAL += ["--warmup", "--test-fraction"]
HUGE = {"10^400": "9" * 400, "10^100000": "9" * 10**5, "1e308": "1e308", "words": "a b " * 2000}


@pytest.mark.parametrize("option", [*WHOLE, *REAL, "--out", "--data", "--config", "--device"])
@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("data", ["swiss_roll", "good.csv"])
def test_what_is_huge_is_one_short_sentence_before_anything_is_written(option, value, data, capsys):
    if (option, value) == ("--out", "1e308"):
        pytest.skip("a good name for a folder")
    Path("good.csv").write_text(table())
    before = files()
    given = {"--data": data, "--layers": "1", "--epochs": "1", option: HUGE[value]}
    if given["--data"] == "good.csv":
        given["--target"] = "target"
    assert main(["train", *(word for pair in given.items() for word in pair)]) == 2
    assert len(told(capsys)) < 900
    assert files() == before
    assert not Path("runs").exists()


@pytest.mark.parametrize("value", ["9" * 400, "-" + "9" * 400, "9" * 5000, "1e308", "inf", "nan"])
def test_huge_numbers_in_a_config_file_are_one_sentence_too(value, capsys):
    for option in (*WHOLE, *REAL, "--images"):
        options = {"layers": "1", "epochs": "1", option[2:]: value}
        lines = ["[train]", 'data = "swiss_roll"', *(f"{k} = {v}" for k, v in options.items())]
        Path("c.toml").write_text("\n".join(lines))
        assert main(["train", "--config", "c.toml"]) == 2
        assert len(told(capsys)) < 900
    assert not Path("runs").exists()


@pytest.mark.parametrize("option", ["--layers", "--epochs", "--seed"])
def test_the_demo_refuses_huge_numbers_before_anything_is_written(option, capsys):
    for value in ("9" * 400, "9" * 10**5, "-" + "9" * 400):
        assert main(["demo", option, value]) == 2
        assert len(told(capsys)) < 900
    assert not Path("runs").exists()


def test_a_network_that_cannot_fit_is_refused_with_its_size(capsys, monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda: 2.0**20)
    for flags in (["demo"], ["train", "--data", "swiss_roll"]):
        assert main([*flags, "--layers", "100000"]) == 2
        said = told(capsys)
        assert "100000 layers of 4 features need about" in said
        assert "this machine has 0.000977 GiB" in said
    assert not Path("runs").exists()


@pytest.mark.usefixtures("no_pictures")
def test_the_home_folder_has_a_short_name(monkeypatch, tmp_path, capsys):
    # In a new home Matplotlib would look for all fonts of the machine again.
    known = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(known))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home").mkdir()
    Path("home/t.csv").write_text(table())
    Path("home/c.toml").write_text('[train]\ndata = "~/t.csv"\ntarget = "target"\n')
    flags = ["--config", "~/c.toml", *QUICK, "--out", "~/run", "--json"]
    assert main(["train", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == str(tmp_path / "home/run")
    flags = ["--run", "~/run", "--data", "~/t.csv", "--out", "~/answers.csv"]
    assert main(["predict", *flags]) == 0
    assert Path("home/answers.csv").is_file()
    assert {p.name for p in Path().iterdir()} == {"home"}


@pytest.mark.parametrize("column", [0, 3])
@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e200", "1e100"])
def test_a_value_that_overflows_is_refused_before_a_folder_is_made(column, value, capsys):
    lines = [line.split(",") for line in table(kind="values").splitlines()]
    lines[20][column] = value
    Path("t.csv").write_text("\n".join(map(",".join, lines)))
    for seed in range(5):  # it is among the rows to train on, or among those to test with
        flags = ["--data", "t.csv", "--target", "target", "--seed", str(seed), "--layers", "1"]
        code = main(["train", *flags, "--epochs", "1", "--out", f"run{seed}"])
        captured = capsys.readouterr()
        assert code == 0 or (code == 2 and not Path(f"run{seed}").exists()), captured.err
        assert "mistake in hdnn itself" not in captured.err
        assert code == 2 or "nan" not in captured.out


def test_lists_in_lists_without_end_are_refused(capsys):
    for text in ("data = " + "[" * 10**4, "data = " + "[" * 10**4 + "]" * 10**4, "a." * 10**4):
        Path("c.toml").write_text(f"[train]\n{text}")
        assert main(["train", "--config", "c.toml"]) == 2
        assert len(told(capsys)) < 900


# The output


def test_a_full_disk_under_the_output_is_one_sentence(monkeypatch, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    for flags in (["info"], ["info", "--json"], ["--help"], ["train", "--help"], ["--version"]):
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            assert main(flags) == 2
        assert "cannot write the output: No space left" in told(capsys)


def test_whoever_stops_reading_hears_nothing(monkeypatch, capsys):
    for flags in (["info"], ["info", "--json"], ["--help"], ["train", "--help"]):
        reading, writing = os.pipe()
        os.close(reading)
        with open(writing, "w") as pipe, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", pipe)
            assert main(flags) == 0
        assert capsys.readouterr() == ("", "")


def test_no_line_is_wider_than_the_terminal(trained, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    run = str(trained / "classes")
    resume = ["train", "--resume", "--out", run]
    for flags in (["info"], ["certify", run], resume, ["--help"], ["train", "--help"]):
        assert main(flags) == 0
        printed = capsys.readouterr().out
        assert 30 < max(map(len, printed.splitlines())) <= 40
    assert main(["certify", run]) == 0
    narrow = capsys.readouterr().out.split()
    monkeypatch.delenv("COLUMNS")
    assert main(["certify", run]) == 0
    assert "".join(capsys.readouterr().out.split()) == "".join(narrow)  # nothing is lost


def test_further_lines_stand_under_the_value_of_the_first():
    indent = " " * 12
    lines = ["name of it  one two", f"{indent}three four", f"{indent}five six"]
    assert terminal.fitted("name of it  one two three four five six", 24).splitlines() == lines
    assert terminal.fitted("short", 24) == "short"


def test_the_line_of_progress_is_never_wider_than_the_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    line = ProgressLine(True)
    line.due = 0.0
    line.show("x" * 100)
    assert terminal.getvalue().count("x") == 39


@pytest.mark.parametrize("warmup", [1e-320, 1e-9, 0.05, 0.5])
def test_a_rate_never_rises_above_itself_while_it_warms_up(warmup):
    rates = [schedule.factor(k / 7, 7, warmup, "constant") for k in range(7)]
    assert rates == sorted(rates)
    assert 0 < rates[0] <= rates[-1] == 1


def spoil_cell(text):
    def spoil(rows, row, column):
        rows[row + 1][column] = text
        return rows

    return spoil


def one_class(rows, row, column):
    return [rows[0], *([*r[:3], "left"] for r in rows[1:])]


def ragged(rows, row, column):
    rows[row + 1] = rows[row + 1][: column % 3 + 1]
    return rows


def too_long(rows, row, column):
    rows[row + 1].append("7")
    return rows


def two_alike(rows, row, column):
    rows[0][column] = rows[0][(column + 1) % 4]
    return rows


def no_name(rows, row, column):
    rows[0][column] = ""
    return rows


def no_rows(rows, row, column):
    return rows[:1]


def no_target(rows, row, column):
    return [r[:3] for r in rows]


def only_target(rows, row, column):
    return [r[3:] for r in rows]


def cut_off(rows, row, column):
    rows[-1][-1] = '"left'
    return rows


SPOILS = [
    *map(spoil_cell, ["", "nan", "NaN", "inf", "-inf", "null", "1e400", "red", "1.2.3", "12 cm"]),
    *(one_class, ragged, too_long, two_alike, no_name, no_rows, no_target, only_target, cut_off),
]
GAPS = [SPOILS[i] for i in (0, 1, 2, 5)]  # which a run fills, unless it was told not to


@settings(max_examples=80)
@given(
    spoil=st.sampled_from(SPOILS),
    rows=st.integers(2, 12),
    row=st.integers(0, 11),
    column=st.integers(0, 3),
    end=st.sampled_from(["\n", "\r\n"]),
    delimiter=st.sampled_from([",", ";", "\t"]),
    command=st.sampled_from(["train", "predict", "certify"]),
)
def test_spoiled_tables_are_one_sentence_and_exit_code_2(
    trained, spoil, rows, row, column, end, delimiter, command
):
    cells = [line.split(",") for line in table(rows).splitlines()]
    learned = command == "train"
    if not learned:  # the target is not looked at, nor whether there is one
        if spoil in (one_class, no_target):
            spoil = no_rows
        spoil = SPOILS[3] if spoil in GAPS else spoil
        column %= 3
    if column == 3 and spoil not in SPOILS[:6] and spoil in SPOILS[:10]:
        column = 0  # in a target, a word is one more class
    if column == 3 and spoil in (SPOILS[3], SPOILS[4]):
        column = 1
    cells = spoil(cells, row % rows, column)
    flags = ["--data", "bad.csv"]
    flags += ["--target", "target", "--layers", "1", "--epochs", "1"] if learned else []
    flags += ["--missing", "refuse"] if learned else []
    flags += [] if learned else ["--run", str(trained / "classes")]
    with pytest.MonkeyPatch.context() as patch:
        Path("bad.csv").write_bytes(end.join(delimiter.join(r) for r in cells).encode())
        said = []
        patch.setattr(terminal, "say", lambda message: said.append(" ".join(str(message).split())))
        before = files()
        assert main([command, *flags]) == 2, (spoil, cells)
        assert len(said) == 1
        assert files() == before


@settings(max_examples=60)
@example(content=b"\x1c", suffix="csv")  # blank for a text, though not for bytes
@given(content=st.binary(max_size=200), suffix=st.sampled_from(["csv", "parquet", "toml"]))
def test_any_bytes_at_all_are_one_sentence_and_exit_code_2(content, suffix):
    with pytest.MonkeyPatch.context() as patch:
        Path(f"any.{suffix}").write_bytes(content)
        said = []
        patch.setattr(terminal, "say", lambda message: said.append(message))
        before = files()
        data = ["--config", "any.toml"] if suffix == "toml" else ["--data", f"any.{suffix}"]
        assert main(["train", *data, "--target", "no such column"]) == 2
        assert len(said) == 1
        assert files() == before


@pytest.mark.parametrize("command", ["predict", "certify"])
@pytest.mark.parametrize("file", ["config.toml", "columns.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"\xff" * 64, b"[train]\nx = 1\n"])
def test_damaged_runs_are_one_sentence_and_exit_code_2(command, file, content, trained, capsys):
    for name, whole in files(trained / "classes").items():
        Path("r").mkdir(exist_ok=True)
        Path("r", Path(name).name).write_bytes(whole)
    if content is None:
        Path("r", file).unlink()
    else:
        Path("r", file).write_bytes(content)
    flags = [
        "--run",
        "r",
        *(["--data", str(trained / "classes.csv")] if command == "predict" else []),
    ]
    before = files()
    if (command, file) == ("predict", "config.toml") and content is not None:
        assert main([command, *flags]) == 0  # predictions need no config
        return
    assert main([command, *flags]) == 2
    told(capsys)
    assert files() == before
