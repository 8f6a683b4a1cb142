"""The two-dimensional example of growing gradients (eq:2D_Example, fig:phi_TTt_trajectories).

Its period and the slope of its growth, measured and in closed form; finite perturbations, as in the
paper's figure; and H2 layers whose gradients grow by a factor each. `--seed` draws one more start.

hdnn reproduce fig-exploding
"""

from __future__ import annotations

import argparse
import io
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hdnn
from hdnn import plotting
from hdnn.analysis import counterexample, norms
from hdnn.analysis.counterexample import LayerGrowth
from hdnn.errors import require
from hdnn.experiments import runner

NAME = "fig-exploding"
STARTS = {"(1, 1)/√2": (0.5**0.5, 0.5**0.5), "(1, 0)": (1.0, 0.0)}
SLOW = 0.1  # an eps besides 1, for the first start: eps t alone counts
T, SHOWN = 200.0, 80.0  # eps t of the linear growth, and how much of it is drawn
GAMMAS = (0.1, 0.02, 0.005)
SPAN = 16.0  # gamma t by which states gamma apart are on opposite sides
H = 0.5
LOADS = (1.0, 1.9, 2.0, 2.01, 2.1)  # h k^2
LAYERS = 64

Curve = tuple[Tensor, Tensor]  # times and what is found at them


def starts(seed: int) -> dict[str, Tensor]:
    """The states to start from, by their names; the last is random, as in the paper."""
    given = {name: torch.tensor(y, dtype=torch.float64) for name, y in STARTS.items()}
    drawn = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {**given, f"random ({drawn[0]:.2f}, {drawn[1]:.2f})": drawn}


def linear(name: str, y: Tensor, eps: float = 1.0) -> tuple[dict[str, Any], Curve]:
    """Period and slope from one start, and the BSMs that they come from."""
    t = torch.arange(0, T, 0.02, dtype=torch.float64) / eps
    Phi = counterexample.growth(y, t, eps)
    slope, _ = counterexample.fitted_envelope(t, norms(Phi))
    period = counterexample.measured_period(y, eps)
    row = {"start": name, "y": y.tolist(), "eps": eps, "energy": float(counterexample.energy(y))}
    row["period"] = _beside(period, float(counterexample.period(y, eps)))
    row["slope per eps t"] = _beside(slope / eps, float(counterexample.envelope_slope(y)))
    return row, (t, Phi)


def _beside(measured: float, exact: float) -> dict[str, float]:
    difference = abs(measured - exact) / exact
    return {"measured": measured, "closed form": exact, "relative difference": difference}


def finite(y: Tensor) -> dict[float, Curve]:
    """How far apart perturbations of each size, along p, bring the states."""
    curves = {}
    for gamma in GAMMAS:
        t = torch.arange(0, SPAN / gamma, 0.5, dtype=torch.float64)
        curves[gamma] = t, counterexample.finite_growth(y, t, gamma)[:, 0]
    return curves


def exponential() -> dict[float, LayerGrowth]:
    """Growth per layer for each h k^2."""
    return {
        load: counterexample.layer_growth(H, math.sqrt(load / H), layers=LAYERS) for load in LOADS
    }


