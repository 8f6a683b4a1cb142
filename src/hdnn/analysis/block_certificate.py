"""Whether layers of any modules keep what they promise: det = 1, and so norm(dy_N/dy_j) >= 1.

Derivatives are taken of what the blocks compute, and not of what they are supposed to be. Where
samples do not depend on each other, each has a matrix of its own; where they do (the nodes of a
graph, batch statistics), all of them are one state. Small states have their whole matrices made,
with determinants and the symplectic defect. Large ones are multiplied by vectors: Lanczos finds
their largest singular values, and by undoing the layers the smallest. What counts as rounding is
that of the coarsest dtype that modules compute in, whatever they are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hdnn.analysis.block_calls import Precision, StateCall, same, why_not_blocks
from hdnn.analysis.certificate import NUMBERS, Certificate, compared, guarantee
from hdnn.analysis.copies import copied, exact
from hdnn.analysis.derivatives import layer_derivatives
from hdnn.analysis.extremes import extremes_of
from hdnn.analysis.linear import passes_on
from hdnn.analysis.measured import HIDDEN, Defects, Measured, at_least_1, scaled
from hdnn.analysis.sensitivity import norms
from hdnn.errors import DataError, HDNNError
from hdnn.networks.blocks import Reversible

DENSE = 128  # entries of a state up to which its matrices are made
FEW = 3  # samples that are looked at otherwise, and
LAYERS = 5  # of so many layers at the most
STEPS = 6  # of Lanczos; if they find a norm below 1, take
MORE = 40


@torch.inference_mode(False)  # there would be no derivatives
@torch.no_grad()
def block_certificate(net: Any, call: StateCall, *, samples: int, points: str) -> Certificate:
    """The certificate of a block or a stack of blocks at what it is called with.

    In evaluation mode and in float64. The promise holds in training too, where dropout has drawn
    and batch statistics are taken: those are no more than other functions F.
    """
    if not bool(call.y.isfinite().all()):
        raise DataError("y has NaN or infinite values; remove or replace them.")
    call = call.mapped(lambda x: x.clone() if x.is_inference() else x)
    promise = guarantee(net)
    own = _tried(lambda: _in_own_dtype(net, call), "at these states")
    twin: Any = exact(net).eval().requires_grad_(False)
    if isinstance(twin, Reversible):  # as its blocks are: the same numbers, bit for bit
        twin.backprop, twin.state = "stored", "float"
    seen = _tried(lambda: _measured(twin, call.mapped(_exact), promise.holds, samples))
    lost = ~own.isfinite().flatten().all()[None].expand(seen.norms.shape[1])
    if seen.joined:
        points += f", as one state of {seen.features} entries: its samples depend on each other"
    if seen.by_lanczos:
        points += ", norms by Lanczos from below"
    if seen.precision.dtype != torch.float64:
        points += f", computed in {seen.precision.name} inside"
    found = compared(net.form(), promise, seen, lost.cpu(), dtype=own.dtype, points=points)
    return replace(
        found,
        linear=seen.idle,
        idle=seen.idle,
        log_determinant=seen.log_det,
        volume=seen.volume,
        smallest_singular_value=seen.least,
    )


def _tried(function: Callable[[], Any], where: str = "in float64") -> Any:
    try:
        return function()
    except HDNNError:
        raise
    except Exception as error:  # whatever a module of somebody else may raise
        why = str(error).partition("\n")[0]
        raise DataError(f"it does not run {where} ({type(error).__name__}: {why}).") from error


def _measured(twin: Any, call: StateCall, promised: bool, samples: int) -> MeasuredBlocks:
    with sdpa_kernel(SDPBackend.MATH):  # as in the derivatives of the blocks
        count = min(samples, _room(twin, call.y[0].numel())) if call.y.ndim else 1
        if _axis(twin, call.y) > 0 and len(call.y) > count:
            call = _fewer(twin, call, _spread(len(call.y) - 1, count)) or call
        return MeasuredBlocks(twin, call, promised=promised, samples=samples)


def _in_own_dtype(net: nn.Module, call: StateCall) -> Tensor:
    """y_N, also if the state comes in another dtype than the weights.

    First without a graph, which takes memory, but hooks may need one.
    """
    twin, weight = copied(net).eval(), next(net.parameters(), call.y)
    try:
        return call.on(twin, grad=False)
    except RuntimeError:
        pass
    try:
        return call.on(twin)
    except RuntimeError:
        return call.mapped(lambda x: x.to(weight) if x.is_floating_point() else x).on(twin)


def _exact(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64 if x.is_floating_point() else None)


def _fewer(net: Any, call: StateCall, some: Tensor) -> StateCall | None:
    """Some samples alone, if what becomes of them does not depend on the others."""
    wanted = call.on(net)[some]
    for also in (False, True):
        fewer = call.rows(some, also=also)
        try:
            found = fewer.on(net)
        except Exception:  # a mask, for instance, that does not fit
            continue
        if found.shape == wanted.shape and same(found, wanted):
            return fewer
    return None


def _spread(last: int, count: int) -> Tensor:
    """Whole numbers from 0 to the last, no more than so many."""
    return torch.linspace(0, last, min(count, last + 1)).round().long()


def _room(net: Any, n: int) -> int:
    """How many samples of n entries are looked at."""
    if n > DENSE:
        return FEW
    depth = len(net) if hasattr(net, "__len__") else 1
    return max(1, NUMBERS // ((depth + 1) * n * n))


def _axis(net: Any, y: Tensor) -> int:
    return net.dim % y.ndim if -y.ndim <= net.dim < y.ndim else 0


class MeasuredBlocks(Measured):
    """Norms, determinants and symplecticity of blocks, or of a stack, where it was called."""

    idle: bool | None = None
    log_det: float | None = None
    volume: bool | None = None
    least: float | None = None  # the smallest singular value of all
    missed = 0.0

    def __init__(self, net: Any, call: StateCall, *, promised: bool, samples: int) -> None:
        y, self.promised, self.net = call.y, promised, net
        self.chain = layer_derivatives(net, y, *call.args, **call.options)
        self.depth, axis = len(self.chain), _axis(net, y)
        if not self.depth:
            raise DataError("it has no blocks, so there is nothing to certify.")
        self.precision = Precision.of(net, call)
        self.eps = self.precision.eps
        states = [y, *(M.out for M in self.chain)]
        fine = torch.stack([s.isfinite().flatten(1).all(1) for s in map(_rows, states)])
        apart = axis > 0 and bool(fine.all()) and _independent(self.chain, y)
        self.joined = not apart and axis > 0 and len(y) > 1
        count = min(len(y), samples, _room(net, y[0].numel())) if apart else 1
        self.some = _spread(len(y) - 1, count) if apart else None
        self.features = y[0].numel() if apart else y.numel()
        self.by_lanczos = self.features > DENSE
        self.layers = range(self.depth)
        if self.by_lanczos:
            self.layers = _spread(self.depth - 1, LAYERS).tolist()
        self.norms = torch.full((len(self.layers) + 1, count), torch.nan, dtype=torch.float64)
        self.norms[-1] = 1.0
        self.why = self._why_not(call, states, fine)
        if self.why:
            return
        self._p, self._q = self._halves(y, axis)
        if self.by_lanczos:
            self._by_products(call)
        else:
            self._by_matrices(y)
        if not bool(self.norms.isfinite().all()):
            self.why = "a derivative is not finite"
            return
        self.idle = passes_on(states[0], states[-1], self.norms[:-1]) if apart else None

    def _why_not(self, call: StateCall, states: list[Tensor], fine: Tensor) -> str:
        if not bool(fine.all()):
            j = int((~fine.all(1)).nonzero()[0])
            kind = "NaN" if bool(states[j].isnan().any()) else "infinite"
            return f"the state y_{j} is {kind}"
        return why_not_blocks(self.net, call, self.chain, self.precision)

    def _halves(self, y: Tensor, axis: int) -> Sequence[Tensor]:
        """The places of p and of q in a flat state, or in a flat sample."""
        one = y if self.some is None else y[:1]
        places = torch.arange(one.numel()).view(one.shape).chunk(2, axis)
        return [half.reshape(-1) for half in places]

    # Small states

    def _by_matrices(self, y: Tensor) -> None:
        """All matrices: one pass back, as in `MeasuredNetwork`."""
        n, B = self.features, self.norms.shape[1]
        eye = torch.eye(n, dtype=y.dtype)
        (P, e), (Q, f) = ((eye.repeat(B, 1, 1), eye.new_zeros(B)) for _ in range(2))
        J, log_det, allowed = self._canonical(eye), eye.new_zeros(B), eye.new_zeros(B)
        defects = Defects(J, B, self.eps, power=1)
        worst, hidden, broken = 0.0, False, False
        least, self._lost = eye.new_ones(B), eye.new_zeros(B)
        for j in range(self.depth - 1, -1, -1):
            M = self._matrix(j, y)
            undone = torch.linalg.inv_ex(M).inverse
            (P, e), (Q, f) = scaled(M @ P, e), scaled(Q @ undone, f)
            if not bool(P.isfinite().all()):
                return
            largest, smallest = norms(P), torch.exp2(-f) / norms(Q)  # 0 if it cannot be undone
            self.norms[j] = largest * torch.exp2(e)
            least = torch.minimum(least, smallest)
            cond = (norms(M) * norms(undone)).where(norms(M @ undone - eye) < HIDDEN, torch.inf)
            self._lost = self._lost + cond * self.norms[j] / smallest
            defects.see(P, e, largest, cond, torch.ones(B, dtype=torch.bool))
            log_det = log_det + torch.linalg.slogdet(M).logabsdet
            allowed = allowed + 8 * n * self.eps * cond
            worst = max(worst, float(log_det.abs().max()))
            hidden = hidden or bool((allowed > HIDDEN).any())
            broken = broken or not bool((log_det.abs() <= allowed).all())
        self.log_det, self.least = worst, float(least.min()) or None
        if self._known:
            self.volume = False if broken else None if hidden else True
        if self.net.symplectic:
            self.defect = defects.worst
            self.symplectic = defects.symplectic if self._known else None

    def _matrix(self, j: int, y: Tensor) -> Tensor:
        """dy_{j+1}/dy_j of all samples, or of the whole state, in denominator layout: (B, n, n)."""
        n = self.features
        rows = []
        for k in range(n):
            u = torch.zeros(y.numel() // n, n, dtype=y.dtype)
            u[:, k] = 1.0
            rows.append(self.chain[j].backwards(u.view(y.shape)).reshape(-1, n))
        found = torch.stack(rows, -1)
        return found if self.some is None else found[self.some]

    def _canonical(self, eye: Tensor) -> Tensor:
        """J = [[0, -I], [I, 0]] for the places of p and q."""
        J = torch.zeros_like(eye)
        J[self._p, self._q], J[self._q, self._p] = -1.0, 1.0
        return J

    # Large states

    def _by_products(self, call: StateCall) -> None:
        chains, like = [self.chain], call.y[None]
        if self.some is not None:
            chains, like = [self._alone(call, i) for i in self.some], call.y[self.some]
        how: dict[str, Any] = {"layers": self.layers, "dense": 0, "seed": 0, "undo": True}
        found = extremes_of(chains, like, steps=STEPS, **how)
        if self.promised and bool((found.largest < 1).any()):
            found = extremes_of(chains, like, steps=MORE, **how)
        self.norms[:-1] = found.largest
        self.missed = float(found.largest_missed.min())
        self.least = float(found.smallest.min())
        if not (self.net.symplectic and bool(found.largest.isfinite().all())):
            return
        defects = [
            self._defect(chain[j:], like[:1], float(found.largest[row, i]))
            for i, chain in enumerate(chains)
            for row, j in enumerate(self.layers)
        ]
        self.defect = max(defects)
        allowed = self._rounding
        if self._known:
            self.symplectic = None if allowed > HIDDEN else self.defect <= allowed

    @property
    def _known(self) -> bool:
        """Whether something is promised that rounding cannot hide altogether."""
        return self.promised and not self.precision.coarse

    @property
    def _rounding(self) -> float:
        """Of products with all layers, one after the other."""
        return 8 * (math.sqrt(self.features) + self.depth) * self.eps

    def _alone(self, call: StateCall, i: Tensor) -> Sequence[Any]:
        """The derivatives at one sample: computed alone, if that is possible."""
        one = _fewer(self.net, call, i[None])
        if one is None:
            return [_Sample(M, int(i), call.y) for M in self.chain]
        return layer_derivatives(self.net, one.y, *one.args, **one.options)

    def _defect(self, chain: Sequence[Any], like: Tensor, norm: float) -> float:
        """|Phi^T J Phi u - J u| for a random u of norm 1, relative to norm(Phi)^2."""
        u = torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(1))
        u = v = u / u.norm()
        for M in reversed(chain):
            v = M.backwards(v)
        v = self._turned(v)
        for M in chain:
            v = M.forwards(v)
        return float((v.reshape(-1) - self._turned(u).reshape(-1)).norm()) / max(1.0, norm**2)

    def _turned(self, v: Tensor) -> Tensor:
        """J v."""
        flat = v.reshape(-1)
        turned = torch.empty_like(flat)
        turned[self._p], turned[self._q] = -flat[self._q], flat[self._p]
        return turned.view(v.shape)

    def judged(self, norm: float) -> tuple[bool | None, str]:
        if self.precision.coarse:
            return None, f"its modules compute in {self.precision.name}, which rounds too much"
        if not self.by_lanczos:
            slack = float((8 * self.features * self.eps * (1 + self._lost)).max())
            return at_least_1(norm, 0.0 if norm >= 1 else slack)
        slack = max(1e-9, self._rounding)
        holds, doubt = at_least_1(norm, slack)
        if holds is False and norm >= (1 - slack) * (1 - self.missed):
            return None, f"{MORE} steps of Lanczos see a norm of {norm:.6g} only"
        return holds, doubt


class _Sample:
    """The derivative of one sample among others, which do not depend on it nor it on them."""

    def __init__(self, M: Any, i: int, y: Tensor) -> None:
        self.M, self.i, self.y = M, i, y
        self.symplectic, self.tolerance = M.symplectic, M.tolerance

    def _of(self, product: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
        among = torch.zeros_like(self.y)
        among[self.i] = v.reshape(self.y.shape[1:])
        return product(among)[self.i][None]

    def forwards(self, v: Tensor) -> Tensor:
        return self._of(self.M.forwards, v)

    def backwards(self, u: Tensor) -> Tensor:
        return self._of(self.M.backwards, u)

    def undo(self, v: Tensor) -> Tensor:
        return self._of(self.M.undo, v)

    def undo_backwards(self, u: Tensor) -> Tensor:
        return self._of(self.M.undo_backwards, u)


def _rows(y: Tensor) -> Tensor:
    return y.reshape(len(y), -1) if y.ndim > 1 else y.reshape(1, -1)


def _independent(chain: Sequence[Any], y: Tensor) -> bool:
    """Whether no sample has a derivative by another one.

    Any two samples differ in a bit of their numbers: vectors that are 0 where a bit is, and where
    it is not, must stay so.
    """
    generator = torch.Generator().manual_seed(2)
    for inside in _groups(len(y)):
        v = torch.randn(y.shape, dtype=y.dtype, generator=generator)
        v[~inside] = 0.0
        for M in reversed(chain):
            v = M.backwards(v)
        if bool((v[~inside] != 0).any()):
            return False
    return True


def _groups(count: int) -> Iterator[Tensor]:
    numbers = torch.arange(count)
    for bit in range((count - 1).bit_length()):
        chosen = (numbers >> bit & 1).bool()
        yield chosen
        yield ~chosen
