"""The earlier networks that H1 and H2 generalise, MS1, MS2 and MS3, and the MLP for contrast."""

from __future__ import annotations

from typing import Any, NoReturn, Unpack

import torch
from torch import Tensor

from hdnn import functional, schemes
from hdnn.activations import Elementwise
from hdnn.errors import OptionError
from hdnn.networks.hamiltonian import NetworkOptions
from hdnn.networks.network import Network, spectral_norm
from hdnn.schemes import Force


class MS1(Network):
    """The first of the earlier networks, with no `K^T` outside sigma.

        q_{j+1} = q_j - h sigma(K_0^T p_j + b_1)
        p_{j+1} = p_j + h sigma(K_0 q_{j+1} + b_2)

    Each layer is a product of shears, so `norm(dy_N/dy_j) >= 1` at any depth, for any weights and
    any activation. Parameters `K_0` `(N, m, m)` and `b_1`, `b_2` `(N, m)`, with m = n/2; options
    are those of `Network`.
    """

    stacked = ("K_0", "b_1", "b_2")

    def __init__(
        self, features: int, layers: int, **options: Unpack[NetworkOptions]
    ) -> None:
        super().__init__(features, layers, scheme=schemes.MS1, **options)

    def forces(self) -> tuple[Force, ...]:
        """The forces on q and on p."""
        K_0, b_1, b_2 = self.stacks()
        return functional.bare(K_0.mT, b_1) + functional.bare(K_0, b_2)

    def field(self) -> dict[str, Tensor]:
        """`K = [[0, K_0], [K_0^T, 0]]` and `X_j = -K_0^-1`: needs an invertible `K_0`."""
        K_0, b_1, b_2 = self.stacks()
        zero = torch.zeros_like(K_0)
        J = functional.from_X(-_inverse(K_0))
        K = functional.blocks(zero, K_0, K_0.mT, zero)
        return {"J": J, "K": K, "b": torch.cat([b_2, b_1], -1)}

    def field_rates(self) -> Tensor:
        """A bound on the derivative of the field in each layer: `S |K_0|`, `(N,)`."""
        return self.sigma.S * spectral_norm(self.stacks()[0])

    def _smooth(self) -> list[Tensor]:
        K_0, b_1, b_2 = self.stacks()
        return [K_0, K_0, b_1, b_2]  # the K of the field holds K_0 twice


class MS2(Network):
    """Forward Euler with a skew-symmetric K: `y_{j+1} = y_j + h sigma(K_j y_j + b_j)`.

    For a monotone activation `norm(dy_N/dy_j) >= 1` at any depth; for other activations nothing is
    promised. The features may be odd. Parameters `K_free`, the entries of K above its diagonal, and
    b `(N, n)`; options are those of `Network`.
    """

    stacked = ("K", "b")
    forward_euler = True

    def __init__(
        self, features: int, layers: int, **options: Unpack[NetworkOptions]
    ) -> None:
        super().__init__(
            features, layers, scheme=schemes.FORWARD_EULER, **options
        )
        K = self.weight("K")
        free = torch.ones(K.shape, dtype=torch.bool, device="cpu")
        self._keep_free("K", K, free, skew=True)

    def forces(self) -> tuple[Force, ...]:
        """The single force."""
        K, b = self.stacks()
        return functional.bare(K, b)

    def field(self) -> dict[str, Tensor]:
        """`J = K^-T`: needs an invertible K, hence an even n."""
        if self.features % 2:  # then K is singular, which rounding would hide
            self._refuse(
                "has no J for an odd number of features: a skew-symmetric K of odd size is "
                "singular."
            )
        K, b = self.stacks()
        return {"J": _inverse(K.mT), "K": K, "b": b}

    def field_rates(self) -> Tensor:
        """A bound on the derivative of the field in each layer: `S |K|`, `(N,)`."""
        return self.sigma.S * spectral_norm(self.stacks()[0])


class MS3(Network):
    """H2 with both signs changed, and the blocks of K off its diagonal.

        p_{j+1} = p_j + h K_1^T sigma(K_1 q_j + b_1)
        q_{j+1} = q_j - h K_2^T sigma(K_2 p_{j+1} + b_2)

    Symplectic, like H2. Parameters `K_1`, `K_2` `(N, m, m)` and `b_1`, `b_2` `(N, m)`, with
    m = n/2; options are those of `Network`.
    """

    stacked = ("K_1", "K_2", "b_1", "b_2")

    def __init__(
        self, features: int, layers: int, **options: Unpack[NetworkOptions]
    ) -> None:
        super().__init__(features, layers, scheme=schemes.MS3, **options)

    def forces(self) -> tuple[Force, ...]:
        """The forces on q and on p."""
        K_1, K_2, b_1, b_2 = self.stacks()
        return functional.coupled(K_2, K_1, b_2, b_1)

    def field(self) -> dict[str, Tensor]:
        """`K = [[0, K_1], [K_2, 0]]` and `J = [[0, I], [-I, 0]]`."""
        K_1, K_2, b_1, b_2 = self.stacks()
        eye = torch.eye(self.features // 2, dtype=b_1.dtype, device=b_1.device)
        J = functional.from_X(-eye)
        zero = torch.zeros_like(K_1)
        K = functional.blocks(zero, K_1, K_2, zero)
        return {"J": J, "K": K, "b": torch.cat([b_1, b_2], -1)}


class MLP(Network):
    """A multilayer perceptron, `y_{j+1} = sigma(K_j y_j + b_j)`: its gradients vanish with depth.

    Parameters K `(N, n, n)` and b `(N, n)`. Options are those of `Network`, but there is no step.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> net = hdnn.MLP(features=4, layers=256, dtype=torch.float64)
        >>> y = torch.randn(10, 4, dtype=torch.float64)
        >>> dy = hdnn.analysis.backward_sensitivity(net, y)  # dy_N/dy_j; dy_N/dy_0 has vanished
        >>> bool(hdnn.analysis.norms(dy[0]).max() < 1e-6)
        True
    """

    stacked = ("K", "b")

    def __init__(
        self,
        features: int,
        layers: int,
        *,
        activation: str | Elementwise = "tanh",
        tied: bool = False,
        init: str = "scaled",
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(
            features,
            layers,
            scheme=schemes.PERCEPTRON,
            activation=activation,
            tied=tied,
            init=init,
            generator=generator,
            dtype=dtype,
            device=device,
        )

    @property
    def h(self) -> Any:
        raise AttributeError("a multilayer perceptron has no step")

    def forces(self) -> tuple[Force, ...]:
        """The single force."""
        K, b = self.stacks()
        return functional.bare(K, b)

    def refine(self, k: int) -> NoReturn:
        """Raise an error: this network does not discretise an ODE."""
        self._refuse("does not discretise an ODE and cannot be refined.")


def _inverse(K: Tensor) -> Tensor:
    inverse, info = torch.linalg.inv_ex(K)
    if bool(info.any()):
        raise OptionError(
            f"J does not exist: K is singular in layer {int(info.argmax())}."
        )
    return inverse
