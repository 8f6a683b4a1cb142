"""Very deep networks whose gradients provably do not vanish: Hamiltonian deep neural networks."""

import importlib
from typing import TYPE_CHECKING

from hdnn._version import __version__ as __version__

if TYPE_CHECKING:
    from hdnn import activations as activations
    from hdnn import analysis as analysis
    from hdnn import control as control
    from hdnn import data as data
    from hdnn import distributed as distributed
    from hdnn import dynamics as dynamics
    from hdnn import engine as engine
    from hdnn import errors as errors
    from hdnn import estimators as estimators
    from hdnn import experiments as experiments
    from hdnn import functional as functional
    from hdnn import heads as heads
    from hdnn import implicit as implicit
    from hdnn import io as io
    from hdnn import models as models
    from hdnn import networks as networks
    from hdnn import plotting as plotting
    from hdnn import schemes as schemes
    from hdnn import sparsity as sparsity
    from hdnn import training as training
    from hdnn.analysis import diagnose as diagnose
    from hdnn.errors import HDNNError
    from hdnn.estimators import HDNNClassifier as HDNNClassifier
    from hdnn.estimators import HDNNRegressor as HDNNRegressor
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

# Modules, and names in them, are imported when they are first used: PyTorch takes seconds, and
# `hdnn --help` need not wait for it.
MODULES = (
    "activations",
    "analysis",
    "control",
    "data",
    "distributed",
    "dynamics",
    "engine",
    "errors",
    "estimators",
    "experiments",
    "functional",
    "heads",
    "implicit",
    "io",
    "models",
    "networks",
    "plotting",
    "schemes",
    "sparsity",
    "training",
)
HOMES = ("networks", "heads", "sparsity", "io", "errors")  # of names in __all__
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
    """A module or a name of hdnn, imported on first use."""
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    homes = HOMES if name in __all__ else ()
    if name in LATE_NAMES:
        homes = (LATE_NAMES[name],)
    for home in homes:
        module = importlib.import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(
        f"module 'hdnn' has no attribute {name!r}; dir(hdnn) lists all names"
    )


def __dir__() -> list[str]:
    return sorted({*__all__, *MODULES, *LATE_NAMES, "__version__"})
