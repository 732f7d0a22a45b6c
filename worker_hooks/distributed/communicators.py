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
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_hooks.contract.env import why_nccl_watchdog, without_nccl_watchdog
from worker_hooks.distributed import stacks

GLOO = "gloo"
ABORT_S = 20.0  # NCCL needs less than a second for hundreds of peers


def outlive_peers(environ: MutableMapping[str, str]) -> None:
    """Have torch's watchdog of NCCL leave this process alone when a peer dies.

    torch reads this as a group is made, so call it when a script imports the hooks.
    """
    if not _backends():
        environ.update(without_nccl_watchdog(environ))


def why_peers_end_it(environ: Mapping[str, str]) -> str:
    """Why torch's watchdog may act on a peer's death before msrun, and what helps, as text.

    Empty: it does not, or there is none.
    ``environ``: of this process; a group was made with it, or will be.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != "cuda":  # ROCm's name, too
        return ""
    if _groups() and not _backends():  # gloo has no watchdog
        return ""
    return why_nccl_watchdog(environ)


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

    ``backends``: torch's, the group that was made last first.
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
    """Of accelerators, the group's first that was made last; gloo's have an end of their own."""
    of_others = [group for group, name in _groups() if name != GLOO]
    if not of_others:  # else accelerators are looked for
        return []
    found = {id(each): each for kind in device_types() for each in _of_kind(of_others, kind)}
    return [each for each in found.values() if not _is_gloo(each)]


def gloo_backends() -> list[Any]:
    """Of all groups."""
    return list(filter(_is_gloo, _of_kind([group for group, _ in _groups()], "cpu")))


def _groups() -> list[tuple[Any, str]]:
    """Every group with the name of its backend, the one that was made last first."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    known = group_register().pg_map
    return [(group, about[0]) for group, about in reversed([*known.items()])]


def group_register() -> Any:
    """Torch's register of groups; there is no public one."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._world  # noqa: SLF001


def timeout_of(group: Any) -> timedelta:
    """How long a collective of the group waits for its ranks."""
    for device in device_types():
        try:
            found = group._get_backend(torch.device(device)).options._timeout  # noqa: SLF001
        except (RuntimeError, AttributeError):
            continue
        if isinstance(found, timedelta):
            return found
    return timedelta(minutes=30)  # torch's default for gloo


def _of_kind(groups: Iterable[Any], kind: str) -> Iterator[Any]:
    for group in groups:
        with contextlib.suppress(RuntimeError):  # it has none for this kind of device
            yield group._get_backend(torch.device(kind))  # noqa: SLF001


def _is_gloo(backend: Any) -> bool:
    return isinstance(backend, getattr(dist, "ProcessGroupGloo", ()))
