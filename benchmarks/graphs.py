"""What a step on a graph costs: against the number of nodes, and by several processes.

    python benchmarks/graphs.py
    python benchmarks/graphs.py --turns 5 --out docs/results

One process first: CPU time a node and step on rings and grids, sizes taking turns. Then several
processes on this machine: are their gradients those of one, what do they send, how long do they
take? A step is forward, backward, the norm of all gradients, and Adam.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from report import command, head, say, table, text_of

from hdnn.distributed import Graph, GraphNetwork, Messages, Plan, partition
from hdnn.distributed.exchange import connect, world

LAYERS = 4
BATCH = 32
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "turns": 10,
        "nodes": (1024, 2500, 4900, 10000),
        "processes": (1, 2, 4, 8),
    },
    "quick": {"turns": 1, "nodes": (64,), "processes": (1, 2)},
}


def make(kind: str, nodes: int) -> Graph:
    if kind == "ring":
        return Graph.ring(nodes)
    side = math.isqrt(nodes)
    return Graph.grid(side, side)


class Steps:
    """Steps of a training, one at a time."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.net = GraphNetwork(
            messages.plan, messages, layers=LAYERS, step=0.2
        )
        self.net.reset_parameters(0)
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=1e-3, fused=True
        )
        generator = torch.Generator().manual_seed(0)
        features = messages.plan.graph.features
        self.x = torch.randn(BATCH, features, generator=generator)[
            :, self.net.positions
        ]

    def take(self) -> float:
        """One step; the norm of the gradients of all nodes."""
        self.optimizer.zero_grad()
        y = self.net(self.x)
        y.backward(y.detach() / BATCH)
        square = sum(p.grad.square().sum() for p in self.net.parameters())
        norm = float(self.messages.total(square.reshape(1)).sqrt())
        self.optimizer.step()
        return norm


def alone(sizes: tuple[int, ...], turns: int) -> list[dict[str, Any]]:
    """CPU time of one process, sizes and kinds taking turns."""
    cases = {}
    for kind in ("ring", "grid"):
        for nodes in sizes:
            graph = make(kind, nodes)
            plan = Plan(graph, [0] * graph.nodes)
            cases[kind, graph.nodes] = Steps(Messages(plan))
    times: dict[Any, list[float]] = {case: [] for case in cases}
    for turn in range(turns + 1):
        for case, steps in cases.items():
            start = time.process_time()
            steps.take()
            if turn:
                times[case].append(
                    (time.process_time() - start) / case[1] * 1e6
                )
    rows = []
    for (kind, nodes), values in times.items():
        row = {
            "kind": kind,
            "nodes": nodes,
            "microseconds": statistics.median(values),
        }
        rows.append({**row, "from": min(values), "to": max(values)})
    return rows


def work(kind: str, nodes: int, turns: int) -> None:
    """One of several processes."""
    rank, size = world()
    graph = make(kind, nodes)
    plan = Plan(graph, partition(graph, size), rank)
    messages = connect(plan)
    messages.agree({"graph": graph.digest()})
    steps = Steps(messages)
    norms = [steps.take()]
    sent = sum(messages.bytes.values())
    start = time.perf_counter()
    busy = time.process_time()
    norms += [steps.take() for _ in range(turns)]
    row = {
        "wall": (time.perf_counter() - start) / turns,
        "cpu": (time.process_time() - busy) / turns,
        "bytes": (sum(messages.bytes.values()) - sent) / turns,
        "norms": norms,
    }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    messages.close()


def several(kind: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """All numbers of processes, against one."""
    nodes = max(sizes["nodes"])
    rows: list[dict[str, Any]] = []
    for count in sizes["processes"]:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += [f"--nproc-per-node={count}", __file__]
        words += ["--worker", kind, str(nodes), str(sizes["turns"])]
        output = subprocess.run(
            words, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        ranks = [json.loads(line) for line in output.splitlines()]
        row: dict[str, Any] = {"kind": kind, "nodes": nodes, "processes": count}
        row["wall"] = max(rank["wall"] for rank in ranks)
        row["cpu"] = sum(rank["cpu"] for rank in ranks)
        row["bytes"] = sum(rank["bytes"] for rank in ranks)
        row["norms"] = ranks[0]["norms"]
        first = rows[0] if rows else row
        row["speedup"] = first["wall"] / row["wall"]
        pairs = zip(row["norms"], first["norms"], strict=True)
        row["difference"] = max(abs(a - b) / b for a, b in pairs)
        rows.append(row)
        say(str(row))
    return rows


def run(sizes: dict[str, Any], device: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = []
    for kind in ("ring", "grid"):
        rows += several(kind, sizes)
    return {"alone": alone(sizes["nodes"], sizes["turns"]), "several": rows}


def page(result: dict[str, Any]) -> str:
    lines = head("Graphs: what a step costs", result)
    lines += [
        "",
        f"H2, {LAYERS} layers, batch {BATCH}, float32, one pair (p, q) a node.",
    ]
    rows = []
    for r in result["alone"]:
        times = f"{r['microseconds']:.1f} ({r['from']:.1f} to {r['to']:.1f})"
        rows.append([r["kind"], r["nodes"], times])
    lines += table("one process | nodes | CPU µs a node and step (range)", rows)
    rows = []
    for r in result["several"]:
        graph = f"{r['kind']}, {r['nodes']} nodes"
        cost = [f"{1e3 * r['cpu']:.0f} ms", f"{r['bytes'] / 1e6:.2f}"]
        rows.append(
            [
                graph,
                r["processes"],
                f"{r['speedup']:.2f}",
                *cost,
                f"{r['difference']:.0e}",
            ]
        )
    names = "graph | processes | speed against one | CPU of all a step | MB sent a step | "
    names += "relative difference of gradients' norms"
    lines += table(names, rows)
    return text_of(lines)


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        torch.set_num_threads(1)
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    return command("graphs", __doc__, SIZES, run, page, devices=("cpu",))


if __name__ == "__main__":
    raise SystemExit(main())
