"""When an optimizer's update begins and ends: ``step()``, and ``step(closure)``.

A closure runs forward and backward inside ``step``, and its collectives are where a death is
noticed. The state is whole until the first weight changes, so the update begins when the closure
has returned for the first time. That holds for an optimizer that calls its closure before it
changes anything; each optimizer shows it in its own first step, where the update still begins with
``step`` itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

_REPEATED = (
    "{} calls its closure again after it has changed weights: if a rank dies there, nobody holds "
    "the step, and all ranks are restarted from the newest checkpoint: %s"
)
_THREAD = "{}.step() runs in the thread {}; only steps of the main thread can be protected"


class UpdateListener(Protocol):
    """What is told of updates."""

    def update_begins(self, index: int) -> None:
        """Weights are about to change; ``index`` is the optimizer's piece."""

    def closure_returned(self) -> None:
        """What was done since the update began was the closure's: forward and backward."""

    def update_ended(self, index: int) -> None:
        """They have changed."""

    def update_is_elsewhere(self, why: str) -> None:
        """They change in another thread, at any time."""

    def halts_amid_update(self, why: str) -> None:
        """If a rank dies, others wait for it with their state half changed.

        ``why``: a sentence for the user, with a place for the reason why that costs the step.
        """

    def say(self, remark: str) -> None:
        """Tell the user, once."""


class UpdateWatch:
    """Watches one optimizer through torch's step hooks, from the first step on."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, index: int, listener: UpdateListener
    ) -> None:
        """Register the hooks. ``optimizer``: called in the main thread, or not protected."""
        self._optimizer, self._index, self._listener = optimizer, index, listener
        self._name = type(optimizer).__name__
        self._main = threading.main_thread().ident
        self._has_begun = False  # the update of the present step
        self._calls = 0  # of the closure, in the present step
        self._before = 0  # :meth:`_version` when the step began
        self._asks_first = False  # the last step called its closure before it changed a weight
        optimizer.register_step_pre_hook(self._step_begins)
        optimizer.register_step_post_hook(self._step_ended)

    def _step_begins(self, _: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._main:
            self._listener.update_is_elsewhere(
                _THREAD.format(self._name, threading.current_thread().name)
            )
            return None
        self._has_begun, self._calls = False, 0
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._listener.update_begins(self._index)
            self._has_begun = True
            return None
        if not self._asks_first:
            self._begin()
        self._before = self._version()
        asked = self._watched(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": asked}
        return (args[0], asked, *args[2:]), kwargs

    def _step_ended(self, *_: Any) -> None:
        if threading.get_ident() == self._main:
            self._asks_first = self._asks_first and self._calls > 0
            if not self._has_begun:
                self._begin()  # late: it has not called its closure
            self._listener.update_ended(self._index)

    def _watched(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(closure)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._calls += 1
            has_changed = self._version() != self._before
            if self._calls == 1:
                self._asks_first = not has_changed
            elif has_changed:
                self._listener.halts_amid_update(_REPEATED.format(self._name))
            if has_changed:
                self._begin()
            result = closure(*args, **kwargs)
            self._begin()
            self._listener.closure_returned()
            return result

        return watched

    def _begin(self) -> None:
        if not self._has_begun:
            self._listener.update_begins(self._index)
            self._has_begun = True

    def _version(self) -> int:
        """Changes with every weight that the optimizer changes; 0.05 us each."""
        groups = self._optimizer.param_groups
        return sum([each._version for group in groups for each in group["params"]])  # noqa: SLF001
