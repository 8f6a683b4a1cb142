"""What a step on a graph costs: against the number of nodes, and by several processes.

    python benchmarks/graphs.py
    python benchmarks/graphs.py --nodes 100 400 --turns 2 --out docs/results

One process first: CPU time a node and step on rings and grids, sizes taking turns. Then several
processes on this machine: are their gradients those of one, what do they send, how long do they
take? A step is forward, backward, the norm of all gradients, and Adam.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch

from hdnn.distributed import Graph, GraphNetwork, Messages, Plan, partition
from hdnn.distributed.exchange import connect, world

LAYERS = 4
BATCH = 32
PROCESSES = (1, 2, 4, 8)


def make(kind: str, nodes: int) -> Graph:
    if kind == "ring":
        return Graph.ring(nodes)
    side = math.isqrt(nodes)
    return Graph.grid(side, side)


class Steps:
    """Steps of a training, one at a time."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages
        self.net = GraphNetwork(messages.plan, messages, layers=LAYERS, step=0.2)
        self.net.reset_parameters(0)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(0)
        features = messages.plan.graph.features
        self.x = torch.randn(BATCH, features, generator=generator)[:, self.net.positions]

    def take(self) -> float:
        """One step; the norm of the gradients of all nodes."""
        self.optimizer.zero_grad()
        y = self.net(self.x)
        y.backward(y.detach() / BATCH)
        square = sum(p.grad.square().sum() for p in self.net.parameters())
        norm = float(self.messages.total(square.reshape(1)).sqrt())
        self.optimizer.step()
        return norm


def alone(sizes: list[int], turns: int) -> list[dict[str, Any]]:
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
                times[case].append((time.process_time() - start) / case[1] * 1e6)
    rows = []
    for (kind, nodes), values in times.items():
        row = {"kind": kind, "nodes": nodes, "microseconds": statistics.median(values)}
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


def several(kind: str, nodes: int, turns: int) -> list[dict[str, Any]]:
    """All numbers of processes, against one."""
    rows: list[dict[str, Any]] = []
    for count in PROCESSES:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={count}", __file__]
        command += ["--worker", kind, str(nodes), str(turns)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
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
        print(json.dumps(row), flush=True)
    return rows


def page(result: dict[str, Any]) -> str:
    about = report.on_one_line(result["machine"])
    lines = ["# Graphs: what a step costs", "", f"`{result['command']}`, {about}."]
    lines += [f"H2, {LAYERS} layers, batch {BATCH}, float32, one pair (p, q) a node. Others"]
    lines += [f"took {result['others_cores'] or 0:.1f} cores meanwhile."]
    rows = []
    for r in result["alone"]:
        spread = f"{r['microseconds']:.1f} ({r['from']:.1f} to {r['to']:.1f})"
        rows.append([r["kind"], r["nodes"], spread])
    lines += report.table("one process | nodes | CPU µs a node and step (range)", rows)
    rows = []
    for r in result["several"]:
        graph = f"{r['kind']}, {r['nodes']} nodes"
        cost = [f"{1e3 * r['cpu']:.0f} ms", f"{r['bytes'] / 1e6:.2f}"]
        rows.append([graph, r["processes"], f"{r['speedup']:.2f}", *cost, f"{r['difference']:.0e}"])
    head = "graph | processes | speed against one | CPU of all a step | MB sent a step | "
    head += "relative difference of gradients' norms"
    lines += report.table(head, rows)
    return "\n".join(lines) + "\n"


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1024, 2500, 4900, 10000])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--out", type=Path, help="folder for graphs.json and graphs.md")
    options = parser.parse_args()
    before = report.processor_time()
    result: dict[str, Any] = {"alone": alone(options.nodes, options.turns), "several": []}
    for kind in ("ring", "grid"):
        result["several"] += several(kind, max(options.nodes), options.turns)
    result["command"] = f"python benchmarks/graphs.py --turns {options.turns}"
    result["machine"] = report.machine("cpu")
    result["others_cores"] = report.taken_by_others(before)
    print(page(result))
    report.keep(result, page(result), "graphs", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
