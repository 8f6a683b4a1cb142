"""A fused stack is at home in PyTorch: what holds for the reference there holds for it too."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad

import hdnn
from hdnn import activations, engine, functional
from hdnn.errors import HDNNError, OptionError, ShapeError, StepError
from hdnn.networks import Network
from strategies import Random

F32, F64 = torch.float32, torch.float64
REFERENCE = {"engine": "reference", "backprop": "stored"}
NUMBA = importlib.util.find_spec("numba") is not None
ENGINES = ("auto", "fused") if NUMBA else ("auto",)
INVERTIBLE = ("h2", "h2_inverse", "verlet", "yoshida4", "ms1", "ms3")
STACKS = (*INVERTIBLE, "h1", "ms2")
needs_numba = pytest.mark.skipif(not NUMBA, reason="needs numba")


def stack(name: str, *, m: int = 2, N: int = 4, seed: int = 0, dtype: torch.dtype = F64):
    """The function of that name and random weights for it."""
    normal, n = Random(seed), 2 * m
    shapes = {
        "h1": [(N, n, n), (N, n)],
        "ms2": [(N, n, n), (N, n)],
        "ms1": [(N, m, m), (N, m), (N, m)],
    }.get(name, [(N, m, m), (N, m, m), (N, m), (N, m)])
    function: Callable[..., Tensor] = getattr(functional, name)
    return function, [0.5 * normal(*shape).to(dtype) for shape in shapes]


def state(*shape: int, seed: int = 1, dtype: torch.dtype = F64) -> Tensor:
    return Random(seed)(*shape).to(dtype)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def outcome(
    function: Callable[..., Tensor], tensors: list[Tensor], h: Any = 0.1, **options: Any
) -> list[Tensor]:
    """What a call returns, and its gradients in a fixed direction for those that want one."""
    out = function(*tensors, h, **options)
    wanted = [t for t in (*tensors, h) if isinstance(t, Tensor) and t.requires_grad]
    if not wanted:
        return [out]
    direction = state(*out.shape, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * direction).sum(), wanted)]


def close(ours: list[Tensor], expected: list[Tensor], tolerance: float = 1e-10) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# Data-parallel training

DDP = """
import os, sys
import torch
import torch.distributed as dist
import hdnn

rank, store, engine = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def model():
    torch.manual_seed(0)
    stacks = hdnn.H2(6, 5, engine=engine), hdnn.H1(6, 3, engine=engine)
    ends = torch.nn.Linear(3, 6), torch.nn.Linear(6, 2)
    return torch.nn.Sequential(ends[0], *stacks, ends[1]).double()

def gradients(net, x):
    for _ in range(2):  # DDP sorts its buckets anew after the first step
        net.zero_grad()
        net(x).square().mean().backward()
    return [p.grad for p in net.parameters()]

x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
alone = model()
for module in alone[1:3]:
    module.engine, module.backprop = "reference", "stored"
