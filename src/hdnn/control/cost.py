"""Costs of a closed loop: distance, effort, collisions, roughness in time, energy at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdnn.control.loop import ClosedLoop
from hdnn.errors import OptionError, ShapeError

TERMS = ("state", "effort", "barrier", "smoothness", "end")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A weighted sum of terms, a function of the loop and a trajectory; a mean over all samples.

    With h the step and T the time at the end of the horizon:

    - `state`: `h sum_j discount^(T - t_j) |z_j - rest|^2`, the distance of plants from their rest
      state
    - `effort`: `h sum_j |u_j|^2`
    - `barrier`: `h sum_j 1/(d^2 + 0.001)` for pairs of agents at a distance d below `distance`,
      less the value at `distance`, so that the barrier is continuous
    - `smoothness`: `sum_t |K_t+1 - K_t|^2 + |b_t+1 - b_t|^2` of the controllers
    - `end`: the energy in the last state, which bounds all later energies

    Args:
        state: the weight of the distance.
        discount: the discount of the distance, above 0 and at most 1.
        effort: the weight of the effort.
        barrier: the weight of the barrier.
        distance: the distance below which the barrier acts.
        smoothness: the weight of the smoothness.
        end: the weight of the energy at the end.
        dimensions: the number of coordinates of a position, which are an agent's first states; by
            default the number of inputs.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> loop = control.ClosedLoop(
        ...     control.robots(torch.zeros(2, 2)), control.Controller(2, steps=10)
        ... )
        >>> trajectory = loop(loop.start(torch.randn(3, 2, 4)))
        >>> sorted(control.Cost().terms(loop, trajectory))
        ['barrier', 'effort', 'end', 'smoothness', 'state']
    """

    state: float = 1.0
    discount: float = 0.95
    effort: float = 0.05
    barrier: float = 300.0
    distance: float = 1.2
    smoothness: float = 1e-3
    end: float = 10.0
    dimensions: int | None = None

    def __post_init__(self) -> None:
        for name in TERMS:
            weight = getattr(self, name)
            if not 0 <= weight < float("inf"):
                raise OptionError(f"{name} must be >= 0, but is {weight}.")
        if not 0 < self.discount <= 1:
            raise OptionError(
                f"discount must be above 0 and at most 1, but is {self.discount}."
            )

    def __call__(self, loop: ClosedLoop, trajectory: Tensor) -> Tensor:
        """The cost of a trajectory `(steps + 1, *batch, N, n)` from step 0 on."""
        terms = self.terms(loop, trajectory)
        values = [*terms.values()]
        return torch.stack(values).sum()

    def terms(self, loop: ClosedLoop, trajectory: Tensor) -> dict[str, Tensor]:
        """The terms of the sum by name, each multiplied by its weight."""
        values = {}
        for name in TERMS:
            weight = getattr(self, name)
            values[name] = trajectory.new_zeros(())
            if weight:
                term = getattr(self, f"_{name}")
                values[name] = weight * term(loop, trajectory)
        return values

    def _state(self, loop: ClosedLoop, trajectory: Tensor) -> Tensor:
        plant = loop.plant
        rest = plant.rest().to(trajectory)
        apart = trajectory[..., : plant.states] - rest
        squares = _mean_squares(apart)
        past = torch.arange(len(squares)).to(squares)
        left = loop.step * (loop.controller.steps - past)
        discounts = self.discount ** left.clamp(min=0)
        discounted = discounts * squares
        return loop.step * discounted.sum()

    def _effort(self, loop: ClosedLoop, trajectory: Tensor) -> Tensor:
        inputs = loop.inputs(trajectory)
        return loop.step * _mean_squares(inputs).sum()

    def _barrier(self, loop: ClosedLoop, trajectory: Tensor) -> Tensor:
        dimensions = self.dimensions or loop.plant.inputs
        squares = squared_distances(trajectory, dimensions)
        far = self.distance**2
        near = squares[squares < far]  # most pairs are far from each other
        at_distance = 1 / (far + 1e-3)
        prices = 1 / (near + 1e-3) - at_distance
        batch = trajectory.shape[1:-2]
        return loop.step * prices.sum() / batch.numel()

    def _smoothness(self, loop: ClosedLoop, trajectory: Tensor) -> Tensor:
        controller = loop.controller
        dK = controller.K.diff(dim=0)
        db = controller.b.diff(dim=0)
        moved = db.square().sum()
        return moved + dK.square().sum()

    def _end(self, loop: ClosedLoop, trajectory: Tensor) -> Tensor:
        last_step = len(trajectory) - 2
        energy = loop.energy(trajectory[-1], last_step)
        return energy.mean()


def collisions(
    trajectory: Tensor,
    distance: float = 0.5,
    *,
    dimensions: int = 2,
) -> Tensor:
    """True for each sample in which two agents come closer than a distance, `(*batch,)`.

    A position that is not finite counts as a collision.

    Args:
        trajectory: states `(steps + 1, *batch, N, n)`, positions first.
        distance: the distance below which agents collide.
        dimensions: the number of coordinates of a position.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> apart = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).expand(5, 1, 2, 2)
        >>> control.collisions(apart), control.collisions(apart, distance=4.0)
        (tensor([False]), tensor([True]))
    """
    squares = squared_distances(trajectory, dimensions)
    apart = squares >= distance**2
    return ~apart.all(-1).all(0)


def _mean_squares(x: Tensor) -> Tensor:
    """The squared norms of `(steps, *batch, N, m)`, a mean over samples for each step."""
    squares = x.square().sum((-2, -1))
    samples = squares.reshape(len(x), -1)
    return samples.mean(1)


def squared_distances(y: Tensor, dimensions: int) -> Tensor:
    """Squared distances of pairs of agents in states `(*batch, N, n)`: `(*batch, pairs)`."""
    N, n = y.shape[-2:]
    if not 1 <= dimensions <= n:
        raise ShapeError(
            f"an agent has {n} states, fewer than the {dimensions} coordinates of a position."
        )
    i, k = torch.triu_indices(N, N, 1, device=y.device)
    q = y[..., :dimensions]
    apart = q.index_select(-2, i) - q.index_select(-2, k)
    return apart.square().sum(-1)
