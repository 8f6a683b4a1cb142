"""Pictures are drawn where one asks, without a display, and show the numbers given."""

import math
import subprocess
import sys

import pytest
import torch

import hdnn
from hdnn import plotting
from hdnn.analysis import Convergence
from hdnn.data import planar
from hdnn.errors import MissingExtraError, ShapeError
from hdnn.training import History

matplotlib = pytest.importorskip("matplotlib")
from matplotlib.figure import Figure  # noqa: E402

DATA = planar.swiss_roll(200)
HISTORY = History(loss=[0.7, 0.3, 0.1], accuracy=[0.6, 0.9, 1.0], learning_rate=[0.1] * 3)
NORMS = torch.tensor([[1.5, 3.0, 2.0], [1.2, 1.4, 1.3], [1.0, 1.0, 1.0]])
TIMES = torch.linspace(0, 6, 50)
ORBITS = torch.stack([torch.stack([r * TIMES.cos(), r * TIMES.sin()], -1) for r in (1, 2)], 1)
TURNS = TIMES[:, None, None] * torch.eye(2)
ERRORS = {
    "one": Convergence((1, 2, 4), (0.4, 0.2, 0.1), (0.4, 0.2, 0.1), 1.0),
    "two": Convergence((1, 2), (0.4, 0.2), (1e-2, 2.5e-3), 2.0),
    "lower": Convergence((1, 2), (0.4, 0.2), (1e-3, 2.5e-4), 2.0),
    "at rest": Convergence((1, 2), (0.4, 0.2), (0.0, 0.0), math.nan),
}


def a_model(dtype=None):
    g = torch.Generator().manual_seed(0)
    head = hdnn.SigmoidHead(4, generator=g, dtype=dtype)
    return hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 3, generator=g, dtype=dtype), head)


PICTURES = {
    "decision_regions": lambda ax=None: plotting.decision_regions(a_model(), DATA, ax, grid=20),
    "sensitivity_norms": lambda ax=None: plotting.sensitivity_norms(NORMS, ax),
    "training_history": lambda ax=None: plotting.training_history(HISTORY, ax),
    "trajectories": lambda ax=None: plotting.trajectories(
        a_model().trajectory(DATA.x_test[:9]), ax, labels=DATA.t_test[:9]
    ),
    "phase_portrait": lambda ax=None: plotting.phase_portrait(
        ORBITS, ax, energy=lambda y: y.square().sum(-1)
    ),
    "sensitivity_growth": lambda ax=None: plotting.sensitivity_growth(TIMES, TURNS, ax, slope=1.0),
    "perturbation_growth": lambda ax=None: plotting.perturbation_growth(
        {0.1: (TIMES, TIMES + 1), 0.01: (TIMES, TIMES + 2)}, ax, slope=1.0, diameter=0.7
    ),
    "layer_growth": lambda ax=None: plotting.layer_growth(
        {"flat": torch.ones(9), "steep": torch.arange(9.0).exp()}, ax, rates=[0.0, 1.0]
    ),
    "convergence": lambda ax=None: plotting.convergence(ERRORS, ax),
}
every_picture = pytest.mark.parametrize("draw", PICTURES.values(), ids=PICTURES)


def lines(ax):
    return {line.get_label(): list(line.get_ydata()) for line in ax.get_lines()}


@every_picture
def test_without_axes_a_new_figure_is_made_and_can_be_saved(draw, tmp_path):
    ax = draw()
    path = tmp_path / "picture.png"
    ax.figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert ax.get_title()
    assert ax.get_xlabel()
    assert ax.get_ylabel()


@every_picture
def test_given_axes_are_drawn_into_and_returned(draw):
    axes = Figure().subplots(1, 2)
    assert draw(axes[1]) is axes[1]
    assert axes[1].has_data()
    assert not axes[0].has_data()


@every_picture
def test_the_legend_covers_no_data(draw):
    ax = draw()
    ax.figure.draw_without_rendering()
    label = ax.xaxis.get_label().get_window_extent()
    assert ax.get_legend().get_window_extent().y1 <= label.y0 < ax.get_window_extent().y0


