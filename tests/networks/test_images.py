"""Hamiltonian units: H1 and H2 on images, their promises and their gradients."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

import hdnn
from hdnn import HamiltonianUnit
from hdnn.errors import HDNNError, OptionError, ReversalWarning, ShapeError

F64 = torch.float64
seeds = st.integers(0, 10**6)
both = pytest.mark.parametrize("network", ["h1", "h2"])
norms = pytest.mark.parametrize("norm", ["none", "inside"])


def normal(seed, *shape):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=F64
    )


def unit_of(network, *, channels=4, layers=3, seed=0, scale=1.0, **options):
    options = {"step": 0.3, "dtype": F64, "activation": "tanh"} | options
    unit = HamiltonianUnit(channels, layers, network=network, **options)
    with torch.no_grad():
        for k, (name, p) in enumerate(unit.named_parameters()):
            size = 1.0 if name[0] == "g" else scale / 3
            p.copy_(size * normal(seed + k, *p.shape) + (name[0] == "g"))
        for k, (name, b) in enumerate(unit.named_buffers()):
            if name.startswith(("mean", "var")):
                b.copy_(normal(seed + 99 + k, *b.shape).square() + 0.5)
    return unit


def image(channels=4, size=4, batch=2, seed=9):
    return normal(seed, batch, channels, size, size)


def definition(unit, y, steps, training=False):
    sigma, options = (
        hdnn.activations.get(unit.activation),
        {"padding": unit.padding},
    )

    def force(s, half, j):
        K, b = unit.weight("K" + half)[j], unit.weight("b" + half)[j]
        x = F.conv2d(s, K, b, **options)
        if unit.norm == "inside":
            mean, var = (
                getattr(unit, "mean" + half)[j],
                getattr(unit, "var" + half)[j],
            )
            affine = (
                getattr(unit, "gamma" + half)[j],
                getattr(unit, "beta" + half)[j],
            )
            x = F.batch_norm(
                x, mean.clone(), var.clone(), *affine, training=training
            )
        return F.conv_transpose2d(sigma(x), K, **options)

    for j, h in enumerate(steps):
        if unit.network == "h1":
            g_p, g_q = force(y, "", j).chunk(2, 1)
            y = y + h * torch.cat([-g_q, g_p], 1)
        else:
            p, q = y.chunk(2, 1)
            p = p - h * force(q, "_q", j)
            y = torch.cat([p, q + h * force(p, "_p", j)], 1)
    return y


@both
@norms
@pytest.mark.parametrize(
    ("kernel", "padding"), [(1, None), (2, None), (3, 0), (3, 2)]
)
@pytest.mark.parametrize("training", [True, False])
def test_a_unit_is_its_definition(network, norm, kernel, padding, training):
    steps = [0.1, 0.2, 0.3]
    options = {
        "norm": norm,
        "kernel": kernel,
        "padding": padding,
    }
    unit, y = unit_of(network, step=steps, **options).train(training), image()
    expected = definition(unit, y, steps, training)
    states = unit.trajectory(y)
    torch.testing.assert_close(states[-1], expected)
    torch.testing.assert_close(unit.layer(states[1], 1), states[2])
    torch.testing.assert_close(unit(y), expected)


def jacobian(unit, y):
    """dy_N/dy_0 in denominator layout, p before q."""
    return (
        torch.autograd.functional.jacobian(unit, y)
        .reshape(y.numel(), y.numel())
        .mT
    )


@given(
    seeds,
    st.integers(1, 4),
    st.floats(0.1, 3),
    st.sampled_from(["tanh", "relu", "sin"]),
    seeds,
)
def test_an_h2_unit_is_symplectic_and_undone_by_its_inverse(
    seed, N, scale, activation, other
):
    norm = ("none", "inside")[other % 2]
    unit = unit_of(
        "h2", layers=N, seed=seed, scale=scale, activation=activation, norm=norm
    )
    unit.eval().requires_grad_(False)
    y = image(size=3, batch=1, seed=seed)
    M, m = jacobian(unit, y), y.numel() // 2
    J = torch.zeros(2 * m, 2 * m, dtype=F64)
    J[:m, m:], J[m:, :m] = -torch.eye(m), torch.eye(m)
    size = torch.linalg.matrix_norm(M, 2) ** 2
    assert (M.mT @ J @ M - J).abs().max() < 1e-12 * max(1.0, size)
    assert unit.guarantee().holds
    assert torch.linalg.matrix_norm(M, 2) >= 1 - 1e-12
    torch.testing.assert_close(
        unit.inverse(unit(y)), y, rtol=0, atol=1e-11 + 1e-15 * float(size)
    )


@given(
    seeds,
    st.integers(1, 4),
    st.floats(0.1, 3),
    st.sampled_from(["tanh", "relu", "softplus"]),
)
def test_the_gradients_of_an_h1_unit_do_not_vanish(seed, N, scale, activation):
    unit = unit_of(
        "h1", layers=N, seed=seed, scale=scale, activation=activation
    )
    unit.requires_grad_(False)
    Phi = jacobian(unit, image(size=3, batch=1, seed=seed))
    assert unit.guarantee().holds
    assert torch.linalg.matrix_norm(Phi, 2) >= 1 - 1e-9
    assert torch.linalg.slogdet(Phi).logabsdet >= -1e-8


def test_what_is_promised_depends_on_the_network_the_activation_and_the_normalisation():
    def holds(network, **options):
        return (
            HamiltonianUnit(4, 2, network=network, **options).guarantee().holds
        )

    assert holds("h1", activation="relu")
    assert not holds("h1", activation="gelu")
    assert holds("h2", activation="gelu")
    assert HamiltonianUnit(4, 2).network == "h2"
    assert not holds("h2", norm="inside")
    assert (
        "before its normalisation"
        in HamiltonianUnit(4, 2, norm="after").guarantee().why
    )
    unit = HamiltonianUnit(4, 2, network="h1", norm="inside").eval()
    assert unit.guarantee().holds
    unit.gamma.data[1, 2] = -0.1
    assert not unit.guarantee().holds
    unit = unit_of(
        "h2", norm="inside"
    )  # in training the batch has determinant 1, no sample has
    J = torch.autograd.functional.jacobian(
        unit, image(size=2, batch=3)
    ).reshape(48, 48)
    assert abs(torch.linalg.slogdet(J).logabsdet) < 1e-9


# Gradients


def results(unit, y, backprop):
    """The last state, all gradients and statistics."""
    unit = copy.deepcopy(unit)
    unit.backprop = backprop
    torch.manual_seed(3)
    y = y.clone().requires_grad_()
    out = unit(y)
    out.square().sum().backward()
    return [out, y.grad, *(p.grad for p in unit.parameters()), *unit.buffers()]


@both
@pytest.mark.parametrize("norm", ["none", "inside", "both"])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_gradients_and_statistics_are_the_same_in_every_mode(
    network, norm, drop
):
    unit, y = unit_of(network, layers=5, norm=norm, drop=drop), image(batch=4)
    modes = ["checkpoint"] + ["reversible"] * (network == "h2")
    expected = results(unit, y, "stored")
    for mode in modes:
        for a, b in zip(results(unit, y, mode), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backprop", ["checkpoint", "reversible"])
def test_gradients_of_gradients_are_those_of_finite_differences(backprop):
    unit = unit_of("h2", layers=3, channels=2, backprop=backprop)
    y = image(2, 2).requires_grad_()
    assert torch.autograd.gradcheck(unit, (y,))
    assert torch.autograd.gradgradcheck(unit, (y,))


def test_what_comes_in_and_out_may_be_changed_in_place():
    unit, y = unit_of("h2", backprop="reversible"), image()
    (expected,) = torch.autograd.grad(
        unit(x := y.clone().requires_grad_()).relu().sum(), x
    )
    leaf = y.clone().requires_grad_()
    x = leaf * 1.0
    out = unit(x)
    x.detach().zero_()
    (g,) = torch.autograd.grad(out.relu_().sum(), leaf)
    torch.testing.assert_close(g, expected)


def test_reversals_that_lose_the_state_are_found():
    y = image(8, 6, seed=1).float().requires_grad_()
    options = {
        "channels": 8,
        "dtype": torch.float32,
        "layers": 30,
        "backprop": "reversible",
    }
    unit_of("h2", scale=0.3, **options)(y).sum().backward()
    with pytest.raises((OptionError, ReversalWarning), match="off by"):
        unit_of("h2", scale=6.0, **options)(y).sum().backward()


def test_the_setting_of_the_engine_decides_what_auto_does():
    unit, y = unit_of("h2"), image().requires_grad_()
    saved = []

    def count(t):
        saved[-1] += t.ndim == 4 and len(t) == len(y)
        return t

    for backprop in ("stored", "checkpoint"):
        saved.append(0)
        hooks = torch.autograd.graph.saved_tensors_hooks(count, lambda t: t)
        with hdnn.engine.use(backprop=backprop), hooks:
            unit(y)
    assert saved[1] < saved[0]


def test_jacobians_by_torch_func():
    for backprop in ("checkpoint", "reversible"):
        unit, y = unit_of("h2", backprop=backprop), image(batch=1, size=2)
        J = torch.func.jacrev(unit)(y).reshape(16, 16)
        torch.testing.assert_close(J.mT, jacobian(unit, y))


# Statistics, dropping


def test_running_statistics_are_those_of_batch_normalisation():
    unit, y = (
        unit_of("h2", norm="inside", layers=1),
        image(batch=3).requires_grad_(),
    )
    norm = torch.nn.BatchNorm2d(2, dtype=F64)
    norm.load_state_dict(
        {"running_mean": unit.mean_q[0], "running_var": unit.var_q[0]}, False
    )
    norm(F.conv2d(y[:, 2:], unit.K_q[0], unit.b_q[0], padding=1))
    unit(y).sum().backward()
    torch.testing.assert_close(unit.mean_q[0], norm.running_mean)
    torch.testing.assert_close(unit.var_q[0], norm.running_var)
    before = unit.mean_p.clone()
    unit.trajectory(y)
    unit.eval()(y)
    assert torch.equal(unit.mean_p, before)


@both
def test_each_image_has_its_own_steps_where_layers_are_left_out(network):
    drop = [0.0, 0.3, 0.6]
    unit, y = (
        unit_of(network, drop=drop).requires_grad_(False),
        image(batch=1).repeat(400, 1, 1, 1),
    )
    torch.manual_seed(1)
    paths = unit(y).flatten(1).unique(dim=0)
    ways = [
        definition(unit, y[:1], [0.3, a * 0.3 / 0.7, b * 0.3 / 0.4]).flatten()
        for a in (0, 1)
        for b in (0, 1)
    ]
    for path in paths:
        assert min(float((path - way).abs().max()) for way in ways) < 1e-9
    assert all(float((paths - way).abs().amax(1).min()) < 1e-9 for way in ways)
    torch.testing.assert_close(unit.eval()(y), unit_of(network)(y))


def test_smoothness_is_that_of_the_stacked_weights():
    unit = unit_of("h2", step=[0.1, 0.2, 0.3])
    total = 0.0
    for name in ("K_p", "K_q", "b_p", "b_q"):
        jumps = unit.weight(name).diff(dim=0).square().flatten(1).sum(1)
        total = total + 0.5 * (torch.tensor([0.2, 0.3]) * jumps).sum()
    torch.testing.assert_close(unit.smoothness(), total)


# Precision, layout, compiler, seeds


@both
@norms
def test_channels_last_and_autocast_change_little(network, norm):
    unit, y = unit_of(network, norm=norm, dtype=torch.float32), image().float()
    expected = copy.deepcopy(unit)(y)
    last = copy.deepcopy(unit).to(memory_format=torch.channels_last)
    torch.testing.assert_close(
        last(y.to(memory_format=torch.channels_last)), expected
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = copy.deepcopy(unit)(y)
    assert out.dtype == torch.float32
    assert (out - expected).norm() < 0.03 * expected.norm()


@both
@norms
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)
def test_units_compile_into_one_graph(network, norm):
    torch._dynamo.reset()
    unit, y = unit_of(network, norm=norm, drop=0.3), image()
    other, ways = copy.deepcopy(unit), []
    for call, module in (
        (torch.compile(unit, fullgraph=True, backend="aot_eager"), unit),
        (other, other),
    ):
        torch.manual_seed(0)
        x = y.clone().requires_grad_()
        out = call(x)
        out.square().sum().backward()
        ways.append([out, x.grad, *module.buffers()])
    for a, b in zip(*ways, strict=True):
        torch.testing.assert_close(a, b)


@both
def test_one_seed_is_one_unit_in_every_dtype(network):
    def make(dtype, seed=0):
        options = {
            "generator": torch.Generator().manual_seed(seed),
            "dtype": dtype,
        }
        return HamiltonianUnit(
            4, 2, network=network, init="paper", **options
        ).state_dict()

    for a, b in zip(
        make(F64).values(), make(torch.float32).values(), strict=True
    ):
        assert torch.equal(a, b.double())
    unit = HamiltonianUnit(4, 2, network=network, device="meta", norm="inside")
    unit.to_empty(device="cpu").reset_parameters(
        torch.Generator().manual_seed(0)
    )
    assert unit(image().float()).isfinite().all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"channels": 3}, r"do not split into \(p, q\)"),
        ({"network": "h3"}, "not known"),
        ({"norm": "before"}, "not known"),
        ({"step": 0.1, "T": 1.0}, "not both"),
        ({"step": [0.1]}, "1 entries for 2 layers"),
        ({"step": -1.0}, "step must be .*> 0"),
        ({"drop": 1.0}, "drop must be at least 0"),
        ({"network": "h1", "backprop": "reversible"}, "no explicit inverse"),
    ],
)
def test_what_no_unit_can_have_is_an_error(options, text):
    options = {"channels": 4, "layers": 2} | options
    with pytest.raises(HDNNError, match=text):
        HamiltonianUnit(**options)


def test_what_is_no_image_is_an_error():
    unit = HamiltonianUnit(4, 1, network="h1", padding=0)
    for y, text in (
        (torch.zeros(4, 5, 5), r"images \(B, 4"),
        (torch.zeros(1, 4, 5, 5).int(), "torch.int32"),
        (torch.zeros(1, 4, 5, 5, dtype=F64), "dtype of its weights"),
        ([], "list"),
    ):
        with pytest.raises(ShapeError, match=text):
            unit(y)
    with pytest.raises(OptionError, match="has an explicit inverse"):
        unit.inverse(torch.zeros(1, 4, 5, 5))
