"""Who is met once node 0 is lost: which doors are tried, when this node leads, when it gives up."""

import signal
from functools import partial
from types import SimpleNamespace

import pytest
from support.checkpoints import flipped, saved

from agent.launch import search
from agent.launch import succession as module
from agent.launch.meeting import Continuation, JobOverError, OwnSide
from agent.launch.past import LOST, going_on
from agent.launch.search import FIRST, HOME
from agent.launch.succession import next_job, saved_step, why_over
from agent.nodes.join import NobodyThereError
from agent.nodes.line import Loss, LossKind
from agent.nodes.messages import SurvivedStep
from agent.nodes.roster import Doors, NodeZeroBackError
from agent.nodes.run_messages import NodeFacts
from agent.nodes.tls import PLAIN
from agent.records.run_record import Record
from agent.spec.job_spec import (
    ClusterSpec,
    JobSpec,
    LeftEarlyError,
    NotStartedError,
    Program,
    ProgramKind,
    ReplaceSpec,
)

GONE = Loss(LossKind.PROOF, "closed the line")
MUTE = Loss(LossKind.MUTE, "has said nothing")
SILENT = Loss(LossKind.SILENCE, "is lost")
NODES = tuple(
    NodeFacts(rank, f"mn{rank}", f"10.0.0.{rank}", 2, 9, "", 100 + rank) for rank in range(6)
)
JOB = JobSpec(
    program=Program("train.py", (), ProgramKind.SCRIPT, "python"),
    nproc=2,
    run_id="record",
    record_id="record",
    cluster=ClusterSpec(6, node_rank=3),
    nodes=(2,) * 6,
    node_rank=3,
    master_addr="mn0",
    master_port=100,
    replace=ReplaceSpec(node_wait_s=600.0),
)


def knock(one, awaited):
    """As the node that gathers does."""
    return one._search.gather(one._watch.look(awaited | {FIRST, HOME}), one.clock.now_s)


class FakeMet:
    """All are here."""

    def _replace(self, **_):
        return self


MET = FakeMet()


class Watch:
    """What comes of knocking, look by look; the last one stays."""

    def __init__(self, *doors):
        self.doors, self.asked = list(doors), []

    def look(self, ranks):
        self.asked.append(ranks)
        known = self.doors.pop(0) if len(self.doors) > 1 else self.doors[0]
        return Doors(*(frozenset(each & ranks) for each in known))


