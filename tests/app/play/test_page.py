"""The playground as one page: how it is served, and what it does in a browser."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
import time

import pytest
import torch

import hdnn
from chromium import browser as browser
from chromium import needs_chromium, visits
from hdnn.app import play

QUICK = "layers=4&points=400&seed=1"


def test_page_is_one_small_file_that_asks_for_nothing_else():
    page = play.page()
    assert len(page.encode()) <= 200_000
    assert not re.search(r'(src|href)\s*=\s*["\'](?!data:)', page)
    assert not re.search(r"^(import|export)\b", page, re.MULTILINE)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|https?://", page)
    assert not re.search(r"\{\{(style|script|worker)\}\}", page)


@pytest.fixture
def server():
    with play.PageServer(0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()


def test_the_page_is_served_on_the_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.server_port, timeout=10
    )
    connection.request("GET", "/?x=1")
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read() == play.page().encode()
    connection.request("GET", "/etc/passwd")
    assert connection.getresponse().status == 404


@pytest.mark.parametrize("pause", [30.0, 0.05])
def test_a_client_that_sends_little_or_nothing_is_given_up(
    server, monkeypatch, pause
):
    monkeypatch.setattr(play, "TIMEOUT", 0.3)
    with socket.create_connection(
        ("127.0.0.1", server.server_port), timeout=pause
    ) as client:
        start = time.monotonic()
        client.sendall(b"GET / HTTP/1.0\r\nX: ")
        answer = None
        while answer is None and time.monotonic() - start < 5:
            with contextlib.suppress(TimeoutError):
                answer = client.recv(100)
            with contextlib.suppress(OSError):
                client.sendall(b"x")
        assert answer == b""
        assert time.monotonic() - start < 5


def test_fifty_silent_clients_keep_nobody_out_and_few_threads(server):
    address = ("127.0.0.1", server.server_port)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(address, timeout=10))
        connection = http.client.HTTPConnection(*address, timeout=10)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        end = time.monotonic() + 5
        while threading.active_count() > before + play.CLIENTS:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("play") / "page.html"
    path.write_text(play.page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def visit(browser, address):
    """A function that opens the page with settings; complaints of the page are failures."""
    with visits(browser, address) as opens:
        yield lambda settings="", **options: opens(
            f"{address}#{settings}", **options
        )


def wait_for_text(page, place: str, words: str) -> None:
    inside = "([s, w]) => document.querySelector(s).textContent.includes(w)"
    page.wait_for_function(inside, arg=[place, words])


def number(page, place: str) -> float:
    return float(page.inner_text(place).strip("%× "))


def drop(page, name: str, text: str) -> None:
    made = """([name, text]) => {
        const data = new DataTransfer();
        data.items.add(new File([text], name));
        return data;
    }"""
    page.dispatch_event(
        "body",
        "drop",
        {"dataTransfer": page.evaluate_handle(made, [name, text])},
    )


@needs_chromium
def test_it_starts_and_h2_learns_while_gradients_of_the_mlp_vanish(visit):
    page = visit("layers=48")
    wait_for_text(page, "#start", "Pause")
    wait_for_text(page, "#left-accuracy", "100.0%")
    page.click("#start")
    wait_for_text(page, "#status", "paused")
    assert number(page, "#left-reach") >= 1
    assert number(page, "#right-reach") < 1e-6
    assert page.get_attribute("#left-bar", "aria-valuenow") == "1.000"
    assert float(page.get_attribute("#right-bar", "aria-valuenow")) < 1e-6
    page.hover("#norms")
    wait_for_text(page, "#norms-read", "Layer")
    assert "proved" in page.text_content("#left-theorem")


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_bars_and_norms_fit_one_screen(visit, scheme):
    page = visit(QUICK)
    page.emulate_media(color_scheme=scheme)
    for width, height, places in (
        (1280, 800, ("#left-bar", "#right-bar", "#norms", "#start")),
        (375, 812, ("#left-bar", "#right-bar", "#start", "#layers")),
    ):
        page.set_viewport_size({"width": width, "height": height})
        for place in places:
            box = page.locator(place).bounding_box()
            assert box["y"] >= 0
            assert box["y"] + box["height"] <= height
            assert box["x"] + box["width"] <= width


@needs_chromium
@pytest.mark.parametrize(
    "rival", ["residual", "prenorm", "orthogonal", "scaled", "rezero"]
)
def test_residual_rivals_learn_and_are_not_offered_for_python(visit, rival):
    page = visit(f"{QUICK}&right={rival}")
    wait_for_text(page, "#status", "steps a second")
    wait_for_text(page, "#right-reach", "×")
    assert not page.locator("#right-download").is_visible()
    assert "nothing is promised" in page.text_content("#right-theorem")


@needs_chromium
def test_a_point_can_be_dragged(visit):
    page = visit("data=drawn&layers=3")
    picture = page.locator("#left-regions")
    picture.focus()
    for key in ("Enter", "ArrowRight", "ArrowRight", "1", "Enter"):
        picture.press(key)
    wait_for_text(page, "#status", "2 points to learn")
    before = page.input_value("#link")
    box = picture.bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - 60, y - 40)
    page.mouse.up()
    page.wait_for_function(
        "link => document.getElementById('link').value !== link", arg=before
    )
    wait_for_text(page, "#status", "2 points to learn")


@needs_chromium
def test_a_download_gives_the_same_answers_in_python(visit, tmp_path):
    page = visit(QUICK)
    wait_for_text(page, "#status", "steps a second")
    page.click("#start")
    wait_for_text(page, "#status", "paused")
    page.click("summary")
    with page.expect_download() as download:
        page.click("#left-download")
    path = tmp_path / "h2.safetensors"
    download.value.save_as(path)
    model = hdnn.io.load(path)
    canvas = page.locator("#left-regions")
    width, height = canvas.evaluate("c => [c.clientWidth, c.clientHeight]")
    canvas.hover(position={"x": width / 4, "y": height / 4})
    wait_for_text(page, "#regions-read", "probability")
    shown = re.search(r"H2 ([\d.]+)%", page.inner_text("#regions-read"))
    edge = 1.2 * 1.08
    cell = 2 * edge / 100
    near = torch.tensor([-cell, 0.0, cell], dtype=torch.float64)
    place = torch.tensor([[-edge / 2, edge / 2]], dtype=torch.float64)
    x = place + torch.cartesian_prod(near, near)  # the cells around the point
    chances = 100 * model.head.probabilities(model(x)).detach()[:, 1]
    low, high = chances.aminmax()
    assert low - 1 <= float(shown[1]) <= high + 1
    page.set_input_files("#file", str(path))
    wait_for_text(page, "#notice", "as it was saved")


@needs_chromium
def test_a_table_is_learned_and_a_wrong_one_is_explained(visit):
    page = visit(QUICK)
    rows = [
        f"{i / 10},{(i * 7 % 11) / 10},{'a' if i % 2 else 'b'}"
        for i in range(60)
    ]
    drop(page, "mine.csv", "\n".join(["x,y,class", *rows]))
    wait_for_text(page, "#notice", "60 rows")
    drop(page, "wrong.csv", "x,y,class\n1,two,a\n")
    wait_for_text(page, "#notice", "must be a number")


@needs_chromium
def test_a_link_brings_all_settings_and_drawn_points_back(visit):
    page = visit("data=drawn&layers=3")
    picture = page.locator("#left-regions")
    picture.focus()
    for key in ("Enter", "ArrowRight", "ArrowRight", "1", "Enter"):
        picture.press(key)
    wait_for_text(page, "#status", "2 points to learn")
    link = page.input_value("#link")
    again = visit(link.partition("#")[2])
    wait_for_text(again, "#status", "2 points to learn")
    assert again.input_value("#layers") == "3"


@needs_chromium
def test_wrong_settings_are_explained_and_nothing_breaks(visit):
    page = visit(QUICK)
    page.click("summary")
    page.fill("#rate", "-1")
    wait_for_text(page, "#notice", "Rate must be")
    page.fill("#rate", "0.05")
    wait_for_text(page, "#start", "Pause")
    page.select_option("#left", "h1")
    wait_for_text(page, "#key-left", "H1")
    strange = visit("network=h9&layers=9999&left=h7")
    wait_for_text(strange, "#notice", "This link")
