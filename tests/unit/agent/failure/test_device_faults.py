"""Faults of a device are told from faults of a program, in all ways in which a rank may end."""

import json
import signal

import pytest
from support.cuda_errors import ECC, FRAMES, RAISED, torchs

from agent.failure.device_faults import XID_ACTIONS, cuda_fault, describe_xid, is_fault, worst
from agent.failure.evidence import WorkerEnd, gather
from agent.failure.hints import hint
from agent.machine.xid_log import Xid
from worker_hooks.contract.rank_lines import ENDS_ITSELF

NVLINK = "uncorrectable NVLink error detected during the execution"


def watchdogs(reason):
    """What torch's watchdog of NCCL writes before it aborts the process."""
    who = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
    return f"""[rank1]:[E1123 14:02:11.5 ProcessGroupNCCL.cpp:2093] {who}{torchs(reason)}
{RAISED}
{FRAMES}

terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {who}{torchs(reason)}
{RAISED}
{FRAMES}
"""


def uncaught(reason, prefix=""):
    text = f"torch.AcceleratorError: {torchs(reason)}"
    lines = ("Traceback (most recent call last):", '  File "t.py", line 1, in <module>', text)
    return "\n".join(f"{prefix}{line}" for line in "\n".join(lines).splitlines()) + "\n"


def fault(tmp_path, written, code=1, error=None):
    """The fault that a rank is found to have died of, by its log."""
    return found(tmp_path, written, code, error).device_fault


def found(tmp_path, written, code=1, error=None):
    log, error_file = tmp_path / "worker.log", tmp_path / "error.json"
    log.write_text(written)
    if error is not None:
        error_file.write_text(json.dumps(error))
    end = WorkerEnd(
        rank=1,
        local_rank=1,
        pid=5,
        host="node",
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        at_epoch_s=1.7e9,
        order=1,
        log=log,
        error_file=error_file,
    )
    return gather(end)


@pytest.mark.parametrize("reason", [ECC, NVLINK])
@pytest.mark.parametrize(
    "text",
    [
        "torch.AcceleratorError: {}",
        "RuntimeError: {}",
        "its device reports an error: {}",
        "CUDA driver error: {reason}",
        "Cuda failure 214 '{reason}'",
        "NCCL WARN Cuda failure '{reason}'",
    ],
)
def test_a_fault_of_the_device_is_known_by_cudas_words(reason, text):
    assert cuda_fault(text.format(torchs(reason), reason=reason)) == reason


@pytest.mark.parametrize(
    "reason",
    [
        "an illegal memory access was encountered",
        "device-side assert triggered",
        "out of memory",
        "unspecified launch failure",
        "unknown error",
        "hardware stack error",
        "misaligned address",
        "the launch timed out and was terminated",
        "CUDA-capable device(s) is/are busy or unavailable",
        "no CUDA-capable device is detected",
        "invalid device ordinal",
        "driver shutting down",
        "no kernel image is available for execution on the device",
    ],
)
def test_a_fault_of_the_program_or_of_others_is_none(tmp_path, reason):
    assert cuda_fault(torchs(reason)) == ""
    assert fault(tmp_path, uncaught(reason)) == ""
    assert fault(tmp_path, watchdogs(reason), -signal.SIGABRT) == ""


def test_words_alone_are_none():
    assert cuda_fault(f"what to do about an {ECC}") == ""
    assert cuda_fault("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB") == ""
    assert cuda_fault("") == ""


# --- in which way a rank ended --------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_of_an_exception_that_nobody_caught(tmp_path, prefix):
    assert fault(tmp_path, uncaught(ECC, prefix)) == ECC


def test_of_an_exception_that_led_to_another_one(tmp_path):
    chain = (
        f"{uncaught(ECC)}\nDuring handling of the above exception, another exception occurred:\n\n"
    )
    last = 'Traceback (most recent call last):\n  File "t.py", line 9, in f\nValueError: no step\n'
    assert fault(tmp_path, chain + last) == ECC


def test_of_an_error_file(tmp_path):
    content = {"message": {"message": "x", "extraInfo": {"py_callstack": uncaught(ECC)}}}
    assert fault(tmp_path, "", 1, content) == ECC


def test_of_torchs_watchdog_which_aborts_the_rank(tmp_path):
    assert fault(tmp_path, watchdogs(ECC), -signal.SIGABRT) == ECC
    stacks = 'Fatal Python error: Aborted\n\nCurrent thread 0x7f (most recent call first):\n  File "t.py", line 2 in f\n'
    assert fault(tmp_path, watchdogs(ECC) + stacks, -signal.SIGABRT) == ECC


def test_of_an_abort_by_an_exception_of_cpp(tmp_path):
    what = f"terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  {torchs(ECC)}\n"
    assert fault(tmp_path, what + RAISED + "\n" + FRAMES, -signal.SIGABRT) == ECC


def test_of_ncclls_own_error_in_an_abort(tmp_path):
    what = f"  what():  NCCL error in: x.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 214 '{ECC}'\n"
    assert fault(tmp_path, what + FRAMES, -signal.SIGABRT) == ECC


def test_of_a_rank_that_ended_itself(tmp_path):
    said = " ".join(torchs(ECC).split())
    ended = f"msrun: {ENDS_ITSELF}its device reports an error: {said}\n"
    assert fault(tmp_path, ended, -signal.SIGKILL) == ECC


def test_a_rank_that_was_killed_is_not_said_to_have_died_of_what_it_had_printed(tmp_path):
    assert fault(tmp_path, f"{uncaught(ECC)}and went on\n", -signal.SIGKILL) == ""


def test_an_abort_for_another_reason_is_none_although_an_error_was_printed_before(tmp_path):
    printed = f"retrying after CUDA error: {ECC}\n" + "step\n" * 40
    assert fault(tmp_path, printed + "  what():  bad\n", -signal.SIGABRT) == ""


def test_a_rank_without_a_log_has_none(tmp_path):
    assert fault(tmp_path, "") == ""


def test_the_report_says_it(tmp_path):
    said = hint(found(tmp_path, watchdogs(ECC), -signal.SIGABRT), "python")
    assert said.startswith(f"its device failed ({ECC}): have it reset")


# --- what the driver reports ----------------------------------------------------------------------


def xid(number, text="GPU has fallen off the bus"):
    return Xid(number, "0000:17:00", 5, text, 1.0, number)


@pytest.mark.parametrize("number", [48, 62, 64, 74, 79, 95, 119, 120, 140, 143])
def test_reports_after_which_no_process_can_use_the_device(number):
    assert is_fault(xid(number))


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 94, 109, 46, 8, 92, 154, 999])
def test_reports_that_use_up_no_spare_device(number):
    assert not is_fault(xid(number))


def test_the_report_that_explains_the_others():
    assert worst([xid(45), xid(79), xid(48)]) == xid(79)
    assert worst([xid(45), xid(31)]) == xid(31)
    assert worst([xid(45)]) == xid(45)
    assert worst([]) is None


def test_what_a_report_means():
    quoted = 'Xid 79 on PCI 0000:17:00: "GPU has fallen off the bus"'
    assert describe_xid(xid(79)) == f"{quoted} (the device is lost until this machine restarts)"
    assert describe_xid(xid(31, "x")).endswith('"x" (most often a fault of the program)')
    assert 999 not in XID_ACTIONS
    assert describe_xid(xid(999, "")) == "Xid 999 on PCI 0000:17:00"
