"""Table II by eight processes on a ring: the same bits as one process, and no other connections.

    python benchmarks/ring.py
    python benchmarks/ring.py --epochs 5 --cells 1 --out docs/results

Each cell of the table's masked column is trained three times from the same weights: by eight
processes over gloo, by one process that owns all nodes, and as one masked network by
`hdnn.training.fit`. The weights of the first two must be equal bit for bit. While the eight are at
work, their TCP connections are read from /proc: there may be those to the two neighbours on the
ring, and one to the store.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import report
import torch

import hdnn
from hdnn.data import planar
from hdnn.distributed import Config, launch
from hdnn.distributed.graph.file import graph_of
from hdnn.distributed.training import run
from hdnn.experiments import table_distributed
from hdnn.training import fit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import audit

RING = [[i, (i + 1) % 8] for i in range(8)]
GRAPH = {"nodes": 8, "edges": RING + [[i, (i + 2) % 8] for i in range(8)], "R": RING}


def by_processes(config: Config, folder: Path) -> dict[str, Any]:
    """Metrics of eight processes, and all connections that they were seen to have."""
    file = folder / "asked.json"
    file.write_text(json.dumps(asdict(config)))
    links: set[tuple[int, int]] = set()
    strangers = 0
    done = threading.Event()

    def watch(processes: list[subprocess.Popen[str]]) -> None:
        def look() -> None:
            nonlocal strangers
            while not done.wait(0.5):
                try:
                    seen, others = audit.linked([process.pid for process in processes])
                except OSError:  # one of them has ended
                    continue
                links.update(seen)
                strangers = max(strangers, *(len(ends) for ends in others))

        threading.Thread(target=look, daemon=True).start()

    command = [sys.executable, "-m", "hdnn.distributed.worker", str(file)]
    command += ["--out", str(folder / "eight")]
    start = time.perf_counter()
    ended = launch(8, command, started=watch)
    done.set()
    if ended.code:
        raise SystemExit(f"the eight processes failed: {ended.fault}")
    metrics = json.loads(ended.output.splitlines()[-1])
    talked = {(min(a, b), max(a, b)) for a, b, *_ in metrics["traffic"]}
    metrics |= {"links": sorted(links), "talked": sorted(talked), "other_connections": strangers}
    return metrics | {"wall": time.perf_counter() - start}


def masked(data: str, layers: int, options: dict[str, Any]) -> float:
    """The accuracy of one masked network."""
    found = planar.load(data, seed=0)
    model = table_distributed.network("masked", layers, 0)
    fit(model, found.x_train, found.t_train, progress=False, **options)
    return (model.predict(found.x_test) == found.t_test).double().mean().item()


def cell(data: str, layers: int, epochs: int) -> dict[str, Any]:
    options = {**table_distributed.OPTIONS, "epochs": epochs}
    config = Config(graph=GRAPH, data=data, layers=layers, options=options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        eight = by_processes(config, folder)
        one = run.train(config, graph_of(GRAPH), folder=folder / "one")
        models = [hdnn.load(folder / who / "model.safetensors") for who in ("eight", "one")]
    first, second = (model.state_dict() for model in models)
    ring = sorted((min(edge), max(edge)) for edge in RING)
    return {
        "data": data,
        "layers": layers,
        "same_bits": all(torch.equal(first[k], second[k]) for k in first),
        "eight": 100 * eight["test_accuracy"],
        "one": 100 * one["test_accuracy"],
        "masked": 100 * masked(data, layers, options),
        "paper": table_distributed.PAPER[data, layers][0],
        "messages": eight["messages"],
        "megabytes": eight["bytes"] / 1e6,
        "only_neighbours": [tuple(p) for p in eight["links"]] == ring == eight["talked"],
        "other_connections_each": eight["other_connections"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--cells", type=int, default=6, help="of the table, from its first")
    parser.add_argument("--out", type=Path, help="folder for ring.json and ring.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for data, layers in [*table_distributed.PAPER][: options.cells]:
        rows.append(cell(data, layers, options.epochs))
        print(json.dumps(rows[-1]), flush=True)
    about = report.on_one_line(report.machine("cpu"))
    head = "cell | eight processes | one process | same bits | one masked network | paper | "
    head += "messages | MB | connected to"
    table = report.table(
        head,
        [
            [
                f"{r['data'].replace('_', ' ')}, {r['layers']}",
                *(f"{r[k]:.2f}" for k in ("eight", "one")),
                "yes" if r["same_bits"] else "NO",
                *(f"{r[k]:.2f}" for k in ("masked", "paper")),
                r["messages"],
                f"{r['megabytes']:.0f}",
                f"{'ring neighbours' if r['only_neighbours'] else 'OTHERS'} and "
                f"{r['other_connections_each']} other (the store)",
            ]
            for r in rows
        ],
    )
    page = ["# Table II by eight processes", "", f"`python benchmarks/ring.py`, {about}.", ""]
    page += [f"Seed 0, {options.epochs} epochs, test accuracy in %. In float32 a training is"]
    page += ["chaotic: the masked network, whose sums have another order, ends elsewhere."]
    text = "\n".join([*page, *table]) + "\n"
    print(text)
    report.keep(rows, text, "ring", options.out)
    return 0 if all(r["same_bits"] and r["only_neighbours"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
