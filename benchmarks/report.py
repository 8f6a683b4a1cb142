"""The command line of a benchmark, the machine it ran on, and the page it writes."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hdnn

Result = dict[str, Any]


def command(
    name: str,
    about: str | None,
    sizes: dict[str, dict[str, Any]],
    run: Callable[[dict[str, Any], str], Result],
    page: Callable[[Result], str],
    devices: tuple[str, ...] = ("cpu", "cuda"),
    found: Callable[[Result], str] | None = None,
) -> int:
    """Run a benchmark with its sizes "full" or "quick"; print its page and keep it.

    Each size that is a number or a text is an option of the command line. `found` gives the
    result in a few words, for the index of results. The exit status is 1 if the result says
    `"ok": False`, 2 if there is no GPU and one is needed.
    """
    options = _parsed(about, sizes["full"], devices)
    device = options.pop("device")
    out = options.pop("out")
    quick = options.pop("quick")
    if device == "cuda" and not torch.cuda.is_available():
        print("a GPU is needed, but PyTorch finds none", file=sys.stderr)
        return 2
    changed = {
        key: value for key, value in options.items() if value is not None
    }
    chosen = {**sizes["quick" if quick else "full"], **changed}
    words = ["python", f"benchmarks/{name}.py"]
    if len(devices) > 1:
        words += ["--device", device]
    if quick:
        words.append("--quick")
    for key, value in changed.items():
        words += [f"--{key}", str(value)]
    before = processor_time()
    result = {"sizes": chosen, **run(chosen, device)}
    result["command"] = " ".join(words)
    result["machine"] = machine(device)
    result["others_cores"] = taken_by_others(before)
    if found is not None:
        result["found"] = found(result)
    text = page(result)
    print(text)
    keep(result, text, name if devices == ("cpu",) else f"{name}-{device}", out)
    return 0 if result.get("ok", True) else 1


def _parsed(
    about: str | None, sizes: dict[str, Any], devices: tuple[str, ...]
) -> dict[str, Any]:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form)
    parser.add_argument("--device", choices=devices, default=devices[0])
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, to see that it runs"
    )
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    for key, value in sizes.items():
        if isinstance(value, int | float | str):
            parser.add_argument(
                f"--{key}", type=type(value), help=f"default: {value}"
            )
    return vars(parser.parse_args())


def say(line: str) -> None:
    print(line, flush=True)


# The machine


def machine(device: str) -> dict[str, str]:
    chip = torch.cuda.get_device_name() if device == "cuda" else _cpu_name()
    threads = torch.get_num_threads()
    word = "thread" if threads == 1 else "threads"
    return {
        "machine": f"{chip}, {threads} {word}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hdnn": hdnn.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpu_name() -> str:
    if platform.processor() not in ("", platform.machine()):
        return platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or "CPU"


def processor_time() -> tuple[float, float, float] | None:
    """Seconds by the clock, of all programs on all cores, and of this one with its children."""
    try:
        words = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return None  # known on Linux only
    user, nice, system, _, _, *rest = map(int, words)
    everyone = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    own = sum(os.times()[:4])
    return time.perf_counter(), everyone, own


def taken_by_others(before: tuple[float, float, float] | None) -> float | None:
    """How many cores other programs kept busy since then, on average."""
    now = processor_time()
    if before is None or now is None:
        return None
    clock, everyone, own = (b - a for a, b in zip(before, now, strict=True))
    return max(0.0, (everyone - own) / clock)


# The page


def head(title: str, result: Result) -> list[str]:
    """The first lines of a page: its title, the command and the machine."""
    line = f"`{result['command']}`, {on_one_line(result['machine'])}"
    if result.get("others_cores") is not None:
        line += (
            f"; other programs were using {result['others_cores']:.2f} cores"
        )
    return [f"# {title}", "", line]


def on_one_line(about: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())


def table(names: str, rows: list[list[Any]]) -> list[str]:
    """A table after an empty line; names are divided by bars."""
    lines = ["", f"| {names} |", "|" + " --- |" * len(names.split(" | "))]
    for row in rows:
        cells = " | ".join(str(cell) for cell in row)
        lines.append(f"| {cells} |")
    return lines


def text_of(lines: list[str]) -> str:
    return "\n".join(lines).rstrip() + "\n"


def spread(values: list[float], digits: int = 1) -> str:
    """The median, with the least and the most."""
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return f"{middle:.{digits}f} ({ordered[0]:.{digits}f} to {ordered[-1]:.{digits}f})"


def keep(result: Any, page: str, name: str, out: Path | None) -> None:
    """Write a result as JSON and as a page into the folder, if there is one."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(page, encoding="utf-8")
