"""The workflows of the public CI call what is there, test what is promised, and may do little."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import hdnn

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS: dict[str, dict[Any, Any]] = {
    file.stem: yaml.safe_load(file.read_text()) for file in FILES
}
CI, RELEASE = WORKFLOWS["ci"], WORKFLOWS["release"]


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [
        step
        for job in workflow["jobs"].values()
        for step in job.get("steps", ())
    ]


def commands(workflow: dict[Any, Any]) -> list[str]:
    return [step["run"].strip() for step in steps(workflow) if "run" in step]


def test_ci_runs_what_ci_is_here_and_builds_site_and_package():
    newest, *rest = commands(CI)
    assert rest == [".ci/run", "make docs", "make release-check"]
    pins = (ROOT / "constraints.txt").read_text()
    (pattern,) = re.findall("'/(.+)/d' constraints.txt", newest)
    assert re.findall(pattern, pins, re.MULTILINE) == ["torch", "triton"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    made = {
        step["with"]["name"]: step["with"]["path"]
        for step in steps(CI)
        if "name" in step.get("with", {})
    }
    assert made == {"site": "site", "dist": "dist"}


def test_every_target_that_is_made_exists():
    makefile = (ROOT / "Makefile").read_text()
    called = re.findall(
        r"make ([a-z-]+)", "\n".join(commands(CI) + commands(RELEASE))
    )
    called += re.findall(
        r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE
    )
    assert {"docs", "lint", "release-check", "test"} <= {*called}
    assert [name for name in called if f"\n{name}:" not in makefile] == []


def test_every_python_that_is_promised_is_tested():
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    promised = re.findall(
        r"Python :: (3\.\d+)", "\n".join(project["classifiers"])
    )
    assert CI["jobs"]["test"]["strategy"]["matrix"]["python"] == promised
    assert project["requires-python"] == f">={promised[0]}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_and_jobs_may_only_read(name):
    workflow = WORKFLOWS[name]
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert [
        one for one in used if not re.fullmatch(r"[\w/-]+@v\d+\.\d+\.\d+", one)
    ] == []
    assert workflow["permissions"] == {"contents": "read"}
    allowed = {
        job: given["permissions"]
        for job, given in workflow["jobs"].items()
        if "permissions" in given
    }
    release = {
        "publish": {"id-token": "write"},
        "pages": {"pages": "write", "id-token": "write"},
    }
    assert allowed == (release if name == "release" else {})


def test_a_release_publishes_what_ci_has_checked_with_attestations():
    jobs = RELEASE["jobs"]
    assert RELEASE[True] == {
        "push": {"tags": ["v*"]}
    }  # YAML reads `on` as True
    assert "workflow_call" in CI[True]
    assert jobs["check"]["uses"] == "./.github/workflows/ci.yml"
    order = ["version", "check", "publish", "pages"]
    assert [jobs[after]["needs"] for after in order[1:]] == order[:-1]
    fetched = {
        step["with"]["name"]
        for step in steps(RELEASE)
        if "download" in step.get("uses", "")
    }
    assert fetched == {"site", "dist"}
    (publish,) = (
        step
        for step in steps(RELEASE)
        if "pypi-publish" in step.get("uses", "")
    )
    assert publish["with"] == {"attestations": True}


@pytest.mark.parametrize(
    ("tag", "said"),
    [
        (f"v{hdnn.__version__}", ""),
        (
            "v0.0.1",
            f"The tag is v0.0.1, but the version is {hdnn.__version__}\n",
        ),
        (
            hdnn.__version__,
            f"The tag is {hdnn.__version__}, but the version is {hdnn.__version__}\n",
        ),
    ],
)
def test_a_tag_that_is_not_the_version_ends_a_release(tag, said):
    (compare,) = commands(RELEASE)
    around = {**os.environ, "GITHUB_REF_NAME": tag}
    ended = subprocess.run(
        ["bash", "-e", "-c", compare],
        cwd=ROOT,
        env=around,
        capture_output=True,
        text=True,
    )
    assert ended.stderr == said
    assert ended.returncode == (1 if said else 0)
