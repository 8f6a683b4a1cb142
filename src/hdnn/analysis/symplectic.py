"""Symplecticity: Phi^T J Phi = J, the property that keeps gradients from vanishing."""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn.analysis.sensitivity import norms
from hdnn.errors import ShapeError


def symplectic_defect(Phi: Tensor, J: Tensor) -> Tensor:
    """|Phi^T J Phi - J| / (|Phi|^2 |J|) for each BSM of (..., n, n), in denominator layout.

    Relative to the sizes of the factors, so that it is a multiple of the rounding error.
    """
    if Phi.shape[-2:] != J.shape[-2:] or J.ndim != 2:
        raise ShapeError(
            f"J has shape {tuple(J.shape)}, but a single matrix {tuple(Phi.shape[-2:])} is needed: "
            "a stack of BSMs is symplectic with respect to one constant J."
        )
    size = norms(Phi).square() * norms(J)
    return norms(Phi.mT @ J @ Phi - J) / size.clamp_min(torch.finfo(Phi.dtype).tiny)


def is_symplectic(Phi: Tensor, J: Tensor, *, tolerance: float | None = None) -> bool:
    """Whether every BSM is symplectic with respect to J, up to the rounding of its dtype."""
    if tolerance is None:
        tolerance = 64 * Phi.shape[-1] * torch.finfo(Phi.dtype).eps
    return bool((symplectic_defect(Phi, J) <= tolerance).all())
