"""The playground in a browser: training, drawing, files, links, keyboard, small screens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import axe as axe_core
import hdnn
from chromium import browser as browser
from chromium import needs_chromium, visits
from hdnn.app.play import build

pytestmark = needs_chromium
CELLS = 100  # of a picture at rest, along each side
EDGE = 1.2 * 1.08  # of the picture of the Swiss roll
QUICK = "layers=4&points=400&seed=1"
SETTINGS = {
    "left": "verlet",
    "right": "ms1",
    "data": "double_moons",
    "activation": "softplus",
    "optimiser": "sgd",
    "layers": "17",
    "noise": "0.21",
    "T": "1.75",
    "rate": "0.0125",
    "points": "333",
    "batch": "31",
    "features": "6",
    "seed": "42",
}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("play") / "page.html"
    path.write_text(build.page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def visit(browser, address):
    """Opens the page with settings."""
    with visits(browser, address) as opens:

        def visited(settings: str = "", **options: Any):
            return opens(f"{address}#{settings}", **options)

        yield visited


def steps(page) -> int:
    return int(re.match(r"Step ([\d,]+)", page.inner_text("#status"))[1].replace(",", ""))


def wait_for_step(page, step: int) -> None:
    expression = r"n => Number(/Step ([\d,]+)/.exec(status())[1].replaceAll(',', '')) >= n"
    inside = expression.replace("status()", "document.getElementById('status').textContent")
    page.wait_for_function(inside, arg=step)


def wait_for_text(page, place: str, words: str, seconds: int = 30) -> None:
    inside = "([s, w]) => document.querySelector(s).textContent.includes(w)"
    page.wait_for_function(inside, arg=[place, words], timeout=1000 * seconds)


def wait_for_silence(page) -> None:
    page.wait_for_function("() => document.querySelector('#notice').textContent === ''")


def number(page, place: str) -> float:
    return float(page.inner_text(place).rstrip("%"))


def drop(page, name: str, text: str) -> None:
    made = """([name, text]) => {
        const data = new DataTransfer();
        data.items.add(new File([text], name));
        return data;
    }"""
    page.dispatch_event("body", "drop", {"dataTransfer": page.evaluate_handle(made, [name, text])})


def drag(page, *places: tuple[float, float]) -> None:
    """A stroke in the left picture, through places given as fractions of it."""
    page.locator("#left-regions").scroll_into_view_if_needed()
    box = page.locator("#left-regions").bounding_box()
    points = [(box["x"] + a * box["width"], box["y"] + d * box["height"]) for a, d in places]
    page.mouse.move(*points[0])
    page.mouse.down()
    for point in points[1:]:
        page.mouse.move(*point, steps=12)
    page.mouse.up()


def read_off(page, side: str, column: int, row: int) -> float:
    """The probability of class 1 that is shown for a cell of a picture, in per cent."""
    canvas = page.locator(f"#{side}-regions")
    size = canvas.evaluate("c => [c.clientWidth, c.clientHeight, c.clientLeft]")
    places = [(cell + 0.5) / CELLS * size[i] + size[2] for i, cell in enumerate((column, row))]
    canvas.hover(position={"x": places[0], "y": places[1]})
    wait_for_text(page, "#regions-read", "probability")
    said = re.search(r"probability: \S+ ([\d.]+)%, \S+ ([\d.]+)%", page.inner_text("#regions-read"))
    return float(said[1 if side == "left" else 2])


def check_same(page, side: str, model: hdnn.Model) -> None:
    """The page shows what the model says, as exactly as it is shown."""
    for column, row in [(5, 90), (31, 40), (50, 50), (62, 21), (77, 70), (95, 12)]:
        x = (2 * (column + 0.5) / CELLS - 1) * EDGE
        y = (1 - 2 * (row + 0.5) / CELLS) * EDGE
        given = torch.tensor([[x, y]], dtype=torch.float64)
        expected = 100 * float(model.double().predict_proba(given)[0, 1])
        # A per cent that is less than all is not shown as all.
        assert abs(read_off(page, side, column, row) - expected) < 0.101


def test_h2_learns_the_swiss_roll_while_the_gradients_of_the_mlp_vanish(visit):
    page = visit()
    assert page.inner_text("#status").startswith("Step 0")
    page.click("#start")
    wait_for_text(page, "#start", "Pause")
    wait_for_text(page, "#left-accuracy", "100.0%", seconds=60)
    speed = float(re.search(r"([\d.e]+) steps a second", page.inner_text("#status"))[1])
    assert speed >= 20
    page.click("#start")
    wait_for_text(page, "#status", "paused")
    assert number(page, "#left-smallest") >= 1
    assert number(page, "#right-smallest") < 1e-6
    assert "smallest" in page.get_attribute("#norms", "aria-label")
    page.hover("#norms")
    wait_for_text(page, "#norms-read", "Layer")
    smallest = re.findall(r"(?:H2|MLP) ([\d.e-]+)", page.inner_text("#norms-read"))
    assert float(smallest[0]) >= 1 > float(smallest[1])


def test_pause_one_step_and_reset(visit):
    page = visit(QUICK)
    page.click("#start")
    wait_for_step(page, 10)
    page.click("#start")
    wait_for_text(page, "#status", "paused")
    page.click("#once")
    page.click("#once")
    # The last picture is at rest, where no step comes after it.
    wait_for_text(page, "#start", "Start")
    before = steps(page)
    page.click("#once")
    wait_for_step(page, before + 1)
    page.click("#reset")
    wait_for_text(page, "#status", "Step 0")
    assert page.inner_text("#start") == "Start"


def test_every_network_activation_and_step_rule_takes_steps(visit):
    page = visit(QUICK)
    for name in ("left", "activation", "optimiser", "data"):
        offered = page.eval_on_selector_all(
            f"#{name} option:not(:disabled)", "all => all.map(one => one.value)"
        )
        for value in [one for one in offered if one != "drawn"]:
            page.select_option(f"#{name}", value)
            wait_for_text(page, "#status", "Step 0")
            page.wait_for_function("v => location.hash.includes(v)", arg=f"{name}={value}")
            page.click("#once")
            wait_for_step(page, 1)
            assert page.inner_text("#notice") == ""


def test_drawn_points_are_learnt_and_more_can_be_added_on_the_way(visit):
    page = visit("layers=8")
    page.select_option("#data", "drawn")
    wait_for_text(page, "#notice", "both classes")
    page.click("#start")
    assert page.inner_text("#start") == "Start"
    drag(page, (0.1, 0.2), (0.4, 0.2))
    page.check("input[name=class][value='1']")
    drag(page, (0.6, 0.8), (0.9, 0.8))
    wait_for_text(page, "#status", "points to learn")
    page.click("#start")
    wait_for_text(page, "#left-accuracy", "100.0%")
    before = steps(page)
    learnt = int(re.search(r"(\d+) points to learn", page.inner_text("#status"))[1])
    added = [(0.6, 0.6), (0.7, 0.6), (0.8, 0.6)]
    for place in added:
        drag(page, place)
    wait_for_text(page, "#status", f"{learnt + len(added)} points to learn")
    assert steps(page) >= before
    again = visit(page.input_value("#link").partition("#")[2])
    assert again.input_value("#link") == page.input_value("#link")
    page.click("#clear")
    wait_for_text(page, "#notice", "both classes")


def test_keyboard_alone_trains_and_draws(visit):
    page = visit(QUICK)
    order = []
    for _ in range(14):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert page.evaluate(outline) != "none"
        if order[-1] == "start":
            page.keyboard.press("Enter")
            wait_for_step(page, 3)
            page.keyboard.press("Enter")
            wait_for_text(page, "#status", "paused")
        if order[-1] == "layers":
            page.keyboard.press("ArrowRight")
            wait_for_text(page, "#depth", "5 layers")
    assert order[:4] == ["start", "once", "reset", "layers"]
    page.focus("#norms")
    page.keyboard.press("ArrowRight")
    wait_for_text(page, "#norms-read", "Layer 0")
    page.focus("#data")
    page.keyboard.type("Points")
    wait_for_text(page, "#notice", "both classes")
    page.focus("#left-regions")
    for key in ("Enter", "ArrowLeft", "ArrowUp", "1", "Enter"):
        page.keyboard.press(key)
    wait_for_text(page, "#status", "2 points to learn")
    page.keyboard.press("Backspace")
    wait_for_text(page, "#notice", "both classes")


def test_link_holds_all_settings(visit):
    page = visit()
    page.click("summary")
    for name, value in SETTINGS.items():
        if name == "layers":
            page.fill("#layers", value)
        elif page.evaluate("n => document.getElementById(n).tagName", name) == "SELECT":
            page.select_option(f"#{name}", value)
        else:
            page.fill(f"#{name}", value)
    page.wait_for_function("() => location.hash.includes('seed=42')")
    link = page.input_value("#link")
    page.click("#share")
    wait_for_text(page, "#notice", "link")
    again = visit(link.partition("#")[2])
    assert {name: again.input_value(f"#{name}") for name in SETTINGS} == SETTINGS
    assert again.input_value("#link") == link
    again.click("#once")
    wait_for_step(again, 1)


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ("layers=9999", "Depth must be a whole number from 1 to 256"),
        ("left=h3", "“h3”, which is not known"),
        ("data=drawn&drawn=%00", "cannot be read"),
        ("data=csv", "drop the file here once more"),
    ],
)
def test_wrong_links_are_told_in_one_sentence(visit, link, words):
    page = visit(link)
    assert words in page.inner_text("#notice")
    assert page.get_attribute("#notice", "aria-live") == "polite"


def test_wrong_inputs_are_told_and_mended(visit):
    page = visit(QUICK)
    for name, value in {"T": "-1", "noise": "", "rate": "1e9"}.items():
        good = page.input_value(f"#{name}")
        page.fill(f"#{name}", value)
        wait_for_text(page, "#notice", "must be a number from")
        assert page.get_attribute(f"#{name}", "aria-invalid") == "true"
        page.fill(f"#{name}", good)
        wait_for_silence(page)
        assert page.get_attribute(f"#{name}", "aria-invalid") is None
    page.click("#once")
    wait_for_step(page, 1)


def test_csv_is_learnt(visit):
    page = visit("layers=8")
    rows = [f"{i},{1000 * (i % 7)},{'left' if i < 50 else 'right'}" for i in range(100)]
    drop(page, "mine.csv", "\n".join(["width,height,where", *rows]))
    wait_for_text(page, "#notice", "mine.csv has 100 rows; class 0 is “left”, class 1 is “right”.")
    wait_for_text(page, "#status", "50 points to learn, measured on 50 others")
    page.click("#start")
    accuracy = "parseFloat(document.querySelector('#left-accuracy').textContent)"
    page.wait_for_function(f"() => {accuracy} >= 90")
    # Numbers are in the units of the file, and Python is told how it was scaled.
    page.hover("#left-regions")
    wait_for_text(page, "#regions-read", "probability")
    x, y = map(float, re.search(r"At \((.+), (.+)\)", page.inner_text("#regions-read")).groups())
    assert 45 < x < 55
    assert 2500 < y < 3500
    shift = re.search(r"x - torch.tensor\(\[([\d.]+), ", page.inner_text("pre"))
    assert float(shift[1]) == pytest.approx(49.5)


def test_wrong_files_are_told_in_one_sentence_and_change_nothing(visit):
    page = visit(QUICK)
    page.click("#once")
    wait_for_step(page, 1)
    for name, text, words in [
        ("one.csv", "1,2,a\n3,4,a\n", "one class"),
        ("words.csv", "x,y,c\n1,2,a\none,4,b\n", "must be a number"),
        ("empty.csv", "", "empty"),
        ("huge.csv", "1,2,a\n" * 800_000, "MB; this page takes CSV files of up to 4 MB"),
        ("net.safetensors", "not at all", ""),
        ("picture.png", "\x00\x01\x02", ""),
    ]:
        drop(page, name, text)
        heard = "() => !/^(Reading|$)/.test(document.querySelector('#notice').textContent)"
        page.wait_for_function(heard)
        said = page.inner_text("#notice")
        assert words in said
        assert said.endswith(".")
        page.click("#start")
        page.click("#start")
        wait_for_silence(page)
    assert page.input_value("#data") == "swiss_roll"
    assert steps(page) >= 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_downloaded_network_says_the_same_in_python(visit, side, tmp_path):
    page = visit("layers=8&points=400")
    page.click("#start")
    wait_for_step(page, 40)
    page.click("#start")
    wait_for_text(page, "#status", "paused")
    with page.expect_download() as download:
        page.click(f"#{side}-download")
    name = {"left": "h2-8.safetensors", "right": "mlp-8.safetensors"}[side]
    assert download.value.suggested_filename == name
    download.value.save_as(tmp_path / name)
    model = hdnn.load(tmp_path / name)
    assert model.net.layers == 8
    check_same(page, side, model)


def test_network_of_python_is_opened_and_trained_further(visit, tmp_path):
    model = hdnn.Model(
        hdnn.Augment(inputs=2, features=6),
        hdnn.H2(features=6, layers=5, activation="relu", T=1.5, dtype=torch.float64),
        hdnn.SigmoidHead(features=6, dtype=torch.float64),
    )
    hdnn.save(model, tmp_path / "mine.safetensors")
    page = visit("points=400")
    page.set_input_files("#file", str(tmp_path / "mine.safetensors"))
    wait_for_text(page, "#notice", "mine.safetensors is on the left")
    found = {name: page.input_value(f"#{name}") for name in ("layers", "activation", "features")}
    assert found == {"layers": "5", "activation": "relu", "features": "6"}
    assert float(page.input_value("#T")) == pytest.approx(1.5)
    wait_for_text(page, "#left-accuracy", "%")
    check_same(page, "left", model)
    page.click("#once")
    wait_for_step(page, 1)


def test_much_work_is_said_and_holds_nothing_up(visit):
    page = visit("layers=256&points=10000&batch=5000&features=8&right=h1")
    wait_for_text(page, "#notice", "a lot of work")
    page.click("#start")
    longest = page.evaluate(
        """() => new Promise((resolve) => {
            const began = performance.now();
            let last = began, longest = 0;
            const frame = (now) => {
                longest = Math.max(longest, now - last);
                last = now;
                if (now - began < 1500) requestAnimationFrame(frame);
                else resolve(longest);
            };
            requestAnimationFrame(frame);
        })"""
    )
    assert longest < 1000  # ms in which the page did not draw; one step takes longer
    page.fill("#layers", "2")
    wait_for_text(page, "#depth", "2 layers")
    wait_for_step(page, 2)
    page.click("#start")
    wait_for_text(page, "#status", "paused")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_small_screen_shows_all_without_scrolling_sideways(visit, scheme):
    size = {"width": 375, "height": 700}
    page = visit(QUICK, viewport=size, has_touch=True, is_mobile=True, color_scheme=scheme)
    page.tap("#start")
    wait_for_step(page, 3)
    assert page.evaluate("document.documentElement.scrollWidth") == 375
    lefts = page.eval_on_selector_all(
        "#left-regions, #right-regions", "all => all.map(one => one.getBoundingClientRect().x)"
    )
    assert lefts[0] == lefts[1]  # below each other
    page.select_option("#data", "drawn")
    page.tap("#left-regions")
    page.check("input[name=class][value='1']")
    page.locator("#right-regions").tap(position={"x": 30, "y": 40})
    wait_for_text(page, "#status", "2 points to learn")
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_dark_scheme_is_dark_and_calm_pages_move_less(visit):
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = visit(QUICK), visit(QUICK, color_scheme="dark", reduced_motion="reduce")
    brightness = [
        sum(map(int, re.findall(r"\d+", page.evaluate(ground))[:3])) for page in (light, dark)
    ]
    assert brightness[0] > 600
    assert brightness[1] < 150
    dark.click("#start")
    wait_for_step(dark, 2)
    dark.emulate_media(color_scheme="light")
    assert dark.evaluate(ground) == light.evaluate(ground)


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    return axe_core.text(tmp_path_factory.mktemp("axe"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(visit, axe, scheme):
    page = visit(QUICK, color_scheme=scheme)
    page.click("summary")
    page.select_option("#data", "drawn")
    wait_for_text(page, "#notice", "both classes")
    assert axe_core.grave_faults(page, axe) == []


def test_page_stands_alone_in_a_folder(address):
    folder = Path(address.removeprefix("file://")).parent
    assert [file.name for file in folder.iterdir()] == ["page.html"]
