"""What a step of training on a graph costs: against the number of nodes, ranks, and all-gather.

    python benchmarks/graphs.py
    python benchmarks/graphs.py --nodes 100 400 --turns 2 --out docs/results

One process first: CPU time a node and step on rings and grids, sizes taking turns. Then several
ranks on this machine: do they get the same bits as one, what do they send, how long do they take,
and how long would it take to send everything to all instead?
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist

import hdnn
from hdnn.distributed import Graph, GraphNetwork, Local, Plan, Training, connect, launch, partition
from hdnn.distributed.graph.plan import cut
from hdnn.distributed.messages.connect import parts_here
from hdnn.training.processes.meeting import PrefixStore, TCPStore

LAYERS, BATCH = 4, 32
RANKS = (1, 2, 4, 8)


def graph_of(kind: str, nodes: int) -> Graph:
    if kind == "ring":
        return Graph.ring(nodes)
    side = math.isqrt(nodes)
    return Graph.grid(side, side)


class Steps:
    """A training whose steps are taken one at a time."""

    def __init__(self, graph: Graph, owner: list[int], transport: Any, most: int) -> None:
        net = GraphNetwork(Plan(graph, owner), LAYERS, transport, step=0.2)
        net.draw(0)
        positions = net.positions(net.part.number)
        x = torch.zeros(len(positions), BATCH * most)
        for row, position in enumerate(positions.tolist()):
            generator = torch.Generator().manual_seed(position)
            x[row] = torch.randn(x.shape[1], generator=generator)
        t = torch.arange(x.shape[1]) % 2
        head = hdnn.SigmoidHead(net.features, generator=torch.Generator().manual_seed(0))
        options: dict[str, Any] = {"solver": "joint", "batch": BATCH, "clip": 1.0}
        self.training = Training(net, head, x, t, **options)
        self.order = torch.arange(x.shape[1]).split(BATCH)
        self.net, self.k = net, 0

    def take(self) -> None:
        self.training._step(self.order[self.k])
        self.k += 1

    def digests(self) -> dict[int, str]:
        """Of the weights of each node."""
        return {
            node: hashlib.sha256(
                b"".join(w.contiguous().numpy().tobytes() for w in self.net.blocks(node).values())
            ).hexdigest()
            for node in self.net.part.nodes
        }


def alone(nodes: list[int], turns: int) -> list[dict[str, Any]]:
    """CPU time of one process, sizes and kinds taking turns."""
    cases = [(kind, count) for kind in ("ring", "grid") for count in nodes]
    graphs = {case: graph_of(*case) for case in cases}
    steps = {c: Steps(g, [0] * g.nodes, Local(), turns + 1) for c, g in graphs.items()}
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for turn in range(turns + 1):
        for case in cases:
            start = time.process_time()
            steps[case].take()
            if turn:  # the first makes caches warm
                times[case].append(time.process_time() - start)
    return [
        {
            "kind": kind,
            "nodes": graphs[kind, count].nodes,
            "microseconds": 1e6 * statistics.median(found) / graphs[kind, count].nodes,
            "from": 1e6 * min(found) / graphs[kind, count].nodes,
            "to": 1e6 * max(found) / graphs[kind, count].nodes,
            "node_bytes": _node_bytes(graphs[kind, count]),
        }
        for (kind, count), found in times.items()
    ]


def _node_bytes(graph: Graph) -> float:
    """Bytes that a node sends a step if each is a process: two rounds on R a half step, twice."""
    links = sum(k != i for i, row in enumerate(graph.R[0]) for k in row)
    return 4 * BATCH * links * 2 * 2 * 2 * LAYERS / graph.nodes


# Several ranks


def work(kind: str, nodes: int, turns: int) -> None:
    """One rank: take steps, and compare the messages of a round with an all-gather."""
    graph, parts = graph_of(kind, nodes), parts_here()
    owner = partition(graph, parts)
    transport = connect().transport
    steps = Steps(graph, owner, transport, turns + 1)
    steps.take()
    digests = steps.digests()
    before, start = sum(transport.traffic.bytes.values()), time.perf_counter()
    busy = time.process_time()
    for _ in range(turns):
        steps.take()
    found: dict[str, Any] = {
        "part": transport.part,
        "wall": (time.perf_counter() - start) / turns,
        "cpu": (time.process_time() - busy) / turns,
        "bytes": (sum(transport.traffic.bytes.values()) - before) / turns,
        "digests": digests,
        "cut": cut(graph, owner),
    }
    if parts > 1:
        found |= _rounds(steps.net, turns)
    print(json.dumps(found), flush=True)
    transport.close()


def _rounds(net: GraphNetwork, turns: int) -> dict[str, Any]:
    """Seconds and bytes of one round with neighbours, and of an all-gather of the same state."""
    import os

    host, _, port = os.environ["HDNN_STORE"].rpartition(":")
    store = PrefixStore("everybody", TCPStore(host, int(port), is_master=False))
    part, parts = net.part.number, net.plan.parts
    group = dist.ProcessGroupGloo(store, part, parts)  # pyright: ignore
    x = torch.randn(net.part.rows, BATCH)
    most = max(len(nodes) for nodes in net.plan.nodes_of)
    mine = torch.zeros(most, BATCH)
    everyone = [torch.empty_like(mine) for _ in range(parts)]
    near, stencil = net.field.near, net.field.near.stencil
    target = torch.empty(stencil.halo_rows, BATCH)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(20 * turns):
        start = time.perf_counter()
        pending, place = near._start(stencil.round(0)[0], x, target)
        pending.wait()
        place()
        times[0].append(time.perf_counter() - start)
        start = time.perf_counter()
        group.allgather([everyone], [mine]).wait()
        times[1].append(time.perf_counter() - start)
    return {
        "near": statistics.median(times[0]),
        "all": statistics.median(times[1]),
        "near_bytes": sum(4 * BATCH * len(rows) for _, rows in stencil.round(0)[0].out),
        "all_bytes": mine.nbytes * (parts - 1),
    }


def ranks(kind: str, nodes: int, turns: int) -> list[dict[str, Any]]:
    """All numbers of ranks, two rounds of them taking turns, against one rank."""
    found: dict[int, list[list[dict[str, Any]]]] = {count: [] for count in RANKS}
    for _ in range(2):
        for count in RANKS:
            command = [sys.executable, __file__, "--worker", kind, str(nodes), str(turns)]
            ended = launch(count, command)
            if ended.code:
                raise SystemExit(f"{count} ranks failed: {ended.fault}")
            found[count].append([json.loads(line) for line in ended.output.splitlines()])
    first = found[1][0][0]["digests"]
    rows = []
    for count in RANKS:
        runs = found[count]
        digests = {k: v for part in runs[0] for k, v in part["digests"].items()}
        walls = [max(part["wall"] for part in parts) for parts in runs]
        base = [max(part["wall"] for part in parts) for parts in found[1]]
        row: dict[str, Any] = {
            "kind": kind,
            "nodes": len(digests),
            "ranks": count,
            "same_bits": digests == first,
            "speedup": [b / w for b, w in zip(base, walls, strict=True)],
            "cpu": statistics.mean(sum(p["cpu"] for p in parts) for parts in runs),
            "bytes": sum(part["bytes"] for part in runs[0]),
            "cut": runs[0][0]["cut"],
        }
        if count > 1:
            row["all_over_near"] = [
                statistics.median(p["all"] / p["near"] for p in parts) for parts in runs
            ]
            sent = [sum(p[k] for p in runs[0]) for k in ("all_bytes", "near_bytes")]
            row["all_bytes_over_near"] = sent[0] / sent[1]
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


# The page


def page(result: dict[str, Any]) -> str:
    about = report.on_one_line(result["machine"])
    lines = ["# Graphs: what a step costs", "", f"`python benchmarks/graphs.py`, {about}."]
    lines += [f"H2, {LAYERS} layers, batch {BATCH}, one pair (p, q) a node, output layer trained"]
    lines += ["along, gradients clipped. Other programs kept "]
    lines[-1] += f"{result['others_cores'] or 0:.1f} cores busy meanwhile."
    rows = [
        [
            r["kind"],
            r["nodes"],
            f"{r['microseconds']:.1f} ({r['from']:.1f} to {r['to']:.1f})",
            f"{r['relative']:.2f}",
            f"{r['node_bytes']:.0f}",
        ]
        for r in result["alone"]
    ]
    lines += report.table(
        "one process | nodes | CPU µs a node and step (range) | against the first | "
        "bytes a node and step, each a process",
        rows,
    )
    rows = []
    for r in result["ranks"]:
        low, high = sorted(r["speedup"])
        against = ""
        if "all_over_near" in r:
            a, b = sorted(r["all_over_near"])
            against = f"{a:.1f} to {b:.1f} x the time, {r['all_bytes_over_near']:.0f} x the bytes"
        rows.append(
            [
                f"{r['kind']}, {r['nodes']} nodes",
                r["ranks"],
                "yes" if r["same_bits"] else "NO",
                f"{low:.2f} to {high:.2f}",
                f"{1e3 * r['cpu']:.0f} ms",
                f"{r['bytes'] / 1e6:.2f}",
                r["cut"],
                against,
            ]
        )
    lines += report.table(
        "graph | ranks | bits of one | speed against one (two runs) | CPU of all a step | "
        "MB sent a step | links cut | an all-gather instead of a round",
        rows,
    )
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, colour, mark in (("ring", "#D55E00", "s"), ("grid", "#0072B2", "o")):
        rows = [r for r in result["alone"] if r["kind"] == kind]
        error = [
            [r["microseconds"] - r["from"] for r in rows],
            [r["to"] - r["microseconds"] for r in rows],
        ]
        left.errorbar(
            [r["nodes"] for r in rows],
            [r["microseconds"] for r in rows],
            yerr=error,
            color=colour,
            marker=mark,
            label=kind,
            capsize=3,
        )
        some = [r for r in result["ranks"] if r["kind"] == kind and r["ranks"] > 1]
        if some:
            right.plot(
                [r["ranks"] for r in some],
                [r["bytes"] / 1e6 for r in some],
                color=colour,
                marker=mark,
                label=f"{kind}, neighbours only",
            )
            right.plot(
                [r["ranks"] for r in some],
                [r["bytes"] * r["all_bytes_over_near"] / 1e6 for r in some],
                color=colour,
                marker=mark,
                linestyle="--",
                label=f"{kind}, all-gather",
            )
    left.set(xlabel="nodes", ylabel="CPU time a node and step, µs", xscale="log", ylim=(0, None))
    right.set(xlabel="ranks", ylabel="MB a step", yscale="log")
    right.set_ylim(top=1e5)  # room for the names
    for ax in (left, right):
        ax.grid(alpha=0.3)
    left.legend()
    right.legend(loc="upper left", fontsize="small", ncols=2)
    figure.savefig(path, dpi=150)


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1024, 2500, 4900, 10000])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for graphs.json, .md and .png")
    options = parser.parse_args()
    before = report.processor_time()
    found = alone(options.nodes, options.turns)
    for row in found:
        first = next(r for r in found if r["kind"] == row["kind"])
        row["relative"] = row["microseconds"] / first["microseconds"]
        print(json.dumps(row), flush=True)
    several = [r for kind in ("ring", "grid") for r in ranks(kind, max(options.nodes), 5)]
    result = {
        "machine": report.machine("cpu"),
        "others_cores": report.taken_by_others(before),
        "alone": found,
        "ranks": several,
    }
    print(page(result))
    report.keep(result, page(result), "graphs", options.out)
    if options.out is not None:
        plot(result, options.out / "graphs.png")
    return 0 if all(r["same_bits"] for r in several) else 1


if __name__ == "__main__":
    sys.exit(main())
