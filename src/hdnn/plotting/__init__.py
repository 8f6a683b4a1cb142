"""Pictures. Every function draws into `ax`, or a new figure, and returns the Axes.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; classes also differ
in their markers, lines in their dashes, so that a print in grey can be read.
`ax.figure.savefig(path)` writes a picture.
"""

from hdnn.plotting.curves import (
    certificate_norms,
    certificates_norms,
    convergence,
    diagnosis_gains,
    gradient_surface,
    layer_growth,
    perturbation_growth,
    sensitivity_growth,
    sensitivity_norms,
    training_history,
)
from hdnn.plotting.figures import BLACK, BLUE, CLASSES, GREEN, ORANGE, PURPLE, RED, SKY, STYLES
from hdnn.plotting.regions import decision_regions, phase_portrait, trajectories

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
    "diagnosis_gains",
    "gradient_surface",
    "layer_growth",
    "perturbation_growth",
    "phase_portrait",
    "sensitivity_growth",
    "sensitivity_norms",
    "training_history",
    "trajectories",
]
