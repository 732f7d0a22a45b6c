"""Nodes that come when a job runs, or whose ranks train already, and what they know of it."""

import time
from dataclasses import replace
from functools import partial
from signal import SIGTERM
from types import SimpleNamespace

import pytest
from support.node_cluster import PROGRAM, wish

from agent.arrivals.doorkeeper import LEFT
from agent.arrivals.resize import Resize
from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.launch.meeting import program_digest
from agent.nodes.codec import pack_event
from agent.nodes.line import Loss, LossKind
from agent.nodes.messages import LivingRanks, Refused, Spare, SurvivedStep
from agent.nodes.run_messages import (
    Ended,
    Fact,
    MemoryTaken,
    NodeFacts,
    PageSeen,
    SaveHere,
    ToldAgain,
    ToRanks,
    pack_said,
    unpack_said,
)
from agent.spec.job_spec import ClusterSpec, HandSpec
from agent.supervisor import all_nodes as module
from agent.supervisor.job_view import Holders, JobView
from worker_hooks.contract import protocol

GONE = Loss(LossKind.PROOF, "closed the line")
spare = partial(wish, is_spare=True)


# --- ranks that train already ---------------------------------------------------------------------


def adopted(cluster):
    cluster.all._adopts = True
    begun = do.StartAttempt(3, "the job begins")
    cluster.all.act(begun)
    return begun


def test_ranks_that_train_already_are_not_started(cluster):
    begun = adopted(cluster)
    assert [link.orders() for link in cluster.links] == [[], []]
    assert cluster.acts == [begun]
    assert cluster.events == [ev.WorkerStarted(rank, 3, -1) for rank in (2, 3, 4, 5)]
    cluster.hear(ev.WorkerStarted(3, 3, 77))
    assert cluster.all.worker(3).pid == 77
    again = do.StartAttempt(4, "all are gone")
    cluster.all.act(again)
    assert [link.orders() for link in cluster.links] == [[again], [again]]


def test_what_is_lost_counts_once_all_have_told_what_they_hold(cluster):
    adopted(cluster)
    cluster.events.clear()
    died = ev.WorkerExited(3, 3, -9)
    cluster.hear(died)
    cluster.all.post(protocol.Raised(2, 3, "broken"))
    cluster.all.post(protocol.Registered(2, 3, 5))
    cluster.links[0].hear(ToldAgain())
    assert cluster.events == [protocol.Registered(2, 3, 5)]
    cluster.links[1].lose(GONE)  # it will never tell
    assert cluster.events[1] == replace(died, step=43)
    assert cluster.events[2] == protocol.Raised(2, 3, "broken")
    assert [each.rank for each in cluster.events[3:]] == [5]
    assert cluster.events[3].lost
    cluster.hear(ev.WorkerExited(4, 3, -9))
    assert cluster.events[-1].rank == 4


def test_one_that_tells_nothing_holds_up_nobody_for_ever(cluster, monkeypatch):
    monkeypatch.setattr(module, "TELL_S", 0.0)
    adopted(cluster)
    cluster.hear(ev.WorkerExited(3, 3, -9))
    cluster.loop.call_later(0.01, cluster.loop.stop)
    cluster.loop.run_forever()
    assert cluster.events[-1].rank == 3


def test_what_was_lost_with_the_last_controller_is_lost_once_the_others_have_told(cluster):
    """A node that has taken its part: node 1 of these was node 0."""
    cluster.links[0].is_open = False
    adopted(cluster)
    cluster.events.clear()
    raised = protocol.Raised(5, 3, "connection reset")
    cluster.all.post(raised)
    assert cluster.events == []
    cluster.links[1].hear(ToldAgain())
    *died, last = cluster.events
    assert [each.rank for each in died] == [2, 3, 4]  # of which the exception is the consequence
    assert all(each.lost for each in died)
    assert last == raised


def test_a_controller_that_could_replace_nobody_resigns(cluster):
    cluster.links[0].is_open = False
    cluster.controller.why_never_replaced = "rank 3 registered no state"
    adopted(cluster)
    cluster.events.clear()
    cluster.told.clear()
    cluster.links[1].hear(ToldAgain())
    assert cluster.events == []
    assert cluster.told == ["retired", "finish"]
    assert not cluster.links[1].is_open
    assert "no rank can be replaced (rank 3 registered no state): " in cluster.said[-1]


# --- what ranks write to memory -------------------------------------------------------------------


SAVE = protocol.Save(1, 5, "", is_quick=True)


