"""Stacks of few samples and wide layers: matrix products in place, a layer at a time.

The interface of `cpu.py`, which calls these where BLAS is faster than its own kernels; pairs of
weights have those that move p first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn import activations

Maybe = Tensor | None
Grads = tuple[Maybe, Tensor, Tensor, Tensor, Tensor, Tensor, Maybe, Maybe, Maybe]


def _value_and_slope(a: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    """sigma(a) and, unless the value says it all, sigma'(a). May overwrite a."""
    if activation == "tanh":
        return a.tanh_(), None
    if activation == "relu":
        return a.relu_(), None
    if activation == "identity":
        return a, None
    found = activations.get(activation)
    return found.sigma(a), found.slope(a)


def _times_slope(w: Tensor, z: Tensor, slope: Tensor | None, activation: str) -> Tensor:
    """w sigma'(a), in place."""
    if activation == "tanh":
        return torch.ops.aten.tanh_backward.grad_input(w, z, grad_input=w)
    if activation == "relu":
        return torch.ops.aten.threshold_backward.grad_input(w, z, 0, grad_input=w)
    return w if slope is None else w.mul_(slope)


def _value(a: Tensor, activation: str) -> Tensor:
    if activation in ("tanh", "relu"):
        return a.tanh_() if activation == "tanh" else a.relu_()
    return activations.get(activation).sigma(a)


def _step(target: Tensor, z: Tensor, V: Tensor | None, c: float) -> None:
    """target += c z V."""
    if V is None:
        target.add_(z, alpha=c)
    else:
        target.addmm_(z, V, alpha=c)


def _shear_back(
    x: Tensor,
    y: Tensor | None,
    gx: Tensor,
    gy: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    c: float,
    grads: tuple[Tensor, Tensor, Tensor | None],
    activation: str,
    work: tuple[Tensor, ...],
    ones: Tensor,
) -> Tensor:
    """Backwards through y += c sigma(x K^T + b) V: undo it, unless y is None, and add gradients.

    Adds to gx and to grads = (dK, db, dV); returns the gradient of c.
    """
    dK, db, dV = grads
    a, w = work
    z, slope = _value_and_slope(torch.addmm(b, x, K.mT, out=a), activation)
    if y is not None:
        _step(y, z, V, -c)
    w = w.copy_(gy) if V is None else torch.mm(gy, V.mT, out=w)
    dc = torch.dot(z.view(-1), w.view(-1))
    u = _times_slope(w, z, slope, activation)
    db.addmv_(u.mT, ones, alpha=c)
    dK.addmm_(u.mT, x, alpha=c)
    if dV is not None:
        dV.addmm_(z.mT, gy, alpha=c)
    gx.addmm_(u, K, alpha=c)
    return dc


def _steps(kept: Tensor | None, steps: int, like: Tensor) -> Tensor | None:
    """The room for what each step reads: (steps, *like.shape)."""
    return None if kept is None else kept[: steps * like.numel()].view(steps, *like.shape)


@torch.no_grad()
def split_forward(
    y: Tensor,
    K: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    V: tuple[Tensor | None, Tensor | None],
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str,
    kept: Tensor | None,
) -> Tensor:
    """`split_forward`, with the weights that move p first; writes into `kept`."""
    halves = [part.contiguous() for part in y.chunk(2, -1)]
    room = [y.new_empty(len(y), weights.shape[1]) for weights in K]
    sources = _steps(kept, len(half), halves[0])
    for s, (i, j, c) in enumerate(zip(half.tolist(), layer.tolist(), coef.tolist(), strict=True)):
        if sources is not None:
            sources[s].copy_(halves[1 - i])
        a = torch.addmm(b[i][j], halves[1 - i], K[i][j].mT, out=room[i])
        Vi = V[i]
        _step(halves[i], _value(a, activation), None if Vi is None else Vi[j], c)
    return torch.cat(halves, -1)


