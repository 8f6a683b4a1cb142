"""Coordinate descent: the output layer is solved, the hidden layers descend, mistakes are told."""

import io
import itertools
import math
import sys
import time
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import hdnn
from hdnn.data import planar
from hdnn.errors import DataError, HDNNError, OptionError, TrainingError
from hdnn.training import fit, output

DATA = planar.double_moons(400, seed=1)


def model_of(head="sigmoid", *, net=None, layers=4, seed=0, dtype=None, **options):
    g = torch.Generator().manual_seed(seed)
    like = {"generator": g, "dtype": dtype}
    if net is None:
        net = hdnn.H2(4, layers, **like, **options)
    heads = {
        "sigmoid": lambda: hdnn.SigmoidHead(4, **like),
        "softmax": lambda: hdnn.SoftmaxHead(4, 2, **like),
        "three": lambda: hdnn.SoftmaxHead(4, 3, **like),
        "regression": lambda: hdnn.RegressionHead(4, 2, **like),
        "linear": lambda: hdnn.LinearHead(4, 2, **like),
    }
    return hdnn.Model(hdnn.Augment(2, 4), net, heads[head]())


def quick(model, x=DATA.x_train, t=DATA.t_train, **options):
    return fit(model, x, t, **{"epochs": 2, "batch": 50, "progress": False, **options})


def penalised(head, y, t, ridge):
    squares = head.weight.square().sum() + head.bias.square().sum()
    return head.loss(head(y), t) + ridge / 2 * squares


# The output layer


@given(
    st.sampled_from(["sigmoid", "softmax", "three", "regression"]),
    st.integers(0, 1000),
    st.sampled_from([1e-4, 1e-2, 1.0]),
    st.sampled_from([0.01, 1.0, 30.0]),
)
@settings(max_examples=25)
def test_newton_ends_where_the_gradient_of_the_penalised_loss_is_zero(kind, seed, ridge, scale):
    g = torch.Generator().manual_seed(seed)
    y = scale * torch.randn(60, 4, generator=g, dtype=torch.float64)
    head = model_of(kind, dtype=torch.float64).head
    if kind == "regression":
        t = torch.randn(60, 2, generator=g, dtype=torch.float64)
    else:
        t = torch.randint(0, 3 if kind == "three" else 2, (60,), generator=g)
    output.newton(head, y, t, None, ridge, 100)
    gradients = torch.autograd.grad(penalised(head, y, t, ridge), list(head.parameters()))
    assert max(g.abs().max().item() for g in gradients) < 1e-6


def test_newton_never_raises_the_loss_where_a_full_step_would_overshoot():
    y = torch.tensor([[100.0], [101.0], [-100.0], [3.0]], dtype=torch.float64)
    t = torch.tensor([1, 1, 0, 0])
    head = hdnn.SigmoidHead(1, dtype=torch.float64)
    losses = []
    for steps in range(12):
        output.newton(head, y, t, None, 1e-6, steps)
        losses.append(penalised(head, y, t, 1e-6).item())
    assert losses[0] == pytest.approx(math.log(2))
    assert all(after <= before for before, after in itertools.pairwise(losses))
    assert losses[-1] < 0.1


def test_regression_is_ridge_least_squares():
    g = torch.Generator().manual_seed(0)
    y = torch.randn(30, 4, generator=g, dtype=torch.float64)
    t = torch.randn(30, 2, generator=g, dtype=torch.float64)
    head = model_of("regression", dtype=torch.float64).head
    output.newton(head, y, t, None, 0.1, 2)
    A = torch.cat([y, torch.ones(30, 1, dtype=torch.float64)], 1)
    # The mean is over 30 samples times 2 outputs, and the squared error has the slope 2.
    normal = A.T @ A / 30 + 0.1 * torch.eye(5, dtype=torch.float64)
    W = torch.linalg.solve(normal, A.T @ t / 30).T
    torch.testing.assert_close(torch.cat([head.weight, head.bias[:, None]], 1).detach(), W)


def test_one_class_in_a_minibatch_has_a_finite_output_layer():
    head = model_of().head
    output.newton(head, torch.ones(3, 4), torch.ones(3, dtype=torch.int64), None, 1e-4, 50)
    assert torch.isfinite(head.weight).all()
    assert (head.predict(head(torch.ones(3, 4))) == 1).all()


@pytest.mark.parametrize("solver", ["newton", "adam"])
def test_the_last_output_layer_is_fitted_to_all_data(solver):
    model = model_of()
    quick(model, solver=solver, ridge=1e-3)
    y = model.features(DATA.x_train).detach()
    loss = penalised(model.head, y, DATA.t_train, 1e-3).item()
    best = model_of().head
    output.newton(best, y, DATA.t_train, None, 1e-3, 100)
    optimum = penalised(best, y, DATA.t_train, 1e-3).item()
    assert optimum - 1e-6 <= loss <= optimum + (1e-6 if solver == "newton" else 0.02)


# The whole descent