expected = gradients(alone, x)
ours = gradients(torch.nn.parallel.DistributedDataParallel(model()), x.chunk(2)[rank])
for a, b in zip(ours, expected, strict=True):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
print("equal", flush=True)
dist.barrier()  # nobody hangs up on the other
dist.destroy_process_group()
os._exit(0)  # gloo's threads do not always survive an orderly end
"""


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="needs gloo",
)
@pytest.mark.parametrize("engine_", ENGINES[-1:])
def test_two_processes_find_the_gradients_of_the_joined_batch(engine_, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DDP, str(rank), str(tmp_path / "store"), engine_],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert "equal" in out
    finally:
        for process in ranks:
            process.kill()
            process.wait()


# Precision


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_under_autocast_all_engines_agree(name, engine_):
    function, weights = stack(name, dtype=F32)
    y = state(5, 4, dtype=F32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = outcome(function, leaves(y, *weights), **REFERENCE)
        ours = outcome(function, leaves(y, *weights), engine=engine_)
    assert [t.dtype for t in ours] == [t.dtype for t in expected]
    assert all(t.dtype == F32 for t in ours[1:])  # as the parameters
    close(ours[:1], expected[:1], 2e-2)
    for a, b in zip(ours[1:], expected[1:], strict=True):
        assert float((a - b).abs().max()) <= 2e-2 * (1 + float(b.abs().max()))


@pytest.mark.parametrize("engine_", ENGINES)
def test_a_network_under_autocast_trains(engine_):
    net = hdnn.H2(4, 6, engine=engine_, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), net, torch.nn.Linear(4, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(state(8, 3, dtype=F32)).float().square().mean()
    loss.backward()
    for p in model.parameters():
        assert p.grad is not None
        assert p.grad.dtype == p.dtype
        assert torch.isfinite(p.grad).all()
        assert float(p.grad.abs().max()) > 0


HALVES: dict[str, Callable[..., Network]] = {
    "H2": lambda **o: hdnn.H2(4, 6, **o),
    "H2 with X": lambda **o: hdnn.H2(4, 6, X=Random(5)(2, 2), **o),
    "Verlet": lambda **o: hdnn.HamiltonianNet(4, 6, "verlet", **o),
    "MS1": lambda **o: hdnn.MS1(4, 6, **o),
    "H1": lambda **o: hdnn.H1(4, 6, **o),
    "MS2": lambda **o: hdnn.MS2(4, 6, **o),
}


@needs_numba
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_rounds_what_float32_finds_for_the_same_weights(name, dtype, training):
    net = HALVES[name](generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = copy.deepcopy(net).float()
    y = state(5, 4).to(dtype)
    eps = torch.finfo(dtype).eps
    with torch.set_grad_enabled(training):
        out = net(y)
        expected = by_reference(wide, y.float())
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=eps, atol=1e-2 * eps)
    if not training:
        return
    direction = state(5, 4, seed=9).to(dtype)
    (out * direction).sum().backward()
    (expected * direction.float()).sum().backward()
    for p, q in zip(net.parameters(), wide.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.dtype == dtype
        size = float(q.grad.abs().max())
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=2 * eps, atol=eps * size)


def by_reference(net: Network, y: Tensor) -> Tensor:
    return net.function(y, **net.weights(), activation=net.activation, **REFERENCE)


# Inference


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_inference_keeps_nothing(name, engine_, mode):
    function, weights = stack(name)
    tensors = leaves(state(5, 4), *weights)
    expected = function(*tensors, 0.1, **REFERENCE).detach()
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with mode(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = function(*tensors, 0.1, engine=engine_)
    assert packed == []
    assert out.grad_fn is None
    assert not out.requires_grad
    assert out.is_inference() == (mode is torch.inference_mode)
    close([out.clone()], [expected])


@pytest.mark.parametrize("engine_", ENGINES)
def test_a_call_without_gradients_leaves_the_next_one_its_own(engine_):
    function, weights = stack("h2")
    tensors = leaves(state(5, 4), *weights)
    expected = outcome(function, tensors, **REFERENCE)
    for mode in (torch.no_grad, contextlib.nullcontext, torch.inference_mode):
        with mode():
            function(*tensors, 0.1, engine=engine_)
        close(outcome(function, tensors, engine=engine_), expected)


# Memory layouts


def transposed(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.ndim > 1 else t


def strided(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0]


def every_other_layer(t: Tensor) -> Tensor:
    return torch.stack([t, torch.full_like(t, torch.nan)], 1).flatten(0, 1)[::2]


def one_for_all(t: Tensor) -> Tensor:
    return t[:1].expand(t.shape)


@pytest.mark.parametrize("layout", [transposed, strided, every_other_layer, one_for_all])
@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_any_memory_layout_is_read_right(name, engine_, layout):
    function, weights = stack(name)
    values = [state(6, 4), *weights]

    def laid_out(*tensors: Any, **options: Any) -> Tensor:
        *given, h = tensors
        return function(*(layout(t) for t in given), h, **options)

    ours = outcome(laid_out, leaves(*values), engine=engine_)
    close(ours, outcome(laid_out, leaves(*values), **REFERENCE))
    with torch.no_grad():
        close([laid_out(*values, 0.1, engine=engine_)], ours[:1])


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_any_gradient_that_comes_back_is_read_right(name, engine_):
    function, weights = stack(name)
    tensors = leaves(state(6, 4), *weights)
    for g in (torch.ones(()).double().expand(6, 4), state(4, 6).mT, strided(state(6, 4))):
        ours, expected = (
            torch.autograd.grad(function(*tensors, 0.1, **way), tensors, g)
            for way in ({"engine": engine_}, REFERENCE)
        )
        close(list(ours), list(expected))


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 0, 4), (2, 3, 4), (1, 4)])
def test_any_batch_shape(shape, engine_):
    for name in ("h2", "h1"):
        function, weights = stack(name)
        tensors = leaves(state(*shape), *weights)
        close(outcome(function, tensors, engine=engine_), outcome(function, tensors, **REFERENCE))


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("h", ["number", "all", "each", "expanded"])
def test_a_step_that_is_a_tensor_has_a_gradient(h, engine_):
    for name in STACKS:
        function, weights = stack(name)
        values = {"number": 0.1 + torch.zeros(()), "all": torch.full((4,), 0.1)}
        values |= {"each": torch.tensor([0.1, 0.2, 0.15, 0.05])}
        values |= {"expanded": torch.full((1,), 0.1)}
        leaf = values[h].double().requires_grad_()

        def run(*tensors: Any, function=function, **options: Any) -> Tensor:
            *rest, step = tensors
            return function(*rest, step.expand(4) if h == "expanded" else step, **options)

        tensors = leaves(state(5, 4), *weights)
        close(outcome(run, tensors, leaf, engine=engine_), outcome(run, tensors, leaf, **REFERENCE))


# Gradients, once, twice, and of each other


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_a_graph_can_be_kept_and_gradients_add_up(name, engine_):
    function, weights = stack(name)
    tensors = leaves(state(5, 4), *weights)
    loss = function(*tensors, 0.1, engine=engine_).square().sum()
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in tensors if t.grad is not None]
    loss.backward()
    twice = [t.grad for t in tensors if t.grad is not None]
    close(twice, [2 * t for t in once])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_the_gradient_of_a_gradient_is_that_of_the_reference(name, engine_):
    function, weights = stack(name)

    def second(way: dict[str, str]) -> list[Tensor]:
        tensors = leaves(state(3, 4), *weights)
        out = function(*tensors, 0.1, **way).square().sum()
        first = torch.autograd.grad(out, tensors, create_graph=True)
        penalty = sum((g.square().sum() for g in first), torch.zeros((), dtype=F64))
        penalty.backward()
        return [t.grad for t in tensors if t.grad is not None]

    close(second({"engine": engine_}), second(REFERENCE), 1e-8)


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_transforms_of_a_function_are_those_of_the_reference(name, engine_):
    function, weights = stack(name)
    y, K = state(3, 4), weights[0]

    def outcomes(way: dict[str, str]) -> list[Tensor]:
        def run(y: Tensor, K: Tensor) -> Tensor:
            return function(y, K, *weights[1:], 0.1, **way)

        def loss(y: Tensor, K: Tensor) -> Tensor:
            return run(y, K).square().sum()

        return [
            *torch.func.grad(loss, argnums=(0, 1))(y, K),
            torch.func.vmap(run, in_dims=(0, None))(y, K),
            torch.func.vmap(run, in_dims=(None, 0))(y, torch.stack([K, 2 * K])),
            torch.func.vmap(run)(torch.stack([y, 2 * y]), torch.stack([K, 2 * K])),
            *torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(y, K),
            torch.func.jacrev(run)(y[0], K),
            torch.func.jacrev(run, argnums=1)(y[0], K),
            torch.func.vmap(torch.func.jacrev(run), in_dims=(0, None))(y, K),
        ]

    close(outcomes({"engine": engine_}), outcomes(REFERENCE))


@pytest.mark.parametrize("name", STACKS)
def test_forward_mode_is_that_of_the_reference(name):
    function, weights = stack(name)
    values = [state(3, 4), *weights]
    directions = [state(*t.shape, seed=k) for k, t in enumerate(values)]

    def dual(**way: str) -> list[Tensor]:
        with forward_ad.dual_level():
            pairs = map(forward_ad.make_dual, values, directions)
            out = forward_ad.unpack_dual(function(*pairs, 0.1, **way))
            assert out.tangent is not None
            return [out.primal, out.tangent]

    def jvp(**way: str) -> list[Tensor]:
        return [
            *torch.func.jvp(lambda *a: function(*a, 0.1, **way), tuple(values), tuple(directions))
        ]

    function(*values, 0.1)  # the same shapes without a tangent: nothing of it may stay
    expected = dual(**REFERENCE)
    close(dual(), expected)
    close(jvp(), expected)
    jacobian = torch.func.jacfwd(lambda y: function(y, *weights, 0.1))(values[0][0])
    close(
        [jacobian],
        [torch.func.jacrev(lambda y: function(y, *weights, 0.1, **REFERENCE))(values[0][0])],
    )


@pytest.mark.parametrize("name", STACKS)
def test_forward_over_reverse_is_that_of_the_reference(name):
    function, weights = stack(name)
    y = state(4)

    def hessian(**way: str) -> Tensor:
        return torch.func.hessian(lambda y: function(y, *weights, 0.1, **way).square().sum())(y)

    close([hessian()], [hessian(**REFERENCE)])


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("name", STACKS)
def test_only_what_wants_a_gradient_gets_one(name, engine_):
    function, weights = stack(name)
    values = [state(5, 4), *weights]
    full = outcome(function, leaves(*values), engine=engine_)[1:]
    for k in range(len(values)):
        tensors = [t.detach().requires_grad_(i == k) for i, t in enumerate(values)]
        out = function(*tensors, 0.1, engine=engine_)
        (out * state(*out.shape, seed=9)).sum().backward()
        assert [t.grad is not None for t in tensors] == [i == k for i in range(len(values))]
        grad = tensors[k].grad
        assert grad is not None
        close([grad], [full[k]])
    assert not function(*values, 0.1, engine=engine_).requires_grad


@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("kind", [hdnn.H2, hdnn.H1])
def test_frozen_parameters_stay_without_gradients(kind, engine_):
    net = kind(4, 3, engine=engine_, dtype=F64).requires_grad_(False)
    y = state(5, 4).requires_grad_()
    net(y).sum().backward()
    assert y.grad is not None
    assert all(p.grad is None for p in net.parameters())
    net.b_p.requires_grad_() if hasattr(net, "b_p") else net.b.requires_grad_()
    net(y.detach()).sum().backward()
    assert sum(p.grad is not None for p in net.parameters()) == 1


# Tensors that are not numbers


@pytest.mark.parametrize("name", STACKS)
def test_fake_tensors_have_the_shape_of_the_result(name):
    function, weights = stack(name)
    values = [state(2, 3, 4, dtype=F32), *(w.float() for w in weights)]
    expected = function(*values, 0.1)  # the same shapes with numbers: nothing of it may stay
    with FakeTensorMode() as mode:
        out = function(*(mode.from_tensor(t) for t in values), 0.1)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.dtype, out.device) == (expected.shape, F32, expected.device)
    close([function(*values, 0.1)], [expected], 0.0)


@pytest.mark.parametrize("engine_", [None, *ENGINES])
@pytest.mark.parametrize("name", STACKS)
def test_weights_on_another_device_are_an_error_that_says_so(name, engine_):
    function, weights = stack(name)
    y = state(5, 4)
    function(y, *weights, 0.1, engine=engine_)
    for k in range(len(weights)):
        moved = [w.to("meta") if i == k else w for i, w in enumerate(weights)]
        with pytest.raises(ShapeError, match="meta"):
            function(y, *moved, 0.1, engine=engine_)
    with pytest.raises(ShapeError, match="meta"):
        function(y.to("meta"), *weights, 0.1, engine=engine_)


# Modules


@needs_numba
@pytest.mark.parametrize("kind", [hdnn.H2, hdnn.H1, hdnn.MS1])
def test_copies_and_state_dicts_of_a_fused_network_carry_everything(kind):
    net = kind(4, 5, engine="fused", dtype=F64, generator=torch.Generator().manual_seed(0))
    y = state(5, 4)
    net(y).sum().backward()
    twin = copy.deepcopy(net)
    assert (twin.engine, twin.backprop) == ("fused", net.backprop)
    assert torch.equal(twin(y), net(y))
    other = kind(4, 5, engine="fused", dtype=F64, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(other(y), net(y))
    other.load_state_dict({name: t.clone() for name, t in net.state_dict().items()})
    assert torch.equal(other(y), net(y))
    torch.testing.assert_close(by_reference(net, y), net(y), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine_", ENGINES)
def test_an_optimiser_that_changes_weights_in_place_changes_the_result(engine_):
    net = hdnn.H2(4, 5, engine=engine_, dtype=F64, generator=torch.Generator().manual_seed(0))
    optimiser, y = torch.optim.SGD(net.parameters(), lr=0.1), state(5, 4)
    for _ in range(3):
        optimiser.zero_grad()
        out = net(y)
        torch.testing.assert_close(out, by_reference(net, y), rtol=1e-10, atol=1e-10)
        out.square().sum().backward()
        optimiser.step()


@pytest.mark.parametrize("engine_", ENGINES)
def test_weights_changed_between_forwards_and_backwards_are_noticed(engine_):
    net = hdnn.H2(4, 5, engine=engine_, dtype=F64)
    out = net(state(5, 4))
    with torch.no_grad():
        net.K_p.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# torch.compile


# Dynamo itself makes an instance of each autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("engine_", ENGINES)
@pytest.mark.parametrize("kind", [hdnn.H2, hdnn.H1])
def test_one_compiled_graph_gives_the_eager_result_and_gradients(kind, engine_):
    torch._dynamo.reset()
    net = kind(4, 4, engine=engine_, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = state(5, 4)

    def run(net: Callable[[Tensor], Tensor]) -> list[Tensor]:
        module.zero_grad()
        out = net(y)
        out.square().sum().backward()
        return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    module = net
    close(run(torch.compile(net, fullgraph=True, backend="aot_eager")), run(net), 1e-9)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", [hdnn.H2, hdnn.H1])
def test_the_default_compiler_takes_a_fused_stack(kind):
    torch._dynamo.reset()
    net = kind(4, 4, engine=ENGINES[-1], generator=torch.Generator().manual_seed(0))
    y = state(5, 4, dtype=F32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's own
        out = torch.compile(net, fullgraph=True)(y)
        out.square().sum().backward()
    ours = [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    net.zero_grad()
    out = net(y)
    out.square().sum().backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    close(ours, [out.detach(), *grads], 1e-4)


# Threads and processes


@pytest.mark.parametrize("engine_", ENGINES)
def test_two_threads_that_train_at_once_do_not_disturb_each_other(engine_):
    def job(k: int) -> tuple[Callable[..., Tensor], list[Tensor]]:
        function, weights = stack(("h2", "h1")[k], N=20, seed=k)
        return function, leaves(state(64, 4, seed=7 + k), *weights)

    expected = [outcome(*job(k), **REFERENCE) for k in range(2)]
    found: list[list[list[Tensor]]] = [[], []]
    start = threading.Barrier(2)

    def work(k: int) -> None:
        function, tensors = job(k)
        start.wait(timeout=60)
        for _ in range(30):
            found[k].append(outcome(function, tensors, engine=engine_))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for k in range(2):
        assert len(found[k]) == 30
        for ours in found[k]:
            close(ours, expected[k])


def test_settings_of_one_thread_are_not_those_of_another():
    seen: list[engine.Settings] = []
    with engine.use(engine="reference", backprop="reversible"):
        thread = threading.Thread(target=lambda: seen.append(engine.current()))
        thread.start()
        thread.join(timeout=60)
    assert seen == [engine.Settings()]


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("batch", [5, 1500])
def test_a_forked_child_can_run_the_fused_engine(batch):
    # 1500 samples wake the engine's threads but none of PyTorch's own, which a fork does not
    # survive: with more elements the reference hangs in the child too.
    function, weights = stack("h2", m=8, N=6)
    tensors = leaves(state(batch, 16), *weights)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = outcome(function, tensors, engine="fused")  # the parent's threads run
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(60)  # a child that hangs ends
                close(outcome(function, tensors, engine="fused"), expected)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        close(outcome(function, tensors, engine="fused"), expected)
    finally:
        torch.set_num_threads(threads)


# What is remembered of one call never shows in another


DETAILS: dict[str, list[Any]] = {
    "name": [*STACKS],
    "seed": [0, 1, 2],
    "N": [1, 3],
    "batch": [1, 5],
    "dtype": [F32, F64],
    "h": [0.1, 0.25, 1, "all", "each", "tensor", "leaf"],
    "activation": ["tanh", "relu", "sin", "gelu", "identity"],
    "grad": ["none", "y", "weights", "all"],
    "X": [False, True],
    "J": [False, True],
    "inverse": [False, True],
    "trajectory": [False, True],
    "engine": [None, "reference", *ENGINES],
    "backprop": [None, "checkpoint", "reversible"],
    "settings": [{}, {"engine": "reference"}, {"precision": "tf32"}, {"backprop": "checkpoint"}],
}


@st.composite
def calls(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Calls one after the other, each like the one before it but for a detail."""
    call = {name: draw(st.sampled_from(values)) for name, values in DETAILS.items()}
    sequence = [call]
    for _ in range(draw(st.integers(3, 12))):
        name = draw(st.sampled_from([*DETAILS]))
        call = call | {name: draw(st.sampled_from(DETAILS[name]))}
        sequence.append(call)
    return sequence


