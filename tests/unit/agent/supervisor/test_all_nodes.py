"""Several nodes as one: who gets which order, what they say, and what the loss of one means."""

import asyncio
from signal import SIGKILL, SIGTERM
from types import SimpleNamespace

import pytest
from support.node_cluster import START, Cluster, FakeLink

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.failure.evidence import ErrorFile, Evidence, WorkerEnd
from agent.failure.evidence_json import as_json
from agent.machine.process_use import ProcessNews
from agent.nodes.line import Loss, LossKind
from agent.nodes.run_messages import (
    Beats,
    CheckpointKnown,
    CopyProgressed,
    CopyWritten,
    Ended,
    FromRank,
    JobKnown,
    MemoryTaken,
    Order,
    PageNews,
    PageSeen,
    PagesKept,
    PagesLeft,
    RankUnlinked,
    ShownStatus,
    SweptNode,
    TakeMemory,
    ToRank,
    UpdatesCleared,
    UpdatesReady,
    Wake,
    pack_said,
    unpack_said,
)
from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.supervisor import all_nodes as module
from agent.supervisor.job_view import Holders, JobView
from worker_hooks.contract import protocol
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import MEMORY_KIND, PRIVATE, Shard

GONE = Loss(LossKind.PROOF, "closed the line")
SILENT = Loss(LossKind.SILENCE, "is lost (Connection timed out)")
SWEEP = do.Sweep("all are gone")


# --- orders ---------------------------------------------------------------------------------------


def test_what_concerns_processes_is_done_on_every_node(cluster):
    for action in (START, SWEEP, do.CancelStarts("stop"), do.RefuseRanks((3,), "old")):
        cluster.all.act(action)
        assert cluster.acts.pop() == action
        assert [link.orders() for link in cluster.links] == [[action], [action]]


def test_what_concerns_states_is_done_on_the_controllers_node_alone(cluster):
    action = do.FreezeRanks((0, 3), "rank 1 died", 1)
    cluster.all.act(action)
    assert cluster.acts == [action]
    assert [link.said for link in cluster.links] == [[], []]


def test_a_signal_goes_to_the_nodes_of_its_ranks(cluster):
    cluster.all.act(do.SignalRanks((0, 2, 4), SIGTERM, "stop"))
    assert cluster.acts == [do.SignalRanks((0,), SIGTERM, "stop")]
    assert cluster.links[0].orders() == [do.SignalRanks((2, 4), SIGTERM, "stop")]
    assert cluster.links[1].orders() == []


def test_a_node_knows_the_job_before_what_it_is_to_do_and_is_told_once(cluster):
    cluster.all.act(START)
    cluster.all.act(do.CancelStarts("stop"))
    kinds = [type(each) for each in cluster.links[0].said]
    assert kinds == [JobKnown, Order, Order]
    assert cluster.links[0].said[0] == JobKnown("starting", 0, False)
    cluster.all.decided(JobView(JobState.RUNNING, 0, has_hooks=True), Holders())
    assert cluster.links[1].said[-1] == JobKnown("running", 0, True)
    assert cluster.told == [(JobView(JobState.RUNNING, 0, has_hooks=True), Holders())]


def test_ranks_elsewhere_are_told_through_their_node_but_not_what_needs_one_machine(cluster):
    cluster.hooks.send(3, protocol.Release("go"))
    alike = protocol.Replicated("", [0, 3, 5])
    cluster.hooks.send(3, alike)
    copy = protocol.Copy(7, "", "", 0, 1, 3, 2)
    cluster.hooks.send(3, copy)  # to files of its node
    cluster.hooks.send(5, protocol.PeerPages([0], [77]))
    told = [(said.rank, unpack_said(said.message)) for said in cluster.links[0].said]
    assert told == [(3, protocol.Release("go")), (3, alike), (3, copy)]
    assert all(isinstance(said, ToRank) for said in cluster.links[0].said)
    assert cluster.links[1].said == []


def test_all_nodes_show_the_same_status_and_end_alike(cluster):
    cluster.all.show({"state": "running"})
    cluster.all.finish()
    for link in cluster.links:
        assert link.said == [ShownStatus({"state": "running"}), Ended(3, "rank 1 failed", "failed")]
        assert 0 < link.drained <= module.CLOSE_S
    assert cluster.told == ["finish"]


