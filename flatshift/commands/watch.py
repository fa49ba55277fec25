"""The page of a sweep while its cells run."""

from __future__ import annotations

import html
import re
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tyro.conf import Positional

from flatshift.command_line import parse
from flatshift.finetune.errors import UserError


@dataclass(frozen=True)
class Flags:
    """Show a sweep's page on this machine while its cells run; ends when the plan is done. Changes nothing in it."""

    sweep: Positional[Path]
    """Directory of `flatshift sweep`."""
    every: float = 10.0
    """Seconds between two drawings, at least 1."""
    port: int = 8765
    """Port on localhost; 0 takes any that is free."""


class _Page:
    """The last page that could be drawn, and how far the sweep was."""

    def __init__(self, directory: Path, every: float) -> None:
        self.directory, self.every = directory, every
        self.text = "<!doctype html><html><head><title>Flatshift</title></head><body></body></html>"
        self.said, self.done = "", False

    def draw(self) -> None:
        """Read the directory anew; what cannot be read yet leaves the page as it was, with the reason above it."""
        from flatshift.experiments.report.page import report_html
        from flatshift.experiments.results.sweep import read_sweep

        try:
            data = read_sweep(self.directory)
            if data is None or not data.done:
                return
            self.text = report_html([self.directory])
            planned = data.planned if data.planned is not None else len(data)
            self.said, self.done = (
                f"{data.done} of {planned} cells, drawn {time.strftime('%H:%M:%S')}",
                not data.unfinished,
            )
        except UserError as error:  # a file that is being written
            self.said = str(error)

    def shown(self) -> bytes:
        """The page with its note; a browser asks for it again by itself until the sweep is done."""
        again = "" if self.done else f'<meta http-equiv="refresh" content="{max(1, round(self.every))}">'
        note = f"<p>{html.escape(self.said or 'No cell has finished yet.')}</p>"
        page = self.text.replace("</head>", f"{again}</head>", 1)
        return re.sub(r"<body[^>]*>", lambda found: found[0] + note, page, count=1).encode()


def serve(page: _Page, port: int) -> ThreadingHTTPServer:
    """A server of this one page, on localhost only. Raises UserError where the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/":
                self.send_error(404)
                return
            body = page.shown()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--port {port} cannot be had on localhost ({error}); give another, or 0 for any") from None


def run(argv: list[str]) -> int:
    """`flatshift watch`."""
    flags: Flags = parse(Flags, "watch", argv)
    if not (flags.sweep / "sweep.json").is_file():
        raise UserError(f"{flags.sweep} is no sweep directory (no sweep.json); start `flatshift sweep … --out` first")
    page = _Page(flags.sweep, flags.every)
    server = serve(page, flags.port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    print(f"http://127.0.0.1:{server.server_address[1]}/  (Ctrl-C ends it; the sweep goes on)", flush=True)
    said = ""
    try:
        while not page.done:
            page.draw()
            if page.said != said:
                said = page.said
                print(said, flush=True)
            time.sleep(flags.every if not page.done else min(flags.every, 2.0))  # a browser fetches the last page
    except KeyboardInterrupt:
        pass
    finally:
        server.shutdown()
        server.server_close()
    return 0
