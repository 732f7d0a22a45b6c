"""A node whose controller is elsewhere: it tells what happens, does what it is ordered, and ends."""

import asyncio
from signal import SIGKILL, SIGTERM
from types import SimpleNamespace

import pytest

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.health import heartbeats
from agent.health.heartbeats import BEAT_S, RARE_BEAT_S
from agent.hooks.rank_processes import STALE_S
from agent.nodes.codec import pack_action, unpack_event
from agent.nodes.line import CLOSED, Loss, LossKind
from agent.nodes.run_messages import (
    NOW,
    CheckpointKnown,
    Ended,
    Fact,
    JobKnown,
    LogAsked,
    LogRead,
    Order,
    ShownStatus,
    SweptNode,
    ToldAgain,
    ToRank,
    ToRanks,
    Wake,
    pack_said,
)
from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.supervisor import remote_controller as module
from agent.supervisor.job_view import Holders, JobView
from worker_hooks.contract import protocol


class FakeMemory:
    """A copy that lacks its tensors."""

    def lacks(self):
        return True

    def bring_own(self, done):
        self.done = done

    def forget(self):
        pass


WHY = "the controller's node closed the line"


def test_what_happens_is_told(node):
    node.controller.post(ev.WorkerStarted(2, 0, 77))
    (fact,) = node.link.said
    assert isinstance(fact, Fact)
    assert unpack_event(fact.event) == ev.WorkerStarted(2, 0, 77)
    assert node.here.log == []


def test_a_checkpoint_that_is_complete_is_remembered(node):
    node.link.hear(CheckpointKnown("/ckpt/net-1_7", 7))
    assert node.complete == [CompleteCheckpoint("/ckpt/net-1_7", 7)]
    node.link.hear(JobKnown("running", 1, True, is_apart=True))
    node.link.hear(CheckpointKnown("/ckpt/net-1_9", 9))  # on a disk of another node
    assert len(node.complete) == 1


def test_orders_are_carried_out_and_the_job_is_known_first(node):
    node.link.hear(JobKnown("running", 1, True))
    node.link.hear(Order(pack_action(do.SignalRanks((2,), 15, "stop"))))
    view = JobView(JobState.RUNNING, 1, has_hooks=True)
    assert node.controller.view == view
    assert node.here.log == [(view, Holders()), do.SignalRanks((2,), 15, "stop")]


@pytest.mark.parametrize("state", ["replacing", "running"])
def test_late_tensors_come_only_if_a_replacement_takes_long(node, monkeypatch, state):
    monkeypatch.setattr(module, "LONG_S", 0.0)
    completed = []
    node.controller._memory = SimpleNamespace(
        complete=lambda: completed.append(True), lacks=bool, forget=bool
    )
    node.link.hear(Order(pack_action(do.ReplaceRanks(1, (), (0,), "p", 7, "rank 0 died"))))
    node.link.hear(JobKnown(state, 1, True))
    node.loop.call_later(0.0, node.loop.stop)
    node.loop.run_forever()
    assert completed == [True] * (state == "replacing")


def test_ranks_hear_that_tensors_have_come(node):
    node.controller._tell_came(77, (2,))
    told = protocol.MemoryBrought(77, absent=[2])
    assert node.hooks.log == [(2, told), (3, told)]


@pytest.mark.parametrize(
    ("newcomers", "new", "live_on"),
    [((0, 9), (), (2, 3)), ((0, 3), (3,), (2,)), ((2, 3), (2, 3), ())],
)
def test_all_nodes_are_told_alike_who_is_new_and_who_is_not_lives_on(node, newcomers, new, live_on):
    action = do.ReplaceRanks(1, (), newcomers, "p", 7, "rank 0 died")
    node.link.hear(Order(pack_action(action)))
    assert node.here.log == [do.ReplaceRanks(1, live_on, new, "p", 7, "rank 0 died")]


