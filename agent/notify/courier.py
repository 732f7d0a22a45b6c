"""A process beside msrun that runs a command, posts to a web hook, and offers the metrics.

It takes messages of JSON from a socket, each in one packet: first what to do, then ``notice`` and
``metrics``. It answers with sentences for people. When the socket closes, msrun is done or dead,
and a death is told. What is queued has ``LAST_S``, then the process ends with what it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from agent.notify.command import EventCommand
from agent.notify.delivery import LAST_S, Delivery
from agent.notify.post import WebHook

if TYPE_CHECKING:
    from agent.notify.figures import Figures

LONGEST = 1 << 20  # a packet, in bytes
ENDED = "ended"
KILLED_S = 15.0  # as LAST_S, if msrun is gone


def main() -> NoReturn:
    """Work until the socket, which is descriptor 0, is closed by msrun."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)  # they end the job, and the job ends this
    line = socket.socket(fileno=os.dup(0))

    def say(sentence: str) -> None:
        with contextlib.suppress(OSError):  # msrun is gone
            line.send(sentence.encode(errors="backslashreplace"))  # a path need not be text

    wanted = json.loads(line.recv(LONGEST))
    command = EventCommand(wanted["on_event"]) if wanted["on_event"] else None
    ways = [] if command is None else [Delivery("--on_event", command, say)]
    if wanted["webhook"]:
        ways.append(Delivery("--webhook", WebHook(wanted["webhook"]), say))
    figures = _figures(wanted, say)
    told = ""
    while content := line.recv(LONGEST):
        message = json.loads(content)
        if figures and "metrics" in message:
            figures.put(message["metrics"])
        for way in ways if "event" in message else ():
            way.put(message)
            told = message["event"]
    if told != ENDED:  # msrun is gone: nobody else can tell, and nobody waits
        for way in ways:
            way.put({**wanted["killed"], "time": round(time.time(), 3)})
    _finish(figures, ways, say, LAST_S if told == ENDED else KILLED_S)
    if command is not None:
        command.end()
    os._exit(0)


def _figures(wanted: dict[str, Any], say: Callable[[str], None]) -> Figures | None:
    if not (wanted["metrics_file"] or wanted["metrics_port"]):
        return None
    from agent.notify.figures import Figures  # an extra's library, and 0.1 s

    return Figures(wanted["metrics_file"], wanted["metrics_port"], say)


def _finish(
    figures: Figures | None, ways: Sequence[Delivery], say: Callable[[str], None], within_s: float
) -> None:
    """Give what is queued its time."""
    until = time.monotonic() + within_s
    works: list[Delivery | Figures] = [*ways, figures] if figures else [*ways]
    for each in works:
        each.put(None)
    for each in works:
        each.thread.join(max(0.0, until - time.monotonic()))
    if any(way.thread.is_alive() for way in ways):
        say("the job is over: the last events were not all delivered")
