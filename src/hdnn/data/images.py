"""Labelled images that stay on one device: MNIST, CIFAR-10, a hold-out, augmentation.

Pixels are bytes (B, C, H, W) until they are normalised, so a whole set fits on a GPU. Files are
expected in the folder named by the environment variable HDNN_DATA, or in `data`;
`hdnn.data.download` fetches them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import math
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hdnn.data.fetch import data_folder
from hdnn.errors import CheckpointError, DataError, require
from hdnn.io import load_tensors, save_tensors
from hdnn.progress import Progress

__all__ = ["ImageData", "augment", "draw", "load_cifar10", "load_mnist"]

TENSORS = ("images_train", "t_train", "images_test", "t_test")


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images in bytes with their labels, for training and testing.

    Attributes:
        name: the name of the set, as reported with results.
        images_train: the training images, (B, C, H, W), of `torch.uint8`.
        t_train: the training labels, whole numbers from 0 to classes-1, (B,).
        images_test: the test images.
        t_test: the test labels.
        classes: the names of the classes.
        mean: the mean of each channel, for pixels between 0 and 1.
        std: the standard deviation of each channel.
        remark: the origin of the pixels, if they are not the original ones.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> images, t = torch.randint(256, (30, 1, 8, 8)).byte(), torch.arange(30) % 3
        >>> classes = ("cat", "dog", "fox")
        >>> data = hdnn.data.ImageData("pets", images, t, images, t, classes, (0.5,), (0.3,))
        >>> data.holdout(6)
        ImageData(pets, 24 train, 6 test, 1 x 8 x 8, cpu)
        >>> data.normalised(images).dtype
        torch.float32
    """

    name: str
    images_train: Tensor
    t_train: Tensor
    images_test: Tensor
    t_test: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    remark: str = ""

    def __post_init__(self) -> None:
        count = len(self.classes)
        sets = (
            (self.images_train, self.t_train),
            (self.images_test, self.t_test),
        )
        for images, t in sets:
            is_image = images.dtype == torch.uint8 and images.ndim == 4
            if not is_image or t.shape != images.shape[:1]:
                raise DataError(
                    f"{self.name}: images must be torch.uint8 of shape (B, C, H, W) with labels "
                    f"(B,), but are {images.dtype} of {tuple(images.shape)} and {tuple(t.shape)}."
                )
            if ((t < 0) | (t >= count)).any():
                raise DataError(
                    f"{self.name}: labels must be 0 to {count - 1}, but range from {t.min()} to "
                    f"{t.max()}."
                )

    def __repr__(self) -> str:
        sizes = self.images_train.shape[1:]
        shape = " x ".join(map(str, sizes))
        counts = f"{len(self.t_train)} train, {len(self.t_test)} test"
        return f"ImageData({self.name}, {counts}, {shape}, {self.images_train.device})"

    def to(self, device: torch.device | str) -> Self:
        """The same set with all images and labels on another device."""
        tensors = {name: getattr(self, name).to(device) for name in TENSORS}
        return replace(self, **tensors)

    def normalised(
        self, images: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """(images/255 - mean)/std for each channel of images `(*batch, C, H, W)`."""
        dtype = dtype or torch.get_default_dtype()
        # Half precision would lose digits of the mean, so it is used only at the end.
        wide = torch.promote_types(dtype, torch.float32)
        channels = []
        # By numbers, not tensors: nothing is copied to the device, and a CUDA graph can record it.
        for pixels, mean, std in zip(
            images.unbind(-3), self.mean, self.std, strict=True
        ):
            centred = pixels.to(wide) - 255 * mean
            channels.append(centred / (255 * std))
        return torch.stack(channels, -3).to(dtype)

    def holdout(self, count: int, seed: int = 0) -> Self:
        """The set with `count` of its training images as test images.

        The seed selects these images, from each class in proportion to its size.
        """
        total = len(self.t_train)
        if not 0 < count < total:
            raise DataError(
                f"count must be between 1 and {total - 1}, but is {count}."
            )
        t = self.t_train.numpy(force=True)
        # Evenly spaced rows of a list that is sorted by class, and random within a class.
        random = np.random.default_rng(seed).random(total)
        order = np.lexsort((random, t))
        places = (np.arange(count) + 0.5) * total / count
        chosen = np.zeros(total, dtype=bool)
        chosen[order[places.astype(int)]] = True
        rows = torch.from_numpy(chosen).to(self.t_train.device)
        return replace(
            self,
            images_train=self.images_train[~rows],
            t_train=self.t_train[~rows],
            images_test=self.images_train[rows],
            t_test=self.t_train[rows],
        )

    def first(self, count: int) -> Self:
        """The set with only the first `count` training images and `count` test images."""
        tensors = {name: getattr(self, name)[:count] for name in TENSORS}
        return replace(self, **tensors)


# Augmentation


def draw(
    count: int, generator: torch.Generator, *, pad: int = 4, flip: bool = True
) -> tuple[Tensor, Tensor]:
    """Random shifts (count, 2) from 0 to 2 pad and flips (count,) for `augment`."""
    options: Any = {"generator": generator, "device": generator.device}
    shifts = torch.randint(0, 2 * pad + 1, (count, 2), **options)
    flips = torch.randint(0, 2, (count,), **options).bool()
    return shifts, flips & flip


def augment(
    images: Tensor, shifts: Tensor, flips: Tensor, *, pad: int = 4
) -> Tensor:
    """Each image padded with zeros, cropped to its size, and mirrored if its `flips` is true.

    Args:
        images: (B, C, H, W), in bytes or normalised.
        shifts: rows and columns (B, 2) at which to crop, from 0 to 2 pad, as `draw` gives them.
        flips: True for each image to mirror, (B,).
        pad: the number of pixels added on each side.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> images = torch.randint(256, (10, 3, 32, 32)).byte()
        >>> shifts, flips = hdnn.data.draw(10, torch.Generator().manual_seed(0))
        >>> hdnn.data.augment(images, shifts, flips).shape
        torch.Size([10, 3, 32, 32])
    """
    count, channels, height, width = images.shape
    i = torch.arange(height, device=images.device)
    j = torch.arange(width, device=images.device)
    mirrored = torch.where(flips[:, None], width - 1 - j, j)
    rows = i + shifts[:, :1]
    columns = mirrored + shifts[:, 1:]
    padded = F.pad(images, (pad, pad, pad, pad))
    source = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    source = source.view(count, 1, -1).expand(-1, channels, -1)
    cropped = padded.flatten(2).gather(2, source)
    return cropped.view(images.shape)


# MNIST

MNIST = {  # shape, and SHA-256 of the decompressed file
    "train-images-idx3-ubyte": (
        (60000, 1, 28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    "train-labels-idx1-ubyte": (
        (60000,),
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    "t10k-images-idx3-ubyte": (
        (10000, 1, 28, 28),
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    "t10k-labels-idx1-ubyte": (
        (10000,),
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
}
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


def load_mnist(folder: str | os.PathLike[str] | None = None) -> ImageData:
    """MNIST: 60,000 training and 10,000 test images of 1 x 28 x 28 pixels.

    The set is read from four IDX files, plain or gzipped, in `folder` or `folder/mnist`.

    Raises:
        DataError: if a file is missing, damaged or not the expected one.
    """
    home = data_folder(folder)
    tensors = []
    for name, (shape, sha256) in MNIST.items():
        plain = f"mnist/{name}"
        path = _find(home, "mnist", (plain, f"{plain}.gz", name, f"{name}.gz"))
        try:
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
        except BROKEN as error:
            raise DataError(
                f"{path} cannot be read ({error}); download it again."
            ) from error
        _check(path, content, sha256)
        # The values follow a header.
        values = _bytes(content)[-math.prod(shape) :]
        tensors.append(values.view(shape))
    images, t, images_test, t_test = tensors
    labelled = (images, t.long(), images_test, t_test.long())
    digits = tuple("0123456789")
    return ImageData("MNIST", *labelled, digits, (0.1307,), (0.3081,))


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _find(home: Path, name: str, candidates: tuple[str, ...]) -> Path:
    for candidate in candidates:
        if (home / candidate).exists():
            return home / candidate
    raise DataError(
        f"{name} is missing: there is no {candidates[0]} in {home}; download it with "
        f"hdnn.data.download({name!r}, {str(home)!r}), or set HDNN_DATA to its folder."
    )


def _check(path: Path | str, content: bytes, sha256: str) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DataError(
            f"{path} does not have the SHA-256 of the public file; it is damaged or belongs to "
            "another set; download it again."
        )


# CIFAR-10

CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
COUNTS = {"train": 5000, "test": 1000}  # images of a class
BATCHES = {  # SHA-256 of the binary files; the last is for testing
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
BINARY = ("cifar-10-binary.tar.gz", "cifar-10-batches-bin")
# Folders, or archives with these endings:
IMAGES = ("cifar10-png", "cifar10-jpeg", "cifar10")
JPEG = b"\xff\xd8"  # the first bytes of such a file
TARS = ("", ".tar", ".tar.xz", ".tar.gz")


def load_cifar10(
    folder: str | os.PathLike[str] | None = None,
) -> ImageData:
    """CIFAR-10: 50,000 training and 10,000 test images of 3 x 32 x 32 pixels.

    The set is read from its binary distribution, or otherwise from JPEG or PNG images in a folder
    or a tar archive (`train/cat/..`); the name of the set then says so. Images are decoded once,
    and cached in the folder of `torch.hub`. Nothing is unpacked to disk.

    Raises:
        DataError: if the set is missing, incomplete, damaged or not CIFAR-10.
        MissingExtraError: if Pillow, which decodes the images, is missing.
    """
    home = data_folder(folder)
    images = tuple(name + ending for ending in TARS for name in IMAGES)
    path = _find(home, "cifar10", BINARY + images)
    try:
        if path.name in BINARY:
            return _from_binary(path)
        return _from_images(path)
    except BROKEN as error:
        raise DataError(
            f"{path} cannot be read ({error}); download it again."
        ) from error


def _members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The names and contents of all files in a folder or an archive."""
    if path.is_dir():
        for file in path.rglob("*"):
            if file.is_file():
                yield file.as_posix(), file.read_bytes()
        return
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read()


def _from_binary(path: Path) -> ImageData:
    contents = {
        PurePosixPath(name).name: content for name, content in _members(path)
    }
    images = []
    labels = []
    for name, sha256 in BATCHES.items():
        content = contents.get(name, b"")
        _check(f"{path}: {name}", content, sha256)
        # A record is a label, then the pixels.
        records = _bytes(content).view(-1, 3073)
        images.append(records[:, 1:].reshape(-1, 3, 32, 32).contiguous())
        labels.append(records[:, 0].long())
    train = (torch.cat(images[:-1]), torch.cat(labels[:-1]))
    test = (images[-1], labels[-1])
    return ImageData("CIFAR-10", *train, *test, CLASSES, MEAN, STD)


def _from_images(path: Path) -> ImageData:
    key = f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}"
    name = (
        f"cifar10-{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    )
    cache = Path(torch.hub.get_dir()) / "hdnn" / name
    try:
        tensors, about = load_tensors(cache)
    except CheckpointError:  # not there yet, or damaged
        tensors, about = _decoded(path)
        cache.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(cache, tensors, about)
    about |= {"classes": CLASSES, "mean": MEAN, "std": STD}
    return ImageData(**tensors, **about)


def _decoded(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All images in the order of their names, by part and class."""
    pillow = require("PIL.Image", extra="images")
    folders: dict[str, dict[str, bytes]] = {}
    for name, content in _members(path):
        place = PurePosixPath(name)
        folder = "/".join(place.parts[-3:-1])
        folders.setdefault(folder, {})[place.name] = content
    classes = [(part, label) for part in COUNTS for label in CLASSES]
    pixels: dict[str, list[np.ndarray]] = {part: [] for part in COUNTS}
    is_jpeg = False
    with Progress(f"decoding {path.name}", len(classes)) as line:
        for number, (part, label) in enumerate(classes, 1):
            files = folders.get(f"{part}/{label}", {})
            if len(files) != COUNTS[part]:
                raise DataError(
                    f"{path} has {len(files)} images in {part}/{label}, but CIFAR-10 has "
                    f"{COUNTS[part]}; download the complete set."
                )
            for _, content in sorted(files.items()):
                is_jpeg |= content.startswith(JPEG)
                pixels[part].append(_pixels(pillow, content))
            line.update(number)
    tensors = {}
    labels = torch.arange(len(CLASSES))
    for part, count in COUNTS.items():
        tensors[f"images_{part}"] = torch.from_numpy(np.stack(pixels[part]))
        tensors[f"t_{part}"] = labels.repeat_interleave(count)
    kind = "JPEG" if is_jpeg else "PNG"
    remark = f"decoded from {kind} images"
    if is_jpeg:
        remark += "; the pixels are not the original ones: report results under this name"
    return tensors, {"name": f"CIFAR-10 ({kind})", "remark": remark}


def _pixels(pillow: Any, content: bytes) -> np.ndarray:
    with pillow.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
        pixels = np.asarray(image.convert("RGB"))
        return pixels.transpose(2, 0, 1)
