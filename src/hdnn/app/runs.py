"""Runs: a folder for each, with the config from the start and the results at the end.

config.toml holds the options, metrics.json the results, and model.safetensors the model with its
columns. During training, its state is in the folder `training`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdnn import io
from hdnn.app.config import Config, config_for, read_options, write_options
from hdnn.errors import CheckpointError, HDNNError, OptionError

FILES = re.compile(
    r"config\.toml|metrics\.json|model\.safetensors|\w+\.png|\..+\.tmp"
)
FOLDERS = ("training",)


class Run:
    """The folder of one run."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.config_file = self.folder / "config.toml"
        self.metrics_file = self.folder / "metrics.json"
        self.model_file = self.folder / "model.safetensors"
        self.training_folder = self.folder / "training"

    @property
    def exists(self) -> bool:
        """True if a run was started here."""
        return self.config_file.is_file()

    @property
    def complete(self) -> bool:
        """True if the run has ended."""
        return self.metrics_file.is_file()

    def options(self) -> dict[str, Any]:
        """All options of the run."""
        return read_options(self.config_file)

    def config(self, values: Mapping[str, Any] | None = None) -> Config:
        """The config of the run, with these options."""
        if not self.exists:
            raise CheckpointError(
                f"there is no run in {self.folder} to resume."
            )
        options = self.options()
        for name, value in (values or {}).items():
            if name == "data" and os.path.exists(value):
                value = os.path.abspath(value)
            if value != options.get(name):
                raise OptionError(
                    f"{self.folder} was started with {name} = {options.get(name)}, not {value}; "
                    "resume it with the same options, or choose another folder with --out."
                )
        return config_for(options)

    def metrics(self) -> dict[str, Any]:
        """The results, with the present folder."""
        metrics = io.read_json(self.metrics_file)
        if not isinstance(metrics, dict):
            raise CheckpointError(
                f"{self.metrics_file} is damaged: it is not a JSON object."
            )
        return {**metrics, "run": str(self.folder)}

    def model(self) -> Any:
        """The trained model."""
        self.check_complete()
        return io.load(self.model_file)

    def columns(self) -> Any:
        """The encoder of rows as inputs, and the target that turns outputs into answers."""
        from hdnn.data.tables import Encoder, Target

        note = io.load_tensors(self.model_file)[1].get("note")
        if (
            not isinstance(note, dict)
            or not {"inputs", "target"} <= note.keys()
        ):
            raise CheckpointError(
                f"{self.model_file} does not name the columns that it needs."
            )
        return Encoder(**note["inputs"]), Target(**note["target"])

    def check_complete(self) -> None:
        """Refuse a folder without a run that has ended."""
        if not self.complete:
            hint = (
                self.how_to_resume if self.exists else "start with hdnn train."
            )
            raise CheckpointError(
                f"{self.folder} holds no finished run; {hint}"
            )

    def check_free(self) -> None:
        """Refuse a folder that is not empty."""
        if self.folder.is_file() or (
            self.folder.is_dir() and any(self.folder.iterdir())
        ):
            raise CheckpointError(
                f"{self.folder} is not empty; continue the run in it (--resume), replace it "
                "(--overwrite), or choose another folder with --out."
            )

    def clear(self) -> None:
        """Remove the run, unless its folder contains other files."""
        entries = list(self.folder.iterdir()) if self.folder.is_dir() else []
        for path in entries:
            own = (
                path.name in FOLDERS
                if path.is_dir()
                else FILES.fullmatch(path.name)
            )
            if not own or path.is_symlink():
                raise CheckpointError(
                    f"{self.folder} holds {path.name}, which is not part of a run, so nothing was "
                    "removed; move that file away, or choose another folder with --out."
                )
        for path in entries:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    @property
    def how_to_resume(self) -> str:
        command = "launch" if "graph" in self.options() else "train"
        return f"continue it with: hdnn {command} --resume --out {shlex.quote(str(self.folder))}"

    @contextmanager
    def opened(
        self, options: Mapping[str, Any], *, resume: bool, overwrite: bool
    ) -> Iterator[None]:
        """Make and lock the folder and write the config; a failed new run leaves no files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with io.lock(self.folder):
            fresh = not (resume and self.exists)
            if overwrite:
                self.clear()
            elif fresh:
                self.check_free()
            table = "launch" if "graph" in options else "train"
            write_options(self.config_file, table, options)
            try:
                yield
            except KeyboardInterrupt as error:
                raise KeyboardInterrupt(
                    f"interrupted; {self.how_to_resume}"
                ) from error
            except HDNNError:
                if fresh:
                    self.clear()
                    self.folder.rmdir()
                raise
            shutil.rmtree(self.training_folder, ignore_errors=True)


def find_runs(folders: Sequence[str]) -> list[Run]:
    """All runs in these folders and their subfolders."""
    runs = {}
    for folder in folders:
        for path in sorted(Path(folder).rglob("config.toml")):
            runs[path.parent.resolve()] = Run(path.parent)
    if not runs:
        raise CheckpointError(
            f"there is no run in {', '.join(folders)}; start with hdnn train."
        )
    return list(runs.values())
