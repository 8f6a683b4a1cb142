"""Convolutions as K: the exact adjoint, and units that keep the theorems of H1 and H2."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import hdnn
from hdnn import HamiltonianUnit
from hdnn.errors import HDNNError, NotInvertibleError, OptionError, ShapeError
from hdnn.interconnection import canonical
from hdnn.operators import conv
from hdnn.training.smooth import Smoothness
from strategies import ACTIVATIONS, MONOTONE, Random, scales, seeds

kernels = st.sampled_from([1, 3, 5])
images = st.tuples(st.integers(1, 5), st.integers(1, 5))
paddings = st.none() | st.tuples(st.integers(0, 6), st.integers(0, 6))


# The operator


@given(seeds, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), kernels, images, paddings)
def test_the_adjoint_of_a_convolution_is_exact(seed, groups, rows, columns, k, image, padding):
    normal, r, n = Random(seed), rows * groups, columns * groups
    pad = (k // 2, k // 2) if padding is None else padding
    inner = [side + 2 * p - k + 1 for side, p in zip(image, pad, strict=True)]
    assume(min(inner) > 0)
    K, y, z = normal(r, columns, k, k), normal(2, n, *image), normal(2, r, *inner)
    Ky = conv.apply(K, y, groups, padding=padding)
    Kz = conv.adjoint(K, z, groups, padding)
    assert Ky.shape == z.shape
    assert Kz.shape == y.shape
    torch.testing.assert_close((Ky * z).sum(), (y * Kz).sum(), rtol=1e-12, atol=1e-12)
    by_K = conv.gradient(y, z, K, groups, padding)
    torch.testing.assert_close((by_K * K).sum(), (Ky * z).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", [None, 0, 2])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("k", [1, 3])
def test_the_norm_is_the_largest_singular_value_at_that_size(groups, k, padding):
    K = Random(k)(3, 4, 4 // groups, k, k)
    pixels = torch.eye(4 * 3 * 5, dtype=torch.float64).view(-1, 4, 3, 5)
    found = conv.norm(K, (3, 5), groups, padding=padding, tol=1e-12, iterations=10_000)
    for one, value in zip(K, found, strict=True):
        matrix = conv.apply(one, pixels, groups, None, padding).flatten(1)
        torch.testing.assert_close(value, torch.linalg.matrix_norm(matrix, 2), rtol=1e-6, atol=0)


def test_the_norm_has_the_gradient_of_a_singular_value():
    K = Random(0)(2, 2, 3, 3).requires_grad_()
    value = conv.norm(K, 4, tol=1e-14, iterations=10_000)
    (grad,) = torch.autograd.grad(value, K)
    torch.testing.assert_close((grad * K).sum(), value)  # it is homogeneous
    assert conv.norm(torch.zeros(2, 2, 3, 3), 4) == 0
    half = conv.norm(K.detach().bfloat16(), 4)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), value.detach(), rtol=0.02, atol=0)


def test_what_no_convolution_can_be_is_an_error():
    with pytest.raises(ShapeError, match="2 x 2"):
        conv.apply(torch.ones(2, 2, 2, 2), torch.ones(1, 2, 4, 4))
    with pytest.raises(ShapeError, match="n/groups"):
        conv.norm(torch.ones(3, 3), 4)
    with pytest.raises(OptionError, match="3 groups"):
        conv.norm(torch.ones(2, 2, 3, 3), 4, 3)


# Units


def make(network, *, channels=4, layers=3, seed=0, scale=1.0, **options) -> HamiltonianUnit:
    options = {"step": 0.3, "dtype": torch.float64, "activation": "tanh"} | options
    unit = HamiltonianUnit(channels, layers, network=network, **options)
    normal = Random(seed)
    with torch.no_grad():
        for name, p in unit.named_parameters():
            size = 1.0 if name[0] == "g" else scale / 3
            p.copy_(size * normal(*p.shape) + (name[0] == "g"))
        for name, b in unit.named_buffers():
            if b.is_floating_point() and not name.startswith("_"):
                b.copy_(normal(*b.shape).square() + 0.5)
    return unit


def image(channels=4, size=4, batch=2, seed=9):
    return Random(seed)(batch, channels, size, size)


def plain(unit, y, steps, training=False):
    """The definition, layer by layer."""
    sigma, pad, G = hdnn.activations.get(unit.activation), unit.padding, unit.groups

    def field(s, half, j):
        K, b = unit.weight("K" + half)[j], unit.weight("b" + half)[j]
        x = F.conv2d(s, K, b, padding=pad, groups=G)
        if unit.norm == "inside":
            mean, var = getattr(unit, "mean" + half)[j], getattr(unit, "var" + half)[j]
            affine = getattr(unit, "gamma" + half)[j], getattr(unit, "beta" + half)[j]
            x = F.batch_norm(x, mean.clone(), var.clone(), *affine, training=training)
        return F.conv_transpose2d(sigma(x), K, padding=pad, groups=G)

    for j, h in enumerate(steps):
        if unit.network == "h1":
            g_p, g_q = field(y, "", j).chunk(2, 1)
            y = y + h * torch.cat([-g_q, g_p], 1)
        else:
            p, q = y.chunk(2, 1)
            p = p - h * field(q, "_q", j)
            y = torch.cat([p, q + h * field(p, "_p", j)], 1)
    return y


def close(a, b, tol=1e-12):
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("norm", ["none", "inside"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("kernel", "padding"), [(1, None), (3, None), (3, 0), (3, 2), (1, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_a_unit_is_its_definition(network, norm, groups, kernel, padding, training):
    kernels = {"kernel": kernel, "padding": padding, "groups": groups}
    unit = make(network, norm=norm, step=[0.1, 0.2, 0.3], **kernels)
    unit.train(training)
    y = image()
    expected = plain(unit, y, [0.1, 0.2, 0.3], training)
    close(unit.trajectory(y)[-1], expected)
    close(unit.trajectory(y)[0], y)
    with torch.no_grad():
        close(make_like(unit)(y), expected)
    close(unit(y), expected)


def make_like(unit):
    again = HamiltonianUnit(
        unit.channels,
        unit.layers,
        network=unit.network,
        kernel=unit.kernel,
        step=unit.step,
        activation=unit.activation,
        groups=unit.groups,
        padding=unit.padding,
        norm=unit.norm,
        dtype=torch.float64,
    )
    again.load_state_dict(unit.state_dict())
    return again.train(unit.training)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", ["none", "inside", "after"])
@pytest.mark.parametrize("training", [True, False])
def test_reversible_gradients_are_those_of_autograd(activation, norm, training):
    kernels = {"groups": 2, "padding": len(activation) % 3}
    unit = make("h2", activation=activation, norm=norm, layers=4, **kernels).train(training)
    y = image().requires_grad_()
    found = []
    state = {k: v.clone() for k, v in unit.state_dict().items()}
    for reversible in (True, False):
        unit.load_state_dict(state)
        unit.reversible = reversible
        out = unit(y)
        loss = (out * image(seed=3)).sum()
        grads = torch.autograd.grad(loss, [y, *unit.parameters()])
        found.append([out, *grads, *unit.state_dict().values()])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-10)


def assert_symplectic(Phi):
    J = canonical(len(Phi), dtype=torch.float64)
    size = torch.linalg.matrix_norm(Phi, 2)
    defect = torch.linalg.matrix_norm(Phi.mT @ J @ Phi - J)
    assert defect <= 1e-12 * size**2 * torch.linalg.matrix_norm(J)
    assert size >= 1 - 1e-9


# Layers that are left out


@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("groups", [1, 2])
def test_each_image_has_its_own_steps_where_layers_are_left_out(network, groups):
    drop = [0.0, 0.3, 0.6]
    unit, y = make(network, drop=drop, groups=groups), image(batch=50)
    torch.manual_seed(1)
    factors = unit._factors(y)
    torch.manual_seed(1)
    found = unit(y)
    assert found.dtype == y.dtype
    for j, q in enumerate(drop):
        left_out = factors[j] == 0
        close(factors[j][~left_out], torch.full_like(factors[j], 1 / (1 - q))[~left_out])
        assert left_out.any() == (q > 0)
    for one, y_0, steps in zip(found, y, 0.3 * factors.T, strict=True):
        close(one, plain(unit, y_0[None], steps)[0])
    assert torch.equal(unit.trajectory(y), make(network, groups=groups).trajectory(y))
    assert torch.equal(unit.eval()(y), make(network, groups=groups)(y))
    assert "drop to 0.6" in repr(unit)
    assert unit.state_dict().keys() == make(network, groups=groups).state_dict().keys()


def test_layers_are_left_out_as_often_as_asked_for():
    unit = make("h2", layers=2, drop=[0.2, 0.5])
    torch.manual_seed(0)
    factors = unit._factors(torch.empty(20000, 4, 1, 1))
    close((factors == 0).double().mean(1), torch.tensor([0.2, 0.5]).double(), 0.02)
    close(factors.double().mean(1), torch.ones(2).double(), 0.03)


@pytest.mark.parametrize("norm", ["none", "inside", "after"])
def test_reversible_gradients_know_which_layers_were_left_out(norm):
    unit, y = make("h2", layers=4, drop=0.5, norm=norm), image(batch=5).requires_grad_()
    found = []
    for reversible in (True, False):
        unit.reversible = reversible
        torch.manual_seed(2)
        loss = (unit(y) * image(batch=5, seed=3)).sum()
        found.append(torch.autograd.grad(loss, [y, *unit.parameters()]))
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-10)


@given(seeds, st.integers(1, 4), scales, st.sampled_from(ACTIVATIONS), st.floats(0.1, 0.9))
def test_a_unit_without_some_of_its_layers_is_symplectic(seed, N, scale, activation, drop):
    unit = make("h2", layers=N, seed=seed, scale=scale, activation=activation, drop=drop)
    unit.requires_grad_(False)
    y = image(size=3, batch=1, seed=seed)
    factors = unit._factors(y)
    assert_symplectic(jacobian(lambda y: unit._run(y, factors)[0], y))
    assert unit.guarantee().holds


@pytest.mark.parametrize("norm", ["none", "inside"])
def test_gradients_of_gradients_are_those_of_finite_differences(norm):
    unit = make("h2", layers=2, norm=norm, channels=2)
    y = image(2, 2).requires_grad_()
    assert torch.autograd.gradcheck(unit, (y,))
    assert torch.autograd.gradgradcheck(unit, (y,))


def saved(unit, y):
    """How many tensors, and how many numbers beyond the weights, autograd keeps."""
    kept = []
    own = {p.data_ptr() for p in unit.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        unit(y.requires_grad_())
    weights = [t for t in kept if t.ndim in (2, 5) or t.data_ptr() in own]
    return len(kept), sum(t.numel() for t in kept) - sum(t.numel() for t in weights)


@pytest.mark.parametrize("norm", ["none", "inside", "after"])
def test_the_memory_of_a_reversible_unit_does_not_grow_with_depth(norm):
    options = {"norm": norm, "reversible": True}
    small, large = (saved(make("h2", layers=N, **options), image()) for N in (6, 60))
    assert small == large
    stored = [saved(make("h2", layers=N, reversible=False), image())[1] for N in (6, 60)]
    assert stored[1] > 5 * stored[0]


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_running_statistics_are_those_of_batch_normalisation(padding):
    unit = make("h2", norm="inside", layers=1, padding=padding)
    y = image(batch=3).requires_grad_()
    norm = torch.nn.BatchNorm2d(2, dtype=torch.float64)
    norm.load_state_dict({"running_mean": unit.mean_q[0], "running_var": unit.var_q[0]}, False)
    norm(F.conv2d(y[:, 2:], unit.K_q[0], unit.b_q[0], padding=padding))
    unit(y).sum().backward()  # which computes the statistics again, but counts them once
    close(unit.mean_q[0], norm.running_mean)
    close(unit.var_q[0], norm.running_var)
    before = unit.mean_p.clone()
    unit.trajectory(y)
    unit.eval()(y)
    assert torch.equal(unit.mean_p, before)


@given(seeds, st.integers(1, 4), kernels, scales, st.sampled_from(ACTIVATIONS), st.booleans())
def test_an_h2_unit_is_symplectic_and_undone_by_its_inverse(seed, N, k, scale, activation, norm):
    options = {"norm": "inside" if norm else "none", "padding": k // 2 + (seed % 3 - 1) * (k == 3)}
    unit = make("h2", layers=N, seed=seed, scale=scale, activation=activation, kernel=k, **options)
    unit.eval().requires_grad_(False)
    y = image(size=3, batch=1, seed=seed)
    M = jacobian(unit, y)
    assert_symplectic(M)
    assert unit.guarantee().holds
    stretch = torch.linalg.matrix_norm(M, 2).item()  # of rounding, once there and once back
    close(unit.inverse(unit(y)), y, 1e-11 + torch.finfo(y.dtype).eps * stretch**2)


@given(seeds, st.integers(1, 4), kernels, scales, st.sampled_from(MONOTONE), st.booleans())
def test_the_gradients_of_an_h1_unit_do_not_vanish(seed, N, k, scale, activation, norm):
    options = {"norm": "inside" if norm else "none", "padding": k // 2 + (seed % 3 - 1) * (k == 3)}
    unit = make("h1", layers=N, seed=seed, scale=scale, activation=activation, kernel=k, **options)
    unit.eval().requires_grad_(False)
    if norm:
        unit.gamma.abs_()
    assert unit.guarantee().holds
    Phi = jacobian(unit, image(size=3, batch=1, seed=seed))
    assert torch.linalg.matrix_norm(Phi, 2) >= 1 - 1e-9
    assert torch.linalg.slogdet(Phi).logabsdet >= -1e-8


def jacobian(unit, y):
    """dy_N/dy_0 in denominator layout, p before q."""
    n = y.numel()
    J = torch.autograd.functional.jacobian(unit, y)
    return J.reshape(n, n).mT


def test_in_training_normalisation_inside_keeps_the_volume_of_the_batch():
    unit = make("h2", norm="inside")
    J = torch.autograd.functional.jacobian(unit, image(size=2, batch=3))
    assert abs(torch.linalg.slogdet(J.reshape(48, 48)).logabsdet) < 1e-9
    assert not unit.guarantee().holds


def test_what_is_promised_depends_on_the_network_the_activation_and_the_normalisation():
    def holds(network, **options):
        return HamiltonianUnit(4, 2, network=network, **options).guarantee().holds

    assert holds("h1", activation="relu")
    assert holds("h1", activation="softplus")
    assert not holds("h1", activation="gelu")
    assert holds("h2", activation="gelu")
    assert not holds("h2", norm="inside")
    assert holds("h1", norm="after")
    assert "before its normalisation" in HamiltonianUnit(4, 2, norm="after").guarantee().why
    unit = HamiltonianUnit(4, 2, norm="inside").eval()
    assert unit.guarantee().holds
    with torch.no_grad():
        unit.gamma[1, 2] = -0.1
    assert not unit.guarantee().holds
    assert "gamma" in unit.guarantee().why


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_smoothness_is_that_of_the_stacked_weights(network):
    unit = make(network)
    w = dict(unit.named_parameters())
    K = torch.cat([v.flatten(1) for k, v in w.items() if k[0] == "K"], 1)
    b = torch.cat([v for k, v in w.items() if k[0] == "b"], 1)
    close(unit.smoothness(), hdnn.regularization.smoothness(K, b, 0.3))
    close(unit.smoothness(), 0.15 * (K.diff(dim=0).square().sum() + b.diff(dim=0).square().sum()))


class Twice(nn.Module):
    """Each layer's weights for two steps, as PyTorch parametrises."""

    def forward(self, stack):
        return stack.repeat_interleave(2, 0)

    def right_inverse(self, stack):
        return stack[::2].clone()


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_weights_may_be_parametrised(network):
    shared, unit, y = make(network, layers=4), make(network, layers=4), image(4)
    names = [name for name, _ in unit.named_parameters()]
    for name in names:
        parametrize.register_parametrization(shared, name, Twice())
        unit.get_parameter(name).data.copy_(getattr(shared, name))
    for one in (shared, unit):
        one(y).square().sum().backward()
        Smoothness((one,), 0.1).add_gradient()
    for name in names:
        grad = unit.get_parameter(name).grad
        close(shared.parametrizations[name].original.grad, grad[::2] + grad[1::2])


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_a_block_sparse_unit_links_only_the_nodes_of_its_pattern(network):
    R = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 1]], dtype=torch.bool)
    unit = make(network, channels=12, layers=1, sparsity=R)
    halves = 2 if network == "h1" else 1
    free = torch.kron(R.repeat(halves, halves), torch.ones(2, 2, dtype=torch.bool))
    for name in ("K",) if network == "h1" else ("K_p", "K_q"):
        K = unit.weight(name)[0]
        assert torch.equal(K.ne(0).any(-1).any(-1), free)
        assert getattr(unit, f"{name}_free").numel() == 9 * free.sum()
    y = image(12)
    close(unit(y), plain(unit, y, [0.3]))
    unit(y).sum().backward()
    close(unit.smoothness(), torch.zeros((), dtype=torch.float64))
    assert "sparse" in repr(unit)
    K = make(network, channels=12, sparsity=hdnn.Sparsity(R))
    assert K.norms(4)["K" if network == "h1" else "K_p"].shape == (3,)


