"""A language model of characters: leapfrog blocks against a pre-norm residual transformer.

    python benchmarks/language.py --device cuda --out docs/results
    python benchmarks/language.py --quick                              # does it run? on a CPU

The text is the source of Python's own library, which is on every machine; its last tenth is for
validation. Both models have the same blocks (F = attention, then MLP, normalised first; the last
projections start at 0), so the same number of parameters, and the same steps, batches and rates:
the residual transformer computes x += F(x), the leapfrog one p += F(q), q += p, with q = x and
p = 0 at the beginning and q for the head at the end. For each model three rates are tried with a
seed of their own at the smallest depth; the best one is then trained with three other seeds at all
depths. On a GPU several trainings run at a time, each in a process of its own.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import statistics
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from blocks import Attention
from report import command, head, say, table, text_of
from torch import Tensor, nn
from torch.nn import functional as F

import hdnn

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "d": 256,
        "tokens": 256,
        "batch": 32,
        "steps": 1000,
        "depths": (8, 32),
    },
    "quick": {"d": 32, "tokens": 32, "batch": 4, "steps": 10, "depths": (2,)},
}
RATES = (5e-4, 1e-3, 2e-3)
SEEDS = (1, 2, 3)
WARMUP = 0.1  # the part of a training in which the rate rises
CLIP = 1.0
TOGETHER = 6  # trainings at a time on a GPU: one alone waits for its host
MODELS = ("residual", "leapfrog")


class Branches(nn.Module):
    """What a pre-norm block adds to its input: attention, and the MLP after it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.attention = Attention(d)
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)
        for last in (self.attention.join, self.down):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention(x)
        return a + self.down(F.gelu(self.up(self.norm(x + a))))


class LanguageModel(nn.Module):
    def __init__(
        self, kind: str, d: int, depth: int, tokens: int, letters: int
    ) -> None:
        super().__init__()
        self.kind = kind
        self.letter = nn.Embedding(letters, d)
        self.place = nn.Embedding(tokens, d)
        blocks = [Branches(d) for _ in range(depth)]
        self.stack = nn.ModuleList(blocks)
        if kind == "leapfrog":
            self.stack = hdnn.Reversible(
                [hdnn.Leapfrog(block) for block in blocks]
            )
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, letters)
        nn.init.normal_(self.letter.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letter(text) + self.place.weight[: text.shape[1]]
        if self.kind == "leapfrog":
            x = self.stack(torch.cat([torch.zeros_like(x), x], -1)).chunk(
                2, -1
            )[1]
        else:
            for block in self.stack:  # pyright: ignore[reportGeneralTypeIssues]
                x = x + block(x)
        return self.head(self.norm(x))


@functools.cache
def corpus() -> tuple[Tensor, Tensor, int]:
    """Numbers of the characters for training and validation, and how many kinds there are."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    text = "\n".join(
        file.read_text(encoding="utf-8", errors="ignore") for file in files
    )
    kinds = sorted(
        letter for letter, count in Counter(text).items() if count > 50
    )
    number = {letter: k for k, letter in enumerate(kinds)}
    numbers = torch.tensor([number.get(letter, number[" "]) for letter in text])
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:], len(kinds)


def batch_of(
    text: Tensor, count: int, tokens: int, generator: torch.Generator
) -> Tensor:
    """Pieces of the text, of one letter more than tokens, (count, tokens + 1)."""
    starts = torch.randint(len(text) - tokens, (count,), generator=generator)
    at = starts[:, None] + torch.arange(tokens + 1)
    return text[at.to(text.device)]


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    with torch.autocast(text.device.type, torch.bfloat16):
        scores = model(text[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), text[:, 1:].flatten())


Task = tuple[str, int, float, int]  # model, depth, rate, seed


def optimiser_of(
    model: nn.Module, rate: float, device: str
) -> torch.optim.Optimizer:
    """AdamW; matrices decay, and nothing else."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, rate, betas=(0.9, 0.95), fused=device == "cuda"
    )


def rate_factor(step: int, steps: int) -> float:
    """The factor of the rate: it rises, then falls as a cosine to a twentieth."""
    rising = min(1.0, (step + 1) / (WARMUP * steps))
    return rising * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))


def trained(task: Task, sizes: dict[str, Any], device: str) -> dict[str, Any]:
    """The loss on validation after a training."""
    kind, depth, rate, seed = task
    train, validation, letters = corpus()
    train = train.to(device)
    validation = validation.to(device)
    tokens = sizes["tokens"]
    batch = sizes["batch"]
    torch.manual_seed(seed)
    model = LanguageModel(kind, sizes["d"], depth, tokens, letters).to(device)
    optimiser = optimiser_of(model, rate, device)
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for step in range(sizes["steps"]):
        for group in optimiser.param_groups:
            group["lr"] = rate * rate_factor(step, sizes["steps"])
        loss = loss_of(model, batch_of(train, batch, tokens, generator))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
    model.eval()
    generator = torch.Generator().manual_seed(0)  # the same pieces for all
    losses = []
    with torch.no_grad():
        for _ in range(min(40, sizes["steps"])):
            text = batch_of(validation, batch, tokens, generator)
            losses.append(float(loss_of(model, text)))
    row = {
        "kind": kind,
        "depth": depth,
        "rate": rate,
        "seed": seed,
        "loss": statistics.mean(losses),
        "seconds": time.perf_counter() - start,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    say(str(row))
    return row


def all_of(
    tasks: list[Task], sizes: dict[str, Any], device: str
) -> list[dict[str, Any]]:
    if device == "cpu":
        return [trained(task, sizes, device) for task in tasks]
    with multiprocessing.get_context("spawn").Pool(TOGETHER) as pool:
        return pool.starmap(
            trained, [(task, sizes, device) for task in tasks], chunksize=1
        )


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    first = sizes["depths"][0]
    tried = all_of(
        [(kind, first, rate, 0) for kind in MODELS for rate in RATES],
        sizes,
        device,
    )
    best = {}
    for kind in MODELS:
        rows = [row for row in tried if row["kind"] == kind]
        best[kind] = min(rows, key=lambda row: row["loss"])["rate"]
    tasks: list[Task] = []
    for depth in sorted(
        sizes["depths"], reverse=True
    ):  # the longest trainings first
        for seed in SEEDS:
            tasks += [(kind, depth, best[kind], seed) for kind in MODELS]
    return {"best": best, "tried": tried, "rows": all_of(tasks, sizes, device)}


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    lines = head("A language model of characters", result)
    lines += [
        "",
        f"Loss on validation after {sizes['steps']} steps ({sizes['d']} features, "
        f"{sizes['tokens']} tokens, batch {sizes['batch']}), mean (least to most) of "
        f"{len(SEEDS)} seeds, at the best of {len(RATES)} rates for {sizes['depths'][0]} blocks.",
    ]
    rows = []
    for depth in sizes["depths"]:
        residual = None
        for kind in MODELS:
            same = [
                r
                for r in result["rows"]
                if r["kind"] == kind and r["depth"] == depth
            ]
            losses = [r["loss"] for r in same]
            mean = statistics.mean(losses)
            residual = residual or mean
            loss = f"{mean:.4f} ({min(losses):.4f} to {max(losses):.4f})"
            against = f"{100 * (mean / residual - 1):+.2f}%"
            about = [f"{same[0]['parameters']:,}", result["best"][kind]]
            rows.append([kind, depth, *about, loss, against])
    lines += table(
        "model | blocks | parameters | rate | loss | against residual", rows
    )
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(command("language", __doc__, SIZES, run, page))
