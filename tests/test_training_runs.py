"""Trainings that are interrupted, weighted, watched, clipped and taken to pieces."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hdnn
from hdnn.data import planar
from hdnn.errors import CheckpointError, DataError, HDNNError, TrainingError
from hdnn.training import checkpoint, coordinate, fit, loop, output, small_heads, small_steps

DATA = planar.double_moons(400, seed=1)
SOLVERS = ("newton", "adam", "joint")


def model_of(kind="H2", head="sigmoid", *, layers=4, seed=0, dtype=None, **options):
    like = {"generator": torch.Generator().manual_seed(seed), "dtype": dtype}
    net = getattr(hdnn, kind)(4, layers, **like, **options)
    heads = {"sigmoid": hdnn.SigmoidHead, "softmax": lambda n, **k: hdnn.SoftmaxHead(n, 2, **k)}
    return hdnn.Model(hdnn.Augment(2, 4), net, heads[head](4, **like))


def quick(model, x=DATA.x_train, t=DATA.t_train, **options):
    return fit(model, x, t, **{"epochs": 3, "batch": 50, "progress": False, **options})


def same(a, b) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Stop(BaseException):
    """An interruption that nobody catches."""


def raise_it() -> None:
    raise Stop


def press_it() -> None:
    os.kill(os.getpid(), signal.SIGINT)


# Going on after an interruption


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("stop", [raise_it, press_it])
@pytest.mark.parametrize("step", [1, 4, 6, 11, 12])
def test_a_resumed_training_ends_as_if_it_had_never_stopped(
    solver, stop, step, tmp_path, monkeypatch
):
    whole = model_of()
    history = quick(whole, solver=solver)
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0 if step % 2 else 1e9)

    def callback(moment):
        if moment.step == step:
            stop()

    with pytest.raises((Stop, KeyboardInterrupt)):
        quick(model_of(), solver=solver, folder=tmp_path, callbacks=[callback])
    resumed = model_of(seed=7)  # what it begins with does not matter: the checkpoint has it
    again = quick(resumed, solver=solver, folder=tmp_path, resume=True)
    assert same(resumed, whole)
    assert again.loss == history.loss
    assert again.accuracy == history.accuracy
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [entry["epoch"] for entry in log] == [1, 2, 3]
    assert [entry["loss"] for entry in log] == history.loss
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_finished_training_is_not_trained_again(solver, tmp_path):
    model = model_of()
    quick(model, solver=solver, folder=tmp_path)
    again = model_of(seed=3)
    moments = []
    quick(again, solver=solver, folder=tmp_path, resume=True, callbacks=[moments.append])
    assert moments == []
    assert same(again, model)


def test_a_training_with_learned_steps_goes_on(tmp_path):
    model = model_of(learn_step=True)
    before, form = repr(model.net), model.net.form()
    quick(model, folder=tmp_path)
    assert repr(model.net) != before
    assert model.net.form() == form
    again = model_of(learn_step=True, seed=3)
    quick(again, folder=tmp_path, resume=True)
    assert same(again, model)


def test_another_training_is_neither_overwritten_nor_gone_on_with(tmp_path):
    quick(model_of(), folder=tmp_path)
    before = (tmp_path / checkpoint.NAME).read_bytes()
    with pytest.raises(CheckpointError, match="holds a training already"):
        quick(model_of(), folder=tmp_path)
    with pytest.raises(CheckpointError, match="its epochs is 3, not 4"):
        quick(model_of(), folder=tmp_path, resume=True, epochs=4)
    with pytest.raises(CheckpointError, match="its data is"):
        quick(model_of(), DATA.x_test, DATA.t_test, folder=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="its model is"):
        quick(model_of(layers=5), folder=tmp_path, resume=True)
    with pytest.raises(CheckpointError, match="needs the folder"):
        quick(model_of(), resume=True)
    assert (tmp_path / checkpoint.NAME).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 100])
def test_a_damaged_checkpoint_is_one_sentence(content, tmp_path):
    (tmp_path / checkpoint.NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read as a training"):
        quick(model_of(), folder=tmp_path, resume=True)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        quick(model_of(), folder=tmp_path / "file" / "run")


KILLED = """
import sys, torch, hdnn
from hdnn.data import planar
from hdnn.training import fit, loop
loop.SAVE_EVERY = 0.02
like = {"generator": torch.Generator().manual_seed(0)}
net = hdnn.H2(4, 16, **like)
model = hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, **like))
data = planar.double_moons(400, seed=1)
print("ready", flush=True)
fit(model, data.x_train, data.t_train, epochs=40, batch=20, folder=sys.argv[1], resume=True)
hdnn.save(model, sys.argv[1] + "/model.safetensors")
"""


def test_a_killed_training_goes_on_to_the_same_bits(tmp_path):
    def run(folder: Path, alive: float | None) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE
        )
        with process:
            assert process.stdout is not None
            process.stdout.readline()
            if alive is not None:
                time.sleep(alive)
                os.kill(process.pid, signal.SIGKILL)
            process.wait()

    run(tmp_path / "whole", None)
    for alive in (0.1, 0.25, 0.4):
        run(tmp_path / "killed", alive)
    run(tmp_path / "killed", None)
    whole, killed = ((tmp_path / k / "model.safetensors").read_bytes() for k in ("whole", "killed"))
    assert whole == killed


# Sample weights


@pytest.mark.parametrize("head", ["sigmoid", "softmax"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_weight_of_two_is_the_same_sample_twice(head, solver):
    x, t = DATA.x_train[:40].double(), DATA.t_train[:40]
    weight = torch.ones(40, dtype=torch.float64)
    weight[:15] = 2
    options = {"solver": solver, "batch": 100, "epochs": 4}
    weighted = model_of(head=head, dtype=torch.float64)
    quick(weighted, x, t, weight=weight, **options)
    repeated = model_of(head=head, dtype=torch.float64)
    quick(repeated, torch.cat([x, x[:15]]), torch.cat([t, t[:15]]), **options)
    for a, b in zip(weighted.parameters(), repeated.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_minibatches_in_which_nobody_counts_are_left_out():
    weight = torch.zeros(len(DATA.x_train))
    weight[:3] = 1.0
    model = model_of()
    quick(model, weight=weight, batch=2)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.ones(3), "a number for each sample"),
        ([1.0], "list"),
        (-torch.ones(200), "not negative"),
        (torch.zeros(200), "all zero"),
        (torch.full((200,), torch.nan), "finite"),
    ],
)
def test_bad_weights_are_refused(weight, message):
    with pytest.raises(DataError, match=message):
        quick(model_of(), weight=weight)


# The step itself


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("kind", ["H1", "H2", "MS1", "MS2", "MS3", "ImplicitH2", "MLP"])
def test_a_step_follows_the_gradient_of_the_objective(kind, solver):
    """One step of plain gradient descent, against autograd of loss and R_K."""
    options = {"init": "scaled"} if kind in ("MLP",) else {"step": 0.1}
    model = model_of(kind, dtype=torch.float64, layers=3, **options)
    x, t = DATA.x_train[:30].double(), DATA.t_train[:30]
    seen = {}

    def watch(moment):
        seen.update({n: p.grad.clone() for n, p in moment.model.net.named_parameters()})

    weights = {n: p.detach().clone() for n, p in model.net.named_parameters()}
    alpha = 0.3
    quick(model, x, t, epochs=1, batch=30, solver=solver, smoothness=alpha, callbacks=[watch])
    other = model_of(kind, dtype=torch.float64, layers=3, **options)
    head = other.head
    y = other.features(x)
    if solver == "newton":
        coordinate.newton(head, y.detach(), t, 1e-4, output.MINIBATCH_STEPS["newton"])
    elif solver == "adam":
        coordinate.adam(head, [(y.detach(), t, None)], 1e-4, 2.5e-2, 10)
    objective = head.loss(head(y), t)
    if hasattr(other.net, "smoothness"):
        objective = objective + alpha * other.net.smoothness()
    objective.backward()
    for name, p in other.net.named_parameters():
        assert torch.equal(p, weights[name])
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{"tied": True}, {"learn_step": True}, {"step": (0.1, 0.2, 0.3)}]
)
def test_smoothness_of_other_forms_has_its_gradient_too(options):
    model = model_of(layers=3, dtype=torch.float64, **options)
    x, t = DATA.x_train[:30].double(), DATA.t_train[:30]
    seen = {}

    def watch(moment):
        seen.update({n: p.grad.clone() for n, p in moment.model.net.named_parameters()})

    quick(model, x, t, epochs=1, batch=30, smoothness=0.5, callbacks=[watch])
    other = model_of(layers=3, dtype=torch.float64, **options)
    y = other.features(x)
    coordinate.newton(other.head, y.detach(), t, 1e-4, output.MINIBATCH_STEPS["newton"])
    (other.head.loss(other.head(y), t) + 0.5 * other.net.smoothness()).backward()
    for name, p in other.net.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-9, atol=1e-12)


def test_the_inner_adam_is_that_of_pytorch():
    torch.manual_seed(0)
    y, t = torch.randn(50, 4, dtype=torch.float64), torch.randint(0, 3, (50,))
    ours, theirs = (hdnn.SoftmaxHead(4, 3, dtype=torch.float64) for _ in range(2))
    coordinate.adam(ours, [(y, t, None)], 0.01, 0.025, 10)
    with torch.no_grad():
        for p in theirs.parameters():
            p.zero_()
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.025, weight_decay=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        theirs.loss(theirs(y), t).backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_adam_of_small_models_is_that_of_pytorch(decay):
    torch.manual_seed(0)
    ours, theirs = ([torch.ones(3, 2).requires_grad_()] for _ in range(2))
    mine = loop._optimizer("adam", [{"params": ours, "weight_decay": decay}], 0.1)
    other = torch.optim.Adam(theirs, lr=0.1, weight_decay=decay)
    assert isinstance(mine, small_steps.Adam)
    for _ in range(20):
        for optimizer, (p,) in ((mine, ours), (other, theirs)):
            optimizer.zero_grad()
            (p * torch.arange(6.0).view(3, 2)).sin().sum().backward()
            optimizer.descend() if optimizer is mine else optimizer.step()
    torch.testing.assert_close(ours[0], theirs[0])
    assert mine.state_dict()["state"][0].keys() == other.state_dict()["state"][0].keys()


# Callbacks, rates and clipping


def test_callbacks_see_every_step_and_can_end_the_training():
    moments = []

    def callback(moment):
        moments.append(moment)
        return moment.step == 6

    history = quick(model_of(), callbacks=[callback])
    assert [m.step for m in moments] == [1, 2, 3, 4, 5, 6]
    assert [m.end_of_epoch for m in moments] == [False, False, False, True, False, False]
    assert moments[0].steps == 12
    assert moments[0].epochs == 3
    assert moments[-1].epoch == 2
    assert all(m.gradient > 0 and 0 <= m.accuracy <= 1 for m in moments)
    assert len(history.loss) == 1


def test_the_rate_rises_for_the_warm_up_and_then_falls():
    rates = []
    quick(model_of(), warmup=0.5, callbacks=[lambda m: rates.append(m.learning_rate)])
    assert rates.index(max(rates)) in (5, 6)
    assert all(a < b for a, b in itertools.pairwise(rates[:6]))
    assert all(a >= b for a, b in itertools.pairwise(rates[6:]))


def test_smoothing_that_falls_leaves_the_layers_freer_in_the_end():
    options = {"smoothness": 0.5, "learning_rate": 5e-2, "epochs": 30}
    rough, smooth = (
        quick(model_of(layers=8, init="paper"), smoothing=way, **options).smoothness
        for way in ("cosine", "constant")
    )
    assert smooth[-1] < rough[-1]
    assert rough[15] < rough[0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_clipped_gradients_stay_below_their_bound(optimizer):
    norms = []

    def callback(moment):
        found = [p.grad.norm() for p in moment.model.net.parameters()]
        norms.append(float(torch.stack(found).norm()))

    quick(model_of(), clip=1e-3, optimizer=optimizer, callbacks=[callback])
    assert max(norms) <= 1e-3 * (1 + 1e-4)


@pytest.mark.parametrize(
    "options",
    [{"clip": 0}, {"clip": -1.0}, {"warmup": 1.0}, {"warmup": -0.1}, {"optimizer": "lion"}],
)
def test_bad_options_are_one_sentence(options):
    with pytest.raises(HDNNError):
        quick(model_of(), **options)


def test_a_training_that_diverges_names_the_layer_and_keeps_its_last_good_checkpoint(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(loop, "SAVE_EVERY", -1.0)
    model = model_of(activation="relu", layers=6)

    def spoil(moment):
        if moment.step == 5:
            with torch.no_grad():
                moment.model.net.K_p[3] = float("nan")

    with pytest.raises(TrainingError, match="first in layer 3"):
        quick(model, folder=tmp_path, callbacks=[spoil])
    monkeypatch.setattr(loop, "SAVE_EVERY", 1e9)
    good = model_of(seed=9, activation="relu", layers=6)
    quick(good, folder=tmp_path, resume=True)
    assert all(bool(torch.isfinite(p).all()) for p in good.parameters())


@pytest.mark.parametrize("kind", ["H1", "H2", "MS1", "MS2", "MS3"])
@pytest.mark.parametrize("solver", ["newton", "adam"])
def test_compiled_steps_train_as_plain_ones_do(kind, solver):
    found = []
    for engine in ("auto", "reference"):
        g = torch.Generator().manual_seed(3)
        net = getattr(hdnn, kind)(4, 6, T=1.0, init="paper", generator=g, dtype=torch.float64)
        head = hdnn.SigmoidHead(4, generator=g, dtype=torch.float64)
        model = hdnn.Model(hdnn.Augment(2, 4), net, head)
        with hdnn.engine.use(engine=engine), pytest.MonkeyPatch.context() as patch:
            if engine == "reference":
                patch.setattr(small_steps, "usable", lambda parameters: False)
                patch.setattr(small_heads, "usable", lambda head, y: False)
            fit(
                *(model, DATA.x_train.double(), DATA.t_train),
                epochs=3,
                batch=40,
                solver=solver,
                smoothness=1e-2,
                smoothing="cosine",
                weight_decay=1e-3,
                progress=False,
            )
        found.append(model.state_dict())
    for name, wanted in found[1].items():
        torch.testing.assert_close(found[0][name], wanted, rtol=1e-6, atol=1e-8)