@pytest.mark.parametrize("solver", ["newton", "adam", "joint"])
@pytest.mark.parametrize("head", ["sigmoid", "softmax"])
def test_every_solver_learns_a_disc_that_no_line_cuts_out(solver, head):
    x = 3 * torch.rand(400, 2, generator=torch.Generator().manual_seed(0)) - 1.5
    t = (x.norm(dim=1) < 1.1).long()
    model = model_of(head, layers=8, init="paper")
    history = quick(model, x, t, solver=solver, epochs=10, batch=25, learning_rate=5e-2)
    assert (model.predict(x) == t).double().mean() > 0.9
    assert history.loss[-1] < history.loss[0]
    assert len(history.loss) == len(history.accuracy) == len(history.learning_rate) == 10
    assert history.accuracy[-1] > 0.9
    assert history.seconds > 0


def test_a_regression_learns_the_product_of_its_inputs():
    x = 2 * torch.rand(300, 2, generator=torch.Generator().manual_seed(0)) - 1
    t = torch.stack([x[:, 0] * x[:, 1], x[:, 0]], 1)
    model = model_of("regression", layers=8)
    history = quick(model, x, t, epochs=20, batch=30, learning_rate=5e-2, ridge=1e-5)
    assert history.accuracy == []
    assert F.mse_loss(model.predict(x), t) < 0.5 * F.mse_loss(t.mean(0).expand_as(t), t)


def test_networks_without_a_smoothness_are_trained_without_it():
    net = hdnn.MLP(4, 2, generator=torch.Generator().manual_seed(0))
    history = quick(model_of(net=net))
    assert history.smoothness == [0.0, 0.0]


def test_more_smoothness_makes_neighbouring_layers_more_alike():
    ends = []
    for alpha in (0.0, 10.0):
        model = model_of()
        quick(model, smoothness=alpha, epochs=5)
        ends.append(model.net.smoothness().item())
    assert ends[1] < 0.5 * ends[0]


def test_the_cosine_falls_to_zero_and_the_constant_rate_stays():
    falling = quick(model_of(), epochs=6, learning_rate=0.1).learning_rate
    assert all(after < before for before, after in itertools.pairwise([0.1, *falling]))
    assert falling[-1] < 0.003
    constant = quick(model_of(), schedule="constant", learning_rate=0.1).learning_rate
    assert constant == [0.1, 0.1]


def test_one_seed_is_one_training_and_another_seed_another():
    trained = [model_of() for _ in range(3)]
    for model, seed in zip(trained, (3, 3, 4), strict=True):
        quick(model, seed=seed)
    one, same, other = (model.net.K_p for model in trained)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("solver", ["newton", "adam", "joint"])
def test_training_leaves_nothing_behind(solver):
    before = torch.get_rng_state()
    model = model_of().eval()
    quick(model, solver=solver)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_frozen_parameters_stay():
    model = model_of()
    model.net.K_q.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    quick(model)
    after = dict(model.named_parameters())
    assert torch.equal(after["net.K_q"], before["net.K_q"])
    assert not torch.equal(after["net.K_p"], before["net.K_p"])


def test_float64_models_train_in_float64():
    model = model_of(dtype=torch.float64)
    quick(model, DATA.x_train.double())
    assert model.net.K_p.dtype == model.head.weight.dtype == torch.float64


@given(st.integers(1, 9), st.integers(1, 12))
@settings(max_examples=10)
def test_any_number_of_samples_and_any_minibatch_will_do(samples, batch):
    history = quick(model_of(layers=1), DATA.x_train[:samples], DATA.t_train[:samples], batch=batch)
    assert len(history.loss) == 2


NUMPY_OPTIONS = {
    "epochs": np.int64(2),
    "batch": np.uint8(50),
    "seed": np.int32(0),
    "learning_rate": np.float32(0.025),
    "ridge": np.float64(1e-4),
    "clip": np.int16(3),
    "smoothness": Fraction(1, 2000),
    "warmup": 0,
    "weight_decay": np.float16(0),
}


