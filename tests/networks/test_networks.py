"""Networks: options, storage, views and what they promise. What all share is in tests/law."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import hdnn
from hdnn import schemes
from hdnn.errors import ConvergenceError, OptionError, ShapeError
from hdnn.networks import BY_NAME

RING = torch.eye(4) + torch.eye(4).roll(1, 0) + torch.eye(4).roll(-1, 0)
EVERY = pytest.mark.parametrize("name", BY_NAME)


def make(name, **options):
    generator = torch.Generator().manual_seed(0)
    return BY_NAME[name](
        4, 3, generator=generator, dtype=torch.float64, **options
    )


def states(*batch, n=4):
    return torch.randn(
        *batch,
        n,
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )


# Options


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: hdnn.H2(5, 3), "even"),
        (lambda: hdnn.HamiltonianNet(5, 3, "midpoint"), "skew-symmetric J"),
        (lambda: hdnn.H2(4, 3, X=torch.eye(3)), "X must be a real tensor"),
        (lambda: hdnn.H2(4, 3, X=np.eye(2)), "X must be a real tensor"),
        (
            lambda: hdnn.H1(4, 3, J=torch.zeros(2, 4, 4)),
            "J must be a real tensor",
        ),
        (lambda: hdnn.H2(4, 3, dtype=torch.int64), "floating-point"),
        (lambda: hdnn.H2(4, 3)(torch.randn(2, 5)), "features=5"),
        (lambda: hdnn.H2(4, 3)(torch.randn(2, 4).double()), "float64"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong, words):
    with pytest.raises(ShapeError, match=words):
        wrong()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: hdnn.H2(0, 3), "features"),
        (lambda: hdnn.H2(4, 2.5), "layers"),
        (lambda: hdnn.H2(4, 3, step=0.1, T=1.0), "not both"),
        (lambda: hdnn.H2(4, 3, step=-0.1), "step"),
        (lambda: hdnn.H2(4, 3, step=[0.1, 0.2]), "2 entries for 3 layers"),
        (lambda: hdnn.H2(4, 3, T=float("inf")), "T must be"),
        (lambda: hdnn.H2(4, 3, init="xavier"), "init"),
        (lambda: hdnn.H2(4, 3, activation="tahn"), "tanh"),
        (lambda: hdnn.H2(4, 3, backprop="stord"), "stored"),
        (lambda: hdnn.HamiltonianNet(4, 3, "verlte"), "verlet"),
        (lambda: hdnn.H1(4, 3, J=torch.eye(4)), "skew-symmetric"),
        (lambda: hdnn.H2(4, 3, X=torch.full((2, 2), torch.nan)), "NaN"),
        (
            lambda: hdnn.H2(4, 3, J=torch.zeros(4, 4)),
            "accepts only X and learn_X",
        ),
        (lambda: hdnn.H1(4, 3, learn_X=True), "accepts only J and learn_J"),
        (lambda: hdnn.H2(4, 3, tol=1e-3), "explicit"),
        (lambda: hdnn.ImplicitH2(4, 3, engine="fused"), "layer by layer"),
        (
            lambda: hdnn.H2(
                4, 3, tied=True, learn_step=True, step=[0.1, 0.2, 0.3]
            ),
            "tied",
        ),
        (lambda: hdnn.MLP(4, 3).refine(2), "does not discretise an ODE"),
        (lambda: hdnn.MLP(4, 3).J, "does not discretise a Hamiltonian"),
        (lambda: hdnn.MS2(3, 3).J, "odd"),
        (
            lambda: hdnn.H1(4, 3).inverse(torch.randn(2, 4)),
            "no explicit inverse",
        ),
        (lambda: hdnn.H1(4, 3).shear_norms(), "not shears"),
    ],
)
def test_options_that_do_not_fit_are_refused(wrong, words):
    with pytest.raises(OptionError, match=words):
        wrong()


def test_a_misspelt_option_is_an_error_of_python():
    with pytest.raises(TypeError, match="actvation"):
        hdnn.H2(4, 3, actvation="tanh")


def test_a_step_that_requires_a_gradient_is_refused_rather_than_detached():
    step = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    with pytest.raises(OptionError, match="learn_step=True"):
        hdnn.H2(4, 3, step=step)
    assert hdnn.H2(4, 3, step=step.detach()).step == pytest.approx(
        (0.1, 0.2, 0.3)
    )
    assert hdnn.H2(4, 3, step=np.array([0.5, 0.5, 0.5])).T == 1.5
    assert hdnn.H2(4, 3, h=[0.5, 0.5, 0.5]).T == 1.5
    with pytest.raises(OptionError, match="not both"):
        hdnn.H2(4, 3, h=0.1, step=0.1)


def test_images_are_for_units_of_images():
    with pytest.raises(ShapeError, match=r"HamiltonianUnit\(channels=8"):
        hdnn.H2(8, 3)(torch.randn(2, 8, 5, 5))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
@pytest.mark.parametrize("kind", [hdnn.H2, hdnn.HamiltonianUnit])
def test_a_missing_gpu_is_named(kind):
    with pytest.raises(OptionError, match="no CUDA device is available"):
        kind(4, 3, device="cuda")


def test_the_default_time_is_shared_by_all_layers():
    assert hdnn.H2(4, 24).h == pytest.approx(0.1)
    assert pytest.approx(0.6) == hdnn.H2(4, 3, T=0.6).T
    assert not hasattr(hdnn.MLP(4, 3), "h")


def test_learned_steps_stay_positive_and_start_as_given():
    net = hdnn.H2(4, 3, step=[0.1, 0.2, 0.3], learn_step=True)
    torch.testing.assert_close(net.steps(), torch.tensor([0.1, 0.2, 0.3]))
    net(states(2).float()).sum().backward()
    assert bool((net.log_h.grad != 0).all())
    with torch.no_grad():
        net.log_h -= 100
    assert bool((net.steps() > 0).all())


def test_first_weights_are_those_of_the_paper_or_scaled():
    scaled = hdnn.H2(400, 2)
    assert float(scaled.K_p.detach().std()) == pytest.approx(
        400**-0.5, rel=0.05
    )
    assert not scaled.b_p.any()
    paper = hdnn.H2(400, 2, init="paper")
    assert float(paper.K_p.detach().std()) == pytest.approx(1, rel=0.05)
    assert float(paper.b_p.detach().std()) == pytest.approx(1, rel=0.2)


def test_a_seed_gives_the_same_network_in_every_dtype():
    nets = [
        hdnn.H2(4, 3, generator=torch.Generator().manual_seed(3), dtype=dtype)
        for dtype in (torch.float32, torch.float64)
    ]
    assert torch.equal(nets[0].K_p.double(), nets[1].K_p)


# What they compute


def test_the_networks_are_their_schemes():
    kinds = {
        name: make(name).scheme.name
        for name in ("h1", "h2", "ms1", "ms2", "ms3", "mlp")
    }
    assert kinds == {
        "h1": "forward_euler",
        "h2": "semi_implicit_euler",
        "ms1": "ms1",
        "ms2": "forward_euler",
        "ms3": "ms3",
        "mlp": "perceptron",
    }
    assert set(schemes.INTEGRATORS) >= {
        "verlet",
        "yoshida4",
        "midpoint",
        "discrete_gradient",
    }


@EVERY
def test_layers_can_be_run_alone_in_slices_and_looked_at(name):
    net, y = make(name), states(2)
    path = net.trajectory(y)
    torch.testing.assert_close(net[1](path[1]), path[2])
    torch.testing.assert_close(net[1:](path[1]), path[3])
    torch.testing.assert_close(net[-2:].trajectory(path[1]), path[1:])
    torch.testing.assert_close(
        net.run_layers(y, slice(0, 3, 2)), net[2](net[0](y))
    )
    torch.testing.assert_close(net[3:](y), y)
    assert [layer.index for layer in net] == [0, 1, 2]
    assert len(net) == 3
    first = net.stacked[0]
    assert torch.equal(getattr(net[2], first), net.weight(first)[2])
    assert "Layer(2 of 3" in repr(net[2])
    with pytest.raises(IndexError):
        net[3]
    with pytest.raises(AttributeError):
        _ = net[0].no_such_weight


def test_writing_into_a_layer_changes_the_network():
    net = hdnn.H2(4, 3)
    with torch.no_grad():
        net[1].K_p.fill_(2.0)
    assert bool((net.K_p[1] == 2).all())


@EVERY
def test_reset_parameters_draws_like_the_constructor(name):
    net = make(name)
    other = make(name)
    other.reset_parameters(torch.Generator().manual_seed(5))
    assert not torch.equal(other(states(2)), net(states(2)))
    other.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(other(states(2)), net(states(2)))


def test_reset_parameters_brings_learned_steps_and_matrices_back():
    X = torch.randn(2, 2)
    net = hdnn.H2(4, 3, X=X, learn_X=True, learn_step=True, T=0.9)
    with torch.no_grad():
        net.X.zero_()
        net.log_h.zero_()
    net.reset_parameters()
    torch.testing.assert_close(net.X, X, check_dtype=False)
    assert pytest.approx(0.9) == net.T


def test_weights_under_a_parametrisation_are_used_and_trained():
    net = hdnn.H2(4, 3, dtype=torch.float64)
    plain = copy.deepcopy(net)
    parametrizations.spectral_norm(net, "K_p")

    class Halved(nn.Module):
        def forward(self, K):
            return K / 2

    parametrize.register_parametrization(net, "K_q", Halved())
    plain.assign("K_p", net.K_p)
    plain.assign("K_q", net.K_q)
    net.eval()
    torch.testing.assert_close(net(states(2)), plain(states(2)))
    net(states(2)).sum().backward()
    assert net.parametrizations.K_q.original.grad is not None
    assert net.guarantee().holds
    assert repr(net).startswith("H2(")


def test_meta_networks_have_shapes_and_can_be_filled():
    net = hdnn.H2(4, 3, learn_step=True, device="meta")
    assert net(torch.empty(2, 4, device="meta")).shape == (2, 4)
    net.to_empty(device="cpu")
    net.reset_parameters()
    assert torch.isfinite(net(torch.randn(2, 4))).all()


# Interconnections and patterns


def test_a_learned_J_stays_skew_symmetric():
    A = torch.randn(3, 5, 5)
    net = hdnn.H1(5, 3, J=A - A.mT, learn_J=True)
    torch.testing.assert_close(net.J, A - A.mT)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    assert torch.equal(net.J, -net.J.mT)
    assert not torch.allclose(net.J, A - A.mT)


def test_patterns_leave_only_free_entries_which_training_cannot_leave():
    sizes = {"h2": 2 * 3 * 12 + 2 * 3 * 4, "h1": 3 * 48 + 3 * 8}
    for name, count in sizes.items():
        net = BY_NAME[name](8, 3, sparsity=RING)
        assert sum(p.numel() for p in net.parameters()) == count
        before = net.field()["K"] != 0
        torch.optim.Adam(net.parameters(), weight_decay=0.1)
        net(torch.randn(4, 8)).square().sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
        assert torch.equal(net.field()["K"] != 0, before)
    K_p = hdnn.H2(8, 3, sparsity=RING).K_p
    assert torch.equal(K_p != 0, (RING > 0).expand(3, 4, 4))


def test_a_learned_X_has_the_pattern_T():
    sparsity = hdnn.Sparsity(torch.eye(4), T=RING)
    net = hdnn.H2(8, 2, sparsity=sparsity, learn_X=True)
    assert net.X_free.numel() == 12
    net.assign("X", torch.ones(4, 4))
    assert torch.equal(net.X, RING.to(net.X))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: hdnn.H2(6, 2, sparsity=RING),
        lambda: hdnn.H2(8, 2, sparsity=RING.expand(3, 4, 4)),
        lambda: hdnn.H2(
            8,
            2,
            X=torch.ones(4, 4),
            sparsity=hdnn.Sparsity(RING, T=torch.eye(4)),
        ),
        lambda: hdnn.ImplicitH2(
            8, 2, sparsity=hdnn.Sparsity(torch.eye(4), S=RING)
        ),
    ],
)
def test_patterns_that_do_not_fit_are_refused(wrong):
    with pytest.raises(OptionError):
        wrong()


# Promises


class Shrinking(hdnn.H2):
    def forward(self, y):
        return 0.1 * super().forward(y)


class Named(hdnn.H2):
    def describe(self):
        return "an H2"


@pytest.mark.parametrize(
    "register",
    [
        lambda net: net.register_full_backward_hook(
            lambda m, i, o: (0.1 * i[0],)
        ),
        lambda net: net.register_full_backward_pre_hook(
            lambda m, o: (0.1 * o[0],)
        ),
        lambda net: net.register_forward_hook(lambda m, i, o: 0.1 * o),
        lambda net: net.register_forward_pre_hook(lambda m, i: (0.1 * i[0],)),
    ],
)
def test_a_network_with_hooks_promises_nothing(register):
    net = hdnn.H2(4, 3)
    handle = register(net)
    promise = net.guarantee()
    assert not promise.holds
    assert "hooks may change" in promise.why
    handle.remove()
    assert net.guarantee().holds


def test_a_subclass_that_computes_otherwise_promises_nothing():
    assert Named(4, 3).guarantee().holds
    net = Shrinking(4, 3)
    assert not net.guarantee().holds
    assert "its own forward" in net.guarantee().why
    net = hdnn.H2(4, 3)
    net.forward = lambda y: 0.1 * y
    assert not net.guarantee().holds


def test_jacobians_of_a_subclass_are_those_of_its_own_layer():
    class Doubled(hdnn.H2):
        def layer(self, y, j):
            return 2 * super().layer(y, j)

    net, y = Doubled(4, 2, dtype=torch.float64), states(3)
    path = torch.stack([y, net.layer(y, 0)])
    exact = torch.func.vmap(torch.func.jacrev(lambda y: net.layer(y, 0)))(y).mT
    torch.testing.assert_close(net.layer_jacobians(path, slice(0, 1))[0], exact)
    torch.testing.assert_close(
        net.run_layers(y, slice(None)), net.layer(net.layer(y, 0), 1)
    )


def test_guarantees_follow_the_scheme_and_the_activation():
    holding = {
        name: make(name, activation="sin").guarantee().holds for name in BY_NAME
    }
    assert holding == {
        **dict.fromkeys(BY_NAME, True),
        **dict.fromkeys(("h1", "ms2", "mlp", "discrete_gradient"), False),
    }
    assert hdnn.H1(4, 3).guarantee().holds


def test_shear_norms_bound_every_shear():
    net = hdnn.H2(
        4, 3, X=torch.randn(2, 2).double(), dtype=torch.float64, init="paper"
    )
    norms = net.shear_norms()
    assert norms.shape == (6,)
    path = net.trajectory(states(50))
    inverse = net.layer_jacobians(path).inverse()
    growth = torch.linalg.matrix_norm(inverse, 2).amax(1)
    bound = (1 + norms[:3]) * (1 + norms[3:])
    assert bool((growth <= bound).all())


def test_smoothness_is_the_regulariser_of_the_paper():
    net = hdnn.H2(4, 3, step=[0.1, 0.2, 0.3], dtype=torch.float64, init="paper")
    expected = 0.0
    for j, h in ((1, 0.2), (2, 0.3)):
        for stack in net.stacks():
            expected += (
                0.5
                * h
                * float((stack[j] - stack[j - 1]).detach().square().sum())
            )
    assert float(net.smoothness().detach()) == pytest.approx(expected)
    ms1 = hdnn.MS1(4, 2, step=2.0)
    ms1.assign("K_0", torch.stack([torch.zeros(2, 2), torch.eye(2)]))
    assert float(ms1.smoothness().detach()) == pytest.approx(
        4.0
    )  # the field holds K_0 twice
    assert float(hdnn.H2(4, 3, tied=True).smoothness().detach()) == 0


# Files and refinement


@EVERY
def test_config_and_constants_make_the_network_again(name):
    net = make(name)
    twin = type(net)(**net.config(), **net.constants(), dtype=torch.float64)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin(states(2)), net(states(2)))
    assert repr(twin) == repr(net)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True, "learn_step": True},
        {"learn_step": True, "step": [0.1, 0.2, 0.3]},
        {"X": 0.3 * torch.randn(3, 4, 4), "learn_X": True},
        {"sparsity": RING.expand(3, 4, 4)},
    ],
)
def test_refining_gives_each_layer_k_times_at_a_smaller_step(options):
    net = hdnn.H2(8, 3, dtype=torch.float64, backprop="checkpoint", **options)
    fine = net.refine(2)
    assert fine.layers == 6
    assert pytest.approx(net.T) == fine.T
    assert fine.backprop == "checkpoint"
    torch.testing.assert_close(fine.stacks()[0][::2], net.stacks()[0])
    torch.testing.assert_close(fine.stacks()[0][1::2], net.stacks()[0])
    # The error of order one falls by half.
    finer = fine.refine(2)
    y = states(2, n=8)
    first, second = (fine(y) - net(y)).norm(), (finer(y) - fine(y)).norm()
    assert float(second.detach()) < 0.8 * float(first.detach())


# Implicit layers


def test_coupling_below_one_means_one_solution_and_can_be_reached():
    net = hdnn.ImplicitH2(
        4, 3, step=1.0, init="paper", generator=torch.Generator().manual_seed(1)
    )
    assert bool((net.coupling() > 1).any())
    net.limit_coupling(0.5)
    assert bool((net.coupling() <= 0.5 + 1e-6).all())
    net(torch.randn(20, 4))
    assert not hdnn.H2(4, 3).coupling().any()
    assert hdnn.HamiltonianNet(4, 3, "midpoint").always_solvable
    assert not net.always_solvable


def test_a_layer_that_cannot_be_solved_says_so():
    net = hdnn.ImplicitH2(2, 1, step=1.0, activation="identity")
    net.assign("K", torch.tensor([[[1.0, -1.0], [0.0, 0.0]]]))
    net.assign("b", torch.ones(1, 2))
    with pytest.raises(ConvergenceError, match="smaller step"):
        net(torch.ones(1, 2))


def test_an_mlp_can_be_trained_by_fit_although_it_has_no_step():
    model = hdnn.Model(None, hdnn.MLP(4, 2), hdnn.SigmoidHead(4))
    t = torch.tensor([0, 1] * 10)
    history = hdnn.training.fit(
        model, torch.randn(20, 4), t, epochs=2, progress=False
    )
    assert history is not None


@pytest.mark.parametrize("layers", [18, 100])
@pytest.mark.parametrize("features", [2, 4])
def test_zeros_in_the_first_state_do_not_cross_the_kink_of_relu(
    features, layers
):
    torch.manual_seed(0)
    net = hdnn.H2(features, layers, activation="relu")
    y = torch.randn(16, features)
    y[:, features // 2 :] = 0
    y.requires_grad_()

    def gradients(backprop):
        net.backprop = backprop
        return torch.autograd.grad(net(y).square().mean(), [y, *net.stacks()])

    pairs = zip(gradients("reversible"), gradients("stored"), strict=True)
    for rebuilt, expected in pairs:
        torch.testing.assert_close(
            rebuilt, expected, rtol=1e-3, atol=1e-4 * float(expected.norm())
        )


# Gains: a factor of any sign for each row


def with_gains(integrator, layers, rows, n=4, **options):
    generator = torch.Generator().manual_seed(layers + rows)
    net = hdnn.HamiltonianNet(
        n,
        layers,
        integrator,
        rows=rows,
        gains=True,
        generator=generator,
        dtype=torch.float64,
        **options,
    )
    for name in ("a_p", "a_q"):
        gains = 20 * torch.rand(net.weight(name).shape, generator=generator)
        net.assign(name, gains.double() - 10)
    return net


GAINED = ("semi_implicit_euler", "verlet", "yoshida4")


@pytest.mark.parametrize("integrator", GAINED)
def test_a_layer_with_gains_moves_p_by_weighted_rows(integrator):
    net = with_gains(integrator, 1, 3, step=0.1)
    y = torch.randn(5, 4, dtype=torch.float64)

    def force(half, x):
        K, b, a = (net.weight(f"{name}_{half}")[0] for name in "Kba")
        return (a * torch.tanh(x @ K.T + b)) @ K

    state = list(y.chunk(2, -1))
    for half, fraction in net.scheme.moves:
        state[1 - half] = state[1 - half] + fraction * 0.1 * force(
            "pq"[half], state[half]
        )
    assert torch.allclose(net(y), torch.cat(state, -1), atol=1e-14)


@given(
    integrator=st.sampled_from(GAINED),
    layers=st.integers(1, 30),
    rows=st.integers(1, 9),
    half=st.integers(1, 5),
    tied=st.booleans(),
)
def test_gains_give_the_same_gradients_in_every_engine(
    integrator, layers, rows, half, tied
):
    net = with_gains(integrator, layers, rows, n=2 * half, tied=tied, step=0.02)
    y = torch.randn(7, 2 * half, dtype=torch.float64)
    gradients = []
    for engine in ("reference", "fused"):
        net.engine = engine
        net.zero_grad()
        net(y).square().sum().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 1e-12 * theirs.norm()
    back = net.inverse(net(y))
    assert torch.allclose(back, y, atol=1e-9)


def test_networks_with_gains_are_symplectic_and_say_so():
    for k in range(20):
        net = with_gains(GAINED[k % 3], 4, 1 + k % 7, step=0.02)
        y = torch.randn(3, 4, dtype=torch.float64)
        Phi = hdnn.analysis.backward_sensitivity(net, y)
        defect = hdnn.analysis.symplectic_defect(Phi, net.J)
        assert float(defect.max()) < 1e-13
        assert float(hdnn.analysis.norms(Phi).min()) >= 1 - 1e-12
        assert net.guarantee().holds


def test_bounds_and_the_ode_know_the_gains():
    net = with_gains("verlet", 3, 5, step=1e-4)
    y = torch.randn(4, 4, dtype=torch.float64)
    exact = hdnn.analysis.ContinuousNetwork(net).flow(y)
    assert torch.allclose(net(y), exact, atol=1e-5)
    assert all(
        bound.holds is not False for bound in hdnn.analysis.bounds(net, y)
    )


@given(
    integrator=st.sampled_from(GAINED),
    layers=st.integers(1, 8),
    rows=st.integers(1, 5),
    step=st.floats(1e-3, 0.5),
    activation=st.sampled_from(hdnn.activations.names()),
)
def test_no_bound_is_violated_with_gains(
    integrator, layers, rows, step, activation
):
    net = with_gains(integrator, layers, rows, step=step, activation=activation)
    for bound in hdnn.analysis.bounds(net, states(3)):
        assert bound.holds is not False, str(bound)


def test_gains_of_two_signs_grow_as_fast_as_their_bound():
    # p' = q and q' = p: a saddle, which no convex energy has
    net = hdnn.H2(2, 1, gains=True, activation="identity", dtype=torch.float64)
    for name, value in {"K_p": 1, "K_q": 1, "a_p": 1, "a_q": -1}.items():
        net.assign(name, torch.full_like(net.weight(name), value))
    ode = hdnn.analysis.ContinuousNetwork(net)
    growth = hdnn.analysis.norms(ode.sensitivity(states(1, n=2))).max()
    bound = hdnn.analysis.bsm_bound_continuous(net)
    torch.testing.assert_close(growth, bound, rtol=1e-8, atol=0)


@pytest.mark.parametrize("integrator", GAINED)
def test_views_copies_and_transforms_keep_the_gains(integrator):
    net = with_gains(integrator, 3, 2, step=0.1, X=torch.randn(2, 2))
    y = states(3)
    all_states = net.trajectory(y)
    x = y
    for j, layer in enumerate(net):
        x = layer(x)
        torch.testing.assert_close(x, all_states[j + 1])
    torch.testing.assert_close(net.inverse(x), y)
    torch.testing.assert_close(torch.func.vmap(net)(y), net(y))
    Phi = hdnn.analysis.backward_sensitivity(net, y)
    torch.testing.assert_close(Phi[0][0], torch.func.jacrev(net)(y[0]).mT)
    other = with_gains(integrator, 3, 2, step=0.1, X=net.X)
    other.reset_parameters()
    assert not torch.equal(other.a_p, net.a_p)
    other.load_state_dict(net.state_dict())
    assert torch.equal(copy.deepcopy(other)(y), net(y))
    parameters = dict(net.named_parameters())

    def run(*values):
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(net, named, (y,))

    assert torch.autograd.gradgradcheck(run, tuple(parameters.values()))


def test_rows_and_gains_survive_a_file_and_a_refinement(tmp_path):
    net = with_gains("semi_implicit_euler", 3, 5)
    y = torch.randn(4, 4, dtype=torch.float64)
    hdnn.save(net, tmp_path / "net.safetensors")
    assert torch.equal(hdnn.load(tmp_path / "net.safetensors")(y), net(y))
    assert torch.equal(net.refine(2).weight("a_p")[::2], net.weight("a_p"))


def test_rows_and_gains_are_for_networks_that_halve_the_state():
    with pytest.raises(hdnn.HDNNError, match="rows and gains are for H2"):
        hdnn.H1(4, 3, gains=True)
    with pytest.raises(hdnn.HDNNError, match="without sparsity"):
        hdnn.H2(4, 3, rows=3, sparsity=torch.eye(2))