def test_a_message_for_a_rank_is_handed_on(node):
    message = ToRank(3, pack_said(protocol.Release("go")))
    node.link.hear(message)
    assert node.hooks.log == [message]


@pytest.mark.parametrize("ranks", [(), (2, 3)])
def test_new_ranks_are_welcomed_once_the_tensors_are_here(node, ranks):
    memory = node.controller._memory = FakeMemory()
    node.link.hear(JobKnown("replacing", 1, True))
    welcome = ToRanks(ranks, pack_said(protocol.Welcome("/proc/7/fd/8")))
    for message in (welcome, ToRank(3, pack_said(protocol.GoOn(1)))):
        node.link.hear(message)
    assert node.hooks.log == [ToRank(3, pack_said(protocol.GoOn(1)))]
    memory.done("")
    assert node.hooks.log[1:] == [welcome]
    node.link.said.clear()
    memory.done("no room")
    told = [unpack_event(each.event) for each in node.link.said]
    assert [(each.rank, each.attempt) for each in told] == [(2, 1), (3, 1)]
    assert "cannot be brought: no room" in told[0].why
    node.link.hear(JobKnown("replacing", 2, True))
    memory.done("")  # they are replaced again
    assert len(node.hooks.log) == 2


def test_a_stopped_rank_is_continued(node):
    node.link.hear(Wake(3))
    assert node.here.log == [("wake", 3)]


def test_the_state_of_the_whole_job_is_shown_here(node):
    node.link.hear(ShownStatus({"state": "running"}))
    assert node.shown == [{"state": "running"}]


def test_a_sweep_is_answered_with_what_the_dead_left(node):
    node.link.hear(JobKnown("starting", 2, False))
    node.controller.ended(JobState.STARTING, (2, 3))
    # who follows a log has its end before the job may be over
    assert node.link.said == ["what is left of logs", SweptNode(2, ({"rank": 2}, {"rank": 3}))]


def test_questions_about_logs_and_answers_are_handed_on_as_long_as_the_line_is_open(node):
    asked, read = LogAsked(1, 2, NOW, (0, 0, 0), False), LogRead(2, b"x")
    for message in (asked, read):
        node.link.hear(message)
    assert node.logs.log == [asked, read]
    node.logs.send(read)
    assert node.link.said == [read]
    assert node.logs.is_open()
    node.link.is_open = False
    assert not node.logs.is_open()
    node.controller.close()
    assert node.logs.log[-1] == "closed"


def test_every_node_ends_as_the_job_did(node):
    node.link.hear(Ended(3, "rank 1 failed"))
    assert node.here.log == ["finish"]
    assert node.controller.ending == Ended(3, "rank 1 failed")


def test_beats_are_told_again_and_again_while_the_line_is_open(node, monkeypatch):
    monkeypatch.setattr(heartbeats, "BEAT_S", 0.01)
    node.controller._beats.tell()
    node.loop.run_until_complete(asyncio.sleep(0.1))
    assert len(node.hooks.log) > 1
    assert set(node.hooks.log) == {"beats"}
    node.link.is_open = False
    node.hooks.log.clear()
    node.controller._beats.tell()
    assert node.hooks.log == []


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("state", ["freezing", "dumping", "committing", "replacing"])
def test_of_many_nodes_each_tells_more_rarely_how_far_its_ranks_are_while_none_moves(
    node, monkeypatch, state, nodes
):
    monkeypatch.setattr(module, "MANY_NODES", 2)
    controller, now_s = node.controller, node.loop.time
    controller.nodes = (None,) * nodes
    controller.view = controller.view._replace(state=JobState.RUNNING)
    before_s = now_s()
    controller._beats.tell()
    assert controller._beats._timer.when() <= now_s() + BEAT_S
    for _ in range(2):
        node.link.hear(JobKnown(state, 1, True))
    least_s = RARE_BEAT_S if nodes > 2 else BEAT_S
    assert before_s + least_s <= controller._beats._timer.when() <= now_s() + least_s
    assert BEAT_S < RARE_BEAT_S < STALE_S
    controller._beats.tell()
    assert controller._beats._timer.when() >= before_s + least_s
    node.link.hear(JobKnown("running", 1, True))  # how far they are counts again
    assert controller._beats._timer.when() <= now_s() + BEAT_S
    controller._beats._timer.cancel()


