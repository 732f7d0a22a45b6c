"""What failures cost, by replayed histories: a second passes before each event."""

from signal import SIGTERM, SIGUSR1

import pytest
from support.histories import dumps, exits, fallbacks, plain, replacements, restarts, same
from support.histories.dumps import SAVED, froze, reg, running, threw
from support.histories.plain import ask, gone, launch, rules, tell, up
from support.histories.replacements import ALMOST, DIED, JOINING, RAISED, REPLACED, THREE
from support.simulator.node import simulate

from agent.accounting.account import RECENT, Account
from agent.accounting.incident import Answer, FailureKind
from agent.accounting.ledger import after, trains
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import JobState

EPOCH = 1_000_000.0
HISTORIES = [
    pytest.param(asked, steps, id=f"{module.__name__.rpartition('.')[2]}: {name}")
    for module in (dumps, exits, fallbacks, plain, replacements, restarts, same)
    for name, asked, steps in module.HISTORIES
]


class Bookkeeper:
    """Keeps the account of a job to which one event happens each second."""

    def __init__(self, asked=None):
        self.job = asked and Job(asked)
        self.account = Account()
        self.now_s = 0.0
        self.states = []  # after each event

    def hear(self, *steps):
        for event in (step[0] if type(step) is tuple else step for step in steps):  # a row
            self.take(self.job, event, decide(self.job, event))
        return self

    def take(self, before, event, decision):
        self.now_s += 1
        was, self.job = self.account, decision.job
        self.account = after(was, before, event, decision, self.now_s, EPOCH + self.now_s)
        self.states.append(self.job)
        self.check(was)

    def check(self, was):
        one = self.account
        assert 0 <= one.trained_s <= one.wall_s
        assert (one.since_s is not None) == trains(self.job)
        assert one.over >= was.over and len(one.recent) == min(one.over, RECENT)
        assert one.goodput is None or 0 <= one.goodput <= 1
        if one.is_known:
            stood = [each.lost_s for each in one.recent if each.lost_s is not None]
            assert all(lost_s >= 0 for lost_s in stood)
        if self.job.state.is_end:
            assert one.present is None and one.since_s is None
        answers = [each.answer for each in one.shown if each is not one.present]
        assert Answer.NONE not in answers


def heard(asked, *steps):
    return Bookkeeper(asked).hear(*steps).account


def the(account):
    assert account.incidents == 1
    (incident,) = account.shown
    return incident


# --- one of each --------------------------------------------------------------------------------


def test_an_undisturbed_job_trains_from_the_last_registration_to_the_first_end():
    one = heard(THREE, launch(), up(0), up(1), up(2), reg(0), reg(1))
    assert one.goodput is None and one.wall_s == 4  # not known yet
    one = heard(THREE, *running(3), *(gone(rank, 0) for rank in range(3)))
    assert one.incidents == 0 and one.shown == ()
    assert (one.training_s, one.wall_s) == (3, 8)  # from the third registration to the last exit
    assert one.goodput == 3 / 8


def test_evaluation_of_one_rank_is_training_until_all_scripts_are_at_their_end():
    leaving = [ev.RankExiting(rank, 0) for rank in range(3)]
    one = heard(THREE, *running(3), *leaving[:2])
    assert one.since_s is not None
    assert heard(THREE, *running(3), *leaving, tell(SIGUSR1)).training_s == 3
    gone_already = heard(THREE, *running(3), *leaving[:2], gone(2, 0), tell(SIGUSR1))
    assert gone_already.training_s == 3 and gone_already.since_s is None


def test_a_replaced_rank_costs_the_time_until_all_have_joined_and_no_step():
    one = heard(THREE, *REPLACED)
    found = the(one)
    assert (found.kind, found.ranks, found.answer) == (FailureKind.KILLED, {1}, Answer.REPLACED)
    assert found.cause == "rank 1 was killed by SIGKILL"
    stood_s = len(REPLACED) - len(DIED)
    assert (found.lost_s, found.lost_steps, found.step) == (stood_s, 0, 6)
    assert found.at == EPOCH + len(DIED)
    assert (one.lost_s, one.lost_steps) == (stood_s, 0)
    assert one.training_s == len(DIED) - len(running(3)) and one.since_s == one.now_s


