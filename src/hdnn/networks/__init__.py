"""The networks: parameters around the functions of `hdnn.functional`, and nothing else."""

from collections.abc import Callable
from functools import partial

from hdnn.networks.base import Network
from hdnn.networks.convert import LeapfrogStack, to_reversible
from hdnn.networks.blocks import Coupling, GradientField, Leapfrog, Reversible
from hdnn.networks.hamiltonian import H1, H2, HamiltonianNet, ImplicitH2
from hdnn.networks.marginally_stable import MS1, MS2, MS3
from hdnn.networks.mlp import MLP
from hdnn.networks.ode import ODENetwork
from hdnn.networks.images import HamiltonianUnit

KINDS: dict[str, type[Network]] = {
    kind.__name__: kind for kind in (H1, H2, ImplicitH2, HamiltonianNet, MS1, MS2, MS3, MLP)
}

# By the names that users give to the command line or an estimator.
BY_NAME: dict[str, Callable[..., Network]] = {
    "h1": H1,
    "h2": H2,
    "ms1": MS1,
    "ms2": MS2,
    "ms3": MS3,
    "implicit_h2": ImplicitH2,
    "mlp": MLP,
    **{
        name: partial(HamiltonianNet, integrator=name)
        for name in ("verlet", "yoshida4", "midpoint", "discrete_gradient")
    },
}

__all__ = [
    "H1",
    "H2",
    "MLP",
    "MS1",
    "MS2",
    "MS3",
    "Coupling",
    "GradientField",
    "HamiltonianNet",
    "HamiltonianUnit",
    "ImplicitH2",
    "Leapfrog",
    "LeapfrogStack",
    "Network",
    "ODENetwork",
    "Reversible",
    "to_reversible",
]
