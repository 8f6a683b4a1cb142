"""Closed loops of many agents: the crossing of twelve robots, trained, tried and timed.

    python benchmarks/control.py --quick
    python benchmarks/control.py --out docs/results

The time of a training is compared with the authors' algorithm, for which torchdiffeq is needed;
without it that row is left out.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import torch
from report import command, head, spread, table, text_of
from torch import Tensor, nn

from hdnn import control
from hdnn.errors import ConvergenceError

SIZES = {
    "full": {
        "iterations": 300,
        "seeds": 5,
        "runs": 200,
        "random": 1000,
        "turns": 15,
    },
    "quick": {
        "iterations": 4,
        "seeds": 1,
        "runs": 10,
        "random": 10,
        "turns": 1,
    },
}
STARTS = 10**6  # a seed that no training has


def trained(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Trainings of several seeds: collisions over one horizon, and the cost over ten."""
    rows = []
    for seed in range(sizes["seeds"]):
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
            hits = int(control.collisions(first, problem.collision).sum())
            cost = control.Cost(smoothness=0, end=0, barrier=0)
            ten = cost(problem.loop, trajectory)
            growth = float(ten / cost(problem.loop, first)) - 1
        certificate = training.certify()
        rows.append(
            {
                "seed": seed,
                "seconds": seconds,
                "runs": sizes["runs"],
                "collisions": hits,
                "growth": growth,
                "bounded": bounded,
                "violation": certificate.violation,
                "holds": certificate.holds,
            }
        )
    return rows


def is_bounded(problem: control.LoopProblem) -> bool:
    """True if no step after the horizon raises the energy, over 20 horizons from 8 starts."""
    loop = problem.loop
    with torch.no_grad():
        trajectory = loop(problem.starts(8, seed=STARTS), horizons=20)
        later = trajectory[loop.controller.steps :]
        energy = loop.energy(later, loop.controller.steps)
    largest = energy[:-1] * (1 + 1e-12)
    return bool(energy.isfinite().all() and (energy[1:] <= largest).all())


def random_controllers(count: int) -> dict[str, Any]:
    """The balance of four robots on a ring for random weights, scales and steps."""
    worst = 0.0
    unsolved = 0
    for number in range(count):
        source = torch.Generator().manual_seed(number)
        u, v = torch.rand(2, generator=source).tolist()
        scale = 10 ** (3 * u - 2)
        heat = 5 * torch.rand(4, 4, generator=source)
        ring = [(0, 1), (1, 2), (2, 3), (0, 3)]
        controller = control.Controller(4, 20, links=ring, dissipation=heat)
        with torch.no_grad():
            for weight in controller.parameters():
                weight.copy_(
                    scale * torch.randn(weight.shape, generator=source)
                )
        plant = control.robots(3 * torch.randn(4, 2, generator=source))
        loop = control.ClosedLoop(plant, controller, step=10 ** (3 * v - 3))
        y = loop.start(3 * torch.randn(1, 4, 4, generator=source))
        try:
            worst = max(
                worst, float(loop.balance(y, horizons=10).violation.max())
            )
        except ConvergenceError:
            unsolved += 1
    return {"controllers": count, "violation": worst, "unsolved": unsolved}


class Authors(nn.Module):
    """The crossing as one system of 48 + 48 states by forward Euler, as the authors train it.

    Dense weights times masks, and the gradient of the energy by autograd in each evaluation. With
    `integrate=None`, as a good engineer would: masks once, the gradient written out, and a loop.
    """

    def __init__(
        self, problem: control.LoopProblem, integrate: Any = None
    ) -> None:
        super().__init__()
        loop = problem.loop
        plant = loop.plant
        controller = loop.controller
        N, c = controller.agents, controller.states
        self.problem = problem
        self.integrate = integrate
        self.h = loop.step
        blocks = torch.block_diag
        weights = {
            name: w.detach().float()
            for name, w in controller.named_parameters()
        }
        C = torch.zeros(N * c, N * c)
        for (i, k), block in zip(controller.links, weights["C"], strict=True):
            C[i * c : i * c + c, k * c : k * c + c] = block
        self.K = nn.Parameter(
            torch.stack([blocks(*step) for step in weights["K"]])
        )
        self.b = nn.Parameter(weights["b"].flatten(1).clone())
        self.G = nn.Parameter(blocks(*weights["G"]))
        self.C = nn.Parameter(C)
        self.masks = {
            name: (w.detach() != 0).float()
            for name, w in self.named_parameters()
        }
        self.move = blocks(*(plant.J - plant.R).float())
        self.port = blocks(*plant.g.float())
        self.damped = (
            blocks(*[controller.J.float()] * N)
            - controller.R.flatten().float().diag()
        )
        self.rest = plant.rest().float().flatten()

    def masked(self, name: str) -> Tensor:
        return getattr(self, name) * self.masks[name]

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        step = min(int(float(t) / self.h + 0.5), len(self.K) - 1)
        with torch.enable_grad():
            y = y if y.requires_grad else y.requires_grad_()
            z, xi = y.chunk(2, -1)
            rows = xi @ (self.K[step] * self.masks["K"][step]).T + self.b[step]
            energy = (
                0.5 * (z - self.rest).square().sum()
                + torch.log(torch.cosh(rows)).sum()
            )
            f, f_c = torch.autograd.grad(energy, (z, xi), create_graph=True)
        G, C = self.masked("G"), self.masked("C")
        to_z = f @ self.move.T - f_c @ G @ self.port.T
        to_xi = f_c @ (self.damped + C - C.T).T + f @ self.port @ G.T
        return torch.cat([to_z, to_xi], -1)

    def forward(self, y: Tensor) -> Tensor:
        """The trajectory `(T + 1, B, 12, 8)` from states `(B, 12, 8)`."""
        z, xi = y.float().split(4, -1)
        y = torch.cat([z.flatten(1), xi.flatten(1)], -1)
        if self.integrate is not None:
            times = self.h * torch.arange(len(self.K) + 1)
            states = self.integrate(self.field, y, times, method="euler")
        else:
            states = self.plain(y)
        halves = [half.unflatten(-1, (12, 4)) for half in states.chunk(2, -1)]
        return torch.cat(halves, -1)

    def plain(self, y: Tensor) -> Tensor:
        K, G, C = self.masked("K"), self.masked("G"), self.masked("C")
        port = G @ self.port.T
        top = torch.cat([self.move.T, port.T], 1)
        move = torch.cat(
            [top, torch.cat([-port, (self.damped + C - C.T).T], 1)]
        )
        states = [y]
        for K_t, b_t in zip(K, self.b, strict=True):
            slope = torch.tanh(torch.addmm(b_t, y[:, 48:], K_t.T)) @ K_t
            y = torch.addmm(
                y,
                torch.cat([y[:, :48] - self.rest, slope], -1),
                move,
                alpha=self.h,
            )
            states.append(y)
        return torch.stack(states)

    def loss(self, trajectory: Tensor) -> Tensor:
        """The cost of the problem, without its last two terms."""
        cost = control.Cost(smoothness=0, end=0, effort=0)
        K = self.masked("K")
        rows = trajectory[:-1, ..., 4:].flatten(2) @ K.mT + self.b.unsqueeze(1)
        effort = (
            (torch.tanh(rows) @ K @ self.masked("G"))
            .square()
            .sum(-1)
            .mean(1)
            .sum()
        )
        rough = K.diff(dim=0).square().sum() + self.b.diff(dim=0).square().sum()
        return (
            cost(self.problem.loop, trajectory)
            + 0.05 * self.h * effort
            + 1e-3 * rough
        )


