"""What is promised about a network's gradients, why, and whether the numbers confirm it.

The promise is norm(dy_N/dy_j) >= 1 for every sample and layer: each layer has a Jacobian of
determinant 1 (or at least 1), so the product of any number of them has one too, and a matrix whose
determinant is at least 1 has no norm below 1. It is about the matrix: some direction does not
shrink, while a single gradient can. The rest is checked numerically: the norms, symplecticity and
the bounds. What could not be computed, because states or matrices are not finite, never counts as
holding.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdnn import plotting
from hdnn.analysis.bounds import Bound, bounds_of
from hdnn.analysis.copies import embedded, exact, lost_in_own_dtype, rows
from hdnn.analysis.linear import linearity
from hdnn.analysis.measured import Measured, MeasuredNetwork
from hdnn.analysis.words import summary
from hdnn.base.files import finite
from hdnn.errors import DataError, OptionError, positive_int
from hdnn.model import Model
from hdnn.networks import Network, ODENetwork
from hdnn.networks.promise import Guarantee, Promising, own_methods, unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 1000  # at the most
NUMBERS = 2**23  # at the most, in the matrices dy_N/dy_j of all samples and layers
RANGES = 8  # of layers, in the table
POINTS = 1025  # layers that the curve shows, at the most


def guarantee(net: Promising) -> Guarantee:
    """What is known about the gradients of a network before anything is computed.

    It is the network's own `guarantee()`, unless that is inherited by a class that computes in
    another way: then nothing is known.

    Args:
        net: a network, a unit or a block of hdnn, or a module that has a method `guarantee()`.

    Returns:
        A `Guarantee`: whether `norm(dy_N/dy_j) >= 1` is a theorem, which one, and why.

    Raises:
        OptionError: if it is no such module.

    Examples:
        >>> import hdnn
        >>> hdnn.analysis.guarantee(hdnn.H2(features=4, layers=8)).holds
        True
        >>> hdnn.analysis.guarantee(hdnn.MLP(features=4, layers=8)).holds
        False
    """
    owner = next((cls for cls in type(net).__mro__ if "guarantee" in vars(cls)), None)
    if owner is None:
        raise OptionError(
            f"a {type(net).__name__} has no method guarantee(); give a network, a unit or a block "
            "of hdnn, of a Model its net."
        )
    own = own_methods(net, owner)
    return unknown(net, own) if own else net.guarantee()


@dataclass(frozen=True)
class Certificate:
    """The promise about a network's gradients, and what was computed to check it.

    Made by `certify`. Print it to read it; `plot()` draws the norms against the layers.

    Attributes:
        network: what was certified, in one line.
        layers: N.
        features: n, the size of a state.
        dtype: that of the weights; all is computed from them in float64.
        samples: how many points were looked at.
        points: where these come from.
        guaranteed: whether `norm(dy_N/dy_j) >= 1` is a theorem for this network.
        theorem: which one, or "none".
        guarantee: why it holds, or why there is none.
        smallest_norm: over all samples that could be computed and all layers j < N.
        smallest_at: the layer and the sample of this norm; None if nothing could be computed.
        largest_norm: over the same.
        holds: whether smallest_norm >= 1 up to rounding; None if nothing is guaranteed or not
            everything could be computed.
        symplectic_defect: the largest `|Phi^T J Phi - J|`, relatively; None if layers differ in J.
        symplectic: whether it is 0 up to rounding; None where that is not promised or rounding
            hides it.
        bounds: every known `Bound`, compared with what was measured.
        overflow: the last layer with a norm beyond float64, if there is one.
        ranges: the smallest and the largest norm of up to 8 groups of layers.
        by_layer: the curves of the plot: "layers", "smallest", "median" and "largest".
        computed: samples for which everything could be computed; None: all of them.
        trouble: what was wrong with the others, or why `holds` is unknown.
        linear: whether the network is a linear map at these points, so that depth adds nothing.
        idle: whether it is linear because its layers pass their input on.
        log_determinant: the largest `|log |det dy_N/dy_j||`, where a determinant of 1 is promised.
        volume: whether it is 0 up to rounding.
        smallest_singular_value: over all dy_N/dy_j, where it was computed.

    Examples:
        >>> import hdnn
        >>> certificate = hdnn.analysis.certify(hdnn.H2(features=4, layers=64))
        >>> certificate.status, certificate.holds, certificate.symplectic
        ('holds', True, True)
        >>> certificate.smallest_norm >= 1
        True
        >>> print(certificate)
        From every layer on, some direction of the gradient keeps at least its full size...
    """

    network: str
    layers: int
    features: int
    dtype: str
    samples: int
    points: str
    guaranteed: bool
    theorem: str
    guarantee: str
    smallest_norm: float
    smallest_at: tuple[int, int] | None
    largest_norm: float
    holds: bool | None
    symplectic_defect: float | None
    symplectic: bool | None
    bounds: tuple[Bound, ...]
    overflow: int | None
    ranges: tuple[dict[str, float], ...]
    by_layer: dict[str, list[Any]]
    computed: int | None = None
    trouble: str = ""
    linear: bool | None = None
    idle: bool | None = None
    log_determinant: float | None = None
    volume: bool | None = None
    smallest_singular_value: float | None = None

    @property
    def broken(self) -> tuple[str, ...]:
        """What is promised but does not hold numerically."""
        found = []
        if self.holds is False:
            found.append(f"norm(dy_N/dy_j) >= 1, but it is {self.smallest_norm:.6g}")
        if self.symplectic is False:
            found.append(f"symplecticity, whose defect is {self.symplectic_defect:.1e}")
        if self.volume is False:
            found.append(f"det dy_N/dy_j = 1, whose logarithm is up to {self.log_determinant:.1e}")
        found += [f"the bound {b.name}" for b in self.bounds if b.holds is False]
        return tuple(found)

    @property
    def unknown(self) -> str:
        """What could not be computed, and why; nothing where all could."""
        missing = 0 if self.computed is None else self.samples - self.computed
        if missing:
            of = "all" if missing == self.samples else f"{missing} of"
            return f"the norms at {of} {self.samples} points, because {self.trouble}"
        unseen = "the norms" if self.guaranteed and self.holds is None else ""
        return self.trouble or unseen

    @property
    def status(self) -> str:
        """In a word: "broken", "not computed", "holds" or "not guaranteed"."""
        if self.broken:
            return "broken"
        if self.unknown:
            return "not computed"
        return "holds" if self.guaranteed else "not guaranteed"

    @property
    def summary(self) -> str:
        """What it says in plain words."""
        return summary({**vars(self), "broken": self.broken, "unknown": self.unknown})

    @property
    def verdict(self) -> str:
        """The result in one line, with the reason."""
        if self.broken:
            return "BROKEN: " + "; ".join(self.broken)
        promise = f"guaranteed {self.guarantee}"
        if not self.guaranteed:
            promise = f"no guarantee: {self.guarantee}"
        if self.unknown:
            return f"COULD NOT BE COMPUTED: {self.unknown} ({promise})"
        return f"{promise}, and it holds" if self.guaranteed else promise

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        bounds = [{**asdict(b), "holds": b.holds, "text": str(b)} for b in self.bounds]
        told: dict[str, Any] = {"summary": self.summary, "verdict": self.verdict}
        told |= {"broken": list(self.broken), "bounds": bounds}
        told |= {"status": self.status, "unknown": self.unknown}
        told["computed"] = self.samples if self.computed is None else self.computed
        return {**asdict(self), **told}

    def to_json(self) -> str:
        """One JSON object; a number that is beyond float64 is null."""
        return json.dumps(finite(self.to_dict()), indent=2)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw smallest, median and largest norm against the layer, into `ax` or a new figure."""
        return plotting.certificate_norms(self, ax)

    def __str__(self) -> str:
        numbers = [
            ("network", self.network),
            ("points", f"{self.samples} {self.points}; weights {self.dtype}, norms in float64"),
            ("layers j", f"{'smallest':>12} {'largest':>12}   norm(dy_N/dy_j)"),
        ]
        for part in self.ranges:
            where = f"{part['from']} .. {part['to']}"
            norms = f"{number_text(part['smallest']):>12} {number_text(part['largest']):>12}"
            numbers.append((where, norms))
        if self.overflow is not None:
            numbers.append(("", f"beyond what float64 can hold from layer {self.overflow} down"))
        numbers.append(
            ("", "a norm is the most that a gradient grows by on its way back to layer j")
        )
        reasons = [("theorem", self.theorem)]
        if self.symplectic_defect is not None:
            reasons.append(("symplectic", self._symplectic_text(self.symplectic_defect)))
        if self.log_determinant is not None:
            word = {True: "1 up to rounding", False: "NOT 1", None: "not known"}[self.volume]
            text = f"{word}: log |det dy_N/dy_j| is up to {self.log_determinant:.1e}"
            reasons.append(("determinant", f"{text}, so some directions grow as others shrink"))
        if self.smallest_singular_value is not None:
            least = number_text(self.smallest_singular_value)
            reasons.append(("smallest", f"a gradient shrinks to {least} of its size at the worst"))
        reasons += [("bound", str(bound)) for bound in self.bounds]
        reasons.append(("verdict", self.verdict))
        width = max(len(name) for name, _ in numbers + reasons)
        parts = (
            "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
            for rows in (numbers, reasons)
        )
        return "\n\n".join([self.summary, *parts])

    def _symplectic_text(self, defect: float) -> str:
        """How far the matrices are from symplectic, in words."""
        neither = "hidden by rounding" if "symplectic" in self.theorem else "not promised"
        word = {True: "yes", False: "NO", None: neither}[self.symplectic]
        return f"{word}: norm(Phi^T J Phi - J) is up to {defect:.1e}, relative"


