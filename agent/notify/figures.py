"""Offers the newest metrics: in a file, at a port, or both. In the courier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

from worker_hooks.contract.atomic_file import write_atomic

CLIENT_S = 5.0  # without a word from a client


class Figures:
    """The newest ones, as text."""

    def __init__(self, path: str, port: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._path = Path(path) if path else None
        self._has_failed = False
        self._new = threading.Event()
        self._is_over = False
        self.text = ""
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()
        if port:
            try:
                server = _Server(("", port), _page_of(self))
            except OSError as error:
                say(f"--metrics_port={port}: {error.strerror}: the metrics are not served")
            else:
                threading.Thread(target=server.serve_forever, daemon=True).start()

    def put(self, text: str | None) -> None:
        """Take newer ones; ``None``: there are no more."""
        if text is None:
            self._is_over = True
        else:
            self.text = text
        self._new.set()

    def _write(self) -> None:
        is_over = False
        while not is_over:
            self._new.wait()
            self._new.clear()
            is_over = self._is_over  # read first: the text is the last one then
            if self._path is None or not self.text:
                continue
            try:
                write_atomic(self._path, self.text.encode(), durable=False)
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    self._say(f"--metrics_file {self._path} cannot be written: {error.strerror}")


class _Server(ThreadingHTTPServer):
    """Serves the page."""

    def server_bind(self) -> None:
        """Open the port; HTTPServer's asks for this host's name, and waits for a dead server."""
        TCPServer.server_bind(self)

    def handle_error(self, *_: object) -> None:
        """Nothing: a client that is gone is no news."""


def _page_of(figures: Figures) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        """One page: the metrics."""

        timeout = CLIENT_S

        def do_GET(self) -> None:
            is_it = self.path.partition("?")[0] in {"/", "/metrics"}
            content = figures.text.encode() if is_it else b"/metrics\n"
            self.send_response(200 if is_it else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: a scrape is no news."""

    return Page