def test_without_the_controller_ranks_are_stopped_and_then_killed(node):
    node.link.lose()
    assert node.said == [f"{WHY}: the ranks of this node are stopped"]
    assert node.controller.view.state is JobState.STOPPING
    stops = [do.CancelStarts(WHY, now=True), do.SignalRanks((2, 3), SIGTERM, WHY)]
    assert node.here.log == stops
    node.here.alive = (3,)
    node.controller.post(ev.WorkerExited(2, 0, -15))
    node.loop.call_later(0.2, node.loop.stop)
    node.loop.run_forever()
    assert node.here.log[2:] == [do.SignalRanks((3,), SIGKILL, WHY)]
    node.here.alive = ()
    node.controller.post(ev.WorkerExited(3, 0, -9))
    assert node.here.log[3:] == ["finish"]
    assert node.controller.ending == Ended(1, WHY)
    assert node.link.said == []


SAVE = f"{WHY}: the ranks of this node save their step by themselves, and end"


def test_without_the_controller_ranks_that_train_save_and_the_others_are_stopped(node):
    node.hooks.saving = (2,)
    node.link.lose()
    assert node.said == [SAVE]
    assert node.here.log == [do.CancelStarts(WHY, now=True), do.SignalRanks((3,), SIGTERM, WHY)]
    node.loop.call_later(0.2, node.loop.stop)
    node.loop.run_forever()
    assert node.here.log[2:] == [do.SignalRanks((3,), SIGKILL, WHY)]
    node.here.alive = ()
    node.controller.post(ev.WorkerExited(2, 0, 1))
    assert node.here.log[3:] == ["finish"]


def test_ranks_that_save_are_killed_when_that_takes_too_long(node, monkeypatch):
    monkeypatch.setattr(module, "SAVE_S", 0.02)
    monkeypatch.setattr(module, "KILL_S", 0.02)
    node.hooks.saving = (2, 3)
    node.link.lose()
    node.loop.call_later(60, node.loop.stop)
    node.loop.run_forever()
    assert node.here.log[1:] == [do.SignalRanks((2, 3), SIGKILL, WHY), "finish"]


@pytest.mark.parametrize("is_now", [False, True])
def test_who_asks_twice_for_the_end_waits_for_no_rank_that_saves(node, is_now):
    node.hooks.saving = (2, 3)
    node.link.lose()
    node.controller.post(ev.StopRequested(SIGTERM, is_now=is_now))
    assert len(node.here.log) == 1 + is_now
    node.controller.post(ev.StopRequested(SIGTERM))
    assert node.here.log[1] == do.SignalRanks((2, 3), SIGKILL, "it is asked for")


def test_ranks_that_save_have_some_time_when_the_end_is_asked_for(node):
    node.hooks.saving = (2, 3)
    node.link.lose()
    node.controller.post(ev.StopRequested(SIGTERM))
    node.loop.call_later(0.2, node.loop.stop)
    node.loop.run_forever()
    assert node.here.log[1:] == [do.SignalRanks((2, 3), SIGKILL, "it is asked for")]


def test_without_the_controller_a_rank_that_cannot_be_killed_is_left(node, monkeypatch):
    monkeypatch.setattr(module, "KILL_S", 0.02)
    node.link.lose()
    node.loop.call_later(60, node.loop.stop)
    node.loop.run_forever()
    assert node.here.log[2:] == [do.SignalRanks((2, 3), SIGKILL, WHY), "finish"]


