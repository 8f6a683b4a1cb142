"""Certificates of layers of any modules: what is promised, and whether it was seen."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import hdnn
from hdnn import Coupling, GradientField, Leapfrog, Reversible
from hdnn.analysis import block_certificate, certify, guarantee
from hdnn.errors import DataError
from hdnn.networks.promise import Guarantee

EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 4, 4]])


def mlp(d: int = 4, drop: float = 0.3) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(d), nn.Linear(d, 6), nn.GELU(), nn.Dropout(drop), nn.Linear(6, d)
    )


class Well(nn.Module):
    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(d, 7)

    def forward(self, x):
        return self.linear(x).cosh().log().sum(-1)


class Attention(nn.Module):
    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(d), nn.MultiheadAttention(d, 2, batch_first=True)

    def forward(self, x, mask=None):
        x = self.norm(x)
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


class Messages(nn.Module):
    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x, edge_index):
        start, end = edge_index
        return torch.tanh(self.linear(torch.zeros_like(x).index_add(0, end, x[start])))


class Own(nn.Module):
    """A module from a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x, *args):
        return self.function(x, *args)


def well(h: float = 0.3, d: int = 4) -> Leapfrog:
    return Leapfrog(GradientField(Well(d), scale=-1.0), h=h)


def jacobian(net, y, *args):
    """dy_N/dy_0 in denominator layout."""
    net = net.double().eval()
    y = y.double()
    args = [x.double() if x.is_floating_point() else x for x in args]
    with sdpa_kernel(SDPBackend.MATH):
        J = torch.func.jacrev(lambda v: net(v.view_as(y), *args).flatten())(y.flatten())
    return J.mT.detach()


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(["coupling", "one half", "energies"]),
    N=st.integers(1, 5),
    batch=st.integers(1, 4),
    tokens=st.sampled_from([(), (2,), (2, 3)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_small_states_have_the_norms_and_determinants_of_their_jacobians(
    kind, N, batch, tokens, dtype, seed
):
    torch.manual_seed(seed)
    block = {
        "coupling": lambda: Coupling(mlp(), mlp()),
        "one half": lambda: Coupling(None, mlp()),
        "energies": well,
    }[kind]
    net = Reversible([block() for _ in range(N)]).to(dtype)
    y = torch.randn(batch, *tokens, 8, dtype=dtype)
    found = certify(net, y)
    values = torch.stack([torch.linalg.svdvals(jacobian(net, one[None])) for one in y])
    assert found.status == "holds"
    assert found.volume
    assert found.log_determinant < 1e-10
    assert (found.samples, found.layers, found.features) == (batch, N, values.shape[1])
    by_layer = found.by_layer
    assert by_layer["smallest"][0] == pytest.approx(values[:, 0].min().item(), rel=1e-6)
    assert by_layer["largest"][0] == pytest.approx(values[:, 0].max().item(), rel=1e-6)
    assert found.smallest_singular_value <= values[:, -1].min().item() * (1 + 1e-6)
    assert values.log().sum(1).abs().max() < 1e-9  # the product of all singular values is 1
    assert found.symplectic is (True if kind == "energies" else None)
    assert (found.symplectic_defect is not None) == (kind == "energies")


@pytest.mark.parametrize("make", [lambda: Coupling(mlp(), mlp()), lambda: Leapfrog(mlp()), well])
def test_a_block_alone_has_a_certificate(make):
    block = make().train()
    found = certify(block, torch.randn(5, 8))
    assert found.status == "holds"
    assert found.layers == 1
    assert block.training  # and was certified in evaluation mode, without dropout
    assert guarantee(block) == block.guarantee()
    assert "not about one pair of tokens, pixels or nodes" in found.verdict
    assert "shears" in found.theorem


def test_the_defect_is_that_of_the_canonical_j_in_denominator_layout():
    torch.manual_seed(0)
    net, y = Reversible([well() for _ in range(4)]).double(), torch.randn(1, 8).double()
    Phi, J = jacobian(net, y), torch.zeros(8, 8).double()
    J[:4, 4:], J[4:, :4] = -torch.eye(4), torch.eye(4)
    assert torch.linalg.matrix_norm(Phi.mT @ J @ Phi - J, 2) < 1e-12
    found = certify(net, y)
    assert found.symplectic
    assert found.symplectic_defect < 1e-14
    assert "symplectic" in found.theorem


@pytest.mark.parametrize(
    ("F", "shape", "dim"),
    [
        (lambda: nn.Conv2d(2, 2, 3, padding=1), (3, 4, 3, 3), 1),
        (lambda: nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)), (3, 4, 3, 3), 1),
        (lambda: Attention(2), (3, 2, 4), -1),
        (lambda: torch.tanh, (3, 4), -1),
    ],
)
def test_samples_that_do_not_depend_on_each_other_count_one_by_one(F, shape, dim):
    torch.manual_seed(0)
    net, y = Reversible([Leapfrog(F(), dim=dim) for _ in range(2)]), torch.randn(shape)
    found = certify(net, y)
    assert (found.samples, found.features) == (3, y[0].numel())
    assert found.status == "holds"
    wanted = torch.linalg.svdvals(jacobian(net, y[:1]))[0].item()
    alone = certify(net, y[:1])
    assert alone.by_layer["smallest"][0] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    ("F", "y", "args"),
    [
        (lambda: Messages(), torch.randn(5, 8), (EDGES,)),
        (lambda: nn.BatchNorm1d(4, track_running_stats=False), torch.randn(5, 8), ()),
    ],
)
def test_samples_that_depend_on_each_other_are_one_state(F, y, args):
    torch.manual_seed(0)
    net = Reversible([Leapfrog(F()) for _ in range(3)])
    found = certify(net, (y, *args))
    assert (found.samples, found.features) == (1, 40)
    assert "as one state of 40 entries: its samples depend on each other" in found.points
    assert found.status == "holds"
    wanted = torch.linalg.svdvals(jacobian(net, y, *args))
    assert found.by_layer["smallest"][0] == pytest.approx(wanted[0].item(), rel=1e-6)
    assert found.smallest_singular_value <= wanted[-1].item() * (1 + 1e-6)


