"""`hdnn demo`: a deep H2 and a perceptron of the same depth, on the Swiss roll."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hdnn import plotting
from hdnn.app import train
from hdnn.app.runs import Run
from hdnn.app.scores import lines, score_text
from hdnn.plotting import new_figure

PICTURE = "contrast.png"


def run(options: Mapping[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Train both networks; the H2 becomes a run, the perceptron is only drawn."""
    values = {"data": "swiss_roll", "overwrite": True, **options}
    if quiet:
        values["quiet"] = True
    [(config, folder)] = train.plan(values)
    h2 = train.Job(config)
    result = train.train(h2, folder, values)
    perceptron = train.Job(replace(config, network="mlp"))
    with TemporaryDirectory() as place:
        rival = train.train(perceptron, Run(place), values, pictures=False)
    pictures = list(result["pictures"])
    if pictures:
        draw({"H2": h2, "perceptron": perceptron}, folder.folder)
        pictures.append(PICTURE)
    return {
        **result,
        "smallest_bsm_norm": result["certificate"]["smallest_norm"],
        "pictures": pictures,
        "perceptron_accuracy": rival["test_accuracy"],
        "perceptron_norm": rival["certificate"]["by_layer"]["largest"][0],
    }


def draw(jobs: Mapping[str, train.Job], folder: Path) -> None:
    """Draw the predicted classes and the norms of both networks."""
    figure = new_figure(10.4, 9.4)
    panels = figure.subplots(2, 2)
    for column, (name, job) in enumerate(jobs.items()):
        title = f"{name}, {job.config.layers} layers"
        plotting.decision_regions(job.model, job.data.source, panels[0][column])
        panels[0][column].set_title(title)
        job.certificate.plot(panels[1][column])
        panels[1][column].set_yscale("log")
        panels[1][column].set_title(
            f"{name}: gradient on its way back from the output"
        )
    low = min(panel.get_ylim()[0] for panel in panels[1])
    high = max(panel.get_ylim()[1] for panel in panels[1])
    for panel in panels[1]:
        panel.set_ylim(low, high)
    train.write_picture(figure, folder / PICTURE)


def text(result: Mapping[str, Any]) -> str:
    """The result as text."""
    share = score_text("accuracy", result["perceptron_accuracy"])
    norm = result["perceptron_norm"]
    folder = Path(result["run"])
    files = [str(folder / name) for name in result["pictures"]]
    gradient = f"at most {norm:.1e} of the gradient reaches its first layer"
    rows = {
        "perceptron": f"{share} on the test points; {gradient}",
        "pictures": ", ".join(files),
    }
    return f"{train.text(result)}\n{lines(rows)}"