class Several(ABC):
    """Certificates that are joined: what is wrong with any of them is said of all."""

    @abstractmethod
    def named(self) -> list[tuple[str, Certificate]]:
        """Each with the name of what it is about, or with none where only the order counts."""

    @property
    def broken(self) -> tuple[str, ...]:
        """What is promised but does not hold numerically, and of which."""
        return tuple(_of(name, word) for name, one in self.named() for word in one.broken)

    @property
    def unknown(self) -> str:
        """What could not be computed, and why; nothing where all could."""
        return "; ".join(_of(name, one.unknown) for name, one in self.named() if one.unknown)


def _of(name: str, word: str) -> str:
    return f"{name}: {word}" if name else word


def number_text(value: float | None) -> str:
    """Six digits; a norm between 0.999999 and 1 is rounded down, never up to 1."""
    if value is None or math.isnan(value):
        return "unknown"
    if 0.999999 <= value < 1 - 1e-9:
        return "0.999999"
    return f"{value:.6g}"


def certify(
    model: Model | Network,
    y: Tensor | None = None,
    *,
    samples: int = SAMPLES,
    points: str = "",
    seed: int = 0,
) -> Certificate:
    """Check a network's promise at y: inputs of a Model, states of a network, or random ones.

    Always in float64: the weights are certified, apart from rounding in the network's own dtype.
    Points at which the network itself overflows in its own dtype count as not computed.
    """
    if not isinstance(model, (Model, Network)):
        raise OptionError(
            f"certify takes a hdnn.Model or a network of hdnn, but got {type(model).__name__}."
        )
    own, twin = next(model.parameters()).dtype, exact(model)
    net, width = (twin.net, twin.inputs) if isinstance(twin, Model) else (twin, twin.features)
    for name, weight in (*net.named_parameters(), *net.named_buffers()):
        if not bool(torch.isfinite(weight).all()):
            raise DataError(f"the weight {name} is not finite: there is nothing to certify.")
    x = _points(y, width, positive_int("samples", samples), net, seed)
    lost, (_, y_0) = lost_in_own_dtype(model, x), embedded(twin, x)
    seen, bounds = MeasuredNetwork(net, y_0, lost), ()
    if isinstance(net, ODENetwork) and not own_methods(net):
        bounds = tuple(bounds_of(net, seen.singular_range()))
    where = points or ("random points" if y is None else "points")
    found = compared(repr(net), guarantee(net), seen, lost, dtype=own, points=where, bounds=bounds)
    linear, idle = linearity(twin, seen)
    return replace(found, linear=linear, idle=idle)


