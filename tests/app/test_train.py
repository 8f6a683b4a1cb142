"""`hdnn train` and its runs: options, folders, interruption, several seeds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")
pytest.importorskip("pandas")

import pandas as pd
import torch

from hdnn import io
from hdnn.__main__ import main
from hdnn.app.config import ImageConfig, RunOptions, TableConfig, all_options
from hdnn.app.train import write_picture
from hdnn.data import ImageData
from hdnn.errors import OptionError


@pytest.fixture(autouse=True)
def table(tmp_path, monkeypatch) -> Path:
    """A folder of its own with a table of numbers, texts, gaps and two targets."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 90))
    frame = pd.DataFrame(
        {"a": a, "b": b, "kind": random.choice(["x", "y"], 90)}
    )
    frame["label"] = np.where(a + b > 0, "yes", "no")
    frame["value"] = 10 + 3 * a - 2 * b
    frame.loc[3, "b"] = None
    frame.to_csv("table.csv", index=False)
    return tmp_path


def run(capsys, *arguments: str, code: int = 0) -> str:
    """The standard output of a command, or its error if it should fail."""
    result = main(list(arguments))
    printed = capsys.readouterr()
    assert result == code, printed.err
    return printed.out if code == 0 else printed.err


def train(capsys, *more: str) -> dict:
    options = [
        "--data",
        "table.csv",
        "--target",
        "label",
        "--drop",
        "value",
        "--epochs",
        "4",
    ]
    return json.loads(run(capsys, "train", *options, "--json", *more))


def same_weights(first: str, second: str) -> bool:
    tensors = [
        io.load_tensors(Path(folder) / "model.safetensors")[0]
        for folder in (first, second)
    ]
    return all(
        tensors[0][name].equal(tensor) for name, tensor in tensors[1].items()
    )


def test_a_run_holds_its_config_model_scores_and_pictures(capsys):
    metrics = train(capsys)
    folder = Path("runs/table-label-h2-16-0")
    names = {path.name for path in folder.iterdir()}
    assert {
        "config.toml",
        "metrics.json",
        "model.safetensors",
        "training.png",
    } <= names
    config = tomllib.loads((folder / "config.toml").read_text())["train"]
    assert config["layers"] == 16
    assert config["data"] == os.path.abspath("table.csv")
    assert metrics["certificate"]["holds"] is True
    assert len(metrics["history"]["loss"]) == 4


def test_an_accuracy_stands_beside_that_of_the_commonest_class(capsys):
    metrics = train(capsys)
    counts = np.array(metrics["confusion"]["counts"])
    assert metrics["test_accuracy"] == pytest.approx(
        np.trace(counts) / counts.sum()
    )
    common = metrics["common"]
    assert metrics["baseline_accuracy"] == pytest.approx(
        counts[common].sum() / counts.sum()
    )
    run(capsys, "train", "--resume", "--out", "runs/table-label-h2-16-0")
    printed = run(
        capsys, "train", "--resume", "--out", "runs/table-label-h2-16-0"
    )
    assert "always answering" in printed


def test_classes_that_are_never_predicted_are_named(capsys):
    frame = pd.DataFrame(
        {"a": np.arange(100.0) % 7, "label": ["often"] * 95 + ["rare"] * 5}
    )
    frame.to_csv("rare.csv", index=False)
    options = ["--data", "rare.csv", "--target", "label", "--epochs", "2"]
    printed = run(capsys, "train", *options, "--ridge", "1000", "--out", "rare")
    assert "always answering often would give" in printed
    assert "never predicted  rare" in printed
    assert "try              --class-weight balanced" in printed
    command = ["--run", "rare", "--data", "rare.csv", "--out", "answers.csv"]
    printed = run(capsys, "predict", *command)
    assert "accuracy         95.00% (always answering often" in printed
    assert "never predicted  rare" in printed
    assert "--class-weight balanced" in printed
    run(capsys, "report", "rare")
    page = Path("report.html").read_text()
    overview = page[page.index("<h1>Runs") : page.index("<section")]
    assert "95.00%</b></td><td>95.00%</td><td>rare</td>" in overview
    assert "class-weight balanced" in overview


def test_a_regression_has_errors_in_units_of_its_target(capsys):
    options = [
        "--data",
        "table.csv",
        "--target",
        "value",
        "--drop",
        "label",
        "--json",
    ]
    metrics = json.loads(run(capsys, "train", *options))
    assert metrics["test_r2"] > 0.8
    assert metrics["test_rmse"] < metrics["baseline_rmse"]
    assert metrics["target_mean"] == pytest.approx(10, abs=2)
    # The values are a linear function: the user hears that a network is not needed.
    assert any("linear model does better" in note for note in metrics["notes"])


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(capsys):
    train(capsys, "--out", "first")
    train(capsys, "--out", "again")
    train(capsys, "--out", "other", "--seed", "1")
    assert same_weights("first", "again")
    assert not same_weights("first", "other")


