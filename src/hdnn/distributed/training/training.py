"""Coordinate descent on a graph: every part runs this same loop, on the rows that it owns.

The hidden layers and their gradients need neighbours only. The features y_N go up the tree to the
root, which alone knows the labels and solves the output layer; their gradient comes down. With
`solver="joint"` each node keeps its block of the output layer, and only partial scores go up.
Minibatches are drawn from one seed, the same for all parts and the same as `hdnn.training.fit`.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn.distributed.graph.plan import Part
from hdnn.distributed.messages.handshake import shake_hands
from hdnn.distributed.messages.replicas import Replicas
from hdnn.distributed.messages.tree import Spanning
from hdnn.distributed.network.head import NodeHead
from hdnn.distributed.network.network import GraphNetwork
from hdnn.distributed.training.shards import Shards
from hdnn.distributed.transport import DistributedError
from hdnn.errors import DataError, TrainingError
from hdnn.heads import RegressionHead
from hdnn.networks import HamiltonianNet
from hdnn.training import identity, schedule
from hdnn.training.checks import OPTIONS, check_options
from hdnn.training.loop import fit
from hdnn.training.output import Head, Output

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam
REFIT_ROWS = 4096  # samples whose features go up to the root at once
DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(fit).parameters.items()
    if name in OPTIONS
}


@dataclass
class Progress:
    """What the root knows of the training: one entry an epoch.

    Attributes:
        loss: the mean loss of the minibatches.
        accuracy: their mean accuracy; empty for regression.
    """

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)  # empty for regression


class Training:
    """One training, as one part of the graph sees it.

    Args:
        net: the hidden layers of this part.
        head: the output layer for all features; used by the root, and only described by others.
        x: `(rows, samples)`: the features of `y_0` that this part owns.
        t: labels or targets of all samples; the root's only.
        folder: the `pathlib.Path` where each node keeps its shards, if anywhere.
        save_every: steps between two shards (default: an epoch).
        replicas: others that train the same nodes on other samples of each minibatch.
        tell: called by the root with a dict after each epoch.
        name: how to call a part in messages, given its number.
        facts: what else must be the same in all parts, by the names of the handshake.
        **options: of `hdnn.training.fit`, such as `epochs`, `batch` or `learning_rate`.

    Raises:
        TrainingError: if an option is not known or has no sensible value, or the optimizer is not
            adam.
        OptionError: if a word is not among the choices of its option.
        DataError: if x or t does not fit the nodes, the samples or the head, or is not finite.
        DistributedError: if other parts have other data, options or versions, or are lost.

    Examples:
        >>> import torch
        >>> import hdnn
        >>> from hdnn.distributed import Graph, GraphNetwork, Plan, Training
        >>> net = GraphNetwork(Plan.whole(Graph.grid(2, 2)), layers=2)
        >>> net.draw(seed=0)
        >>> x = torch.randn(net.rows, 100)
        >>> t = (x[0] > 0).long()
        >>> progress = Training(net, hdnn.SigmoidHead(net.features), x, t, epochs=2).run()
        >>> progress.accuracy[-1] > 0.9
        True
    """

    def __init__(
        self,
        net: GraphNetwork,
        head: Head,
        x: Tensor,
        t: Tensor | None = None,
        *,
        folder: Path | None = None,
        save_every: int | None = None,
        replicas: Replicas | None = None,
        tell: Callable[[dict[str, Any]], None] | None = None,
        name: Callable[[int], str] = "part {}".format,
        facts: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        unknown = sorted(set(options) - set(DEFAULTS))
        if unknown:
            raise TrainingError(f"there is no option {unknown[0]}; see {', '.join(DEFAULTS)}.")
        self.options = check_options(**{**DEFAULTS, **options})
        if self.options["optimizer"] != "adam":
            raise TrainingError("on a graph the optimizer is adam; leave it out.")
        self.net, self.x, self.tell, self.replicas = net, x, tell, replicas or Replicas()
        self.part, self.transport = net.part, net.transport
        self.tree = Spanning(self.part, self.transport)
        self.is_root = self.tree.is_root
        self._check_data(head, t)
        self.t = t if t is None or isinstance(head, RegressionHead) else t.long()
        self.samples, self.batch = x.shape[1], self.options["batch"]
        self.batches = math.ceil(self.samples / self.batch)
        self.replicas.check(self.samples, self.batch)
        self.steps = self.batches * self.options["epochs"]
        self.head = NodeHead(net, self.tree, head)
        self.joint = self.options["solver"] == "joint"
        self.output = None
        if self.is_root and not self.joint:
            y = x.new_empty(min(self.batch, self.samples), net.features)
            o = self.options
            self.output = Output(head, o["solver"], o["ridge"], o["learning_rate"], y)
        trained = {**net.weights, **(self.head.weights if self.joint else {})}
        self.adam = NodeAdam(trained)
        self.owners = {name: net.owners(name) for name in net.weights}
        self.owners |= self.head.owners
        self.columns = {name: self._columns(owners) for name, owners in self.owners.items()}
        self.generator = torch.Generator().manual_seed(self.options["seed"])
        self.progress, self.sums, self.step = Progress(), [0.0, 0.0], 0
        self.save_every = save_every or self.batches
        own = {
            "network": [net.network, net.activation, net.steps, net.features, repr(head)],
            "layers": net.layers,
            "dtype": str(net.dtype),
            "batch": self.batch,
            "samples": self.samples,
            "options": {k: v for k, v in self.options.items() if k != "batch"},
        }
        shake_hands(self.transport, net.plan, {**own, **(facts or {})}, name)
        training = repr([net.plan.graph.digest(), net.plan.tree.root, sorted(own.items())])
        kept = () if folder is None else self.part.nodes
        self.shards = Shards(folder or Path(), kept, training, net.plan.graph.key)

    def _check_data(self, head: Head, t: Tensor | None) -> None:
        x, rows = self.x, self.net.rows
        if x.ndim != 2 or x.shape[0] != rows or not x.shape[1]:
            raise DataError(
                f"x must be ({rows}, samples), the features of this part, but has shape "
                f"{tuple(x.shape)}."
            )
        if x.dtype != self.net.dtype:
            raise DataError(f"x is {x.dtype}, but the network {self.net.dtype}; use x.to(..).")
        if not bool(torch.isfinite(x).all()):
            raise DataError("x has a NaN or an infinite number; clean the data first.")
        if self.is_root and (t is None or len(t) != x.shape[1]):
            raise DataError(f"the root needs {x.shape[1]} labels t, one for each sample.")
        if self.is_root and t is not None and not isinstance(head, RegressionHead):
            classes = max(2, head.outputs)
            if t.is_floating_point() or int(t.min()) < 0 or int(t.max()) >= classes:
                raise DataError(
                    f"labels must be whole numbers in 0 .. {classes - 1} for this head."
                )
        if head.features != self.net.features:
            raise DataError(
                f"the head takes {head.features} features, but the nodes have {self.net.features}."
            )

    # Running

    def run(self, resume: bool = False) -> Progress:
        """Train to the end, from the newest common step if `resume`; return how it went."""
        self.shards.prepare()
        self._resume(resume)
        begun = self.step // self.batches
        self.begun = self.step, time.monotonic()
        for epoch in range(self.options["epochs"]):
            order = torch.randperm(self.samples, generator=self.generator)
            if epoch < begun:
                continue
            for index in order.split(self.batch)[self.step % self.batches :]:
                self._step(index)
                if self.step % self.batches == 0:
                    self._end_epoch()
                if self.step % self.save_every == 0:
                    self._save()
        if self.joint:
            self.head.collect()
        else:
            self._refit()
        if self.step % self.save_every:
            self._save()
        return self.progress

    def _step(self, minibatch: Tensor) -> None:
        index = self.replicas.share(minibatch)
        state, tape = self.net.forward(self.net.split(self.x[:, index].contiguous()))
        y = self.net.join(state)
        done = self.step / self.steps
        t = None if self.t is None else self.t[index]
        if self.joint:
            g, gradients, outcome = self.head.descend(y, t, len(index) / len(minibatch))
        else:
            g, outcome = self._output(y, minibatch)
            gradients = {}
        if not bool(torch.isfinite(g).all()):
            raise DistributedError(
                f"the loss is not finite in epoch {self.step // self.batches + 1}: the training "
                "has diverged; lower learning_rate, clip the gradients or take a smaller step h."
            )
        _, hidden = self.net.backward(tape, self.net.split(g))
        gradients = self.replicas.sum({**hidden, **gradients})
        self._regularise(gradients, done)
        clip = self.options["clip"]
        if clip is not None:
            norm = math.sqrt(float(self.tree.sum(self._squares(gradients))))
            if norm > clip:
                gradients = {name: gradient * (clip / norm) for name, gradient in gradients.items()}
        options = self.options
        for name, gradient in gradients.items():
            decay = options["weight_decay" if name in hidden else "ridge"]
            if decay:
                gradients[name] = gradient + self.adam.weights[name] * decay
        change = schedule.factor(done, self.steps, options["warmup"], options["schedule"])
        self.adam.step(gradients, options["learning_rate"] * change)
        self.step += 1
        if outcome is not None:
            self.sums[0] += outcome[0]
            self.sums[1] += outcome[1]

    def _output(self, y: Tensor, minibatch: Tensor) -> tuple[Tensor, tuple[float, float] | None]:
        """The gradient of y_N; at the root also loss and accuracy."""
        whole = self.head.gather(y)
        if whole is None:
            return self.head.scatter(None, y), None
        assert self.output is not None
        assert self.t is not None
        whole = self.replicas.gather(whole, len(minibatch))
        gradient, found = torch.full_like(whole, math.nan), (math.nan, 0.0)
        if bool(torch.isfinite(whole).all()):
            outcome = self.output.solve(whole, self.t[minibatch])
            found = (outcome.loss, outcome.correct)
            if math.isfinite(outcome.loss):
                gradient = outcome.gradient
        return self.head.scatter(self.replicas.share(gradient), y), found

    def _regularise(self, gradients: dict[str, Tensor], done: float) -> None:
        """Add the gradients of the smoothness R_K."""
        options = self.options
        alpha = options["smoothness"]
        if options["smoothing"] == "cosine":
            alpha *= schedule.cosine(done)
        steps = torch.tensor(self.net.steps[1:], dtype=self.net.dtype)[:, None] * alpha
        free = self.net.field.near.stencil.free
        for name, weight in self.net.weights.items():
            g = gradients[name]
            if alpha and self.net.layers > 1:
                jumps = weight.diff(dim=0) * steps
                g[1:] += jumps
                g[:-1] -= jumps
            if free is not None and name.startswith("K"):
                g *= free

    def _squares(self, gradients: dict[str, Tensor]) -> Tensor:
        """The squared norm of each node's gradients, (nodes, 1)."""
        total = torch.zeros(len(self.part.nodes), dtype=torch.float64)
        for name, gradient in gradients.items():
            square = gradient.double().square()
            for layer in square:
                total.index_add_(0, self.owners[name], layer)
        return total[:, None]

    def _end_epoch(self) -> None:
        if not self.is_root:
            return
        self.progress.loss.append(self.sums[0] / self.batches)
        if not isinstance(self.head.head, RegressionHead):
            self.progress.accuracy.append(self.sums[1] / self.batches)
        self.sums = [0.0, 0.0]
        if self.tell is not None:
            last = {name: values[-1] for name, values in asdict(self.progress).items() if values}
            (step, start), now = self.begun, time.monotonic()
            left = (now - start) / (self.step - step) * (self.steps - self.step)
            news = {"epoch": len(self.progress.loss), "step": self.step, "seconds_left": left}
            self.tell({**news, **last})

    def _refit(self) -> None:
        """Fit the output layer to all data, and give each node its block."""
        found = []
        for part in self.x.split(REFIT_ROWS, 1):
            state, _ = self.net.forward(self.net.split(part.contiguous()), keep=False)
            whole = self.head.gather(self.net.join(state))
            if whole is not None:
                found.append(whole)
        if self.is_root:
            assert self.output is not None
            assert self.t is not None
            self.output.refit(torch.cat(found), self.t, None, self.generator, self.batch)
        self.head.share()

    # At the end

    def traffic(self) -> list[tuple[int, int, int, int]]:
        """`(from, to, messages, bytes)` of all pairs of parts that talked; the root's only."""
        return self.tree.traffic()

    def assemble(self, net: HamiltonianNet | None) -> HamiltonianNet | None:
        """Bring all weights to the root and write them into `net`, which has room for them."""
        if net is None:
            return None
        plan = self.net.plan
        shapes = [self.net.shape_of(node) for node in range(plan.graph.nodes)]
        sizes = [sum(shape.numel() for shape in each.values()) for each in shapes]
        counts = [sum(sizes[i] for i in nodes) for nodes in plan.nodes_of]
        own = [w.reshape(-1) for i in self.part.nodes for w in self.net.blocks(i).values()]
        whole = self.tree.gather(torch.cat(own), counts)
        if whole is None:
            return None
        nodes = [node for part in self.tree.order for node in Part(plan, part).nodes]
        for node, flat in zip(nodes, whole.split([sizes[i] for i in nodes]), strict=True):
            named = shapes[node].items()
            blocks = flat.split([shape.numel() for _, shape in named])
            views = {k: b.view(shape) for (k, shape), b in zip(named, blocks, strict=True)}
            self.net.store(net, node, views)
        return net

    # Shards

    @cached_property
    def data(self) -> dict[int, str]:
        """A digest of the samples of each node, at the root with their labels."""
        root, found = self.net.plan.tree.root, {}
        for node in self.part.nodes:
            t = [self.t] if node == root and self.t is not None else []
            found[node] = identity.digest([self.x[self.net.rows_of(node)], *t])
        return found

    def _columns(self, owners: Tensor) -> dict[int, Tensor]:
        """The entries of each node, in their order."""
        counts = owners.bincount(minlength=len(self.part.nodes)).tolist()
        parts = owners.argsort(stable=True).split(counts)
        return dict(zip(self.part.nodes, parts, strict=True))

    def _own(self, node: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """All that a node's shard holds: name, tensor, and the node's columns of it."""
        for kind, tensors in (("w", self.adam.weights), ("m", self.adam.m), ("v", self.adam.v)):
            for name, tensor in tensors.items():
                yield f"{kind}.{name}", tensor, self.columns[name][node]

    def _save(self) -> None:
        if self.replicas.index:
            return  # the shards of all replicas are the same
        for node in self.shards.nodes:
            note: dict[str, Any] = {"data": self.data[node]}
            if node == self.net.plan.tree.root:
                note |= {"progress": asdict(self.progress), "sums": self.sums}
            tensors = {name: whole[:, columns] for name, whole, columns in self._own(node)}
            self.shards.save(node, self.step, tensors, note)

    def _resume(self, wanted: bool) -> None:
        """Go on from the newest step of which all nodes have a shard, if all parts want to."""
        step = self.shards.newest() if wanted else -1
        while True:
            agreed = self.tree.minimum(step)
            if agreed < 0:
                return  # no common step: all start from the beginning
            step = self.shards.newest(below=agreed + 1)
            if self.tree.minimum(step) == agreed:
                break
        for node in self.part.nodes:
            tensors, note = self.shards.load(node, agreed, self.data[node])
            for name, whole, columns in self._own(node):
                whole[:, columns] = tensors[name]
            if "progress" in note:
                self.progress, self.sums = Progress(**note["progress"]), note["sums"]
        self.step = self.adam.count = agreed


class NodeAdam:
    """Adam with each product and each sum rounded by itself: the same bits for any parts.

    PyTorch's Adam multiplies and adds in one rounding, or not, depending on where in a tensor a
    number lies: a weight's bits would depend on which nodes share its tensor.
    """

    def __init__(self, weights: dict[str, Tensor], betas: tuple[float, float] = BETAS) -> None:
        self.weights, self.betas, self.count = weights, betas, 0
        self.m = {name: torch.zeros_like(w) for name, w in weights.items()}
        self.v = {name: torch.zeros_like(w) for name, w in weights.items()}

    def step(self, gradients: dict[str, Tensor], rate: float) -> None:
        """One step down these gradients, at this learning rate."""
        self.count += 1
        (b1, b2), k = self.betas, self.count
        for name, g in gradients.items():
            m, v = self.m[name], self.v[name]
            m.mul_(b1).add_(g * (1 - b1))
            v.mul_(b2).add_(g * g * (1 - b2))
            size = (v.sqrt() / math.sqrt(1 - b2**k)).add_(EPS)
            self.weights[name].sub_(m / size * (rate / (1 - b1**k)))
