"""Many trainings, spread over processes; each result is kept, so that a run can be continued.

A job is a dictionary of plain values. Its result is one line of a JSON-lines file, where it is
found again by its job.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hdnn.base.files import write_atomically
from hdnn.base.progress import ProgressLine
from hdnn.errors import DataError, HDNNError, OptionError
from hdnn.training.images import ImageTraining, run_together

Job = dict[str, Any]
RESULTS = "results.jsonl"  # of single trainings, in the folder of an experiment


def run_all(
    jobs: list[Job],
    work: Callable[[Any], Any],
    path: Path,
    *,
    processes: int = 1,
    progress: bool = True,
    what: str = "trainings",
    together: int = 0,
) -> list[Job]:
    """The results of all jobs, in their order; what `path` holds already is not run again.

    With `together`, `work` is given lists of that many jobs, and returns lists of their results.
    """
    known = _read(path)
    missing = [job for job in jobs if _key(job) not in known]
    line, start = ProgressLine(progress), time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("a", encoding="utf-8") as file:
            for done, (job, result) in enumerate(_each(missing, work, processes, together), 1):
                known[_key(job)] = result
                file.write(json.dumps({"job": job, "result": result}) + "\n")
                file.flush()
                left = (time.monotonic() - start) / done * (len(missing) - done)
                line.show(f"{done}/{len(missing)} {what}, {left:.0f} s to go")
    finally:
        line.close()
    return [known[_key(job)] for job in jobs]


def _each(
    jobs: list[Job], work: Callable[[Any], Any], processes: int, together: int
) -> Iterable[tuple[Job, Job]]:
    if together:
        for first in range(0, len(jobs), together):
            some = jobs[first : first + together]
            yield from zip(some, work(some), strict=True)
        return
    if processes <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, work(job)
        return
    context = torch.multiprocessing.get_context("spawn")
    # One thread each: the processes already fill the cores.
    count = min(processes, len(jobs))
    with context.Pool(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield from pool.imap_unordered(partial(_with_result, work), jobs)


def _with_result(work: Callable[[Job], Job], job: Job) -> tuple[Job, Job]:
    return job, work(job)


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)


def _digest(job: Job) -> str:
    """A name for the folder of a job."""
    return hashlib.sha256(_key(job).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, Job]:
    if not path.exists():
        return {}
    known = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            known[_key(entry["job"])] = entry["result"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # a run that was killed while it wrote
                write_atomically(path, "".join(f"{kept}\n" for kept in lines[:-1]).encode())
                break
            raise DataError(f"{path}, line {number}, is no result of hdnn; remove it.") from error
    return known


def run_with(
    options: argparse.Namespace, jobs: list[Job], work: Callable[[Job], Job]
) -> list[tuple[Job, Job]]:
    """Run all jobs as the options of a table say, and return them with their results."""
    path, shown = options.runs / RESULTS, not options.quiet
    found = run_all(jobs, work, path, processes=options.processes, progress=shown)
    return list(zip(jobs, found, strict=True))


def grouped(done: Iterable[tuple[Job, Job]], *keys: str) -> dict[tuple[Any, ...], list[Job]]:
    """The results of jobs that agree in these keys, by their values."""
    found: dict[tuple[Any, ...], list[Job]] = {}
    for job, result in done:
        found.setdefault(tuple(job[key] for key in keys), []).append(result)
    return found


def accuracy(model: Any, x: Tensor, t: Tensor) -> float:
    """The share of labels that a model predicts correctly, in per cent."""
    return 100 * float((model.predict(x) == t).double().mean())


def summary(values: list[float]) -> dict[str, float]:
    """Mean, standard deviation, best and worst of several seeds."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "best": max(values),
        "worst": min(values),
        "seeds": len(values),
    }


class Arguments(argparse.ArgumentParser):
    """The options of an experiment; a mistake is one sentence, as everywhere in hdnn."""

    def __init__(self, description: str | None, name: str) -> None:
        super().__init__(
            prog=f"hdnn reproduce {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} -- --help.")

    def add_output(self, what: str, runs: str | None = None) -> None:
        """The options that all experiments have: where to write, and what to print."""
        self.add_argument("--out", type=Path, default=Path("docs/results"), help=f"for {what}")
        if runs is not None:
            folder = Path("runs") / runs
            self.add_argument("--runs", type=Path, default=folder, help="for single results")
        self.add_argument("--json", action="store_true", help="print the result as JSON")
        self.add_argument("--quiet", action="store_true")


def arguments(description: str | None, name: str) -> Arguments:
    """The options that all tables have."""
    parser = Arguments(description, name)
    parser.add_argument("--seeds", type=count, default=10, help="how many (default 10)")
    parser.add_argument("--processes", type=count, default=os.cpu_count() or 1)
    parser.add_output("JSON, Markdown", runs=name)
    return parser


def command(name: str, parser: Arguments, options: argparse.Namespace, *shown: str) -> str:
    """The command that makes this result, with those named options that are not the default."""
    words = []
    for option in shown:
        value, flag = getattr(options, option), f"--{option}"
        if value == parser.get_default(option):
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += [flag, *(shlex.quote(str(each)) for each in values)]
    return " ".join([f"hdnn reproduce {name}", *(["--", *words] if words else [])])


