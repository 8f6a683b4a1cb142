"""The paper's experiments on images: Tables III and IV, and singular values in trained networks.

Accuracies are those after the last epoch, never the best ones. Recipes were chosen on training
images that were held out (`ImageData.holdout`), never on the test images.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hdnn import engine, io
from hdnn.analysis import chain_extremes, unit_extremes
from hdnn.data import load_cifar10, load_mnist
from hdnn.data.images import ImageData
from hdnn.experiments import runner
from hdnn.experiments.runner import Experiment, Job
from hdnn.models import ResNet
from hdnn.plotting import new_figure
from hdnn.plotting.curves import STYLES, finish, level_one
from hdnn.training import ImageRecipe, fit_images, recipes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def run_images(
    jobs: list[Job], data: ImageData, options: Any
) -> list[tuple[Job, Job]]:
    """All jobs with their results; it stops when the minutes are over, to be continued later."""
    end = time.monotonic() + 60 * options.minutes

    def work(job: Job) -> Job:
        key = hashlib.sha256(repr(sorted(job.items())).encode()).hexdigest()[
            :16
        ]
        folder = options.runs / "unfinished" / key
        model = network_of(job).to(options.device)
        rates = tuple(
            (epoch, factor) for epoch, factor in job["recipe"]["rates"]
        )
        recipe = ImageRecipe(**{**job["recipe"], "rates": rates})
        left = end - time.monotonic()
        history = fit_images(
            model, data, recipe, folder=folder, resume=True, seconds=left
        )
        if len(history.loss) < recipe.epochs:
            raise KeyboardInterrupt  # the minutes are over
        if job["seed"] == 0:
            file = options.runs / f"{job['network']}.safetensors"
            io.save_tensors(file, model.state_dict(), {"job": job})
        shutil.rmtree(folder)
        return {
            "train": 100 * history.accuracy[-1],
            "test": 100 * history.validation_score[-1],
            "curve": [
                round(100 * score, 2) for score in history.validation_score
            ],
            "parameters": sum(p.numel() for p in model.parameters()),
            "epoch_seconds": round(history.seconds / recipe.epochs, 3),
            "device": runner.machine(options.device),
        }

    return runner.run_jobs(jobs, work, options.runs)


def job_of(
    data: str, network: str, seed: int, epochs: int, by: str, **settings: Any
) -> Job:
    recipe = recipes.image_recipe(
        data, network, epochs=epochs, seed=seed, by=by
    )
    settings = {
        **recipes.image_settings(data, network, epochs=epochs, by=by),
        **settings,
    }
    return {
        "data": data,
        "network": network,
        "seed": seed,
        "by": by,
        "settings": settings,
        "recipe": recipe.to_dict(),
    }


def network_of(job: Job) -> Any:
    """The network of a job, with the weights that its training begins with."""
    return recipes.image_network(
        job["data"], job["network"], seed=job["seed"], **job["settings"]
    )


def row_of(results: list[Job]) -> dict[str, Any]:
    """The accuracies of several seeds, while training and in the test, and their curves."""
    return {
        "parameters": results[0]["parameters"],
        "epochs": len(results[0]["curve"]),
        "train": runner.summary([result["train"] for result in results]),
        "test": runner.summary([result["test"] for result in results]),
        "curves": [result["curve"] for result in results],
        "epoch_seconds": min(result["epoch_seconds"] for result in results),
        "device": results[0]["device"],
    }


# Table III

TABLE_III = {  # network, layers: while training, in the test
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
CONVOLUTION = 99.4  # the accuracy that K as a convolution should reach


def jobs_three(by: str, options: Any) -> list[Job]:
    kinds = [*TABLE_III, *(("h2", layers) for layers in (2, 4, 6, 8))]
    if by == "ours":
        kinds.append(("conv", 8))
    jobs = []
    for network, layers in kinds:
        settings = {} if network in ("none", "conv") else {"layers": layers}
        for seed in range(options.seeds):
            job = job_of("mnist", network, seed, options.epochs, by, **settings)
            jobs.append({**job, "layers": layers})
    return jobs


def table_three(options: Any) -> dict[str, Any]:
    jobs = []
    for by in options.recipes:
        jobs += jobs_three(by, options)
    data = load_mnist().to(options.device)
    with engine.use(precision="tf32"):
        results = run_images(jobs, data, options)
    table = []
    for (by, network, layers), group in runner.grouped(
        results, "by", "network", "layers"
    ).items():
        paper = TABLE_III.get(("h1" if network == "h2" else network, layers))
        row = {
            "by": by,
            "network": network,
            "layers": layers,
            "paper": paper,
            **row_of(group),
        }
        row["reached"] = runner.reached(
            row["test"]["mean"], paper[1] if paper else CONVOLUTION
        )
        table.append(row)
    return {"seeds": options.seeds, "epochs": options.epochs, "rows": table}


def found_three(result: dict[str, Any]) -> str:
    texts = []
    for by in dict.fromkeys(row["by"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["by"] == by]
        count = sum(row["reached"] for row in rows)
        best = max(
            row["test"]["mean"] for row in rows if row["network"] == "h1"
        )
        name = "the paper's recipe" if by == "paper" else "our recipe"
        texts.append(
            f"by {name} {count} of {len(rows)} means at or above their target, H1 up to {best:.2f}%"
        )
    return f"{'; '.join(texts)}; {result['seeds']} seeds"


def page_three(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        mark = "**" if row["reached"] else ""
        papers = [f" [{figure:g}]" for figure in row["paper"] or ()] or ["", ""]
        train = runner.spread(row["train"]) + papers[0]
        test = f"{mark}{runner.spread(row['test'])}{mark}{papers[1]}"
        name = [row["by"], row["network"], row["layers"], row["parameters"]]
        rows.append([*name, train, test])
    head = ["recipe", "network", "layers", "parameters", "train", "test"]
    page = [
        "# Table III: MNIST",
        "",
        f"`{result['command']}`, {result['seeds']} seeds, {result['epochs']} epochs, last epoch;",
        f"{result['rows'][0]['device']}. Mean ± standard deviation of the accuracy in %, the",
        "paper's in brackets; bold where the mean of the test accuracy reaches it (H2 beside H1).",
        "",
        *runner.markdown_table(head, rows),
    ]
    return "\n".join(page) + "\n"


# Table IV

TITLES = {
    "resnet56": "ResNet-56",
    "resnet56_drop": "ResNet-56 with a drop",
    "h1": "H1-DNN*",
    "h2": "H2-DNN*",
    "h1_paper": "H1-DNN*, the paper's recipe",
    "alexnet": "AlexNet",
}
TABLE_IV = {"resnet56": 93.68, "h1": 92.27, "h1_paper": 92.27, "alexnet": 91.55}
RESNETS = (
    "resnet56",
    "resnet56_drop",
)  # the others are compared with the better of these


def table_four(options: Any) -> dict[str, Any]:
    jobs = []
    for network in options.networks:
        if network == "resnet56_drop" and options.epochs < recipes.LONG:
            continue  # the others have no drop either
        seeds = range(options.seeds)
        jobs += [
            job_of("cifar10", network, seed, options.epochs, "ours")
            for seed in seeds
        ]
    data = load_cifar10().to(options.device)
    results = run_images(jobs, data, options)
    rows = []
    for (network,), group in runner.grouped(results, "network").items():
        row = {
            "network": network,
            "paper": TABLE_IV.get(network),
            **row_of(group),
        }
        rows.append(row)
    file = f"{options.name}-{options.epochs}"
    picture = runner.save_figure(draw_curves(rows), options.out / f"{file}.png")
    about = {
        "file": file,
        "data": data.name,
        "remark": data.remark,
        "picture": picture,
    }
    return {**about, "rows": rows}


def draw_curves(rows: list[dict[str, Any]]) -> Any:
    """Accuracy against the epoch: the mean of the seeds, and their range."""
    figure = new_figure(6.4, 4.4)
    ax = figure.add_subplot()
    for row, style in zip(rows, STYLES, strict=False):
        curves = torch.tensor(row["curves"], dtype=torch.float64)
        epochs = range(1, curves.shape[1] + 1)
        mean = curves.mean(0).tolist()
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        ax.plot(
            epochs,
            mean,
            **line,
            label=f"{TITLES[row['network']]}: {mean[-1]:.2f}%",
        )
        low = curves.amin(0).tolist()
        high = curves.amax(0).tolist()
        ax.fill_between(
            epochs, low, high, color=style["color"], alpha=0.2, linewidth=0
        )
    ax.grid(alpha=0.3)
    finish(ax, 2, xlabel="epoch", ylabel="accuracy in %", ylim=(60, 100))
    return figure


def found_four(result: dict[str, Any]) -> str:
    means = [
        f"{TITLES[row['network']]} {row['test']['mean']:.2f}%"
        for row in result["rows"]
    ]
    return f"{', '.join(means)} after {result['rows'][0]['epochs']} epochs"


def page_four(result: dict[str, Any]) -> str:
    means = {row["network"]: row["test"]["mean"] for row in result["rows"]}
    resnets = [means[name] for name in RESNETS if name in means]
    rows = []
    for row in result["rows"]:
        test = row["test"]
        text = (
            f"{runner.spread(test)} ({test['worst']:.2f} to {test['best']:.2f})"
        )
        lead = ""
        if resnets and row["network"] in ("h1", "h2"):
            lead = f"{test['mean'] - max(resnets):+.2f}"
        name = [
            TITLES[row["network"]],
            f"{row['parameters']:,}",
            row["epochs"],
            test["seeds"],
        ]
        rows.append([*name, text, lead, row["paper"] or ""])
    head = [
        "network",
        "parameters",
        "epochs",
        "seeds",
        "test",
        "above ResNet-56",
        "the paper's",
    ]
    remark = f" The images: {result['remark']}." if result["remark"] else ""
    page = [
        f"# Table IV: {result['data']}",
        "",
        f"`{result['command']}`, {result['rows'][0]['device']}.{remark}",
        "Accuracy in % on the test images after the last epoch, mean ± standard deviation",
        "(worst to best); the paper's are for the original images and 160 epochs.",
        "",
        *runner.markdown_table(head, rows),
        "",
        f"![Accuracy against the epoch]({result['picture']})",
    ]
    return "\n".join(page) + "\n"


# Singular values of dy_N/dy_j in trained networks


def stages(model: Any) -> list[list[Any]]:
    """The submodules in which all states have one shape: a unit, or blocks without a stride."""
    if not isinstance(model, ResNet):
        return [[unit] for unit in model.units]
    runs: list[list[Any]] = [[]]
    for block in model.blocks:
        if block.added:  # it has a stride
            runs.append([])
        else:
            runs[-1].append(block)
    return runs


@torch.no_grad()
def entering(
    model: nn.Module, submodules: list[nn.Module], x: Tensor
) -> list[Tensor]:
    """The states that enter each of these submodules when a model runs."""
    states: list[Tensor] = []
    hooks = []
    for submodule in submodules:
        hook = submodule.register_forward_pre_hook(
            lambda _, inputs: states.append(inputs[0])
        )
        hooks.append(hook)
    model(x)
    for hook in hooks:
        hook.remove()
    return states


def figure_cifar(options: Any) -> dict[str, Any]:
    data = load_cifar10()
    x = data.normalised(data.images_test[: options.images], torch.float64).to(
        options.device
    )
    rows = []
    for name in ("h1", "h2", "resnet56"):
        weights, about = io.load_tensors(
            Path(options.weights) / f"{name}.safetensors"
        )
        model = network_of(about["job"])
        model.load_state_dict(weights)
        model.to(x).eval()
        runs = stages(model)
        states = entering(model, [run[0] for run in runs], x)
        for number, (run, y) in enumerate(zip(runs, states, strict=True), 1):
            unit = None if isinstance(model, ResNet) else run[0]
            if unit is None:
                extremes = chain_extremes(run, y, steps=options.steps)
            else:
                extremes = unit_extremes(unit, y, steps=options.steps)
            row = {
                "network": name,
                "stage": number,
                "layers": len(extremes.layers),
            }
            row |= {
                "promised": unit is not None and bool(unit.guarantee().holds)
            }
            row |= {
                "largest": extremes.largest.tolist(),
                "smallest": extremes.smallest.tolist(),
            }
            rows.append({**row, "missed": extremes.missed})
    picture = runner.save_figure(
        draw_extremes(rows), options.out / f"{options.name}.png"
    )
    device = runner.machine(options.device)
    return {
        "images": options.images,
        "device": device,
        "picture": picture,
        "rows": rows,
    }


def draw_extremes(rows: list[dict[str, Any]]) -> Any:
    """For each stage the largest and the smallest value against j, on a log scale."""
    count = max(row["stage"] for row in rows)
    figure = new_figure(4.2 * count, 4.8)
    panels = figure.subplots(1, count, squeeze=False, sharey=True)[0]
    networks = list(dict.fromkeys(row["network"] for row in rows))
    for row in rows:
        ax = panels[row["stage"] - 1]
        colour = STYLES[networks.index(row["network"])]["color"]
        for key, line in (("largest", "-"), ("smallest", "--")):
            means = torch.tensor(row[key]).mean(1)
            means[means <= 0] = torch.nan
            label = f"{TITLES[row['network']]}, {key}"
            ax.plot(means.tolist(), color=colour, linestyle=line, label=label)
    for number, ax in enumerate(panels, 1):
        level_one(ax)
        ax.set_yscale("log")
        finish(ax, 2, title=f"Stage {number}", xlabel="layer or block $j$")
    panels[0].set_ylabel(r"singular values of $\partial y_N / \partial y_j$")
    return figure


def found_cifar(result: dict[str, Any]) -> str:
    promised = [row for row in result["rows"] if row["promised"]]
    least = min(min(map(min, row["largest"])) for row in promised)
    return f"smallest norm where one is promised: {least:.4g}"


def page_cifar(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        largest = min(map(min, row["largest"]))
        smallest = min(map(min, row["smallest"]))
        promise = "yes" if row["promised"] else "no"
        name = [TITLES[row["network"]], row["stage"], row["layers"], promise]
        rows.append(
            [
                *name,
                f"{largest:.4g}",
                f"{smallest:.4g}",
                f"{100 * row['missed']:.1f}%",
            ]
        )
    head = ["network", "stage", "N", "norm >= 1 promised", "norm, least over j"]
    head += ["smallest value", "within"]
    page = [
        "# Singular values of dy_N/dy_j in trained networks (CIFAR-10)",
        "",
        f"`{result['command']}`: the weights of `hdnn reproduce table-cifar`, the first",
        f"{result['images']} test images, float64; {result['device']}.",
        "",
        f"![Largest and smallest singular values against j]({result['picture']})",
        "",
        "y_0 .. y_N are the states of a Hamiltonian unit, or of the blocks of one ResNet stage",
        "that keep the shape of the image. By Lanczos with products only: the largest is a lower",
        "bound, the smallest an upper bound; `within` is how far the true norm can be beyond,",
        "with probability 0.999.",
        "",
        *runner.markdown_table(head, rows),
    ]
    return "\n".join(page) + "\n"


COMMON = {"epochs": 40, "device": DEVICE, "minutes": math.inf}
EXPERIMENTS = {
    "table-mnist": Experiment(
        "Table III: MNIST, a convolution, an H-DNN that mixes its 8 channels, an output layer.",
        {"seeds": 5, "recipes": ["paper", "ours"], **COMMON},
        table_three,
        page_three,
        found_three,
    ),
    "table-cifar": Experiment(
        "Table IV: CIFAR-10 by networks of less than a million parameters, and by AlexNet.",
        {"seeds": 3, "networks": list(TITLES), **COMMON},
        table_four,
        page_four,
        found_four,
    ),
    "fig-cifar": Experiment(
        "Extreme singular values of dy_N/dy_j in the trained networks of the CIFAR-10 table.",
        {
            "weights": "runs/table-cifar",
            "images": 2,
            "steps": 32,
            "device": DEVICE,
        },
        figure_cifar,
        page_cifar,
        found_cifar,
    ),
}
