"""See and check the gradients: backward sensitivity matrices, symplecticity, bounds."""

from hdnn.analysis.bounds import (
    bsm_bound_continuous,
    bsm_bound_forward_euler,
    bsm_bound_paper,
    gradient_bounds,
)
from hdnn.analysis.sensitivity import backward_sensitivity, layer_sensitivity, norms
from hdnn.analysis.symplectic import is_symplectic, symplectic_defect

__all__ = [
    "backward_sensitivity",
    "bsm_bound_continuous",
    "bsm_bound_forward_euler",
    "bsm_bound_paper",
    "gradient_bounds",
    "is_symplectic",
    "layer_sensitivity",
    "norms",
    "symplectic_defect",
]
