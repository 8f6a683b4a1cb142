"""The paper's experiments on planar sets: Tables I and II, and the figures beside them.

A seed is one data set, one sequence of initial weights and one order of the samples; the test
points decide nothing. Our recipe solves the output layer by Newton's method, lets the rate rise and
fall, and trains on copies of the points that are moved a little, which keeps the border between two
classes away from the points of both. Unless the loss on the training points is next to nothing, it
starts again from other weights, and the start of least loss is taken. It was chosen on other seeds
than those of the tables.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import hdnn
from hdnn import io
from hdnn.analysis import GradientMonitor, GradientWarning
from hdnn.data import planar
from hdnn.errors import ConvergenceError
from hdnn.experiments import runner
from hdnn.experiments.runner import Experiment, Job
from hdnn.plotting import decision_regions, gradient_surface, new_figure
from hdnn.training import fit

ENOUGH = 1e-4  # a loss at which all points are clearly right
ROUNDED_NOTE = f"within rounding, {runner.ROUNDED} counts as 100."
ABOUT = """A cell: mean ± standard deviation (worst to best), the paper's figure in brackets{};
bold where the {} is at or above that figure without rounding."""


def accuracy(model: hdnn.Model, x: Tensor, t: Tensor) -> float:
    """The share of labels that a model predicts correctly, in per cent."""
    return 100 * float((model.predict(x) == t).double().mean())


def train(job: Job, x: Tensor, t: Tensor) -> hdnn.Model:
    """The network of a job, trained on these points."""
    if "moved" not in job:
        model = network(job, job["seed"])
        fit(model, x, t, seed=job["seed"], progress=False, **job["options"])
        return model
    generator = torch.Generator().manual_seed(job["seed"])
    near = x.repeat(job["copies"], 1)
    near += job["moved"] * (
        2 * torch.rand(near.shape, generator=generator, dtype=x.dtype) - 1
    )
    labels = t.repeat(job["copies"])
    best = None
    least = torch.inf
    for start in range(job["starts"]):
        seed = job["seed"] + 1_000_000 * start
        model = network(job, seed)
        try:
            fit(
                model, near, labels, seed=seed, progress=False, **job["options"]
            )
        except ConvergenceError:  # an implicit layer without a solution
            if best is None and start == job["starts"] - 1:
                raise
            continue
        with torch.no_grad():
            loss = float(model.loss(x, t))
        if loss < least:
            best, least = model, loss
        if loss < ENOUGH:
            break
    assert best is not None
    return best


def measure(job: Job) -> Job:
    """The accuracy of one training on the test set, or on points that were held out."""
    data = planar.load(job["data"], seed=job["seed"])
    x, t = data.x_train, data.t_train
    x_test, t_test = data.x_test, data.t_test
    if job.get("validation"):
        count = len(x) // 5
        x_test, t_test = x[:count], t[:count]
        x, t = x[count:], t[count:]
    try:
        model = train(job, x, t)
    except ConvergenceError as error:
        return {"failed": str(error)}
    return {"accuracy": accuracy(model, x_test, t_test)}


def cells(results: list[tuple[Job, Job]], *keys: str) -> list[dict[str, Any]]:
    """A row for all seeds of a cell, with the paper's figure."""
    rows = []
    papers = {
        tuple(job[key] for key in keys): job["paper"] for job, _ in results
    }
    for cell, values in runner.grouped(results, *keys).items():
        ended = [value["accuracy"] for value in values if "accuracy" in value]
        row = {**dict(zip(keys, cell, strict=True)), "paper": papers[cell]}
        row |= {
            "failed": len(values) - len(ended),
            **runner.summary(ended or [0.0]),
        }
        rows.append(row)
    return rows


# Table I