def step(call: dict[str, Any]) -> Any:
    N, dtype = call["N"], call["dtype"]
    each = [0.1 + 0.05 * k for k in range(N)]
    tensors = {"tensor": torch.tensor(each, dtype=dtype), "all": (0.1,) * N, "each": each}
    if call["h"] == "leaf":
        return torch.tensor(each, dtype=dtype, requires_grad=True)
    return tensors.get(call["h"], call["h"])


def made(call: dict[str, Any], **way: Any) -> list[Tensor]:
    function, weights = stack(call["name"], N=call["N"], seed=call["seed"], dtype=call["dtype"])
    y = state(call["batch"], 4, seed=call["seed"], dtype=call["dtype"])
    wanted = call["grad"]
    values = [y.requires_grad_(wanted in ("y", "all"))]
    values += [w.requires_grad_(wanted in ("weights", "all")) for w in weights]
    options: dict[str, Any] = {"activation": call["activation"]} | way
    name = call["name"]
    if call["X"] and name in ("h2", "h2_inverse", "verlet", "yoshida4"):
        options["X"] = state(2, 2, seed=call["seed"] + 50, dtype=call["dtype"])
    if call["J"] and name == "h1":
        options["J"] = Random(call["seed"] + 60).skew(4).to(call["dtype"])
    if call["inverse"] and name in ("verlet", "yoshida4", "ms1", "ms3"):
        options["inverse"] = True
    if call["trajectory"]:
        options["trajectory"] = True
    return outcome(function, values, step(call), **options)


