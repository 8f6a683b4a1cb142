"""Controllers: H-DNNs in time, one for each agent, coupled skew-symmetrically."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn import activations
from hdnn.control.plant import canonical, check_skew, edges, times
from hdnn.errors import OptionError, ShapeError, positive_int


class Controller(nn.Module):
    """A controller `xi' = (J - R) dH/dxi + sum_k C_ik dH/dxi_k + G y`, `u = -G^T dH/dxi`.

    Its energy `H_t = sum log cosh(K_t xi + b_t)` changes with time, with weights for each step. A
    controller receives its agent's output y and signals from its neighbours, and drives its agent
    with u: the energy that one loses, the other gains, for any weights. K, b, G and C are
    parameters; K starts the same in all steps.

    Args:
        agents: N, the number of agents.
        steps: T, the number of steps of a horizon.
        states: c, the number of states of each controller.
        inputs: m, the number of inputs of each agent's plant.
        links: pairs of agents whose controllers are coupled.
        J: a skew-symmetric matrix `(c, c)`; by default that of positions and momenta, for an even
            c.
        dissipation: the diagonal of R, >= 0: one number, `(c,)` or `(N, c)`.
        dtype: the dtype of the parameters, float32 or float64.

    Examples:
        >>> from hdnn import control
        >>> control.Controller(3, steps=100, links=[(0, 1), (1, 2)])
        Controller(3 agents, 100 steps, 4 states, 2 inputs, 2 links)
    """

    J: Tensor
    R: Tensor

    def __init__(
        self,
        agents: int,
        steps: int,
        *,
        states: int = 4,
        inputs: int = 2,
        links: Any = (),
        J: Tensor | None = None,
        dissipation: Any = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.agents = N = positive_int("agents", agents)
        self.steps = T = positive_int("steps", steps)
        self.states = c = positive_int("states", states)
        self.inputs = m = positive_int("inputs", inputs)
        self.links = edges(links, N)
        if J is None:
            if c % 2:
                raise ShapeError(
                    f"states must be even (positions and momenta), but is {c}; use an even number, "
                    "or pass J."
                )
            J = canonical(c)
        if J.shape != (c, c):
            raise ShapeError(f"J must be ({c}, {c}), but is {tuple(J.shape)}.")
        check_skew("J", J)
        R = torch.as_tensor(dissipation, dtype=torch.float64)
        if bool((R < 0).any()):
            raise OptionError(
                "dissipation must be >= 0, because it removes energy."
            )
        R = R.detach().expand(N, c)
        self.register_buffer("J", J.detach().double())
        self.register_buffer("R", R.clone())
        scale = c**-0.5
        E = len(self.links)
        K = scale * torch.randn(N, c, c, dtype=dtype)
        K = K.repeat(T, 1, 1, 1)
        b = torch.zeros(T, N, c, dtype=dtype)
        G = scale * torch.randn(N, c, m, dtype=dtype)
        C = 0.1 * torch.randn(E, c, c, dtype=dtype)
        self.K = nn.Parameter(K)
        self.b = nn.Parameter(b)
        self.G = nn.Parameter(G)
        self.C = nn.Parameter(C)

    def weights(self, t: int | Tensor, axes: int) -> tuple[Tensor, Tensor]:
        """K_t and b_t for states with so many axes; after the horizon, the last weights are kept.

        With a tensor of steps `(L,)`, the states are `(L, *batch, N, c)`.
        """
        t = torch.as_tensor(t, device=self.K.device)
        t = t.clamp(max=self.steps - 1)
        batch = [1] * (axes - 2 - t.ndim)
        lead = [*t.shape, *batch]
        K = self.K.index_select(0, t.flatten())
        b = self.b.index_select(0, t.flatten())
        N, c = b.shape[-2:]
        return K.view(*lead, N, c, c), b.view(*lead, N, c)

    def rows(self, xi: Tensor, t: int | Tensor) -> Tensor:
        """The rows `K_t xi + b_t`, for states as in `weights`."""
        K, b = self.weights(t, xi.ndim)
        return times(K, xi) + b

    def energy(self, xi: Tensor, t: int | Tensor) -> Tensor:
        """The energy of all controllers at step t, for states as in `rows`."""
        tanh = activations.get("tanh")
        energies = tanh.integral(self.rows(xi, t))
        return energies.sum((-2, -1))

    def config(self) -> dict[str, Any]:
        """The arguments of the constructor that are not tensors."""
        return {
            "agents": self.agents,
            "steps": self.steps,
            "states": self.states,
            "inputs": self.inputs,
            "links": [list(pair) for pair in self.links],
        }

    def constants(self) -> dict[str, Tensor]:
        """The arguments of the constructor that are tensors."""
        return {"J": self.J}

    def __repr__(self) -> str:
        return (
            f"Controller({self.agents} agents, {self.steps} steps, {self.states} states, "
            f"{self.inputs} inputs, {len(self.links)} links)"
        )
