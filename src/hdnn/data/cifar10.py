"""CIFAR-10 from its binary distribution, or from a folder or tar of JPEG or PNG images.

The binary files are the original pixels. What was decoded from images is named after its source,
and kept decoded in a cache. Nothing is unpacked to disk, and nothing pickled is ever opened.
"""

from __future__ import annotations

import functools
import hashlib
import io
import lzma
import os
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn.base import tensorfile
from hdnn.base.files import write_atomically
from hdnn.base.progress import ProgressLine
from hdnn.data.images import ImageData, check_sha256, data_folder, missing, unreadable
from hdnn.errors import CheckpointError, DataError, HDNNError, choose, positive_int, require

__all__ = ["find", "load"]

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
LARGEST = 2**16  # bytes of one image file; the larger ones are not of 32 x 32 pixels
FORMAT = 1  # of the cache
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError)

Key = tuple[str, str, str]  # part, class and name of an image file
Member = tuple[str, int, Callable[..., bytes] | None]  # name, size, contents; None for a link


def load(
    folder: str | os.PathLike[str] | None = None,
    source: str = "auto",
    *,
    limit: int | None = None,
    progress: bool = True,
) -> ImageData:
    """CIFAR-10, 50,000 images to train on and 10,000 to test with, of 3 x 32 x 32 pixels.

    The set is read from its binary distribution, or else from images, in a folder or an archive.
    Nothing is unpacked to disk; images are decoded once, and kept in the folder that the
    environment variable HDNN_CACHE names, or else in `~/.cache/hdnn`. To fetch the set, run
    `python -m hdnn.data.download cifar10 --to data`.

    Args:
        folder: where the set is, or an archive of it; by default the folder that the environment
            variable HDNN_DATA names, or else `data`.
        source: "binary", "images", or "auto" for what is found first.
        limit: take only so many images of each class, the first ones.
        progress: show how far decoding has come, on a terminal.

    Returns:
        The set, with its pixels in bytes. If they were decoded from JPEG images, its name says so.

    Raises:
        DataError: if the set is missing, incomplete, damaged or another one.
        OptionError: if `source` is not known.
        ShapeError: if `limit` is no whole number >= 1.
        MissingExtraError: if there are images, but no Pillow to decode them.

    Examples:
        >>> import hdnn
        >>> hdnn.data.cifar10.load("empty")
        Traceback (most recent call last):
        hdnn.errors.DataError: CIFAR-10 is not there: found no cifar-10-binary.tar.gz, ...
    """
    if limit is not None:
        limit = positive_int("limit", limit)
    place, binary = find(folder, source)
    return _load_binary(place, limit) if binary else _load_images(place, limit, progress)


def find(folder: str | os.PathLike[str] | None = None, source: str = "auto") -> tuple[Path, bool]:
    """Where the set is, and whether that is its binary distribution.

    Args:
        folder: as for `load`.
        source: as for `load`.

    Returns:
        The path of a folder or an archive, and True for the binary distribution, False for images.

    Raises:
        DataError: if the set is missing.
        OptionError: if `source` is not known.

    Examples:
        >>> from pathlib import Path
        >>> import hdnn
        >>> Path("cifar-10-binary.tar.gz").touch()
        >>> place, binary = hdnn.data.cifar10.find(".")
        >>> place.name, binary
        ('cifar-10-binary.tar.gz', True)
    """
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
    parts = []
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
        parts.append(np.frombuffer(content, np.uint8).reshape(RECORDS, RECORD))
    tensors: dict[str, Tensor] = {}
    for part, records in (("train", np.concatenate(parts[:-1])), ("test", parts[-1])):
        rows = slice(None) if limit is None else _first(records[:, 0], limit)
        images, labels = records[rows, 1:], records[rows, 0]
        tensors[f"images_{part}"] = torch.from_numpy(images.reshape(-1, *SHAPE).copy())
        tensors[f"t_{part}"] = torch.from_numpy(labels.astype(np.int64))
    return _image_data("CIFAR-10", tensors, remark=f"the original pixels, from {place.name}")


def _read_folder(folder: Path) -> dict[str, bytes]:
    """What is in those files that are there: at most a byte more than there should be."""
    contents = {}
    for path in (folder / name for name in FILES):
        if path.is_file():
            try:
                with path.open("rb") as file:
                    contents[path.name] = file.read(RECORDS * RECORD + 1)
            except OSError as error:
                raise unreadable(path, error) from error
    return contents


def _read_archive(path: Path) -> dict[str, bytes]:
    members = ((PurePosixPath(name).name, read) for name, _, read in _tar_files(path))
    try:
        return {
            name: read(RECORDS * RECORD + 1) for name, read in members if read and name in FILES
        }
    except BROKEN as error:
        raise unreadable(path, error) from error


def _first(labels: np.ndarray, limit: int) -> np.ndarray:
    """The rows of the first `limit` images of each class."""
    rows = [np.flatnonzero(labels == label)[:limit] for label in range(len(CLASSES))]
    return np.sort(np.concatenate(rows))


def _image_data(name: str, tensors: dict[str, Tensor], **remarks: Any) -> ImageData:
    return ImageData(name=name, **tensors, classes=CLASSES, mean=MEAN, std=STD, **remarks)


# Folders and archives of images.


