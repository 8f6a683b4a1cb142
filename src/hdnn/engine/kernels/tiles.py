"""The kernels of the CPU: all layers on one tile of samples, then the next tile.

A tile is as wide as one vector, 32 or 64 samples in float32 and half as many in float64; its state
is kept feature by feature, so that every operation is one vector instruction over samples with a
weight as a scalar, and nothing leaves the cache. The kernels are plain functions here. Numba (extra
`fast`) compiles them when first called, once for each dtype whatever the sizes, and keeps them on
disk. They release the interpreter and share nothing, so that any number of threads may call them.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from hdnn.base.notice import said_if_slow
from hdnn.engine.kernels import vectors
from hdnn.engine.kernels.protocol import ACTIVATIONS, KINDS
from hdnn.errors import require

SAME, IDENTITY, GENERAL, CANONICAL = range(len(KINDS))
TANH = ACTIVATIONS.index("tanh")

# The operations of `vectors.py`, which `_compile` puts here. Memory is addressed by a
# number: at(address, i, like) is element i of an array of the type of `like`, load(address, row,
# like) the row-th vector.

arguments: Any = None  # arguments(args, count): the first `count` arguments, as integers
unit: Any = None  # 1 in the type that the kernel is for
claim: Any = None  # claim(args, i): read argument i and add 1 to it, atomically
at: Any = None  # scalars
put: Any = None
integer: Any = None
load: Any = None  # vectors
store: Any = None
load_half: Any = None  # the first half of a vector
half_of_zero: Any = None
join: Any = None  # two halves
splat: Any = None
polynomial: Any = None  # polynomial(x, coefficients), the highest power first
total_of: Any = None  # the sum over a vector
turn_block: Any = None  # four by four elements from one place to another, transposed
fold: Any = None  # the sum of the quarters of a vector
dot: Any = None  # the sum of the quarters of a product, and then one product more
dot_more: Any = None
add_totals: Any = None  # add_totals(address, i, a, b, c, d): their sums onto elements i .. i + 3
where_less: Any = None  # where_less(a, b, x, y): x where a < b, else y
magnitude: Any = None
nearest: Any = None  # whole number
exactly_fused: Any = None  # a b + c, rounded once
power_of_two: Any = None
alternate: Any = None  # (-1)^k x for vectors x and k of whole numbers
is_double: Any = None
lanes_of: Any = None
bytes_of: Any = None


# Activations

EXP = tuple(1 / math.factorial(k) for k in reversed(range(14)))
LOG1P = tuple(2 / k for k in reversed(range(1, 36, 2)))  # of 2 artanh
SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in reversed(range(1, 11)))
COS = tuple((-1) ** k / math.factorial(2 * k) for k in reversed(range(1, 12)))
EXP_SINGLE, LOG1P_SINGLE = EXP[-8:], LOG1P[-9:]

# tanh by rational functions: of Cephes near 0 (float64), and exact to rounding (float32).
TANH_NEAR = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
OVER_NEAR = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)
TANH_SINGLE = (
    *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
    *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
)
OVER_SINGLE = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03)
OVER_SINGLE += (4.89352518554385e-03,)

# (1 + 2a) exp(a^2) erfc(a), in u = (a - 4) / (a + 4).
NORMAL_TAIL = (
    *(1.6403183859126829e-09, -6.9840210839589835e-09, -1.6738128051575484e-08),
    *(9.29077286532988e-08, 7.202517600492906e-08, -8.019174682765151e-07, 2.968409170763573e-07),
    *(5.689409089788712e-06, -1.1224122281375893e-05, -2.438769126418468e-05),
    *(0.00015062257137037893, -0.0001992610018544803, -0.0007577735257382317),
    *(0.005031971017234268, -0.016197734020451597, 0.03716751538360477, -0.06633036581541651),
    *(0.0937328350110569, -0.10103906603618064, 0.06809705425420673, 0.015379652102618402),
    *(-0.139621116840557, 1.2329951186255526),
)


def _within(low, x, high):  # pragma: kernel
    """x, or the nearest number from `low` to `high`."""
    x = where_less(x, splat(low, x), splat(low, x), x)
    return where_less(splat(high, x), x, splat(high, x), x)


def _exp(x):  # pragma: kernel
    """exp of x, which is kept within the range of normal numbers."""
    if is_double(x):
        x = _within(-708.0, x, 709.0)
        k = nearest(x * 1.4426950408889634)
        r = (x - k * 6.93145751953125e-1) - k * 1.42860682030941723212e-6
        s = polynomial(r, EXP)
    else:
        x = _within(-87.0, x, 88.0)
        k = nearest(x * 1.4426950408889634)
        r = (x - k * 0.693359375) - k * -2.12194440e-4
        s = polynomial(r, EXP_SINGLE)
    return s * power_of_two(k)


def _tanh(x):  # pragma: kernel
    if is_double(x):
        s, size = x * x, magnitude(x)
        near = x + x * (s * polynomial(s, TANH_NEAR) / polynomial(s, OVER_NEAR))
        far = splat(1.0, x) - splat(2.0, x) / (_exp(size + size) + 1.0)
        far = where_less(x, splat(0.0, x), splat(0.0, x) - far, far)
        return where_less(size, splat(0.625, x), near, far)
    x = _within(-7.99881172180175781, x, 7.99881172180175781)  # past that tanh is 1
    s = x * x
    return x * polynomial(s, TANH_SINGLE) / polynomial(s, OVER_SINGLE)


def _log1p(t):  # pragma: kernel
    """log(1 + t) for 0 <= t <= 1, as 2 artanh(t / (2 + t))."""
    a = t / (t + 2.0)
    if is_double(t):
        return a * polynomial(a * a, LOG1P)
    return a * polynomial(a * a, LOG1P_SINGLE)


def _normal_cdf(x, bell):  # pragma: kernel
    """Phi(x), given bell = exp(-x^2 / 2)."""
    a = magnitude(x) * math.sqrt(0.5)
    a = where_less(splat(50.0, x), a, splat(50.0, x), a)
    p = polynomial((a - 4.0) / (a + 4.0), NORMAL_TAIL)
    tail = p * bell * 0.5 / (a + a + 1.0)
    return where_less(x, splat(0.0, x), tail, splat(1.0, x) - tail)


def _far(x):  # pragma: kernel
    """Past this, `_exp` of -x no longer falls, so that x times it would not be almost 0."""
    return splat(708.0, x) if is_double(x) else splat(87.0, x)


def _unless_far_below(x):  # pragma: kernel
    """x, or 0 where sigma(x) is x times almost 0."""
    return where_less(x, splat(0.0, x) - _far(x), splat(0.0, x), x)


def _unless_far(x):  # pragma: kernel
    """x, or 0 where it is so large that its slope is 0 or 1."""
    return where_less(_far(x), x, splat(0.0, x), _unless_far_below(x))


def _turns(x):  # pragma: kernel
    """k and r with x = k pi + r, |r| <= pi/2."""
    k = nearest(x * (1 / math.pi))
    if is_double(x):
        r = exactly_fused(k, splat(-3.141592653589793, x), x)
        r = exactly_fused(k, splat(-1.2246467991473532e-16, x), r)
    else:
        r = exactly_fused(k, splat(-3.1415927410125732, x), x)
        r = exactly_fused(k, splat(8.742277657347586e-08, x), r)
    # Past 2^52 (2^23 in float32) neighbouring numbers are whole turns apart.
    return k, _within(-1.5707963267948966, r, 1.5707963267948966)


def _sin(x):  # pragma: kernel
    k, r = _turns(x)
    s = r * r
    return alternate(k, r + r * (s * polynomial(s, SIN)))


def _cos(x):  # pragma: kernel
    k, r = _turns(x)
    s = r * r
    return alternate(k, s * polynomial(s, COS) + 1.0)


def _activate(code, a, d, rows, one):  # pragma: kernel
    """sigma in place over rows of vectors; and its slope into d, if there is a d."""
    zero, unit = splat(0.0, one), splat(1.0, one)
    if code == 0:  # in the order of `protocol.ACTIVATIONS`
        for i in range(rows):
            x = load(a, i, one)
            z = _tanh(x)
            if d:
                store(d, i, unit - z * z)
            store(a, i, z)
    elif code == 1:
        for i in range(rows):
            x = load(a, i, one)
            z = where_less(x, zero, zero, x)
            if d:
                store(d, i, where_less(zero, x, unit, zero))
            store(a, i, z)
    elif code == 2:
        for i in range(rows):
            x = load(a, i, one)
            e = _exp(zero - x)
            z = unit / (e + unit)
            if d:
                store(d, i, e * z * z)
            store(a, i, z)
    elif code == 3:
        for i in range(rows):
            x = load(a, i, one)
            e = _exp(zero - magnitude(x))
            z = where_less(x, zero, zero, x) + _log1p(e)
            if d:
                store(d, i, where_less(x, zero, e, unit) / (e + unit))
            store(a, i, z)
    elif code == 4:
        for i in range(rows):
            x = load(a, i, one)
            bell = _exp(x * x * -0.5)
            Phi = _normal_cdf(x, bell)
            z = _unless_far_below(x) * Phi
            if d:
                store(d, i, _unless_far(x) * bell * 0.3989422804014327 + Phi)
            store(a, i, z)
    elif code == 5:
        for i in range(rows):
            x = load(a, i, one)
            e = _exp(zero - x)
            z = _unless_far_below(x) / (e + unit)
            if d:
                s = unit / (e + unit)
                z = _unless_far_below(x) * s
                store(d, i, s + _unless_far(x) * s * (e * s))
            store(a, i, z)
    elif code == 6:
        for i in range(rows):
            x = load(a, i, one)
            z = _sin(x)
            if d:
                store(d, i, _cos(x))
            store(a, i, z)
    elif d:
        for i in range(rows):
            store(d, i, unit)


def _kept_late(code):  # pragma: kernel
    """Whether sigma' is a function of sigma, which is kept then; else what sigma reads is."""
    return code in (0, 1, 7)


