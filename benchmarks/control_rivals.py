"""What one would write instead of hdnn.control: the contestants of control.py.

`Dense` is the same closed loop by forward Euler, all agents as one system: as the authors of the
method do it, or as a good engineer would. `Perceptrons` are controllers without any guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from hdnn.control.objective import rest
from hdnn.control.training import BETAS, factor
from torch import Tensor, nn

from hdnn import control
from hdnn.control import costs

Integrate = Callable[..., Tensor]


class Dense(nn.Module):
    """The crossing on a ring as one system of 48 + 48 states, by forward Euler.

    Weights of all steps are dense matrices times a mask, so that a controller hears what it may.

    Args:
        problem: the crossing.
        dtype: of all numbers.
        integrate: `odeint` of torchdiffeq, for the authors' way: masks and the gradient of the
            energy by autograd in every evaluation of the field; otherwise masks once, the gradient
            written out, and a loop.
    """

    J: Tensor
    R: Tensor
    g: Tensor
    J_c: Tensor
    R_c: Tensor
    mask: Tensor
    kept: Tensor
    allowed: Tensor
    target: Tensor

    def __init__(
        self, problem: control.LoopProblem, dtype: torch.dtype, integrate: Integrate | None = None
    ) -> None:
        super().__init__()
        loop = problem.loop
        system, self.integrate, self.cost = loop.system(), integrate, problem.cost
        self.h, self.T = loop.step, loop.controller.steps
        J, R, g, G = (
            torch.block_diag(*t.detach()).to(dtype)
            for t in (system.J, system.R, system.g, system.G)
        )
        N, c = loop.plant.agents, loop.controller.states
        C, allowed = torch.zeros(N * c, N * c, dtype=dtype), torch.zeros(N * c, N * c, dtype=dtype)
        for (i, k), block in zip(system.links, system.C.detach().to(dtype), strict=True):
            rows, columns = slice(i * c, i * c + c), slice(k * c, k * c + c)
            C[rows, columns], allowed[rows, columns] = block, 1
        K = torch.stack([torch.block_diag(*step) for step in system.K.detach()]).to(dtype)
        self.K, self.b = (
            nn.Parameter(K),
            nn.Parameter(system.b.detach().flatten(1).to(dtype, copy=True)),
        )
        self.G, self.C = nn.Parameter(G), nn.Parameter(C)
        target, J_c = rest(loop.plant).to(dtype), torch.block_diag(*[system.J_c] * N).to(dtype)
        fixed = {"J": J, "R": R, "g": g, "J_c": J_c, "R_c": torch.diag(system.R_c.flatten())}
        fixed |= {"mask": (K[0] != 0).to(dtype), "kept": (G != 0).to(dtype), "allowed": allowed}
        for name, tensor in {**fixed, "target": target}.items():
            self.register_buffer(name, tensor.to(dtype))

    def forward(self, z: Tensor, xi: Tensor) -> Tensor:
        """All states, `(T + 1, B, 96)`, from `(B, 48)` twice."""
        y = torch.cat([z, xi], -1)
        if self.integrate is not None:
            times = self.h * torch.arange(self.T + 1, dtype=y.dtype)
            return self.integrate(self.field, y, times, method="euler")
        K, G, C = self.K * self.mask, self.G * self.kept, self.C * self.allowed
        port = G @ self.g.T
        plant, controller = (self.J - self.R).T, (self.J_c - self.R_c + C - C.T).T
        move = torch.cat([torch.cat([plant, port.T], 1), torch.cat([-port, controller], 1)])
        states, target, n = [y], self.target.flatten(), z.shape[-1]
        for K_t, b_t in zip(K.unbind(), self.b.unbind(), strict=True):
            slope = torch.tanh(torch.addmm(b_t, y[:, n:], K_t.T)) @ K_t
            y = torch.addmm(y, torch.cat([y[:, :n] - target, slope], -1), move, alpha=self.h)
            states.append(y)
        return torch.stack(states)

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        """dy/dt by the gradient of the energy, which autograd finds."""
        at = min(int(float(t) / self.h + 0.5), self.T - 1)
        with torch.enable_grad():
            y = y if y.requires_grad else y.requires_grad_()
            z, xi = y.chunk(2, -1)
            rows = xi @ (self.K[at] * self.mask).T + self.b[at]
            energy = 0.5 * (z - self.target.flatten()).square().sum()
            energy = energy + torch.log(torch.cosh(rows)).sum()
            f, f_c = torch.autograd.grad(energy, (z, xi), create_graph=True)
        G, C = self.G * self.kept, self.C * self.allowed
        u = -f_c @ G
        to_z = f @ (self.J - self.R).T + u @ self.g.T
        to_xi = f_c @ (self.J_c - self.R_c + C - C.T).T + f @ self.g @ G.T
        return torch.cat([to_z, to_xi], -1)

    def loss(self, states: Tensor) -> Tensor:
        """The cost of the problem; the authors sum up the smoothness in a loop over steps."""
        z, xi = states.chunk(2, -1)
        z = z.unflatten(-1, self.target.shape)
        K, b, options = self.K * self.mask, self.b, self.cost
        rows = xi[:-1] @ K.mT + b.unsqueeze(1)
        u = torch.tanh(rows) @ K @ (self.G * self.kept)
        if self.integrate is None:
            rough = K.diff(dim=0).square().sum() + b.diff(dim=0).square().sum()
        else:
            rough = states.new_zeros(())
            for t in range(self.T - 1):
                rough = rough + (K[t + 1] - K[t]).square().sum() + (b[t + 1] - b[t]).square().sum()
        last = torch.log(torch.cosh(xi[-1] @ K[-1].T + b[-1])).sum(-1)
        end = 0.5 * (z[-1] - self.target).square().sum((-2, -1)) + last
        near = costs.barrier(z, step=self.h, distance=options.distance)
        return (
            options.state * costs.tracking(z, self.target, step=self.h)
            + options.effort * self.h * u.square().sum(-1).mean(1).sum()
            + options.barrier * near
            + options.smoothness * rough
            + options.end * end.mean()
        )


class Perceptrons(nn.Module):
    """A perceptron an agent, of three layers of tanh: from the states of its plant and of those of
    its ring neighbours to its force. The plant takes implicit midpoint steps, with the force of
    the start of the step.
    """

    move: Tensor
    push: Tensor
    near: Tensor
    target: Tensor

    def __init__(self, problem: control.LoopProblem, hidden: int = 32, seed: int = 0) -> None:
        super().__init__()
        plant, N = problem.loop.plant, problem.agents
        self.problem, self.h, self.T = problem, problem.loop.step, problem.loop.controller.steps
        near = [[i] for i in range(N)]
        for i, k in problem.loop.controller.links:
            near[i].append(k)
            near[k].append(i)
        source = torch.Generator().manual_seed(seed)
        sizes = (4 * len(near[0]), hidden, hidden, hidden, 2)
        pairs = list(pairwise(sizes))
        self.W = nn.ParameterList(
            torch.randn(N, a, b, generator=source, dtype=torch.float64) / math.sqrt(a)
            for a, b in pairs
        )
        self.c = nn.ParameterList(torch.zeros(N, 1, b, dtype=torch.float64) for _, b in pairs)
        one, A = torch.eye(4, dtype=torch.float64), plant.J - plant.R
        solve = torch.linalg.inv(one - 0.5 * self.h * A)
        self.register_buffer("move", solve @ (one + 0.5 * self.h * A))
        self.register_buffer("push", self.h * solve @ plant.g)
        self.register_buffer("near", torch.tensor(near))
        self.register_buffer("target", rest(plant))

    def forward(self, z: Tensor, horizons: int = 1) -> tuple[Tensor, Tensor]:
        """States `(steps + 1, B, N, 4)` and forces from `(B, N, 4)`."""
        x = (z - self.target).transpose(0, 1)  # agents first: (N, B, 4)
        states, forces = [x], []
        for _ in range(horizons * self.T):
            v = x[self.near].transpose(1, 2).flatten(2)  # (N, B, 4 near)
            for k, (W, c) in enumerate(zip(self.W, self.c, strict=True)):
                v = torch.baddbmm(c, v, W)
                v = v if k == len(self.W) - 1 else torch.tanh(v)
            x = torch.baddbmm(x @ self.move.mT, v, self.push.mT)
            states.append(x)
            forces.append(v)
        return torch.stack(states).transpose(1, 2) + self.target, torch.stack(forces).transpose(
            1, 2
        )

    def terms(self, states: Tensor, forces: Tensor) -> dict[str, Tensor]:
        """As `Cost.terms`, where there is no energy of a controller and nothing to be smooth."""
        cost, h = self.problem.cost, self.h
        track = costs.tracking(states, self.target, step=h, discount=cost.discount, horizon=self.T)
        end = 0.5 * (states[-1] - self.target).square().sum((-2, -1)).mean()
        near = costs.barrier(states, step=h, distance=cost.distance)
        return {
            "state": cost.state * track,
            "effort": cost.effort * costs.effort(forces, step=h),
            "barrier": cost.barrier * near,
            "end": cost.end * end,
        }

    def train_all(self, iterations: int, rate: float, batch: int = 16, seed: int = 0) -> float:
        """The recipe of `hdnn.control.LoopTraining`; the mean cost of the last 20 iterations."""
        optimizer, found = torch.optim.Adam(self.parameters(), lr=rate, betas=BETAS), []
        for k in range(iterations):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor(k, iterations)
            y = self.problem.starts(batch, seed=seed, draw=k)
            loss = sum(self.terms(*self(y[..., :4])).values(), torch.zeros(()))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters(), 1e4)
            optimizer.step()
            found.append(float(loss.detach()))
        return sum(found[-20:]) / len(found[-20:])
