"""A network of 10,000 layers, trained and certified by two commands.

python benchmarks/deep.py --out docs/results
python benchmarks/deep.py --quick
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from report import command, head, say, text_of

SIZES = {
    "full": {"data": "double_moons", "layers": 10000, "T": 0.8, "epochs": 10},
    "quick": {"data": "double_moons", "layers": 50, "T": 0.8, "epochs": 1},
}


def call(words: list[str], folder: str) -> str:
    """What a command of hdnn prints."""
    say("hdnn " + " ".join(words))
    done = subprocess.run(
        [sys.executable, "-m", "hdnn", *words],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    train = ["train", "--network", "h2", "--out", "runs/deep"]
    for name, value in sizes.items():
        train += [f"--{name}", str(value)]
    certify = ["certify", "runs/deep"]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        trained = call(train, folder)
        middle = time.perf_counter()
        certified = call(certify, folder)
        end = time.perf_counter()
        certificate = json.loads(call([*certify, "--json"], folder))
        with open(f"{folder}/runs/deep/metrics.json") as file:
            metrics = json.load(file)
    return {
        "commands": [" ".join(["hdnn", *words]) for words in (train, certify)],
        "printed": [trained, certified],
        "seconds": [middle - begin, end - middle],
        "train_accuracy": metrics["train_accuracy"],
        "test_accuracy": metrics["test_accuracy"],
        "test_rows": metrics["test_rows"],
        "smallest_norm": certificate["smallest_norm"],
        "largest_norm": certificate["largest_norm"],
        "symplectic_defect": certificate["symplectic_defect"],
        "ok": certificate["holds"] and metrics["test_accuracy"] > 0.5,
    }


def found(result: dict[str, Any]) -> str:
    return (
        f"{result['sizes']['layers']:,} layers get {result['test_accuracy']:.2%} of "
        f"{result['test_rows']:,} test points right; the smallest norm(dy_N/dy_j) is "
        f"{result['smallest_norm']:.5f}, the largest {result['largest_norm']:.2f}"
    )


def page(result: dict[str, Any]) -> str:
    lines = head(f"A network of {result['sizes']['layers']:,} layers", result)
    lines += ["", "Times are for the whole command, including startup."]
    for words, printed, seconds in zip(
        result["commands"], result["printed"], result["seconds"], strict=True
    ):
        lines += ["", f"`{words}`, {seconds:.0f} s:", "", "```"]
        lines += [*printed.strip().splitlines(), "```"]
    return text_of(lines)


if __name__ == "__main__":
    arguments = "deep", __doc__, SIZES, run, page
    raise SystemExit(command(*arguments, devices=("cpu",), found=found))
