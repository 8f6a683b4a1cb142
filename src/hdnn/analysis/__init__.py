"""See, check and certify the gradients: sensitivity matrices, symplecticity, bounds."""

from hdnn.analysis.bounds import (
    Bound,
    bounds,
    bsm_bound_continuous,
    bsm_bound_forward_euler,
    bsm_bound_paper,
    gradient_bounds,
)
from hdnn.analysis.certificate import Certificate, Guarantee, guarantee
from hdnn.analysis.continuous import ContinuousNetwork
from hdnn.analysis.doctor import Diagnosis, Finding, GradientDoctor, diagnose
from hdnn.analysis.extremes import (
    Extremes,
    chain_extremes,
    extreme_singular_values,
    unit_extremes,
)
from hdnn.analysis.monitor import GradientMonitor, GradientWarning
from hdnn.analysis.parts import PartCertificates, certify
from hdnn.analysis.sensitivity import (
    backward_sensitivity,
    layer_sensitivity,
    norms,
    singular_values,
)
from hdnn.analysis.theorems import (
    Convergence,
    chain_rule,
    convergence,
    energy_along,
    generalized_symplecticity,
    gradient_dynamics,
    is_symplectic,
    reconstruction_error,
    smallest_norms,
    symplectic_defect,
    upper_bounds,
)

__all__ = [
    "Bound",
    "Certificate",
    "ContinuousNetwork",
    "Convergence",
    "Diagnosis",
    "Extremes",
    "Finding",
    "GradientDoctor",
    "GradientMonitor",
    "GradientWarning",
    "Guarantee",
    "PartCertificates",
    "backward_sensitivity",
    "bounds",
    "bsm_bound_continuous",
    "bsm_bound_forward_euler",
    "bsm_bound_paper",
    "certify",
    "chain_extremes",
    "chain_rule",
    "convergence",
    "diagnose",
    "energy_along",
    "extreme_singular_values",
    "generalized_symplecticity",
    "gradient_bounds",
    "gradient_dynamics",
    "guarantee",
    "is_symplectic",
    "layer_sensitivity",
    "norms",
    "reconstruction_error",
    "singular_values",
    "smallest_norms",
    "symplectic_defect",
    "unit_extremes",
    "upper_bounds",
]
