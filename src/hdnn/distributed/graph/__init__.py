"""The graph: nodes, links, files, and which process owns which node."""

from hdnn.distributed.graph.graph import Graph  # pickles of version 0.1 name it here

__all__ = ["Graph"]
