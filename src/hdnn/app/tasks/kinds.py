"""The task for each kind of config, and prediction and certificates for models of all kinds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hdnn import serialization
from hdnn.analysis import Certificate
from hdnn.analysis.certificate import SAMPLES
from hdnn.analysis.image_certificate import Certificates
from hdnn.app.configs.images import ImageConfig
from hdnn.app.configs.table import TableConfig
from hdnn.app.runs import Run
from hdnn.app.tasks import images, nodes, table
from hdnn.app.tasks.answers import Answer, together
from hdnn.app.tasks.seeds import RunCertificates
from hdnn.app.tasks.task import Task
from hdnn.data.table import Table
from hdnn.distributed.training.run import DENSE
from hdnn.errors import CheckpointError, OptionError
from hdnn.model import Model
from hdnn.models import ImageModel
from hdnn.networks import Network

OWN = ("seed", "device")  # in which the runs of a folder of seeds may differ


def task_of(config: TableConfig | ImageConfig, said: set[str] | None = None) -> Task:
    """The training that a config asks for; `said` are notes that need not be said again."""
    if isinstance(config, ImageConfig):
        return images.ImageTask(config)
    task = table.TableTask(config)
    task.said = set() if said is None else said
    return task


def load_model(run: Run) -> Model | Network | ImageModel:
    """The trained model of a run, on the CPU."""
    if not run.exists:
        run.config()  # raises: there is no run
    if not run.model_file.is_file():
        if run.of_graph and run.complete:
            raise CheckpointError(
                f"the run in {run.folder} has no model in one file, because its nodes have more "
                f"than {DENSE} features together; its weights are in {run.folder / 'nodes'}."
            )
        raise CheckpointError(
            f"the run in {run.folder} has no model yet; finish it by "
            f"hdnn {'launch' if run.of_graph else 'train'} --resume --out {run.folder}."
        )
    return serialization.load(run.model_file)


def predict(run: Run, data: str, *, proba: bool = False) -> dict[str, Any]:
    """Predictions for all rows of a file, for node files, or for the test part of a set by name.

    A folder of seeds answers with the mean of its runs.
    """
    if members := run.members:
        _check_alike(members)
        ask = _asking(data)
        found = [ask(one, load_model(one), proba) for one in members]
        return together([str(one.folder) for one in members], found, proba=proba)
    return _asking(data)(run, load_model(run), proba).told(proba=proba)


def _check_alike(members: Sequence[Run]) -> None:
    """Refuse runs of different trainings: a smaller number of seeds may have left an old one."""
    first, *others = ({k: v for k, v in one.options().items() if k not in OWN} for one in members)
    for run, options in zip(members[1:], others, strict=True):
        differ = [k for k in first | options if first.get(k) != options.get(k)]
        if differ:
            name = differ[0]
            raise CheckpointError(
                f"{run.folder} has {name.replace('_', '-')} = {options.get(name)!r}, but "
                f"{members[0].folder} has {first.get(name)!r}, so they have no mean; name one of "
                "them with --run, or move the one that does not belong there away."
            )


def _asking(data: str) -> Callable[[Run, object, bool], Answer]:
    """How to ask runs about data, which are read once."""
    known: list[Table] = []

    def rows(run: Run) -> Table:
        if not known:  # points of the plane depend on the seed: all runs get those of the first
            known.append(table.read_rows(data, run))
        return known[0]

    def ask(run: Run, model: object, proba: bool) -> Answer:
        if isinstance(model, ImageModel):
            return images.answer(model, data)
        if nodes.is_folder(run, data):
            return nodes.answer(run, model, data, proba)
        return table.answer(run, model, rows, proba)

    return ask


def certify(
    checkpoint: str | os.PathLike[str], data: str | None = None, *, samples: int = SAMPLES
) -> Certificate | Certificates | RunCertificates:
    """The certificate of a run, or of a saved model, at its own points or at those of a file.

    Of a folder of seeds, the certificates of all its runs.
    """
    if samples < 1:
        raise OptionError(f"samples must be a whole number >= 1, but got {samples}.")
    run = None if Path(checkpoint).is_file() else Run(checkpoint)
    if run is not None and (members := run.members):
        models = [load_model(one) for one in members]  # before work that may take minutes
        found = [
            _certificate(one, model, data, samples)
            for one, model in zip(members, models, strict=True)
        ]
        return RunCertificates(
            {one.folder.name: each for one, each in zip(members, found, strict=True)}
        )
    model = serialization.load(checkpoint) if run is None else load_model(run)
    return _certificate(run, model, data, samples)


def _certificate(
    run: Run | None, model: Any, data: str | None, samples: int
) -> Certificate | Certificates:
    if isinstance(model, ImageModel):
        name = data if run is None or data is not None else run.config().data
        return images.certify(model, name, samples=samples)
    if run is not None and run.of_graph:
        return nodes.certify(run, model, data, samples=samples)
    return table.certify(model, run, data, samples=samples)
