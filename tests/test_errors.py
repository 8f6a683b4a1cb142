"""Every mistake is an HDNNError that says what was given, what is needed and what to do."""

from __future__ import annotations

import inspect
import math
import re
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import hdnn
from hdnn import errors, functional, interconnection
from hdnn.errors import (
    ConvergenceError,
    InterconnectionError,
    NotInvertibleError,
    OptionError,
    ShapeError,
    StepError,
)
from strategies import ACTIVATIONS, Random, seeds

NAN, INF = float("nan"), float("inf")
EVEN = ("H2", "ImplicitH2", "MS1", "MS3", "H1", "HamiltonianNet")  # without a J of one's own
ODE = ("H1", "H2", "ImplicitH2", "HamiltonianNet", "MS1", "MS2", "MS3")
NETWORKS = (*ODE, "MLP")
FULL = ("h1", "ms2", "implicit_h2", "midpoint", "mlp")
SPLIT = ("h2", "h2_inverse", "verlet", "yoshida4")
FUNCTIONS = (*FULL, *SPLIT, "ms1", "ms3")
STEPPED = tuple(f for f in FUNCTIONS if f != "mlp")
TAKES_X = (*SPLIT, "implicit_h2")
TAKES_J = ("h1", "midpoint")
NO_COUNT = [0, -1, True, "4", 4.0, None, NAN, [4], torch.tensor([4, 4])]
NO_STEP = [0, 0.0, -0.1, NAN, INF, -INF, True, "0.1", 1j, {}]


@contextmanager
def refused(kind: type[Exception], *words: str):
    """The block raises `kind`, an HDNNError, with all the words in its message."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the kind is asserted below
        yield
    assert issubclass(kind, hdnn.HDNNError)
    assert isinstance(caught.value, kind), caught.value
    for word in words:
        assert word in str(caught.value)


def network(kind: str, features=4, layers=2, **options):
    return getattr(hdnn, kind)(features, layers, **options)


def arguments(name: str, n: int = 4, N: int = 2, seed: int = 0) -> dict:
    """A function's arguments but for y, small enough for the implicit ones to have a solution."""
    normal, m = Random(seed), n // 2
    if name in FULL:
        weights = {"K": 0.3 * normal(N, n, n), "b": normal(N, n)}
    elif name in SPLIT:
        weights = {"K_p": normal(N, m, m), "K_q": normal(N, m, m)}
        weights |= {"b_p": normal(N, m), "b_q": normal(N, m)}
    elif name == "ms1":
        weights = {"K_0": normal(N, m, m), "b_1": normal(N, m), "b_2": normal(N, m)}
    else:
        weights = {"K_1": normal(N, m, m), "K_2": normal(N, m, m)}
        weights |= {"b_1": normal(N, m), "b_2": normal(N, m)}
    return weights if name == "mlp" else {**weights, "h": 0.1}


def call(name: str, y, **changed):
    return getattr(functional, name)(y, **{**arguments(name), **changed})


Y = Random(9)(3, 4)


def test_every_error_is_an_HDNNError_which_is_a_ValueError():
    kinds = [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, Exception)]
    warnings = {kind for kind in kinds if issubclass(kind, Warning)}
    assert warnings == {errors.GridWarning, errors.ReversalWarning, errors.TableWarning}
    assert all(issubclass(kind, UserWarning) for kind in warnings)
    assert len(kinds) > 10
    assert all(issubclass(kind, hdnn.HDNNError) for kind in kinds if kind not in warnings)
    assert issubclass(hdnn.HDNNError, ValueError)


# Sizes


@pytest.mark.parametrize("kind", EVEN)
@pytest.mark.parametrize("n", [1, 3, 7])
def test_odd_features_cannot_be_split(kind, n):
    with refused(ShapeError, "even", f"features = {n}", "augment", kind):
        network(kind, n)


@pytest.mark.parametrize("integrator", ["midpoint", "forward_euler"])
def test_odd_features_are_welcome_with_a_J_of_ones_own(integrator):
    with refused(ShapeError, "even", "or give a skew-symmetric J"):
        hdnn.HamiltonianNet(3, 2, integrator)
    net = hdnn.HamiltonianNet(3, 2, integrator, J=Random(0).skew(3).float())
    assert net(torch.ones(3)).shape == (3,)


