"""Table III: MNIST, a convolution, an H-DNN that mixes its 8 channels, and an output layer.

0, 2, 4, 6 and 8 layers of MS1, H1 and, beside them, H2, for 40 epochs each: Adam, minibatches of
100, a rate that shrinks each epoch, smoothness and weight decay as the paper has them. Below them
one recipe of ours: K is a 3x3 convolution in two units of 4 layers with pooling between them, and
images are shifted a little. Accuracies are those after the last epoch, never the best ones. A run
may be broken off at any time, and goes on where it was.

    hdnn reproduce table-mnist
    python -m hdnn.experiments.table_mnist --device cuda --minutes 9
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

import torch

import hdnn
from hdnn import models
from hdnn.data import mnist
from hdnn.data.images import ImageData
from hdnn.experiments import runner
from hdnn.experiments.runner import Job
from hdnn.training.images import ImageRecipe, ImageTraining

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
BATCHES = (100, 250)  # the paper's and ours
STEP = {"ms1": 0.4, "h1": 0.5, "h2": 0.5}
# alpha of the smoothness and alpha_l of the weights.
ALPHA = {"none": (0.0, 1e-3), "ms1": (1e-3, 1e-3), "h1": (8e-3, 4e-3), "h2": (8e-3, 4e-3)}


def recipe(network: str, epochs: int, seed: int) -> ImageRecipe:
    smoothness, decay = ALPHA[network]
    return ImageRecipe(
        epochs=epochs,
        batch=BATCHES[0],
        optimizer="adam",
        learning_rate=0.04,
        decay=0.8,
        smoothness=smoothness,
        weight_decay=decay,
        seed=seed,
    )


def ours(epochs: int, seed: int) -> ImageRecipe:
    return ImageRecipe(
        epochs=epochs,
        batch=BATCHES[1],
        learning_rate=0.1,
        weight_decay=5e-4,
        label_smoothing=0.1,
        clip=1.0,
        pad=2,
        bf16=True,
        seed=seed,
    )


def network(job: Job) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """The model of a job, and the parts of it that are to be smooth."""
    torch.manual_seed(job["seed"])
    kind = job["network"]
    if kind == "ours":
        return models.mnist_conv("h1", norm="after"), ()
    model = models.mnist_net(None if kind == "none" else kind, job["layers"], step=STEP.get(kind))
    return model, () if model.net is None else (model.net,)


def train(job: Job, data: ImageData, device: str) -> Job:
    start = time.perf_counter()
    model, smooth = network(job)
    made = ImageRecipe(**job["recipe"])
    training = ImageTraining(model.to(device), data, made, smooth=smooth)
    history = training.run(progress=False)
    return {
        "test": 100 * history.test[-1],
        "train": 100 * training.accuracy(training.data.images_train, training.data.t_train),
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [round(100 * value, 2) for value in history.test],
        "seconds": round(time.perf_counter() - start, 1),
    }


def jobs_for(seeds: int, epochs: int) -> list[Job]:
    found: list[Job] = []
    for seed in range(seeds):
        for kind, layers in ROWS:
            asked = recipe(kind, epochs, seed)
            found.append({"network": kind, "layers": layers, "seed": seed, "recipe": asdict(asked)})
        asked = ours(epochs, seed)
        found.append({"network": "ours", "layers": 8, "seed": seed, "recipe": asdict(asked)})
    return [{**job, "recipe": {**job["recipe"], "rates": []}} for job in found]


def markdown(result: dict[str, Any]) -> str:
    lines = ["# Table III: MNIST", "", f"`{result['command']}`, {result['seeds']} seeds, "]
    lines[-1] += f"{result['epochs']} epochs, last epoch, {result['device']}. Mean ± standard"
    lines += ["deviation of the accuracy in %, the paper's in brackets; bold where the mean of the"]
    lines += ["test accuracy reaches it.", "", "| network | layers | parameters | train | test |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in result["rows"]:
        mark = "**" if row["reached"] else ""
        paper = ["", ""] if row["paper"] is None else [f" [{p:g}]" for p in row["paper"]]
        lines.append(
            f"| {row['network']} | {row['layers']} | {row['parameters']} | "
            f"{row['train']['mean']:.2f} ± {row['train']['std']:.2f}{paper[0]} | "
            f"{mark}{row['test']['mean']:.2f} ± {row['test']['std']:.2f}{mark}{paper[1]} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = runner.image_arguments(__doc__, NAME, seeds=5)
    options = parser.parse_args(argv)
    data = mnist.load().to(options.device)
    jobs = jobs_for(options.seeds, options.epochs)
    found = runner.run_images(jobs, lambda job: train(job, data, options.device), options)
    if found is None:
        return 0
    by_row: dict[tuple[str, int], list[Job]] = {}
    for job, one in found:
        by_row.setdefault((job["network"], job["layers"]), []).append(one)
    rows = []
    for (kind, layers), some in by_row.items():
        paper = PAPER.get((kind, layers)) or PAPER.get(("h1" if kind == "h2" else "", layers))
        test = runner.summary([one["test"] for one in some])
        least = 99.4 if paper is None else paper[1]
        rows.append(
            {
                "network": kind,
                "layers": layers,
                "parameters": some[0]["parameters"],
                "paper": paper,
                "train": runner.summary([one["train"] for one in some]),
                "test": test,
                "reached": test["mean"] >= least,
                "curves": [one["curve"] for one in some],
            }
        )
    result = {
        "command": f"hdnn reproduce {NAME}",
        "seeds": options.seeds,
        "epochs": options.epochs,
        "device": runner.device_name(options.device),
        "versions": {"hdnn": hdnn.__version__, "torch": torch.__version__},
        "rows": rows,
    }
    runner.finish(result, markdown(result), NAME, options)
    return 0


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
