"""Reversal that can be trusted: gradients are right, or there is a warning or an error."""

import copy
import random
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import hdnn
from hdnn import Coupling, GradientField, Leapfrog, Reversible
from hdnn.errors import GridWarning, OptionError, ReversalWarning, ShapeError

D = 4
F64 = torch.float64
MODES = [
    ("reversible", "float"),
    ("reversible", "fixed"),
    ("checkpoint", "float"),
]
every_mode = pytest.mark.parametrize(("backprop", "state"), MODES)
every_state = pytest.mark.parametrize("state", ["float", "fixed"])


def mlp(d=D):
    return nn.Sequential(
        nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Tanh(), nn.Linear(2 * d, d)
    )


def stack(make=mlp, blocks=3, **options):
    torch.manual_seed(0)
    return Reversible(
        [Coupling(make(), make()) for _ in range(blocks)], **options
    ).double()


def state_of(*scales):
    torch.manual_seed(1)
    halves = [
        scale * torch.randn(5, D, dtype=F64) for scale in scales or (1, 1)
    ]
    return torch.cat(halves, -1).requires_grad_()


def gradients(net, y, *args, **options):
    torch.manual_seed(2)
    out = net(y, *args, **options)
    leaves = [y, *(p for p in net.parameters() if p.requires_grad)]
    return torch.autograd.grad(out.square().sum(), leaves)


def assert_same(net, y, *args, **options):
    """The gradients are those of stored states."""
    other = copy.deepcopy(net)
    other.backprop = "stored"
    ones, others = (
        gradients(net, y, *args, **options),
        gradients(other, y, *args, **options),
    )
    for a, b in zip(ones, others, strict=True):
        torch.testing.assert_close(a, b)


# Gradients of energies


class Keyed(nn.Module):
    """An energy of x and of keys, which may depend on x too."""

    def forward(self, x, keys):
        return (x * keys).sum(-1) + x.square().sum(-1)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys = nn.Linear(D, D)
        self.field = GradientField(Keyed())

    def forward(self, x):
        return self.field(x, self.keys(x))


def test_a_gradient_field_is_the_partial_derivative_in_every_mode():
    torch.manual_seed(0)
    module, x = Attending().double(), torch.randn(3, D, dtype=F64)
    expected = module.keys(x) + 2 * x
    results = {
        "eager": module(x.clone().requires_grad_()),
        "compiled": torch.compile(module, backend="eager")(
            x.clone().requires_grad_()
        ),
        "vmap": torch.func.vmap(module)(x),
    }
    with forward_ad.dual_level():
        dual = module(forward_ad.make_dual(x, torch.ones_like(x)))
        results["dual"], tangent = forward_ad.unpack_dual(dual)
        torch.testing.assert_close(
            tangent, module.keys.weight.sum(1) + 0 * x + 2
        )
    with torch.no_grad():
        results["no_grad"] = module(x)
        results["no_grad, leaf"] = module(x.clone().requires_grad_())
    with torch.inference_mode():
        results["inference"] = module(x)
    for mode, result in results.items():
        torch.testing.assert_close(result, expected, msg=mode)


def test_the_jacobian_of_a_gradient_field_counts_its_arguments():
    torch.manual_seed(0)
    module, x = Attending().double(), torch.randn(D, dtype=F64)
    J = torch.autograd.functional.jacobian(module, x)
    torch.testing.assert_close(
        J, module.keys.weight + 2 * torch.eye(D, dtype=F64)
    )


# Drift


def test_dark_lines_in_an_image_are_no_drift():
    torch.manual_seed(0)
    blocks = [
        Coupling(nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.ReLU()), dim=1)
    ]
    blocks += [
        Coupling(
            None, nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.ReLU()), dim=1
        )
    ]
    blocks += [
        Coupling(nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.ReLU()), dim=1)
    ]
    for block in blocks:
        for weight in block.parameters():
            weight.data.mul_(30.0)
    y = torch.randn(2, 4, 6, 6, 6)
    y[..., 2:4, :] *= 1e-4
    net = Reversible(blocks, backprop="reversible")
    y.requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (g,) = torch.autograd.grad(net(y).square().sum(), y)
    net.backprop = "stored"
    (expected,) = torch.autograd.grad(net(y).square().sum(), y)
    torch.testing.assert_close(g, expected)


