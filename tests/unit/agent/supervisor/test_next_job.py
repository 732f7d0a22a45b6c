"""What a node has prepared for the job that would have followed."""

import signal
import subprocess
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import saved

from agent.launch import succession
from agent.launch.prepare import StartedForkserver
from agent.launch.search import HOME, Search
from agent.nodes.line import CALM, CLOSED, VERY_CALM
from agent.nodes.run_messages import NodeFacts
from agent.records import complete_checkpoint
from agent.records.run_record import Record
from agent.spec.job_spec import ClusterSpec, DumpSpec, JobSpec, Program, ProgramKind, ReplaceSpec
from agent.spec.spent_budget import SpentBudget
from agent.supervisor import run_controlled as module
from agent.supervisor.job_view import JobView
from agent.supervisor.run_controlled import NextJob

NODES = tuple(NodeFacts(rank, "", f"10.0.0.{rank}", 2, 9, door=70 + rank) for rank in range(3))
NOTHING = SpentBudget()


def following_of(say, restarts=0, resume=None, spent=NOTHING):
    """What follows on a node, in a job that may restart so often."""
    asked = JobSpec(
        Program("train.py", (), ProgramKind.SCRIPT, "python"),
        2,
        "r",
        "r",
        cluster=ClusterSpec(3),
        nodes=(2, 2, 2),
        node_rank=0,
        master_addr="node0",
        master_port=29500,
        max_restarts=restarts,
        replace=ReplaceSpec(node_wait_s=60.0),
        dump=DumpSpec(resume=resume, resume_step=4 if resume else 0),
    )
    met = SimpleNamespace(
        prepared=SimpleNamespace(spec=asked, is_late=False),
        asked=asked,
        roster=SimpleNamespace(nodes=NODES),
        door=None,
        token=b"",
        settings={},
    )
    starter = SimpleNamespace(keep=lambda: True, kept=lambda: None)
    return NextJob(met, {}, SimpleNamespace(say=say), starter, None, lambda: spent)


def test_of_a_job_that_does_not_follow_no_process_is_left():
    """A forkserver that still imports does not notice the end of its msrun."""
    done = []
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as importing:
        following = NextJob.__new__(NextJob)
        following._early = StartedForkserver(
            SimpleNamespace(pid=importing.pid, forget=lambda: done.append("forgotten")),
            None,
            SimpleNamespace(close=lambda: done.append("closed")),
        )
        following._met = SimpleNamespace(door=None)
        following.call_off()
        assert importing.wait(30) == -signal.SIGKILL
    assert done == ["forgotten", "closed"]


def test_a_node_0_that_is_outvoted_looks_for_all_others_and_not_for_itself(monkeypatch):
    """It ended, and had to be started again by hand."""
    following = following_of(print)
    monkeypatch.setattr(module, "start_early", lambda *_: "a forkserver")
    assert following.beside(NODES, 0) is None  # nobody would find it
    following._met.door = "a listener"
    found = following.beside(NODES, 0)
    assert (found.saved, found.door, found.early) == (None, "a listener", "a forkserver")
    others = {1: ("10.0.0.1", 71), 2: ("10.0.0.2", 72)}
    addresses = succession._addresses(found)
    assert addresses == {HOME: others[1]} | others
    looks = Search(len(found.nodes), addresses, 0.0, is_spare=True, is_silent=False)
    assert looks.candidates() == {HOME, *others}
    assert following.beside(NODES[:2], 0).nodes[1] == NODES[1]  # it is the last one, too
    assert [node.door for node in following.beside(NODES, 1).nodes] == [0, 70, 72]
    without_ranks = (NODES[0]._replace(nproc=0), *NODES[1:])
    assert following.beside(without_ranks, 0) is None
    away = (NODES[0], *(node._replace(door=0) for node in NODES[1:]))
    assert following.beside(away, 0) is None


