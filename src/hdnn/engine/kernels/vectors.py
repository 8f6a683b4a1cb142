"""What numba does not have: vectors as values, and memory by address."""

from __future__ import annotations

import operator
from typing import Any

VECTOR_BYTES = 256


def operations() -> dict[str, Any]:  # pragma: kernel
    """The operations by name, for numba to compile."""
    from llvmlite import ir
    from numba.core import types
    from numba.core.typing.templates import AbstractTemplate, infer_global, signature
    from numba.extending import intrinsic, lower_builtin, models, register_model

    whole: Any = types.int64
    nothing: Any = types.void
    boolean: Any = types.boolean
    fused = ("contract",)  # a b + c may be rounded once; NaN and infinity stay what they are

    class Vector(types.Type):
        def __init__(self, dtype: Any, size: int = VECTOR_BYTES) -> None:
            self.dtype = dtype
            self.lanes = size * 8 // dtype.bitwidth
            super().__init__(name=f"vector({dtype} x {self.lanes})")

    @register_model(Vector)
    class _VectorModel(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, ir.VectorType(scalar(kind.dtype), kind.lanes))

    def scalar(dtype: Any) -> Any:
        return ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()

    def vector_type(kind: Any) -> Any:
        dtype = kind.dtype if isinstance(kind, Vector) else kind
        return ir.VectorType(scalar(dtype), VECTOR_BYTES * 8 // dtype.bitwidth)

    def vector_of(kind: Any) -> Vector:
        return kind if isinstance(kind, Vector) else Vector(kind)

    def spread(builder: Any, value: Any, to: Any) -> Any:
        one_lane = builder.insert_element(
            ir.Constant(to, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
        )
        mask = ir.Constant(ir.VectorType(ir.IntType(32), to.count), [0] * to.count)
        return builder.shuffle_vector(one_lane, ir.Constant(to, ir.Undefined), mask)

    def convert(context: Any, builder: Any, value: Any, kind: Any, to: Any) -> Any:
        """A scalar of any number type, or a vector, as a vector."""
        if isinstance(kind, Vector):
            return value
        return spread(builder, context.cast(builder, value, kind, to.dtype), vector_type(to))

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

    def call(builder: Any, name: str, to: Any, *args: Any, **options: Any) -> Any:
        function_type = ir.FunctionType(to, [a.type for a in args])
        function = builder.module.globals.get(name)
        if function is None:
            function = ir.Function(builder.module, function_type, name)
        return builder.call(function, args, **options)

    def suffix(t: Any) -> str:
        width = "f32" if isinstance(getattr(t, "element", t), ir.FloatType) else "f64"
        return f"v{t.count}{width}" if isinstance(t, ir.VectorType) else width

    def element(builder: Any, address: Any, index: Any, to: Any, size: int) -> Any:
        place = builder.add(address, builder.mul(index, ir.Constant(index.type, size)))
        return builder.inttoptr(place, to.as_pointer())

    @intrinsic
    def unit(typing: Any, args: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            return ir.Constant(scalar(args.dtype), 1.0)

        return args.dtype(args), emit

    @intrinsic(prefer_literal=True)
    def arguments(typing: Any, args: Any, count: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            start = builder.bitcast(values[0], ir.IntType(64).as_pointer())
            found = [
                builder.load(builder.gep(start, [ir.Constant(ir.IntType(64), k)]))
                for k in range(count.literal_value)
            ]
            return context.make_tuple(builder, sig.return_type, found)

        return types.UniTuple(types.int64, count.literal_value)(args, count), emit

    @intrinsic
    def claim(typing: Any, args: Any, index: Any):
        def emit(context: Any, builder: Any, sig: Any, values: Any) -> Any:
            start = builder.bitcast(values[0], ir.IntType(64).as_pointer())
            place = builder.gep(start, [values[1]])
            one = ir.Constant(ir.IntType(64), 1)
            return builder.atomic_rmw("add", place, one, "monotonic")

        return whole(args, types.int64), emit

    @intrinsic
    def at(typing: Any, address: Any, index: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = scalar(like)
            return builder.load(element(builder, args[0], args[1], t, like.bitwidth // 8))

        return like(whole, whole, like), emit

    @intrinsic
    def put(typing: Any, address: Any, index: Any, value: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = scalar(value)
            builder.store(args[2], element(builder, args[0], args[1], t, value.bitwidth // 8))
            return context.get_dummy_value()

        return nothing(whole, whole, value), emit

    @intrinsic
    def integer(typing: Any, address: Any, index: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(element(builder, args[0], args[1], ir.IntType(64), 8))

        return whole(whole, types.int64), emit

    @intrinsic
    def load(typing: Any, address: Any, row: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = element(builder, args[0], args[1], vector_type(like), VECTOR_BYTES)
            return builder.load(place, align=16)

        return vector_of(like)(whole, whole, like), emit

    @intrinsic
    def store(typing: Any, address: Any, row: Any, value: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            place = element(builder, args[0], args[1], vector_type(value), VECTOR_BYTES)
            builder.store(args[2], place, align=16)
            return context.get_dummy_value()

        return nothing(whole, whole, value), emit

    @intrinsic
    def splat(typing: Any, value: Any, like: Any):
        to = vector_of(like)

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return convert(context, builder, args[0], sig.args[0], to)

        return to(value, like), emit

    def part(builder: Any, x: Any, start: int, count: int) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(start, start + count)))
        return builder.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), mask)

    def quarters(builder: Any, x: Any) -> list[Any]:
        count = x.type.count // 4
        return [part(builder, x, k * count, count) for k in range(4)]

    def quarter_of(kind: Any) -> Vector:
        return Vector(kind.dtype, VECTOR_BYTES // 4)

    def add_products(builder: Any, s: Any, x: Any, y: Any) -> Any:
        for a, b in zip(quarters(builder, x), quarters(builder, y), strict=True):
            ab = builder.fmul(a, b, flags=fused)
            s = ab if s is None else builder.fadd(s, ab, flags=fused)
        return s

    @intrinsic
    def turn_block(typing: Any, x: Any, step: Any, y: Any, other_step: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = ir.VectorType(scalar(like), 4)
            size = like.bitwidth // 8

            def place(address: Any, step: Any, i: int) -> Any:
                offset = builder.mul(step, ir.Constant(step.type, i))
                return builder.inttoptr(builder.add(address, offset), t.as_pointer())

            def mix(a: Any, b: Any, picked: list[int]) -> Any:
                mask = ir.Constant(ir.VectorType(ir.IntType(32), 4), picked)
                return builder.shuffle_vector(a, b, mask)

            a, b, c, d = (builder.load(place(args[0], args[1], i), align=size) for i in range(4))
            low = mix(a, b, [0, 4, 1, 5]), mix(c, d, [0, 4, 1, 5])
            high = mix(a, b, [2, 6, 3, 7]), mix(c, d, [2, 6, 3, 7])
            halves = (low, [0, 1, 4, 5]), (low, [2, 3, 6, 7]), (high, [0, 1, 4, 5])
            for i, (pair, picked) in enumerate((*halves, (high, [2, 3, 6, 7]))):
                builder.store(mix(pair[0], pair[1], picked), place(args[2], args[3], i), align=size)
            return context.get_dummy_value()

        return nothing(whole, whole, whole, whole, like), emit

    @intrinsic
    def fold(typing: Any, x: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            a, b, c, d = quarters(builder, args[0])
            return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))

        return quarter_of(x)(x), emit

    @intrinsic
    def dot(typing: Any, x: Any, y: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return add_products(builder, None, *args)

        return quarter_of(x)(x, y), emit

    @intrinsic
    def dot_more(typing: Any, s: Any, x: Any, y: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return add_products(builder, *args)

        return s(s, x, y), emit

    @intrinsic
    def add_totals(typing: Any, address: Any, index: Any, a: Any, b: Any, c: Any, d: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            def add_pairs(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
                def mix(mask: list[int]) -> Any:  # the same permutation in each group of four lanes
                    lanes = x.type.count
                    picked = [g + k % 4 + k // 4 * lanes for g in range(0, lanes, 4) for k in mask]
                    t = ir.VectorType(ir.IntType(32), lanes)
                    return builder.shuffle_vector(x, y, ir.Constant(t, picked))

                return builder.fadd(mix(first), mix(second))

            ab = add_pairs(args[2], args[3], [0, 4, 1, 5], [2, 6, 3, 7])
            cd = add_pairs(args[4], args[5], [0, 4, 1, 5], [2, 6, 3, 7])
            s = add_pairs(ab, cd, [0, 1, 4, 5], [2, 3, 6, 7])
            while s.type.count > 4:
                n = s.type.count // 2
                s = builder.fadd(part(builder, s, 0, n), part(builder, s, n, n))
            size = a.dtype.bitwidth // 8
            place = element(builder, args[0], args[1], s.type, size)
            builder.store(builder.fadd(builder.load(place, align=size), s), place, align=size)
            return context.get_dummy_value()

        return nothing(whole, whole, a, b, c, d), emit

    @intrinsic
    def total_of(typing: Any, x: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = scalar(x.dtype)
            name = f"llvm.vector.reduce.fadd.{suffix(args[0].type)}"
            return call(
                builder, name, t, ir.Constant(t, -0.0), args[0], fastmath=("reassoc", "contract")
            )

        return x.dtype(x), emit

    @intrinsic
    def where_less(typing: Any, a: Any, b: Any, x: Any, y: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(builder.fcmp_ordered("<", args[0], args[1]), args[2], args[3])

        return x(a, b, x, y), emit

    def function_of(name: str, count: int):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            t = args[0].type
            return call(builder, f"llvm.{name}.{suffix(t)}", t, *args)

        if count == 1:

            @intrinsic
            def unary(typing: Any, x: Any):
                return x(x), emit

            return unary

        @intrinsic
        def ternary(typing: Any, x: Any, y: Any, z: Any):
            return x(x, y, z), emit

        return ternary

    def bits(builder: Any, x: Any, kind: Any) -> tuple[Any, Any, int]:
        """Whole numbers x as integers, the type of these, and the bits of a mantissa."""
        mantissa = 23 if kind.dtype.bitwidth == 32 else 52
        t = ir.VectorType(ir.IntType(kind.dtype.bitwidth), kind.lanes)
        shift = ir.Constant(x.type, [1.5 * 2.0**mantissa] * kind.lanes)
        return builder.bitcast(builder.fadd(x, shift), t), t, mantissa

    @intrinsic
    def power_of_two(typing: Any, k: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            digits, t, mantissa = bits(builder, args[0], k)
            bias = 127 if mantissa == 23 else 1023
            moved = builder.shl(digits, ir.Constant(t, [mantissa] * k.lanes))
            one = ir.Constant(t, [bias << mantissa] * k.lanes)
            return builder.bitcast(builder.add(moved, one), args[0].type)

        return k(k), emit

    @intrinsic
    def alternate(typing: Any, k: Any, x: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            digits, t, _ = bits(builder, args[0], k)
            sign = builder.shl(digits, ir.Constant(t, [k.dtype.bitwidth - 1] * k.lanes))
            return builder.bitcast(builder.xor(builder.bitcast(args[1], t), sign), args[1].type)

        return x(k, x), emit

    @intrinsic
    def is_double(typing: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(1), int(like.dtype.bitwidth == 64))

        return boolean(like), emit

    @intrinsic
    def lanes_of(typing: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(64), VECTOR_BYTES * 8 // like.bitwidth)

        return whole(like), emit

    @intrinsic
    def bytes_of(typing: Any, like: Any):
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return ir.Constant(ir.IntType(64), like.bitwidth // 8)

        return whole(like), emit

    return {
        "arguments": arguments,
        "unit": unit,
        "claim": claim,
        "turn_block": turn_block,
        "fold": fold,
        "dot": dot,
        "dot_more": dot_more,
        "add_totals": add_totals,
        "at": at,
        "put": put,
        "integer": integer,
        "load": load,
        "store": store,
        "splat": splat,
        "total_of": total_of,
        "where_less": where_less,
        "magnitude": function_of("fabs", 1),
        "nearest": function_of("rint", 1),
        "exactly_fused": function_of("fma", 3),
        "power_of_two": power_of_two,
        "alternate": alternate,
        "is_double": is_double,
        "lanes_of": lanes_of,
        "bytes_of": bytes_of,
    }
