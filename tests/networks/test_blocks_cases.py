"""Stacks of blocks where it is easy to be wrong: odd states, odd modules, odd orders of calls."""

import contextlib
import copy
import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hdnn import Coupling, GradientField, Leapfrog, Reversible
from hdnn.engine import chain
from hdnn.errors import OptionError, ShapeError, TrainingError

D = 4
Y = torch.randn(6, 2 * D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WAYS = [("reversible", "float"), ("reversible", "fixed"), ("checkpoint", "float")]
every_way = pytest.mark.parametrize(("backprop", "state"), WAYS)
every_state = pytest.mark.parametrize("state", ["float", "fixed"])


def mlp(d=D):
    return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.Tanh())


def stack(N=4, block=lambda: Coupling(mlp(), mlp()), **options):
    torch.manual_seed(1)
    return Reversible([block() for _ in range(N)], **options).double()


def module(forward):
    """A module with one linear layer, from a function of it and its inputs."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x, *args, **options):
            return forward(self, x, *args, **options)

    return Own()


def compared(net, run):
    """What `run` returns for a stack, after it was compared with stored states."""
    twin = copy.deepcopy(net)
    for one in twin.modules():
        if isinstance(one, Reversible):
            one.backprop = "stored"
    found, wanted = run(net), run(twin)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
    return found


def plain(net, y=Y, *args):
    x = y.clone().requires_grad_()
    net(x, *args).sin().sum().backward()
    return [x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


# States


@every_way
def test_states_whose_entries_share_memory(backprop, state):
    net = stack(backprop=backprop, state=state)

    def expanded(net):
        x = torch.ones(2 * D, dtype=torch.float64).cumsum(0).requires_grad_()
        net(x.expand(5, 2 * D)).sin().sum().backward()
        return [x.grad]

    def windows(net):
        x = torch.ones(12, dtype=torch.float64).cumsum(0).requires_grad_()
        net(x.unfold(0, 2 * D, 1)).sin().sum().backward()
        return [x.grad]

    compared(net, expanded)
    compared(net, windows)


def test_complex_states_are_undone_too():
    net = Reversible([Coupling(nn.Linear(D, D, dtype=torch.complex128))] * 2, backprop="reversible")

    def run(net):
        x = torch.complex(Y, Y.cos()).requires_grad_()
        net(x).abs().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    compared(net, run)
    with pytest.raises(ShapeError, match="is for real numbers"):
        Reversible([Coupling(None)], state="fixed")(torch.complex(Y, Y))


@pytest.mark.parametrize(
    ("given", "said"), [([1.0, 2.0], "one tensor, but got a list"), (1, "int")]
)
def test_what_is_no_state_gets_one_sentence(given, said):
    with pytest.raises(ShapeError, match=said):
        stack()(given)
    with pytest.raises(ShapeError, match=r"y is torch.int64"):
        stack()(torch.ones(2, 8, dtype=torch.int64))


@every_state
def test_a_module_may_give_another_dtype_than_the_state(state):
    """LayerNorm under autocast gives float32 for a state in bfloat16, which then is one too."""
    block = lambda: Coupling(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D), nn.LayerNorm(D)))  # noqa: E731
    net = stack(block=block, backprop="reversible", state=state, check=False).float()
    y = Y.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = net(y)
    out.float().sin().sum().backward()
    assert y.grad.isfinite().all()
    wide = stack(block=lambda: Coupling(module(lambda m, x: m.linear(x.double()))), state=state)
    assert wide(Y.float()).dtype is (torch.float32 if state == "fixed" else torch.float64)


def test_inverses_on_the_grid_have_gradients_too():
    net = stack(state="fixed")
    compared_with = copy.deepcopy(net)
    compared_with.state = "float"
    found = []
    for one in (net, compared_with):
        y = Y.clone().requires_grad_()
        one.inverse(y).sin().sum().backward()
        found.append([y.grad, *(p.grad for p in one.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(TrainingError, match="left the fixed-point grid"):
        net.inverse(1e9 * Y)


# Modules


@every_way
def test_a_module_that_is_used_outside_of_the_stack_as_well(backprop, state):
    def run(net):
        x, F = Y.clone().requires_grad_(), net[0].F
        y = net(F(x[..., :D]).repeat(1, 2))
        (y[..., :D] + F(y[..., D:])).sin().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    compared(stack(backprop=backprop, state=state), run)


@every_way
def test_modules_without_gradients_and_plain_functions(backprop, state):
    closed = torch.no_grad()(lambda m, x: m.linear(x).sin())
    for F in (module(closed), torch.tanh, nn.Identity()):
        net = stack(block=lambda F=F: Coupling(F, mlp()), backprop=backprop, state=state)
        compared(net, plain)


@every_way
def test_gradients_for_further_arguments_alone(backprop, state):
    def moved(m, x, c, rows, *, on=True):
        return torch.tanh(m.linear(x)) * c[rows] if on else x

    def run(net):
        net.requires_grad_(False)
        c = torch.ones(9, D, dtype=torch.float64).cumsum(0).requires_grad_()
        net(Y, c, torch.arange(6), on=True).sin().sum().backward()
        return [c.grad]

    compared(stack(block=lambda: Leapfrog(module(moved)), backprop=backprop, state=state), run)


@every_way
def test_autocast_inside_of_a_module(backprop, state):
    def moved(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.linear(x).sin().float()

    net = stack(2, lambda: Leapfrog(module(moved)), backprop=backprop, state="fixed").float()
    compared(net, lambda net: plain(net, Y.float()))


@pytest.mark.parametrize("inner", ["stored", "reversible", "checkpoint"])
@every_way
def test_stacks_inside_of_stacks(backprop, state, inner):
    def block():
        parts = [Coupling(mlp(D // 2), mlp(D // 2)) for _ in range(3)]
        return Leapfrog(Reversible(parts, backprop=inner, state=state))

    compared(stack(3, block, backprop=backprop, state=state), plain)


@pytest.mark.parametrize("reentrant", [True, False])
@every_way
def test_stacks_inside_of_checkpoints(backprop, state, reentrant):
    def run(net):
        x = Y.clone().requires_grad_()
        checkpoint(net, x, use_reentrant=reentrant).sin().sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    compared(stack(backprop=backprop, state=state), run)


@every_way
def test_modes_may_change_before_the_backward_pass(backprop, state):
    block = lambda: Coupling(nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Tanh()))  # noqa: E731

    def run(net):
        torch.manual_seed(4)
        x = Y.clone().requires_grad_()
        loss = net.train()(x).sin().sum()
        net.eval()
        loss.backward()
        assert not any(one.training for one in net.modules())
        return [x.grad]

    compared(stack(block=block, backprop=backprop, state=state), run)


# Orders of calls


@every_way
def test_two_forward_passes_before_one_backward_pass(backprop, state):
    def run(net):
        x = Y.clone().requires_grad_()
        (net(x) * net(2 * net(x))).sum().backward()
        return [x.grad, *(p.grad for p in net.parameters())]

    compared(stack(backprop=backprop, state=state), run)


@every_way
def test_a_backward_pass_in_another_thread(backprop, state):
    def run(net):
        x = Y.clone().requires_grad_()
        loss = net(x).sin().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return [x.grad, *(p.grad for p in net.parameters())]

    compared(stack(backprop=backprop, state=state), run)


@every_state
def test_several_threads_go_back_at_once(state):
    block = lambda: Coupling(nn.Sequential(mlp(), nn.Dropout(0.3)), mlp())  # noqa: E731
    net = stack(block=block, backprop="reversible", state=state)

    def run(net):
        torch.manual_seed(4)
        x = Y.clone().requires_grad_()
        loss = net(x).sin().sum()
        back = partial(torch.autograd.grad, loss, [x, *net.parameters()], retain_graph=True)
        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(back) for _ in range(8)]
        return [g for one in found for g in one.result()]

    compared(net, run)


@every_way
def test_many_gradients_at_once(backprop, state):
    def run(net):
        x = Y.clone().requires_grad_()
        out = net(x)
        g = torch.stack([out.detach(), out.detach().cos()])
        return torch.autograd.grad(out, [x, *net.parameters()], g, is_grads_batched=True)

    compared(stack(backprop=backprop, state=state), run)
    energy = GradientField(lambda x: x.cosh().log().sum(-1), scale=-1.0)
    compared(stack(block=lambda: Leapfrog(energy, h=0.3), backprop=backprop, state=state), run)


@every_state
def test_steps_of_an_optimiser_inside_of_the_backward_pass(state):
    shared = mlp()
    for block in (lambda: Coupling(mlp(), mlp()), lambda: Leapfrog(shared)):
        net = stack(block=block, backprop="reversible", state=state)
        for one in net.parameters():
            one.register_post_accumulate_grad_hook(
                lambda p: torch.optim.SGD([p], 0.1).step()  # when no other block needs it any more
            )
        twin = copy.deepcopy(net)
        plain(net)
        twin.backprop = "stored"
        for one in twin.parameters():
            one._post_accumulate_grad_hooks = None
        plain(twin)
        torch.optim.SGD(twin.parameters(), 0.1).step()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@every_way
def test_tensors_without_values_have_the_right_shape(backprop, state):
    def run(y):
        net = Reversible([Coupling(mlp(), mlp())] * 2, backprop=backprop, state=state)
        net(y.requires_grad_()).sum().backward()
        return y.grad.shape

    with torch.device("meta"):
        assert run(torch.randn(3, 2 * D)) == (3, 2 * D)
    with FakeTensorMode():
        assert run(torch.randn(3, 2 * D)) == (3, 2 * D)


@every_way
def test_gradients_for_some_inputs_after_others(backprop, state):
    def run(net):
        x = Y.clone().requires_grad_()
        loss, found = net(x).sin().sum(), []
        for wanted in (net[2].parameters(), [x], net[3].parameters(), net[1].parameters()):
            found += torch.autograd.grad(loss, [*wanted], retain_graph=True)
        return found

    compared(stack(backprop=backprop, state=state), run)


@every_way
def test_an_error_in_the_forward_pass_leaves_nothing_behind(backprop, state):
    net = stack(backprop=backprop, state=state)
    wanted = plain(copy.deepcopy(net))
    F, net[2].F = net[2].F, nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        plain(net)
    net[2].F = F
    net.zero_grad()
    for a, b in zip(plain(net), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@every_state
def test_transforms_of_torch_func_on_the_grid_too(state):
    net, twin = stack(2, backprop="reversible", state=state), stack(2)
    close = {"rtol": 1e-6, "atol": 1e-8}
    many = torch.stack([Y, 2 * Y])
    torch.testing.assert_close(torch.func.vmap(net)(many)[1], net(2 * Y))
    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        one, two = (transform(lambda y, net=n: net(y).sin().sum(0))(Y[:2]) for n in (net, twin))
        torch.testing.assert_close(one, two, **close)
    one, two = (torch.func.jvp(n, (Y,), (Y.cos(),))[1] for n in (net, twin))
    torch.testing.assert_close(one, two, **close)
    each = torch.func.vmap(torch.func.grad(lambda y: net(y).sin().sum()))(Y)
    whole = torch.func.grad(lambda y: net(y).sin().sum())(Y)
    torch.testing.assert_close(each, whole)


# Memory


def alive():
    """Bytes of all tensors that there are."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of old names in PyTorch, which are looked at too
        found = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    sizes = {}
    for one in found:
        with contextlib.suppress(RuntimeError):  # sparse ones, and wrappers, that other tests left
            storage = one.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize(("state", "nested"), [("float", False), ("fixed", False), ("float", True)])
