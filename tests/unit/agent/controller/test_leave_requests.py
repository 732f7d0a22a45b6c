"""Requests behind which the job goes on, with another size: they are none for its end."""

from dataclasses import replace
from signal import SIGINT, SIGTERM

import pytest
from support.histories.dumps import events_of, running
from support.histories.exits import TWO

from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import JobState
from worker_hooks.contract import protocol

LEAVES = "node 2 (c) leaves: the job goes on with 2 nodes"
LEAVE = ev.StopRequested(SIGTERM, LEAVES, node=2, leaves=True)
COMES = ev.ExitRequestedByFile(0, "d has come: the job goes on with 4 nodes", goes_on=True)
STOP = ev.StopRequested(SIGTERM)
INTERRUPT = ev.StopRequested(SIGINT)
FILE = ev.ExitRequestedByFile(0, "a file asks for it")
RANK = protocol.ExitRequested(1, 0, "rank 1 received SIGTERM")


def asked(*events):
    job = Job(TWO)
    for event in [*events_of(running(2, 4)), *events]:
        job = decide(job, event).job
    return job


@pytest.mark.parametrize("request_", [LEAVE, COMES])
def test_all_ranks_stay_at_one_step_for_it(request_):
    job = asked(request_)
    assert job.state is JobState.HOLDING
    assert (job.stop.why, job.stop.is_to_end) == (request_.why, False)


@pytest.mark.parametrize("end", [STOP, FILE])
@pytest.mark.parametrize("request_", [LEAVE, COMES])
def test_whoever_wants_its_end_has_the_last_word(request_, end):
    why = end.why or "msrun received SIGTERM"
    for events in [(request_, end), (end, request_)]:
        stop = asked(*events).stop
        assert (stop.why, stop.is_to_end) == (why, True)


def test_of_two_that_leave_the_newest_sentence_counts():
    both = ev.StopRequested(SIGTERM, "node 1 (b) leaves as well", node=1, leaves=True)
    assert asked(LEAVE, both).stop.why == both.why


@pytest.mark.parametrize("events", [(LEAVE, RANK), (RANK, LEAVE)])
def test_a_rank_that_got_the_same_signal_is_known_to_have_asked(events):
    """Its node may be the one that leaves: a service manager signals all processes there."""
    stop = asked(*events).stop
    assert (stop.why, stop.is_to_end, [*stop.ranks]) == (LEAVES, False, [1])


def test_a_rank_alone_asks_for_the_end():
    stop = asked(RANK).stop
    assert (stop.why, [*stop.ranks]) == (RANK.why, [1])
    assert asked(RANK, STOP).stop.why == RANK.why  # the first request stands


def test_who_stops_the_job_while_a_node_leaves_is_named_at_once():
    job = asked(LEAVE)
    after = decide(decide(job, RANK).job, STOP)
    assert "msrun received SIGTERM" in after.say
    assert "goes on" not in after.say


def test_a_node_that_leaves_at_once_has_what_is_whole_saved():
    again = replace(LEAVE, why="node 2 (c) leaves at once")
    after = decide(asked(LEAVE), again)
    assert after.job.state is JobState.FREEZING
    assert after.say == (
        "no graceful exit, node 2 (c) leaves at once: what is complete is saved at once"
    )
    last = decide(asked(LEAVE), STOP)
    assert "one more signal" in last.say


def test_a_node_may_leave_while_the_state_is_saved_for_another_reason():
    died = ev.WorkerExited(0, 0, -9, 4)
    job = asked(died)
    assert job.state is JobState.FREEZING
    assert decide(job, LEAVE).say == f"{LEAVES}, once the state is saved"


@pytest.mark.parametrize(
    "events", [[LEAVE, INTERRUPT], [INTERRUPT, LEAVE], [LEAVE, FILE, INTERRUPT]]
)
def test_ctrl_c_is_what_the_exit_code_tells_though_a_node_was_to_leave_before(events):
    assert asked(*events).stop.signum == SIGINT


def test_a_signal_that_was_for_a_node_is_none_for_the_job():
    assert asked(LEAVE, FILE).stop.signum is None
    assert asked(LEAVE).stop.signum == SIGTERM
