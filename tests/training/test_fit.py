"""`hdnn.training.fit`: what it minimises, what it returns, and that it resumes to the same bits."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import hdnn
from hdnn.data import planar
from hdnn.errors import (
    CheckpointError,
    ConvergenceError,
    DataError,
    OptionError,
)
from hdnn.training import fit

HEADS = {
    "sigmoid": hdnn.SigmoidHead,
    "softmax": hdnn.SoftmaxHead,
    "values": hdnn.RegressionHead,
}


def make(
    head="sigmoid",
    *,
    layers=4,
    net=hdnn.H2,
    dtype=torch.float64,
    seed=0,
    **options,
):
    generator = torch.Generator().manual_seed(seed)
    common = {"generator": generator, "dtype": dtype}
    arguments = (
        (4,) if head == "sigmoid" else (4, 3 if head == "softmax" else 2)
    )
    network = net(4, layers, **options, **common)
    return hdnn.Model(
        hdnn.Augment(2, 4), network, HEADS[head](*arguments, **common)
    )


def rows(head="sigmoid", count=60, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    if head == "values":
        return x, torch.stack([x[:, 0] * x[:, 1], x[:, 0].sin()], 1)
    if head == "softmax":
        return x, (x[:, 0] > 0.3).long() + (x[:, 1] > 0).long()
    return x, (x[:, 0] * x[:, 1] > 0).long()


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_swiss_roll_is_learned_by_64_layers():
    data = planar.swiss_roll(seed=0)
    generator = torch.Generator().manual_seed(0)
    net = hdnn.H2(4, 64, T=1.2, init="paper", generator=generator)
    model = hdnn.Model(
        hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, generator=generator)
    )
    history = fit(model, data.x_train, data.t_train, epochs=30, progress=False)
    assert (model.predict(data.x_test) == data.t_test).double().mean() > 0.99
    assert len(history.loss) == 30
    assert history.accuracy[-1] > 0.98


@pytest.mark.parametrize("solver", ["newton", "adam", "joint"])
@pytest.mark.parametrize("head", HEADS)
def test_every_solver_learns_with_every_head(head, solver):
    model = make(head)
    x, t = rows(head)
    with torch.no_grad():
        before = float(model.loss(x, t))
    history = fit(
        model, x, t, epochs=20, batch=20, solver=solver, progress=False
    )
    with torch.no_grad():
        assert float(model.loss(x, t)) < before
    assert history.loss[-1] < history.loss[0]
    assert (
        len(history.smoothness)
        == len(history.gradient)
        == len(history.learning_rate)
        == 20
    )


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_output_layer_ends_at_the_optimum_for_its_features(head, weighted):
    model = make(head)
    x, t = rows(head)
    weight = torch.rand(60, dtype=torch.float64) if weighted else None
    ridge = 1e-2
    fit(model, x, t, epochs=1, weight=weight, ridge=ridge, progress=False)
    y = model.features(x).detach()
    shares = (
        torch.full((60,), 1 / 60, dtype=torch.float64)
        if weight is None
        else weight
    )
    shares = shares / shares.sum()
    scores = model.head(y)
    if head == "values":
        losses = (scores - t).square().mean(1)
    elif head == "softmax":
        losses = F.cross_entropy(scores, t, reduction="none")
    else:
        target = t.double()
        losses = F.binary_cross_entropy_with_logits(
            scores[:, 0], target, reduction="none"
        )
    squares = model.head.weight.square().sum() + model.head.bias.square().sum()
    objective = (shares * losses).sum() + 0.5 * ridge * squares
    gradients = torch.autograd.grad(objective, list(model.head.parameters()))
    assert all(gradient.abs().max() < 1e-7 for gradient in gradients)


@pytest.mark.parametrize("net", [hdnn.H2, hdnn.H1, hdnn.MS1, hdnn.MS3])
def test_the_first_step_is_that_of_adam_on_loss_and_smoothness(net):
    model = make(net=net, layers=5)
    twin = copy.deepcopy(model)
    x, t = rows()
    alpha = 0.3
    fit(
        model,
        x,
        t,
        epochs=1,
        batch=60,
        solver="joint",
        smoothness=alpha,
        ridge=0,
        progress=False,
    )
    optimizer = torch.optim.Adam(twin.parameters(), lr=2.5e-2)
    (twin.loss(x, t) + alpha * twin.net.smoothness()).backward()
    optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-9)


def paper_output(head, batches, rate, ridge):
    """The paper's output layer: an Adam step on each batch, from zero."""
    with torch.no_grad():
        for p in head.parameters():
            p.zero_()
    adam = torch.optim.Adam(head.parameters(), rate, weight_decay=ridge)
    for y, t in batches:
        adam.zero_grad()
        head.loss(head(y), t).backward()
        adam.step()


