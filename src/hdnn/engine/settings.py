"""The settings of `hdnn.engine.use`, for one thread or task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from hdnn.errors import choose

OPTIONS = {
    "engine": ("auto", "reference", "fused"),
    "backprop": ("auto", "stored", "checkpoint", "reversible"),
    "precision": ("auto", "ieee", "tf32", "tf32x3", "bf16"),
}


@dataclass(frozen=True)
class Settings:
    """The options for running stacks of layers.

    Args:
        engine: "reference" (plain PyTorch), "fused" (one kernel for all layers), or "auto".
        backprop: which saved states the backward pass starts from: all ("stored"), about sqrt(N) of
            them ("checkpoint"), only the last ("reversible"), or "auto".
        precision: the precision of matrix products on a GPU: "ieee", "tf32", "tf32x3", "bf16", or
            "auto", which follows the dtype and `torch.set_float32_matmul_precision`.
        deterministic: add up gradients on a GPU in a fixed order, so that runs repeat bit for bit.
    """

    engine: str = "auto"
    backprop: str = "auto"
    precision: str = "auto"
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, values in OPTIONS.items():
            choose(name, getattr(self, name), values)


DEFAULT = Settings()
in_force: ContextVar[Settings] = ContextVar("hdnn_engine", default=DEFAULT)


def current(engine: str | None = None, backprop: str | None = None) -> Settings:
    """The current settings; arguments that are not None take precedence."""
    settings = in_force.get()
    if engine is not None:
        settings = replace(settings, engine=engine)
    if backprop is not None:
        settings = replace(settings, backprop=backprop)
    return settings


@contextmanager
def use(**options: Any) -> Iterator[Settings]:
    """Run all networks inside a `with` block with these options.

    Args:
        **options: fields of `Settings`; other fields keep their values from outside the block.

    Raises:
        OptionError: if an option or its value is unknown.

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
        choose(
            "engine option", name, [field.name for field in fields(Settings)]
        )
    token = in_force.set(replace(in_force.get(), **options))
    try:
        yield in_force.get()
    finally:
        in_force.reset(token)
