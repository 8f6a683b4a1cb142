"""The site that `make docs` has built."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def site() -> Path:
    built = ROOT / "site"
    if not (built / "objects.inv").exists():
        if os.environ.get("CI"):
            pytest.fail(
                "continuous integration builds the site before the tests: make docs"
            )
        pytest.skip("the site is not built: run make docs")
    return built
