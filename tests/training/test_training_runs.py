"""Trainings that are interrupted, weighted, watched, clipped and taken to pieces."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save as to_safetensors

import hdnn
from flips import flipped
from hdnn import models
from hdnn.data import planar
from hdnn.data.images import ImageData
from hdnn.distributed.graph.graph import Graph, from_edges
from hdnn.distributed.graph.plan import Plan
from hdnn.distributed.network.network import GraphNetwork
from hdnn.distributed.training.shards import Shards
from hdnn.distributed.training.training import Training
from hdnn.errors import CheckpointError, DataError, HDNNError, TrainingError
from hdnn.training import (
    EarlyStopping,
    WellPosed,
    checkpoint,
    fit,
    hidden,
    loop,
    output,
    small_heads,
    small_steps,
)
from hdnn.training.images import ImageRecipe, ImageTraining

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


def interrupted(folder, model=None, step=6, callbacks=(), **options) -> bytes:
    """The checkpoint of a training that was stopped."""

    def stop(moment):
        if moment.step == step:
            press_it()

    with pytest.raises(KeyboardInterrupt):
        quick(model or model_of(), folder=folder, callbacks=[*callbacks, stop], **options)
    return (folder / checkpoint.NAME).read_bytes()


def as_before(path: Path, change=None, lost=()) -> None:
    """A checkpoint as earlier versions wrote it: no checksum, and little of what it is."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        state = json.loads(file.metadata()["hdnn-training"])
    state.pop("sha256", None)
    known = ("epochs", "batch", "optimizer", "learning_rate", "schedule", "warmup", "weight_decay")
    known += ("clip", "solver", "ridge", "smoothness", "smoothing", "seed", "data", "model")
    state["options"] = {name: state["options"][name] for name in known}
    if change is not None:
        change(state, tensors)
    path.write_bytes(to_safetensors(tensors, metadata={"hdnn-training": json.dumps(state)}))


def test_a_flipped_bit_of_a_checkpoint_is_refused_or_changes_nothing(tmp_path):
    whole = model_of()
    quick(whole)
    content = interrupted(tmp_path)
    refused = 0
    for place, broken in flipped(content, header=60, tensors=60):
        (tmp_path / checkpoint.NAME).write_bytes(broken)
        model = model_of(seed=3)
        try:
            quick(model, folder=tmp_path, resume=True)
            assert same(model, whole), place
        except CheckpointError:
            refused += 1
            assert (tmp_path / checkpoint.NAME).read_bytes() == broken  # nothing is lost
    assert refused > 110


