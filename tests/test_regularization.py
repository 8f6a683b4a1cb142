"""Regularisers against the paper's formulas, and the budget B against the gradients themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import interconnection
from hdnn.analysis import backward_sensitivity
from hdnn.errors import HDNNError, OptionError, ShapeError, StepError
from hdnn.regularization import gradient_budget, smoothness, spectral, weight_decay
from strategies import ACTIVATIONS, Random, depths, randomise, seeds, sizes, steps

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def R_K(K, b, h) -> float:
    """The paper's sum, entry by entry."""
    total = 0.0
    for j in range(1, len(K)):
        for row in (K[j] - K[j - 1]).tolist():
            for entry in row:
                total += h[j] / 2 * entry**2
        for entry in (b[j] - b[j - 1]).tolist():
            total += h[j] / 2 * entry**2
    return total


def paper_K(net) -> tuple[torch.Tensor, torch.Tensor]:
    """K and b of each layer as the paper writes them."""
    w = {k: v.detach() for k, v in net.weights().items() if torch.is_tensor(v)}
    if isinstance(net, hdnn.MS1):
        zero = torch.zeros_like(w["K_0"])
        K = torch.cat([torch.cat([zero, w["K_0"]], -1), torch.cat([-w["K_0"].mT, zero], -1)], -2)
        return K, torch.cat([w["b_1"], w["b_2"]], -1)
    if isinstance(net, hdnn.MS3):
        zero = torch.zeros_like(w["K_1"])
        K = torch.cat([torch.cat([zero, w["K_1"]], -1), torch.cat([w["K_2"], zero], -1)], -2)
        return K, torch.cat([w["b_1"], w["b_2"]], -1)
    if "K_p" in w:
        K = torch.stack([torch.block_diag(p, q) for p, q in zip(w["K_p"], w["K_q"], strict=True)])
        return K, torch.cat([w["b_p"], w["b_q"]], -1)
    return w["K"], w["b"]


KINDS = ("H1", "H2", "ImplicitH2", "MS1", "MS2", "MS3", "verlet", "midpoint")


def make(kind: str, n: int, N: int, **options):
    options = {"dtype": F64, "init": "paper"} | options
    if kind in ("verlet", "yoshida4", "midpoint"):
        return hdnn.HamiltonianNet(n, N, kind, **options)
    return getattr(hdnn, kind)(n, N, **options)


# Smoothness


@given(seeds, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), steps)
def test_smoothness_is_the_papers_sum(seed, N, r, n, h):
    normal = Random(seed)
    K, b = normal(N, r, n), normal(N, r)
    assert float(smoothness(K, b, h)) == pytest.approx(R_K(K, b, [h] * N))
    each = normal(N).abs() + 0.1
    assert float(smoothness(K, b, each)) == pytest.approx(R_K(K, b, each.tolist()))
    assert float(smoothness(K, b, each.tolist())) == pytest.approx(R_K(K, b, each.tolist()))


@settings(max_examples=30)
@given(st.sampled_from(KINDS), seeds, sizes, st.integers(1, 4), st.booleans(), st.booleans())
def test_a_networks_smoothness_is_that_of_its_own_K_and_b(kind, seed, m, N, each, learn):
    h = [0.1 * (j + 1) for j in range(N)] if each else [0.3] * N
    net = make(kind, 2 * m, N, step=h if each else 0.3, learn_step=learn, generator=generator(seed))
    K, b = paper_K(net)
    assert float(net.smoothness().detach()) == pytest.approx(R_K(K, b, h))


def test_MS1_counts_its_K_twice():
    net = make("MS1", 4, 2, step=1.0)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.K_0[1, 0, 0] = 3.0
    assert float(net.smoothness().detach()) == pytest.approx(0.5 * 2 * 9)


def test_MS2_counts_every_entry_of_its_skew_K_twice():
    net = make("MS2", 4, 2, step=1.0)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.K_upper[1, 0] = 3.0
    assert float(net.smoothness().detach()) == pytest.approx(0.5 * 2 * 9)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_layers_are_smooth_and_so_is_a_single_one(kind):
    assert float(make(kind, 4, 5, tied=True).smoothness().detach()) == 0
    assert float(make(kind, 4, 1).smoothness().detach()) == 0


def test_smoothness_tends_to_the_energy_of_a_smooth_path():
    """h/2 sum |K_j - K_{j-1}|^2 with K = t: N-1 jumps of h^2, so about T h^2 / 2."""
    for N in (10, 100):
        t = torch.linspace(0, 1, N, dtype=F64).reshape(N, 1, 1)
        h = 1 / (N - 1)
        assert float(smoothness(t, torch.zeros(N, 1, dtype=F64), h)) == pytest.approx(h**2 / 2)


