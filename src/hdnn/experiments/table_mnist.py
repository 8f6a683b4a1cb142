"""Table III: MNIST, a convolution, an H-DNN that mixes its 8 channels, and an output layer.

0, 2, 4, 6 and 8 layers of MS1, H1 and, beside them, H2, for 40 epochs each: Adam, minibatches of
100, a rate that shrinks each epoch. "paper" is the paper's recipe, weights from N(0, 1); "ours"
moves each image by up to one pixel and lets the weights decay less, for H1 and H2 starts from
smaller weights with a lower rate, and without hidden layers has a bounded loss. Last, "conv": K is
a 3x3 convolution in two units of 4 layers with pooling between them. Accuracies are those after the
last epoch, never the best ones. An interrupted run continues where it stopped.

    hdnn reproduce table-mnist
    python -m hdnn.experiments.table_mnist --device cuda --minutes 9
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

import torch

from hdnn import engine, models
from hdnn.data import mnist
from hdnn.data.images import ImageData
from hdnn.experiments import runner
from hdnn.experiments.cells import reached, spread
from hdnn.experiments.runner import Job
from hdnn.training.images import ImageRecipe, ImageTraining
from hdnn.training.images import recipes as image_recipes

NAME = "table-mnist"
PAPER = {
    ("none", 0): (93.51, 92.64),
    ("ms1", 2): (99.20, 97.95),
    ("ms1", 4): (99.11, 98.23),
    ("ms1", 6): (99.58, 98.10),
    ("ms1", 8): (99.80, 98.26),
    ("h1", 2): (99.00, 98.04),
    ("h1", 4): (99.32, 98.28),
    ("h1", 6): (99.41, 98.37),
    ("h1", 8): (99.39, 98.38),
}
ROWS = [*PAPER, *(("h2", layers) for layers in (2, 4, 6, 8))]
LEAST = 99.4  # the accuracy that K as a convolution should reach
RECIPES = ("paper", "ours")


def network(job: Job) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The model of a job, and the parts of it that are to be smooth."""
    torch.manual_seed(job["seed"])
    kind = job["network"]
    if kind == "conv":
        return models.mnist_conv("h1", norm="after"), ()
    if kind == "none":
        return models.mnist_net(None, 0), ()
    model = models.mnist_net(kind, job["layers"], init=job["init"])
    return model, () if model.net is None else (model.net,)


def training(job: Job, data: ImageData, device: str) -> ImageTraining:
    model, smooth = network(job)
    return ImageTraining(model.to(device), data, ImageRecipe(**job["recipe"]), smooth=smooth)


def result_of(_: Job, one: ImageTraining) -> Job:
    return {"train": 100 * one.accuracy(one.data.images_train, one.data.t_train)}


def jobs_for(seeds: int, epochs: int, by: list[str]) -> list[Job]:
    found: list[Job] = []
    for name in by:
        for kind, layers in ROWS:
            init = image_recipes.MNIST[name][kind].get("init")
            job: Job = {"by": name, "network": kind, "layers": layers, "init": init}
            for seed in range(seeds):
                recipe = image_recipes.mnist(kind, epochs, seed, by=name)
                found.append({**job, "seed": seed, "recipe": recipe.to_dict()})
    conv: Job = {"by": "ours", "network": "conv", "layers": 8}
    for seed in range(seeds):
        recipe = ImageRecipe(**image_recipes.MNIST_CONV, epochs=epochs, seed=seed)
        found.append({**conv, "seed": seed, "recipe": recipe.to_dict()})
    return found


def markdown(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        mark = "**" if row["reached"] else ""
        paper = ["", ""] if row["paper"] is None else [f" [{p:g}]" for p in row["paper"]]
        rows.append(
            f"{row['by']} | {row['network']} | {row['layers']} | {row['parameters']} | "
            f"{spread(row['train'])}{paper[0]} | {mark}{spread(row['test'])}{mark}{paper[1]}"
        )
    lines = [
        "# Table III: MNIST",
        "",
        f"`{result['command']}`, {result['seeds']} seeds, {result['epochs']} epochs, last epoch;",
        f"{result['device']}. Mean ± standard deviation of the accuracy in %,",
        "the paper's in brackets; bold where the mean of the test accuracy reaches it.",
        "",
        *runner.table("recipe | network | layers | parameters | train | test", rows),
    ]
    return "\n".join(lines) + "\n"


def table(options: argparse.Namespace) -> dict[str, Any] | None:
    data = mnist.load().to(options.device)
    jobs = jobs_for(options.seeds, options.epochs, options.recipes)
    make = partial(training, data=data, device=options.device)
    with engine.use(precision="tf32"):
        found = runner.run_images(jobs, make, result_of, options, together=options.seeds)
    if found is None:
        return None
    rows = []
    for (by, kind, layers), some in runner.grouped(found, "by", "network", "layers").items():
        paper = PAPER.get(("h1" if kind == "h2" else kind, layers))  # the paper has no H2
        row = {"by": by, "network": kind, "layers": layers, "parameters": some[0]["parameters"]}
        row |= {"paper": paper, **runner.summaries(some)}
        row["reached"] = reached(row["test"]["mean"], paper[1] if paper else LEAST)
        rows.append(row)
    device = runner.devices(one for _, one in found)
    return {"seeds": options.seeds, "epochs": options.epochs, "device": device, "rows": rows}


def main(argv: list[str] | None = None) -> int:
    parser = runner.image_arguments(__doc__, NAME, seeds=5)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    return parser.run(argv, table, markdown, "seeds", "epochs", "recipes")


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
