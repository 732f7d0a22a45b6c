"""What drills are asked for, in words and in YAML; random ones."""

from __future__ import annotations

import signal

import pytest

from agent.spec.job_spec import UsageError
from msrun.drill.fault_options import FaultOrder, check, read_file, read_words
from msrun.drill.random_faults import RandomFaults, draw, read_kinds
from msrun.trials.exit_verdict import REQUESTS
from worker_hooks.drill.plan import LAUNCHER, Deed, Fault, Moment


def request(step, moment=Moment.ANY, **changes):
    fields = {"deed": Deed.REQUEST, "number": signal.SIGTERM} | changes
    return Fault(LAUNCHER, step, moment, **fields)


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("rank=3,step=50", Fault(3, 50)),
        ("rank=3,step=50,phase=backward,signal=SEGV", Fault(3, 50, Moment.BACKWARD, number=11)),
        ("rank=0,step=1,signal=SIGABRT", Fault(0, 1, number=signal.SIGABRT)),
        ("rank=0,step=1,signal=9,delay=0.25", Fault(0, 1, delay=0.25)),
        ("rank=0,step=1,signal=oom", Fault(0, 1)),
        ("rank=2,step=7,phase=update,exit=3", Fault(2, 7, Moment.UPDATE, Deed.EXIT, 3)),
        ("rank=2,step=7,raise", Fault(2, 7, deed=Deed.RAISE, number=0)),
        ("rank=launcher,step=50,phase=commit", Fault(LAUNCHER, 50, Moment.COMMIT)),
        ("rank=1,phase=dump,attempt=1", Fault(1, 1, Moment.DUMP, attempt=1)),
    ],
)
def test_a_kill_in_words(words, fault):
    assert read_words(words, "kill") == FaultOrder((fault,))


@pytest.mark.parametrize(
    ("words", "deed", "fault", "said"),
    [
        ("step=40", "graceful", request(40), "graceful exit at step 40 + 0.50"),
        (
            "step=40,phase=backward,signal=USR1",
            "graceful",
            request(40, Moment.BACKWARD, number=signal.SIGUSR1),
            "graceful exit by SIGUSR1 at step 40, backward",
        ),
        (
            "step=40,grace=5,delay=0.1",
            "preempt",
            request(40, deed=Deed.PREEMPT, grace_s=5.0, delay=0.1),
            "preemption with 5 s at step 40 + 0.10",
        ),
        (
            "step=1",
            "preempt",
            request(1, deed=Deed.PREEMPT),
            "preemption with 30 s at step 1 + 0.50",
        ),
        ("phase=dump", "graceful", request(1, Moment.DUMP), "graceful exit in rank 0's dump"),
    ],
)
def test_a_job_that_is_asked_to_leave_in_words(words, deed, fault, said):
    assert read_words(words, deed) == FaultOrder((fault,))
    assert fault.words == said


def test_a_stop_and_two_faults_in_one_drill():
    stop = Fault(1, 4, deed=Deed.STOP, number=signal.SIGSTOP, for_s=0.5)
    assert read_words("rank=1,step=4,for=0.5", "stop") == FaultOrder((stop,))
    both = read_words("rank=3,step=50+rank=1,phase=dump", "kill")
    assert both.words == "kill -9 rank 3 at step 50 + 0.50 + kill -9 rank 1 in its dump"


