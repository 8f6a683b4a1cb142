"""A stack and its gradients without autograd are those of autograd."""

import pytest
import torch

import hdnn
from hdnn.engine.direct import DirectGradients

pytest.importorskip("numba")

RING = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
NETWORKS = {
    "H1": lambda **k: hdnn.H1(6, 5, **k),
    "H1 with J": lambda **k: hdnn.H1(6, 5, J=_skew(), **k),
    "H1 learns J": lambda **k: hdnn.H1(6, 5, J=_skew(), learn_J=True, **k),
    "H2": lambda **k: hdnn.H2(6, 5, **k),
    "H2 learns X": lambda **k: hdnn.H2(6, 5, learn_X=True, **k),
    "H2 learns h": lambda **k: hdnn.H2(6, 5, learn_step=True, **k),
    "H2 tied": lambda **k: hdnn.H2(6, 5, tied=True, **k),
    "H2 in blocks": lambda **k: hdnn.H2(6, 5, sparsity=hdnn.Sparsity(RING), **k),
    "deep H2": lambda **k: hdnn.H2(2, 600, **k),
    "MS1": lambda **k: hdnn.MS1(6, 5, **k),
    "MS2": lambda **k: hdnn.MS2(6, 5, **k),
    "MS3": lambda **k: hdnn.MS3(6, 5, **k),
    "Yoshida": lambda **k: hdnn.HamiltonianNet(6, 5, "yoshida4", **k),
}


def _skew():
    A = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return A - A.mT


@pytest.mark.parametrize("name", list(NETWORKS))
def test_states_and_gradients_are_those_of_autograd(name):
    g = torch.Generator().manual_seed(0)
    net = NETWORKS[name](init="paper", T=1.0, generator=g, dtype=torch.float64)
    y, v = (torch.randn(7, net.features, generator=g, dtype=torch.float64) for _ in range(2))
    direct = DirectGradients(net)
    assert direct.usable(y)
    for _ in range(2):  # parameters change in place between steps
        y_N = direct.forward(y)
        direct.backward(v)
        found = {k: p.grad.clone() for k, p in net.named_parameters()}
        net.zero_grad()
        wanted = net(y)
        wanted.backward(v)
        torch.testing.assert_close(y_N, wanted.detach(), rtol=1e-12, atol=1e-12)
        for k, p in net.named_parameters():
            torch.testing.assert_close(found[k], p.grad, rtol=1e-10, atol=1e-12)
        net.zero_grad()
        with torch.no_grad():
            for p in net.parameters():
                p += 0.1 * torch.randn(p.shape, generator=g, dtype=torch.float64)


def test_frozen_parameters_get_no_gradient():
    net = hdnn.H2(4, 3)
    net.K_p.requires_grad_(False)
    direct = DirectGradients(net)
    direct.forward(torch.ones(2, 4))
    direct.backward(torch.ones(2, 4))
    assert net.K_p.grad is None
    assert net.K_q.grad is not None


@pytest.mark.parametrize(
    "net", [hdnn.MLP(4, 3), hdnn.ImplicitH2(4, 2), hdnn.H2(4, 3, engine="reference")]
)
def test_networks_that_run_layer_by_layer_are_left_to_autograd(net):
    assert not DirectGradients(net).usable(torch.ones(2, 4))


class Doubled(hdnn.H2):
    def forward(self, y):
        return 2 * super().forward(y)


def _shared():
    net = hdnn.H2(4, 3)
    net.K_q = net.K_p
    return net


def _with_hook(add):
    net = hdnn.H2(4, 3)
    add(net)
    return net


@pytest.mark.parametrize(
    "net",
    [
        Doubled(4, 3),
        _shared(),
        _with_hook(lambda net: net.register_forward_hook(lambda module, given, y: None)),
        _with_hook(lambda net: net.register_forward_pre_hook(lambda module, given: None)),
        _with_hook(lambda net: net.K_p.register_hook(lambda g: 2 * g)),
        _with_hook(lambda net: net.K_p.register_post_accumulate_grad_hook(lambda p: None)),
    ],
)
def test_what_is_more_than_one_call_is_left_to_autograd(net):
    assert not DirectGradients(net).usable(torch.ones(2, 4))


@pytest.mark.parametrize("y", [torch.randn(4, 7).mT, torch.randn(4).expand(6, 4)])
def test_states_may_lie_in_memory_in_any_order(y):
    net = hdnn.H2(4, 3)
    direct = DirectGradients(net)
    assert direct.usable(y)
    torch.testing.assert_close(direct.forward(y), net(y).detach())
    direct.backward(torch.ones(y.shape))
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(y).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in net.parameters()])
