"""Random networks of all kinds: does any certificate promise what its own numbers violate?

    python benchmarks/certificates.py
    python benchmarks/certificates.py --count 500 --seed 7

Features from 2 to 64, layers from 1 to 512, all activations, weights and steps from tiny to large,
random X, a layer's own X, singular X, random skew J with an odd number of features, tied layers,
learned steps. A violation is a norm of dy_N/dy_j below 1, a matrix that is not symplectic, or a
bound that is exceeded, beyond rounding, where the certificate guarantees otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from report import keep

import hdnn
from hdnn import activations
from hdnn.errors import ConvergenceError
from hdnn.experiments import runner

KINDS = ("H1", "H2", "ImplicitH2", "verlet", "yoshida4", "midpoint", "MS1", "MS2", "MS3", "MLP")
IMPLICIT = ("ImplicitH2", "midpoint")
SAMPLES = 4
PART = 25  # networks of one job


def drawn(seed: int) -> tuple[str, hdnn.networks.Network, torch.Tensor]:
    """A network and states to look at; the seed decides everything."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kind = dice.choice(KINDS)
    layers = round(2 ** dice.uniform(0, 9))
    n = 2 * round(2 ** dice.uniform(0, 5))
    m = n // 2
    h = 10 ** dice.uniform(-3, 0.3)
    if kind in IMPLICIT:  # a larger step need not have a solution
        layers, h = min(layers, 64), 10 ** dice.uniform(-3, -0.5)
    options: dict[str, Any] = {"activation": dice.choice(activations.names())}
    options |= {"generator": generator, "dtype": torch.float64, "tied": dice.random() < 0.2}
    if kind != "MLP":
        options |= {"step": h, "learn_step": dice.random() < 0.2}
    if kind in ("H2", "verlet", "yoshida4", "ImplicitH2"):
        X = [None, normal(m, m), normal(layers, m, m), normal(m, 1) @ normal(1, m)]
        options["X"] = dice.choice(X)
    if kind in ("H1", "midpoint") and dice.random() < 0.7:
        n += dice.random() < 0.5
        J = normal(n, n)
        options["J"] = J - J.mT
    if kind in ("verlet", "yoshida4", "midpoint"):
        net = hdnn.HamiltonianNet(n, layers, kind, **options)
    else:
        net = getattr(hdnn, kind)(n, layers, **options)
    scale = 10 ** dice.uniform(-1, 0.5)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name != "log_h":
                p.copy_(scale * normal(*p.shape) / (1.0 if "b" in name else n**0.5))
    return kind, net, 10 ** dice.uniform(-1, 1) * normal(SAMPLES, n)


def look(job: runner.Job) -> runner.Job:
    """Certify some networks; return what is promised, and what is violated."""
    counts: Counter[str] = Counter()
    broken, smallest = [], float("inf")
    for seed in range(job["first"], job["first"] + job["count"]):
        kind, net, y = drawn(seed)
        try:
            certificate = hdnn.analysis.certify(net, y)
        except ConvergenceError:  # no step, so nothing to certify
            counts[f"{kind}, without a solution"] += 1
            continue
        promise = "guaranteed" if certificate.guaranteed else "not guaranteed"
        counts[f"{kind}, {promise}"] += 1
        if certificate.guaranteed:
            smallest = min(smallest, certificate.smallest_norm)
        elif certificate.smallest_norm < 1:
            counts[f"{kind}, not guaranteed, norm below 1"] += 1
        if certificate.broken:
            broken.append([seed, repr(net), list(certificate.broken)])
    return {"counts": dict(counts), "broken": broken, "smallest": smallest}


def markdown(result: dict[str, Any]) -> str:
    lines = ["# Certificates of random networks", "", f"`{result['command']}`", ""]
    lines += [
        f"{result['networks']} networks, {result['guaranteed']} with a guarantee: "
        f"{len(result['broken'])} violations. The smallest norm(dy_N/dy_j) of a guaranteed one is "
        f"{result['smallest']:.12f}.",
        "",
        "| kind | guaranteed | not guaranteed | with a norm below 1 | without a solution |",
        "| --- | --- | --- | --- | --- |",
    ]
    names = ("guaranteed", "not guaranteed", "not guaranteed, norm below 1", "without a solution")
    for kind in KINDS:
        counts = [result["counts"].get(f"{kind}, {name}", 0) for name in names]
        lines.append(f"| {kind} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", *(f"- seed {seed}: {net}: {what}" for seed, net, what in result["broken"])]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first network's; others follow")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=Path, default=Path("runs") / "certificates")
    parser.add_argument("--out", type=Path, help="folder for certificates.json and .md")
    options = parser.parse_args()
    start = time.perf_counter()
    torch.set_num_threads(1)
    ends = range(options.seed, options.seed + options.count, PART)
    last = options.seed + options.count
    jobs = [{"first": first, "count": min(PART, last - first)} for first in ends]
    path = options.runs / f"results-{hdnn.__version__}.jsonl"
    results = runner.run_all(jobs, look, path, processes=options.processes)
    counts: Counter[str] = Counter()
    for found in results:
        counts.update(found["counts"])
    result = {
        "command": f"python benchmarks/certificates.py --count {options.count} "
        f"--seed {options.seed}",
        "networks": options.count,
        "guaranteed": sum(v for k, v in counts.items() if k.endswith(", guaranteed")),
        "smallest": min(found["smallest"] for found in results),
        "counts": dict(sorted(counts.items())),
        "broken": [entry for found in results for entry in found["broken"]],
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(markdown(result))
    keep(result, markdown(result), "certificates", options.out)
    return 1 if result["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
