"""An animation of agents as GIF, by Pillow: the picture of `svg.py`, frame by frame."""

from __future__ import annotations

import io
from typing import Any

from hdnn.app.agents.scene import ROW, TOP, WIDTH, Scene, colour_of
from hdnn.errors import require
from hdnn.plotting.agents import ink_on

FINE = 2  # frames are drawn so much larger, then made smaller: lines become smooth
FRAMES = 50  # at most: each of them is a whole picture
HOLD = 1500  # milliseconds for which the last frame stays
INK, FAINT, LINE = "#1a1a1a", "#444444", "#d8d8d8"


def animation(scene: Scene, seconds: float) -> bytes:
    """The whole file; one round of the animation takes so many seconds, and a pause."""
    image = require("PIL.Image", extra="images")
    frames = len(scene.panels[0].places)
    shown = [_frame(scene, k).quantize(128, dither=image.Dither.NONE) for k in range(frames)]
    each = max(20, round(1000 * seconds / frames, -1))
    written = io.BytesIO()
    shown[0].save(
        written,
        format="GIF",
        save_all=True,
        append_images=shown[1:],
        duration=[int(each)] * (frames - 1) + [HOLD],
        loop=0,
        disposal=1,
    )
    return written.getvalue()


def _frame(scene: Scene, number: int) -> Any:
    image, draws = (require(f"PIL.{name}", extra="images") for name in ("Image", "ImageDraw"))
    width, height = scene.size
    large = image.new("RGB", (FINE * width, FINE * height), "white")
    draw = draws.Draw(large)
    for k in range(len(scene.panels)):
        _panel(draw, scene, k, number)
    for k, note in enumerate(reversed(scene.notes)):
        _text(draw, 2, height - 11 - ROW * k, note, 12, FAINT, anchor="lm")
    return large.resize((width, height), image.Resampling.BOX)


def _panel(draw: Any, scene: Scene, k: int, number: int) -> None:
    panel, left = scene.panels[k], scene.left(k)
    _text(draw, left + 2, 13, panel.title, 15, INK, anchor="lm")
    _text(draw, left + 2, 32, panel.told, 13, INK, anchor="lm")
    box = [left, TOP, left + WIDTH - 1, TOP + scene.height - 1]
    draw.rectangle([FINE * v for v in box], outline=LINE, width=FINE)

    def at(point: Any) -> tuple[float, float]:
        return FINE * (left + float(point[0])), FINE * (TOP + float(point[1]))

    for i, target in enumerate(panel.targets):
        (x, y), arm = at(target), scene.arm * FINE
        for line in ((x - arm, y, x + arm, y), (x, y - arm, x, y + arm)):
            draw.line(line, fill=colour_of(i), width=2 * FINE)
    for i in range(panel.places.shape[1]):
        trail = [at(point) for point in panel.places[: number + 1, i]]
        if len(trail) > 1:
            draw.line(trail, fill=_pale(colour_of(i)), width=round(1.5 * FINE), joint="curve")
    for i, (place, hit) in enumerate(
        zip(panel.places[number], panel.clashes[number].tolist(), strict=True)
    ):
        (x, y), r = at(place), FINE * scene.radius
        style = {"outline": "black", "width": 2 * FINE} if hit else {"outline": "white"}
        draw.ellipse([x - r, y - r, x + r, y + r], fill=colour_of(i), **style)
        if scene.numbered:
            size = min(13.0, 1.2 * scene.radius)
            _text(draw, x / FINE, y / FINE, str(i), size, ink_on(colour_of(i)))
    done, y = number / (len(panel.places) - 1), FINE * (TOP + scene.height + 10)
    right = WIDTH - 40
    for share, ink in ((1.0, LINE), (done, FAINT)):
        line = (FINE * left, y, FINE * (left + share * right), y)
        draw.line(line, fill=ink, width=4 * FINE)
    _text(draw, left + right + 6, y / FINE, f"t = {scene.time:g}", 12, FAINT, anchor="lm")


def _text(
    draw: Any, x: float, y: float, text: str, size: float, ink: str, *, anchor: str = "mm"
) -> None:
    fonts = require("PIL.ImageFont", extra="images")
    font = fonts.load_default(FINE * size)
    draw.text((FINE * x, FINE * y), text, fill=ink, font=font, anchor=anchor)


def _pale(colour: str) -> tuple[int, ...]:
    """A colour at 60% on white, as trails have it."""
    return tuple(round(255 - 0.6 * (255 - int(colour[k : k + 2], 16))) for k in (1, 3, 5))
