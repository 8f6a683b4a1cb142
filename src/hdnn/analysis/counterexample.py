"""Gradients that do grow: the paper's two-dimensional example, and how H2 can do worse.

y' = eps J tanh(y) (eq:2D_Example) runs around closed orbits of H = log cosh p + log cosh q. Larger
orbits take longer, so neighbours drift apart: linearly in t, for any eps, with a slope that has a
closed form, as the period has. Growth by a factor per layer needs large steps: H2 with one weight k
is unstable at the origin where h k^2 > 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn import functional, interconnection
from hdnn.analysis.continuous import ContinuousNetwork
from hdnn.analysis.sensitivity import backward_sensitivity, norms
from hdnn.errors import (
    OptionError,
    ShapeError,
    StepError,
    as_float,
    positive_float,
    positive_int,
    require,
)
from hdnn.networks import H1, H2

RTOL, ATOL = 1e-13, 1e-15
CPU: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}  # where scipy is


def example(T: float, eps: float = 1.0) -> ContinuousNetwork:
    """The ODE of eq:2D_Example over a time T: a network with K = I, b = 0 and eps times J."""
    J = _speed(eps) * interconnection.canonical(2, **CPU)
    net = H1(2, 1, T=T, J=J, generator=torch.Generator(), **CPU)
    net.assign("K", torch.eye(2, **CPU)[None])
    net.assign("b", torch.zeros(1, 2, **CPU))
    return ContinuousNetwork(net, rtol=RTOL, atol=ATOL)


def energy(y: Tensor) -> Tensor:
    """H = log cosh p + log cosh q, for states (*batch, 2): (*batch)."""
    return functional.energy(_plane(y), torch.eye(2, **CPU), torch.zeros(2, **CPU))


def period(y: Tensor, eps: float = 1.0) -> Tensor:
    """P = 4/eps K(m), m = 1 - exp(-2 H(y)), of the orbits through states (*batch, 2): (*batch).

    K is the complete elliptic integral of the first kind, of the parameter m.
    """
    return 4 * _elliptic(y)[1] / abs(_speed(eps))


def measured_period(y: Tensor, eps: float = 1.0) -> float:
    """The mean time between crossings of q = 0 where p > 0, over a few turns from y (2,)."""
    solve_ivp = require("scipy.integrate", extra="science").solve_ivp
    start, speed = _plane(y).numpy(), abs(_speed(eps))  # both directions take equally long
    if start.shape != (2,) or not start.any():
        raise ShapeError(f"one state (2,) other than the origin is needed, but y = {y}.")
    done = solve_ivp(
        lambda _, state: speed * np.array([-np.tanh(state[1]), np.tanh(state[0])]),
        (0.0, 12 * (float(energy(y)) + 2) / speed),  # three turns or more
        start,
        "DOP853",
        events=lambda _, state: state[1],
        rtol=RTOL,
        atol=ATOL,
    )
    times = done.t_events[0][done.y_events[0][:, 0] > 0]
    return float(times[-1] - times[0]) / (len(times) - 1)


def diameter(y: Tensor) -> Tensor:
    """The largest distance on the orbits through states (*batch, 2), along an axis: (*batch)."""
    return 2 * torch.acosh(energy(y).exp())


# Linear growth


def growth(y: Tensor, t: Tensor, eps: float = 1.0) -> Tensor:
    """Phi = dy(T)/dy(T - t) for y(T - t) = y and each t of (k,): (k, *batch, 2, 2).

    The weights are constant in time, so it depends on t and the state, but not on T.
    """
    return example(float(t.max()), eps).forward_sensitivity(y, t)


def finite_growth(y: Tensor, t: Tensor, gamma: float, eps: float = 1.0) -> Tensor:
    """|s(t, y + gamma e_i) - s(t, y)| / gamma for both unit vectors e_i: (k, *batch, 2).

    That is what fig:phi_TTt_trajectories shows. It stops growing at about the diameter of the orbit
    over gamma, when the two states are on opposite sides.
    """
    gamma = positive_float("gamma", gamma)
    state = _plane(y).unsqueeze(-2)
    moved = torch.cat([state, state + gamma * torch.eye(2, **CPU)], -2)
    states = example(float(t.max()), eps).trajectory(moved, t)
    return (states[..., 1:, :] - states[..., :1, :]).norm(dim=-1) / gamma


def envelope_slope(y: Tensor, eps: float = 1.0) -> Tensor:
    """The slope in t of the line through the maxima of |dy(T)/dy(T - t)|, for large t: (*batch).

    After k turns a neighbour is behind by k times the difference of the periods, so that
    Phi = -t P'(H)/P grad H(y) f(y(T))^T plus bounded terms, with the field f = eps J grad H.
    |grad H| is largest on the diagonal of the orbit, where it is sqrt(2 - 2 exp(-H)).
    """
    m, K, E = _elliptic(y)
    rate = ((E / K - (1 - m)) / m).where(m > 1e-8, 0.5)  # P'(H)/P, 1/2 in the limit
    H, gradient = energy(y), torch.tanh(_plane(y)).norm(dim=-1)
    return abs(_speed(eps)) * rate * gradient * (-2 * torch.expm1(-H)).sqrt()


def fitted_envelope(t: Tensor, sizes: Tensor) -> tuple[float, float]:
    """Slope and height at 0 of the line through the local maxima of sizes (k,) over t (k,).

    Only maxima in the second half count: before, the bounded terms are not small yet.
    """
    if t.ndim != 1 or t.shape != sizes.shape:
        raise ShapeError(
            f"t and sizes must both be (k,), but are {tuple(t.shape)} and {tuple(sizes.shape)}."
        )
    inner = sizes[1:-1]
    top = ((inner > sizes[:-2]) & (inner >= sizes[2:]) & (t[1:-1] >= t[-1] / 2)).nonzero()[:, 0] + 1
    if len(top) < 2:
        raise OptionError(
            f"the second half has {len(top)} local maxima, but a line needs two; take a longer t."
        )
    slope, height = np.polyfit(t[top].double().numpy(), sizes[top].double().numpy(), 1)
    return float(slope), float(height)


# Exponential growth


@dataclass(frozen=True)
class LayerGrowth:
    """How |dy_N/dy_j| grows with N - j at the origin of H2 with n = 2 and one weight k."""

    rate: float  # growth of the logarithm per layer, as measured
    exact: float  # the same in closed form
    largest: float  # of all the norms
    bound: float  # on the norms; infinite if there is none
    sizes: Tensor  # norms for N - j = 0 .. N


def layer_growth(h: float, k: float, layers: int = 64) -> LayerGrowth:
    """Measured growth per layer beside its closed form, from the trace of the linear part.

    Near the origin a layer is [[1, -a], [a, 1 - a^2]] with a = h k^2 and trace 2 - a^2. For a < 2
    that is a rotation in other coordinates, and its powers stay below sqrt((2 + a) / (2 - a)). For
    a > 2 they grow as exp(2 acosh(a/2)) for each layer.
    """
    h, k = positive_float("h", h), positive_float("k", k)
    layers, any_weights = positive_int("layers", layers), torch.Generator()
    net = H2(2, layers, step=h, tied=True, generator=any_weights, **CPU)
    for name in ("K_p", "K_q"):
        net.assign(name, torch.full((1, 1, 1), k, **CPU))
    sizes = norms(backward_sensitivity(net, torch.zeros(2, **CPU))).flip(0)
    half, a = layers // 2, h * k * k
    tops = sizes[: half + 1].max(), sizes[half + 1 :].max()  # norms may oscillate
    return LayerGrowth(
        rate=float((tops[1] / tops[0]).log()) / (layers - half),
        exact=2 * math.acosh(max(a, 2.0) / 2),
        largest=float(sizes.max()),
        bound=math.sqrt((2 + a) / (2 - a)) if a < 2 else math.inf,
        sizes=sizes,
    )


def _elliptic(y: Tensor) -> list[Tensor]:
    """m = 1 - exp(-2H) and the complete elliptic integrals K(m) and E(m)."""
    special = require("scipy.special", extra="science")
    H = energy(y).numpy()
    m = -np.expm1(-2 * H)
    found = m, special.ellipkm1(np.exp(-2 * H)), special.ellipe(m)
    return [torch.as_tensor(x, **CPU) for x in found]


def _plane(y: Tensor) -> Tensor:
    if not isinstance(y, Tensor) or y.ndim < 1 or y.shape[-1] != 2:
        given = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ShapeError(f"the example has states (*batch, 2), but got {given}.")
    return y.detach().to(**CPU)


def _speed(eps: float) -> float:
    number = as_float(eps)
    if not number or not math.isfinite(number):
        raise StepError(f"eps must be a finite number other than 0, but got {eps!r}.")
    return number
