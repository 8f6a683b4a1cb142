"""Training: coordinate descent between the output layer and the hidden layers."""

from hdnn.training.loop import Callback, History, Moment, fit

__all__ = ["Callback", "History", "Moment", "fit"]
