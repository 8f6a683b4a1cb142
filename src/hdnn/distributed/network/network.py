"""The layers of an H-DNN on a graph: the weights that the nodes of one part own, and their steps.

States are rows: (features of these nodes, batch). Node i owns its rows of K, its biases, and the
blocks of X or J that link it. What all parts compute together is what `hdnn.functional` computes
with the block-sparse matrices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hdnn import activations
from hdnn.base.shapes import layer_steps
from hdnn.distributed.graph.graph import Graph, union
from hdnn.distributed.graph.plan import Part, Plan, Stencil
from hdnn.distributed.network.field import Field, FieldTape
from hdnn.distributed.transport import Local, Transport
from hdnn.errors import OptionError, ShapeError, SparsityError, choose, positive_int
from hdnn.integrators import splitting
from hdnn.networks import HamiltonianNet
from hdnn.networks.initial import INITS

SHEARS = {
    "h2": splitting.SEMI_IMPLICIT_EULER,
    "verlet": splitting.VERLET,
    "yoshida4": splitting.YOSHIDA4,
}
INTEGRATORS = {
    "semi_implicit_euler": "h2",
    "verlet": "verlet",
    "yoshida4": "yoshida4",
    "forward_euler": "h1",
}
State = tuple[Tensor, ...]  # (p, q), or (y,) of H1


class Turn(NamedTuple):
    """One update of a layer: state[target] += scale M K^T sigma(K state[source] + b)."""

    layer: int
    target: int
    source: int
    scale: float
    K: str
    b: str
    sign: int  # M is X or J, or for -1 its adjoint


class GraphNetwork:
    """N layers of H1, H2, Verlet or Yoshida on the nodes of one part of a graph.

    States are rows: `(features of these nodes, batch)`. `draw` gives it initial weights, `load`
    those of a network of all nodes, and `Training` trains it.

    Args:
        plan: the graph, and which part owns which node.
        layers: N.
        transport: carries messages to the other parts; without one, this process owns all nodes.
        network: "h1", "h2", "verlet" or "yoshida4".
        step: h, one number for all layers or one for each.
        activation: the name of sigma.
        X: of all nodes together, `(m, m)` or `(N, m, m)`, for all networks but H1; by default the
            identity.
        J: of all nodes together, `(n, n)` or `(N, n, n)`, for H1; by default the canonical one.
        paired: for H1: node i owns `(p[i], q[i])`, twice its size, rather than a piece of y.
        dtype: of weights and states.

    Raises:
        SparsityError: if the plan has other parts than the transport, its patterns are for another
            number of layers, or X or J links nodes that T does not.
        ShapeError: if layers is no whole number >= 1, or X or J has the wrong shape.
        StepError: if a step is not > 0, or there is not one for each layer.
        OptionError: if network or activation is not known, or X, J or paired is not for this
            network.

    Examples:
        >>> import torch
        >>> from hdnn.distributed import Graph, GraphNetwork, Plan
        >>> net = GraphNetwork(Plan.whole(Graph.ring(8)), layers=4)
        >>> net.draw(seed=0)
        >>> y_N, _ = net.forward(net.split(torch.randn(net.rows, 32)))
        >>> net.join(y_N).shape  # 8 nodes with a pair each, 32 samples
        torch.Size([16, 32])
    """

    def __init__(
        self,
        plan: Plan,
        layers: int,
        transport: Transport | None = None,
        *,
        network: str = "h2",
        step: float | Sequence[float] = 0.5,
        activation: str = "tanh",
        X: Tensor | None = None,
        J: Tensor | None = None,
        paired: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.plan, self.transport = plan, transport or Local()
        if self.transport.parts != plan.parts:
            raise SparsityError(
                f"the plan has {plan.parts} parts, but there are {self.transport.parts} processes."
            )
        self.network = choose("network", network, (*SHEARS, "h1"))
        self.layers, self.dtype = positive_int("layers", layers), dtype
        self.steps = [float(h) for h in layer_steps("step", step, self.layers)]
        self.activation, sigma = activation, activations.get(activation)
        graph, euler = plan.graph, network == "h1"
        if (J is not None and not euler) or (X is not None and euler):
            right, wrong = ("J", "X") if euler else ("X", "J")
            raise OptionError(f"{network} takes {right}, not {wrong}.")
        if graph.layers is not None and graph.layers != self.layers:
            raise SparsityError(
                f"the patterns are for {graph.layers} layers, but the network has {self.layers}."
            )
        if not (paired or (euler and J is not None)):
            raise OptionError("only H1 with a J can have nodes that own pieces of y.")
        self.paired, self.pieces = paired, 1 if euler else 2  # of a state: y, or p and q
        self._first = [0, *itertools.accumulate(graph.sizes)]
        self._links = union(*dict.fromkeys(graph.R))
        self.part = Part(plan, self.transport.part, scale=2 if euler and paired else 1)
        R = Stencil(self.part, graph.R)
        between = J if euler else X
        T = Stencil(self.part, graph.T) if euler or X is not None else None
        self.field = Field(self.part, R, T, self.transport, sigma)
        self.M = None if T is None else self._interconnection(T, between)
        halves = ("",) if euler else ("_p", "_q")
        shapes = {f"K{half}": R.entries for half in halves}
        shapes |= {f"b{half}": self.part.rows for half in halves}
        self.weights = {
            name: torch.zeros(self.layers, count, dtype=dtype) for name, count in shapes.items()
        }
        self.turns = self._turns()

    def _turns(self) -> list[Turn]:
        if self.network == "h1":
            return [Turn(j, 0, 0, h, "K", "b", 1) for j, h in enumerate(self.steps)]
        turns = []
        for j, h in enumerate(self.steps):
            for half, fraction in SHEARS[self.network]:
                if half == "p":  # p - h X^T K_q^T sigma(K_q q + b_q)
                    turns.append(Turn(j, 0, 1, -fraction * h, "K_q", "b_q", -1))
                else:
                    turns.append(Turn(j, 1, 0, fraction * h, "K_p", "b_p", 1))
        return turns

    # Features

    @property
    def features(self) -> int:
        """n, of all nodes together."""
        return (2 if self.paired else 1) * sum(self.plan.graph.sizes)

    @property
    def rows(self) -> int:
        """How many of the features this part owns."""
        return self.pieces * self.part.rows

    def positions_of(self, node: int) -> list[int]:
        """Which features of y a node owns: those of p first, then of q."""
        first, size, m = self._first[node], self.plan.graph.sizes[node], self._first[-1]
        own = range(first, first + size)
        return [*own, *(m + k for k in own)] if self.paired else [*own]

    def positions(self, part: int) -> Tensor:
        """Which features of y the rows of a part are: those of p of all its nodes, then of q."""
        own = [self.positions_of(node) for node in Part(self.plan, part).nodes]
        chunks = zip(*(_chunks(features, self.pieces) for features in own), strict=True)
        return torch.tensor([k for piece in chunks for features in piece for k in features])

    def rows_of(self, node: int) -> list[int]:
        """Which rows of this part are the features of one of its nodes, as in `positions_of`."""
        part, first = self.part, self.part.first[node]
        rows = range(first, first + part.sizes[node])
        return [piece * part.rows + k for piece in range(self.pieces) for k in rows]

    def split(self, y: Tensor) -> State:
        """Rows of all features that this part owns as a state."""
        return tuple(y.chunk(self.pieces))

    def join(self, state: State) -> Tensor:
        """The inverse of `split`."""
        return state[0] if self.pieces == 1 else torch.cat(state)

    # Weights

    def blocks(self, node: int, tensors: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Views of the weights that a node of this part owns: K (N, rows, columns), b (N, rows).

        Or of other tensors that have their names and shapes, such as their gradients.
        """
        R, part = self.field.near.stencil, self.part
        rows, width = part.sizes[node], R.widths[node]
        first, row = R.entry[node], part.first[node]
        found = {}
        for name in self.weights:
            whole = self.weights[name] if tensors is None else tensors[name]
            if name.startswith("K"):
                found[name] = whole[:, first : first + rows * width].view(-1, rows, width)
            else:
                found[name] = whole[:, row : row + rows]
        return found

    def owners(self, name: str) -> Tensor:
        """Of each entry of a layer's weight: which of this part's nodes owns it, (entries,)."""
        R, part = self.field.near.stencil, self.part
        each = [part.sizes[i] * (R.widths[i] if name.startswith("K") else 1) for i in part.nodes]
        return torch.arange(len(each)).repeat_interleave(torch.tensor(each))

    def draw(self, seed: int, init: str = "scaled", gain: float = 1.0) -> None:
        """Draw initial weights, `gain` times: those of each node from a generator of its own.

        "paper" draws all from N(0, 1); "scaled" K from N(0, 1/2w) for w features of neighbours,
        which is `hdnn.networks.initial`'s where all are neighbours, and b = 0.
        """
        choose("init", init, INITS)
        for node in self.part.nodes:
            generator = torch.Generator().manual_seed((seed * 1_000_003 + node) % 2**63)
            for name, block in self.blocks(node).items():
                drawn = torch.randn(block.shape, generator=generator, dtype=torch.float32)
                if init == "scaled":
                    width = self.field.near.stencil.widths[node]
                    drawn *= (2 * width) ** -0.5 if name.startswith("K") else 0.0
                block.copy_(gain * drawn)
        self._mask()

    def load(self, net: HamiltonianNet) -> None:
        """Take this part's weights from a network that has all of them."""
        self._check_alike(net)
        whole = {name: w.detach() for name, w in net.weights().items() if name in self.weights}
        for node in self.part.nodes:
            rows, columns = self._where(node)
            for name, block in self.blocks(node).items():
                value = whole[name][:, rows]
                if name.startswith("K"):
                    value, every = value[:, :, columns], value
                    if value.count_nonzero() < every.count_nonzero():
                        raise SparsityError(
                            f"{name} links {self.plan.graph.called(node)} to nodes that R does "
                            "not; only a K in BlkSprs(R) fits."
                        )
                block.copy_(value)
        self._mask()

    def store(self, net: HamiltonianNet, node: int, blocks: dict[str, Tensor]) -> None:
        """Write the weights of any node into a network that has all of them."""
        self._check_alike(net)
        rows, columns = self._where(node)
        for name, block in blocks.items():
            whole = net.weight(name).detach().clone()
            if name.startswith("K"):
                whole[:, torch.tensor(rows)[:, None], torch.tensor(columns)] = block
            else:
                whole[:, rows] = block
            net.assign(name, whole)

    def shape_of(self, node: int) -> dict[str, torch.Size]:
        """The shapes of the weights of any node."""
        rows, columns = map(len, self._where(node))
        sizes = {"K": (self.layers, rows, columns), "b": (self.layers, rows)}
        return {name: torch.Size(sizes[name[0]]) for name in self.weights}

    def _check_alike(self, net: HamiltonianNet) -> None:
        kind = INTEGRATORS.get(net.integrator)
        if kind != self.network or net.features != self.features or net.layers != self.layers:
            raise ShapeError(
                f"these nodes are a {self.network} of {self.layers} layers and {self.features} "
                f"features, which do not fit {net!r}."
            )

    def _own(self, node: int) -> list[int]:
        """The rows of a node in matrices such as K, K_p or X of all nodes."""
        return _chunks(self.positions_of(node), self.pieces)[0]

    def _where(self, node: int) -> tuple[list[int], list[int]]:
        """The rows and columns of a node's block row in the matrices of all nodes."""
        return self._own(node), [k for i in self._links[node] for k in self._own(i)]

    def _mask(self) -> None:
        """Zero what a layer's own pattern does not free."""
        free = self.field.near.stencil.free
        if free is not None:
            for name in self.weights:
                if name.startswith("K"):
                    self.weights[name] *= free

    def _interconnection(self, T: Stencil, matrix: Tensor | None) -> tuple[Tensor, Tensor]:
        """X or J and its transpose in the free entries of T, (N or 1, entries) each."""
        size = self.features // self.pieces
        if matrix is None:  # node by node [[0, -I], [I, 0]]
            block = self._canonical
        else:
            if matrix.shape not in ((size, size), (self.layers, size, size)):
                raise ShapeError(
                    f"X or J has shape {tuple(matrix.shape)}, but ({size}, {size}) is needed, or "
                    f"({self.layers}, {size}, {size}) for one a layer."
                )
            stack = matrix.detach().to(self.dtype).reshape(-1, size, size)
            self._check_T(stack)

            def block(i: int, k: int) -> Tensor:
                return stack[:, self._own(i)][:, :, self._own(k)]

        def entries(block: Callable[[int, int], Tensor]) -> Tensor:
            rows = (torch.cat([block(i, k) for k in T.links[i]], -1) for i in self.part.nodes)
            return torch.cat([row.flatten(1) for row in rows], 1)

        return entries(block), entries(lambda i, k: block(k, i).mT)

    def _canonical(self, i: int, k: int) -> Tensor:
        """The block of J = [[0, -I], [I, 0]] between two nodes that own pairs."""
        s, r = self.plan.graph.sizes[i], self.plan.graph.sizes[k]
        block = torch.zeros(1, 2 * s, 2 * r, dtype=self.dtype)
        if i == k:
            eye = torch.eye(s, dtype=self.dtype)
            block[0, :s, s:], block[0, s:, :s] = -eye, eye
        return block

    def _check_T(self, stack: Tensor) -> None:
        graph = self.plan.graph
        for i in self.part.nodes:
            own = self._own(i)
            for j, matrix in enumerate(stack):
                for T in graph.T if len(stack) == 1 else [graph.T_of(j)]:
                    links = torch.stack([matrix[own], matrix[:, own].T])
                    links[:, :, [c for k in T[i] for c in self._own(k)]] = 0
                    if bool(links.any()):
                        raise SparsityError(
                            f"X or J links {graph.called(i)} to nodes that T does not; add those "
                            "links to T."
                        )

    def _M(self, turn: Turn, adjoint: bool) -> Tensor | None:
        if self.M is None:
            return None
        stack = self.M[(turn.sign < 0) != adjoint]
        return stack[turn.layer if len(stack) > 1 else 0]

    # Steps

    def forward(self, state: State, keep: bool = True) -> tuple[State, list[FieldTape]]:
        """`y_N` from `y_0`, and what `backward` needs of the way, unless `keep` is False."""
        parts, tape = list(state), []
        for turn in self.turns:
            K, b = self.weights[turn.K][turn.layer], self.weights[turn.b][turn.layer]
            M = self._M(turn, adjoint=False)
            v, kept = self.field.forward(turn.layer, K, b, M, parts[turn.source])
            v *= turn.scale
            parts[turn.target] = parts[turn.target] + v
            if keep:
                tape.append(kept)
        return tuple(parts), tape

    def backward(self, tape: list[FieldTape], gradient: State) -> tuple[State, dict[str, Tensor]]:
        """The gradients of `y_0` and all weights, given what `forward` kept and that of `y_N`."""
        g = list(gradient)
        found = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        for turn in reversed(self.turns):
            K, M = self.weights[turn.K][turn.layer], self._M(turn, adjoint=True)
            up = g[turn.target] * turn.scale
            s, K_grad, b_grad = self.field.backward(turn.layer, K, M, tape.pop(), up)
            found[turn.K][turn.layer] += K_grad
            found[turn.b][turn.layer] += b_grad
            g[turn.source] = g[turn.source] + s
        return tuple(g), found


