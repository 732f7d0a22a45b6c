"""What ended a worker: the kernel's word and msrun's own signals together."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.failure.evidence import Evidence, WorkerEnd
from agent.failure.post_mortem import PostMortem
from agent.machine.oom_kills import OomCounters
from agent.machine.xid_log import XidLog
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


def told(exit_code, signals=None, hung="", kernel_log=Path("/nowhere")):
    """The sentence, and the hint, about a worker that ended so."""
    worker = Worker(0, 0, 0)
    worker.pid, worker.exit_code, worker.ended_at = 120, exit_code, 1.7e9
    worker.signals, worker.hung = signals or {}, hung
    found = PostMortem(FACTS, OomCounters(), XidLog(0.0, kernel_log, knows_pids=True))
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


def log_of(tmp_path, pid, number=79, text="GPU has fallen off the bus"):
    path = tmp_path / "kmsg"
    path.write_text(
        f"3,7,5000000,-;NVRM: Xid (PCI:0000:17:00): {number}, pid={pid}, name=python, {text}.\n"
    )
    return path


def test_what_the_driver_reported_about_the_rank_is_in_its_report(tmp_path):
    _, why = told(1, kernel_log=log_of(tmp_path, 120))
    report = 'the driver reported Xid 79 on PCI 0000:17:00: "GPU has fallen off the bus"'
    assert why == f"{report} (the device is lost until this machine restarts)"


def test_what_it_reported_about_nobody_is_said_of_the_host(tmp_path):
    _, why = told(1, kernel_log=log_of(tmp_path, "'<unknown>'"))
    assert why.startswith("on this host, the driver reported Xid 79 on PCI 0000:17:00")


def test_what_it_reported_here_is_not_said_of_a_rank_of_another_node(tmp_path):
    found = PostMortem(FACTS, OomCounters(), XidLog(0.0, log_of(tmp_path, 120), knows_pids=True))
    end = WorkerEnd(3, 0, 120, "another", 1, None, 1.7e9, 0)  # with the same pid there
    assert found.examine((), [Evidence(end)]) is not None
    assert found.driver_report == ""
    assert found._report.cause.root.end.host == "another"


def test_what_it_reported_about_another_process_is_not_said(tmp_path):
    assert told(1, kernel_log=log_of(tmp_path, 121))[1] is None


def test_control_characters_of_a_report_are_spelled_out(tmp_path):
    _, why = told(1, kernel_log=log_of(tmp_path, 120, text="\x1b]0;x\x07"))
    assert "\\x1b]0;x\\x07" in why


@pytest.mark.parametrize(("number", "is_fault"), [(79, True), (31, False)])
def test_the_device_of_a_rank_has_failed_if_the_driver_says_so(tmp_path, number, is_fault):
    worker = Worker(0, 0, 0)
    worker.pid, worker.exit_code, worker.ended_at = 120, -signal.SIGABRT, 1.7e9
    log = XidLog(0.0, log_of(tmp_path, 120, number), knows_pids=True)
    fault = PostMortem(FACTS, OomCounters(), log).device_fault(worker)
    assert fault.startswith("Xid 79 on PCI") if is_fault else fault == ""