@pytest.mark.parametrize("name", [f for f in FUNCTIONS if f not in ("ms2", "mlp")])
def test_functions_refuse_to_split_an_odd_state(name):
    with refused(ShapeError, name, "even", "n = 3", "augment"):
        call(name, Y[:, :3])


@pytest.mark.parametrize("count", NO_COUNT)
def test_features_are_a_whole_number_of_at_least_one(count):
    for kind in NETWORKS:
        with refused(ShapeError, "features", "whole number >= 1", repr(count)):
            network(kind, count)


@pytest.mark.parametrize("count", NO_COUNT)
def test_layers_are_a_whole_number_of_at_least_one(count):
    for kind in NETWORKS:
        with refused(hdnn.HDNNError, "layers", "whole number >= 1", repr(count)):
            network(kind, 4, count)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_refuse_a_stack_without_layers(name):
    given_ = arguments(name)
    empty = {k: v[:0] if torch.is_tensor(v) else v for k, v in given_.items()}
    with refused(ShapeError, "no layers", "N must be at least 1"):
        call(name, Y, **empty)


@pytest.mark.parametrize("j", [-1, 2, 10**9, "0", None, 0.0, 0.5, NAN])
def test_a_layer_is_one_of_the_network(j):
    for kind in NETWORKS:
        net = network(kind)
        with refused(ShapeError, "0 .. 1", str(j)):
            net.layer(torch.ones(4), j)


@pytest.mark.parametrize("k", NO_COUNT)
def test_a_network_is_refined_a_whole_number_of_times(k):
    for kind in ODE:
        with refused(ShapeError, "k must be a whole number >= 1", repr(k)):
            network(kind).refine(k)


# Steps


@pytest.mark.parametrize("h", NO_STEP)
@pytest.mark.parametrize("argument", ["step", "T"])
def test_networks_refuse_a_step_that_is_not_positive_and_finite(argument, h):
    for kind in ODE:
        with refused(StepError, argument, "> 0", str(h)):
            network(kind, **{argument: h})


@pytest.mark.parametrize(
    "h", [[0.1], [0.1] * 3, (), [0.1, -0.1], [0.1, NAN], [0.1, "0.1"], [[0.1, 0.1]]]
)
@pytest.mark.parametrize("form", [list, tuple, torch.tensor])
def test_networks_refuse_steps_that_are_not_one_a_layer(h, form):
    for kind in ODE:
        if form is torch.tensor and "0.1" in h:
            form = list
        with refused(StepError, "step"):
            network(kind, step=form(h))


@pytest.mark.parametrize("kind", ODE)
def test_either_step_or_T_is_given(kind):
    with refused(OptionError, "step=0.1", "T=1.0", "not both", "h = T/N"):
        network(kind, step=0.1, T=1.0)


@pytest.mark.parametrize("h", [*NO_STEP, None, [0.1], [0.1] * 3, [0.1, -1], [0.1, NAN]])
def test_functions_refuse_a_float_step_that_is_not_positive_and_finite(h):
    for name in STEPPED:
        with refused(StepError, "h "):
            call(name, Y, h=h)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), (1, 2)])
def test_functions_refuse_a_tensor_of_steps_that_is_not_one_a_layer(shape):
    for name in STEPPED:
        with refused(StepError, "h must be", "(2,)", str(shape)):
            call(name, Y, h=torch.full(shape, 0.1))
        with refused(StepError, "h must be", "torch.int64"):
            call(name, Y, h=torch.tensor([1, 1]))


def test_tied_layers_learn_a_single_step():
    with refused(OptionError, "tied", "one step"):
        hdnn.H2(4, 2, step=[0.1, 0.2], tied=True, learn_step=True)


# Names


@pytest.mark.parametrize("given_", ["Tanh", "rel", "sigmod", "soft_plus", "identiti", "SILU"])
def test_an_unknown_activation_lists_the_known_ones_and_suggests_the_nearest(given_):
    for kind in NETWORKS:
        nearest = {"Tanh": "tanh", "rel": "relu", "sigmod": "sigmoid", "SILU": "silu"}
        nearest |= {"soft_plus": "softplus", "identiti": "identity"}
        with refused(OptionError, repr(given_), *ACTIVATIONS, f"Did you mean '{nearest[given_]}'?"):
            network(kind, activation=given_)


