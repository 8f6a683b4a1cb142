"""Callbacks: a training that no longer gets better ends, and TensorBoard sees every epoch."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import hdnn
from graph_runs import until
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run
from hdnn.app.tasks import kinds, task
from hdnn.data import planar
from hdnn.errors import CheckpointError, DataError, HDNNError, MissingExtraError, TrainingError
from hdnn.training import EarlyStopping, Moment, TensorBoard, WellPosed, checkpoint, fit, loop
from said import scalars

DATA = planar.double_moons(400, seed=1)


def model_of(head="sigmoid", seed=0):
    like = {"generator": torch.Generator().manual_seed(seed)}
    kinds = {"sigmoid": hdnn.SigmoidHead, "regression": lambda n, **k: hdnn.RegressionHead(n, 2)}
    return hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 4, **like), kinds[head](4, **like))


def quick(model, *callbacks, x=DATA.x_train, t=DATA.t_train, **options):
    options = {"epochs": 4, "batch": 50, "progress": False, **options}
    return fit(model, x, t, callbacks=callbacks, **options)


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def copy_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


class Plan:
    """A model that does what it is told: its loss at the end of an epoch is the next of a list."""

    def __init__(self, *losses):
        self.losses, self.model = losses, model_of()

    def run(self, callback):
        """The epoch in which the callback ends it, or None."""
        epochs = len(self.losses)
        for epoch, loss in enumerate(self.losses, 1):
            for k in (0, 1):
                moment = Moment(
                    *(self.model, epoch, epochs, 2 * epoch - 1 + k, 2 * epochs),
                    *(loss + 1 - 2 * k, 1 - loss / 10, 0.5, 0.1, k == 1),
                )
                with torch.no_grad():
                    self.model.net.K_p.fill_(epoch)
                if callback(moment):
                    return epoch
        return None


# Early stopping


@pytest.mark.parametrize(
    ("losses", "patience", "minimum", "end"),
    [
        ([5, 4, 3, 2, 1], 1, 0.0, None),
        ([5, 4, 4, 4, 1], 2, 0.0, 4),
        ([5, 4, 4, 4, 1], 3, 0.0, None),
        ([5, 4.5, 4, 3.5, 3], 2, 0.5, None),  # it creeps, but is half a unit better in two epochs
        ([5, 4.9, 4.8, 4.7, 1], 2, 0.5, 3),
        ([1, 2], 1, 0.0, 2),
        ([5, float("nan"), float("nan"), 1], 2, 0.0, 3),
        ([float("nan"), 5, 4, 3], 2, 0.0, None),
        ([float("nan")] * 4, 3, 0.0, 3),
    ],
)
@pytest.mark.parametrize("monitor", ["loss", "accuracy"])
def test_a_training_ends_when_nothing_got_better_for_so_many_epochs(
    losses, patience, minimum, end, monitor
):
    minimum = minimum if monitor == "loss" else minimum / 10
    stopping = EarlyStopping(patience, monitor, 0.999 * minimum)
    assert Plan(*losses).run(stopping) == end


def test_what_is_watched_are_the_means_of_the_history():
    for monitor in ("loss", "accuracy"):
        stopping = EarlyStopping(monitor=monitor)
        history = quick(model_of(), stopping)
        assert stopping.values == getattr(history, monitor)
        best = min if monitor == "loss" else max
        assert stopping.best == best(stopping.values)
        assert stopping.best_epoch == 1 + stopping.values.index(stopping.best)


def test_one_callback_serves_one_training_after_the_other():
    stopping = EarlyStopping(2)
    assert Plan(1, 2, 3, 4).run(stopping) == 3
    assert Plan(9, 8, 8, 7).run(stopping) is None
    assert stopping.values == [9, 8, 8, 7]


@pytest.mark.parametrize("solver", ["newton", "adam", "joint"])
def test_the_model_is_looked_at_with_a_validation_set(solver):
    """With the output layer as it is, or the mean of those that the minibatches of an epoch had."""
    model, heads, losses, right = model_of(), [], [], []
    x, t = DATA.x_test, DATA.t_test
    stopping, accuracy = EarlyStopping(x=x, t=t), EarlyStopping(monitor="accuracy", x=x, t=t)

    def watch(moment):
        heads.append([p.detach().clone() for p in model.head.parameters()])
        if moment.end_of_epoch:
            last = heads[-1:] if solver == "joint" else heads[-4:]
            W, b = (torch.stack(p).mean(0) for p in zip(*last, strict=True))
            scores = torch.nn.functional.linear(model.features(x).detach(), W, b)
            losses.append(float(model.head.loss(scores, t)))
            right.append(float((model.head.predict(scores) == t).double().mean()))

    quick(model, watch, stopping, accuracy, solver=solver)
    assert stopping.values == pytest.approx(losses, rel=1e-5)
    assert accuracy.values == right


def test_the_best_weights_come_back_when_it_stops_and_at_the_last_epoch():
    for losses, end in (([5, 3, 4, 4, 1], 4), ([5, 3, 4], None)):
        plan = Plan(*losses)
        stopping = EarlyStopping(2, restore=True)
        assert plan.run(stopping) == end
        assert stopping.best_epoch == 2
        assert bool((plan.model.net.K_p == 2).all())
    plan = Plan(5, 3, 4)
    plan.run(EarlyStopping(2))
    assert bool((plan.model.net.K_p == 3).all())


def test_restored_hidden_layers_get_an_output_layer_of_all_data():
    """A rate that ruins the model after a good start: what is kept is the start."""
    model, kept = model_of(), []
    stopping = EarlyStopping(2, x=DATA.x_test, t=DATA.t_test, restore=True)
    history = quick(
        model,
        lambda moment: kept.append(copy_of(moment.model)) if moment.end_of_epoch else None,
        stopping,
        epochs=30,
        learning_rate=1.0,
        schedule="constant",
    )
    assert len(history.loss) < 30
    best = kept[stopping.best_epoch - 1]
    hidden = [name for name in best if name.startswith("net.")]
    assert all(torch.equal(best[name], model.state_dict()[name]) for name in hidden)
    assert not torch.equal(best["head.weight"], model.head.weight)


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize("step", [3, 13, 26])
def test_a_training_that_goes_on_stops_where_it_would_have_stopped(
    step, restore, tmp_path, monkeypatch
):
    def stopping():
        return EarlyStopping(4, minimum=0.005, x=DATA.x_test, t=DATA.t_test, restore=restore)

    class Stop(BaseException):
        pass

    def stop(moment):
        if moment.step == step:
            raise Stop

    whole, first = model_of(), stopping()
    history = quick(whole, first, epochs=40)
    assert 7 < len(history.loss) < 40
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    with pytest.raises(Stop):
        quick(model_of(), stopping(), stop, epochs=40, folder=tmp_path)
    resumed, again = model_of(seed=7), stopping()
    assert quick(resumed, again, epochs=40, folder=tmp_path, resume=True).loss == history.loss
    assert again.values == first.values
    assert same(resumed, whole)
    # Also when it is over: there is nothing left to do, but to know the same.
    resumed, again = model_of(seed=8), stopping()
    quick(resumed, again, epochs=40, folder=tmp_path, resume=True)
    assert again.best_epoch == first.best_epoch
    assert same(resumed, whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 0}, "patience must be a whole number >= 1, but got 0"),
        ({"patience": True}, "patience must be a whole number"),
        ({"monitor": "los"}, "Did you mean 'loss'"),
        ({"minimum": -1}, "minimum must be finite and not negative"),
        ({"restore": "yes"}, "restore must be True or False"),
        ({"x": DATA.x_test}, "both x and t"),
    ],
)
def test_impossible_stopping_is_refused(options, message):
    with pytest.raises(HDNNError, match=message):
        EarlyStopping(**options)
    assert EarlyStopping(np.int64(3)).patience == 3


def test_what_does_not_fit_the_model_is_refused_at_the_first_step():
    target = DATA.x_train.clone()
    with pytest.raises(TrainingError, match="no accuracy to watch"):
        quick(model_of("regression"), EarlyStopping(monitor="accuracy"), t=target)
    with pytest.raises(DataError, match=r"x is torch\.float64"):
        quick(model_of(), EarlyStopping(x=DATA.x_test.double(), t=DATA.t_test))
    stopping = EarlyStopping(x=DATA.x_test, t=DATA.x_test)
    quick(model_of("regression"), stopping, t=target)
    assert len(stopping.values) == 4


# States in the checkpoint


class Counter:
    """A callback that remembers."""

    def __init__(self):
        self.seen, self.last = 0, torch.zeros(1)

    def __call__(self, moment):
        self.seen += 1
        self.last = torch.tensor([moment.loss])

    def state_dict(self):
        return {"seen": self.seen, "last.loss": self.last}

    def load_state_dict(self, state):
        self.seen, self.last = state["seen"], state["last.loss"]


def test_callbacks_find_their_states_again_though_others_come_and_go(tmp_path):
    first, second = Counter(), Counter()
    second.seen = 100
    quick(model_of(), first, second, folder=tmp_path)
    again = [Counter(), lambda moment: None, EarlyStopping(), Counter(), Counter()]
    quick(model_of(), *again, folder=tmp_path, resume=True)
    assert [c.seen for c in again if isinstance(c, Counter)] == [16, 116, 0]
    assert torch.equal(again[0].last, first.last)
    quick(model_of(), folder=tmp_path, resume=True)  # and without them


def test_a_state_that_a_callback_cannot_read_is_one_sentence(tmp_path):
    class Other(Counter):
        def load_state_dict(self, state):
            raise KeyError("something else")

    quick(model_of(), Counter(), folder=tmp_path)
    Other.__name__ = "Counter"
    with pytest.raises(CheckpointError, match=r"does not fit.*something else"):
        quick(model_of(), Other(), folder=tmp_path, resume=True)


# One training in a folder at a time

TRAINING = """
import signal, sys, torch, hdnn
from hdnn.data import planar
data = planar.double_moons(40, seed=1)
model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 2), hdnn.SigmoidHead(4))
def wait(moment):
    print("training", flush=True)
    signal.pause()