def _activate_again(code, kept, z, d, rows, one):  # pragma: kernel
    """sigma and its slope over rows of vectors, from what was kept; not of tanh: `_weigh_tanh`."""
    zero, unit = splat(0.0, one), splat(1.0, one)
    for i in range(rows):
        x = load(kept, i, one)
        store(d, i, where_less(zero, x, unit, zero))
        store(z, i, x)
    if code != 1:
        _activate(code, z, d, rows, one)


# Products


def _four_rows(W, down, across, x, count, one):  # pragma: kernel
    """The sums over k of W_k x_k for W and the three rows after it, `down` bytes apart.

    W_k lies `across` bytes from its neighbour. The sums of half a vector fit into registers.
    """
    a, b, c, d = _half_of_four_rows(W, down, across, x, count, one)
    x += lanes_of(one) * bytes_of(one) // 2
    e, f, g, h = _half_of_four_rows(W, down, across, x, count, one)
    return join(a, e), join(b, f), join(c, g), join(d, h)


def _half_of_four_rows(W, down, across, x, count, one):  # pragma: kernel
    a = b = c = d = half_of_zero(one)
    for k in range(count):
        v, place = load_half(x, k, one), W + k * across
        a = a + v * at(place, 0, one)
        b = b + v * at(place + down, 0, one)
        c = c + v * at(place + 2 * down, 0, one)
        d = d + v * at(place + 3 * down, 0, one)
    return a, b, c, d


