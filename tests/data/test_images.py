"""Image sets are read exactly or refused with a reason; augmentation is a crop and a flip."""

import gzip
import hashlib
import io
import os
import re
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdnn.data import ImageData, augment, cifar10, cifar10_images, images, mnist
from hdnn.errors import DataError, HDNNError, MissingExtraError, OptionError, ShapeError

DATA = Path(os.environ.get("HDNN_DATA") or "data")
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
        ({"t_train": torch.zeros(11, dtype=torch.int64)}, r"shape \(12,\), one an image"),
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


# MNIST.


def idx(values):
    header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
    return header + values.astype(np.uint8).tobytes()


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A set of MNIST's form with 6 and 3 images, in tmp_path/mnist; by name, what is in it."""
    random = np.random.default_rng(0)
    values = {
        file.name: random.integers(0, 10 if len(file.shape) == 1 else 256, shape)
        for file, shape in zip(mnist.FILES, ((6, 28, 28), (6,), (3, 28, 28), (3,)), strict=True)
    }
    (tmp_path / "mnist").mkdir()

    files = []
    for file in mnist.FILES:
        content = idx(values[file.name])
        (tmp_path / "mnist" / file.name).write_bytes(content)
        sha256 = hashlib.sha256(content).hexdigest()
        files.append(file._replace(shape=values[file.name].shape, sha256=sha256))
    monkeypatch.setattr(mnist, "FILES", tuple(files))
    monkeypatch.setenv("HDNN_DATA", str(tmp_path))
    return values


def test_mnist_is_what_is_in_its_files(small_mnist, tmp_path):
    images_train, t_train, images_test, t_test = small_mnist.values()
    for data in (mnist.load(), mnist.load(tmp_path), mnist.load(str(tmp_path / "mnist"))):
        assert data.name == "MNIST"
        assert not data.lossy
        assert data.images_train.shape == (6, 1, 28, 28)
        assert np.array_equal(data.images_train[:, 0].numpy(), images_train)
        assert np.array_equal(data.images_test[:, 0].numpy(), images_test)
        assert np.array_equal(data.t_train.numpy(), t_train)
        assert np.array_equal(data.t_test.numpy(), t_test)
        assert data.t_test.dtype == torch.int64


def test_mnist_may_be_compressed(small_mnist, tmp_path):
    for path in (tmp_path / "mnist").iterdir():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert np.array_equal(mnist.load().t_train.numpy(), small_mnist["train-labels-idx1-ubyte"])


def test_a_missing_file_is_named_with_the_folder_and_the_command(small_mnist, tmp_path):
    (tmp_path / "mnist" / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError) as error:
        mnist.load()
    for part in ("t10k-images-idx3-ubyte", str(tmp_path), "HDNN_DATA"):
        assert part in str(error.value)
    assert f"`python -m hdnn.data.download mnist --to {tmp_path}`" in str(error.value)


