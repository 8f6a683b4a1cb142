"""Held-out rows: what is measured there, when a training ends, and which weights it keeps."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional as F

import hdnn
from hdnn.data import planar
from hdnn.errors import CheckpointError, DataError, TrainingError
from hdnn.training import EarlyStopping, History, TensorBoard, checkpoint, fit, fit_multilevel, loop
from hdnn.training.heldout import HeldOut, HeldOutScores, best_epoch, text
from hdnn.training.multilevel import joined
from said import scalars

DATA = planar.double_moons(200, seed=1)
SOLVERS = ("newton", "adam", "joint")
WEIGHT = torch.linspace(0.0, 1.0, len(DATA.x_test))
VALUES = DATA.x_train.flip(1) ** 2, DATA.x_test.flip(1) ** 2


def model_of(head="sigmoid", kind="H2", **options):
    like = {"generator": torch.Generator().manual_seed(0)}
    heads = {
        "sigmoid": hdnn.SigmoidHead,
        "softmax": lambda n, **k: hdnn.SoftmaxHead(n, 2, **k),
        "regression": lambda n, **k: hdnn.RegressionHead(n, 2, **k),
    }
    net = getattr(hdnn, kind)(4, 4, **like, **options)
    return hdnn.Model(hdnn.Augment(2, 4), net, heads[head](4, **like))


def quick(model, **options):
    t = options.pop("t", DATA.t_train)
    usual = {"epochs": 5, "batch": 50, "schedule": "constant", "progress": False}
    return fit(model, DATA.x_train, t, **{**usual, **options})


def held_out(head="sigmoid"):
    return DATA.x_test, VALUES[1] if head == "regression" else DATA.t_test, WEIGHT


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def by_hand(model):
    """Weighted loss and score of a model at the held-out rows."""
    scores, share = model(DATA.x_test).detach().double(), WEIGHT.double() / WEIGHT.sum()
    if isinstance(model.head, hdnn.RegressionHead):
        t = VALUES[1].double()
        error = (scores - t).square()
        spread = share @ (t - share @ t).square()
        return float(share @ error.mean(1)), float((1 - share @ error / spread).mean())
    right = share @ (model.head.predict(scores) == DATA.t_test).double()
    if isinstance(model.head, hdnn.SoftmaxHead):
        loss = F.cross_entropy(scores, DATA.t_test, reduction="none")
    else:
        target = DATA.t_test.double()
        loss = F.binary_cross_entropy_with_logits(scores[:, 0], target, reduction="none")
    return float(share @ loss), float(right)


# What is measured


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("head", ["sigmoid", "softmax", "regression"])
def test_each_epoch_is_measured_with_the_model_that_a_training_to_there_would_give(head, solver):
    t = VALUES[0] if head == "regression" else DATA.t_train
    whole = quick(model_of(head), t=t, solver=solver, validation=held_out(head), epochs=3)
    for epoch in (1, 3):
        model = model_of(head)
        quick(model, t=t, solver=solver, epochs=epoch)
        found = whole.validation_loss[epoch - 1], whole.validation_score[epoch - 1]
        assert found == pytest.approx(by_hand(model), rel=1e-6)
    assert whole.best_epoch == 1 + whole.validation_loss.index(min(whole.validation_loss))


@pytest.mark.parametrize("solver", SOLVERS)
def test_held_out_rows_do_not_change_the_training(solver):
    plain, watched, state = model_of(), model_of(), torch.get_rng_state()
    history = quick(plain, solver=solver)
    other = quick(watched, solver=solver, validation=held_out())
    assert same(plain, watched)
    assert other.loss == history.loss
    assert history.validation_loss == history.validation_score == []
    assert history.best_epoch == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_whose_targets_do_not_differ_have_no_score():
    model, x = model_of("regression"), DATA.x_test[:3]
    one = HeldOut(model, (x, torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])))
    assert math.isfinite(one.measure(model, model.net).score)
    alike = HeldOut(model, (x, torch.ones(3, 2))).measure(model, model.net)
    assert math.isnan(alike.score)
    assert math.isfinite(alike.loss)


def test_the_best_epoch_is_the_first_of_the_lowest():
    assert best_epoch([3.0, 1.0, math.nan, 1.0]) == 2
    assert best_epoch([math.nan]) == best_epoch([]) == 0
    assert text(History()) == ""
    found = text(History(validation_loss=[1.0, 2.0], best_epoch=1))
    assert found == "held-out 2.0000, lowest 1.0000 in epoch 1, "
    assert text(History(validation_loss=[math.nan])) == "held-out nan, "


# When it ends, and what is kept


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_whole_model_of_the_best_epoch_is_kept(solver):
    model = model_of()
    options = {"solver": solver, "learning_rate": 0.3, "epochs": 30}
    history = quick(model, validation=held_out(), patience=3, **options)
    losses, best = history.validation_loss, history.best_epoch
    assert len(losses) == len(history.loss) == min(best + 3, 30)
    assert losses[best - 1] == min(losses)
    assert by_hand(model) == pytest.approx((losses[best - 1], history.validation_score[best - 1]))
    until = model_of()
    quick(until, **options | {"epochs": best})
    assert same(model, until)


def test_the_best_model_is_kept_when_all_epochs_are_done_too():
    model = model_of()
    history = quick(model, validation=held_out(), patience=50, learning_rate=0.3, epochs=12)
    assert len(history.loss) == 12
    assert by_hand(model)[0] == pytest.approx(min(history.validation_loss))
    assert history.best_epoch < 12


def test_a_tolerance_counts_only_what_got_better_by_more():
    history = quick(model_of(), validation=held_out(), patience=2, tol=10.0, epochs=9)
    assert len(history.loss) == 3
    assert history.best_epoch == 1


def test_patience_without_held_out_rows_watches_the_loss_of_the_training():
    mine, short, stopping = model_of(), model_of(), EarlyStopping(1, minimum=10.0)
    history = quick(mine, patience=1, tol=10.0)
    assert len(history.loss) == 2
    quick(short, callbacks=[stopping])
    assert same(mine, short)


def test_a_callback_can_watch_the_score_instead():
    model, stopping = model_of(), EarlyStopping(2, "validation_score", restore=True)
    history = quick(model, validation=held_out(), callbacks=[stopping], epochs=9)
    assert stopping.values == history.validation_score
    assert history.best_epoch == stopping.best_epoch
    assert by_hand(model)[1] == pytest.approx(stopping.best)
    free = EarlyStopping(9, "validation_loss")
    history = quick(model_of(), validation=held_out(), callbacks=[free], epochs=2)
    assert free.values == history.validation_loss


def test_a_loss_that_is_never_a_number_keeps_the_last_model(monkeypatch):
    plain, model = model_of(), model_of()
    quick(plain, epochs=2)
    monkeypatch.setattr(HeldOut, "measure", lambda *_: HeldOutScores(math.nan, math.nan))
    history = quick(model, validation=held_out(), patience=2, epochs=2)
    assert history.best_epoch == 0
    assert same(plain, model)


def test_layers_are_kept_well_posed_before_they_are_measured():
    x, t = DATA.x_test[:20], DATA.t_test[:20]
    model = model_of(kind="ImplicitH2", T=8.0)
    history = quick(model, validation=(x, t), patience=9, epochs=2, learning_rate=0.5)
    scores = model(x).detach().double()[:, 0]
    loss = F.binary_cross_entropy_with_logits(scores, t.double())
    assert float(loss) == pytest.approx(min(history.validation_loss), rel=1e-5)


# Interrupted, resumed, refined


class Stop(BaseException):
    """An interruption that nobody catches."""


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_watched_training_goes_on_to_the_same_bits_from_any_step(solver, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)  # after each step, as a kill may find it
    options = {"solver": solver, "learning_rate": 0.3, "validation": held_out(), "patience": 2}
    options |= {"epochs": 9, "resume": True}
    whole = model_of()
    history = quick(whole, folder=tmp_path / "whole", **options)
    steps = 2 * len(history.loss)  # two minibatches an epoch
    assert steps < 18
    for step in (1, 2, 3, 4, steps - 1, steps):

        def stop(moment, step=step):
            if moment.step == step:
                raise Stop

        folder = tmp_path / str(step)
        with pytest.raises(Stop):
            quick(model_of(), folder=folder, callbacks=[stop], **options)
        model = model_of()
        again = quick(model, folder=folder, **options)
        assert same(model, whole)
        assert again.validation_loss == history.validation_loss
        assert again.best_epoch == history.best_epoch
        entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [e["validation_loss"] for e in entries] == history.validation_loss
    once_more = model_of()
    assert quick(once_more, folder=tmp_path / "1", **options).loss == history.loss
    assert same(once_more, whole)


def test_only_the_same_held_out_rows_go_on(tmp_path):
    def stop(moment):
        return moment.step == 3

    quick(model_of(), folder=tmp_path, validation=held_out(), callbacks=[stop])
    for other in (None, held_out()[:2]):
        with pytest.raises(CheckpointError, match="its validation is"):
            quick(model_of(), folder=tmp_path, validation=other, resume=True)


def test_a_training_of_an_earlier_version_goes_on_without_held_out_rows(tmp_path, monkeypatch):
    whole, model = model_of(), model_of()
    quick(whole)
    original = checkpoint.save

    def older(folder, net, optimizer, order, state, callbacks=()):
        state["options"] = {k: v for k, v in state["options"].items() if k != "validation"}
        for name in ("validation_loss", "validation_score", "best_epoch"):
            del state["history"][name]
        original(folder, net, optimizer, order, state, callbacks)

    def stop(moment):
        if moment.step == 5:
            raise Stop

    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    with monkeypatch.context() as then:
        then.setattr(checkpoint, "save", older)
        with pytest.raises(Stop):
            quick(model_of(), folder=tmp_path, callbacks=[stop])
    with pytest.raises(CheckpointError, match="its validation is None"):
        quick(model_of(), folder=tmp_path, resume=True, validation=held_out())
    quick(model, folder=tmp_path, resume=True)
    assert same(whole, model)


def test_every_level_is_watched_and_the_last_keeps_its_best():
    options = {"epochs": 6, "batch": 50, "learning_rate": 0.3, "progress": False}
    model, histories = fit_multilevel(
        *(model_of(), DATA.x_train, DATA.t_train),
        refinements=[2],
        validation=held_out(),
        patience=1,
        **options,
    )
    whole = joined(histories)
    first, last = histories
    assert whole.validation_loss == [*first.validation_loss, *last.validation_loss]
    assert whole.best_epoch == len(first.loss) + last.best_epoch
    assert by_hand(model)[0] == pytest.approx(min(last.validation_loss))


# What is shown, and what is refused


def test_tensorboard_has_the_curves_of_held_out_rows(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path) as board:
        history = quick(model_of(), validation=held_out(), callbacks=[board], epochs=2)
    found = scalars(tmp_path)
    assert dict(found["validation_loss"]) == pytest.approx(
        dict(enumerate(history.validation_loss, 1))
    )
    assert [epoch for epoch, _ in found["validation_score"]] == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"validation": DATA.x_test}, r"validation must be \(x, t\) or \(x, t, weight\)"),
        ({"validation": (DATA.x_test,)}, "but got a tuple of 1"),
        ({"validation": (DATA.x_test[:0], DATA.t_test[:0])}, "validation x must be"),
        ({"validation": (DATA.x_test, DATA.t_test[:3])}, "validation x has 100 samples"),
        ({"validation": (DATA.x_test, DATA.t_test + 5)}, "validation t has 5"),
        ({"validation": (DATA.x_test * math.nan, DATA.t_test)}, "validation x has NaN"),
        ({"validation": (DATA.x_test.double(), DATA.t_test)}, "validation x is torch.float64"),
        ({"validation": (DATA.x_test[:, :1], DATA.t_test)}, "validation x has 1 columns"),
        ({"validation": (DATA.x_test, DATA.t_test, 0 * WEIGHT)}, "validation weights must be"),
        ({"validation": (DATA.x_test, DATA.t_test, WEIGHT[:2])}, "validation weight must be"),
        ({"patience": 0}, "patience must be"),
        ({"patience": 2, "tol": -1.0}, "tol must be finite and not negative"),
        ({"callbacks": [EarlyStopping(2, "validation_loss")]}, "there are no held-out rows"),
    ],
)
def test_what_cannot_be_held_out_is_refused_in_one_sentence(options, message):
    with pytest.raises((DataError, TrainingError), match=message):
        quick(model_of(), **options)


def test_a_callback_has_either_rows_of_its_own_or_those_of_fit():
    with pytest.raises(TrainingError, match=r"give EarlyStopping no x and t"):
        EarlyStopping(2, "validation_loss", x=DATA.x_test, t=DATA.t_test)