def test_options_of_numpy_are_taken_and_kept_as_plain_numbers(tmp_path):
    history = quick(model_of(), folder=tmp_path, **NUMPY_OPTIONS)
    plain = {name: float(value) for name, value in NUMPY_OPTIONS.items()}
    plain |= {name: int(plain[name]) for name in ("epochs", "batch", "seed")}
    assert quick(model_of(), **plain).loss == history.loss
    quick(model_of(), folder=tmp_path, resume=True, **plain)  # it is the same training


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number >= 1, but got 0"),
        ({"epochs": 1.5}, r"epochs must be a whole number >= 1, but got 1\.5"),
        ({"batch": 0}, "batch must be a whole number >= 1, but got 0"),
        ({"batch": True}, "batch must be a whole number"),
        ({"seed": -1}, "seed must be a whole number >= 0"),
        ({"learning_rate": 0}, "learning_rate must be > 0"),
        ({"learning_rate": -0.1}, "learning_rate must be finite and not negative"),
        ({"learning_rate": math.nan}, "learning_rate must be finite"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, but got 'fast'"),
        ({"ridge": -1.0}, "ridge must be finite and not negative"),
        ({"ridge": 0.0}, "newton solver needs ridge > 0"),
        ({"smoothness": math.inf}, "smoothness must be finite"),
        ({"epochs": np.float64(2)}, "epochs must be a whole number >= 1"),
        ({"epochs": np.bool_(True)}, "epochs must be a whole number"),
        ({"seed": np.int64(-1)}, "seed must be a whole number >= 0"),
        ({"ridge": np.float32("nan")}, "ridge must be finite"),
        ({"ridge": True}, "ridge must be a number"),
        ({"clip": np.bool_(True)}, "clip must be a number"),
        ({"smoothness": 10**400}, "smoothness must be finite"),
    ],
)
def test_bad_options_are_refused_before_any_work(options, message):
    model = model_of()
    before = model.net.K_p.clone()
    with pytest.raises(TrainingError, match=message):
        quick(model, **options)
    assert torch.equal(model.net.K_p, before)


def test_unknown_solvers_and_schedules_are_refused_with_the_nearest_known():
    with pytest.raises(OptionError, match="Did you mean 'newton'"):
        quick(model_of(), solver="newtn")
    with pytest.raises(OptionError, match="Did you mean 'cosine'"):
        quick(model_of(), schedule="cosin")


X, T = DATA.x_train, DATA.t_train


def spoilt(value):
    x = X.clone()
    x[7, 1] = value
    return x


@pytest.mark.parametrize(
    ("x", "t", "message"),
    [
        (spoilt(math.nan), T, "x has NaN or infinite values in 1 of 200 samples.*index 7"),
        (spoilt(math.inf), T, "x has NaN or infinite values"),
        (X, T[:-1], r"x has 200 samples, but t has shape \(199,\)"),
        (X, T + 1, r"labels must lie in 0 \.\. 1 .* 1 \.\. 2.*SoftmaxHead of 3 classes"),
        (X, T - 1, r"labels must lie in 0 \.\. 1"),
        (X, T.float(), "whole-number labels.*float32"),
        (X, T[:, None], r"whole-number labels.*shape \(200, 1\)"),
        (X[:0], T[:0], "B >= 1 samples"),
        (X[:, 0], T, r"x must be \(B, inputs\)"),
        (X.double(), T, r"x is torch\.float64, but the model torch\.float32"),
        (X.tolist(), T, "x must be a torch.Tensor, but got list"),
        (X, T.numpy(), "t must be a torch.Tensor, but got ndarray"),
        (X, T.to("meta"), "t is on meta, but the model on cpu"),
    ],
)
def test_bad_data_are_refused_before_any_work(x, t, message):
    model = model_of()
    before = model.net.K_p.clone()
    with pytest.raises(DataError, match=message) as error:
        quick(model, x, t)
    assert isinstance(error.value, HDNNError)
    assert torch.equal(model.net.K_p, before)


def test_bad_targets_of_a_regression_are_refused():
    with pytest.raises(DataError, match=r"t must be \(200, 2\).*got \(200,\)"):
        quick(model_of("regression"), X, X[:, 0])
    with pytest.raises(DataError, match="t has NaN"):
        quick(model_of("regression"), X, spoilt(math.nan))


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(TrainingError, match=r"fit trains a hdnn\.Model, but got H2"):
        quick(hdnn.H2(4, 2))
    with pytest.raises(TrainingError, match="a LinearHead has no loss"):
        quick(model_of("linear"))
    frozen = model_of()
    frozen.net.requires_grad_(False)
    with pytest.raises(TrainingError, match="the hidden layers have no parameter"):
        quick(frozen)
    quick(frozen, solver="joint")


@pytest.mark.filterwarnings("ignore::hdnn.engine.drift.ReversalWarning")  # no wonder
@pytest.mark.parametrize("solver", ["newton", "joint"])
def test_a_diverging_training_stops_and_names_the_epoch(solver):
    model = model_of(activation="relu", step=10.0, layers=8)
    options = {"learning_rate": 1e6, "schedule": "constant", "solver": solver, "epochs": 20}
    with pytest.raises(TrainingError, match=r"not finite in epoch \d+.*lower learning_rate"):
        quick(model, **options)


# What a person sees


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_one_line_after_two_seconds_and_wipes_it(monkeypatch):
    clock = itertools.count(0, 0.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", Terminal())
    quick(model_of(), progress=True)
    shown = sys.stderr.getvalue()
    assert "epoch 2/2, minibatch 4/4, loss" in shown
    assert "epoch 1/2, minibatch 1/4" not in shown
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("stream", "progress"), [(io.StringIO(), True), (Terminal(), False), (Terminal(), True)]
)
def test_pipes_quick_trainings_and_the_undisturbed_see_nothing(monkeypatch, stream, progress):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(sys, "stderr", stream)
    quick(model_of(layers=1), progress=progress)
    assert stream.getvalue() == ""
