"""Watches the training script through torch's own hooks, without a change in the script.

Optimizers have step hooks (:mod:`update_watch`). The start of backward has no hook, so
``torch.autograd.backward``, which every ``loss.backward()`` calls, is wrapped once. The wrapper
writes a rank's private state to its page before it calls autograd, so before a gradient of this
rank can reach a peer.
"""

from __future__ import annotations

import dis
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

_watchers: list[Callable[[torch.Tensor], None]] = []
_depth = 0

_DROPS = {dis.opmap[name] for name in ("POP_TOP", "POP_ITER", "END_FOR") if name in dis.opmap}
"""The instructions by which ``break`` and ``return`` drop the iterator of a loop."""


def watch_backward(began: Callable[[torch.Tensor], None]) -> None:
    """Call ``began`` with the first root tensor whenever backward begins in the main thread.

    A backward inside a backward (reentrant checkpointing) is a part of it and is not reported.
    """
    if not _watchers:
        torch.autograd.backward = _watched(torch.autograd.backward)
    _watchers.append(began)


def _watched(backward: Callable[..., None]) -> Callable[..., None]:
    main = threading.main_thread().ident

    @functools.wraps(backward)
    def watched(tensors: torch.Tensor | Sequence[Any], *args: Any, **options: Any) -> None:
        global _depth  # noqa: PLW0603  only the main thread uses it
        if _depth or threading.get_ident() != main:
            backward(tensors, *args, **options)
            return
        root = tensors if isinstance(tensors, torch.Tensor) else _first(tensors)
        if root is not None:
            for began in _watchers:
                began(root)
        _depth += 1
        try:
            backward(tensors, *args, **options)
        finally:
            _depth -= 1

    return watched


def _first(tensors: Sequence[Any]) -> torch.Tensor | None:
    roots = [root for root in tensors if isinstance(root, torch.Tensor)]
    return roots[0] if roots else None


def is_left_regularly(frame: FrameType | None) -> bool:
    """Whether a loop's iterator is dropped by ``break`` or ``return``, not by an exception.

    In both cases its generator is closed. But an exception leaves its frame at the instruction that
    raised it. ``frame``: where the iterator is dropped. Generators around it are skipped.
    """
    while frame is not None:
        if frame.f_code.co_code[frame.f_lasti] in _DROPS:
            return True
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:
            return False
        frame = frame.f_back
    return False
