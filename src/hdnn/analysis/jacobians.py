"""The Jacobians of all layers in closed form, at given states: no autograd, no loop over layers.

Everything is in denominator layout, so that with row vectors dy_{j+1} = dy_j M_j. A layer that adds
h sigma(y K^T + b) V to the state has M = I + h K^T D V with D = diag(sigma') (eq:FE_BP); the
implicit layers solve for the state that they also depend on (eq:backward_implicit_euler).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.activations import Activation
from hdnn.base.shapes import Step
from hdnn.integrators import splitting
from hdnn.interconnection import times_J, times_X
from hdnn.networks import MLP, MS1, MS2, MS3, HamiltonianNet, Network, ODENetwork
from hdnn.networks.promise import own_methods

Updates = tuple[
    tuple[splitting.Shear, ...], tuple[Tensor, ...], tuple[Tensor | None, Tensor | None]
]


def layer_jacobians(net: Network, states: Tensor, layers: slice = slice(None)) -> Tensor:
    """M_j = dy_{j+1}/dy_j, (L, B, n, n), of all or some layers, given their states (L+1, B, n).

    Of a subclass that computes in its own way, by automatic differentiation of its `layer`.
    """
    if own_methods(net):
        return _differentiated(net, states[:-1], range(net.layers)[layers])
    each, shared = net.weights_by_layer()
    w = {**shared, **{name: value[layers] for name, value in each.items()}}
    sigma = activations.get(net.activation)
    y, after = states[:-1], states[1:]
    if isinstance(net, MLP):
        return _through(y, w["K"], w["b"], None, sigma)
    h = _steps(w["h"], len(y), y)
    if isinstance(net, MS2):
        return _eye(y) + h * _through(y, w["K"], w["b"], None, sigma)
    updates = _updates(net, w)
    if updates is not None:
        return _shears(*updates, states, h, sigma)
    assert isinstance(net, HamiltonianNet)
    K, b = w["K"], w["b"]
    if net.integrator == "forward_euler":
        return _eye(y) + h * _through(y, K, b, times_J(K, w["J"]), sigma)
    if net.integrator == "midpoint":
        A = 0.5 * h * _through(0.5 * (y + after), K, b, times_J(K, w["J"]), sigma)
        # dy_{j+1} (I - A) = dy_j (I + A)
        return (_eye(y) + A) @ _inverse(_eye(y) - A)
    return _semi_implicit(y, after, K, b, w["X"], h, sigma)


def inverse_jacobians(net: Network, states: Tensor, layers: slice = slice(None)) -> Tensor | None:
    """M_j^-1 of layers that are shears: each of them undone, and nothing is solved; else None."""
    if own_methods(net):
        return None
    each, shared = net.weights_by_layer()
    w = {**shared, **{name: value[layers] for name, value in each.items()}}
    updates = _updates(net, w)
    if updates is None:
        return None
    h = _steps(w["h"], len(states) - 1, states)
    return _shears(*updates, states, h, activations.get(net.activation), undone=True)


def quick_trajectory(net: Network, y: Tensor) -> Tensor:
    """`net.trajectory` of y (B, n) by fewer calls, where layers are p- and q-updates."""
    updates = None if own_methods(net) else _updates(net, net.weights())
    if updates is None or updates[2][0] is not updates[1][0]:  # or V is not K
        return net.trajectory(y)
    assert isinstance(net, ODENetwork)
    shears, weights, _ = updates
    sigma, steps = activations.get(net.activation), net.steps().tolist()
    K_p, K_q, b_p, b_q = (weight.unbind(0) for weight in weights)
    states = y.new_empty(net.layers + 1, *y.shape)
    states[0] = y
    p, q = y.chunk(2, -1)
    for j, h in enumerate(steps):
        for half, part in shears:
            if half == "p":
                p = torch.addmm(p, sigma(torch.addmm(b_q[j], q, K_q[j].T)), K_q[j], alpha=-part * h)
            else:
                q = torch.addmm(q, sigma(torch.addmm(b_p[j], p, K_p[j].T)), K_p[j], alpha=part * h)
        torch.cat([p, q], -1, out=states[j + 1])
    return states


def _updates(net: Network, w: dict[str, Any]) -> Updates | None:
    """A layer as p- and q-updates: these, K_p, K_q, b_p, b_q, and by what z moves q and p."""
    if isinstance(net, MS1):
        K = w["K_0"]
        return splitting.MS1, (K.mT, K, w["b_1"], w["b_2"]), (None, None)
    if isinstance(net, MS3):
        K_p, K_q = w["K_2"], w["K_1"]
        return splitting.MS3, (K_p, K_q, w["b_2"], w["b_1"]), (K_p, K_q)
    if isinstance(net, HamiltonianNet) and net.scheme.layout == "split":
        K_p, K_q = w["K_p"], w["K_q"]
        V = times_X(K_p, w["X"]), times_X(K_q, w["X"], adjoint=True)
        return net.scheme.shears, (K_p, K_q, w["b_p"], w["b_q"]), V
    return None


def _steps(h: Step, N: int, like: Tensor) -> Tensor:
    """h as (N, 1, 1, 1)."""
    steps = h if isinstance(h, Tensor) else torch.tensor(h, dtype=like.dtype, device=like.device)
    return steps.to(like.dtype).expand(N).view(N, 1, 1, 1)


def _eye(y: Tensor) -> Tensor:
    return torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)


def _slopes(y: Tensor, K: Tensor, b: Tensor, sigma: Activation) -> Tensor:
    """sigma'(K y + b) for states (N, B, k): (N, B, r, 1)."""
    return sigma.slope(y @ K.mT + b[:, None])[..., None]


