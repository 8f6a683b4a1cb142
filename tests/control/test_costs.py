"""Costs and certificates of closed loops."""

from __future__ import annotations

from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from closed_loops import random_loop
from hdnn import control
from hdnn.control import costs
from hdnn.control.controller import log_cosh
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


def still(dtype: torch.dtype = torch.float64, T: int = 12) -> control.ClosedLoop:
    """Two robots with controllers of one agent's size, whose weights may be changed."""
    plant = control.robots(torch.tensor([[1.0, 0.0], [-1.0, 0.5]]))
    return control.ClosedLoop(plant, control.Controller(2, T, dtype=dtype), 0.1, engine="reference")


def test_rounding_does_not_break_a_certificate():
    loop = still()
    with torch.no_grad():
        loop.controller.K.zero_()
        rises = torch.rand(loop.controller.b.shape, generator=torch.Generator().manual_seed(0))
        loop.controller.b.copy_(50 + rises.double().cumsum(0))
    certificate = loop.certify(loop.start(torch.zeros(2, 4)), samples=0)
    assert certificate.raised == pytest.approx(certificate.bound, rel=1e-13)
    assert certificate.holds
    v = torch.tensor([0.1, 0.7, -0.3]).double()
    z = torch.linalg.svd(v[None])[2][1:2] + torch.linalg.svd(v[None])[2][2:]
    none = torch.zeros(1, 3, 3).double()
    plant = control.Plant(torch.eye(3)[None], none, torch.outer(v, v)[None], torch.ones(1, 3, 1))
    alone = control.ClosedLoop(plant, control.Controller(1, 9, inputs=1), 100.0, engine="reference")
    with torch.no_grad():
        alone.controller.G.zero_()
    assert alone.certify(alone.start(100 * z), samples=0).holds


def test_loops_of_float32_are_certified_by_their_own_rounding():
    loop = still(torch.float32, T=5)
    certificate = loop.certify(loop.start(torch.ones(3, 2, 4)), samples=0)
    assert certificate.holds
    assert certificate.violation > 1e-12
    assert certificate.rounding < 1e-3


def test_a_certificate_fails_and_says_why_where_energy_grows():
    loop = still(T=3)
    y = loop.start(torch.ones(2, 4))
    good = loop.certify(y, samples=0)
    assert good.holds
    assert "so that the loop is passive" in good.summary
    loop.plant.R.neg_()  # which makes energy
    growing = loop.certify(y, samples=0)
    assert not growing.holds
    assert growing.dissipated < 0
    assert "does NOT hold in 3 steps from 1 state: a step made energy" in growing.summary
    for changes, clause in (
        ({"violation": 1e-9}, "differ by 1.0e-09"),
        ({"gained": 1.0, "dissipated": -2.0}, r"instead of taking it away (it took -2)"),
        ({"exceeded": 0.1, "bound": 1.0, "raised": 1.1}, "above their bound by 1.0e-01"),
    ):
        broken = replace(good, **changes)
        assert not broken.holds
        assert clause in broken.summary
        assert "passive" not in broken.summary
        assert "keeps" not in broken.summary
        assert "nothing does" not in broken.summary