@pytest.mark.parametrize("given_", ["", "xyzzy", None, 3, torch.tanh, b"tanh", ("tanh",), ["a"]])
def test_functions_refuse_an_activation_that_is_not_known_by_name(given_):
    for name in FUNCTIONS:
        with refused(OptionError, "activation", *ACTIVATIONS):
            call(name, Y, activation=given_)


@pytest.mark.parametrize("init", ["Paper", "scale", None, 1])
def test_an_unknown_init_lists_the_known_ones(init):
    for kind in NETWORKS:
        with refused(OptionError, "init", repr(init), "paper, scaled"):
            network(kind, init=init)


@pytest.mark.parametrize("integrator", ["verlett", "euler", None, 4, ["verlet"]])
def test_an_unknown_integrator_lists_the_known_ones(integrator):
    with refused(OptionError, repr(integrator), "forward_euler", "midpoint", "verlet", "yoshida4"):
        hdnn.HamiltonianNet(4, 2, integrator)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, "float64", float, 64])
def test_weights_are_floating_point(dtype):
    for kind in NETWORKS:
        with refused(ShapeError, "dtype", "floating-point", str(dtype)):
            network(kind, dtype=dtype)


@pytest.mark.parametrize("kind", NETWORKS)
def test_misspelt_options_are_not_swallowed(kind):
    with pytest.raises(TypeError, match="stpe"):
        network(kind, stpe=0.1)


# X and J


@pytest.mark.parametrize("kind", ["H2", "ImplicitH2", "HamiltonianNet"])
@pytest.mark.parametrize("shape", [(2,), (3, 3), (4, 4), (2, 3), (3, 2, 2), (1, 1, 2, 2), ()])
def test_networks_refuse_an_X_of_the_wrong_shape(kind, shape):
    with refused(ShapeError, f"X has shape {shape}", "(2, 2)", "4 features"):
        network(kind, X=torch.ones(shape))


@pytest.mark.parametrize("shape", [(4,), (3, 3), (2, 2), (4, 3), (3, 4, 4), (1, 1, 4, 4), ()])
def test_networks_refuse_a_J_of_the_wrong_shape(shape):
    with refused(ShapeError, f"J has shape {shape}", "(4, 4)", "4 features"):
        hdnn.H1(4, 2, J=torch.zeros(shape))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_networks_refuse_an_X_or_J_that_is_not_finite(value):
    X = torch.eye(2)
    X[0, 1] = value
    with refused(InterconnectionError, "X", "NaN or infinite"):
        hdnn.H2(4, 2, X=X)
    with refused(InterconnectionError, "J", "NaN or infinite"):
        hdnn.H1(4, 2, J=interconnection.from_X(X))


def test_networks_refuse_an_X_or_J_that_overflows_in_their_dtype():
    huge = torch.full((2, 2), 1e300, dtype=torch.float64)
    with refused(InterconnectionError, "X"):
        hdnn.H2(4, 2, X=huge, dtype=torch.float32)
    with refused(InterconnectionError, "J"):
        hdnn.H1(4, 2, J=interconnection.from_X(huge), dtype=torch.float32)


@given(st.integers(1, 6), seeds, st.floats(1e-9, 10), st.booleans())
def test_networks_refuse_a_J_that_is_not_skew(n, seed, size, per_layer):
    normal = Random(seed)
    J = normal.skew(n)
    J[n - 1, 0] += size * max(1.0, float(J.abs().max()))
    J = torch.stack([normal.skew(n), J]) if per_layer else J
    with refused(InterconnectionError, "skew-symmetric", "max |J + J^T|", "take J - J^T"):
        hdnn.H1(n, 2, J=J, dtype=torch.float64)


def test_a_layer_with_large_entries_does_not_hide_one_whose_J_is_not_skew():
    J = torch.stack([1e12 * interconnection.canonical(4), 1e-6 * torch.eye(4)]).double()
    with refused(InterconnectionError, "skew-symmetric"):
        hdnn.H1(4, 2, J=J, dtype=torch.float64)


