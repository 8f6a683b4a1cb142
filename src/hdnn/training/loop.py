"""Coordinate descent: solve the output layer, take one Adam step on the hidden layers, repeat.

For every minibatch the output layer is fitted first, to the features that the hidden layers give
now; it is then kept fixed while the hidden layers descend. At the end the output layer is fitted
once more, to all data.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdnn.errors import DataError, TrainingError, choose
from hdnn.heads import RegressionHead, SigmoidHead, SoftmaxHead
from hdnn.model import Model

Head = RegressionHead | SigmoidHead | SoftmaxHead

SOLVERS = ("newton", "adam", "joint")
SCHEDULES = ("cosine", "constant")

# A few steps suffice where the next minibatch has another optimum anyway.
MINIBATCH_STEPS = {"newton": 5, "adam": 10}
REFIT_STEPS = 50


@dataclass
class History:
    """One entry an epoch: means over its minibatches, taken before each step."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)  # empty for regression
    smoothness: list[float] = field(default_factory=list)  # R_K
    learning_rate: list[float] = field(default_factory=list)
    seconds: float = 0.0


def fit(
    model: Model,
    x: Tensor,
    t: Tensor,
    *,
    epochs: int = 50,
    batch: int = 125,
    learning_rate: float = 2.5e-2,
    schedule: str = "cosine",
    solver: str = "newton",
    ridge: float = 1e-4,
    smoothness: float = 5e-4,
    seed: int = 0,
    progress: bool = True,
) -> History:
    """Minimise mean loss + smoothness R_K + ridge/2 |output layer|^2 (eq:minimization), in place.

    Args:
        x: inputs (B, ...), of the dtype and on the device of the model.
        t: labels (B,) in 0 .. classes-1, or targets (B, outputs) for a regression head.
        schedule: the rate stays "constant" or falls to zero as a "cosine".
        solver: how the output layer is found for each minibatch. "newton": damped Newton steps on
            the ridge-regularised problem; "adam": the paper's 10 Adam steps from zero, with weight
            decay `ridge`; "joint": not at all, it descends together with the hidden layers.
        smoothness: alpha, where the network is a discretised ODE; others have no R_K.
        seed: of the order of the samples; the global random state is neither read nor written.
        progress: show one line while a person waits at a terminal.
    """
    _check_options(epochs, batch, learning_rate, schedule, solver, ridge, smoothness, seed)
    head = _head(model)
    _check_data(model, x, t)
    t = t if isinstance(head, RegressionHead) else t.long()
    groups = _groups(model, solver, ridge)
    trained = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.Adam(groups, lr=learning_rate)
    generator = torch.Generator().manual_seed(seed)
    batches = math.ceil(len(x) / batch)
    history, line, was_training = History(), _Line(progress), model.training
    start = time.perf_counter()
    model.train()
    try:
        for epoch in range(epochs):
            sums, rate = torch.zeros(3, dtype=torch.float64), learning_rate
            for k, index in enumerate(_minibatches(len(x), batch, generator, x.device)):
                if schedule == "cosine":
                    done = (epoch + k / batches) / epochs
                    rate = learning_rate * 0.5 * (1 + math.cos(math.pi * done))
                    for group in optimizer.param_groups:
                        group["lr"] = rate
                y, target = model.features(x[index]), t[index]
                _finite(y, epoch, "last state y_N")
                if solver == "newton":
                    _newton(head, y.detach(), target, ridge, MINIBATCH_STEPS["newton"])
                elif solver == "adam":
                    # From zero each time: a rate that falls would leave it there.
                    same = [(y.detach(), target)] * MINIBATCH_STEPS["adam"]
                    _adam(head, same, ridge, learning_rate)
                scores = head(y)
                loss = head.loss(scores, target)
                R_K = _smoothness(model.net) if smoothness else torch.zeros(())
                objective = loss + smoothness * R_K
                _finite(objective, epoch, "loss")
                optimizer.zero_grad(set_to_none=True)
                # Only what is trained collects gradients: the output layer is fixed here.
                objective.backward(inputs=trained)
                optimizer.step()
                sums += torch.tensor([loss.item(), R_K.item(), _accuracy(head, scores, target)])
                line.show(
                    f"epoch {epoch + 1}/{epochs}, minibatch {k + 1}/{batches}, "
                    f"loss {loss.item():.4f}, {time.perf_counter() - start:.0f} s"
                )
            mean_loss, mean_R_K, mean_accuracy = (sums / batches).tolist()
            history.loss.append(mean_loss)
            history.smoothness.append(mean_R_K)
            history.learning_rate.append(rate)
            if not isinstance(head, RegressionHead):
                history.accuracy.append(mean_accuracy)
        for parameter in trained:
            _finite(parameter, epochs - 1, "result")
        if solver != "joint":
            with torch.no_grad():
                y = torch.cat([model.features(part) for part in x.split(4096)])
            _finite(y, epochs - 1, "last state y_N")
            _refit(head, y, t, solver, ridge, learning_rate, batch, generator)
    finally:
        line.close()
        model.train(was_training)
        optimizer.zero_grad(set_to_none=True)
    history.seconds = time.perf_counter() - start
    return history