def test_without_the_controller_and_without_ranks_it_ends_at_once(node):
    node.here.alive = ()
    node.link.lose()
    assert node.here.log == ["finish"]
    assert node.controller.ending == Ended(1, WHY)


# --- without a scheduler --------------------------------------------------------------------------


@pytest.fixture
def alone(node):
    """The ranks train, in attempt 4; the scheduler has no ranks, and is killed."""
    node.looks = []

    def look(attempt, found, too_late):
        watch = SimpleNamespace(attempt=attempt, found=found, too_late=too_late, is_closed=False)
        watch.close = lambda: setattr(watch, "is_closed", True)
        node.looks.append(watch)
        return watch

    node.controller._look = look
    node.link.hear(JobKnown("running", 4, True))
    node.here.log.clear()
    return node


def lost_for_good(alone):
    """What was begun when the line was lost has ended, and the ranks save by themselves."""
    assert alone.looks[-1].is_closed
    assert alone.hooks.disturbed is None
    return [each for each in alone.hooks.log if each[0] == "forsaken"]


def test_ranks_train_on_without_a_scheduler(alone):
    alone.link.lose()
    assert [watch.attempt for watch in alone.looks] == [4]
    assert (alone.here.log, alone.hooks.log, alone.losses) == ([], [], [])
    (said,) = alone.said
    assert said.startswith("the scheduler closed the line: the ranks train on without it.")
    assert alone.controller.ending is None


@pytest.mark.parametrize("case", ["silent", "halted", "not running", "asked", "no ranks"])
def test_they_do_not_where_more_is_to_be_decided(alone, case):
    loss = Loss(LossKind.SILENCE, "is lost") if case == "silent" else CLOSED
    alone.hooks.are_calm = case != "halted"
    if case == "not running":
        alone.link.hear(JobKnown("freezing", 4, True))
    if case == "asked":
        alone.controller.post(ev.StopRequested(15))
    if case == "no ranks":
        alone.here.alive = ()
    alone.link.lose(loss)
    assert alone.looks == []
    assert alone.controller.ending is not None


def test_a_scheduler_that_is_there_again_hears_all_that_is_true(alone):
    alone.link.lose()
    alone.link.said.clear()
    alone.here.alive = (3,)
    line = SimpleNamespace(connection=SimpleNamespace(getpeername=lambda: ("10.0.0.9", 1)))
    alone.looks[0].found(
        SimpleNamespace(line=line, roster=SimpleNamespace(nodes=("nodes",)), settings={})
    )
    assert alone.link.line is line
    assert alone.link.said.pop() == ToldAgain()
    assert [unpack_event(each.event) for each in alone.link.said] == [
        ev.WorkerStarted(2, 4, 102),
        ev.WorkerStarted(3, 4, 103),
        ev.WorkerExited(2, 4, -9),
    ]
    assert alone.hooks.log == [("memory at", "10.0.0.9"), "said again"]
    assert alone.hooks.disturbed is None
    assert alone.looks[0].is_closed
    assert alone.said[-1] == "the scheduler is there again"
    alone.link.lose()  # and again
    assert len(alone.looks) == 2


def test_a_rank_that_says_what_only_a_scheduler_can_answer_ends_it(alone):
    alone.link.lose()
    alone.hooks.disturbed(protocol.Raised(2, 4, "broken"))
    why = "a rank is lost, and no scheduler is there"
    assert lost_for_good(alone) == [("forsaken", why, True)]
    assert len(alone.losses) == 1
    alone.controller._end_alone("again")  # as the next one says
    assert len(alone.losses) == 1
    closed = []
    late = SimpleNamespace(
        line=SimpleNamespace(connection=SimpleNamespace(close=lambda: closed.append(1)))
    )
    alone.looks[0].found(late)
    assert closed == [1]