class Clock:
    now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def meeting(monkeypatch):
    """Of node 3, or of a spare one; what it does is noted."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    def made(watch, own=3, is_silent=False, job=None, answers=(), leads=(MET,), left=0):
        saved = None if own is None else SurvivedStep("lost", own, "/c", 5, (), "")
        lost = Continuation(job or next_job(JOB), NODES, saved, object(), None, is_silent)
        lost = lost._replace(without_first=left)
        said = []
        one = module._Meeting(lost, {}, "1", said.append, watch)
        one.clock, one.said, one.tried = clock, said, []
        answers, leads = iter(answers), iter(leads)

        def joined(side, *_, **__):
            one.tried.append((side.spec.master_addr, side.spec.master_port, side.own.is_spare))
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def gathered(side, wait_s, _, __, expected):
            answer = next(leads)
            one.gathers = wait_s, expected
            if isinstance(answer, Exception):
                raise answer
            one.led = side.spec.master_addr, side.spec.master_port
            return answer

        monkeypatch.setattr(module, "join_one", joined)
        monkeypatch.setattr(module, "gather_all", gathered)
        monkeypatch.setattr(
            module,
            "own_side",
            lambda spec, *_, **__: OwnSide(
                spec,
                {},
                SimpleNamespace(is_spare=spec.cluster.is_spare),
                b"",
                PLAIN,
                None,
                said.append,
            ),
        )
        return one

    return made


def doors(gone=(), silent=(), open=()):  # noqa: A002  as Doors has it
    return set(gone), set(silent), set(open)


def test_the_first_node_that_is_left_is_joined(meeting):
    one = meeting(Watch(doors(gone={0}), doors(gone={0, 1}, open={2})), answers=[MET])
    assert one.met() is MET
    assert one.tried == [("10.0.0.2", 102, False)]


def test_what_comes_of_the_first_knocks_is_not_awaited_for_long(meeting):
    """A neighbour answers within a millisecond, and all ranks stand still meanwhile."""
    one = meeting(Watch(doors(), doors(gone={0, 1}, open={2})), answers=[MET])
    assert one.met() is MET
    assert one.clock.now_s == module.FIRST_LOOK_S < module.LOOK_S / 4
    later = meeting(Watch(*[doors()] * 200, doors(gone={0, 1}, open={2})), answers=[MET])
    assert later.met() is MET
    assert later.clock.now_s > 10


def test_who_is_not_taken_yet_does_not_dial_at_once_again(meeting):
    watch = Watch(doors(gone={0, 1}, open={2}))
    one = meeting(watch, answers=[NobodyThereError(), NobodyThereError(), MET])
    assert one.met() is MET
    assert one.clock.now_s >= 2 * module.LOOK_S


def test_a_node_leads_when_all_before_it_are_gone_or_silent(meeting):
    one = meeting(Watch(doors(gone={0, 1}), doors(gone={0}, silent={2})))
    assert one.met() is MET
    assert one.led == ("10.0.0.3", 103)
    assert "start msrun there with --master-addr=10.0.0.3 --master-port=103" in one.said[0]


def test_a_node_that_is_asked_to_end_as_they_meet_again_leaves(meeting, monkeypatch):
    job = next_job(JOB)
    job = job._replace(cluster=job.cluster._replace(least=1, leaves=True))
    one = meeting(Watch(doors(open={1})), job=job)
    kill = partial(signal.raise_signal, signal.SIGTERM)
    monkeypatch.setattr(module, "join_one", lambda *_, **__: kill())
    monkeypatch.setattr(
        module, "DoorWatch", lambda *_: SimpleNamespace(look=one._watch.look, close=print)
    )
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(LeftEarlyError, match="this node has left") as found:
            module.meet_again(one._lost, {}, "1", print)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found.value.exit_code == 0
    assert "/c" in str(found.value)  # where what is saved is found


def test_where_node_0_has_left_so_many_begin_without_another_in_its_place(meeting):
    """None is awaited; but those that come need some time."""
    job = next_job(JOB._replace(replace=ReplaceSpec(node_wait_s=1.0)))
    one = meeting(Watch(doors(gone={0})), own=1, job=job, left=2)
    assert one.met() is MET
    assert one.gathers == (pytest.approx(module.REGATHER_S), 2)
    assert "takes the part of node 0, which has left" in one.said[0]


def test_nobody_leads_while_one_before_it_may_come(meeting):
    one = meeting(Watch(doors(gone={0, 1})))
    with pytest.raises(NotStartedError, match="no node has taken the part of node 0 within 10 min"):
        one.met()
    assert one.said == []


def test_who_does_not_gather_yet_is_asked_again(meeting):
    one = meeting(Watch(doors(gone={0, 1}, open={2})), answers=[NobodyThereError(), MET])
    assert one.met() is MET
    assert len(one.tried) == 2


def test_node_0_comes_first_if_it_is_there(meeting):
    one = meeting(Watch(doors(open={0, 2}, gone={1})), answers=[MET])
    assert one.met() is MET
    assert one.tried == [("mn0", 100, False)]  # by its name


def test_a_job_that_refuses_is_asked_again_after_a_while(meeting, monkeypatch):
    """It has ended and begun anew so quickly that nobody saw it gone."""
    monkeypatch.setattr(search, "REFUSED_S", 0.0)
    watch = Watch(doors(open={0}, gone={1, 2}))
    refused = NotStartedError("the job here has begun without this node, and ends", 1)
    one = meeting(watch, answers=[refused, refused, MET])
    assert one.met() is MET
    assert len(one.tried) == 3
    assert len(one.said) == 1


def test_who_leads_joins_node_0_when_that_is_back(meeting):
    watch = Watch(doors(gone={0, 1, 2}), doors(open={0}))
    one = meeting(watch, leads=[NodeZeroBackError()], answers=[MET])
    assert one.met() is MET
    assert one.said[-1] == "node 0 is back: the nodes meet there"


def test_another_job_at_node_0s_port_is_none_of_this_one(meeting):
    watch = Watch(doors(open={0}, gone={1, 2}))
    refused = NotStartedError("mn3 goes on with a job that runs another script", 2)
    one = meeting(watch, answers=[refused])
    assert one.met() is MET
    assert one.led == ("10.0.0.3", 103)
    assert one.said[0].startswith("mn0:100 is not node 0 of this job: ")
    assert knock(one, {0, 4}).gone == {0}


@pytest.mark.parametrize("away", [{"gone": {0, 1, 2}}, {"gone": {1, 2}, "silent": {0}}])
def test_once_the_other_job_has_ended_node_0_is_looked_for_again(meeting, away):
    watch = Watch(doors(open={0}, gone={1}), doors(**away), doors(open={0}, gone={1, 2}))
    refused = NotStartedError("the job here has begun without this node, and ends", 1)
    one = meeting(watch, answers=[refused, MET], leads=[NodeZeroBackError()])
    assert one.met() is MET
    assert [host for host, _, _ in one.tried] == ["mn0", "mn0"]
    assert one._search._passed >= {1}


def test_what_says_nothing_at_node_0s_port_is_left_and_may_be_alive(meeting):
    watch = Watch(doors(open={0}, gone={1, 2}))
    one = meeting(watch, answers=[NobodyThereError()] * 3)
    assert one.met() is MET
    assert knock(one, {0, 4}).gone == set()


def searching(now_s=0.0, *, is_mute=True):
    kinds = {"is_spare": False, "is_silent": True, "is_mute": is_mute}
    return search.Search(1, range(4), now_s, **kinds)


OPEN, FIRST_OPEN = Doors(open=frozenset({FIRST, 2})), Doors(open=frozenset({FIRST}))


def test_a_node_0_that_is_stopped_is_not_dialled_and_counts_as_silent():
    one = searching()
    assert one.look(FIRST_OPEN, 1.0) == search.LEAD
    told = one.gather(OPEN, 2.0)
    assert (told.gone, told.silent, told.open) == (set(), {FIRST}, {2})
    assert searching(is_mute=False).look(FIRST_OPEN, 1.0) == FIRST


def test_it_is_asked_now_and_then_as_it_may_go_on_with_others_once_it_is_continued():
    one = searching()
    one.gather(OPEN, search.REFUSED_S)
    with pytest.raises(NodeZeroBackError):
        one.gather(OPEN, search.REFUSED_S + 0.1)
    assert one.is_first_mute  # so nobody says that it is back
    assert one.look(FIRST_OPEN, search.REFUSED_S + 0.2) == FIRST
    one.unanswered(FIRST, search.REFUSED_S + 10.0)
    assert one.look(FIRST_OPEN, search.REFUSED_S + 10.1) == search.LEAD  # one dial is enough


def test_nodes_that_are_enough_do_not_ask_it():
    one = searching()
    for now_s in range(0, 100, 5):
        assert one.gather(OPEN, now_s, are_enough=True).silent == {FIRST}
    one.gather(OPEN, 100.0)


def test_one_that_has_ended_meanwhile_is_looked_for_anew():
    one = searching()
    assert one.look(Doors(gone=frozenset({FIRST})), 1.0) == search.LEAD
    assert not one.is_first_mute
    assert one.look(FIRST_OPEN, 2.0) == FIRST  # it was started again


def test_of_a_job_that_others_may_go_on_with_it_is_said_where_it_is_saved(monkeypatch):
    lost = Continuation(next_job(JOB), NODES[1:], None, object(), None, kept="/c k/step_5")
    monkeypatch.setattr(module, "take_back", lambda *_: None)

    class Nobody:
        def __init__(self, *_):
            pass

        def met(self):
            raise NotStartedError("nobody", 1)

    monkeypatch.setattr(module, "_Meeting", Nobody)
    with pytest.raises(
        NotStartedError, match=r"^nobody. To resume, .* with --resume='/c k/step_5'"
    ):
        module.meet_again(lost, {}, "1", print)


def test_a_refusal_by_the_node_that_leads_is_final(meeting):
    one = meeting(Watch(doors(open={2}, gone={0, 1})), answers=[NotStartedError("no")])
    with pytest.raises(NotStartedError, match="no"):
        one.met()


@pytest.mark.parametrize("node", [FIRST, 2])
def test_a_node_that_waited_beside_the_job_ends_with_it(meeting, node):
    """One that was cut off, and whose place another one has."""
    watch = Watch(doors(open={node}, gone={0, 1} - {node}))
    one = meeting(watch, answers=[JobOverError("the job is over: all ranks succeeded", 0)])
    with pytest.raises(JobOverError, match="the job is over") as raised:
        one.met()
    assert raised.value.exit_code == 0
    assert one.said == []


def test_what_such_a_node_has_saved_itself_is_not_what_to_go_on_from(monkeypatch):
    def over(_):
        raise JobOverError("the job is over: rank 3 failed", 1)

    monkeypatch.setattr(module._Meeting, "met", over)
    saved_one = SurvivedStep("record", 3, "/c/step_4", 4, ("record",), "p", 6)
    with pytest.raises(JobOverError) as raised:
        module.meet_again(Continuation(JOB, NODES, saved_one, None, None), {}, "1.0", [].append)
    assert str(raised.value) == "the job is over: rank 3 failed"


def test_after_a_second_loss_the_first_place_is_looked_at_as_well(meeting):
    again = next_job(next_job(JOB)._replace(master_addr="10.0.0.1", master_port=101))
    assert again.cluster.home == ("mn0", 100)
    nodes = Watch(doors(open={HOME}, gone={0, 1, 2}))
    job = again._replace(master_addr="10.0.0.1", master_port=101)
    one = meeting(nodes, job=job, answers=[MET])
    assert one.met() is MET
    assert one.tried == [("mn0", 100, False)]


def test_of_many_nodes_only_a_few_are_knocked_at(meeting):
    one = meeting(Watch(doors(gone={0, 1, 2, 3}), doors(open={4})), own=5, answers=[MET])
    one.met()
    assert one._watch.asked == [{HOME, FIRST, 1, 2, 3}, {HOME, FIRST, 4}]


@pytest.mark.parametrize(("own", "is_silent"), [(None, False), (3, True)])
def test_nobody_goes_on_alone_where_the_job_may_be_over(meeting, own, is_silent):
    """A spare node, and one that was cut off while the others went on, and have ended since."""
    watch = Watch(doors(gone={0, 1, 2, 3, 4, 5}))
    one = meeting(watch, own=own, is_silent=is_silent)
    with pytest.raises(NotStartedError, match="the job is over, or all of its other nodes"):
        if own is None:
            one.met()
        while True:  # as it gathers
            knock(one, {0, 1, 2, 4, 5})
            one.clock.sleep(1)
    assert one.clock.now_s < 10


def test_a_spare_node_joins_as_such_and_never_leads(meeting):
    watch = Watch(doors(gone={0, 1, 2, 3, 4}), doors(gone={0, 1, 2, 3, 4}, open={5}))
    one = meeting(watch, own=None, answers=[MET])
    assert one.met() is MET
    assert one.tried == [("10.0.0.5", 105, True)]


@pytest.mark.parametrize(
    ("change", "nodes", "loss", "why"),
    [
        ({}, NODES, GONE, ""),
        ({}, NODES, SILENT, ""),
        ({"node_rank": 1}, NODES[:2], SILENT, "more than half of the nodes"),
        ({"node_rank": 1}, NODES[:2], MUTE, "more than half of the nodes"),
        ({"node_rank": 1}, NODES[:2], GONE, ""),
        ({"node_rank": 1}, NODES[:3], SILENT, ""),
        ({"replace": ReplaceSpec(node_wait_s=0.0)}, NODES, GONE, "--node-wait=0"),
        ({}, (*NODES[:3], NODES[3]._replace(door=0)), GONE, "no port"),
        ({"cluster": ClusterSpec(6, lost_at=(7, 5, 5))}, NODES, GONE, "for the 3rd time in a row"),
        ({"cluster": ClusterSpec(6, lost_at=(5, 4, 5))}, NODES, GONE, ""),
    ],
)
def test_why_nobody_takes_its_part(change, nodes, loss, why):
    told = why_over(JOB._replace(**change), nodes, loss, 5, "")
    assert why in told
    assert bool(why) == bool(told)


def test_the_next_job_has_a_name_of_its_own_unless_it_was_given_one():
    job = next_job(JOB)
    assert job.run_id == job.record_id != "record"
    assert next_job(JOB._replace(run_id="mine")).run_id == "mine"
    assert (job.cluster.node_rank, job.cluster.is_spare) == (-1, False)


# --- where it goes on -----------------------------------------------------------------------------


def record(folder, **more):
    fields = {"record_id": "mine", "job": "lost", "run_id": "", "pid": 1, "born": 1, "log_dir": ""}
    fields |= {"argv": (), "cwd": "", "started": 0.0, "checkpoints": (str(folder),)}
    return Record(**fields | more)


def test_it_goes_on_where_the_job_has_saved(tmp_path):
    saved(tmp_path, "tft_saved_checkpoints-step_9", step=9, run="lost")
    saved(tmp_path, "tft_saved_checkpoints-step_11", step=11, run="another")
    found = saved_step(record(tmp_path, lineage=("before",)), JOB, 9)
    assert (found.job, found.node_rank, found.step) == ("record", 3, 9)
    assert found.path == str(tmp_path / "tft_saved_checkpoints-step_9")
    assert found.lineage == ("lost", "before")
    assert saved_step(record(tmp_path), JOB, 10) is None  # a step that is not there
    assert saved_step(record(tmp_path / "gone"), JOB, 0) is None


def test_a_job_goes_on_only_from_a_checkpoint_that_is_whole(tmp_path):
    folder = saved(tmp_path, "tft_saved_checkpoints-step_9", step=9, run="lost")
    survived, said = SurvivedStep("lost", 1, str(folder), 9, ("lost",), ""), []
    job = going_on(JOB, survived, said.append, LOST)
    assert (job.dump.resume, job.dump.resume_step, job.dump.lineage) == (folder, 9, ("lost",))
    assert said[0] == f"resuming step 9 of run lost from {folder}: its node 0 was lost"
    assert going_on(JOB, None, said.append, LOST) == JOB
    newer = JOB._replace(dump=JOB.dump._replace(resume=folder, resume_step=9))
    assert going_on(newer, survived, said.append, LOST) == newer  # what is typed is as new
    flipped(next(folder.rglob("*.safetensors")))
    with pytest.raises(NotStartedError, match="is damaged"):
        going_on(JOB, survived, said.append, LOST)
    (folder / "manifest.json").unlink()
    with pytest.raises(NotStartedError, match="cannot be read here"):
        going_on(JOB, survived, said.append, LOST)


def test_node_0_says_what_a_job_has_lost_that_begins_anew_or_from_an_older_step(tmp_path):
    said = []
    anew = SurvivedStep("lost", 1, "", 0, (), "", reached=6)
    assert going_on(JOB, anew, said.append, LOST) == JOB
    assert said == ["nothing of run lost is saved: the job begins anew, 6 steps are lost"]
    folder = saved(tmp_path, step=5, run="lost")
    older = SurvivedStep("lost", 1, str(folder), 5, ("lost",), "", reached=6)
    assert going_on(JOB, older, said.append, LOST).dump.resume == folder
    where = f"resuming step 5 of run lost from {folder}: its node 0 was lost"
    assert said[1] == f"{where}; 1 step after step 5 is lost"
    typed = JOB._replace(dump=JOB.dump._replace(resume=folder, resume_step=5))
    assert going_on(typed, anew, [].append, LOST) == typed


def test_who_leads_a_job_of_which_nothing_is_saved_says_so(meeting):
    one = meeting(Watch(doors(gone={0, 1, 2})))
    one._lost = one._lost._replace(saved=SurvivedStep("lost", 3, "", 0, (), "", reached=6))
    assert one.met() is MET
    assert one.said[0].startswith(
        "this node takes the part of node 0, which is lost; no step is saved. To give a node"
    )


def test_what_is_lost_with_a_node_is_said(tmp_path):
    folder = saved(tmp_path, step=9, run="lost", lost=(0, 1))
    said = []
    going_on(JOB, SurvivedStep("lost", 1, str(folder), 9, ("lost",), ""), said.append, LOST)
    whose = "the random numbers, buffers and data position of ranks 0, 1"
    assert f"{whose} were not saved, and begin anew" in said
