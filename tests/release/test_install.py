"""The wheel holds all that users need: outside of the repository, with no extra installed.

The environment is one `by_links`, so that no test needs a package index. `make release-check` does
the same in one that pip has installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from release import installed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that holds the wheel and its dependencies alone."""
    folder = tmp_path_factory.mktemp("release")
    build = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-d",
        str(folder),
    ]
    installed.run(*build, cwd=installed.ROOT)
    (wheel,) = folder.glob("*.whl")
    return installed.by_links(folder / "environment", wheel)


def test_the_program_of_a_user_runs_on_the_wheel_alone(python, tmp_path):
    printed = installed.use(python, tmp_path)
    assert "the ring is local: True" in printed
    assert "estimator" not in printed  # scikit-learn is not there


def test_parts_whose_extra_is_missing_say_what_to_install(python, tmp_path):
    said = installed.ask_for_extras(python, tmp_path)
    assert all(text.count("\n") == 0 for text in said.values())


def test_a_typed_program_passes_strict_pyright(python, tmp_path):
    installed.check_by_pyright(python, installed.copied(tmp_path))


def test_a_typed_program_passes_strict_mypy(python, tmp_path):
    installed.check_by_mypy(python, installed.copied(tmp_path))


def test_a_wrong_type_is_found(python, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import hdnn\n\nhdnn.H2(features='16', layers=2)\n")
    with pytest.raises(AssertionError, match="reportArgumentType"):
        installed.check_by_pyright(python, wrong)
