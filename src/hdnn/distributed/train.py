"""Training on a graph: each process runs this loop on the features and weights of its nodes.

Hidden layers and their gradients need neighbours only. The labels are the root's, the process that
owns node 0. In small networks the last features go up a tree of linked processes to the root, which
solves the output layer; their gradient comes down. In large ones (`solver="joint"`) each node keeps
its block of the output layer, and only sums of scores go up.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from hdnn.errors import ConvergenceError, DataError, HDNNError, OptionError, choose
from hdnn.heads import Augment, RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.model import Model
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


@dataclass
class Samples:
    """The own features of all samples; at the root their labels too."""

    x: Tensor
    t: Tensor | None
    order: str = ""  # equal for processes that have the same samples in the same order


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
    settings = Settings(**{name: value for name, value in options.items() if name in names})
    choose("dtype", settings.dtype, DTYPES)
    others = {name: value for name, value in options.items() if name not in names}
    solver = "newton" if graph.features <= NEWTON else "joint"
    numbers = Options(**{"solver": solver, **DEFAULTS, **others, "seed": settings.seed})
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
        shown = {name: value for name, value in metrics.items() if name != "model"}
        if "model" in metrics:
            io.save(metrics["model"], Path(folder) / "model.safetensors")
        io.write_json(Path(folder) / "metrics.json", shown)
    return metrics


class Training:
    """One training, as one process sees it; all of its state is at the end of an epoch."""

    def __init__(
        self, messages: Messages, data: str, settings: Settings, options: Options
    ) -> None:
        self.start = time.perf_counter()
        self.messages = messages
        self.plan = messages.plan
        self.data = data
        self.settings = settings
        self.options = options
        self.net = GraphNetwork(
            self.plan,
            messages,
            network=settings.network,
            layers=settings.layers,
            step=settings.step,
            activation=settings.activation,
            dtype=DTYPES[settings.dtype],
        )
        self.net.reset_parameters(settings.seed, settings.gain)
        self.positions = self.net.positions
        self.samples, classes = self._samples()
        head = _head(self.plan.graph.features, classes, settings)
        self.head = head
        self.model = nn.ModuleDict({"net": self.net})
        groups = [{"params": [*self.net.parameters()], "weight_decay": options.weight_decay}]
        self.joint = options.solver == "joint"
        if self.joint:
            self.block = nn.Linear(len(self.positions), head.outputs, dtype=head.weight.dtype)
            with torch.no_grad():
                self.block.weight.copy_(head.weight[:, self.positions])
                self.block.bias.copy_(head.bias)
            self.model["block"] = self.block
            own = [*self.block.parameters()] if self.plan.is_root else [self.block.weight]
            groups.append({"params": own, "weight_decay": options.ridge})
        elif self.plan.is_root:
            self.model["head"] = head
        self.trained = [p for group in groups for p in group["params"]]
        self.optimizer = torch.optim.Adam(groups, lr=options.learning_rate, fused=True)
        self.output = Output(head, options.solver, options.ridge, options.learning_rate)
        self.generator = torch.Generator().manual_seed(options.seed)
        self.history: dict[str, list[float]] = {"loss": [], "accuracy": []}
        self.epoch = 0
        self.place: Path | None = None
        messages.agree(self.facts())

    def facts(self) -> dict[str, Any]:
        """All that must be the same in all processes, and when a training is resumed."""
        train_set = self.samples["train"]
        return {
            "version of hdnn": __version__,
            "release of PyTorch": torch.__version__.split("+")[0],
            "graph": self.plan.graph.digest(),
            "number of processes": max(self.plan.owner) + 1,
            "network": repr(asdict(self.settings)),
            "options of training": repr(asdict(self.options)),
            "number of samples": len(train_set.x),
            "order of samples": train_set.order,
        }

    # Data

    def _samples(self) -> tuple[dict[str, Samples], int]:
        """Samples to train on and to test with, and the number of classes; 0 for values."""
        dtype = DTYPES[self.settings.dtype]
        if self.data in planar.SETS:
            points = planar.load(self.data, seed=self.settings.seed, dtype=dtype)
            places = entry_points(self.plan.graph)
            return {
                "train": self._placed(points.x_train, points.t_train, places),
                "test": self._placed(points.x_test, points.t_test, places),
            }, 2
        home = Path(self.data)
        if not home.is_dir():
            sets = ", ".join(planar.SETS)
            raise DataError(f"{home} is neither one of {sets} nor a folder of node files.")
        classes = io.read_json(home / "classes.json")
        if not isinstance(classes, int) or classes < 0 or classes == 1:
            raise DataError(f"{home / 'classes.json'} must hold the number of classes, or 0.")
        samples = {"train": self._read(home / "train", classes)}
        if (home / "test").is_dir():
            samples["test"] = self._read(home / "test", classes)
        return samples, classes

    def _placed(self, x: Tensor, t: Tensor, places: Sequence[int]) -> Samples:
        """The own features of points whose coordinates enter at these places."""
        own = x.new_zeros(len(x), len(self.positions))
        for column, place in enumerate(self.positions.tolist()):
            if place in places:
                own[:, column] = x[:, places.index(place)]
        return Samples(own, t if self.plan.is_root else None, checkpoint.digest([t]))

    def _read(self, home: Path, classes: int) -> Samples:
        """The samples in the files of the own nodes, and at the root the labels."""
        graph = self.plan.graph
        columns = {place: column for column, place in enumerate(self.positions.tolist())}
        own = torch.empty(0)
        orders = set()
        for node in self.plan.nodes:
            path = home / f"{graph.key(node)}.safetensors"
            tensors = _load(path)
            x = tensors.get("x", torch.empty(0))
            size = graph.sizes[node]
            if x.ndim != 2 or x.shape[1] != 2 * size or not bool(x.isfinite().all()):
                raise DataError(
                    f"{path} must hold x (samples, {2 * size}), p and then q of node "
                    f"{graph.label(node)}, without gaps; it has {tuple(x.shape)}."
                )
            if not len(own):
                own = torch.zeros(len(x), len(columns), dtype=DTYPES[self.settings.dtype])
            if len(x) != len(own):
                raise DataError(f"{path} has {len(x)} samples, but others have {len(own)}.")
            own[:, [columns[place] for place in node_features(graph, node)]] = x.to(own.dtype)
            orders.add(_order(tensors))
        t = None
        if self.plan.is_root:
            tensors = _load(home / "labels.safetensors")
            t = _checked_labels(tensors.get("t"), len(own), classes, own.dtype, home)
            orders.add(_order(tensors))
        if len(orders) > 1:
            raise DataError(f"files in {home} have different samples, or another order, by their id.")
        return Samples(own, t, orders.pop())

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
            raise OptionError(f"{folder} holds a training; resume it, or choose another folder.")
        have = torch.zeros(self.options.epochs + 1)
        have[list(saved)] = 1
        common = self.messages.total(have) == max(self.plan.owner) + 1
        if bool(common.any()):
            self.epoch = int(common.nonzero().max())
            state = saved[self.epoch]
            checkpoint.restore(state, self.model, self.optimizer, self.generator)
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
        samples = self.samples["train"]
        batches = math.ceil(len(samples.x) / self.options.batch)
        while self.epoch < self.options.epochs:
            order = torch.randperm(len(samples.x), generator=self.generator)
            results = []
            for k, index in enumerate(order.split(self.options.batch)):
                done = (self.epoch + k / batches) / self.options.epochs
                results.append(self.step(index, done, batches * self.options.epochs))
            self.epoch += 1
            if self.plan.is_root:
                losses, accuracies = zip(*results, strict=True)
                self.history["loss"].append(math.fsum(losses) / batches)
                self.history["accuracy"].append(math.fsum(accuracies) / batches)
                if tell is not None:
                    last = {name: values[-1] for name, values in self.history.items()}
                    tell({"epoch": self.epoch, "epochs": self.options.epochs, **last})
            if self.epoch == self.options.epochs:
                self.refit()
            self.save()

    def step(self, index: Tensor, done: float, steps: int) -> tuple[float, float]:
        """One step on a minibatch; at the root its loss and accuracy."""
        samples = self.samples["train"]
        options = self.options
        self.optimizer.zero_grad()
        y = self.net(samples.x[index])
        t = None if samples.t is None else samples.t[index]
        result, gradient = self.descend(y, t) if self.joint else self.solve(y, t)
        if not math.isfinite(result[0]):
            raise ConvergenceError(
                f"the loss is not finite in epoch {self.epoch + 1}: the training has diverged; "
                "lower learning_rate, clip the gradients, or use a smaller step."
            )
        y.backward(gradient)
        alpha = options.smoothness * (1 if options.smoothing == "constant" else cosine(done))
        if alpha and self.settings.layers > 1:
            (alpha * self.net.smoothness()).backward()
        if options.clip is not None:
            self.clip(options.clip)
        rate = options.learning_rate * rate_factor(done, steps, options.warmup, options.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return result

    def clip(self, most: float) -> None:
        """Scale all gradients, of all nodes, if their norm is larger."""
        squares = [p.grad.double().square().sum() for p in self.trained if p.grad is not None]
        norm = float(self.messages.total(torch.stack(squares).sum().reshape(1)).sqrt())
        if norm > most:
            for p in self.trained:
                if p.grad is not None:
                    p.grad *= most / norm

    # The output layer

    def solve(self, y: Tensor, t: Tensor | None) -> tuple[tuple[float, float], Tensor]:
        """Let the root solve the output layer; its loss and accuracy, and the gradient of y."""
        whole = self.features(y.detach())
        result = (0.0, 0.0)
        if t is not None:
            outcome = self.output.solve((whole, t, None))
            result = (outcome.loss, outcome.accuracy)
            whole = outcome.gradient.to(whole)
        return result, self.messages.down(whole)[:, self.positions]

    def descend(self, y: Tensor, t: Tensor | None) -> tuple[tuple[float, float], Tensor]:
        """Set the gradient of the own block of the output layer; the rest is as in `solve`."""
        block = self.block
        y = y.detach()
        residual = self.scores(y)
        result = (0.0, 0.0)
        if t is not None:
            with torch.enable_grad():
                scores = residual.requires_grad_()
                loss = self.head.loss(scores, t)
                (residual,) = torch.autograd.grad(loss, scores)
            result = (float(loss), _accuracy(self.head, scores, t))
        residual = self.messages.down(residual)
        block.weight.grad = residual.T @ y
        block.bias.grad = residual.sum(0)
        return result, residual @ block.weight.detach()

    @torch.no_grad()
    def features(self, y: Tensor) -> Tensor:
        """At the root the features of all nodes (batch, n)."""
        whole = y.new_zeros(len(y), self.plan.graph.features)
        whole[:, self.positions] = y
        return self.messages.up(whole)

    @torch.no_grad()
    def scores(self, y: Tensor) -> Tensor:
        """At the root the scores (batch, outputs) for the last features."""
        if not self.joint:
            return self.head(self.features(y))
        return self.messages.up(y @ self.block.weight.T) + self.block.bias

    @torch.no_grad()
    def refit(self) -> None:
        """Let the root fit the output layer to all data."""
        if self.joint:
            return
        samples = self.samples["train"]
        whole = torch.cat([self.features(self.net(x)) for x in samples.x.split(CHUNK)])
        if samples.t is not None:
            self.output.refit((whole, samples.t, None), self.options.batch, self.generator)

    # The end

    @torch.no_grad()
    def metrics(self, gather: bool) -> dict[str, Any]:
        """The results at the root; an empty dict elsewhere."""
        measured = {}
        for name, samples in self.samples.items():
            scores = torch.cat([self.scores(self.net(x)) for x in samples.x.split(CHUNK)])
            if samples.t is not None:
                measured[f"{name}_rows"] = len(samples.x)
                measured[f"{name}_loss"] = float(self.head.loss(scores, samples.t))
                if not isinstance(self.head, RegressionHead):
                    measured[f"{name}_accuracy"] = _accuracy(self.head, scores, samples.t)
        traffic = self.traffic()
        model = self.gather() if gather else None
        if not self.plan.is_root:
            return {}
        result: dict[str, Any] = {
            "data": self.data,
            **asdict(self.settings),
            "features": self.plan.graph.features,
            "nodes": self.plan.graph.nodes,
            "processes": max(self.plan.owner) + 1,
            "epochs": self.epoch,
            **measured,
            "history": self.history,
            "messages": sum(row[2] for row in traffic),
            "bytes": sum(row[3] for row in traffic),
            "traffic": traffic,
            "seconds": round(time.perf_counter() - self.start, 2),
        }
        return result if model is None else {**result, "model": model}

    def traffic(self) -> list[list[int]]:
        """`[from, to, messages, bytes]` of all processes that talked, at the root."""
        size = max(self.plan.owner) + 1
        counts = torch.zeros(size, size, 2, dtype=torch.int64)
        for peer, sent in self.messages.sent.items():
            counts[self.plan.rank, peer] = torch.tensor([sent, self.messages.bytes[peer]])
        counts = self.messages.up(counts)
        pairs = counts[..., 0].nonzero().tolist()
        return [[i, k, *counts[i, k].tolist()] for i, k in pairs]

    def gather(self) -> Model | None:
        """At the root one model of all nodes."""
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
            places = entry_points(self.plan.graph)
        augment = None
        if places is not None:
            augment = Augment(len(places), net.features, placement=list(places))
        return Model(augment, net, self.head)


def _head(features: int, classes: int, settings: Settings) -> Any:
    generator = torch.Generator().manual_seed(settings.seed + 1)
    dtype = DTYPES[settings.dtype]
    if classes == 0:
        return RegressionHead(features, 1, generator=generator, dtype=dtype)
    if classes == 2:
        return SigmoidHead(features, generator=generator, dtype=dtype)
    return SoftmaxHead(features, classes, generator=generator, dtype=dtype)


def _accuracy(head: Any, scores: Tensor, t: Tensor) -> float:
    if isinstance(head, RegressionHead):
        return 0.0
    return float((head.predict(scores) == t).double().mean())


# Node files


def node_features(graph: Graph, node: int) -> list[int]:
    """The features of all nodes that belong to one: those of p, then of q."""
    first = sum(graph.sizes[:node])
    own = range(first, first + graph.sizes[node])
    half = graph.features // 2
    return [*own, *(half + place for place in own)]


def entry_points(graph: Graph) -> list[int]:
    """The features that points of the plane enter: p of the first node, q of the middle one."""
    middle = node_features(graph, graph.nodes // 2)
    return [0, middle[len(middle) // 2]]


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
        own = x.new_zeros(len(x), 2 * graph.sizes[node])
        for column, place in enumerate(node_features(graph, node)):
            if place in placement:
                own[:, column] = x[:, list(placement).index(place)]
        save_file({"x": own}, home / f"{graph.key(node)}.safetensors")
    save_file({"t": t.contiguous()}, home / "labels.safetensors")
    io.write_json(Path(folder) / "classes.json", classes)


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {path}: {error}.") from error


def _order(tensors: dict[str, Tensor]) -> str:
    if "id" not in tensors:
        return ""
    return hashlib.sha256(str(tensors["id"].flatten().tolist()).encode()).hexdigest()


def _checked_labels(
    t: Tensor | None, count: int, classes: int, dtype: torch.dtype, home: Path
) -> Tensor:
    path = home / "labels.safetensors"
    if t is None or len(t) != count:
        raise DataError(f"{path} must hold t, one for each of {count} samples.")
    if classes == 0:
        return t.to(dtype).reshape(count, 1)
    if t.is_floating_point() or int(t.min()) < 0 or int(t.max()) >= classes:
        raise DataError(f"{path} must hold whole numbers t in 0 .. {classes - 1}.")
    return t.long()
