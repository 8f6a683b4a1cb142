"""Downloads are resumed, verified before they get their name, and tried at each mirror in turn."""

import errno
import gzip
import hashlib
import io
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hdnn.data import download
from hdnn.errors import DataError, OptionError

CONTENT = bytes(range(256)) * 2000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files` by path; notes the Range of each request; misbehaves as it is told."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.ranges = True
        self.wrong_range = False
        self.endless = False
        self.break_after: list[int] = []  # bytes, of one answer each
        self.redirect = ""

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        server, asked = self.server, self.headers.get("Range")
        server.requests.append((self.path, asked))
        if server.redirect and self.path != server.redirect.removeprefix(server.address[:-1]):
            self.send_response(302)
            self.send_header("Location", server.redirect)
            self.end_headers()
            return
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and server.ranges else 0
        if start and start >= len(content):
            self.send_error(416)
            return
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            shown = start + server.wrong_range
            self.send_header("Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}")
        if not server.endless:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.break_after.pop(0)] if server.break_after else body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "SCHEMES", ("https", "http"))
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        made.files["/set.bin"] = CONTENT
        yield made
        made.shutdown()
        thread.join()


def remote(*mirrors, sha256=SHA256, name="set.bin", unpacked=False):
    return download.Remote(name, len(CONTENT), sha256, unpacked, mirrors)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_whole_and_under_its_name(server, tmp_path):
    path = download.fetch(remote(server.address), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "set.bin"
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["set.bin"]


def test_what_is_there_and_right_is_not_fetched_again(server, tmp_path):
    for _ in range(2):
        download.fetch(remote(server.address), tmp_path)
    assert len(server.requests) == 1


def test_what_is_there_but_wrong_is_replaced(server, tmp_path):
    (tmp_path / "set.bin").write_bytes(b"another")
    download.fetch(remote(server.address), tmp_path)
    assert (tmp_path / "set.bin").read_bytes() == CONTENT


def test_a_transfer_that_breaks_off_goes_on_where_it_was(server, tmp_path):
    server.break_after = [100_000, 200_000]
    path = download.fetch(remote(server.address), tmp_path)
    assert path.read_bytes() == CONTENT
    assert server.requests == [
        ("/set.bin", None),
        ("/set.bin", "bytes=100000-"),
        ("/set.bin", "bytes=300000-"),
    ]


def test_a_mirror_that_always_breaks_off_is_given_up_and_the_part_stays_for_later(server, tmp_path):
    server.break_after = [10, 10, 10]
    with pytest.raises(DataError, match=f"broke off after 30 of {len(CONTENT)} bytes"):
        download.fetch(remote(server.address), tmp_path)
    assert names(tmp_path) == ["set.bin.part"]
    download.fetch(remote(server.address), tmp_path)
    assert server.requests[-1] == ("/set.bin", "bytes=30-")
    assert names(tmp_path) == ["set.bin"]


def test_a_server_without_ranges_sends_all_of_it_again(server, tmp_path):
    server.ranges = False
    (tmp_path / "set.bin.part").write_bytes(CONTENT[:1000])
    assert download.fetch(remote(server.address), tmp_path).read_bytes() == CONTENT


def test_a_part_that_is_complete_already_is_taken(server, tmp_path):
    (tmp_path / "set.bin.part").write_bytes(CONTENT)
    assert download.fetch(remote(server.address), tmp_path).read_bytes() == CONTENT
    assert server.requests == [("/set.bin", f"bytes={len(CONTENT)}-")]


@pytest.mark.parametrize("left", [b"other bytes", b"x" * (len(CONTENT) + 1)])
def test_a_part_of_something_else_is_thrown_away_and_fetched_anew(server, tmp_path, left):
    (tmp_path / "set.bin.part").write_bytes(left)
    assert download.fetch(remote(server.address), tmp_path).read_bytes() == CONTENT
    assert server.requests[-1] == ("/set.bin", None)


def test_a_wrong_file_is_refused_and_leaves_nothing(server, tmp_path):
    with pytest.raises(DataError, match=r"could not download set\.bin.*another SHA-256"):
        download.fetch(remote(server.address, sha256="0" * 64), tmp_path)
    assert names(tmp_path) == []


def test_a_server_that_sends_too_much_is_cut_off_and_leaves_nothing(server, tmp_path):
    server.files["/set.bin"], server.endless = CONTENT * 20, True
    with pytest.raises(DataError, match="another SHA-256"):
        download.fetch(remote(server.address), tmp_path)
    assert names(tmp_path) == []


def test_a_range_that_was_not_asked_for_is_refused(server, tmp_path):
    server.wrong_range = True
    (tmp_path / "set.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match="another range"):
        download.fetch(remote(server.address), tmp_path)
    assert (tmp_path / "set.bin.part").read_bytes() == CONTENT[:1000]


def test_the_next_mirror_is_asked_where_one_has_no_such_file(server, tmp_path):
    mirrors = (f"{server.address}nowhere/", server.address)
    assert download.fetch(remote(*mirrors), tmp_path).read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/nowhere/set.bin", "/set.bin"]


def test_when_all_mirrors_fail_each_is_named_with_its_reason(server, tmp_path):
    closed = "http://127.0.0.1:1/"
    with pytest.raises(DataError) as error:
        download.fetch(remote(f"{server.address}nowhere/", closed), tmp_path)
    assert f"{server.address}nowhere/set.bin: the server says 404" in str(error.value)
    assert "http://127.0.0.1:1/set.bin: Connection refused" in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert names(tmp_path) == []


def test_a_redirect_is_followed(server, tmp_path):
    server.redirect = f"{server.address}moved/set.bin"
    server.files["/moved/set.bin"] = CONTENT
    assert download.fetch(remote(server.address), tmp_path).read_bytes() == CONTENT
    assert [path for path, _ in server.requests] == ["/set.bin", "/moved/set.bin"]


def test_only_https_is_spoken_also_after_a_redirect(server, tmp_path, monkeypatch):
    server.redirect = "ftp://127.0.0.1/set.bin"
    with pytest.raises(DataError, match=r"ftp://127.0.0.1/set.bin is not an https address"):
        download.fetch(remote(server.address), tmp_path)
    monkeypatch.setattr(download, "SCHEMES", ("https",))
    with pytest.raises(DataError, match="is not an https address"):
        download.fetch(remote(server.address), tmp_path)
    assert len(server.requests) == 1
    for files in download.SETS.values():
        for file in files:
            assert all(mirror.startswith("https://") for mirror in file.mirrors)


def test_a_full_disk_is_said_and_what_came_stays(server, tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, chunk):
            if self.tell() + len(chunk) > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(chunk)

    opened = type(tmp_path).open
    monkeypatch.setattr(
        type(tmp_path),
        "open",
        lambda path, mode="r": Full(path, mode) if path.suffix == ".part" else opened(path, mode),
    )
    with pytest.raises(DataError, match=r"set\.bin\.part: No space left on device; make room"):
        download.fetch(remote(server.address), tmp_path)
    monkeypatch.undo()
    assert CONTENT.startswith((tmp_path / "set.bin.part").read_bytes())
    assert not (tmp_path / "set.bin").exists()


def test_a_folder_that_cannot_be_made_is_named(server, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot write .*file.*--to"):
        download.fetch(remote(server.address), tmp_path / "file" / "folder")


def test_compressed_files_are_verified_by_what_is_in_them(server, tmp_path):
    for level in (1, 9):  # two archives, one content
        server.files["/set.gz"] = gzip.compress(CONTENT, level)
        folder = tmp_path / str(level)
        path = download.fetch(remote(server.address, name="set.gz", unpacked=True), folder)
        assert gzip.decompress(path.read_bytes()) == CONTENT
    bomb = gzip.compress(bytes(250 * len(CONTENT)))
    for content in (b"no gzip", gzip.compress(CONTENT)[:-9], bomb):
        server.files["/set.gz"] = content
        with pytest.raises(DataError, match="another SHA-256"):
            download.fetch(remote(server.address, name="set.gz", unpacked=True), tmp_path)


def test_a_whole_set_is_brought_by_the_command(server, tmp_path, monkeypatch, capsys):
    files = tuple(remote(server.address, name=f"mnist/{name}.bin") for name in ("set", "more"))
    server.files["/more.bin"] = CONTENT
    monkeypatch.setitem(download.SETS, "mnist", files)
    monkeypatch.setenv("HDNN_DATA", str(tmp_path / "default"))
    assert download.main(["mnist"]) == 0
    assert names(tmp_path / "default" / "mnist") == ["more.bin", "set.bin"]
    assert download.main(["mnist", "--to", str(tmp_path / "given")]) == 0
    assert names(tmp_path / "given" / "mnist") == ["more.bin", "set.bin"]
    assert capsys.readouterr().out.splitlines()[-1].endswith("given/mnist/more.bin")


def test_the_command_says_what_went_wrong_in_one_line(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(download.SETS, "cifar10", (remote(f"{server.address}nowhere/"),))
    assert download.main(["cifar10", "--to", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("hdnn: could not download set.bin")
    assert errors.count("\n") == 1


def test_ctrl_c_ends_the_command_and_says_how_to_go_on(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "fetch", interrupted)
    assert download.main(["mnist"]) == 130
    assert "continues" in capsys.readouterr().err


def test_an_unknown_set_is_refused():
    with pytest.raises(OptionError, match="choose one of cifar10, mnist"):
        download.download("imagenet")


def test_the_bar_shows_share_size_and_speed():
    assert download._bar("set", 5_000_000, 10_000_000, 2e6) == (
        "set [##########          ]  50% of 10.0 MB, 5.0 MB, 2.0 MB/s"
    )
    assert download._bar("set", 5_000_000, None, 2e6) == "set: 5.0 MB, 2.0 MB/s"


def test_the_module_runs_as_a_program_without_warnings():
    command = [sys.executable, "-W", "error", "-m", "hdnn.data.download", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "{cifar10,mnist}" in ended.stdout