@pytest.mark.parametrize(
    "value", ["I", 3, True, [[0.0, -1.0], [1.0, 0.0]], numpy.eye(2), torch.eye(2) * 1j]
)
def test_networks_refuse_an_X_or_J_that_is_no_real_tensor(value):
    with refused(hdnn.HDNNError, "X"):
        hdnn.H2(4, 2, X=value)
    with refused(hdnn.HDNNError, "J"):
        hdnn.H1(2, 2, J=value)


def test_a_J_of_whole_numbers_is_taken_or_refused_like_an_X():
    X = torch.eye(2, dtype=torch.int64)
    taken = hdnn.H2(4, 2, X=X).J
    assert torch.equal(hdnn.H1(4, 2, J=interconnection.from_X(X)).J, taken)


@pytest.mark.parametrize("option", ["X", "learn_X"])
@pytest.mark.parametrize("integrator", ["forward_euler", "midpoint"])
def test_integrators_of_any_J_refuse_an_X(integrator, option):
    with refused(OptionError, integrator, "takes J", "not X"):
        hdnn.HamiltonianNet(4, 2, integrator, **{option: torch.eye(2) if option == "X" else True})


@pytest.mark.parametrize("option", ["J", "learn_J"])
@pytest.mark.parametrize("integrator", ["semi_implicit_euler", "verlet", "yoshida4"])
def test_integrators_that_split_refuse_a_J(integrator, option):
    J = interconnection.canonical(4)
    with refused(OptionError, integrator, "takes X", "not J"):
        hdnn.HamiltonianNet(4, 2, integrator, **{option: J if option == "J" else True})


@pytest.mark.parametrize("integrator", ["verlet", "forward_euler", "semi_implicit_euler"])
@pytest.mark.parametrize("option", [{"tol": 1e-3}, {"max_iter": 3}])
def test_explicit_integrators_refuse_options_of_newtons_method(integrator, option):
    with refused(OptionError, integrator, "explicit", *option):
        hdnn.HamiltonianNet(4, 2, integrator, **option)


@pytest.mark.parametrize("tol", [0, -1e-3, NAN, INF, "small", True])
def test_newtons_tolerance_is_checked_where_a_network_is_made(tol):
    with refused(StepError, "tol", repr(tol)):
        hdnn.ImplicitH2(4, 2, tol=tol)


@pytest.mark.parametrize("max_iter", [0, -1, 2.5, NAN, "many", True])
def test_the_number_of_newton_iterations_is_checked_where_a_network_is_made(max_iter):
    with refused(StepError, "max_iter", repr(max_iter)):
        hdnn.HamiltonianNet(4, 2, "midpoint", max_iter=max_iter)


@pytest.mark.parametrize("name", ["implicit_h2", "midpoint"])
@pytest.mark.parametrize(
    "option",
    [{"tol": t} for t in (0, -1, NAN, INF, "x")] + [{"max_iter": i} for i in (0, 1.5, True)],
)
def test_implicit_functions_check_the_options_of_newtons_method(name, option):
    with refused(StepError, name, *option):
        call(name, Y, **option)


# Shapes, types and dtypes of tensors


@given(st.sampled_from(FUNCTIONS), st.data())
def test_weights_of_mismatching_shapes_are_named_with_their_shape(name, data):
    weights = {k: v for k, v in arguments(name).items() if torch.is_tensor(v)}
    which = data.draw(st.sampled_from(sorted(weights)))
    value = weights[which]
    axis = data.draw(st.integers(0, value.ndim - 1))
    change = data.draw(st.sampled_from(["one more", "one less", "new axis", "drop axis"]))
    if change == "one more":
        bad = torch.cat([value, value.narrow(axis, 0, 1)], axis)
    elif change == "one less":
        bad = value.narrow(axis, 1, value.shape[axis] - 1)
    else:
        bad = value.unsqueeze(axis) if change == "new axis" else value.select(axis, 0)
    with pytest.raises(ShapeError) as caught:
        call(name, Y, **{which: bad})
    named = re.search(r"(\w+) has shape \(([\d, ]*)\), but (\(.*\)) is needed", str(caught.value))
    assert named is not None, caught.value
    # The first one that does not fit is named: the changed one, or one after it that it binds.
    order = list(weights)
    assert order.index(named[1]) >= order.index(which)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_are_tensors(name):
    for value in (None, "K", 1.0, [[1.0]], numpy.ones((2, 2, 2))):
        which = next(iter(arguments(name)))
        with refused(ShapeError, which, "torch.Tensor", type(value).__name__):
            call(name, Y, **{which: value})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_weights_and_state_have_one_dtype(name):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex128):
        which = next(iter(arguments(name)))
        bad = arguments(name)[which].to(dtype)
        with refused(ShapeError, which, str(dtype), "y is torch.float64", "one dtype"):
            call(name, Y, **{which: bad})


