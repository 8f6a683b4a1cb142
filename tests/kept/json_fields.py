"""What programs read: the JSON that commands print, field by field, and their exit codes.

The commands run one after the other in an empty folder, because later ones use what earlier ones
have left there. All of them are small: a few layers, one epoch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import hdnn
from hdnn.data import ImageData
from kept.small import hdnn_command, without_pictures

QUICK = "--layers 2 --epochs 1"
GRAPH = f"{QUICK} --batch 2000"
RING = "[[0, 1], [1, 2], [2, 3], [3, 0]]"

# By name, commands that print JSON, in this order, and what they end with if not with 0.
COMMANDS = {
    "demo": "demo --layers 2 --epochs 1 --out demo",
    "train planar": f"train --data swiss_roll {QUICK} --out planar",
    "train planar again": "train --resume --out planar",
    "train planar, no guarantee": f"train --data double_moons --network mlp {QUICK} --out mlp",
    "train planar, levels": "train --data double_moons --layers 4 --multilevel 2 --epochs 1",
    "train seeds": f"train --data double_circles {QUICK} --seeds 2 --out seeds",
    "train classes": f"train --data classes.csv --target target {QUICK} --out classes",
    "train values": f"train --data values.csv --target target {QUICK} --out values",
    "train images": "train --data mnist --network h1 --layers 2 --epochs 1 --batch 20 --out images",
    "train images, no layers": "train --data mnist --layers 0 --epochs 1 --batch 20 --out linear",
    "train graph": f"train --graph ring.toml --data double_circles {GRAPH} --out ring",
    "train graph again": "train --resume --out ring",
    "launch": f"launch --nodes 4 --parts 2 --data double_circles {GRAPH} --out launched",
    "predict classes": "predict --run classes --data classes.csv",
    "predict classes, probabilities": "predict --run classes --data rows.csv --proba",
    "predict classes to a file": "predict --run classes --data classes.csv --out answers.csv",
    "predict values": "predict --run values --data values.csv",
    "predict points": "predict --run planar --data points.csv --proba",
    "predict images": "predict --run images --data mnist --proba",
    "certify run": "certify planar --samples 20",
    "certify run by name": "certify --run classes --data classes.csv --samples 20",
    "certify values": "certify values --samples 20",
    "certify images": "certify images --samples 4",
    "certify file": "certify planar/model.safetensors --data double_moons --samples 20",
    "certify graph": "certify ring/model.safetensors --data double_circles --samples 20",
    "info": "info",
    "graph check": "graph check ring.toml",
    "graph check, not local": "graph check tight.toml",
    "graph check, apart": "graph check apart.toml",
    "graph design": "graph design tight.toml",
    "graph design to a file": "graph design tight.toml --keep both --out designed.toml",
}
CODES = {"graph check, not local": 2, "graph check, apart": 2}
MACHINE = "devices.cuda"  # a field, or several, that is there on some machines

# Commands that end with an exit code and no JSON, after the ones above.
WELL = (
    "--version",
    "--help",
    "bench",
    "report planar classes values --out page.html",
    "reproduce table-planar -- --help",
    "graph design tight.toml",
    "train --data swiss_roll --layers 2 --epochs 1 --out quiet --quiet",
    "predict --run classes --data rows.csv",
)
WRONG = (
    "nothing",
    "train",
    "train --nothing",
    "train --layers two",
    "train --data nothing",
    "train --data nothing.csv --target target",
    "train --data classes.csv",
    "train --data classes.csv --target nothing",
    "train --data swiss_roll --layers 0",
    "train --data swiss_roll --network h3",
    "train --data swiss_roll --out planar",
    "train --data swiss_roll --images 10",
    "train --data swiss_roll --save-every 3",
    "train --data mnist --features 8",
    "train --resume --out nothing",
    "train --resume --out planar --layers 3",
    "train --graph nothing.toml",
    "train --graph tight.toml --data swiss_roll",
    "train --config nothing.toml",
    "train --config wrong.toml",
    "predict --run planar",
    "predict --run nothing --data classes.csv",
    "predict --run classes --data values.csv --out classes.csv",
    "predict --run values --data values.csv --proba",
    "certify",
    "certify nothing",
    "certify planar --run planar",
    "certify planar --samples 0",
    "certify ring.toml",
    "reproduce nothing",
    "bench nothing",
    "report nothing",
    "report planar --out classes.csv",
    "demo --layers 0",
    "launch --nodes 0",
    "launch --nodes 4 --parts 5",
    "launch --nodes 100",
    "launch --graph tight.toml",
    "launch --resume --out nothing",
    "graph check nothing.toml",
    "graph check classes.csv",
    "graph design ring.toml --keep nothing",
    "graph draw ring.toml --out ring.txt",
)


def json_fields() -> dict[str, dict[str, list[str]]]:
    """What each command prints: by the type, the paths of all values that have it.

    A list that holds values of several types is there under all of them.
    """
    found: dict[str, dict[str, list[str]]] = {}
    with prepared():
        for name, command in COMMANDS.items():
            ended = hdnn_command(f"{command} --json")
            assert ended.code == CODES.get(name, 0), f"{name} ended with {ended}"
            paths: dict[str, list[str]] = {}
            for path, kind in dict.fromkeys(_fields(json.loads(ended.output), "")):
                if not path.startswith(MACHINE):
                    paths.setdefault(kind, []).append(path)
            found[name] = paths
    return found


def _fields(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if path:
        yield path, _kind(value)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _fields(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            yield from _fields(inner, f"{path}[]")


def _kind(value: Any) -> str:
    kinds = {dict: "object", list: "list", str: "text", bool: "truth value", type(None): "null"}
    if type(value) in kinds:
        return kinds[type(value)]
    return "whole number" if isinstance(value, int) else "number"


@contextmanager
def prepared() -> Iterator[None]:
    """Files in the working folder, a few images as MNIST, and no pictures, which take time."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    classes = ["left" if a + b < 0 else "right" for a, b, _ in rows.tolist()]
    values = [f"{a - 2 * c:.6f}" for a, _, c in rows.tolist()]
    for name, target in (("classes", classes), ("values", values)):
        lines = [f"{a:.6f},{b:.6f},{c:.6f}" for a, b, c in rows.tolist()]
        lines = [f"{line},{t}" for line, t in zip(lines, target, strict=True)]
        Path(f"{name}.csv").write_text("\n".join(["a,b,c,target", *lines]) + "\n")
    Path("rows.csv").write_text("a,b,c\n0,1,2\n1,0,-1\n")
    Path("points.csv").write_text("x1,x2\n0,1\n1,0\n")
    both = f"{RING[:-1]}, [0, 2], [1, 3]]"
    Path("ring.toml").write_text(f"nodes = 4\nedges = {both}\nR = {RING}\n")
    Path("tight.toml").write_text(f"nodes = 4\nedges = {RING}\nR = {RING}\n")
    Path("apart.toml").write_text("nodes = 4\nedges = [[0, 1], [2, 3]]\n")
    Path("wrong.toml").write_text("[train]\nnothing = 1\n")
    with images_for_mnist(), without_pictures():
        yield


