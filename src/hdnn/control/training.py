"""Training of closed loops: Adam on the cost of a horizon, from fresh starts in each iteration."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hdnn import engine as engines
from hdnn.base.files import as_path
from hdnn.base.progress import ProgressLine
from hdnn.base.threads import one_thread, threads_for
from hdnn.control import costs, fused, fused_cost
from hdnn.control.certificate import LoopCertificate
from hdnn.control.fused_cost import Priced
from hdnn.control.links import Edges
from hdnn.control.objective import WEIGHTS, Cost
from hdnn.control.problems import LoopProblem, checked, load_problem
from hdnn.errors import (
    CheckpointError,
    OptionError,
    TrainingError,
    flag,
    int_from,
    positive_float,
    positive_int,
    quoted,
)
from hdnn.training import checkpoint, identity
from hdnn.training.interrupt import DeferredInterrupt
from hdnn.training.schedule import cosine

SAVE_EVERY = 2.0  # seconds between checkpoints
WARM_UP = 10  # iterations in which the rate rises
LOWEST = 0.02  # of the rate, at the end
# Of Adam. Robots that meet have gradients a thousand times as large as others, after which Adam
# hardly moves until it has forgotten them: in 1,000 iterations by the usual 0.999, in 5 by 0.8.
# With both betas the same, no weight ever moves by more than the rate.
BETAS = 0.8, 0.8
TERMS = WEIGHTS
KINDS = {"epoch": int, "seconds": float, "history": dict}
KIND = "kind of cost"
BY, SHARED = "trained by", "processes"
# What checkpoints of earlier versions do not have; there it is not compared.
LATER = ("plant links", "links", "agents", "engine of the loop", KIND)
LONG = 80  # characters; of more links only a digest is kept


class LoopTraining:
    """Train the controllers of a problem, in place; `run` does it, or goes on with it.

    In each iteration the loop is simulated over one horizon from a batch of fresh random starts,
    and Adam takes a step. The rate rises for 10 iterations, then falls to 2% as a cosine. Starts
    follow from the seed and the number of the iteration; those in which agents would collide from
    the start are drawn again.

    With a folder, a training that was interrupted or killed goes on to the very bits that it would
    have had: `LoopTraining.resume(folder).run()`. It also keeps the problem with its weights there,
    for `load_problem`, and a log with a line an iteration. A cost of a class that extends `Cost`
    cannot be kept: then give the problem again, with `resume=True`.

    Args:
        problem: whose controllers.
        iterations: how many.
        batch: starts an iteration.
        rate: the largest rate of Adam.
        seed: of the starts.
        folder: where to keep all that is needed to go on; by default nowhere.
        resume: go on with the training in `folder`, or begin there if it is empty.

    Raises:
        ShapeError: if iterations, batch or seed are no whole numbers in range.
        StepError: if the rate is not > 0.
        CheckpointError: if the folder cannot be used, holds a training and is not to be resumed, or
            holds another one.
        OptionError: if the problem is no `LoopProblem`.

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
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
    ) -> None:
        self.problem, self.loop = checked(problem), problem.loop
        options = in_range(iterations, batch, rate, seed)
        self.iterations, self.batch, self.rate, self.seed = options.values()
        self.weights = [p for p in self.loop.parameters() if p.requires_grad]
        self._check_weights()
        self.optimizer = torch.optim.Adam(self.weights, lr=self.rate, betas=BETAS, fused=True)
        pairs = problem.agents > 1 if problem.cost.pairs is None else bool(problem.cost.pairs)
        names = ("cost", *TERMS, *["distance"] * pairs, "rate")
        self.history: dict[str, list[float]] = {name: [] for name in names}
        self.done, self.seconds = 0, 0.0
        self.options = {**self._chosen(), **identity_of(problem)}
        self.folder = checkpoint.open_folder(folder, flag("resume", resume))
        if self.folder is not None:
            with checkpoint.locked(self.folder):
                saved = _read(self.folder, self.options)
                if saved is None:
                    self._save()
                else:
                    self._restore(saved)

    @classmethod
    def resume(cls, folder: str | os.PathLike[str]) -> Self:
        """The training that a folder holds, with its problem, as it was when last saved.

        Args:
            folder: the folder.

        Returns:
            A training; `run` goes on with it.

        Raises:
            CheckpointError: if the folder holds no training, if it is damaged, or if it would not
                go on to the same bits here.
        """
        path = as_path(folder)
        saved = _read(path, {})
        kind = "Cost" if saved is None else saved.state["options"].get(KIND, "Cost")
        if kind != "Cost":
            raise CheckpointError(
                f"the cost of the training in {path} is a {kind}, which no file can hold; go on "
                "with LoopTraining(problem, .., folder=.., resume=True)."
            )
        problem = load_problem(path)
        if saved is None:
            raise CheckpointError(f"{path} holds no training; begin one with LoopTraining(..).")
        with checkpoint.understood(saved.path):
            chosen = {
                name: saved.state["options"][name]
                for name in ("iterations", "batch", "rate", "seed")
            }
        training = cls(problem, **chosen)
        # The weights of the problem are those of now; its start is of those at the start.
        _read(path, {name: part for name, part in training.options.items() if name != "start"})
        training.options, training.folder = saved.state["options"], path
        training._restore(saved)
        return training

    def run(
        self,
        progress: bool = True,
        *,
        until: int | None = None,
        callback: Callable[[Self], bool | None] | None = None,
    ) -> dict[str, list[float]]:
        """Train to the end, or up to an iteration.

        Args:
            progress: show one line while a person waits at a terminal.
            until: the number of iterations after which to return; by default all.
            callback: called with this training after each iteration; the run ends if it returns
                True, and another run goes on from there.

        Returns:
            The history, a number an iteration: the cost and its terms (each times its weight), the
            smallest distance between two agents that the cost compares, and the rate.

        Raises:
            TrainingError: if the cost is not finite.
            ConvergenceError: if a step of the loop has no solution.
            CheckpointError: if the training in the folder has gone further than this object.
            OptionError: if progress is not True or False, or the callback cannot be called.
        """
        last = self.iterations if until is None else int_from(0, "until", until)
        if callback is not None and not callable(callback):
            raise OptionError(f"callback must be a function, but got {quoted(callback)}.")
        self._check_weights()
        line = ProgressLine(flag("progress", progress))
        start, saved = time.perf_counter(), time.monotonic()
        spent = self.seconds
        try:
            with checkpoint.locked(self.folder), DeferredInterrupt(0.0) as interrupt:
                self._check_last()
                log = checkpoint.Log(self.folder, self.done)
                wish, threads = False, one_thread if self._by_kernel() else nullcontext
                while self.done < min(last, self.iterations) and not (wish or interrupt.came):
                    with threads(), torch.inference_mode(False), torch.enable_grad():
                        self._iterate()
                    self.seconds = spent + time.perf_counter() - start
                    log.write({"iteration": self.done, **self._now(), "seconds": self.seconds})
                    line.show(self._line())
                    wish = bool(callback and callback(self))
                    if time.monotonic() - saved > SAVE_EVERY:
                        self._save()
                        saved = time.monotonic()
                self._save()
                if interrupt.came:
                    raise KeyboardInterrupt
        finally:
            line.close()
            self.optimizer.zero_grad(set_to_none=True)
        return self.history

    def starts(self, iteration: int) -> Tensor:
        """The states that an iteration starts from, `(batch, N, n)`; its number counts from 0."""
        return self.problem.starts(self.batch, seed=self.seed, draw=iteration)

    def certify(self, samples: int = 16, horizons: int = 2) -> LoopCertificate:
        """The certificate of the loop as it is now, from starts that the training does not take.

        Args:
            samples: how many starts.
            horizons: over how many.

        Returns:
            A certificate; print it to read it.
        """
        y = self.problem.starts(samples, seed=self.seed, draw=self.iterations)
        return self.loop.certify(y, horizons)

    def _by_kernel(self) -> bool:
        """Whether the fused kernel runs: more threads of PyTorch would be in its way."""
        if (self.loop.engine or engines.current().engine) not in ("auto", "fused"):
            return False
        return not fused.why_not(self.problem.start(), self.loop.system())

    def _iterate(self) -> None:
        rate = self.rate * factor(self.done, self.iterations)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        trajectory = self.loop(self.starts(self.done))
        price = self._priced(trajectory)
        trajectory.backward(price.states)
        self.optimizer.step()
        numbers = {"cost": sum(price.terms.values()), **price.terms, "rate": rate}
        for name, values in self.history.items():
            values.append(price.nearest if name == "distance" else numbers[name])
        self.done += 1

    def _priced(self, trajectory: Tensor) -> Priced:
        """The cost of a trajectory; its gradients in the weights are left with these."""
        loop, cost = self.loop, self.problem.cost
        if not fused_cost.why_not(loop, cost, trajectory):
            price = fused_cost.priced(loop, cost, trajectory)
            self._check(sum(price.terms.values()))
            for name, gradient in price.weights.items():
                weight = getattr(loop.controller, name)
                weight.grad = gradient if weight.requires_grad else None
            return price
        states = trajectory.detach().requires_grad_()
        with threads_for(states[0].numel(), states.device.type):
            terms = cost.terms(loop, states)
            whole = torch.stack([*terms.values()]).sum()
            self._check(float(whole.detach()))
            whole.backward()
            found = {name: float(term.detach()) for name, term in terms.items()}
            slopes = torch.zeros_like(states) if states.grad is None else states.grad
            return Priced(found, slopes, {}, _nearest(self.problem, states))

    def _check(self, cost: float) -> None:
        if not math.isfinite(cost):
            raise TrainingError(
                f"the cost is not finite in iteration {self.done + 1}: the training has diverged; "
                "lower the rate, or the weights of the cost."
            )

    def _check_weights(self) -> None:
        if not any(weight.requires_grad for weight in self.weights):
            raise TrainingError(
                "all weights of the controllers are frozen; nothing can be trained."
            )

    def _check_last(self) -> None:
        """Refuse to write over what another object has done in the folder since."""
        saved = None if self.folder is None else _read(self.folder, self.options)
        if saved is None:
            return
        checkpoint.check_state(saved, KINDS, self.iterations)
        if saved.state["epoch"] > self.done:
            raise CheckpointError(
                f"the training in {self.folder} has gone on to iteration {saved.state['epoch']}, "
                f"and this object is at {self.done}; take LoopTraining.resume(..)."
            )

    def _line(self) -> str:
        where, cost = f"iteration {self.done}/{self.iterations}", self.history["cost"][-1]
        near = "".join(f"nearest {x[-1]:.2f}, " for n, x in self.history.items() if n == "distance")
        return f"{where}, cost {cost:.4g}, {near}{self.seconds:.0f} s"

    def _now(self) -> dict[str, float]:
        return {name: values[-1] for name, values in self.history.items()}

    def _chosen(self) -> dict[str, Any]:
        names = ("iterations", "batch", "rate", "seed")
        return {name: getattr(self, name) for name in names}

    def _save(self) -> None:
        if self.folder is None:
            return
        state = {"options": self.options, "epoch": self.done, "seconds": self.seconds}
        # Starts are drawn by number, so that there is no random state to be kept.
        unused = torch.Generator().get_state()
        state["history"] = self.history
        checkpoint.save(self.folder, self.loop, self.optimizer, unused, state)
        if type(self.problem.cost) is Cost:
            self.problem.save(self.folder)

    def _restore(self, saved: checkpoint.Saved) -> None:
        checkpoint.check_state(saved, KINDS, self.iterations)
        with checkpoint.understood(saved.path):
            if saved.state["history"].keys() != self.history.keys():
                raise ValueError("its history has other names")
        state, _ = checkpoint.restore(saved, self.loop, self.optimizer)
        self.done, self.seconds = state["epoch"], state["seconds"]
        self.history = state["history"]


