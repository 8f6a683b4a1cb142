"""Training on a graph."""
