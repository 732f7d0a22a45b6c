"""Offers the newest metrics: in a file, at a port, or both. In the courier.

prometheus_client, of msrun's extra "metrics", gives them their form and answers scrapes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from prometheus_client import CollectorRegistry, Metric, MetricsHandler, generate_latest

from worker_hooks.contract.atomic_file import write_atomic

CLIENT_S = 5.0  # without a word from a client


class Figures:
    """The newest ones; a collector, as prometheus_client calls what it reads."""

    def __init__(self, path: str, port: int, say: Callable[[str], None]) -> None:
        self._say = say
        self._path = Path(path) if path else None
        self._has_failed = False
        self._new = threading.Event()
        self._is_over = False
        self._families: Sequence[Any] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.thread = threading.Thread(target=self._write, daemon=True)
        self.thread.start()
        if port:
            try:
                server = _Server(("", port), _Page.factory(self._registry))
            except OSError as error:
                say(f"--metrics_port={port}: {error.strerror}: the metrics are not served")
            else:
                threading.Thread(target=server.serve_forever, daemon=True).start()

    def put(self, families: Sequence[Any] | None) -> None:
        """Take newer ones, each as a :class:`metrics.Family`; ``None``: there are no more."""
        if families is None:
            self._is_over = True
        else:
            self._families = families
        self._new.set()

    def collect(self) -> Iterator[Metric]:
        """The newest, for whoever reads them now."""
        for name, kind, sentence, samples in self._families:
            metric = Metric(f"msrun_{name}", sentence, kind)
            ending = "_total" if kind == "counter" else ""
            for labels, value in samples:
                metric.add_sample(f"msrun_{name}{ending}", labels, value)
            yield metric

    def _write(self) -> None:
        is_over = False
        while not is_over:
            self._new.wait()
            self._new.clear()
            is_over = self._is_over  # read first: the figures are the last ones then
            if self._path is None or not self._families:
                continue
            try:
                write_atomic(self._path, generate_latest(self._registry), durable=False)
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


class _Page(MetricsHandler):
    """Whatever a client asks for, it gets all metrics."""

    timeout = CLIENT_S

    def do_GET(self) -> None:  # noqa: N802  the library's name
        """Answer; a choice of names, which the library allows, would find none."""
        self.path = self.path.partition("?")[0]
        super().do_GET()
