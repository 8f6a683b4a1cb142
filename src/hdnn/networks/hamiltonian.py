"""Hamiltonian networks: one field, J K^T sigma(K y + b), and a choice of how to step through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn import interconnection
from hdnn.base.shapes import check_tolerance
from hdnn.errors import OptionError, ShapeError, choose, flag, positive_int
from hdnn.integrators import implicit
from hdnn.networks import jacobians
from hdnn.networks.block_sparse import BlockSparseNetwork
from hdnn.networks.initial import Initial
from hdnn.networks.jacobians import ShearLayers
from hdnn.networks.options import H1Options, H2Options, ImplicitH2Options, describes_options, takes
from hdnn.networks.promise import Guarantee
from hdnn.networks.schemes import SCHEMES, Scheme
from hdnn.networks.weights import refresh
from hdnn.sparsity import Sparsity


class HamiltonianNet(BlockSparseNetwork):
    """N steps of `y' = J K^T sigma(K y + b)` by any integrator (eq:ODE_H).

    Integrators with a block-diagonal K (`K_p, K_q, b_p, b_q`, explicit): "semi_implicit_euler"
    (H2), "verlet", "yoshida4". With a full K (`K, b`): "forward_euler" (H1), and the implicit
    "semi_implicit_euler_full" (ImplicitH2), "midpoint" and "discrete_gradient", which compile,
    export and vmap as one operator, `hdnn::solve_implicit`, but cannot be exported to ONNX. All but
    "forward_euler" and "discrete_gradient" are symplectic; the latter keeps the energy of each
    layer instead, for any weights and any step.

    Args:
        features: n, the size of a state; even where it is split into (p, q).
        layers: N, how many steps there are.
        integrator: how a step is taken, one of those above.
        step: h, a number or one for each layer; or give T instead.
        T: the time that all layers span, h = T/N; 2.4 if neither is given.
        activation: sigma, the name of one of `hdnn.activations.names()`.
        X: makes `J = [[0, -X^T], [X, 0]]`: (m, m) with m = n/2, or (N, m, m); by default I.
        learn_X: train X too, from the given one on.
        J: any skew-symmetric matrix (n, n), or (N, n, n); by default `[[0, -I], [I, 0]]`.
        learn_J: train J too, from the given one on; it stays skew-symmetric.
        learn_step: train the step of each layer too; it stays positive.
        tied: give all layers the same weights.
        init: "scaled" draws K from N(0, 1/n) with b = 0; "paper" draws all from N(0, 1).
        sparsity: a block pattern R, or a `hdnn.Sparsity`, that K (and X or J) must have.
        tol: to which the equation of an implicit layer is solved; by default that of the dtype.
        max_iter: the most Newton steps for an implicit layer.
        engine: what runs the layers, "auto", "reference" or "fused": see `hdnn.engine`.
        backprop: what the backward pass starts from, "auto", "stored", "checkpoint" or
            "reversible": see `hdnn.engine`.
        generator: of the first weights; by default PyTorch's global one.
        dtype: of the weights; by default `torch.get_default_dtype()`.
        device: of the weights; by default `torch.get_default_device()`.

    Raises:
        ShapeError: if a size is no whole number >= 1, the features are odd but are to be split into
            (p, q), X or J has another shape, or the dtype is no floating-point one.
        StepError: if a step, a time, or a limit of an implicit layer is not finite and > 0, or
            there are not as many steps as layers.
        OptionError: if a name is not known, a flag is neither True nor False, or two options
            exclude each other, such as `step` and `T`.
        InterconnectionError: if J is not skew-symmetric, or an entry of X or J is not finite.
        SparsityError: if the patterns do not fit the features, or X or J does not fit them.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.HamiltonianNet(features=4, layers=16, integrator="verlet")
        >>> net
        HamiltonianNet(verlet, 4 features, 16 layers, tanh, h = 0.15, T = 2.4, 192 parameters)
        >>> y = torch.randn(100, 4)
        >>> torch.allclose(net.inverse(net(y)), y, atol=1e-4)
        True
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
        own, other = ("X", "J") if scheme.interconnection == "X" else ("J", "X")
        given = {"X": X is not None or learn_X, "J": J is not None or learn_J}
        if given[other]:
            raise OptionError(
                f"integrator {integrator!r} takes {own} and learn_{own}, "
                f"not {other} or learn_{other}."
            )
        if own == "X" or J is None:
            self._half(", or give a skew-symmetric J" if own == "J" else "")
        self._set_sparsity(sparsity)
        if own == "X":
            self._add_X(X, learn_X, initial)
        else:
            self._add_J(J, learn_J, initial)
        self.stacked = ("K_p", "K_q", "b_p", "b_q") if self.split else ("K", "b")
        self._draw(initial)

    # Parts

    @property
    def invertible(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether `inverse` can be called: all integrators but forward Euler."""
        return self.scheme.invertible

    @property
    def _unnamed(self) -> bool:
        """Whether its class does not say the integrator."""
        return parametrize.type_before_parametrizations(self) is HamiltonianNet

    @property
    def split(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether K is block-diagonal: `K_p` and `K_q`, on halves of the state."""
        return self.scheme.layout == "split"

    def _add_X(self, X: Tensor | None, learn: bool, initial: Initial) -> None:
        m = self.features // 2
        self.learn_X = learn
        matrix = torch.eye(m, device="cpu") if X is None else self._constant("X", X, m, initial)
        free = None if self.sparsity is None else self._restrict("X", matrix)
        value = initial.constant(matrix)
        if learn and free is not None:
            self._add_sparse("X", value, free)
        elif learn:
            self.X = nn.Parameter(value)
        else:
            self.add_constant("X", None if X is None else matrix.to("cpu", value.dtype), value)
        self._start = matrix.cpu().clone() if learn else None

    def _add_J(self, J: Tensor | None, learn: bool, initial: Initial) -> None:
        n = self.features
        self.learn_J = learn
        if J is None:
            matrix = interconnection.canonical(n, device="cpu")
        else:
            matrix = self._constant("J", J, n, initial)
            interconnection.check_skew(matrix)
        matrix, index = matrix.cpu(), interconnection.upper_indices(n, device="cpu")
        if self.sparsity is not None:
            free = self._restrict("J", matrix)
            index = index[free.flatten()[index]]
        upper = matrix.flatten(-2)[..., index]
        value, stored = initial.constant(upper), learn or J is not None
        self.add_constant("_J_index", index if stored else None, value, persistent=False)
        if learn:
            self.J_upper = nn.Parameter(value)
        else:
            self.add_constant("J_upper", upper.to(value.dtype) if stored else None, value)
        self._start = upper if learn else None

    def _constant(self, name: str, matrix: Tensor, size: int, initial: Initial) -> Tensor:
        """X or J as given, if it has the right shape and is finite in the network's dtype."""
        if not isinstance(matrix, Tensor) or matrix.is_complex():
            given = matrix.dtype if isinstance(matrix, Tensor) else type(matrix).__name__
            raise ShapeError(f"{name} must be a torch.Tensor of real numbers, but got {given}.")
        if matrix.shape not in ((size, size), (self.layers, size, size)):
            raise ShapeError(
                f"{name} has shape {tuple(matrix.shape)}, but ({size}, {size}) is needed for "
                f"{self.features} features, or ({self.layers}, {size}, {size}) for one a layer."
            )
        if matrix.is_meta:
            raise ShapeError(
                f"{name} is on the meta device, where tensors have no values; make it with "
                'device="cpu", or before `with torch.device("meta")`.'
            )
        interconnection.check_finite(name, matrix.detach().to(initial.dtype))
        return matrix.detach() if matrix.is_floating_point() else matrix.double()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Begin again: all weights are drawn as the constructor draws them, and a learned X
        or J is what it was at first.

        Args:
            generator: what they are drawn from; by default PyTorch's global generator.
        """
        super().reset_parameters(generator)
        if self._start is not None:
            learned = "X" if self.scheme.interconnection == "X" else "J_upper"
            self.assign(learned, self._start.expand(self.weight(learned).shape))

    def started_from_here(self) -> None:
        """Let `reset_parameters` bring a learned X or J back to what it is now."""
        if self._start is not None:
            learned = "X" if self.scheme.interconnection == "X" else "J_upper"
            self._start = self.weight(learned).detach().cpu().clone()

    # The field

    def _X_or_J(self) -> Tensor | None:
        """What the scheme takes of the two; None is the identity, or the canonical J."""
        if self.scheme.interconnection == "X":
            return self.weight("X")
        refresh(self)
        if self.J_upper is None:
            return None
        return interconnection.skew(self.J_upper, self.features, self._J_index)

    def weights(self) -> dict[str, Any]:
        """All arguments of `function` except the state, by their names."""
        X_or_J = {self.scheme.interconnection: self._X_or_J()}
        return {**super().weights(), **X_or_J, **self.newton}

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of `hdnn.functional` that this network runs."""
        return self.scheme.function

    def field(self) -> dict[str, Tensor]:
        """J, K (N, n, n) and b (N, n) of the discretised ODE, `y' = J K^T sigma(K y + b)`."""
        w = self.weights()
        if self.split:
            zero = torch.zeros_like(w["K_p"])
            rows = torch.cat([w["K_p"], zero], -1), torch.cat([zero, w["K_q"]], -1)
            K, b = torch.cat(rows, -2), torch.cat([w["b_p"], w["b_q"]], -1)
        else:
            K, b = w["K"], w["b"]
        if w.get("X") is not None:
            J = interconnection.from_X(w["X"])
        elif w.get("J") is not None:
            J = w["J"]
        else:
            J = interconnection.canonical(self.features, dtype=b.dtype, device=b.device)
        return {"J": J, "K": K, "b": b}

    def _promise(self) -> Guarantee:
        if self.integrator == "discrete_gradient":
            why = "a discrete gradient step keeps the energy, but is not symplectic"
            return Guarantee(False, "none", f"{why}: norms below 1 are possible")
        return super()._promise()

    def _shears(self, w: dict[str, Any]) -> ShearLayers | None:
        if not self.scheme.shears:
            return None
        K_p, K_q, b_p, b_q = (w[name] for name in self.stacked)
        return ShearLayers(self.scheme.shears, K_p, K_q, b_p, b_q, w["X"])

    def _jacobians(self, states: Tensor, w: dict[str, Any]) -> Tensor:
        if self.scheme.shears:
            return super()._jacobians(states, w)
        K, b, h = w["K"], w["b"], jacobians.steps(w["h"], states)
        if self.scheme.interconnection == "X":
            return jacobians.semi_implicit(states, K, b, w["X"], h, self._sigma)
        rule = {
            "forward_euler": jacobians.forward_euler,
            "midpoint": jacobians.midpoint,
            "discrete_gradient": jacobians.discrete_gradient,
        }[self.integrator]
        return rule(states, K, b, interconnection.times_J(K, w["J"]), h, self._sigma)

    @property
    def always_solvable(self) -> bool:
        """Whether each layer has exactly one solution, whatever its weights and its state.

        True for explicit layers, and for midpoint and discrete gradient layers with a monotone
        activation.
        """
        monotone = self._sigma.monotone
        return not self.scheme.implicit or (self.scheme.interconnection == "J" and monotone)

    @torch.no_grad()
    def coupling(self) -> Tensor:
        """How strongly each implicit layer depends on its own result, (N,); explicit ones: 0.

        `rho(h S |B| |A|)`, entry by entry, for the `x = c + h B sigma(A x + a)` that a layer
        solves. Below 1 there is exactly one solution, whatever the state. Above there may be
        several, of which a layer takes the one that is connected to h = 0.
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
        """Make K smaller, in place, in each layer whose coupling is above `limit`, until it is not.

        In a midpoint or discrete gradient layer this scales all of K. In ImplicitH2 it scales only
        what H2 does not have: the blocks through which a row of K sees both p and q. Coupling is
        proportional to it.

        Args:
            limit: the largest coupling that a layer may keep.
        """
        if not self.scheme.implicit:
            return
        factor = limit / self.coupling()
        for j in self.frozen:
            factor[j] = 1
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

    # Configuration and refinement

    def config(self) -> dict[str, Any]:
        """The arguments that make this network again, as JSON can hold them."""
        learn = "learn_" + self.scheme.interconnection
        return {
            **super().config(),
            **({"integrator": self.integrator} if self._unnamed else {}),
            learn: getattr(self, learn),
            "sparsity": None if self.sparsity is None else self.sparsity.to_config(),
            **self.newton,
        }

    def constants(self) -> dict[str, Tensor]:
        """X or J, if one was given or is learned."""
        value = self._X_or_J()
        return {} if value is None else {self.scheme.interconnection: value.detach()}

    def _refined(self, config: dict[str, Any], k: int) -> Any:
        if self.sparsity is not None and self.sparsity.R.ndim == 3 and not self.tied:
            R = self.sparsity.R.repeat_interleave(k, 0)
            config["sparsity"]["R"] = R.int().tolist()
        return super()._refined(config, k)

    def extra_repr(self, *, learned: bool = True) -> str:
        parts = ([self.integrator] if self._unnamed else []) + [super().extra_repr(learned=learned)]
        if getattr(self, "learn_" + self.scheme.interconnection):
            parts.append(f"{self.scheme.interconnection} learned")
        return ", ".join(parts + ([repr(self.sparsity)] if self.sparsity is not None else []))


@describes_options(HamiltonianNet)
class H1(HamiltonianNet):
    """Forward Euler: `y_{j+1} = y_j + h J_j K_j^T sigma(K_j y_j + b_j)` (eq:H-DNN_fE).

    For a monotone activation `norm(dy_N/dy_j) >= 1` at any depth; for others nothing is promised.
    Parameters K (N, n, n) and b (N, n).

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.H1(features=4, layers=64)
        >>> net(torch.randn(100, 4)).shape
        torch.Size([100, 4])
        >>> net.guarantee().holds, hdnn.H1(4, 64, activation="sin").guarantee().holds
        (True, False)
    """

    @takes(HamiltonianNet, without=("integrator", "X", "learn_X", "tol", "max_iter"))
    def __init__(self, features: int, layers: int, **options: Unpack[H1Options]) -> None:
        super().__init__(features, layers, "forward_euler", **options)


@describes_options(HamiltonianNet)
class H2(HamiltonianNet):
    """Semi-implicit Euler, explicit: p from q (eq:p_update), then q from the new p (eq:q_update).

        p_{j+1} = p_j - h X^T K_q^T sigma(K_q q_j + b_q)
        q_{j+1} = q_j + h X   K_p^T sigma(K_p p_{j+1} + b_p)

    Symplectic, so `norm(dy_N/dy_j) >= 1` at any depth, for any weights and any activation.
    Parameters `K_p`, `K_q` (N, m, m) and `b_p`, `b_q` (N, m), with m = n/2.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.H2(features=4, layers=256, dtype=torch.float64)
        >>> y = torch.randn(10, 4, dtype=torch.float64)
        >>> net(y).shape
        torch.Size([10, 4])
        >>> dy = hdnn.analysis.backward_sensitivity(net, y)  # dy_N/dy_j for all layers and samples
        >>> bool((hdnn.analysis.norms(dy) >= 1 - 1e-9).all())
        True
    """

    @takes(HamiltonianNet, without=("integrator", "J", "learn_J", "tol", "max_iter"))
    def __init__(self, features: int, layers: int, **options: Unpack[H2Options]) -> None:
        super().__init__(features, layers, "semi_implicit_euler", **options)


@describes_options(HamiltonianNet)
class ImplicitH2(HamiltonianNet):
    """Semi-implicit Euler with a full K, solved by Newton's method (eq:implicit_euler).

        p_{j+1} = p_j - h X^T dH/dq(p_{j+1}, q_j)
        q_{j+1} = q_j + h X   dH/dp(p_{j+1}, q_j)

    Symplectic as H2 is. A layer whose equation cannot be solved, because K and h are too large for
    it, raises a `ConvergenceError` when it runs. Parameters K (N, n, n) and b (N, n).

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.ImplicitH2(features=4, layers=8, T=1.0)
        >>> net(torch.randn(100, 4)).shape
        torch.Size([100, 4])
        >>> bool((net.coupling() < 1).all())  # then each layer has exactly one solution
        True
    """

    @takes(HamiltonianNet, without=("integrator", "J", "learn_J", "engine", "backprop"))
    def __init__(self, features: int, layers: int, **options: Unpack[ImplicitH2Options]) -> None:
        super().__init__(features, layers, "semi_implicit_euler_full", **options)


def _newton_options(
    scheme: Scheme, integrator: str, tol: float | None, max_iter: int | None
) -> dict[str, Any]:
    options = {"tol": tol, "max_iter": max_iter}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    check_tolerance(integrator, tol, given.get("max_iter", 1))
    if given and not scheme.implicit:
        raise OptionError(f"integrator {integrator!r} is explicit and takes no {', '.join(given)}.")
    return given
