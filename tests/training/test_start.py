"""The output layer that joint training begins with."""

import pytest
import torch

import hdnn
from hdnn.training import output
from hdnn.training.start import begin

HEADS = {
    "sigmoid": lambda: hdnn.SigmoidHead(8, dtype=torch.float64),
    "softmax": lambda: hdnn.SoftmaxHead(8, 3, dtype=torch.float64),
    "regression": lambda: hdnn.RegressionHead(8, 2, dtype=torch.float64),
}


def made(kind):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=g, dtype=torch.float64)
    noisy = x + torch.randn(200, 4, generator=g, dtype=torch.float64)
    t = noisy[:, :2] if kind == "regression" else noisy[:, :3].argmax(1)
    t = t % 2 if kind == "sigmoid" else t
    net = hdnn.H2(8, 2, activation="relu", generator=g, dtype=torch.float64)
    return hdnn.Model(hdnn.Augment(4, 8), net, HEADS[kind]()), x, t


def penalised(model, x, t, ridge):
    squares = sum(p.detach().square().sum() for p in model.head.parameters())
    return float(model.loss(x, t).detach() + 0.5 * ridge * squares)


@pytest.mark.parametrize("kind", list(HEADS))
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
def test_training_begins_near_the_optimum_of_the_output_layer(kind, ridge):
    model, x, t = made(kind)
    begin(model, x, t, ridge)
    found = penalised(model, x, t, ridge)
    output.newton(model.head, model.features(x).detach(), t, None, ridge, 50)
    best = penalised(model, x, t, ridge)
    nothing = penalised(made(kind)[0], x, t, ridge)
    assert best - 1e-9 <= found <= best + 0.05 * (nothing - best)


@pytest.mark.parametrize("kind", list(HEADS))
def test_a_weight_of_two_begins_as_two_rows_do(kind):
    ours, x, t = made(kind)
    twice, weight = made(kind)[0], torch.ones(200, dtype=torch.float64)
    weight[:50] = 2
    begin(ours, x, t, 0.1, weight)
    begin(twice, torch.cat([x, x[:50]]), torch.cat([t, t[:50]]), 0.1)
    for a, b in zip(ours.head.parameters(), twice.head.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_features_that_are_not_finite_leave_the_output_layer_as_it_is():
    model, x, t = made("softmax")
    before = model.head.weight.detach().clone()
    begin(model, torch.full_like(x, torch.nan), t, 0.1)
    assert torch.equal(model.head.weight, before)
