"""A whole training by the paper's recipe, against the same algorithm in plain PyTorch.

    python benchmarks/training.py
    python benchmarks/training.py --data double_moons --layers 4 --epochs 50

Both start from the same weights and see the same minibatches: for each of them the output layer is
set to zero and takes ten Adam steps, then Adam takes one step on the hidden layers; at the end the
output layer is fitted to all data. The plain form has the best loop over layers that was found
(`rivals.plain_h1`), autograd for loss and regulariser, and the fused `torch.optim.Adam` for both,
which is faster than the default. One runs after the other, seed by seed.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from report import keep
from rivals import plain_h1
from torch import Tensor
from torch.nn import functional as F

import hdnn
from hdnn.data import planar
from hdnn.training import fit

RATE, DECAY, ALPHA, BATCH = 2.5e-2, 1e-4, 5e-4, 125


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
        return plain_h1(torch.cat([x[:, :1], zero, x[:, 1:]], 1), self.K, self.b, self.h)

    def solve(self, parts: list[tuple[Tensor, Tensor]]) -> None:
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.bias.zero_()
        adam = torch.optim.Adam(self.head.parameters(), RATE, weight_decay=DECAY, fused=True)
        for y, t in parts:
            adam.zero_grad()
            F.binary_cross_entropy_with_logits(self.head(y)[:, 0], t).backward()
            adam.step()

    def epochs(self, x: Tensor, t: Tensor, count: int, generator: torch.Generator) -> None:
        for _ in range(count):
            for index in torch.randperm(len(x), generator=generator).split(BATCH):
                y = self.features(x[index])
                self.solve([(y.detach(), t[index])] * 10)
                self.adam.zero_grad()
                loss = F.binary_cross_entropy_with_logits(self.head(y)[:, 0], t[index])
                jumps = self.K.diff(dim=0).square().sum() + self.b.diff(dim=0).square().sum()
                (loss + ALPHA * self.h / 2 * jumps).backward()
                self.adam.step()

    def refit(self, x: Tensor, t: Tensor, generator: torch.Generator) -> None:
        with torch.no_grad():
            y = self.features(x)
        orders = (torch.randperm(len(x), generator=generator) for _ in range(50))
        self.solve([(y[i], t[i]) for order in orders for i in order.split(BATCH)])

    def accuracy(self, x: Tensor, t: Tensor) -> float:
        with torch.no_grad():
            return float(((self.head(self.features(x))[:, 0] > 0) == t).double().mean())


def measure(data: str, layers: int, T: float, epochs: int, seed: int) -> dict[str, Any]:
    points = planar.load(data, seed=seed)
    x, t = points.x_train, points.t_train
    net = hdnn.H1(4, layers, T=T, init="paper", generator=torch.Generator().manual_seed(seed))
    model = hdnn.Model(hdnn.Augment(2, 4, placement=[0, 3]), net, hdnn.SigmoidHead(4))
    plain = Plain(net, T / layers)
    fit(model, x[:250], t[:250], epochs=1, solver="adam", progress=False)  # compile
    with torch.no_grad():
        net.weight("K").copy_(plain.K)
        net.weight("b").copy_(plain.b)

    target = t.float()
    options: dict[str, Any] = {"solver": "adam", "schedule": "constant", "learning_rate": RATE}
    options |= {"ridge": DECAY, "seed": seed, "progress": False}
    # Compared after one epoch: later, rounding has grown, because a training is chaotic.
    model_1, plain_1 = copy.deepcopy(model), Plain(net, T / layers)
    fit(model_1, x, t, epochs=1, **options)
    plain_1.epochs(x, target, 1, torch.Generator().manual_seed(seed))
    moved = (plain_1.K - plain.K).detach().abs().max()
    apart = float((model_1.net.weight("K") - plain_1.K).detach().abs().max() / moved)
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    fit(model, x, t, epochs=epochs, **options)
    ours = time.perf_counter() - start
    start = time.perf_counter()
    plain.epochs(x, target, epochs, generator)
    plain.refit(x, target, generator)
    theirs = time.perf_counter() - start
    found = float((model.predict(points.x_test) == points.t_test).double().mean())
    return {
        "data": data,
        "layers": layers,
        "epochs": epochs,
        "plain_seconds": theirs,
        "hdnn_seconds": ours,
        "ratio": theirs / ours,
        "plain_accuracy": 100 * plain.accuracy(points.x_test, points.t_test),
        "hdnn_accuracy": 100 * found,
        "difference_after_one_epoch": apart,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=list(planar.SETS), default="swiss_roll")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--T", type=float, default=1.2)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3, help="seeds, one after the other")
    parser.add_argument("--out", type=Path, help="folder for training.json and .md")
    options = parser.parse_args()
    rows = []
    for seed in range(options.turns):
        rows.append(measure(options.data, options.layers, options.T, options.epochs, seed))
        r = rows[-1]
        print(
            f"{r['data']}, H1, {r['layers']} layers, {r['epochs']} epochs: plain "
            f"{r['plain_seconds']:.1f} s ({r['plain_accuracy']:.2f}%), hdnn "
            f"{r['hdnn_seconds']:.2f} s ({r['hdnn_accuracy']:.2f}%): {r['ratio']:.0f}x",
            flush=True,
        )
    if options.out is not None:
        machine = (
            f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        )
        lines = [
            "# A training by the paper's recipe, end to end",
            "",
            f"{machine}; one seed a row.",
        ]
        lines += [
            "",
            "| | plain loop | accuracy | hdnn | accuracy | ratio |",
            "| --- |" + " --- |" * 5,
        ]
        both = [statistics.fmean(r[f"{who}_accuracy"] for r in rows) for who in ("plain", "hdnn")]
        lines += [
            f"| {r['data']}, H1, {r['layers']} layers, {r['epochs']} epochs | "
            f"{r['plain_seconds']:.1f} s | {r['plain_accuracy']:.2f}% | "
            f"{r['hdnn_seconds']:.2f} s | {r['hdnn_accuracy']:.2f}% | {r['ratio']:.0f} |"
            for r in rows
        ]
        lines += [
            "",
            f"Median ratio {statistics.median(r['ratio'] for r in rows):.0f}; mean accuracy "
            f"{both[0]:.1f}% and {both[1]:.1f}%, of runs that part where rounding has grown. After "
            "one epoch the weights differ by "
            f"{max(r['difference_after_one_epoch'] for r in rows):.1e} of how far they have moved.",
        ]
        result = {"machine": machine, "rows": rows}
        keep(result, "\n".join(lines) + "\n", "training", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
