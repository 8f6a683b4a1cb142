"""What is measured of a model on some inputs, before anything is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hdnn.analysis.doctor.calls import ModuleCall
from hdnn.analysis.doctor.products import Gain
from hdnn.analysis.doctor.trace import ActivationFacts, ExponentialFacts


@dataclass
class LayerSignals:
    """One state y_j of the chain, and the layer that makes it from y_{j-1}."""

    layer: str
    parts: tuple[str, ...]
    size: int
    shape: tuple[int, ...]
    rms: float  # of y_j
    gradient: float  # norm of the gradient of a random projection of the output by y_j
    gain: float  # norm of the gradient by y_{j-1} over that by y_j
    change: float = math.nan  # norm(y_j - y_{j-1}) / norm(y_{j-1}), where the shapes are the same
    identity: float = math.nan  # the mean diagonal entry of dy_j/dy_{j-1}, the same
    whole: Gain | None = None  # of dy_N/dy_j
    own: Gain | None = None  # of dy_j/dy_{j-1}
    inner: str = ""  # the module inside that shrinks or grows most, where the layer does so

    @property
    def blamed(self) -> str:
        """The name for what this layer does wrong."""
        several = len(self.parts) > 1 and self.layer == self.parts[-1]  # in no module of their own
        return self.inner if several and self.inner else self.layer


@dataclass
class PeerBlock:
    """A block among others of the same shapes, and how much of the identity it holds."""

    layer: str
    shapes: tuple[object, ...]  # the list that it is in, and its parameters' names and shapes
    identity: float  # the mean diagonal entry of the derivative of the state after it


@dataclass
class ParameterSignals:
    """A parameter: how large it is, and whether the gradient reaches it."""

    name: str
    module: str
    called: bool
    trainable: bool
    norm: float
    shape: tuple[int, ...]
    gradient: float | None = None  # None: nothing of it is part of the graph
    after: float | None = None  # the gradient after one step of Adam
    last: bool = False  # it belongs to the last module with parameters


@dataclass
class Signals:
    """All that was measured."""

    layers: list[LayerSignals] = field(default_factory=list)
    body: int = 0  # y_N is the state of this index: what comes after it is the head
    blocks: list[PeerBlock] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
    parameters: list[ParameterSignals] = field(default_factory=list)
    activations: list[ActivationFacts] = field(default_factory=list)
    exponentials: list[ExponentialFacts] = field(default_factory=list)
    zero_buffers: list[str] = field(default_factory=list)  # of modules that hold others
    unreached: list[str] = field(default_factory=list)  # weights that matter, without gradients
    unused: list[str] = field(default_factory=list)  # weights that nothing depends on
    severed: list[str] = field(default_factory=list)  # called on what depends on weights, unseen
    mismatch: list[float] = field(default_factory=list)  # of derivatives and differences, by layer
    bad_gradients: list[str] = field(default_factory=list)  # layers whose gradient is not finite
    opened: float = 1.0  # by how much the first gradient grows with a step of scales and biases
    changes_after: list[float] = field(default_factory=list)  # `change` after a step of Adam
    rounding: list[tuple[str, str, float]] = field(default_factory=list)
    steps: list[tuple[str, float, float]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    differentiable: bool = True