@pytest.mark.parametrize(
    ("nodes", "has_hooks", "code", "wait_s", "term", "times"),
    [
        (3, True, None, 60.0, "", CALM),
        (2, True, None, 60.0, "", VERY_CALM),
        (2, True, None, 60.0, "a term", CALM),
        (3, True, None, 0.0, "", VERY_CALM),  # nobody would wait for another node
        (3, False, None, 60.0, "", inf),
        (3, False, 1, 60.0, "", VERY_CALM),
        (3, True, 1, 60.0, "", CALM),
        (3, True, 0, 60.0, "", inf),  # all ranks here are done
    ],
)
def test_how_long_a_controller_that_says_nothing_is_waited_for(
    nodes, has_hooks, code, wait_s, term, times
):
    following = following_of(print)
    spec = following._met.prepared.spec
    following._met.prepared.spec = spec._replace(
        node_rank=1, replace=ReplaceSpec(node_wait_s=wait_s)
    )
    view = JobView(has_hooks=has_hooks)
    controller = SimpleNamespace(nodes=NODES[:nodes], head=0, term=term, view=view)
    workers = [SimpleNamespace(exit_code=code)]
    node = SimpleNamespace(workers=lambda: workers, living=lambda: [3] * (code is None))
    assert following.patience(controller, node) == times


def test_who_had_taken_node_0s_part_counts_as_node_0_where_nodes_meet_again():
    following = following_of(print)  # it has the place of the node 0 that was lost before
    lost = SimpleNamespace(nodes=NODES, view=JobView(attempt=4), term="", head=1, best_step=9)
    assert following.begin(lost, CLOSED, 9, True)
    assert [each.address for each in following._nodes] == ["10.0.0.1", "10.0.0.0", "10.0.0.2"]
    assert following._spec.node_rank == 1
    job = following._job
    assert (job.master_addr, job.master_port) == ("10.0.0.1", 71)
    assert job.cluster.home == ("node0", 29500)
    lost = SimpleNamespace(nodes=following._nodes, job=job)
    assert succession._addresses(lost)[0] == ("10.0.0.1", 71)


# --- what the ranks had reached is not saved ------------------------------------------------------


def parts_of(folder, complete=None):
    """Of a run whose ranks save into this folder; ``complete``: what it knows of."""
    fields = {"record_id": "mine", "job": "lost", "run_id": "", "pid": 1, "born": 1, "log_dir": ""}
    record = Record(**fields, argv=(), cwd="", started=0.0, checkpoints=(str(folder),))
    if complete is not None:
        path, step = complete
        record = record._replace(complete_path=str(path), complete_step=step)
    return SimpleNamespace(kept=SimpleNamespace(present=record))


def after_a_loss(folder, *, reached=6, best=6, is_apart=False, complete=None, **job):
    """What follows where nothing newer is saved than what is in the folder; and what was said."""
    said = []
    following = following_of(said.append, **job)
    view = JobView(attempt=1, is_apart=is_apart)
    lost = SimpleNamespace(nodes=NODES, view=view, term="", head=0, best_step=best)
    assert following.begin(lost, CLOSED, reached, True)
    return following.lost(parts_of(folder, complete), reached, 0.0), said


def test_a_job_of_which_nothing_is_saved_begins_anew_and_says_what_is_lost(tmp_path):
    found, said = after_a_loss(tmp_path, restarts=3)
    assert (found.saved.path, found.saved.step, found.saved.reached) == ("", 0, 6)
    assert (found.saved.node_rank, found.saved.nodes, found.saved.lineage) == (0, 3, ())
    assert said == ["nothing of run r is saved: the job begins anew, 6 steps are lost"]
    assert (found.job.cluster.lost_at, found.job.spent.restarts) == ((6,), 1)


def test_what_the_job_has_used_up_counts_where_it_goes_on(tmp_path):
    spent = SpentBudget(1, 5, (3.0, 4.0))
    folder = saved(tmp_path, step=6, run="lost")
    found, _ = after_a_loss(tmp_path, restarts=2, spent=spent)
    assert (found.saved.path, found.job.spent) == (str(folder), spent)
    found, _ = after_a_loss(tmp_path, reached=7, best=7, restarts=2, spent=spent)
    assert found.job.spent == spent._replace(restarts=2)  # it is a restart, from an older step


def test_steps_of_an_attempt_before_are_lost_as_well(tmp_path):
    """The job had been restarted from its beginning already, without node 0."""
    found, said = after_a_loss(tmp_path, reached=0, best=6, restarts=3)
    assert found.saved.reached == 6
    assert said == ["nothing of run r is saved: the job begins anew, 6 steps are lost"]


def test_where_no_step_was_made_none_is_lost(tmp_path):
    _, said = after_a_loss(tmp_path, reached=0, best=0, restarts=1)
    assert said == ["nothing of run r is saved: the job begins anew, it had made no step"]


