"""The playground as one file, how its scripts are joined, and the command that serves it."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from hdnn.__main__ import main
from hdnn.app.commands import play
from hdnn.app.play import build
from said import told

MOST = 300_000  # bytes


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def joined(**files: str) -> str:
    """The scripts joined from main.js on."""
    return build.join(Path("/main.js"), lambda path: files[path.stem])


def test_page_is_one_small_file_that_asks_for_nothing_else():
    page = build.page()
    assert len(page.encode()) <= MOST
    assert not re.search(r'(src|href)\s*=\s*["\'](?!data:)', page)
    assert "{{" not in page.replace("${{", "")
    assert not re.search(r"^(import|export)\b", page, re.M)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|https?://", page)


def test_modules_are_joined_behind_what_they_need():
    text = joined(
        main='import { b } from "./second.js";\nimport {\n  a,\n} from "./first.js";\na(b);\n',
        second='import { a } from "./first.js";\nexport const b = a + 1;\n',
        first="export const a = 1;\n",
    )
    assert text.count("const a = 1;") == 1
    assert text.index("const a") < text.index("const b") < text.index("a(b)")
    assert "import" not in text
    assert "export" not in text


def test_names_may_be_passed_on():
    text = joined(
        main='import { a } from "./index.js";\na();\n',
        index='export { a } from "./first.js";\n',
        first="function a() {}\nexport { a };\n",
    )
    assert "function a() {}" in text
    assert "export" not in text


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"main": 'import { b } from "./a.js";\nconst c = 1;\n', "a": "export let b;\nlet c;\n"},
            "both have the name c",
        ),
        ({"main": 'import { b } from "./a.js";\n', "a": "const b = 1;\n"}, "imports b, not in a"),
        ({"main": 'import { b as c } from "./a.js";\n', "a": "export let b;\n"}, "renames b as c"),
        ({"main": 'import * as b from "./a.js";\n'}, "does not know"),
        ({"main": "export default 1;\n"}, "does not know"),
        ({"main": 'import { b } from "b";\n'}, "not a file beside it"),
        (
            {"main": 'import { b } from "./a.js";\n', "a": 'import { c } from "./main.js";\n'},
            "needed by what it imports",
        ),
    ],
)
def test_scripts_that_cannot_be_joined_are_refused(files, words):
    with pytest.raises(build.JoinError, match=words):
        joined(**files)


def test_script_that_would_end_the_page_early_is_refused(monkeypatch):
    monkeypatch.setattr(build, "join", lambda entry: 'const a = "</script>";')
    with pytest.raises(build.JoinError, match="end early"):
        build.page()


def test_play_writes_the_page_and_replaces_only_when_told(capsys):
    assert main(["play", "--out", "page.html"]) == 0
    assert "page.html" in capsys.readouterr().out
    assert Path("page.html").read_text(encoding="utf-8") == build.page()
    Path("page.html").write_text("mine")
    assert main(["play", "--out", "page.html"]) == 2
    assert "exists already" in told(capsys)
    assert Path("page.html").read_text() == "mine"
    assert main(["play", "--out", "page.html", "--overwrite"]) == 0
    assert Path("page.html").read_text(encoding="utf-8") == build.page()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "0"], "between 1 and 65535, but got 0"),
        (["--port", "70000"], "between 1 and 65535, but got 70000"),
        (["--port", "http"], "Invalid value for '--port'"),
        (["--out", "nowhere/page.html"], "there is no folder nowhere"),
        (["--out", "."], "is a folder"),
        (["--out", "page.html", "--port", "80"], "give one of them"),
        (["--overwrite"], "about the file of --out"),
    ],
)
def test_wrong_options_are_told_in_one_sentence(arguments, words, capsys):
    assert main(["play", *arguments]) == 2
    assert words in told(capsys)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that even root cannot fill")
def test_folder_that_cannot_be_written_is_told(capsys):
    assert main(["play", "--out", "/proc/page.html"]) == 2
    assert "cannot write /proc/page.html" in told(capsys)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "hdnn play --out playground.html"),
        (["--out", "page.html"], 0, "the playground is in page.html"),
        (["--port", "0"], 2, "between 1 and 65535"),
    ],
)
def test_play_needs_no_torch(arguments, code, words):
    script = (
        f"import sys; sys.modules['torch'] = None; sys.argv = ['hdnn', 'play', *{arguments!r}]\n"
        "from hdnn.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert words in done.stdout + done.stderr


def test_port_that_is_taken_is_told(capsys):
    with play.serve("", None) as server:
        assert main(["play", "--no-browser", "--port", str(server.server_port)]) == 2
    assert "choose another with --port" in told(capsys)


def test_browser_is_opened_at_the_address(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(play.webbrowser, "open", seen.append)
    monkeypatch.setattr(play.ThreadingHTTPServer, "serve_forever", interrupted)
    assert main(["play"]) == 0
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", seen[0])
    assert seen[0] in capsys.readouterr().out


def interrupted(self):
    raise KeyboardInterrupt


def test_play_serves_the_page_alone_and_ends_cleanly_at_ctrl_c():
    command = [sys.executable, "-m", "hdnn", "play", "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as server:
        port = int(re.search(r"127\.0\.0\.1:(\d+)/", server.stdout.readline())[1])
        status, text = visited(port, "/")
        assert (status, text) == (200, build.page().encode())
        assert visited(port, "/../pyproject.toml") == (404, b"")
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
        assert server.stderr.read() == ""


def visited(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found
