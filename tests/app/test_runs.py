"""Configs, their files, and the folders of runs."""

from __future__ import annotations

import json
import os
import shutil
import string
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hdnn import serialization
from hdnn.__main__ import main
from hdnn.app import runfiles, runs
from hdnn.app.agents.runs import ControlRun
from hdnn.app.configs.common import find_device
from hdnn.app.configs.graph import config_of_graph, table_for
from hdnn.app.configs.kinds import config_of, read_config
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run
from hdnn.app.tasks import graph as graph_task
from hdnn.app.tasks.task import known_metrics
from hdnn.base.config import toml_value
from hdnn.base.files import read_json
from hdnn.distributed import Config
from hdnn.errors import CheckpointError, DataError, HDNNError, OptionError


def config(**options):
    return TableConfig.of({"data": "swiss_roll", **options})


def test_a_config_is_read_back_from_its_own_file(tmp_path):
    for made in (
        config(seed=3, T=1.5, clip=2.0),
        TableConfig.of({"data": 'a "b"\\.csv', "target": "t\n\t\x7fü", "drop": ["x", "y,z"]}),
    ):
        (tmp_path / "config.toml").write_text(made.to_toml())
        assert TableConfig.of(read_config(tmp_path / "config.toml")) == made


def graph_config():
    """The config of a training on a ring."""
    return config_of_graph(table_for(None, 4), {"layers": 2})


def graph_resumed(folder):
    """The config of the training that `hdnn train --resume` finds in a folder."""
    return graph_task.asked(graph_task.PartTask, {"out": str(folder), "resume": True})[0].config


@pytest.mark.parametrize(("data", "kind"), [("swiss_roll", "table"), ("mnist", "images")])
def test_a_run_says_its_kind_and_one_of_before_is_known_by_its_data(data, kind, tmp_path):
    run, made = Run(tmp_path), config_of({"data": data})
    run.start(made)
    text = run.config_file.read_text()
    assert f'kind = "{kind}"\n' in text
    assert run.config() == made
    run.config_file.write_text(text.replace(f'kind = "{kind}"\n', ""))
    assert run.config() == made
    run.config_file.write_text(text.replace(f'kind = "{kind}"', 'kind = "graph"'))
    with pytest.raises(CheckpointError, match=f"kind must be '{kind}' .*, not 'graph'"):
        run.config()


def test_a_graph_says_its_kind_and_one_of_before_is_resumed(tmp_path):
    made, run = graph_config(), Run(tmp_path)
    assert run.kind is None
    written = json.loads(made.text())
    for content in (written, {name: value for name, value in written.items() if name != "kind"}):
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert run.kind == "graph"
        assert run.config() == graph_resumed(tmp_path) == made
    (tmp_path / "config.json").write_text(json.dumps({**written, "kind": "table"}))
    with pytest.raises(CheckpointError, match=r"kind must be 'graph' .*, not 'table'"):
        graph_resumed(tmp_path)


@given(st.text(st.characters(blacklist_categories=["Cs"])))
def test_any_text_survives_toml(text):
    assert tomllib.loads(f"x = {toml_value(text)}")["x"] == text


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
    name = TableConfig.of({"data": "../mü lk/../a b?.csv", "seed": 2}).run_name()
    assert name == "a_b-h2-4-2"
    names = [
        TableConfig.of({"data": "a.csv", "target": target, "layers": 8}).run_name()
        for target in ("价格", "数量", "größe (m)", "../x", "..", "/", "é" * 99)
    ]
    assert names[:3] == ["a-价格-h2-8-0", "a-数量-h2-8-0", "a-größe_m-h2-8-0"]
    assert names[3:6] == ["a-x-h2-8-0", "a-target-h2-8-0", "a-target-h2-8-0"]
    assert names[6] == f"a-{'é' * 32}-h2-8-0"  # a name has at most 255 bytes
    assert set(TableConfig.of({"data": "..csv"}).run_name()) <= {*string.ascii_letters, *"-2480"}


