"""The cost of a closed loop: the weighted sum that a training minimises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from hdnn.base.listed import listed
from hdnn.control import costs
from hdnn.control.loop import ClosedLoop
from hdnn.control.rest import rest
from hdnn.errors import (
    SENSIBLE,
    OptionError,
    ShapeError,
    as_float,
    int_from,
    positive_float,
    quoted,
)

__all__ = ["WEIGHTS", "Cost", "rest"]

WEIGHTS = ("state", "effort", "barrier", "smoothness", "end")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a training of a closed loop minimises; called with the loop and a trajectory.

    It is the weighted sum of `hdnn.control.costs`: distance of plants from their rest, effort,
    barrier, smoothness of the weights over time, and the energy at the end, which bounds all that
    follows. A weight of 0 leaves a term out.

    Args:
        state: weight of `tracking`: all states of plants, against where their energy is smallest.
        discount: of `tracking`, above 0 and at most 1.
        effort: weight of `effort`.
        barrier: weight of `barrier`.
        distance: below which the barrier acts.
        smoothness: weight of `smoothness`.
        end: weight of `end`.
        pairs: which agents the barrier compares; by default all.
        dimensions: how many of an agent's first states are its position.

    Raises:
        OptionError: if a weight is negative or not finite, or the discount or the distance is out
            of range.
        StepError: if the distance is not > 0.
        ShapeError: if dimensions is no whole number >= 1, or pairs are no pairs of whole numbers.

    Examples:
        >>> import torch
        >>> from hdnn import control
        >>> problem = control.crossing()
        >>> trajectory = problem.loop(problem.start())
        >>> cost = control.Cost(effort=0.1)
        >>> sorted(cost.terms(problem.loop, trajectory))
        ['barrier', 'effort', 'end', 'smoothness', 'state']
        >>> bool(cost(problem.loop, trajectory) > 0)
        True
        >>> control.Cost.from_dict(cost.to_dict()) == cost
        True
    """

    state: float = 1.0
    discount: float = 0.95
    effort: float = 0.05
    barrier: float = 300.0
    distance: float = 1.2
    smoothness: float = 1e-3
    end: float = 10.0
    pairs: Sequence[tuple[int, int]] | None = None
    dimensions: int = 2

    def __post_init__(self) -> None:
        for name in WEIGHTS:
            number = as_float(getattr(self, name))
            if number is None or not 0 <= number <= SENSIBLE:
                raise OptionError(
                    f"the weight {name} must be finite and not negative, but got "
                    f"{quoted(getattr(self, name))}."
                )
            object.__setattr__(self, name, number)
        rate = as_float(self.discount)
        if rate is None or not 0 < rate <= 1:
            raise OptionError(
                f"discount must be above 0 and at most 1, but got {quoted(self.discount)}."
            )
        object.__setattr__(self, "discount", rate)
        far = positive_float("distance", self.distance)
        if far > SENSIBLE:
            raise OptionError(f"distance must be at most {SENSIBLE:g}, but got {far:g}.")
        object.__setattr__(self, "distance", far)
        object.__setattr__(self, "dimensions", int_from(1, "dimensions", self.dimensions))
        if self.pairs is not None:
            pairs = listed(self.pairs)
            if pairs is None:
                raise ShapeError(f"pairs must be pairs of agents, but got {quoted(self.pairs)}.")
            object.__setattr__(self, "pairs", tuple(_pair(pair) for pair in pairs))

    def __call__(self, loop: ClosedLoop, trajectory: Tensor) -> Tensor:
        """The cost of a trajectory of the loop, as a mean over all samples.

        Args:
            loop: whose weights.
            trajectory: states `(steps + 1, *batch, N, n)` from step 0 on; what comes after the
                first horizon counts without discount.

        Returns:
            A number with gradients.
        """
        return torch.stack([*self.terms(loop, trajectory).values()]).sum()

    def terms(self, loop: ClosedLoop, trajectory: Tensor) -> dict[str, Tensor]:
        """The terms of the sum by name, each times its weight.

        Args:
            loop: whose weights.
            trajectory: states `(steps + 1, *batch, N, n)` from step 0 on.

        Returns:
            Numbers with gradients.
        """
        h, p = loop.step, loop.plant.states
        zero = trajectory.new_zeros(())
        found = dict.fromkeys(WEIGHTS, zero)
        if self.state:
            horizon, target = loop.controller.steps, rest(loop.plant)
            options = {"step": h, "discount": self.discount, "horizon": horizon}
            found["state"] = costs.tracking(trajectory[..., :p], target, **options)
        if self.effort:
            found["effort"] = costs.effort(loop.inputs(trajectory), step=h)
        if self.barrier:
            options = {"distance": self.distance, "dimensions": self.dimensions}
            found["barrier"] = costs.barrier(trajectory, step=h, pairs=self.pairs, **options)
        if self.smoothness:
            found["smoothness"] = costs.smoothness(loop.controller)
        if self.end:
            found["end"] = costs.end(loop, trajectory)
        return {name: getattr(self, name) * value for name, value in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON can hold them."""
        pairs = None if self.pairs is None else [list(pair) for pair in self.pairs]
        return {**asdict(self), "pairs": pairs}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """The cost that `to_dict` wrote.

        Args:
            given: fields by name; those that are missing have their defaults.

        Returns:
            A cost.

        Raises:
            OptionError: if a name is not known, or a value is out of range.
        """
        if not isinstance(given, Mapping):
            raise OptionError(f"a cost is made of fields by name, but got {quoted(given)}.")
        unknown = sorted({*given} - {each.name for each in fields(cls)}, key=str)
        if unknown:
            raise OptionError(f"a cost has no {quoted(unknown[0])}.")
        return cls(**given)


def _pair(given: Any) -> tuple[int, int]:
    try:
        i, k = given
    except (TypeError, ValueError):
        raise ShapeError(f"pairs must be pairs of agents, but one is {quoted(given)}.") from None
    i, k = (int_from(0, "an agent of pairs", end) for end in (i, k))
    if i == k:
        raise ShapeError(f"pairs must be pairs of two agents, but one is {quoted(given)}.")
    return i, k
