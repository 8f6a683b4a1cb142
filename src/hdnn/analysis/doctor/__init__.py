"""The doctor: what is wrong with the gradients of any model, and where."""

from hdnn.analysis.doctor.diagnosis import Diagnosis
from hdnn.analysis.doctor.examine import diagnose
from hdnn.analysis.doctor.finding import Finding
from hdnn.analysis.doctor.watch import GradientDoctor

__all__ = ["Diagnosis", "Finding", "GradientDoctor", "diagnose"]
