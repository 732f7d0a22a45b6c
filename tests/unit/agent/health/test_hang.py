"""Who hangs, judged on made-up ranks by a clock that is made up, too."""

import random

import pytest

from agent.health.hang import EVERYBODY_WAITS, HangDetector, Inspection, OtherRanks
from agent.health.stall import Observation, TypicalSteps, limits, typical_steps
from worker_hooks.contract.status_page import Heartbeat, Pace, Phase

COLLECTIVE = Inspection(True, "train.py:9 train\ngraph.py:979 _engine_run_backward")
WORK = Inspection(False, "train.py:9 train\ndata.py:3 read: lock.acquire()")


def rank(
    number, at_s, phase=Phase.FORWARD, state="S", cpu_s=0.0, step=412, batch=12, has_pace=True
):
    return Observation(
        number, Heartbeat(step, 1, batch, int(at_s * 1e9), phase), has_pace, state, cpu_s
    )


class Ranks:
    """Ranks that stand where they are, looked at again and again."""

    def __init__(self, *seen, fixed_s=None, slowest_s=0.05, every_s=0.375, start_s=100.0):
        self.vigil = HangDetector(fixed_s)
        self.vigil.set_pace(TypicalSteps(slowest_s, slowest_s))
        self.seen = {each.rank: each for each in seen}
        self.every_s, self.now_s = every_s, start_s
        self.busy = set()  # ranks that use the processor
        self.have_left = False

    def until(self, end_s):
        """The suspicion that arises first, or None."""
        while self.now_s < end_s:
            self.now_s += self.every_s
            for number in self.busy:
                self.seen[number] = self.seen[number]._replace(cpu_s=self.now_s)
            found = [
                each if self.vigil.is_silent(each.rank, each.beat) else each._replace(state="")
                for each in self.seen.values()
            ]
            if cases := self.vigil.look(found, self.now_s, OtherRanks(self.have_left)):
                return sorted(case.rank for case in cases)
        return None


def test_a_stopped_rank_is_found_soon():
    job = Ranks(
        rank(0, 99.96, Phase.BACKWARD), rank(1, 99.9, state="T"), rank(2, 99.97, Phase.BACKWARD)
    )
    assert job.until(105) == [1]
    assert job.now_s < 101.9
    verdict = job.vigil.judge({0: COLLECTIVE, 2: COLLECTIVE})
    assert verdict.victims == (0, 2)
    assert verdict.culprits == {
        1: "made no progress for 1.6 s in forward of step 413 "
        "(stopped by a signal; the limit is 1.5 s, as steps take 0.05 s and the slowest recent one 0.05 s)"
    }
    assert job.until(200) is None  # it is said once


@pytest.mark.parametrize("phase", list(Phase))
def test_a_stopped_rank_is_found_in_every_phase(phase):
    job = Ranks(rank(0, 99.96, Phase.BACKWARD), rank(1, 99.9, phase, "T"))
    assert job.until(105) == [1]
    assert list(job.vigil.judge({0: COLLECTIVE}).culprits) == [1]


def test_a_rank_that_is_stopped_for_a_moment_after_a_long_time_of_work_is_not_hung():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99))
    job.busy = {1}
    assert job.until(200) is None
    job.busy = set()
    job.seen[1] = job.seen[1]._replace(state="T")
    assert job.until(201) is None
    job.seen[1] = job.seen[1]._replace(state="R")
    assert job.until(202) is None
    job.seen[1] = job.seen[1]._replace(state="T")
    assert 1 in job.until(204.5)


def test_an_idle_rank_takes_longer_and_a_busy_one_longest():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99, Phase.DATA))
    assert job.until(200) == [0, 1]
    assert 114 < job.now_s < 116
    assert (
        "it uses no processor time; the limit is 15 s"
        in job.vigil.judge({0: COLLECTIVE, 1: WORK}).culprits[1]
    )
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99))
    job.busy = {1}
    assert job.until(500) == [0, 1]
    assert 399 < job.now_s < 401
    verdict = job.vigil.judge({0: COLLECTIVE})  # it holds the interpreter
    assert list(verdict.culprits) == [1]
    assert "it is busy; the limit is 300 s" in verdict.culprits[1]
    assert verdict.culprits[1].endswith("it gives no answer")