# --- what nodes say -------------------------------------------------------------------------------


def test_the_workers_of_all_nodes_are_known_by_rank(cluster):
    cluster.start(3)
    workers = cluster.all.workers()
    assert [worker.rank for worker in workers] == [0, 1, 2, 3, 4, 5]
    assert [worker.local_rank for worker in workers] == [0, 1, 0, 1, 2, 0]
    assert [worker.pid for worker in workers] == [0, 0, 0, 103, 0, 0]
    assert cluster.all.worker(1) is cluster.own_workers[1]
    assert cluster.all.worker(3).started_at is not None


def test_an_end_is_told_with_the_last_commit_that_is_known_here(cluster):
    cluster.start(2, 3)
    cluster.hear(ev.WorkerExited(3, 0, 1, error="ValueError: bad", fault="memory"))
    assert cluster.events == [ev.WorkerExited(3, 0, 1, 43, error="ValueError: bad", fault="memory")]
    worker = cluster.all.worker(3)
    assert (worker.exit_code, worker.order) == (1, 1)
    assert worker.ended_at is not None


def test_a_rank_that_was_killed_on_its_way_out_had_finished(cluster):
    cluster.start(2, 3)
    cluster.hooks.finished = {2, 3}
    cluster.hear(ev.WorkerExited(2, 0, -SIGKILL))
    cluster.hear(ev.WorkerExited(3, 0, 1))
    assert [event.is_over for event in cluster.events] == [True, False]


def test_a_rank_on_its_way_out_had_finished_though_its_node_is_lost(cluster):
    """All ranks had ended, and were trained again from the newest checkpoint, or the beginning."""
    cluster.start(2, 3)
    cluster.hear(ev.WorkerExited(2, 0, 0))
    cluster.hooks.finished = {2, 3, 5}
    cluster.events.clear()
    cluster.links[0].lose(GONE)
    (event,) = [each for each in cluster.events if isinstance(each, ev.WorkerExited)]
    assert (event.rank, event.is_over, bool(event.lost)) == (3, True, True)
    assert any("rank 3 had come to the end of the script" in said for said in cluster.said)


def test_an_end_in_an_earlier_attempt_is_none_of_this_one(cluster):
    cluster.start(2)
    cluster.all.act(do.StartAttempt(1, "again"))
    cluster.hear(ev.WorkerExited(2, 0, 1))
    assert cluster.all.worker(2).exit_code is None
    assert cluster.events == [ev.WorkerExited(2, 0, 1)]  # the controller knows what is old


def test_a_start_that_failed_is_noted_with_its_reason(cluster):
    cluster.start()
    cluster.hear(ev.StartFailed(4, 0, "no memory"))
    assert cluster.events == [ev.StartFailed(4, 0, "no memory")]
    worker = cluster.all.worker(4)
    assert (worker.why, worker.order, worker.ended_at is None) == ("no memory", 1, False)


def test_what_hooks_say_and_show_reaches_the_hooks_of_all_ranks(cluster):
    link = cluster.links[0]
    leaving = protocol.Leaving(3, 0)
    link.hear(FromRank(pack_said(leaving)))
    link.hear(PageSeen.of(3, 0, b"newer"))
    link.hear(PageNews.of(3, 1, [(128, b"new")]))
    does = ProcessNews("S", 1.5, is_frozen=False).packed()
    link.hear(Beats.of(70, {4: b"beat"}, {4: does}, 3))
    link.hear(RankUnlinked(2, 0))
    assert cluster.hooks.heard == [
        leaving,
        ("page", 3, 0, b"newer"),
        ("news", 3, 1, [(128, b"new")]),
        ("beats", 70, {4: b"beat"}, {4: does}, 3),
        ("unlinked", 2, 0),
    ]


def test_updates_are_cleared_on_the_nodes_that_are_there(cluster):
    assert cluster.hooks.clearing == {0, 1, 2}
    cluster.links[1].hear(UpdatesReady(0, 7))
    cluster.links[0].hear(PagesKept(0, 7))  # of this node's pages, of which it keeps copies
    assert cluster.hooks.heard == [("ready", 2, UpdatesReady(0, 7)), ("ready", 0, PagesKept(0, 7))]
    for link in cluster.links:
        link.said.clear()
    cluster.links[0].lose(GONE)
    cluster.links[0].said.clear()
    cleared = UpdatesCleared(0, 5, 0, 7)
    for node in cluster.hooks.cleared:
        node.clear(cleared)
    assert cluster.links[0].said == []
    assert cluster.links[1].said[-1] == cleared


