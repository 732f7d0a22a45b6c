"""Odd answers, odd texts and odd clients: one of them must not end what follows."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import urllib.request

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from support.jobs import poll

from agent.notify import figures
from agent.notify.command import EventCommand
from agent.notify.delivery import Delivery
from agent.notify.figures import Figures
from agent.notify.notifier import _CODE, _ROOT, _library
from agent.notify.post import WebHook
from agent.spec.job_spec import NotifySpec

LABELS = {"run_id": 'a"b\\c\nd', "rank": "1"}
NOTICE = {"event": "died", "rank": "1", "step": None, "run_id": "r", "reason": "dead"}


@pytest.fixture
def odd():
    """The address of a server whose answers are no HTTP, and how often it was asked."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            while True:
                try:
                    line, _ = server.accept()
                except OSError:  # closed
                    return
                with line:
                    line.recv(1 << 16)
                    asked.append(1)
                    line.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/", asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_an_answer_that_is_no_http_is_a_failure_that_may_pass(odd):
    url, asked = odd
    assert "BadStatusLine" in WebHook(url, pauses_s=(0.0,))(NOTICE)
    assert len(asked) == 2


def test_one_that_raises_is_said_once_and_the_next_are_delivered():
    said, got = [], []

    def deliver(notice):
        got.append(notice["rank"])
        if notice["rank"] != "3":
            raise LookupError("surprise")
        return ""

    way = Delivery("--webhook", deliver, said.append)
    for rank in ("1", "2", "3", None):
        way.put(None if rank is None else NOTICE | {"rank": rank})
    way.thread.join(30)
    assert got == ["1", "2", "3"]
    assert said == ["--webhook failed for event died: LookupError('surprise'); said once"]


@pytest.mark.parametrize(
    ("reason", "told"), [("a\0b", r"a\0b"), ("a\ud800b", r"a\ud800b"), ("a\u20acb", "a\u20acb")]
)
def test_a_reason_that_no_environment_can_hold_is_escaped(tmp_path, reason, told):
    words = ["sh", "-c", 'printf %s "$REASON" > "$0"', str(tmp_path / "out")]
    assert EventCommand(words)(NOTICE | {"reason": reason}) == ""
    assert (tmp_path / "out").read_text() == told


def figure(value):
    return [["a", "gauge", "Any.", [[{}, value]]]]


def test_the_last_figures_are_written_however_slow_the_file_is(tmp_path, monkeypatch):
    begun, goes, real = threading.Event(), threading.Event(), figures.write_atomic

    def slow(*args, **kwargs):
        begun.set()
        assert goes.wait(30)
        real(*args, **kwargs)

    monkeypatch.setattr(figures, "write_atomic", slow)
    kept = Figures(str(tmp_path / "m.prom"), 0, print)
    kept.put(figure(1))
    assert begun.wait(30)
    for found in (figure(2), figure(3), None):
        kept.put(found)
    goes.set()
    kept.thread.join(30)
    assert (tmp_path / "m.prom").read_text().endswith("\nmsrun_a 3.0\n")


@pytest.fixture
def serve(monkeypatch):
    """A function that serves figures at a free port, and returns it."""
    made = []

    class Kept(figures._Server):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    def start():
        monkeypatch.setattr(figures, "_Server", Kept)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        made.append(Figures("", port, print))
        made[-1].put([*figure(1), ["b", "counter", "How many.", [[LABELS, 2], [{}, 0.5]]]])
        return port

    yield start
    server, kept = made
    server.shutdown()
    server.server_close()
    kept.put(None)
    kept.thread.join(30)


def page(port, accept="text/plain"):
    """What a scrape reads, by Prometheus' own rules."""
    url, headers = f"http://127.0.0.1:{port}/metrics?name[]=a", {"Accept": accept}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        kind, text = answer.headers["Content-Type"], answer.read().decode()
    is_open = kind.startswith("application/openmetrics-text")
    assert is_open == ("openmetrics" in accept)
    parse = (
        openmetrics.text_string_to_metric_families if is_open else text_string_to_metric_families
    )
    return [(family.type, *sample[:3]) for family in parse(text) for sample in family.samples]


PAGE = [
    ("gauge", "msrun_a", {}, 1),
    ("counter", "msrun_b_total", LABELS, 2),
    ("counter", "msrun_b_total", {}, 0.5),
]


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_a_scrape_reads_what_is_known(serve, accept):
    assert page(serve(), accept) == PAGE


def test_a_port_is_opened_without_asking_a_name_server(serve, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getfqdn", lambda *_: asked.append(1) or "localhost")
    assert page(serve()) == PAGE
    assert asked == []


def test_a_client_that_resets_is_not_spoken_of_and_a_silent_one_is_let_go(
    serve, monkeypatch, capfd
):
    monkeypatch.setattr(figures._Page, "timeout", 0.2)
    port, before = serve(), threading.active_count()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /met")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        assert client.recv(1) == b""
    poll(lambda: threading.active_count() <= before)
    assert page(port) == PAGE
    assert capfd.readouterr() == ("", "")


def test_a_courier_speaks_of_a_path_that_is_no_text(tmp_path):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30)
    with ours, theirs:
        asked = NotifySpec(metrics_port=1)
        courier = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CODE, _ROOT, *_library(asked)], stdin=theirs
        )
        theirs.close()
        path = os.fsdecode(os.fsencode(tmp_path) + b"/no/\xff.prom")
        wanted = {"on_event": [], "webhook": "", "metrics_file": path, "metrics_port": 0}
        for message in (wanted | {"killed": {}}, {"metrics": figure(1)}):
            ours.send(json.dumps(message).encode())
        sentence = ours.recv(1 << 16).decode()
        ours.shutdown(socket.SHUT_WR)
        assert courier.wait(30) == 0
    assert sentence.endswith(r"/no/\udcff.prom cannot be written: No such file or directory")
