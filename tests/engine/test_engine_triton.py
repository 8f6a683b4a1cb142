"""The Triton kernels: in Triton's interpreter on any machine, compiled where there is a GPU.

Triton reads TRITON_INTERPRET when it is imported, so that the interpreter gets a process of its
own: this file, run as a program, takes some groups of cases and prints their errors.
"""

import json
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

import interpreter
from hdnn import activations, interconnection
from hdnn.engine.kernels import gradients as weight_gradients
from hdnn.engine.kernels import tilings, triton
from hdnn.engine.kernels.protocol import ACTIVATIONS, Stack, schedule
from hdnn.engine.kernels.triton import TritonEuler, TritonShears

SCHEMES = {
    "h2": ((0, -1.0), (1, 1.0)),
    "ms1": ((1, -1.0), (0, 1.0)),
    "verlet": ((0, -0.5), (1, 1.0), (0, -0.5)),
    "yoshida": ((0, -0.68), (1, 1.35), (0, 0.18), (1, -1.7), (0, 0.18), (1, 1.35), (0, -0.68)),
}
# What each precision promises, relative, of states and gradients.
TOLERANCE = {"ieee": 1e-5, "tf32x3": 1e-5, "tf32": 3e-3, "bf16": 5e-2}


def split_reference(y, K_p, K_q, b_p, b_q, V_p, V_q, coef, turns, inverse, activation, kind):
    sigma = activations.get(activation)
    p, q = y.chunk(2, -1)
    half, layer = schedule(turns, len(K_p), inverse)
    for s, (turn, j) in enumerate(zip(half.tolist(), layer.tolist(), strict=True)):
        source, K, b, V = (p, K_p, b_p, V_p) if turn else (q, K_q, b_q, V_q)
        z = sigma(source @ K[j].T + b[j])
        out = {"same": K, "general": V, "identity": None}[kind]
        moved = coef[s] * (z if out is None else z @ out[j])
        p, q = (p, q + moved) if turn else (p + moved, q)
    return torch.cat([p, q], -1)


def euler_reference(y, K, b, V, h, activation, kind):
    sigma = activations.get(activation)
    for j in range(len(K)):
        z = sigma(y @ K[j].T + b[j])
        if kind == "canonical":
            moved = interconnection.times_canonical(z @ K[j])
        else:
            out = {"same": K, "general": V, "identity": None}[kind]
            moved = z if out is None else z @ out[j]
        y = y + h[j] * moved
    return y


def shears(y, tensors, scheme, activation="tanh", kind="same", *options, inverse=False):
    """The kernel of a scheme for such tensors."""
    K_p, K_q = tensors[:2]
    turns, rows = tuple(turn for turn, _ in SCHEMES[scheme]), (K_p.shape[1], K_q.shape[1])
    sizes = (*y.shape, rows, y.dtype, y.device)
    return TritonShears(Stack(activation, kind, len(K_p), turns, inverse, *sizes), *options)


def euler(y, K, activation="tanh", kind="general", *options):
    N, r, _ = K.shape
    sizes = (*y.shape, (r,), y.dtype, y.device)
    return TritonEuler(Stack(activation, kind, N, (), False, *sizes), *options)


