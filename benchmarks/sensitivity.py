"""All matrices dy_N/dy_j by closed form, against n passes of autograd, in turns.

python benchmarks/sensitivity.py
python benchmarks/sensitivity.py --features 16 --layers 64
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from report import command, head, text_of
from torch import Tensor

import hdnn
from hdnn import analysis

SIZES = {
    "full": {"features": 4, "layers": 32, "batch": 125, "turns": 30},
    "quick": {"features": 4, "layers": 8, "batch": 10, "turns": 3},
}


def by_autograd(net: hdnn.H2, y: Tensor) -> Tensor:
    """One pass back for each entry of y_N, with the gradients of all states: (N+1, B, n, n)."""
    w = net.weights()
    h = float(net.T / net.layers)
    states = [y.clone().requires_grad_()]
    for K_p, K_q, b_p, b_q in zip(
        w["K_p"], w["K_q"], w["b_p"], w["b_q"], strict=True
    ):
        p, q = states[-1].chunk(2, -1)
        p = p - h * torch.tanh(q @ K_q.T + b_q) @ K_q
        q = q + h * torch.tanh(p @ K_p.T + b_p) @ K_p
        states.append(torch.cat([p, q], -1))
    passes = []
    for column in range(y.shape[1]):
        entry = states[-1][:, column].sum()
        passes.append(
            torch.stack(torch.autograd.grad(entry, states, retain_graph=True))
        )
    return torch.stack(passes, -1)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = hdnn.H2(sizes["features"], sizes["layers"], init="paper")
    y = torch.randn(sizes["batch"], sizes["features"])
    ours = analysis.backward_sensitivity(net, y)  # which also compiles
    theirs = by_autograd(net, y)
    ratios = []
    for _ in range(sizes["turns"]):
        own = seconds(lambda: analysis.backward_sensitivity(net, y))
        ratios.append(seconds(lambda: by_autograd(net, y)) / own)
    ratios.sort()
    tenth = len(ratios) // 10
    return {
        "ratio": statistics.median(ratios),
        "from": ratios[tenth],
        "to": ratios[-1 - tenth],
        "relative_difference": float(
            (ours - theirs).abs().max() / theirs.abs().max()
        ),
    }


def found(result: dict[str, Any]) -> str:
    return f"all dy_N/dy_j {result['ratio']:.1f} times as fast as by autograd"


def page(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    n = sizes["features"]
    lines = head("Sensitivities by closed form", result)
    lines += [
        "",
        f"All dy_N/dy_j of an H2 with {n} features and {sizes['layers']} layers, batch "
        f"{sizes['batch']}: {result['ratio']:.1f} times as fast as {n} passes of autograd (10% to "
        f"90% of {sizes['turns']} turns: {result['from']:.1f} to {result['to']:.1f}), with a "
        f"relative difference of {result['relative_difference']:.1e} in float32.",
    ]
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command(
            "sensitivity",
            __doc__,
            SIZES,
            run,
            page,
            devices=("cpu",),
            found=found,
        )
    )