def test_the_accusation_tells_where_the_culprit_stands():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99, Phase.DATA))
    job.until(200)
    assert (
        job.vigil.judge({0: COLLECTIVE, 1: WORK})
        .culprits[1]
        .endswith("; it stands at data.py:3 read: lock.acquire()")
    )


def test_who_waits_in_forward_is_a_victim_and_is_asked_once():
    """Its peer is at work, within its limit: SyncBatchNorm, sharded parameters."""
    job = Ranks(rank(0, 99), rank(1, 99))
    job.busy = {1}
    assert job.until(200) == [0]
    verdict = job.vigil.judge({0: COLLECTIVE, 1: WORK})
    assert (verdict.culprits, verdict.victims) == ({}, (0,))
    assert verdict.reason == "the others wait for rank 1, within its limit"
    assert job.until(398) is None
    assert job.until(500) == [0, 1]


def test_peers_with_progress_wait_for_nobody():
    job = Ranks(rank(0, 99), rank(1, 99.9, state="T"))
    for _ in range(30):
        job.seen[0] = rank(0, job.now_s)
        assert job.until(job.now_s + 0.3) is None


def test_what_is_not_armed_is_left_alone_for_ever():
    for phase in (Phase.IDLE, Phase.UPDATED):
        job = Ranks(rank(0, 99, phase), rank(1, 99, Phase.BACKWARD))
        assert job.until(1000) is None


def test_the_first_batch_of_a_loop_may_take_its_time():
    job = Ranks(rank(0, 99, Phase.DATA, batch=0), rank(1, 99, Phase.DATA, batch=0))
    assert job.until(398) is None
    assert job.until(500) == [0, 1]


def test_who_polls_for_a_peer_in_its_validation_is_excused_for_long():
    job = Ranks(rank(0, 99, Phase.UPDATED), rank(1, 99, Phase.DATA))
    job.busy = {0}
    assert job.until(200) == [1]
    assert job.vigil.judge({0: WORK, 1: WORK}).culprits == {}
    assert job.until(390) is None
    job = Ranks(rank(0, 99, Phase.UPDATED), rank(1, 99, Phase.DATA))  # it sums up the loss
    assert job.until(200) == [1]
    assert list(job.vigil.judge({0: COLLECTIVE, 1: WORK}).culprits) == [1]


def test_minutes_of_validation_in_rank_0_disturb_nobody():
    job = Ranks(rank(0, 99, Phase.UPDATED), *[rank(n, 99, Phase.BACKWARD) for n in (1, 2, 3)])
    job.busy = {0}
    assert job.until(2000) is None


def test_collectives_that_do_not_match_are_a_stalemate():
    job = Ranks(
        rank(0, 99, Phase.BACKWARD),
        rank(1, 99, Phase.BACKWARD),
        rank(2, 99, Phase.BACKWARD, step=411),
    )
    assert job.until(300) == [0, 1, 2]
    assert 129 < job.now_s < 131.5  # twice as long
    verdict = job.vigil.judge(dict.fromkeys((0, 1, 2), COLLECTIVE))
    assert list(verdict.culprits) == [2]
    assert EVERYBODY_WAITS in verdict.culprits[2]
    assert "rank 1 at graph.py:979 _engine_run_backward" in verdict.culprits[2]
    assert verdict.victims == (0, 1)
    assert job.until(2000) is None


def test_a_new_rank_that_waits_for_what_its_peers_did_before_it_came_is_a_stalemate():
    """It has no pace, so it is never suspected; all wait in collectives, and nobody computes."""
    job = Ranks(*[rank(n, 99, Phase.FORWARD) for n in (0, 1)], rank(2, 99, has_pace=False))
    answers = dict.fromkeys((0, 1, 2), COLLECTIVE)
    assert job.until(300) == [0, 1]
    assert not job.vigil.judge(answers).culprits  # they wait for it, which may compile
    assert job.until(300) == [0, 1, 2]
    assert 159 < job.now_s < 162
    (culprit,) = job.vigil.judge(answers).culprits.items()
    assert culprit[0] == 2
    assert culprit[1].startswith("used no processor time for 60")
    assert f"its first one; {EVERYBODY_WAITS}: rank 0 at graph.py" in culprit[1]
    assert job.until(2000) is None


