"""Plants and controllers: what they are made of, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hdnn
from hdnn import control
from hdnn.control.links import coloured
from hdnn.control.rest import rest
from hdnn.errors import InterconnectionError, OptionError, ShapeError, SparsityError, StepError


def field(plant: control.Plant, z: torch.Tensor) -> torch.Tensor:
    """z' without inputs, in the states (N, p)."""
    f = (plant.A.mT @ ((plant.A @ z.unsqueeze(-1)) + plant.a.unsqueeze(-1))).squeeze(-1)
    moved = ((plant.J - plant.R) @ f.unsqueeze(-1)).squeeze(-1)
    for (i, k), C in zip(plant.links, plant.couplings, strict=True):
        moved[i] += C @ f[k]
        moved[k] -= C.mT @ f[i]
    return moved


def test_robots_are_pulled_to_their_targets_and_damped():
    plant = control.robots(torch.tensor([[1.0, 2.0]]), mass=2.0, spring=3.0, damping=0.5)
    q, p = torch.tensor([4.0, -1.0]).double(), torch.tensor([0.6, -0.8]).double()
    found = field(plant, torch.cat([q, p])[None])[0]
    pull = -3 * (q - torch.tensor([1.0, 2.0])) - 0.5 * p / 2
    assert torch.allclose(found, torch.cat([p / 2, pull]))
    energy = 1.5 * (q - torch.tensor([1.0, 2.0])).square().sum() + p.square().sum() / 4
    assert torch.allclose(plant.energy(torch.cat([q, p])[None]), energy)


def test_oscillators_are_masses_coupled_by_springs():
    plant = control.oscillators([(2, 0), (0, 1)], mass=2.0, spring=3.0, coupling=5.0, damping=0.4)
    q, p = torch.tensor([0.3, -0.2, 0.7]).double(), torch.tensor([1.0, 2.0, -1.0]).double()
    z = torch.zeros(3, plant.states).double()
    z[:, 0], z[:, 1] = q, p
    slots = {(0, 1): 2, (0, 2): 3} if plant.links[0] == (0, 1) else {(0, 2): 2, (0, 1): 3}
    for (i, k), slot in slots.items():
        z[i, slot] = q[i] - q[k]
    found = field(plant, z)
    force = -3 * q - 0.4 * p / 2
    force -= 5 * torch.stack([2 * q[0] - q[1] - q[2], q[1] - q[0], q[2] - q[0]])
    assert torch.allclose(found[:, 0], p / 2)
    assert torch.allclose(found[:, 1], force)
    for (i, k), slot in slots.items():
        assert torch.allclose(found[i, slot], (p[i] - p[k]) / 2)


def test_a_microgrid_follows_kirchhoff():
    grid = control.microgrid(
        [(0, 1)], capacitance=2.0, inductance=4.0, resistance=0.3, load=5.0, agents=3
    )
    z = torch.tensor([[1.0, 0.8], [3.0, 0.0], [1.0, 0.0]]).double()
    v, current = z[:, 0] / 2, 0.8 / 4
    found = field(grid, z)
    assert torch.allclose(found[:, 0], -v / 5 + torch.tensor([-current, current, 0]))
    assert torch.allclose(found[0, 1], v[0] - v[1] - 0.3 * current)
    assert found[1:, 1].tolist() == [0, 0]


@pytest.mark.parametrize("make", [control.oscillators, control.microgrid])
def test_coupled_plants_come_to_rest_by_themselves(make):
    plant = make([(0, 1), (1, 2), (2, 3), (0, 3)])
    controller = control.Controller(4, 50, inputs=1, dissipation=1.0)
    loop = control.ClosedLoop(plant, controller, 0.2)
    z = torch.zeros(4, plant.states)
    z[0, 1 if make is control.oscillators else 0] = 1.0
    trajectory = loop(loop.start(z), horizons=10)
    energies = torch.stack([loop.energy(y, 0) for y in trajectory])
    assert bool((energies[1:] <= energies[:-1] + 1e-14).all())
    assert energies[-1] < 0.01 * energies[0]


