"""A few calls of etcd's JSON gateway, in memory: what the seat of a job asks for, and nothing else."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeEtcd:
    """Keys and values are the base64 of the wire; its clock goes on only as it is turned."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[str, str]] = {}  # key -> value, lease
        self.leases: dict[str, tuple[float, int]] = {}  # until when, of how long
        self.late_s = 0.0  # its clock
        self.lost = 0  # answers that are not sent, though what was asked is done
        self.odd: tuple[int, bytes] | None = None  # said instead of any answer
        self.asked: list[str] = []

    @property
    def now(self) -> float:
        return self.late_s

    def answer(self, name: str, asked: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(name)
        for lease, (until, _) in list(self.leases.items()):
            if until < self.now:
                self._end(lease)
        calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "lease/grant": self._grant,
            "lease/keepalive": self._renew,
            "kv/txn": self._txn,
        }
        return calls[name](asked)

    def _end(self, lease: str) -> None:
        self.leases.pop(lease, None)
        self.held = {key: each for key, each in self.held.items() if each[1] != lease}

    def _grant(self, asked: dict[str, Any]) -> dict[str, Any]:
        lease, ttl = str(7000 + len(self.asked)), int(asked["TTL"])
        self.leases[lease] = self.now + ttl, ttl
        return {"ID": lease, "TTL": str(ttl)}

    def _renew(self, asked: dict[str, Any]) -> dict[str, Any]:
        lease = str(asked["ID"])
        if lease not in self.leases:
            return {"result": {"ID": lease}}
        ttl = self.leases[lease][1]
        self.leases[lease] = self.now + ttl, ttl
        return {"result": {"ID": lease, "TTL": str(ttl)}}

    def _txn(self, asked: dict[str, Any]) -> dict[str, Any]:
        fits = all(self._fits(each) for each in asked.get("compare", []))
        done = [self._do(each) for each in asked.get("success" if fits else "failure", [])]
        return {"responses": done, **({"succeeded": True} if fits else {})}

    def _fits(self, compare: dict[str, Any]) -> bool:
        value = self.held.get(compare["key"], (None, ""))[0]
        return value is None if compare["target"] == "VERSION" else value == compare["value"]

    def _do(self, one: dict[str, Any]) -> dict[str, Any]:
        ((kind, about),) = one.items()
        if kind == "request_put":
            lease = about["lease"]
            self.held[about["key"]] = about["value"], "" if lease == "0" else lease
            return {"response_put": {}}
        if kind == "request_delete_range":
            self.held.pop(about["key"], None)
            return {"response_delete_range": {}}
        found = self.held.get(about["key"])
        kvs = {} if found is None else {"kvs": [{"key": about["key"], "value": found[0]}]}
        return {"response_range": kvs}


@contextlib.contextmanager
def fake_etcd() -> Iterator[tuple[FakeEtcd, int]]:
    """It, and the port at which it answers."""
    etcd = FakeEtcd()

    class Gateway(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            code, body = (
                200,
                json.dumps(etcd.answer(self.path.removeprefix("/v3/"), asked)).encode(),
            )
            if etcd.lost:
                etcd.lost -= 1
                self.close_connection = True
                return
            code, body = etcd.odd or (code, body)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield etcd, server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
