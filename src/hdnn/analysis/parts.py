"""Certificates of the Hamiltonian parts of any module: each of the part alone, none of the whole.

What lies between the parts, a linear layer for instance, may shrink gradients as it likes, so that
nothing can be said of a module that holds such parts. Each part is certified at the states that it
is given when the module runs on some inputs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hdnn.analysis import certificate
from hdnn.analysis.block_certificate import StateCall, block_certificate
from hdnn.analysis.certificate import SAMPLES, Certificate, Several
from hdnn.analysis.copies import copied, exact, lost_in_own_dtype
from hdnn.analysis.image_certificate import IMAGES, random_images, unit_certificate
from hdnn.analysis.words import linear_text
from hdnn.base.files import finite
from hdnn.engine.chain import mapped
from hdnn.errors import DataError, HDNNError, OptionError, positive_int
from hdnn.model import Model
from hdnn.models import ImageModel
from hdnn.networks import Coupling, Leapfrog, Network, Reversible
from hdnn.networks.promise import Promising

Given = tuple[tuple[Any, ...], dict[str, Any]]  # the arguments of a call


@dataclass(frozen=True)
class PartCertificates(Several):
    """The certificates of the Hamiltonian parts of a module, by their names.

    They say nothing of the module as a whole: what lies between the parts may shrink gradients.
    `certificates["name"]` is that of one part.

    Attributes:
        module: the kind of module that was searched.
        parts: each part's `Certificate`, by the name of the part in the module.
        missing: the parts that could not be certified, with the reason.
        others: the kinds of modules outside of all parts, which are not covered.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=16)
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), net, torch.nn.Linear(4, 3))
        >>> found = hdnn.analysis.certify(model, torch.randn(10, 2))
        >>> [*found.parts], found["1"].status, found.others
        (['1'], 'holds', ('Linear x 2',))
    """

    module: str
    parts: dict[str, Certificate]
    missing: dict[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Certificate:
        if name not in self.parts:
            why = self.missing.get(name, f"there are {', '.join(self.parts) or 'none'}")
            raise OptionError(f"there is no certificate of a part {name!r}: {why}.")
        return self.parts[name]

    def named(self) -> list[tuple[str, Certificate]]:
        """Each certificate with the name of its part."""
        return [*self.parts.items()]

    @property
    def unknown(self) -> str:
        """What could not be computed, and why; nothing where all could."""
        missing = (f"{name}: {why}" for name, why in self.missing.items())
        return "; ".join(filter(None, (super().unknown, *missing)))

    @property
    def summary(self) -> str:
        """What they say in plain words."""
        count = len(self.parts) + len(self.missing)
        holding = sum(one.status == "holds" for one in self.parts.values())
        told = {name: linear_text(vars(one)) for name, one in self.parts.items()}
        each = [f"{name}: {one.verdict}. {told[name]}".rstrip() for name, one in self.parts.items()]
        each += [f"{name}: NOT CERTIFIED, because {why}." for name, why in self.missing.items()]
        start = (
            f"The guarantee holds in {holding} of {count} Hamiltonian part{'s' * (count != 1)} of "
            f"this {self.module}. Of the module as a whole nothing is said"
        )
        outside = f": {', '.join(self.others)} may shrink gradients" if self.others else ""
        return "\n".join([f"{start}{outside}.", *each])

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "module": self.module,
            "summary": self.summary,
            "broken": list(self.broken),
            "unknown": self.unknown,
            "not_certified": self.missing,
            "not_covered": list(self.others),
            "certificates": {name: one.to_dict() for name, one in self.parts.items()},
        }

    def to_json(self) -> str:
        """One JSON object; a number that is beyond float64 is null."""
        return json.dumps(finite(self.to_dict()), indent=2)

    def __str__(self) -> str:
        return "\n\n\n".join([self.summary, *(f"{n}: {one}" for n, one in self.parts.items())])


@overload
def certify(  # pyright: ignore[reportOverlappingOverload]
    model: Model | Network | Coupling | Leapfrog | Reversible,
    y: Any = None,
    *,
    samples: int = SAMPLES,
    points: str = "",
    seed: int = 0,
) -> Certificate: ...


@overload
def certify(
    model: nn.Module, y: Any = None, *, samples: int = SAMPLES, points: str = "", seed: int = 0
) -> PartCertificates: ...


def certify(
    model: nn.Module, y: Any = None, *, samples: int = SAMPLES, points: str = "", seed: int = 0
) -> Certificate | PartCertificates:
    """Check the promise of a network, or of each Hamiltonian part inside any module.

    The promise is `norm(dy_N/dy_j) >= 1` for all layers j; for H2 it is
    th:nonvanishing_gradients_DT. All is computed in float64: the weights are certified, apart from
    rounding in the network's own dtype. Points at which the network itself overflows in its own
    dtype count as not computed.

    Args:
        model: a `hdnn.Model`, a network, a block or a stack of blocks, compiled or not, for one
            `Certificate`. Any other module is searched for networks, units and blocks of hdnn, for
            `PartCertificates`, which say nothing of the whole.
        y: where to look: inputs of a model, states of a network, or inputs of any other module, as
            it takes them (a tensor, a tuple of arguments, or a dict of named ones). The module runs
            on them once, in evaluation mode, and each part is certified at the states that it gets,
            blocks with the masks or edges of their first call. By default networks are certified at
            random states, and units and blocks not at all.
        samples: the most states (for a unit, and for blocks on more than 128 entries: at most 3) to
            look at. Samples of blocks that depend on each other, as nodes of a graph do, are one.
        points: what the certificate calls them.
        seed: of random states.

    Returns:
        A `Certificate`, or `PartCertificates` of a module that holds such networks.

    Raises:
        OptionError: if the module holds nothing that could be certified.
        ShapeError: if y does not fit a network of hdnn, or if `samples` is not positive.
        DataError: if weights or y are not finite, or if the module does not run on y.

    Examples:
        >>> import hdnn
        >>> hdnn.analysis.certify(hdnn.H2(features=4, layers=64)).holds
        True
        >>> plain = hdnn.analysis.certify(hdnn.MLP(features=4, layers=64, activation="sigmoid"))
        >>> plain.status, plain.smallest_norm < 1e-6
        ('not guaranteed', True)
    """
    model = unwrapped(model)
    if isinstance(model, (Model, Network)):
        options: dict[str, Any] = {"samples": samples, "points": points, "seed": seed}
        return certificate.certify(model, y, **options)
    if getattr(type(model), "certified_at", "") == "calls":
        return _at_calls(model, [_given(y)], samples, points or "points", seed)
    if not isinstance(model, nn.Module):
        raise OptionError(
            "certify takes a hdnn.Model, a network of hdnn, or a module that holds some, but got "
            f"{type(model).__name__}."
        )
    found = dict(hamiltonian_parts(model))
    if not found:
        raise OptionError(
            "certify takes a hdnn.Model, a network of hdnn, or a module that holds some, but this "
            f"{type(model).__name__} holds no network, no unit and no block of hdnn."
        )
    samples, states = positive_int("samples", samples), None
    if y is None and isinstance(model, ImageModel):
        y, points = random_images(model).to(next(model.parameters())), points or "random images"
    if y is not None:
        states = states_of(model, y, found)
    parts, missing = {}, {}
    for name, part in found.items():
        try:
            seen = None if states is None else states[name]
            parts[name] = _certified(part, seen, samples, points, seed)
        except HDNNError as error:
            missing[name] = str(error).rstrip(".")
    kinds = Counter(_kind(one) for one in _outside(model, found) if not [*one.children()])
    others = tuple(f"{kind} x {k}" if k > 1 else kind for kind, k in kinds.items())
    return PartCertificates(_kind(model), parts, missing, others)


def unwrapped(model: Any) -> Any:
    """The module that `torch.compile` or the data-parallel classes of PyTorch were given."""
    inner = getattr(model, "_modules", {}).get("_orig_mod")
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = model.module
    return model if inner is None else unwrapped(inner)


def hamiltonian_parts(model: nn.Module) -> Iterator[tuple[str, Promising]]:
    """The networks, units and stacks inside a module, by their names, compiled or not.

    A part inside of another one, such as a block of a stack, belongs to that.
    """
    inside: set[int] = set()
    for name, part in model.named_modules():
        if hasattr(type(part), "certified_at") and id(part) not in inside:
            inside |= {id(inner) for inner in part.modules()}
            plain = ".".join(word for word in name.split(".") if word != "_orig_mod")
            yield plain or _kind(part), part  # pyright: ignore[reportReturnType]


def states_of(model: nn.Module, inputs: Any, parts: Mapping[str, Any]) -> dict[str, list[Given]]:
    """What each part is given, in all calls of it, when a copy of the module runs."""
    try:
        twin = copied(model)
    except Exception:  # something in it cannot be copied
        twin = model
    mine = dict(zip(map(id, model.modules()), twin.modules(), strict=True))
    seen: dict[str, list[Given]] = {name: [] for name in parts}
    hooks = [
        mine[id(part)].register_forward_pre_hook(partial(_record, seen[name]), with_kwargs=True)
        for name, part in parts.items()
    ]
    try:
        with torch.no_grad(), evaluating(twin), torch.compiler.set_stance("force_eager"):
            args, named = _given(inputs)
            twin(*args, **named)
    except HDNNError:
        raise
    except Exception as error:
        raise DataError(
            f"this {_kind(model)} does not run on y ({type(error).__name__}: {error}); give y as "
            "the module takes it: a tensor, a tuple of arguments, or a dict of named ones."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _given(inputs: Any) -> Given:
    """Inputs as the arguments of a call."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _record(seen: list[Given], part: nn.Module, args: Any, named: dict[str, Any]) -> None:
    seen.append(mapped(Tensor.detach, (tuple(args), dict(named))))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A module in evaluation mode, and each part of it as it was afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _certified(
    part: Promising, given: list[Given] | None, samples: int, points: str, seed: int
) -> Certificate:
    """Where the part itself says that it can be."""
    certified = {"rows": _at_rows, "images": _at_images, "calls": _at_calls}[part.certified_at]
    if given is not None and not given:
        raise DataError("the module did not call it for these inputs")
    points = points or ("" if given is None else "states that it is given in the module")
    return certified(part, given, samples, points, seed)


