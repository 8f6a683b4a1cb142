"""The process of one part: `python -m hdnn.distributed.worker CONFIG.json [--out FOLDER]`.

CONFIG.json has the fields of `hdnn.distributed.Config`. `hdnn launch` starts one for each part;
under torchrun it finds its part by itself; alone it owns all nodes. Its exit code is 2 if a restart
would fail in the same way, and 1 if another part was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hdnn.distributed.graph.file import graph_of
from hdnn.distributed.graph.plan import Plan, partition
from hdnn.distributed.launch import tell_launcher
from hdnn.distributed.messages.connect import connect, parts_here
from hdnn.distributed.messages.stored import LostError
from hdnn.distributed.training import run
from hdnn.errors import HDNNError, OptionError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hdnn.distributed.worker", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--save-every", type=int)
    options = vars(parser.parse_args(argv))
    torch.set_num_threads(1)  # parts share this machine; and sums keep their order
    try:
        metrics = work(read_config(options.pop("config")), **options)
    except HDNNError as error:
        sys.stderr.write(f"hdnn: {' '.join(str(error).split())}\n")
        return 1 if isinstance(error, LostError) else 2
    except KeyboardInterrupt:
        return 130
    if "traffic" in metrics:  # the root's
        sys.stdout.write(json.dumps(metrics) + "\n")
    return 0


def read_config(path: Path) -> run.Config:
    """The config in a file."""
    try:
        return run.Config.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{path} is no config of a training on a graph: {reason}.") from error


def work(
    config: run.Config,
    *,
    out: Path | None = None,
    resume: bool = False,
    timeout: float = 60.0,
    save_every: int | None = None,
    tell: Callable[[dict[str, Any]], None] | None = None,
) -> dict:
    """Train as the part that the environment says this process is."""
    if tell is None and "HDNN_STORE" in os.environ:
        tell = tell_launcher
    graph = graph_of(config.graph)
    owner = partition(graph, parts_here())
    plan = Plan(graph, owner)
    process = connect(timeout=timeout, name=run.name_of(plan))
    transport = process.transport
    try:
        return run.train(
            config,
            graph,
            transport,
            owner=owner,
            replicas=process.replicas,
            folder=out,
            resume=resume,
            save_every=save_every,
            tell=tell,
        )
    except HDNNError as error:
        name = run.name_of(plan, process.replicas)(transport.part)
        transport.report(f"{name} says: {str(error).removesuffix('.')}")
        raise
    finally:
        process.close()


if __name__ == "__main__":
    sys.exit(main())