def test_matplotlib_comes_with_the_first_picture_and_pyplot_never():
    script = """
import sys, torch
from hdnn import plotting
assert "matplotlib" not in sys.modules
plotting.sensitivity_norms(torch.ones(3, 2)).figure.canvas.draw()
assert "matplotlib.pyplot" not in sys.modules
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"hdnn\[plot\]"):
        plotting.training_history(HISTORY)


def test_sensitivity_shows_the_extremes_and_the_median_of_every_layer():
    ax = plotting.sensitivity_norms(NORMS)
    shown = lines(ax)
    assert shown["smallest"] == pytest.approx([1.5, 1.2, 1.0])
    assert shown["median"] == pytest.approx([2.0, 1.3, 1.0])
    assert shown["largest"] == pytest.approx([3.0, 1.4, 1.0])
    assert set(shown["norm 1"]) == {1.0}
    assert ax.get_yscale() == "linear"


def test_sensitivity_takes_a_log_scale_where_norms_differ_widely():
    assert plotting.sensitivity_norms(torch.tensor([[1.0], [1e3]])).get_yscale() == "log"


def test_sensitivity_of_one_sample_needs_no_sample_axis():
    assert "1 sample" in plotting.sensitivity_norms(torch.tensor([2.0, 1.0])).get_title()


def test_norms_without_a_layer_are_refused():
    for empty in (torch.zeros(0, 3), torch.tensor(1.0)):
        with pytest.raises(ShapeError, match=r"norms must be \(N\+1, \*samples\)"):
            plotting.sensitivity_norms(empty)


def test_history_shows_the_loss_and_the_fraction_of_wrong_labels():
    shown = lines(plotting.training_history(HISTORY))
    assert shown["loss"] == [0.7, 0.3, 0.1]
    wrong = shown["wrong labels (none from epoch 3 on)"]
    assert wrong[:2] == pytest.approx([0.4, 0.1])
    assert math.isnan(wrong[2])  # 0 has no logarithm


def test_history_of_a_regression_has_no_labels():
    assert set(lines(plotting.training_history(History(loss=[0.5])))) == {"loss"}


def test_history_of_a_perfect_fit_is_drawn_on_a_linear_scale():
    assert plotting.training_history(History(loss=[0.5, 0.0])).get_yscale() == "linear"


def test_regions_cover_the_domain_of_the_data_and_show_every_test_point():
    ax = plotting.decision_regions(a_model(torch.float64), planar.double_moons(200), grid=20)
    assert ax.get_xlim() == (-2.0, 5.0)
    assert ax.get_ylim() == (-1.0, 2.0)
    assert len(lines(ax)["class 0"]) + len(lines(ax)["class 1"]) == 100


def test_wrong_test_points_are_crossed_and_counted():
    model = a_model()
    wrong = int((model.predict(DATA.x_test) != DATA.t_test).sum())
    assert 0 < wrong < 100
    ax = plotting.decision_regions(model, DATA, grid=20)
    assert len(lines(ax)[f"wrong ({wrong} of 100)"]) == wrong


def test_a_model_that_knows_one_class_only_has_no_boundary():
    model = a_model()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.fill_(1.0)
    assert plotting.decision_regions(model, DATA, grid=20).has_data()


def test_trajectories_end_in_the_last_state():
    states = a_model().trajectory(DATA.x_test[:5])
    ax = plotting.trajectories(states, features=(0, 3))
    ends = torch.tensor(ax.collections[0].get_offsets().tolist())
    torch.testing.assert_close(ends, states[-1][:, [0, 3]].detach())
    assert ax.get_xlabel() == "$y_{1}$"
    assert ax.get_ylabel() == "$y_{4}$"


def test_trajectories_of_another_shape_or_feature_are_refused():
    with pytest.raises(ShapeError, match=r"states must be \(N\+1, B, n\).*\(4, 2\)"):
        plotting.trajectories(torch.zeros(4, 2))
    with pytest.raises(ShapeError, match=r"features must be two of 0 \.\. 3"):
        plotting.trajectories(torch.zeros(4, 2, 4), features=(0, 4))


# Growth and convergence


def test_a_phase_portrait_marks_where_orbits_start_and_names_them():
    ax = plotting.phase_portrait(ORBITS, names=["small", "large"])
    assert lines(ax)["large"] == pytest.approx(ORBITS[:, 1, 1].tolist())
    assert [line.get_markevery() for line in ax.get_lines()] == [[0], [0]]
    assert not ax.collections  # no energy, no level lines
    assert plotting.phase_portrait(ORBITS[:1]).has_data()  # one point is an orbit, too


@pytest.mark.parametrize("shape", [(5, 2), (5, 1, 3), (5, 0, 2)])
def test_orbits_of_another_shape_are_refused(shape):
    with pytest.raises(ShapeError, match=r"states must be \(k, B, 2\)"):
        plotting.phase_portrait(torch.zeros(shape))


def test_growth_shows_entries_the_norm_and_the_line_above():
    shown = lines(plotting.sensitivity_growth(TIMES, TURNS, slope=0.5))
    assert shown["norm"] == pytest.approx(TIMES.tolist())
    assert shown["0.500 $t$"] == pytest.approx((0.5 * TIMES).tolist())
    assert "entries" in lines(plotting.sensitivity_growth(TIMES, TURNS))
    with pytest.raises(ShapeError, match=r"Phi \(k, n, n\)"):
        plotting.sensitivity_growth(TIMES[1:], TURNS)


def test_perturbations_are_drawn_from_the_first_time_above_zero():
    ax = plotting.perturbation_growth({0.5: (TIMES, TIMES + 1)})
    assert lines(ax) == {r"$\gamma$ = 0.5": pytest.approx((TIMES[1:] + 1).tolist())}
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_layers_that_grow_are_beside_the_rate_that_they_should_have():
    ax = PICTURES["layer_growth"]()
    assert lines(ax)["steep"] == pytest.approx(torch.arange(9.0).exp().tolist())
    exact = [line for line in ax.get_lines() if line.get_label().startswith("_child")]
    assert len(exact) == 2  # of the steep one, and the norm 1
    assert list(exact[0].get_ydata()) == pytest.approx(torch.arange(9.0).exp().tolist())


def test_convergence_has_one_slope_for_each_whole_order_below_its_lowest_errors():
    ax = plotting.convergence(ERRORS)
    assert "one: order 1.00" in lines(ax)
    assert [text.get_text().strip() for text in ax.texts] == ["$h$", "$h^2$"]
    slopes = [line for line in ax.get_lines() if line.get_linestyle() == ":"]
    assert list(slopes[1].get_ydata()) == pytest.approx([4e-4, 1e-4])
