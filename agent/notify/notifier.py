"""msrun's side: starts the courier if there is anything to tell, and hands it that."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence

from agent.accounting.account import Account
from agent.controller.job import Job
from agent.notify.metrics import families
from agent.notify.notice import ENDED, HUNG, Notice
from agent.spec.job_spec import NotifySpec
from agent.spec.run_facts import RunFacts
from agent.text.ranges import format_ranges
from agent.workers.worker import Worker

CLOSE_S = 5.0  # for the courier's last deliveries; it takes three
LONGEST = 1 << 16
SEND_BUFFER = 1 << 19  # the kernel doubles it; the default is too small for some thousands of ranks
FIGURES_S = 1.0  # how often they are renewed at most
_CODE = """import sys
sys.path[:0], sys.path[len(sys.path):] = sys.argv[1:2], sys.argv[2:]
from agent.notify.courier import main
main()"""
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def _library(wanted: NotifySpec) -> list[str]:
    """The folder of prometheus_client, if it is needed: the courier begins with no other."""
    if not (wanted.metrics_file or wanted.metrics_port):
        return []
    from importlib.util import find_spec

    found = find_spec("prometheus_client")
    places = (found and found.submodule_search_locations) or ()
    return [os.path.dirname(place) for place in places]


class Notifier:
    """Never blocks: a courier that does not keep up misses something, which is said once."""

    def __init__(self, facts: RunFacts, say: Callable[[str], None]) -> None:
        """Start the courier, if the job wants any of it."""
        self._facts = facts
        self._say = say
        self._hung = 0
        self._told_s = -FIGURES_S  # when the metrics were told last
        self._state: object = None  # of the job, then
        self._is_behind = False
        self._has_ranks = True  # in the metrics: not if they are too many
        self._line: socket.socket | None = None
        self._pid, self._end = 0, -1
        if facts.spec.notify.is_on:
            try:
                self._start()
            except OSError as error:
                say(f"no events are told and no metrics kept: {error.strerror}")

    def _start(self) -> None:
        import subprocess  # 10 ms, for those who need it

        wanted = self._facts.spec.notify
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _CODE, _ROOT, *_library(wanted)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        process.returncode = 0  # the supervisor takes in the end of every child
        self._pid, self._end = process.pid, os.pidfd_open(process.pid)
        ours.setblocking(False)
        self._line = ours
        self._send(
            {
                "on_event": wanted.on_event,
                "webhook": wanted.webhook,
                "metrics_file": str(wanted.metrics_file or ""),
                "metrics_port": wanted.metrics_port or 0,
                "killed": self._message(Notice(ENDED, f"lost: msrun (pid {os.getpid()}) is gone")),
            }
        )

    @property
    def pids(self) -> frozenset[int]:
        """Processes that no sweep may kill."""
        return frozenset(filter(None, (self._pid,)))

    def tell(self, notice: Notice) -> None:
        """Something happened."""
        self._hung += len(notice.ranks) if notice.event == HUNG else 0
        if not self._send(self._message(notice)):
            self._say(f"event {notice.event} is left out: it is too long to be told")

    def _message(self, notice: Notice) -> dict[str, object]:
        spec = self._facts.spec
        return {
            "event": notice.event,
            "rank": format_ranges(notice.ranks),
            "ranks": notice.ranks,
            "step": notice.step,
            "reason": notice.reason,
            "lost_s": None if notice.lost_s is None else round(notice.lost_s, 3),
            "run_id": spec.run_id,
            "record_id": spec.record_id,
            "host": self._facts.host,
            "time": round(time.time(), 3),
        }

    def changed(self, job: Job, workers: Sequence[Worker], account: Account) -> None:
        """There are new figures."""
        self.hear()
        wanted, now_s = self._facts.spec.notify, time.monotonic()
        if self._line is None or not (wanted.metrics_file or wanted.metrics_port):
            return
        if job.state is self._state and now_s - self._told_s < FIGURES_S:
            return
        self._state, self._told_s = job.state, now_s
        if self._tell_figures(job, workers, account) or not self._has_ranks:
            return
        self._has_ranks = False
        count = len(workers)
        self._say(
            f"the times of steps of {count} ranks are too many for the metrics: they are left out"
        )
        self._tell_figures(job, workers, account)

    def _tell_figures(self, job: Job, workers: Sequence[Worker], account: Account) -> bool:
        now, by_rank = time.time(), self._has_ranks
        found = families(self._facts, job, workers, account, self._hung, now, by_rank=by_rank)
        return self._send({"metrics": found})

    def _send(self, message: dict[str, object]) -> bool:
        """Hand it over, if that is possible at once; false: it is too long for ever."""
        if self._line is None:
            return True
        self.hear()
        try:
            self._line.send(json.dumps(message).encode())
        except OSError as error:  # it does not keep up, or is gone
            if error.errno == errno.EMSGSIZE:
                return False
            if not self._is_behind:
                self._is_behind = True
                self._say("events are left out: their courier does not keep up, or was killed")
        return True

    def hear(self) -> bool:
        """Say what the courier has to say; whether it may say more."""
        while self._line is not None:
            try:
                sentence = self._line.recv(LONGEST).decode(errors="replace")
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not sentence:
                return False
            self._say(sentence)
        return False

    def close(self) -> None:
        """The job is over: give the courier a moment for its last deliveries, then end it."""
        if self._line is None:
            return
        import select

        until = time.monotonic() + CLOSE_S
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
        ready = select.poll()
        ready.register(self._line, select.POLLIN)
        while self.hear() and (left := until - time.monotonic()) > 0:
            ready.poll(left * 1000)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._end, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, self._end, os.WEXITED)
        os.close(self._end)
        self._line.close()
        self._line, self._pid = None, 0
