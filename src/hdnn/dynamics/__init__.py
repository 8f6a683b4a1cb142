"""Learned dynamics that hardly drift: symplectic maps of mechanical systems, from data.

A `FlowMap` learns the map from a state to the state one time step later. It is symplectic for any
weights, so energies hardly change, however often it is applied. `systems` makes data to try it.
"""

from hdnn.dynamics import systems
from hdnn.dynamics.flow import FlowMap, FlowReport
from hdnn.dynamics.learning import History, fit

__all__ = ["FlowMap", "FlowReport", "History", "fit", "systems"]
