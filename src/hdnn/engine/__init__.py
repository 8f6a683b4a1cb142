"""How stacks of layers run."""

from hdnn.engine.run import run
from hdnn.engine.settings import Settings, current, use

__all__ = ["Settings", "current", "run", "use"]
