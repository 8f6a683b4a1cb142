"""The layers of one part of a graph."""
