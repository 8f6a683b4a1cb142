"""How a flow map learns: neighbouring states, Adam, and warnings about the data."""

from __future__ import annotations

import math
import warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdnn.errors import (
    ConvergenceError,
    DataError,
    DriftWarning,
    OptionError,
    ShapeError,
    positive_float,
    positive_int,
)
from hdnn.progress import Progress
from hdnn.training import graphs
from hdnn.training.fit import one_thread
from hdnn.training.recipes import rate_factor

CLIP = 1.0  # the largest norm of a gradient
WARM_UP = 0.02  # the part of all steps in which the rate rises
ROUND = 100  # steps whose windows are drawn together
MOST = 100  # different time steps
CHECKED = 2000  # windows that the data are checked by
# The parts of the error that a fault of the data must explain to be reported
SHRINKING = 0.5
UNEVEN = 0.8
LOST = 0.8  # the square of a relative error
JITTER = 0.05  # relative differences between time steps that are reported
ALIKE = 0.5  # the correlation of neighbours, below which a time is random


class Windows(NamedTuple):
    """Pieces of trajectories that begin at any time.

    `states` is `(horizon+1, W, n)`, `inputs` `(horizon, W, inputs)`, and `ratios` `(W,)`, the time
    steps of the windows as multiples of dt.
    """

    states: Tensor
    inputs: Tensor
    ratios: Tensor

    def select(self, rows: Any) -> Windows:
        return Windows(
            self.states[:, rows], self.inputs[:, rows], self.ratios[rows]
        )


@dataclass
class History:
    """A training of a flow map.

    Attributes:
        loss: the mean squared error of scaled states, of every hundred steps.
        error: the error of one step on windows that were held out, relative to the size of states.
    """

    loss: list[float] = field(default_factory=list)
    error: float = math.nan


def fit(
    flow: Any,
    trajectories: Any,
    *,
    dt: Any = None,
    inputs: Any = None,
    horizon: int = 1,
    steps: int = 20_000,
    batch: int = 250,
    learning_rate: float = 3e-2,
    seed: int = 0,
    progress: bool = True,
) -> History:
    """Train a flow map in place, by Adam on the squared error of the next states.

    The last tenth of the trajectories (of the time, if there is only one) is held out and measured
    at the end. A `DriftWarning` says if the data lose energy, which this map cannot, or if their
    times seem to be uneven.

    Args:
        flow: a `FlowMap`.
        trajectories: `(steps+1, *batch, n)`, time first; or a list of such, of any lengths.
        dt: the time between states: by default that of the map; or one number, or one for each
            step; for a list of trajectories a list of these.
        inputs: `(steps, *batch, inputs)`, or a list of them.
        horizon: steps that are predicted from a state before they are compared; with noisy data
            several average the noise.
        steps: of Adam. The rate rises at first, then falls as a cosine.
        batch: windows in a step.
        learning_rate: the largest rate.
        seed: of the order of the windows.
        progress: show a progress line at a terminal.

    Returns:
        A `History`.

    Raises:
        ShapeError: if trajectories or inputs do not fit the map.
        DataError: if a trajectory is too short, or not finite.
        ConvergenceError: if the training diverges.
    """
    steps = positive_int("steps", steps)
    rate = positive_float("learning_rate", learning_rate)
    train, held_out = _split(flow, trajectories, dt, inputs, horizon)
    _set_scale(flow, train.states[0])
    train = train._replace(states=flow.scaled(train.states))
    held_out = held_out._replace(states=flow.scaled(held_out.states))
    history = History()
    with ExitStack() as stack:
        if not train.states.is_cuda:
            stack.enter_context(one_thread())
        line = stack.enter_context(Progress("step", steps))
        descent = _Descent(flow, train, positive_int("batch", batch), seed)
        for first in range(0, steps, ROUND):
            rates = [
                rate * rate_factor(k / steps, steps, WARM_UP, "cosine")
                for k in range(first, min(first + ROUND, steps))
            ]
            loss = descent.run(rates)
            history.loss.append(loss)
            if not math.isfinite(loss):
                raise ConvergenceError(
                    f"the training diverged by step {first + len(rates)}; take a smaller "
                    "learning_rate."
                )
            if progress:
                line.update(first + ROUND, f"error {math.sqrt(loss):.2g}")
    history.error = _check(flow, held_out.select(slice(CHECKED)))
    return history


