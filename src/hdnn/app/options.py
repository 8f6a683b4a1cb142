"""Options of commands: written beside a function's parameters, or made of the fields of configs.

Annotations are read when the program is built, so that commands can be imported without typer.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, Any

from hdnn.base.config import BaseConfig, types_of

if TYPE_CHECKING:
    import typer
else:
    try:
        import typer
    except ImportError:  # `hdnn.__main__` says what to install
        typer = None


def option(text: str, *names: str, panel: str | None = None) -> Any:
    """An option with this help."""
    return typer.Option(*names, help=text, rich_help_panel=panel)


def argument(text: str) -> Any:
    """An argument with this help."""
    return typer.Argument(help=text)


def json_flag() -> Any:
    """The option of a command that can print its result for programs."""
    return option("print one JSON object", "--json")


def overwrite_flag() -> Any:
    return option("replace that file", "--overwrite")


def signature(*configs: type) -> Signature:
    """An option for each field of these that has a help text; for a command that takes keywords.

    A field of a config has no default here: what is not given is filled in by the config.
    """
    found: dict[str, Parameter] = {}
    for config in configs:
        types = types_of(config)
        for each in fields(config):
            if each.metadata.get("help") and each.name not in found:
                default = None if issubclass(config, BaseConfig) else each.default
                kind = types[each.name] | None if default is None else types[each.name]
                flag = f"--{each.name.replace('_', '-')}"
                about = option(each.metadata["help"], flag, panel=each.metadata["panel"])
                found[each.name] = Parameter(
                    each.name,
                    Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[kind, about],
                )
    return Signature([*found.values()])


def with_fields(function: Any, *configs: type) -> Signature:
    """The signature of a command whose **options are the fields of configs."""
    own = inspect.signature(function, eval_str=True).parameters.values()
    plain = [one for one in own if one.kind is not Parameter.VAR_KEYWORD]
    return Signature([*plain, *signature(*configs).parameters.values()])


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The options of a command that were given."""
    return {name: v for name, v in values.items() if not (v is None or v is False or v == [])}