def test_a_node_is_in_doubt_until_it_counts_as_lost(cluster):
    """Between the silence of its line and its loss nobody has been told to freeze."""
    one, two = cluster.hooks.cleared
    assert not one.is_in_doubt()
    cluster.links[0].is_open = False
    assert one.is_in_doubt()
    assert not two.is_in_doubt()
    one.lose("it is silent", lambda _: None)
    assert not one.is_in_doubt()


def test_a_node_whose_msrun_is_stopped_is_in_doubt_and_then_lost(cluster):
    """It cannot end its ranks by itself, however long others wait for that."""
    cluster.start(3)
    one, two = cluster.hooks.cleared
    cluster.links[0].is_stopped = True
    assert (one.is_in_doubt(), two.is_in_doubt()) == (True, False)
    cluster.all._mute.look()
    cluster.loop.call_soon(cluster.loop.stop)
    cluster.loop.run_forever()
    assert cluster.said == ["node 1 (b) is silent: its msrun has said nothing for 10 s"]
    assert {event.rank for event in cluster.events if event.lost} == {2, 3, 4}
    assert not one.is_there


def test_a_stopped_rank_is_continued_where_it_runs(cluster):
    cluster.start()
    cluster.all.wake(3)
    assert cluster.links[0].said == [Wake(3)]
    assert cluster.woken == []
    cluster.all.wake(1)
    assert cluster.woken == [1]


# --- sweeps ---------------------------------------------------------------------------------------


def evidence(rank, at=5.0, order=7):
    end = WorkerEnd(rank, 0, 9, "b", 1, None, at_epoch_s=at, order=order)
    return Evidence(end, ErrorFile("ValueError", timestamp=4))


def sweep(cluster):
    cluster.all.act(SWEEP)
    assert not cluster.all.is_swept


def test_the_controller_goes_on_once_every_node_is_swept(cluster):
    cluster.start()
    sweep(cluster)
    cluster.links[1].hear(SweptNode(0, ()))
    assert cluster.told == []
    cluster.links[0].hear(SweptNode(0, ()))
    assert cluster.all.is_swept
    assert cluster.told == ["go on"]


def test_a_node_that_does_not_sweep_holds_up_the_job_only_for_a_while(cluster, monkeypatch):
    monkeypatch.setattr(module, "SWEEP_S", 0.01)
    cluster.start()
    sweep(cluster)
    cluster.loop.call_later(0.5, cluster.loop.stop)
    cluster.controller.go_on = cluster.loop.stop
    cluster.loop.run_forever()
    assert cluster.all.is_swept


def test_a_sweep_of_which_the_news_lies_unread_is_not_given_up(cluster):
    cluster.start()
    sweep(cluster)
    for link, rank in zip(cluster.links, (3, 5), strict=True):
        link.unread = [SweptNode(0, (as_json(evidence(rank)),))]
    cluster.all._give_up_sweeps()
    assert cluster.told == ["go on"]
    assert [link.unread for link in cluster.links] == [[], []]


def test_a_sweep_that_was_given_up_is_not_taken_for_the_next_one(cluster):
    cluster.start()
    sweep(cluster)
    cluster.all._give_up_sweeps()
    cluster.controller.view = JobView(JobState.STARTING, 1)
    cluster.all.act(do.StartAttempt(1, "again"))
    sweep(cluster)
    cluster.told.clear()
    for link in cluster.links:
        link.hear(SweptNode(0, ()))
    assert not cluster.all.is_swept
    assert cluster.told == []
    for link in cluster.links:
        link.hear(SweptNode(1, ()))
    assert cluster.told == ["go on"]


def test_evidence_is_dated_by_the_clock_of_the_controllers_node(cluster):
    cluster.start(2, 3)
    cluster.hear(ev.WorkerExited(3, 0, 1))
    worker = cluster.all.worker(3)
    sweep(cluster)
    known = as_json(evidence(3)), as_json(evidence(2))
    cluster.links[0].hear(SweptNode(0, known))
    (found,) = cluster.all.evidence()  # of rank 2 nobody heard an end
    assert (found.end.rank, found.end.order) == (3, worker.order)
    assert found.end.at_epoch_s == worker.ended_at
    cluster.all.act(do.StartAttempt(1, "again"))
    assert cluster.all.evidence() == ()


