"""The paper's experiments on images: Tables III and IV.

Accuracies are from the last epoch, never the best ones. Recipes were chosen on held-out training
images (`ImageData.holdout`), never on the test images.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hdnn import engine, io
from hdnn.data import load_cifar10, load_mnist
from hdnn.data.images import ImageData
from hdnn.experiments import runner
from hdnn.experiments.runner import RECIPES, Experiment, Job, Result
from hdnn.plotting import new_figure
from hdnn.plotting.curves import STYLES, finish
from hdnn.training import ImageRecipe, fit_images, recipes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def job_of(
    data: str, network: str, seed: int, epochs: int, by: str, **settings: Any
) -> Job:
    """One training, with the settings of the recipe except for these."""
    options: dict[str, Any] = {"epochs": epochs, "by": by}
    recipe = recipes.image_recipe(data, network, seed=seed, **options)
    usual = recipes.image_settings(data, network, **options)
    return {
        "data": data,
        "network": network,
        "seed": seed,
        "by": by,
        "settings": {**usual, **settings},
        "recipe": recipe.to_dict(),
    }


def train(job: Job, data: ImageData, options: Any) -> Job:
    """The result of one training; an unfinished one is continued."""
    digest = hashlib.sha256(runner.key(job).encode()).hexdigest()
    folder = options.runs / "unfinished" / digest[:16]
    place = (job["data"], job["network"])
    settings = {"seed": job["seed"], **job["settings"]}
    model = recipes.image_network(*place, **settings)
    model.to(options.device)
    recipe = ImageRecipe(**job["recipe"])
    left = options.end - time.monotonic()
    history = fit_images(
        model, data, recipe, folder=folder, resume=True, seconds=left
    )
    if len(history.loss) < recipe.epochs:
        raise KeyboardInterrupt  # the minutes are over
    if job["seed"] == 0:
        file = options.runs / f"{job['network']}.safetensors"
        io.save_tensors(file, model.state_dict(), {"job": job})
    shutil.rmtree(folder)
    scores = [100 * score for score in history.validation_score]
    return {
        "train": 100 * history.accuracy[-1],
        "test": scores[-1],
        "curve": [round(score, 2) for score in scores],
        "parameters": sum(p.numel() for p in model.parameters()),
        "epoch_seconds": round(history.seconds / recipe.epochs, 3),
        "device": runner.machine(options.device),
    }


def run_images(
    jobs: list[Job], data: ImageData, options: Any, *keys: str
) -> list[dict[str, Any]]:
    """Run all jobs; each row has the values of these keys and the accuracies of all seeds.

    It stops when the minutes are over, and can be continued later.
    """
    options.end = time.monotonic() + 60 * options.minutes
    work = partial(train, data=data, options=options)
    rows = []
    results = runner.run_jobs(jobs, work, options.runs)
    for row, group in runner.grouped(results, *keys):
        columns = {name: [each[name] for each in group] for name in group[0]}
        row |= {
            "parameters": group[0]["parameters"],
            "epochs": len(group[0]["curve"]),
            "train": runner.summary(columns["train"]),
            "test": runner.summary(columns["test"]),
            "curves": columns["curve"],
            "epoch_seconds": min(columns["epoch_seconds"]),
            "device": group[0]["device"],
        }
        rows.append(row)
    return rows


# Table III

TABLE_III: dict[Any, Any] = {  # network, layers: while training, in the test
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
OTHERS = [*(("h2", layers) for layers in (2, 4, 6, 8)), ("conv", 8)]
CONVOLUTION = 99.4  # the accuracy that K as a convolution should reach
NO_PAPER = ("none", "none")
THREE_COLUMNS = {
    "recipe": "{by}",
    "network": "{network}",
    "layers": "{layers}",
    "parameters": "{parameters}",
    "train": "{train[mean]:.2f} ± {train[std]:.2f} [{paper[0]}]",
    "test": "{mark}{test[mean]:.2f} ± {test[std]:.2f}{mark} [{paper[1]}]",
}


def jobs_three(by: str, options: Any) -> list[Job]:
    jobs = []
    for network, layers in [*TABLE_III, *OTHERS]:
        if network == "conv" and by == "paper":
            continue
        settings = {} if network in ("none", "conv") else {"layers": layers}
        for seed in range(options.seeds):
            job = job_of("mnist", network, seed, options.epochs, by, **settings)
            jobs.append({**job, "layers": layers})
    return jobs


def table_three(options: Any) -> Result:
    jobs = []
    for by in options.recipes:
        jobs += jobs_three(by, options)
    data = load_mnist().to(options.device)
    rows = []
    with engine.use(precision="tf32"):
        results = run_images(jobs, data, options, "by", "network", "layers")
    for row in results:
        network = row["network"].replace("h2", "h1")
        paper = TABLE_III.get((network, row["layers"]), NO_PAPER)
        target = CONVOLUTION if paper is NO_PAPER else paper[1]
        reached = runner.reached(row["test"]["mean"], target)
        rows.append({**row, "paper": paper, "reached": reached})
    lines = [{**row, "mark": "**" * row["reached"]} for row in rows]
    page = [
        f"`{options.command}`, {options.seeds} seeds, after {options.epochs} epochs;",
        f"{rows[0]['device']}. Each cell shows the mean ± standard deviation of the",
        "accuracy in %, and the paper's figure in brackets (for H2, that of H1); the test accuracy",
        "is bold where its mean reaches that figure, or 99.4 for the convolution.",
        "",
        *runner.markdown_table(THREE_COLUMNS, lines),
    ]
    facts = {
        "seeds": options.seeds,
        "epochs": options.epochs,
        "rows": rows,
    }
    finding = "; ".join(found_three(rows, by) for by in options.recipes)
    finding += f"; {options.seeds} seeds"
    return Result("Table III: MNIST", finding, facts, page)


def found_three(rows: list[dict[str, Any]], by: str) -> str:
    """The number of means of a recipe that are reached, in words."""
    rows = [row for row in rows if row["by"] == by]
    count = sum(row["reached"] for row in rows)
    best = max(row["test"]["mean"] for row in rows if row["network"] == "h1")
    return (
        f"with {RECIPES[by]}, {count} of {len(rows)} means reach their target, "
        f"and H1 reaches up to {best:.2f}%"
    )


# Table IV

TITLES = {
    "resnet56": "ResNet-56",
    "resnet56_drop": "ResNet-56 with a drop",
    "h1": "H1-DNN*",
    "h2": "H2-DNN*",
    "h1_paper": "H1-DNN*, the paper's recipe",
    "alexnet": "AlexNet",
}
TABLE_IV = {
    "resnet56": 93.68,
    "h1": 92.27,
    "h1_paper": 92.27,
    "alexnet": 91.55,
}
FOUR_COLUMNS = {
    "network": "{title}",
    "parameters": "{parameters:,}",
    "epochs": "{epochs}",
    "seeds": "{test[seeds]}",
    "test": "{test[mean]:.2f} ± {test[std]:.2f} ({test[worst]:.2f} to {test[best]:.2f})",
    "above ResNet-56": "{lead}",
    "the paper's": "{paper}",
}


def table_four(options: Any) -> Result:
    jobs = []
    for network in options.networks:
        if network == "resnet56_drop" and options.epochs < recipes.LONG:
            continue  # the others have no drop either
        for seed in range(options.seeds):
            job = job_of("cifar10", network, seed, options.epochs, "ours")
            jobs.append(job)
    data = load_cifar10().to(options.device)
    rows = []
    for row in run_images(jobs, data, options, "network"):
        paper = TABLE_IV.get(row["network"], "")
        rows.append({**row, "paper": paper, "title": TITLES[row["network"]]})
    suffix = f"-{options.epochs}"
    picture = runner.save_figure(draw_curves(rows), options, suffix)
    remark = f" The images are {data.remark}." if data.remark else ""
    page = [
        f"`{options.command}`, {rows[0]['device']}.{remark}",
        "Accuracy in % on the test images after the last epoch, mean ± standard deviation",
        "(worst to best); the paper's figures are for the original images and 160 epochs.",
        "",
        *runner.markdown_table(FOUR_COLUMNS, lines_four(rows)),
        "",
        f"![Accuracy against the epoch]({picture})",
    ]
    facts = {
        "file": Path(picture).stem,
        "data": data.name,
        "remark": data.remark,
        "picture": picture,
        "rows": rows,
    }
    means = [f"{row['title']} {row['test']['mean']:.2f}%" for row in rows]
    finding = f"{', '.join(means)} after {options.epochs} epochs"
    return Result(f"Table IV: {data.name}", finding, facts, page, suffix)


def lines_four(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the table; H1 and H2 are compared with the better ResNet-56."""
    means = {row["network"]: row["test"]["mean"] for row in rows}
    resnets = [mean for name, mean in means.items() if name.startswith("res")]
    lines = []
    for row in rows:
        lead = ""
        if resnets and row["network"] in ("h1", "h2"):
            lead = f"{row['test']['mean'] - max(resnets):+.2f}"
        lines.append({**row, "lead": lead})
    return lines


