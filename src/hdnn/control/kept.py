"""What a training on processes keeps in a folder, so that any number of them can go on with it.

The file is that of other trainings: all weights and Adam's moments, agents and links in their
order, whoever has them; and the history. The root writes it, whole or not at all.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdnn.control.problems import LoopProblem
from hdnn.control.training import BY, KINDS, SHARED, identity_of, others_refused
from hdnn.training import checkpoint

SAVE_EVERY = 30.0  # seconds between checkpoints
MOMENTS = ("exp_avg", "exp_avg_sq")
POSITION = {**KINDS, "processor_seconds": float}


@dataclass(frozen=True)
class Keeping:
    """What all processes know about it.

    Attributes:
        folder: where the root keeps the training.
        options: those of the training, and all of its problem that decides the bits.
        stages: iterations after which weights are kept too, each in a folder of its own.
        launcher: the process that started this one, which ends if that is gone; 0 if there is none.
    """

    folder: Path
    options: dict[str, Any]
    stages: tuple[int, ...] = ()
    launcher: int = 0


class State:
    """All that the root writes and reads.

    Args:
        problem: as it is before the training; it stays so.

    Attributes:
        done: iterations.
        seconds: that they took.
        processor_seconds: of all processes together.
        history: as `train_on_processes` returns it.
    """

    def __init__(self, problem: LoopProblem) -> None:
        self.problem = copy.deepcopy(problem)
        self.weights = dict(self.problem.loop.controller.named_parameters())
        self.optimizer = torch.optim.Adam(self.weights.values())
        self.done, self.seconds, self.processor_seconds = 0, 0.0, 0.0
        self.history: dict[str, list[float]] = {}

    def put(self, name: str, weight: Tensor, *moments: Tensor) -> None:
        """Take a weight of all controllers as it is now, with its moments."""
        held = self.weights[name]
        with torch.no_grad():
            held.copy_(weight)
        slots = {key: each.contiguous() for key, each in zip(MOMENTS, moments, strict=True)}
        self.optimizer.state[held] = {"step": torch.tensor(float(self.done)), **slots}

    def get(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """A weight of all controllers, and its moments."""
        held = self.weights[name]
        nothing = torch.zeros_like(held)
        m, v = (self.optimizer.state[held].get(key, nothing) for key in MOMENTS)
        return held.detach(), m, v

    def write(self, keeping: Keeping) -> None:
        """Keep it, and the problem with its weights as they are now."""
        names = ("history", "seconds", "processor_seconds")
        state = {"options": keeping.options, "epoch": self.done}
        state |= {name: getattr(self, name) for name in names}
        # Starts are drawn by number, so that there is no random state to be kept.
        unused = torch.Generator().get_state()
        if self.done in keeping.stages:  # first: whoever goes on from here does not pass it again
            self.problem.save(keeping.folder / f"during-{self.done}")
        checkpoint.save(keeping.folder, self.problem.loop, self.optimizer, unused, state)
        self.problem.save(keeping.folder)

    def read(self, keeping: Keeping) -> bool:
        """Go on from what a folder holds; False if it holds nothing yet.

        Raises:
            CheckpointError: if it holds another training, or is damaged.
        """
        saved = checkpoint.read(keeping.folder, {})
        if saved is None:
            return False
        others_refused(saved, SHARED)
        saved = checkpoint.read(keeping.folder, keeping.options)
        assert saved is not None
        checkpoint.check_state(saved, POSITION, keeping.options["iterations"])
        state = saved.state
        with checkpoint.understood(saved.path):
            if any(len(values) != state["epoch"] for values in state["history"].values()):
                raise ValueError("its history is not complete")
            if state["history"].keys() != self.history.keys():
                raise ValueError("its history has other names")
        checkpoint.restore(saved, self.problem.loop, self.optimizer)
        with checkpoint.understood(saved.path):
            if state["epoch"] and not all(self.optimizer.state[w] for w in self.weights.values()):
                raise ValueError("moments are missing")
        self.done, self.history = state["epoch"], state["history"]
        self.seconds, self.processor_seconds = state["seconds"], state["processor_seconds"]
        return True


def identity(problem: LoopProblem, options: dict[str, Any]) -> dict[str, Any]:
    """All that decides the bits of a training on processes; how many there are does not."""
    return {**options, BY: SHARED, **identity_of(problem)}
