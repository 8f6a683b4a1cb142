"""Labelled images that stay on one device: a set, its normalisation, a hold-out, augmentation.

Pixels are bytes (B, C, H, W) until they are normalised: a whole set is small enough for a GPU.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hdnn.base.files import as_path, reason_of
from hdnn.errors import DataError, choose, flag

__all__ = ["ImageData", "Labelled", "augment", "blank", "draw"]

PADDING = ("zeros", "reflect")


class Labelled(NamedTuple):
    """Images in bytes with their labels: what `ImageData.holdout` gives.

    Attributes:
        images: (B, C, H, W), of `torch.uint8`.
        t: labels (B,).

    Examples:
        >>> import torch
        >>> from hdnn.data import images
        >>> some = images.Labelled(torch.zeros(10, 1, 28, 28, dtype=torch.uint8), torch.arange(10))
        >>> some.images.shape, some.t.shape
        (torch.Size([10, 1, 28, 28]), torch.Size([10]))
    """

    images: Tensor
    t: Tensor


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images in bytes with their labels, to train on and to test with.

    Args:
        name: of the set, under which results are reported.
        images_train: those to train on, (B, C, H, W), of `torch.uint8`.
        t_train: their labels, whole numbers from 0 to classes-1, (B,).
        images_test: those to test with.
        t_test: their labels.
        classes: the names of the classes.
        mean: of each channel, of pixels between 0 and 1.
        std: the standard deviation of each channel.
        lossy: whether the pixels are not the original ones.
        remark: where the pixels come from.

    Raises:
        DataError: if images, labels, mean or std have not the shapes and types above.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> images, t = torch.randint(256, (30, 1, 8, 8)).byte(), torch.arange(30) % 3
        >>> classes = ("cat", "dog", "fox")
        >>> data = hdnn.data.ImageData("pets", images, t, images, t, classes, (0.5,), (0.3,))
        >>> train, validation = data.holdout(6)
        >>> train.images.shape, validation.t.bincount()
        (torch.Size([24, 1, 8, 8]), tensor([2, 2, 2]))
        >>> data.normalised(train.images).dtype
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
    lossy: bool = False
    remark: str = ""

    def __post_init__(self) -> None:
        for part, images, t in (
            ("training", self.images_train, self.t_train),
            ("test", self.images_test, self.t_test),
        ):
            _check_images(f"{self.name}: the {part} images", images, len(self.mean))
            if images.dtype != torch.uint8:
                raise DataError(
                    f"{self.name}: the {part} images must be torch.uint8, but are {images.dtype}; "
                    "keep them as bytes and call .normalised on a batch."
                )
            if t.dtype != torch.int64 or t.shape != images.shape[:1]:
                raise DataError(
                    f"{self.name}: the {part} labels must be torch.int64 of shape "
                    f"({len(images)},), one for each image, but are {t.dtype} of {tuple(t.shape)}."
                )
            if len(t) and not (int(t.min()) >= 0 and int(t.max()) < len(self.classes)):
                raise DataError(
                    f"{self.name}: the {part} labels must be 0 to {len(self.classes) - 1}, but "
                    f"reach from {int(t.min())} to {int(t.max())}."
                )
        if len(self.mean) != len(self.std):
            raise DataError(
                f"{self.name}: mean and std must have one number a channel, but have "
                f"{len(self.mean)} and {len(self.std)}."
            )

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.images_train.shape[1:]))
        counts = f"{len(self.t_train)} train, {len(self.t_test)} test"
        return f"ImageData({self.name}, {counts}, {shape}, {self.images_train.device})"

    def to(self, device: torch.device | str) -> Self:
        """The same set with all images and labels on another device.

        Args:
            device: such as "cuda".
        """
        tensors = {name: v.to(device) for name, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)

    def normalised(self, images: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """`(images/255 - mean)/std` for each channel.

        Args:
            images: `(*batch, C, H, W)`, from 0 to 255.
            dtype: of the result; by default `torch.get_default_dtype()`.

        Raises:
            DataError: if the images have another shape, or the dtype is no floating-point one.
        """
        dtype = dtype or torch.get_default_dtype()
        if not dtype.is_floating_point:
            raise DataError(f"dtype must be floating point, but got {dtype}; use torch.float32.")
        if images.ndim < 3 or images.shape[-3] != len(self.mean):
            raise DataError(
                f"images of {self.name} have the shape (*batch, {len(self.mean)}, H, W), "
                f"but got {tuple(images.shape)}."
            )
        # Half precision would lose digits of the mean, so it is used only at the end.
        wide = torch.promote_types(dtype, torch.float32)
        # By numbers, not tensors: nothing is copied to the device, and a CUDA graph can record it.
        channels = [
            (pixels.to(wide) - 255 * mean) / (255 * std)
            for pixels, mean, std in zip(images.unbind(-3), self.mean, self.std, strict=True)
        ]
        return torch.stack(channels, -3).to(dtype)

    def holdout(self, count: int, seed: int = 0) -> tuple[Labelled, Labelled]:
        """The training images split in two: to train on, and some of them to validate with.

        Each class has its share in both. The seed alone decides, on any device.

        Args:
            count: how many are to validate with.
            seed: what they are chosen by.

        Raises:
            DataError: if there are not more than `count` images, or the seed is no whole number.
        """
        total = len(self.t_train)
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count < total:
            raise DataError(
                f"count must be a whole number from 1 to {total - 1}, less than the {total} "
                f"training images of {self.name}, but got {count!r}."
            )
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise DataError(f"seed must be a whole number >= 0, but got {seed!r}; take seed=0.")
        t = self.t_train.cpu().numpy()
        labels, sizes = np.unique(t, return_counts=True)
        share, rest = np.divmod(count * sizes, total)
        # What rounding down has left goes to the largest remainders, first classes first.
        share[np.argsort(-rest, kind="stable")[: count - share.sum()]] += 1
        random, chosen = np.random.default_rng(seed), np.zeros(total, dtype=bool)
        for label, number in zip(labels, share, strict=True):
            chosen[random.permutation(np.flatnonzero(t == label))[:number]] = True
        kept = torch.from_numpy(chosen).to(self.t_train.device)
        train, validation = (
            Labelled(self.images_train[rows], self.t_train[rows]) for rows in (~kept, kept)
        )
        return train, validation


def draw(
    count: int, generator: torch.Generator, *, pad: int = 4, flip: bool = True
) -> tuple[Tensor, Tensor]:
    """Random numbers for `augment`, to be drawn before a CUDA graph runs.

    Args:
        count: how many images there are.
        generator: what they are drawn from, and on whose device.
        pad: how far an image may be shifted in each direction.
        flip: mirror half of the images; otherwise none.

    Returns:
        Shifts of rows and columns (count, 2) from 0 to 2 pad, and flips (count,).

    Raises:
        DataError: if `pad` is no whole number >= 0.
        OptionError: if `flip` is neither True nor False.

    Examples:
        >>> import torch
        >>> from hdnn.data import images
        >>> shifts, flips = images.draw(100, torch.Generator().manual_seed(0), pad=4)
        >>> shifts.shape, int(shifts.min()), int(shifts.max()), flips.dtype
        (torch.Size([100, 2]), 0, 8, torch.bool)
    """
    if isinstance(pad, bool) or not isinstance(pad, int) or pad < 0:
        raise DataError(f"pad must be a whole number >= 0, but got {pad!r}; CIFAR-10 takes 4.")
    device = generator.device
    shifts = torch.randint(0, 2 * pad + 1, (count, 2), generator=generator, device=device)
    flips = torch.randint(0, 2, (count,), generator=generator, device=device).bool()
    return shifts, flips if flag("flip", flip) else torch.zeros_like(flips)


def augment(
    images: Tensor,
    generator: torch.Generator | None = None,
    pad: int = 4,
    flip: bool = True,
    *,
    padding: str = "zeros",
    shifts: Tensor | None = None,
    flips: Tensor | None = None,
) -> Tensor:
    """Each image padded, cropped to its size at random, and half of them mirrored.

    Args:
        images: (B, C, H, W), in bytes or normalised.
        generator: what decides, on the device of the images.
        pad: how many pixels are added on each side before cropping.
        flip: mirror half of the images; otherwise none.
        padding: what is added: "zeros", or "reflect" for the image mirrored at its edges.
        shifts: where to crop, rows and columns (B, 2) from 0 to 2 pad. Inside of a CUDA graph give
            these and `flips` instead of a generator: see `draw`.
        flips: which images to mirror, (B,).

    Returns:
        Images of the same shape and dtype.

    Raises:
        DataError: if the images have another shape, `pad` is not below their size, there is neither
            a generator on their device nor both of `shifts` and `flips`, or these have another
            shape or dtype.
        OptionError: if `padding` is not known, or `flip` is neither True nor False.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> images = torch.randint(256, (10, 3, 32, 32)).byte()
        >>> hdnn.data.augment(images, torch.Generator().manual_seed(0)).shape
        torch.Size([10, 3, 32, 32])
        >>> middle, unflipped = torch.full((10, 2), 4), torch.zeros(10, dtype=torch.bool)
        >>> torch.equal(hdnn.data.augment(images, shifts=middle, flips=unflipped), images)
        True
    """
    _check_images("images to augment", images, None)
    count, channels, height, width = images.shape
    choose("padding", padding, PADDING)
    if isinstance(pad, bool) or not isinstance(pad, int) or not 0 <= pad < min(height, width):
        raise DataError(
            f"pad must be a whole number from 0 to {min(height, width) - 1} for images of "
            f"{height} x {width}, but got {pad!r}."
        )
    if shifts is None and flips is None:
        if generator is None or not _is_on(generator.device, images.device):
            given = "none" if generator is None else f"one on {generator.device}"
            raise DataError(
                f"augment needs a generator on {images.device}, where the images are, but got "
                f"{given}; use torch.Generator({str(images.device)!r})."
            )
        shifts, flips = draw(count, generator, pad=pad, flip=flip)
    shifts = _checked("shifts", shifts, (count, 2), torch.int64)
    flips = _checked("flips", flips, (count,), torch.bool)
    i = torch.arange(height, device=images.device) + shifts[:, :1] - pad
    j = torch.arange(width, device=images.device)
    j = torch.where(flips[:, None], width - 1 - j, j) + shifts[:, 1:] - pad
    if padding == "reflect":
        i, j = ((n - 1) - ((n - 1) - k.abs()).abs() for k, n in ((i, height), (j, width)))
    # Clamped, since no shift that is too large may read outside of the images.
    source = i.clamp(0, height - 1)[:, :, None] * width + j.clamp(0, width - 1)[:, None, :]
    source = source.view(count, 1, -1).expand(-1, channels, -1)
    cropped = images.flatten(2).gather(2, source).view(images.shape)
    inside = ((i >= 0) & (i < height))[:, :, None] & ((j >= 0) & (j < width))[:, None, :]
    return torch.where(inside[:, None], cropped, torch.zeros_like(cropped))


def blank(images: Tensor, centres: Tensor, size: int) -> Tensor:
    """Images with a square around each centre set to zero, which in normalised ones is the mean.

    Args:
        images: (B, C, H, W).
        centres: row and column for each image, (B, 2); a square may reach beyond the edge.
        size: the side of the squares.

    Returns:
        Images of the same shape and dtype.

    Raises:
        DataError: if images or centres have another shape, or `size` is no whole number >= 0.

    Examples:
        >>> import torch
        >>> from hdnn.data import images
        >>> ones = torch.ones(1, 1, 4, 4)
        >>> images.blank(ones, torch.tensor([[1, 1]]), size=2)[0, 0]
        tensor([[0., 0., 1., 1.],
                [0., 0., 1., 1.],
                [1., 1., 1., 1.],
                [1., 1., 1., 1.]])
    """
    _check_images("images to blank", images, None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise DataError(f"size must be a whole number >= 0, but got {size!r}.")
    if centres.shape != (len(images), 2):
        raise DataError(
            f"centres must be ({len(images)}, 2), a row and a column for each image, but got "
            f"{tuple(centres.shape)}."
        )
    i, j = (
        (torch.arange(n, device=images.device) - centre[:, None] + size // 2)
        for n, centre in zip(images.shape[2:], centres.unbind(1), strict=True)
    )
    inside = ((i >= 0) & (i < size))[:, :, None] & ((j >= 0) & (j < size))[:, None, :]
    return images.masked_fill(inside[:, None], 0)


def _is_on(device: torch.device, other: torch.device) -> bool:
    """Whether they are the same; "cuda" without a number is whichever is used."""
    return device.type == other.type and device.index in (None, other.index)


def _check_images(what: str, images: Tensor, channels: int | None) -> None:
    if images.ndim != 4 or (channels is not None and images.shape[1] != channels):
        raise DataError(
            f"{what} must have the shape (B, {channels or 'C'}, H, W), "
            f"but got {tuple(images.shape)}."
        )


def _checked(name: str, numbers: Tensor | None, shape: Any, dtype: torch.dtype) -> Tensor:
    """Check shape and type only: reading values would wait for the device."""
    if numbers is None or numbers.shape != shape or numbers.dtype != dtype:
        given = "nothing" if numbers is None else f"{tuple(numbers.shape)} of {numbers.dtype}"
        raise DataError(f"{name} must be {shape} of {dtype}, but got {given}; see draw.")
    return numbers


def data_folder(folder: str | os.PathLike[str] | None) -> Path:
    """The folder that was given, else the one in HDNN_DATA, else `data`."""
    return as_path(os.environ.get("HDNN_DATA") or "data" if folder is None else folder)


def missing(name: str, file: str, folder: Path, command: str) -> DataError:
    """A set that is not there: which file, which folder, which command."""
    order = f"python -m hdnn.data.download {command} --to {shlex.quote(str(folder))}"
    return DataError(
        f"{name} is not there: found no {file} in {folder}; download it with `{order}`, or set "
        "HDNN_DATA to the folder that holds it."
    )


def unreadable(path: Path, error: Exception) -> DataError:
    """A file that the system or a decoder gives up on, in one sentence."""
    reason = reason_of(error, 120).rstrip(".")
    return DataError(
        f"{path} cannot be read ({reason}); it is truncated, damaged or of another kind: "
        "download it again."
    )


def check_sha256(path: Path | str, content: bytes, expected: str) -> None:
    """Refuse bytes that are not those of the public file."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{path} has the SHA-256 {found[:16]}..., but the public file has {expected[:16]}...; "
            "it is damaged or another set: download it again."
        )