class Found(NamedTuple):
    """The image files by part, class and name, sorted; and how many members were passed over."""

    files: dict[Key, bytes]
    ignored: int


def _load_images(place: Path, limit: int | None, progress: bool) -> ImageData:
    """The set from a folder or an archive of images, or the first `limit` images of each class."""
    # The hash of an archive alone is enough to find its pixels in the cache.
    found = _collect(place, _folder_files(place)) if place.is_dir() else None
    key = _sha256(place, found)
    folder = Path(os.environ.get("HDNN_CACHE") or Path("~/.cache/hdnn").expanduser())
    cache = folder / f"cifar10-{key}.safetensors"
    if limit is None and (data := _from_cache(cache, key)):
        return data
    chosen = _complete(place, found or _collect(place, _tar_files(place)), limit)
    data = _decode(place, chosen, progress)
    if limit is None:
        _to_cache(cache, key, data)
    return data


def _folder_files(folder: Path) -> Iterator[Member]:
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


def _tar_files(path: Path) -> Iterator[Member]:
    """The members of an archive, read as a stream."""
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            if member.isfile():
                file = archive.extractfile(member)
                yield member.name, member.size, file.read if file else None
            elif not member.isdir():
                yield member.name, 0, None


def _collect(place: Path, members: Iterable[Member]) -> Found:
    """The image files among the members of a set, by part, class and name."""
    files: dict[Key, bytes] = {}
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
            _check_member(f"{place}: {name}", label, file, size)
            if (part, label, file) in files:
                raise DataError(f"{place}: {name} is there twice; make the archive again.")
            if len(files) == most:
                raise DataError(f"{place} has more than the {most} images of CIFAR-10.")
            files[part, label, file] = read()
    except BROKEN as error:
        raise unreadable(place, error) from error
    return Found(dict(sorted(files.items())), ignored)


def _check_member(where: str, label: str, file: str, size: int) -> None:
    if label not in CLASSES:
        raise DataError(
            f"{where} is of the class {label!r}, which CIFAR-10 does not have; its "
            f"classes are {', '.join(CLASSES)}."
        )
    if not file.lower().endswith((".jpg", ".jpeg", ".png")):
        raise DataError(f"{where} is no .jpg or .png file; remove it.")
    if size > LARGEST:
        raise DataError(f"{where} has {size} bytes, too many for an image of 32 x 32 pixels.")


def _complete(place: Path, found: Found, limit: int | None) -> dict[Key, bytes]:
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


def _decode(place: Path, files: dict[Key, bytes], progress: bool) -> ImageData:
    """The set of these files, named after what they are."""
    pil = require("PIL.Image", extra="images")
    images: dict[str, list[np.ndarray]] = {part: [] for part in COUNTS}
    labels: dict[str, list[int]] = {part: [] for part in COUNTS}
    qualities, line = set(), ProgressLine(progress)
    try:
        for number, (key, content) in enumerate(files.items(), 1):
            part, label, _ = key
            pixels, quality = _pixels(pil, f"{place}: {'/'.join(key)}", content)
            images[part].append(pixels)
            labels[part].append(CLASSES.index(label))
            qualities.add(quality)
            line.show(f"decoding {place.name}: {number} of {len(files)} images")
    finally:
        line.close()
    tensors = {f"images_{part}": torch.from_numpy(np.stack(some)) for part, some in images.items()}
    tensors |= {f"t_{part}": torch.tensor(some) for part, some in labels.items()}
    if qualities == {None}:
        remark = "decoded from PNG images; not compared with the original pixels"
        return _image_data("CIFAR-10 (PNG)", tensors, remark=remark)
    # A set of several qualities, or of tables that are not the usual ones, has no one quality.
    quality = qualities.pop() if len(qualities) == 1 else 0
    name = f"CIFAR-10 (JPEG q{quality})" if quality else "CIFAR-10 (JPEG)"
    remark = "the pixels are not the original ones: report results under this name"
    return _image_data(name, tensors, lossy=True, remark=f"decoded from JPEG images; {remark}")


def _pixels(pil: Any, where: str, content: bytes) -> tuple[np.ndarray, int | None]:
    """The pixels (3, 32, 32) of an image file, and its quality if it is a JPEG: 0 if unknown."""
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
    return pixels, None if tables is None else _qualities().get(tuple(tables[0]), 0)


@functools.cache
def _qualities() -> dict[tuple[int, ...], int]:
    """The quality, 1 to 100, by the table for brightness that libjpeg writes for it."""
    pil = require("PIL.Image", extra="images")
    found = {}
    for quality in range(1, 101):
        pil.new("RGB", (8, 8)).save(file := io.BytesIO(), "JPEG", quality=quality)
        found[tuple(pil.open(file).quantization[0])] = quality
    return found


# The cache of decoded pixels.


def _sha256(place: Path, found: Found | None) -> str:
    """Of an archive, or of the names and contents of the image files that were found."""
    if found is None:
        try:
            with place.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(place, error) from error
    digest = hashlib.sha256()
    for key, content in found.files.items():
        digest.update(f"{'/'.join(key)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _to_cache(path: Path, key: str, data: ImageData) -> None:
    tensors = {name: value for name, value in vars(data).items() if isinstance(value, Tensor)}
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
        return _image_data(about["name"], tensors, lossy=about["lossy"], remark=about["remark"])
    except (HDNNError, KeyError, TypeError, ValueError):
        return None
