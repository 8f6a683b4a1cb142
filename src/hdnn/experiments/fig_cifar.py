"""Extreme singular values of dy_N/dy_j in the trained networks of the CIFAR-10 table.

y_0 .. y_N are the states of one Hamiltonian unit, or of the blocks of one stage of ResNet-56 that
keep the shape of their image; all is in evaluation. It takes the weights that `hdnn reproduce
table-cifar` has written. Results are kept, and an interrupted run continues where it stopped.

    hdnn reproduce table-cifar
    hdnn reproduce fig-cifar
    hdnn reproduce fig-cifar -- --images 4 --device cuda
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdnn.analysis import Extremes, chain_extremes, copies, unit_extremes
from hdnn.base.files import finite
from hdnn.data import cifar10
from hdnn.errors import DataError, OptionError, require
from hdnn.experiments import runner
from hdnn.experiments.runner import Job
from hdnn.experiments.table_cifar import TITLES, load_weights
from hdnn.models import ResNet
from hdnn.networks import HamiltonianUnit
from hdnn.plotting import STYLES

NAME = "fig-cifar"
NETWORKS = {name: TITLES[name] for name in ("h1", "h2", "resnet56")}
KEYS = ("largest", "smallest")
STEPS = 32  # of Lanczos
HEAD = "network | stage | N | entries | norm >= 1 promised | norm, least over j | "
HEAD += "largest, j = 0 | smallest, j = 0 | product | within"


Stage = list[Any]  # one Hamiltonian unit, or blocks of a ResNet between two that have a stride


def stages(model: Any) -> list[Stage]:
    """The parts of a network in which all states have one shape."""
    if not isinstance(model, ResNet):
        return [[unit] for unit in model.units]
    found: list[Stage] = [[]]
    for block in model.blocks:
        if block.added:
            found.append([])  # and without this block, which has a stride
        else:
            found[-1].append(block)
    return found


def depth(stage: Stage) -> int:
    """N, the number of layers or blocks."""
    return stage[0].layers if isinstance(stage[0], HamiltonianUnit) else len(stage)


def entering(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The states that enter each stage, from images x."""
    firsts = [stage[0] for stage in stages(model)]
    return [y for _, y in copies.entering(model, firsts, x)]


def extremes(stage: Stage, y: Tensor, j: int, steps: int) -> Extremes:
    """The extreme singular values of dy_N/dy_j, from the states y that enter the stage."""
    if isinstance(stage[0], HamiltonianUnit):
        return unit_extremes(stage[0], y, layers=[j], steps=steps)
    with torch.no_grad():
        for block in stage[:j]:
            y = block(y)
    return chain_extremes(stage[j:], y, layers=[0], steps=steps)


