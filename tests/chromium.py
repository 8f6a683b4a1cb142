"""A Chromium for tests of pages, from the environment variable CHROMIUM or from the PATH."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("chromium-browser")
)
needs_chromium = pytest.mark.skipif(
    not CHROMIUM,
    reason="there is no Chromium: install one, or name it in CHROMIUM",
)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ),
]
OWN = ("blob:", "data:", "about:")  # what a page may ask for by itself


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(
            executable_path=CHROMIUM, args=FLAGS, timeout=60_000
        )
        yield found
        found.close()


@contextmanager
def visits(browser: Any, allowed: str) -> Iterator[Any]:
    """A function that opens a page without a network, and where to look for what went wrong.

    Whatever a page complains of is a mistake, and so is a request of anything but `allowed`, an
    address and what begins with it.
    """
    contexts: list[Any] = []
    faults: list[str] = []

    def visit(address: str, **options: Any) -> Any:
        options = {"viewport": {"width": 1200, "height": 900}, **options}
        context = browser.new_context(
            offline=True, accept_downloads=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked(request.url))
        page.on(
            "requestfailed", lambda request: faults.append(f"no {request.url}")
        )
        page.goto(address)
        return page

    def asked(url: str) -> None:
        if not url.startswith((allowed, *OWN)):
            faults.append(f"a request of {url}")

    yield visit
    for context in contexts:
        context.close()
    assert faults == []
