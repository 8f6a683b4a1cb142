"""Optimal control of many agents: a closed loop that is stable for any weights, in discrete time.

A `Plant` and its `Controller` exchange energy through ports, and neighbours exchange energy along
the links of a graph. A `ClosedLoop` simulates both in steps whose energy balance is exact, so that
no weights and no step size can make it unstable. A `LoopProblem` defines where agents start and
what their `Cost` is, and a `LoopTraining` minimises this cost.
"""

from hdnn.control.certificate import Balance, LoopCertificate
from hdnn.control.controller import Controller
from hdnn.control.cost import Cost, collisions
from hdnn.control.loop import ClosedLoop
from hdnn.control.plant import Plant, oscillators, pendulums, robots
from hdnn.control.problem import LoopProblem, crossing
from hdnn.control.train import LoopTraining

__all__ = [
    "Balance",
    "ClosedLoop",
    "Controller",
    "Cost",
    "LoopCertificate",
    "LoopProblem",
    "LoopTraining",
    "Plant",
    "collisions",
    "crossing",
    "oscillators",
    "pendulums",
    "robots",
]