def to_memory(cluster, *gone):
    """The state is written to memory, to replace these ranks and those that are dead."""
    writer, *others = (rank for rank in range(6) if rank not in gone)
    cluster.all.act(do.SaveRanks(1, 5, (writer,), tuple(others), do.MEMORY, "why", gone=gone))


@pytest.mark.parametrize(
    ("alike", "groups"),
    [
        ((), ((2,), (4,))),
        (((),), ((2, 4),)),
        (((0, 1, 2, 3, 4, 5),), ((2, 4),)),
        (((0, 2), (1, 4)), ((2,), (4,))),
    ],
)
def test_where_ranks_have_died_the_others_write_what_they_hold(cluster, alike, groups):
    cluster.start(2, 3, 4)
    cluster.hooks.alike = alike
    to_memory(cluster, 3)  # it hangs
    cluster.hooks.send_all((2, 4), SAVE)
    assert cluster.links[0].said.pop() == SaveHere(groups, pack_said(SAVE))
    disk = SAVE._replace(is_quick=False)
    cluster.hooks.send_all((2, 4), disk)
    assert cluster.links[0].said.pop() == ToRanks((2, 4), pack_said(disk))


@pytest.mark.parametrize(
    ("dead", "holder"), [((), 2), ((3,), 2), ((2, 3, 4), 5)], ids=["on node 0", "on 1", "all of 1"]
)
def test_one_node_with_ranks_that_live_on_has_what_they_write(cluster, dead, holder):
    """Besides node 0, and only in this dump."""
    cluster.start(2, 3, 4)
    cluster.links[1].hear(Fact(pack_event(ev.WorkerStarted(5, 0, 105))))
    for rank in dead:
        cluster.hear(ev.WorkerExited(rank, 0, -9))
    to_memory(cluster)
    living = {
        rank: link for rank, link in zip((2, 5), cluster.links, strict=True) if rank not in dead
    }
    for rank, link in living.items():
        cluster.hooks.send_all((rank,), SAVE)
        assert isinstance(link.said[-1], SaveHere) == (rank == holder)
    if len(living) > 1:  # in the next dump another node has it
        for rank in {2, 3, 4}.difference(dead):
            cluster.hear(ev.WorkerExited(rank, 0, -9))
        to_memory(cluster)
        cluster.hooks.send_all((5,), SAVE._replace(dump_id=2))
        assert isinstance(cluster.links[1].said[-1], SaveHere)
    cluster.all.finish()


def stays(cluster, rank=2):
    """Whether what a rank writes, which only other nodes hold, stays there."""
    cluster.hooks.send_all((rank,), WRITES)
    return cluster.links[0].said[-1].is_left


WRITES = SAVE._replace(folder="/proc/1/fd/9", parts=1)
GROUPS = ((0, 3), (1, 4), (2, 5))  # of the last one no rank is on node 0


@pytest.mark.parametrize("gone", [(3,), (0,), (4, 1), (5,)])
def test_what_no_rank_of_node_0_reads_stays_where_it_is_written(cluster, gone):
    cluster.start(2, 3, 4)
    cluster.hooks.alike = GROUPS
    to_memory(cluster, *gone)
    assert stays(cluster)
    cluster.all.finish()


@pytest.mark.parametrize("part", [(0, 2, 5), (2, 4)], ids=["it is read there", "on one node"])
def test_what_is_read_there_or_on_one_node_alone_comes_to_node_0(cluster, part):
    cluster.start(2, 3, 4)
    cluster.hooks.alike = (part,)
    to_memory(cluster, 0)
    assert not stays(cluster)
    cluster.all.finish()


def test_two_nodes_have_what_stays_while_another_one_is_awaited(cluster):
    """Of a part whose other holders were on that node, node 0 is the second."""
    cluster.start(2, 3, 4)
    cluster.hooks.alike = GROUPS
    for is_left in (True, False):
        to_memory(cluster, 5)
        assert stays(cluster) == is_left
        cluster.links[1].lose(GONE)
    cluster.all.finish()


def test_what_is_shared_out_comes_to_node_0(cluster):
    """No node would have it whole."""
    cluster.start(2, 3, 4)
    cluster.hooks.alike = GROUPS
    to_memory(cluster, 3)
    for parts, is_left in ((2, False), (1, True)):
        cluster.hooks.send_all((2,), WRITES._replace(parts=parts))
        assert cluster.links[0].said[-1].is_left == is_left
    cluster.all.finish()


