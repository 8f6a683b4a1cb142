"""The benchmark of gradients can say what ran, for stacks and for units."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import hdnn

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("net", "shape", "ran"),
    [
        (hdnn.H2(4, 3), (5, 4), "fused, stored"),
        (hdnn.H2(4, 3, engine="reference"), (5, 4), "reference, stored"),
        (hdnn.HamiltonianUnit(4, layers=2, network="h2"), (2, 4, 5, 5), "units, stored"),
    ],
)
def test_it_says_what_ran(net, shape, ran, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    gradients = importlib.import_module("gradients")
    assert gradients.ran(net, torch.randn(shape), "cpu") == ran
