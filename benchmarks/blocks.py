"""Deep transformers of coupled blocks: memory that does not grow with depth, and what it costs.

    python benchmarks/blocks.py --device cuda --out docs/results
    python benchmarks/blocks.py --quick                            # does it run? on a CPU

A GPT of coupled blocks (p += attention(q), q += MLP(p)), trained in bf16: each submodule enters
autocast itself, so that it reaches every contestant, in both passes. The page says in which
precision the products of each ran. Memory is the peak of a training step beyond parameters and
their gradients, at several depths. Milliseconds are those of a step, all contestants in turns in
one process: layers that are undone (`hdnn`, with states in float32 and on the grid), stored states,
`torch.utils.checkpoint` of each block, also with states moved to the CPU, and the same blocks by
revlib and memcnn, where these are installed. At the end, the gradients of undone layers on the
grid, with dropout, are compared with those of stored ones, bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from report import command, head, say, spread, table, text_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hdnn
from engine import in_turns

SIZES: dict[str, dict[str, Any]] = {
    "full": {"d": 512, "tokens": 512, "batch": 64, "depths": (12, 48, 96)},
    "quick": {"d": 32, "tokens": 16, "batch": 2, "depths": (2, 4)},
}
Pairs = list[tuple[nn.Module, nn.Module]]


class Attention(nn.Module):
    """Causal attention of d features, normalised first."""

    def __init__(self, d: int, heads: int = 8, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.heads = heads
        self.drop = nn.Dropout(drop)
        self.split = nn.Linear(d, 3 * d)
        self.join = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        three = self.split(self.norm(x)).view(B, T, 3, self.heads, -1)
        q, k, v = three.permute(2, 0, 3, 1, 4)
        values = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.join(values.transpose(1, 2).reshape(B, T, d)))


def mlp(d: int, drop: float = 0.0) -> nn.Module:
    wide, narrow = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
    parts = (nn.LayerNorm(d), wide, nn.GELU(), narrow, nn.Dropout(drop))
    return nn.Sequential(*parts)


class Autocast(nn.Module):
    """A module that runs in bf16 autocast, whoever calls it, and returns float32."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.body(x).float()


def pairs(d: int, depth: int, drop: float = 0.0) -> Pairs:
    torch.manual_seed(0)
    both = []
    for _ in range(depth):
        attention = Autocast(Attention(d, drop=drop))
        both.append((attention, Autocast(mlp(d, drop))))
    return both


