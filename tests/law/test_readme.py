"""Every example of the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("k", range(len(EXAMPLES)))
def test_examples_run_and_print_what_they_say(k, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile(EXAMPLES[k], f"README-{k}", "exec"), {})
    printed = capsys.readouterr().out
    for promise in re.findall(r"print\(.*\)  # (H2\(.*\)|\d+|True)\b", EXAMPLES[k]):
        assert promise in printed


def test_there_are_examples():
    assert len(EXAMPLES) >= 3
