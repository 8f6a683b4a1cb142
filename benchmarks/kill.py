"""Kill a training at random moments, resume it, and compare the weights bit by bit.

    python benchmarks/kill.py
    python benchmarks/kill.py --kills 20 --out docs/results

One run of `hdnn train` is left alone. Each of the others has a folder of its own, gets SIGKILL at a
moment drawn from its part of the time that the first one took, from before anything is written to
after the last file, and is then resumed. Right after the kill every file that is there must load,
but for temporary files; after the resume these must be gone too, and the model and its losses must
be those of the run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from safetensors import safe_open

TRAIN = ("train", "--data", "swiss_roll", "--network", "h2", "--layers", "64", "--quiet")
END_OF_PNG = b"IEND\xaeB`\x82"


def start(folder: Path, epochs: int, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hdnn", *TRAIN, "--epochs", str(epochs), *flags]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, "--out", str(folder)], **quiet)


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for a command that must succeed."""
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(f"hdnn train ended with code {process.returncode}: {said}")


def kill(process: subprocess.Popen[str], seconds: float) -> bool:
    """SIGKILL after so many seconds; whether it was still running then."""
    with process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        return process.wait() == -signal.SIGKILL


# What is in a folder


def read_safetensors(file: Path) -> dict[str, str]:
    with safe_open(file, framework="numpy") as content:
        for name in content.keys():  # noqa: SIM118
            content.get_tensor(name)
        return content.metadata() or {}


def read_png(file: Path) -> None:
    if not file.read_bytes().endswith(END_OF_PNG):
        raise ValueError("the picture has no end")


READERS: dict[str, Callable[[Path], object]] = {
    ".toml": lambda file: tomllib.loads(file.read_text()),
    ".json": lambda file: json.loads(file.read_text()),
    ".jsonl": lambda file: [json.loads(line) for line in file.read_text().splitlines()],
    ".safetensors": read_safetensors,
    ".png": read_png,
}


def damaged(folder: Path) -> list[str]:
    """The files that do not load, but for temporary ones."""
    found = []
    for file in sorted(folder.rglob("*")):
        if file.is_dir() or file.suffix == ".tmp":
            continue
        try:
            READERS[file.suffix](file)
        except Exception as error:  # any error means that the file is damaged
            found.append(f"{file.name}: {error}")
    return found


def leftovers(folder: Path) -> list[str]:
    return [file.name for file in sorted(folder.rglob("*.tmp"))]


def reached(folder: Path) -> str:
    """How far a run had come."""
    if (folder / "metrics.json").exists():
        return "complete"
    if (folder / "model.safetensors").exists():
        return "model saved"
    if (folder / "checkpoint.safetensors").exists():
        state = read_safetensors(folder / "checkpoint.safetensors")["hdnn-training"]
        return f"checkpoint of epoch {json.loads(state)['epoch']}"
    return "config written" if (folder / "config.toml").exists() else "nothing written"


def outcome(folder: Path) -> tuple[bytes, list[float]]:
    """The model's file, and the losses of all epochs."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return (folder / "model.safetensors").read_bytes(), [json.loads(one)["loss"] for one in lines]


# The command


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="folder for kill.json and kill.md")
    options = parser.parse_args()
    if options.kills < 1 or options.epochs < 1:
        parser.error("--kills and --epochs must be at least 1")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        result = killed_and_resumed(Path(place), options)
    page = markdown(result)
    print(page)
    report.keep(result, page, "kill", options.out)
    return 0 if result["same"] == result["kills"] else 1


def killed_and_resumed(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    finish(start(place / "warm", 1))  # kernels are compiled here, and not again
    begin = time.perf_counter()
    finish(start(place / "whole", options.epochs))
    whole = time.perf_counter() - begin
    expected = outcome(place / "whole")
    draw = random.Random(options.seed)
    rows = []
    for k in range(options.kills):
        folder = place / f"killed-{k}"
        moment = whole * (k + draw.random()) / options.kills
        running = kill(start(folder, options.epochs), moment)
        row: dict[str, Any] = {"seconds": round(moment, 2), "running": running}
        row |= {"reached": reached(folder), "damaged": damaged(folder)}
        row["temporary"] = leftovers(folder)
        finish(start(folder, options.epochs, "--resume"))
        row["after"] = damaged(folder) + leftovers(folder)
        row["same"] = outcome(folder) == expected
        rows.append(row)
        print(f"{k + 1}/{options.kills}: {row}", file=sys.stderr, flush=True)
    seed = f" --seed {options.seed}" if options.seed else ""
    good = [r for r in rows if r["same"] and not r["damaged"] and not r["after"]]
    return {
        "command": f"python benchmarks/kill.py --kills {options.kills} --epochs "
        f"{options.epochs}{seed}",
        "training": " ".join(("hdnn", *TRAIN, "--epochs", str(options.epochs))),
        "machine": report.machine("cpu"),
        "seconds": round(whole, 2),
        "kills": options.kills,
        "same": len(good),
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    about = report.on_one_line(result["machine"])
    lines = ["# Killed and resumed", "", f"`{result['command']}`, {about}.", ""]
    lines += [
        f"`{result['training']}` takes {result['seconds']:.1f} s when it is left alone. It was "
        f"killed (SIGKILL) {result['kills']} times, each in a folder of its own, and resumed. "
        f"**{result['same']} of {result['kills']}** ended with the same model, bit by bit, and "
        "with no file by halves.",
    ]
    rows = [
        [
            f"{r['seconds']:.2f} s" + ("" if r["running"] else " (it had ended)"),
            r["reached"],
            ", ".join(r["damaged"]) or "none",
            len(r["temporary"]),
            "yes" if r["same"] else "NO",
            ", ".join(r["after"]) or "nothing",
        ]
        for r in result["rows"]
    ]
    head = "killed after | what was there | damaged files | temporary files"
    return "\n".join(lines + report.table(f"{head} | same bits | left behind", rows)) + "\n"


if __name__ == "__main__":
    sys.exit(main())
