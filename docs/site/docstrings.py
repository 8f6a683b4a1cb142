"""Docstrings on the site, as Python has them when hdnn is imported.

Networks share their options, which become part of docstrings and signatures at import. Public names
become links.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any, get_args, get_type_hints

import griffe

import public

NAME = re.compile(r"(?<!\[)`(hdnn\.[\w.]+\w)(\([^`\n]*\))?`(?!\])")


class Docstrings(griffe.Extension):
    """Rewrites each docstring once it has been read from the source."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        thing = things().get(obj.path)
        if thing is not None and obj.docstring:
            obj.docstring.value = inspect.getdoc(thing) or ""
        if isinstance(thing, type) and isinstance(obj, griffe.Class):
            constructor = obj.members.get("__init__")
            if isinstance(constructor, griffe.Function) and _shares_options(
                constructor
            ):
                constructor.parameters = parameters(thing)
        if isinstance(obj, griffe.Module):
            for (
                name,
                home,
            ) in (
                errors().items()
            ):  # a section Raises names what need not be imported
                if name not in obj.members:
                    obj.set_member(name, griffe.Alias(name, home))
        if obj.docstring:
            obj.docstring.value = linked(obj.docstring.value, own=obj.path)


@cache
def homes() -> dict[str, str]:
    """Where each public name is defined."""
    return {
        name: f"{thing.__module__}.{thing.__qualname__}"
        for name, thing in public.names().items()
        if hasattr(thing, "__qualname__")
    }


@cache
def things() -> dict[str, Any]:
    """What is public, by where it is defined."""
    return {
        homes()[name]: thing
        for name, thing in public.names().items()
        if name in homes()
    }


@cache
def errors() -> dict[str, str]:
    """Where each public error is defined, by the name that docstrings call it."""
    return {
        thing.__name__: home
        for home, thing in things().items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    }


def parameters(cls: type) -> griffe.Parameters:
    """What a class takes, with each of the options that networks share."""
    shown = []
    for given in inspect.signature(cls).parameters.values():
        if given.kind is given.VAR_KEYWORD and "Unpack[" in _text(
            given.annotation
        ):
            shown += _options(cls, given.name)
            continue
        shown.append(
            griffe.Parameter(
                given.name,
                annotation=None
                if given.annotation is given.empty
                else _text(given.annotation),
                kind=griffe.ParameterKind[given.kind.name.lower()],
                default=None
                if given.default is given.empty
                else repr(given.default),
            )
        )
    return griffe.Parameters(*shown)


def _options(cls: Any, name: str) -> list[griffe.Parameter]:
    """The options that `**name: Unpack[..]` stands for; their defaults are in the docstrings."""
    (options,) = get_args(get_type_hints(cls.__init__)[name])
    return [
        griffe.Parameter(
            option,
            annotation=_text(annotation),
            kind=griffe.ParameterKind.keyword_only,
            default="...",
        )
        for option, annotation in get_type_hints(options).items()
    ]


def _shares_options(constructor: griffe.Function) -> bool:
    return any(
        given.kind is griffe.ParameterKind.var_keyword
        for given in constructor.parameters
    )


def _text(annotation: Any) -> str:
    return (
        annotation
        if isinstance(annotation, str)
        else inspect.formatannotation(annotation)
    )


def linked(text: str, own: str) -> str:
    """A docstring in which each public name in backticks leads to its page."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        known = name in public.names() and homes().get(name) != own
        return f"[{found[0]}][{name}]" if known else found[0]

    lines = text.split("\n")
    return "\n".join(
        line
        if line.lstrip().startswith((">>>", "..."))
        else NAME.sub(link, line)
        for line in lines
    )
