"""The steps of a closed loop as one kernel: quadratic plants in float64 on a CPU, by numba.

The equations are those of `hdnn.control.step`. The force of a quadratic plant is linear, so that
each substep becomes

    x = E (y, 1, push) + P f,    f = K^T chord(K y_c + b, K x_c + b)

where y_c are the entries of controllers, and E and P are solved for once, in PyTorch. What is left
is Newton's method for a few rows, S = K P_c K^T. No elimination needs a pivot, because I - S D is
similar to a matrix whose symmetric part is at least I, for any weights and any slopes D >= 0.

Equations that share no state are solved together: each is a lane, the last axis of all arrays, and
every inner loop runs over lanes. A link has two blocks of c rows, and its P has no diagonal blocks:
P and S are kept as `c` columns, and `_across` says which.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hdnn.control.plant import Edges, colours
from hdnn.control.step import diagonal, ends, interconnection, skew
from hdnn.errors import ConvergenceError

if TYPE_CHECKING:
    from hdnn.control.loop import ClosedLoop

try:
    from numba import njit
except ImportError:  # the kernel is optional

    def njit(**_):  # pyright: ignore
        return lambda function: function

    AVAILABLE = False
else:
    AVAILABLE = True

LONGEST = 8  # samples that share lanes; fixed, so that sums do not depend on the number of cores
VECTOR = 8  # lanes are filled up to a multiple of it
ITERATIONS = 1000
HALVINGS = 40
EPS = 2.0**-52
NEAR = 0.2  # the distance of two points, below which chords are series
OPTIONS = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": {"contract", "reassoc"},
}


def unsupported_reason(loop: ClosedLoop) -> str | None:
    """A clause that says why the kernel cannot run a loop, or None."""
    K = loop.controller.K
    if not AVAILABLE:
        return "numba is not installed (pip install 'hdnn[fast]')"
    if K.device.type != "cpu" or K.dtype != torch.float64:
        return "it runs float64 on a CPU only"
    if not loop.plant.quadratic:
        return "the energy of the plant is not quadratic"
    return None


def trajectory(
    loop: ClosedLoop, y: Tensor, steps: int, first: int, push: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `System.trajectory`."""
    plant = loop.plant
    controller = loop.controller
    h = loop.step
    N, p = plant.agents, plant.states
    n = p + controller.states
    index = np.arange(N * n).reshape(N, n)
    slopes = plant.A.mT * plant.weights.unsqueeze(-2)
    H = slopes @ plant.A
    s = slopes @ plant.a.unsqueeze(-1)

    J = h * interconnection(loop)
    own = _solved(J[..., :p], H, s, J[..., p:], push is not None)
    i, k = ends(plant.links)
    C = h * skew(plant.couplings)
    H_e = diagonal(H[i], H[k])
    plants = _solved(C, H_e, torch.cat([s[i], s[k]], 1), C[..., :0], False)
    C = h * controller.C
    still = torch.eye(2 * C.shape[1], 2 * C.shape[1] + 1).to(C)
    links = still.repeat(len(C), 1, 1), torch.cat([C, -C.mT], 1)

    groups = [
        (index, np.arange(N)[:, None], [N]),
        _edges(index[:, :p], plant.links, 0),
        _edges(index[:, p:], controller.links, 2),
    ]
    if push is None:
        push = y.new_zeros(0, *y.shape)
    weights = controller.K, controller.b, *own, *plants, *links
    return _Loop.apply((steps, first), groups, y, push, *weights)  # pyright: ignore[reportReturnType]


def _solved(
    J: Tensor, H: Tensor, s: Tensor, B: Tensor, pushed: bool
) -> tuple[Tensor, Tensor]:
    """E and P of `x = y + push + J (H (y + x)_1 / 2 + s) + B f`, y_1 the first entries of y."""
    k = J.shape[-2]
    L = torch.nn.functional.pad(0.5 * J @ H, (0, k - J.shape[-1]))
    identity = torch.eye(k).to(L).expand_as(L)
    sides = [identity + L, J @ s, B]
    if pushed:
        sides.insert(2, identity)
    solved = torch.linalg.solve(identity - L, torch.cat(sides, -1))
    width = solved.shape[-1] - B.shape[-1]
    return solved[..., :width], solved[..., width:]


