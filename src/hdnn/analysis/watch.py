"""Monitoring of gradients in any training loop: when to look, and records of each look."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from hdnn import plotting
from hdnn.analysis.certificate import over_samples
from hdnn.analysis.modules import exact
from hdnn.analysis.sensitivity import backward_sensitivity, norms
from hdnn.errors import OptionError, ShapeError, choose, positive_int
from hdnn.networks import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHARE = 0.04  # share of the training time that looks of a monitor may take
GROWTH = 1.1  # growth of the steps after which it looks in any case
SAMPLES = 64
NAMES = ("smallest", "median", "largest", "of_mean")
VANISHED = 1e-6
EXPLODED = 1e6


class GradientWarning(UserWarning):
    """Gradients that vanish, explode or cannot be computed, noticed by a monitor or a doctor."""


class Watcher:
    """A counter of training steps, which calls `look` at some steps.

    In a `with` block it counts the optimiser's steps; otherwise call `step()` after each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        every: int | None,
        share: float,
    ) -> None:
        self.optimizer = optimizer
        self.every = None if every is None else positive_int("every", every)
        self.share = share
        self.steps = 0
        self.last = 0  # the step of the last look
        self.spent = 0.0
        self.start = time.perf_counter()
        self.warned: set[str] = set()
        self.findings: list[Any] = []
        self.handles: list[Any] = []

    def __enter__(self) -> Self:
        if self.optimizer is not None:
            self.handles.append(
                self.optimizer.register_step_post_hook(lambda *_: self.step())
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def step(self) -> None:
        """Count a training step, and look if a look is due."""
        self.steps += 1
        if self._due():
            begun = time.perf_counter()
            self.look()
            self.last = self.steps
            self.spent += time.perf_counter() - begun

    def look(self) -> Any:
        """Look at the present gradients."""

    def _due(self) -> bool:
        if self.every is not None:
            return (self.steps - 1) % self.every == 0
        return self.steps >= GROWTH * self.last or self.affordable()

    def affordable(self, seconds: float = 0.0) -> bool:
        """True if looks have taken no more than their share of the time so far."""
        training = time.perf_counter() - self.start - self.spent
        return self.spent + seconds <= self.share * training

    def warn(self, what: str, text: str, finding: Any = None) -> None:
        """Warn of something for the first time, and add it to the findings."""
        if what in self.warned:
            return
        self.warned.add(what)
        self.findings.append(finding or text)
        warnings.warn(
            f"step {self.steps}: {text}", GradientWarning, stacklevel=4
        )


@dataclass(frozen=True)
class Record:
    """One look at the norms of dy_N/dy_j, for layers j = 0 .. N, over the samples.

    Samples that could not be computed are left out, except that the largest norm is then infinite.
    """

    step: int
    smallest: list[float]
    median: list[float]
    largest: list[float]
    # The norm of the mean of all samples' matrices, which the paper shows.
    of_mean: list[float]
    missing: int  # samples that could not be computed


class GradientMonitor(Watcher):
    """A record of norm(dy_N/dy_j) of a network every few training steps.

    Use it as a callback of `hdnn.training.fit`, or in a `with` block around any other loop, where
    it counts the optimiser's steps. When gradients first vanish or explode, it gives a
    `GradientWarning`. Print the monitor for a summary, or see `plot()`, `table()` and `to_csv()`.

    Args:
        model: an `hdnn.Model` or a network; not needed for a callback, which gets it from `fit`.
        x: the samples to look at: inputs of a model, or states of a network.
        every: the number of steps from one look to the next. By default, the monitor looks often
            while that costs little time, and otherwise whenever the number of steps has grown by a
            tenth.
        samples: the largest number of samples of x to look at.
        optimizer: the optimiser whose steps count in a `with` block; without one, call `step()`
            after each step.

    Attributes:
        records: a record of each look: its step, and for each layer the smallest, median and
            largest norm over the samples, and the norm of their mean matrix.
        findings: the sentences of its warnings.

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
        model: Any = None,
        x: Tensor | None = None,
        *,
        every: int | None = None,
        samples: int = SAMPLES,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        if not isinstance(x, Tensor) or x.ndim < 1 or not x.numel():
            raise ShapeError(
                "x must be a tensor with at least one sample to look at."
            )
        super().__init__(optimizer, every, SHARE)
        self.model = model
        self.x = x.detach().reshape(-1, x.shape[-1])[
            : positive_int("samples", samples)
        ]
        self.records: list[Record] = []

    def __call__(self, moment: Any) -> None:
        """Count a step, as a callback of `hdnn.training.fit`."""
        self.model = moment.model
        self.step()

    @torch.no_grad()
    def look(self) -> Record:
        """Record the present gradients, and return the record."""
        net = getattr(self.model, "net", self.model)
        if not isinstance(net, Network):
            raise OptionError(
                "a monitor watches an hdnn.Model or a network, but got "
                f"{type(self.model).__name__}; give it a model, or use it as a callback of fit."
            )
        model = exact(self.model)
        y = self.x.to("cpu", torch.float64)
        if model is not net and hasattr(model, "embed"):
            y = model.embed(y)
        Phi = backward_sensitivity(getattr(model, "net", model), y)
        sizes = norms(Phi)
        lost = sizes.isnan().any(0)
        sizes[:, lost] = torch.nan
        smallest, median, largest = over_samples(sizes)
        if bool(lost.any()):
            largest[:-1] = torch.inf
        of_mean = norms(Phi[:, ~lost].mean(1))
        curves = [
            curve.tolist() for curve in (smallest, median, largest, of_mean)
        ]
        record = Record(self.steps, *curves, missing=int(lost.sum()))
        self.records.append(record)
        self._judge(record)
        return record

    def _judge(self, record: Record) -> None:
        """Warn the first time that gradients vanish, explode or cannot be computed."""
        N = len(record.median) - 1
        small = [j for j in range(N) if record.median[j] < VANISHED]
        large = [j for j in range(N) if record.largest[j] > EXPLODED]
        if small:
            self.warn(
                "vanish",
                f"gradients vanish: half of the samples keep less than {VANISHED:g} of the "
                f"gradient from layer {max(small)} down; H2 and its relatives cannot do that.",
            )
        if record.missing:
            self.warn(
                "missing",
                f"the gradients of {record.missing} of {len(self.x)} samples cannot be computed: "
                "states or weights are not finite.",
            )
        elif large:
            self.warn(
                "explode",
                f"gradients explode: they grow by a factor of {max(record.largest[:-1]):.2g} on "
                f"the way back, and by more than {EXPLODED:g} from layer {max(large)} down; use a "
                "smaller step h or smaller weights.",
            )

    def table(self, name: str = "smallest") -> Tensor:
        """The recorded norms of one kind, (records, N+1): smallest, median, largest or of_mean."""
        choose("name", name, NAMES)
        rows = [getattr(record, name) for record in self.records]
        return torch.tensor(rows, dtype=torch.float64)

    @property
    def recorded_steps(self) -> list[int]:
        """The steps of all looks."""
        return [record.step for record in self.records]

    def to_csv(self) -> str:
        """All records as text: step, layer, and the norms over the samples."""
        lines = [f"step,layer,{','.join(NAMES)}"]
        for record in self.records:
            curves = [getattr(record, name) for name in NAMES]
            for j, values in enumerate(zip(*curves, strict=True)):
                texts = [f"{value:.6g}" for value in values]
                lines.append(",".join([str(record.step), str(j), *texts]))
        return "\n".join([*lines, ""])

    def plot(self, ax: Axes | None = None, *, name: str = "smallest") -> Axes:
        """Draw the norms as colours over steps and layers, into `ax` or a new figure.

        Args:
            ax: the Axes to draw into.
            name: the kind of norm, as in `table`.
        """
        return plotting.gradient_surface(self, ax, name=name)

    def __str__(self) -> str:
        if not self.records:
            return "no gradients recorded yet"
        low = float(self.table("smallest")[:, :-1].nan_to_num(torch.inf).min())
        high = float(self.table("largest")[:, :-1].max())
        text = (
            f"{len(self.records)} looks in {self.steps} steps, {len(self.x)} samples: "
            f"norm(dy_N/dy_j) from {low:.6g} to {high:.6g}"
        )
        return "\n".join([text, *self.findings])
