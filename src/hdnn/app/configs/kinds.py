"""The kind of training that options ask for, and the configs in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hdnn.app.configs.common import IMAGE_SETS, is_table
from hdnn.app.configs.flags import RunOptions
from hdnn.app.configs.images import ImageConfig
from hdnn.app.configs.table import TableConfig, before_penalties
from hdnn.base.config import read_toml, types_of
from hdnn.base.files import read_json
from hdnn.distributed.training.run import Config as GraphConfig
from hdnn.errors import CheckpointError, quoted

AnyConfig = TableConfig | ImageConfig | GraphConfig

TYPES = {**types_of(TableConfig, ImageConfig, RunOptions), "kind": str}
MOST = 2**32  # bytes of a config.json, which has all links of its graph


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The options in the [train] table of a TOML file, by their names with _ for -."""
    return read_toml(Path(path), "train", TYPES)


def config_of(options: dict[str, Any]) -> TableConfig | ImageConfig:
    """The config that options ask for: that of images if the data are images."""
    kind = ImageConfig if options.get("data") in IMAGE_SETS else TableConfig
    return kind.of(options)


def read_run(path: Path) -> dict[str, Any]:
    """The options in the config of a run, with its kind, which must be that of its data.

    Runs from before kinds were written are recognised here, and nowhere else.
    """
    if path.suffix == ".json":
        options, kind = read_json(path, MOST), GraphConfig.kind
        if not isinstance(options, dict):
            raise CheckpointError(f"{path} is damaged or was edited: it holds no entries by name.")
    else:
        options = read_config(path)
        kind = ImageConfig.kind if options.get("data") in IMAGE_SETS else TableConfig.kind
        if is_table(options.get("data")):
            options.setdefault("validation", 0.0)  # before there was one
            if "drop" in options:  # the target could be among them, and nothing came of it
                options["drop"] = [one for one in options["drop"] if one != options.get("target")]
            options.setdefault("scaling", "deviation")  # the only one then
            if before_penalties(options):
                options["penalties"] = "mean"
    if options.setdefault("kind", kind) != kind:
        raise CheckpointError(
            f"{path} was edited: kind must be {kind!r} for such a training, not "
            f"{quoted(options['kind'])}."
        )
    return options