def test_without_hdnn_data_the_folder_is_data(monkeypatch, tmp_path):
    monkeypatch.delenv("HDNN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"in data; .*download mnist --to data`"):
        mnist.load()
    with pytest.raises(DataError, match=r"in data; .*download cifar10 --to data`"):
        cifar10.load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:-1], "4704 bytes after its header, but has only 4703"),
        (lambda c: c + b"\0", "but has more"),
        (lambda c: b"", "an empty file"),
        (lambda c: b"\0\0\x08\x01" + c[4:], "begins with the bytes 00 00 08 01"),
        (lambda c: b"PK\3\4" + c[4:], "50 4b 03 04"),
        (lambda c: c[:10], "says that it holds 6 x 0 x 0"),
        (lambda c: c[:7] + b"\7" + c[8:], "holds 7 x 28 x 28 values, but it must hold 6 x 28 x 28"),
        (lambda c: c[:4] + b"\xff" * 12 + c[16:], "holds 4294967295 x"),
        (lambda c: c[:-1] + bytes([c[-1] ^ 1]), "SHA-256"),
    ],
)
def test_a_damaged_idx_file_is_refused(small_mnist, tmp_path, change, message):
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=message) as error:
        mnist.load()
    assert str(path) in str(error.value)
    assert "download it again" in str(error.value)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_idx_reader_fail_otherwise(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any-idx"
    path.write_bytes(content)
    try:
        values = mnist.read_idx(path, (2, 3))[1]
    except DataError:
        return
    assert values.shape == (2, 3)


@pytest.mark.parametrize("change", [lambda c: c[:50], lambda c: c[:-4] + b"abcd", lambda c: b"no"])
def test_a_damaged_gzip_file_is_refused(small_mnist, tmp_path, change):
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(change(gzip.compress(path.read_bytes())))
    path.unlink()
    with pytest.raises(DataError, match=re.escape(f"{packed} cannot be read")):
        mnist.load()


def test_a_small_file_cannot_fill_the_memory(tmp_path):
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\2" + bytes(2**24)))
    with pytest.raises(DataError, match="but has more"):
        mnist.read_idx(path, (2,))


def test_a_label_that_is_no_digit_is_refused(small_mnist, tmp_path, monkeypatch):
    content = idx(np.array([0, 1, 12]))
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(content)
    last = mnist.FILES[-1]._replace(sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(mnist, "FILES", (*mnist.FILES[:-1], last))
    with pytest.raises(DataError, match="labels must be 0 to 9, but reach from 0 to 12"):
        mnist.load()


# CIFAR-10, binary.


@pytest.fixture
def small_cifar(tmp_path, monkeypatch):
    """Binary files of 20 records each in tmp_path/cifar-10-batches-bin, by name."""
    random = np.random.default_rng(0)
    folder = tmp_path / cifar10.BINARY
    folder.mkdir()
    contents = {}
    for name in cifar10.FILES:
        records = random.integers(0, 256, (20, cifar10.RECORD))
        records[:, 0] = np.arange(20) % 10
        contents[name] = records.astype(np.uint8).tobytes()
        (folder / name).write_bytes(contents[name])
    accept(monkeypatch, contents)
    monkeypatch.setattr(cifar10, "RECORDS", 20)
    monkeypatch.setenv("HDNN_DATA", str(tmp_path))
    monkeypatch.setenv("HDNN_CACHE", str(tmp_path / "cache"))
    return contents


def accept(monkeypatch, contents):
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    monkeypatch.setattr(cifar10, "FILES", hashes)


def pack(path, members, mode="w:gz"):
    """Write a tar of (name or TarInfo, content)."""
    with tarfile.open(path, mode) as archive:
        for member, content in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def pack_binary(path, contents):
    return pack(path, [(f"{cifar10.BINARY}/{name}", c) for name, c in contents.items()])


def test_cifar10_is_what_is_in_the_binary_files(small_cifar, tmp_path):
    archive = pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar)
    records = np.frombuffer(b"".join(small_cifar.values()), np.uint8).reshape(120, -1)
    pixels, labels = records[:, 1:].reshape(120, 3, 32, 32), records[:, 0]
    for place in (None, tmp_path, tmp_path / cifar10.BINARY, archive):
        data = cifar10.load(place)
        assert data.name == "CIFAR-10"
        assert not data.lossy
        assert "original" in data.remark
        assert np.array_equal(torch.cat([data.images_train, data.images_test]).numpy(), pixels)
        assert np.array_equal(torch.cat([data.t_train, data.t_test]).numpy(), labels)
        assert len(data.t_test) == 20
    other = archive.rename(tmp_path / "other.tar.gz")
    assert torch.equal(cifar10.load(other, source="binary").images_test, data.images_test)


def test_the_binary_files_can_be_limited(small_cifar):
    whole, data = cifar10.load(), cifar10.load(limit=1)
    assert data.t_train.tolist() == data.t_test.tolist() == list(range(10))
    assert torch.equal(data.images_train, whole.images_train[:10])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c[:-1], "20 records of 3073 bytes, 61460 in all, but has 61459"),
        (lambda c: c + b"\0", "but has more"),
        (lambda c: b"\1" + c[1:], "SHA-256"),
    ],
)
def test_a_damaged_binary_file_is_refused(small_cifar, tmp_path, change, message, packed):
    name = "data_batch_3.bin"
    small_cifar[name] = change(small_cifar[name])
    (tmp_path / cifar10.BINARY / name).write_bytes(small_cifar[name])
    place = pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar) if packed else tmp_path
    with pytest.raises(DataError, match=message) as error:
        cifar10.load(place)
    assert name in str(error.value)