NAMES = {"paper": "the paper's recipe", "ours": "our recipe"}
NETWORKS = ("MS1", "MS2", "MS3", "H1", "H2")
TABLE_I = {
    ("swiss_roll", 4): (77.1, 79.7, 90.1, 93.6, 84.3),
    ("swiss_roll", 8): (91.5, 90.7, 87.0, 99.0, 95.5),
    ("swiss_roll", 16): (97.7, 99.7, 97.1, 99.8, 100.0),
    ("swiss_roll", 32): (100.0, 100.0, 98.4, 99.8, 100.0),
    ("swiss_roll", 64): (100.0, 100.0, 100.0, 99.8, 100.0),
    ("double_moons", 1): (92.5, 91.3, 97.6, 100.0, 94.4),
    ("double_moons", 2): (98.2, 94.9, 99.8, 100.0, 99.8),
    ("double_moons", 4): (99.5, 100.0, 100.0, 100.0, 100.0),
}
PAPER: dict[str, Any] = {
    "solver": "adam",
    "learning_rate": 2.5e-2,
    "schedule": "constant",
    "ridge": 1e-4,
}
OURS: dict[str, Any] = {
    "solver": "newton",
    "learning_rate": 6e-2,
    "schedule": "cosine",
    "warmup": 0.1,
    "batch": 100,
    "clip": 1.0,
    "ridge": 3e-6,
    "smoothness": 1e-3,
    "smoothing": "cosine",
}
EPOCHS = {"swiss_roll": 10, "double_moons": 20}
MOVED: dict[str, dict[str, Any]] = {
    "swiss_roll": {"copies": 10, "moved": 0.05, "starts": 2},
    "double_moons": {"copies": 10, "moved": 0.1, "starts": 6},
}
# The paper gives no T: for its recipe, the one that did best on points that were held out.
TRIED = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.2, 1.8, 2.4, 3.6, 4.8, 7.2, 10.8)


def network(job: Job, seed: int) -> hdnn.Model:
    """The network of a job with the weights of a seed."""
    if "variant" in job:
        return ring_network(job["variant"], job["layers"], seed)
    generator = torch.Generator().manual_seed(seed)
    common: dict[str, Any] = {
        "init": job.get("init", "paper"),
        "generator": generator,
    }
    if job["network"] != "MLP":
        common["T"] = job["T"]
    net = getattr(hdnn.networks, job["network"])(4, job["layers"], **common)
    return hdnn.Model(
        hdnn.Augment(2, 4), net, hdnn.SigmoidHead(4, generator=generator)
    )


def job_one(
    network: str, data: str, layers: int, seed: int, T: float | None = None
) -> Job:
    """One training of Table I: by our recipe, or by the paper's with this T."""
    paper = TABLE_I[data, layers][NETWORKS.index(network)]
    job: Job = {
        "network": network,
        "data": data,
        "layers": layers,
        "seed": seed,
        "paper": paper,
    }
    if T is not None:
        return {**job, "T": T, "options": PAPER}
    depth = round(
        0.8 * (layers / 8) ** 0.25, 3
    )  # deep networks do better with more time
    return {
        **job,
        "T": depth,
        "options": {**OURS, "epochs": EPOCHS[data]},
        **MOVED[data],
    }


def places() -> list[tuple[str, str, int]]:
    return [
        (network, data, layers)
        for data, layers in TABLE_I
        for network in NETWORKS
    ]


def choose_T(options: Any) -> dict[tuple[str, str, int], float]:
    """For each cell, the T that did best on points that were held out."""
    jobs = []
    for cell in places():
        for T in TRIED:
            for seed in range(1000, 1000 + options.tries):
                job = job_one(*cell, seed, T)
                jobs.append({**job, "validation": True})
    results = runner.run_jobs(jobs, measure, options.runs, options.processes)
    best: dict[tuple[str, str, int], float] = {}
    most: dict[tuple[str, str, int], float] = {}
    groups = runner.grouped(results, "network", "data", "layers", "T")
    for (*cell, T), values in groups.items():
        place = tuple(cell)
        score = sum(value.get("accuracy", 0.0) for value in values)
        if score > most.get(place, -1.0):
            most[place] = score
            best[place] = T
    return best


def table_one(options: Any) -> dict[str, Any]:
    recipes = {}
    for recipe in options.recipes:
        T = choose_T(options) if recipe == "paper" else {}
        jobs = []
        for cell in places():
            jobs += [
                job_one(*cell, seed, T.get(cell))
                for seed in range(options.seeds)
            ]
        results = runner.run_jobs(
            jobs, measure, options.runs, options.processes
        )
        recipes[recipe] = cells(results, "network", "data", "layers", "T")
    return {"seeds": options.seeds, "recipes": recipes}