@given(calls())
@settings(max_examples=25)
def test_no_call_gives_what_another_should_have(sequence):
    for call in sequence:
        expected = made(call, **REFERENCE)
        backprop = call["backprop"]
        if backprop == "reversible" and call["name"] not in INVERTIBLE:
            backprop = "checkpoint"
        with engine.use(**call["settings"]):
            ours = made(call, engine=call["engine"], backprop=backprop)
        tolerance = 1e-9 if call["dtype"] == F64 else 2e-4
        for a, b in zip(ours, expected, strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert float((a - b).abs().max()) <= tolerance * (1 + float(b.abs().max()))


def after(first: dict[str, Any]) -> Iterator[tuple[Callable[..., Tensor], list[Tensor], str]]:
    """The same stack for each engine, after one good call of it."""
    for engine_ in ENGINES:
        function, weights = stack("h2")
        values = [state(5, 4), *weights]
        function(*values, **({"h": 1.0, "engine": engine_} | first))
        yield function, values, engine_


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (1.0, True),
        (1, True),
        ((1.0,) * 4, (1.0, True, 1.0, 1.0)),
        ([1.0] * 4, [1.0, 1.0, 1.0, True]),
        (1.0, -1.0),
        (0.5, float("nan")),
        ((0.5,) * 4, (0.5,) * 3),
        (torch.ones(4).double(), torch.ones(3).double()),
        (torch.ones(4).double(), torch.ones(4).long()),
        (1.0, "1.0"),
    ],
)
def test_a_step_that_is_none_is_refused_after_one_that_is_like_it(good, bad):
    for function, values, engine_ in after({"h": good}):
        with pytest.raises(HDNNError) as error:
            function(*values, bad, engine=engine_)
        assert isinstance(error.value, StepError | ShapeError)


