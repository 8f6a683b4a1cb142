"""How messages get from one part of a graph to another."""
