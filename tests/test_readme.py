"""Every example of the README and of the pages runs as it stands; what they name is there.

The cells of tutorials are run when the site is built (docs/site/tutorials.py).
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
RUN = [
    ROOT / "README.md",
    ROOT / "PYPI.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("guides/*.md")),
]
# Made when the site is built, from elsewhere in the repository or from docstrings.
BUILT = {"changelog.md", "contributing.md", "playground.html"}


def examples(page: Path) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```",
        page.read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )


EXAMPLES = {
    f"{page.relative_to(ROOT).with_suffix('').as_posix()}-{k}": example
    for page in RUN
    for k, example in enumerate(examples(page))
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run_and_print_what_they_say(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    example, names = EXAMPLES[name], {}
    exec(compile(example, name, "exec"), names)
    printed, said = capsys.readouterr()
    assert said == ""
    for promise in re.findall(r"print\(.*\)  # (H2\(.*\)|\d+|True)\b", example):
        assert promise in printed
    if "accuracy" in names:
        assert names["accuracy"] > 0.95


@pytest.mark.parametrize(
    "page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_no_example_is_written_so_that_it_would_not_be_run(page: Path):
    shown = re.findall(
        r"^[ \t]*(?:`{3,}|~{3,})[ \t]*[{.]*py(?:thon)?3?\b",
        page.read_text("utf-8"),
        re.M,
    )
    assert len(shown) == len(examples(page))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 90
    assert all(
        len(example.splitlines()) <= 12
        for example in examples(ROOT / "README.md")
    )


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_pictures_and_pages_exist(page):
    targets = re.findall(
        r"\]\(([^)#]+)(?:#[^)]*)?\)|src=\"([^\"]+)\"", page.read_text("utf-8")
    )
    for target in map("".join, targets):
        if not target.startswith("http") and target not in BUILT:
            assert (page.parent / target).exists(), target


def test_all_results_are_listed_with_their_commands():
    text = (DOCS / "results" / "index.md").read_text("utf-8")
    listed = re.findall(
        r"^\| \[.*?\]\((.*?)\) \| `(?:hdnn|python) .*?` \| \S",
        text,
        re.MULTILINE,
    )
    pages = [
        page.name
        for page in DOCS.glob("results/*.md")
        if page.name != "index.md"
    ]
    assert sorted(listed) == sorted(pages)


def test_index_and_readme_repeat_what_the_results_found(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    index = importlib.import_module("index")
    for page, text in index.pages().items():
        assert page.read_text("utf-8") == text, "python benchmarks/index.py"
    readme = (ROOT / "README.md").read_text("utf-8")
    for name in ("table-planar", "doctor"):
        assert f"({name}.md) | `" in index.index(index.results())
        assert f"results/{name}.md) | {index.results()[name]['found']} |" in (
            readme
        )


NUMBER = r"(?<![A-Za-z\d.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
SHARE = re.compile(rf"{NUMBER}(?: of {NUMBER})?")
MEASURED = (
    rf"{NUMBER} of {NUMBER}|{NUMBER} ?(?:%|percent|times|-fold|ms|MiB|GiB)"
)


def sentences(page: Path) -> Iterator[str]:
    """The sentences of a page outside of code; a row of a table is one."""
    text = page.read_text("utf-8")
    text = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.S | re.M)
    for block in re.split(r"\n\s*\n|\n(?=\||- )", text):
        if block.lstrip().startswith("|"):
            yield block
        else:
            line = " ".join(block.split())
            yield from re.split(r"(?<=[.;!?])\s+(?=[^a-z\s])", line)


def numbers(text: str) -> set[str]:
    return {number.replace(",", "") for number in SHARE.findall(text)}


def without_code_and_links(text: str) -> str:
    return re.sub(r"`[^`]*`|!\[[^\]]*\]|\]\([^)]*\)|<[^>]*>", "", text)


@pytest.mark.parametrize(
    "page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_every_number_beside_a_link_to_a_result_stands_in_that_result(page):
    for sentence in sentences(page):
        names = set(re.findall(r"results/([\w-]+)\.md", sentence)) - {"index"}
        known = set()
        for name in names:
            result = DOCS / "results" / name
            known |= numbers(result.with_suffix(".md").read_text("utf-8"))
            found = json.loads(result.with_suffix(".json").read_text("utf-8"))
            known |= numbers(found["found"])
        if names:
            assert numbers(without_code_and_links(sentence)) <= known, sentence


@pytest.mark.parametrize("name", ["README.md", "PYPI.md", "docs/index.md"])
def test_no_figure_on_the_first_pages_is_without_its_result(name):
    for sentence in sentences(ROOT / name):
        if re.search(MEASURED, without_code_and_links(sentence)):
            assert "results/" in sentence, sentence


def test_every_test_that_the_guide_to_the_paper_names_is_there():
    named = re.findall(
        r"`(test_\w+)`", (DOCS / "guides" / "paper.md").read_text("utf-8")
    )
    text = "".join(
        file.read_text("utf-8") for file in (ROOT / "tests").rglob("test_*.py")
    )
    assert len(named) > 10
    assert [name for name in named if f"def {name}(" not in text] == []
