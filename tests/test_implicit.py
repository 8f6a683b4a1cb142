"""Implicit equations and the schemes that solve them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.func import jacrev, vmap

from hdnn import activations, implicit, schemes
from hdnn.errors import ConvergenceError
from hdnn.schemes import Force

N, B, n = 3, 5, 4
SCHEMES = [
    schemes.ImplicitEuler(),
    schemes.Midpoint(),
    schemes.DiscreteGradient(),
]


def random(*shape, seed=0):
    return torch.randn(
        *shape,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )


def stack(scale=0.5):
    K = scale * random(N, 6, n, seed=1)
    skew = random(n, n, seed=2)
    if scale:
        X = random(n // 2, n // 2, seed=3)
        zero = torch.zeros_like(X)
        skew = torch.cat(
            [torch.cat([zero, -X.mT], -1), torch.cat([X, zero], -1)], -2
        )
    return (Force(K, random(N, 6, seed=4), K @ skew.mT),), skew


@pytest.mark.parametrize("name", activations.names())
def test_a_solution_fulfils_its_equation(name):
    sigma = activations.get(name)
    A, M, a, c = (
        0.4 * random(6, n),
        0.4 * random(n, 6, seed=1),
        random(6, seed=2),
        random(B, n),
    )
    x = implicit.solve(c, M, A, a, sigma)
    torch.testing.assert_close(
        x, c + sigma(x @ A.mT + a) @ M.mT, rtol=0, atol=1e-14
    )


def test_samples_can_have_matrices_of_their_own():
    sigma = activations.get("tanh")
    A, M, a, c = (
        0.4 * random(B, 6, n),
        0.4 * random(B, n, 6, seed=1),
        random(B, 6),
        random(B, n),
    )
    x = implicit.solve(c, M, A, a, sigma)
    for i in range(B):
        torch.testing.assert_close(
            x[i], implicit.solve(c[i], M[i], A[i], a[i], sigma)
        )


def test_gradients_and_gradients_of_gradients_are_those_of_finite_differences():
    sigma = activations.get("tanh")
    given = [
        random(2, 3),
        0.4 * random(3, 2),
        0.4 * random(2, 3, seed=1),
        random(2, seed=2),
    ]
    for t in given:
        t.requires_grad_()
    for function in (implicit.solve, implicit.solve_chord):
        assert torch.autograd.gradcheck(partial(function, sigma=sigma), given)
        assert torch.autograd.gradgradcheck(
            partial(function, sigma=sigma), given
        )


def test_an_equation_without_a_solution_is_an_error_that_says_what_to_do():
    one = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(
        ConvergenceError, match="smaller step"
    ):  # x = 1 + 2 relu(x)
        implicit.solve(
            one[0], 2 * one, one, 0 * one[0], activations.get("relu")
        )
    with pytest.raises(ConvergenceError, match="NaN"):
        implicit.solve(
            one[0] * torch.nan, one, one, one[0], activations.get("tanh")
        )


@pytest.mark.parametrize("name", activations.names())
@pytest.mark.parametrize("distance", [0.0, 1e-9, 1e-3, 0.4, 0.99, 1.5, 40.0])
def test_a_chord_is_the_mean_of_sigma_and_has_the_slope_of_autograd(
    name, distance
):
    sigma = activations.get(name)
    z = torch.linspace(-6, 5.9, 50, dtype=torch.float64)
    end = (z + distance).requires_grad_()
    mean = implicit.chord(sigma, z, end)
    rise = (sigma.integral(end) - sigma.integral(z)).detach()
    scale = 1 + sigma.integral(z).abs() + sigma.integral(end.detach()).abs()
    assert (
        float(((mean.detach() * distance - rise) / scale).abs().max()) <= 1e-14
    )
    if distance == 0:
        torch.testing.assert_close(mean, sigma(z))
    (slope,) = torch.autograd.grad(mean.sum(), end)
    torch.testing.assert_close(
        implicit.chord_slope(sigma, z, end, implicit.chord(sigma, z, end)),
        slope,
        rtol=1e-9,
        atol=1e-9,
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_an_implicit_layer_is_undone_and_has_the_jacobians_of_autograd(scheme):
    (forces, _), y, sigma = (
        stack(),
        random(B, n, seed=9),
        activations.get("softplus"),
    )
    h = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    states = schemes.run(scheme, y, forces, h, sigma, trajectory=True)
    back = schemes.run(
        scheme, states[-1], forces, h, sigma, inverse=True, trajectory=True
    )
    torch.testing.assert_close(back, states, rtol=0, atol=1e-12)
    Phi = schemes.jacobians(scheme, states, forces, h, sigma)
    product = Phi[0] @ Phi[1] @ Phi[2]
    exact = vmap(jacrev(lambda y: schemes.run(scheme, y, forces, h, sigma)))(
        y
    ).mT
    torch.testing.assert_close(product, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=lambda s: s.name)
def test_an_implicit_layer_is_symplectic(scheme):
    (forces, J), y, sigma = (
        stack(),
        random(B, n, seed=9),
        activations.get("sin"),
    )
    states = schemes.run(scheme, y, forces, 0.2, sigma, trajectory=True)
    Phi = schemes.jacobians(scheme, states, forces, 0.2, sigma)
    torch.testing.assert_close(
        Phi.mT @ J @ Phi, J.expand_as(Phi), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", activations.names())
def test_a_discrete_gradient_layer_keeps_its_energy_for_any_step(name):
    (forces, _), y, sigma = stack(), random(B, n, seed=9), activations.get(name)
    states = schemes.run(
        schemes.DiscreteGradient(), y, forces, 0.7, sigma, trajectory=True
    )
    for j in range(N):
        K, b, _ = (t[j] for t in forces[0])
        before, after = (
            sigma.integral(y @ K.mT + b).sum(-1) for y in states[j : j + 2]
        )
        torch.testing.assert_close(after, before, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("scheme", "order"), [(s, s.order) for s in SCHEMES])
def test_an_implicit_scheme_converges_with_its_order(scheme, order):
    (forces, _), y, sigma = (
        stack(),
        random(B, n, seed=9),
        activations.get("tanh"),
    )

    def end(N, scheme):
        same = Force(*(t[:1].expand(N, *t.shape[1:]) for t in forces[0]))
        return schemes.run(scheme, y, (same,), 0.5 / N, sigma)

    exact = end(400, schemes.Midpoint())
    errors = [float((end(N, scheme) - exact).norm()) for N in (8, 16)]
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.15)
