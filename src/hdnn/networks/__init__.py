"""The networks: parameters around the functions of `hdnn.functional`, and nothing else."""

from hdnn.networks.base import Network, ODENetwork
from hdnn.networks.hamiltonian import H1, H2, HamiltonianNet, ImplicitH2
from hdnn.networks.marginally_stable import MS1, MS2, MS3
from hdnn.networks.mlp import MLP

KINDS: dict[str, type[Network]] = {
    kind.__name__: kind for kind in (H1, H2, ImplicitH2, HamiltonianNet, MS1, MS2, MS3, MLP)
}

__all__ = [
    "H1",
    "H2",
    "KINDS",
    "MLP",
    "MS1",
    "MS2",
    "MS3",
    "HamiltonianNet",
    "ImplicitH2",
    "Network",
    "ODENetwork",
]