def _groups(model: Model, solver: str, ridge: float) -> list[dict[str, Any]]:
    """What Adam trains: the hidden layers and, jointly, the output layer with its own decay."""
    head = set(model.head.parameters())
    free = [p for p in model.parameters() if p.requires_grad]
    hidden, output = [p for p in free if p not in head], [p for p in free if p in head]
    groups: list[dict[str, Any]] = [{"params": hidden}]
    if solver == "joint":
        groups.append({"params": output, "weight_decay": ridge})
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise TrainingError(
            "the hidden layers have no parameter that requires a gradient; unfreeze some with "
            'requires_grad_(), or train the output layer alone with solver="joint".'
        )
    return groups


def _refit(
    head: Head,
    y: Tensor,
    t: Tensor,
    solver: str,
    ridge: float,
    rate: float,
    batch: int,
    generator: torch.Generator,
) -> None:
    """Fit the output layer to all data; the hidden layers stay."""
    if solver == "newton":
        _newton(head, y, t, ridge, REFIT_STEPS)
    else:
        indices = (_minibatches(len(y), batch, generator, y.device) for _ in range(REFIT_STEPS))
        parts = [(y[index], t[index]) for epoch in indices for index in epoch]
        _adam(head, parts, ridge, rate)


@torch.no_grad()
def _newton(head: Head, y: Tensor, t: Tensor, ridge: float, max_steps: int) -> None:
    """Minimise mean loss + ridge/2 |(W, b)|^2 over the output layer by damped Newton steps.

    The problem is strictly convex for ridge > 0, so the start does not matter: it is zero.
    In float64 whatever the model's dtype: with little ridge the Hessian is nearly singular.
    """
    A = torch.cat([y, torch.ones_like(y[:, :1])], 1).double()
    (B, d), c = A.shape, head.weight.shape[0]
    T = (F.one_hot(t, c) if isinstance(head, SoftmaxHead) else t.reshape(B, c)).double()
    W = A.new_zeros(c, d)
    value = _penalised(head, A, T, W, ridge)
    for _ in range(max_steps):
        # The loss of one sample has the gradient P - T in its scores, or 2/c (S - T), and the
        # Hessian diag(D) or, for softmax, diag(P) - P P^T.
        S = A @ W.T
        if isinstance(head, RegressionHead):
            residual, D = (S - T) * (2 / c), torch.full_like(S, 2 / c)
        else:
            P = S.softmax(1) if isinstance(head, SoftmaxHead) else S.sigmoid()
            residual, D = P - T, P if isinstance(head, SoftmaxHead) else P * (1 - P)
        gradient = residual.T @ A / B + ridge * W
        hessian = torch.block_diag(*((A * D[:, i : i + 1]).T @ A for i in range(c)))
        if isinstance(head, SoftmaxHead):
            M = (D[:, :, None] * A[:, None, :]).reshape(B, c * d)
            hessian -= M.T @ M
        hessian = hessian / B + ridge * torch.eye(c * d, dtype=A.dtype, device=A.device)
        # Least squares: rounding in a nearly singular Hessian must not stop a training.
        step = torch.linalg.lstsq(hessian, gradient.reshape(-1, 1)).solution.reshape(c, d)
        decrease = (gradient * step).sum()
        if not decrease > 1e-14:
            break
        # Far from the optimum a full step can overshoot: halve it until it pays.
        for halvings in range(30):
            trial = W - 0.5**halvings * step
            trial_value = _penalised(head, A, T, trial, ridge)
            if trial_value <= value - 1e-4 * 0.5**halvings * decrease:
                W, value = trial, trial_value
                break
        else:
            break
    head.weight.copy_(W[:, :-1])
    head.bias.copy_(W[:, -1])


def _penalised(head: Head, A: Tensor, T: Tensor, W: Tensor, ridge: float) -> Tensor:
    S = A @ W.T
    if isinstance(head, RegressionHead):
        loss = F.mse_loss(S, T)
    elif isinstance(head, SoftmaxHead):
        loss = F.cross_entropy(S, T)
    else:
        loss = F.binary_cross_entropy_with_logits(S, T)
    return loss + 0.5 * ridge * W.square().sum()