def test_a_grouped_h2_unit_is_as_many_units_side_by_side():
    unit = make("h2", channels=8, groups=2)
    y = image(8).requires_grad_()
    (grad,) = torch.autograd.grad(unit(y)[:, [0, 1, 4, 5]].square().sum(), y)
    assert grad[:, [0, 1, 4, 5]].all()
    assert not grad[:, [2, 3, 6, 7]].any()


@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("norm", ["none", "inside", "after"])
def test_channels_last_changes_no_value(network, norm):
    unit = make(network, norm=norm, layers=4)
    y = image()
    expected = unit(y)
    state = {k: v.clone() for k, v in unit.state_dict().items()}
    unit = make(network, norm=norm, layers=4).to(memory_format=torch.channels_last)
    K = unit.K if network == "h1" else unit.K_p
    assert K[1].is_contiguous(memory_format=torch.channels_last)
    out = unit(y.to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    close(out, expected)
    out.sum().backward()
    for name, value in unit.state_dict().items():
        close(value, state[name])


@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("norm", ["none", "inside", "after"])
def test_autocast_runs_and_keeps_the_state_in_float32(network, norm):
    unit = make(network, norm=norm, dtype=torch.float32)
    y = image().float().requires_grad_()
    exact = torch.autograd.grad(unit(y).square().sum(), [y, *unit.parameters()])
    with torch.autocast("cpu", torch.bfloat16):
        out, low = unit(y), unit(y.bfloat16())
    assert out.dtype == torch.float32
    if norm != "after":
        assert low.dtype == torch.bfloat16
    close(out, unit(y), 0.1)
    grads = torch.autograd.grad(out.square().sum(), [y, *unit.parameters()])
    for a, b in zip(grads, exact, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 0.1 * b.norm() + 1e-3 * exact[0].norm()


def test_a_reversible_unit_in_bfloat16_has_the_gradients_of_a_stored_one():
    unit = make("h2", layers=8).bfloat16()
    y = image().bfloat16().requires_grad_()
    found = []
    for unit.reversible in (True, False):
        out = unit(y)
        assert out.dtype == torch.bfloat16
        found.append(torch.autograd.grad(out.float().square().sum(), [y, *unit.parameters()]))
    for a, b in zip(*found, strict=True):
        assert (a - b).float().norm() <= 0.03 * b.float().norm()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("network", "norm", "autocast", "drop"),
    [
        ("h1", "none", False, 0.5),
        ("h1", "inside", True, 0.0),
        ("h2", "none", True, 0.0),
        ("h2", "inside", False, 0.5),
    ],
)
def test_compiles_into_one_graph(network, norm, autocast, drop):
    torch._dynamo.reset()
    dtype = torch.float32 if autocast else torch.float64
    unit = make(network, norm=norm, layers=2, dtype=dtype, drop=drop)
    y = image().to(dtype)
    compiled = torch.compile(unit, fullgraph=True, backend="aot_eager")
    found = []
    state = {k: v.clone() for k, v in unit.state_dict().items()}
    for call in (compiled, unit):
        unit.load_state_dict(state)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = call(y)
        grads = torch.autograd.grad(out.square().sum(), list(unit.parameters()))
        found.append([out, *grads, *[b.clone() for b in unit.buffers()]])
    for a, b in zip(*found, strict=True):
        close(a, b, 0.05 if autocast else 1e-10)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiles_with_the_default_backend():
    torch._dynamo.reset()
    unit = make("h2", layers=2, dtype=torch.float32)
    y = image().float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own
        out = torch.compile(unit, fullgraph=True)(y)
        out.sum().backward()
    close(out, unit(y), 1e-5)


@pytest.mark.gpu
# Undoing layers in bfloat16 drifts, and says so.
@pytest.mark.filterwarnings("ignore::hdnn.engine.drift.ReversalWarning")
@pytest.mark.parametrize("norm", ["none", "inside", "after"])
def test_on_a_gpu_the_memory_of_a_reversible_step_does_not_grow_with_depth(norm):
    def peak(layers):
        options = {"norm": norm, "step": 0.1, "reversible": True, "device": "cuda"}
        unit = HamiltonianUnit(32, layers, network="h2", **options)
        unit = unit.to(memory_format=torch.channels_last)
        y = torch.randn(128, 32, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = unit(y).square().mean()
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in unit.parameters())
        return torch.cuda.max_memory_allocated()

    peak(2)
    assert peak(60) < 1.2 * peak(6)


@pytest.mark.parametrize("backprop", ["stored", "checkpoint", "reversible"])
def test_jacobians_by_vmap(backprop):
    unit = make("h2", backprop=backprop).requires_grad_(False)
    y = image(size=2, batch=1)
    found = torch.func.jacrev(unit)(y)
    close(found, torch.autograd.functional.jacobian(unit, y))


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_one_seed_is_one_unit(network):
    def unit(seed, **options):
        generator = torch.Generator().manual_seed(seed)
        return HamiltonianUnit(4, 2, network=network, generator=generator, **options)

    before = torch.get_rng_state()
    a, b, c = unit(0), unit(0, dtype=torch.float64), unit(1)
    assert torch.equal(torch.get_rng_state(), before)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q.float())
    assert any(not torch.equal(p, q) for p, q in zip(a.parameters(), c.parameters(), strict=True))
    for name, p in unit(0, init="paper").named_parameters():
        assert p.std() > 0.2, name


