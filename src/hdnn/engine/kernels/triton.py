"""Whole stacks of layers as one Triton kernel: states in registers, weights streamed.

A program takes a tile of samples through all layers. A splitting scheme (H2, MS1, MS3, Verlet,
Yoshida) is a schedule of shears `target += coef * sigma(source K^T + b) V`; each can be undone, so
the backward kernel can start from y_N and reconstruct every state on its way back. Forward Euler
(H1, MS2) is a schedule of steps whose source and target are the same y. They cannot be undone, so
the backward kernel reads the stored states.

A shear with r hidden units is the sum of shears with some of the units each, with the same source
and target: kernels loop over (shear, block of rows of K), so r has no limit and K takes no more
registers than one block.

There are three ways to run a stack (`tilings.py` says which one is taken):

- "warps" (`warps.py`): narrow stacks whose halves take turns, in tf32 or bf16;
- "packed" (`packed.py`): wide layers, whose weights are packed beforehand;
- "blocks" (`stacks.py`): all others.

The gradients of weights are sums over all samples. A narrow stack's backward kernel adds them up
tile by tile, by atomics. That of a wide stack, and any in the deterministic mode, *emits* their
factors instead: each step leaves behind the rows of u = c sigma'(a) t and of c z (left), and those
of its source and of g, the gradient of z V (right). A second kernel (`sums.py`) multiplies
left^T right, for some layers at a time. That needs no atomics, and leaves more registers to the
chain of layers.

A kernel is chosen, split into tiles and compiled once for a stack (`_Recipe`). Later calls only
allocate what they return and launch it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdnn.engine.kernels import compiling, packed, stacks, tilings, warps
from hdnn.engine.kernels.factors import for_weights
from hdnn.engine.kernels.gradients import Factors, Gradients, Sums
from hdnn.engine.kernels.launching import Launch
from hdnn.engine.kernels.protocol import Stack, Tensors, schedule

MAX_WIDTH = 256
"""The widest state y, in features."""

FRAGMENT_BYTES = 4 * 2**20
"""Memory for the weights of so many steps at a time, as the lanes of warps take them."""


class _Recipe:
    """A stack's kernel with the tiling for its sizes: made once, and then called many times.

    `keep`: states are written forwards, or read backwards.
    """

    def __init__(
        self, stack: Stack, precision: str, deterministic: bool, backward: bool, keep: bool
    ) -> None:
        compiling.load()
        way, (BT, BR, count, stages) = tilings.tiling(
            stack, precision, deterministic=deterministic, backward=backward
        )
        width, kind, BM = stack.width, stack.kind, tilings.padded(stack.width)
        sizes = (stack.width, stack.rows[0], stack.rows[-1])
        if kind == "identity" and (way == "packed" or BM > 128):
            kind = "unit"  # z in blocks, times a unit matrix
        elif kind == "identity":
            BR = BM
        self.tiles, self.blocks = -(-stack.samples // BT), -(-max(stack.rows) // BR)
        padding = "halves" if kind == "canonical" else "end"
        if width == BM:
            full = all(each == self.blocks * BR for each in stack.rows)
            padding = "none" if full else "end"
        emit = backward and (deterministic or way == "packed")
        interpreted = compiling.interpreted()
        weights = for_weights(precision, stack)
        if interpreted:  # it cannot multiply bf16, and cuts off what it should round
            weights = "ieee" if precision == "tf32" else precision
            if precision == "bf16":
                precision = weights = "emulated"
        constants = {
            "ACT": stack.activation,
            "KIND": kind,
            "PREC": precision,
            "WPREC": weights,
            "FAST": precision in ("tf32", "bf16") and not interpreted,  # with inline assembly
            "PAD": padding,
            "EULER": not stack.turns,
            # The kernel has a faster loop if p and q alternate.
            "ALT": sorted(stack.turns) == [0, 1] and self.blocks == 1,
            "KEEP": keep,
            "EMIT": emit,
            "STEP": stack.learned,
            "RB": self.blocks,
            "BT": BT,
            "BM": BM,
            "BR": BR,
        }
        self.backward, self.kind = backward, kind
        self.gradients = Gradients(stack)
        self.factors = Factors(stack, weights, kind, self.gradients) if emit else None
        self.sums = Sums(stack, constants, self.gradients) if way == "warps" else None
        self.packing = None if way == "blocks" else PACKINGS[way](stack, sizes, constants)
        self.spans = [(0, stack.steps)] if self.packing is None else self.packing.spans()
        kernel: Any = getattr(*KERNELS[way][backward])
        if way == "warps" or (way == "packed" and not backward):
            sizes = sizes[:1]
        elif way == "blocks" and backward:
            sizes = (*sizes, self.gradients.starts[-1])
        options = {"num_warps": count, "num_stages": stages}
        self._launch = Launch(kernel, stack, sizes, constants, **options)

    def prepared(self, tensors: tuple[Tensor, ...], low: int, high: int) -> tuple[Tensor, ...]:
        """The weights, the schedule and c of some steps, as the kernel takes them."""
        if self.packing is None:
            return tensors
        return self.packing(tensors, self.backward, low, high)

    def launch(self, tensors: tuple[Tensor, ...], *span: int) -> None:
        """Run the kernel over a number of steps, or from one step to another."""
        self._launch((self.tiles, 1, 1), tensors, *span)


KERNELS = {  # forwards and backwards
    "blocks": ((stacks, "forward_kernel"), (stacks, "backward_kernel")),
    "packed": ((packed, "packed_forward_kernel"), (packed, "packed_backward_kernel")),
    "warps": ((warps, "warp_forward_kernel"), (warps, "warp_backward_kernel")),
}


def _from(step: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors with a number for each step, from a step on."""
    return tuple(t[step:] for t in tensors) if step else tensors


