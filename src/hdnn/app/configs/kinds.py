"""The kind of training that options ask for, and config files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hdnn.app.configs.common import IMAGE_SETS
from hdnn.app.configs.flags import RunOptions
from hdnn.app.configs.images import ImageConfig
from hdnn.app.configs.table import TableConfig
from hdnn.base.config import read_toml, types_of

TYPES = {**types_of(TableConfig, ImageConfig, RunOptions), "kind": "str"}


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in the [train] table of a TOML file, by their names with _ for -."""
    return read_toml(Path(path), "train", TYPES)


def config_of(options: dict[str, Any]) -> TableConfig | ImageConfig:
    """The config that options ask for; old files name no kind, but their data tell it."""
    kind = ImageConfig if options.get("data") in IMAGE_SETS else TableConfig
    return kind.of(options)