def in_range(iterations: Any, batch: Any, rate: Any, seed: Any) -> dict[str, Any]:
    """The options of a training, or an error that names the one that cannot be."""
    return {
        "iterations": positive_int("iterations", iterations),
        "batch": positive_int("batch", batch),
        "rate": positive_float("rate", rate),
        "seed": int_from(0, "seed", seed),
    }


def factor(done: int, iterations: int) -> float:
    """What the rate is multiplied by when so many iterations are done."""
    falling = LOWEST + (1 - LOWEST) * cosine(done / iterations)
    return min(1.0, (done + 1) / WARM_UP) * falling


def _nearest(problem: LoopProblem, trajectory: Tensor) -> float:
    """The smallest distance of two agents that the cost compares; infinite for one agent."""
    squares = costs.between(trajectory.detach(), problem.cost.dimensions, problem.cost.pairs)
    return float(squares.amin()) ** 0.5 if squares.numel() else math.inf


def identity_of(problem: LoopProblem) -> dict[str, Any]:
    """All of a problem that decides the bits of its training."""
    tensors = [problem.z, problem.xi, *problem.loop.state_dict().values()]
    return {
        "cost": problem.cost.to_dict(),
        KIND: type(problem.cost).__name__,
        "radius": problem.radius,
        "collision": problem.collision,
        "plant links": _brief(problem.loop.plant.links),
        "links": _brief(problem.loop.controller.links),
        "start": identity.digest(tensors),
        "agents": identity.digest([problem.z, problem.xi, *problem.loop.buffers()]),
        "betas of Adam": [*BETAS],
        "engine of the loop": problem.loop.engine,
        **identity.of_model(problem.loop),
    }


def _brief(links: Edges) -> str:
    """Links as an error can show them, or how many there are and their digest."""
    text = ", ".join(f"{i}-{k}" for i, k in links)
    if len(text) <= LONG:
        return text
    return f"{len(links)} of digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _read(folder: Path, options: dict[str, Any]) -> checkpoint.Saved | None:
    """A saved training with these options, or None if there is none yet."""
    saved = checkpoint.read(folder, {})
    if saved is None:
        return None
    others_refused(saved, None)
    theirs = saved.state["options"]
    known = {n: part for n, part in options.items() if n in theirs or n not in LATER}
    return checkpoint.read(folder, known)


def others_refused(saved: checkpoint.Saved, by: str | None) -> None:
    """Refuse a training of the other kind, whose bits are not those that this one would come to."""
    if saved.state["options"].get(BY) == by:
        return
    kind, way = "LoopTraining", "LoopTraining.resume(..)"
    if by is None:
        kind, way = "training on processes", "train_on_processes(.., resume=True)"
    raise CheckpointError(
        f"{saved.path} is of a {kind}, which rounds in another order; go on with it by {way}, or "
        "choose another folder."
    )
