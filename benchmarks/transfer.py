"""A value is carried over 50 hops of a graph: layers of hdnn against GCN, A-DGN and SWAN.

    python benchmarks/transfer.py --out docs/results
    python benchmarks/transfer.py --quick                              # does it run?

The task is "graph transfer" of the literature on over-squashing (Di Giovanni et al. 2023; Gravina
et al., SWAN, AAAI 2025, whose data in github.com/gravins/SWAN were read for the details). Each node
has one feature: the source 1, the target 0, all others uniform in [0, 0.5). Wanted are 0 at the
source, 1 at the target and the own feature elsewhere; the error is the mean square over all nodes.
Lines, rings and crossed rings as there, with as many layers as hops; but a line of 50 hops has 51
nodes here (50 and so 49 hops there), no edge comes twice, and encoder and decoder, the same for all
models, have a hidden layer, where theirs are linear. The states of nodes have the same width in all
models. Everyone has the same optimiser, steps, graphs and number of trials on a seed of its own;
the best setting is then trained with five other seeds. What is tried is not equally well known: for
A-DGN and SWAN it lies around what is published, and for hdnn, of which nothing is, it was found by
some 150 trainings with seeds that are not among the five (for A-DGN by some twenty).

The target need not be told from afar: it is the one node with a feature of exactly 0, and in lines
and crossed rings also one of two with fewer neighbours. So there is a network without edges as
well, and a second task, "carried": the source has a value in [0.5, 1), which the target has to say.
The share explained is 1 - error / variance of that value; below 0 is worse than to say the mean.

Trainings that are done are kept beside the result, and are not repeated after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import report
import torch
from rivals import say
from torch import Tensor, nn
from torch.nn import functional as F
from transfer_models import Network

SIZES: dict[str, dict[str, Any]] = {
    "full": {"hops": 50, "d": 32, "batch": 8, "trials": 8, "search": 200, "steps": 300}
    | {"seeds": 5, "deep": 500, "deep_steps": 200, "ways": ("stored", "reversible")},
    "quick": {"hops": 4, "d": 8, "batch": 2, "trials": 1, "search": 2, "steps": 2}
    | {"seeds": 2, "deep": 8, "deep_steps": 2, "ways": ("reversible",)},
}
GRAPHS = ("line", "ring", "crossed ring")
NAMES = {"none": "no edges", "gcn": "GCN", "adgn": "A-DGN", "swan": "SWAN", "hdnn": "hdnn"}
CLIP, PARTS = 1.0, {"search": 11, "test": 12}  # the seeds of graphs for choosing and for judging

# "slow" is the rate of the layers over that of encoder and decoder.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "none": [{"rate": rate, "slow": 1.0} for rate in (1e-3, 3e-3, 1e-2)],
    "gcn": [
        {"share": share, "rate": rate, "slow": slow}
        for share in (True, False)
        for rate, slow in ((1e-2, 0.1), (3e-3, 1.0), (1e-3, 1.0), (1e-2, 0.005))
    ],
    "adgn": [
        {"conv": "sum", "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"conv": "sum", "h": 0.1, "share": True, "rate": 1e-2, "slow": 0.1},
        {"conv": "sum", "h": 0.5, "share": True, "rate": 3e-3, "slow": 1.0},
        {"conv": "sum", "h": 0.1, "share": False, "rate": 1e-2, "slow": 0.1},
        {"conv": "gcn", "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"conv": "gcn", "h": 0.5, "share": False, "rate": 1e-2, "slow": 0.1},
        {"conv": "sum", "h": 0.2, "share": True, "rate": 1e-2, "slow": 0.1},
        {"conv": "sum", "h": 0.1, "share": True, "rate": 2e-2, "slow": 0.1},
    ],
    "swan": [
        {"bounded": False, "beta": 1.0, "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"bounded": False, "beta": 0.1, "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"bounded": False, "beta": 1.0, "h": 0.5, "share": True, "rate": 3e-3, "slow": 1.0},
        {"bounded": False, "beta": 1.0, "h": 0.1, "share": False, "rate": 1e-2, "slow": 0.1},
        {"bounded": True, "beta": 0.1, "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"bounded": True, "beta": 1.0, "h": 0.1, "share": True, "rate": 1e-2, "slow": 0.1},
        {"bounded": False, "beta": 1.0, "h": 0.1, "share": True, "rate": 1e-2, "slow": 0.1},
        {"bounded": False, "beta": 1.0, "h": 0.2, "share": True, "rate": 1e-2, "slow": 1.0},
    ],
    "hdnn": [
        {"kind": "leapfrog", "conv": "sum", "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"kind": "leapfrog", "conv": "gcn", "h": 0.5, "share": False, "rate": 1e-2, "slow": 0.1},
        {"kind": "coupling", "conv": "sum", "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"kind": "energy", "h": 0.1, "share": True, "rate": 1e-2, "slow": 1.0},
        {"kind": "wave", "conv": "sum", "h": 1.0, "share": False, "rate": 1e-2, "slow": 0.005},
        {"kind": "wave", "conv": "mean", "h": 1.0, "share": False, "rate": 1e-2, "slow": 0.005},
        {"kind": "wave", "conv": "sum", "h": 1.0, "share": False, "rate": 1e-2, "slow": 0.002},
        {"kind": "leapfrog", "conv": "sum", "h": 1.0, "share": False, "rate": 1e-2, "slow": 0.005},
    ],
}

DEEP = {model: settings[4 if model == "hdnn" else 0] for model, settings in SETTINGS.items()}


# The task


def graph_of(kind: str, hops: int) -> tuple[Tensor, int, int]:
    """Edges both ways (2, E), the number of nodes, and the target; node 0 is the source."""
    if kind == "line":
        start = torch.arange(hops)
        pairs, nodes = torch.stack([start, start + 1]), hops + 1
    else:
        nodes = 2 * hops
        start = torch.arange(nodes)
        pairs = torch.stack([start, (start + 1) % nodes])
    if kind == "crossed ring":  # i and its two neighbours' mirror images on the other side
        i = torch.arange(1, hops)
        further, nearer = torch.stack([i, nodes - 1 - i]), torch.stack([i, nodes + 1 - i])[:, 1:]
        pairs = torch.cat([pairs, further, nearer], 1)
    return torch.cat([pairs, pairs.flip(0)], 1).unique(dim=1), nodes, hops


def batch_of(
    nodes: int, target: int, count: int, generator: torch.Generator, carried: bool = False
) -> tuple[Tensor, Tensor]:
    """Features and wanted values of all nodes of some graphs, (count * nodes, 1) each."""
    x = 0.5 * torch.rand(count, nodes, generator=generator)
    value = 0.5 + 0.5 * torch.rand(count, generator=generator) if carried else torch.ones(count)
    wanted = x.clone()
    x[:, 0], x[:, target] = value, 0.0
    wanted[:, 0], wanted[:, target] = 0.0, value
    return x.view(-1, 1), wanted.view(-1, 1)


def union(edges: Tensor, nodes: int, count: int) -> Tensor:
    """The edges of several copies of a graph as one graph."""
    return torch.cat([edges + k * nodes for k in range(count)], 1)


# Training


def network(
    model: str, graph: str, setting: dict[str, Any], d: int, hops: int, **o: Any
) -> Network:
    options = {"kind": model} | {k: v for k, v in setting.items() if k not in ("rate", "slow")}
    degree = 4.0 if graph == "crossed ring" else 2.0
    return Network(options.pop("kind"), d, hops, degree=degree, **options, **o)


def trained(
    model: str, graph: str, setting: dict[str, Any], seed: int, steps: int, sizes: dict[str, Any],
    *, hops: int, count: int, part: str, carried: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Errors on new graphs after a training."""
    torch.manual_seed(seed)
    edges, nodes, target = graph_of(graph, hops)
    edges = union(edges, nodes, count)
    net = network(model, graph, setting, sizes["d"], hops, **options)
    ends = [*net.encoder.parameters(), *net.decoder.parameters()]
    rates = [setting["rate"], setting["rate"] * setting["slow"]]
    groups = [{"params": ends}, {"params": [*net.layers.parameters()]}]
    optimiser = torch.optim.Adam(groups, lr=setting["rate"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, rates, total_steps=max(steps, 3), pct_start=0.3 if steps > 20 else 0.5
    )
    generator, start = torch.Generator().manual_seed(1000 + seed), time.perf_counter()
    for _ in range(steps):
        x, wanted = batch_of(nodes, target, count, generator, carried)
        loss = F.mse_loss(net(x, edges), wanted)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimiser.step()
        schedule.step()
    seconds = time.perf_counter() - start
    new, errors, values = torch.Generator().manual_seed(PARTS[part]), [], []
    with torch.no_grad():
        for _ in range(max(1, 64 // count)):
            x, wanted = batch_of(nodes, target, count, new, carried)
            errors.append((net(x, edges) - wanted).square().view(count, nodes))
            values.append(wanted.view(count, nodes)[:, target])
    error = torch.cat(errors).nan_to_num(float("inf"))
    at_target = float(error[:, target].mean())
    row = {"mse": float(error.mean()), "target": at_target, "seconds": seconds}
    if carried:
        row["explained"] = 1 - at_target / float(torch.cat(values).var())
    return row | {"parameters": sum(p.numel() for p in net.parameters())}


class Kept:
    """Rows that were found already, in a file if there is one."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.rows = file, {}
        if file is not None and file.exists():
            for line in file.read_text().splitlines():
                key, row = json.loads(line)
                self.rows[key] = row

    def row(self, about: dict[str, Any], find: Any) -> dict[str, Any]:
        key = json.dumps(about)
        if key not in self.rows:
            self.rows[key] = find()
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with self.file.open("a") as file:
                    file.write(json.dumps([key, self.rows[key]]) + "\n")
            words = [f"{k} {v:.3g}" if isinstance(v, float) else str(v) for k, v in
                     (about | self.rows[key]).items()]  # fmt: skip
            say(", ".join(words))
        return about | self.rows[key]


def run(sizes: dict[str, Any], kept: Kept) -> dict[str, Any]:
    tried, rows, carried, best = [], [], [], {}
    common = {"hops": sizes["hops"], "count": sizes["batch"]}
    for graph in GRAPHS:
        for model, settings in SETTINGS.items():
            found = []
            for setting in settings[: sizes["trials"]]:
                about = {"graph": graph, "model": model, "seed": 0, "setting": setting}
                about["steps"] = sizes["search"]
                found.append(kept.row(about, lambda m=model, g=graph, s=setting: trained(
                    m, g, s, 0, sizes["search"], sizes, part="search", **common)))  # fmt: skip
            best[graph, model] = min(found, key=lambda row: row["mse"])["setting"]
            tried += found
    tasks = [(graph, model, False) for graph in GRAPHS for model in SETTINGS]
    tasks += [("ring", model, True) for model in SETTINGS if model != "gcn"]
    for graph, model, carries in tasks:
        setting = best[graph, model]
        for seed in range(1, 1 + sizes["seeds"]):
            about = {"graph": graph, "model": model, "seed": seed, "setting": setting}
            about |= {"steps": sizes["steps"], "carried": carries}
            row = kept.row(about, lambda m=model, g=graph, s=setting, k=seed, c=carries: trained(
                m, g, s, k, sizes["steps"], sizes, part="test", carried=c, **common))  # fmt: skip
            (carried if carries else rows).append(row)
    return {"tried": tried, "rows": rows, "carried": carried} | deep(sizes, kept)


# Ten times as many hops


def deep_network(depth: int, sizes: dict[str, Any], model: str = "hdnn", **o: Any) -> Network:
    torch.manual_seed(0)
    return network(model, "line", DEEP[model], sizes["d"], depth, **o)


def deep_step(net: Network, sizes: dict[str, Any], count: int) -> Tensor:
    """A forward and backward pass on lines of many hops; the features with their gradients."""
    edges, nodes, target = graph_of("line", sizes["deep"])
    x, wanted = batch_of(nodes, target, count, torch.Generator().manual_seed(0))
    x.requires_grad_()
    F.mse_loss(net(x, union(edges, nodes, count)), wanted).backward()
    return x


def saved(net: Network, sizes: dict[str, Any]) -> float:
    """MiB that autograd keeps for the backward pass beside weights."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    edges, nodes, target = graph_of("line", sizes["deep"])
    x, _ = batch_of(nodes, target, sizes["batch"], torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        held = net(x, union(edges, nodes, sizes["batch"]))  # noqa: F841, what it keeps must live
    return sum(kept.values()) / 2**20


# In a process of its own, because the peak is that of its whole life. Linux can reset it.
PEAK = """
import json, sys, warnings, torch
torch.set_num_threads(1)
import transfer
depth, how, sizes = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024

transfer.deep_step(transfer.deep_network(2, sizes, backprop=how), sizes, sizes["batch"])
net = transfer.deep_network(depth, sizes, backprop=how)
for p in net.parameters():
    p.grad = torch.zeros_like(p)
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
transfer.deep_step(net, sizes, sizes["batch"])
print(resident("VmHWM") - before)
"""


def peak(depth: int, how: str, sizes: dict[str, Any], returned: bool) -> float | None:
    """MiB that a step adds to what is resident, weights and gradients not counted; on Linux.

    `returned` makes malloc give freed tensors back to the system. By default glibc keeps them among
    small things that are still in use.
    """
    more = {"MALLOC_MMAP_THRESHOLD_": "65536"} if returned else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, str(depth), how, json.dumps(sizes)],
        capture_output=True, text=True, cwd=Path(__file__).parent, env=os.environ | more,
    )  # fmt: skip
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def reach(model: str, sizes: dict[str, Any], depth: int) -> dict[str, Any]:
    """What an untrained network lets through: d(target's output) / d(source's feature)."""
    edges, nodes, target = graph_of("line", depth)
    net = deep_network(depth, sizes, model)
    x, _ = batch_of(nodes, target, 1, torch.Generator().manual_seed(0))
    x.requires_grad_()
    (slopes,) = torch.autograd.grad(net(x, edges)[target].sum(), x)
    return {"slope": float(slopes[0].abs()), "largest": float(slopes.abs().max())}


def deep(sizes: dict[str, Any], kept: Kept) -> dict[str, Any]:
    depths, grads, rows = (sizes["hops"], sizes["deep"]), [], []
    memory = [
        kept.row({"backprop": how, "layers": depth}, lambda h=how, n=depth: {
            "saved_MiB": saved(deep_network(n, sizes, backprop=h), sizes),
            "peak_MiB": peak(n, h, sizes, False), "returned_MiB": peak(n, h, sizes, True)})
        for how in sizes["ways"]
        for depth in depths
    ]  # fmt: skip
    for how in ("stored", "reversible"):
        net = deep_network(sizes["deep"], sizes, backprop=how)
        deep_step(net, sizes, 1)
        grads.append([p.grad for p in net.layers.parameters() if p.grad is not None])
    scale = max(g.abs().max() for g in grads[0])
    off = max((a - b).abs().max() for a, b in zip(*grads, strict=True)) / scale
    ends = [float(torch.stack([g.norm() for g in part]).norm()) for part in
            (grads[0][:3], grads[0][-3:])]  # fmt: skip
    reaches = [
        {"model": model, "hops": hops} | reach(model, sizes, hops)
        for model in ("gcn", "adgn", "swan", "hdnn")
        for hops in depths
    ]
    for model in ("adgn", "hdnn"):
        setting = DEEP[model] | {"slow": DEEP[model]["slow"] * sizes["hops"] / sizes["deep"]}
        more = {"backprop": "reversible", "state": "fixed"} if model == "hdnn" else {}
        about = {"model": model, "hops": sizes["deep"], "steps": sizes["deep_steps"], "seed": 1}
        rows.append(kept.row(about, lambda m=model, s=setting, o=more: trained(
            m, "line", s, 1, sizes["deep_steps"], sizes, hops=sizes["deep"], count=1,
            part="test", **o)))  # fmt: skip
    found = {"memory": memory, "reversed_off": float(off), "ends": ends, "reach": reaches}
    return {"deep": found | {"rows": rows}}


# What was found


def spread(numbers: list[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{statistics.mean(numbers):.2e} ({low:.1e} to {high:.1e})"


def words(setting: dict[str, Any]) -> str:
    return ", ".join(f"{v}" if k == "kind" else f"{k} {v}" for k, v in setting.items())


def page(result: dict[str, Any]) -> str:
    sizes, d = result["sizes"], result["deep"]
    about = report.on_one_line(result["machine"])
    lines = [f"# A value over {sizes['hops']} hops", "", f"`{result['command']}`, {about}", ""]
    lines += [
        f"Graph transfer with {sizes['hops']} layers and states of {sizes['d']} features: mean "
        f"square error over all nodes, mean (least to most) of {sizes['seeds']} seeds after "
        f"{sizes['steps']} steps of {sizes['batch']} graphs. The settings are the best of "
        f"{sizes['trials']} (no edges: 3) with a seed of its own. To be right everywhere "
        f"and say 0 at the target costs {1 / (sizes['hops'] + 1):.1e} on the line and "
        f"{1 / (2 * sizes['hops']):.1e} on the rings. The docstring of the program says "
        "what the task is, and what it is not. Trials take "
        f"{sizes['search']} steps: what was best there need not be so after {sizes['steps']}, and "
        "where seeds scatter over a factor of ten, the ratio of two means says little.",
        "",
        "![Errors of all seeds](transfer-cpu.png)",
    ]
    table = []
    for graph in GRAPHS:
        for model in SETTINGS:
            rows = [r for r in result["rows"] if (r["graph"], r["model"]) == (graph, model)]
            at_target = statistics.mean(r["target"] for r in rows)
            table.append([graph, NAMES[model], spread([r["mse"] for r in rows]), f"{at_target:.1e}",
                          f"{rows[0]['parameters']:,}", words(rows[0]["setting"])])  # fmt: skip
    head = "graph | model | error of all nodes | at the target | parameters | setting"
    lines += report.table(head, table)
    lines += ["", "Carried: the source's value is random, and only far messages tell it (ring)."]
    table = []
    for model in SETTINGS:
        rows = [r for r in result["carried"] if r["model"] == model]
        if rows:
            share = [r["explained"] for r in rows]
            told = f"{statistics.mean(share):.2f} ({min(share):.2f} to {max(share):.2f})"
            table.append([NAMES[model], spread([r["mse"] for r in rows]), told])
    lines += report.table("model | error of all nodes | share explained at the target", table)
    deep_rows = d["rows"]
    lines += ["", f"## {sizes['deep']} hops", ""]
    lines += [
        f"Memory of a step on {sizes['batch']} lines of {sizes['deep']} hops beside weights and "
        "gradients: what autograd keeps, and the peak of what is resident. Malloc of glibc keeps "
        "freed tensors among the small objects of each layer, unless it is told to give them back.",
    ]
    table = [
        [r["backprop"], r["layers"], f"{r['saved_MiB']:.2f} MiB"]
        + ["not known here" if r[k] is None else f"{r[k]:.1f} MiB" for k in
           ("returned_MiB", "peak_MiB")]
        for r in d["memory"]
    ]  # fmt: skip
    head = "backprop | layers | kept | peak, MALLOC_MMAP_THRESHOLD_=65536 | peak, malloc as it is"
    lines += report.table(head, table)
    lines += [
        "",
        f"Gradients of {sizes['deep']} undone layers differ from those of stored states by "
        f"{d['reversed_off']:.1e} of the largest; their norms at the first and the last layer are "
        f"{d['ends'][0]:.1e} and {d['ends'][1]:.1e}. What reaches the other end of a line, before "
        "any training (the first setting of each model; the waves of hdnn):",
    ]
    table = [[NAMES[r["model"]], r["hops"], f"{r['slope']:.1e}", f"{r['largest']:.1e}"]
             for r in d["reach"]]  # fmt: skip
    head = "model | hops | d target / d source | largest d target / d node"
    lines += report.table(head, table)
    steps = deep_rows[0]["steps"]
    lines += ["", f"Trained for {steps} steps of one line, one seed (hdnn: undone, on the grid):"]
    table = [[NAMES[r["model"]], f"{r['mse']:.2e}", f"{r['target']:.1e}",
              f"{r['seconds'] / r['steps']:.2f} s"] for r in deep_rows]  # fmt: skip
    lines += report.table("model | error of all nodes | at the target | a step", table)
    lines += ["", "## All settings that were tried", ""]
    lines += [f"Error after {sizes['search']} steps, seed 0, on graphs of their own."]
    table = [[r["graph"], NAMES[r["model"]], words(r["setting"]), f"{r['mse']:.2e}"]
             for r in result["tried"]]  # fmt: skip
    return "\n".join([*lines, *report.table("graph | model | setting | error", table)]) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    colours = ("#999999", "#56B4E9", "#E69F00", "#D55E00", "#0072B2")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for ax, graph in zip(figure.subplots(1, 3, sharey=True), GRAPHS, strict=True):
        for k, (model, colour) in enumerate(zip(SETTINGS, colours, strict=True)):
            rows = [r for r in result["rows"] if (r["graph"], r["model"]) == (graph, model)]
            errors = [r["mse"] for r in rows]
            ax.semilogy([k] * len(errors), errors, "o", color=colour, alpha=0.5)
            ax.semilogy([k - 0.3, k + 0.3], [statistics.mean(errors)] * 2, color=colour, lw=2)
        ax.set_xticks(range(len(SETTINGS)), [NAMES[m] for m in SETTINGS], rotation=30)
        ax.set_title(graph)
        ax.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("mean square error, all nodes")
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="does it run? Small sizes")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the products are small
    sizes, out = SIZES["quick" if options.quick else "full"], options.out
    kept = Kept(None if out is None else out / f"transfer{'-quick' * options.quick}.jsonl")
    result = {"sizes": sizes} | run(sizes, kept)
    result["command"] = "python benchmarks/transfer.py" + " --quick" * options.quick
    result["machine"] = report.machine("cpu")
    print(page(result))
    report.keep(result, page(result), "transfer-cpu", out)
    if out is not None:
        plot(result, out / "transfer-cpu.png")
    if kept.file is not None:
        kept.file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