def _two_rows(W, down, across, x, count, one):  # pragma: kernel
    a = b = splat(0.0, one)
    for k in range(count):
        v, place = load(x, k, one), W + k * across
        a = a + v * at(place, 0, one)
        b = b + v * at(place + down, 0, one)
    return a, b


def _one_row(W, across, x, count, one):  # pragma: kernel
    a = splat(0.0, one)
    for k in range(count):
        a = a + load(x, k, one) * at(W + k * across, 0, one)
    return a


def _affine(K, b, x, z, r, m, one):  # pragma: kernel
    """z = K x + b, or K x if there is no b."""
    across = bytes_of(one)
    down = m * across
    for i in range(0, r - 3, 4):
        s0, s1, s2, s3 = _four_rows(K + i * down, down, across, x, m, one)
        if b:
            s0, s1 = s0 + at(b, i, one), s1 + at(b, i + 1, one)
            s2, s3 = s2 + at(b, i + 2, one), s3 + at(b, i + 3, one)
        store(z, i, s0)
        store(z, i + 1, s1)
        store(z, i + 2, s2)
        store(z, i + 3, s3)
    i = r - r % 4
    if r % 4 >= 2:
        s0, s1 = _two_rows(K + i * down, down, across, x, m, one)
        if b:
            s0, s1 = s0 + at(b, i, one), s1 + at(b, i + 1, one)
        store(z, i, s0)
        store(z, i + 1, s1)
    if r % 2:
        i = r - 1
        s0 = _one_row(K + i * down, across, x, m, one)
        if b:
            s0 = s0 + at(b, i, one)
        store(z, i, s0)