def draw_curves(rows: list[dict[str, Any]]) -> Any:
    """Accuracy against the epoch: the mean of the seeds, and their range."""
    ax = new_figure(6.4, 4.4).add_subplot()
    for row, style in zip(rows, STYLES, strict=False):
        curves = torch.tensor(row["curves"], dtype=torch.float64)
        epochs = range(1, curves.shape[1] + 1)
        mean = curves.mean(0).tolist()
        colour = style["color"]
        label = f"{row['title']}: {mean[-1]:.2f}%"
        line = {"color": colour, "linestyle": style["linestyle"]}
        ax.plot(epochs, mean, label=label, **line)
        low, high = curves.aminmax(dim=0)
        ax.fill_between(epochs, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.grid(alpha=0.3)
    ax.set_ylim(60, 100)
    return finish(ax, 2, xlabel="epoch", ylabel="accuracy in %").figure


COMMON = {
    "epochs": 40,
    "device": DEVICE,
    "minutes": math.inf,
}
EXPERIMENTS = {
    "table-mnist": Experiment(
        "Table III: MNIST, a convolution, an H-DNN that mixes its 8 channels, an output layer.",
        {"seeds": 5, "recipes": list(RECIPES), **COMMON},
        table_three,
    ),
    "table-cifar": Experiment(
        "Table IV: CIFAR-10 by networks of less than a million parameters, and by AlexNet.",
        {"seeds": 3, "networks": list(TITLES), **COMMON},
        table_four,
    ),
}
