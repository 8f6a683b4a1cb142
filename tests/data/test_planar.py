"""The planar sets: their shapes, their seeds, and what their points are."""

from __future__ import annotations

import math

import pytest
import torch

from hdnn.data import planar
from hdnn.errors import DataError, OptionError


@pytest.mark.parametrize("name", planar.SETS)
def test_half_of_8000_points_is_for_testing_and_classes_are_equal(name):
    data = planar.load(name)
    assert data.x_train.shape == data.x_test.shape == (4000, 2)
    labels = torch.cat([data.t_train, data.t_test])
    assert labels.bincount().tolist() == [4000, 4000]
    (left, right), (low, high) = data.domain
    assert left <= data.x_train[:, 0].min()
    assert data.x_train[:, 0].max() <= right
    assert low <= data.x_train[:, 1].min()
    assert data.x_train[:, 1].max() <= high


@pytest.mark.parametrize("name", planar.SETS)
def test_a_seed_is_one_set_for_every_dtype(name):
    single = planar.load(name, 100, seed=3, dtype=torch.float32)
    double = planar.load(name, 100, seed=3, dtype=torch.float64)
    other = planar.load(name, 100, seed=4, dtype=torch.float64)
    assert torch.equal(single.x_train, double.x_train.float())
    assert not torch.equal(double.x_train, other.x_train)


def test_the_swiss_roll_lies_on_two_spirals():
    data = planar.swiss_roll(dtype=torch.float64)
    radius = data.x_train.norm(dim=1)
    offset = 0.2 * (data.t_train == 0).double()
    theta = 4 * math.pi * (radius - offset)
    expected = torch.stack([radius * theta.cos(), radius * theta.sin()], 1)
    torch.testing.assert_close(data.x_train, expected, rtol=0, atol=1e-9)


def test_the_double_circles_lie_near_their_rings():
    data = planar.double_circles(dtype=torch.float64)
    radius = data.x_train.norm(dim=1)
    ring = radius.round()
    assert (radius - ring).abs().max() < 0.3 * math.sqrt(2) + 1e-9
    near = (radius - ring).abs() < 0.07
    assert torch.equal((ring[near] + 1) % 2, data.t_train[near].double())


def test_mistakes_are_refused():
    with pytest.raises(DataError, match="at least 8"):
        planar.swiss_roll(7)
    with pytest.raises(OptionError, match="double_moons"):
        planar.load("moons")