def error(got, wanted):
    return float((got.double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def compare(names, got, wanted):
    """The relative error of each tensor that the reference has."""
    errors = {}
    for name, one, other in zip(names, got, wanted, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.shape == other.shape, name
            assert one.dtype == torch.float32, name
            assert one.is_contiguous(), name
            errors[name] = error(one, other)
    return errors


def gradients(function, tensors, g):
    leaves = [None if t is None else t.double().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(g.double())
    return out.detach(), [None if t is None else t.grad for t in leaves]


def split_errors(
    B, m, r_p, r_q, N, *, activation="tanh", kind="same", precision="ieee", scheme="h2",
    deterministic=False, inverse=False, device="cpu", h=0.1,
):  # fmt: skip
    random = torch.Generator().manual_seed(B + m + N)

    def draw(*shape):
        return torch.randn(*shape, generator=random)

    K_p, K_q = draw(N, r_p, m) / math.sqrt(m), draw(N, r_q, m) / math.sqrt(m)
    V_p, V_q = None, None
    if kind == "general":
        V_p, V_q = draw(N, r_p, m) / math.sqrt(m), draw(N, r_q, m) / math.sqrt(m)
    weights = (K_p, K_q, 0.1 * draw(N, r_p), 0.1 * draw(N, r_q), V_p, V_q)
    coef = torch.tensor([h * fraction for _, fraction in SCHEMES[scheme]] * N)
    tensors, g = (draw(B, 2 * m), *weights, coef), draw(B, 2 * m)
    turns = tuple(turn for turn, _ in SCHEMES[scheme])

    def reference(*leaves):
        return split_reference(*leaves, turns, inverse, activation, kind)

    y_N, wanted = gradients(reference, tensors, g)
    y, *others = (None if t is None else t.to(device) for t in tensors)
    options = (activation, kind, precision, deterministic)
    kernel = shears(y, others, scheme, *options, inverse=inverse)
    out, nothing = kernel.forward(y, others, False)
    assert nothing is None
    same, kept = kernel.forward(y, others, True)
    assert torch.equal(out, same)
    y_0, got = kernel.undo(out, g.to(device), others)
    stored = kernel.backward(kept, g.to(device), others)
    names = ("y_N", "y_0", "g_0", "dK_p", "dK_q", "db_p", "db_q", "dV_p", "dV_q", "dcoef")
    undone = compare(names, (out, y_0, *got), (y_N, tensors[0].double(), *wanted))
    found = compare(names[2:], stored, wanted)
    return undone | {f"{name}, stored": error for name, error in found.items()}


def euler_errors(
    B, n, r, N, *, activation="tanh", kind="general", precision="ieee", deterministic=False,
    device="cpu", h=0.1,
):  # fmt: skip
    random = torch.Generator().manual_seed(B + n + N)

    def draw(*shape):
        return torch.randn(*shape, generator=random)

    V = draw(N, r, n) / math.sqrt(n) if kind == "general" else None
    weights = (draw(N, r, n) / math.sqrt(n), 0.1 * draw(N, r), V)
    tensors = (draw(B, n), *weights, torch.full((N,), h))
    g = draw(B, n)

    def reference(*leaves):
        return euler_reference(*leaves, activation, kind)

    y_N, wanted = gradients(reference, tensors, g)
    y, *others = (None if t is None else t.to(device) for t in tensors)
    kernel = euler(y, others[0], activation, kind, precision, deterministic)
    out, _ = kernel.forward(y, others, False)
    last, kept = kernel.forward(y, others, True)
    assert torch.equal(kept.view(N, B, n)[0], y)
    got = kernel.backward(kept, g.to(device), others)
    names = ("y_N", "last state", "g_0", "dK", "db", "dV", "dh")
    return compare(names, (out, last, *got), (y_N, y_N, *wanted))


GROUPS = {
    "odd sizes": [
        ("split", (40, 5, 5, 5, 2), {}),
        ("split", (1, 1, 1, 1, 1), {}),
        ("split", (33, 20, 7, 40, 2), {"kind": "general"}),
        ("euler", (40, 10, 10, 2), {}),
        ("euler", (5, 3, 20, 1), {"kind": "same"}),
        ("euler", (40, 10, 7, 2), {"kind": "canonical"}),
        ("euler", (5, 2, 1, 1), {"kind": "canonical"}),
    ],
    "schemes": [
        ("split", (20, 16, 16, 16, 2), {"kind": "identity", "scheme": "ms1"}),
        ("split", (20, 4, 4, 4, 2), {"scheme": "verlet"}),
        ("split", (20, 4, 6, 4, 2), {"scheme": "yoshida", "kind": "general"}),
        ("euler", (20, 10, 10, 2), {"kind": "identity"}),
        ("euler", (5, 140, 140, 2), {"kind": "identity"}),
        ("euler", (20, 64, 64, 2), {"kind": "canonical"}),
        ("euler", (17, 140, 140, 1), {"kind": "canonical"}),
    ],
    "several blocks": [
        ("split", (20, 8, 150, 70, 1), {}),
        ("split", (20, 8, 70, 70, 2), {"scheme": "verlet", "deterministic": True}),
        ("euler", (21, 40, 150, 1), {}),  # of 20, dh is a sum that all but cancels
        ("euler", (20, 40, 128, 2), {"kind": "same"}),
        ("euler", (20, 40, 150, 2), {"kind": "canonical"}),
        ("euler", (20, 64, 128, 2), {"kind": "canonical", "deterministic": True}),
    ],
    "deterministic": [
        ("split", (40, 8, 9, 20, 3), {"kind": "general", "deterministic": True}),
        ("split", (20, 8, 8, 8, 2), {"scheme": "yoshida", "deterministic": True}),
        ("euler", (20, 10, 12, 2), {"deterministic": True}),
        ("euler", (20, 10, 12, 2), {"kind": "same", "deterministic": True}),
        ("euler", (40, 10, 13, 2), {"kind": "canonical", "deterministic": True}),
    ],
    "portions": [  # in the interpreter, the factors of one layer at a time, and products in parts
        ("split", (40, 8, 9, 20, 3), {"kind": "general", "deterministic": True}),
        ("split", (20, 8, 8, 8, 2), {"scheme": "verlet", "inverse": True, "deterministic": True}),
        ("euler", (40, 10, 10, 3), {"kind": "identity", "deterministic": True}),
    ],
    "packed": [  # in the interpreter, with the weights packed as those of wide layers are
        ("split", (40, 8, 9, 20, 2), {"kind": "general", "precision": "tf32", "inverse": True}),
        ("split", (20, 16, 16, 16, 1), {"precision": "tf32"}),
        ("split", (20, 4, 4, 4, 2), {"scheme": "verlet"}),
        ("split", (5, 5, 5, 5, 2), {"kind": "identity", "precision": "bf16"}),
        ("euler", (40, 10, 20, 2), {"kind": "canonical", "precision": "tf32"}),
        ("euler", (20, 20, 7, 2), {"kind": "same", "deterministic": True}),
        ("split", (0, 4, 4, 4, 2), {}),
    ],
    "warps": [  # alternating halves in tf32 and bf16; in the interpreter, 32 steps at a time
        ("split", (40, 32, 32, 32, 2), {"precision": "tf32"}),
        ("split", (33, 20, 7, 30, 2), {"precision": "tf32", "scheme": "ms1"}),
        ("split", (20, 16, 16, 16, 2), {"precision": "bf16", "inverse": True}),
        ("split", (1, 1, 1, 1, 1), {"precision": "tf32", "activation": "softplus"}),
        ("split", (31, 5, 17, 3, 2), {"precision": "bf16", "activation": "gelu"}),
        ("split", (20, 3, 3, 4, 20), {"precision": "tf32"}),
    ],
    "precisions": [
        (stack, sizes, {"precision": precision, **options})
        for precision in TOLERANCE
        for stack, sizes, options in (
            ("split", (20, 8, 8, 8, 2), {}),
            ("euler", (20, 8, 8, 2), {}),
            ("euler", (20, 8, 8, 2), {"kind": "canonical"}),
        )
    ],
    "activations": [
        (stack, sizes, {"activation": activation, **options})
        for activation in ACTIVATIONS
        for stack, sizes, options in (
            ("split", (20, 4, 4, 4, 2), {}),
            ("euler", (20, 4, 4, 2), {}),
            ("euler", (20, 4, 5, 2), {"kind": "canonical"}),
        )
    ],
}


def failures(group, **extra):
    """The cases of a group whose error is too large."""
    found = []
    for stack, sizes, options in GROUPS[group]:
        errors = (split_errors if stack == "split" else euler_errors)(*sizes, **options, **extra)
        largest = max(errors.values())
        if not largest < TOLERANCE[options.get("precision", "ieee")]:
            found.append([stack, sizes, options, errors])
    return found


def interpret(*groups):
    """What this file prints for some groups in a process whose Triton interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": "tests"}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, *groups],
        env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")


@needs_triton
@pytest.mark.parametrize("half", [0, 1])
def test_interpreted_kernels_agree_with_float64(half):
    assert interpret(*[*GROUPS][half::2]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_compiled_kernels_agree_with_float64(group):
    assert failures(group, device="cuda") == []


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TOLERANCE)
def test_gradients_through_64_layers_are_as_exact_as_the_precision_promises(precision):
    options = {"precision": precision, "device": "cuda"}
    assert max(split_errors(1000, 32, 32, 32, 64, **options).values()) < TOLERANCE[precision]
    for kind in ("general", "canonical"):
        errors = euler_errors(1000, 64, 64, 64, kind=kind, **options)
        assert max(errors.values()) < TOLERANCE[precision]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", TOLERANCE)
def test_the_widest_states_fit(precision):
    options = {"precision": precision, "device": "cuda"}
    for B in (100, 3000):
        for kind in ("same", "general", "identity"):
            errors = split_errors(B, 128, 128, 128, 3, kind=kind, **options)
            assert max(errors.values()) < TOLERANCE[precision]
    for kind in ("general", "canonical"):
        errors = euler_errors(100, 256, 256, 3, kind=kind, **options)
        assert max(errors.values()) < TOLERANCE[precision]


@pytest.mark.gpu
def test_deterministic_gradients_are_equal_to_the_last_bit():
    random = torch.Generator("cuda").manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=random, device="cuda")

    weights = (draw(20, 16, 16) / 4, draw(20, 16, 16) / 4, draw(20, 16), draw(20, 16), None, None)
    coef = torch.tensor([0.1 * part for _, part in SCHEMES["yoshida"]] * 20).cuda()
    y, g = draw(5000, 32), draw(5000, 32)
    kernel = shears(y, weights, "yoshida", "tanh", "same", "tf32", True)
    runs = [kernel.undo(y, g, (*weights, coef))[1] for _ in range(3)]
    for other in runs[1:]:
        assert all(a is b or torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def h2_on_gpu(device="cuda"):
    """y, the tensors of a small H2 stack, and its kernel."""
    random = torch.Generator(device).manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=random, device=device)

    weights = (draw(4, 16, 16) / 4, draw(4, 16, 16) / 4, draw(4, 16), draw(4, 16), None, None)
    y, tensors = draw(100, 32), (*weights, torch.tensor([-0.1, 0.1] * 4).to(device))
    return y, tensors, shears(y, tensors, "h2")


def shifted(t):
    """The same values, 4 bytes past where Triton would like them."""
    return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)


@pytest.mark.gpu
def test_repeated_calls_look_again_at_where_the_tensors_lie():
    y, (K_p, *rest), kernel = h2_on_gpu()
    wanted = kernel.forward(y, (K_p, *rest), False)[0]
    for state, K in [(shifted(y), K_p), (y, shifted(K_p)), (y.clone(), K_p.clone())] * 2:
        assert torch.equal(kernel.forward(state, (K, *rest), False)[0], wanted)


@pytest.mark.gpu
def test_kernels_run_on_the_current_stream():
    y, tensors, kernel = h2_on_gpu()
    wanted = kernel.forward(y, tensors, False)[0]
    late, stream = torch.zeros_like(y), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late.copy_(y)
        out = kernel.forward(late, tensors, False)[0]
    stream.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_kernels_run_where_their_tensors_are():
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:1"):
        y, tensors, kernel = h2_on_gpu(device)
        y = y * 0 + 0.1
        tensors = tuple(None if t is None else t * 0 + 0.1 for t in tensors)
        results.append(kernel.forward(y, tensors, False)[0].cpu())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.gpu
@pytest.mark.parametrize("m", [16, 5])
def test_autograd_takes_gradients_as_they_are(m):
    coef = torch.tensor([-0.1, 0.1] * 4, device="cuda")
    shapes = [(20, 2 * m), (4, m, m), (4, m, m), (4, m), (4, m)]
    leaves = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    returned, kernel = [], shears(leaves[0], leaves[1:], "h2")

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, *weights):
            y_N = kernel.forward(y, (*weights, None, None, coef), False)[0]
            ctx.save_for_backward(y_N, *weights)
            return y_N

        @staticmethod
        def backward(ctx, g):
            y_N, *weights = ctx.saved_tensors
            _, (*d, _, _, _) = kernel.undo(y_N, g, (*weights, None, None, coef))
            returned.extend(t.data_ptr() for t in d)
            return tuple(d)

    Function.apply(*leaves).backward(torch.ones(20, 2 * m, device="cuda"))
    assert [leaf.grad.data_ptr() for leaf in leaves] == returned


if __name__ == "__main__":
    interpreter.patch_once()
    found = []
    for group in sys.argv[1:]:
        if group == "portions":
            weight_gradients.EMITTED_BYTES, weight_gradients.ROWS = 5000, 16
        if group == "warps":
            triton.FRAGMENT_BYTES = 1
        pair = tilings.Tiling(16, 16, 4, 2), tilings.Tiling(32, 16, 4, 2)
        always = mock.patch.object(tilings, "packed_tilings", return_value=pair)
        with always if group == "packed" else nullcontext():
            found += failures(group)
    sys.stdout.write(json.dumps(found))