class _Packing:
    """The weights of a stack, block by block in the order of the steps."""

    def __init__(self, stack: Stack, sizes: tuple[int, ...], constants: dict[str, Any]) -> None:
        RB, BM, BR = constants["RB"], constants["BM"], constants["BR"]
        self.steps, self.blocks, self.rows, self.width = stack.steps, stack.steps * RB, BR, BM
        self.same = constants["KIND"] == "same"
        self.dtype = torch.bfloat16 if constants["PREC"] == "bf16" else torch.float32
        self._launch = Launch(
            self._kernel(), stack, sizes, constants, num_warps=self.WARPS, num_stages=1
        )

    WARPS = 4

    def _kernel(self) -> Any:
        return packed.pack_kernel

    def spans(self) -> list[tuple[int, int]]:
        """From which step to which weights are packed at once."""
        return [(0, self.steps)]

    def __call__(
        self, tensors: tuple[Tensor, ...], backward: bool, low: int, high: int
    ) -> tuple[Tensor, ...]:
        """K and V, each in rows and in columns, b, the halves that move, and c."""
        *_, half, _, c = tensors
        K, bias = self._matrices(c, self.blocks), c.new_empty(self.blocks * self.rows)
        V = K if self.same else self._matrices(c, self.blocks)
        self._launch((self.blocks, 1, 1), (*tensors, *K, *V, bias))
        return (*K, *V, bias, half, c) if backward else (K[0], V[1], bias, half, c)

    def _matrices(self, like: Tensor, count: int) -> tuple[Tensor, Tensor]:
        size = count * self.rows * self.width
        rows, columns = (like.new_empty(size, dtype=self.dtype) for _ in range(2))
        return rows, columns


