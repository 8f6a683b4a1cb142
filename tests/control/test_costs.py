"""Costs and certificates of closed loops."""

from __future__ import annotations

import pytest
import torch

from closed_loops import random_loop
from hdnn import control
from hdnn.control import costs
from hdnn.errors import DataError, OptionError, ShapeError, StepError


def test_tracking_discounts_what_is_far_from_the_end():
    x = torch.zeros(3, 2, 1, 4).double()
    x[0], x[2, 0, 0, 1] = 1.0, 2.0
    found = costs.tracking(x, torch.zeros(1, 2), step=0.5, discount=0.5)
    assert float(found) == pytest.approx(0.5 * (0.5**1.0 * 2 + (4 + 0) / 2))


def test_effort_is_the_square_of_the_inputs():
    u = torch.arange(8.0).view(2, 2, 1, 2)
    assert float(costs.effort(u, step=0.1)) == pytest.approx(0.1 * float((u**2).sum()) / 2)


def test_the_barrier_is_paid_below_its_distance_only_and_pushes_apart():
    y = torch.tensor([[0.0, 0.0], [0.5, 0.0], [5.0, 0.0]]).double().view(1, 1, 3, 2)
    y = y.clone().requires_grad_()
    found = costs.barrier(y, step=1.0)
    assert float(found.detach()) == pytest.approx(1 / 0.251 - 1 / 0.491)
    (slope,) = torch.autograd.grad(found, y)
    assert slope[0, 0, 0, 0] > 0 > slope[0, 0, 1, 0]
    assert slope[0, 0, 2].tolist() == [0, 0]
    assert float(costs.barrier(y.detach(), step=1.0, pairs=[(0, 2), (1, 2)])) == 0


def test_collisions_are_found_at_any_time():
    y = torch.zeros(4, 2, 2, 3)
    y[:, :, 1, 0] = 2.0
    y[2, 1, 1, 0] = 0.4
    assert costs.collisions(y).tolist() == [False, True]
    assert costs.collisions(y, 0.3).tolist() == [False, False]


def test_smoothness_adds_up_all_changes():
    controller = control.Controller(1, 3, states=2)
    assert float(costs.smoothness(controller).detach()) == 0
    with torch.no_grad():
        controller.K[1] += 1
        controller.b[2] += 2
    assert float(costs.smoothness(controller).detach()) == pytest.approx(2 * 4 + 2 * 4)


def test_bad_costs_are_refused_in_a_sentence():
    y = torch.zeros(2, 1, 2, 4)
    with pytest.raises(DataError, match=r"agents 0 and 2 start in a collision: they are 0.3 apart"):
        costs.check_apart(torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 0.3]]]))
    with pytest.raises(OptionError, match="discount must be above 0 and at most 1"):
        costs.tracking(y, torch.zeros(2, 2), step=0.1, discount=1.5)
    with pytest.raises(ShapeError, match=r"targets must be \(2, k\)"):
        costs.tracking(y, torch.zeros(3, 2), step=0.1)
    with pytest.raises(StepError, match="step must be finite and > 0"):
        costs.effort(y, step=0.0)
    with pytest.raises(StepError, match="distance must be finite and > 0"):
        costs.collisions(y, -1.0)


def test_a_certificate_says_what_new_weights_can_do():
    loop, normal = random_loop(0, 3, 1.0, 0.1, T=4)
    y = normal(2, 3, 7)
    certificate = loop.certify(y, horizons=3)
    assert certificate.holds
    assert certificate.steps == 12
    assert certificate.samples == 2
    assert 0 < certificate.raised <= certificate.bound
    assert "New weights can raise the energy" in str(certificate)
    with torch.no_grad():
        for p in (loop.controller.K, loop.controller.b):
            p.copy_(p[:1].expand_as(p))
    same = loop.certify(y)
    assert same.bound == same.raised == 0
    assert "The weights stay the same" in same.summary


def test_the_norms_of_a_certificate_are_those_of_the_jacobian():
    loop, normal = random_loop(1, 2, 0.8, 0.2, T=3)
    y = normal(2, 7)
    jacobians = []
    for t in range(3):
        start = loop.run(y, t)[0][-1].detach() if t else y
        J = torch.autograd.functional.jacobian(lambda x, t=t: loop.run(x, 3 - t, t)[0][-1], start)
        jacobians.append(float(torch.linalg.matrix_norm(J.reshape(14, 14), 2)))
    certificate = loop.certify(y)
    assert certificate.smallest_norm == pytest.approx(min(jacobians), rel=1e-10)
    assert certificate.largest_norm == pytest.approx(max(jacobians), rel=1e-10)
    none = loop.certify(y, samples=0)
    assert none.smallest_norm is None
    assert "were not computed" in none.summary