def test_a_label_above_nine_is_refused(small_cifar, tmp_path, monkeypatch):
    small_cifar["test_batch.bin"] = b"\12" + small_cifar["test_batch.bin"][1:]
    accept(monkeypatch, small_cifar)
    (tmp_path / cifar10.BINARY / "test_batch.bin").write_bytes(small_cifar["test_batch.bin"])
    with pytest.raises(DataError, match="test labels must be 0 to 9, but reach from 0 to 10"):
        cifar10.load()


def test_a_missing_binary_file_is_named(small_cifar, tmp_path):
    (tmp_path / cifar10.BINARY / "data_batch_2.bin").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-bin/data_batch_2\.bin in .*--to"):
        cifar10.load()
    pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar)  # complete, and so preferred
    assert cifar10.load().name == "CIFAR-10"


@pytest.mark.parametrize("change", [lambda c: c[: len(c) // 2], lambda c: b"no tar" * 1000])
def test_a_damaged_archive_is_refused(small_cifar, tmp_path, change):
    archive = pack_binary(tmp_path / cifar10.ARCHIVE, small_cifar)
    archive.write_bytes(change(archive.read_bytes()))
    with pytest.raises(DataError, match=re.escape(f"{archive} cannot be read")):
        cifar10.load(archive)


# CIFAR-10, images.


def encoded(pixels, kind="PNG", **options):
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


@pytest.fixture
def small_images(tmp_path, monkeypatch):
    """The PNG files of a set with 3 and 2 images of a class, by name; pixels by part."""
    random = np.random.default_rng(0)
    monkeypatch.setattr(cifar10_images, "COUNTS", {"train": 3, "test": 2})
    monkeypatch.setenv("HDNN_DATA", str(tmp_path))
    monkeypatch.setenv("HDNN_CACHE", str(tmp_path / "cache"))
    pixels = {}
    for part, count in cifar10_images.COUNTS.items():
        for label in cifar10.CLASSES:
            for number in range(count):
                pixels[f"{part}/{label}/{number:04}.png"] = random.integers(
                    0, 256, (32, 32, 3), dtype=np.uint8
                )
    return pixels


def pngs(pixels):
    return [(name, encoded(image)) for name, image in pixels.items()]


def assert_is(data, pixels):
    for part, found in (("train", data.images_train), ("test", data.images_test)):
        expected = [image for name, image in pixels.items() if name.startswith(part)]
        assert np.array_equal(found.numpy().transpose(0, 2, 3, 1), np.stack(expected))
    assert data.t_train.tolist() == [label for label in range(10) for _ in range(3)]
    assert data.t_test.tolist() == [label for label in range(10) for _ in range(2)]


@pytest.mark.parametrize(("ending", "mode"), [("", "w"), (".xz", "w:xz"), (".gz", "w:gz")])
def test_images_are_read_from_an_archive_in_the_order_of_their_names(
    small_images, tmp_path, ending, mode
):
    path = tmp_path / f"cifar10-png.tar{ending}"
    members = [(f"./set/{name}", content) for name, content in reversed(pngs(small_images))]
    pack(path, [("README", b"a text"), *members], mode)
    data = cifar10.load()
    assert_is(data, small_images)
    assert data.name == "CIFAR-10 (PNG)"
    assert not data.lossy
    limited = cifar10.load(path, source="images", limit=1)
    assert torch.equal(limited.images_train, data.images_train[::3])
    assert torch.equal(limited.images_test, data.images_test[::2])


def write_folder(folder, pixels):
    for name, content in pngs(pixels):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_images_are_read_from_a_folder_and_links_are_not_followed(small_images, tmp_path):
    folder = tmp_path / "cifar10"
    write_folder(folder, small_images)
    for _ in range(2):  # the second time from the cache
        assert_is(cifar10.load(), small_images)
    assert_is(cifar10.load(folder), small_images)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    path = folder / "train" / "cat" / "0001.png"
    path.rename(tmp_path / "elsewhere.png")
    path.symlink_to(tmp_path / "elsewhere.png")
    with pytest.raises(DataError, match=r"2 images in train/cat \(1 links or unsafe names"):
        cifar10.load()


@pytest.mark.parametrize("quality", [75, 30, 100])
def test_a_jpeg_set_is_named_after_its_quality(small_images, tmp_path, quality):
    members = [
        (name.replace(".png", ".jpg"), encoded(image, "JPEG", quality=quality))
        for name, image in small_images.items()
    ]
    pack(tmp_path / "cifar10-jpeg.tar.xz", members, "w:xz")
    for _ in range(2):
        data = cifar10.load()
        assert data.name == f"CIFAR-10 (JPEG q{quality})"
        assert data.lossy
        assert "report results under this name" in data.remark


def test_a_jpeg_set_of_several_qualities_has_none_in_its_name(small_images, tmp_path):
    members = [
        (name.replace(".png", ".jpg"), encoded(image, "JPEG", quality=75 + number % 2))
        for number, (name, image) in enumerate(small_images.items())
    ]
    assert cifar10.load(pack(tmp_path / "set.tar.gz", members)).name == "CIFAR-10 (JPEG)"


def test_the_binary_distribution_is_preferred_to_images(small_cifar, tmp_path):
    (tmp_path / "cifar10" / "train").mkdir(parents=True)
    assert cifar10.load().name == "CIFAR-10"
    with pytest.raises(DataError, match="0 images in train/airplane, but CIFAR-10 has 5000"):
        cifar10.load(source="images")


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    "member",
    [
        special("train/cat/0001.png", tarfile.SYMTYPE, "/etc/passwd"),
        special("train/cat/0001.png", tarfile.LNKTYPE, "train/cat/0000.png"),
        special("train/cat/0001.png", tarfile.FIFOTYPE),
        special("/train/cat/0001.png", tarfile.REGTYPE),
        special("../train/cat/0001.png", tarfile.REGTYPE),
        special("x/../train/cat/0001.png", tarfile.REGTYPE),
    ],
)
def test_links_and_unsafe_names_in_an_archive_are_ignored(small_images, tmp_path, member):
    whole = pngs(small_images)
    path = pack(tmp_path / "set.tar.gz", [*whole, (member, b"")])
    before = sorted(tmp_path.iterdir())
    assert_is(cifar10.load(path, limit=3), small_images)
    rest = [(name, content) for name, content in whole if name != "train/cat/0001.png"]
    pack(path, [*rest, (member, b"")])
    with pytest.raises(DataError, match=r"2 images in train/cat \(1 links or unsafe names ignored"):
        cifar10.load(path)
    assert sorted(tmp_path.iterdir()) == before  # nothing was unpacked


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train/cat/0001.png", b"no image", "cannot be decoded as an image"),
        ("train/cat/0001.png", b"", "cannot be decoded as an image"),
        ("train/cat/0001.png", "cut", "cannot be decoded as an image"),
        ("train/cat/0001.png", "large", "33 x 32 pixels in mode RGB, but CIFAR-10 has 32 x 32"),
        ("train/cat/0001.png", "grey", "32 x 32 pixels in mode L"),
        ("train/cat/0001.png", b"x" * 70000, "70000 bytes, too many"),
        ("train/cat/notes.txt", b"text", r"notes\.txt is no \.jpg or \.png file"),
        ("train/fish/0001.png", b"", "class 'fish', which CIFAR-10 does not have"),
        ("train/cat/0003.png", b"", "has 4 images in train/cat, but CIFAR-10 has 3"),
        ("other/train/cat/0000.png", b"", "is there twice"),
    ],
)
def test_a_member_that_is_no_such_image_is_refused(small_images, tmp_path, name, content, message):
    made = {
        "cut": lambda: encoded(small_images["train/cat/0001.png"])[:500],
        "large": lambda: encoded(np.zeros((32, 33, 3), np.uint8)),
        "grey": lambda: encoded(np.zeros((32, 32), np.uint8)),
    }
    members = dict(pngs(small_images))
    if name == "train/cat/0003.png":
        del members["test/truck/0001.png"]  # as many as there should be, but not the same
    members[name] = made[content]() if isinstance(content, str) else content
    with pytest.raises(DataError, match=message):
        cifar10.load(pack(tmp_path / "set.tar.gz", members.items()))


