"""`hdnn play`: the playground, a page that trains two networks in the browser."""

from __future__ import annotations

import sys
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated

from hdnn.app import terminal
from hdnn.app.options import option, overwrite_flag
from hdnn.app.play import build
from hdnn.base.files import reason_of, write_atomically
from hdnn.errors import OptionError

EXAMPLES = (
    "hdnn play",
    "hdnn play --port 8080 --no-browser",
    "hdnn play --out playground.html",
)
HOST = "127.0.0.1"  # nobody but this machine


def play(
    port: Annotated[int | None, option("port to serve it on (default: one that is free)")] = None,
    no_browser: Annotated[bool, option("only print the address", "--no-browser")] = False,
    out: Annotated[str | None, option("write the page to this file, and serve nothing")] = None,
    overwrite: Annotated[bool, overwrite_flag()] = False,
) -> None:
    """Open a page where an H2 and a perceptron learn side by side; it needs no network."""
    if out is not None:
        if port is not None:
            raise OptionError("--out writes a file and --port serves the page; give one of them.")
        path = terminal.new_file(out, overwrite)
        write_atomically(path, build.page().encode())
        terminal.print_text(f"the playground is in {path}; open it in a browser")
        return
    if overwrite:
        raise OptionError("--overwrite is about the file of --out; name one, or leave it away.")
    if port is not None and not 1 <= port <= 65535:
        raise OptionError(f"--port must be between 1 and 65535, but got {port}.")
    with serve(build.page(), port) as server:
        address = f"http://{HOST}:{server.server_port}/"
        terminal.print_text(f"the playground is at {address} (Ctrl-C ends it)")
        if not no_browser:
            webbrowser.open(address)
        wait(server)


def serve(page: str, port: int | None) -> ThreadingHTTPServer:
    """A server of this one page, on the loopback."""
    content = page.encode()

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content) if found else 0))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            if found:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Nobody wants to read of each visit."""

    try:
        return ThreadingHTTPServer((HOST, port or 0), Page)
    except OSError as error:
        raise OptionError(
            f"cannot serve on port {port or 0}: {reason_of(error)}; choose another with --port."
        ) from error


def wait(server: ThreadingHTTPServer) -> None:
    """Serve until Ctrl-C, which is how this is meant to end."""
    sys.stdout.flush()  # whoever reads the address from a pipe waits for it
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        terminal.print_text("")
