"""Training on a graph: each process runs this loop on the features and weights of its nodes.

Hidden layers and their gradients need neighbours only. The labels are the root's, the process that
owns node 0. In small networks the last features go up a tree of linked processes to the root, which
solves the output layer; their gradient comes down. In large ones (`solver="joint"`) each node keeps
its block of the output layer, and only sums of scores go up.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hdnn import io
from hdnn._version import __version__
from hdnn.data import planar
from hdnn.distributed.exchange import Messages, connect, world
from hdnn.distributed.graph import Graph
from hdnn.distributed.network import GraphNetwork
from hdnn.distributed.plan import Plan, partition
from hdnn.errors import (
    CheckpointError,
    ConvergenceError,
    DataError,
    HDNNError,
    choose,
)
from hdnn.heads import Augment, Model, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.training import checkpoint
from hdnn.training.fit import Options
from hdnn.training.output import Output
from hdnn.training.recipes import cosine, rate_factor

NEWTON = 256  # features, up to which the root solves the output layer for each minibatch
CHUNK = 4096  # samples that go through the network at once
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
    """The options of a network on a graph; `train` takes them beside those of `hdnn.training.fit`.

    Attributes:
        network: "h1", "h2", "verlet" or "yoshida4".
        layers: N.
        step: h.
        activation: the name of sigma.
        gain: the size of the initial weights.
        dtype: "float32" or "float64".
        seed: of data, weights and the order of samples.
        placement: the feature of all nodes that each input of a table enters; saved with the model.
    """

    network: str = "h2"
    layers: int = 4
    step: float = 0.5
    activation: str = "tanh"
    gain: float = 1.0
    dtype: str = "float32"
    seed: int = 0
    placement: Sequence[int] | None = None


class Samples(NamedTuple):
    """The own features of all samples; at the root their labels too."""

    x: Tensor
    t: Tensor | None
    order: (
        str  # equal for processes that have the same samples in the same order
    )


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

    Under torchrun each process calls it, with the same arguments; without, one process owns all
    nodes. Messages go to processes that own linked nodes only, and no weight leaves its node unless
    `gather` asks for that at the end.

    Args:
        graph: the nodes and their links.
        data: "swiss_roll", "double_moons", "double_circles", or a folder of node files: see
            `write_nodes`.
        folder: keeps a checkpoint of each process after each epoch, and at the end metrics.json and
            the model.
        resume: go on with the training in `folder`, or begin there if it is empty.
        gather: bring the weights of all nodes to the root, as one model.
        timeout: seconds after which a silent process counts as lost.
        tell: called at the root with a dict after each epoch.
        **options: fields of `Settings` and of `hdnn.training.fit`, such as `layers` or `epochs`.

    Returns:
        The metrics at the root; with `gather`, "model" is the `hdnn.Model` of all nodes. Elsewhere
        an empty dict.

    Raises:
        OptionError: if the graph cannot be trained on, an option is out of range, or processes were
            started with different arguments.
        DataError: if the data do not fit the nodes.
        CheckpointError: if the folder holds another training.
        ConvergenceError: if the training diverges.
        LostError: if another process is lost.

    Examples:
        >>> from hdnn.distributed import Graph, train
        >>> metrics = train(Graph.ring(4), "double_moons", layers=2, epochs=1)
        >>> metrics["processes"], metrics["test_accuracy"] > 0.85
        (1, True)
    """
    graph.check()
    names = set(Settings.__dataclass_fields__)
    settings = Settings(
        **{name: value for name, value in options.items() if name in names}
    )
    choose("dtype", settings.dtype, DTYPES)
    others = {
        name: value for name, value in options.items() if name not in names
    }
    solver = "newton" if graph.features <= NEWTON else "joint"
    numbers = Options(
        **{"solver": solver, **DEFAULTS, **others, "seed": settings.seed}
    )
    rank, size = world()
    plan = Plan(graph, partition(graph, size), rank)
    messages = connect(plan, timeout)
    try:
        training = Training(messages, str(data), settings, numbers)
        training.open(folder, resume)
        training.run(tell)
        metrics = training.metrics(gather)
    except HDNNError as error:
        messages.report(f"{plan.name(rank)} says: {error}")
        raise
    messages.close()
    if folder is not None and plan.is_root:
        shown = {
            name: value for name, value in metrics.items() if name != "model"
        }
        if "model" in metrics:
            io.save(metrics["model"], Path(folder) / "model.safetensors")
        io.write_json(Path(folder) / "metrics.json", shown)
    return metrics


