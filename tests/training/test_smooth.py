"""The gradient of the smoothness by hand, against autograd."""

from __future__ import annotations

import pytest
import torch

import hdnn
from hdnn.training import small_steps
from hdnn.training.smooth import Smoothness
from strategies import Random

LIKE = {"dtype": torch.float64}
PARTS = {
    "h1 unit": lambda: hdnn.HamiltonianUnit(4, 3, step=0.3, **LIKE),
    "h2 unit": lambda: hdnn.HamiltonianUnit(4, 3, network="h2", norm="both", **LIKE),
    "steps": lambda: hdnn.HamiltonianUnit(4, 3, network="h2", step=[0.1, 0.2, 0.3], **LIKE),
    "sparse": lambda: hdnn.HamiltonianUnit(4, 3, sparsity=torch.eye(2), **LIKE),
    "one layer": lambda: hdnn.HamiltonianUnit(4, 1, **LIKE),
    "h1": lambda: hdnn.H1(4, 3, **LIKE),
    "ms2": lambda: hdnn.MS2(4, 3, step=(0.1, 0.2, 0.3), **LIKE),
    "learned": lambda: hdnn.H2(4, 3, learn_step=True, **LIKE),
}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize(
    "names", [*([name] for name in PARTS), ["h1 unit", "h2 unit"], ["steps", "sparse", "h1"]]
)
def test_the_gradient_by_hand_is_that_of_autograd(names, small, monkeypatch):
    if not small:
        monkeypatch.setattr(small_steps, "usable", lambda parameters: False)
    parts, normal = [PARTS[name]() for name in names], Random(0)
    parameters = [p for part in parts for p in part.parameters()]
    with torch.no_grad():
        for p in parameters:
            p += normal(*p.shape)
    R_K = sum(part.smoothness() for part in parts)
    wanted = torch.autograd.grad(0.7 * R_K, parameters, allow_unused=True)
    before = [normal(*p.shape) for p in parameters]
    for p, grad in zip(parameters, before, strict=True):
        p.grad = grad.clone()
    smooth = Smoothness(parts, 0.7)
    smooth.add_gradient()
    assert smooth.value() == pytest.approx(R_K.item())
    for p, old, new in zip(parameters, before, wanted, strict=True):
        expected = old if new is None else old + new
        torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-12)


def test_where_there_is_no_gradient_yet_it_is_made():
    unit = hdnn.HamiltonianUnit(4, 3, **LIKE)
    Smoothness([unit], 1.0).add_gradient()
    (wanted,) = torch.autograd.grad(unit.smoothness(), unit.K)
    torch.testing.assert_close(unit.K.grad, wanted)


def test_what_has_an_R_K_of_its_own_goes_by_autograd():
    class Own(torch.nn.Linear):
        def smoothness(self):
            return self.weight.square().sum()

    own = Own(2, 2)
    Smoothness([own], 0.5).add_gradient()
    torch.testing.assert_close(own.weight.grad, own.weight.detach())


def test_without_alpha_nothing_is_done():
    unit = hdnn.HamiltonianUnit(4, 3, **LIKE)
    Smoothness([unit], 0.0).add_gradient()
    assert unit.K.grad is None
