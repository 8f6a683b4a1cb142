"""Training configs: fields with help texts and choices, and how they are read and written.

Configs extend `BaseConfig`. The command line generates its options from their fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints, is_typeddict

from hdnn.base.files import read_bytes
from hdnn.errors import OptionError, as_float, choose, quoted

LARGEST = 2**20  # bytes that a config file may have

WORDS: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list[str]: "a list of texts",
}


def option(
    default: Any,
    text: str,
    *,
    panel: str = "",
    choices: Collection[str] | Callable[[], Collection[str]] | None = None,
) -> Any:
    """A field with its help text, the heading of the help it appears under, and its choices.

    Choices that take an import to know are given by a function.
    """
    return dataclasses.field(
        default=default, metadata={"help": text, "panel": panel, "choices": choices}
    )


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """What all configs have in common."""

    kind: ClassVar[str] = ""  # written to the config file of a run

    def check_choices(self) -> None:
        """Raise an error if the value of a field is not one of its choices."""
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata.get("choices")
            if choices is not None:
                choices = choices() if callable(choices) else choices
                choose(each.name.replace("_", "-"), value, choices)

    def to_json(self) -> dict[str, Any]:
        """All fields and the kind, by their names."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Self:
        """The config that `to_json` wrote; older files do not name their kind."""
        return cls(**cls.without_kind(given))

    @classmethod
    def without_kind(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The options of a file without its kind, which must be the kind of this config."""
        options = dict(given)
        if (kind := options.pop("kind", cls.kind)) != cls.kind:
            raise OptionError(f"kind must be {cls.kind!r} for such a training, not {quoted(kind)}.")
        return options

    def to_toml(self) -> str:
        """The text of a file that `--config` reads back to the same config."""
        values = {each.name.replace("_", "-"): getattr(self, each.name) for each in fields(self)}
        values = {name: value for name, value in values.items() if value not in (None, [])}
        return "[train]\n" + to_toml({"kind": self.kind, **values})


def types_of(*configs: type) -> dict[str, Any]:
    """The types of all fields of these classes by name, without None.

    If several classes have a field of the same name, the first class counts.
    """
    found: dict[str, Any] = {}
    for config in configs:
        hints = get_type_hints(config)
        for each in fields(config):
            kind = hints[each.name]
            if isinstance(kind, UnionType):
                kind = get_args(kind)[0]
            found.setdefault(each.name, kind)
    return found


def fits(value: Any, kind: Any) -> bool:
    """Whether a value that was read from a file is of an annotated type.

    A float is any finite number, a tuple a list of that length, a TypedDict a dict that has all its
    names.
    """
    if kind is Any:
        return True
    if kind is float:
        number = as_float(value)
        return number is not None and math.isfinite(number)
    if is_typeddict(kind):
        return isinstance(value, dict) and all(
            name in value and fits(value[name], inner)
            for name, inner in get_type_hints(kind).items()
        )
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(fits(entry, inner[0]) for entry in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(inner) and all(map(fits, value, inner))
    if origin is dict:
        return isinstance(value, dict) and all(fits(one, inner[1]) for one in value.values())
    if origin is UnionType:
        return any(fits(value, one) for one in inner)
    return type(value) is kind


def read_toml(path: Path, table: str, types: dict[str, Any]) -> dict[str, Any]:
    """The options in one table of a TOML file: types are checked, and - in a name becomes _."""
    try:
        document = tomllib.loads(read_bytes(path, LARGEST).decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError is a ValueError
        reason = str(error).removeprefix(f"cannot read {path}: ")
        reason = reason.removeprefix(f"{path} cannot be read: ").rstrip(".")
        raise OptionError(f"cannot read the config file {path}: {reason}.") from error
    for name in document:
        _check_known(path, name, [table], "table")
    if not isinstance(document.get(table), dict):
        raise OptionError(f"{path} has no table [{table}]; put the options under that line.")
    options: dict[str, Any] = {}
    for key, value in document[table].items():
        name = key.replace("-", "_")
        _check_known(path, name, types, "option")
        if name in options:
            raise OptionError(f"{path} gives {key} twice, with - and with _.")
        options[name] = _of_type(path, key, value, types[name])
    return options


def _check_known(path: Path, name: str, names: Iterable[str], what: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}."
        raise OptionError(f"{path} has an unknown {what} {name!r}; {hint}")


def _of_type(path: Path, key: str, value: Any, kind: Any) -> Any:
    if kind is float and type(value) in (int, float):
        return as_float(value)  # what is not finite is refused with the reason why
    if not fits(value, kind):
        raise OptionError(f"{path}: {key} must be {WORDS[kind]}, but is {quoted(value)}.")
    return value


def to_toml(values: dict[str, Any]) -> str:
    """The values as TOML, one line each."""
    return "".join(f"{name} = {toml_value(value)}\n" for name, value in values.items())


def toml_value(value: Any) -> str:
    """One value as TOML; so little code that it is not worth a dependency."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(entry) for entry in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # TOML escapes strings as JSON does, and also the control character DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
