"""The kernels between the convolutions of a unit, against the unit itself in float64.

In Triton's interpreter on any machine, compiled where there is a GPU. Triton reads TRITON_INTERPRET
when it is imported, so that the interpreter gets a process of its own: this file, run as a program,
takes all cases and prints their errors.
"""

import copy
import itertools
import json
import os
import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hdnn
import interpreter
from hdnn.engine import dispatch, units
from hdnn.engine import drift as reversal
from hdnn.engine.drift import ReversalWarning
from hdnn.engine.kernels import convolutions, pixels
from hdnn.errors import TrainingError
from hdnn.networks.norm import BatchNorm
from hdnn.networks.unit import HamiltonianUnit

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 0.1}


def unit_errors(
    network, norm, *, channels=6, layers=2, size=(5, 4), batch=3, activation="tanh", step=0.3,
    kernel=3, work="float32", given="float32", sparse=False, backprop="stored", drop=False,
    device="cpu",
):  # fmt: skip
    """The relative errors of y_N, of the statistics and of all gradients.

    What comes out is changed in place before the backward pass, as nn.ReLU(inplace=True) does.
    """
    random = torch.Generator().manual_seed(channels + layers + batch)
    options = {"network": network, "norm": norm, "activation": activation, "step": step}
    options |= {"kernel": kernel, "backprop": "stored"}
    if sparse:
        options["sparsity"] = torch.eye(channels // 2) + torch.eye(channels // 2).roll(1, 1)
    exact = HamiltonianUnit(channels, layers, generator=random, dtype=torch.float64, **options)
    with torch.no_grad():
        for p in exact.parameters():
            if p.ndim == 2:
                p += 0.3 * torch.randn(p.shape, generator=random)
    fast = HamiltonianUnit(channels, layers, **{**options, "backprop": backprop}).to(device)
    fast.load_state_dict({k: v.float() for k, v in exact.state_dict().items()})
    draw = torch.randn(2, batch, channels, *size, generator=random).to(getattr(torch, given))
    y, g = draw[0].double().requires_grad_(), draw[1].double()
    factors = torch.randint(0, 3, (layers, batch), generator=random) / 1.5 if drop else None
    y_N, *seen = exact._run(y, factors)
    wanted = [y_N, *torch.autograd.grad(y_N, [y, *free(exact)], g)]
    y = draw[0].to(device).requires_grad_()
    schedule = fast._schedule(getattr(torch, work), backprop)
    given = schedule, fast._raw(), None if factors is None else factors.to(device)
    with mock.patch.object(units, "segment", return_value=2):
        out, *statistics = units.run(y, *given)
        assert out.dtype == y.dtype
        end = out.detach().clone()
        out.mul_(4)
        found = [end, *torch.autograd.grad(out, [y, *free(fast)], draw[1].to(device) / 4)]
    if seen:
        wanted, found = [*wanted, *seen], [*found, *statistics]
    with torch.no_grad():
        assert torch.equal(units.run(y, *given)[0], end)
    return [error(a, b) for a, b in zip(found, wanted, strict=True)]


def joined_errors(*unit, **options):
    """The same of a unit whose convolutions and passes are one kernel each."""
    gradient, few = convolutions.OneKernel.gradient, mock.patch.object(units, "TOGETHER", 3)
    with mock.patch.object(convolutions.OneKernel, "gradient", autospec=True) as called, few:
        called.side_effect = gradient
        found = unit_errors(*unit, **options)
    assert called.called
    return found


def free(unit):
    """The parameters, but for the biases that a normalisation takes off again."""
    return [p for name, p in unit.named_parameters() if not (name[0] == "b" and unit.normed)
            and not name.startswith("after")]  # fmt: skip


def error(found, wanted):
    wanted = wanted.detach()
    return float((found.detach().double().cpu() - wanted).norm() / wanted.norm().clamp_min(1e-30))


def glue_errors(*, channels=6, size=(8, 4), activation="identity", device="cpu"):
    """Of halving and of normalising, against PyTorch."""
    random = torch.Generator().manual_seed(channels)
    x, g = torch.randn(2, 3, channels, *size, generator=random, dtype=torch.float64)
    small = torch.randn(3, channels, size[0] // 2, size[1] // 2, generator=random)
    x.requires_grad_()
    gamma, beta = torch.randn(2, channels, generator=random, dtype=torch.float64)
    gamma.requires_grad_(), beta.requires_grad_()
    sigma = hdnn.activations.get(activation)
    z = sigma(F.batch_norm(x, None, None, gamma, beta, True, 0.0, 1e-5))
    half = F.avg_pool2d(x, 2)
    wanted = [half, *torch.autograd.grad(half, x, small.double())]
    wanted += [z, *torch.autograd.grad(z, (x, gamma, beta), g)]
    like = [t.detach().float().to(device).requires_grad_() for t in (x, gamma, beta)]
    half = pixels.Halve.apply(like[0])
    running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    z = pixels.Normalise.apply(*like, 1e-5, activation, running, 0.1)
    found = [half, *torch.autograd.grad(half, like[0], small.to(device))]
    found += [z, *torch.autograd.grad(z, like, g.float().to(device))]
    wanted += [0.1 * x.detach().mean((0, 2, 3)), 0.9 + 0.1 * x.detach().var((0, 2, 3))]
    return [error(a, b) for a, b in zip([*found, *running], wanted, strict=True)]


def stem_errors(*, device="cpu"):
    """Of a convolution and its normalisation, whose kernels leave out the bias."""
    torch.manual_seed(0)
    layer, norm = nn.Conv2d(3, 4, 3, bias=True), BatchNorm(4, "tanh")
    x = torch.randn(2, 3, 5, 6)

    def run(layer, norm, x):
        out = norm.after(layer, x)
        out.square().sum().backward()
        assert layer.bias.grad is not None
        assert float(layer.bias.grad.abs().max()) < 1e-6
        found = [out, layer.weight.grad, norm.weight.grad, norm.bias.grad]
        return [*found, norm.running_mean, norm.running_var]

    wanted = run(copy.deepcopy(layer).double(), copy.deepcopy(norm).double(), x.double())
    with mock.patch.object(pixels, "fuse", return_value=True):
        found = run(layer.to(device), norm.to(device), x.to(device))
    return [error(a, b) for a, b in zip(found, wanted, strict=True)]


def second_errors(network, norm, *, device="cpu"):
    """Gradients of gradients, which go by plain PyTorch."""
    torch.manual_seed(0)
    unit = HamiltonianUnit(4, 2, network=network, norm=norm, activation="tanh").to(device)
    y = torch.randn(2, 4, 3, 3, device=device, requires_grad=True)

    def twice(run):
        (g,) = torch.autograd.grad(run(y).square().sum(), y, create_graph=True)
        return torch.autograd.grad(g.square().sum(), [y, *free(unit)])

    work, factors = torch.float32, torch.tensor([[0.0, 1.25], [1.25, 1.25]], device=device)
    schedule = unit._schedule(work, "checkpoint")
    found = twice(lambda y: units.run(y, schedule, unit._raw(), factors)[0])
    wanted = twice(lambda y: unit._plain(work, factors, y, *unit._raw()))
    x = torch.randn(2, 4, 4, 4, device=device, requires_grad=True)
    ones = torch.ones(4, device=device, requires_grad=True)
    for function, other in (
        (pixels.Halve.apply, lambda x: F.avg_pool2d(x, 2)),
        (
            lambda x: pixels.Normalise.apply(x, ones, ones, 1e-5, "tanh"),
            lambda x: torch.tanh(F.batch_norm(x, None, None, ones, ones, True)),
        ),
    ):
        grads = []
        for one in (function, other):
            (g,) = torch.autograd.grad(one(x).pow(3).sum(), x, create_graph=True)
            grads.append(torch.autograd.grad(g.square().sum(), x)[0])
        found, wanted = (*found, grads[0]), (*wanted, grads[1])
    return [error(a, b.double().cpu()) for a, b in zip(found, wanted, strict=True)]


def extreme_errors(activation, *, device="cpu"):
    """Of sigma and its slope at huge arguments."""
    sizes = torch.tensor([0.0, 1.0, 17.3, 60, 88, 89, 100, 104, 1e4, 1e10, 1e38, 3e38])
    x = torch.cat([-sizes, sizes]).view(-1, 1, 1, 1).repeat(1, 2, 1, 1)
    sigma = hdnn.activations.get(activation)
    near = pixels.images(x.to(device))
    z, d, shift = torch.empty_like(near), torch.empty_like(near), torch.zeros(2, device=device)
    kernels = pixels.Pixels(near, activation)
    kernels.activate(near, z, shift)
    kernels.slope(near, torch.ones_like(near), d, shift)
    pairs = ((z, sigma(x.double())), (d, sigma.slope(x.double())))
    return [float(((a.cpu() - b) / b.abs().clamp_min(1)).abs().max()) for a, b in pairs]


def outcome(scale, expected, *, layers=12, device="cpu"):
    """Whether it is as expected what a reversible unit says of its gradients; K is that large."""
    torch.manual_seed(0)
    unit = HamiltonianUnit(4, layers, network="h2", step=1.0, backprop="reversible")
    with torch.no_grad():
        for p in unit.parameters():
            p *= scale
    unit, y = unit.to(device), torch.randn(2, 4, 3, 3).to(device).requires_grad_()

    def gradients(way):
        out, *_ = units.run(y, unit._schedule(torch.float32, way), unit._raw())
        return torch.autograd.grad(out.sum(), [y, *unit.parameters()])

    # As in a CUDA graph, in which nothing can be read.
    blind = mock.patch.object(reversal, "transformed", return_value=expected == "nan")
    with warnings.catch_warnings(record=True) as seen, blind:
        warnings.simplefilter("always", ReversalWarning)
        try:
            found = gradients("reversible")
        except TrainingError:
            return [float(expected != "error")]
    if seen:
        assert "inexact" in str(seen[0].message)
        return [float(expected != "warning")]
    if all(g.isnan().all() for g in found):
        return [float(expected != "nan")]
    assert expected == "exact"
    return [error(a, b.double().cpu()) for a, b in zip(found, gradients("stored"), strict=True)]


def kept(network, backprop, most, *, device="cpu"):
    """Whether four times the layers have the backward pass keep at most so many times as much."""
    sizes = []
    for layers in (4, 16):
        unit = HamiltonianUnit(2, layers, network=network, backprop=backprop).to(device)
        saved = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t, to=saved: to.append(t) or t, id)
        with hooks:
            y = torch.randn(2, 2, 1, 1, device=device, requires_grad=True)
            units.run(y, unit._schedule(torch.float32, backprop), unit._raw())
        sizes.append(sum(t.numel() for t in saved) - sum(p.numel() for p in unit.parameters()))
    return [0.0 if sizes[1] <= most * sizes[0] else sizes[1] / sizes[0]]


KINDS = {"unit": unit_errors, "joined": joined_errors, "glue": glue_errors, "second": second_errors}
KINDS |= {"stem": stem_errors, "extreme": extreme_errors, "outcome": outcome, "kept": kept}
STEPS = [0.1, 0.4, 0.2, 0.3]
HALF = {"work": "bfloat16"}
HALVES = {"work": "bfloat16", "given": "bfloat16"}
FINE = {"work": "float16"}
# Every two options that a kernel could mix up meet in some case, but not all of them in each.
GROUPS = {
    "norms": [
        ("unit", ("h1", "none"), {}),
        ("unit", ("h1", "inside"), {"step": STEPS[:2]}),
        ("unit", ("h2", "none"), {"step": STEPS[:2]}),
        ("unit", ("h2", "inside"), {}),
    ],
    "activations": [
        ("unit", unit, {"activation": activation, "layers": 1, "size": (2, 3)})
        for activation, unit in zip(
            dispatch.FUSED, itertools.cycle([("h1", "inside"), ("h2", "none")]), strict=False
        )
    ],
    "sizes": [
        ("unit", ("h1", "none"), {"channels": 34, "size": (1, 1), "batch": 1}),
        ("unit", ("h2", "inside"), {"channels": 40, "size": (3, 3), "batch": 9, "layers": 1}),
        ("unit", ("h1", "inside"), {"channels": 2, "size": (6, 1), "kernel": 5}),
        ("unit", ("h2", "none"), {"channels": 10, "size": (17, 16), "batch": 2, "kernel": 1}),
        ("unit", ("h1", "none"), {"sparse": True}),
        ("unit", ("h2", "inside"), {"sparse": True}),
        ("glue", (), {"channels": 20, "size": (2, 16)}),
        ("glue", (), {"channels": 33, "size": (6, 2), "activation": "relu"}),
        ("stem", (), {}),
    ],
    "half precision": [
        ("unit", ("h1", "none"), HALVES),
        ("unit", ("h1", "inside"), HALF),
        ("unit", ("h2", "none"), HALF),
        ("unit", ("h2", "inside"), HALVES),
    ],
    "joined": [
        ("joined", ("h2", "none"), options)
        for options in (
            {**FINE, "channels": 48, "drop": True, "given": "float16"},
            {**FINE, "channels": 96, "size": (3, 9), "layers": 1, "activation": "gelu"},
            {**FINE, "channels": 144, "size": (1, 70), "layers": 1, "batch": 1},
            {**FINE, "channels": 32, "size": (2, 3), "layers": 3, "backprop": "checkpoint"},
            {**FINE, "channels": 32, "size": (1, 1), "layers": 3, "backprop": "reversible"},
            {**HALF, "channels": 32, "size": (4, 3), "layers": 1, "activation": "silu"},
            {**HALVES, "channels": 48, "size": (4, 3), "layers": 1, "drop": True},
        )
    ],
    "rebuilt": [
        ("unit", ("h2", norm), {"backprop": "reversible", "size": (3, 4), **options})
        for norm, options in (
            ("none", {"layers": 3, "step": STEPS[:3]}),
            ("none", {**HALVES, "activation": "gelu"}),
            ("inside", {"layers": 3}),
            ("inside", HALF),
        )
    ],
    "left out": [
        ("unit", unit, {"drop": True, **options})
        for unit, options in (
            (("h1", "none"), {"step": STEPS[:2], **HALF}),
            (("h1", "inside"), {"channels": 10, "size": (9, 8), "batch": 5, "layers": 1}),
            (("h2", "none"), {"channels": 10, "size": (9, 8), "batch": 5, "layers": 1}),
            (("h2", "none"), {"layers": 3, "backprop": "reversible"}),
            (("h2", "inside"), {"step": STEPS[:2], **HALF}),
            (("h2", "inside"), {"layers": 3, "backprop": "reversible"}),
        )
    ],
    "checkpointed": [
        ("unit", unit, {"backprop": "checkpoint", "size": (3, 2), "layers": 3, **options})
        for unit, options in (
            (("h1", "none"), {"layers": 4, "step": STEPS, "drop": True}),
            (("h1", "none"), {**HALVES, "activation": "gelu"}),
            (("h1", "inside"), {"drop": True}),
            (("h1", "inside"), HALF),
            (("h2", "none"), {}),
            (("h2", "none"), HALF),
            (("h2", "inside"), {"layers": 4, "step": STEPS, "drop": True}),
            (("h2", "inside"), {**HALVES, "activation": "gelu"}),
        )
    ],
    "reversals": [
        ("outcome", (0.3, "exact"), {"layers": 4}),
        *(("outcome", given, {}) for given in ((1.5, "warning"), (3.0, "error"), (3.0, "nan"))),
    ],
    "memory": [
        ("kept", ("h1", "checkpoint", 2.4), {}),
        ("kept", ("h2", "checkpoint", 2.4), {}),
        ("kept", ("h2", "reversible", 1.0), {}),
    ],
    "huge arguments": [("extreme", (activation,), {}) for activation in dispatch.FUSED],
    "second derivatives": [
        ("second", (net, norm), {}) for net in ("h1", "h2") for norm in ("none", "inside")
    ],
}


def check(kind, arguments, options, errors):
    allowed = TOLERANCE[options.get("work", "float32")]
    assert all(one < allowed for one in errors), (kind, arguments, options, errors)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_kernels_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cases = [case for group in GROUPS.values() for case in group]
    for case, errors in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True):
        check(*case, errors)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
