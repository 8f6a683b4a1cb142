"""Whether torchrun has started this program in several processes, as the environment says.

What such processes do is in `hdnn.training.processes.torchrun`, which needs PyTorch; this does not.
"""

from __future__ import annotations

import os

_known = {"as one": False}


def several() -> bool:
    """Whether this is one of several processes, as torchrun says in the environment."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return rank.isdecimal() and size.isdecimal() and int(size) > 1


def is_first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return not several() or int(os.environ["RANK"]) == 0


def speak_as_one() -> None:
    """From here on, one of several processes reports why all of them end."""
    _known["as one"] = several()


def is_as_one() -> bool:
    """Whether a failure is to be reported by one process, and not by each."""
    return _known["as one"]


def speak_alone() -> None:
    """From here on, each process reports by itself."""
    _known["as one"] = False
