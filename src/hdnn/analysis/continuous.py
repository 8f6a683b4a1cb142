"""Networks in continuous time: the ODE that the layers discretise, and its sensitivities.

dy(T)/dy(t) has its own ODE (eq:BackwardGradientDynamics), solved together with the ODE of the
states. Matrices are in denominator layout: for row vectors dy' = dy A with A = K^T D K J^T. Here
time runs from 0 to T, not backwards from T as in the paper, so the sign changes: dPhi/dt = -A Phi.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.modules import exact, state_rows
from hdnn.analysis.sensitivity import steps_of
from hdnn.errors import ConvergenceError, OptionError, require
from hdnn.networks import Network

Times = Tensor | Sequence[float] | float | None
METHOD = "DOP853"  # an explicit Runge-Kutta method of order 8


class ContinuousNetwork:
    """The ODE that the layers discretise: `y' = J(t) K(t)^T sigma(K(t) y + b(t))` (eq:ODE_H).

    The weights of layer j apply during its step `[t_j, t_{j+1}]`: this is the ODE that
    `net.refine(k)` converges to. A batch is solved as one system, in float64. Needs the extra
    `science`.

    All methods take states y `(*batch, n)` at t = 0, and times t in 0 .. T, by default `times`. The
    methods raise a `ConvergenceError` if the ODE cannot be solved.

    Args:
        net: a network; for a `Model`, pass `model.net`.
        rtol: the relative tolerance of the solver, at least 1e-13.
        atol: the absolute tolerance of the solver.

    Attributes:
        times: (N+1,), the start and end of each layer.
        T: the last time.
        J: the interconnection matrix: (n, n), or (N, n, n) if it differs from layer to layer.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=4)
        >>> ode, y = hdnn.analysis.ContinuousNetwork(net), torch.randn(3, 4)
        >>> ode.trajectory(y).shape, ode.sensitivity(y).shape
        (torch.Size([5, 3, 4]), torch.Size([5, 3, 4, 4]))
        >>> bool((hdnn.analysis.norms(ode.sensitivity(y)) >= 1 - 1e-9).all())
        True
    """

    def __init__(
        self,
        net: Network,
        *,
        rtol: float = 1e-10,
        atol: float = 1e-12,
    ) -> None:
        steps_of(net)
        self.options = {
            "method": METHOD,
            "rtol": rtol,
            "atol": atol,
        }
        self.net = exact(net).requires_grad_(False)
        field = self.net.field()
        self.J = field["J"]
        self._K = field["K"]
        self._b = field["b"]
        # The field is sigma(y K^T + b) V for rows y.
        self._V = self._K @ self.J.mT
        if "a" in field:
            self._V = field["a"].unsqueeze(-1) * self._V
        self._sigma = activations.get(self.net.activation)
        ends = steps_of(self.net).cumsum(0)
        self.times = torch.cat([ends.new_zeros(1), ends])
        self.T = float(self.times[-1])

    def trajectory(self, y: Tensor, t: Times = None) -> Tensor:
        """y(t): `(len(t), *batch, n)`."""
        states = self._solve(self._rows(y), 0.0, self._times(t))
        return states[..., 0].reshape(-1, *y.shape)

    def flow(
        self, y: Tensor, *, start: float = 0.0, end: float | None = None
    ) -> Tensor:
        """The state at `end` (default T), from y at `start`, also backwards: `(*batch, n)`."""
        if end is None:
            end = self.T
        states = self._solve(self._rows(y), start, self._times(end))
        return states[..., 0].reshape(y.shape)

    def sensitivity(self, y: Tensor, t: Times = None) -> Tensor:
        """dy(T)/dy(t) along the trajectory from y: `(len(t), *batch, n, n)`."""
        Phi = self._back(y, self._identity(y), t)
        return Phi.reshape(-1, *y.shape, y.shape[-1])

    def gradients(self, y: Tensor, delta_T: Tensor, t: Times = None) -> Tensor:
        """dL/dy(t) from delta_T = dL/dy(T), by its own ODE (eq:delta_CT): `(len(t), *batch, n)`."""
        return self._back(y, self._rows(delta_T), t).reshape(-1, *y.shape)

    def forward_sensitivity(self, y: Tensor, t: Times = None) -> Tensor:
        """dy(t)/dy(0) along the trajectory from y: `(len(t), *batch, n, n)`."""
        times = self._times(t)
        start = torch.cat([self._rows(y), self._identity(y)], -1)
        M = self._solve(start, 0.0, times)[..., 1:]
        return M.mT.reshape(-1, *y.shape, y.shape[-1])

    def _back(self, y: Tensor, columns: Tensor, t: Times) -> Tensor:
        """M(t) with dM/dt = -A(t) M and M(T) = columns (B, n, c): `(len(t), B, n, c)`."""
        end = torch.cat([self._rows(self.flow(y)), columns], -1)
        return self._solve(end, self.T, self._times(t))[..., 1:]

    @torch.no_grad()
    def _solve(self, Z: Tensor, start: float, times: Tensor) -> Tensor:
        """Z at `times`, all on one side of `start`; no step crosses the end of a layer."""
        wanted = times.tolist()
        last = max(wanted)
        layers = list(range(self.net.layers))
        back = min(wanted) < start
        if back:
            last = min(wanted)
            layers.reverse()
        ends = self.times.tolist()
        states = {start: Z}
        for j in layers:
            first, final = ends[j : j + 2]
            begin = min(max(start, first), final)
            end = min(max(last, first), final)
            if begin == end:
                continue
            points = {begin, end}
            low = min(points)
            high = max(points)
            points.update(t for t in wanted if low < t < high)
            ordered = sorted(points, reverse=back)
            solution = self._solve_layer(j, states[begin], ordered)
            states.update(zip(ordered, solution, strict=True))
        return torch.stack([states[t] for t in wanted])

    def _solve_layer(self, j: int, Z: Tensor, points: list[float]) -> Tensor:
        """Z at some times within layer j, in order, from Z at the first of them."""
        back = points[-1] < points[0]

        def rate(t: float, flat: np.ndarray) -> np.ndarray:
            rates = self._rate(j, torch.from_numpy(flat).view(Z.shape), back)
            finite = bool(rates.isfinite().all())
            # The solver would try ever smaller steps.
            if not finite:
                raise ConvergenceError(
                    f"the solution of the ODE is not finite at t = {t:g}; use smaller weights, "
                    "states or T."
                )
            return rates.flatten().numpy()

        integrate = require("scipy.integrate", extra="science")
        solution = integrate.solve_ivp(
            rate,
            (points[0], points[-1]),
            Z.flatten().numpy(),
            t_eval=points,
            **self.options,
        )
        if not solution.success:
            raise ConvergenceError(
                f"the ODE cannot be solved: {solution.message}"
            )
        return torch.tensor(solution.y.T).reshape(-1, *Z.shape)

    def _rate(self, j: int, Z: Tensor, back: bool) -> Tensor:
        """dZ/dt in layer j, for Z = (y, M) of shape (B, n, 1 + c)."""
        K = self._K[j]
        V = self._V[j]
        y = Z[..., 0]
        M = Z[..., 1:]
        x = y @ K.mT + self._b[j]
        field = (self._sigma(x) @ V).unsqueeze(-1)
        if not M.numel():
            return field
        D = self._sigma.slope(x).unsqueeze(-1)
        A = K.mT @ (D * V)
        growth = -A @ M if back else A.mT @ M
        return torch.cat([field, growth], -1)

    def _rows(self, y: Tensor) -> Tensor:
        """Samples as (B, n, 1) in float64."""
        return state_rows(y, self.net.features).unsqueeze(-1)

    def _identity(self, y: Tensor) -> Tensor:
        n = self.net.features
        return torch.eye(n, dtype=torch.float64).repeat(y.numel() // n, 1, 1)

    def _times(self, t: Times) -> Tensor:
        if t is None:
            return self.times
        times = torch.as_tensor(t, dtype=torch.float64)
        times = torch.atleast_1d(times)
        inside = times.clamp(0.0, self.T)
        outside = (times - inside).abs()
        if bool((outside > 1e-6 * self.T).any()):
            raise OptionError(
                f"t must be times in 0 .. T = {self.T:g}, but got {t!r}."
            )
        return inside
