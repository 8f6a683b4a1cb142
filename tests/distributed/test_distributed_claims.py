"""The two claims of prop:distributed_implicit_Euler: local updates, and where training ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch.nn.functional import binary_cross_entropy_with_logits

import hdnn
from hdnn import functional, regularization, sparsity
from hdnn.data import planar
from hdnn.operators import block_sparse
from hdnn.sparsity import BlkSprs, Sparsity
from strategies import Random, seeds

F64 = torch.float64


def ring(M: int, reach: int = 1) -> torch.Tensor:
    distance = (torch.arange(M)[:, None] - torch.arange(M)).abs()
    return torch.minimum(distance, M - distance) <= reach


# (i) The updates use neighbours only, exactly if the condition holds


class Nodes:
    """Random patterns T and R, sizes >= 2, and dense random blocks wherever they allow any."""

    def __init__(self, seed: int) -> None:
        self.random, self.normal = torch.Generator().manual_seed(seed), Random(seed)
        self.M = int(torch.randint(2, 7, (), generator=self.random))
        self.sizes = torch.randint(2, 4, (self.M,), generator=self.random).tolist()
        self.m = sum(self.sizes)
        self.R = self.pattern()
        T = self.pattern()
        self.T = T | T.mT
        self.K_p, self.K_q = BlkSprs(self.R, self.sizes).project(self.normal(2, self.m, self.m))
        self.X = BlkSprs(self.T, self.sizes).project(self.normal(self.m, self.m))

    def pattern(self) -> torch.Tensor:
        density = torch.rand((), generator=self.random)
        free = torch.rand(self.M, self.M, generator=self.random) < 0.8 * density
        return free | torch.eye(self.M, dtype=torch.bool)

    def graph(self, needed: torch.Tensor) -> torch.Tensor:
        """At random: any graph, one that has all links needed and more, or all of them but one."""
        S, kind = self.pattern(), int(torch.randint(3, (), generator=self.random))
        if kind == 0:
            return S
        S = S | needed
        links = (needed & ~torch.eye(self.M, dtype=torch.bool)).nonzero().tolist()
        if kind == 2 and links:
            S[tuple(links[int(torch.randint(len(links), (), generator=self.random))])] = False
        return S

    def jacobians(self, p: torch.Tensor, q: torch.Tensor, b: torch.Tensor):
        """d(p_update)/dq and d(q_update)/dp for h = 1, and the two factors of the way back."""
        of_q = self.K_q.mT @ ((1 - torch.tanh(self.K_q @ q + b).square())[:, None] * self.K_q)
        of_p = self.K_p.mT @ ((1 - torch.tanh(self.K_p @ p + b).square())[:, None] * self.K_p)
        forward = -self.X.mT @ of_q, self.X @ of_p
        backward = -of_q @ self.X, of_p @ self.X.mT
        return forward, backward

    def used(self, jacobians) -> torch.Tensor:
        blocks = [block_sparse.block_pattern(J, self.sizes, self.sizes) for J in jacobians]
        return blocks[0] | blocks[1]


def test_updates_are_local_if_and_only_if_the_patterns_meet_the_condition():
    """1,000 random triples: none has a dependency that S forbids unless `is_local` says no."""
    local = 0
    for seed in range(1000):
        nodes = Nodes(seed)
        p, q, b = 0.2 * nodes.normal(3, nodes.m)  # small: no slope of tanh rounds to zero
        forward, backward = (nodes.used(J) for J in nodes.jacobians(p, q, b))
        S = nodes.graph(forward | backward)
        forbidden = (forward | backward) & ~S
        assert sparsity.is_local(nodes.T, nodes.R, S) == (not forbidden.any())
        found = sparsity.explain(nodes.T, nodes.R, S)
        assert {(b.node, b.needs) for b in found if b.forward} == pairs(forward & ~S)
        assert {(b.node, b.needs) for b in found if b.backward} == pairs(backward & ~S)
        local += not forbidden.any()
    assert 300 < local < 700  # both answers are tested


def pairs(pattern: torch.Tensor) -> set[tuple[int, int]]:
    return {(i, k) for i, k in pattern.nonzero().tolist()}


@given(seeds)
def test_the_jacobians_are_those_of_a_layer_and_of_its_gradient(seed):
    """p' = p - X^T K_q^T sigma(K_q q + b), q' = q + X K_p^T sigma(K_p p' + b), and the way back."""
    nodes = Nodes(seed)
    m, normal = nodes.m, nodes.normal
    b = normal(m)

    def layer(y: torch.Tensor) -> torch.Tensor:
        K_p, K_q = nodes.K_p[None], nodes.K_q[None]
        return functional.h2(y, K_p, K_q, b[None], b[None], 1.0, X=nodes.X)

    y = normal(2 * m).requires_grad_()
    new = layer(y)
    (kick, drift), (kick_back, drift_back) = nodes.jacobians(new[:m].detach(), y[m:].detach(), b)
    eye, none = torch.eye(m, dtype=F64), torch.zeros(m, m, dtype=F64)
    first = torch.cat([torch.cat([eye, kick], 1), torch.cat([none, eye], 1)])
    then = torch.cat([torch.cat([eye, none], 1), torch.cat([drift, eye], 1)])
    torch.testing.assert_close(torch.autograd.functional.jacobian(layer, y), then @ first)
    delta = normal(2 * m)
    (before,) = torch.autograd.grad(new, y, delta)
    gamma = delta[:m] + drift_back @ delta[m:]
    torch.testing.assert_close(before, torch.cat([gamma, delta[m:] + kick_back @ gamma]))


# (ii) Training ends where the gradients of the free entries vanish, and no others need to


@pytest.fixture(scope="module")
def trained():
    """H2 on a ring of eight nodes, trained to the end: the network, and the loss of its weights."""
    points = planar.double_moons(80, dtype=F64)
    x, t = points.x_train, points.t_train.double()
    M, N, h = 8, 2, 1.0
    y = x.new_zeros(len(x), 2 * M)
    y[:, 0], y[:, -1] = x[:, 0], x[:, 1]
    net = hdnn.H2(
        2 * M,
        N,
        step=h,
        sparsity=Sparsity(ring(M), torch.eye(M), ring(M, 2)),
        learn_X=True,
        dtype=F64,
        generator=torch.Generator().manual_seed(0),
    )
    head = torch.nn.Parameter(0.1 * Random(0)(2 * M))

    def loss(K_p, K_q, b_p, b_q, X, head):
        out = functional.h2(y, K_p, K_q, b_p, b_q, h, X=X)
        decay = regularization.weight_decay([K_p, K_q, b_p, b_q, X, head])
        smooth = regularization.smoothness(torch.cat([K_p, K_q], -1), torch.cat([b_p, b_q], -1), h)
        return binary_cross_entropy_with_logits(out @ head, t) + 3e-3 * (decay + smooth)

    def weights():
        return [net.weight(name) for name in ("K_p", "K_q", "b_p", "b_q", "X")] + [head]

    parameters = [*net.parameters(), head]
    optimiser = torch.optim.LBFGS(
        parameters,
        max_iter=4000,
        history_size=50,
        tolerance_grad=5e-7,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        value = loss(*weights())
        value.backward()
        return value

    start = closure().item()
    optimiser.step(closure)
    return net, parameters, loss, weights, start, closure().item()


def test_training_ends_where_all_gradients_of_free_entries_vanish(trained):
    net, parameters, _, _, start, end = trained
    assert end < 0.8 * start
    assert {name for name, _ in net.named_parameters()} == {
        "K_p_free", "K_q_free", "b_p", "b_q", "X_free",
    }  # fmt: skip
    for parameter in parameters:
        assert parameter.grad.abs().max() < 1e-6
        assert parameter.abs().max() > 1e-2  # and not because all weights have decayed


def test_there_masked_entries_have_gradients_along_which_the_loss_would_fall(trained):
    _, _, loss, weights, _, end = trained
    dense = [weight.detach().clone().requires_grad_() for weight in weights()]
    loss(*dense).backward()
    K_p, K_q, X, masked = dense[0], dense[1], dense[4], ~ring(8)
    for K in (K_p, K_q):
        assert K.grad[:, ~masked].abs().max() < 1e-6
    assert X.grad.diag().abs().max() < 1e-6
    assert max(K.grad[:, masked].abs().max() for K in (K_p, K_q)) > 1e-4
    assert X.grad.fill_diagonal_(0).abs().max() > 1e-4
    with torch.no_grad():
        assert loss(*(weight - 0.1 * weight.grad for weight in dense)) < end - 1e-8
