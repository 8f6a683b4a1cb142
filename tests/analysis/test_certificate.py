"""Certificates: what holds, what is violated, and what is honestly not known."""

from __future__ import annotations

import io
import json
import math
import sys

import pytest
import torch
from torch import nn

import hdnn
from hdnn import analysis, progress
from hdnn.analysis import certify
from hdnn.errors import DataError, OptionError, ShapeError
from law.strategies import Random

F64 = torch.float64


def h2(n: int = 4, N: int = 8, **options):
    return hdnn.H2(n, N, generator=torch.Generator().manual_seed(0), **options)


def blocks(count: int = 4, width: int = 3, **options):
    def F():
        return nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()
        )

    torch.manual_seed(0)
    return hdnn.Reversible(
        [hdnn.Leapfrog(F()) for _ in range(count)], **options
    )


# Networks


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "kind", ["H2", "MS1", "MS3", "H1", "MS2", "ImplicitH2"]
)
def test_what_is_proved_is_confirmed(kind, dtype):
    net = getattr(hdnn, kind)(
        4, 8, dtype=dtype, generator=torch.Generator().manual_seed(0)
    )
    certificate = certify(net)
    assert (certificate.status, certificate.holds, certificate.trouble) == (
        "holds",
        True,
        "",
    )
    assert certificate.smallest_norm >= 1 - 1e-12
    assert certificate.samples == 20
    assert certificate.dtype == str(dtype).removeprefix("torch.")
    assert certificate.violations == ()


def test_the_main_sentence_is_plain():
    certificate = certify(h2())
    assert certificate.summary.startswith(
        "At every layer, at least one direction of the gradient is not shrunk: this is proved"
    )
    assert "20 random points" in certificate.summary
    text = str(certificate)
    for word in ("eq:", "th:", "lem:", "e+"):
        assert word not in text
    large = h2(N=60, step=1.0, init="paper")
    assert "e+" not in certify(large).summary


def test_without_a_theorem_nothing_is_said_to_hold():
    certificate = certify(hdnn.MLP(4, 64, activation="sigmoid"))
    assert (certificate.status, certificate.holds) == ("not guaranteed", None)
    assert certificate.smallest_norm < 1e-6
    assert "every direction of the gradient is shrunk" in certificate.summary
    sine = certify(hdnn.H1(4, 8, activation="sin", step=0.01))
    assert (sine.status, sine.holds) == ("not guaranteed", None)
    assert "Nothing is proved" in sine.summary


def test_norms_are_those_of_the_matrices():
    net, y = h2(dtype=F64), Random(0)(6, 4)
    certificate = certify(net, y)
    sizes = analysis.norms(analysis.backward_sensitivity(net, y))[:-1]
    assert certificate.smallest_norm == pytest.approx(
        float(sizes.min()), rel=1e-12
    )
    assert certificate.largest_norm == pytest.approx(
        float(sizes.max()), rel=1e-12
    )
    layer, sample = certificate.smallest_at
    assert float(sizes[layer, sample]) == pytest.approx(
        certificate.smallest_norm
    )
    assert certificate.by_layer["layers"] == list(range(9))
    assert certificate.symplectic
    assert certificate.symplectic_defect < 1e-14


def test_a_model_is_certified_at_its_inputs():
    model = hdnn.Model(hdnn.Augment(2, 4), h2(), hdnn.SigmoidHead(4))
    x = torch.randn(50, 2)
    certificate = certify(model, x, samples=7, points="test points")
    assert certificate.holds
    assert "7 test points" in certificate.summary
    chosen = x[torch.linspace(0, 49, 7).round().long()].double()
    alone = certify(model.net.double(), model.embed(chosen))
    assert certificate.smallest_norm == pytest.approx(
        alone.smallest_norm, rel=1e-6
    )


def test_random_points_are_the_same_in_every_call():
    assert certify(h2()) == certify(h2())


def test_norms_far_beyond_float64_do_not_break_anything():
    certificate = certify(h2(4, 512, step=2.0, init="paper"))
    assert certificate.status in ("holds", "not known")
    assert not certificate.violations


