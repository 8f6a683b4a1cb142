"""The kernel of closed loops: its phases give the bits of whole runs; any weights will do."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import closed_loops
from closed_loops import random_loop
from hdnn import control
from hdnn.control import fused
from hdnn.control.step import System
from hdnn.engine import jit
from hdnn.engine.kernels import closed_loop
from hdnn.errors import ConvergenceError, MissingExtraError
from strategies import Random

pytestmark = pytest.mark.skipif(not jit.installed(), reason="needs numba")

WEIGHTS = ("K", "b", "G", "C")


def test_numba_that_cannot_be_imported_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingExtraError, match=r"numba is needed here but cannot be imported"):
        jit.compiled(abs)
    with pytest.raises(MissingExtraError, match=r"pip install 'hdnn\[fast\]'"):
        closed_loop.compiled.__wrapped__(jit.compiled)


class Process:
    """Some of the agents, and those at the other ends of their edges, in numbers of its own."""

    def __init__(self, system: System, mine: list[int], batch: int) -> None:
        self.mine = mine
        pairs = system.links, system.plant_links
        self.edges, self.plant_edges = (
            [e for e, pair in enumerate(links) if {*pair} & {*mine}] for links in pairs
        )
        near = {i for e in self.edges for i in system.links[e]}
        near |= {i for e in self.plant_edges for i in system.plant_links[e]}
        self.all = sorted({*mine} | near, reverse=True)  # any order will do
        at = {i: j for j, i in enumerate(self.all)}
        agents, edges = torch.tensor(self.all), torch.tensor(self.edges, dtype=torch.long)
        cut = {name: getattr(system, name)[agents] for name in ("A", "a", "J", "R", "g", "G")}
        cut |= {"K": system.K[:, agents], "b": system.b[:, agents], "C": system.C[edges]}
        cut |= {"R_c": system.R_c[agents], "J_c": system.J_c, "h": system.h}
        cut["couplings"] = system.couplings[torch.tensor(self.plant_edges, dtype=torch.long)]
        cut["links"] = tuple((at[i], at[k]) for i, k in (system.links[e] for e in self.edges))
        ends = (system.plant_links[e] for e in self.plant_edges)
        cut["plant_links"] = tuple((at[i], at[k]) for i, k in ends)
        self.own = [at[i] for i in mine]
        self.phases = fused.Phases(System(**cut), batch, self.all)
        self.kept: list[fused.Phase] = []

    def step(self, kind: str, which: list[int], y: np.ndarray, t: int) -> np.ndarray:
        mine = np.ascontiguousarray(y[:, self.all])
        if kind == "own":
            kept = self.phases.own(mine, t, self.own)
        else:
            known = getattr(self, kind)
            chosen = [known.index(e) for e in which if e in known]
            kept = getattr(self.phases, kind)(mine, t, chosen)
        self.kept.append(kept)
        return mine[:, self.own]

    def back(self, g: np.ndarray) -> np.ndarray:
        mine = np.ascontiguousarray(g[:, self.all])
        self.phases.adjoint(self.kept.pop(), mine)
        return mine[:, self.own]


@given(
    closed_loops.seeds,
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([1, 3, 8, 11]),
    st.sampled_from([4, 5]),
    st.integers(0, 1),
)
@settings(deadline=None, max_examples=15)
def test_phases_give_the_bits_of_a_whole_run_in_any_split(seed, N, ranks, batch, c, first):
    loop, normal = random_loop(seed, N, 1.0, 0.2, T=3, c=c, engine="fused")
    system, steps = loop.system(), 4
    start = normal(batch, N, 3 + c).requires_grad_()
    states = fused.trajectory(system, start, steps, first)[0]
    weight = normal(*states.shape)
    weights = [getattr(system, name) for name in WEIGHTS]
    wanted = torch.autograd.grad((states * weight).sum(), [start, *weights])

    split = np.random.default_rng(seed).integers(0, ranks, N)
    groups = [np.flatnonzero(split == rank).tolist() for rank in range(ranks)]
    processes = [Process(system, mine, batch) for mine in groups if mine]
    plan = [("own", list(range(N)))]
    plan += [("plant_edges", which) for which in fused.colours(system.plant_links)]
    plan += [("edges", which) for which in fused.colours(system.links)]
    y, grads = start.detach().numpy().copy(), weight.numpy()
    for t in range(first, first + steps):
        for kind, which in reversed(plan) if t % 2 else plan:
            new = [each.step(kind, which, y, t) for each in processes]
            for process, mine in zip(processes, new, strict=True):
                y[:, process.mine] = mine
        assert np.array_equal(y, states[t - first + 1].detach().numpy())
    g = grads[steps].copy()
    for t in reversed(range(steps)):
        for _ in plan:
            new = [each.back(g) for each in processes]
            for process, mine in zip(processes, new, strict=True):
                g[:, process.mine] = mine
        g += grads[t]
    assert np.array_equal(g, wanted[0].numpy())
    for process in processes:
        found = process.phases.gradients()
        for name, want in zip(WEIGHTS, wanted[1:], strict=True):
            dim = 1 if name in ("K", "b") else 0
            ours, theirs = process.own, process.mine
            if name == "C":
                ours, theirs = list(range(len(process.edges))), process.edges
            got = found[name].index_select(dim, torch.tensor(ours, dtype=torch.long))
            assert torch.equal(got, want.index_select(dim, torch.tensor(theirs, dtype=torch.long)))


def test_a_phase_without_a_solution_names_the_agents_as_others_know_them():
    loop, _ = random_loop(4, 2, 0.5, 0.1, T=3, c=4)
    loop.controller.links = ((0, 1),)
    loop.controller.C = torch.nn.Parameter(torch.ones(1, 4, 4, dtype=torch.float64))
    with torch.no_grad():
        loop.controller.K[2, 1] = torch.nan
    phases = fused.Phases(loop.system(), 1, [7, 30])
    y = np.ones((1, 2, 7))
    phases.own(y, 1, [0, 1])
    phases.own(y, 2, [0])
    with pytest.raises(ConvergenceError, match=r"step 5, agent 30: .* NaN"):
        phases.own(y.copy(), 5, [0, 1])
    with pytest.raises(ConvergenceError, match=r"step 2, link \(7, 30\): .* NaN"):
        phases.edges(y, 2, [0])


def test_colours_are_runs_of_edges_that_share_no_agent():
    loop, _ = random_loop(4, 4, 0.5, 0.1)
    links = loop.controller.links
    found = fused.colours(links)
    assert [e for which in found for e in which] == list(range(len(links)))
    for which in found:
        ends = [i for e in which for i in links[e]]
        assert len(ends) == len({*ends})
    assert fused.colours(()) == []


def test_a_thousand_random_controllers_of_any_size_keep_the_balance():
    rng, worst = np.random.default_rng(0), 0.0
    for seed in range(1000):
        scale, h = 10 ** rng.uniform(-2, 3), 10 ** rng.uniform(-3, 0)
        N = int(rng.integers(1, 4))
        loop, normal = random_loop(seed, N, scale, h, T=2, c=4, engine="fused")
        balance = loop.balance(3 * normal(1, N, 7))
        worst = max(worst, float(balance.violation.amax()))
        assert float(balance.lost.amin()) >= 0
    assert worst < 1e-12


@pytest.mark.parametrize("scale", [10.0, 20.0])
def test_samples_that_need_many_newton_steps_keep_the_balance_beside_others(scale):
    """Lanes that do not arrive in time are solved for by themselves, and take nobody's solution."""
    for seed in range(15):
        loop, normal = random_loop(seed, 6, scale, 0.1, T=2, c=4, engine="fused")
        assert float(loop.balance(3 * normal(64, 6, 7)).violation.amax()) < 1e-12


