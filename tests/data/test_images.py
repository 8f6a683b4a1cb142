"""Image sets: files of MNIST and CIFAR-10, hold-outs, normalisation, augmentation, downloads."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile

import numpy as np
import pytest
import torch

import hdnn
from hdnn.data import (
    ImageData,
    augment,
    draw,
    fetch,
    images,
    load_cifar10,
    load_mnist,
)
from hdnn.errors import DataError


def pets(count=30, **changes):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 2, 4, 6), generator=generator).byte()
    t = torch.arange(count) % 3
    values = {
        "mean": (0.5, 0.4),
        "std": (0.3, 0.2),
        "classes": ("cat", "dog", "fox"),
    }
    parts = {
        "images_train": pixels,
        "t_train": t,
        "images_test": pixels,
        "t_test": t,
    }
    return ImageData(**{"name": "pets", **parts, **values, **changes})


def test_normalised_images_have_the_mean_and_deviation_taken_off():
    data = pets()
    x = data.normalised(data.images_train, torch.float64)
    mean = torch.tensor(data.mean, dtype=torch.float64)[:, None, None]
    std = torch.tensor(data.std, dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(
        x, (data.images_train / 255 - mean) / std, rtol=1e-6, atol=1e-6
    )
    assert (
        data.normalised(data.images_train, torch.bfloat16).dtype
        == torch.bfloat16
    )


def test_a_holdout_takes_its_share_of_each_class():
    split = pets().holdout(7, seed=1)
    assert len(split.t_train) == 23
    assert sorted(split.t_test.bincount().tolist()) == [2, 2, 3]
    again = pets().holdout(7, seed=1)
    assert torch.equal(split.images_test, again.images_test)
    with pytest.raises(DataError, match="between 1 and 29"):
        pets().holdout(30)


def test_wrong_images_and_labels_are_refused():
    with pytest.raises(DataError, match="uint8"):
        pets(images_train=torch.zeros(30, 2, 4, 6))
    with pytest.raises(DataError, match="labels must be 0 to 2"):
        pets(t_train=torch.arange(30))


def test_augmented_images_are_crops_of_padded_ones():
    data = pets(count=40)
    pad = 2
    shifts, flips = draw(40, torch.Generator().manual_seed(0), pad=pad)
    assert shifts.min() == 0
    assert shifts.max() == 2 * pad
    assert flips.any()
    assert not flips.all()
    changed = augment(data.images_train, shifts, flips, pad=pad)
    padded = torch.nn.functional.pad(data.images_train, (pad,) * 4)
    for image, source, (i, j), flip in zip(
        changed, padded, shifts, flips, strict=True
    ):
        crop = source[:, i : i + 4, j : j + 6]
        assert torch.equal(image, crop.flip(2) if flip else crop)
    unmoved = torch.full((40, 2), pad)
    none = torch.zeros(40, dtype=torch.bool)
    assert torch.equal(
        augment(data.images_train, unmoved, none, pad=pad), data.images_train
    )


# Files


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """Four small IDX files, and their checksums in place of the public ones."""
    random = np.random.default_rng(0)
    files = {}
    for name in images.MNIST:
        shape = (6, 1, 28, 28) if "images" in name else (6,)
        header = 16 if "images" in name else 8
        pixels = random.integers(0, 10, size=shape, dtype=np.uint8)
        content = bytes(header) + pixels.tobytes()
        files[name] = (shape, hashlib.sha256(content).hexdigest())
        (tmp_path / "mnist").mkdir(exist_ok=True)
        (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(images, "MNIST", files)
    return tmp_path


def test_mnist_is_read_and_checked(small_mnist, monkeypatch):
    data = load_mnist(small_mnist)
    assert data.images_train.shape == (6, 1, 28, 28)
    assert data.t_train.dtype == torch.int64
    monkeypatch.setenv("HDNN_DATA", str(small_mnist))
    assert torch.equal(load_mnist().images_test, data.images_test)
    path = small_mnist / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match="SHA-256"):
        load_mnist(small_mnist)
    path.write_bytes(b"no gzip at all")
    with pytest.raises(DataError, match="cannot be read"):
        load_mnist(small_mnist)
    path.unlink()
    with pytest.raises(DataError, match=r"hdnn\.data\.download\('mnist'"):
        load_mnist(small_mnist)


def test_the_binary_cifar_is_read_and_checked(tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    sums = {}
    for name in images.BATCHES:
        records = random.integers(0, 256, size=(20, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
        sums[name] = hashlib.sha256(records.tobytes()).hexdigest()
    monkeypatch.setattr(images, "BATCHES", sums)
    data = load_cifar10(tmp_path)
    assert data.images_train.shape == (100, 3, 32, 32)
    assert data.images_test.shape == (20, 3, 32, 32)
    assert (data.name, data.remark) == ("CIFAR-10", "")
    (folder / "test_batch.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"test_batch\.bin"):
        load_cifar10(tmp_path)


def test_cifar_is_decoded_from_an_archive_of_images_once(tmp_path, monkeypatch):
    pillow = pytest.importorskip("PIL.Image")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "COUNTS", {"train": 2, "test": 1})
    path = tmp_path / "cifar10-jpeg.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for part, count in images.COUNTS.items():
            for label, name in enumerate(images.CLASSES):
                for number in range(count):
                    picture = io.BytesIO()
                    pillow.new("RGB", (32, 32), (25 * label, 0, 0)).save(
                        picture, "JPEG"
                    )
                    entry = tarfile.TarInfo(f"set/{part}/{name}/{number}.jpg")
                    entry.size = picture.tell()
                    picture.seek(0)
                    archive.addfile(entry, picture)
    data = load_cifar10(tmp_path)
    assert data.name == "CIFAR-10 (JPEG)"
    assert "not the original" in data.remark
    red = data.images_train[:, 0].double().mean((1, 2))
    assert (red - 25 * data.t_train).abs().max() < 8
    monkeypatch.setattr(
        images, "_decoded", None
    )  # the second time it is in the cache
    assert torch.equal(load_cifar10(tmp_path).images_train, data.images_train)


def test_a_set_with_missing_images_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    (tmp_path / "cifar10" / "train" / "cat").mkdir(parents=True)
    pytest.importorskip("PIL.Image")
    with pytest.raises(DataError, match="0 images in train/airplane"):
        load_cifar10(tmp_path)


def test_downloads_are_checked(tmp_path, monkeypatch):
    content = b"abc"
    (tmp_path / "source").write_bytes(content)
    url = (tmp_path / "source").as_uri()
    good = {"mnist": {url: hashlib.sha256(content).hexdigest()}}
    monkeypatch.setattr(fetch, "FILES", good)
    place = hdnn.data.download("mnist", tmp_path / "data")
    assert (place / "source").read_bytes() == content
    monkeypatch.setattr(fetch, "FILES", {"mnist": {url: "0" * 64}})
    with pytest.raises(DataError, match="cannot download"):
        hdnn.data.download("mnist", tmp_path / "other")
