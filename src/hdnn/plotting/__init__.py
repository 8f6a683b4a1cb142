"""Pictures. Every function draws into `ax`, or a new figure, and returns the Axes."""

from hdnn.plotting.pictures import (
    certificate_norms,
    certificates_norms,
    convergence,
    decision_regions,
    gradient_surface,
    layer_growth,
    perturbation_growth,
    phase_portrait,
    sensitivity_growth,
    sensitivity_norms,
    training_history,
    trajectories,
)
from hdnn.plotting.styles import BLACK, BLUE, CLASSES, GREEN, ORANGE, PURPLE, RED, SKY, STYLES

__all__ = [
    "BLACK",
    "BLUE",
    "CLASSES",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "RED",
    "SKY",
    "STYLES",
    "certificate_norms",
    "certificates_norms",
    "convergence",
    "decision_regions",
    "gradient_surface",
    "layer_growth",
    "perturbation_growth",
    "phase_portrait",
    "sensitivity_growth",
    "sensitivity_norms",
    "training_history",
    "trajectories",
]
