"""What the site is built by: faults planted in small sites end the build, with a reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from mkdocs.exceptions import PluginError

import access
import borrowed
import cells
import docstrings
import formulas
import public
import reference
import stars
import tutorials

ROOT = Path(__file__).parents[2]
CELL = "```python\n{}\n```\n"


def build(folder: Path, hooks: str = "", plugins: str = "[]", **pages: str):
    """A small site with the strictness, the extensions and some hooks of the real one."""
    config = [
        f"INHERIT: {ROOT / 'mkdocs.yml'}",
        *(
            "docs_dir: pages",
            "site_dir: made",
            "nav: null",
            "theme: {name: mkdocs}",
        ),
        *("extra_css: []", f"plugins: {plugins}"),
        f"hooks: [{', '.join(str(ROOT / 'docs' / 'site' / name) for name in hooks.split())}]",
    ]
    (folder / "mkdocs.yml").write_text("\n".join(config), encoding="utf-8")
    for name, text in {"index": "# Home\n", **pages}.items():
        path = folder / "pages" / f"{name.replace('__', '/')}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )


def written(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


# ------------------------------------------------------------------------------ the whole build


def test_a_sound_page_is_built(tmp_path: Path):
    done = build(
        tmp_path,
        "formulas.py",
        index="# Home\n\n[below](#here) $x^2$\n\n## Here\n",
    )
    assert done.returncode == 0, done.stderr
    assert "<msup>" in (tmp_path / "made" / "index.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[gone](gone.md)", "gone.md"),
        ("[gone](#gone)", "#gone"),
        ("[away](/index.md)", "absolute"),
        ("![gone](gone.png)", "gone.png"),
    ],
)
def test_a_broken_link_ends_the_build(
    tmp_path: Path, text: str, complaint: str
):
    done = build(tmp_path, index=f"# Home\n\n{text}\n")
    assert done.returncode != 0
    assert complaint in done.stderr


def test_a_reference_to_a_name_that_is_not_there_ends_the_build(tmp_path: Path):
    done = build(
        tmp_path,
        plugins="[autorefs]",
        index="# Home\n\n[`hdnn.Nope`][hdnn.Nope]\n",
    )
    assert done.returncode != 0
    assert "hdnn.Nope" in done.stderr


def test_a_fault_in_a_tutorial_ends_the_build(tmp_path: Path):
    page = (
        "# One\n\n"
        + CELL.format("x = 0")
        + "\n"
        + CELL.format("print(x)\n1 / x")
    )
    done = build(tmp_path, "tutorials.py", tutorials__one=page)
    assert done.returncode != 0
    assert (
        "one.md, cell 2, line 9: ZeroDivisionError: division by zero"
        in done.stderr
    )


def test_a_formula_that_is_none_ends_the_build(tmp_path: Path):
    done = build(tmp_path, "formulas.py", index="# Home\n\n$\\nonsense{x}$\n")
    assert done.returncode != 0
    assert "index.md" in done.stderr
    assert r"\nonsense" in done.stderr


# ------------------------------------------------------------------------------ tutorials


def test_a_page_shows_what_its_cells_printed_and_drew(tmp_path: Path):
    drawing = "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.title('A line')\nprint('```')"
    text = (
        "# One\n\n"
        + CELL.format("x = 3\nprint(x)")
        + "\nWords.\n\n"
        + CELL.format(drawing)
    )
    ran = tutorials.run(written(tmp_path, text))
    made = tutorials.shown(text, ran, "one")
    assert "``` { .text .printed }\n3\n```\n\nWords." in re.sub(
        r"\n\n\n+", "\n\n", made
    )
    assert "```` { .text .printed }\n```\n````" in made
    assert "![A line](one-2-1.png){ .drawn }" in made
    assert ran.pictures["2-1.png"].startswith(b"\x89PNG")
    assert re.search(r"\*This page was run in \d+ s on \d+ cores", made)
    assert "(one.ipynb)" in made


def test_a_page_shows_a_moving_picture_that_a_cell_saved(tmp_path: Path):
    code = (
        "import matplotlib.pyplot as plt\n"
        "from matplotlib.animation import FuncAnimation\n"
        "figure, ax = plt.subplots(figsize=(1, 1))\n"
        "moving = FuncAnimation(figure, lambda k: ax.plot([0, k]), 3)\n"
        "moving.save('a-line-turns.webp', 'pillow')\n"
        "plt.close(figure)"
    )
    page = f"# One\n\n{CELL.format(code)}\nWords.\n\n{CELL.format('x = 1')}"
    done = build(tmp_path, "tutorials.py", tutorials__one=page)
    assert done.returncode == 0, done.stderr
    made = tmp_path / "made" / "tutorials"
    assert b"ANIM" in (made / "one-1-a-line-turns.webp").read_bytes()
    shown = (made / "one.html").read_text("utf-8")
    assert shown.count('src="one-1-a-line-turns.webp"') == 1
    assert 'alt="A line turns"' in shown


def test_a_tutorial_is_a_notebook_with_the_same_cells():
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):
        text = page.read_text("utf-8")
        made = json.loads(tutorials.notebook(text))
        sources = {"code": [], "markdown": []}
        for cell in made["cells"]:
            sources[cell["cell_type"]].append("".join(cell["source"]))
        assert sources["code"] == [c.code.strip() for c in cells.cells(text)]
        assert not re.search("```python|\\.md", "".join(sources["markdown"]))
        assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)


def test_wide_pictures_can_be_read_on_a_phone(tmp_path: Path):
    for name, width in (("wide", 2000), ("small", 600)):
        size = width.to_bytes(4, "big") + (100).to_bytes(4, "big")
        (tmp_path / f"{name}.png").write_bytes(b"\x89PNG" + bytes(12) + size)
    page = tmp_path / "page.html"
    page.write_text('<img src="wide.png"><img alt="x" src="small.png">')
    access.on_post_build(SimpleNamespace(site_dir=tmp_path))
    assert page.read_text().startswith('<img style="--width: 900px" data-wide ')
    assert page.read_text().count("data-wide") == 1


def test_what_other_programs_print_is_shown_too(tmp_path: Path):
    code = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6 * 7)'])"
    ran = tutorials.run(written(tmp_path, CELL.format(code)))
    assert ran.cells[0]["printed"] == "42\n"


def test_cells_run_in_an_empty_folder_and_can_show_their_source(tmp_path: Path):
    function = "def f():\n    return 1\n"
    code = f"import inspect, os\n\n{function}\nprint(os.listdir(), inspect.getsource(f))"
    ran = tutorials.run(written(tmp_path, f"Words.\n\n{CELL.format(code)}"))
    assert ran.cells[0]["printed"] == "[] def f():\n    return 1\n\n"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("x = (", r"cell 1, line \d: SyntaxError"),
        (
            "def f():\n    raise ValueError('so')\n\nf()",
            "cell 1, line 5: ValueError: so",
        ),
        ("raise SystemExit(0)", "cell 1, line 2: SystemExit"),
        ("import os\nos._exit(3)", "its process ended with 3"),
    ],
)
def test_a_cell_that_fails_is_named(tmp_path: Path, code: str, fault: str):
    with pytest.raises(PluginError, match=fault):
        tutorials.run(written(tmp_path, CELL.format(code)))


def test_a_page_may_not_take_long(tmp_path: Path):
    with pytest.raises(PluginError, match="to run, more than 0"):
        tutorials.run(
            written(tmp_path, CELL.format("sum(range(10**6))")), limit=0.001
        )


def test_a_page_that_hangs_is_given_up(tmp_path: Path):
    code = "import threading\nthreading.Event().wait()"
    with pytest.raises(PluginError, match="has not ended after 2 s"):
        tutorials.run(written(tmp_path, CELL.format(code)), patience=2.0)


def test_cells_are_found_with_titles_and_others_are_left_alone():
    page = '```python title="a.py"\nx = 1\n```\n\n```toml\nnot run\n```\n\n```text\nnor this\n```\n'
    assert [(cell.code, cell.line) for cell in cells.cells(page)] == [
        ("x = 1\n", 2)
    ]


@pytest.mark.parametrize(
    "fence",
    [
        "    ```python",
        "```py",
        "``` python",
        "~~~python",
        "```python3",
        "``` { .python }",
    ],
)
def test_a_cell_that_would_not_be_run_is_an_error(fence: str):
    with pytest.raises(ValueError, match="line 3: this cell would not be run"):
        cells.cells(f"# One\n\n{fence}\nx = 1\n")
    assert (
        len(
            cells.cells(
                "```python title='a'\nx\n```\n\n```pycon\n```\n```text\n```\n"
            )
        )
        == 1
    )


# ------------------------------------------------------------------------------ the reference


def test_every_public_name_has_a_group_with_a_page():
    members = reference.grouped(public.names())
    assert sum(map(len, members.values())) == len(public.names())
    assert {path.stem for path in (ROOT / "docs" / "api").glob("*.md")} == {
        "index",
        *members,
    }


def test_a_public_name_without_a_group_ends_the_build():
    class New:
        __module__ = "hdnn.newest.part"

    with pytest.raises(
        PluginError,
        match=r"hdnn.New has no page: give hdnn.newest.part a group",
    ):
        reference.grouped({"hdnn.New": New})


# ------------------------------------------------------------------------------ docstrings


def test_public_names_in_docstrings_become_links():
    text = "See `hdnn.Sparsity`, `hdnn.nope`.\n>>> # `hdnn.Sparsity`"
    assert docstrings.linked(text, own="") == (
        "See [`hdnn.Sparsity`][hdnn.Sparsity], `hdnn.nope`.\n>>> # `hdnn.Sparsity`"
    )


def test_a_network_shows_the_options_that_it_shares():
    shown = [
        given.name for given in docstrings.parameters(public.names()["hdnn.H2"])
    ]
    assert {"features", "layers", "X", "activation"} <= {*shown}
    assert "options" not in shown


# ------------------------------------------------------------------------------ the rest


@pytest.mark.parametrize(
    "formula",
    [
        r"x^",
        r"\frac{1",
        r"\frac{1}",
        r"\nonsense",
        r"\begin{foo}x\end{foo}",
        "a & b",
        "",
    ],
)
def test_what_is_no_formula_is_an_error(formula: str):
    with pytest.raises(PluginError, match=r"page\.md: "):
        formulas.mathml(formula, "page.md", display="inline")


def test_a_star_stands_for_the_pages_that_are_not_named(tmp_path: Path):
    for name in ("index", "b", "a"):
        (tmp_path / f"{name}.md").touch()
    nav = [{"Results": ["index.md", "*.md"]}]
    assert stars.expanded(nav, tmp_path) == [
        {"Results": ["index.md", "a.md", "b.md"]}
    ]


@pytest.mark.parametrize(
    ("here", "page", "link", "moved"),
    [
        (
            "CHANGELOG.md",
            "changelog.md",
            "[a](docs/doctor.md#b)",
            "[a](doctor.md#b)",
        ),
        (
            "docs/guides/data.md",
            "guides/data.md",
            "[a](../../README.md)",
            "[a](../index.md)",
        ),
        (
            "docs/why.md",
            "why.md",
            "[a](../CONTRIBUTING.md)",
            "[a](contributing.md)",
        ),
        ("docs/why.md", "why.md", "[a](../tests/public.py)", "a"),
        ("docs/why.md", "why.md", "[a](https://b.c)", "[a](https://b.c)"),
        ("docs/why.md", "why.md", "[a](gone.md)", "[a](gone.md)"),
    ],
)
def test_links_of_the_repository_lead_to_pages(
    here: str, page: str, link: str, moved: str
):
    found = borrowed.LINK.fullmatch(link)
    assert found
    assert borrowed.moved(found, here, page, ROOT) == moved