def test_a_flipped_bit_of_a_shard_is_refused_or_changes_nothing(tmp_path):
    shards = Shards(tmp_path, (0,), "a training")
    shards.prepare()
    tensors = {"w.K": torch.randn(2, 3), "m.K": torch.randn(2, 3)}
    shards.save(0, 5, tensors, {"sums": [0.5, 1.0]})
    (path,) = tmp_path.rglob("*.safetensors")
    content = path.read_bytes()
    for place in range(0, 8 * len(content), 5):
        broken = bytearray(content)
        broken[place // 8] ^= 1 << place % 8
        path.write_bytes(broken)
        try:
            found, note = shards.load(0, 5)
        except CheckpointError:
            continue
        assert note == {"sums": [0.5, 1.0]}
        assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_checkpoint_of_an_earlier_version_goes_on_to_the_same_bits(solver, tmp_path):
    whole = model_of()
    quick(whole, solver=solver)
    interrupted(tmp_path, solver=solver)
    as_before(tmp_path / checkpoint.NAME)
    again = model_of(seed=3)
    quick(again, solver=solver, folder=tmp_path, resume=True)
    assert same(again, whole)
    interrupted(tmp_path / "b", solver=solver)
    as_before(tmp_path / "b" / checkpoint.NAME)
    with pytest.raises(CheckpointError, match="its batch is 50, not 40"):
        quick(model_of(), solver=solver, folder=tmp_path / "b", resume=True, batch=40)


def frozen(name: str):
    def freeze(model):
        model.get_parameter(name).requires_grad_(False)

    return freeze


def replaced(**parts):
    def replace(model):
        for name, part in parts.items():
            setattr(model, name, part)

    return replace


def asked_for(**options):
    def ask(model):
        for name, value in options.items():
            setattr(model.net, name, value)

    return ask


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (replaced(augment=hdnn.Augment(2, 4, "first")), "its augment.placement is 'split', not"),
        (replaced(augment=hdnn.Augment(2, 4, [1, 0])), "its augment.placement"),
        (replaced(head=hdnn.SoftmaxHead(4, 2)), "its head.kind is 'SigmoidHead', not 'Softmax"),
        (replaced(net=hdnn.H2(4, 4, step=0.6 + 1e-7)), r"its net.step is 0\.6, not 0\.60000009"),
        (replaced(net=hdnn.H2(4, 4, activation="relu")), "its model is"),
        (replaced(net=hdnn.MS3(4, 4)), "its model is"),
        (asked_for(engine="reference"), "its net.engine is 'auto', not 'reference'"),
        (asked_for(backprop="stored"), "its net.backprop is 'auto', not 'stored'"),
        (frozen("net.K_p"), r"its frozen weights is \[\], not \['net.K_p'\]"),
        (frozen("head.weight"), "its frozen weights"),
    ],
)
def test_a_training_of_another_model_does_not_go_on(change, words, tmp_path):
    before = interrupted(tmp_path)
    other = model_of()
    change(other)
    with pytest.raises(CheckpointError, match=f"is of another training: {words}"):
        quick(other, folder=tmp_path, resume=True)
    assert (tmp_path / checkpoint.NAME).read_bytes() == before


def test_a_training_that_began_with_a_frozen_weight_goes_on_with_it_only(tmp_path):
    whole, part, again = model_of(), model_of(), model_of(seed=3)
    for model in (whole, part, again):
        frozen("net.K_p")(model)
    with torch.no_grad():
        again.net.K_p.copy_(whole.net.K_p)
    quick(whole)
    interrupted(tmp_path, part)
    with pytest.raises(CheckpointError, match="frozen weights"):
        quick(model_of(), folder=tmp_path, resume=True)
    quick(again, folder=tmp_path, resume=True)
    assert same(again, whole)


DIFFERENT = {
    "epochs": 4,
    "batch": 40,
    "optimizer": "sgd",
    "learning_rate": 0.03,
    "schedule": "constant",
    "warmup": 0.1,
    "weight_decay": 0.1,
    "clip": 1.0,
    "solver": "adam",
    "ridge": 1e-3,
    "smoothness": 1e-3,
    "smoothing": "cosine",
    "seed": 1,
}


def test_a_training_with_any_other_option_or_other_data_does_not_go_on(tmp_path):
    interrupted(tmp_path)
    x, t = DATA.x_train, DATA.t_train
    for name, value in DIFFERENT.items():
        with pytest.raises(CheckpointError, match=f"of another training: its {name} is"):
            quick(model_of(), folder=tmp_path, resume=True, **{name: value})
    moved = x.clone()
    moved[17, 1] += 1e-6
    for data in ({"x": moved}, {"t": 1 - t}, {"weight": torch.ones(len(x))}):
        with pytest.raises(CheckpointError, match="of another training: its data is"):
            quick(model_of(), folder=tmp_path, resume=True, **data)


