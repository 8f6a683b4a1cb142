"""Are gradients by default as exact as those of the plain loop? Random networks of all kinds.

    python benchmarks/gradients.py --out docs/results
    python benchmarks/gradients.py --device cuda --processes 8 --out docs/results

Each network has a kind, a width, a depth of 6 to 300 layers, a step of 0.01 to 1, an activation, an
initialisation, a dtype and samples of its own, drawn from its number alone. Its gradients are taken
three times: by default; by the plain loop in the same dtype (the layers one by one, with stored
states); and exactly: in float64 for networks in float32, in extended precision (64 bits of
mantissa) for networks in float64, whose exact gradients are computed on the CPU. "Off" is the
relative error of the worst of all gradients, of y_0 and of each parameter. A network fails if its
gradients by default are more than 20 times as far off as those of the plain loop, or not finite
where those of the plain loop are; rounding of the dtype itself (eps) never counts as a failure.

Networks that overflow even in the exact run have no gradients and are counted apart. So are
failures of networks that are chaotic in their dtype: where the plain loop itself is off by more
than a tenth, no digit is left to compare, and which of two wrong gradients is larger is chance.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from torch import Tensor, nn

import hdnn
from hdnn.engine import prepared
from hdnn.engine.kernels.protocol import Stack, Tensors, schedule

KINDS = ("H1", "H2", "verlet", "yoshida4", "MS1", "MS2", "MS3", "h1 unit", "h2 unit")
ACTIVATIONS = ("tanh", "relu", "sigmoid", "softplus", "gelu", "silu", "sin", "identity")
ALLOWED = 20
CHAOTIC = 0.1  # how far off the plain loop is where it has no digit right

Row = dict[str, Any]


def drawn(number: int) -> tuple[Row, nn.Module, Tensor]:
    """The network of that number, what it is, and its samples."""
    generator = torch.Generator().manual_seed(number)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def pick(choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    kind = KINDS[number % len(KINDS)]
    unit = "unit" in kind
    what: Row = {"number": number, "kind": kind, "activation": pick(ACTIVATIONS)}
    what |= {"n": pick((2, 4, 8) if unit else (2, 4, 8, 16, 32)), "init": pick(("scaled", "paper"))}
    what |= {"layers": round(math.exp(uniform(math.log(6), math.log(40 if unit else 300))))}
    what |= {"step": round(math.exp(uniform(math.log(0.01), 0)), 4)}
    what |= {"dtype": pick(("float32", "float64")), "batch": pick((1, 3, 10, 70))}
    if unit:
        what |= {"batch": pick((1, 3)), "dtype": "float32"}
    options: Row = {"step": what["step"], "activation": what["activation"], "init": what["init"]}
    options |= {"generator": generator, "dtype": getattr(torch, what["dtype"])}
    n, N = what["n"], what["layers"]
    if unit:
        net: nn.Module = hdnn.HamiltonianUnit(n, N, network=kind[:2], **options)
        shape: tuple[int, ...] = (what["batch"], n, 5, 5)
    else:
        make = getattr(hdnn, kind, None)
        net = make(n, N, **options) if make else hdnn.HamiltonianNet(n, N, kind, **options)
        shape = (what["batch"], n)
    return what, net, torch.randn(shape, generator=generator, dtype=options["dtype"])


def direction(out: Tensor) -> Tensor:
    """The gradient of y_N that the backward pass starts from."""
    return torch.arange(1, out.numel() + 1, dtype=torch.float64).cos().view(out.shape)


def gradients(net: nn.Module, y: Tensor, device: str, **options: Any) -> list[Tensor]:
    """Of y_0 and of all parameters, in float64."""
    net, leaf = copy.deepcopy(net).to(device), y.to(device).detach().requires_grad_()
    with hdnn.engine.use(**options):
        out = net(leaf)
        out.backward(direction(out).to(out))
    found = [leaf.grad, *(p.grad for p in net.parameters())]
    return [g.cpu().double() for g in found if g is not None]


def looped(net: nn.Module, y: Tensor, device: str) -> list[Tensor]:
    """By the plain loop, with stored states."""
    if isinstance(net, hdnn.HamiltonianUnit):
        # The states of all layers, none of them rebuilt or fused.
        net, leaf = copy.deepcopy(net).to(device), y.to(device).detach().requires_grad_()
        out = net.trajectory(leaf)[-1]
        out.backward(direction(out).to(out))
        found = [leaf.grad, *(p.grad for p in net.parameters())]
        return [g.cpu().double() for g in found if g is not None]
    return gradients(net, y, device, engine="reference", backprop="stored")


def exact(net: nn.Module, y: Tensor) -> list[Tensor]:
    """In float64, or in extended precision if the network is in float64."""
    if y.dtype == torch.float32:
        return looped(copy.deepcopy(net).double(), y.double(), "cpu")
    leaf = y.detach().requires_grad_()
    with prepared.recorded() as record:
        net(leaf)
    call, tensors = record[0]
    g_0, grads = extended(y, direction(y), call.stack, tensors)
    with np.errstate(over="ignore"):
        made = [(t, torch.from_numpy(g.astype(np.float64))) for t, g in grads if t.requires_grad]
        g_0 = torch.from_numpy(g_0.astype(np.float64))
    found = torch.autograd.grad(
        [t for t, _ in made], [*net.parameters()], [g for _, g in made], allow_unused=True
    )
    return [g_0, *(g for g in found if g is not None)]


def extended(
    y: Tensor, g: Tensor, stack: Stack, tensors: Tensors
) -> tuple[Any, list[tuple[Tensor, Any]]]:
    """g_0 and the gradients of the weights of a stack, all in numpy's longest floats."""
    wide, name = (lambda t: t.detach().numpy().astype(np.longdouble)), stack.activation
    x, g, split, coef = wide(y), wide(g), bool(stack.turns), wide(tensors[-1])
    if split:
        K_p, K_q, b_p, b_q, *_ = tensors
        m = x.shape[1] // 2
        halves, gs = [x[:, :m], x[:, m:]], [g[:, :m].copy(), g[:, m:].copy()]
        owners = [(K_q, b_q), (K_p, b_p)]  # by the half that they move
        half, layer = schedule(stack.turns, stack.layers, stack.inverse)
        order = list(zip(half.tolist(), layer.tolist(), coef, strict=True))
    else:
        halves, gs, owners = [x], [g.copy()], [tensors[:2]]
        order = [(0, j, c) for j, c in enumerate(coef)]
    weights = [(wide(K), wide(b)) for K, b in owners]
    d = [(np.zeros_like(K), np.zeros_like(b)) for K, b in weights]
    kept = []
    for half, j, c in order:
        K, b = weights[half][0][j], weights[half][1][j]
        source = halves[1 - half] if split else halves[0]
        z, slope = value_and_slope(source @ K.T + b, name)
        kept.append((source, z, slope))
        halves[half] = halves[half] + c * moved(z, K, stack.kind)
    for (half, j, c), (source, z, slope) in zip(reversed(order), reversed(kept), strict=True):
        K, (dK, db) = weights[half][0][j], d[half]
        delta = gs[half]
        if stack.kind == "identity":
            back = delta
        else:
            turned = np.concatenate(np.split(delta, 2, 1)[::-1], 1) if not split else delta
            if not split:  # J^T delta for the canonical J
                turned[:, turned.shape[1] // 2 :] *= -1
            back = turned @ K.T
            dK[j] += c * z.T @ turned
        u = c * slope * back
        dK[j] += u.T @ source
        db[j] += u.sum(0)
        to = 1 - half if split else 0
        gs[to] = gs[to] + u @ K
    return np.concatenate(gs, 1), [
        (t, g)
        for pair, found in zip(owners, d, strict=True)
        for t, g in zip(pair, found, strict=True)
    ]


def moved(z: Any, K: Any, kind: str) -> Any:
    """What sigma adds to the half that moves."""
    if kind == "identity":
        return z
    out = z @ K
    if kind == "canonical":
        p, q = np.split(out, 2, 1)
        return np.concatenate([-q, p], 1)
    return out


def value_and_slope(a: Any, name: str) -> tuple[Any, Any]:
    """sigma and its slope in numpy's longest floats."""
    one = np.longdouble(1)
    s = one / (one + np.exp(-np.clip(a, -11000, 11000)))  # the logistic function
    if name == "tanh":
        return np.tanh(a), one / np.cosh(np.clip(a, -5000, 5000)) ** 2
    if name == "relu":
        return np.maximum(a, 0), (a > 0).astype(np.longdouble)
    if name == "sigmoid":
        return s, s * (one - s)
    if name == "softplus":
        return np.maximum(a, 0) + np.log1p(np.exp(-np.abs(a))), s
    if name == "silu":
        return a * s, s * (one + a * (one - s))
    if name == "sin":
        return np.sin(a), np.cos(a)
    if name == "gelu":
        Phi = (one + erf(a / np.sqrt(np.longdouble(2)))) / 2
        pi = 4 * np.arctan(one)
        return a * Phi, Phi + a * np.exp(-a * a / 2) / np.sqrt(2 * pi)
    return a, np.ones_like(a)


def erf(x: Any) -> Any:
    """A series of positive terms; beyond 7 it is +-1 to all digits."""
    near = np.clip(x, -7, 7)
    term = total = near * np.exp(-near * near) * 2 / np.sqrt(4 * np.arctan(np.longdouble(1)))
    for k in range(1, 400):
        term = term * 2 * near * near / (2 * k + 1)
        total = total + term
    return np.where(np.abs(x) < 7, total, np.sign(x))


def off(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The relative error of the worst gradient; infinite if one is not finite."""
    if not all(bool(g.isfinite().all()) for g in found):
        return math.inf
    errors = []
    for a, b in zip(found, wanted, strict=True):
        size = max(float(b.abs().max()), 1e-300)  # squares of gradients may be beyond float64
        errors.append(float((a / size - b / size).norm() / (b / size).norm().clamp_min(1.0)))
    return max(errors, default=0.0)


def measured(number: int, device: str) -> Row:
    """Measure one network: how far off it is by default, and by the plain loop."""
    what, net, y = drawn(number)
    what["ran"] = ran(net, y, device)
    wanted = exact(net, y)
    if not all(bool(g.isfinite().all()) for g in wanted):
        return what | {"result": "overflows"}
    default, loop = off(gradients(net, y, device), wanted), off(looped(net, y, device), wanted)
    eps = torch.finfo(y.dtype).eps
    what |= {"default": default, "loop": loop, "ratio": max(default, eps) / max(loop, eps)}
    if math.isinf(loop):
        return what | {"ratio": None, "result": "overflows in its dtype"}
    if what["ratio"] <= ALLOWED:
        return what | {"result": "as exact"}
    return what | {"result": "chaotic" if loop > CHAOTIC else "fails"}


def ran(net: nn.Module, y: Tensor, device: str) -> str:
    """The engine that ran, and the states that gradients came from."""
    if isinstance(net, hdnn.HamiltonianUnit):
        work = torch.float32
        return f"units, {net._chosen_backprop(y.to(device), work)}"
    said = copy.deepcopy(net).to(device).engine_report(batch=len(y))
    engine = "fused" if "fused engine" in said else "reference"
    return f"{engine}, {said.split('backprop ')[1].split()[0]}"


def page(result: Row) -> str:
    """The result in words."""
    about = report.on_one_line(result["machine"])
    lines = [
        f"# Gradients by default against the plain loop's, on {result['machine']['machine']}",
        "",
        f"`{result['command']}`, {about}",
        "",
        f"{result['networks']} random networks: {', '.join(KINDS)}; 6 to 300 layers (units: 40), "
        "steps from 0.01 to 1, both initialisations, all activations, float32 and float64 (units: "
        "float32). Off is the relative error of the worst gradient against float64, or against "
        "extended precision where the network is in float64.",
        "",
        f"**{result['failures']} networks are more than {ALLOWED} times as far off by default as "
        f"by the plain loop, besides {result['chaotic']} for which the plain loop itself has no "
        f"digit right** (it is off by more than {CHAOTIC}, as it is in {result['lost']} of all).",
    ]
    rows = [
        [kind, r["networks"], r["overflow"], f"{r['median']:.2f}", f"{r['worst']:.1f}", r["fails"]]
        for kind, r in result["kinds"].items()
    ]
    head = "kind | networks | of them overflow | median ratio | largest ratio | fail"
    lines += report.table(head, rows)
    share = [
        [how, count, f"{100 * count / result['networks']:.1f}%"] for how, count in result["ran"]
    ]
    lines += report.table("ran on | networks | share", share)
    lines += [
        "",
        "The ratio is how far off gradients are by default over how far off they are by the plain "
        "loop in the same dtype, both at least the rounding of the dtype. Networks that overflow, "
        "in exact arithmetic's range or by the plain loop in their own, have no ratio.",
    ]
    return "\n".join(lines) + "\n"


def summary(rows: list[Row], device: str, command: str) -> Row:
    kinds = {}
    for kind in KINDS:
        of_kind = [r for r in rows if r["kind"] == kind]
        ratios = [r["ratio"] for r in of_kind if r.get("ratio") is not None]
        kinds[kind] = {
            "networks": len(of_kind),
            "overflow": sum("overflows" in r["result"] for r in of_kind),
            "fails": sum(r["result"] == "fails" for r in of_kind),
            "median": float(np.median(ratios)) if ratios else math.nan,
            "worst": max(ratios, default=math.nan),
        }
    worst = sorted((r for r in rows if r.get("ratio")), key=lambda r: -r["ratio"])[:10]
    return {
        "command": command,
        "machine": report.machine(device),
        "networks": len(rows),
        "failures": sum(r["result"] == "fails" for r in rows),
        "chaotic": sum(r["result"] == "chaotic" for r in rows),
        "lost": sum(CHAOTIC < r.get("loop", 0) < math.inf for r in rows),
        "failed": [r for r in rows if r["result"] in ("fails", "chaotic")],
        "kinds": kinds,
        "ran": Counter(r["ran"] for r in rows).most_common(),
        "worst": worst,
    }


def shared_out(options: argparse.Namespace) -> list[Row]:
    """All networks, by several processes."""
    command = [sys.executable, __file__, "--device", options.device]
    command += ["--count", str(options.count), "--first", str(options.first)]
    shares = [
        subprocess.Popen(
            [*command, "--share", f"{k}/{options.processes}"], stdout=subprocess.PIPE, text=True
        )
        for k in range(options.processes)
    ]
    rows = []
    for share in shares:
        printed, _ = share.communicate()
        if share.returncode:
            raise SystemExit(f"a process ended with {share.returncode}")
        rows += [json.loads(line) for line in printed.splitlines()]
    return sorted(rows, key=lambda row: row["number"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=2000, help="how many networks")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder for gradients-DEVICE.json and .md")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; use --device cpu", file=sys.stderr)
        return 2
    numbers = range(options.first, options.first + options.count)
    if options.share:
        torch.set_num_threads(1)
        k, of = map(int, options.share.split("/"))
        for number in numbers[k::of]:
            print(json.dumps(measured(number, options.device)), flush=True)
        return 0
    rows = shared_out(options)
    command = f"python benchmarks/gradients.py --device {options.device} --count {options.count}"
    result = summary(rows, options.device, command)
    print(page(result))
    for row in result["failed"][:20]:
        print(json.dumps(row))
    report.keep(result, page(result), f"gradients-{options.device}", options.out)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