# --- a lost node ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (GONE, "node 1 (b) is gone: its msrun closed the line"),
        (SILENT, "node 1 (b) is silent: its msrun is lost (Connection timed out)"),
    ],
)
def test_the_ranks_of_a_lost_node_are_lost_with_it(cluster, monkeypatch, loss, why):
    cluster.start(2, 3)
    cluster.hear(ev.WorkerExited(2, 0, 0))
    cluster.events.clear()
    monkeypatch.setattr(module, "FENCE_S", 0.0)
    cluster.links[0].lose(loss)
    cluster.loop.call_soon(cluster.loop.stop)
    cluster.loop.run_forever()
    assert cluster.events == [
        ev.WorkerExited(3, 0, -SIGKILL, 43, lost=why),
        ev.StartFailed(4, 0, why, lost=why),
    ]
    assert cluster.said == [why]
    assert cluster.all.worker(3).exit_code == -SIGKILL
    assert cluster.all.worker(4).ended_at is not None
    assert cluster.all.worker(2).exit_code == 0


@pytest.mark.parametrize(("over_s", "left_s"), [(0.0, 2.0), (0.3, 1.7), (-4.0, 6.0), (99.0, 0.0)])
def test_a_silent_node_counts_as_lost_two_seconds_behind_the_limit(
    cluster, monkeypatch, over_s, left_s
):
    """However late that is noticed: those who wait for it wait no longer for that."""
    waits = []
    monkeypatch.setattr(cluster.loop, "call_later", lambda after_s, *_: waits.append(after_s))
    cluster.start(2, 3)
    cluster.links[0].lose(SILENT._replace(over_s=over_s))
    assert waits == [pytest.approx(left_s)]
    assert cluster.events == []


def test_nobody_waits_for_the_sweep_of_a_lost_node(cluster):
    cluster.start()
    sweep(cluster)
    cluster.links[1].hear(SweptNode(0, ()))
    cluster.links[0].lose(GONE)
    assert cluster.told == ["go on"]
    cluster.all.act(SWEEP)
    assert [node.is_swept for node in cluster.others] == [True, False]


def test_no_attempt_waits_for_the_ranks_of_a_node_that_was_lost_before(cluster):
    cluster.start(2, 3, 4)
    for rank in (2, 3, 4):
        cluster.hear(ev.WorkerExited(rank, 0, 0))
    cluster.events.clear()
    cluster.links[0].lose(GONE)
    assert cluster.events == []  # all its ranks had finished
    cluster.all.act(do.StartAttempt(1, "again"))
    why = "node 1 (b) is gone: its msrun closed the line"
    assert cluster.events == [ev.StartFailed(rank, 1, why, lost=why) for rank in (2, 3, 4)]


# --- what ranks have copied -----------------------------------------------------------------------


def copy_of(*ranks):
    """What these have in the memory of their nodes."""
    about = {"step": 7, "epoch": 0, "batch": 7, "world_size": 6, "attempt": 0}
    shards = [Shard("elsewhere", rank, PRIVATE, 5, "") for rank in ranks]
    return manifests.Manifest(
        MEMORY_KIND, **about, record_id="r", reason="why", shards=tuple(shards), digest="d"
    ).completed()


def on_disk(*ranks):
    shards = [Shard(f"rank_{rank}", rank, PRIVATE, 5, "a" * 64) for rank in ranks]
    return manifests.encode(copy_of()._replace(kind="dump", shards=tuple(shards))).decode()


def gathered(cluster):
    """The orders to write a copy, by link, and what comes of it."""
    found = []
    cluster.hooks.gather(1, 3, copy_of(2, 3, 4, 5), "/ckpt/x", found.append)
    return [link.said for link in cluster.links], found


