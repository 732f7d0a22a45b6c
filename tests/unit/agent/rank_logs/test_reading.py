"""A node reads logs of its ranks, and nothing else, for who asks on another one."""

import asyncio
import os

import pytest

from agent.nodes.run_messages import NOW, LogAsked, LogRead
from agent.rank_logs import reading as module
from agent.rank_logs.reading import MOST_BYTES, LogReader
from agent.workers.worker import Worker
from worker_hooks.contract.layout import RunLayout


class Node:
    """Rank 2 on a node, and who reads its log."""

    def __init__(self, folder):
        self.loop = asyncio.new_event_loop()
        self.layout = RunLayout(folder, "record", "run", node=1)
        self.workers = [Worker(2, 0, 0)]
        self.told, self._awaited = [], 0
        self.reader = LogReader(self.layout, lambda: self.workers, is_off=False)
        self.reader.attach(self.loop)

    def write(self, text, path=None):
        path = path or self.layout.worker_log(2)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(text)

    def begin(self, attempt):
        """The rank's next process: what supervisors do within one call."""
        os.rename(self.layout.worker_log(2), self.layout.earlier_worker_log(2, attempt - 1))
        self.workers[0] = Worker(2, 0, attempt)
        self.write(b"")

    def ask(self, attempt=NOW, known=(0, 0, 0), *, question=1, rank=2, waits=False):
        self.reader.ask(LogAsked(question, rank, attempt, known, waits), self._hear)

    def _hear(self, read):
        self.told.append(read)
        if len(self.told) == self._awaited:
            self.loop.stop()

    def turn(self, count=1):
        """Until so many answers have come."""

        self._awaited = count
        if len(self.told) < count:
            self.loop.run_forever()
        told, self.told[:] = list(self.told), []
        return told

    def read(self, *about, **more):
        self.ask(*about, **more)
        return self.turn()[0]


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.reader._thread.close(60)
    node.loop.close()


def test_a_log_comes_in_pieces_from_where_the_last_one_ended(node):
    node.write(b"x" * MOST_BYTES + b"end\n")
    first = node.read()
    assert first == LogRead(1, b"x" * MOST_BYTES, left=4, began=0)
    second = node.read(known=(MOST_BYTES, 0, 0))
    assert second == LogRead(1, b"end\n", at=MOST_BYTES, began=0)
    assert node.read(known=(MOST_BYTES + 4, 0, 0)) == LogRead(1, began=0)


@pytest.mark.parametrize("known", [(), (-5,), (0, 0, 0, 7), (10**30,)])
def test_odd_questions_are_answered(node, known):
    node.write(b"log\n")
    assert node.read(known=known).data in {b"log\n", b""}


def test_streams_come_behind_the_log_and_who_follows_hears_the_longest_first(node):
    node.write(b"a")
    for name, text in (("stdout", b"bbb"), ("stderr", b"cc")):
        node.write(text, node.layout.stream(0, 0, name))
    known, found = [0, 0, 0], []
    while (read := node.read(known=tuple(known))).data:
        found.append(read.data)
        known[read.file] += len(read.data)
    assert found == [b"a", b"bbb", b"cc"]
    assert node.read(waits=True).data == b"bbb"


