"""What the graph commands do: look at a graph, design its patterns, make a training on it ready.

Nothing here needs the command-line extra; `hdnn.app.cli_graph` turns flags into calls.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hdnn import activations, sparsity
from hdnn.app import runfiles
from hdnn.app.runs import Run, read_json
from hdnn.base.memory import check_memory
from hdnn.data import planar
from hdnn.distributed.graph.file import (
    MOST_NODES,
    GraphPatterns,
    edges_of,
    matrix_of,
    patterns_of,
    read_table,
    table_of,
)
from hdnn.distributed.graph.graph import (
    Graph,
    alone,
    from_edges,
    links_of,
    transposed,
    tree_of,
    union,
)
from hdnn.distributed.graph.partition import partition
from hdnn.distributed.graph.plan import Plan
from hdnn.distributed.network.network import SHEARS
from hdnn.distributed.training import run
from hdnn.distributed.training.sources import LABELS
from hdnn.distributed.training.training import DEFAULTS
from hdnn.errors import (
    CheckpointError,
    DataError,
    OptionError,
    SparsityError,
    choose,
    positive_float,
    positive_int,
)
from hdnn.serialization import read
from hdnn.sparsity.locality import Breach, Links, Needs, broken, rows_of
from hdnn.training.checks import check_options

MOST_CONFIG = 2**32  # bytes of a config, which has all links of its graph
FAR = 2000  # nodes, up to which all distances are measured
LISTED = 1000  # breaches of the locality condition, at the most
MOST_TRAINED = 200_000  # nodes: each process walks over all of them before it begins
PADDED = 2 * 10**7  # entries that a product with K has, where every node counts as the busiest
CLIMBED = 150  # nodes, for which R and T together are found in seconds
KEEP = ("R", "T", "both")
NETWORKS = ("h1", *SHEARS)
FIELDS = tuple(f.name for f in fields(run.Config) if f.name not in ("graph", "gain", "options"))
OPTIONS = tuple(name for name in DEFAULTS if name not in ("seed", "optimizer"))


# Looking at a graph


def check(patterns: GraphPatterns) -> dict[str, Any]:
    """All that can be said of a graph before a training; `fault` is what keeps it from one."""
    R, T, S, sizes = patterns.R, patterns.T, patterns.S, patterns.sizes
    used = Graph(R, T, None, sizes).used
    local: dict[str, Any] = {"local": None, "breaches": 0, "all_breaches": True, "explanation": []}
    fault = None
    if S is not None:
        found = _needs(patterns, S).breaches(LISTED)
        text = [{**asdict(breach), "text": str(breach)} for breach in found.explained()]
        local = {"local": not found.count, "breaches": found.count}
        local |= {"all_breaches": found.complete, "explanation": text}
        if found.count:
            fault = str(broken([pair[:2] for pair in found.pairs], found.why))
    free, m = _weight(R, sizes), sum(sizes)
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
        "groups": len(groups(used)),
        **local,
        "free_weights": {"K": 2 * free, "of": 2 * m * m, "X": _weight(T, sizes)},
        "diameter": None,
        "depth": None,
        "messages": messages(patterns),
        "fault": fault,
    }
    try:
        tree = tree_of(used, S)
    except SparsityError as error:
        return {**result, "fault": fault or str(error)}
    result |= {"connected": True, "depth": max(tree.depth)}
    if patterns.nodes <= FAR:
        result["diameter"] = diameter(used if result["groups"] == 1 else S or used)
    return result


def messages(patterns: GraphPatterns) -> dict[str, int]:
    """Of one layer, forward and as many backward, where each node is a process of its own.

    Each evaluation of the field gathers states along R and reduces contributions back along it.
    H1 has a J, which takes a round along T.
    """
    along_R, along_T = (sum(map(len, A)) - len(A) for A in (patterns.R, patterns.T))
    found = {network: 2 * along_R * len(shears) for network, shears in SHEARS.items()}
    return {"h1": 2 * along_R + along_T, **found}


def breaches(patterns: GraphPatterns) -> Iterator[Breach]:
    """Where and why the locality condition fails, as `hdnn.sparsity.explain`, from lists."""
    if patterns.S is not None:
        yield from _needs(patterns, patterns.S).breaches(work=math.inf).explained()


def _needs(patterns: GraphPatterns, S: Links) -> Needs:
    return Needs(*map(rows_of, (patterns.T, patterns.R, S)))


def distances(links: Links, start: int) -> list[int]:
    """Steps from one node to each, -1 where there is no way."""
    found, front = [-1] * len(links), [start]
    found[start] = 0
    while front:
        after = []
        for i in front:
            for k in links[i]:
                if found[k] < 0:
                    found[k] = found[i] + 1
                    after.append(k)
        front = after
    return found


def diameter(links: Links) -> int:
    """Steps between the two nodes that are farthest apart, of nodes that are all joined."""
    everyone, steps = (1 << len(links)) - 1, 0
    reached = [1 << i for i in range(len(links))]  # sets of nodes, as whole numbers
    while any(nodes != everyone for nodes in reached):
        reached = [reduce(or_, [reached[k] for k in row]) for row in links]
        steps += 1
    return steps


def groups(links: Links) -> list[list[int]]:
    """The nodes that are joined by a symmetric pattern, group by group."""
    found, seen = [], [False] * len(links)
    for start in range(len(links)):
        if not seen[start]:
            seen[start] = True
            group, done = [start], 0
            while done < len(group):
                for k in links[group[done]]:
                    if not seen[k]:
                        seen[k] = True
                        group.append(k)
                done += 1
            found.append(sorted(group))
    return found


def _links(links: Links) -> int:
    """How many join two nodes, of a symmetric pattern."""
    return (sum(map(len, links)) - len(links)) // 2


def _weight(links: Links, sizes: Sequence[int]) -> int:
    """Entries of a matrix in BlkSprs of the pattern."""
    if len({*sizes}) == 1:
        return sizes[0] ** 2 * sum(map(len, links))
    return sum(sizes[i] * sum(sizes[k] for k in row) for i, row in enumerate(links))


# Designing one


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
        return patterns_of(table)
    if nodes > CLIMBED:
        raise SparsityError(
            f"R and T together are found for up to {CLIMBED} nodes, but there are {nodes}; design "
            "R or T alone."
        )
    found = sparsity.design(matrix_of(S), sizes, connected=True)
    return replace(patterns, R=links_of("R", found.R), T=links_of("T", found.T))


# Making a training ready


@dataclass(frozen=True)
class Asked:
    """A training on a graph that was asked for, all of it checked that can be without its data."""

    config: run.Config
    graph: Graph
    folder: Path
    resume: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Of the training, with all defaults."""
        return _options(self.config)