@pytest.mark.parametrize("shape", [(2,), (3, 3), (4, 4), (3, 2, 2), (1, 2, 2), (1, 1, 2, 2)])
def test_functions_refuse_an_X_of_the_wrong_shape(shape):
    for name in TAKES_X:
        with refused(ShapeError, f"X has shape {shape}", "(m, m) or (N, m, m)", "m = 2"):
            call(name, Y, X=torch.ones(shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(4,), (3, 3), (2, 2), (3, 4, 4), (1, 4, 4)])
def test_functions_refuse_a_J_of_the_wrong_shape(shape):
    for name in TAKES_J:
        with refused(ShapeError, f"J has shape {shape}", "(n, n) or (N, n, n)", "n = 4"):
            call(name, Y, J=torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (None, ("NoneType",)),
        ("y", ("str",)),
        ([1.0] * 4, ("list",)),
        (numpy.ones(4), ("ndarray",)),
        (torch.tensor(1.0), ("single number",)),
        (torch.ones(3, 4, dtype=torch.int64), ("int64", "floating point")),
        (torch.ones(3, 4, dtype=torch.complex64), ("complex64", "floating point")),
    ],
)
def test_functions_refuse_a_state_that_is_no_floating_point_tensor(y, words):
    for name in FUNCTIONS:
        with refused(ShapeError, "y must be", *words):
            call(name, y)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize(
    "y",
    [
        None,
        [1.0] * 4,
        numpy.ones(4),
        torch.tensor(1.0),
        torch.ones(5),
        torch.ones(4, 3),
        torch.ones(4, 0),
        torch.ones(4, dtype=torch.int64),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.bfloat16),
    ],
)
def test_networks_refuse_a_state_that_does_not_fit(kind, y):
    net = network(kind, dtype=torch.float32)
    with refused(ShapeError, "y"):
        net(y)
    with refused(ShapeError, "y"):
        net.trajectory(y)
    with refused(ShapeError, "y"):
        net.layer(y, 0)


def test_energy_refuses_shapes_that_do_not_fit():
    K, b = Random(0)(3, 4), Random(1)(3)
    for bad in ({"K": K[0]}, {"K": K[None]}, {"K": K[:, :3]}, {"b": b[:2]}, {"b": K}):
        with refused(ShapeError, "energy", next(iter(bad))):
            functional.energy(Y, **{"K": K, "b": b, **bad})
    with refused(OptionError, "activation"):
        functional.energy(Y, K, b, activation="tan")


# Implicit steps that have no solution


def two_sided_relu() -> dict:
    """p = 1 + 2 relu(p) for a positive p: no solution."""
    K = torch.tensor([[[1.0, 1.0]]], dtype=torch.float64)
    X = torch.tensor([[-2.0]], dtype=torch.float64)
    return {"K": K, "b": torch.zeros(1, 1, dtype=torch.float64), "h": 1.0, "X": X}


def test_an_implicit_step_without_solution_says_the_contraction_factor_and_what_to_do():
    y = torch.tensor([1.0, 1.0], dtype=torch.float64)
    with refused(
        ConvergenceError,
        "implicit_h2, layer 0",
        "max_iter = 50",
        "contraction factor 2",
        "smaller h or smaller weights",
        "raise tol or max_iter",
    ):
        functional.implicit_h2(y, **two_sided_relu(), activation="relu")


def test_a_network_names_the_layer_whose_step_did_not_converge():
    net = hdnn.ImplicitH2(2, 3, step=1.0, activation="relu", X=-2 * torch.eye(1))
    with torch.no_grad():
        net.K.zero_()
        net.b.zero_()
        net.K[2] = 1.0
    with refused(ConvergenceError, "layer 2", "contraction factor"):
        net(torch.ones(2))


