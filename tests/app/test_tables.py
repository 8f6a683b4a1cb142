"""Tables as people have them, by the commands: texts, gaps, and what is said of them."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import torch

from hdnn.__main__ import main
from hdnn.app.runs import Run
from hdnn.serialization import load
from said import files

QUICK = ["--layers", "1", "--epochs", "2", "--quiet"]


def people(rows=60, seed=0):
    """A CSV of numbers, texts, truth values and gaps, and a target that depends on them."""
    draw = random.Random(seed)
    lines = ["age,town,member,grade,kind"]
    for row in range(rows):
        age, town = draw.randint(18, 80), draw.choice(["Aarau", "Bern", "Chur"])
        kind = "late" if (town == "Bern") != (age > 50) else "early"
        shown = "NA" if row % 9 == 0 else age
        where = "" if row % 10 == 0 else town
        lines.append(
            f"{shown},{where},{draw.choice(['TRUE', 'false'])},{draw.randint(1, 3)},{kind}"
        )
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with such a table and a run on it."""
    folder = tmp_path_factory.mktemp("people")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setitem(sys.modules, "matplotlib", None)
        Path("people.csv").write_text(people())
        Path("new.csv").write_text("age,town,member,grade\n?,Basel,,9\n30,Bern,true,01\n")
        flags = ["--data", "people.csv", "--target", "kind", "--categorical", "grade"]
        assert main(["train", *flags, "--out", "run", *QUICK]) == 0
    return folder


@pytest.fixture(autouse=True)
def beside_the_run(trained, monkeypatch):
    monkeypatch.chdir(trained)


def test_texts_gaps_and_named_numbers_are_inputs_and_remembered():
    columns = Run("run").columns()
    assert columns.names == [
        *("age", "age is missing"),
        *("town=Aarau", "town=Bern", "town=Chur", "town is missing"),
        *("member", "grade=1", "grade=2", "grade=3"),
    ]
    assert load("run/model.safetensors").augment.inputs == 10  # pyright: ignore
    notes = json.loads(Path("run/metrics.json").read_text())["notes"]
    assert notes[0] == "columns taken as categories: 'town' (3), 'grade' (3)."
    assert notes[1].startswith("missing values are filled by the median")
    config = Path("run/config.toml").read_text()
    assert 'categorical = ["grade"]' in config
    assert 'missing = "fill"' in config


def test_predictions_say_what_is_new(capsys):
    assert main(["predict", "--run", "run", "--data", "new.csv", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["rows"] == 2
    assert len(result["notes"]) == 3
    for words in ("'town' has categories", "'member' has no value in 1 row", "in 1 row: '9'"):
        assert words in err
        assert any(words in note for note in result["notes"])
    assert main(["certify", "run", "--data", "new.csv", "--json"]) == 0
    assert "note: column 'town' has categories that were not learned" in capsys.readouterr().err


def test_a_whole_table_is_predicted_without_a_word_and_certified(capsys):
    assert main(["predict", "--run", "run", "--data", "people.csv", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["notes"] == []
    assert err == ""
    assert main(["certify", "run"]) == 0


@pytest.mark.usefixtures("no_pictures")
def test_the_written_config_trains_the_same_model():
    assert main(["train", "--config", "run/config.toml", "--out", "again", "--quiet"]) == 0
    first, again = (load(f"{run}/model.safetensors").state_dict() for run in ("run", "again"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert Path("again/columns.json").read_bytes() == Path("run/columns.json").read_bytes()


@pytest.mark.usefixtures("no_pictures")
def test_notes_are_said_once_for_all_seeds(capsys):
    flags = ["--data", "people.csv", "--target", "kind", "--seeds", "2", "--out", "seeds", *QUICK]
    assert main(["train", *flags]) == 0
    assert capsys.readouterr().err.count("columns taken as categories") == 1
    assert main(["predict", "--run", "seeds", "--data", "new.csv", "--json"]) == 0
    assert capsys.readouterr().err.count("'town' has categories") == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--missing", "refuse"], "people.csv, line 2, column 'age': the value is missing"),
        (["--missing", "mean"], "missing 'mean' is not known; choose one of fill, refuse"),
        (["--categorical", "twon"], "no column 'twon'; did you mean 'town'?"),
        (["--categorical", "kind"], "--categorical kind is for an input, but it is the target"),
        (["--target", "town"], "line 2, column 'town': the value is missing"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(flags, words, capsys):
    before = files()
    given = ["--data", "people.csv", "--target", "kind", *flags, "--out", "bad"]
    assert main(["train", *given]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert files() == before


def test_planar_sets_have_no_texts_and_no_gaps(capsys):
    for flags in (["--categorical", "x1"], ["--missing", "refuse"]):
        assert main(["train", "--data", "swiss_roll", *flags]) == 2
        assert "categorical and missing are for files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "text"), ("gaps", "some"), ("fill", None), ("values", ["a"]), ("name", 3)],
)
def test_an_edited_encoding_is_refused(name, value, tmp_path, capsys):
    for file, content in files(Path("run")).items():
        (tmp_path / Path(file).name).write_bytes(content)
    columns = json.loads((tmp_path / "columns.json").read_text())
    columns["encoding"][0][name] = value
    (tmp_path / "columns.json").write_text(json.dumps(columns))
    assert main(["predict", "--run", str(tmp_path), "--data", "people.csv"]) == 2
    assert "its encoding cannot be" in capsys.readouterr().err


def test_an_edited_median_is_seen(tmp_path, capsys):
    for file, content in files(Path("run")).items():
        (tmp_path / Path(file).name).write_bytes(content)
    columns = json.loads((tmp_path / "columns.json").read_text())
    columns["encoding"][0]["fill"] += 1
    (tmp_path / "columns.json").write_text(json.dumps(columns))
    assert main(["predict", "--run", str(tmp_path), "--data", "people.csv"]) == 2
    assert "not the one that the model of this run was trained with" in capsys.readouterr().err