def ring_table(nodes: int) -> dict[str, Any]:
    """A ring, on which K links each node with its two neighbours."""
    if not 1 <= nodes <= MOST_NODES:
        raise OptionError(f"nodes must be a whole number from 1 to {MOST_NODES}, but got {nodes}.")
    links = from_edges(nodes, [(i, (i + 1) % nodes) for i in range(nodes)])
    return {"nodes": nodes, "R": edges_of(links)}


def ask(
    given: dict[str, Any],
    *,
    graph: str | None = None,
    nodes: int | None = None,
    out: str | None = None,
    resume: bool = False,
) -> Asked:
    """What these options ask for: those of `run.Config` and of its training, by their names."""
    begun = resume and out is not None and (Path(out) / "config.json").is_file()
    if begun:
        assert out is not None
        return _resumed(Path(out), given, graph, nodes)
    if graph is None and nodes is None:
        if resume and out is not None:
            raise CheckpointError(f"{out} holds no training on a graph to resume: no config.json.")
        raise OptionError("say on which graph: --graph FILE.toml, or --nodes 8 for a ring.")
    table = _table(graph, nodes)
    config = _config(table, given)
    found = patterns_of(table, graph or "the ring").graph()
    _check(config, found)
    stem = f"ring{nodes}" if graph is None else Path(graph).stem
    folder = Path("runs") / _name(stem, config) if out is None else Path(out)
    if resume and (folder / "config.json").is_file():
        return _resumed(folder, given, graph, nodes)
    return Asked(config, found, folder, resume)


