"""The promise about a network's gradients, and whether numbers confirm it.

The promise is norm(dy_N/dy_j) >= 1 for every sample and layer: each layer has a Jacobian of
determinant 1 (or at least 1), so the product of any number of them has too, and a matrix whose
determinant is at least 1 has no norm below 1. It is about the matrix: some direction does not
shrink, while a single gradient can. What could not be computed never counts as holding.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hdnn import plotting
from hdnn.analysis.bounds import Bound, compared_bounds
from hdnn.analysis.measure import (
    HIDDEN,
    Call,
    Measured,
    measure_layers,
    measure_network,
)
from hdnn.analysis.sensitivity import copied, exact
from hdnn.errors import (
    DataError,
    HDNNError,
    OptionError,
    ShapeError,
    positive_int,
)
from hdnn.networks import (
    Coupling,
    HamiltonianUnit,
    Leapfrog,
    Network,
    Reversible,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 20
RANGES = 8  # of layers, in the table
NOT_SHRUNK = "at least one direction of the gradient is not shrunk"
LINEAR = 1e-3  # relative: derivatives that vary less are those of a linear map
FEWEST = 10  # points, from which linearity is concluded
SHOWN = 1000.0  # larger bounds are not shown
PARTS = (Network, HamiltonianUnit, Coupling, Leapfrog, Reversible)


@dataclass(frozen=True)
class Certificate:
    """The answer to 'is the gradient shrunk?', for a network or for the parts of a model.

    Made by `certify`. Print it to read it; `plot()` draws the norms against the layers. Of a model
    that holds several parts, `certificate["name"]` is that of one part, and the figures are those
    of the worst.

    Attributes:
        network: what was certified, in one line.
        guaranteed: True if norm(dy_N/dy_j) >= 1 is proved for this network.
        reason: why it is proved, or why not.
        holds: True if it is proved and numbers confirm it, False if they contradict it, None if it
            is not known or nothing is proved.
        trouble: what could not be computed, and why.
        layers: N.
        features: the entries of a state.
        dtype: of the weights; all is computed from them in float64.
        samples: how many points were looked at.
        points: where these come from.
        smallest_norm: over all points and layers j < N that were computed; NaN if there are none.
        smallest_at: the layer and the point of this norm.
        largest_norm: over the same.
        symplectic: True if each layer is, up to rounding; None if not promised or not known.
        symplectic_defect: the largest `symplectic_defect` of a layer.
        bounds: every known `Bound`, compared with what was measured.
        linear: True if the network is a linear map at these points, so that depth adds nothing.
        by_layer: the curves of the plot: "layers", "smallest", "median" and "largest".
        parts: of a model, the certificate of each Hamiltonian part, by its name.
        others: the kinds of modules outside of all parts, which are not covered.

    Examples:
        >>> import hdnn
        >>> certificate = hdnn.analysis.certify(hdnn.H2(features=4, layers=64))
        >>> certificate.status, certificate.symplectic, certificate.smallest_norm >= 1
        ('holds', True, True)
        >>> print(certificate)
        At every layer, at least one direction of the gradient is not shrunk...
    """

    network: str
    guaranteed: bool
    reason: str
    holds: bool | None
    trouble: str = ""
    layers: int = 0
    features: int = 0
    dtype: str = ""
    samples: int = 0
    points: str = ""
    smallest_norm: float = math.nan
    smallest_at: tuple[int, int] | None = None
    largest_norm: float = math.nan
    symplectic: bool | None = None
    symplectic_defect: float | None = None
    bounds: tuple[Bound, ...] = ()
    linear: bool | None = None
    by_layer: dict[str, list[Any]] = field(default_factory=dict)
    parts: dict[str, Certificate] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Certificate:
        if name not in self.parts:
            names = ", ".join(self.parts) or "none"
            raise OptionError(
                f"there is no part {name!r}; the parts are: {names}."
            )
        return self.parts[name]

    @property
    def violations(self) -> tuple[str, ...]:
        """The facts that are proved for this network and that the numbers contradict."""
        facts = []
        if self.holds is False and not self.parts:
            facts.append(
                f"the smallest norm is {self.smallest_norm:.6g}, where 1 is proved"
            )
        if self.symplectic is False:
            facts.append(
                f"a layer is off symplectic by {self.symplectic_defect:.1e}"
            )
        facts += [
            f"a bound is exceeded ({b})"
            for b in self.bounds
            if b.holds is False
        ]
        for name, part in self.parts.items():
            facts += [f"{name}: {fact}" for fact in part.violations]
        return tuple(facts)

    @property
    def status(self) -> str:
        """In a word: "holds", "violated", "not known" or "not guaranteed"."""
        if self.violations:
            return "violated"
        if self.holds:
            return "holds"
        return (
            "not known" if self.trouble or self.guaranteed else "not guaranteed"
        )

    @property
    def summary(self) -> str:
        """The answer in plain words."""
        if self.parts:
            return self._summary_of_parts()
        sentences = [self._sentence()]
        if self.linear:
            sentences.append(
                "The network is linear at these points: a linear model would do the same."
            )
        return " ".join(sentences)

    def _sentence(self) -> str:
        where = f"{self.samples} {self.points}"
        if self.violations:
            return (
                f"A GUARANTEE DOES NOT HOLD HERE: {'; '.join(self.violations)}."
            )
        if self.trouble:
            return f"It is NOT KNOWN whether the gradient is shrunk: {self.trouble}."
        if not self.samples:
            return f"Nothing is proved for this {self.network}: {self.reason}."
        least = _number(self.smallest_norm)
        if self.holds:
            return (
                f"At every layer, {NOT_SHRUNK}: this is proved {self.reason}, and confirmed at "
                f"{where} (smallest norm {least})."
            )
        measured = f"at {where} {NOT_SHRUNK} (smallest norm {least})"
        if self.smallest_norm < 1 - 1e-9 and self.smallest_at:
            measured = (
                f"at layer {self.smallest_at[0]} every direction of the gradient is shrunk, to "
                f"{least} or less at one or more of {where}"
            )
        return f"Nothing is proved for this network, it was only measured: {measured}."

    def _summary_of_parts(self) -> str:
        count = len(self.parts)
        holding = sum(part.status == "holds" for part in self.parts.values())
        outside = (
            f": {', '.join(self.others)} may shrink gradients"
            if self.others
            else ""
        )
        lines = [
            f"The guarantee holds in {holding} of {count} Hamiltonian part{'s' * (count > 1)} of "
            f"this {self.network}. Nothing is said about the model as a whole{outside}."
        ]
        lines += [
            f"{name}: {part.summary}" for name, part in self.parts.items()
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values for JSON; a number that is not finite is None."""
        values = {
            name: getattr(self, name) for name in self.__dataclass_fields__
        }
        values["status"] = self.status
        values["summary"] = self.summary
        values["violations"] = list(self.violations)
        values["bounds"] = [
            {**asdict(b), "holds": b.holds} for b in self.bounds
        ]
        values["parts"] = {
            name: part.to_dict() for name, part in self.parts.items()
        }
        return plain(values)

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw smallest, median and largest norm against the layer, into `ax` or a new figure."""
        return plotting.certificate_norms(self, ax)

    def __str__(self) -> str:
        if not self.by_layer:
            each = [f"{name}: {part}" for name, part in self.parts.items()]
            return "\n\n".join([self.summary, *each])
        rows = [
            ("network", self.network),
            (
                "points",
                f"{self.samples} {self.points}; weights {self.dtype}, norms in float64",
            ),
            ("layers j", f"{'smallest':>12} {'largest':>12}   norm(dy_N/dy_j)"),
            *self._ranges(),
        ]
        if self.symplectic_defect is not None:
            words = {True: "yes", False: "NO", None: "not known"}
            rows.append(
                (
                    "symplectic",
                    f"{words[self.symplectic]}, to {self.symplectic_defect:.1e}",
                )
            )
        budget = [b.value for b in self.bounds if b.name == "budget"]
        if budget and budget[-1] < SHOWN:
            low, high = budget
            rows.append(
                (
                    "bounds",
                    f"a gradient keeps between {low:.2g} and {high:.3g} of its size",
                )
            )
        table = [f"{name:<10}  {text}" for name, text in rows]
        return "\n".join([self.summary, "", *table])

    def _ranges(self) -> list[tuple[str, str]]:
        layers = self.by_layer["layers"][:-1]
        rows = []
        for chunk in torch.arange(len(layers)).tensor_split(
            min(RANGES, len(layers))
        ):
            first, last = int(chunk[0]), int(chunk[-1])
            least = min(self.by_layer["smallest"][first : last + 1])
            most = max(self.by_layer["largest"][first : last + 1])
            name = (
                f"{layers[first]} .. {layers[last]}"
                if last > first
                else f"{layers[first]}"
            )
            rows.append((name, f"{_number(least):>12} {_number(most):>12}"))
        return rows


def _number(value: float) -> str:
    """Six digits; a norm just below 1 is never rounded up to 1."""
    if math.isnan(value):
        return "unknown"
    if 0.999999 <= value < 1 - 1e-9:
        return "0.999999"
    return f"{value:.6g}"


def plain(value: Any) -> Any:
    """Values as JSON can hold them: lists, dicts, and None for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def certify(
    model: nn.Module,
    y: Any = None,
    *,
    samples: int = SAMPLES,
    points: str = "",
    seed: int = 0,
) -> Certificate:
    """Check that gradients are not shrunk: norm(dy_N/dy_j) >= 1 for all layers j.

    For H2 this is th:nonvanishing_gradients_DT. All is computed in float64 and in evaluation mode.
    Points at which the network itself overflows in its own dtype count as not computed.

    Args:
        model: a `hdnn.Model`, a network, a `HamiltonianUnit` or blocks of hdnn, compiled or not.
            Any other module is searched for these; nothing is said about such a module as a whole.
        y: inputs of the model, or states of a network, unit or block; further arguments are given
            as a tuple, or by name as a dict. By default networks are certified at random states.
        samples: the most points to look at; of images and of blocks at most 3. Samples of blocks
            that depend on each other, as nodes of a graph do, are one state.
        points: what the certificate calls them.
        seed: of random states.

    Returns:
        A `Certificate`: print it to read it.

    Raises:
        OptionError: if model is no module.
        ShapeError: if y does not fit.
        DataError: if weights or y are not finite, or if the module does not run on y.

    Examples:
        >>> import hdnn
        >>> hdnn.analysis.certify(hdnn.H2(features=4, layers=64)).holds
        True
        >>> sigmoids = hdnn.MLP(features=4, layers=64, activation="sigmoid")
        >>> certificate = hdnn.analysis.certify(sigmoids)
        >>> certificate.status, certificate.guaranteed, certificate.smallest_norm < 1e-6
        ('not guaranteed', False, True)
    """
    positive_int("samples", samples)
    model = unwrapped(model)
    is_model = isinstance(getattr(model, "net", None), Network) and hasattr(
        model, "embed"
    )
    if isinstance(model, Network) or is_model:
        return _certify_network(model, y, samples, points, seed)
    if isinstance(model, PARTS):
        return _certify_layers(model, _call(y), points or "points")
    return _certify_parts(model, y, samples, points, seed)