def test_a_node_whose_only_rank_dies_goes_on_with_what_others_save(alone):
    alone.link.lose()
    alone.here.alive, alone.hooks.saving = (), (2, 3)
    alone.controller.post(ev.WorkerExited(3, 4, -9))
    assert ("pages", 2, 3, "with copies") in alone.hooks.log
    assert alone.losses == [(CLOSED, 7, True)]
    assert alone.controller.goes_on
    assert alone.controller.patience_s > 0
    assert alone.here.log[-1] == "finish"


def test_training_may_come_to_its_end_without_a_scheduler(alone):
    alone.link.lose()
    alone.here.alive = (3,)
    alone.here.code = 0
    alone.controller.post(ev.WorkerExited(2, 4, 0))
    assert alone.controller.ending is None
    alone.here.alive = ()
    alone.controller.post(ev.WorkerExited(3, 4, 0))
    assert alone.controller.ending.exit_code == 0
    assert not alone.controller.goes_on
    assert alone.here.log == ["finish"]
    assert alone.looks[0].is_closed


def test_who_asks_for_the_end_gets_it_without_a_scheduler(alone):
    alone.link.lose()
    alone.hooks.saving = (2, 3)
    alone.controller.post(ev.StopRequested(15))
    why = "it is asked for, and no scheduler is there"
    assert lost_for_good(alone) == [("forsaken", why, True)]
    assert not alone.controller.goes_on


def test_a_rank_that_asks_for_the_end_of_the_job_gets_it(alone):
    alone.link.lose()
    alone.hooks.disturbed(protocol.ExitRequested(2, 4, "SIGTERM"))
    assert lost_for_good(alone) == [
        ("forsaken", "it is asked for, and no scheduler is there", True)
    ]
    assert not alone.controller.goes_on


def test_a_file_asks_for_the_end_without_a_scheduler(alone):
    alone.link.lose()
    alone.controller.post(ev.ExitRequestedByFile(4, "a file"))
    assert len(lost_for_good(alone)) == 1
    assert not alone.controller.goes_on


def test_signals_for_the_ranks_reach_them_without_a_scheduler(alone):
    alone.link.lose()
    alone.controller.post(ev.SignalReceived(10))
    assert alone.here.log == [do.SignalRanks((2, 3), 10, "msrun has received it")]
    assert not alone.looks[0].is_closed


@pytest.mark.parametrize(
    ("in_a_step", "in_script", "certain", "ends"),
    [
        (True, True, False, True),
        (False, True, False, False),  # between epochs, or training is over: others have ended
        (False, True, True, True),  # others have begun to save
        (False, False, True, False),  # its script is at its end
    ],
)
def test_who_evaluates_is_let_alone_when_others_have_ended(
    alone, in_a_step, in_script, certain, ends
):
    alone.link.lose()
    alone.hooks.are_in_a_step, alone.hooks.are_in_script = in_a_step, in_script
    alone.looks[0].too_late("another worker's msrun has ended", certain)
    assert alone.looks[0].is_closed is ends


def test_the_step_that_was_shown_last_has_to_be_saved_at_least(alone):
    """What ranks here have committed is not known: they are new ones."""
    alone.link.hear(ShownStatus({"state": "running"}, 500))
    alone.link.hear(JobKnown("replacing", 4, True))
    alone.link.lose()
    assert alone.losses == [(CLOSED, 500, True)]


def test_nothing_is_waited_for_where_nothing_is_ever_saved(alone):
    alone.hooks.may_save = False
    alone.link.hear(JobKnown("replacing", 4, True))
    alone.link.lose()
    assert alone.losses == [(CLOSED, 7, False)]


def test_a_line_that_is_lost_again_at_once_is_no_crash(alone):
    def gone():
        raise OSError(107, "not connected")

    alone.link.lose()
    line = SimpleNamespace(connection=SimpleNamespace(getpeername=gone))
    alone.looks[0].found(SimpleNamespace(line=line, roster=SimpleNamespace(nodes=()), settings={}))
    assert alone.link.line is line


