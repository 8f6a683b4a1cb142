"""`hdnn certify`: the gradient norms of a trained network."""

from __future__ import annotations

from typing import Annotated

from hdnn.app import progress, terminal
from hdnn.app.options import argument, json_flag, option
from hdnn.errors import OptionError

EXAMPLES = (
    "hdnn certify runs/swiss_roll-h2-64-0",
    "hdnn certify runs/iris-species-h2-16-0 --data new.csv --json",
    "hdnn certify model.safetensors --data double_moons",
)


def certify(
    checkpoint: Annotated[
        str | None, argument("folder of a complete run or of the runs of --seeds, or a saved model")
    ] = None,
    run: Annotated[str | None, option("the same, by name")] = None,
    data: Annotated[
        str | None, option("points to look at; default: the run's own test points")
    ] = None,
    samples: Annotated[int, option("of them, at the most")] = 1000,
    as_json: Annotated[bool, json_flag()] = False,
) -> int:
    """Measure the gradient norms of a trained network; exit code 1 if a guarantee is not seen."""
    from hdnn.app.tasks import kinds

    place = checkpoint or run
    if not place or (checkpoint and run):
        raise OptionError("name one run or saved model: hdnn certify runs/NAME.")
    with progress.waiting("certifying", not as_json):
        certificate = kinds.certify(place, data, samples=samples)
    if as_json:
        print(terminal.json_text({"run": place, **certificate.to_dict()}))
    else:
        terminal.print_text(certificate)
    return 1 if certificate.broken or certificate.unknown else 0
