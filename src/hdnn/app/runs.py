"""Runs on disk: the folder that holds the config of a training and all its results.

A folder has config.toml (the kind of the run and every option, as `train --config` reads it),
columns.json (how rows of a table become inputs), log.jsonl and checkpoint.safetensors (written by
`hdnn.training.fit`; in folders level-0, level-1 .. of their own where `fit_multilevel` wrote them),
and at the end model.safetensors, the pictures and metrics.json, which is written last: it says that
a run is complete. The config of a training on a graph is a config.json, with all links of it, and
its nodes keep shards in nodes/. The runs of `--seeds` with `--out` lie in folders seed-0, seed-1 ..
of one folder, which can be asked as a whole.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hdnn.app import runfiles
from hdnn.app.configs.common import IMAGE_SETS
from hdnn.app.configs.graph import training_options
from hdnn.app.configs.kinds import MOST, AnyConfig, GraphConfig, config_of, read_run
from hdnn.app.configs.table import levels
from hdnn.app.runfolder import RunFolder
from hdnn.base.config import LARGEST, to_toml, types_of
from hdnn.base.files import finite, read_bytes, read_json, write_atomically
from hdnn.base.portable import portable
from hdnn.data import planar, table
from hdnn.distributed.graph.file import graph_of
from hdnn.distributed.graph.file import to_toml as graph_toml
from hdnn.errors import CheckpointError, DataError, HDNNError, OptionError

OWN_FOLDERS = ("nodes", "tensorboard", "data")  # of a run, in which there is no other run
_WORDS = re.compile(r"(\d+)")


@portable
@dataclass(frozen=True, init=False)
class Run(RunFolder):
    """The folder of one run of `hdnn train` or `hdnn launch`."""

    ways = "go on with it by --resume, replace it by --overwrite, or name another folder with --out"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "folder", Path(folder))

    columns_file = property(lambda self: self.folder / "columns.json")
    model_file = property(lambda self: self.folder / "model.safetensors")

    @property
    def config_file(self) -> Path:
        """The config of the run, or where it will be if there is none."""
        plain, of_graph = self.folder / "config.toml", self.folder / "config.json"
        return of_graph if of_graph.is_file() and not plain.is_file() else plain

    @property
    def kind(self) -> str | None:
        """The kind of training that the config names; None where there is no run."""
        return read_run(self.config_file)["kind"] if self.exists else None

    @property
    def of_graph(self) -> bool:
        """Whether it is a training on a graph, as far as its files say, damaged or not."""
        return self.config_file.suffix == ".json"

    @property
    def members(self) -> list[Run]:
        """The runs of a folder that `--seeds` has made, by their seeds; of other folders none."""
        if self.exists or not self.folder.is_dir():
            return []
        found = ((re.fullmatch(r"seed-(\d+)", one.name), one) for one in self.folder.iterdir())
        seeds = {int(match[1]): Run(one) for match, one in found if match}
        return [seeds[seed] for seed in sorted(seeds) if seeds[seed].exists]

    @property
    def group(self) -> Run | None:
        """The folder of `--seeds` that this run is a part of, if it is of one."""
        above = Run(self.folder.parent)
        return above if any(one.folder == self.folder for one in above.members) else None

    def start(self, config: AnyConfig, columns: table.Columns | None = None) -> None:
        """Write the config and columns of a new or resumed run; images have no columns."""
        if not self.exists:
            write_atomically(self.config_file, config.to_toml().encode())
        if columns is None:
            return
        if not self.columns_file.is_file():
            write_json(self.columns_file, columns.to_json())
        elif not self.columns().agree(columns):
            raise DataError(
                f"{config.data} has changed since the run in {self.folder} was started; start "
                "another one."
            )

    def config(self) -> AnyConfig:
        """The config that the run was started with."""
        if not self.exists:
            below = [] if self.members else [*_runs_below(self.folder)][:1]
            how = f"name one of the runs in it, such as {below[0].folder}" if below else ""
            raise CheckpointError(
                f"{self.folder} is not the folder of a run: it has no config.toml; "
                f"{how or 'make one by hdnn train'}."
            )
        options = read_run(self.config_file)
        if of_graph := options["kind"] == GraphConfig.kind:
            if "graph" not in options:
                raise CheckpointError(f"{self.config_file} is no config of a training on a graph.")
            runfiles.check(self.config_file, options, types_of(GraphConfig), needed=False)
        try:
            return GraphConfig.from_json(options) if of_graph else config_of(options)
        except (HDNNError, TypeError) as error:  # a TypeError names an option that there is not
            raise CheckpointError(f"{self.config_file} was edited: {error}") from error

    def options(self) -> dict[str, Any]:
        """All that decides the result, by name; of a graph its size and a digest of its links."""
        config = self.config()
        if not isinstance(config, GraphConfig):
            return dict(vars(config))
        found = {k: v for k, v in vars(config).items() if k not in ("graph", "options")}
        graph = graph_of(config.graph, str(self.config_file))
        links = (sum(map(len, graph.used)) - graph.nodes) // 2
        about = f"{graph.nodes} nodes, {links} links ({graph.digest()[:6]})"
        found |= {**training_options(config), "features": 2 * sum(graph.sizes), "graph": about}
        with suppress(HDNNError, OSError):  # a table that was shared out to the nodes
            shared = read_json(Path(config.data) / "nodes.json")
            if isinstance(shared, dict):
                found |= {name: str(shared[name]) for name in ("data", "target") if name in shared}
        return found

    def config_text(self) -> str:
        """The config for people: as its file has it, but of a graph without the links."""
        if self.of_graph:
            config, options = self.config(), self.options()
            assert isinstance(config, GraphConfig)
            named = {k: config.graph[k] for k in ("names", "columns") if k in config.graph}
            return to_toml({k: v for k, v in options.items() if v is not None}) + graph_toml(named)
        return read_bytes(self.config_file, LARGEST).decode("utf-8", "replace")

    def resumed(self, given: dict[str, Any]) -> AnyConfig:
        """The same config; an error if the given options ask for something else."""
        config = self.config()
        known = dict(vars(config))
        if isinstance(config, GraphConfig):
            known |= training_options(config)
        for name, new in given.items():
            if name not in known:
                config_of({"data": config.data, name: new})  # raises if there is none
            if name == "data" and new not in (*planar.SETS, *IMAGE_SETS):
                new = os.path.abspath(new)
            if name == "network":
                new = new.lower().replace("-", "_")
            if name == "multilevel":
                new = levels(new)
            if new not in (known[name], "auto"):
                what = f"{name.replace('_', '-')} = {known[name]!r}, not {new!r}"
                raise OptionError(
                    f"the run in {self.folder} has {'another graph' if name == 'graph' else what}; "
                    "resume it with the options that it was started with, or name another folder "
                    "with --out."
                )
        return config

    def columns(self) -> table.Columns:
        """How rows become inputs."""
        if self.of_graph and not self.columns_file.exists():
            if (data := self.config().data) in planar.SETS:
                return points_columns()
            raise CheckpointError(
                f"{self.folder} does not know which node has which column of a table, because it "
                f"was trained on the node files in {data}; give a folder of such files."
            )
        return runfiles.read_columns(self.columns_file)

    def metrics(self) -> dict[str, Any]:
        """The results so far, as the file has them."""
        return runfiles.read_metrics(self.metrics_file, self.kind)

    def result(self) -> dict[str, Any]:
        """The complete results; an error if the run is not complete."""
        config = self.config()
        metrics = runfiles.read_metrics(self.metrics_file, config.kind)
        runfiles.check_complete(self.metrics_file, metrics, config)
        return metrics

    def log(self) -> list[dict[str, Any]]:
        """One entry an epoch, counted on over levels; a last line that was cut off is left out."""
        return self.log_and_faults()[0]

    def log_and_faults(self) -> tuple[list[dict[str, Any]], int]:
        """The log, and how many of its lines are not valid entries."""
        if os.path.lexists(self.log_file):
            return runfiles.read_log(self.log_file)
        entries: list[dict[str, Any]] = []
        faults, files = 0, self.folder.glob(f"level-*/{self.log_file.name}")
        for file in sorted(files, key=lambda file: (len(str(file)), file)):
            before, (found, wrong) = len(entries), runfiles.read_log(file)
            entries += [{**entry, "epoch": entry["epoch"] + before} for entry in found]
            faults += wrong
        return entries, faults


def find_runs(places: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """The runs of all kinds in these folders, and in the folders below them; at least one."""
    found: dict[str, Run] = {}
    for place in places:
        folder = Path(place)
        if not folder.is_dir():
            raise CheckpointError(f"there is no folder {folder}; name one that holds runs.")
        for run in _runs_below(folder):
            found.setdefault(os.path.realpath(run.folder), run)
    if not found:
        raise CheckpointError(
            f"there is no run in {', '.join(map(str, places))}; make one by hdnn train."
        )
    return list(found.values())


def _runs_below(folder: Path) -> Iterator[Run]:
    """The runs in a folder and below it, in the order of their names and numbers."""
    for place, below, files in os.walk(folder):
        run = Run(place)
        if "config.toml" in files or ("config.json" in files and _is_of_graph(run)):
            yield run
            below[:] = [name for name in below if name not in OWN_FOLDERS]
        below.sort(key=lambda name: [int(k) if k.isdecimal() else k for k in _WORDS.split(name)])


def _is_of_graph(run: Run) -> bool:
    """Whether a config.json is that of a training on a graph: other programs write such files."""
    if (run.folder / "nodes").is_dir():
        return True
    with suppress(HDNNError, OSError):
        found = read_json(run.folder / "config.json", MOST)
        return isinstance(found, dict) and isinstance(found.get("graph"), dict)
    return False


def points_columns() -> table.Columns:
    """How points of a planar set become inputs: as they are."""
    return table.Columns("classification", "class", ["x1", "x2"], [0.0] * 2, [1.0] * 2, ["0", "1"])


def usable_folder(folder: Path, room: int) -> None:
    """Make a folder and try to write to it, so that a training does not fail at its end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            for _ in range(-(-room // 2**22)):
                probe.write(bytes(2**22))
            probe.flush()
            os.fsync(probe.fileno())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise CheckpointError(
            f"cannot write to the folder {folder}: {reason}; choose one that you "
            f"may write to and that has {max(room // 2**20, 1)} MiB of room."
        ) from error


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, (json.dumps(finite(value), indent=2) + "\n").encode())
