"""Hamiltonian networks: one field, `J K^T sigma(K y + b)`, and a choice of integrators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn import functional, implicit, schemes
from hdnn.activations import Elementwise
from hdnn.errors import (
    OptionError,
    ShapeError,
    choose,
    positive_float,
    positive_int,
)
from hdnn.networks.network import Network, Steps
from hdnn.schemes import Force, Implicit, Scheme
from hdnn.sparsity import Sparsity


class NetworkOptions(TypedDict, total=False):
    """Options of every network: see `Network`."""

    step: Steps | None
    h: Steps | None
    T: float | None
    activation: str | Elementwise
    learn_step: bool
    tied: bool
    init: str
    engine: str
    backprop: str
    generator: torch.Generator | None
    dtype: torch.dtype | None
    device: torch.device | str | None


class HamiltonianOptions(NetworkOptions, total=False):
    """Options of Hamiltonian networks: see `HamiltonianNet`."""

    X: Tensor | None
    learn_X: bool
    J: Tensor | None
    learn_J: bool
    rows: int | None
    gains: bool
    sparsity: Any
    tol: float | None
    max_iter: int | None


class HamiltonianNet(Network):
    """N steps of `y' = J K^T sigma(K y + b)` by any integrator.

    Integrators with a block-diagonal K (`K_p, K_q, b_p, b_q`, explicit): "semi_implicit_euler"
    (H2), "verlet", "yoshida4". With a full K (`K, b`): "forward_euler" (H1), and the implicit
    "semi_implicit_euler_full" (ImplicitH2), "midpoint" and "discrete_gradient". The implicit
    integrators run as one operator under `torch.compile`, `torch.export` and `vmap`, but cannot be
    exported to ONNX. All but "forward_euler" and "discrete_gradient" are symplectic;
    "discrete_gradient" keeps the energy of each layer instead.

    Args:
        features: n, the size of a state; even if states are split into (p, q).
        layers: N, the number of steps.
        integrator: one of the integrators above.
        X: a block of `J = [[0, -X^T], [X, 0]]`: `(m, m)` with m = n/2, or `(N, m, m)`; default I.
        learn_X: train X too.
        J: a skew-symmetric matrix `(n, n)`, or `(N, n, n)`; by default `[[0, -I], [I, 0]]`.
        learn_J: train J too; it stays skew-symmetric.
        rows: r, the number of rows of `K_p` and `K_q`; by default n/2.
        gains: learn a factor of any sign for each row, `K^T (a * sigma(K y + b))`, so that a force
            can push and pull; without gains a monotone activation makes each energy convex.
        sparsity: a block pattern R, or an `hdnn.Sparsity`, that K (and X or J) must have.
        tol: the largest accepted error of an implicit layer's equation; by default near rounding.
        max_iter: the largest number of Newton steps in an implicit layer.
        **options: the options of `hdnn.networks.Network`.

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
        X: Tensor | None = None,
        learn_X: bool = False,
        J: Tensor | None = None,
        learn_J: bool = False,
        rows: int | None = None,
        gains: bool = False,
        sparsity: Sparsity | Any | None = None,
        tol: float | None = None,
        max_iter: int | None = None,
        **options: Unpack[NetworkOptions],
    ) -> None:
        scheme = schemes.INTEGRATORS[
            choose("integrator", integrator, schemes.INTEGRATORS)
        ]
        self.newton = _newton(scheme, tol, max_iter)
        if self.newton:
            scheme = replace(scheme, **self.newton)
        name, other = ("X", "J") if scheme.paired else ("J", "X")
        links = {"X": (X, learn_X), "J": (J, learn_J)}
        if links[other][0] is not None or links[other][1]:
            raise OptionError(
                f"integrator {integrator!r} accepts only {name} and learn_{name}."
            )
        self.stacked = (
            ("K_p", "K_q", "b_p", "b_q") if scheme.halves else ("K", "b")
        )
        if rows is not None or gains:
            if not scheme.halves or sparsity is not None:
                raise OptionError(
                    "rows and gains are for H2, Verlet and Yoshida networks without sparsity; "
                    f"leave them out with {integrator=}."
                )
            self.rows = None if rows is None else positive_int("rows", rows)
        self.gains = gains
        if gains:
            self.stacked += ("a_p", "a_q")
        super().__init__(features, layers, scheme=scheme, **options)
        self.integrator = integrator
        self.forward_euler = scheme is schemes.FORWARD_EULER
        self.learn_X = learn_X
        self.learn_J = learn_J
        self.linked = ""  # "X" or "J" if one is stored
        self.sparsity = _as_sparsity(sparsity)
        if scheme.paired or J is None:
            self._half("" if scheme.paired else ", or give a skew-symmetric J")
        self._add_link(name, *links[name])
        if self.sparsity is not None:
            for stack in self.stacked[: len(self.stacked) // 2]:
                K = self.weight(stack)
                free = self._free(self.sparsity.R, K.shape[-1])
                self._keep_free(stack, K, free)

    # X and J

    def _checked(self, name: str, matrix: Tensor, size: int) -> Tensor:
        shapes = ((size, size), (self.layers, size, size))
        if (
            not isinstance(matrix, Tensor)
            or matrix.is_complex()
            or matrix.shape not in shapes
        ):
            raise ShapeError(
                f"{name} must be a real tensor of shape {shapes[0]} for {self.features} features, "
                f"or {shapes[1]} for one per layer, but got {getattr(matrix, 'shape', matrix)}."
            )
        dtype = next(self.parameters()).dtype
        matrix = matrix.detach().to("cpu", dtype)
        if not bool(matrix.isfinite().all()):
            raise OptionError(
                f"{name} has an entry that is NaN or infinite in {dtype}."
            )
        defect = (matrix + matrix.mT).abs().amax((-2, -1))
        rounding = 8 * torch.finfo(dtype).eps * matrix.abs().amax((-2, -1))
        if name == "J" and not bool((defect <= rounding).all()):
            raise OptionError(
                f"J must be skew-symmetric (J = -J^T), but max |J + J^T| = {defect.max():.3g}; use "
                "J - J^T, or leave J out to get the canonical J."
            )
        return matrix

    def _add_link(self, name: str, matrix: Tensor | None, learn: bool) -> None:
        """Store X or J if it is not the default, or if it is learned."""
        value = torch.eye(self.features // 2, device="cpu")
        if name == "J":
            value = functional.from_X(value)
        if matrix is not None:
            value = self._checked(
                name, matrix, self.features if name == "J" else len(value)
            )
        free = torch.ones_like(value, dtype=torch.bool)
        if self.sparsity is not None:
            self.sparsity = self._with_T(self.sparsity, name, value)
            assert self.sparsity.T is not None
            free = self._free(self.sparsity.T, value.shape[-1])
        if matrix is None and not learn:
            return
        self.linked = name
        start = value.to(next(self.parameters()), copy=True)
        if name == "J" or (learn and self.sparsity is not None):
            self._keep_free(name, value, free, skew=name == "J", learn=learn)
        elif learn:
            self.X = nn.Parameter(start.clone())
        else:
            self.register_buffer("X", start)
        if learn:
            self.register_buffer("_first_link", start)

    def __getattr__(self, name: str) -> Any:
        if name == "X" and self.__dict__.get("linked") == "":
            return None  # the identity
        return super().__getattr__(name)

    def reset_parameters(
        self, generator: torch.Generator | None = None
    ) -> None:
        """Draw all weights again; reset learned steps and a learned X or J."""
        super().reset_parameters(generator)
        if self.learn_X or self.learn_J:
            self.assign(self.linked, self.get_buffer("_first_link"))

    # Block patterns

    def node_sizes(self) -> tuple[tuple[int, ...], bool]:
        """The sizes of all nodes, and True if node i owns (p[i], q[i]) rather than a piece of y."""
        assert self.sparsity is not None
        n = self.features
        sizes = self.sparsity.node_sizes(n // 2 if self.scheme.paired else n)
        paired = self.scheme.paired or 2 * sum(sizes) == n
        if sum(sizes) != (n // 2 if paired else n):
            raise OptionError(
                f"node sizes {sizes} must add up to n/2 = {n // 2} (pairs of p and q)"
                f"{'' if self.scheme.paired else f' or n = {n} (pieces of y)'}."
            )
        return sizes, paired

    def _owners(self, rows: int) -> Tensor:
        """The node of each feature, as `(rows, M)` of 0 and 1."""
        sizes, paired = self.node_sizes()
        eye = torch.eye(len(sizes), device="cpu")
        owners = eye.repeat_interleave(torch.tensor(sizes, device="cpu"), 0)
        if paired and rows == self.features:
            return owners.repeat(2, 1)
        return owners

    def _free(self, pattern: Tensor, rows: int) -> Tensor:
        """The entries that a block pattern leaves free in square matrices."""
        owners = self._owners(rows)
        return owners @ pattern.float() @ owners.mT > 0

    def _with_T(self, sparsity: Sparsity, name: str, link: Tensor) -> Sparsity:
        """The patterns with a T that fits X or J, checked against this network."""
        stored = 1 if self.tied else self.layers
        if sparsity.R.ndim == 3 and len(sparsity.R) != stored:
            raise OptionError(
                f"R has patterns for {len(sparsity.R)} layers, but there are weights for {stored}."
            )
        if sparsity.S is not None and self.implicit:
            raise OptionError(
                f"an implicit layer ({self.integrator}) couples all nodes of a connected "
                "component, so it is not local to a graph S; leave S out, or use H1 or H2."
            )
        owners = self._owners(link.shape[-1])
        used = owners.mT @ link.ne(0).float() @ owners > 0
        used = used.view(-1, *used.shape[-2:]).any(0)
        if sparsity.T is None:
            eye = torch.eye(len(used), dtype=torch.bool, device="cpu")
            T = used | used.mT | eye
            return Sparsity(sparsity.R, T, sparsity.S, sparsity.sizes)
        missing = used & ~sparsity.T
        if bool(missing.any()):
            i, k = missing.nonzero()[0].tolist()
            raise OptionError(
                f"{name} links nodes {i} and {k}, but T does not; add that link to T, or set that "
                "block to zero."
            )
        return sparsity

    # The field

    def forces(self) -> tuple[Force, ...]:
        """The forces of all layers, as the scheme takes them."""
        link = self.weight(self.linked) if self.linked else None
        if self.scheme.halves:
            K_p, K_q, b_p, b_q, *gains = self.stacks()
            return functional.coupled(K_p, K_q, b_p, b_q, link, *gains)
        if self.scheme.paired and link is not None:
            link = functional.from_X(link)
        K, b = self.stacks()
        return functional.turned(K, b, link)

    def weights(self) -> dict[str, Any]:
        """All weights by name, X or J (None for the default), and the step."""
        name = "X" if self.scheme.paired else "J"
        link = self.weight(name) if self.linked else None
        return {**super().weights(), name: link, **self.newton}

    def field(self) -> dict[str, Tensor]:
        """J, K `(N, r, n)` and b `(N, r)` of the ODE `y' = J K^T sigma(K y + b)`.

        With gains, also a `(N, r)`, which multiplies sigma.
        """
        gains: list[Tensor] = []
        if self.scheme.halves:
            K_p, K_q, b_p, b_q, *gains = self.stacks()
            zero = torch.zeros_like(K_p)
            K = functional.blocks(K_p, zero, zero, K_q)
            b = torch.cat([b_p, b_q], -1)
        else:
            K, b = self.stacks()
        if self.linked:
            link = self.weight(self.linked)
        else:
            link = torch.eye(self.features // 2, dtype=b.dtype, device=b.device)
        J = link if self.linked == "J" else functional.from_X(link)
        field = {"J": J, "K": K, "b": b}
        if gains:
            field["a"] = torch.cat(gains, -1)
        return field

    # Implicit layers

    @property
    def always_solvable(self) -> bool:
        """True if each layer has exactly one solution, whatever its weights and its state."""
        return not self.implicit or (
            not self.scheme.paired and self.sigma.monotone
        )

    @torch.no_grad()
    def coupling(self) -> Tensor:
        """The dependence of each implicit layer on its own result, `(N,)`; 0 for explicit layers.

        Below 1, a layer has exactly one solution for any state: see `hdnn.implicit.coupling`.
        """
        h = self.steps()
        if not self.implicit:
            return torch.zeros_like(h)
        (force,) = self.forces()
        A, B = force.K, force.output().mT
        if self.scheme.paired:  # only p is solved for
            m = self.features // 2
            A = A[..., :m]
            B = B[..., :m, :]
        else:
            A = A / 2
        return h * implicit.coupling(A, B, self.sigma.S)

    @torch.no_grad()
    def limit_coupling(self, limit: float = 0.95) -> None:
        """Scale down K in place so that no layer's coupling exceeds `limit`.

        In a midpoint or discrete gradient layer this scales all of K; in ImplicitH2 it scales only
        the blocks that H2 lacks, through which a row of K sees both p and q.
        """
        if not self.implicit:
            return
        factor = (limit / self.coupling()).clamp_max(1)
        if self.tied:
            factor = factor.amin(0, keepdim=True)
        factor = factor.view(-1, 1, 1)
        K = self.weight("K").clone()
        if self.scheme.paired:
            m = self.features // 2
            K[:, :m, m:] *= factor
            K[:, m:, :m] *= factor
        else:
            K *= factor.sqrt()
        self.assign("K", K)

    # Making it again

    def config(self) -> dict[str, Any]:
        """The constructor arguments of this network, in a form that JSON can hold."""
        config = super().config()
        if parametrize.type_before_parametrizations(self) is HamiltonianNet:
            config["integrator"] = self.integrator
        learn = "learn_X" if self.scheme.paired else "learn_J"
        config[learn] = getattr(self, learn)
        config["rows"] = self.rows
        config["gains"] = self.gains
        config["sparsity"] = (
            None if self.sparsity is None else self.sparsity.to_config()
        )
        return {**config, **self.newton}

    def constants(self) -> dict[str, Tensor]:
        """X or J, if one was given or is learned."""
        if not self.linked:
            return {}
        return {self.linked: self.weight(self.linked).detach()}

    def _refined_config(self, k: int) -> dict[str, Any]:
        config = super()._refined_config(k)
        patterns = self.sparsity
        if patterns is not None and patterns.R.ndim == 3 and not self.tied:
            R = patterns.R.repeat_interleave(k, 0)
            config["sparsity"]["R"] = R.int().tolist()
        return config

    def extra_repr(self) -> str:
        parts = [super().extra_repr()]
        if parametrize.type_before_parametrizations(self) is HamiltonianNet:
            parts.insert(0, self.integrator)
        if self.rows is not None:
            parts.append(f"{self.rows} rows")
        if self.gains:
            parts.append("gains")
        if self.learn_X or self.learn_J:
            parts.append(f"{self.linked} learned")
        if self.sparsity is not None:
            parts.append(repr(self.sparsity))
        return ", ".join(parts)


class H1(HamiltonianNet):
    """Forward Euler: `y_{j+1} = y_j + h J_j K_j^T sigma(K_j y_j + b_j)`.

    For a monotone activation `norm(dy_N/dy_j) >= 1` at any depth; for other activations nothing is
    promised. Parameters K `(N, n, n)` and b `(N, n)`; options are those of `HamiltonianNet` with J.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.H1(features=4, layers=64)
        >>> net(torch.randn(100, 4)).shape
        torch.Size([100, 4])
        >>> net.guarantee().holds, hdnn.H1(4, 64, activation="sin").guarantee().holds
        (True, False)
    """

    def __init__(
        self, features: int, layers: int, **options: Unpack[HamiltonianOptions]
    ) -> None:
        super().__init__(features, layers, "forward_euler", **options)


class H2(HamiltonianNet):
    """Semi-implicit Euler, explicit: p from q, then q from the new p.

        p_{j+1} = p_j - h X^T K_q^T sigma(K_q q_j + b_q)
        q_{j+1} = q_j + h X   K_p^T sigma(K_p p_{j+1} + b_p)

    Symplectic, so `norm(dy_N/dy_j) >= 1` at any depth, for any weights and any activation.
    Parameters `K_p`, `K_q` `(N, r, m)` and `b_p`, `b_q` `(N, r)`, with r = m = n/2 unless `rows` is
    given, and with `gains=True` also `a_p`, `a_q` `(N, r)`; options are those of `HamiltonianNet`
    with X.

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

    def __init__(
        self, features: int, layers: int, **options: Unpack[HamiltonianOptions]
    ) -> None:
        super().__init__(features, layers, "semi_implicit_euler", **options)


class ImplicitH2(HamiltonianNet):
    """Semi-implicit Euler with a full K, solved by Newton's method.

        p_{j+1} = p_j - h X^T dH/dq(p_{j+1}, q_j)
        q_{j+1} = q_j + h X   dH/dp(p_{j+1}, q_j)

    Symplectic, like H2. A layer whose equation cannot be solved, because K or h is too large,
    raises a `ConvergenceError` when it runs. Parameters K `(N, n, n)` and b `(N, n)`; options are
    those of `HamiltonianNet` with X.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.ImplicitH2(features=4, layers=8, T=1.0)
        >>> net(torch.randn(100, 4)).shape
        torch.Size([100, 4])
        >>> bool((net.coupling() < 1).all())  # then each layer has exactly one solution
        True
    """

    def __init__(
        self, features: int, layers: int, **options: Unpack[HamiltonianOptions]
    ) -> None:
        super().__init__(
            features, layers, "semi_implicit_euler_full", **options
        )


def _newton(
    scheme: Scheme, tol: float | None, max_iter: int | None
) -> dict[str, Any]:
    """The options of an implicit scheme that the caller set."""
    options: dict[str, Any] = {}
    if tol is not None:
        options["tol"] = positive_float("tol", tol)
    if max_iter is not None:
        options["max_iter"] = positive_int("max_iter", max_iter)
    if options and not isinstance(scheme, Implicit):
        raise OptionError(
            f"integrator {scheme.name!r} is explicit and takes no {', '.join(options)}."
        )
    return options


def _as_sparsity(sparsity: Any) -> Sparsity | None:
    if sparsity is None or isinstance(sparsity, Sparsity):
        return sparsity
    if isinstance(sparsity, dict):
        return Sparsity(**sparsity)
    return Sparsity(sparsity)
