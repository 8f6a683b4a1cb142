"""MNIST is read exactly from its files, or refused with a reason."""

import gzip
import hashlib
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdnn.data import cifar10, mnist
from hdnn.errors import DataError

DATA = Path(os.environ.get("HDNN_DATA") or "data")


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
