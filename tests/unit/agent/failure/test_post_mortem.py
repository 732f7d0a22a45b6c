"""What ended a worker: the kernel's word and msrun's own signals together."""

import signal
from types import SimpleNamespace

import pytest

from agent.failure.post_mortem import PostMortem
from agent.machine.oom_kills import OomCounters
from agent.workers.worker import Worker
from worker_hooks.contract.env import AGENT_ERROR_FILE
from worker_hooks.contract.protocol import WorkerOrder

ORDER = WorkerOrder(0, (), {AGENT_ERROR_FILE: ""}, "", "")
SPEC = SimpleNamespace(
    program=SimpleNamespace(interpreter="python", name="train.py", args=()),
    dump=SimpleNamespace(recover_arg=""),
)
FACTS = SimpleNamespace(
    spec=SPEC, host="node", ids={}, plan=lambda _attempt: (ORDER,), layout=SimpleNamespace()
)
HUNG = "made no progress for 20.0 s in data of step 7"
TERM, KILL = signal.SIGTERM, signal.SIGKILL


def told(exit_code, signals=None, hung=""):
    """The sentence, and the hint, about a worker that ended so."""
    worker = Worker(0, 0, 0)
    worker.pid, worker.exit_code, worker.ended_at = 120, exit_code, 1.7e9
    worker.signals, worker.hung = signals or {}, hung
    found = PostMortem(FACTS, OomCounters())
    return found.examine((worker,)), found._report.hint


@pytest.mark.parametrize("code", [-TERM, -KILL, 1, 128 + TERM])
def test_a_rank_that_hung_and_was_ended_is_told_so_however_it_ended(code):
    sentence, why = told(code, {TERM: "rank 0 hung", KILL: "still alive"}, HUNG)
    assert f" {HUNG}; msrun " in sentence
    assert "someone" not in why


def test_a_rank_that_hung_and_died_before_msrun_ended_it_died_by_itself():
    sentence, why = told(-TERM, {}, HUNG)
    assert sentence.endswith("was killed by SIGTERM")
    assert why.startswith("msrun did not send it")


@pytest.mark.parametrize("code", [-TERM, 128 + TERM])
def test_msrun_never_denies_a_signal_that_it_sent(code):
    _, why = told(code, {TERM: "rank 1 failed"})
    assert "msrun sent the signal: rank 1 failed" in why


def test_another_signal_than_the_one_that_msrun_sent_is_not_msruns():
    _, why = told(-KILL, {TERM: "rank 1 failed"})
    assert "something else sent SIGKILL" in why
