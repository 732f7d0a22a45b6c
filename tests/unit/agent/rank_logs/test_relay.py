"""Questions about logs on the controller's node: to whom they go, and whose the answers are."""

import asyncio
from types import SimpleNamespace

import pytest

from agent.nodes.run_messages import NOW, LogAsked, LogRead
from agent.rank_logs import relay as module
from agent.rank_logs.relay import LogRelay


class FakeNode:
    def __init__(self, number):
        self.name, self.is_there, self.said = f"node {number} (host)", True, []

    def pass_on(self, message):
        self.said.append(message)


class Job:
    """Ranks 0 and 1 on node 0, 2 and 3 on node 1, 4 and 5 on node 2."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.nodes = [FakeNode(0), FakeNode(1), FakeNode(2)]
        self.asked = []
        own = SimpleNamespace(
            record_id=f"relay-{id(self)}",
            attach=lambda _: None,
            ask=lambda *about: self.asked.append(about),
        )
        self.relay = LogRelay(self._home, 6, {1: self.nodes[1], 2: self.nodes[2]}, 0, own)
        self.relay.attach(self.loop)

    def _home(self, rank):
        return self.nodes[rank // 2] if rank in range(2, 6) else None

    def ask(self, node, rank, number=7):
        self.relay.hear_from(self.nodes[node], node, asked(rank, number))


def asked(rank, number=7):
    return LogAsked(number, rank, NOW, (0, 0, 0), True)


@pytest.fixture
def job():
    job = Job()
    yield job
    job.relay.close()
    job.loop.close()


def test_an_answer_goes_to_who_has_asked_by_his_own_number(job):
    job.ask(1, 4)
    job.ask(2, 2)
    (to_second,), (to_first,) = job.nodes[2].said, job.nodes[1].said
    assert (to_second.rank, to_first.rank) == (4, 2)
    assert to_second.question != to_first.question
    job.relay.hear_from(job.nodes[2], 2, LogRead(to_second.question, b"of rank 4"))
    job.relay.hear_from(job.nodes[1], 1, LogRead(to_first.question, b"of rank 2"))
    assert job.nodes[1].said[1:] == [LogRead(7, b"of rank 4")]
    assert job.nodes[2].said[1:] == [LogRead(7, b"of rank 2")]


def test_who_asks_again_is_known_and_hears_the_end_without_a_question(job):
    for _ in range(3):
        job.ask(1, 4)
    assert len({each.question for each in job.nodes[2].said}) == 1
    number = job.nodes[2].said[0].question
    for text in (b"answer", b"the end"):
        job.relay.hear(LogRead(number, text))
    assert job.nodes[1].said == [LogRead(7, b"answer"), LogRead(7, b"the end")]


def test_logs_of_this_nodes_ranks_are_read_here(job):
    job.ask(1, 0)
    ((question, told),) = job.asked
    told(LogRead(question.question, b"x"))
    assert job.nodes[1].said == [LogRead(7, b"x")]


@pytest.mark.parametrize("rank", [6, -1, 1 << 70])
def test_a_rank_that_is_none_is_refused_for_good(job, rank):
    job.ask(1, rank)
    (read,) = job.nodes[1].said
    assert read.is_rest
    assert read.why_not == "the job has no such rank: its ranks are 0 to 5"


def test_the_log_of_a_nodes_msrun_is_asked_for_by_the_nodes_rank(job):
    for node in (2, 0, 3):
        job.relay.ask(1, asked(-1, node)._replace(node=node), job.nodes[1].pass_on)
    assert [each.node for each in job.nodes[2].said] == [2]
    assert [question.node for question, _ in job.asked] == [0]
    (read,) = job.nodes[1].said
    assert read == LogRead(
        3, is_rest=True, why_not="the job has no such node: its nodes are 0 to 2"
    )


def test_a_node_that_does_not_answer_is_named_and_nobody_waits_for_it(job, monkeypatch):
    monkeypatch.setattr(module, "SILENT_S", 0.0)
    job.ask(1, 4)
    job.loop.call_later(0.0, job.loop.stop)
    job.loop.run_forever()
    assert job.nodes[1].said == [
        LogRead(7, why_not="it is on node 2 (host), which does not answer")
    ]


def test_a_node_that_is_lost_is_named_at_once(job):
    why = "it is on node 2 (host), which is lost"
    job.ask(1, 4)
    job.relay.lose(job.nodes[1])
    assert job.nodes[1].said == []
    job.relay.lose(job.nodes[2])
    job.nodes[2].is_there = False
    job.ask(1, 5, number=8)
    assert job.nodes[1].said == [LogRead(7, why_not=why), LogRead(8, why_not=why)]
    assert len(job.nodes[2].said) == 1


def test_the_node_in_the_place_of_a_lost_one_is_asked(job):
    job.ask(1, 4)
    job.nodes[2] = FakeNode(2)
    job.ask(1, 4)
    assert len(job.nodes[2].said) == 1


def test_nobody_reads_what_nobody_asked_for(job):
    job.relay.hear(LogRead(99, b"x"))
    assert not any(node.said for node in job.nodes)


def test_no_more_than_so_many_ask_and_who_asks_no_more_is_forgotten(job, monkeypatch):
    for number in range(module.MOST_ASKERS + 1):
        job.ask(1, 4, number)
    assert job.nodes[1].said == [LogRead(module.MOST_ASKERS, why_not=module.TOO_MANY)]
    monkeypatch.setattr(module, "FORGET_S", -1.0)
    job.ask(1, 4, module.MOST_ASKERS)
    assert len(job.nodes[1].said) == 1
    assert len(job.relay._askers) == len(job.relay._numbers) == 1
