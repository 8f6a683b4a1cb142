"""Training on a graph: each process runs this loop on the features and weights of its nodes.

Hidden layers and their gradients need only neighbours. Only the root, the process that owns node 0,
has the labels. In small networks, the last features go up a tree of linked processes to the root,
which solves the output layer; the gradient of these features comes back down. In large networks
(`solver="joint"`), each node keeps its block of the output layer, and only sums of scores go up.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from hdnn import io
from hdnn._version import __version__
from hdnn.data import planar
from hdnn.distributed import nodes
from hdnn.distributed.exchange import Messages, collect, connect, world
from hdnn.distributed.graph import Graph
from hdnn.distributed.network import GraphNetwork
from hdnn.distributed.plan import Plan, partition
from hdnn.errors import CheckpointError, ConvergenceError, HDNNError, choose
from hdnn.heads import Augment, Model, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.training import checkpoint
from hdnn.training.fit import Options
from hdnn.training.output import Outcome, Output, features
from hdnn.training.recipes import cosine, rate_factor

NEWTON = 256  # up to so many features, the root solves the output layer for each minibatch
DTYPES = {"float32": torch.float32, "float64": torch.float64}
DEFAULTS = {
    "learning_rate": 2e-2,
    "warmup": 0.2,
    "clip": 0.1,
    "ridge": 5e-5,
    "smoothness": 5e-3,
    "smoothing": "cosine",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a network on a graph; `train` also takes those of `hdnn.training.fit`.

    Attributes:
        network: "h1", "h2", "verlet" or "yoshida4".
        layers: N, the number of layers.
        step: h, the step size.
        activation: the name of sigma.
        gain: the size of the initial weights.
        dtype: "float32" or "float64".
        seed: the seed for data, weights and the order of samples.
        placement: for each input of a table, the feature that receives it; saved with the model.
    """

    network: str = "h2"
    layers: int = 4
    step: float = 0.5
    activation: str = "tanh"
    gain: float = 1.0
    dtype: str = "float32"
    seed: int = 0
    placement: Sequence[int] | None = None


