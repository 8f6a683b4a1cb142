"""The planar data sets are those of the experiments: arcs, labels, noise, split."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdnn.data import planar
from hdnn.errors import DataError, HDNNError, OptionError

NAMES = ("swiss_roll", "double_moons", "double_circles")
names = st.sampled_from(NAMES)
sizes = st.integers(8, 400)
seeds = st.integers(0, 2**63 - 1)


def all_points(data):
    return torch.cat([data.x_train, data.x_test]), torch.cat([data.t_train, data.t_test])


def rows(x):
    """The points as a sorted list: equal for equal sets."""
    return sorted(map(tuple, x.tolist()))


def test_swiss_roll_is_the_two_spirals_without_noise():
    x, t = all_points(planar.swiss_roll(dtype=torch.float64))
    i = torch.arange(4000, dtype=torch.float64)
    theta = 4 * math.pi * i / 4000
    for label, r in ((1, i / 4000), (0, 0.2 + i / 4000)):
        expected = torch.stack([r * torch.cos(theta), r * torch.sin(theta)], -1)
        # Along its spiral every point has an own radius: sort by it to compare.
        found = x[t == label]
        found = found[found.norm(dim=-1).argsort()]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def arcs_of(name, k):
    """Label and noiseless points of the four arcs."""
    i = torch.arange(k, dtype=torch.float64)
    if name == "double_circles":
        theta = 4 * math.pi * i / k
        circle = torch.stack([torch.cos(theta), torch.sin(theta)], -1)
        return [(0, circle), (1, 2 * circle), (0, 3 * circle), (1, 4 * circle)]
    theta = math.pi * i / k
    upper = torch.stack([torch.cos(theta), torch.sin(theta)], -1)
    lower = torch.stack([1 - torch.cos(theta), 0.5 - torch.sin(theta)], -1)
    shift = torch.tensor([2.0, 0.0], dtype=torch.float64)
    return [(0, upper), (1, lower), (0, upper + shift), (1, lower + shift)]


@pytest.mark.parametrize(("name", "noise"), [("double_moons", 0.15), ("double_circles", 0.3)])
def test_points_are_arcs_plus_uniform_noise_in_each_coordinate(name, noise):
    x, t = all_points(planar.load(name, dtype=torch.float64))
    # The generator draws the noise in the order of the arcs, then the shuffle: undo both.
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(8000, 2, generator=generator, dtype=torch.float64)
    order = torch.randperm(8000, generator=generator)
    arcs = arcs_of(name, 2000)
    clean = torch.cat([points for _, points in arcs])
    labels = torch.cat([torch.full((2000,), label) for label, _ in arcs])
    expected, expected_t = (clean + noise * (2 * draws - 1))[order], labels[order]
    torch.testing.assert_close(x, torch.cat([expected[::2], expected[1::2]]))
    assert torch.equal(t, torch.cat([expected_t[::2], expected_t[1::2]]))
    assert draws.min() < 0.01
    assert draws.max() > 0.99


@given(names, sizes, seeds)
def test_any_size_is_split_evenly_over_classes_and_halves(name, points, seed):
    data = planar.load(name, points, seed=seed)
    x, t = all_points(data)
    assert x.shape == (points, 2)
    assert t.shape == (points,)
    assert t.dtype == torch.int64
    assert set(t.tolist()) == {0, 1}
    assert abs(int((t == 0).sum()) - int((t == 1).sum())) <= 2
    assert len(data.x_train) == len(data.t_train) == math.ceil(points / 2)
    assert len(data.x_test) == len(data.t_test) == points // 2


@given(names, sizes, seeds)
def test_all_points_lie_in_the_domain(name, points, seed):
    data = planar.load(name, points, seed=seed, dtype=torch.float64)
    x, _ = all_points(data)
    for coordinate, (low, high) in zip(x.T, data.domain, strict=True):
        # The lower moons reach -0.65 and the upper ones 1.15; all else is well inside.
        assert coordinate.min() >= low
        assert coordinate.max() <= high


@given(names, seeds)
def test_one_seed_is_one_data_set_and_another_seed_another(name, seed):
    one, same = planar.load(name, 64, seed=seed), planar.load(name, 64, seed=seed)
    other = planar.load(name, 64, seed=(seed + 1) % 2**63)
    assert torch.equal(one.x_train, same.x_train)
    assert torch.equal(one.t_test, same.t_test)
    assert not torch.equal(one.x_train, other.x_train)


def test_another_seed_only_shuffles_the_swiss_roll():
    one, other = (all_points(planar.swiss_roll(40, seed=s))[0] for s in (0, 1))
    assert rows(one) == rows(other)


@given(names)
def test_the_global_random_state_is_left_alone(name):
    before = torch.get_rng_state()
    planar.load(name, 32, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_points_are_made_in_float64_and_rounded_once():
    exact = planar.double_moons(100, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = planar.double_moons(100, dtype=dtype)
        assert rounded.x_test.dtype == dtype
        assert torch.equal(rounded.x_test, exact.x_test.to(dtype))
    assert planar.double_moons(100).x_train.dtype == torch.get_default_dtype()


def test_repr_says_what_is_in_it():
    assert repr(planar.swiss_roll(101)) == "PlanarData(swiss_roll, 51 train, 50 test)"


@pytest.mark.parametrize("points", [7, 0, -8, 8.0, "8000", True, None])
def test_too_few_points_are_refused(points):
    with pytest.raises(DataError, match=r"points must be a whole number >= 8.*but got") as error:
        planar.swiss_roll(points)
    assert repr(points) in str(error.value)
    assert isinstance(error.value, HDNNError)


@pytest.mark.parametrize("seed", [-1, 0.5, "0", 2**63, True])
def test_a_seed_that_is_none_is_refused(seed):
    with pytest.raises(DataError, match="seed must be a whole number"):
        planar.double_circles(seed=seed)


def test_integer_points_are_refused():
    with pytest.raises(DataError, match=r"floating point.*torch\.int64"):
        planar.double_moons(dtype=torch.int64)


def test_an_unknown_name_lists_the_known_and_suggests_the_nearest():
    with pytest.raises(OptionError, match=r"double_circles, double_moons, swiss_roll") as error:
        planar.load("swiss_rol")
    assert "Did you mean 'swiss_roll'?" in str(error.value)
