"""Pictures. Every function draws into `ax`, or a new figure, and returns the Axes.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; classes also differ
in their markers, lines in their dashes, so that a print in grey can be read.
`ax.figure.savefig(path)` writes a picture.
"""

from hdnn.plotting.agents import agent_paths
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
from hdnn.plotting.figures import BLACK as BLACK
from hdnn.plotting.figures import BLUE as BLUE
from hdnn.plotting.figures import CLASSES as CLASSES
from hdnn.plotting.figures import GREEN as GREEN
from hdnn.plotting.figures import ORANGE as ORANGE
from hdnn.plotting.figures import PURPLE as PURPLE
from hdnn.plotting.figures import RED as RED
from hdnn.plotting.figures import SKY as SKY
from hdnn.plotting.figures import STYLES as STYLES
from hdnn.plotting.regions import decision_regions, phase_portrait, trajectories

__all__ = [
    "agent_paths",
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