def found_one(result: dict[str, Any]) -> str:
    texts = []
    for recipe in ("ours", "paper"):
        rows = result["recipes"].get(recipe)
        if rows is not None:
            text = f"by {NAMES[recipe]} {runner.counted(rows)}"
            if recipe == "paper":
                text += f", {runner.counted(rows, 'best')}"
            texts.append(f"{text}, {rows[0]['seeds']} seeds")
    if "note" in result:
        texts.append(result["note"])
    return "; ".join(texts)


def page_one(result: dict[str, Any]) -> str:
    page = [
        "# Table I: planar sets",
        "",
        f"`{result['command']}`, {result['seeds']} seeds.",
        "",
    ]
    if "note" in result:
        page += [f"{result['note'].capitalize()}.", ""]
    for recipe, rows in result["recipes"].items():
        # The paper does not say whether its figures are means or best.
        what = "mean" if recipe == "ours" else "best"
        title = NAMES[recipe].capitalize()
        page += [
            f"## {title}",
            "",
            f"{runner.counted(rows, what)}; {ROUNDED_NOTE}",
            ABOUT.format(", T", what),
            "",
        ]
        page += [*runner.grid(rows, "network", what), ""]
    return "\n".join(page)


# Table II

NODES = 8
TABLE_II = {  # distributed, centralised
    ("swiss_roll", 2): (91.05, 99.90),
    ("swiss_roll", 3): (99.08, 100.0),
    ("swiss_roll", 4): (100.0, 100.0),
    ("double_circles", 2): (98.65, 100.0),
    ("double_circles", 3): (99.42, 99.85),
    ("double_circles", 4): (99.70, 100.0),
}
RING: dict[str, Any] = {
    "solver": "newton",
    "learning_rate": 2e-2,
    "schedule": "cosine",
    "warmup": 0.2,
    "clip": 0.1,
    "ridge": 5e-5,
    "smoothness": 5e-3,
    "smoothing": "cosine",
}
RING_EPOCHS = {"swiss_roll": 5, "double_circles": 10}
RING_MOVED = {"swiss_roll": 0.05, "double_circles": 0.3}
VARIANTS = {
    "masked": "H2 on the ring, 64 parameters a layer",
    "centralised": "H2, 144 parameters a layer",
    "masked, full K": "general layer on the ring, 112 parameters a layer",
    "centralised, full K": "general layer, 272 parameters a layer",
}
BETWEEN = 0.2  # factor of the blocks of a full K through which one row sees both p and q


def ring(steps: int = 1) -> Tensor:
    """Each node with itself and all nodes at most `steps` away on the ring."""
    eye = torch.eye(NODES)
    return sum(eye.roll(k, 0) for k in range(-steps, steps + 1)).int()  # pyright: ignore


