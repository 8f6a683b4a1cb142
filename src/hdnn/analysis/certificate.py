"""The guarantee for a network's gradients, checked numerically.

The guarantee is norm(dy_N/dy_j) >= 1 for every sample and layer: each layer has a Jacobian of
determinant 1 (or at least 1), so the same is true of products of these Jacobians, and a matrix
whose determinant is at least 1 has no norm below 1. The guarantee concerns the matrix: at least one
direction does not shrink, but a single gradient can. A norm that could not be computed never counts
as confirmed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from hdnn import plotting
from hdnn.analysis.bounds import Bound, compared_bounds
from hdnn.analysis.measure import (
    HIDDEN,
    BlockCall,
    Measured,
    measure_layers,
    measure_network,
)
from hdnn.analysis.modules import (
    JSONResult,
    call_module,
    check_finite,
    copied,
    exact,
    exact_tensor,
    mapped,
    running,
    spread,
    state_rows,
    unwrapped,
)
from hdnn.errors import DataError, HDNNError, positive_int
from hdnn.heads import Model
from hdnn.networks import (
    Coupling,
    HamiltonianUnit,
    Leapfrog,
    Network,
    Reversible,
)
from hdnn.networks.network import hook_reason, unknown_reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SAMPLES = 20
ROWS = 8  # layers in the table
NOT_SHRUNK = "at least one direction of the gradient is not shrunk"
LINEAR = 1e-3  # relative: derivatives that vary less belong to a linear map
FEWEST = 10  # points that suffice to conclude linearity
SIDE = 8  # side of random images, unless a kernel is larger
SHOWN = 1000.0  # larger bounds are not shown
PARTS = (Network, HamiltonianUnit, Coupling, Leapfrog, Reversible)


@dataclass(frozen=True)
class Certificate(JSONResult):
    """The answer to 'Is the gradient shrunk?' for a network, or for the parts of a model.

    Returned by `certify`; print it to read it. `plot()` draws the norms against the layers. For a
    model with several parts, `certificate["name"]` is the certificate of one part, and all figures
    belong to the worst part.

    Attributes:
        network: a description of the certified network, in one line.
        guaranteed: True if norm(dy_N/dy_j) >= 1 is proved for this network.
        reason: the reason why this is proved, or why not.
        holds: True if the guarantee is proved and the numbers confirm it, False if the numbers
            contradict it, None if this is not known or nothing is proved.
        trouble: a description of anything that could not be computed, and why.
        layers: N, the number of layers.
        features: n, the size of a state.
        dtype: the dtype of the weights; all computations convert them to float64.
        samples: the number of points.
        points: a description of where the points come from.
        smallest_norm: the smallest norm over all points and layers j < N that could be computed;
            NaN if none could.
        smallest_at: the layer and the point of this norm.
        largest_norm: the largest norm over the same points and layers.
        symplectic: True if each layer is symplectic, up to rounding; None if this is not guaranteed
            or not known.
        symplectic_defect: the largest `symplectic_defect` of a layer.
        bounds: every known `Bound`, compared with the measured value.
        linear: True if the network is a linear map at these points, so depth adds nothing.
        by_layer: the curves of the plot: "layers", "smallest", "median" and "largest".
        parts: the certificate of each Hamiltonian part of a model, by name.
        others: the kinds of modules outside these parts, which the certificate does not cover.

    Examples:
        >>> import hdnn
        >>> certificate = hdnn.analysis.certify(hdnn.H2(features=4, layers=64))
        >>> certificate.status, certificate.symplectic, certificate.smallest_norm >= 1
        ('holds', True, True)
        >>> print(certificate)
        At every layer, at least one direction of the gradient is not shrunk...
    """

    derived: ClassVar = ("status", "summary", "violations")

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
        return self.parts[name]

    @property
    def violations(self) -> tuple[str, ...]:
        """The proved facts about this network that the numbers contradict."""
        facts = []
        if self.holds is False and not self.parts:
            least = f"{self.smallest_norm:.6g}"
            facts.append(
                f"the smallest norm is {least}, but at least 1 is proved"
            )
        if self.symplectic is False:
            defect = f"{self.symplectic_defect:.1e}"
            facts.append(
                f"a layer is not symplectic, with a defect of {defect}"
            )
        exceeded = [bound for bound in self.bounds if bound.holds is False]
        facts += [f"a bound is exceeded ({bound})" for bound in exceeded]
        for name, part in self.parts.items():
            facts += [f"{name}: {fact}" for fact in part.violations]
        return tuple(facts)

    @property
    def status(self) -> str:
        """The answer in one word: "holds", "violated", "not known" or "not guaranteed"."""
        if self.violations:
            return "violated"
        if self.holds:
            return "holds"
        if self.trouble or self.guaranteed:
            return "not known"
        return "not guaranteed"

    @property
    def summary(self) -> str:
        """The answer in plain words."""
        if self.parts:
            return self._summary_of_parts()
        if self.violations:
            facts = "; ".join(self.violations)
            return f"A GUARANTEE DOES NOT HOLD HERE: {facts}."
        if self.trouble:
            return f"It is NOT KNOWN whether the gradient is shrunk: {self.trouble}."
        if not self.samples:
            return f"Nothing is proved for this {self.network}: {self.reason}."
        text = f"{self._sentence()}."
        if self.linear:
            text += " The network is linear at these points: a linear model would do the same."
        return text

    def _sentence(self) -> str:
        where = f"{self.samples} {self.points}"
        least = _number(self.smallest_norm)
        if self.holds:
            return (
                f"At every layer, {NOT_SHRUNK}: this is proved {self.reason}, and confirmed at "
                f"{where} (smallest norm {least})"
            )
        measured = f"at {where} {NOT_SHRUNK} (smallest norm {least})"
        if self.smallest_norm < 1 - 1e-9 and self.smallest_at:
            measured = (
                f"at layer {self.smallest_at[0]} every direction of the gradient is shrunk, to "
                f"{least} or less at one or more of {where}"
            )
        return f"Nothing is proved for this network; measured: {measured}"

    def _summary_of_parts(self) -> str:
        count = len(self.parts)
        holding = sum(part.status == "holds" for part in self.parts.values())
        text = (
            f"The guarantee holds in {holding} of {count} Hamiltonian part{'s' * (count > 1)} of "
            f"this {self.network}. Nothing is said about the model as a whole"
        )
        if self.others:
            text += f": {', '.join(self.others)} may shrink gradients"
        lines = [f"{text}."]
        for name, part in self.parts.items():
            lines.append(f"{name}: {part.summary}")
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw smallest, median and largest norm against the layer, into `ax` or a new figure."""
        return plotting.certificate_norms(self, ax)

    def __str__(self) -> str:
        if not self.by_layer:
            each = [f"{name}: {part}" for name, part in self.parts.items()]
            return "\n\n".join([self.summary, *each])
        rows = {
            "network": self.network,
            "points": f"{self.samples} {self.points}; weights {self.dtype}, norms in float64",
            "layer j": f"{'smallest':>12} {'largest':>12}   norm(dy_N/dy_j)",
        }
        layers = self.by_layer["layers"]
        for row in spread(len(layers) - 1, ROWS):
            least = _number(self.by_layer["smallest"][row])
            most = _number(self.by_layer["largest"][row])
            rows[str(layers[row])] = f"{least:>12} {most:>12}"
        if self.symplectic_defect is not None:
            words = {True: "yes", False: "NO", None: "not known"}
            answer = words[self.symplectic]
            rows["symplectic"] = f"{answer}, to {self.symplectic_defect:.1e}"
        budget = [b.value for b in self.bounds if b.name == "budget"]
        if budget and budget[-1] < SHOWN:
            low, high = budget
            rows["bounds"] = (
                f"a gradient keeps between {low:.2g} and {high:.3g} of its size"
            )
        table = [f"{name:<10}  {text}" for name, text in rows.items()]
        return "\n".join([self.summary, "", *table])


