"""`msrun logs` for a rank of another node: what it asks, shows and says; msrun is played."""

import json
import os
import socket

import pytest
from support import recorded_runs

from agent.nodes.run_messages import NOW, LogAsked, LogRead
from agent.rank_logs.question import NoAnswerError
from agent.records import run_record
from agent.spec.job_spec import UsageError
from msrun.runs import elsewhere
from msrun.runs.elsewhere import UnansweredError
from msrun.runs.log_files import Wanted, is_shared, views
from msrun.runs.logs import show
from msrun.runs.run_state import look

WANTED = Wanted(rank=0)


class Msrun:
    """Answers as the test says; then it has ended."""

    def __init__(self, monkeypatch):
        self.answers, self.asked = [], []
        self.refuses = False
        self.is_over = True
        monkeypatch.setattr(elsewhere, "LogLine", self._line)
        monkeypatch.setattr(elsewhere, "has_ended", lambda *_: self.is_over)
        monkeypatch.setattr(elsewhere, "PAUSE_S", 0.0)

    def _line(self, record_id, pid):
        assert (record_id, pid) == ("node1", os.getpid())
        if self.refuses:
            raise NoAnswerError("cannot be asked (Connection refused)")
        return Line(self)


class Line:
    def __init__(self, msrun):
        self._msrun = msrun
        self._ends = socket.socketpair()
        self.fileno = self._ends[0].fileno
        self._ends[1].send(b"x" * 100)

    def ask(self, asked):
        self._msrun.asked.append(asked)

    def answer(self):
        if not self._msrun.answers:
            raise NoAnswerError("has ended")
        return self._msrun.answers.pop(0)

    def close(self):
        for end in self._ends:
            end.close()


@pytest.fixture
def msrun(monkeypatch):
    return Msrun(monkeypatch)


@pytest.fixture
def run(tmp_path):
    """On node 1, of a job whose rank 0 is on node 0; this process is its msrun."""
    record = recorded_runs.write(tmp_path, "node1", [], recorded_runs.status("node1", 2))
    birth = run_record.birth(os.getpid())
    where = {"node": 1, "job": "node0", "host": "b", "ranks": (1,)}
    record = record._replace(pid=os.getpid(), born=birth, **where)
    folder = tmp_path / "logs" / "node1"
    (folder / "status.json").rename(folder / "node_1.status.json")
    found = look(record)
    assert found.status is not None
    return found


def follow(run):
    return elsewhere.follow({}, run, WANTED, 0)


def test_a_log_is_shown_as_long_as_it_was_at_first(run, msrun, capfd):
    msrun.answers = [
        LogRead(1, b"abc", at=0, left=2, began=0),
        LogRead(1, b"de", at=3, left=9, began=0),  # it has grown meanwhile
    ]
    show({}, run, WANTED)
    assert capfd.readouterr().out == "abcde"
    assert msrun.asked == [
        LogAsked(0, 0, NOW, (0, 0, 0), False),
        LogAsked(0, 0, 0, (3, 0, 0), False),
    ]


def test_an_empty_log_is_shown(run, msrun, capfd):
    msrun.answers = [LogRead(1, began=0)]
    show({}, run, WANTED)
    assert capfd.readouterr().out == ""


def test_an_attempt_that_is_named_is_asked_for(run, msrun, capfd):
    wanted = Wanted(rank=0, attempt=0)
    msrun.answers = [LogRead(1, b"old", 0, 0, 0, 0, 1), LogRead(1, began=0, following=1)]
    show({}, run, wanted)
    assert capfd.readouterr().out == "old"
    with pytest.raises(UsageError, match="no attempt 9"):
        show({}, run, Wanted(rank=0, attempt=9))


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (LogRead(1, why_not="it is lost"), UnansweredError, "rank 0 of run node1: it is lost"),
        (LogRead(1, why_not="none", is_rest=True), UsageError, "rank 0 of run node1 has no log"),
    ],
)
def test_why_there_is_nothing_is_one_sentence_with_its_exit_code(run, msrun, answer, kind, why):
    msrun.answers = [answer]
    with pytest.raises(kind, match=why) as caught:
        show({}, run, WANTED)
    assert caught.value.exit_code == (1 if kind is UnansweredError else 2)


@pytest.mark.parametrize("do", [lambda run: show({}, run, WANTED), follow])
def test_an_msrun_that_cannot_be_asked_is_named(run, msrun, do):
    msrun.refuses, msrun.is_over = True, False
    with pytest.raises(UnansweredError, match=r"msrun \(pid \d+\) of run node1 cannot be asked"):
        do(run)


def test_it_is_followed_to_its_end_and_what_comes_twice_is_shown_once(run, msrun, capfd):
    msrun.answers = [
        LogRead(1, b"one\n", began=0),
        LogRead(1, began=0),
        LogRead(1, b"two\n", at=4, began=0),
        LogRead(1, b"two\n", at=4, began=0, is_rest=True),
    ]
    follow(run)
    assert capfd.readouterr() == ("one\ntwo\n", "")
    assert [each.known[0] for each in msrun.asked] == [0, 4, 4, 8, 8]
    assert all(each.waits for each in msrun.asked)


