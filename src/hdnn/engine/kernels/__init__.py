"""Kernels that run whole stacks forwards and backwards, one file for each kind of machine."""
