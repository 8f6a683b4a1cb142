"""A whole training by the paper's recipe, against the same algorithm in plain PyTorch.

    python benchmarks/training.py
    python benchmarks/training.py --data double_moons --layers 4 --epochs 50

Both start from the same weights and see the same minibatches: for each of them the output layer is
set to zero and takes ten Adam steps, then Adam takes one step on the hidden layers; at the end the
output layer is fitted to all data. The plain form has the best loop over layers that was found
(`engine.plain_h1`), autograd for loss and regulariser, and the fused `torch.optim.Adam` for both,
which is faster than the default. One runs after the other, seed by seed.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from report import command, head, say, table, text_of
from torch import Tensor
from torch.nn import functional as F

import hdnn
from engine import plain_h1
from hdnn.data import planar
from hdnn.training import fit

RATE = 2.5e-2
DECAY = 1e-4
ALPHA = 5e-4
BATCH = 125
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "data": "swiss_roll",
        "layers": 64,
        "T": 1.2,
        "epochs": 50,
        "turns": 3,
    },
    "quick": {
        "data": "swiss_roll",
        "layers": 4,
        "T": 1.2,
        "epochs": 1,
        "turns": 1,
    },
}


class Plain:
    """H1 and its training in plain PyTorch."""

    def __init__(self, net: hdnn.H1, h: float) -> None:
        self.K = net.weight("K").detach().clone().requires_grad_()
        self.b = net.weight("b").detach().clone().requires_grad_()
        self.head = torch.nn.Linear(4, 1)
        self.h = h
        self.adam = torch.optim.Adam([self.K, self.b], lr=RATE, fused=True)

    def features(self, x: Tensor) -> Tensor:
        zero = torch.zeros_like(x)
        return plain_h1(
            torch.cat([x[:, :1], zero, x[:, 1:]], 1), self.K, self.b, self.h
        )

    def solve(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()
        adam = torch.optim.Adam(
            self.head.parameters(), RATE, weight_decay=DECAY, fused=True
        )
        for y, t in parts:
            adam.zero_grad()
            F.binary_cross_entropy_with_logits(self.head(y)[:, 0], t).backward()
            adam.step()

    def epochs(
        self, x: Tensor, t: Tensor, count: int, generator: torch.Generator
    ) -> None:
        for _ in range(count):
            for index in torch.randperm(len(x), generator=generator).split(
                BATCH
            ):
                y = self.features(x[index])
                self.solve([(y.detach(), t[index])] * 10)
                self.adam.zero_grad()
                loss = F.binary_cross_entropy_with_logits(
                    self.head(y)[:, 0], t[index]
                )
                jumps = (
                    self.K.diff(dim=0).square().sum()
                    + self.b.diff(dim=0).square().sum()
                )
                (loss + ALPHA * self.h / 2 * jumps).backward()
                self.adam.step()

    def refit(self, x: Tensor, t: Tensor, generator: torch.Generator) -> None:
        with torch.no_grad():
            y = self.features(x)
        orders = (
            torch.randperm(len(x), generator=generator) for _ in range(50)
        )
        self.solve(
            [(y[i], t[i]) for order in orders for i in order.split(BATCH)]
        )

    def accuracy(self, x: Tensor, t: Tensor) -> float:
        with torch.no_grad():
            return float(
                ((self.head(self.features(x))[:, 0] > 0) == t).double().mean()
            )


def measure(sizes: dict[str, Any], seed: int) -> dict[str, Any]:
    """Both trainings from one seed."""
    layers = sizes["layers"]
    epochs = sizes["epochs"]
    h = sizes["T"] / layers
    points = planar.load(sizes["data"], seed=seed)
    x = points.x_train
    t = points.t_train
    target = t.float()
    source = torch.Generator().manual_seed(seed)
    net = hdnn.H1(4, layers, T=sizes["T"], init="paper", generator=source)
    model = hdnn.Model(
        hdnn.Augment(2, 4, placement=[0, 3]), net, hdnn.SigmoidHead(4)
    )
    options: dict[str, Any] = {
        "solver": "adam",
        "schedule": "constant",
        "learning_rate": RATE,
        "ridge": DECAY,
        "seed": seed,
        "progress": False,
    }
    plain = Plain(net, h)
    fit(copy.deepcopy(model), x[:250], t[:250], epochs=1, **options)  # compile
    # Compared after one epoch: later, rounding has grown, because a training is chaotic.
    model_1 = copy.deepcopy(model)
    plain_1 = Plain(net, h)
    fit(model_1, x, t, epochs=1, **options)
    plain_1.epochs(x, target, 1, torch.Generator().manual_seed(seed))
    moved = (plain_1.K - plain.K).detach().abs().max()
    apart = (model_1.net.weight("K") - plain_1.K).detach().abs().max()
    start = time.perf_counter()
    fit(model, x, t, epochs=epochs, **options)
    ours = time.perf_counter() - start
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    plain.epochs(x, target, epochs, generator)
    plain.refit(x, target, generator)
    theirs = time.perf_counter() - start
    right = model.predict(points.x_test) == points.t_test
    row = {
        "plain_seconds": theirs,
        "hdnn_seconds": ours,
        "ratio": theirs / ours,
        "plain_accuracy": 100 * plain.accuracy(points.x_test, points.t_test),
        "hdnn_accuracy": 100 * float(right.double().mean()),
        "difference_after_one_epoch": float(apart / moved),
    }
    say(str(row))
    return row


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    return {"rows": [measure(sizes, seed) for seed in range(sizes["turns"])]}


def found(result: dict[str, Any]) -> str:
    ratios = [row["ratio"] for row in result["rows"]]
    return (
        f"{min(ratios):.1f} to {max(ratios):.1f} times as fast as the plain loop, from start to "
        f"end, {len(ratios)} seeds"
    )


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    lines = head("A training by the paper's recipe, end to end", result)
    what = f"{sizes['data']}, H1, {sizes['layers']} layers, {sizes['epochs']} epochs"
    lines += ["", f"{what}; one seed a row."]
    rows = []
    for seed, row in enumerate(result["rows"]):
        plain = [
            f"{row['plain_seconds']:.1f} s",
            f"{row['plain_accuracy']:.2f}%",
        ]
        ours = [f"{row['hdnn_seconds']:.2f} s", f"{row['hdnn_accuracy']:.2f}%"]
        rows.append([seed, *plain, *ours, f"{row['ratio']:.0f}"])
    lines += table(
        "seed | plain loop | accuracy | hdnn | accuracy | ratio", rows
    )
    ratio = statistics.median(row["ratio"] for row in result["rows"])
    plain_mean = statistics.fmean(
        row["plain_accuracy"] for row in result["rows"]
    )
    hdnn_mean = statistics.fmean(row["hdnn_accuracy"] for row in result["rows"])
    apart = max(row["difference_after_one_epoch"] for row in result["rows"])
    lines += [
        "",
        f"Median ratio {ratio:.0f}; mean accuracy {plain_mean:.1f}% and {hdnn_mean:.1f}%, of runs "
        "that part where rounding has grown. After one epoch the weights differ by "
        f"{apart:.1e} of how far they have moved.",
    ]
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command(
            "training", __doc__, SIZES, run, page, devices=("cpu",), found=found
        )
    )
