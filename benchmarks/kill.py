"""Kill a training run at random moments, resume it, and compare the weights bit by bit.

    python benchmarks/kill.py
    python benchmarks/kill.py --kills 20 --epochs 600 --out docs/results

One call of `hdnn.training.fit` runs without interruption. Each of the other runs has its own
folder, gets SIGKILL at a random moment, and is then resumed. The moments cover the time that the
first run took from its first file to its end. Right after the kill, the checkpoint must load; at
the end, the model and its losses must be those of the uninterrupted run.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import command, head, say, table, text_of

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
SIZES = {
    "full": {"kills": 20, "epochs": 600, "seed": 0},
    "quick": {"kills": 1, "epochs": 10, "seed": 0},
}


def start(folder: Path, epochs: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(folder), str(epochs)]
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise SystemExit(f"the training ended with code {process.returncode}")


def begun(process: subprocess.Popen[bytes], folder: Path) -> float:
    """Wait for the first file of a training; the time at which it was there."""
    while not (folder / CHECKPOINT).exists() and process.poll() is None:
        time.sleep(0.005)
    return time.perf_counter()


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
    if (
        about_a["values"]["history"]["loss"]
        != about_b["values"]["history"]["loss"]
    ):
        return False
    return all(
        torch.equal(tensor, tensors_b[name])
        for name, tensor in tensors_a.items()
    )


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    """A training alone, and as many that are killed at random moments and resumed."""
    epochs = sizes["epochs"]
    dice = random.Random(sizes["seed"])
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        process = start(place / "alone", epochs)
        begin = begun(process, place / "alone")
        finish(process)
        seconds = time.perf_counter() - begin
        for k in range(sizes["kills"]):
            folder = place / f"killed-{k}"
            moment = seconds * (k + dice.random()) / sizes["kills"]
            process = start(folder, epochs)
            begun(process, folder)
            running = kill(process, moment)
            done = epochs_in(folder)
            finish(start(folder, epochs))
            equal = same(place / "alone", folder)
            rows.append(
                {
                    "seconds": moment,
                    "running": running,
                    "epochs": done,
                    "same": equal,
                }
            )
            say(f"{k + 1}/{sizes['kills']}: {rows[-1]}")
    count = sum(row["same"] for row in rows)
    return {
        "seconds": seconds,
        "rows": rows,
        "same": count,
        "ok": count == len(rows),
    }


def found(result: dict[str, Any]) -> str:
    return f"{result['same']} of {len(result['rows'])} runs end with bit-identical results"


def page(result: dict[str, Any]) -> str:
    kills = result["sizes"]["kills"]
    lines = head("Killed and resumed", result)
    lines += [
        "",
        f"Training 64 layers on the Swiss roll takes {result['seconds']:.1f} s without "
        f"interruption, counted from the first file that is written. {kills} such runs, each in "
        "its own folder, were killed (SIGKILL) and resumed. "
        f"**{result['same']} of {kills}** ended with a bit-identical model and losses.",
    ]
    rows = []
    for row in result["rows"]:
        after = f"{row['seconds']:.2f} s"
        if not row["running"]:
            after += " (it had already ended)"
        rows.append([after, row["epochs"], "yes" if row["same"] else "NO"])
    lines += table("killed after | epochs on disk | bit-identical", rows)
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command(
            "kill", __doc__, SIZES, run, page, devices=("cpu",), found=found
        )
    )
