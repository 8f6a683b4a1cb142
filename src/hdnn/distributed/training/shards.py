"""Shards: each node keeps its weights and its optimiser's state in files of its own.

A shard is a safetensors file for one node and one step, written whole or not at all, with a
checksum. After a fault all parts go on from the newest step that every node still has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hdnn.base import tensorfile
from hdnn.base.files import remove_leftovers, write_atomically
from hdnn.errors import CheckpointError

KEPT = 3  # newest shards of each node
FORMAT = 1


def make_folder(folder: Path) -> None:
    """Make a folder, or clear what a kill has left in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror}.") from error


class StrangeError(CheckpointError):
    """A shard that is whole, but of another training."""


class Shards:
    """The shards of some nodes in a folder; `training` says what they are shards of.

    `key` is what the folder of a node is called by.
    """

    def __init__(
        self,
        folder: Path,
        nodes: tuple[int, ...],
        training: str,
        key: Callable[[int], str] = "{:05d}".format,
    ) -> None:
        self.folder, self.nodes, self.training, self.key = folder, nodes, training, key

    def _home(self, node: int) -> Path:
        return self.folder / f"node-{self.key(node)}"

    def _file(self, node: int, step: int) -> Path:
        return self._home(node) / f"step-{step:010d}.safetensors"

    def prepare(self) -> None:
        """Make the folders, and clear what a kill has left in them."""
        for node in self.nodes:
            make_folder(self._home(node))

    def save(self, node: int, step: int, tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        """Write one shard, then delete old ones, and later ones left from before a resume."""
        about = {"format": FORMAT, "node": node, "step": step, "training": self.training}
        about["note"] = note
        write_atomically(self._file(node, step), tensorfile.packed(tensors, "hdnn", about))
        past = [old for old in self._steps(node) if old <= step]
        for other in self._steps(node):
            if other not in past[-KEPT:]:
                self._file(node, other).unlink(missing_ok=True)

    def _steps(self, node: int) -> list[int]:
        files = self._home(node).glob("step-*.safetensors")
        names = (re.fullmatch(r"step-(\d{10})\.safetensors", file.name) for file in files)
        return sorted(int(match[1]) for match in names if match)

    def load(
        self, node: int, step: int, data: str | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of a shard, and the note that went with them; `data` are the node's own."""
        path = self._file(node, step)
        with tensorfile.opened(path) as file:
            try:
                about = file.about("hdnn")
                same = (about["format"], about["node"], about["step"]) == (FORMAT, node, step)
                note, training = about["note"], about["training"]
                if not (isinstance(note, dict) and isinstance(about[tensorfile.SUM], str)):
                    raise TypeError("its note or checksum")
            except (KeyError, ValueError, TypeError) as error:
                raise CheckpointError(f"{path} is no shard of hdnn.") from error
            tensors = file.load(about)
        if not same:
            raise CheckpointError(f"{path} is damaged: it is of another node or step.")
        if training != self.training:
            raise StrangeError(
                f"{path} belongs to a training with other options, data or graph; choose another "
                "folder, or the same options."
            )
        if data is not None and note.get("data", data) != data:  # which earlier versions lack
            label = node if self.key(node).isdecimal() else self.key(node)
            raise StrangeError(
                f"{path} belongs to a training with other data of node {label}; choose another "
                "folder, or the same data."
            )
        return tensors, note

    def newest(self, below: float = math.inf) -> int:
        """The newest step of which all nodes have a whole shard, -1 if there is none."""
        kept = [set(self._steps(node)) for node in self.nodes]
        common = set.intersection(*kept) if kept else set()
        steps = sorted((step for step in common if step < below), reverse=True)
        return next((step for step in steps if self._whole(step)), -1)

    def _whole(self, step: int) -> bool:
        try:
            for node in self.nodes:
                self.load(node, step)
        except StrangeError:
            raise
        except CheckpointError:
            return False
        return True
