"""Continuous time: the ODE behind the layers, its sensitivities, and the theorems about them.

J and X are random: with canonical ones a wrong sign or layout could not be told from the right one.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn.analysis import convergence, theorems
from hdnn.analysis.continuous import ContinuousNetwork
from hdnn.errors import (
    ConvergenceError,
    DataError,
    HDNNError,
    MissingExtraError,
    NotInvertibleError,
    OptionError,
    ShapeError,
    StepError,
)
from strategies import Random, randomise, seeds

pytest.importorskip("scipy")

F64 = torch.float64
KINDS = ("H1", "H2", "ImplicitH2", "MS1", "MS2", "MS3", "verlet", "yoshida4", "midpoint")
SMOOTH = ("tanh", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")
few = settings(max_examples=6)
either = pytest.mark.parametrize("weights", ["constant", "linear"])


def make(kind: str, normal: Random, m: int = 2, N: int = 2, *, each: bool = False, **options):
    """A network with a random J or X, one a layer if `each`; T = 0.5 and mild weights."""
    n = 2 * m
    options = {"T": 0.5, "dtype": F64, "generator": normal.generator} | options
    if kind in ("H1", "midpoint"):
        options["J"] = normal.skew(N, n) if each else normal.skew(n)
    elif kind in ("H2", "ImplicitH2", "verlet", "yoshida4"):
        options["X"] = normal(N, m, m) if each else normal(m, m)
    if kind in ("verlet", "yoshida4", "midpoint"):
        net = hdnn.HamiltonianNet(n, N, kind, **options)
    else:
        net = getattr(hdnn, kind)(n, N, **options)
    return randomise(net, normal, 0.5)


@st.composite
def problems(draw, kinds=KINDS, constant_J=False):
    """A network, samples for it and the source of randomness that made them."""
    normal = Random(draw(seeds))
    net = make(
        draw(st.sampled_from(kinds)),
        normal,
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        each=not constant_J and draw(st.booleans()),
        activation=draw(st.sampled_from(SMOOTH)),
    )
    batch = draw(st.sampled_from([(), (2,), (2, 1)]))
    return net, normal(*batch, net.features), normal


# Solutions


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_refined_layers_tend_to_the_flow_of_the_ode(kind, each):
    normal = Random(3)
    net, y = make(kind, normal, each=each), normal(3, 4)
    ode = ContinuousNetwork(net)
    coarse, fine = ((net.refine(k)(y) - ode.flow(y)).abs().max() for k in (8, 128))
    assert float(fine) < float(coarse) / 12
    torch.testing.assert_close(
        net.refine(128).trajectory(y)[::128], ode.trajectory(y), rtol=0, atol=0.02
    )


@either
def test_a_trajectory_starts_at_y_passes_through_all_times_and_ends_in_the_flow(weights):
    normal = Random(0)
    net, y = make("H2", normal, N=3), normal(2, 3, 4)
    ode = ContinuousNetwork(net, weights)
    states = ode.trajectory(y)
    assert states.shape == (4, 2, 3, 4)
    assert torch.equal(states[0], y)
    torch.testing.assert_close(states[-1], ode.flow(y))
    between = [0.4, 0.03, ode.T, 0.03, 0.25, 0.0]  # any order, twice, inside layers
    torch.testing.assert_close(
        ode.trajectory(y, between),
        torch.stack([ode.flow(y, end=t) for t in between]),
        rtol=1e-8,
        atol=1e-8,
    )


def test_times_beside_the_edge_of_a_layer_by_rounding_are_no_trouble():
    normal = Random(0)
    ode, y = ContinuousNetwork(make("H2", normal, N=5)), normal(4)  # layers meet at 0.1, 0.2 ..
    times = [math.nextafter(float(t), where) for t in ode.times for where in (0.0, 1.0)]
    expected = ode.trajectory(y).repeat_interleave(2, 0)
    torch.testing.assert_close(ode.trajectory(y, times), expected, rtol=1e-9, atol=1e-9)
    assert ode.sensitivity(y, times).shape == (12, 4, 4)


@either
def test_the_flow_can_be_taken_in_parts_and_back(weights):
    normal = Random(1)
    net, y = make("H1", normal, N=3, each=True), normal(3, 4)
    ode = ContinuousNetwork(net, weights)
    middle = ode.flow(y, end=0.21)
    torch.testing.assert_close(ode.flow(middle, start=0.21), ode.flow(y), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(ode.flow(ode.flow(y), start=ode.T, end=0.0), y, rtol=1e-8, atol=1e-8)


def test_constant_weights_and_linear_ones_are_the_same_ode_where_layers_are_tied():
    normal = Random(2)
    net, y = make("H2", normal, N=3, tied=True), normal(4)
    constant, linear = ContinuousNetwork(net, "constant"), ContinuousNetwork(net, "linear")
    torch.testing.assert_close(constant.flow(y), linear.flow(y), rtol=1e-9, atol=1e-9)


def test_steps_may_differ_and_be_learned():
    normal = Random(2)
    steps = [0.1, 0.3, 0.05]
    net, y = make("H2", normal, N=3, step=steps, T=None, learn_step=True), normal(4)
    ode = ContinuousNetwork(net)
    torch.testing.assert_close(ode.times, torch.tensor([0.0, 0.1, 0.4, 0.45], dtype=F64))
    expected = y
    for j, h in enumerate(steps):  # one layer after the other, each as a network of its own
        one = hdnn.H2(4, 1, step=h, X=net.X, dtype=F64)
        for name in ("K_p", "K_q", "b_p", "b_q"):
            one.assign(name, net.weight(name)[j : j + 1])
        expected = ContinuousNetwork(one).flow(expected)
    torch.testing.assert_close(ode.flow(y), expected, rtol=1e-9, atol=1e-9)


def test_linear_weights_are_those_of_a_layer_in_the_middle_of_its_step():
    # b alone, and sigma = identity with K = 0 but for one entry: y' = J b(t) is a plain integral.
    net = hdnn.H1(2, 2, step=[1.0, 3.0], activation="identity", dtype=F64)
    net.assign("K", torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=F64).expand(2, 2, 2))
    net.assign("b", torch.tensor([[1.0, 0.0], [5.0, 0.0]], dtype=F64))
    y = torch.zeros(2, dtype=F64)
    # q' = b_1(t), p = 0: 1 until t = 0.5, then up to 5 at t = 2.5, then 5 until 4.
    linear = ContinuousNetwork(net, "linear").trajectory(y, [0.5, 1.5, 2.5, 4.0])[:, 1]
    expected = torch.tensor([0.5, 0.5 + 2.0, 0.5 + 6.0, 0.5 + 6.0 + 7.5], dtype=F64)
    torch.testing.assert_close(linear, expected, rtol=1e-9, atol=1e-9)
    constant = ContinuousNetwork(net).trajectory(y, [0.5, 1.0, 4.0])[:, 1]
    torch.testing.assert_close(constant, torch.tensor([0.5, 1.0, 16.0], dtype=F64))


@pytest.mark.parametrize("kind", ["MS1", "MS2"])
def test_linear_weights_keep_J_K_the_identity_where_it_is(kind):
    normal = Random(4)
    net, y = make(kind, normal, N=2, T=1.0), normal(4)
    ode = ContinuousNetwork(net, "linear")
    field = net.field()
    K, b = field["K"].mean(0), field["b"].mean(0)  # half way between the two layers
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0] if kind == "MS1" else [1.0] * 4, dtype=F64)
    state = ode.flow(y, end=0.5)
    change = (ode.flow(state, start=0.5, end=0.501) - ode.flow(state, start=0.5, end=0.499)) / 2e-3
    torch.testing.assert_close(change, signs * torch.tanh(K @ state + b), rtol=1e-5, atol=1e-5)


def test_a_network_of_any_dtype_is_solved_in_float64_and_left_as_it_was():
    net = hdnn.H2(4, 3, T=0.5, generator=torch.Generator().manual_seed(0))
    y = torch.ones(2, 4)
    single = ContinuousNetwork(net)
    assert single.flow(y).dtype == single.sensitivity(y).dtype == F64
    assert net.K_p.dtype == torch.float32
    assert net.K_p.requires_grad
    torch.testing.assert_close(single.flow(y), ContinuousNetwork(net.double()).flow(y.double()))


def test_an_empty_batch_has_an_empty_solution():
    ode = ContinuousNetwork(make("H2", Random(0)))
    empty = torch.ones(0, 4, dtype=F64)
    assert ode.trajectory(empty).shape == (3, 0, 4)
    assert ode.sensitivity(empty).shape == (3, 0, 4, 4)


def test_other_solvers_agree():
    normal = Random(0)
    net, y = make("H2", normal), normal(4)
    expected = ContinuousNetwork(net).flow(y)
    for method in ("RK45", "LSODA"):
        other = ContinuousNetwork(net, method=method).flow(y)
        torch.testing.assert_close(other, expected, rtol=1e-7, atol=1e-7)
    assert "RK45" in repr(ContinuousNetwork(net, method="RK45"))


# Sensitivities: lem:grad_dynamics


@few
@given(problems(), st.floats(0.05, 0.95))
@either
def test_the_bsm_is_the_derivative_of_the_flow_in_denominator_layout(weights, problem, part):
    net, y, normal = problem
    ode = ContinuousNetwork(net, weights)
    t, small = part * ode.T, 1e-4
    state, way = ode.trajectory(y, t)[0], normal(*y.shape)
    ahead, behind = (ode.flow(state + sign * small * way, start=t) for sign in (1, -1))
    expected = (way.unsqueeze(-2) @ ode.sensitivity(y, t)[0]).squeeze(-2)
    torch.testing.assert_close((ahead - behind) / (2 * small), expected, rtol=1e-5, atol=1e-5)


@few
@given(problems())
@either
def test_gradients_follow_their_ode_and_the_chain_rule(weights, problem):
    net, y, normal = problem
    ode = ContinuousNetwork(net, weights)
    assert float(theorems.gradient_dynamics(ode, y, normal(*y.shape)).max()) < 1e-8
    assert float(theorems.chain_rule(ode, y).max()) < 1e-8


def test_gradients_are_those_of_autograd_in_the_limit_of_many_layers():
    normal = Random(5)
    net, y = make("yoshida4", normal, N=2), normal(3, 4).requires_grad_()
    end = net.refine(64)(y)
    end.square().sum().backward()
    delta = ContinuousNetwork(net).gradients(y, (2 * end).detach())
    assert delta.shape == (3, 3, 4)
    torch.testing.assert_close(delta[0], y.grad, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(delta[-1], (2 * end).detach(), rtol=1e-12, atol=1e-12)


def test_sensitivities_of_samples_do_not_mix():
    normal = Random(6)
    ode, y = ContinuousNetwork(make("H1", normal)), normal(3, 4)
    together = ode.sensitivity(y, [0.0, 0.3])
    for i in range(3):
        alone = ode.sensitivity(y[i], [0.0, 0.3])
        torch.testing.assert_close(together[:, i], alone, rtol=1e-7, atol=1e-7)


# Theorems


@few
@given(problems([kind for kind in KINDS if kind not in ("MS1", "MS2")], constant_J=True))
@either
def test_the_bsm_is_symplectic_for_any_constant_J(weights, problem):
    net, y, _ = problem
    ode = ContinuousNetwork(net, weights)
    defects = theorems.generalized_symplecticity(ode, y)
    assert defects.shape == (net.layers + 1, *y.shape[:-1])
    assert float(defects.max()) < 1e-8


def test_the_transposed_bsm_is_not_symplectic():
    normal = Random(0)
    ode, y = ContinuousNetwork(make("H1", normal)), normal(4)
    Phi = ode.sensitivity(y, 0.0)
    assert float(hdnn.analysis.symplectic_defect(Phi.mT, ode.J).min()) > 1e-4


def test_symplecticity_holds_for_odd_sizes_and_singular_J():
    normal = Random(0)
    net = randomise(hdnn.H1(3, 2, T=0.5, J=normal.skew(3), dtype=F64), normal, 0.5)
    ode, y = ContinuousNetwork(net), normal(2, 3)
    assert float(theorems.generalized_symplecticity(ode, y).max()) < 1e-8
    assert theorems.smallest_norms(ode, y)["2"] >= 1 - 1e-8


def test_symplecticity_needs_one_J():
    ode = ContinuousNetwork(make("H1", Random(0), each=True))
    with pytest.raises(ShapeError, match="one constant J"):
        theorems.generalized_symplecticity(ode, torch.ones(4, dtype=F64))


@few
@given(problems())
@either
def test_gradients_never_vanish_in_continuous_time_whether_J_is_constant_or_not(weights, problem):
    net, y, _ = problem
    least = theorems.smallest_norms(ContinuousNetwork(net, weights), y)
    assert set(least) == {"2", "1", "inf", "fro"}
    for order, value in least.items():
        assert value >= (math.sqrt(net.features) if order == "fro" else 1.0) - 1e-8


@few
@given(problems())
def test_the_bsm_is_below_the_sharper_bound_and_that_below_the_papers(problem):
    net, y, _ = problem
    found = theorems.upper_bounds(ContinuousNetwork(net), y)
    assert found["measured"] <= found["continuous"] * (1 + 1e-8)
    assert found["continuous"] <= found["paper"]


def test_bounds_are_for_constant_weights():
    with pytest.raises(OptionError, match="constant in each step"):
        theorems.upper_bounds(
            ContinuousNetwork(make("H2", Random(0)), "linear"), torch.ones(4, dtype=F64)
        )


# Convergence


@pytest.mark.parametrize("kind", KINDS)
def test_networks_converge_to_their_ode_at_the_order_of_their_integrator(kind):
    normal, order = Random(7), {"verlet": 2, "midpoint": 2, "yoshida4": 4}.get(kind, 1)
    result = convergence(make(kind, normal, each=True), normal(3, 4))
    assert result.layers == (2, 4, 8, 16, 32)
    assert result.steps[0] == pytest.approx(0.25)
    assert result.order == pytest.approx(order, abs=0.1)
    assert len(result.orders) == 4
    assert result.errors[-1] < result.errors[0]


def test_errors_that_the_flow_cannot_tell_from_its_own_have_no_order():
    net = hdnn.HamiltonianNet(2, 4, "yoshida4", T=0.01, dtype=F64)
    result = convergence(net, torch.ones(2, dtype=F64), [1, 2])
    assert result.errors[0] < 1e-11
    assert math.isnan(result.order)


def test_a_network_at_rest_has_no_error_and_no_order():
    net = hdnn.H2(2, 2, dtype=F64)
    result = convergence(net, torch.zeros(2, dtype=F64), [1, 2])
    assert result.errors == (0.0, 0.0)
    assert math.isnan(result.order)


@pytest.mark.parametrize("refinements", [[2], [], [4, 4]])
def test_an_order_needs_two_refinements(refinements):
    with pytest.raises(ShapeError, match="two or more different refinements"):
        convergence(hdnn.H2(2, 1), torch.ones(2), refinements)


# Mistakes

Y = torch.ones(4, dtype=F64)


def ode() -> ContinuousNetwork:
    return ContinuousNetwork(make("H2", Random(0)))


def not_finite():
    net = make("H2", Random(0))
    net.K_p[0, 0, 0] = math.nan
    return net


MISTAKES = {
    "mlp": (OptionError, "MLP is no discretised", lambda: ContinuousNetwork(hdnn.MLP(4, 2))),
    "tensor": (OptionError, "but got Tensor", lambda: ContinuousNetwork(Y)),
    "odd MS2": (NotInvertibleError, "odd size", lambda: ContinuousNetwork(hdnn.MS2(3, 2))),
    "weights": (OptionError, "constant, linear", lambda: ContinuousNetwork(ode().net, "cubic")),
    "method": (OptionError, "DOP853", lambda: ContinuousNetwork(ode().net, method="dop853")),
    "rtol": (StepError, "at least 1e-13", lambda: ContinuousNetwork(ode().net, rtol=1e-15)),
    "nan weight": (DataError, "NaN", lambda: ContinuousNetwork(not_finite())),
    "nan state": (DataError, "y has an entry", lambda: ode().flow(Y * math.nan)),
    "features": (ShapeError, r"\(\*batch, 4\)", lambda: ode().flow(Y[:3])),
    "integers": (ShapeError, "floating point", lambda: ode().flow(Y.long())),
    "list": (ShapeError, "torch.Tensor", lambda: ode().flow([1.0] * 4)),
    "late": (StepError, r"0 \.\. T = 0.5", lambda: ode().trajectory(Y, [0.1, 0.6])),
    "never": (StepError, "times", lambda: ode().trajectory(Y, [])),
    "no start": (StepError, "times", lambda: ode().flow(Y, start=None)),
    "two ends": (StepError, "times", lambda: ode().flow(Y, end=[0.1, 0.2])),
    "word": (StepError, "noon", lambda: ode().sensitivity(Y, "noon")),
    "delta": (ShapeError, "delta_T", lambda: ode().gradients(Y, Y[None])),
    "convergence of an mlp": (OptionError, "MLP", lambda: convergence(hdnn.MLP(4, 2), Y)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence(mistake):
    error, words, call = MISTAKES[mistake]
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_solution_past_the_largest_number_is_refused():
    net = make("H2", Random(0), activation="identity")
    with pytest.raises(ConvergenceError, match="past the largest float64 at t = 0"):
        ContinuousNetwork(net).flow(1e308 * Y)


def test_a_solver_that_gives_up_says_so(monkeypatch):
    gives_up = SimpleNamespace(success=False, message="Required step size is too small.")
    monkeypatch.setattr("scipy.integrate.solve_ivp", lambda *_, **__: gives_up)
    with pytest.raises(ConvergenceError, match=r"DOP853 .* between t = 0 and t = 0.25: Required"):
        ode().flow(Y)


def test_without_scipy_the_extra_is_named(monkeypatch):
    there = ode()
    monkeypatch.setitem(sys.modules, "scipy.integrate", None)
    with pytest.raises(MissingExtraError, match=r"hdnn\[science\]") as caught:
        there.flow(Y)
    assert isinstance(caught.value, HDNNError)
