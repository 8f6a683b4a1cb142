"""Model: augmentation, stack and head together."""

from __future__ import annotations

import copy

import numpy
import pytest
import torch

import hdnn
from hdnn import Augment, LinearHead, Model, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.errors import HDNNError, OptionError, ShapeError
from strategies import Random

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(head: str = "softmax", augment: bool = True, dtype=F64) -> Model:
    options = {"generator": generator(), "dtype": dtype}
    heads = {
        "softmax": lambda: SoftmaxHead(4, 3, **options),
        "sigmoid": lambda: SigmoidHead(4, **options),
        "regression": lambda: RegressionHead(4, 2, **options),
        "linear": lambda: LinearHead(4, 2, **options),
    }
    net = hdnn.H2(4, 3, step=0.1, **options)
    return Model(Augment(2, 4) if augment else None, net, heads[head]())


X = Random(0)(5, 2)


def test_a_model_is_head_after_net_after_augment():
    model = make()
    y0 = model.augment(X)
    assert torch.equal(model.embed(X), y0)
    assert torch.equal(model.features(X), model.net(y0))
    assert torch.equal(model.trajectory(X), model.net.trajectory(y0))
    assert torch.equal(model(X), model.head(model.net(y0)))


def test_without_augment_the_input_is_the_state():
    model = make(augment=False)
    y = Random(1)(5, 4)
    assert torch.equal(model.embed(y), y)
    assert torch.equal(model(y), model.head(model.net(y)))


@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize(("head", "outputs"), [("softmax", 3), ("sigmoid", 1), ("regression", 2)])
def test_any_batch_shape(head, outputs, batch):
    model, x = make(head), Random(0)(*batch, 2)
    assert model(x).shape == (*batch, outputs)
    assert model.trajectory(x).shape == (4, *batch, 4)
    labels = batch if head != "regression" else (*batch, 2)
    assert model.predict(x).shape == labels
    if head != "regression":
        assert model.predict_proba(x).shape == (*batch, model.head.classes)


@pytest.mark.parametrize("head", ["softmax", "sigmoid"])
def test_predictions_are_the_most_probable_class(head):
    model = make(head)
    assert torch.equal(model.predict(X), model.predict_proba(X).argmax(-1))
    assert not model.predict_proba(X).requires_grad


def test_the_loss_is_the_heads():
    for head, t in (
        ("softmax", torch.tensor([0, 1, 2, 0, 1])),
        ("sigmoid", torch.tensor([0, 1, 1, 0, 1])),
        ("regression", Random(3)(5, 2)),
    ):
        model = make(head)
        assert torch.equal(model.loss(X, t), model.head.loss(model(X), t))
        model.loss(X, t).backward()
        assert all(p.grad is not None for p in model.parameters())


def test_training_a_model_reduces_its_loss():
    model, t = make(), torch.tensor([0, 1, 2, 0, 1])
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    before = model.loss(X, t).item()
    for _ in range(20):
        optimiser.zero_grad()
        model.loss(X, t).backward()
        optimiser.step()
    assert model.loss(X, t).item() < 0.7 * before


def test_a_linear_head_has_neither_loss_nor_predictions():
    model = make("linear")
    assert model(X).shape == (5, 2)
    with pytest.raises(OptionError, match="LinearHead has no loss; use a SoftmaxHead"):
        model.loss(X, X)
    with pytest.raises(OptionError, match="LinearHead has no predictions"):
        model.predict(X)
    with pytest.raises(OptionError, match="LinearHead has no probabilities"):
        model.predict_proba(X)
    with pytest.raises(OptionError, match="RegressionHead has no probabilities"):
        make("regression").predict_proba(X)


def test_the_parts_fit_together():
    net, head = hdnn.H2(4, 2), SoftmaxHead(4, 2)
    with pytest.raises(ShapeError, match="augment gives 6 features, but net takes 4"):
        Model(Augment(2, 6), net, head)
    with pytest.raises(ShapeError, match="net gives 4 features, but head takes 6"):
        Model(Augment(2, 4), net, SoftmaxHead(6, 2))


def test_the_parts_are_an_augmentation_a_network_and_a_head():
    augment, net, head = Augment(2, 4), hdnn.H2(4, 2), SoftmaxHead(4, 2)
    for name, parts in (
        ("net", (None, None, head)),
        ("head", (None, net, None)),
        ("augment", (torch.nn.Linear(2, 4), net, head)),
        ("net", (None, torch.nn.Linear(4, 4), head)),
        ("head", (None, net, torch.nn.Linear(4, 2))),
        ("augment", (net, augment, head)),
        ("net", (None, head, net)),
    ):
        with pytest.raises(HDNNError, match=name):
            Model(*parts)


@pytest.mark.parametrize("x", [None, [1.0, 2.0], numpy.ones(2), "x", torch.ones(3), torch.ones(())])
def test_inputs_that_do_not_fit_are_refused(x):
    for method in ("forward", "predict", "predict_proba", "trajectory"):
        with pytest.raises(HDNNError):
            getattr(make(), method)(x)


@pytest.mark.parametrize("x", [torch.ones(5, 2).long(), torch.ones(5, 2)])
def test_inputs_of_another_dtype_are_refused(x):
    with pytest.raises(ShapeError, match="float"):
        make()(x)


def test_a_model_is_cast_copied_and_restored_as_a_whole():
    model = make()
    twin = copy.deepcopy(model)
    other = make()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(twin(X), model(X))
    assert torch.equal(other(X), model(X))
    assert model.to(torch.float32)(X.float()).dtype == torch.float32
    meta = model.to("meta")
    assert meta(torch.empty(5, 2, device="meta")).device.type == "meta"


def test_the_repr_names_all_parts():
    text = repr(make())
    assert "Augment(2 -> 4" in text
    assert "H2(4 features, 3 layers" in text
    assert "SoftmaxHead(4 -> 3)" in text


def test_every_network_serves_in_a_model():
    for kind in (hdnn.H1, hdnn.H2, hdnn.ImplicitH2, hdnn.MS1, hdnn.MS2, hdnn.MS3, hdnn.MLP):
        model = Model(Augment(2, 4), kind(4, 2, dtype=F64), SoftmaxHead(4, 2, dtype=F64))
        model.loss(X, torch.tensor([0, 1, 0, 1, 0])).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