def test_the_paper_s_recipe_is_that_of_a_plain_loop():
    model = make(net=hdnn.H1, layers=6, init="paper")
    twin = copy.deepcopy(model)
    x, t = rows(count=64)
    rate, ridge, alpha = 2.5e-2, 1e-4, 5e-4
    options = {"learning_rate": rate, "ridge": ridge, "smoothness": alpha}
    options |= {"solver": "adam", "schedule": "constant", "seed": 3}
    fit(model, x, t, epochs=4, batch=20, progress=False, **options)
    net = twin.net
    adam = torch.optim.Adam(net.parameters(), rate)
    order = torch.Generator().manual_seed(3)
    for _ in range(4):
        for index in torch.randperm(64, generator=order).split(20):
            y = twin.features(x[index])
            batch = (y.detach(), t[index])
            paper_output(twin.head, [batch] * 10, rate, ridge)
            adam.zero_grad()
            loss = twin.head.loss(twin.head(y), t[index])
            (loss + alpha * net.smoothness()).backward()
            adam.step()
    y = twin.features(x).detach()
    order.manual_seed(3)
    orders = [torch.randperm(64, generator=order) for _ in range(50)]
    batches = [(y[i], t[i]) for order in orders for i in order.split(20)]
    paper_output(twin.head, batches, rate, ridge)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


def test_a_weight_of_two_is_as_good_as_two_rows():
    x, t = rows()
    twice = torch.ones(60, dtype=torch.float64)
    twice[:10] = 2
    weighted, repeated = make(), make()
    options = {"epochs": 5, "batch": 70, "progress": False}
    fit(weighted, x, t, weight=twice, **options)
    fit(repeated, torch.cat([x, x[:10]]), torch.cat([t, t[:10]]), **options)
    for p, q in zip(weighted.parameters(), repeated.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_the_global_random_state_is_not_touched():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    fit(make(), *rows(), epochs=1, progress=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_bits():
    models = make(), make()
    for model in models:
        fit(model, *rows(), epochs=3, batch=16, progress=False)
    assert same(state(models[0]), state(models[1]))


def test_frozen_layers_stay():
    model = make()
    model.net.requires_grad_(False)
    before = state(model.net)
    fit(model, *rows(), epochs=2, solver="joint", progress=False)
    assert same(before, state(model.net))
    with pytest.raises(OptionError, match="requires a gradient"):
        fit(model, *rows(), epochs=1, progress=False)


# Held-out rows


def test_held_out_rows_change_nothing_without_a_patience():
    x, t = rows()
    plain, watched = make(), make()
    fit(plain, x[:40], t[:40], epochs=4, progress=False)
    history = fit(
        watched,
        x[:40],
        t[:40],
        validation=(x[40:], t[40:]),
        epochs=4,
        progress=False,
    )
    assert same(state(plain), state(watched))
    assert len(history.validation_loss) == 4
    assert history.best_epoch == 1 + int(np.argmin(history.validation_loss))


def test_the_held_out_loss_is_that_of_the_model_if_training_ended_there():
    x, t = rows()
    model = make()
    history = fit(
        model,
        x[:40],
        t[:40],
        validation=(x[40:], t[40:]),
        epochs=3,
        progress=False,
    )
    with torch.no_grad():
        assert history.validation_loss[-1] == pytest.approx(
            float(model.loss(x[40:], t[40:]))
        )
    right = (model.predict(x[40:]) == t[40:]).double().mean()
    assert history.validation_score[-1] == pytest.approx(float(right))


def test_patience_goes_back_to_the_best_epoch():
    x, t = rows()
    noise = 1 - t[40:]  # the better the model, the worse its loss here
    model = make()
    options = {
        "epochs": 40,
        "patience": 2,
        "learning_rate": 0.1,
        "progress": False,
    }
    history = fit(model, x[:40], t[:40], validation=(x[40:], noise), **options)
    assert len(history.loss) < 40
    with torch.no_grad():
        loss = float(model.loss(x[40:], noise))
    assert loss == pytest.approx(min(history.validation_loss))


def test_the_score_of_a_regression_is_r2():
    sklearn = pytest.importorskip("sklearn.metrics")
    x, t = rows("values")
    model = make("values")
    history = fit(
        model,
        x[:40],
        t[:40],
        validation=(x[40:], t[40:]),
        epochs=2,
        progress=False,
    )
    expected = sklearn.r2_score(t[40:].numpy(), model.predict(x[40:]).numpy())
    assert history.validation_score[-1] == pytest.approx(expected)


# On disk


class CrashError(Exception):
    pass


@pytest.mark.parametrize("solver", ["newton", "adam", "joint"])
def test_an_interrupted_training_resumes_to_the_same_bits(
    tmp_path, monkeypatch, solver
):
    monkeypatch.setattr(sys.modules["hdnn.training.fit"], "SAVE_EVERY", 0.0)
    x, t = rows()
    data = {
        "validation": (x[40:], t[40:]),
        "weight": torch.rand(40, dtype=torch.float64),
    }
    options = {
        "epochs": 6,
        "batch": 16,
        "solver": solver,
        "patience": 5,
        "progress": False,
    }
    options |= data
    straight = make()
    expected = fit(straight, x[:40], t[:40], **options)

    def crash(moment):
        if moment.epoch == 4:
            raise CrashError

    with pytest.raises(CrashError):
        fit(
            make(),
            x[:40],
            t[:40],
            callbacks=[crash],
            folder=tmp_path,
            **options,
        )
    resumed = make(seed=3)  # its weights come from the checkpoint
    history = fit(
        resumed, x[:40], t[:40], folder=tmp_path, resume=True, **options
    )
    assert same(state(straight), state(resumed))
    assert history.loss == expected.loss
    assert history.validation_loss == expected.validation_loss


def test_a_finished_training_is_given_back(tmp_path):
    model, again = make(), make(seed=5)
    x, t = rows()
    options = {"epochs": 2, "folder": tmp_path, "progress": False}
    history = fit(model, x, t, **options)
    assert fit(again, x, t, resume=True, **options).loss == history.loss
    assert same(state(model), state(again))


def test_another_training_is_not_resumed(tmp_path):
    x, t = rows()
    fit(make(), x, t, epochs=2, folder=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="already holds a training"):
        fit(make(), x, t, epochs=2, folder=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="its epochs is 2, not 3"):
        fit(
            make(), x, t, epochs=3, folder=tmp_path, resume=True, progress=False
        )
    with pytest.raises(CheckpointError, match="its data is"):
        fit(
            make(),
            x + 1,
            t,
            epochs=2,
            folder=tmp_path,
            resume=True,
            progress=False,
        )
    with pytest.raises(CheckpointError, match="resume needs the folder"):
        fit(make(), x, t, resume=True)


def test_a_damaged_checkpoint_is_one_sentence(tmp_path):
    x, t = rows()
    fit(make(), x, t, epochs=1, folder=tmp_path, progress=False)
    path = tmp_path / "checkpoint.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        fit(
            make(), x, t, epochs=1, folder=tmp_path, resume=True, progress=False
        )


# Mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"batch": -1}, "batch"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"solver": "nwton"}, "newton"),
        ({"schedule": "linear"}, "cosine"),
        ({"ridge": 0.0}, "ridge > 0"),
        ({"warmup": 1.0}, "warmup"),
        ({"patience": 0}, "patience"),
    ],
)
def test_options_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        fit(make(), *rows(), progress=False, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, t: (x[:, :1], t), r"x must have shape \(B, 2\)"),
        (lambda x, t: (x[:0], t[:0]), r"x must have shape \(B, 2\)"),
        (lambda x, t: (x, t[:-1]), "t must have shape"),
        (lambda x, t: (x.float(), t), "float32"),
        (lambda x, t: (x / 0, t), "NaN or infinite"),
        (lambda x, t: (x, t.double()), "whole-number labels"),
        (lambda x, t: (x, t + 1), "from 0 to 1"),
    ],
)
def test_data_that_do_not_fit_are_refused(change, message):
    x, t = rows()
    with pytest.raises(DataError, match=message):
        fit(make(), *change(x, t), progress=False)
    with pytest.raises(DataError, match=f"validation .*{message}"):
        fit(make(), x, t, validation=change(x, t), progress=False)


