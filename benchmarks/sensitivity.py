"""All matrices dy_N/dy_j by closed form, against n passes of autograd, in turns.

python benchmarks/sensitivity.py
python benchmarks/sensitivity.py --features 16 --layers 64
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from report import keep
from torch import Tensor

import hdnn
from hdnn import analysis


def by_autograd(net: hdnn.H2, y: Tensor) -> Tensor:
    """One pass back for each entry of y_N, with the gradients of all states: (N+1, B, n, n)."""
    w, h = net.weights(), float(net.T / net.layers)
    states = [y.clone().requires_grad_()]
    for K_p, K_q, b_p, b_q in zip(w["K_p"], w["K_q"], w["b_p"], w["b_q"], strict=True):
        p, q = states[-1].chunk(2, -1)
        p = p - h * torch.tanh(q @ K_q.T + b_q) @ K_q
        q = q + h * torch.tanh(p @ K_p.T + b_p) @ K_p
        states.append(torch.cat([p, q], -1))
    passes = [
        torch.stack(torch.autograd.grad(states[-1][:, c].sum(), states, retain_graph=True))
        for c in range(y.shape[1])
    ]
    return torch.stack(passes, -1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--features", type=int, default=4)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=125)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--out", type=Path, help="folder for sensitivity.json and .md")
    options = parser.parse_args()
    torch.manual_seed(0)
    net = hdnn.H2(options.features, options.layers, init="paper")
    y = torch.randn(options.batch, options.features)
    both = (lambda: analysis.backward_sensitivity(net, y), lambda: by_autograd(net, y))
    ours, theirs = (function() for function in both)  # which also compiles
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    times = []
    for _ in range(options.turns):
        row = []
        for function in both:
            start = time.perf_counter()
            function()
            row.append(time.perf_counter() - start)
        times.append(row)
    ratios = sorted(b / a for a, b in times)
    result = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}",
        "features": options.features,
        "layers": options.layers,
        "batch": options.batch,
        "ratio": statistics.median(ratios),
        "from": ratios[len(ratios) // 10],
        "to": ratios[-1 - len(ratios) // 10],
        "relative_difference": difference,
    }
    text = (
        f"All dy_N/dy_j of an H2 with {options.features} features and {options.layers} layers, "
        f"batch {options.batch}: {result['ratio']:.1f} times as fast as {options.features} passes "
        f"of autograd (10% to 90% of {options.turns} turns: {result['from']:.1f} to "
        f"{result['to']:.1f}), with a relative difference of {difference:.1e} in float32."
    )
    print(text)
    page = f"# Sensitivities by closed form\n\n{result['machine']}.\n\n{text}\n"
    keep(result, page, "sensitivity", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
