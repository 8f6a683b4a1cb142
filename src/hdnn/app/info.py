"""`hdnn info`: versions, devices, extras and data on this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

from hdnn import __version__
from hdnn.app.config import IMAGE_SETS, PLANAR_SETS
from hdnn.errors import DataError

CORE = ("torch", "numpy", "safetensors")
EXTRAS = {
    "fast": ["numba"],
    "gpu": ["triton"],
    "sklearn": ["sklearn", "pandas"],
    "plot": ["matplotlib"],
    "cli": ["typer", "jinja2", "pandas", "pyarrow", "sklearn"],
    "science": ["scipy"],
    "graph": ["pymetis"],
    "images": ["PIL"],
    "hub": ["huggingface_hub"],
    "export": ["onnx", "onnxscript", "onnxruntime"],
    "tensorboard": ["tensorboard"],
}


def about() -> dict[str, dict[str, str]]:
    """All facts, by topic and name."""
    import torch

    versions = {"hdnn": __version__, "python": platform.python_version()}
    for name in CORE:
        versions[name] = importlib.metadata.version(name)
    devices = {
        "cpu": f"{os.cpu_count()} cores, {torch.get_num_threads()} PyTorch threads"
    }
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = torch.cuda.get_device_name(index)
    if len(devices) == 1:
        devices["cuda"] = "none that PyTorch can use"
    data: dict[str, str] = dict.fromkeys(PLANAR_SETS, "ready (computed)")
    for name in IMAGE_SETS:
        data[name] = _image_set(name)
    extras = {extra: _extra(extra) for extra in EXTRAS}
    return {
        "versions": versions,
        "devices": devices,
        "extras": extras,
        "data": data,
    }


def text(result: dict[str, dict[str, str]]) -> str:
    """The facts as text."""
    lines = []
    for topic, entries in result.items():
        lines.append(topic)
        lines += [f"  {name:<16} {value}" for name, value in entries.items()]
    return "\n".join(lines)


def _extra(extra: str) -> str:
    missing = [
        name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None
    ]
    if not missing:
        return "ready"
    return f"{', '.join(missing)} missing: pip install 'hdnn[{extra}]'"


def _image_set(name: str) -> str:
    from hdnn.app.train import load_images

    try:
        return f"ready ({load_images(name)})"
    except DataError as error:
        return str(error)
