"""CIFAR-10 decoded from a folder or tar of JPEG or PNG images, which is kept decoded in a cache."""

from __future__ import annotations

import functools
import hashlib
import io
import lzma
import os
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn.base import tensorfile
from hdnn.base.files import write_atomically
from hdnn.base.progress import ProgressLine
from hdnn.data.images import ImageData, unreadable
from hdnn.errors import CheckpointError, DataError, HDNNError, require

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
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SHAPE = (3, 32, 32)
COUNTS = {"train": 5000, "test": 1000}  # images of a class
FORMAT = 1  # of the cache
LARGEST = 2**16  # bytes of one image file; the larger ones are not of 32 x 32 pixels
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)


def image_data(name: str, tensors: dict[str, Tensor], **remarks: Any) -> ImageData:
    """CIFAR-10 with these images and labels."""
    return ImageData(name=name, **tensors, classes=CLASSES, mean=MEAN, std=STD, **remarks)


class Found(NamedTuple):
    """The image files by part, class and name, sorted; and how many members were passed over."""

    files: dict[tuple[str, str, str], bytes]
    ignored: int


def load_images(place: Path, limit: int | None, progress: bool) -> ImageData:
    """The set from a folder or an archive of images, or the first `limit` images of each class."""
    if place.is_dir():
        found = _collect(place, _folder_files(place))
        key = _files_sha256(found)
    else:
        # The hash of an archive alone is enough to find its pixels in the cache.
        found, key = None, _file_sha256(place)
    cache = _cache_folder() / f"cifar10-{key}.safetensors"
    if limit is None and (data := _from_cache(cache, key)):
        return data
    if found is None:
        found = _collect(place, _tar_files(place))
    chosen = _complete(place, found, limit)
    name, lossy, tensors = _decode(place, chosen, progress)
    kind = "JPEG" if lossy else "PNG"
    remark = f"decoded from {kind} images; " + (
        "the pixels are not the original ones: report results under this name"
        if lossy
        else "not compared with the original pixels"
    )
    data = image_data(name, tensors, lossy=lossy, remark=remark)
    if limit is None:
        _to_cache(cache, key, data, tensors)
    return data


def _folder_files(folder: Path) -> Iterator[tuple[str, int, Callable[[], bytes] | None]]:
    """Name, size and contents of each file below; None for a link, which is not followed."""
    for part in COUNTS:
        for directory, folders, names in os.walk(folder / part):
            folders.sort()
            for name in sorted(names):
                path = Path(directory, name)
                relative = path.relative_to(folder).as_posix()
                if path.is_symlink() or not path.is_file():
                    yield relative, 0, None
                else:
                    yield relative, path.stat().st_size, path.read_bytes


def _tar_files(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes] | None]]:
    """The same for the members of an archive, read as a stream."""
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if member.isfile():
                file = archive.extractfile(member)
                yield member.name, member.size, file.read if file else None
            elif not member.isdir():
                yield member.name, 0, None


def _collect(place: Path, members: Iterator[tuple[str, int, Callable[[], bytes] | None]]) -> Found:
    """The image files among the members of a set, by part, class and name."""
    files: dict[tuple[str, str, str], bytes] = {}
    ignored, most = 0, len(CLASSES) * sum(COUNTS.values())
    try:
        for number, (name, size, read) in enumerate(members):
            if number > 2 * most + 1000:  # endless small members must not fill the memory
                raise DataError(f"{place} has more than {number} members; is it CIFAR-10?")
            path = PurePosixPath(name)
            if read is None or path.is_absolute() or ".." in path.parts or "\\" in name:
                ignored += 1
                continue
            if len(path.parts) < 3 or path.parts[-3] not in COUNTS:
                continue  # a text beside the images, perhaps
            part, label, file = path.parts[-3:]
            _check_member(place, name, label, file, size)
            if (part, label, file) in files:
                raise DataError(f"{place}: {name} is there twice; make the archive again.")
            if len(files) == most:
                raise DataError(f"{place} has more than the {most} images of CIFAR-10.")
            files[part, label, file] = read()
    except BROKEN as error:
        raise unreadable(place, error) from error
    return Found(dict(sorted(files.items())), ignored)


def _check_member(place: Path, name: str, label: str, file: str, size: int) -> None:
    if label not in CLASSES:
        raise DataError(
            f"{place}: {name} is of the class {label!r}, which CIFAR-10 does not have; its "
            f"classes are {', '.join(CLASSES)}."
        )
    if not file.lower().endswith((".jpg", ".jpeg", ".png")):
        raise DataError(f"{place}: {name} is no .jpg or .png file; remove it.")
    if size > LARGEST:
        raise DataError(
            f"{place}: {name} has {size} bytes, too many for an image of 32 x 32 pixels."
        )


