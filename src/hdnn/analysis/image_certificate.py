"""What is promised about the Hamiltonian parts of an image classifier, and what is seen of it.

The layers of `mnist_net` act on the channels of each pixel: they are certified at pixels, as any
network is. A `HamiltonianUnit` acts on whole images, whose matrices dy_N/dy_j are too large to be
made: their norms are found by Lanczos steps, from below, for a few layers and images. Nothing is
said of what lies between the units: pooling makes gradients smaller.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdnn.analysis.certificate import Certificate, certify, guarantee
from hdnn.analysis.extremes import unit_extremes
from hdnn.errors import positive_int
from hdnn.models import HDNNStar, ImageModel, MNISTNet
from hdnn.networks.unit import HamiltonianUnit

IMAGES = 3  # at which a unit is looked at
LAYERS = 7  # of a unit, at the most
STEPS = 6  # of Lanczos; where that is not enough to see norm 1,
MORE = 40
SLACK = 1e-9  # below 1, for rounding in float64


@dataclass(frozen=True)
class Certificates:
    """The certificate of each Hamiltonian part of an image classifier, first to last."""

    network: str
    parts: tuple[Certificate, ...]

    @property
    def broken(self) -> tuple[str, ...]:
        """What is promised and does not hold numerically."""
        return tuple(word for part in self.parts for word in part.broken)

    @property
    def nothing(self) -> str:
        """Why there is no certificate, where there is none."""
        if self.parts:
            return ""
        return f"no guarantee: this {self.network} has no Hamiltonian layers"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        parts = [part.to_dict() for part in self.parts]
        broken = list(self.broken)
        return {"network": self.network, "broken": broken, "certificates": parts}

    def __str__(self) -> str:
        count = len(self.parts)
        if count < 2:
            return "".join(map(str, self.parts)) or self.nothing
        return "\n\n".join(f"unit {k} of {count}\n{part}" for k, part in enumerate(self.parts, 1))


def certify_images(
    model: ImageModel, x: Tensor | None = None, *, samples: int = 1000, points: str = ""
) -> Certificates:
    """Check the promises of a classifier at normalised images x, or at random ones.

    As `certify`, in float64 and in evaluation mode. `samples` is how many pixels, or images where
    the parts are units, are looked at, at the most.
    """
    name, points = type(model).__name__, points or ("random images" if x is None else "images")
    positive_int("samples", samples)
    if not model.units:
        return Certificates(name, ())
    exact = copy.deepcopy(model).double().eval()
    x = (_random(exact) if x is None else x.detach()).to(next(exact.parameters()))
    if isinstance(model, MNISTNet) and model.net is not None:
        y = _pixels(exact, x, samples)
        found = certify(model.net, y, samples=samples, points=f"pixels of {points}")
        return Certificates(name, (found,))
    assert isinstance(exact, HDNNStar)
    seen: list[tuple[Any, Tensor]] = []
    hooks = [
        unit.register_forward_pre_hook(lambda unit, given: seen.append((unit, given[0])))
        for unit in exact.stages
    ]
    with torch.no_grad():
        exact(x[: min(samples, IMAGES)])
    for hook in hooks:
        hook.remove()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    where = f"{points}, norms by Lanczos from below"
    parts = (_unit_certificate(unit, y, dtype, where) for unit, y in seen)
    return Certificates(name, tuple(parts))


def _random(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (model.stem.in_channels, model.size, model.size)
    return torch.randn(IMAGES, *size, generator=generator)


@torch.no_grad()
def _pixels(model: Any, x: Tensor, samples: int) -> Tensor:
    """States of some pixels with ink: those of the empty paper are all alike."""
    x = x[:1000]
    y = model.stem(x).movedim(1, -1)[x[:, 0] > x.min()]
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:samples]
    return y.cpu()[chosen]


def _unit_certificate(unit: HamiltonianUnit, y: Tensor, dtype: str, points: str) -> Certificate:
    N, promise = unit.layers, guarantee(unit)
    layers = sorted({round(k * (N - 1) / max(LAYERS - 1, 1)) for k in range(LAYERS)})
    norms = unit_extremes(unit, y, layers=layers, steps=STEPS, smallest=False).largest
    if promise.holds and not bool((norms >= 1).all()):
        norms = unit_extremes(unit, y, layers=layers, steps=MORE, smallest=False).largest
    place = int(norms.argmin())
    least, most = norms.min().item(), norms.max().item()
    rows = torch.cat([norms, torch.ones_like(norms[:1])])  # dy_N/dy_N = I
    evaluated = ", in evaluation" if unit.normed else ""
    return Certificate(
        network=f"HamiltonianUnit({unit.extra_repr()})",
        layers=N,
        features=y[0].numel(),
        dtype=dtype,
        samples=len(y),
        points=points,
        guaranteed=promise.holds,
        theorem=promise.theorem,
        guarantee=promise.why + (evaluated if promise.holds else ""),
        smallest_norm=least,
        smallest_at=(layers[place // len(y)], place % len(y)),
        largest_norm=most,
        holds=least >= 1 - SLACK if promise.holds else None,
        symplectic_defect=None,
        symplectic=None,
        bounds=(),
        overflow=None,
        ranges=tuple(
            {"from": j, "to": j, "smallest": row.min().item(), "largest": row.max().item()}
            for j, row in zip(layers, norms, strict=True)
        ),
        by_layer={
            "layers": [*layers, N],
            "smallest": rows.amin(1).tolist(),
            "median": rows.median(1).values.tolist(),
            "largest": rows.amax(1).tolist(),
        },
    )