def _product(K: Tensor, D: Tensor, V: Tensor | None) -> Tensor:
    """K^T D V for weights (N, r, k) and slopes (N, B, r, 1)."""
    if V is None:  # the identity
        return K.mT[:, None] * D.mT
    N, B, r, _ = D.shape
    if r > B:
        return K.mT[:, None] @ (D * V[:, None])
    # Many samples: one product for all of a layer's, with the r matrices k_i v_i^T as its rows.
    outer = (K[..., None] * V[:, :, None]).reshape(N, r, -1)
    return (D[..., 0] @ outer).reshape(N, B, K.shape[-1], V.shape[-1])


def _through(y: Tensor, K: Tensor, b: Tensor, V: Tensor | None, sigma: Activation) -> Tensor:
    """K^T D V at states (N, B, n)."""
    return _product(K, _slopes(y, K, b, sigma), V)


def _shears(
    shears: tuple[splitting.Shear, ...],
    weights: tuple[Tensor, ...],
    V: tuple[Tensor | None, Tensor | None],
    states: Tensor,
    h: Tensor,
    sigma: Activation,
    *,
    undone: bool = False,
) -> Tensor:
    """The product of a layer's p- and q-updates, or its inverse."""
    K_p, K_q, b_p, b_q = weights
    y, m = states[:-1], states.shape[-1] // 2
    p, q = y.chunk(2, -1)
    M = None
    for k, (half, fraction) in enumerate(shears):
        # What moves is added times a signed fraction of h; its rate comes from the other half.
        c = (fraction if half == "q" else -fraction) * h
        source, K, b, V_s = (q, K_q, b_q, V[1]) if half == "p" else (p, K_p, b_p, V[0])
        a = torch.baddbmm(b[:, None], source, K.mT)
        A = _product(K, c * sigma.slope(a)[..., None], V_s)
        M = _one_less(M, A, half, m) if undone else _one_more(M, A, half, m)
        if k + 1 < len(shears):
            move = c[..., 0] * (sigma(a) if V_s is None else sigma(a) @ V_s)
            p, q = (p + move, q) if half == "p" else (p, q + move)
    assert M is not None
    return M


def _one_more(M: Tensor | None, A: Tensor, half: str, m: int) -> Tensor:
    """M times a shear: the columns of the moving half take A times those of the other."""
    to, of = (slice(m), slice(m, None)) if half == "p" else (slice(m, None), slice(m))
    if M is None:
        M = torch.eye(2 * m, dtype=A.dtype, device=A.device).repeat(*A.shape[:2], 1, 1)
        M[..., of, to] = A
    else:
        M[..., to] += M[..., of] @ A
    return M


def _one_less(M: Tensor | None, A: Tensor, half: str, m: int) -> Tensor:
    """The inverse of a shear times M: the rows of the other half lose A times those that move."""
    if M is None:
        return _one_more(None, -A, half, m)
    to, of = (slice(m), slice(m, None)) if half == "p" else (slice(m, None), slice(m))
    M[..., of, :] -= A @ M[..., to, :]
    return M


@torch.enable_grad()
def _differentiated(net: Network, y: Tensor, layers: range) -> Tensor:
    """M_j by one backward pass for each entry of y_{j+1}; samples must not mix."""
    found = []
    for state, j in zip(y, layers, strict=True):
        start = state.detach().requires_grad_()
        end = net.layer(start, j)
        entries = [
            torch.autograd.grad(end[:, c].sum(), start, retain_graph=True, allow_unused=True)[0]
            for c in range(end.shape[1])
        ]
        columns = [torch.zeros_like(state) if entry is None else entry for entry in entries]
        found.append(torch.stack(columns, -1))
    return torch.stack(found)


def _semi_implicit(
    y: Tensor, after: Tensor, K: Tensor, b: Tensor, X: Tensor | None, h: Tensor, sigma: Activation
) -> Tensor:
    """The general semi-implicit Euler layer, with z = sigma(K (p_{j+1}, q_j) + b)."""
    m = y.shape[-1] // 2
    (p, q), K_p, K_q = (after[..., :m], y[..., m:]), *K.chunk(2, -1)
    D = sigma.slope(p @ K_p.mT + q @ K_q.mT + b[:, None])[..., None]
    V_p, V_q = h * (D * times_X(K_p, X)[:, None]), h * (D * times_X(K_q, X, adjoint=True)[:, None])
    by_p, by_q = K_p.mT[:, None], K_q.mT[:, None]
    eye = _eye(p)
    E = _inverse(eye + by_p @ V_q)  # dp_{j+1}/dp_j
    F = -(by_q @ V_q) @ E  # dp_{j+1}/dq_j
    from_p = torch.cat([E, E @ by_p @ V_p], -1)
    from_q = torch.cat([F, eye + (by_q + F @ by_p) @ V_p], -1)
    return torch.cat([from_p, from_q], -2)


def _inverse(A: Tensor) -> Tensor:
    """No decompositions in half precision."""
    return torch.linalg.inv(A.to(torch.promote_types(A.dtype, torch.float32))).to(A.dtype)
