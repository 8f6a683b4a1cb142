"""Configs, their files, and the folders of runs."""

from __future__ import annotations

import string
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdnn import runs
from hdnn.errors import CheckpointError, DataError, HDNNError, OptionError
from hdnn.runs import Run, TrainConfig, read_config


def config(**options):
    return TrainConfig.of({"data": "swiss_roll", **options})


def test_a_config_is_read_back_from_its_own_file(tmp_path):
    for made in (
        config(seed=3, T=1.5, clip=2.0),
        TrainConfig.of({"data": 'a "b"\\.csv', "target": "t\n\t\x7fü", "drop": ["x", "y,z"]}),
    ):
        (tmp_path / "config.toml").write_text(made.to_toml())
        assert TrainConfig.of(read_config(tmp_path / "config.toml")) == made


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_any_text_survives_toml(text):
    assert tomllib.loads(f"x = {runs._toml(text)}")["x"] == text


def test_hyphens_and_underscores_are_the_same(tmp_path):
    (tmp_path / "c.toml").write_text('[train]\nlearning_rate = 1\n"test-fraction" = 0.5\n')
    assert read_config(tmp_path / "c.toml") == {"learning_rate": 1.0, "test_fraction": 0.5}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nlayer = 3\n", "unknown option 'layer'; did you mean 'layers'?"),
        ("[train]\nzzz = 3\n", "unknown option 'zzz'; there are data,"),
        ("[trian]\nlayers = 3\n", "unknown table 'trian'; did you mean 'train'?"),
        ("", "no table [train]"),
        ("train = 3\n", "no table [train]"),
        ('[train]\nlayers = "3"\n', "layers must be a whole number, but is '3'"),
        ("[train]\nlayers = true\n", "layers must be a whole number, but is True"),
        ("[train]\nlayers = 3.0\n", "layers must be a whole number"),
        ("[train]\nridge = false\n", "ridge must be a number"),
        ("[train]\ndata = 3\n", "data must be a text"),
        ("[train]\nresume = 1\n", "resume must be true or false"),
        ('[train]\ndrop = "a"\n', "drop must be a list of texts"),
        ("[train]\ntest-fraction = 0.1\ntest_fraction = 0.2\n", "twice"),
        ("[train\n", "cannot read the config file"),
    ],
)
def test_a_config_file_with_a_mistake_is_refused(tmp_path, text, words):
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(OptionError) as refused:
        read_config(tmp_path / "c.toml")
    assert words in str(refused.value)


