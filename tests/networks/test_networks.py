"""The networks: their parameters, steps, initial weights, refinement, layers and names."""

from __future__ import annotations

import copy
import inspect
import math
import re
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hdnn
from hdnn import functional, interconnection
from hdnn.errors import HDNNError, NotInvertibleError
from hdnn.networks import KINDS
from strategies import ACTIVATIONS, Random, seeds

F64 = torch.float64
INTEGRATORS = (
    "forward_euler",
    "semi_implicit_euler",
    "semi_implicit_euler_full",
    "verlet",
    "yoshida4",
    "midpoint",
    "discrete_gradient",
)
ORDER = {"verlet": 2, "midpoint": 2, "discrete_gradient": 2, "yoshida4": 4}  # 1 elsewhere
SPLIT = ("H2", "semi_implicit_euler", "verlet", "yoshida4")
TAKES_J = ("H1", "forward_euler", "midpoint", "discrete_gradient")
MS = ("MS1", "MS2", "MS3")
ODE = ("H1", "H2", "ImplicitH2", *MS, *INTEGRATORS)
ALL = (*ODE, "MLP")
INVERTIBLE = tuple(k for k in ODE if k not in ("H1", "MS2", "forward_euler"))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(kind: str, n: int = 4, N: int = 3, **options):
    options = {"dtype": F64, "generator": generator()} | options
    if kind in INTEGRATORS:
        return hdnn.HamiltonianNet(n, N, kind, **options)
    return getattr(hdnn, kind)(n, N, **options)


def takes_X(kind: str) -> bool:
    return kind not in (*TAKES_J, *MS, "MLP")


def takes_sparsity(kind: str) -> bool:
    return kind not in (*MS, "MLP")


def per_layer_count(net: hdnn.networks.Network) -> float:
    return sum(p.numel() for p in net.parameters()) / net.layers


@st.composite
def networks(draw, kinds=ALL):
    """Any kind of network with any of its options, small enough for implicit steps to converge."""
    kind = draw(st.sampled_from(kinds))
    m, N, seed = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(seeds)
    options = {
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "tied": draw(st.booleans()),
        "init": draw(st.sampled_from(["paper", "scaled"])),
        "generator": generator(seed),
    }
    normal = Random(seed)
    if kind != "MLP":
        options["learn_step"] = draw(st.booleans())
        step = draw(st.sampled_from(["step", "T", "each", "default"]))
        if step == "each" and not (options["tied"] and options["learn_step"]):
            options["step"] = [0.01 * (j + 1) for j in range(N)]
        else:
            options["T" if step == "T" else "step"] = 0.05
    if takes_X(kind):
        options["learn_X"] = draw(st.booleans())
        given_ = draw(st.sampled_from(["none", "one", "each"]))
        options["X"] = {"none": None, "one": normal(m, m), "each": normal(N, m, m)}[given_]
    elif kind in TAKES_J:
        options["learn_J"] = draw(st.booleans())
        given_ = draw(st.sampled_from(["none", "one", "each"]))
        options["J"] = {"none": None, "one": normal.skew(2 * m), "each": normal.skew(N, 2 * m)}[
            given_
        ]
    if takes_sparsity(kind) and draw(st.booleans()):
        M = m if takes_X(kind) else 2 * m
        free = torch.rand(N, M, M, generator=generator(seed)) < 0.5
        free = free | torch.eye(M, dtype=torch.bool)
        options["sparsity"] = free if draw(st.booleans()) and not options["tied"] else free[0]
    return make(kind, 2 * m, N, **options)


def state(net, *batch: int, seed: int = 5) -> torch.Tensor:
    return Random(seed)(*batch, net.features).to(next(net.parameters()).dtype)


# Parameters


