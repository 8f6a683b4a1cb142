"""Continuous time: the ODE behind the layers, its sensitivities, and the theorems about them.

J and X are random: with canonical ones a wrong sign or layout could not be told from the right one.
"""

from __future__ import annotations

import math
import sys

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn.analysis import (
    ContinuousNetwork,
    backward_sensitivity,
    bsm_bound_continuous,
    bsm_bound_paper,
    counterexample,
    norms,
    symplectic_defect,
)
from hdnn.errors import (
    ConvergenceError,
    DataError,
    MissingExtraError,
    OptionError,
    ShapeError,
)
from law.strategies import Random, randomise, seeds

pytest.importorskip("scipy")

F64 = torch.float64
KINDS = (
    "H1",
    "H2",
    "ImplicitH2",
    "MS1",
    "MS2",
    "MS3",
    "verlet",
    "yoshida4",
    "midpoint",
)
SMOOTH = ("tanh", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")
few = settings(max_examples=6, deadline=None)
ODE = ContinuousNetwork(hdnn.H2(4, 2))
DIAGONAL, AXIS = (
    torch.tensor([0.5**0.5] * 2, dtype=F64),
    torch.tensor([1.0, 0.0], dtype=F64),
)
speeds = st.sampled_from([1.0, 0.1, -3.0])
places = st.tuples(st.floats(0.1, 4.0), st.floats(-4.0, 4.0))


def make(
    kind: str,
    normal: Random,
    m: int = 2,
    N: int = 2,
    *,
    each: bool = False,
    **options,
):
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
    coarse, fine = (
        (net.refine(k)(y).detach() - ode.flow(y)).abs().max() for k in (8, 128)
    )
    assert float(fine) < float(coarse) / 12
    torch.testing.assert_close(
        net.refine(128).trajectory(y)[::128].detach(),
        ode.trajectory(y),
        rtol=0,
        atol=0.02,
    )


def test_a_trajectory_starts_at_y_passes_through_all_times_and_ends_in_the_flow():
    normal = Random(0)
    net, y = make("H2", normal, N=3), normal(2, 3, 4)
    ode = ContinuousNetwork(net)
    states = ode.trajectory(y)
    assert states.shape == (4, 2, 3, 4)
    assert torch.equal(states[0], y)
    torch.testing.assert_close(states[-1], ode.flow(y))
    between = [
        0.4,
        0.03,
        ode.T,
        0.03,
        0.25,
        0.0,
    ]  # any order, twice, inside layers
    torch.testing.assert_close(
        ode.trajectory(y, between),
        torch.stack([ode.flow(y, end=t) for t in between]),
        rtol=1e-8,
        atol=1e-8,
    )


def test_times_beside_the_edge_of_a_layer_by_rounding_are_no_trouble():
    normal = Random(0)
    ode, y = (
        ContinuousNetwork(make("H2", normal, N=5)),
        normal(4),
    )  # layers meet at 0.1, 0.2 ..
    times = [
        math.nextafter(float(t), where)
        for t in ode.times
        for where in (0.0, 1.0)
    ]
    expected = ode.trajectory(y).repeat_interleave(2, 0)
    torch.testing.assert_close(
        ode.trajectory(y, times), expected, rtol=1e-9, atol=1e-9
    )
    assert ode.sensitivity(y, times).shape == (12, 4, 4)


def test_the_flow_can_be_taken_in_parts_and_back():
    normal = Random(1)
    net, y = make("H1", normal, N=3, each=True), normal(3, 4)
    ode = ContinuousNetwork(net)
    middle = ode.flow(y, end=0.21)
    torch.testing.assert_close(
        ode.flow(middle, start=0.21), ode.flow(y), rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(
        ode.flow(ode.flow(y), start=ode.T, end=0.0), y, rtol=1e-8, atol=1e-8
    )


def test_steps_may_differ_and_be_learned():
    normal = Random(2)
    steps = [0.1, 0.3, 0.05]
    net, y = (
        make("H2", normal, N=3, step=steps, T=None, learn_step=True),
        normal(4),
    )
    ode = ContinuousNetwork(net)
    torch.testing.assert_close(
        ode.times, torch.tensor([0.0, 0.1, 0.4, 0.45], dtype=F64)
    )
    expected = y
    for j, h in enumerate(
        steps
    ):  # one layer after the other, each as a network of its own
        one = hdnn.H2(4, 1, step=h, X=net.X, dtype=F64)
        for name in ("K_p", "K_q", "b_p", "b_q"):
            one.assign(name, net.weight(name)[j : j + 1])
        expected = ContinuousNetwork(one).flow(expected)
    torch.testing.assert_close(ode.flow(y), expected, rtol=1e-9, atol=1e-9)


def test_a_network_of_any_dtype_is_solved_in_float64_and_left_as_it_was():
    net = hdnn.H2(4, 3, T=0.5, generator=torch.Generator().manual_seed(0))
    y = torch.ones(2, 4)
    single = ContinuousNetwork(net)
    assert single.flow(y).dtype == single.sensitivity(y).dtype == F64
    assert net.K_p.dtype == torch.float32
    assert net.K_p.requires_grad
    torch.testing.assert_close(
        single.flow(y), ContinuousNetwork(net.double()).flow(y.double())
    )


# Sensitivities: lem:grad_dynamics


@few
@given(problems(), st.floats(0.05, 0.95))
def test_the_bsm_is_the_derivative_of_the_flow_in_denominator_layout(
    problem, part
):
    net, y, normal = problem
    ode = ContinuousNetwork(net)
    t, small = part * ode.T, 1e-4
    state, way = ode.trajectory(y, t)[0], normal(*y.shape)
    ahead, behind = (
        ode.flow(state + sign * small * way, start=t) for sign in (1, -1)
    )
    expected = (way.unsqueeze(-2) @ ode.sensitivity(y, t)[0]).squeeze(-2)
    torch.testing.assert_close(
        (ahead - behind) / (2 * small), expected, rtol=1e-5, atol=1e-5
    )


@few
@given(problems())
def test_gradients_follow_their_ode_and_the_chain_rule(problem):
    net, y, normal = problem
    ode = ContinuousNetwork(net)
    delta_T, Phi = normal(*y.shape), ode.sensitivity(y)
    expected = (Phi @ delta_T.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(
        ode.gradients(y, delta_T), expected, rtol=1e-7, atol=1e-7
    )
    through = (
        ode.forward_sensitivity(y) @ Phi
    )  # one factor forwards and one backwards
    torch.testing.assert_close(
        through, Phi[0].expand_as(Phi), rtol=1e-7, atol=1e-7
    )


def test_gradients_are_those_of_autograd_in_the_limit_of_many_layers():
    normal = Random(5)
    net, y = make("yoshida4", normal, N=2), normal(3, 4).requires_grad_()
    end = net.refine(64)(y)
    end.square().sum().backward()
    delta = ContinuousNetwork(net).gradients(y, (2 * end).detach())
    assert delta.shape == (3, 3, 4)
    torch.testing.assert_close(delta[0], y.grad, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(
        delta[-1], (2 * end).detach(), rtol=1e-12, atol=1e-12
    )


def test_sensitivities_of_samples_do_not_mix():
    normal = Random(6)
    ode, y = ContinuousNetwork(make("H1", normal)), normal(3, 4)
    together = ode.sensitivity(y, [0.0, 0.3])
    for i in range(3):
        alone = ode.sensitivity(y[i], [0.0, 0.3])
        torch.testing.assert_close(together[:, i], alone, rtol=1e-7, atol=1e-7)


# Theorems


@few
@given(
    problems(
        [kind for kind in KINDS if kind not in ("MS1", "MS2")], constant_J=True
    )
)
def test_the_bsm_is_symplectic_for_any_constant_J(problem):
    net, y, _ = problem
    ode = ContinuousNetwork(net)
    defects = symplectic_defect(ode.sensitivity(y), ode.J)
    assert defects.shape == (net.layers + 1, *y.shape[:-1])
    assert float(defects.max()) < 1e-8


def test_the_transposed_bsm_is_not_symplectic():
    normal = Random(0)
    ode, y = ContinuousNetwork(make("H1", normal)), normal(4)
    Phi = ode.sensitivity(y, 0.0)
    assert float(symplectic_defect(Phi.mT, ode.J).min()) > 1e-4


def test_symplecticity_holds_for_odd_sizes_and_singular_J():
    normal = Random(0)
    net = randomise(
        hdnn.H1(3, 2, T=0.5, J=normal.skew(3), dtype=F64), normal, 0.5
    )
    ode, y = ContinuousNetwork(net), normal(2, 3)
    Phi = ode.sensitivity(y)
    assert float(symplectic_defect(Phi, ode.J).max()) < 1e-8
    assert float(norms(Phi).min()) >= 1 - 1e-8


@few
@given(problems())
def test_gradients_never_vanish_in_continuous_time_whether_J_is_constant_or_not(
    problem,
):
    net, y, _ = problem
    Phi = ContinuousNetwork(net).sensitivity(y)
    for order in (2, 1, "inf", "fro"):
        least = math.sqrt(net.features) if order == "fro" else 1.0
        assert float(norms(Phi, order).min()) >= least - 1e-8


@few
@given(problems())
def test_the_bsm_is_below_the_sharper_bound_and_that_below_the_papers(problem):
    net, y, _ = problem
    measured = float(norms(ContinuousNetwork(net).sensitivity(y)).max())
    assert measured <= float(bsm_bound_continuous(net)) * (1 + 1e-8)
    assert float(bsm_bound_continuous(net)) <= float(bsm_bound_paper(net))


# Convergence


@pytest.mark.parametrize("kind", KINDS)
def test_networks_converge_to_their_ode_at_the_order_of_their_integrator(kind):
    orders = {"verlet": 2, "midpoint": 2, "yoshida4": 4}
    normal = Random(7)
    net = make(kind, normal, each=True)
    y = normal(3, 4)
    flow = ContinuousNetwork(net, rtol=1e-13, atol=1e-15).flow(y)
    errors = []
    for k in (8, 16):
        distances = (net.refine(k)(y).detach() - flow).norm(dim=-1)
        errors.append(float(distances.max()))
    order = math.log2(errors[0] / errors[1])
    assert order == pytest.approx(orders.get(kind, 1), abs=0.1)


# Mistakes


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (
            OptionError,
            "discretises an ODE",
            lambda: ContinuousNetwork(hdnn.MLP(4, 2)),
        ),
        (
            OptionError,
            "discretises an ODE",
            lambda: ContinuousNetwork(torch.nn.Linear(4, 4)),
        ),
        (ShapeError, r"\(\*batch, 4\)", lambda: ODE.flow(torch.ones(3))),
        (
            DataError,
            "NaN or infinite",
            lambda: ODE.flow(torch.full((4,), math.nan)),
        ),
        (
            OptionError,
            "times in 0 .. T",
            lambda: ODE.trajectory(torch.ones(4), [1e9]),
        ),
        (
            OptionError,
            "longer t",
            lambda: counterexample.fitted_envelope(AXIS, AXIS),
        ),
    ],
)
def test_mistakes_are_one_sentence(error, words, call):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_solution_past_the_largest_number_is_refused():
    net = hdnn.H2(2, 1, step=1e4, activation="relu", dtype=F64)
    for name in ("K_p", "K_q"):
        net.assign(name, torch.full((1, 1, 1), 1e150, dtype=F64))
    with pytest.raises(ConvergenceError, match="not finite"):
        ContinuousNetwork(net).flow(torch.tensor([1e200, -1e200], dtype=F64))


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.integrate", None)
    with pytest.raises(MissingExtraError, match=r"hdnn\[science\]"):
        ODE.flow(torch.ones(4))


# Growing gradients: the two-dimensional example, and H2 at large steps

# Orbits


@settings(max_examples=15)
@given(places, speeds)
def test_the_measured_period_is_the_elliptic_integral(place, eps):
    y = torch.tensor(place, dtype=F64)
    exact = float(counterexample.period(y, eps))
    assert counterexample.measured_period(y, eps) == pytest.approx(
        exact, rel=1e-10
    )


def test_the_period_is_the_one_of_another_library():
    for y in (DIAGONAL, AXIS, torch.tensor([-7.0, 3.0], dtype=F64)):
        with mpmath.workdps(40):
            H = sum(mpmath.log(mpmath.cosh(x)) for x in y.tolist())
            expected = 4 * mpmath.ellipk(1 - mpmath.exp(-2 * H))
        assert float(counterexample.period(y)) == pytest.approx(
            float(expected), rel=1e-13
        )


def test_an_orbit_closes_after_one_period_and_keeps_its_energy():
    y = torch.tensor([1.3, -0.4], dtype=F64)
    P = float(counterexample.period(y, 0.5))
    states = counterexample.example(P, 0.5).trajectory(
        y, torch.linspace(0, P, 50, dtype=F64)
    )
    torch.testing.assert_close(states[-1], y, rtol=1e-10, atol=1e-10)
    H = counterexample.energy(states)
    torch.testing.assert_close(H, H[0].expand(50), rtol=1e-10, atol=1e-10)
    distances = torch.cdist(states, states)
    assert float(distances.max()) == pytest.approx(
        float(counterexample.diameter(y)), rel=0.01
    )


def test_small_orbits_lose_no_digits():
    y = torch.tensor([3e-9, -4e-9], dtype=F64)
    energy = float(counterexample.energy(y))
    assert energy == pytest.approx(1.25e-17, rel=1e-12)
    diameter = float(counterexample.diameter(y))
    assert diameter == pytest.approx(1e-8, rel=1e-12)


def test_the_period_grows_with_the_energy_from_that_of_a_linear_oscillator():
    y = torch.tensor(
        [[1e-4, 0.0], [0.5, 0.0], [1.0, 0.0], [3.0, 2.0]], dtype=F64
    )
    P = counterexample.period(y)
    assert float(P[0]) == pytest.approx(2 * math.pi, rel=1e-8)
    assert bool((P.diff() > 0).all())


# Linear growth


def test_the_norm_grows_along_a_line_whose_slope_is_known():
    t = torch.arange(0, 100, 0.05, dtype=F64)
    both = norms(counterexample.growth(torch.stack([DIAGONAL, AXIS]), t))
    for y, sizes, slope in zip(
        (DIAGONAL, AXIS), both.T, (0.32826, 0.28517), strict=True
    ):
        assert float(counterexample.envelope_slope(y)) == pytest.approx(
            slope, abs=1e-5
        )
        fitted, height = counterexample.fitted_envelope(t, sizes)
        assert fitted == pytest.approx(slope, rel=3e-3)
        assert abs(height) < 0.3
        assert bool((sizes <= slope * t + 1.1).all())  # nothing exponential


@settings(max_examples=4)
@given(places, st.sampled_from([0.2, -2.0]))
def test_only_the_product_of_eps_and_t_counts(place, eps):
    y, t = torch.tensor(place, dtype=F64), torch.linspace(0, 10, 5, dtype=F64)
    sign = torch.tensor(
        [1.0, math.copysign(1.0, eps)], dtype=F64
    )  # q -> -q turns the flow round
    slow = counterexample.growth(y, t / abs(eps), eps)
    expected = sign[:, None] * counterexample.growth(sign * y, t) * sign
    torch.testing.assert_close(slow, expected, rtol=1e-8, atol=1e-8)


def test_growth_is_the_bsm_of_the_ode_and_the_limit_of_a_layered_network():
    y, T = torch.tensor([0.8, 0.5], dtype=F64), 5.0
    Phi = counterexample.growth(y, torch.tensor([T], dtype=F64))[0]
    torch.testing.assert_close(
        Phi,
        counterexample.example(T).sensitivity(y, 0.0)[0],
        rtol=1e-9,
        atol=1e-9,
    )
    net = hdnn.HamiltonianNet(2, 200, "yoshida4", T=T, tied=True, dtype=F64)
    for name in ("K_p", "K_q"):
        net.assign(name, torch.ones(1, 1, 1, dtype=F64))
    torch.testing.assert_close(
        backward_sensitivity(net, y)[0], Phi, rtol=1e-5, atol=1e-5
    )


def test_a_finite_perturbation_grows_as_the_bsm_does_until_it_spans_the_orbit():
    t = torch.arange(0, 100, 0.5, dtype=F64)
    tiny = counterexample.finite_growth(DIAGONAL, t[:20], 1e-6)
    rows = counterexample.growth(DIAGONAL, t[:20]).norm(
        dim=-1
    )  # both directions
    torch.testing.assert_close(tiny, rows, rtol=1e-4, atol=1e-4)
    gamma = 0.2
    largest = counterexample.finite_growth(DIAGONAL, t, gamma).max()
    end = float(counterexample.diameter(DIAGONAL)) / gamma
    assert float(largest) == pytest.approx(end, rel=0.15)


def test_along_the_orbit_nothing_grows():
    t = torch.arange(0, 60, 0.5, dtype=F64)
    outwards, along = counterexample.finite_growth(AXIS, t, 1e-3).amax(0)
    assert float(outwards) > 10
    assert float(along) < 1.2


# Exponential growth


@settings(max_examples=15)
@given(st.floats(2.05, 4.0), st.floats(0.05, 2.0))
def test_past_h_k_squared_of_two_every_layer_multiplies_the_gradient(load, h):
    found = counterexample.layer_growth(h, math.sqrt(load / h), layers=100)
    trace = abs(2 - load**2)
    radius = trace / 2 + math.sqrt(trace**2 / 4 - 1)
    assert found.exact == pytest.approx(math.log(radius), rel=1e-9)
    assert found.rate == pytest.approx(found.exact, rel=1e-6)
    assert math.isinf(found.bound)
    assert found.sizes.shape == (101,)


@settings(max_examples=15)
@given(st.floats(0.01, 1.99), st.floats(0.05, 2.0))
def test_below_h_k_squared_of_two_no_depth_makes_the_gradient_grow(load, h):
    found = counterexample.layer_growth(h, math.sqrt(load / h), layers=300)
    assert found.exact == 0
    assert abs(found.rate) < 0.02
    assert 1 - 1e-12 <= found.largest <= found.bound * (1 + 1e-9)
    assert found.bound == pytest.approx(math.sqrt((2 + load) / (2 - load)))


def test_no_random_numbers_are_used_up():
    state = torch.get_rng_state()
    counterexample.layer_growth(0.5, 1.0)
    counterexample.example(1.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_at_h_k_squared_of_two_growth_is_linear():
    found = counterexample.layer_growth(0.5, 2.0, layers=128)
    assert found.exact == 0
    assert float(found.sizes[128] / found.sizes[64]) == pytest.approx(
        2, rel=1e-3
    )
