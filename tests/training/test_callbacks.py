"""Callbacks of `fit`: the moments that they get, early stopping, implicit layers, TensorBoard."""

from __future__ import annotations

import math

import pytest
import torch

import hdnn
from hdnn.errors import OptionError
from hdnn.training import (
    EarlyStopping,
    History,
    Moment,
    TensorBoard,
    WellPosed,
    fit,
)


def model_for(net=hdnn.H2, **options):
    generator = torch.Generator().manual_seed(0)
    return hdnn.Model(
        hdnn.Augment(2, 4),
        net(4, 3, generator=generator, **options),
        hdnn.SigmoidHead(4),
    )


def points(count=50):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 2, generator=generator), torch.arange(count) % 2


def test_moments_count_steps_and_epochs():
    moments = []
    x, t = points()
    history = fit(
        model_for(),
        x,
        t,
        epochs=2,
        batch=20,
        callbacks=[moments.append],
        progress=False,
    )
    assert [moment.step for moment in moments] == [1, 2, 3, 4, 5, 6]
    assert [moment.epoch for moment in moments] == [1, 1, 1, 2, 2, 2]
    assert [moment.end_of_epoch for moment in moments] == [
        False,
        False,
        True,
    ] * 2
    assert all(moment.gradient > 0 for moment in moments)
    assert history.loss[0] == pytest.approx(
        sum(moment.loss for moment in moments[:3]) / 3
    )


def test_a_callback_that_returns_true_ends_the_training():
    def stop(moment: Moment) -> bool:
        return moment.epoch == 2 and moment.end_of_epoch

    history = fit(
        model_for(), *points(), epochs=9, callbacks=[stop], progress=False
    )
    assert len(history.loss) == 2


def at_end(**values):
    history = History(**values)
    return Moment(
        None, 1, 9, 1, 9, 0.0, 0.0, 0.0, 0.0, history, end_of_epoch=True
    )


def test_early_stopping_counts_epochs_without_improvement():
    early = EarlyStopping(patience=2)
    assert not early(at_end(loss=[3.0, 2.0, 2.5]))
    assert early(at_end(loss=[3.0, 2.0, 2.5, 2.1]))
    assert not early(at_end(loss=[3.0, 2.0, 2.5, 1.9]))
    assert EarlyStopping(2, minimum=0.5)(at_end(loss=[3.0, 2.9, 2.8]))
    assert EarlyStopping(2, "accuracy")(at_end(accuracy=[0.9, 0.8, 0.9]))
    assert not EarlyStopping(2, "accuracy")(at_end(accuracy=[0.7, 0.8, 0.9]))


def test_early_stopping_says_what_it_cannot_watch():
    early = EarlyStopping(monitor="validation_loss")
    with pytest.raises(OptionError, match="validation"):
        fit(model_for(), *points(), callbacks=[early], progress=False)


def test_implicit_layers_stay_well_posed():
    for callbacks, limit in (([], 0.95), ([WellPosed(0.5)], 0.5)):
        model = model_for(hdnn.ImplicitH2, T=6.0)
        fit(model, *points(), epochs=2, callbacks=callbacks, progress=False)
        assert model.net.coupling().max() <= limit + 1e-5
    with pytest.raises(OptionError, match="between 0 and 1"):
        WellPosed(1.5)


def test_tensorboard_has_the_history(tmp_path):
    loading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    with TensorBoard(tmp_path) as board:
        history = fit(
            model_for(), *points(), epochs=2, callbacks=[board], progress=False
        )
    events = loading.EventAccumulator(str(tmp_path))
    events.Reload()
    losses = [event.value for event in events.Scalars("loss")]
    assert losses == pytest.approx(history.loss)


def test_a_regression_has_no_accuracy():
    model = hdnn.Model(
        hdnn.Augment(2, 4), hdnn.H2(4, 2), hdnn.RegressionHead(4, 1)
    )
    x, _ = points()
    history = fit(model, x, x[:, 0], epochs=1, progress=False)
    assert math.isnan(history.accuracy[0])
    assert "right" not in history.text()
