"""An animation of agents as SVG: text alone, which plays by itself and needs no script.

Readers who want no motion, and paper, get the last moment with the whole paths, and so do
programs that show no animations.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from torch import Tensor

from hdnn.app.agents.scene import ROW, TOP, WIDTH, Panel, Scene, colour_of
from hdnn.plotting.agents import NUMBERED, ink_on

HOLD = 0.15  # of the frames, for which the last one is shown before all begins again
STYLE = """<style>
.agents text { font: 13px system-ui, sans-serif; fill: #1a1a1a; }
.agents .title { font-weight: 600; font-size: 15px; }
.agents .small { font-size: 12px; fill: #444; }
.agents .number { font-weight: 600; text-anchor: middle; dominant-baseline: central; }
.agents .still { display: none; }
@media (prefers-reduced-motion: reduce) {
  .agents .still { display: inline; } .agents .moving { display: none; }
}
@media print { .agents .still { display: inline; } .agents .moving { display: none; } }
</style>
"""


def animation(scene: Scene, seconds: float) -> str:
    """The whole file; one round of the animation takes so many seconds."""
    return _file(scene, [_panel(scene, k, seconds) for k in range(len(scene.panels))])


def still(scene: Scene) -> str:
    """The last moment, with the whole paths."""
    return _file(scene, [_panel(scene, k, None) for k in range(len(scene.panels))])


def _file(scene: Scene, panels: list[str]) -> str:
    width, height = scene.size
    titles = ", ".join(f"{panel.title.lower()} ({panel.told})" for panel in scene.panels)
    count = scene.panels[0].places.shape[1]
    about = f"{count} agent{'s' * (count != 1)} on the way to their targets: {titles}"
    lines = enumerate(reversed(scene.notes))
    notes = [
        f'<text class="small" x="2" y="{height - 5 - ROW * k}">{escape(note)}</text>\n'
        for k, note in lines
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="agents" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img"><title>{escape(about)}</title>\n',
        STYLE,
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n',
        *panels,
        *notes,
        "</svg>\n",
    ]
    return "".join(parts)


def _panel(scene: Scene, number: int, seconds: float | None) -> str:
    """A panel, moving or at its end."""
    panel, high = scene.panels[number], scene.height
    shown = [
        f'<g transform="translate({scene.left(number)} 0)">\n'
        f'<text class="title" x="2" y="18">{escape(panel.title)}</text>\n'
        f'<text x="2" y="37">{escape(panel.told)}</text>\n'
        f'<g transform="translate(0 {TOP})">\n'
        f'<rect x=".5" y=".5" width="{WIDTH - 1}" height="{high - 1}" fill="none" '
        'stroke="#d8d8d8"/>\n'
    ]
    shown += [
        _cross(x, y, scene.arm, colour_of(i)) for i, (x, y) in enumerate(panel.targets.tolist())
    ]
    if seconds is None:
        shown += [*_agents(scene, panel, None), *_rings(scene, panel)]
    else:
        end = [*_agents(scene, panel, None), *_rings(scene, panel)]
        shown += ['<g class="still">\n', *end, "</g>\n"]
        shown += ['<g class="moving">\n', *_agents(scene, panel, seconds)]
        shown += [_clock(scene, len(panel.places), seconds), "</g>\n"]
    return "".join([*shown, "</g></g>\n"])


def _cross(x: float, y: float, arm: float, colour: str) -> str:
    across, up = (f"{2 * arm:.1f}", f"M{x:.1f} {y - arm:.1f}v{2 * arm:.1f}")
    return (
        f'<path d="M{x - arm:.1f} {y:.1f}h{across}{up}" stroke="{colour}" '
        'stroke-width="2" fill="none"/>\n'
    )


def _agents(scene: Scene, panel: Panel, seconds: float | None) -> list[str]:
    """The trails of all agents, then their discs on top."""
    count = panel.places.shape[1]
    fine = panel.path if count <= NUMBERED else panel.places
    trails, discs = [], []
    for i in range(count):
        trails.append(_trail(fine[:, i], panel.shares[:, i], colour_of(i), seconds))
        discs.append(_disc(scene, panel, i, seconds))
    return trails + discs


def _rings(scene: Scene, panel: Panel) -> list[str]:
    """Where each agent that collides does so first."""
    found = []
    for hit, places in zip(panel.clashes.mT, panel.places.transpose(0, 1), strict=True):
        if bool(hit.any()):
            x, y = places[int(hit.int().argmax())].tolist()
            found.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{scene.radius:.1f}" fill="none" '
                'stroke="#000000" stroke-width="2"/>\n'
            )
    return found


def _trail(path: Tensor, shares: Tensor, colour: str, seconds: float | None) -> str:
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in path.tolist())
    line = (
        f'<path d="M{points}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-opacity=".6"'
    )
    if seconds is None:
        return f"{line}/>\n"
    grown = _animate("stroke-dashoffset", (f"{1 - s:.3f}" for s in shares.tolist()), seconds)
    return f'{line} pathLength="1" stroke-dasharray="1 1">{grown}</path>\n'


def _disc(scene: Scene, panel: Panel, agent: int, seconds: float | None) -> str:
    colour, radius = colour_of(agent), scene.radius
    places = [f"{x:.1f} {y:.1f}" for x, y in panel.places[:, agent].tolist()]
    hit = panel.clashes[:, agent].tolist()
    rings = [("#000000", "3") if now else ("#ffffff", "1") for now in hit]
    move = pulse = ""
    if seconds is not None:
        kind = 'type="translate" '
        move = _animate("transform", places, seconds, "animateTransform", kind)
        if any(hit):
            jumps = 'calcMode="discrete" '
            pulse = _animate("stroke", (c for c, _ in rings), seconds, extra=jumps)
            pulse += _animate("stroke-width", (w for _, w in rings), seconds, extra=jumps)
    ink, thick = rings[-1]
    disc = (
        f'<g transform="translate({places[-1]})">{move}<circle r="{radius:.1f}" fill="{colour}" '
        f'fill-opacity=".9" stroke="{ink}" stroke-width="{thick}">{pulse}</circle>'
    )
    if scene.numbered:
        size = min(13.0, 1.2 * radius)
        disc += (
            f'<text class="number" style="font-size:{size:.1f}px;fill:{ink_on(colour)}">'
            f"{agent}</text>"
        )
    return f"{disc}</g>\n"


def _clock(scene: Scene, frames: int, seconds: float) -> str:
    """A line below the panel that grows with the time."""
    y, right = scene.height + 10, WIDTH - 40
    ends = (f"{right * k / (frames - 1):.1f}" for k in range(frames))
    grown = _animate("x2", ends, seconds)
    return (
        f'<path d="M0 {y}H{right}" stroke="#d8d8d8" stroke-width="4"/>'
        f'<line x1="0" y1="{y}" x2="{right}" y2="{y}" stroke="#444" stroke-width="4">{grown}</line>'
        f'<text class="small" x="{right + 6}" y="{y + 4}">t = {scene.time:g}</text>\n'
    )


def _animate(
    name: str, values: Iterable[str], seconds: float, tag: str = "animate", extra: str = ""
) -> str:
    """One attribute that goes through values, stays at the last one, and begins again."""
    shown = [*values]
    shown += [shown[-1]] * max(1, round(HOLD * len(shown)))
    return (
        f'<{tag} attributeName="{name}" {extra}values="{";".join(shown)}" dur="{seconds:g}s" '
        'repeatCount="indefinite"/>'
    )
