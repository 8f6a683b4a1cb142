"""The command line for images: what it cannot do with them, and what it says of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hdnn.analysis.certificate import number_text
from hdnn.app import cli
from hdnn.app.image_runs import ImageConfig
from hdnn.errors import OptionError
from hdnn.training.processes import launch

if TYPE_CHECKING:
    from hdnn.app.runs import Run, TrainConfig


def check(chosen: list[tuple[TrainConfig | ImageConfig, Run]]) -> None:
    """Refuse what only other trainings can do."""
    if not any(isinstance(config, ImageConfig) for config, _ in chosen):
        return
    if launch.several():
        raise OptionError("one process trains on images: start hdnn train without torchrun.")


def text(result: dict[str, Any]) -> str:
    """The metrics of one run on images, as a small table."""
    trained = f"{result['epochs']} epochs in {result['training_seconds']:.1f} s, "
    trained += f"{result['epoch_seconds']:.3g} s an epoch"
    counts = f"{result['train_images']} images, tested on {result['test_images']}"
    rows = [
        ("network", f"{result['network']}"),
        ("parameters", f"{result['parameters']:,}"),
        ("data", f"{result['set']}: {counts}"),
        ("trained", trained),
    ]
    if result["remark"]:
        rows.insert(3, ("", result["remark"]))
    for name, value in cli._measures(result).items():
        rows.append((name.replace("_", " "), cli._measure(name, value)))
    rows += _gradients(result)
    rows.append(("run", result["run"]))
    rows += [("picture", path) for path in result["pictures"].values()]
    if "no_pictures_because" in result:
        rows.append(("pictures", f"none: {result['no_pictures_because']}"))
    return cli._rows(rows)


def _gradients(result: dict[str, Any]) -> list[tuple[str, str]]:
    """What is promised of each Hamiltonian part, and what was measured."""
    found = result["certificates"]
    if not found:
        return [("gradients", result["no_certificate_because"])]
    if len(found) == 1:
        largest = f"largest  norm(dy_N/dy_j) = {number_text(found[0]['largest_norm'])}"
        return [("gradients", cli._smallest(found[0])), ("", largest)]
    rows = [(f"unit {k}", cli._smallest(one)) for k, one in enumerate(found, 1)]
    if any(one["guaranteed"] for one in found):
        why = next(one["guarantee"] for one in found if one["guaranteed"])
        rows.append(("", f"guaranteed {why}; for each unit, not for what lies between them"))
    return rows
