"""Which node may talk to which: block patterns R of K and T of J, and the locality condition.

Nodes are numbered from 0. Patterns are binary (M, M) matrices with the paper's algebra: a sum or a
product is 1 where the ordinary one is not 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from hdnn.errors import SparsityError


def binary(name: str, pattern: Any) -> Tensor:
    """A pattern given as a tensor, an array or nested lists, as a boolean tensor (..., M, M)."""
    try:
        A = torch.as_tensor(pattern).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise SparsityError(
            f"{name} must be a binary matrix, but got {type(pattern).__name__}; "
            "give an (M, M) array of 0 and 1."
        ) from error
    if A.ndim not in (2, 3) or A.shape[-1] != A.shape[-2] or A.numel() == 0:
        raise SparsityError(
            f"{name} must be (M, M), or (N, M, M) for a pattern a layer, "
            f"but has shape {tuple(A.shape)}."
        )
    if not bool(((A == 0) | (A == 1)).all()):
        raise SparsityError(f"{name} must hold 0 and 1 only; use (matrix != 0).")
    return A.bool()


def product(*patterns: Tensor) -> Tensor:
    """The binary product of patterns."""
    result = patterns[0].double()
    for pattern in patterns[1:]:
        result = ((result @ pattern.double()) > 0).double()
    return result > 0


def dependency(T: Any, R: Any) -> Tensor:
    """T R^T R + R^T R T: on whom each node's forward and backward update depend."""
    T, R = binary("T", T), binary("R", R)
    _check_alike(T=T, R=R)
    return product(T, R.mT, R) | product(R.mT, R, T)


def is_local(T: Any, R: Any, S: Any) -> bool:
    """Whether T R^T R + R^T R T <= S: all updates use neighbours only (eq:sparsity_invariance)."""
    needed, S = dependency(T, R), binary("S", S)
    _check_alike(R=needed, S=S)
    return bool((needed <= S).all())


def _check_alike(**patterns: Tensor) -> None:
    """Raise unless all patterns are for the same nodes, and for as many layers where one each."""
    (first, a), *others = patterns.items()
    for name, b in others:
        if a.shape[-1] != b.shape[-1]:
            raise SparsityError(
                f"{name} is for {b.shape[-1]} nodes, but {first} is for {a.shape[-1]}."
            )
        if a.ndim == b.ndim == 3 and len(a) != len(b):
            raise SparsityError(f"{name} is for {len(b)} layers, but {first} is for {len(a)}.")


def _whole(sizes: Any, nodes: int) -> tuple[int, ...]:
    """The features of each node, as many as there are nodes."""
    given: list[Any] = list(sizes) if isinstance(sizes, Iterable) else []
    if len(given) != nodes or not all(isinstance(k, Integral) and int(k) >= 1 for k in given):
        raise SparsityError(
            f"sizes must be {nodes} whole numbers >= 1, one a node, but got {sizes!r}."
        )
    return tuple(int(size) for size in given)


class Sparsity:
    """Block patterns of a distributed H-DNN: K in BlkSprs(R), X or J in BlkSprs(T).

    `R` is (M, M), or (N, M, M) for one a layer. `T`, symmetric, is by default what X or J uses.
    `S` is the communication graph; where given, the locality condition is checked. `sizes` are the
    features of each node: they add up to m = n/2 where node i owns the pair (p[i], q[i]), or to n
    where it owns the i-th piece of y (forward Euler and midpoint only). By default all alike: pairs
    of H2 and its relatives, pieces of H1 and midpoint networks.
    """

    def __init__(
        self, R: Any, T: Any = None, S: Any = None, sizes: Sequence[int] | None = None
    ) -> None:
        self.R = binary("R", R)
        self.T = None if T is None else binary("T", T)
        self.S = None if S is None else binary("S", S)
        self.nodes = self.R.shape[-1]
        self.sizes = None if sizes is None else _whole(sizes, self.nodes)
        for name, pattern in (("R", self.R), ("T", self.T), ("S", self.S)):
            if pattern is None:
                continue
            if name != "R":
                _check_alike(**{"R": self.R, name: pattern})
            if not bool(pattern.diagonal(dim1=-2, dim2=-1).all()):
                raise SparsityError(
                    f"every node is its own neighbour, but {name} has a 0 on its diagonal; "
                    f"use {name} + I."
                )
        if self.T is not None and not bool((self.T.mT == self.T).all()):
            raise SparsityError("T must be symmetric, because J is skew-symmetric; use T + T^T.")
        if self.T is not None:
            self.check_local(self.T)

    def check_local(self, T: Tensor) -> None:
        """Raise if S is known and the updates need nodes that are no neighbours in it."""
        if self.S is None or is_local(T, self.R, self.S):
            return
        beyond = (dependency(T, self.R) & ~self.S).nonzero()[:, -2:].unique(dim=0).tolist()
        pairs = ", ".join(f"{i} -> {k}" for i, k in beyond[:4]) + (
            " ..." if len(beyond) > 4 else ""
        )
        raise SparsityError(
            "the patterns break the locality condition T R^T R + R^T R T <= S: "
            f"nodes would need {pairs}, which S does not link; "
            "remove edges from R or T, or add links to S."
        )

    def node_sizes(self, features: int) -> tuple[int, ...]:
        """The sizes, or as many features for each node."""
        if self.sizes is not None:
            return self.sizes
        if features % self.nodes:
            raise SparsityError(
                f"{features} features cannot be shared alike by {self.nodes} nodes; give sizes."
            )
        return (features // self.nodes,) * self.nodes

    def to_config(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {
            "R": self.R.int().tolist(),
            "T": None if self.T is None else self.T.int().tolist(),
            "S": None if self.S is None else self.S.int().tolist(),
            "sizes": None if self.sizes is None else list(self.sizes),
        }

    def __repr__(self) -> str:
        own = self.R.reshape(-1, self.nodes, self.nodes)
        links = int(own.any(0).sum()) - self.nodes
        return f"Sparsity({self.nodes} nodes, {links} links in R)"