def test_the_network_itself_is_left_alone():
    net, y = h2(), torch.randn(5, 4)
    before = [p.detach().clone() for p in net.parameters()]
    net.train()
    certify(net, y)
    assert net.training
    assert all(
        torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)
    )
    assert next(net.parameters()).dtype == torch.float32


# Not known


@pytest.mark.parametrize("factor", [0.1, 1.01])
def test_a_backward_hook_that_scales_gradients_makes_it_unknown(factor):
    net = h2()
    net.register_full_backward_hook(lambda module, gi, go: (factor * gi[0],))
    certificate = certify(net)
    assert (certificate.status, certificate.holds) == ("not known", None)
    assert "hook" in certificate.summary
    inside = certify(nn.Sequential(nn.Linear(2, 4), net), torch.randn(5, 2))
    assert inside["1"].status == inside.status == "not known"


def test_a_forward_hook_that_changes_values_makes_it_unknown_and_one_that_looks_does_not():
    net = h2()
    seen = []
    net.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert certify(net).status in (
        "holds",
        "not guaranteed",
    )  # a network may refuse any hook
    net.register_forward_hook(lambda module, args, out: 0.5 * out)
    assert certify(net).status == "not known"


class Squashed(hdnn.H2):
    def forward(self, y):
        return torch.tanh(super().forward(y))


def test_a_subclass_that_computes_something_else_does_not_hold():
    assert certify(Squashed(4, 4)).holds is None
    net = h2()
    net.forward = lambda y: 0.5 * y
    assert certify(net).holds is None


def made_by_exec(text: str, name: str):
    names = {"hdnn": hdnn}
    exec(text, names)
    return names[name]


def shrink(module, grad_in, grad_out):
    return (0.1 * grad_in[0],) if module.training else None


def with_a_hook_made_by_exec():
    net = h2()
    text = (
        "def f(m, gi, go):\n    return (0.1 * gi[0],) if m.training else None"
    )
    net.register_full_backward_hook(made_by_exec(text, "f"))
    return net


def with_hooks_of_parameters():
    net = h2()
    net.K_p.register_hook(lambda grad: 0 * grad)
    return net


def with_hooks_after_accumulation():
    net = h2()
    net.b_q.register_post_accumulate_grad_hook(lambda p: p.grad.zero_())
    return net


def with_hooks_of_a_wrapper():
    wrapper = nn.DataParallel(h2())
    wrapper.register_full_backward_hook(shrink)
    return wrapper


def with_hooks_of_a_compiled_module():
    compiled = torch.compile(h2())
    compiled.register_full_backward_hook(shrink)
    return compiled


def with_hooks_around_it():
    model = nn.Sequential(h2())
    model.register_full_backward_hook(shrink)
    return model


def of_a_class_made_by_exec():
    text = (
        "class S(hdnn.H2):\n"
        "    def forward(self, y):\n"
        "        return hdnn.H2.forward(self, y) * (0.1 if self.training else 1)"
    )
    return made_by_exec(text, "S")(4, 4)


def a_model_of_ones_own():
    class Small(hdnn.Model):
        def forward(self, x):
            return 0.1 * super().forward(x)

    return Small(hdnn.Augment(2, 4), h2(), hdnn.SigmoidHead(4))


@pytest.mark.parametrize(
    "make",
    [
        with_a_hook_made_by_exec,
        with_hooks_of_parameters,
        with_hooks_after_accumulation,
        with_hooks_of_a_wrapper,
        with_hooks_of_a_compiled_module,
        with_hooks_around_it,
        of_a_class_made_by_exec,
    ],
)
def test_whatever_can_change_gradients_keeps_a_certificate_from_holding(make):
    certificate = certify(make())
    assert certificate.holds is None
    assert certificate.status in ("not known", "not guaranteed")


def test_a_hook_on_all_modules_keeps_a_certificate_from_holding():
    register = nn.modules.module.register_module_full_backward_hook
    handle = register(shrink)
    try:
        assert certify(h2()).holds is None
    finally:
        handle.remove()
    assert certify(h2()).holds


def test_nothing_is_said_about_a_wrapper_or_a_model_of_ones_own():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = h2()

        def forward(self, y):
            return 0.1 * self.module(y)

    for model in (Wrapper(), a_model_of_ones_own()):
        summary = certify(model).summary
        assert "Nothing is said about the model as a whole" in summary
    assert certify(nn.DataParallel(h2())).parts == {}