def test_all_of_it_comes_to_node_0_where_nodes_could_not_save_it_into_one_folder(cluster):
    cluster.start(2, 3, 4)
    cluster.hooks.alike = GROUPS
    cluster.hooks.has_common_folder = False
    to_memory(cluster, 3)
    assert not stays(cluster)
    cluster.all.finish()


def test_a_rank_of_node_0_that_lives_and_is_behind_reads_as_a_new_one_does(cluster):
    cluster.start(2, 3, 4)
    cluster.hooks.alike = ((0,), (1, 2, 5), (3,), (4,))
    for behind, is_left in ((1, False), (5, True)):
        whole = [rank for rank in range(6) if rank not in {4, behind}]
        cluster.all.act(do.SaveRanks(1, 5, (2,), tuple(whole), do.MEMORY, "why", gone=(4,)))
        assert stays(cluster) == is_left
    cluster.all.finish()


def test_where_nobody_knows_who_holds_it_all_of_it_comes_to_node_0(cluster):
    cluster.start(2, 3, 4)
    to_memory(cluster, 3)
    assert not stays(cluster)
    cluster.all.finish()


def test_what_others_cannot_reach_comes_to_node_0(cluster):
    """A second msrun on the machine of node 0, which sees it by an address of that machine alone."""
    cluster.start(2, 3, 4)
    cluster.hooks.alike = GROUPS
    addresses = {("127.0.0.1", "10.0.0.2"): False, ("127.0.0.1", "127.0.0.1"): True}
    for (one, other), is_left in addresses.items():
        for node, address in zip(cluster.others, (one, other), strict=True):
            node.facts = node.facts._replace(address=address)
        to_memory(cluster, 3)
        assert stays(cluster) == is_left
    cluster.all.finish()


def test_where_nodes_do_not_reach_each_other_all_of_it_comes_to_node_0_the_next_time(cluster):
    cluster.start(2, 3, 4)
    cluster.hooks.alike = GROUPS
    cluster.all._memory._sender = SimpleNamespace(
        begin=lambda *_, **__: {}, hear=print, expect=print, close=print, lose=print
    )
    for absent, is_left in (((), True), ((1,), False)):
        cluster.hooks.spread(1, "/proc/7/fd/4", SimpleNamespace(absent=absent), print)
        cluster.links[1].hear(MemoryTaken("/proc/7/fd/4", "it timed out"))
        to_memory(cluster, 3)
        assert stays(cluster) == is_left
    cluster.all.finish()


def test_each_part_is_written_on_two_nodes_that_hold_it(cluster):
    """One of them may be lost. Of what node 0 lacks they are others."""
    cluster.start(2, 3, 4)
    cluster.hooks.alike = ((0, 3), (1,), (2, 5), (4,))
    cluster.links[1].hear(Fact(pack_event(ev.WorkerStarted(5, 0, 105))))
    for gone in ((), (3,)):  # node 1 is the one that has all of it; if nobody is replaced, node 0
        to_memory(cluster, *gone)
        cluster.hooks.send_all((5,), SAVE)
        assert isinstance(cluster.links[1].said[-1], SaveHere) == bool(gone)
    for groups, is_written in ((((0, 3, 5), (1,), (2,), (4,)), True), (((0, 2, 5),), False)):
        cluster.hooks.alike = groups
        to_memory(cluster, 3)
        cluster.hooks.send_all((5,), SAVE)
        assert isinstance(cluster.links[1].said[-1], SaveHere) == is_written


# --- the node of this process, which has taken the part of node 0 ---------------------------------


@pytest.fixture
def here(cluster):
    """Node 1 is this msrun's own."""
    cluster.others[0].is_here = True
    cluster.all._choose_next()
    cluster.start(2, 3, 4, 5)
    cluster.links[0].said.clear()
    return cluster


def test_another_one_keeps_copies_of_what_its_ranks_alone_have(here):
    page = PageSeen.of(2, 0, b"")
    here.hooks.copies(page)
    assert page not in here.links[0].said
    assert here.links[1].said[-1] == page


def test_what_is_in_memory_here_is_so_for_it(here):
    path = "/proc/7/fd/4"
    here.all._memory._sender = SimpleNamespace(begin=lambda *_, **__: {}, close=print)
    here.hooks.spread(1, path, None, print)
    assert here.others[0].has_memory(path)
    save = protocol.Save(1, 5, path, is_quick=True, parts=1)
    welcome = protocol.Rejoin(1, path, "a rank died", 4712)
    for message in (save, welcome):
        here.hooks.send(2, message)
    assert [unpack_said(each.message) for each in here.links[0].said] == [save, welcome]


