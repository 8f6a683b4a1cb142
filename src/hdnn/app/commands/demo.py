"""`hdnn demo`: a deep H2 on the Swiss roll."""

from __future__ import annotations

import json
from typing import Annotated

from hdnn.app import terminal
from hdnn.app.options import option

EXAMPLES = (
    "hdnn demo",
    "hdnn demo --layers 128 --seed 3",
    "hdnn demo --json | jq .test_accuracy",
)


def demo(
    layers: Annotated[int, option("number of layers N")] = 64,
    epochs: Annotated[int | None, option("of training; default: what suffices")] = None,
    seed: Annotated[int, option("of weights and shuffle")] = 0,
    out: Annotated[str, option("folder to write to")] = "runs/demo",
    as_json: Annotated[bool, option("print the result as JSON", "--json")] = False,
    quiet: Annotated[bool, option("no progress display", "--quiet")] = False,
) -> None:
    """Train a deep H2 on the Swiss roll; print its accuracy and gradient norms."""
    from hdnn.app import demo

    progress = not (quiet or as_json)
    result = demo.run(layers=layers, epochs=epochs, seed=seed, out=out, progress=progress)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        terminal.print_text(demo.summary(result))
