"""The definition: each scheme runs a state through a stack of layers, in plain PyTorch.

A scheme is a sequence of moves. A move reads one half of the state and adds a signed fraction of
the step h times a force to the other half; a scheme without halves reads and moves the whole state.
The same moves define the layers, their inverses and their Jacobians. `hdnn.engine` runs them faster
and is tested against `run`.

States are `(*batch, n)` with `y = (p, q)`, p first; weights are stacked over layers, `(N, ...)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn.functional import linear

from hdnn.activations import Activation
from hdnn.implicit import MAX_ITER, solve, solve_chord

__all__ = [
    "DiscreteGradient",
    "Force",
    "Implicit",
    "ImplicitEuler",
    "Midpoint",
    "Perceptron",
    "Scheme",
    "jacobians",
    "run",
    "steps",
]

State = tuple[Tensor, ...]  # (p, q), or (y,) for a scheme without halves


class Force(NamedTuple):
    """`V^T sigma(K x + b)`: the gradient of a layer's energy, turned by X or J.

    The weights belong to one layer, or are stacked over layers. For rows x the force is
    `sigma(x K^T + b) V`.

    Args:
        K: weights `(N, r, s)`.
        b: biases `(N, r)`.
        V: output weights `(N, r, t)`; None means K, and gains `(N, r)` mean K with each row
            multiplied by its gain.
    """

    K: Tensor
    b: Tensor
    V: Tensor | None = None

    def at(self, x: Tensor, sigma: Activation) -> Tensor:
        """The force of one layer at states x, `(*batch, t)`."""
        return sigma(linear(x, self.K, self.b)) @ self.output()

    # Methods by name: PyTorch 2.7 can compile no other methods of a named tuple.
    def output(self) -> Tensor:
        """V as a matrix."""
        if self.V is None:
            return self.K
        if self.V.ndim < self.K.ndim:
            return self.V.unsqueeze(-1) * self.K
        return self.V

    def layers(self) -> Iterator[Force]:
        """The force of each layer, one by one."""
        # unbind, not indexing: the gradient of N selections of a stack costs N^2.
        K = self.K.unbind(0)
        b = self.b.unbind(0)
        V = K if self.V is None else self.output().unbind(0)
        return map(Force, K, b, V)


@dataclass(frozen=True)
class Scheme:
    """A way to step through `y' = J K^T sigma(K y + b)`.

    Explicit schemes are instances of this class; others override `step`.

    Args:
        name: the name in networks and files.
        order: the power of h in the error.
        moves: pairs of the half to read (0 is p, 1 is q) and a signed fraction of h.
        halves: False if a single force moves the whole state.
        symplectic: True if each layer is symplectic, with one J for all layers.
        implicit: True if a layer solves an equation.
    """

    name: str
    order: int
    moves: tuple[tuple[int, float], ...] = ()
    halves: bool = True
    symplectic: bool = True
    implicit: bool = False

    @property
    def invertible(self) -> bool:
        """True if `step` can be undone."""
        return self.halves or self.implicit

    @property
    def paired(self) -> bool:
        """True if p and q play different roles, so that J must be `[[0, -X^T], [X, 0]]`."""
        return self.halves

    def split(self, y: Tensor) -> State:
        """The halves (p, q) of a state, or the whole."""
        return tuple(y.chunk(2, -1)) if self.halves else (y,)

    def join(self, x: State) -> Tensor:
        """The state from its halves."""
        return torch.cat(x, -1) if self.halves else x[0]

    def ordered(
        self, inverse: bool = False
    ) -> Iterator[tuple[int, int, float]]:
        """The moves as (half read, half moved, fraction); in reverse order for the inverse."""
        sign = -1.0 if inverse else 1.0
        for half, fraction in reversed(self.moves) if inverse else self.moves:
            yield half, (1 - half if self.halves else half), sign * fraction

    def step(
        self,
        x: State,
        forces: Sequence[Force],
        h: float | Tensor,
        sigma: Activation,
        *,
        inverse: bool = False,
    ) -> State:
        """One layer, or its inverse.

        Args:
            x: the result of `split`.
            forces: the forces of this layer; `forces[i]` reads half i.
            h: the step of this layer.
            sigma: the activation.
            inverse: undo the layer.
        """
        state = list(x)
        for half, to, fraction in self.ordered(inverse):
            force = forces[half].at(state[half], sigma)
            state[to] = state[to] + (fraction * h) * force
        return tuple(state)


@dataclass(frozen=True)
class Perceptron(Scheme):
    """`y <- sigma(K y + b)`: without a step, and without protection from vanishing gradients."""

    def step(self, x, forces, h, sigma, *, inverse=False):
        (y,), (force,) = x, forces
        return (sigma(y @ force.K.mT + force.b),)


@dataclass(frozen=True)
class Implicit(Scheme):
    """A scheme whose layers solve `x = c + B sigma(A x + a)`; its single force has a V.

    Args:
        tol: the largest accepted error of an equation; by default near rounding.
        max_iter: the largest number of Newton iterations for a layer.
    """

    name: str = "implicit"
    order: int = 1
    halves: bool = False
    implicit: bool = True
    tol: float | None = None
    max_iter: int = MAX_ITER

    @property
    def newton(self) -> dict[str, Any]:
        """The options of the solver."""
        return {"tol": self.tol, "max_iter": self.max_iter, "where": self.name}


@dataclass(frozen=True)
class ImplicitEuler(Implicit):
    """`y' = y + h J dH/dy(p', q)` with a full K, solved for p' (eq:implicit_euler)."""

    name: str = "semi_implicit_euler_full"
    order: int = 1

    @property
    def paired(self) -> bool:
        return True

    def step(self, x, forces, h, sigma, *, inverse=False):
        (y,), (force,) = x, forces
        p, q = y.chunk(2, -1)
        K_p, K_q = force.K.chunk(2, -1)
        V_p, V_q = (h * force.output()).chunk(2, -1)
        if inverse:
            a = p @ K_p.mT + force.b
            q = solve(q, -V_q.mT, K_q, a, sigma, **self.newton)
            p = p - sigma(a + q @ K_q.mT) @ V_p
        else:
            a = q @ K_q.mT + force.b
            p = solve(p, V_p.mT, K_p, a, sigma, **self.newton)
            q = q + sigma(a + p @ K_p.mT) @ V_q
        return (torch.cat([p, q], -1),)


