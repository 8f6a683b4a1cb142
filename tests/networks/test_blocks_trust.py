"""Stacks of modules that are not as tame as they should be: right gradients, or an error."""

import collections
import random

import pytest
import torch
from torch import nn

import hdnn
from hdnn.engine.drift import ReversalWarning
from hdnn.errors import TrainingError

D = 3
WAYS = [("stored", "float"), ("checkpoint", "float"), ("reversible", "float")]
WAYS += [("reversible", "fixed")]
every_way = pytest.mark.parametrize(("backprop", "state"), WAYS)
undone = pytest.mark.parametrize("state", ["float", "fixed"])


def stack(make, count=4, **how):
    torch.manual_seed(0)
    return hdnn.Reversible([hdnn.Coupling(make(), None) for _ in range(count)], **how).double()


def state_of(*scales):
    torch.manual_seed(1)
    halves = [scale * torch.randn(5, D, dtype=torch.float64) for scale in scales or (1, 1)]
    return torch.cat(halves, -1).requires_grad_()


def gradients(net, y):
    return torch.autograd.grad(net(y).square().sum(), [y, *net.parameters()])


@pytest.mark.parametrize("scale", [1e6, 1e7])
def test_a_large_half_does_not_hide_what_was_lost_of_the_other(scale):
    torch.manual_seed(0)
    F = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D))
    net = hdnn.Reversible([hdnn.Leapfrog(F)], backprop="reversible")
    y = state_of(scale, 1).detach().float().requires_grad_()
    with pytest.raises((TrainingError, ReversalWarning), match="y_0 that is off by"):
        net(y).sum().backward()


def test_a_half_that_starts_at_zero_comes_back_to_it():
    net = stack(lambda: nn.Linear(D, D), backprop="reversible").float()
    y = torch.cat([torch.zeros(5, D), 100 * torch.randn(5, D)], -1).requires_grad_()
    net(y).sum().backward()  # without a warning, which would be an error here
    (wanted,) = torch.autograd.grad(stack(lambda: nn.Linear(D, D)).float()(y).sum(), y)
    torch.testing.assert_close(y.grad, wanted)


class Emptied(nn.Linear):
    """Changes what its gradient is computed from, after it was used."""

    def forward(self, x):
        mask = torch.ones_like(x)
        out = super().forward(x) * mask
        mask.zero_()
        return out


@undone
def test_a_constant_that_is_changed_after_its_use_is_an_error(state):
    net = stack(lambda: Emptied(D, D), 1, backprop="reversible", state=state)
    with pytest.raises(TrainingError, match="in place"):
        net(state_of()).sum().backward()


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("backprop", ["checkpoint", "reversible"])
def test_weights_that_change_between_two_backward_passes_are_an_error(backprop, blocks):
    net = stack(lambda: nn.Linear(D, D), blocks, backprop=backprop)
    loss = net(state_of()).square().sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
    with pytest.raises((TrainingError, RuntimeError), match=r"changed|modified"):
        loss.backward()


class Other(nn.Linear):
    """Never the same twice."""

    def forward(self, x):
        return super().forward(x) * random.random()


def test_a_module_that_is_not_the_same_twice_fails_at_every_attempt():
    net = stack(lambda: Other(D, D), 1, backprop="reversible", state="fixed")
    loss = net(state_of()).square().sum()
    for _ in range(2):
        with pytest.raises(TrainingError, match="a second time"):
            loss.backward(retain_graph=True)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(5, D)) for _ in range(2))

    def forward(self, x):
        return x * self.a + x.tanh() * self.b


@every_way
def test_what_is_frozen_after_the_forward_pass_changes_no_gradient(backprop, state):
    net = stack(Two, backprop=backprop, state=state)
    y, found = state_of(), []
    for swap in (False, True):
        for block in net:
            block.F.a.requires_grad_(True)
            block.F.b.requires_grad_(False)
        loss = net(y).square().sum()
        if swap:
            for block in net:
                block.F.a.requires_grad_(False)
                block.F.b.requires_grad_(True)
        found.append(torch.autograd.grad(loss, y)[0])
    torch.testing.assert_close(*found)
    assert all(block.F.b.requires_grad and not block.F.a.requires_grad for block in net)


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(D, D)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


@every_way
def test_a_counter_in_a_buffer_counts_once(backprop, state):
    net = stack(Counting, backprop=backprop, state=state)
    net(state_of()).square().sum().backward()
    assert [float(block.F.calls) for block in net] == [1.0] * 4


class Aside(nn.Linear):
    """Draws random numbers and puts the generator back."""

    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            noise = torch.rand_like(x)
        return super().forward(x) * noise


class Seeded(nn.Linear):
    def forward(self, x):
        torch.manual_seed(5)
        return nn.functional.dropout(super().forward(x), 0.5)


@pytest.mark.parametrize("make", [Aside, Seeded])
@every_way
def test_modules_may_treat_the_generator_as_they_like(make, backprop, state):
    wanted = gradients(stack(lambda: make(D, D)), _seeded(state_of()))
    net, y = stack(lambda: make(D, D), backprop=backprop, state=state), _seeded(state_of())
    loss = net(y).square().sum()
    torch.rand(7)  # others draw in between
    before = torch.get_rng_state()
    found = torch.autograd.grad(loss, [y, *net.parameters()])
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def _seeded(y):
    torch.manual_seed(3)
    return y


class Clamped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@every_way
def test_modules_may_clamp_their_own_weights(backprop, state):
    wanted = gradients(stack(lambda: Clamped(D, D)), state_of())
    found = gradients(stack(lambda: Clamped(D, D), backprop=backprop, state=state), state_of())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


class Options(collections.OrderedDict):
    def __getattr__(self, name):
        return self[name]


class Listed(list):
    def __init__(self, first, second):
        super().__init__([first, second])


class Scaled(nn.Linear):
    def forward(self, x, options, listed):
        return super().forward(x) * options.c + listed[1]


@every_way
def test_arguments_may_come_in_containers_of_any_class(backprop, state):
    c = torch.ones(D, dtype=torch.float64, requires_grad=True)
    net, y = stack(lambda: Scaled(D, D), backprop=backprop, state=state), state_of()
    out = net(y, Options(c=c), Listed(2, c.detach()))
    (found,) = torch.autograd.grad(out.square().sum(), c)
    plain = stack(lambda: Scaled(D, D))(y, Options(c=c), Listed(2, c.detach()))
    torch.testing.assert_close(found, torch.autograd.grad(plain.square().sum(), c)[0])
