"""The playground as one file: style and scripts inlined, so that it needs no server.

The scripts are plain ES modules. They are joined in the order in which they need each other, and
lose `import` and `export`; a name on the top level of one file may not be that of another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
IMPORT = re.compile(r'^import\s*\{([^{}]*)\}\s*from\s*["\']([^"\']+)["\'];?[ \t]*$', re.M)
REEXPORT = re.compile(r'^export\s*\{([^{}]*)\}\s*from\s*["\']([^"\']+)["\'];?[ \t]*$', re.M)
EXPORTS = re.compile(r"^export\s*\{([^{}]*)\};?[ \t]*$", re.M)
EXPORT = re.compile(r"^export\s+(?=(?:async\s+)?(?:function|class|const|let|var)\b)", re.M)
DECLARED = re.compile(
    r"^(?:export\s+)?(?:(?:async\s+)?function\s*\*?|class|const|let|var)\s+([\w$]+)", re.M
)
LEFT = re.compile(r"^(?:import|export)\b.*", re.M)
PLACE = re.compile(r"\{\{(style|script|worker)\}\}")


class JoinError(Exception):
    """Scripts that cannot become one."""


def page() -> str:
    """The page, with all that it needs."""
    parts = {
        "style": (HERE / "style.css").read_text(encoding="utf-8"),
        "script": join(HERE / "ui" / "main.js"),
        "worker": join(HERE / "worker.js"),
    }
    for name, text in parts.items():
        if end := re.search(r"</(script|style)|<!--", text, re.I):
            raise JoinError(f"the {name} would end early, at {end[0]!r}.")
    return PLACE.sub(
        lambda place: parts[place[1]].strip(),
        (HERE / "page.html").read_text(encoding="utf-8"),
    )


def join(entry: Path, read: Callable[[Path], str] | None = None) -> str:
    """One script of a module and all that it imports, in strict mode and with no global names."""
    read = read or (lambda path: path.read_text(encoding="utf-8"))
    joined: dict[Path, str] = {}
    exported: dict[Path, set[str]] = {}
    owner: dict[str, Path] = {}
    _add(entry.resolve(), read, joined, exported, owner, [])
    return '"use strict";\n(() => {\n' + "\n".join(joined.values()) + "})();\n"


def _add(
    path: Path,
    read: Callable[[Path], str],
    joined: dict[Path, str],
    exported: dict[Path, set[str]],
    owner: dict[str, Path],
    above: list[Path],
) -> None:
    """Put a module behind all that it needs."""
    if path in above:
        raise JoinError(f"{path.name} is needed by what it imports itself.")
    if path in joined:
        return
    text = read(path)
    exported[path] = set()
    for pattern in (IMPORT, REEXPORT):
        for names, source in pattern.findall(text):
            if not source.startswith("."):
                raise JoinError(f"{path.name} imports {source}, which is not a file beside it.")
            needed = (path.parent / source).resolve()
            _add(needed, read, joined, exported, owner, [*above, path])
            wanted = _names(names, path)
            if missing := wanted - exported[needed]:
                raise JoinError(f"{path.name} imports {_list(missing)}, not in {needed.name}.")
            exported[path] |= wanted if pattern is REEXPORT else set()
    for name in DECLARED.findall(text):
        if name in owner:
            raise JoinError(f"{owner[name].name} and {path.name} both have the name {name}.")
        owner[name] = path
    exported[path] |= {DECLARED.match(text, found.start())[1] for found in EXPORT.finditer(text)}  # pyright: ignore[reportOptionalSubscript]
    for names in EXPORTS.findall(text):
        exported[path] |= _names(names, path)
    text = EXPORT.sub("", EXPORTS.sub("", REEXPORT.sub("", IMPORT.sub("", text))))
    if left := LEFT.search(text):
        raise JoinError(f"{path.name} has {left[0]!r}, which this joiner does not know.")
    joined[path] = f"// {path.name}\n{text.strip()}\n"


def _names(text: str, path: Path) -> set[str]:
    """The names between the braces of an import or export, none of which may be renamed."""
    plain = re.sub(r"//.*|/\*.*?\*/", "", text)
    names = {name.strip() for name in plain.split(",") if name.strip()}
    if renamed := {name for name in names if not re.fullmatch(r"[\w$]+", name)}:
        raise JoinError(f"{path.name} renames {_list(renamed)}; call it by one name everywhere.")
    return names


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names))
