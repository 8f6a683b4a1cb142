"""Very deep networks whose gradients provably do not vanish: Hamiltonian deep neural networks."""

import difflib
import gc
import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from hdnn._version import __version__ as __version__

from hdnn.base import interrupted as interrupted  # isort: skip  # first: the rest takes its time

if TYPE_CHECKING:
    from hdnn import analysis as analysis
    from hdnn import control as control
    from hdnn import data as data
    from hdnn import distributed as distributed
    from hdnn import errors as errors
    from hdnn import estimators as estimators
    from hdnn import model as model
    from hdnn import networks as networks
    from hdnn import plotting as plotting
    from hdnn import reference as reference
    from hdnn import serialization as serialization
    from hdnn import training as training
    from hdnn.analysis import diagnose as diagnose
    from hdnn.estimators import HDNNClassifier as HDNNClassifier
    from hdnn.estimators import HDNNRegressor as HDNNRegressor

# The command line imports what a command needs; any other program has the networks at once, and the
# operators that files written by `torch.export` ask for.
if TYPE_CHECKING or not interrupted.is_command():
    # Imports leave no garbage, and a collection during them would search all of torch for 0.1 s.
    _collecting = gc.isenabled()
    gc.disable()
    try:
        from hdnn import (
            activations,
            engine,
            functional,
            heads,
            interconnection,
            models,
            operators,
            regularization,
            sparsity,
        )
        from hdnn.base import process_groups as process_groups
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
            Coupling,
            GradientField,
            HamiltonianNet,
            HamiltonianUnit,
            ImplicitH2,
            Leapfrog,
            Reversible,
            to_reversible,
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
    "to_reversible",
    "training",
]

# What is imported when it is first asked for, or when a name is looked for in it.
_LATE = ("analysis", "data", "training")
_SUBMODULES = (
    *("control", "distributed", "errors", "estimators", "model", "networks", "plotting"),
    *("reference", "serialization"),
)
_ESTIMATORS = ("HDNNClassifier", "HDNNRegressor")
_ANALYSES = ("diagnose",)


# Where in the command line, which imports them late, the other names come from.
_HOMES = ("networks", "heads", "model", "serialization", "sparsity", "errors")


def __getattr__(name: str) -> object:
    """A part of hdnn that is imported late, or an error that says where to look instead."""
    if name in _ESTIMATORS:
        return getattr(importlib.import_module(f"{__name__}.estimators"), name)
    if name in _ANALYSES:
        return getattr(importlib.import_module(f"{__name__}.analysis"), name)
    known = name in _SUBMODULES or name in __all__
    if known and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    if known:
        homes = (importlib.import_module(f"{__name__}.{home}") for home in _HOMES)
        return next(getattr(home, name) for home in homes if hasattr(home, name))
    raise AttributeError(f"module 'hdnn' has no attribute {name!r}{_hint(name)}")


def __dir__() -> list[str]:
    late = {*_SUBMODULES, *_ESTIMATORS, *_ANALYSES}
    try:
        found = importlib.util.find_spec("sklearn")
    except ImportError:
        found = None
    if found is None:  # what is listed can be had
        late -= {"estimators", *_ESTIMATORS}
    return sorted({*__all__, *late, *(name for name in globals() if name.startswith("__"))})


def _hint(name: str) -> str:
    """Where a name that is not here may be, for people."""
    if name.startswith("_"):
        return ""
    known = {each.lower(): each for each in __dir__()}
    for module in (*__all__, *_SUBMODULES):
        if module in _LATE:
            importlib.import_module(f"{__name__}.{module}")
        inner = getattr(sys.modules.get(f"{__name__}.{module}"), "__all__", ())
        if name in inner and name.lower() not in known:
            return f"; it is hdnn.{module}.{name}"
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {known[near[0]]!r}?" if near else "; dir(hdnn) lists what there is"
