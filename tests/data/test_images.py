"""Image sets are checked and split; augmentation is a crop and a flip."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdnn.data import ImageData, augment, images
from hdnn.errors import DataError, OptionError

seeds = st.integers(0, 2**32)


def make(counts=(12, 4), channels=3, classes=2, size=6):
    generator = torch.Generator().manual_seed(0)
    parts = []
    for count in counts:
        shape = (count, channels, size, size)
        parts.append(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))
        parts.append(torch.arange(count) % classes)
    names = tuple(map(str, range(classes)))
    return ImageData("set", *parts, names, (0.4, 0.5, 0.6)[:channels], (0.2, 0.25, 0.3)[:channels])


# The set itself.


def test_normalised_images_have_the_mean_and_spread_of_each_channel_removed():
    data = make()
    x = data.normalised(data.images_train, torch.float64)
    mean = torch.tensor(data.mean, dtype=torch.float64).view(3, 1, 1)
    std = torch.tensor(data.std, dtype=torch.float64).view(3, 1, 1)
    torch.testing.assert_close(x, (data.images_train / 255.0 - mean) / std, rtol=1e-6, atol=1e-6)
    assert data.normalised(data.images_test).dtype == torch.get_default_dtype()
    assert torch.equal(data.normalised(data.images_train[0], torch.float64), x[0])
    half = data.normalised(data.images_train, torch.bfloat16)
    assert torch.equal(half, data.normalised(data.images_train, torch.float32).bfloat16())


def test_to_keeps_the_set_as_it_is():
    data = make()
    moved = data.to(torch.device("cpu"))
    assert repr(moved) == "ImageData(set, 12 train, 4 test, 3 x 6 x 6, cpu)"
    assert torch.equal(moved.images_test, data.images_test)


@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), seeds, st.data())
def test_a_holdout_takes_each_class_by_its_share_and_loses_nothing(sizes, seed, draw):
    t = torch.cat([torch.full((size,), label) for label, size in enumerate(sizes)])
    total = len(t)
    pixels = torch.arange(total).to(torch.uint8).view(-1, 1, 1, 1)
    names = tuple(map(str, range(len(sizes))))
    data = ImageData("set", pixels, t, pixels[:0], t[:0], names, (0.5,), (0.5,))
    count = draw.draw(st.integers(1, total - 1))
    train, validation = data.holdout(count, seed)
    assert len(validation.t) == count
    rows = torch.cat([train.images, validation.images]).flatten().long()
    assert sorted(rows.tolist()) == list(range(total))
    for part in (train, validation):
        assert torch.equal(t[part.images.flatten().long()], part.t)
    for label, size in enumerate(sizes):
        assert abs(int((validation.t == label).sum()) - count * size / total) < 1
    again = data.holdout(count, seed)
    assert torch.equal(again[1].images, validation.images)


def test_another_seed_is_another_holdout():
    data = make((200, 1))
    one, other = (data.holdout(50, seed)[1].images for seed in (0, 1))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("count", [0, 12, -1, 2.0, True, None])
def test_a_holdout_of_nothing_or_everything_is_refused(count):
    with pytest.raises(DataError, match="count must be a whole number from 1 to 11"):
        make().holdout(count)


@pytest.mark.parametrize("seed", [-1, 0.5, True])
def test_a_holdout_needs_a_seed(seed):
    with pytest.raises(DataError, match="seed must be a whole number >= 0"):
        make().holdout(2, seed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images_train": torch.zeros(12, 1, 6, 6, dtype=torch.uint8)}, r"\(B, 3, H, W\)"),
        ({"images_test": torch.zeros(4, 3, 6, 6)}, r"must be torch\.uint8"),
        ({"t_train": torch.zeros(11, dtype=torch.int64)}, r"shape \(12,\), one for each image"),
        ({"t_test": torch.zeros(4)}, r"torch\.int64"),
        ({"t_test": torch.tensor([0, 1, 2, 0])}, "must be 0 to 1, but reach from 0 to 2"),
        ({"t_test": torch.tensor([0, -1, 0, 0])}, "must be 0 to 1, but reach from -1 to 0"),
        ({"std": (1.0,)}, "one number a channel"),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(change, message):
    data = make()
    names = ("name", "images_train", "t_train", "images_test", "t_test", "classes", "mean", "std")
    with pytest.raises(DataError, match=message):
        ImageData(**({name: getattr(data, name) for name in names} | change))


def test_images_of_another_kind_are_not_normalised():
    data = make()
    with pytest.raises(DataError, match=r"\(\*batch, 3, H, W\), but got \(2, 1, 6, 6\)"):
        data.normalised(torch.zeros(2, 1, 6, 6))
    with pytest.raises(DataError, match="floating point"):
        data.normalised(data.images_train, torch.int32)


# Augmentation.


def augmented_by_a_loop(x, shifts, flips, pad, padding):
    """Pad, crop at the shift, mirror: one image after the other."""
    found = []
    for image, (i, j), flip in zip(x.numpy(), shifts.tolist(), flips.tolist(), strict=True):
        mode = "constant" if padding == "zeros" else "reflect"
        padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)), mode=mode)
        crop = padded[:, i : i + image.shape[1], j : j + image.shape[2]]
        found.append(crop[:, :, ::-1] if flip else crop)
    return torch.from_numpy(np.stack(found).copy())


@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(3, 7),
    st.integers(3, 7),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from(images.PADDING),
    st.sampled_from([torch.uint8, torch.float32]),
    seeds,
)
def test_augment_is_pad_crop_and_mirror(b, c, h, w, pad, flip, padding, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 256, (b, c, h, w), generator=generator).to(dtype)
    state = generator.get_state()
    found = augment(x, generator, pad, flip, padding=padding)
    generator.set_state(state)
    shifts, flips = images.draw(b, generator, pad=pad, flip=flip)
    assert found.dtype == dtype
    assert torch.equal(found, augmented_by_a_loop(x, shifts, flips, pad, padding))
    again = augment(x, pad=pad, padding=padding, shifts=shifts, flips=flips)
    assert torch.equal(again, found)
    assert flip or not flips.any()


def test_every_shift_and_both_orientations_are_drawn():
    shifts, flips = images.draw(10000, torch.Generator().manual_seed(0), pad=1)
    assert shifts.unique(dim=0).shape == (9, 2)
    assert 0.45 < flips.float().mean() < 0.55


def test_pixels_take_part_in_gradients():
    x = torch.rand(2, 1, 4, 4, requires_grad=True)
    augment(x, torch.Generator().manual_seed(0), pad=1).sum().backward()
    assert x.grad is not None
    assert x.grad.max() == 1


@pytest.mark.parametrize("padding", images.PADDING)
def test_shifts_out_of_range_read_nothing_outside(padding):
    x = torch.ones(1, 1, 4, 4)
    shifts, flips = torch.tensor([[10**6, -(10**6)]]), torch.tensor([False])
    found = augment(x, pad=1, padding=padding, shifts=shifts, flips=flips)
    assert set(found.unique().tolist()) <= {0.0, 1.0}


def test_augment_refuses_what_it_cannot_use():
    x, generator = torch.zeros(2, 3, 8, 8), torch.Generator()
    shifts, flips = images.draw(2, generator)
    with pytest.raises(DataError, match=r"\(B, C, H, W\), but got \(8, 8\)"):
        augment(x[0, 0], generator)
    with pytest.raises(DataError, match=r"generator on cpu.*but got none"):
        augment(x)
    with pytest.raises(DataError, match=r"generator on meta.*one on cpu"):
        augment(x.to("meta"), generator)
    for pad in (-1, 8, 1.0, True):
        with pytest.raises(DataError, match="pad must be a whole number from 0 to 7"):
            augment(x, generator, pad=pad)
    with pytest.raises(DataError, match="pad must be a whole number >= 0"):
        images.draw(2, generator, pad=-1)
    with pytest.raises(OptionError, match="flip must be True or False"):
        augment(x, generator, flip="no")  # pyright: ignore
    with pytest.raises(OptionError, match="Did you mean 'reflect'"):
        augment(x, generator, padding="reflekt")
    with pytest.raises(DataError, match=r"flips must be .*but got nothing"):
        augment(x, shifts=shifts)
    with pytest.raises(DataError, match=r"shifts must be .*but got nothing"):
        augment(x, flips=flips)
    with pytest.raises(DataError, match=r"shifts must be \(2, 2\).*float"):
        augment(x, shifts=shifts.float(), flips=flips)
    with pytest.raises(DataError, match=r"flips must be \(2,\).*\(1,\)"):
        augment(x, shifts=shifts, flips=flips[:1])


@pytest.mark.gpu
@pytest.mark.parametrize("padding", images.PADDING)
def test_augment_and_normalise_in_a_cuda_graph(padding):
    data = make((64, 4)).to("cuda")
    assert repr(data).endswith("cuda:0)")
    assert {data.images_test.device, data.t_train.device} == {data.t_test.device}
    generator = torch.Generator("cuda").manual_seed(0)
    one, other = (images.draw(64, generator, pad=2) for _ in range(2))
    shifts, flips = (part.clone() for part in one)

    def step():
        x = augment(data.images_train, pad=2, padding=padding, shifts=shifts, flips=flips)
        return data.normalised(x, torch.float32)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x = step()
    for numbers in (one, other):
        shifts.copy_(numbers[0])
        flips.copy_(numbers[1])
        graph.replay()
        numbers = [part.cpu() for part in numbers]
        expected = augmented_by_a_loop(data.images_train.cpu(), *numbers, 2, padding)
        torch.testing.assert_close(x.cpu(), data.normalised(expected, torch.float32))
    found = [augment(data.images_train, generator.manual_seed(3), pad=2) for _ in range(2)]
    assert torch.equal(*found)


def test_a_square_is_blanked():
    whole = torch.ones(3, 2, 6, 8)
    found = images.blank(whole, torch.tensor([[3, 4], [0, 0], [5, 7]]), 4)
    expected = torch.ones(3, 6, 8)
    expected[0, 1:5, 2:6] = 0
    expected[1, :2, :2] = 0
    expected[2, 3:, 5:] = 0
    assert torch.equal(found, expected[:, None].expand_as(found))
    assert torch.equal(images.blank(whole, torch.zeros(3, 2, dtype=torch.int64), 0), whole)
    for centres, size, word in (
        ((3, 1), 2, "centres"),
        ((3, 2), -1, "size"),
        ((3, 2), True, "size"),
    ):
        with pytest.raises(DataError, match=word):
            images.blank(whole, torch.zeros(centres, dtype=torch.int64), size)