class Checkpointed(nn.Module):
    """The same blocks, each by `torch.utils.checkpoint`; `offload` moves states to the CPU."""

    def __init__(self, blocks: list[hdnn.Coupling], offload: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.offload = offload

    def forward(self, y: Tensor) -> Tensor:
        if not self.offload:
            return self.run(y)
        with torch.autograd.graph.save_on_cpu(pin_memory=y.is_cuda):
            return self.run(y)

    def run(self, y: Tensor) -> Tensor:
        for block in self.blocks:
            y = checkpoint(block, y, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return y


def memcnn_net(both: Pairs) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import memcnn  # pyright: ignore[reportMissingImports]
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    layers = []
    for attention, perceptron in both:
        coupling = memcnn.AdditiveCoupling(attention, perceptron, split_dim=-1)
        layer = memcnn.InvertibleModuleWrapper(coupling, keep_input=False)
        layers.append(layer)
    return nn.Sequential(*layers)


def revlib_net(both: Pairs) -> nn.Module:
    import revlib  # pyright: ignore[reportMissingImports]

    parts: list[nn.Module] = []
    for pair in both:
        parts += pair
    return revlib.ReversibleSequential(*parts, split_dim=-1)


def ours(backprop: str, state: str = "float") -> Callable[[Pairs], nn.Module]:
    def make(both: Pairs) -> nn.Module:
        blocks = [hdnn.Coupling(*pair) for pair in both]
        return hdnn.Reversible(blocks, backprop=backprop, state=state)

    return make


def checkpointed(offload: bool) -> Callable[[Pairs], nn.Module]:
    def make(both: Pairs) -> nn.Module:
        return Checkpointed([hdnn.Coupling(*pair) for pair in both], offload)

    return make


WAYS: dict[str, Callable[[Pairs], nn.Module]] = {
    "undone": ours("reversible"),
    "undone, on the grid": ours("reversible", "fixed"),
    "stored": ours("stored"),
    "stored, on the grid": ours("stored", "fixed"),
    "torch.utils.checkpoint": checkpointed(False),
    "torch.utils.checkpoint, offloaded": checkpointed(True),
    "revlib": revlib_net,
    "memcnn": memcnn_net,
}
# At all depths; others only at the largest
OURS = ("undone", "undone, on the grid", "stored")


def measured(
    way: str, depth: int, sizes: dict[str, Any], device: str
) -> dict[str, Any]:
    """Peak MiB of a step beyond parameters and gradients, and the step itself."""
    net = WAYS[way](pairs(sizes["d"], depth)).to(device)
    shape = (sizes["batch"], sizes["tokens"], 2 * sizes["d"])
    y = torch.randn(shape, device=device, requires_grad=True)

    def step() -> None:
        for p in net.parameters():
            p.grad = None
        net(y.clone()).square().mean().backward()

    row: dict[str, Any] = {"way": way, "depth": depth, "step": step}
    row["products"] = precision_of(net, step)
    if device == "cuda":
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        row["mib"] = (torch.cuda.max_memory_allocated() - held) / 2**20
    return row


def precision_of(net: nn.Module, step: Callable[[], None]) -> str:
    """The dtypes of all products of a step, forwards and where layers are computed again."""
    names = set()
    handles = [
        layer.register_forward_hook(
            lambda _module, _inputs, output: names.add(str(output.dtype)[6:])
        )
        for layer in net.modules()
        if isinstance(layer, nn.Linear)
    ]
    step()
    for handle in handles:
        handle.remove()
    return ", ".join(sorted(names))


def identical(depth: int, sizes: dict[str, Any], device: str) -> bool:
    """Whether gradients with dropout, undone on the grid, are those of stored states, all bits."""
    net: Any = WAYS["undone, on the grid"](pairs(sizes["d"], depth, 0.1))
    net.to(device)
    shape = (2, sizes["tokens"], 2 * sizes["d"])
    y = torch.randn(shape, device=device, requires_grad=True)
    gradients = []
    for backprop in ("reversible", "stored"):
        net.backprop = backprop
        torch.manual_seed(1)
        loss = net(y).square().mean()
        gradients.append(torch.autograd.grad(loss, [y, *net.parameters()]))
    return all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def why_not(error: Exception) -> str:
    """Why a rival does not run here, in a short sentence."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    return f"{type(error).__name__}: {str(error).strip()[:120]}"


def at_depth(
    depth: int, ways: Iterable[str], sizes: dict[str, Any], device: str
) -> list[Any]:
    """Rows of all contestants with so many blocks."""
    rows = []
    failed = []
    for way in ways:
        try:
            rows.append(measured(way, depth, sizes, device))
        except Exception as error:  # not to run is a result too
            reason = why_not(error)
            failed.append({"way": way, "depth": depth, "failed": reason})
    times = in_turns({row["way"]: row.pop("step") for row in rows}, device, 0)
    for row in rows:
        row["ms"] = times[row["way"]]
    for row in rows + failed:
        say(str(row))
    return rows + failed


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    rows = []
    last = sizes["depths"][-1]
    for depth in sizes["depths"]:
        rows += at_depth(depth, WAYS if depth == last else OURS, sizes, device)
        if device == "cuda":
            torch.cuda.empty_cache()
    equal = identical(last, sizes, device)
    return {"rows": rows, "identical": equal, "ok": equal}


def found(result: dict[str, Any]) -> str:
    undone = [row for row in result["rows"] if row["way"] == "undone"]
    memory = [f"{row.get('mib', 0):.0f}" for row in undone]
    depths = [str(row["depth"]) for row in undone]
    return f"{', '.join(memory)} MiB with {', '.join(depths)} blocks that are undone"


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    lines = head("Deep transformers of coupled blocks", result)
    lines += [
        "",
        f"A training step in bf16 autocast: {sizes['d']} features, {sizes['tokens']} tokens, "
        f"batch {sizes['batch']}. Milliseconds are medians (least to most) of 5 turns, "
        "memory is MiB at the peak, beyond parameters and gradients.",
    ]
    rows = []
    for row in result["rows"]:
        name = [row["way"], row["depth"]]
        if "failed" in row:
            rows.append([*name, f"does not run: {row['failed']}", "", ""])
        else:
            memory = f"{row['mib']:.0f}" if "mib" in row else ""
            times = spread(row["ms"])
            rows.append([*name, times, memory, row["products"]])
    lines += table("way | blocks | ms | MiB | products in", rows)
    word = "are" if result["identical"] else "are NOT"
    lines += [
        "",
        f"Gradients of undone layers on the grid, with dropout, {word} bit-identical to those "
        "of stored states.",
    ]
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(command("blocks", __doc__, SIZES, run, page, found=found))