@pytest.mark.parametrize(
    "name", ["violation", "dissipated", "bound", "raised", "gained", "exceeded"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_computed_is_never_certified(name, value):
    certificate = still(T=1).certify(torch.zeros(2, 8), samples=0)
    assert certificate.holds
    assert certificate.summary.startswith("The only step from 1 state keeps")
    broken = replace(certificate, **{name: value})
    assert not broken.holds
    assert "could not be computed" in broken.summary
    assert "passive" not in broken.summary


def test_states_that_are_too_large_are_never_certified():
    loop = still(T=2)
    y = loop.start(torch.full((2, 4), 1e200, dtype=torch.float64))
    balance = loop.balance(y)
    assert bool(balance.violation.isnan().any())
    assert not loop.certify(y, samples=0).holds


def test_no_state_is_no_certificate():
    loop = still(T=2)
    with pytest.raises(ShapeError, match=r"needs a state at least, but y is \(0, 2, 8\)"):
        loop.certify(torch.zeros(0, 2, 8))


def test_log_cosh_is_right_to_its_last_digits_and_in_two_derivatives():
    x = torch.tensor(
        [-700.0, -1.0, -0.3, -1e-9, 0.0, 1e-20, 1e-5, 0.999, 1.0, 1.5, 400.0], dtype=torch.float64
    )
    x.requires_grad_()
    with mpmath.workdps(80):
        exact = [float(mpmath.log(mpmath.cosh(mpmath.mpf(v)))) for v in x.tolist()]
    assert log_cosh(x).tolist() == pytest.approx(exact, rel=4e-16, abs=0)
    (slope,) = torch.autograd.grad(log_cosh(x).sum(), x, create_graph=True)
    assert torch.allclose(slope, x.tanh(), rtol=1e-14, atol=0)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    assert torch.allclose(bend, 1 - x.tanh().square(), rtol=1e-14, atol=1e-15)
    some = torch.tensor([-2.0, -0.5, 0.0, 0.7, 3.0]).double().requires_grad_()
    assert torch.autograd.gradgradcheck(log_cosh, some)


def test_agents_whose_distance_is_nan_collide():
    y = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).expand(2, 3, 2, 2).clone()
    y[1, 1, 0, 0] = torch.nan
    assert costs.collisions(y).tolist() == [False, True, False]
    assert bool(costs.barrier(y, step=0.1).isnan())
    with pytest.raises(DataError, match="agents 0 and 1 start where their distance is NaN"):
        costs.check_apart(y[1])


@given(st.integers(1, 30), st.integers(1, 3), st.integers(0, 10**6))
def test_the_nearest_of_each_agent_is_found_without_looking_at_all(agents, dimensions, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(4, agents, dimensions + 1, generator=generator, dtype=torch.float64)
    found = costs.nearest(q, dimensions=dimensions)
    apart = (q[..., None, :, :dimensions] - q[..., :, None, :dimensions]).norm(dim=-1)
    apart[..., range(agents), range(agents)] = torch.inf
    assert torch.allclose(found, apart.amin(-1), rtol=1e-14, atol=0)
    distance = 1.001 * float(apart.flatten().quantile(0.2)) if agents > 1 else 1.0
    hit = costs.colliding(q, distance, dimensions=dimensions)
    assert torch.equal(hit, (apart < distance).any(-1))
    every = [(i, k) for i in range(agents) for k in range(i)]
    alike = costs.collisions(q[None], distance, dimensions=dimensions, pairs=every)
    assert torch.equal(costs.collisions(q[None], distance, dimensions=dimensions), alike)


def test_agents_beside_one_that_is_nowhere_collide_whatever_their_order():
    for value in (torch.nan, torch.inf):
        for agent in range(3):
            for axis in range(2):
                y = torch.tensor([[0.0, 0.0], [3.0, 0.0], [6.0, 0.0]]).expand(2, 3, 2).clone()
                y[1, agent, axis] = value
                assert bool(costs.nearest(y)[1].isnan().all())
                assert costs.colliding(y).tolist() == [[False] * 3, [True] * 3]
    assert costs.colliding(torch.full((1, 2), torch.nan)).tolist() == [False]
    assert costs.colliding(torch.zeros(3, 0, 2)).shape == (3, 0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_nowhere_collides_whether_pairs_are_named_or_not(value):
    y = torch.tensor([[0.0, 0.0], [3.0, 0.0], [6.0, 0.0]]).expand(2, 4, 3, 2).clone()
    y[1, 1, 0, 1] = value
    y[0, 2, 2, 0] = value
    y[1, 3, :, 0] = value
    every = [(0, 1), (0, 2), (1, 2)]
    assert costs.collisions(y).tolist() == [False, True, True, True]
    assert costs.collisions(y, pairs=every).tolist() == [False, True, True, True]
    assert costs.collisions(y, pairs=[(1, 2)]).tolist() == [False, False, True, True]
    with pytest.raises(DataError, match="start where their distance is NaN"):
        costs.check_apart(y[1])
    alone = torch.full((2, 1, 1, 2), value)
    assert costs.nearest(alone).tolist() == [[[torch.inf]]] * 2
    for pairs in (None, []):
        assert costs.collisions(alone, pairs=pairs).tolist() == [False]


def test_states_that_are_no_real_numbers_are_refused():
    for dtype in (torch.int64, torch.bool, torch.complex128, torch.uint8):
        y = torch.zeros(2, 1, 3, 4, dtype=dtype)
        for cost in (
            costs.collisions,
            lambda y: costs.collisions(y, pairs=[(0, 1)]),
            costs.colliding,
            costs.nearest,
            costs.check_apart,
            lambda y: costs.barrier(y, step=0.1),
        ):
            with pytest.raises(
                ShapeError, match=f"floating-point numbers, but are {str(dtype)[6:]}"
            ):
                cost(y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_overflow(dtype):
    y = torch.tensor([[-300.0, 0.0], [300.0, 0.0]]).to(dtype)  # 600 squared is above 65504
    assert costs.nearest(y).tolist() == [float(y[1, 0] - y[0, 0])] * 2
    assert costs.collisions(y[None, None], 700.0).tolist() == [True]
    assert costs.collisions(y[None, None], 700.0, pairs=[(0, 1)]).tolist() == [True]


def test_positions_and_pairs_that_are_not_there_are_refused():
    y = torch.zeros(2, 1, 3, 4)
    for dimensions in (0, -1, 2.0, None):
        with pytest.raises(ShapeError, match="dimensions must be a whole number >= 1"):
            costs.collisions(y, dimensions=dimensions)  # pyright: ignore[reportArgumentType]
    for cost in (costs.collisions, costs.check_apart, costs.nearest, costs.colliding):
        with pytest.raises(ShapeError, match="an agent has 4 states here, so that 99 of them"):
            cost(y, dimensions=99)
    for pairs in (
        [(0, 3)],
        [(-1, 0)],
        [(0, 0)],
        [(0, 1, 2)],
        [(0, 1), 2],
        5,
        [(0.5, 1.0)],
        [(0, 10**30)],
    ):
        for cost in (costs.collisions, lambda y, **more: costs.barrier(y, step=0.1, **more)):
            with pytest.raises(ShapeError, match=r"two of the agents 0 \.\. 2, but got"):
                cost(y, pairs=pairs)  # pyright: ignore[reportArgumentType]
    assert costs.collisions(y, pairs=[]).tolist() == [False]
    assert costs.collisions(y, pairs=[[2, 0]]).tolist() == [True]  # pyright: ignore[reportArgumentType]
    for states in (torch.zeros(4), [[0.0]]):
        with pytest.raises(ShapeError, match=r"trajectory must be a tensor \(steps \+ 1, \*batch"):
            costs.collisions(states)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ShapeError, match=r"trajectory must be a tensor \(steps \+ 1, \*batch"):
            costs.barrier(states, step=0.1)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ShapeError, match=r"states must be a tensor \(\*batch, N, n\)"):
            costs.check_apart(states)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ShapeError, match=r"states must be a tensor \(\*batch, N, n\)"):
            costs.nearest(states)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ShapeError, match=r"inputs must be a tensor \(steps, \*batch, N, m\)"):
            costs.effort(states, step=0.1)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ShapeError, match="trajectory must be a tensor"):
            costs.tracking(states, torch.zeros(3, 2), step=0.1)  # pyright: ignore[reportArgumentType]
    for k in (0, 5):
        with pytest.raises(ShapeError, match=r"for the first k of its 4 states, but are \(3,"):
            costs.tracking(y, torch.zeros(3, k), step=0.1)
    with pytest.raises(ShapeError, match=r"targets must be a tensor \(3, k\)"):
        costs.tracking(y, None, step=0.1)  # pyright: ignore[reportArgumentType]
