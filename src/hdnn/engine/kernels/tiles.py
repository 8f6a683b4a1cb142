"""The kernels of the CPU: all layers on one tile of samples, then the next tile.

A tile is as wide as one vector, 64 float32 or 32 float64 samples; its state is kept feature by
feature, so that every operation is one vector instruction over samples with a weight as a scalar,
and nothing leaves the cache. The kernels are plain functions here. Numba (extra `fast`) compiles
them when first called, once for each dtype whatever the sizes, and keeps them on disk. They release
the interpreter and share nothing, so that any number of threads may call them.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from hdnn.engine.kernels import vectors
from hdnn.errors import require

KINDS = ("same", "identity", "general", "canonical")
SAME, IDENTITY, GENERAL, CANONICAL = range(4)

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
splat: Any = None
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


def _exp(x):  # pragma: kernel
    """exp of x, which is kept within the range of normal numbers."""
    if is_double(x):
        x = where_less(x, splat(-708.0, x), splat(-708.0, x), x)
        x = where_less(splat(709.0, x), x, splat(709.0, x), x)
        k = nearest(x * 1.4426950408889634)
        r = (x - k * 6.93145751953125e-1) - k * 1.42860682030941723212e-6
        s = r * (1 / 6227020800) + 1 / 479001600
        s = s * r + 1 / 39916800
        s = s * r + 1 / 3628800
        s = s * r + 1 / 362880
        s = s * r + 1 / 40320
        s = s * r + 1 / 5040
    else:
        x = where_less(x, splat(-87.0, x), splat(-87.0, x), x)
        x = where_less(splat(88.0, x), x, splat(88.0, x), x)
        k = nearest(x * 1.4426950408889634)
        r = (x - k * 0.693359375) - k * -2.12194440e-4
        s = splat(1 / 5040, x)
    s = s * r + 1 / 720
    s = s * r + 1 / 120
    s = s * r + 1 / 24
    s = s * r + 1 / 6
    s = s * r + 0.5
    s = s * r + 1.0
    s = s * r + 1.0
    return s * power_of_two(k)


def _tanh(x):  # pragma: kernel
    s = x * x
    if is_double(x):  # Cephes: a rational function near 0, exp elsewhere
        top = ((s * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * s) - (
            1.61468768441708447952e3
        )
        low = ((s + 1.12811678491632931402e2) * s + 2.23548839060100448583e3) * s + (
            4.84406305325125486048e3
        )
        near = x + x * (s * top / low)
        size = magnitude(x)
        far = splat(1.0, x) - splat(2.0, x) / (_exp(size + size) + 1.0)
        far = where_less(x, splat(0.0, x), splat(0.0, x) - far, far)
        return where_less(size, splat(0.625, x), near, far)
    # A rational function that is exact to rounding up to where tanh is 1.
    x = where_less(x, splat(-7.99881172180175781, x), splat(-7.99881172180175781, x), x)
    x = where_less(splat(7.99881172180175781, x), x, splat(7.99881172180175781, x), x)
    s = x * x
    top = s * -2.76076847742355e-16 + 2.00018790482477e-13
    top = top * s - 8.60467152213735e-11
    top = top * s + 5.12229709037114e-08
    top = top * s + 1.48572235717979e-05
    top = top * s + 6.37261928875436e-04
    top = top * s + 4.89352455891786e-03
    low = s * 1.19825839466702e-06 + 1.18534705686654e-04
    low = low * s + 2.26843463243900e-03
    low = low * s + 4.89352518554385e-03
    return x * top / low


def _log1p(t):  # pragma: kernel
    """log(1 + t) for 0 <= t <= 1, as 2 artanh(t / (2 + t))."""
    a = t / (t + 2.0)
    s = a * a
    if is_double(t):
        p = s * (2 / 35) + 2 / 33
        p = p * s + 2 / 31
        p = p * s + 2 / 29
        p = p * s + 2 / 27
        p = p * s + 2 / 25
        p = p * s + 2 / 23
        p = p * s + 2 / 21
        p = p * s + 2 / 19
        p = p * s + 2 / 17
    else:
        p = splat(2 / 17, t)
    p = p * s + 2 / 15
    p = p * s + 2 / 13
    p = p * s + 2 / 11
    p = p * s + 2 / 9
    p = p * s + 2 / 7
    p = p * s + 2 / 5
    p = p * s + 2 / 3
    p = p * s + 2.0
    return a * p


def _normal_cdf(x, bell):  # pragma: kernel
    """Phi(x), given bell = exp(-x^2 / 2): a polynomial for (1 + 2a) exp(a^2) erfc(a)."""
    a = magnitude(x) * math.sqrt(0.5)
    a = where_less(splat(50.0, x), a, splat(50.0, x), a)
    u = (a - 4.0) / (a + 4.0)
    p = u * 1.6403183859126829e-09 - 6.9840210839589835e-09
    p = p * u - 1.6738128051575484e-08
    p = p * u + 9.29077286532988e-08
    p = p * u + 7.202517600492906e-08
    p = p * u - 8.019174682765151e-07
    p = p * u + 2.968409170763573e-07
    p = p * u + 5.689409089788712e-06
    p = p * u - 1.1224122281375893e-05
    p = p * u - 2.438769126418468e-05
    p = p * u + 0.00015062257137037893
    p = p * u - 0.0001992610018544803
    p = p * u - 0.0007577735257382317
    p = p * u + 0.005031971017234268
    p = p * u - 0.016197734020451597
    p = p * u + 0.03716751538360477
    p = p * u - 0.06633036581541651
    p = p * u + 0.0937328350110569
    p = p * u - 0.10103906603618064
    p = p * u + 0.06809705425420673
    p = p * u + 0.015379652102618402
    p = p * u - 0.139621116840557
    p = p * u + 1.2329951186255526
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
    r = where_less(r, splat(-1.5707963267948966, x), splat(-1.5707963267948966, x), r)
    r = where_less(splat(1.5707963267948966, x), r, splat(1.5707963267948966, x), r)
    return k, r


def _sin(x):  # pragma: kernel
    k, r = _turns(x)
    s = r * r
    p = s * (1 / 51090942171709440000) - 1 / 121645100408832000
    p = p * s + 1 / 355687428096000
    p = p * s - 1 / 1307674368000
    p = p * s + 1 / 6227020800
    p = p * s - 1 / 39916800
    p = p * s + 1 / 362880
    p = p * s - 1 / 5040
    p = p * s + 1 / 120
    p = p * s - 1 / 6
    return alternate(k, r + r * (s * p))


def _cos(x):  # pragma: kernel
    k, r = _turns(x)
    s = r * r
    p = s * (1 / 1124000727777607680000) - 1 / 2432902008176640000
    p = splat(0.0, x) - p
    p = p * s - 1 / 6402373705728000
    p = p * s + 1 / 20922789888000
    p = p * s - 1 / 87178291200
    p = p * s + 1 / 479001600
    p = p * s - 1 / 3628800
    p = p * s + 1 / 40320
    p = p * s - 1 / 720
    p = p * s + 1 / 24
    p = p * s - 0.5
    return alternate(k, s * p + 1.0)


def _activate(code, a, rows, one):  # pragma: kernel
    """sigma in place over rows of vectors."""
    if code == 0:
        for i in range(rows):
            store(a, i, _tanh(load(a, i, one)))
    elif code == 1:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            store(a, i, where_less(x, zero, zero, x))
    elif code == 2:
        for i in range(rows):
            x = load(a, i, one)
            unit = splat(1.0, x)
            store(a, i, unit / (_exp(splat(0.0, x) - x) + unit))
    elif code == 3:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            store(a, i, where_less(x, zero, zero, x) + _log1p(_exp(zero - magnitude(x))))
    elif code == 4:
        for i in range(rows):
            x = load(a, i, one)
            store(a, i, _unless_far_below(x) * _normal_cdf(x, _exp(x * x * -0.5)))
    elif code == 5:
        for i in range(rows):
            x = load(a, i, one)
            store(a, i, _unless_far_below(x) / (_exp(splat(0.0, x) - x) + 1.0))
    elif code == 6:
        for i in range(rows):
            store(a, i, _sin(load(a, i, one)))


def _activate_both(code, a, d, rows, one):  # pragma: kernel
    """sigma in place, and its slope into d."""
    if code == 0:
        for i in range(rows):
            z = _tanh(load(a, i, one))
            store(a, i, z)
            store(d, i, splat(1.0, z) - z * z)
    elif code == 1:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            store(a, i, where_less(x, zero, zero, x))
            store(d, i, where_less(zero, x, splat(1.0, x), zero))
    elif code == 2:
        for i in range(rows):
            x = load(a, i, one)
            e = _exp(splat(0.0, x) - x)
            z = splat(1.0, x) / (e + 1.0)
            store(a, i, z)
            store(d, i, e * z * z)
    elif code == 3:
        for i in range(rows):
            x = load(a, i, one)
            zero = splat(0.0, x)
            t = _exp(zero - magnitude(x))
            store(a, i, where_less(x, zero, zero, x) + _log1p(t))
            store(d, i, where_less(x, zero, t, splat(1.0, x)) / (t + 1.0))
    elif code == 4:
        for i in range(rows):
            x = load(a, i, one)
            bell = _exp(x * x * -0.5)
            Phi = _normal_cdf(x, bell)
            store(a, i, _unless_far_below(x) * Phi)
            store(d, i, _unless_far(x) * bell * 0.3989422804014327 + Phi)
    elif code == 5:
        for i in range(rows):
            x = load(a, i, one)
            e = _exp(splat(0.0, x) - x)
            z = splat(1.0, x) / (e + 1.0)
            store(a, i, _unless_far_below(x) * z)
            store(d, i, z + _unless_far(x) * z * (e * z))
    elif code == 6:
        for i in range(rows):
            x = load(a, i, one)
            store(a, i, _sin(x))
            store(d, i, _cos(x))
    else:
        for i in range(rows):
            store(d, i, splat(1.0, load(a, i, one)))


def _one_row(W, across, x, count, one):  # pragma: kernel
    """The sum over k of W_k x_k, where W_k lies `across` bytes from its neighbour."""
    a = splat(0.0, one)
    for k in range(count):
        a = a + load(x, k, one) * at(W + k * across, 0, one)
    return a


def _two_rows(W, down, across, x, count, one):  # pragma: kernel
    """`_one_row` for W and for the row `down` bytes after it."""
    a = b = splat(0.0, one)
    for k in range(count):
        v, place = load(x, k, one), W + k * across
        a = a + v * at(place, 0, one)
        b = b + v * at(place + down, 0, one)
    return a, b


def _four_rows(W, down, across, x, count, one):  # pragma: kernel
    a = b = c = d = splat(0.0, one)
    for k in range(count):
        v, place = load(x, k, one), W + k * across
        a = a + v * at(place, 0, one)
        b = b + v * at(place + down, 0, one)
        c = c + v * at(place + 2 * down, 0, one)
        d = d + v * at(place + 3 * down, 0, one)
    return a, b, c, d


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


def _split_forward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 25)
    scratch, part, B, tiles, m, r_p, r_q, M = given[3:11]
    y, out, K_p, K_q, b_p, b_q, V_p, V_q = given[11:19]
    half, layer, coef, code, kind, kept = given[19:25]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    z = scratch + 2 * m * vector
    tile = claim(args, 1)
    while tile < tiles:
        _gather(y, tile, B, 2 * m, scratch, True, one)
        for s in range(M):
            j, c = integer(layer, s), at(coef, s, one)
            if integer(half, s) == 0:
                target, source, r = scratch, scratch + m * vector, r_q
                K, b, V = K_q + j * r * m * size, b_q + j * r * size, V_q + j * r * m * size
            else:
                target, source, r = scratch + m * vector, scratch, r_p
                K, b, V = K_p + j * r * m * size, b_p + j * r * size, V_p + j * r * m * size
            if kept:  # as it is: a tile, feature by feature
                place = kept + (s * tiles + tile) * m * vector
                for k in range(m):
                    store(place, k, load(source, k, one))
            _affine(K, b, source, z, r, m, one)
            _activate(code, z, r, one)
            if kind == IDENTITY:
                for k in range(m):
                    store(target, k, load(target, k, one) + load(z, k, one) * c)
            else:
                _add_adjoint(V, m, z, c, target, r, m, one)
        _scatter(scratch, tile, B, 2 * m, out, one)
        tile = claim(args, 1)


def _split_backward(args):  # pragma: kernel
    """Undoes each shear from y_N; if the halves that they read were kept, reads those."""
    one, given = unit(args), arguments(args, 29)
    groups, scratch, part, B, tiles, m, r_p, r_q, M = given[2:11]
    y, g, y_0, g_0, K_p, K_q, b_p, b_q, V_p, V_q = given[11:21]
    half, layer, coef, grads, total, code, kind, kept = given[21:29]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    R = max(r_p, r_q)
    x = scratch
    gx = x + 2 * m * vector
    z = gx + 2 * m * vector
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
                _gather(y, tile, B, 2 * m, x, True, one)
            _gather(g, tile, B, 2 * m, gx, False, one)
            for step in range(M):
                s = M - 1 - step
                j, c = integer(layer, s), at(coef, s, one)
                if integer(half, s) == 0:
                    r, to, of = r_q, 0, m * vector
                    K, b, V = K_q + j * r * m * size, b_q + j * r * size, V_q + j * r * m * size
                else:
                    r, to, of = r_p, m * vector, 0
                    K, b, V = K_p + j * r * m * size, b_p + j * r * size, V_p + j * r * m * size
                source = x + of
                if kept:
                    source = kept + (s * tiles + tile) * m * vector
                _affine(K, b, source, z, r, m, one)
                _activate_both(code, z, d, r, one)
                if not kept:
                    if kind == IDENTITY:
                        for k in range(m):
                            store(x + to, k, load(x + to, k, one) - load(z, k, one) * c)
                    else:
                        _add_adjoint(V, m, z, -c, x + to, r, m, one)
                v = gx + to  # V g
                if kind != IDENTITY:
                    _affine(V, 0, gx + to, w, r, m, one)
                    v = w
                put(dcoef, s, at(dcoef, s, one) + _weigh(z, v, d, c, r, one))
                _add_sums(db + s * R * size, d, r, one)
                into = s * R * m * size
                if kind == SAME:
                    _add_outer(dK + into, d, source, z, gx + to, r, m, one)
                else:
                    _add_outer(dK + into, d, source, 0, 0, r, m, one)
                    if kind == GENERAL:
                        _add_outer(dV + into, z, gx + to, 0, 0, r, m, one)
                _add_adjoint(K, m, d, one, gx + of, r, m, one)
            if y_0 and not kept:
                _scatter(x, tile, B, 2 * m, y_0, one)
            _scatter(gx, tile, B, 2 * m, g_0, one)
        group = claim(args, 1)


def _euler_forward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 19)
    scratch, part, B, tiles, n, r, N = given[3:10]
    y, out, K, b, V, h, code, kind, kept = given[10:19]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    x, z = scratch, scratch + n * vector
    tile = claim(args, 1)
    while tile < tiles:
        _gather(y, tile, B, n, x, True, one)
        for j in range(N):
            if kept:  # as it is: a tile, feature by feature
                place = kept + (j * tiles + tile) * n * vector
                for k in range(n):
                    store(place, k, load(x, k, one))
            c = at(h, j, one)
            _affine(K + j * r * n * size, b + j * r * size, x, z, r, n, one)
            _activate(code, z, r, one)
            if kind == IDENTITY:
                for k in range(n):
                    store(x, k, load(x, k, one) + load(z, k, one) * c)
            elif kind == CANONICAL:  # J V^T z: swap the halves and change one sign
                half = n // 2
                place = V + j * r * n * size
                _add_adjoint(place, n, z, c, x + half * vector, r, half, one)
                _add_adjoint(place + half * size, n, z, -c, x, r, half, one)
            else:
                _add_adjoint(V + j * r * n * size, n, z, c, x, r, n, one)
        _scatter(x, tile, B, n, out, one)
        tile = claim(args, 1)


def _euler_backward(args):  # pragma: kernel
    one, given = unit(args), arguments(args, 21)
    groups, scratch, part, B, tiles, n, r, N = given[2:10]
    states, g, g_0, K, b, V, h, grads, total, code, kind = given[10:21]
    scratch += claim(args, 0) * part
    size = bytes_of(one)
    vector = lanes_of(one) * size
    gx = scratch
    z = gx + n * vector
    d = z + r * vector
    w = d + r * vector
    turned = w + r * vector
    group = claim(args, 1)
    while group < groups:
        dK = grads + group * total * size
        db = dK + N * r * n * size
        dh = db + N * r * size
        dV = dh + N * size
        _clear(dK, total, one)
        for tile in range(tiles * group // groups, tiles * (group + 1) // groups):
            _gather(g, tile, B, n, gx, False, one)
            for step in range(N):
                j = N - 1 - step
                c = at(h, j, one)
                weight, bias = j * r * n * size, j * r * size
                x = states + (j * tiles + tile) * n * vector
                _affine(K + weight, b + bias, x, z, r, n, one)
                _activate_both(code, z, d, r, one)
                v, to = gx, gx
                if kind == CANONICAL:  # J^T g
                    half = n // 2
                    to = turned
                    for k in range(half):
                        store(to, k, load(gx, k + half, one))
                        store(to, k + half, splat(0.0, one) - load(gx, k, one))
                if kind != IDENTITY:
                    _affine(V + weight, 0, to, w, r, n, one)
                    v = w
                put(dh, j, at(dh, j, one) + _weigh(z, v, d, c, r, one))
                _add_sums(db + bias, d, r, one)
                if kind in (SAME, CANONICAL):
                    _add_outer(dK + weight, d, x, z, to, r, n, one)
                else:
                    _add_outer(dK + weight, d, x, 0, 0, r, n, one)
                    if kind == GENERAL:
                        _add_outer(dV + weight, z, gx, 0, 0, r, n, one)
                _add_adjoint(K + weight, n, d, one, gx, r, n, one)
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

    Where the gradients are fresh, each is the sum of one step alone.
    """
    one, given = unit(args), arguments(args, 18)
    grads, groups, total, M, m, r_p, r_q, half, layer = given[:9]
    fresh = given[17]
    size = bytes_of(one)
    for i in range(total // lanes_of(one)):
        s = load(grads, i, one)
        for group in range(1, groups):
            s = s + load(grads + group * total * size, i, one)
        store(grads, i, s)
    R = max(r_p, r_q)
    sums_b = grads + M * R * m * size
    sums_c = sums_b + M * R * size
    sums_V = sums_c + M * size
    if given[13]:
        _add(given[13], sums_c, M, 1, one)
    for s in range(M):
        r, dK, db, dV = r_p, given[9], given[11], given[14]
        if half and integer(half, s) == 0:
            r, dK, db, dV = r_q, given[10], given[12], given[15]
        j = s
        if half:
            j = integer(layer, s)
        _add(dK + j * r * m * size, grads + s * R * m * size, r * m, fresh, one)
        _add(db + j * r * size, sums_b + s * R * size, r, fresh, one)
        if given[16]:
            _add(dV + j * r * m * size, sums_V + s * R * m * size, r * m, fresh, one)


KERNELS: dict[str, Callable[..., Any]] = {
    "split_forward": _split_forward,
    "split_backward": _split_backward,
    "euler_forward": _euler_forward,
    "euler_backward": _euler_backward,
    "collect": _collect,
}

INLINE = ("_exp", "_tanh", "_log1p", "_normal_cdf", "_far", "_unless_far_below", "_unless_far")
INLINE += ("_turns", "_sin", "_cos", "_one_row", "_two_rows", "_four_rows")
PARTS = ("_activate", "_activate_both", "_affine", "_add_adjoint", "_add_outer", "_add_sums")
PARTS += ("_turn", "_gather", "_scatter", "_weigh", "_clear", "_add")

_compiled: dict[tuple[str, torch.dtype], Any] = {}
_kept: list[Any] = []
_lock = threading.RLock()


def kernel(name: str, dtype: torch.dtype) -> Any:
    """The compiled kernel, a C function of the address of its arguments."""
    found = _compiled.get((name, dtype))
    if found is None:
        with _lock:
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
