"""Docstrings on the site, as Python has them when hdnn is imported.

Networks share their options, which become part of docstrings and signatures at import. Public names
become links, and layers show the paper's equation.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import griffe

import public

EQUATIONS = Path(__file__).with_name("equations.toml")
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Examples):$", re.M)
PLAIN = re.compile(r"(?:^ {4,}[^\n]*[=<][^\n]*\n?\n?)+", re.M)  # indented lines with "=" or "<-"
NAME = re.compile(r"(?<!\[)`(hdnn\.[\w.]+\w)(\([^`\n]*\))?`(?!\])")


class Docstrings(griffe.Extension):
    """Rewrites each docstring once it has been read from the source."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        thing = things().get(obj.path)
        if thing is not None and obj.docstring:
            obj.docstring.value = inspect.getdoc(thing) or ""
        if isinstance(thing, type) and isinstance(obj, griffe.Class):
            constructor = obj.members.get("__init__")
            if isinstance(constructor, griffe.Function) and _shares_options(constructor):
                constructor.parameters = parameters(thing)
        if isinstance(obj, griffe.Module):
            for name, home in errors().items():  # a section Raises names what need not be imported
                if name not in obj.members:
                    obj.set_member(name, griffe.Alias(name, home))
        if obj.docstring:
            text = linked(obj.docstring.value, own=obj.path)
            obj.docstring.value = with_equation(text, equations().get(obj.path))


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
    return {homes()[name]: thing for name, thing in public.names().items() if name in homes()}


@cache
def errors() -> dict[str, str]:
    """Where each public error is defined, by the name that docstrings call it."""
    return {
        thing.__name__: home
        for home, thing in things().items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    }


def parameters(cls: type) -> griffe.Parameters:
    """What a class takes, by the signature that Python shows."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                given.name,
                annotation=None if given.annotation is given.empty else _text(given.annotation),
                kind=griffe.ParameterKind[given.kind.name.lower()],
                default=None if given.default is given.empty else repr(given.default),
            )
            for given in inspect.signature(cls).parameters.values()
        )
    )


def _shares_options(constructor: griffe.Function) -> bool:
    return any(given.kind is griffe.ParameterKind.var_keyword for given in constructor.parameters)


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


@cache
def equations() -> dict[str, str]:
    """The equation of each object that has one, as Markdown, by where the object is defined."""
    found: dict[str, str] = {}
    for equation in tomllib.loads(EQUATIONS.read_text(encoding="utf-8"))["equation"]:
        lines = [f"$$\n{formula}\n$$" for formula in equation["formulas"]]
        labels = " and ".join(f"`{label}`" for label in equation["labels"])
        text = "\n\n".join([*lines, f"In the paper: {labels}. {equation.get('note', '')}".rstrip()])
        for name in equation["names"]:
            if name not in homes():
                raise KeyError(f"{name} in {EQUATIONS.name} is no public name")
            found[homes()[name]] = text
    return found


def with_equation(text: str, equation: str | None) -> str:
    """A docstring with an equation, in the place of the plain one or below the first paragraph."""
    if equation is None or "$$" in text:
        return text
    above = (SECTION.search(text) or re.search(r"\Z", text)).start()  # pyright: ignore[reportOptionalMemberAccess]
    if plain := PLAIN.search(text, 0, above):
        return f"{text[: plain.start()]}{equation}\n\n{text[plain.end() :]}"
    first, gap, rest = text.partition("\n\n")
    return f"{first}\n\n{equation}{gap}{rest}"


def linked(text: str, own: str) -> str:
    """A docstring in which each public name in backticks leads to its page."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        known = name in public.names() and homes().get(name) != own
        return f"[{found[0]}][{name}]" if known else found[0]

    lines = text.split("\n")
    return "\n".join(
        line if line.lstrip().startswith((">>>", "...")) else NAME.sub(link, line) for line in lines
    )
