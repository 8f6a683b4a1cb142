"""How rates change in the course of a training."""

from __future__ import annotations

import math


def cosine(done: float) -> float:
    """From 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))


def factor(done: float, steps: int, warmup: float, schedule: str) -> float:
    """What the learning rate is multiplied by when the fraction `done` of all steps is done.

    It rises for the fraction `warmup`, then stays "constant" or falls to zero as a "cosine".
    """
    if done < warmup:
        return min((done + 1 / steps) / warmup, 1.0)
    return 1.0 if schedule == "constant" else cosine((done - warmup) / (1 - warmup))
