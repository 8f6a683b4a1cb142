"""The graph: nodes, links, files, and which process owns which node."""