def _table(graph: str | None, nodes: int | None) -> dict[str, Any]:
    if graph is None:
        assert nodes is not None
        _check_count(nodes)
        return ring_table(nodes)
    table = read_table(graph)
    _check_count(table.get("nodes"))
    patterns = patterns_of(table, graph)
    if nodes is not None and nodes != patterns.nodes:
        raise OptionError(f"{graph} has {patterns.nodes} nodes, not {nodes}; leave --nodes out.")
    # What was designed is written down: all parts are to have the same.
    return table if "R" in table else table_of(patterns)


def _check_count(nodes: Any) -> None:
    """Refuse a graph that can be looked at but not be trained on, before it is read as a whole."""
    if isinstance(nodes, int) and MOST_TRAINED < nodes <= MOST_NODES:
        raise OptionError(
            f"a training on a graph has up to {MOST_TRAINED} nodes, but there are {nodes}: each "
            "process would walk over all of them for minutes; take fewer nodes with more features."
        )


def _config(table: dict[str, Any], given: dict[str, Any]) -> run.Config:
    plain = {name: value for name, value in given.items() if name in FIELDS}
    if "network" in plain:
        plain["network"] = plain["network"].lower()
    if "data" in plain and plain["data"] not in planar.SETS:
        plain["data"] = os.path.abspath(plain["data"])
    options = {name: value for name, value in given.items() if name in OPTIONS}
    return run.Config(graph=table, options=options, **plain)


def _options(config: run.Config) -> dict[str, Any]:
    known = {**DEFAULTS, **run.OPTIONS, "seed": config.seed, **config.options}
    return check_options(**known)