def test_several_seeds_are_runs_in_one_folder_with_mean_and_spread(capsys):
    result = train(capsys, "--seeds", "3", "--out", "group")
    assert [run["seed"] for run in result["runs"]] == [0, 1, 2]
    scores = [run["test_accuracy"] for run in result["runs"]]
    assert result["summary"]["test_accuracy"]["mean"] == pytest.approx(
        np.mean(scores)
    )
    assert Path("group/seed-2/model.safetensors").is_file()


def test_options_of_a_file_are_overruled_by_flags(capsys):
    Path("my.toml").write_text(
        '[train]\ndata = "table.csv"\ntarget = "label"\nepochs = 3\n'
    )
    metrics = json.loads(
        run(capsys, "train", "--config", "my.toml", "--epochs", "2", "--json")
    )
    assert metrics["epochs"] == 2
    Path("bad.toml").write_text(
        '[train]\ndata = "table.csv"\ntarget = "label"\nepochs = "3"\n'
    )
    assert "epochs" in run(capsys, "train", "--config", "bad.toml", code=2)


def test_the_config_of_a_run_trains_the_same_again(capsys):
    train(capsys, "--out", "first")
    run(capsys, "train", "--config", "first/config.toml", "--out", "again")
    assert same_weights("first", "again")


def test_nothing_is_overwritten_unless_asked_for(capsys):
    train(capsys, "--out", "mine")
    before = Path("mine/metrics.json").read_bytes()
    error = run(
        capsys, "train", "--data", "swiss_roll", "--out", "mine", code=2
    )
    assert "--overwrite" in error
    assert Path("mine/metrics.json").read_bytes() == before
    train(capsys, "--out", "mine", "--seed", "5", "--overwrite")
    assert json.loads(Path("mine/metrics.json").read_text())["seed"] == 5
    Path("mine/notes.txt").write_text("do not lose this")
    error = run(
        capsys,
        "train",
        "--data",
        "swiss_roll",
        "--out",
        "mine",
        "--overwrite",
        code=2,
    )
    assert "notes.txt" in error
    assert Path("mine/model.safetensors").exists()


