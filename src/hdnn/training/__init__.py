"""Training: coordinate descent between the output layer and the hidden layers."""

from hdnn.training.loop import History, fit

__all__ = ["History", "fit"]