def test_ranks_that_have_all_begun_anew_may_be_a_stalemate_too():
    job = Ranks(*[rank(n, 99, Phase.FORWARD, has_pace=False) for n in (0, 1, 2)])
    assert job.until(600) == [0, 1, 2]
    assert 399 < job.now_s < 402  # nobody knows how long a step takes
    assert list(job.vigil.judge(dict.fromkeys((0, 1, 2), COLLECTIVE)).culprits) == [0]
    assert job.until(2000) is None


@pytest.mark.parametrize("how", ["computes", "reads"])
def test_a_new_rank_that_does_something_is_waited_for(how):
    job = Ranks(*[rank(n, 99, Phase.FORWARD) for n in (0, 1)], rank(2, 99, has_pace=False))
    if how == "computes":
        job.busy = {2}
    answers = {0: COLLECTIVE, 1: COLLECTIVE, 2: WORK}
    count = 0
    while job.until(2000):
        assert not job.vigil.judge(answers).culprits
        count += 1
    assert count <= 8  # and not at each look


def test_a_hook_that_sleeps_within_backward_is_found_by_its_stack():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99, Phase.BACKWARD))
    assert job.until(300) == [0, 1]
    assert list(job.vigil.judge({0: COLLECTIVE, 1: WORK}).culprits) == [1]


def test_ranks_whose_peer_has_left_wait_until_their_collective_fails():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99, Phase.BACKWARD))
    job.have_left = True
    assert job.until(1000) is None
    job.have_left = False
    assert job.until(1010) == [0, 1]
    assert list(job.vigil.judge({0: COLLECTIVE, 1: COLLECTIVE}).culprits) == [0]


@pytest.mark.parametrize("phase", [Phase.DATA, Phase.FORWARD, Phase.BACKWARD])
def test_a_rank_without_peers_is_never_judged(phase):
    """breakpoint() in a job of one, say; or all others are done."""
    for job in (Ranks(rank(0, 99, phase)), Ranks(rank(0, 99, phase), fixed_s=4.0)):
        assert job.until(2000) is None
        job.busy = {0}
        assert job.until(4000) is None


# --- nobody hangs, but nobody can go on -----------------------------------------------------------


def outage(*phases, states="", **how):
    """Ranks in these phases that use no processor."""
    letters = states or "S" * len(phases)
    pairs = zip(phases, letters, strict=True)
    return Ranks(*[rank(n, 99 + n / 9, phase, s) for n, (phase, s) in enumerate(pairs)], **how)


DATA, FORWARD, BACKWARD = Phase.DATA, Phase.FORWARD, Phase.BACKWARD


@pytest.mark.parametrize(
    ("phases", "states", "answers"),
    [
        ((DATA, DATA, DATA), "SSS", {0: WORK, 1: WORK, 2: WORK}),
        ((DATA, FORWARD), "SS", {0: WORK, 1: WORK}),
        ((DATA, DATA), "SS", {}),  # the script's sources are on that file system, too
        ((DATA, DATA, BACKWARD), "SSS", {0: WORK, 1: WORK, 2: COLLECTIVE}),
        ((DATA, DATA, BACKWARD), "SSS", {2: COLLECTIVE}),
        ((DATA, BACKWARD), "DS", {0: WORK, 1: COLLECTIVE}),
        ((DATA, Phase.UPDATED), "SS", {0: WORK, 1: WORK}),  # it saves to the same file system
    ],
    ids=["all", "at two places", "no answer", "all but one", "the same, no answer", "in the kernel", "one saves"],
)  # fmt: skip
@pytest.mark.parametrize("fixed_s", [None, 20.0])
def test_an_outage_is_no_hang_and_is_told_once(phases, states, answers, fixed_s):
    job = outage(*phases, states=states, fixed_s=fixed_s)
    assert job.until(200)
    if phases[1] is Phase.UPDATED:
        job.vigil.judge(answers)  # it may work there, for a long time
        assert job.until(500)
    assert job.now_s < 121 or phases[1] is Phase.UPDATED
    verdict = job.vigil.judge(answers)
    assert verdict.culprits == {}
    assert "msrun takes it for an outage" in verdict.standstill
    assert "a file system" in verdict.standstill
    if 0 in answers:
        assert "at data.py:3 read: lock.acquire()" in verdict.standstill
    assert job.vigil.stands_still
    asked = 0
    while job.until(3700) is not None:
        asked += 1
        assert job.vigil.judge(answers).culprits == {}
        assert job.vigil.stands_still
    assert asked <= 3600 / (fixed_s or 300) + 4  # it is asked less and less often


