"""Kernels, methods of backprop and compiled graphs agree with `hdnn.schemes.run`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdnn import activations, engine, functional, schemes
from hdnn.errors import HDNNError, OptionError, ReversalWarning
from hdnn.schemes import Force

F64 = torch.float64
SPLIT = [
    schemes.SEMI_IMPLICIT_EULER,
    schemes.VERLET,
    schemes.YOSHIDA4,
    schemes.MS1,
    schemes.MS3,
]
ALL = [*SPLIT, schemes.FORWARD_EULER]
SOURCE = Path(__file__).parents[2] / "src"


def random_stack(
    scheme, n=6, r=4, batch=10, N=20, *, V="same", dtype=F64, seed=0
):
    """States, forces, steps, and all of them that need gradients."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return 0.3 * torch.randn(*shape, generator=random, dtype=F64).to(dtype)

    m = n // 2 if scheme.halves else n
    forces = []
    for rows in (r, r + 1) if scheme.halves else (r,):
        sizes = (N, rows) if V == "gains" else (N, rows, m)
        output = None if V == "same" else draw(*sizes)
        forces.append(Force(draw(N, rows, m), draw(N, rows), output))
    h = 0.1 + draw(N).abs()
    y = 3 * draw(batch, n)
    leaves = [y, h, *[t for force in forces for t in force if t is not None]]
    for leaf in leaves:
        leaf.requires_grad_()
    if V == "fixed":
        for force in forces:
            force.V.requires_grad_(False)
    return y, forces, h, [leaf for leaf in leaves if leaf.requires_grad]


def values_and_gradients(
    run, scheme, y, forces, h, leaves, activation="tanh", **options
):
    out = run(scheme, y, forces, h, activations.get(activation), **options)
    g = torch.linspace(-1, 1, out.numel(), dtype=F64).view_as(out).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, g)


def assert_same(ours, wanted, tolerance):
    for a, b in zip(ours, wanted, strict=True):
        assert float((a.double() - b).abs().max()) <= tolerance * (
            1 + float(b.abs().max())
        )


