"""The solver of implicit layers: x = c + B sigma(A x + a), its gradients, and how it is batched."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call, grad, jacrev, vmap

import hdnn
from hdnn import activations, functional
from hdnn.errors import ConvergenceError
from hdnn.integrators import implicit, newton, path, solutions
from strategies import ACTIVATIONS, Random, seeds

F64 = torch.float64
TANH, RELU = activations.get("tanh"), activations.get("relu")
SMOOTH = [name for name in ACTIVATIONS if name != "relu"]


def problem(seed: int, k: int, r: int, batch=(), *, factor: float = 0.5, activation="tanh"):
    """c, B, A, a with S |A| |B| = factor."""
    normal = Random(seed)
    A, B = normal(r, k), normal(k, r)
    S = activations.get(activation).S
    size = S * torch.linalg.matrix_norm(A, 2) * torch.linalg.matrix_norm(B, 2)
    return normal(*batch, k), B * factor / size, A, normal(*batch, r)


def residual(x, c, B, A, a, activation="tanh"):
    return x - c - activations.get(activation)(x @ A.mT + a) @ B.mT


def fixed_point(c, B, A, a, activation="tanh", iterations=400):
    """The one solution of a contraction, without Newton."""
    x = c
    for _ in range(iterations):
        x = c + activations.get(activation)(x @ A.mT + a) @ B.mT
    return x


# Solutions


@settings(max_examples=50)
@given(
    seeds,
    st.integers(1, 6),
    st.integers(1, 8),
    st.lists(st.integers(0, 3), max_size=2),
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([0.01, 0.5, 0.9]),
)
def test_a_contraction_is_solved_to_rounding_by_its_one_solution(seed, k, r, batch, name, factor):
    c, B, A, a = problem(seed, k, r, batch, factor=factor, activation=name)
    x = implicit.solve(c, B, A, a, activations.get(name))
    assert x.shape == c.shape
    size = 1 + float(c.abs().max() if c.numel() else 0)
    assert residual(x, c, B, A, a, name).abs().le(1e-13 * size).all()
    torch.testing.assert_close(x, fixed_point(c, B, A, a, name), rtol=1e-11, atol=1e-11)


@settings(max_examples=40)
@given(seeds, st.integers(1, 6), st.sampled_from(ACTIVATIONS), st.floats(-4, 4), st.floats(-3, 3))
def test_a_contraction_is_solved_at_any_scale(seed, k, name, state, balance):
    c, B, A, a = problem(seed, k, 2 * k, (5,), factor=0.999, activation=name)
    c, a = 10**state * c, 10**state * a
    B, A = B / 10**balance, A * 10**balance
    x = implicit.solve(c, B, A, a, activations.get(name))
    sigma = activations.get(name)
    # The rounding of z = A x + a is felt in x through B sigma'.
    z = x.abs() @ A.mT.abs() + a.abs()
    scale = 1 + x.abs().amax() + (sigma.S * z @ B.mT.abs()).amax()
    assert float(residual(x, c, B, A, a, name).abs().max() / scale) < 1e-13


@settings(max_examples=40)
@given(seeds, st.floats(1.5, 8), st.floats(-3, 3), st.floats(-1, 1))
def test_a_tanh_with_three_solutions_is_solved_by_one_of_them(seed, weight, c, a):
    """x = c + w tanh(x + a) in one dimension: three solutions for small c and a."""
    c, a = torch.tensor([[c]], dtype=F64), torch.tensor([[a]], dtype=F64)
    B, A = torch.tensor([[weight]], dtype=F64), torch.ones(1, 1, dtype=F64)
    x = implicit.solve(c, B, A, a, TANH)
    assert float(residual(x, c, B, A, a).abs()) < 1e-13 * (1 + weight)


def test_all_three_solutions_are_near_to_some_guess():
    B, A = torch.tensor([[4.0]], dtype=F64), torch.ones(1, 1, dtype=F64)
    zero = torch.zeros(1, 1, dtype=F64)
    found = [
        float(implicit.solve(torch.tensor([[c]], dtype=F64), B, A, zero, TANH))
        for c in (-0.5, 0.0, 0.5)
    ]
    assert found[1] == 0
    assert found[0] == pytest.approx(-found[2])
    assert found[2] > 3


@settings(max_examples=25)
@given(seeds, st.integers(2, 5), st.floats(1.5, 4))
def test_bounded_activations_are_solved_past_the_contraction(seed, k, factor):
    c, B, A, a = problem(seed, k, 2 * k, (4,), factor=factor)
    x = implicit.solve(c, B, A, a, TANH)
    assert float(residual(x, c, B, A, a).abs().max()) < 1e-12


def test_a_relu_without_solution_is_an_error_with_the_factor():
    one = torch.ones(1, 1, dtype=F64)
    with pytest.raises(ConvergenceError, match=r"here: .*contraction factor 3\b"):
        implicit.solve(one, 3 * one, one, one, RELU, where="here")


def test_a_relu_with_two_solutions_is_solved_by_one_of_them():
    # x = -1 + 3 relu(x): x = -1 and x = 1/2.
    one = torch.ones(1, 1, dtype=F64)
    x = implicit.solve(-one, 3 * one, one, 0 * one, RELU)
    assert float(x) in (-1.0, pytest.approx(0.5))


def test_one_sample_without_solution_fails_the_batch():
    one = torch.ones(1, 1, dtype=F64)
    c = torch.tensor([[-1.0], [1.0]], dtype=F64)
    assert float(implicit.solve(c[:1], 3 * one, one, 0 * one, RELU)) == pytest.approx(-1.0)
    with pytest.raises(ConvergenceError):
        implicit.solve(c, 3 * one, one, torch.zeros(2, 1, dtype=F64), RELU)


def test_a_sample_does_not_depend_on_its_batch():
    c, B, A, a = problem(3, 4, 6, (7,), factor=3.0)
    together = implicit.solve(c, B, A, a, TANH)
    for i in range(7):
        alone = implicit.solve(c[i], B, A, a[i], TANH)
        torch.testing.assert_close(alone, together[i], rtol=1e-13, atol=1e-13)


def test_the_guess_is_the_solution_where_nothing_is_implicit():
    c, _, A, a = problem(0, 3, 4, (2,))
    assert torch.equal(implicit.solve(c, torch.zeros(3, 4, dtype=F64), A, a, TANH), c)
    x = implicit.solve(c, torch.ones(3, 4, dtype=F64), 0 * A, a, TANH)
    torch.testing.assert_close(x, c + torch.tanh(a) @ torch.ones(4, 3, dtype=F64))


def test_a_looser_tolerance_stops_sooner():
    c, B, A, a = problem(1, 4, 6, (5,), factor=0.9)
    loose = implicit.solve(c, B, A, a, TANH, tol=1e-2)
    exact = implicit.solve(c, B, A, a, TANH)
    assert 1e-9 < float((loose - exact).abs().max()) < 1e-1
    with pytest.raises(ConvergenceError, match="max_iter = 1 "):
        implicit.solve(10 * c, 10 * B, A, a, TANH, max_iter=1)


@pytest.mark.parametrize("chunk", [1, 16, 40])
def test_large_batches_are_solved_in_pieces_with_the_same_result(monkeypatch, chunk):
    c, B, A, a = problem(2, 4, 6, (3, 5), factor=2.0)
    whole = implicit.solve(c, B, A, a, TANH)
    sizes = []
    solve = newton.Equation.newton

    def spy(equation, x, *rest):
        sizes.append(len(x))
        return solve(equation, x, *rest)

    monkeypatch.setattr(solutions, "CHUNK", chunk)
    monkeypatch.setattr(newton.Equation, "newton", spy)
    torch.testing.assert_close(implicit.solve(c, B, A, a, TANH), whole, rtol=1e-13, atol=1e-13)
    assert max(sizes) == max(1, chunk // 16)
    assert len(sizes) >= 15 // max(sizes)


def test_an_empty_batch_is_solved():
    c, B, A, a = problem(0, 3, 4, (0,))
    assert implicit.solve(c, B, A, a, TANH).shape == (0, 3)
    assert functional.midpoint(c[:, :2], Random(0)(1, 2, 2), Random(1)(1, 2), 0.1).shape == (0, 2)


# Precision


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_lower_precisions_are_solved_as_well_as_they_can_tell(dtype, tolerance, name):
    low = [t.to(dtype) for t in problem(4, 4, 6, (50,), factor=0.8, activation=name)]
    exact = [t.double() for t in low]
    x = implicit.solve(*low, activations.get(name))
    assert x.dtype == dtype
    expected = implicit.solve(*exact, activations.get(name))
    torch.testing.assert_close(x.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=25)
@given(seeds, st.integers(1, 8), st.floats(-2, 3))
def test_single_precision_never_stalls_on_a_contraction(seed, k, state):
    c, B, A, a = (t.float() for t in problem(seed, k, 2 * k, (20,), factor=0.99))
    c, a = 10**state * c, 10**state * a
    assert torch.isfinite(implicit.solve(c, B, A, a, TANH)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_lower_precision_are_close(dtype):
    weights = problem(5, 3, 4, (6,), factor=0.6)
    exact = [t.to(dtype).double().requires_grad_() for t in weights]
    low = [t.to(dtype).requires_grad_() for t in weights]
    implicit.solve(*exact, TANH).square().sum().backward()
    implicit.solve(*low, TANH).square().sum().backward()
    for p, q in zip(low, exact, strict=True):
        assert p.grad.dtype == dtype
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", ["ImplicitH2", "midpoint"])
@pytest.mark.parametrize("y_dtype", [torch.float32, torch.bfloat16])
def test_autocast_runs_forward_and_backward(kind, y_dtype):
    def make():
        options = {"T": 0.3, "generator": torch.Generator().manual_seed(0)}
        if kind == "midpoint":
            return hdnn.HamiltonianNet(4, 3, "midpoint", **options)
        return hdnn.ImplicitH2(4, 3, **options)

    net, plain = make(), make()
    y = Random(0)(5, 4).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(y.to(y_dtype))
        path = net.trajectory(y.to(y_dtype))
    out.float().square().sum().backward()
    torch.testing.assert_close(out.float(), plain(y), rtol=0.05, atol=0.05)
    assert path.shape == (4, 5, 4)
    for p in net.parameters():
        assert p.grad.dtype == torch.float32
        assert torch.isfinite(p.grad).all()


# Gradients


@settings(max_examples=25)
@given(seeds, st.integers(1, 3), st.integers(1, 3), st.sampled_from(SMOOTH), st.booleans())
def test_gradients_and_second_gradients_are_those_of_finite_differences(seed, k, r, name, batched):
    inputs = problem(seed, k, r, (2,) if batched else (), factor=0.6, activation=name)
    inputs = tuple(t.requires_grad_() for t in inputs)

    def function(*inputs):
        return implicit.solve(*inputs, activations.get(name))

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_relu_has_gradients_away_from_its_kink():
    inputs = tuple(
        t.requires_grad_() for t in problem(7, 2, 3, (2,), factor=0.6, activation="relu")
    )
    assert torch.autograd.gradcheck(lambda *i: implicit.solve(*i, RELU), inputs)


@given(seeds, st.integers(1, 4))
def test_gradients_are_those_of_the_implicit_function_theorem(seed, k):
    c, B, A, a = problem(seed, k, k + 1, factor=0.8)
    x = implicit.solve(c, B, A, a, TANH)
    D = torch.diag(TANH.slope(A @ x + a))
    expected = torch.linalg.inv(torch.eye(k, dtype=F64) - B @ D @ A)
    jacobian = torch.autograd.functional.jacobian(lambda c: implicit.solve(c, B, A, a, TANH), c)
    torch.testing.assert_close(jacobian, expected, rtol=1e-9, atol=1e-9)


def test_gradients_do_not_go_through_the_iterations():
    """The graph is one node, however many iterations were needed."""
    iterations = []
    for factor in (1e-6, 0.99):
        c, B, A, a = (t.requires_grad_() for t in problem(0, 3, 4, (2,), factor=factor))
        x = implicit.solve(c, B, A, a.expand(2, 4), TANH)
        assert "Solve" in type(x.grad_fn).__name__
        seen, todo = set(), [x.grad_fn]
        while todo:
            node = todo.pop()
            seen.add(type(node).__name__)
            todo += [n for n, _ in node.next_functions if n is not None]
        iterations.append(seen)
    assert iterations[0] == iterations[1]
    assert not any("Mm" in name or "Tanh" in name or "Sub" in name for name in iterations[1])


def test_gradients_of_a_loose_solution_are_those_at_the_solution_found():
    c, B, A, a = problem(1, 3, 4, factor=0.8)
    c = c.requires_grad_()
    x = implicit.solve(c, B, A, a, TANH, tol=1e-2)
    x.sum().backward()
    D = torch.diag(TANH.slope(A @ x.detach() + a))
    expected = torch.linalg.inv(torch.eye(3, dtype=F64) - B @ D @ A).sum(0)
    torch.testing.assert_close(c.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["implicit_h2", "midpoint"])
def test_only_asked_for_gradients_are_given(name):
    K, b, y = 0.3 * Random(0)(2, 4, 4), Random(1)(2, 4), Random(2)(3, 4).requires_grad_()
    getattr(functional, name)(y, K, b, 0.1).sum().backward()
    assert y.grad is not None
    assert K.grad is None


def test_hessians_can_be_taken():
    """Forward over reverse, the default of torch.func.hessian, and reverse over reverse."""
    c, B, A, a = problem(2, 2, 3, factor=0.5)

    def loss(c):
        return implicit.solve(c, B, A, a, TANH).square().sum()

    reverse = jacrev(jacrev(loss))(c)
    torch.testing.assert_close(reverse, reverse.mT)
    torch.testing.assert_close(torch.func.hessian(loss)(c), reverse)


# vmap


@given(seeds, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_vmap_over_states_is_a_loop(seed, k, r, V):
    c, B, A, a = problem(seed, k, r, (V, 2), factor=0.8)
    mapped = vmap(lambda c, a: implicit.solve(c, B, A, a, TANH))(c, a)
    looped = torch.stack([implicit.solve(c[i], B, A, a[i], TANH) for i in range(V)])
    torch.testing.assert_close(mapped, looped, rtol=1e-12, atol=1e-12)
    nested = vmap(vmap(lambda c, a: implicit.solve(c, B, A, a, TANH)))(c, a)
    torch.testing.assert_close(nested, looped, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "in_dims",
    [
        (0, None, None, None),
        (None, 0, None, None),
        (None, None, 0, None),
        (None, None, None, 0),
        (1, None, None, 1),
        (0, 0, 0, 0),
        (None, 2, 1, None),
        (1, 1, None, None),
    ],
)
def test_vmap_over_any_of_the_arguments_and_axes_is_a_loop(in_dims):
    V = 3
    parts = [problem(10 + i, 2, 4, (5,), factor=0.7) for i in range(V)]
    arguments = [
        parts[0][i] if d is None else torch.stack([p[i] for p in parts], d)
        for i, d in enumerate(in_dims)
    ]
    mapped = vmap(lambda *i: implicit.solve(*i, TANH), in_dims=in_dims)(*arguments)
    for v in range(V):
        one = [parts[0 if d is None else v][i] for i, d in enumerate(in_dims)]
        torch.testing.assert_close(mapped[v], implicit.solve(*one, TANH), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["implicit_h2", "midpoint"])
def test_gradients_can_be_taken_of_every_sample(name):
    K, b, y = 0.3 * Random(0)(2, 4, 4), Random(1)(2, 4), Random(2)(5, 4)

    def loss(K, b, y):
        return getattr(functional, name)(y, K, b, 0.1).square().sum()

    dK, db = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, None, 0))(K, b, y)
    for i in range(5):
        one = grad(loss, argnums=(0, 1))(K, b, y[i])
        torch.testing.assert_close(dK[i], one[0], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(db[i], one[1], rtol=1e-11, atol=1e-11)


def test_an_ensemble_of_networks_can_be_mapped_over_its_weights():
    nets = [
        hdnn.ImplicitH2(4, 2, T=0.3, dtype=F64, generator=torch.Generator().manual_seed(s))
        for s in range(3)
    ]
    params, buffers = torch.func.stack_module_state(nets)
    y = Random(0)(5, 4)
    mapped = vmap(lambda p, b: functional_call(nets[0], (p, b), (y,)))(params, buffers)
    for out, net in zip(mapped, nets, strict=True):
        torch.testing.assert_close(out, net(y), rtol=1e-12, atol=1e-12)


# The two schemes that are solved


@settings(max_examples=25)
@given(seeds, st.integers(1, 3), st.integers(1, 5), st.sampled_from(ACTIVATIONS))
def test_an_implicit_step_satisfies_its_equation(seed, m, r, name):
    normal, sigma = Random(seed), activations.get(name)
    K, b, X, y = normal(1, r, 2 * m), normal(1, r), normal(m, m), normal(3, 2 * m)
    norm = torch.linalg.matrix_norm
    h = 0.8 / float(sigma.S * norm(X, 2) * norm(K[0, :, :m], 2) * norm(K[0, :, m:], 2))
    out = functional.implicit_h2(y, K, b, h, X=X, activation=name)
    J = hdnn.interconnection.from_X(X)
    half = torch.cat([out[:, :m], y[:, m:]], -1)
    expected = y + h * (sigma(half @ K[0].mT + b[0]) @ K[0]) @ J.mT
    scale = 1 + float(expected.detach().abs().max())
    assert float((out - expected).abs().max()) < 1e-12 * scale


@settings(max_examples=25)
@given(seeds, st.integers(1, 5), st.integers(1, 5), st.sampled_from(ACTIVATIONS))
def test_a_midpoint_step_satisfies_its_equation(seed, n, r, name):
    normal, sigma = Random(seed), activations.get(name)
    K, b, J, y = normal(1, r, n), normal(1, r), normal.skew(n), normal(3, n)
    norm = float(sigma.S * torch.linalg.matrix_norm(J, 2) * torch.linalg.matrix_norm(K[0], 2) ** 2)
    h = 1.6 / max(norm, 1e-3)
    out = functional.midpoint(y, K, b, h, J=J, activation=name)
    expected = y + h * (sigma((y + out) / 2 @ K[0].mT + b[0]) @ K[0]) @ J.mT
    scale = 1 + float(expected.abs().max())
    assert float((out - expected).abs().max()) < 1e-11 * scale


def test_with_a_block_diagonal_K_nothing_is_implicit():
    net = hdnn.H2(6, 4, X=Random(0)(3, 3), init="paper", dtype=F64)
    w = net.field()
    y = Random(1)(5, 6)
    out = functional.implicit_h2(y, w["K"], w["b"], net.step, X=net.X)
    torch.testing.assert_close(out, net(y), rtol=1e-12, atol=1e-12)


def test_the_contraction_factor_is_that_of_the_errata():
    normal = Random(0)
    K, X = 50 * normal(1, 4, 4), normal(2, 2)
    norm = torch.linalg.matrix_norm
    # S |X K_q^T| |K_p| h, at most h S |X| |K_:p| |K_:q|
    sharp = float(norm(X.mT @ K[0, :, 2:].mT, 2) * norm(K[0, :, :2], 2))
    loose = float(norm(X, 2) * norm(K[0, :, :2], 2) * norm(K[0, :, 2:], 2))
    y = normal(4)
    with pytest.raises(ConvergenceError) as caught:
        functional.implicit_h2(y, K, normal(1, 4), 1.0, X=X, activation="softplus")
    said = float(str(caught.value).split("contraction factor ")[1].split(";")[0])
    assert math.isclose(said, sharp, rel_tol=0.01)
    assert said <= loose * 1.01


# Coupling


@settings(max_examples=40)
@given(seeds, st.integers(1, 6), st.integers(1, 8), st.sampled_from(ACTIVATIONS))
def test_a_coupling_below_one_is_a_contraction_though_the_norms_are_large(seed, k, r, name):
    c, B, A, a = problem(seed, k, r, (5,))
    sigma = activations.get(name)
    scale = torch.logspace(0, 2, k, dtype=F64)  # large norms, small product
    A, B = A * scale, (B.mT / scale).mT
    B = B * 0.9 / implicit.coupling(A, B, sigma.S)
    assert float(implicit.coupling(A, B, sigma.S)) == pytest.approx(0.9)
    x = implicit.solve(c, B, A, a, sigma)
    x_0 = fixed_point(c, B, A, a, name, iterations=500)  # 0.9^500 is 1e-23
    assert torch.allclose(x, x_0, rtol=1e-9, atol=1e-9 * float(1 + x_0.abs().max()))


def test_coupling_is_never_above_the_product_of_the_norms_of_absolute_values():
    _, B, A, _ = problem(0, 4, 6)
    norms = torch.linalg.matrix_norm(A.abs(), 2) * torch.linalg.matrix_norm(B.abs(), 2)
    assert float(implicit.coupling(A, B, 1.0)) <= float(norms)


@pytest.mark.parametrize("kind", ["semi_implicit_euler_full", "midpoint"])
@pytest.mark.parametrize("tied", [False, True])
def test_limited_coupling_is_what_was_asked_for_and_small_ones_stay(kind, tied):
    like = {"generator": torch.Generator().manual_seed(0), "dtype": F64, "tied": tied}
    net = hdnn.HamiltonianNet(8, 3, kind, step=[0.5, 0.1, 2.0], **like)
    before, weak = net.coupling(), net.weight("K").clone()
    net.limit_coupling(float(before.max()) + 1e-9)
    assert torch.equal(net.weight("K"), weak)
    net.limit_coupling(0.3)
    after = net.coupling()
    assert float(after.max()) == pytest.approx(0.3)
    if not tied:
        assert torch.allclose(after, before.clamp_max(0.3))
    K, m = net.weight("K"), 4
    if kind == "semi_implicit_euler_full":  # what it has in common with H2 is as it was
        assert torch.equal(K[:, :m, :m], weak[:, :m, :m])
        assert torch.equal(K[:, m:, m:], weak[:, m:, m:])


def test_coupling_is_that_of_the_equation_that_a_layer_solves():
    normal = Random(3)
    X, J = normal(3, 3), normal(6, 6)
    net = hdnn.ImplicitH2(6, 2, step=0.7, X=X, dtype=F64)
    K_p, K_q = net.weight("K").detach().chunk(2, -1)
    B = -0.7 * X.T @ K_q.mT
    assert torch.allclose(net.coupling(), implicit.coupling(K_p, B, 1.0))
    net = hdnn.HamiltonianNet(6, 2, "midpoint", step=0.7, J=J - J.T, dtype=F64)
    K = net.weight("K").detach()
    B = 0.35 * (J - J.T) @ K.mT
    assert torch.allclose(net.coupling(), implicit.coupling(K, B, 1.0))
    assert not hdnn.H2(4, 3).coupling().any()


# Several solutions


def coupled(seed: int, n: int, kind: str = "semi_implicit_euler_full", *, factor=4.0, **options):
    """A network all of whose layers have that coupling."""
    like = {"generator": torch.Generator().manual_seed(seed), "dtype": F64, **options}
    net = hdnn.HamiltonianNet(n, 1, kind, step=1.0, init="paper", **like).requires_grad_(False)
    net.assign("K", net.weight("K") * (factor / net.coupling()).sqrt().view(-1, 1, 1))
    return net


def one_by_one(function, states):
    """What a function gives for each state; None where it raises or warns that there are more."""
    results = []
    for y in states:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                results.append(function(y))
            except (ConvergenceError, implicit.SeveralSolutionsWarning):
                results.append(None)
    return results


@pytest.mark.parametrize("kind", ["semi_implicit_euler_full", "midpoint"])
@pytest.mark.parametrize("name", ["tanh", "relu", "sin"])
def test_a_round_trip_past_the_contraction_comes_back_or_says_why_not(kind, name):
    back = 0
    for seed in range(4):
        net, y = coupled(seed, 4, kind, activation=name), 2 * Random(seed)(6, 4)
        out = [(state, end) for state in y for end in one_by_one(net, [state]) if end is not None]
        for (state, _), found in zip(
            out, one_by_one(net.inverse, [e for _, e in out]), strict=True
        ):
            if found is not None:
                torch.testing.assert_close(found, state, rtol=1e-7, atol=1e-7)
                back += 1
    assert back >= 14  # of 24; relu has no solution for some


def test_an_inverse_goes_to_the_state_that_was_given_or_there_is_an_error():
    """Not every state is an end: where solutions jump, none of them comes to those in between."""
    net, y = coupled(1, 4, factor=8.0, activation="sin"), 2 * Random(1)(20, 4)
    found = one_by_one(net.inverse, y)
    ends = [(x, state) for x, state in zip(found, y, strict=True) if x is not None]
    for x, state in ends:
        torch.testing.assert_close(net(x), state, rtol=1e-6, atol=1e-6)
    assert 0 < len(ends) < 20
    with pytest.raises(ConvergenceError, match=r"no state was found .* of 20 samples \(coupling 8"):
        net.inverse(y)


def test_several_states_with_the_same_end_are_told():
    net, y = coupled(0, 4, factor=5.0, activation="sin"), 2 * Random(0)(30, 4)
    out = net(y)
    with pytest.warns(implicit.SeveralSolutionsWarning, match=r"for \d+ of 30 .*coupling 5"):
        back = net.inverse(out)
    torch.testing.assert_close(net(back), out, rtol=1e-7, atol=1e-7)
    assert not torch.allclose(back, y)


@pytest.mark.parametrize(("name", "factor", "seed"), [("tanh", 30.0, 0), ("sin", 6.0, 2)])
def test_which_solution_is_taken_does_not_hang_on_the_last_digit(name, factor, seed):
    """Nor then on the batch, whose size changes the rounding."""
    c, B, A, a = problem(seed, 3, 6, (1000,), factor=factor, activation=name)
    x = implicit.solve(c, B, A, a, activations.get(name))
    again = implicit.solve(c * (1 + 4e-16), B, A, a * (1 - 4e-16), activations.get(name))
    torch.testing.assert_close(again, x, rtol=1e-9, atol=1e-9)
    part = implicit.solve(c[:10], B, A, a[:10], activations.get(name))
    torch.testing.assert_close(part, x[:10], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [a for a in ACTIVATIONS if activations.get(a).monotone])
def test_midpoint_steps_of_a_monotone_activation_have_one_solution_at_any_coupling(
    name, monkeypatch
):
    monkeypatch.setattr(solutions, "_connected", None)  # and Newton's method alone finds it
    net, y = coupled(0, 6, "midpoint", factor=30.0, activation=name), Random(0)(20, 6)
    assert net.always_solvable
    torch.testing.assert_close(net.inverse(net(y)), y, rtol=1e-9, atol=1e-9)


@settings(max_examples=25)
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.sampled_from(ACTIVATIONS), st.floats(0.5, 5))
def test_one_solution_is_claimed_only_where_the_matrix_never_turns_singular(
    seed, k, r, name, factor
):
    _, B, A, _ = problem(seed, k, r, factor=factor, activation=name)
    sigma = activations.get(name)
    claimed = implicit.one_solution(B, A, sigma)
    assert claimed == implicit.one_solution(A.mT, B.mT, sigma) or sigma.s_min < 0
    # det(I - B D A) is affine in each slope, so its signs at the corners tell of all of them.
    ends = torch.tensor([sigma.s_min, sigma.s_max], dtype=F64)
    slopes = torch.cartesian_prod(*[ends] * r).view(-1, 1, r)
    dets = torch.linalg.det(torch.eye(k, dtype=F64) - (B * slopes) @ A)
    if claimed and sigma.s_min < sigma.s_max:
        assert (dets > 0).all()
    if float(implicit.coupling(A, B, sigma.S)) < 0.999:
        assert claimed


def test_what_is_symmetric_stays_so():
    """At zero with no bias nothing tells one side from the other, also where it is unstable."""
    net = coupled(0, 4, factor=9.0)
    net.assign("b", torch.zeros(1, 4, dtype=F64))
    assert torch.equal(net(torch.zeros(2, 4, dtype=F64)), torch.zeros(2, 4, dtype=F64))
    # Two equations side by side: the first pulls, the second is at rest where it is unstable.
    B, A = torch.tensor([[4.0, 0], [0, 4]], dtype=F64), torch.eye(2, dtype=F64)
    c, a = torch.tensor([[0.5, 0.0]], dtype=F64), torch.zeros(1, 2, dtype=F64)
    x = implicit.solve(c, B, A, a, TANH)
    assert float(x[0, 0]) > 3
    assert abs(float(x[0, 1])) < 1e-12


def test_a_curve_goes_round_the_kinks_of_relu():
    """At t = 1/2 the first unit turns on and the curve turns back, until the third holds it."""
    B = torch.tensor([[3.0, 2.0, -4.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=F64)
    c, A = torch.tensor([[-1.0, 1.0, -2.0]], dtype=F64), torch.eye(3, dtype=F64)
    equation = newton.Equation(B, A, RELU, 1e-15, 8, 50, unique=False)
    x, arrived = path.follow(equation, c, torch.zeros_like(c), 400)
    assert bool(arrived)
    torch.testing.assert_close(x, torch.tensor([[4.5, 1.0, 2.5]], dtype=F64))


def test_a_curve_to_infinity_is_given_up():
    one = torch.ones(1, 1, dtype=F64)
    equation = newton.Equation(3 * one, one, RELU, 1e-15, 8, 50, unique=False)
    _, arrived = path.follow(equation, one, one, 400)
    assert not bool(arrived)


def test_inverses_past_the_contraction_can_be_mapped_compiled_and_differentiated():
    net, y = coupled(1, 4, factor=2.0), Random(1)(3, 4)
    out = net(y)
    back = net.inverse(out)
    torch.testing.assert_close(back, y, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(vmap(net.inverse)(out), back, rtol=1e-10, atol=1e-10)
    compiled = torch.compile(net.inverse, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(out), back, rtol=1e-10, atol=1e-10)
    there, here = jacrev(net)(y[0]), jacrev(net.inverse)(out[0])
    torch.testing.assert_close(here @ there, torch.eye(4, dtype=F64), rtol=1e-7, atol=1e-7)
    K = net.weight("K").expand(2, 1, 4, 4) * torch.tensor([1.0, 0.5], dtype=F64).view(2, 1, 1, 1)
    mapped = vmap(lambda K: functional.implicit_h2(out, K, net.b, 1.0, inverse=True))(K)
    torch.testing.assert_close(mapped[0], back, rtol=1e-10, atol=1e-10)


def test_round_trips_past_the_contraction_come_back_in_single_precision():
    net, y = coupled(2, 6, factor=2.0).float(), Random(2)(20, 6).float()
    torch.testing.assert_close(net.inverse(net(y)), y, rtol=1e-3, atol=1e-3)
