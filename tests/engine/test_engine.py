"""Every way to run a stack gives the values and the gradients of the reference."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hdnn
from hdnn import engine, functional
from hdnn.engine import choice, compiled, dispatch, fixed, prepared
from hdnn.engine.backprop import SPANS
from hdnn.engine.call import Call, coefficients
from hdnn.engine.drift import ReversalWarning, strict_drift_of
from hdnn.engine.kernels import cpu, factors
from hdnn.engine.kernels.plain import PlainKernel
from hdnn.engine.kernels.protocol import Stack
from hdnn.errors import HDNNError, MissingExtraError, OptionError, TrainingError
from hdnn.integrators import splitting
from strategies import ACTIVATIONS, Random, seeds

F64 = torch.float64
WAYS: dict[str, dict[str, str]] = {
    "reversible": {"engine": "reference", "backprop": "reversible"},
    "checkpoint": {"engine": "reference", "backprop": "checkpoint"},
    "fused": {"engine": "fused"},
    "fused checkpoint": {"engine": "fused", "backprop": "checkpoint"},
    "fused reversible": {"engine": "fused", "backprop": "reversible"},
    "auto": {},
}
INVERTIBLE = ("h2", "h2_inverse", "verlet", "yoshida4", "ms1", "ms3")
STACKS = (*INVERTIBLE, "h1", "ms2")


def stack(name: str, normal: Random, m: int, r: int, N: int) -> tuple[Callable[..., Tensor], list]:
    """A function of (y, *weights) by that name, with random weights, X or J and steps."""
    n, scale = 2 * m, 0.5
    h = 0.05 + 0.1 * torch.rand(N, generator=normal.generator, dtype=F64)
    if name == "h1":
        weights = [scale * normal(N, r, n), normal(N, r), scale * normal.skew(n)]
        return lambda y, K, b, J, h, **o: functional.h1(y, K, b, h, J=J, **o), [*weights, h]
    if name == "ms2":
        return lambda y, K, b, h, **o: functional.ms2(y, K, b, h, **o), [
            scale * normal.skew(N, n),
            normal(N, n),
            h,
        ]
    if name == "ms1":
        return functional.ms1, [scale * normal(N, m, m), normal(N, m), normal(N, m), h]
    weights = [scale * normal(N, r, m), scale * normal(N, m, m), normal(N, r), normal(N, m), h]
    if name == "ms3":
        return functional.ms3, weights
    function = getattr(functional, name)
    return lambda y, *w, **o: function(y, *w[:5], X=w[5], **o), [*weights, normal(m, m)]


def ways(name: str) -> list[dict[str, str]]:
    return [w for k, w in WAYS.items() if name in INVERTIBLE or "reversible" not in k]


def gradients(function: Callable[..., Tensor], y: Tensor, weights: list, **options: Any):
    leaves = [t.detach().clone().requires_grad_() for t in (y, *weights)]
    out = function(*leaves, **options)
    generator = torch.Generator().manual_seed(9)
    direction = torch.randn(out.shape, generator=generator, dtype=F64).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * direction).sum(), leaves)


@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 20), st.sampled_from(ACTIVATIONS), seeds
)
@example(m=2, r=3, N=70, activation="tanh", seed=0)
@settings(max_examples=15)
@pytest.mark.parametrize("name", STACKS)
def test_all_ways_agree_with_the_reference(name, m, r, N, activation, seed):
    normal = Random(seed)
    function, weights = stack(name, normal, m, r, N)
    y = normal(2, 3, 2 * m)
    plain_way = {"engine": "reference", "backprop": "stored", "activation": activation}
    out, grads = gradients(function, y, weights, **plain_way)
    for way in ways(name):
        ours, our_grads = gradients(function, y, weights, activation=activation, **way)
        size = 1 + float(out.abs().max())
        assert float((ours - out).abs().max()) <= 1e-11 * size
        for a, b in zip(our_grads, grads, strict=True):
            assert float((a - b).abs().max()) <= 1e-8 * (1 + float(b.abs().max()))


@pytest.mark.parametrize("h", [0.1, (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("name", STACKS)
def test_steps_that_are_floats_keep_their_precision(name, h):
    function, weights = stack(name, Random(0), 2, 3, 3)
    k = next(i for i, w in enumerate(weights) if w.shape == (3,))
    weights[k] = h
    y = Random(1)(5, 4)
    expected = function(y, *weights, engine="reference", backprop="stored")
    for way in ways(name):
        torch.testing.assert_close(function(y, *weights, **way), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", STACKS)
def test_second_derivatives_are_those_of_the_reference(name):
    normal = Random(0)
    function, weights = stack(name, normal, 2, 3, 3)
    leaves = [t.requires_grad_() for t in (normal(2, 4), *weights)]
    g = normal(2, 4).requires_grad_()
    directions = [normal(*leaf.shape) for leaf in leaves]

    def second(**way: str) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(function(*leaves, **way), leaves, g, create_graph=True)
        return torch.autograd.grad(first, [*leaves, g], directions)

    expected = second(engine="reference", backprop="stored")
    for way in ways(name):
        torch.testing.assert_close(second(**way), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STACKS)
def test_second_derivatives_are_those_of_finite_differences(name):
    normal = Random(0)
    function, weights = stack(name, normal, 2, 1, 2)
    leaves = [t.requires_grad_() for t in (normal(1, 4), *weights)]
    assert torch.autograd.gradgradcheck(function, leaves)


@pytest.mark.parametrize("name", STACKS)
def test_backward_twice_and_views_and_transforms(name):
    normal = Random(0)
    function, weights = stack(name, normal, 2, 3, 4)
    y = normal(4, 5).mT[:, :4]  # not contiguous
    expected = gradients(function, y, weights, engine="reference", backprop="stored")[1][0]
    for way in ways(name):
        leaf = y.detach().requires_grad_()
        out = function(leaf, *weights, **way).square().sum()
        (first,) = torch.autograd.grad(out, leaf, retain_graph=True)
        assert torch.equal(first, torch.autograd.grad(out, leaf)[0])

        def loss(y: Tensor, way=way) -> Tensor:
            return function(y, *weights, **way).square().sum()

        torch.testing.assert_close(torch.func.grad(loss)(y), first)
        each = torch.func.vmap(torch.func.grad(loss))(y)
        torch.testing.assert_close(each, first)
        mapped = torch.func.vmap(lambda K: function(y, K, *weights[1:], **way))(  # noqa: B023
            torch.stack([weights[0]] * 2)
        )
        torch.testing.assert_close(mapped[1], function(y, *weights, **way))
    assert expected.shape == y.shape


@pytest.mark.parametrize("name", INVERTIBLE)
def test_what_a_reversible_stack_keeps_does_not_grow_with_depth(name):
    def kept(N: int, **way: str) -> int:
        function, weights = stack(name, Random(0), 2, 3, N)
        own = {w.data_ptr() for w in weights}
        y = Random(1)(50, 4).requires_grad_()
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            if (t.ndim == 2 and t.shape == y.shape) or (t.ndim == 3 and t.shape[1:] == y.shape):
                sizes[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            function(y, *weights, **way)
        assert own
        return sum(sizes.values())

    reversible = {"engine": "reference", "backprop": "reversible"}
    assert kept(16, **reversible) == kept(256, **reversible) <= 2 * 50 * 4


@pytest.mark.parametrize("name", STACKS)
def test_checkpoints_are_about_the_root_of_the_depth(name):
    function, weights = stack(name, Random(0), 2, 3, 100)
    y = Random(1)(50, 4).requires_grad_()
    stored = []

    def pack(t: Tensor) -> Tensor:
        if t.ndim == 3 and t.shape[1:] == y.shape:
            stored.append(len(t))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(y, *weights, engine="reference", backprop="checkpoint")
    assert stored == [9]  # besides y_0


# Fixed point


def h2_weights(N: int, m: int, scale: float, dtype: torch.dtype) -> list[Tensor]:
    normal, b = Random(0), torch.zeros(N, m)
    K_p, K_q = (scale * normal(N, m, m) / m**0.5 for _ in range(2))
    return [t.to(dtype) for t in (K_p, K_q, b, b)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_fixed_point_state_is_reversed_to_the_last_bit(dtype):
    N, y = 1000, Random(1)(10, 16).to(dtype)
    weights = h2_weights(N, 8, 2.0, dtype)
    coef = torch.tensor([-0.5, 0.5], dtype=dtype).repeat(N)
    stack = Stack("tanh", "same", N, (0, 1), False, 10, 16, (8, 8), dtype, y.device)
    kernel, tensors = fixed.FixedShears(stack), (*weights, None, None, coef)
    _, Y_N = kernel.forward(y, tensors, True)
    assert Y_N is not None
    Y_0, _ = kernel.undo(Y_N, torch.ones_like(y), tensors)
    assert torch.equal(Y_0, fixed.to_grid(y))


def test_gradients_through_a_fixed_point_state_are_those_of_a_float_one():
    function, weights = stack("h2", Random(0), 3, 3, 20)
    y = fixed.from_grid(fixed.to_grid(Random(1)(5, 6)), F64)
    out, grads = gradients(function, y, weights)
    with engine.use(state="fixed"):
        ours, our_grads = gradients(function, y, weights)
    torch.testing.assert_close(ours, out, rtol=1e-4, atol=1e-4)
    for a, b in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_state_that_leaves_the_grid_is_an_error():
    function, weights = stack("h2", Random(0), 2, 2, 40)
    weights[0], weights[1] = 400 * weights[0], 400 * weights[1]
    with engine.use(state="fixed"), pytest.raises(TrainingError, match=r"holds \+-8.389e\+06"):
        function(100 * Random(1)(5, 4), *weights, activation="relu")


@pytest.mark.parametrize(("size", "h"), [(1e-5, 0.1), (1e-3, 0.1), (1.0, 1e-6)])
def test_a_fixed_point_state_follows_small_states_and_small_steps(size, h):
    net = hdnn.H2(8, 100, step=h, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = size * Random(1)(5, 8)
    with torch.no_grad(), engine.use(engine="reference"):
        exact = net(y)
    with torch.no_grad(), engine.use(state="fixed"):
        found = net(y)
    assert float((found - exact).norm()) <= 1e-4 * float((exact - y).norm())


@pytest.mark.parametrize(("size", "h", "what"), [(1e-11, 0.1, "y_0"), (1.0, 1e-11, "layer adds")])
def test_what_is_too_small_for_the_grid_is_said(size, h, what):
    net, y = hdnn.H2(8, 10, step=h), size * Random(1)(5, 8).float()
    with engine.use(state="fixed"), pytest.warns(fixed.GridWarning, match=f"{what} .*rounded by"):
        net(y)


def test_a_state_of_zeros_loses_nothing_on_the_grid():
    with engine.use(state="fixed"):
        assert torch.equal(hdnn.H2(8, 10)(torch.zeros(5, 8)), torch.zeros(5, 8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_what_no_integer_holds_leaves_the_grid(value):
    y = torch.zeros(5, 8)
    y[2, 3] = value
    with engine.use(state="fixed"), pytest.raises(TrainingError, match="left the fixed-point grid"):
        hdnn.H2(8, 10)(y)


def test_fixed_point_says_what_it_cannot_do():
    function, weights = stack("h1", Random(0), 2, 2, 3)
    y = Random(1)(5, 4)
    with engine.use(state="fixed"):
        with pytest.raises(OptionError, match="forward Euler"):
            function(y, *weights)
        function, weights = stack("h2", Random(0), 2, 2, 3)
        with pytest.raises(OptionError, match="stored"):
            function(y, *weights, backprop="stored", engine="reference")
        with pytest.raises(OptionError, match="reference engine only"):
            function(y, *weights, engine="fused")


# The check of the reversal


def drifting(N: int) -> Callable[..., None]:
    """A training step of a network whose reversal loses digits, the more the deeper it is."""
    weights = h2_weights(N, 8, 2.0, torch.float32)
    y = Random(1)(10, 16).float().requires_grad_()

    def run(**way: str) -> None:
        functional.h2(y, *weights, 0.5, **way).sum().backward()

    return run


@pytest.mark.parametrize("engine_", ["reference", "fused"])
def test_every_reversal_that_drifts_warns_and_can_be_told_not_to(engine_):
    run, way = drifting(60), {"engine": engine_, "backprop": "reversible"}
    for _ in range(5):
        with pytest.warns(ReversalWarning, match=r"off by .* backprop=.auto. or"):
            run(**way)
    with engine.use(check=False):
        run(**way)


@pytest.mark.parametrize("engine_", ["reference", "fused"])
def test_a_reversal_whose_gradients_are_worthless_is_an_error(engine_):
    run = drifting(300)
    for _ in range(3):
        with pytest.raises(TrainingError, match="worthless"):
            run(engine=engine_, backprop="reversible")
    run()  # what is advised runs
    run(backprop="checkpoint")
    run(backprop="stored")


def test_a_compiled_reversal_is_checked_too():
    torch._dynamo.reset()
    net = hdnn.H2(16, 300, step=1.0, activation="relu", backprop="reversible")
    y = Random(1)(10, 16).float().requires_grad_()
    out = torch.compile(net, backend="aot_eager")(y).sum()
    with pytest.raises(Exception, match="worthless"):
        out.backward()


@pytest.mark.parametrize("engine_", ["reference", "fused"])
def test_a_reversal_reads_zeros_of_the_first_state_as_zeros(engine_):
    # Half of it is 0, as of an augmented sample, where ReLU has its kink.
    net = hdnn.H2(8, 20, activation="relu", engine=engine_, dtype=F64)
    torch.nn.init.ones_(net.b_p)  # so that q moves in each layer
    y = torch.cat([Random(1)(7, 4), torch.zeros(7, 4, dtype=F64)], 1)
    found = [far_off(net, y, backprop=way) for way in ("stored", "reversible")]
    assert max(found) < 1e-12


# Gradients by default


def far_off(net: torch.nn.Module, y: Tensor, **options: Any) -> float:
    """How far the gradients are from those of the reference in float64, relatively."""
    found = []
    for dtype, how in ((torch.float64, {"engine": "reference"}), (y.dtype, options)):
        model = copy.deepcopy(net).to(dtype)
        leaf = y.detach().to(dtype).requires_grad_()
        with engine.use(**how):
            out = model(leaf)
            direction = torch.arange(1, out.numel() + 1, dtype=F64).cos().view(out.shape)
            (out * direction.to(dtype)).sum().backward()
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    return max(
        float((a.double() - b).norm() / b.norm().clamp_min(1e-300))
        for b, a in zip(*found, strict=True)
    )


EXPANDING = [
    lambda **o: hdnn.H2(16, 300, step=1.0, activation="relu", **o),
    lambda **o: hdnn.H2(16, 128, step=1.0, activation="relu", **o),
    lambda **o: hdnn.H2(16, 128, step=0.1, activation="relu", init="paper", **o),
    lambda **o: hdnn.HamiltonianNet(8, 40, "verlet", step=1.0, activation="softplus", **o),
    lambda **o: hdnn.HamiltonianNet(8, 30, "yoshida4", step=0.5, activation="relu", **o),
    lambda **o: hdnn.MS1(8, 200, step=1.0, activation="relu", **o),
    lambda **o: hdnn.MS3(8, 100, step=1.0, activation="relu", **o),
]


@pytest.mark.parametrize("network", EXPANDING)
def test_by_default_gradients_of_networks_that_expand_are_as_exact_as_those_of_the_loop(network):
    net = network(generator=torch.Generator().manual_seed(0))
    y = Random(1)(5, net.features).float()
    assert far_off(net, y) <= 20 * max(far_off(net, y, engine="reference"), 1e-7)


@given(seeds)
@settings(max_examples=30)
def test_by_default_twelve_layers_of_the_paper_are_exact_in_float64(seed):
    generator = torch.Generator().manual_seed(seed)
    net = hdnn.H2(8, 12, step=1.0, init="paper", generator=generator, dtype=F64)
    y = Random(seed)(3, 8)
    with engine.use(backprop="checkpoint"):
        assert far_off(net, y) < 1e-6
    assert far_off(net, y) < 1e-6


@pytest.mark.parametrize("name", STACKS)
def test_what_is_behind_a_stack_may_work_in_place(name):
    function, weights = stack(name, Random(0), 2, 3, 9)
    y = Random(1)(5, 4)

    def behind(y: Tensor, *weights: Any, **options: Any) -> Tensor:
        return torch.nn.ReLU(inplace=True)(function(y, *weights, **options))

    _, expected = gradients(behind, y, weights, engine="reference", backprop="stored")
    for way in ways(name):
        _, found = gradients(behind, y, weights, **way)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_states_that_would_take_much_memory_are_rebuilt_or_kept_at_checkpoints(monkeypatch):
    net = hdnn.H2(8, 64)
    assert "backprop stored" in net.engine_report(batch=100)
    monkeypatch.setattr(dispatch, "_MACHINE", 32 * 1000)
    assert "backprop checked" in net.engine_report(batch=100)
    assert "1/32 of the memory" in net.engine_report(batch=100)
    assert "backprop checkpoint" in hdnn.H1(8, 64).engine_report(batch=100)
    assert "backprop stored" in hdnn.H2(8, 2).engine_report(batch=3)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("layers", [1, 3, 8, 9, 30])
def test_rebuilt_states_that_agree_with_kept_ones_give_the_gradients_of_stored_states(
    layers, inverse, monkeypatch
):
    monkeypatch.setattr(dispatch, "_MACHINE", 0)
    function, weights = stack("verlet", Random(0), 2, 3, layers)
    y = Random(1)(5, 4)
    found = gradients(function, y, weights, engine="fused", inverse=inverse)
    monkeypatch.undo()
    wanted = gradients(function, y, weights, engine="fused", backprop="stored", inverse=inverse)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    prepared._known.clear()


def test_what_cannot_be_rebuilt_within_rounding_is_computed_again():
    normal = Random(0)
    N = 120
    weights = [3 * normal(N, 3, 2), 3 * normal(N, 3, 2), normal(N, 3), normal(N, 3)]
    y, g = normal(5, 4), normal(5, 4)
    with prepared.recorded() as record:  # layers that expand
        functional.h2(y, *weights, 0.9, activation="sin", engine="fused", backprop="stored")
    ((call, tensors),) = record
    settings = engine.Settings(precision="ieee")
    stored, checked, reversible = (
        dispatch.method(call.stack, "fused", backprop, settings)
        for backprop in ("stored", "checked", "reversible")
    )
    wanted = stored.backward(y, stored.forward(y, tensors)[1], g, tensors)
    with pytest.raises(TrainingError, match="worthless"):
        reversible.backward(y, reversible.forward(y, tensors)[1], g, tensors)
    for _ in range(2):
        kept = checked.forward(y, tensors)[1]
        assert len(kept) <= SPANS
        found = checked.backward(y, kept, g, tensors)
        for one, other in zip(found, wanted, strict=True):
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_a_rebuilt_state_that_is_no_number_is_infinitely_far_off():
    y, end = torch.ones(4, 2), torch.ones(4, 2)
    rebuilt = y.clone()
    assert float(strict_drift_of(y, rebuilt, end)) == 0
    end[0], rebuilt[0] = torch.inf, torch.nan
    assert float(strict_drift_of(y, rebuilt, end)) == torch.inf


@pytest.mark.parametrize("large", ["feature", "sample"])
@pytest.mark.parametrize("seed", range(3))
def test_large_numbers_hide_no_error_of_a_rebuilt_state(seed, large, monkeypatch):
    normal, N, m = Random(seed), 64, 4
    K = [0.1 * normal(N, m, m) for _ in range(2)]
    for one in K:
        one[24:32] *= 60.0  # chaotic layers in the middle
        if large == "feature":
            one[:, :, 0] = 0.0  # which reads no weight
    weights, y = [*K, normal(N, m), normal(N, m)], normal(5, 2 * m)
    if large == "feature":
        y[:, [0, m]] = 1e6
    else:
        y[2] *= 1e9
    args = [t.float() for t in (y, *weights)]
    monkeypatch.setattr(dispatch, "_MACHINE", 0)
    prepared._known.clear()

    def sines(y: Tensor, *weights: Tensor, **options: Any) -> Tensor:
        return functional.h2(y, *weights, 0.9, activation="sin", engine="fused", **options)

    _, found = gradients(sines, args[0], args[1:])
    _, wanted = gradients(sines, args[0], args[1:], backprop="stored")
    for one, other in zip(found, wanted, strict=True):
        one, other = one.double(), other.double()
        assert float((one - other).norm() / other.norm()) < 1e-3
    prepared._known.clear()


def test_what_is_exactly_zero_at_the_start_stays_so_when_states_are_rebuilt(monkeypatch):
    monkeypatch.setattr(dispatch, "_MACHINE", 0)
    prepared._known.clear()
    torch.manual_seed(0)
    net = hdnn.H2(16, 16, activation="relu", T=4.0)
    y = torch.cat([torch.randn(20, 8), torch.zeros(20, 8)], -1)
    found = torch.autograd.grad(net(y).square().sum(), [*net.parameters()])
    net.backprop = "stored"
    wanted = torch.autograd.grad(net(y).square().sum(), [*net.parameters()])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    prepared._known.clear()


def test_layers_that_move_one_half_alone_run_on_any_device():
    assert dispatch.gpu_kernel((0,), "tf32", 64, 100, 9) == "shears"
    assert dispatch.gpu_kernel((0, 0), "tf32", 3000, 100, 9) == "plain"
    cuda = torch.device("cuda", 0)
    stack = Stack("tanh", "same", 3, (0,), False, 5, 600, (4, 4), torch.float32, cuda)
    assert type(dispatch.kernel(stack, "fused", engine.Settings(precision="tf32"))) is PlainKernel


# Choosing


@pytest.mark.parametrize(
    ("scheme", "n", "N", "precision", "backprop"),
    [
        *(("h2", n, 64, "tf32", "stored") for n in (256, 512, 1024, 2048)),
        *(("h2", n, 256, "tf32", "checked") for n in (512, 2048)),
        ("h1", 512, 64, "tf32", "stored"),
        ("h1", 512, 256, "tf32", "checkpoint"),
        ("h1", 64, 1024, "ieee", "checkpoint"),
        ("h2", 512, 100, "bf16", "stored"),
    ],
)
def test_large_states_on_a_gpu_are_not_all_stored(scheme, n, N, precision, backprop, monkeypatch):
    monkeypatch.setattr(dispatch, "memory_of", lambda _: 139 * 2**30)
    monkeypatch.setattr(dispatch, "_why_not_fused", lambda *_: ("", None))
    plan = dispatch.plan(
        engine.Settings(precision=precision),
        reversible=scheme == "h2",
        device=torch.device("cuda", 0),
        dtype=torch.float32,
        n=n,
        batch=8192,
        steps=N * (1 + (scheme == "h2")),
        activation="tanh",
    )
    assert (plan.engine, plan.backprop) == ("fused", backprop)


def test_the_kernel_of_a_gpu_is_the_fastest_of_the_measured_ones():
    for scheme, turns in (("euler", ()), ("alternating", (0, 1)), ("shears", (0, 1, 0))):
        assert choice.scheme(turns) == scheme
        for precision in ("ieee", "tf32", "tf32x3", "bf16"):
            assert dispatch.gpu_kernel(turns, precision, 3000, 100, 9) == "products"
            narrow = dispatch.gpu_kernel(turns, precision, 8, 100, 9)
            assert narrow == ("shears" if turns else "euler")
    assert [choice.nearest_batch(b, "cuda") for b in (1, 63, 65, 4095, 4097, 10**6)] == [
        *(32, 32, 128, 2048, 8192, 8192)
    ]


def test_a_compiler_can_ask_for_the_kernel_of_a_gpu_and_leave_the_batch_open():
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def chosen(y: Tensor) -> Tensor:
        assert dispatch._matmul_setting() in ("highest", "high", "medium")
        name = dispatch.gpu_kernel_about((), "ieee", 64, y.numel() // 64, 9)
        return y.new_full((), len(name))

    for batch in (3, 100, 5000):
        wanted = len(dispatch.gpu_kernel_about((), "ieee", 64, batch, 9))
        assert int(chosen(torch.zeros(batch, 64))) == wanted


def test_the_precision_is_known_whichever_way_it_was_set(monkeypatch):
    def refuses() -> str:
        raise RuntimeError("a mix of the legacy and new APIs")

    assert factors.float32_setting() == torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuses)
    for was, known in (("tf32", "high"), ("ieee", "highest"), ("none", "highest")):
        matmul = SimpleNamespace(fp32_precision=was)
        monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
        assert factors.float32_setting() == known
        for precision in ("tf32", "ieee", "bf16"):
            with factors.multiplying(precision, torch.device("cuda")):
                assert matmul.fp32_precision == (was if precision == "bf16" else precision)
            assert matmul.fp32_precision == was


@pytest.mark.parametrize("was", ["highest", "high", "medium"])
def test_the_precision_is_put_back_as_it_was(was):
    torch.set_float32_matmul_precision(was)
    try:
        for precision, inside in (("tf32", "high"), ("ieee", "highest"), ("bf16", was)):
            with factors.multiplying(precision, torch.device("cuda")):
                assert factors.float32_setting() == inside
            assert factors.float32_setting() == was
    finally:
        torch.set_float32_matmul_precision("highest")


def test_times_between_those_of_the_table_are_interpolated():
    times = {"64": {"16": 1.0, "64": 4.0}, "256": {"16": 16.0, "64": 64.0}}
    assert choice._time("products", times, 64, 16) == pytest.approx(1)
    assert choice._time("products", times, 128, 32) == pytest.approx(8)
    assert choice._time("products", times, 8, 1) == pytest.approx(1)
    assert choice._time("products", times, 256, 10**6) == pytest.approx(64)
    assert choice._time("one kernel", times, 65, 32) == pytest.approx(32)  # as for 256


def test_the_kernel_of_a_cpu_does_not_depend_on_earlier_calls(monkeypatch):
    monkeypatch.setattr(dispatch, "cpu_kernel", lambda *sizes: by_threads[torch.get_num_threads()])
    by_threads, before = {1: "blas", 2: "tiles"}, torch.get_num_threads()
    y, weights = torch.randn(6, 8), h2_weights(3, 4, 1.0, torch.float32)
    dispatch.method.cache_clear()
    prepared._known.clear()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            with prepared.recorded() as record:
                functional.h2(y, *weights, 0.1, engine="fused")
            kernels = dispatch.FUSED_KERNELS["cpu"][0]
            assert type(record[0][0].method.kernel) is kernels[by_threads[threads]]
    finally:
        torch.set_num_threads(before)
        dispatch.method.cache_clear()
        prepared._known.clear()


def test_settings_nest_and_end_with_their_block():
    with engine.use(backprop="reversible") as outer:
        assert outer.backprop == "reversible"
        with engine.use(engine="reference") as inner:
            assert (inner.engine, inner.backprop) == ("reference", "reversible")
        assert engine.current().engine == "auto"
    assert engine.current() == engine.Settings()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"engine": "fussed"}, "fused"),
        ({"backprop": "magic"}, "reversible"),
        ({"precision": "fp8"}, "tf32x3"),
        ({"state": 3}, "fixed"),
        ({"check": "no"}, "True or False"),
        ({"engin": "fused"}, "engine"),
    ],
)
def test_unknown_settings_are_refused(options, word):
    with pytest.raises(OptionError, match=word), engine.use(**options):
        pass


def test_what_cannot_run_is_an_error_that_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(dispatch, "installed", lambda module: False)
    function, weights = stack("h2", Random(0), 2, 2, 3)
    with pytest.raises(MissingExtraError, match=r"hdnn\[fast\]"):
        function(Random(1)(5, 4), *weights, engine="fused")
    for name in ("h1", "ms2"):
        function, weights = stack(name, Random(0), 2, 2, 3)
        with pytest.raises(OptionError, match="explicit inverse"):
            function(Random(1)(5, 4), *weights, backprop="reversible")
    function(Random(1)(5, 4), *weights)  # auto finds another way


def test_networks_carry_their_way_to_run_and_report_it():
    net = hdnn.H2(4, 8, engine="reference", backprop="reversible")
    assert "reference engine, backprop reversible" in net.engine_report()
    with engine.use(backprop="stored"):
        assert "backprop reversible" in net.engine_report(batch=7)  # the network's own counts
        assert "backprop stored" in hdnn.MS1(4, 8, engine="reference").engine_report()
    assert "layer by layer" in hdnn.ImplicitH2(4, 2).engine_report()
    y = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(net(y), functional.h2(y, **net.weights(), engine="reference"))
    for make in (
        lambda: hdnn.H2(4, 8, engine="fast"),
        lambda: hdnn.ImplicitH2(4, 8, engine="fused"),
        lambda: hdnn.MLP(4, 8, backprop="reversible"),
    ):
        with pytest.raises((HDNNError, TypeError)):
            make()


# One operator

REVERSIBLE = {"backprop": "reversible"}


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, {}) for name in STACKS]
    + [(name, {"backprop": "checkpoint"}) for name in ("h2_inverse", "ms1", "h1")]
    + [(name, {"engine": "fused"}) for name in ("verlet", "ms3", "ms2")]
    + [(name, REVERSIBLE) for name in ("h2", "ms1", "h1")],
)
def test_inside_compile_a_stack_is_one_operator(name, way):
    torch._dynamo.reset()
    function, weights = stack(name, Random(0), 2, 3, 20)
    y = Random(1)(5, 4)
    if name not in INVERTIBLE and way == REVERSIBLE:
        with pytest.raises(Exception, match="explicit inverse"):
            torch.compile(function, fullgraph=True, backend="eager")(y, *weights, **way)
        return
    expected = gradients(function, y, weights, engine="reference", backprop="stored")
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    out, grads = gradients(compiled, y, weights, **way)
    assert sum("hdnn.stack" in target for target in seen) == 1
    torch.testing.assert_close(out, expected[0], rtol=1e-9, atol=1e-9)
    for a, b in zip(grads, expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-7)


def test_the_operator_keeps_the_promises_of_an_operator():
    normal, N = Random(0), 10
    tensors = [normal(N, 2, 2), normal(N, 2, 2), normal(N, 2), normal(N, 2)]
    coef = coefficients((-0.5, 1.0, -0.5), 0.1, N, True, F64, torch.device("cpu"))
    leaves = [t.requires_grad_() for t in (*tensors, coef.clone())]
    y = normal(5, 4).requires_grad_()
    for way in (
        *("reference checkpoint any", "fused reversible tiles", "fused checkpoint blas"),
        *("fused stored tiles", "fused stored blas"),
    ):
        given = (y, leaves, f"010 backwards same {way} auto tanh")
        checks = torch.library.opcheck(compiled.stack, given)
        assert {*checks.values()} == {"SUCCESS"}
    K, V = (normal(N, 3, 4).requires_grad_() for _ in range(2))
    b, steps = normal(N, 3).requires_grad_(), normal(N, 1)[:, 0].requires_grad_()
    for leaves, kind in (([K, b, steps], "canonical"), ([K, b, V, steps], "general")):
        for way in ("reference checkpoint any", "fused stored tiles", "fused stored blas"):
            given = (y, leaves, f"euler forwards {kind} {way} auto tanh")
            assert {*torch.library.opcheck(compiled.stack, given).values()} == {"SUCCESS"}


@pytest.mark.parametrize("make", [hdnn.H1, hdnn.H2])
@pytest.mark.parametrize("backprop", ["stored", "checkpoint"])
def test_many_gradients_at_once_are_those_one_by_one(make, backprop):
    net, y = make(4, 5, dtype=F64, backprop=backprop), Random(0)(3, 4)
    jacobian = torch.autograd.functional.jacobian
    torch.testing.assert_close(jacobian(net, y, vectorize=True), jacobian(net, y))


HOOKS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "other strides": (lambda t: torch.stack([t, -t], -1), lambda t: t[..., 0]),
    "other order": (lambda t: t.mT.contiguous() if t.ndim > 1 else t, lambda t: t.mT),
    "other dtype": (lambda t: t.double(), lambda t: t),
}


@pytest.mark.parametrize("hook", list(HOOKS))
@pytest.mark.parametrize("way", ["reversible", "fused", "fused checkpoint", "fused reversible"])
def test_hooks_may_give_back_saved_tensors_in_any_form(hook, way):
    pack, unpack = HOOKS[hook]
    net = hdnn.H2(4, 6, **WAYS[way])
    y = torch.randn(70, 4, generator=torch.Generator().manual_seed(0))
    wanted = torch.autograd.grad(net(y).sum(), list(net.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: unpack(t) if t.ndim > 1 else t):
        y_N = net(y)
    found = torch.autograd.grad(y_N.sum(), list(net.parameters()))
    torch.testing.assert_close(found, wanted)


def test_compiled_under_autocast_an_X_is_not_read_as_what_it_is_not():
    torch._dynamo.reset()
    X = torch.randn(2, 2, generator=torch.Generator().manual_seed(0))
    net, y = hdnn.H2(4, 5, X=X), torch.ones(7, 4)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(y), net(y))


def test_a_compiler_that_cannot_tell_exports_takes_no_fused_stack(monkeypatch):
    monkeypatch.delattr(torch.compiler, "is_exporting", raising=False)  # PyTorch before 2.7
    call = Call(None, "canonical", False, torch.ones(7, 4), (), None, 0.1, None)
    with pytest.raises(OptionError, match=r"inside torch\.compile of a PyTorch before 2\.7"):
        compiled.choose(call, "fused", None)


def test_a_compiled_stack_takes_checkpoints_where_states_are_many(monkeypatch):
    torch._dynamo.reset()
    prepared._known.clear()
    monkeypatch.setattr(dispatch, "_MACHINE", 20 * 32 * 5 * 2 * 2 * 8)  # for 20 samples
    net = hdnn.H2(4, 5, dtype=F64)
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    for B in (3, 50, 20, 21):
        y = Random(B)(B, 4)
        found, wanted = (
            torch.autograd.grad(f(y).sum(), list(net.parameters())) for f in (compiled, net)
        )
        torch.testing.assert_close(found, wanted)
    prepared._known.clear()


def test_exported_programs_hold_no_operator_of_ours():
    net = hdnn.H2(4, 3)
    program = torch.export.export(net, (torch.zeros(2, 4),))
    assert not [n for n in program.graph.nodes if "hdnn" in str(n.target)]


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.jacrev, torch.func.jacfwd])
def test_transforms_can_be_compiled(transform):
    torch._dynamo.reset()
    net, y = hdnn.H2(4, 3, dtype=F64), Random(0)(2, 4)
    found = torch.compile(transform(net), backend="aot_eager")(y)
    torch.testing.assert_close(found, transform(net)(y))


@pytest.mark.parametrize("h", [0.1, "each"])
@pytest.mark.parametrize("inverse", [False, True])
def test_what_the_compiler_traces_gives_the_same_when_called(h, inverse):
    _, weights = stack("h2", Random(0), 2, 3, 6)
    steps = weights[4] if h == "each" else h
    y, sigma = Random(1)(2, 5, 4), hdnn.activations.get("tanh")
    for engine_, backprop in ((None, "reversible"), ("fused", None)):
        call = Call(splitting.VERLET, "same", inverse, y, tuple(weights[:4]), None, steps, sigma)
        run = compiled.choose(call, engine_, backprop)
        assert run is not None
        ours = run(call)
        expected = functional.verlet(y, *weights[:4], steps, inverse=inverse)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    K, b = torch.zeros(6, 3, 4), torch.zeros(6, 3)
    euler = Call(None, "canonical", False, y, (K, b), None, 0.1, sigma)
    with pytest.raises(OptionError, match="explicit inverse"):
        compiled.choose(euler, "fused", "reversible")


@pytest.mark.parametrize(
    ("options", "engine_", "why"),
    [
        ({"device": "cuda", "n": 64}, "fused", "faster"),
        ({"device": "cuda", "n": 200, "reversible": False}, "fused", "faster"),
        ({"device": "cuda", "n": 3000}, "fused", "faster"),
        ({"device": "cuda", "dtype": torch.float64}, "reference", "float32"),
        ({"device": "mps"}, "reference", "no kernel for mps"),
        ({"dtype": torch.bfloat16}, "fused", "faster"),
        ({"dtype": torch.complex64}, "reference", "complex64"),
        ({"n": 512}, "fused", "faster"),
        ({"batch": 0}, "reference", "no samples"),
        ({"activation": "mine"}, "reference", "mine"),
        ({"traced": True}, "reference", "traced"),
        ({"backprop": "stored"}, "fused", "faster"),
        ({}, "fused", "faster"),
    ],
)
def test_auto_chooses_by_device_dtype_and_size_and_says_why(options, engine_, why, monkeypatch):
    memory = SimpleNamespace(total_memory=2**34)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    given = {"reversible": True, "dtype": torch.float32, "n": 4, "batch": 9, "activation": "tanh"}
    given |= {"device": "cpu", "steps": 8} | options
    device = torch.device(given.pop("device"))
    asked = engine.Settings(backprop=given.pop("backprop", "auto"))
    plan = dispatch.plan(asked, device=device, **given)
    assert plan.engine == engine_
    assert why in plan.why


# Precision on a GPU


def on_a_gpu(dtype: torch.dtype) -> Any:
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, is_cuda=True)


@pytest.mark.parametrize(
    ("asked", "dtype", "matmul", "expected"),
    [
        ("auto", torch.float32, "highest", "ieee"),
        ("auto", torch.float32, "high", "tf32"),
        ("auto", torch.float32, "medium", "bf16"),
        ("auto", torch.bfloat16, "highest", "bf16"),
        ("auto", torch.float16, "highest", "tf32"),
        ("tf32x3", torch.float32, "highest", "tf32x3"),
    ],
)
def test_products_are_as_precise_as_asked_or_as_pytorch_is_set(
    asked, dtype, matmul, expected, monkeypatch
):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)
    settings = engine.Settings(precision=asked)
    assert dispatch.precision(settings, on_a_gpu(dtype)) == expected


@pytest.mark.parametrize("turns", [(0, 1), ()])
def test_kernels_of_a_gpu_are_as_precise_and_as_ordered_as_asked(turns, monkeypatch):
    made = []

    def record(stack, precision, deterministic):
        made.append((bool(stack.turns), stack.layers, precision, deterministic))

    kernels = dict.fromkeys(("shears", "euler"), record)
    monkeypatch.setitem(dispatch.FUSED_KERNELS, "cuda", (kernels, "triton", "gpu"))
    rows, cuda = (4, 4) if turns else (4,), torch.device("cuda", 0)
    stack = Stack("tanh", "general", 10, turns, False, 9, 8, rows, torch.float32, cuda)
    settings = engine.Settings(precision="tf32x3", deterministic=True)
    dispatch.method(stack, "fused", "checkpoint", settings)
    assert sorted(made) == [(bool(turns), layers, "tf32x3", True) for layers in (1, 3)]


def test_calls_are_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(prepared, "_known", {})
    monkeypatch.setattr(prepared, "REMEMBERED", 2)
    function, weights = stack("h2", Random(0), 2, 2, 3)
    for batch in range(1, 6):
        function(Random(1)(batch, 4), *weights, backprop="reversible")
        assert 1 <= len(prepared._known) <= 2


@pytest.mark.parametrize("make", [hdnn.H1, hdnn.H2])
def test_what_inference_has_prepared_serves_training(make, monkeypatch):
    monkeypatch.setattr(prepared, "_known", {})
    net, y = make(4, 5), Random(0)(3, 4).float()
    with torch.inference_mode():
        wanted = net(y)
    out = net(y)
    out.sum().backward()
    assert torch.equal(out, wanted)
    assert all(p.grad is not None for p in net.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_a_state_that_has_outlived_a_transform_runs(training):
    net, y, seen = hdnn.H1(4, 5), Random(0)(3, 4).float(), []

    def watch(x: Tensor) -> Tensor:
        seen.append(x)
        return x.sum()

    torch.func.grad(watch)(y)
    with torch.set_grad_enabled(training):
        assert torch.equal(net(seen[0]), net(y))


def test_short_kernels_leave_threads_alone_that_kept_them_waiting(monkeypatch):
    pytest.importorskip("numba")
    work = cpu.Spread("forward", 4, cpu.PARALLEL_FROM, 2, torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(cpu, "_openmp", lambda *a: time.sleep(2e-3))
    monkeypatch.setattr(cpu, "_alone_until", 0.0)
    assert work._threads() == 2
    cpu._watched(None, 0, 2)
    assert work._threads() == 1
    monkeypatch.setattr(cpu, "_alone_until", 0.0)
    monkeypatch.setattr(cpu, "_openmp", None)
    assert work._threads() == 1  # a pool of Python's threads takes longer to wake
