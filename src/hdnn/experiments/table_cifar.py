"""Table IV: CIFAR-10 by networks of less than a million parameters, and by AlexNet.

ResNet-56, H1-DNN* and H2-DNN*, all by one recipe: minibatches of 250, SGD with Nesterov momentum, a
rate that rises for a tenth of the steps and falls as a cosine, weight decay (not on
normalisations), label smoothing, crops and flips. From 100 epochs on H1-DNN* and H2-DNN* leave
layers out while training; in less it does not help. ResNet-56 is then trained without and with such
a drop, and the lead is over the better of the two. Then H1-DNN* as the paper trains it, but with
clipped gradients, and one short run of AlexNet. Accuracies are those after the last epoch. Variants
are chosen on 5,000 training images kept aside (`--validate`), never on the test images. Where the
images are JPEGs the table says so. An interrupted run continues where it stopped.
Networks whose rows a table has already are taken from it (`--recorded`) and not trained again.

    hdnn reproduce table-cifar
    hdnn reproduce table-cifar -- --finished
    hdnn reproduce table-cifar -- --epochs 160 --recorded docs/results/table-cifar-160.json
    python -m hdnn.experiments.table_cifar --device cuda --epochs 40 --minutes 9
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

from hdnn.base import tensorfile
from hdnn.base.files import as_path, write_atomically
from hdnn.data import cifar10
from hdnn.data.images import ImageData
from hdnn.errors import CheckpointError, DataError, require
from hdnn.experiments import runner
from hdnn.experiments.runner import Job
from hdnn.models import ImageModel
from hdnn.plotting import STYLES
from hdnn.training.images import ImageRecipe, ImageTraining
from hdnn.training.images import recipes as image_recipes
from hdnn.training.images.recipes import CIFAR_NETWORKS

NAME = "table-cifar"
TITLES = {
    "resnet56": "ResNet-56",
    "resnet56_drop": "ResNet-56 with a drop",
    "h1": "H1-DNN*",
    "h2": "H2-DNN*",
    "h1_paper": "H1-DNN*, the paper's recipe",
    "alexnet": "AlexNet",
}
PAPER = {"resnet56": 93.68, "h1": 92.27, "h1_paper": 92.27, "alexnet": 91.55}
RESNETS = ("resnet56", "resnet56_drop")  # the others are compared with the better of these
COMPARED = (*RESNETS, "h1", "h2")
SHORT = {"alexnet": 10}  # epochs, of one seed
KEPT = 5000  # training images for the choice of variants
TOGETHER = 3
WEIGHTS = 0  # the seed whose weights are kept, for fig-cifar


def network(job: Job) -> ImageModel:
    """The network of a job, with the weights that its training begins with."""
    torch.manual_seed(job["seed"])
    return image_recipes.cifar_network(job["network"], job.get("star"))


def save_weights(model: nn.Module, job: Job, path: str | os.PathLike[str]) -> None:
    """Write all parameters and buffers of a trained network, atomically.

    The metadata of the file has the job as JSON, so that the network can be built again.
    """
    path = as_path(path)
    tensors = {
        name: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, t in model.state_dict().items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, to_safetensors(tensors, metadata={"job": json.dumps(job)}))


def load_weights(path: str | os.PathLike[str]) -> tuple[Any, Job]:
    """The network of `save_weights`, on the CPU and in evaluation, and its job."""
    path = as_path(path)
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there: trained weights are made by `hdnn reproduce table-cifar`."
        )
    with tensorfile.opened(path) as file:
        metadata, tensors = file.metadata, file.load()
    try:
        job = json.loads(metadata["job"])
        int(job["recipe"]["epochs"])
        with torch.random.fork_rng(devices=[]):  # the network is drawn, then overwritten
            model = network(job)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is a safetensors file of another kind: its metadata has no job of "
            "`hdnn reproduce table-cifar`."
        ) from error
    wrong = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if wrong:
        raise CheckpointError(f"{path} is damaged: {wrong[0]} has entries that are not finite.")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not hold the weights of the network that its job describes "
            f"({' '.join(str(error).split())[:200]})."
        ) from error
    return model.eval().requires_grad_(False), job


def training(job: Job, data: ImageData, device: str) -> ImageTraining:
    if job.get("validate"):
        rest, kept = data.holdout(KEPT)
        parts = {"images_train": rest.images, "t_train": rest.t}
        data = replace(data, **parts, images_test=kept.images, t_test=kept.t)
    model = network(job).to(device)
    if device.startswith("cuda"):
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    recipe = {**job["recipe"], "rates": tuple(map(tuple, job["recipe"]["rates"]))}
    return ImageTraining(model, data, ImageRecipe(**recipe), smooth=tuple(model.units))


def result_of(job: Job, one: ImageTraining, folder: Path) -> Job:
    if job["network"] in COMPARED and job["seed"] == WEIGHTS and not job.get("validate"):
        save_weights(one.model, job, folder / f"{job['network']}.safetensors")
    return {
        "train": 100 * one.history.accuracy[-1],
        "epoch_seconds": round(one.history.seconds / len(one.history.loss), 3),
    }


def jobs_for(names: list[str], seeds: int, epochs: int, validate: bool) -> list[Job]:
    """The networks that are compared seed by seed, then the others one by one."""
    compared = [(name, seed) for seed in range(seeds) for name in names if name in COMPARED]
    others = [(name, seed) for name in names if name not in COMPARED for seed in range(seeds)]
    jobs = []
    for name, seed in compared + others:
        if name in SHORT and seed:
            continue
        own = min(epochs, SHORT.get(name, epochs))
        recipe = image_recipes.cifar(name, own, seed).to_dict()
        job: Job = {"network": name, "seed": seed, "recipe": recipe}
        if star := image_recipes.star(name, own):
            job["star"] = star
        if validate:
            job["validate"] = True
        jobs.append(job)
    return jobs


def networks_for(epochs: int) -> list[str]:
    """Those of the table: ResNet-56 has a drop where the others have one."""
    dropped = image_recipes.drop("h1", epochs) > 0
    return [name for name in TITLES if dropped or name != "resnet56_drop"]


def better_resnet(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of the ResNet-56, without or with a drop, whose mean is the higher one."""
    found = [row for row in rows if row["network"] in RESNETS]
    return max(found, key=lambda row: row["test"]["mean"], default=None)


