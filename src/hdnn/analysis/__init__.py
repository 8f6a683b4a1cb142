"""Measure, check and certify the gradients: sensitivity matrices, symplecticity, bounds."""

from hdnn.analysis.bounds import (
    Bound,
    bounds,
    bsm_bound_continuous,
    bsm_bound_forward_euler,
    bsm_bound_paper,
    gradient_bounds,
)
from hdnn.analysis.certificate import Certificate, certify
from hdnn.analysis.continuous import ContinuousNetwork
from hdnn.analysis.doctor import Diagnosis, GradientDoctor, diagnose
from hdnn.analysis.rules import Finding
from hdnn.analysis.sensitivity import (
    backward_sensitivity,
    is_symplectic,
    layer_sensitivity,
    norms,
    singular_values,
    symplectic_defect,
)
from hdnn.analysis.watch import GradientMonitor, GradientWarning

__all__ = [
    "Bound",
    "Certificate",
    "ContinuousNetwork",
    "Diagnosis",
    "Finding",
    "GradientDoctor",
    "GradientMonitor",
    "GradientWarning",
    "backward_sensitivity",
    "bounds",
    "bsm_bound_continuous",
    "bsm_bound_forward_euler",
    "bsm_bound_paper",
    "certify",
    "diagnose",
    "gradient_bounds",
    "is_symplectic",
    "layer_sensitivity",
    "norms",
    "singular_values",
    "symplectic_defect",
]
