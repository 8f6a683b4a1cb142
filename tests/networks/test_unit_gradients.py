"""Gradients of units: by default those of stored states, in less memory; rebuilt ones are checked.

Where layers expand, rounding grows on the way back from y_N, so that states rebuilt from it may
have nothing to do with those that the forward pass went through.
"""

from __future__ import annotations

import copy
import random
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hdnn
from hdnn import HamiltonianUnit, models, serialization
from hdnn.engine import dispatch, units
from hdnn.engine.drift import ReversalWarning
from hdnn.errors import HDNNError, TrainingError
from strategies import ACTIVATIONS

F32, F64 = torch.float32, torch.float64


@pytest.fixture
def no_room(monkeypatch):
    """No states fit into the memory that they may take."""
    monkeypatch.setattr(dispatch, "stored_limit", lambda device: 0)


def draw(seed, networks=("h1", "h2"), dtypes=(F32, F64)):
    """A random unit with images for it, and gradients for what comes out."""
    pick = random.Random(seed)
    options = {
        "network": pick.choice(networks),
        "step": pick.choice([0.1, 0.3, 0.7, 1.0]),
        "activation": pick.choice(ACTIVATIONS),
        "init": pick.choice(["scaled", "paper"]),
        "norm": pick.choice(["none", "none", "inside"]),
        "dtype": pick.choice(dtypes),
    }
    channels, layers = pick.choice([2, 4, 6]), pick.choice([6, 12, 30, 64])
    generator = torch.Generator().manual_seed(seed)
    unit = HamiltonianUnit(channels, layers, generator=generator, **options)
    if options["init"] == "paper":
        with torch.no_grad():
            for p in unit.parameters():
                p *= pick.choice([1.0, 0.5, 0.2]) if p.ndim == 5 else 1.0
    size = pick.choice([1, 3, 4])
    y, g = torch.randn(2, 3, channels, size, size, generator=generator, dtype=F64)
    return unit, y.to(unit_dtype(unit)).requires_grad_(), g.to(unit_dtype(unit))


def unit_dtype(unit):
    return next(unit.parameters()).dtype


def by_a_plain_loop(unit, y):
    """The definition, layer by layer, as anyone would write it."""
    sigma, pad = hdnn.activations.get(unit.activation), unit.padding

    def field(s, half, j):
        K, b = getattr(unit, "K" + half)[j], getattr(unit, "b" + half)[j]
        x = F.conv2d(s, K, b, padding=pad)
        if unit.normed:
            affine = getattr(unit, "gamma" + half)[j], getattr(unit, "beta" + half)[j]
            x = F.batch_norm(x, None, None, *affine, training=True)
        return F.conv_transpose2d(sigma(x), K, padding=pad)

    for j in range(unit.layers):
        if unit.network == "h1":
            f_p, f_q = field(y, "", j).chunk(2, 1)
            y = y + unit.step * torch.cat([-f_q, f_p], 1)
        else:
            p, q = y.chunk(2, 1)
            p = p - unit.step * field(q, "_q", j)
            y = torch.cat([p, q + unit.step * field(p, "_p", j)], 1)
    return y


def gradients(unit, y, g, run=None):
    out = (unit if run is None else run)(y)
    # What is normalised has no gradient by the bias before it: there all is rounding.
    free = [p for n, p in unit.named_parameters() if not (unit.normed and n.split("_")[0] == "b")]
    return torch.autograd.grad(out, [y, *free], g)


def furthest(found, wanted):
    """The largest of the relative errors, or NaN."""
    errors = [(a.double() - b).norm() / b.norm() for a, b in zip(found, wanted, strict=True)]
    return float(torch.stack(errors).max())


