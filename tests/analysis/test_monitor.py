"""Watching gradients while something trains."""

from __future__ import annotations

import csv
import io
import itertools
import warnings
from types import SimpleNamespace

import pytest
import torch

import hdnn
from hdnn import analysis
from hdnn.analysis import GradientMonitor, GradientWarning
from hdnn.analysis import monitor as monitor_module
from hdnn.data import planar
from hdnn.errors import OptionError, ShapeError
from hdnn.training import fit

DATA = planar.double_moons(400, seed=1)


def model_of(net):
    return hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4))


def test_a_callback_of_fit_records_what_certify_sees():
    model = model_of(hdnn.H2(4, 6, init="paper"))
    monitor = GradientMonitor(x=DATA.x_test, every=3, samples=20)
    fit(model, DATA.x_train, DATA.t_train, epochs=2, batch=50, callbacks=[monitor], progress=False)
    assert monitor.recorded_steps == [1, 4, 7]
    assert all(len(r.smallest) == 7 and len(r.weights) == 6 for r in monitor.records)
    assert monitor.table("smallest")[:, :-1].min() >= 1
    last = monitor.look()  # after the last step
    found = analysis.certify(model, DATA.x_test[:20])
    assert last.smallest == pytest.approx(found.by_layer["smallest"], rel=1e-9)
    assert last.largest == pytest.approx(found.by_layer["largest"], rel=1e-9)
    assert str(monitor).startswith("4 looks in 8 steps, 20 samples")


