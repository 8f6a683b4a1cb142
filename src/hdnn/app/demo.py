"""`hdnn demo`: a deep H2 beside a perceptron of the same depth, on the Swiss roll."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hdnn import analysis, plotting
from hdnn.app import train
from hdnn.app.config import PlaneConfig
from hdnn.app.scores import lines, score_text
from hdnn.errors import MissingExtraError, require
from hdnn.io import load
from hdnn.plotting.curves import new_figure

PICTURE = "contrast.png"


def run(options: Mapping[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Train both networks; the H2 is a run, the perceptron is only drawn beside it."""
    values = {"data": "swiss_roll", "overwrite": True, **options}
    if quiet:
        values["quiet"] = True
    [(config, folder)] = train.plan(values)
    options = config.options()
    h2 = train.Job(PlaneConfig.build(options))
    result = train.train(h2, folder, values)
    certificate = result["certificate"]
    rival = PlaneConfig.build({**options, "network": "mlp"})
    job = train.Job(rival)
    with TemporaryDirectory() as place:
        job.fit(Path(place), not quiet)
    model = job.model.to("cpu")
    x, t = job.data.parts["test"]
    scores = job.data.scores("test", train.outputs(model, x), t)
    norms = analysis.certify(model, x, samples=job.data.samples)
    pictures = list(result["pictures"])
    if draw(load(folder.model_file), model, job.data, norms, folder.folder):
        pictures.append(PICTURE)
    return {
        **result,
        "smallest_bsm_norm": certificate["smallest_norm"],
        "largest_bsm_norm": certificate["largest_norm"],
        "symplectic_defect": certificate["symplectic_defect"],
        "pictures": pictures,
        "perceptron_accuracy": scores["test_accuracy"],
        "perceptron_norm": norms.by_layer["largest"][0],
    }


def draw(h2: Any, perceptron: Any, data: Any, norms: Any, folder: Path) -> bool:
    """Draw the predicted classes and the norms of both networks; False without matplotlib."""
    try:
        require("matplotlib", extra="plot")
    except MissingExtraError:
        return False
    figure = new_figure(10.4, 9.4)
    panels = figure.subplots(2, 2)
    mine = analysis.certify(h2, data.points, samples=data.samples)
    models = {"H2": (h2, mine), "perceptron": (perceptron, norms)}
    for column, (name, (model, certificate)) in enumerate(models.items()):
        title = f"{name}, {model.net.layers} layers"
        plotting.decision_regions(model, data.source, panels[0][column])
        panels[0][column].set_title(title)
        certificate.plot(panels[1][column])
        panels[1][column].set_yscale("log")
        panels[1][column].set_title(f"{name}: gradient from the output back")
    low = min(panel.get_ylim()[0] for panel in panels[1])
    high = max(panel.get_ylim()[1] for panel in panels[1])
    for panel in panels[1]:
        panel.set_ylim(low, high)
    train.write_picture(figure, folder / PICTURE)
    return True


def text(result: Mapping[str, Any]) -> str:
    """The result for people."""
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
