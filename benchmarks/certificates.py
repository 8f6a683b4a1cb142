"""Random networks of all kinds: does any certificate promise what its own numbers violate?

    python benchmarks/certificates.py --out docs/results
    python benchmarks/certificates.py --quick

Features from 2 to 64, layers from 1 to 512, all activations, weights and steps from tiny to large,
random X, a layer's own X, singular X, random skew J with an odd number of features, tied layers,
learned steps. A violation is a norm of dy_N/dy_j below 1, a matrix that is not symplectic, or a
bound that is exceeded, beyond rounding, where the certificate guarantees otherwise.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from report import command, on_one_line, table

import hdnn
from hdnn import activations
from hdnn.errors import ConvergenceError

KINDS = ("H1", "H2", "ImplicitH2", "verlet", "yoshida4", "midpoint", "MS1", "MS2", "MS3", "MLP")
IMPLICIT = ("ImplicitH2", "midpoint")
SAMPLES = 4
SIZES = {"full": {"networks": 10_000}, "quick": {"networks": 300}}
CHUNK = 25  # networks of one job


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


def certified(first: int) -> tuple[Counter[str], list[str], float]:
    """Certify some networks: counts, violations, and the smallest norm of a guaranteed one."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    violations, smallest = [], float("inf")
    for seed in range(first, first + CHUNK):
        kind, net, y = drawn(seed)
        try:
            certificate = hdnn.analysis.certify(net, y)
        except ConvergenceError:  # no step, so nothing to certify
            counts[f"{kind}, without a solution"] += 1
            continue
        counts[f"{kind}, {certificate.status}"] += 1
        if certificate.guaranteed:
            smallest = min(smallest, certificate.smallest_norm)
        elif certificate.smallest_norm < 1:
            counts[f"{kind}, norm below 1"] += 1
        violations += [f"seed {seed}: {net!r}: {fact}" for fact in certificate.violations]
    return counts, violations, smallest


def run(size: dict[str, int], device: str) -> dict[str, Any]:
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(certified, range(0, size["networks"], CHUNK)))
    counts = sum((counts for counts, _, _ in results), Counter())
    return {
        "networks": size["networks"],
        "counts": dict(sorted(counts.items())),
        "violations": [fact for _, facts, _ in results for fact in facts],
        "smallest": min(smallest for _, _, smallest in results),
    }


def page(result: dict[str, Any]) -> str:
    names = ("holds", "not known", "not guaranteed", "norm below 1", "without a solution")
    lines = [
        "# Certificates of random networks",
        "",
        f"`{result['command']}`, {on_one_line(result['machine'])}",
        "",
        f"{result['networks']} networks: {len(result['violations'])} violations. The smallest "
        f"norm(dy_N/dy_j) of a guaranteed one is {result['smallest']:.12f}.",
    ]
    rows = [
        [kind, *(result["counts"].get(f"{kind}, {name}", 0) for name in names)] for kind in KINDS
    ]
    lines += table("kind | " + " | ".join(names), rows)
    lines += ["", *(f"- {fact}" for fact in result["violations"])]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    raise SystemExit(command("certificates", __doc__, SIZES, run, page))