class Training:
    """One training, as one process sees it; all of its state is at the end of an epoch."""

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
        self.samples, classes = self.read(dtype)
        self.head = _head(
            self.graph.features, classes, settings.seed + 1, dtype
        )
        self.output = Output(
            self.head, options.solver, options.ridge, options.learning_rate
        )
        self.model = nn.ModuleDict({"net": self.net, "head": self.head})
        groups = [
            {
                "params": [*self.net.parameters()],
                "weight_decay": options.weight_decay,
            }
        ]
        self.joint = options.solver == "joint"
        if self.joint:
            self.block = nn.Linear(
                len(self.positions), self.head.outputs, dtype=dtype
            )
            self.block.load_state_dict(
                {
                    "weight": self.head.weight[:, self.positions],
                    "bias": self.head.bias,
                }
            )
            self.model["block"] = self.block
            groups.append(
                {
                    "params": [*self.block.parameters()],
                    "weight_decay": options.ridge,
                }
            )
        self.optimizer = torch.optim.Adam(
            groups, lr=options.learning_rate, fused=True
        )
        self.generator = torch.Generator().manual_seed(options.seed)
        self.history: dict[str, list[float]] = {"loss": [], "accuracy": []}
        self.results: list[
            tuple[float, float]
        ] = []  # of the steps of this epoch, at the root
        self.epoch = 0
        self.place: Path | None = None
        messages.agree(self.facts())

    def facts(self) -> dict[str, Any]:
        """All that must be the same in all processes, and when a training is resumed."""
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

    # Data

    def read(self, dtype: torch.dtype) -> tuple[dict[str, Samples], int]:
        """Samples to train on and to test with, and the number of classes; 0 for values."""
        samples = {}
        if self.data in planar.SETS:
            points = planar.load(
                self.data, seed=self.settings.seed, dtype=dtype
            )
            places = entry_points(self.graph)
            for part in ("train", "test"):
                x = getattr(points, f"x_{part}")
                t = getattr(points, f"t_{part}")
                nodes = [
                    node_rows(self.graph, node, x, places)
                    for node in self.plan.nodes
                ]
                samples[part] = Samples(
                    self._joined(nodes), t, checkpoint.digest([t])
                )
            return samples, 2
        home = Path(self.data)
        if not home.is_dir():
            sets = ", ".join(planar.SETS)
            raise DataError(
                f"{home} is neither one of {sets} nor a folder of node files."
            )
        classes = io.read_json(home / "classes.json")
        if not isinstance(classes, int) or classes < 0 or classes == 1:
            raise DataError(
                f"{home / 'classes.json'} must hold the number of classes, or 0."
            )
        for part in ("train", "test"):
            if part == "train" or (home / part).is_dir():
                samples[part] = self._read(home / part, classes, dtype)
        return samples, classes

    def _read(self, home: Path, classes: int, dtype: torch.dtype) -> Samples:
        """The samples in the files of the own nodes, and at the root the labels."""
        nodes = []
        orders = set()
        for node in self.plan.nodes:
            path = home / f"{self.graph.key(node)}.safetensors"
            tensors = _load(path)
            x = tensors.get("x", torch.empty(0))
            size = 2 * self.graph.sizes[node]
            if (
                x.ndim != 2
                or x.shape[1] != size
                or not bool(x.isfinite().all())
            ):
                raise DataError(
                    f"{path} must hold x (samples, {size}), p and then q of node "
                    f"{self.graph.label(node)}, without gaps; it has {tuple(x.shape)}."
                )
            if nodes and len(x) != len(nodes[0]):
                raise DataError(
                    f"{path} has {len(x)} samples, but others have {len(nodes[0])}."
                )
            nodes.append(x.to(dtype))
            orders.add(checkpoint.digest([tensors.get("id")]))
        t = None
        if self.plan.is_root:
            path = home / "labels.safetensors"
            tensors = _load(path)
            t = _labels(tensors.get("t"), len(nodes[0]), classes, path).to(
                torch.int64 if classes else dtype
            )
            orders.add(checkpoint.digest([tensors.get("id")]))
        if len(orders) > 1:
            raise DataError(
                f"files in {home} have other samples, or another order, by their id."
            )
        return Samples(self._joined(nodes), t, orders.pop())

    def _joined(self, nodes: list[Tensor]) -> Tensor:
        """The own features, in the order of the network, from those of each node."""
        features = [
            place
            for node in self.plan.nodes
            for place in node_features(self.graph, node)
        ]
        column = {place: k for k, place in enumerate(features)}
        return torch.cat(nodes, 1)[
            :, [column[place] for place in self.positions.tolist()]
        ]

    # The loop

    def open(self, folder: str | os.PathLike[str] | None, resume: bool) -> None:
        """Go on from the newest epoch that all processes have saved, if asked to."""
        if folder is None:
            return
        self.place = Path(folder) / "processes" / f"{self.plan.rank:05d}"
        saved = {}
        for name in ("even", "odd"):
            (self.place / name).mkdir(parents=True, exist_ok=True)
            state = checkpoint.read(self.place / name, self.facts())
            if state is not None:
                saved[state.values["epoch"]] = state
        if saved and not resume:
            raise CheckpointError(
                f"{folder} holds a training; resume it, or take another folder."
            )
        have = torch.zeros(self.options.epochs + 1)
        have[list(saved)] = 1
        common = (self.messages.total(have) == self.plan.size).nonzero()
        if len(common):
            self.epoch = int(common.max())
            state = saved[self.epoch]
            checkpoint.restore(
                state, self.model, self.optimizer, self.generator
            )
            self.history = state.values["history"]

    def save(self) -> None:
        """Write the state of this process; that of the epoch before is kept as well."""
        if self.place is not None:
            values = {"epoch": self.epoch, "history": self.history}
            place = self.place / ("odd" if self.epoch % 2 else "even")
            state = (self.model, self.optimizer, self.generator)
            checkpoint.write(place, self.facts(), values, {}, *state)

    def run(self, tell: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Train to the end."""
        count = len(self.samples["train"].x)
        epochs = self.options.epochs
        batches = math.ceil(count / self.options.batch)
        while self.epoch < epochs:
            order = torch.randperm(count, generator=self.generator)
            for k, index in enumerate(order.split(self.options.batch)):
                self.step(
                    index, (self.epoch + k / batches) / epochs, epochs * batches
                )
            self.epoch += 1
            if self.plan.is_root:
                news: dict[str, Any] = {"epoch": self.epoch, "epochs": epochs}
                for position, name in enumerate(("loss", "accuracy")):
                    news[name] = (
                        math.fsum(result[position] for result in self.results)
                        / batches
                    )
                    self.history[name].append(news[name])
                self.results = []
                if tell is not None:
                    tell(news)
            if self.epoch == epochs and not self.joint:
                self.refit()
            self.save()

    def step(self, index: Tensor, done: float, steps: int) -> None:
        """One step on a minibatch."""
        samples = self.samples["train"]
        options = self.options
        self.optimizer.zero_grad()
        y = self.net(samples.x[index])
        t = (
            samples.t[index]
            if self.plan.is_root and samples.t is not None
            else None
        )
        y.backward(
            self.descend(y.detach(), t)
            if self.joint
            else self.solve(y.detach(), t)
        )
        alpha = options.smoothness
        if options.smoothing == "cosine":
            alpha *= cosine(done)
        if alpha and self.settings.layers > 1:
            (alpha * self.net.smoothness()).backward()
        rate = options.learning_rate * rate_factor(
            done, steps, options.warmup, options.schedule
        )
        trained = []
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            trained += group["params"]
        if options.clip is not None:
            own = nn.utils.get_total_norm(
                [p.grad for p in trained if p.grad is not None]
            )
            norm = self.messages.total(own.double().square().reshape(1)).sqrt()
            nn.utils.clip_grads_with_norm_(trained, options.clip, norm[0])
        self.optimizer.step()

    # The output layer: at the root each function has the labels t, elsewhere None

    def solve(self, y: Tensor, t: Tensor | None) -> Tensor:
        """The gradient of y, with the output layer that the root solves for all features."""
        features = self.features(y)
        if t is not None:
            outcome = self.output.solve((features, t, None))
            self.add(outcome.loss, outcome.accuracy)
            features = outcome.gradient.to(features)
        return self.messages.down(features)[:, self.positions]

    def descend(self, y: Tensor, t: Tensor | None) -> Tensor:
        """The gradient of y, and that of the own block of the output layer."""
        residual = self.scores(y)
        if t is not None:
            scores = residual.requires_grad_()
            loss = self.head.loss(scores, t)
            (residual,) = torch.autograd.grad(loss, scores)
            self.add(
                float(loss.detach()), _accuracy(self.head, scores.detach(), t)
            )
        residual = self.messages.down(residual)
        self.block.weight.grad = residual.T @ y
        if self.plan.is_root:
            self.block.bias.grad = residual.sum(0)
        return residual @ self.block.weight.detach()

    def add(self, loss: float, accuracy: float) -> None:
        """Note the results of a step."""
        if not math.isfinite(loss):
            raise ConvergenceError(
                f"the loss is not finite in epoch {self.epoch + 1}: the training has diverged; "
                "lower learning_rate, clip the gradients, or use a smaller step."
            )
        self.results.append((loss, accuracy))

    @torch.no_grad()
    def features(self, y: Tensor) -> Tensor:
        """The last features of all nodes (batch, n), at the root."""
        features = y.new_zeros(len(y), self.graph.features)
        features[:, self.positions] = y
        return self.messages.up(features)

    @torch.no_grad()
    def scores(self, y: Tensor) -> Tensor:
        """The scores (batch, outputs) for the last features, at the root."""
        if not self.joint:
            return self.head(self.features(y))
        return self.messages.up(y @ self.block.weight.T) + self.block.bias

    @torch.no_grad()
    def refit(self) -> None:
        """Let the root fit the output layer to all data."""
        x, t, _ = self.samples["train"]
        features = torch.cat(
            [self.features(self.net(rows)) for rows in x.split(CHUNK)]
        )
        if self.plan.is_root and t is not None:
            self.output.refit(
                (features, t, None), self.options.batch, self.generator
            )

    # The end

    @torch.no_grad()
    def metrics(self, gather: bool) -> dict[str, Any]:
        """The results at the root; an empty dict elsewhere."""
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
            scores = torch.cat(
                [self.scores(self.net(rows)) for rows in x.split(CHUNK)]
            )
            if self.plan.is_root and t is not None:
                metrics[f"{part}_rows"] = len(x)
                metrics[f"{part}_loss"] = float(self.head.loss(scores, t))
                if not isinstance(self.head, RegressionHead):
                    metrics[f"{part}_accuracy"] = _accuracy(
                        self.head, scores, t
                    )
        traffic = self.messages.traffic()
        metrics["traffic"] = traffic
        metrics["messages"] = sum(row[2] for row in traffic)
        metrics["bytes"] = sum(row[3] for row in traffic)
        if gather:
            metrics["model"] = self.gather()
        metrics["seconds"] = round(time.perf_counter() - self.start, 2)
        return metrics if self.plan.is_root else {}

    def gather(self) -> Model | None:
        """One model of all nodes, at the root."""
        net = self.net.gather()
        if self.joint:
            weight = torch.zeros_like(self.head.weight)
            weight[:, self.positions] = self.block.weight
            self.head.weight.copy_(self.messages.up(weight))
            self.head.bias.copy_(self.block.bias)
        if net is None:
            return None
        places = self.settings.placement
        if self.data in planar.SETS:
            places = entry_points(self.graph)
        augment = None
        if places is not None:
            augment = Augment(len(places), net.features, placement=list(places))
        return Model(augment, net, self.head)


def _head(features: int, classes: int, seed: int, dtype: torch.dtype) -> Any:
    options: Any = {
        "generator": torch.Generator().manual_seed(seed),
        "dtype": dtype,
    }
    if classes == 0:
        return RegressionHead(features, 1, **options)
    if classes == 2:
        return SigmoidHead(features, **options)
    return SoftmaxHead(features, classes, **options)


def _accuracy(head: Any, scores: Tensor, t: Tensor) -> float:
    if isinstance(head, RegressionHead):
        return 0.0
    return float((head.predict(scores) == t).double().mean())


# Node files


def node_features(graph: Graph, node: int) -> list[int]:
    """The features of all nodes that belong to one: those of p, then of q."""
    own = range(graph.first[node], graph.first[node + 1])
    half = graph.features // 2
    return [*own, *(half + place for place in own)]


def entry_points(graph: Graph) -> list[int]:
    """The features that points of the plane enter: p of the first node, q of the middle one."""
    middle = node_features(graph, graph.nodes // 2)
    return [0, middle[len(middle) // 2]]


def node_rows(
    graph: Graph, node: int, x: Tensor, places: Sequence[int]
) -> Tensor:
    """The features of one node: inputs that enter it, and zeros."""
    own = x.new_zeros(len(x), 2 * graph.sizes[node])
    for column, place in enumerate(node_features(graph, node)):
        if place in places:
            own[:, column] = x[:, places.index(place)]
    return own


def write_nodes(
    folder: str | os.PathLike[str],
    graph: Graph,
    x: Tensor,
    t: Tensor,
    placement: Sequence[int],
    *,
    classes: int,
    part: str = "train",
) -> None:
    """Write a file for each node, which its owner alone reads, and the labels for the root.

    `FOLDER/PART/node-00003.safetensors` holds `x` (samples, features of node 3: p, then q),
    `labels.safetensors` the labels `t`, and `FOLDER/classes.json` the number of classes. Files
    that are made in another way may also hold `id`, numbers that must be the same in all of them.

    Args:
        folder: where to write.
        graph: the nodes.
        x: inputs `(samples, inputs)`.
        t: labels, or values.
        placement: the feature of all nodes that each input enters.
        classes: the number of classes, 0 for values.
        part: "train" or "test".
    """
    home = Path(folder) / part
    home.mkdir(parents=True, exist_ok=True)
    for node in range(graph.nodes):
        own = node_rows(graph, node, x, placement)
        save_file({"x": own}, home / f"{graph.key(node)}.safetensors")
    save_file({"t": t.contiguous()}, home / "labels.safetensors")
    io.write_json(Path(folder) / "classes.json", classes)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {path}: {error}.") from error


def _labels(t: Tensor | None, count: int, classes: int, path: Path) -> Tensor:
    if t is None or len(t) != count:
        raise DataError(f"{path} must hold t, one for each of {count} samples.")
    if classes == 0:
        return t.reshape(count, 1)
    if t.is_floating_point() or int(t.min()) < 0 or int(t.max()) >= classes:
        raise DataError(
            f"{path} must hold whole numbers t in 0 .. {classes - 1}."
        )
    return t