def test_who_follows_hears_as_soon_as_there_is_something(node, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    node.write(b"old\n")
    node.ask(known=(4, 0, 0), waits=True)
    node.loop.call_later(0.05, node.write, b"new\n")
    assert node.turn() == [LogRead(1, b"new\n", at=4, began=0)]


def test_who_follows_hears_after_a_while_that_there_is_nothing(node, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    node.write(b"old\n")
    assert node.read(known=(4, 0, 0), waits=True) == LogRead(1, began=0)


def test_the_rest_is_told_as_the_attempt_ends_without_a_question(node):
    node.write(b"old\n")
    assert node.read(waits=True).data == b"old\n"
    node.write(b"last\n" + b"y" * MOST_BYTES)
    node.reader.rest()
    first, second = node.told
    assert (first.at, first.is_rest, second.is_rest) == (4, False, True)
    assert first.data + second.data == b"last\n" + b"y" * MOST_BYTES


def test_who_has_all_hears_that_it_is_all(node):
    node.write(b"old\n")
    node.read(waits=True)
    node.reader.rest()
    assert node.told == [LogRead(1, at=0, began=0, is_rest=True)]


def test_who_does_not_follow_or_does_no_more_is_told_no_rest(node, monkeypatch):
    node.write(b"old\n")
    node.read(waits=False)
    monkeypatch.setattr(module, "FORGET_S", -1.0)
    node.read(question=2, waits=True)
    node.reader.rest()
    assert node.told == []


def test_who_follows_reads_a_process_to_its_end_and_then_the_next_one(node):
    node.write(b"first\n")
    assert node.read(waits=True).began == 0
    node.write(b"its end\n")
    node.begin(3)  # it has lived through two replacements of others
    node.write(b"second\n")
    assert node.read(0, (6, 0, 0), waits=True) == LogRead(1, b"its end\n", 0, 6, 0, 0, 3)
    assert node.read(0, (14, 0, 0), waits=True) == LogRead(1, began=0, following=3)
    assert node.read(3, waits=True) == LogRead(1, b"second\n", began=3)


def test_an_earlier_attempt_is_that_of_the_process_that_ran_in_it(node):
    node.write(b"first\n")
    node.begin(3)
    for attempt in (0, 1, 2):
        assert node.read(attempt).data == b"first\n"
    assert node.read(3).data == b""


def test_streams_of_an_earlier_process_have_the_number_of_its_first_attempt(node):
    node.write(b"")
    for attempt, text in ((0, b"a"), (2, b"b"), (5, b"c")):
        node.write(text, node.layout.stream(attempt, 0, "stdout"))
    node.workers[0] = Worker(2, 0, 5)
    assert [node.read(each).data for each in (0, 1, 2, 4, 5)] == [b"a", b"a", b"b", b"b", b"c"]
    assert [node.read(each).following for each in (0, 1, 2, 4, 5)] == [2, 2, 5, 5, NOW]


def test_a_process_that_begins_while_the_thread_reads_is_not_mixed_with_the_last(node):
    node.write(b"first\n")
    node.ask(0, (6, 0, 0), waits=True)
    node.begin(1)  # before the loop hears of what the thread has read
    node.write(b"second, longer\n")
    assert node.turn() == [LogRead(1, began=0, following=1)]


def test_what_is_no_plain_file_is_not_read(node, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(b"key\n")
    node.layout.worker_log(2).symlink_to(secret)
    assert node.read() == LogRead(1, began=0, why_not="there is no worker_2.log there")
    node.layout.worker_log(2).unlink()
    os.mkfifo(node.layout.worker_log(2))
    assert node.read().why_not == "there is no worker_2.log there"


@pytest.mark.parametrize("rank", [3, -1, 1 << 40])
def test_no_other_ranks_are_read(node, rank):
    node.write(b"of another job\n", node.layout.worker_log(rank))
    assert node.read(rank=rank) == LogRead(1, why_not=module.NOT_STARTED)


def test_the_log_of_msrun_itself_never_ends_with_an_attempt(node):
    node.write(b"decided\n", node.layout.scheduler_log)
    asked = LogAsked(1, -1, NOW, (0, 0, 0), True, node=1)
    node.reader.ask(asked, node._hear)
    assert node.turn() == [LogRead(1, b"decided\n", began=0)]
    node.write(b"Sweep\n", node.layout.scheduler_log)
    node.reader.rest()
    assert node.told == [LogRead(1, b"Sweep\n", at=8, began=0)]


def test_a_node_without_files_says_so_once_and_for_all(node):
    node.reader._is_off = True
    assert node.read() == LogRead(1, why_not=module.NO_FILES, is_rest=True)


def test_a_file_that_cannot_be_read_is_a_reason(node, monkeypatch):
    node.write(b"x")

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "_piece", broken)
    why = "it cannot be read there (Input/output error)"
    assert node.read(waits=True) == LogRead(1, why_not=why)
    node.read(waits=True)
    node.reader.rest()  # the end of the attempt does not hang on it


def test_a_thread_that_is_stuck_gets_no_second_job_of_the_same_asker(node, monkeypatch):
    jobs = []
    monkeypatch.setattr(node.reader._thread, "do", lambda *job: jobs.append(job))
    for _ in range(50):
        node.ask(waits=True)
    assert len(jobs) == 1
    read, done = jobs[0]
    node.write(b"log\n")
    done(read())
    assert (len(jobs), node.told) == (2, [])  # of the newest question
    jobs[1][1](jobs[1][0]())
    assert [each.data for each in node.told] == [b"log\n"]


def test_no_more_than_so_many_read(node):
    for number in range(module.MOST_READERS + 1):
        node.ask(question=number, waits=True)
    assert node.told == [LogRead(module.MOST_READERS, why_not=module.TOO_MANY)]