def _add_adjoint(V, step, z, c, y, r, m, one):  # pragma: kernel
    """y += c V^T z for m columns of V, whose rows are `step` elements apart."""
    down = bytes_of(one)
    across = step * down
    for k in range(0, m - 3, 4):
        s0, s1, s2, s3 = _four_rows(V + k * down, down, across, z, r, one)
        store(y, k, load(y, k, one) + s0 * c)
        store(y, k + 1, load(y, k + 1, one) + s1 * c)
        store(y, k + 2, load(y, k + 2, one) + s2 * c)
        store(y, k + 3, load(y, k + 3, one) + s3 * c)
    k = m - m % 4
    if m % 4 >= 2:
        s0, s1 = _two_rows(V + k * down, down, across, z, r, one)
        store(y, k, load(y, k, one) + s0 * c)
        store(y, k + 1, load(y, k + 1, one) + s1 * c)
    if m % 2:
        k = m - 1
        store(y, k, load(y, k, one) + _one_row(V + k * down, across, z, r, one) * c)


def _move(kind, V, z, c, y, r, m, one):  # pragma: kernel
    """y += c V^T z."""
    if kind == IDENTITY:
        for k in range(m):
            store(y, k, load(y, k, one) + load(z, k, one) * c)
    elif kind == CANONICAL:  # J K^T z: swap the halves and change one sign
        half = m // 2
        low, high = half * bytes_of(one), half * lanes_of(one) * bytes_of(one)
        _add_adjoint(V, m, z, c, y + high, r, half, one)
        _add_adjoint(V + low, m, z, -c, y, r, half, one)
    else:
        _add_adjoint(V, m, z, c, y, r, m, one)


def _add_outer(G, u, x, z, g, r, m, one):  # pragma: kernel
    """G += u x^T + z g^T, or u x^T if there is no z, summed over samples.

    Sums over vectors are made four at a time.
    """
    if m == 2 and r % 2 == 0:
        x0, x1 = load(x, 0, one), load(x, 1, one)
        for i in range(0, r, 2):
            u0, u1 = load(u, i, one), load(u, i + 1, one)
            s0, s1, s2, s3 = dot(u0, x0), dot(u0, x1), dot(u1, x0), dot(u1, x1)
            if z:
                z0, z1, g0, g1 = (
                    load(z, i, one),
                    load(z, i + 1, one),
                    load(g, 0, one),
                    load(g, 1, one),
                )
                s0, s1 = dot_more(s0, z0, g0), dot_more(s1, z0, g1)
                s2, s3 = dot_more(s2, z1, g0), dot_more(s3, z1, g1)
            add_totals(G, 2 * i, s0, s1, s2, s3)
        return
    for i in range(0, r - 1, 2):
        u0, u1 = load(u, i, one), load(u, i + 1, one)
        z0, z1 = u0, u1
        if z:
            z0, z1 = load(z, i, one), load(z, i + 1, one)
        for k in range(0, m - 3, 4):
            v = load(x, k, one)
            s0, t0 = dot(u0, v), dot(u1, v)
            v = load(x, k + 1, one)
            s1, t1 = dot(u0, v), dot(u1, v)
            v = load(x, k + 2, one)
            s2, t2 = dot(u0, v), dot(u1, v)
            v = load(x, k + 3, one)
            s3, t3 = dot(u0, v), dot(u1, v)
            if z:
                v = load(g, k, one)
                s0, t0 = dot_more(s0, z0, v), dot_more(t0, z1, v)
                v = load(g, k + 1, one)
                s1, t1 = dot_more(s1, z0, v), dot_more(t1, z1, v)
                v = load(g, k + 2, one)
                s2, t2 = dot_more(s2, z0, v), dot_more(t2, z1, v)
                v = load(g, k + 3, one)
                s3, t3 = dot_more(s3, z0, v), dot_more(t3, z1, v)
            add_totals(G, i * m + k, s0, s1, s2, s3)
            add_totals(G, (i + 1) * m + k, t0, t1, t2, t3)
    for i in range(r):
        paired = r % 2 == 0 or i < r - 1
        for k in range(m - m % 4 if paired else 0, m):
            s = dot(load(u, i, one), load(x, k, one))
            if z:
                s = dot_more(s, load(z, i, one), load(g, k, one))
            put(G, i * m + k, at(G, i * m + k, one) + total_of(s))


