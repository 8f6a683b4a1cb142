"""Table IV: CIFAR-10 by networks of less than a million parameters, and by AlexNet.

ResNet-56, H1-DNN* and H2-DNN*, all by one recipe: minibatches of 250, SGD with Nesterov momentum, a
rate that rises for a tenth of the steps and falls as a cosine, weight decay on weights only, label
smoothing, crops and flips. Accuracies are those after the last epoch. Variants are chosen on 5,000
training images kept aside (`--validate`), never on the test images. Where the images are JPEGs the
table says so. A run may be broken off at any time, and goes on where it was.

    hdnn reproduce table-cifar
    python -m hdnn.experiments.table_cifar --device cuda --epochs 40 --minutes 9
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hdnn
from hdnn import image_recipes
from hdnn.data import cifar10
from hdnn.data.images import ImageData
from hdnn.experiments import runner
from hdnn.experiments.runner import Job
from hdnn.experiments.weights import save_weights
from hdnn.image_recipes import CIFAR_NETWORKS
from hdnn.models import ImageModel
from hdnn.training.images import ImageRecipe, ImageTraining

NAME = "table-cifar"
PAPER = {"resnet56": 93.68, "h1": 92.27, "alexnet": 91.55}
KEPT = 5000  # training images for the choice of variants
LISTED = ("resnet56", "h1", "h2")  # the others are for who asks for them
TOGETHER = 3
WEIGHTS = 0  # the seed whose weights are kept, for fig-cifar


def network(job: Job) -> ImageModel:
    torch.manual_seed(job["seed"])
    return image_recipes.cifar_network(job["network"], job.get("star"))


def training(job: Job, data: ImageData, device: str) -> ImageTraining:
    part = _kept_aside(data) if job.get("validate") else data
    model = network(job).to(device)
    if device.startswith("cuda"):
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    recipe = {**job["recipe"], "rates": tuple(map(tuple, job["recipe"]["rates"]))}
    return ImageTraining(model, part, ImageRecipe(**recipe), smooth=tuple(model.units))


def result_of(job: Job, one: ImageTraining, folder: Path) -> Job:
    if job["seed"] == WEIGHTS and not job.get("validate"):
        save_weights(one.model, job, folder / f"{job['network']}.safetensors")
    return {
        "train": 100 * one.history.accuracy[-1],
        "epoch_seconds": round(one.history.seconds / len(one.history.loss), 3),
    }


def _kept_aside(data: ImageData) -> ImageData:
    """The training images in two: to train on, and to choose by."""
    rest, kept = data.holdout(KEPT)
    parts = {"images_train": rest.images, "t_train": rest.t}
    return replace(data, **parts, images_test=kept.images, t_test=kept.t)


def jobs_for(names: list[str], seeds: int, epochs: int, validate: bool) -> list[Job]:
    found = []
    for seed in range(seeds):
        for name in names:
            recipe = asdict(image_recipes.cifar(name, epochs, seed))
            recipe["rates"] = [list(pair) for pair in recipe["rates"]]
            job: Job = {"network": name, "seed": seed, "recipe": recipe}
            if "star" in CIFAR_NETWORKS[name]:
                job["star"] = CIFAR_NETWORKS[name]["star"]
            found.append({**job, **({"validate": True} if validate else {})})
    return found


def markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# Table IV: {result['data']}",
        "",
        f"`{result['command']}`, {result['seeds']} seeds,",
    ]
    lines += [f"{result['epochs']} epochs, {result['device']}. {result['remark']}"]
    lines += ["Test accuracy after the last epoch in %, mean ± standard deviation (worst to best);"]
    lines += ["the paper's are for the original images and 160 epochs.", ""]
    lines += ["| network | parameters | test | the paper's | seconds an epoch |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in result["rows"]:
        paper = "" if row["paper"] is None else f"{row['paper']:g}"
        test = row["test"]
        lines.append(
            f"| {row['network']} | {row['parameters']:,} | {test['mean']:.2f} ± {test['std']:.2f} "
            f"({test['worst']:.2f} to {test['best']:.2f}) | {paper} | {row['epoch_seconds']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = runner.image_arguments(__doc__, NAME, seeds=3)
    parser.add_argument("--networks", nargs="+", choices=list(CIFAR_NETWORKS), default=list(LISTED))
    parser.add_argument(
        "--validate", action="store_true", help="test on training images kept aside"
    )
    options = parser.parse_args(argv)
    data = cifar10.load().to(options.device)
    jobs = jobs_for(options.networks, options.seeds, options.epochs, options.validate)
    make = partial(training, data=data, device=options.device)
    measure = partial(result_of, folder=options.runs)
    found = runner.run_images(jobs, make, measure, options, together=TOGETHER)
    if found is None:
        return 0
    by_network: dict[str, list[Job]] = {}
    for job, one in found:
        by_network.setdefault(job["network"], []).append(one)
    rows = [
        {
            "network": name,
            "parameters": some[0]["parameters"],
            "paper": PAPER.get(name),
            "test": runner.summary([one["test"] for one in some]),
            "epoch_seconds": min(one["epoch_seconds"] for one in some),
            "curves": [one["curve"] for one in some],
        }
        for name, some in by_network.items()
    ]
    result = {
        "command": f"hdnn reproduce {NAME}",
        "data": data.name,
        "remark": data.remark,
        "seeds": options.seeds,
        "epochs": options.epochs,
        "device": runner.devices(one for _, one in found),
        "versions": {"hdnn": hdnn.__version__, "torch": torch.__version__},
        "rows": rows,
    }
    runner.finish(result, markdown(result), f"{NAME}-{options.epochs}", options)
    return 0


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
