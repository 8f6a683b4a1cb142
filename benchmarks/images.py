"""Images on a GPU: seconds an epoch of CIFAR-10, and the memory of very deep H2-DNN*.

    python benchmarks/images.py
    python benchmarks/images.py --out docs/results

An epoch is a whole one, with crops and flips, in bf16, after two to warm up. Memory is the peak of
one training step of H2-DNN* with 6, 60 and 600 layers a unit, with 64 and with 128 images: what
an image costs is the difference, since weights, their gradients and their copies cost the same.
Beside it the same with stored states, as far as it fits.
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

from hdnn import image_recipes, models
from hdnn.data import cifar10
from hdnn.data.images import ImageData
from hdnn.training.images import ImageTraining

SPEEDS = [("h1_paper", 250), ("h1_paper", 100), ("h1", 250), ("h1", 100), ("h2", 250)]
SPEEDS += [("resnet56", 250)]
TARGETS = {("h1_paper", 250): 0.8, ("h1_paper", 100): 1.2}
TRAINING = 160  # epochs
H2 = image_recipes.star("h2", TRAINING)
DEPTHS, IMAGES = (6, 60, 600), (64, 128)
EPOCHS = 5


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


def memory(layers: int, reversible: bool) -> dict[str, Any]:
    """The peak of a training step in MiB, and what of it an image costs."""
    options = {**H2, "layers": layers, "reversible": reversible, "step": 3 / layers}
    model = models.hdnn_star(**options).cuda()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    peaks = []
    for count in IMAGES:
        x = torch.randn(count, 3, 32, 32, device="cuda")
        model.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    image = (peaks[1] - peaks[0]) / (IMAGES[1] - IMAGES[0])
    found = {"layers": layers, "states": "rebuilt" if reversible else "stored"}
    return found | {"weights": weights, "peaks": peaks, "image": image}


def markdown(result: dict[str, Any]) -> str:
    lines = ["# Images on a GPU", "", f"`{result['command']}`: "]
    lines[-1] += ", ".join(f"{k} {v}" for k, v in result["machine"].items()) + "."
    lines += ["", f"Seconds an epoch of CIFAR-10 (50,000 images), least to most of {EPOCHS}:"]
    lines += table(
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
            for row in result["speed"]
        ],
    )
    channels = ", ".join(map(str, H2["channels"]))
    lines += ["", f"Memory of one training step of H2-DNN* ({channels} channels, bf16), MiB:"]
    lines += table(
        f"layers a unit | states | weights | peak, {IMAGES[0]} images | {IMAGES[1]} | an image",
        [
            [row["layers"], row["states"], f"{row['weights']:.0f}"]
            + [f"{peak:.0f}" for peak in row["peaks"]]
            + [f"{row['image']:.2f}"]
            for row in result["memory"]
        ],
    )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU, and PyTorch finds none.", file=sys.stderr)
        return 2
    memories = [memory(layers, True) for layers in DEPTHS]
    memories += [memory(layers, False) for layers in DEPTHS[:2]]
    data = cifar10.load().to("cuda")
    result = {
        "command": "python benchmarks/images.py",
        "machine": machine("cuda"),
        "data": data.name,
        "speed": [speed(*which, data) for which in SPEEDS],
        "memory": memories,
    }
    print(markdown(result))
    keep(result, markdown(result), "images-cuda", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
