"""Fast execution of a stack of layers: the defined results, faster or with less memory.

`hdnn.schemes.run` is the definition. An *engine* says where the layers run: "reference" (plain
PyTorch, one layer after the other) or "fused" (the whole stack as one kernel). *Backprop* says
which saved states the backward pass starts from: all ("stored"), or about sqrt(N) of them
("checkpoint"), between which the layers run a second time. Both give the same gradients, for any
weights. "reversible" keeps only the last state and rebuilds the other states by undoing the layers,
so memory does not grow with depth. Rounding errors then grow as the layers expand, so each reversal
is checked: inexact gradients give a `ReversalWarning` with figures, worthless gradients an error.

"auto" stores all states while they take no more than 1/32 of the memory, and uses checkpoints
beyond that.
"""

from hdnn.engine.run import run
from hdnn.engine.settings import Settings, current, use

__all__ = ["Settings", "current", "run", "use"]
