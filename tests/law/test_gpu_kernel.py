"""The GPU kernel agrees with the definition: in Triton's interpreter on any machine, and on a GPU.

Triton reads TRITON_INTERPRET when it is imported, so that the interpreter gets a process of its
own: this file, run as a program, prints the errors of all cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from hdnn import functional
from law import gpu_kernel

ROOT = Path(__file__).parents[2]
TOLERANCE = {"ieee": 1e-5, "tf32": 3e-3}
CASES = [  # a stack, and its batch, m (or n), rows and layers
    ("h2", (40, 5, 5, 2), {}),
    ("h2", (1, 1, 1, 1), {}),
    ("h2", (20, 16, 16, 3), {"activation": "relu"}),
    ("h2", (20, 8, 20, 2), {"activation": "gelu"}),
    ("h2", (20, 16, 16, 2), {"precision": "tf32"}),
    ("verlet", (20, 4, 4, 2), {}),
    ("h1", (40, 10, 10, 2), {}),
    ("h1", (5, 2, 7, 1), {"activation": "softplus"}),
    ("h1", (20, 16, 16, 2), {"precision": "tf32"}),
]


def errors(name: str, sizes: tuple[int, ...], options: dict[str, str], device: str) -> list[float]:
    """Of y_N and of all gradients, relative to those of the definition in float64."""
    B, m, r, N = sizes
    random = torch.Generator().manual_seed(B + m + N)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    n = m if name == "h1" else 2 * m
    weights = [draw(N, r, m) / m**0.5, 0.1 * draw(N, r)]
    if name != "h1":
        weights = [weights[0], draw(N, r, m) / m**0.5, weights[1], 0.1 * draw(N, r)]
    y, g = draw(B, n), draw(B, n)

    leaves = [t.double().requires_grad_() for t in (y, *weights)]
    how = {"activation": options.get("activation", "tanh"), "engine": "reference"}
    out = getattr(functional, name)(*leaves, 0.1, backprop="stored", **how)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, g.double())]

    on_device = [t.to(device) for t in (y, *weights)]
    if name == "h1":
        found = gpu_kernel.euler(*on_device, 0.1, g.to(device), **options)
    else:
        found = gpu_kernel.split(name, *on_device, 0.1, g.to(device), **options)
    return [
        float((one.double().cpu() - other).norm() / other.norm())
        for way in found.values()
        for one, other in zip(way, wanted, strict=True)
    ]


def failures(device: str) -> list:
    found = []
    for name, sizes, options in CASES:
        largest = max(errors(name, sizes, options, device))
        if not largest < TOLERANCE[options.get("precision", "ieee")]:
            found.append([name, sizes, options, largest])
    return found


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_interpreted_kernel_agrees_with_the_definition():
    here = {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=os.environ | here, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_compiled_kernel_agrees_with_the_definition():
    assert failures("cuda") == []


if __name__ == "__main__":
    sys.stdout.write(json.dumps(failures("cpu")))
