"""The CPU kernels give the values and gradients of the definition, for any sizes."""

from __future__ import annotations

import concurrent.futures
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hdnn
from hdnn import activations, functional
from hdnn.engine import dispatch
from hdnn.engine.kernels import cpu, lent, tiles
from hdnn.engine.kernels.blas import BlasKernel
from hdnn.engine.kernels.cpu import CpuKernel
from hdnn.engine.kernels.protocol import Stack, schedule
from hdnn.integrators import splitting
from strategies import ACTIVATIONS, Random, seeds

BATCHES = st.sampled_from([0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 129, 300])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
dtypes = st.sampled_from([torch.float32, torch.float64])
paths = st.sampled_from(["tiles", "blas"])
kinds = st.sampled_from(["same", "identity", "general"])
widths = st.integers(1, 9)


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype, samples: int = 1) -> bool:
    """Equal relative to their size, or to that of what was summed over so many samples."""
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    if not wanted.numel():
        return True
    scale = wanted.abs().max().clamp_min(samples**0.5)
    return bool(((found - wanted).abs().max() <= TOLERANCE[dtype] * scale).item())


CPU = torch.device("cpu")


def shears(path: str, *description) -> CpuKernel | BlasKernel:
    return {"tiles": CpuKernel, "blas": BlasKernel}[path](Stack(*description))


