"""What reaches the first layer: H2 beside the networks that people use, all untrained.

python benchmarks/contrast.py
python benchmarks/contrast.py --features 32 --seeds 10

For each network, depth, seed and sample: the norm of the matrix dy_N/dy_0, and how much of a single
random gradient at the output reaches the input, |dL/dy_0| / |dL/dy_N|. For H2 also the bound of its
certificate, below which no gradient of these weights can fall.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import command, head, say, table, text_of
from torch import Tensor, nn

import hdnn

SIZES = {
    "full": {
        "features": 16,
        "depths": [64, 1024],
        "samples": 20,
        "seeds": 5,
        "picture": "docs/results/contrast.png",
    },
    "quick": {
        "features": 4,
        "depths": [4, 8],
        "samples": 2,
        "seeds": 1,
        "picture": "",
    },
}
QUANTILES = {
    "smallest": 0,
    "5% quantile": 0.05,
    "median": 0.5,
    "95% quantile": 0.95,
    "largest": 1,
}
Layer = Callable[[Tensor], Tensor]


def branch(n: int) -> nn.Sequential:
    """Two linear maps with a tanh between them, four times as wide, as PyTorch draws them."""
    return nn.Sequential(nn.Linear(n, 4 * n), nn.Tanh(), nn.Linear(4 * n, n))


def perceptron(n: int, depth: int) -> list[Layer]:
    return [nn.Sequential(nn.Linear(n, n), nn.Tanh()) for _ in range(depth)]


def orthogonal(n: int, depth: int) -> list[Layer]:
    layers = perceptron(n, depth)
    for layer in layers:
        nn.init.orthogonal_(layer[0].weight)
        nn.init.zeros_(layer[0].bias)
    return layers


def residual(n: int, depth: int) -> list[Layer]:
    branches = [branch(n) for _ in range(depth)]
    return [lambda y, F=F: y + F(y) for F in branches]


def post_norm(n: int, depth: int) -> list[Layer]:
    branches = [branch(n) for _ in range(depth)]
    norm = nn.LayerNorm(n)
    return [lambda y, F=F: norm(y + F(y)) for F in branches]


def pre_norm(n: int, depth: int) -> list[Layer]:
    branches = [nn.Sequential(nn.LayerNorm(n), branch(n)) for _ in range(depth)]
    return [lambda y, F=F: y + F(y) for F in branches]


def scaled_norm(n: int, depth: int) -> list[Layer]:
    """LayerNorm scaling: the normalised state of layer j is divided by sqrt(j)."""
    norm = nn.LayerNorm(n)
    branches = [branch(n) for _ in range(depth)]
    return [
        lambda y, F=F, j=j: y + F(norm(y) / math.sqrt(j))
        for j, F in enumerate(branches, start=1)
    ]


def rezero(n: int, depth: int) -> list[Layer]:
    """y + a F(y) with a = 0 at the start: the identity until it is trained."""
    return [lambda y: y for _ in range(depth)]


def h2_network(n: int, depth: int) -> hdnn.H2:
    return hdnn.H2(n, depth, T=8.0, init="paper")


def h2(n: int, depth: int) -> list[Layer]:
    net = h2_network(n, depth)
    w = net.weights()
    h = float(net.T / depth)
    stacks = [w["K_p"], w["K_q"], w["b_p"], w["b_q"]]
    return [
        lambda y, layer=layer: hdnn.functional.h2(
            y, *layer, h, engine="reference"
        )
        for layer in zip(*[stack.split(1) for stack in stacks], strict=True)
    ]


NETWORKS = {
    "H2": h2,
    "perceptron": perceptron,
    "orthogonal perceptron": orthogonal,
    "residual": residual,
    "post-norm residual": post_norm,
    "pre-norm residual": pre_norm,
    "LayerNorm scaling": scaled_norm,
    "ReZero": rezero,
}


def matrices(layers: list[Layer], y: Tensor) -> list[Tensor]:
    """dy_N/dy_j of every layer and sample, as (samples, n, n), for j = 0 .. N-1."""
    jacobians = []
    for layer in layers:
        jacobians.append(torch.func.vmap(torch.func.jacrev(layer))(y).detach())
        y = layer(y).detach()
    product = torch.eye(y.shape[-1], dtype=y.dtype).expand(len(y), -1, -1)
    products = []
    for jacobian in reversed(jacobians):
        product = product @ jacobian
        products.append(product)
    return products[::-1]


def measure(name: str, depth: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """Norms of each layer over samples and seeds, and the ratios of single gradients."""
    norms, ratios = [], []
    for seed in range(sizes["seeds"]):
        torch.manual_seed(seed)
        n = sizes["features"]
        layers = NETWORKS[name](n, depth)
        y = torch.randn(sizes["samples"], n)
        all_matrices = torch.stack(matrices(layers, y))
        norms.append(torch.linalg.matrix_norm(all_matrices, 2))
        g = torch.randn(sizes["samples"], 1, n)
        size = all_matrices[0].abs().amax()  # its square may be below 1e-308
        reached = size * (g @ (all_matrices[0] / size)).norm(dim=-1)
        reached = reached / g.norm(dim=-1)
        ratios.append(reached.flatten())
    norms, ratio = torch.cat(norms, 1), torch.cat(ratios)
    return {
        "network": name,
        "depth": depth,
        "norms": norms.median(1).values.tolist(),
        "smallest": norms[0].min().item(),
        "median": norms[0].median().item(),
        "single": ratio.quantile(torch.tensor([*QUANTILES.values()])).tolist(),
    }


def least_promised(depth: int, sizes: dict[str, Any]) -> float:
    """The bound for every single gradient in the certificate of the H2, of all seeds the least."""
    bounds = []
    for seed in range(sizes["seeds"]):
        torch.manual_seed(seed)
        net = h2_network(sizes["features"], depth)
        bounds.append(hdnn.analysis.gradient_bounds(net)[0].item())
    return min(bounds)


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    rows = []
    for depth in sizes["depths"]:
        for name in NETWORKS:
            say(f"{name}, {depth} layers")
            rows.append(measure(name, depth, sizes))
    bounds = {depth: least_promised(depth, sizes) for depth in sizes["depths"]}
    torch.set_default_dtype(torch.float32)
    if sizes["picture"]:
        draw(rows, Path(sizes["picture"]))
    least = min(row["smallest"] for row in rows if row["network"] == "H2")
    return {"rows": rows, "bounds": bounds, "ok": least >= 1}


def found(result: dict[str, Any]) -> str:
    least = min(
        row["smallest"] for row in result["rows"] if row["network"] == "H2"
    )
    gone = sorted(
        {row["network"] for row in result["rows"] if row["median"] < 1e-3},
    )
    return (
        f"the smallest norm of H2 is {least:.2f}; median norm below 1e-3 at some depth: "
        f"{', '.join(gone) or 'none'}"
    )


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Median norms by layer, a panel for each depth."""
    import matplotlib.pyplot as plt

    depths = sorted({row["depth"] for row in rows})
    figure, axes = plt.subplots(
        len(depths), 1, figsize=(5.2, 6.6), layout="constrained"
    )
    styles = ["-", "--", ":", "-."]
    for axis, depth in zip(axes, depths, strict=True):
        for k, row in enumerate(row for row in rows if row["depth"] == depth):
            axis.semilogy(
                [max(1e-16, value) for value in row["norms"]],
                styles[k % 4],
                label=row["network"],
                linewidth=2.5 if row["network"] == "H2" else 1.3,
            )
        axis.axhline(1, color="gray", linewidth=0.8)
        axis.set_ylim(1e-16, 1e6)
        axis.set_xlabel("layer j")
        axis.set_ylabel("median norm of dy_N/dy_j")
        axis.set_title(f"{depth:,} layers")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    lines = head("What reaches the first layer", result)
    lines += [
        "",
        f"Untrained networks of {sizes['features']} features in float64, {sizes['seeds']} seeds, "
        f"{sizes['samples']} samples each. The columns of norms describe the matrix dy_N/dy_0, "
        "which the theorem is about. The other columns take a single random gradient, which may "
        "shrink, and give the ratio |dL/dy_0| / |dL/dy_N|: in the worst case, "
        "at the 5%, 50% and 95% quantiles, and in the best case.",
        "",
        "The gradients of residual networks and ReZero do not vanish here either. What they lack "
        "is a guarantee: their gradients do not vanish at the start, for weights drawn this way, "
        "but training may change that. For H2, the guarantee holds for any weights.",
    ]
    names = "network | layers | smallest norm | median norm | single gradient: "
    names += " | ".join(QUANTILES)
    cells = [
        [row["network"], row["depth"]]
        + [
            f"{value:.2g}"
            for value in (row["smallest"], row["median"], *row["single"])
        ]
        for row in result["rows"]
    ]
    lines += table(names, cells)
    lines += [
        "",
        "For comparison, what the certificates of these H2 networks guarantee:",
    ]
    names = "layers | norm, at least | single gradient, at least"
    bounds = result["bounds"].items()
    lines += table(names, [[depth, 1, f"{low:.2g}"] for depth, low in bounds])
    lines += ["", "![Median norms by layer](contrast.png)"]
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command("contrast", __doc__, SIZES, run, page, ("cpu",), found)
    )
