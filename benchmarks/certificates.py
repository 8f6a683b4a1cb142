"""Random networks of all kinds: does any certificate guarantee what its own numbers violate?

    python benchmarks/certificates.py --count 10000 --seed 0 --out docs/results
    python benchmarks/certificates.py --quick

Features from 2 to 64, layers from 1 to 512, all activations, weights and steps from tiny to large,
random X, a layer's own X, singular X, random skew J with an odd number of features, tied layers,
learned steps, any rows, gains up to 10. A violation is a norm of dy_N/dy_j below 1, a matrix that
is not symplectic, or a bound that is exceeded, beyond rounding, where the certificate guarantees
otherwise; or a gradient or inverse that is off from the plain loop's by more than 1e-12, and by 20
times as much as these move if the 13th digit of what they start from changes.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from gradients import ALLOWED, CHAOTIC, gradients, off
from report import command, head, table, text_of

import hdnn
from hdnn import activations
from hdnn.errors import ConvergenceError, OptionError

KINDS = (
    "H1",
    "H2",
    "ImplicitH2",
    "verlet",
    "yoshida4",
    "midpoint",
    "MS1",
    "MS2",
    "MS3",
    "MLP",
)
IMPLICIT = ("ImplicitH2", "midpoint")
GAINED = ("H2", "verlet", "yoshida4")
METHODS = ("auto", "stored", "checkpoint", "reversible")
SAMPLES = 4
SIZES = {
    "full": {"count": 10_000, "seed": 0},
    "quick": {"count": 40, "seed": 0},
}
CHUNK = 20  # networks of one job


def drawn(seed: int) -> tuple[str, hdnn.networks.Network, torch.Tensor]:
    """A network and states to look at; the seed decides everything."""
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kind = dice.choice(KINDS)
    layers = round(2 ** dice.uniform(0, 9))
    n = 2 * round(2 ** dice.uniform(0, 5))
    m = n // 2
    h = 10 ** dice.uniform(-3, 0.3)
    if kind in IMPLICIT:  # a larger step need not have a solution
        layers = min(layers, 64)
        h = 10 ** dice.uniform(-3, -0.5)
    options: dict[str, Any] = {
        "activation": dice.choice(activations.names()),
        "generator": generator,
        "dtype": torch.float64,
        "tied": dice.random() < 0.2,
    }
    if kind != "MLP":
        options["step"] = h
        options["learn_step"] = dice.random() < 0.2
    if kind in ("H2", "verlet", "yoshida4", "ImplicitH2"):
        singular = normal(m, 1) @ normal(1, m)
        options["X"] = dice.choice(
            [None, normal(m, m), normal(layers, m, m), singular]
        )
    if kind in GAINED:
        options["rows"] = dice.choice([None, round(2 ** dice.uniform(0, 6))])
        options["gains"] = dice.random() < 0.7
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
        for name, weight in net.named_parameters():
            if name != "log_h":
                size = 1.0 if "b" in name else n**0.5
                weight.copy_(scale * normal(*weight.shape) / size)
            if name.startswith("a"):
                weight.uniform_(-10, 10, generator=generator)
    return kind, net, 10 ** dice.uniform(-1, 1) * normal(SAMPLES, n)


def compared(net: Any, y: Any, backprop: str) -> tuple[bool, list[str]]:
    """True if the default is as exact as the plain loop, which may be chaotic; and violations."""

    def values(noise: float = 0.0, **how: Any) -> list[torch.Tensor]:
        digits = torch.arange(y.numel()).double().cos()
        change = 1 + noise * digits.view(y.shape)
        with hdnn.engine.use(**how), torch.no_grad():
            first = net.inverse(net(change * y) * change)
        grads = [grad.flatten() for grad in gradients(net, change * y, **how)]
        return [first, torch.cat(grads)]

    exact = values(engine="reference", backprop="stored")
    net.backprop = backprop
    error = room = float("inf")
    with suppress(OptionError):  # of states that cannot be rebuilt
        error = off(values(), exact)
        room = off(values(1e-13, engine="reference"), exact)
    small = error <= max(1e-12, ALLOWED * room)
    facts = [] if small or room > CHAOTIC else [f"off by {error:.2g}"]
    if net.J.ndim == 2:
        Phi = hdnn.analysis.backward_sensitivity(net, y)[0]
        if hdnn.analysis.symplectic_defect(Phi, net.J).max() > 1e-13:
            facts.append("not symplectic to 1e-13")
    return small and room <= CHAOTIC, facts


def certified(first: int) -> tuple[Counter[str], list[str], float]:
    """Certify some networks: counts, violations, and the smallest norm with a guarantee."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    violations = []
    smallest = float("inf")
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
        facts = list(certificate.violations)
        if kind in GAINED:
            exact, more = compared(net, y, METHODS[seed % len(METHODS)])
            counts[f"{kind}, as exact as the plain loop"] += exact
            facts += more
        violations += [f"seed {seed}: {net!r}: {fact}" for fact in facts]
    return counts, violations, smallest


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    first = sizes["seed"]
    jobs = range(first, first + sizes["count"], CHUNK)
    counts: Counter[str] = Counter()
    violations = []
    smallest = float("inf")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for job_counts, facts, least in pool.map(certified, jobs):
            counts += job_counts
            violations += facts
            smallest = min(smallest, least)
    return {
        "networks": len(jobs) * CHUNK,
        "counts": dict(sorted(counts.items())),
        "violations": violations,
        "smallest": smallest,
        "ok": not violations,
    }


def found(result: dict[str, Any]) -> str:
    counts = result["counts"].items()
    holds = sum(count for name, count in counts if name.endswith(", holds"))
    return (
        f"{len(result['violations'])} violations of {holds:,} guarantees, in "
        f"{result['networks']:,} random networks"
    )


def page(result: dict[str, Any]) -> str:
    lines = head("Certificates of random networks", result)
    lines += [
        "",
        f"{result['networks']} networks: {len(result['violations'])} violations. Among "
        "the networks with a guarantee, the smallest norm(dy_N/dy_j) is "
        f"{result['smallest']:.12f}.",
    ]
    names = (
        "holds",
        "not known",
        "not guaranteed",
        "norm below 1",
        "without a solution",
        "as exact as the plain loop",
    )
    rows = []
    for kind in KINDS:
        numbers = [result["counts"].get(f"{kind}, {name}", 0) for name in names]
        rows.append([kind, *numbers])
    lines += table("kind | " + " | ".join(names), rows)
    lines += ["", *[f"- {fact}" for fact in result["violations"]]]
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command(
            "certificates",
            __doc__,
            SIZES,
            run,
            page,
            devices=("cpu",),
            found=found,
        )
    )
