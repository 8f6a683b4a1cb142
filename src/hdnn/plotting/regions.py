"""States in the plane: decision regions, paths through the layers, orbits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hdnn.data.planar import PlanarData
from hdnn.errors import ShapeError
from hdnn.plotting.figures import BLACK, CLASSES, STYLES, axes_of, finished

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hdnn.model import Model


def decision_regions(
    model: Model, data: PlanarData, ax: Axes | None = None, *, points: int = 1000, grid: int = 300
) -> Axes:
    """Colour the plane by the class that a model predicts, with test points on it.

    Args:
        model: a `hdnn.Model` of two inputs and two classes.
        data: one of the planar sets of `hdnn.data.planar`.
        ax: the Axes to draw into; by default those of a new figure.
        points: the most test points that are drawn.
        grid: how many predictions make up each side of the plane.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ShapeError: if the model does not take two inputs.

    Examples:
        >>> import hdnn
        >>> data = hdnn.data.planar.double_moons(200)
        >>> model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 8), hdnn.SigmoidHead(4))
        >>> history = hdnn.training.fit(model, data.x_train, data.t_train, epochs=2, progress=False)
        >>> ax = hdnn.plotting.decision_regions(model, data, grid=60)
        >>> ax.get_title()
        'Double moons: test points on the predicted classes'
    """
    (left, right), (low, high) = data.domain
    ax = axes_of(ax, 5.2, 1.1 + 4.2 * (high - low) / (right - left))
    parameter = next(model.parameters())
    xs, ys = torch.linspace(left, right, grid), torch.linspace(low, high, grid)
    plane = torch.cartesian_prod(xs, ys).to(parameter)
    # Probabilities, not labels: the boundary between grid points is then smooth.
    one = model.predict_proba(plane)[:, 1].reshape(grid, grid).T.cpu().double()
    colours = [colour for colour, _ in CLASSES]
    ax.contourf(xs, ys, one, levels=[-0.5, 0.5, 1.5], colors=colours, alpha=0.25)
    if one.min() < 0.5 < one.max():
        ax.contour(xs, ys, one, levels=[0.5], colors=BLACK, linewidths=0.8)
    x, t = data.x_test[:points], data.t_test[:points]
    wrong = model.predict(x.to(parameter)).to(t.device) != t
    for label, (colour, marker) in enumerate(CLASSES):
        _points(ax, x[t == label], colour, marker, f"class {label}", size=3)
    if bool(wrong.any()):
        _points(ax, x[wrong], BLACK, "x", f"wrong ({int(wrong.sum())} of {len(t)})", size=5)
    ax.set(xlim=(left, right), ylim=(low, high), aspect="equal")
    title = f"{data.name.replace('_', ' ').capitalize()}: test points on the predicted classes"
    return finished(ax, 3, markerscale=2, xlabel="$x_1$", ylabel="$x_2$", title=title)


def trajectories(
    states: Tensor,
    ax: Axes | None = None,
    *,
    features: tuple[int, int] = (0, -1),
    labels: Tensor | None = None,
) -> Axes:
    """Draw the paths `y_0 .. y_N` of samples in the plane of two features.

    Args:
        states: (N+1, B, n), as `net.trajectory(y)` and `model.trajectory(x)` give them.
        ax: the Axes to draw into; by default those of a new figure.
        features: which two are drawn, by default the first and the last.
        labels: 0 or 1 for each sample (B,), for two colours.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ShapeError: if the states are not (N+1, B, n), or if there are no such features.

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=4, layers=16)
        >>> ax = hdnn.plotting.trajectories(net.trajectory(torch.randn(10, 4)))
        >>> ax.get_title(), len(ax.lines)
        ('States through 16 layers', 10)
    """
    if states.ndim != 3:
        raise ShapeError(
            f"states must be (N+1, B, n), the trajectory of B samples, but got "
            f"{tuple(states.shape)}; see model.trajectory(x)."
        )
    n = states.shape[-1]
    if len(features) != 2 or not all(-n <= i < n for i in features):
        raise ShapeError(f"features must be two of 0 .. {n - 1}, but got {features}.")
    ax = axes_of(ax, 5.2, 4.8)
    a, b = (range(n)[i] for i in features)
    paths = states.detach().cpu()
    classes = torch.zeros(paths.shape[1]) if labels is None else labels.cpu()
    for label, (colour, marker) in enumerate(CLASSES):
        x, y = (paths[:, classes == label, feature] for feature in (a, b))
        if not x.shape[1]:
            continue
        ax.plot(x.tolist(), y.tolist(), color=colour, lw=0.6, alpha=0.5)
        name = "$y_N$" if labels is None else f"$y_N$, class {label}"
        ends = {"s": 14, "color": colour, "marker": marker, "label": name, "zorder": 3}
        ax.scatter(x[-1].tolist(), y[-1].tolist(), **ends)
    title = f"States through {len(paths) - 1} layers"
    return finished(ax, 2, xlabel=f"$y_{{{a + 1}}}$", ylabel=f"$y_{{{b + 1}}}$", title=title)


def phase_portrait(
    states: Tensor,
    ax: Axes | None = None,
    *,
    names: Sequence[str] | None = None,
    energy: Callable[[Tensor], Tensor] | None = None,
) -> Axes:
    """Draw orbits in the plane of p and q: a mark where each starts, an arrow on its way.

    Args:
        states: (k, B, 2), B orbits of k states each.
        ax: the Axes to draw into; by default those of a new figure.
        names: of the orbits, for the legend.
        energy: a function of states `(*batch, 2)`, whose level lines are added.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ShapeError: if the states are not (k, B, 2).

    Examples:
        >>> import hdnn, torch
        >>> net = hdnn.H2(features=2, layers=50)
        >>> states = net.trajectory(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
        >>> ax = hdnn.plotting.phase_portrait(states, names=["inner", "outer"])
        >>> ax.get_legend_handles_labels()[1]
        ['inner', 'outer']
    """
    if states.ndim != 3 or states.shape[-1] != 2 or not all(states.shape):
        raise ShapeError(f"states must be (k, B, 2), B orbits, but got {tuple(states.shape)}.")
    ax = axes_of(ax, 4.6, 4.8)
    for i, orbit in enumerate(states.detach().cpu().double().unbind(1)):
        style = STYLES[i % len(STYLES)]
        name = f"orbit {i + 1}" if names is None else names[i]
        p, q = orbit.T.tolist()
        ax.plot(p, q, **style, markevery=[0], lw=1.5, markersize=6, label=name)
        at = len(p) // 5
        then = min(at + 1, len(p) - 1)
        arrow = {"arrowstyle": "-|>", "color": style["color"], "mutation_scale": 14}
        ax.annotate("", xy=(p[then], q[then]), xytext=(p[at], q[at]), arrowprops=arrow)
    if energy is not None:
        reach = 1.15 * float(states.abs().max())
        side = torch.linspace(-reach, reach, 121, dtype=torch.float64)
        H = energy(torch.cartesian_prod(side, side)).reshape(121, 121).T
        ax.contour(side, side, H, levels=12, colors=BLACK, alpha=0.18, linewidths=0.7)
    return finished(ax, 1, aspect="equal", xlabel="$p$", ylabel="$q$", title="Orbits")


def _points(ax: Axes, x: Tensor, colour: str, marker: str, label: str, size: float) -> None:
    edge = 1.2 if marker == "x" else 0.0
    style = {"marker": marker, "markersize": size, "markeredgewidth": edge}
    ax.plot(*x.cpu().double().T.tolist(), linestyle="", color=colour, label=label, **style)
