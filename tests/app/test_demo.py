"""The demo trains, certifies, draws and saves, or says at once why it cannot."""

import functools
import json
import os
import sys

import pytest
import torch

import hdnn
from hdnn import training
from hdnn.app.commands import demo
from hdnn.errors import CheckpointError, HDNNError, TrainingError


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return demo.run(layers=4, epochs=2, out=out, progress=False)


def test_the_result_is_json(result):
    assert json.loads(json.dumps(result)) == result


def test_the_result_tells_accuracy_gradients_and_size(result):
    assert 0.4 < result["test_accuracy"] <= 1
    assert 0.4 < result["train_accuracy"] <= 1
    assert 1 <= result["smallest_bsm_norm"] <= result["largest_bsm_norm"]
    assert result["symplectic_defect"] < 1e-14
    assert result["parameters"] == 4 * 12 + 5
    assert result["layers"] == 4
    assert result["epochs"] == 2
    assert result["bsm_samples"] == 1000
    assert result["seconds"] >= result["training_seconds"]


def test_the_pictures_are_written(result):
    assert set(result["pictures"]) == {"decision_regions", "bsm_norms", "training"}
    for path in result["pictures"].values():
        with open(path, "rb") as file:
            assert file.read(8) == b"\x89PNG\r\n\x1a\n"


def test_the_saved_model_has_the_accuracy_that_was_told(result):
    model = hdnn.load(result["model"])
    assert isinstance(model, hdnn.Model)
    data = hdnn.data.planar.swiss_roll(seed=result["seed"])
    accuracy = (model.predict(data.x_test) == data.t_test).double().mean().item()
    assert accuracy == result["test_accuracy"]


def test_the_same_seed_gives_the_same_numbers(result, tmp_path):
    again = demo.run(layers=4, epochs=2, out=tmp_path, progress=False)
    changing = {"seconds", "training_seconds", "model", "pictures"}
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in result.items() if k not in changing
    }


def test_the_demo_prints_nothing_and_leaves_no_trace_in_torch(tmp_path, capfd):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    demo.run(layers=1, epochs=1, out=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert capfd.readouterr() == ("", "")
    assert {p.suffix for p in tmp_path.iterdir()} <= {".png", ".safetensors"}


def test_the_summary_states_the_certificate(result):
    text = demo.summary({**result, "smallest_bsm_norm": 1.0299999, "test_accuracy": 0.99975})
    assert "smallest norm(dy_N/dy_j) = 1.029999 >= 1: holds" in text
    assert "test accuracy   99.98%" in text or "99.97%" in text
    assert result["model"] in text
    assert all(path in text for path in result["pictures"].values())


def test_the_summary_admits_a_norm_below_one(result):
    text = demo.summary({**result, "smallest_bsm_norm": 0.9999999, "holds": False})
    assert "smallest norm(dy_N/dy_j) = 0.999999 >= 1: DOES NOT HOLD" in text


def test_without_matplotlib_there_is_a_model_and_a_word_about_the_pictures(tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = demo.run(layers=1, epochs=1, out=tmp_path, progress=False)
    assert result["pictures"] == {}
    assert "hdnn[plot]" in demo.summary(result)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.fixture
def no_training(monkeypatch):
    @functools.wraps(training.fit)
    def fit(*_, **__):
        raise AssertionError("the training has started")

    monkeypatch.setattr("hdnn.training.fit", fit)


@pytest.mark.usefixtures("no_training")
def test_a_folder_that_is_a_file_is_refused_before_training(tmp_path):
    path = tmp_path / "taken"
    path.write_text("here already")
    with pytest.raises(CheckpointError, match=r"cannot write to the folder .*taken"):
        demo.run(out=path)
    assert path.read_text() == "here already"


@pytest.mark.usefixtures("no_training")
def test_a_full_disk_is_told_before_training(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HDNNError, match=r"No space left on device; choose one .* MiB of room"):
        demo.run(out=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_training")
def test_impossible_networks_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(HDNNError, match="layers"):
        demo.run(layers=0, out=tmp_path / "new")
    with pytest.raises(HDNNError, match="seed"):
        demo.run(seed=-1, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_no_epochs_are_refused(tmp_path):
    with pytest.raises(TrainingError, match="epochs"):
        demo.run(layers=2, epochs=0, out=tmp_path)
