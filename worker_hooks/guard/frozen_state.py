"""The state behind a closed gate: which step it is of, and saving it."""

from __future__ import annotations

from collections.abc import Callable

from worker_hooks.contract import protocol
from worker_hooks.contract.env import RankEnv
from worker_hooks.guard.gate import FreezeResult, Gate
from worker_hooks.guard.save import save
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.state.snapshot import NotSavableError


class FrozenState:
    """The listener freezes the state, and saves it on order; without an order nothing is frozen."""

    def __init__(self, gate: Gate, source: CommittedState) -> None:
        self._gate = gate
        self._source = source
        self.device_error = ""  # of an accelerator, at the last freeze
        self.version: int | None = None  # of the state, if it was torn but complete

    def freeze(self, grace_s: float, newest: int, unsafe_why: str) -> tuple[int, bool, str]:
        """Close the gate.

        Args:
            grace_s: how long an update under way may take to reach its commit.
            newest: the newest commit of any rank; a rank that is behind it may reach it, too.
            unsafe_why: why no moment of this training is known to be whole; empty: some are.

        Returns:
            The step that the state is whole as of, whether it is whole, and why it is not.
        """
        source = self._source
        result = self._gate.close(
            grace_s, source.is_complete, lambda: bool(source.why_changed()), newest
        )
        is_updated = result is FreezeResult.UPDATED
        step, why = source.step + is_updated, unsafe_why
        if source.device is not None:
            held = source.settle_devices(grace_s, is_updated=is_updated)
            is_updated, step = held.step > source.step, held.step
            why = why or held.why_not
            self.device_error = held.why_not if held.is_failed else ""
        self.version = source.version(step) if is_updated else None
        if source.device is not None:
            return step, not why, why
        if not why and result is FreezeResult.TORN and not source.is_copied():
            changed = source.why_changed() or "the script itself began to update"
            if self._gate.is_torn:
                changed = f"an optimizer began to update after step {step}"
            why = f"{changed} and did not reach its commit"
        elif not why and result is FreezeResult.WHOLE:
            why = source.why_unknown()
        return step, not why, why

    def save(
        self,
        env: RankEnv,
        order: protocol.Save,
        grace_s: float,
        advance: Callable[[int], None],
    ) -> protocol.Written | protocol.Digested:
        """Save it as of the order's step.

        Args:
            grace_s: how long an update may take on a device that no freeze has looked at.
            advance: called with each count of bytes that are done; may raise, to give up.

        Raises:
            OSError, RuntimeError: see :func:`worker_hooks.guard.save.save`.
        """
        source, device = self._source, self._source.device
        if device is None or device.is_settled:
            return save(source, env, order, self.version, advance)
        try:  # held at a boundary, with living peers
            held = source.settle_devices(grace_s, is_updated=False, is_held=True)
            if held.why_not or held.step != order.step:
                raise NotSavableError(held.why_not or f"its device holds step {held.step}")
            return save(source, env, order, self.version, advance)
        finally:
            source.changes.is_idle = False
