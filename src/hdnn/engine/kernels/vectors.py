"""What numba does not have: vectors as values, and memory by address."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

# Four registers, so that half a vector and three more of its kind need half of all registers.
VECTOR_BYTES = 256 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 128


def operations() -> dict[str, Any]:  # pragma: kernel
    """The operations by name, for numba to compile; `tiles.py` says what each of them does."""
    from llvmlite import ir
    from numba.core import types
    from numba.core.typing.templates import AbstractTemplate, infer_global, signature
    from numba.extending import intrinsic, lower_builtin, models, register_model

    found: dict[str, Any] = {}
    integer32, integer64 = ir.IntType(32), ir.IntType(64)
    fused = ("contract",)  # a b + c may be rounded once; NaN and infinity stay what they are

    def operation(result: Callable[..., Any]) -> Callable[..., Any]:
        """Make `emit(builder, *values)` an operation, where `result(*types)` is of its type."""

        def decorate(emit: Callable[..., Any]) -> Any:
            @functools.wraps(emit)
            def typed(typing: Any, *kinds: Any) -> Any:
                kinds = tuple(types.int64 if isinstance(k, types.Integer) else k for k in kinds)

                def lower(context: Any, builder: Any, sig: Any, values: Any) -> Any:
                    made = emit(builder, *values)
                    return context.get_dummy_value() if made is None else made

                return result(*kinds)(*kinds), lower

            found[emit.__name__] = intrinsic(typed)
            return emit

        return decorate

    # Types

    class Vector(types.Type):
        def __init__(self, dtype: Any, size: int = VECTOR_BYTES) -> None:
            self.dtype = dtype
            self.lanes = size * 8 // dtype.bitwidth
            super().__init__(name=f"vector({dtype} x {self.lanes})")

    @register_model(Vector)
    class _VectorModel(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Any) -> None:
            scalar = ir.FloatType() if kind.dtype.bitwidth == 32 else ir.DoubleType()
            super().__init__(manager, kind, ir.VectorType(scalar, kind.lanes))

    def nothing(*kinds: Any) -> Any:
        return types.void

    def whole(*kinds: Any) -> Any:
        return types.int64

    def last(*kinds: Any) -> Any:
        return kinds[-1]

    def vector(*kinds: Any) -> Any:
        return kinds[-1] if isinstance(kinds[-1], Vector) else Vector(kinds[-1])

    def half(*kinds: Any) -> Any:
        return Vector(kinds[-1], VECTOR_BYTES // 2)

    def quarter(*kinds: Any) -> Any:
        return Vector(kinds[-1].dtype, VECTOR_BYTES // 4)

    def size_of(t: Any) -> int:
        """The bytes of an element."""
        return 4 if isinstance(getattr(t, "element", t), ir.FloatType) else 8

    def vector_type(t: Any) -> Any:
        return t if isinstance(t, ir.VectorType) else ir.VectorType(t, VECTOR_BYTES // size_of(t))

    def pick(builder: Any, x: Any, y: Any, lanes: list[int]) -> Any:
        """A vector of these lanes of x, and after them of y."""
        mask = ir.Constant(ir.VectorType(integer32, len(lanes)), lanes)
        return builder.shuffle_vector(x, y, mask)

    def part(builder: Any, x: Any, start: int, count: int) -> Any:
        return pick(builder, x, ir.Constant(x.type, ir.Undefined), [*range(start, start + count)])

    def quarters(builder: Any, x: Any) -> list[Any]:
        count = x.type.count // 4
        return [part(builder, x, k * count, count) for k in range(4)]

    # Arithmetic, where a scalar of any type stands for a vector of it

    def convert(context: Any, builder: Any, value: Any, kind: Any, to: Any) -> Any:
        if isinstance(kind, Vector):
            return value
        value = context.cast(builder, value, kind, to.dtype)
        empty = ir.Constant(vector_type(value.type), ir.Undefined)
        one_lane = builder.insert_element(empty, value, ir.Constant(integer32, 0))
        return pick(builder, one_lane, empty, [0] * to.lanes)

    def arithmetic(op: Any, emit: str) -> None:
        class _Typing(AbstractTemplate):
            def generic(self, args: Any, kws: Any) -> Any:
                if any(isinstance(a, Vector) for a in args) and len(args) == 2:
                    to = next(a for a in args if isinstance(a, Vector))
                    return signature(to, *args)
                return None

        declare: Any = infer_global
        declare(op)(_Typing)

        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a, b = (
                convert(context, builder, value, kind, sig.return_type)
                for value, kind in zip(args, sig.args, strict=True)
            )
            return getattr(builder, emit)(a, b, flags=fused)

        lower_builtin(op, Vector, Vector)(lower)
        lower_builtin(op, Vector, types.Number)(lower)

    arithmetic(operator.add, "fadd")
    arithmetic(operator.sub, "fsub")
    arithmetic(operator.mul, "fmul")
    arithmetic(operator.truediv, "fdiv")

    @intrinsic
    def splat(typing: Any, value: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return convert(context, builder, args[0], sig.args[0], sig.return_type)

        return vector(like)(value, like), emit

    @intrinsic
    def polynomial(typing: Any, x: Any, coefficients: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            each = [
                convert(context, builder, builder.extract_value(args[1], k), types.float64, x)
                for k in range(coefficients.count)
            ]
            s = each[0]
            for c in each[1:]:
                s = builder.fadd(builder.fmul(s, args[0], flags=fused), c, flags=fused)
            return s

        return x(x, coefficients), emit

    # Arguments and memory

    @intrinsic
    def unit(typing: Any, args: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return ir.Constant(context.get_value_type(args.dtype), 1.0)

        return args.dtype(args), emit

    @intrinsic(prefer_literal=True)
    def arguments(typing: Any, args: Any, count: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            start = builder.bitcast(values[0], integer64.as_pointer())
            each = [
                builder.load(builder.gep(start, [ir.Constant(integer64, k)]))
                for k in range(count.literal_value)
            ]
            return context.make_tuple(builder, sig.return_type, each)

        return types.UniTuple(types.int64, count.literal_value)(args, count), emit

    found |= {"splat": splat, "polynomial": polynomial, "unit": unit, "arguments": arguments}

    @operation(whole)
    def claim(builder: Any, args: Any, index: Any):
        place = builder.gep(builder.bitcast(args, integer64.as_pointer()), [index])
        return builder.atomic_rmw("add", place, ir.Constant(integer64, 1), "monotonic")

    def element(builder: Any, address: Any, index: Any, to: Any, size: int) -> Any:
        place = builder.add(address, builder.mul(index, ir.Constant(integer64, size)))
        return builder.inttoptr(place, to.as_pointer())

    @operation(whole)
    def integer(builder: Any, address: Any, index: Any):
        return builder.load(element(builder, address, index, integer64, 8))

    @operation(last)
    def at(builder: Any, address: Any, index: Any, like: Any):
        return builder.load(element(builder, address, index, like.type, size_of(like.type)))

    @operation(nothing)
    def put(builder: Any, address: Any, index: Any, value: Any):
        t = value.type
        builder.store(value, element(builder, address, index, t, size_of(t)))

    @operation(vector)
    def load(builder: Any, address: Any, row: Any, like: Any):
        t = vector_type(like.type)
        return builder.load(element(builder, address, row, t, VECTOR_BYTES), align=size_of(t))

    @operation(nothing)
    def store(builder: Any, address: Any, row: Any, value: Any):
        place = element(builder, address, row, value.type, VECTOR_BYTES)
        builder.store(value, place, align=size_of(value.type))

    @operation(half)
    def half_of_zero(builder: Any, like: Any):
        count = VECTOR_BYTES // 2 // size_of(like.type)
        return ir.Constant(ir.VectorType(like.type, count), [0.0] * count)

    @operation(half)
    def load_half(builder: Any, address: Any, row: Any, like: Any):
        size = size_of(like.type)
        t = ir.VectorType(like.type, VECTOR_BYTES // 2 // size)
        return builder.load(element(builder, address, row, t, VECTOR_BYTES), align=size)

    @operation(lambda x, y: Vector(x.dtype))
    def join(builder: Any, x: Any, y: Any):
        return pick(builder, x, y, [*range(2 * x.type.count)])

    @operation(whole)
    def lanes_of(builder: Any, like: Any):
        return ir.Constant(integer64, VECTOR_BYTES // size_of(like.type))

    @operation(whole)
    def bytes_of(builder: Any, like: Any):
        return ir.Constant(integer64, size_of(like.type))

    @operation(lambda x: types.boolean)
    def is_double(builder: Any, x: Any):
        return ir.Constant(ir.IntType(1), int(size_of(x.type) == 8))

    @operation(nothing)
    def turn_block(builder: Any, x: Any, step: Any, y: Any, other_step: Any, like: Any):
        t, size = ir.VectorType(like.type, 4), size_of(like.type)

        def place(address: Any, step: Any, i: int) -> Any:
            offset = builder.mul(step, ir.Constant(integer64, i))
            return builder.inttoptr(builder.add(address, offset), t.as_pointer())

        a, b, c, d = (builder.load(place(x, step, i), align=size) for i in range(4))
        low = pick(builder, a, b, [0, 4, 1, 5]), pick(builder, c, d, [0, 4, 1, 5])
        high = pick(builder, a, b, [2, 6, 3, 7]), pick(builder, c, d, [2, 6, 3, 7])
        rows = (low, [0, 1, 4, 5]), (low, [2, 3, 6, 7]), (high, [0, 1, 4, 5]), (high, [2, 3, 6, 7])
        for i, ((first, second), lanes) in enumerate(rows):
            row = pick(builder, first, second, lanes)
            builder.store(row, place(y, other_step, i), align=size)

    # Sums over a vector

    def add_products(builder: Any, s: Any, x: Any, y: Any) -> Any:
        for a, b in zip(quarters(builder, x), quarters(builder, y), strict=True):
            ab = builder.fmul(a, b, flags=fused)
            s = ab if s is None else builder.fadd(s, ab, flags=fused)
        return s

    @operation(quarter)
    def fold(builder: Any, x: Any):
        a, b, c, d = quarters(builder, x)
        return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

    @operation(quarter)
    def dot(builder: Any, x: Any, y: Any):
        return add_products(builder, None, x, y)

    @operation(quarter)
    def dot_more(builder: Any, s: Any, x: Any, y: Any):
        return add_products(builder, s, x, y)

    @operation(nothing)
    def add_totals(builder: Any, address: Any, index: Any, a: Any, b: Any, c: Any, d: Any):
        def add_pairs(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
            def mix(mask: list[int]) -> Any:  # the same permutation in each group of four lanes
                lanes = x.type.count
                picked = [g + k % 4 + k // 4 * lanes for g in range(0, lanes, 4) for k in mask]
                return pick(builder, x, y, picked)

            return builder.fadd(mix(first), mix(second))

        ab = add_pairs(a, b, [0, 4, 1, 5], [2, 6, 3, 7])
        cd = add_pairs(c, d, [0, 4, 1, 5], [2, 6, 3, 7])
        s = add_pairs(ab, cd, [0, 1, 4, 5], [2, 3, 6, 7])
        while s.type.count > 4:
            n = s.type.count // 2
            s = builder.fadd(part(builder, s, 0, n), part(builder, s, n, n))
        size = size_of(s.type)
        place = element(builder, address, index, s.type, size)
        builder.store(builder.fadd(builder.load(place, align=size), s), place, align=size)

    # Functions of LLVM

    def call(builder: Any, name: str, to: Any, *args: Any, **options: Any) -> Any:
        t = next(a.type for a in args if isinstance(a.type, ir.VectorType))
        name = f"llvm.{name}.v{t.count}f{8 * size_of(t)}"
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(to, [a.type for a in args])
            function = ir.Function(builder.module, kind, name)
        return builder.call(function, args, **options)

    @operation(lambda x: x.dtype)
    def total_of(builder: Any, x: Any):
        start = ir.Constant(x.type.element, -0.0)
        how = ("reassoc", "contract")
        return call(builder, "vector.reduce.fadd", x.type.element, start, x, fastmath=how)

    @operation(last)
    def magnitude(builder: Any, x: Any):
        return call(builder, "fabs", x.type, x)

    @operation(last)
    def nearest(builder: Any, x: Any):
        return call(builder, "rint", x.type, x)

    @operation(last)
    def exactly_fused(builder: Any, x: Any, y: Any, z: Any):
        return call(builder, "fma", x.type, x, y, z)

    @operation(last)
    def where_less(builder: Any, a: Any, b: Any, x: Any, y: Any):
        return builder.select(builder.fcmp_ordered("<", a, b), x, y)

    # By the bits of a number

    def bits(builder: Any, x: Any) -> tuple[Any, Callable[[int], Any], int]:
        """Whole numbers x as integers, constants of that type, and the bits of a mantissa."""
        count, mantissa = x.type.count, 23 if size_of(x.type) == 4 else 52
        t = ir.VectorType(ir.IntType(8 * size_of(x.type)), count)
        shift = ir.Constant(x.type, [1.5 * 2.0**mantissa] * count)
        digits = builder.bitcast(builder.fadd(x, shift), t)
        return digits, lambda value: ir.Constant(t, [value] * count), mantissa

    @operation(last)
    def power_of_two(builder: Any, k: Any):
        digits, constant, mantissa = bits(builder, k)
        one = constant((127 if mantissa == 23 else 1023) << mantissa)
        moved = builder.shl(digits, constant(mantissa))
        return builder.bitcast(builder.add(moved, one), k.type)

    @operation(last)
    def alternate(builder: Any, k: Any, x: Any):
        digits, constant, _ = bits(builder, k)
        sign = builder.shl(digits, constant(8 * size_of(x.type) - 1))
        flipped = builder.xor(builder.bitcast(x, digits.type), sign)
        return builder.bitcast(flipped, x.type)

    return found
