"""The layers of a network for the nodes of one process: the rows of K and b, in any scheme."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdnn import activations, schemes
from hdnn.activations import Activation
from hdnn.distributed.exchange import Messages, exchange
from hdnn.distributed.plan import Halo, Plan
from hdnn.errors import choose, positive_float, positive_int
from hdnn.networks import BY_NAME, Network

SCHEMES = {
    "h1": schemes.FORWARD_EULER,
    "h2": schemes.SEMI_IMPLICIT_EULER,
    "verlet": schemes.VERLET,
    "yoshida4": schemes.YOSHIDA4,
}


class GraphForce(NamedTuple):
    """The force `K^T sigma(K x + b)` for one process, like `hdnn.schemes.Force` for all rows.

    The neighbours' x is gathered; the contributions of K^T to their rows are then sent back.

    Args:
        K: the free entries of this process's block rows, node by node: `(N, entries)`.
        b: the biases of these rows, `(N, rows)`.
        halo: the destinations of rows.
        messages: the messages of this process.
    """

    K: Tensor
    b: Tensor
    halo: Halo
    messages: Messages

    def layers(self) -> Iterator[GraphForce]:
        """The force of each layer, one by one."""
        for K, b in zip(self.K, self.b, strict=True):
            yield self._replace(K=K, b=b)

    def at(self, x: Tensor, sigma: Activation) -> Tensor:
        """The force of one layer at the states of this process, `(batch, rows)`.

        This is like `hdnn.schemes.Force`, with a matrix for each node; nodes with the same shape
        are multiplied together.
        """
        halo = self.halo
        state = exchange(x.mT, halo, self.messages)
        batch = len(x)
        contributions = state.new_zeros(halo.extended, batch)
        row = 0
        for group in halo.groups:
            nodes, rows, _ = group.shape
            K = self.K[group.first : group.last]
            K = K.view(group.shape)
            last = row + nodes * rows
            b = self.b[row:last].view(nodes, 1, rows)
            row = last
            x = state.index_select(0, group.columns)
            x = x.view(nodes, -1, batch)
            moved = sigma(x.mT @ K.mT + b) @ K
            moved = moved.mT.flatten(0, 1)
            contributions = contributions.index_add(0, group.columns, moved)
        v = exchange(contributions, halo, self.messages, reverse=True).mT
        if halo.scale == 1:
            return v
        return _turned(v, halo)


def _turned(v: Tensor, halo: Halo) -> Tensor:
    """J v, node by node (-v_q, v_p), where the rows of a node are first p, then q."""
    pieces = []
    for node in halo.plan.nodes:
        first = halo.place[node]
        last = first + halo.height(node)
        p, q = v[:, first:last].chunk(2, 1)
        pieces += [-q, p]
    return torch.cat(pieces, 1)


class GraphNetwork(nn.Module):
    """The part of a network for the nodes of one process; other processes have the other rows.

    States are `(batch, features of these nodes)`, in the order of `positions`. With one process,
    this is the whole network.

    Args:
        plan: the plan of this process.
        messages: the messages to other processes.
        network: "h1", "h2", "verlet" or "yoshida4".
        layers: N, the number of layers.
        step: h, the step size.
        activation: the name of sigma.
        dtype: the dtype of weights and states.

    Examples:
        >>> import torch
        >>> from hdnn.distributed import Graph, GraphNetwork, Messages, Plan
        >>> plan = Plan(Graph.ring(8), owner=[0] * 8)
        >>> net = GraphNetwork(plan, Messages(plan), layers=4)
        >>> net(torch.randn(5, 16)).shape
        torch.Size([5, 16])
    """

    def __init__(
        self,
        plan: Plan,
        messages: Messages,
        *,
        network: str = "h2",
        layers: int = 4,
        step: float = 0.5,
        activation: str = "tanh",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.network = choose("network", network, SCHEMES)
        self.scheme = SCHEMES[network]
        self.layers = positive_int("layers", layers)
        self.step = positive_float("step", step)
        self.activation = activations.get(activation)
        self.plan = plan
        self.messages = messages
        self.halves = ("_p", "_q") if self.scheme.halves else ("",)
        scale = 2 // len(self.halves)
        self.halo = Halo(plan, scale)
        for half in self.halves:
            for name, size in (("K", self.halo.entries), ("b", self.halo.rows)):
                weight = torch.zeros(layers, size, dtype=dtype)
                self.register_parameter(name + half, nn.Parameter(weight))

    @property
    def positions(self) -> Tensor:
        """The columns of this process in the full state."""
        own = self._places(self.plan.nodes)
        if self.scheme.halves:
            middle = self.plan.graph.features // 2
            return torch.cat([own, middle + own])
        return own

    def forward(self, y: Tensor) -> Tensor:
        """The features of this process in y_N, computed from its features in y_0."""
        # Without this, a backward pass with frozen weights would be pruned, and neighbours would
        # wait.
        if torch.is_grad_enabled() and not y.requires_grad:
            y = y.detach().requires_grad_()
        forces: list[Any] = []
        for half in self.halves:
            K = self.get_parameter(f"K{half}")
            b = self.get_parameter(f"b{half}")
            force = GraphForce(K, b, self.halo, self.messages)
            forces.append(force)
        return schemes.run(
            self.scheme,
            y,
            forces,
            self.step,
            self.activation,
        )

    def smoothness(self) -> Tensor:
        """The share of this process in the penalty on differences between neighbouring layers."""
        total = torch.zeros(())
        for weight in self.parameters():
            change = weight.diff(dim=0)
            total = total + change.square().sum()
        return 0.5 * self.step * total

    @torch.no_grad()
    def reset_parameters(self, seed: int, gain: float = 1.0) -> None:
        """Draw each node's weights from its own generator, independently of the processes.

        K is `gain` times N(0, 1/w), where w is the number of features that a row reads; b is 0.
        """
        for node, weights in self._weights():
            own_seed = (seed * 1_000_003 + node) % 2**63
            generator = torch.Generator().manual_seed(own_seed)
            for name, weight, _ in weights:
                drawn = torch.randn(
                    weight.shape,
                    generator=generator,
                    dtype=torch.float64,
                )
                scale = 0.0
                if name.startswith("K"):
                    scale = gain * weight.shape[-1] ** -0.5
                weight.copy_(scale * drawn)

    # One network of all nodes

    def whole(self) -> Network:
        """A network of all nodes with the same options and initial weights."""
        return BY_NAME[self.network](
            self.plan.graph.features,
            self.layers,
            step=self.step,
            activation=self.activation.name,
            sparsity=self.plan.graph.patterns(),
            dtype=next(self.parameters()).dtype,
        )

    @torch.no_grad()
    def load(self, net: Network) -> None:
        """Take the weights of this process from a network of all nodes."""
        for _, weights in self._weights():
            for name, weight, place in weights:
                weight.copy_(net.weight(name)[place])

    @torch.no_grad()
    def gather(self) -> Network | None:
        """A network with the weights of all nodes, collected at the root along the tree."""
        net = self.whole()
        totals = {}
        for name, _ in self.named_parameters():
            totals[name] = torch.zeros_like(net.weight(name))
        for _, weights in self._weights():
            for name, weight, place in weights:
                totals[name][place] = weight
        for name, total in totals.items():
            net.assign(name, self.messages.up(total))
        return net if self.plan.is_root else None

    def _weights(self) -> Iterator[tuple[int, list[tuple[str, Tensor, Any]]]]:
        """Each node of this process, with views of its weights and their full-network indices.

        K is (N, rows, columns), b is (N, rows).
        """
        nodes = iter(self.plan.nodes)
        row = 0
        every = slice(None)
        for group in self.halo.groups:
            count, height, width = group.shape
            first = group.first
            for node in islice(nodes, count):
                last = first + height * width
                rows = self._places([node])
                columns = self._places(self.plan.graph.R[node])
                weights: list[tuple[str, Tensor, Any]] = []
                for name, weight in self.named_parameters():
                    if name.startswith("K"):
                        entries = weight[:, first:last]
                        view = entries.view(-1, height, width)
                        place = (every, rows[:, None], columns)
                    else:
                        view = weight[:, row : row + height]
                        place = (every, rows)
                    weights.append((name, view, place))
                row += height
                first = last
                yield node, weights

    def _places(self, nodes: list[int]) -> Tensor:
        """The indices of some nodes in one half of the full state, or in the whole state."""
        both = not self.scheme.halves
        return self.plan.graph.places(nodes, both=both)
