"""What is public: the names that these modules list, each with an example of its own."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from typing import Any

MODULES = (
    "hdnn",
    "hdnn.activations",
    "hdnn.analysis",
    "hdnn.control",
    "hdnn.data",
    "hdnn.data.images",
    "hdnn.data.planar",
    "hdnn.distributed",
    "hdnn.dynamics",
    "hdnn.dynamics.systems",
    "hdnn.engine",
    "hdnn.errors",
    "hdnn.estimators",
    "hdnn.functional",
    "hdnn.heads",
    "hdnn.implicit",
    "hdnn.io",
    "hdnn.models",
    "hdnn.networks",
    "hdnn.plotting",
    "hdnn.schemes",
    "hdnn.sparsity",
    "hdnn.training",
)


@cache
def names() -> dict[str, Any]:
    """Every public class, function and error by the shortest name a user would write."""
    found: dict[str, Any] = {}
    known: set[int] = set()
    for module in MODULES:
        home = importlib.import_module(module)
        # hdnn itself also offers names that `import *` leaves out, since they are imported late.
        late = (
            {n for n in dir(home) if n[0] != "_"} if module == "hdnn" else set()
        )
        for name in [*home.__all__, *sorted(late - {*home.__all__})]:
            thing = getattr(home, name)
            if not inspect.ismodule(thing) and id(thing) not in known:
                known.add(id(thing))
                found[f"{module}.{name}"] = thing
    return found


def parameters(thing: Any) -> list[str]:
    """The names of what a function or a constructor takes, as a user gives them."""
    if inspect.isclass(thing) and issubclass(thing, Exception):
        return []
    given = [*inspect.signature(thing).parameters.values()]
    plain = (
        p for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    return [p.name for p in plain if not p.name.startswith("_")]
