"""Weights that something else computes: pruned, normalised, parametrised, or by a hook."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.utils import parametrize, prune

import hdnn
from hdnn import analysis
from strategies import Random

F64 = torch.float64


class Doubled(torch.nn.Module):
    def forward(self, K):
        return 2 * K


def pruned(net, name):
    prune.l1_unstructured(net, name, 0.5)
    return f"{name}_orig"


def normed(net, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(net, name)
    return f"{name}_v"


def spectral(net, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.spectral_norm(net.eval(), name)
    return f"{name}_orig"


def parametrised(net, name):
    parametrize.register_parametrization(net, name, Doubled())
    return f"parametrizations.{name}.original"


def hooked(net, name):
    raw = torch.nn.Parameter(net.get_parameter(name).detach().clone())
    delattr(net, name)
    net.register_parameter(f"{name}_raw", raw)
    setattr(net, name, raw.detach())
    net.register_forward_pre_hook(lambda net, y: setattr(net, name, 2 * raw_of(net, name)))
    return f"{name}_raw"


def raw_of(net, name):
    return net.get_parameter(f"{name}_raw")


COMPUTED = [pruned, normed, spectral, parametrised, hooked]


@pytest.mark.parametrize("how", COMPUTED)
@pytest.mark.parametrize(("kind", "name"), [("H2", "K_p"), ("MS2", "K_upper"), ("H1", "K")])
def test_all_that_reads_weights_sees_what_forward_sees(how, kind, name):
    make_ = {"H2": hdnn.H2, "MS2": hdnn.MS2, "H1": hdnn.H1}[kind]
    net, y = make_(4, 3, dtype=F64, generator=torch.Generator().manual_seed(0)), Random(0)(5, 4)
    parameter = how(net, name)
    net(y)
    with torch.no_grad():
        net.get_parameter(parameter)[0] *= 3  # as a step of an optimiser does, in place
    alone, found = y, net.trajectory(y)
    for j in range(3):
        alone = net.layer(alone, j)
    weights = {k: v for k, v in net.weights().items() if isinstance(v, torch.Tensor)}
    certified = analysis.certify(net, y)
    looked = analysis.GradientMonitor(net, y).look()
    back = net.inverse(net(y)) if net.invertible else y
    torch.testing.assert_close(net(y), found[-1])
    torch.testing.assert_close(net(y), alone)
    torch.testing.assert_close(back, y)
    after = net.weights()  # those that forward has just used
    for key, value in weights.items():
        torch.testing.assert_close(value, after[key])
    plain = make_(4, 3, dtype=F64)
    for key in plain.stacked:
        plain.assign(key, net.weight(key).detach())
    expected = analysis.certify(plain, y)
    assert certified.smallest_norm == pytest.approx(expected.smallest_norm, rel=1e-12)
    assert certified.largest_norm == pytest.approx(expected.largest_norm, rel=1e-12)
    assert looked.largest == pytest.approx(expected.by_layer["largest"], rel=1e-9)
    assert certified.guaranteed  # for any weights, whoever computes them


def test_observers_of_a_network_are_left_alone():
    net, seen = hdnn.H2(4, 3), []
    pruned(net, "K_p")
    net.register_forward_pre_hook(lambda net, y: seen.append(y))
    net.trajectory(torch.ones(4))
    net.weights()
    assert seen == []


def test_pruned_weights_have_gradients_in_all_that_reads_them():
    net, y = hdnn.H2(4, 3, dtype=F64), Random(0)(5, 4)
    pruned(net, "K_q")
    by_states = torch.autograd.grad(net.trajectory(y)[-1].sum(), net.K_q_orig)[0]
    by_call = torch.autograd.grad(net(y).sum(), net.K_q_orig)[0]
    torch.testing.assert_close(by_states, by_call)


def test_a_pruned_unit_has_the_trajectory_of_its_forward_pass():
    unit = hdnn.HamiltonianUnit(4, 3, network="h2", step=0.3, dtype=F64)
    y = Random(0)(2, 4, 5, 5)
    pruned(unit, "K_p")
    unit(y)
    with torch.no_grad():
        unit.K_p_orig.mul_(3)
    states = unit.trajectory(y)
    torch.testing.assert_close(unit(y), states[-1])
    torch.testing.assert_close(unit.inverse(states[-1]), y)