def test_bad_plants_are_refused_in_a_sentence():
    A, J, g = torch.eye(2)[None], torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]), torch.ones(1, 2, 1)
    R = torch.zeros(1, 2, 2)
    with pytest.raises(InterconnectionError, match=r"J must be skew-symmetric .* entry of 2"):
        control.Plant(A, J.abs(), R, g)
    with pytest.raises(InterconnectionError, match=r"R must be positive semidefinite.* -1"):
        control.Plant(A, J, -A, g)
    with pytest.raises(InterconnectionError, match="R must be symmetric"):
        control.Plant(A, J, J, g)
    with pytest.raises(ShapeError, match=r"the port g must be \(N, p, m\) .* \(1, 3, 1\)"):
        control.Plant(A, J, R, torch.ones(1, 3, 1))
    with pytest.raises(ShapeError, match=r"A must be \(N, r, p\)"):
        control.Plant(A[0], J, R, g)
    with pytest.raises(ShapeError, match=r"J must be \(1, 2, 2\) like A"):
        control.Plant(A, J[0], R, g)
    with pytest.raises(ShapeError, match=r"a must be \(1, 2\) like A"):
        control.Plant(A, J, R, g, a=torch.zeros(1, 3))
    with pytest.raises(ShapeError, match="R has NaN or infinite entries"):
        control.Plant(A, J, R * torch.nan, g)
    with pytest.raises(ShapeError, match="A must be a tensor of floating-point numbers"):
        control.Plant([[1.0]], J, R, g)  # pyright: ignore[reportArgumentType]
    two = [t.expand(2, *t.shape[1:]) for t in (A, J, R, g)]
    with pytest.raises(SparsityError, match="each pair of agents once"):
        control.Plant(*two, links=[(0, 1), (1, 0)], couplings=torch.zeros(2, 2, 2))
    with pytest.raises(ShapeError, match=r"couplings must be \(1, 2, 2\), a matrix a link"):
        control.Plant(*two, links=[(0, 1)])
    with pytest.raises(ShapeError, match=r"targets must be \(N, d\)"):
        control.robots(torch.zeros(3))
    with pytest.raises(StepError, match="mass must be finite and > 0"):
        control.robots(torch.zeros(3, 2), mass=0.0)
    with pytest.raises(InterconnectionError, match="damping must be >= 0, for it takes"):
        control.robots(torch.zeros(3, 2), damping=-0.1)
    with pytest.raises(SparsityError, match=r"pairs of two of the agents 0 \.\. 1, but one is"):
        control.oscillators([(0, 1), (1, 1)])


