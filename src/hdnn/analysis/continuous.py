"""Networks in continuous time: the ODE that the layers discretise, and its sensitivities.

dy(T)/dy(t) has an ODE of its own (eq:BackwardGradientDynamics), solved beside that of the states.
Matrices are in denominator layout: for row vectors dy' = dy A with A = K^T D K J^T. Time runs from
0 to T here, and not from T back as in the paper, so the sign turns: dPhi/dt = -A Phi.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.modules import exact, state_rows
from hdnn.analysis.sensitivity import steps_of
from hdnn.errors import ConvergenceError, OptionError, require
from hdnn.networks import Network

Times = Tensor | Sequence[float] | float | None
FLOOR = 1e-11  # relative: the flow of an ODE is not known more accurately


class ContinuousNetwork:
    """The ODE that the layers discretise: `y' = J(t) K(t)^T sigma(K(t) y + b(t))` (eq:ODE_H).

    Each layer's weights hold on its own step `[t_j, t_{j+1}]`: the ODE that `net.refine(k)` tends
    to. A batch is solved as one system, in float64. Needs the extra `science`.

    All methods take states y `(*batch, n)` at t = 0, and times t in 0 .. T, by default those where
    layers meet. They raise a `ConvergenceError` if the ODE cannot be solved.

    Args:
        net: a network; of a `Model`, its net.
        method: of `scipy.integrate.solve_ivp`.
        rtol: relative tolerance of the solver, at least 1e-13.
        atol: absolute tolerance of the solver.

    Attributes:
        times: (N+1,), where layers start and end.
        T: the last of these times.
        J: the interconnection: (n, n), or (N, n, n) if it differs from layer to layer.

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
        method: str = "DOP853",
        rtol: float = 1e-10,
        atol: float = 1e-12,
    ) -> None:
        steps_of(net)
        self.options = {"method": method, "rtol": rtol, "atol": atol}
        self.net = exact(net).requires_grad_(False)
        field = self.net.field()
        self.J = field["J"]
        self._K = field["K"]
        self._b = field["b"]
        # The field is sigma(y K^T + b) V for rows y.
        self._V = self._K @ self.J.mT
        self._sigma = activations.get(self.net.activation)
        ends = steps_of(self.net).cumsum(0)
        self.times = torch.cat([ends.new_zeros(1), ends])
        self.T = float(self.times[-1])

    def trajectory(self, y: Tensor, t: Times = None) -> Tensor:
        """y(t): `(len(t), *batch, n)`."""
        rows = self._solve(self._rows(y), 0.0, self._times(t))[..., 0]
        return rows.reshape(-1, *y.shape)

    def flow(
        self, y: Tensor, *, start: float = 0.0, end: float | None = None
    ) -> Tensor:
        """The state at `end`, by default T, from y at `start`; backwards too: `(*batch, n)`."""
        stop = self._times(self.T if end is None else end)
        states = self._solve(self._rows(y), start, stop)
        return states[..., 0].reshape(y.shape)

    def sensitivity(self, y: Tensor, t: Times = None) -> Tensor:
        """dy(T)/dy(t) along the trajectory from y: `(len(t), *batch, n, n)`."""
        Phi = self._back(y, self._identity(y), t)
        return Phi.reshape(-1, *y.shape, y.shape[-1])

    def gradients(self, y: Tensor, delta_T: Tensor, t: Times = None) -> Tensor:
        """dL/dy(t) from delta_T = dL/dy(T), by its own ODE (eq:delta_CT): `(len(t), *batch, n)`."""
        delta = self._back(y, self._rows(delta_T), t)
        return delta.reshape(-1, *y.shape)

    def forward_sensitivity(self, y: Tensor, t: Times = None) -> Tensor:
        """dy(t)/dy(0) along the trajectory from y: `(len(t), *batch, n, n)`."""
        start = torch.cat([self._rows(y), self._identity(y)], -1)
        M = self._solve(start, 0.0, self._times(t))[..., 1:]
        return M.mT.reshape(-1, *y.shape, y.shape[-1])

    def _back(self, y: Tensor, columns: Tensor, t: Times) -> Tensor:
        """M(t) with dM/dt = -A(t) M and M(T) = columns (B, n, c): `(len(t), B, n, c)`."""
        end = torch.cat([self._rows(self.flow(y)), columns], -1)
        return self._solve(end, self.T, self._times(t))[..., 1:]

    def _rate(self, j: int, Z: Tensor, back: bool) -> Tensor:
        """dZ/dt in layer j, for Z = (y, M) of shape (B, n, 1 + c)."""
        x = Z[..., 0] @ self._K[j].mT + self._b[j]
        field = self._sigma(x) @ self._V[j]
        if Z.shape[-1] == 1:
            return field.unsqueeze(-1)
        A = self._K[j].mT @ (self._sigma.slope(x).unsqueeze(-1) * self._V[j])
        M = Z[..., 1:]
        growth = -A @ M if back else A.mT @ M
        return torch.cat([field.unsqueeze(-1), growth], -1)

    @torch.no_grad()
    def _solve(self, Z: Tensor, start: float, times: Tensor) -> Tensor:
        """Z at `times`, all on one side of `start`; no step crosses the end of a layer."""
        back = float(times.min()) < start
        sign = -1.0 if back else 1.0  # all that follows runs in sign * t
        wanted = (sign * times).tolist()
        layers = range(self.net.layers)
        ends = self.times[1:]
        if back:
            layers = layers[::-1]
            ends = -self.times[:-1].flip(0)
        now = sign * start
        last = max(wanted)
        states = {now: Z}
        for j, layer_end in zip(layers, ends.tolist(), strict=True):
            end = min(layer_end, last)
            if end > now:
                inside = sorted({t for t in wanted if now < t < end})
                piece = self._piece(j, states[now], [now, *inside, end], sign)
                states.update(piece)
                now = end
        return torch.stack([states[t] for t in wanted])

    def _piece(
        self, j: int, Z: Tensor, times: list[float], sign: float
    ) -> dict[float, Tensor]:
        """Z at these times sign * t within layer j, from Z at the first of them."""

        def rate(t: float, flat: np.ndarray) -> np.ndarray:
            state = torch.from_numpy(flat).view(Z.shape)
            rates = sign * self._rate(j, state, sign < 0)
            # The solver would try ever smaller steps.
            if not bool(rates.isfinite().all()):
                raise ConvergenceError(
                    f"the solution of the ODE is not finite at t = {sign * t:g}; "
                    "take smaller weights, states or T."
                )
            return rates.reshape(-1).numpy()

        solve_ivp = require("scipy.integrate", extra="science").solve_ivp
        start = Z.reshape(-1).numpy()
        span = (times[0], times[-1])
        solution = solve_ivp(rate, span, start, t_eval=times, **self.options)
        if not solution.success:
            raise ConvergenceError(
                f"the ODE cannot be solved: {solution.message}"
            )
        values = torch.tensor(solution.y.T).reshape(-1, *Z.shape)
        return dict(zip(times, values, strict=True))

    def _rows(self, y: Tensor) -> Tensor:
        """Samples as (B, n, 1) in float64."""
        return state_rows(y, self.net.features).unsqueeze(-1)

    def _identity(self, y: Tensor) -> Tensor:
        n = self.net.features
        return torch.eye(n, dtype=torch.float64).repeat(y.numel() // n, 1, 1)

    def _times(self, t: Times) -> Tensor:
        if t is None:
            return self.times
        times = torch.atleast_1d(torch.as_tensor(t, dtype=torch.float64))
        inside = times.clamp(0.0, self.T)
        if bool(((times - inside).abs() > 1e-6 * self.T).any()):
            raise OptionError(
                f"t must be times in 0 .. T = {self.T:g}, but got {t!r}."
            )
        return inside


@dataclass(frozen=True)
class Convergence:
    """Errors of a network against the flow of its ODE, from coarse to fine.

    Attributes:
        layers: of each refined network.
        steps: the mean h of each, T / layers.
        errors: the largest `|y_N - y(T)|` of all samples.
        order: the observed order of the finest two networks whose errors exceed that of the flow;
            NaN if there are none.
    """

    layers: tuple[int, ...]
    steps: tuple[float, ...]
    errors: tuple[float, ...]
    order: float


@torch.no_grad()
def convergence(
    net: Network, y: Tensor, refinements: Sequence[int] = (1, 2, 4, 8, 16)
) -> Convergence:
    """The order at which the layers of a network come closer to the flow of its ODE.

    The network runs with k times its layers at h/k. A smooth activation is needed for orders
    above 2.

    Args:
        net: a network that discretises an ODE.
        y: states `(*batch, n)`.
        refinements: the k, two or more.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.HamiltonianNet(features=4, layers=2, integrator="verlet")
        >>> round(hdnn.analysis.convergence(net, torch.randn(3, 4), refinements=(4, 8, 16)).order)
        2
    """
    ode = ContinuousNetwork(net, rtol=1e-13, atol=1e-15)
    flow = ode.flow(y)
    floor = FLOOR * max(1.0, float(flow.norm(dim=-1).max()))
    refined = [ode.net.refine(k) for k in sorted(refinements)]
    steps = [ode.T / fine.layers for fine in refined]
    errors = []
    for fine in refined:
        distances = (fine(y.to(flow)) - flow).norm(dim=-1)
        errors.append(float(distances.max()))
    order = math.nan
    for k in range(1, len(refined)):
        if errors[k] > floor:
            gain = math.log(errors[k - 1] / errors[k])
            order = gain / math.log(steps[k - 1] / steps[k])
    layers = tuple(fine.layers for fine in refined)
    return Convergence(layers, tuple(steps), tuple(errors), order)
