"""Paths of agents are drawn where they were, with rings where they collide."""

from __future__ import annotations

import pytest
import torch

from hdnn.errors import OptionError, ShapeError
from hdnn.plotting import agent_paths
from hdnn.plotting.agents import COLOURS, ink_on

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure
from matplotlib.patches import Circle

# Two agents that meet at the origin, and one that stays far away.
X = torch.linspace(-2, 2, 21)
PATHS = torch.stack(
    [torch.stack([X, 0 * X], 1), torch.stack([-X, 0 * X], 1), torch.full((21, 2), 5.0)], 1
)


def circles(ax) -> list[Circle]:
    return [patch for patch in ax.patches if isinstance(patch, Circle)]


def test_lines_are_the_paths_and_discs_lie_at_their_ends():
    ax = agent_paths(PATHS, distance=0.5)
    assert [line.get_xdata().tolist() for line in ax.lines] == PATHS[..., 0].T.double().tolist()
    discs = [circle for circle in circles(ax) if circle.get_fill()]
    assert [disc.center for disc in discs] == [(2.0, 0.0), (-2.0, 0.0), (5.0, 5.0)]
    assert {disc.radius for disc in discs} == {0.25}
    assert ax.get_title() == "Paths of 3 agents, 2 of which collide"


def test_rings_lie_where_two_agents_are_first_closer_than_the_distance():
    rings = [
        circle for circle in circles(agent_paths(PATHS, distance=0.5)) if not circle.get_fill()
    ]
    places = sorted(ring.center[0] for ring in rings)
    assert places == pytest.approx([-0.2, 0.2], abs=1e-6)
    assert all(ring.center[1] == 0 for ring in rings)
    far = agent_paths(PATHS)
    assert all(circle.get_fill() for circle in circles(far))
    assert far.get_title() == "Paths of 3 agents"


def test_targets_are_crosses_and_given_axes_are_drawn_into():
    axes = Figure().subplots(1, 2)
    ax = agent_paths(PATHS, PATHS[-1], axes[1], distance=0.5)
    assert ax is axes[1]
    crosses = [line for line in ax.lines if line.get_marker() == "+"]
    assert [float(line.get_xdata()[0]) for line in crosses] == [2.0, -2.0, 5.0]


def test_numbers_can_be_read_on_every_colour():
    assert {ink_on(colour) for colour in COLOURS} <= {"#000000", "#FFFFFF"}
    assert (ink_on("#000000"), ink_on("#FFFFFF")) == ("#FFFFFF", "#000000")


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ShapeError, match=r"paths must be \(steps \+ 1, N, 2\)"):
        agent_paths(torch.zeros(5, 3))
    with pytest.raises(ShapeError, match=r"targets must be \(3, 2\)"):
        agent_paths(PATHS, torch.zeros(2, 2))
    with pytest.raises(OptionError, match="distance must be finite and not negative"):
        agent_paths(PATHS, distance=-1.0)
