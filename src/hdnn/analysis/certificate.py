"""What is promised about a network's gradients, why, and whether it is seen to hold.

The promise is norm(dy_N/dy_j) >= 1 for every sample and layer: each layer has a Jacobian of
determinant 1 (or at least 1), so the product of any number of them has one too, and a matrix whose
determinant is at least 1 has no norm below 1. The rest is checked on numbers: the norms, that the
matrices are symplectic, and the bounds.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.analysis.bounds import Bound, bounds
from hdnn.analysis.jacobians import layer_jacobians
from hdnn.analysis.sensitivity import back, norms
from hdnn.errors import DataError, HDNNError, OptionError, ShapeError, positive_int
from hdnn.files import finite
from hdnn.model import Model
from hdnn.networks import MLP, MS1, MS2, HamiltonianNet, HamiltonianUnit, Network, ODENetwork

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 1000  # at the most
NUMBERS = 2**23  # in the matrices dy_N/dy_j of all samples and layers, at the most
RANGES = 8  # of layers, in the table
POINTS = 1025  # layers that the curve shows, at the most


@dataclass(frozen=True)
class Guarantee:
    """Whether norm(dy_N/dy_j) >= 1 is a theorem for a network, which one, and why."""

    holds: bool
    theorem: str
    why: str


def guarantee(net: Network | HamiltonianUnit) -> Guarantee:
    """What is known of a network before anything is computed."""
    if isinstance(net, HamiltonianUnit):
        return net.guarantee()
    if isinstance(net, MLP):
        return Guarantee(False, "none", "the gradients of a multilayer perceptron can vanish")
    euler = isinstance(net, HamiltonianNet) and not net.scheme.symplectic
    if euler or isinstance(net, MS2):
        if activations.get(net.activation).monotone:
            why = f"at any depth, because {net.activation} never decreases"
            return Guarantee(True, "det(I + hA) = prod(1 + h^2 w^2) >= 1 in each layer", why)
        why = f"forward Euler promises nothing for {net.activation}, which can decrease"
        return Guarantee(False, "none", why)
    theorem = "each layer is symplectic, det = 1 (th:nonvanishing_gradients_DT)"
    if isinstance(net, MS1):
        theorem = "each layer is a product of shears, det = 1"
    return Guarantee(True, theorem, "at any depth, for any weights and any activation")


@dataclass(frozen=True)
class Certificate:
    """The promise about a network's gradients beside what its numbers say."""

    network: str
    layers: int
    features: int
    dtype: str  # of the weights; all is computed from them in float64
    samples: int
    points: str  # where the samples come from
    guaranteed: bool
    theorem: str
    guarantee: str  # why, or why not
    smallest_norm: float  # over all samples and layers j < N
    smallest_at: tuple[int, int]  # its layer and sample
    largest_norm: float
    holds: bool | None  # smallest_norm >= 1 up to rounding, where it is guaranteed
    symplectic_defect: float | None  # where one J serves all layers
    symplectic: bool | None
    bounds: tuple[Bound, ...]
    overflow: int | None  # the layer from which on, backwards, norms are beyond float64
    ranges: tuple[dict[str, float], ...]
    by_layer: dict[str, list[Any]]

    @property
    def broken(self) -> tuple[str, ...]:
        """What is promised and does not hold numerically."""
        found = []
        if self.holds is False:
            found.append(f"norm(dy_N/dy_j) >= 1, but it is {self.smallest_norm:.6g}")
        if self.symplectic is False:
            found.append(f"symplecticity, whose defect is {self.symplectic_defect:.1e}")
        found += [f"the bound {b.name}" for b in self.bounds if b.holds is False]
        return tuple(found)

    @property
    def verdict(self) -> str:
        if self.broken:
            return "BROKEN: " + "; ".join(self.broken)
        if self.guaranteed:
            return f"guaranteed {self.guarantee}, and it holds"
        return f"no guarantee: {self.guarantee}"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        bounds = [{**asdict(b), "holds": b.holds, "text": str(b)} for b in self.bounds]
        told = {"verdict": self.verdict, "broken": list(self.broken), "bounds": bounds}
        return {**asdict(self), **told}

    def to_json(self) -> str:
        """One JSON object; a number that is beyond float64 is null."""
        return json.dumps(finite(self.to_dict()), indent=2)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Smallest, median and largest norm against the layer."""
        from hdnn.plotting import certificate_norms

        return certificate_norms(self, ax)

    def __str__(self) -> str:
        rows = [
            ("network", self.network),
            ("points", f"{self.samples} {self.points}; weights {self.dtype}, norms in float64"),
            ("theorem", self.theorem),
            ("layers j", f"{'smallest':>12} {'largest':>12}   norm(dy_N/dy_j)"),
        ]
        for part in self.ranges:
            where = f"{part['from']} .. {part['to']}"
            norms = f"{number_text(part['smallest']):>12} {number_text(part['largest']):>12}"
            rows.append((where, norms))
        if self.overflow is not None:
            rows.append(("", f"beyond what float64 can hold from layer {self.overflow} down"))
        if self.symplectic_defect is not None:
            rows.append(("symplectic", symplectic_text(self.symplectic_defect, self.symplectic)))
        rows += [("bound", str(bound)) for bound in self.bounds]
        rows.append(("verdict", self.verdict))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def number_text(value: float) -> str:
    """Six digits; a norm between 0.999999 and 1 is rounded down, never up to 1."""
    if 0.999999 <= value < 1 - 1e-9:
        return "0.999999"
    return f"{value:.6g}"


def symplectic_text(defect: float, symplectic: bool | None) -> str:
    """How far the matrices are from symplectic, in words."""
    word = {True: "yes", False: "NO", None: "not promised"}[symplectic]
    return f"{word}: norm(Phi^T J Phi - J) is up to {defect:.1e}, relative"


def certify(
    model: Model | Network,
    y: Tensor | None = None,
    *,
    samples: int = SAMPLES,
    points: str = "",
    seed: int = 0,
) -> Certificate:
    """Check a network's promise at y: inputs of a Model, states of a network, or random ones.

    In float64 whatever the network's dtype: what is certified are its weights, free of rounding.
    """
    if not isinstance(model, (Model, Network)):
        raise OptionError(
            f"certify takes a hdnn.Model or a network of hdnn, but got {type(model).__name__}."
        )
    given = next(model.parameters())
    exact = copy.deepcopy(model).cpu().double()
    net, width = exact, getattr(exact, "features", 0)
    if isinstance(exact, Model):
        net = exact.net
        width = net.features if exact.augment is None else exact.augment.inputs
    assert isinstance(net, Network)
    for name, weight in net.named_parameters():
        if not bool(torch.isfinite(weight).all()):
            raise DataError(f"the weight {name} is not finite: there is nothing to certify.")
    y_0 = _points(y, width, positive_int("samples", samples), net, seed)
    if isinstance(exact, Model):
        y_0 = exact.embed(y_0)
    where = points or ("random points" if y is None else "points")
    return _certificate(net, y_0, str(given.dtype).removeprefix("torch."), where)


def _points(y: Tensor | None, width: int, samples: int, net: Network, seed: int) -> Tensor:
    room = max(1, NUMBERS // ((net.layers + 1) * net.features**2))
    count = min(samples, room)
    if y is None:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(min(count, 100), width, generator=generator, dtype=torch.float64)
    if not isinstance(y, Tensor) or y.ndim < 1 or y.shape[-1] != width or not y.numel():
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ShapeError(f"y must be a tensor (*batch, {width}), but got {shape}.")
    y = y.detach().reshape(-1, width)[:count].cpu().double()
    if not bool(torch.isfinite(y).all()):
        raise DataError("y has NaN or infinite values; remove or replace them.")
    return y


@torch.no_grad()
def _certificate(net: Network, y: Tensor, dtype: str, points: str) -> Certificate:
    seen = _Seen(net, y)
    promise = guarantee(net)
    holds = symplectic = None
    if promise.holds:
        slack = 0.0 if seen.smallest >= 1 else _slack(net, seen.states, *seen.smallest_at)
        holds = seen.smallest >= 1 - slack
    is_symplectic = not isinstance(net, (MLP, MS1, MS2))
    if isinstance(net, HamiltonianNet):
        is_symplectic = net.scheme.symplectic
    if seen.defect is not None and is_symplectic:
        symplectic = seen.defect <= seen.tolerance
    extremes = (seen.smallest_singular, seen.largest)
    return Certificate(
        network=repr(net),
        layers=net.layers,
        features=net.features,
        dtype=dtype,
        samples=len(y),
        points=points,
        guaranteed=promise.holds,
        theorem=promise.theorem,
        guarantee=promise.why,
        smallest_norm=seen.smallest,
        smallest_at=seen.smallest_at,
        largest_norm=seen.largest,
        holds=holds,
        symplectic_defect=seen.defect,
        symplectic=symplectic,
        bounds=tuple(bounds(net, measured=extremes)) if isinstance(net, ODENetwork) else (),
        overflow=seen.overflow,
        ranges=_ranges(seen.norms[:-1]),
        by_layer=_by_layer(seen.norms),
    )


class _Seen:
    """One pass back over all samples: norms, defects, and where they are worst."""

    def __init__(self, net: Network, y: Tensor) -> None:
        n, eps, tiny = net.features, *_precision(y)
        self.states = net.trajectory(y)
        J = self._constant_J(net)
        self.norms = y.new_empty(net.layers + 1, len(y))
        self.smallest_singular = 1.0
        self.overflow: int | None = None
        defect, self.tolerance = 0.0, 8 * n * eps
        highest, growth = y.new_ones(len(y)), y.new_zeros(len(y))
        for j, M, Phi in back(net, self.states):
            fine = torch.isfinite(Phi).flatten(1).all(1)
            if not bool(fine.all()):
                self.overflow = j if self.overflow is None else self.overflow
            values = torch.linalg.svdvals(Phi.where(fine[:, None, None], torch.eye(n).to(Phi)))
            self.norms[j] = values[:, 0].where(fine, torch.inf)
            # What is smaller than the rounding of the largest says nothing.
            sure = fine & (values[:, -1] > 1e4 * n * eps * values[:, 0])
            if bool(sure.any()):
                least = values[sure, -1].min().item()
                self.smallest_singular = min(self.smallest_singular, least)
            if J is None or self.overflow is not None:
                continue
            # A factor M is off by n eps |M|, and that counts as often as Phi was large behind it.
            highest = torch.maximum(highest, values[:, 0])
            if M is not None:
                growth = growth + M.square().sum((1, 2))
                self.tolerance = max(self.tolerance, 8 * n * eps * (1 + growth.max().item()))
            P = Phi / highest[:, None, None]
            left = norms(P.mT @ J @ P - J / highest.square()[:, None, None])
            defect = max(defect, (left / norms(J).clamp_min(tiny)).max().item())
        self.defect = None if J is None else defect
        before_last = self.norms[:-1]
        place = int(before_last.argmin())
        self.smallest_at = place // len(y), place % len(y)
        self.smallest, self.largest = before_last.min().item(), before_last.max().item()

    @staticmethod
    def _constant_J(net: Network) -> Tensor | None:
        try:
            J = net.field()["J"]
        except HDNNError:
            return None
        return J if J.ndim == 2 else None


def _precision(y: Tensor) -> tuple[float, float]:
    found = torch.finfo(y.dtype)
    return found.eps, found.tiny


def _slack(net: Network, states: Tensor, layer: int, sample: int) -> float:
    """How far below 1 rounding can put the norm of a product whose determinant is at least 1.

    The factors M_k are rounded by n eps |M_k|, which moves the determinant of each by a factor
    1 - n^2 eps cond(M_k) at most, and the norm of the product by the n-th root of all of them.
    """
    n, eps, tiny = net.features, *_precision(states)
    M = layer_jacobians(net, states[layer:, sample : sample + 1], slice(layer, net.layers))
    values = torch.linalg.svdvals(M[:, 0])
    cond = values[:, 0] / values[:, -1].clamp_min(tiny)
    return float(4 * n * eps * (1 + cond.sum()))


def _ranges(norms: Tensor) -> tuple[dict[str, float], ...]:
    """The smallest and largest norm in each of a few ranges of layers j."""
    table, start = [], 0
    for part in norms.tensor_split(min(RANGES, len(norms))):
        end = start + len(part) - 1
        table.append({"from": start, "to": end})
        table[-1] |= {"smallest": part.min().item(), "largest": part.max().item()}
        start = end + 1
    return tuple(table)


def _by_layer(norms: Tensor) -> dict[str, list[Any]]:
    """Smallest, median and largest norm for each layer j, or for some where there are many."""
    layers = torch.linspace(0, len(norms) - 1, min(POINTS, len(norms))).round().long()
    some = norms[layers]
    return {
        "layers": layers.tolist(),
        "smallest": some.amin(1).tolist(),
        "median": some.median(1).values.tolist(),
        "largest": some.amax(1).tolist(),
    }