def test_data_of_the_same_bytes_in_another_form_are_other_data(tmp_path):
    model = hdnn.Model(None, hdnn.H2(2, 2), hdnn.RegressionHead(2, 1))
    x = torch.rand(40, 2)
    interrupted(tmp_path, model, x=x, t=x[:, :1].clone(), step=2, batch=20)
    again = hdnn.Model(None, hdnn.H2(2, 2), hdnn.RegressionHead(2, 1))
    both = torch.cat([x.flatten(), x[:, 0]])  # the same row of bytes, cut elsewhere
    other = {"x": both[:60].view(30, 2), "t": both[60:90].view(30, 1), "weight": both[90:]}
    with pytest.raises(CheckpointError, match=r"its shapes is '.*\(40, 2\).*', not '.*\(30, 2\)"):
        quick(again, folder=tmp_path, resume=True, batch=20, **other)


def test_a_training_does_not_go_on_under_other_settings_of_the_engine(tmp_path):
    interrupted(tmp_path)
    with (
        hdnn.engine.use(engine="reference"),
        pytest.raises(CheckpointError, match=r"its engine.engine is None, not 'reference'"),
    ):
        quick(model_of(), folder=tmp_path, resume=True)
    precise = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(CheckpointError, match=f"its matmul precision is '{precise}', not"):
            quick(model_of(), folder=tmp_path, resume=True)
    finally:
        torch.set_float32_matmul_precision(precise)
    with hdnn.engine.use(check=False):  # which changes no bit
        quick(model_of(), folder=tmp_path, resume=True)


def test_callbacks_that_have_a_say_must_be_the_same_until_the_end(tmp_path):
    implicit = {"kind": "ImplicitH2", "layers": 2}
    interrupted(tmp_path, model_of(**implicit), callbacks=[WellPosed(0.5), EarlyStopping(9)])
    others = ([WellPosed(0.5)], [WellPosed(0.6), EarlyStopping(9)], [])
    others += ([WellPosed(0.5), EarlyStopping(9, x=DATA.x_test, t=DATA.t_test)],)
    for callbacks in others:
        with pytest.raises(CheckpointError, match="of another training: its callbacks is"):
            quick(model_of(**implicit), folder=tmp_path, resume=True, callbacks=callbacks)
    seen = []
    kept = [seen.append, WellPosed(0.5), EarlyStopping(9)]
    quick(model_of(**implicit), folder=tmp_path, resume=True, callbacks=kept)
    assert len(seen) == 6
    quick(model_of(**implicit), folder=tmp_path, resume=True)  # it is over


def set_state(name, value):
    def change(state, tensors):
        state[name] = value

    return change


def set_tensor(name, make):
    def change(state, tensors):
        tensors[name] = make(tensors.get(name))

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_state("epoch", "1"),
        set_state("epoch", -1),
        set_state("epoch", 99),
        set_state("k", 1000),
        set_state("k", 1.5),
        set_state("sums", [1.0]),
        set_state("sums", "ab"),
        set_state("sums", [None, 1]),
        set_state("history", {"loss": 3}),
        set_state("history", []),
        set_state("history", {"loss": ["x"]}),
        set_state("history", {"nonsense": [1.0]}),
        set_state("stopped", "no"),
        set_state("callbacks", 3),
        set_state("options", [1]),
        lambda state, tensors: state.pop("history"),
        lambda state, tensors: state.pop("k"),
        set_tensor("optimizer.0.exp_avg", lambda t: t[:1]),
        set_tensor("optimizer.0.exp_avg", lambda t: t.flatten()),
        set_tensor("optimizer.0.exp_avg_sq", lambda t: t.long()),
        set_tensor("optimizer.0.step", lambda t: torch.zeros(3)),
        set_tensor("optimizer.9.exp_avg", lambda _: torch.zeros(3)),
        set_tensor("optimizer.x.exp_avg", lambda _: torch.zeros(3)),
        set_tensor("model.net.K_p", lambda t: t[:1]),
        set_tensor("model.more", lambda _: torch.zeros(3)),
        set_tensor("callback.none.x", lambda _: torch.zeros(3)),
        set_tensor("generator", lambda t: t[:9]),
        set_tensor("generator", lambda t: t.float()),
        lambda state, tensors: tensors.pop("generator"),
        lambda state, tensors: tensors.pop("optimizer.0.exp_avg_sq"),
        lambda state, tensors: tensors.pop("model.net.b_q"),
    ],
)
def test_a_checkpoint_without_sense_is_one_sentence(change, tmp_path):
    interrupted(tmp_path)
    as_before(tmp_path / checkpoint.NAME, change)
    before = (tmp_path / checkpoint.NAME).read_bytes()
    with pytest.raises(CheckpointError, match=checkpoint.NAME):
        quick(model_of(), folder=tmp_path, resume=True)
    assert (tmp_path / checkpoint.NAME).read_bytes() == before


