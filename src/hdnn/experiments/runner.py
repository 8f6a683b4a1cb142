"""What all experiments share: their options, trainings that are kept and continued, and pages.

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
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

import hdnn
from hdnn.base.files import write_atomically
from hdnn.base.progress import ProgressLine
from hdnn.errors import DataError, HDNNError, OptionError
from hdnn.experiments import out
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
    known, start = _read(path), time.monotonic()
    missing = [job for job in jobs if _key(job) not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, closing(ProgressLine(progress)) as line:
        for done, (job, result) in enumerate(_each(missing, work, processes, together), 1):
            known[_key(job)] = result
            file.write(json.dumps({"job": job, "result": result}) + "\n")
            file.flush()
            left = (time.monotonic() - start) / done * (len(missing) - done)
            line.show(f"{done}/{len(missing)} {what}, {left:.0f} s to go")
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
    """The options of an experiment, and all that is done with its result."""

    def __init__(self, about: str | None, name: str, program: str = "hdnn reproduce {}") -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=program.format(name), description=about, formatter_class=form)
        self.set_defaults(file=name)  # what the files of a result are called
        self.file_of: Callable[[argparse.Namespace], str] = lambda options: options.file

    def error(self, message: str) -> NoReturn:
        """A mistake is one sentence, as everywhere in hdnn."""
        raise OptionError(f"{message}; see {self._with('--help')}.")

    def _with(self, *words: str) -> str:
        """The command with these words: behind `hdnn reproduce` they follow --."""
        parted = ["--"] if words and self.prog.startswith("hdnn ") else []
        return " ".join([self.prog, *parted, *words])

    def add_output(self, what: str, runs: str | None = None) -> None:
        """The options that all experiments have: where to write, and what to print."""
        self.add_argument("--out", type=Path, help=out.HELP.format(what))
        if runs is not None:
            folder = Path("runs") / runs
            self.add_argument("--runs", type=Path, default=folder, help="for single results")
        self.add_argument("--json", action="store_true", help="print the result as JSON")
        self.add_argument("--quiet", action="store_true")

    def parse_args(self, *given: Any, **more: Any) -> Any:
        """The options, with the folder and the name of the files that a result goes to."""
        options = super().parse_args(*given, **more)
        options.file = self.file_of(options)
        if "out" in options:
            options.out = out.folder_for(options.file, options.out)
        return options

    def command(self, options: argparse.Namespace, *shown: str) -> str:
        """The command that makes this result, with the options that are not the default."""
        words = []
        for option in shown:
            value = getattr(options, option)
            if value != self.get_default(option):
                values = value if isinstance(value, list) else [] if value is True else [value]
                words += [f"--{option}", *(shlex.quote(str(each)) for each in values)]
        return self._with(*words)

    def run(
        self,
        argv: list[str] | None,
        make: Callable[[argparse.Namespace], dict[str, Any] | None],
        page: Callable[[dict[str, Any]], str],
        *shown: str,
    ) -> int:
        """Make a result, write it as JSON and as a page, and print it; 0, the exit code.

        Its command has the options `shown`, as `make` leaves them. Where `make` returns None, there
        is nothing to write yet.
        """
        options, start = self.parse_args(argv), time.perf_counter()
        made = make(options)
        if made is None:
            return 0
        versions = {"hdnn": hdnn.__version__, "torch": torch.__version__}
        result = {"command": self.command(options, *shown), "versions": versions, **made}
        if "minutes" not in options:  # several calls may make a table of images
            result.setdefault("seconds", round(time.perf_counter() - start, 1))
        finish(result, page(result), options)
        return 0


def arguments(about: str | None, name: str, *program: str, seeds: int = 10) -> Arguments:
    """The options that all tables have."""
    parser = Arguments(about, name, *program)
    parser.add_argument("--seeds", type=count, default=seeds, help="how many (default %(default)s)")
    parser.add_argument("--processes", type=count, default=os.cpu_count() or 1)
    parser.add_output("JSON, Markdown", runs=name)
    return parser


def image_arguments(about: str | None, name: str, seeds: int) -> Arguments:
    """The options that all tables of images have."""
    parser = arguments(about, name, seeds=seeds)
    parser.add_argument("--epochs", type=count, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--minutes", type=float, help="stop after this time; the same command continues"
    )
    parser.add_argument("--share", help="as in 0/4: every fourth training, without a table")
    return parser


def figure_arguments(about: str | None, name: str) -> Arguments:
    """The options that all figures have."""
    parser = Arguments(about, name)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_output("the pictures")
    return parser


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, but got {text!r}")
    return int(text)


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
    path = options.runs / RESULTS
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    if options.share is not None:
        first, every = _share(options.share)
        jobs, path = jobs[first::every], path.with_name(f"results-{first}.jsonl")

    def work(some: list[Job]) -> list[Job]:
        if time.monotonic() > end:
            raise KeyboardInterrupt
        names = [hashlib.sha256(_key(job).encode()).hexdigest()[:16] for job in some]
        folders = [options.runs / "unfinished" / name for name in names]
        start, trainings = time.monotonic(), [make(job) for job in some]
        if not run_together(trainings, folders=folders, until=end, progress=not options.quiet):
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


def summaries(results: list[Job]) -> dict[str, Any]:
    """Accuracies of trainings on images, while training and in the test, and their curves."""
    parts = {part: summary([one[part] for one in results]) for part in ("train", "test")}
    return {**parts, "curves": [one["curve"] for one in results]}


def devices(results: Iterable[Job]) -> str:
    """What the trainings of a table were run on."""
    return ", ".join(sorted({one["device"] for one in results}))


def about_images(remark: str) -> str:
    """What a page says of images that are not the original ones."""
    return f" The images: {remark.rstrip('.')}." if remark else ""


def table(head: str, rows: Iterable[Any], form: str | None = None) -> list[str]:
    """The lines of a table in Markdown, from columns parted by |; `form`: of rows with names."""
    lines = rows if form is None else (form.format_map(row) for row in rows)
    rule = " | ".join(["---"] * (head.count("|") + 1))
    return [f"| {line} |" for line in (head, rule, *lines)]


def save_figure(figure: Any, path: Path, dpi: int = 110) -> None:
    """Write a picture, into a folder that is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)


def finish(result: dict[str, Any], page: str, options: argparse.Namespace) -> None:
    """Write a result as JSON and as Markdown, and print it."""
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    # A line for each entry, a list of numbers being one.
    text = re.sub(r"\[([\d\s.,eE+-]*)\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    write_atomically(options.out / f"{options.file}.json", f"{text}\n".encode())
    path = options.out / f"{options.file}.md"
    write_atomically(path, page.encode())
    say(result, page, options)
    if not (options.json or options.quiet):
        print(f"written to {path}; see hdnn report --results {options.out}.", file=sys.stderr)


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
