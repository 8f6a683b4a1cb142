"""Where results of an experiment go: old ones are replaced only if their folder is named."""

from __future__ import annotations

from pathlib import Path

from hdnn.errors import OptionError

OUT = Path("runs/reproduced")  # unless a folder is named
HELP = f"folder for {{}}, where old results are replaced (default: {OUT}, where they are not)"


def folder_for(file: str, named: Path | None) -> Path:
    """The folder for results of that name; an error if some are in the default one already."""
    if named is not None:
        return named
    pictures = OUT.glob(f"{file}-*") if file.startswith("fig-") else []
    there = sorted([*OUT.glob(f"{file}.*"), *pictures])
    if there:
        raise OptionError(
            f"{there[0]} is there already, from an earlier time; name another folder with --out, "
            f"or replace it by --out {OUT}."
        )
    return OUT
