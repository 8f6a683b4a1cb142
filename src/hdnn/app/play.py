"""The playground: one page that trains two networks in the browser, built and served here.

Its scripts are plain ES modules. They are joined in the order in which they depend on each other,
without `import` and `export`, so no two files may share a top-level name.
"""

from __future__ import annotations

import re
import socket
import sys
import time
import webbrowser
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hdnn.errors import OptionError

HERE = Path(__file__).with_name("playground")
HOST = "127.0.0.1"  # only this machine
IMPORT = re.compile(
    r'^(?:import|export)\s*\{[^{}]*\}\s*from\s*"([^"]+)";\n', re.M
)
EXPORT = re.compile(
    r"^export (?=(?:async )?(?:function|class|const|let)\b)", re.M
)
TIMEOUT = 10.0  # seconds that a client may take for a whole request
CLIENTS = 16  # clients at the same time


def page() -> str:
    """The page with everything it needs."""
    parts = {
        "style": (HERE / "style.css").read_text("utf-8"),
        "script": join(HERE / "ui" / "main.js"),
        "worker": join(HERE / "worker.js"),
    }
    html = (HERE / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]].strip(), html)


def join(entry: Path) -> str:
    """One script made of a module and all its imports, in strict mode and without global names."""
    scripts: dict[Path, str] = {}
    _add(entry.resolve(), scripts)
    return '"use strict";\n(() => {\n' + "\n".join(scripts.values()) + "})();\n"


def _add(path: Path, scripts: dict[Path, str]) -> None:
    """Add a module after all its imports."""
    if path in scripts:
        return
    text = path.read_text("utf-8")
    for source in IMPORT.findall(text):
        _add((path.parent / source).resolve(), scripts)
    scripts[path] = EXPORT.sub("", IMPORT.sub("", text)).strip() + "\n"


class PageServer(ThreadingHTTPServer):
    """A server of the playground on the loopback, for few clients and short requests."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.content = page().encode()
        self.clients: dict[socket.socket, float] = {}
        super().__init__((HOST, port), PageHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.clients[request] = time.monotonic() + TIMEOUT
        super().process_request(request, client_address)
        self.service_actions()

    def service_actions(self) -> None:
        """Drop clients that take too long, and the first of too many; called twice a second."""
        now = time.monotonic()
        for client, end in list(self.clients.items()):
            if end < now or len(self.clients) > CLIENTS:
                self.clients.pop(client, None)
                with suppress(OSError):  # the client is gone
                    client.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self.clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing: the client is gone."""


class PageHandler(BaseHTTPRequestHandler):
    """One request."""

    def do_GET(self) -> None:
        assert isinstance(self.server, PageServer)
        if self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(self.server.content)))
        self.end_headers()
        self.wfile.write(self.server.content)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


def serve(port: int = 0, *, browser: bool = True) -> None:
    """Serve the page until Ctrl-C; port 0 means any free port."""
    try:
        server = PageServer(port)
    except (OSError, OverflowError) as error:
        raise OptionError(
            f"cannot serve on port {port}: {error}; choose another --port."
        ) from error
    with server:
        address = f"http://{HOST}:{server.server_port}/"
        sys.stdout.write(f"the playground is at {address} (Ctrl-C stops it)\n")
        sys.stdout.flush()
        if browser:
            webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