def unwrapped(model: Any) -> Any:
    """The module inside of `torch.compile` and the data-parallel classes of PyTorch."""
    for name in ("_orig_mod", "module"):
        if isinstance(model, nn.Module) and [
            n for n, _ in model.named_children()
        ] == [name]:
            return unwrapped(model.get_submodule(name))
    return model


# One network, unit or block


def _certify_network(
    model: Any, y: Any, samples: int, points: str, seed: int
) -> Certificate:
    """A network at states, or the network of a Model at inputs."""
    twin = exact(model)
    net = model
    width = None
    if not isinstance(model, Network):
        net = model.net
        width = model.inputs
    _check_weights(net)
    generator = torch.Generator().manual_seed(seed)
    if y is None:
        y = torch.randn(samples, width or net.features, generator=generator)
        points = points or "random points"
    x = _rows(y, width or net.features, samples)
    states = twin.embed(x) if width else x
    measured = measure_network(twin.net if width else twin, states)
    measured.norms[:-1, _lost_in_own_dtype(net, states)] = torch.nan
    certificate = _certificate(net, measured, points or "points")
    if certificate.trouble:
        return certificate
    bounds = _bounds(exact(net), measured)
    return replace(
        certificate, bounds=bounds, linear=_linear(twin, measured.end)
    )