def test_states_that_are_not_split_into_samples_are_one_state():
    assert certify(Coupling(mlp()), torch.randn(8)).samples == 1
    found = certify(Coupling(nn.Tanh(), dim=0), torch.randn(6, 3))
    assert (found.samples, found.features, found.status) == (1, 18, "holds")


@pytest.mark.parametrize("kind", ["energies", "attention", "nodes"])
def test_large_states_are_measured_by_lanczos(kind, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(block_certificate, "DENSE", 16)
    monkeypatch.setattr(block_certificate, "STEPS", 24)
    net, y, args = {
        "energies": (Reversible([well(d=12) for _ in range(3)]), torch.randn(5, 24), ()),
        "attention": (
            Reversible([Coupling(Attention(), Attention()) for _ in range(2)]),
            torch.randn(4, 3, 8),
            (torch.zeros(3, 3),),
        ),
        "nodes": (
            Reversible([Leapfrog(Messages()) for _ in range(3)]),
            torch.randn(5, 8),
            (EDGES,),
        ),
    }[kind]
    found = certify(net, (y, *args))
    assert found.status == "holds"
    assert "norms by Lanczos from below" in found.points
    assert found.log_determinant is None
    if kind == "nodes":
        values = torch.linalg.svdvals(jacobian(net, y, *args))[None]
        assert found.samples == 1
    else:
        values = torch.stack([torch.linalg.svdvals(jacobian(net, one[None], *args)) for one in y])
        values = values[torch.linspace(0, len(y) - 1, 3).round().long()]
        assert found.samples == 3
    assert found.by_layer["largest"][0] == pytest.approx(values[:, 0].max().item(), rel=1e-6)
    assert found.smallest_singular_value <= values[:, -1].min().item() * (1 + 1e-6)
    assert found.symplectic is (True if kind == "energies" else None)


def test_masks_that_belong_to_samples_are_kept_with_them(monkeypatch):
    monkeypatch.setattr(block_certificate, "DENSE", 4)
    keep = torch.rand(5, 4) > 0.3
    gate = Own(lambda x, keep: torch.tanh(x) * keep)
    found = certify(Reversible([Leapfrog(gate)] * 2), (torch.randn(5, 8), keep))
    assert (found.samples, found.status) == (3, "holds")


def test_inference_mode_does_not_take_the_derivatives_away():
    net, y = Reversible([Leapfrog(Own(lambda x, gate: x.tanh() * gate))] * 3), torch.randn(3, 8)
    with torch.inference_mode():
        found = certify(net, (y.clone(), torch.ones(3, 4)))
    assert found == certify(net, (y, torch.ones(3, 4)))
    assert found.status == "holds"


# In a larger module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 8), nn.Linear(8, 2)
        self.net = Reversible([Leapfrog(Attention()) for _ in range(2)], backprop="reversible")
        self.spare = Coupling(mlp())
        self.h2 = hdnn.H2(8, 3)

    def forward(self, x, mask=None):
        return self.head(self.h2(self.net(self.embed(x), mask=mask)))


def test_a_stack_inside_of_a_module_is_certified_at_what_reaches_it_with_its_arguments():
    torch.manual_seed(0)
    module, x = Model().train(), torch.randn(4, 3, 3)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    found = certify(module, {"x": x, "mask": causal})
    assert [*found.parts] == ["net", "h2"]
    assert found.missing == {"spare": "the module did not call it for these inputs"}
    assert found["net"].status == found["h2"].status == "holds"
    assert found["net"].samples == 4
    assert found.others == ("Linear x 2",)
    alone = certify(module.net, {"y": module.embed(x), "mask": causal})
    assert found["net"].largest_norm == pytest.approx(alone.largest_norm, rel=1e-9)
    other = certify(module.net, module.embed(x))
    assert other.largest_norm != pytest.approx(alone.largest_norm, rel=1e-3)
    assert "The guarantee holds in 2 of 3 Hamiltonian parts" in str(found)
    assert json.loads(found.to_json())["certificates"]["net"]["volume"] is True
    without = certify(module)
    assert without.missing["net"].startswith("blocks are certified at states: give inputs")


def test_converted_models_are_certified():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=True)
    model = hdnn.to_reversible(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x = torch.randn(2, 3, 4)
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    found = certify(model, {"src": x, "mask": causal, "is_causal": True})
    assert [(name, one.status) for name, one in found.parts.items()] == [("layers.0.net", "holds")]


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_a_stack_in_a_wrapper_is_certified_as_it_is(wrap):
    net, y = Reversible([Coupling(mlp())]), torch.randn(3, 8)
    assert certify(wrap(net), y) == certify(net, y)
    assert [*certify(nn.Sequential(nn.Linear(8, 8), wrap(net)), y).parts]


def test_words_reports_and_pictures_have_no_trouble_with_it():
    found = certify(Reversible([well() for _ in range(3)]), torch.randn(4, 8))
    text = str(found)
    assert "determinant" in text
    assert "log |det dy_N/dy_j|" in text
    assert "a gradient shrinks to" in text
    assert "network      Reversible(3 blocks: Leapfrog(GradientField, h=0.3, dim=-1))" in text
    assert found.summary.startswith("From every layer on, some direction of the gradient keeps")
    assert json.loads(found.to_json())["log_determinant"] < 1e-10
    idle = certify(Reversible([Coupling(Own(torch.zeros_like))]), torch.randn(4, 8))
    assert idle.idle
    assert "pass their input on" in idle.summary
    pytest.importorskip("matplotlib")
    assert found.plot() is not None


# What does not hold, and what cannot be known


class Shrinking(Coupling):
    """Promises what it does not keep."""

    def forward(self, y, *args, **options):
        return 0.5 * super().forward(y, *args, **options)

    def guarantee(self):
        return Guarantee(True, "so it is said", "always")


def test_a_promise_that_is_not_kept_is_broken():
    found = certify(Shrinking(nn.Sequential(mlp(), nn.Tanh())), torch.randn(4, 8))
    assert found.status == "broken"
    assert found.volume is False
    assert any("det dy_N/dy_j = 1" in word for word in found.broken)
    assert "GUARANTEE DOES NOT HOLD" in found.summary


class Lie(torch.autograd.Function):
    """An energy with the gradient of something else."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().sum(-1)

    @staticmethod
    def backward(ctx, g):
        return g[..., None] * ctx.saved_tensors[0].roll(1, -1)


def test_gradients_of_no_energy_are_found_not_to_be_symplectic():
    F = GradientField(Own(Lie.apply))
    for n in (6, 160):
        found = certify(Reversible([Leapfrog(F)] * 2), torch.randn(3, n))
        assert found.symplectic is False
        assert "symplecticity" in " ".join(found.broken)


def test_nothing_is_promised_for_blocks_that_compute_in_their_own_way():
    class Own2(Coupling):
        def forward(self, y, *args, **options):
            return 0.5 * super().forward(y, *args, **options)

    block = Own2(mlp())
    assert not guarantee(block).holds
    found = certify(block, torch.randn(3, 8))
    assert found.status == "not guaranteed"
    assert found.volume is None
    assert found.log_determinant == pytest.approx(8 * math.log(2), rel=1e-9)
    stack = Reversible([block])
    assert not stack.guarantee().holds
    assert certify(stack, torch.randn(3, 8)).status == "not computed"


def test_hooks_that_change_what_a_block_computes_are_seen():
    net = Reversible([Coupling(mlp())])
    net.register_forward_hook(lambda module, args, out: 0.1 * out)
    found = certify(net, torch.randn(3, 8))
    assert found.status == "not computed"
    assert "is not its blocks one after the other" in found.unknown


@pytest.mark.parametrize(
    ("F", "said"),
    [
        (lambda x: nn.functional.dropout(x, 0.5, training=True), "two calls give two results"),
        (lambda x: x / 0, "the state y_1 is"),
        (lambda x: (x - x) / 0, "the state y_1 is NaN"),
    ],
)
def test_what_cannot_be_computed_never_holds(F, said):
    for n in (8, 400):
        found = certify(Reversible([Coupling(Own(F)), Coupling(nn.Tanh())]), torch.randn(3, n))
        assert found.status == "not computed"
        assert found.holds is None
        assert said in found.unknown
        assert "NOT KNOWN" in found.summary


def test_overflow_in_the_dtype_of_the_state_alone_is_seen():
    big = Own(lambda x: x * 1e30)
    found = certify(Reversible([Coupling(big, big), Coupling(big, big)]), torch.randn(2, 4))
    assert found.status == "not computed"
    assert "in float32, are not finite" in found.unknown


@pytest.mark.parametrize(
    ("net", "y", "said"),
    [
        (Reversible([Coupling(mlp())]), None, "give a tensor as y, not NoneType"),
        (Reversible([Coupling(mlp())]), torch.ones(0, 8), r"not \(0, 8\)"),
        (Reversible([]), torch.ones(2, 8), "no blocks, so there is nothing to certify"),
        (Coupling(nn.Tanh()), torch.full((2, 8), torch.nan), "NaN or infinite"),
        (Coupling(nn.Tanh()), torch.ones(2, 8) * 1j, "y is complex"),
        (
            Coupling(Own(lambda x: x @ torch.eye(4))),
            torch.ones(2, 8),
            r"it does not run in float64 \(RuntimeError",
        ),
    ],
)
def test_what_cannot_be_certified_gets_one_sentence(net, y, said):
    with pytest.raises(DataError, match=said) as raised:
        certify(net, y)
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith(".")


def test_a_module_that_rounds_in_another_dtype_is_not_reported_as_broken():
    half = Own(lambda x: torch.tanh(x.float()).to(x.dtype))
    found = certify(Reversible([Leapfrog(half)] * 3), torch.randn(3, 8))
    assert found.status == "holds"


# Rounding inside of modules


class RootMeanSquare(nn.Module):
    """As in Llama: the norm is computed in one dtype whatever the others are."""

    def __init__(self, d: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.linear = dtype, nn.Linear(d, d)

    def forward(self, x):
        h = x.to(self.dtype)
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)
        return torch.tanh(self.linear(h.to(x.dtype)))


def normed(n: int, dtype: torch.dtype, N: int = 6, kind=Coupling) -> Reversible:
    torch.manual_seed(0)
    make = partial(RootMeanSquare, n // 2, dtype)
    return Reversible([kind(make(), make()) for _ in range(N)])


@pytest.mark.parametrize("n", [6, 32, 200])
def test_what_modules_compute_in_float32_inside_holds_up_to_its_rounding(n):
    found = certify(normed(n, torch.float32), torch.randn(4, n))
    assert found.status == "holds"
    assert found.volume is (None if n == 200 else True)
    assert "computed in float32 inside" in found.points
    assert "computed in float32 inside" in str(found)


@pytest.mark.parametrize("n", [6, 200])
def test_energies_in_float32_inside_are_symplectic_up_to_its_rounding(n):
    torch.manual_seed(0)
    energy = nn.Sequential(RootMeanSquare(n // 2, torch.float32), Own(lambda x: x.sum(-1)))
    found = certify(Reversible([Leapfrog(GradientField(energy), h=0.3)] * 3), torch.randn(3, n))
    assert found.status == "holds"
    assert found.symplectic
    assert 1e-13 < found.symplectic_defect < 1e-5


@pytest.mark.parametrize("n", [6, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_computed_coarsely_inside_is_not_known(n, dtype):
    for kind in (Coupling, Shrinking):
        found = certify(normed(n, dtype, 2, kind), torch.randn(3, n))
        assert found.status == "not computed"
        assert found.volume is None
    found = certify(normed(n, dtype, 2)[0], torch.randn(3, n))
    assert f"its modules compute in {str(dtype)[6:]}, which rounds too much" in found.unknown
    assert certify(Shrinking(RootMeanSquare(n // 2, dtype)), torch.randn(3, n)).broken == ()


def test_what_is_broken_is_seen_in_float32_inside_too():
    for n in (6, 200):
        block = Shrinking(RootMeanSquare(n // 2, torch.float32))
        with torch.no_grad():
            block.F.linear.weight.zero_()
        assert certify(block, torch.randn(3, n)).status == "broken"


def test_constants_of_another_dtype_are_no_rounding():
    gate = Own(lambda x: torch.tanh(x * (2 * torch.ones(4)) * torch.tensor(0.5)))
    found = certify(Reversible([Leapfrog(gate)] * 2), torch.randn(3, 8))
    assert found.status == "holds"
    assert "inside" not in found.points


def test_rounding_in_a_backward_pass_alone_counts():
    class Rounding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g.float().to(g.dtype)

    rounding = Own(lambda x: torch.tanh(Rounding.apply(x)))
    found = certify(Reversible([Coupling(rounding, rounding)] * 3), torch.randn(3, 8))
    assert found.status == "holds"
    assert "computed in float32 inside" in found.points


# Hooks on a stack


def hooked(way: str, hook, dtype: torch.dtype = torch.float64) -> Reversible:
    net = normed(8, dtype, 3)
    getattr(net, way)(hook)
    return net


def on_tensor(change):
    """A forward hook that hooks the gradient of what comes out."""

    def hook(module, args, out):
        out.register_hook(change)

    return hook


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("way", "hook", "said"),
    [
        ("register_forward_hook", lambda m, x, out: 0.9995 * out, "what it computes"),
        ("register_forward_pre_hook", lambda m, x: (0.9995 * x[0],), "what it computes"),
        ("register_full_backward_hook", lambda m, g, u: (0.9995 * g[0],), "its gradients"),
        ("register_full_backward_pre_hook", lambda m, u: (0.9995 * u[0],), "its gradients"),
        ("register_forward_hook", on_tensor(lambda g: 0.9995 * g), "its gradients"),
    ],
)
def test_hooks_that_change_a_little_are_seen(way, hook, said, dtype):
    found = certify(hooked(way, hook, dtype), torch.randn(3, 8))
    assert found.status == "not computed"
    assert found.holds is None
    assert f"a hook changes {said}" in found.unknown


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("way", "hook"),
    [
        ("register_forward_hook", lambda m, x, out: None),
        ("register_forward_pre_hook", lambda m, x: None),
        ("register_full_backward_hook", lambda m, g, u: None),
        ("register_full_backward_pre_hook", lambda m, u: None),
        ("register_forward_hook", on_tensor(lambda g: None)),
    ],
)
def test_hooks_that_only_look_are_fine(way, hook, dtype):
    assert certify(hooked(way, hook, dtype), torch.randn(3, 8)).status == "holds"


def test_a_block_whose_hook_its_stack_does_not_call_is_seen():
    for way, hook in [
        ("register_forward_hook", lambda m, x, out: 0.9995 * out),
        ("register_full_backward_hook", lambda m, g, u: (0.9995 * g[0],)),
    ]:
        net = normed(8, torch.float64, 3)
        getattr(net[1], way)(hook)
        found = certify(net, torch.randn(3, 8))
        assert "is not its blocks one after the other" in found.unknown
        assert certify(net[1], torch.randn(3, 8)).status == "broken"


@pytest.mark.parametrize("options", [{"state": "fixed"}, {"backprop": "reversible"}])
def test_stacks_that_store_less_are_still_their_blocks(options):
    torch.manual_seed(0)
    net = Reversible([Coupling(mlp(drop=0), mlp(drop=0)) for _ in range(30)], **options)
    assert certify(net, torch.randn(3, 8)).status == "holds"


def test_results_that_are_no_states_get_one_sentence():
    for hook, said in [(lambda m, x, out: (out,), "tuple"), (lambda m, x, out: out[:1], "(1, 8)")]:
        net = hooked("register_forward_hook", hook)
        with pytest.raises(DataError, match=r"must give a state as y is, \(3, 8\), but gave") as e:
            certify(net, torch.randn(3, 8))
        assert said in str(e.value)