def _number(value: float) -> str:
    """Six digits; a norm just below 1 is never rounded up to 1."""
    if math.isnan(value):
        return "unknown"
    if 0.999999 <= value < 1 - 1e-9:
        return "0.999999"
    return f"{value:.6g}"


def certify(
    model: nn.Module,
    y: Any = None,
    *,
    samples: int = SAMPLES,
    points: str = "",
) -> Certificate:
    """Check that gradients are not shrunk: norm(dy_N/dy_j) >= 1 for all layers j.

    For H2 this is th:nonvanishing_gradients_DT. All computations are in float64 and evaluation
    mode. Points at which the network itself overflows in its own dtype count as not computed.

    Args:
        model: an `hdnn.Model`, a network, a `HamiltonianUnit` or blocks of hdnn, compiled or not.
            Any other module is searched for such parts; the certificate then says nothing about the
            module as a whole.
        y: inputs of the model, or states of a network, unit or block; pass several arguments as a
            tuple, or by name as a dict. By default networks are certified at random states, and
            units at random 8 x 8 images.
        samples: the largest number of points; at most 3 for images and blocks. If samples of blocks
            depend on each other, like nodes of a graph, they form one state.
        points: the description of these points in the certificate.

    Returns:
        A `Certificate`; print it to read it.

    Raises:
        OptionError: if model is not a module.
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
    root: Any = unwrapped(model)
    net = root
    width = 0
    if isinstance(root, Model) and unknown_reason(root) is None:
        net = root.net
        width = root.inputs
    elif not isinstance(root, PARTS):
        return _certify_parts(root, y, samples, points)
    if y is None and isinstance(net, (Network, HamiltonianUnit)):
        if isinstance(net, Network):
            shape = [width or net.features]
            points = points or "random points"
        else:
            side = max(SIDE, net.kernel)
            shape = [net.channels, side, side]
            points = points or f"random {side} x {side} images"
        generator = torch.Generator().manual_seed(0)
        y = torch.randn(samples, *shape, generator=generator)
    points = points or "points"
    if not isinstance(net, Network):
        return _certify_part(net, _call(y), points)
    rows = state_rows(y, width or net.features)
    rows = rows[spread(len(rows), samples)]
    twin: Any = exact(root)
    states = twin.embed(rows) if width else rows
    return _certify_part(
        net, BlockCall(states), points, twin if width else None
    )


# One network, unit or block


def _certify_part(
    module: Any, call: BlockCall, points: str, model: Any = None
) -> Certificate:
    """Certify a network, unit or block at states; for a Model, its network."""
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        if not bool(weight.isfinite().all()):
            raise DataError(
                f"the weight {name} is not finite, so nothing can be certified."
            )
    is_network = isinstance(module, Network)
    with running(module, "y"):
        twin = exact(module)
        exact_call = BlockCall(*mapped(exact_tensor, tuple(call)))
        measure = measure_network if is_network else measure_layers
        measured = measure(twin, exact_call)
        finite = _finite_in_own_dtype(module, call)
    lost = ~finite if is_network else not bool(finite.all())
    measured.norms[:-1, lost] = torch.nan
    holds, trouble = _judged(measured, twin.guarantee().holds)
    certificate = _certificate(module, measured, points)
    certificate = replace(certificate, holds=holds, trouble=trouble)
    if trouble or measured.end is None:
        return certificate
    bounds = []
    if hasattr(module, "h"):
        largest = max(1.0, certificate.largest_norm)
        bounds = compared_bounds(twin, measured.smallest, largest)
    linear = _is_linear(model, measured.end)
    return replace(certificate, bounds=tuple(bounds), linear=linear)


@torch.no_grad()
def _finite_in_own_dtype(module: nn.Module, call: BlockCall) -> Tensor:
    """True for each sample (B,) whose output is finite: a copy in float64 may hide an overflow."""
    weight = next(module.parameters(), call.y)

    def own(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.to(weight)
        return x.to(weight.device)

    own_call = BlockCall(*mapped(own, tuple(call)))
    out = own_call.run(copied(module).eval(), own_call.y)
    return out.isfinite().flatten(1).all(1).cpu()


def _certificate(module: Any, measured: Measured, points: str) -> Certificate:
    """The guarantee for a module, and the measured figures."""
    promise = module.guarantee()
    weight = next(module.parameters(), measured.norms)
    text = repr(module)
    inner = measured.norms[:-1]
    smallest, median, largest = over_samples(measured.norms)
    least = inner.nan_to_num(torch.inf)
    row, sample = divmod(int(least.argmin()), inner.shape[1])
    smallest_norm, _, _ = over_samples(smallest[:-1])
    _, _, largest_norm = over_samples(largest[:-1])
    return Certificate(
        network=text.partition("\n")[0].rstrip("("),
        guaranteed=promise.holds,
        reason=promise.why,
        holds=None,
        layers=measured.layers[-1],
        features=measured.features,
        dtype=str(weight.dtype).removeprefix("torch."),
        samples=inner.shape[1],
        points=points,
        smallest_norm=float(smallest_norm),
        smallest_at=(measured.layers[row], sample),
        largest_norm=float(largest_norm),
        symplectic=measured.symplectic,
        symplectic_defect=measured.defect,
        by_layer={
            "layers": measured.layers,
            "smallest": smallest.tolist(),
            "median": median.tolist(),
            "largest": largest.tolist(),
        },
    )


def _judged(measured: Measured, promised: bool) -> tuple[bool | None, str]:
    """True if all norms are at least 1, or None; if None despite a proof, also the reason."""
    if measured.trouble:
        return None, measured.trouble
    inner = measured.norms[:-1]
    below = bool((inner < 1 - measured.slack).any())
    if promised and below and measured.complete:
        return False, ""
    if bool(inner.isnan().any()):
        return None, "outputs of the network, in its own dtype, are not finite"
    if not promised:
        return None, ""
    least = f"a norm of {float(inner.min()):.6g}"
    if below:
        return None, f"Lanczos finds only {least}"
    if bool((inner < 1 - measured.slack.clamp_max(HIDDEN)).any()):
        return None, f"{least} is below 1 by less than rounding can make it"
    return True, ""


def over_samples(norms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest, median and largest of (..., B), ignoring NaN samples unless all are NaN."""
    ordered = norms.sort(-1).values  # NaN comes last
    count = (~norms.isnan()).sum(-1, keepdim=True)
    last = (count - 1).clamp_min(0)
    median = ordered.gather(-1, last // 2)
    largest = ordered.gather(-1, last)
    return ordered[..., 0], median.squeeze(-1), largest.squeeze(-1)


def _is_linear(model: Any, end: Tensor) -> bool | None:
    """True if the outputs have the same derivative with respect to the inputs at all points."""
    if len(end) < FEWEST:
        return None
    if model is not None:
        end = end @ model.head.weight.detach().mT
        if model.augment is not None:
            end = end[:, model.augment.positions]
    mean = end.mean(0)
    return bool((end - mean).abs().max() <= LINEAR * mean.abs().max())


# The Hamiltonian parts of any module


def _certify_parts(
    model: nn.Module, inputs: Any, samples: int, points: str
) -> Certificate:
    twin = model
    if inputs is not None:
        twin = copied(model).eval()
        points = points or "states that reach it"
    parts = _hamiltonian_parts(twin)
    if not parts:
        reason = "it holds no network, unit or block of hdnn"
        return Certificate(type(model).__name__, False, reason, None)
    states: dict[str, Any] = {}
    if inputs is not None:
        states = _recorded_states(twin, inputs, parts)
    certificates = {}
    for name, part in parts.items():
        try:
            if inputs is not None and name not in states:
                raise DataError(
                    "the module does not call this part for these inputs"
                )
            _check_hooks_around(twin, name)
            certificates[name] = certify(
                part,
                states.get(name),
                samples=samples,
                points=points,
            )
        except HDNNError as error:
            promise = part.guarantee()
            trouble = str(error).rstrip(".")
            certificates[name] = Certificate(
                type(part).__name__, promise.holds, promise.why, None, trouble
            )
    return _joined(twin, parts, certificates)


def _check_hooks_around(model: nn.Module, name: str) -> None:
    """Check the modules around a part: their hooks may change its gradients."""
    parents = name.split(".")[:-1]
    for depth in range(len(parents) + 1):
        place = ".".join(parents[:depth])
        reason = hook_reason(model.get_submodule(place))
        if reason is not None:
            raise DataError(f"{place or 'the module around it'}: {reason}")


def _joined(
    model: nn.Module,
    parts: Mapping[str, nn.Module],
    certificates: dict[str, Certificate],
) -> Certificate:
    every = certificates.values()
    answers = [certificate.holds for certificate in every]
    holds = None if None in answers else True
    troubles = [
        f"{name}: {c.trouble}" for name, c in certificates.items() if c.trouble
    ]
    inside = {m for part in parts.values() for m in part.modules()}
    outside = [m for m in model.modules() if m not in inside]
    kinds = Counter(type(m).__name__ for m in outside if not [*m.children()])
    return Certificate(
        network=type(model).__name__,
        guaranteed=all(certificate.guaranteed for certificate in every),
        reason="for each part alone",
        holds=False if False in answers else holds,
        trouble="; ".join(troubles),
        smallest_norm=min(certificate.smallest_norm for certificate in every),
        largest_norm=max(certificate.largest_norm for certificate in every),
        parts=certificates,
        others=tuple(
            f"{kind} x {count}" if count > 1 else kind
            for kind, count in kinds.items()
        ),
    )


def _hamiltonian_parts(model: nn.Module) -> dict[str, Any]:
    """The outermost networks, units and blocks inside a module, by their names."""
    inside: set[nn.Module] = set()
    parts = {}
    for name, module in model.named_modules():
        if isinstance(module, PARTS) and module not in inside:
            inside.update(module.modules())
            name = name.replace("_orig_mod.", "")
            name = name.removesuffix("._orig_mod")
            parts[name] = module
    return parts


def _recorded_states(
    model: nn.Module, inputs: Any, parts: Mapping[str, nn.Module]
) -> dict[str, Any]:
    """The states of networks, and the first call of each unit or block, as the model runs."""
    calls: dict[nn.Module, list[BlockCall]] = {}

    def record(part: nn.Module, args: Any, options: Any) -> None:
        calls.setdefault(part, []).append(_call(args, **options))

    handles = [
        part.register_forward_pre_hook(record, with_kwargs=True)
        for part in parts.values()
    ]
    with (
        running(model, "y"),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):
        call_module(model, inputs)
    for handle in handles:
        handle.remove()
    states: dict[str, Any] = {}
    for name, part in parts.items():
        if part not in calls:
            continue
        states[name] = calls[part][0]
        if isinstance(part, Network):
            rows = [call.y.reshape(-1, part.features) for call in calls[part]]
            states[name] = torch.cat(rows)
    return states


def _call(inputs: Any, **options: Any) -> BlockCall:
    """The arguments of a unit or a block, with the state first."""
    if isinstance(inputs, BlockCall):
        return inputs
    if isinstance(inputs, Mapping):
        return _call((), **inputs)
    args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    y = args[0] if args else options.pop("y", None)
    if not isinstance(y, Tensor) or not y.numel() or not y.is_floating_point():
        raise DataError(
            "units and blocks are certified at states: pass the inputs as the tensor y."
        )
    check_finite(y)
    return BlockCall(y, args[1:], options)
