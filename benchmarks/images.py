"""Images on a GPU: seconds per epoch of CIFAR-10, and memory and seconds of very deep H2-DNN*.

    python benchmarks/images.py --out docs/results
    python benchmarks/images.py --speed no    # without the epochs, and their data

Epochs are complete, with crops and flips, in bf16, after two epochs to warm up. Memory is the peak
of one training step of H2-DNN* with 6 and 60 layers per unit, with 64 and with 128 images. The
memory per image is computed from the difference, since weights, their gradients and their copies
cost the same. Seconds are for a step with 128 images, fastest to slowest of three after one to warm
up. By default ("auto") states are stored, or kept at checkpoints where they would take more than
1/32 of the GPU's memory; the table also has the other methods.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from report import command, head, table, text_of

from hdnn import models
from hdnn.data import ImageData, load_cifar10
from hdnn.training import fit_images, recipes

SPEEDS = (("h1", 250), ("h2", 250), ("resnet56", 250))
TARGETS = {("h1", 250): 1.1, ("h2", 250): 1.7}
TRAINING = 160  # epochs of a whole training
CHANNELS = (96, 112, 144)
IMAGES = (64, 128)
WAYS = ("auto", "stored", "checkpoint", "reversible")
EPOCHS = 5
STEPS = 3
SIZES: dict[str, dict[str, Any]] = {
    "full": {"speed": "yes", "depths": (6, 60)},
    "quick": {"speed": "no", "depths": (6,)},
}


def speed(network: str, batch: int, data: ImageData) -> dict[str, Any]:
    """Seconds an epoch."""
    settings = recipes.image_settings("cifar10", network, epochs=TRAINING)
    model = recipes.image_network("cifar10", network, **settings).cuda()
    recipe = recipes.image_recipe(
        "cifar10", network, epochs=2 + EPOCHS, batch=batch
    )
    clock = []
    fit_images(
        model,
        data,
        recipe,
        callbacks=[lambda moment: clock.append(moment.history.seconds)],
        progress=False,
    )
    seconds = [after - before for before, after in pairwise(clock)]
    return {
        "network": network,
        "batch": batch,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": seconds[1:],
        "target": TARGETS.get((network, batch), ""),
    }


def step(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of one training step."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().square().mean()
    model.zero_grad()
    loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def memory(layers: int, backprop: str) -> dict[str, Any]:
    """The peak of a training step in MiB, the part of it that an image costs, and seconds."""
    model = models.hdnn_star(
        "h2",
        layers,
        CHANNELS,
        step=3 / layers,
        activation="gelu",
        norm="after",
        stem_norm=True,
        pool="mean",
        backprop=backprop,
    ).cuda()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    peaks = []
    seconds = []
    for count in IMAGES:
        x = torch.randn(count, 3, 32, 32, device="cuda")
        model.zero_grad()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        seconds = [step(model, x) for _ in range(1 + STEPS)]
        peaks.append(torch.cuda.max_memory_allocated() / 2**20)
    return {
        "layers": layers,
        "backprop": backprop,
        "weights": sum(p.nbytes for p in model.parameters()) / 2**20,
        "peaks": peaks,
        "image": (peaks[1] - peaks[0]) / (IMAGES[1] - IMAGES[0]),
        "seconds": seconds[1:],
    }


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    rows = []
    for layers in sizes["depths"]:
        rows += [memory(layers, way) for way in WAYS]
    epochs = []
    if sizes["speed"] == "yes":
        data = load_cifar10().to("cuda")
        epochs = [speed(network, batch, data) for network, batch in SPEEDS]
    return {"memory": rows, "speed": epochs}


def least_to_most(seconds: list[float]) -> str:
    return f"{min(seconds):.3f} to {max(seconds):.3f}"


def found(result: dict[str, Any]) -> str:
    rows = [row for row in result["speed"] if row["batch"] == 250]
    texts = [f"{row['network']} {min(row['seconds']):.2f}" for row in rows]
    return f"seconds per epoch, batch 250: {', '.join(texts) or 'not measured'}"


def page(result: dict[str, Any]) -> str:
    lines = head("Images on a GPU", result)
    if result["speed"]:
        text = "Seconds per epoch of CIFAR-10 (50,000 images), fastest to slowest of"
        lines += ["", f"{text} {EPOCHS}:"]
        rows = []
        for r in result["speed"]:
            name = [r["network"], f"{r['parameters']:,}", r["batch"]]
            minutes = TRAINING * max(r["seconds"]) / 60
            target = r["target"]
            if target and max(r["seconds"]) > target:
                target = f"{target} (missed)"
            rows.append(
                [
                    *name,
                    least_to_most(r["seconds"]),
                    target,
                    f"{minutes:.1f}",
                ]
            )
        names = "network | parameters | minibatch | seconds | target | "
        names += f"minutes for {TRAINING} epochs"
        lines += table(names, rows)
    channels = ", ".join(map(str, CHANNELS))
    lines += [
        "",
        f"One training step of H2-DNN* ({channels} channels, bf16), memory in MiB:",
    ]
    rows = []
    for r in result["memory"]:
        peaks = [f"{peak:.0f}" for peak in r["peaks"]]
        # "auto" may keep more images in another way, so a difference says nothing.
        image = "" if r["backprop"] == "auto" else f"{r['image']:.2f}"
        name = [r["layers"], r["backprop"], f"{r['weights']:.0f}"]
        rows.append([*name, *peaks, image, least_to_most(r["seconds"])])
    names = (
        f"layers per unit | backprop | weights | peak, {IMAGES[0]} images | "
    )
    names += (
        f"peak, {IMAGES[1]} images | per image | seconds, {IMAGES[1]} images"
    )
    lines += table(names, rows)
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command(
            "images", __doc__, SIZES, run, page, devices=("cuda",), found=found
        )
    )