def test_while_it_is_replaced_nothing_is_trained_and_the_incident_is_open():
    one = heard(THREE, *ALMOST)
    assert one.present is not None and one.since_s is None
    assert (the(one).answer, the(one).lost_s) == (Answer.REPLACED, None)
    assert heard(THREE, *DIED).present.answer is Answer.NONE


def test_a_hang_counts_from_the_last_progress():
    silent = ev.RankHung(1, 0, "made no progress for 7.5 s (stopped)", 7.5)
    wait = [ev.SignalReceived(10)] * 20
    one = heard(THREE, *running(3), *wait, silent)
    assert one.present.began_s == one.now_s - 7.5 and one.present.at == EPOCH + one.now_s - 7.5
    assert one.training_s == 21 - 7.5
    assert one.present.kind is FailureKind.HUNG and one.present.ranks == {1}
    # never from before training began
    assert heard(THREE, *running(3), silent).training_s == 0


def test_more_deaths_before_all_are_back_are_one_incident_of_all_ranks():
    one = heard(THREE, *JOINING, gone(0, -11, 1))
    found = the(one)
    assert found.ranks == {0, 1}
    assert found.cause == "rank 1 was killed by SIGKILL; rank 0 was killed by SIGSEGV"


def test_an_exception_that_a_death_explains_is_no_incident_of_its_own():
    one = heard(THREE, *running(3), threw(2), gone(1, -9))
    assert (the(one).kind, the(one).ranks) == (FailureKind.KILLED, {1})
    assert heard(THREE, *running(3), threw(2)).present.kind is FailureKind.RAISED
    found = the(heard(THREE, *RAISED, gone(1, 1)))  # it was held, and let go
    assert (found.kind, found.ranks) == (FailureKind.RAISED, {1})
    # another one dies meanwhile
    assert the(heard(THREE, *RAISED, gone(2, -9), gone(1, 1))).ranks == {1, 2}
    # the victims of a death raise, too
    assert the(heard(THREE, *DIED, threw(0), threw(2))).ranks == {1}


def test_an_exit_with_0_amid_a_step_is_the_failure_not_its_victim():
    lost = "RuntimeError: Connection closed by peer"
    left = ev.WorkerExited(1, 0, 0, 4, "", "in forward of step 5")
    found = the(heard(THREE, *running(3), left, threw(2, lost)))
    assert (found.kind, found.ranks) == (FailureKind.EXITED, {1})


AGAIN = [up(0, 1), up(1, 1), reg(0, 3, 1), reg(1, 3, 1)]
FAILED = [gone(1, -9), froze(0, why="torn"), gone(0, -15)]  # step 5 was committed


def test_a_restart_counts_the_steps_that_are_trained_again():
    asked = rules(max_restarts=3)
    one = heard(asked, *running(2), *FAILED)
    assert the(one).answer is Answer.RESTARTED and one.present is not None
    one = heard(asked, *running(2), *FAILED, *AGAIN)
    assert one.present is None and the(one).kind is FailureKind.KILLED
    assert (the(one).lost_s, the(one).lost_steps, the(one).step) == (6, 2, 6)
    assert the(one).cause.startswith("rank 1 was killed by SIGKILL")


def test_a_restart_that_comes_to_nothing_is_an_incident_and_its_steps_are_counted_once():
    asked = rules(max_restarts=3)
    nothing = [up(0, 1), up(1, 1), gone(1, 3, 1), gone(0, -15, 1)]
    again = [up(0, 2), up(1, 2), reg(0, 3, 2), reg(1, 3, 2)]
    one = heard(asked, *running(2), *FAILED, *nothing, *again)
    first, second = one.shown
    assert (first.answer, first.lost_s, first.lost_steps) == (Answer.RESTARTED, 5, 0)
    assert (second.lost_s, second.lost_steps) == (5, 2)
    assert second.cause == "rank 1 exited with code 3" and second.kind is FailureKind.EXITED
    assert (one.lost_s, one.lost_steps) == (10, 2)


