"""Files that an earlier version wrote are read, and trainings that it began come to the same end.

Where a processor and the packages are those of the machine on which the files were written, values
are the same to the last bit; elsewhere they are the same but for rounding.
"""

from __future__ import annotations

import json
import math
import pickle
import re
import shutil
import tomllib
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("numba")

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import hdnn
from hdnn.errors import CheckpointError
from kept import small
from kept.json_fields import images_for_mnist
from kept.small import FILES, PLACE, hdnn_command
from said import started_alone

EXPECTED = json.loads((FILES / "expected.json").read_text("utf-8"))
TENSORS = load_file(FILES / "expected.safetensors")
SAME_MACHINE = small.machine() == EXPECTED["machine"]
SAVED = [
    f"{kind}/{path.stem}"
    for kind in ("networks", "models", "image_models")
    for path in sorted((FILES / kind).iterdir())
]
TRAINED = 1e-3  # rounding that a few steps of training may enlarge
# Trainings that round otherwise since their output layers are solved by compiled code.
ROUNDED = {"values"}


@pytest.fixture(autouse=True)
def in_a_copy_of_the_files(tmp_path, monkeypatch):
    """Commands may write to the folders, which hold the paths of where they are."""
    home = tmp_path / "files"
    shutil.copytree(FILES, home)
    for path in [*home.rglob("*.toml"), *home.rglob("*.json")]:
        path.write_text(path.read_text("utf-8").replace(PLACE, str(home)), "utf-8")
    monkeypatch.chdir(home)
    started_alone(monkeypatch)
    with small.without_pictures():
        yield


def check_alike(found, expected, what="", tolerance=1e-6):
    """Equal tensors; those that were computed on another kind of machine but for rounding."""
    if SAME_MACHINE:
        tolerance = 0.0
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def check_near(found, expected, tolerance=1e-6):
    """The same in numbers that JSON has: equal on the same machine, else but for rounding."""
    if isinstance(expected, float) and not SAME_MACHINE:
        assert math.isclose(found, expected, rel_tol=tolerance, abs_tol=tolerance)
    elif isinstance(expected, dict):
        for name in expected:
            check_near(found[name], expected[name], tolerance)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            check_near(one, other, tolerance)
    else:
        assert found == expected


# Networks and models


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_network_is_read_and_computes_the_same(name):
    model = hdnn.load(f"{name}.safetensors")
    check_computed(name, model)


def check_computed(name, model):
    for what, value in small.computed(model, TENSORS[f"{name}: x"]).items():
        # A gradient is a long sum.
        check_alike(value, TENSORS[f"{name}: {what}"], what, 1e-6 if what == "y" else 1e-5)


@pytest.mark.parametrize("name", SAVED)
def test_a_network_is_written_as_it_was(name):
    hdnn.save(hdnn.load(f"{name}.safetensors"), "again.safetensors")
    (about, tensors), (new_about, new_tensors) = map(
        _content, (f"{name}.safetensors", "again.safetensors")
    )
    assert new_about == about
    assert new_tensors.keys() == tensors.keys()
    assert all(torch.equal(new_tensors[key], tensors[key]) for key in tensors)


def _content(path):
    """What a file says of itself, but for the version and its checksum, and its tensors."""
    with safe_open(path, framework="pt") as file:
        about = {key: json.loads(text) for key, text in file.metadata().items()}
    for text in about.values():
        del text["version"], text["sha256"]
    return about, load_file(path)


@pytest.mark.parametrize(
    ("kind", "makers"),
    [
        ("networks", small.networks),
        ("models", small.whole_models),
        ("image_models", small.image_models),
    ],
)
def test_the_seeds_that_made_them_make_the_same_weights(kind, makers):
    for name, model in makers().items():
        saved = hdnn.load(f"{kind}/{name}.safetensors").state_dict()
        for key, value in model.state_dict().items():
            check_alike(value, saved[key], f"{name} {key}")