def test_nobody_waits_until_it_has_closed_its_line(here):
    here.all.finish()
    assert isinstance(here.links[0].said[-1], Ended)
    assert here.links[0].drained is None
    assert here.links[1].drained


# --- nodes that have lost node 0 of some job ------------------------------------------------------


def survivor(step=9, job="other", program=None):
    digest = program_digest(SimpleNamespace(program=PROGRAM)) if program is None else program
    return wish(is_spare=False)._replace(
        survived=SurvivedStep(job, 1, "/c/step_9", step, (job,), digest)
    )


def test_a_survivor_of_another_script_is_refused_by_a_job_that_runs(waiting):
    answer = waiting.all._judge(survivor(program="other"), "10.0.0.4")
    assert answer == Refused(
        "d goes on with a job that runs another script or has other arguments", 2
    )
    assert waiting.events == []


@pytest.mark.parametrize("job", ["r", "before"])
def test_a_node_that_was_cut_off_from_this_job_waits_as_a_spare(waiting, job):
    waiting.hooks.newest = 3  # it had come further than those that went on
    assert isinstance(waiting.all._judge(survivor(job=job), "10.0.0.4"), Spare)
    assert waiting.events == []


def test_a_node_whose_ranks_train_is_none_of_a_job_that_runs(waiting):
    """Its msrun stood still for so long that it was taken for lost."""
    waiting.links[0].lose(GONE)
    digest = program_digest(SimpleNamespace(program=PROGRAM))
    told = LivingRanks("r", 1, 0, "", "", 0, (), digest, 6, 0)
    join = wish(is_spare=False, rank=1)._replace(living=told)
    assert waiting.all._judge(join, "10.0.0.4") == LEFT
    other = join._replace(living=told._replace(job="another"))  # it goes on looking for its own
    assert waiting.all._judge(other, "10.0.0.4").exit_code == 2


def test_a_job_that_began_anew_ends_if_a_later_step_of_it_is_saved(waiting):
    waiting.hooks.newest = 8
    answer = waiting.all._judge(survivor(step=9), "10.0.0.4")
    why = (
        "d has saved step 9 of the same training in /c/step_9, and was not here when this job "
        "began, which has come to step 8"
    )
    assert waiting.events == [ev.StopRequested(SIGTERM, why)]
    assert answer == Refused(f"the job here has begun without this node, and ends: {why}", 1)
    waiting.events.clear()
    waiting.hooks.newest = 9
    assert isinstance(waiting.all._judge(survivor(step=9), "10.0.0.4"), Spare)
    assert waiting.events == []


# --- more nodes, or fewer ---------------------------------------------------------------------

GROWS = "d has come: the job goes on with 4 nodes"
ALIKE, CALM = Holders(), JobView(JobState.RUNNING, 1, has_hooks=True)


@pytest.mark.parametrize(
    ("view", "holders", "newest", "grows"),
    [
        (CALM, ALIKE, 5, True),
        (CALM, Holders("each has its part", is_cut=True), 5, True),
        (CALM, Holders("nobody knows who holds the same"), 5, False),
        (CALM, Holders(apart="/data is not one folder for all nodes"), 5, False),
        (CALM, ALIKE, 0, False),  # nothing could be saved
        (CALM._replace(state=JobState.REPLACING), ALIKE, 5, False),
        (CALM._replace(is_asked=True), ALIKE, 5, False),
    ],
)
def test_a_node_that_comes_is_taken_in_once_the_step_can_be_saved(
    waiting, monkeypatch, view, holders, newest, grows
):
    late = wish()
    waiting.size(Resize(2, 4, 3))
    waiting.hooks.newest = newest
    monkeypatch.setattr(type(waiting.all._door), "waiting", (late, wish(is_spare=True)))
    waiting.all.decided(view, holders)
    assert waiting.events == [ev.ExitRequestedByFile(1, GROWS, goes_on=True)] * grows
    waiting.all.decided(view, holders)  # it is asked for once
    assert len(waiting.events) == grows


def test_a_spare_node_and_a_vacant_place_make_no_job_grow(waiting, monkeypatch):
    waiting.size(Resize(2, 4, 3))
    waiting.hooks.newest = 5
    monkeypatch.setattr(type(waiting.all._door), "waiting", (wish(is_spare=True),))
    waiting.all.decided(CALM, ALIKE)
    monkeypatch.setattr(type(waiting.all._door), "waiting", (wish(),))
    monkeypatch.setattr(waiting.all._door, "seat", lambda: None)
    waiting.links[0].lose(GONE)
    waiting.events.clear()
    waiting.all.decided(CALM, ALIKE)
    assert waiting.events == []