@torch.no_grad()
def split_backward(
    y: Tensor | None,
    g: Tensor,
    K: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    V: tuple[Tensor | None, Tensor | None],
    half: Tensor,
    layer: Tensor,
    coef: Tensor,
    activation: str,
    kind: str,
    kept: Tensor | None,
) -> Grads:
    gx = [part.clone() for part in g.chunk(2, -1)]
    x = [None, None] if y is None else [part.clone() for part in y.chunk(2, -1)]
    sources = _steps(kept, len(half), gx[0])
    room = [tuple(g.new_empty(2, len(g), weights.shape[1])) for weights in K]
    ones = g.new_ones(len(g))
    dK, db = ([torch.zeros_like(t) for t in weights] for weights in (K, b))
    dV = {"same": dK, "general": [torch.zeros_like(t) for t in K]}.get(kind, [None, None])
    dcoef = []
    schedule = list(zip(half.tolist(), layer.tolist(), coef.tolist(), strict=True))
    for s, (i, j, c) in reversed(list(enumerate(schedule))):
        Vi, dVi = V[i], dV[i]
        source, undone = (x[1 - i], x[i]) if sources is None else (sources[s], None)
        assert source is not None
        dcoef.append(
            _shear_back(
                *(source, undone, gx[1 - i], gx[i]),
                *(K[i][j], b[i][j], None if Vi is None else Vi[j], c),
                (dK[i][j], db[i][j], None if dVi is None else dVi[j]),
                *(activation, room[i], ones),
            )
        )
    dV_p, dV_q = (dV[1], dV[0]) if kind == "general" else (None, None)
    dc = torch.stack(dcoef[::-1]) if dcoef else torch.zeros_like(coef)
    y_0 = None if sources is not None else torch.cat(x, -1)  # pyright: ignore
    return y_0, torch.cat(gx, -1), dK[1], dK[0], db[1], db[0], dV_p, dV_q, dc


def moves(K: Tensor, V: Tensor | None, kind: str) -> Tensor | None:
    """V of an Euler stack of that kind."""
    if kind == "canonical":
        K_p, K_q = K.chunk(2, -1)
        return torch.cat([-K_q, K_p], -1)  # K J^T
    return {"same": K, "identity": None}.get(kind, V)


@torch.no_grad()
def euler_forward(
    y: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kept: Tensor | None,
) -> Tensor:
    """y_N; writes y_0 .. y_{N-1} into `kept`."""
    x, states = y.clone(), _steps(kept, len(K), y)
    room = y.new_empty(len(y), K.shape[1])
    for j, c in enumerate(h.tolist()):
        if states is not None:
            states[j].copy_(x)
        z = _value(torch.addmm(b[j], x, K[j].mT, out=room), activation)
        _step(x, z, None if V is None else V[j], c)
    return x


@torch.no_grad()
def euler_backward(
    kept: Tensor,
    g: Tensor,
    K: Tensor,
    b: Tensor,
    V: Tensor | None,
    h: Tensor,
    activation: str,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    gx, spare = g.clone(), torch.empty_like(g)
    states = kept[: len(K) * g.numel()].view(len(K), *g.shape)
    room = tuple(g.new_empty(2, len(g), K.shape[1]))
    ones = g.new_ones(len(g))
    dK, db = torch.zeros_like(K), torch.zeros_like(b)
    dV = dK if kind == "same" else None if V is None else torch.zeros_like(K)
    dh = []
    for j, c in reversed(list(enumerate(h.tolist()))):
        gy = spare.copy_(gx)  # gx grows while gy is still needed
        dh.append(
            _shear_back(
                *(states[j], None, gx, gy, K[j], b[j], None if V is None else V[j], c),
                (dK[j], db[j], None if dV is None else dV[j]),
                *(activation, room, ones),
            )
        )
    if kind == "canonical" and dV is not None:
        dV_p, dV_q = dV.chunk(2, -1)
        dK += torch.cat([dV_q, -dV_p], -1)
    dh = torch.stack(dh[::-1]) if dh else torch.zeros_like(h)
    return gx, dK, db, dV if kind == "general" else None, dh
