"""Optimal control of many agents: a closed loop that is stable for any weights, in discrete time.

A `Plant` and its `Controller` exchange energy through ports, and neighbours do so along the links
of a graph. A `ClosedLoop` simulates them by steps whose energy balance is exact, so that no weights
and no step size can make it unstable; `costs` are what a training minimises.
"""

from hdnn.control import costs
from hdnn.control.certificate import Balance, LoopCertificate
from hdnn.control.controller import Controller
from hdnn.control.loop import ClosedLoop
from hdnn.control.plants import Plant, microgrid, oscillators, robots

__all__ = [
    "Balance",
    "ClosedLoop",
    "Controller",
    "LoopCertificate",
    "Plant",
    "costs",
    "microgrid",
    "oscillators",
    "robots",
]
