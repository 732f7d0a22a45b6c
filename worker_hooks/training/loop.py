"""The loop over the training data: hands out batches and turns the returns for more into commits.

The place in the data, epoch, loop and batch, is kept here; so is where a resume continues. The
other way to a commit, for a loop that the script or a framework owns, is :meth:`DataLoop.end_step`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from worker_hooks.callbacks.graceful_exit import ExitControl, GracefulExit
from worker_hooks.callbacks.protocol import CallbackList, Training
from worker_hooks.contract.status_page import Phase
from worker_hooks.data.feed import Feed
from worker_hooks.data.feed_cache import NESTED, NOTHING_LEFT, FeedCache
from worker_hooks.distributed.ddp_reducers import Reducers
from worker_hooks.drill.observer import StepObserver
from worker_hooks.guard.guard import Guard
from worker_hooks.recovery import resume
from worker_hooks.recovery.resume import ResumePoint
from worker_hooks.script import notice, source
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import saved_state, scripts_tensors
from worker_hooks.state.replication import Replication
from worker_hooks.tensors.placements import why_gathered
from worker_hooks.training.loop_variables import LoopVariables
from worker_hooks.training.own_loop import OwnLoop
from worker_hooks.training.script_frames import advance, consumers, frames_of_script
from worker_hooks.training.step import StepTracker
from worker_hooks.training.torch_hooks import is_left_regularly
from worker_hooks.training.uncounted import UncountedSteps
from worker_hooks.training.unkept import Unkept

log = logging.getLogger("msrun")
Batch = TypeVar("Batch")
_NO_BATCH: Any = object()


class DataLoop:
    """Where one rank is in its data. ``TrainState`` owns it and passes its own calls on."""

    def __init__(
        self,
        training: Training,
        committed: CommittedState,
        guard: Guard,
        exit_control: ExitControl,
        callbacks: CallbackList,
        observers: Sequence[StepObserver],
        registered: Mapping[str, object] | None = None,
    ) -> None:
        """Begin before the first epoch.

        ``registered``: the objects that were given to ``TrainState``, by name.
        """
        self._training = training
        self._committed = committed
        self._guard = guard
        self._gate = guard.gate
        self._exit = exit_control
        self._callbacks = callbacks
        self._observers = observers
        self.tracker = StepTracker(
            committed, guard.gate, self._under_way, observers, guard.distrust, self._say
        )
        committed.settled_position = self._settled
        self.reducers = Reducers(committed.modules)
        optimizers = (one for piece in committed.pieces for one in piece.optimizers)
        self._uncounted = UncountedSteps(optimizers if guard.is_on else (), guard.say_uncounted)
        self._replication = Replication(
            *(committed.pieces, guard.report_fingerprint, guard.distrust, self._late_values),
            committed.private.script,
            committed.reading.queued,
            committed.changes.unseen_steps,
        )
        self.epoch = 0  # as the script counts, from 0
        self.batch = 0  # handed out in the current loop
        self.batches_per_epoch: int | None = None
        self._counts_epochs = False  # begin_epoch() is in use
        self._variables = LoopVariables(self._registered, committed.private.script)
        self._unkept: Unkept | None = None  # from the first loop of the run on
        self._own_loop: OwnLoop | None = None  # if this rank says what begins anew in it
        self._objects = dict(registered or {})
        self._has_committed = False  # a step of this run
        self._loops = 0  # calls of batches() in this epoch
        self._feeds = FeedCache()
        self._feed: Feed | None = None  # of the loop that was begun last
        self._current: object = None  # stands for that loop; None: no loop in this attempt
        self._meta = b"{}"  # what a resume must know of the place, as JSON
        self._renewed: Callable[[], object] = tuple  # computes it again, for the same loop
        self._begun: list[str] = []  # what it says of other loaders' workers
        self._joined = b"", b"", b"", b""  # that, the variables' text, the loss, and all as one
        self._is_armed = False
        self._is_leaving = False  # the script leaves the loop at will
        self._is_between = False  # the loop that was begun last is over
        self._armed_feed = Feed(())  # of the loop that was begun last, or none's
        self._resume_point: ResumePoint | None = None  # until training is there
        self._reshaped: set[str] = set()  # objects whose change of parameters was said

    # --- for TrainState ---------------------------------------------------------------------------

    @property
    def is_unused(self) -> bool:
        """Whether no step of this epoch was seen: there was no loop, and nothing is watched."""
        return not self._loops and not self.tracker.is_watching

    def facts(self) -> dict[str, Any]:
        """What is saved beside the replicated state; the same on all replicas."""
        return {"loop": self._loops - 1, "ready_orders": self.reducers.orders()}

    def begin_run(self, train: Callable[..., Any]) -> None:
        """The training function is about to be entered."""
        self._find_script(train)
        if self._resume_point is not None:
            resume.restore_script(self._resume_point, self._committed)

    def resume_at(self, point: ResumePoint) -> None:
        """Continue from here; the replicated state is restored already."""
        self._resume_point = point
        self._reshaped |= point.deferred
        self._replication.resumed()
        self.reducers.expect(point.ready_orders, are_none=point.folder is None)
        self.epoch = point.epoch
        self.tracker.resume_loss(point.loss)

    def restart(self) -> None:
        """The training function is entered again, in another attempt."""
        self.batch, self._loops, self._current, self._is_between = 0, 0, None, False
        self._variables.restart()
        self._is_armed = False
        self._replication.begin_again()

    def begin_epoch(self, epoch: int) -> None:
        """The script begins this epoch, and leaves it to us to count."""
        self._counts_epochs = True
        self.epoch, self._loops, self.batch = epoch, 0, 0
        self._find_script()
        point = self._resume_point
        if point is not None:
            resume.begin_epoch(point)
            resume.restore_script(point, self._committed)
        frame = sys._getframe(1)  # noqa: SLF001
        self._variables.begin_epoch(frame, None if point is None else point.variables)
        self._committed.private.begin_epoch()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """As ``TrainState.batches``."""
        asked_by = consumers(sys._getframe())  # noqa: SLF001  first: they are young
        self.pause()
        loop, self._loops = self._loops, self._loops + 1
        point = self._resume_point
        if point is not None and loop < point.loop:
            # this loop was over when the state was saved
            resume.restore_script(point, self._committed)
            self._variables.put_back(point.variables, sys._getframe(1), loop)  # noqa: SLF001
            return
        self._resume_point = None
        mine = self._current = object()
        self._is_leaving = self._is_between = False
        feed = self._feed_of(loader)
        batches = self._open(feed, loop, point)
        first_batch = -1 if point is None else self.batch
        is_over, may_raise = point is not None and point.is_over, True
        self._enter_script(sys._getframe(1), asked_by, point)  # noqa: SLF001
        del asked_by, point  # a checkpoint in memory stays there as long as it is open
        self._set_meta(feed, loop, is_over=is_over)
        self._arm(feed)
        if is_over:
            log.info(NOTHING_LEFT, self.epoch)
            batches.close(is_over=True)
            self._leave(loop)
            return
        try:
            if self.tracker.is_due(is_between=True):
                self._commit()
            self._committed.begin_loop(self.epoch, self.batch)
            self.pause()
            while self._current is mine:
                batch = self._next(batches, feed, loop)
                if batch is _NO_BATCH:
                    is_over = True
                    if self.batch == first_batch:
                        log.info(NOTHING_LEFT, self.epoch)
                    return
                yield batch
            raise ValueError(NESTED)
        except GeneratorExit:
            self._is_leaving = True
            is_over, may_raise = is_left_regularly(sys._getframe(1)), False  # noqa: SLF001
            raise
        finally:
            batches.close(is_over=is_over)
            # else an exception leaves the loop, perhaps within a step
            if is_over and self._current is mine:
                self._set_meta(feed, loop, is_over=True)
                self.tracker.enter(Phase.IDLE)
                self._boundary(may_raise=may_raise)
                self._leave(loop, may_raise=may_raise)

    def end_step(self) -> None:
        """A loop that is not one over :meth:`batches` is at the end of a step."""
        frame = sys._getframe(1)  # noqa: SLF001
        self._find_script()
        has_batches = self._committed.private.script.findings.has_batches
        if not self._is_armed:
            self._arm_without_loader(frame, is_loop=not has_batches)
        is_due = self.tracker.is_due(is_between=self._is_between)
        if is_due and self._current is None:
            if has_batches:
                self._variables.has_no_loop(frame)
            else:
                self._variables.asked(frame)
            self._say_unprotected(notice.sentences(self._variables.lost()))
            self._say_anew(frame)
        if is_due:
            if self._current is None:
                self._resume_point = None
                self.batch += 1
            self._commit()
        if self.reducers.is_expecting and self._current is None:
            self.reducers.rehearse()

    def end(self, *, is_again: bool) -> None:
        """Make the end of training a commit; no step follows it.

        ``is_again``: training had ended before; what the script changed since is no step.
        """
        point, self._resume_point = self._resume_point, None
        is_due = self.tracker.has_updated or (not is_again and self._committed.is_touched())
        if point is None and not is_due:
            return
        self.batch = 0
        self._renewed = self._set_end
        self._renewed()
        if point is None:
            self._look_at_buffers(is_commit=True)
            self._commit(self._position()._replace(epoch=self.epoch + self._counts_epochs))
            self._committed.leave_loop(self.pause)
        else:  # all had been trained when the state was saved
            resume.restore_for_loop(point, self._committed, self._training.rank)
            self._variables.put_back(point.variables, sys._getframe(1))  # noqa: SLF001
            self._arm(Feed(()))
            self._committed.leave_loop(self.pause)

    def pause(self, *, may_raise: bool = True) -> bool:
        """At a boundary: wait as long as this rank is held; whether the training is to exit.

        Raises:
            GracefulExit: it is, and ``may_raise``.
        """
        is_exiting = self._gate.needs_slow_path and self._exit.wait(self._training)
        if is_exiting and may_raise:
            raise GracefulExit
        return is_exiting

    # --- the parts --------------------------------------------------------------------------------

    def _feed_of(self, loader: Iterable[Any]) -> Feed:
        self._feed = feed = self._feeds.of(loader)
        self._find_script()
        script = self._committed.private.script
        feed.owners = script.owners
        script.exclude(each for each in feed.saved_objects if not script.is_registered(each))
        script.read_from(loader)
        return feed

    def _open(self, feed: Feed, loop: int, point: ResumePoint | None) -> Any:
        feed.is_kept = self._guard.is_on and not self._guard.not_replaceable_why
        self.batches_per_epoch = feed.length
        epoch = self.epoch if self._counts_epochs else None
        if point is not None and self._guard.env.attempt and point.ranks[0] == point.ranks[1]:
            was, now = int(point.feed.get("batch_size", feed.batch_size)), feed.batch_size
            if was != now:  # the script made its loader before its variables were put back
                raise ValueError(notice.OTHER_SIZE.format(now, was))
        batches = resume.open_data(point, feed, epoch, self._committed, self._training.rank)
        self.batch, feed.place = feed.consumed, (self.epoch, loop)
        if point is not None:
            self._feeds.release_others(feed)
        return batches

    def _next(self, batches: Iterator[Any], feed: Feed, loop: int) -> Any:
        """The next batch, or ``_NO_BATCH``."""
        self._boundary()
        self.tracker.enter(Phase.DATA)
        batch = next(batches, _NO_BATCH)
        if batch is _NO_BATCH:
            return batch
        if self.reducers.is_expecting:
            self.reducers.rehearse()
        self.batch += 1
        if feed.is_stateful:
            self._set_meta(feed, loop, is_over=False)
        self._callbacks.tell("step_begin", self._training)
        page = self._committed.private.page
        if page is not None:
            page.beat(self._committed.step, self.epoch, self.batch, Phase.FORWARD)
        self.tracker.enter(Phase.FORWARD)
        return batch

    def _leave(self, loop: int, *, may_raise: bool = True) -> None:
        """The newest loop is over, and its last step is committed."""
        self._is_between = True
        self._committed.leave_loop(partial(self.pause, may_raise=may_raise))
        self._variables.leave(loop)

    def _set_meta(self, feed: Feed, loop: int, *, is_over: bool) -> None:
        place = self._committed.private.place_of(feed)
        meta = {"loop": loop, "is_over": is_over, "place": place, "feed": feed.meta()}
        self._meta = self._committed.buffers.beside(meta)
        self._begun = feed.begun()
        self._renewed = partial(self._set_meta, feed, loop, is_over=is_over)

    def _set_end(self) -> None:
        self._meta = self._committed.buffers.beside(
            {"loop": 0 if self._counts_epochs else self._loops}
        )

    def _look_at_buffers(self, *, is_commit: bool) -> None:
        private = self._committed.private
        if private.page is not None and private.look_at_buffers(is_commit=is_commit):
            self._renewed()

    def _position(self) -> Position:
        return self._place(self._variables.text)

    def _under_way(self) -> Position:
        """The place while backward begins."""
        self._look_at_buffers(is_commit=False)
        place = self._ahead(self._place(self._variables.under_way()))
        has_room = self._committed.private.has_room(place)
        return place if has_room else self._ahead(self._position())

    def _place(self, variables: bytes) -> Position:
        meta, text, loss, joined = self._joined
        newest = self.tracker.loss_field()
        if meta is not self._meta or text is not variables or loss != newest:
            joined = self._meta[:-1] + variables + newest + b"}"
            self._joined = self._meta, variables, newest, joined
        # the same object while nothing changes: the page has it then
        return Position(self.epoch, self.batch, joined)

    def _late_values(self) -> dict[str, str]:
        private = self._committed.private
        late = (private, private.script, self._variables)
        return {name: text for each in late for name, text in each.late_values().items()}

    def _settled(self) -> Position | None:
        """The place as the commit will have it; ``None``: a variable has yet to change."""
        text = self._variables.settled()
        return None if text is None else self._ahead(self._place(text))

    def _ahead(self, position: Position) -> Position:
        """Of a step under way: a loop of the script's own counts its batch at the commit only."""
        is_own = self._current is None
        return position._replace(batch=self.batch + 1) if is_own else position

    def _registered(self) -> Iterator[torch.Tensor]:
        for piece in self._committed.pieces:
            if not piece.optimizers:  # theirs are no variables
                yield from scripts_tensors([piece]).values()
            for module in piece.modules:
                yield from module.buffers()

    def _enter_script(
        self,
        frame: FrameType,
        asked_by: Sequence[Any],
        point: ResumePoint | None,
        *,
        is_own: bool = False,
    ) -> None:
        """Let the script's variables and counts continue as its data do.

        Args:
            frame: waits for the loop's first batch, or asks whether to exit.
            asked_by: what counts or pairs the batches.
            point: where training continues, if this is where.
            is_own: the loop is the script's own.
        """
        # first: what changes is what is not as the script sets it
        self._variables.enter(frame, is_own=is_own)
        if point is not None:
            saved = point.variables
            names = ", ".join(self._variables.put_back(saved, frame))
            self._variables.continue_from(saved)
            if names and saved.is_behind:
                log.warning(notice.BEHIND, point.step, names)
            elif names and saved.of_peers:
                log.warning(notice.OF_A_PEER, self._training.rank, ", ".join(saved.of_peers))
            if saved.lacking:
                log.warning(notice.LACKING, self._training.rank, ", ".join(saved.lacking))
        for each in asked_by:
            if not isinstance(each, enumerate):
                self._say_unprotected([(notice.PAIRED.format(type(each).__name__), True)])
            elif self.batch and not advance(each, self.batch):
                log.warning(notice.COUNTS_ANEW, self.batch)
        self._variables.capture(is_last=True)
        self._say_unprotected(notice.sentences(self._variables.lost()))
        if self._unkept is None and self._may_say:
            fed = {} if self._feed is None else {"loader": self._feed.saved_objects}
            state_of = partial(saved_state, self._committed.pieces)
            script = self._committed.private.script
            self._unkept = Unkept(self._objects | fed, state_of, script)
            self._say_unprotected((e, True) for e in self._unkept.begin(frames_of_script(frame)))

    def _find_script(self, train: Callable[..., Any] | None = None) -> None:
        """Find what the script keeps for itself."""
        script = self._committed.private.script
        if not script.is_found:
            script.find(train or source.caller(sys._getframe(1)))  # noqa: SLF001

    @property
    def _may_say(self) -> bool:
        """Whether this rank says what is not protected: one for all does, and only once."""
        return self._guard.is_on and not self._guard.env.rank and not self._guard.env.attempt

    def _say_anew(self, frame: FrameType) -> None:
        """Say what begins anew in a loop of the script's own."""
        if self._own_loop is not None:
            self._say_unprotected((each, True) for each in self._own_loop.begins_anew(frame))

    def _say_changes(self) -> None:
        """Say what has changed, and is saved nowhere."""
        script = self._committed.private.script
        if self._feed is not None:  # a loop after the first death may be the first to show it
            found = self._feed.unsaved(script.is_ignored)
            self._say_unprotected(((each, True) for each in found), is_late=True)
        told = script.changes_of_data(is_first=self.batch <= 1)
        self._say_unprotected((each, True) for each in told)
        while names := script.newly_large:  # the log has them
            self._report_anew(f"`{names.pop()}`")

    def _report_anew(self, text: str) -> None:
        """Have msrun promise no more than what holds. ``text`` names what begins anew."""
        if self._guard.is_on and not self._guard.env.rank:
            texts = notice.texts_of_anew(text)
            self._guard.report_fingerprint(self._committed.step, texts, True, text, "")

    def _say_unprotected(self, told: Iterable[tuple[str, bool]], *, is_late: bool = False) -> None:
        """Have msrun say what cannot be restored.

        ``told``: sentences, and whether weights may depend on it. ``is_late``: also behind a death.

        Raises:
            SystemExit: the script is refused, because of --strict; not after the first commit.
        """
        env = self._guard.env
        if not (self._may_say or (is_late and self._guard.is_on and not env.rank)):
            return
        is_strict, refused = env.is_strict and not (self._has_committed or env.attempt), []
        for text, is_steering in told:
            if is_steering and is_strict:
                refused.append(text)
            else:
                self._guard.say_unprotected(text, is_refused=False)
                if is_steering:
                    self._report_anew(text)
        if refused:
            text = f"{'; '.join(refused)}: refused, because of --strict"
            self._guard.say_unprotected(text, is_refused=True)

    def _arm(self, feed: Feed) -> None:
        """Watch the state and let it be saved: everything that belongs to it exists by now."""
        self.tracker.watch()
        self._uncounted.end()
        self.tracker.gradients.begin_loop()
        self._is_armed = True
        has_use = self._guard.is_on or self._observers or self._callbacks.checkpoints
        self._armed_feed = feed
        is_new = self._has_new_structure(is_committed=False)
        if has_use and (not self._committed.private.switch_to(feed) or is_new):
            if self._committed.page is None:
                self._committed.private.script.begin()
            if self._guard.is_on:
                self._committed.changes.begin(self._guard.env.audit)
            self._make_page(feed)
            why = self._guard.why_held_only = why_gathered(self._committed.modules())
            if self._guard.compares:
                self._replication.training_begins(self._committed.step, why)
        self._callbacks.tell("armed", self._training)

    def _make_page(self, feed: Feed) -> None:
        env = self._guard.env
        self.tracker.page_written = self._guard.tell_page if env.nodes > 1 else None  # others copy
        page = self._committed.open(env.rank, env.attempt, feed, self._position())
        self._guard.register(page, self._committed.step)
        os.close(page)

    def _renew_page(self) -> None:
        """Make a page that has room for the present buffers, if this one has not; at a commit."""
        is_new = self._has_new_structure(is_committed=True)
        if not (self._committed.private.needs_new_page() or is_new):
            return
        self._committed.buffers.renew()
        self._committed.private.present = self._committed.step
        self._make_page(self._armed_feed)
        self._look_at_buffers(is_commit=True)

    def _has_new_structure(self, *, is_committed: bool) -> bool:
        """Whether the objects have other parameters than before, so that the page has no room.

        To enter the training function again would make the same change twice.
        """
        if not self._committed.has_new_structure(is_committed=is_committed):
            return False
        self._guard.not_replaceable_why = self._guard.not_replaceable_why or notice.RESHAPED_WHY
        self._committed.buffers.renew()
        names = [name for name in self._committed.reshaped() if name not in self._reshaped]
        self._reshaped |= set(names)
        if names and self._guard.is_on and self._guard.env.rank == 0:
            self._guard.say_unprotected(notice.RESHAPED.format(", ".join(names)), is_refused=False)
        return True

    def _arm_without_loader(self, frame: FrameType, *, is_loop: bool) -> None:
        feed = Feed(())
        feed.owners = self._committed.private.script.owners
        feed.begin(None)
        self._set_meta(feed, 0, is_over=False)
        if self._resume_point is not None:  # it stays: a loop over batches() may still follow
            self.batch = self._resume_point.batch
            resume.restore_own_loop(self._resume_point, feed, self._committed, self._training.rank)
        if is_loop:
            self._enter_script(frame, (), self._resume_point, is_own=True)
        self._arm(feed)
        if self._may_say:
            self._own_loop = OwnLoop(self._committed.private.script.is_ignored)
        self._committed.begin_loop(self.epoch, self.batch)

    def _say(self, remark: str) -> None:
        if self._training.rank == 0:
            log.warning("%s", remark)

    def _boundary(self, *, may_raise: bool = True) -> None:
        """The script is back for its next batch: commit if there was an update."""
        if self.tracker.is_due():
            self._commit()
        if self._gate.needs_slow_path:
            self.pause(may_raise=may_raise)

    def _commit(self, position: Position | None = None) -> None:
        self.tracker.has_updated = False
        if not self.reducers.has_learned:
            self._guard.promise_nothing(self.reducers.learn())
        self._look_at_script()
        if self._begun != self._armed_feed.begun():
            self._renewed()
        position = position or self._position()
        private = self._committed.private
        # at backward what has changed by then is written beside what is written now
        if not private.has_room(position, times=2):
            self._make_page(self._armed_feed)
        self._gate.commit(self._committed.commit, position, tells=self._guard.compares)
        if self._committed.changes.wants_audit:
            self._committed.audit()
        if private.page is not None:
            if self._unkept is not None:  # behind it: what is saved is that of the newest commit
                told = self._unkept.committed(self._variables.is_kept, is_first=self.batch <= 1)
                self._say_unprotected((each, True) for each in told)
            self._renew_page()
            private.page.beat(
                self._committed.step, position.epoch, position.batch, self.tracker.phase
            )
        self._has_committed = True
        if self._guard.is_on:
            self._tell_committed()
            self._gate.told()
        if self._feed is not None:
            self._feed.settle()
        for observer in self._observers:
            observer.committed(self._committed.step)
        self._callbacks.tell("step_end", self._training)
        self.tracker.end()

    def _look_at_script(self) -> None:
        """A commit: keep what the script has changed for itself."""
        self._look_at_buffers(is_commit=True)
        self._committed.private.script.look(is_commit=True)
        if self._committed.private.page is not None:
            length = self.batches_per_epoch
            at_end = length is None or self.batch >= length or self._is_leaving
            self._variables.capture(is_last=at_end or not self._has_committed)
            self._say_unprotected(notice.sentences(self._variables.lost()))
            self._say_changes()

    def _tell_committed(self) -> None:
        """Tell the agent what the new commit shows."""
        self._replication.committed(self._committed.step, compares=self._guard.compares)
        added = self.tracker.gradients.committed()
        if added and not self._committed.why_pending and not self._training.rank:
            # in any attempt: a death may have come before it was known
            self._guard.say_unprotected(added, is_refused=False)
