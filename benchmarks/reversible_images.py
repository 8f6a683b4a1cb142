"""Images: reversible blocks against ResNet-56, with no more parameters and the same recipe.

    python benchmarks/reversible_images.py --device cuda --out docs/results
    python benchmarks/reversible_images.py --quick               # does it run? on a CPU, on noise

A block is what a ResNet adds to its input, F = normalisation, activation and convolution, twice. It
stands in `hdnn.Leapfrog`: p += F(q), q += p. So each stage is a stack of determinant 1, whose
gradients do not vanish and which can be undone. Stages are joined by a pooling and a convolution of
1 x 1. There are fewer blocks than in ResNet-56, and wider ones. Accuracy in % is that of the test
images after the last epoch; recipe and ResNet-56 are those of the table of CIFAR-10, and nothing
was searched for the reversible network.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

import report
import torch
from rivals import say
from torch import Tensor, nn

import hdnn
from hdnn.data import cifar10
from hdnn.data.images import ImageData
from hdnn.training.images import ImageTraining, recipes

SIZES: dict[str, dict[str, Any]] = {
    "full": {"epochs": 40, "seeds": (0, 1, 2), "networks": ("reversible",)},
    "quick": {"epochs": 1, "seeds": (0,), "networks": ("tiny",)},
}
SHAPES = {  # channels of half a state, and blocks, for each of the three stages
    "reversible": ((32, 5), (64, 5), (96, 2)),
    "tiny": ((4, 2), (6, 1), (8, 1)),
}
TOGETHER = 3  # trainings at a time on a GPU


def normalised(channels: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.GELU())


class Residual(nn.Sequential):
    """What a pre-activation ResNet adds to its input; it starts at 0."""

    def __init__(self, channels: int) -> None:
        first, last = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        nn.init.zeros_(last.weight)
        norms = [normalised(channels) for _ in range(2)]
        super().__init__(norms[0], first, norms[1], last)


class ReversibleResNet(nn.Module):
    """Three stages of leapfrog blocks on images."""

    def __init__(self, shape: tuple[tuple[int, int], ...], classes: int = 10) -> None:
        super().__init__()
        channels = [c for c, _ in shape]
        self.stem = nn.Conv2d(3, 2 * channels[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList(
            hdnn.Reversible([hdnn.Leapfrog(Residual(c), dim=1) for _ in range(count)])
            for c, count in shape
        )
        self.joints = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(2 * a, 2 * b, 1, bias=False))
            for a, b in pairwise(channels)
        )
        self.norm = normalised(2 * channels[-1])
        self.linear = nn.Linear(2 * channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stages[0](self.stem(x))
        for joint, stage in zip(self.joints, self.stages[1:], strict=True):  # pyright: ignore
            y = stage(joint(y))
        return self.linear(self.norm(y).mean((2, 3)))


@functools.cache
def images(device: str, quick: bool) -> ImageData:
    if not quick:
        return cifar10.load().to(device)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60, 3, 8, 8), generator=draw, dtype=torch.uint8)
    t = torch.randint(0, 10, (60,), generator=draw)
    return ImageData(
        "noise", x[:40], t[:40], x[40:], t[40:], tuple("0123456789"), (0.5,) * 3, (0.25,) * 3
    )


def trained(network: str, seed: int, epochs: int, device: str, quick: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = ReversibleResNet(SHAPES[network]).to(device)
    if device == "cuda":
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    recipe = recipes.cifar("resnet56", epochs, seed)
    if quick:
        recipe = type(recipe)(**{**recipe.to_dict(), "batch": 20, "pad": 1})
    training, start = ImageTraining(model, images(device, quick), recipe), time.perf_counter()
    for _ in range(epochs):
        training.run_epoch()
    training.test()
    row: dict[str, Any] = {
        "network": network,
        "seed": seed,
        "test": 100 * training.history.test[-1],
    }
    row |= {"parameters": sum(p.numel() for p in model.parameters())}
    row |= {"seconds": time.perf_counter() - start}
    say(f"{network}, seed {seed}: {row['test']:.2f}% after {row['seconds']:.0f} s")
    return row


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    quick = "tiny" in sizes["networks"]
    each = [
        (network, seed, sizes["epochs"], device, quick)
        for network in sizes["networks"]
        for seed in sizes["seeds"]
    ]
    if device == "cpu":
        return {"rows": [trained(*one) for one in each]}
    with multiprocessing.get_context("spawn").Pool(TOGETHER) as pool:
        return {"rows": pool.starmap(trained, each, chunksize=1)}


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    about = report.on_one_line(result["machine"])
    lines = ["# Reversible blocks on images", "", f"`{result['command']}`, {about}", ""]
    lines += [
        f"CIFAR-10 (JPEG q75), {sizes['epochs']} epochs, accuracy in % on the test images: mean "
        "± standard deviation (worst to best) of the seeds. ResNet-56, with 853,018 parameters and "
        "by the same recipe, is at 88.80 ± 0.13 ([table](table-cifar-40.md)).",
        "",
    ]
    table = []
    for network in sizes["networks"]:
        rows = [row for row in result["rows"] if row["network"] == network]
        found = sorted(row["test"] for row in rows)
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        middle = f"{statistics.mean(found):.2f} ± {spread:.2f} ({found[0]:.2f} to {found[-1]:.2f})"
        table.append([network, f"{rows[0]['parameters']:,}", len(rows), middle])
    lines += report.table("network | parameters | seeds | test", table)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(report.command("reversible_images", __doc__, SIZES, run, page))
