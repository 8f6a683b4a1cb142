"""`python -m hdnn`: it starts, or says in one sentence what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import hdnn
from hdnn.__main__ import main
from hdnn.app.commands import demo


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
    "arguments",
    [
        ["--layers", "0"],
        ["--layers", "-3"],
        ["--epochs", "0"],
        ["--seed", "-1"],
        ["--layers", "many"],
        ["--nonsense"],
        ["--seed"],
    ],
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


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
sys.argv = ["hdnn", *{arguments!r}]
from hdnn.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 0, "to neighbours only"),
        (["--help"], 0, "examples:"),
        (["--version"], 0, f"hdnn {hdnn.__version__}"),
        (["trian"], 2, "No such command 'trian'. Did you mean 'train'?"),
        (["--nothing"], 2, "No such option: --nothing"),
        (["train", "--help"], 0, "--learning-rate"),
        (["train", "--layers", "two"], 2, "Invalid value for '--layers'"),
        (["predict", "--run"], 2, "requires an argument"),
        (["graph", "check", "-h"], 0, "TOML file"),
        (["demo", "--help"], 0, "number of layers"),
        (["launch", "--help"], 0, "--replicas"),
    ],
)
def test_help_and_wrong_commands_need_no_torch(arguments, code, words):
    script = WITHOUT_TORCH.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_names_the_extra(missing, monkeypatch, capsys):
    for name in [m for m in sys.modules if m.split(".")[0] in (missing, "hdnn.app.cli")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["--help"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert "pip install 'hdnn[cli]'" in captured.err


INTERRUPTED = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise RuntimeError\n"


def interrupted_import(tmp_path, *command):
    """Run Python where Ctrl-C comes while PyTorch is imported."""
    (tmp_path / "torch").mkdir(exist_ok=True)
    (tmp_path / "torch" / "__init__.py").write_text(INTERRUPTED)
    source = str(Path(hdnn.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])}
    done = subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_while_the_program_is_imported_is_one_line(tmp_path):
    said = (130, "", "hdnn: interrupted\n")
    assert interrupted_import(tmp_path, "-m", "hdnn", "info") == said
    assert interrupted_import(tmp_path, "-mhdnn", "info") == said
    script = tmp_path / "hdnn"
    script.write_text("import sys\nfrom hdnn.__main__ import main\nsys.exit(main())\n")
    assert interrupted_import(tmp_path, str(script), "info") == said


def test_ctrl_c_in_other_programs_is_theirs_to_hear(tmp_path):
    script = "try:\n    import hdnn\nexcept KeyboardInterrupt:\n    print('theirs')"
    assert interrupted_import(tmp_path, "-c", script) == (0, "theirs\n", "")


def test_ctrl_c_after_the_import_is_one_line_too(monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hdnn.app.cli.main", stop)
    assert main(["info"]) == 130
    assert capsys.readouterr().err == "hdnn: interrupted\n"


def test_an_interruption_while_python_ends_changes_nothing():
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "sys.argv = ['hdnn', '--version']\n"
        "from hdnn.__main__ import main\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert hdnn.__version__ in ended.stdout