def test_devices_that_are_not_here_are_refused():
    assert find_device("cpu") == "cpu"
    assert find_device("auto") in ("cpu", "cuda")
    for name in ("cuda:99", "tpu", "meta", "cpu:3", ""):
        with pytest.raises(OptionError, match="device"):
            find_device(name)


@pytest.mark.parametrize("kind", [Run, ControlRun])
def test_a_folder_with_anything_in_it_is_not_free(kind, tmp_path):
    run = kind(tmp_path / "new")
    run.check_free()
    run.folder.mkdir()
    run.check_free()
    (run.folder / ".config.toml.0f.tmp").touch()  # left by a kill
    run.check_free()
    (run.folder / "notes").touch()
    with pytest.raises(CheckpointError, match="is not empty"):
        run.check_free()
    run.config_file.touch()
    with pytest.raises(
        CheckpointError, match="holds a run already; go on with it by --resume"
    ) as e:
        run.check_free()
    assert ("--overwrite" in str(e.value)) == (kind is Run)  # which only `hdnn train` has
    with pytest.raises(CheckpointError, match="is a file"):
        kind(run.config_file).check_free()


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
    assert read_json(tmp_path / "x.json") == {"a": [1.0, None, None]}
    (tmp_path / "x.json").write_text("[" * 10**5)
    with pytest.raises(CheckpointError, match="cannot read"):
        read_json(tmp_path / "x.json")


# What the files of a run hold is checked when they are read