@pytest.mark.parametrize("name", ["implicit_h2", "midpoint"])
def test_too_few_iterations_are_said_so(name):
    with refused(ConvergenceError, name, "max_iter = 1 ", "contraction factor"):
        call(name, 3 * Y, K=2 * arguments(name)["K"], max_iter=1)


@pytest.mark.parametrize(("name", "value"), [("implicit_h2", NAN), ("midpoint", INF)])
@pytest.mark.parametrize("which", ["y", "K", "b", "h"])
def test_an_implicit_step_of_a_nan_or_an_infinity_says_so(name, which, value):
    bad = {"y": Y, **arguments(name), "h": torch.full((2,), 0.1, dtype=torch.float64)}
    bad[which] = bad[which].clone()
    bad[which].view(-1)[0] = value
    with refused(ConvergenceError, name, "NaN"):
        getattr(functional, name)(**bad)


# What cannot be done


@pytest.mark.parametrize("kind", ["H1", "MS2", "MLP"])
def test_networks_without_inverse_say_which_have_one(kind):
    with refused(NotInvertibleError, kind, "H2", "MS1"):
        network(kind).inverse(torch.ones(4))


def test_an_mlp_is_no_ode_and_cannot_be_refined():
    with refused(OptionError, "MLP", "refined"):
        hdnn.MLP(4, 2).refine(2)


def test_an_mlp_has_no_hamiltonian_field():
    with refused(hdnn.HDNNError, "MLP"):
        hdnn.MLP(4, 2).field()


# Before any work


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "tan"},
        {"init": "zero"},
        {"step": -1.0},
        {"step": 0.1, "T": 1.0},
        {"X": torch.eye(3)},
        {"X": torch.eye(2) * NAN},
        {"dtype": torch.int64},
        {"sparsity": [[0, 1], [1, 0]]},
        {"sparsity": torch.ones(3, 2, 2)},
    ],
)
def test_bad_options_are_refused_before_any_random_number_is_drawn(options):
    before = torch.get_rng_state()
    with pytest.raises(hdnn.HDNNError):
        hdnn.H2(4, 2, **options)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bad_last_layer_is_refused_before_the_first_is_run(name, monkeypatch):
    ran = []
    sigma = hdnn.activations.get("tanh")
    spy = hdnn.activations.Activation(
        "tanh", lambda x: ran.append(1) or sigma(x), sigma.slope, sigma.integral, 0.0, 1.0
    )
    monkeypatch.setitem(hdnn.activations._REGISTRY, "tanh", spy)
    last = [k for k, v in arguments(name).items() if torch.is_tensor(v)][-1]
    with pytest.raises(ShapeError):
        call(name, Y, **{last: arguments(name)[last][:1]})
    assert not ran
    with hdnn.engine.use(engine="reference", backprop="stored"):  # where sigma is called
        call(name, Y)
    assert ran


# Checks inside a compiled graph

COMPILED = {
    "H1": hdnn.H1,
    "MS3": hdnn.MS3,
    "verlet": partial(hdnn.HamiltonianNet, integrator="verlet"),
}


