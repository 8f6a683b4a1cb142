"""What is known of a network's gradients before any computation, and when subclasses inherit it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

SYMPLECTIC = "each layer is symplectic, det = 1 (th:nonvanishing_gradients_DT)"
EXPANDING = "det(I + hA) = prod(1 + h^2 w^2) >= 1 in each layer"
ALWAYS = "at any depth, for any weights and any activation"

# What a subclass may override and keep the guarantee: these say what a network is or how it runs,
# not what it computes.
_HARMLESS = {
    *("guarantee", "_promise", "config", "constants", "extra_repr", "form", "_line", "invertible"),
    *("engine", "engines", "backprop", "engine_report", "_choose_engine", "_asked", "assign"),
    *("refine", "_refined", "smoothness", "smooth_leaves", "_counted", "_smooth", "coupling"),
    *("limit_coupling", "norms", "_apply", "reset_parameters", "_first", "started_from_here"),
    *("add_constant", "kept_aside", "_load_from_state_dict", "names_by_layer", "_whole_shape"),
    *(
        "run_layers",
        "frozen",
        "layer_groups",
        "freeze",
        "unfreeze",
        "divide",
        "describe_groups",
        "write",
    ),
}
_CALLS = {"__call__", "_call_impl", "__getattr__", "__getattribute__", "forward"}


@dataclass(frozen=True)
class Guarantee:
    """Whether `norm(dy_N/dy_j) >= 1` is a theorem for a network, which one, and why.

    Attributes:
        holds: whether it is a theorem.
        theorem: what it follows from, or "none".
        why: for which depths, weights and activations; or why nothing is promised.

    Examples:
        >>> import hdnn
        >>> hdnn.H2(features=4, layers=8).guarantee().holds
        True
        >>> hdnn.MLP(features=4, layers=8).guarantee()
        Guarantee(holds=False, theorem='none',
                  why='the gradients of a multilayer perceptron can vanish')
    """

    holds: bool
    theorem: str
    why: str


class Promising(Protocol):
    """A module that says what it promises about its gradients.

    `certified_at` says where that can be checked: at "rows", states (*batch, n) of a network with
    matrices for all layers; at "images"; or at "calls", whatever the module is called with.
    """

    certified_at: str

    def guarantee(self) -> Guarantee: ...

    def __call__(self, *args: Any, **options: Any) -> Any: ...


def forward_euler(activation: str, monotone: bool) -> Guarantee:
    """The guarantee of forward Euler, which depends on whether the activation is monotone."""
    if monotone:
        why = f"at any depth, because {activation} never decreases"
        return Guarantee(True, EXPANDING, why)
    why = f"forward Euler promises nothing for {activation}, which can decrease"
    return Guarantee(False, "none", why)


def unknown(module: object, own: list[str]) -> Guarantee:
    """The guarantee of a subclass that computes in its own way: none."""
    why = f"nothing is known of {type(module).__name__}, which has its own {', '.join(own)}; "
    return Guarantee(False, "none", why + "if something is, give it a method guarantee()")


def own_methods(module: object, owner: type | None = None) -> list[str]:
    """The methods that a module, or a class outside of hdnn, overrides and that change its results.

    With an `owner`, one of its base classes: only those overridden by subclasses of that.
    """
    line = type(module).__mro__
    names = {name for cls in line if _whose(cls) == "hdnn" for name in vars(cls)}
    names = {name for name in names if not name.startswith("__")} - _HARMLESS | _CALLS
    later = line[: line.index(owner)] if owner in line else line
    found = []
    for name in sorted(names):
        first = next((cls for cls in line if name in vars(cls)), object)
        replaced = first in later and _whose(first) not in ("hdnn", "torch", "builtins")
        if replaced or (name in vars(module) and callable(getattr(first, name, None))):
            found.append(name)
    return found


def _whose(cls: type) -> str:
    """The package that a class belongs to."""
    return cls.__module__.split(".")[0]
