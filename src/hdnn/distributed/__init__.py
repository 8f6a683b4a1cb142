"""Networks on a graph of processes that communicate only with their neighbours.

A `Graph` holds the nodes and their links, `train` is called by each of several processes under
torchrun to train one network on the graph, and `launch` starts these processes on this machine.
Messages are neither encrypted nor authenticated: use only networks and machines that you trust.
"""

from hdnn.distributed.exchange import LostError, Messages, exchange
from hdnn.distributed.graph import Graph
from hdnn.distributed.launch import launch
from hdnn.distributed.network import GraphNetwork
from hdnn.distributed.nodes import write_nodes
from hdnn.distributed.plan import Plan, partition
from hdnn.distributed.train import Settings, train

__all__ = [
    "Graph",
    "GraphNetwork",
    "LostError",
    "Messages",
    "Plan",
    "Settings",
    "exchange",
    "launch",
    "partition",
    "train",
    "write_nodes",
]
