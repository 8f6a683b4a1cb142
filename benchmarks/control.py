"""Closed loops of many agents: the crossing of twelve robots, trained, tried and timed.

python benchmarks/control.py --quick
python benchmarks/control.py --out docs/results
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from report import command, head, say, spread, table, text_of
from torch import Tensor, nn

from hdnn import control
from hdnn.errors import ConvergenceError

QUICK = {"iterations": 4, "seeds": 1, "runs": 10, "random": 10, "turns": 1}
FULL = {"iterations": 300, "seeds": 5, "runs": 200, "random": 1000, "turns": 15}
STARTS = 10**6  # a seed that no training has
RING = [(0, 1), (1, 2), (2, 3), (0, 3)]


def trained(sizes: dict[str, int], seed: int) -> dict[str, Any]:
    """One training: collisions over a horizon, and the cost over ten."""
    problem = control.crossing("ring", seed)
    training = control.LoopTraining(problem, iterations=sizes["iterations"])
    bounded = []
    start = time.perf_counter()
    for quarter in range(4):
        until = quarter * sizes["iterations"] // 4
        training.run(progress=False, until=until)
        bounded.append(is_bounded(problem))
    training.run(progress=False)
    seconds = time.perf_counter() - start
    y = problem.starts(sizes["runs"], seed=STARTS, disc=True)
    with torch.no_grad():
        trajectory = problem.loop(y, horizons=10)
    first = trajectory[: problem.loop.controller.steps + 1]
    cost = control.Cost(smoothness=0, end=0, barrier=0)
    costs = [cost(problem.loop, part).detach() for part in (first, trajectory)]
    certificate = training.certify()
    return {
        "seed": seed,
        "seconds": seconds,
        "runs": sizes["runs"],
        "collisions": int(control.collisions(first, problem.collision).sum()),
        "growth": float(costs[1] / costs[0]) - 1,
        "bounded": bounded,
        "violation": certificate.violation,
        "holds": certificate.holds,
    }


def is_bounded(problem: control.LoopProblem) -> bool:
    """True if no step after the horizon raises the energy, over 20 horizons from 8 starts."""
    loop = problem.loop
    with torch.no_grad():
        trajectory = loop(problem.starts(8, seed=STARTS), horizons=20)
        later = trajectory[loop.controller.steps :]
        energy = loop.energy(later, loop.controller.steps)
    largest = energy[:-1] * (1 + 1e-12)
    return bool(energy.isfinite().all() and (energy[1:] <= largest).all())


def violation(number: int) -> float:
    """The error of the balance of four robots with random weights, scales and steps."""
    source = torch.Generator().manual_seed(number)
    u, v = torch.rand(2, generator=source).tolist()
    scale = 10 ** (3 * u - 2)
    heat = 5 * torch.rand(4, 4, generator=source)
    controller = control.Controller(4, 20, links=RING, dissipation=heat)
    with torch.no_grad():
        for weight in controller.parameters():
            drawn = torch.randn(weight.shape, generator=source)
            weight.copy_(scale * drawn)
    plant = control.robots(3 * torch.randn(4, 2, generator=source))
    loop = control.ClosedLoop(plant, controller, step=10 ** (3 * v - 3))
    y = loop.start(3 * torch.randn(1, 4, 4, generator=source))
    return float(loop.balance(y, horizons=10).violation.max())


def random_controllers(count: int) -> dict[str, Any]:
    errors = []
    for number in range(count):
        try:
            errors.append(violation(number))
        except ConvergenceError:
            continue
    unsolved = count - len(errors)
    largest = max(errors)
    return {"controllers": count, "violation": largest, "unsolved": unsolved}


class Authors(nn.Module):
    """The crossing as one system of 48 + 48 states by forward Euler, as the authors train it.

    Dense weights times masks, and the gradient of the energy by autograd, in each step. With
    `written_out`, as a good engineer would: masks once, and the gradient as a formula.
    """

    def __init__(
        self, problem: control.LoopProblem, written_out: bool = False
    ) -> None:
        super().__init__()
        plant = problem.loop.plant
        controller = problem.loop.controller
        N, c = controller.agents, controller.states
        self.problem = problem
        self.written_out = written_out
        self.h = problem.loop.step
        blocks = torch.block_diag
        K, b, G, couplings = (
            weight.detach().float() for weight in controller.parameters()
        )
        C = torch.zeros(N, c, N, c)
        for (i, k), coupling in zip(controller.links, couplings, strict=True):
            C[i, :, k] = coupling
        self.K = nn.Parameter(torch.stack([blocks(*step) for step in K]))
        self.b = nn.Parameter(b.flatten(1).clone())
        self.G = nn.Parameter(blocks(*G))
        self.C = nn.Parameter(C.reshape(N * c, N * c))
        weights = (self.K[0], self.G, self.C)
        self.masks = [(w.detach() != 0).float() for w in weights]
        self.move = blocks(*(plant.J - plant.R).float())
        self.port = blocks(*plant.g.float())
        damping = controller.R.flatten().float().diag()
        self.damped = blocks(*[controller.J.float()] * N) - damping
        self.rest = plant.rest().float().flatten()

    def masked(self, steps: Any = slice(None)) -> list[Tensor]:
        """K of some steps, G and C."""
        weights = (self.K[steps], self.G, self.C)
        return [w * mask for w, mask in zip(weights, self.masks, strict=True)]

    def field(
        self, t: int, y: Tensor, K: Tensor, G: Tensor, C: Tensor
    ) -> Tensor:
        y = y if y.requires_grad else y.requires_grad_()
        z, xi = y.chunk(2, -1)
        rows = xi @ K.T + self.b[t]
        if self.written_out:
            f, f_c = z - self.rest, torch.tanh(rows) @ K
        else:
            energy = 0.5 * (z - self.rest).square().sum()
            energy = energy + torch.log(torch.cosh(rows)).sum()
            f, f_c = torch.autograd.grad(energy, (z, xi), create_graph=True)
        to_z = f @ self.move.T - f_c @ G @ self.port.T
        to_xi = f_c @ (self.damped + C - C.T).T + f @ self.port @ G.T
        return torch.cat([to_z, to_xi], -1)

    def forward(self, y: Tensor) -> Tensor:
        """The trajectory `(T + 1, B, 12, 8)` from states `(B, 12, 8)`."""
        z, xi = (x.flatten(1) for x in y.float().split(4, -1))
        K, G, C = self.masked()
        states = [torch.cat([z, xi], -1)]
        for t in range(len(self.K)):
            weights = (K[t], G, C) if self.written_out else self.masked(t)
            slope = self.field(t, states[-1], *weights)
            states.append(states[-1] + self.h * slope)
        z, xi = torch.stack(states).unflatten(-1, (2, 12, 4)).unbind(-3)
        return torch.cat([z, xi], -1)

    def loss(self, trajectory: Tensor) -> Tensor:
        """The cost of the problem, without its last two terms."""
        cost = control.Cost(smoothness=0, end=0, effort=0)
        K, G, _ = self.masked()
        rows = trajectory[:-1, ..., 4:].flatten(2) @ K.mT + self.b.unsqueeze(1)
        inputs = torch.tanh(rows) @ K @ G
        effort = inputs.square().sum(-1).mean(1).sum()
        rough = K.diff(dim=0).square().sum() + self.b.diff(dim=0).square().sum()
        others = 0.05 * self.h * effort + 1e-3 * rough
        return cost(self.problem.loop, trajectory) + others


def step_of(net: Authors, starts: int) -> Callable[[], None]:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        net.loss(net(net.problem.starts(starts))).backward()
        optimizer.step()

    return step


def trainings(sizes: dict[str, int]) -> dict[str, list[float]]:
    """Times of an iteration against ours from as many starts, in turns.

    PyTorch has one thread, which is faster for the rivals' small matrices.
    """
    torch.set_num_threads(1)
    problem = control.crossing("ring")
    ratios: dict[str, list[float]] = {}
    for starts in (1, 4, 16):
        loop = control.crossing("ring")
        ours = control.LoopTraining(loop, iterations=10**6, batch=starts)
        authors = step_of(Authors(problem), starts)
        engineer = step_of(Authors(problem, written_out=True), starts)
        rivals = {
            f"the authors' algorithm, {starts} starts": authors,
            f"a good engineer's forward Euler, {starts} starts": engineer,
        }
        for turn in range(sizes["turns"] + 1):
            own = seconds_of(partial(ours.run, False, until=ours.done + 3), 1)
            for name, step in rivals.items():
                ratio = seconds_of(step, 3) / own
                if turn:  # the first one compiles
                    ratios.setdefault(name, []).append(ratio)
    return ratios


def seconds_of(step: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - start


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    times = trainings(sizes)
    say(str(times))
    rows = []
    for seed in range(sizes["seeds"]):
        rows.append(trained(sizes, seed))
        say(str(rows[-1]))
    balance = random_controllers(sizes["random"])
    ratio = statistics.median(times["the authors' algorithm, 4 starts"])
    targets = {
        f"4 times as fast as the authors' algorithm from 4 starts (reached: {ratio:.1f})": ratio
        >= 4,
        "no run with a collision": not any(row["collisions"] for row in rows),
        "bounded wherever the training stops": all(
            all(row["bounded"]) for row in rows
        ),
        "balance of random controllers to 1e-13": balance["violation"] <= 1e-13,
        "none unsolved": not balance["unsolved"],
    }
    return {
        "trainings": times,
        "trained": rows,
        "random": balance,
        "missed": [name for name, met in targets.items() if not met],
        "ok": all(row["holds"] for row in rows),
    }


def found(result: dict[str, Any]) -> str:
    rows = result["trained"]
    hits = sum(row["collisions"] for row in rows)
    runs = sum(row["runs"] for row in rows)
    balance = result["random"]
    trials = result["trainings"].values()
    ratios = [sorted(values)[len(values) // 2] for values in trials]
    return (
        f"collisions in {hits} of {runs} runs, with {len(rows)} trained controllers; the energy "
        f"balance of {balance['controllers']:,} random controllers is exact to "
        f"{balance['violation']:.0e}; an iteration is {min(ratios):.1f} to {max(ratios):.1f} "
        "times as fast as with forward Euler"
    )


def page(result: dict[str, Any]) -> str:
    lines = head("Twelve robots that change places", result)
    lines += [
        "",
        '`control.crossing("ring")`, trained by `control.LoopTraining` with its defaults.',
    ]
    rows = []
    for r in result["trained"]:
        hits = f"{r['collisions']} of {r['runs']}"
        bounded = f"{sum(r['bounded'])} of {len(r['bounded'])}"
        seconds = f"{r['seconds']:.1f}"
        growth = f"{r['growth']:+.3%}"
        error = f"{r['violation']:.1e}"
        rows.append([r["seed"], seconds, hits, growth, bounded, error])
    names = (
        "seed | seconds | runs with a collision | cost over ten horizons, relative to one | "
        "bounded over 20 horizons, if stopped at 0, 25, 50, 75% | error of the balance"
    )
    lines += table(names, rows)
    r = result["random"]
    lines += [
        "",
        f"Energy balance of {r['controllers']:,} random controllers, with steps of 0.001 to 1 and "
        f"weights of 0.01 to 10: the error is at most {r['violation']:.1e}; {r['unsolved']} have "
        "steps without a solution.",
    ]
    times = result["trainings"].items()
    rows = [
        [name.replace(", 1 starts", ", 1 start"), spread(ratios)]
        for name, ratios in times
    ]
    lines += table("one iteration of | time, relative to ours", rows)
    lines += [
        "",
        "Missed targets: " + ("; ".join(result["missed"]) or "none") + ".",
        "",
        "The balance is exact if plant and controller are stepped together, in discrete time. It "
        "does not cover a real plant with a sampled controller.",
        "",
        "The rivals simulate by forward Euler in float32, solve no equations and keep no balance. "
        "We wrote both after the authors' paper, without the overhead of torchdiffeq. The shares "
        "of runs without a collision that the authors report cannot be compared with ours, because "
        "their starts, costs and training differ.",
    ]
    return text_of(lines)


if __name__ == "__main__":
    sizes = {"full": FULL, "quick": QUICK}
    raise SystemExit(
        command(
            "control", __doc__, sizes, run, page, devices=("cpu",), found=found
        )
    )
