"""Are gradients by default as exact as those of the plain loop? Random networks of all kinds.

    python benchmarks/gradients.py --device cpu --count 2000 --out docs/results
    python benchmarks/gradients.py --device cuda --count 2000 --out docs/results

Each network in float32 has a kind, a width, a depth of 6 to 300 layers, a step of 0.01 to 1, an
activation, an initialisation and samples of its own, drawn from its number alone. Its gradients are
taken three times: by default, by the plain loop with stored states, and in float64. The error is
the relative error of the worst of all gradients, of y_0 and of each parameter. A network fails if
its default gradients have more than 20 times the error of those of the plain loop. One rounding
more or less can change either error by a factor of ten, so a network above the limit is measured
again from 9 inputs that differ in their last digits, and fails only if the median is also above
the limit; the page says how many networks were measured again. Networks that overflow have no
gradients and are counted separately. So are failures of networks that are chaotic in float32: if
the error of the plain loop itself is more than a tenth, no digit is left to compare.
"""

from __future__ import annotations

import copy
import math
import os
import random
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from report import command, head, table, text_of
from torch import Tensor, nn

import hdnn

KINDS = (
    "H1",
    "H2",
    "verlet",
    "yoshida4",
    "MS1",
    "MS2",
    "MS3",
    "h1 unit",
    "h2 unit",
)
SIZES = {
    "full": {"count": 2000, "processes": 14},
    "quick": {"count": 9, "processes": 1},
}
ALLOWED = 20
CHAOTIC = 0.1  # how far off the plain loop is where it has no digit right


def drawn(number: int) -> tuple[str, nn.Module, Tensor]:
    """The kind of the network of that number, the network and its samples."""
    dice = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    unit = "unit" in kind
    n = dice.choice((2, 4, 8) if unit else (2, 4, 8, 16, 32))
    layers = round(
        math.exp(dice.uniform(math.log(6), math.log(40 if unit else 300)))
    )
    generator = torch.Generator().manual_seed(number)
    options: dict[str, Any] = {
        "step": math.exp(dice.uniform(math.log(0.01), 0)),
        "activation": dice.choice(hdnn.activations.names()),
        "init": dice.choice(("scaled", "paper")),
        "generator": generator,
    }
    if unit:
        net = hdnn.HamiltonianUnit(n, layers, network=kind[:2], **options)
        shape = (dice.choice((1, 3)), n, 5, 5)
        return kind, net, torch.randn(shape, generator=generator)
    if kind in ("verlet", "yoshida4"):
        net = hdnn.HamiltonianNet(n, layers, kind, **options)
    else:
        net = getattr(hdnn, kind)(n, layers, **options)
    shape = (dice.choice((1, 3, 10, 70)), n)
    return kind, net, torch.randn(shape, generator=generator)


def gradients(net: nn.Module, y: Tensor, **options: Any) -> list[Tensor]:
    """Of y_0 and of all parameters, in float64 on the CPU."""
    net = copy.deepcopy(net)
    leaf = y.detach().requires_grad_()
    with hdnn.engine.use(**options):
        out = net(leaf)
        u = torch.arange(1, out.numel() + 1, dtype=torch.float64).cos()
        out.backward(u.view(out.shape).to(out))
    grads = [leaf.grad, *(p.grad for p in net.parameters())]
    return [g.cpu().double() for g in grads if g is not None]


def off(grads: list[Tensor], exact: list[Tensor]) -> float:
    """The relative error of the worst gradient; infinite if one is not finite."""
    if not all(bool(g.isfinite().all()) for g in grads):
        return math.inf
    errors = [0.0]
    for a, b in zip(grads, exact, strict=True):
        size = max(float(b.abs().max()), 1e-300)
        a, b = a / size, b / size
        errors.append(float((a - b).norm() / b.norm().clamp_min(1.0)))
    return max(errors)