def test_smoothness_is_differentiable_also_in_learned_steps():
    net = make("H2", 4, 3, learn_step=True)
    net.smoothness().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


@pytest.mark.parametrize("kind", ["MS1", "MS2"])
def test_smoothness_needs_no_invertible_K(kind):
    net = make(kind, 4, 3)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert float(net.smoothness().detach()) == 0


K3, B3 = Random(0)(3, 2, 2), Random(1)(3, 2)


def test_smoothness_refuses_a_step_that_is_none():
    for h in (0.0, -1.0, float("nan"), float("inf"), True, "0.1", None):
        with pytest.raises(StepError, match="h must be"):
            smoothness(K3, B3, h)


@pytest.mark.parametrize("form", [list, torch.tensor])
def test_smoothness_refuses_steps_that_are_not_one_a_layer(form):
    for h in ([0.1] * 2, [0.1] * 4, [0.1]):
        with pytest.raises(StepError, match="3"):
            smoothness(K3, B3, form(h))


def test_smoothness_takes_a_tensor_with_a_single_step():
    h = torch.tensor(0.1, dtype=F64)
    assert float(smoothness(K3, B3, h)) == pytest.approx(R_K(K3, B3, [0.1] * 3))


def test_smoothness_needs_as_many_K_as_b():
    with pytest.raises(ShapeError, match="K has 3 layers, but b has 2"):
        smoothness(K3, B3[:2], 0.1)


# Weight decay