def test_the_kernels_on_a_gpu(group, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for kind, arguments, options in GROUPS[group]:
        check(kind, arguments, options, KINDS[kind](*arguments, **options, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["h1", "h2"])
@pytest.mark.parametrize("norm", ["none", "inside", "after", "both"])
@pytest.mark.parametrize("backprop", ["auto", "stored", "checkpoint", "reversible"])
def test_on_a_gpu_a_module_is_the_same_with_and_without_them(network, norm, backprop, monkeypatch):
    if (network, backprop) == ("h1", "reversible"):
        pytest.skip("H1 has no inverse")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    options = {"network": network, "norm": norm, "backprop": backprop}
    unit = HamiltonianUnit(12, 3, step=0.3, **options).cuda()
    y = torch.randn(5, 12, 8, 8, device="cuda", requires_grad=True)
    g = torch.randn(5, 12, 8, 8, device="cuda")  # the norm of what is normalised is constant
    assert unit._fuses(y)

    def all_of():
        before = {k: v.clone() for k, v in unit.state_dict().items()}
        out = unit(y)
        grads = torch.autograd.grad(out, [y, *free(unit)], g)
        after = [
            v.double()
            for k, v in unit.state_dict().items()
            if k not in dict(unit.named_parameters())
        ]
        unit.load_state_dict(before)
        return [out, *grads, *after]

    found = all_of()
    with hdnn.engine.use(engine="reference"):
        assert not unit._fuses(y)
        wanted = all_of()
    assert max(error(a, b.double().cpu()) for a, b in zip(found, wanted, strict=True)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("channels", "size"), [(96, 32), (112, 16), (144, 8)])
def test_on_a_gpu_one_kernel_is_as_exact_as_two(channels, size, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    options = {"network": "h2", "activation": "gelu", "backprop": "stored", "step": 0.5}
    unit = HamiltonianUnit(channels, 5, drop=0.3, **options).cuda()
    y, g = torch.randn(2, 25, channels, size, size, device="cuda", dtype=torch.bfloat16)
    y, factors = y.requires_grad_(), unit._factors(y)
    if not convolutions.joins(y[:, : channels // 2], 3, torch.bfloat16):
        pytest.skip("this GPU takes two kernels")

    def all_of(y, dtype):
        with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
            out = unit._run(y, factors)[0]
        return [out, *torch.autograd.grad(out, [y, *free(unit)], g.to(out.dtype))]

    found, again = all_of(y, torch.bfloat16), all_of(y, torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    with hdnn.engine.use(engine="reference"):
        wanted = all_of(y.detach().float().requires_grad_(), torch.float32)
    monkeypatch.setattr(convolutions, "joins", lambda *_: False)
    for one, two, exact in zip(found, all_of(y, torch.bfloat16), wanted, strict=True):
        exact = exact.double().cpu()
        assert error(one, exact) < 1.2 * error(two, exact) + 1e-3


@pytest.mark.gpu
def test_on_a_gpu_batch_norm_is_that_of_pytorch():
    torch.manual_seed(0)
    ours, theirs = BatchNorm(6, "relu").cuda(), nn.BatchNorm2d(6).cuda()
    for _ in range(3):
        x = torch.randn(4, 6, 5, 5, device="cuda")
        torch.testing.assert_close(ours(x), torch.relu(theirs(x)), rtol=1e-4, atol=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.eval()(x), torch.relu(theirs.eval()(x)))


def test_batch_norm_is_that_of_pytorch():
    ours, theirs = BatchNorm(3, "relu"), nn.BatchNorm2d(3)
    x = torch.randn(4, 3, 5, 5)
    assert torch.equal(ours(x), torch.relu(theirs(x)))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert torch.equal(ours.eval()(x), torch.relu(theirs.eval()(x)))
    assert repr(ours).endswith("relu)")


if __name__ == "__main__":
    pixels.PROGRAMS = 2  # each takes its time here
    interpreter.patch_once()
    cases = [case for group in GROUPS.values() for case in group]
    errors = [KINDS[kind](*some, **options) for kind, some, options in cases]
    sys.stdout.write(json.dumps(errors) + "\n")