def test_hooks_and_methods_of_ones_own_keep_images_and_blocks_from_holding():
    class Larger(hdnn.HamiltonianUnit):
        def _force(self, *args):
            return 1.5 * super()._force(*args)

    class Joined(hdnn.Leapfrog):
        def _joined(self, y, halves):
            return 1.3 * super()._joined(y, halves)

    images = torch.randn(2, 4, 6, 6)
    unit = hdnn.HamiltonianUnit(4, 2, network="h2")
    unit.K_p.register_hook(lambda grad: 0 * grad)
    assert certify(unit, images).holds is None
    assert certify(Larger(4, 2, network="h2"), images).holds is None
    assert certify(Joined(nn.Linear(2, 2)), torch.randn(3, 4)).holds is None


def test_states_that_are_not_finite_are_not_known():
    net = h2(N=40, step=10.0, activation="identity", dtype=F64)
    certificate = certify(net, torch.full((3, 4), 1e300, dtype=F64))
    assert certificate.status == "not known"
    assert "not finite" in certificate.summary
    assert json.loads(certificate.to_json())["smallest_norm"] is None


def test_what_overflows_in_its_own_dtype_alone_is_not_known():
    net = h2(N=40, step=10.0, activation="identity", dtype=torch.float32)
    certificate = certify(net, torch.full((3, 4), 1e30))
    assert certificate.status == "not known"


# Violated


def test_a_promise_that_the_numbers_contradict_is_violated(monkeypatch):
    class Damped(hdnn.H2):
        def guarantee(self):
            return hdnn.H2(2, 1).guarantee()

        def layer_jacobians(self, states, layers=slice(None)):
            return 0.9 * super().layer_jacobians(states, layers)

        def forward(self, y):
            return Shrink.apply(super().forward(y), 0.9**self.layers)

    certificate = certify(Damped(4, 5))
    assert (certificate.status, certificate.holds) == ("violated", False)
    assert certificate.summary.startswith("A GUARANTEE DOES NOT HOLD HERE")
    assert certificate.violations


class Shrink(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, factor):
        ctx.factor = factor
        return y.clone()

    @staticmethod
    def backward(ctx, *grads):
        return ctx.factor * grads[0], None


# Linear networks


def test_a_network_without_weights_is_said_to_be_linear():
    net = h2()
    with torch.no_grad():
        for weight in net.parameters():
            weight.zero_()
    certificate = certify(net)
    assert certificate.linear
    assert "a linear model would do the same" in certificate.summary
    assert certify(h2(init="paper")).linear is False
    assert (
        certify(net, torch.randn(3, 4)).linear is None
    )  # too few points to tell


def test_a_head_that_makes_much_of_little_is_not_linear():
    net = h2(T=1e-4)
    head = hdnn.SigmoidHead(4)
    model = hdnn.Model(hdnn.Augment(2, 4), net, head)
    x = 3 * torch.randn(50, 2)
    with torch.no_grad():
        head.weight.copy_(torch.eye(4)[:1])
    assert certify(model, x).linear
    unused = [k for k in range(4) if k not in model.augment.positions.tolist()]
    with torch.no_grad():
        head.weight.copy_(1e4 * torch.eye(4)[unused[:1]])
    assert not certify(model, x).linear


# Images, blocks and modules that hold them


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_units_are_certified_at_images(network):
    unit = hdnn.HamiltonianUnit(4, 6, network=network, activation="tanh")
    certificate = certify(unit, torch.randn(5, 4, 6, 6))
    assert certificate.status == "holds"
    assert certificate.samples == 3
    assert certificate.features == 144
    assert certificate.layers == 6
    zeros = torch.zeros(1, 4, 6, 6, dtype=F64)
    J = torch.autograd.functional.jacobian(unit.double(), zeros)
    exact = float(torch.linalg.svdvals(J.reshape(144, 144))[0])
    zero = certify(unit, torch.zeros(1, 4, 6, 6))
    assert zero.by_layer["largest"][0] == pytest.approx(exact, rel=0.05)
    assert zero.by_layer["largest"][0] <= exact * (1 + 1e-9)