def _chunks(features: list[int], count: int) -> list[list[int]]:
    size = len(features) // count
    return [features[k : k + size] for k in range(0, len(features), size)]


def of_dense(
    net: HamiltonianNet, owner: Sequence[int] | None = None, transport: Transport | None = None
) -> GraphNetwork:
    """The part of a block-sparse network that this process owns, weights included.

    Args:
        net: an H1, H2, Verlet or Yoshida network with a `Sparsity`.
        owner: the part of each node; by default one part owns all.
        transport: carries messages to the other parts, where there are any.

    Returns:
        The layers of these nodes.

    Raises:
        SparsityError: if the network has no sparsity, its graph is not connected, or owner does not
            fit it.
        OptionError: if the network is of another kind, or its steps, X or J are learned or its
            weights tied.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> ring = torch.eye(4) + torch.eye(4).roll(1, 0) + torch.eye(4).roll(-1, 0)
        >>> whole = hdnn.H2(features=8, layers=2, sparsity=hdnn.Sparsity(ring))
        >>> nodes, y = hdnn.distributed.of_dense(whole), torch.randn(5, 8)
        >>> y_N, _ = nodes.forward(nodes.split(y.T.contiguous()))
        >>> torch.allclose(nodes.join(y_N).T, whole(y), atol=1e-5)
        True
    """
    if net.sparsity is None:
        raise SparsityError("a network without sparsity has no graph; give it a Sparsity(R).")
    kind = INTEGRATORS.get(net.integrator)
    if kind is None:
        raise OptionError(f"{net.integrator} couples all nodes; take H1, H2, Verlet or Yoshida.")
    if net.learn_step or net.tied or getattr(net, f"learn_{net.scheme.interconnection}"):
        raise OptionError("learned steps, X or J and tied weights cannot be shared out by nodes.")
    sizes, paired = net.node_sizes()
    graph = Graph.of(net.sparsity, sizes)
    plan = Plan(graph, [0] * graph.nodes if owner is None else owner)
    found = GraphNetwork(
        plan,
        net.layers,
        transport,
        network=kind,
        step=net.steps().tolist(),
        activation=net.activation,
        paired=paired,
        dtype=next(net.parameters()).dtype,
        **{k: v for k, v in net.constants().items() if k in ("X", "J")},
    )
    found.load(net)
    return found