def train(
    graph: Graph,
    data: str | os.PathLike[str] = "swiss_roll",
    *,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    gather: bool = False,
    timeout: float = 60.0,
    tell: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train one network on a graph, as one process of several.

    Under torchrun, every process calls this function with the same arguments; without torchrun, one
    process owns all nodes. Messages go only to processes that own linked nodes, and no weight
    leaves its node unless `gather` is true.

    Args:
        graph: the nodes and their links.
        data: "swiss_roll", "double_moons", "double_circles", or a folder of node files: see
            `write_nodes`.
        folder: the folder for each process's checkpoint after each epoch, and for metrics.json and
            the model at the end.
        resume: resume the training run in `folder`, or start one there if it is empty.
        gather: collect the weights of all nodes at the root at the end, as one model.
        timeout: seconds after which a silent process counts as lost.
        tell: a function that is called at the root with a dict after each epoch.
        **options: fields of `Settings` and of `hdnn.training.fit`, such as `layers` or `epochs`.

    Returns:
        The metrics at the root; with `gather`, "model" is the `hdnn.Model` of all nodes. An empty
            dict elsewhere.

    Raises:
        OptionError: if the graph cannot be trained on, an option is out of range, or processes were
            started with different arguments.
        DataError: if the data do not fit the nodes.
        CheckpointError: if the folder holds a different training run.
        ConvergenceError: if training diverges.
        LostError: if another process is lost.

    Examples:
        >>> from hdnn.distributed import Graph, train
        >>> metrics = train(Graph.ring(4), "double_moons", layers=2, epochs=1)
        >>> metrics["processes"], metrics["test_accuracy"] > 0.85
        (1, True)
    """
    graph.check()
    own: dict[str, Any] = {}
    numbers: dict[str, Any] = {**DEFAULTS, "solver": "newton"}
    if graph.features > NEWTON:
        numbers["solver"] = "joint"
    for name, value in options.items():
        group = own if hasattr(Settings, name) else numbers
        group[name] = value
    settings = Settings(**own)
    choose("dtype", settings.dtype, DTYPES)
    numbers["seed"] = settings.seed
    rank, size = world()
    plan = Plan(graph, partition(graph, size), rank)
    messages = connect(plan, timeout)
    try:
        training = Training(messages, str(data), settings, Options(**numbers))
        training.open(folder, resume)
        training.run(tell)
        metrics = training.metrics()
        model = training.gather() if gather else None
    except HDNNError as error:
        messages.report(f"{plan.name(rank)} says: {error}")
        raise
    messages.close()
    if not plan.is_root:
        return {}
    if folder is not None:
        io.write_json(Path(folder) / "metrics.json", metrics)
        if model is not None:
            io.save(model, Path(folder) / "model.safetensors")
    return metrics if model is None else {**metrics, "model": model}


class Training:
    """A training run in one process; its state is always the state at the end of an epoch."""

    def __init__(
        self,
        messages: Messages,
        data: str,
        settings: Settings,
        options: Options,
    ) -> None:
        self.start = time.perf_counter()
        self.messages = messages
        self.plan = messages.plan
        self.graph = messages.plan.graph
        self.data = data
        self.settings = settings
        self.options = options
        dtype = DTYPES[settings.dtype]
        self.net = GraphNetwork(
            self.plan,
            messages,
            network=settings.network,
            layers=settings.layers,
            step=settings.step,
            activation=settings.activation,
            dtype=dtype,
        )
        self.net.reset_parameters(settings.seed, settings.gain)
        self.positions = self.net.positions
        self.samples, classes = nodes.load(
            data, self.plan, self.positions, settings.seed, dtype
        )
        seed = settings.seed + 1
        # The output layer of all nodes; in joint training, the own block is trained.
        self.whole = _head(self.graph.features, classes, seed, dtype)
        own = self.whole.weight.detach()[:, self.positions]
        self.block = nn.Parameter(own.clone())
        self.joint = options.solver == "joint"
        self.head = self.whole
        if self.joint:  # the root receives sums of scores, and adds the bias
            self.head = _head(self.whole.outputs, classes, seed, dtype)
            nn.init.eye_(self.head.weight)
        self.output = Output(
            self.head,
            options.solver,
            options.ridge,
            options.learning_rate,
        )
        self.model = nn.Module()
        self.model.net = self.net
        self.model.head = self.head
        self.model.block = self.block
        self.optimizer = torch.optim.Adam(
            self.net.parameters(),
            options.learning_rate,
            weight_decay=options.weight_decay,
            fused=True,
        )
        if self.joint:
            output = [self.block, self.head.bias]
            group = {"params": output, "weight_decay": options.ridge}
            self.optimizer.add_param_group(group)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.history: dict[str, list[float]] = {"loss": [], "accuracy": []}
        self.epoch = 0
        self.place: Path | None = None
        messages.agree(self.facts())

    def facts(self) -> dict[str, Any]:
        """All that must be the same in all processes, and when a training run is resumed."""
        return {
            "version of hdnn": __version__,
            "release of PyTorch": torch.__version__.split("+")[0],
            "graph": self.graph.digest(),
            "number of processes": self.plan.size,
            "network": repr(asdict(self.settings)),
            "options of training": repr(asdict(self.options)),
            "number of samples": len(self.samples["train"].x),
            "order of samples": self.samples["train"].order,
        }

    # On disk: the states after the last two epochs, as other processes may be one epoch behind

    def open(self, folder: str | os.PathLike[str] | None, resume: bool) -> None:
        """Resume from the newest epoch that all processes have saved, if requested."""
        if folder is None:
            return
        self.place = Path(folder) / "processes" / f"{self.plan.rank:05d}"
        states = {}
        for name in ("0", "1"):
            (self.place / name).mkdir(parents=True, exist_ok=True)
            state = checkpoint.read(self.place / name, self.facts())
            if state is not None:
                states[state.values["epoch"]] = state
        if states and not resume:
            raise CheckpointError(
                f"{folder} holds a training run; resume it, or choose another folder."
            )
        saved = torch.zeros(self.options.epochs + 1)
        saved[list(states)] = 1
        processes = self.messages.total(saved)
        common = (processes == self.plan.size).nonzero()
        if len(common):
            self.epoch = int(common.max())
            state = states[self.epoch]
            self.history = state.values["history"]
            checkpoint.restore(
                state,
                self.model,
                self.optimizer,
                self.generator,
            )

    def save(self) -> None:
        """Write the state of this process."""
        if self.place is not None:
            checkpoint.write(
                self.place / str(self.epoch % 2),
                self.facts(),
                {"epoch": self.epoch, "history": self.history},
                {},
                self.model,
                self.optimizer,
                self.generator,
            )

    # The loop

    def run(self, tell: Callable[[dict[str, Any]], None] | None) -> None:
        """Train to the end."""
        count = len(self.samples["train"].x)
        epochs = self.options.epochs
        while self.epoch < epochs:
            order = torch.randperm(count, generator=self.generator)
            batches = order.split(self.options.batch)
            steps = epochs * len(batches)
            results = []
            for k, index in enumerate(batches):
                done = (self.epoch + k / len(batches)) / epochs
                results.append(self.step(index, done, steps))
            loss, accuracy = map(fmean, zip(*results, strict=True))
            self.history["loss"].append(loss)
            self.history["accuracy"].append(accuracy)
            self.epoch += 1
            if tell is not None and self.plan.is_root:
                tell({"epoch": self.epoch, "loss": loss, "accuracy": accuracy})
            if self.epoch == epochs and not self.joint:
                self.refit()
            self.save()

    def step(self, index: Tensor, done: float, steps: int) -> Sequence[float]:
        """Take one step on a minibatch; return its loss and accuracy (0 except at the root)."""
        x, t, _ = self.samples["train"]
        options = self.options
        self.optimizer.zero_grad()
        sums = self.collected(self.net(x[index]))
        outcome = Outcome(0.0, 0.0, torch.zeros_like(sums))
        if t is not None:
            outcome = self.learn(sums.detach(), t[index])
        sums.backward(outcome.gradient)
        alpha = options.smoothness
        if options.smoothing == "cosine":
            alpha *= cosine(done)
        penalty = alpha * self.net.smoothness()
        penalty.backward()
        rate = rate_factor(done, steps, options.warmup, options.schedule)
        trained = []
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * rate
            trained += group["params"]
        if options.clip is not None:
            gradients = [p.grad for p in trained if p.grad is not None]
            own = nn.utils.get_total_norm(gradients).double()
            squares = self.messages.total(own.square().reshape(1))
            norm = squares.sqrt()[0]
            nn.utils.clip_grads_with_norm_(trained, options.clip, norm)
        self.optimizer.step()
        return outcome.loss, outcome.accuracy

    # The output layer

    def collected(self, y: Tensor) -> Tensor:
        """Sums over all processes, at the root: the last features, or parts of the scores."""
        if self.joint:
            own = y @ self.block.T
        else:
            own = y.new_zeros(len(y), self.graph.features)
            own = own.index_copy(1, self.positions, y)
        return collect(own, self.messages)

    def learn(self, sums: Tensor, t: Tensor) -> Outcome:
        """The loss of a minibatch at the root, and the gradient of the sums."""
        outcome = self.output.solve((sums, t, None))
        if not math.isfinite(outcome.loss):
            raise ConvergenceError(
                f"the loss is not finite in epoch {self.epoch + 1}: training has diverged; lower "
                "learning_rate, clip the gradients, or use a smaller step."
            )
        return outcome

    def all_sums(self, x: Tensor) -> Tensor:
        """The sums for all samples, at the root."""
        return features(lambda rows: self.collected(self.net(rows)), x)

    def refit(self) -> None:
        """Let the root fit the output layer to all data."""
        x, t, _ = self.samples["train"]
        y = self.all_sums(x)
        if t is not None:
            self.output.refit((y, t, None), self.options.batch, self.generator)

    # The end

    @torch.no_grad()
    def metrics(self) -> dict[str, Any]:
        """The results, at the root."""
        metrics: dict[str, Any] = {
            "data": self.data,
            **asdict(self.settings),
            "features": self.graph.features,
            "nodes": self.graph.nodes,
            "processes": self.plan.size,
            "epochs": self.epoch,
            "history": self.history,
        }
        for part, (x, t, _) in self.samples.items():
            sums = self.all_sums(x)
            if t is not None:
                scores = self.head(sums)
                metrics[f"{part}_rows"] = len(x)
                metrics[f"{part}_loss"] = float(self.head.loss(scores, t))
                if not isinstance(self.head, RegressionHead):
                    predicted = self.head.predict(scores)
                    metrics[f"{part}_accuracy"] = _share(predicted == t)
                    metrics |= self.baseline(predicted, t)
        traffic = self.messages.traffic()
        metrics["traffic"] = traffic
        metrics["messages"] = sum(row[2] for row in traffic)
        metrics["bytes"] = sum(row[3] for row in traffic)
        metrics["seconds"] = round(time.perf_counter() - self.start, 2)
        return metrics

    def baseline(self, predicted: Tensor, t: Tensor) -> dict[str, Any]:
        """The accuracy of always answering the most frequent class, and classes never predicted."""
        trained = self.samples["train"].t
        assert trained is not None
        common = int(trained.mode().values)
        share = _share(t == common)
        missed = set(t.tolist()) - set(predicted.tolist())
        return {
            "baseline_accuracy": share,
            "baseline": f"always answering {common} would give {share:.2%}",
            "never_predicted": [str(label) for label in sorted(missed)],
        }

    @torch.no_grad()
    def gather(self) -> Model | None:
        """One model of all nodes, at the root."""
        net = self.net.gather()
        if self.joint:
            weight = torch.zeros_like(self.whole.weight)
            weight[:, self.positions] = self.block
            self.whole.weight.copy_(self.messages.up(weight))
            self.whole.bias.copy_(self.head.bias)
        if net is None:
            return None
        placement = self.settings.placement
        if self.data in planar.SETS:
            placement = nodes.entry_points(self.graph)
        augment = None
        if placement is not None:
            count = len(placement)
            augment = Augment(count, net.features, placement=[*placement])
        return Model(augment, net, self.whole)


def _head(features: int, classes: int, seed: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(seed)
    options: Any = {"generator": generator, "dtype": dtype}
    if classes == 0:
        return RegressionHead(features, 1, **options)
    if classes == 2:
        return SigmoidHead(features, **options)
    return SoftmaxHead(features, classes, **options)


def _share(which: Tensor) -> float:
    return float(which.double().mean())
