"""Stacks of few samples and wide layers: matrix products in place, a layer at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn import activations
from hdnn.engine.kernels import cpu
from hdnn.engine.kernels.protocol import Stack, Tensors, schedule


def _value_and_slope(
    a: Tensor, activation: str, *, slope: bool = True
) -> tuple[Tensor, Tensor | None]:
    """sigma(a) and, if asked for and not a function of that, sigma'(a). May overwrite a."""
    if activation == "tanh":
        return a.tanh_(), None
    if activation == "relu":
        return a.relu_(), None
    if activation == "identity":
        return a, None
    found = activations.get(activation)
    return found.sigma(a), found.slope(a) if slope else None


def _times_slope(w: Tensor, z: Tensor, slope: Tensor | None, activation: str) -> Tensor:
    """w sigma'(a), in place."""
    if activation == "tanh":
        return torch.ops.aten.tanh_backward.grad_input(w, z, grad_input=w)
    if activation == "relu":
        return torch.ops.aten.threshold_backward.grad_input(w, z, 0, grad_input=w)
    return w if slope is None else w.mul_(slope)


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
    """Backwards through y += c sigma(x K^T + b) V: undo it unless y is None, and add gradients.

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


def _steps(kept: Tensor, steps: int, like: Tensor) -> Tensor:
    """The memory for what each step reads: (steps, *like.shape)."""
    return kept[: steps * like.numel()].view(steps, *like.shape)


class BlasShears:
    """A shear stack; in pairs of weights, those that move p come first."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        half, layer = schedule(stack.turns, stack.layers, stack.inverse)
        self.order = list(zip(half.tolist(), layer.tolist(), strict=True))

    @torch.no_grad()
    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        K, b, V = self._pairs(tensors)
        halves = [part.contiguous() for part in y.chunk(2, -1)]
        room = [y.new_empty(len(y), weights.shape[1]) for weights in K]
        kept = y.new_empty(self.kept_size(self.stack)) if keep else None
        sources = None if kept is None else _steps(kept, len(self.order), halves[0])
        for s, ((i, j), c) in enumerate(zip(self.order, tensors[-1].tolist(), strict=True)):
            if sources is not None:
                sources[s].copy_(halves[1 - i])
            a = torch.addmm(b[i][j], halves[1 - i], K[i][j].mT, out=room[i])
            z, _ = _value_and_slope(a, self.stack.activation, slope=False)
            Vi = V[i]
            _step(halves[i], z, None if Vi is None else Vi[j], c)
        return torch.cat(halves, -1), kept

    @torch.no_grad()
    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients(None, kept, g, tensors)[1]

    @torch.no_grad()
    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        halves, gradients = self._gradients(y_N, None, g, tensors)
        return torch.cat(halves, -1), gradients

    def _gradients(
        self, y: Tensor | None, kept: Tensor | None, g: Tensor, tensors: Tensors
    ) -> tuple[list[Tensor], Tensors]:
        """The halves of y_0, if they are rebuilt from y_N, and the gradients."""
        (K, b, V), kind, coef = self._pairs(tensors), self.stack.kind, tensors[-1]
        gx = [part.clone() for part in g.chunk(2, -1)]
        x = [] if y is None else [part.clone() for part in y.chunk(2, -1)]
        sources = None if kept is None else _steps(kept, len(self.order), gx[0])
        room = [tuple(g.new_empty(2, len(g), weights.shape[1])) for weights in K]
        ones = g.new_ones(len(g))
        dK, db = ([torch.zeros_like(t) for t in weights] for weights in (K, b))
        dV = {"same": dK, "general": [torch.zeros_like(t) for t in K]}.get(kind, [None, None])
        dcoef, steps = [], coef.tolist()
        for s in reversed(range(len(self.order))):
            i, j = self.order[s]
            Vi, dVi = V[i], dV[i]
            source, undone = (x[1 - i], x[i]) if sources is None else (sources[s], None)
            dcoef.append(
                _shear_back(
                    *(source, undone, gx[1 - i], gx[i]),
                    *(K[i][j], b[i][j], None if Vi is None else Vi[j], steps[s]),
                    (dK[i][j], db[i][j], None if dVi is None else dVi[j]),
                    *(self.stack.activation, room[i], ones),
                )
            )
        dV_p, dV_q = (dV[1], dV[0]) if kind == "general" else (None, None)
        dc = torch.stack(dcoef[::-1]) if dcoef else torch.zeros_like(coef)
        return x, (torch.cat(gx, -1), dK[1], dK[0], db[1], db[0], dV_p, dV_q, dc)

    def _pairs(self, tensors: Tensors) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Any]:
        K_p, K_q, b_p, b_q, V_p, V_q, _ = tensors
        same, none = (K_q, K_p), (None, None)
        V = {"same": same, "identity": none}.get(self.stack.kind, (V_q, V_p))
        return (K_q, K_p), (b_q, b_p), V

    # As much as the tiles keep, since a compiled graph does not know which kernel will run.
    kept_size = staticmethod(cpu.kept_size)
    why_not = staticmethod(cpu.why_not)


class BlasEuler:
    """An Euler stack."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    @torch.no_grad()
    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        K, b, V, h = tensors
        x, V = y.clone(), self._moves(K, V)
        kept = y.new_empty(self.kept_size(self.stack)) if keep else None
        states = None if kept is None else _steps(kept, len(K), y)
        room = y.new_empty(len(y), K.shape[1])
        for j, c in enumerate(h.tolist()):
            if states is not None:
                states[j].copy_(x)
            a = torch.addmm(b[j], x, K[j].mT, out=room)
            z, _ = _value_and_slope(a, self.stack.activation, slope=False)
            _step(x, z, None if V is None else V[j], c)
        return x, kept

    @torch.no_grad()
    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        (K, b, V, h), kind = tensors, self.stack.kind
        V = self._moves(K, V)
        gx, spare, states = g.clone(), torch.empty_like(g), _steps(kept, len(K), g)
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
                    *(self.stack.activation, room, ones),
                )
            )
        if kind == "canonical" and dV is not None:
            dV_p, dV_q = dV.chunk(2, -1)
            dK += torch.cat([dV_q, -dV_p], -1)
        dh = torch.stack(dh[::-1]) if dh else torch.zeros_like(h)
        return gx, dK, db, dV if kind == "general" else None, dh

    def _moves(self, K: Tensor, V: Tensor | None) -> Tensor | None:
        if self.stack.kind == "canonical":
            K_p, K_q = K.chunk(2, -1)
            return torch.cat([-K_q, K_p], -1)  # K J^T
        return {"same": K, "identity": None}.get(self.stack.kind, V)

    kept_size = staticmethod(cpu.kept_size)
    why_not = staticmethod(cpu.why_not)
