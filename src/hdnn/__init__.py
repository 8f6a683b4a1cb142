"""Very deep networks whose gradients provably do not vanish: Hamiltonian deep neural networks."""

import importlib
from typing import TYPE_CHECKING

from hdnn import (
    activations,
    engine,
    functional,
    heads,
    models,
    networks,
    schemes,
    sparsity,
)
from hdnn._version import __version__ as __version__
from hdnn.errors import HDNNError
from hdnn.heads import (
    Augment,
    LinearHead,
    Model,
    RegressionHead,
    SigmoidHead,
    SoftmaxHead,
)
from hdnn.io import load, save
from hdnn.networks import (
    H1,
    H2,
    MLP,
    MS1,
    MS2,
    MS3,
    Coupling,
    GradientField,
    HamiltonianNet,
    HamiltonianUnit,
    ImplicitH2,
    Leapfrog,
    Reversible,
    to_reversible,
)
from hdnn.sparsity import Sparsity

if TYPE_CHECKING:
    from hdnn import analysis as analysis
    from hdnn import control as control
    from hdnn import data as data
    from hdnn import distributed as distributed
    from hdnn import errors as errors
    from hdnn import estimators as estimators
    from hdnn import experiments as experiments
    from hdnn import implicit as implicit
    from hdnn import io as io
    from hdnn import plotting as plotting
    from hdnn import training as training
    from hdnn.analysis import diagnose as diagnose
    from hdnn.estimators import HDNNClassifier as HDNNClassifier
    from hdnn.estimators import HDNNRegressor as HDNNRegressor

# Modules, and names in them, that are imported when they are first used
LATE_MODULES = (
    "analysis",
    "control",
    "data",
    "distributed",
    "estimators",
    "experiments",
    "plotting",
    "training",
)
LATE_NAMES = {
    "HDNNClassifier": "estimators",
    "HDNNRegressor": "estimators",
    "diagnose": "analysis",
}

__all__ = [
    "H1",
    "H2",
    "MLP",
    "MS1",
    "MS2",
    "MS3",
    "Augment",
    "Coupling",
    "GradientField",
    "HDNNError",
    "HamiltonianNet",
    "HamiltonianUnit",
    "ImplicitH2",
    "Leapfrog",
    "LinearHead",
    "Model",
    "RegressionHead",
    "Reversible",
    "SigmoidHead",
    "SoftmaxHead",
    "Sparsity",
    "activations",
    "engine",
    "functional",
    "heads",
    "load",
    "models",
    "networks",
    "save",
    "schemes",
    "sparsity",
    "to_reversible",
]


def __getattr__(name: str) -> object:
    """A part of hdnn that is imported late."""
    if name in LATE_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in LATE_NAMES:
        return getattr(
            importlib.import_module(f"{__name__}.{LATE_NAMES[name]}"), name
        )
    raise AttributeError(
        f"module 'hdnn' has no attribute {name!r}; dir(hdnn) lists what there is"
    )


def __dir__() -> list[str]:
    return sorted(
        {
            *__all__,
            *LATE_MODULES,
            *LATE_NAMES,
            "__version__",
            "errors",
            "implicit",
            "io",
        }
    )
