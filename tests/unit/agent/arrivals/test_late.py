"""Who dials a job that runs: strangers, nodes that come late, and spare ones."""

import threading

import pytest
from support.meeting_nodes import (
    LONG_S,
    OVER,
    STRANGERS,
    TOKEN,
    Clock,
    heard,
    is_closed,
    node,
    wish,
)

from agent.arrivals.late import NodePlace
from agent.nodes import join as joining
from agent.nodes.frames import PREAMBLE, FrameReader, message_of
from agent.nodes.join import LostWhileSpareError, NeverBegunError, RefusedError, join
from agent.nodes.line import bytes_of
from agent.nodes.messages import (
    ANY_RANK,
    Begin,
    Challenge,
    Join,
    Spare,
    StillThere,
)
from agent.nodes.run_messages import NodeFacts
from agent.nodes.token import Proofs, Side


def test_a_late_node_hears_that_the_job_has_begun(job, late):
    error = job.join(node("mn7"), TOKEN).exception(LONG_S)
    assert (error.why, error.exit_code) == ("the job has begun with all its nodes (mn0, mn1)", 2)
    assert "needs a token" in str(job.join(node("mn8")).exception(LONG_S))
    assert (late.refused, late.strangers) == (2, 0)


def test_late_strangers_are_closed_and_only_so_many_are_kept(job, late, monkeypatch):
    monkeypatch.setattr("agent.arrivals.late.MOST_GUESTS", 4)
    monkeypatch.setattr("agent.arrivals.late.PATIENCE_S", 0.01)
    monkeypatch.setattr("agent.arrivals.late.ANSWER_S", 2 * LONG_S)
    for data in STRANGERS[:3]:
        assert is_closed(job.connect(data))
    silent = [job.connect() for _ in range(12)]
    assert all(is_closed(each) for each in silent[:8])
    assert "has begun" in str(job.join(node("mn7"), TOKEN).exception(LONG_S))
    assert late.strangers >= 11


def test_who_comes_late_has_a_moment_to_say_who_it_is(job, late, monkeypatch):
    """However many knock meanwhile."""
    monkeypatch.setattr("agent.arrivals.late.MOST_GUESTS", 1)
    late.answers[0] = Spare(())
    slow, reader = job.connect(PREAMBLE), FrameReader(message_of)
    challenge = heard(slow, reader)
    for _ in range(5):
        job.connect()
    own = node("mn1", 1)
    slow.sendall(bytes_of(wish(own, challenge, TOKEN, is_spare=True)))
    assert heard(slow, reader) == Spare(())


def test_once_there_is_room_nobody_waits(job, late, monkeypatch):
    """Thousands may come at once to a node that takes the part of node 0."""
    monkeypatch.setattr("agent.arrivals.late.MOST_GUESTS", 1)
    monkeypatch.setattr("agent.arrivals.late.PATIENCE_S", 10 * LONG_S)
    late.answers[0] = Spare(())
    waiting = [spare(job)[1] for _ in range(5)]
    assert all(each.wait(LONG_S) for each in waiting)
    job.connect().close()
    waits = spare(job)[1]
    assert waits.wait(LONG_S)


@pytest.mark.usefixtures("late")
def test_late_strangers_that_say_nothing_are_closed_in_time(job, monkeypatch):
    monkeypatch.setattr("agent.arrivals.late.ANSWER_S", 0.05)
    assert is_closed(job.connect())


# --- spare nodes ----------------------------------------------------------------------------------

SEAT = NodePlace(1, Begin((NodeFacts(0, "mn0", "", 2, 1), NodeFacts(1, "mn7", "", 2, 2)), {"x": 1}))


def spare(job, say=None, timeout_s=LONG_S):
    """A node that waits; the event is set once it knows that it does."""
    waits = threading.Event()
    own = node("mn7", is_spare=True)
    args = (own, lambda: TOKEN, timeout_s, say or job.lines.put)
    future = job._start(join, "127.0.0.1", job.port, *args, 10.0, waits.set)
    return future, waits


def test_a_spare_node_takes_a_place_that_becomes_free(job, late):
    late.answers[0] = Spare(())
    future, waits = spare(job)
    assert waits.wait(LONG_S)
    late.loop.call_soon_threadsafe(late.tell_spares, StillThere())
    assert not future.done()
    late.answers[0] = SEAT
    late.loop.call_soon_threadsafe(late.seat)
    joined = future.result(LONG_S)
    assert (joined.node_rank, joined.settings) == (1, {"x": 1})
    rank, line = late.admitted.get(timeout=LONG_S)
    assert rank == 1
    line.connection.close()