def test_a_lone_rank_that_is_started_again_at_once_says_why():
    asked = rules(ranks=(0,), max_restarts=1)
    died = ev.WorkerExited(0, 0, -9, 7)
    one = heard(asked, launch(), up(0), reg(0), died, up(0, 1), reg(0, 4, 1))
    found = the(one)
    assert (found.cause, found.answer) == ("rank 0 was killed by SIGKILL", Answer.RESTARTED)
    assert (found.lost_s, found.lost_steps, found.step) == (2, 3, 8)
    silent = heard(asked, launch(), up(0), reg(0, 7), gone(0, -9), up(0, 1), reg(0, 7, 1))
    assert (the(silent).step, the(silent).lost_steps) == (8, 0)


def test_without_a_train_state_it_is_not_known_what_was_lost():
    asked = rules(max_restarts=1)
    one = heard(asked, *plain.FAILING, gone(0, -15), up(0, 1), up(1, 1))
    assert one.goodput is None and the(one).answer is Answer.RESTARTED
    assert the(one).ranks == {1}  # the other one was stopped
    done = heard(
        asked, *plain.FAILING, gone(0, -15), up(0, 1), up(1, 1), gone(0, 0, 1), gone(1, 0, 1)
    )
    assert (the(done).lost_s, the(done).lost_steps, done.lost_s) == (None, None, None)


def test_a_job_that_ends_says_whether_its_last_step_is_saved():
    saved = the(heard(dumps.THREE, *SAVED, gone(0, -15), gone(2, -15)))
    assert (saved.answer, saved.lost_steps) == (Answer.SAVED, 0)
    lost = the(heard(rules(), *running(2), *FAILED))
    assert (lost.answer, lost.lost_steps, lost.lost_s) == (Answer.ENDED, None, 2)


def test_before_the_first_commit_there_is_nothing_to_save():
    one = heard(
        rules(), launch(), up(0), up(1), reg(0), reg(1), gone(1, -9), froze(0, 0), gone(0, -15)
    )
    assert (the(one).answer, the(one).lost_steps, the(one).ranks) == (Answer.ENDED, 0, {1})


def test_the_last_incidents_are_shown_and_all_are_counted():
    asked = rules(ranks=(0,), max_restarts=9)
    kept = Bookkeeper(asked).hear(launch(), up(0), reg(0))
    for attempt in range(6):
        again = attempt + 1
        kept.hear(gone(0, -9, attempt), up(0, again), reg(0, again, again))
    kept.hear(gone(0, -11, 6))
    assert (kept.account.incidents, kept.account.over) == (7, 6)
    assert len(kept.account.shown) == RECENT
    assert kept.account.shown[-1] is kept.account.present
    assert [one.attempt for one in kept.account.shown] == [2, 3, 4, 5, 6]


def test_a_stop_is_no_incident_and_no_training():
    one = heard(dumps.TWO, *running(2, 4), ask(SIGTERM))
    assert one.incidents == 0 and one.since_s is None


# --- all of them --------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "steps"), HISTORIES)
def test_every_history_is_accounted_for(asked, steps):
    kept = Bookkeeper(asked).hear(*steps)
    agrees(kept)


def agrees(kept):
    """The account says what the job says."""
    job, one = kept.job, kept.account
    broke = [each.now.failure for each in kept.states if each.now.failure]
    assert bool(one.incidents) == bool(broke or job.restarts)
    restarted = sum(each.answer is Answer.RESTARTED for each in one.shown)
    assert restarted <= job.restarts
    if one.incidents <= RECENT:
        assert restarted == job.restarts
    if job.replaced_in_all and one.incidents <= RECENT:
        assert len(set().union(*(each.ranks for each in one.shown))) > 0
    if job.state is JobState.FAILED:
        assert one.shown[-1].answer in {Answer.SAVED, Answer.ENDED}


def test_random_schedules_are_accounted_for():
    answers = set()
    for seed in range(300):
        kept = Bookkeeper()

        def noted(job, event, kept=kept):
            decision = decide(job, event)
            kept.take(job, event, decision)
            return decision

        simulate(seed, noted)
        agrees(kept)
        answers |= {each.answer for each in kept.account.shown}
    assert answers == {*Answer} - {Answer.NONE}
