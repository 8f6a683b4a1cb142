"""Options that networks share: their types, and their checks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from hdnn.errors import OptionError, StepError, positive_float
from hdnn.sparsity import Sparsity

DEFAULT_T = 2.4
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Examples")  # of a docstring
Constructor = TypeVar("Constructor", bound=Callable[..., None])
Class = TypeVar("Class")


class HamiltonianOptions(TypedDict, total=False):
    """What H1, H2 and ImplicitH2 all take: see `HamiltonianNet`."""

    step: float | Sequence[float] | Tensor | None
    T: float | None
    activation: str
    learn_step: bool
    tied: bool
    init: str
    sparsity: Sparsity | Any | None
    generator: torch.Generator | None
    dtype: torch.dtype | None
    device: torch.device | str | None


class H1Options(HamiltonianOptions, total=False):
    J: Tensor | None
    learn_J: bool
    engine: str
    backprop: str


class H2Options(HamiltonianOptions, total=False):
    X: Tensor | None
    learn_X: bool
    engine: str
    backprop: str


class ImplicitH2Options(HamiltonianOptions, total=False):
    X: Tensor | None
    learn_X: bool
    tol: float | None
    max_iter: int | None


def takes(parent: type, *, without: Sequence[str]) -> Callable[[Constructor], Constructor]:
    """Give a constructor the signature of its parent's, `without` some; others are a TypeError."""
    whole = inspect.signature(parent.__init__)
    kept = [p for name, p in whole.parameters.items() if name not in without]
    signature = whole.replace(parameters=kept)

    def decorate(constructor: Constructor) -> Constructor:
        @wraps(constructor)
        def checked(*given: Any, **options: Any) -> None:
            try:
                signature.bind(*given, **options)
            except TypeError as error:  # Python's own words, after the name of the constructor
                raise TypeError(f"{constructor.__qualname__}() {error}") from None
            constructor(*given, **options)

        checked.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
        return checked  # pyright: ignore[reportReturnType]

    return decorate


def describes_options(source: type, **more: str) -> Callable[[type[Class]], type[Class]]:
    """Add the options of a class to its docstring, in the words of the `Args:` of another one.

    `more` are the words for options that only this class has. A class without a section `Raises:`
    has that of the other one too.
    """
    told = _sections(source.__doc__ or "")
    words, name = {name: [f"    {name}: {text}"] for name, text in more.items()}, ""
    for line in told.get("Args", "").splitlines():
        if found := re.match(r"    (\w+): ", line):
            words[name := found[1]] = [line]
        else:
            words[name].append(line)

    def decorate(cls: type[Class]) -> type[Class]:
        if cls.__doc__ is not None:  # python -OO has none
            own = _sections(cls.__doc__)
            lines = [line for name in inspect.signature(cls).parameters for line in words[name]]
            parts = {"Raises": told.get("Raises", ""), **own, "Args": "\n".join(lines)}
            told_in_order = (f"{head}:\n{parts[head]}" for head in SECTIONS if parts.get(head))
            cls.__doc__ = "\n\n".join([own[""], *told_in_order])
        return cls

    return decorate


def _sections(doc: str) -> dict[str, str]:
    """The parts of a docstring by the heads above them; what stands before all of them is ""."""
    first, *rest = re.split(rf"^({'|'.join(SECTIONS)}):\n", inspect.cleandoc(doc), flags=re.M)
    parts = {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}
    return {head: text.rstrip() for head, text in parts.items()}


def step_size(
    step: float | Sequence[float] | Tensor | None, T: float | None, layers: int
) -> float | tuple[float, ...]:
    """h from what the user gave: h itself, one a layer, or T with h = T/N."""
    if step is not None and T is not None:
        raise OptionError(f"give step (h) or T, where h = T/N, but not both: {step=}, {T=}.")
    if step is None:
        return positive_float("T", DEFAULT_T if T is None else T) / layers
    if isinstance(step, (Tensor, np.ndarray)):
        step = step.tolist()
    if isinstance(step, (list, tuple)):
        if len(step) != layers:
            raise StepError(f"step has {len(step)} entries for {layers} layers; give one each.")
        return tuple(positive_float("step", h) for h in step)
    return positive_float("step", step)
