"""How fast a network converges to the flow of its ODE when its layers are refined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from hdnn.analysis.continuous import ContinuousNetwork
from hdnn.errors import ShapeError, positive_int
from hdnn.networks import ODENetwork

FLOOR = 1e-11  # relative: the flow itself is not known more accurately


@dataclass(frozen=True)
class Convergence:
    """Errors of a network against the flow of its ODE, from coarse to fine."""

    layers: tuple[int, ...]
    steps: tuple[float, ...]  # T / layers
    errors: tuple[float, ...]  # the largest |y_N - y(T)| of all samples
    orders: tuple[float, ...]  # between neighbours
    order: float  # of the finest two networks whose errors exceed that of the flow


@torch.no_grad()
def convergence(
    net: ODENetwork, y: Tensor, refinements: Sequence[int] = (1, 2, 4, 8, 16)
) -> Convergence:
    """The observed order of the network's own integrator, with k times the layers at h/k.

    The ODE has each layer's weights on that layer's step, so it is the same for every k. A smooth
    activation is needed for orders above 2.
    """
    ode = ContinuousNetwork(net, rtol=1e-13, atol=1e-15)
    factors = sorted({positive_int("refinements", k) for k in refinements})
    if len(factors) < 2:
        raise ShapeError(
            f"an order needs two or more different refinements, but got {refinements}."
        )
    exact = ode.flow(y)
    states = y.to(exact)
    fine = [ode.net.refine(k) for k in factors]
    errors = [_largest(each(states.cpu()).to(exact) - exact) for each in fine]
    steps = [ode.T / each.layers for each in fine]
    both = list(zip(pairwise(steps), pairwise(errors), strict=True))
    orders = [_order(*pair) for pair in both]
    floor = FLOOR * max(1.0, _largest(exact))
    known = [order for order, (_, (_, finer)) in zip(orders, both, strict=True) if finer > floor]
    return Convergence(
        layers=tuple(each.layers for each in fine),
        steps=tuple(steps),
        errors=tuple(errors),
        orders=tuple(orders),
        order=known[-1] if known else math.nan,
    )


def _largest(states: Tensor) -> float:
    return float(torch.linalg.vector_norm(states, dim=-1).max())


def _order(steps: tuple[float, float], errors: tuple[float, float]) -> float:
    if not all(errors):
        return math.nan
    return math.log(errors[0] / errors[1]) / math.log(steps[0] / steps[1])
