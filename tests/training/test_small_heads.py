"""Compiled output layers find what the plain ones find."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn.training import output, small_heads

pytest.importorskip("numba")

HEADS = {
    "sigmoid": lambda n, c, **k: hdnn.SigmoidHead(n, **k),
    "softmax": lambda n, c, **k: hdnn.SoftmaxHead(n, c, **k),
    "regression": lambda n, c, **k: hdnn.RegressionHead(n, c - 1, **k),
}


def case(kind, n, c, B, seed, dtype, weighted, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    y = scale * torch.randn(B, n, generator=g, dtype=dtype)
    if kind == "regression":
        t = torch.randn(B, c - 1, generator=g, dtype=dtype)
    else:
        t = torch.randint(0, c if kind == "softmax" else 2, (B,), generator=g)
    weight = torch.rand(B, generator=g, dtype=dtype) + 0.1 if weighted else None
    return HEADS[kind](n, c, generator=g, dtype=dtype), y, t, weight


@given(
    st.sampled_from(list(HEADS)),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 40),
    st.integers(0, 1000),
    st.booleans(),
    st.sampled_from(["newton", "adam", "joint"]),
    st.sampled_from([0.1, 1.0, 10.0]),
)
@settings(max_examples=25)
def test_small_heads_are_those_of_the_plain_solvers(kind, n, c, B, seed, weighted, method, scale):
    head, y, t, weight = case(kind, n, c, B, seed, torch.float64, weighted, scale)
    assert small_heads.usable(head, y, method)
    small = small_heads.SmallHead(head)
    other, *_ = case(kind, n, c, B, seed, torch.float64, weighted, scale)
    if method == "newton":
        found = output.Outcome(*small.newton(y, t, weight, 1e-2, 10))
        output.newton(other, y, t, weight, 1e-2, 10)
    elif method == "joint":
        found = output.Output(head, method, 1e-2, 0.025, y).solve(y, t, weight)
        output.outcome(other, y, t, weight, joint=True)
        for a, b in zip(head.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-9)
    else:
        found = output.Outcome(*small.adam([(y, t, weight)], 1e-2, 0.025, 10, B))
        output.adam(other, [(y, t, weight)], 1e-2, 0.025, 10)
    wanted = output.outcome(other, y, t, weight)
    for a, b in zip(head.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.gradient, wanted.gradient, rtol=1e-6, atol=1e-8)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6, abs=1e-9)
    if kind != "regression":
        assert found.correct == pytest.approx(wanted.correct, abs=1.01 / B)


@pytest.mark.parametrize("kind", list(HEADS))
def test_adam_goes_from_minibatch_to_minibatch_as_the_plain_one_does(kind):
    passes = [case(kind, 3, 3, 38, seed, torch.float64, seed % 2)[1:] for seed in range(10)]
    for _, _, weight in passes[1::4]:
        weight[15:30] = 0.0  # nobody counts there
    ours, theirs = (case(kind, 3, 3, 38, 0, torch.float64, False)[0] for _ in range(2))
    small_heads.SmallHead(ours).adam(passes, 1e-2, 0.05, 1, 15)
    parts = [part for whole in passes for part in output.minibatches(whole, 15)]
    assert len(parts) == 27
    output.adam(theirs, parts, 1e-2, 0.05, 1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("classes", "features", "batch", "newton", "joint"),
    [
        (2, 15, 10**6, True, True),
        (3, 32, 64, True, True),
        (3, 32, 200, False, True),
        (10, 32, 64, False, True),
        (10, 128, 190, False, True),
        (10, 128, 200, False, False),
    ],
)
def test_large_heads_are_left_to_pytorch(classes, features, batch, newton, joint):
    y = torch.zeros(1, features).expand(batch, -1)
    for solver, wanted in (("newton", newton), ("adam", newton), ("joint", joint)):
        assert small_heads.usable(hdnn.SoftmaxHead(features, classes), y, solver) is wanted


def test_other_kinds_are_left_to_pytorch():
    y = torch.zeros(3, 10)
    assert not small_heads.usable(hdnn.LinearHead(10, 1), y, "newton")
    assert not small_heads.usable(hdnn.SigmoidHead(10), y.bfloat16(), "newton")
    assert not small_heads.usable(hdnn.SigmoidHead(10), y.to("meta"), "newton")


def test_a_frozen_output_layer_gets_no_gradient():
    head, y, t, weight = case("softmax", 3, 3, 20, 0, torch.float64, True)
    head.bias.requires_grad_(False)
    output.Output(head, "joint", 1e-2, 0.025, y).solve(y, t, weight)
    assert head.bias.grad is None
    assert head.weight.grad is not None


def test_float32_heads_stay_float32():
    head, y, t, weight = case("softmax", 3, 3, 20, 0, torch.float32, True)
    *_, gradient = small_heads.SmallHead(head).newton(y, t, weight, 1e-3, 5)
    assert head.weight.dtype == gradient.dtype == torch.float32
