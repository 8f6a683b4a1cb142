"""`python -m hdnn.data.download mnist|cifar10`: from the public mirrors, resumed and verified.

A file has its name only after its SHA-256 was checked; until then it ends in `.part`.
`torch.hub.download_url_to_file` is not used: when a connection breaks off, it reports a wrong
checksum and starts from the first byte again, and it waits for a dead server without end.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import http.client
import os
import sys
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from hdnn.base.files import reason_of
from hdnn.base.progress import ProgressLine
from hdnn.data import mnist
from hdnn.data.cifar10 import ARCHIVE
from hdnn.data.images import data_folder
from hdnn.errors import DataError, HDNNError, choose


class Remote(NamedTuple):
    """A public file: where to put it, its size about, its SHA-256, and the mirrors' addresses."""

    path: str
    size: int
    sha256: str  # of the decompressed bytes, if `unpacked`
    unpacked: bool
    mirrors: tuple[str, ...]


MNIST = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
CIFAR10 = (
    "https://www.cs.toronto.edu/~kriz/",
    "https://cave.cs.toronto.edu/kriz/",
    "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
)

SETS = {
    # Mirrors may compress the file again, so the decompressed bytes are checked.
    "mnist": tuple(
        Remote(f"mnist/{file.name}.gz", size, file.sha256, True, MNIST)
        for file, size in zip(mnist.FILES, (9912422, 28881, 1648877, 4542), strict=True)
    ),
    # The one public archive, by its own hash (its MD5 is c32a1d4ab5d03f1284b67883e8d87530); the
    # files in it are checked one by one whenever they are loaded.
    "cifar10": (
        Remote(
            ARCHIVE,
            170052171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            False,
            CIFAR10,
        ),
    ),
}

CHUNK = 2**16
SCHEMES = ("https",)
TIMEOUT = 30.0  # seconds without a byte
TRIES = 3  # tries of a mirror, as long as each makes progress
PAUSE = 1.0  # seconds between two of them


class _FailedError(Exception):
    """A transfer that did not end well; the next try or mirror may."""


class _HTTPSOnly(urllib.request.HTTPRedirectHandler):
    """Follows a mirror to another address only where that is encrypted as well."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str):
        _check_scheme(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(
    name: str, to: str | os.PathLike[str] | None = None, *, progress: bool = True
) -> list[Path]:
    """Bring a set into the folder `to`, by default that of HDNN_DATA; what is there stays."""
    files = SETS[choose("data set", name, SETS)]
    folder = data_folder(to)
    return [fetch(file, folder, progress=progress) for file in files]


def fetch(file: Remote, folder: Path, *, progress: bool = True) -> Path:
    """One file, verified: the one that is there, or from the first mirror that has it."""
    target = folder / file.path
    part = target.with_name(f"{target.name}.part")
    problems = []
    try:
        if target.is_file() and _is_right(target, file):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        for url in (mirror + target.name for mirror in file.mirrors):
            try:
                _from_mirror(url, part, file, progress)
                return part.replace(target)
            except _FailedError as error:
                problems.append(f"{url}: {error}")
    except OSError as error:  # of the disk: those of the network are caught further inside
        raise DataError(
            f"cannot write {part}: {error.strerror or error}; make room or choose another folder "
            "with --to. The next download continues from here."
        ) from error
    raise DataError(
        f"could not download {target.name} to {target.parent} ({'; '.join(problems)}); check the "
        "connection and try again, or copy the file there by hand."
    )


def _from_mirror(url: str, part: Path, file: Remote, progress: bool) -> None:
    """Bring `part` to its end and check it; a part that is wrong is removed."""
    for attempt in range(1, TRIES + 1):
        before = _size(part)
        try:
            _transfer(url, part, 2 * file.size, progress)
        except _FailedError:
            if attempt == TRIES or _size(part) <= before:
                raise
            time.sleep(PAUSE)
            continue
        if _is_right(part, file):
            return
        part.unlink()
        if not before:
            break
        # Perhaps only its beginning was wrong, from an older download: try once more, in full.
    raise _FailedError("the file has another SHA-256 than the public one")


def _transfer(url: str, part: Path, limit: int, progress: bool) -> None:
    """Append to `part` what is still missing, or load all of it if the server cannot resume."""
    _check_scheme(url)
    start = _size(part)
    request = urllib.request.Request(url, headers={"User-Agent": "hdnn"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.build_opener(_HTTPSOnly).open(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and start:  # no bytes are left: the file is complete, or wrong
            return
        raise _FailedError(f"the server says {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _failed(error) from error
    with response, closing(ProgressLine(progress)) as line:
        if response.status != 206:
            start = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise _FailedError("the server sent another range than it was asked for")
        length = response.headers.get("Content-Length", "")
        total = start + int(length) if length.isdecimal() else None
        done, since = start, time.monotonic()
        with part.open("ab" if start else "wb") as file:
            while chunk := _read(response):
                done += len(chunk)
                if done > limit:
                    return  # an endless answer: its beginning will fail the hash
                file.write(chunk)
                speed = (done - start) / (time.monotonic() - since)
                line.show(_bar(part.stem, done, total, speed))
            file.flush()
            os.fsync(file.fileno())
    if total is not None and done != total:  # a connection that breaks off looks like an end
        raise _FailedError(f"the connection broke off after {done} of {total} bytes")


def _read(response: Any) -> bytes:
    try:
        return response.read(CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _failed(error) from error


def _failed(error: Exception) -> _FailedError:
    return _FailedError(reason_of(getattr(error, "reason", error), 120))


def _bar(name: str, done: int, total: int | None, speed: float) -> str:
    rate = f"{done / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s"
    if not total:
        return f"{name}: {rate}"
    share = min(done / total, 1.0)
    return f"{name} [{'#' * int(20 * share):<20}] {share:4.0%} of {total / 1e6:.1f} MB, {rate}"


def _is_right(path: Path, file: Remote) -> bool:
    """Whether the file, or what is compressed in it, has the SHA-256 of the public one."""
    digest, most = hashlib.sha256(), 200 * file.size  # MNIST shrinks to no less than a tenth
    try:
        with gzip.open(path) if file.unpacked else path.open("rb") as content:
            while chunk := content.read(CHUNK):
                digest.update(chunk)
                most -= len(chunk)
                if most < 0:
                    return False
    except (gzip.BadGzipFile, EOFError, zlib.error):
        return False
    return digest.hexdigest() == file.sha256


def _check_scheme(url: str) -> None:
    if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
        raise _FailedError(f"{url} is not an https address")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it worked, 2 if it could not, 130 if it was interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m hdnn.data.download",
        description="Download a data set from its public mirrors and verify it.",
    )
    parser.add_argument("name", choices=sorted(SETS), help="the data set")
    parser.add_argument("--to", metavar="FOLDER", help="default: HDNN_DATA, else data")
    options = parser.parse_args(arguments)
    try:
        for path in download(options.name, options.to):
            sys.stdout.write(f"{path}\n")
    except HDNNError as error:
        sys.stderr.write(f"hdnn: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("hdnn: interrupted; the same command continues from here.\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
