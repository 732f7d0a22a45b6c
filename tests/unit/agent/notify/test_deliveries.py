"""How a notice gets out: by a command, by a post, and what is said if it does not."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import sys
import threading

import pytest
from support.jobs import poll
from support.web_server import web_server

from agent.notify.command import EventCommand
from agent.notify.delivery import QUEUED, Delivery
from agent.notify.figures import Figures
from agent.notify.post import WebHook

NOTICE = {"event": "died", "rank": "1", "step": None, "run_id": "r", "reason": "it's $(dead)"}


@pytest.fixture
def server():
    with web_server() as made:
        yield made


def test_a_notice_is_posted_as_json_with_the_password_in_a_header(server):
    assert WebHook(f"http://me:p%40ss@127.0.0.1:{server.server_port}/hook?x=1")(NOTICE) == ""
    pair = base64.b64encode(b"me:p@ss").decode()
    assert server.got == [NOTICE]
    assert server.asked == [("/hook?x=1", f"Basic {pair}")]


@pytest.mark.parametrize(
    ("codes", "why", "tries"),
    [
        ([503, 429, 200], "", 3),
        ([500, 500, 500], "HTTP status 500", 3),
        ([404], "HTTP status 404", 1),
        ([302], "HTTP status 302", 1),  # not followed
    ],
)
def test_errors_that_may_pass_are_tried_again(server, codes, why, tries):
    server.codes[:] = codes
    assert (
        WebHook(f"http://127.0.0.1:{server.server_port}/hook?x=1", pauses_s=(0.0, 0.0))(NOTICE)
        == why
    )
    assert [path for path, _ in server.asked] == ["/hook?x=1"] * tries


def test_where_nobody_listens_the_reason_has_no_password():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        why = WebHook(f"http://me:secret@127.0.0.1:{port}/", pauses_s=())(NOTICE)
    assert "refused" in why and "secret" not in why


def test_a_command_finds_the_notice_in_its_environment(tmp_path):
    code = "import os, sys; print([os.environ[each] for each in sys.argv[2:]], file=open(sys.argv[1], 'w'))"
    names = ("EVENT", "RANK", "STEP", "RUN_ID", "REASON")
    assert EventCommand([sys.executable, "-c", code, str(tmp_path / "out"), *names])(NOTICE) == ""
    assert (tmp_path / "out").read_text() == f"{['died', '1', '', 'r', NOTICE['reason']]}\n"


def test_a_command_that_hangs_is_killed_with_what_it_started(tmp_path):
    words = ["sh", "-c", 'sleep 600 & echo $! > "$0"; wait', str(tmp_path / "pid")]
    assert EventCommand(words, limit_s=0.5)(NOTICE) == "it was killed after 0.5 s"
    pid = int((tmp_path / "pid").read_text())
    poll(lambda: not alive(pid))


def alive(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return ") Z " not in file.read()
    return False


def test_a_command_that_fails_says_why():
    assert EventCommand(["false"])(NOTICE) == "exit code 1"
    assert EventCommand([os.devnull])(NOTICE) == "/dev/null: Permission denied"


def test_a_failure_is_said_once_and_a_slow_way_leaves_out():
    said, goes, begun, done = [], threading.Event(), threading.Event(), []

    def deliver(notice):
        begun.set()
        goes.wait()
        done.append(notice)
        return "no such host"

    way = Delivery("--webhook", deliver, said.append)
    way.put(NOTICE)
    begun.wait()
    for _ in range(QUEUED + 5):  # none of them waits
        way.put(NOTICE)
    assert said == ["--webhook is too slow: events are left out"]
    goes.set()
    way.put(None)
    way.thread.join()
    assert len(done) == QUEUED + 1
    assert said[1:] == ["--webhook failed for event died: no such host; said once"]


def test_metrics_that_cannot_be_kept_are_said_once(tmp_path):
    said = []
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        figures = Figures(str(tmp_path / "no" / "m.prom"), port, said.append)
        figures.put([["a", "gauge", "Any.", [[{}, 1]]]])
        poll(lambda: len(said) == 2)
        figures.put(None)
        figures.thread.join()
    assert f"--metrics_port={port}: Address already in use: the metrics are not served" in said
    assert any("m.prom cannot be written: No such file" in sentence for sentence in said)
