"""What is promised about the Hamiltonian parts of an image classifier, and a check of it.

The layers of `mnist_net` act on the channels of each pixel: they are certified at pixels, as any
network is. A `HamiltonianUnit` acts on whole images, whose matrices dy_N/dy_j are too large to be
made: their norms are found by Lanczos steps, from below, for a few layers and images. Nothing is
said of what lies between the units: pooling makes gradients smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hdnn.analysis.certificate import Certificate, Several, certify, compared, guarantee
from hdnn.analysis.copies import entering, exact, lost_in_own_dtype
from hdnn.analysis.extremes import unit_extremes
from hdnn.analysis.linear import passes_on
from hdnn.analysis.measured import Measured, at_least_1
from hdnn.analysis.words import sentence, summary_of_parts
from hdnn.errors import positive_int
from hdnn.models import ImageModel, MNISTNet
from hdnn.networks import HamiltonianUnit

IMAGES = 3  # at which a unit is certified
LAYERS = 7  # of a unit, at the most
STEPS = 6  # of Lanczos; if they find a norm below 1, take
MORE = 40
SLACK = 1e-9  # below 1, for rounding in float64


@dataclass(frozen=True)
class Certificates(Several):
    """The certificate of each Hamiltonian part of an image classifier, first to last."""

    network: str
    parts: tuple[Certificate, ...]

    def named(self) -> list[tuple[str, Certificate]]:
        return [("", part) for part in self.parts]

    @property
    def nothing(self) -> str:
        """Why there is no certificate, if there is none."""
        if self.parts:
            return ""
        return f"no guarantee: this {self.network} has no Hamiltonian layers"

    @property
    def summary(self) -> str:
        """What they say in plain words."""
        return summary_of_parts([part.to_dict() for part in self.parts], self.nothing)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        parts = [part.to_dict() for part in self.parts]
        broken = list(self.broken)
        told = {"network": self.network, "broken": broken, "unknown": self.unknown}
        told["summary"] = self.summary
        return {**told, "certificates": parts}

    def __str__(self) -> str:
        count = len(self.parts)
        if count < 2:
            return "".join(map(str, self.parts)) or sentence(self.nothing)
        each = (f"Unit {k} of {count}: {part}" for k, part in enumerate(self.parts, 1))
        return "\n\n\n".join([self.summary, *each])


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
    x = (random_images(twin) if x is None else x.detach()).to(next(twin.parameters()))
    if isinstance(model, MNISTNet) and model.net is not None:
        assert isinstance(twin, MNISTNet)
        y = _pixels(twin, x, samples)
        found = certify(model.net, y, samples=samples, points=f"pixels of {points}")
        return Certificates(name, (found,))
    x = x[: min(samples, IMAGES)]
    units = [unit for unit in twin.units if isinstance(unit, HamiltonianUnit)]
    seen = entering(twin, units, x)
    where = f"{points}, norms by Lanczos from below"
    dtype, lost = next(model.parameters()).dtype, lost_in_own_dtype(model, x)
    parts = (unit_certificate(unit, y, dtype, where, lost) for unit, y in seen)
    return Certificates(name, tuple(parts))


def random_images(model: Any) -> Tensor:
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


class MeasuredUnit(Measured):
    """Norms of a unit at images y by Lanczos, more steps if few see too little."""

    idle: bool | None = None  # whether its layers pass their input on; None if not computed

    def __init__(self, unit: HamiltonianUnit, y: Tensor, *, promised: bool) -> None:
        self.depth, self.features = unit.layers, y[0].numel()
        last = self.depth - 1
        self.layers = sorted({round(k * last / (LAYERS - 1)) for k in range(LAYERS)})
        found = unit_extremes(unit, y, layers=self.layers, steps=STEPS, smallest=False)
        if promised and bool((found.largest < 1).any()):
            found = unit_extremes(unit, y, layers=self.layers, steps=MORE, smallest=False)
        self.norms = torch.cat([found.largest, torch.ones_like(found.largest[:1])])
        self.missed = found.largest_missed.min().item()  # one number for all that are finite
        if bool(self.norms.isnan().any()):
            self.why = "a state or a product is not finite"
            return
        with torch.no_grad():
            self.idle = passes_on(y, unit(y), found.largest)

    def judged(self, norm: float) -> tuple[bool | None, str]:
        # Lanczos gives lower bounds: a norm is too small only if what it may have missed is too.
        holds, doubt = at_least_1(norm, SLACK)
        if holds is False and norm >= (1 - SLACK) * (1 - self.missed):
            return None, f"{MORE} steps of Lanczos see a norm of {norm:.6g} only"
        return holds, doubt


def unit_certificate(
    unit: HamiltonianUnit, y: Tensor, dtype: torch.dtype, points: str, lost: Tensor
) -> Certificate:
    promise = guarantee(unit)
    if promise.holds and unit.normed:
        promise = replace(promise, why=f"{promise.why}, in evaluation")
    seen = MeasuredUnit(unit, y, promised=promise.holds)
    name = f"HamiltonianUnit({unit.extra_repr()})"
    found = compared(name, promise, seen, lost, dtype=dtype, points=points)
    return replace(found, linear=seen.idle, idle=seen.idle)