class _Fragments(_Packing):
    """The same as the lanes of a warp take them, for some steps at a time."""

    WARPS = 1

    def _kernel(self) -> Any:
        return warps.fragment_kernel

    def spans(self) -> list[tuple[int, int]]:
        one = 2 * self.rows * self.width * self.dtype.itemsize
        size = max(1, FRAGMENT_BYTES // one // 32) * 32  # so that parts of the schedule are aligned
        return [(low, min(low + size, self.steps)) for low in range(0, self.steps, size)]

    def __call__(
        self, tensors: tuple[Tensor, ...], backward: bool, low: int, high: int
    ) -> tuple[Tensor, ...]:
        """K and c K^T, b, and the halves that move."""
        *weights, half, layer, c = tensors
        half, *others = _from(low, half, layer, c)
        K, bias = self._matrices(c, high - low), c.new_empty((high - low) * self.rows)
        self._launch((high - low, 1, 1), (*weights, half, *others, *K, bias))
        return (*K, bias, half)


PACKINGS = {"packed": _Packing, "warps": _Fragments}


class TritonEuler:
    """A stack as one kernel each way; each is prepared when it is first needed.

    `deterministic` adds up in a fixed order, without atomics. Gradients are float32 and contiguous.
    """

    def __init__(self, stack: Stack, precision: str = "tf32", deterministic: bool = False) -> None:
        self.stack, self.how = stack, (precision, deterministic)
        self.schedule = schedule(stack.turns or (0,), stack.layers, stack.inverse, stack.device)
        self._recipes: dict[tuple[bool, bool], _Recipe] = {}

    def _recipe(self, backward: bool, keep: bool) -> _Recipe:
        found = self._recipes.get((backward, keep))
        if found is None:
            found = self._recipes[backward, keep] = _Recipe(self.stack, *self.how, backward, keep)
        return found

    def forward(self, y: Tensor, tensors: Tensors, keep: bool) -> tuple[Tensor, Tensor | None]:
        kept = y.new_empty(self.kept_size(self.stack)) if keep else None
        if self._empty:
            return y.clone(), kept
        out = torch.empty_like(y)
        recipe = self._recipe(False, keep)
        weights = self._weights(recipe, tensors)
        for low, high in recipe.spans:
            states = (y, out, out if kept is None else self._from_step(low, kept))
            recipe.launch((*states, *recipe.prepared(weights, low, high)), high - low)
            y = out
        return out, kept

    def backward(self, kept: Tensor, g: Tensor, tensors: Tensors) -> Tensors:
        return self._gradients(kept, g, tensors, keep=True)[1]

    def _gradients(
        self, start: Tensor, g: Tensor, tensors: Tensors, *, keep: bool
    ) -> tuple[Tensor | None, Tensors]:
        """From what was kept, or from y_N: then the shears are undone, down to y_0."""
        recipe = self._recipe(True, keep)
        gradients, factors = recipe.gradients, recipe.factors
        copy = torch.clone if self._empty else torch.empty_like
        y_0, g_0 = None if keep else copy(start), copy(g)
        end = (g_0 if y_0 is None else y_0, g_0)
        parts = 1 if factors is None else factors.parts
        overwrite = recipe.sums is not None and not self._empty
        buffer = (g.new_empty if overwrite else g.new_zeros)(parts, gradients.size)
        parts_of_c = None
        if not self._empty:
            weights, states = self._weights(recipe, tensors), (start, g, *end)
            if factors is not None:
                parts_of_c = self._multiply(recipe, factors, states, weights, buffer)
            elif recipe.sums is not None:
                self._add_up(recipe, recipe.sums, states, weights, buffer[0])
            else:  # by a kernel that could emit, too
                dK, *others = gradients.targets(buffer[0])
                recipe.launch((*states, *weights, dK, *others, dK, dK), 0, self.stack.steps)
        *found, d_coef = gradients.of(buffer[0] if parts == 1 else buffer.sum(0))
        if parts_of_c is not None and d_coef is not None:
            torch.sum(parts_of_c, 1, out=d_coef)
        return y_0, (g_0, *found, d_coef)

    def _add_up(
        self,
        recipe: _Recipe,
        sums: Sums,
        states: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        buffer: Tensor,
    ) -> None:
        """Run a kernel that adds up weight gradients, for some steps at a time."""
        dK, db, _, dc = recipe.gradients.targets(buffer)
        if self.stack.learned:
            dc.zero_()
        start, g, y_0, g_0 = states
        for low, high in reversed(recipe.spans):
            given = (self._from_step(low, start) if y_0 is g_0 else start, g, y_0, g_0)
            prepared, found = recipe.prepared(weights, low, high), sums.new(buffer, high - low)
            recipe.launch((*given, *prepared, *found, *_from(low, dc)), high - low)
            sums.unfold(found, (*_from(low, *weights[-3:]), dK, db), high - low)
            start, g = start if y_0 is g_0 else y_0, g_0

    def _multiply(
        self,
        recipe: _Recipe,
        factors: Factors,
        states: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        buffer: Tensor,
    ) -> Tensor:
        """Run a kernel that emits factors, and multiply those; the parts of dc by step."""
        *targets, _ = recipe.gradients.targets(buffer)
        left, right = factors.new(buffer)
        dc = buffer.new_empty(self.stack.steps, recipe.tiles * recipe.blocks)
        unused = targets if recipe.packing is None else []  # by a kernel that could add, too
        start, g, y_0, g_0 = states
        weights = recipe.prepared(weights, 0, self.stack.steps)
        for low, high in factors.spans():
            given = (start, g, y_0, g_0, *weights, *unused, dc, left, right)
            recipe.launch(given, low, high)
            factors.multiply((left, right, *targets, *self.schedule), low, high)
            start, g = start if y_0 is g_0 else y_0, g_0
        return dc

    def _from_step(self, step: int, kept: Tensor) -> Tensor:
        """What is kept of the states, from a step on."""
        return kept[step * self.stack.samples * self.stack.width :] if step else kept

    @property
    def _empty(self) -> bool:
        return self.stack.samples == 0 or self.stack.steps == 0

    def _weights(self, recipe: _Recipe, tensors: Tensors) -> tuple[Tensor, ...]:
        """K, b and V of p and of q, the schedule and c, as kernels take them."""
        *weights, c = tensors
        each = len(self.stack.rows)
        K, b, V = weights[:each], weights[each : 2 * each], weights[2 * each :]
        if recipe.kind == "unit":
            V = [torch.eye(self.stack.width, dtype=c.dtype, device=c.device)]
        elif V[0] is None:
            V = K
        return K[0], K[-1], b[0], b[-1], V[0], V[-1], *self.schedule, c

    @staticmethod
    def kept_size(stack: Stack, precision: str = "") -> int:
        return stack.steps * stack.samples * stack.width

    @staticmethod
    def why_not(dtype: torch.dtype, features: int) -> str:
        """Why no kernel takes such states, or empty; half precision is converted to float32."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the GPU kernel is for float32 and half precision, not {dtype}"
        if features > MAX_WIDTH:
            return f"the GPU kernel is for up to {MAX_WIDTH} features, not {features}"
        return ""


class TritonShears(TritonEuler):
    """The same for a shear stack, which can also be undone."""

    def undo(self, y_N: Tensor, g: Tensor, tensors: Tensors) -> tuple[Tensor, Tensors]:
        y_0, gradients = self._gradients(y_N, g, tensors, keep=False)
        assert y_0 is not None
        return y_0, gradients