def test_more_images_than_there_are_in_the_set_are_refused(small_images, tmp_path):
    extra = [(f"train/cat/{number}.png", b"") for number in range(5)]
    with pytest.raises(DataError, match="more than the 50 images"):
        cifar10.load(pack(tmp_path / "set.tar.gz", [*pngs(small_images), *extra]))
    many = [(str(number), b"") for number in range(1102)]
    with pytest.raises(DataError, match="more than 1101 members"):
        cifar10.load(pack(tmp_path / "set.tar.gz", many))


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_an_archive_that_is_cut_off_is_refused(small_images, tmp_path, mode, share):
    path = pack(tmp_path / "set.tar", pngs(small_images), mode)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataError, match=r"cannot be read|images in"):
        cifar10.load(path)


@given(st.data())
def test_no_damage_to_an_archive_makes_the_reader_fail_otherwise(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "damaged.tar"
    mode = data.draw(st.sampled_from(["w", "w:gz", "w:xz"]))
    content = bytearray(pack(path, [("train/cat/0.png", b"x" * 100)], mode).read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=5)):
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(DataError):
        cifar10.load(path, source="images", limit=1)


def test_without_pillow_the_extra_is_named(small_images, tmp_path, monkeypatch):
    path = pack(tmp_path / "set.tar.gz", pngs(small_images))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'hdnn\[images\]'"):
        cifar10.load(path)