def test_gradients_by_default_are_no_further_from_float64_than_those_of_a_plain_loop():
    compared = 0
    for seed in range(40):
        unit, y, g = draw(seed, dtypes=(F32,))
        exact = HamiltonianUnit(
            unit.channels, unit.layers, network=unit.network, step=unit.step, norm=unit.norm,
            activation=unit.activation, dtype=F64,
        )  # fmt: skip
        exact.load_state_dict(unit.state_dict())
        y_64 = y.detach().double().requires_grad_()
        wanted = gradients(exact, y_64, g.double(), lambda y, u=exact: by_a_plain_loop(u, y))
        if not all(w.isfinite().all() and w.abs().max() < 1e30 for w in wanted):
            continue
        plain = furthest(gradients(unit, y, g, lambda y, u=unit: by_a_plain_loop(u, y)), wanted)
        found = furthest(gradients(unit, y, g), wanted)
        assert found <= 20 * max(plain, 1e-6), (seed, unit, found, plain)
        compared += 1
    assert compared >= 30


def test_gradients_by_default_are_those_of_stored_states_to_the_bit(no_room):
    for seed in range(30):
        unit, y, g = draw(seed)
        found = gradients(unit, y, g)
        unit.backprop = "stored"
        for a, b in zip(found, gradients(unit, y, g), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), (seed, unit)


def test_the_gradients_of_a_deep_unit_that_expands_are_right_by_default():
    torch.manual_seed(0)
    unit = HamiltonianUnit(16, layers=64, network="h2", step=1.0, activation="relu")
    y, g = torch.randn(2, 4, 16, 5, 5).unbind()
    y.requires_grad_()
    wanted = gradients(unit, y, g, lambda y: by_a_plain_loop(unit, y))
    assert furthest(gradients(unit, y, g), [w.double() for w in wanted]) < 1e-2
    unit.reversible = True
    with pytest.raises(TrainingError, match=r"y_1 that is off by .* worthless; take backprop"):
        gradients(unit, y, g)


# Memory


def kept(N, network, norm="none", **options):
    """How many numbers the backward pass of a small unit finds, beyond the weights."""
    unit = HamiltonianUnit(2, N, network=network, norm=norm, **options)
    saved = {}
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.update({t.untyped_storage().data_ptr(): t}) or t, id
    )
    own = [tuple(p.shape) for p in unit.parameters()]
    with hooks:
        unit(torch.randn(2, 2, 5, 5, requires_grad=True))
    return sum(t.numel() for t in saved.values() if t.ndim == 4 and tuple(t.shape) not in own)


@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("norm", ["none", "inside"])
def test_memory_grows_with_the_root_of_the_depth_by_default(network, norm, no_room):
    shallow, deep = kept(64, network, norm), kept(256, network, norm)
    assert 0 < shallow < deep <= 2.2 * shallow
    stored = [kept(N, network, norm, backprop="stored") for N in (64, 256)]
    assert stored[1] >= 3.9 * stored[0] > 20 * shallow


def test_states_are_stored_as_long_as_they_take_a_32nd_of_the_memory(monkeypatch):
    unit, y = HamiltonianUnit(4, 10, network="h2"), torch.empty(3, 4, 5, 6)
    needed = units.IMAGES * 10 * y.numel() * 4
    for limit, way in ((needed, "stored"), (needed - 1, "checkpoint")):
        monkeypatch.setattr(dispatch, "stored_limit", lambda device, limit=limit: limit)
        assert unit._chosen_backprop(y, F32) == way
    monkeypatch.undo()
    assert 2**24 < dispatch.stored_limit(torch.device("cpu")) < 2**40
    for asked in ("stored", "checkpoint", "reversible"):
        with hdnn.engine.use(backprop=asked):
            assert unit._chosen_backprop(y, F32) == asked
            assert HamiltonianUnit(4, 1, backprop="stored")._chosen_backprop(y, F32) == "stored"
    with hdnn.engine.use(backprop="reversible"), pytest.raises(HDNNError, match="no explicit inv"):
        HamiltonianUnit(4, 1)(y)


# Segments that are run again


