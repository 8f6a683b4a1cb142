"""Networks in continuous time: the ODE that the layers discretise, and its sensitivities.

The BSM dy(T)/dy(t) has an ODE of its own (eq:BackwardGradientDynamics), solved beside that of the
states. Matrices are in denominator layout: for row vectors dy' = dy A with A = K^T D K J^T. Time
runs from 0 to T here, and not from T back as in the paper, so the sign turns: dPhi/dt = -A Phi.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.copies import exact
from hdnn.base.shapes import Shapes
from hdnn.errors import (
    ConvergenceError,
    DataError,
    OptionError,
    ShapeError,
    StepError,
    choose,
    positive_float,
    require,
)
from hdnn.networks import Network, ODENetwork

Times = Tensor | Sequence[float] | float | None

WEIGHTS = ("constant", "linear")
_METHODS = ("RK23", "RK45", "DOP853", "Radau", "BDF", "LSODA")


class Weights(NamedTuple):
    """The weights at one time: the field is sigma(y K^T + b) V for rows y, with V = K J^T."""

    K: Tensor
    b: Tensor
    V: Tensor


class Piece(NamedTuple):
    """A time interval in which the weights change linearly from one layer's to another's."""

    start: float
    end: float
    first: int
    last: int


class ContinuousNetwork:
    """The ODE that the layers discretise: `y' = J(t) K(t)^T sigma(K(t) y + b(t))` (eq:ODE_H).

    It is made of the weights as they are now. No step of the solver crosses a time where the
    weights jump or bend. It solves a batch as one system: all samples share its steps, which it
    chooses by the mean of their errors. Results are float64, whatever the dtype of the network.
    Needs the extra `science`.

    Args:
        net: a network; of a `Model`, its net.
        weights: "constant" gives each layer's weights to its own step `[t_j, t_{j+1}]`: the ODE
            that `net.refine(k)` tends to. "linear" has them at the middle of the step and
            interpolates between middles, so that nothing jumps; the half steps at both ends are
            constant. J is interpolated too, except in MS1 and MS2, where `J K^T` is the same in all
            layers.
        method: of `scipy.integrate.solve_ivp`.
        rtol: relative tolerance of the solver, at least 1e-13.
        atol: absolute tolerance of the solver.

    Attributes:
        times: (N+1,), where layers start and end; the last one is `T`.
        J: the interconnection: (n, n), or (N, n, n) if it differs from layer to layer.

    Raises:
        OptionError: if the network discretises no ODE, or if an option is not known.
        StepError: if a tolerance is not positive or too small.
        DataError: if a weight is not finite.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=4)
        >>> ode, y = hdnn.analysis.ContinuousNetwork(net), torch.randn(3, 4)
        >>> ode.trajectory(y).shape, ode.sensitivity(y).shape
        (torch.Size([5, 3, 4]), torch.Size([5, 3, 4, 4]))
        >>> back = ode.flow(ode.flow(y), start=ode.T, end=0.0)
        >>> torch.allclose(back, y.double(), atol=1e-8)
        True
    """

    def __init__(
        self,
        net: Network,
        weights: str = "constant",
        *,
        method: str = "DOP853",
        rtol: float = 1e-10,
        atol: float = 1e-12,
    ) -> None:
        if not isinstance(net, Network):
            raise OptionError(
                f"only a network has an ODE, but got {type(net).__name__}; "
                "of a Model, give model.net."
            )
        self.weights = choose("weights", weights, WEIGHTS)
        self.method = choose("method", method, _METHODS)
        self.rtol, self.atol = positive_float("rtol", rtol), positive_float("atol", atol)
        if self.rtol < 1e-13:  # scipy would take a larger one, with a warning for each piece
            raise StepError(f"rtol must be at least 1e-13 in float64, but got {rtol}.")
        net = exact(net).requires_grad_(False)
        field = net.field()  # raises if there is none
        if not all(bool(part.isfinite().all()) for part in field.values()):
            raise DataError("the network has weights that are NaN or infinite; all must be finite.")
        assert isinstance(net, ODENetwork)
        self.net = net
        self.J, self._K, self._b = field["J"], field["K"], field["b"]
        self._J = self.J.expand(net.layers, -1, -1)
        self._V = self._K @ self._J.mT
        self._sigma = activations.get(net.activation)
        self.times = torch.nn.functional.pad(net.steps().cumsum(0), (1, 0))
        self._pieces = self._cut(self.times.tolist())

    @property
    def T(self) -> float:
        """The last of `times`, (N+1,), the times where layers start and end."""
        return float(self.times[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.net!r}, {self.weights} weights, {self.method})"

    # Solutions

    @torch.no_grad()
    def trajectory(self, y: Tensor, t: Times = None) -> Tensor:
        """y(t) from y(0) = y at times t, by default where layers meet: `(len(t), *batch, n)`."""
        return _shaped(self._follow(self._move, (self._states(y),), 0.0, self._wanted(t)), y)

    @torch.no_grad()
    def flow(self, y: Tensor, *, start: float = 0.0, end: float | None = None) -> Tensor:
        """The state at `end`, by default T, from y at `start`; backwards too: `(*batch, n)`."""
        states, begin = self._states(y), self._wanted([start]).item()
        stop = self._wanted([self.T if end is None else end])
        return _shaped(self._follow(self._move, (states,), begin, stop), y)[0]

    @torch.no_grad()
    def sensitivity(self, y: Tensor, t: Times = None) -> Tensor:
        """The BSM dy(T)/dy(t) along the trajectory from y(0) = y: `(len(t), *batch, n, n)`.

        By eq:BackwardGradientDynamics, back from `dy(T)/dy(T) = I`.
        """
        states = self._states(y)
        return _shaped(self._back(states, self._eye(states), t), y)

    @torch.no_grad()
    def gradients(self, y: Tensor, delta_T: Tensor, t: Times = None) -> Tensor:
        """dL/dy(t) from delta_T = dL/dy(T), by its own ODE (eq:delta_CT): `(len(t), *batch, n)`."""
        states, ends = self._states(y), self._states(delta_T, "delta_T")
        if y.shape != delta_T.shape:
            raise ShapeError(
                f"delta_T must have the shape of y, {tuple(y.shape)}, but has "
                f"{tuple(delta_T.shape)}."
            )
        return _shaped(self._back(states, ends.unsqueeze(-1), t).squeeze(-1), y)

    @torch.no_grad()
    def forward_sensitivity(self, y: Tensor, t: Times = None) -> Tensor:
        """dy(t)/dy(0) along the trajectory from y(0) = y: `(len(t), *batch, n, n)`."""
        states, wanted = self._states(y), self._wanted(t)
        start = (states, self._eye(states))
        return _shaped(self._follow(self._move_with, start, 0.0, wanted), y)

    def _back(self, states: Tensor, columns: Tensor, t: Times) -> Tensor:
        """M(t) with dM/dt = -A(t) M and M(T) = columns (B, n, c), along the path from y(0)."""
        wanted = self._wanted(t)
        ends = self.flow(states)
        return self._follow(self._move_against, (ends, columns), self.T, wanted)

    # Rates of change, given the weights at that time

    def _move(self, w: Weights, y: Tensor) -> tuple[Tensor, ...]:
        return (self._sigma(y @ w.K.mT + w.b) @ w.V,)

    def _move_with(self, w: Weights, y: Tensor, F: Tensor) -> tuple[Tensor, ...]:
        return *self._move(w, y), F @ self._A(w, y)

    def _move_against(self, w: Weights, y: Tensor, M: Tensor) -> tuple[Tensor, ...]:
        return *self._move(w, y), -(self._A(w, y) @ M)

    def _A(self, w: Weights, y: Tensor) -> Tensor:
        """K^T D K J^T at states (B, n): (B, n, n)."""
        D = self._sigma.slope(y @ w.K.mT + w.b)
        return w.K.mT @ (D.unsqueeze(-1) * w.V)

    # Weights in time

    def _cut(self, times: list[float]) -> list[Piece]:
        if self.weights == "constant":
            return [Piece(a, b, j, j) for j, (a, b) in enumerate(pairwise(times))]
        middles = [(a + b) / 2 for a, b in pairwise(times)]
        last = len(middles) - 1
        between = [Piece(a, b, j, j + 1) for j, (a, b) in enumerate(pairwise(middles))]
        return [Piece(0.0, middles[0], 0, 0), *between, Piece(middles[-1], times[-1], last, last)]

    def _at(self, piece: Piece, t: float) -> Weights:
        start, end, j, k = piece
        if j == k:
            return Weights(self._K[j], self._b[j], self._V[j])
        part = (t - start) / (end - start)
        K, b, J, V = (torch.lerp(x[j], x[k], part) for x in (self._K, self._b, self._J, self._V))
        return Weights(K, b, V if self.net.bare_activation else K @ J.mT)

    def _follow(
        self,
        move: Callable[..., tuple[Tensor, ...]],
        state: tuple[Tensor, ...],
        start: float,
        wanted: Tensor,
    ) -> Tensor:
        """The last part of the state at the wanted times, which are all on one side of `start`."""
        sign = 1 if float(wanted.sum()) >= start * len(wanted) else -1
        stops = sorted({start, *wanted.tolist()}, key=lambda t: sign * t)
        found, reached = [[part[None]] for part in state], [start]
        for piece in self._pieces[::sign]:
            ends = sorted((piece.start, piece.end), key=lambda t: sign * t)
            a, b = (sorted((stops[0], end, stops[-1]))[1] for end in ends)  # within the stops
            if a == b:
                continue
            times = [a, *(t for t in stops if sign * a < sign * t < sign * b), b]
            solution = self._solve(
                lambda t, *state, piece=piece: move(self._at(piece, t), *state),
                [parts[-1][-1] for parts in found],
                times,
            )
            for parts, part in zip(found, solution, strict=True):
                parts.append(part[1:])
            reached += times[1:]
        index = {t: i for i, t in enumerate(reached)}
        return torch.cat(found[-1])[[index[t] for t in wanted.tolist()]]

    def _solve(
        self,
        rates: Callable[..., tuple[Tensor, ...]],
        state: Sequence[Tensor],
        times: Sequence[float],
    ) -> list[Tensor]:
        """The state at all times, each tensor as (len(times), ...), given the state at the first.

        `rates(t, *state)` must be smooth from the first time to the last, which may be earlier.
        """
        solve_ivp = require("scipy.integrate", extra="science").solve_ivp
        sizes, shapes = [part.numel() for part in state], [part.shape for part in state]
        if not sum(sizes):  # no samples, no equation
            return [part.expand(len(times), *part.shape) for part in state]

        def join(parts: Sequence[Tensor]) -> np.ndarray:
            return torch.cat([part.reshape(-1) for part in parts]).numpy()

        def split(flat: np.ndarray) -> list[Tensor]:
            parts = torch.from_numpy(flat).split(sizes, -1)
            both = zip(parts, shapes, strict=True)
            return [part.reshape(*flat.shape[:-1], *shape) for part, shape in both]

        def rate(t: float, flat: np.ndarray) -> np.ndarray:
            found = join(rates(t, *split(flat)))
            if not np.isfinite(found).all():  # the solver would try ever smaller steps
                raise ConvergenceError(
                    f"the solution of the ODE is past the largest float64 at t = {t:g}; "
                    "take smaller weights, states or T."
                )
            return found

        start, end = times[0], times[-1]
        options = {"t_eval": times, "rtol": self.rtol, "atol": self.atol}
        with np.errstate(over="ignore", invalid="ignore"):  # `rate` raises one error for it
            done = solve_ivp(rate, (start, end), join(state), self.method, **options)
        if not done.success:
            raise ConvergenceError(
                f"{self.method} cannot solve the ODE between t = {start:g} and t = {end:g}: "
                f"{done.message}"
            )
        return split(np.ascontiguousarray(done.y.T))

    # What is given

    def _eye(self, states: Tensor) -> Tensor:
        n = self.net.features
        return torch.eye(n, dtype=states.dtype, device="cpu").expand(len(states), n, n)

    def _states(self, y: Tensor, name: str = "y") -> Tensor:
        """Samples as rows, (B, n), in float64."""
        n = self.net.features
        Shapes(type(self).__name__, y)
        if y.shape[-1] != n:
            raise ShapeError(f"{name} must be (*batch, {n}), but has shape {tuple(y.shape)}.")
        if not bool(y.isfinite().all()):
            raise DataError(f"{name} has an entry that is NaN or infinite; all must be finite.")
        return y.detach().to("cpu", torch.float64).reshape(-1, n)

    def _wanted(self, t: Times) -> Tensor:
        """The times asked for, (len(t),), moved into 0 .. T where rounding has put them outside."""
        if t is None:
            return self.times
        try:
            times = torch.atleast_1d(torch.as_tensor(t, dtype=torch.float64, device="cpu"))
        except (TypeError, ValueError, RuntimeError):
            times = self.times[:0]
        inside = times.clamp(0.0, self.T)
        rounding = 1e-12
        if isinstance(t, Tensor) and t.is_floating_point():
            rounding = max(rounding, torch.finfo(t.dtype).eps)
        close = bool(((times - inside).abs() <= rounding * self.T).all())
        if times.ndim > 1 or not len(times) or not close:
            raise StepError(f"t must be times in 0 .. T = {self.T:g}, but got {t!r}.")
        return inside


def _shaped(found: Tensor, y: Tensor) -> Tensor:
    """What was found for rows, (len(t), B, ...), for a batch like y, and on its device."""
    return found.reshape(len(found), *y.shape[:-1], *found.shape[2:]).to(y.device)