@dataclass(frozen=True)
class Midpoint(Implicit):
    """`y' = y + h J dH/dy((y + y')/2)`: symplectic for any skew J, even singular or of odd size."""

    name: str = "midpoint"
    order: int = 2

    def step(self, x, forces, h, sigma, *, inverse=False):
        (y,), (force,) = x, forces
        half = -0.5 if inverse else 0.5
        B = half * h * force.output().mT
        middle = solve(y, B, force.K, force.b, sigma, **self.newton)
        return (2 * middle - y,)


@dataclass(frozen=True)
class DiscreteGradient(Implicit):
    """`y' = y + h J G(y, y')` with G, the mean of dH/dy between y and y': keeps the energy exactly.

    Not symplectic. G is `K^T chord(K y + b, K y' + b)`, and `(y' - y) G` is the change of H.
    """

    name: str = "discrete_gradient"
    order: int = 2
    symplectic: bool = False

    def step(self, x, forces, h, sigma, *, inverse=False):
        (y,), (force,) = x, forces
        sign = -1.0 if inverse else 1.0
        B = sign * h * force.output().mT
        end = solve_chord(y, B, force.K, force.b, sigma, **self.newton)
        return (end,)


# y <- y + h J dH/dy(y)   (eq:H-DNN_fE)
FORWARD_EULER = Scheme(
    "forward_euler", 1, ((0, 1.0),), halves=False, symplectic=False
)

# p <- p - h X^T dH/dq(q), then q <- q + h X dH/dp(p)   (eq:p_update, eq:q_update)
SEMI_IMPLICIT_EULER = Scheme("semi_implicit_euler", 1, ((1, -1.0), (0, 1.0)))

# Kick, drift, kick (Strang, 1968)
VERLET = Scheme("verlet", 2, ((1, -0.5), (0, 1.0), (1, -0.5)))

