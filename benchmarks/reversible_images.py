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
from itertools import pairwise
from typing import Any

import torch
from report import command, head, say, table, text_of
from torch import Tensor, nn

import hdnn
from hdnn.data import ImageData, load_cifar10
from hdnn.training import fit_images, recipes

SIZES: dict[str, dict[str, Any]] = {
    "full": {"epochs": 40, "seeds": 3, "shape": "reversible"},
    "quick": {"epochs": 1, "seeds": 1, "shape": "tiny"},
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
        first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        last = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        nn.init.zeros_(last.weight)
        super().__init__(
            normalised(channels), first, normalised(channels), last
        )


class ReversibleResNet(nn.Module):
    """Three stages of leapfrog blocks on images."""

    def __init__(
        self, shape: tuple[tuple[int, int], ...], classes: int = 10
    ) -> None:
        super().__init__()
        channels = [c for c, _ in shape]
        self.stem = nn.Conv2d(3, 2 * channels[0], 3, padding=1, bias=False)
        self.stages = nn.ModuleList()
        for c, count in shape:
            blocks = [hdnn.Leapfrog(Residual(c), dim=1) for _ in range(count)]
            self.stages.append(hdnn.Reversible(blocks))
        self.joints = nn.ModuleList()
        for a, b in pairwise(channels):
            convolution = nn.Conv2d(2 * a, 2 * b, 1, bias=False)
            self.joints.append(nn.Sequential(nn.AvgPool2d(2), convolution))
        self.norm = normalised(2 * channels[-1])
        self.linear = nn.Linear(2 * channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stages[0](self.stem(x))
        for joint, stage in zip(self.joints, self.stages[1:], strict=True):  # pyright: ignore
            y = stage(joint(y))
        return self.linear(self.norm(y).mean((2, 3)))


@functools.cache
def images(shape: str) -> ImageData:
    """CIFAR-10, or noise for the tiny network."""
    if shape != "tiny":
        return load_cifar10()
    source = torch.Generator().manual_seed(0)
    x = torch.randint(
        0, 256, (60, 3, 8, 8), generator=source, dtype=torch.uint8
    )
    t = torch.randint(0, 10, (60,), generator=source)
    classes = tuple("0123456789")
    return ImageData(
        "noise",
        x[:40],
        t[:40],
        x[40:],
        t[40:],
        classes,
        (0.5,) * 3,
        (0.25,) * 3,
    )


def trained(shape: str, seed: int, epochs: int, device: str) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = ReversibleResNet(SHAPES[shape]).to(device)
    options = {"batch": 20, "pad": 1} if shape == "tiny" else {}
    recipe = recipes.image_recipe(
        "cifar10", "resnet56", epochs=epochs, seed=seed, **options
    )
    history = fit_images(model, images(shape), recipe, progress=False)
    row = {
        "seed": seed,
        "test": 100 * history.validation_score[-1],
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": history.seconds,
    }
    say(str(row))
    return row


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    tasks = [
        (sizes["shape"], seed, sizes["epochs"], device)
        for seed in range(sizes["seeds"])
    ]
    if device == "cpu":
        return {"rows": [trained(*task) for task in tasks]}
    with multiprocessing.get_context("spawn").Pool(TOGETHER) as pool:
        return {"rows": pool.starmap(trained, tasks, chunksize=1)}


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    rows = result["rows"]
    lines = head("Reversible blocks on images", result)
    lines += [
        "",
        f"CIFAR-10 (JPEG q75), {sizes['epochs']} epochs, accuracy in % on the test images: mean "
        "± standard deviation (worst to best) of the seeds. ResNet-56, with 853,018 parameters and "
        "by the same recipe, is the first row of `hdnn reproduce table-cifar`.",
    ]
    scores = [row["test"] for row in rows]
    deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
    text = f"{statistics.mean(scores):.2f} ± {deviation:.2f}"
    text += f" ({min(scores):.2f} to {max(scores):.2f})"
    row = [sizes["shape"], f"{rows[0]['parameters']:,}", len(rows), text]
    lines += table("network | parameters | seeds | test", [row])
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(command("reversible_images", __doc__, SIZES, run, page))