def test_a_link_may_be_given_from_either_end():
    A, C = torch.eye(2).expand(2, 2, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    none, g = torch.zeros(2, 2, 2), torch.ones(2, 2, 1)
    one = control.Plant(A, none, none, g, links=[(1, 0)], couplings=C)
    other = control.Plant(A, none, none, g, links=[(0, 1)], couplings=-C.mT)
    assert one.links == other.links == ((0, 1),)
    assert torch.equal(one.couplings, other.couplings)


def test_links_are_pairs_a_matrix_or_a_sparsity():
    ring = torch.eye(4) + torch.eye(4).roll(1, 0) + torch.eye(4).roll(-1, 0)
    wanted = {(0, 1), (1, 2), (2, 3), (0, 3)}
    for links in (sorted(wanted), ring, ring.numpy(), hdnn.Sparsity(R=ring)):
        assert set(control.Controller(4, 2, links=links).links) == wanted
    both = hdnn.Sparsity(R=torch.eye(4), S=ring)
    assert set(control.Controller(4, 2, links=both).links) == wanted


def test_edges_of_a_colour_share_no_agent_and_the_order_is_always_the_same():
    pairs = [(i, k) for i in range(7) for k in range(i + 1, 7)]
    found = coloured(reversed(pairs))
    assert found == coloured(pairs)
    assert sorted(found) == pairs
    assert coloured([(0, 1), (1, 2), (2, 3)]) == ((0, 1), (2, 3), (1, 2))


def test_bad_controllers_are_refused_in_a_sentence():
    with pytest.raises(ShapeError, match="states must be even"):
        control.Controller(2, 3, states=3)
    with pytest.raises(ShapeError, match=r"J must be \(4, 4\), but is \(3, 3\)"):
        control.Controller(2, 3, J=torch.zeros(3, 3))
    with pytest.raises(InterconnectionError, match="J must be skew-symmetric"):
        control.Controller(2, 3, J=torch.eye(4))
    with pytest.raises(InterconnectionError, match="dissipation must be finite and >= 0"):
        control.Controller(2, 3, dissipation=-1.0)
    with pytest.raises(ShapeError, match=r"dissipation must be a number, \(4,\) or \(2, 4\)"):
        control.Controller(2, 3, dissipation=[1.0, 2.0])
    with pytest.raises(ShapeError, match="agents must be a whole number >= 1"):
        control.Controller(0, 3)
    with pytest.raises(SparsityError, match=r"but one is \(0, 2\)"):
        control.Controller(2, 3, links=[(0, 2)])
    with pytest.raises(SparsityError, match=r"links must be \(2, 2\), a row an agent"):
        control.Controller(2, 3, links=torch.eye(3))
    with pytest.raises(SparsityError, match="links must be symmetric"):
        control.Controller(2, 3, links=np.array([[1, 1], [0, 1]]))


def test_a_controller_starts_with_the_same_weights_in_all_steps_and_tells_its_sizes():
    controller = control.Controller(3, 5, links=[(0, 1)])
    assert bool((controller.K[:1] == controller.K).all())
    sizes = controller.agents, controller.steps, controller.states, controller.inputs
    assert sizes == (3, 5, 4, 2)
    assert repr(controller) == "Controller(3 agents, 5 steps, 4 states, 2 inputs, 1 link)"


def test_matrices_are_measured_by_their_own_size_and_are_finite():
    one, none, g = torch.eye(2)[None].double(), torch.zeros(1, 2, 2), torch.ones(1, 2, 1)
    with pytest.raises(InterconnectionError, match="R must be positive semidefinite"):
        control.Plant(1e8 * one, none, -9e-13 * one, g)
    with pytest.raises(InterconnectionError, match="J must be skew-symmetric"):
        control.Plant(one, 1e-13 * one, none, g)
    for value in (torch.nan, torch.inf):
        with pytest.raises(InterconnectionError, match="J has NaN or infinite entries"):
            control.Controller(1, 2, J=torch.full((4, 4), value))


def test_plants_take_links_as_controllers_do():
    A, C = torch.eye(2).expand(2, 2, 2), torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    none, g = torch.zeros(2, 2, 2), torch.ones(2, 2, 1)
    for links in (
        [[0, 1]],
        ((0, 1),),
        [np.array([0, 1])],
        [torch.tensor([0, 1])],
        torch.ones(2, 2),
    ):
        plant = control.Plant(A, none, none, g, links=links, couplings=C)  # pyright: ignore
        assert plant.links == ((0, 1),)
        assert torch.equal(plant.couplings, C.double())
    assert control.oscillators(np.ones((3, 3))).agents == 3  # pyright: ignore
    for links in (None, 5, [5], "01", [(0, 1, 2)]):
        with pytest.raises(SparsityError, match="links must be pairs"):
            control.Plant(A, none, none, g, links=links, couplings=C)  # pyright: ignore
        for make in (control.oscillators, control.microgrid):
            with pytest.raises(SparsityError, match="links must be pairs"):
                make(links)  # pyright: ignore
    with pytest.raises(ShapeError, match="too many agents"):
        control.oscillators([(0, 10**12)])


@pytest.mark.parametrize("value", ["x", None, 10**400, torch.tensor(0.1), float("nan")])
def test_losses_are_finite_numbers(value):
    with pytest.raises(StepError, match="damping must be a finite number >= 0"):
        control.robots(torch.zeros(1, 2), damping=value)
    with pytest.raises(StepError, match="damping must be a finite number >= 0"):
        control.oscillators([(0, 1)], damping=value)
    with pytest.raises(StepError, match="resistance must be a finite number >= 0"):
        control.microgrid([(0, 1)], resistance=value)


def test_controllers_refuse_other_numbers_and_sizes():
    for given in ("x", None, [[1.0], [1.0, 2.0]], torch.ones(4, dtype=torch.complex64)):
        with pytest.raises(ShapeError, match=r"dissipation must be a number, \(4,\) or \(2, 4\)"):
            control.Controller(2, 3, dissipation=given)
    for dtype in (torch.int64, "float64", torch.complex128, torch.float16, None):
        with pytest.raises(OptionError, match=r"dtype must be torch.float32 or torch.float64"):
            control.Controller(2, 3, dtype=dtype)  # pyright: ignore
    with pytest.raises(ShapeError, match="too many weights"):
        control.Controller(10**9, 10**9)


def test_energies_of_rows_are_integrals_of_their_activations_times_weights():
    names = hdnn.activations.names()
    A = torch.ones(1, len(names), 1).double()
    none, weights = torch.zeros(1, 1, 1), torch.linspace(0.5, 2, len(names))[None].double()
    a = torch.linspace(-1, 1, len(names))[None].double()
    options = {"a": a, "activation": list(names), "weights": weights}
    plant = control.Plant(A, none, none, torch.ones(1, 1, 1), **options)
    for z in (-30.0, -1.0, 0.0, 0.3, 30.0):
        rows = zip(names, (z + a)[0], weights[0], strict=True)
        wanted = sum(float(w * hdnn.activations.get(name).integral(u)) for name, u, w in rows)
        found = float(plant.energy(torch.full((1, 1), z, dtype=torch.float64)))
        assert found == pytest.approx(wanted, rel=1e-13, abs=1e-14)
        assert found >= plant.lowest
    quadratic = control.Plant(A, none, none, torch.ones(1, 1, 1), a=a, weights=weights)
    assert quadratic.weights is None  # a part of its rows
    wanted = 0.5 * (weights * (2 + a).square()).sum()
    assert torch.allclose(quadratic.energy(torch.full((1, 1), 2.0)), wanted)


@pytest.mark.parametrize("name", hdnn.activations.names())
def test_no_energy_of_a_known_activation_is_below_its_lowest(name):
    one, none = torch.ones(1, 1, 1), torch.zeros(1, 1, 1)
    plant = control.Plant(one, none, none, one, activation=name)
    x = torch.linspace(-60, 60, 20001).double().view(-1, 1, 1)
    least = float(plant.energy(x).amin())
    assert plant.lowest - 1e-13 <= least <= plant.lowest + 1e-3


def test_pendulums_fall_as_they_should():
    plant = control.pendulums(
        [(0, 1)], mass=2.0, length=0.5, gravity=3.0, coupling=5.0, damping=0.4
    )
    controller = control.Controller(2, 1, inputs=1)
    with torch.no_grad():
        controller.G.zero_()
    h, q, p = 1e-6, torch.tensor([2.0, -0.4]).double(), torch.tensor([0.3, 0.7]).double()
    z = torch.stack([q, p, torch.tensor([2.4, 0.0]).double()], -1)
    loop = control.ClosedLoop(plant, controller, h)
    moved = (loop.run(loop.start(z), 2)[0][-1, :, :3] - z) / (2 * h)
    spring = 5.0 * 2.4 * torch.tensor([-1.0, 1.0])
    inertia = 2.0 * 0.5**2
    torque = -2.0 * 3.0 * 0.5 * q.sin() - 0.4 * p / inertia + spring
    assert torch.allclose(moved[:, 0], p / inertia, rtol=1e-4)
    assert torch.allclose(moved[:, 1], torque, rtol=1e-4)
    assert torch.allclose(moved[0, 2], (p[0] - p[1]) / inertia, rtol=1e-4)


def test_agents_of_any_energy_have_a_rest_or_a_sentence():
    one, none = torch.ones(1, 2, 1), torch.zeros(1, 1, 1)
    a = torch.tensor([[-1.0, -3.0]])

    def plant(*names):
        return control.Plant(one, none, none, torch.ones(1, 1, 1), a=a, activation=list(names))

    assert float(rest(plant("identity", "relu"))) == pytest.approx(1.0)  # a wall at 3
    found = float(rest(plant("identity", "softplus")))
    assert found - 1 == pytest.approx(-np.log1p(np.exp(found - 3)), rel=1e-9)
    assert not rest(control.pendulums([(0, 1)])).any()
    with pytest.raises(OptionError, match="has no smallest value"):
        rest(plant("sigmoid", "softplus"))


def test_plants_of_other_energies_are_kept_and_told_apart(tmp_path):
    plant = control.pendulums([(0, 1)])
    loop = control.ClosedLoop(plant, control.Controller(2, 3, inputs=1))
    options = {"cost": control.Cost(dimensions=1, barrier=0.0), "collision": 0.0}
    problem = control.LoopProblem(loop, torch.ones(2, 3), **options)
    problem.save(tmp_path)
    again = control.load_problem(tmp_path)
    assert again.loop.plant.activation == ("sin", "identity", "identity")
    y = problem.starts(2)
    assert torch.equal(again.loop(y), problem.loop(y))
    history = control.LoopTraining(again, iterations=2, batch=2)
    history.run(progress=False)
    other = control.pendulums([(0, 1)])
    other.activation = ("tanh", "identity", "identity")
    theirs = control.LoopProblem(control.ClosedLoop(other, loop.controller), problem.z, **options)
    assert control.LinkCost(theirs).identity != control.LinkCost(problem).identity


def test_bad_activations_and_weights_are_refused_in_a_sentence():
    one, none = torch.ones(1, 2, 1), torch.zeros(1, 1, 1)
    given = (one, none, none, torch.ones(1, 1, 1))
    with pytest.raises(OptionError, match="activation 'tahn' is not known"):
        control.Plant(*given, activation="tahn")
    for wrong in (["tanh"], 5, ["tanh"] * 3):
        with pytest.raises(ShapeError, match="activation must be a name, or 2 of them"):
            control.Plant(*given, activation=wrong)  # pyright: ignore
    with pytest.raises(ShapeError, match=r"weights must be \(1, 2\) like a"):
        control.Plant(*given, weights=torch.ones(2))
    with pytest.raises(OptionError, match="weights must be > 0"):
        control.Plant(*given, weights=torch.zeros(1, 2))


def test_a_plant_at_the_top_of_its_energy_does_not_rest_there():
    none, port = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    a = torch.tensor([[torch.pi, -torch.pi]]).double()
    plant = control.Plant(torch.ones(1, 2, 1), none, none, port, a=a, activation="sin")
    assert float(plant.energy(rest(plant))) < 1e-12


@pytest.mark.parametrize(
    ("J", "R", "error"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], [[1e12, 0.0], [0.0, -0.5]], "R must be positive semidefinite"),
        ([[0.0, 0.0], [0.0, 0.0]], [[1e12, 0.0], [1e-7, 1.0]], None),
        ([[0.0, 0.0], [0.0, 0.4]], [[1e12, 0.0], [0.0, 0.0]], "J must be skew-symmetric"),
    ],
)
def test_large_entries_of_some_states_do_not_hide_wrong_ones_of_others(J, R, error):
    given_ = [torch.tensor(t).double()[None] for t in (J, R)]
    eye, port = torch.eye(2).double()[None], torch.ones(1, 2, 1).double()
    if error is None:  # 1e-7 beside 1e12 and 1 is rounding
        control.Plant(eye, given_[0], given_[1], port)
        return
    with pytest.raises(InterconnectionError, match=error):
        control.Plant(eye, *given_, port)


@pytest.mark.parametrize(
    ("make", "options", "name"),
    [
        (control.pendulums, {"length": 1e200}, r"mass \* length\^2 is inf"),
        (control.pendulums, {"length": 1e-200}, r"mass \* length\^2 is 0"),
        (control.pendulums, {"mass": 1e308, "gravity": 1e308}, "gravity .* is inf"),
        (control.oscillators, {"mass": 1e-310}, "mass is 1e-310"),
        (control.microgrid, {"load": 1e-310}, "load is 1e-310"),
    ],
)
def test_numbers_that_cannot_be_divided_by_are_named(make, options, name):
    with pytest.raises(StepError, match=name):
        make([(0, 1)], **options)
