"""How a stack runs: the same results, but faster or in less memory.

`hdnn.reference` is the definition. An *engine* says where the layers run: "reference" (plain
PyTorch, one layer after the other) or "fused" (the whole stack as one kernel). *Backprop* says what
the backward pass starts from: "stored" states, or about sqrt(N) "checkpoint"s, between which the
layers run a second time. Both give the same gradients, for any weights. "reversible" keeps `y_N`
alone and rebuilds the other states by undoing the layers, so that memory does not grow with depth.
But rounding then grows as the layers expand, so each reversal is checked: a `ReversalWarning` with
figures, or a `TrainingError` if the gradients would be worthless.

"auto" gives the gradients of stored states for any weights. It stores the states while they take no
more than 1/32 of the memory; on a GPU 1/80 for up to 256 features, and 1/16 for up to 8 n samples,
whose states are not large beside the weights. Beyond that it keeps nine of them, rebuilds those
between, and compares: where the way back does not lead to the state that was kept, but for
rounding, those layers run again. Layers that cannot be undone get checkpoints. Any other choice
runs as asked, or raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from hdnn.errors import choose, flag

__all__ = ["Settings", "current", "use"]

OPTIONS: dict[str, tuple[str, ...]] = {
    "engine": ("auto", "reference", "fused"),
    "backprop": ("auto", "stored", "checkpoint", "reversible"),
    "state": ("float", "fixed"),
    "precision": ("auto", "ieee", "tf32", "tf32x3", "bf16"),
}


@dataclass(frozen=True)
class Settings:
    """What the caller asks of the engine; `use` puts it in force, `current` reads it.

    Args:
        engine: where layers run: "auto", "reference" (plain PyTorch) or "fused" (one kernel).
        backprop: what the backward pass starts from: "auto", "stored" states, "checkpoint" (about
            sqrt(N) of them) or "reversible" (the last state alone).
        state: "float", or "fixed" to keep the state on a grid of 2^-40, about 1e-12, up to 8e6, so
            that its reversal is exact to the last bit; states too small for the grid give a
            warning, too large ones an error.
        precision: of matrix products on a GPU: "auto", "ieee", "tf32", "tf32x3" or "bf16". "auto"
            follows the dtype, and for float32 `torch.set_float32_matmul_precision`.
        deterministic: forbid atomic additions on a GPU, so that runs repeat bit for bit.
        check: check each reversal; False leaves that out.

    Raises:
        OptionError: if a value is not one of those.

    Examples:
        >>> from hdnn import engine
        >>> engine.Settings(backprop="checkpoint").engine
        'auto'
    """

    engine: str = "auto"
    backprop: str = "auto"
    state: str = "float"
    precision: str = "auto"
    deterministic: bool = False
    check: bool = True

    def __post_init__(self) -> None:
        for name, known in OPTIONS.items():
            choose(name, getattr(self, name), known)
        flag("deterministic", self.deterministic)
        flag("check", self.check)


_DEFAULT = Settings()
_current: ContextVar[Settings] = ContextVar("hdnn_engine", default=_DEFAULT)


def current(engine: str | None = None, backprop: str | None = None) -> Settings:
    """The settings in force, with those that are given here replaced.

    Args:
        engine: to be taken instead of the one in force, unless None.
        backprop: likewise.

    Returns:
        The settings.

    Raises:
        OptionError: if there is no such engine or backprop.

    Examples:
        >>> from hdnn import engine
        >>> engine.current().backprop
        'auto'
        >>> engine.current(backprop="stored").backprop
        'stored'
    """
    settings = _current.get()
    if engine is None and backprop is None:
        return settings
    return _changed(settings, engine, backprop)


@lru_cache(maxsize=256)
def _changed(settings: Settings, engine: str | None, backprop: str | None) -> Settings:
    given = {"engine": engine, "backprop": backprop}
    return replace(settings, **{k: v for k, v in given.items() if v is not None})


@contextmanager
def use(**options: Any) -> Iterator[Settings]:
    """Run all stacks inside a `with` block as asked.

    Settings that are not named stay as they are outside. They hold for this thread or task alone.

    Args:
        **options: those of `Settings`, by name.

    Yields:
        The settings in force inside the block.

    Raises:
        OptionError: if there is no such option, or it has no such value.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net, y = hdnn.H2(features=4, layers=8), torch.randn(2, 4)
        >>> with hdnn.engine.use(engine="reference"):
        ...     slow = net(y)
        >>> torch.allclose(net(y), slow, atol=1e-5)
        True
    """
    for name in options:
        choose("engine option", name, [field.name for field in fields(Settings)])
    token = _current.set(replace(_current.get(), **options))
    try:
        yield _current.get()
    finally:
        _current.reset(token)
