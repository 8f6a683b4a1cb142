"""Extreme singular values of dy_N/dy_j by products alone, against those of the whole matrix."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdnn import H1, H2, MLP, MS1, HamiltonianUnit, models
from hdnn.analysis import (
    backward_sensitivity,
    chain_extremes,
    extreme_singular_values,
    extremes,
    lanczos,
    norms,
    unit_extremes,
)
from hdnn.errors import ConvergenceError, OptionError, ShapeError
from hdnn.networks import unit_derivatives
from strategies import Random, seeds

F64 = torch.float64
IMAGE = (4, 3, 3)


def make(network, seed=0, scale=0.3, *, layers=3, dtype=F64, **options):
    """A unit in evaluation with random weights and running statistics."""
    options = {"step": 0.5, "activation": "gelu"} | options
    unit = HamiltonianUnit(4, layers, network=network, dtype=F64, **options)
    normal = Random(seed)
    with torch.no_grad():
        for p in unit.parameters():
            p.copy_(scale * normal(*p.shape))
        for name, b in unit.named_buffers():
            if b.is_floating_point():
                b.copy_(normal(*b.shape).square() + 0.5 if "var" in name else normal(*b.shape))
    return unit.to(dtype).eval().requires_grad_(False)


def image(seed=1, batch=1, dtype=F64):
    return Random(seed)(batch, *IMAGE).to(dtype)


def whole(unit, y, j):
    """The singular values of dy_N/dy_j, by automatic differentiation of the layers themselves."""
    states = unit.trajectory(y)

    def rest(y_j):
        # The layers before j do not see y_j: they are run, and their end is replaced.
        for layer in range(j, unit.layers):
            y_j = one_layer(unit, layer)(y_j)
        return y_j

    n = y.numel()
    matrix = torch.autograd.functional.jacobian(rest, states[j]).reshape(n, n)
    return torch.linalg.svdvals(matrix)


def one_layer(unit, j):
    """A unit with the weights of one layer."""
    names = ("network", "kernel", "padding", "groups", "norm", "activation")
    options = {name: getattr(unit, name) for name in names}
    h = unit.step[j] if isinstance(unit.step, tuple) else unit.step
    one = HamiltonianUnit(unit.channels, 1, step=h, reversible=False, dtype=F64, **options)
    own = unit.state_dict()
    state = {k: own[k] if k.startswith("after") else own[k][j : j + 1] for k in one.state_dict()}
    one.load_state_dict(state)
    one.after = None
    return one.eval().requires_grad_(False)


def close(found, expected, tol):
    torch.testing.assert_close(float(found), float(expected), rtol=tol, atol=0.0)


UNITS = [
    {"network": "h1", "norm": "after"},
    {"network": "h1", "activation": "relu", "norm": "inside"},
    {"network": "h1", "groups": 2, "step": [0.2, 0.5, 0.3]},
    {"network": "h1", "padding": 0},
    {"network": "h2", "norm": "inside"},
    {"network": "h2", "padding": 2},
    {"network": "h2", "groups": 2, "activation": "tanh", "step": [0.2, 0.5, 0.3]},
]


# Derivatives


@pytest.mark.parametrize("options", UNITS)
def test_layers_are_multiplied_by_transposed_and_undone(options):
    unit, y = make(**options), image()
    states, chain = unit.trajectory(y), unit.layer_derivatives(y)
    v, u = image(2), image(3)
    for j, M in enumerate(chain):
        _, expected = torch.func.jvp(one_layer(unit, j), (states[j],), (v,))
        torch.testing.assert_close(M.forwards(v), expected)
        torch.testing.assert_close((M.backwards(u) * v).sum(), (u * M.forwards(v)).sum())
        tol = {"rtol": 1e-3, "atol": 1e-3} if unit.network == "h1" else {}
        torch.testing.assert_close(M.undo(M.forwards(v)), v, **tol)
        torch.testing.assert_close(M.undo_backwards(M.backwards(u)), u, **tol)


def test_a_traced_function_is_multiplied_and_transposed():
    block, y = next(iter(models.resnet56(depth=8, dtype=F64).eval().blocks)), Random(0)(1, 16, 4, 4)
    M = extremes.Traced(block.requires_grad_(False), y)
    v, u = Random(1)(*y.shape), Random(2)(*y.shape)
    torch.testing.assert_close(M.forwards(v), torch.func.jvp(block, (y,), (v,))[1])
    torch.testing.assert_close((M.backwards(u) * v).sum(), (u * M.forwards(v)).sum())


def test_where_a_layer_cannot_be_undone_an_upper_bound_is_left(monkeypatch):
    monkeypatch.setattr(unit_derivatives, "ITERATIONS", 3)
    unit, y = make("h1", scale=1.0), image()
    with pytest.raises(ConvergenceError, match="close to singular"):
        unit.layer_derivatives(y)[0].undo(y)
    found = unit_extremes(unit, y, dense=0, steps=8)
    assert found.smallest_missed.isinf().all()
    assert (found.smallest >= unit_extremes(unit, y).smallest).all()


# Units


@given(seeds, st.floats(0.05, 0.5), st.sampled_from(UNITS))
@settings(max_examples=10)
def test_both_extremes_of_a_unit_are_those_of_the_whole_matrix(seed, scale, options):
    unit, y = make(seed=seed, scale=scale, **options), image(seed)
    found = unit_extremes(unit, y, layers=[0, 2], dense=0, steps=36)
    exact = unit_extremes(unit, y, layers=[0, 2])
    for i, j in enumerate((0, 2)):
        values = whole(unit, y, j)
        close(exact.largest[i, 0], values[0], 1e-10)
        close(found.largest[i, 0], values[0], 1e-9)
        if values[0] < 1e6 * values[-1]:  # else the whole matrix does not know it
            close(exact.smallest[i, 0], values[-1], 1e-8)
            close(found.smallest[i, 0], values[-1], 1e-3)
    assert not exact.largest_missed.any()


@given(seeds, st.floats(0.05, 0.5), st.booleans())
@settings(max_examples=10)
def test_in_an_h2_unit_the_smallest_is_one_over_the_largest(seed, scale, normed):
    unit = make("h2", seed, scale, norm="inside" if normed else "none")
    found = unit_extremes(unit, image(seed, batch=2), dense=0, steps=36)
    assert found.largest.shape == (3, 2)
    product = found.smallest * found.largest
    torch.testing.assert_close(product, torch.ones_like(product), rtol=1e-7, atol=0.0)
    assert (found.largest >= 1 - 1e-9).all()


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_few_steps_stay_inside_the_spectrum_and_within_their_bounds(network):
    unit, y = make(network), image()
    exact = unit_extremes(unit, y)
    for steps in (1, 4, 16, 32):
        few = unit_extremes(unit, y, dense=0, steps=steps)
        assert (few.largest <= exact.largest * (1 + 1e-9)).all()
        assert (few.smallest >= exact.smallest * (1 - 1e-4)).all()
        assert (few.largest >= exact.largest * (1 - few.largest_missed)).all()
        assert (1 / few.smallest >= (1 - few.smallest_missed - 1e-4) / exact.smallest).all()
        values = whole(unit, y, 0)
        nearest = (values - few.largest[0, 0]).abs().min()
        assert nearest <= few.largest_error[0, 0] * few.largest[0, 0] + 1e-12


@pytest.mark.parametrize("network", ["h1", "h2"])
def test_float32_has_the_values_of_float64(network):
    double = unit_extremes(make(network), image(), dense=0)
    single = unit_extremes(make(network, dtype=torch.float32), image(dtype=torch.float32), dense=0)
    for a, b in zip(single[1:3], double[1:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0.0)


def true_extremes(unit, y):
    """Of dy_N/dy_0 at the states that are computed, by the layers and their inverses."""
    n, eye = y.numel(), torch.eye(y.numel(), dtype=y.dtype)
    whole_ = undone = eye.double()
    for M in unit.layer_derivatives(y):
        A = torch.stack([M.forwards(e.reshape(y.shape)).reshape(n) for e in eye], 1).double()
        whole_, undone = A @ whole_, undone @ torch.linalg.inv(A)
    return 1 / torch.linalg.matrix_norm(undone, 2), torch.linalg.matrix_norm(whole_, 2)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("network", ["h1", "h2"])
def test_a_smallest_value_is_right_or_its_error_says_that_it_is_not(network, dtype):
    told = []
    for seed, scale in enumerate((0.2, 0.5, 0.8, 1.0, 1.2, 1.4)):
        unit = make(network, seed, scale, layers=6, activation="tanh", dtype=dtype)
        y = image(seed, dtype=dtype)
        found = unit_extremes(unit, y, layers=[0])
        low, high = true_extremes(unit, y)
        assert found.largest_error > 0
        assert abs(found.largest - high) <= found.largest_error * found.largest
        assert found.smallest_error > 0
        assert abs(found.smallest - low) <= found.smallest_error * found.smallest
        told.append(float(found.smallest_error))
        if network == "h2":
            torch.testing.assert_close(found.smallest * found.largest, torch.ones(1, 1, dtype=F64))
    assert max(told) < 1e-2  # and it is known, too


def test_without_pairs_or_an_inverse_the_error_of_the_smallest_is_that_of_the_largest():
    D = torch.tensor([1e-7, 1.0, 3.0, 1e6])
    Q = torch.linalg.qr(Random(0)(4, 4)).Q.float()
    found = chain_extremes([lambda y: y @ Q @ D.diag() @ Q.T], torch.zeros(1, 4))
    assert found.smallest_error > 1  # it cannot be told from 0
    assert abs(found.smallest - 1e-7) <= found.smallest_error * found.smallest
    low, high, low_error, high_error = extreme_singular_values(
        lambda y: y @ Q @ D.diag() @ Q.T, torch.zeros(1, 4), steps=4, errors=True
    )
    assert abs(low - 1e-7) <= low_error
    assert low_error >= torch.finfo(torch.float32).eps * high
    assert abs(high - 1e6) <= high_error < 10


@pytest.mark.parametrize("X", [None, 2 * torch.eye(3)])
def test_of_a_symplectic_network_the_smallest_is_one_over_the_largest(X):
    options = {"init": "paper", "X": X, "generator": torch.Generator().manual_seed(3)}
    net = H2(6, 12, step=1.0, activation="relu", **options)
    y = Random(0)(3, 6).float()
    low, high = extreme_singular_values(net, y, steps=6)
    assert (high > 1e3).all()
    torch.testing.assert_close(low * high, torch.ones(3))
    values = backward_sensitivity(net.double(), y.double(), layers=[0])[0]
    torch.testing.assert_close(high.double(), norms(values), rtol=1e-2, atol=0.0)


def test_other_networks_are_not_taken_for_symplectic():
    for net in (H1(4, 3), MS1(4, 3), H2(4, 3, X=Random(0)(2, 2).float()), MLP(4, 3)):
        assert not extremes.symplectic(net)
    assert extremes.symplectic(H2(4, 3))


def test_values_that_a_start_does_not_reach_are_looked_for():
    D = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=F64)
    low, _ = extreme_singular_values(lambda y: y * D, torch.zeros(1, 5, dtype=F64), steps=5)
    assert low < 1e-14
    Q = torch.linalg.qr(Random(0)(6, 6)).Q
    D = torch.tensor([3e6, 2e6, 1.0, 0.5, 0.1, 0.05])
    A = (Q * D @ Q.T).float()  # here rounding takes over before all directions are seen
    _, high, k = lanczos.bidiagonalise(lambda v: A @ v, lambda u: A.T @ u, 6, 6, A)
    assert k == 6
    close(high.value, 3e6, 1e-5)


def test_what_is_not_finite_has_no_extremes():
    unit = make("h2", scale=1e6, layers=60, activation="relu", step=1.0)
    for dense in (0, 2048):
        found = unit_extremes(unit, image(batch=2).abs(), layers=[0], dense=dense)
        assert found.largest.isnan().all()
        assert found.smallest.isnan().all()
        assert found.largest_error.isinf().all()
        chain = chain_extremes([lambda y: y * 1e200] * 2, torch.ones(1, 3, dtype=F64), dense=dense)
        assert chain.largest.isnan().all()
    low, high = extreme_singular_values(lambda y: y * 1e200 * 1e200, torch.ones(1, 3, dtype=F64))
    assert low.isnan()
    assert high.isnan()


# Chains of any layers


def test_blocks_with_relu_have_singular_values_of_exactly_zero():
    torch.manual_seed(0)
    blocks = list(models.resnet56(depth=20, dtype=F64).eval().requires_grad_(False).blocks)[:3]
    y = Random(0)(1, 16, 3, 3)
    exact, found = chain_extremes(blocks, y), chain_extremes(blocks, y, dense=0, steps=144)
    torch.testing.assert_close(found.largest, exact.largest, rtol=1e-9, atol=0.0)
    assert not found.smallest.any()
    assert not exact.smallest.any()
    chain = torch.nn.Sequential(*blocks)
    matrix = torch.autograd.functional.jacobian(chain, y).reshape(144, 144)
    values = torch.linalg.svdvals(matrix)
    close(exact.largest[0, 0], values[0], 1e-10)
    last = extremes.Traced(blocks[-1], chain[:-1](y))
    count = last.dead()
    assert count == (chain(y) == 0).sum() > 0
    assert (values[-count:] < 1e-13 * values[0]).all()


def test_zeros_that_depend_on_the_state_are_none():
    y = torch.zeros(1, 3, dtype=F64)
    assert extremes.Traced(torch.sin, y).dead() == 0
    found = chain_extremes([torch.sin, torch.tanh], y + 0.3, dense=0)
    value = math.cos(0.3) * (1 - math.tanh(math.sin(0.3)) ** 2)
    close(found.smallest[0, 0], value, 1e-12)
    assert found.layers == [0, 1]


def test_without_an_inverse_the_smallest_is_an_upper_bound_of_unknown_quality():
    D = torch.linspace(0.1, 2, 200, dtype=F64)
    y = torch.zeros(1, 200, dtype=F64)
    few = chain_extremes([lambda y: D * y + 1], y, dense=0, steps=20)
    assert few.smallest > 0.1
    assert few.smallest_missed.isinf()
    assert few.smallest_error > 0
    all_ = chain_extremes([lambda y: D * y + 1], y, dense=0, steps=200)
    close(all_.smallest[0, 0], 0.1, 1e-9)
    assert not all_.smallest_missed.any()


@pytest.mark.parametrize("matrix", [torch.eye(6), torch.diag(torch.tensor([3.0, 3, 2, 2, 2, 2]))])
def test_equal_singular_values_end_early_and_are_no_zeros(matrix):
    A = matrix.double()
    low, high = extreme_singular_values(lambda y: y @ A, torch.zeros(2, 6, dtype=F64))
    torch.testing.assert_close(low, A.diagonal().min().expand(2))
    torch.testing.assert_close(high, A.diagonal().max().expand(2))


def test_the_zero_matrix_has_no_other_singular_values():
    low, high = extreme_singular_values(lambda y: 0 * y, torch.ones(1, 5, dtype=F64))
    assert low == high == 0
    found = chain_extremes([lambda y: 0 * y + 1], torch.ones(1, 5, dtype=F64), dense=0)
    assert found.largest == 0
    assert found.largest_error.isfinite()


def test_the_bound_holds_for_any_spectrum():
    assert lanczos.shortfall(10, 10) == 0
    assert lanczos.shortfall(32768, 2) == 1
    assert lanczos.shortfall(32768, 48) < 0.01
    for seed in range(20):
        D = torch.linspace(0, 1, 3000, dtype=F64).sqrt()  # no gap at the upper end
        _, high, k = lanczos.bidiagonalise(lambda v: D * v, lambda u: D * u, 3000, 12, D, seed)  # noqa: B023
        assert 1 - lanczos.shortfall(3000, k) <= high.value <= 1


# Mistakes


def test_mistakes_are_named():
    unit, y = make("h2", norm="inside"), image()
    with pytest.raises(ShapeError, match=r"layers must be whole numbers in 0 \.\. 2"):
        unit_extremes(unit, y, layers=[3])
    with pytest.raises(ShapeError, match="steps"):
        unit_extremes(unit, y, steps=0)
    with pytest.raises(ShapeError, match="takes images"):
        unit_extremes(unit, y[0])
    with pytest.raises(OptionError, match="chain_extremes"):
        unit_extremes(torch.nn.Identity(), y)
    with pytest.raises(OptionError, match=r"unit\.eval\(\)"):
        unit_extremes(unit.train(), y)
    with pytest.raises(ShapeError, match="one shape"):
        chain_extremes([lambda y: y[..., :2]], y)
    with pytest.raises(ShapeError, match="no layers"):
        chain_extremes([], y)
    with pytest.raises(ShapeError, match="no samples"):
        unit_extremes(unit.eval(), y[:0])
