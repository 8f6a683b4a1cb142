"""MS1, MS2, MS3: the earlier Hamiltonian-inspired networks that H1 and H2 generalise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hdnn import functional, interconnection
from hdnn.errors import NotInvertibleError, positive_int
from hdnn.integrators import splitting
from hdnn.networks import jacobians
from hdnn.networks.hamiltonian import HamiltonianNet
from hdnn.networks.initial import Initial
from hdnn.networks.jacobians import ShearLayers
from hdnn.networks.ode import ODENetwork
from hdnn.networks.options import describes_options
from hdnn.networks.promise import ALWAYS, Guarantee
from hdnn.networks.weights import refresh
from hdnn.operators import dense


class _MarginallyStable(ODENetwork):
    """The options that MS1, MS2 and MS3 share; each has its own weights and field."""

    engines = True

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        step: float | Sequence[float] | Tensor | None = None,
        T: float | None = None,
        activation: str = "tanh",
        learn_step: bool = False,
        tied: bool = False,
        init: str = "scaled",
        engine: str = "auto",
        backprop: str = "auto",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
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
        self._choose_engine(engine, backprop)
        self._draw(initial)


@describes_options(HamiltonianNet)
class MS1(_MarginallyStable):
    """The first of the earlier networks, with no `K^T` outside of sigma (eq:MS1).

        q_{j+1} = q_j - h sigma(K_0^T p_j + b_1)
        p_{j+1} = p_j + h sigma(K_0 q_{j+1} + b_2)

    Each layer is a product of shears, so `norm(dy_N/dy_j) >= 1` at any depth, for any weights and
    any activation. Parameters `K_0` (N, m, m) and `b_1`, `b_2` (N, m), with m = n/2.

    Raises:
        ShapeError: if a size is no whole number >= 1, the features are odd, or the dtype is no
            floating-point one.
        StepError: if a step or a time is not finite and > 0, or there are not as many steps as
            layers.
        OptionError: if a name is not known, a flag is neither True nor False, or two options
            exclude each other, such as `step` and `T`.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.MS1(features=4, layers=32)
        >>> y = torch.randn(100, 4)
        >>> torch.allclose(net.inverse(net(y)), y, atol=1e-4)
        True
        >>> net.guarantee().holds
        True
    """

    stacked = ("K_0", "b_1", "b_2")
    split = True
    invertible = True
    turns = 2
    bare_activation = True

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of `hdnn.functional` that this network runs."""
        return functional.ms1

    def _promise(self) -> Guarantee:
        return Guarantee(True, "each layer is a product of shears, det = 1", ALWAYS)

    def field(self) -> dict[str, Tensor]:
        """`K = [[0, K_0], [K_0^T, 0]]` and `X_j = -K_0^-1`: needs an invertible `K_0`."""
        w = self.weights()
        K_0 = w["K_0"]
        J = interconnection.from_X(-_inverse(K_0, "K_0"))
        K = interconnection.off_diagonal(K_0, K_0.mT)
        return {"J": J, "K": K, "b": torch.cat([w["b_2"], w["b_1"]], -1)}

    def shear_norms(self) -> Tensor:
        return torch.cat([self.steps() * dense.norm(self.weights()["K_0"])] * 2)

    def _shears(self, w: dict[str, Any]) -> ShearLayers:
        K = w["K_0"]
        return ShearLayers(splitting.MS1, K.mT, K, w["b_1"], w["b_2"], bare=True)

    def _counted(self) -> list[tuple[str, float]]:
        return [("K_0", 2.0), ("b_1", 1.0), ("b_2", 1.0)]

    def _smooth(self) -> tuple[Tensor, Tensor]:
        w = self.weights()  # the K of the field holds K_0 twice
        return torch.cat([w["K_0"]] * 2, -1), torch.cat([w["b_1"], w["b_2"]], -1)


