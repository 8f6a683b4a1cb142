"""One backward pass over a network: the norms of all dy_N/dy_j, and bounds on their rounding.

The matrices are kept as P 2^e, so that norms of 10^400 or 10^-400 are no problem. What cannot be
computed is NaN, with the reason in words. With u = n eps, rounding is bounded like this:

- The factor M_k of a layer is off by u size_k, where size_k is the product of the norms of all that
  it is made of. Its own norm can be much smaller.
- Phi_k = M_k Phi_{k+1}, so that Phi_k^T J Phi_k - J takes over that of Phi_{k+1} as it is, and
  2 u size_k |M_k| |Phi_{k+1}|^2 |J| is added.
- Phi_j = (Phi_j Phi_k^-1) M_k Phi_{k+1}, so that layer k moves Phi_j by no more than |Phi_j| times
  u size_k |Phi_{k+1}| |Phi_k^-1|: eps times a condition number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.sensitivity import factors, norms, trajectory
from hdnn.errors import HDNNError, OptionError
from hdnn.networks import Network, ODENetwork
from hdnn.networks.promise import own_methods

HIDDEN = 0.01  # relative: with a larger error bound, nothing can be concluded


class Measured:
    """norm(dy_N/dy_j) for some layers j, at B samples, and what was seen beside it.

    `norms` (L+1, B) has a row for each of `layers` and one for j = N. They are NaN for samples that
    could not be computed, and `why` says what was wrong with these; past the largest float they are
    infinite.
    """

    depth: int  # N
    features: int
    layers: Sequence[int]
    norms: Tensor
    why: str = ""
    overflow: int | None = None  # the last layer with an infinite norm
    defect: float | None = None  # of symplecticity; None if layers have different J
    symplectic: bool | None = None  # None where it is not promised or rounding hides it

    def judged(self, norm: float) -> tuple[bool | None, str]:
        """Whether all norms are at least 1, given the smallest one; if unknown, also why."""
        raise NotImplementedError


def at_least_1(norm: float, slack: float) -> tuple[bool | None, str]:
    """Whether a norm is at least 1, where rounding can have moved it by `slack`, relatively."""
    if norm >= 1 - min(slack, HIDDEN):
        return True, ""
    if norm >= 1 - slack:
        return None, f"a norm of {norm:.6g} is below 1 by less than rounding can make it"
    return False, ""


class MeasuredNetwork(Measured):
    """All norms of a network at states y (B, n) of its dtype, without samples that are `lost`."""

    @torch.no_grad()
    def __init__(self, net: Network, y: Tensor, lost: Tensor | None = None) -> None:
        self.net, self.depth, self.features = net, net.layers, net.features
        self.layers, self.eps = range(net.layers), torch.finfo(y.dtype).eps
        self.norms = y.new_full((net.layers + 1, len(y)), torch.nan)
        self._computed = torch.arange(0)
        self.states: Tensor | None = None  # (N+1, B, n), and
        self.whole: Tensor | None = None  # dy_N/dy_0, if all samples could be computed
        try:
            states = trajectory(net, y)
        except OptionError as error:  # `layer` does not do what the network does
            self.why = str(error).rstrip(".")
            return
        self.why = why_not(net, states)
        fine = states.isfinite().all(-1).all(0)
        self._computed = (fine if lost is None else fine & ~lost).nonzero()[:, 0]
        self._states = states[:, self._computed]
        if len(self._computed):
            self._go_back()

    def _go_back(self) -> None:
        J, size, (P, e) = constant_J(self.net), sizes(self.net), self._identity()
        eye, B = P, len(P)
        fine = torch.ones(B, dtype=torch.bool)
        found = P.new_ones(self.net.layers + 1, B)
        defects = None if J is None else Defects(J, B, self.eps, power=1 + self.net.implicit)
        for j, M in factors(self.net, self._states):
            P, e = scaled(M @ P, e)
            lost = fine & ~P.isfinite().flatten(1).all(1)
            if bool(lost.any()):
                self.why = self.why or f"dy_{j + 1}/dy_{j} is past the largest number of its dtype"
                fine = fine & ~lost
            P = P.where(fine[:, None, None], eye)
            largest = torch.linalg.svdvals(P)[:, 0]
            found[j] = (largest * torch.exp2(e)).where(fine, torch.nan)
            if self.overflow is None and bool(found[j].isinf().any()):
                self.overflow = j
            if defects is not None:
                defects.see(P, e, largest, size[j] * M.flatten(1).norm(dim=1), fine)
        found[:-1, ~fine] = torch.nan
        self.norms[:, self._computed] = found
        self._computed, self._states = self._computed[fine], self._states[:, fine]
        if len(self._computed) == self.norms.shape[1]:
            self.states, self.whole = self._states, P * torch.exp2(e)[:, None, None]
        if defects is not None and len(self._computed):
            self.defect = defects.worst
            promised = self.net.symplectic and not own_methods(self.net)
            self.symplectic = defects.symplectic if promised else None

    def judged(self, norm: float) -> tuple[bool | None, str]:
        return at_least_1(norm, 0.0 if norm >= 1 else self.slack())

    @torch.no_grad()
    def slack(self) -> float:
        """How far rounding can have moved the smallest norm, relatively."""
        seen = self.norms[:-1, self._computed]
        j, i = divmod(int(seen.argmin()), len(self._computed))
        net, states = self.net, self._states[j:, i : i + 1]
        M = net.layer_jacobians(states, slice(j, net.layers))[:, 0]
        Phi = [torch.eye(self.features, dtype=M.dtype)]
        for one in M.flip(0):
            Phi.append(one @ Phi[-1])
        values = torch.linalg.svdvals(torch.stack(Phi[::-1]))
        low = values[:-1, -1].clamp_min(self.eps * values[:-1, 0])
        power = 1 + net.implicit
        moved = torch.maximum(sizes(net)[j:], torch.ones(1)) * norms(M) ** (power - 1)
        moved = torch.maximum(moved, norms(M)) * values[1:, 0] / low
        return float(4 * self.features * self.eps * (1 + moved.sum()))

    @torch.no_grad()
    def singular_range(self) -> tuple[float, float]:
        """The extreme singular values over all dy_N/dy_j; NaN where they are not known.

        The smallest is known for layers of shears. It is one over the norm of the inverse, computed
        by undoing the layers: accurate however small it is. Computed from the matrix itself, it
        would drown in the rounding of the largest.
        """
        if len(self._computed) < self.norms.shape[1]:
            return math.nan, math.nan
        P, e = self._identity()
        least, most = math.nan, 1.0
        for _, M in factors(self.net, self._states, undone=True):
            P, e = scaled(P @ M, e)
            size = P.flatten(1).norm(dim=1) * torch.exp2(e)  # at least the 2-norm
            place = ~(size <= most)
            if bool(place.any()):
                found = (norms(P[place]) * torch.exp2(e[place])).max().item()
                most = found if math.isnan(found) else max(most, found)
            least = 1 / most
        return least, max(1.0, self.norms[:-1].max().item())

    def _identity(self) -> tuple[Tensor, Tensor]:
        """P and e of dy_N/dy_N, for each sample."""
        eye = torch.eye(self.features, dtype=self._states.dtype)
        return eye.repeat(len(self._computed), 1, 1), eye.new_zeros(len(self._computed))


class Defects:
    """|Phi^T J Phi - J| relative to |J| times the largest |Phi|^2 so far, against its rounding."""

    def __init__(self, J: Tensor, B: int, eps: float, *, power: int) -> None:
        self.J, self.power = J / norms(J).clamp_min(torch.finfo(J.dtype).tiny), power
        self.log = self.highest = self.growth = J.new_zeros(B)  # log2 |Phi|, the largest so far
        self.unit = 8 * len(J) * eps
        self.worst, self.hidden, self.broken = 0.0, False, False

    def see(self, P: Tensor, e: Tensor, largest: Tensor, moved: Tensor, fine: Tensor) -> None:
        """Add Phi = P 2^e with |P| = largest; its layer has rounded it by eps times `moved`."""
        before, self.log = self.log, largest.log2() + e
        highest = torch.maximum(self.highest, self.log)
        self.growth = self.growth * torch.exp2(2 * (self.highest - highest))
        self.growth = self.growth + moved**self.power * torch.exp2(2 * (before - highest))
        self.highest = highest
        Q = P * torch.exp2(e - highest)[:, None, None]
        left = Q.mT @ self.J @ Q - self.J * torch.exp2(-2 * highest)[:, None, None]
        allowed = self.unit * (1 + self.growth)
        size = left.flatten(1).norm(dim=1)  # at least the 2-norm
        place = fine & ((size > self.worst) | ~(size <= allowed))
        if bool(place.any()):
            found = norms(left[place])
            self.worst = max(self.worst, found.max().item())
            self.broken = self.broken or not bool((found <= allowed[place]).all())
        self.hidden = self.hidden or not bool((allowed[fine] <= HIDDEN).all())

    @property
    def symplectic(self) -> bool | None:
        return False if self.broken else (None if self.hidden else True)


def constant_J(net: Network) -> Tensor | None:
    """The J of all layers, where there is one."""
    try:
        J = net.field()["J"]
    except HDNNError:
        return None
    return J if J.ndim == 2 and bool(J.isfinite().all()) else None


def sizes(net: Network) -> Tensor:
    """The product of the norms of all factors of each dy_{j+1}/dy_j: (N,), at least 1.

    Layers that solve equations have one more factor |dy_{j+1}/dy_j|, that of the inverse.
    """
    one = torch.ones(net.layers, dtype=next(net.parameters()).dtype)
    if own_methods(net) or not isinstance(net, ODENetwork):
        return one
    if net.turns > 1:  # layers are shears
        norms = activations.get(net.activation).S * net.shear_norms()
        return (1 + norms).reshape(-1, net.layers).prod(0)
    size = 1 + net.steps() * net.field_rates()
    return size**3 if net.implicit else size


def scaled(P: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The same P 2^e with a new e if P is very large or small: exact."""
    more = torch.frexp(P.abs().amax((1, 2))).exponent.to(e.dtype).clamp(-1000, 1000)
    more = more.where((more.abs() > 64) & P.isfinite().flatten(1).all(1), 0.0)
    return P * torch.exp2(-more)[:, None, None], e + more


def why_not(net: Network, states: Tensor) -> str:
    """What is wrong where weights or states (N+1, B, n) are not finite; nothing if all are."""
    fine = states.isfinite().all(-1)
    for name, weight in net.named_parameters():
        if not bool(weight.isfinite().all()):
            return f"the weight {name} is not finite"
    if bool(fine.all()):
        return ""
    steps = net.steps().isfinite() if isinstance(net, ODENetwork) else torch.ones(1)
    if not bool(steps.all()):
        j = int((steps == 0).nonzero()[0])
        return f"the step h of layer {j} is {float(net.steps()[j])}"  # pyright: ignore
    j = int((~fine.all(1)).nonzero()[0])
    kind = "NaN" if bool(states[j].isnan().any()) else "infinite"
    return f"the state y_{j} is {kind}"
