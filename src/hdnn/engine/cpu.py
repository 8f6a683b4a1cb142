"""The kernel of the CPU: all layers on one tile of samples, then the next tile.

The state of a tile is stored feature by feature, so that every inner loop runs over samples with a
weight as a scalar: numba (extra `fast`) turns these loops into vector instructions, and nothing
leaves the cache. The threads divide the tiles among them.
"""

# Numba compiles these functions, whose types pyright cannot see.
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportCallIssue=false
# pyright: reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core.caching import FunctionCache
from numba.extending import intrinsic, overload
from numba.np.unsafe.ndarray import to_fixed_tuple
from torch import Tensor

from hdnn.engine.memory import Stack, Tensors, machine_bytes

DTYPES = {torch.float32: numba.float32, torch.float64: numba.float64}
# Samples in a tile: the more samples, the rarer the checks before a loop
LONGEST = 256
LANES = 16  # a tile is a multiple of this
PARALLEL_FROM = 20_000_000  # with fewer products, waking a thread does not pay

# Sums in any order, and fused products: both are needed for vector instructions in a loop.
inner = numba.njit(error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


# Memory by address


@intrinsic
def address_of(context, pointer):
    """The address of a pointer."""

    def generate(context, builder, signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return numba.int64(pointer), generate


@intrinsic
def pointer_to(context, address, like):
    """A pointer to numbers of the type of `like`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(
            args[0], context.get_value_type(signature.return_type)
        )

    return numba.types.CPointer(like)(address, like), generate


@intrinsic
def claim(context, address):
    """The integer at an address, which is then increased by 1, atomically for all threads."""

    def generate(context, builder, signature, args):
        place = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw(
            "add", place, ir.Constant(ir.IntType(64), 1), "seq_cst"
        )

    return numba.int64(address), generate


@inner
def matrix(address, rows, columns, like):  # pragma: kernel
    """The array (rows, columns) at an address."""
    return numba.carray(pointer_to(address, like), (rows, columns))


@inner
def vector(address, like):  # pragma: kernel
    """The numbers from an address on; their count is not checked."""
    return numba.carray(pointer_to(address, like), (1,))


# Activations


def fast_tanh(x):
    """tanh: a rational function in float32, the C library's in float64."""


@overload(fast_tanh, inline="always")
def _(x):
    if x != numba.float32:
        return lambda x: math.tanh(x)
    bound = np.float32(7.99881172180175781)
    p0, p1 = np.float32(-2.76076847742355e-16), np.float32(2.00018790482477e-13)
    p2, p3 = np.float32(-8.60467152213735e-11), np.float32(5.12229709037114e-08)
    p4, p5 = np.float32(1.48572235717979e-05), np.float32(6.37261928875436e-04)
    p6 = np.float32(4.89352455891786e-03)
    q0, q1 = np.float32(1.19825839466702e-06), np.float32(1.18534705686654e-04)
    q2, q3 = np.float32(2.26843463243900e-03), np.float32(4.89352518554385e-03)

    def rational(x):  # pragma: kernel
        x = min(max(x, -bound), bound)
        s = x * x
        p = p0 * s + p1
        p = p * s + p2
        p = p * s + p3
        p = p * s + p4
        p = p * s + p5
        p = p * s + p6
        q = q0 * s + q1
        q = q * s + q2
        q = q * s + q3
        return p * x / q

    return rational


SIGMOID = "half + half * tanh(half * x)"
SIGMAS = {  # sigma(x), and its slope, with z = sigma(x)
    "tanh": ("tanh(x)", "one - z * z"),
    "relu": ("max(x, zero)", "one if x > zero else zero"),
    "sigmoid": (SIGMOID, "z * (one - z)"),
    "softplus": ("max(x, zero) + log1p(exp(-abs(x)))", SIGMOID),
    "gelu": (
        "x * half * erfc(-x * root)",
        "half * erfc(-x * root) + x * bell * exp(-half * x * x)",
    ),
    # Clamped, since x - z loses all digits of a large x.
    "silu": (
        f"x * ({SIGMOID})",
        f"({SIGMOID}) * (one + min(max(x, -limit), limit) * (half - half * tanh(half * x)))",
    ),
    "sin": ("sin(x)", "cos(x)"),
    "identity": ("x", "one"),
}
CONSTANTS = {"zero": 0.0, "one": 1.0, "half": 0.5, "root": math.sqrt(0.5)}
CONSTANTS["bell"] = 1 / math.sqrt(2 * math.pi)
CONSTANTS["limit"] = 50.0


def python(name: str, lines: list[str]) -> Any:
    """The function of that name, compiled from lines of Python, for numba."""
    scope: dict[str, Any] = vars(math) | {"tanh": fast_tanh}
    exec("\n".join(lines), scope)
    return inner(scope[name])


def pointwise(name: str, arrays: str, which: int) -> Any:
    """A function that fills the last array with sigma (0) or its slope (1), by its number."""
    lines = [f"def {name}(code, {arrays}, rows, T):"]
    lines += [
        f" {constant} = A.dtype.type({value!r})"
        for constant, value in CONSTANTS.items()
    ]
    for code, sigma in enumerate(SIGMAS.values()):
        lines += [
            f" if code == {code}:",
            "  for i in range(rows):",
            "   for t in range(T):",
        ]
        lines += ["    x = A[i, t]", "    z = Z[i, t]" if which else "    pass"]
        lines.append(f"    {arrays[-1]}[i, t] = {sigma[which]}")
    return python(name, lines)


value = pointwise("value", "A, Z", 0)
slope = pointwise("slope", "A, Z, D", 1)


# Products, in blocks of rows and columns whose weights or sums stay in registers


def unrolled(
    name: str, arguments: str, block: Callable[[int, int], Iterator[str]]
) -> Any:
    """A function that runs a block over all rows, two by two, and all columns, four by four."""
    lines = [f"def {name}({arguments}, rows, columns, T):", " i = 0"]
    for R in (2, 1):
        lines += [f" while rows - i >= {R}:", "  k = 0"]
        for C in (4, 1):
            lines.append(f"  while columns - k >= {C}:")
            lines += ["   " + line for line in block(R, C)]
            lines.append(f"   k += {C}")
        lines.append(f"  i += {R}")
    return python(name, lines)


def product_block(factor: str, R: int, C: int) -> Iterator[str]:
    """z += W x; the entries of W lie `down` and `across` from each other, and have a factor."""
    for a in range(R):
        for b in range(C):
            entry = f"start + (i + {a}) * down + (k + {b}) * across"
            yield f"w{a}{b} = {factor.format(b)}W[{entry}]"
    yield "for t in range(T):"
    for b in range(C):
        yield f" x{b} = x[k + {b}, t]"
    for a in range(R):
        terms = " + ".join([f"w{a}{b} * x{b}" for b in range(C)])
        yield f" z[i + {a}, t] += {terms}"


def outer_block(R: int, C: int) -> Iterator[str]:
    """G += u x^T, summed over samples."""
    for a in range(R):
        for b in range(C):
            yield f"g{a}{b} = G.dtype.type(0)"
    yield "for t in range(T):"
    for b in range(C):
        yield f" x{b} = x[k + {b}, t]"
    for a in range(R):
        for b in range(C):
            yield f" g{a}{b} += u[i + {a}, t] * x{b}"
    for a in range(R):
        for b in range(C):
            yield f"G[start + (i + {a}) * columns + k + {b}] += g{a}{b}"


add_product = unrolled(
    "add_product", "W, start, down, across, x, z", partial(product_block, "")
)
# With a factor for each column
add_weighted = unrolled(
    "add_weighted",
    "W, start, down, across, c, a, x, z",
    partial(product_block, "c * a[k + {}] * "),
)
add_outer = unrolled("add_outer", "G, start, u, x", outer_block)


# A tile of samples


@inner
def gather(y, first, count, x, n, T):  # pragma: kernel
    """x (n, T) = the transpose of some rows of y, and zeros."""
    zero = x.dtype.type(0)
    for k in range(n):
        for t in range(count):
            x[k, t] = y[first + t, k]
        for t in range(count, T):
            x[k, t] = zero


@inner
def scatter(x, y, first, count, n):  # pragma: kernel
    """The inverse of `gather`."""
    for t in range(count):
        for k in range(n):
            y[first + t, k] = x[k, t]


@inner
def fill(z, b, start, rows, T):  # pragma: kernel
    """Set z = b in all samples."""
    for i in range(rows):
        for t in range(T):
            z[i, t] = b[start + i]


@inner
def clear(z, rows, T):  # pragma: kernel
    zero = z.dtype.type(0)
    for i in range(rows):
        for t in range(T):
            z[i, t] = zero


@inner
def copy(x, to, rows, T):  # pragma: kernel
    for i in range(rows):
        for t in range(T):
            to[i, t] = x[i, t]


@inner
def add_sums(G, start, u, rows, T):  # pragma: kernel
    """G += the sums of u over samples."""
    for i in range(rows):
        total = G.dtype.type(0)
        for t in range(T):
            total += u[i, t]
        G[start + i] += total


@inner
def weigh(z, d, w, c, a, G, da, start, rows, T):  # pragma: kernel
    """Set d = c a sigma' w and w = c a z; add the gradient of a to G, and return that of c."""
    along = z.dtype.type(0)
    for i in range(rows):
        ca = c * a[i]
        total = z.dtype.type(0)
        for t in range(T):
            x = w[i, t]
            total += z[i, t] * x
            d[i, t] *= ca * x
            w[i, t] = ca * z[i, t]
        along += a[i] * total
        if da >= 0:
            G[da + start + i] += c * total
    return along


# The kernels: functions of the address of their arguments, which are integers


@inner
def step_of(a, s, like):  # pragma: kernel
    """The half that a step reads, its layer, rows and fraction of h; K, b, V, gains; is V K?"""
    M = a[8]
    order = matrix(a[16], M, 2, a[0])
    half = order[s, 0]
    j = order[s, 1]
    fraction = matrix(a[16] + 16 * M, 1, M, like)[0, s]
    r = a[ROWS + half]
    place = WEIGHTS + 4 * half
    K = vector(a[place], like)
    b = vector(a[place + 1], like)
    same = a[place + 2] == 0
    V = K if same else vector(a[place + 2], like)
    gains = vector(a[place + 3] + j * r * a[10], like)
    return half, j, r, fraction, K, b, V, gains, same


def forward_kernel(args):  # pragma: kernel
    """Run all layers on each tile of the groups that this thread claims."""
    like = numba.carray(args, (1,))[0]
    base = address_of(args)
    a = numba.carray(pointer_to(base, base), (COUNT,))
    groups, tiles, T, B, n, m, R, M, code, size = to_fixed_tuple(a[1:11], 10)
    scratch, room, y, out, saved = to_fixed_tuple(a[11:16], 5)
    h = vector(a[17], like)
    group = claim(base)
    while group < groups:
        x_at = scratch + group * room
        free = x_at + n * T * size
        x = matrix(x_at, n, T, like)
        for tile in range(
            tiles * group // groups, tiles * (group + 1) // groups
        ):
            first = tile * T
            count = min(T, B - first)
            gather(matrix(y, B, n, like), first, count, x, n, T)
            for s in range(M):
                half, j, r, fraction, K, b, V, gains, _ = step_of(a, s, like)
                c = fraction * h[j]
                source = matrix(x_at + half * m * T * size, m, T, like)
                target = matrix(
                    x_at + (n - m - half * m) * T * size, m, T, like
                )
                p_at = free
                z_at = free + R * T * size
                # What the step reads, and z, or p if the slope needs it
                if saved:
                    place = saved + (tile * M + s) * (m + R) * T * size
                    copy(source, matrix(place, m, T, like), m, T)
                    if code == 0:
                        z_at = place + m * T * size
                    else:
                        p_at = place + m * T * size
                p = matrix(p_at, r, T, like)
                z = matrix(z_at, r, T, like)
                fill(p, b, j * r, r, T)
                add_product(K, j * r * m, m, 1, source, p, r, m, T)
                value(code, p, z, r, T)
                add_weighted(V, j * r * m, 1, m, c, gains, z, target, m, r, T)
            scatter(x, matrix(out, B, n, like), first, count, n)
        group = claim(base)


def backward_kernel(args):  # pragma: kernel
    """The gradients, from the saved states; each group has its own sums of weight gradients."""
    like = numba.carray(args, (1,))[0]
    base = address_of(args)
    a = numba.carray(pointer_to(base, base), (COUNT,))
    groups, tiles, T, B, n, m, R, M, code, size = to_fixed_tuple(a[1:11], 10)
    scratch, room, g, out, saved = to_fixed_tuple(a[11:16], 5)
    h = vector(a[17], like)
    group = claim(base)
    while group < groups:
        g_at = scratch + group * room
        free = g_at + n * T * size
        gx = matrix(g_at, n, T, like)
        G = vector(a[SUMS] + group * a[SUMS + 1] * size, like)
        for tile in range(
            tiles * group // groups, tiles * (group + 1) // groups
        ):
            first = tile * T
            count = min(T, B - first)
            gather(matrix(g, B, n, like), first, count, gx, n, T)
            for s in range(M - 1, -1, -1):
                step = step_of(a, s, like)
                half, j, r, fraction, K, _, V, gains, same = step
                c = fraction * h[j]
                dK = a[PLACES + 3 * half] + j * r * m
                db = a[PLACES + 3 * half + 1] + j * r
                dV = a[PLACES + 3 * half + 2]
                g_source = matrix(g_at + half * m * T * size, m, T, like)
                g_target = matrix(
                    g_at + (n - m - half * m) * T * size, m, T, like
                )
                place = saved + (tile * M + s) * (m + R) * T * size
                source = matrix(place, m, T, like)
                p = matrix(place + m * T * size, r, T, like)
                z = p
                if code != 0:
                    z = matrix(free + 2 * R * T * size, r, T, like)
                    value(code, p, z, r, T)
                u = matrix(free, r, T, like)
                w = matrix(free + R * T * size, r, T, like)
                slope(code, p, z, u, r, T)
                clear(w, r, T)
                add_product(V, j * r * m, m, 1, g_target, w, r, m, T)
                da = dV if same else NONE
                along = weigh(z, u, w, c, gains, G, da, j * r, r, T)
                if a[PLACES - 1] >= 0:
                    G[a[PLACES - 1] + j] += fraction * along
                add_sums(G, db, u, r, T)
                add_outer(G, dK, u, source, r, m, T)
                if same:
                    add_outer(G, dK, w, g_target, r, m, T)
                elif dV >= 0:
                    add_outer(G, dV + j * r * m, w, g_target, r, m, T)
                add_product(K, j * r * m, 1, m, u, g_source, m, r, T)
            scatter(gx, matrix(out, B, n, like), first, count, n)
        group = claim(base)


COUNT = 37
# Their positions among the arguments
ROWS = 18
WEIGHTS = 20
SUMS = 28
PLACES = 31
NONE = -1  # instead of a gradient that is not needed


# Buffers that are used again


LARGE = 2**20  # bytes; smaller blocks are left to the C library
_free: dict[int, list[Tensor]] = {}


def buffer(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised vector on the CPU; large vectors reuse memory that is no longer held.

    The system maps new memory page by page, which can take longer than the layers themselves.
    """
    size = count * dtype.itemsize
    if size < LARGE:
        return torch.empty(count, dtype=dtype, device="cpu")
    size = -(-size // LARGE) * LARGE
    buffers = _free.setdefault(size, [])
    try:
        memory = buffers.pop()
    except IndexError:
        memory = torch.empty(size, dtype=torch.uint8, device="cpu")
    array = memory.numpy()  # lives as long as any tensor in it
    weakref.finalize(array, _release, memory).atexit = False
    return torch.from_numpy(array).view(dtype)[:count]


def _release(memory: Tensor) -> None:
    """Keep a buffer for the next call with the same size, up to 1/32 of the memory in all."""
    total = sum(size * len(buffers) for size, buffers in list(_free.items()))
    if total + len(memory) > machine_bytes() / 32:
        _free.clear()
    _free.setdefault(len(memory), []).append(memory)


# Around the kernels


class Kernel:
    """A stack on the CPU."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        m, R, M = stack.width, max(stack.rows), stack.steps
        self.tiles, self.length = tiling(stack.samples)
        *steps, fractions = zip(*stack.order, strict=True)
        steps = torch.tensor(steps, dtype=torch.int64).T.flatten()
        fractions = torch.tensor(fractions, dtype=stack.dtype)
        pieces = [steps.view(torch.uint8), fractions.view(torch.uint8)]
        self.order = torch.cat(pieces)
        self.products = stack.samples * M * m * R
        self.room = (stack.features + 3 * R) * self.length
        code = list(SIGMAS).index(stack.sigma.name)
        sizes = (self.length, stack.samples, stack.features, m, R, M, code)
        self.sizes = (*sizes, stack.dtype.itemsize)
        self.places = [NONE if p is None else p[0] for p in stack.places]
        self.ones = torch.ones(stack.layers * R, dtype=stack.dtype)
        self.saved_size = saved_size(stack)

    def forward(
        self, y: Tensor, tensors: Tensors, save: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """y_N from y_0 (B, n) and, with `save`, the values that `backward` needs."""
        saved = buffer(self.saved_size, y.dtype) if save else None
        out = torch.empty_like(y)
        groups = self._groups(2)
        self._run("forward", groups, y, out, saved, tensors, ())
        return out, saved

    def backward(
        self, y: Tensor, saved: Tensor, g: Tensor, tensors: Tensors
    ) -> list[Tensor | None]:
        """The gradients of y_0 and of all tensors, given the gradient of y_N."""
        groups = self._groups(4)
        sums = torch.zeros(groups, self.stack.size, dtype=g.dtype)
        out = torch.empty_like(g)
        where = (sums.data_ptr(), self.stack.size, *self.places)
        self._run("backward", groups, g, out, saved, tensors, where)
        total = sums.view(-1) if groups == 1 else sums.sum(0)
        return [out, *self.stack.gradients(total)]

    def _groups(self, factor: int) -> int:
        if self.products * factor < PARALLEL_FROM:
            return 1
        return min(self.tiles, torch.get_num_threads())

    def _run(
        self,
        name: str,
        groups: int,
        x: Tensor,
        out: Tensor,
        saved: Tensor | None,
        tensors: Tensors,
        where: tuple[int, ...],
    ) -> None:
        stack = self.stack
        scratch = torch.empty(groups * self.room, dtype=x.dtype)
        args = [0, groups, self.tiles, *self.sizes]
        args += [scratch.data_ptr(), self.room * stack.dtype.itemsize]
        args += [x.data_ptr(), out.data_ptr()]
        args.append(0 if saved is None else saved.data_ptr())
        args += [self.order.data_ptr(), tensors[0].data_ptr()]
        args += [stack.rows[0], stack.rows[-1]]
        for k in range(1, len(tensors), 3):
            K, b, V = tensors[k : k + 3]
            gains = self.ones
            if V is not None and V.ndim == 2:
                gains = V
                V = None
            args += [K.data_ptr(), b.data_ptr()]
            args += [0 if V is None else V.data_ptr(), gains.data_ptr()]
        args += [0] * (SUMS - len(args))
        args += where
        args += [0] * (COUNT - len(args))
        packed = array("q", args)
        kernel = compiled(name, self.stack.dtype)
        address = packed.buffer_info()[0]
        if groups == 1:
            kernel(address)
        else:
            run_together(kernel, address, groups)


def tiling(samples: int) -> tuple[int, int]:
    """The number of tiles, and samples in each."""
    count = -(-samples // LONGEST)
    if samples > LONGEST // 2:
        count = max(2, count)
    return count, -(-samples // max(1, count) // LANES) * LANES


def saved_size(stack: Stack, precision: str = "ieee") -> int:
    """The count of numbers that the forward pass saves: the inputs of each step, and sigma."""
    tiles, length = tiling(stack.samples)
    return tiles * length * stack.steps * (stack.width + max(stack.rows))


@cache
def compiled(name: str, dtype: torch.dtype) -> Any:
    """A kernel as a C function; compiled once, and cached on disk if possible."""
    function = {"forward": forward_kernel, "backward": backward_kernel}[name]
    with _compiling:
        try:
            return _compile(function, dtype, cache=True)
        # Files of the cache are damaged, or there is no folder for them.
        except Exception:
            with suppress(Exception):
                FunctionCache(function).flush()
                return _compile(function, dtype, cache=True)
            return _compile(function, dtype, cache=False)


def _compile(function: Any, dtype: torch.dtype, cache: bool) -> Any:
    signature = numba.void(numba.types.CPointer(DTYPES[dtype]))
    kernel = numba.cfunc(signature, cache=cache, error_model="numpy")(function)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
    call.owner = kernel  # C has only its address
    return call


_compiling = threading.RLock()


def run_together(kernel: Any, address: int, threads: int) -> None:
    """Call a kernel from so many threads at once."""
    if openmp() is not None:
        openmp()(kernel, address, threads, 0)
    else:
        others = []
        for _ in range(threads - 1):
            other = threading.Thread(target=kernel, args=(address,))
            other.start()
            others.append(other)
        kernel(address)
        for other in others:
            other.join()


@cache
def openmp() -> Any:
    """The function that starts PyTorch's own threads, which are already awake; None without one."""
    folder = Path(torch.__file__).with_name("lib")
    try:
        parallel = ctypes.CDLL(str(folder / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.restype = None
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    parallel.argtypes = [pointer, pointer, number, number]
    return parallel