def expanding(gain, **options):
    torch.manual_seed(0)
    net = Reversible(
        [Coupling(nn.Linear(D, D), nn.Linear(D, D)) for _ in range(8)],
        backprop="reversible",
        **options,
    )
    for weight in net.parameters():
        weight.data.mul_(gain)
    return net


def test_a_small_sample_is_judged_by_its_own_size():
    """Its neighbour is a million times larger, and its own first state is lost."""
    net = expanding(2.5)
    for weight in net.parameters():
        if weight.ndim == 1:
            weight.data.zero_()
    small = torch.full((1, 2 * D), 1e-3)
    y = torch.cat([1e6 * torch.randn(1, 2 * D), small])
    with warnings.catch_warnings(record=True, action="always") as alone:
        net(small.clone().requires_grad_()).sum().backward()
    with warnings.catch_warnings(record=True, action="always") as together:
        net(y.requires_grad_()).sum().backward()
    assert alone
    assert together


def test_inexact_gradients_are_a_warning_and_worthless_ones_an_error():
    y = torch.randn(3, 2 * D, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expanding(1.0)(y).sum().backward()
    with pytest.warns(ReversalWarning, match=r"off by .* inexact"):
        expanding(2.5)(y).sum().backward()
    with pytest.raises(OptionError, match=r"off by .* worthless"):
        expanding(12.0)(y).sum().backward()
    expanding(4.0, state="fixed")(y).sum().backward()


@pytest.mark.parametrize("unmoved", [1, 3])
@pytest.mark.parametrize("half", [0, 1])
def test_a_half_is_the_given_one_until_it_moves(half, unmoved):
    """A half of zeros would cross the kink of ReLU by rounding on the way back."""
    torch.manual_seed(0)
    relu = [nn.Sequential(nn.ReLU(), nn.Linear(D, D)) for _ in range(12)]
    fields = [(None, F) if half == 0 else (F, None) for F in relu[:unmoved]]
    fields += [(F, mlp()) for F in relu[unmoved:]]
    net = Reversible([Coupling(*pair) for pair in fields])
    start = nn.Parameter(torch.zeros(D))
    other = torch.randn(64, D)

    def gradient(backprop):
        net.backprop = backprop
        halves = [start.expand(64, D), other]
        y = torch.cat(halves[:: 1 - 2 * half], -1)
        weights = [start, *relu[unmoved - 1].parameters()]
        return torch.autograd.grad(net(y).square().sum(), weights)

    torch.testing.assert_close(
        gradient("reversible"), gradient("stored"), rtol=1e-3, atol=0
    )


@pytest.mark.parametrize("N", [4, 12])
@pytest.mark.parametrize(
    "zeros", [slice(0, D), slice(D, None), slice(None, None, 2)]
)
def test_entries_that_have_not_moved_come_back_to_the_last_bit(zeros, N):
    """Modules that begin and end in ReLU leave zeros at its kink for many layers."""
    relu = [
        Coupling(*[nn.Sequential(nn.ReLU(), nn.Linear(D, D), nn.ReLU())] * 2)
        for _ in range(N)
    ]
    torch.manual_seed(0)
    net = Reversible(relu)
    for weight in net.parameters():
        nn.init.normal_(weight, std=0.3)
    y = torch.randn(64, 2 * D)
    y[:, zeros] = 0
    y.requires_grad_()
    expected = gradients(net, y)
    net.backprop = "reversible"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rebuilt = gradients(net, y)
    for a, b in zip(rebuilt, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.norm()))


def test_a_state_that_is_not_finite_gives_gradients_that_are_not_and_no_error():
    net = stack(backprop="reversible")
    y = state_of()
    loss = (net(y) * torch.inf).sum()
    loss.backward()
    y = state_of().detach()
    y[0, 0] = torch.inf
    net(y.requires_grad_()).sum().backward()
    assert not y.grad.isfinite().all()


# The grid


