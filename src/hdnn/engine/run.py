"""A stand-in for the engine: the definition itself."""

from hdnn import schemes
from hdnn.engine.settings import current


def run(
    scheme, y, forces, h, sigma, *, trajectory=False, inverse=False, engine=None, backprop=None
):
    current(engine, backprop)
    return schemes.run(scheme, y, forces, h, sigma, trajectory=trajectory, inverse=inverse)
