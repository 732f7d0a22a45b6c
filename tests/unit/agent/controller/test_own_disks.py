"""Decisions where each node saves into a folder of its own: only node 0's counts."""

import pytest
from support.histories import copies, groups
from support.histories.dumps import done, froze, full, holds, running, unable, wrote
from support.histories.exits import stands
from support.histories.plain import gone
from support.histories.replacements import MEMORY, asked, play
from support.histories.same import EQUAL, OWN
from support.policies import altered_policy

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.protection import Level, protection
from agent.controller.replication import groups_to_copy, unsaved_copy
from agent.controller.states import JobState
from worker_hooks.contract import protocol

WHY = "/data is not one folder for all nodes: what node 1 writes there is not seen on the first"
APART = ev.FolderApart(WHY)
HEAD = range(1)  # the ranks of node 0
NODES = {"near": HEAD, "has_nodes": True, "node_wait_s": 9.0}
REPLACED, RESTARTED = asked(**NODES), asked(**NODES, is_on=False)


def heard(policy, *events):
    """The job after three ranks run and these events, and the newest of what follows."""
    return after(play(policy, running(3)), APART, *events)


def after(job, *events):
    actions = ()
    for event in events:
        decision = decide(job, event)
        job = decision.job
        actions = decision.actions or actions
    return job, actions


def order(actions, kind):
    (found,) = [each for each in actions if isinstance(each, kind)]
    return found


def test_a_rank_is_replaced_from_memory_as_ever():
    job, actions = heard(REPLACED, gone(1, -9), froze(2), froze(0))
    save = order(actions, do.SaveRanks)
    assert (save.place, save.writers) == (do.MEMORY, (0,))
    job, actions = after(job, wrote(0), holds(2), done(MEMORY))
    assert order(actions, do.ReplaceRanks).newcomers == (1,)


def test_what_is_saved_is_written_by_ranks_of_the_first_node():
    job, actions = heard(RESTARTED, gone(1, -9), froze(2), froze(0))
    save = order(actions, do.SaveRanks)
    assert (save.place, save.writers, save.digesters) == (0, (0,), (2,))
    assert job.now.not_replaced == "replacing is off"


LOST_HEAD = (gone(0, -9), froze(1), froze(2))
"""No rank of node 0 is left."""


def test_without_such_a_rank_it_comes_to_the_disk_by_way_of_memory():
    job, actions = heard(RESTARTED, *LOST_HEAD)
    save = order(actions, do.SaveRanks)
    assert (save.place, save.writers) == (do.MEMORY, (1,))
    job, actions = after(job, wrote(1), holds(2), done(MEMORY))
    commit = order(actions, do.CommitDump)
    assert (commit.place, commit.from_memory, job.state) == (0, True, JobState.COMMITTING)
    job, _ = after(job, done("/data/5"), gone(1, -15), gone(2, -15))
    assert (job.state, job.attempt, job.resume) == (JobState.STARTING, 1, "/data/5")


def test_a_writer_of_the_first_node_that_dies_is_followed_by_others_in_memory():
    job, _ = heard(RESTARTED, gone(1, -9), froze(0), froze(2))
    job, actions = after(job, gone(0, -9), holds(2))
    save = order(actions, do.SaveRanks)
    assert (save.place, save.writers, job.state) == (do.MEMORY, (2,), JobState.DUMPING)
    job, actions = after(job, wrote(2, number=save.round))
    assert order(actions, do.CommitDump).place == do.MEMORY


def test_a_full_disk_of_the_first_node_is_no_reason_for_memory():
    job, actions = heard(RESTARTED, gone(1, -9), froze(0), froze(2))
    job, actions = after(job, full(0))
    save = order(actions, do.SaveRanks)
    assert (save.place, save.writers) == (1, (0,))


