"""The matrix products of a wide stack's step, each with what is done with its result.

There are three kinds: from a state to hidden units, `inner`; from a gradient to hidden units,
`slope`; and from hidden units to what moves, `move`. In `SeparateSteps` cuBLAS multiplies, and
another pass over memory does the rest (`pointwise.py`). In `JoinedSteps`, for bf16, a product ends
in that rest (`joined.py`), so that its result is never written and read again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hdnn.engine.kernels import joined
from hdnn.engine.kernels.factors import has_wide_products
from hdnn.engine.kernels.pointwise import ROWS, Pointwise
from hdnn.engine.kernels.protocol import Stack


class StepWeights(NamedTuple):
    """Of the steps that move a part, one of each kind a layer. V is None where it is the identity.

    Transposed ones are views, of memory in the order that products read fastest.
    """

    K: Tensor
    b: Tensor
    V: Tensor | None
    K_T: Tensor
    V_T: Tensor | None


class SeparateSteps:
    """Products by cuBLAS, the rest by one more pass."""

    tile = ROWS
    """Samples whose gradients of a bias are summed at once."""

    def __init__(self, stack: Stack, precision: str) -> None:
        self.pointwise = Pointwise(stack.activation, precision, stack.learned)

    def inner(
        self, x: Tensor, of: StepWeights, j: int, a: Tensor, z: Tensor | None, c: Tensor
    ) -> None:
        """A = x K^T + b and, if it is asked for, z = c sigma(a)."""
        torch.addmm(of.b[j], x, of.K[j].mT, out=a)
        if z is not None:
            self.pointwise.value(a, z, c)

    def slope(
        self,
        g: Tensor,
        of: StepWeights,
        j: int,
        a: Tensor,
        to: tuple[Tensor, Tensor, Tensor],
        c: Tensor,
        sums: Tensor,
        dots: Tensor,
    ) -> None:
        """u = c (g V^T) sigma'(a), which is written twice unless both are one, and z = c sigma(a).

        With the sums of u over tiles of samples, and those of (g V^T) sigma(a).
        """
        w = g if of.V is None else torch.mm(g, of.V[j].mT, out=to[0])
        self.pointwise.slope(a, w, to, c, sums, dots)

    def move(
        self, now: Tensor, z: Tensor, W_T: Tensor | None, to: Tensor | None, sign: int
    ) -> None:
        """`now` += sign z W, also rounded where it goes `to`, if anywhere."""
        if W_T is None:
            now.add_(z, alpha=sign)
        elif z.dtype == now.dtype:
            now.addmm_(z, W_T.mT, alpha=sign)
        elif has_wide_products(now):
            torch.addmm(now, z, W_T.mT, out_dtype=now.dtype, alpha=sign, out=now)
        else:
            now.add_(z @ W_T.mT, alpha=sign)
        if to is not None:
            to.copy_(now)

    def dots(self, r: int) -> int:
        """Parts of the gradient of c for each tile of samples."""
        return self.pointwise.dots(r)


class JoinedSteps(SeparateSteps):
    """In bf16: products that end in the rest of their step."""

    tile = joined.ROWS

    def __init__(self, stack: Stack, precision: str) -> None:
        super().__init__(stack, precision)
        self.kernel = joined.Joined(stack.activation, stack.learned)

    def inner(
        self, x: Tensor, of: StepWeights, j: int, a: Tensor, z: Tensor | None, c: Tensor
    ) -> None:
        self.kernel.inner(x, of.K[j], of.b[j], a, z, c)

    def slope(
        self,
        g: Tensor,
        of: StepWeights,
        j: int,
        a: Tensor,
        to: Any,
        c: Tensor,
        sums: Any,
        dots: Any,
    ) -> None:
        assert of.V is not None
        self.kernel.slope(g, of.V[j], a, to[1], to[2], c, sums, dots)

    def move(
        self, now: Tensor, z: Tensor, W_T: Tensor | None, to: Tensor | None, sign: int
    ) -> None:
        if W_T is None or to is None:
            super().move(now, z, W_T, to, sign)
        else:
            self.kernel.move(now, z, W_T.mT, to, sign)

    def dots(self, r: int) -> int:
        return self.kernel.dots(r)
