"""Images on a GPU: seconds an epoch of CIFAR-10, and memory and seconds of very deep H2-DNN*.

    python benchmarks/images.py
    python benchmarks/images.py --out docs/results
    python benchmarks/images.py --memory --out docs/results    # without the epochs, and their data

An epoch is a whole one, with crops and flips, in bf16, after two to warm up. Memory is the peak of
one training step of H2-DNN* with 6, 60 and 600 layers a unit, with 64 and with 128 images: what
an image costs is the difference, since weights, their gradients and their copies cost the same.
Seconds are those of a step with 128 images, least to most of three after one to warm up. By
default ("auto") states are stored, or kept at checkpoints where they would take more than a 32nd of
the GPU's memory; the other ways that can be asked for are beside it, as far as they fit.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from report import keep, machine, table

from hdnn import models
from hdnn.data import cifar10
from hdnn.data.images import ImageData
from hdnn.training.images import ImageTraining
from hdnn.training.images import recipes as image_recipes

SPEEDS = [("h1_paper", 250), ("h1_paper", 100), ("h1", 250), ("h1", 100), ("h2", 250)]
SPEEDS += [("resnet56", 250)]
TARGETS = {("h1_paper", 250): 0.8, ("h1_paper", 100): 1.2}
TRAINING = 160  # epochs
H2 = image_recipes.star("h2", TRAINING)
DEPTHS, IMAGES = (6, 60, 600), (64, 128)
WAYS = ("auto", "stored", "checkpoint", "reversible")
EPOCHS, STEPS = 5, 3


def speed(network: str, batch: int, data: ImageData) -> dict[str, Any]:
    """Seconds an epoch."""
    model = image_recipes.build("cifar10", network, {}, 0, TRAINING).cuda()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    recipe = replace(image_recipes.cifar(network, TRAINING, 0), batch=batch)
    training = ImageTraining(model, data, recipe, smooth=tuple(model.units))
    seconds = []
    for _ in range(2 + EPOCHS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        training.run_epoch()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {
        "network": network,
        "batch": batch,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": [round(one, 4) for one in seconds[2:]],
        "first": round(seconds[0], 2),
        "target": TARGETS.get((network, batch)),
    }


def memory(layers: int, backprop: str) -> dict[str, Any]:
    """The peak of a training step in MiB, the part of it that an image costs, and seconds."""
    options = {name: value for name, value in H2.items() if name != "reversible"}
    options |= {"layers": layers, "backprop": backprop, "step": 3 / layers}
    model = models.hdnn_star(**options).cuda()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    peaks, seconds = [], []
    for count in IMAGES:
        x = torch.randn(count, 3, 32, 32, device="cuda")
        model.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = [_step(model, x) for _ in range(1 + STEPS)]
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    image = (peaks[1] - peaks[0]) / (IMAGES[1] - IMAGES[0])
    found = {"layers": layers, "backprop": backprop, "weights": weights, "peaks": peaks}
    return found | {"image": image, "seconds": [round(one, 4) for one in seconds[1:]]}


def _step(model: models.HDNNStar, x: torch.Tensor) -> float:
    """Seconds of one training step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().square().mean()
    model.zero_grad()
    loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def markdown(result: dict[str, Any]) -> str:
    lines = ["# Images on a GPU", "", f"`{result['command']}`: "]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in result["machine"].items()) + "."
    if result["speed"]:
        lines += _epochs(result["speed"])
    channels = ", ".join(map(str, H2["channels"]))
    lines += ["", f"One training step of H2-DNN* ({channels} channels, bf16), memory in MiB:"]
    lines += table(
        f"layers a unit | backprop | weights | peak, {IMAGES[0]} images | {IMAGES[1]} | an image | "
        f"seconds, {IMAGES[1]} images",
        [
            [row["layers"], row["backprop"], f"{row['weights']:.0f}"]
            + [f"{peak:.0f}" for peak in row["peaks"]]
            + [_image(row), f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f}"]
            for row in result["memory"]
        ],
    )
    return "\n".join(lines) + "\n"


def _image(row: dict[str, Any]) -> str:
    """What an image costs; empty for `auto`, which may keep more images in another way."""
    return "" if row["backprop"] == "auto" else f"{row['image']:.2f}"


def _epochs(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["", f"Seconds an epoch of CIFAR-10 (50,000 images), least to most of {EPOCHS}:"]
    return lines + table(
        f"network | parameters | minibatch | seconds | target | {TRAINING} epochs, minutes",
        [
            [
                row["network"],
                f"{row['parameters']:,}",
                row["batch"],
                f"{min(row['seconds']):.3f} to {max(row['seconds']):.3f}",
                row["target"] or "",
                f"{TRAINING * max(row['seconds']) / 60:.1f}",
            ]
            for row in rows
        ],
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    parser.add_argument("--memory", action="store_true", help="no epochs, so no data are needed")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU, and PyTorch finds none.", file=sys.stderr)
        return 2
    deepest = {"stored": DEPTHS[1]}  # of more, all states would not fit
    steps = [
        memory(layers, way)
        for layers in DEPTHS
        for way in WAYS
        if layers <= deepest.get(way, layers)
    ]
    result: dict[str, Any] = {
        "command": "python benchmarks/images.py" + " --memory" * options.memory,
        "machine": machine("cuda"),
        "speed": [],
        "memory": steps,
    }
    if not options.memory:
        data = cifar10.load().to("cuda")
        result |= {"data": data.name, "speed": [speed(*which, data) for which in SPEEDS]}
    print(markdown(result))
    name = "images-memory-cuda" if options.memory else "images-cuda"
    keep(result, markdown(result), name, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