def _complete(place: Path, found: Found, limit: int | None) -> dict[tuple[str, str, str], bytes]:
    """All files, or the first of each class, if there are as many as there must be."""
    chosen = {}
    for part, count in COUNTS.items():
        for label in CLASSES:
            names = [key for key in found.files if key[:2] == (part, label)]
            if len(names) != count:
                hint = f" ({found.ignored} links or unsafe names ignored)" if found.ignored else ""
                raise DataError(
                    f"{place} has {len(names)} images in {part}/{label}{hint}, but CIFAR-10 has "
                    f"{count}; get the complete set."
                )
            chosen |= {key: found.files[key] for key in islice(names, limit)}
    return chosen


def _decode(
    place: Path, files: dict[tuple[str, str, str], bytes], progress: bool
) -> tuple[str, bool, dict[str, Tensor]]:
    """What to call the set, whether it is lossy, and its tensors."""
    pil = require("PIL.Image", extra="images")
    sizes = {part: sum(key[0] == part for key in files) for part in COUNTS}
    images = {part: np.empty((size, *SHAPE), np.uint8) for part, size in sizes.items()}
    labels = {part: np.empty(size, np.int64) for part, size in sizes.items()}
    done, qualities, line = dict.fromkeys(COUNTS, 0), set(), ProgressLine(progress)
    try:
        for number, (key, content) in enumerate(files.items()):
            part, label, _ = key
            pixels, quality = _pixels(pil, f"{place}: {'/'.join(key)}", content)
            images[part][done[part]] = pixels
            labels[part][done[part]] = CLASSES.index(label)
            done[part] += 1
            qualities.add(quality)
            line.show(f"decoding {place.name}: {number + 1} of {len(files)} images")
    finally:
        line.close()
    tensors = {}
    for part in COUNTS:
        tensors[f"images_{part}"] = torch.from_numpy(images[part])
        tensors[f"t_{part}"] = torch.from_numpy(labels[part])
    if qualities == {None}:
        return "CIFAR-10 (PNG)", False, tensors
    # A set of several qualities, or of tables that are not the usual ones, has no one quality.
    quality = qualities.pop() if len(qualities) == 1 else 0
    return f"CIFAR-10 (JPEG q{quality})" if quality else "CIFAR-10 (JPEG)", True, tensors


def _pixels(pil: Any, where: str, content: bytes) -> tuple[np.ndarray, int | None]:
    """The pixels (3, 32, 32) of an image file, and its quality if it is a JPEG."""
    try:
        with pil.open(io.BytesIO(content), formats=("JPEG", "PNG")) as image:
            # Before any pixel is decoded: a small file can announce a huge image.
            if image.size != SHAPE[1:] or image.mode != "RGB":
                raise DataError(
                    f"{where} is {image.width} x {image.height} pixels in mode {image.mode}, but "
                    "CIFAR-10 has 32 x 32 in RGB."
                )
            tables = getattr(image, "quantization", None)
            pixels = np.asarray(image).transpose(2, 0, 1)
    except HDNNError:
        raise
    except Exception as error:  # Pillow raises nearly anything for a damaged file
        raise DataError(f"{where} cannot be decoded as an image ({error}).") from error
    return pixels, None if tables is None else _qualities().get(tuple(sorted(tables[0])), 0)


@functools.cache
def _qualities() -> dict[tuple[int, ...], int]:
    """The quality, 1 to 100, by the sorted table for brightness that libjpeg writes for it.

    That is the table K.1 of ISO/IEC 10918-1, scaled.
    """
    base = (
        "16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 "
        "14 17 22 29 51 87 80 62 18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 "
        "49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"
    )
    found = {}
    for quality in range(1, 101):
        scale = 5000 // quality if quality < 50 else 200 - 2 * quality
        scaled = ((int(entry) * scale + 50) // 100 for entry in base.split())
        found[tuple(sorted(min(max(entry, 1), 255) for entry in scaled))] = quality
    return found


# The cache of decoded pixels.


def _cache_folder() -> Path:
    return Path(os.environ.get("HDNN_CACHE") or Path("~/.cache/hdnn").expanduser())


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise unreadable(path, error) from error


def _files_sha256(found: Found) -> str:
    digest = hashlib.sha256()
    for key, content in found.files.items():
        digest.update(f"{'/'.join(key)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _to_cache(path: Path, key: str, data: ImageData, tensors: dict[str, Tensor]) -> None:
    about = {"format": FORMAT, "source": key}
    about |= {"name": data.name, "lossy": data.lossy, "remark": data.remark}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, tensorfile.packed(tensors, "hdnn", about))
    except (OSError, CheckpointError) as error:
        reason = f"{error}".rstrip(".")
        warnings.warn(
            f"the decoded images are not kept for the next time: {reason}; set HDNN_CACHE to a "
            "folder that can be written to.",
            stacklevel=2,
        )


def _from_cache(path: Path, key: str) -> ImageData | None:
    """The set as it was decoded before; None, to decode it again, if anything is wrong with it."""
    if not path.is_file():
        return None
    try:
        with tensorfile.opened(path) as file:
            about = file.about("hdnn")
            if (about["format"], about["source"]) != (FORMAT, key):
                return None
            tensors = file.load(about)
        return image_data(about["name"], tensors, lossy=about["lossy"], remark=about["remark"])
    except (HDNNError, KeyError, TypeError, ValueError):
        return None