def test_weights_that_are_negative_or_zero_are_refused():
    x, t = rows()
    for weight in (torch.zeros(60), -torch.ones(60), torch.ones(59)):
        with pytest.raises(DataError, match="weight"):
            fit(make(), x, t, weight=weight, progress=False)


def test_a_head_without_a_loss_is_refused():
    model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 2), hdnn.LinearHead(4, 2))
    with pytest.raises(OptionError, match="LinearHead"):
        fit(model, torch.randn(8, 2), torch.zeros(8).long())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("net", "options"),
    [
        (hdnn.H1, {}),
        (hdnn.H1, {"tied": True}),
        (hdnn.H1, {"sparsity": hdnn.Sparsity(R=torch.eye(2))}),
        (
            hdnn.H1,
            {"J": torch.tensor([[0.0, 2.0], [-2.0, 0.0]]).kron(torch.eye(2))},
        ),
        (hdnn.H2, {}),
        (hdnn.networks.MS1, {}),
    ],
)
def test_a_training_without_autograd_is_that_with_autograd(
    net, options, frozen
):
    weights = []
    for hooked in (False, True):
        model = make(net=net, **options)
        if frozen:
            next(model.net.parameters()).requires_grad_(False)
        if hooked:  # runs the layers by autograd
            model.net.register_forward_hook(lambda *_: None)
        fit(model, *rows(), epochs=3, smoothness=0.1, progress=False)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, rtol=1e-6, atol=1e-9)


def test_a_training_that_diverges_says_so():
    model = make(net=hdnn.H1, activation="identity", T=400.0)
    with pytest.raises(ConvergenceError, match="not finite in epoch"):
        fit(
            model,
            *rows(),
            epochs=20,
            learning_rate=1e30,
            solver="adam",
            progress=False,
        )