def _points(y: Tensor | None, width: int, samples: int, net: Network, seed: int) -> Tensor:
    room = max(1, NUMBERS // ((net.layers + 1) * net.features**2))
    count = min(samples, room)
    if y is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(min(count, 100), width, generator=generator, dtype=torch.float64)
    y = rows(y, width)[:count]
    if not bool(torch.isfinite(y).all()):
        raise DataError("y has NaN or infinite values; remove or replace them.")
    return y


def compared(
    network: str,
    promise: Guarantee,
    seen: Measured,
    lost: Tensor,
    *,
    dtype: torch.dtype,
    points: str,
    bounds: tuple[Bound, ...] = (),
) -> Certificate:
    """The certificate of a promise, given the norms that were measured in a copy in float64.

    Samples that are `lost` (B,), because the network itself overflows in its own dtype, count as
    not computed.
    """
    kind = str(dtype).removeprefix("torch.")
    layers, norms = [*seen.layers, seen.depth], seen.norms.clone()
    norms[:-1, lost] = torch.nan
    inner, fine = norms[:-1], ~norms.isnan().any(0)
    least, _, most = (each.item() for each in over_samples(inner.flatten()))
    row, sample = divmod(int(inner.nan_to_num(torch.inf).argmin()), len(fine))
    holds, why = None, seen.why
    if not why and bool(lost.any()):
        why = f"the outputs of the network itself, in {kind}, are not finite"
    if promise.holds and bool(fine.any()):
        holds, doubt = seen.judged(least)
        holds, why = None if holds and not bool(fine.all()) else holds, why or doubt
    parts = torch.arange(len(inner)).tensor_split(min(RANGES, len(inner)))
    shown = torch.linspace(0, len(inner), min(POINTS, len(norms))).round().long()
    curves = zip(("smallest", "median", "largest"), over_samples(norms[shown]), strict=True)
    return Certificate(
        network=network,
        layers=seen.depth,
        features=seen.features,
        dtype=kind,
        samples=len(fine),
        points=points,
        guaranteed=promise.holds,
        theorem=promise.theorem,
        guarantee=promise.why,
        smallest_norm=least,
        smallest_at=(layers[row], sample) if bool(fine.any()) else None,
        largest_norm=most,
        holds=holds,
        symplectic_defect=seen.defect,
        symplectic=seen.symplectic,
        bounds=bounds,
        overflow=seen.overflow,
        ranges=tuple(_range(layers[part[0]], layers[part[-1]], inner[part]) for part in parts),
        by_layer={
            "layers": [layers[k] for k in shown],
            **{name: curve.tolist() for name, curve in curves},
        },
        computed=int(fine.sum()),
        trouble=why,
    )


def _range(first: int, last: int, norms: Tensor) -> dict[str, float]:
    """The smallest and the largest norm of some layers."""
    least, _, most = over_samples(norms.flatten())
    return {"from": first, "to": last, "smallest": least.item(), "largest": most.item()}


def over_samples(norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest, median and largest of (..., B), without samples that are NaN unless all are."""
    low, high = norms.nan_to_num(torch.inf, torch.inf), norms.nan_to_num(-torch.inf, torch.inf)
    none = norms.isnan().all(-1)
    least, most = (x.where(~none, torch.nan) for x in (low.amin(-1), high.amax(-1)))
    return least, norms.nanmedian(-1).values, most
