"""The process of some agents: `python -m hdnn.control.worker FOLDER`.

FOLDER has a problem and options, as `hdnn.control.train_on_processes` writes them and starts one of
these for each part; under torchrun a process finds its part by itself. The root writes the result
into the folder. The exit code is 2 if a restart would fail in the same way, and 1 if another
process was lost.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from hdnn.control.processes import part_of, read_task, write_result
from hdnn.control.shared import name_of
from hdnn.control.shares import shared_out
from hdnn.distributed.launch import tell_launcher
from hdnn.distributed.messages.connect import connect, parts_here
from hdnn.distributed.messages.stored import LostError
from hdnn.errors import HDNNError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hdnn.control.worker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=float, default=60.0)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # processes share this machine
    try:
        work(options.folder, options.timeout)
    except HDNNError as error:
        sys.stderr.write(f"hdnn: {' '.join(str(error).split())}\n")
        return 1 if isinstance(error, LostError) else 2
    except KeyboardInterrupt:
        return 130
    return 0


def work(home: Path, timeout: float = 60.0) -> None:
    """Train as the process that the environment says this is."""
    problem, options, keeping = read_task(home)
    plan = shared_out(problem, parts_here())
    name = name_of(plan)
    process = connect(timeout=timeout, name=name)
    transport = process.transport
    try:
        run = part_of(problem, plan, transport, options, tell, keeping)
    except HDNNError as error:
        transport.report(f"{name(transport.part)} says: {str(error).removesuffix('.')}")
        raise
    finally:
        process.close()
    if plan.owner[plan.tree.root] == transport.part:
        write_result(home, problem, run)


def tell(news: dict[str, Any]) -> None:
    """Report progress to the process that started this one, and end if it is gone."""
    try:
        tell_launcher(news)
    except OSError as error:
        sys.stdout = None  # what it still holds cannot be written when Python exits
        raise LostError("the process that started this training is gone.") from error


if __name__ == "__main__":
    sys.exit(main())
