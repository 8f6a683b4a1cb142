"""The networks: parameters around the schemes of `hdnn.schemes`."""

from collections.abc import Callable
from functools import partial

from hdnn.networks.blocks import Coupling, GradientField, Leapfrog, Reversible
from hdnn.networks.convert import LeapfrogStack, to_reversible
from hdnn.networks.earlier import MLP, MS1, MS2, MS3
from hdnn.networks.hamiltonian import H1, H2, HamiltonianNet, ImplicitH2
from hdnn.networks.images import HamiltonianUnit
from hdnn.networks.network import Guarantee, Network

# By the names that the command line and the estimators use
BY_NAME: dict[str, Callable[..., Network]] = {
    "h1": H1,
    "h2": H2,
    "ms1": MS1,
    "ms2": MS2,
    "ms3": MS3,
    "implicit_h2": ImplicitH2,
    "mlp": MLP,
    "verlet": partial(HamiltonianNet, integrator="verlet"),
    "yoshida4": partial(HamiltonianNet, integrator="yoshida4"),
    "midpoint": partial(HamiltonianNet, integrator="midpoint"),
    "discrete_gradient": partial(
        HamiltonianNet, integrator="discrete_gradient"
    ),
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
    "Guarantee",
    "HamiltonianNet",
    "HamiltonianUnit",
    "ImplicitH2",
    "Leapfrog",
    "LeapfrogStack",
    "Network",
    "Reversible",
    "to_reversible",
]