def _certify_layers(module: Any, call: Call, points: str) -> Certificate:
    """A unit at images, or blocks at what they are called with."""
    _check_weights(module)
    twin = exact(module)
    weight = next(module.parameters(), call.y)

    def in_own_dtype(x: Tensor) -> Tensor:
        return x.to(weight) if x.is_floating_point() else x.to(weight.device)

    try:
        y, args, options = mapped(_exact_tensor, tuple(call))
        measured = measure_layers(
            twin, Call(y, args, options), promised=twin.guarantee().holds
        )
        y, args, options = mapped(in_own_dtype, tuple(call))
        out = copied(module).eval()(y, *args, **options)
    except HDNNError:
        raise
    except Exception as error:  # a module of somebody else may raise anything
        text = str(error).partition("\n")[0]
        raise DataError(
            f"it does not run on y ({type(error).__name__}: {text})."
        ) from error
    if not bool(out.isfinite().all()):
        measured.norms[:-1] = torch.nan
    return replace(_certificate(twin, measured, points), dtype=_dtype(module))


def _certificate(net: Any, measured: Measured, points: str) -> Certificate:
    promise = net.guarantee()
    sizes = measured.norms
    inner = sizes[:-1]
    holds, trouble = _judged(measured, promise.holds)
    layers = [*measured.layers, measured.depth]
    smallest, median, largest = over_samples(sizes)
    row, sample = divmod(
        int(inner.nan_to_num(torch.inf).argmin()), inner.shape[1]
    )
    return Certificate(
        network=repr(net).partition("\n")[0].rstrip("("),
        guaranteed=promise.holds,
        reason=promise.why,
        holds=holds,
        trouble=trouble,
        layers=measured.depth,
        features=measured.features,
        dtype=_dtype(net),
        samples=inner.shape[1],
        points=points,
        smallest_norm=float(over_samples(smallest[:-1])[0]),
        smallest_at=(layers[row], sample),
        largest_norm=float(over_samples(largest[:-1])[2]),
        symplectic=measured.symplectic,
        symplectic_defect=measured.defect,
        by_layer={
            "layers": layers,
            "smallest": smallest.tolist(),
            "median": median.tolist(),
            "largest": largest.tolist(),
        },
    )


