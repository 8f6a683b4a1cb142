"""Animations of agents in a browser, and reports: they move, or stand still if asked to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("numba")

import axe as axe_core
from chromium import browser as browser
from chromium import needs_chromium, visits
from hdnn.__main__ import main
from hdnn.app.agents.runs import ControlRun
from hdnn.app.agents.scene import scene
from hdnn.app.agents.svg import HOLD

pytestmark = needs_chromium
SECONDS = 8.0
# Where the discs of a panel lie, in its own pixels, a moment after the animation began.
PLACES = """seconds => {
  const svg = document.documentElement;
  svg.pauseAnimations();
  svg.setCurrentTime(seconds);
  const discs = [...document.querySelectorAll('.moving g')];
  return discs.map(g => [g.transform.animVal[0].matrix.e, g.transform.animVal[0].matrix.f]);
}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a run, its animation and its report."""
    home = tmp_path_factory.mktemp("agents")
    quick = ["--steps", "10", "--iterations", "2", "--batch", "2", "--runs", "2", "--quiet"]
    assert main(["control", "train", *quick, "--out", str(home / "run")]) == 0
    flags = ["--when", "after", "--seconds", str(SECONDS), "--out", str(home / "agents.svg")]
    assert main(["control", "animate", str(home / "run"), *flags]) == 0
    return home


@pytest.fixture
def visit(browser, made: Path):
    with visits(browser, made.as_uri()) as opens:
        yield lambda name, **options: opens((made / name).as_uri(), **options)


def test_discs_are_where_the_agents_were(visit, made):
    page = visit("agents.svg")
    (panel,) = scene(ControlRun(made / "run").stages("after")).panels
    frames = len(panel.places)
    pauses = max(1, round(HOLD * frames))
    for frame in (0, frames // 2, frames - 1):
        seconds = SECONDS * frame / (frames + pauses - 1)
        found = torch.tensor(page.evaluate(PLACES, seconds), dtype=torch.float64)
        assert torch.allclose(found, panel.places[frame], atol=0.2)


def test_who_wants_no_motion_sees_whole_paths(visit):
    shown = "name => getComputedStyle(document.querySelector(name)).display"
    for motion, visible, hidden in (
        ("no-preference", ".moving", ".still"),
        ("reduce", ".still", ".moving"),
    ):
        page = visit("agents.svg", reduced_motion=motion)
        assert page.evaluate(shown, visible) != "none"
        assert page.evaluate(shown, hidden) == "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_fits_a_small_screen_and_stands_by_itself(visit, scheme):
    page = visit("run/report.html", viewport={"width": 375, "height": 700}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    assert page.locator("svg.agents").count() == 2
    page.locator("summary", has_text="Watch them").click()
    assert page.locator("details svg.agents").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_in_a_report(visit, tmp_path, scheme):
    axe = axe_core.text(tmp_path)
    page = visit("run/report.html", viewport={"width": 375, "height": 700}, color_scheme=scheme)
    assert axe_core.grave_faults(page, axe) == []