def _add_sums(b, u, r, one):  # pragma: kernel
    """b += u, summed over samples."""
    for i in range(0, r - 3, 4):
        add_totals(
            b,
            i,
            fold(load(u, i, one)),
            fold(load(u, i + 1, one)),
            fold(load(u, i + 2, one)),
            fold(load(u, i + 3, one)),
        )
    for i in range(r - r % 4, r):
        put(b, i, at(b, i, one) + total_of(fold(load(u, i, one))))


def _weigh(z, v, d, c, r, one):  # pragma: kernel
    """The sum of z v over all; then d = c d v and z = c z."""
    along = splat(0.0, one)
    for i in range(r):
        zi, vi = load(z, i, one), load(v, i, one)
        along = along + zi * vi
        store(d, i, load(d, i, one) * vi * c)
        store(z, i, zi * c)
    return total_of(fold(along))


def _weigh_tanh(kept, v, z, d, c, r, one):  # pragma: kernel
    """The same from z = tanh, which was kept, and without its slope being in d yet."""
    along, unit = splat(0.0, one), splat(1.0, one)
    for i in range(r):
        zi, vi = load(kept, i, one), load(v, i, one)
        along = along + zi * vi
        store(d, i, (unit - zi * zi) * vi * c)
        store(z, i, zi * c)
    return total_of(fold(along))


def _copy(x, to, rows, one):  # pragma: kernel
    for i in range(rows):
        store(to, i, load(x, i, one))


def _clear(x, count, one):  # pragma: kernel
    for i in range(count // lanes_of(one)):
        store(x, i, splat(0.0, one))


def _turn(x, step, y, other_step, rows, columns, one):  # pragma: kernel
    """y = x^T for x (rows, columns); a row of x is `step` bytes, one of y `other_step`."""
    size = bytes_of(one)
    whole = rows - rows % 4
    for i in range(0, whole, 4):
        for k in range(0, columns - 3, 4):
            turn_block(
                x + i * step + k * size, step, y + k * other_step + i * size, other_step, one
            )
        for k in range(columns - columns % 4, columns):
            for j in range(i, i + 4):
                put(y + k * other_step, j, at(x + j * step, k, one))
    for i in range(whole, rows):
        for k in range(columns):
            put(y + k * other_step, i, at(x + i * step, k, one))


def _gather(y, tile, B, n, x, again, one):  # pragma: kernel
    """The rows y (B, n) of a tile, transposed: x is (n, lanes).

    Lanes without a sample repeat the last one, if `again`, or are zero. States repeat: a made-up
    state might overflow where no sample does, and 0 times infinity would reach the sums.
    """
    lanes, size = lanes_of(one), bytes_of(one)
    count = min(lanes, B - tile * lanes)
    rows = y + tile * lanes * n * size
    if count < lanes:
        for k in range(n):
            fill = splat(0.0, one)
            if again:
                fill = splat(at(rows, (count - 1) * n + k, one), one)
            store(x, k, fill)
    _turn(rows, n * size, x, lanes * size, count, n, one)


def _scatter(x, tile, B, n, y, one):  # pragma: kernel
    """The inverse of `_gather`."""
    lanes, size = lanes_of(one), bytes_of(one)
    count = min(lanes, B - tile * lanes)
    _turn(x, lanes * size, y + tile * lanes * n * size, n * size, n, count, one)


# All layers of a stack. Each step moves part 0 of a tile (p, or all of y) or part 1 (q), and reads
# the other one, or what it moves if there is one part alone. The arguments that depend on sizes
# alone come first, then the address of the scratch memory and what is new in each call.


def _forward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 27)
    room, B, tiles, n, m, r_0, r_1, code, kind, M, part, layer = given[3:15]
    scratch, y, out, coef, kept, late, K_0, K_1, b_0, b_1, V_0, V_1 = given[15:27]
    V_0, V_1 = V_0 or K_0, V_1 or K_1
    scratch += claim(args, 0) * room
    size = bytes_of(one)
    vector = lanes_of(one) * size
    R = max(r_0, r_1)
    z = scratch + n * vector
    in_place = kept and _kept_late(code)
    tile = claim(args, 1)
    while tile < tiles:
        _gather(y, tile, B, n, scratch, True, one)
        for s in range(M):
            j, c = integer(layer, s), at(coef, s, one)
            if integer(part, s) == 0:
                target, source, r, K, b, V = scratch, scratch + (n - m) * vector, r_0, K_0, b_0, V_0
            else:
                target, source, r, K, b, V = scratch + m * vector, scratch, r_1, K_1, b_1, V_1
            if kept:  # as it is: a tile, feature by feature
                _copy(source, kept + (s * tiles + tile) * m * vector, m, one)
            place = late + (s * tiles + tile) * R * vector
            if in_place:
                z = place
            _affine(K + j * r * m * size, b + j * r * size, source, z, r, m, one)
            if kept and not in_place:
                _copy(z, place, r, one)
            _activate(code, z, 0, r, one)
            _move(kind, V + j * r * m * size, z, c, target, r, m, one)
        _scatter(scratch, tile, B, n, out, one)
        tile = claim(args, 1)