def _judged(measured: Measured, promised: bool) -> tuple[bool | None, str]:
    """Whether all norms are at least 1; if that is not known although it is proved, also why."""
    inner = measured.norms[:-1]
    below = inner < 1 - measured.slack
    if measured.trouble:
        return None, measured.trouble
    if promised and bool(below.any()) and measured.complete:
        return False, ""
    if bool(inner.isnan().any()):
        return None, "outputs of the network, in its own dtype, are not finite"
    if not promised:
        return None, ""
    least = float(inner.min())
    if bool(below.any()):
        return None, f"Lanczos sees a norm of {least:.6g} only"
    if bool((inner < 1 - measured.slack.clamp_max(HIDDEN)).any()):
        return (
            None,
            f"a norm of {least:.6g} is below 1 by less than rounding can make it",
        )
    return True, ""


def over_samples(norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest, median and largest of (..., B), without samples that are NaN unless all are."""
    missing = norms.isnan().all(-1)
    least = norms.nan_to_num(torch.inf, torch.inf).amin(-1)
    most = norms.nan_to_num(-torch.inf, torch.inf).amax(-1)
    median = norms.nanmedian(-1).values
    return (
        least.where(~missing, torch.nan),
        median,
        most.where(~missing, torch.nan),
    )


def _bounds(net: Network, measured: Measured) -> tuple[Bound, ...]:
    try:
        largest = max(1.0, float(measured.norms.max()))
        return tuple(compared_bounds(net, measured.smallest, largest))
    except HDNNError:  # no bound is known for this network
        return ()


def _linear(model: Any, end: Tensor | None) -> bool | None:
    """True if the outputs have the same derivative by the inputs at all points."""
    if end is None or len(end) < FEWEST:
        return None
    slopes: Tensor = end
    if not isinstance(model, Network):
        slopes = slopes @ model.head.weight.detach().mT
        if model.augment is not None:
            slopes = slopes[:, model.augment.positions]
    mean = slopes.mean(0)
    return bool((slopes - mean).abs().max() <= LINEAR * mean.abs().max())


def _check_weights(module: nn.Module) -> None:
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        if not bool(torch.isfinite(weight).all()):
            raise DataError(
                f"the weight {name} is not finite: there is nothing to certify."
            )


def _rows(y: Any, width: int, samples: int) -> Tensor:
    """At most so many samples of (*batch, width), evenly spread, in float64 on the CPU."""
    if (
        not isinstance(y, Tensor)
        or not y.ndim
        or y.shape[-1] != width
        or not y.numel()
    ):
        shape = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ShapeError(
            f"y must be a tensor (*batch, {width}), but got {shape}."
        )
    if not bool(y.isfinite().all()):
        raise DataError("y has NaN or infinite values; remove or replace them.")
    rows = _exact_tensor(y).reshape(-1, width)
    return rows[
        torch.linspace(0, len(rows) - 1, min(samples, len(rows))).round().long()
    ]


@torch.no_grad()
def _lost_in_own_dtype(net: Network, states: Tensor) -> Tensor:
    """Where y_N of the network itself is not finite: a copy in float64 can be finite. (B,)."""
    out = copied(net).eval()(states.to(next(net.parameters())))
    return ~out.isfinite().all(-1).cpu()


def _dtype(module: nn.Module) -> str:
    weight = next(module.parameters(), torch.zeros(()))
    return str(weight.dtype).removeprefix("torch.")


def _exact_tensor(value: Tensor) -> Tensor:
    dtype = torch.float64 if value.is_floating_point() else value.dtype
    return value.detach().clone().to("cpu", dtype)


def mapped(function: Any, value: Any) -> Any:
    """A function of all tensors inside of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(mapped(function, each) for each in value)
    return value


# The Hamiltonian parts of any module


def _certify_parts(
    model: nn.Module, inputs: Any, samples: int, points: str, seed: int
) -> Certificate:
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"certify takes an nn.Module, but got {type(model).__name__}."
        )
    parts = _hamiltonian_parts(model)
    if not parts:
        reason = "it holds no network, unit or block of hdnn"
        return Certificate(type(model).__name__, False, reason, None)
    calls = None if inputs is None else _recorded_calls(model, inputs, parts)
    certificates = {}
    for name, part in parts.items():
        try:
            states = None if calls is None else calls[name]
            certificates[name] = _certify_part(
                part, states, samples, points, seed
            )
        except HDNNError as error:
            promise = part.guarantee()
            trouble = str(error).rstrip(".")
            certificates[name] = Certificate(
                type(part).__name__, promise.holds, promise.why, None, trouble
            )
    answers = [certificate.holds for certificate in certificates.values()]
    holds = None if None in answers else True
    return Certificate(
        network=type(model).__name__,
        guaranteed=all(
            certificate.guaranteed for certificate in certificates.values()
        ),
        reason="for each part alone",
        holds=False if False in answers else holds,
        trouble="; ".join(
            f"{name}: {c.trouble}"
            for name, c in certificates.items()
            if c.trouble
        ),
        smallest_norm=min(
            certificate.smallest_norm for certificate in certificates.values()
        ),
        largest_norm=max(
            certificate.largest_norm for certificate in certificates.values()
        ),
        parts=certificates,
        others=_others(model, parts),
    )