@pytest.mark.parametrize(("kernel", "side"), [(3, 8), (11, 11)])
def test_units_are_certified_at_random_images_by_default(kernel, side):
    unit = hdnn.HamiltonianUnit(2, 3, kernel=kernel, padding=0)
    certificate = certify(unit)
    assert certificate.status == "holds"
    assert f"3 random {side} x {side} images" in certificate.summary
    assert certificate.features == 2 * side**2
    inside = certify(nn.Sequential(nn.Conv2d(3, 2, 1), unit))
    assert inside["1"].smallest_norm == certificate.smallest_norm


@pytest.mark.parametrize(
    ("make", "last"),
    [(h2, "7/8"), (lambda: hdnn.HamiltonianUnit(2, 3), "8/9")],
)
def test_a_person_who_waits_sees_how_far_it_is(make, last, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    certify(make())
    assert f"measuring the gradients {last}, 0 s" in terminal.getvalue()


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_norms_of_units_are_those_of_their_jacobian(network):
    options = {"activation": "tanh", "dtype": F64}
    unit = hdnn.HamiltonianUnit(4, 3, network=network, **options)
    y = Random(0)(1, 4, 3, 3)
    certificate = certify(unit, y)
    J = torch.autograd.functional.jacobian(unit, y).reshape(36, 36)
    # Lanczos takes a few steps only: its norms are lower bounds.
    exact = float(torch.linalg.matrix_norm(J, 2))
    norm = certificate.by_layer["largest"][0]
    assert 0.95 * exact <= norm <= exact * (1 + 1e-9)


def test_norms_of_small_blocks_are_exact():
    net = blocks(3, width=2).double()
    y = Random(0)(3, 4)
    certificate = certify(net, y)
    J = torch.func.vmap(torch.func.jacrev(net))(y)
    sizes = analysis.norms(J.detach())
    assert certificate.by_layer["smallest"][0] == pytest.approx(
        float(sizes.min()), rel=1e-9
    )
    assert certificate.by_layer["largest"][0] == pytest.approx(
        float(sizes.max()), rel=1e-9
    )


def test_blocks_whose_products_are_not_finite_are_not_known():
    class Overflowing(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1e300, dtype=F64))

        def forward(self, x):
            return self.scale**2 * x

    net = hdnn.Reversible([hdnn.Leapfrog(Overflowing())])
    certificate = certify(net, torch.ones(2, 4, dtype=F64))
    assert certificate.status == "not known"
    assert "not finite" in certificate.summary


def test_blocks_are_certified_at_states_with_their_arguments():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x, mask):
            return mask * torch.tanh(self.linear(x))

    net = hdnn.Reversible([hdnn.Leapfrog(Masked()) for _ in range(3)])
    y, mask = torch.randn(5, 6), torch.ones(5, 3)
    for inputs in ((y, mask), {"y": y, "mask": mask}):
        assert certify(net, inputs).status == "holds"
    with pytest.raises(DataError, match="does not run"):
        certify(net, y)


@pytest.mark.parametrize(
    "options", [{}, {"backprop": "reversible"}, {"state": "fixed"}]
)
def test_stacks_of_blocks_hold_however_they_are_differentiated(options):
    certificate = certify(blocks(**options), torch.randn(5, 6))
    assert certificate.status == "holds", certificate
    alone = certify(blocks(1), torch.randn(5, 6))
    assert alone.layers == 1


def test_a_hook_on_a_stack_or_random_numbers_in_it_make_it_unknown():
    net = blocks()
    net.register_full_backward_hook(lambda module, gi, go: (0.1 * gi[0],))
    assert certify(net, torch.randn(5, 6)).status != "holds"

    class Noise(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return x * self.w * torch.rand(())

    assert (
        certify(
            hdnn.Reversible([hdnn.Leapfrog(Noise())]), torch.randn(5, 6)
        ).status
        != "holds"
    )


def test_nodes_of_a_graph_that_depend_on_each_other_are_one_state():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return torch.tanh(self.linear(x - x.mean(0)))

    certificate = certify(
        hdnn.Reversible([hdnn.Leapfrog(Mean())] * 3), torch.randn(7, 4)
    )
    assert certificate.status == "holds"


def test_gradient_fields_are_symplectic():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, q):
            return torch.tanh(self.linear(q)).square().sum(-1)

    net = hdnn.Reversible(
        [hdnn.Leapfrog(hdnn.GradientField(Energy()), h=0.1)] * 4
    )
    certificate = certify(net, torch.randn(5, 6))
    assert certificate.symplectic
    assert certificate.symplectic_defect < 1e-12
    assert certify(blocks(), torch.randn(5, 6)).symplectic is None


