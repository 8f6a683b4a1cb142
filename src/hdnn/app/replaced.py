"""`--overwrite`: what a run has written is removed for a new one, and nothing else ever is.

A folder with a file that no run writes is refused, and so is one in which a training goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdnn.app.runs import Run
from hdnn.errors import CheckpointError, HDNNError, OptionError
from hdnn.training.checkpoint import locked

# What a run writes, by its path in the folder. Names of pictures are also taken from the metrics.
FILES = re.compile(
    r"config\.(toml|json)|(columns|metrics)\.json|model\.safetensors"
    r"|(level-\d+/)?(log\.jsonl|checkpoint\.safetensors)"
    r"|(decision_regions|training|bsm_norms)\.png"
    r"|tensorboard/(.+/)?events\.out\.tfevents\.[^/]+"
    r"|nodes/node-[^/]+/step-\d{10}\.safetensors"
    r"|data/((columns|classes|nodes)\.json|graph\.toml)"
    r"|data/(train|test)/(node-[^/]+|labels)\.safetensors"
    r"|(.+/)?\.[^/]+\.tmp|\.data\.tmp/.+"
)
FOLDERS = re.compile(
    r"level-\d+|tensorboard(/.+)?|nodes(/node-[^/]+)?|data(/train|/test)?|\.data\.tmp(/.+)?"
)


def check_options(overwrite: Any, resume: Any) -> None:
    """Refuse to go on with a run and to replace it at the same time."""
    if overwrite and resume:
        raise OptionError(
            "--resume goes on with a run, and --overwrite replaces it; give one of them."
        )


def check(run: Run) -> None:
    """Refuse a folder whose content may not be replaced; one without a run must be free."""
    if not run.exists:
        run.check_free()
        return
    _files(run)
    with locked(run.folder):  # raises where a training goes on
        pass


def clear(run: Run) -> None:
    """Remove the run in a folder that this process has locked."""
    if not run.exists:
        run.check_free()
        return
    for path in _files(run):
        path.unlink(missing_ok=True)
    for place, _, _ in os.walk(run.folder, topdown=False):
        if Path(place) != run.folder:
            with suppress(OSError):  # not empty any more
                os.rmdir(place)


def remove(run: Run) -> None:
    """Remove a run and its folder; of a link to a folder only the link."""
    if run.folder.is_symlink():
        run.folder.unlink()
        return
    with locked(run.folder):
        clear(run)
    run.folder.rmdir()


def others(group: Run, chosen: Collection[Run]) -> list[Run]:
    """The runs of a folder of seeds that are not chosen again, all of which may be removed."""
    found = [run for run in group.members if run not in chosen]
    for run in found:
        check(run)
    return found


def _files(run: Run) -> list[Path]:
    """All files of a run; an error if there is anything else. The config is the last of them."""
    try:
        run.config()
    except HDNNError as error:
        raise CheckpointError(
            f"--overwrite replaces runs only, but {error} Remove {run.folder} yourself, or name "
            "another folder with --out."
        ) from error
    pictures: set[str] = set()
    with suppress(HDNNError, OSError):
        drawn = run.metrics().get("pictures", {})
        pictures = {Path(one).name for one in drawn.values() if one.endswith(".png")}
    found = []
    for path in _below(run.folder):
        inside = path.relative_to(run.folder).as_posix()
        is_link = path.is_dir() and path.is_symlink()
        own = FOLDERS if path.is_dir() else FILES
        if is_link or not (own.fullmatch(inside) or inside in pictures):
            raise CheckpointError(
                f"{run.folder} holds {inside}, which is not of a run, so --overwrite leaves all of "
                "it alone; move that away, or name another folder with --out."
            )
        if not path.is_dir():
            found.append(path)
    return sorted(found, key=lambda path: path == run.config_file)


def _below(folder: Path) -> Iterator[Path]:
    """All that is in a folder and in the folders below it; nobody looks into links."""
    for place, folders, files in os.walk(folder):
        yield from (Path(place) / name for name in (*folders, *files))
