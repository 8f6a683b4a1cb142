"""Gradients that grow: the paper's two-dimensional example, and a faster growth in H2.

y' = eps J tanh(y) (eq:2D_Example) runs around closed orbits of H = log cosh p + log cosh q. Larger
orbits take longer, so neighbouring states drift apart, linearly in t. The slope and the period have
closed forms. Growth by a factor per layer needs large steps: H2 with one weight k is unstable at
the origin if h k^2 > 2.

States y are `(*batch, 2)`; results have the batch shape of y.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.continuous import ContinuousNetwork
from hdnn.analysis.sensitivity import backward_sensitivity, norms
from hdnn.errors import OptionError, require
from hdnn.networks import H1, H2

RTOL = 1e-13
ATOL = 1e-15
NEWTON_STEPS = 3


def example(T: float, eps: float = 1.0) -> ContinuousNetwork:
    """The ODE of the example over a time T: a network with K = I, b = 0 and eps times J."""
    J = torch.tensor([[0.0, -eps], [eps, 0.0]], dtype=torch.float64)
    net = H1(
        features=2,
        layers=1,
        T=T,
        J=J,
        dtype=torch.float64,
        generator=torch.Generator(),  # whose weights are replaced
    )
    net.assign("K", torch.eye(2).unsqueeze(0))
    net.assign("b", torch.zeros(1, 2))
    return ContinuousNetwork(net, rtol=RTOL, atol=ATOL)


def energy(y: Tensor) -> Tensor:
    """H = log cosh p + log cosh q."""
    return activations.get("tanh").integral(y.double()).sum(-1)


def diameter(y: Tensor) -> Tensor:
    """The largest distance along an axis on the orbits through y."""
    H = energy(y)
    # acosh(exp(H)), without the digits that exp(H) loses if H is small
    return 2 * torch.asinh(torch.expm1(2 * H).sqrt())


def period(y: Tensor, eps: float = 1.0) -> Tensor:
    """The period 4/eps K(m) of the orbits through y, with m = 1 - exp(-2 H) and elliptic K."""
    speed = abs(eps)
    _, K, _ = _elliptic(y)
    return 4 * K / speed


def measured_period(y: Tensor, eps: float = 1.0) -> float:
    """The time after which the state y (2,) returns, found with Newton's method."""
    start = y.double()
    p, q = torch.tanh(start)
    velocity = eps * torch.stack([-q, p])
    square = velocity.square().sum()
    time = float(period(y, eps))
    for _ in range(NEWTON_STEPS):
        ahead = (example(time, eps).flow(start) - start) @ velocity
        time -= float(ahead / square)
    return time


def growth(y: Tensor, t: Tensor, eps: float = 1.0) -> Tensor:
    """dy(T)/dy(T - t) for y(T - t) = y and each t of (k,): `(k, *batch, 2, 2)`.

    The weights are constant in time, so this depends on t and the state, but not on T.
    """
    return example(float(t.max()), eps).forward_sensitivity(y, t)


def finite_growth(
    y: Tensor, t: Tensor, gamma: float, eps: float = 1.0
) -> Tensor:
    """|s(t, y + gamma e_i) - s(t, y)| / gamma for both unit vectors e_i: `(k, *batch, 2)`.

    The growth stops at about the diameter of the orbit divided by gamma, when the two states are on
    opposite sides (fig:phi_TTt_trajectories).
    """
    state = y.double().unsqueeze(-2)
    moved = state + gamma * torch.eye(2, dtype=torch.float64)
    starts = torch.cat([state, moved], -2)
    states = example(float(t.max()), eps).trajectory(starts, t)
    unmoved, moved = states.split([1, 2], -2)
    return (moved - unmoved).norm(dim=-1) / gamma


def envelope_slope(y: Tensor, eps: float = 1.0) -> Tensor:
    """The slope in t of the line through the maxima of |dy(T)/dy(T - t)|, for large t.

    After k turns, a neighbouring state is behind by k times the difference of the periods, so that
    Phi = -t P'(H)/P grad H(y) f(y(T))^T plus bounded terms, with the field f = eps J grad H. |grad
    H| is largest on the diagonal of the orbit, where it is sqrt(2 - 2 exp(-H)).
    """
    m, K, E = _elliptic(y)
    complement = 1 - m
    rate = (E / K - complement) / m  # P'(H)/P
    rate = rate.where(m > 1e-8, 0.5)
    first = torch.tanh(y.double()).norm(dim=-1)
    largest = (-2 * torch.expm1(-energy(y))).sqrt()
    return abs(eps) * rate * first * largest


def fitted_envelope(t: Tensor, sizes: Tensor) -> tuple[float, float]:
    """Slope and height at 0 of the line through the local maxima of sizes (k,) over t (k,).

    Only maxima in the second half count: earlier, the bounded terms are still large.
    """
    inner = sizes[1:-1]
    rises = inner > sizes[:-2]
    falls = inner >= sizes[2:]
    half = t[-1] / 2
    late = t[1:-1] >= half
    top = (rises & falls & late).nonzero().flatten() + 1
    if len(top) < 2:
        raise OptionError(
            f"the second half has {len(top)} local maxima, but a line needs two; use a longer t."
        )
    times = t[top].double().numpy()
    slope, height = np.polyfit(times, sizes[top].double().numpy(), 1)
    return float(slope), float(height)


class LayerGrowth(NamedTuple):
    """The growth of |dy_N/dy_j| with N - j at the origin of H2 with n = 2 and one weight k."""

    rate: float  # growth of the logarithm per layer, as measured
    exact: float  # the same in closed form
    largest: float  # of all the norms
    bound: float  # on the norms; infinite if there is none
    sizes: Tensor  # norms for N - j = 0 .. N


def layer_growth(h: float, k: float, layers: int = 64) -> LayerGrowth:
    """The measured growth per layer, with its closed form from the trace of the linear part.

    Near the origin a layer is [[1, -a], [a, 1 - a^2]] with a = h k^2 and trace 2 - a^2. For a < 2
    that is a rotation in other coordinates, and its powers stay below sqrt((2 + a) / (2 - a)). For
    a > 2 they grow as exp(2 acosh(a/2)) for each layer.
    """
    net = H2(
        features=2,
        layers=layers,
        step=h,
        tied=True,
        dtype=torch.float64,
        generator=torch.Generator(),  # whose weights are replaced
    )
    weight = torch.full((1, 1, 1), k, dtype=torch.float64)
    net.assign("K_p", weight)
    net.assign("K_q", weight)
    Phi = backward_sensitivity(net, torch.zeros(2, dtype=torch.float64))
    sizes = norms(Phi).flip(0)
    half = layers // 2
    first = sizes[: half + 1].max()  # norms may oscillate
    growth = (sizes[half + 1 :].max() / first).log()
    a = h * k * k
    bound = math.inf
    if a < 2:
        bound = math.sqrt((2 + a) / (2 - a))
    return LayerGrowth(
        rate=float(growth) / (layers - half),
        exact=2 * math.acosh(max(a, 2.0) / 2),
        largest=float(sizes.max()),
        bound=bound,
        sizes=sizes,
    )


def _elliptic(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """m = 1 - exp(-2H) and the complete elliptic integrals K(m) and E(m)."""
    special = require("scipy.special", extra="science")
    H = energy(y)
    m = -torch.expm1(-2 * H)
    K = special.ellipkm1(torch.exp(-2 * H).numpy())
    return m, torch.as_tensor(K), torch.as_tensor(special.ellipe(m.numpy()))
