"""Workers without a scheduler look for it, and for what makes that too late."""

import asyncio
import socket
from types import SimpleNamespace

import pytest
from support.jobs import poll

from agent.launch import scheduler_watch as module
from agent.launch.doors import Address
from agent.launch.scheduler_watch import (
    GONE,
    SAVING,
    SILENT,
    AloneWith,
    LostWorkers,
    SchedulerWatch,
)
from agent.nodes.join import NeverBegunError, NobodyThereError, RefusedError
from agent.nodes.messages import AGAIN
from agent.nodes.roster import Doors

LONG_S = 60


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("AGAIN_S", "REFUSED_S", "GONE_S"):
        monkeypatch.setattr(module, name, 0.01)


class Worker:
    """A watch on a loop, and all that it says."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.found, self.late, self.said = [], [], []
        self.watch = None

    def look(self, *answers, doors=None, folders=()):
        left = iter(answers)

        def dial(opened):
            answer = next(left, NobodyThereError())
            if callable(answer):
                answer = answer(opened)
            if isinstance(answer, Exception):
                raise answer
            return answer

        self.watch = SchedulerWatch(
            AloneWith(dial, doors or {}, folders),
            self.loop,
            self.found.append,
            lambda why, certain: self.late.append((why, certain)),
            self.said.append,
        )
        return self.watch

    def until(self, holds):
        poll(lambda: self.turn(0.005) or holds(), LONG_S)

    def turn(self, seconds=0.1):
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def worker():
    one = Worker()
    yield one
    if one.watch is not None:
        one.watch.close()
    one.loop.close()


def line():
    closed = []
    connection = SimpleNamespace(close=lambda: closed.append(True))
    return SimpleNamespace(line=SimpleNamespace(connection=connection), closed=closed)


def test_it_is_dialled_until_it_is_there(worker):
    there = line()
    worker.look(NobodyThereError(), NobodyThereError(), there)
    worker.until(lambda: worker.found)
    assert (worker.found, worker.said, worker.late, there.closed) == ([there], [], [], [])


def test_another_job_at_its_port_is_said_once(worker):
    refused = RefusedError("other arguments", 2)
    worker.look(refused, refused, NeverBegunError("too late"), line())
    worker.until(lambda: worker.found)
    assert worker.said == [
        "what is at the scheduler's port is none: other arguments",
        "what is at the scheduler's port is none: too late",
    ]
    assert worker.late == []


def test_a_scheduler_that_has_to_start_ranks_wants_these_to_save(worker):
    worker.look(RefusedError("another worker has no rank any more", AGAIN))
    worker.until(lambda: worker.late)
    assert worker.late[0] == ("another worker has no rank any more", True)
    assert worker.said == []


def test_a_worker_that_is_let_alone_then_is_told_again(worker, tmp_path):
    """It evaluates, say; and looks for the scheduler as before."""
    there = line()
    worker.look(
        RefusedError("another worker has no rank any more", AGAIN), there, folders=[tmp_path]
    )
    worker.until(lambda: worker.found and worker.late.count((SAVING, True)) > 1)
    assert worker.found == [there]


def test_what_comes_too_late_is_closed(worker):
    there = line()

    def dial(_opened):
        poll(lambda: worker.watch is not None, LONG_S)  # it may be dialled before it is returned
        worker.watch.close()
        return there

    worker.look(NobodyThereError(), dial)
    worker.until(lambda: there.closed)
    assert worker.found == []


@pytest.mark.parametrize("is_found", [False, True])
def test_who_waits_there_waits_no_longer_when_it_is_closed(worker, is_found):
    one, other = socket.socketpair()
    waits, heard = [], []

    def dial(opened):
        opened(one)
        waits.append(1)
        if is_found:
            return line()
        heard.append(one.recv(1))
        return NobodyThereError()

    worker.look(dial)
    worker.until(lambda: worker.found if is_found else waits)
    worker.watch.close()
    if is_found:  # the connection is somebody else's
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    else:
        worker.until(lambda: heard)
        assert heard == [b""]
    for each in (one, other):
        each.close()


def test_a_closed_loop_wants_nothing():
    worker = Worker()
    watch = worker.look(line())
    watch.close()
    worker.loop.close()
    watch._call(print, "nobody hears it")


def test_the_first_notes_of_ranks_elsewhere_are_seen(worker, tmp_path):
    worker.look(folders=[tmp_path / "a"])
    worker.turn()
    assert worker.late == []
    (tmp_path / "a").mkdir()
    worker.until(lambda: worker.late)
    assert worker.late[0] == (SAVING, True)


def test_a_file_server_that_is_away_for_a_moment_changes_nothing(worker):
    answers = [OSError("stale"), OSError("stale"), True]

    def exists():
        answer = answers.pop(0) if answers else True
        if isinstance(answer, OSError):
            raise answer
        return answer

    worker.look(folders=[SimpleNamespace(exists=exists)])
    worker.until(lambda: worker.late)
    assert (worker.late[0], answers) == ((SAVING, True), [])


def test_another_workers_msrun_is_gone(worker):
    with socket.create_server(("127.0.0.1", 0)) as door:
        worker.look(doors={2: Address(*door.getsockname())})
        worker.turn()
        assert worker.late == []
    worker.until(lambda: worker.late)
    assert worker.late[0] == (GONE, False)


@pytest.mark.parametrize(
    ("doors", "why"),
    [
        (Doors(open=frozenset({2})), ""),
        (Doors(gone=frozenset({2})), GONE),
        (Doors(silent=frozenset({2}), open=frozenset({3})), SILENT),
    ],
)
def test_a_worker_that_stays_lost_is_not_trained_without(doors, why):
    others = LostWorkers()
    assert others.why(doors, 0.0) == ""
    assert others.why(doors, 10.0) == why
    assert others.why(Doors(), 11.0) == ""
    assert others.why(doors, 12.0) == ""


def test_nobody_is_told_who_does_not_want_to_know_any_more(worker, tmp_path):
    watch = worker.look(folders=[tmp_path])
    watch.close()
    worker.turn()
    assert worker.late == []
