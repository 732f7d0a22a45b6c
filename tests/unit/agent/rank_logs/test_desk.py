"""`msrun logs` asks the msrun on its machine: by a real socket, in one process."""

import asyncio
import os
import socket
import threading

import pytest
from support.jobs import poll

from agent.nodes.line import bytes_of
from agent.nodes.run_messages import NOW, LogAsked, LogRead, Wake
from agent.rank_logs import desk as module
from agent.rank_logs.desk import LogDesk
from agent.rank_logs.node_logs import ALONE, NodeLogs
from agent.rank_logs.question import LogLine, NoAnswerError, name_of

ASKED = LogAsked(5, 2, NOW, (1, 2, 3), True)


class Desk:
    """A desk in a loop of its own; a question is kept, or answered by ``answers``."""

    def __init__(self):
        self.record_id = f"desk-{os.getpid()}-{id(self)}"
        self.loop = asyncio.new_event_loop()
        self.asked, self.answers = [], []
        self.desk = LogDesk(self.record_id, self._ask)
        self.desk.attach(self.loop)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def _ask(self, asked):
        self.asked.append(asked)
        for answer in self.answers:
            self.desk.hear(answer._replace(question=asked.question))

    def do(self, call, *args):
        """In the loop; what it returns."""
        done = threading.Event()
        found = []
        self.loop.call_soon_threadsafe(lambda: (found.append(call(*args)), done.set()))
        assert done.wait(60)
        return found[0]

    def line(self):
        return LogLine(self.record_id, os.getpid())

    def raw(self):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.settimeout(60)
        line.connect(f"\0{name_of(self.record_id)}")
        return line

    def close(self):
        self.do(self.desk.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.close()


def test_a_question_and_its_answer(desk):
    data = os.urandom(64 << 10)
    desk.answers = [LogRead(0, data, 1, 3, 4, 5, 6)]
    line = desk.line()
    line.ask(ASKED)
    read = line.answer()
    assert read._replace(question=0) == desk.answers[0]
    assert desk.asked == [ASKED._replace(question=read.question)]
    line.close()


def test_two_who_ask_get_their_own_answers(desk):
    lines = [desk.line(), desk.line()]
    for rank, line in enumerate(lines):
        line.ask(ASKED._replace(rank=rank))
        poll(lambda count=rank + 1: len(desk.asked) == count)
    for asked in reversed(desk.asked):
        desk.do(desk.desk.hear, LogRead(asked.question, str(asked.rank).encode()))
    assert [line.answer().data for line in lines] == [b"0", b"1"]
    for line in lines:
        line.close()


def test_what_was_said_before_the_end_is_heard(desk):
    desk.answers = [LogRead(0, b"answer"), LogRead(0, b"the end", is_rest=True)]
    line = desk.line()
    line.ask(ASKED)
    assert line.answer().data == b"answer"
    desk.do(desk.desk.close)
    line.ask(ASKED)  # which nobody hears
    assert line.answer().data == b"the end"
    with pytest.raises(NoAnswerError, match="has ended"):
        line.answer()
    line.close()


def test_a_controller_that_does_not_answer_is_said(desk, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    line = desk.line()
    line.ask(ASKED)
    assert line.answer().why_not == module.SILENT
    line.close()


@pytest.mark.parametrize(
    "packet", [b"x", b"\0\0\0\2{}", bytes_of(Wake(1)), bytes_of(ASKED) * 2, b"\xff" * 5000]
)
def test_who_says_anything_else_is_not_heard(desk, packet):
    line = desk.raw()
    line.send(packet)
    assert line.recv(100) == b""
    assert desk.asked == []
    line.close()


def test_another_users_question_is_not_heard(desk):
    if os.geteuid():
        pytest.skip("only root can be another user")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setuid(65534)
        line = desk.raw()
        try:
            line.send(bytes_of(ASKED))
            heard = line.recv(100)
        except OSError:
            heard = b""
        os.write(writing, heard or b"nothing")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"nothing"
    assert desk.asked == []
    for end in (reading, writing):
        os.close(end)


def test_another_process_cannot_answer(desk):
    with pytest.raises(NoAnswerError, match=f"process {os.getpid()} has its socket"):
        LogLine(desk.record_id, os.getpid() + 1)
    with pytest.raises(NoAnswerError, match="cannot be asked"):
        LogLine("no-such-run", os.getpid())


def test_no_more_than_so_many_ask(desk):
    lines = [desk.raw() for _ in range(module.MOST_ASKERS)]
    one_more = desk.line()
    one_more.ask(ASKED)
    assert one_more.answer().why_not == module.TOO_MANY
    lines.pop().close()
    desk.do(lambda: None)
    again = desk.line()
    desk.answers = [LogRead(0, b"x")]
    again.ask(ASKED)
    assert again.answer().data == b"x"
    for line in (*lines, one_more, again):
        line.close()


def test_a_name_that_is_taken_is_no_reason_to_end(desk):
    second = LogDesk(desk.record_id, desk.asked.append)
    second.attach(desk.loop)
    second.close()


class FakeReader:
    record_id = "node-logs"

    def __init__(self):
        self.asked = []

    def attach(self, loop):
        self.loop = loop

    def ask(self, asked, told):
        told(LogRead(asked.question, b"of here"))

    def rest(self):
        self.asked.append("rest")


def test_a_node_asks_the_controllers_and_answers_it_and_knows_when_there_is_none(monkeypatch):
    loop, said, told = asyncio.new_event_loop(), [], []
    logs = NodeLogs(FakeReader())
    monkeypatch.setattr(logs._desk, "hear", told.append)
    is_open = [True]
    logs.attach(loop, said.append, lambda: is_open[0])
    logs.hear(ASKED)
    logs._ask(ASKED)
    logs.hear(LogRead(5, b"of there"))
    is_open[0] = False
    logs._ask(ASKED)
    assert said == [LogRead(5, b"of here"), ASKED]
    assert told == [LogRead(5, b"of there"), LogRead(5, why_not=ALONE)]
    logs.close()
    loop.close()
