"""Pictures: every function returns Axes with what it was given, and writes a file."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hdnn
from hdnn import analysis, plotting
from hdnn.data import planar
from hdnn.errors import OptionError, ShapeError
from hdnn.training import History

pytest.importorskip("matplotlib")


def written(ax, path):
    ax.figure.savefig(path / "picture.png")
    return (path / "picture.png").stat().st_size > 5000


def model():
    generator = torch.Generator().manual_seed(0)
    net = hdnn.H2(4, 8, generator=generator)
    return hdnn.Model(
        hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, generator=generator)
    )


def test_a_history_has_loss_and_wrong_labels_on_a_log_scale(tmp_path):
    history = History(
        loss=[0.7, 0.3, 0.1],
        accuracy=[0.5, 0.9, 1.0],
        validation_loss=[0.8, 0.4, 0.5],
        best_epoch=2,
    )
    ax = plotting.training_history(history, test=[0.4, 0.8, 0.9])
    labels = ax.get_legend_handles_labels()[1]
    assert labels == [
        "loss",
        "held-out loss (lowest in epoch 2)",
        "wrong labels",
        "wrong labels, test",
    ]
    assert ax.get_yscale() == "log"
    assert np.isnan(
        ax.lines[2].get_ydata()[-1]
    )  # zero mistakes have no logarithm
    assert written(ax, tmp_path)
    regression = History(loss=[1.0, 0.5], accuracy=[float("nan")] * 2)
    assert plotting.training_history(regression).get_legend_handles_labels()[
        1
    ] == ["loss"]


def test_decision_regions_mark_wrong_points(tmp_path):
    data = planar.double_moons(200)
    ax = plotting.decision_regions(model(), data, grid=40)
    labels = ax.get_legend_handles_labels()[1]
    assert labels[:2] == ["class 0", "class 1"]
    assert labels[2].startswith("wrong (")
    assert ax.get_xlim() == data.domain[0]
    assert written(ax, tmp_path)


def test_norms_of_an_h2_do_not_fall_below_one(tmp_path):
    generator = torch.Generator().manual_seed(0)
    net = hdnn.H2(4, 16, generator=generator, dtype=torch.float64)
    y = torch.randn(10, 4, dtype=torch.float64, generator=generator)
    ax = plotting.certificate_norms(analysis.certify(net, y))
    smallest = next(line for line in ax.lines if line.get_label() == "smallest")
    assert min(smallest.get_ydata()) >= 1 - 1e-9
    assert written(ax, tmp_path)


def test_orbits_are_drawn(tmp_path):
    orbits = hdnn.H2(2, 50).trajectory(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
    ax = plotting.phase_portrait(
        orbits, names=["in", "out"], energy=lambda y: y.square().sum(-1)
    )
    assert ax.get_legend_handles_labels()[1] == ["in", "out"]
    assert written(ax, tmp_path)
    with pytest.raises(ShapeError, match="states must have shape"):
        plotting.phase_portrait(orbits[0])


def test_gradients_through_a_training_are_a_surface(tmp_path):
    net = hdnn.H2(4, 6)
    monitor = analysis.GradientMonitor(net, torch.randn(8, 4), every=1)
    with pytest.raises(OptionError, match="recorded nothing"):
        plotting.gradient_surface(monitor)
    for _ in range(3):
        monitor.step()
    ax = plotting.gradient_surface(monitor, name="median")
    assert ax.get_xlabel() == "iteration"
    assert written(ax, tmp_path)


def test_agents_that_collide_have_a_ring():
    meeting = torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[0.9, 0.0], [1.1, 0.0]]])
    ax = plotting.agent_paths(meeting, distance=0.5)
    assert ax.get_title() == "Paths of 2 agents, 2 of which collide"
    apart = plotting.agent_paths(meeting, targets=meeting[0], distance=0.1)
    assert apart.get_title() == "Paths of 2 agents"
    with pytest.raises(ShapeError, match="paths must have shape"):
        plotting.agent_paths(meeting[0])
