"""Image classifiers: the networks of the paper's MNIST and CIFAR-10 tables."""

from hdnn.models.classifiers import (
    MNIST_STEPS,
    PADDINGS,
    POOLS,
    AlexNet,
    HDNNStar,
    ImageModel,
    MNISTNet,
    ResNet,
    alexnet,
    hdnn_star,
    mnist_conv,
    mnist_net,
    resnet56,
)

__all__ = [
    "MNIST_STEPS",
    "PADDINGS",
    "POOLS",
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