def test_without_memory_it_is_not_saved_and_the_cause_is_named():
    job, _ = heard(RESTARTED, *LOST_HEAD)
    job, _ = after(job, unable(1, "no memory is left", place=True))
    assert job.state is JobState.STOPPING
    assert "step 5 is not saved: no checkpoint in memory (no memory is left)" in job.now.outcome
    assert f"the ranks of the first node do not hold it: {WHY}" in job.now.outcome


@pytest.mark.parametrize(("near", "place"), [(range(2), 0), (HEAD, do.MEMORY)])
def test_of_parts_all_must_be_on_the_first_node(near, place):
    policy = altered_policy(groups.FOUR, near=near, has_nodes=True)
    job, _ = after(play(policy, groups.TRAINING), APART)
    job, actions = after(job, gone(3, -9), froze(2), froze(0), froze(1))
    save = order(actions, do.SaveRanks)
    assert (save.place, sorted(save.writers)) == (place, [0, 1])


def test_a_stop_saves_in_the_same_way():
    policy = altered_policy(groups.FOUR, near=HEAD, has_nodes=True)
    job, _ = after(play(policy, groups.TRAINING), APART)
    job, _ = after(job, ev.ExitRequestedByFile(0, "a file"))
    assert job.state is JobState.HOLDING
    job, _ = after(job, *(stands(rank, 5) for rank in range(4)))
    job, actions = after(job, *(froze(rank) for rank in range(4)))
    save = order(actions, do.SaveRanks)
    assert save.place == do.MEMORY
    written = [wrote(rank, str(rank % 2)) for rank in save.writers]
    told = [holds(rank, str(rank % 2)) for rank in save.digesters]
    job, actions = after(job, *written, *told, done(MEMORY))
    assert order(actions, do.CommitDump).from_memory
    job, actions = after(job, done("/data/5"))
    assert isinstance(order(actions, do.Tell).message, protocol.Leave)


def test_copies_are_neither_taken_nor_saved():
    policy = altered_policy(copies.THREE, **NODES)
    job, _ = after(play(policy, EQUAL), copies.copied(5))
    assert groups_to_copy(job)
    assert unsaved_copy(job)
    job, _ = after(job, APART)
    assert groups_to_copy(job) == ()
    assert unsaved_copy(job) is None


# --- what is said ---------------------------------------------------------------------------------


def test_what_holds_and_what_does_not():
    job = play(REPLACED, EQUAL)
    shared = str(protection(job))
    decision = decide(job, APART)
    said = str(protection(decision.job))
    assert decision.say == said
    assert protection(decision.job).level is Level.PROTECTED
    assert shared.endswith("; likewise a node, once another takes its place")
    assert said.endswith(
        "; likewise a node, once another takes its place; what is saved is on the disk of node 0 "
        f"alone, other nodes copy it as they resume, and without it no step is saved ({WHY})"
    )
    assert decide(decision.job, APART).say == ""  # another node says the same


def test_it_is_said_once_if_it_is_known_before_all_else():
    job, _ = after(play(REPLACED, EQUAL[:-1]), APART)
    decision = decide(job, EQUAL[-1][0])
    assert WHY in decision.say


def test_a_restart_says_so_as_well():
    said = str(protection(after(play(RESTARTED, EQUAL), APART)[0]))
    assert said.startswith("partly protected: replacing is off; a death means save and restart")
    assert said.endswith(f"without it no step is saved ({WHY})")


def test_of_a_scheduler_too():
    policy = altered_policy(REPLACED, near=range(0))
    said = str(protection(after(play(policy, EQUAL), APART)[0]))
    assert "what is saved is on the disk of the scheduler alone" in said
    assert said.endswith(f"without it no step is saved ({WHY})")


def test_what_no_other_rank_holds_is_not_protected():
    job, _ = after(play(altered_policy(REPLACED, max_restarts=1), OWN), APART)
    found = protection(job)
    assert found.level is Level.NOT_PROTECTED
    assert f"it is not copied, as nodes could not save their parts together: {WHY}" in found.why
