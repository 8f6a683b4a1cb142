"""Checks of the arguments of a training, before it starts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import (
    SENSIBLE,
    DataError,
    ShapeError,
    TrainingError,
    as_float,
    choose,
    int_from,
    quoted,
)
from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.model import Model
from hdnn.training.output import SOLVERS, Head

CHOICES = {
    "optimizer": ("adam", "sgd"),
    "schedule": ("cosine", "constant"),
    "smoothing": ("cosine", "constant"),
    "solver": SOLVERS,
}
LEAST = {"epochs": 1, "batch": 1, "seed": 0}
NUMBERS = ("learning_rate", "ridge", "smoothness", "warmup", "weight_decay", "clip")
OPTIONS = (*CHOICES, *LEAST, *NUMBERS)  # those of `fit` that say how it trains


def head_of(model: Model) -> Head:
    if not isinstance(model, Model):
        raise TrainingError(
            f"fit trains a hdnn.Model, but got {type(model).__name__}; make one of a network by "
            "hdnn.Model(augment, net, head)."
        )
    if not isinstance(model.head, (RegressionHead, SigmoidHead, SoftmaxHead)):
        raise TrainingError(
            f"a {type(model.head).__name__} has no loss to train with; use a SigmoidHead or a "
            "SoftmaxHead for classes, a RegressionHead for values."
        )
    return model.head


def check_options(**options: Any) -> dict[str, Any]:
    """The options of `fit`, if they are sound; numbers as plain ones, which a file can hold."""
    for name, known in CHOICES.items():
        choose(name, options[name], known)
    for name, least in LEAST.items():
        options[name] = whole_number(name, options[name], least)
    for name in NUMBERS:
        if name != "clip" or options[name] is not None:
            options[name] = number(name, options[name])
    if not options["learning_rate"] > 0:
        raise TrainingError("learning_rate must be > 0, but got 0; the paper has 2.5e-2.")
    if options["clip"] == 0:
        raise TrainingError("clip must be > 0, or None for no clipping.")
    if not options["warmup"] < 1:
        raise TrainingError(
            f"warmup is a fraction of all steps, below 1, but got {options['warmup']}."
        )
    if options["solver"] == "newton" and not options["ridge"] > 0:
        raise TrainingError(
            "the newton solver needs ridge > 0: separable data have no optimal output layer "
            "without it; take e.g. ridge=1e-4."
        )
    return options


def whole_number(name: str, value: object, least: int) -> int:
    """A whole number of Python or NumPy, as Python's."""
    try:
        return int_from(least, name, value)
    except ShapeError as error:
        raise TrainingError(str(error)) from None


def number(name: str, value: object) -> float:
    """A finite number >= 0 of Python or NumPy, as Python's float."""
    found = as_float(value)
    if found is None:
        raise TrainingError(f"{name} must be a number, but got {quoted(value)}.")
    if not (math.isfinite(found) and found >= 0):
        raise TrainingError(f"{name} must be finite and not negative, but got {quoted(value)}.")
    if found > SENSIBLE:
        raise TrainingError(f"{name} must be at most {SENSIBLE:g}, but got {quoted(value)}.")
    return found


def check_data(model: Model, x: Tensor, t: Tensor, which: str = "") -> None:
    """Refuse data that a model cannot be trained on; `which` stands before their names."""
    weight, head = next(model.head.parameters()), model.head
    for name, tensor in ((f"{which}x", x), (f"{which}t", t)):
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"{name} must be a torch.Tensor, but got {type(tensor).__name__}; "
                "use torch.as_tensor."
            )
        if tensor.device != weight.device:
            raise DataError(
                f"{name} is on {tensor.device}, but the model on {weight.device}; "
                "bring both together with .to(device)."
            )
    if x.ndim != 2 or len(x) == 0:
        raise DataError(
            f"{which}x must be (B, inputs) with B >= 1 samples, but got {tuple(x.shape)}."
        )
    if x.dtype != weight.dtype:
        raise DataError(
            f"{which}x is {x.dtype}, but the model {weight.dtype}; use x.to({weight.dtype})."
        )
    if len(t.reshape(-1)) == 0 or len(x) != len(t):
        raise DataError(
            f"{which}x has {len(x)} samples, but {which}t has shape {tuple(t.shape)}; give one "
            "each."
        )
    _check_finite(f"{which}x", x)
    if isinstance(head, RegressionHead):
        if t.numel() != len(x) * head.outputs:
            raise DataError(
                f"{which}t must be ({len(x)}, {head.outputs}), a value for each output of the "
                f"head, but got {tuple(t.shape)}."
            )
        _check_finite(f"{which}t", t)
        return
    classes = 2 if isinstance(head, SigmoidHead) else head.outputs
    if t.ndim != 1 or t.is_floating_point() or t.is_complex():
        raise DataError(
            f"{which}t must be whole-number labels ({len(x)},), but got {t.dtype} of shape "
            f"{tuple(t.shape)}; use t.long()."
        )
    low, high = int(t.min()), int(t.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"labels must lie in 0 .. {classes - 1} for this head, but {which}t has {low} .. "
            f"{high}; renumber them or take a SoftmaxHead of {max(high + 1, 2)} classes."
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1)
    if bool(bad.any()):
        raise DataError(
            f"{name} has NaN or infinite values in {int(bad.sum())} of {len(bad)} samples, the "
            f"first at index {int(bad.nonzero()[0])}; remove or replace them."
        )


def check_weight(weight: Tensor | None, x: Tensor, which: str = "") -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor) or weight.shape != (len(x),) or weight.device != x.device:
        raise DataError(
            f"{which}weight must be a tensor ({len(x)},) on {x.device}, a number for each "
            "sample, but got "
            f"{tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__}."
        )
    if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()) or not bool(weight.any()):
        raise DataError(f"{which}weights must be finite, not negative, and not all zero.")


def diverged(model: Model, what: str, epoch: int, y_0: Tensor | None = None) -> TrainingError:
    """The error of a training that has diverged, with the layer where it first shows."""
    where = ""
    if y_0 is not None:
        with torch.no_grad():
            states = model.net.trajectory(y_0)
        bad = (~torch.isfinite(states)).flatten(1).any(1).nonzero()
        if len(bad):
            where = f", first in layer {max(int(bad[0]) - 1, 0)}"
    return TrainingError(
        f"{what} is not finite in epoch {epoch}{where}: the training has diverged; lower "
        "learning_rate, clip the gradients, use a smaller step h or a bounded activation such as "
        "tanh."
    )
