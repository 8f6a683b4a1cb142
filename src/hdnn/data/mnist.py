"""MNIST from its IDX files, plain or compressed by gzip."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn.data.images import ImageData, check_sha256, data_folder, missing, unreadable
from hdnn.errors import DataError

__all__ = ["find", "load"]

MEAN, STD = (0.1307,), (0.3081,)


class IDXFile(NamedTuple):
    """A file of the set: its name, the shape of its bytes, SHA-256 of it when decompressed."""

    name: str
    shape: tuple[int, ...]
    sha256: str


SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
SHAPES = ((60000, 28, 28), (60000,), (10000, 28, 28), (10000,))
FILES = tuple(
    IDXFile(name, shape, sha256)
    for (name, sha256), shape in zip(SHA256.items(), SHAPES, strict=True)
)


def load(folder: str | os.PathLike[str] | None = None) -> ImageData:
    """MNIST, 60,000 images to train on and 10,000 to test with, of 1 x 28 x 28 pixels.

    The set is read from its four IDX files, plain or compressed by gzip, each of which is compared
    with the public one. To fetch them, run `python -m hdnn.data.download mnist --to data`.

    Args:
        folder: where the files are, or the folder `mnist` with them; by default the folder that the
            environment variable HDNN_DATA names, or else `data`.

    Returns:
        The set, with its pixels in bytes.

    Raises:
        DataError: if a file is missing, damaged or another one.

    Examples:
        >>> import hdnn
        >>> hdnn.data.mnist.load("empty")
        Traceback (most recent call last):
        hdnn.errors.DataError: MNIST is not there: found no mnist/train-images-idx3-ubyte ...
    """
    parts = [_read(path, file) for path, file in zip(find(folder), FILES, strict=True)]
    images_train, t_train, images_test, t_test = parts
    return ImageData(
        "MNIST",
        images_train[:, None],
        t_train.long(),
        images_test[:, None],
        t_test.long(),
        tuple(map(str, range(10))),
        MEAN,
        STD,
    )


def find(folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Where the four files are, all of them, before the first is read.

    Args:
        folder: as for `load`.

    Returns:
        The paths of the training images and labels, then of the test images and labels.

    Raises:
        DataError: if a file is missing.

    Examples:
        >>> from pathlib import Path
        >>> import hdnn
        >>> for name in hdnn.data.mnist.SHA256:
        ...     Path(f"{name}.gz").touch()
        >>> [path.name for path in hdnn.data.mnist.find(".")][:2]
        ['train-images-idx3-ubyte.gz', 'train-labels-idx1-ubyte.gz']
    """
    home = data_folder(folder)
    return [_find(home, file.name) for file in FILES]


def read_idx(path: Path, shape: tuple[int, ...]) -> tuple[bytes, np.ndarray]:
    """The decompressed file, and its unsigned bytes in the shape that it must have."""
    header, size = 4 + 4 * len(shape), math.prod(shape)
    try:
        # One byte more than there should be, whatever the file says about itself.
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(header + size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error) from error
    magic = bytes((0, 0, 8, len(shape)))
    if content[:4] != magic:
        raise DataError(
            f"{path} begins with the bytes {content[:4].hex(' ') or 'of an empty file'}, but an "
            f"IDX file of {len(shape)}-dimensional bytes with {magic.hex(' ')}; download it again."
        )
    found = tuple(np.frombuffer(content[4:header].ljust(header - 4, b"\0"), ">u4").tolist())
    if found != shape:
        raise DataError(
            f"{path} says that it holds {_times(found)} values, but it must hold {_times(shape)}; "
            "download it again."
        )
    if len(content) != header + size:
        more = "more" if len(content) > header + size else f"only {len(content) - header}"
        raise DataError(
            f"{path} must hold {_times(shape)} = {size} bytes after its header, but has {more}; "
            "download it again."
        )
    return content, np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read(path: Path, file: IDXFile) -> Tensor:
    content, values = read_idx(path, file.shape)
    check_sha256(path, content, file.sha256)
    return torch.from_numpy(values.copy())  # a tensor must own what it may write to


def _find(home: Path, name: str) -> Path:
    for folder in (home / "mnist", home):
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    raise missing("MNIST", f"mnist/{name} or mnist/{name}.gz", home, "mnist")


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
