"""Preloaded by `framework_torture`: a rank that finds an order for a moment kills itself there.

An order is a file ``MOMENT.RANK`` with the seconds after which the kernel is to send SIGKILL.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import dataloader

from worker_hooks.drill.inject import _signal_after

ORDERS = os.environ.get("KILL_ORDERS", "")


def take(moment: str) -> None:
    """Follow the order for this moment, if there is one."""
    if not ORDERS or "RANK" not in os.environ or _is_helper():
        return
    order = Path(ORDERS, f"{moment}.{os.environ['RANK']}")
    try:
        after_s = float(order.read_text())
        order.unlink()
    except OSError:
        return
    if after_s:
        _signal_after(9, after_s)
    else:
        os.kill(os.getpid(), 9)


def _is_helper() -> bool:
    return Path("/proc/self/comm").read_text().startswith(("msrun", "pt_data"))


_train: Any = torch.nn.Module.train
_next: Any = dataloader._BaseDataLoaderIter.__next__


def train(self: Any, mode: bool = True) -> Any:
    if not mode:
        take("eval")
    return _train(self, mode)


def following(self: Any) -> Any:
    try:
        return _next(self)
    except StopIteration:
        take("end")
        raise


os.register_at_fork(before=lambda: take("fork"), after_in_parent=lambda: take("forked"))
torch.nn.Module.train = train  # type: ignore[method-assign]
dataloader._BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]