# Windows


def _split(
    flow: Any, trajectories: Any, dt: Any, inputs: Any, horizon: int
) -> tuple[Windows, Windows]:
    """The windows to learn from, sorted by their time steps, and those that are held out."""
    horizon = positive_int("horizon", horizon)
    if not isinstance(trajectories, (list, tuple)):
        trajectories, dt, inputs = [trajectories], [dt], [inputs]
    count = len(trajectories)
    if not isinstance(dt, (list, tuple)):
        dt = [dt] * count
    pieces = [
        _windows(flow, *piece, horizon)
        for piece in zip(
            trajectories, dt, inputs or [None] * count, strict=True
        )
    ]
    states, pushes, ratios = zip(*pieces, strict=True)
    data = Windows(
        torch.cat(states, 1), torch.cat(pushes, 1), torch.cat(ratios)
    )
    W = len(data.ratios)
    if not W:
        raise DataError(
            f"horizon={horizon} needs trajectories of {horizon + 1} or more states, with equal "
            "time steps between them."
        )
    values = len(data.ratios.unique())
    if values > MOST:
        raise OptionError(
            f"dt has {values} different values; round them to at most {MOST}."
        )
    end = W - W // 10
    train = data.select(slice(end))
    held_out = data.select(slice(end, None)) if end < W else train
    return train.select(train.ratios.argsort(stable=True)), held_out


def _windows(
    flow: Any, trajectory: Any, dt: Any, inputs: Any, horizon: int
) -> Windows:
    """All windows of a trajectory, or of several side by side, one after the other."""
    n = flow.net.features
    y = torch.as_tensor(trajectory)
    if y.ndim < 2 or y.shape[-1] != n:
        raise ShapeError(
            f"a trajectory must be (steps+1, *batch, {n}), but has shape {tuple(y.shape)}."
        )
    if not bool(y.isfinite().all()):
        raise DataError(
            "trajectories have entries that are NaN or infinite; leave them out."
        )
    T = len(y) - 1
    batch = y.shape[1:-1]
    y = y.reshape(T + 1, -1, n).to(flow.centre)
    shape = (T, *batch, flow.inputs)
    u = torch.zeros(*shape[:-1], 0) if inputs is None else inputs
    u = torch.as_tensor(u).to(y)
    if u.shape != shape:
        raise ShapeError(
            f"inputs of this map and these trajectories must be {shape}, but are {tuple(u.shape)}."
        )
    u = u.reshape(T, y.shape[1], flow.inputs)
    times = torch.as_tensor(flow.dt if dt is None else dt).double()
    if times.shape not in ((), (T,)) or not bool((times > 0).all()):
        raise ShapeError(
            f"dt must be one number > 0 or {T} of them, one for each step, but got {dt!r:.80}."
        )
    ratios = (times / flow.dt).expand(T).to(y)
    # The steps of each window that has equal ones
    first = torch.arange(max(T - horizon + 1, 0), device=y.device)
    steps = first[:, None] + torch.arange(horizon, device=y.device)
    steps = steps[(ratios[steps] == ratios[steps[:, :1]]).all(1)].mT
    ends = torch.cat([steps, steps[-1:] + 1])
    return Windows(
        y[ends].transpose(1, 2).flatten(1, 2),
        u[steps].transpose(1, 2).flatten(1, 2),
        ratios[steps[0]].repeat(y.shape[1]),
    )


def _set_scale(flow: Any, y: Tensor) -> None:
    """Scale p and q to unit size, and put the mean of q at 0."""
    p, q = y.chunk(2, -1)
    flow.centre.copy_(q.mean(0))
    sizes = torch.stack([p.square().mean(), (q - flow.centre).square().mean()])
    if not bool((sizes > 0).all()):
        raise DataError(
            "all momenta are zero, or positions never change; states are (p, q), momenta first."
        )
    flow.scale.copy_(sizes.sqrt())


# Adam


