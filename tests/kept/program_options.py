"""What users can type: the commands of `hdnn` and its experiments, options and arguments."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

from hdnn.__main__ import main

Description = dict[str, Any]


def program_options() -> dict[str, Description]:
    """Each command by its full name, as JSON can hold it."""
    return dict(_commands(_program(), "hdnn"))


EXPERIMENTS = (
    "table-planar",
    "table-distributed",
    "table-mnist",
    "table-cifar",
    "fig-planar",
    "fig-distributed",
    "fig-gradients",
    "fig-exploding",
    "fig-cifar",
)


def experiment_options() -> dict[str, list[str]]:
    """The options that each experiment tells of itself."""
    found = {}
    for name in EXPERIMENTS:
        told = io.StringIO()
        with redirect_stdout(told):
            assert main(["reproduce", name, "--", "--help"]) == 0
        found[name] = sorted({*re.findall(r"(?<![\w-])--[a-z][a-z-]*", told.getvalue())})
    return found


def _program() -> Any:
    """The group of all commands, caught where it would start."""
    import typer.core

    caught = []

    def catch(self: Any, *_: Any, **__: Any) -> int:
        caught.append(self)
        return 0

    with mock.patch.object(typer.core.TyperGroup, "main", catch):
        assert main(["--help"]) == 0
    (program,) = caught
    return program


def _commands(command: Any, name: str) -> list[tuple[str, Description]]:
    options = [one for one in command.params if one.param_type_name == "option"]
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    found: Description = {
        "options": {max(one.opts, key=len): _option(one) for one in options},
        "arguments": [_argument(one) for one in arguments],
        "passes on what it does not know": bool(command.context_settings.get("allow_extra_args")),
        "has an example": f"\n{name}" in (command.epilog or ""),
    }
    below = getattr(command, "commands", {})
    return [
        (name, found),
        *(pair for one in below for pair in _commands(below[one], f"{name} {one}")),
    ]


def _option(option: Any) -> Description:
    """Only what is not as usual: an option is optional, given once, and has no other names."""
    name = max(option.opts, key=len)
    found: Description = {"default": option.default}
    if option.required:
        found["required"] = True
    if others := [one for one in option.opts if one != name]:
        found["also"] = others
    if option.is_flag:
        return {**found, "flag": True, "off": option.secondary_opts}
    if option.multiple:
        found["repeated"] = True
    return {**found, **_type(option)}


def _argument(argument: Any) -> Description:
    return {
        "name": argument.metavar or argument.name,
        "default": argument.default,
        "required": argument.required,
        "count": argument.nargs,
        **_type(argument),
    }


def _type(parameter: Any) -> Description:
    """What may be given, in Python's words; versions of typer have it in different places."""
    if hasattr(parameter, "type_descriptor"):
        known = parameter.type_descriptor
        of = getattr(known.annotation, "__args__", (known.annotation,))[0]
        name = of.__name__
    else:
        known = parameter.type
        name = {"text": "str", "integer": "int"}.get(known.name, known.name)
    choices = getattr(known, "choices", None)
    return {"type": name} | ({"choices": [str(one) for one in choices]} if choices else {})


# Comparing what was with what is


def differences(name: str, before: Description, now: Description) -> list[str]:
    """In a few words each, what users of a command would miss."""
    lost = []
    for option, was in before["options"].items():
        if option not in now["options"]:
            lost.append(f"{name} has no {option} any more")
        else:
            lost += _changed(f"{name} {option}", was, now["options"][option])
    for option, is_now in now["options"].items():
        if option not in before["options"] and is_now.get("required"):
            lost.append(f"{name} needs a new option {option}; give it a default")
    rest = [key for key in before if key not in ("options", "has an example")]
    lost += _changed(name, *({key: one.get(key) for key in rest} for one in (before, now)))
    if before["has an example"] and not now["has an example"]:
        lost.append(f"{name} --help shows no example any more")
    return lost


def _changed(name: str, before: Description, now: Description) -> list[str]:
    return [
        f"{name} has {key} {now.get(key)!r}, not {was!r}"
        for key in {**before, **now}
        if key != "also" and (was := before.get(key)) != now.get(key)
    ] + [
        f"{name} is not called {other} any more"
        for other in before.get("also", ())
        if other not in now.get("also", ())
    ]