def trainings(sizes: dict[str, int]) -> dict[str, list[float]]:
    """Times of an iteration against ours from as many starts, in turns.

    PyTorch has one thread, which is faster for the rivals' small matrices.
    """
    torch.set_num_threads(1)
    problem = control.crossing("ring")
    rivals: dict[str, Any] = {"a good engineer's forward Euler": None}
    if importlib.util.find_spec("torchdiffeq"):
        rivals["the authors' algorithm"] = importlib.import_module(
            "torchdiffeq"
        ).odeint
    ratios: dict[str, list[float]] = {}
    for starts in (1, 4):
        ours = control.LoopTraining(
            control.crossing("ring"), iterations=10**6, batch=starts
        )
        steps = {"ours": lambda ours=ours: ours.run(False, until=ours.done + 1)}
        for name, integrate in rivals.items():
            net = Authors(problem, integrate)
            steps[f"{name}, {starts} starts"] = rival_step(net, starts)
        for turn in range(sizes["turns"] + 1):
            times = {}
            for name, step in steps.items():
                start = time.perf_counter()
                for _ in range(3):
                    step()
                times[name] = time.perf_counter() - start
            own = times.pop("ours")
            for name, seconds in times.items():
                if turn:  # the first one compiles
                    ratios.setdefault(name, []).append(seconds / own)
    return ratios


def rival_step(net: Authors, starts: int) -> Any:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        net.loss(net(net.problem.starts(starts))).backward()
        optimizer.step()

    return step


def run(sizes: dict[str, int], device: str) -> dict[str, Any]:
    rows = trained(sizes)
    return {
        "trainings": trainings(sizes),
        "trained": rows,
        "random": random_controllers(sizes["random"]),
        "ok": all(row["holds"] for row in rows),
    }


def page(result: dict[str, Any]) -> str:
    lines = head("Twelve robots that change places", result)
    lines += [
        "",
        '`control.crossing("ring")`, trained by `control.LoopTraining` with its defaults.',
    ]
    rows = []
    for r in result["trained"]:
        hits = f"{r['collisions']} of {r['runs']}"
        growth = f"{r['growth']:+.3%}"
        rows.append(
            [
                r["seed"],
                f"{r['seconds']:.1f}",
                hits,
                growth,
                f"{sum(r['bounded'])} of {len(r['bounded'])}",
                f"{r['violation']:.1e}",
            ]
        )
    names = (
        "seed | seconds | runs with a collision | cost of ten horizons against one | "
        "stopped at 0, 25, 50, 75%: bounded over 20 horizons | error of the balance"
    )
    lines += table(names, rows)
    r = result["random"]
    lines += [
        "",
        f"Energy balance of {r['controllers']:,} random controllers, steps of 0.001 to 1, weights "
        f"of 0.01 to 10: error {r['violation']:.1e} at most, {r['unsolved']} unsolved.",
    ]
    rows = [
        [name, spread(ratios)] for name, ratios in result["trainings"].items()
    ]
    lines += table("an iteration against ours | times as long", rows)
    lines += [
        "",
        "The balance is exact for plant and controller stepped together, in discrete time. A real "
        "plant behind a sampled controller is not covered by it. The rivals simulate by forward "
        "Euler in float32, solve no equations and keep no balance. Figures of the authors' paper "
        "are not repeated here: their starts, costs and trainings are others.",
    ]
    return text_of(lines)


if __name__ == "__main__":
    raise SystemExit(
        command("control", __doc__, SIZES, run, page, devices=("cpu",))
    )