def _adam(head: Head, parts: Sequence[tuple[Tensor, Tensor]], decay: float, rate: float) -> None:
    """One Adam step on the output layer, from zero, for each (y, t): the paper's inner solver."""
    parameters = list(head.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.zero_()
    optimizer = torch.optim.Adam(parameters, lr=rate, weight_decay=decay)
    for y, t in parts:
        optimizer.zero_grad(set_to_none=True)
        head.loss(head(y), t).backward(inputs=parameters)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _minibatches(
    samples: int, batch: int, generator: torch.Generator, device: torch.device
) -> Iterator[Tensor]:
    """The indices of all samples in random order, `batch` at a time; the last may be fewer."""
    yield from torch.randperm(samples, generator=generator).to(device).split(batch)


def _smoothness(net: nn.Module) -> Tensor:
    R_K = getattr(net, "smoothness", None)
    return torch.zeros(()) if R_K is None else R_K()


def _accuracy(head: Head, scores: Tensor, t: Tensor) -> float:
    if isinstance(head, RegressionHead):
        return math.nan
    return (head.predict(scores) == t).double().mean().item()


def _finite(value: Tensor, epoch: int, what: str) -> None:
    if not bool(torch.isfinite(value.detach()).all()):
        raise TrainingError(
            f"the {what} is not finite in epoch {epoch + 1}: the training has diverged; "
            "lower learning_rate, use a smaller step h or a bounded activation such as tanh."
        )


def _head(model: Model) -> Head:
    if not isinstance(model, Model):
        raise TrainingError(
            f"fit trains a hdnn.Model, but got {type(model).__name__}; make one of a network by "
            "hdnn.Model(augment, net, head)."
        )
    if not isinstance(model.head, (RegressionHead, SigmoidHead, SoftmaxHead)):
        raise TrainingError(
            f"a {type(model.head).__name__} has no loss to train with; use a SigmoidHead or a "
            "SoftmaxHead for classes, a RegressionHead for values."
        )
    return model.head


def _check_options(
    epochs: int,
    batch: int,
    learning_rate: float,
    schedule: str,
    solver: str,
    ridge: float,
    smoothness: float,
    seed: int,
) -> None:
    choose("schedule", schedule, SCHEDULES)
    choose("solver", solver, SOLVERS)
    for name, count, least in (("epochs", epochs, 1), ("batch", batch, 1), ("seed", seed, 0)):
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise TrainingError(f"{name} must be a whole number >= {least}, but got {count!r}.")
    numbers = {"learning_rate": learning_rate, "ridge": ridge, "smoothness": smoothness}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TrainingError(f"{name} must be a number, but got {value!r}.")
        if not (math.isfinite(value) and value >= 0):
            raise TrainingError(f"{name} must be finite and not negative, but got {value}.")
    if not learning_rate > 0:
        raise TrainingError("learning_rate must be > 0, but got 0; the paper has 2.5e-2.")
    if solver == "newton" and not ridge > 0:
        raise TrainingError(
            "the newton solver needs ridge > 0: separable data have no optimal output layer "
            "without it; take e.g. ridge=1e-4."
        )


def _check_data(model: Model, x: Tensor, t: Tensor) -> None:
    like, head = next(model.head.parameters()), model.head
    for name, tensor in (("x", x), ("t", t)):
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"{name} must be a torch.Tensor, but got {type(tensor).__name__}; "
                "use torch.as_tensor."
            )
        if tensor.device != like.device:
            raise DataError(
                f"{name} is on {tensor.device}, but the model on {like.device}; "
                "bring both together with .to(device)."
            )
    if x.ndim != 2 or len(x) == 0:
        raise DataError(f"x must be (B, inputs) with B >= 1 samples, but got {tuple(x.shape)}.")
    if x.dtype != like.dtype:
        raise DataError(f"x is {x.dtype}, but the model {like.dtype}; use x.to({like.dtype}).")
    if len(t.reshape(-1)) == 0 or len(x) != len(t):
        raise DataError(f"x has {len(x)} samples, but t has shape {tuple(t.shape)}; give one each.")
    _check_finite("x", x)
    if isinstance(head, RegressionHead):
        if t.numel() != len(x) * head.outputs:
            raise DataError(
                f"t must be ({len(x)}, {head.outputs}), a value for each output of the head, "
                f"but got {tuple(t.shape)}."
            )
        _check_finite("t", t)
        return
    classes = 2 if isinstance(head, SigmoidHead) else head.outputs
    if t.ndim != 1 or t.is_floating_point() or t.is_complex():
        raise DataError(
            f"t must be whole-number labels ({len(x)},), but got {t.dtype} of shape "
            f"{tuple(t.shape)}; use t.long()."
        )
    low, high = int(t.min()), int(t.max())
    if low < 0 or high >= classes:
        raise DataError(
            f"labels must lie in 0 .. {classes - 1} for this head, but t has {low} .. {high}; "
            f"renumber them or take a SoftmaxHead of {max(high + 1, 2)} classes."
        )


def _check_finite(name: str, tensor: Tensor) -> None:
    bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1)
    if bool(bad.any()):
        raise DataError(
            f"{name} has NaN or infinite values in {int(bad.sum())} of {len(bad)} samples, the "
            f"first at index {int(bad.nonzero()[0])}; remove or replace them."
        )


class _Line:
    """One line on stderr for a person who has waited two seconds; nothing when piped."""

    def __init__(self, wanted: bool) -> None:
        self.on = wanted and sys.stderr is not None and sys.stderr.isatty()
        self.due = time.monotonic() + 2.0
        self.shown = False

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self.on and now >= self.due:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self.due, self.shown = now + 0.1, True

    def close(self) -> None:
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