def _resumed(folder: Path, given: dict[str, Any], graph: str | None, nodes: int | None) -> Asked:
    """The training of a folder, unless something else is asked for."""
    file = folder / "config.json"
    try:
        written = read_json(file, MOST_CONFIG)
        runfiles.check(file, written, {}, {"gain": runfiles.number, "options": runfiles.table})
        config = run.Config(**written)
        found = patterns_of(config.graph, str(file)).graph()
        _check(config, found)
    except (TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is no config of a training on a graph.") from error
    table = config.graph if graph is None and nodes is None else _table(graph, nodes)
    asked = _config(table, given)
    old, new = ({**asdict(c), **_options(c)} for c in (config, asked))
    named = ("graph", *(name for name in (*FIELDS, *OPTIONS) if name in given))
    for name in named:
        if old[name] != new[name]:
            what = f"{name.replace('_', '-')} = {old[name]!r}, not {new[name]!r}"
            raise OptionError(
                f"the training in {folder} has {'another graph' if name == 'graph' else what}; "
                "resume it with the options that it was started with, or name another folder with "
                "--out."
            )
    return Asked(config, found, folder, True)


def _name(stem: str, config: run.Config) -> str:
    data = config.data if config.data in planar.SETS else Path(config.data).stem
    plain = (re.sub(r"[^\w.-]+", "_", s, flags=re.ASCII).strip("._-")[:64] for s in (stem, data))
    stem, data = (text or "graph" for text in plain)
    return f"{stem}-{data}-{config.network}-{config.layers}-{config.seed}"


def _check(config: run.Config, graph: Graph) -> None:
    """Raise what the processes would raise, and refuse what they could not hold."""
    graph.tree()
    choose("network", config.network, NETWORKS)
    choose("dtype", config.dtype, run.DTYPES)
    choose("init", config.init, run.INITS)
    activations.registered(config.activation)
    positive_int("layers", config.layers)
    positive_float("step", config.step)
    if not 0 <= config.seed < 2**63 - 1:
        raise OptionError(f"seed must be from 0 to 2^63 - 2, but got {config.seed}.")
    options = _options(config)
    n = 2 * sum(graph.sizes)
    if config.init == "masked" and n > run.DENSE:
        raise OptionError(f"a masked network of {n} features is too large; take init scaled.")
    _check_busiest(graph)
    # Weights, gradients and two moments of Adam; then what each layer keeps of a minibatch.
    weights = 2 * _weight(union(*graph.R), graph.sizes) * (2 if config.network == "h1" else 1)
    states = 6 * n * min(options["batch"], 10**6)
    samples = 2 * n * 8000 if config.data in planar.SETS else 0
    needed = config.layers * (4 * weights + states) + samples
    needed *= run.DTYPES[config.dtype].itemsize
    check_memory(needed, f"{config.layers} layers on this graph", "layers, nodes or features")


def _check_busiest(graph: Graph) -> None:
    """Refuse a hub: where a node has few features, products give all nodes as many links as it."""
    busy = max((max(map(len, A)), A) for R in graph.R for A in (R, transposed(R)))
    if graph.nodes * busy[0] > PADDED:
        hub = next(i for i, row in enumerate(busy[1]) if len(row) == busy[0])
        raise SparsityError(
            f"node {hub} has {busy[0] - 1} links in R, and a step takes as long as if each of the "
            f"{graph.nodes} nodes had as many; give it fewer links."
        )


def check_folder(asked: Asked) -> bool:
    """Raise unless the folder can be trained in; whether the training there is complete."""
    home = asked.folder
    if not asked.resume:
        if (home / "config.json").is_file():
            raise CheckpointError(
                f"{home} holds a training already; go on with it by --resume, or name another "
                "folder with --out."
            )
        Run(home).check_free()
        return False
    return (home / "metrics.json").is_file()


def metrics(folder: Path) -> dict[str, Any]:
    """What a complete training came to."""
    file = folder / "metrics.json"
    found = read_json(file)
    runfiles.check(file, found, runfiles.OF_GRAPHS, runfiles.OF_SOME_GRAPHS)
    return found


def plan_of(graph: Graph, parts: int) -> Plan:
    """The nodes of each of so many processes."""
    return Plan(graph, partition(graph, positive_int("parts", parts)))


def check_data(asked: Asked) -> None:
    """Look at the data without reading them: there for each node, and of its shape."""
    config, sizes = asked.config, asked.graph.sizes
    if config.data in planar.SETS:
        return
    home = Path(config.data)
    if not home.is_dir():
        known = ", ".join(planar.SETS)
        raise DataError(f"{config.data} is neither one of {known} nor a folder of node files.")
    classes = read_json(home / "classes.json")
    if not isinstance(classes, int) or isinstance(classes, bool) or not 2 <= classes <= 10**6:
        raise DataError(f"{home / 'classes.json'} must hold the number of classes, such as 2.")
    for part in ("train", "test"):
        if part == "test" and not (home / part).is_dir():
            continue
        _, labels = read(home / part / LABELS)
        t = labels.get("t")
        if t is None or t.ndim != 1 or not len(t) or t.is_floating_point() or t.is_complex():
            raise DataError(f"{home / part / LABELS} must hold whole numbers t, one a sample.")
        if int(t.min()) < 0 or int(t.max()) >= classes:
            raise DataError(
                f"labels must lie in 0 .. {classes - 1}, but {home / part / LABELS} has "
                f"{int(t.min())} .. {int(t.max())}."
            )
        for node, size in enumerate(sizes):
            file = home / part / f"node-{node:05d}.safetensors"
            shape = _shape(file)
            if shape != [len(t), 2 * size]:
                raise DataError(
                    f"{file} must hold x of shape ({len(t)}, {2 * size}), for the labels and the "
                    f"features of node {node}, but has {tuple(shape)}."
                )


def _shape(file: Path) -> list[int]:
    try:
        with safe_open(file, "pt") as content:
            return content.get_slice("x").get_shape()
    except (OSError, SafetensorError, ValueError) as error:
        reason = "there is no such file" if not file.exists() else f"no tensors with x ({error})"
        raise DataError(f"cannot read {file}: {reason}.") from error


def write_config(asked: Asked, path: Path) -> None:
    """For the processes to read."""
    path.write_text(json.dumps(asdict(asked.config)), encoding="utf-8")


def check_time(name: str, value: float) -> float:
    """A number of seconds that can be waited for."""
    if not (math.isfinite(value) and 0 < value <= 10**7):
        raise OptionError(f"{name} must be a number of seconds > 0, but got {value}.")
    return value
