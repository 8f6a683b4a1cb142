"""The definition of all schemes: values, inverse and Jacobians."""

from __future__ import annotations

import pytest
import torch

from hdnn import activations, schemes
from hdnn.schemes import Force

EXPLICIT = (
    schemes.SEMI_IMPLICIT_EULER,
    schemes.VERLET,
    schemes.YOSHIDA4,
    schemes.MS1,
    schemes.MS3,
)
N, B, n = 5, 7, 6


def forces(scheme, generator, rows=4):
    """A random force for each half, with an output matrix of its own for the first."""
    size = n // 2 if scheme.halves else n
    like = {"generator": generator, "dtype": torch.float64}
    rows = size if scheme is schemes.PERCEPTRON else rows
    K, V = torch.randn(2, N, rows, size, **like)
    b = torch.randn(N, rows, **like)
    return (
        (Force(K, b, V), Force(V, -b)) if scheme.halves else (Force(K, b, V),)
    )


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def y(generator):
    return torch.randn(B, n, generator=generator, dtype=torch.float64)


H = torch.linspace(0.05, 0.3, N, dtype=torch.float64)


def jacobian(f, y):
    """dy'/dy of each sample, in denominator layout."""
    return torch.func.vmap(torch.func.jacrev(f))(y).mT


def test_semi_implicit_euler_moves_p_first_then_q_from_the_new_p(generator, y):
    K_p, K_q, X = torch.randn(3, 3, 3, generator=generator, dtype=torch.float64)
    b = torch.randn(3, generator=generator, dtype=torch.float64)
    p, q = y.chunk(2, -1)
    p = p - 0.3 * torch.tanh(q @ K_q.T + b) @ K_q @ X
    q = q + 0.3 * torch.tanh(p @ K_p.T + b) @ K_p @ X.T
    force_p = Force(K_p[None], b[None], (K_p @ X.T)[None])
    force_q = Force(K_q[None], b[None], (K_q @ X)[None])
    end = schemes.run(
        schemes.SEMI_IMPLICIT_EULER,
        y,
        (force_p, force_q),
        0.3,
        activations.get("tanh"),
    )
    torch.testing.assert_close(end, torch.cat([p, q], -1))


def test_forward_euler_adds_h_times_the_force(generator, y):
    (force,) = forces(schemes.FORWARD_EULER, generator)
    K, b, V = (t[0] for t in force)
    end = schemes.run(
        schemes.FORWARD_EULER,
        y,
        (force,),
        H,
        activations.get("tanh"),
        trajectory=True,
    )
    torch.testing.assert_close(end[1], y + H[0] * torch.tanh(y @ K.T + b) @ V)


@pytest.mark.parametrize("scheme", EXPLICIT, ids=lambda s: s.name)
def test_the_inverse_takes_the_last_state_back_to_the_first(
    scheme, generator, y
):
    given = scheme, forces(scheme, generator), H, activations.get("sin")
    states = schemes.run(given[0], y, *given[1:], trajectory=True)
    back = schemes.run(
        given[0], states[-1], *given[1:], inverse=True, trajectory=True
    )
    torch.testing.assert_close(back, states, rtol=0, atol=1e-12)
    torch.testing.assert_close(schemes.run(given[0], y, *given[1:]), states[-1])


@pytest.mark.parametrize(
    "scheme",
    [*EXPLICIT, schemes.FORWARD_EULER, schemes.PERCEPTRON],
    ids=lambda s: s.name,
)
@pytest.mark.parametrize("rows", [2, 9])
def test_jacobians_of_all_layers_are_those_of_autograd(
    scheme, rows, generator, y
):
    stack, sigma = forces(scheme, generator, rows), activations.get("silu")
    states = schemes.run(scheme, y, stack, H, sigma, trajectory=True)
    M = schemes.jacobians(scheme, states, stack, H, sigma)
    for j in range(N):
        one = [
            Force(*(None if t is None else t[j : j + 1] for t in force))
            for force in stack
        ]
        exact = jacobian(
            lambda x, one=one, j=j: schemes.run(scheme, x, one, H[j], sigma),
            states[j],
        )
        torch.testing.assert_close(M[j], exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scheme", EXPLICIT[:3], ids=lambda s: s.name)
def test_a_scheme_converges_with_its_order(scheme, generator, y):
    K_p, K_q = torch.randn(2, 1, 3, 3, generator=generator, dtype=torch.float64)
    b = torch.zeros(1, 3, dtype=torch.float64)

    def end(N, scheme):
        force_p = Force(K_p.expand(N, 3, 3), b.expand(N, 3))
        force_q = Force(K_q.expand(N, 3, 3), b.expand(N, 3))
        return schemes.run(
            scheme, y, (force_p, force_q), 0.5 / N, activations.get("tanh")
        )

    exact = end(500, schemes.YOSHIDA4)
    errors = [float((end(N, scheme) - exact).norm()) for N in (16, 32)]
    assert errors[0] / errors[1] == pytest.approx(2**scheme.order, rel=0.1)