class Split:
    """A random shear stack, and the reference for it by autograd in float64."""

    def __init__(self, normal: Random, m, r_p, r_q, N, B, kind, turns, inverse=False) -> None:
        if kind == "identity":
            r_p = r_q = m
        self.kind, self.turns, self.inverse, self.rows = kind, tuple(turns), inverse, (r_p, r_q)
        half, layer = schedule(self.turns, N, inverse)
        self.order = list(zip(half.tolist(), layer.tolist(), strict=True))
        weights = [normal(N, r, m) / m**0.5 for r in (r_p, r_q)]
        biases = [normal(N, r) for r in (r_p, r_q)]
        moves = [normal(N, r, m) / m**0.5 for r in (r_p, r_q)] if kind == "general" else []
        coef = 0.1 * normal(len(half))
        self.y, self.g = normal(B, 2 * m), normal(B, 2 * m)
        self.tensors = [*weights, *biases, *moves, coef]

    def run(self, y: Tensor, activation: str, tensors: list[Tensor]) -> Tensor:
        K_p, K_q, b_p, b_q, *V, coef = tensors
        sigma = activations.get(activation)
        p, q = y.chunk(2, -1)
        for (half, j), c in zip(self.order, coef, strict=True):
            K, b, source = (K_p, b_p, p) if half else (K_q, b_q, q)
            z = sigma(source @ K[j].mT + b[j])
            if self.kind != "identity":
                z = z @ (V[0 if half else 1] if V else K)[j]
            p, q = (p, q + c * z) if half else (p + c * z, q)
        return torch.cat([p, q], -1)

    def arguments(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        *weights, coef = [t.to(dtype) for t in self.tensors]
        V = weights[4:] or [None, None]
        return *weights[:4], *V, coef

    def kernel(self, path: str, dtype: torch.dtype, activation: str) -> CpuKernel | BlasKernel:
        N, sizes = len(self.tensors[0]), (len(self.y), self.y.shape[1], self.rows)
        how = (activation, self.kind, N, self.turns, self.inverse)
        return shears(path, *how, *sizes, dtype, CPU)

    def check(self, path: str, dtype: torch.dtype, activation: str) -> None:
        # The reference starts from the same rounded numbers.
        leaves = [t.to(dtype).double().clone().requires_grad_() for t in (self.y, *self.tensors)]
        y_N = self.run(leaves[0], activation, leaves[1:])
        wanted = torch.autograd.grad(
            y_N, leaves, self.g.to(dtype).double(), allow_unused=True, materialize_grads=True
        )
        tensors, kernel = self.arguments(dtype), self.kernel(path, dtype, activation)
        found, kept = kernel.forward(self.y.to(dtype), tensors, True)
        assert close(found, y_N.detach(), dtype)
        y_0, undone = kernel.undo(y_N.detach().to(dtype), self.g.to(dtype), tensors)
        assert close(y_0, leaves[0].detach(), dtype)
        stored = kernel.backward(kept, self.g.to(dtype), tensors)
        for grads in (undone, stored):
            present = [g for g in grads if g is not None]
            assert len(present) == (8 if self.kind == "general" else 6)
            for mine, theirs in zip(present, wanted, strict=True):
                assert close(mine, theirs, dtype, len(self.y))


@st.composite
def schedules(draw) -> tuple[int, list[int], bool]:
    """Layers, which half moves in each of their shears, and whether the last runs first."""
    turns = draw(st.lists(st.integers(0, 1), min_size=1, max_size=7))
    return draw(st.integers(0, 5)), turns, draw(st.booleans())


def of_scheme(shears: tuple[splitting.Shear, ...]) -> list[int]:
    """Which half moves in each shear of a layer of a scheme."""
    return [int(which == "q") for which, _ in shears]


@pytest.fixture(params=["tiles", "blas"])
def path(request) -> str:
    return request.param


@given(
    seeds, widths, widths, widths, BATCHES, schedules(), dtypes, kinds, paths,
    st.sampled_from(ACTIVATIONS),
)  # fmt: skip
@settings(max_examples=50)
def test_any_schedule_of_shears_has_the_values_and_gradients_of_the_definition(
    seed, m, r_p, r_q, B, schedule, dtype, kind, path, activation
):
    N, turns, inverse = schedule
    stack = Split(Random(seed), m, r_p, r_q, N, B, kind, turns, inverse)
    stack.check(path, dtype, activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shears", [splitting.SEMI_IMPLICIT_EULER, splitting.YOSHIDA4])
def test_every_activation_is_exact_over_several_layers(shears, activation, dtype, path):
    stack = Split(Random(7), 3, 4, 5, 3, 70, "same", of_scheme(shears))
    stack.check(path, dtype, activation)


@pytest.mark.parametrize("name", ["h2", "verlet", "yoshida4", "ms3"])
def test_schemes_are_schedules_of_shears(name, path):
    scheme = {found: key for key, (found, _) in splitting.NAMES.items()}[name]
    normal, m, N, h = Random(3), 3, 4, 0.3
    K_p, K_q, b_p, b_q = normal(N, 4, m), normal(N, 2, m), normal(N, 4), normal(N, 2)
    y = normal(130, 2 * m)
    signed = [-h * part if which == "p" else h * part for which, part in scheme]
    coef, turns = torch.tensor(signed * N, dtype=torch.float64), tuple(of_scheme(scheme))
    kernel = shears(path, "tanh", "same", N, turns, False, 130, 6, (4, 2), torch.float64, CPU)
    found, _ = kernel.forward(y, (K_p, K_q, b_p, b_q, None, None, coef), False)
    wanted = functional.split(y, K_p, K_q, b_p, b_q, h, shears=scheme)
    assert close(found, wanted, torch.float64)


def euler(path: str, kind: str, y: Tensor, K: Tensor, activation: str) -> CpuKernel | BlasKernel:
    N, r, n = K.shape
    made = {"tiles": CpuKernel, "blas": BlasKernel}[path]
    return made(Stack(activation, kind, N, (), False, len(y), n, (r,), y.dtype, CPU))


def euler_reference(y: Tensor, K, b, h, V, activation: str) -> Tensor:
    sigma, states = activations.get(activation), [y]
    for j in range(len(K)):
        z = sigma(states[-1] @ K[j].mT + b[j])
        states.append(states[-1] + h[j] * (z if V is None else z @ V[j]))
    return torch.stack(states)


@given(
    seeds, st.integers(1, 18), widths, BATCHES, st.integers(0, 5), dtypes,
    st.sampled_from(["same", "identity", "general", "canonical"]), paths,
    st.sampled_from(ACTIVATIONS),
)  # fmt: skip
@settings(max_examples=50)
def test_any_euler_stack_has_the_values_and_gradients_of_the_definition(
    seed, n, r, B, N, dtype, kind, path, activation
):
    normal = Random(seed)
    n = n + n % 2 if kind == "canonical" else n
    r = n if kind == "identity" else r
    y, K, b, h = normal(B, n), normal(N, r, n) / n**0.5, normal(N, r), 0.1 * normal(N)
    V = [normal(N, r, n) / n**0.5] if kind == "general" else []
    g = normal(B, n).to(dtype)
    leaves = [t.to(dtype).double().clone().requires_grad_() for t in (y, K, b, h, *V)]
    same = leaves[1] if kind == "same" else None
    if kind == "canonical":
        K_p, K_q = leaves[1].chunk(2, -1)
        same = torch.cat([-K_q, K_p], -1)
    states = euler_reference(*leaves[:4], leaves[4] if V else same, activation)
    wanted = torch.autograd.grad(
        states[-1], leaves, g.double(), allow_unused=True, materialize_grads=True
    )
    y, K, b, h, *V = (t.detach().to(dtype) for t in leaves)
    V = V[0] if V else None
    kernel, tensors = euler(path, kind, y, K, activation), (K, b, V, h)
    found, kept = kernel.forward(y, tensors, True)
    last, nothing = kernel.forward(y, tensors, False)
    g_0, dK, db, dV, dh = kernel.backward(kept, g, tensors)
    assert nothing is None
    assert close(found, states[-1].detach(), dtype)
    assert close(last, found, dtype)
    assert (dV is None) == (kind != "general")
    for mine, theirs in zip((g_0, dK, db, dh, dV), (*wanted, None)[:5], strict=True):
        if mine is not None and theirs is not None:
            assert close(mine, theirs, dtype, B)


@pytest.mark.parametrize("name", ["h1", "ms2"])
def test_h1_and_ms2_are_euler_stacks(name, path):
    normal, n, N, h = Random(5), 6, 5, 0.2
    y, K, b = normal(70, n), normal(N, n, n), normal(N, n)
    steps = torch.full((N,), h, dtype=torch.float64)

    def last(kind: str, V: Tensor | None) -> Tensor:
        return euler(path, kind, y, K, "tanh").forward(y, (K, b, V, steps), True)[0]

    if name == "h1":
        wanted = functional.h1(y, K, b, h, engine="reference")
        assert close(last("canonical", None), wanted, torch.float64)
        V = torch.cat([-K[..., n // 2 :], K[..., : n // 2]], -1)  # K J^T
        assert close(last("general", V), wanted, torch.float64)
    else:
        K = K - K.mT
        wanted = functional.ms2(y, K, b, h, engine="reference")
        assert close(last("identity", None), wanted, torch.float64)


@pytest.mark.parametrize("m", [2, 8, 32])
def test_float32_gradients_of_64_layers_are_within_1e_5(m, path):
    stack = Split(Random(m), m, m, m, 64, 125, "same", [0, 1])
    stack.tensors[-1] = torch.tensor([-0.1, 0.1] * 64, dtype=torch.float64)
    arguments = stack.arguments(torch.float32)
    y, g = stack.y.float(), torch.ones_like(stack.y.float())
    kernel = stack.kernel(path, torch.float32, "tanh")
    _, kept = kernel.forward(y, arguments, True)
    found = kernel.backward(kept, g, arguments)
    leaves = [t.float().double().requires_grad_() for t in (stack.y, *stack.tensors)]
    out = stack.run(leaves[0], "tanh", leaves[1:])
    wanted = torch.autograd.grad(out, leaves, g.double())
    for mine, theirs in zip([f for f in found if f is not None], wanted, strict=True):
        assert (mine - theirs).norm() <= 1e-5 * theirs.norm()


# Activations alone: identity weights and one layer, so that y_1 - y_0 is sigma(y_0)


def alone(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """sigma(x) and its slope, by the tiles, for x (B, 1)."""
    one, zero = torch.ones(1, 1, 1, dtype=x.dtype), torch.zeros(1, 1, dtype=x.dtype)
    y = torch.cat([torch.zeros_like(x), x], 1)
    tensors = (one, one, zero, zero, None, None, torch.ones(1, dtype=x.dtype))
    sizes = (len(x), 2, (1, 1), x.dtype, CPU)
    kernel = shears("tiles", activation, "identity", 1, (0,), False, *sizes)
    z, kept = kernel.forward(y, tensors, True)
    g = torch.tensor([[1.0, 0.0]], dtype=x.dtype).repeat(len(y), 1)
    return z[:, :1], kernel.backward(kept, g, tensors)[0][:, 1:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_slopes_are_exact_to_rounding(activation, dtype):
    x = torch.cat([torch.linspace(-30, 30, 40001), torch.logspace(-12, 3, 500)]).to(dtype)
    x = torch.cat([x, -x]).unsqueeze(1)
    z, slope = alone(x, activation)
    sigma, x = activations.get(activation), x.double()
    ulps = 8 * torch.finfo(dtype).eps
    for found, wanted in ((z, sigma(x)), (slope, sigma.slope(x))):
        assert ((found - wanted).abs() <= ulps * wanted.abs().clamp_min(1.0)).all()


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid", "silu", "sin", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_values_keep_their_digits(activation, dtype):
    x = torch.logspace(-12, -1, 300).to(dtype).unsqueeze(1)
    z, _ = alone(x, activation)
    wanted = activations.get(activation)(x.double())
    assert torch.allclose(z.double(), wanted, rtol=8 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [a for a in ACTIVATIONS if a != "sin"])
def test_activations_and_slopes_are_right_at_huge_arguments(activation, dtype):
    largest = torch.finfo(dtype).max
    x = torch.logspace(2, math.log10(largest), 200, dtype=torch.float64).clamp_max(largest)
    x = torch.cat([x, -x]).to(dtype).unsqueeze(1)
    z, slope = alone(x, activation)
    sigma, size = activations.get(activation), torch.finfo(dtype).eps
    assert torch.allclose(z.double(), sigma(x.double()), rtol=8 * size, atol=1e-30)
    assert torch.allclose(slope.double(), sigma.slope(x.double()), rtol=8 * size, atol=1e-30)


@pytest.mark.parametrize("B", [1, 63, 64, 65])
def test_lanes_without_a_sample_add_nothing_to_the_gradients(B):
    # At 0 this network doubles its state again and again; at these samples it does nothing.
    net = hdnn.H1(8, 200, step=1.0, activation="relu", tied=True)
    with torch.no_grad():
        net.K.copy_(2 * torch.eye(8))
        net.b.fill_(1.0)
    y = torch.full((B, 8), -5.0, requires_grad=True)
    net(y).sum().backward()
    assert torch.equal(y.grad, torch.ones(B, 8))
    assert torch.equal(net.K.grad, torch.zeros_like(net.K))
    assert torch.equal(net.b.grad, torch.zeros_like(net.b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_finite_stays_so(activation, value, dtype, path):
    stack = Split(Random(0), 2, 2, 2, 2, 70, "same", [0, 1])
    y, tensors = stack.y.to(dtype), stack.arguments(dtype)
    kernel = stack.kernel(path, dtype, activation)
    clean, _ = kernel.forward(y, tensors, False)
    y[3, 1] = value
    y_N, _ = kernel.forward(y, tensors, False)
    assert not y_N[3].isfinite().all()
    others = torch.arange(70) != 3
    assert torch.equal(y_N[others], clean[others])
    if value != value:
        _, (g_0, dK_p, *_) = kernel.undo(y_N, torch.ones_like(y), tensors)
        assert dK_p.isnan().any()
        assert g_0[others].isfinite().all()


# Threads


def gradients(stack: Split) -> list[Tensor]:
    kernel, tensors = stack.kernel("tiles", torch.float32, "tanh"), stack.arguments(torch.float32)
    y_N, kept = kernel.forward(stack.y.float(), tensors, True)
    found = kernel.backward(kept, stack.g.float(), tensors)
    return [y_N, *(t for t in found if t is not None)]


@pytest.fixture
def stack() -> Split:
    return Split(Random(1), 6, 6, 6, 8, 2000, "same", of_scheme(splitting.VERLET))


@pytest.fixture
def threads():
    """Sets the number of threads, and afterwards what it was."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("openmp", [True, False])
def test_results_are_the_same_to_the_bit_for_any_number_of_threads(
    stack, threads, monkeypatch, openmp
):
    if not openmp:
        monkeypatch.setattr(cpu, "_openmp", None)
    threads(1)
    first = gradients(stack)
    assert equal(first, gradients(stack))
    for count in (2, 3, 5):
        threads(count)
        assert equal(first, gradients(stack))


def test_several_python_threads_may_run_stacks_at_once(stack, threads):
    threads(2)
    wanted = gradients(stack)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: gradients(stack), range(16)):
            assert equal(found, wanted)


def test_a_forked_process_runs_stacks_too():
    program = """
import os, sys, warnings
import torch
sys.path[:0] = ["tests", "tests/engine"]
from strategies import Random
import test_engine_cpu as tests
torch.set_num_threads(2)
turns = tests.of_scheme(tests.splitting.VERLET)
stack = tests.Split(Random(1), 6, 6, 6, 8, 2000, "same", turns)
wanted = tests.gradients(stack)
child = os.fork()
if child == 0:
    os._exit(0 if tests.equal(tests.gradients(stack), wanted) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_default_device_is_not_that_of_a_stack_on_the_cpu(path, monkeypatch):
    stack = Split(Random(1), 6, 6, 6, 3, 40, "same", [0, 1])
    monkeypatch.setattr(cpu, "_workspace", cpu._Workspace())
    schedule.cache_clear()
    tensors = stack.arguments(torch.float64)
    with torch.device("meta"):
        kernel = stack.kernel(path, torch.float64, "tanh")
        y_N, kept = kernel.forward(stack.y, tensors, True)
        found = kernel.backward(kept, stack.g, tensors)
    kernel = stack.kernel(path, torch.float64, "tanh")
    assert torch.equal(y_N, kernel.forward(stack.y, tensors, False)[0])
    wanted = kernel.backward(kept, stack.g, tensors)
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_is_kept_is_all_written(path, monkeypatch):
    stack = Split(Random(1), 3, 3, 3, 4, 5, "same", of_scheme(splitting.VERLET))
    monkeypatch.setattr(lent, "empty", lambda size, dtype: torch.full((size,), torch.nan).to(dtype))
    kernel = stack.kernel(path, torch.float64, "tanh")
    kept = kernel.forward(stack.y, stack.arguments(torch.float64), True)[1]
    assert kept is not None
    assert not kept.isnan().any()


def test_nothing_is_compiled_again_for_new_sizes():
    for m, B, N in ((2, 5, 2), (3, 100, 4), (5, 300, 1)):
        Split(Random(0), m, m, m, N, B, "same", [0, 1]).check("tiles", torch.float32, "tanh")
        if m == 2:
            before = dict(tiles._compiled)
    assert tiles._compiled == before


def test_importing_the_module_does_not_import_numba():
    program = "import hdnn.engine.kernels.cpu, sys; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("turns", [(), (0, 1), (0, 1, 0)])
def test_the_kernel_is_the_one_that_was_faster_when_measured(turns, dtype):
    def chosen(width, samples):
        n, rows = (2 * width, (width, width)) if turns else (width, (width,))
        stack = Stack("tanh", "same", 3, turns, False, samples, n, rows, dtype, CPU)
        return type(dispatch.kernel(stack, "fused", hdnn.engine.Settings()))

    assert chosen(4, 125) is CpuKernel
    assert chosen(4, 0) is CpuKernel
    assert chosen(2048, 1) is BlasKernel
    assert chosen(2048, 500) is BlasKernel


def test_gradients_of_weights_that_no_shear_uses_are_zero(path):
    stack = Split(Random(0), 2, 3, 3, 2, 40, "same", [0])
    stack.check(path, torch.float64, "tanh")


def test_without_a_place_on_disk_kernels_are_compiled_all_the_same(monkeypatch):
    numba = pytest.importorskip("numba")
    cfunc, asked = numba.cfunc, []

    def nowhere(signature, **options):
        asked.append(options.pop("cache", False))
        if asked[-1]:
            raise RuntimeError("cannot cache function: no locator available")
        return cfunc(signature, **options)

    monkeypatch.setattr(numba, "cfunc", nowhere)
    monkeypatch.setattr(tiles, "_compiled", {})
    assert callable(tiles.kernel("collect", torch.float32))
    assert asked == [True, False]


def test_openmp_is_optional(monkeypatch):
    monkeypatch.setattr(cpu.sys, "platform", "win32")
    assert cpu._find_openmp() is None
    monkeypatch.setattr(cpu.sys, "platform", "linux")
    monkeypatch.setattr(cpu.torch, "__file__", "/nowhere/torch/__init__.py")
    assert cpu._find_openmp() is None


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_a_stack_by_blas_leaves_the_state_of_its_caller_alone(samples):
    stack = Split(Random(1), 64, 64, 64, 3, samples, "same", [0, 1])
    y, g = stack.y.clone(), stack.g.clone()
    kernel, tensors = stack.kernel("blas", torch.float64, "tanh"), stack.arguments(torch.float64)
    y_N, kept = kernel.forward(y, tensors, True)
    kernel.backward(kept, g, tensors)
    kernel.undo(y_N, g, tensors)
    assert torch.equal(y, stack.y)
    assert torch.equal(g, stack.g)
    assert torch.equal(kernel.forward(y, tensors, False)[0], y_N)
