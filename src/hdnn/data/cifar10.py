"""CIFAR-10 from its binary distribution, or from a folder or tar of JPEG or PNG images.

The binary files are the original pixels. What was decoded from images is named after its source,
and kept decoded in a cache. Nothing is unpacked to disk, and nothing pickled is ever opened.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor

from hdnn.data.cifar10_images import BROKEN, CLASSES, SHAPE, image_data, load_images
from hdnn.data.cifar10_images import COUNTS as COUNTS
from hdnn.data.cifar10_images import FORMAT as FORMAT
from hdnn.data.cifar10_images import LARGEST as LARGEST
from hdnn.data.cifar10_images import MEAN as MEAN
from hdnn.data.cifar10_images import STD as STD
from hdnn.data.cifar10_images import Found as Found
from hdnn.data.images import ImageData, check_sha256, data_folder, missing, unreadable
from hdnn.errors import DataError, choose, positive_int

SOURCES = ("auto", "binary", "images")
RECORD = 3073  # bytes: a label, then red, green and blue of 32 x 32 pixels each
RECORDS = 10000  # in each binary file

# SHA-256 of the binary files, the last of them for testing.
FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
BINARY, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
IMAGES = ("cifar10-png", "cifar10-jpeg", "cifar10")  # folders, or archives with these endings:
TARS = (".tar", ".tar.xz", ".tar.gz")


def load(
    folder: str | os.PathLike[str] | None = None,
    source: str = "auto",
    *,
    limit: int | None = None,
    progress: bool = True,
) -> ImageData:
    """CIFAR-10, 50,000 images to train on and 10,000 to test with, of 3 x 32 x 32 pixels.

    It is looked for in `folder`, by default that of HDNN_DATA: the binary distribution, else
    images; or `folder` is an archive itself. `limit` takes the first images of each class.
    """
    if limit is not None:
        limit = positive_int("limit", limit)
    place, binary = find(folder, source)
    return _load_binary(place, limit) if binary else load_images(place, limit, progress)


def find(folder: str | os.PathLike[str] | None = None, source: str = "auto") -> tuple[Path, bool]:
    """Where the set is, and whether that is its binary distribution."""
    choose("source", source, SOURCES)
    home = data_folder(folder)
    if source != "images" and (place := _find_binary(home, source)):
        return place, True
    if source != "binary" and (place := _find_images(home)):
        return place, False
    wanted = {
        "binary": f"{ARCHIVE} or {BINARY}",
        "images": f"folder or archive of images, e.g. {IMAGES[1]}.tar.xz",
        "auto": f"{ARCHIVE}, {BINARY} or archive of images, e.g. {IMAGES[1]}.tar.xz,",
    }
    raise missing("CIFAR-10", wanted[source], home, "cifar10")


def _find_binary(home: Path, source: str) -> Path | None:
    if home.is_file():
        return home if source == "binary" or home.name == ARCHIVE else None
    folders = (home, home / "cifar10")
    places = [place for folder in folders for place in (folder / BINARY, folder)]
    for place in places:
        if all((place / name).is_file() for name in FILES):
            return place
    for folder in folders:
        if (folder / ARCHIVE).is_file():
            return folder / ARCHIVE
    # A set with missing files is reported, rather than silently replaced by other pixels.
    return next((p for p in places if any((p / name).is_file() for name in FILES)), None)


def _find_images(home: Path) -> Path | None:
    if home.is_file():
        return home
    names = [name + ending for ending in ("", *TARS) for name in IMAGES]
    for place in (home, *(home / name for name in names)):
        if place.is_file() or (place / "train").is_dir():
            return place
    return None


# The binary distribution.


def _load_binary(place: Path, limit: int | None) -> ImageData:
    contents = _read_archive(place) if place.is_file() else _read_folder(place)
    images, labels = [], []
    for name, sha256 in FILES.items():
        where, content = f"{place}: {name}", contents.get(name)
        if content is None:
            raise missing("CIFAR-10", f"{place.name}/{name}", place.parent, "cifar10")
        if len(content) != RECORDS * RECORD:
            more = "more" if len(content) > RECORDS * RECORD else f"{len(content)}"
            raise DataError(
                f"{where} must have {RECORDS} records of {RECORD} bytes, {RECORDS * RECORD} in "
                f"all, but has {more}; download it again."
            )
        check_sha256(where, content, sha256)
        records = np.frombuffer(content, np.uint8).reshape(RECORDS, RECORD)
        labels.append(records[:, 0])
        images.append(records[:, 1:].reshape(RECORDS, *SHAPE))
    tensors = {
        "images_train": torch.from_numpy(np.concatenate(images[:-1])),
        "t_train": torch.from_numpy(np.concatenate(labels[:-1]).astype(np.int64)),
        "images_test": torch.from_numpy(images[-1].copy()),
        "t_test": torch.from_numpy(labels[-1].astype(np.int64)),
    }
    data = image_data("CIFAR-10", tensors, remark=f"the original pixels, from {place.name}")
    return data if limit is None else _first(data, limit)


def _read_folder(folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in FILES:
        path = folder / name
        if path.is_file():
            try:
                with path.open("rb") as file:
                    contents[name] = file.read(RECORDS * RECORD + 1)
            except OSError as error:
                raise unreadable(path, error) from error
    return contents


def _read_archive(path: Path) -> dict[str, bytes]:
    contents = {}
    try:
        with tarfile.open(path, "r|*") as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                if member.isfile() and name in FILES and (file := archive.extractfile(member)):
                    contents[name] = file.read(RECORDS * RECORD + 1)
    except BROKEN as error:
        raise unreadable(path, error) from error
    return contents


def _first(data: ImageData, limit: int) -> ImageData:
    """The first `limit` images of each class."""

    def rows(t: Tensor) -> Tensor:
        each = [(t == label).nonzero()[:limit, 0] for label in range(len(CLASSES))]
        return torch.cat(each).sort().values

    train, test = rows(data.t_train), rows(data.t_test)
    tensors = {
        "images_train": data.images_train[train],
        "t_train": data.t_train[train],
        "images_test": data.images_test[test],
        "t_test": data.t_test[test],
    }
    return image_data(data.name, tensors, remark=data.remark)