def _edges(index: np.ndarray, links: Edges, count: int):
    """The entries that links move, the agents whose weights they read, the sizes of colours."""
    pairs = np.array(links, np.int64).reshape(-1, 2)
    entries = index[pairs].reshape(len(pairs), 2 * index.shape[1])
    return entries, pairs[:, :count], [len(group) for group in colours(links)]


class _Lanes(NamedTuple):
    """The substeps of a group for some samples: G colours of L lanes."""

    edge: np.ndarray  # (G, L), -1 for lanes that fill up a vector
    entries: np.ndarray  # (G, k, L), of the flattened states of all samples
    agents: np.ndarray  # (G, 0 to 2, L)
    E: np.ndarray  # (G, k, width, L)
    P: np.ndarray  # (G, k, c, L)


def _lanes(group, E: np.ndarray, P: np.ndarray, samples: int, D: int) -> _Lanes:
    entries, agents, sizes = group
    L = -(-max(sizes, default=0) * samples // VECTOR) * VECTOR
    edge = np.full((len(sizes), L), -1)
    for colour, size in enumerate(sizes):
        edges = sum(sizes[:colour]) + np.arange(size)
        edge[colour, : size * samples] = np.repeat(edges, samples)
    used = edge >= 0
    of_lane = edge[used]
    sample = np.tile(np.arange(samples), len(entries))
    flat = entries[of_lane] + D * sample[:, None]
    arrays = []
    for matrices, fill in (
        (flat, samples * D),
        (agents[of_lane], 0),
        (E[of_lane], 0),
        (P[of_lane], 0),
    ):
        lanes = np.full(
            (*edge.shape, *matrices.shape[1:]), fill, matrices.dtype
        )
        lanes[used] = matrices
        arrays.append(np.ascontiguousarray(np.moveaxis(lanes, 1, -1)))
    return _Lanes(edge, *arrays)


class _Loop(torch.autograd.Function):
    """The steps as one node of autograd; all solutions are saved for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, shape, groups, y: Tensor, push: Tensor, *weights: Tensor
    ):
        steps, first = shape
        S, D = y.shape
        keep = any(ctx.needs_input_grad)
        states = np.empty((steps + 1, S, D))
        middles = np.empty((steps, S, D))
        states[0] = y.detach().numpy()
        force = push.detach().numpy()
        K, b, *matrices = [w.detach().contiguous().numpy() for w in weights]

        def run(chunk: slice):
            size = chunk.stop - chunk.start
            lanes = [
                _lanes(group, *matrices[2 * g : 2 * g + 2], size, D)
                for g, group in enumerate(groups)
            ]
            traces = [
                np.empty((steps if keep else 1, 2, *of.entries.shape))
                for of in lanes
            ]
            of_samples = states[:, chunk], middles[:, chunk], force[:, chunk]
            failed = _forward(*of_samples, first, *traces, K, b, *lanes)
            return failed, lanes, traces

        ctx.chunks = _in_threads(run, _chunks(S))
        failed = max((chunk[0] for chunk in ctx.chunks), default=-1)
        if failed >= 0:
            raise ConvergenceError(
                f"step {failed} of a closed loop: Newton's method did not converge; take a smaller "
                "step or smaller weights."
            )
        ctx.first = first
        ctx.save_for_backward(push, *weights)
        outputs = torch.from_numpy(states), torch.from_numpy(middles)
        ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_states: Tensor, _: Tensor):  # pyright: ignore
        push, *weights = ctx.saved_tensors
        K, b, *_ = [w.detach().contiguous().numpy() for w in weights]
        force = push.detach().numpy()
        cotangents = g_states.numpy()
        S, D = cotangents.shape[1:]
        g_y = np.zeros((S, D))
        g_push = np.zeros(push.shape)

        def run(task):
            chunk, (_, lanes, traces) = task
            sums = [np.zeros(w.shape) for w in weights]
            of_lanes = [
                (np.zeros_like(of.E), np.zeros_like(of.P)) for of in lanes
            ]
            _backward(
                cotangents[:, chunk], g_y[chunk], g_push[:, chunk], force[:, chunk],
                ctx.first, *traces, K, b, *lanes, sums[0], sums[1], *of_lanes,
            )  # fmt: skip
            for g, (of, gradients) in enumerate(
                zip(lanes, of_lanes, strict=True)
            ):
                used = of.edge >= 0
                for m, gradient in enumerate(gradients):
                    each = np.moveaxis(gradient, -1, 1)[used]
                    np.add.at(sums[2 + 2 * g + m], of.edge[used], each)
            return sums

        tasks = list(zip(_chunks(S), ctx.chunks, strict=True))
        totals, *others = _in_threads(run, tasks) or [
            [np.zeros(w.shape) for w in weights]
        ]
        for sums in others:
            for total, gradient in zip(totals, sums, strict=True):
                total += gradient
        gradients = map(torch.from_numpy, (g_y, g_push, *totals))
        return None, None, *gradients


def _chunks(samples: int) -> list[slice]:
    return [
        slice(start, min(start + LONGEST, samples))
        for start in range(0, samples, LONGEST)
    ]


def _in_threads(run, tasks: list) -> list:
    if len(tasks) < 2:
        return [run(task) for task in tasks]
    return list(_pool().map(run, tasks))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(2, os.cpu_count() or 1))


# The kernel


@njit(**OPTIONS)
def _near_chord(t_u, d):  # pragma: kernel
    """The mean of tanh between u and u + d, and its derivatives in the end and in the start.

    With the middle m and half the distance s of the points, the mean is artanh(tanh m tanh s) / s:
    the series in s^2 and in tanh^2 m tanh^2 s are exact to rounding for |d| < 0.2.
    """
    s = 0.5 * d
    q = s * s
    tail = 62 / 2835 + q * (-1382 / 155925 + q * (21844 / 6081075))
    ratio = 1 + q * (-1 / 3 + q * (2 / 15 + q * (-17 / 315 + q * tail)))
    slope = 248 / 2835 + q * (-1382 / 31185 + q * (43688 / 2027025))
    slope = -1 / 3 + q * (4 / 15 + q * (-17 / 105 + q * slope))
    t_s = s * ratio
    t = (t_u + t_s) / (1 + t_u * t_s)
    x = t * t * t_s * t_s
    tail = 1 / 9 + x * (1 / 11 + x * (1 / 13 + x * (1 / 15)))
    arc = 1 + x * (1 / 3 + x * (1 / 5 + x * (1 / 7 + x * tail)))
    tail = 4 / 9 + x * (5 / 11 + x * (6 / 13 + x * (7 / 15)))
    bend = 1 / 3 + x * (2 / 5 + x * (3 / 7 + x * tail))
    even = 0.5 * (1 - t * t) * ratio / (1 - x)
    odd = s * t * (slope * arc + ratio * ratio * bend * t * t * (1 - t_s * t_s))
    return t * ratio * arc, even + odd, even - odd


@njit(**OPTIONS)
def _log_cosh(x):  # pragma: kernel
    size = abs(x)
    return size + math.log1p(math.exp(-2 * size)) - math.log(2.0)


@njit(**OPTIONS)
def _far_chord(u, d):  # pragma: kernel
    v = u + d
    if abs(d) >= 1:
        mean = (_log_cosh(v) - _log_cosh(u)) / d
    else:
        w = math.tanh(u + 0.5 * d) * math.tanh(0.5 * d)
        mean = math.log1p(2 * w / (1 - w)) / d
    return mean, (math.tanh(v) - mean) / d, (mean - math.tanh(u)) / d


@njit(**OPTIONS)
def _chords(z, t_z, v, chord):  # pragma: kernel
    """Chords from z to v, and their derivatives in v and in z: the three rows of `chord`."""
    for j in range(z.shape[0]):
        far = 0
        for lane in range(z.shape[-1]):
            d = v[j, lane] - z[j, lane]
            value, end, start = _near_chord(t_z[j, lane], d)
            chord[0, j, lane] = value
            chord[1, j, lane] = end
            chord[2, j, lane] = start
            far += abs(d) >= NEAR
        if far:
            for lane in range(z.shape[-1]):
                d = v[j, lane] - z[j, lane]
                if abs(d) >= NEAR:
                    value, end, start = _far_chord(z[j, lane], d)
                    chord[0, j, lane] = value
                    chord[1, j, lane] = end
                    chord[2, j, lane] = start


@njit(**OPTIONS)
def _across(j, q, c):  # pragma: kernel
    """The first column of a row: for a link's first block those of its second block."""
    return c if q > c and j < c else 0


@njit(**OPTIONS)
def _rows(K, b, x, z):  # pragma: kernel
    """`z = K x_c + b`; b may be of no rows."""
    q, c = K.shape[:2]
    first = x.shape[0] - q
    for j in range(q):
        for lane in range(z.shape[-1]):
            z[j, lane] = b[j, lane] if b.shape[0] else 0.0
        for m in range(c):
            i = first + j // c * c + m
            for lane in range(z.shape[-1]):
                z[j, lane] += K[j, m, lane] * x[i, lane]


@njit(**OPTIONS)
def _columns(K, z, f):  # pragma: kernel
    """`f = K^T z`."""
    q, c = K.shape[:2]
    for j in range(q):
        f[j] = 0.0
    for j in range(q):
        for m in range(c):
            i = j // c * c + m
            for lane in range(z.shape[-1]):
                f[i, lane] += K[j, m, lane] * z[j, lane]


@njit(**OPTIONS)
def _add_port(P, f, x, sign):  # pragma: kernel
    """Add `sign P f` to x."""
    k, c = P.shape[:2]
    for i in range(k):
        at = _across(i, f.shape[0], c)
        for m in range(c):
            for lane in range(x.shape[-1]):
                x[i, lane] += sign * P[i, m, lane] * f[at + m, lane]


@njit(**OPTIONS)
def _port_columns(P, x, f):  # pragma: kernel
    """`f = P^T x`."""
    k, c = P.shape[:2]
    for j in range(f.shape[0]):
        f[j] = 0.0
    for i in range(k):
        at = _across(i, f.shape[0], c)
        for m in range(c):
            for lane in range(x.shape[-1]):
                f[at + m, lane] += P[i, m, lane] * x[i, lane]


@njit(**OPTIONS)
def _weights(
    edge, agents, P, K_t, b_t, K, b, S, work, transposed
):  # pragma: kernel
    """The weights of the agents of each lane, and `S = K P_c K^T` or its transpose."""
    q, c = K.shape[:2]
    first = P.shape[0] - q
    for j in range(q):
        for lane in range(b.shape[-1]):
            used = edge[lane] >= 0
            b[j, lane] = b_t[agents[j // c, lane], j % c] if used else 0.0
            for m in range(c):
                K[j, m, lane] = (
                    K_t[agents[j // c, lane], j % c, m] if used else 0.0
                )
    for j in range(q):
        at = _across(j, q, c)
        for a in range(c):
            work[a] = 0.0
            for i in range(c):
                for lane in range(b.shape[-1]):
                    work[a, lane] += (
                        K[j, i, lane] * P[first + j // c * c + i, a, lane]
                    )
        for m in range(c):
            S[j, m] = 0.0
            for a in range(c):
                for lane in range(b.shape[-1]):
                    S[j, m, lane] += work[a, lane] * K[at + m, a, lane]
    if transposed:
        for j in range(q):
            for m in range(c if q > c else j):
                for lane in range(b.shape[-1]):
                    if q > c:
                        S[j, m, lane] = -S[j, m, lane]
                    else:
                        S[j, m, lane], S[m, j, lane] = (
                            S[m, j, lane],
                            S[j, m, lane],
                        )


@njit(**OPTIONS)
def _solve_rows(S, D, g, M):  # pragma: kernel
    """Solve `(I - S D) x = g` in place; of a link, one block is eliminated by the other."""
    q, c = S.shape[:2]
    half = q - c
    for j in range(c):
        for m in range(c):
            for lane in range(g.shape[-1]):
                M[j, m, lane] = 0.0 if half else -S[j, m, lane] * D[m, lane]
        for a in range(half):
            for lane in range(g.shape[-1]):
                g[half + j, lane] += (
                    S[half + j, a, lane] * D[a, lane] * g[a, lane]
                )
            for m in range(c):
                for lane in range(g.shape[-1]):
                    M[j, m, lane] -= (
                        S[half + j, a, lane]
                        * D[a, lane]
                        * S[a, m, lane]
                        * D[half + m, lane]
                    )
        for lane in range(g.shape[-1]):
            M[j, j, lane] += 1.0
    for i in range(c):
        for lane in range(g.shape[-1]):
            M[i, i, lane] = 1.0 / M[i, i, lane]
        for m in range(i + 1, c):
            for lane in range(g.shape[-1]):
                M[m, i, lane] *= M[i, i, lane]
                g[half + m, lane] -= M[m, i, lane] * g[half + i, lane]
            for j in range(i + 1, c):
                for lane in range(g.shape[-1]):
                    M[m, j, lane] -= M[m, i, lane] * M[i, j, lane]
    for i in range(c - 1, -1, -1):
        for m in range(i + 1, c):
            for lane in range(g.shape[-1]):
                g[half + i, lane] -= M[i, m, lane] * g[half + m, lane]
        for lane in range(g.shape[-1]):
            g[half + i, lane] *= M[i, i, lane]
    for j in range(half):
        for m in range(c):
            for lane in range(g.shape[-1]):
                g[j, lane] += (
                    S[j, m, lane] * D[half + m, lane] * g[half + m, lane]
                )


@njit(**OPTIONS)
def _residual(x, e, P, K, b, z, t_z, v, chord, f, F, error):  # pragma: kernel
    """`F = x - e - P K^T chord(z, K x_c + b)`, and the sum of its sizes in each lane."""
    _rows(K, b, x, v)
    _chords(z, t_z, v, chord)
    _columns(K, chord[0], f)
    for i in range(x.shape[0]):
        for lane in range(x.shape[-1]):
            F[i, lane] = x[i, lane] - e[i, lane]
    _add_port(P, f, F, -1.0)
    error[:] = 0.0
    for i in range(x.shape[0]):
        for lane in range(x.shape[-1]):
            error[lane] += abs(F[i, lane])


@njit(**OPTIONS)
def _rounding(x, P, K, b, z, chord, f, rounding):  # pragma: kernel
    """The rounding of the terms of a residual, in each lane."""
    q, c = K.shape[:2]
    for m in range(q):
        f[m] = 0.0
    for j in range(q):
        for m in range(c):
            i = j // c * c + m
            for lane in range(x.shape[-1]):
                terms = abs(chord[0, j, lane]) + chord[1, j, lane] * (
                    abs(b[j, lane]) + abs(z[j, lane])
                )
                f[i, lane] += abs(K[j, m, lane]) * terms
    rounding[:] = 1e-290
    for i in range(x.shape[0]):
        at = _across(i, q, c)
        for lane in range(x.shape[-1]):
            rounding[lane] += EPS * abs(x[i, lane])
        for m in range(c):
            for lane in range(x.shape[-1]):
                rounding[lane] += EPS * abs(P[i, m, lane]) * f[at + m, lane]


@njit(**OPTIONS)
def _solve(
    y, e, P, K, b, S, x, wide, narrow, chord, scalar, M
):  # pragma: kernel
    """The x with `x = e + P K^T chord(K y_c + b, K x_c + b)`; False if one was not found."""
    k = x.shape[0]
    q = K.shape[0]
    F, dx, there = wide[0], wide[1], wide[2]
    z, t_z, v, f, g = narrow[0], narrow[1], narrow[2], narrow[3], narrow[4]
    error, before, rate, share, rounding = scalar
    _rows(K, b, y, z)
    for j in range(q):
        for lane in range(x.shape[-1]):
            t_z[j, lane] = math.tanh(z[j, lane])
    _columns(K, t_z, f)
    x[:] = e[:]
    _add_port(P, f, x, 1.0)
    _residual(x, e, P, K, b, z, t_z, v, chord, f, F, error)
    _rounding(x, P, K, b, z, chord, f, rounding)
    rate[:] = np.inf  # of quadratic convergence, as the last step has shown it
    share[:] = 1.0  # of a step that is taken; 0 for lanes that are done
    for _ in range(ITERATIONS):
        open_lanes = 0
        slow = 0
        for lane in range(x.shape[-1]):
            if error[lane] <= 4 * rounding[lane]:
                share[lane] = 0.0
            elif share[lane] > 0:
                share[lane] = 1.0
                open_lanes += 1
                slow += (
                    not 100 * rate[lane] * error[lane] * error[lane]
                    <= rounding[lane]
                )
            before[lane] = error[lane]
        if not open_lanes:
            return True
        _rows(K, b[:0], F, g)
        _solve_rows(S, chord[1], g, M)
        for j in range(q):
            for lane in range(x.shape[-1]):
                g[j, lane] *= chord[1, j, lane]
        _columns(K, g, f)
        dx[:] = F[:]
        _add_port(P, f, dx, 1.0)
        for _ in range(HALVINGS):
            for i in range(k):
                for lane in range(x.shape[-1]):
                    there[i, lane] = x[i, lane] - share[lane] * dx[i, lane]
            if not slow:
                x[:] = there[:]
                return True
            _residual(there, e, P, K, b, z, t_z, v, chord, f, F, error)
            worse = 0
            for lane in range(x.shape[-1]):
                if share[lane] > 0 and not (
                    error[lane] < before[lane]
                    or error[lane] <= 64 * rounding[lane]
                ):
                    share[lane] *= 0.5
                    worse += 1
            if not worse:
                break
        x[:] = there[:]
        for lane in range(x.shape[-1]):
            if not math.isfinite(error[lane]):
                return False
            if (
                error[lane] <= 64 * rounding[lane]
                and error[lane] > 0.25 * before[lane]
            ):
                share[lane] = 0.0
            rate[lane] = error[lane] / (before[lane] * before[lane])
    return False


@njit(**OPTIONS)
def _inputs(entries, y, push, w):  # pragma: kernel
    """The (y, 1, push) of each lane."""
    k = entries.shape[0]
    for i in range(k):
        for lane in range(w.shape[-1]):
            w[i, lane] = y[entries[i, lane]]
            if w.shape[0] > k + 1:
                w[k + 1 + i, lane] = push[entries[i, lane]]
    w[k] = 1.0


@njit(**OPTIONS)
def _move(lanes, K_t, b_t, backwards, y, push, trace):  # pragma: kernel
    """Solve the substeps of a group, colour after colour, and write the states into y."""
    G, k, width, L = lanes.E.shape
    c = K_t.shape[1]
    q = c * lanes.agents.shape[1]
    w = np.empty((width, L))
    wide = np.empty((4, k, L))
    narrow = np.empty((6, q, L))
    chord = np.empty((3, q, L))
    scalar = (np.empty(L), np.empty(L), np.empty(L), np.empty(L), np.empty(L))
    K = np.empty((q, c, L))
    S = np.empty((q, c, L))
    M = np.empty((c, c, L))
    e, b = wide[3], narrow[5]
    for number in range(G):
        colour = G - 1 - number if backwards else number
        entries, E, P = lanes.entries[colour], lanes.E[colour], lanes.P[colour]
        edge, agents = lanes.edge[colour], lanes.agents[colour]
        y_0, x = trace[0, colour], trace[1, colour]
        if q:
            _weights(edge, agents, P, K_t, b_t, K, b, S, M[0], False)
        _inputs(entries, y, push, w)
        y_0[:] = w[:k]
        e[:] = 0.0
        for i in range(k):
            for m in range(width):
                for lane in range(w.shape[-1]):
                    e[i, lane] += E[i, m, lane] * w[m, lane]
        if not q:
            x[:] = e[:]
        elif not _solve(y_0, e, P, K, b, S, x, wide, narrow, chord, scalar, M):
            return False
        for i in range(k):
            for lane in range(w.shape[-1]):
                y[entries[i, lane]] = x[i, lane]
    return True


@njit(**OPTIONS)
def _forward(
    states, middles, push, first, own_trace, plant_trace, link_trace,
    K, b, own, plant, link,
):  # pragma: kernel  # fmt: skip
    """All steps of some samples; the number of the step that failed, or -1."""
    steps, S, D = middles.shape
    y = np.zeros(S * D + 1)  # the last entry is of lanes that fill up a vector
    force = np.zeros(S * D + 1)
    y[:-1].reshape(S, D)[:] = states[0]
    for n in range(steps):
        t = first + n
        odd = t % 2 == 1
        at = min(n, own_trace.shape[0] - 1)
        K_t, b_t = K[min(t, K.shape[0] - 1)], b[min(t, K.shape[0] - 1)]
        if push.shape[0]:
            force[:-1].reshape(S, D)[:] = push[n]
        fine = True
        for phase in range(3):
            if phase == (2 if odd else 0):
                if odd:
                    middles[n] = y[:-1].reshape(S, D)
                fine &= _move(own, K_t, b_t, odd, y, force, own_trace[at])
                if not odd:
                    middles[n] = y[:-1].reshape(S, D)
            elif phase == 1:
                fine &= _move(plant, K_t, b_t, odd, y, force, plant_trace[at])
            else:
                fine &= _move(link, K_t, b_t, odd, y, force, link_trace[at])
        if not fine:
            return t
        states[n + 1] = y[:-1].reshape(S, D)
    return -1


@njit(**OPTIONS)
def _pull(
    lanes, K_t, b_t, backwards, g, g_push, push, trace, dK, db, sums
):  # pragma: kernel
    """From the gradient of the states after a group to that before it; adds those of weights."""
    G, k, width, L = lanes.E.shape
    c = K_t.shape[1]
    q = c * lanes.agents.shape[1]
    w = np.empty((width, L))
    g_w = np.empty((width, L))
    lam = np.empty((k, L))
    narrow = np.empty((8, q, L))
    chord = np.empty((3, q, L))
    K = np.empty((q, c, L))
    S = np.empty((q, c, L))
    M = np.empty((c, c, L))
    b, z, t_z, v, f, nu, mu = (
        narrow[0], narrow[1], narrow[2], narrow[3], narrow[4], narrow[5], narrow[6],
    )  # fmt: skip
    value, end, start = chord[0], chord[1], chord[2]
    for number in range(G):
        colour = number if backwards else G - 1 - number  # the last first
        entries, E, P = lanes.entries[colour], lanes.E[colour], lanes.P[colour]
        edge, agents = lanes.edge[colour], lanes.agents[colour]
        y_0, x = trace[0, colour], trace[1, colour]
        _inputs(entries, g, push, w)
        dE, dP = sums[0][colour], sums[1][colour]
        lam[:] = w[:k]
        w[:k] = y_0
        if q:
            _weights(edge, agents, P, K_t, b_t, K, b, S, M[0], True)
            _rows(K, b, y_0, z)
            _rows(K, b, x, v)
            for j in range(q):
                for lane in range(w.shape[-1]):
                    t_z[j, lane] = math.tanh(z[j, lane])
            _chords(z, t_z, v, chord)
            _columns(K, value, f)
            # (I - S^T D) nu = K P^T g, then lambda = g + K^T D nu
            _port_columns(P, lam, mu)
            _rows(K, b[:0], mu, nu)
            _solve_rows(S, end, nu, M)
            for j in range(q):
                for lane in range(w.shape[-1]):
                    start[j, lane] *= nu[j, lane]
                    end[j, lane] *= nu[j, lane]
            _columns(K, end, mu)
            for m in range(q):
                for lane in range(w.shape[-1]):
                    lam[k - q + m, lane] += mu[m, lane]
            _port_columns(P, lam, mu)
        g_w[:] = 0.0
        for i in range(k):
            for m in range(width):
                for lane in range(w.shape[-1]):
                    dE[i, m, lane] += lam[i, lane] * w[m, lane]
                    g_w[m, lane] += E[i, m, lane] * lam[i, lane]
            for m in range(dP.shape[1]):
                at = _across(i, q, c) + m
                for lane in range(w.shape[-1]):
                    dP[i, m, lane] += lam[i, lane] * f[at, lane]
        for j in range(q):
            block = j // c * c
            for m in range(c):
                i = k - q + block + m
                for lane in range(w.shape[-1]):
                    S[j, m, lane] = (
                        value[j, lane] * mu[block + m, lane]
                        + end[j, lane] * x[i, lane]
                        + start[j, lane] * y_0[i, lane]
                    )
                    g_w[i, lane] += K[j, m, lane] * start[j, lane]
            for lane in range(w.shape[-1]):
                if edge[lane] >= 0:
                    agent = agents[j // c, lane]
                    db[agent, j - block] += start[j, lane] + end[j, lane]
                    for m in range(c):
                        dK[agent, j - block, m] += S[j, m, lane]
        for i in range(k):
            for lane in range(w.shape[-1]):
                g[entries[i, lane]] = g_w[i, lane]
                if width > k + 1:
                    g_push[entries[i, lane]] += g_w[k + 1 + i, lane]


@njit(**OPTIONS)
def _backward(
    cotangents, g_y, g_push, push, first, own_trace, plant_trace, link_trace,
    K, b, own, plant, link, dK, db, d_own, d_plant, d_link,
):  # pragma: kernel  # fmt: skip
    """The gradients of some samples, from those of all states."""
    S, D = g_y.shape
    steps = cotangents.shape[0] - 1
    g = np.zeros(S * D + 1)
    force = np.zeros(S * D + 1)
    g_force = np.zeros(S * D + 1)
    g[:-1].reshape(S, D)[:] = cotangents[steps]
    for n in range(steps - 1, -1, -1):
        odd = (first + n) % 2 == 1
        t = min(first + n, K.shape[0] - 1)
        if push.shape[0]:
            force[:-1].reshape(S, D)[:] = push[n]
            g_force[:] = 0.0
        for phase in range(3):
            if phase == (0 if odd else 2):
                _pull(
                    own,
                    K[t],
                    b[t],
                    odd,
                    g,
                    g_force,
                    force,
                    own_trace[n],
                    dK[t],
                    db[t],
                    d_own,
                )
            elif phase == 1:
                _pull(
                    plant,
                    K[t],
                    b[t],
                    odd,
                    g,
                    g_force,
                    force,
                    plant_trace[n],
                    dK[t],
                    db[t],
                    d_plant,
                )
            else:
                _pull(
                    link,
                    K[t],
                    b[t],
                    odd,
                    g,
                    g_force,
                    force,
                    link_trace[n],
                    dK[t],
                    db[t],
                    d_link,
                )
        g[-1] = 0.0
        if push.shape[0]:
            g_push[n] = g_force[:-1].reshape(S, D)
        g[:-1].reshape(S, D)[:] += cotangents[n]
    g_y[:] = g[:-1].reshape(S, D)
