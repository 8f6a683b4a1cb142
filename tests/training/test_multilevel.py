"""Training from shallow to deep: levels begin where the last one ended, and can be interrupted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hdnn
from hdnn.data import planar
from hdnn.errors import CheckpointError, HDNNError, OptionError, TrainingError
from hdnn.training import EarlyStopping, fit, fit_multilevel, loop
from hdnn.training.multilevel import level_seed, refined

DATA = planar.double_moons(400, seed=1)


def model_of(kind="H2", *, layers=2, seed=0, dtype=None, **options):
    like = {"generator": torch.Generator().manual_seed(seed), "dtype": dtype}
    net = getattr(hdnn, kind)(4, layers, **like, **options)
    return hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, **like))


def quick(model, **options):
    options = {"epochs": 2, "batch": 50, "progress": False, **options}
    return fit_multilevel(model, DATA.x_train, DATA.t_train, **options)


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["H1", "H2", "MS1", "MS2", "MS3", "ImplicitH2"])
def test_every_level_has_so_many_times_the_layers_of_the_last(kind):
    model = model_of(kind, step=0.1)
    deep, histories = quick(model, refinements=(2, 3), epochs=(3, 2, 1))
    assert [len(history.loss) for history in histories] == [3, 2, 1]
    assert (model.net.layers, deep.net.layers) == (2, 12)
    assert pytest.approx(model.net.T) == deep.net.T
    assert type(deep.net) is type(model.net)


def test_the_first_level_is_a_training_like_any_other():
    model, plain = model_of(), model_of()
    deep, (first, *_) = quick(model, seed=5)
    options = {"epochs": 2, "batch": 50, "seed": 5, "progress": False}
    assert fit(plain, DATA.x_train, DATA.t_train, **options).loss == first.loss
    assert same(model, plain)  # and it stays as it was, whatever is done to the deeper ones
    assert deep.head is not model.head


@pytest.mark.parametrize(("kind", "order"), [("H1", 1), ("H2", 1), ("MS1", 1)])
def test_a_refined_model_is_close_to_the_shallow_one_for_small_steps(kind, order):
    """And the closer the smaller h is, at the order of the scheme."""
    far = []
    for layers in (16, 32):
        model = model_of(kind, T=0.5, layers=layers, dtype=torch.float64)
        with torch.no_grad():  # weights that vary smoothly, as those of one ODE
            for name, p in model.net.named_parameters():
                time = torch.linspace(0, 1, layers, dtype=p.dtype).view(-1, *[1] * (p.ndim - 1))
                start = torch.full(p.shape[1:], 0.3 if "K" in name else 0.1, dtype=p.dtype)
                p.copy_(start * (1 + 0.2 * time))
        x = DATA.x_test.double()
        far.append(float((refined(model, 2)(x) - model(x)).detach().abs().max()))
    assert far[0] < 0.05
    assert far[1] < 1.2 * 0.5**order * far[0]


def test_what_was_learned_is_kept():
    model = model_of(layers=8, T=1.0)
    options = {"epochs": (30, 1), "learning_rate": 5e-2}
    _, (shallow, deep) = quick(model, refinements=(2,), **options)
    assert deep.loss[0] < 0.5 * shallow.loss[0]


class Stop(BaseException):
    """An interruption that nobody catches."""


@pytest.mark.parametrize("solver", ["newton", "adam", "joint"])
@pytest.mark.parametrize(("level", "step"), [(0, 3), (0, 8), (1, 1), (1, 5), (2, 8)])
def test_an_interrupted_training_goes_on_to_the_same_bits(
    level, step, solver, tmp_path, monkeypatch
):
    whole, histories = quick(model_of(), solver=solver, seed=3)

    def stop(moment):
        if (moment.model.net.layers, moment.step) == (2 * 2**level, step):
            raise Stop

    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    with pytest.raises(Stop):
        quick(model_of(), solver=solver, seed=3, folder=tmp_path, callbacks=[stop])
    for _ in range(2):  # the second time it is over
        deep, again = quick(model_of(seed=9), solver=solver, seed=3, folder=tmp_path, resume=True)
        assert same(deep, whole)
        assert [h.loss for h in again] == [h.loss for h in histories]
    assert {p.name for p in tmp_path.iterdir()} == {"level-0", "level-1", "level-2"}


def test_levels_draw_their_own_orders_and_always_the_same_ones():
    seeds = [level_seed(seed, level) for seed in (0, 1, 2**63 - 1) for level in range(4)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert (level_seed(7, 0), level_seed(0, 1)) == (7, 2918264622725855778)


def test_callbacks_see_all_levels_and_end_one_at_a_time():
    seen = []
    stopping = EarlyStopping(1, minimum=100.0)
    callbacks = (callback for callback in (stopping, lambda m: seen.append(m.model.net.layers)))
    _, histories = quick(model_of(), epochs=5, callbacks=callbacks)
    assert sorted(set(seen)) == [2, 4, 8]
    assert [len(history.loss) for history in histories] == [2, 2, 2]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"refinements": (2, 0)}, TrainingError, "a refinement must be a whole number >= 1"),
        ({"refinements": (1.5,)}, TrainingError, "a refinement must be a whole number"),
        ({"epochs": (3, 2)}, TrainingError, "2 entries, but there are 3 levels"),
        ({"epochs": (3, 2, 0)}, TrainingError, "epochs must be a whole number >= 1, but got 0"),
        ({"epochs": 0}, TrainingError, "epochs must be a whole number >= 1, but got 0"),
        ({"seed": -1}, TrainingError, "seed must be a whole number >= 0"),
        ({"resume": True}, CheckpointError, "resume needs the folder"),
    ],
)
def test_impossible_levels_are_refused_before_any_work(options, error, message):
    model = model_of()
    before = model.net.K_p.clone()
    with pytest.raises(error, match=message) as refused:
        quick(model, **options)
    assert isinstance(refused.value, HDNNError)
    assert torch.equal(model.net.K_p, before)


def test_numbers_of_numpy_will_do():
    _, histories = quick(model_of(), refinements=np.array([2]), epochs=np.array([1, 2]))
    assert [len(history.loss) for history in histories] == [1, 2]


def test_a_perceptron_cannot_be_refined():
    model = model_of("MLP")
    before = model.net.K.clone()
    with pytest.raises(OptionError, match="MLP is no discretised ODE and cannot be refined"):
        quick(model)
    assert torch.equal(model.net.K, before)
    with pytest.raises(TrainingError, match=r"fit trains a hdnn\.Model"):
        quick(hdnn.H2(4, 2))


def test_another_training_is_not_overwritten(tmp_path):
    quick(model_of(), folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"level-0 holds a training already"):
        quick(model_of(), folder=tmp_path)
    with pytest.raises(CheckpointError, match="is of another training: its model"):
        quick(model_of(), folder=tmp_path, resume=True, refinements=(3, 2))
    with pytest.raises(CheckpointError, match="its epochs is 2, not 3"):
        quick(model_of(), folder=tmp_path, resume=True, epochs=3)
