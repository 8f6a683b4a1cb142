"""Watch the gradients of any model through its training, from its own passes."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from hdnn.analysis.doctor.diagnosis import Diagnosis
from hdnn.analysis.doctor.examine import SAMPLES, checked_options, diagnose, first_samples
from hdnn.analysis.doctor.finding import Finding
from hdnn.analysis.doctor.guard import float_tensors
from hdnn.analysis.monitor import GradientWarning
from hdnn.analysis.parts import unwrapped
from hdnn.errors import OptionError, positive_int, probability

EVERY = 100
SHARE = 0.025  # of the training time that examinations may take
EXPECTED = 300  # steps of training that a first examination takes, before one was timed
MOST_MODULES = 48
SAMPLED = 2048  # entries of each parameter whose change is followed
IN_A_ROW = 3  # looks that must agree before anything is said
OVER = 1e-5  # the norm of a gradient that is as good as 0
FADED = 1e-9  # of the median gradient: as good as nothing


@dataclass
class Look:
    """What one step of the training shows: by module, and by parameter."""

    step: int
    rms: dict[str, float] = field(default_factory=dict)  # of what comes out
    gradient: dict[str, float] = field(default_factory=dict)  # its norm, by what comes out
    weight_gradient: dict[str, float] = field(default_factory=dict)  # norm, by parameter
    update: dict[str, float] = field(default_factory=dict)  # change of a parameter over its size


class GradientDoctor:
    """Looks at every so many steps of a training, and examines the model where something is odd.

    A look takes the sizes of states and gradients from the passes that the training makes anyway.
    An examination is a `diagnose` at the inputs of the last look; it runs by itself where looks are
    odd or enough time has passed, as long as all of them take no more than a `share` of the
    training. `examine()` runs one at once. A fault that is found is told by a `GradientWarning`.
    Print the doctor to read what it knows.

    Args:
        model: any `nn.Module`.
        every: steps from one look to the next.
        optimizer: whose steps count, in a `with` block; without one, call `step()` after each.
        share: of the time of the training that examinations may take; 0 for none by themselves.
        layers: names of modules whose outputs are the states y_j, as `diagnose` takes them.
        loss: output -> a number, as `diagnose` takes it.

    Attributes:
        findings: every `Finding` so far, once each.
        diagnoses: the `Diagnosis` of each examination.
        looks: what each look saw, by module and by parameter.

    Raises:
        OptionError: if the model is no module, or if `share`, `layers`, `loss` or `optimizer` is
            not what it should be.
        ShapeError: if `every` is not positive.

    Examples:
        >>> import hdnn, torch
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(4, 1)), torch.randn(8, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with hdnn.analysis.GradientDoctor(model, optimizer=optimizer, share=0.0) as doctor:
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         loss = optimizer.step()
        >>> doctor.examine().healthy, len(doctor.looks)
        (True, 1)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = EVERY,
        optimizer: torch.optim.Optimizer | None = None,
        share: float = SHARE,
        layers: Iterable[str] | None = None,
        loss: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise OptionError(f"a doctor watches an nn.Module, but got {type(model).__name__}.")
        self.model, self.optimizer = unwrapped(model), optimizer
        self.every, self.share = positive_int("every", every), probability("share", share)
        self.options = {"layers": checked_options(layers, loss, optimizer), "loss": loss}
        self.looks: list[Look] = []
        self.diagnoses: list[Diagnosis] = []
        self.findings: list[Finding] = []
        self.steps, self.spent, self.start = 0, 0.0, time.perf_counter()
        self.inputs: Any = None
        self._handles: list[Any] = []
        self._step_handle: Any = None
        self._before: dict[str, Tensor] = {}
        self._look: Look | None = None

    def __enter__(self) -> Self:
        """Watch the training from here to the end of the block."""
        if self.optimizer is not None:
            self._step_handle = self.optimizer.register_step_post_hook(lambda *_: self.step())
        self.start = time.perf_counter()
        self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks away again."""
        self._disarm()
        if self._step_handle is not None:
            self._step_handle.remove()
            self._step_handle = None

    def step(self) -> None:
        """Count a step of the training; the next one is looked at if it is time to."""
        self.steps += 1
        if self._look is not None:
            self._finish(self._look)
        if self.steps % self.every == 0:
            self._arm()

    def _arm(self) -> None:
        """Hooks for the next step only."""
        self._disarm()
        look = self._look = Look(self.steps + 1)
        self._handles.append(self.model.register_forward_pre_hook(self._keep, with_kwargs=True))
        own = [
            (name, part)
            for name, part in self.model.named_modules()
            if next(part.parameters(recurse=False), None) is not None
        ]
        spread = max(1, -(-len(own) // MOST_MODULES))
        for name, part in own[::spread]:
            self._handles.append(part.register_forward_hook(_seen(look, name)))
        trained = ((n, p) for n, p in self.model.named_parameters() if p.requires_grad)
        self._before = {name: _sampled(p).clone() for name, p in trained}

    def _disarm(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._look, self._before = [], None, {}

    def _keep(self, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if not args or not named:
            self.inputs = first_samples(args or dict(named), SAMPLES)[0]

    def _finish(self, look: Look) -> None:
        before = self._before
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                look.weight_gradient[name] = float(p.grad.detach().norm())
            if name in before:
                was = before[name]
                size = float(was.norm())
                if size > 0:
                    look.update[name] = float((_sampled(p) - was).norm()) / size
        self._disarm()
        self.looks.append(look)
        odd = self._odd(look)
        if self._affordable() and (odd or not self.diagnoses or self._quiet_for_long()):
            self.examine()

    def _odd(self, look: Look) -> bool:
        """Whether this look, or the last few, need an explanation; what is certain is said."""
        bad = [n for n, g in {**look.rms, **look.gradient}.items() if not math.isfinite(g)]
        if bad:
            self._say(
                Finding(
                    "not finite",
                    bad[0],
                    f"At step {look.step} what comes out of {bad[0]}, or its gradient, is not "
                    "finite.",
                )
            )
        last = self.looks[-IN_A_ROW:]
        if len(last) == IN_A_ROW:
            self._check_steps(last)
        sizes = sorted(look.gradient.values())
        usual = sizes[len(sizes) // 2] if sizes else 0.0
        return bool(bad) or any(size < FADED * usual for size in sizes)

    def _check_steps(self, looks: list[Look]) -> None:
        """Updates that are lost to rounding in most parameters, time and again."""
        limits = {n: torch.finfo(p.dtype).eps / 4 for n, p in self.model.named_parameters()}
        lost = [
            name
            for name in looks[-1].update
            # Where the gradient is as good as 0, the training is over, and small steps are right.
            if all(
                one.update.get(name, 1.0) < limits[name] and one.weight_gradient.get(name, 0) > OVER
                for one in looks
            )
        ]
        if lost and len(lost) >= 0.5 * len(looks[-1].update):
            name = min(lost, key=lambda n: looks[-1].update[n])
            self._say(
                Finding(
                    "small step",
                    name,
                    f"Steps are too small: {len(lost)} of {len(looks[-1].update)} parameters do "
                    f"not change beyond rounding, {name} by {looks[-1].update[name]:.1g} of its "
                    "size. Take a larger learning rate.",
                    {"update": looks[-1].update[name]},
                    layers=tuple(lost),
                )
            )

    def _affordable(self) -> bool:
        elapsed = time.perf_counter() - self.start
        training = elapsed - self.spent
        expected = EXPECTED * training / max(self.steps, 1)
        if self.diagnoses:
            expected = self.diagnoses[-1].seconds
        return self.spent + expected <= self.share * training

    def _quiet_for_long(self) -> bool:
        training = time.perf_counter() - self.start - self.spent
        return self.spent < 0.5 * self.share * training

    def examine(self) -> Diagnosis:
        """Diagnose the model as it is now, at the inputs of the last look."""
        if self.inputs is None:
            raise OptionError(
                "the doctor has seen no inputs yet: let the model run once inside of the block."
            )
        begun, x = time.perf_counter(), self.inputs
        x = x[0] if isinstance(x, tuple) and len(x) == 1 else x
        found = diagnose(self.model, x, **self.options)
        self.spent += time.perf_counter() - begun
        self.diagnoses.append(found)
        for fault in found.faults:
            self._say(fault)
        return found

    def _say(self, finding: Finding) -> None:
        if any((f.kind, f.layer) == (finding.kind, finding.layer) for f in self.findings):
            return
        self.findings.append(finding)
        warnings.warn(f"step {self.steps}: {finding.sentence}", GradientWarning, stacklevel=2)

    @property
    def healthy(self) -> bool:
        """Whether the model was examined, and nothing was found then or in between."""
        return not self.findings and bool(self.diagnoses) and self.diagnoses[-1].healthy

    def __str__(self) -> str:
        lines = [
            f"{len(self.looks)} looks and {len(self.diagnoses)} examinations in {self.steps} steps"
        ]
        lines += map(str, self.findings)
        if self.diagnoses:
            lines.append(str(self.diagnoses[-1]))
        else:
            lines.append("NOT EXAMINED so far: the training was too short; call examine().")
        return "\n".join(lines)


def _seen(look: Look, name: str) -> Any:
    """A hook that notes the size of what comes out of a module, and of its gradient."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        out = next(iter(float_tensors(output)), None)
        if out is None or not out.requires_grad:
            return
        detached = out.detach()
        look.rms[name] = float(detached.norm()) / math.sqrt(detached.numel())
        out.register_hook(lambda g: look.gradient.__setitem__(name, float(g.detach().norm())))

    return hook


def _sampled(p: nn.Parameter) -> Tensor:
    flat = p.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)]
