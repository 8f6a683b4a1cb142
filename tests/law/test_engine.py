"""Every way to run a stack gives the values and the gradients of the definition.

The definition is the plain loop: engine="reference" with backprop="stored", which other tests
compare to sixty digits.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import hdnn
from hdnn import engine, functional
from law.strategies import ACTIVATIONS, Random, few, seeds

F64, F32 = torch.float64, torch.float32
DEFINITION = {"engine": "reference", "backprop": "stored"}
WAYS: list[dict[str, str]] = [
    {},
    *(
        {"engine": name, "backprop": backprop}
        for name in ("auto", "reference", "fused")
        for backprop in ("stored", "checkpoint", "reversible")
        if (name, backprop) != ("reference", "stored")
    ),
]
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
        return functional.ms2, [scale * normal.skew(N, n), normal(N, n), h]
    if name == "ms1":
        return functional.ms1, [scale * normal(N, m, m), normal(N, m), normal(N, m), h]
    weights = [scale * normal(N, r, m), scale * normal(N, m, m), normal(N, r), normal(N, m), h]
    if name == "ms3":
        return functional.ms3, weights
    function = getattr(functional, name)
    return lambda y, *w, **o: function(y, *w[:5], X=w[5], **o), [*weights, normal(m, m)]


def ways(name: str) -> list[dict[str, str]]:
    """Those that the stack has: without an explicit inverse none is reversible."""
    return [w for w in WAYS if name in INVERTIBLE or w.get("backprop") != "reversible"]


def gradients(function: Callable[..., Tensor], y: Tensor, weights: list, **options: Any):
    leaves = [t.detach().clone().requires_grad_() for t in (y, *weights)]
    out = function(*leaves, **options)
    generator = torch.Generator().manual_seed(9)
    direction = torch.randn(out.shape, generator=generator, dtype=F64).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * direction).sum(), leaves)


def assert_near(ours: Tensor, wanted: Tensor, tolerance: float, what: object = "") -> None:
    assert ours.shape == wanted.shape
    if wanted.numel():
        size = 1 + float(wanted.abs().max())
        assert float((ours.double() - wanted).abs().max()) <= tolerance * size, what


@settings(few, max_examples=15)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(1, 20), st.sampled_from(ACTIVATIONS), seeds
)
@example(m=2, r=3, N=70, activation="tanh", seed=0)
@example(m=8, r=16, N=4, activation="relu", seed=0)
@pytest.mark.parametrize("name", STACKS)
def test_all_ways_agree_with_the_definition(name, m, r, N, activation, seed):
    normal = Random(seed)
    function, weights = stack(name, normal, m, r, N)
    y = normal(2, 3, 2 * m)
    out, grads = gradients(function, y, weights, activation=activation, **DEFINITION)
    for way in ways(name):
        ours, our_grads = gradients(function, y, weights, activation=activation, **way)
        assert_near(ours, out, 1e-11, way)
        for a, b in zip(our_grads, grads, strict=True):
            assert_near(a, b, 1e-8, way)


@settings(few, max_examples=8)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 40), seeds)
@pytest.mark.parametrize("name", STACKS)
def test_all_ways_agree_with_the_definition_in_float32(name, m, N, batch, seed):
    normal = Random(seed)
    function, weights = stack(name, normal, m, m, N)
    if name in ("h2", "h2_inverse", "verlet", "yoshida4"):
        weights[-1] = weights[-1] / (1 + torch.linalg.matrix_norm(weights[-1], 2))
    scaled = [w / m**0.5 if w.ndim == 3 else w for w in weights]
    y = normal(batch, 2 * m)
    out, grads = gradients(function, y, scaled, **DEFINITION)
    for way in ways(name):
        ours, our_grads = gradients(function, y.float(), [w.float() for w in scaled], **way)
        assert ours.dtype == F32
        assert_near(ours, out, 1e-4, way)
        for a, b in zip(our_grads, grads, strict=True):
            assert a.dtype == F32
            assert_near(a, b, 2e-3, way)


@pytest.mark.parametrize("sizes", [(32, 300, 16), (80, 40, 6), (3, 1, 200)])
@pytest.mark.parametrize("name", ["h1", "h2"])
def test_wide_deep_and_large_stacks_agree_with_the_definition(name, sizes):
    m, batch, N = sizes
    normal = Random(0)
    function, weights = stack(name, normal, m, m, N)
    weights = [w / m**0.5 if w.ndim == 3 else w for w in weights]
    weights = [w / torch.linalg.matrix_norm(w, 2) if w.ndim == 2 and w.shape[0] == w.shape[1] else w
               for w in weights]  # fmt: skip
    y = normal(batch, 2 * m)
    out, grads = gradients(function, y, weights, **DEFINITION)
    for way in ways(name):
        ours, our_grads = gradients(function, y, weights, **way)
        assert_near(ours, out, 1e-11, way)
        for a, b in zip(our_grads, grads, strict=True):
            assert_near(a, b, 1e-8, way)


@pytest.mark.parametrize("h", [0.1, (0.1, 0.2, 0.3)])
@pytest.mark.parametrize("name", STACKS)
def test_steps_that_are_floats_keep_their_precision(name, h):
    function, weights = stack(name, Random(0), 2, 3, 3)
    k = next(i for i, w in enumerate(weights) if w.shape == (3,))
    weights[k] = h
    y = Random(1)(5, 4)
    expected = function(y, *weights, **DEFINITION)
    for way in ways(name):
        torch.testing.assert_close(function(y, *weights, **way), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", STACKS)
def test_second_derivatives_are_those_of_the_definition(name):
    normal = Random(0)
    function, weights = stack(name, normal, 2, 3, 3)
    leaves = [t.requires_grad_() for t in (normal(2, 4), *weights)]
    g = normal(2, 4).requires_grad_()
    directions = [normal(*leaf.shape) for leaf in leaves]

    def second(**way: str) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(function(*leaves, **way), leaves, g, create_graph=True)
        return torch.autograd.grad(first, [*leaves, g], directions)

    expected = second(**DEFINITION)
    for way in ways(name):
        torch.testing.assert_close(second(**way), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", STACKS)
def test_second_derivatives_are_those_of_finite_differences(name):
    normal = Random(0)
    function, weights = stack(name, normal, 2, 1, 2)
    leaves = [t.requires_grad_() for t in (normal(1, 4), *weights)]
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("name", STACKS)
def test_backward_twice_and_views_and_transforms(name):
    normal = Random(0)
    function, weights = stack(name, normal, 2, 3, 4)
    y = normal(4, 5).mT[:, :4]  # not contiguous
    wanted = torch.func.jacrev(lambda y: function(y, *weights, **DEFINITION))(y[0])
    for way in ways(name):

        def loss(y: Tensor, way=way) -> Tensor:
            return function(y, *weights, **way).square().sum()

        leaf = y.detach().requires_grad_()
        out = loss(leaf)
        (first,) = torch.autograd.grad(out, leaf, retain_graph=True)
        torch.testing.assert_close(torch.autograd.grad(out, leaf)[0], first)
        torch.testing.assert_close(torch.func.grad(loss)(y), first)
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(y), first)
        mapped = torch.func.vmap(lambda K: function(y, K, *weights[1:], **way))(  # noqa: B023
            torch.stack([weights[0]] * 2)
        )
        torch.testing.assert_close(mapped[1], function(y, *weights, **way))
        found = torch.func.jacrev(lambda y: function(y, *weights, **way))(y[0])  # noqa: B023
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", STACKS)
def test_what_is_behind_a_stack_may_work_in_place(name):
    function, weights = stack(name, Random(0), 2, 3, 4)
    y = Random(1)(5, 4)
    expected = torch.func.grad(lambda y: (2 * function(y, *weights, **DEFINITION)).sum())(y)
    for way in ways(name):
        leaf = y.clone().requires_grad_()
        function(leaf, *weights, **way).mul_(2).sum().backward()
        torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("name", INVERTIBLE)
def test_what_a_reversible_stack_keeps_does_not_grow_with_depth(name):
    def kept(N: int, **way: str) -> int:
        function, weights = stack(name, Random(0), 2, 3, N)
        y = Random(1)(50, 4).requires_grad_()
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            if (t.ndim == 2 and t.shape == y.shape) or (t.ndim == 3 and t.shape[1:] == y.shape):
                sizes[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            function(y, *weights, **way)
        return sum(sizes.values())

    for name_ in ("reference", "fused"):
        reversible = {"engine": name_, "backprop": "reversible"}
        assert kept(16, **reversible) == kept(256, **reversible) <= 2 * 50 * 4


def expanding(N: int) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients of a network whose reversal loses digits, the more the deeper it is."""
    normal = Random(0)
    K_p, K_q = (2.0 * normal(N, 8, 8).float() / 8**0.5 for _ in range(2))
    b, y = torch.zeros(N, 8), Random(1)(10, 16).float().requires_grad_()
    K_p.requires_grad_()

    def run(**way: str) -> tuple[Tensor, ...]:
        out = functional.h2(y, K_p, K_q, b, b, 0.5, **way)
        return torch.autograd.grad(out.sum(), [y, K_p])

    return run


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_a_reversal_that_drifts_warns_and_one_that_is_worthless_is_an_error(name):
    with pytest.warns(UserWarning):  # noqa: PT030  # in any words
        expanding(60)(engine=name, backprop="reversible")
    run = expanding(300)
    with pytest.raises(hdnn.HDNNError):
        run(engine=name, backprop="reversible")
    for way in ({}, {"backprop": "checkpoint"}, {"backprop": "stored"}):
        assert all(bool(g.isfinite().all()) for g in run(**way))