def _at_rows(
    part: Any, given: list[Given] | None, samples: int, points: str, seed: int
) -> Certificate:
    if given is None:
        points = points or "random states, because no inputs were given"
        return certificate.certify(part, samples=samples, points=points, seed=seed)
    y = torch.cat([one.reshape(-1, part.features).cpu() for one in _states(given)])
    return certificate.certify(part, _spread(y, samples), samples=samples, points=points)


def _at_images(
    part: Any, given: list[Given] | None, samples: int, points: str, seed: int
) -> Certificate:
    if given is None:
        raise DataError("a unit is certified at images: give inputs of the module as y")
    y = _spread(_states(given)[0], min(samples, IMAGES))
    where, lost = f"{points}, norms by Lanczos from below", lost_in_own_dtype(part, y)
    dtype, twin = next(part.parameters()).dtype, exact(part).eval()
    return unit_certificate(twin, y.to("cpu", torch.float64), dtype, where, lost)


def _at_calls(
    part: Any, given: list[Given] | None, samples: int, points: str, seed: int
) -> Certificate:
    if given is None:
        raise DataError("blocks are certified at states: give inputs of the module as y.")
    call = StateCall.of(*given[0])
    return block_certificate(part, call, samples=positive_int("samples", samples), points=points)


def _states(given: list[Given]) -> list[Tensor]:
    """The tensors of all calls."""
    calls = [(*args, *named.values()) for args, named in given]
    states = [y for call in calls for y in call if isinstance(y, Tensor) and y.numel()]
    if not states:
        raise DataError("the module did not call it for these inputs")
    if not all(bool(y.isfinite().all()) for y in states):
        raise DataError("the states that it is given are not finite")
    return states


def _spread(y: Tensor, count: int) -> Tensor:
    """No more than so many rows, spread evenly over all."""
    return y[torch.linspace(0, len(y) - 1, min(count, len(y))).round().long()]


def _outside(model: nn.Module, parts: Mapping[str, Any]) -> list[nn.Module]:
    """All modules that are no part, and not inside of one."""
    inside = {id(inner) for part in parts.values() for inner in part.modules()}
    return [one for one in model.modules() if id(one) not in inside and one is not model]


def _kind(module: nn.Module) -> str:
    return parametrize.type_before_parametrizations(module).__name__