def test_a_mistake_leaves_no_folder_behind(capsys):
    for more in (
        ["--activation", "tahn"],
        ["--learning-rate", "-1"],
        ["--features", "1"],
    ):
        options = [
            "--data",
            "table.csv",
            "--target",
            "label",
            "--out",
            "wrong",
            *more,
        ]
        error = run(capsys, "train", *options, code=2)
        assert len(error.strip().splitlines()) == 1
        assert not Path("wrong").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], "--data is missing"),
        (["train", "--data", "table.csv"], "--target is missing"),
        (["train", "--data", "swiss_rol"], "swiss_roll"),
        (["train", "--data", "swiss_roll", "--target", "y"], "--target"),
        (
            ["train", "--data", "swiss_roll", "--images", "5"],
            "--images does not apply",
        ),
        (["train", "--data", "swiss_roll", "--layers", "0"], "layers"),
        (["train", "--data", "swiss_roll", "--layers", "many"], "--layers"),
        (["train", "--data", "swiss_roll", "--network", "h3"], "h3"),
        (["train", "--data", "swiss_roll", "--solver", "magic"], "magic"),
        (
            ["train", "--data", "swiss_roll", "--resume", "--overwrite"],
            "use only one",
        ),
        (["train", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["launch", "--data", "swiss_roll"], "--nodes"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(capsys, arguments, words):
    error = run(capsys, *arguments, code=2)
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert error.startswith("hdnn: ")
    assert sorted(path.name for path in Path().iterdir()) == ["table.csv"]


def test_a_killed_training_goes_on_to_the_same_bits(capsys, table):
    options = ["--data", "swiss_roll", "--layers", "8", "--epochs", "40"]
    run(capsys, "train", *options, "--out", "straight")
    command = [sys.executable, "-m", "hdnn", "train", *options, "--out", "cut"]
    source = os.path.dirname(os.path.dirname(sys.modules["hdnn"].__file__))
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": source})
    checkpoint = Path("cut/training/checkpoint.safetensors")
    while not checkpoint.exists() and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("cut/metrics.json").exists()
    error = run(
        capsys, "predict", "--run", "cut", "--data", "swiss_roll", code=2
    )
    assert "--resume" in error
    assert "layers" in run(
        capsys, "train", "--resume", "--out", "cut", "--layers", "9", code=2
    )
    run(capsys, "train", "--resume", "--out", "cut")
    assert same_weights("straight", "cut")
    assert not Path("cut/training").exists()


def test_a_run_in_use_is_locked(capsys):
    train(capsys, "--out", "mine")
    with io.lock("mine"):
        options = [
            "--data",
            "table.csv",
            "--target",
            "label",
            "--out",
            "mine",
            "--overwrite",
        ]
        assert "another process" in run(capsys, "train", *options, code=2)


def test_held_out_rows_end_a_training_and_the_best_epoch_stays(capsys):
    more = [
        "--validation",
        "0.25",
        "--patience",
        "2",
        "--class-weight",
        "balanced",
    ]
    metrics = train(capsys, *more)
    assert metrics["validation_rows"] == 18
    assert 1 <= metrics["best_epoch"] <= metrics["epochs"]
    assert len(metrics["history"]["validation_loss"]) == metrics["epochs"]


def test_class_weights_are_a_word_or_numbers_for_names():
    options = {"data": "t.csv", "target": "y"}
    assert (
        TableConfig.build({**options, "class_weight": "balanced"}).weights()
        == "balanced"
    )
    weights = TableConfig.build(
        {**options, "class_weight": "yes=2,no=1"}
    ).weights()
    assert weights == {"yes": 2.0, "no": 1.0}
    with pytest.raises(OptionError, match="yes=2,no=1"):
        TableConfig.build({**options, "class_weight": "yes=much"}).weights()


def test_help_shows_at_most_twenty_options_and_help_all_the_others(capsys):
    pattern = r"^  (?:-\w, )?--([\w-]+)"
    short = re.findall(pattern, run(capsys, "train", "--help"), re.M)
    names = set(all_options(TableConfig, ImageConfig, RunOptions))
    flags = {name.replace("_", "-") for name in names}
    assert len(short) <= 20
    assert {"data", "target", "drop", "help-all"} <= set(short)
    text = run(capsys, "train", "--help-all")
    assert flags <= set(re.findall(pattern, text, re.M))
    assert "<" not in text
    assert len(flags) <= 32


def test_hdnn_alone_says_what_to_do_next(capsys):
    text = run(capsys)
    assert "hdnn play" in text
    assert "hdnn train --data FILE.csv" in text
    assert run(capsys, "--version").startswith("hdnn 0.")


def test_several_columns_are_left_out_by_one_option(capsys):
    metrics = train(capsys, "--drop", "a,kind")
    assert metrics["drop"] == ["value", "a", "kind"]
    options = ["--data", "table.csv", "--target", "label", "--drop", "b,c"]
    options += ["--out", "other"]
    assert "'c'" in run(capsys, "train", *options, code=2)


def test_the_demo_shows_a_perceptron_beside_h2(capsys):
    text = run(capsys, "demo", "--epochs", "2", "--layers", "16")
    assert Path("runs/demo/contrast.png").is_file()
    assert "reaches its first layer" in text
    gradients = [row for row in text.splitlines() if "is proved" in row]
    assert len(gradients) == 1
    assert "What to do next" in text
    run(capsys, "demo", "--epochs", "1", "--layers", "2", "--json")


def test_the_shell_can_complete_commands(table):
    source = os.path.dirname(os.path.dirname(sys.modules["hdnn"].__file__))
    asked = {
        "_HDNN_COMPLETE": "complete_bash",
        "COMP_WORDS": "hdnn pre",
        "COMP_CWORD": "1",
        "PYTHONPATH": source,
    }
    program = "from hdnn.__main__ import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | asked,
    )
    assert done.stdout.split() == ["predict"]


def test_help_is_quick_and_imports_no_torch(tmp_path):
    program = "import sys; from hdnn.__main__ import main; main(['train', '--help']); "
    program += "print('torch' in sys.modules)"
    command = [sys.executable, "-X", "importtime", "-c", program]
    source = os.path.dirname(os.path.dirname(sys.modules["hdnn"].__file__))
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
    )
    assert "--learning-rate" in done.stdout
    assert "<bool>" not in done.stdout
    assert done.stdout.endswith("False\n")


def test_a_run_on_images_has_the_picture_of_norms(capsys, monkeypatch):
    """The picture was lost once: certificates of image networks have parts, not layers."""
    pytest.importorskip("matplotlib")
    t = torch.arange(40) % 10
    images = torch.randint(0, 255, (40, 1, 28, 28), dtype=torch.uint8)
    sets = (images, t, images, t)
    names = tuple("0123456789")
    data = ImageData("mnist", *sets, names, (0.13,), (0.31,))
    monkeypatch.setattr("hdnn.app.train.load_images", lambda name: data)
    options = ["--data", "mnist", "--network", "h2", "--layers", "2"]
    options += ["--epochs", "1", "--images", "40", "--json"]
    result = json.loads(run(capsys, "train", *options))
    content = (Path(result["run"]) / "norms.png").read_bytes()
    assert content.startswith(b"\x89PNG")


def test_a_picture_that_could_not_be_finished_is_not_left_behind(tmp_path):
    class Broken:
        def savefig(self, file, **_):
            opened = file if hasattr(file, "write") else open(file, "wb")  # noqa: SIM115
            opened.write(b"half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        write_picture(Broken(), tmp_path / "norms.png")
    assert not list(tmp_path.glob("*norms*"))