def ended(**about):
    known = {"exit_code": 0, "reason": "all left", "state": JobState.STOPPED, "saved": "/d/step_5"}
    return SimpleNamespace(**{**known, "lost": "", "is_to_end": False, **about}, asking=frozenset())


def test_the_nodes_of_a_job_that_goes_on_are_told_and_no_spare_one_is_sent_away(
    waiting, monkeypatch
):
    farewells = []
    monkeypatch.setattr(waiting.all._door, "close", farewells.append)
    waiting.size(Resize(2, 4, 3))
    waiting.all._size.resize.grow(["d"])
    waiting.controller.ending = ended()
    assert waiting.all.goes_on_with == 4
    waiting.all.finish()
    assert farewells == [None]
    assert waiting.links[0].said[-1] == Ended(0, "all left", "stopped", goes_on=True)
    waiting.controller.ending = ended(lost="no rank holds it")
    assert waiting.all.goes_on_with == 0


@pytest.mark.parametrize("has_hooks", [True, False])
def test_a_place_that_nobody_takes_is_done_without(waiting, monkeypatch, has_hooks):
    monkeypatch.setattr(waiting.all._door, "seat", lambda: None)
    waiting.size(Resize(2, 4, 3))
    waiting.all.decided(CALM._replace(has_hooks=has_hooks), ALIKE)
    waiting.links[0].lose(GONE)
    waiting.all._give_up(waiting.others[0])
    waiting.controller.ending = ended(state=JobState.FAILED)
    assert waiting.all.goes_on_with == (2 if has_hooks else 0)


# --- spare nodes ----------------------------------------------------------------------------------


def test_a_spare_node_waits_and_is_said_once(waiting):
    waits = Spare(tuple(waiting.all._doorkeeper.facts))
    assert [waiting.all._judge(spare(), "10.0.0.4") for _ in range(2)] == [waits, waits]
    assert waiting.said == ["a spare node has come (d): it takes the place of a lost one"]


def test_a_spare_node_gets_the_place_of_the_first_lost_one_of_its_size(waiting, monkeypatch):
    seated = []
    monkeypatch.setattr(
        waiting.all._door, "seat", lambda: seated.append(waiting.all._judge(spare(), "10.0.0.4"))
    )
    waiting.links[1].lose(GONE)  # of one worker
    assert seated.pop() == Spare(tuple(waiting.all._doorkeeper.facts))
    waiting.links[0].lose(GONE)
    place = seated.pop()
    assert place.node_rank == 1
    assert place.begin.nodes[1] == NodeFacts(1, "d", "10.0.0.4", 3, 77)


def test_the_store_is_shown_to_the_nodes_of_the_job_as_they_are_now(waiting):
    store = waiting.all._door.store
    others = {each.facts.address for each in waiting.others}
    assert store.addresses() == {"10.0.0.1", *others}
    assert store.port() == 4712
    waiting.all._judge(spare(), "10.0.0.9")
    assert "10.0.0.9" not in store.addresses()
    waiting.all._places.lose(1, time.monotonic(), is_silent=False)
    waiting.all._judge(spare(), "10.0.0.9")
    assert store.addresses() >= {"10.0.0.1", "10.0.0.9"}
    assert waiting.others[0].facts.address not in store.addresses()


@pytest.mark.parametrize(
    ("is_silent", "join", "is_haunted"),
    [
        (True, spare(), True),
        (False, spare(), False),
        (True, spare(host="b", pid=9), False),  # it is the silent one itself
    ],
)
def test_who_comes_in_the_place_of_a_silent_node_is_told(waiting, is_silent, join, is_haunted):
    waiting.all._places.lose(1, time.monotonic(), is_silent=is_silent)
    place = waiting.all._judge(join, "10.0.0.4")
    assert (place.node_rank, place.begin.settings["is_haunted"]) == (1, is_haunted)


def test_no_place_is_free_while_a_store_is_asked(waiting):
    waiting.all._places.lose(1, time.monotonic(), is_silent=True)
    waiting.all._places.is_in_doubt = True
    late = spare()._replace(is_spare=False)
    assert isinstance(waiting.all._judge(late, "10.0.0.4"), Spare)
    waiting.all._places.is_in_doubt = False
    assert waiting.all._judge(late, "10.0.0.4").node_rank == 1