def test_each_node_writes_what_its_ranks_have_copied(cluster):
    cluster.start(2, 3, 4)
    orders, found = gathered(cluster)
    of = [[shard.rank for shard in manifests.decode(said.manifest).shards] for (said,) in orders]
    assert of == [[2, 3, 4], [5]]
    assert {(said.dump_id, said.files, said.folder) for (said,) in orders} == {(1, 3, "/ckpt/x")}
    cluster.links[1].hear(CopyProgressed(1))
    assert cluster.events == [ev.DumpProgressed(1)]
    cluster.links[1].hear(CopyWritten(1, "/ckpt/x", on_disk(5)))
    cluster.links[1].hear(CopyWritten(1, "/ckpt/x", on_disk(5)))  # said twice
    assert found == []
    cluster.links[0].hear(CopyWritten(1, "/ckpt/x", on_disk(2, 3, 4)))
    ((*shards,),) = found
    assert sorted(each.rank for each in shards) == [2, 3, 4, 5]


def test_a_node_that_is_lost_before_it_has_written_takes_the_copy_along(cluster):
    cluster.start(2, 3, 4)
    _, found = gathered(cluster)
    cluster.links[1].hear(CopyWritten(1, "/ckpt/x", on_disk(5)))
    cluster.links[1].lose(GONE)
    assert found == []  # it had written
    cluster.links[0].lose(GONE)
    (error,) = found
    assert "node 1 (b) is gone: its msrun closed the line, and with it" in str(error)


def test_of_a_node_that_is_not_there_nobody_has_a_copy(cluster):
    cluster.start(2, 3, 4)
    cluster.links[0].lose(GONE)
    cluster.links[1].said.clear()
    orders, found = gathered(cluster)
    assert orders[1] == []
    (error,) = found
    assert "node 1 (b) is gone" in str(error)


# --- a checkpoint in memory, and a node that comes later ------------------------------------------

MEMORY = "/proc/9/fd/4"
REPLACE = do.ReplaceRanks(1, (0, 1, 5), (2, 3, 4), MEMORY, 7, "node 1 is gone")


class FakeSender:
    """Sends nothing; what nodes answer is said by the test."""

    def begin(self, _dump_id, path, _manifest, _done, nodes, *_alive, **_how):
        return {node: TakeMemory(path, "", 1, "") for node in nodes}

    def again(self, path, _manifest, *_):
        return TakeMemory(path, "", 1, "")

    def hear(self, node, path, why_not):
        pass

    def lose(self, node):
        pass

    def expect(self, dump_id):
        pass

    def forget(self):
        pass


@pytest.fixture
def replacing(monkeypatch):
    """Node 1 was lost, its ranks are replaced, and a node in its place is awaited."""
    loop = asyncio.new_event_loop()
    cluster = Cluster(loop, wait_s=600.0)
    cluster.start(2, 3, 4)
    cluster.all._memory._sender = FakeSender()
    cluster.links[0].lose(GONE)
    cluster.hooks.spread(1, MEMORY, SimpleNamespace(absent=()), print)
    cluster.links[1].hear(MemoryTaken(MEMORY))
    cluster.all.act(REPLACE)
    cluster.controller.view = JobView(JobState.REPLACING, 1)
    cluster.events.clear()
    cluster.late = FakeLink()
    monkeypatch.setattr(module, "NodeLink", lambda _line: cluster.late)
    yield cluster
    cluster.door.close()
    loop.close()


def test_a_late_node_gets_the_state_before_it_starts_ranks(replacing):
    replacing.all._admit(1, None)
    assert [type(each) for each in replacing.late.said] == [TakeMemory]
    replacing.late.said.clear()
    replacing.late.hear(MemoryTaken(MEMORY))
    assert [each.newcomers for each in replacing.late.orders()] == [(2, 3, 4)]
    assert replacing.events == []


def test_every_node_knows_the_newest_checkpoint_also_one_that_comes_late(replacing):
    """If node 0 is lost, none of them begins from an older one."""
    for step in (5, 7):
        replacing.all.know_checkpoint(CompleteCheckpoint(f"/ckpt/net-1_{step}", step))
    known = [CheckpointKnown(f"/ckpt/net-1_{step}", step) for step in (5, 7)]
    assert replacing.links[1].said[-2:] == known
    replacing.all._admit(1, None)
    assert replacing.late.said[-1:] == known[1:]


def test_a_node_that_has_the_state_and_waits_for_nothing_is_told_nothing(replacing):
    """With thousands of nodes each word costs: it hears of the job with the next order."""
    link = replacing.links[1]
    link.said.clear()
    replacing.controller.view = JobView(JobState.COMMITTING, 1)
    link.hear(MemoryTaken(MEMORY))
    assert link.said == []


