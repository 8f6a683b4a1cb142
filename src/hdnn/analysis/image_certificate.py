"""What is promised about the Hamiltonian parts of an image classifier, and a check of it.

The layers of `mnist_net` act on the channels of each pixel: they are certified at pixels, as any
network is. A `HamiltonianUnit` acts on whole images, whose matrices dy_N/dy_j are too large to be
made: their norms are found by Lanczos steps, from below, for a few layers and images. Nothing is
said of what lies between the units: pooling makes gradients smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdnn.analysis.certificate import (
    Certificate,
    certify,
    guarantee,
    judged,
    norm_curves,
    norm_range,
    over_samples,
    overflows,
)
from hdnn.analysis.copies import exact, lost_in_own_dtype
from hdnn.analysis.extremes import unit_extremes
from hdnn.errors import positive_int
from hdnn.models import ImageModel, MNISTNet
from hdnn.networks.unit import HamiltonianUnit

IMAGES = 3  # at which a unit is certified
LAYERS = 7  # of a unit, at the most
STEPS = 6  # of Lanczos; if they find a norm below 1, take
MORE = 40
SLACK = 1e-9  # below 1, for rounding in float64


@dataclass(frozen=True)
class Certificates:
    """The certificate of each Hamiltonian part of an image classifier, first to last."""

    network: str
    parts: tuple[Certificate, ...]

    @property
    def broken(self) -> tuple[str, ...]:
        """What is promised but does not hold numerically."""
        return tuple(word for part in self.parts for word in part.broken)

    @property
    def unknown(self) -> str:
        """What could not be computed, and why; nothing where all could."""
        return "; ".join(part.unknown for part in self.parts if part.unknown)

    @property
    def nothing(self) -> str:
        """Why there is no certificate, if there is none."""
        if self.parts:
            return ""
        return f"no guarantee: this {self.network} has no Hamiltonian layers"

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        parts = [part.to_dict() for part in self.parts]
        broken = list(self.broken)
        told = {"network": self.network, "broken": broken, "unknown": self.unknown}
        return {**told, "certificates": parts}

    def __str__(self) -> str:
        count = len(self.parts)
        if count < 2:
            return "".join(map(str, self.parts)) or self.nothing
        return "\n\n".join(f"unit {k} of {count}\n{part}" for k, part in enumerate(self.parts, 1))


def certify_images(
    model: ImageModel, x: Tensor | None = None, *, samples: int = 1000, points: str = ""
) -> Certificates:
    """Check the promises of a classifier at normalised images x, or at random ones.

    As `certify`, in float64 and in evaluation mode, at no more than `samples` pixels (or images, if
    the parts are units).
    """
    name, points = type(model).__name__, points or ("random images" if x is None else "images")
    positive_int("samples", samples)
    if not model.units:
        return Certificates(name, ())
    device = next(model.parameters()).device
    twin = exact(model).to(device).eval()
    x = (_random(twin) if x is None else x.detach()).to(next(twin.parameters()))
    if isinstance(model, MNISTNet) and model.net is not None:
        assert isinstance(twin, MNISTNet)
        y = _pixels(twin, x, samples)
        found = certify(model.net, y, samples=samples, points=f"pixels of {points}")
        return Certificates(name, (found,))
    seen: list[tuple[Any, Tensor]] = []
    hooks = [
        unit.register_forward_pre_hook(lambda unit, given: seen.append((unit, given[0])))
        for unit in twin.units
    ]
    x = x[: min(samples, IMAGES)]
    with torch.no_grad():
        twin(x)
    for hook in hooks:
        hook.remove()
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    where = f"{points}, norms by Lanczos from below"
    lost = lost_in_own_dtype(model, x)
    parts = (_unit_certificate(unit, y, dtype, where, lost) for unit, y in seen)
    return Certificates(name, tuple(parts))


def _random(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    size = (model.stem.in_channels, model.size, model.size)
    return torch.randn(IMAGES, *size, generator=generator)


@torch.no_grad()
def _pixels(model: MNISTNet, x: Tensor, samples: int) -> Tensor:
    """States of some pixels with ink: those of the empty paper are all alike."""
    x = x[:1000]
    y = model.pixels(x)[x[:, 0] > x.min()]
    chosen = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:samples]
    return y.cpu()[chosen]


def _unit_certificate(
    unit: HamiltonianUnit, y: Tensor, dtype: str, points: str, lost: Tensor | None = None
) -> Certificate:
    N, promise = unit.layers, guarantee(unit)
    layers = sorted({round(k * (N - 1) / max(LAYERS - 1, 1)) for k in range(LAYERS)})
    found = unit_extremes(unit, y, layers=layers, steps=STEPS, smallest=False)
    if promise.holds and bool((found.largest < 1).any()):
        found = unit_extremes(unit, y, layers=layers, steps=MORE, smallest=False)
    norms = found.largest
    finite = ~norms.isnan().any(0)
    lost = torch.zeros_like(finite) if lost is None else lost.to(finite.device)
    fine = finite & ~lost
    norms = norms.where(fine, torch.nan)
    trouble = "a state or a product is not finite" if not bool(finite.all()) else ""
    holds, trouble = None, trouble or (overflows(dtype) if bool(lost.any()) else "")
    if promise.holds and bool(fine.any()):
        # Lanczos gives lower bounds: a norm is too small only if what it may have missed is too.
        least = over_samples(norms.flatten())[0].item()
        missed = found.largest_missed[:, fine].max().item()
        holds, doubt = judged(least, SLACK)
        if holds is False and least >= (1 - SLACK) * (1 - missed):
            holds, doubt = None, f"{MORE} steps of Lanczos see a norm of {least:.6g} only"
        holds, trouble = None if trouble and holds else holds, trouble or doubt
    least, _, most = (each.item() for each in over_samples(norms.flatten()))
    place = int(norms.nan_to_num(torch.inf).argmin())
    with_last = torch.cat([norms, torch.ones_like(norms[:1])])  # dy_N/dy_N = I
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
        smallest_at=(layers[place // len(y)], place % len(y)) if bool(fine.any()) else None,
        largest_norm=most,
        holds=holds,
        symplectic_defect=None,
        symplectic=None,
        bounds=(),
        overflow=None,
        ranges=tuple(norm_range(j, row) for j, row in zip(layers, norms.split(1), strict=True)),
        by_layer=norm_curves([*layers, N], with_last),
        computed=int(fine.sum()),
        trouble=trouble,
    )
