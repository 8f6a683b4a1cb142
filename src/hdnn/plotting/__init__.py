"""Pictures: every function draws into `ax`, or a new figure, and returns the Axes.

The colours are from Okabe and Ito; colour-blind readers can tell them apart. Classes also differ in
markers, and lines in dashes, so grey prints remain readable. `ax.figure.savefig(path)` saves a
picture.
"""

from hdnn.plotting.curves import BLACK as BLACK
from hdnn.plotting.curves import BLUE as BLUE
from hdnn.plotting.curves import RED as RED
from hdnn.plotting.curves import (
    certificate_norms,
    diagnosis_gains,
    gradient_surface,
    new_figure,
    training_history,
)
from hdnn.plotting.plane import (
    agent_paths,
    decision_regions,
    phase_portrait,
)

__all__ = [
    "agent_paths",
    "certificate_norms",
    "decision_regions",
    "diagnosis_gains",
    "gradient_surface",
    "new_figure",
    "phase_portrait",
    "training_history",
]