def _others(
    model: nn.Module, parts: Mapping[str, nn.Module]
) -> tuple[str, ...]:
    """The kinds of modules outside of all parts, with their number."""
    inside = {id(inner) for part in parts.values() for inner in part.modules()}
    leaves = [
        m
        for m in model.modules()
        if id(m) not in inside and not [*m.children()]
    ]
    kinds = Counter(type(leaf).__name__ for leaf in leaves)
    return tuple(
        f"{kind} x {n}" if n > 1 else kind for kind, n in kinds.items()
    )


def _certify_part(
    part: Any, calls: list[Call] | None, samples: int, points: str, seed: int
) -> Certificate:
    if calls is None and isinstance(part, Network):
        return _certify_network(part, None, samples, points, seed)
    if calls is None:
        raise DataError(
            "units and blocks are certified at states: give inputs of the module as y"
        )
    if not calls:
        raise DataError("the module did not call it for these inputs")
    points = points or "states that reach it"
    if isinstance(part, Network):
        states = torch.cat(
            [call.y.reshape(-1, part.features) for call in calls]
        )
        return _certify_network(part, states, samples, points, seed)
    return _certify_layers(part, calls[0], points)


def _hamiltonian_parts(model: nn.Module) -> dict[str, Any]:
    """The outermost networks, units and blocks inside a module, by their names."""
    inside: set[int] = set()
    parts = {}
    for name, module in model.named_modules():
        if isinstance(module, PARTS) and id(module) not in inside:
            inside |= {id(inner) for inner in module.modules()}
            parts[name.replace("_orig_mod.", "").removesuffix("._orig_mod")] = (
                module
            )
    return parts