class _Descent:
    """Steps of Adam on random windows, those of a step with equal time steps."""

    def __init__(self, flow: Any, data: Windows, batch: int, seed: int) -> None:
        self.flow = flow
        self.data = data
        device = data.states.device
        self.generator = torch.Generator(device).manual_seed(seed)
        # Of the steps of a round
        self.rows = torch.zeros(ROUND, batch, dtype=torch.long, device=device)
        self.rates = torch.zeros(ROUND, device=device)
        self.losses = data.states.new_zeros(ROUND)
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.weights = list(flow.parameters())
        self.optimizer = torch.optim.Adam(
            self.weights,
            lr=torch.zeros((), device=device),
            fused=True,
            capturable=data.states.is_cuda,
        )
        self.step = self._step
        if data.states.is_cuda:
            self.step = graphs.recorded(
                self._step, flow, self.optimizer, self.count
            )

    def run(self, rates: list[float]) -> float:
        """Steps with these rates; returns their mean loss."""
        ratios = self.data.ratios
        self.rates[: len(rates)] = torch.tensor(rates)
        drawn = torch.randint(
            len(ratios),
            (ROUND, 1),
            generator=self.generator,
            device=ratios.device,
        )
        low = torch.searchsorted(ratios, ratios[drawn])
        high = torch.searchsorted(ratios, ratios[drawn], right=True)
        self.rows.random_(generator=self.generator)
        self.rows.remainder_(high - low).add_(low)
        self.count.zero_()
        for _ in rates:
            self.step()
        return self.losses[: len(rates)].mean().item()

    def _step(self) -> None:
        windows = self.data.select(self.rows.index_select(0, self.count)[0])
        loss = error(self.flow, windows, windows.ratios[0]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, CLIP)
        rate = self.rates.index_select(0, self.count)[0]
        self.optimizer.param_groups[0]["lr"].copy_(rate)
        self.optimizer.step()
        self.losses.index_copy_(0, self.count, loss.detach()[None])
        self.count += 1


def error(flow: Any, data: Windows, ratio: Any) -> Tensor:
    """Differences between predicted and true scaled states, `(horizon, W, n)`."""
    x = data.states[0]
    predicted = []
    for u in data.inputs:
        x = flow.move(x, u, ratio)
        predicted.append(x)
    return torch.stack(predicted) - data.states[1:]


# Checks of the data


@torch.no_grad()
def _check(flow: Any, data: Windows) -> float:
    """The error of one step; warns of data that this map cannot follow."""
    data = data.select(data.ratios == data.ratios.mode().values)
    data = data._replace(states=data.states[:2], inputs=data.inputs[:1])
    ratio = float(data.ratios[0])
    start, end = data.states
    r = -error(flow, data, ratio)[0]
    x = end - r
    total = r.square().sum()
    size = x.square().sum()
    rate = float((r * x).sum() / size)
    if rate * rate * size > SHRINKING * total and not flow.damped:
        lose, shrink = ("lose", "shrink") if rate < 0 else ("gain", "grow")
        warnings.warn(
            f"the data {lose} energy, which this map keeps: states {shrink} by {abs(rate):.2g} of "
            f"their size in each step, as with a damping of {-2 * rate / (ratio * flow.dt):.3g}, "
            f"and the error of a step stays at {float((total / size).sqrt()):.2g}; "
            "use FlowMap(.., damped=True).",
            DriftWarning,
            stacklevel=4,
        )
    elif total > LOST * size:
        warnings.warn(
            f"the map has learned nothing: the error of a step is "
            f"{float((total / size).sqrt()):.0%} of the size of states. Time must be the "
            "first axis of trajectories, and momenta come before positions.",
            DriftWarning,
            stacklevel=4,
        )
    elif not flow.inputs:
        spread = _jitter(start, x, r)
        if spread > JITTER:
            warnings.warn(
                f"the times between states seem to differ by {spread:.0%}; give the time step of "
                "each with dt=.",
                DriftWarning,
                stacklevel=4,
            )
    return float((total / size).sqrt())


def _jitter(start: Tensor, x: Tensor, r: Tensor) -> float:
    """How far time steps differ, if errors are as though they were random; else 0."""
    velocity = 0.5 * (x - start)
    speed = velocity.square().sum(-1)
    delay = (r * velocity).sum(-1) / speed
    late = (delay.square() * speed).sum()
    distance = torch.cdist(start, start)
    distance.fill_diagonal_(torch.inf)
    neighbours = torch.stack([delay, delay[distance.argmin(1)]])
    if late < UNEVEN * r.square().sum() or neighbours.corrcoef()[0, 1] > ALIKE:
        return 0.0
    return float((late / speed.sum()).sqrt())
