"""Deep transformers of coupled blocks: memory that does not grow with depth, and what it costs.

    python benchmarks/blocks.py --device cuda --out docs/results
    python benchmarks/blocks.py --quick                            # does it run? on a CPU

A GPT of coupled blocks (p += attention(q), q += MLP(p)), trained in bf16 autocast. Memory is the
peak of a training step beyond parameters and their gradients, at several depths. Seconds are those
of a step, all contestants in turns in one process: layers that are undone (`hdnn`, with states in
float32 and on the grid), stored states, `torch.utils.checkpoint` of each block, and the same blocks
by revlib and memcnn, where these are installed. At the end, the gradients of undone layers on the
grid, with dropout, are compared with those of stored ones, bit by bit.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import report
import torch
from rivals import say, why_not
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hdnn

SIZES: dict[str, dict[str, Any]] = {
    "full": {"d": 512, "tokens": 512, "batch": 64, "depths": (12, 48, 96)},
    "quick": {"d": 32, "tokens": 16, "batch": 2, "depths": (2, 4)},
}
TURNS = 5


class Attention(nn.Module):
    """Causal attention of d features, normalised first."""

    def __init__(self, d: int, heads: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.heads, self.drop = nn.LayerNorm(d), heads, nn.Dropout(drop)
        self.split, self.join = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.split(self.norm(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.join(found.transpose(1, 2).reshape(B, T, d)))


def mlp(d: int, drop: float = 0.0) -> nn.Module:
    parts = (nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    return nn.Sequential(*parts, nn.Dropout(drop))


def pairs(d: int, depth: int, drop: float = 0.0) -> list[tuple[nn.Module, nn.Module]]:
    torch.manual_seed(0)
    return [(Attention(d, drop=drop), mlp(d, drop)) for _ in range(depth)]


class Checkpointed(nn.Module):
    """The same blocks, each by `torch.utils.checkpoint`."""

    def __init__(self, blocks: list[hdnn.Coupling]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, y: Tensor) -> Tensor:
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return y


def _memcnn(both: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import memcnn  # pyright: ignore[reportMissingImports]
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    parts = (memcnn.AdditiveCoupling(a, m, split_dim=-1) for a, m in both)
    return nn.Sequential(*(memcnn.InvertibleModuleWrapper(p, keep_input=False) for p in parts))


def _revlib(both: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
    import revlib  # pyright: ignore[reportMissingImports]

    return revlib.ReversibleSequential(*(one for pair in both for one in pair), split_dim=-1)


def _ours(**how: Any) -> Callable[[Any], nn.Module]:
    return lambda both: hdnn.Reversible([hdnn.Coupling(*pair) for pair in both], **how)


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "undone": _ours(backprop="reversible"),
    "undone, on the grid": _ours(backprop="reversible", state="fixed"),
    "stored": _ours(backprop="stored"),
    "stored, on the grid": _ours(backprop="stored", state="fixed"),
    "torch.utils.checkpoint": lambda both: Checkpointed([hdnn.Coupling(*pair) for pair in both]),
    "revlib": _revlib,
    "memcnn": _memcnn,
}


OURS = ("undone", "undone, on the grid", "stored")
"""All that is measured at all depths; the others only at the largest."""


def step_of(net: nn.Module, y: Tensor) -> Callable[[], None]:
    parameters = [*net.parameters()]

    def step() -> None:
        for p in parameters:
            p.grad = None
        with torch.autocast(y.device.type, torch.bfloat16):
            out = net(y.clone())
        out.float().square().mean().backward()

    return step


def measured(way: str, depth: int, sizes: dict[str, Any], device: str) -> dict[str, Any]:
    """Peak MiB of a step beyond parameters and gradients, and the step itself."""
    net = WAYS[way](pairs(sizes["d"], depth)).to(device)
    y = torch.randn(sizes["batch"], sizes["tokens"], 2 * sizes["d"], device=device)
    step = step_of(net, y.requires_grad_())
    step()
    row: dict[str, Any] = {"way": way, "depth": depth, "step": step}
    if device == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    return row


def in_turns(rows: list[dict[str, Any]], device: str) -> None:
    """Milliseconds of the steps, in turns."""
    for row in rows:
        row["ms"] = []
    for _ in range(TURNS):
        for row in rows:
            _wait(device)
            start = time.perf_counter()
            row["step"]()
            _wait(device)
            row["ms"].append(1e3 * (time.perf_counter() - start))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def identical(depth: int, sizes: dict[str, Any], device: str) -> bool:
    """Whether gradients with dropout, undone on the grid, are those of stored states, all bits."""
    net: Any = WAYS["undone, on the grid"](pairs(sizes["d"], depth, 0.1)).to(device)
    y = torch.randn(2, sizes["tokens"], 2 * sizes["d"], device=device, requires_grad=True)
    found = []
    for backprop in ("reversible", "stored"):
        net.backprop = backprop
        torch.manual_seed(1)
        with torch.autocast(device, torch.bfloat16):
            loss = net(y).float().square().mean()
        found.append(torch.autograd.grad(loss, [y, *net.parameters()]))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for depth in sizes["depths"]:
        at_depth = []
        for way in WAYS if depth == sizes["depths"][-1] else OURS:
            try:
                at_depth.append(measured(way, depth, sizes, device))
            except Exception as error:  # a contestant that does not run is a result too
                say(f"{way}, {depth} blocks: {why_not(error)}")
                rows.append({"way": way, "depth": depth, "failed": why_not(error)})
        in_turns(at_depth, device)
        for row in at_depth:
            del row["step"]
            ms = row["ms"] = sorted(row["ms"])
            memory = f", {row['mib']:.0f} MiB" if "mib" in row else ""
            say(f"{row['way']}, {depth} blocks: {statistics.median(ms):.1f} ms{memory}")
        rows += at_depth
        if device == "cuda":
            torch.cuda.empty_cache()
    depth = sizes["depths"][-1]
    equal = identical(depth, sizes, device)
    say(f"gradients of {depth} blocks on the grid, with dropout: equal {equal}")
    return {"rows": rows, "identical": equal}


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    about = report.on_one_line(result["machine"])
    lines = ["# Deep transformers of coupled blocks", "", f"`{result['command']}`, {about}", ""]
    lines += [
        f"A training step in bf16 autocast: {sizes['d']} features, {sizes['tokens']} tokens, "
        f"batch {sizes['batch']}. Milliseconds are medians (least to most) of {TURNS} turns, "
        "memory is MiB at the peak, beyond parameters and gradients.",
        "",
    ]
    table = []
    for row in result["rows"]:
        if "failed" in row:
            table.append([row["way"], row["depth"], f"does not run: {row['failed']}", ""])
            continue
        ms = row["ms"]
        spread = f"{statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f})"
        table.append([row["way"], row["depth"], spread, f"{row.get('mib', float('nan')):.0f}"])
    lines += report.table("way | blocks | ms | MiB", table)
    word = "are" if result["identical"] else "are NOT"
    lines += ["", f"Gradients of undone layers on the grid, with dropout, {word} those of stored"]
    return "\n".join([*lines, "states to the last bit."]) + "\n"


if __name__ == "__main__":
    sys.exit(report.command("blocks", __doc__, SIZES, run, page))