def test_it_goes_on_from_an_older_checkpoint_and_says_what_is_lost(tmp_path):
    folder = saved(tmp_path, step=5, run="lost")
    found, said = after_a_loss(tmp_path, restarts=1)
    assert (found.saved.path, found.saved.step, found.saved.reached) == (str(folder), 5, 6)
    assert found.saved.lineage == ("lost",)
    where = f"step 5 is saved in {folder}: the job goes on from there"
    assert said == [f"{where}, 1 step after step 5 is lost"]


def test_a_checkpoint_that_cannot_be_read_is_named_and_never_passed_over(tmp_path):
    folder = saved(tmp_path, step=5, run="lost")
    (folder / "manifest.json").write_text("{")
    found, said = after_a_loss(tmp_path, restarts=3)
    assert found is None
    assert said[0].startswith(f"{folder} is skipped: ")
    assert said[-1] == "the job does not go on by itself: step 6 is not saved"
    older = saved(tmp_path, step=3, run="lost")
    found, said = after_a_loss(tmp_path, restarts=3)
    assert found.saved.path == str(older)
    assert said[0].startswith(f"{folder} is skipped: ")


@pytest.mark.parametrize("older", [0, 3])
def test_a_checkpoint_that_is_away_is_named_and_nothing_older_is_taken(
    tmp_path, monkeypatch, older
):
    """Its file server is unmounted: an empty mount point, as if nothing had ever been saved."""
    monkeypatch.setattr(complete_checkpoint, "LATE_S", 0.0)
    if older:
        saved(tmp_path, step=older, run="lost")
    gone = tmp_path / "a b" / "net-1_5"
    found, said = after_a_loss(tmp_path, restarts=3, complete=(gone, 5))
    assert found is None
    assert said[0].startswith(f"the newest checkpoint of this run, {gone} (step 5), is not there")
    assert said[0].endswith(f"start all nodes again, node 0 with --resume='{tmp_path}/a b'")
    assert said[1:] == ["the job does not go on by itself: step 6 is not saved"]


def test_a_folder_that_cannot_be_looked_into_is_not_taken_for_empty(tmp_path, monkeypatch):
    def stale(folder):
        raise OSError(116, "Stale file handle", str(folder))

    monkeypatch.setattr(succession.os, "listdir", stale)
    found, said = after_a_loss(tmp_path, restarts=3)
    assert found is None
    assert said[0].startswith("what was saved cannot be looked at: ")


def test_where_it_began_must_be_there(tmp_path):
    found, said = after_a_loss(tmp_path, restarts=3, resume=Path("/gone/step_4"))
    assert found is None
    assert said[0] == "the checkpoint /gone/step_4, from which the job began, is not found"


SPENT = {"restarts": 2, "spent": SpentBudget(restarts=2)}


@pytest.mark.parametrize("how", [{"restarts": 0}, SPENT, {"restarts": 3, "is_apart": True}])
def test_no_step_is_given_up_that_the_job_was_not_told_it_may(tmp_path, how):
    """Without a restart that is left; or other nodes do not see what node 0 has saved."""
    found, said = after_a_loss(tmp_path, **how)
    assert found is None
    assert said == ["the job does not go on by itself: step 6 is not saved"]


def test_a_job_that_changes_its_size_saves_its_step_or_ends(tmp_path):
    said = []
    following = following_of(said.append, restarts=3)
    following._early = object()  # else it would be started
    following._start = lambda _: None
    following.follow(NODES)
    assert following.lost(parts_of(tmp_path), 6, 0.0) is None


def test_node_0_that_has_left_is_not_lost(tmp_path):
    saved(tmp_path, step=6, run="lost")
    following = following_of(print, restarts=3)
    following._start = lambda _: None
    following.follow(NODES, without_first=2)
    parts = parts_of(tmp_path)
    found = following.lost(parts, 6, 0.0)
    assert (found.saved.step, found.without_first, found.expected) == (6, 2, 0)
    assert (found.job.cluster.lost_at, found.is_silent) == ((), False)


@pytest.mark.parametrize(("stay", "nodes"), [(2, 2), (4, 3)])
def test_nodes_that_have_left_are_not_missed_as_the_others_meet(tmp_path, stay, nodes):
    """Node 0 begins with more than half of those that may go on elsewhere: they do not."""
    saved(tmp_path, step=6, run="lost")
    following = following_of(print)
    following._start = lambda _: None
    following.follow(NODES, stay=stay)
    found = following.lost(parts_of(tmp_path), 6, 0.0)
    assert found.saved.nodes == nodes
