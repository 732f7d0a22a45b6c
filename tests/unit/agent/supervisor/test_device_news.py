"""What people hear of a device that failed while the job goes on."""

from types import SimpleNamespace

import pytest

from agent.controller import actions as do
from agent.controller.states import JobState
from agent.supervisor.job_controller import JobController
from agent.supervisor.run_parts import RunParts

MEMORY, XID = "rank 1 was killed for memory", "the driver reported Xid 79"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (JobState.REPLACING, [MEMORY, XID]),
        (JobState.STARTING, [XID]),  # all ranks start again, and the reason is said as well
        (JobState.FAILED, []),  # the report tells it
        (JobState.STOPPED, []),
    ],
)
def test_what_only_a_report_would_tell_is_said_if_there_is_none(state, said):
    assert _heard(state, memory=MEMORY, driver=XID) == said


def test_nothing_is_said_where_nothing_is_known():
    assert _heard(JobState.REPLACING, memory="", driver="") == []


def test_a_job_that_is_done_is_not_examined():
    assert _heard(JobState.SUCCEEDED, memory=MEMORY, driver=XID) == []


def _heard(state, memory, driver):
    """What people hear of an attempt that is over."""
    heard, logged = [], []
    found = SimpleNamespace(
        memory_hint=memory, driver_report=driver, examine=lambda _workers, _others: ""
    )
    run = SimpleNamespace(post_mortem=lambda: found, journal=SimpleNamespace(log=logged.append))
    RunParts.examine(run, state, (), (), heard.append)
    assert bool(logged) == (state is not JobState.SUCCEEDED)
    return heard


@pytest.mark.parametrize("is_full", [False, True])
def test_devices_are_given_up_aloud_also_where_that_cannot_be_written_down(is_full):
    heard, kept = [], []

    def keep(devices):
        if is_full:
            raise OSError(28, "No space left on device", "/r/record.json")
        kept.append(devices)

    controller = SimpleNamespace(_say=heard.append, _give_up_devices=keep)
    JobController._give_up(controller, do.GiveUpDevices(("1",), "device 1 failed"))
    assert heard[0] == "device 1 failed"
    assert (kept, len(heard)) == (([], 2) if is_full else ([("1",)], 1))
    assert not is_full or heard[1].startswith("a resume of this run may use them again: No space")