def test_a_folder_or_a_pipe_in_place_of_a_checkpoint_is_one_sentence(tmp_path):
    (tmp_path / "a" / checkpoint.NAME).mkdir(parents=True)
    (tmp_path / "b").mkdir()
    os.mkfifo(tmp_path / "b" / checkpoint.NAME)
    for folder, what in (("a", "a folder"), ("b", "a pipe")):
        with pytest.raises(CheckpointError, match=f"cannot be read: it is {what}"):
            quick(model_of(), folder=tmp_path / folder, resume=True)


# Trainings on a graph


def graph_training(folder, x, t, **options) -> Training:
    links = from_edges(2, [(0, 1)])
    graph = Graph(links, links, None, (1, 1))
    net = GraphNetwork(Plan(graph, [0, 0]), 2)
    net.draw(0, "scaled", 1.0)
    head = hdnn.SigmoidHead(4, generator=torch.Generator().manual_seed(0))
    return Training(net, head, x, t, folder=folder, epochs=2, batch=20, **options)


def test_a_training_on_a_graph_does_not_go_on_with_other_data(tmp_path):
    x, t = torch.randn(4, 40, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    graph_training(tmp_path, x, t).run()
    other = x.clone()
    other[3, 5] += 1e-6
    for data in ((other, t), (x, 1 - t)):
        with pytest.raises(CheckpointError, match="belongs to a training with other data of node"):
            graph_training(tmp_path, *data).run(resume=True)
    with pytest.raises(CheckpointError, match="other options, data or graph"):
        graph_training(tmp_path, x, t, seed=3).run(resume=True)
    graph_training(tmp_path, x, t).run(resume=True)


# Trainings on images


def halves(seed=0, **changes) -> ImageData:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 200, (60, 1, 6, 6), generator=generator).to(torch.uint8)
    t = torch.arange(60) % 2
    parts = {"images_train": x[:40], "t_train": t[:40], "images_test": x[40:], "t_test": t[40:]}
    known = {"name": "Halves", "classes": ("0", "1"), "mean": (0.4,), "std": (0.2,)}
    return ImageData(**{**known, **parts, **changes})


def image_training(change=None, data=None, smooth=True, **options) -> ImageTraining:
    torch.manual_seed(0)
    net = models.mnist_net("h2", 2, channels=4, size=6, classes=2)
    if change is not None:
        change(net)
    recipe = {"epochs": 2, "batch": 20, "optimizer": "adam", "smoothness": 0.1, **options}
    return ImageTraining(
        net, data or halves(), ImageRecipe(**recipe), smooth=(net.net,) if smooth else ()
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"data": halves(1)}, "its images is"),
        ({"data": halves(mean=(0.5,))}, "its normalisation is"),
        ({"data": halves(t_test=torch.zeros(20, dtype=torch.int64))}, "its images is"),
        ({"change": lambda net: net.net.K_p.requires_grad_(False)}, "its frozen weights is"),
        ({"change": asked_for(engine="reference")}, "its net.engine is"),
        ({"change": asked_for(step=0.5 + 1e-7)}, "its net.step is 0.5"),
        ({"smooth": False}, r"its smooth parts is \['net'\], not \[\]"),
        ({"batch": 10}, "its batch is"),
        ({"flip": True}, "its flip is"),
    ],
)
def test_another_training_on_images_does_not_go_on(other, words, tmp_path):
    image_training().run(folder=tmp_path, until=0.0, progress=False)
    before = (tmp_path / checkpoint.NAME).read_bytes()
    with pytest.raises(CheckpointError, match=f"of another training: {words}"):
        image_training(**other).run(folder=tmp_path, resume=True, progress=False)
    assert (tmp_path / checkpoint.NAME).read_bytes() == before
    image_training().run(folder=tmp_path, resume=True, progress=False)


