"""Very deep networks whose gradients provably do not vanish: Hamiltonian deep neural networks."""

import gc

from hdnn._version import __version__ as __version__

from hdnn.base import interrupted as interrupted  # isort: skip  # first: the rest takes its time

# Imports leave no garbage, and a collection during them would search all of torch for 0.1 s.
_collecting = gc.isenabled()
gc.disable()
try:
    from hdnn import (
        activations,
        analysis,
        data,
        engine,
        functional,
        heads,
        interconnection,
        models,
        operators,
        regularization,
        sparsity,
        training,
    )
    from hdnn.errors import HDNNError
    from hdnn.heads import Augment, LinearHead, RegressionHead, SigmoidHead, SoftmaxHead
    from hdnn.model import Model
    from hdnn.networks import (
        H1,
        H2,
        MLP,
        MS1,
        MS2,
        MS3,
        HamiltonianNet,
        HamiltonianUnit,
        ImplicitH2,
    )
    from hdnn.serialization import load, save
    from hdnn.sparsity import Sparsity
finally:
    if _collecting:
        gc.enable()

__all__ = [
    "H1",
    "H2",
    "MLP",
    "MS1",
    "MS2",
    "MS3",
    "Augment",
    "HDNNError",
    "HamiltonianNet",
    "HamiltonianUnit",
    "ImplicitH2",
    "LinearHead",
    "Model",
    "RegressionHead",
    "SigmoidHead",
    "SoftmaxHead",
    "Sparsity",
    "activations",
    "analysis",
    "data",
    "engine",
    "functional",
    "heads",
    "interconnection",
    "load",
    "models",
    "operators",
    "regularization",
    "save",
    "sparsity",
    "training",
]


def __getattr__(name: str) -> object:
    """The scikit-learn estimators, imported when they are first asked for."""
    if name in ("HDNNClassifier", "HDNNRegressor"):
        from hdnn import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module 'hdnn' has no attribute {name!r}")
