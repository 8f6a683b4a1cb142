"""The data sets of the paper's experiments."""

from hdnn.data import planar
from hdnn.data.planar import PlanarData

__all__ = ["PlanarData", "planar"]
