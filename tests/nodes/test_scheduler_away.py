"""A scheduler is killed, and started again with its own line 20 s later: no step is late."""

from __future__ import annotations

import re
import signal
import time
from itertools import pairwise

import pytest
from support.hand_jobs import SCHEDULER, start, start_all
from support.jobs import DEADLINE_S
from support.node_jobs import NodeJobs, NodesJob, check_nothing_left
from support.node_trainings import SCRIPT, weights
from support.warm_python import WarmPython

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.warm]
AWAY_S, LOOK_S = 20.0, 0.01
LONGEST = 0.25  # of the time that it is away: no step takes as long, however busy the machine is
WORDS = ("--epochs=120", "--pause=0.08")


class Steps:
    """When each step of rank 0 was seen to begin."""

    def __init__(self, job: NodesJob) -> None:
        self._job = job
        self.at_s: list[float] = []

    def _look(self) -> None:
        seen = len(re.findall("begins step", self._job.logs().get("worker_0.log", "")))
        self.at_s += [time.monotonic()] * (seen - len(self.at_s))

    def watch(self, seconds: float) -> list[float]:
        """How long each step took: from the one under way now to the one under way at the end.

        Of the latter as long as it has taken by then: a step that waits is one of these two.
        """
        first, until_s = max(len(self.at_s) - 1, 0), time.monotonic() + seconds
        while time.monotonic() < until_s:
            self._look()
            signal.sigtimedwait([], LOOK_S)
        ends_s = (*self.at_s[first:], time.monotonic())
        return [later - earlier for earlier, later in pairwise(ends_s)]

    def await_step(self, number: int) -> None:
        until_s = time.monotonic() + DEADLINE_S
        while len(self.at_s) < number:
            assert time.monotonic() < until_s, self._job.told()
            self._look()
            signal.sigtimedwait([], LOOK_S)


def test_no_step_is_late(
    jobs: NodeJobs, tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython
) -> None:
    job = start_all(jobs, SCRIPT, *WORDS)
    job.head.await_error("protected")
    (steps := Steps(job)).await_step(10)
    before = steps.watch(8)
    job.head.signal(signal.SIGKILL)
    away = steps.watch(AWAY_S)
    again = {"MS_ENABLE_RECOVERY": "1", "MS_RECOVERY_PATH": str(jobs.folder / "recovery")}
    job.parts[0] = start(jobs, SCHEDULER, SCRIPT, *WORDS, again="_again", **again)
    job.head.await_error("the workers train, without a scheduler: this one controls them")
    back = steps.watch(8)
    said = f"longest step before {max(before):.2f} s, away {max(away):.2f}, back {max(back):.2f}"
    print(said, f"steps {len(before)}, {len(away)}, {len(back)}")
    pace_s = sum(before) / len(before)
    assert sum(away) / len(away) < 2 * pace_s, said  # others use the machine, too
    assert sum(back) / len(back) < 2 * pace_s, said
    # a step that waits for a scheduler would wait for most of that time; a busy machine takes less
    assert max(away) < AWAY_S * LONGEST, said
    assert max(back) < AWAY_S * LONGEST, said
    assert "running" in job.head.command("status").out
    job.succeed()
    undisturbed = warm_python.train(tmp_path_factory.mktemp("undisturbed"), 4, SCRIPT, *WORDS)
    assert weights(job.logs().values()) == weights(undisturbed)
    assert not (jobs.folder / "checkpoints").exists()
    check_nothing_left(*jobs.cluster.nodes)