def spare(job, answers, end_s):
    """Nobody is blamed until then, however often all are asked."""
    while job.until(end_s) is not None:
        assert job.vigil.judge(answers).culprits == {}


def test_after_an_outage_its_time_counts_for_nobody():
    job = outage(DATA, DATA, DATA)
    assert job.until(200) == [0, 1, 2]
    assert job.vigil.judge(dict.fromkeys((0, 1, 2), WORK)).culprits == {}
    spare(job, dict.fromkeys((0, 1, 2), WORK), 390)
    for early in (0, 1):  # who comes first waits for the others
        job.seen[early] = rank(early, job.now_s, BACKWARD)
    job.busy = {2}
    assert job.until(680) is None
    assert job.vigil.stands_still  # rank 2 still reads
    job.seen[2] = rank(2, job.now_s, BACKWARD)
    assert job.until(681) is None
    assert not job.vigil.stands_still


def test_who_hangs_after_an_outage_is_found():
    job = outage(DATA, DATA)
    assert job.until(200) == [0, 1]
    assert job.vigil.judge({0: WORK, 1: WORK}).culprits == {}
    spare(job, {0: WORK, 1: WORK}, 250)
    job.seen[0] = rank(0, job.now_s, BACKWARD)
    assert job.until(270)
    verdict = job.vigil.judge({0: COLLECTIVE, 1: WORK})
    assert list(verdict.culprits) == [1]
    assert verdict.standstill == ""


def test_a_rank_is_no_culprit_before_a_peer_waits_for_it():
    job = outage(DATA, FORWARD, FORWARD)
    job.busy = {1, 2}
    assert job.until(200) == [0]
    verdict = job.vigil.judge({0: WORK, 1: WORK, 2: WORK})
    assert (verdict.culprits, verdict.standstill) == ({}, "")  # the others work
    spare(job, {0: WORK, 1: WORK, 2: WORK}, 160)
    for peer in (1, 2):
        job.seen[peer] = rank(peer, job.now_s, BACKWARD)
    job.busy = set()
    assert job.until(180) == [0]
    assert list(job.vigil.judge({0: WORK, 1: COLLECTIVE, 2: COLLECTIVE}).culprits) == [0]


def test_a_stopped_rank_is_found_in_the_midst_of_an_outage():
    job = outage(DATA, DATA, DATA)
    assert job.until(200) == [0, 1, 2]
    assert job.vigil.judge(dict.fromkeys((0, 1, 2), WORK)).culprits == {}
    job.seen[1] = job.seen[1]._replace(state="T")
    assert 1 in job.until(118)
    assert list(job.vigil.judge({0: WORK, 2: WORK}).culprits) == [1]


def test_an_answer_that_came_too_late_costs_no_rank_and_little_time():
    job = outage(DATA, BACKWARD, BACKWARD)
    assert job.until(200) == [0, 1, 2]
    assert job.vigil.judge({0: WORK, 1: COLLECTIVE}).culprits == {}
    assert job.until(140)
    assert list(job.vigil.judge({0: WORK, 1: COLLECTIVE, 2: COLLECTIVE}).culprits) == [0]


