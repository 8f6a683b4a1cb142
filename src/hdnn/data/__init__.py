"""The data sets of the paper's experiments."""

from hdnn.data import cifar10, images, mnist, planar
from hdnn.data.images import ImageData, augment
from hdnn.data.planar import PlanarData

__all__ = ["ImageData", "PlanarData", "augment", "cifar10", "images", "mnist", "planar"]
