"""The site in a browser, opened from the file system and without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import axe as axe_core
from chromium import browser as browser
from chromium import needs_chromium, visits

pytestmark = needs_chromium
PAGES = (
    *(
        "index.html",
        "play.html",
        "why.html",
        "start.html",
        "api/index.html",
        "api/networks.html",
    ),
    *(
        "api/errors.html",
        "tutorials/first-network.html",
        "results/index.html",
        "changelog.html",
    ),
    *(
        "options.html",
        "guides/paper.html",
        "results/table-planar.html",
        "tutorials/memory.html",
    ),
)


@pytest.fixture
def visit(browser, site: Path):
    """Opens a page of the site."""
    with visits(browser, site.as_uri()) as opens:

        def visited(page: str, **options: Any):
            return opens((site / page).as_uri(), **options)

        yield visited


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_a_small_screen_in_the_dark(visit, name: str):
    page = visit(
        name, viewport={"width": 375, "height": 700}, color_scheme="dark"
    )
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    if name != "play.html":
        assert page.get_attribute("body", "data-md-color-scheme") == "slate"


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_core.text(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_no_serious_fault(visit, axe, name: str, scheme: str):
    page = visit(
        name, viewport={"width": 375, "height": 700}, color_scheme=scheme
    )
    assert axe_core.grave_faults(page, axe) == []


def test_no_formula_is_cut_off_on_a_small_screen(visit):
    page = visit("why.html", viewport={"width": 375, "height": 700})
    ends = "all => all.map(formula => formula.getBoundingClientRect().right)"
    assert max(page.locator(".formula-inline").evaluate_all(ends)) <= 375


def test_search_finds_pages_that_are_there(visit):
    page = visit("index.html")
    page.focus("input[name=query]")
    page.keyboard.type("backward_sensitivity", delay=20)
    link = page.locator(
        ".md-search-result__link[href*='/api/analysis.html']"
    ).first
    link.click()
    page.wait_for_url("**/api/analysis.html*")
    assert "Analysis" in page.inner_text("h1")


def test_formulas_are_drawn(visit):
    page = visit("why.html")
    widths = "spans => spans.map(s => [s, s.firstChild].map(e => e.getBoundingClientRect().width))"
    for around, formula in page.locator(".formula-inline").evaluate_all(widths):
        assert around == pytest.approx(
            formula
        )  # part of the line, as wide as it needs to be
    page = visit("api/networks.html")
    box = page.locator("math").first.bounding_box()
    assert box["width"] > 100
    assert box["height"] > 10


def test_the_playground_is_a_page_of_the_site(visit):
    page = visit("play.html")
    page.locator("#status", has_text="steps a second").wait_for()
    page.click("text=documentation")
    page.wait_for_url("**/index.html*")
    assert page.locator("h1").count() == 1


def test_figures_of_a_tutorial_are_shown_with_words_for_them(visit):
    page = visit("tutorials/first-network.html")
    figures = page.locator("img.drawn")
    assert figures.count() >= 1
    for k in range(figures.count()):
        assert figures.nth(k).get_attribute("alt")
        assert figures.nth(k).evaluate("image => image.naturalWidth") > 300


def test_the_sidebar_of_results_fits_a_screen(visit):
    page = visit("results/index.html", viewport={"width": 1280, "height": 800})
    links = page.locator(".md-sidebar--primary a.md-nav__link:visible")
    assert links.count() > 10
    box = links.last.bounding_box()
    assert box["y"] + box["height"] <= 800


def test_wide_pictures_scroll_on_a_phone(visit):
    page = visit("why.html", viewport={"width": 375, "height": 700})
    picture = page.locator("img[data-wide]").first
    assert picture.bounding_box()["width"] > 800
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_a_tutorial_links_to_its_notebook(visit, site: Path):
    page = visit("tutorials/first-network.html")
    link = page.locator("a[download]")
    assert link.get_attribute("download") == "first-network.ipynb"
    notebook = site / "tutorials" / link.get_attribute("href")
    assert json.loads(notebook.read_text("utf-8"))["cells"]