@describes_options(HamiltonianNet)
class MS2(_MarginallyStable):
    """Forward Euler with a skew-symmetric K: `y_{j+1} = y_j + h sigma(K_j y_j + b_j)` (eq:MS2).

    For a monotone activation `norm(dy_N/dy_j) >= 1` at any depth; for others nothing is promised.
    The features may be odd. Parameters `K_upper` (N, n(n-1)/2), the entries of K above its diagonal
    row by row, and b (N, n).

    Raises:
        ShapeError: if a size is no whole number >= 1, or the dtype is no floating-point one.
        StepError: if a step or a time is not finite and > 0, or there are not as many steps as
            layers.
        OptionError: if a name is not known, a flag is neither True nor False, or two options
            exclude each other, such as `step` and `T`.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.MS2(features=3, layers=16)
        >>> net(torch.randn(100, 3)).shape
        torch.Size([100, 3])
        >>> torch.equal(net.K, -net.K.mT)
        True
    """

    stacked = ("K", "b")
    forward_euler = True
    bare_activation = True
    _index: Tensor

    def _draw(self, initial: Initial) -> None:
        self.init, n = initial.init, self.features
        self.K_upper = nn.Parameter(initial.K(self.stored, n * (n - 1) // 2))
        self.b = nn.Parameter(initial.b(self.stored, n))
        index = interconnection.upper_indices(n, device="cpu")
        self.add_constant("_index", index, self.b, persistent=False)

    def _first(self, name: str, initial: Initial) -> Tensor:
        if name == "b":
            return super()._first(name, initial)
        n = self.features
        return interconnection.skew(initial.K(self.stored, n * (n - 1) // 2), n, self._index)

    @property
    def K(self) -> Tensor:
        """The skew-symmetric matrices, as stored: (N, n, n), or (1, n, n) if tied."""
        refresh(self)
        return interconnection.skew(self.K_upper, self.features, self._index)

    def assign(self, name: str, value: Tensor) -> None:
        if name == "K":
            name, value = "K_upper", value.flatten(-2)[..., self._index]
        super().assign(name, value)

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of `hdnn.functional` that this network runs."""
        return functional.ms2

    def field(self) -> dict[str, Tensor]:
        """`J = K^-T`: needs an invertible K, hence an even n."""
        if self.features % 2:  # then K is singular, which rounding would hide
            raise NotInvertibleError(
                f"J = K^-T needs an invertible K, but a skew matrix of odd size {self.features} "
                "never is; augment the features by a zero (hdnn.heads.Augment)."
            )
        w = self.weights()
        return {"J": _inverse(w["K"].mT, "K"), "K": w["K"], "b": w["b"]}

    def _jacobians(self, states: Tensor, w: dict[str, Any]) -> Tensor:
        h = jacobians.steps(w["h"], states)
        return jacobians.forward_euler(states, w["K"], w["b"], None, h, self._sigma)

    def _counted(self) -> list[tuple[str, float]]:
        return [("K_upper", 2.0), ("b", 1.0)]  # each entry is below the diagonal too


@describes_options(HamiltonianNet)
class MS3(_MarginallyStable):
    """H2 with both signs changed, and the blocks of K off its diagonal (eq:MS3).

        p_{j+1} = p_j + h K_1^T sigma(K_1 q_j + b_1)
        q_{j+1} = q_j - h K_2^T sigma(K_2 p_{j+1} + b_2)

    Symplectic as H2 is, so `norm(dy_N/dy_j) >= 1` at any depth, for any weights and any activation.
    Parameters `K_1`, `K_2` (N, m, m) and `b_1`, `b_2` (N, m), with m = n/2.

    Raises:
        ShapeError: if a size is no whole number >= 1, the features are odd, or the dtype is no
            floating-point one.
        StepError: if a step or a time is not finite and > 0, or there are not as many steps as
            layers.
        OptionError: if a name is not known, a flag is neither True nor False, or two options
            exclude each other, such as `step` and `T`.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.MS3(features=4, layers=32, activation="relu")
        >>> net(torch.randn(100, 4)).shape
        torch.Size([100, 4])
        >>> net.symplectic, net.guarantee().holds
        (True, True)
    """

    stacked = ("K_1", "K_2", "b_1", "b_2")
    split = True
    invertible = True
    turns = 2
    symplectic = True

    @property
    def function(self) -> Callable[..., Tensor]:
        """The function of `hdnn.functional` that this network runs."""
        return functional.ms3

    def field(self) -> dict[str, Tensor]:
        """`K = [[0, K_1], [K_2, 0]]` and `J = [[0, I], [-I, 0]]`."""
        w = self.weights()
        K = interconnection.off_diagonal(w["K_1"], w["K_2"])
        J = -interconnection.canonical(self.features, dtype=K.dtype, device=K.device)
        return {"J": J, "K": K, "b": torch.cat([w["b_1"], w["b_2"]], -1)}

    def _shears(self, w: dict[str, Any]) -> ShearLayers:
        return ShearLayers(splitting.MS3, w["K_2"], w["K_1"], w["b_2"], w["b_1"])


def _inverse(A: Tensor, name: str) -> Tensor:
    inverse, info = torch.linalg.inv_ex(A)
    if bool(info.any()):
        raise NotInvertibleError(
            f"J exists only where {name} is invertible, but in layer "
            f"{int(info.ne(0).nonzero()[0])} it is singular."
        )
    return inverse
