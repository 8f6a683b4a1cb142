"""What all experiments share: trainings that are kept and continued, their options, and pages.

A job is a dictionary of plain values. Its result is one line of a JSON-lines file, where it is
found again by its job.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hdnn import io
from hdnn._version import __version__
from hdnn.errors import DataError
from hdnn.progress import Progress

Job = dict[str, Any]
ROUNDED = 99.95  # may be printed as 100
EPS = 1e-9  # for sums of numbers such as 99.9; one test point of one seed is more than 1e-3


class Experiment(NamedTuple):
    """A table or a figure: its options with their defaults, its result, and the page of it.

    `make` gets the options, with the name of the experiment and the folder `out` for pictures.
    `found` is the result in a few words, for the index of results.
    """

    about: str
    defaults: dict[str, Any]
    make: Callable[[Any], dict[str, Any]]
    page: Callable[[dict[str, Any]], str]
    found: Callable[[dict[str, Any]], str]


def run(name: str, experiment: Experiment, argv: list[str]) -> int:
    """Run an experiment with these options; write its result as JSON and as a page."""
    options = _parse(name, experiment, argv)
    start = time.perf_counter()
    result = {
        "command": _command(name, experiment, options),
        "versions": {"hdnn": __version__, "torch": torch.__version__},
        **experiment.make(options),
    }
    result.setdefault("seconds", round(time.perf_counter() - start, 1))
    options.out.mkdir(parents=True, exist_ok=True)
    result["found"] = experiment.found(result)
    page = experiment.page(result)
    file = options.out / result.get("file", name)
    io.write_json(file.with_suffix(".json"), result)
    io.write_atomically(file.with_suffix(".md"), page)
    print(json.dumps(result) if options.json else page)
    return 0


def _parse(name: str, experiment: Experiment, argv: list[str]) -> Any:
    parser = argparse.ArgumentParser(
        f"hdnn reproduce {name}", description=experiment.about
    )
    parser.add_argument("--out", type=Path, default=Path("runs/reproduced"))
    parser.add_argument("--runs", type=Path, default=Path("runs") / name)
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    for option, default in experiment.defaults.items():
        if isinstance(default, list):
            parser.add_argument(
                f"--{option}", nargs="+", choices=default, default=default
            )
        else:
            parser.add_argument(
                f"--{option}", type=type(default), default=default
            )
    options = parser.parse_args(argv)
    options.name = name
    return options


def _command(name: str, experiment: Experiment, options: Any) -> str:
    """The command that makes this result, with the options that are not the default."""
    words = []
    for option, default in experiment.defaults.items():
        value = getattr(options, option)
        if value != default:
            values = value if isinstance(value, list) else [value]
            words += [
                f"--{option}",
                *(shlex.quote(str(each)) for each in values),
            ]
    return " ".join(["hdnn", "reproduce", name, *words])


# Jobs


def run_jobs(
    jobs: list[Job],
    work: Callable[[Job], Job],
    folder: Path,
    processes: int = 1,
) -> list[tuple[Job, Job]]:
    """All jobs with their results, in their order; those that the folder holds are not run again.

    An interrupted run continues where it stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    results = _read(path)
    missing = [job for job in jobs if _key(job) not in results]
    with (
        path.open("a", encoding="utf-8") as file,
        Progress("training", len(missing)) as line,
    ):
        for done, (job, result) in enumerate(
            _each(missing, work, processes), 1
        ):
            results[_key(job)] = result
            file.write(json.dumps({"job": job, "result": result}) + "\n")
            file.flush()
            line.update(done)
    return [(job, results[_key(job)]) for job in jobs]


def _each(
    jobs: list[Job], work: Callable[[Job], Job], processes: int
) -> Iterable[tuple[Job, Job]]:
    processes = min(processes, len(jobs))
    if processes <= 1:
        for job in jobs:
            yield job, work(job)
        return
    context = torch.multiprocessing.get_context("spawn")
    # One thread each: the processes already fill the cores.
    with context.Pool(
        processes, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield from zip(jobs, pool.imap(work, jobs), strict=True)


def _key(job: Job) -> str:
    return json.dumps(job, sort_keys=True)


def _read(path: Path) -> dict[str, Job]:
    results: dict[str, Job] = {}
    lines = (
        path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    )
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            results[_key(entry["job"])] = entry["result"]
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise DataError(
                    f"{path}, line {number}, is damaged; remove it."
                ) from error
            # a run that was killed while it wrote
            io.write_atomically(
                path, "".join(f"{good}\n" for good in lines[:-1])
            )
    return results


def grouped(
    results: Iterable[tuple[Job, Job]], *keys: str
) -> dict[tuple[Any, ...], list[Job]]:
    """The results of jobs that agree in these keys, by their values."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job, result in results:
        groups.setdefault(tuple(job[key] for key in keys), []).append(result)
    return groups


def summary(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, best and worst of several seeds."""
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
        "best": max(values),
        "worst": min(values),
        "seeds": len(values),
    }


# Pages


def reached(value: float, paper: float) -> bool:
    """True if an accuracy, not rounded, is at or above the paper's figure."""
    return value >= paper - EPS


def spread(values: dict[str, Any]) -> str:
    """Mean and standard deviation over seeds."""
    return f"{values['mean']:.2f} ± {values['std']:.2f}"


def counted(rows: Sequence[dict[str, Any]], what: str = "mean") -> str:
    """How many of these rows have `what` at or above the paper's figure, in words.

    Where the paper prints 100, without decimals, 99.95 may have been meant.
    """
    strictly = 0
    rounded = 0
    for row in rows:
        strictly += reached(row[what], row["paper"])
        rounded += reached(
            row[what], ROUNDED if row["paper"] == 100 else row["paper"]
        )
    count = f"{strictly} of {len(rows)} {what}s at or above the paper's"
    return (
        f"{count} ({rounded} within rounding)" if rounded > strictly else count
    )


def grid(
    rows: Sequence[dict[str, Any]], column: str, what: str = "mean"
) -> list[str]:
    """A table of cells beside the paper's figures: a line for each data set and depth."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    lines: dict[str, list[str]] = {}
    for row in rows:
        mark = "**" if reached(row[what], row["paper"]) else ""
        text = f"{mark}{spread(row)}{mark} ({row['worst']:.2f} to {row['best']:.2f})"
        text += f" [{row['paper']:g}]"
        if "T" in row:
            text += f", {row['T']:.2g}"
        if row.get("failed"):
            text += f", {row['failed']} did not end"
        place = f"{row['data'].replace('_', ' ')}, {row['layers']}"
        lines.setdefault(place, [place]).append(text)
    return markdown_table(["", *columns], lines.values())


def markdown_table(
    head: Sequence[str], rows: Iterable[Sequence[Any]]
) -> list[str]:
    """The lines of a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def save_figure(figure: Any, path: Path) -> str:
    """Write a picture, and return its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path.name


def machine(device: str) -> str:
    """The device of a training, and its PyTorch."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    return f"{name} with PyTorch {torch.__version__.partition('+')[0]}"
