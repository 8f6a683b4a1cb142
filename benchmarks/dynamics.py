"""Learned mechanical systems: FlowMap beside seven rivals, and its error by depth.

    python benchmarks/dynamics.py data
    python benchmarks/dynamics.py train --device cuda

Further stages are depth, long (of the maps of `train`, in float64), time (with a clone of
github.com/jpzxshi/sympnets on PYTHONPATH) and page. Finished jobs have a line in runs.jsonl.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
from report import head, keep, machine, on_one_line, say, table, text_of
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hdnn.dynamics import FlowMap, systems
from hdnn.errors import ConvergenceError, DriftWarning
from hdnn.training.recipes import rate_factor

Result = dict[str, Any]
FOLDER = Path("runs/dynamics")
RUNS = FOLDER / "runs.jsonl"
# Steps of the reference of 100 test trajectories
SYSTEMS = {
    "pendulum": 1000,
    "double_pendulum": 1000,
    "henon_heiles": 1000,
    "kepler": 1000,
    "three_bodies": 100,
    "chain": 1000,
}
OURS: dict[str, Result] = {
    "32 layers": {"layers": 32, "rows": 8},
    "4 layers 4 times": {"layers": 4, "rows": 64, "substeps": 4},
}
OUR_RATES = (1e-2, 3e-2)
RATES = (3e-3, 1e-2, 3e-2)
SEEDS = range(5)
TRAINING = {"steps": 20_000, "batch": 500}
AHEAD = 10  # steps of the error that chooses a form and a rate
DEPTHS = (8, 32, 128, 512)
DEPTH_SYSTEMS = ("henon_heiles", "double_pendulum", "kepler")
REDRAWN = 100  # steps for which rows are drawn at a time
STEPS, LONGEST = 10_000, 100_000  # of rollouts
MOST = 1e12  # stands for an overflow
LEAPFROG = "HNN by leapfrog"

Weights = list[Tensor]
Shapes = list[tuple[tuple[int, ...], float]]  # with standard deviations
Step = Callable[[Tensor], Tensor]  # of scaled states (members, batch, n)

# Rivals: a step of states (members, batch, n) by weights (members, ...)


def perceptron(w: Weights, x: Tensor) -> Tensor:
    for W, b in zip(w[:-2:2], w[1:-2:2], strict=True):
        x = torch.baddbmm(b, x, W).tanh()
    return torch.baddbmm(w[-1], x, w[-2])


def slope(w: Weights, x: Tensor) -> Tensor:
    """The gradient of a perceptron with one output, without its last bias."""
    hidden = []
    for W, b in zip(w[:-1:2], w[1::2], strict=True):
        x = torch.baddbmm(b, x, W).tanh()
        hidden.append(x)
    g = w[-1].mT
    for W, z in zip(w[-3::-2], reversed(hidden), strict=True):
        g = (g - g * z * z) @ W.mT
    return g


def runge_kutta(field: Step, x: Tensor) -> Tensor:
    """Two steps of torchdiffeq's "rk4"."""
    h = 0.5
    for _ in range(2):
        a = field(x)
        b = field(x + h / 3 * a)
        c = field(x + h * (b - a / 3))
        d = field(x + h * (a - b + c))
        x = x + h / 8 * (a + 3 * (b + c) + d)
    return x


def residual(w: Weights, x: Tensor) -> Tensor:
    for k in range(0, len(w), 4):
        x = x + perceptron(w[k : k + 4], x)
    return x


def neural_ode(w: Weights, x: Tensor) -> Tensor:
    return runge_kutta(partial(perceptron, w), x)


def separable_hnn(w: Weights, x: Tensor) -> Tensor:
    """Greydanus et al. 2019 with H = T(p) + V(q), by 4 leapfrog steps."""
    p, q = x.chunk(2, -1)
    p = p - slope(w[5:], q) / 8
    for k in range(4):
        q = q + slope(w[:5], p) / 4
        p = p - slope(w[5:], q) / (4 if k < 3 else 8)
    return torch.cat([p, q], -1)


