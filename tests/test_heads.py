"""Before and after the stack: features among zeros, scores, losses, predictions."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hdnn
from hdnn import Augment, LinearHead, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.errors import DataError, HDNNError, OptionError, ShapeError
from strategies import Random, seeds

F64 = torch.float64
batches = st.lists(st.integers(0, 3), max_size=2)
HEADS = [
    lambda **o: LinearHead(4, 3, **o),
    lambda **o: RegressionHead(4, 3, **o),
    lambda **o: SoftmaxHead(4, 3, **o),
    lambda **o: SigmoidHead(4, **o),
]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Augmentation


@given(seeds, st.integers(1, 5), st.integers(0, 4), batches, st.sampled_from(["split", "first"]))
def test_augmenting_keeps_every_input_and_adds_only_zeros(seed, inputs, more, batch, placement):
    augment = Augment(inputs, inputs + more, placement)
    x = Random(seed)(*batch, inputs)
    y = augment(x)
    assert y.shape == (*batch, inputs + more)
    assert y.dtype == x.dtype
    assert torch.equal(y[..., augment.positions], x)
    assert int((y != 0).sum()) == x.numel()


def test_the_first_embedding_is_that_of_the_papers_text():
    x = torch.tensor([1.0, 2.0])
    assert Augment(2, 4, "first")(x).tolist() == [1, 2, 0, 0]
    assert Augment(2, 6, "first")(x).tolist() == [1, 2, 0, 0, 0, 0]


def test_the_split_embedding_is_that_of_the_published_experiments_and_the_default():
    x = torch.tensor([1.0, 2.0])
    for placement in ({}, {"placement": "split"}):
        assert Augment(2, 4, **placement)(x).tolist() == [1, 0, 0, 2]
        assert Augment(2, 8, **placement)(x).tolist() == [1, 0, 0, 0, 0, 0, 0, 2]
    assert Augment(4, 8)(torch.arange(1.0, 5)).tolist() == [1, 2, 0, 0, 0, 0, 3, 4]
    assert Augment(3, 6)(torch.arange(1.0, 4)).tolist() == [1, 2, 0, 0, 0, 3]


@given(seeds, st.permutations(range(6)), st.integers(1, 6))
def test_any_placement_can_be_chosen(seed, order, inputs):
    positions = order[:inputs]
    x = Random(seed)(3, inputs)
    y = Augment(inputs, 6, positions)(x)
    for i, position in enumerate(positions):
        assert torch.equal(y[:, position], x[:, i])
    assert not y[:, [k for k in range(6) if k not in positions]].any()


def test_the_ring_of_table_two_places_its_inputs_at_the_first_and_fifth_node():
    y = Augment(2, 16, [0, 8 + 4])(torch.tensor([1.0, 2.0]))
    p, q = y.chunk(2)
    assert p.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert q.tolist() == [0, 0, 0, 0, 2, 0, 0, 0]


def test_as_many_features_as_inputs_change_nothing():
    x = Random(0)(5, 4)
    for placement in ("split", "first"):
        assert torch.equal(Augment(4, 4, placement)(x), x)


def test_augmentation_passes_gradients_and_has_no_parameters():
    x = Random(0)(3, 2).requires_grad_()
    augment = Augment(2, 6)
    augment(x).square().sum().backward()
    assert torch.equal(x.grad, 2 * x)
    assert not list(augment.parameters())
    assert not augment.state_dict()


def test_an_augmentation_says_what_it_does():
    assert repr(Augment(2, 4)) == "Augment(2 -> 4, placement='split')"
    again = Augment(**Augment(2, 4, (3, 1)).config())
    assert again.positions.tolist() == [3, 1]


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_inputs_and_features_are_counting_numbers(count):
    with pytest.raises(ShapeError, match="inputs must be a whole number"):
        Augment(count, 4)
    with pytest.raises(ShapeError, match="features must be a whole number"):
        Augment(1, count)


def test_inputs_fit_into_the_features():
    with pytest.raises(ShapeError, match="5 inputs do not fit into 4 features; take features >= 5"):
        Augment(5, 4)


@pytest.mark.parametrize("placement", [[0], [0, 0], [0, 1, 2], [0, 4], [-1, 0], []])
def test_placements_are_different_positions_inside_the_features(placement):
    with pytest.raises(ShapeError, match="placement"):
        Augment(2, 4, placement)


def test_placements_are_whole_numbers():
    for placement in (None, 3, [0.5, 1.5], ["a", "b"], [None, 1], {"a": 1, 0: 1}):
        with pytest.raises(HDNNError, match="placement"):
            Augment(2, 4, placement)


def test_an_unknown_placement_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"'splitt'.*first, split.*Did you mean 'split'"):
        Augment(2, 4, "splitt")


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(3), torch.ones(2, 4)])
def test_augmentation_refuses_other_shapes(x):
    with pytest.raises(ShapeError, match=r"\(\*batch, 2\), but got"):
        Augment(2, 4)(x)


def test_augmentation_refuses_what_is_no_tensor():
    for x in (None, [1.0, 2.0], numpy.ones(2), "x"):
        with pytest.raises(ShapeError, match=type(x).__name__):
            Augment(2, 4)(x)


# Heads


@pytest.mark.parametrize("make", HEADS)
def test_heads_give_scores_for_any_batch(make):
    head = make(dtype=F64)
    for batch in ((), (5,), (2, 3), (0,)):
        y = Random(0)(*batch, 4)
        scores = head(y)
        assert scores.shape == (*batch, head.outputs)
        expected = torch.einsum("on,...n->...o", head.weight, y) + head.bias
        torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("make", HEADS)
def test_a_generator_decides_the_weights_in_every_dtype(make):
    before = torch.get_rng_state()
    exact = make(generator=generator(1), dtype=F64)
    for dtype in (F64, torch.float32, torch.bfloat16):
        head = make(generator=generator(1), dtype=dtype)
        assert torch.equal(head.weight, exact.weight.to(dtype))
        assert not head.bias.any()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(make(generator=generator(2), dtype=F64).weight, exact.weight)


def test_the_default_dtype_does_not_change_what_a_seed_means():
    for make in HEADS:
        expected = make(generator=generator(1), dtype=F64).weight
        torch.set_default_dtype(F64)
        try:
            assert torch.equal(make(generator=generator(1), dtype=F64).weight, expected)
        finally:
            torch.set_default_dtype(torch.float32)


def test_head_weights_have_variance_one_over_n():
    weight = LinearHead(100, 200, generator=generator()).weight
    assert float(weight.detach().std()) == pytest.approx(0.1, rel=0.03)


@given(seeds, batches)
def test_softmax_is_the_cross_entropy_of_its_probabilities(seed, batch):
    batch = [max(1, b) for b in batch]
    head, normal = SoftmaxHead(4, 3, dtype=F64), Random(seed)
    scores = normal(*batch, 3)
    t = torch.randint(0, 3, tuple(batch), generator=generator(seed))
    p = head.probabilities(scores)
    torch.testing.assert_close(p.sum(-1), torch.ones(tuple(batch), dtype=F64))
    expected = -p.gather(-1, t[..., None]).log().mean()
    torch.testing.assert_close(head.loss(scores, t), expected)
    assert torch.equal(head.predict(scores), p.argmax(-1))
    assert head.classes == 3


@given(seeds, batches)
def test_sigmoid_is_the_cross_entropy_of_two_classes(seed, batch):
    batch = [max(1, b) for b in batch]
    head, normal = SigmoidHead(4, dtype=F64), Random(seed)
    scores = normal(*batch, 1)
    t = torch.randint(0, 2, tuple(batch), generator=generator(seed))
    p = head.probabilities(scores)
    assert p.shape == (*batch, 2)
    torch.testing.assert_close(p.sum(-1), torch.ones(tuple(batch), dtype=F64))
    expected = -p.gather(-1, t[..., None]).log().mean()
    torch.testing.assert_close(head.loss(scores, t), expected)
    assert torch.equal(head.predict(scores), p.argmax(-1))
    assert head.classes == 2


def test_the_rarer_probability_of_a_sigmoid_does_not_round_to_zero():
    p = SigmoidHead(4).probabilities(torch.tensor([[30.0]]))
    assert float(p[0, 0]) == pytest.approx(math.exp(-30), rel=1e-3, abs=0)


@given(seeds, st.integers(1, 3), batches)
def test_regression_is_the_mean_squared_error(seed, outputs, batch):
    batch = [max(1, b) for b in batch]
    head, normal = RegressionHead(4, outputs, dtype=F64), Random(seed)
    scores, t = normal(*batch, outputs), normal(*batch, outputs)
    torch.testing.assert_close(head.loss(scores, t), (scores - t).square().mean())
    assert head.predict(scores) is scores
    if outputs == 1:
        assert torch.equal(head.loss(scores, t[..., 0]), head.loss(scores, t))


def test_targets_of_another_shape_are_refused_not_reshaped():
    scores = Random(0)(5, 2)
    head = RegressionHead(4, 2, dtype=F64)
    for t in (Random(1)(2, 5), Random(1)(10), Random(1)(5), Random(1)(5, 1)):
        with pytest.raises(HDNNError, match=r"\(5, 2\)"):
            head.loss(scores, t)


@pytest.mark.parametrize("make", HEADS[2:])
def test_labels_of_another_length_are_refused(make):
    head = make(dtype=F64)
    scores = head(Random(0)(5, 4))
    for t in (torch.zeros(4).long(), torch.zeros(6).long(), torch.zeros(5, 3).long()):
        with pytest.raises(HDNNError, match="label"):
            head.loss(scores, t)


@pytest.mark.parametrize("make", HEADS[2:])
def test_labels_may_have_any_whole_type(make):
    head = make(dtype=F64)
    scores, labels = head(Random(0)(5, 4)), torch.tensor([0, 1, 1, 0, 1])
    for dtype in (torch.int32, torch.int16, torch.uint8, torch.bool):
        assert torch.equal(head.loss(scores, labels.to(dtype)), head.loss(scores, labels))


@pytest.mark.parametrize("make", HEADS[1:])
def test_targets_are_tensors(make):
    head = make(dtype=F64)
    scores = head(Random(0)(5, 4))
    for t in (None, [0] * 5, numpy.zeros(5)):
        with pytest.raises(HDNNError, match=type(t).__name__):
            head.loss(scores, t)


def test_heads_refuse_features_of_the_wrong_number():
    for make in HEADS:
        with pytest.raises(ShapeError, match=r"\(\*batch, 4\).*\(5, 3\)"):
            make()(torch.ones(5, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_heads_are_floating_point(dtype):
    for make in HEADS:
        with pytest.raises(ShapeError, match="floating-point"):
            make(dtype=dtype)


@pytest.mark.parametrize("kind", [LinearHead, RegressionHead, SoftmaxHead])
@pytest.mark.parametrize("count", [0, -1, True, 2.0, "2", None])
def test_outputs_are_counting_numbers(kind, count):
    with pytest.raises(ShapeError, match="must be a whole number >= 1"):
        kind(4, count)
    with pytest.raises(ShapeError, match="features must be a whole number >= 1"):
        kind(count, 2)


def test_a_classifier_has_at_least_two_classes():
    with pytest.raises(DataError, match="at least 2 classes, but got 1"):
        SoftmaxHead(4, 1)


@pytest.mark.parametrize("classes", [0, 2.5, "three"])
def test_a_wrong_number_of_classes_is_called_by_the_name_that_was_given(classes):
    with pytest.raises(ShapeError, match="classes must be a whole number"):
        hdnn.SoftmaxHead(4, classes)


@pytest.mark.parametrize("make", HEADS)
def test_a_config_makes_the_same_head_again(make):
    head = make(generator=generator())
    again = hdnn.heads.HEADS[type(head).__name__](**head.config())
    again.load_state_dict(head.state_dict())
    y = torch.ones(4)
    assert torch.equal(again(y), head(y))
    assert repr(again) == repr(head)
    assert f"4 -> {head.outputs}" in repr(head)
