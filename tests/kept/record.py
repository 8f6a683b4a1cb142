"""Write down what must not change: `PYTHONPATH=src:tests python -m kept.record`.

Run it with a version whose names, options and fields are the ones to keep. The tests beside this
file compare every later version with what was written. A name that is added needs no new record;
one that is changed on purpose does, and the difference then shows in the commit.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from kept.json_fields import json_fields
from kept.program_options import experiment_options, program_options
from kept.public_names import public_names

HERE = Path(__file__).parent.absolute()
WIDTH = 120


def write(name: str, content: object) -> None:
    (HERE / name).write_text(f"{laid_out(content)}\n", "utf-8")


def laid_out(content: object, indent: int = 0) -> str:
    """JSON in which whatever fits into a line has one."""
    line = json.dumps(content, ensure_ascii=False)
    if indent + len(line) <= WIDTH:
        return line
    start = "\n" + " " * (indent + 1)
    if isinstance(content, list):
        lines = [""]
        for one in content:
            part = json.dumps(one, ensure_ascii=False)
            if len(lines[-1]) + len(part) > WIDTH - indent:
                lines.append("")
            lines[-1] += f" {part}," if lines[-1] else f"{part},"
        return "[" + start + start.join(lines).rstrip(",") + start[:-1] + "]"
    if isinstance(content, dict):
        parts = [f"{json.dumps(k)}: {laid_out(v, indent + 1)}" for k, v in content.items()]
        return "{" + start + f",{start}".join(parts) + start[:-1] + "}"
    return line


if __name__ == "__main__":
    write("names.json", public_names())
    write("options.json", program_options())
    write("experiments.json", experiment_options())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write("fields.json", json_fields())