@contextmanager
def images_for_mnist() -> Iterator[None]:
    """A few images in the place of the set, which need not be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdnn.data.mnist, "load", few_images)
        yield


def few_images() -> ImageData:
    """Two classes of ten: bright above, or bright below."""
    t = torch.arange(60) % 2
    x = torch.randint(0, 100, (60, 1, 28, 28), generator=torch.Generator().manual_seed(0))
    for i, label in enumerate(t.tolist()):
        x[i, :, 14 * label : 14 * (label + 1)] += 100
    x = x.to(torch.uint8)
    names = tuple(map(str, range(10)))
    return ImageData("MNIST", x[20:], t[20:], x[:20], t[:20], names, (0.1307,), (0.3081,))


# Comparing what was with what is


def differences(name: str, before: dict[str, list[str]], now: dict[str, list[str]]) -> list[str]:
    """In a few words each, what those who read the output of a command would miss."""
    was, is_now = _kinds(before), _kinds(now)
    lost = []
    for path, kinds in was.items():
        if path not in is_now:
            lost.append(f"{name} prints no {path} any more")
        elif kinds != is_now[path]:
            words, were = (" or ".join(sorted(some)) for some in (is_now[path], kinds))
            lost.append(f"{name} prints {path} as {words}, not {were}")
    return lost


def _kinds(paths: dict[str, list[str]]) -> dict[str, set[str]]:
    """The types of each path."""
    found: dict[str, set[str]] = {}
    for kind, several in paths.items():
        for path in several:
            found.setdefault(path, set()).add(kind)
    return found
