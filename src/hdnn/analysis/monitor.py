"""Watch the gradients of a network while it trains, in any loop."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from hdnn import plotting
from hdnn.analysis.certificate import over_samples
from hdnn.analysis.copies import embedded, exact
from hdnn.analysis.measured import why_not
from hdnn.analysis.sensitivity import backward_sensitivity, norms, trajectory
from hdnn.errors import OptionError, ShapeError, choose, positive_int
from hdnn.model import Model
from hdnn.networks import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.training import Moment

LOOKS = 50  # at the least, in a training of so many steps or more
SHARE = 0.04  # of the training time that more looks may take
GROWTH = 1.1  # of the steps between two looks, where nobody knows how long the training will be
SAMPLES = 64
NAMES = ("smallest", "median", "largest", "of_mean", "weights")  # of what is recorded by layer
VANISHED, EXPLODED = 1e-6, 1e6
BEYOND = "dy_N/dy_j is past the largest float64"


class GradientWarning(UserWarning):
    """Gradients that vanish, explode or cannot be computed, seen by a monitor or a doctor.

    Examples:
        >>> import warnings, hdnn, torch
        >>> net = hdnn.MLP(features=4, layers=64, activation="sigmoid")
        >>> monitor = hdnn.analysis.GradientMonitor(net, torch.randn(8, 4))
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     record = monitor.look()
        >>> caught[0].category.__name__, "gradients vanish" in str(caught[0].message)
        ('GradientWarning', True)
    """


@dataclass(frozen=True)
class Record:
    """One look at the gradients: for layers j = 0 .. N, over the samples.

    Samples that could not be computed are left out, except that the largest norm is then infinite.
    If none could be computed, all else is NaN.
    """

    step: int
    smallest: list[float]  # norm(dy_N/dy_j)
    median: list[float]
    largest: list[float]
    of_mean: list[float]  # the norm of the mean of all samples' matrices, which the paper shows
    weights: list[float] = field(default_factory=list)  # gradients of layer j's weights, j < N
    missing: int = 0  # samples that could not be computed
    why: str = ""  # why they could not


class GradientMonitor:
    """Records norm(dy_N/dy_j) and the gradients of the weights every few steps of a training.

    It is a callback of `hdnn.training.fit`, or watches an optimiser in a `with` block around any
    other loop. A `GradientWarning` tells when gradients vanish or explode for the first time. Print
    the monitor for a summary, or see `plot()`, `table()` and `to_csv()`.

    Args:
        model: a `hdnn.Model` or a network; a callback of `fit` gets it from there.
        x: samples to look at: inputs of a model, states of a network.
        every: how many steps lie between two looks. By default there are at least 50 looks, and
            more if looking takes little time: spread evenly over a training by `fit`; at the first
            50 steps and then ever less often in a loop whose length is not known.
        samples: the most samples of x that it looks at.
        optimizer: whose steps count, in a `with` block; without one, call `step()` yourself.

    Attributes:
        records: one for each look: its step, and for each layer the smallest, median and largest
            norm over the samples, the norm of their mean matrix and that of the weights' gradients.
        findings: what it has warned of.

    Raises:
        OptionError: if the model is neither a `Model` nor a network.
        ShapeError: if x is not a tensor with samples, or if `every` or `samples` is not positive.

    Examples:
        >>> import hdnn, torch
        >>> net, x = hdnn.H2(features=4, layers=16), torch.randn(32, 4)
        >>> optimizer = torch.optim.Adam(net.parameters())
        >>> with hdnn.analysis.GradientMonitor(net, x, every=5, optimizer=optimizer) as monitor:
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         net(x).square().mean().backward()
        ...         loss = optimizer.step()
        >>> monitor.recorded_steps
        [1, 6]
        >>> bool((monitor.table("smallest") >= 1 - 1e-9).all())
        True
    """

    def __init__(
        self,
        model: Model | Network | None = None,
        x: Tensor | None = None,
        *,
        every: int | None = None,
        samples: int = SAMPLES,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if model is not None and not isinstance(model, (Model, Network)):
            raise OptionError(
                f"a monitor watches a hdnn.Model or a network, but got {type(model).__name__}."
            )
        if not isinstance(x, Tensor) or x.ndim < 1 or not x.numel():
            raise ShapeError("x must be a tensor with the samples to look at, at least one.")
        self.model, self.optimizer = model, optimizer
        self.every = None if every is None else positive_int("every", every)
        self.x = x.detach().reshape(-1, x.shape[-1])[: positive_int("samples", samples)]
        self.records: list[Record] = []
        self.findings: list[str] = []
        self.steps, self.spent, self.start = 0, 0.0, time.perf_counter()
        self._handle: Any = None
        self._begun = self._now = self._end = 0  # steps of `fit`
        self._before = 0  # looks before it

    def __enter__(self) -> Self:
        if self.optimizer is not None:
            self._handle = self.optimizer.register_step_post_hook(lambda *_: self.step())
        self.start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __call__(self, moment: Moment) -> None:
        """As a callback of `hdnn.training.fit`."""
        self.model = moment.model
        if moment.step <= self._now or moment.steps != self._end:  # another training
            self._begun, self._end, self._before = moment.step, moment.steps, len(self.records)
        self._now = moment.step
        self.step()

    def step(self) -> None:
        """Count a step of the training, and look if it is time to."""
        self.steps += 1
        if self.steps == 1:
            self.start = time.perf_counter()
        if self._due():
            begun = time.perf_counter()
            self.look()
            self.spent += time.perf_counter() - begun

    def _due(self) -> bool:
        if self.every is not None:
            return (self.steps - 1) % self.every == 0
        training = time.perf_counter() - self.start - self.spent
        return not self.records or self._late() or self.spent <= SHARE * training

    def _late(self) -> bool:
        """Whether there would be too few looks without one now."""
        if not self._end:
            return self.steps <= LOOKS or self.steps >= GROWTH * self.records[-1].step
        done = (self._now - self._begun + 1) / (self._end - self._begun + 1)
        return len(self.records) - self._before < LOOKS * done or self._now == self._end

    @torch.no_grad()
    def look(self) -> Record:
        """Record the gradients as they are now, and return the record."""
        if self.model is None:
            raise OptionError("give the monitor a model, or use it as a callback of fit.")
        net, y = embedded(exact(self.model), self.x.cpu().double())
        Phi = backward_sensitivity(net, y)
        found = norms(Phi)
        lost = found.isnan().any(0)
        missing, mean = int(lost.sum()), Phi[:, ~lost].mean(1)
        smallest, median, largest = over_samples(found.where(~lost, torch.nan))
        if missing:
            largest[:-1] = torch.inf
        record = Record(
            self.steps,
            smallest.tolist(),
            median.tolist(),
            largest.tolist(),
            norms(mean).tolist(),
            _by_layer(self.model.net if isinstance(self.model, Model) else self.model),
            missing,
            (why_not(net, trajectory(net, y)) or BEYOND) if missing else "",
        )
        self.records.append(record)
        self._judge(record)
        return record

    def _judge(self, record: Record) -> None:
        """Warn the first time that gradients vanish, explode or cannot be computed."""
        small = [j for j, norm in enumerate(record.median[:-1]) if norm < VANISHED]
        large = [j for j, norm in enumerate(record.largest[:-1]) if norm > EXPLODED]
        if small and not self._said("vanish"):
            self._say(
                f"gradients vanish: at step {record.step} half of the samples have "
                f"norm(dy_N/dy_j) < {VANISHED:g} from layer {max(small)} down; a network of shears "
                "such as hdnn.H2 cannot do that."
            )
        lost = ""
        if record.missing and not self._said("not be computed"):
            lost = (
                f"those of {record.missing} of {len(self.x)} samples could not be computed, "
                f"because {record.why}"
            )
        if large and not self._said("explode"):
            high = max(record.largest[:-1])
            self._say(
                f"gradients explode: at step {record.step} norm(dy_N/dy_j) is up to {high:.2g}, "
                f"above {EXPLODED:g} from layer {max(large)} down; use a smaller step h, smaller "
                f"weights, or hdnn.regularization.gradient_budget.{lost and f' And {lost}.'}"
            )
        elif lost:
            self._say(f"gradients at step {record.step}: {lost}.")

    def _said(self, words: str) -> bool:
        return any(words in text for text in self.findings)

    def _say(self, text: str) -> None:
        self.findings.append(text)
        warnings.warn(text, GradientWarning, stacklevel=4)

    def table(self, name: str = "smallest") -> Tensor:
        """One of the recorded quantities as (records, N+1).

        Args:
            name: "smallest", "median" or "largest" norm over the samples; "of_mean", the norm of
                their mean matrix; or "weights", the gradients of the weights of layers 0 .. N-1.
        """
        rows = [getattr(record, choose("name", name, NAMES)) for record in self.records]
        return torch.tensor(rows, dtype=torch.float64)

    @property
    def recorded_steps(self) -> list[int]:
        """The steps at which it looked."""
        return [record.step for record in self.records]

    def to_csv(self) -> str:
        """All records as text: step, layer, and the norms over the samples."""
        lines = ["step,layer,smallest,median,largest,of_mean,weight_gradient"]
        for record in self.records:
            norms = record.smallest, record.median, record.largest, record.of_mean
            columns = zip_longest(*norms, record.weights, fillvalue=math.nan)
            for j, values in enumerate(columns):
                lines.append(f"{record.step},{j}," + ",".join(f"{value:.6g}" for value in values))
        return "\n".join([*lines, ""])

    def plot(self, ax: Axes | None = None, *, name: str = "smallest") -> Axes:
        """Draw the norms over steps and layers as colours, into `ax` or a new figure.

        Args:
            ax: the Axes to draw into.
            name: what is shown of the samples, as in `table`.
        """
        return plotting.gradient_surface(self, ax, name=name)

    def __str__(self) -> str:
        if not self.records:
            return "no gradients recorded yet"
        low = over_samples(self.table("smallest")[:, :-1].flatten())[0]
        high = self.table("largest")[:, :-1].max()
        text = (
            f"{len(self.records)} looks in {self.steps} steps, {len(self.x)} samples: "
            f"norm(dy_N/dy_j) from {low:.6g} to {high:.6g}"
        )
        missing = max(record.missing for record in self.records)
        if missing:
            text += f"; up to {missing} samples could not be computed"
        return "\n".join([text, *self.findings])


def _by_layer(net: Network) -> list[float]:
    """The norm of the gradient of each layer's weights, where these are stacked over layers."""
    grads = [p.grad for p in net.parameters() if p.grad is not None and p.grad.ndim]
    squares = [
        g.double().square().reshape(len(g), -1).sum(1) for g in grads if len(g) == net.layers
    ]
    return sum(squares[1:], squares[0]).sqrt().tolist() if squares else []