def test_states_that_are_too_small_for_the_grid_are_a_warning():
    net = stack(state="fixed")
    small = torch.full((2, 2 * D), 1e-13, dtype=F64)
    half = small.clone()
    half[:, D:] = 1.0
    for y in (small, torch.cat([small, torch.ones_like(small)]), half):
        with pytest.warns(GridWarning, match=r"of y_0 is at most 1.0e-13"):
            net(y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(torch.zeros(2, 2 * D, dtype=F64))


@pytest.mark.parametrize("backprop", ["stored", "checkpoint", "reversible"])
def test_a_state_that_leaves_the_grid_is_an_error(backprop):
    net = Reversible(
        [Leapfrog(nn.Identity()) for _ in range(9)],
        state="fixed",
        backprop=backprop,
    )
    with pytest.raises(OptionError, match="left the fixed-point grid"):
        net(torch.full((2, 4), 1e5, requires_grad=True))


# Modules that are not the same twice


class OwnDropout(nn.Module):
    """Dropout from a generator of its own, behind a small layer scale."""

    def __init__(self, scale):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.scale = scale
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        mask = torch.rand(x.shape, generator=self.generator) > 0.5
        return self.scale * mask * self.linear(x)


@pytest.mark.parametrize("scale", [1.0, 1e-5, 1e-9])
@every_state
def test_a_module_that_draws_differently_the_second_time_is_an_error(
    scale, state
):
    torch.manual_seed(0)
    blocks = [Coupling(OwnDropout(scale), OwnDropout(scale)) for _ in range(4)]
    net = Reversible(blocks, backprop="reversible", state=state)
    with pytest.raises(
        OptionError, match=r"of block . did not compute the same a second time"
    ):
        net(
            torch.randn(32, 2 * D, requires_grad=True)
        ).square().sum().backward()


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) * random.random()


@every_state
def test_a_module_that_is_not_the_same_twice_fails_at_every_attempt(state):
    net = stack(lambda: Other(D, D), 1, backprop="reversible", state=state)
    loss = net(state_of()).square().sum()
    for _ in range(2):
        with pytest.raises(
            (OptionError, ReversalWarning), match="a second time"
        ):
            loss.backward(retain_graph=True)


def test_weights_of_spectral_norm_that_move_in_each_call_are_found_on_the_grid():
    norm = nn.utils.parametrizations.spectral_norm
    torch.manual_seed(0)
    net = Reversible([Coupling(norm(nn.Linear(64, 64))) for _ in range(2)])
    net.backprop, net.state = "reversible", "fixed"
    y = torch.randn(3, 128, requires_grad=True)
    with pytest.raises(OptionError, match="did not compute the same"):
        net(y).sum().backward()
    net.eval()(y).sum().backward()
    assert y.grad.isfinite().all()


@every_mode
@pytest.mark.parametrize(
    "lazy",
    [lambda: nn.LazyLinear(D), lambda: nn.LazyBatchNorm1d(affine=False)],
)
def test_lazy_modules_draw_the_dropout_of_their_first_call_again(
    lazy, backprop, state
):
    def first_pass(backprop):
        torch.manual_seed(0)
        blocks = [
            Coupling(nn.Sequential(lazy(), nn.Dropout(0.5))) for _ in range(3)
        ]
        net = Reversible(blocks, backprop=backprop, state=state)
        y = torch.randn(6, 2 * D).requires_grad_()
        net(y).square().sum().backward()
        return [y.grad, *net.buffers()]

    torch.testing.assert_close(first_pass(backprop), first_pass("stored"))


# Changes in place


@every_state
def test_weights_that_change_before_the_backward_pass_are_an_error(state):
    net = stack(backprop="reversible", state=state)
    loss = net(state_of()).sum()
    with torch.no_grad():
        net[1].F[1].weight.mul_(1 + 1e-9)
    with pytest.raises(
        OptionError,
        match=r"weights of F of block 1 changed .* optimiser's step",
    ):
        loss.backward()


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("backprop", ["checkpoint", "reversible"])
def test_weights_that_change_between_two_backward_passes_are_an_error(
    backprop, blocks
):
    net = stack(lambda: nn.Linear(D, D), blocks, backprop=backprop)
    loss = net(state_of()).square().sum()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(3)
    with pytest.raises((OptionError, RuntimeError), match=r"changed|modified"):
        loss.backward()


@pytest.mark.parametrize("backprop", ["checkpoint", "reversible"])
@every_state
def test_a_module_that_writes_into_its_input_is_an_error(backprop, state):
    net = Reversible(
        [Coupling(nn.ReLU(inplace=True))], backprop=backprop, state=state
    )
    with pytest.raises(
        OptionError, match=r"of block 0 changed its input in place.*inplace=F"
    ):
        net(torch.randn(3, 4, requires_grad=True))
    with torch.inference_mode():  # where it cannot be seen, modules get copies
        y = torch.randn(3, 4)
        torch.testing.assert_close(net(y), Reversible([Coupling(nn.ReLU())])(y))


