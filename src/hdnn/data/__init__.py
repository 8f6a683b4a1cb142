"""The data sets of the paper's experiments."""

from hdnn.data import images, planar
from hdnn.data.fetch import download
from hdnn.data.images import ImageData, augment, draw, load_cifar10, load_mnist
from hdnn.data.planar import PlanarData

__all__ = [
    "ImageData",
    "PlanarData",
    "augment",
    "download",
    "draw",
    "images",
    "load_cifar10",
    "load_mnist",
    "planar",
]