@pytest.mark.parametrize(
    ("words", "deed", "sentence"),
    [
        ("rank=3", "kill", "step is missing"),
        ("step=3", "kill", "rank is missing"),
        ("rank=3,step=0", "kill", "step=0 must be a whole number, at least 1"),
        ("rank=x,step=1", "kill", "rank=x must be a whole number"),
        ("rank=1,rank=2,step=1", "kill", "says rank twice"),
        ("rank=1,steps=3", "kill", "'steps' is unknown"),
        ("rank=1 step=3,step=3", "kill", "rank=1 step=3 must be"),
        ("rank", "kill", "not of the form NAME=VALUE"),
        ("rank=1,step=3,phase=sideways", "kill", "choose from data, forward"),
        ("rank=1,step=3,signal=NOPE", "kill", "signal=NOPE is not a signal"),
        ("rank=1,step=3,signal=0", "kill", "signal=0 is not a signal"),
        ("rank=1,step=3,exit=-1", "kill", "at least 0"),
        ("rank=1,step=3,exit=256", "kill", "above 255"),
        ("rank=1,step=3,exit=2,raise", "kill", "exclude each other"),
        ("rank=1,phase=dump,raise", "kill", "needs the main thread"),
        ("rank=launcher,step=3,raise", "kill", "msrun itself can only get"),
        ("rank=1,step=3,delay=2", "kill", "from 0 to 1"),
        ("rank=1,step=3,for=2", "kill", "'for' is unknown"),
        ("rank=1,step=3,for=nan", "stop", "above 0"),
        ("rank=1,step=3,signal=TERM", "stop", "'signal' is unknown"),
        ("", "kill", "not of the form"),
        ("rank=1,step=3", "graceful", "'rank' is unknown, choose from step, phase"),
        ("delay=0.5", "graceful", "step is missing"),
        ("step=3,signal=KILL", "graceful", "no process can catch"),
        ("step=3,grace=0", "preempt", "grace=0 must be a number above 0"),
        ("step=3,signal=INT", "preempt", "'signal' is unknown"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(words, deed, sentence):
    with pytest.raises(UsageError) as raised:
        read_words(words, deed)
    assert sentence in str(raised.value)


def test_drills_in_yaml(tmp_path):
    path = tmp_path / "drills.yaml"
    path.write_text(
        "- kill: {rank: 3, step: 50, phase: backward}\n"
        "- kill: [{rank: 3, step: 50}, {rank: 1, phase: dump}]\n"
        "- stop: {rank: 0, step: 2, for: 1}\n"
        "- {random: 20, seed: 7}\n"
        "- {graceful: {step: 40}, kill: {rank: 1, step: 40}}\n"
        "- preempt: {step: 9, grace: 0.5}\n"
        '- {random: 2, of: "kill,preempt"}\n'
    )
    first, second, third, lots, both, preemption, some = read_file(str(path))
    assert first == read_words("rank=3,step=50,phase=backward", "kill")
    assert second == read_words("rank=3,step=50+rank=1,phase=dump", "kill")
    assert third == read_words("rank=0,step=2,for=1", "stop")
    assert lots == RandomFaults(20, 7)
    assert both == FaultOrder((request(40), Fault(1, 40)))
    assert preemption == read_words("step=9,grace=0.5", "preempt")
    assert some == RandomFaults(2, 0, ("kill", "preempt"))


ODD = ["- graceful: {}", "- {random: 1, of: fun}", "- {random: 1, kill: {rank: 1, step: 1}}"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kill: {rank: 1}",
        "- x",
        "- kill: {}",
        "- kill: 3",
        "- {random: 0}",
        "- [",
        "- kill: []",
        *ODD,
    ],
)
def test_yaml_that_asks_for_nothing_is_refused_by_its_name(tmp_path, text):
    path = tmp_path / "drills.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"drills\.yaml"):
        read_file(str(path))


def test_random_drills_are_the_same_for_a_seed_and_stay_within_training():
    drills = draw(RandomFaults(200, 3), 4, 24)
    drawn = tuple(fault for faults in drills for fault in faults)
    assert drills == draw(RandomFaults(200, 3), 4, 24) != draw(RandomFaults(200, 4), 4, 24)
    assert {fault.rank for fault in drawn} == {0, 1, 2, 3}
    assert {fault.step for fault in drawn} == set(range(1, 24))
    assert len({fault.delay for fault in drawn}) > 100


def test_a_seed_draws_what_it_always_drew():
    assert draw(RandomFaults(3, 1), 4, 24) == (
        (Fault(1, 19, delay=0.847),),
        (Fault(0, 9, delay=0.118),),
        (Fault(3, 16, delay=0.652),),
    )


def test_random_drills_are_of_the_kinds_that_were_asked_for():
    kinds = read_kinds("kill, stop,graceful,preempt")
    drawn = [fault for (fault,) in draw(RandomFaults(200, 3, kinds), 4, 24)]
    assert {fault.deed for fault in drawn} == {Deed.SIGNAL, Deed.STOP, Deed.REQUEST, Deed.PREEMPT}
    assert all((fault.rank == LAUNCHER) == (fault.deed in REQUESTS) for fault in drawn)
    with pytest.raises(
        UsageError, match="'fun' is an unknown kind of random drill, choose from kill, double"
    ):
        read_kinds("kill,fun")


def test_random_drills_of_several_faults_strike_a_second_time():
    doubles = draw(RandomFaults(100, 3, ("double",)), 4, 24)
    assert all(one.rank != two.rank and one.step == two.step for one, two in doubles)
    again = draw(RandomFaults(100, 3, ("again",)), 4, 24)
    assert all(two.attempt == 1 and one.attempt is None for one, two in again)
    assert any(one.rank == two.rank for one, two in again)
    assert all(len(faults) == 1 for faults in draw(RandomFaults(9, 3, ("double",)), 1, 24))
    hangs = draw(RandomFaults(9, 3, ("hang", "raise")), 4, 24)
    assert {(one.deed, one.number) for (one,) in hangs} == {
        (Deed.SIGNAL, signal.SIGSTOP),
        (Deed.RAISE, 0),
    }


def test_all_ranks_die_at_one_moment_once_all_have_committed():
    drills = draw(RandomFaults(50, 3, ("all",)), 4, 24)
    for faults in drills:
        assert [fault.rank for fault in faults] == [0, 1, 2, 3]
        assert len({fault._replace(rank=0) for fault in faults}) == 1
    assert min(faults[0].step for faults in drills) == 3


def test_a_rank_that_the_job_lacks_is_refused():
    check([read_words("rank=3,step=1", "kill"), RandomFaults(1, 0)], 4)
    with pytest.raises(UsageError, match="the ranks are 0 to 2"):
        check([read_words("rank=3,step=1", "kill")], 3)
