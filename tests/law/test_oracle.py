"""Every function of hdnn.functional against forty digits and more: values and gradients, to 1e-12.

The first half shows that the oracle is right on its own; the second compares the library to it.
"""

import pytest
import torch

from hdnn import activations, functional
from law import oracle
from law.oracle import exact, mp

TOLERANCE = 1e-12  # of an error relative to max(1, |expected|)
TINY = mp.mpf(10) ** -40  # what the oracle must reach without differences
SMALL = mp.mpf(10) ** -25  # what it must reach with them

ACTIVATIONS = sorted(oracle.SIGMA)
SPLIT = ["h2", "h2_inverse", "verlet", "yoshida4"]  # K_p, K_q and X
IMPLICIT = ["implicit_h2", "midpoint"]
INVERTIBLE = ["verlet", "yoshida4", *IMPLICIT, "ms1", "ms3"]  # by inverse=True
STACKS = ["h1", *SPLIT, *IMPLICIT, "ms1", "ms2", "ms3", "mlp"]
POINTS = [-40, -20.5, -8, -1.3, -1e-6, 0, 1e-6, 0.3, 1, 5, 20.5, 25, 40]

N, R = 2, 3  # layers; rows, as many as neither n nor n/2


def shapes(name, n, rows=R):
    """A function's weights in the order of its arguments; `rows` are those of the second K."""
    m = n // 2
    if name in SPLIT:
        return {"K_p": (N, R, m), "K_q": (N, rows, m), "b_p": (N, R), "b_q": (N, rows)}
    return {
        "h1": {"K": (N, R, n), "b": (N, R)},
        "implicit_h2": {"K": (N, R, n), "b": (N, R)},
        "midpoint": {"K": (N, R, n), "b": (N, R)},
        "ms1": {"K_0": (N, m, m), "b_1": (N, m), "b_2": (N, m)},
        "ms2": {"K": (N, n, n), "b": (N, n)},
        "ms3": {"K_1": (N, R, m), "K_2": (N, rows, m), "b_1": (N, R), "b_2": (N, rows)},
        "mlp": {"K": (N, n, n), "b": (N, n)},
        "energy": {"K": (R, n), "b": (R,)},
    }[name]


