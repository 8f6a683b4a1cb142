"""Each theorem of the paper, and each stronger one, over random networks in float64.

Matrices are in denominator layout, and X is random: with X = I the layouts could not be told apart.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

import hdnn
from hdnn import analysis, functional
from law.strategies import (
    ACTIVATIONS,
    MONOTONE,
    Random,
    depths,
    few,
    randomise,
    scales,
    seeds,
    sizes,
    split_net,
    steps,
)

NORMS = (2, 1, "inf", "fro")
ROUNDING = 1e-9  # how far below 1 a norm may be rounded


def smallest_norm(net, y, order):
    """Over all samples and layers j < N."""
    return float(analysis.norms(analysis.backward_sensitivity(net, y)[:-1], order).min())


# Symplecticity: lem:numerical_flow


@few
@given(st.sampled_from(["H2", "Verlet", "Yoshida"]), sizes, depths, steps, scales, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_explicit_layers_are_symplectic_for_any_X(activation, kind, m, N, h, scale, seed):
    normal = Random(seed)
    net = randomise(split_net(kind, m, N, h, activation, normal), normal, scale)
    Phi = analysis.backward_sensitivity(net, normal(3, 2 * m))
    assert float(analysis.symplectic_defect(Phi, net.J).max()) < 1e-13
    assert analysis.is_symplectic(Phi, net.J)


@few
@given(sizes, st.integers(1, 6), steps, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_general_semi_implicit_layer_is_symplectic_for_any_X(activation, m, N, h, seed):
    normal = Random(seed)
    net = hdnn.ImplicitH2(
        2 * m, N, step=h, X=normal(m, m), activation=activation, dtype=torch.float64
    )
    randomise(net, normal, 0.4)
    y = normal(3, 2 * m)
    try:
        Phi = analysis.backward_sensitivity(net, y)
    except hdnn.HDNNError:
        assume(False)  # no solution: no layer to speak of
    # Near a singular step the solution, hence the defect, is only as good as the equation.
    assume(float(analysis.norms(Phi).max()) < 1e3)
    assert float(analysis.symplectic_defect(Phi, net.J).max()) < 1e-10


@few
@given(st.integers(1, 7), st.integers(1, 6), st.floats(0.01, 0.5), seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_implicit_midpoint_rule_is_poisson_for_any_skew_J(activation, n, N, h, seed):
    normal = Random(seed)
    net = hdnn.HamiltonianNet(
        n, N, "midpoint", step=h, J=normal.skew(n), activation=activation, dtype=torch.float64
    )
    randomise(net, normal, 0.4)
    try:
        Phi = analysis.backward_sensitivity(net, normal(3, n))
    except hdnn.HDNNError:
        assume(False)
    assume(float(analysis.norms(Phi).max()) < 1e3)
    assert float(analysis.symplectic_defect(Phi, net.J).max()) < 1e-10


def test_symplecticity_holds_in_denominator_layout_only():
    normal = Random(0)
    net = randomise(split_net("H2", 3, 4, 0.3, "tanh", normal), normal, 1.0)
    Phi = analysis.backward_sensitivity(net, normal(5, 6))
    assert float(analysis.symplectic_defect(Phi[0], net.J).max()) < 1e-14
    assert float(analysis.symplectic_defect(Phi[0].mT, net.J).max()) > 1e-3


def test_forward_euler_is_not_symplectic():
    normal = Random(0)
    net = hdnn.H1(6, 4, step=0.5, dtype=torch.float64, generator=normal.generator)
    Phi = analysis.backward_sensitivity(net, normal(5, 6))
    assert float(analysis.symplectic_defect(Phi[0], net.J).min()) > 1e-3


# Non-vanishing gradients: th:nonvanishing_gradients_DT


@few
@given(sizes, st.integers(1, 40), steps, scales, seeds, st.booleans())
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_H2_never_vanish_in_any_norm(activation, m, N, h, scale, seed, X_each):
    normal = Random(seed)
    X = normal(N, m, m) if X_each else normal(m, m)
    net = randomise(split_net("H2", m, N, h, activation, normal, X=X), normal, scale)
    y = normal(3, 2 * m)
    Phi = analysis.backward_sensitivity(net, y)[:-1]
    assume(float(analysis.norms(Phi).max()) < 1e12)  # past that float64 cannot tell
    for order in NORMS:
        least = math.sqrt(2 * m) if order == "fro" else 1.0
        assert float(analysis.norms(Phi, order).min()) >= least * (1 - ROUNDING)


@few
@given(st.sampled_from(["Verlet", "Yoshida"]), sizes, depths, steps, scales, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_higher_order_layers_never_vanish(activation, kind, m, N, h, scale, seed):
    normal = Random(seed)
    net = randomise(split_net(kind, m, N, h, activation, normal), normal, scale)
    for order in NORMS:
        assert smallest_norm(net, normal(3, 2 * m), order) >= 1 - ROUNDING


@few
@given(sizes, depths, steps, seeds)
def test_gradients_of_the_general_semi_implicit_network_never_vanish(m, N, h, seed):
    normal = Random(seed)
    net = hdnn.ImplicitH2(2 * m, N, step=h, X=normal(m, m), dtype=torch.float64)
    randomise(net, normal, 0.4)
    try:
        least = smallest_norm(net, normal(3, 2 * m), 2)
    except hdnn.HDNNError:
        assume(False)
    assert least >= 1 - ROUNDING


@few
@given(st.sampled_from([hdnn.MS1, hdnn.MS3]), sizes, depths, steps, scales, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_MS1_and_MS3_never_vanish(activation, kind, m, N, h, scale, seed):
    normal = Random(seed)
    net = kind(2 * m, N, step=h, activation=activation, dtype=torch.float64)
    randomise(net, normal, scale)
    assert smallest_norm(net, normal(3, 2 * m), 2) >= 1 - ROUNDING


@few
@given(sizes, st.integers(1, 40), steps, scales, seeds, st.booleans())
@pytest.mark.parametrize("activation", MONOTONE)
def test_gradients_of_H1_never_vanish_for_a_monotone_activation(
    activation, m, N, h, scale, seed, J_each
):
    normal = Random(seed)
    n = 2 * m
    J = normal.skew(N, n) if J_each else normal.skew(n)
    net = hdnn.H1(n, N, step=h, J=J, activation=activation, dtype=torch.float64)
    randomise(net, normal, scale)
    Phi = analysis.backward_sensitivity(net, normal(3, n))[:-1]
    assume(float(analysis.norms(Phi).max()) < 1e12)
    for order in NORMS:
        assert float(analysis.norms(Phi, order).min()) >= 1 - ROUNDING


@few
@given(st.integers(1, 7), depths, steps, scales, seeds)
@pytest.mark.parametrize("activation", MONOTONE)
def test_gradients_of_MS2_never_vanish_for_a_monotone_activation(activation, n, N, h, scale, seed):
    normal = Random(seed)
    net = hdnn.MS2(n, N, step=h, activation=activation, dtype=torch.float64)
    randomise(net, normal, scale)
    assert smallest_norm(net, normal(3, n), 2) >= 1 - ROUNDING


def test_gradients_of_H1_do_vanish_for_sin_where_those_of_H2_cannot():
    # At y = 0 the slopes of sin are 1 and -1, in turns: two layers are I (1 - h^2).
    N, h, pi = 64, 0.5, math.pi
    turns = torch.tensor([[0.0, pi], [pi, 0.0]], dtype=torch.float64).repeat(N // 2, 1)
    y = torch.zeros(2, dtype=torch.float64)
    h1 = hdnn.H1(2, N, step=h, activation="sin", dtype=torch.float64)
    h2 = hdnn.H2(2, N, step=h, activation="sin", dtype=torch.float64)
    with torch.no_grad():
        h1.K.copy_(torch.eye(2))
        h1.b.copy_(turns)
        h2.K_p.fill_(1)
        h2.K_q.fill_(1)
        h2.b_p.copy_(turns[:, :1])
        h2.b_q.copy_(turns[:, 1:])
    assert smallest_norm(h1, y, 2) == pytest.approx((1 - h * h) ** (N / 2), rel=1e-9)
    assert (1 - h * h) ** (N / 2) < 1.1e-4
    assert smallest_norm(h2, y, 2) >= 1 - ROUNDING


def test_gradients_of_an_mlp_vanish():
    normal = Random(0)
    net = randomise(hdnn.MLP(4, 32, dtype=torch.float64), normal, 0.5)
    assert smallest_norm(net, normal(20, 4), 2) < 1e-6


def test_the_mean_over_samples_can_hide_that_no_sample_vanishes():
    normal = Random(3)
    net = randomise(split_net("H2", 2, 32, 0.4, "tanh", normal, X=None), normal, 1.0)
    Phi = analysis.backward_sensitivity(net, 2 * normal(500, 4))[:-1]
    assert float(analysis.norms(Phi).min()) >= 1 - ROUNDING
    assert float(analysis.norms(Phi.mean(1)).min()) < 1


# What the theorem does not give: a single gradient may shrink, but only so far


@few
@given(st.sampled_from(["H2", "Verlet", "Yoshida"]), sizes, depths, steps, scales, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_gradient_stays_within_the_budget(activation, kind, m, N, h, scale, seed):
    normal = Random(seed)
    net = randomise(split_net(kind, m, N, h, activation, normal), normal, scale)
    low, high = analysis.gradient_bounds(net)
    Phi = analysis.backward_sensitivity(net, normal(3, 2 * m))
    delta_N = normal(3, 2 * m)
    ratio = (Phi @ delta_N[..., None]).squeeze(-1).norm(dim=-1) / delta_N.norm(dim=-1)
    assume(float(high) < 1e12)
    assert float(ratio.max()) <= float(high) * (1 + 1e-12)
    assert float(ratio.min()) >= float(low) * (1 - 1e-6)
    assert float(torch.linalg.svdvals(Phi).max()) <= float(high) * (1 + 1e-12)


def test_a_single_gradient_can_shrink_though_the_norm_does_not():
    normal = Random(0)
    net = randomise(split_net("H2", 3, 8, 0.5, "tanh", normal), normal, 1.5)
    singular = torch.linalg.svdvals(analysis.backward_sensitivity(net, normal(6))[0])
    assert float(singular[0]) > 1 > float(singular[-1])
    pairs = torch.linalg.svdvals(  # with X = I they come in pairs s, 1/s
        analysis.backward_sensitivity(
            randomise(split_net("H2", 3, 8, 0.5, "tanh", normal, X=None), normal, 1.0), normal(6)
        )[0]
    )
    torch.testing.assert_close(pairs * pairs.flip(0), torch.ones(6, dtype=torch.float64))


# Upper bounds: lem:upper_bound and sharper ones


@few
@given(sizes, st.integers(1, 5), st.floats(0.05, 0.5), st.floats(0.1, 1.0), seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_continuous_time_BSM_is_below_both_bounds(activation, m, N, h, scale, seed):
    normal = Random(seed)
    n = 2 * m
    net = hdnn.H1(n, N, step=h, J=normal.skew(n), activation=activation, dtype=torch.float64)
    randomise(net, normal, scale)
    paper, sharp = analysis.bsm_bound_paper(net), analysis.bsm_bound_continuous(net)
    assume(float(sharp) < 1e6)
    fine = net.refine(64)  # close to the ODE; forward Euler overestimates by its own error
    measured = float(analysis.norms(analysis.backward_sensitivity(fine, normal(2, n))).max())
    euler = float(analysis.bsm_bound_forward_euler(fine)) / float(sharp)
    assert measured <= float(sharp) * max(1.0, euler) * (1 + 1e-12)
    assert float(sharp) <= float(paper)


@few
@given(sizes, depths, steps, scales, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_BSM_of_H1_is_below_its_own_bound(activation, m, N, h, scale, seed):
    normal = Random(seed)
    n = 2 * m
    net = hdnn.H1(n, N, step=h, J=normal.skew(n), activation=activation, dtype=torch.float64)
    randomise(net, normal, scale)
    bound = float(analysis.bsm_bound_forward_euler(net))
    measured = float(analysis.norms(analysis.backward_sensitivity(net, normal(3, n))).max())
    assert measured <= bound * (1 + 1e-12)


@few
@given(st.integers(2, 7), depths, steps, scales, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_BSM_of_MS2_is_below_its_own_bound(activation, n, N, h, scale, seed):
    normal = Random(seed)
    net = randomise(
        hdnn.MS2(n, N, step=h, activation=activation, dtype=torch.float64), normal, scale
    )
    bound = float(analysis.bsm_bound_forward_euler(net))
    measured = float(analysis.norms(analysis.backward_sensitivity(net, normal(3, n))).max())
    assert measured <= bound * (1 + 1e-12)


def test_the_sharper_bound_is_much_sharper():
    normal = Random(0)
    net = randomise(hdnn.H1(16, 16, T=1.0, dtype=torch.float64), normal, 16**-0.5)
    actual = analysis.norms(analysis.backward_sensitivity(net, normal(20, 16))).max().log()
    sharp, paper = analysis.bsm_bound_continuous(net).log(), analysis.bsm_bound_paper(net).log()
    assert float(actual) < float(sharp) < float(paper) / 4


# Exploding gradients: eq:2D_Example


def test_gradients_of_the_two_dimensional_example_grow_linearly():
    # y' = J tanh(y): K = I, b = 0, one set of weights for all layers.
    N, h = 4000, 0.05
    net = hdnn.HamiltonianNet(2, N, "verlet", step=h, tied=True, dtype=torch.float64)
    with torch.no_grad():
        net.K_p.fill_(1)
        net.K_q.fill_(1)
    y = torch.tensor([[0.5**0.5, 0.5**0.5], [1.0, 0.0]], dtype=torch.float64)
    sensitivity, sizes_ = torch.eye(2, dtype=torch.float64), []
    for layer in analysis.layer_sensitivity(net, y):
        sensitivity = sensitivity @ layer
        sizes_.append(analysis.norms(sensitivity))
    slopes = torch.stack(sizes_) / (h * torch.arange(1, N + 1)[:, None])
    for half in (slopes[N // 4 : N // 2], slopes[N // 2 :]):  # it swings below a straight line
        torch.testing.assert_close(
            half.amax(0), torch.tensor([0.32, 0.29]).double(), atol=0.01, rtol=0
        )


def test_gradients_grow_exponentially_where_h_k_squared_is_above_two():
    # H2 with n = 2 and a constant weight k: the step is unstable past h k^2 = 2.
    def growth(k):
        net = hdnn.H2(2, 20, step=1.0, tied=True, activation="identity", dtype=torch.float64)
        with torch.no_grad():
            net.K_p.fill_(k)
            net.K_q.fill_(k)
        y = torch.zeros(2, dtype=torch.float64)
        return float(analysis.norms(analysis.backward_sensitivity(net, y)[0]))

    assert growth(math.sqrt(2.1)) > 100 * growth(math.sqrt(1.9))


# Earlier networks as special cases: Appendix A and the errata


@few
@given(sizes, depths, steps, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_MS3_is_H2_after_q_changes_sign(activation, m, N, h, seed):
    # p' = p + h K_1^T s(K_1 q + b_1) with q = -q~ is a p-update with K_q = -K_1 and sigma kept.
    normal = Random(seed)
    K_1, K_2, b_1, b_2 = normal(N, m, m), normal(N, m, m), normal(N, m), normal(N, m)
    y = normal(3, 2 * m)
    flip = torch.cat([torch.ones(m), -torch.ones(m)]).double()
    expected = functional.ms3(y, K_1, K_2, b_1, b_2, h, activation=activation)
    ours = functional.h2(flip * y, K_2, -K_1, b_2, b_1, h, activation=activation)
    torch.testing.assert_close(flip * ours, expected, rtol=1e-9, atol=1e-9)


@few
@given(sizes, st.integers(1, 5), steps, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_MS1_is_H2_with_halves_swapped_and_an_X_a_layer(activation, m, N, h, seed):
    # (p~, q~) = (q, p), K_q = K_0^T, K_p = K_0, X_j = K_0^-T: then X^T K_q^T = I and X K_p^T = I.
    normal = Random(seed)
    K_0 = normal(N, m, m) + 3 * torch.eye(m).double()
    assume(float(torch.linalg.cond(K_0).max()) < 1e4)
    b_1, b_2, y = normal(N, m), normal(N, m), normal(3, 2 * m)
    swap = torch.cat([y[..., m:], y[..., :m]], -1)
    X = torch.linalg.inv(K_0).mT
    ours = functional.h2(swap, K_0, K_0.mT, b_2, b_1, h, X=X, activation=activation)
    ours = torch.cat([ours[..., m:], ours[..., :m]], -1)
    expected = functional.ms1(y, K_0, b_1, b_2, h, activation=activation)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@few
@given(sizes, st.integers(1, 5), steps, seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_MS2_is_H1_with_a_J_a_layer(activation, m, N, h, seed):
    normal = Random(seed)
    n = 2 * m
    K, b, y = normal.skew(N, n), normal(N, n), normal(3, n)
    assume(float(torch.linalg.cond(K).max()) < 1e4)
    ours = functional.h1(y, K, b, h, J=torch.linalg.inv(K).mT, activation=activation)
    expected = functional.ms2(y, K, b, h, activation=activation)
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@few
@given(sizes, depths, st.floats(0.01, 0.2), seeds)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_general_layer_with_a_block_diagonal_K_is_H2(activation, m, N, h, seed):
    normal = Random(seed)
    net = randomise(split_net("H2", m, N, h, activation, normal), normal, 1.0)
    y, field = normal(3, 2 * m), net.field()
    ours = functional.implicit_h2(y, field["K"], field["b"], h, X=net.X, activation=activation)
    torch.testing.assert_close(ours, net(y), rtol=1e-9, atol=1e-9)


def test_the_fields_of_all_networks_are_those_of_the_paper():
    """One small forward Euler step of J K^T sigma(K y + b) is one layer, up to h^2."""
    normal = Random(0)
    h = 1e-6
    for kind in (hdnn.H1, hdnn.H2, hdnn.ImplicitH2, hdnn.MS1, hdnn.MS2, hdnn.MS3):
        for activation in ("tanh", "softplus"):
            net = kind(4, 1, step=h, activation=activation, dtype=torch.float64)
            randomise(net, normal, 1.0)
            y = normal(3, 4)
            expected = functional.h1(y, **net.field(), h=h, activation=activation)
            assert float((net(y) - expected).abs().max()) < 100 * h * h
            assert float((net.J + net.J.mT).abs().max()) < 1e-12


@few
@given(sizes, depths, seeds)
def test_a_constant_invertible_X_adds_nothing_to_the_model_class(m, N, seed):
    # With q = X q~: K_q~ = K_q X, K_p unchanged in p, and the map of q absorbs X.
    normal = Random(seed)
    X = normal(m, m) + 3 * torch.eye(m).double()
    assume(float(torch.linalg.cond(X)) < 1e3)
    K_p, K_q, b_p, b_q = normal(N, m, m), normal(N, m, m), normal(N, m), normal(N, m)
    p, q = normal(3, m), normal(3, m)
    with_X = functional.h2(torch.cat([p, q], -1), K_p, K_q, b_p, b_q, 0.1, X=X)
    absorbed = torch.cat([p, q @ torch.linalg.inv(X).mT], -1)
    without = functional.h2(absorbed, K_p, K_q @ X, b_p, b_q, 0.1)
    without = torch.cat([without[..., :m], without[..., m:] @ X.mT], -1)
    torch.testing.assert_close(without, with_X, rtol=1e-8, atol=1e-8)


# Reversibility


@few
@given(st.sampled_from(["H2", "Verlet", "Yoshida"]), sizes, st.integers(1, 64), seeds)
@example(kind="H2", m=2, N=1024, seed=0)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_explicit_layers_are_reversible_for_any_X(activation, kind, m, N, seed):
    normal = Random(seed)
    net = randomise(split_net(kind, m, N, 4 / max(N, 16), activation, normal), normal, 0.5)
    y = normal(3, 2 * m)
    size = float(net.trajectory(y).abs().max())
    assume(float(analysis.gradient_bounds(net)[1]) < 1e4)
    assert float((net.inverse(net(y)) - y).abs().max()) < 1e-9 * max(1, size)


def test_reversal_drifts_as_the_errata_measured():
    for h, s, N, most in ((0.1, 1, 64, 1e-13), (0.1, 1, 1024, 1e-10), (4 / 4096, 1, 4096, 1e-13)):
        normal = Random(0)
        K_p, K_q = (s * normal(N, 8, 8) / math.sqrt(8) for _ in range(2))
        b, y = torch.zeros(N, 8).double(), normal(10, 16)
        back = functional.h2_inverse(functional.h2(y, K_p, K_q, b, b, h), K_p, K_q, b, b, h)
        assert float((back - y).abs().max()) < most