def test_what_is_kept_does_not_grow_with_depth(state, nested):
    d, found = 16, []

    def field():
        parts = [Coupling(mlp(d // 2), mlp(d // 2)) for _ in range(2)]
        return Reversible(parts, backprop="reversible", state=state) if nested else mlp(d)

    for N in (8, 64):
        net = Reversible([Leapfrog(field(), h=0.02) for _ in range(N)], backprop="reversible")
        net.state, y = state, torch.randn(512, 2 * d, requires_grad=True)
        before, saved = alive(), []
        with saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            out = net(y)  # what autograd itself keeps, which Python does not see, outside of moves
        found.append((alive() - before) / (y.numel() * y.element_size()))
        del out, saved
        assert alive() - before < y.numel()  # nothing stays
    assert found[1] < found[0] + 0.2 < 8  # states


# Mistakes


class Counting(nn.Module):
    """Not the same twice."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(D, D), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x).sin() * self.calls


@pytest.mark.parametrize("read_at_the_end", [False, True])
def test_another_result_the_second_time_is_found_on_the_grid_wherever_it_is(
    monkeypatch, read_at_the_end
):
    monkeypatch.setattr(chain, "_deferred", lambda like: read_at_the_end)
    said = r"F of block 1 did not compute the same a second time .* keeps a count of its own"
    for first in (Coupling(mlp(), mlp()), Coupling(nn.Identity())):
        blocks = [first, Coupling(Counting()), Coupling(None, mlp())]
        net = Reversible(blocks, backprop="reversible", state="fixed").double()
        with pytest.raises(TrainingError, match=said):
            net(Y.clone().requires_grad_()).sin().sum().backward()
        with pytest.raises(TrainingError, match=said):  # only a part of the way back
            torch.autograd.grad(net(Y).sin().sum(), [*net[1].parameters()])
        first.requires_grad_(False)
        with pytest.raises(TrainingError, match=said):
            net(Y).sin().sum().backward()


def test_another_result_is_found_where_the_first_blocks_are_frozen():
    net = Reversible([Coupling(mlp()), Coupling(Counting(), mlp())], backprop="reversible").double()
    net[0].requires_grad_(False)
    with pytest.raises(TrainingError, match="off by"):
        net(Y).sin().sum().backward()


@every_state
def test_weights_that_change_before_the_backward_pass_are_an_error(state):
    net = stack(backprop="reversible", state=state)
    loss = net(Y).sum()
    with torch.no_grad():
        net[1].F[1].weight.mul_(1 + 1e-9)
    with pytest.raises(TrainingError, match=r"weights of F of block 1 changed .* optimiser's step"):
        loss.backward()


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("backprop", ["stored", "checkpoint", "reversible"])
@every_state
def test_a_module_that_writes_into_its_input_is_an_error(backprop, state, needs):
    relu = [Coupling(nn.ReLU(inplace=True)), Coupling(None, nn.ReLU(inplace=True))]
    for blocks in (relu, relu[::-1]):
        net = Reversible(blocks, backprop=backprop, state=state)
        with pytest.raises(
            TrainingError, match=r"of block 0 changed its input in place.*inplace=F"
        ):
            net(torch.randn(3, 4, requires_grad=needs))
        with torch.inference_mode():  # where nobody can see it, modules get copies
            y = torch.randn(3, 4)
            before = y.clone()
            plain = Reversible([Coupling(nn.ReLU()), Coupling(None, nn.ReLU())])
            plain = plain if blocks is relu else Reversible([*plain][::-1])
            torch.testing.assert_close(net(y), plain(y))
            assert torch.equal(y, before)


@every_state
def test_a_module_that_overwrites_what_its_gradient_needs_is_an_error(state):
    net = stack(1, lambda: Coupling(module(lambda m, x: m.linear(x).sigmoid().mul_(2))))
    net.backprop, net.state = "reversible", state
    with pytest.raises(TrainingError, match="changes in place what its own gradient"):
        net(Y).sum().backward()


def test_weights_of_spectral_norm_that_move_in_each_call_are_found_on_the_grid():
    norm = nn.utils.parametrizations.spectral_norm
    torch.manual_seed(0)
    net = Reversible([Coupling(norm(nn.Linear(64, 64), n_power_iterations=1)) for _ in range(2)])
    net.backprop, net.state = "reversible", "fixed"
    y = torch.randn(3, 128, requires_grad=True)
    with pytest.raises(TrainingError, match="did not compute the same"):
        net(y).sum().backward()
    net.eval()(y).sum().backward()
    assert y.grad.isfinite().all()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Coupling(nn.Tanh(), dim="a"), OptionError, "dim must be the number of an axis"),
        (lambda: Coupling(nn.Tanh(), dim=True), OptionError, "dim must be the number of an axis"),
        (lambda: Coupling(nn.Tanh(), dim=2)(torch.ones(2, 4)), ShapeError, "no axis 2"),
        (lambda: Coupling(3), OptionError, "F must be an nn.Module, but got 3"),
        (lambda: Coupling(None, "G"), OptionError, "G must be an nn.Module, but got 'G'"),
        (lambda: Leapfrog(None), OptionError, "Leapfrog needs a module F"),
        (lambda: Reversible(nn.Linear(2, 2)), OptionError, "a list of blocks, but got one Linear"),
        (lambda: Reversible(Coupling(None)), OptionError, "a list of blocks, but got one Coupling"),
        (lambda: GradientField(None), OptionError, "needs a module that gives an energy"),
    ],
)
def test_bad_options_get_one_sentence(make, error, said):
    with pytest.raises(error, match=said) as raised:
        make()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("energy", "said"),
    [
        (lambda m, x: m.linear(x), r"one for each sample, but Own returned \(2, 4\) for a half"),
        (lambda m, x: (x.sum(), 1), "returned a tuple"),
        (lambda m, x: x.detach().square().sum(-1), "no gradient by its input; compute it"),
        (lambda m, x: m.linear.weight.sum(), "no gradient by its input; compute it"),
        (lambda m, x: (x > 0).sum(-1), "Own returned torch.int64"),
        (lambda m, x: (1j * x).sum(-1), "Own returned torch.complex64"),
    ],
)
def test_bad_energies_get_one_sentence(energy, said):
    layer = Leapfrog(GradientField(module(energy)))
    for grad in (True, False):
        with (
            torch.set_grad_enabled(grad),
            pytest.raises((OptionError, ShapeError), match=said) as r,
        ):
            layer(torch.ones(2, 2 * D))
        assert "\n" not in str(r.value)


def test_an_energy_of_nothing_is_no_mistake():
    layer = Leapfrog(GradientField(lambda x: x.square().sum(-1)))
    for shape in ((0, 8), (2, 0)):
        assert layer(torch.ones(shape)).shape == shape