def test_a_config_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OptionError, match="No such file"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(OptionError, match="cannot read the config file"):
        read_config(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"network": "h3"}, "network 'h3' is not known"),
        ({"activation": "tahn"}, "Did you mean 'tanh'?"),
        ({"layers": 0}, "layers must be a whole number >= 1"),
        ({"features": 0}, "features must be"),
        ({"T": 0.0}, "T must be finite and > 0"),
        ({"step": float("nan")}, "step must be finite"),
        ({"T": 1.0, "step": 0.1}, "T or step"),
        ({"network": "mlp", "T": 1.0}, "neither T nor step"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seed": 2**63}, "seed must be from 0"),
        ({"test_fraction": 1.0}, "test-fraction must be"),
        ({"dtype": "float16"}, "dtype 'float16' is not known"),
        ({"init": "zeros"}, "init 'zeros' is not known"),
        ({"task": "guess"}, "task 'guess' is not known"),
        ({"solver": "lbfgs"}, "solver 'lbfgs' is not known"),
        ({"ridge": 0.0}, "needs ridge > 0"),
        ({"patience": 0}, "patience must be a whole number >= 1"),
        ({"multilevel": "2,1"}, "multilevel must be whole numbers >= 2 with commas"),
        ({"multilevel": "3,3"}, "layers must be a multiple of 9 for multilevel 3,3, but got 64"),
        ({"multilevel": "2", "network": "mlp"}, "no multilevel training"),
        ({"target": "t"}, "needs no target"),
        ({"task": "regression"}, "has two classes"),
        ({"test_fraction": 0.3}, "a test half of its own"),
        ({"data": "mnist"}, "is a set of images"),
        ({"images": 100}, "images is for mnist and cifar10"),
        ({"data": "swiss"}, "Did you mean 'swiss_roll'?"),
        ({"data": ""}, "say what to train on"),
        ({"data": "\udcff.csv"}, "is not valid text"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(HDNNError) as refused:
        config(**options)
    assert words in str(refused.value)


def test_names_of_runs_are_plain():
    assert config().run_name() == "swiss_roll-h2-64-0"
    name = TrainConfig.of({"data": "../mü lk/../a b?.csv", "seed": 2}).run_name()
    assert name == "a_b-h2-8-2"
    assert set(TrainConfig.of({"data": "..csv"}).run_name()) <= {*string.ascii_letters, *"-2480"}


def test_devices_that_are_not_here_are_refused():
    assert runs.find_device("cpu") == "cpu"
    assert runs.find_device("auto") in ("cpu", "cuda")
    for name in ("cuda:99", "tpu", "meta", "cpu:3", ""):
        with pytest.raises(OptionError, match="device"):
            runs.find_device(name)


def test_a_folder_with_anything_in_it_is_not_free(tmp_path):
    run = Run(tmp_path / "new")
    run.check_free()
    run.folder.mkdir()
    run.check_free()
    (run.folder / ".config.toml.0f.tmp").touch()  # left by a kill
    run.check_free()
    (run.folder / "notes").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        run.check_free()
    run.config_file.touch()
    with pytest.raises(CheckpointError, match="holds a run already; go on with it by --resume"):
        run.check_free()
    with pytest.raises(CheckpointError, match="is a file"):
        Run(run.config_file).check_free()


def test_a_run_resumes_with_the_options_that_it_had(tmp_path):
    run = Run(tmp_path)
    run.config_file.write_text(config(layers=8).to_toml())
    assert run.resumed({"layers": 8, "network": "H2", "task": "auto"}) == config(layers=8)
    with pytest.raises(OptionError, match="has layers = 8, not 9"):
        run.resumed({"layers": 9})
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        Run(tmp_path / "other").config()


def test_a_run_is_not_started_on_changed_data(tmp_path):
    from hdnn.data.table import Columns

    run, settings = Run(tmp_path / "run"), config()
    one = Columns("regression", "t", ["a"], [0.0], [1.0], [])
    run.folder.mkdir()
    run.start(settings, one)
    run.start(settings, one)
    with pytest.raises(DataError, match="has changed since"):
        run.start(settings, Columns("regression", "t", ["b"], [0.0], [1.0], []))


def test_a_log_is_read_up_to_where_it_was_cut_off(tmp_path):
    run = Run(tmp_path)
    assert run.log() == []
    run.log_file.write_text('{"epoch": 1}\n3\n{"epoch": 2}\n{"epo')
    assert run.log() == [{"epoch": 1}, {"epoch": 2}]


def test_the_log_of_a_run_in_levels_counts_its_epochs_on(tmp_path):
    for level, epochs in ((0, 2), (1, 1), (10, 1), (2, 2)):
        folder = tmp_path / f"level-{level}"
        folder.mkdir()
        lines = [f'{{"epoch": {epoch}, "level": {level}}}\n' for epoch in range(1, epochs + 1)]
        (folder / "log.jsonl").write_text("".join(lines))
    log = Run(tmp_path).log()
    assert [entry["epoch"] for entry in log] == [1, 2, 3, 4, 5, 6]
    assert [entry["level"] for entry in log] == [0, 0, 1, 2, 2, 10]


def test_json_holds_no_infinite_numbers(tmp_path):
    runs.write_json(tmp_path / "x.json", {"a": [1.0, float("inf"), float("nan")]})
    assert runs.read_json(tmp_path / "x.json") == {"a": [1.0, None, None]}
    (tmp_path / "x.json").write_text("[" * 10**5)
    with pytest.raises(CheckpointError, match="cannot read"):
        runs.read_json(tmp_path / "x.json")
