"""Import `torch.distributed.nn` before there is a process group.

Its default arguments keep the group of that moment for ever, and an optimizer may import it late.
Threads of a group that is never freed may abort Python.
"""

import torch.distributed

if torch.distributed.is_available():
    import torch.distributed.nn
