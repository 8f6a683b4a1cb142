"""Controllers: H-DNNs in time, one an agent, with skew couplings between neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hdnn.control.energies import log_cosh
from hdnn.control.links import Edges, edges
from hdnn.control.plants import check_size, check_skew, counted
from hdnn.errors import InterconnectionError, OptionError, ShapeError, positive_int, quoted


class Controller(nn.Module):
    """A controller an agent: `xi' = (J - R) dH/dxi + sum_k C_ik dH/dxi_k + G y`, `u = -G^T dH/dxi`.

    Its energy changes with time, `H_t = sum log cosh(K_t xi + b_t)` with weights for each step. It
    hears its agent's output y and its neighbours, and drives its agent by u: what one of them
    loses the other gains, whatever the weights are. K, b, G and C are parameters; K starts the
    same in all steps.

    Args:
        agents: N.
        steps: T, the steps of a horizon.
        states: c, of each controller.
        inputs: m, of each agent's plant.
        links: who hears whom: pairs of agents, a symmetric 0-1 matrix (a tensor or an array), or a
            `hdnn.Sparsity`; by default nobody.
        J: skew-symmetric, `(c, c)`; by default positions and momenta, which needs an even c.
        dissipation: the diagonal of R, >= 0: a number, `(c,)` or `(N, c)`.
        dtype: of the parameters, float32 or float64.

    Raises:
        ShapeError: if a size is no whole number >= 1, or J or the dissipation has another shape.
        InterconnectionError: if J is not finite or skew-symmetric, or the dissipation is negative.
        OptionError: if the dtype is another one.
        SparsityError: if the links are no links of these agents.

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
        links: Any = None,
        J: Tensor | None = None,
        dissipation: Any = 0.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        N, T = positive_int("agents", agents), positive_int("steps", steps)
        c, m = positive_int("states", states), positive_int("inputs", inputs)
        if dtype not in (torch.float32, torch.float64):
            raise OptionError(
                f"dtype must be torch.float32 or torch.float64, but got {quoted(dtype)}."
            )
        check_size("weights", T, N, c, c)
        check_size("inputs", N, c, m)
        self.links: Edges = edges(links, N)
        self.register_buffer("J", _canonical(c) if J is None else _square(J, c))
        check_skew("J", self.J)
        self.register_buffer("R", _diagonal(dissipation, N, c))
        start = torch.randn(N, c, c, dtype=dtype) / c**0.5
        self.K = nn.Parameter(start.expand(T, N, c, c).clone())
        self.b = nn.Parameter(torch.zeros(T, N, c, dtype=dtype))
        self.G = nn.Parameter(torch.randn(N, c, m, dtype=dtype) / c**0.5)
        self.C = nn.Parameter(0.1 * torch.randn(len(self.links), c, c, dtype=dtype))

    @property
    def agents(self) -> int:
        """N."""
        return self.K.shape[1]

    @property
    def steps(self) -> int:
        """T."""
        return self.K.shape[0]

    @property
    def states(self) -> int:
        """c."""
        return self.K.shape[2]

    @property
    def inputs(self) -> int:
        """m."""
        return self.G.shape[2]

    def energy(self, xi: Tensor, t: int) -> Tensor:
        """The energy of all controllers in the states `(*batch, N, c)` at step t: `(*batch,)`.

        After the horizon, the weights of its last step stay.
        """
        return log_cosh(self.rows(xi, t)).sum((-2, -1))

    def rows(self, xi: Tensor, t: int) -> Tensor:
        """`K_t xi + b_t`, `(*batch, N, c)`."""
        t = min(t, self.steps - 1)
        return (self.K[t] @ xi.unsqueeze(-1)).squeeze(-1) + self.b[t]

    def extra_repr(self) -> str:
        return (
            f"{counted(self.agents, 'agent')}, {counted(self.steps, 'step')}, "
            f"{counted(self.states, 'state')}, {counted(self.inputs, 'input')}, "
            f"{counted(len(self.links), 'link')}"
        )


def _canonical(c: int) -> Tensor:
    if c % 2:
        raise ShapeError(
            f"states must be even, positions and momenta, but got {c}; or give a skew-symmetric J."
        )
    one, none = torch.eye(c // 2, dtype=torch.float64), torch.zeros(c // 2, c // 2).double()
    return torch.cat([torch.cat([none, one], 1), torch.cat([-one, none], 1)])


def _square(J: Tensor, c: int) -> Tensor:
    if not isinstance(J, Tensor) or J.shape != (c, c) or J.is_complex():
        shown = tuple(J.shape) if isinstance(J, Tensor) else type(J).__name__
        shown = "complex" if isinstance(J, Tensor) and J.is_complex() else shown
        raise ShapeError(f"J must be ({c}, {c}), but is {shown}.")
    return J.detach().double()


def _diagonal(given: Any, N: int, c: int) -> Tensor:
    wanted = f"dissipation must be a number, ({c},) or ({N}, {c}), but is"
    try:
        R = torch.as_tensor(given).detach()
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ShapeError(f"{wanted} {quoted(given)}.") from error
    if R.is_complex():
        raise ShapeError(f"{wanted} complex.")
    R = R.double() if isinstance(given, Tensor) else torch.as_tensor(given, dtype=torch.float64)
    if R.shape not in ((), (c,), (N, c)):
        raise ShapeError(f"{wanted} {tuple(R.shape)}.")
    if not bool((torch.isfinite(R) & (R >= 0)).all()):
        raise InterconnectionError("dissipation must be finite and >= 0 in every entry.")
    return R.expand(N, c).clone()
