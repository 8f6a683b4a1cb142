"""The runner of all experiments: resumable training, options, and pages of results.

A job is a dictionary of plain values. Its result is stored with the job as one line of a JSON-lines
file, so no job runs twice.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hdnn import io
from hdnn._version import __version__
from hdnn.errors import DataError
from hdnn.progress import Progress

Job = dict[str, Any]
RECIPES = {"paper": "the paper's recipe", "ours": "our recipe"}
ROUNDED = 99.95  # may be printed as 100
EPS = 1e-9  # for sums of numbers such as 99.9; one test point of one seed is more than 1e-3


class Result(NamedTuple):
    """A table or a figure.

    Attributes:
        title: the first line of its page.
        finding: the result in a few words, for the index of results.
        facts: all numbers, for the JSON file.
        page: the remaining lines of its page, in Markdown.
        suffix: of the names of its files.
    """

    title: str
    finding: str
    facts: dict[str, Any]
    page: list[str]
    suffix: str = ""


class Experiment(NamedTuple):
    """An experiment: a sentence about it, its options with defaults, and what makes its result.

    `make` gets the options, and also its `name`, its `command` and the folder `out`.
    """

    about: str
    defaults: dict[str, Any]
    make: Callable[[Any], Result]


def run(name: str, experiment: Experiment, argv: list[str]) -> int:
    """Run an experiment with these options; write its result as JSON and as a page."""
    options = _parse(name, experiment, argv)
    start = time.perf_counter()
    result = experiment.make(options)
    facts = {
        "command": options.command,
        "versions": {"hdnn": __version__, "torch": torch.__version__},
        **result.facts,
        "seconds": round(time.perf_counter() - start, 1),
        "found": result.finding,
    }
    lines = [f"# {result.title}", "", *result.page]
    page = "\n".join(lines) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{name}{result.suffix}"
    numbers = file.with_suffix(".json")
    text = file.with_suffix(".md")
    io.write_json(numbers, facts)
    io.write_atomically(text, page)
    print(page)
    return 0


def _parse(name: str, experiment: Experiment, argv: list[str]) -> Any:
    """The options, with the command that reproduces this result."""
    command = f"hdnn reproduce {name}"
    parser = argparse.ArgumentParser(command, description=experiment.about)
    parser.add_argument("--out", type=Path, default=Path("runs/reproduced"))
    parser.add_argument("--runs", type=Path, default=Path("runs") / name)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    for option, default in experiment.defaults.items():
        kind: dict[str, Any] = {"type": type(default)}
        if isinstance(default, list):
            kind = {"nargs": "+", "choices": default}
        parser.add_argument(f"--{option}", default=default, **kind)
    options = parser.parse_args(argv)
    words = command.split()
    for option, default in experiment.defaults.items():
        value = getattr(options, option)
        if value != default:
            words.append(f"--{option}")
            values = value if isinstance(value, list) else [value]
            words += map(str, values)
    options.name = name
    options.command = shlex.join(words)
    return options


# Jobs


def run_jobs(
    jobs: list[Job],
    work: Callable[[Job], Job],
    folder: Path,
    processes: int = 1,
) -> list[tuple[Job, Job]]:
    """All jobs with their results, in order; jobs with results in the folder are not run again.

    An interrupted run continues where it stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.jsonl"
    results = _read(path)
    missing = [job for job in jobs if key(job) not in results]
    with (
        path.open("a", encoding="utf-8") as file,
        Progress("training", len(missing)) as line,
    ):
        trained = _each(missing, work, processes)
        for done, (job, result) in enumerate(trained, 1):
            results[key(job)] = result
            file.write(json.dumps({"job": job, "result": result}) + "\n")
            file.flush()
            line.update(done)
    return [(job, results[key(job)]) for job in jobs]


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
    with context.Pool(processes, torch.set_num_threads, (1,)) as pool:
        yield from zip(jobs, pool.imap(work, jobs), strict=True)


def key(job: Job) -> str:
    """A text that is different for different jobs."""
    return json.dumps(job, sort_keys=True)


def _read(path: Path) -> dict[str, Job]:
    """The results in a file; a last line that was cut off is removed from it."""
    results: dict[str, Job] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            results[key(entry["job"])] = entry["result"]
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise DataError(
                    f"{path}, line {number}, is damaged; remove that line."
                ) from error
            io.write_atomically(path, "".join(lines[:-1]))
    return results


def grouped(
    results: Iterable[tuple[Job, Job]], *keys: str
) -> list[tuple[dict[str, Any], list[Job]]]:
    """Groups of jobs that agree in the values of these keys, with their results."""
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job, result in results:
        cell = tuple(job[key] for key in keys)
        groups.setdefault(cell, []).append(result)
    return [
        (dict(zip(keys, cell, strict=True)), group)
        for cell, group in groups.items()
    ]


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


def counted(
    rows: Sequence[dict[str, Any]],
    what: str = "mean",
    reach: str = " reach the paper's accuracy",
) -> str:
    """The number of rows with `what` at or above the paper's figure, in words.

    Where the paper prints 100, without decimals, 99.95 may have been meant.
    """
    strictly = 0
    rounded = 0
    for row in rows:
        paper = row["paper"]
        strictly += reached(row[what], paper)
        meant = ROUNDED if paper == 100 else paper
        rounded += reached(row[what], meant)
    values = {"mean": "means", "best": "best runs"}[what]
    text = f"{strictly} of {len(rows)} {values}{reach}"
    if rounded > strictly:
        text += f" ({rounded} within rounding)"
    return text


def grid(
    rows: Sequence[dict[str, Any]], column: str, what: str = "mean"
) -> list[str]:
    """A table of cells beside the paper's figures: a line for each data set and depth."""
    columns = {"": "{place}"}
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        name = row[column]
        columns[name] = f"{{{name}}}"
        paper = row["paper"]
        mark = "**" if reached(row[what], paper) else ""
        text = f"{mark}{row['mean']:.2f} ± {row['std']:.2f}{mark} "
        text += f"({row['worst']:.2f} to {row['best']:.2f}) [{paper:g}]"
        if "T" in row:
            text += f", {row['T']:.2g}"
        if row.get("failed"):
            text += f", {row['failed']} did not finish"
        place = f"{row['data'].replace('_', ' ')}, {row['layers']}"
        line = lines.setdefault(place, {"place": place})
        line[name] = text
    return markdown_table(columns, lines.values())


def markdown_table(
    columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> list[str]:
    """The lines of a table in Markdown.

    Args:
        columns: the format of a cell for each heading, such as "{mean:.2f}".
        rows: the values, by name.
    """
    template = " | ".join(columns.values())
    head = " | ".join(columns)
    rule = " | ".join("---" for _ in columns)
    body = [template.format_map(row) for row in rows]
    return [f"| {line} |" for line in (head, rule, *body)]


def save_figure(figure: Any, options: Any, suffix: str = "") -> str:
    """Write a picture of an experiment, and return its name."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.name}{suffix}.png"
    figure.savefig(path, dpi=130)
    return path.name


def machine(device: str) -> str:
    """The device of a training, and its version of PyTorch."""
    name = "CPU"
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name()
    version = torch.__version__.partition("+")[0]
    return f"{name} with PyTorch {version}"
