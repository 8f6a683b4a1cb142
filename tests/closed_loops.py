"""Random closed loops: any agents, links, weights and steps."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from hdnn import activations, control
from strategies import Random

seeds = st.integers(0, 2**31 - 1)
agents = st.integers(1, 4)
scales = st.floats(0.01, 5.0)
steps = st.floats(-3, 0).map(lambda power: 10**power)  # h from 0.001 to 1


def random_links(normal: Random, N: int) -> list[tuple[int, int]]:
    chosen = normal(N, N) > 0
    return [(i, k) for i in range(N) for k in range(i) if chosen[i, k]]


# Of the four rows of a random plant: all of them, or one each.
rows = st.sampled_from(activations.names()) | st.lists(
    st.sampled_from(activations.names()), min_size=4, max_size=4
)


def random_loop(
    seed: int,
    N: int,
    scale: float,
    h: float,
    *,
    T: int = 3,
    c: int = 4,
    engine: str = "auto",
    activation: str | list[str] = "identity",
) -> tuple[control.ClosedLoop, Random]:
    """A loop whose plant has random rows, ports, dissipation and couplings; weights likewise."""
    normal = Random(seed)
    p, m = 3, 2
    links, heat = random_links(normal, N), normal(N, p, p)
    plant = control.Plant(
        *(normal(N, p + 1, p), normal.skew(N, p), heat @ heat.mT, normal(N, p, m)),
        a=normal(N, p + 1),
        links=links,
        couplings=normal(len(links), p, p),
        activation=activation,
        weights=None if activation == "identity" else normal(N, p + 1).abs() + 0.1,
    )
    controller = control.Controller(
        *(N, T),
        states=c,
        inputs=m,
        links=random_links(normal, N),
        J=normal.skew(c),
        dissipation=normal(N, c).square(),
    )
    with torch.no_grad():
        for parameter in controller.parameters():
            parameter.copy_(scale * normal(*parameter.shape))
    return control.ClosedLoop(plant, controller, h, engine=engine), normal
