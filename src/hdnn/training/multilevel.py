"""Training from shallow to deep: each level starts as a finer discretisation of the last one."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from torch import Tensor

from hdnn.errors import TrainingError
from hdnn.model import Model
from hdnn.training import checkpoint
from hdnn.training.checks import head_of, whole_number
from hdnn.training.history import Callback, History
from hdnn.training.loop import fit
from hdnn.training.processes.parallel import team


def fit_multilevel(
    model: Model,
    x: Tensor,
    t: Tensor,
    *,
    refinements: Sequence[int] = (2, 2),
    epochs: int | Sequence[int] = 20,
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    parallel: bool = False,
    **options: Any,
) -> tuple[Model, list[History]]:
    """Train a shallow model, refine it, train the deeper one, and so on.

    A shallow network is cheap to train, and one with k times its layers at h/k is nearly the same
    function: what was learned is kept, and the deep network has little left to do.

    Args:
        model: the shallow one, which is trained in place.
        x: inputs (B, inputs), as `fit` takes them.
        t: labels or targets, as `fit` takes them.
        refinements: the factor by which each further level multiplies the number of layers.
        epochs: of each level: one number for all, or one each.
        seed: of the first level; those of the others follow from it.
        callbacks: called in all levels; one that ends a training ends only that level.
        folder: gets a folder for each level, level-0 and so on.
        resume: go on in the level that was interrupted, to the very same result.
        parallel: share each minibatch among processes, as in `fit`.
        **options: all others of `fit`. Held-out rows and `patience` belong to each level: it begins
            with the best model of the one before.

    Returns:
        The deepest model, and the `History` of each level.

    Raises:
        TrainingError: if the model cannot be trained, if `epochs` and `refinements` do not fit
            together, if a number is out of range, or if a training diverges.
        OptionError: if the network cannot be refined, or if a name is not known.
        DataError: if x or t do not fit the model or are not finite.
        ShapeError: if x has another number of inputs than the model.
        CheckpointError: if the folder cannot be used, or holds another training.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(200)
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 4), hdnn.SigmoidHead(4))
        >>> deep, histories = hdnn.training.fit_multilevel(
        ...     model, data.x_train, data.t_train, refinements=(2, 2), epochs=2, progress=False
        ... )
        >>> model.net.layers, deep.net.layers, len(histories)
        (4, 16, 3)
    """
    members, histories = team(parallel), []
    with ExitStack() as stack:
        with members.together():
            head_of(model)
            factors = [whole_number("a refinement", k, 1) for k in refinements]
            model.net.refine(1)  # raises if it cannot be refined
            counts = _epochs(epochs, 1 + len(factors))
            seed = whole_number("seed", seed, 0)
            callbacks, folders = list(callbacks), [None] * len(counts)
            place = checkpoint.open_folder(folder, resume) if members.first else None
            stack.enter_context(checkpoint.locked(place))
            if place is not None:  # all are checked before the first one is trained
                named = [place / f"level-{level}" for level in range(len(counts))]
                folders = [checkpoint.open_folder(one, resume) for one in named]
        for level, count in enumerate(counts):
            model = refined(model, factors[level - 1]) if level else model
            history = fit(
                *(model, x, t),
                epochs=count,
                seed=level_seed(seed, level),
                callbacks=callbacks,
                folder=folders[level],
                resume=resume,
                parallel=parallel,
                **options,
            )
            histories.append(history)
    return model, histories


def refined(model: Model, k: int) -> Model:
    """A model of its own with k times the layers at h/k, the same augmentation and output layer."""
    augment, head = copy.deepcopy(model.augment), copy.deepcopy(model.head)
    return Model(augment, model.net.refine(k), head)


def joined(histories: Iterable[History]) -> History:
    """All levels as one history."""
    whole = History()
    for history in histories:
        before = len(whole.loss)
        for name, values in history.curves().items():
            getattr(whole, name).extend(values)
        whole.best_epoch = before + history.best_epoch if history.best_epoch else 0
        whole.seconds += history.seconds
    return whole


def level_seed(seed: int, level: int) -> int:
    """The seed itself for the first level, then a number drawn from seed and level."""
    if not level:
        return seed
    drawn = np.random.SeedSequence([seed, level]).generate_state(1, np.uint64)
    return int(drawn[0]) >> 1  # PyTorch takes 63 bits


def _epochs(epochs: int | Sequence[int], levels: int) -> list[int]:
    if not isinstance(epochs, (Sequence, np.ndarray)):
        return [whole_number("epochs", epochs, 1)] * levels
    if len(epochs) != levels:
        raise TrainingError(
            f"epochs has {len(epochs)} entries, but there are {levels} levels, the first and one "
            "for each refinement; give one number for all, or one each."
        )
    return [whole_number("epochs", count, 1) for count in epochs]
