"""Kill a training at random moments, resume it, and compare the weights bit by bit.

    python benchmarks/kill.py
    python benchmarks/kill.py --kills 20 --out docs/results

One call of `hdnn.training.fit` is left alone. Each of the others has a folder of its own, gets
SIGKILL at a moment drawn from its part of the time that the first one took, and is then resumed.
Right after the kill the checkpoint must load; after the resume the model and its losses must be
those of the training that was left alone.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report

from hdnn import io

TRAINING = """
import sys, torch, hdnn
data = hdnn.data.planar.swiss_roll()
generator = torch.Generator().manual_seed(0)
net = hdnn.H2(4, 64, T=1.2, generator=generator)
model = hdnn.Model(hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, generator=generator))
folder, epochs = sys.argv[1], int(sys.argv[2])
options = {"epochs": epochs, "folder": folder, "resume": True, "progress": False}
hdnn.training.fit(model, data.x_train, data.t_train, **options)
"""
CHECKPOINT = "checkpoint.safetensors"


def start(folder: Path, epochs: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", TRAINING, str(folder), str(epochs)])


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise SystemExit(f"the training ended with code {process.returncode}")


def kill(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """SIGKILL after this many seconds; True if it was still running then."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def epochs_in(folder: Path) -> int:
    """The epochs of the checkpoint, which must load; 0 if there is none yet."""
    if not (folder / CHECKPOINT).exists():
        return 0
    _, metadata = io.load_tensors(folder / CHECKPOINT)
    return len(metadata["values"]["history"]["loss"])


def same(a: Path, b: Path) -> bool:
    """True if weights and losses are the same, bit by bit."""
    tensors_a, about_a = io.load_tensors(a / CHECKPOINT)
    tensors_b, about_b = io.load_tensors(b / CHECKPOINT)
    losses = [about["values"]["history"]["loss"] for about in (about_a, about_b)]
    equal = all(bool((tensors_a[name] == tensors_b[name]).all()) for name in tensors_a)
    return equal and losses[0] == losses[1]


def killed_and_resumed(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    finish(start(place / "warm", 1))  # kernels are compiled here, and not again
    begin = time.perf_counter()
    finish(start(place / "alone", options.epochs))
    seconds = time.perf_counter() - begin
    draw = random.Random(options.seed)
    rows = []
    for k in range(options.kills):
        folder = place / f"killed-{k}"
        moment = seconds * (k + draw.random()) / options.kills
        running = kill(start(folder, options.epochs), moment)
        row: dict[str, Any] = {"seconds": round(moment, 2), "running": running}
        row["epochs"] = epochs_in(folder)
        finish(start(folder, options.epochs))
        row["same"] = same(place / "alone", folder)
        rows.append(row)
        print(f"{k + 1}/{options.kills}: {row}", file=sys.stderr, flush=True)
    return {
        "command": f"python benchmarks/kill.py --kills {options.kills} --epochs {options.epochs}",
        "machine": report.machine("cpu"),
        "seconds": round(seconds, 2),
        "kills": options.kills,
        "same": sum(row["same"] for row in rows),
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    about = report.on_one_line(result["machine"])
    lines = [
        "# Killed and resumed",
        "",
        f"`{result['command']}`, {about}.",
        "",
        f"A training of 64 layers on the Swiss roll takes {result['seconds']:.1f} s when it is "
        f"left alone, with the start of Python. It was killed (SIGKILL) {result['kills']} times, "
        "each in a folder of its own, and resumed. "
        f"**{result['same']} of {result['kills']}** ended with the same model and losses, bit by "
        "bit.",
        "",
    ]
    rows = []
    for row in result["rows"]:
        after = f"{row['seconds']:.2f} s" + ("" if row["running"] else " (it had ended)")
        rows.append([after, row["epochs"], "yes" if row["same"] else "NO"])
    return "\n".join(lines + report.table("killed after | epochs on disk | same bits", rows)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="folder for kill.json and kill.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = killed_and_resumed(Path(place), options)
    page = markdown(result)
    print(page)
    report.keep(result, page, "kill", options.out)
    return 0 if result["same"] == result["kills"] else 1


if __name__ == "__main__":
    sys.exit(main())
