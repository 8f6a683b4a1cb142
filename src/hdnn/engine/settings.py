from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

from hdnn.errors import choose


@dataclass(frozen=True)
class Settings:
    engine: str = "auto"
    backprop: str = "auto"
    precision: str = "auto"
    deterministic: bool = False

    def __post_init__(self):
        choose("engine", self.engine, ("auto", "reference", "fused"))
        choose("backprop", self.backprop, ("auto", "stored", "checkpoint", "reversible"))


_current = ContextVar("hdnn_engine", default=Settings())


def current(engine=None, backprop=None):
    return _current.get()


@contextmanager
def use(**options):
    token = _current.set(replace(_current.get(), **options))
    yield
    _current.reset(token)
