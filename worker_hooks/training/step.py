"""The step under way, as torch's own hooks report it: backward, updates, the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from worker_hooks.contract.status_page import Phase
from worker_hooks.distributed import process_group
from worker_hooks.drill.observer import StepObserver
from worker_hooks.guard.gate import Gate
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.training.kept_gradients import KeptGradients
from worker_hooks.training.torch_hooks import watch_backward
from worker_hooks.training.update_watch import UpdateWatch

BETWEEN = (
    "backward runs between two updates of one step: a step in which a rank dies there cannot be "
    "saved, and training resumes from the checkpoint before: %s"
)
COMMUNICATES = (
    "an optimizer communicates while it changes weights: a step in which a rank dies there cannot "
    "be saved, and training resumes from the checkpoint before: %s"
)
NOT_COPIED = "the state of an optimizer holds more than tensors, so there is no copy of a commit"
LOOKS = 8  # updates that are looked at for that, and steps in which a reason to copy counts


class StepTracker:
    """What happened since the last commit. Only the main thread uses it."""

    def __init__(
        self,
        committed: CommittedState,
        gate: Gate,
        position: Callable[[], Position],
        observers: Sequence[StepObserver],
        unsafe: Callable[[str], None],
        say: Callable[[str], None],
    ) -> None:
        """Track nothing before :meth:`watch`.

        Args:
            gate: asked before each update.
            position: where in the data the rank is.
            observers: see the drill; ordinary training has none.
            unsafe: called with the reason when a step is seen that cannot be protected.
        """
        self.phase = Phase.IDLE
        self.has_updated = False
        self.page_written: Callable[[], None] | None = None
        """Called once the record of a step under way is on the page."""
        self.has_gradients = False  # from a backward that no update has used yet
        self.is_watching = False
        self._committed = committed
        self._gate = gate
        self._position = position
        self._observers = observers
        self._unsafe, self._say = unsafe, say
        self._said: set[str] = set()
        self._halts: dict[str, int] = {}  # why steps may halt, and the step that showed it first
        self._looks, self._begun = LOOKS, 0  # collectives that had begun before the update
        self.gradients = KeptGradients(committed.pieces)
        self._loss: torch.Tensor | float | None = None
        self._is_loss_set = False  # by the script, for this step

    @property
    def loss(self) -> float | None:
        """The last loss: what the script set, else what it called ``backward`` on."""
        value = self._loss
        return float(value.item()) if isinstance(value, torch.Tensor) else value

    @loss.setter
    def loss(self, value: torch.Tensor | float) -> None:
        self._loss = value.detach() if isinstance(value, torch.Tensor) else value
        self._is_loss_set = True

    def loss_field(self) -> bytes:
        """The last loss as a field of a JSON object, a comma in front; empty: there is none.

        Nothing waits for a device, nor for other ranks, as a DTensor would: there it is not known
        without that. A script may call anything its loss, so nothing raises, either.
        """
        value: Any = self._loss
        if value is None:
            return b""
        try:
            if isinstance(value, torch.Tensor):
                if type(value) is not torch.Tensor or not value.is_cpu or value.numel() != 1:
                    return b""
                value = value.item()
            if not isinstance(value, float) and not isinstance(value, Real):  # the first is quick
                return b""
            return b', "loss": "%s"' % float(value).hex().encode()
        except Exception:  # noqa: BLE001  a number beyond all floats, a tensor without a value
            return b""

    def resume_loss(self, text: str) -> None:
        """Training continues behind a step with this loss, of :meth:`loss_field`; empty: none."""
        self._loss = float.fromhex(text) if text else None

    def abandon(self) -> None:
        """No step is under way: the script was taken out of it, for another attempt."""
        self.phase = Phase.IDLE
        self.has_updated = self.has_gradients = self._is_loss_set = False
        self.gradients.abandon()

    def watch(self) -> None:
        """Watch backward and all registered optimizers, from the first call on."""
        if self.is_watching:
            return
        self.is_watching = True
        watch_backward(self.backward_begins)
        for index, piece in enumerate(self._committed.pieces):
            for optimizer in piece.optimizers:
                UpdateWatch(optimizer, index, self)

    def enter(self, phase: Phase) -> None:
        """The step is in this phase now."""
        self.phase = phase
        page = self._committed.private.page
        if page is not None:
            page.enter(phase)
        if self._observers:
            for observer in self._observers:
                observer.phase_begins(phase, self._committed.step + 1)

    def is_due(self, *, is_between: bool = False) -> bool:
        """Whether a commit is due.

        Weights that the script itself has changed are an update, too, with three exceptions. In a
        validation they are changed for a while only. Between two loops one rank may change them
        alone, and would count other steps than its peers; that belongs to the step that follows,
        unless it is the update that a whole loop was for. And while gradients wait for an
        optimizer, a commit would lose them at a resume.
        ``is_between``: a loop is over, and the next has yet to hand out a batch.
        """
        if self.has_updated:
            return True
        pieces = self._committed.pieces
        has_optimizers = any(piece.optimizers for piece in pieces)
        if has_optimizers and (self.has_gradients or is_between):
            return False
        if is_between and not self._committed.is_loop_without_step:
            return False
        module = next((module for piece in pieces for module in piece.modules), None)
        is_training = torch.is_grad_enabled() and (module is None or module.training)
        return is_training and self._committed.is_touched_in_loop()

    def end(self) -> None:
        """The step is committed, and the next one is under way."""
        self._is_loss_set = False

    def backward_begins(self, root: torch.Tensor) -> None:
        """Backward begins at this tensor."""
        if not self._is_loss_set and root.numel() == 1 and not root.is_complex():
            self._loss = root.detach()
        for observer in self._observers:
            observer.backward_begins(self._committed.step + 1, root)
        if self.has_updated and self._committed.page is not None:
            self.halts_amid_update(BETWEEN)
        self.gradients.backward_begins()
        if self.phase is not Phase.UPDATE:  # what a closure does after a change is the update
            self.has_gradients = True
            self._committed.under_way(self._position())
            if self.page_written is not None:
                self.page_written()
            self.enter(Phase.BACKWARD)

    def update_begins(self, index: int) -> None:
        """The optimizer of this piece is about to change weights."""
        if (device := self._committed.device) is not None:
            self._gate.wait_until(device.timeline.may_update)
        self._committed.update_begins()
        self._gate.begin_update()
        if (kept := self._committed.kept) is not None:
            kept.update_begins()
        if parts := self._committed.parts.get(index):  # of others autograd may have need yet
            torch.autograd.graph.increment_version(parts)
        if (device := self._committed.device) is not None:  # what the gate stops is not queued
            device.update_begins(self._committed.step, self._committed.why_changed)
        if self._looks and self.phase is not Phase.UPDATE:  # else a class calls that above it
            self._begun = process_group.collectives()
        self.enter(Phase.UPDATE)

    def closure_returned(self) -> None:
        """Collectives of a closure are those of its backward, not the update's."""
        if self._looks:
            self._begun = process_group.collectives()

    def update_ended(self, index: int) -> None:
        """The optimizer of this piece has changed its weights."""
        if self._looks:
            self._looks -= 1
            if process_group.collectives() > self._begun:
                self.halts_amid_update(COMMUNICATES)
        self._committed.updated(index)
        self.has_updated, self.has_gradients = True, False
        self._gate.end_update()
        self.enter(Phase.UPDATED)

    def update_is_elsewhere(self, why: str) -> None:
        """An optimizer changes weights in another thread, so no moment is known to be whole."""
        self.has_updated = True
        self._unsafe(why)
        self.say(why)

    def halts_amid_update(self, why: str) -> None:
        """If a rank dies, others wait for it with their state half changed: keep commits copied."""
        if self._committed.step > self._halts.setdefault(why, self._committed.step) + LOOKS:
            return  # it was seen what the optimizers' states hold, which takes a while
        if self._committed.are_all_tensors():
            self._committed.changes.keep_all(why)
        else:
            self.say(why % NOT_COPIED)

    def say(self, remark: str) -> None:
        """Tell the user, once."""
        if remark not in self._said:
            self._said.add(remark)
            self._say(remark)