def ring_network(variant: str, layers: int, seed: int) -> hdnn.Model:
    """x_1 enters p of the first node, x_2 enters q of the fifth."""
    generator = torch.Generator().manual_seed(seed)
    full = variant.endswith("full K")
    options: dict[str, Any] = {"step": 0.5, "generator": generator}
    if variant.startswith(
        "masked"
    ):  # a masked layer uses links within two steps in all
        options["sparsity"] = hdnn.Sparsity(
            ring(), S=None if full else ring(steps=2)
        )
    net: Any = (hdnn.ImplicitH2 if full else hdnn.H2)(
        2 * NODES, layers, **options
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter *= (
                2  # K from N(0, 4/n), which leaves sigma room on both sides
            )
        if full:  # start close to H2, whose K has no such blocks
            K = net.weight("K").clone()
            K[:, :NODES, NODES:] *= BETWEEN
            K[:, NODES:, :NODES] *= BETWEEN
            net.assign("K", K)
    augment = hdnn.Augment(2, 2 * NODES, placement=[0, NODES + 4])
    return hdnn.Model(
        augment, net, hdnn.SigmoidHead(2 * NODES, generator=generator)
    )


def job_two(variant: str, data: str, layers: int, seed: int) -> Job:
    """One training of Table II; one with a full K takes twenty times as long, and starts once."""
    return {
        "variant": variant,
        "data": data,
        "layers": layers,
        "seed": seed,
        "paper": TABLE_II[data, layers][variant.startswith("centralised")],
        "options": {**RING, "epochs": RING_EPOCHS[data]},
        "copies": 10,
        "moved": RING_MOVED[data],
        "starts": 1 if variant.endswith("full K") else 4,
    }


def table_two(options: Any) -> dict[str, Any]:
    jobs = []
    for data, layers in TABLE_II:
        for variant in options.variants:
            jobs += [
                job_two(variant, data, layers, seed)
                for seed in range(options.seeds)
            ]
    results = runner.run_jobs(jobs, measure, options.runs, options.processes)
    return {
        "seeds": options.seeds,
        "rows": cells(results, "variant", "data", "layers"),
    }


def found_two(result: dict[str, Any]) -> str:
    return f"{runner.counted(result['rows'])}, {result['seeds']} seeds"


def page_two(result: dict[str, Any]) -> str:
    rows = result["rows"]
    variants = dict.fromkeys(row["variant"] for row in rows)
    page = ["# Table II: distributed and centralised", ""]
    page += [
        f"`{result['command']}`, {result['seeds']} seeds.",
        f"{runner.counted(rows)}; {ROUNDED_NOTE}",
    ]
    page += [ABOUT.format("", "mean"), ""]
    page += [*(f"- {name}: {VARIANTS[name]}" for name in variants), ""]
    return "\n".join([*page, *runner.grid(rows, "variant")]) + "\n"


# Figures of decision regions


def regions(options: Any, title: str, jobs: list[Job]) -> dict[str, Any]:
    """Train the networks of these jobs, and draw their decision regions."""
    pictures = {}
    for job in jobs:
        data = planar.load(job["data"], seed=options.seed)
        model = train(job, data.x_train, data.t_train)
        right = accuracy(model, data.x_test, data.t_test)
        ax = decision_regions(model, data)
        ax.set_title(
            f"{job['data'].replace('_', ' ')}, {job['layers']} layers: {right:.2f}%"
        )
        name = f"{options.name}-{job['data']}.png"
        pictures[runner.save_figure(ax.figure, options.out / name)] = right
    return {"title": title, "seed": options.seed, "pictures": pictures}


def found_regions(result: dict[str, Any]) -> str:
    shares = [f"{right:.2f}%" for right in result["pictures"].values()]
    return f"{' and '.join(shares)} of the test points"


def page_regions(result: dict[str, Any]) -> str:
    page = [f"# Decision regions: {result['title']}", ""]
    page += [f"`{result['command']}`, seed {result['seed']}.", ""]
    for picture, right in result["pictures"].items():
        page += [f"![{right:.2f}% of the test points are right]({picture})", ""]
    return "\n".join(page)


def figure_planar(options: Any) -> dict[str, Any]:
    jobs = [job_one("H1", "swiss_roll", 64, options.seed)]
    jobs.append(job_one("H1", "double_moons", 4, options.seed))
    return regions(options, "two H1 networks", jobs)


def figure_distributed(options: Any) -> dict[str, Any]:
    sets = ("swiss_roll", "double_circles")
    jobs = [job_two("masked", data, 4, options.seed) for data in sets]
    return regions(options, "4 layers of H2 on a ring of 8 nodes", jobs)


# Gradients through a training

WATCHED = {  # network, layers, and options that differ from the paper's recipe
    "H2, 32 layers": ("H2", 32, {}),
    "MLP, 8 layers": ("MLP", 8, {}),
    "MLP, 32 layers": ("MLP", 32, {}),
    "MLP, 8 layers, joint": ("MLP", 8, {"solver": "joint"}),
}
SAMPLES = 250  # of the test points


def watch(kind: str, layers: int, change: Job, options: Any) -> tuple[Any, Job]:
    """A training with its gradients watched, and its result."""
    data = planar.double_moons(seed=options.seed)
    model = network({"network": kind, "layers": layers, "T": 0.8}, options.seed)
    monitor = GradientMonitor(
        x=data.x_test, every=options.every, samples=SAMPLES
    )
    recipe = {
        **PAPER,
        "epochs": 30,
        "seed": options.seed,
        "progress": False,
        **change,
    }
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", GradientWarning
        )  # that is what the figure is about
        fit(model, data.x_train, data.t_train, callbacks=[monitor], **recipe)
    result = {
        "accuracy": accuracy(model, data.x_test, data.t_test),
        "smallest": monitor.table("smallest")[:, :-1].min().item(),
        "largest": monitor.table("largest")[:, :-1].max().item(),
        "smallest_of_mean": monitor.table("of_mean")[:, :-1].min().item(),
    }
    return monitor, result