def test_any_loop_with_an_optimizer_is_watched():
    net = hdnn.H1(4, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    y = torch.randn(8, 4)
    with GradientMonitor(net, y, every=2, optimizer=optimizer) as monitor:
        for _ in range(5):
            optimizer.zero_grad()
            net(y).square().sum().backward()
            optimizer.step()
    optimizer.step()  # no longer
    assert monitor.recorded_steps == [1, 3, 5]
    expected = torch.stack([p.grad.reshape(5, -1).square().sum(1) for p in net.parameters()])
    torch.testing.assert_close(
        torch.tensor(monitor.records[-1].weights), expected.sum(0).sqrt(), rtol=1e-4, atol=1e-6
    )


def test_steps_are_counted_by_hand_where_there_is_no_optimizer():
    monitor = GradientMonitor(hdnn.H2(4, 3), torch.randn(2, 4), every=1)
    with monitor:
        monitor.step()
        monitor.step()
    assert monitor.recorded_steps == [1, 2]
    assert monitor.records[0].weights == []  # nothing has been differentiated


@pytest.fixture
def slow_looks(monkeypatch):
    """A clock by which looking takes ever so long and training no time."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(monitor_module, "time", clock)
    monkeypatch.setattr(monitor_module, "SHARE", 0.0)


@pytest.mark.usefixtures("slow_looks")
@pytest.mark.parametrize(("steps", "looks"), [(10, 10), (60, 51), (1000, 80)])
def test_by_default_there_are_fifty_looks_however_long_a_loop_is(steps, looks):
    monitor = GradientMonitor(hdnn.H2(2, 2), torch.randn(1, 2))
    with monitor:
        for _ in range(steps):
            monitor.step()
    assert len(monitor.records) == pytest.approx(looks, abs=2)
    assert monitor.records[-1].step > 0.9 * steps


@pytest.mark.usefixtures("slow_looks")
def test_by_default_fifty_looks_are_spread_over_each_training_by_fit():
    monitor = GradientMonitor(x=DATA.x_test, samples=2)
    model, data = model_of(hdnn.H2(4, 2)), (DATA.x_train, DATA.t_train)
    for _ in range(2):
        fit(model, *data, epochs=50, batch=50, callbacks=[monitor], progress=False)
    assert len(monitor.records) == pytest.approx(100, abs=2)
    steps = torch.tensor(monitor.recorded_steps)
    assert steps.diff().max() <= 5
    assert (steps[0], steps[-1]) == (1, 400)


def test_more_looks_take_little_of_the_time(monkeypatch):
    ticks = itertools.count()  # a clock that moves whenever somebody looks at it
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(monitor_module, "time", clock)
    monkeypatch.setattr(monitor_module, "LOOKS", 0)
    monkeypatch.setattr(monitor_module, "GROWTH", 1e9)
    monitor = GradientMonitor(hdnn.H2(4, 8), torch.randn(16, 4))
    with monitor:
        for _ in range(200):
            monitor.step()
    assert 5 < len(monitor.records) < 20
    assert monitor.spent < 0.1 * (clock.perf_counter() - monitor.start)


@pytest.mark.parametrize(("layers", "looks"), [(1, 1), (1, 3), (4, 1)])
def test_a_picture_of_one_look_or_one_layer_shows_it(layers, looks):
    monitor = GradientMonitor(hdnn.H2(4, layers), torch.randn(5, 4), every=1)
    for _ in range(looks):
        monitor.step()
    (mesh,) = monitor.plot().collections
    assert mesh.get_array().size == layers * looks
    low, high = mesh.get_coordinates()[0, 0], mesh.get_coordinates()[-1, -1]
    assert (high - low).tolist() == [looks, layers]
    assert low.tolist() == [0.5, -0.5]


def test_a_picture_of_nothing_but_unknown_norms_says_why():
    monitor = GradientMonitor(runaway(40), torch.ones(3, 4, dtype=torch.float64), every=1)
    with pytest.warns(GradientWarning):
        monitor.step()
    (text,) = monitor.plot().texts
    assert "no norm could be computed, because the state" in text.get_text().replace("\n", " ")


def test_vanishing_gradients_are_said_once_with_step_and_layer():
    net = hdnn.MLP(4, 30)
    with torch.no_grad():
        net.K.mul_(0.1)
    monitor = GradientMonitor(net, torch.randn(5, 4), every=1)
    with pytest.warns(GradientWarning, match="vanish: at step 1 half of the samples.*layer 2"):
        monitor.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor.step()
    assert len(monitor.findings) == 1


def test_exploding_gradients_are_said_also_beyond_float64():
    net = hdnn.H2(2, 600, step=1.0, activation="identity", dtype=torch.float64)
    with torch.no_grad():
        net.K_p.fill_(5.0)
        net.K_q.fill_(5.0)
    monitor = GradientMonitor(net, torch.ones(2, 2, dtype=torch.float64), every=1)
    with pytest.warns(GradientWarning, match="explode: at step 1 norm.* is up to inf"):
        monitor.step()


def runaway(layers):
    net = hdnn.H2(4, layers, step=10.0, activation="identity", dtype=torch.float64)
    with torch.no_grad():
        net.K_p.mul_(1e5)
        net.K_q.mul_(1e5)
    return net


def test_samples_that_could_not_be_computed_are_said_with_the_reason():
    monitor = GradientMonitor(runaway(40), torch.ones(3, 4, dtype=torch.float64), every=1)
    with pytest.warns(GradientWarning, match=r"3 of 3 samples could not .* because the state y_"):
        monitor.step()
    record = monitor.records[0]
    assert record.missing == 3
    assert monitor.table("smallest").isnan().all()  # no comparison with 1 comes out true
    assert "up to 3 samples could not be computed" in str(monitor)
    monitor.plot()


def test_the_samples_that_could_be_computed_are_recorded():
    y = torch.randn(4, 4, dtype=torch.float64)
    net = hdnn.H2(4, 3, step=1.0, activation="identity", dtype=torch.float64)
    with torch.no_grad():
        net.K_p.mul_(5)
    rest = GradientMonitor(net, y[1:]).look()
    y[0] = 1.7e308
    with pytest.warns(GradientWarning, match="those of 1 of 4 samples could not be computed"):
        record = GradientMonitor(net, y).look()
    assert record.missing == 1
    assert record.smallest == pytest.approx(rest.smallest)
    assert record.of_mean == pytest.approx(rest.of_mean)


def test_weights_that_are_no_numbers_are_named():
    net = hdnn.H2(4, 3)
    with torch.no_grad():
        net.K_p.fill_(torch.nan)
    monitor = GradientMonitor(net, torch.ones(2, 4), every=1)
    with pytest.warns(GradientWarning, match="because the weight K_p is not finite"):
        monitor.step()


def test_records_are_a_table_and_a_picture(tmp_path):
    monitor = GradientMonitor(hdnn.H2(4, 3), torch.randn(5, 4), every=1)
    with pytest.raises(ShapeError, match="nothing yet: train with fit"):
        monitor.plot()
    assert str(monitor) == "no gradients recorded yet"
    for _ in range(3):
        monitor.step()
    rows = list(csv.DictReader(io.StringIO(monitor.to_csv())))
    assert len(rows) == 3 * 4
    assert float(rows[0]["smallest"]) == pytest.approx(monitor.records[0].smallest[0], rel=1e-5)
    for name in ("smallest", "median", "largest", "of_mean"):
        monitor.plot(name=name).figure.savefig(tmp_path / f"{name}.png")


def test_mistakes_are_one_sentence():
    with pytest.raises(OptionError, match="but got Linear"):
        GradientMonitor(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ShapeError, match="x must be a tensor"):
        GradientMonitor(hdnn.H2(4, 3))
    with pytest.raises(OptionError, match="give the monitor a model"):
        GradientMonitor(x=torch.ones(1, 4)).step()
