"""Downloads of MNIST and CIFAR-10 from public mirrors, checked by SHA-256.

python -c "import hdnn; hdnn.data.download('mnist', 'data')"
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hdnn.errors import DataError, choose

MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# SHA-256 by address. Mirrors may compress MNIST again: `load_mnist` checks the contents instead.
FILES: dict[str, dict[str, str | None]] = {
    "mnist": {
        f"{MNIST}train-images-idx3-ubyte.gz": None,
        f"{MNIST}train-labels-idx1-ubyte.gz": None,
        f"{MNIST}t10k-images-idx3-ubyte.gz": None,
        f"{MNIST}t10k-labels-idx1-ubyte.gz": None,
    },
    "cifar10": {
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": (
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
        ),
    },
}


def download(name: str, folder: str | os.PathLike[str] | None = None) -> Path:
    """Download "mnist" or "cifar10", except files that are already there.

    Args:
        name: the name of the set.
        folder: the folder for the files; by default the folder in the environment variable
            HDNN_DATA, or `data`.

    Returns:
        The folder with the files.

    Raises:
        DataError: if a file cannot be downloaded, or differs from the public file.
    """
    place = data_folder(folder)
    if choose("data set", name, FILES) == "mnist":
        place = place / "mnist"
    place.mkdir(parents=True, exist_ok=True)
    for url, sha256 in FILES[name].items():
        path = place / url.rpartition("/")[2]
        if path.exists():
            continue
        try:
            torch.hub.download_url_to_file(url, str(path), hash_prefix=sha256)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"cannot download {url} ({error}); try again later."
            ) from error
    return place


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The given folder, or the folder in the environment variable HDNN_DATA, or `data`."""
    return Path(
        os.environ.get("HDNN_DATA") or "data" if folder is None else folder
    )
