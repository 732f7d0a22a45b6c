"""Communicators of accelerators (NCCL and its like): aborted all together, with a deadline.

An abort ends the kernels that wait for a dead peer, and what is queued behind them runs on garbage.
So it comes after the state was copied.

Communicators that are aborted one after the other wait for each other (github.com/pytorch/pytorch
issue 119797), so those that can are aborted as one group. An abort may still wait for long, for a
device that has failed. So it has a thread of its own, and a rank whose abort does not end is killed
and replaced.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from worker_hooks.distributed import stacks

ABORT_S = 20.0  # NCCL needs less than a second for hundreds of peers


def device_types() -> Iterator[str]:
    """The host; then the kind of accelerator that this process sees, if any, which takes longer."""
    yield "cpu"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        yield accelerator.type


def abort() -> threading.Thread | None:
    """Begin to abort the communicators of all groups, sub-groups included; ``None``: none has any.

    Any thread may call this.
    """
    found = _backends()
    if not found:
        return None
    aborting = threading.Thread(target=abort_together, args=(found,), daemon=True)
    aborting.start()
    return aborting


def await_abort(aborting: threading.Thread | None, within_s: float = ABORT_S) -> None:
    """Wait for the end of an abort; if it does not come, this process ends itself."""
    if aborting is None:
        return
    aborting.join(within_s)
    if aborting.is_alive():
        stacks.end_process(f"communicators could not be aborted within {within_s:.0f} s")


def abort_together(backends: Sequence[Any]) -> None:
    """Abort these, as one group where they can; errors are ignored: such a one is broken already.

    Args:
        backends: torch's, the group that was made last first.
    """
    with contextlib.ExitStack() as groups:
        kinds = {type(each): each for each in backends if hasattr(each, "_group_start")}
        for one in kinds.values():
            with contextlib.suppress(Exception):
                one._group_start()  # noqa: SLF001  as torch's own abort does
                groups.callback(_end_group, one)
        for each in backends:
            with contextlib.suppress(Exception):
                each.abort()


def _end_group(backend: Any) -> None:
    with contextlib.suppress(Exception):
        backend._group_end()  # noqa: SLF001  all aborts are made here


def _backends() -> list[Any]:
    """Of the accelerator, without gloo's: its abort does nothing."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed import distributed_c10d

    gloo = getattr(distributed_c10d, "ProcessGroupGloo", ())
    known = distributed_c10d._world.pg_map  # noqa: SLF001  torch has no public list
    groups = [group for group, about in [*known.items()] if about[0] != "gloo"]
    if not groups:
        return []
    found: dict[int, Any] = {}
    for kind in device_types():
        for group in reversed(groups):
            with contextlib.suppress(RuntimeError):  # it has none for this kind of device
                backend = group._get_backend(torch.device(kind))  # noqa: SLF001
                if not isinstance(backend, gloo):
                    found[id(backend)] = backend
    return [*found.values()]