def draw(
    chosen: dict[str, Tensor],
    growth: Curve,
    curves: dict[float, Curve],
    layers: dict[float, LayerGrowth],
    path: Path,
) -> None:
    """Orbits, linear growth, finite perturbations and exponential growth, in four panels."""
    Figure = require("matplotlib.figure", extra="plot").Figure
    figure = Figure(figsize=(10.0, 8.4), layout="constrained")
    orbits, line, perturbed, stacks = figure.subplots(2, 2).flat
    name, first = next(iter(chosen.items()))
    slope = float(counterexample.envelope_slope(first))

    periods = {each: float(counterexample.period(y)) for each, y in chosen.items()}
    ode = counterexample.example(max(periods.values()))
    turn = torch.linspace(0, 1, 401, dtype=torch.float64)
    states = [ode.trajectory(y, turn * periods[each]) for each, y in chosen.items()]
    plotting.phase_portrait(
        torch.stack(states, 1),
        orbits,
        names=[f"{each}: period {P:.3f}" for each, P in periods.items()],
        energy=counterexample.energy,
    )
    orbits.set_title(r"$\dot y = J\,\tanh(y)$: larger orbits take longer")

    shown = growth[0] < SHOWN
    plotting.sensitivity_growth(growth[0][shown], growth[1][shown], line, slope=slope)
    line.set_title(f"From {name}: gradients grow linearly in $t$")

    along_p = float(torch.tanh(first)[0] / torch.tanh(first).norm())  # of the slope
    diameter = float(counterexample.diameter(first))
    plotting.perturbation_growth(curves, perturbed, slope=along_p * slope, diameter=diameter)
    perturbed.set_title(f"From {name}: finite perturbations")

    plotting.layer_growth(
        {f"$h k^2$ = {load:g}": found.sizes for load, found in layers.items()},
        stacks,
        rates=[found.exact for found in layers.values()],
    )
    stacks.set_title("H2 with one weight $k$, at the origin (lines: closed form)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(buffer := io.BytesIO(), dpi=130)
    # Few colours are enough, and make the file a third as large; Pillow comes with matplotlib.
    picture = require("PIL.Image", extra="plot").open(buffer).convert("RGB").quantize(128)
    picture.save(path, optimize=True)


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = "start | eps | H | period | off by | slope | closed form | off by"
    linear = (
        "{start} | {eps:g} | {energy:.4f} | {period[measured]:.10f} | "
        "{period[relative difference]:.1e} | {slope per eps t[measured]:.4f} | "
        "{slope per eps t[closed form]:.4f} | {slope per eps t[relative difference]:.1e}"
    )
    finite = "{gamma:g} | {largest:.2f} | {diameter over gamma:.2f}"
    exponential = "{h k^2:g} | {rate:.7f} | {closed form:.7f} | {largest norm:.4g} | {bound}"
    loads = [
        {**row, "bound": "none" if row["bound"] is None else f"{row['bound']:.4g}"}
        for row in result["exponential"]
    ]
    lines = [
        "# Exploding gradients: the two-dimensional example",
        "",
        f"`{result['command']}`, seed {result['seed']}, {versions}.",
        "",
        f"![Orbits, linear growth, finite perturbations, growth per layer]({NAME}.png)",
        "",
        "## Linear growth in continuous time",
        "",
        f"y' = eps J tanh(y), solved to eps t = {T:g}. Periods are measured, and how far they are",
        "off 4/eps K(m = 1 - exp(-2H)). The slope, for each unit of eps t, is that of the line",
        "through the local maxima of norm(dy(T)/dy(T - t)), and beside it the closed form.",
        "",
        *runner.table(head, result["linear"], linear),
        "",
        "## Finite perturbations",
        "",
        f"From {result['linear'][0]['start']}, moved by gamma along p: distance over gamma grows",
        f"to about D / gamma, D the diameter of the orbit (gamma t < {SPAN:g}).",
        "",
        *runner.table("gamma | largest | D / gamma", result["finite"], finite),
        "",
        "## Exponential growth with depth",
        "",
        f"H2 with n = 2, one weight k and h = {H:g}, {LAYERS} layers, at the origin. Where h k^2",
        "is above 2, log norm(dy_N/dy_j) grows by 2 acosh(h k^2 / 2) a layer. Below 2 the norms",
        "stay under sqrt((2 + h k^2) / (2 - h k^2)); at 2 they grow linearly.",
        "",
        *runner.table("h k^2 | rate | closed form | largest norm | bound", loads, exponential),
    ]
    return "\n".join([*lines, ""])


def figure(options: argparse.Namespace) -> dict[str, Any]:
    scipy = require("scipy", extra="science")
    require("matplotlib.figure", extra="plot")
    chosen = starts(options.seed)
    name, first = next(iter(chosen.items()))
    found = [linear(each, y) for each, y in chosen.items()] + [linear(name, first, SLOW)]
    curves, layers = finite(first), exponential()
    draw(chosen, found[0][1], curves, layers, options.out / f"{NAME}.png")
    diameter = float(counterexample.diameter(first))
    versions = {module.__name__: module.__version__ for module in (hdnn, torch, scipy)}
    return {
        "seed": options.seed,
        "versions": versions,
        "linear": [row for row, _ in found],
        "finite": [
            {"gamma": gamma, "largest": float(sizes.max()), "diameter over gamma": diameter / gamma}
            for gamma, (_, sizes) in curves.items()
        ],
        "exponential": [
            {
                "h k^2": load,
                "rate": found.rate,
                "closed form": found.exact,
                "largest norm": found.largest,
                "bound": found.bound if math.isfinite(found.bound) else None,  # JSON has no inf
            }
            for load, found in layers.items()
        ],
    }


def main(argv: list[str] | None = None) -> int:
    return runner.figure_arguments(__doc__, NAME).run(argv, figure, markdown, "seed")


if __name__ == "__main__":
    sys.exit(runner.guarded(main))
