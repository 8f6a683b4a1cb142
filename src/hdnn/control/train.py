"""Training of closed loops: Adam on the cost of a horizon, from new starts in each iteration."""

from __future__ import annotations

import math
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.control.certificate import LoopCertificate
from hdnn.control.cost import squared_distances
from hdnn.control.problem import LoopProblem
from hdnn.errors import (
    ConvergenceError,
    OptionError,
    positive_float,
    positive_int,
)
from hdnn.progress import Progress
from hdnn.training import checkpoint
from hdnn.training.fit import one_thread
from hdnn.training.recipes import cosine

SAVE_EVERY = 2.0  # seconds between checkpoints
WARM_UP = 10  # iterations in which the learning rate rises
LOWEST = 0.02  # of the rate, at the end
# Robots that meet have gradients a thousand times larger than others. Adam then hardly moves until
# it has forgotten such a gradient: this takes 1,000 iterations with the usual beta of 0.999, but 5
# with 0.8. If both betas are equal, no weight ever moves by more than the learning rate.
BETAS = (0.8, 0.8)


class LoopTraining:
    """A training run for the controllers of a problem, in place; `run` starts or continues it.

    In each iteration the loop is simulated over one horizon from a batch of new random starts, and
    Adam takes a step. The learning rate rises for 10 iterations, then falls to 2% as a cosine.

    With a folder, a training run that was interrupted or killed can resume, and ends with exactly
    the same bits: make the problem again, and pass the folder with `resume=True`. A cost function
    is identified only by its name.

    Args:
        problem: the problem whose controllers are trained.
        iterations: the number of iterations of Adam.
        batch: the number of starts in each iteration.
        rate: the largest learning rate of Adam.
        seed: the seed for the starts.
        folder: the folder for checkpoints; by default nothing is written.
        resume: resume the training run in `folder`, or start one there if it is empty.

    Examples:
        >>> from hdnn import control
        >>> problem = control.crossing("ring", steps=10)
        >>> training = control.LoopTraining(problem, iterations=3, batch=2)
        >>> history = training.run(progress=False)
        >>> training.done, len(history["cost"])
        (3, 3)
        >>> training.certify().holds
        True
    """

    def __init__(
        self,
        problem: LoopProblem,
        *,
        iterations: int = 300,
        batch: int = 4,
        rate: float = 0.1,
        seed: int = 0,
        folder: str | Path | None = None,
        resume: bool = False,
    ) -> None:
        self.problem = problem
        self.loop = problem.loop
        self.iterations = positive_int("iterations", iterations)
        self.batch = positive_int("batch", batch)
        self.rate = positive_float("rate", rate)
        self.seed = seed
        weights = [w for w in self.loop.parameters() if w.requires_grad]
        if not weights:
            raise OptionError(
                "all weights of the controllers are frozen; there is nothing to train."
            )
        self.optimizer = torch.optim.Adam(
            weights,
            lr=self.rate,
            betas=BETAS,
            fused=True,
        )
        self.history: dict[str, list[float]] = {}
        self.done = 0
        self.folder = folder
        self.identity = self._identity()
        if folder is not None:
            with ExitStack() as stack:
                checkpoint.open_folder(folder, resume, stack)
                self._restore(Path(folder))

    def run(
        self,
        progress: bool = True,
        *,
        until: int | None = None,
    ) -> dict[str, list[float]]:
        """Train to the end, or up to an iteration.

        Args:
            progress: show a progress line at a terminal.
            until: the number of iterations after which to return; by default all. Another call
                continues from there.

        Returns:
            The history, with one number per iteration: the cost, its terms (each multiplied by its
            weight), the smallest distance between two agents, and the learning rate.

        Raises:
            ConvergenceError: if the cost is not finite, or a step of the loop has no solution.
        """
        last = self.iterations
        if until is not None:
            last = min(until, last)
        saved = time.monotonic()
        with ExitStack() as stack:
            # Idle threads of PyTorch would spin on the kernel's cores.
            stack.enter_context(one_thread())
            if self.folder is not None:
                checkpoint.open_folder(self.folder, True, stack)
                stack.callback(self._save)
            line = None
            if progress:
                line = stack.enter_context(Progress("training", last))
            while self.done < last:
                self._iterate()
                if line is not None:
                    cost = self.history["cost"][-1]
                    line.update(self.done, f"cost {cost:.4g}")
                if time.monotonic() - saved > SAVE_EVERY:
                    self._save()
                    saved = time.monotonic()
        return self.history

    def starts(self, iteration: int) -> Tensor:
        """The start states `(batch, N, n)` of an iteration, which is numbered from 0."""
        return self.problem.starts(self.batch, seed=self.seed, draw=iteration)

    def certify(self, samples: int = 16, horizons: int = 2) -> LoopCertificate:
        """The certificate of the loop, from starts that are not used in training."""
        y = self.problem.starts(samples, seed=self.seed, draw=self.iterations)
        return self.loop.certify(y, horizons)

    def _iterate(self) -> None:
        rate = self.rate * rate_factor(self.done, self.iterations)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        trajectory = self.loop(self.starts(self.done))
        cost, terms = self._cost(trajectory)
        cost.backward()
        value = cost.item()
        # Clipping at infinity only measures: the sum of all sizes.
        size = nn.utils.clip_grad_norm_(self.loop.parameters(), math.inf, 1.0)
        if not math.isfinite(value + size):
            raise ConvergenceError(
                f"the cost is {value:.4g} in iteration {self.done + 1}, its gradient of size "
                f"{size:.4g}; both must be finite: lower the rate, or correct the cost."
            )
        self.optimizer.step()
        self.done += 1
        numbers = {"cost": value, **terms, "rate": rate}
        if self.loop.plant.agents > 1:
            dimensions = self.problem.dimensions
            squares = squared_distances(trajectory.detach(), dimensions)
            numbers["distance"] = float(squares.amin()) ** 0.5
        for name, number in numbers.items():
            self.history.setdefault(name, []).append(number)

    def _cost(self, trajectory: Tensor) -> tuple[Tensor, dict[str, float]]:
        cost: Any = self.problem.cost
        if hasattr(cost, "terms"):
            terms = cost.terms(self.loop, trajectory)
            total = torch.stack([*terms.values()])
            values = zip(terms, total.tolist(), strict=True)
            return total.sum(), dict(values)
        total = cost(self.loop, trajectory)
        if isinstance(total, Tensor):
            able = total.requires_grad
            if able and total.numel() == 1:
                return total, {}
            total = f"a tensor {tuple(total.shape)} with requires_grad={able}"
        raise OptionError(
            "cost must return one number with a gradient, such as a mean over the trajectory, but "
            f"returned {total}."
        )

    # The checkpoint

    def _identity(self) -> dict[str, Any]:
        """Everything that determines the exact result of training."""
        return {
            "iterations": self.iterations,
            "batch": self.batch,
            "rate": self.rate,
            "seed": self.seed,
            # A function is identified by its name; its address changes.
            "cost": re.sub(" at 0x[0-9a-f]+", "", str(self.problem.cost)),
            "radius": self.problem.radius,
            "start": checkpoint.digest([self.problem.z, self.problem.xi]),
            "weights": checkpoint.digest(self.loop.state_dict().values()),
        }

    def _save(self) -> None:
        if self.folder is not None:
            checkpoint.write(
                Path(self.folder),
                self.identity,
                {"done": self.done, "history": self.history},
                {},
                self.loop,
                self.optimizer,
            )

    def _restore(self, folder: Path) -> None:
        saved = checkpoint.read(folder, self.identity)
        if saved is None:
            return
        checkpoint.restore(saved, self.loop, self.optimizer)
        self.done = saved.values["done"]
        self.history = saved.values["history"]


def rate_factor(done: int, iterations: int) -> float:
    """The factor of the learning rate after some iterations: it rises, then falls as a cosine."""
    rising = min(1.0, (done + 1) / WARM_UP)
    falling = LOWEST + (1 - LOWEST) * cosine(done / iterations)
    return rising * falling
