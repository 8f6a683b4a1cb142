"""The monitor: norms of dy_N/dy_j through a training, and warnings."""

from __future__ import annotations

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

import hdnn
from hdnn import analysis
from hdnn.analysis import GradientMonitor, GradientWarning
from hdnn.errors import OptionError, ShapeError

F64 = torch.float64


def h2(N: int = 6, **options):
    return hdnn.H2(4, N, generator=torch.Generator().manual_seed(0), **options)


def test_a_look_records_the_norms_of_all_layers():
    net, x = h2(dtype=F64), torch.randn(10, 4, dtype=F64)
    record = GradientMonitor(net, x).look()
    Phi = analysis.backward_sensitivity(net, x)
    sizes = analysis.norms(Phi)
    torch.testing.assert_close(
        torch.tensor(record.smallest, dtype=F64), sizes.amin(1)
    )
    torch.testing.assert_close(
        torch.tensor(record.largest, dtype=F64), sizes.amax(1)
    )
    of_mean = analysis.norms(Phi.mean(1))
    torch.testing.assert_close(torch.tensor(record.of_mean, dtype=F64), of_mean)
    assert record.missing == 0


def test_it_counts_the_steps_of_an_optimiser_and_of_no_other_loop():
    net, x = h2(), torch.randn(32, 4)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)

    def step():
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    with GradientMonitor(
        net, x, optimizer=optimizer, every=3, samples=5
    ) as monitor:
        for _ in range(7):
            step()
    step()
    assert monitor.steps == 7
    assert monitor.recorded_steps == [1, 4, 7]
    assert monitor.table("median").shape == (3, 7)
    assert len(monitor.x) == 5


def test_without_a_number_it_looks_often_at_first_and_ever_less():
    monitor = GradientMonitor(h2(2), torch.randn(2, 4))
    monitor.share = 0.0
    for _ in range(200):
        monitor.step()
    steps = monitor.recorded_steps
    assert steps[:8] == list(range(1, 9))
    assert 20 < len(steps) < 60


def test_it_is_a_callback_of_fit():
    model = hdnn.Model(hdnn.Augment(2, 4), h2(), hdnn.SigmoidHead(4))
    monitor = GradientMonitor(x=torch.randn(10, 2), every=1)
    assert (
        monitor(SimpleNamespace(model=model)) is None
    )  # True would end the training
    x, t = torch.randn(40, 2), torch.randint(0, 2, (40,))
    hdnn.training.fit(
        model, x, t, epochs=2, callbacks=[monitor], progress=False
    )
    assert len(monitor.records) == monitor.steps > 1
    assert bool((monitor.table("smallest") >= 1 - 1e-9).all())


def test_it_warns_once_when_gradients_vanish():
    net = hdnn.MLP(4, 64, activation="sigmoid")
    monitor = GradientMonitor(net, torch.randn(8, 4), every=1)
    with pytest.warns(GradientWarning, match="gradients vanish"):
        monitor.step()
    monitor.step()  # a second warning would be an error
    assert "gradients vanish" in str(monitor)


def test_it_warns_when_gradients_explode_or_cannot_be_computed():
    net = h2(60, step=3.0, activation="identity", dtype=F64)
    with pytest.warns(GradientWarning, match="gradients explode"):
        GradientMonitor(net, torch.randn(8, 4, dtype=F64), every=1).step()
    linear = h2(60, step=10.0, activation="identity", dtype=F64)
    monitor = GradientMonitor(
        linear, torch.full((3, 4), 1e300, dtype=F64), every=1
    )
    with pytest.warns(
        GradientWarning, match="3 of 3 samples cannot be computed"
    ):
        monitor.step()
    assert monitor.records[0].missing == 3
    assert monitor.records[0].largest[0] == math.inf


def test_an_h2_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = GradientMonitor(h2(), torch.randn(8, 4), every=1)
        monitor.step()
    assert str(monitor).startswith(
        "1 looks in 1 steps, 8 samples: norm(dy_N/dy_j) from 1."
    )


def test_records_are_a_csv_and_a_picture():
    monitor = GradientMonitor(h2(2), torch.randn(8, 4), every=1)
    assert str(monitor) == "no gradients recorded yet"
    monitor.step()
    lines = monitor.to_csv().splitlines()
    assert lines[0] == "step,layer,smallest,median,largest,of_mean"
    assert len(lines) == 4
    pytest.importorskip("matplotlib")
    assert monitor.plot().get_ylabel() == "layer $j$"


def test_mistakes_are_one_sentence():
    with pytest.raises(ShapeError, match="x must be a tensor"):
        GradientMonitor(h2())
    with pytest.raises(OptionError, match="or a network"):
        GradientMonitor(x=torch.randn(3, 4)).look()
    with pytest.raises(OptionError, match="name"):
        GradientMonitor(h2(), torch.randn(3, 4)).table("mean")
