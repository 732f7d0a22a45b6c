"""Page-locked host memory: an accelerator copies to it while the main thread goes on.

Only CUDA has a call for memory that torch did not allocate itself. Elsewhere, and where the driver
refuses, a copy waits for the device.
"""

from __future__ import annotations

import contextlib

import torch


def lock(address: int, nbytes: int) -> bool:
    """Lock memory; whether it could be."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    is_locked = int(cudart.cudaHostRegister(address, nbytes, 0)) == 0
    if not is_locked:
        # the refusal would be raised by whatever runs next on the device
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return is_locked


def unlock(address: int) -> None:
    """Give it back; call before it is unmapped, in the process that has locked it."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