@pytest.mark.parametrize("far", [0.0, 1e-300, 1e-8, 1e-3, 0.05])
def test_controllers_that_start_at_nought_are_solved_however_near_to_rest(far):
    """Where b and xi are 0, chords start at 0: all that their energies sum is in the step."""
    for seed in range(40):
        torch.manual_seed(seed)
        q = torch.randn(3, 2)
        controller = control.Controller(3, 4, links=[(0, 1)], dissipation=[0, 0, 12, 12])
        z = torch.cat([q + far * torch.randn(3, 2), torch.zeros(3, 2)], -1)
        loop = control.ClosedLoop(control.robots(q), controller, 0.1)
        found = loop(loop.start(z))
        assert float(loop.balance(loop.start(z)).violation.amax()) < 1e-12
        if seed < 3:
            loop.engine = "reference"
            torch.testing.assert_close(found, loop(loop.start(z)), rtol=1e-11, atol=1e-15)


def stiff_loop(seed: int, A: np.ndarray, h: float, linked: bool):
    """Two agents whose plants have these rows, with all else random."""
    normal = Random(seed)
    links, p, heat = [(0, 1)] if linked else [], A.shape[2], normal(2, A.shape[2], A.shape[2])
    plant = control.Plant(
        *(torch.from_numpy(A), normal.skew(2, p), heat @ heat.mT, normal(2, p, 2)),
        a=normal(2, A.shape[1]),
        links=links,
        couplings=normal(len(links), p, p),
    )
    controller = control.Controller(2, 3, states=4, inputs=2, links=[(0, 1)])
    with torch.no_grad():
        for parameter in controller.parameters():
            parameter.copy_(0.5 * normal(*parameter.shape))
    return control.ClosedLoop(plant, controller, h, engine="fused"), normal(2, 2, p + 4)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["springs", "rows"])
def test_stiff_plants_keep_the_balance_and_agree_with_the_definition(kind, linked):
    """Springs from 1e-8 to 1e12 side by side, and rows of any condition up to 1e10."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        if kind == "springs":
            A = np.sqrt(10 ** rng.uniform(-8, 12, (2, 3)))[..., None] * np.eye(3)
        else:
            left = np.linalg.qr(rng.standard_normal((2, 4, 4)))[0][:, :, :3]
            right, top = np.linalg.qr(rng.standard_normal((2, 3, 3)))[0], rng.uniform(-3, 6)
            A = left * 10 ** np.linspace(top, top - rng.uniform(0, 10), 3) @ right
        loop, y = stiff_loop(seed, A, 10 ** rng.uniform(-3, 0), linked)
        found = loop(y)
        assert float(loop.balance(y).violation.amax()) < 1e-12
        loop.engine = "reference"
        wanted, stiffness = loop(y), 1 + loop.step * float(np.linalg.norm(A, 2, (1, 2)).max()) ** 2
        size = wanted.abs().amax((0, 1)) + 1
        # Both round, and stiff plants turn that into as much more.
        assert float(((found - wanted).abs() / size).detach().amax()) < 1e-11 + 1e-14 * stiffness


def test_code_on_disk_is_found_by_the_sources_that_it_is_made_of(tmp_path, monkeypatch):
    """Parts of a kernel lie in other functions and files, whose changes numba does not see."""
    import numba

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def twice(x):
        return 2 * x

    for digest, hits in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        found = jit.compiled(twice, made_of=digest)
        assert found(3) == 6
        assert sum(found.stats.cache_hits.values()) == hits
    assert len(jit.digest("hdnn.engine.jit")) == 64
    assert jit.digest("hdnn.engine.not_there") == ""
