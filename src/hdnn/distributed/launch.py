"""The start of the training processes on this machine with torchrun, and their errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hdnn.distributed.exchange import LostError
from hdnn.distributed.graph import Graph
from hdnn.distributed.plan import Plan, partition
from hdnn.distributed.train import train
from hdnn.errors import HDNNError, OptionError

FIRST_FAILURE = re.compile(
    r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL
)


def launch(
    graph: Graph,
    *arguments: Any,
    processes: int | None = None,
    restarts: int = 0,
    tell: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Run `train` in several processes on this machine, and return the metrics.

    Args:
        graph: the graph, as in `train`.
        *arguments: further arguments, as in `train`.
        processes: the number of processes that share the nodes; by default one per node.
        restarts: the number of times that all processes resume from `folder` after a process is
            lost.
        tell: a function that is called with a dict after each epoch.
        **options: the options, as in `train`; with `gather`, the model is written to `folder`.

    Raises:
        OptionError: if a process ends because of an error in its arguments or data.
        LostError: if a process is lost and restarting does not help.
    """
    plan = Plan(
        graph, partition(graph, graph.nodes if processes is None else processes)
    )
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--standalone", f"--nproc-per-node={plan.size}"]
    command += [f"--max-restarts={restarts}", __file__]
    # No module may be imported from the current folder: it might contain a torch.py.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    last: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as place,
        tempfile.TemporaryFile("w+") as errors,
    ):
        settings = Path(place) / "settings.json"
        settings.write_text(json.dumps([graph.table(), arguments, options]))
        started = subprocess.Popen(
            [*command, str(settings)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with started as process:
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):  # PyTorch may also print
                        last = json.loads(line)
                        if tell is not None and "traffic" not in last:
                            tell(last)
            finally:
                process.terminate()
        if process.returncode == 0:
            return last
        errors.seek(0)
        raise _fault(errors.read(), plan)


def _fault(text: str, plan: Plan) -> HDNNError:
    """The error of processes that ended with these last words."""
    sentences = re.findall(r"^hdnn (\w+): (.*)$", text, re.MULTILINE)
    for kind, sentence in sentences:
        if kind != "LostError":
            return OptionError(sentence)
    failure = FIRST_FAILURE.search(text)
    if failure is not None and int(failure[2]) < 0:
        name = plan.name(int(failure[1]))
        return LostError(
            f"{name} was killed by signal {-int(failure[2])}; start it again."
        )
    if sentences:
        return LostError(sentences[0][1])
    return LostError(f"the processes failed: {text.strip().splitlines()[-1:]}")


def _print(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one process, started by torchrun with the path of its settings."""
    torch.set_num_threads(1)
    table, arguments, options = json.loads(Path(sys.argv[1]).read_text())
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        options["resume"] = True
    try:
        metrics = train(Graph.of(table), *arguments, tell=_print, **options)
    except HDNNError as error:
        sys.stderr.write(
            f"hdnn {type(error).__name__}: {' '.join(str(error).split())}\n"
        )
        sys.stderr.flush()
        os._exit(1)  # gloo may wait forever for a connection that is being made
    metrics.pop("model", None)
    if metrics:
        _print(metrics)


if __name__ == "__main__":
    main()