def read_table(
    path: Path, name: str, keys: Iterable[str], seeds: int | None = None
) -> dict[str, Any]:
    """A result that was recorded before, by the experiment of that name, with these keys."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        whole = all(key in table for key in ("command", *keys)) and name in table["command"]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, TypeError):
        whole, table = False, {}
    if not whole:
        raise DataError(f"{path} is no table of `hdnn reproduce {name}`.")
    if seeds is not None and table["seeds"] != seeds:
        raise DataError(f"{path} is a table of {table['seeds']} seeds, not {seeds}.")
    return table


def image_arguments(description: str | None, name: str, seeds: int) -> Arguments:
    """The options that all tables of images have."""
    parser = arguments(description, name)
    parser.set_defaults(seeds=seeds)
    parser.add_argument("--epochs", type=count, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--minutes", type=float, help="stop after this time; the same command continues"
    )
    parser.add_argument("--share", help="as in 0/4: every fourth training, without a table")
    return parser


def finished(jobs: list[Job], runs: Path) -> list[Job]:
    """Those jobs whose results are there."""
    path = runs / RESULTS
    known = _read(path)
    found = [job for job in jobs if _key(job) in known]
    if not found:
        raise DataError(f"{path} has no finished training of this table yet.")
    return found


def run_images(
    jobs: list[Job],
    make: Callable[[Job], ImageTraining],
    more: Callable[[Job, ImageTraining], Job],
    options: argparse.Namespace,
    together: int,
) -> list[tuple[Job, Job]] | None:
    """Run jobs and return them with their results; None for a share, which makes no table.

    A result has the entries of all tables, and those that `more` adds after the training. On a GPU,
    `together` trainings run at once. Each has a checkpoint until it is done. When the minutes are
    over, all stop as by Ctrl-C, and the same command continues.
    """
    path, minutes = options.runs / RESULTS, options.minutes
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    if options.share is not None:
        first, every = _share(options.share)
        jobs, path = jobs[first::every], path.with_name(f"results-{first}.jsonl")

    def work(some: list[Job]) -> list[Job]:
        if time.monotonic() > end:
            raise KeyboardInterrupt
        folders = [options.runs / "unfinished" / _digest(job) for job in some]
        start, trainings = time.monotonic(), [make(job) for job in some]
        shown = not options.quiet
        if not run_together(trainings, folders=folders, until=end, progress=shown):
            raise KeyboardInterrupt
        seconds = round((time.monotonic() - start) / len(some), 1)
        found = [
            {
                "test": 100 * one.history.test[-1],
                "parameters": sum(p.numel() for p in one.model.parameters()),
                "curve": [round(100 * value, 2) for value in one.history.test],
                "seconds": seconds,
                "device": device_name(options.device),
                **more(job, one),
            }
            for job, one in zip(some, trainings, strict=True)
        ]
        for folder in folders:
            shutil.rmtree(folder)
        return found

    at_once = together if options.device.startswith("cuda") else 1
    found = run_all(jobs, work, path, progress=not options.quiet, together=at_once)
    return None if options.share is not None else list(zip(jobs, found, strict=True))


def _share(text: str) -> tuple[int, int]:
    first, _, every = text.partition("/")
    if not (first.isdecimal() and every.isdecimal() and int(first) < int(every)):
        raise OptionError(f"--share must be given as in 0/4 or 3/4, but got {text!r}.")
    return int(first), int(every)


def device_name(device: str) -> str:
    """What a training is run on, and by which PyTorch."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return f"{name} with PyTorch {torch.__version__.partition('+')[0]}"


def devices(results: Iterable[Job]) -> str:
    """What the trainings of a table were run on."""
    return ", ".join(sorted({one["device"] for one in results}))


def about_images(remark: str) -> str:
    """What a page says of images that are not the original ones."""
    return f" The images: {remark.rstrip('.')}." if remark else ""


def figure_arguments(description: str | None, name: str) -> Arguments:
    """The options that all figures have."""
    parser = Arguments(description, name)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_output("the pictures")
    return parser


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, but got {text!r}")
    return int(text)


def table(head: str, rows: Iterable[str]) -> list[str]:
    """The lines of a table in Markdown, from columns that are parted by |."""
    rule = " | ".join(["---"] * (head.count("|") + 1))
    return [f"| {line} |" for line in (head, rule, *rows)]


def save_figure(figure: Any, path: Path, dpi: int = 110) -> None:
    """Write a picture, into a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def finish(result: dict[str, Any], page: str, name: str, options: argparse.Namespace) -> None:
    """Write a result as JSON and as Markdown, and print it."""
    options.out.mkdir(parents=True, exist_ok=True)
    write_atomically(options.out / f"{name}.json", _readable(result).encode())
    write_atomically(options.out / f"{name}.md", page.encode())
    say(result, page, options)


def _readable(result: dict[str, Any]) -> str:
    """JSON with a line for each entry, a list of numbers being one."""
    text = json.dumps(result, indent=1)
    text = re.sub(r"\[([\d\s.,eE+-]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    return text + "\n"


def say(result: dict[str, Any], page: str, options: argparse.Namespace) -> None:
    """Print a result, for people or for machines."""
    if options.json:
        print(json.dumps(result))
    elif not options.quiet:
        print(page)


def guarded(main: Callable[[list[str] | None], int], argv: list[str] | None = None) -> int:
    """Run an experiment; a user's mistake is one sentence and exit code 2."""
    try:
        return main(argv)
    except HDNNError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"cannot write {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues where this one stopped.", file=sys.stderr)
        return 130
