"""The kernels of the GPU agree with the definition, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so the interpreter gets a process of its own:
this file, run as a program, prints the errors of all cases.
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

ROOT = Path(__file__).parents[2]
TOLERANCE = {"ieee": 1e-5, "tf32": 1e-5, "tf32x3": 1e-5, "bf16": 5e-2}
CASES = [  # kernel, scheme, (n, r, batch, layers), options
    ("gpu", "SEMI_IMPLICIT_EULER", (6, 4, 100, 3), {}),
    ("gpu", "VERLET", (6, 4, 70, 2), {"V": "learned", "inverse": True}),
    ("gpu", "VERLET", (6, 4, 70, 2), {"V": "fixed"}),
    ("gpu", "VERLET", (6, 4, 70, 2), {"V": "gains"}),
    ("gpu", "SEMI_IMPLICIT_EULER", (130, 70, 40, 2), {"V": "gains"}),
    ("gpu", "YOSHIDA4", (40, 31, 40, 2), {"V": "gains", "precision": "bf16"}),
    ("gpu", "YOSHIDA4", (34, 20, 20, 2), {"activation": "gelu"}),
    ("gpu", "MS1", (8, 4, 9, 1), {"V": "fixed", "activation": "sin"}),
    (
        "gpu",
        "FORWARD_EULER",
        (10, 70, 40, 3),
        {"V": "learned", "activation": "sigmoid"},
    ),
    ("gpu", "SEMI_IMPLICIT_EULER", (130, 70, 40, 2), {"deterministic": True}),
    ("gpu", "SEMI_IMPLICIT_EULER", (64, 31, 140, 2), {"precision": "tf32"}),
    ("gpu", "SEMI_IMPLICIT_EULER", (64, 31, 140, 2), {"precision": "bf16"}),
    (
        "gpu",
        "FORWARD_EULER",
        (10, 7, 40, 3),
        {"precision": "tf32x3", "activation": "silu"},
    ),
    ("wide", "SEMI_IMPLICIT_EULER", (40, 70, 100, 3), {}),
    ("wide", "VERLET", (6, 4, 70, 2), {"V": "learned", "inverse": True}),
    ("wide", "YOSHIDA4", (34, 20, 20, 2), {"activation": "gelu"}),
    (
        "wide",
        "FORWARD_EULER",
        (10, 70, 40, 3),
        {"V": "fixed", "activation": "relu"},
    ),
    ("wide", "SEMI_IMPLICIT_EULER", (64, 31, 140, 2), {"precision": "bf16"}),
    ("wide", "VERLET", (6, 4, 70, 2), {"V": "gains", "inverse": True}),
    ("wide", "VERLET", (64, 31, 140, 2), {"precision": "tf32", "V": "learned"}),
]


def largest_error(
    kernel: str, name: str, sizes: tuple[int, ...], options: dict
) -> float:
    """Of y_N and of all gradients, relative to those of the definition."""
    from engine.test_run import random_stack, values_and_gradients
    from hdnn import activations, schemes
    from hdnn.engine import gpu, wide
    from hdnn.engine.memory import Stack

    options = dict(options)
    V = options.pop("V", "same")
    activation = options.pop("activation", "tanh")
    inverse = options.pop("inverse", False)
    scheme = getattr(schemes, name)
    n, r, batch, N = sizes
    y, forces, h, leaves = random_stack(
        scheme, n, r, batch, N, V=V, dtype=torch.float32
    )
    stack = (y, forces, h, leaves)
    wanted = values_and_gradients(
        schemes.run, scheme, *stack, activation, inverse=inverse
    )
    rows = tuple(force.K.shape[1] for force in forces)
    sizes = (
        inverse,
        N,
        batch,
        n,
        rows,
        (V,) * len(forces),
        y.dtype,
        y.device,
        True,
    )
    module = {"gpu": gpu, "wide": wide}[kernel]
    runner = module.Kernel(
        Stack(scheme, activations.get(activation), *sizes), **options
    )
    tensors = [h, *[t for force in forces for t in force]]
    with torch.no_grad():
        out, saved = runner.forward(y, tensors, True)
        assert torch.equal(out, runner.forward(y, tensors, False)[0])
        precision = options.get("precision", "ieee")
        assert saved.numel() == module.saved_size(runner.stack, precision)
        g = (
            torch.linspace(-1, 1, out.numel(), dtype=torch.float64)
            .view_as(out)
            .float()
        )
        ours = [
            out,
            *[
                t
                for t in runner.backward(y, saved, g, tensors)
                if t is not None
            ],
        ]
    norms = [
        float((a - b).norm() / b.norm())
        for a, b in zip(ours, wanted, strict=True)
    ]
    return max(norms)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_interpreted_kernels_agree_with_the_definition():
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *sys.path]
    here = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | here,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for case, error in zip(CASES, json.loads(done.stdout), strict=True):
        precision = case[3].get("precision", "ieee")
        if case[0] == "wide" and precision == "tf32":
            precision = "bf16"  # the factors of gradients of weights
        assert error < TOLERANCE[precision], case


def compiled(kernel, constants: dict, pairs: int) -> str:
    """The machine code of a kernel for an H200, which a machine without a GPU can make too."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    force = ("*fp32", "*fp32", "*fp32", "i32")
    grads = ("*fp32", "*fp32", "*fp32")
    kinds = {"forces": (force,) * pairs, "grads": (grads,) * pairs}
    kinds["fractions"] = ("fp32",) * constants["E"]
    kinds |= dict.fromkeys(("B", "N", "m", "tiles", "size"), "i32")
    kinds |= dict.fromkeys(constants, "constexpr")
    names = kernel.arg_names
    signature = {name: kinds.get(name, "*fp32") for name in names}
    known = {
        (names.index(name),): value
        for name, value in constants.items()
        if name in names
    }
    source = ASTSource(kernel, signature, known)
    target = GPUTarget("cuda", 90, 32)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return compile(source, target, options).asm["ptx"]


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    "name", ["SEMI_IMPLICIT_EULER", "FORWARD_EULER", "VERLET"]
)
@pytest.mark.parametrize("V", ["learned", "gains"])
def test_the_kernels_compile_for_a_gpu_that_is_not_here(name, V):
    from hdnn import activations, schemes
    from hdnn.engine import gpu
    from hdnn.engine.memory import Stack

    scheme = getattr(schemes, name)
    pairs = 1 + scheme.halves
    outputs = (V,) * pairs
    sizes = (False, 4, 100, 32, (20,) * pairs, outputs)
    device = torch.device("cpu")
    sigma = activations.get("tanh")
    stack = Stack(scheme, sigma, *sizes, torch.float32, device)
    kernel = gpu.Kernel(stack, "tf32")
    options = kernel.constants | {"KEEP": True, "ATOMIC": True}
    options |= {"BT": 64, "BR": 32, "RB": 1}
    for function in (gpu.forward_kernel, gpu.backward_kernel):
        assert "wgmma" in compiled(function, options, pairs)


if __name__ == "__main__":
    sys.stdout.write(json.dumps([largest_error(*case) for case in CASES]))