# Three Verlet steps, the middle one backwards in time (Yoshida, 1990)
_OUTER = 1 / (2 - 2 ** (1 / 3))
_INNER = 1 - 2 * _OUTER
YOSHIDA4 = Scheme(
    "yoshida4",
    4,
    (
        (1, -_OUTER / 2),
        (0, _OUTER),
        (1, -(_OUTER + _INNER) / 2),
        (0, _INNER),
        (1, -(_INNER + _OUTER) / 2),
        (0, _OUTER),
        (1, -_OUTER / 2),
    ),
)

# q <- q - h sigma(K_0^T p + b_1), then p <- p + h sigma(K_0 q + b_2)   (eq:MS1)
MS1 = Scheme("ms1", 1, ((0, -1.0), (1, 1.0)), symplectic=False)

# p <- p + h K_1^T sigma(K_1 q + b_1), then q <- q - h K_2^T sigma(K_2 p + b_2)   (eq:MS3)
MS3 = Scheme("ms3", 1, ((1, 1.0), (0, -1.0)))

PERCEPTRON = Perceptron("perceptron", 0, halves=False, symplectic=False)

# The integrators of Hamiltonian networks, by name
INTEGRATORS: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        FORWARD_EULER,
        SEMI_IMPLICIT_EULER,
        VERLET,
        YOSHIDA4,
        ImplicitEuler(),
        Midpoint(),
        DiscreteGradient(),
    )
}


def steps(h: float | Tensor, N: int) -> Sequence[float | Tensor]:
    """The step of each layer, from a single step or a tensor `(N,)`."""
    return h.expand(N).unbind(0) if isinstance(h, Tensor) else [h] * N


def run(
    scheme: Scheme,
    y: Tensor,
    forces: Sequence[Force],
    h: float | Tensor,
    sigma: Activation,
    *,
    trajectory: bool = False,
    inverse: bool = False,
) -> Tensor:
    """Run N layers one after the other: the definition of every network here.

    Args:
        scheme: how a layer steps.
        y: states `(*batch, n)`.
        forces: the forces, stacked over layers; `forces[i]` reads half i.
        h: the step, one for all layers or `(N,)`.
        sigma: the activation.
        trajectory: return all states, in forward order.
        inverse: compute the first state from the last.

    Returns:
        The last state `(*batch, n)` (the first with `inverse`), or all states `(N+1, *batch, n)`.

    Examples:
        >>> import torch
        >>> from hdnn import activations, schemes
        >>> force = schemes.Force(torch.randn(8, 2, 2), torch.zeros(8, 2))
        >>> sigma = activations.get("tanh")
        >>> schemes.run(schemes.VERLET, torch.randn(5, 4), (force, force), 0.1, sigma).shape
        torch.Size([5, 4])
    """
    N = len(forces[0].K)
    stacks = [force.layers() for force in forces]
    weights = zip(*stacks, strict=True)
    layers = list(zip(weights, steps(h, N), strict=True))
    x = scheme.split(y)
    states = [y]
    for layer, step in reversed(layers) if inverse else layers:
        x = scheme.step(x, layer, step, sigma, inverse=inverse)
        if trajectory:
            states.append(scheme.join(x))
    if not trajectory:
        return scheme.join(x)
    return torch.stack(states[::-1] if inverse else states)


def jacobians(
    scheme: Scheme,
    states: Tensor,
    forces: Sequence[Force],
    h: float | Tensor,
    sigma: Activation,
) -> Tensor:
    """The derivatives `dy_{j+1}/dy_j` of all layers.

    The layout is denominator layout: the transpose of `torch.autograd.functional.jacobian`.

    Args:
        scheme: how a layer steps.
        states: the states before and after each layer, `(N+1, B, n)`.
        forces: the forces, stacked over layers.
        h: the step, one for all layers or `(N,)`.
        sigma: the activation.

    Returns:
        The matrices `(N, B, n, n)`.
    """

    def layer(y: Tensor, weights: Any, h: Tensor) -> Tensor:
        forces = [Force(*each) for each in weights]
        return scheme.join(scheme.step(scheme.split(y), forces, h, sigma))

    weights = [(force.K, force.b, force.output()) for force in forces]
    starts = states[:-1]
    step = torch.as_tensor(h, dtype=states.dtype, device=states.device)
    samples = vmap(jacrev(layer), (0, None, None))
    return vmap(samples)(starts, weights, step.expand(len(starts))).mT