def _backward(args):  # pragma: kernel
    """Undoes each step from y_N; if what the steps read was kept, reads that."""
    one, given = unit(args), arguments(args, 32)
    groups, room, B, tiles, n, m, r_0, r_1, code, kind, total = given[2:13]
    scratch, M, part, layer, y, g, y_0, g_0, coef, grads, kept, late = given[14:26]
    K_0, K_1, b_0, b_1, V_0, V_1 = given[26:32]
    V_0, V_1 = V_0 or K_0, V_1 or K_1
    scratch += claim(args, 0) * room
    size = bytes_of(one)
    vector = lanes_of(one) * size
    R = max(r_0, r_1)
    x = scratch
    gx = x + n * vector
    z = gx + n * vector
    d = z + R * vector
    w = d + R * vector
    group = claim(args, 1)
    while group < groups:
        dK = grads + group * total * size
        db = dK + M * R * m * size
        dcoef = db + M * R * size
        dV = dcoef + M * size
        _clear(dK, total, one)
        for tile in range(tiles * group // groups, tiles * (group + 1) // groups):
            if not kept:
                _gather(y, tile, B, n, x, True, one)
            _gather(g, tile, B, n, gx, False, one)
            for step in range(M):
                s = M - 1 - step
                j, c = integer(layer, s), at(coef, s, one)
                if integer(part, s) == 0:
                    to, of, r, K, b, V = 0, (n - m) * vector, r_0, K_0, b_0, V_0
                else:
                    to, of, r, K, b, V = m * vector, 0, r_1, K_1, b_1, V_1
                K, b, V = K + j * r * m * size, b + j * r * size, V + j * r * m * size
                source = x + of
                place = late + (s * tiles + tile) * R * vector
                if kept:
                    source = kept + (s * tiles + tile) * m * vector
                    if code != TANH:
                        _activate_again(code, place, z, d, r, one)
                else:
                    _affine(K, b, source, z, r, m, one)
                    _activate(code, z, d, r, one)
                    _move(kind, V, z, -c, x + to, r, m, one)
                g_y = v = gx + to
                if kind == CANONICAL:  # J^T g, where x is not needed: such steps are never undone
                    half, g_y = m // 2, x
                    for k in range(half):
                        store(g_y, k, load(gx, k + half, one))
                        store(g_y, k + half, splat(0.0, one) - load(gx, k, one))
                if kind != IDENTITY:
                    _affine(V, 0, g_y, w, r, m, one)
                    v = w
                if kept and code == TANH:
                    along = _weigh_tanh(place, v, z, d, c, r, one)
                else:
                    along = _weigh(z, v, d, c, r, one)
                put(dcoef, s, at(dcoef, s, one) + along)
                _add_sums(db + s * R * size, d, r, one)
                into = s * R * m * size
                if kind in (SAME, CANONICAL):
                    _add_outer(dK + into, d, source, z, g_y, r, m, one)
                else:
                    _add_outer(dK + into, d, source, 0, 0, r, m, one)
                    if kind == GENERAL:
                        _add_outer(dV + into, z, g_y, 0, 0, r, m, one)
                _add_adjoint(K, m, d, one, gx + of, r, m, one)
            if y_0 and not kept:
                _scatter(x, tile, B, n, y_0, one)
            _scatter(gx, tile, B, n, g_0, one)
        group = claim(args, 1)


def _add(to, x, count, fresh, one):  # pragma: kernel
    """to += x, so many elements, or to = 0 + x where `to` is fresh, with nothing in it yet."""
    lanes, size = lanes_of(one), bytes_of(one)
    whole = count - count % lanes
    for i in range(whole // lanes):
        before = splat(0.0, one)
        if not fresh:
            before = load(to, i, one)
        store(to, i, before + load(x, i, one))
    to, x = to + whole * size, x + whole * size
    for i in range(count - whole):
        start = one - one
        if not fresh:
            start = at(to, i, one)
        put(to, i, start + at(x, i, one))


def _collect(args):  # pragma: kernel
    """Add up the groups, in order, and add the sums of each step to the gradients of its layer.

    Where the gradients are fresh, each is the sum of one step alone. Takes what `_backward` took.
    """
    one, given = unit(args), arguments(args, 39)
    groups, m, r_0, r_1, total, fresh = given[2], given[7], given[8], given[9], given[12], given[13]
    M, part, layer, grads = given[15], given[16], given[17], given[23]
    dK_0, dK_1, db_0, db_1, dV_0, dV_1, dcoef = given[32:39]
    size = bytes_of(one)
    for i in range(total // lanes_of(one)):
        s = load(grads, i, one)
        for group in range(1, groups):
            s = s + load(grads + group * total * size, i, one)
        store(grads, i, s)
    R = max(r_0, r_1)
    sums_b = grads + M * R * m * size
    sums_c = sums_b + M * R * size
    sums_V = sums_c + M * size
    if dcoef:
        _add(dcoef, sums_c, M, 1, one)
    for s in range(M):
        j = integer(layer, s)
        r, dK, db, dV = r_0, dK_0, db_0, dV_0
        if integer(part, s) == 1:
            r, dK, db, dV = r_1, dK_1, db_1, dV_1
        _add(dK + j * r * m * size, grads + s * R * m * size, r * m, fresh, one)
        _add(db + j * r * size, sums_b + s * R * size, r, fresh, one)
        if dV:
            _add(dV + j * r * m * size, sums_V + s * R * m * size, r * m, fresh, one)


# What is between matrix products by BLAS, row by row. A row lies in memory as it is; in the scratch
# memory it ends with zeros, up to a whole vector.


def _read(x, count, to, one):  # pragma: kernel
    """Copy so many elements, and zeros after them, to whole vectors."""
    lanes, size = lanes_of(one), bytes_of(one)
    whole = count // lanes
    for i in range(whole):
        store(to, i, load(x, i, one))
    if count % lanes:
        store(to, whole, splat(0.0, one))
        x, to = x + whole * lanes * size, to + whole * lanes * size
        for i in range(count % lanes):
            put(to, i, at(x, i, one))


def _write(x, count, to, one):  # pragma: kernel
    """The inverse of `_read`."""
    lanes, size = lanes_of(one), bytes_of(one)
    whole = count // lanes
    for i in range(whole):
        store(to, i, load(x, i, one))
    x, to = x + whole * lanes * size, to + whole * lanes * size
    for i in range(count % lanes):
        put(to, i, at(x, i, one))


def _add_bias(b, z, vectors, one):  # pragma: kernel
    """z = z + b."""
    for i in range(vectors):
        store(z, i, load(z, i, one) + load(b, i, one))


def _rows_forward(args):  # pragma: kernel
    """z = sigma(a + b), for a (B, r)."""
    one, given = unit(args), arguments(args, 11)
    groups, room, scratch, B, r, a, b, z, code = given[2:11]
    scratch += claim(args, 0) * room
    size = bytes_of(one)
    vectors = -(-r // lanes_of(one))
    line = vectors * lanes_of(one) * size
    bias, row = scratch, scratch + line
    _read(b, r, bias, one)
    group = claim(args, 1)
    while group < groups:
        for i in range(B * group // groups, B * (group + 1) // groups):
            _read(a + i * r * size, r, row, one)
            _add_bias(bias, row, vectors, one)
            _activate(code, row, 0, vectors, one)
            _write(row, r, z + i * r * size, one)
        group = claim(args, 1)


def _rows_backward(args):  # pragma: kernel
    """z = sigma(a + b) and u = c sigma'(a + b) w, all (B, r); u may be w.

    For each group of rows: the sums of u, and after them that of z w, each in whole vectors.
    """
    one, given = unit(args), arguments(args, 15)
    groups, room, scratch, B, r, a, b, w, z, u, coef, sums, code = given[2:15]
    scratch += claim(args, 0) * room
    lanes, size = lanes_of(one), bytes_of(one)
    vectors = -(-r // lanes)
    line = vectors * lanes * size
    bias, row, d, v = scratch, scratch + line, scratch + 2 * line, scratch + 3 * line
    c = at(coef, 0, one)
    _read(b, r, bias, one)
    group = claim(args, 1)
    while group < groups:
        total = sums + group * (line + lanes * size)
        _clear(total, (vectors + 1) * lanes, one)
        along = splat(0.0, one)
        for i in range(B * group // groups, B * (group + 1) // groups):
            at_row = i * r * size
            _read(a + at_row, r, row, one)
            _add_bias(bias, row, vectors, one)
            _activate(code, row, d, vectors, one)
            _read(w + at_row, r, v, one)
            for k in range(vectors):
                vk = load(v, k, one)
                along = along + load(row, k, one) * vk
                dk = load(d, k, one) * vk * c
                store(d, k, dk)
                store(total, k, load(total, k, one) + dk)
            _write(row, r, z + at_row, one)
            _write(d, r, u + at_row, one)
        store(total, vectors, along)
        group = claim(args, 1)


KERNELS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "backward": _backward,
    "collect": _collect,
    "rows forward": _rows_forward,
    "rows backward": _rows_backward,
}

INLINE = ("_within", "_exp", "_tanh", "_log1p", "_normal_cdf", "_far", "_unless_far_below")
INLINE += (
    "_unless_far",
    "_turns",
    "_sin",
    "_cos",
    "_one_row",
    "_two_rows",
    "_four_rows",
    "_half_of_four_rows",
)
PARTS = ("_activate", "_affine", "_add_adjoint", "_move", "_add_outer", "_add_sums")
PARTS += (
    "_turn",
    "_gather",
    "_scatter",
    "_weigh",
    "_clear",
    "_add",
    "_read",
    "_write",
    "_add_bias",
)
PARTS += ("_copy", "_kept_late", "_activate_again", "_weigh_tanh")

COMPILING = "hdnn: compiling a kernel for this processor (once after each installation)"

_compiled: dict[tuple[str, torch.dtype], Any] = {}
_kept: list[Any] = []
_lock = threading.RLock()


def kernel(name: str, dtype: torch.dtype) -> Any:
    """The compiled kernel, a C function of the address of its arguments."""
    found = _compiled.get((name, dtype))
    if found is None:
        with _lock, said_if_slow(COMPILING):
            found = _compile(name, dtype)
    return found


def _compile(name: str, dtype: torch.dtype) -> Any:
    """Compile a kernel, or find it on disk; give numba the vector operations before the first."""
    numba = require("numba", extra="fast")
    names = globals()
    if at is None:
        names.update(vectors.operations())
        for part in INLINE + PARTS:
            options = {"error_model": "numpy", "forceinline": part in INLINE}
            names[part] = numba.njit(**options)(names[part])
    if (name, dtype) not in _compiled:
        number = numba.float32 if dtype == torch.float32 else numba.float64
        signature = numba.void(numba.types.CPointer(number))
        try:
            compiled = numba.cfunc(signature, cache=True, error_model="numpy")(KERNELS[name])
        except RuntimeError:  # no folder on disk for the cache
            compiled = numba.cfunc(signature, error_model="numpy")(KERNELS[name])
        # C gets only the address of a compiled function, so the object must stay alive.
        _compiled[name, dtype] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled.address)
        _kept.append(compiled)
    return _compiled[name, dtype]


def after_fork() -> None:
    """A new lock: the thread that may hold the old one stayed in the parent."""
    global _lock
    _lock = threading.RLock()
