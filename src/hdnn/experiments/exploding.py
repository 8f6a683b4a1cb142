"""The two-dimensional example of growing gradients, y' = eps J tanh(y) (eq:2D_Example).

The period and the slope of the growth, measured and in closed form; finite perturbations, as in the
paper's figure (fig:phi_TTt_trajectories); and H2 layers that each multiply gradients by a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hdnn.analysis import counterexample, norms
from hdnn.experiments import runner
from hdnn.experiments.runner import Experiment, Result
from hdnn.plotting import BLUE, RED, new_figure, phase_portrait
from hdnn.plotting.curves import STYLES, finish, level_one

STARTS = {"(1, 1)/√2": (0.5**0.5, 0.5**0.5), "(1, 0)": (1.0, 0.0)}
SLOW = 0.1  # an eps besides 1, for the first start: eps t alone counts
LONGEST = 200.0  # eps t of the linear growth
GAMMAS = (0.1, 0.02, 0.005)
SPAN = 16.0  # gamma t by which states gamma apart are on opposite sides
H = 0.5
LOADS = (1.0, 1.9, 2.0, 2.01, 2.1)  # h k^2

LINEAR = f"""
The equation is y' = eps J tanh(y), solved up to eps t = {LONGEST:g}. The error of a measured period
is relative to 4/eps K(m) at m = 1 - exp(-2H), where K(m) is the complete elliptic integral of the
first kind. The slope, per unit of eps t, is that of the line through the local maxima of
norm(dy(T)/dy(T - t)), beside its closed form.
"""
FINITE = """
For two states gamma apart along p, the distance divided by gamma grows to about D / gamma,
where D is the diameter of the orbit.
"""
LAYERS = f"""
The last table is for an H2 with n = 2, one weight k, h = {H:g} and 64 layers, at the origin.
If h k^2 is above 2, log norm(dy_N/dy_j) grows by 2 acosh(h k^2 / 2) per layer. If h k^2 is
below 2, the norms stay below sqrt((2 + h k^2) / (2 - h k^2)).
"""
LINEAR_COLUMNS = {
    "start": "{start}",
    "eps": "{eps:g}",
    "H": "{energy:.4f}",
    "period": "{period:.10f}",
    "error": "{off:.1e}",
    "slope": "{slope:.4f}",
    "closed form": "{exact slope:.4f}",
}
FINITE_COLUMNS = {
    "gamma": "{gamma:g}",
    "largest": "{largest:g}",
    "D / gamma": "{limit:g}",
}
LAYERS_COLUMNS = {
    "h k^2": "{h k^2:g}",
    "rate": "{rate:.7f}",
    "closed form": "{exact:.7f}",
    "largest norm": "{largest:.4g}",
    "bound": "{bound:.4g}",
}


def linear(ax: Any, name: str, y: Tensor, eps: float = 1.0) -> dict[str, Any]:
    """Period and slope from one start, measured and in closed form; the first is drawn."""
    t = torch.arange(0, LONGEST, 0.02, dtype=torch.float64) / eps
    sizes = norms(counterexample.growth(y, t, eps))
    slope, _ = counterexample.fitted_envelope(t, sizes)
    period = counterexample.measured_period(y, eps)
    exact = float(counterexample.period(y, eps))
    exact_slope = float(counterexample.envelope_slope(y))
    if not ax.lines:
        line = exact_slope * t
        ax.plot(t, sizes, color=BLUE, label="norm")
        ax.plot(t, line, "--", color=RED, label=f"{exact_slope:.3f} $t$")
        level_one(ax)
        ax.set(xlim=(0, 80), ylim=(0, 40))
        finish(ax, 2, xlabel="$t$", title="Gradients grow linearly in $t$")
    return {
        "start": name,
        "eps": eps,
        "energy": float(counterexample.energy(y)),
        "period": period,
        "exact period": exact,
        "off": abs(period / exact - 1),
        "slope": slope / eps,
        "exact slope": exact_slope,
    }


def finite(ax: Any, y: Tensor) -> list[dict[str, float]]:
    """The distance, divided by gamma, of two states that start gamma apart."""
    diameter = float(counterexample.diameter(y))
    rows = []
    for style, gamma in zip(STYLES, GAMMAS, strict=False):
        t = torch.arange(0, SPAN / gamma, 0.5, dtype=torch.float64)
        sizes = counterexample.finite_growth(y, t, gamma)[:, 0]
        label = rf"$\gamma$ = {gamma:g}"
        ax.loglog(t[1:], sizes[1:], color=style["color"], label=label)
        row = {"gamma": gamma, "largest": float(sizes.max())}
        rows.append({**row, "limit": diameter / gamma})
    finish(ax, 3, xlabel="$t$", title="Finite perturbations")
    return rows


def exponential(ax: Any) -> list[dict[str, float]]:
    """The growth through H2 layers with one weight."""
    rows = []
    for style, load in zip(STYLES, LOADS, strict=False):
        growth = counterexample.layer_growth(H, math.sqrt(load / H))
        label = f"$h k^2$ = {load:g}"
        ax.semilogy(growth.sizes, color=style["color"], label=label)
        row = {
            "h k^2": load,
            "rate": growth.rate,
            "exact": growth.exact,
            "largest": growth.largest,
            "bound": growth.bound,
        }
        rows.append(row)
    level_one(ax)
    title = "H2 with one weight $k$, at the origin"
    finish(ax, 3, xlabel="layers $N - j$", title=title)
    return rows


def draw_orbits(ax: Any, starts: Mapping[str, Tensor]) -> None:
    turn = torch.linspace(0, 1, 401, dtype=torch.float64)
    states = []
    names = []
    for name, y in starts.items():
        period = float(counterexample.period(y))
        example = counterexample.example(period)
        states.append(example.trajectory(y, turn * period))
        names.append(f"{name}: period {period:.3f}")
    energy = counterexample.energy
    phase_portrait(torch.stack(states, 1), ax, names=names, energy=energy)
    ax.set_title(r"$\dot y = J\,\tanh(y)$: larger orbits take longer")


def figure(options: Any) -> Result:
    starts = {}
    for name, y in STARTS.items():
        starts[name] = torch.tensor(y, dtype=torch.float64)
    generator = torch.Generator().manual_seed(options.seed)
    drawn = torch.randn(2, generator=generator, dtype=torch.float64)
    starts[f"random ({drawn[0]:.2f}, {drawn[1]:.2f})"] = drawn
    name, first = next(iter(starts.items()))

    picture = new_figure(10.0, 8.4)
    orbits, line, distances, layers = picture.subplots(2, 2).flat
    draw_orbits(orbits, starts)
    rows = [linear(line, start, y) for start, y in starts.items()]
    rows.append(linear(line, name, first, SLOW))
    perturbed = finite(distances, first)
    growth = exponential(layers)
    file = runner.save_figure(picture, options)

    slopes = [abs(row["slope"] / row["exact slope"] - 1) for row in rows]
    least = min(row["h k^2"] for row in growth if row["exact"] > 0)
    finding = (
        f"linear growth in the paper's example, slopes within {100 * max(slopes):.1f}% of the "
        f"closed form; exponential growth from h k^2 = {least:g} on"
    )
    alt = "Orbits, linear growth, finite perturbations, growth by layer"
    page = [
        f"`{options.command}`, seed {options.seed}.",
        "",
        f"![{alt}]({file})",
        LINEAR,
        *runner.markdown_table(LINEAR_COLUMNS, rows),
        FINITE,
        *runner.markdown_table(FINITE_COLUMNS, perturbed),
        LAYERS,
        *runner.markdown_table(LAYERS_COLUMNS, growth),
    ]
    facts = {
        "seed": options.seed,
        "picture": file,
        "linear": rows,
        "finite": perturbed,
        "exponential": growth,
    }
    title = "Exploding gradients in two dimensions"
    return Result(title, finding, facts, page)


EXPERIMENTS = {
    "fig-exploding": Experiment(
        "The two-dimensional example of growing gradients.",
        {"seed": 0},
        figure,
    ),
}