def errors(net: nn.Module, y: Tensor, device: str) -> tuple[float, float]:
    """How far off gradients are by default and by the plain loop; NaN where there are none."""
    plain = {"engine": "reference", "backprop": "stored"}
    exact = gradients(copy.deepcopy(net).double(), y.double(), **plain)
    if not all(bool(g.isfinite().all()) for g in exact):
        return math.nan, math.nan
    net = copy.deepcopy(net).to(device)
    y = y.to(device)
    default = off(gradients(net, y), exact)
    loop = off(gradients(net, y, **plain), exact)
    eps = torch.finfo(torch.float32).eps
    return max(default, eps), max(loop, eps)


def measured(
    number: int, device: str
) -> tuple[str, str, float | None, float | None]:
    """The kind of a network, the result in words, and the first and last ratio of both errors."""
    kind, net, y = drawn(number)
    default, loop = errors(net, y, device)
    if not math.isfinite(loop):
        return kind, "overflows", None, None
    first = ratio = default / loop
    if first > ALLOWED:
        ratios = []
        for seed in range(9):
            noise = torch.Generator().manual_seed(seed)
            factors = 1 + 1e-7 * torch.randn(y.shape, generator=noise)
            default, loop = errors(net, y * factors, device)
            ratios.append(default / loop)
        ratio = median(ratios)
    if ratio <= ALLOWED:
        return kind, "as exact", first, ratio
    return kind, "chaotic" if loop > CHAOTIC else "fails", first, ratio


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    task = partial(measured, device=device)
    context = get_context("spawn")
    with ProcessPoolExecutor(
        min(os.cpu_count() or 1, sizes["processes"]),
        context,
        torch.set_num_threads,
        (1,),
    ) as pool:
        rows = list(pool.map(task, range(sizes["count"]), chunksize=8))
    kinds = {}
    for kind in KINDS:
        own = [row[1:] for row in rows if row[0] == kind]
        counts = Counter(result for result, _, _ in own)
        first = [ratio for _, ratio, _ in own if ratio is not None]
        last = [ratio for _, _, ratio in own if ratio is not None]
        again = sum(ratio > ALLOWED for ratio in first)
        kinds[kind] = {
            **counts,
            "median": median(first),
            "first": max(first),
            "again": again,
            "worst": max(last),
        }
    failures = sum(row.get("fails", 0) for row in kinds.values())
    chaotic = sum(row.get("chaotic", 0) for row in kinds.values())
    return {
        "kinds": kinds,
        "failures": failures,
        "chaotic": chaotic,
        "again": sum(row["again"] for row in kinds.values()),
        "ok": not failures,
    }


def found(result: dict[str, Any]) -> str:
    return (
        f"{result['failures']} of {result['sizes']['count']:,} networks have more than {ALLOWED} "
        f"times the error of the plain loop ({result['again']} before they were measured again); "
        f"this leaves out {result['chaotic']} for which even that loop has no correct digit"
    )


def page(result: dict[str, Any]) -> str:
    machine = result["machine"]["machine"]
    lines = head(f"Default gradients, on {machine}", result)
    lines += [
        "",
        f"{result['sizes']['count']} random networks in float32; errors are measured against "
        f"float64. **For {result['failures']} of them, the default gradients have more than "
        f"{ALLOWED} times the error of the plain loop.** This count leaves out "
        f"{result['chaotic']} networks for which even the plain loop has no correct digit. "
        f"{result['again']} networks were above the limit at first and were measured again, from 9 "
        "inputs that differ in their last digits.",
    ]
    rows = []
    for kind, row in result["kinds"].items():
        ratios = [f"{row[key]:.2f}" for key in ("median", "first", "worst")]
        rows.append(
            [kind, row.get("overflows", 0), *ratios, row.get("fails", 0)]
        )
    names = "kind | overflows | median ratio | largest ratio | largest, measured again"
    lines += table(f"{names} | failures", rows)
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command("gradients", __doc__, SIZES, run, page, found=found)
    )