class Emptied(nn.Linear):
    """Changes what its gradient is computed from, after it was used."""

    def forward(self, x):
        mask = torch.ones_like(x)
        out = super().forward(x) * mask
        mask.zero_()
        return out


@every_state
def test_a_module_that_overwrites_what_its_gradient_needs_is_an_error(state):
    net = stack(lambda: Emptied(D, D), 1, backprop="reversible", state=state)
    with pytest.raises(
        OptionError, match="changes in place a tensor that its own gradient"
    ):
        net(state_of()).sum().backward()


# Modules as they were in the forward pass


class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@every_mode
def test_a_counter_in_a_buffer_counts_once(backprop, state):
    net = stack(lambda: Counting(D, D), backprop=backprop, state=state)
    gradients(net, state_of())
    assert [float(calls) for calls in net.buffers()] == [1.0] * 6


@every_mode
def test_modes_and_frozen_weights_may_change_before_the_backward_pass(
    backprop, state
):
    def dropping():
        return nn.Sequential(
            nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5)
        )

    results = []
    for mode in ("stored", backprop):
        net = stack(dropping, backprop=mode, state=state)
        y = state_of()
        torch.manual_seed(2)
        loss = net(y).square().sum()
        net.eval()
        net.requires_grad_(False)
        loss.backward()
        assert not net.training
        net.requires_grad_(True)
        results.append(
            [y.grad, *(p.grad for p in net.parameters()), *net.buffers()]
        )
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@every_mode
def test_functional_call_has_the_gradients_of_its_own_weights(backprop, state):
    results = []
    for mode in ("stored", backprop):
        net = stack(backprop=mode, state=state)
        weights = {
            n: (2 * p).detach().requires_grad_()
            for n, p in net.named_parameters()
        }
        loss = (
            torch.func.functional_call(net, weights, (state_of(),))
            .square()
            .sum()
        )
        results.append(torch.autograd.grad(loss, list(weights.values())))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@every_mode
def test_arguments_may_come_in_containers_and_have_gradients(backprop, state):
    class Scaled(nn.Linear):
        def forward(self, x, scales, *, shift):
            return super().forward(x) * scales[0] * scales[1]["b"] + shift

    net = stack(lambda: Scaled(D, D), backprop=backprop, state=state)
    a, b = (
        torch.tensor(2.0, dtype=F64, requires_grad=True),
        torch.tensor(0.3, dtype=F64),
    )
    y, shift = state_of(), torch.randn(D, dtype=F64, requires_grad=True)
    assert_same(net, y, [a, {"b": b}], shift=shift)
    loss = net(y, (a, {"b": b}), shift=shift).square().sum()
    found = torch.autograd.grad(loss, [a, shift])
    net.backprop = "stored"
    loss = net(y, (a, {"b": b}), shift=shift).square().sum()
    for one, two in zip(
        found, torch.autograd.grad(loss, [a, shift]), strict=True
    ):
        torch.testing.assert_close(one, two)


@every_state
def test_memory_does_not_grow_with_depth(state):
    """Counted by what autograd and the stack still hold after the forward pass."""

    def held(blocks, nested):
        def inner():
            if not nested:
                return mlp(64)
            parts = [Coupling(mlp(32)) for _ in range(3)]
            return Reversible(parts, backprop="reversible", state=state)

        torch.manual_seed(0)
        net = Reversible(
            [Coupling(inner(), inner()) for _ in range(blocks)],
            backprop="reversible",
            state=state,
        )
        sizes = {}

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                out = func(*args, **(kwargs or {}))
                for t in out if isinstance(out, (tuple, list)) else [out]:
                    if isinstance(t, torch.Tensor):
                        storage = t.untyped_storage()
                        sizes[storage._cdata] = (
                            weakref.ref(t),
                            storage.nbytes(),
                        )
                return out

        y = torch.randn(128, 128, requires_grad=True)
        with Watch():
            out = net(y)
        alive = sum(size for ref, size in sizes.values() if ref() is not None)
        assert out.requires_grad
        return alive

    for nested in (False, True):
        more = held(12, nested) - held(4, nested)
        assert (
            more < 8 * 2 * 8_000
        )  # notes and random numbers, not states of 65,536 bytes