def _recorded_calls(
    model: nn.Module, inputs: Any, parts: Mapping[str, nn.Module]
) -> dict[str, list[Call]]:
    """What each part is called with when a copy of the module runs on the inputs."""
    twin = copied(model).eval()
    twins = dict(zip(map(id, model.modules()), twin.modules(), strict=True))
    calls: dict[str, list[Call]] = {name: [] for name in parts}
    for name, part in parts.items():

        def record(
            module: nn.Module, args: Any, options: Any, name: str = name
        ) -> None:
            calls[name].append(_call(args, **options))

        twins[id(part)].register_forward_pre_hook(record, with_kwargs=True)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            call_module(twin, inputs)
    except HDNNError:
        raise
    except Exception as error:
        raise DataError(
            f"this {type(model).__name__} does not run on y ({type(error).__name__}: {error}); "
            "give y as the module takes it: a tensor, a tuple of arguments, or a dict."
        ) from error
    return calls


def call_module(module: nn.Module, inputs: Any) -> Any:
    """Run a module on inputs as users give them: a tensor, a tuple of arguments or a dict."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return (
        module(*inputs) if isinstance(inputs, (tuple, list)) else module(inputs)
    )


def _call(inputs: Any, **options: Any) -> Call:
    """The arguments of a unit or a block, with the state first."""
    if isinstance(inputs, Mapping):
        return _call((), **inputs)
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    y = args[0] if args else options.pop("y", None)
    if not isinstance(y, Tensor) or not y.numel() or not y.is_floating_point():
        raise DataError(
            "units and blocks are certified at states: give them as the tensor y."
        )
    if not bool(y.isfinite().all()):
        raise DataError("y has NaN or infinite values; remove or replace them.")
    return Call(y, args[1:], options)
