"""Single layers: views to look at and to run, and layers that are frozen or have their own rate."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hdnn
from hdnn.errors import HDNNError, LayerIndexError
from law.test_contract import NETWORKS, RING, state

NETS = {name: partial(make, dtype=torch.float64) for name, make in NETWORKS.items()}
UNTIED = [name for name in NETS if "tied" not in name]
UNITS = {
    "h1": partial(hdnn.HamiltonianUnit, 4, 5, activation="tanh", dtype=torch.float64),
    "h2 sparse": partial(
        hdnn.HamiltonianUnit, 6, 5, network="h2", sparsity=RING, step=[0.1, 0.2, 0.3, 0.4, 0.5]
    ),
    "h2 normed": partial(hdnn.HamiltonianUnit, 4, 5, network="h2", norm="inside"),
}


# Views


@pytest.mark.parametrize("name", NETS)
def test_layers_run_as_the_network_does(name):
    net = NETS[name]()
    y = state(net, 4)
    path = net.trajectory(y)
    assert len(net) == len([*net]) == net.layers == 3
    for j, layer in enumerate(net):
        torch.testing.assert_close(layer(path[j]), path[j + 1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net[1:](path[1]), path[-1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net[:2].trajectory(y), path[:3], rtol=1e-12, atol=1e-12)
    assert torch.equal(net[2:2](y), y)
    assert torch.equal(net[2:2].trajectory(y), y[None])


@given(st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none(), st.integers(1, 4))
def test_slices_are_those_of_a_list_of_layers(start, stop, step):
    net, part = hdnn.H2(4, 5), slice(start, stop, step)
    expected = [*range(5)][part]
    assert [layer.index for layer in net[part]] == expected
    assert len(net[part]) == len(expected)
    y = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    out = y
    for j in expected:
        out = net.layer(out, j)
    torch.testing.assert_close(net[part](y), out)


def test_a_layer_is_a_view_of_the_stack():
    net = hdnn.H2(4, 3, step=[0.1, 0.2, 0.3])
    with torch.no_grad():
        net[-1].b_p.fill_(7)
        net[:2].K_q.zero_()
    assert torch.equal(net.b_p[2], torch.full((2,), 7.0))
    assert not net.K_q[:2].any()
    assert net[1].K_p.data_ptr() == net.K_p[1].data_ptr()
    assert net[1].K_p.shape == (2, 2)
    assert net[0:2].K_p.shape == (2, 2, 2)
    assert (net[1].h, net[1:].h, net[1:][0].index) == (0.2, (0.2, 0.3), 1)
    assert "K_p" in dir(net[0])
    assert repr(net[1]) == "Layer(1 of 3: K_p (2, 2), K_q (2, 2), b_p (2,), b_q (2,), h = 0.2)"
    assert repr(net[1:]).startswith("Layers(1 .. 2 of H2(4 features")
    net[1].K_p.sum().backward()
    assert net.K_p.grad[1].eq(1).all()
    assert hdnn.H2(4, 3, learn_step=True)[1].h.item() == pytest.approx(0.8)
    assert hdnn.MLP(4, 2)[np.int64(1)].K.shape == (4, 4)
    assert hdnn.H2(4, 3, tied=True)[2].K_p.shape == (2, 2)


@pytest.mark.parametrize("j", [3, -4, 100])
def test_a_layer_out_of_range_is_an_index_error(j):
    with pytest.raises(LayerIndexError, match=f"layer {j} is not there: there are -3 .. 2") as info:
        hdnn.H2(4, 3)[j]
    assert isinstance(info.value, IndexError)


@pytest.mark.parametrize(("j", "words"), [("K", "by its index"), (True, "True"), (1.0, "1.0")])
def test_what_is_no_index_is_refused(j, words):
    with pytest.raises(HDNNError, match=words):
        hdnn.H2(4, 3)[j]


def test_wrong_uses_of_a_view_say_what_to_do():
    net = hdnn.H2(4, 3)
    with pytest.raises(AttributeError, match="copy_"):
        net[0].K_p = torch.zeros(2, 2)
    with pytest.raises(AttributeError, match="has K_p, K_q, b_p, b_q"):
        _ = net[0].K
    with pytest.raises(AttributeError, match="no attribute 'h'"):
        _ = hdnn.MLP(4, 3)[0].h
    with pytest.raises(HDNNError, match="forwards"):
        net[::-1]
    assert repr(hdnn.MLP(4, 2)[0]) == "Layer(0 of 2: K (4, 4), b (4,))"
    assert repr(net[3:]).startswith("Layers(none of")
    with pytest.raises(LayerIndexError, match="there are none"):
        net[3:][0]


@pytest.mark.parametrize("name", UNITS)
def test_layers_of_units_run_as_the_unit_does(name):
    unit = UNITS[name](dtype=torch.float64).eval()
    y = torch.randn(2, unit.channels, 4, 4, dtype=torch.float64)
    path = unit.trajectory(y)
    for j, layer in enumerate(unit):
        torch.testing.assert_close(layer(path[j]), path[j + 1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(unit[1:4].trajectory(path[1]), path[1:5], rtol=1e-12, atol=1e-12)
    names = [n for n in ("K", "K_q") if n in unit.names_by_layer()]
    assert getattr(unit[2], names[0]).shape == unit.weight(names[0]).shape[1:]


# Frozen layers and rates


OPTIMIZERS = {
    "Adam with decay": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}


def by_layer(net) -> dict[str, torch.Tensor]:
    """All that layers have of their own, (N, ...), apart from the network."""
    named = {name: net.weight(name).detach().clone() for name in net.names_by_layer()}
    if getattr(net, "learn_step", False):
        named["h"] = net.h.detach().clone()
    return named


def trained(net, y, make=OPTIMIZERS["AdamW"], steps=3):
    """The weights before and after some steps."""
    before = by_layer(net)
    optimizer = make(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        net(y).square().sum().backward()
        optimizer.step()
    return before, by_layer(net)


@pytest.mark.parametrize("name", UNTIED)
def test_frozen_layers_do_not_move_and_others_do(name):
    net = NETS[name]()
    y, out = state(net, 4), net(state(net, 4))
    net.freeze([0, -1])
    assert net.frozen == (0, 2)
    assert torch.equal(net(y), out)
    before, after = trained(net, y)
    for key, value in before.items():
        assert torch.equal(value[[0, 2]], after[key][[0, 2]]), key
        assert not torch.equal(value[1], after[key][1]), key
    net.unfreeze()
    assert net.frozen == ()
    assert [*dict(net.named_parameters())] == [*dict(NETS[name]().named_parameters())]
    before, after = trained(net, y)
    assert all(not torch.equal(before[key][j], after[key][j]) for key in before for j in range(3))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_no_optimiser_moves_a_frozen_layer(make):
    net = hdnn.H2(4, 5)
    net.freeze(slice(1, 4))
    before, after = trained(net, torch.randn(8, 4), make, steps=5)
    for key, value in before.items():
        assert torch.equal(value[1:4], after[key][1:4])
        assert not torch.equal(value[0], after[key][0])


@pytest.mark.parametrize("name", UNITS)
def test_frozen_layers_of_units_do_not_move(name):
    unit = UNITS[name](dtype=torch.float64)
    unit.freeze([1, 2])
    before, after = trained(unit, torch.randn(3, unit.channels, 4, 4, dtype=torch.float64))
    for key, value in before.items():
        assert torch.equal(value[1:3], after[key][1:3]), key
        assert not torch.equal(value[0], after[key][0]), key
    assert unit.eval().guarantee().why


def test_freezing_all_and_some_can_be_taken_back_and_repeated():
    net = hdnn.H2(4, 4)
    net.freeze()
    assert not any(p.requires_grad for p in net.parameters())
    net.unfreeze(2)
    assert net.frozen == (0, 1, 3)
    net.unfreeze([0, 1])
    net.freeze(net[:2])
    net.freeze(net[3])
    net.freeze(np.arange(2))
    net.freeze(torch.tensor([0, 1]))
    assert net.frozen == (0, 1, 3)
    assert "layers 0..1, 3 frozen" in repr(net)
    twin = copy.deepcopy(net)
    twin.unfreeze()
    assert torch.equal(net.K_p, twin.K_p)
    assert all(p.requires_grad for p in twin.parameters())
    assert type(twin) is hdnn.H2
    net.reset_parameters(torch.Generator().manual_seed(1))
    assert torch.equal(net.K_p, hdnn.H2(4, 4, generator=torch.Generator().manual_seed(1)).K_p)


def test_weights_that_were_not_trained_stay_so():
    net = hdnn.H2(4, 3)
    net.b_p.requires_grad_(False)
    net.freeze(0)
    net.unfreeze()
    assert [n for n, p in net.named_parameters() if not p.requires_grad] == ["b_p"]


def test_shared_and_tied_weights():
    net = hdnn.H2(6, 3, learn_X=True)
    net.freeze([0, 1, 2])
    assert [n for n, p in net.named_parameters() if p.requires_grad] == ["X"]
    tied = hdnn.H2(6, 3, tied=True)
    with pytest.raises(HDNNError, match="tied layers share one set"):
        tied.freeze(0)
    with pytest.raises(HDNNError, match="tied layers share one set"):
        tied.divide(0)
    tied.freeze()
    assert not tied.K_p.requires_grad


def test_what_cannot_be_frozen_is_said():
    net = hdnn.H2(4, 3)
    for wrong in (3, [0, 7], slice(0, 2, -1), "0", 1.5):
        with pytest.raises(HDNNError):
            net.freeze(wrong)
    assert net.frozen == ()
    for groups in ((0, [0, 1]), (slice(0, 0),)):
        with pytest.raises(HDNNError, match="each layer must be in one group"):
            net.divide(*groups)
    torch.nn.utils.parametrizations.weight_norm(net, "K_p")
    with pytest.raises(HDNNError, match="K_p is parametrised"):
        net.freeze(0)


@pytest.mark.parametrize("name", ["H2", "H1 sparse", "MS2", "H2 that learns X"])
def test_groups_of_layers_have_rates_of_their_own(name):
    net = NETS[name]()
    y, out = state(net, 4), net(state(net, 4))
    first, last = net.divide(0)
    assert torch.equal(net(y), out)
    assert net.layer_groups == [[0], [1, 2]]
    before = by_layer(net)
    rates = [{"params": first, "lr": 1e-3}, {"params": last, "lr": 1e-1}]
    optimizer = torch.optim.Adam(rates, lr=0)
    net(y).square().sum().backward()
    optimizer.step()
    moved = {key: (value - before[key]).abs() for key, value in by_layer(net).items()}
    for key, far in moved.items():  # the first step of Adam is as long as the rate
        if key != "h":
            assert far[0].max().item() == pytest.approx(1e-3, rel=1e-3)
            assert far[1].max().item() == pytest.approx(1e-1, rel=1e-3)
    net.freeze(1)
    assert len(net.divide(0)[1]) == 2 * len(first)
    net.unfreeze()
    assert net.divide() == [[net.get_parameter(n) for n in net._stored_by_layer()]]


def test_a_finer_network_has_the_same_layers_frozen():
    net = hdnn.H2(4, 3, learn_step=True)
    net.b_q.requires_grad_(False)
    net.freeze([0, 2])
    fine = net.refine(2)
    assert fine.frozen == (0, 1, 4, 5)
    assert not fine.b_q.requires_grad
    assert torch.equal(fine.K_p, net.K_p.repeat_interleave(2, 0))
    fine.unfreeze()
    assert [n for n, p in fine.named_parameters() if not p.requires_grad] == ["b_q"]


def test_files_hold_the_plain_weights_of_a_frozen_network(tmp_path):
    net = hdnn.HamiltonianNet(4, 3, "verlet")
    net.freeze(1)
    hdnn.save(net, tmp_path / "net.safetensors")
    loaded = hdnn.load(tmp_path / "net.safetensors")
    y = torch.randn(5, 4)
    assert torch.equal(loaded(y), net(y))
    assert loaded.frozen == ()
    assert loaded.integrator == "verlet"


def test_a_frozen_implicit_layer_is_not_scaled():
    net = hdnn.ImplicitH2(4, 2, T=20.0, init="paper")
    net.freeze(0)
    before = net.K.detach().clone()
    assert bool((net.coupling() > 0.95).all())
    net.limit_coupling()
    assert torch.equal(net.K[0], before[0])
    assert net.coupling()[1] <= 0.951


def test_weights_of_divided_layers_are_written_in_their_own_memory():
    net = hdnn.H2(4, 3)
    net.freeze(1)
    held = [p.data_ptr() for p in net.parameters()]
    value = torch.arange(12.0).reshape(3, 2, 2).double()
    net.assign("K_p", value)
    assert torch.equal(net.K_p, value.float())
    assert [p.data_ptr() for p in net.parameters()] == held


def _model(seed: int = 0) -> hdnn.Model:
    g = torch.Generator().manual_seed(seed)
    model = hdnn.Model(
        hdnn.Augment(2, 4), hdnn.H2(4, 4, generator=g), hdnn.SigmoidHead(4, generator=g)
    )
    model.net.freeze([1, 2])
    return model


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_fit_leaves_frozen_layers_alone_and_resumes_to_the_same_bits(tmp_path, optimizer):
    data = hdnn.data.planar.double_moons(seed=0)
    x, t = data.x_train[:200], data.t_train[:200]
    options = {"epochs": 3, "batch": 50, "weight_decay": 0.1, "optimizer": optimizer}
    model = _model()
    before = by_layer(model.net)
    hdnn.training.fit(model, x, t, **options)
    for key, value in by_layer(model.net).items():
        assert torch.equal(value[1:3], before[key][1:3])
        assert not torch.equal(value[0], before[key][0])

    def stop(moment):
        if moment.step == 6:
            raise KeyboardInterrupt

    again = _model()
    with pytest.raises(KeyboardInterrupt):
        hdnn.training.fit(again, x, t, folder=tmp_path, callbacks=[stop], **options)
    again = _model()
    hdnn.training.fit(again, x, t, folder=tmp_path, resume=True, **options)
    other = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 4), hdnn.SigmoidHead(4))
    with pytest.raises(HDNNError):
        hdnn.training.fit(other, x, t, folder=tmp_path, resume=True, **options)
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_frozen_network_gets_the_gradients_of_the_reference():
    net, other = (NETS["H2"](generator=torch.Generator().manual_seed(0)) for _ in range(2))
    net.freeze(1)
    y = state(net, 4)
    net(y).square().sum().backward()
    with hdnn.engine.use(engine="reference"):
        other(y).square().sum().backward()
    grads = net.parametrizations.K_p.original0.grad
    torch.testing.assert_close(grads, other.K_p.grad[[0, 2]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_are_frozen_on_every_device(device):
    with torch.device(device):
        net = hdnn.H2(6, 3, sparsity=RING, learn_step=True)
        net.freeze([0, 2])
    net.to_empty(device="cpu" if device == "meta" else device)
    net.reset_parameters()
    y = torch.randn(4, 6, device=next(net.parameters()).device)
    before, after = trained(net, y)
    for key, value in before.items():
        assert torch.equal(value[[0, 2]], after[key][[0, 2]]), key
        assert not torch.equal(value[1], after[key][1]), key


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_frozen_network_compiles_and_vmaps():
    torch._dynamo.reset()
    net = NETS["H2"]()
    net.freeze(1)
    y = state(net, 4)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(y), net(y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.func.vmap(net)(y), net(y), rtol=1e-12, atol=1e-12)