def test_people_see_how_the_job_ended(node):
    node.link.hear(ShownStatus({"state": "running", "attempt": 1}))
    node.link.hear(Ended(0, "every rank exited with 0", "succeeded"))
    assert node.shown[-1] == {"state": "succeeded", "attempt": 1}


def test_a_job_without_a_state_to_save_has_nothing_to_go_on_from(alone):
    alone.link.hear(JobKnown("running", 4, False))
    alone.link.lose()
    alone.here.alive = ()
    alone.controller.post(ev.WorkerExited(3, 4, -9))
    assert alone.losses == [(CLOSED, 7, False)]


@pytest.mark.parametrize("state", ["running", "freezing", "dumping", "replacing"])
@pytest.mark.parametrize(
    ("alive", "saving", "left"),
    [
        ((3,), (2, 3), ("pages", 2)),
        ((), (2, 3), ("pages", 2, 3, "with copies")),
        ((3,), (2,), ("pages", 2, "with copies")),  # rank 3 is new, and saves nothing
    ],
)
def test_what_dead_ranks_alone_had_is_left_to_others(node, state, alive, saving, left):
    """Nobody replaces them any more; and without a rank here nobody else has it."""
    node.link.hear(JobKnown(state, 1, True))
    node.here.alive, node.hooks.saving = alive, saving
    node.link.lose()
    assert [each for each in node.hooks.log if each[0] == "pages"] == [left]


def test_ranks_that_save_are_told_where_the_checkpoint_in_memory_is(node):
    """Other ones may have been told to resume from it, and lack what this node has."""
    node.link.hear(JobKnown("replacing", 1, True))
    node.controller._memory._copy = SimpleNamespace(path="/proc/7/fd/8", close=lambda: None)
    node.link.lose()
    why = "the controller's node closed the line"
    assert ("forsaken", why, True, "/proc/7/fd/8") in node.hooks.log


def test_a_death_that_nobody_has_noticed_yet_counts(node):
    node.link.hear(JobKnown("running", 1, True))
    node.here.unnoticed, node.hooks.saving = (3,), (2, 3)
    node.link.lose()
    assert ("pages", 3) in node.hooks.log


@pytest.mark.parametrize(
    ("state", "code", "saving", "is_apart"),
    [
        ("starting", -9, (2, 3), False),
        ("stopping", -9, (2, 3), False),
        ("killing", -9, (2, 3), False),
        ("running", 0, (2, 3), False),
        ("running", -9, (), False),
        ("running", -9, (2, 3), True),  # nobody else sees this folder
    ],
)
def test_nothing_is_left_where_nobody_saves(node, state, code, saving, is_apart):
    node.link.hear(JobKnown(state, 1, True, is_apart=is_apart))
    node.here.alive, node.here.code, node.hooks.saving = (), code, saving
    node.hooks.may_save = bool(saving)
    node.link.lose()
    assert "pages" not in [each[0] for each in node.hooks.log]


@pytest.mark.parametrize(("code", "left"), [(-9, True), (1, False), (0, False)])
def test_who_is_killed_while_it_saves_by_itself_leaves_its_page(node, code, left):
    """Who has ended by itself has said what it has saved."""
    node.link.hear(JobKnown("running", 1, True))
    node.hooks.saving = (2, 3)
    node.link.lose()
    node.here.alive = (2,)
    node.controller.post(ev.WorkerExited(3, 1, code))
    assert (("pages", 3, "late") in node.hooks.log) is left


def test_a_node_whose_ranks_are_being_replaced_goes_on_with_what_others_save(node):
    node.link.hear(JobKnown("replacing", 1, True))
    node.link.lose()
    assert node.losses == [(CLOSED, 7, True)]
    assert node.controller.patience_s > 0


def test_a_node_whose_ranks_have_come_to_their_end_goes_on_with_nothing(node):
    node.link.hear(JobKnown("running", 1, True))
    node.here.alive, node.here.code = (), 0
    node.link.lose()
    assert node.losses == []
    assert node.here.log[-1] == "finish"