def test_the_node_that_has_come_is_lost_as_well_and_another_one_gets_the_order(replacing):
    replacing.all._admit(1, None)
    lost = replacing.late
    lost.hear(MemoryTaken(MEMORY))
    once = [do.ReplaceRanks(2, (0, 1, 5), (2, 3, 4), MEMORY, 7, "node 1 is gone again")]
    replacing.decide = lambda _: once and replacing.all.act(once.pop())
    lost.lose(GONE)
    replacing.late = FakeLink()
    replacing.all._admit(1, None)
    replacing.late.hear(MemoryTaken(MEMORY))
    assert [each.attempt for each in replacing.late.orders()] == [2]


def test_the_replacement_fails_where_a_late_node_cannot_get_the_state(replacing):
    replacing.all._admit(1, None)
    replacing.late.hear(MemoryTaken(MEMORY, "no memory is left"))
    why = "node 1 (b) did not get the state: no memory is left"
    assert replacing.events == [ev.StartFailed(rank, 1, why) for rank in (2, 3, 4)]


def test_a_late_node_is_not_sent_what_was_freed_with_the_attempt(replacing):
    replacing.all.act(SWEEP)
    again = do.StartAttempt(2, "again")
    replacing.all.act(again)
    replacing.all._admit(1, None)
    assert [type(each) for each in replacing.late.said] == [JobKnown, Order]
    assert replacing.late.orders() == [again]


# --- nodes that are silent may go on without this one ----------------------------------------------


@pytest.mark.parametrize(
    ("losses", "has_hooks", "waits"),
    [
        ((SILENT, SILENT), True, ()),
        ((SILENT, SILENT), False, (1, 2)),  # nobody saves anything: nobody goes on
        ((SILENT, GONE), True, (1, 2)),  # one of two
        ((GONE, GONE), True, (1, 2)),
        ((SILENT,), True, (1,)),  # one of three
    ],
)
def test_a_node_0_that_hears_of_less_than_half_waits_for_nobody(
    waiting, monkeypatch, losses, has_hooks, waits
):
    monkeypatch.setattr(module, "FENCE_S", 0.0)
    waiting.controller.view = JobView(JobState.RUNNING, 0, has_hooks=has_hooks)
    for link, loss in zip(waiting.links, losses, strict=False):
        link.lose(loss)
        waiting.loop.call_soon(waiting.loop.stop)
        waiting.loop.run_forever()
    assert tuple(waiting.all._places.vacant) == waits
    assert any("may go on without this one" in each for each in waiting.said) == (not waits)
    waiting.events.clear()
    waiting.all.act(REPLACE)  # was decided before that was known
    lost = [each.rank for each in waiting.events if isinstance(each, ev.StartFailed)]
    assert lost == ([] if waits else [2, 3, 4])


def test_one_that_has_been_replaced_may_go_on_with_others(waiting, monkeypatch):
    monkeypatch.setattr(module, "FENCE_S", 0.0)
    monkeypatch.setattr(module, "NodeLink", lambda _line: FakeLink())
    waiting.controller.view = JobView(JobState.RUNNING, 0, has_hooks=True)
    for link, node in zip(waiting.links, (1, None), strict=True):
        link.lose(SILENT)
        waiting.loop.call_soon(waiting.loop.stop)
        waiting.loop.run_forever()
        if node is not None:
            waiting.all._admit(node, None)
    assert not waiting.all._places.vacant
    assert any("may go on without this one" in each for each in waiting.said)


def test_the_next_node_keeps_copies_of_the_pages(waiting):
    first, second = (node.keep_page for node in waiting.others)
    assert waiting.hooks.copies == first
    waiting.links[0].lose(GONE)
    assert waiting.hooks.copies == second
    waiting.links[1].lose(GONE)
    assert waiting.hooks.copies is None


def test_a_node_that_is_the_next_one_no_more_leaves_its_copies(waiting, monkeypatch):
    monkeypatch.setattr(module, "NodeLink", lambda _line: FakeLink())
    waiting.links[0].lose(GONE)
    waiting.links[1].said.clear()
    waiting.all._admit(1, None)
    assert waiting.hooks.copies == waiting.others[0].keep_page
    assert PagesLeft() in waiting.links[1].said