@pytest.mark.parametrize(
    ("join", "why"),
    [
        (spare(nproc=2), "this node has 2 workers, but those that it could replace have 1 or 3"),
        (spare(is_spare=False), "let it wait for one with --spare-node"),
        (spare(is_spare=False, rank=1), "let it wait for one with --spare-node"),
    ],
)
def test_who_can_take_no_place_does_not_wait(waiting, join, why):
    answer = waiting.all._judge(join, "10.0.0.4")
    assert isinstance(answer, Refused)
    assert why in answer.why
    assert answer.exit_code == 2


@pytest.mark.parametrize(
    ("run_id", "ours", "why"),
    [
        ("K", "J", "d (10.0.0.4) belongs to the job 'K', but 'J' runs here: give another "),
        ("", "J", "d (10.0.0.4) names no job, but 'J' runs here: give another --master-port, or"),
        ("K", "", "d (10.0.0.4) belongs to the job 'K', but one without a name runs here: give "),
    ],
)
def test_a_node_of_another_job_gets_no_place_however_it_comes(waiting, run_id, ours, why):
    keeper = waiting.all._doorkeeper
    keeper._job = keeper._job._replace(spec=keeper._job.spec._replace(run_id=ours or "r"))
    waiting.links[0].lose(GONE)
    for join in (spare(), spare(is_spare=False), spare(is_spare=False, rank=1)):
        answer = waiting.all._judge(join._replace(run_id=run_id), "10.0.0.4")
        assert answer.why.startswith(why)
        assert answer.exit_code == 2
    assert waiting.said[1:] == []


def test_a_node_that_comes_late_where_more_may_come_waits_as_a_spare(waiting):
    late = spare()._replace(is_spare=False)
    assert isinstance(waiting.all._judge(late, "10.0.0.4"), Refused)
    waiting.size(Resize(2, 4, 3))
    assert waiting.all._judge(late, "10.0.0.4") == Spare(tuple(waiting.all._doorkeeper.facts))
    waiting.size(Resize(2, 3, 3))  # all have come: it waits all the same, as with torchrun
    late = late._replace(pid=78)
    assert waiting.all._judge(late, "10.0.0.4") == Spare(tuple(waiting.all._doorkeeper.facts))
    assert waiting.said[-1] == "another node has come (d): it takes the place of a lost one"
    waiting.all._doorkeeper.facts = waiting.all._doorkeeper.facts[:1]
    why = waiting.all._judge(spare(), "10.0.0.4").why
    assert why == "the job runs on one node, whose place no other one can take"


@pytest.mark.parametrize("most", [9, 3])  # by now it may have all that it can have
def test_a_job_that_began_with_fewer_nodes_numbered_them_anew(waiting, monkeypatch, most):
    monkeypatch.setattr(waiting.all._door, "seat", lambda: None)
    waiting.size(Resize(2, most, 3))
    waiting.links[0].lose(GONE)
    back = spare()._replace(is_spare=False, node_rank=7)  # as its command says
    assert waiting.all._judge(back, "10.0.0.4").node_rank == 1


def test_a_worker_that_is_started_again_by_hand_has_its_own_place(waiting, monkeypatch):
    monkeypatch.setattr(waiting.all._door, "seat", lambda: None)
    by_hand = ClusterSpec(3, by_hand=HandSpec(has_worker=False))
    keeper = waiting.all._doorkeeper
    keeper._job = keeper._job._replace(spec=keeper._job.spec._replace(cluster=by_hand))
    waiting.all._doorkeeper.facts[1] = waiting.all._doorkeeper.facts[1]._replace(
        name="worker_0", nproc=1
    )
    waiting.all._doorkeeper.facts[2] = waiting.all._doorkeeper.facts[2]._replace(
        name="worker_1", nproc=1
    )
    again = spare(nproc=1, is_spare=False)._replace(name="worker_1")
    assert isinstance(waiting.all._judge(again, "10.0.0.4"), Spare)  # that one lives yet
    for link in waiting.links:
        link.lose(GONE)
    place = waiting.all._judge(again, "10.0.0.4")
    assert (place.node_rank, place.begin.nodes[2].name) == (2, "worker_1")
    assert waiting.all._judge(again._replace(name="new"), "10.0.0.4").node_rank == 1


def test_no_spare_node_waits_where_no_place_is_ever_free(cluster):
    assert isinstance(answer := cluster.all._judge(spare(), "10.0.0.4"), Refused)
    assert "--node-wait=0" in answer.why