@pytest.mark.parametrize(
    ("kind", "count"), [("MS1", 8), ("MS2", 10), ("MS3", 12), ("H1", 20), ("H2", 12)]
)
@pytest.mark.parametrize("N", [1, 2, 16])
def test_table_one_counts_the_parameters_of_a_layer(kind, count, N):
    assert per_layer_count(make(kind, 4, N)) == count


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("H1", {"K": (6, 6), "b": (6,)}),
        ("H2", {"K_p": (3, 3), "K_q": (3, 3), "b_p": (3,), "b_q": (3,)}),
        ("ImplicitH2", {"K": (6, 6), "b": (6,)}),
        ("MS1", {"K_0": (3, 3), "b_1": (3,), "b_2": (3,)}),
        ("MS2", {"K_upper": (15,), "b": (6,)}),
        ("MS3", {"K_1": (3, 3), "K_2": (3, 3), "b_1": (3,), "b_2": (3,)}),
        ("MLP", {"K": (6, 6), "b": (6,)}),
        ("verlet", {"K_p": (3, 3), "K_q": (3, 3), "b_p": (3,), "b_q": (3,)}),
        ("yoshida4", {"K_p": (3, 3), "K_q": (3, 3), "b_p": (3,), "b_q": (3,)}),
        ("midpoint", {"K": (6, 6), "b": (6,)}),
    ],
)
def test_parameters_have_the_papers_names_stacked_over_layers(kind, shapes, tied):
    net = make(kind, 6, 4, tied=tied)
    stored = 1 if tied else 4
    expected = {name: (stored, *shape) for name, shape in shapes.items()}
    assert {name: tuple(p.shape) for name, p in net.named_parameters()} == expected
    assert set(net.state_dict()) == set(expected)


def test_learned_constants_are_parameters_and_others_are_buffers():
    X, J = Random(0)(3, 3), Random(0).skew(6)
    fixed = make("H2", 6, X=X)
    assert "X" in dict(fixed.named_buffers())
    assert "X" not in dict(fixed.named_parameters())
    learned = make("H2", 6, X=X, learn_X=True)
    assert torch.equal(learned.get_parameter("X"), X)
    assert "J_upper" in dict(make("H1", 6, J=J).named_buffers())
    assert make("H1", 6, J=J, learn_J=True).get_parameter("J_upper").shape == (15,)
    assert make("H1", 6, J=Random(0).skew(3, 6), learn_J=True).J_upper.shape == (3, 15)
    assert make("H2", 6, learn_step=True).get_parameter("log_h").shape == (3,)
    assert make("H2", 6, learn_step=True, tied=True).log_h.shape == (1,)


