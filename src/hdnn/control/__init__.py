"""Optimal control of many agents: a closed loop that is stable for any weights, in discrete time.

A `Plant` and its `Controller` exchange energy through ports, and neighbours do so along the links
of a graph. A `ClosedLoop` simulates them by steps whose energy balance is exact, so that no weights
and no step size can make it unstable. A `LoopProblem` says where agents start and what their `Cost`
is, and a `LoopTraining` minimises it.
"""

from hdnn.control import costs
from hdnn.control.candidates import LinkCost, with_links
from hdnn.control.certificate import Balance, LoopCertificate
from hdnn.control.controller import Controller
from hdnn.control.loop import ClosedLoop
from hdnn.control.objective import Cost
from hdnn.control.plants import Plant, microgrid, oscillators, pendulums, robots
from hdnn.control.problems import LoopProblem, load_problem
from hdnn.control.processes import ProcessRun, train_on_processes
from hdnn.control.scenarios import crossing, crowd
from hdnn.control.training import LoopTraining

__all__ = [
    "Balance",
    "ClosedLoop",
    "Controller",
    "Cost",
    "LinkCost",
    "LoopCertificate",
    "LoopProblem",
    "LoopTraining",
    "Plant",
    "ProcessRun",
    "costs",
    "crossing",
    "crowd",
    "load_problem",
    "microgrid",
    "oscillators",
    "pendulums",
    "robots",
    "train_on_processes",
    "with_links",
]