@every_state
def test_several_backward_passes_and_gradients_of_gradients(state):
    net, y = stack(backprop="reversible", state=state), state_of()
    loss = net(y).square().sum()
    first = torch.autograd.grad(loss, [y, *net.parameters()], retain_graph=True)
    second = torch.autograd.grad(
        loss, [y, *net.parameters()], create_graph=True
    )
    third = torch.autograd.grad(
        sum(g.square().sum() for g in second), [*net.parameters()]
    )
    net.backprop = "stored"
    expected = torch.autograd.grad(
        net(y).square().sum(), [y, *net.parameters()], create_graph=True
    )
    for a, b, c in zip(first, second, expected, strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)
    last = torch.autograd.grad(
        sum(g.square().sum() for g in expected), [*net.parameters()]
    )
    for a, b in zip(third, last, strict=True):
        torch.testing.assert_close(a, b)


# Mistakes


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Leapfrog(None), OptionError, "F must be an nn.Module"),
        (
            lambda: Leapfrog(nn.Linear(2, 2), h=0.0),
            ValueError,
            "h must be .*> 0",
        ),
        (
            lambda: Reversible([nn.Linear(2, 2)]),
            OptionError,
            "block 0 is a Linear",
        ),
        (
            lambda: Reversible([], backprop="fast"),
            OptionError,
            "'fast' is not known",
        ),
        (
            lambda: Reversible([Coupling(None), Coupling(None, dim=1)]),
            OptionError,
            "the same axis",
        ),
        (
            lambda: Coupling(nn.Linear(2, 2))(torch.randn(2, 5)),
            ShapeError,
            "must be even",
        ),
        (
            lambda: Coupling(nn.Linear(2, 2), dim=2)(torch.randn(2, 4)),
            ShapeError,
            "along axis 2",
        ),
        (
            lambda: Coupling(nn.Linear(2, 2))([1.0, 2.0]),
            ShapeError,
            "but got list",
        ),
        (
            lambda: Coupling(nn.Linear(2, 3))(torch.randn(2, 4)),
            ShapeError,
            "shape of the half",
        ),
        (
            lambda: Coupling(nn.LSTM(2, 2))(torch.randn(2, 4)),
            ShapeError,
            "one tensor with the shape .* but returned tuple",
        ),
        (
            lambda: Coupling(GradientField(nn.Linear(2, 2)))(torch.randn(2, 4)),
            ShapeError,
            "one for each sample",
        ),
        (
            lambda: Coupling(GradientField(lambda x: x.detach().sum()))(
                torch.randn(2, 4)
            ),
            OptionError,
            "no gradient with respect to its input",
        ),
    ],
)
def test_mistakes_get_one_sentence(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    "register", ["forward_pre_hook", "forward_hook", "full_backward_hook"]
)
def test_hooks_of_a_block_are_an_error_because_a_stack_does_not_call_it(
    register,
):
    net = stack()
    handle = getattr(net[1], f"register_{register}")(lambda *_: None)
    with pytest.raises(OptionError, match="block 1 has hooks"):
        net(state_of())
    handle.remove()
    hdnn.diagnose(net, state_of().detach())  # watches all modules by hooks
    getattr(net, f"register_{register}")(lambda *_: None)
    assert not net.guarantee().holds


def test_a_subclass_that_computes_something_else_has_no_guarantee():
    class Shrinking(Coupling):
        def forward(self, y):
            return 0.5 * super().forward(y)

    assert Coupling(mlp()).guarantee().holds
    assert not Shrinking(mlp()).guarantee().holds
    net = Reversible([Coupling(mlp()), Shrinking(mlp())])
    assert not net.guarantee().holds
    field = GradientField(
        nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 1))
    )
    assert "symplectic" in Leapfrog(field).guarantee().theorem


def test_a_field_whose_energy_has_a_hook_is_not_called_symplectic():
    energy = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 1))
    layer = Leapfrog(GradientField(energy))
    assert layer.symplectic
    energy[1].register_full_backward_hook(lambda m, g, _: (g[0].clamp(0),))
    assert not layer.symplectic
    assert layer.guarantee().holds  # the layer is still a shear
