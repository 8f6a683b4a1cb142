"""Functions of stacks: what they refuse, and that each is its scheme. Values are in tests/law."""

from __future__ import annotations

import pytest
import torch

import hdnn
from hdnn import functional, schemes
from hdnn.errors import DtypeError, OptionError, ShapeError
from hdnn.schemes import Force

y = torch.randn(5, 4)
K = torch.randn(3, 2, 2)
b = torch.randn(3, 2)
FULL = torch.randn(3, 4, 4), torch.randn(3, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: functional.h2(y, K, torch.randn(3, 2, 3), b, b, 0.1),
            "K has shape",
        ),
        (
            lambda: functional.h2(y, K, torch.randn(2, 2, 2), b, b[:2], 0.1),
            "K has shape",
        ),
        (lambda: functional.h2(y, K, K, b, torch.randn(3, 3), 0.1), "b "),
        (lambda: functional.h2(y[:, :3], K, K, b, b, 0.1), "even"),
        (lambda: functional.h2(y, K[:0], K[:0], b[:0], b[:0], 0.1), "N >= 1"),
        (lambda: functional.h2(y.double(), K, K, b, b, 0.1), "float64"),
        (lambda: functional.h2(y.long(), K, K, b, b, 0.1), "floating-point"),
        (lambda: functional.h2([1.0, 2.0], K, K, b, b, 0.1), "list"),
        (
            lambda: functional.h2(y, K, K, b, b, 0.1, X=torch.eye(3)),
            "X has shape",
        ),
        (lambda: functional.h1(y, *FULL, 0.1, J=torch.eye(3)), "J has shape"),
        (
            lambda: functional.h1(y[:, :3], FULL[0][:, :, :3], FULL[1], 0.1),
            "skew-symmetric J",
        ),
        (lambda: functional.h2(y, K, K, b, b, torch.ones(2)), "h must be"),
        (lambda: functional.energy(y, K[0], b[0]), "K has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(call, words):
    with pytest.raises(ShapeError, match=words):
        call()


def test_a_wrong_dtype_is_a_type_error_and_a_wrong_shape_is_not():
    unit, block = hdnn.HamiltonianUnit(2, 1), hdnn.Leapfrog(torch.nn.Identity())
    images = torch.zeros(1, 2, 3, 3)
    for wrong_dtype in (
        lambda: functional.h2(y.double(), K, K, b, b, 0.1),
        lambda: functional.h2(y.long(), K, K, b, b, 0.1),
        lambda: hdnn.H2(4, 3, dtype=torch.int64),
        lambda: unit(images.double()),
        lambda: block(y.long()),
    ):
        with pytest.raises(DtypeError) as refused:
            wrong_dtype()
        assert isinstance(refused.value, TypeError)
        assert "torch." in str(refused.value)
    for wrong_shape in (
        lambda: functional.h2(torch.tensor(1.0), K, K, b, b, 0.1),
        lambda: functional.h2(y[:, :3], K, K, b, b, 0.1),
        lambda: unit(images[0]),
        lambda: block(y[:, :3]),
    ):
        with pytest.raises(ShapeError) as refused:
            wrong_shape()
        assert not isinstance(refused.value, TypeError)


@pytest.mark.parametrize(
    "h", [0.0, -0.1, float("nan"), float("inf"), "0.1", [0.1, 0.0, 0.1], True]
)
def test_a_step_must_be_positive_and_finite(h):
    with pytest.raises(OptionError, match="h must be a finite number > 0"):
        functional.h2(y, K, K, b, b, h)


def test_options_that_are_not_known_are_refused():
    with pytest.raises(OptionError, match="engine"):
        functional.h2(y, K, K, b, b, 0.1, engine="fussed")
    with pytest.raises(OptionError, match="no inverse"):
        functional.h1(y, *FULL, 0.1, inverse=True)
    with pytest.raises(OptionError, match="max_iter"):
        functional.midpoint(y, *FULL, 0.1, max_iter=0)
    with pytest.raises(OptionError, match="tol"):
        functional.midpoint(y, *FULL, 0.1, tol=-1.0)
    with pytest.raises(TypeError, match="actvation"):
        functional.h2(y, K, K, b, b, 0.1, actvation="tanh")


def test_a_step_a_layer_can_be_a_list_or_a_tensor_with_a_gradient():
    h = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    by_tensor = functional.h2(y, K, K, b, b, h)
    torch.testing.assert_close(
        functional.h2(y, K, K, b, b, [0.1, 0.2, 0.3]), by_tensor
    )
    (grad,) = torch.autograd.grad(by_tensor.sum(), h)
    assert grad.shape == (3,)
    assert bool((grad != 0).all())


def test_any_sequence_of_updates_can_be_a_layer():
    shears = (("p", 1.0), ("q", 1.0))
    torch.testing.assert_close(
        functional.split(y, K, K, b, b, 0.1, shears=shears),
        functional.h2(y, K, K, b, b, 0.1),
    )
    q_first = (("q", 0.5), ("p", 1.0), ("q", 0.5))
    z = functional.split(y, K, K, b, b, 0.1, shears=q_first)
    back = functional.split(z, K, K, b, b, 0.1, shears=q_first, inverse=True)
    torch.testing.assert_close(back, y, rtol=0, atol=1e-5)


def test_a_scheme_of_ones_own_runs_on_every_engine():
    ruth = schemes.Scheme(
        "ruth3", 3, ((1, -7 / 24), (0, 2 / 3), (1, -3 / 4), (0, -2 / 3))
    )
    forces = (Force(K, b), Force(K, b))
    out = functional.run(ruth, y, forces, 0.1)
    plain = functional.run(ruth, y, forces, 0.1, engine="reference")
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)


def test_partial_H_is_the_gradient_of_the_energy():
    from hdnn import activations

    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    W, c = (
        torch.randn(6, 4, dtype=torch.float64),
        torch.randn(6, dtype=torch.float64),
    )
    (slope,) = torch.autograd.grad(functional.energy(x, W, c).sum(), x)
    exact = functional.partial_H(x, W, c, activations.get("tanh"))
    torch.testing.assert_close(exact, slope)