@given(seeds, st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_weight_decay_is_half_the_sum_of_squares(seed, lengths):
    weights = [Random(seed + i)(length) for i, length in enumerate(lengths)]
    expected = 0.5 * sum(v**2 for w in weights for v in w.tolist())
    assert float(weight_decay(weights)) == pytest.approx(expected)
    assert float(weight_decay(iter(weights))) == pytest.approx(expected)


def test_weight_decay_of_a_module_is_that_of_its_parameters():
    net = make("H2", 4, 3)
    expected = 0.5 * sum(float(p.detach().square().sum()) for p in net.parameters())
    assert float(weight_decay(net).detach()) == pytest.approx(expected)
    weight_decay(net).backward()
    for p in net.parameters():
        torch.testing.assert_close(p.grad, p.detach())


def test_weight_decay_does_not_pull_learned_steps_towards_one():
    net = make("H2", 4, 3, step=1e-3, learn_step=True)
    weight_decay(net).backward()
    assert net.log_h.grad is None or not net.log_h.grad.any()


@pytest.mark.parametrize("weights", [[], iter(()), hdnn.Augment(2, 4)])
def test_weight_decay_needs_weights(weights):
    with pytest.raises(OptionError, match="no weights"):
        weight_decay(weights)


# The spectral form


@settings(max_examples=40)
@given(st.sampled_from(KINDS), seeds, sizes, st.integers(1, 3))
def test_spectral_is_the_sum_of_the_norms_of_K_and_J(kind, seed, m, N):
    net = make(kind, 2 * m, N, generator=generator(seed))
    K, J = net.field()["K"].detach(), net.J.detach()
    J = J.expand(N, 2 * m, 2 * m)
    expected = sum(
        float(torch.linalg.svdvals(A).max()) for pair in zip(K, J, strict=True) for A in pair
    )
    assert float(spectral(net).detach()) == pytest.approx(expected, rel=1e-6)


def test_spectral_shrinks_weights():
    net = make("H2", 4, 3, X=Random(0)(2, 2), learn_X=True)
    before = float(spectral(net).detach())
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(5):
        optimiser.zero_grad()
        spectral(net).backward()
        optimiser.step()
    assert float(spectral(net).detach()) < before


def test_spectral_is_for_hamiltonian_networks():
    with pytest.raises(HDNNError, match="MLP"):
        spectral(hdnn.MLP(4, 2))


# The gradient budget


@st.composite
def shears(draw):
    """Any network whose layers are shears, with any X."""
    kind = draw(st.sampled_from(["H2", "verlet", "yoshida4", "MS1", "MS3"]))
    m, N, seed = draw(sizes), draw(depths), draw(seeds)
    activation = draw(st.sampled_from(ACTIVATIONS))
    normal = Random(seed)
    options = {"activation": activation, "learn_step": draw(st.booleans())}
    options["step"] = draw(st.sampled_from([0.05, 0.5, 1.0]))
    if draw(st.booleans()):
        options["step"] = [options["step"] * (1 + j / N) for j in range(N)]
    if not kind.startswith("MS"):
        X = draw(st.sampled_from(["none", "one", "each"]))
        options["X"] = {"none": None, "one": normal(m, m), "each": normal(N, m, m)}[X]
    net = make(kind, 2 * m, N, **options)
    return randomise(net, normal, draw(st.floats(0.1, 1.5)))


@settings(max_examples=50)
@given(shears(), seeds)
def test_the_budget_bounds_every_gradient_from_both_sides(net, seed):
    y = Random(seed)(3, net.features)
    B = float(gradient_budget(net).detach())
    Phi = backward_sensitivity(net, y)
    stretch = torch.linalg.svdvals(Phi)
    if not bool(torch.isfinite(stretch).all()) or float(stretch.max()) > 1e12:
        return  # the state itself has left what float64 can tell
    rounding = 1e-10 * float(stretch.max()) ** 2
    assert math.log(float(stretch.max())) <= B + 1e-9
    assert float(stretch.min()) >= math.exp(-B) - rounding
    delta = Random(seed + 1)(net.features)
    back = Phi @ delta
    ratio = back.norm(dim=-1) / delta.norm()
    assert float(ratio.max()) <= math.exp(B) * (1 + 1e-9)
    assert float(ratio.min()) >= math.exp(-B) - rounding


@given(seeds, sizes, depths, steps)
def test_the_budget_of_H2_is_the_sum_of_the_errata(seed, m, N, h):
    normal = Random(seed)
    X = normal(m, m)
    net = randomise(make("H2", 2 * m, N, X=X, step=h, activation="sigmoid"), normal, 1.0)
    norm = lambda A: float(torch.linalg.svdvals(A.detach()).max())  # noqa: E731
    expected = sum(math.asinh(h * 0.25 * norm(X) * norm(K) ** 2 / 2) for K in (*net.K_p, *net.K_q))
    assert float(gradient_budget(net).detach()) == pytest.approx(expected)


def test_the_bound_is_reached_by_one_shear_of_the_identity():
    net = make("H2", 2, 1, activation="identity", step=1.0)
    with torch.no_grad():
        net.K_p.zero_()
        net.K_q.fill_(2.0)
    stretch = torch.linalg.svdvals(backward_sensitivity(net, torch.zeros(2, dtype=F64))[0])
    B = float(gradient_budget(net).detach())
    assert float(stretch.max()) == pytest.approx(math.exp(B))
    assert float(stretch.min()) == pytest.approx(math.exp(-B))


def test_the_budget_is_differentiable_and_shrinks_the_weights():
    for kind in ("H2", "MS1", "MS3", "yoshida4"):
        net = make(kind, 4, 3, step=0.1, learn_step=True)
        before = gradient_budget(net)
        before.backward()
        with torch.no_grad():
            for name, p in net.named_parameters():
                if name.startswith("K"):
                    assert bool(p.grad.any()), name
                if p.grad is not None:
                    p.sub_(0.01 * p.grad)
        assert float(gradient_budget(net).detach()) < float(before.detach())


def test_the_budget_works_for_sparse_and_tied_networks():
    sparse = make("H2", 4, 3, sparsity=torch.eye(2))
    dense = make("H2", 4, 3)
    for name in dense.stacked:
        dense.assign(name, sparse.weight(name))
    torch.testing.assert_close(gradient_budget(sparse), gradient_budget(dense))
    tied = make("H2", 4, 1)
    three = make("H2", 4, 3, tied=True, step=tied.step)
    for name in tied.stacked:
        three.assign(name, tied.weight(name))
    torch.testing.assert_close(gradient_budget(three), 3 * gradient_budget(tied))


@pytest.mark.parametrize("kind", ["H1", "ImplicitH2", "MS2", "MLP", "midpoint"])
def test_networks_that_are_no_shears_have_no_budget(kind):
    net = hdnn.MLP(4, 2) if kind == "MLP" else make(kind, 4, 2)
    name = "HamiltonianNet" if kind == "midpoint" else kind
    with pytest.raises(OptionError, match=f"H2, MS1, MS3.*not for {name}"):
        gradient_budget(net)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_regularisers_work_in_half_precision(dtype):
    net = hdnn.H2(4, 3, dtype=dtype, X=torch.eye(2), learn_X=True)
    exact = hdnn.H2(4, 3, dtype=F64, X=torch.eye(2), learn_X=True)
    exact.load_state_dict({k: v.double() for k, v in net.state_dict().items()})
    for function in (gradient_budget, spectral, weight_decay, lambda net: net.smoothness()):
        expected = float(function(exact).detach())
        assert float(function(net).detach()) == pytest.approx(expected, rel=0.05)


def test_regularisers_add_up_to_a_loss_that_trains():
    net = make("H2", 4, 3, X=interconnection.canonical(2), learn_X=True, step=0.1)
    y = Random(0)(5, 4)
    loss = net(y).square().mean() + net.smoothness() + weight_decay(net) + gradient_budget(net)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in net.parameters())