hdnn.training.fit(model, data.x_train, data.t_train, epochs=1, folder=sys.argv[1], callbacks=[wait])
"""


def test_a_second_process_is_told_that_the_folder_is_taken(stem, tmp_path):
    folder, words = tmp_path / "run", tmp_path / "words"
    process = stem.fork(["-c", TRAINING, str(folder)], words)
    until(lambda: Path(f"{words}.out").exists() and "training" in Path(f"{words}.out").read_text())
    with pytest.raises(CheckpointError, match="another process is training in"):
        quick(model_of(), folder=folder, resume=True)
    process.kill()
    process.wait()
    with checkpoint.locked(folder):  # the lock has died with the process
        pass
    assert {path.name for path in folder.iterdir()} == {checkpoint.NAME, checkpoint.LOG}


def test_a_thread_can_lock_a_folder_twice_and_another_cannot(tmp_path):
    pytest.importorskip("fcntl")
    refused = []

    def other():
        try:
            with checkpoint.locked(tmp_path):
                pass
        except CheckpointError as error:
            refused.append(error)

    with checkpoint.locked(tmp_path):
        with checkpoint.locked(tmp_path):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert len(refused) == 1
    other()
    assert len(refused) == 1


def test_half_a_file_that_a_kill_has_left_is_removed(tmp_path):
    pytest.importorskip("fcntl")
    names = [f".{checkpoint.NAME}.{'0f' * 16}.tmp", ".mine.tmp", f"{'0f' * 16}.tmp"]
    for name in names:
        (tmp_path / name).touch()
    with checkpoint.locked(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == set(names[1:])


def test_where_there_are_no_locks_training_goes_on_without(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def unknown(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unknown)
    quick(model_of(), folder=tmp_path / "one")
    monkeypatch.setitem(sys.modules, "fcntl", None)
    quick(model_of(), folder=tmp_path / "two")


# TensorBoard


def single(values):
    """Over the epochs 1, 2 .., as TensorBoard keeps numbers: in float32."""
    return [(k, float(np.float32(value))) for k, value in enumerate(values, 1)]


def test_tensorboard_sees_what_the_history_has(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path / "new") as board:
        history = quick(model_of(), board)
    found = scalars(tmp_path / "new")
    assert set(found) == {"loss", "accuracy", "gradient_norm", "learning_rate"}
    for name, values in found.items():
        assert values == single(getattr(history, name.removesuffix("_norm")))


def test_a_regression_has_no_accuracy_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path) as board:
        quick(model_of("regression"), board, t=DATA.x_train)
    assert set(scalars(tmp_path)) == {"loss", "gradient_norm", "learning_rate"}


def test_an_interrupted_training_is_one_curve_in_tensorboard(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)

    class Stop(BaseException):
        pass

    def stop(moment):
        if moment.step == 10:
            raise Stop

    run, events = tmp_path / "run", tmp_path / "events"
    with TensorBoard(events) as board, pytest.raises(Stop):
        quick(model_of(), board, stop, folder=run)
    with TensorBoard(events) as board:
        history = quick(model_of(), board, folder=run, resume=True)
        second = quick(model_of(), board)  # one more, after it
    assert scalars(events)["loss"] == single(history.loss + second.loss)


def test_without_tensorboard_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hdnn\[tensorboard\]'"):
        TensorBoard(tmp_path)
    with pytest.raises(CheckpointError, match="a path must be"):
        TensorBoard(3)


# Well posed


def test_implicit_layers_are_kept_at_steps_with_one_solution():
    like = {"generator": torch.Generator().manual_seed(0)}
    net = hdnn.ImplicitH2(4, 2, step=0.5, **like)
    model = hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, **like))
    seen = []
    quick(
        model,
        WellPosed(0.5),
        lambda moment: seen.append(float(net.coupling().max())),
        learning_rate=0.2,
        epochs=2,
    )
    assert max(seen) <= 0.5 * (1 + 1e-5)
    assert max(seen) > 0.49  # it had something to do


@pytest.mark.parametrize("limit", [0.0, 1.0, -1, float("nan"), "much"])
def test_a_limit_lies_between_0_and_1(limit):
    with pytest.raises(TrainingError, match="limit"):
        WellPosed(limit)


def test_explicit_layers_need_no_limit():
    with pytest.raises(TrainingError, match="H2 has none"):
        quick(model_of(), WellPosed())


def implicit_model(kind="semi_implicit_euler_full", seed=0, **options):
    like = {"generator": torch.Generator().manual_seed(seed)}
    net = hdnn.HamiltonianNet(4, 2, kind, init="paper", step=1.0, **like, **options)
    return hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, **like))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_fit_keeps_implicit_layers_well_posed_without_being_asked(activation):
    model, seen = implicit_model(activation=activation), []
    assert float(model.net.coupling().max()) > 1
    quick(model, lambda moment: seen.append(float(moment.model.net.coupling().max())), epochs=2)
    assert max(seen) <= 0.95 * (1 + 1e-5)
    model = implicit_model(activation=activation)
    quick(model, WellPosed(0.5), epochs=1)  # what was asked for counts
    assert float(model.net.coupling().max()) <= 0.5 * (1 + 1e-5)


def test_who_wants_no_limit_gets_none():
    model, seen = implicit_model(), []
    watch = lambda moment: seen.append(float(moment.model.net.coupling().max()))  # noqa: E731
    quick(model, WellPosed(None), watch, epochs=1, batch=200)
    assert max(seen) > 1


def test_layers_with_one_solution_at_any_coupling_and_frozen_ones_are_left_alone():
    model = implicit_model("midpoint")
    K = model.net.weight("K").detach().clone()
    quick(model, epochs=1, learning_rate=1e-9)
    assert torch.allclose(model.net.weight("K"), K, atol=1e-6)
    assert float(model.net.coupling().max()) > 1
    model = implicit_model()
    model.net.K.requires_grad_(False)
    K = model.net.K.clone()
    quick(model, epochs=1, batch=200)
    assert torch.equal(model.net.K, K)


def test_an_implicit_training_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    class Stop(BaseException):
        pass

    def stop(moment):
        if moment.step == 5:
            raise Stop

    whole, resumed = implicit_model(), implicit_model(seed=3)
    history = quick(whole, epochs=2)
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    with pytest.raises(Stop):
        quick(implicit_model(), stop, epochs=2, folder=tmp_path)
    assert quick(resumed, epochs=2, folder=tmp_path, resume=True).loss == history.loss
    assert same(resumed, whole)


@pytest.mark.parametrize(("network", "layers"), [("implicit_h2", 4), ("midpoint", 1)])
def test_the_program_trains_saves_and_certifies_implicit_networks_by_default(
    network, layers, tmp_path
):
    config = TableConfig.of(
        {"data": "swiss_roll", "network": network, "layers": layers, "epochs": 1}
    )
    metrics = task.train(kinds.task_of(config), Run(tmp_path / "run")).metrics
    assert metrics["certificate"]["holds"] is True
    net = kinds.load_model(Run(tmp_path / "run")).net
    assert net.always_solvable or float(net.coupling().max()) < 1


@pytest.mark.parametrize("callbacks", [3, None, [3], "stop"])
def test_callbacks_that_cannot_be_called_are_refused_before_work_starts(callbacks):
    model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 2), hdnn.SigmoidHead(4))
    before = model.net.K_p.clone()
    with pytest.raises(hdnn.errors.TrainingError, match="callback"):
        hdnn.training.fit(model, torch.randn(8, 2), torch.arange(8) % 2, callbacks=callbacks)
    assert torch.equal(model.net.K_p, before)