def test_a_rank_that_was_in_the_kernel_only_now_and_then_is_busy():
    """It reads much, or its memory is swapped: it is looked at between two reads."""
    job = outage(DATA, BACKWARD)
    for second in range(100, 400, 3):
        job.seen[0] = job.seen[0]._replace(state="SD"[second % 2])
        if job.until(second + 3):
            job.vigil.note([each._replace(state="S") for each in job.seen.values()], job.now_s)
            assert job.vigil.judge({0: WORK, 1: COLLECTIVE}).culprits == {}
    job.seen[0] = job.seen[0]._replace(state="S")
    job.seen[1] = rank(1, 400, BACKWARD)
    assert job.until(430)
    assert list(job.vigil.judge({0: WORK, 1: COLLECTIVE}).culprits) == [0]


def test_who_cannot_be_killed_is_not_blamed_however_long_it_takes():
    job = outage(DATA, BACKWARD, states="DS")
    looks = 0
    while job.until(5000):
        looks += 1
        verdict = job.vigil.judge({1: COLLECTIVE})
        assert verdict.culprits == {}
        assert "cannot be killed" in verdict.standstill
    assert looks >= 2


HELD = Inspection(False, "train.py:9 train\npdb.py:4 interaction", "is in a debugger")


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD, DATA])
def test_who_waits_for_a_person_is_not_hung_nor_are_those_who_wait_for_it(phase):
    job = outage(phase, BACKWARD, BACKWARD)
    answers = {0: HELD, 1: COLLECTIVE, 2: COLLECTIVE}
    assert job.until(200)
    verdict = job.vigil.judge(answers)
    assert verdict.culprits == {}
    assert verdict.standstill.startswith("rank 0 is in a debugger: ")
    while job.until(3000):
        assert job.vigil.judge(answers).culprits == {}
    job.seen = {n: rank(n, job.now_s, FORWARD) for n in range(3)}  # the person continues
    assert job.until(job.now_s + 5) is None
    assert not job.vigil.stands_still


def test_a_stopped_rank_is_not_judged_while_a_person_debugs_another():
    job = outage(FORWARD, FORWARD, BACKWARD, states="STS")
    assert 1 in job.until(200)
    assert job.vigil.judge({0: HELD, 2: COLLECTIVE}).culprits == {}


def test_progress_while_the_ranks_are_asked_acquits():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99))
    assert job.until(200) == [0, 1]
    job.vigil.note([rank(0, 99, Phase.BACKWARD), rank(1, job.now_s)], job.now_s + 0.5)
    verdict = job.vigil.judge({0: COLLECTIVE, 1: WORK})
    assert (verdict.culprits, verdict.reason) == ({}, "there is progress again")


def test_a_rank_under_a_debugger_and_its_peers_are_never_hung():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99, state="t"))
    assert job.until(2000) is None
    job.seen[1] = job.seen[1]._replace(state="S")
    assert job.until(2013) is None
    assert job.until(2020) == [0, 1]


def test_a_job_that_is_stopped_as_a_whole_is_paused():
    job = Ranks(rank(0, 99, state="T"), rank(1, 99, Phase.BACKWARD, "T"))
    assert job.until(1000) is None
    assert job.vigil.is_paused
    job.seen[1] = job.seen[1]._replace(state="S")  # one after the other is continued
    assert job.until(1001) is None
    job.seen[0] = job.seen[0]._replace(state="S")
    assert job.until(1012) is None
    assert not job.vigil.is_paused
    assert job.until(1020) == [0, 1]


def test_ranks_that_are_stopped_while_others_are_on_their_way_out_are_found():
    for ranks in ([rank(1, 99, state="T")], [rank(0, 99, state="T"), rank(1, 99, state="T")]):
        vigil = HangDetector(10.0)
        others = OtherRanks(are_there=True, run=True)
        looks = (vigil.look(ranks, 100 + n, others) for n in range(20))
        found = next(filter(None, looks))
        assert not vigil.is_paused
        assert [case.rank for case in found] == [each.rank for each in ranks]
        assert sorted(vigil.judge({}).culprits) == [each.rank for each in ranks]


def test_after_a_pause_of_the_agent_the_clocks_begin_anew():
    job = Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99))
    assert job.until(110) is None
    job.now_s = 4000.0
    job.vigil.start_anew(job.now_s)
    assert job.until(4014) is None
    assert job.until(4020) == [0, 1]