@pytest.mark.parametrize("V", ["same", "gains", "learned", "fixed"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
def test_every_engine_and_backprop_agrees_with_the_definition(
    scheme, inverse, V
):
    if inverse and not scheme.invertible:
        pytest.skip("has no inverse")
    stack = random_stack(scheme, V=V)
    wanted = values_and_gradients(schemes.run, scheme, *stack, inverse=inverse)
    for name in ("auto", "reference", "fused"):
        for backprop in ("auto", "stored", "checkpoint", "reversible"):
            if backprop == "reversible" and not scheme.invertible:
                continue
            how = {"inverse": inverse, "engine": name, "backprop": backprop}
            ours = values_and_gradients(engine.run, scheme, *stack, **how)
            assert_same(ours, wanted, 1e-12)


@given(
    scheme=st.sampled_from(SPLIT),
    sizes=st.tuples(*map(st.integers, (1, 1, 1, 1), (9, 9, 300, 30))),
    dtype=st.sampled_from([torch.float32, F64]),
    inverse=st.booleans(),
    backprop=st.sampled_from(["auto", "checkpoint", "reversible"]),
)
def test_kernels_with_gains_agree_with_the_definition(
    scheme, sizes, dtype, inverse, backprop
):
    m, r, batch, N = sizes
    stack = random_stack(scheme, 2 * m, r, batch, N, V="gains")
    wanted = values_and_gradients(schemes.run, scheme, *stack, inverse=inverse)
    stack = random_stack(scheme, 2 * m, r, batch, N, V="gains", dtype=dtype)
    how = {"inverse": inverse, "backprop": backprop, "engine": "fused"}
    ours = values_and_gradients(engine.run, scheme, *stack, **how)
    assert_same(ours, wanted, 1e-12 if dtype == F64 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("activation", activations.names())
def test_the_kernel_knows_every_activation(activation, dtype):
    scheme = schemes.SEMI_IMPLICIT_EULER
    wanted = values_and_gradients(
        schemes.run, scheme, *random_stack(scheme), activation
    )
    stack = random_stack(scheme, dtype=dtype)
    ours = values_and_gradients(
        engine.run, scheme, *stack, activation, engine="fused"
    )
    assert_same(ours, wanted, 1e-12 if dtype == F64 else 1e-5)


@pytest.mark.parametrize(
    ("batch", "n", "r"),
    [(1, 2, 1), (17, 8, 9), (125, 16, 8), (256, 4, 2), (700, 6, 5)],
)
def test_tiles_of_any_size_agree_with_the_definition(batch, n, r):
    scheme = schemes.VERLET
    stack = random_stack(scheme, n, r, batch, 3)
    wanted = values_and_gradients(schemes.run, scheme, *stack)
    assert_same(
        values_and_gradients(engine.run, scheme, *stack, engine="fused"),
        wanted,
        1e-12,
    )


def test_large_stacks_on_threads_agree_with_the_definition():
    scheme = schemes.SEMI_IMPLICIT_EULER
    stack = random_stack(scheme, 32, 16, 1000, 32)
    wanted = values_and_gradients(schemes.run, scheme, *stack)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            ours = values_and_gradients(
                engine.run, scheme, *stack, engine="fused"
            )
            assert_same(ours, wanted, 1e-12)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("activation", activations.names())
def test_nan_is_not_hidden(activation):
    scheme = schemes.SEMI_IMPLICIT_EULER
    y, forces, h, _ = random_stack(scheme, dtype=torch.float32)
    y = y.detach().clone()
    y[3, 2] = torch.nan
    out = engine.run(
        scheme, y, forces, h, activations.get(activation), engine="fused"
    )
    assert out[3].isnan().any()
    assert not out[:3].isnan().any()


def test_half_precision_and_autocast_keep_the_dtype_of_the_state():
    scheme = schemes.SEMI_IMPLICIT_EULER
    tanh = activations.get("tanh")
    y, forces, _, _ = random_stack(scheme)
    wanted = schemes.run(scheme, y, forces, 0.1, tanh)
    half = [Force(force.K.bfloat16(), force.b.bfloat16()) for force in forces]
    ours = engine.run(scheme, y.bfloat16(), half, 0.1, tanh)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), wanted, rtol=0.1, atol=0.1)
    single = [Force(force.K.float(), force.b.float()) for force in forces]
    with torch.autocast("cpu", torch.bfloat16):
        ours = engine.run(scheme, y.float(), single, 0.1, tanh)
    torch.testing.assert_close(ours, wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (0, 6), (2, 3, 6)])
def test_states_have_any_batch_shape(shape):
    scheme = schemes.SEMI_IMPLICIT_EULER
    _, forces, h, _ = random_stack(scheme)
    y = torch.ones(shape, dtype=F64)
    for name in ("auto", "fused"):
        out = engine.run(
            scheme, y, forces, h, activations.get("tanh"), engine=name
        )
        assert out.shape == shape


# Transforms of PyTorch


@pytest.mark.parametrize(
    "scheme", [schemes.SEMI_IMPLICIT_EULER, schemes.FORWARD_EULER]
)
def test_transforms_and_second_derivatives_are_those_of_the_definition(scheme):
    y, forces, h, leaves = random_stack(scheme, 4, 3, 3, 4)
    tanh = activations.get("tanh")
    state = y.detach()

    def run(y: Tensor) -> Tensor:
        return engine.run(scheme, y, forces, h, tanh)

    def definition(y: Tensor) -> Tensor:
        return schemes.run(scheme, y, forces, h, tanh)

    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(
            transform(run)(state), transform(definition)(state)
        )
    torch.testing.assert_close(torch.func.vmap(run)(state), definition(state))
    shifted = torch.func.vmap(lambda x: x + run(state).sum())(
        torch.ones(3, dtype=F64)
    )
    torch.testing.assert_close(shifted, definition(state).sum().expand(3) + 1)
    assert torch.autograd.gradcheck(
        run, y, check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(run, y)
    assert len(leaves) > 2


def test_weights_that_change_between_the_passes_are_refused():
    scheme = schemes.SEMI_IMPLICIT_EULER
    y, forces, h, leaves = random_stack(scheme)
    out = engine.run(scheme, y, forces, h, activations.get("tanh"))
    with torch.no_grad():
        forces[0].K.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves)


