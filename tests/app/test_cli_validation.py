"""`hdnn train --validation --patience`: rows are held out, watched, and remembered."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import hdnn
from hdnn.__main__ import main
from said import told

TRAIN = ["train", "--data", "t.csv", "--target", "target", "--layers", "2", "--features", "8"]
WATCHED = [*TRAIN, "--validation", "0.25", "--patience", "3", "--learning-rate", "0.1"]
# Dies without a word in the middle of the epoch, once its checkpoint is there.
KILLED = """
import os, signal, sys
from hdnn.__main__ import main
from hdnn.training import checkpoint, loop

loop.SAVE_EVERY, save, count = -1.0, checkpoint.save, [0]

def last_words(*args):
    save(*args)
    count[0] += 1
    if count[0] == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint.save = last_words
main(sys.argv[2:])
"""


@pytest.fixture(autouse=True)
def a_noisy_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    draw = random.Random(0)
    lines = ["a,b,c,target,value"]
    for _ in range(150):
        a, b, c = (draw.gauss(0, 1) for _ in range(3))
        side = "left" if a * b + draw.gauss(0, 1) < 0 else "right"
        lines.append(f"{a:.6f},{b:.6f},{c:.6f},{side},{a - 2 * c:.6f}")
    Path("t.csv").write_text("\n".join(lines) + "\n")


def trained(capsys, *flags):
    """The metrics of a run."""
    assert main([*WATCHED, "--drop", "value", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_metrics_say_what_was_held_out_and_kept(capsys):
    found = trained(capsys, "--out", "r", "--epochs", "30")
    log = [json.loads(line) for line in Path("r/log.jsonl").read_text().splitlines()]
    losses = [entry["validation_loss"] for entry in log]
    kept = 1 + losses.index(min(losses))
    assert found["kept_epoch"] == kept
    assert found["epochs"] == len(log) == min(kept + 3, 30) < 30
    assert found["validation_loss"] == min(losses)
    assert found["validation_accuracy"] == pytest.approx(log[kept - 1]["validation_score"])
    assert found["train_rows"] + found["validation_rows"] + found["test_rows"] == 150
    assert abs(found["validation_rows"] - 30) <= 1
    assert (found["patience"], found["watched"]) == (3, "held-out loss")
    assert main([*WATCHED, "--drop", "value", "--out", "r", "--resume", "--epochs", "30"]) == 0
    text = capsys.readouterr().out
    assert f"3 epochs, for the held-out loss; the model of epoch {kept} is kept" in text
    assert "validation accuracy" in text


def test_without_validation_the_training_loss_is_watched_and_without_patience_the_last_kept(capsys):
    flags = ["--drop", "target", "--epochs", "6", "--json"]
    values = [*TRAIN[:3], "--target", "value", "--layers", "2", *flags]
    assert main([*values, "--patience", "1", "--out", "a"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["watched"] == "training loss"
    assert "kept_epoch" not in found
    assert main([*values, "--validation", "0.2", "--out", "b"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept_epoch"] == found["epochs"] == 6
    assert "watched" not in found
    assert found["validation_r2"] <= 1


@pytest.mark.parametrize("saves", [5, 8])  # in the middle of an epoch, and at its end
def test_a_killed_run_goes_on_to_the_same_bits(saves, stem, tmp_path, capsys):
    whole = trained(capsys, "--out", "whole", "--epochs", "9", "--batch", "40")
    flags = [*WATCHED, "--drop", "value", "--epochs", "9", "--batch", "40", "--out", "cut"]
    process = stem.fork(["-c", KILLED, str(saves), *flags], tmp_path / "words", folder=os.getcwd())
    ended = process.wait(300)
    assert ended.code == -signal.SIGKILL, ended.errors
    again = trained(capsys, "--out", "cut", "--epochs", "9", "--batch", "40", "--resume")
    for name in ("epochs", "kept_epoch", "validation_loss", "test_accuracy", "loss"):
        assert again[name] == whole[name], name
    a, b = (hdnn.load(f"{run}/model.safetensors").state_dict() for run in ("whole", "cut"))
    assert all(bool((a[name] == b[name]).all()) for name in a)


def test_every_level_and_planar_points_can_be_watched(capsys):
    flags = ["--layers", "4", "--multilevel", "2", "--epochs", "2", "--batch", "2000", "--json"]
    assert main(["train", "--data", "double_moons", "--validation", "0.1", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["epochs"], found["kept_epoch"], found["validation_rows"]) == (4, 4, 400)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--validation", "1"], "validation must be at least 0 and less than 1, but got 1.0"),
        (["--validation", "-0.1"], "validation must be at least 0"),
        (["--validation", "0.001"], "120 rows are too few to hold out 0.001 of each of 2 classes"),
        (["--patience", "0"], "patience must be"),
    ],
)
def test_what_cannot_be_held_out_ends_with_one_sentence(flags, words, capsys):
    assert main([*WATCHED, "--drop", "value", *flags]) == 2
    assert words in told(capsys)
    assert not Path("runs").exists()
