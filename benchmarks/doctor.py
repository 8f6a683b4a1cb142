"""What `GradientDoctor` adds to the time of a training: the same loop with and without it.

    python benchmarks/doctor.py
    python benchmarks/doctor.py --out docs/results

A model is trained twice at once, with and without a doctor (its defaults: a look at one step in
100, examinations for at most 2.5% of the time). The two take turns of 100 steps, so that slow
drifts of the machine cancel, and the ratio is that of the whole loops, looks and examinations
included. The spread is over rounds.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from report import command, head, table, text_of
from torch import Tensor, nn

from hdnn.analysis import GradientDoctor

TURN = 100  # steps
SIZES = {"full": {"turns": 10, "rounds": 3}, "quick": {"turns": 1, "rounds": 1}}


def perceptron() -> tuple[nn.Module, Tensor, int]:
    hidden: list[nn.Module] = []
    for _ in range(8):
        hidden += [nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, 10)), torch.randn(256, 128), 10


def convolutions() -> tuple[nn.Module, Tensor, int]:
    hidden: list[nn.Module] = []
    for channels in (3, 16, 16, 16):
        hidden += [
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
        ]
    model = nn.Sequential(
        *hidden, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    return model, torch.randn(32, 3, 16, 16), 10


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, batch_first=True, norm_first=True
        )
        self.stack = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(x).mean(1))


def transformer() -> tuple[nn.Module, Tensor, int]:
    return Transformer(), torch.randn(16, 32, 64), 10


MODELS: dict[str, Any] = {
    "perceptron, 9 layers of 128, batch 256": perceptron,
    "convolutions, 4 of 16 channels, batch 32": convolutions,
    "transformer, 4 blocks of 64, 32 tokens, batch 16": transformer,
}


class Loop:
    """One training; `turn` takes its next steps and counts their time."""

    def __init__(self, make: Any, watched: bool, device: str) -> None:
        torch.manual_seed(0)
        model, x, classes = make()
        self.model = model.to(device)
        self.x = x.to(device)
        self.t = torch.randint(classes, (len(x),), device=device)
        self.adam = torch.optim.Adam(self.model.parameters())
        self.doctor = (
            GradientDoctor(self.model, optimizer=self.adam) if watched else None
        )
        if self.doctor is not None:
            self.doctor.__enter__()
        self.seconds = 0.0

    def turn(self) -> None:
        start = time.perf_counter()
        for _ in range(TURN):
            self.adam.zero_grad()
            nn.functional.cross_entropy(self.model(self.x), self.t).backward()
            self.adam.step()
        if self.x.is_cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start


def compare(make: Any, sizes: dict[str, int], device: str) -> dict[str, Any]:
    ratios = []
    steps = []
    examinations = 0
    for _ in range(sizes["rounds"]):
        bare = Loop(make, False, device)
        watched = Loop(make, True, device)
        for k in range(sizes["turns"]):
            for loop in (bare, watched) if k % 2 else (watched, bare):
                loop.turn()
        assert watched.doctor is not None
        watched.doctor.close()
        ratios.append(watched.seconds / bare.seconds)
        steps.append(1e3 * bare.seconds / (TURN * sizes["turns"]))
        examinations = max(examinations, len(watched.doctor.diagnoses))
    return {
        "ratios": sorted(ratios),
        "ms": min(steps),
        "examinations": examinations,
    }


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    return {
        "models": {
            name: compare(make, sizes, device) for name, make in MODELS.items()
        }
    }


def page(result: dict[str, Any]) -> str:
    lines = head("What the doctor costs", result)
    lines += [
        "",
        f"{TURN * result['sizes']['turns']} steps of training with `GradientDoctor` against the "
        "same steps without; all rounds in brackets.",
    ]
    rows = []
    for name, row in result["models"].items():
        ratios = row["ratios"]
        every = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        middle = ratios[len(ratios) // 2]
        ratio = f"{middle:.3f} ({every})"
        rows.append(
            [name, f"{row['ms']:.2f}", ratio, row["examinations"], "<= 1.05"]
        )
    lines += table(
        "model | ms a step | with a doctor | examinations | target", rows
    )
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(command("doctor", __doc__, SIZES, run, page))
