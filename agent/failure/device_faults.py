"""Which errors are faults of a device, so that another one helps. Pure: tables with their sources.

A device counts as failed only if its driver says so. What a bug of the script causes as well is no
fault, or each restart of a broken script would use up a spare device: out of memory, an illegal
memory access, a failed assertion, "unspecified launch failure", "unknown error", "hardware stack
error" (the stack of a kernel), "the launch timed out". Nor is what an administrator or another
program causes: "device(s) is/are busy or unavailable", "no CUDA-capable device".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum

from agent.machine.xid_log import Xid

_CUDA_FAULTS = (  # cudaGetErrorString, CUDA Runtime API, "CUDART_TYPES", cudaError_t
    "uncorrectable ECC error encountered",  # 214 cudaErrorECCUncorrectable
    "uncorrectable NVLink error detected during the execution",  # 220 cudaErrorNvlinkUncorrectable
)
# torch: c10/cuda/CUDAException.cpp and CUDADriverAPI; NCCL: CUDACHECK in src/include/checks.h.
# torch 2.13 writes up to five lines; the reason is in the first one, advice in all others.
_CUDA = re.compile(
    r"\b(?:CUDA (?:driver )?error: |Cuda failure (?:\d+ )?')"
    rf"(?P<fault>{'|'.join(map(re.escape, _CUDA_FAULTS))})\b"
)
# An uncaught C++ exception, and what torch's watchdog of NCCL writes before it aborts the process
# (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp); frames of the C++ stack follow.
_ABORTS = re.compile(r"  what\(\): |atchdog thread terminated with exception: ")
_ABORT_LINES = 8  # that belong to one such text, before its frames


class XidAction(Enum):
    """What NVIDIA's catalogue wants to be done at once, as a fact about the device."""

    RESTART_MACHINE = "the device is lost until this machine restarts"
    RESET_DEVICE = "the device needs a reset"
    RESTART_PROCESS = "the device goes on; only this process had to end"
    FIX_SCRIPT = "most often a fault of the program"
    NOTHING = "the device goes on"
    SEE_OTHERS = "the consequence of another error"


# docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog": its column
# "Immediate Action". 48 and 74 name a workflow there, which ends in a reset. Left out on purpose,
# although a reset is advised: 46 and 109, which a kernel that never ends causes as well.
XID_ACTIONS = {
    13: XidAction.FIX_SCRIPT,  # graphics engine exception: an access out of bounds, a bad opcode
    31: XidAction.FIX_SCRIPT,  # memory page fault: an illegal address
    43: XidAction.FIX_SCRIPT,  # the process's channel was stopped
    45: XidAction.SEE_OTHERS,  # cleanup after an earlier error
    48: XidAction.RESET_DEVICE,  # double-bit ECC error
    62: XidAction.RESET_DEVICE,  # internal microcontroller halted
    63: XidAction.NOTHING,  # a row was remapped, or a page retired
    64: XidAction.RESET_DEVICE,  # that failed
    74: XidAction.RESET_DEVICE,  # NVLink error
    79: XidAction.RESTART_MACHINE,  # fallen off the bus
    94: XidAction.RESTART_PROCESS,  # contained memory error
    95: XidAction.RESET_DEVICE,  # uncontained memory error
    119: XidAction.RESET_DEVICE,  # GSP: no answer to a call
    120: XidAction.RESET_DEVICE,  # GSP: error
    140: XidAction.RESET_DEVICE,  # unrecovered ECC error
    143: XidAction.RESET_DEVICE,  # initialization failed
}
_GIVES_UP = frozenset({XidAction.RESTART_MACHINE, XidAction.RESET_DEVICE})  # not while a job runs


def cuda_fault(text: str) -> str:
    """How a device failed, as CUDA's error in ``text`` says; empty: it did not, or nobody knows."""
    found = _CUDA.search(text)
    return "" if found is None else found["fault"]


def abort_text(lines: Sequence[str]) -> str:
    """What the end of a log says about an abort by C++ code: the texts of its exceptions."""
    at = [number for number, line in enumerate(lines) if _ABORTS.search(line)]
    return "\n".join("\n".join(lines[start : start + _ABORT_LINES]) for start in at)


def is_fault(xid: Xid) -> bool:
    """Whether the device cannot be used any more, and its program is not to blame."""
    return XID_ACTIONS.get(xid.number) in _GIVES_UP


def worst(xids: Iterable[Xid]) -> Xid | None:
    """The report that explains the others: the first fault of a device, else the first one."""
    found = list(xids)
    causes = [xid for xid in found if XID_ACTIONS.get(xid.number) is not XidAction.SEE_OTHERS]
    return next(filter(is_fault, found), next(iter(causes or found), None))


def describe_xid(xid: Xid) -> str:
    """What was reported, and what it means, if that is known."""
    action = XID_ACTIONS.get(xid.number)
    return f"{xid}" if action is None else f"{xid} ({action.value})"