def test_a_loaded_image_model_has_its_weights_in_the_same_order(tmp_path):
    """Moments in a checkpoint are known by the number of their weight."""
    net = image_training().model
    hdnn.save(net, tmp_path / "m")
    names = [name for name, _ in hdnn.load(tmp_path / "m").named_parameters()]
    assert names == [name for name, _ in net.named_parameters()]


KILLED = """
import sys, torch, hdnn
from hdnn.data import planar
from hdnn.training import fit, loop
loop.SAVE_EVERY = 0.02
like = {"generator": torch.Generator().manual_seed(0)}
net = hdnn.H2(4, 16, **like)
model = hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, **like))
data = planar.double_moons(400, seed=1)
fit(model, data.x_train, data.t_train, epochs=60, batch=20, folder=sys.argv[1], resume=True)
hdnn.save(model, sys.argv[1] + "/model.safetensors")
"""


def test_a_killed_training_goes_on_to_the_same_bits(stem, tmp_path, monkeypatch):
    def run(folder: Path) -> bytes:
        monkeypatch.setattr(sys, "argv", ["", str(folder)])
        exec(KILLED, {})
        return (folder / "model.safetensors").read_bytes()

    def killed(folder: Path, alive: float) -> None:
        before = saved(folder)
        process = stem.fork(["-c", KILLED, str(folder)], tmp_path / "words")
        while saved(folder) == before:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(alive)
        process.kill()
        assert process.wait().code == -signal.SIGKILL

    def saved(folder: Path) -> int:
        file = folder / checkpoint.NAME
        return file.stat().st_mtime_ns if file.exists() else 0

    monkeypatch.setattr(loop, "SAVE_EVERY", loop.SAVE_EVERY)  # KILLED changes it
    for alive in (0.0, 0.05):  # the second has gone on from the first
        killed(tmp_path / "killed", alive)
    assert run(tmp_path / "killed") == run(tmp_path / "whole")


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
        output.newton(head, y.detach(), t, None, 1e-4, output.MINIBATCH_STEPS["newton"])
    elif solver == "adam":
        output.adam(head, [(y.detach(), t, None)], 1e-4, 2.5e-2, 10)
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
    output.newton(other.head, y.detach(), t, None, 1e-4, output.MINIBATCH_STEPS["newton"])
    (other.head.loss(other.head(y), t) + 0.5 * other.net.smoothness()).backward()
    for name, p in other.net.named_parameters():
        torch.testing.assert_close(seen[name], p.grad, rtol=1e-9, atol=1e-12)


def test_the_inner_adam_is_that_of_pytorch():
    torch.manual_seed(0)
    y, t = torch.randn(50, 4, dtype=torch.float64), torch.randint(0, 3, (50,))
    ours, theirs = (hdnn.SoftmaxHead(4, 3, dtype=torch.float64) for _ in range(2))
    output.adam(ours, [(y, t, None)], 0.01, 0.025, 10)
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
    mine = hidden.optimizer_of("adam", [{"params": ours, "weight_decay": decay}], 0.1)
    other = torch.optim.Adam(theirs, lr=0.1, weight_decay=decay)
    assert isinstance(mine, small_steps.CompiledAdam)
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
                patch.setattr(small_heads, "usable", lambda head, y, solver: False)
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