@pytest.mark.parametrize("name", ["unit_h1", "unit_h2"])
def test_a_unit_takes_its_state_dict_and_computes_the_same(name):
    unit = small.units()[name]
    unit.load_state_dict(load_file(f"units/{name}.safetensors"))
    check_computed(f"units/{name}", unit)
    with pytest.raises(CheckpointError, match=r"save their state_dict\(\)"):
        hdnn.save(unit, "unit.safetensors")  # pyright: ignore


# Estimators


@pytest.mark.parametrize("name", ["classifier", "regressor"])
def test_a_pickled_estimator_predicts_the_same(name):
    pytest.importorskip("sklearn")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Trying to unpickle")  # of another scikit-learn
        estimator = pickle.loads(Path(f"estimators/{name}.pickle").read_bytes())
    known, new = EXPECTED[name], TENSORS["estimators: new"].numpy()
    assert estimator.get_params().items() >= known["parameters"].items()
    assert estimator.history_.loss == known["loss"]
    assert estimator.certificate_.verdict == known["verdict"]
    predictions = estimator.predict(new)
    with pytest.raises(ValueError, match="the value is missing"):
        estimator.predict(np.full_like(new, np.nan))
    if name == "classifier":
        assert predictions.tolist() == known["predictions"]
        found = torch.from_numpy(estimator.predict_proba(new))
        check_alike(found, TENSORS["classifier: probabilities"])
    else:
        np.testing.assert_allclose(predictions, known["predictions"], rtol=1e-6)


@pytest.mark.parametrize("name", ["classifier", "regressor"])
def test_the_model_of_an_estimator_is_read_and_computes_the_same(name):
    model = hdnn.load(f"estimators/{name}.safetensors")
    with torch.no_grad():
        check_alike(model(TENSORS[f"{name}: scaled"]), TENSORS[f"{name}: scores"])


# Trainings in Python


@pytest.mark.parametrize("name", small.FITS)
def test_fit_goes_on_from_a_checkpoint_to_the_same_end(name, monkeypatch):
    if name in ROUNDED:
        monkeypatch.setitem(globals(), "SAME_MACHINE", False)
    resumed, history = small.run_fit(name, Path(f"half/fit_{name}"), resume=True)
    whole, _ = small.run_fit(name, None)
    check_final(f"fit_{name}", resumed, whole)
    check_history(history, EXPECTED[f"fit_{name}"])


@pytest.mark.parametrize("name", small.IMAGE_TRAININGS)
def test_a_training_on_images_goes_on_from_a_checkpoint_to_the_same_end(name):
    resumed, whole = small.image_training(name), small.image_training(name)
    resumed.run(folder=f"half/images_{name}", resume=True, progress=False)
    whole.run(progress=False)
    check_final(f"images_{name}", resumed.model, whole.model)
    check_history(resumed.history, EXPECTED[f"images_{name}"])


def check_final(name, resumed, whole):
    found, other = resumed.state_dict(), whole.state_dict()
    for key in found:
        check_alike(found[key], TENSORS[f"{name}: final {key}"], key, TRAINED)
        check_alike(other[key], TENSORS[f"{name}: final {key}"], key, TRAINED)


def check_history(history, expected):
    check_near({**asdict(history), "seconds": None}, expected, 1e-3)


# Runs of the command line


@pytest.mark.parametrize("name", [*small.RUNS, "images"])
def test_a_complete_run_stays_as_it_is(name):
    known = json.loads(Path(f"done/{name}/metrics.json").read_text("utf-8"))
    before = {path: path.read_bytes() for path in Path("done").rglob("*") if path.is_file()}
    found = hdnn_command(f"train --resume --out done/{name} --json").result
    assert found == {**known, "run": f"done/{name}"}
    assert {path: path.read_bytes() for path in Path("done").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["classes", "values", "planar"])
