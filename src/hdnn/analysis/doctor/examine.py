"""`diagnose`: look at any module on some inputs, and say what is wrong with its gradients."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.analysis.doctor.calls import rms
from hdnn.analysis.doctor.diagnosis import Diagnosis, LayerGains
from hdnn.analysis.doctor.findings import judge
from hdnn.analysis.doctor.guard import float_tensors, in_float32, looked_at
from hdnn.analysis.doctor.halves import rounding_losses, works_in_half
from hdnn.analysis.doctor.measure import measure
from hdnn.analysis.doctor.probe import Probe
from hdnn.analysis.doctor.products import STEPS, Gain
from hdnn.analysis.doctor.signals import Signals
from hdnn.analysis.parts import unwrapped
from hdnn.engine.chain import mapped
from hdnn.errors import DataError, HDNNError, OptionError, positive_int, quoted

SAMPLES = 8


def diagnose(
    model: nn.Module,
    x: Any,
    *,
    layers: Iterable[str] | None = None,
    loss: Callable[..., Tensor] | None = None,
    target: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    samples: int = SAMPLES,
    steps: int = STEPS,
) -> Diagnosis:
    """Find out whether and where the gradients of a model vanish, explode, end or get lost.

    The model runs a few times on x, as it is: in training mode if it is in it. Nothing of it is
    changed, and no random numbers are used up.

    Args:
        model: any `nn.Module`.
        x: its inputs: a tensor, a tuple of arguments, or a dict of named ones.
        layers: names of modules whose outputs are the states y_j. By default the states are found:
            all that every path from the output back to the input leads through.
        loss: output -> a number, or (output, target) -> a number if there is a `target`. By default
            a random projection of the output.
        target: what the loss compares the output with.
        optimizer: whose learning rate is compared with the size of the weights.
        samples: no more than so many, where all tensors of x have them first.
        steps: of Lanczos, for each matrix. The largest singular value is soon found, the smallest
            is an upper bound.

    Returns:
        A `Diagnosis`; print it to read it.

    Raises:
        OptionError: if the model is no module or has no parameters, if `layers`, `loss` or
            `optimizer` is not what it should be, or if there is a target without a loss.
        DataError: if x has no tensors or NaN in it, is empty, sparse or on another device, or if
            the model cannot be run on it and differentiated.
        ShapeError: if `samples` or `steps` is not positive.

    Examples:
        >>> import hdnn, torch
        >>> from torch import nn
        >>> layers = [nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()) for _ in range(12)]
        >>> found = hdnn.diagnose(nn.Sequential(*layers), torch.randn(8, 4))
        >>> found.healthy, [fault.kind for fault in found.faults]
        (False, ['vanishing'])
    """
    begun = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise OptionError(f"diagnose takes an nn.Module, but got {type(model).__name__}.")
    model = unwrapped(model)
    positive_int("samples", samples)
    positive_int("steps", steps)
    names = checked_options(layers, loss, optimizer)
    x, target = _plain(x), _plain(target)
    device = _checked(model, x)
    whole, (x, count) = x, first_samples(x, samples)
    score = _score(loss, first_samples(target, samples)[0] if target is not None else None)
    with warnings.catch_warnings(), torch.inference_mode(False):
        warnings.simplefilter("ignore")
        try:
            signals = _measured(model, x, score, names, steps, device)
        except DataError:
            if whole is x or layers is not None:
                raise
            # Perhaps the first axis does not count samples, as that of a graph's nodes.
            x, count = whole, first_samples(whole, 2**62)[1]
            signals = _measured(model, x, _score(loss, target), names, steps, device)
    if optimizer is not None:
        signals.steps = _steps(model, optimizer)
    return Diagnosis(
        type(model).__name__,
        tuple(judge(signals)),
        tuple(_gains(signals)),
        signals.body,
        tuple(signals.unknown),
        count,
        time.perf_counter() - begun,
    )


def checked_options(layers: Any, loss: Any, optimizer: Any) -> list[str] | None:
    """The names of layers as a list, after the mistakes that can be seen in these options."""
    if isinstance(layers, str):
        raise OptionError(f'layers is a list of names, but got "{layers}"; give [{layers!r}].')
    if layers is not None and not isinstance(layers, Iterable):
        raise OptionError(f"layers is a list of names of modules, but got {quoted(layers)}.")
    names = None if layers is None else [*layers]
    if names is not None and not names:
        raise OptionError("layers is empty: name one module at least, or leave it out.")
    if loss is not None and not callable(loss):
        raise OptionError(
            f"loss is a function of the output that gives a number, but got {quoted(loss)}."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"optimizer must be one of torch.optim, but got {type(optimizer).__name__}."
        )
    return names


def _measured(
    model: nn.Module, x: Any, loss: Any, names: list[str] | None, steps: int, device: torch.device
) -> Signals:
    with looked_at(model) as twin:
        probe = Probe(twin, _fresh(in_float32(x)), loss, names)
        try:
            signals = measure(probe, steps=steps)
        except HDNNError:
            raise
        except Exception as error:
            raise DataError(
                f"this {type(model).__name__} cannot be run on x and differentiated "
                f"({type(error).__name__}: {str(error).partition(chr(10))[0]}); give x as the "
                "module takes it: a tensor, a tuple of arguments, or a dict of named ones."
            ) from error
        if not signals.differentiable and not (signals.severed or signals.unreached):
            raise DataError(
                f"no gradient leads from the output of this {type(model).__name__} back to its "
                "parameters or inputs: it cannot be differentiated."
            )
        # Not in the block below, whose autocast is the caller's.
        wide = probe if works_in_half(model, device) else None
    if wide is not None and not any(f.fault for f in judge(signals)):
        with looked_at(model, widened=False) as twin, looked_at(model) as exact:
            own = Probe(twin, _fresh(x), loss, names)
            try:
                wide = Probe(exact, _fresh(in_float32(x)), loss, names)
                signals.rounding = rounding_losses(own, wide)
            except Exception as error:
                signals.unknown.append(f"what half precision loses ({error})")
    return signals


def _checked(model: nn.Module, x: Any) -> torch.device:
    """The device of the model, after the mistakes that can be seen before anything runs."""
    parameters = [*model.parameters()]
    if not parameters:
        raise OptionError(
            f"this {type(model).__name__} has no parameters: there is nothing to train in it."
        )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
        raise OptionError("the model has lazy parameters: run it once on data first.")
    device, tensors = parameters[0].device, _tensors(x)
    if not tensors:
        raise DataError(
            f"x must be a tensor, a tuple of arguments or a dict of named ones, but got "
            f"{type(x).__name__}."
        )
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise DataError("x is sparse, and the doctor takes dense tensors: give x.to_dense().")
        if tensor.device != device and tensor.ndim:
            raise DataError(
                f"x is on {tensor.device}, but the model is on {device}; move it with "
                f'x.to("{device}").'
            )
        if not tensor.numel():
            raise DataError(f"x is empty: its shape is {tuple(tensor.shape)}.")
    for tensor in float_tensors(x):
        if bool(tensor.isnan().any()):
            raise DataError("x has NaN in it: no gradient can be computed from that.")
    bad = [n for n, p in model.named_parameters() if not bool(p.detach().isfinite().all())]
    if bad:
        raise DataError(f"the parameter {bad[0]} is not finite: nothing can be computed with it.")
    return device


def _plain(x: Any) -> Any:
    """Named arguments as a dict, whatever mapping they come in."""
    return dict(x) if isinstance(x, Mapping) else x


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, Mapping):
        x = [*x.values()]
    return [t for each in x for t in _tensors(each)] if isinstance(x, (tuple, list)) else []


def first_samples(x: Any, samples: int) -> tuple[Any, int]:
    """The first samples of all tensors, if all have equally many; and how many these are."""
    tensors = [t for t in _tensors(x) if t.ndim]
    counts = {len(t) for t in tensors}
    if len(counts) != 1 or max(counts) <= samples:
        return x, max(counts, default=1)
    return mapped(lambda t: t[:samples] if t.ndim else t, x), samples


def _fresh(x: Any) -> Any:
    """Copies of all tensors, without a graph."""
    return mapped(lambda t: t.detach().clone(), x)


def _score(loss: Callable[..., Tensor] | None, target: Any) -> Callable[[Any], Tensor] | None:
    if loss is None:
        if target is not None:
            raise OptionError("a target needs a loss: give loss=... too.")
        return None

    def score(output: Any) -> Tensor:
        try:
            value = loss(output) if target is None else loss(output, target)
        except Exception as error:
            given = "" if target is None else " and the target"
            # Of the data, since they can fit together where the first axis is not cut.
            raise DataError(
                f"loss raised {type(error).__name__} when it was called on the output of the "
                f"model{given}: {str(error).partition(chr(10))[0]}"
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise OptionError("loss must give one number, as a tensor.")
        return value.reshape(())

    return score


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, float, float]]:
    """For each parameter: an update of the optimiser over its size, and what rounding takes away.

    From the gradients that the model has; an optimiser that divides by their size moves every entry
    by about the learning rate.
    """
    names = {id(p): n for n, p in model.named_parameters()}
    scaled = not isinstance(optimizer, torch.optim.SGD)
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            size, grad, moved = rms([p]), p.grad, float(group["lr"])
            if id(p) not in names or not size > 0 or (grad is None and not scaled):
                continue
            if not scaled and grad is not None:
                moved *= rms([grad])
            found.append((names[id(p)], moved / size, torch.finfo(p.dtype).eps / 4))
    return found


def _gains(signals: Signals) -> Iterable[LayerGains]:
    for one in signals.layers:
        whole, own = one.whole or Gain(), one.own or Gain()
        yield LayerGains(
            one.layer,
            whole.largest,
            whole.smallest,
            own.largest,
            own.smallest,
            one.rms,
            one.gradient if math.isfinite(one.gradient) else math.nan,
        )
