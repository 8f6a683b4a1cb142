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
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import report
import torch
from blocks import Attention
from rivals import say
from torch import Tensor, nn
from torch.nn import functional as F

import hdnn

SIZES: dict[str, dict[str, Any]] = {
    "full": {"d": 256, "tokens": 256, "batch": 32, "steps": 1000, "depths": (8, 32)},
    "quick": {"d": 32, "tokens": 32, "batch": 4, "steps": 10, "depths": (2,)},
}
RATES, SEEDS, WARMUP, CLIP = (5e-4, 1e-3, 2e-3), (1, 2, 3), 0.1, 1.0
TOGETHER = 6  # trainings at a time on a GPU: one alone waits for its host
MODELS = ("residual", "leapfrog")


class Branches(nn.Module):
    """What a pre-norm block adds to its input: attention, and the MLP after it."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        for last in (self.attention.join, self.down):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention(x)
        return a + self.down(F.gelu(self.up(self.norm(x + a))))


class LanguageModel(nn.Module):
    def __init__(self, kind: str, d: int, depth: int, tokens: int, letters: int) -> None:
        super().__init__()
        self.kind = kind
        self.letter, self.place = nn.Embedding(letters, d), nn.Embedding(tokens, d)
        blocks = [Branches(d) for _ in range(depth)]
        self.stack = nn.ModuleList(blocks)
        if kind == "leapfrog":
            self.stack = hdnn.Reversible([hdnn.Leapfrog(block) for block in blocks])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, letters)
        for one in (self.letter, self.place):
            nn.init.normal_(one.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.letter(text) + self.place.weight[: text.shape[1]]
        if self.kind == "leapfrog":
            x = self.stack(torch.cat([torch.zeros_like(x), x], -1)).chunk(2, -1)[1]
        else:
            for block in self.stack:  # pyright: ignore[reportGeneralTypeIssues]
                x = x + block(x)
        return self.head(self.norm(x))


@functools.cache
def corpus() -> tuple[Tensor, Tensor, int]:
    """Numbers of the characters for training and validation, and how many kinds there are."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    text = "\n".join(one.read_text(encoding="utf-8", errors="ignore") for one in files)
    kinds = sorted(letter for letter, count in Counter(text).items() if count > 50)
    number = {letter: k for k, letter in enumerate(kinds)}
    all_of_it = torch.tensor([number.get(letter, number[" "]) for letter in text])
    cut = len(all_of_it) * 9 // 10
    return all_of_it[:cut], all_of_it[cut:], len(kinds)


def batch_of(text: Tensor, count: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Pieces of the text, of one letter more than tokens, (count, tokens + 1)."""
    starts = torch.randint(len(text) - tokens, (count,), generator=generator)
    at = starts[:, None] + torch.arange(tokens + 1)
    return text[at.to(text.device)]


def loss_of(model: nn.Module, text: Tensor) -> Tensor:
    with torch.autocast(text.device.type, torch.bfloat16):
        found = model(text[:, :-1])
    return F.cross_entropy(found.float().flatten(0, 1), text[:, 1:].flatten())


Task = tuple[str, int, float, int]  # model, depth, rate, seed


def trained(task: Task, sizes: dict[str, Any], device: str) -> dict[str, Any]:
    """The loss on validation after a training."""
    kind, depth, rate, seed = task
    train, validation, letters = corpus()
    train, validation = train.to(device), validation.to(device)
    torch.manual_seed(seed)
    model = LanguageModel(kind, sizes["d"], depth, sizes["tokens"], letters).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, rate, betas=(0.9, 0.95), fused=device == "cuda")
    steps, generator = sizes["steps"], torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for step in range(steps):
        warm, share = min(1.0, (step + 1) / (WARMUP * steps)), step / steps
        for group in optimiser.param_groups:
            group["lr"] = rate * warm * (0.05 + 0.475 * (1 + math.cos(math.pi * share)))
        loss = loss_of(model, batch_of(train, sizes["batch"], sizes["tokens"], generator))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
    pieces = torch.Generator().manual_seed(0)  # the same for all
    with torch.no_grad():
        model.eval()
        found = [
            float(loss_of(model, batch_of(validation, sizes["batch"], sizes["tokens"], pieces)))
            for _ in range(min(40, steps))
        ]
    row = {"kind": kind, "depth": depth, "rate": rate, "seed": seed}
    row |= {"loss": statistics.mean(found), "seconds": time.perf_counter() - start}
    row |= {"parameters": sum(p.numel() for p in model.parameters())}
    say(
        ", ".join(
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
        )
    )
    return row


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    tried = _all([(m, sizes["depths"][0], r, 0) for m in MODELS for r in RATES], sizes, device)
    best = {
        kind: min((row for row in tried if row["kind"] == kind), key=lambda row: row["loss"])
        for kind in MODELS
    }
    depths = sorted(sizes["depths"], reverse=True)  # the longest trainings first
    final = [
        (m, depth, best[m]["rate"], seed) for depth in depths for seed in SEEDS for m in MODELS
    ]
    return {"rows": tried + _all(final, sizes, device)}


def _all(tasks: list[Task], sizes: dict[str, Any], device: str) -> list[dict[str, Any]]:
    if device == "cpu":
        return [trained(task, sizes, device) for task in tasks]
    with multiprocessing.get_context("spawn").Pool(TOGETHER) as pool:
        return pool.starmap(trained, [(task, sizes, device) for task in tasks], chunksize=1)


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    about = report.on_one_line(result["machine"])
    lines = ["# A language model of characters", "", f"`{result['command']}`, {about}", ""]
    lines += [
        f"Loss on validation after {sizes['steps']} steps ({sizes['d']} features, "
        f"{sizes['tokens']} tokens, batch {sizes['batch']}), mean (least to most) of "
        f"{len(SEEDS)} seeds, at the best of {len(RATES)} rates for {sizes['depths'][0]} blocks.",
        "",
    ]
    table = []
    for depth in sizes["depths"]:
        means = {}
        for kind in MODELS:
            rows = [r for r in result["rows"] if (r["kind"], r["depth"]) == (kind, depth)]
            final = sorted(r["loss"] for r in rows if r["seed"])
            means[kind] = statistics.mean(final)
            rate = next(r["rate"] for r in rows if r["seed"])
            spread = f"{means[kind]:.4f} ({final[0]:.4f} to {final[-1]:.4f})"
            over = f"{100 * (means[kind] / means['residual'] - 1):+.2f}%"
            table.append([kind, depth, f"{rows[-1]['parameters']:,}", rate, spread, over])
    lines += report.table("model | blocks | parameters | rate | loss | against residual", table)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(report.command("language", __doc__, SIZES, run, page))
