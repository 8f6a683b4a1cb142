"""What PyTorch users expect of modules, for stacks of blocks: the contract."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hdnn import Coupling, GradientField, Leapfrog, Reversible

D = 4
EDGES = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 4, 4]])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = (
            nn.LayerNorm(D),
            nn.MultiheadAttention(D, 2, batch_first=True),
        )
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        x = self.norm(x)
        return self.drop(self.attention(x, x, x, need_weights=False)[0])


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, edge_index):
        start, end = edge_index
        return torch.tanh(
            self.linear(torch.zeros_like(x).index_add(0, end, x[start]))
        )


class Well(nn.Module):
    """An energy for each sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, 7)

    def forward(self, x):
        return self.linear(x).cosh().log().sum(-1)


class Conditioned(nn.Module):
    """Moves by an input and by conditions, which have gradients too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x, c=None, extra=()):
        x = self.linear(x)
        c = (
            c.values()
            if isinstance(c, dict)
            else c
            if isinstance(c, tuple)
            else [c]
        )
        for one in [*c, *extra]:
            x = torch.tanh(x * one)
        return x


def mlp(drop=0.2):
    return nn.Sequential(
        nn.LayerNorm(D),
        nn.Linear(D, 8),
        nn.GELU(),
        nn.Dropout(drop),
        nn.Linear(8, D),
    )


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 2, 3, padding=1),
    )


# What a block is made of, the shape of a state, and further arguments
KINDS = {
    "vectors": (lambda: Coupling(mlp(), mlp()), (6, 2 * D), ()),
    "tokens": (lambda: Leapfrog(Attention()), (3, 5, 2 * D), ()),
    "energies": (
        lambda: Leapfrog(GradientField(Well(), scale=-1.0), h=0.3),
        (6, 2 * D),
        (),
    ),
    "images": (lambda: Coupling(conv(), conv(), dim=1), (3, 4, 6, 6), ()),
    "nodes": (lambda: Leapfrog(Messages()), (5, 2 * D), (EDGES,)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
WAYS = [
    ("reversible", "float"),
    ("reversible", "fixed"),
    ("checkpoint", "float"),
]
every_way = pytest.mark.parametrize(("backprop", "state"), WAYS)


def made(kind, N=4, dtype=torch.float64, **options):
    """A stack, a state and further arguments."""
    torch.manual_seed(1)
    block, shape, args = KINDS[kind]
    net = Reversible([block() for _ in range(N)], **options).to(dtype)
    return net, torch.randn(shape, dtype=dtype), args


def both(kind, **options):
    """As `made`, with a twin that stores all states."""
    net, y, args = made(kind, **options)
    twin = copy.deepcopy(net)
    twin.backprop = "stored"
    return net, twin, y, args


def gradients(net, y, *args, loss=None, **options):
    y = y.detach().clone().requires_grad_()
    torch.manual_seed(3)
    out = net(y, *args, **options)
    (loss or (lambda y: y.float().square().sum()))(out).backward()
    return [
        out.detach(),
        y.grad,
        *(p.grad for p in net.parameters()),
        *net.buffers(),
    ]


def same(ones, others, exact=False):
    for one, two in zip(ones, others, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(
                one, two, **{"rtol": 0, "atol": 0} if exact else {}
            )


@every_way
@every_kind
def test_dropout_and_statistics_are_those_of_one_forward_pass(
    kind, backprop, state
):
    net, twin, y, args = both(kind, backprop=backprop, state=state)
    same(gradients(net, y, *args), gradients(twin, y, *args), state == "fixed")
    counts = [
        b
        for name, b in net.named_buffers()
        if name.endswith("num_batches_tracked")
    ]
    assert all(count == 1 for count in counts)


@every_way
@every_kind
def test_autocast_and_scaled_losses(kind, backprop, state):
    net, twin, y, args = both(
        kind, dtype=torch.float32, backprop=backprop, state=state
    )
    found = []
    for one in (net, twin):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimiser = torch.optim.SGD(one.parameters(), 0.01)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            out = one(y, *args)
        scaler.scale(out.float().square().mean()).backward()
        scaler.step(optimiser)
        scaler.update()
        found.append([out.detach(), *(p.detach() for p in one.parameters())])
    if state == "fixed":
        same(*found, exact=True)
    else:  # in float the states are only nearly the same, and bfloat16 rounds them to others
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two, rtol=0.05, atol=0.02)


@every_way
@every_kind
def test_a_second_backward_pass_and_one_through_a_part(kind, backprop, state):
    net, twin, y, args = both(kind, backprop=backprop, state=state)
    found = []
    for one in (net, twin):
        x = y.clone().requires_grad_()
        torch.manual_seed(3)
        out = one(x, *args)
        inputs = [x, *one.parameters()]
        first = torch.autograd.grad(
            out[0].sum(), inputs, retain_graph=True, allow_unused=True
        )
        second = torch.autograd.grad(out.sin().sum(), inputs, retain_graph=True)
        p, q = out.chunk(2, one.dim)
        third = torch.autograd.grad(
            p.square().sum(), inputs[:3], retain_graph=True
        )
        fourth = torch.autograd.grad(
            q.square().sum(), inputs, allow_unused=True
        )
        found.append([*first, *second, *third, *fourth])
    same(*found)


@every_way
@every_kind
@pytest.mark.parametrize("frozen", ["the first", "all but the first", "all"])
def test_frozen_blocks(kind, frozen, backprop, state):
    net, twin, y, args = both(kind, backprop=backprop, state=state)
    for one in (net, twin):
        for j, block in enumerate(one):
            held = {"the first": j == 0, "all but the first": j > 0}
            block.requires_grad_(not held.get(frozen, True))
    same(gradients(net, y, *args), gradients(twin, y, *args))
    if frozen != "all":  # and no gradient for the input
        for one in (net, twin):
            one.zero_grad()
            torch.manual_seed(3)
            one(y, *args).square().sum().backward()
        same(
            [p.grad for p in net.parameters()],
            [p.grad for p in twin.parameters()],
        )


@every_way
@every_kind
def test_hooks_of_modules_and_tensors_are_called(kind, backprop, state):
    net, twin, y, args = both(kind, backprop=backprop, state=state)
    found = []
    for one in (net, twin):
        seen = []
        field = one[1].F
        field.register_full_backward_hook(
            lambda m, gi, go, seen=seen: seen.append(go[0])
        )
        field.register_forward_hook(lambda m, x, out: out * 2)
        first = next(iter(one.parameters()))
        first.register_hook(lambda g: g * 3)
        seen += gradients(one, y, *args)
        found.append(seen)
    same(*found)


@every_way
@every_kind
def test_parameters_shared_between_blocks(kind, backprop, state):
    net, y, args = made(kind, 1, backprop=backprop, state=state)
    net = Reversible([net[0]] * 3, backprop=backprop, state=state)
    twin = copy.deepcopy(net)
    twin.backprop = "stored"
    same(gradients(net, y, *args), gradients(twin, y, *args))


@every_way
@every_kind
def test_the_state_may_be_changed_after_the_forward_pass(kind, backprop, state):
    net, twin, y, args = both(kind, backprop=backprop, state=state)
    found = []
    for one in (net, twin):
        x = y.clone()
        torch.manual_seed(3)
        out = one(x, *args)
        if one is net:
            x.zero_()
        loss = out.square().sum()
        loss.backward()
        found.append([p.grad for p in one.parameters()])
    same(*found)


@every_way
@every_kind
def test_the_result_may_be_changed_before_the_backward_pass(
    kind, backprop, state
):
    net, twin, y, args = both(kind, backprop=backprop, state=state)
    found = [
        gradients(one, y, *args, loss=lambda y: y.mul_(2).sum())
        for one in (net, twin)
    ]
    same(*found)


@every_way
@pytest.mark.parametrize("kind", ["vectors", "tokens", "images"])
def test_strides_of_the_state_do_not_matter(kind, backprop, state):
    net, twin, y, args = both(kind, backprop=backprop, state=state)
    odd = y.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == "images":
        odd = y.to(memory_format=torch.channels_last)
    same(gradients(net, odd, *args), gradients(twin, odd, *args))
    same([net.eval()(odd, *args)], [net.eval()(y, *args)])
    wide = torch.stack([y, y], -1)[..., 0]
    same(gradients(net, wide, *args), gradients(twin.eval(), wide, *args))


@every_way
@every_kind
def test_small_cases(kind, backprop, state):
    net, twin, y, args = both(kind, N=1, backprop=backprop, state=state)
    same(gradients(net, y, *args), gradients(twin, y, *args))
    none = Reversible([], backprop=backprop, state=state)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    none(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    if kind != "nodes":
        net, twin, y, args = both(kind, backprop=backprop, state=state)
        net.eval(), twin.eval()  # batch norm has no statistics of nothing
        same(gradients(net, y[:0], *args), gradients(twin, y[:0], *args))
    with torch.inference_mode():
        assert net(y, *args).shape == y.shape
    with torch.no_grad():
        assert not net(y, *args).requires_grad


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_kind
def test_transforms_of_torch_func(kind):
    net, twin, y, args = both(kind, backprop="reversible")
    net.eval(), twin.eval()
    values = dict(net.named_parameters())

    def loss(net, values, y):
        return (
            torch.func.functional_call(net, values, (y, *args)).square().sum()
        )

    one, two = (
        torch.func.grad(lambda v, net=n: loss(net, v, y))(values)
        for n in (net, twin)
    )
    same(one.values(), two.values())
    same(
        *(
            torch.func.jacrev(lambda y, net=n: net(y, *args).sum(0))(y)[None]
            for n in (net, twin)
        )
    )
    if kind != "nodes":
        many = torch.stack([y, 2 * y])
        same(
            torch.func.vmap(lambda y: net(y, *args))(many),
            [net(y, *args), net(2 * y, *args)],
        )
    twice = {
        name: (2 * value.detach()).requires_grad_()
        for name, value in values.items()
    }
    found = []
    for one in (net, twin):
        out = torch.func.functional_call(one, twice, (y, *args))
        found.append(
            torch.autograd.grad(out.square().sum(), list(twice.values()))
        )
    same(*found)


@pytest.mark.parametrize("kind", ["vectors", "tokens", "images", "nodes"])
def test_96_blocks_under_autocast_have_the_gradients_of_stored_states_to_the_last_bit(
    kind,
):
    net, twin, y, args = both(kind, N=96, dtype=torch.float32, state="fixed")
    net.backprop = "reversible"
    found = []
    for one in (net, twin):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(gradients(one, y, *args))
    same(*found, exact=True)


SHAPES = st.sampled_from(
    [((), -1), ((3,), -1), ((2, 3), -1), ((), 1), ((3, 2), 1), ((2,), 2)]
)


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4),
    shape=SHAPES,
    N=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    block=st.sampled_from(
        ["coupling", "leapfrog", "first half", "second half", "energy"]
    ),
    way=st.sampled_from([*WAYS, ("checkpoint", "fixed")]),
    seed=st.integers(0, 99),
)
def test_any_shape_depth_and_dtype(batch, shape, N, dtype, block, way, seed):
    torch.manual_seed(seed)
    others, dim = shape
    place = dim if dim >= 0 else 1 + len(others)
    sizes = [batch, *others]
    sizes.insert(place, 2 * D)

    class Along(nn.Module):
        """A layer along the axis that is split."""

        def __init__(self, scale=0.3):
            super().__init__()
            self.inner, self.scale = nn.Linear(D, D), scale

        def forward(self, x):
            return self.scale * self.inner(x.movedim(place, -1)).tanh().movedim(
                -1, place
            )

    class Total(Along):
        def forward(self, x):
            return super().forward(x).square().sum(tuple(range(1, x.ndim)))

    blocks = {
        "coupling": lambda: Coupling(Along(), Along(), dim=dim),
        "leapfrog": lambda: Leapfrog(Along(), h=0.5, dim=dim),
        "first half": lambda: Coupling(Along(), dim=dim),
        "second half": lambda: Coupling(None, Along(), dim=dim),
        "energy": lambda: Leapfrog(GradientField(Total()), h=0.5, dim=dim),
    }
    backprop, state = way
    net = Reversible([blocks[block]() for _ in range(N)], state=state).to(dtype)
    y = torch.randn(sizes).to(dtype)
    wanted = gradients(net, y)
    net.zero_grad()
    net.backprop = backprop
    net.check = (
        dtype is not torch.bfloat16
    )  # where reversal in floats is known to be rough
    found = gradients(net, y)
    assert found[0].shape == y.shape
    assert found[0].dtype is dtype
    if dtype is torch.bfloat16 and state == "float":
        assert all(g.isfinite().all() for g in found if g is not None)
        return
    exact = state == "fixed" or backprop == "checkpoint"
    size = 0.0 if exact else 1e-3 if dtype is torch.float32 else 1e-8
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=size, atol=size)
    with torch.no_grad():
        back = net.inverse(found[0])
    torch.testing.assert_close(
        back, y, rtol=1e-2, atol=0.1 if dtype is torch.bfloat16 else 1e-4
    )
