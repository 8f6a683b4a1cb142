"""Eight float64 numbers as one value for numba, rounded like each by itself.

Nothing is contracted or reordered, so that the bits do not depend on where a function is inlined.
"""

from __future__ import annotations

import operator
from typing import Any

LANES = 8


def operations() -> dict[str, Any]:  # pragma: kernel
    """The operations by name; `closed_loop.py` says what each of them does."""
    from llvmlite import ir
    from numba.core import types
    from numba.core.typing.templates import AbstractTemplate, infer_global, signature
    from numba.extending import intrinsic, lower_builtin, models, register_model

    vector = ir.VectorType(ir.DoubleType(), LANES)

    class Lanes(types.Type):
        def __init__(self) -> None:
            super().__init__(name="lanes")

    lanes = Lanes()

    @register_model(Lanes)
    class _Model(models.PrimitiveModel):
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, vector)

    def convert(context: Any, builder: Any, value: Any, kind: Any) -> Any:
        """A number of any type in all lanes."""
        if isinstance(kind, Lanes):
            return value
        value, made = context.cast(builder, value, kind, types.float64), vector(ir.Undefined)
        for k in range(LANES):
            made = builder.insert_element(made, value, ir.IntType(32)(k))
        return made

    def arithmetic(op: Any, emit: str) -> None:
        class _Typing(AbstractTemplate):
            def generic(self, args: Any, kws: Any) -> Any:
                if len(args) == 2 and any(isinstance(a, Lanes) for a in args):
                    return signature(lanes, *args)
                return None

        declare: Any = infer_global
        declare(op)(_Typing)

        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            pairs = zip(args, sig.args, strict=True)
            return getattr(builder, emit)(*(convert(context, builder, v, k) for v, k in pairs))

        for kinds in ((Lanes, Lanes), (Lanes, types.Number), (types.Number, Lanes)):
            lower_builtin(op, *kinds)(lower)

    arithmetic(operator.add, "fadd")
    arithmetic(operator.sub, "fsub")
    arithmetic(operator.mul, "fmul")
    arithmetic(operator.truediv, "fdiv")

    def call(builder: Any, name: str, *args: Any) -> Any:
        name, kind = f"llvm.{name}.v{LANES}f64", ir.FunctionType(vector, [vector] * len(args))
        found = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(found, args)

    def operation(emit: Any) -> Any:
        """An operation of lanes and numbers that gives lanes."""

        @intrinsic
        def one(typing: Any, x: Any):
            def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                return emit(builder, convert(context, builder, args[0], x))

            return lanes(x), lower

        @intrinsic
        def three(typing: Any, x: Any, y: Any, z: Any):
            def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                each = zip(args, (x, y, z), strict=True)
                return emit(builder, *(convert(context, builder, v, k) for v, k in each))

            return lanes(x, y, z), lower

        @intrinsic
        def four(typing: Any, w: Any, x: Any, y: Any, z: Any):
            def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
                each = zip(args, (w, x, y, z), strict=True)
                return emit(builder, *(convert(context, builder, v, k) for v, k in each))

            return lanes(w, x, y, z), lower

        return {2: one, 4: three, 5: four}[emit.__code__.co_argcount]

    def place(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        """Where a row begins: all are LANES long, which an array does not know of itself."""
        array = context.make_array(sig.args[0])(context, builder, args[0])
        row = context.cast(builder, args[1], sig.args[1], types.intp)
        return builder.gep(builder.bitcast(array.data, vector.as_pointer()), [row])

    @intrinsic
    def load(typing: Any, array: Any, row: Any):
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.load(place(context, builder, sig, args), align=8)

        return lanes(array, row), lower

    @intrinsic
    def store(typing: Any, array: Any, row: Any, value: Any):
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            made = convert(context, builder, args[2], value)
            builder.store(made, place(context, builder, sig, args), align=8)
            return context.get_dummy_value()

        return types.void(array, row, value), lower

    @intrinsic
    def put(typing: Any, array: Any, row: Any, lane: Any, value: Any):
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first = builder.bitcast(
                place(context, builder, sig, args), ir.DoubleType().as_pointer()
            )
            at = context.cast(builder, args[2], lane, types.intp)
            number = context.cast(builder, args[3], value, types.float64)
            builder.store(number, builder.gep(first, [at]))
            return context.get_dummy_value()

        return types.void(array, row, lane, value), lower

    @intrinsic
    def get(typing: Any, array: Any, row: Any, lane: Any):
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first = builder.bitcast(
                place(context, builder, sig, args), ir.DoubleType().as_pointer()
            )
            at = context.cast(builder, args[2], lane, types.intp)
            return builder.load(builder.gep(first, [at]))

        return types.float64(array, row, lane), lower

    @intrinsic
    def any_less(typing: Any, x: Any, y: Any):
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            each = zip(args, (x, y), strict=True)
            low = builder.fcmp_unordered("<", *(convert(context, builder, v, k) for v, k in each))
            bits = builder.bitcast(low, ir.IntType(LANES))
            return builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))

        return types.boolean(x, y), lower

    @intrinsic
    def totals(typing: Any, array: Any, row: Any):
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            first, whole = place(context, builder, sig, args), []
            for k in range(LANES):
                at = builder.gep(first, [ir.IntType(64)(k)])
                whole.append(builder.load(at, align=8))
            width = 1  # of what two neighbouring rows are merged by
            while len(whole) > 1:
                whole = [both(builder, a, b, width) for a, b in pairwise(whole)]
                width *= 2
            return whole[0]

        return lanes(array, row), lower

    def pairwise(rows: list[Any]) -> Any:
        return zip(rows[::2], rows[1::2], strict=True)

    def both(builder: Any, a: Any, b: Any, width: int) -> Any:
        """Sums of neighbours in a and in b, `width` of a and as many of b in turns."""
        places = [k for k in range(LANES) if not k & width]
        first = [
            k for at in places[::width] for j in (0, LANES) for k in range(at + j, at + j + width)
        ]
        kind, i32 = ir.VectorType(ir.IntType(32), LANES), ir.IntType(32)
        low, high = (
            builder.shuffle_vector(a, b, kind([i32(k + more) for k in first]))
            for more in (0, width)
        )
        return builder.fadd(low, high)

    def power_of_two(builder: Any, k: Any) -> Any:
        whole = ir.VectorType(ir.IntType(64), LANES)
        digits = builder.bitcast(builder.fadd(k, vector([1.5 * 2.0**52] * LANES)), whole)
        moved = builder.shl(digits, whole([52] * LANES))
        return builder.bitcast(builder.add(moved, whole([1023 << 52] * LANES)), vector)

    def where_less(builder: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered("<", a, b), x, y)

    def fused(builder: Any, x: Any, y: Any, z: Any) -> Any:
        return call(builder, "fma", x, y, z)

    def magnitude(builder: Any, x: Any) -> Any:
        return call(builder, "fabs", x)

    def nearest(builder: Any, x: Any) -> Any:
        return call(builder, "rint", x)

    found = {each.__name__: operation(each) for each in (power_of_two, where_less, fused)}
    found |= {each.__name__: operation(each) for each in (magnitude, nearest)}
    found |= {"load": load, "store": store, "any_less": any_less, "totals": totals}
    return {**found, "put": put, "get": get}
