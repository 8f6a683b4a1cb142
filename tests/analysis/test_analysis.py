"""Analysis: backward sensitivity matrices, symplecticity, and bounds that hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import analysis, interconnection
from hdnn.errors import HDNNError, OptionError, ShapeError
from strategies import ACTIVATIONS, MONOTONE, Random, randomise, seeds, sizes, steps

F64 = torch.float64
ODE = ("H1", "H2", "ImplicitH2", "MS1", "MS2", "MS3", "verlet", "yoshida4", "midpoint")
SHEARS = ("H2", "MS1", "MS3", "verlet", "yoshida4")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(kind: str, n: int = 4, N: int = 3, **options):
    options = {"dtype": F64, "generator": generator()} | options
    if kind in ("verlet", "yoshida4", "midpoint"):
        return hdnn.HamiltonianNet(n, N, kind, **options)
    return getattr(hdnn, kind)(n, N, **options)


@st.composite
def networks(draw, kinds=(*ODE, "MLP")):
    kind, m, N, seed = (
        draw(st.sampled_from(kinds)),
        draw(sizes),
        draw(st.integers(1, 5)),
        draw(seeds),
    )
    normal = Random(seed)
    options = {
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "init": "paper",
        "tied": draw(st.booleans()),
        "generator": generator(seed),
    }
    if kind != "MLP":
        options["learn_step"] = draw(st.booleans())
        options["step"] = 0.04 if options["tied"] else [0.01 * (j + 1) for j in range(N)]
    if kind in ("H2", "ImplicitH2", "verlet", "yoshida4"):
        options["X"] = normal(N, m, m) if draw(st.booleans()) else normal(m, m)
        options["learn_X"] = draw(st.booleans())
    if kind in ("H1", "midpoint"):
        options["J"] = normal.skew(N, 2 * m) if draw(st.booleans()) else normal.skew(2 * m)
    return make(kind, 2 * m, N, **options)


# Backward sensitivity


@settings(max_examples=40)
@given(networks(), seeds, st.sampled_from([(), (2,), (2, 1)]))
def test_a_bsm_is_the_transposed_jacobian_of_the_layers_that_follow(net, seed, batch):
    y = Random(seed)(*batch, net.features)
    Phi = analysis.backward_sensitivity(net, y)
    n, N = net.features, net.layers
    assert Phi.shape == (N + 1, *batch, n, n)
    assert not Phi.requires_grad
    states = net.trajectory(y).detach()

    def rest(state, j):
        for layer in range(j, N):
            state = net.layer(state, layer)
        return state

    for j in (0, N // 2, N):
        flat = states[j].reshape(-1, n)
        for sample, bsm in zip(flat, Phi[j].reshape(-1, n, n), strict=True):
            jacobian = torch.autograd.functional.jacobian(lambda s, j=j: rest(s, j), sample)
            size = max(1.0, float(bsm.abs().max()))
            implicit = isinstance(net, hdnn.HamiltonianNet) and net.scheme.implicit
            atol = size * (1e-9 if implicit else 1e-12)  # autograd has the iterate's error too
            torch.testing.assert_close(bsm, jacobian.mT, rtol=0, atol=atol)
    assert torch.equal(Phi[-1], torch.eye(n, dtype=F64).expand_as(Phi[-1]))


@settings(max_examples=40)
@given(networks(), seeds, st.sampled_from([(), (2,), (2, 1)]))
def test_the_bsms_are_the_products_of_the_sensitivities_of_single_layers(net, seed, batch):
    y = Random(seed)(*batch, net.features)
    each = analysis.layer_sensitivity(net, y)
    Phi = analysis.backward_sensitivity(net, y)
    assert each.shape == (net.layers, *batch, net.features, net.features)
    for j in range(net.layers):
        torch.testing.assert_close(each[j] @ Phi[j + 1], Phi[j], rtol=1e-12, atol=1e-12)


def test_a_bsm_takes_the_gradient_of_the_last_state_to_that_of_an_earlier_one():
    net, y = make("H2", N=5, X=Random(0)(2, 2)), Random(1)(3, 4)
    Phi = analysis.backward_sensitivity(net, y)
    states = [y.clone().requires_grad_()]
    for j in range(5):
        states.append(net.layer(states[-1], j))
    loss = states[-1].square().sum()
    for j, delta in enumerate(torch.autograd.grad(loss, states, retain_graph=True)):
        expected = (Phi[j] @ (2 * states[-1]).detach().unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(delta, expected)


def test_samples_do_not_mix():
    net, y = make("H1"), Random(0)(5, 4)
    together = analysis.backward_sensitivity(net, y)
    for i in range(5):
        torch.testing.assert_close(together[:, i], analysis.backward_sensitivity(net, y[i]))


def test_an_empty_batch_has_no_bsm():
    assert analysis.backward_sensitivity(make("H2"), torch.ones(0, 4, dtype=F64)).shape == (
        4,
        0,
        4,
        4,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["H1", "H2", "MS1", "ImplicitH2"])
def test_bsms_have_the_dtype_of_the_network(kind, dtype):
    Phi = analysis.backward_sensitivity(
        make(kind, dtype=dtype, T=0.3), torch.ones(2, 4, dtype=dtype)
    )
    exact = analysis.backward_sensitivity(make(kind, T=0.3), torch.ones(2, 4, dtype=F64))
    assert Phi.dtype == dtype
    torch.testing.assert_close(Phi.double(), exact, rtol=0.05, atol=0.05)


def test_bsms_do_not_need_gradients_to_be_switched_on():
    net, y = make("H2"), Random(0)(4)
    expected = analysis.backward_sensitivity(net, y)
    with torch.no_grad():
        assert torch.equal(analysis.backward_sensitivity(net, y), expected)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    "y", [None, [1.0] * 4, torch.ones(5), torch.ones(()), torch.ones(4).long()]
)
def test_bsms_of_a_state_that_does_not_fit_are_refused(y):
    with pytest.raises(ShapeError, match="y"):
        analysis.backward_sensitivity(make("H2"), y)


def test_bsms_are_of_networks():
    model = hdnn.Model(None, make("H2"), hdnn.SoftmaxHead(4, 2, dtype=F64))
    with pytest.raises(HDNNError, match=r"Model.*\.net"):
        analysis.backward_sensitivity(model, torch.ones(4, dtype=F64))


# Norms


@given(seeds, st.integers(1, 4), st.lists(st.integers(1, 3), max_size=2))
def test_norms_are_those_of_every_matrix(seed, n, batch):
    Phi = Random(seed)(*batch, n, n)
    absolute = Phi.abs()
    assert analysis.norms(Phi).shape == tuple(batch)
    torch.testing.assert_close(analysis.norms(Phi), torch.linalg.svdvals(Phi)[..., 0])
    torch.testing.assert_close(analysis.norms(Phi, 1), absolute.sum(-2).amax(-1))
    torch.testing.assert_close(analysis.norms(Phi, float("inf")), absolute.sum(-1).amax(-1))
    torch.testing.assert_close(analysis.norms(Phi, "inf"), absolute.sum(-1).amax(-1))
    torch.testing.assert_close(analysis.norms(Phi, "fro"), Phi.square().sum((-1, -2)).sqrt())


@pytest.mark.parametrize("ord", ["nuc", 3, -2, 0, None, "two"])
def test_other_norms_are_refused(ord):
    with pytest.raises(OptionError, match=r"ord.*1, 2, fro, inf"):
        analysis.norms(torch.eye(2), ord)


def test_a_norm_may_be_given_as_a_float():
    Phi = Random(0)(3, 3)
    assert torch.equal(analysis.norms(Phi, 2.0), analysis.norms(Phi, 2))
    assert torch.equal(analysis.norms(Phi, 1.0), analysis.norms(Phi, 1))


@pytest.mark.parametrize("ord", [1, 2, "inf", "fro"])
def test_norms_of_half_precision_matrices_can_be_taken(ord):
    Phi = Random(0)(3, 4, 4)
    half = analysis.norms(Phi.bfloat16(), ord)
    torch.testing.assert_close(half.double(), analysis.norms(Phi, ord), rtol=0.02, atol=0)


def test_what_is_no_number_has_no_norm():
    Phi = torch.eye(2, dtype=F64).repeat(3, 1, 1)
    Phi[1, 0, 0], Phi[2, 0, 0] = torch.inf, torch.nan
    for ord in (1, 2, "inf", "fro"):
        found = analysis.norms(Phi, ord)
        assert found[0] >= 1
        assert found[1] == torch.inf
        assert found[2].isnan()
    assert analysis.norms(Phi).min().isnan()  # so that no comparison with 1 comes out true
    assert analysis.singular_values(Phi)[1:].isnan().all()
    J = interconnection.canonical(2, dtype=F64)
    assert analysis.symplectic_defect(Phi, J)[1:].isnan().all()
    assert not analysis.is_symplectic(Phi, J)
    assert analysis.is_symplectic(torch.diag(torch.tensor([1e200, 1e-200], dtype=F64)), J)


@pytest.mark.parametrize("n", [4, 20])  # by compiled loops, and without
def test_samples_whose_states_are_not_finite_have_no_bsm(n):
    net = make("H2", n, 30, step=10.0, activation="identity", init="paper")
    y = Random(0)(3, n)
    y[1] *= 1e300
    Phi = analysis.backward_sensitivity(net, y)
    assert Phi[:-1, 1].isnan().all()
    assert torch.equal(Phi[-1, 1], torch.eye(n, dtype=F64))
    assert Phi[:, [0, 2]].isfinite().all()
    some = analysis.backward_sensitivity(net, y, layers=[30, 0])
    assert some[1, 1].isnan().all()
    assert not some[0].isnan().any()
    each = analysis.layer_sensitivity(net, y)
    first = int(net.trajectory(y)[:, 1].isfinite().all(-1).sum())
    assert each[first - 1 :, 1].isnan().all()
    assert each[: first - 1, 1].isfinite().all()


# Symplecticity


@given(seeds, sizes)
def test_the_defect_is_zero_for_symplectic_matrices_in_denominator_layout_only(seed, m):
    normal = Random(seed)
    net = make("H2", 2 * m, 2, X=normal(m, m), init="paper", generator=generator(seed))
    Phi = analysis.backward_sensitivity(net, normal(2 * m))
    assert float(analysis.symplectic_defect(Phi, net.J).max()) < 1e-14
    assert analysis.is_symplectic(Phi, net.J)


def test_numerator_layout_is_told_from_denominator_layout():
    normal = Random(0)
    net = make("H2", 6, 2, X=normal(3, 3), init="paper")
    Phi = analysis.backward_sensitivity(net, normal(6))
    assert analysis.is_symplectic(Phi, net.J)
    assert not analysis.is_symplectic(Phi.mT, net.J)


def test_the_defect_is_relative_and_for_every_matrix():
    J = interconnection.canonical(2, dtype=F64)
    stretch = torch.stack(
        [torch.diag(torch.tensor([s, t], dtype=F64)) for s, t in ((2, 0.5), (2, 1))]
    )
    defect = analysis.symplectic_defect(stretch, J)
    # |diag(2, 1)^T J diag(2, 1) - J| = |2J - J| = 1, relative to 2^2 |J| = 4.
    torch.testing.assert_close(defect, torch.tensor([0.0, 0.25], dtype=F64))
    assert analysis.is_symplectic(stretch[0], J)
    assert not analysis.is_symplectic(stretch, J)
    assert analysis.is_symplectic(stretch, J, tolerance=0.3)
    torch.testing.assert_close(analysis.symplectic_defect(stretch, 1e6 * J), defect)


def test_forward_euler_is_not_symplectic():
    net = make("H1", init="paper")
    Phi = analysis.backward_sensitivity(net, Random(0)(4))
    assert not analysis.is_symplectic(Phi, net.J)


def test_the_defect_of_nothing_is_finite():
    zero = torch.zeros(2, 2, dtype=F64)
    assert torch.isfinite(analysis.symplectic_defect(zero, zero))


def test_the_identity_is_symplectic_in_every_dtype():
    for dtype in (F64, torch.float32):
        eye = torch.eye(4, dtype=dtype)
        assert analysis.is_symplectic(eye, interconnection.canonical(4, dtype=dtype))


# Bounds


def largest(net, y) -> float:
    return float(analysis.norms(analysis.backward_sensitivity(net, y)).max())


@settings(max_examples=30)
@given(st.sampled_from(["H1", "MS2"]), st.sampled_from(ACTIVATIONS), seeds, sizes, steps)
def test_the_bound_of_forward_euler_holds(kind, activation, seed, m, h):
    net = make(kind, 2 * m, 4, step=h, activation=activation, generator=generator(seed))
    randomise(net, Random(seed), 1.0)
    bound = float(analysis.bsm_bound_forward_euler(net).detach())
    assert largest(net, Random(seed)(3, 2 * m)) <= bound * (1 + 1e-12)


@settings(max_examples=25)
@given(st.sampled_from(["H1", "H2", "MS1", "MS2", "MS3"]), st.sampled_from(ACTIVATIONS), seeds)
def test_the_continuous_bounds_hold_for_a_fine_network(kind, activation, seed):
    coarse = make(kind, 4, 2, T=0.5, activation=activation, generator=generator(seed))
    net = randomise(coarse, Random(seed), 0.7).refine(32)
    growth = largest(net, Random(seed)(3, 4))
    continuous = float(analysis.bsm_bound_continuous(net).detach())
    assume(continuous < 1e6)
    assert growth <= continuous * 1.02  # the network is close to the ODE, not equal
    assert continuous <= float(analysis.bsm_bound_paper(net).detach())


@given(st.sampled_from(ODE), seeds)
def test_the_papers_bound_is_its_formula(kind, seed):
    net = make(kind, 4, 3, step=[0.1, 0.2, 0.3], generator=generator(seed), activation="sigmoid")
    K, J = net.field()["K"].detach(), net.J.detach()
    J = J.expand(3, 4, 4)
    norm = lambda A: torch.linalg.svdvals(A)[..., 0]  # noqa: E731
    Q = 0.25 * 2 * float((norm(K) ** 2 * norm(J)).max())
    literal = torch.tensor(2 * torch.e, dtype=F64) ** 0 * 2 * torch.exp(torch.tensor(Q * 0.6))
    bound = float(analysis.bsm_bound_paper(net).detach())
    if kind in ("MS1", "MS2"):  # J K^T = I makes it sharper, and is what the layers do
        assert bound <= float(literal) * (1 + 1e-9)
    else:
        assert bound == pytest.approx(float(literal), rel=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_monotone_activations_halve_the_exponent(activation):
    net = make("H1", 4, 3, step=0.1, activation=activation)
    S = hdnn.activations.get(activation).S
    norm = lambda A: torch.linalg.svdvals(A.detach())[..., 0]  # noqa: E731
    exponent = float((0.1 * S * norm(net.K) ** 2).sum())
    half = 0.5 if activation in MONOTONE else 1.0
    bound = analysis.bsm_bound_continuous(net)
    assert float(bound.detach().log()) == pytest.approx(half * exponent)


@pytest.mark.parametrize("kind", SHEARS)
def test_gradient_bounds_are_those_of_the_budget(kind):
    net = make(kind)
    low, high = analysis.gradient_bounds(net)
    B = hdnn.regularization.gradient_budget(net)
    torch.testing.assert_close(low, torch.exp(-B))
    torch.testing.assert_close(high, torch.exp(B))
    assert 0 < float(low.detach()) < 1 < float(high.detach())


def test_bounds_are_numbers_to_look_at_and_carry_no_gradients():
    net = make("H2", X=Random(0)(2, 2), learn_X=True)
    assert not analysis.bsm_bound_paper(net).requires_grad
    assert not analysis.bsm_bound_continuous(net).requires_grad
    assert not any(bound.requires_grad for bound in analysis.gradient_bounds(net))
    assert not analysis.bsm_bound_forward_euler(make("H1")).requires_grad


@pytest.mark.parametrize("kind", ["H2", "ImplicitH2", "MS1", "MS3", "verlet", "midpoint", "MLP"])
def test_the_bound_of_forward_euler_is_for_forward_euler(kind):
    with pytest.raises(OptionError, match="forward Euler"):
        analysis.bsm_bound_forward_euler(make(kind))


@pytest.mark.parametrize("bound", [analysis.bsm_bound_paper, analysis.bsm_bound_continuous])
def test_the_bounds_of_the_ode_are_for_networks_that_discretise_one(bound):
    with pytest.raises(OptionError, match="MLP"):
        bound(make("MLP"))


def test_gradient_bounds_are_for_shears():
    for kind in ("H1", "MS2", "ImplicitH2", "midpoint", "MLP"):
        with pytest.raises(OptionError, match="shears"):
            analysis.gradient_bounds(make(kind))


@pytest.mark.parametrize("name", analysis.__all__)
def test_everything_public_says_what_it_is(name):
    assert getattr(analysis, name).__doc__


# Parts of a BSM, singular values, energies


@given(networks(), seeds, st.integers(1, 2000))
@settings(max_examples=30)
def test_some_layers_in_little_memory_are_those_of_all(net, seed, memory):
    y = Random(seed)(3, net.features)
    whole = analysis.backward_sensitivity(net, y)
    some = analysis.backward_sensitivity(net, y, layers=[net.layers, 0, 0], memory=memory)
    torch.testing.assert_close(some, whole[[net.layers, 0, 0]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layers", [[4], [-1], [0.5], ["0"]])
def test_layers_that_are_not_there_are_named(layers):
    with pytest.raises(ShapeError, match=r"layers must be whole numbers in 0 \.\. 3"):
        analysis.backward_sensitivity(make("H2"), torch.ones(1, 4, dtype=F64), layers=layers)


@given(networks(), seeds)
@settings(max_examples=20)
def test_extreme_singular_values_need_no_matrix(net, seed):
    y = Random(seed)(3, net.features)
    low, high = analysis.extreme_singular_values(net, y)
    values = analysis.singular_values(analysis.backward_sensitivity(net, y, layers=[0])[0])
    torch.testing.assert_close(high, values[:, 0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(low, values[:, -1], rtol=1e-4, atol=1e-6 * float(high.max()))


def test_few_steps_find_the_extremes_of_a_wide_network():
    net = make("H2", n=100, N=20)
    y = Random(0)(2, 100)
    low, high = analysis.extreme_singular_values(net, y, steps=40)
    values = analysis.singular_values(analysis.backward_sensitivity(net, y, layers=[0])[0])
    torch.testing.assert_close(high, values[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(low, values[:, -1], rtol=1e-3, atol=0)
    with pytest.raises(ShapeError, match="must be square"):
        analysis.extreme_singular_values(lambda y: y[:, :3], y)
    with pytest.raises(ShapeError, match=r"y must be \(B, \.\.\.\)"):
        analysis.extreme_singular_values(net, y[0])


def test_symplectic_layers_keep_the_energy_and_forward_euler_does_not():
    drift = {}
    for kind in ("H1", "H2", "verlet", "yoshida4"):
        net = make(kind, N=400, T=20.0, tied=True, generator=generator(3))
        energy = analysis.energy_along(net, Random(0)(5, 4))
        assert energy.shape == (401, 5)
        drift[kind] = float((energy - energy[0]).abs().max())
    assert drift["yoshida4"] < drift["verlet"] < drift["H2"] < drift["H1"]


@pytest.mark.parametrize("kind", SHEARS)
def test_what_goes_through_comes_back(kind):
    error = analysis.reconstruction_error(make(kind, N=50), Random(0)(2, 3, 4))
    assert error.shape == (2, 3)
    assert error.max() < 1e-12


@given(networks(ODE), seeds)
@settings(max_examples=30)
def test_bounds_are_told_beside_what_was_measured(net, seed):
    found = analysis.bounds(net, Random(seed)(4, net.features))
    assert all(bound.holds is not False for bound in found)
    assert all(bound.measured is not None for bound in found)
    assert all(bound.measured is None for bound in analysis.bounds(net))
    assert any(bound.holds for bound in found) or isinstance(net, hdnn.HamiltonianNet)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_no_bound_of_a_sound_network_is_said_to_fail(dtype):
    for seed in range(60):
        normal = Random(seed)
        kind, act = SHEARS[seed % 5], ACTIVATIONS[seed % len(ACTIVATIONS)]
        options = {"step": (0.01, 0.1, 1.0)[seed % 3], "activation": act, "dtype": dtype}
        init = ("scaled", "paper")[seed % 2]
        net = make(kind, 2 * (1 + seed % 5), 1 + seed % 24, init=init, **options)
        y = normal(8, net.features).to(dtype)
        found = analysis.bounds(net, y)
        assert all(bound.holds for bound in found if bound.rigorous), found
        values = analysis.singular_values(analysis.backward_sensitivity(net, y))
        own = values.min().item(), values.max().item()  # in the dtype of the network
        assert all(b.holds is not False for b in analysis.bounds(net, measured=own)), own


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_bounds_that_are_reached_are_not_said_to_fail(dtype):
    for seed in range(40):
        m, normal = 1 + seed % 4, Random(seed)
        net = make("H2", 2 * m, 1, step=1.0, activation="identity", dtype=dtype)
        with torch.no_grad():
            net.K_p.copy_(10 ** (3 * seed / 40) * torch.linalg.qr(normal(m, m)).Q)
            net.K_q.zero_()
        low, high = analysis.bounds(net, normal(4, 2 * m).to(dtype))[-2:]
        assert low.holds
        assert high.holds
        assert low.measured == pytest.approx(low.value, rel=1e-5)
        assert high.measured == pytest.approx(high.value, rel=1e-5)


def test_bounds_of_what_is_not_finite_cannot_be_told():
    net = make("H2", 4, 40, step=10.0, activation="identity")
    with torch.no_grad():
        net.K_p.mul_(1e5)
        net.K_q.mul_(1e5)
    found = analysis.bounds(net, Random(0)(3, 4))
    assert all(bound.holds is None for bound in found)
    assert "cannot be told" in str(found[-1])
    assert analysis.Bound("b", "x", "at most", 1.0, float("nan")).holds is None
    assert analysis.Bound("b", "x", "at most", float("inf"), float("inf")).holds is None
    assert analysis.Bound("b", "x", "at most", 1.0, float("inf")).holds is False
    assert analysis.Bound("b", "x", "at least", 0.5, 0.4).holds is False
    assert analysis.Bound("b", "x", "at least", 0.5, 0.4, slack=2.0).holds is None
    with pytest.raises(ShapeError, match=r"y must be a tensor \(\*batch, 4\)"):
        analysis.bounds(net, torch.ones(0, 4))


def test_a_perceptron_has_no_bounds():
    with pytest.raises(OptionError, match="no discretised ODE"):
        analysis.bounds(make("MLP"))
