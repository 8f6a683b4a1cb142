"""The output layer of a graph: scores are sums over nodes, labels are known at the root only."""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn.distributed.messages.tree import Spanning
from hdnn.distributed.network.network import GraphNetwork
from hdnn.heads import RegressionHead
from hdnn.training.output import Head, OutputProblem, put


class NodeHead:
    """W y + w, of which each node owns the block of W for its features; the root owns w too.

    `weights` are W (outputs, rows of this part) and w, (outputs, 1) at the root and empty
    elsewhere.
    """

    def __init__(self, net: GraphNetwork, tree: Spanning, head: Head) -> None:
        self.net, self.tree, self.head = net, tree, head
        positions = [net.positions(part) for part in range(net.plan.parts)]
        self.rows = [len(rows) for rows in positions]
        self.order = torch.cat([positions[part] for part in tree.order])
        W = head.weight.detach()[:, positions[net.part.number]].clone()
        w = head.bias.detach().clone()[:, None] if tree.is_root else W[:, :0].clone()
        self.weights = {"W": W, "w": w}
        nodes = net.part.nodes
        self.features = [net.rows_of(node) for node in nodes]
        # The number of the node, in this part, that owns each column of W and of w.
        owner = torch.empty(net.rows, dtype=torch.int64)
        for number, rows in enumerate(self.features):
            owner[rows] = number
        root = [nodes.index(net.plan.tree.root)] if tree.is_root else []
        self.owners = {"W": owner, "w": torch.tensor(root, dtype=torch.int64)}

    # To the root and back

    def gather(self, y: Tensor) -> Tensor | None:
        """At the root y_N of all nodes, (batch, n); elsewhere None."""
        whole = self.tree.gather(y, self.rows)
        if whole is None:
            return None
        found = torch.empty_like(whole)
        found[self.order] = whole
        return found.T.contiguous()

    def scatter(self, g: Tensor | None, example: Tensor) -> Tensor:
        """This part's rows of the root's (batch, n)."""
        x = None if g is None else g.T[self.order].contiguous()
        return self.tree.scatter(x, self.rows, example)

    def share(self) -> None:
        """Give each node its block of the root's output layer."""
        W = self.weights["W"]
        whole = self.head.weight.detach() if self.tree.is_root else None
        W.copy_(self.scatter(whole, W.T.contiguous()).T)
        if self.tree.is_root:
            self.weights["w"].copy_(self.head.bias.detach()[:, None])

    def collect(self) -> None:
        """Bring the blocks of all nodes into the root's output layer."""
        whole = self.gather(self.weights["W"].T.contiguous())
        if whole is not None:
            put(self.head, torch.cat([whole, self.weights["w"]], 1))

    # Scores

    def scores(self, y: Tensor) -> Tensor:
        """(batch, outputs), at every part: partial sums go up the tree, the total comes down."""
        W = self.weights["W"]
        partial = y.new_zeros(0)
        for k in range(max(map(len, self.features))):
            some = [number for number, rows in enumerate(self.features) if len(rows) > k]
            rows = [self.features[number][k] for number in some]
            terms = W[:, rows].T[:, :, None] * y[rows][:, None, :]
            if k == 0:
                partial = terms
            else:
                partial[some] = partial[some] + terms
        total = self.tree.sum(partial)
        w = self.tree.broadcast(
            self.weights["w"].clone() if self.tree.is_root else total[:, :1].clone()
        )
        return (total + w).T.contiguous()

    def predict(self, y: Tensor) -> Tensor:
        """Labels or values for each sample."""
        return self.head.predict(self.scores(y))

    def descend(
        self, y: Tensor, t: Tensor | None, share: float = 1.0
    ) -> tuple[Tensor, dict[str, Tensor], tuple[float, float] | None]:
        """The gradients of y_N and of the own weights; at the root also loss and accuracy.

        Gradients are `share` times those of the mean loss: these samples' share of a minibatch.
        """
        scores = self.scores(y)
        found, residual = None, torch.empty_like(scores)
        if self.tree.is_root:
            assert t is not None
            problem = OutputProblem(self.head, y.T[:, :1], t, None, y.dtype)
            residual = (problem.residual(scores) * share).contiguous()
            loss, correct = float(problem.loss(scores)), 0.0
            if not isinstance(self.head, RegressionHead):
                correct = float((self.head.predict(scores) == t).double().mean())
            found = (loss, correct)
        r = self.tree.broadcast(residual).T.contiguous()  # (outputs, batch)
        W = self.weights["W"]
        g = _outer(W.T, r)
        gradients = {"W": torch.stack([(y * one).sum(-1) for one in r])}
        gradients["w"] = r.sum(-1, keepdim=True)[:, : self.weights["w"].shape[1]]
        return g, gradients, found


def _outer(A: Tensor, r: Tensor) -> Tensor:
    """A r, one term after the other."""
    total = A[:, :1] * r[0]
    for k in range(1, len(r)):
        total = total + A[:, k : k + 1] * r[k]
    return total
