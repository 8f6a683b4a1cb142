"""Every example of the README runs as it stands, and says what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_run(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    for promise in re.findall(r"print\(.*\)  # (H2\(.*\)|\d+|True)\b", example):
        assert promise in printed
    if "accuracy" in names:
        assert names["accuracy"] > 0.95
    assert len(example.splitlines()) <= 12


GUIDES = {
    f"{name}-{k}": example
    for name in ("blocks", "distributed", "modules", "tables")
    for k, example in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{name}.md").read_text(), re.DOTALL)
    )
}


@pytest.mark.parametrize("name", GUIDES)
def test_examples_of_the_guides_run(name, capsys):
    exec(compile(GUIDES[name], name, "exec"), {})
    assert capsys.readouterr().err == ""


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_and_pages_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", page.read_text()):
        if not "".join(target).startswith("http"):
            assert (page.parent / "".join(target)).exists(), target