def test_what_cannot_run_is_refused_after_what_can():
    for function, values, engine_ in after({}):
        y, K_p, *rest = values
        with pytest.raises(ShapeError, match="K_p"):
            function(y, K_p[..., :1], *rest, 1.0, engine=engine_)
        with pytest.raises(ShapeError, match="float32"):
            function(y, K_p.float(), *rest, 1.0, engine=engine_)
        with pytest.raises(ShapeError):
            function(y, [[1.0]], *rest, 1.0, engine=engine_)
        with pytest.raises(OptionError, match="tanhh"):
            function(*values, 1.0, engine=engine_, activation="tanhh")
        with pytest.raises(OptionError, match="backprop"):
            function(*values, 1.0, engine=engine_, backprop="magic")
        with pytest.raises(OptionError, match="engine"):
            function(*values, 1.0, engine="fussed")
        with engine.use(state="fixed"), pytest.raises(OptionError, match="reversible"):
            function(*values, 1.0, engine="auto", backprop="stored")


def test_an_activation_of_a_known_name_that_is_another_is_itself():
    sine = activations.get("sin")
    liar = activations.Activation("tanh", sine.sigma, sine.slope, sine.integral, -1.0, 1.0)
    function, weights = stack("h2")
    y = state(5, 4)
    expected = function(y, *weights, 0.1, activation="sin", **REFERENCE)
    function(y, *weights, 0.1)
    close([function(y, *weights, 0.1, activation=liar)], [expected])
    assert not torch.allclose(function(y, *weights, 0.1), expected)


def test_autocast_and_fixed_point_end_with_their_block():
    function, weights = stack("h2", dtype=F32)
    y = state(5, 4, dtype=F32)
    expected = [function(y, *weights, 0.1, **REFERENCE)]
    for block in (
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: engine.use(state="fixed"),
        lambda: torch.autocast("cpu", dtype=torch.float16),
    ):
        with block():
            close([function(y, *weights, 0.1)], expected, 2e-2)
        close([function(y, *weights, 0.1)], expected, 1e-6)


def test_a_step_tensor_that_changes_changes_the_result():
    for name in STACKS:
        function, weights = stack(name)
        y, h = state(5, 4), torch.full((4,), 0.1, dtype=F64)
        for _ in range(3):
            expected = function(y, *weights, h, **REFERENCE)
            for engine_ in ENGINES:
                close([function(y, *weights, h, engine=engine_)], [expected])
            h.add_(0.1)
        steps = [0.1] * 4
        for _ in range(3):
            expected = function(y, *weights, steps, **REFERENCE)
            for engine_ in ENGINES:
                close([function(y, *weights, steps, engine=engine_)], [expected])
            steps[1] += 0.1
