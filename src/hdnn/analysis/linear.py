"""Whether the layers of a trained network do anything: it may have become a linear one.

Strong weight decay does that. Looked at are inputs and outputs of the whole model, because an
output layer of large weights can make much of little: a network counts as linear if, at all
samples, outputs and their derivatives are those of one affine map, up to a small part of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hdnn.analysis.measured import MeasuredNetwork
from hdnn.analysis.words import LINEAR
from hdnn.errors import HDNNError
from hdnn.model import Model
from hdnn.networks import Network, ODENetwork
from hdnn.networks.promise import own_methods

IDLE = 1e-2  # relative: layers of a linear network that change less pass their input on
FEWEST = 10  # samples, all different, from which linearity is concluded; if there are fewer,
MORE = 50  # random ones take their place


@torch.no_grad()
def linearity(model: Model | Network, seen: MeasuredNetwork) -> tuple[bool | None, bool | None]:
    """Whether the network is linear, and whether its layers just pass their input on.

    None where that is not known, because states are not finite.
    """
    net = model.net if isinstance(model, Model) else model
    if own_methods(net) or own_methods(model):
        return None, None
    if seen.states is None or seen.whole is None:
        return None, None
    if _without_weights(net):
        return True, True
    eye = torch.eye(net.features, dtype=seen.states.dtype)
    W = model.head.weight if isinstance(model, Model) else eye
    inputs = torch.arange(net.features)
    if isinstance(model, Model) and model.augment is not None:
        inputs = model.augment.positions
    if len(seen.states[0].unique(dim=0)) < FEWEST:
        seen = _at_random(net, inputs)
    states, Phi = seen.states, seen.whole
    if states is None or Phi is None or not bool(Phi.isfinite().all()):
        return None, None
    x, outputs = states[0][:, inputs], states[-1] @ W.mT
    slopes = W @ Phi.mT[..., inputs]  # Phi is in denominator layout, the transposed Jacobian
    slope = slopes.mean(0)
    rest = outputs - x @ slope.mT
    linear = _is_small(slopes - slope, slope) and _is_small(_centred(rest), _centred(outputs))
    same = _is_small(Phi - eye, eye, IDLE) and _is_small(slope - W[:, inputs], slope, IDLE)
    return linear, linear and same


def _at_random(net: Network, inputs: Tensor) -> MeasuredNetwork:
    """The network at random points: through a few points, every map is linear."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MORE, len(inputs), generator=generator, dtype=torch.float64)
    return MeasuredNetwork(net, x.new_zeros(MORE, net.features).index_copy(1, inputs, x))


def passes_on(y_0: Tensor, y_N: Tensor, norms: Tensor) -> bool:
    """Whether the norms (L, B) are 1 and all samples are moved by the same, if at all."""
    one = torch.ones_like(norms)
    return _is_small(norms - one, one) and _is_small(_centred(y_N - y_0), _centred(y_0))


def _centred(values: Tensor) -> Tensor:
    return values - values.mean(0)


def _is_small(part: Tensor, whole: Tensor, share: float = LINEAR) -> bool:
    """Whether numbers are small beside others, and these are not all zero."""
    size = whole.abs().max().item()
    return size > 0 and part.abs().max().item() <= share * size


def _without_weights(net: Network) -> bool:
    """Whether layers add the same to every state, because their weights are zero."""
    if not isinstance(net, ODENetwork):
        return False
    try:
        return not bool((net.steps() * net.field_rates()).any())
    except HDNNError:  # the network has no field
        return False
