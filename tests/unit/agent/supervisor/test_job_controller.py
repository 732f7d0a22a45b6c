"""The controller of a job on several nodes: nothing begins before each of them is swept."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from support.histories.dumps import done, froze, holds, reg, wrote
from support.histories.plain import ask, gone, launch, replay_from, tell, up
from support.histories.replacements import rejoins
from support.histories.short import short
from support.stand_ins import quiet_parts

from agent.controller import actions as do
from agent.controller.job import first_job
from agent.controller.states import JobState
from agent.spec.job_spec import DumpSpec, JobSpec, Program, ProgramKind, ReplaceSpec
from agent.supervisor.job_controller import JobController
from agent.text.ranges import format_ranges
from agent.workers.worker import Worker
from worker_hooks.contract.protocol import NotesMeasured

SPEC = JobSpec(
    program=Program("t.py", (), ProgramKind.SCRIPT, "python"),
    nproc=1,
    run_id="job",
    record_id="rec",
    nodes=(1, 1),
    max_restarts=2,
)
QUIET = do.SetDeadline | do.WarmUp


class Nodes:
    """All nodes as one, for the controller; their sweeps end when the test says so."""

    def __init__(self, log):
        self.log = log
        self.is_swept = True
        self.sweeps = True  # at once
        self.controller = None
        self.unread = []  # events that lie in sockets

    def act(self, action):
        if isinstance(action, QUIET):
            return
        self.log.append(short(action))
        if isinstance(action, do.Sweep):
            self.is_swept = self.sweeps
            self.controller.ended(self.controller.view.state, ())

    def decided(self, view, holders):
        pass

    def finish(self):
        self.log.append("end")

    def catch_up(self):
        unread, self.unread = self.unread, []
        for event in unread:
            self.controller.post(event)

    def refresh(self):
        return False

    def workers(self):
        return ()

    def worker(self, rank):
        return Worker(rank, 0, 0)


@pytest.fixture
def job():
    log, told, loop = [], [], asyncio.new_event_loop()
    nodes = Nodes(log)
    parts = quiet_parts(
        journal=SimpleNamespace(
            event=lambda name, **_: told.append(name),
            of_ranks=lambda kind, ranks, **_: log.append(f"{kind} of {format_ranges(ranks)}"),
        ),
        attempt_ended=lambda state, _: log.append(f"examine as {state.value}"),
    )
    controller = JobController(SPEC, **parts)
    nodes.controller = controller
    controller.attach(loop, nodes)
    yield SimpleNamespace(log=log, told=told, nodes=nodes, controller=controller, loop=loop)
    loop.close()


def fail(job):
    """Rank 1 fails, rank 0 is the last to leave."""
    for event in (launch(), up(0), up(1), gone(1, 1), gone(0, -15)):
        job.controller.post(event)


def test_what_notes_cost_is_in_the_journal_only_if_something_follows(job):
    """Each rank says it every 64 steps, for as long as the job lasts."""
    for event in (launch(), up(0), up(1), reg(0, 0), reg(1, 0)):
        job.controller.post(event)
    for rank in (0, 1):
        job.controller.post(NotesMeasured(rank, 0, 0.0001, 1.0))
    assert "NotesMeasured" not in job.told
    job.controller.post(NotesMeasured(1, 0, 0.1, 1.0))
    assert job.told[-1] != "NotesMeasured"
    assert "NotesMeasured" in job.told


def test_what_follows_a_sweep_follows_at_once_where_nobody_is_awaited(job):
    fail(job)
    assert job.log == ["start 0", "TERM 0", "sweep", "examine as starting", "start 1"]


def test_no_attempt_begins_before_the_other_nodes_are_swept(job):
    job.nodes.sweeps = False
    fail(job)
    assert job.log == ["start 0", "TERM 0", "sweep"]
    job.nodes.is_swept = True
    job.controller.go_on()
    assert job.log[3:] == ["examine as starting", "start 1"]


def test_what_happens_meanwhile_is_decided_afterwards(job):
    job.nodes.sweeps = False
    fail(job)
    job.controller.post(ask(15))
    job.controller.post(up(0, 1))
    assert job.log == ["start 0", "TERM 0", "sweep"]
    job.nodes.is_swept = True
    job.controller.go_on()
    assert job.log[3:] == ["examine as starting", "start 1", "cancel", "TERM 0"]
    assert job.controller.view.state is JobState.STOPPING


def test_a_job_that_ends_waits_for_sweeps_too_and_ends_once(job):
    job.nodes.sweeps = False
    for event in (launch(), up(0), up(1), gone(1, 0), gone(0, 0)):
        job.controller.post(event)
    assert job.log == ["start 0", "sweep"]
    job.nodes.is_swept = True
    job.controller.go_on()
    job.controller.go_on()
    assert job.log[2:] == ["examine as succeeded", "end"]
    assert job.controller.ending.exit_code == 0


def test_going_on_without_anything_left_changes_nothing(job):
    job.controller.go_on()
    job.controller.post(launch())
    job.controller.go_on()
    job.controller.post(up(0))
    job.controller.post(up(1))
    job.controller.go_on()
    job.controller.post(tell(10))
    assert job.log == ["start 0", "USR1 0,1"]


# --- deadlines ------------------------------------------------------------------------------------


def freezing(job):
    """Rank 1 is killed, and rank 0, which holds the state, has no time to answer."""
    spec = SPEC._replace(dump=DumpSpec(freeze_s=0.0, update_grace_s=0.0))
    job.controller._job = first_job(spec)
    for event in (launch(), up(0), up(1), reg(0, 5), reg(1, 5), gone(1, -9)):
        job.controller.post(event)
    assert job.controller.view.state is JobState.FREEZING


def pass_deadlines(job):
    """Turns of the loop in which timers that are due are called."""
    for _ in range(3):
        job.loop.call_later(0, job.loop.stop)
        job.loop.run_forever()


def test_an_answer_that_lies_unread_at_the_deadline_counts(job):
    freezing(job)
    job.nodes.unread = [froze(0, 5)]
    pass_deadlines(job)
    assert job.controller.view.state is JobState.DUMPING
    assert job.nodes.unread == []


def test_who_has_said_nothing_by_the_deadline_is_judged(job):
    freezing(job)
    pass_deadlines(job)
    assert job.controller.view.state is JobState.STOPPING


# --- answers of very many ranks -------------------------------------------------------------------


MANY = 200


def replacing(job):
    """Of very many ranks the last one is killed; the log begins with what follows."""
    spec = SPEC._replace(nproc=MANY, nodes=(MANY,), replace=ReplaceSpec(is_on=True))
    job.controller._job = first_job(spec)
    every = range(MANY)
    for event in (launch(), *map(up, every), *(reg(rank, 5) for rank in every)):
        job.controller.post(event)
    job.controller.post(gone(MANY - 1, -9))
    job.log.clear()


def soon(job, *events):
    for event in events:
        job.controller.post_soon(event)
    assert job.log == []
    pass_deadlines(job)
    said, job.log[:] = [*job.log], []
    return said


def test_what_very_many_ranks_answer_is_decided_on_together(job):
    replacing(job)
    left = range(MANY - 1)
    first, *_ = soon(job, *(froze(rank, 5) for rank in left))
    assert first == "Frozen of 0-197"
    writers = job.controller._job.dump.writers
    holders = [rank for rank in left if rank not in writers]
    assert soon(job, *map(holds, holders)) == [f"Digested of {format_ranges(holders[:-1])}"]
    soon(job, *map(wrote, writers))
    assert soon(job, done("/proc/1/fd/5"))[0].startswith("replace 1: 199 beside ")
    job.controller.post(up(MANY - 1, 1))
    news = [each for rank in left for each in (rejoins(rank), reg(rank, 5, 1))]
    assert soon(job, *news) == ["Rejoining of 0-197", "Registered of 0-197"]
    assert soon(job, reg(MANY - 1, 5, 1))[-1].startswith("go on 1: 0,1,2,")
    assert job.controller.view.state is JobState.RUNNING


def test_an_event_that_cannot_wait_comes_after_those_that_waited(job):
    replacing(job)
    for rank in range(MANY - 1):
        job.controller.post_soon(froze(rank, 5))
    job.controller.post(gone(7, -9))
    assert job.log[0] == "Frozen of 0-197"
    assert job.controller.view.state is JobState.DUMPING
    assert 7 not in job.controller._job.dump.writers


def test_answers_that_cannot_be_taken_together_are_decided_on_in_their_order(job):
    replacing(job)
    said = soon(job, *(froze(rank, 5, dump=9) for rank in range(50)), froze(3, 5), froze(4, 5))
    assert said == []
    assert {*job.controller._job.dump.answers} == {3, 4}


def shuffled(dice, of_ranks):
    """The events of ranks in any order in which each keeps its own; some come twice, or are old."""
    left, found = [list(events) for events in of_ranks], []
    while left := [events for events in left if events]:
        found.append(dice.choice(left).pop(0))
        if dice.random() < 0.1:
            found.append(dice.choice(found))
        if dice.random() < 0.1:
            found.append(reg(0, 5, 0))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_in_rows_all_comes_to_what_it_would_have_come_to_one_by_one(job, seed):
    dice = random.Random(seed)
    replacing(job)
    expected, left = job.controller._job, range(MANY - 1)

    def hear(of_ranks):
        nonlocal expected
        events = shuffled(dice, of_ranks)
        while events:
            count = dice.randrange(1, 150)
            for event in events[:count]:
                job.controller.post_soon(event)
            expected = replay_from(expected, events[:count])
            del events[:count]
            pass_deadlines(job)
            assert job.controller._job == expected

    hear([[froze(rank, 5)] for rank in left])
    hear([[wrote(rank) if rank in expected.dump.writers else holds(rank)] for rank in left])
    hear([[done("/proc/1/fd/5")]])
    joined = [[rejoins(rank), reg(rank, 5, 1)][dice.random() < 0.1 :] for rank in left]
    hear([*joined, [up(MANY - 1, 1), reg(MANY - 1, 5, 1)]])
    assert job.controller.view.state is JobState.RUNNING