def general_hnn(w: Weights, x: Tensor) -> Tensor:
    """Greydanus et al. 2019 with any H(y), by 2 steps of rk4."""

    def field(y):
        p, q = slope(w, y).chunk(2, -1)
        return torch.cat([-q, p], -1)

    return runge_kutta(field, x)


def sympnet_g(w: Weights, x: Tensor) -> Tensor:
    """Jin et al. 2020: p and q take turns, `p + K (a * sigmoid(K^T q + b))`."""
    p, q = x.chunk(2, -1)
    for k in range(0, len(w), 3):
        K, a, b = w[k : k + 3]
        push = (a * torch.baddbmm(b, q, K).sigmoid()) @ K.mT
        p, q = q, p + push
    return torch.cat([p, q], -1)


def sympnet_la(w: Weights, x: Tensor) -> Tensor:
    """Jin et al. 2020: `p + (S + S^T) q` in turns, and between these `p + a * sigmoid(q)`."""
    S, bias, a = w
    A, d = S + S.mT, S.shape[-1]
    M = torch.eye(2 * d, dtype=x.dtype, device=x.device)  # of linear maps
    for j in range(S.shape[2]):
        sides = (0, d, d, 0) if j % 2 == 0 else (d, 0, 0, d)
        M = M + M @ nn.functional.pad(A[:, :, j], sides)
    for k in range(a.shape[1]):
        p, q = torch.baddbmm(bias[:, k], x, M[:, k]).chunk(2, -1)
        if k % 2 == 0:
            p = p + a[:, k] * q.sigmoid()
        else:
            q = q + a[:, k] * p.sigmoid()
        x = torch.cat([p, q], -1)
    return torch.baddbmm(bias[:, -1], x, M[:, -1])


def henon_net(w: Weights, x: Tensor) -> Tensor:
    """Burby et al. 2020: a layer is (q, p) -> (p + eta, grad V(p) - q) four times."""
    p, q = x.chunk(2, -1)
    for k in range(0, len(w), 4):
        *V, eta = w[k : k + 4]
        for _ in range(4):
            p, q = slope(V, p) - q, p + eta
    return torch.cat([p, q], -1)


RIVALS: dict[str, dict[str, Callable[[Weights, Tensor], Tensor]]] = {
    "MLP": {"3 hidden layers": perceptron},
    "residual": {"4 blocks": residual},
    "neural ODE": {"2 substeps": neural_ode},
    "HNN": {"T(p) + V(q)": separable_hnn, "H(y)": general_hnn},
    "SympNet G": {"8 layers": sympnet_g},
    "SympNet LA": {"16 activations": sympnet_la},
    "HenonNet": {"4 layers": henon_net, "8 layers": henon_net},
}


def dense(*sizes: int) -> Shapes:
    """Linear layers, spread as PyTorch's."""
    shapes: Shapes = []
    for a, b in pairwise(sizes):
        deviation = (3 * a) ** -0.5
        shapes += [((a, b), deviation), ((1, b), deviation)]
    return shapes