# Compiled graphs


@pytest.mark.parametrize("backprop", [None, "checkpoint", "reversible"])
@pytest.mark.parametrize("V", ["same", "gains", "learned", "fixed"])
def test_a_compiled_stack_is_one_operator_with_the_same_gradients(V, backprop):
    torch._dynamo.reset()
    scheme = schemes.SEMI_IMPLICIT_EULER
    tanh = activations.get("tanh")
    graphs = []

    def backend(graph, inputs):
        graphs.append(
            [
                node.target
                for node in graph.graph.nodes
                if node.op == "call_function"
            ]
        )
        return graph.forward

    def run(y, forces, h):
        return engine.run(scheme, y, forces, h, tanh, backprop=backprop)

    y, forces, h, leaves = random_stack(scheme, V=V)
    wanted = values_and_gradients(schemes.run, scheme, y, forces, h, leaves)
    torch.compile(run, fullgraph=True, backend=backend)(y, forces, h)
    assert sum("hdnn" in str(target) for target in graphs[0]) == 1
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ours = values_and_gradients(
        lambda _, y, forces, h, sigma: compiled(y, forces, h),
        scheme,
        y,
        forces,
        h,
        leaves,
    )
    assert_same(ours, wanted, 1e-12)
    more = random_stack(scheme, batch=300)[0]
    torch.testing.assert_close(
        compiled(more, forces, h), schemes.run(scheme, more, forces, h, tanh)
    )


# Reversal


def deep_forces(N: int, scale: float) -> tuple[Force, Force]:
    random = torch.Generator().manual_seed(0)
    K = scale * torch.randn(2, N, 4, 4, generator=random)
    return Force(K[0].requires_grad_(), torch.zeros(N, 4)), Force(
        K[1], torch.zeros(N, 4)
    )


def reversal(y: Tensor, forces: tuple[Force, Force]) -> Tensor:
    sigma = activations.get("tanh")
    scheme = schemes.SEMI_IMPLICIT_EULER
    out = engine.run(scheme, y, forces, 0.5, sigma, backprop="reversible")
    return torch.autograd.grad(out.sum(), forces[0].K)[0]


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_one_huge_sample_does_not_hide_the_drift_of_others(name):
    y = torch.randn(500, 8, generator=torch.Generator().manual_seed(1))
    forces = deep_forces(300, 1.0)
    with engine.use(engine=name):
        with pytest.raises(HDNNError, match="worthless"):
            reversal(y, forces)
        y[0] *= 1e8
        with pytest.raises(HDNNError, match="worthless"):
            reversal(y, forces)


def test_a_small_drift_is_a_warning_and_none_is_silent():
    y = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    reversal(y, deep_forces(64, 0.2))
    with pytest.warns(ReversalWarning, match="inexact"):
        reversal(y, deep_forces(60, 0.8))


def test_samples_of_zeros_do_not_drift():
    y = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    y[3] = 0
    assert reversal(y, deep_forces(16, 0.2)).isfinite().all()


def test_gradients_of_a_state_that_is_not_finite_are_nan():
    y = torch.zeros(5, 8)
    y[0, 0] = torch.inf
    assert reversal(y, deep_forces(16, 0.2)).isnan().all()


