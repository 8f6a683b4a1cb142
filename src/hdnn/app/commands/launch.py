"""`hdnn launch`: a training on a graph by processes of this machine."""

from __future__ import annotations

from typing import Any

from hdnn.app import progress
from hdnn.app.configs.flags import GraphTraining, LaunchFlags
from hdnn.app.configs.table import TableData
from hdnn.app.options import given
from hdnn.base.graph_config import Config

EXAMPLES = (
    "hdnn launch --nodes 8 --data swiss_roll --layers 4",
    "hdnn launch --graph grid.toml --parts 4 --data double_circles",
    "hdnn launch --graph plant.toml --data log.csv --target fault",
    "hdnn launch --resume --out runs/ring8-swiss_roll-h2-4-0",
)
CONFIGS = (Config, TableData, GraphTraining, LaunchFlags)


def launch(**options: Any) -> None:
    """Train on a graph by as many processes of this machine, which talk to neighbours only."""
    from hdnn.app import results
    from hdnn.app.tasks import graph
    from hdnn.app.tasks.launched import LaunchedTask
    from hdnn.app.tasks.task import train

    options = given(options)
    as_json = "json" in options
    loud = not ("quiet" in options or as_json)
    with progress.waiting("looking at the graph", loud):
        task, run = graph.asked(LaunchedTask, options)
    with task.bar(run, loud) as bar:
        result = train(task, run, bar=bar)
    results.finish([result], as_json=as_json)
