"""One epoch of MNIST on a CPU, H1 with 8 layers, against the same net in plain PyTorch.

    python benchmarks/mnist.py
    python benchmarks/mnist.py --steps 60 --out docs/results

All start from the same weights and see the same minibatches of 100. The plain forms are an
`nn.Module` with a loop over layers, once by 1 x 1 convolutions and once by matrices on the channels
last, trained by a plain loop with `torch.optim.Adam`. They take turns, a block of steps each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from report import keep, machine
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn import models
from hdnn.data import mnist
from hdnn.data.images import ImageData
from hdnn.training.images import ImageTraining
from hdnn.training.images.recipes import mnist as recipe

H, BATCH, BLOCKS = 0.5, 100, 10


class Plain(nn.Module):
    """Stem, layers y + h J K^T tanh(K y + b) on the channels of each pixel, linear layer."""

    def __init__(self, like: models.MNISTNet, by: str) -> None:
        super().__init__()
        assert like.net is not None
        self.by = by
        self.stem, self.linear = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 28**2, 10)
        self.stem.load_state_dict(like.stem.state_dict())
        with torch.no_grad():  # the features in the order of PyTorch's flatten, channels first
            weight = like.linear.weight.view(10, 28, 28, 8)
            order = weight.permute(0, 3, 1, 2) if by == "convolutions" else weight
            self.linear.weight.copy_(order.reshape(10, -1))
            self.linear.bias.copy_(like.linear.bias)
        self.K = nn.Parameter(like.net.weight("K").detach().clone())
        self.b = nn.Parameter(like.net.weight("b").detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        if self.by == "matrices":
            y = y.permute(0, 2, 3, 1)
        for K, b in zip(self.K, self.b, strict=True):
            if self.by == "matrices":
                w = torch.tanh(y @ K.T + b) @ K
                p, q = w.chunk(2, -1)
                y = y + H * torch.cat([-q, p], -1)
            else:
                z = torch.tanh(F.conv2d(y, K[:, :, None, None], b))
                p, q = F.conv2d(z, K.T[:, :, None, None]).chunk(2, 1)
                y = y + H * torch.cat([-q, p], 1)
        return self.linear(y.flatten(1))

    def smoothness(self) -> Tensor:
        total = torch.zeros(())
        for stack in (self.K, self.b):
            for j in range(1, len(stack)):
                total = total + (stack[j] - stack[j - 1]).square().sum()
        return 0.5 * H * total


def plain_steps(model: Plain, data: ImageData, order: Tensor) -> Iterator[float]:
    """A usual training loop, with the same recipe."""
    like = recipe("h1", 40, 0)
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": like.weight_decay}, {"params": rest}]
    adam = torch.optim.Adam(groups, lr=like.learning_rate)
    x = (data.images_train.float() / 255 - data.mean[0]) / data.std[0]
    model.train()
    for index in order:
        adam.zero_grad()
        loss = F.cross_entropy(model(x[index]), data.t_train[index])
        (loss + like.smoothness * model.smoothness()).backward()
        adam.step()
        yield float(loss.detach())


def our_steps(training: ImageTraining) -> Iterator[float]:
    """Those of `hdnn.training.images`; the loss is what the sum has grown by."""
    before = 0.0
    for _ in training.steps():
        after = float(training.sums[0])
        yield after - before
        before = after


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="of 100 images; an epoch has 600")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown")
    options = parser.parse_args(argv)
    if not 20 <= options.steps <= 600:
        print("steps must be from 20 to 600, those of one epoch.", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    data = mnist.load()
    torch.manual_seed(0)
    net = models.mnist_net("h1", 8, step=H)
    plains = {by: Plain(net, by) for by in ("convolutions", "matrices")}
    # No shifts, so that all see the same images.
    training = ImageTraining(net, data, replace(recipe("h1", 40, 0), pad=0), smooth=(net,))
    training._lay_out()
    order = training.order.clone()
    runs: dict[str, Iterator[float]] = {"hdnn": our_steps(training)}
    runs |= {by: plain_steps(plain, data, order) for by, plain in plains.items()}
    losses: dict[str, list[float]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name, steps in runs.items():  # compilers and caches
        losses[name] += islice(steps, 2)
    blocks = [len(part) for part in torch.arange(2, options.steps).tensor_split(BLOCKS)]
    for block in blocks:
        for name, steps in runs.items():
            start = time.perf_counter()
            losses[name] += islice(steps, block)
            seconds[name].append((time.perf_counter() - start) / block)
    result = summary(losses, seconds, options)
    print(markdown(result))
    keep(result, markdown(result), "mnist-cpu", options.out)
    return 0


def summary(
    losses: dict[str, list[float]], seconds: dict[str, list[float]], options: argparse.Namespace
) -> dict[str, Any]:
    rows = []
    for name, each in seconds.items():
        ratios = [a / b for a, b in zip(each, seconds["hdnn"], strict=True)]
        rows.append(
            {
                "form": name,
                "ratio": statistics.median(ratios),
                "worst": min(ratios),
                "best": max(ratios),
                "loss": statistics.fmean(losses[name][-50:]),
            }
        )
    first = [max(abs(one[k] - losses["hdnn"][k]) for one in losses.values()) for k in range(20)]
    return {
        "command": "python benchmarks/mnist.py",
        "machine": machine("cpu"),
        "threads": options.threads,
        "steps": len(losses["hdnn"]),
        "first_losses_differ_by": max(first),
        "rows": rows,
    }


def markdown(result: dict[str, Any]) -> str:
    lines = ["# MNIST on a CPU: H1 with 8 layers against plain PyTorch", ""]
    lines += [f"`{result['command']}`, {result['threads']} threads, {result['steps']} steps of 100"]
    lines += ["images each, in turns; how many times as long as hdnn a step takes: the median of"]
    lines += [f"{BLOCKS} blocks (least to most).", ""]
    lines += ["| form | ratio | loss, last 50 steps |", "| --- | --- | --- |"]
    for row in result["rows"]:
        span = "" if row["form"] == "hdnn" else f" ({row['worst']:.1f} to {row['best']:.1f})"
        lines += [f"| {row['form']} | {row['ratio']:.1f}{span} | {row['loss']:.4f} |"]
    most = result["first_losses_differ_by"]
    lines += ["", f"The losses of the first 20 steps differ by {most:.1e} at most."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
