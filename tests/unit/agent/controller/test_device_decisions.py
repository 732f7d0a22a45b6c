"""When a spare device is used up, and who sees which list: never at the death itself."""

from dataclasses import replace

import pytest
from support.histories.dumps import froze, holds, running, wrote
from support.histories.plain import BEGIN, STARTED_2, gone, rules, up
from support.histories.replacements import COMMITTING, DIED, MEMORY, REPLACING, asked, done

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.decide import decide
from agent.controller.job import Job
from agent.controller.states import JobState
from agent.spec.device_plan import DevicePlan

ECC = "uncorrectable ECC error encountered"
AGAIN = rules(max_restarts=2)


def broken(rank, exit_code=-6, attempt=0):
    return replace(gone(rank, exit_code, attempt), fault=ECC)


def plan(workers=2, spares=1):
    names = [str(number) for number in range(workers + spares)]
    return DevicePlan(dict(enumerate(names[:workers])), tuple(names[workers:]))


def play(policy, events, devices):
    """The job after events, and all actions that were decided meanwhile."""
    job, actions = Job(policy, devices=devices), []
    for event in events:
        decision = decide(job, event)
        job = decision.job
        actions += decision.actions
    return job, actions


def events_of(steps):
    return [step[0] for step in steps]


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def test_without_a_plan_no_action_names_devices():
    _, actions = play(AGAIN, [*events_of(STARTED_2), broken(1), gone(0, -15)], DevicePlan())
    assert [start.devices for start in of(do.StartAttempt, actions)] == [(), ()]
    assert of(do.GiveUpDevices, actions) == []


def test_a_restart_gives_all_ranks_a_list_without_the_failed_device():
    job, actions = play(AGAIN, [*events_of(STARTED_2), broken(1)], plan())
    assert of(do.GiveUpDevices, actions) == []  # rank 0 is alive, and may keep the budget from use
    decision = decide(job, gone(0, -15))
    kinds = [type(action) for action in decision.actions]
    assert kinds.index(do.GiveUpDevices) < kinds.index(do.StartAttempt)
    (start,), (given_up,) = (of(kind, decision.actions) for kind in (do.StartAttempt, do.GiveUpDevices))  # fmt: skip
    assert start.devices == ("0", "2")
    assert given_up.devices == ("1",)
    assert given_up.reason == (
        f"device 1 of rank 1 failed ({ECC}) and is not used again: its successor gets device 2, "
        "the last spare one"
    )
    assert decision.job.devices == DevicePlan({0: "0", 1: "2"}, given_up=("1",))


def test_a_failure_without_a_restart_uses_no_device_up():
    job, actions = play(rules(), [*events_of(STARTED_2), broken(1), gone(0, -15)], plan())
    assert job.state is JobState.FAILED
    assert of(do.GiveUpDevices, actions) == []
    assert job.devices.given_up == ()


def test_a_death_for_another_reason_uses_no_device_up():
    job, actions = play(AGAIN, [*events_of(STARTED_2), gone(1, -6), gone(0, -15)], plan())
    assert of(do.StartAttempt, actions)[-1].devices == job.devices.visible == ("0", "1", "2")
    assert of(do.GiveUpDevices, actions) == []


def test_without_a_spare_device_left_it_is_said_and_all_is_as_before():
    first = [*events_of(STARTED_2), broken(1), gone(0, -15)]
    second = [up(0, 1), up(1, 1), broken(0, 1, 1), gone(1, -15, 1)]
    job, actions = play(AGAIN, first + second, plan())
    assert [start.devices for start in of(do.StartAttempt, actions)] == [
        ("0", "1", "2"),
        ("0", "2"),
        ("0", "2"),
    ]
    *_, last = of(do.GiveUpDevices, actions)
    assert last.devices == ()
    assert last.reason.endswith("no spare device is left: its successor gets the same one")
    assert job.devices.given_up == ("1",)


def test_two_devices_may_fail_in_one_attempt():
    _, actions = play(AGAIN, [*events_of(STARTED_2), broken(1), broken(0)], plan(spares=2))
    assert of(do.StartAttempt, actions)[-1].devices == ("3", "2")
    assert of(do.GiveUpDevices, actions)[0].devices == ("1", "0")


def test_a_rank_may_fail_before_all_have_started():
    _, actions = play(AGAIN, [BEGIN[0], up(0), broken(0), ev.StartFailed(1, 0, "off")], plan())
    assert of(do.StartAttempt, actions)[-1].devices == ("2", "1")


# --- one rank is replaced -------------------------------------------------------------------------


def with_fault(steps):
    return [broken(1) if event == gone(1, -9) else event for event in events_of(steps)]


def test_a_replacement_that_is_started_early_has_the_spare_device_and_uses_none_up():
    job, actions = play(asked(), with_fault(COMMITTING), plan(3))
    (prepare,) = of(do.PrepareRanks, actions)
    assert prepare.devices == ("0", "3", "2")
    assert job.devices.spare == ("3",)
    assert of(do.GiveUpDevices, actions) == []


def test_the_decision_to_replace_a_rank_uses_it_up():
    job, actions = play(asked(), with_fault(REPLACING), plan(3))
    (prepare,), (given_up,), (ordered,) = (
        of(kind, actions) for kind in (do.PrepareRanks, do.GiveUpDevices, do.ReplaceRanks)
    )
    assert ordered.devices == prepare.devices == ("0", "3", "2")
    assert given_up.devices == ("1",)
    assert (job.devices.spare, job.devices.faults) == ((), {})


def test_a_survivor_whose_device_fails_in_the_round_gets_the_next_one():
    events = [*with_fault(REPLACING), up(1, 1), broken(0, attempt=1), gone(1, -9, 1)]
    job, actions = play(asked(), events, plan(3, 2))
    assert [ordered.devices for ordered in of(do.ReplaceRanks, actions)] == [
        ("0", "3", "2", "4"),
        ("4", "3", "2"),
    ]
    assert job.devices.given_up == ("1", "0")


def test_a_second_fault_before_the_order_leaves_the_device_of_a_replacement_that_exists():
    died = with_fault(DIED)
    ordered = [*died, froze(0), froze(2)]
    events = [*ordered, broken(2), wrote(0), done(MEMORY)]
    _, actions = play(asked(), events, plan(3, 2))
    (prepare,), (replaced,) = (of(kind, actions) for kind in (do.PrepareRanks, do.ReplaceRanks))
    assert prepare.devices == ("0", "3", "2", "4")
    assert replaced.devices == ("0", "3", "4")
    assert replaced.newcomers == (1, 2)


@pytest.mark.parametrize("steps", [REPLACING])
def test_if_it_falls_to_a_restart_all_have_the_new_list(steps):
    failed = ev.StartFailed(1, 1, "no memory")
    job, actions = play(asked(), [*with_fault(steps), failed], plan(3))
    assert job.state is not JobState.REPLACING
    assert job.devices.visible == ("0", "3", "2")
    assert len(of(do.GiveUpDevices, actions)) == 1


def test_the_other_replicas_are_not_asked_for_anything_new():
    events = [*events_of(running(3)), broken(1), froze(0), froze(2), wrote(0), holds(2)]
    _, actions = play(asked(), events, plan(3))
    plain = [gone(1, -6) if isinstance(event, ev.WorkerExited) else event for event in events]
    _, without = play(asked(), plain, DevicePlan())
    assert [type(action) for action in actions] == [type(action) for action in without]
