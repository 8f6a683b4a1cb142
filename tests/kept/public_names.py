"""What users can call: the public names of hdnn's documented modules, with their parameters."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

MODULES = (
    "hdnn",
    "hdnn.activations",
    "hdnn.analysis",
    "hdnn.analysis.continuous",
    "hdnn.analysis.counterexample",
    "hdnn.data",
    "hdnn.data.cifar10",
    "hdnn.data.download",
    "hdnn.data.images",
    "hdnn.data.mnist",
    "hdnn.data.planar",
    "hdnn.data.table",
    "hdnn.distributed",
    "hdnn.distributed.transport",
    "hdnn.engine",
    "hdnn.errors",
    "hdnn.estimators",
    "hdnn.functional",
    "hdnn.heads",
    "hdnn.interconnection",
    "hdnn.model",
    "hdnn.models",
    "hdnn.networks",
    "hdnn.operators",
    "hdnn.operators.block_sparse",
    "hdnn.operators.conv",
    "hdnn.operators.dense",
    "hdnn.plotting",
    "hdnn.regularization",
    "hdnn.serialization",
    "hdnn.sparsity",
    "hdnn.training",
    "hdnn.training.images",
)
# Modules that users start: `python -m NAME`. Only that they are there is recorded.
PROGRAMS = (
    "hdnn",
    "hdnn.data.download",
    "hdnn.experiments.fig_cifar",
    "hdnn.experiments.fig_distributed",
    "hdnn.experiments.fig_exploding",
    "hdnn.experiments.fig_gradients",
    "hdnn.experiments.fig_planar",
    "hdnn.experiments.recipe_search",
    "hdnn.experiments.table_cifar",
    "hdnn.experiments.table_distributed",
    "hdnn.experiments.table_mnist",
    "hdnn.experiments.table_planar",
)
LATE = {"hdnn": ("HDNNClassifier", "HDNNRegressor")}  # imported when they are first asked for
PLAIN = (type(None), bool, int, float, str, torch.dtype)

Description = dict[str, Any]


def public_names() -> dict[str, dict[str, Description]]:
    """Each module with its names, and each name with what is there."""
    public = public_classes()
    found: dict[str, dict[str, Description]] = {name: {} for name in MODULES}
    first: dict[int, str] = {}  # by the identity of a class or function, where it was first met
    for module, name, value in _values():
        here = f"{module}.{name}"
        known = first.setdefault(id(value), here) if _has_identity(value) else here
        found[module][name] = describe(value, public) if known == here else {"same as": known}
    return found


@cache
def public_classes() -> frozenset[type]:
    return frozenset(value for *_, value in _values() if inspect.isclass(value))


def _values() -> list[tuple[str, str, Any]]:
    modules = {name: importlib.import_module(name) for name in MODULES}
    return [
        (name, one, getattr(module, one))
        for name, module in modules.items()
        for one in sorted(_exported(module))
    ]


def _has_identity(value: Any) -> bool:
    return inspect.isclass(value) or inspect.isfunction(value)


def _exported(module: ModuleType) -> set[str]:
    """The names of `__all__`, or what the module itself defines or passes on as its own."""
    late = LATE.get(module.__name__, ())
    if hasattr(module, "__all__"):
        return {*module.__all__, *late}
    assert module.__file__ is not None
    found = set(late)
    for node in ast.parse(Path(module.__file__).read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {n.id for target in node.targets for n in _names(target)}
        elif isinstance(node, ast.AnnAssign):
            found |= {n.id for n in _names(node.target)}
        elif isinstance(node, ast.ImportFrom):  # `from .. import name as name` passes a name on
            found |= {alias.name for alias in node.names if alias.asname == alias.name}
    return {name for name in found if not name.startswith("_")}


def _names(target: ast.expr) -> Iterable[ast.Name]:
    return (node for node in ast.walk(target) if isinstance(node, ast.Name))


def describe(value: Any, public: Iterable[type] = ()) -> Description:
    """What a name stands for, as JSON can hold it."""
    if inspect.ismodule(value):
        return {"is": "module"}
    if inspect.isclass(value):
        return _class(value, public)
    if inspect.isroutine(value):
        return {"is": "function", "call": _call(value)}
    kind = {"type": type(value).__name__} if type(value) in (*PLAIN, tuple, list, dict) else {}
    return {"is": "constant", **kind, **_value(value)}


def _class(cls: type, public: Iterable[type]) -> Description:
    """How it is made, what it is a kind of, and those of its members that hdnn defines."""
    ours = [one for one in cls.__mro__ if one.__module__.startswith("hdnn")]
    bases = {base for one in ours for base in one.__bases__ if base is not object}
    kept = {base for base in bases if base in public or base not in ours}
    found: Description = {
        "is": "class",
        "bases": sorted(base.__name__ for base in kept),
        "members": {
            name: _member(inspect.getattr_static(cls, name))
            for name in sorted(dir(cls))
            if not name.startswith("_") and _is_own(inspect.getattr_static(cls, name))
        },
    }
    if not issubclass(cls, Exception):
        found["call"] = _call(cls)
    if dataclasses.is_dataclass(cls):
        found["fields"] = [field.name for field in dataclasses.fields(cls)]
    elif isinstance(fields := getattr(cls, "_fields", None), tuple):
        found["fields"] = list(fields)
    return found


def _is_own(member: Any) -> bool:
    function = getattr(member, "func", None) or getattr(member, "fget", None)
    function = function or getattr(member, "__func__", member)
    return inspect.isfunction(function) and function.__module__.startswith("hdnn")


def _member(member: Any) -> str:
    if isinstance(member, (classmethod, staticmethod)):
        return f"{type(member).__name__} {_call(member.__func__)}"
    return f"method {_call(member)}" if inspect.isfunction(member) else "property"


def _call(function: Any) -> str:
    """The parameters as they are written, without types; a default that is no plain value is ..."""
    signature = inspect.signature(function)
    parameters = [
        one.replace(annotation=one.empty, default=_written(one.default))
        for one in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


class _Written:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _written(default: Any) -> Any:
    if default is inspect.Parameter.empty:
        return default
    return _Written(_value(default).get("value", "..."))


def _value(value: Any) -> Description:
    """The value, if it is one that is written the same everywhere."""
    parts = value if isinstance(value, tuple) else (value,)
    return {"value": repr(value)} if all(isinstance(part, PLAIN) for part in parts) else {}


# Comparing what was with what is


def differences(name: str, before: Description, now: Description) -> list[str]:
    """In a few words each, what users of a name would miss."""
    if before.get("is") != now.get("is"):
        return [f"{name} was a {before['is']} and is a {now['is']}"]
    lost = []
    for what, key in (("base class", "bases"), ("member", "members"), ("field", "fields")):
        missing = [one for one in before.get(key, ()) if one not in now.get(key, ())]
        lost += [f"{name} has no {what} {one} any more" for one in missing]
    for key in ("type", "value"):
        if before.get(key) != now.get(key):
            lost.append(f"{name} has {key} {now.get(key)}, not {before.get(key)}")
    if "call" in before:
        lost += _other_call(name, before["call"], now["call"])
    for one, was in before.get("members", {}).items():
        if one in now["members"]:
            lost += _other_member(f"{name}.{one}", was, now["members"][one])
    return lost


def _other_member(name: str, before: str, now: str) -> list[str]:
    (was, _, call), (is_now, _, new_call) = before.partition(" "), now.partition(" ")
    if was != is_now:
        return [f"{name} was a {was} and is a {is_now}"]
    return _other_call(name, call, new_call) if call else []


def _other_call(name: str, before: str, now: str) -> list[str]:
    """What a call that worked before would miss; what is new must be optional and come last."""
    was, is_now = _parameters(before), _parameters(now)
    lost = []
    for one, (kind, default) in was.items():
        if one not in is_now:
            lost.append(f"{name} has no parameter {one} any more")
        elif is_now[one] != (kind, default):
            new_kind, new = is_now[one]
            lost.append(f"{name} has {one} as {new_kind} = {new}, not {kind} = {default}")
    for one, (kind, default) in is_now.items():
        if one not in was and default == REQUIRED and "any number" not in kind:
            lost.append(f"{name} needs a new parameter {one}; give it a default")
    return lost


REQUIRED = "(required)"


def _parameters(call: str) -> dict[str, tuple[str, str]]:
    """Each parameter by its name: its kind, with its place where that matters, and its default."""
    (node,) = ast.parse(f"def f{call}: ...").body
    assert isinstance(node, ast.FunctionDef)
    found = {}
    by_place = [*node.args.posonlyargs, *node.args.args]
    defaults = [None] * (len(by_place) - len(node.args.defaults)) + node.args.defaults
    for place, (one, default) in enumerate(zip(by_place, defaults, strict=True)):
        alone = " only" if one in node.args.posonlyargs else ""
        found[one.arg] = (f"number {place}{alone}", _text(default))
    for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        found[one.arg] = ("keyword only", _text(default))
    for one, what in ((node.args.vararg, "places"), (node.args.kwarg, "keywords")):
        if one is not None:
            found[one.arg] = (f"any number of {what}", REQUIRED)
    return found


def _text(default: ast.expr | None) -> str:
    return REQUIRED if default is None else ast.unparse(default)