def test_a_scaled_start_keeps_the_size_of_K_y():
    unit = HamiltonianUnit(32, 1, generator=torch.Generator().manual_seed(0))
    y = image(32, 16).float()
    x = conv.apply(unit.K[0], y)
    assert 0.8 < x.std() / y.std() < 1.1


def test_the_step_is_h_or_T_over_N():
    assert HamiltonianUnit(2, 6, T=1.2).step == pytest.approx(0.2)
    assert HamiltonianUnit(2, 2, step=[0.1, 0.2]).step == (0.1, 0.2)
    options = {"network": "h2", "step": [0.1, 0.2], "groups": 2, "norm": "after"}
    text = repr(HamiltonianUnit(4, 2, reversible=True, **options))
    for word in ("h2", "one a layer", "2 groups", "norm after", "reversible"):
        assert word in text
    assert "reversible" not in repr(HamiltonianUnit(4, 2, **options))
    assert "backprop checkpoint" in repr(HamiltonianUnit(4, 2, backprop="checkpoint"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 3}, "must be even"),
        ({"kernel": 2}, "must be odd"),
        ({"network": "h3"}, "not known"),
        ({"norm": "before"}, "not known"),
        ({"network": "h2", "groups": 4}, "C/2 = 2"),
        ({"groups": 3}, "C = 4"),
        ({"padding": -1}, "padding must be a whole number >= 0"),
        ({"padding": "same"}, "padding must be a whole number >= 0"),
        ({"reversible": True}, "no explicit inverse"),
        ({"backprop": "reversible"}, "no explicit inverse"),
        ({"backprop": "backwards"}, "not known"),
        ({"reversible": "no"}, "reversible must be True or False"),
        ({"reversible": False, "backprop": "checkpoint"}, "give one of them"),
        ({"drop": 1.0}, "drop must be at least 0 and below 1"),
        ({"drop": "often"}, "drop must be at least 0 and below 1"),
        ({"drop": [0.1, 0.2, 0.3]}, "3 entries for 2 layers"),
        ({"groups": 2, "sparsity": torch.eye(2)}, "groups=1"),
        ({"step": 0.1, "T": 1.0}, "not both"),
        ({"activation": "swish"}, "not known"),
        ({"sparsity": hdnn.Sparsity(torch.eye(2), sizes=[2, 2])}, "C/2 = 2"),
    ],
)
def test_what_no_unit_can_have_is_an_error(options, message):
    channels = options.pop("channels", 4)
    with pytest.raises(HDNNError, match=message):
        HamiltonianUnit(channels, 2, **options)


def test_what_is_no_image_is_an_error():
    unit = HamiltonianUnit(4, 2)
    with pytest.raises(ShapeError, match="float64"):
        unit(image())
    with pytest.raises(ShapeError, match=r"\(2, 6, 4, 4\)"):
        unit(image(6))
    with pytest.raises(ShapeError, match="list"):
        unit([1.0])
    with pytest.raises(ShapeError, match="5 x 5 with padding 0 does not fit into images of 4 x 4"):
        HamiltonianUnit(4, 2, kernel=5, padding=0)(image().float())
    with pytest.raises(NotInvertibleError, match="H1"):
        unit.inverse(image())
    with pytest.raises(NotInvertibleError, match="after"):
        HamiltonianUnit(4, 2, network="h2", norm="after").inverse(image())
