"""The benchmark that kills trainings sees what a kill can do, and kills when it says so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("kill", FOLDER / "kill.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_files_by_halves_are_found(kill, tmp_path):
    (tmp_path / "config.toml").write_text("[train]\nlayers = 3\n")
    (tmp_path / "columns.json").write_text("{}")
    (tmp_path / "log.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n')
    meta = {"hdnn-training": '{"epoch": 2}'}
    save_file({"a": torch.zeros(100)}, tmp_path / "checkpoint.safetensors", meta)
    (tmp_path / "training.png").write_bytes(b"\x89PNG" + kill.END_OF_PNG)
    assert kill.damaged(tmp_path) == []
    assert kill.reached(tmp_path) == "checkpoint of epoch 2"
    files = [path for path in tmp_path.iterdir() if path.suffix != ".toml"]
    (tmp_path / ".half.tmp").touch()
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] if file.name != "log.jsonl" else b'{"epoch": 1}\n{')
    assert len(kill.damaged(tmp_path)) == len(files)
    assert kill.leftovers(tmp_path) == [".half.tmp"]
    (tmp_path / "other").touch()
    assert len(kill.damaged(tmp_path)) == len(files) + 1  # what nobody knows does not load


def test_a_process_is_killed_unless_it_has_ended(kill):
    waiting = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert kill.kill(waiting, 0.01)
    assert not kill.kill(subprocess.Popen([sys.executable, "-c", ""]), 60)