def markdown(result: dict[str, Any]) -> str:
    both = len([row for row in result["rows"] if row["network"] in RESNETS]) > 1
    best, over = better_resnet(result["rows"]), "the better ResNet-56" if both else "ResNet-56"
    rows = []
    for row in result["rows"]:
        test, name = row["test"], row["network"]
        above = ""
        if best is not None and name in COMPARED and name not in RESNETS:
            above = f"{test['mean'] - best['test']['mean']:+.2f}"
        spread = f" ± {test['std']:.2f} ({test['worst']:.2f} to {test['best']:.2f})"
        accuracy = f"{test['mean']:.2f}" + (spread if test["seeds"] > 1 else "")
        paper = "" if row["paper"] is None else f"{row['paper']:g}"
        rows.append(
            f"{TITLES[name]} | {row['parameters']:,} | {row['epochs']} | {test['seeds']} | "
            f"{accuracy} | {above} | {paper}"
        )
    head = f"network | parameters | epochs | seeds | test | above {over} | the paper's"
    longest = max(row["epochs"] for row in result["rows"])
    lines = [
        f"# Table IV: {result['data']}, {longest} epochs",
        "",
        f"`{result['command']}`,",
        f"{result['device']}.{runner.about_images(result['remark'])}",
        f"Accuracy in % on {result['on']} after the last epoch, mean ± standard deviation",
        "(worst to best); the paper's are for the original images and 160 epochs.",
        "",
        *runner.table(head, rows),
    ]
    drops = [f"{TITLES[row['network']]} {row['drop']:g}" for row in result["rows"] if row["drop"]]
    if drops:
        lines += ["", f"Trained with layers left out (`drop`): {', '.join(drops)}."]
    if both and best is not None:
        name, mean = TITLES[best["network"]], best["test"]["mean"]
        lines += ["", f"The better of the two ResNet-56: {name}, {mean:.2f}%."]
    if result["picture"]:
        lines += ["", f"![Accuracy against the epoch]({result['picture']})"]
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against the epoch: the mean of the seeds, and their range."""
    Figure = require("matplotlib.figure", extra="plot").Figure
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    ax = figure.subplots()
    for row, style in zip(rows, STYLES, strict=False):
        low, mean, high = zip(
            *((min(of), sum(of) / len(of), max(of)) for of in zip(*row["curves"], strict=True)),
            strict=True,
        )
        epochs = range(1, len(mean) + 1)
        line = {name: style[name] for name in ("color", "linestyle")}
        label = f"{TITLES[row['network']]}: {mean[-1]:.2f}%"
        ax.plot(epochs, mean, **line, label=label)
        ax.fill_between(epochs, low, high, color=style["color"], alpha=0.2, linewidth=0)
    ax.set(xlabel="epoch", ylabel="accuracy in %", ylim=(60, 100))
    ax.grid(alpha=0.3)
    ax.legend(loc="lower right", frameon=False)
    runner.save_figure(figure, path)


def _chosen(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """The options that make this table from scratch, even if some rows were recorded before."""
    found = f"--epochs {options.epochs} --seeds {options.seeds}" + " --validate" * options.validate
    names = [row["network"] for row in rows]
    fewer = any(row["test"]["seeds"] < options.seeds for row in rows if row["network"] not in SHORT)
    found += " --finished" * (options.finished or fewer)
    return found + f" --networks {' '.join(names)}" * (names != networks_for(options.epochs))


def read_recorded(path: Path | None, on: str, epochs: int) -> dict[str, Any]:
    """A table that was written before, by trainings of as many epochs, tested on the same."""
    if path is None:
        return {"rows": [], "device": ""}
    table = runner.read_table(path, NAME, ("data", "remark", "device", "on", "rows"))
    fits = table["on"] == on
    for row in table["rows"]:
        fits = fits and row["epochs"] == min(epochs, SHORT.get(row["network"], epochs))
    if not fits:
        raise DataError(
            f"{path} is a table of other trainings; give one of {epochs} epochs, tested on {on}."
        )
    return table


def _row(name: str, some: list[Job]) -> dict[str, Any]:
    """What the trainings of a network gave."""
    epochs = len(some[0]["curve"])
    return {
        "network": name,
        "parameters": some[0]["parameters"],
        "drop": image_recipes.drop(name, epochs),
        "paper": PAPER.get(name),
        "epochs": epochs,
        "epoch_seconds": min(one["epoch_seconds"] for one in some),
        **runner.summaries(some),
    }


def table(options: argparse.Namespace) -> dict[str, Any] | None:
    options.networks = options.networks or networks_for(options.epochs)
    on = f"{KEPT:,} training images kept aside" if options.validate else "the test images"
    recorded = read_recorded(options.recorded, on, options.epochs)
    made = {row["network"]: row for row in recorded["rows"]}
    missing = [name for name in options.networks if name not in made]
    jobs = jobs_for(missing, options.seeds, options.epochs, options.validate)
    if options.finished and jobs:
        jobs = runner.finished(jobs, options.runs)
    devices = [{"device": device} for device in filter(None, recorded["device"].split(", "))]
    if jobs:
        data = cifar10.load().to(options.device)
        if recorded.setdefault("data", data.name) != data.name:
            raise DataError(
                f"{options.recorded} is a table of {recorded['data']}, but the images here are "
                f"{data.name}; give a table of these."
            )
        recorded["remark"] = data.remark
        make = partial(training, data=data, device=options.device)
        measure = partial(result_of, folder=options.runs)
        found = runner.run_images(jobs, make, measure, options, together=TOGETHER)
        if found is None:
            return None
        devices += [one for _, one in found]
        by_network = runner.grouped(found, "network")
        made |= {name: _row(name, some) for (name,), some in by_network.items()}
    rows = [made[name] for name in TITLES if name in made]
    picture = None
    if find_spec("matplotlib"):
        picture = f"{options.file}.png"
        draw(rows, options.out / picture)
    elif not options.quiet:
        print("without matplotlib there is no picture of the curves.", file=sys.stderr)
    return {
        "command": f"hdnn reproduce {NAME} -- {_chosen(options, rows)}",
        "data": recorded["data"],
        "remark": recorded["remark"],
        "on": on,
        "device": runner.devices(devices),
        "picture": picture,
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    parser = runner.image_arguments(__doc__, NAME, seeds=3)
    parser.add_argument("--networks", nargs="+", choices=list(CIFAR_NETWORKS))
    parser.add_argument(
        "--validate", action="store_true", help="test on training images kept aside"
    )
    parser.add_argument(
        "--finished", action="store_true", help="a table of the trainings that are done, no more"
    )
    parser.add_argument(
        "--recorded", type=Path, help="a table (JSON) whose networks are not trained again"
    )
    parser.file_of = lambda given: f"{NAME}-{given.epochs}" + "-kept-aside" * given.validate
    return parser.run(argv, table, markdown)


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
