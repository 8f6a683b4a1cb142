"""Certificates: what is promised, why, and whether it is seen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import analysis
from hdnn.analysis import certificate as module
from hdnn.errors import DataError, OptionError, ShapeError
from strategies import ACTIVATIONS, MONOTONE, Random, seeds, sizes

F64 = torch.float64
ALWAYS = ("H2", "ImplicitH2", "MS1", "MS3", "verlet", "yoshida4", "midpoint")
KINDS = (*ALWAYS, "H1", "MS2", "MLP")


def make(kind, n=4, N=5, **options):
    options = {"generator": torch.Generator().manual_seed(0), **options}
    if kind in ("verlet", "yoshida4", "midpoint"):
        return hdnn.HamiltonianNet(n, N, kind, **options)
    return getattr(hdnn, kind)(n, N, **options)


@given(
    st.sampled_from(KINDS),
    st.sampled_from(ACTIVATIONS),
    sizes,
    st.integers(1, 60),
    seeds,
    st.floats(0.01, 1.0),
)
@settings(max_examples=80)
def test_nothing_that_is_guaranteed_is_ever_broken(kind, activation, m, N, seed, h):
    normal, options = Random(seed), {"activation": activation, "init": "paper", "dtype": F64}
    if kind in ("ImplicitH2", "midpoint"):
        options["init"], h = "scaled", min(h, 0.2)
    if kind != "MLP":
        options["step"] = h
    if kind in ("H2", "verlet", "yoshida4", "ImplicitH2"):
        options["X"] = normal(m, m)
    net = make(kind, 2 * m, N, **options, generator=normal.generator)
    found = analysis.certify(net, normal(5, 2 * m))
    assert found.guaranteed == (
        kind in ALWAYS or (kind in ("H1", "MS2") and activation in MONOTONE)
    )
    assert not found.broken
    assert found.holds or not found.guaranteed
    if kind in ("H2", "verlet", "yoshida4", "ImplicitH2", "midpoint", "MS3"):
        assert found.symplectic
    low, high = found.by_layer["smallest"][:-1], found.by_layer["largest"][:-1]
    assert found.smallest_norm == min(low)
    assert found.largest_norm == max(high)


def test_sin_breaks_what_tanh_guarantees_for_forward_euler():
    sin = make("H1", 4, 64, activation="sin", step=0.5, init="paper", dtype=F64)
    found = analysis.certify(sin, 3 * Random(0)(50, 4))
    assert found.holds is None
    assert "sin, which can decrease" in found.verdict
    assert not found.broken  # nothing was promised


def test_a_certificate_is_a_table_a_json_object_and_a_picture(tmp_path):
    model = hdnn.Model(hdnn.Augment(2, 4), make("H2", 4, 20), hdnn.SigmoidHead(4))
    found = analysis.certify(model, torch.randn(7, 2), points="test points")
    text = str(found)
    for words in (
        "H2(4 features, 20 layers",
        "7 test points; weights float32",
        "symplectic",
        "yes",
    ):
        assert words in text
    assert "guaranteed at any depth" in text
    told = json.loads(found.to_json())
    assert told["samples"] == 7
    assert told["broken"] == []
    assert {b["name"] for b in told["bounds"]} >= {"lem:upper_bound", "budget exp(B)"}
    ax = found.plot()
    ax.figure.savefig(tmp_path / "norms.png")
    assert "7 samples" in ax.get_title()


def test_what_is_broken_is_said():
    found = analysis.certify(make("H2"))
    bad = replace(found, holds=False, smallest_norm=0.5, symplectic=False)
    assert bad.verdict.startswith("BROKEN: norm(dy_N/dy_j) >= 1, but it is 0.5; symplecticity")
    assert bad.plot().get_title() == "A guarantee does not hold numerically"
    bound = replace(found.bounds[-1], measured=1e9)
    assert "the bound budget exp(B)" in replace(found, bounds=(bound,)).verdict


def test_norms_beyond_float64_are_told_and_break_nothing():
    net = make("H2", 2, 600, step=1.0, init="paper", dtype=F64, activation="identity")
    with torch.no_grad():
        net.K_p.fill_(5.0)
        net.K_q.fill_(5.0)
    found = analysis.certify(net, torch.zeros(3, 2, dtype=F64))
    assert found.overflow is not None
    assert found.largest_norm == float("inf")
    assert found.holds
    assert not found.broken
    assert "beyond what float64 can hold" in str(found)
    assert json.loads(found.to_json())["largest_norm"] is None


def test_rounding_is_told_from_a_broken_promise(monkeypatch):
    net = make("H2", dtype=F64)
    true = module.layer_jacobians
    shrunk = lambda *args: 0.9 * true(*args)  # noqa: E731
    monkeypatch.setattr("hdnn.analysis.sensitivity.layer_jacobians", shrunk)
    assert analysis.certify(net).broken


def test_random_points_follow_the_seed_and_their_number_is_kept_in_bounds():
    net = make("H2")
    assert analysis.certify(net, seed=1) == analysis.certify(net, seed=1)
    assert analysis.certify(net, seed=1) != analysis.certify(net, seed=2)
    assert analysis.certify(net, torch.randn(50, 4), samples=3).samples == 3
    deep = make("H2", 4, 10_000, T=1.0)
    assert analysis.certify(deep, torch.randn(2000, 4)).samples < 100


@pytest.mark.parametrize(
    ("given_", "error", "text"),
    [
        ((torch.nn.Linear(2, 2),), OptionError, "certify takes a hdnn.Model"),
        ((make("H2"), torch.ones(3, 5)), ShapeError, r"y must be a tensor \(\*batch, 4\)"),
        ((make("H2"), "y"), ShapeError, "but got str"),
        ((make("H2"), torch.full((1, 4), torch.nan)), DataError, "NaN or infinite"),
    ],
)
def test_mistakes_are_one_sentence(given_, error, text):
    with pytest.raises(error, match=text):
        analysis.certify(*given_)


def test_weights_that_are_no_numbers_cannot_be_certified():
    net = make("H2")
    with torch.no_grad():
        net.K_p[0, 0, 0] = torch.nan
    with pytest.raises(DataError, match="the weight K_p is not finite"):
        analysis.certify(net)
