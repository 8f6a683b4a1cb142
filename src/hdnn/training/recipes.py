"""Schedules, and recipes that were found to serve: for tables, for MNIST and for CIFAR-10."""

from __future__ import annotations

import math


def cosine(done: float) -> float:
    """A fall from 1 to 0 as the fraction `done` goes from 0 to 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


def rate_factor(done: float, steps: int, warmup: float, schedule: str) -> float:
    """The factor of the learning rate when the fraction `done` of all steps is done.

    It rises for the fraction `warmup`, then stays "constant" or falls to zero as a "cosine".
    """
    if done < warmup:
        return min((done + 1 / steps) / warmup, 1.0)
    return 1.0 if schedule == "constant" else cosine((done - warmup) / (1 - warmup))
