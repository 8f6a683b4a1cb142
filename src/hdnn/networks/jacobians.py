"""The Jacobians of all layers in closed form, at given states: no autograd, no loop over layers.

Everything is in denominator layout, so that with row vectors dy_{j+1} = dy_j M_j. A layer that adds
h sigma(y K^T + b) V to the state has M = I + h K^T D V with D = diag(sigma') (eq:FE_BP); the
implicit layers solve for the state that they also depend on (eq:backward_implicit_euler).

States are (N+1, B, n), stacked weights (N, ...), steps h (N, 1, 1, 1), and results (N, B, n, n). A
V of None is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn.activations import Activation
from hdnn.base.shapes import Step
from hdnn.integrators import splitting
from hdnn.integrators.chords import chord_slope
from hdnn.interconnection import times_X
from hdnn.operators import dense


class ShearLayers(NamedTuple):
    """Layers in which p and q take turns: K_p and b_p move q, K_q and b_q move p."""

    shears: tuple[splitting.Shear, ...]
    K_p: Tensor
    K_q: Tensor
    b_p: Tensor
    b_q: Tensor
    X: Tensor | None = None
    bare: bool = False  # whether a half moves by sigma alone, and not by sigma times K and X

    def norms(self, h: Tensor) -> Tensor:
        """|A| / S of all shears I + A, for steps h (N,)."""
        X = 1.0 if self.X is None else dense.norm(self.X)
        K = {"p": dense.norm(self.K_q).square(), "q": dense.norm(self.K_p).square()}
        return torch.cat([abs(part) * h * X * K[half] for half, part in self.shears])


def steps(h: Step, states: Tensor) -> Tensor:
    """h of each layer as (N, 1, 1, 1)."""
    N, placed = len(states) - 1, {"dtype": states.dtype, "device": states.device}
    given = h if isinstance(h, Tensor) else torch.tensor(h, **placed)
    return given.to(states.dtype).expand(N).view(N, 1, 1, 1)


def forward_euler(
    states: Tensor, K: Tensor, b: Tensor, V: Tensor | None, h: Tensor, sigma: Activation
) -> Tensor:
    """M = I + h K^T D V."""
    return _eye(states) + h * through(states[:-1], K, b, V, sigma)


def midpoint(
    states: Tensor, K: Tensor, b: Tensor, V: Tensor | None, h: Tensor, sigma: Activation
) -> Tensor:
    """M (I - A) = I + A with A = h/2 K^T D V at the midpoint of two states."""
    A = 0.5 * h * through(0.5 * (states[:-1] + states[1:]), K, b, V, sigma)
    return (_eye(states) + A) @ _inverse(_eye(states) - A)


def discrete_gradient(
    states: Tensor, K: Tensor, b: Tensor, V: Tensor | None, h: Tensor, sigma: Activation
) -> Tensor:
    """M (I - h K^T D' V) = I + h K^T D V, with the derivatives D, D' of the chords at both ends."""
    before, after = (y @ K.mT + b[:, None] for y in (states[:-1], states[1:]))
    D, D_after = chord_slope(sigma, after, before), chord_slope(sigma, before, after)
    A, A_after = (h * _product(K, d[..., None], V) for d in (D, D_after))
    return (_eye(states) + A) @ _inverse(_eye(states) - A_after)


def semi_implicit(
    states: Tensor, K: Tensor, b: Tensor, X: Tensor | None, h: Tensor, sigma: Activation
) -> Tensor:
    """The general semi-implicit Euler layer, with z = sigma(K (p_{j+1}, q_j) + b)."""
    y, after, m = states[:-1], states[1:], states.shape[-1] // 2
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


def of_shears(
    layers: ShearLayers, states: Tensor, h: Tensor, sigma: Activation, *, undone: bool = False
) -> Tensor:
    """The product of each layer's p- and q-updates, or its inverse, which needs no solving."""
    shears, K_p, K_q, b_p, b_q, X, bare = layers
    V_p = None if bare else times_X(K_p, X)
    V_q = None if bare else times_X(K_q, X, adjoint=True)
    y, m = states[:-1], states.shape[-1] // 2
    p, q = y.chunk(2, -1)
    M = None
    for k, (half, fraction) in enumerate(shears):
        # One half moves by a signed fraction of h times a rate that depends on the other half.
        c = (fraction if half == "q" else -fraction) * h
        source, K, b, V = (q, K_q, b_q, V_q) if half == "p" else (p, K_p, b_p, V_p)
        a = torch.baddbmm(b[:, None], source, K.mT)
        A = _product(K, c * sigma.slope(a)[..., None], V)
        M = _one_less(M, A, half, m) if undone else _one_more(M, A, half, m)
        if k + 1 < len(shears):
            move = c[..., 0] * (sigma(a) if V is None else sigma(a) @ V)
            p, q = (p + move, q) if half == "p" else (p, q + move)
    assert M is not None
    return M


@torch.enable_grad()
def differentiated(layer: Callable[[Tensor, int], Tensor], y: Tensor, layers: range) -> Tensor:
    """M_j of any layers, by a backward pass for each entry of y_{j+1}; samples must not mix."""
    found = []
    for state, j in zip(y, layers, strict=True):
        start = state.detach().requires_grad_()
        end = layer(start, j)
        entries = [
            torch.autograd.grad(end[:, c].sum(), start, retain_graph=True, allow_unused=True)[0]
            for c in range(end.shape[1])
        ]
        columns = [torch.zeros_like(state) if entry is None else entry for entry in entries]
        found.append(torch.stack(columns, -1))
    return torch.stack(found)


def through(y: Tensor, K: Tensor, b: Tensor, V: Tensor | None, sigma: Activation) -> Tensor:
    """K^T D V at states (N, B, n)."""
    return _product(K, sigma.slope(y @ K.mT + b[:, None])[..., None], V)


def _product(K: Tensor, D: Tensor, V: Tensor | None) -> Tensor:
    """K^T D V for weights (N, r, k) and slopes (N, B, r, 1)."""
    if V is None:
        return K.mT[:, None] * D.mT
    N, B, r, _ = D.shape
    if r > B:
        return K.mT[:, None] @ (D * V[:, None])
    # Many samples: one product for all of a layer's, with the r matrices k_i v_i^T as its rows.
    outer = (K[..., None] * V[:, :, None]).reshape(N, r, -1)
    return (D[..., 0] @ outer).reshape(N, B, K.shape[-1], V.shape[-1])


def _one_more(M: Tensor | None, A: Tensor, half: str, m: int) -> Tensor:
    """M times a shear: adds A times the other half's columns to those of the moving half."""
    to, of = (slice(m), slice(m, None)) if half == "p" else (slice(m, None), slice(m))
    if M is None:
        M = torch.eye(2 * m, dtype=A.dtype, device=A.device).repeat(*A.shape[:2], 1, 1)
        M[..., of, to] = A
    else:
        M[..., to] += M[..., of] @ A
    return M


def _one_less(M: Tensor | None, A: Tensor, half: str, m: int) -> Tensor:
    """The inverse of a shear times M: takes A times the moving rows off those of the other half."""
    if M is None:
        return _one_more(None, -A, half, m)
    to, of = (slice(m), slice(m, None)) if half == "p" else (slice(m, None), slice(m))
    M[..., of, :] -= A @ M[..., to, :]
    return M


def _eye(y: Tensor) -> Tensor:
    return torch.eye(y.shape[-1], dtype=y.dtype, device=y.device)


def _inverse(A: Tensor) -> Tensor:
    """The inverse, in float32 at least: there are no decompositions in half precision."""
    return torch.linalg.inv(A.to(torch.promote_types(A.dtype, torch.float32))).to(A.dtype)