def run_in_process(code: str, **environment: str) -> str:
    variables = (
        os.environ
        | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
        | environment
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PEAK = """
import resource, torch
from hdnn import activations, engine, functional, schemes
K = 0.1 * torch.randn({N}, 8, 8)
force = schemes.Force(K.requires_grad_(), torch.zeros({N}, 8))
y = torch.randn(4000, 16)
scheme, tanh = schemes.SEMI_IMPLICIT_EULER, activations.get("tanh")
for _ in range(2):
    out = engine.run(scheme, y, (force, force), 0.01, tanh, engine="fused", backprop="reversible")
    torch.autograd.grad(out.sum(), K)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_the_memory_of_a_reversible_stack_does_not_grow_with_depth():
    shallow, deep = (int(run_in_process(PEAK.format(N=N))) for N in (16, 1024))
    assert deep - shallow < 20 * 1024


# Options


def test_what_cannot_run_says_so():
    tanh = activations.get("tanh")
    y, forces, h, _ = random_stack(schemes.FORWARD_EULER)
    with pytest.raises(OptionError, match="needs layers with an inverse"):
        engine.run(
            schemes.FORWARD_EULER, y, forces, h, tanh, backprop="reversible"
        )
    with pytest.raises(OptionError, match="no kernel for perceptron"):
        engine.run(schemes.PERCEPTRON, y, forces, h, tanh, engine="fused")
    with pytest.raises(OptionError, match="engine"):
        engine.run(schemes.FORWARD_EULER, y, forces, h, tanh, engine="fastest")


def test_an_activation_that_only_shares_a_name_is_not_mistaken_for_it():
    scheme = schemes.SEMI_IMPLICIT_EULER
    y, forces, h, _ = random_stack(scheme)
    other = replace(activations.get("tanh"), sigma=torch.sin)
    wanted = schemes.run(scheme, y, forces, h, other)
    torch.testing.assert_close(engine.run(scheme, y, forces, h, other), wanted)


def test_settings_hold_for_one_thread_and_block():
    seen = []
    with engine.use(engine="reference", backprop="checkpoint"):
        with engine.use(backprop="stored") as settings:
            assert (settings.engine, settings.backprop) == (
                "reference",
                "stored",
            )
        thread = threading.Thread(
            target=lambda: seen.append(engine.current().engine)
        )
        thread.start()
        thread.join()
        assert engine.current().backprop == "checkpoint"
    assert seen == ["auto"]
    assert engine.current() == engine.Settings()


ONE_CALL = """
import torch
from hdnn import activations, engine, functional, schemes
force = schemes.Force(torch.ones(3, 2, 2), torch.zeros(3, 2))
y = torch.ones(4, 4, requires_grad=True)
scheme, tanh = schemes.SEMI_IMPLICIT_EULER, activations.get("tanh")
out = engine.run(scheme, y, (force, force), 0.1, tanh, engine="fused")
print(float(torch.autograd.grad(out.sum(), y)[0].sum()))
"""


def test_damaged_files_of_compiled_kernels_are_written_anew(tmp_path):
    wanted = run_in_process(ONE_CALL, NUMBA_CACHE_DIR=str(tmp_path))
    files = [path for path in tmp_path.rglob("*.nb*") if path.is_file()]
    assert len(files) >= 4
    for path in files:
        path.write_bytes(
            path.read_bytes()[:40] if path.suffix == ".nbc" else b""
        )
    assert run_in_process(ONE_CALL, NUMBA_CACHE_DIR=str(tmp_path)) == wanted
    assert all(path.stat().st_size > 40 for path in files)


@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "softplus", "sigmoid", "tanh"]
)
def test_gradients_of_huge_states_are_those_of_the_definition(activation):
    source = torch.Generator().manual_seed(0)
    y = 1e12 * torch.randn(20, 4, generator=source)
    K = torch.randn(2, 4, 4, generator=source)
    b = torch.zeros(2, 4)
    gradients = []
    for name in ("reference", "fused"):
        x = y.clone().requires_grad_()
        functional.h1(
            x, K, b, 0.1, activation=activation, engine=name
        ).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