@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("norm", ["none", "inside", "both"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_segment_that_is_run_again_is_the_same(network, norm, autocast, no_room):
    options = {"network": network, "norm": norm, "drop": 0.4, "step": 0.5}
    unit, found = HamiltonianUnit(4, 17, **options), []
    y, g = torch.randn(2, 5, 4, 3, 3).unbind()
    state = {k: v.clone() for k, v in unit.state_dict().items()}
    for unit.backprop in ("auto", "stored"):
        unit.load_state_dict(state)
        torch.manual_seed(1)  # which images go without which layers
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = unit(y.requires_grad_())
        grads = torch.autograd.grad(out, [y, *unit.parameters()], g)
        found.append([out, *grads, *(v.clone() for v in unit.state_dict().values())])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("norm", ["none", "inside"])
def test_gradients_of_gradients_through_segments_are_right(network, norm, no_room):
    options = {"network": network, "norm": norm, "activation": "tanh", "dtype": F64}
    unit = HamiltonianUnit(2, 5, step=0.3, generator=torch.Generator().manual_seed(0), **options)
    y = torch.randn(2, 2, 2, 2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(unit, (y,))


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_units_that_save_memory_can_be_transformed(network, no_room):
    unit = HamiltonianUnit(2, 5, network=network, step=0.3, activation="tanh", dtype=F64)
    ys = torch.randn(3, 2, 2, 2, 2, dtype=F64)
    stack = torch.stack([unit(y) for y in ys])
    torch.testing.assert_close(torch.func.vmap(unit)(ys), stack)
    weights = dict(unit.named_parameters())
    grads = torch.func.grad(lambda w: torch.func.functional_call(unit, w, ys[0]).sum())(weights)
    wanted = torch.autograd.grad(unit(ys[0]).sum(), list(weights.values()))
    for name, w in zip(weights, wanted, strict=True):
        torch.testing.assert_close(grads[name], w)
    jacobian = torch.autograd.functional.jacobian(unit, ys[0])
    by_vmap = torch.autograd.functional.jacobian(unit, ys[0], vectorize=True)
    torch.testing.assert_close(by_vmap, jacobian)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("network", "dynamic"), [("h1", None), ("h2", True)])
def test_units_that_save_memory_compile_into_one_graph(network, dynamic, no_room):
    torch._dynamo.reset()
    unit = HamiltonianUnit(2, 5, network=network, norm="inside", step=0.3, dtype=F64)
    y, g = torch.randn(2, 2, 2, 2, 2, dtype=F64).unbind()
    compiled = torch.compile(unit, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for a, b in zip(
        gradients(unit, y.requires_grad_(), g, compiled), gradients(unit, y, g), strict=True
    ):
        torch.testing.assert_close(a, b)


# States that are rebuilt


def expanding(scale, dtype=F32, layers=8):
    """A reversible unit that expands the more, the larger its K."""
    generator = torch.Generator().manual_seed(0)
    options = {"network": "h2", "step": 1.0, "reversible": True, "dtype": dtype}
    unit = HamiltonianUnit(4, layers, generator=generator, **options)
    with torch.no_grad():
        for p in unit.parameters():
            p *= scale
    y, g = torch.randn(2, 2, 4, 3, 3, generator=generator, dtype=F64).to(dtype).unbind()
    return unit, y.requires_grad_(), g


def test_every_reversal_is_checked():
    unit, y, g = expanding(1.0)
    wanted = gradients(unit, y, g, lambda y: by_a_plain_loop(unit, y))
    assert furthest(gradients(unit, y, g), wanted) < 1e-4  # and no warning
    unit, y, g = expanding(1.6)
    for _ in range(5):
        with pytest.warns(ReversalWarning, match=r"off by 0\.0.* inexact; take backprop"):
            gradients(unit, y, g)
    unit, y, g = expanding(4.0)
    for _ in range(5):
        with pytest.raises(TrainingError, match=r"worthless; .*checkpoint.*smaller steps.*float64"):
            gradients(unit, y, g)
    with hdnn.engine.use(check=False):
        assert all(grad.shape for grad in gradients(unit, y, g))


def test_no_reversal_is_off_by_a_percent_without_a_word():
    wrong = 0
    for seed in range(60):
        unit, y, g = draw(seed, networks=("h2",))
        unit.backprop = "stored"
        wanted = gradients(unit, y, g)
        if not all(w.isfinite().all() and w.abs().max() < 1e30 for w in wanted):
            continue
        unit.backprop = "reversible"
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", ReversalWarning)
            try:
                found = furthest(gradients(unit, y, g), [w.double() for w in wanted])
            except TrainingError:
                wrong += 1
                continue
        wrong += bool(seen)
        assert seen or found < 0.01, (seed, unit, found)
    assert wrong >= 4


def test_small_states_beside_large_biases_are_no_drift():
    unit, y, g = expanding(0.5)
    with torch.no_grad():
        unit.b_q += 1
        unit.b_p += 1
        y *= 1e-9
        y[0] = 0
    wanted = gradients(unit, y, g, lambda y: by_a_plain_loop(unit, y))
    assert furthest(gradients(unit, y, g), wanted) < 1e-4
    unit = HamiltonianUnit(4, 3, network="h2", reversible=True)  # whose biases are 0
    zeros = torch.zeros(2, 4, 3, 3, requires_grad=True)
    assert not any(grad[1:].any() for grad in gradients(unit, zeros, 0 * g))
    assert gradients(unit, zeros[:0], g[:0])[0].shape == (0, 4, 3, 3)


def test_where_nothing_can_be_read_worthless_gradients_are_nan():
    fine, y, g = expanding(1.0)
    wanted = gradients(fine, y, g)
    broken, *_ = expanding(4.0)
    torch._dynamo.reset()
    unit = copy.deepcopy(fine)
    compiled = torch.compile(unit, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert furthest(gradients(unit, y, g, compiled), wanted) < 1e-5
        unit.load_state_dict(broken.state_dict())
        assert all(grad.isnan().all() for grad in gradients(unit, y, g, compiled))
    ys = torch.stack([y, y]).detach().requires_grad_()
    for unit in (fine, broken):
        (grad,) = torch.autograd.grad(torch.func.vmap(unit)(ys).sum(), ys)
        assert (grad.isnan() if unit is broken else grad.isfinite()).all()
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(torch.Tensor, "is_cuda", True),
    ):
        assert hdnn.engine.drift.check_reversal(torch.tensor(0.2), [g])[0].isnan().all()
        assert torch.equal(hdnn.engine.drift.check_reversal(torch.tensor(0.01), [g])[0], g)


def test_where_the_end_is_not_finite_gradients_are_nan_and_no_error():
    unit, y, g = expanding(1e12)
    assert not unit(y).isfinite().all()
    assert all(grad.isnan().all() for grad in gradients(unit, y, g))


# What comes out may be changed in place


@pytest.mark.parametrize("norm", ["none", "inside", "after"])
@pytest.mark.parametrize(
    ("network", "backprop"),
    [(n, b) for n in ("h1", "h2") for b in ("auto", "stored", "checkpoint")]
    + [("h2", "reversible")],
)
def test_what_comes_out_of_a_unit_may_be_changed_in_place(network, norm, backprop):
    unit = HamiltonianUnit(4, 5, network=network, norm=norm, backprop=backprop)
    y, g = torch.randn(2, 2, 4, 3, 3).unbind()
    y.requires_grad_()
    found = gradients(unit, y, g, nn.Sequential(unit, nn.ReLU(inplace=True)))
    wanted = gradients(unit, y, g, nn.Sequential(unit, nn.ReLU()))
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_relu_in_place_behind_a_unit_as_it_is_by_default():
    unit = HamiltonianUnit(4, 2, network="h2", step=0.1)
    nn.Sequential(unit, nn.ReLU(inplace=True))(torch.randn(2, 4, 3, 3)).sum().backward()
    assert unit.K_p.grad.any()


# Files


def test_how_gradients_come_back_is_saved_and_old_files_have_the_default(tmp_path):
    for backprop in ("auto", "stored", "checkpoint", "reversible"):
        model = models.hdnn_star("h2", 2, (4, 6), size=8, backprop=backprop)
        hdnn.save(model, tmp_path / "model.safetensors")
        again = hdnn.load(tmp_path / "model.safetensors")
        assert {unit.backprop for unit in again.units} == {backprop}
    config = model.config()
    del config["backprop"]
    for reversible in (True, False):  # as files had it before, whatever was asked for
        options = {**config, "reversible": reversible}
        described = {"kind": "HDNNStar", "config": options}
        old = serialization.restore(described, model.state_dict())
        assert {unit.backprop for unit in old.units} == {"auto"}
