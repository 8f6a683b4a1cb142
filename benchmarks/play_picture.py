"""The moving picture of the playground in the README: docs/results/play.webp.

python benchmarks/play_picture.py

Needs a Chromium, on the PATH or named in CHROMIUM, and Pillow.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from hdnn.app import play

OUT = Path("docs/results/play.webp")
SIZE = {"width": 1280, "height": 660}
FRAMES = 24
PAUSE = 250  # ms between two frames
WIDTH = 800  # pixels of the picture


def picture(page: Page) -> Image.Image:
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return shot.resize((WIDTH, WIDTH * shot.height // shot.width))


def main() -> int:
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        sys.stderr.write(
            "no Chromium: put one on the PATH, or name it in CHROMIUM\n"
        )
        return 2
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        path = Path(folder, "play.html")
        path.write_text(play.page(), encoding="utf-8")
        browser = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox"]
        )
        page = browser.new_page(viewport=SIZE)
        page.goto(path.as_uri() + "#layers=64&rate=0.03")
        page.locator("#left-accuracy", has_text="%").wait_for()
        frames = []
        for _ in range(FRAMES):
            frames.append(picture(page))
            page.wait_for_timeout(PAUSE)
        browser.close()
    times = [PAUSE] * (FRAMES - 1) + [3000]
    frames[0].save(
        OUT,
        save_all=True,
        append_images=frames[1:],
        duration=times,
        loop=0,
        quality=60,
    )
    sys.stdout.write(f"{OUT}: {OUT.stat().st_size // 1024} kB\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
