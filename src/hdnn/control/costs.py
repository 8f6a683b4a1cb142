"""What a training of a closed loop minimises: distance, effort, collisions, roughness in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hdnn.control.controller import Controller
from hdnn.control.loop import ClosedLoop
from hdnn.errors import (
    DataError,
    OptionError,
    ShapeError,
    as_float,
    int_from,
    positive_float,
    quoted,
)

__all__ = [
    "barrier",
    "check_apart",
    "colliding",
    "collisions",
    "effort",
    "end",
    "nearest",
    "smoothness",
    "tracking",
]

Pairs = Sequence[tuple[int, int]]


def tracking(
    trajectory: Tensor,
    targets: Tensor,
    *,
    step: float,
    discount: float = 0.95,
    horizon: int | None = None,
) -> Tensor:
    """How far the agents are from their targets: `h sum_j discount^(T - t_j) |x_j - target|^2`.

    Args:
        trajectory: states `(steps + 1, *batch, N, n)`.
        targets: `(N, k)`, for the first k states of each agent.
        step: h; T is the time at the end.
        discount: what a unit of time before the end multiplies the cost by, above 0 and at most 1.
        horizon: the step at which T lies, by default the last; what comes later counts in full.

    Returns:
        The mean over all samples.

    Raises:
        ShapeError: if there is not a target for each agent, or one of more states than it has, or
            the horizon is not >= 1.
        StepError: if the step is not > 0.
        OptionError: if the discount is out of range.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> control.costs.tracking(torch.ones(3, 5, 2, 8), torch.zeros(2, 2), step=0.5, discount=1)
        tensor(6.)
    """
    h, rate = positive_float("step", step), as_float(discount)
    _check("trajectory", trajectory, 3, "(steps + 1, *batch, N, n)")
    if rate is None or not 0 < rate <= 1:
        raise OptionError(f"discount must be above 0 and at most 1, but got {quoted(discount)}.")
    N, n = trajectory.shape[-2:]
    _check("targets", targets, 2, f"({N}, k)")
    if targets.ndim != 2 or len(targets) != N or not 1 <= targets.shape[1] <= n:
        raise ShapeError(
            f"targets must be ({N}, k), a row an agent, for the first k of its {n} states, but are "
            f"{tuple(targets.shape)}."
        )
    apart = trajectory[..., : targets.shape[1]] - targets.to(trajectory)
    last = len(trajectory) - 1 if horizon is None else int_from(1, "horizon", horizon)
    left = h * (last - torch.arange(len(trajectory))).clamp(min=0).to(trajectory)
    squares = apart.square().sum((-2, -1)).reshape(len(left), -1).mean(1)
    return h * (rate**left * squares).sum()


def effort(inputs: Tensor, *, step: float) -> Tensor:
    """The work of the controllers: `h sum_j |u_j|^2`.

    Args:
        inputs: `(steps, *batch, N, m)`, as `ClosedLoop.inputs` returns them.
        step: h.

    Returns:
        The mean over all samples.

    Raises:
        ShapeError: if the inputs have fewer dimensions.
        StepError: if the step is not > 0.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> control.costs.effort(torch.ones(10, 5, 2, 2), step=0.5)
        tensor(20.)
    """
    _check("inputs", inputs, 3, "(steps, *batch, N, m)")
    squares = inputs.square().sum((-2, -1)).reshape(len(inputs), -1).mean(1)
    return positive_float("step", step) * squares.sum()


def barrier(
    trajectory: Tensor,
    *,
    step: float,
    distance: float = 0.7,
    dimensions: int = 2,
    pairs: Pairs | None = None,
) -> Tensor:
    """A price for agents that come close: `h sum_j 1/(d^2 + 0.001)` where d is below a distance.

    What it would be at that distance is taken off, so that it has no jump there.

    Args:
        trajectory: states `(steps + 1, *batch, N, n)`, positions first.
        step: h.
        distance: from which on nothing is paid.
        dimensions: how many of the first states are the position.
        pairs: which agents to compare; by default all.

    Returns:
        The mean over all samples.

    Raises:
        ShapeError: if an agent has fewer states than its position, or a pair does not name two of
            the agents.
        StepError: if the step or the distance is not > 0.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> near = torch.tensor([[0.0, 0.0], [0.1, 0.0]])
        >>> control.costs.barrier(near.expand(1, 1, 2, 2), step=1.0)
        tensor(88.8724)
    """
    h, far = positive_float("step", step), positive_float("distance", distance) ** 2
    _check("trajectory", trajectory, 3, "(steps + 1, *batch, N, n)")
    q, (i, k) = _positions(trajectory, dimensions), _ends(trajectory, pairs)
    pair, at = _nearer(_squares(q.detach(), i, k), far).nonzero().T  # most are far from each other
    squares = (q[:, i[pair], at] - q[:, k[pair], at]).square().sum(0)
    price = (1 / (squares + 1e-3) - 1 / (far + 1e-3)).sum()
    return h * price / max(1, q.shape[2] // len(trajectory))


def end(loop: ClosedLoop, trajectory: Tensor) -> Tensor:
    """The energy in the last state, by the last weights: it bounds all that follows.

    Args:
        loop: whose energy.
        trajectory: states `(steps + 1, *batch, N, n)`.

    Returns:
        The mean over all samples.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> plant = control.robots(torch.tensor([[1.0, 0.0]]))
        >>> loop = control.ClosedLoop(plant, control.Controller(1, steps=10))
        >>> trajectory = loop(loop.start(torch.zeros(3, 1, 4)))
        >>> bool(control.costs.end(loop, trajectory) < control.costs.end(loop, trajectory[:1]))
        True
    """
    return loop.energy(trajectory[-1], max(len(trajectory) - 2, 0)).mean()


def smoothness(controller: Controller) -> Tensor:
    """How much the weights change from step to step: `sum_t |K_t+1 - K_t|^2 + |b_t+1 - b_t|^2`.

    Args:
        controller: whose K and b.

    Returns:
        A number; 0 where the weights are the same in all steps.

    Examples:
        >>> from hdnn import control
        >>> control.costs.smoothness(control.Controller(2, steps=10)).item()
        0.0
    """
    K, b = controller.K, controller.b
    return (K[1:] - K[:-1]).square().sum() + (b[1:] - b[:-1]).square().sum()


def collisions(
    trajectory: Tensor, distance: float = 0.5, *, dimensions: int = 2, pairs: Pairs | None = None
) -> Tensor:
    """Which samples have two agents closer than a distance in any of their states.

    Args:
        trajectory: states `(steps + 1, *batch, N, n)`, positions first.
        distance: below which it is a collision.
        dimensions: how many of the first states are the position.
        pairs: which agents to compare; by default all.

    Returns:
        True for each sample with a collision, `(*batch,)`. Agents collide in a state in which the
        position of any of them, or of any that the pairs name, is not finite; an agent alone, or
        one that no pair names, never does. Half precision is computed in float32.

    Raises:
        ShapeError: if an agent has fewer states than its position, a pair does not name two of the
            agents, or the states are no real floating-point numbers.
        StepError: if the distance is not > 0.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> apart = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).expand(5, 1, 2, 2)
        >>> control.costs.collisions(apart), control.costs.collisions(apart, distance=4.0)
        (tensor([False]), tensor([True]))
    """
    far = positive_float("distance", distance) ** 2
    _check("trajectory", trajectory, 3, "(steps + 1, *batch, N, n)")
    if pairs is None:
        return colliding(trajectory, distance, dimensions=dimensions).any(-1).any(0)
    return _nearer(between(trajectory, dimensions, pairs), far).any(-1).any(0)


def colliding(y: Tensor, distance: float = 0.5, *, dimensions: int = 2) -> Tensor:
    """Which agents are closer than a distance to another one, in each state.

    Args:
        y: states `(*batch, N, n)`, positions first.
        distance: below which it is a collision.
        dimensions: how many of the first states are the position.

    Returns:
        True for each agent that collides, `(*batch, N)`: all agents of a state in which a position
        is not finite, but an agent alone never. Half precision is computed in float32.

    Raises:
        ShapeError: if an agent has fewer states than its position, or the states are no real
            floating-point numbers.
        StepError: if the distance is not > 0.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> control.costs.colliding(torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 0.1]]))
        tensor([False,  True,  True])
    """
    far = positive_float("distance", distance) ** 2
    return _nearer(_nearest(y, dimensions), far)


def nearest(y: Tensor, *, dimensions: int = 2) -> Tensor:
    """How far each agent is from the nearest other one, in each state.

    Args:
        y: states `(*batch, N, n)`, positions first.
        dimensions: how many of the first states are the position.

    Returns:
        Distances `(*batch, N)`: infinite for an agent alone, wherever it is, and NaN for all agents
        of a state in which a position is not finite; float32 for half precision.

    Raises:
        ShapeError: if an agent has fewer states than its position, or the states are no real
            floating-point numbers.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> control.costs.nearest(torch.tensor([[0.0, 0.0], [3.0, 0.0], [3.0, 0.5]]))
        tensor([3.0000, 0.5000, 0.5000])
    """
    return _nearest(y, dimensions).sqrt()


def check_apart(y: Tensor, distance: float = 0.5, *, dimensions: int = 2) -> None:
    """Raise if agents start in a collision.

    Args:
        y: states `(*batch, N, n)` to start from, positions first.
        distance: below which it is a collision.
        dimensions: how many of the first states are the position.

    Raises:
        DataError: if two agents of a sample are closer, or one of them is nowhere; it names them.
        ShapeError: if an agent has fewer states than its position, or the states are no real
            floating-point numbers.
        StepError: if the distance is not > 0.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> control.costs.check_apart(torch.zeros(2, 4))
        Traceback (most recent call last):
        hdnn.errors.DataError: agents 0 and 1 start in a collision: ...
    """
    far = positive_float("distance", distance) ** 2
    squares = between(y, dimensions, None)
    near = _nearer(squares, far).nonzero()
    if len(near):
        i, k = torch.triu_indices(y.shape[-2], y.shape[-2], 1)[:, near[0, -1]].tolist()
        found = float(squares[tuple(near[0])]) ** 0.5
        if found != found:
            raise DataError(f"agents {i} and {k} start where their distance is NaN.")
        raise DataError(
            f"agents {i} and {k} start in a collision: they are {found:.3g} apart, and {distance} "
            "is needed."
        )


def between(y: Tensor, dimensions: int, pairs: Pairs | None) -> Tensor:
    """Squared distances of pairs of agents, `(*batch, pairs)`; NaN from what is not finite."""
    q, (i, k) = _positions(y, dimensions), _ends(y, pairs)
    found, nowhere = _squares(q, i, k), ~torch.isfinite(q.detach()).all(0)
    if bool(nowhere.any()):
        found = found.masked_fill(nowhere[i] | nowhere[k], torch.nan)
    return found.T.reshape(*y.shape[:-2], len(found))


def _nearest(y: Tensor, dimensions: int) -> Tensor:
    """The square of how far each agent is from the nearest other one, `(*batch, N)`.

    Agents are sorted by their first coordinate, and each is compared with those beside it until
    these are further away in that coordinate alone: a crowd takes far fewer comparisons than pairs.
    """
    q = _positions(y.detach() if isinstance(y, Tensor) else y, dimensions)
    order = q[0].argsort(0)
    q = q.gather(1, order.expand_as(q))
    best = torch.full_like(q[0], torch.inf)
    for shift in range(1, q.shape[1]):
        apart = (q[:, shift:] - q[:, :-shift]).square()
        if not bool((apart[0] < torch.maximum(best[shift:], best[:-shift])).any()):
            break
        squares = apart.sum(0)
        for ends in (slice(shift, None), slice(None, -shift)):
            best[ends] = torch.minimum(best[ends], squares)
    if q.shape[1] > 1:
        best[:, ~torch.isfinite(q).all(0).all(0)] = torch.nan
    found = torch.empty_like(best).scatter_(0, order, best)
    return found.T.reshape(y.shape[:-1])


def _nearer(squares: Tensor, far: float) -> Tensor:
    """Which squared distances are below a bound; NaN is."""
    return ~(squares >= far)


def _check(name: str, given: Any, least: int, shape: str) -> None:
    if not isinstance(given, Tensor) or given.ndim < least:
        shown = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        raise ShapeError(f"{name} must be a tensor {shape}, but is {shown}.")


def _positions(y: Tensor, dimensions: int) -> Tensor:
    """Coordinates first and samples last, so that what belongs to an agent lies side by side."""
    _check("states", y, 2, "(*batch, N, n)")
    d = int_from(1, "dimensions", dimensions)
    if d > y.shape[-1]:
        raise ShapeError(
            f"an agent has {y.shape[-1]} states here, so that {d} of them are no position."
        )
    if not y.is_floating_point():
        raise ShapeError(
            f"states must be real floating-point numbers, but are {str(y.dtype)[6:]}; convert them "
            "by .double()."
        )
    samples = y.shape[:-2].numel()
    y = y.float() if y.dtype in (torch.float16, torch.bfloat16) else y  # squares would overflow
    return y[..., :d].reshape(samples, y.shape[-2], d).permute(2, 1, 0).contiguous()


def _ends(y: Tensor, pairs: Pairs | None) -> Tensor:
    """The first and the second agent of each pair."""
    N = y.shape[-2]
    if pairs is None:
        return torch.triu_indices(N, N, 1, device=y.device)
    try:
        given = pairs if isinstance(pairs, Tensor | np.ndarray) else [*pairs]
        ends = torch.as_tensor(given, device=y.device)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of other lengths, or no numbers
        ends = y.new_zeros(1)
    if not ends.numel():
        return ends.new_zeros(2, 0, dtype=torch.long)
    known = ends.ndim == 2 and ends.shape[1] == 2
    known = known and not (ends.is_floating_point() or ends.is_complex())
    known = known and int(ends.amin()) >= 0 and int(ends.amax()) < N
    if not known or bool((ends[:, 0] == ends[:, 1]).any()):
        raise ShapeError(
            f"pairs must be pairs (i, k) of two of the agents 0 .. {N - 1}, but got "
            f"{quoted(pairs)}."
        )
    return ends.long().T


def _squares(q: Tensor, i: Tensor, k: Tensor) -> Tensor:
    """Squared distances `(pairs, samples)`."""
    return (q[:, i] - q[:, k]).square().sum(0)
