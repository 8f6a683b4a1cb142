"""Graphs for tests: the paper's ring of eight nodes, and patterns of any kind."""

from __future__ import annotations

from hypothesis import strategies as st

from hdnn.distributed.graph import file

RING = [[i, (i + 1) % 8] for i in range(8)]
TWO_STEPS = [*RING, *([i, (i + 2) % 8] for i in range(8))]


@st.composite
def patterns(draw):
    """Patterns of any kind, local or not."""
    M = draw(st.integers(1, 7))
    nodes = st.integers(0, M - 1)

    def pattern(symmetric):
        pairs = draw(st.lists(st.tuples(nodes, nodes), max_size=12))
        rows = [{i} for i in range(M)]
        for i, k in pairs:
            rows[i].add(k)
            if symmetric:
                rows[k].add(i)
        return tuple(tuple(sorted(row)) for row in rows)

    S = pattern(True) if draw(st.booleans()) else None
    sizes = tuple(draw(st.lists(st.integers(1, 30), min_size=M, max_size=M)))
    return file.GraphPatterns(pattern(False), pattern(True), S, sizes)
