"""Augmentation, output layers, and models made of both and a network."""

import copy

import pytest
import torch
from torch import nn

import hdnn
from hdnn import (
    Augment,
    LinearHead,
    Model,
    RegressionHead,
    SigmoidHead,
    SoftmaxHead,
)
from hdnn.errors import DataError, HDNNError, OptionError, ShapeError

HEADS = {
    "linear": lambda **o: LinearHead(4, 3, **o),
    "regression": lambda **o: RegressionHead(4, 2, **o),
    "sigmoid": lambda **o: SigmoidHead(4, **o),
    "softmax": lambda **o: SoftmaxHead(4, 3, **o),
}


def test_augmenting_places_every_input_and_adds_only_zeros():
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert Augment(3, 6)(x).tolist() == [[1, 2, 0, 0, 0, 3]]
    assert Augment(3, 6, "first")(x).tolist() == [[1, 2, 3, 0, 0, 0]]
    assert Augment(3, 6, [5, 0, 2])(x).tolist() == [[2, 0, 3, 0, 0, 1]]
    assert torch.equal(Augment(3, 3)(x), x)
    y = torch.randn(2, 5, 3, requires_grad=True)
    Augment(3, 6)(y).sum().backward()
    assert torch.equal(y.grad, torch.ones_like(y))
    placed = Augment(3, 6, [5, 0, 2]).to("meta").to_empty(device="cpu")
    placed.reset_parameters()
    assert placed(x).tolist() == [[2, 0, 3, 0, 0, 1]]


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_affine_made_again_by_their_config_and_by_their_seed(name):
    head = HEADS[name](generator=torch.Generator().manual_seed(0))
    y = torch.randn(2, 5, 4)
    torch.testing.assert_close(head(y), y @ head.weight.T + head.bias)
    twin = type(head)(**head.config())
    twin.load_state_dict(head.state_dict())
    assert torch.equal(twin(y), head(y))
    wide = HEADS[name](
        generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    assert torch.equal(wide.weight, head.weight.double())
    head.reset_parameters(torch.Generator().manual_seed(0))
    assert torch.equal(twin.weight, head.weight)
    assert hdnn.heads.HEADS[type(head).__name__] is type(head)


def test_losses_are_those_of_their_probabilities():
    scores, t = (
        torch.randn(7, 3, dtype=torch.float64),
        torch.tensor([0, 1, 2, 2, 1, 0, 0]),
    )
    head = SoftmaxHead(4, 3)
    expected = -head.probabilities(scores)[torch.arange(7), t].log().mean()
    torch.testing.assert_close(head.loss(scores, t), expected)
    torch.testing.assert_close(head.loss(scores, t.to(torch.uint8)), expected)
    assert torch.equal(
        head.predict(scores), head.probabilities(scores).argmax(-1)
    )
    head, t = SigmoidHead(4), t % 2
    expected = (
        -head.probabilities(scores[:, :1])[torch.arange(7), t].log().mean()
    )
    torch.testing.assert_close(head.loss(scores[:, :1], t), expected)
    assert torch.equal(
        head.predict(scores[:, :1]),
        head.probabilities(scores[:, :1]).argmax(-1),
    )
    assert (
        head.probabilities(torch.tensor([[60.0]]))[0, 0] > 0
    )  # it does not round to 0
    head, values = RegressionHead(4, 1), torch.randn(7, dtype=torch.float64)
    expected = (scores[:, 0] - values).square().mean()
    torch.testing.assert_close(head.loss(scores[:, :1], values), expected)


@pytest.mark.parametrize("name", HEADS)
def test_a_model_is_head_after_net_after_augment(name):
    model = Model(Augment(2, 4), hdnn.H2(4, 3), HEADS[name]())
    x = torch.randn(5, 2)
    torch.testing.assert_close(
        model(x), model.head(model.net(model.augment(x)))
    )
    torch.testing.assert_close(model.trajectory(x)[-1], model.features(x))
    assert Model(None, hdnn.H1(4, 2), HEADS[name]()).inputs == 4
    if name == "linear":
        for method in (model.predict, model.predict_proba):
            with pytest.raises(OptionError, match="a LinearHead has no"):
                method(x)
        return
    assert model.predict(x).shape == ((5, 2) if name == "regression" else (5,))
    t = torch.randn(5, 2) if name == "regression" else torch.ones(5).long()
    loss = model.loss(x, t)
    loss.backward()
    torch.testing.assert_close(loss, model.head.loss(model(x), t))
    twin = copy.deepcopy(model).double()
    torch.testing.assert_close(
        twin(x.double()), model(x).double(), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Augment(3, 2), ShapeError, "use features >= 3"),
        (lambda: Augment(2, 4, "last"), OptionError, "'last' is not known"),
        (
            lambda: Augment(2, 4, [1, 1]),
            ShapeError,
            "as many different positions",
        ),
        (lambda: Augment(2, 4, [0, 4]), ShapeError, r"in 0 \.\. 3"),
        (
            lambda: Augment(2, 4)(torch.zeros(5, 3)),
            ShapeError,
            r"\(\*batch, 2\)",
        ),
        (lambda: Augment(2, 4)([1.0, 2.0]), ShapeError, "torch.Tensor"),
        (lambda: SoftmaxHead(4, 1), DataError, "at least 2 classes"),
        (
            lambda: LinearHead(4, 0),
            HDNNError,
            "outputs must be a whole number >= 1",
        ),
        (
            lambda: LinearHead(4, 2)(torch.zeros(5, 3)),
            ShapeError,
            r"\(\*batch, 4\)",
        ),
        (
            lambda: RegressionHead(4, 2).loss(
                torch.zeros(5, 2), torch.zeros(5)
            ),
            DataError,
            r"shape \(5, 2\), .* but got \(5,\)",
        ),
        (
            lambda: SoftmaxHead(4, 2).loss(torch.zeros(5, 2), torch.zeros(5)),
            DataError,
            "whole numbers",
        ),
        (
            lambda: SoftmaxHead(4, 2).loss(torch.zeros(5, 2), [0] * 5),
            DataError,
            "list",
        ),
        (
            lambda: Model(None, nn.Linear(4, 4), LinearHead(4, 1)),
            OptionError,
            "net must be",
        ),
        (
            lambda: Model(None, hdnn.H2(4, 1), nn.Linear(4, 1)),
            OptionError,
            "head must be",
        ),
        (
            lambda: Model(nn.Linear(4, 4), hdnn.H2(4, 1), LinearHead(4, 1)),
            OptionError,
            "augment",
        ),
        (
            lambda: Model(None, hdnn.H2(4, 1), LinearHead(6, 1)),
            ShapeError,
            "head has 6 features",
        ),
    ],
)
def test_mistakes_get_one_sentence(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_a_missing_gpu_is_named():
    with pytest.raises(OptionError, match="no CUDA device is available"):
        LinearHead(4, 1, device="cuda")