def test_a_spare_node_waits_longer_than_nodes_of_the_job_may(job, late, monkeypatch):
    late.answers[0] = Spare(())
    clock = Clock()
    monkeypatch.setattr(joining, "time", clock)
    future, waits = spare(job, timeout_s=5.0)
    assert waits.wait(LONG_S)
    clock.late_s = 1e6
    late.answers[0] = SEAT
    late.loop.call_soon_threadsafe(late.seat)
    assert future.result(LONG_S).node_rank == 1
    late.admitted.get(timeout=LONG_S)[1].connection.close()


def test_a_spare_node_that_was_not_needed_ends_as_the_job(job, late):
    late.answers[0] = Spare(())
    future, waits = spare(job)
    assert waits.wait(LONG_S)
    late.loop.call_soon_threadsafe(late.close, OVER)
    error = future.exception(LONG_S)
    assert (error.why, error.exit_code, error.is_over) == (OVER.why, 0, True)
    late.loop.call_soon_threadsafe(late._listen)  # for the fixture


def test_a_spare_node_that_is_gone_gets_no_place(job, late):
    late.answers[0] = Spare(())
    connection = job.connect(PREAMBLE)
    reader = FrameReader(message_of)
    challenge = heard(connection, reader)
    own = node("mn8", is_spare=True)
    proofs = Proofs(own.run_id, challenge.nonce, "00" * 16)
    proof = proofs.proof(TOKEN, Side.NODE)
    about = (own.run_id, own.record_id, ANY_RANK, 2, own.host, own.pid, own.version, "")
    wish = Join(*about, "00" * 16, proof, is_spare=True)
    connection.sendall(bytes_of(wish))
    assert heard(connection, reader) == Spare(())
    connection.close()
    future, waits = spare(job)
    assert waits.wait(LONG_S)  # by then the other end is known to be closed
    late.answers[0] = SEAT
    late.loop.call_soon_threadsafe(late.seat)
    assert future.result(LONG_S).node_rank == 1
    late.admitted.get(timeout=LONG_S)[1].connection.close()
    assert late.admitted.empty()


def test_a_spare_node_that_loses_the_job_ends(job):
    future, waits = spare(job)
    connection = job.accept()
    connection.sendall(bytes_of(Challenge("00" * 16, "1.0")))
    connection.sendall(bytes_of(Spare(())))
    assert waits.wait(LONG_S)
    connection.close()
    error = future.exception(LONG_S)
    assert isinstance(error, RefusedError)
    assert "the job has ended, goes on with others, or has lost node 0" in error.why
    assert error.exit_code == 1


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_spare_node_does_not_wait_for_a_msrun_that_is_stopped(job, monkeypatch, nodes):
    """Its machine answers for ever, and the others may be about to go on without it."""
    counts, other = ("VERY_CALM", "CALM") if nodes == 2 else ("CALM", "VERY_CALM")
    monkeypatch.setattr(joining, counts, 0.02)  # times ten seconds
    monkeypatch.setattr(joining, other, 1e6)
    future, waits = spare(job)
    connection = job.accept()
    nodes = tuple(NodeFacts(rank, f"mn{rank}", "", 2, 1, door=7) for rank in range(nodes))
    for said in (Challenge("00" * 16, "1.0"), Spare(nodes), StillThere()):
        connection.sendall(bytes_of(said))
    assert waits.wait(LONG_S)
    error = future.exception(LONG_S)
    assert isinstance(error, LostWhileSpareError)
    assert (error.is_mute, error.nodes) == (True, nodes)
    assert error.why.endswith("has said nothing for 0 s")
    connection.close()


def test_a_spare_node_takes_no_place_while_nodes_gather(job):
    controller = job.gather(nnodes=2, token=TOKEN)
    future, waits = spare(job, timeout_s=1.5)
    error = future.exception(LONG_S)
    assert isinstance(error, NeverBegunError)
    assert "has not begun the job yet" in str(error)
    assert not waits.is_set()
    other = job.join(node("mn1"), TOKEN)
    assert controller.result(LONG_S).node_rank == 0
    assert other.result(LONG_S).node_rank == 1
