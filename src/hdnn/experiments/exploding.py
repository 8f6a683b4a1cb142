"""The two-dimensional example of growing gradients, y' = eps J tanh(y) (eq:2D_Example).

Its period and the slope of its growth, measured and in closed form; finite perturbations, as in the
paper's figure (fig:phi_TTt_trajectories); and H2 layers whose gradients grow by a factor each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hdnn.analysis import counterexample, norms
from hdnn.experiments import runner
from hdnn.experiments.runner import Experiment
from hdnn.plotting import new_figure, phase_portrait
from hdnn.plotting.curves import STYLES, finish, level_one

STARTS = {"(1, 1)/√2": (0.5**0.5, 0.5**0.5), "(1, 0)": (1.0, 0.0)}
SLOW = 0.1  # an eps besides 1, for the first start: eps t alone counts
LONGEST = 200.0  # eps t of the linear growth
GAMMAS = (0.1, 0.02, 0.005)
SPAN = 16.0  # gamma t by which states gamma apart are on opposite sides
H = 0.5
LOADS = (1.0, 1.9, 2.0, 2.01, 2.1)  # h k^2


def linear(name: str, y: Tensor, eps: float = 1.0) -> dict[str, Any]:
    """Period and slope from one start, measured and in closed form, and the curve."""
    t = torch.arange(0, LONGEST, 0.02, dtype=torch.float64) / eps
    sizes = norms(counterexample.growth(y, t, eps))
    slope, _ = counterexample.fitted_envelope(t, sizes)
    return {
        "start": name,
        "eps": eps,
        "energy": float(counterexample.energy(y)),
        "period": counterexample.measured_period(y, eps),
        "exact period": float(counterexample.period(y, eps)),
        "slope": slope / eps,
        "exact slope": float(counterexample.envelope_slope(y)),
        "curve": (t, sizes),
    }


def figure(options: Any) -> dict[str, Any]:
    starts = {
        name: torch.tensor(y, dtype=torch.float64) for name, y in STARTS.items()
    }
    generator = torch.Generator().manual_seed(options.seed)
    drawn = torch.randn(2, generator=generator, dtype=torch.float64)
    starts[f"random ({drawn[0]:.2f}, {drawn[1]:.2f})"] = drawn
    name, first = next(iter(starts.items()))
    rows = [linear(start, y) for start, y in starts.items()]
    rows.append(linear(name, first, SLOW))
    perturbed = {}
    for gamma in GAMMAS:
        t = torch.arange(0, SPAN / gamma, 0.5, dtype=torch.float64)
        perturbed[gamma] = (
            t,
            counterexample.finite_growth(first, t, gamma)[:, 0],
        )
    layers = {
        load: counterexample.layer_growth(H, math.sqrt(load / H))
        for load in LOADS
    }
    curves = [row.pop("curve") for row in rows]
    picture = draw(starts, curves[0], rows[0]["exact slope"], perturbed, layers)
    diameter = float(counterexample.diameter(first))
    growth = []
    for load, values in layers.items():
        row = {"h k^2": load, "rate": values.rate, "exact": values.exact}
        bound = values.bound if math.isfinite(values.bound) else None
        growth.append({**row, "largest": values.largest, "bound": bound})
    finite = []
    for gamma, (_, sizes) in perturbed.items():
        finite.append([gamma, float(sizes.max()), diameter / gamma])
    return {
        "seed": options.seed,
        "picture": runner.save_figure(
            picture, options.out / f"{options.name}.png"
        ),
        "linear": rows,
        "finite": finite,
        "exponential": growth,
    }


def draw(
    starts: dict[str, Tensor],
    growth: tuple[Tensor, Tensor],
    slope: float,
    perturbed: dict[float, tuple[Tensor, Tensor]],
    layers: dict[float, Any],
) -> Any:
    """Orbits, linear growth, finite perturbations and exponential growth, in four panels."""
    picture = new_figure(10.0, 8.4)
    orbits, line, finite, stacks = picture.subplots(2, 2).flat
    turn = torch.linspace(0, 1, 401, dtype=torch.float64)
    states = []
    names = []
    for name, y in starts.items():
        period = float(counterexample.period(y))
        states.append(
            counterexample.example(period).trajectory(y, turn * period)
        )
        names.append(f"{name}: period {period:.3f}")
    energy = counterexample.energy
    phase_portrait(torch.stack(states, 1), orbits, names=names, energy=energy)
    orbits.set_title(r"$\dot y = J\,\tanh(y)$: larger orbits take longer")

    t, sizes = growth
    line.plot(t, sizes, color=STYLES[0]["color"], label="norm")
    line.plot(
        t,
        slope * t,
        color=STYLES[1]["color"],
        linestyle="--",
        label=f"{slope:.3f} $t$",
    )
    level_one(line)
    finish(
        line,
        2,
        xlim=(0, 80),
        ylim=(0, 40),
        xlabel="$t$",
        title="Gradients grow linearly in $t$",
    )

    for style, (gamma, (t, sizes)) in zip(
        STYLES, perturbed.items(), strict=False
    ):
        colour = style["color"]
        finite.plot(
            t[1:], sizes[1:], color=colour, label=rf"$\gamma$ = {gamma:g}"
        )
    finish(
        finite,
        3,
        xscale="log",
        yscale="log",
        xlabel="$t$",
        title="Finite perturbations",
    )

    for style, (load, values) in zip(STYLES, layers.items(), strict=False):
        stacks.plot(
            values.sizes, color=style["color"], label=f"$h k^2$ = {load:g}"
        )
    level_one(stacks)
    title = "H2 with one weight $k$, at the origin"
    finish(stacks, 3, yscale="log", xlabel="layers $N - j$", title=title)
    return picture


def found(result: dict[str, Any]) -> str:
    slopes = [abs(r["slope"] / r["exact slope"] - 1) for r in result["linear"]]
    loads = [r["h k^2"] for r in result["exponential"] if r["exact"] > 0]
    return (
        f"linear growth in the paper's example, slopes within {100 * max(slopes):.1f}% of the "
        f"closed form; exponential from h k^2 = {min(loads):g} on"
    )


def page(result: dict[str, Any]) -> str:
    linear_rows = []
    for row in result["linear"]:
        off = abs(row["period"] / row["exact period"] - 1)
        start = [
            row["start"],
            f"{row['eps']:g}",
            f"{row['energy']:.4f}",
            f"{row['period']:.10f}",
        ]
        linear_rows.append(
            [
                *start,
                f"{off:.1e}",
                f"{row['slope']:.4f}",
                f"{row['exact slope']:.4f}",
            ]
        )
    finite_rows = [[f"{value:g}" for value in row] for row in result["finite"]]
    growth_rows = []
    for row in result["exponential"]:
        bound = "none" if row["bound"] is None else f"{row['bound']:.4g}"
        rates = [f"{row['rate']:.7f}", f"{row['exact']:.7f}"]
        growth_rows.append(
            [f"{row['h k^2']:g}", *rates, f"{row['largest']:.4g}", bound]
        )
    linear_head = [
        "start",
        "eps",
        "H",
        "period",
        "off by",
        "slope",
        "closed form",
    ]
    finite_head = ["gamma", "largest", "D / gamma"]
    growth_head = ["h k^2", "rate", "closed form", "largest norm", "bound"]
    lines = [
        "# Exploding gradients: the two-dimensional example",
        "",
        f"`{result['command']}`, seed {result['seed']}.",
        "",
        f"![Orbits, linear growth, finite perturbations, growth by layer]({result['picture']})",
        "",
        f"y' = eps J tanh(y), solved to eps t = {LONGEST:g}. Periods are measured, and how far",
        "they are off 4/eps K(m = 1 - exp(-2H)). The slope, for each unit of eps t, is that of the",
        "line through the local maxima of norm(dy(T)/dy(T - t)), beside its closed form.",
        "",
        *runner.markdown_table(linear_head, linear_rows),
        "",
        "Moved by gamma along p, the distance over gamma grows to about D / gamma, D the diameter",
        "of the orbit.",
        "",
        *runner.markdown_table(finite_head, finite_rows),
        "",
        f"H2 with n = 2, one weight k and h = {H:g}, 64 layers, at the origin. Where h k^2 is",
        "above 2, log norm(dy_N/dy_j) grows by 2 acosh(h k^2 / 2) a layer. Below 2 the norms stay",
        "under sqrt((2 + h k^2) / (2 - h k^2)).",
        "",
        *runner.markdown_table(growth_head, growth_rows),
    ]
    return "\n".join(lines) + "\n"


EXPERIMENTS = {
    "fig-exploding": Experiment(
        "The two-dimensional example of growing gradients.",
        {"seed": 0},
        figure,
        page,
        found,
    ),
}