def test_a_cache_that_was_changed_is_decoded_again(small_images, tmp_path):
    path = pack(tmp_path / "set.tar.gz", pngs(small_images))
    cifar10.load(path)
    (cache,) = (tmp_path / "cache").iterdir()
    assert cache.name == f"cifar10-{hashlib.sha256(path.read_bytes()).hexdigest()}.safetensors"
    content = cache.read_bytes()
    changed = content[:-1] + bytes([content[-1] ^ 1])
    for damaged in (changed, content[:-100], b"", content.replace(b"format", b"tamrof")):
        cache.write_bytes(damaged)
        assert_is(cifar10.load(path), small_images)
        assert cache.read_bytes() == content
    other = cache.with_name(f"cifar10-{'0' * 64}.safetensors")
    cache.rename(other)
    assert cifar10_images._from_cache(other, "0" * 64) is None  # of another source


def test_a_cache_that_cannot_be_written_is_a_warning(small_images, tmp_path, monkeypatch):
    path = pack(tmp_path / "set.tar.gz", pngs(small_images))
    monkeypatch.setenv("HDNN_CACHE", str(path))
    with pytest.warns(UserWarning, match="not kept for the next time.*set HDNN_CACHE"):
        data = cifar10.load(path)
    assert_is(data, small_images)


def test_options_are_checked_before_anything_is_read(tmp_path):
    with pytest.raises(OptionError, match="Did you mean 'binary'"):
        cifar10.load(tmp_path, source="binaries")
    with pytest.raises(ShapeError, match="limit must be a whole number >= 1"):
        cifar10.load(tmp_path, limit=0)
    for source in cifar10.SOURCES:
        with pytest.raises(DataError, match=r"CIFAR-10 is not there.*download cifar10 --to"):
            cifar10.load(tmp_path / "nowhere", source=source)
    with pytest.raises(HDNNError, match="a path must be"):
        cifar10.load(3)  # pyright: ignore


# The real sets, where they are.


@pytest.mark.skipif(
    not any(DATA.glob("mnist/train-images-idx3-ubyte*")), reason="needs MNIST under HDNN_DATA"
)
def test_the_real_mnist_has_its_well_known_mean_and_spread():
    data = mnist.load()
    assert repr(data) == "ImageData(MNIST, 60000 train, 10000 test, 1 x 28 x 28, cpu)"
    x = data.images_train.double() / 255
    assert abs(float(x.mean()) - mnist.MEAN[0]) < 5e-5
    assert abs(float(x.std()) - mnist.STD[0]) < 5e-5
    assert data.t_train[:5].tolist() == [5, 0, 4, 1, 9]


@pytest.mark.slow
@pytest.mark.skipif(
    not any(DATA.glob("cifar10-jpeg.tar.xz")), reason="needs CIFAR-10 in JPEG under HDNN_DATA"
)
def test_the_jpeg_set_is_reported_as_such():
    pytest.importorskip("PIL")
    data = cifar10.load(DATA / "cifar10-jpeg.tar.xz", limit=20)
    assert repr(data) == "ImageData(CIFAR-10 (JPEG q75), 200 train, 200 test, 3 x 32 x 32, cpu)"
    assert data.lossy
    x = data.normalised(torch.cat([data.images_train, data.images_test]), torch.float64)
    assert x.mean((0, 2, 3)).abs().max() < 0.2
    assert (x.std((0, 2, 3)) - 1).abs().max() < 0.2


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
