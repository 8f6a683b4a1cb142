"""Shape checks in the paper's letters: N layers, n features, m = n/2, r rows of K."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from hdnn.errors import LARGEST, ShapeError, StepError, positive_float

Step = float | Tensor | Sequence[float]


class Shapes:
    """Binds the letters of shape strings such as "N r n" and checks all tensors against them."""

    def __init__(self, where: str, y: Tensor, *, split: bool = False):
        if not isinstance(y, Tensor):
            raise ShapeError(f"{where}: y must be a torch.Tensor, but got {type(y).__name__}.")
        if y.ndim < 1:
            raise ShapeError(f"{where}: y must be (*batch, n), but it is a single number.")
        if not y.is_floating_point():
            raise ShapeError(f"{where}: y must be floating point, but is {y.dtype}; use y.float().")
        n = y.shape[-1]
        self.where, self.dtype, self.device = where, y.dtype, y.device
        self.sizes = {"n": n}
        if split:
            if n % 2 or n == 0:
                raise ShapeError(
                    f"{where}: y must have an even number of features n to be split into (p, q), "
                    f"but n = {n}; augment it by a zero (hdnn.heads.Augment)."
                )
            self.sizes["m"] = n // 2

    def check(self, name: str, tensor: Tensor, *specs: str) -> None:
        """Check one tensor against a shape such as "N r n", or against any of several."""
        if not isinstance(tensor, Tensor):
            raise ShapeError(
                f"{self.where}: {name} must be a torch.Tensor, but got {type(tensor).__name__}."
            )
        fitting = [s.split() for s in specs if s.count(" ") + 1 == tensor.ndim]
        letters = fitting[0] if fitting else None  # PyTorch 2.6 cannot compile next(.., None)
        known, sizes = len(self.sizes), self.sizes
        if letters is None or any(
            sizes.setdefault(a, k) != k for a, k in zip(letters, tensor.shape, strict=True)
        ):
            self.sizes = dict(list(sizes.items())[:known])  # forget the sizes read from this tensor
            raise ShapeError(self._mismatch(name, tensor, specs))
        if sizes.get("N") == 0:
            raise ShapeError(f"{self.where}: {name} has no layers; N must be at least 1.")
        if tensor.device != self.device:
            raise ShapeError(
                f"{self.where}: {name} is on {tensor.device}, but y is on {self.device}; "
                "both must be on one device: use .to(device) on one of them."
            )
        if tensor.dtype != self.dtype and not autocasting(self.device):
            raise ShapeError(
                f"{self.where}: {name} is {tensor.dtype}, but y is {self.dtype}; "
                "both must have one dtype: use .to(dtype) on one of them."
            )

    def _mismatch(self, name: str, tensor: Tensor, specs: tuple[str, ...]) -> str:
        needed = " or ".join(f"({', '.join(spec.split())})" for spec in specs)
        letters = {letter for spec in specs for letter in spec.split()}
        known = ", ".join(f"{k} = {v}" for k, v in self.sizes.items() if k in letters)
        given = f"{self.where}: {name} has shape {tuple(tensor.shape)}, but {needed} is needed"
        return f"{given} with {known}." if known else f"{given}."

    @property
    def N(self) -> int:
        return self.sizes["N"]

    def steps(self, h: Step) -> Sequence[float | Tensor]:
        """One step size for each layer."""
        return layer_steps(self.where, h, self.N)


def autocasting(device: torch.device) -> bool:
    """Whether autocast is on for this device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def layer_steps(where: str, h: Step, N: int) -> Sequence[float | Tensor]:
    """One step size for each of N layers, from one for all or one each."""
    if isinstance(h, Tensor):
        if h.shape not in ((), (N,)) or not h.is_floating_point():
            raise StepError(
                f"{where}: h must be a float or a floating-point tensor of shape ({N},), "
                f"a step for each layer, but has shape {tuple(h.shape)} and dtype {h.dtype}."
            )
        return h.expand(N).unbind(0)
    if isinstance(h, Sequence) and not isinstance(h, str):
        if len(h) != N:
            raise StepError(f"{where}: h has {len(h)} steps for N = {N} layers; give one each.")
        return [positive_float("h", step) for step in h]
    return [positive_float("h", h)] * N


def per_layer(constant: Tensor | None, N: int) -> Sequence[Tensor | None]:
    """N constants, one a layer, from one for all layers (a, b) or one for each (N, a, b)."""
    if constant is None or constant.ndim == 2:
        return [constant] * N
    return constant.unbind(0)


def check_tolerance(where: str, tol: float | None, max_iter: int) -> None:
    """Check the options of an implicit scheme."""
    number = isinstance(tol, Real) and not isinstance(tol, bool)
    if tol is not None and not (number and 0 < tol <= LARGEST):
        raise StepError(f"{where}: tol must be a number > 0 or None, but got {tol!r}.")
    if isinstance(max_iter, bool) or not isinstance(max_iter, int) or max_iter < 1:
        raise StepError(f"{where}: max_iter must be a whole number >= 1, but got {max_iter!r}.")
