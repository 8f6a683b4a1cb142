"""What is linear in a substep, solved for beforehand, so that the kernel is left with controllers.

The energy of a plant is |w|^2 / 2 with the rows w = A z + a. With F = h (J - R), its substep with
the input -G^T f is in the mean of the rows before and after it, and in the increment s:

    (I - A F A^T / 2) mean = w - h A g G^T f / 2,        s = F A^T mean - h g G^T f

The matrix on the left is at least I in its symmetric part, whatever A is: stiff plants are as good
as others, which they would not be if A^T A were formed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from hdnn.control.step import System


class Own(NamedTuple):
    """Agents by themselves: x' = x + U z + u + M f, z' = z + V z + v + W f, row by row `(N, ..)`.

    Also J - R of plant and controller times h, A and a.
    """

    M: np.ndarray
    U: np.ndarray
    u: np.ndarray
    V: np.ndarray
    v: np.ndarray
    W: np.ndarray
    whole: np.ndarray
    A: np.ndarray
    a: np.ndarray


class Rest(NamedTuple):
    """What M, U, u and W are made of: M = .. - G Y G^T, U = G Z, u = G z, W = -h P G^T."""

    Y: np.ndarray
    Z: np.ndarray
    z: np.ndarray
    P: np.ndarray


@np.errstate(all="ignore")  # what is not finite has no solution, and the kernel says so
def eliminate(system: System) -> tuple[Own, Rest]:
    """Of agents by themselves."""
    h, whole = system.h, system.h * _array(system.own)
    A, a, g, G = (_array(t) for t in (system.A, system.a, system.g, system.G))
    (N, _, p), G_T = A.shape, G.swapaxes(1, 2)
    F = whole[:, :p, :p] @ A.swapaxes(1, 2)
    port = A @ g
    solved = _solved(A @ F, np.concatenate([A, a[..., None], port], 2))
    rows, offset, inputs = solved[..., :p], solved[..., p : p + 1], solved[..., p + 1 :]
    port_T = h * port.swapaxes(1, 2)
    rest = Rest(0.5 * h * (port_T @ inputs), port_T @ rows, port_T @ offset, g + 0.5 * (F @ inputs))
    M = whole[:, p:, p:] - G @ rest.Y @ G_T
    found = (M, G @ rest.Z, G @ rest.z, F @ rows, F @ offset, -h * (rest.P @ G_T), whole, A, a)
    return Own(*(np.ascontiguousarray(each.reshape(N, -1)) for each in found)), rest


@np.errstate(all="ignore")
def eliminate_adjoint(
    system: System, rest: Rest, to_own: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> np.ndarray:
    """From gradients of M, U, u and W, row by row, to that of G."""
    G, (Y, Z, z, P) = _array(system.G), rest
    (N, c, _), p = G.shape, P.shape[1]
    dM, dU, du, dW = (
        d.reshape(N, *shape)
        for d, shape in zip(to_own, ((c, c), (c, p), (c, 1), (p, c)), strict=True)
    )
    found = du @ z.swapaxes(1, 2) + dU @ Z.swapaxes(1, 2) - system.h * (dW.swapaxes(1, 2) @ P)
    return found - dM @ (G @ Y.swapaxes(1, 2)) - dM.swapaxes(1, 2) @ (G @ Y)


@np.errstate(all="ignore")
def plant_edges(system: System) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The increments of both ends of edges of plants, L times states and l; h times couplings."""
    A, a, couplings = _array(system.A), _array(system.a), system.h * _array(system.couplings)
    (_, R, p), E = A.shape, len(couplings)
    pairs = np.array(system.plant_links, dtype=np.int64).reshape(-1, 2)
    rows, F, offsets = np.zeros((E, 2 * R, 2 * p)), np.zeros((E, 2 * p, 2 * R)), a[pairs]
    first, second = A[pairs[:, 0]], A[pairs[:, 1]]
    rows[:, :R, :p], rows[:, R:, p:] = first, second
    F[:, :p, R:] = couplings @ second.swapaxes(1, 2)
    F[:, p:, :R] = -couplings.swapaxes(1, 2) @ first.swapaxes(1, 2)
    found = F @ _solved(rows @ F, np.concatenate([rows, offsets.reshape(E, 2 * R, 1)], 2))
    return np.ascontiguousarray(found[..., :-1]), np.ascontiguousarray(found[..., -1]), couplings


def _solved(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(I - matrix / 2)^-1 of what is on the right; NaN where rounding has taken I away."""
    whole = np.eye(matrix.shape[-1]) - 0.5 * matrix
    try:
        return np.linalg.solve(whole, right)
    except np.linalg.LinAlgError:
        if len(whole) == 1:
            return np.full_like(right, np.nan)
        both = zip(matrix, right, strict=True)
        return np.concatenate([_solved(one[None], other[None]) for one, other in both])


def _array(given: Tensor) -> np.ndarray:
    return given.detach().contiguous().numpy()
