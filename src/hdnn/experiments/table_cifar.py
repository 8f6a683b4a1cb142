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
import time
from dataclasses import asdict, replace
from typing import Any

import torch

import hdnn
from hdnn import models
from hdnn.data import cifar10
from hdnn.data.images import ImageData
from hdnn.experiments import runner
from hdnn.experiments.runner import Job
from hdnn.training.images import ImageRecipe, ImageTraining

NAME = "table-cifar"
PAPER = {"resnet56": 93.68, "h1": 92.27, "alexnet": 91.55}
RECIPE: dict[str, Any] = {
    "batch": 250,
    "optimizer": "sgd",
    "learning_rate": 0.2,
    "warmup": 0.1,
    "weight_decay": 5e-4,
    "label_smoothing": 0.1,
    "pad": 4,
    "flip": True,
    "bf16": True,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet56": {"recipe": {}},
    "h1": {
        "star": {"network": "h1", "step": 0.5, "activation": "gelu", "norm": "after"},
        "recipe": {"clip": 1.0},
    },
    "h2": {
        "star": {
            "network": "h2",
            "channels": [64, 96, 144],
            "step": 1.0,
            "activation": "gelu",
            "norm": "inside",
        },
        "recipe": {},
    },
    "alexnet": {"recipe": {"learning_rate": 0.05, "clip": 1.0}},
}
KEPT = 5000  # training images for the choice of variants
LISTED = ("resnet56", "h1", "h2")  # AlexNet is for who asks for it


def network(job: Job) -> torch.nn.Module:
    torch.manual_seed(job["seed"])
    if "star" not in job:
        return {"resnet56": models.resnet56, "alexnet": models.alexnet}[job["network"]]()
    star = dict(job["star"])
    if "channels" in star:
        star["channels"] = tuple(star["channels"])
    return models.hdnn_star(stem_norm=True, **star)


def train(job: Job, data: ImageData, device: str) -> Job:
    start = time.perf_counter()
    if job.get("validate"):
        train_part, kept = data.holdout(KEPT)
        parts = {"images_train": train_part.images, "t_train": train_part.t}
        data = replace(data, **parts, images_test=kept.images, t_test=kept.t)
    model = network(job).to(device)
    if device.startswith("cuda"):
        model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    training = ImageTraining(model, data, ImageRecipe(**job["recipe"]))
    history = training.run(progress=False)
    return {
        "test": 100 * history.test[-1],
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": [round(100 * value, 2) for value in history.test],
        "epoch_seconds": round(history.seconds / len(history.loss), 3),
        "seconds": round(time.perf_counter() - start, 1),
    }


def jobs_for(names: list[str], seeds: int, epochs: int, validate: bool) -> list[Job]:
    found = []
    for seed in range(seeds):
        for name in names:
            like = NETWORKS[name]
            asked = asdict(ImageRecipe(**{**RECIPE, **like["recipe"]}, epochs=epochs, seed=seed))
            job: Job = {"network": name, "seed": seed, "recipe": {**asked, "rates": []}}
            if "star" in like:
                job["star"] = like["star"]
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
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(LISTED))
    parser.add_argument(
        "--validate", action="store_true", help="test on training images kept aside"
    )
    options = parser.parse_args(argv)
    data = cifar10.load().to(options.device)
    jobs = jobs_for(options.networks, options.seeds, options.epochs, options.validate)
    found = runner.run_images(jobs, lambda job: train(job, data, options.device), options)
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
        "device": runner.device_name(options.device),
        "versions": {"hdnn": hdnn.__version__, "torch": torch.__version__},
        "rows": rows,
    }
    runner.finish(result, markdown(result), f"{NAME}-{options.epochs}", options)
    return 0


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
