"""A job that Slurm preempts is queued again; scontrol is played by a script."""

import pytest

from agent.machine.slurm_queue import requeue_preempted

PREEMPTED = (
    "JobId=7 JobState=RUNNING Requeue=1 Restarts=0 BatchFlag=1 PreemptTime=2026-11-24T23:08:02"
)


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Plays scontrol; what it is asked is in the file ``asked``."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def play(shown, code=0):
        path = tmp_path / "scontrol"
        path.write_text(
            f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n[ "$1" = show ] || exit {code}\n'
            f"echo '{shown}'\n"
        )
        path.chmod(0o755)

    play.asked = tmp_path / "asked"
    return play


def told(job="7"):
    said = []
    requeue_preempted(job, said.append)
    return said


def test_a_preempted_job_is_queued_again(scontrol):
    scontrol(PREEMPTED)
    assert told() == [
        "Slurm has preempted job 7: it is queued again, and goes on from the step saved"
    ]
    assert scontrol.asked.read_text() == "show job 7\nrequeue 7\n"


@pytest.mark.parametrize(
    "shown",
    [
        PREEMPTED.replace("2026-11-24T23:08:02", "None"),
        PREEMPTED.replace(" PreemptTime=2026-11-24T23:08:02", ""),  # a signal, scancel
        PREEMPTED.replace("BatchFlag=1", "BatchFlag=0"),  # of salloc or srun: nobody begins it
    ],
)
def test_another_job_is_left_alone(scontrol, shown):
    scontrol(shown)
    assert told() == []
    assert scontrol.asked.read_text() == "show job 7\n"


def test_a_job_that_may_not_be_queued_again_is_not(scontrol):
    scontrol(PREEMPTED.replace("Requeue=1", "Requeue=0"))
    (said,) = told()
    assert "which may not be queued again" in said
    assert scontrol.asked.read_text() == "show job 7\n"


def test_what_is_to_be_done_by_hand_is_said(scontrol, tmp_path, monkeypatch):
    scontrol(PREEMPTED, code=1)
    (refused,) = told()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (missing,) = told()
    for said in (refused, missing):
        assert "takes it for completed now: scontrol requeue 7 queues it again" in said
    assert refused.startswith("Slurm has preempted job 7, ")
    assert missing.startswith("if Slurm has preempted batch job 7, ")