def test_each_hamiltonian_part_of_a_module_has_its_own_certificate_and_the_whole_none():
    model = nn.Sequential(
        nn.Linear(3, 6), blocks(), nn.Linear(6, 4), h2(), nn.Linear(4, 2)
    )
    certificate = certify(model, torch.randn(10, 3))
    assert list(certificate.parts) == ["1", "3"]
    assert certificate.others == ("Linear x 3",)
    assert certificate.holds
    assert certificate["3"].points == "states that reach it"
    assert "2 of 2 Hamiltonian parts" in certificate.summary
    assert "Nothing is said about the model as a whole" in certificate.summary
    states = model[2](model[1](model[0](torch.zeros(1, 3))))
    one = certify(model, torch.zeros(1, 3))["3"]
    assert one.smallest_norm == pytest.approx(
        certify(model[3], states).smallest_norm, rel=1e-4
    )
    told = json.loads(certificate.to_json())
    assert told["parts"]["1"]["status"] == "holds"


def test_a_module_of_ones_own_that_embeds_its_inputs_is_no_model_of_hdnn():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.stack = nn.Embedding(5, 4), h2()

        def forward(self, ids):
            return self.stack(self.embed(ids))

    assert certify(Words(), torch.arange(5))["stack"].holds


def test_a_part_that_cannot_be_certified_is_not_known_and_so_is_the_module():
    model = nn.Sequential(nn.Linear(3, 6), blocks())
    certificate = certify(model)
    assert (certificate.status, certificate.holds) == ("not known", None)
    assert "pass the inputs" in certificate.summary
    assert certify(
        nn.Sequential(nn.Linear(3, 4), h2())
    ).holds  # at random states
    with pytest.raises(KeyError, match="2"):
        certificate["2"]


def test_a_module_without_hamiltonian_parts_has_no_guarantee():
    certificate = certify(nn.Linear(2, 2), torch.randn(3, 2))
    assert (certificate.status, certificate.holds) == ("not guaranteed", None)
    assert "holds no network" in str(certificate)


def test_compiled_modules_are_certified_as_they_are():
    assert certify(torch.compile(h2())).holds
    model = nn.Sequential(nn.Linear(3, 4), torch.compile(h2()))
    assert list(certify(model, torch.randn(5, 3)).parts) == ["1"]


# What a certificate is


def test_a_certificate_is_text_json_and_a_picture():
    certificate = certify(h2())
    told = json.loads(certificate.to_json())
    assert told["status"] == "holds"
    assert told["summary"] == certificate.summary
    assert told["bounds"][-1]["name"] == "budget"
    assert "norm(dy_N/dy_j)" in str(certificate)
    pytest.importorskip("matplotlib")
    assert len(certificate.plot().lines) >= 3


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        (("model",), OptionError, "nn.Module, but got str"),
        ((h2(), torch.ones(3, 5)), ShapeError, r"\(\*batch, 4\)"),
        ((h2(), "y"), ShapeError, "but got str"),
        ((h2(), torch.full((1, 4), math.nan)), DataError, "NaN or infinite"),
        (
            (blocks(), torch.full((1, 6), math.nan)),
            DataError,
            "NaN or infinite",
        ),
        ((blocks(), None), DataError, "at states"),
        (
            (nn.Sequential(nn.Linear(3, 4), h2()), torch.ones(3, 5)),
            DataError,
            "does not run on y",
        ),
    ],
)
def test_mistakes_are_one_sentence(inputs, error, words):
    with pytest.raises(error, match=words):
        certify(*inputs)


def test_weights_that_are_not_finite_are_named():
    net = h2()
    with torch.no_grad():
        net.K_p[0, 0, 0] = math.nan
    with pytest.raises(DataError, match="K_p is not finite"):
        certify(net)
