"""Whole stacks forwards and backwards, each file for one kind of machine."""
