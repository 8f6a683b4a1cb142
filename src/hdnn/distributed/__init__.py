"""H-DNNs on a graph of processes that talk to their neighbours only.

A `Graph` says which nodes are linked; a `Plan` which process owns which node; a `GraphNetwork`
holds the layers of one process, and `Training` trains them together with the others. Messages go by
a `Transport`: `Gloo` or `Mpi` between processes, `Local` where one process owns all nodes; the
others must give the same results. Messages are neither encrypted nor authenticated: use trusted
networks only.
"""

from hdnn.distributed.graph.file import read_graph
from hdnn.distributed.graph.graph import Graph
from hdnn.distributed.graph.plan import Plan, partition
from hdnn.distributed.launch import launch
from hdnn.distributed.messages.connect import connect
from hdnn.distributed.messages.gloo import Gloo
from hdnn.distributed.messages.mpi import Mpi
from hdnn.distributed.network.network import GraphNetwork, of_dense
from hdnn.distributed.training.run import Config, train
from hdnn.distributed.training.training import Training
from hdnn.distributed.transport import DistributedError, Local, Transport

__all__ = [
    "Config",
    "DistributedError",
    "Gloo",
    "Graph",
    "GraphNetwork",
    "Local",
    "Mpi",
    "Plan",
    "Training",
    "Transport",
    "connect",
    "launch",
    "of_dense",
    "partition",
    "read_graph",
    "train",
]