def shapes_of(name: str, form: str, n: int, k: int) -> Shapes:
    """Of the weights of a rival of width k."""
    d = n // 2
    gradient = [((d, k), 0.01), ((1, k), 0.01), ((1, k), 0.0)]
    count = min(16, weights_of_ours(n) // (4 * d * d + 3 * d))
    linear = [((count + 1, k, d, d), 0.01), ((count + 1, 1, n), 0.0)]
    henon = [*dense(d, k, 1)[:-1], ((1, d), 0.1)]
    return {
        "MLP": dense(n, k, k, k, n),
        "residual": 4 * dense(n, k, n),
        "neural ODE": dense(n, k, k, n),
        "T(p) + V(q)": 2 * dense(d, k, k, 1)[:-1],
        "H(y)": dense(n, k, k, 1)[:-1],
        "SympNet G": 8 * gradient,
        "SympNet LA": [*linear, ((count, 1, d), 0.01)],
        "HenonNet": int(form[0]) * henon if name == "HenonNet" else [],
    }[form if name == "HNN" else name]


def weights_of_ours(n: int) -> int:
    return 32 * 2 * 8 * (n // 2 + 2)  # layers, halves, rows


class Rival(NamedTuple):
    """The shapes of a member's weights, and its step."""

    shapes: Shapes
    step: Callable[[Weights, Tensor], Tensor]

    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape, _ in self.shapes]

    def drawn(self, seed: int) -> Tensor:
        deviations = torch.tensor([deviation for _, deviation in self.shapes])
        generator = torch.Generator().manual_seed(seed)
        w = torch.randn(sum(self.sizes()), generator=generator)
        return w * deviations.repeat_interleave(torch.tensor(self.sizes()))

    def __call__(self, flat: Tensor, x: Tensor) -> Tensor:
        pairs = zip(flat.split(self.sizes(), 1), self.shapes, strict=True)
        return self.step([w.view(-1, *shape) for w, (shape, _) in pairs], x)


def rival_of_equal_size(name: str, form: str, n: int) -> Rival:
    """The rival with the width that makes it as large as ours, within a tenth."""
    size = weights_of_ours(n)

    def rival(k):
        return Rival(shapes_of(name, form, n, k), RIVALS[name][form])

    def away(k):
        return abs(sum(rival(k).sizes()) - size)

    return rival(min(range(1, 200), key=away))


# Data


class Data(NamedTuple):
    """Trajectories of a system as they are, and scaled pairs (pairs, 2n)."""

    system: systems.System
    trajectories: Tensor
    centre: Tensor
    scale: Tensor
    train: Tensor
    validation: Tensor  # AHEAD steps apart
    test: Tensor
    truth: Tensor  # scaled, (steps+1, starts, n)

    def energies(self, x: Tensor) -> Tensor:
        return self.system.energy(x.double() * self.scale + self.centre)


def read_data(name: str, device: str) -> Data:
    """The last tenth of the trajectories is for validation, as in `FlowMap.fit`."""
    file = load_file(FOLDER / f"{name}.safetensors", device=device)
    y = file["train"]
    held_out = y.shape[1] // 10
    p, q = y[:-1, :-held_out].flatten(0, 1).chunk(2, -1)
    centre = torch.cat([torch.zeros_like(p[0]), q.mean(0)])
    squares = [p.square().mean(), (q - q.mean(0)).square().mean()]
    scale = torch.stack(squares).sqrt().repeat_interleave(q.shape[1])
    x, truth = (y - centre) / scale, (file["test"] - centre) / scale
    train = pairs_of(x[:, :-held_out], 1)
    validation = pairs_of(x[:, -held_out:], AHEAD)
    test = pairs_of(truth[: len(x)], 1)
    about = systems.get(name), y, centre, scale
    return Data(*about, train, validation, test, truth)


def pairs_of(x: Tensor, steps: int) -> Tensor:
    return torch.cat([x[:-steps], x[steps:]], -1).flatten(0, 1)


# Training and measuring


def learned(rival: Rival, pairs: Tensor, steps: int, batch: int) -> Tensor:
    """Weights (rates, seeds, parameters); all members learn side by side, as `FlowMap.fit`."""
    drawn = torch.stack([rival.drawn(seed) for seed in SEEDS]).to(pairs)
    weights = [drawn.clone().requires_grad_() for _ in RATES]
    adam = torch.optim.Adam([{"params": [w]} for w in weights], fused=True)
    rows = torch.zeros(REDRAWN, len(drawn) * len(RATES), batch)
    rows = rows.long().to(pairs.device)
    generator = torch.Generator(pairs.device).manual_seed(0)
    for k in range(steps):
        if k % REDRAWN == 0:
            rows.random_(0, len(pairs), generator=generator)
        x, y = pairs[rows[k % REDRAWN]].chunk(2, -1)
        losses = (rival(torch.cat(weights), x) - y).square().mean((1, 2))
        adam.zero_grad()
        losses.sum().backward()
        factor = rate_factor(k / steps, steps, 0.02, "cosine")
        for group, rate in zip(adam.param_groups, RATES, strict=True):
            g = group["params"][0].grad
            g /= g.norm(dim=1, keepdim=True).clamp(min=1.0)
            group["lr"] = rate * factor
        adam.step()
    return torch.stack(weights).detach()


@torch.no_grad()
def error(step: Step, members: int, pairs: Tensor, steps: int = 1) -> Tensor:
    """The error after some steps, by member, relative to the size of scaled states."""
    x, y = pairs.expand(members, -1, -1).chunk(2, -1)
    for _ in range(steps):
        x = step(x)
    squares = (x - y).square().sum((1, 2)) / y.square().sum((1, 2))
    return squares.sqrt().double().nan_to_num(MOST, MOST).clamp(max=MOST)


@torch.no_grad()
def measured(step: Step, data: Data, longest: int) -> Result:
    """Errors of a step, valid steps and energy errors of the members, one for each seed."""
    start = data.truth[0]
    H = data.energies(start)
    still = start.clone()
    still[:, : start.shape[1] // 2] = 0  # no momenta
    size = (H - data.energies(still)).mean()
    allowed = data.truth.square().sum(-1).mean().sqrt() / 10
    close, curve = [], {}
    x = start.expand(len(SEEDS), -1, -1)
    for k in range(1, longest + 1):
        x = step(x)
        if k < len(data.truth):
            close.append((x - data.truth[k]).norm(dim=-1) <= allowed)
        if k in (1, 10) or k % 100 == 0:
            moved = (data.energies(x) - H).abs().nan_to_num(MOST)
            moved = (moved.median(1).values / size).nan_to_num(MOST, MOST)
            curve[k] = moved.clamp(max=MOST).tolist()
    valid = torch.stack(close).long().cumprod(0).sum(0).double()
    drawn = [k for k in curve if str(k).strip("0") in ("1", "2", "5")]
    return {
        "error": error(step, len(SEEDS), data.test).tolist(),
        "valid": valid.median(1).values.tolist(),
        "energy": last_tenth(curve, min(STEPS, longest)),
        "late": last_tenth(curve, longest),
        "curve": {k: median(curve[k]) for k in drawn},
    }


def last_tenth(curve: dict[int, list[float]], steps: int) -> list[float]:
    """The mean of the last tenth of the steps, by seed."""
    rows = [curve[k] for k in curve if 0.9 * steps < k <= steps]
    return [mean(values) for values in zip(*rows, strict=True)]


# Jobs, with names (method, form, system, seed) and results for the page


def train_rival(data: Data, name: str, form: str) -> Result:
    rival = rival_of_equal_size(name, form, data.system.features)
    w = learned(rival, data.train, **TRAINING)
    first = partial(rival, w[:, 0])
    errors = error(first, len(RATES), data.validation, AHEAD).tolist()
    best = partial(rival, w[errors.index(min(errors))])
    return measured(best, data, STEPS) | {"validation": errors}


def fitted(data: Data, network: Any, seed: int, **how: Any) -> FlowMap:
    how |= {"seed": seed, "progress": False}
    generator = torch.Generator().manual_seed(seed)
    n, dt = data.system.features, data.system.dt
    flow = FlowMap(n, dt=dt, generator=generator, **network)
    flow.to(data.truth.device)
    try:
        flow.fit(data.trajectories, **how)
    except ConvergenceError as reason:  # its weights, and errors, are NaN
        say(f"{data.system}, {network}: {reason}")
    return flow


def move(flows: list[FlowMap], x: Tensor) -> Tensor:
    pairs = zip(flows, x, strict=True)
    return torch.stack([flow.move(x) for flow, x in pairs])


def train_ours(data: Data, _method: str, form: str) -> Result:
    fit = partial(fitted, data, OURS[form], **TRAINING)
    flows = [fit(0, learning_rate=rate) for rate in OUR_RATES]
    both = partial(move, flows)
    errors = error(both, len(flows), data.validation, AHEAD).tolist()
    best = errors.index(min(errors))
    flows = [flows[best]]
    flows += [fit(seed, learning_rate=OUR_RATES[best]) for seed in SEEDS[1:]]
    file = FOLDER / "flows.safetensors"
    tensors = load_file(file) if file.exists() else {}
    for seed, flow in enumerate(flows):
        for key, value in flow.state_dict().items():
            name = f"{data.system.name}/{form}/{seed}/{key}"
            tensors[name] = value.cpu().contiguous()
    save_file(tensors, file)
    step = partial(move, flows)
    return measured(step, data, LONGEST) | {"validation": errors}


def long_rollout(data: Data, _method: str, form: str) -> Result:
    """The maps of `train_ours` in float64."""
    tensors = load_file(FOLDER / "flows.safetensors")
    flows = []
    for seed in SEEDS:
        flow = FlowMap(data.system.features, **OURS[form])
        start = f"{data.system.name}/{form}/{seed}/"
        names = flow.state_dict()
        flow.load_state_dict({key: tensors[start + key] for key in names})
        flows.append(flow.to(data.truth.device).double())
    data = data._replace(truth=data.truth.double(), test=data.test.double())
    return measured(partial(move, flows), data, LONGEST)


def train_depth(data: Data, _method: str, layers: str, seed: str) -> Result:
    how = {"steps": 10_000, "batch": 250, "learning_rate": 3e-2}
    flow = fitted(data, {"layers": int(layers), "rows": 8}, int(seed), **how)
    return {"error": error(partial(move, [flow]), 1, data.test).item()}


def time_steps(data: Data, _method: str, form: str) -> Result:
    """Milliseconds of a step of training of the same network, of 32 layers with 8 rows."""
    batch, n = int(form.split()[-1]), data.system.features
    published = importlib.import_module("learner").nn.GSympNet(n, 64, 8, "tanh")
    published.to(data.truth.device)
    adam = torch.optim.Adam(published.parameters(), lr=1e-3)
    x, y = data.train[:batch].chunk(2, -1)
    flow = FlowMap(n, **OURS["32 layers"]).to(data.truth.device)
    fit = partial(flow.fit, data.trajectories, batch=batch, progress=False)

    def train(steps):
        for _ in range(steps):
            adam.zero_grad()
            nn.functional.mse_loss(published(x), y).backward()
            adam.step()
        next(published.parameters()).sum().item()  # waits for a GPU

    def milliseconds(run, count):
        times = [time.perf_counter()]
        for steps in (count, 3 * count):  # less what is done once
            run(steps=steps)
            times.append(time.perf_counter())
        first, second = (b - a for a, b in pairwise(times))
        return 1e3 * (second - first) / (2 * count)

    fit(steps=10)
    result = {"FlowMap": [], "published": []}
    for _ in range(7):
        result["FlowMap"].append(milliseconds(fit, 500))
        result["published"].append(milliseconds(train, 10))
    return result


JOBS: dict[str, Callable[..., Result]] = {
    "FlowMap": train_ours,
    "depth": train_depth,
    "long": long_rollout,
    "time": time_steps,
}


def jobs(stage: str, device: str) -> Iterable[tuple[Any, ...]]:
    if stage == "depth":
        return product(["depth"], DEPTHS, DEPTH_SYSTEMS, SEEDS)
    if stage == "long":
        return product(["long"], OURS, SYSTEMS)
    if stage == "time":
        return [("time", f"{device}, batch {batch}") for batch in (250, 1000)]
    methods = {"FlowMap": OURS, **RIVALS}
    pairs = [(method, form) for method in methods for form in methods[method]]
    return [(*pair, name) for pair, name in product(pairs, SYSTEMS)]


def run(stage: str, device: str) -> None:
    finished = [line["name"] for line in lines_of_jobs()]
    for words in jobs(stage, device):
        name = [str(word) for word in words]
        if name in finished:
            continue
        method, form, *rest = name if name[2:] else [*name, "henon_heiles"]
        data = read_data(rest[0], device)
        job = JOBS.get(method, train_rival)
        line = {"name": name, "result": [job(data, method, form, *rest[1:])]}
        line["machine"] = machine(device)
        with RUNS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        say(" / ".join(name))


def lines_of_jobs() -> list[Result]:
    RUNS.touch()
    return [json.loads(line) for line in RUNS.read_text().splitlines()]


# The page

PAGE = """
All methods: {steps:,} steps of Adam in float32, batch {batch}, clipping, warm-up and a cosine, on
1,000 trajectories of 20 steps; as many weights as 32 layers of 8 rows, within a tenth; the same
search with seed 0, for the form and the rate with the least error after 10 steps on a tenth of the
trajectories, held out; then 5 seeds. FlowMap has 2 forms (32 layers of 8 rows; 4 layers of 64 rows,
applied 4 times) and 2 rates (1e-2, 3e-2). Rivals have 3 rates (3e-3, 1e-2, 3e-2) and these forms:
MLP with 3 hidden layers; residual network of 4 blocks; neural ODE with 2 steps of rk4; HNN, a
Hamiltonian neural network, with T(p) + V(q) by 4 leapfrog steps or H(y) by 2 steps of rk4; SympNet
G of 8 layers; SympNet LA of 16 activations (8 for the chain); HenonNet of 4 or 8 layers. In a trial
of 500 steps, MLP with 2 hidden layers and residual networks of 16 blocks were worse, and neural
ODEs with 4 steps and SympNet G of 32 layers had the same errors; these were dropped, and a larger
SympNet LA because it takes too long.

Figures are medians of 5 seeds; by depth they are means. Errors of a step are root mean squares,
relative to the size of scaled states. Valid steps last until the error of the path is a tenth of
that size, the median of 100 starts, at most 1,000 (three bodies 100). The energy error is
abs(H(y_k) - H(y_0)), the median of 100 starts and the mean of k from 9,000 to 10,000, relative to
the mean kinetic energy of the starts, in float32, every 100 steps. It is bounded if it is at most
twice as large from 90,000 to 100,000. Rounding moves the energy too, so our maps also run in
float64 ({exact}).

{targets}

HNN is the form that the search chose. *HNN by leapfrog* is the form with T(p) + V(q), which keeps
the energy better than H(y) and does not count above; with it in place of HNN, the energy target is
reached on {calm} of 6 systems.

![Energy errors of rollouts on henon_heiles, errors by depth](dynamics.png)

{error}

{valid}

{energy}

Error of a step of FlowMap by depth: 8 rows, 10,000 steps of Adam, batch 250, rate 3e-2, on
{depth_machine}.

{depth}

Milliseconds of a step of training of the same network, the median of 7 turns: 64 modules of 8 rows
with tanh by SympNet's published code, and 32 layers by `FlowMap.fit`. Their batches are ready, ours
are drawn.

{times}
"""
TARGETS = {
    "error of a step falls with each depth": "3 systems",
    "error of a step within 1.2 of the best rival": "5 systems",
    "energy error 100 times below residual, MLP and neural ODE, 3 below HNN": "5 systems",
    "most valid steps": "4 systems",
    "energy error bounded (float32)": "6 systems",
    "energy error bounded (float64)": "6 systems",
    "training 20 times faster than SympNet's code (cuda)": "2 batches",
    "training 5 times faster than SympNet's code (cpu)": "2 batches",
}
TABLES = {
    "error": "error of a step",
    "valid": "valid steps",
    "energy": "energy error, 10,000 steps",
}


def number(value: float) -> str:
    if value >= MOST / 10:
        return "overflow"
    return f"{value:,.0f}" if 100 <= value < 1e5 else f"{value:.2g}"


def collected(lines: list[Result]) -> Result:
    """The form of each method with the least validation error, by system; depth; times."""
    best: Result = {name: {} for name in SYSTEMS}
    depth: Result = {}
    result = {"systems": best, "depth": depth, "times": {}, "long": {}}
    for line in lines:
        method, form, *names = line["name"]
        first, about = line["result"][0], line["machine"]
        if method == "depth":
            errors = depth.setdefault(names[0], {N: [] for N in DEPTHS})
            errors[int(form)].append(first["error"])
            result["depth_machine"] = about
        elif method == "time":
            result["times"][form] = {**first, "machine": about}
        elif method == "long":
            result["long"][f"{names[0]}, {form}"] = first
        else:
            result["machine"] = about
            rates = OUR_RATES if method == "FlowMap" else RATES
            for name, row in zip(names[0].split(), line["result"], strict=True):
                least = min(row["validation"])
                rate = rates[row["validation"].index(least)]
                row |= {"form": form, "rate": rate, "least": least}
                if form == "T(p) + V(q)":
                    best[name][LEAPFROG] = row
                old = best[name].get(method, row)
                best[name][method] = min(old, row, key=itemgetter("least"))
    return result


def calm(rows: Result, hnn: str) -> bool:
    """Whether our energy error is as far below those of others as it must be."""
    least = {"residual": 100, "MLP": 100, "neural ODE": 100, hnn: 3}
    ours = median(rows["FlowMap"]["energy"])
    ratios = {name: median(rows[name]["energy"]) / ours for name in least}
    return all(ratios[name] >= least[name] for name in least)


def steady(row: Result) -> bool:
    return median(row["late"]) / median(row["energy"]) <= 2


def targets(result: Result) -> list[list[str]]:
    """Each target: on how many it must hold, on how many it does, and if it is met."""
    lists: list[list[bool]] = [[] for _ in TARGETS]
    falling, near, energy, longest, single, exact, cuda, cpu = lists
    for errors in result["depth"].values():
        means = map(mean, errors.values())
        falling.append(all(a > b for a, b in pairwise(means)))
    for name, rows in result["systems"].items():
        ours, rivals = rows["FlowMap"], [rows[rival] for rival in RIVALS]
        least = min(median(row["error"]) for row in rivals)
        most = max(median(row["valid"]) for row in rivals)
        near.append(median(ours["error"]) / least <= 1.2)
        energy.append(calm(rows, "HNN"))
        longest.append(median(ours["valid"]) > most)
        single.append(steady(ours))
        row = result["long"].get(f"{name}, {ours['form']}")
        exact += [steady(row)] if row else []
    for name, times in result["times"].items():
        ratio = median(times["published"]) / median(times["FlowMap"])
        cuda += [ratio >= 20] if "cuda" in name else []
        cpu += [ratio >= 5] if "cpu" in name else []
    cells = []
    for (what, needed), values in zip(TARGETS.items(), lists, strict=True):
        met = "met" if sum(values) >= int(needed[0]) else "**missed**"
        if sum(values) == len(values) < int(needed[0]):
            met = "not measured on all"
        cells.append([what, needed, f"{sum(values)} of {len(values)}", met])
    return cells


def grid(names: Iterable[Any], rows: list[list[Any]]) -> str:
    return "\n".join(table(" | ".join(map(str, names)), rows)[1:])


def page(result: Result) -> str:
    best, exact = result["systems"], result["long"].values()
    texts: Result = {**TRAINING}
    seeds = max((len(row["energy"]) for row in exact), default=0)
    apart = max((row.get("sampled_every", 100) for row in exact), default=100)
    texts["exact"] = f"{seeds} of 5 seeds, on a CPU, every {apart} steps"
    names = "target", "must be", "reached", "result"
    texts["targets"] = grid(names, result["targets"])
    texts["calm"] = sum(calm(rows, LEAPFROG) for rows in best.values())
    for key, title in TABLES.items():
        rows = []
        for method in ("FlowMap", *RIVALS, LEAPFROG):
            values = [median(best[name][method][key]) for name in best]
            rows.append([method, *map(number, values)])
        texts[key] = grid([title, *best], rows)
    rows = []
    for name, errors in result["depth"].items():
        rows.append([name, *map(number, map(mean, errors.values()))])
    texts["depth"] = grid(["system", *DEPTHS], rows)
    texts["depth_machine"] = on_one_line(result["depth_machine"])[8:]
    rows = []
    for name, times in result["times"].items():
        middle = [median(times[key]) for key in ("FlowMap", "published")]
        rows.append([name, *map(number, middle), times["machine"]["machine"]])
    names = ("run", "FlowMap", "SympNet's code", "machine")
    texts["times"] = grid(names, rows)
    lines = head("Learned mechanical systems", result)
    return text_of([*lines, PAGE.format(**texts).rstrip()])


def write_page(out: Path) -> None:
    result = collected(lines_of_jobs())
    result["targets"] = targets(result)
    met = sum(row[3] == "met" for row in result["targets"])
    missed = [row[0] for row in result["targets"] if "missed" in row[3]]
    count = f"{met} of {len(result['targets'])} targets met"
    result["found"] = f"{count}; missed: {'; '.join(missed) or 'none'}"
    result["command"] = "python benchmarks/dynamics.py train --device cuda"
    keep(result, page(result), "dynamics", out)
    draw(result, out / "dynamics.png")


def draw(result: Result, path: Path) -> None:
    """Energy errors by step on a system, and errors of a step by depth with their spread."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.5))
    for k, method in enumerate(["FlowMap", *RIVALS, LEAPFROG]):
        curve = result["systems"]["henon_heiles"][method]["curve"]
        values = [curve[step] for step in curve if int(step) <= STEPS]
        steps = [int(step) for step in curve][: len(values)]
        style = ["-", "--", ":", "-."][k % 4]
        width = 3 if method == "FlowMap" else 1.4
        left.loglog(steps, values, style, label=method, linewidth=width)
    left.set(title="henon_heiles", xlabel="steps", ylabel="energy error")
    left.set_ylim(1e-4, 1e2)
    left.legend(fontsize="small", ncols=2)
    for name, errors in result["depth"].items():
        low, means, high = (
            [f(values) for values in errors.values()] for f in (min, mean, max)
        )
        right.loglog(DEPTHS, means, "o-", label=name)
        right.fill_between(DEPTHS, low, high, alpha=0.25)
    right.set(title="depth", xlabel="layers", ylabel="error of a step")
    right.set_xticks(DEPTHS, [str(layers) for layers in DEPTHS])
    right.minorticks_off()
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    stages = ["data", "train", "depth", "long", "time", "page"]
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    warnings.simplefilter("ignore", DriftWarning)
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    if options.stage == "data":
        for name in SYSTEMS:
            system, steps = systems.get(name), SYSTEMS[name]
            train = system.trajectories(1000, 20, seed=1).float()
            test = system.trajectories(100, steps, seed=2).float()
            tensors = {"train": train, "test": test}
            save_file(tensors, FOLDER / f"{name}.safetensors")
    elif options.stage == "page":
        write_page(Path("docs/results"))
    else:
        run(**vars(options))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