def test_a_limit_that_was_asked_for_holds_for_all():
    for state, busy in (("T", False), ("S", False), ("R", True)):
        job = Ranks(rank(0, 99.9, Phase.BACKWARD), rank(1, 99.9, state=state), fixed_s=4.0)
        job.busy = {1} if busy else set()
        assert 1 in job.until(200)
        assert 103.9 <= job.now_s <= 105
        assert "the limit is 4 s, --hang-timeout=4" in job.vigil.judge({0: COLLECTIVE}).culprits[1]


def test_a_process_that_ends_is_not_hung():
    assert Ranks(rank(0, 99, Phase.BACKWARD), rank(1, 99, state="Z")).until(300) is None


def test_limits_follow_the_slowest_step_without_what_lay_aside():
    second = 1_000_000_000
    paces = [Pace(1, second, 0, 0), Pace(2, 90 * second, 0, 89 * second), Pace(3, 2 * second, 0, 0)]
    assert typical_steps([paces, [], paces[:2]]) == pytest.approx((1.0, 2.0))
    assert typical_steps([[], []]) == (0, 0)
    assert limits(TypicalSteps(1.0, 2.0), None)[:3] == (5, 60, 300)
    assert limits(TypicalSteps(0.05, 20.0), None)[:3] == (1.5, 600, 600)


# --- ten minutes of training, in virtual time ----------------------------------------------------


def steps(seed, ranks, step_s, minutes=10):
    """(second, step, phase, who) of ranks that wait for each other, sometimes 20 times as slow."""
    draw = random.Random(seed)
    now, step, news = 0.0, 0, []
    while now < 60 * minutes:
        step += 1
        arrivals = []
        for number in range(ranks):
            data, forward = 0.2 * step_s, 0.6 * step_s
            if draw.random() < 0.02:
                slow = 19 * step_s * draw.random() ** 0.2
                data, forward = (
                    (data + slow, forward) if draw.random() < 0.5 else (data, forward + slow)
                )
            jitter = draw.uniform(0.9, 1.1)
            news.append((now, step, Phase.DATA, number))
            news.append((now + data * jitter, step, Phase.FORWARD, number))
            news.append((now + (data + forward) * jitter, step, Phase.BACKWARD, number))
            arrivals.append(now + (data + forward) * jitter)
        done = max(arrivals) + 0.2 * step_s
        aside = 120.0 if step % max(1, int(250 / step_s)) == 0 else 0.0  # rank 0 validates
        news += [(done, step, Phase.UPDATED, 0)] if aside else []
        now = done + 0.01 * step_s
        news += [(now, step, Phase.DATA, number) for number in range(1, ranks)] if aside else []
        now += aside
    return sorted(news, key=lambda each: each[0])


@pytest.mark.parametrize("seed", range(12))
def test_ten_minutes_with_steps_that_are_20_times_as_slow_raise_no_alarm(seed):
    """Sleeps: no processor time is used. With every alarm all ranks answer that they work."""
    step_s = (0.05, 0.3, 1.0, 5.0)[seed % 4]
    vigil, beats, now = HangDetector(None), {}, 0.0
    vigil.set_pace(
        TypicalSteps(step_s, step_s)
    )  # the worst case: the ring has forgotten the slow ones
    every_s = min(5.0, vigil.limits.stopped_s / 4)
    for at_s, step, phase, number in steps(seed, 4, step_s, minutes=2 if seed % 4 == 0 else 10):
        while now + every_s <= at_s:
            now += every_s
            found = [
                Observation(each, beat, step > 2, "S" if vigil.is_silent(each, beat) else "", 0.0)
                for each, beat in beats.items()
            ]
            cases = vigil.look(found, now)
            if cases:
                answers = {
                    each: COLLECTIVE if beat.phase is Phase.BACKWARD else WORK
                    for each, beat in beats.items()
                }
                assert vigil.judge(answers).culprits == {}, (now, cases)
        beats[number] = Heartbeat(step, 0, step, int(at_s * 1e9), phase)