def draw(name, *, n=4, batch=(), rows=R, h="per layer", X=None, J=None):
    """Random arguments by name; X and J are None, "shared" or "per layer"; h is 0.4 if "shared".

    Weights, X and J have spectral norm 1 for implicit functions, so that h S |X| |K|^2 < 1 and
    a step has exactly one solution; elsewhere the weights have norm 2.
    """
    generator = torch.Generator().manual_seed(2021)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def unit(A):
        return A / torch.linalg.matrix_norm(A, 2)[..., None, None]

    def skew(A):
        return A - A.mT

    arguments = {"y": normal(*batch, n)}
    for key, shape in shapes(name, n, rows).items():
        value = normal(*shape)
        if name == "ms2" and key == "K":
            value = skew(value)
        if key[0] == "K":
            value = (1 if name in IMPLICIT else 2) * unit(value)
        arguments[key] = value
    if name not in ("mlp", "energy"):
        arguments["h"] = 0.4 if h == "shared" else torch.tensor([0.3, 0.5], dtype=torch.float64)
    layers = {"shared": (), "per layer": (N,)}
    if X is not None:
        arguments["X"] = unit(normal(*layers[X], n // 2, n // 2))
    if J is not None:
        arguments["J"] = unit(skew(normal(*layers[J], n, n)))
    return arguments


def lists(arguments):
    """Tensors and floats as exact numbers in lists; y as a list of samples."""
    values = {k: v.tolist() if torch.is_tensor(v) else v for k, v in arguments.items()}
    if arguments["y"].dim() != 2:
        values["y"] = arguments["y"].reshape(-1, arguments["y"].shape[-1]).tolist()
    return {key: exact(value) for key, value in values.items()}


def expected(name, numbers, activation, trajectory=False):
    """The oracle's answer for every sample."""
    rest = {key: value for key, value in numbers.items() if key != "y"}
    answers = [getattr(oracle, name)(y, activation=activation, **rest) for y in numbers["y"]]
    if trajectory or name == "energy":
        return answers
    return [answer[0 if name == "h2_inverse" else -1] for answer in answers]


def call(name, arguments, activation, trajectory=False, **flags):
    """The library's answer: X and J by keyword, all else by position, as the oracle has them."""
    options = {key: arguments[key] for key in ("X", "J") if key in arguments}
    positional = [value for key, value in arguments.items() if key not in options]
    if name == "energy":
        return functional.energy(*positional, activation=activation)
    function = getattr(functional, name)
    options |= {"activation": activation, "trajectory": trajectory, **flags}
    result = function(*positional, **options)
    batch, n = arguments["y"].shape[:-1], arguments["y"].shape[-1]
    assert result.shape == ((N + 1, *batch, n) if trajectory else (*batch, n))
    return result.movedim(0, -2) if trajectory else result


def assert_close(actual, expected, what):
    """`expected` in nested lists or flat, in the order of the tensor `actual`."""
    pairs = zip(actual.reshape(-1).tolist(), oracle.flat(expected), strict=True)
    error = max(abs(mp.mpf(a) - e) / max(1, abs(e)) for a, e in pairs)
    assert error <= TOLERANCE, f"{what} is off by {mp.nstr(error, 3)}"


def assert_gradient(gradient, loss, nested, what):
    """The slope of loss() along a random direction, which no wrong entry of a gradient has."""
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(11)).double()
    answer = oracle.along(loss, nested, exact(direction.reshape(-1).tolist()))
    assert_close((gradient * direction).sum(), [answer], what)


def assert_agreement(name, activation="tanh", trajectory=False, by_entry=False, **drawn):
    """Values, and the gradients of a linear function of them to every argument."""
    arguments = draw(name, **drawn)
    numbers = lists(arguments)
    leaves = {k: v.requires_grad_() for k, v in arguments.items() if torch.is_tensor(v)}
    result = call(name, arguments, activation, trajectory)
    assert result.dtype == torch.float64
    assert_close(result, expected(name, numbers, activation, trajectory), name)

    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((weights * result).sum(), list(leaves.values()))
    weights = exact(weights.reshape(-1).tolist())

    def loss():
        return mp.fdot(weights, oracle.flat(expected(name, numbers, activation, trajectory)))

    for key, gradient in zip(leaves, gradients, strict=True):
        what = f"the gradient of {name} to {key}"
        if by_entry:
            assert_close(gradient, oracle.gradient(loss, numbers[key]), what)
        else:
            assert_gradient(gradient, loss, numbers[key], what)


# The oracle on its own ----------------------------------------------------------------------


def distance(a, b):
    return max(abs(x - y) for x, y in zip(oracle.flat(a), oracle.flat(b), strict=True))


def jacobian(name, numbers, **options):
    """The derivative of y_N by y_0, a row for each entry of y_N, for the first sample."""
    numbers = dict(numbers, y=numbers["y"][0])

    def entry(i):
        return oracle.gradient(
            lambda: getattr(oracle, name)(**numbers, **options)[-1][i], numbers["y"]
        )

    return [entry(i) for i in range(len(numbers["y"]))]


def product(A, B):
    return [oracle.times(oracle.transpose(B), row) for row in A]


def inverse(A):
    return (mp.matrix(A) ** -1).tolist()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("x", [-40, -1.3, 0.3, 40])
def test_the_oracle_integrates_sigma_as_quadrature_does(activation, x):
    cuts = mp.linspace(0, x, 9)
    quadrature = mp.quad(oracle.SIGMA[activation], cuts)
    assert abs(oracle.INTEGRAL[activation](mp.mpf(x)) - quadrature) <= TINY


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_oracle_knows_the_range_of_every_slope(activation):
    low, high = oracle.slope_range(activation)
    slopes = [oracle.slope(activation, mp.mpf(2 * i + 1) / 32) for i in range(-320, 320)]
    assert low - SMALL <= min(slopes) <= low + 1e-3
    assert high - 1e-3 <= max(slopes) <= high + SMALL


@pytest.mark.parametrize("activation", sorted(oracle.STEEPEST))
def test_the_oracle_knows_where_a_slope_is_extreme(activation):
    x = oracle.STEEPEST[activation]
    for end in (x, -x):
        assert abs(oracle.derivative(lambda x: oracle.slope(activation, x), end)) <= SMALL


def test_the_oracle_inverts_h2():
    numbers = lists(draw("h2", X="per layer"))
    rest = {key: value for key, value in numbers.items() if key != "y"}
    forward = oracle.h2(numbers["y"][0], **rest)
    backward = oracle.h2_inverse(forward[-1], **rest)
    assert distance(forward, backward) <= TINY


@pytest.mark.parametrize("name", ["h2", "verlet", "yoshida4", "implicit_h2", "midpoint"])
def test_the_oracle_is_symplectic(name):
    drawn = {"J": "shared", "n": 3} if name == "midpoint" else {"X": "shared"}
    numbers = lists(draw(name, **drawn))
    J = numbers["J"] if name == "midpoint" else oracle.interconnection(numbers["X"])
    M = jacobian(name, numbers)
    assert distance(product(product(M, J), oracle.transpose(M)), J) <= SMALL
    assert distance(M, oracle.eye(len(M))) > 0.1


def separable():
    """One sample, one layer of h2, the K and b of the same field for the others, and X."""
    numbers = lists(draw("h2", X="shared"))
    K_p, K_q, b_p, b_q = (numbers[key][0] for key in ("K_p", "K_q", "b_p", "b_q"))
    zeros = [mp.zero] * 2
    K = [row + zeros for row in K_p] + [zeros + row for row in K_q]
    return numbers["y"][0], ([K_p], [K_q], [b_p], [b_q]), ([K], [b_p + b_q]), numbers["X"]


def test_the_oracle_solves_the_explicit_layer_when_K_is_block_diagonal():
    y, split, full, X = separable()
    h = mp.mpf("0.4")
    assert distance(oracle.implicit_h2(y, *full, h, X=X), oracle.h2(y, *split, h, X=X)) <= TINY


@pytest.mark.parametrize(
    ("name", "order"),
    [("h1", 1), ("h2", 1), ("implicit_h2", 1), ("verlet", 2), ("midpoint", 2), ("yoshida4", 4)],
)
def test_the_oracle_steps_one_field_with_the_order_of_each_scheme(name, order):
    y, split, full, X = separable()

    def step(name, y, h):
        if name in SPLIT:
            return getattr(oracle, name)(y, *split, h, X=X)[-1]
        option = {"X": X} if name == "implicit_h2" else {"J": oracle.interconnection(X)}
        return getattr(oracle, name)(y, *full, h, **option)[-1]

    def error(h):
        reference = y
        for _ in range(8):
            reference = step("yoshida4", reference, h / 8)
        return distance(step(name, y, h), reference)

    h = mp.mpf(10) ** -6
    assert abs(mp.log(error(h) / error(h / 2), 2) - (order + 1)) < 1e-2


def test_the_oracle_turns_the_linear_oscillator_as_by_hand():
    h, one, zero = mp.mpf("0.4"), mp.one, mp.zero
    split = ([[[one]]], [[[one]]], [[zero]], [[zero]])
    full = ([oracle.eye(2)], [[zero, zero]])
    a, c = 1 - h**2 / 2, 1 + h**2 / 4
    by_hand = {
        "h1": [[1, -h], [h, 1]],
        "h2": [[1, -h], [h, 1 - h**2]],
        "implicit_h2": [[1, -h], [h, 1 - h**2]],
        "verlet": [[a, -h * (1 - h**2 / 4)], [h, a]],
        "midpoint": [[(2 - c) / c, -h / c], [h / c, (2 - c) / c]],
    }
    for name, matrix in by_hand.items():
        weights = split if name in SPLIT else full
        columns = [
            getattr(oracle, name)(unit, *weights, h, activation="identity")[-1]
            for unit in oracle.eye(2)
        ]
        assert distance(oracle.transpose(columns), matrix) <= TINY, name


def test_the_oracle_agrees_that_MS1_is_H2_with_halves_swapped():
    numbers = lists(draw("ms1"))
    y, K_0, b_1, b_2, h = numbers["y"][0], *(numbers[k] for k in ("K_0", "b_1", "b_2", "h"))
    swap = [y[2:] + y[:2] for y in oracle.ms1(y, K_0, b_1, b_2, h)]
    K_q = [oracle.transpose(K) for K in K_0]
    X = [inverse(K) for K in K_q]
    assert distance(oracle.h2(swap[0], K_0, K_q, b_2, b_1, h, X=X), swap) <= TINY


def test_the_oracle_agrees_that_MS2_is_H1_with_J_the_inverse_of_K_transposed():
    numbers = lists(draw("ms2"))
    y, K, b, h = numbers["y"][0], *(numbers[k] for k in ("K", "b", "h"))
    J = [inverse(oracle.transpose(K_j)) for K_j in K]
    assert distance(oracle.h1(y, K, b, h, J=J), oracle.ms2(y, K, b, h)) <= TINY


def test_the_oracle_agrees_that_MS3_is_H2_after_q_changes_sign():
    numbers = lists(draw("ms3"))
    K_1, K_2, b_1, b_2, h = (numbers[k] for k in ("K_1", "K_2", "b_1", "b_2", "h"))
    states = oracle.ms3(numbers["y"][0], K_1, K_2, b_1, b_2, h)
    flip = [y[:2] + oracle.scaled(-1, y[2:]) for y in states]
    K_q = [[oracle.scaled(-1, row) for row in K] for K in K_1]
    assert distance(oracle.h2(flip[0], K_2, K_q, b_2, b_1, h), flip) <= TINY


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_oracle_has_the_field_as_the_gradient_of_its_energy(activation):
    numbers = lists(draw("energy"))
    y, K, b = numbers["y"][0], numbers["K"], numbers["b"]
    gradient = oracle.gradient(lambda: oracle.energy(y, K, b, activation), y)
    assert distance(gradient, oracle.grad_H(K, b, y, activation)) <= SMALL


# Activations --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("which", ["sigma", "slope", "integral"])
def test_activations_agree_with_forty_digits(name, which):
    smooth = [x for x in POINTS if not (x == 0 and name == "relu" and which == "slope")]
    x = torch.tensor(smooth, dtype=torch.float64)
    by_name = {
        "sigma": oracle.SIGMA[name],
        "slope": lambda x: oracle.slope(name, x),
        "integral": oracle.INTEGRAL[name],
    }
    answers = list(map(by_name[which], exact(x.tolist())))
    assert_close(getattr(activations.get(name), which)(x), answers, f"{which} of {name}")


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("which", ["sigma", "slope", "integral"])
def test_activations_differentiate_to_forty_digits(name, which):
    smooth = [x for x in POINTS if not (x == 0 and name == "relu" and which != "integral")]
    x = torch.tensor(smooth, dtype=torch.float64, requires_grad=True)
    result = getattr(activations.get(name), which)(x)
    if not result.requires_grad:  # a constant slope
        assert (which, name) in [("slope", "relu"), ("slope", "identity")]
        return
    (gradient,) = torch.autograd.grad(result.sum(), x)
    by_name = {
        "sigma": lambda x: oracle.slope(name, x),
        "slope": lambda x: oracle.derivative(lambda z: oracle.slope(name, z), x),
        "integral": oracle.SIGMA[name],
    }
    answers = list(map(by_name[which], exact(x.tolist())))
    assert_close(gradient, answers, f"the derivative of {name}'s {which}")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_know_the_range_of_their_slope(name):
    activation = activations.get(name)
    low, high = oracle.slope_range(name)
    assert abs(activation.s_min - low) <= TOLERANCE
    assert abs(activation.s_max - high) <= TOLERANCE
    assert abs(activation.S - max(abs(low), abs(high))) <= TOLERANCE
    assert activation.monotone == (low >= 0)


# Functions ----------------------------------------------------------------------------------
# A kinked activation is safe: no draw brings a pre-activation within a difference of 0.


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", [*STACKS, "energy"])
def test_every_function_agrees_with_forty_digits_for_every_activation(name, activation):
    by_entry = activation == "tanh"
    assert_agreement(name, activation, trajectory=name != "energy", by_entry=by_entry)


@pytest.mark.parametrize("h", ["shared", "per layer"])
@pytest.mark.parametrize("name", [name for name in STACKS if name != "mlp"])
def test_every_network_agrees_with_forty_digits_for_either_h(name, h):
    assert_agreement(name, h=h)


@pytest.mark.parametrize("batch", [(2,), (1, 2)], ids=str)
@pytest.mark.parametrize("name", [*STACKS, "energy"])
def test_every_function_agrees_with_forty_digits_for_any_batch(name, batch):
    assert_agreement(name, h="shared", batch=batch, trajectory=name != "energy")


@pytest.mark.parametrize("n", [2, 6])
@pytest.mark.parametrize("name", [*STACKS, "energy"])
def test_every_function_agrees_with_forty_digits_for_any_width(name, n):
    assert_agreement(name, n=n)


@pytest.mark.parametrize("X", ["shared", "per layer"])
@pytest.mark.parametrize("name", [*SPLIT, "implicit_h2"])
def test_split_functions_agree_with_forty_digits_for_any_X(name, X):
    assert_agreement(name, X=X, trajectory=True)


@pytest.mark.parametrize("name", [*SPLIT, "ms3"])
def test_split_functions_agree_with_forty_digits_when_rows_of_p_and_q_differ(name):
    assert_agreement(name, rows=5)


@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize("J", ["shared", "per layer"])
@pytest.mark.parametrize("name", ["h1", "midpoint"])
def test_h1_and_midpoint_agree_with_forty_digits_for_any_J_and_odd_n(name, J, n):
    assert_agreement(name, J=J, n=n, trajectory=True)


@pytest.mark.parametrize("name", STACKS)
def test_second_derivatives_agree_with_forty_digits(name):
    drawn = {"J": "shared"} if name in ("h1", "midpoint") else {}
    drawn = {"X": "shared"} if name in (*SPLIT, "implicit_h2") else drawn
    arguments = draw(name, **drawn)
    numbers = lists(arguments)
    leaves = [value.requires_grad_() for value in arguments.values()]
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(4, generator=generator, dtype=torch.float64)
    ways = [torch.randn(v.shape, generator=generator, dtype=torch.float64) for v in leaves]

    result = (weights * call(name, arguments, "tanh")).sum()
    gradients = torch.autograd.grad(result, leaves, create_graph=True)
    slope = sum((way * gradient).sum() for way, gradient in zip(ways, gradients, strict=True))
    second = torch.autograd.grad(slope, leaves)

    weights = exact(weights.tolist())
    direction = exact(torch.cat([way.reshape(-1) for way in ways]).tolist())

    def loss():
        return mp.fdot(weights, expected(name, numbers, "tanh")[0])

    def directional():
        return oracle.along(loss, list(numbers.values()), direction)

    for key, actual in zip(numbers, second, strict=True):
        what = f"the second derivative of {name} to {key}"
        assert_gradient(actual, directional, numbers[key], what)


@pytest.mark.parametrize("name", INVERTIBLE)
def test_inverses_agree_with_forty_digits(name):
    """From the forward map F alone: dy_0 = M^-1 (dy_N - dF), M the derivative of F by y_0."""
    arguments = draw(name)
    numbers = lists(arguments)
    states = expected(name, numbers, "tanh", trajectory=True)
    arguments["y"] = torch.tensor(list(map(float, states[0][-1])), dtype=torch.float64)
    leaves = [value.requires_grad_() for value in arguments.values()]
    result = call(name, arguments, "tanh", inverse=True)
    assert_close(result, states[0][0], f"the inverse of {name}")
    result = call(name, arguments, "tanh", trajectory=True, inverse=True)
    assert_close(result, states, f"the trajectory of the inverse of {name}")

    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(4, generator=generator, dtype=torch.float64)
    gradients = torch.autograd.grad((weights * result[..., 0, :]).sum(), leaves)
    M = jacobian(name, numbers)
    adjoint = oracle.times(inverse(oracle.transpose(M)), exact(weights.tolist()))

    def loss():
        return -mp.fdot(adjoint, expected(name, numbers, "tanh")[0])

    for key, gradient in zip(numbers, gradients, strict=True):
        what = f"the gradient of the inverse of {name} to {key}"
        if key == "y":
            assert_close(gradient, adjoint, what)
        else:
            assert_gradient(gradient, loss, numbers[key], what)