def same_as_eager(compiled, net, batch):
    y = torch.randn(batch, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (compiled, net):
        out = function(y)
        found.append([out, *torch.autograd.grad(out.square().sum(), [y, *net.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


# Dynamo itself makes an instance of each autograd function that it traces.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", COMPILED)
def test_the_checks_of_steps_can_be_traced_with_sizes_and_steps_that_change(kind):
    torch._dynamo.reset()
    net = COMPILED[kind](4, 3, dtype=torch.float64)
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (5, 2, 9):
        same_as_eager(compiled, net, batch)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_networks_that_differ_in_T_compile_one_after_the_other():
    torch._dynamo.reset()
    for T in (0.5, 1.0, 3.0):
        net = hdnn.H2(4, 3, T=T, dtype=torch.float64)
        same_as_eager(torch.compile(net, fullgraph=True, backend="aot_eager"), net, 5)


def test_a_compiled_function_takes_any_step_and_refuses_one_that_is_none():
    torch._dynamo.reset()
    weights = {k: v for k, v in hdnn.H2(4, 3).weights().items() if k != "h"}
    y = torch.randn(5, 4)

    def plain(h):
        with torch.no_grad():
            return functional.h2(y, **weights, h=h)

    compiled = torch.compile(plain, dynamic=True, backend="eager")
    for h in (0.1, 0.2, 0.3, 1):
        torch.testing.assert_close(compiled(h), plain(h))
    for h in (-0.1, 0.0, NAN, INF):
        with pytest.raises(StepError):
            compiled(h)


# The small tools


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_positive_float_takes_exactly_the_finite_positive_numbers(value):
    if math.isfinite(value) and value > 0:
        assert errors.positive_float("h", value) == value
    else:
        with refused(StepError, "h", "> 0", str(value)):
            errors.positive_float("h", value)


@example(10**60)
@given(st.integers())
def test_positive_int_takes_exactly_the_counting_numbers_that_an_index_can_hold(value):
    if 1 <= value < 2**63:
        assert errors.positive_int("N", value) == value
    else:
        with refused(ShapeError, "N", str(value)):
            errors.positive_int("N", value)


def test_messages_stay_readable_whatever_they_quote():
    for wrong in (
        lambda: hdnn.H2(4, 10**5000),
        lambda: hdnn.H2(4, -(10**5000)),
        lambda: hdnn.H2(10**400, 2),
        lambda: hdnn.H2(4, 2, step=10**5000),
        lambda: hdnn.H2(4, 2, step=[0.1] * 10**5),
        lambda: hdnn.H2(4, 2, activation="x" * 10**5),
        lambda: hdnn.H2(4, 2, init="x" * 10**5),
        lambda: hdnn.load("x" * 10**5),
        lambda: errors.probability("p", 10**5000),
        lambda: errors.flag("f", 10**5000),
        lambda: errors.choose("option", 10**5000, ["a"]),  # pyright: ignore[reportArgumentType]
    ):
        with pytest.raises(hdnn.HDNNError) as caught:
            wrong()
        assert len(str(caught.value)) < 500
    path = "/a/" * 40
    assert path in str(hdnn.HDNNError(f"cannot read {path}"))


@given(st.text(), st.sets(st.text(min_size=1), min_size=1))
def test_choose_takes_exactly_the_known_options(given_, known):
    if given_ in known:
        assert errors.choose("option", given_, known) == given_
    else:
        with pytest.raises(OptionError) as caught:
            errors.choose("option", given_, known)
        listed = [str(caught.value).find(option) for option in sorted(known)]
        assert -1 not in listed
        assert all(a <= b for a, b in pairwise(listed)) or len(known) > 1


def test_a_missing_extra_is_named_with_the_command_that_installs_it():
    with refused(errors.MissingExtraError, "no_such_module", "pip install 'hdnn[plot]'"):
        errors.require("no_such_module", extra="plot")
    assert errors.require("math", extra="plot") is math


def test_odds_and_ends_are_refused_in_a_sentence():
    net = hdnn.H2(4, 2)
    model = hdnn.Model(None, net, hdnn.SoftmaxHead(4, 2))
    for kind, wrong in (
        (hdnn.errors.StepError, lambda: hdnn.H2(4, 2, step=10**400)),
        (hdnn.errors.OptionError, lambda: hdnn.H2(4, 2, generator=3)),
        (hdnn.errors.OptionError, lambda: hdnn.H2(4, 2, device="nowhere")),
        (hdnn.errors.OptionError, lambda: hdnn.H2(4, 2, sparsity={"R": [[1]], "typo": 1})),
        (hdnn.errors.OptionError, lambda: hdnn.regularization.gradient_budget(model)),
        (hdnn.errors.CheckpointError, lambda: hdnn.load(None)),
        (hdnn.errors.CheckpointError, lambda: hdnn.save(net, None)),
        (ShapeError, lambda: hdnn.interconnection.canonical(4.0)),
        (ShapeError, lambda: hdnn.analysis.symplectic_defect(torch.eye(4), torch.eye(2))),
        (hdnn.errors.DataError, lambda: model.loss(torch.ones(3, 4), torch.ones(3))),
    ):
        with pytest.raises(kind):
            wrong()
    assert hdnn.Augment(2, 4, torch.tensor([1, 3])).placement == [1, 3]