def test_an_end_that_may_be_missing_is_said(run, msrun, capfd):
    msrun.answers = [LogRead(1, b"one\n", began=0)]
    follow(run)
    shown = capfd.readouterr()
    assert shown.out == "one\n"
    assert (
        shown.err
        == "msrun: the last lines of rank 0 of run node1 may be missing: its node has them\n"
    )


def test_the_next_process_is_followed_behind_the_last_one(run, msrun, capfd):
    msrun.answers = [
        LogRead(1, b"first\n", began=0),
        LogRead(1, b"its end\n", at=6, began=0, following=2),
        LogRead(1, began=0, following=2),
        LogRead(1, b"second\n", began=2, is_rest=True),
    ]
    follow(run)
    assert capfd.readouterr() == ("first\nits end\nsecond\n", "")
    assert [(each.attempt, each.known[0]) for each in msrun.asked[1:4]] == [(0, 6), (0, 14), (2, 0)]


def test_the_node_in_the_place_of_a_lost_one_has_the_next_process_alone(run, msrun, capfd):
    msrun.answers = [
        LogRead(1, b"first\n", began=0),
        LogRead(1, why_not="there is no worker_0.attempt_0.log there", began=0, following=1),
        LogRead(1, b"second\n", began=1, is_rest=True),
    ]
    follow(run)
    assert capfd.readouterr() == ("first\nsecond\n", "")


def test_a_reason_that_repeats_is_said_once(run, msrun, monkeypatch, capfd):
    lost = LogRead(1, why_not="it ran on node 0, which is lost")
    msrun.answers = [lost, lost, lost, LogRead(1, b"again\n", began=1, is_rest=True)]
    monkeypatch.setattr(elsewhere, "has_ended", lambda *_: not msrun.answers)
    follow(run)
    shown = capfd.readouterr()
    assert shown == ("again\n", "msrun: rank 0 of run node1: it ran on node 0, which is lost\n")


def test_a_log_of_an_earlier_job_in_the_same_folder_is_not_taken_for_this_ones(run, capfd):
    folder = run.folder
    for rank, text in ((0, "of another job\n"), (1, "of this one\n")):
        (folder / f"worker_{rank}.log").write_text(text)
    assert not is_shared(run)
    assert [view.rank for view in views(run, Wanted(), 0)] == [1]
    show({}, run, Wanted())
    shown = capfd.readouterr()
    assert shown.out == "[rank 1]: of this one\n"
    assert shown.err == "msrun: rank 0 is on another node: msrun logs --rank 0 shows its log\n"
    dead = look(run.record._replace(pid=0, born=0))
    with pytest.raises(UnansweredError, match="ran on another node, and its log is there"):
        show({}, dead, WANTED)
    with pytest.raises(UsageError, match="has no rank 7: its ranks are 0 to 1"):
        show({}, dead, Wanted(rank=7))


def test_a_shared_folder_shows_all_of_a_job_that_has_ended(run, capfd):
    dead = look(run.record._replace(pid=0, born=0))
    (run.folder / "worker_0.log").write_text("of node 0\n")
    said = recorded_runs.status("node0", 2)
    (run.folder / "status.json").write_text(json.dumps(said))
    assert is_shared(dead)
    show({}, dead, WANTED)
    assert capfd.readouterr().out == "of node 0\n"


def test_records_that_nodes_share_lead_to_the_log_of_a_job_that_has_ended(run, tmp_path, capfd):
    dead = look(run.record._replace(pid=0, born=0))
    head = recorded_runs.write(tmp_path, "node0", [], recorded_runs.status("node0", 2))
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    folder = run_record.writable_folder(environ)
    run_record.write(folder, head._replace(host="a", ranks=(0,), pid=0, born=0))
    (tmp_path / "logs" / "node0" / "worker_0.log").write_text("of node 0\n")
    show(environ, dead, WANTED)
    assert capfd.readouterr().out == "of node 0\n"


def test_the_log_of_another_nodes_msrun_is_asked_for_and_its_own_is_not(run, msrun, capfd):
    msrun.answers = [LogRead(1, b"decided\n", began=0)]
    wanted = Wanted(scheduler=True, node=0)
    show({}, run, wanted)
    (asked,) = msrun.asked
    assert (asked.rank, asked.node) == (-1, 0)
    (run.folder / "node_1.log").write_text("of this one\n")
    show({}, run, Wanted(scheduler=True, node=1))
    assert capfd.readouterr().out == "decided\nof this one\n"
    dead = look(run.record._replace(pid=0, born=0))
    with pytest.raises(UnansweredError, match="msrun of node 0 of run node1 ran on another node"):
        show({}, dead, wanted)


def test_a_job_on_one_node_has_no_other_one(run):
    alone = look(run.record._replace(host="", ranks=(), job="", node=0))
    with pytest.raises(UsageError, match="run node1 has one node: remove --node"):
        show({}, alone, Wanted(scheduler=True, node=1))


def test_a_scheduler_without_ranks_says_where_they_are(run):
    bare = look(run.record._replace(ranks=(), job="", node=0, pid=0, born=0))
    with pytest.raises(UsageError, match="run on other nodes: --rank N shows the log of one"):
        show({}, bare, Wanted())
