"""`hdnn info`: what this machine and this installation have to offer."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Annotated

from hdnn import __version__
from hdnn.app import terminal
from hdnn.app.configs.common import IMAGE_SETS
from hdnn.app.options import json_flag

EXAMPLES = (
    "hdnn info",
    "hdnn info --json | jq .engines",
)
CORE = ("torch", "numpy", "safetensors")
EXTRAS = {
    "fast": ["numba"],
    "gpu": ["triton"],
    "sklearn": ["sklearn", "pandas"],
    "plot": ["matplotlib"],
    "cli": ["typer", "rich", "pyarrow"],
    "science": ["scipy"],
    "graph": ["networkx", "pymetis"],
    "mpi": ["mpi4py"],
    "images": ["PIL"],
    "export": ["onnx", "onnxscript", "onnxruntime"],
    "tensorboard": ["tensorboard"],
}


def info(
    as_json: Annotated[bool, json_flag()] = False,
) -> None:
    """Show versions, devices, engines, extras and data: what is here and what is missing."""
    result = _about()
    if as_json:
        print(terminal.json_text(result))
        return
    for topic, entries in result.items():
        width = max(len(name) for name in entries)
        lines = (f"  {name:<{width}}  {value}" for name, value in entries.items())
        terminal.print_text("\n".join([topic, *lines]))


def _about() -> dict[str, dict[str, str]]:
    """What this machine and this installation have to offer."""
    import torch

    from hdnn.app.tasks import images
    from hdnn.data import planar

    missing = {
        extra: [module for module in modules if not _installed(module)]
        for extra, modules in EXTRAS.items()
    }
    versions = {name: importlib.metadata.version(name) for name in CORE}
    devices = {"cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of PyTorch"}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    if len(devices) == 1:
        devices["cuda"] = "none that PyTorch can use"
    engines = {"reference": "ready (plain PyTorch)"}
    engines["fused, cpu"] = _ready("fast", missing)
    engines["fused, gpu"] = (
        _ready("gpu", missing) if torch.cuda.is_available() else "needs a CUDA device"
    )
    data = dict.fromkeys(planar.SETS, "ready (made on the fly)")
    data |= {name: images.where(name) for name in IMAGE_SETS}
    return {
        "versions": {"hdnn": __version__, "python": platform.python_version(), **versions},
        "devices": devices,
        "engines": engines,
        "extras": {extra: _ready(extra, missing) for extra in EXTRAS},
        "data": data,
    }


def _ready(extra: str, missing: dict[str, list[str]]) -> str:
    if not missing[extra]:
        return "ready"
    return f"{', '.join(missing[extra])} missing: pip install 'hdnn[{extra}]'"


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
