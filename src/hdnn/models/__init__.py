"""Image classifiers: the networks of the paper's MNIST and CIFAR-10 tables."""

from collections.abc import Callable

from hdnn.models.base import ImageModel
from hdnn.models.baselines import AlexNet, ResNet, alexnet, resnet56
from hdnn.models.mnist import MNIST_STEPS as MNIST_STEPS
from hdnn.models.mnist import MNISTNet, mnist_net
from hdnn.models.star import PADDINGS as PADDINGS
from hdnn.models.star import POOLS as POOLS
from hdnn.models.star import HDNNStar, hdnn_star, mnist_conv

# The function that makes a classifier of each class from its `config()`.
MAKERS: dict[type[ImageModel], Callable[..., ImageModel]] = {
    MNISTNet: lambda **options: mnist_net(None, 0, **options),
    HDNNStar: hdnn_star,
    ResNet: resnet56,
    AlexNet: alexnet,
}

__all__ = [
    "AlexNet",
    "HDNNStar",
    "ImageModel",
    "MNISTNet",
    "ResNet",
    "alexnet",
    "hdnn_star",
    "mnist_conv",
    "mnist_net",
    "resnet56",
]