class Work:
    """The networks with their images on one device: called with a job, it is done."""

    def __init__(self, models: dict[str, Any], x: Tensor) -> None:
        self.models = {name: model.to(x) for name, model in models.items()}
        self.y = {name: entering(model, x) for name, model in self.models.items()}

    def __call__(self, job: Job) -> Job:
        start = time.perf_counter()
        k, name = job["stage"] - 1, job["network"]
        found = extremes(stages(self.models[name])[k], self.y[name][k], job["j"], job["steps"])
        values = {
            key: value[0].tolist() for key, value in found._asdict().items() if key != "layers"
        }
        return {**finite(values), "seconds": round(time.perf_counter() - start, 2)}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What is known of each stage beforehand."""
        found = []
        for k, (stage, y) in enumerate(zip(stages(self.models[name]), self.y[name], strict=True)):
            first = stage[0]
            row = {"network": name, "stage": k + 1, "layers": depth(stage)}
            row["entries"] = y[0].numel()
            if isinstance(first, HamiltonianUnit):
                promise = first.guarantee()
                row |= {"promised": promise.holds, "why": promise.why, "zeros": 0.0}
            else:
                with torch.no_grad():
                    for block in stage:
                        y = block(y)
                why = "no theorem is known for blocks with ReLU"
                row |= {"promised": False, "why": why, "zeros": float((y == 0).double().mean())}
            found.append(row)
        return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """For each stage the largest and the smallest value against j, on a log scale."""
    Figure = require("matplotlib.figure", extra="plot").Figure
    count = max(row["stage"] for row in rows)
    figure = Figure(figsize=(4.2 * count, 4.8), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    positive = [v for row in rows for key in KEYS for each in row[key] for v in each if v > 0]
    floor = min(positive) / 10  # where zeros are drawn
    for row in rows:
        for key in KEYS:
            _curve(axes[row["stage"] - 1], row, key, floor)
    for k, ax in enumerate(axes):
        ax.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        sizes = [f"{row['entries']:,}" for row in rows if row["stage"] == k + 1]
        ax.set_title(f"Stage {k + 1}: {' / '.join(sizes)} entries", fontsize="medium")
        ax.set(yscale="log", xlabel="layer or block $j$")
        ax.set_ylim(bottom=floor)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3)
    axes[0].set_ylabel(r"singular values of $\partial y_N / \partial y_j$")
    lines, names = axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names) // 2, frameon=False)
    sure = [name for name, text in promises(rows).items() if text.startswith("norm >= 1")]
    title = "Promised: " + (f"largest $\\geq 1$ for {', '.join(sure)}" if sure else "nothing")
    figure.suptitle(title + "; for the others nothing" * (0 < len(sure) < len(promises(rows))))
    runner.save_figure(figure, path)


def _curve(ax: Any, row: dict[str, Any], key: str, floor: float) -> None:
    """The mean over the images, and their range."""
    style = STYLES[list(NETWORKS).index(row["network"])]
    some = [[max(value, floor) for value in each] for each in row[key]]
    mean = [math.exp(math.fsum(map(math.log, each)) / len(each)) for each in some]
    zero = not any(map(any, row[key]))
    name = f"{NETWORKS[row['network']]}, {key}" + " (0, at the edge)" * zero
    low, high = zip(*((min(each), max(each)) for each in some), strict=True)
    ax.fill_between(range(len(some)), low, high, color=style["color"], alpha=0.2, linewidth=0)
    ax.plot(
        mean,
        color=style["color"],
        linestyle="" if zero else ("-" if key == "largest" else "--"),
        marker=style["marker"],
        markerfacecolor=style["color"] if key == "largest" else "white",
        markersize=5,
        clip_on=False,
        zorder=3,
        label=name,
    )


def promises(rows: list[dict[str, Any]]) -> dict[str, str]:
    """What the theorem says of each network."""
    found: dict[str, str] = {}
    for row in rows:
        what = "norm >= 1 is promised" if row["promised"] else "nothing is promised"
        found.setdefault(NETWORKS[row["network"]], f"{what}: {row['why']}")
    return found


def markdown(result: dict[str, Any]) -> str:
    rows = [
        f"{NETWORKS[row['network']]} | {row['stage']} | {row['layers']} | {row['entries']:,} | "
        f"{'yes' if row['promised'] else 'no'} | {min(map(min, row['largest'])):.4g} | "
        f"{_span(row['largest'][0])} | {_span(row['smallest'][0])} | "
        f"{_product(row)} | {_percent(row['missed'])}"
        for row in result["rows"]
    ]
    lines = [
        "# Singular values of dy_N/dy_j in trained networks (CIFAR-10)",
        "",
        f"`{result['command']}`: the weights of `hdnn reproduce table-cifar` after",
        f"{result['epochs']} epochs, the first {result['images']} test images of",
        f"{result['data']}; {result['device']}, {result['dtype']},",
        f"{result['seconds']:.0f} seconds in all.{runner.about_images(result['remark'])}",
        "",
        f"![Largest and smallest singular values against j]({NAME}.png)",
        "",
        "y_0 .. y_N are the states of a Hamiltonian unit, or of the blocks of one ResNet",
        "stage that keep the shape of the image. All networks are in evaluation. What the",
        "theorem says of the largest value, norm(dy_N/dy_j):",
        "",
        *(f"- {name}: {text}." for name, text in promises(result["rows"]).items()),
        "",
        "H2 is symplectic: its smallest value is one over its largest. Here they are",
        "found apart; `product` is the largest |smallest x largest - 1| over j.",
        "",
        *runner.table(HEAD, rows),
        "",
        "By Lanczos with products only. The largest is a lower bound, the smallest an",
        "upper bound; `within` is how far the true one can be beyond, with probability",
        f"0.999 for any matrix. Residuals are at most {result['error']:.1e} of the value.",
        "The smallest value of H1 and H2 is one over the largest of the inverse.",
    ]
    for row in result["rows"]:
        if row["zeros"]:
            lines += [
                "",
                f"{NETWORKS[row['network']]}, stage {row['stage']}: "
                f"{100 * row['zeros']:.0f}% of the entries of y_N are cut off by ReLU. "
                "Their derivative is exactly 0, and the smallest value with it.",
            ]
    return "\n".join(lines) + "\n"


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} to {high}"


def _product(row: dict[str, Any]) -> str:
    return f"{row['product']:.1e}" if row["network"] == "h2" else ""


def _percent(missed: float | None) -> str:
    return "" if missed is None else f"{100 * missed:.1f}%"


def figure(options: argparse.Namespace) -> dict[str, Any]:
    require("matplotlib.figure", extra="plot")
    models, digests, trained = {}, {}, set()
    for name in NETWORKS:
        file = options.weights / f"{name}.safetensors"
        models[name], job = load_weights(file)
        trained.add(job["recipe"]["epochs"])
        digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    data = cifar10.load(progress=not options.quiet)
    if options.images > len(data.t_test):
        raise DataError(f"{data.name} has {len(data.t_test)} test images, not {options.images}.")
    # In float32 the values are the same to six digits, but not by the TF32 of a GPU.
    dtype = torch.float64 if options.device.startswith("cuda") else torch.float32
    try:
        x = data.normalised(data.images_test[: options.images], dtype).to(options.device)
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"the device {options.device!r} cannot be used here.") from error
    work = Work(models, x)
    kind = str(dtype).removeprefix("torch.")
    common = {"images": options.images, "steps": options.steps, "data": data.name, "dtype": kind}
    rows = [row for name in NETWORKS for row in work.rows(name)]
    jobs: list[Job] = []
    for row in rows:
        name = row["network"]  # with other weights its jobs are others
        place = {"network": name, "stage": row["stage"], **common, "weights": digests[name]}
        jobs += [{**place, "j": j} for j in range(row["layers"])]
    path = options.runs / runner.RESULTS
    found = runner.run_all(jobs, work, path, progress=not options.quiet, what="matrices")
    each = iter(found)
    for row in rows:
        row |= joined([*islice(each, row["layers"])])
    draw(rows, options.out / f"{NAME}.png")
    return {
        **common,
        "epochs": " and ".join(map(str, sorted(trained))),
        "remark": data.remark,
        "device": runner.device_name(options.device),
        "error": max(row["error"] for row in rows),
        "seconds": round(sum(one["seconds"] for one in found), 1),
        "rows": rows,
    }


def joined(found: list[Job]) -> dict[str, Any]:
    """What was found for j = 0 .. N-1, and its worst errors."""
    pairs = [z for one in found for z in zip(one["smallest"], one["largest"], strict=True)]
    missed = [e for one in found for key in KEYS for e in one[f"{key}_missed"]]
    return {
        **{key: [one[key] for one in found] for key in KEYS},
        "product": max(abs(low * high - 1) for low, high in pairs),
        "error": max(e for one in found for key in KEYS for e in one[f"{key}_error"]),
        "missed": None if None in missed else max(missed),  # None: there is no bound
        "seconds": round(sum(one["seconds"] for one in found), 1),
    }


def main(argv: list[str] | None = None) -> int:
    parser = runner.Arguments(__doc__, NAME)
    parser.add_argument("--weights", type=Path, default=Path("runs/table-cifar"), help="a folder")
    parser.add_argument("--images", type=runner.count, default=2, help="of the test set")
    parser.add_argument("--steps", type=runner.count, default=STEPS, help="of Lanczos")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_output("the pictures", runs=NAME)
    return parser.run(argv, figure, markdown, "images", "steps")


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
