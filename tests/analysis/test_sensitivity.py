"""Sensitivity matrices, norms and bounds, against autograd and SVDs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import hdnn
from hdnn import analysis
from hdnn.errors import HDNNError, OptionError, ShapeError
from law.strategies import Random

F64 = torch.float64
KINDS = ("H1", "H2", "ImplicitH2", "MS1", "MS2", "MS3", "MLP")


def make(kind: str, n: int = 4, N: int = 3, **options):
    options = {
        "dtype": F64,
        "generator": torch.Generator().manual_seed(0),
    } | options
    return getattr(hdnn, kind)(n, N, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_sensitivities_are_transposed_jacobians_of_autograd(kind):
    net, y = make(kind), Random(0)(2, 3, 4)
    Phi = analysis.backward_sensitivity(net, y)
    assert Phi.shape == (4, 2, 3, 4, 4)
    expected = torch.func.vmap(torch.func.jacrev(net))(y.reshape(-1, 4)).mT
    torch.testing.assert_close(Phi[0].reshape(-1, 4, 4), expected)
    assert torch.equal(Phi[-1], torch.eye(4, dtype=F64).expand(2, 3, 4, 4))


def test_gradients_at_a_layer_are_the_matrix_times_the_gradient_at_the_end():
    net, y = make("H2"), Random(0)(5, 4)
    states = net.trajectory(y).requires_grad_()
    delta = Random(1)(5, 4)
    (expected,) = torch.autograd.grad(
        net.run_layers(states[1], slice(1, 3)), states, delta
    )
    Phi = analysis.backward_sensitivity(net, y)
    torch.testing.assert_close((Phi[1] @ delta[..., None])[..., 0], expected[1])


def test_the_product_of_the_layers_is_the_whole():
    net, y = make("H1", N=5), Random(0)(5, 4)
    product = torch.eye(4, dtype=F64)
    for M in analysis.layer_sensitivity(net, y):
        product = product @ M
    torch.testing.assert_close(
        product, analysis.backward_sensitivity(net, y)[0]
    )


def test_samples_that_overflow_are_nan_and_others_are_not():
    net = make("H2", N=40, step=10.0, activation="identity")
    y = torch.stack(
        [torch.full((4,), 1e300, dtype=F64), torch.zeros(4, dtype=F64)]
    )
    Phi = analysis.backward_sensitivity(net, y)
    assert bool(Phi[0, 0].isnan().all())
    assert bool(Phi[0, 1].isfinite().all())


def test_norms_and_singular_values_are_those_of_numpy_and_say_what_is_not_finite():
    A = Random(0)(3, 4, 4)
    for order in (2, 1, "inf", "fro"):
        number = float(order) if order == "inf" else order
        torch.testing.assert_close(
            analysis.norms(A, order), torch.linalg.matrix_norm(A, number)
        )
    torch.testing.assert_close(
        analysis.singular_values(A), torch.linalg.svdvals(A)
    )
    A[0, 0, 0], A[1, 0, 0] = math.inf, math.nan
    sizes = analysis.norms(A).tolist()
    assert sizes[0] == math.inf
    assert math.isnan(sizes[1])
    assert bool(analysis.singular_values(A)[:2].isnan().all())
    assert (
        analysis.norms(torch.eye(2, dtype=torch.bfloat16)).dtype
        == torch.bfloat16
    )


def test_a_symplectic_defect_is_that_of_the_transposed_layout_only():
    net, y = make("H2", X=Random(3)(2, 2)), Random(0)(5, 4)
    J, Phi = net.field()["J"], analysis.backward_sensitivity(net, y)
    assert analysis.is_symplectic(Phi, J)
    assert not analysis.is_symplectic(Phi.mT, J)
    assert not analysis.is_symplectic(Phi * 1.001, J)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (
            OptionError,
            "for a Model",
            lambda: analysis.backward_sensitivity(nn.Linear(2, 2), None),
        ),
        (OptionError, "ord", lambda: analysis.norms(torch.eye(2), 3)),
        (ShapeError, "matrices", lambda: analysis.norms(torch.ones(2))),
        (
            ShapeError,
            "one matrix",
            lambda: analysis.symplectic_defect(torch.eye(4), torch.eye(2)),
        ),
        (
            OptionError,
            "forward Euler",
            lambda: analysis.bsm_bound_forward_euler(make("H2")),
        ),
        (HDNNError, "shears", lambda: analysis.gradient_bounds(make("H1"))),
        (
            OptionError,
            "discretises an ODE",
            lambda: analysis.bounds(make("MLP")),
        ),
    ],
)
def test_mistakes_are_one_sentence(error, words, call):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


# Bounds


@pytest.mark.parametrize("kind", ["H1", "H2", "MS1", "MS2", "MS3"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_every_bound_of_these_layers_is_above_what_is_measured(kind, scale):
    net = make(kind, N=20, step=0.3)
    with torch.no_grad():
        for weight in net.parameters():
            weight *= scale
    bounds = analysis.bounds(net, Random(0)(10, 4))
    assert [b.name for b in bounds][:2] == ["paper", "sharper"]
    assert all(b.holds is not False for b in bounds)
    assert any(b.holds for b in bounds) or scale > 1


def test_a_bound_that_is_exceeded_is_said_to_fail_and_one_of_the_ode_is_not():
    bound = analysis.Bound("budget", "at most", 2.0, measured=3.0)
    assert bound.holds is False
    assert "DOES NOT HOLD" in str(bound)
    assert (
        analysis.Bound(
            "paper", "at most", 2.0, measured=3.0, rigorous=False
        ).holds
        is None
    )
    assert (
        analysis.Bound("budget", "at least", 2.0, measured=math.nan).holds
        is None
    )


def test_no_reader_sees_a_bound_like_2e23():
    assert "e+" not in str(
        analysis.Bound("paper", "at most", 2e23, measured=3.0)
    )