def figure_gradients(options: Any) -> dict[str, Any]:
    results = {}
    figure = new_figure(5.4 * len(WATCHED), 3.9)
    panels = figure.subplots(1, len(WATCHED))
    for ax, (name, (kind, layers, change)) in zip(
        panels, WATCHED.items(), strict=True
    ):
        monitor, results[name] = watch(kind, layers, change, options)
        gradient_surface(monitor, ax)
        ax.set_title(f"{name}: {results[name]['accuracy']:.1f}% right")
        words = name.lower().replace(",", "").replace(" layers", "").split()
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"{options.name}-{'-'.join(words)}.csv"
        io.write_atomically(file, monitor.to_csv())
    picture = runner.save_figure(figure, options.out / f"{options.name}.png")
    about = {"seed": options.seed, "every": options.every, "picture": picture}
    return {**about, "networks": results}


def found_gradients(result: dict[str, Any]) -> str:
    smallest = [
        f"{name}: {values['smallest']:.2g}"
        for name, values in result["networks"].items()
    ]
    return f"smallest norm(dy_N/dy_j) of a sample: {'; '.join(smallest)}"


def page_gradients(result: dict[str, Any]) -> str:
    head = [
        "",
        "test accuracy",
        "smallest",
        "largest",
        "smallest of the batch mean",
    ]
    rows = []
    for name, values in result["networks"].items():
        norms = [
            values[key] for key in ("smallest", "largest", "smallest_of_mean")
        ]
        texts = [
            f"{norm:.15g}" if abs(norm - 1) < 1e-3 else f"{norm:.4g}"
            for norm in norms
        ]
        rows.append([name, f"{values['accuracy']:.2f}%", *texts])
    page = [
        "# Gradients through a training",
        "",
        f"`{result['command']}`, seed {result['seed']}: norm(dy_N/dy_j) over {SAMPLES} test "
        f"points of the double moons, all layers j < N, every {result['every']} steps of 960.",
        "Norms are per sample: that of the mean matrix can be below 1 where no sample is.",
        "",
        *runner.markdown_table(head, rows),
        "",
        f"![Smallest norm of dy_N/dy_j by iteration and layer]({result['picture']})",
    ]
    return "\n".join(page) + "\n"


EXPERIMENTS = {
    "table-planar": Experiment(
        "Table I: accuracy on the planar sets, five networks, eight depths, over seeds.",
        {"seeds": 10, "tries": 4, "recipes": ["paper", "ours"]},
        table_one,
        page_one,
        found_one,
    ),
    "table-distributed": Experiment(
        "Table II: eight nodes on a ring against one network that sees all features.",
        {"seeds": 10, "variants": list(VARIANTS)},
        table_two,
        page_two,
        found_two,
    ),
    "fig-planar": Experiment(
        "The decision regions of two H1 networks.",
        {"seed": 0},
        figure_planar,
        page_regions,
        found_regions,
    ),
    "fig-distributed": Experiment(
        "The decision regions of two H2 networks on a ring.",
        {"seed": 0},
        figure_distributed,
        page_regions,
        found_regions,
    ),
    "fig-gradients": Experiment(
        "Norms of dy_N/dy_j through the training of an H2 and of MLPs.",
        {"seed": 0, "every": 16},
        figure_gradients,
        page_gradients,
        found_gradients,
    ),
}
