"""The state that a guard reads, as the guard sees it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from worker_hooks.contract.status_page import Page
from worker_hooks.state.device_state import DeviceState, HeldStep
from worker_hooks.state.registry import CommitPlaces
from worker_hooks.tensors.shard import Replica


class SaveSource(Protocol):
    """The state that is saved."""

    def replica(self, step: int, without: Collection[str] = ()) -> Replica:
        """The replicated state as of the newest commit or, if torn but complete, of the next.

        ``without``: names of what is left out, as ranks compare them.
        """

    def position(self, step: int) -> tuple[int, int]:
        """Epoch and batch of that step, as file names count them."""

    def version(self, step: int) -> int:
        """A number that changes whenever a tensor is changed that is read for this step."""

    def why_moved(self) -> str:
        """Why what was read of accelerators may be of two steps; empty: it is of one."""

    def why_unknown(self) -> str:
        """Why the state of the newest commit is not known, whatever has changed; empty: it is."""


class StateSource(SaveSource, Protocol):
    """The state that is guarded."""

    @property
    def step(self) -> int:
        """The newest commit."""

    @property
    def page(self) -> Page | None:
        """Its status page."""

    def is_complete(self) -> bool:
        """Whether the update after the commit changed all that a step usually changes."""

    def is_copied(self) -> bool:
        """Whether the commit can be saved in spite of an update that has begun since."""

    def why_changed(self) -> str:
        """What is not as of the commit any more and cannot be saved; empty: all can."""

    def nbytes(self) -> tuple[int, int]:
        """About how large the replicated state is, and what part of it is in host memory."""

    def forget(self) -> None:
        """Write to no page any more."""

    @property
    def device(self) -> DeviceState | None:
        """Of accelerators that hold some of the state; ``None``: none does."""

    @property
    def kept(self) -> CommitPlaces | None:
        """Notes where the state lies in memory that outlives this process; ``None``: none does."""

    def settle_devices(self, grace_s: float, *, is_updated: bool) -> HeldStep:
        """Which step they hold, and why it cannot be saved."""
