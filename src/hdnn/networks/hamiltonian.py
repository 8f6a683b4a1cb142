"""Hamiltonian networks: one field, J K^T sigma(K y + b), and a choice of how to step through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdnn import functional, interconnection
from hdnn.base.shapes import check_tolerance
from hdnn.errors import OptionError, ShapeError, SparsityError, choose, flag, positive_int
from hdnn.integrators import implicit, splitting
from hdnn.networks import jacobians
from hdnn.networks.base import ODENetwork
from hdnn.networks.hooks import refresh
from hdnn.networks.initial import Initial
from hdnn.networks.jacobians import ShearLayers
from hdnn.networks.promise import ALWAYS, SYMPLECTIC, Guarantee, forward_euler
from hdnn.operators import block_sparse, dense
from hdnn.sparsity import Sparsity


@dataclass(frozen=True)
class Scheme:
    """How a layer steps, and what it needs of K and J."""

    function: Callable[..., Tensor]
    layout: Literal["split", "full"]  # K = diag(K_p, K_q), or any K
    interconnection: Literal["X", "J"]  # J = [[0, -X^T], [X, 0]], or any skew J
    order: int
    symplectic: bool = True
    invertible: bool = True
    implicit: bool = False
    shears: tuple[splitting.Shear, ...] = ()


def _splitting(shears: tuple[splitting.Shear, ...], order: int) -> Scheme:
    return Scheme(partial(functional.split, shears=shears), "split", "X", order, shears=shears)


SCHEMES: dict[str, Scheme] = {
    "forward_euler": Scheme(functional.h1, "full", "J", 1, symplectic=False, invertible=False),
    "semi_implicit_euler": _splitting(splitting.SEMI_IMPLICIT_EULER, 1),
    "semi_implicit_euler_full": Scheme(functional.implicit_h2, "full", "X", 1, implicit=True),
    "verlet": _splitting(splitting.VERLET, 2),
    "yoshida4": _splitting(splitting.YOSHIDA4, 4),
    "midpoint": Scheme(functional.midpoint, "full", "J", 2, implicit=True),
}


class HamiltonianNet(ODENetwork):
    """N steps of y' = J K^T sigma(K y + b) by any integrator.

    Integrators with a block-diagonal K (`K_p, K_q, b_p, b_q`, explicit): "semi_implicit_euler"
    (H2), "verlet", "yoshida4". With a full K (`K, b`): "forward_euler" (H1), and the implicit
    "semi_implicit_euler_full" (ImplicitH2) and "midpoint". J comes from `X` ((m, m) or a layer's
    own, (N, m, m)), or for "forward_euler" and "midpoint" is any skew-symmetric `J`.

    `step` is h (a float or one a layer); or give `T` and h = T/N; by default T = 2.4.
    `init="paper"` draws N(0, 1), "scaled" draws K from N(0, 1/n) with b = 0.
    `tied=True` gives all layers the same weights. `sparsity` makes K (and X or J) block-sparse.
    `engine` and `backprop` say how an explicit stack runs, never what it computes: `hdnn.engine`.
    `tol` and `max_iter` are for the Newton iterations of implicit integrators, which compile,
    export and vmap as one operator, `hdnn::solve_implicit`, but cannot be exported to ONNX.
    """

    def __init__(
        self,
        features: int,
        layers: int,
        integrator: str = "semi_implicit_euler",
        *,
        step: float | Sequence[float] | Tensor | None = None,
        T: float | None = None,
        activation: str = "tanh",
        X: Tensor | None = None,
        learn_X: bool = False,
        J: Tensor | None = None,
        learn_J: bool = False,
        learn_step: bool = False,
        tied: bool = False,
        init: str = "scaled",
        sparsity: Sparsity | Any | None = None,
        tol: float | None = None,
        max_iter: int | None = None,
        engine: str = "auto",
        backprop: str = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        scheme = SCHEMES[choose("integrator", integrator, SCHEMES)]
        features = positive_int("features", features)
        initial = Initial(init, features, generator, dtype, device)
        super().__init__(
            features,
            layers,
            step=step,
            T=T,
            activation=activation,
            learn_step=learn_step,
            tied=tied,
            initial=initial,
        )
        self.integrator = integrator
        self.engines = not scheme.implicit
        self.turns = len(scheme.shears) or 1
        self.symplectic, self.implicit = scheme.symplectic, scheme.implicit
        self.forward_euler = integrator == "forward_euler"
        self._choose_engine(engine, backprop)
        self.newton = _newton_options(scheme, integrator, tol, max_iter)
        learn_X, learn_J = flag("learn_X", learn_X), flag("learn_J", learn_J)
        if (scheme.interconnection == "J" and (X is not None or learn_X)) or (
            scheme.interconnection == "X" and (J is not None or learn_J)
        ):
            other = "J" if scheme.interconnection == "X" else "X"
            raise OptionError(
                f"integrator {integrator!r} takes {scheme.interconnection} "
                f"and learn_{scheme.interconnection}, not {other} or learn_{other}."
            )
        if features % 2 and (scheme.interconnection == "X" or J is None):
            raise ShapeError(
                f"{type(self).__name__} splits the features into (p, q), so their number must be "
                f"even, but features = {features}; augment them by a zero (hdnn.heads.Augment)"
                + (", or give a skew-symmetric J." if scheme.interconnection == "J" else ".")
            )
        self.sparsity = None if sparsity is None else self._fitting(_as_sparsity(sparsity))
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the block-sparse weights
        if scheme.interconnection == "X":
            self._add_X(X, learn_X, initial)
        else:
            self._add_J(J, learn_J, initial)
        m, stored = self.features // 2, self.stored
        if scheme.layout == "split":
            self.stacked = ("K_p", "K_q", "b_p", "b_q")
            self._add_K("K_p", initial.K(stored, m, m))
            self._add_K("K_q", initial.K(stored, m, m))
            self.b_p = nn.Parameter(initial.b(stored, m))
            self.b_q = nn.Parameter(initial.b(stored, m))
        else:
            self.stacked = ("K", "b")
            self._add_K("K", initial.K(stored, self.features, self.features))
            self.b = nn.Parameter(initial.b(stored, self.features))

    # Parts

    @property
    def scheme(self) -> Scheme:
        return SCHEMES[self.integrator]

    @property
    def invertible(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.scheme.invertible

    def _add_X(self, X: Tensor | None, learn: bool, initial: Initial) -> None:
        m = self.features // 2
        self.learn_X = learn
        free = None
        matrix = torch.eye(m, device="cpu") if X is None else self._constant("X", X, m, initial)
        if self.sparsity is not None:
            free = self._restrict("X", matrix)
        if learn and free is not None:
            self._add_sparse("X", initial.like(matrix), free)
        elif learn:
            self.X = nn.Parameter(initial.like(matrix))
        else:
            self.register_buffer("X", None if X is None else initial.like(matrix))

    def _add_J(self, J: Tensor | None, learn: bool, initial: Initial) -> None:
        n = self.features
        self.learn_J = learn
        if J is None:
            matrix = interconnection.canonical(n, device="cpu")
        else:
            matrix = self._constant("J", J, n, initial)
            interconnection.check_skew(matrix)
        index = interconnection.upper_indices(n, device=matrix.device)
        if self.sparsity is not None:
            free = self._restrict("J", matrix).to(matrix.device)
            index = index[free.flatten()[index]]
        upper = initial.like(matrix.flatten(-2)[..., index])
        index = index.to(initial.device)
        stored = learn or J is not None
        self.register_buffer("_J_index", index if stored else None, persistent=False)
        if learn:
            self.J_upper = nn.Parameter(upper)
        else:
            self.register_buffer("J_upper", upper if stored else None)

    def _constant(self, name: str, matrix: Tensor, size: int, initial: Initial) -> Tensor:
        """X or J as the user gave it, if it has the right shape and is finite in our dtype."""
        if not isinstance(matrix, Tensor) or matrix.is_complex():
            given = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ShapeError(f"{name} must be a torch.Tensor of real numbers, but got {given}.")
        if matrix.shape not in ((size, size), (self.layers, size, size)):
            raise ShapeError(
                f"{name} has shape {tuple(matrix.shape)}, but ({size}, {size}) is needed for "
                f"{self.features} features, or ({self.layers}, {size}, {size}) for one a layer."
            )
        interconnection.check_finite(name, matrix.detach().to(initial.dtype))
        return matrix.detach() if matrix.is_floating_point() else matrix.double()

    def _fitting(self, sparsity: Sparsity) -> Sparsity:
        """The patterns, if this network can have them."""
        R, stored = sparsity.R, self.stored
        if R.ndim == 3 and R.shape[0] != stored:
            raise SparsityError(
                f"R has a pattern for each of {R.shape[0]} layers, but the network has "
                f"{stored} layers with weights of their own."
            )
        if sparsity.S is not None and self.scheme.implicit:
            raise SparsityError(
                f"an implicit layer ({self.integrator}) couples all nodes that are linked at all, "
                "so it is not local to any graph S; give no S (masked only), or use H1 or H2."
            )
        return sparsity

    def node_sizes(self) -> tuple[tuple[int, ...], bool]:
        """The sizes of all nodes, and whether node i owns (p[i], q[i]) rather than a piece of y."""
        assert self.sparsity is not None
        n, scheme = self.features, self.scheme
        paired = scheme.interconnection == "X"
        sizes = self.sparsity.node_sizes(n // 2 if paired else n)
        paired = paired or 2 * sum(sizes) == n
        if sum(sizes) != (n // 2 if paired else n):
            pieces = "" if scheme.interconnection == "X" else f" or n = {n} (pieces of y)"
            raise SparsityError(
                f"node sizes {sizes} add up to {sum(sizes)}, but must add up to "
                f"m = n/2 = {n // 2} (pairs (p, q)){pieces}."
            )
        return sizes, paired

    def _mask(self, pattern: Tensor, rows: int) -> Tensor:
        """The entries that a block pattern frees in a square matrix of n or m = n/2 rows."""
        sizes, paired = self.node_sizes()
        if paired and rows == self.features:  # (p[i], q[i]) on both sides
            return block_sparse.mask(pattern.tile(2, 2), 2 * sizes, 2 * sizes)
        return block_sparse.mask(pattern, sizes, sizes)

    def _restrict(self, name: str, matrix: Tensor) -> Tensor:
        """Check X or J against the pattern T and return which of its entries are free."""
        assert self.sparsity is not None
        given, M = self.sparsity, self.sparsity.nodes
        sizes, paired = self.node_sizes()
        halves = 2 if paired and name == "J" else 1  # J has a block of T in each of its quarters
        quarters = [
            part for rows in matrix.cpu().chunk(halves, -2) for part in rows.chunk(halves, -1)
        ]
        patterns = [block_sparse.block_pattern(part, sizes, sizes) for part in quarters]
        used = torch.cat([pattern.reshape(-1, M, M) for pattern in patterns]).any(0)
        if given.T is None:  # it may use what it uses already
            T = used | used.mT | torch.eye(M, dtype=torch.bool)
            self.sparsity = given = Sparsity(given.R, T, given.S, given.sizes)
        assert given.T is not None
        if given.T.ndim == 3:
            raise SparsityError("T must be (M, M): one pattern for all layers.")
        if bool((used & ~given.T).any()):
            i, k = (used & ~given.T).nonzero()[0].tolist()
            raise SparsityError(
                f"{name} links nodes {i} and {k}, but T does not; add that link to T, or give "
                f"{'an X' if name == 'X' else 'a J (hdnn.interconnection.block_diagonal)'} "
                "that is zero there."
            )
        return self._mask(given.T, matrix.shape[-1])

    def _add_K(self, name: str, K: Tensor) -> None:
        if self.sparsity is None:
            self.register_parameter(name, nn.Parameter(K))
            return
        self._add_sparse(name, K, self._mask(self.sparsity.R, K.shape[-1]))

    def _add_sparse(self, name: str, matrix: Tensor, free: Tensor) -> None:
        """Store only the free entries: as `name_free`, with `name` the matrices that they fill."""
        index = block_sparse.indices(free.expand(matrix.shape)).to(matrix.device)
        self._shapes[name] = tuple(matrix.shape)
        self.register_buffer(f"_{name}_index", index, persistent=False)
        self.register_parameter(f"{name}_free", nn.Parameter(block_sparse.values(matrix, index)))

    def weight(self, name: str) -> Tensor:
        if name not in self._shapes:
            return super().weight(name)
        refresh(self)
        values, index = getattr(self, f"{name}_free"), getattr(self, f"_{name}_index")
        return block_sparse.dense(values, index, self._shapes[name])

    def learns(self, name: str) -> bool:
        """Whether a weight, K for instance, is to be learned."""
        name = f"{name}_free" if name in self._shapes else name
        return self.get_parameter(name).requires_grad

    def __getattr__(self, name: str) -> Any:
        # A block-sparse K, or X, reads like a stored one: the whole matrices, zeros included.
        if name in self.__dict__.get("_shapes", {}):
            return self.weight(name)
        return super().__getattr__(name)

    def assign(self, name: str, value: Tensor) -> None:
        if name in self._shapes:
            value = block_sparse.values(value, self.get_buffer(f"_{name}_index"))
            name = f"{name}_free"
        super().assign(name, value)

    def _promise(self) -> Guarantee:
        if self.scheme.symplectic:
            return Guarantee(True, SYMPLECTIC, ALWAYS)
        return forward_euler(self.activation, self._sigma.monotone)

    # The field

    def _J(self) -> Tensor | None:
        refresh(self)
        if self.J_upper is None:
            return None
        return interconnection.skew(self.J_upper, self.features, self._J_index)

    def weights(self) -> dict[str, Any]:
        if self.scheme.interconnection == "X":
            return {**super().weights(), "X": self.weight("X"), **self.newton}
        return {**super().weights(), "J": self._J(), **self.newton}

    @property
    def function(self) -> Callable[..., Tensor]:
        return self.scheme.function

    def field(self) -> dict[str, Tensor]:
        w = super().weights()
        b = w["b"] if self.scheme.layout == "full" else torch.cat([w["b_p"], w["b_q"]], -1)
        like = {"dtype": b.dtype, "device": b.device}
        J = self._J() if self.scheme.interconnection == "J" else None
        if J is None:
            X = self.weight("X") if self.scheme.interconnection == "X" else None
            J = (
                interconnection.canonical(self.features, **like)
                if X is None
                else (interconnection.from_X(X))
            )
        K = w["K"] if self.scheme.layout == "full" else _block_diagonal(w["K_p"], w["K_q"])
        return {"J": J, "K": K, "b": b}

    def shear_norms(self) -> Tensor:
        if not self.scheme.shears:
            return super().shear_norms()
        w, h = self.weights(), self.steps()
        X = 1.0 if w["X"] is None else dense.norm(w["X"])
        norms = {"p": dense.norm(w["K_q"]).square(), "q": dense.norm(w["K_p"]).square()}
        return torch.cat([abs(part) * h * X * norms[half] for half, part in self.scheme.shears])

    def _shears(self, w: dict[str, Any]) -> ShearLayers | None:
        if not self.scheme.shears:
            return None
        K_p, K_q, X = w["K_p"], w["K_q"], w["X"]
        V = interconnection.times_X(K_p, X), interconnection.times_X(K_q, X, adjoint=True)
        return ShearLayers(self.scheme.shears, K_p, K_q, w["b_p"], w["b_q"], *V)

    def _jacobians(self, states: Tensor, w: dict[str, Any]) -> Tensor:
        if self.scheme.shears:
            return super()._jacobians(states, w)
        K, b, h = w["K"], w["b"], jacobians.steps(w["h"], states)
        if self.scheme.interconnection == "X":
            return jacobians.semi_implicit(states, K, b, w["X"], h, self._sigma)
        rule = jacobians.midpoint if self.implicit else jacobians.forward_euler
        return rule(states, K, b, interconnection.times_J(K, w["J"]), h, self._sigma)

    @property
    def always_solvable(self) -> bool:
        """Whether each layer has exactly one solution, whatever its weights and its state.

        Explicit layers have; and midpoint layers with a monotone activation, at any coupling.
        """
        monotone = self._sigma.monotone
        return not self.scheme.implicit or (self.scheme.interconnection == "J" and monotone)

    @torch.no_grad()
    def coupling(self) -> Tensor:
        """How strongly each implicit layer depends on its own result, (N,); explicit ones: 0.

        rho(h S |B| |A|), entry by entry, for the x = c + h B sigma(A x + a) that a layer solves.
        Below 1 there is exactly one solution, whatever the state. Above there may be several, of
        which a layer takes the one that is connected to h = 0 (see `hdnn.integrators.path`).
        """
        h = self.steps().abs()
        if not self.scheme.implicit:
            return torch.zeros_like(h)
        field = self.field()
        A, B = field["K"], field["J"] @ field["K"].mT
        if self.scheme.interconnection == "X":  # p alone is solved for
            A, B = A.chunk(2, -1)[0], B.chunk(2, -2)[0]
        else:
            A = A / 2
        return h * implicit.coupling(A, B, self._sigma.S)

    @torch.no_grad()
    def limit_coupling(self, limit: float = 0.95) -> None:
        """Make K smaller in the layers whose coupling is above `limit`, in place, until it is not.

        Of a midpoint layer all of K. Of ImplicitH2 only what sets it apart from H2: the blocks
        through which one row of K sees both p and q, to which its coupling is proportional.
        """
        if not self.scheme.implicit:
            return
        factor = limit / self.coupling()
        if self.tied:
            factor = factor.amin(0, keepdim=True)
        if not bool((factor < 1).any()):
            return
        factor, K = factor.clamp_max(1).view(-1, 1, 1), self.weight("K").clone()
        if self.scheme.interconnection == "J":
            K *= factor.sqrt()
        else:
            m = self.features // 2
            K[:, :m, m:] *= factor
            K[:, m:, :m] *= factor
        self.assign("K", K)

    def _smooth(self) -> tuple[Tensor, Tensor]:
        if self.scheme.layout == "full":
            return super()._smooth()
        w = super().weights()
        return torch.cat([w["K_p"], w["K_q"]], -1), torch.cat([w["b_p"], w["b_q"]], -1)

    # Making it again

    def config(self) -> dict[str, Any]:
        learn = "learn_" + self.scheme.interconnection
        return {
            **super().config(),
            **({"integrator": self.integrator} if type(self) is HamiltonianNet else {}),
            learn: getattr(self, learn),
            "sparsity": None if self.sparsity is None else self.sparsity.to_config(),
            **self.newton,
        }

    def constants(self) -> dict[str, Tensor]:
        name = self.scheme.interconnection
        value = self.weight("X") if name == "X" else self._J()
        return {} if value is None else {name: value.detach()}

    def _refined(self, config: dict[str, Any], k: int) -> Any:
        if self.sparsity is not None and self.sparsity.R.ndim == 3 and not self.tied:
            R = self.sparsity.R.repeat_interleave(k, 0)
            config["sparsity"]["R"] = R.int().tolist()
        return super()._refined(config, k)

    def extra_repr(self, *, learned: bool = True) -> str:
        named = type(self) is not HamiltonianNet
        parts = ([] if named else [self.integrator]) + [super().extra_repr(learned=learned)]
        if getattr(self, "learn_" + self.scheme.interconnection):
            parts.append(f"{self.scheme.interconnection} learned")
        return ", ".join(parts + ([repr(self.sparsity)] if self.sparsity is not None else []))


class H1(HamiltonianNet):
    """Forward Euler: y_{j+1} = y_j + h J K^T sigma(K y_j + b)   (eq:H-DNN_fE).

    For a monotone activation `norm(dy_N/dy_j) >= 1` at any depth; for others nothing is promised.
    Parameters K (N, n, n) and b (N, n); options as in `HamiltonianNet`.
    """

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        step: float | Sequence[float] | Tensor | None = None,
        T: float | None = None,
        activation: str = "tanh",
        J: Tensor | None = None,
        learn_J: bool = False,
        learn_step: bool = False,
        tied: bool = False,
        init: str = "scaled",
        sparsity: Sparsity | Any | None = None,
        engine: str = "auto",
        backprop: str = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            features,
            layers,
            "forward_euler",
            step=step,
            T=T,
            activation=activation,
            J=J,
            learn_J=learn_J,
            learn_step=learn_step,
            tied=tied,
            init=init,
            sparsity=sparsity,
            engine=engine,
            backprop=backprop,
            generator=generator,
            dtype=dtype,
            device=device,
        )


class H2(HamiltonianNet):
    """Semi-implicit Euler, explicit: p from q (eq:p_update), then q from the new p (eq:q_update).

    Symplectic, so `norm(dy_N/dy_j) >= 1` at any depth, for any weights and any activation.
    Parameters K_p, K_q (N, m, m) and b_p, b_q (N, m); options as in `HamiltonianNet`.
    """

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        step: float | Sequence[float] | Tensor | None = None,
        T: float | None = None,
        activation: str = "tanh",
        X: Tensor | None = None,
        learn_X: bool = False,
        learn_step: bool = False,
        tied: bool = False,
        init: str = "scaled",
        sparsity: Sparsity | Any | None = None,
        engine: str = "auto",
        backprop: str = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            features,
            layers,
            "semi_implicit_euler",
            step=step,
            T=T,
            activation=activation,
            X=X,
            learn_X=learn_X,
            learn_step=learn_step,
            tied=tied,
            init=init,
            sparsity=sparsity,
            engine=engine,
            backprop=backprop,
            generator=generator,
            dtype=dtype,
            device=device,
        )


class ImplicitH2(HamiltonianNet):
    """Semi-implicit Euler with a full K, solved by Newton's method   (eq:implicit_euler).

    Symplectic as H2 is. Parameters K (N, n, n) and b (N, n); options as in `HamiltonianNet`.
    """

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        step: float | Sequence[float] | Tensor | None = None,
        T: float | None = None,
        activation: str = "tanh",
        X: Tensor | None = None,
        learn_X: bool = False,
        learn_step: bool = False,
        tied: bool = False,
        init: str = "scaled",
        sparsity: Sparsity | Any | None = None,
        tol: float | None = None,
        max_iter: int | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            features,
            layers,
            "semi_implicit_euler_full",
            step=step,
            T=T,
            activation=activation,
            X=X,
            learn_X=learn_X,
            learn_step=learn_step,
            tied=tied,
            init=init,
            sparsity=sparsity,
            tol=tol,
            max_iter=max_iter,
            generator=generator,
            dtype=dtype,
            device=device,
        )


def _as_sparsity(given: Any) -> Sparsity:
    if isinstance(given, Sparsity):
        return given
    if isinstance(given, dict):
        for name in given:
            choose("part of a sparsity", name, ("R", "T", "S", "sizes"))
        return Sparsity(**given)
    return Sparsity(given)


def _newton_options(
    scheme: Scheme, integrator: str, tol: float | None, max_iter: int | None
) -> dict[str, Any]:
    given: dict[str, Any] = {
        k: v for k, v in (("tol", tol), ("max_iter", max_iter)) if v is not None
    }
    check_tolerance(integrator, tol, given.get("max_iter", 1))
    if given and not scheme.implicit:
        raise OptionError(f"integrator {integrator!r} is explicit and takes no {', '.join(given)}.")
    return given


def _block_diagonal(A: Tensor, B: Tensor) -> Tensor:
    """diag(A, B) for stacks of matrices."""
    upper = torch.cat([A, A.new_zeros(*A.shape[:-1], B.shape[-1])], -1)
    lower = torch.cat([B.new_zeros(*B.shape[:-1], A.shape[-1]), B], -1)
    return torch.cat([upper, lower], -2)