def test_H1_H2_and_ImplicitH2_are_special_cases_and_no_copies():
    for kind, integrator in (
        ("H1", "forward_euler"),
        ("H2", "semi_implicit_euler"),
        ("ImplicitH2", "semi_implicit_euler_full"),
    ):
        named, general = make(kind, step=0.1), make(integrator, step=0.1)
        assert isinstance(named, hdnn.HamiltonianNet)
        assert type(named).forward is hdnn.HamiltonianNet.forward
        assert torch.equal(named(state(named, 3)), general(state(named, 3)))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_MS2_is_skew_by_construction_for_odd_n_too(n):
    net = make("MS2", n, init="paper")
    assert torch.equal(net.K, -net.K.mT)
    assert net.K_upper.shape == (3, n * (n - 1) // 2)
    assert torch.equal(net.K.flatten(-2)[:, interconnection.upper_indices(n)], net.K_upper)
    assert net(state(net, 2)).shape == (2, n)


# Steps


@pytest.mark.parametrize("kind", ODE)
def test_step_and_T_say_the_same(kind):
    assert make(kind, N=4).h == pytest.approx(2.4 / 4)
    assert make(kind, N=4, T=1.0).h == pytest.approx(0.25)
    assert pytest.approx(1.0) == make(kind, N=4, T=1).T
    assert pytest.approx(1.0) == make(kind, N=4, step=0.25).T
    assert make(kind, N=4, step=1).h == 1.0
    same = make(kind, N=4, T=0.2), make(kind, N=4, step=0.05)
    y = state(same[0], 2)
    assert torch.equal(same[0](y), same[1](y))


@pytest.mark.parametrize("kind", ODE)
def test_every_layer_can_have_a_step_of_its_own(kind):
    h = [0.01, 0.02, 0.04]
    for form in (list, tuple, torch.tensor):
        net = make(kind, step=form(h))
        assert pytest.approx(0.07) == net.T
        torch.testing.assert_close(net.steps(), torch.tensor(h, dtype=F64), rtol=1e-7, atol=0)
    equal, single = make(kind, step=[0.05] * 3), make(kind, step=0.05)
    torch.testing.assert_close(equal(state(equal, 2)), single(state(equal, 2)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["H1", "H2", "MS1", "MS2", "MS3", "verlet", "midpoint"])
def test_a_learned_step_starts_where_it_was_given_and_stays_positive(kind, tied):
    net = make(kind, step=0.05, learn_step=True, tied=tied)
    torch.testing.assert_close(net.h, torch.full((3,), 0.05, dtype=F64))
    assert pytest.approx(0.15) == net.T
    optimiser = torch.optim.SGD([net.log_h], lr=3.0)
    for _ in range(5):
        optimiser.zero_grad()
        net.h.sum().backward()  # towards ever smaller steps
        optimiser.step()
    assert bool((net.h > 0).all())
    assert bool((net.h < 0.05).all())
    assert pytest.approx(float(net.h.detach().sum())) == net.T
    assert torch.isfinite(net(state(net, 2))).all()


def test_a_learned_step_gets_the_gradient_of_the_step():
    net = make("H2", step=[0.1, 0.2, 0.3], learn_step=True)
    y = state(net, 3)
    net(y).square().sum().backward()
    h = torch.tensor([0.1, 0.2, 0.3], dtype=F64, requires_grad=True)
    weights = {k: v.detach() for k, v in net.weights().items() if k not in ("h", "X")}
    functional.h2(y, **weights, h=h).square().sum().backward()
    torch.testing.assert_close(net.log_h.grad, h.grad * h.detach())


# Initial weights


@pytest.mark.parametrize("kind", ALL)
def test_the_papers_weights_are_standard_normal(kind):
    net = make(kind, 32, 64, init="paper", generator=generator(1))
    for name, p in net.state_dict().items():
        assert float(p.mean()) == pytest.approx(0, abs=5 / p.numel() ** 0.5), name
        assert float(p.std()) == pytest.approx(1, abs=5 / p.numel() ** 0.5), name


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("n", [4, 32])
def test_scaled_weights_have_variance_one_over_n_and_no_bias(kind, n):
    net = make(kind, n, 200, generator=generator(1))
    for name, p in net.state_dict().items():
        if name.startswith("b"):
            assert not p.any(), name
        else:
            assert float(p.std() * n**0.5) == pytest.approx(1, abs=5 / p.numel() ** 0.5), name
            assert float(p.mean()) == pytest.approx(0, abs=5 / p.numel() ** 0.5), name


@pytest.mark.parametrize("init", ["paper", "scaled"])
@pytest.mark.parametrize("kind", ALL)
def test_a_generator_decides_the_weights_and_the_global_one_is_left_alone(kind, init):
    options = {"init": init} | ({} if kind == "MLP" else {"learn_step": True})
    before = torch.get_rng_state()
    first, again = (make(kind, generator=generator(3), **options) for _ in range(2))
    other = make(kind, generator=generator(4), **options)
    assert torch.equal(torch.get_rng_state(), before)
    for (name, p), (_, q) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert any(
        not torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True)
    )


def test_without_a_generator_the_global_seed_decides():
    torch.manual_seed(0)
    first = hdnn.H2(4, 2)
    assert not torch.equal(hdnn.H2(4, 2).K_p, first.K_p)
    torch.manual_seed(0)
    assert torch.equal(hdnn.H2(4, 2).K_p, first.K_p)


@pytest.mark.parametrize("kind", ALL)
def test_one_seed_is_one_network_in_every_dtype(kind):
    exact = make(kind, dtype=torch.float64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        net = make(kind, dtype=dtype)
        for (name, p), q in zip(net.named_parameters(), exact.parameters(), strict=True):
            assert p.dtype == dtype
            assert torch.equal(p, q.to(dtype)), name


def test_the_default_dtype_is_torchs():
    assert hdnn.H2(4, 1).K_p.dtype == torch.get_default_dtype()


# The function that a network is


@settings(max_examples=40)
@given(networks())
def test_a_network_runs_its_function_on_its_weights(net):
    y = state(net, 2)
    w = net.weights()
    assert all(w[name].shape[0] == net.layers for name in net.stacked)
    name = {
        "H1": "h1",
        "forward_euler": "h1",
        "H2": "h2",
        "semi_implicit_euler": "h2",
        "ImplicitH2": "implicit_h2",
        "semi_implicit_euler_full": "implicit_h2",
    }
    kind = net.integrator if type(net) is hdnn.HamiltonianNet else type(net).__name__
    function = getattr(functional, name.get(kind, kind.lower()))
    assert torch.equal(net(y), function(y, **w, activation=net.activation))
    path = net.trajectory(y)
    assert torch.equal(path[0], y)
    torch.testing.assert_close(path[-1], net(y), rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(networks())
def test_the_layers_one_after_the_other_are_the_network(net):
    y = state(net, 2)
    path = net.trajectory(y)
    for j in range(net.layers):
        y = net.layer(y, j)
        torch.testing.assert_close(y, path[j + 1], rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(networks(INVERTIBLE))
def test_the_inverse_takes_the_network_back(net):
    y = state(net, 2)
    path = net.trajectory(y)
    torch.testing.assert_close(net.inverse(path[-1]), y, rtol=1e-9, atol=1e-9)
    back = net.inverse(path[-1], trajectory=True)
    torch.testing.assert_close(back, path, rtol=1e-9, atol=1e-9)
    assert torch.equal(back[-1], path[-1])


@settings(max_examples=40)
@given(networks(ODE))
def test_a_layer_follows_its_field_for_a_short_time(net):
    """(y_1 - y_0) / h is J K^T sigma(K y_0 + b) as h goes to 0."""
    if isinstance(net, (hdnn.MS1, hdnn.MS2)) and net.features > 1:
        key = "K_0" if isinstance(net, hdnn.MS1) else "K"
        singular = torch.linalg.svdvals(net.weights()[key].detach())[..., -1]
        if float(singular.min()) < 1e-2:
            return
    y = state(net)
    weights = net.layer_weights(0)
    h = 1e-8
    step = net.function(y, **{**weights, "h": h}, activation=net.activation) - y
    field = net.field()
    J = field["J"][0] if field["J"].ndim == 3 else field["J"]
    K, b = field["K"][0], field["b"][0]
    sigma = hdnn.activations.get(net.activation)
    expected = J @ K.mT @ sigma(K @ y + b)
    torch.testing.assert_close(step / h, expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(net.J, field["J"])


@settings(max_examples=25)
@given(networks())
def test_a_copy_is_equal_and_independent(net):
    y = state(net, 2)
    twin = copy.deepcopy(net)
    expected = net(y)
    assert torch.equal(twin(y), expected)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.01)
    assert torch.equal(net(y), expected)


@settings(max_examples=25)
@given(networks(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_to_casts_parameters_and_constants_alike(net, dtype):
    net.to(dtype)
    floating = [t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()]
    assert {t.dtype for t in floating} == {dtype}
    for value in net.weights().values():
        assert not torch.is_tensor(value) or value.dtype == dtype


@settings(max_examples=25)
@given(networks())
def test_to_moves_parameters_and_constants_alike(net):
    net.to("meta")
    assert {t.device.type for t in (*net.parameters(), *net.buffers())} == {"meta"}
    assert net(torch.empty(2, net.features, dtype=F64, device="meta")).device.type == "meta"


@settings(max_examples=25)
@given(networks())
def test_config_and_constants_make_the_same_network_again(net):
    options = {"dtype": F64, "generator": generator(99)}
    again = KINDS[type(net).__name__](**net.config(), **net.constants(), **options)
    again.load_state_dict(net.state_dict())
    y = state(net, 2)
    assert torch.equal(again(y), net(y))
    assert repr(again) == repr(net)


@settings(max_examples=25)
@given(networks())
def test_the_repr_tells_what_the_network_is(net):
    text = repr(net)
    assert text.startswith(type(net).__name__ + "(")
    assert f"{net.features} features, {net.layers} layers, {net.activation}" in text
    assert f"{sum(p.numel() for p in net.parameters())} parameters" in text
    assert ("tied" in text) == net.tied
    assert "\n" not in text
    if type(net) is hdnn.HamiltonianNet:
        assert net.integrator in text
    if getattr(net, "learn_step", False):
        assert "learned" in text
    if getattr(net, "sparsity", None) is not None:
        assert "Sparsity(" in text


def test_the_repr_of_a_network_that_learned_its_step_tells_the_learned_one():
    net = make("H2", N=2, step=0.5, learn_step=True, tied=True)
    net.assign("log_h", torch.tensor([math.log(0.125)], dtype=F64))
    assert "h = 0.125" in repr(net)
    assert "T = 0.25" in repr(net)


# Without memory: the meta device


@pytest.mark.parametrize("kind", ALL)
def test_a_network_can_be_made_without_memory(kind):
    with torch.device("meta"):
        inside = make(kind, generator=None)
    for net in (make(kind, device="meta"), inside):
        tensors = [*net.parameters(), *net.buffers()]
        assert {t.device.type for t in tensors} == {"meta"}
        assert [p.shape for p in net.parameters()] == [p.shape for p in make(kind).parameters()]


def test_a_network_with_constants_can_be_made_without_memory():
    X, J = Random(0)(2, 2), Random(1).skew(4)
    for net in (
        make("H2", X=X, device="meta"),
        make("H2", X=X, learn_X=True, sparsity=torch.ones(2, 2), device="meta"),
        make("H1", J=J, learn_J=True, learn_step=True, device="meta"),
        make("H1", sparsity=torch.ones(2, 2), device="meta"),
    ):
        assert {t.device.type for t in (*net.parameters(), *net.buffers())} == {"meta"}


@pytest.mark.parametrize("learn_step", [False, True])
def test_the_repr_does_not_need_the_weights(learn_step):
    net = make("H2", step=0.5, learn_step=learn_step)
    assert repr(net.to("meta")).startswith("H2(4 features, 3 layers, tanh")


# Learned J and X


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", TAKES_J)
def test_a_learned_J_moves_and_stays_exactly_skew(kind, each):
    J = Random(0).skew(3, 5) if each else Random(0).skew(5)
    net = make(kind, 5, J=J, learn_J=True, step=0.02)
    for optimiser in (
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.Adam(net.parameters(), lr=0.1),
    ):
        for _ in range(3):
            optimiser.zero_grad()
            net(state(net, 4)).square().sum().backward()
            optimiser.step()
    assert not torch.equal(net.J, J)
    assert torch.equal(net.J, -net.J.mT)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("kind", SPLIT)
def test_a_learned_X_moves_and_J_with_it(kind, each):
    X = Random(0)(3, 2, 2) if each else Random(0)(2, 2)
    net = make(kind, X=X, learn_X=True, step=0.1)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    net(state(net, 4)).square().sum().backward()
    optimiser.step()
    assert not torch.equal(net.X, X)
    assert torch.equal(net.J, interconnection.from_X(net.X))


def test_the_constants_of_a_network_are_its_own():
    X = Random(0)(2, 2)
    net = make("H2", X=X)
    X.zero_()
    assert bool(net.X.any())


# Tied weights


@settings(max_examples=25)
@given(networks(ODE))
def test_tied_layers_are_equal_layers(net):
    if not net.tied:
        return
    w = net.weights()
    for name in net.stacked:
        assert torch.equal(w[name], w[name][:1].expand_as(w[name]))


def test_tied_weights_get_the_gradient_of_all_layers():
    tied, free = make("H2", tied=True, step=0.1), make("H2", step=0.1)
    for name in free.stacked:
        free.assign(name, tied.weight(name).expand_as(free.weight(name)))
    y = state(tied, 3)
    tied(y).square().sum().backward()
    free(y).square().sum().backward()
    for name in free.stacked:
        summed = free.get_parameter(name).grad.sum(0, keepdim=True)
        torch.testing.assert_close(tied.get_parameter(name).grad, summed)


# Refinement


@settings(max_examples=40)
@given(networks(ODE), st.integers(1, 4))
def test_refining_multiplies_the_layers_and_divides_the_step(net, k):
    before = torch.get_rng_state()
    fine = net.refine(k)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(fine) is type(net)
    assert fine.layers == k * net.layers
    assert pytest.approx(net.T) == fine.T
    torch.testing.assert_close(fine.steps(), net.steps().repeat_interleave(k) / k)
    assert fine.tied == net.tied
    assert fine.learn_step == net.learn_step
    coarse, w = net.weights(), fine.weights()
    for name in net.stacked:
        assert torch.equal(w[name], coarse[name].repeat_interleave(k, 0))
    if k == 1:
        y = state(net, 2)
        torch.testing.assert_close(fine(y), net(y), rtol=1e-12, atol=1e-12)


@settings(max_examples=30)
@given(networks(ODE))
def test_a_refined_network_shares_no_memory_with_the_coarse_one(net):
    y = state(net, 2)
    expected = net(y)
    fine = net.refine(2)
    with torch.no_grad():
        for p in fine.parameters():
            p.zero_()
    assert torch.equal(net(y), expected)


def test_tied_layers_with_a_stack_of_one_pattern_can_be_refined():
    net = make("H2", tied=True, sparsity=torch.eye(2)[None])
    fine = net.refine(2)
    assert torch.equal(fine.K_p, net.K_p)


@pytest.mark.parametrize("kind", ODE)
@pytest.mark.parametrize("tied", [False, True])
def test_refined_networks_converge_with_the_order_of_their_scheme(kind, tied):
    net = make(kind, 4, 2, T=1.0, tied=tied, init="paper", generator=generator(2))
    y = state(net, 3)
    with torch.no_grad():
        values = [net.refine(k)(y) for k in (4, 8, 16, 32)]
        jumps = [float((b - a).norm()) for a, b in pairwise(values)]
    for coarse, fine in pairwise(jumps):
        assert math.log2(coarse / fine) == pytest.approx(ORDER.get(kind, 1), abs=0.35)


@pytest.mark.parametrize(
    "options",
    [
        {"learn_step": True},
        {"learn_step": True, "tied": True},
        {"step": [0.1, 0.3]},
        {"X": "each"},
        {"X": "each", "learn_X": True},
        {"sparsity": "each"},
        {"sparsity": "one", "tied": True, "learn_X": True},
    ],
)
def test_refinement_converges_with_every_option(options):
    options = dict(options)
    if options.get("X"):
        options["X"] = Random(1)(2, 2, 2)
    if options.get("sparsity"):
        R = torch.tensor([[[1, 1], [0, 1]], [[1, 0], [1, 1]]])
        options["sparsity"] = R if options["sparsity"] == "each" else R[0]
    if "step" not in options:
        options["T"] = 0.5
    net = make("H2", 4, 2, init="paper", **options)
    y = state(net, 3)
    with torch.no_grad():
        values = [net.refine(k)(y) for k in (1, 8, 16, 32)]
        jumps = [float((b - a).norm()) for a, b in pairwise(values)]
    torch.testing.assert_close(values[0], net(y), rtol=1e-12, atol=1e-12)
    assert jumps[1] / jumps[2] == pytest.approx(2, abs=0.3)


def test_refining_twice_is_refining_once_by_the_product():
    net = make("H2", N=2, step=[0.1, 0.2])
    y = state(net, 3)
    torch.testing.assert_close(net.refine(2).refine(3)(y), net.refine(6)(y))


def test_a_refined_network_is_trained_where_the_coarse_one_was():
    net = make("H2", learn_X=True, learn_step=True)
    fine = net.refine(2)
    fine(state(net, 2)).square().sum().backward()
    assert all(p.grad is not None for p in fine.parameters())


def test_a_refined_network_runs_as_the_coarse_one_did():
    fine = make("H2", engine="reference", backprop="reversible").refine(2)
    assert (fine.engine, fine.backprop) == ("reference", "reversible")


# MS networks as Hamiltonian ones


@given(seeds, st.integers(1, 3))
def test_the_J_of_MS1_and_MS2_undoes_their_K(seed, m):
    for kind in ("MS1", "MS2"):
        net = make(kind, 2 * m, 2, init="paper", generator=generator(seed))
        field = net.field()
        product = field["J"] @ field["K"].mT
        if kind == "MS1":  # p' = sigma(...), q' = -sigma(...)
            expected = torch.diag(torch.cat([torch.ones(m), -torch.ones(m)])).to(F64)
        else:
            expected = torch.eye(2 * m, dtype=F64)
        size = float(torch.linalg.cond(field["K"].detach()).max())
        torch.testing.assert_close(
            product, expected.expand_as(product), rtol=0, atol=1e-14 * max(size, 10)
        )


@given(st.sampled_from(MS), seeds, st.integers(1, 3))
def test_the_field_of_an_MS_network_is_what_its_layers_discretise(kind, seed, m):
    net = make(kind, 2 * m, 1, init="paper", generator=generator(seed), step=1e-8)
    singular = torch.linalg.svdvals(net.weights()[net.stacked[0]].detach())
    assume(float(singular.min()) > 1e-2)
    y = Random(seed + 1)(2 * m)
    J, K, b = (net.field()[name].detach().reshape(-1, 2 * m) for name in "JKb")
    expected = J @ K.mT @ torch.tanh(K @ y + b[0])
    torch.testing.assert_close((net(y) - y) / 1e-8, expected, rtol=1e-5, atol=1e-5)


@given(seeds, st.sampled_from([1, 3, 5, 7]), st.sampled_from([torch.float64, torch.float32]))
def test_MS2_of_odd_size_has_no_J(seed, n, dtype):
    net = make("MS2", n, 2, init="paper", dtype=dtype, generator=generator(seed))
    with pytest.raises(NotInvertibleError, match="odd size"):
        _ = net.J


def test_MS1_with_a_singular_K_has_no_J():
    net = make("MS1", 4, 2)
    with torch.no_grad():
        net.K_0[1] = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    with pytest.raises(NotInvertibleError, match="layer 1"):
        _ = net.J


def test_MS2_takes_whole_matrices():
    net = make("MS2", 3, 2)
    K = Random(0).skew(2, 3)
    net.assign("K", K)
    assert torch.equal(net.K, K)


# Flags


@pytest.mark.parametrize("option", ["tied", "learn_step", "learn_X"])
def test_a_flag_in_words_is_refused_since_any_word_would_be_true(option):
    for value in ("no", "False"):
        with pytest.raises(HDNNError, match=option):
            make("H2", **{option: value})


@pytest.mark.parametrize(
    "cls",
    [
        *hdnn.networks.KINDS.values(),
        *hdnn.heads.HEADS.values(),
        *(hdnn.HamiltonianUnit, hdnn.Augment, hdnn.Model),
    ],
)
def test_the_docstring_of_a_class_has_all_its_options_and_no_others(cls):
    about = inspect.getdoc(cls).partition("Args:\n")[2].partition("\n\n")[0]
    described = re.findall(r"^    (\w+): ", about, re.MULTILINE)
    assert described == [*inspect.signature(cls).parameters]
    assert "options" not in inspect.signature(cls).parameters
