"""The command line: what it prints, and how it says that the input was wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import hdnn
from hdnn import demo
from hdnn.__main__ import main


def test_the_demo_prints_a_table_for_people(tmp_path, capsys):
    out = str(tmp_path / "demo")
    assert main(["demo", "--layers", "2", "--epochs", "1", "--out", out, "--quiet"]) == 0
    printed = capsys.readouterr().out
    assert "test accuracy" in printed
    assert ">= 1: holds" in printed


def test_the_demo_prints_json_for_machines(tmp_path, capsys):
    out = str(tmp_path / "demo")
    assert main(["demo", "--layers", "2", "--epochs", "1", "--out", out, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["layers"] == 2
    assert result["smallest_bsm_norm"] >= 1 - 1e-12
    assert isinstance(hdnn.load(result["model"]), hdnn.Model)


@pytest.mark.parametrize(
    "arguments", [["--layers", "0"], ["--layers", "-3"], ["--epochs", "0"], ["--seed", "-1"]]
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, tmp_path, capsys):
    out = str(tmp_path / "demo")
    assert main(["demo", "--out", out, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hdnn: ")
    assert len(captured.err.splitlines()) == 1


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("precious")
    assert main(["demo", "--out", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
    assert file.read_text() == "precious"


@pytest.mark.parametrize("arguments", [["--layers", "many"], ["--nonsense"], ["--seed"]])
def test_bad_flags_are_refused_with_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *arguments])
    assert stopped.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_interruption_is_told_in_a_line(monkeypatch, capsys):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "hdnn: interrupted\n"


def test_python_m_hdnn_shows_help_with_examples():
    done = subprocess.run(
        [sys.executable, "-m", "hdnn", "--help"], capture_output=True, text=True, check=True
    )
    assert "examples:" in done.stdout
    assert "hdnn demo" in done.stdout
