"""The built site: each public name is explained, all links hold, and nothing is fetched."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import public

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "link": "href",
    "source": "src",
}
SERVER_ONLY = {
    "404.html"
}  # its links are absolute, since it answers for any address


@dataclass
class Read(HTMLParser):
    """What a page holds: anchors, links to click, and files that are loaded with it."""

    anchors: set[str] = field(default_factory=set)
    links: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    styles: list[str] = field(default_factory=list)
    wordless: list[str] = field(
        default_factory=list
    )  # pictures without words for them

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {
            given[name] for name in ("id", "name") if name in given
        }
        self.styles.append(given.get("style", ""))
        if tag == "img" and not given.get("alt"):
            self.wordless.append(given.get("src", ""))
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        if LOADED.get(tag) in given:
            self.loaded.add(given[LOADED[tag]])


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Read]:
    found = {}
    for path in sorted(site.rglob("*.html")):
        if path.relative_to(site).as_posix() not in SERVER_ONLY:
            found[path] = Read()
            found[path].feed(path.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def inventory(site: Path) -> dict[str, str]:
    """The address of each name that the site explains."""
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = zlib.decompress(packed).decode().splitlines()
    entries = [line.split(" ", 4) for line in lines]
    return {
        name: address.replace("$", name) for name, _, _, address, _ in entries
    }


def test_every_public_name_is_explained(site: Path, inventory, pages):
    missing = [name for name in public.names() if name not in inventory]
    assert missing == [], "run make docs"
    for name in public.names():
        file, _, anchor = inventory[name].partition("#")
        assert anchor in pages[site / file].anchors, name


def test_the_site_is_small_enough_to_find_things(pages):
    assert len(pages) <= 150


def test_every_page_has_a_title_of_its_own(site: Path):
    titles: dict[str, str] = {}
    for path in sorted(site.rglob("*.html")):
        (title,) = re.findall(
            r"<title>(.*?)</title>", path.read_text(encoding="utf-8"), re.S
        )[:1]
        if path.relative_to(site).as_posix() not in SERVER_ONLY:
            assert titles.setdefault(title, path.name) == path.name


def test_every_picture_has_words_for_those_who_cannot_see_it(pages):
    assert [
        (path.name, page.wordless)
        for path, page in pages.items()
        if page.wordless
    ] == []


def test_no_page_loads_anything_from_elsewhere(pages):
    outside = {
        (path.name, address)
        for path, page in pages.items()
        for address in page.loaded
        if urlsplit(address).scheme not in ("", "data")
        or address.startswith("//")
    }
    assert outside == set()


def test_no_style_loads_anything_from_elsewhere(site: Path, pages):
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    styles += [style for page in pages.values() for style in page.styles]
    assert [
        found for style in styles for found in re.findall(LOADING, style)
    ] == []


LOADING = r"(?:url\(\s*['\"]?|@import\s+['\"])(?:https?:)?//[^)'\"]*"


def test_every_link_and_anchor_leads_somewhere(site: Path, pages):
    broken = []
    for path, page in pages.items():
        for address in page.links | page.loaded:
            to = urlsplit(address)
            if to.scheme:
                continue
            target = (
                (path.parent / unquote(to.path)).resolve() if to.path else path
            )
            held = target.is_file() and target.is_relative_to(site)
            if held and to.fragment and target in pages:
                held = unquote(to.fragment) in pages[target].anchors
            if not held:
                broken.append(f"{path.relative_to(site)}: {address}")
    assert broken == []


def test_every_tutorial_says_how_long_it_ran(site: Path):
    tutorials = sorted((site / "tutorials").glob("*.html"))
    written = (
        Path(__file__).parents[2].joinpath("docs", "tutorials").glob("*.md")
    )
    assert [page.stem for page in tutorials] == sorted(
        page.stem for page in written
    )
    for page in tutorials:
        assert re.search(
            r"This page was run in \d+ s", page.read_text(encoding="utf-8")
        ), page.name


def test_formulas_are_mathml(site: Path):
    text = (site / "why.html").read_text(encoding="utf-8")
    assert text.count("<math") >= 2
    assert all(
        "arithmatex" not in p.read_text(encoding="utf-8")
        for p in site.rglob("*.html")
    )