def test_a_complete_run_predicts_and_certifies_the_same(name):
    known = EXPECTED[f"done/{name}"]
    predicted = hdnn_command(f"predict --run done/{name} {known['predict']} --json").result
    check_near(predicted, known["predicted"])
    certificate = hdnn_command(f"certify done/{name} --samples 20 --json").result
    for key, value in known["certificate"].items():  # in float64, of matrices of any order of sums
        alike = pytest.approx(value, rel=1e-12 if SAME_MACHINE else 1e-5)
        assert certificate[key] == (alike if isinstance(value, float) else value)


def test_all_runs_are_in_one_report():
    ended = hdnn_command("report done half --out page.html")
    assert (ended.code, ended.said) == (0, "")
    page = Path("page.html").read_text("utf-8")
    on_it = {*re.findall(r"\b(?:done|half)/\w+", page)}
    tables = {"planar", "verlet", "classes", "values", "levels"}
    assert on_it >= {f"{place}/{name}" for place in ("done", "half") for name in tables}
    assert "done/images" in on_it


@pytest.mark.parametrize("name", small.RUNS)
def test_a_run_that_was_broken_off_goes_on_to_the_same_end(name, monkeypatch):
    ended = hdnn_command(f"train --resume --out half/{name} --json")
    if name in ROUNDED and not ended.code:
        monkeypatch.setitem(globals(), "SAME_MACHINE", False)
    if ended.code and not SAME_MACHINE:  # its points may differ in their last bits
        assert ended.code == 2
        assert "data" in ended.said
        assert ended.said.count("\n") == 1
        return
    known = json.loads(Path(f"done/{name}/metrics.json").read_text("utf-8"))
    scores = {
        key: value for key, value in known.items() if key.endswith(("accuracy", "rmse", "r2"))
    }
    check_near({key: ended.result[key] for key in scores}, scores, 2e-2)
    if name == "graph":
        fresh = f"train {small.RUNS[name]} --out fresh"
    else:
        fresh = f"train --config done/{name}/config.toml --out fresh"
    assert hdnn_command(fresh).code == 0
    expected = load_file(f"done/{name}/model.safetensors")
    for folder in (f"half/{name}", "fresh"):
        found = load_file(f"{folder}/model.safetensors")
        assert found.keys() == expected.keys()
        for key, value in found.items():
            check_alike(value, expected[key], f"{folder} {key}", TRAINED)
    if name != "graph":
        check_config(f"done/{name}", "fresh")


def check_config(before, now):
    """All options of an earlier run are in the config of a later one; that may have more."""
    known, found = (
        tomllib.loads(Path(f"{run}/config.toml").read_text("utf-8"))["train"]
        for run in (before, now)
    )
    assert {name: found.get(name) for name in known} == known


def test_the_config_of_a_run_on_images_is_read_and_written_as_it_was():
    with images_for_mnist():
        assert hdnn_command("train --config done/images/config.toml --out fresh").code == 0
    check_config("done/images", "fresh")
    known, found = (
        json.loads(Path(f"{run}/metrics.json").read_text()) for run in ("done/images", "fresh")
    )
    check_near(found["loss"], known["loss"], 1e-3)
    check_near(found["test_accuracy"], known["test_accuracy"], 0.1)


# Graphs


@pytest.mark.parametrize("name", ["graph.toml", "designed.toml"])
def test_a_graph_is_read_and_has_the_same_properties(name):
    assert hdnn_command(f"graph check {name} --json").result == EXPECTED[name]


def test_a_graph_is_designed_and_written_as_it_was():
    assert hdnn_command("graph design graph.toml --keep both --out again.toml").code == 0
    assert Path("again.toml").read_text() == Path("designed.toml").read_text()


def test_files_of_nodes_are_read_and_trained_on_to_the_same_end():
    found, known = hdnn_command(f"train {small.NODES} --json").result, EXPECTED["nodes"]
    assert Path(found["data"]).samefile("nodes")
    changing = ("data", "seconds", "run", "versions")
    known = {key: value for key, value in known.items() if key not in changing}
    check_near({key: found[key] for key in known}, known, 1e-2)