def test_by_default_gradients_of_a_network_that_expands_are_those_of_the_definition():
    run = expanding(40)
    for ours, wanted in zip(run(), run(**DEFINITION), strict=True):
        assert float((ours - wanted).norm() / wanted.norm()) < 1e-2


# Networks and settings


@pytest.mark.parametrize("kind", ["H1", "H2", "MS1", "MS2", "MS3"])
def test_networks_run_as_they_are_told_or_as_the_block_around_them_says(kind):
    def make(**options):
        random = torch.Generator().manual_seed(0)
        return getattr(hdnn, kind)(6, 5, dtype=F64, generator=random, **options)

    y = Random(1)(7, 6)
    wanted = make(**DEFINITION)(y)
    for way in ways({"H1": "h1", "MS2": "ms2"}.get(kind, "h2")):
        torch.testing.assert_close(make(**way)(y), wanted, rtol=1e-12, atol=1e-12)
        with engine.use(**way):
            torch.testing.assert_close(make()(y), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3", "bf16"])
def test_precision_and_determinism_can_be_asked_for_anywhere(precision):
    net, y = hdnn.H2(8, 4, generator=torch.Generator().manual_seed(0)), Random(1)(5, 8).float()
    with engine.use(precision=precision, deterministic=True):
        ours = net(y)
        again = torch.autograd.grad(net(y).sum(), [*net.parameters()])
        for a, b in zip(torch.autograd.grad(net(y).sum(), [*net.parameters()]), again, strict=True):
            assert torch.equal(a, b)
    torch.testing.assert_close(ours, net(y), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    "options",
    [{"engine": "fussed"}, {"backprop": "magic"}, {"precision": "fp8"}, {"engin": "fused"}],
)
def test_unknown_settings_are_refused(options):
    with pytest.raises((hdnn.HDNNError, TypeError)), engine.use(**options):
        pass


def test_a_stack_without_an_inverse_is_not_reversible():
    for name in ("h1", "ms2"):
        function, weights = stack(name, Random(0), 2, 2, 3)
        with pytest.raises(hdnn.HDNNError):
            function(Random(1)(5, 4).requires_grad_(), *weights, backprop="reversible")


# torch.compile

WARNED = "ignore:.*should not be instantiated:DeprecationWarning"


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, {}) for name in STACKS]
    + [("h1", {"backprop": "checkpoint"}), ("verlet", {"engine": "fused"})]
    + [("h2", {"backprop": "reversible"}), ("h2", {"engine": "reference"})],
)
def test_inside_compile_a_stack_has_the_gradients_of_the_definition(name, way):
    torch._dynamo.reset()
    function, weights = stack(name, Random(0), 2, 3, 6)
    y = Random(1)(5, 4)
    expected = gradients(function, y, weights, **DEFINITION)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, y, weights, **way)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_model_compiles_with_the_default_backend_and_learns():
    torch._dynamo.reset()
    net = hdnn.H2(8, 16, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(net, torch.nn.Linear(8, 1))
    y = Random(1)(12, 8).float()
    wanted = torch.autograd.grad(model(y).square().sum(), [*model.parameters()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own
        out = torch.compile(model, fullgraph=True)(y)
        found = torch.autograd.grad(out.square().sum(), [*model.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)