QUICK = ["--layers", "2", "--features", "4", "--epochs", "2", "--batch", "16", "--quiet"]
FLOWERS = [("a", 1.0, 2.0), ("b", 3.0, 1.0), ("c", 2.0, 5.0)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run on three classes, and one on values."""
    home = tmp_path_factory.mktemp("runs")
    rows = [
        f"{name},{x + k % 7 / 10},{y - k % 5 / 10}" for k in range(20) for name, x, y in FLOWERS
    ]
    (home / "t.csv").write_text("kind,x,y\n" + "\n".join(rows) + "\n")
    for name, target, more in (("classes", "kind", []), ("values", "y", ["--drop", "kind"])):
        flags = ["--data", str(home / "t.csv"), "--target", target, *more]
        assert main(["train", *flags, *QUICK, "--out", str(home / name)]) == 0
    return home


@pytest.fixture
def run(trained, tmp_path, capsys) -> Run:
    shutil.copytree(trained / "classes", tmp_path / "run")
    capsys.readouterr()
    return Run(tmp_path / "run")


def refused(capsys, *command: object) -> str:
    """The one sentence with which a command ends."""
    assert main([str(word) for word in command]) == 2
    said = capsys.readouterr().err
    assert said.startswith("hdnn: ")
    assert "mistake in hdnn" not in said
    assert len(said.splitlines()) == 1
    return said


ODD = [None, True, 3, -1, 1e400, "x", "", [], ["x"], [None], [[]], {}, {"a": 1}, [1e308, "y"]]
ENTRIES = ("task", "target", "names", "mean", "scale", "classes", "target_mean", "target_scale")


@pytest.mark.parametrize("entry", ENTRIES)
def test_columns_of_any_other_kind_are_one_sentence(run, trained, entry, capsys):
    given = json.loads(run.columns_file.read_text())
    for odd in ODD:
        run.columns_file.write_text(json.dumps(given | {entry: odd}))
        if run.columns_file.read_text() == json.dumps(given):
            continue
        said = refused(capsys, "predict", "--run", run.folder, "--data", trained / "t.csv")
        assert "columns.json" in said
    del given[entry]
    run.columns_file.write_text(json.dumps(given))
    assert f"it has no {entry}" in refused(
        capsys, "predict", "--run", run.folder, "--data", "t.csv"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["c", "b", "a"]},
        {"classes": ["a", "b", "d"]},
        {"classes": ["a", "b"]},
        {"classes": ["a", "b", "c", "d"]},
        {"mean": [0.0, 0.0]},
        {"scale": [1.0, 1.0]},
        {"names": ["y", "x"]},
        {"names": ["x"], "mean": [0.0], "scale": [1.0]},
        {"task": "regression", "classes": []},
        {"target": "other"},
    ],
)
def test_columns_that_are_not_those_of_the_model_are_refused(run, trained, change, capsys):
    rows = trained / "t.csv"
    assert main(["predict", "--run", str(run.folder), "--data", str(rows)]) == 0
    capsys.readouterr()
    given = json.loads(run.columns_file.read_text())
    run.columns_file.write_text(json.dumps(given | change))
    for command in ("predict", "certify"):
        said = refused(capsys, command, "--run", run.folder, "--data", rows)
        assert "columns.json" in said
        assert "do not fit together" in said or "was edited" in said
    run.columns_file.write_text(json.dumps(given))  # in another layout
    assert main(["predict", "--run", str(run.folder), "--data", str(rows)]) == 0


def test_columns_of_another_run_are_refused(run, trained, capsys):
    shutil.copy(trained / "values" / "columns.json", run.columns_file)
    assert "do not fit" in refused(
        capsys, "predict", "--run", run.folder, "--data", trained / "t.csv"
    )


def test_a_run_from_before_its_model_knew_the_columns_predicts_as_ever(run, trained, capsys):
    command = ["predict", "--run", str(run.folder), "--data", str(trained / "t.csv")]
    assert main(command) == 0
    before = capsys.readouterr().out
    serialization.save(serialization.load(run.model_file), run.model_file)
    assert serialization.read_note(run.model_file) is None
    assert main(command) == 0
    assert capsys.readouterr().out == before


METRICS = (*get_type_hints(runfiles.TableMetrics), "test_accuracy")


@pytest.mark.parametrize("entry", METRICS)
def test_metrics_of_any_other_kind_are_one_sentence(run, entry, capsys):
    given = json.loads(run.metrics_file.read_text())
    resume = ["train", "--resume", "--out", str(run.folder)]
    assert main(resume) == 0
    capsys.readouterr()
    changed = [(odd, {entry: odd}) for odd in ODD]
    if entry == "certificate":
        inner = given[entry]
        shown = ("smallest_norm", "largest_norm", "guaranteed", "guarantee", "holds")
        changed += [(0, {entry: {**inner, name: odd}}) for name in shown for odd in ODD]
    for odd, change in changed:
        run.metrics_file.write_text(json.dumps(given | change))
        code, said = main(resume), capsys.readouterr().err
        if code:
            assert code == 2
            assert f"{run.metrics_file} is" in said
        else:  # any text is a name, and None a number that is not finite
            assert isinstance(odd, str) or odd in ({}, None, 3, 0, -1)


def test_entries_that_only_a_graph_has_may_stand_in_the_metrics_of_a_table(run, capsys):
    given = json.loads(run.metrics_file.read_text())
    run.metrics_file.write_text(json.dumps(given | {"nodes": "a", "seconds": "long"}))
    assert main(["train", "--resume", "--out", str(run.folder)]) == 0


def test_metrics_of_another_run_are_refused(run, trained, capsys):
    given = json.loads(run.metrics_file.read_text())
    for name, value in (("seed", 7), ("layers", 3), ("data", "other.csv")):
        run.metrics_file.write_text(json.dumps(given | {name: value}))
        said = refused(capsys, "train", "--resume", "--out", run.folder)
        assert f"is of another run: its {name} is {value!r}" in said


@pytest.mark.parametrize("file", ["columns.json", "metrics.json", "config.toml"])
def test_files_that_nobody_could_have_meant_are_one_sentence(run, trained, file, capsys):
    path, rows = run.folder / file, trained / "t.csv"
    command = ["train", "--resume", "--out", run.folder]
    if file == "columns.json":
        command = ["predict", "--run", run.folder, "--data", rows]
    deep = {"config.toml": "[train]\ndrop = " + "[" * 10**5}.get(file, "[" * 10**5)
    walked = "[" * 60 + "]" * 60
    digits = '{"seed": ' + "9" * 10**4 + "}"
    huge = "[train]\nlayers = " + "9" * 400 if file == "config.toml" else digits
    for text in (deep, walked, huge, "", "\0", "[]", "3", "null", "NaN", '{"a": 1, "a": {}}'):
        path.write_text(text)
        said = refused(capsys, *command)
        assert file in said or "layers" in said
    with path.open("wb") as sparse:
        sparse.truncate(2**33)
    assert "larger than" in refused(capsys, *command)
    path.unlink()
    path.mkdir()
    assert main(list(map(str, command))) == 2
    assert "mistake" not in capsys.readouterr().err


def test_a_log_of_other_lines_is_read_as_far_as_it_is_one(tmp_path):
    run = Run(tmp_path)
    good = ['{"epoch": 1, "loss": 0.5}', '{"epoch": 2, "loss": NaN, "accuracy": null}']
    bad = [
        '{"epoch": "x"}',
        "[1]",
        "3",
        "null",
        "[" * 10**5,
        '{"loss": 1}',
        '{"epoch": 1, "a": []}',
    ]
    run.log_file.write_text("\n".join([good[0], *bad, good[1]]) + '\n{"epo')
    entries, faults = run.log_and_faults()
    assert [entry["epoch"] for entry in entries] == [1, 2]
    assert faults == len(bad)
    run.log_file.unlink()
    os.mkfifo(run.log_file)
    with pytest.raises(CheckpointError, match="is a pipe"):
        run.log()


def test_a_training_goes_on_though_its_log_was_edited(trained, tmp_path, capsys):
    """The checkpoint knows what it needs; of the log it keeps the lines that were there."""
    shutil.copytree(trained / "classes", tmp_path / "run")
    run = Run(tmp_path / "run")
    run.metrics_file.unlink()
    run.log_file.write_bytes(b"\xff\xfe\n{}\n[")
    assert main(["train", "--resume", "--out", str(run.folder), "--quiet"]) == 0
    assert run.model_file.read_bytes() == (trained / "classes" / "model.safetensors").read_bytes()
    assert known_metrics(run) is not None


# The same of trainings on a graph

OF_GRAPH = {"parts": 1, "nodes": 4, "layers": 2, "messages": 0, "bytes": 0, "seconds": 1.5}
OF_GRAPH |= {"data": "swiss_roll", "network": "h2", "traffic": [[0, 1, 2, 3]]}


@pytest.mark.parametrize("entry", OF_GRAPH)
def test_metrics_of_a_graph_of_any_other_kind_are_one_sentence(tmp_path, entry):
    run, file = Run(tmp_path), tmp_path / "metrics.json"
    (tmp_path / "config.json").write_text(Config(graph={}, layers=2).text())
    file.write_text(json.dumps(OF_GRAPH))
    assert run.result() == OF_GRAPH
    like = str if isinstance(OF_GRAPH[entry], str) else (int, float)
    for odd in [odd for odd in ODD if odd is True or not isinstance(odd, like)]:
        if entry == "traffic" and odd == []:
            continue  # none at all
        file.write_text(json.dumps(OF_GRAPH | {entry: odd}))
        with pytest.raises(CheckpointError, match=f"metrics.json is damaged or was .* {entry}"):
            run.result()


def test_a_config_of_a_graph_of_any_other_kind_is_one_sentence(tmp_path):
    file, made = tmp_path / "config.json", graph_config()
    for name in ("graph", "layers", "step", "gain", "seed", "options", "network", "nonsense"):
        for odd in (None, "x", [], [1], "nonsense"):
            file.write_text(json.dumps({**asdict(made), name: odd}))
            with pytest.raises(HDNNError):
                graph_resumed(tmp_path)
    file.write_text("[" * 10**5)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        graph_resumed(tmp_path)
    file.write_text(json.dumps({**asdict(made), "gain": ["a"]}))
    with pytest.raises(CheckpointError) as error:
        graph_resumed(tmp_path)
    assert str(error.value).count("config.json") == 1
    file.write_text(json.dumps({"layers": 2}))
    with pytest.raises(CheckpointError, match=r"is no config of a training on a graph\.$"):
        graph_resumed(tmp_path)
