"""Facts about a graph that are known before any training, and the design of its patterns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import or_
from typing import Any

from hdnn import sparsity
from hdnn.base.search import components
from hdnn.distributed.graph.file import GraphPatterns, edges_of, matrix_of, patterns_of
from hdnn.distributed.graph.graph import Graph, alone, links_of, transposed, tree_of, union
from hdnn.distributed.network.network import SHEARS
from hdnn.errors import SparsityError, choose
from hdnn.sparsity.locality import Links, Needs, broken, rows_of

FAR = 2000  # nodes, up to which all distances are measured
LISTED = 1000  # breaches of the locality condition, at the most
CLIMBED = 150  # nodes, for which R and T together are found in seconds
KEEP = ("R", "T", "both")


def check(patterns: GraphPatterns) -> dict[str, Any]:
    """All that is known of a graph before training; `fault` says why it cannot be trained on."""
    R, T, S, sizes = patterns.R, patterns.T, patterns.S, patterns.sizes
    graph = Graph(R, T, None, sizes, patterns.names)
    used = graph.used
    local: dict[str, Any] = {"local": None, "breaches": 0, "all_breaches": True, "explanation": []}
    fault = None
    if S is not None:
        found = Needs(*map(rows_of, (T, R, S))).breaches(LISTED)
        each = found.explained()
        text = [{**asdict(breach), "text": breach.text(graph.label)} for breach in each]
        local = {"local": not found.count, "breaches": found.count}
        local |= {"all_breaches": found.complete, "explanation": text}
        if found.count:
            pairs = [pair[:2] for pair in found.pairs]
            fault = str(broken(pairs, found.why, label=graph.label))
    free, m = block_entries(R, sizes), sum(sizes)
    result: dict[str, Any] = {
        "nodes": patterns.nodes,
        "sizes": sizes[0] if len(set(sizes)) == 1 else list(sizes),
        "features": 2 * m,
        "links": {
            "S": None if S is None else _links(S),
            "R": _links(union(R, transposed(R))),
            "T": _links(T),
        },
        "connected": False,
        "groups": len(components(used)),
        **local,
        "free_weights": {"K": 2 * free, "of": 2 * m * m, "X": block_entries(T, sizes)},
        "diameter": None,
        "depth": None,
        "messages": messages(patterns),
        "fault": fault,
    }
    if patterns.names:
        result["names"] = list(patterns.names)
    try:
        tree = tree_of(used, S, called=graph.called(0))
    except SparsityError as error:
        return {**result, "fault": fault or str(error)}
    result |= {"connected": True, "depth": max(tree.depth)}
    if patterns.nodes <= FAR:
        result["diameter"] = diameter(used if result["groups"] == 1 else S or used)
    return result


def messages(patterns: GraphPatterns) -> dict[str, int]:
    """Messages of one layer forward (and as many backward) if each node is a process.

    Each evaluation of the field gathers states along R and reduces contributions back along it.
    H1 has a J, which takes a round along T.
    """
    along_R, along_T = (sum(map(len, A)) - len(A) for A in (patterns.R, patterns.T))
    found = {network: 2 * along_R * len(shears) for network, shears in SHEARS.items()}
    return {"h1": 2 * along_R + along_T, **found}


def diameter(links: Links) -> int:
    """Steps between the two nodes that are farthest apart, of nodes that are all joined."""
    everyone, steps = (1 << len(links)) - 1, 0
    reached = [1 << i for i in range(len(links))]  # sets of nodes, as whole numbers
    while any(nodes != everyone for nodes in reached):
        reached = [reduce(or_, [reached[k] for k in row]) for row in links]
        steps += 1
    return steps


def _links(links: Links) -> int:
    """The number of links between different nodes in a symmetric pattern."""
    return (sum(map(len, links)) - len(links)) // 2


def block_entries(links: Links, sizes: Sequence[int]) -> int:
    """Entries of a matrix in BlkSprs of the pattern."""
    if len({*sizes}) == 1:
        return sizes[0] ** 2 * sum(map(len, links))
    return sum(sizes[i] * sum(sizes[k] for k in row) for i, row in enumerate(links))


def design(patterns: GraphPatterns, keep: str = "R") -> GraphPatterns:
    """The same graph with the R (T = I), the T (R = I), or the pair that frees most weights."""
    choose("keep", keep, KEEP)
    S, sizes, nodes = patterns.S, patterns.sizes, patterns.nodes
    if S is None:
        raise SparsityError("the graph has no edges to design patterns for; add edges.")
    if keep == "T":
        return replace(patterns, R=alone(nodes), T=S)
    if keep == "R":
        table = {"nodes": nodes, "edges": edges_of(S), "sizes": list(sizes)}
        return replace(patterns, R=patterns_of(table).R, T=alone(nodes))
    if nodes > CLIMBED:
        raise SparsityError(
            f"R and T together are found for up to {CLIMBED} nodes, but there are {nodes}; design "
            "R or T alone."
        )
    found = sparsity.design(matrix_of(S), sizes, connected=True)
    return replace(patterns, R=links_of("R", found.R), T=links_of("T", found.T))
