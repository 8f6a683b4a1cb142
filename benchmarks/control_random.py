"""Random controllers for control.py: the energy balance of every step; forward Euler beside it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn import control
from hdnn.control.controller import log_cosh
from hdnn.errors import ConvergenceError

AGENTS, STEPS, STATES = 4, 20, 4
RING = [(0, 1), (1, 2), (2, 3), (0, 3)]
BLOWN = 1e3  # a growth of the energy beyond this is a loop that has blown up


class Case(NamedTuple):
    """A closed loop and a state to start from."""

    loop: control.ClosedLoop
    y: Tensor


def drawn(number: int, scales: tuple[float, float]) -> Case:
    """Four robots on a ring: weights new in each step, their scale and h log-uniform."""
    source = torch.Generator().manual_seed(number)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    low, high = torch.tensor(scales).log10().tolist()
    u, v = torch.rand(2, generator=source).tolist()
    scale, h = 10 ** (low + (high - low) * u), 10 ** (-3 + 3 * v)
    heat = 5 * torch.rand(AGENTS, STATES, generator=source)
    controller = control.Controller(AGENTS, STEPS, links=RING, dissipation=heat)
    with torch.no_grad():
        for parameter in controller.parameters():
            parameter.copy_(scale * normal(*parameter.shape))
    loop = control.ClosedLoop(control.robots(3 * normal(AGENTS, 2)), controller, h)
    return Case(loop, loop.start(3 * normal(1, AGENTS, 4), normal(1, AGENTS, STATES)))


def balanced(count: int, scales: tuple[float, float], horizons: int) -> dict[str, Any]:
    """The largest violation of the balance over all steps of all controllers."""
    worst, unsolved, negative = 0.0, 0, 0
    for number in range(count):
        case = drawn(number, scales)
        try:
            balance = case.loop.balance(case.y, horizons)
        except ConvergenceError:
            unsolved += 1
            continue
        worst = max(worst, float(balance.violation.amax()))
        negative += int(balance.lost.amin() < 0)
    found = {"controllers": count, "scales": scales, "steps": horizons * STEPS}
    return {**found, "violation": worst, "unsolved": unsolved, "gained": negative}


class Simulated(NamedTuple):
    """The last states, and the energy at first and at its largest, of many loops at once."""

    y: Tensor
    start: Tensor
    largest: Tensor


def euler(cases: list[Case], steps: int) -> Simulated:
    """The same loops by forward Euler."""
    systems = [case.loop.system() for case in cases]
    K, b, G, R_c, a = (
        torch.stack([getattr(s, name).detach() for s in systems])
        for name in ("K", "b", "G", "R_c", "a")
    )
    h = torch.tensor([s.h for s in systems], dtype=torch.float64).view(-1, 1, 1)
    move, port, J_c = (systems[0].J - systems[0].R)[0].T, systems[0].g[0], systems[0].J_c.T
    C = K.new_zeros(len(cases), AGENTS, AGENTS, STATES, STATES)
    for e, (i, k) in enumerate(systems[0].links):
        C[:, i, k] = torch.stack([s.C[e].detach() for s in systems])
        C[:, k, i] = -C[:, i, k].mT
    y = torch.cat([case.y for case in cases])
    start = largest = y.new_zeros(len(cases))
    for t in range(steps):
        K_t, b_t = K[:, min(t, STEPS - 1)], b[:, min(t, STEPS - 1)]
        rows = torch.einsum("snij,snj->sni", K_t, y[..., 4:]) + b_t
        f, f_c = y[..., :4] + a, torch.einsum("snij,sni->snj", K_t, torch.tanh(rows))  # A is 1
        energy = 0.5 * f.square().sum((1, 2)) + log_cosh(rows).sum((1, 2))
        start = start if t else energy
        largest = torch.maximum(largest, energy.nan_to_num(1e300))
        u = -torch.einsum("snic,sni->snc", G, f_c)
        heard = torch.einsum("smnij,snj->smi", C, f_c)
        dxi = f_c @ J_c - R_c * f_c + heard + torch.einsum("snic,snc->sni", G, f @ port)
        y = y + h * torch.cat([f @ move + u @ port.T, dxi], -1)
    return Simulated(y, start, largest)


def blown(count: int, scales: tuple[float, float], horizons: int) -> dict[str, Any]:
    """How many of the same loops blow up by forward Euler: all of them at once."""
    cases = [drawn(number, scales) for number in range(count)]
    found = euler(cases, horizons * STEPS)
    bad = ~torch.isfinite(found.y).all((1, 2)) | ~(found.largest < BLOWN * found.start)
    return {"controllers": count, "blown": int(bad.sum()), "steps": horizons * STEPS}
