"""The package as it is installed, imported and built."""

import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import hdnn

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hdnn"

# What the extras install, by the names under which it is imported.
OPTIONAL = (
    "PIL",
    "huggingface_hub",
    "matplotlib",
    "mpi4py",
    "numba",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "pandas",
    "pyarrow",
    "pymetis",
    "rich",
    "scipy",
    "sklearn",
    "tensorboard",
    "triton",
    "typer",
)

IMPORT_EVERYTHING_WITHOUT_EXTRAS = f"""
import importlib, pkgutil, sys

sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # none of them can be imported

import hdnn
from hdnn import *  # which asks for no extra

dir(hdnn)
assert H2 is hdnn.H2

def give_up(name):
    if name != "hdnn.estimators":
        raise

for module in pkgutil.walk_packages(hdnn.__path__, "hdnn.", onerror=give_up):
    try:
        importlib.import_module(module.name)
    except hdnn.errors.MissingExtraError as error:
        # Made of pandas and scikit-learn, or of such parts: they can only say what to install.
        made_of_them = ("hdnn.data.tables", "hdnn.estimators", "hdnn.app.")
        assert module.name.startswith(made_of_them), module.name
        assert "hdnn[sklearn]" in str(error)
    except ModuleNotFoundError:
        # Kernels and the program, which are imported once their extras are known to be there.
        kernels = ("hdnn.engine.cpu", "hdnn.engine.gpu", "hdnn.engine.wide")
        assert module.name.startswith(("hdnn.app.", *kernels)), module.name
    print(module.name)
"""

NEW_MODULES_OF_IMPORT_HDNN = f"""
import sys
import torch, numpy, safetensors.torch
before = set(sys.modules)
import hdnn
late = ("hdnn.analysis", "hdnn.control", "hdnn.data", "hdnn.plotting", "hdnn.training")
print(*(name for name in (*{OPTIONAL!r}, *late) if name in sys.modules and name not in before))
"""


def run_python(*arguments: str) -> str:
    """What a fresh interpreter prints, started in the repository with warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules() -> set[str]:
    """The dotted name of each module and package under hdnn."""
    names = set()
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        names.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names - {"hdnn"}


def test_version_is_that_of_the_installed_package():
    assert hdnn.__version__ == metadata.version("hdnn")


def test_package_is_marked_as_typed():
    assert (Path(hdnn.__file__).parent / "py.typed").is_file()


def test_public_names_exist_once_each():
    assert len(set(hdnn.__all__)) == len(hdnn.__all__)
    assert [name for name in hdnn.__all__ if not hasattr(hdnn, name)] == []


def test_dir_lists_the_estimators_and_the_public_submodules():
    late = {
        "HDNNClassifier",
        "HDNNRegressor",
        "diagnose",
        "analysis",
        "control",
        "training",
    }
    assert {*hdnn.__all__, *late, "errors", "networks"} <= {*dir(hdnn)}
    assert [name for name in dir(hdnn) if not hasattr(hdnn, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'qwerty'; dir"):
        _ = hdnn.qwerty


def test_import_loads_no_optional_dependency_and_nothing_that_few_programs_need():
    assert run_python("-c", NEW_MODULES_OF_IMPORT_HDNN).split() == []


def test_every_module_imports_without_any_extra():
    # All but the files of a package that is not there without scikit-learn.
    wanted = {
        name for name in modules() if not name.startswith("hdnn.estimators.")
    }
    assert (
        set(run_python("-c", IMPORT_EVERYTHING_WITHOUT_EXTRAS).split())
        == wanted
    )


def test_all_extra_holds_every_extra_but_those_for_developers():
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    held = everything.removeprefix("hdnn[").removesuffix("]").split(",")
    assert sorted(held) == sorted(extras.keys() - {"all", "dev", "docs"})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    run_python(
        "-m",
        "hatchling",
        "build",
        "-t",
        "wheel",
        "-t",
        "sdist",
        "-d",
        str(folder),
    )
    return folder


def source_files() -> set[str]:
    """The files that belong in a distribution, relative to src."""
    names = {
        file.relative_to(SOURCE.parent).as_posix()
        for file in SOURCE.rglob("*")
        if file.is_file()
    }
    return {name for name in names if "__pycache__" not in name}


def test_wheel_holds_the_package_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {
            name for name in archive.namelist() if ".dist-info/" not in name
        }
    assert "hdnn/py.typed" in names
    assert names == source_files()


def test_wheel_is_small_and_holds_nothing_that_was_generated(built: Path):
    (wheel,) = built.glob("*.whl")
    assert wheel.stat().st_size <= 1_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = [
            name for name in archive.namelist() if ".dist-info/" not in name
        ]
    written = {
        ".css",
        ".html",
        ".jinja",
        ".js",
        ".json",
        ".py",
        ".typed",
    }  # by hand, or measured
    assert {Path(name).suffix for name in names} == written
    folders = {part for name in names for part in Path(name).parent.parts}
    assert not folders & {"tests", "results", "runs", "docs", "benchmarks"}


def test_wheel_holds_all_that_the_playground_is_made_of(built: Path):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {
            name
            for name in archive.namelist()
            if name.startswith("hdnn/app/playground/")
        }
    play = SOURCE / "app" / "playground"
    needed = [
        file
        for kind in ("*.js", "*.css", "*.html")
        for file in play.rglob(kind)
    ]
    assert len(needed) >= 5
    assert {
        file.relative_to(SOURCE.parent).as_posix() for file in needed
    } <= inside


def test_sdist_holds_the_source_and_its_papers(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    papers = {name for name in names if not name.startswith("src/")}
    assert {
        name.removeprefix("src/") for name in names - papers
    } == source_files()
    assert papers == {
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "PKG-INFO",
        "PYPI.md",
        "README.md",
        "pyproject.toml",
    }
