"""What a training script makes of its model and optimizer so that nothing of them is ever lost.

    state = TrainState(model=net, optimizer=opt, scheduler=sched, ckpt_save_path="checkpoints")
    for epoch in state.epochs(5):
        for x, y in state.batches(loader):
            loss = loss_fn(model(x), y); loss.backward(); opt.step(); opt.zero_grad()

A *commit* is the moment the loop comes back for its next batch after an optimizer's update.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from worker_hooks.callbacks.graceful_exit import ExitControl, GracefulExit
from worker_hooks.callbacks.protocol import places_of, tell
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import Phase
from worker_hooks.data.feed import Feed
from worker_hooks.data.feed_cache import NESTED, NOTHING_LEFT, FeedCache
from worker_hooks.distributed.ddp_reducers import Reducers
from worker_hooks.drill.inject import FaultInjector
from worker_hooks.drill.trace import TrainingTrace
from worker_hooks.recovery import resume
from worker_hooks.recovery.rejoin import Membership
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of
from worker_hooks.training.startup import StartupOptions
from worker_hooks.training.step import StepTracker
from worker_hooks.training.torch_hooks import is_left_at_will

log = logging.getLogger("msrun")
Batch = TypeVar("Batch")


class TrainState:
    """The state of one rank's training: what it is made of, and how far it is."""

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        ckpt_save_path: str | os.PathLike[str] | None = None,
        callbacks: Iterable[Any] = (),
        is_recover: bool | int = False,
        **objects: Any,
    ) -> None:
        """Register what must survive; go on from a checkpoint if this run resumes.

        Args:
            model: a module, or a list, tuple or dict of modules; wrapped or not.
            optimizer: an optimizer, or several.
            scheduler: a learning rate scheduler, or several.
            scaler: a gradient scaler.
            ckpt_save_path: the folder dumps are written to; default: a callback's.
            callbacks: LossMonitor, TimeMonitor, TFTRegister, or anything with their methods.
            is_recover: go on from the newest verified checkpoint in ``ckpt_save_path`` even when
                msrun did not ask for it; without one, training begins at the beginning.
            objects: tensors, and anything else with ``state_dict`` and ``load_state_dict``; taken
                to be the same on all ranks.

        Raises:
            TypeError: something cannot be registered; the sentence names it.
            ValueError: a checkpoint does not fit what was registered.
            SystemExit: msrun was asked to resume and no checkpoint can be trusted.
        """
        self.callbacks = tuple(callbacks)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        given = {name: thing for name, thing in (named | objects).items() if thing is not None}
        if not given:
            raise ValueError("TrainState() has nothing to save: give model=..., optimizer=...")
        told = RankEnv.read(os.environ)
        self._saboteur = saboteur = FaultInjector.from_env(os.environ, told.rank, told.attempt)
        self._witness = witness = TrainingTrace.from_env(os.environ, told.rank)
        wishes = StartupOptions.of(self.callbacks, ckpt_save_path, told.drill)
        self._ledger = CommittedState(pieces_of(given), self._facts)
        at_dump = saboteur.at_dump if saboteur is not None else lambda: None
        self._guard = wishes.guard(told, self._ledger, at_dump)
        self.exit = ExitControl(self._guard, self.callbacks, self._ledger.pieces)
        gate = self._guard.gate
        self._under_way = StepTracker(self._ledger, gate, self._position, saboteur, witness)
        self.rank, self.world_size = told.rank, told.world_size
        self.epoch = 0  # as the script counts, from 0
        self.batch = 0  # handed out in the present loop
        self.batches_per_epoch: int | None = None
        self._counts_epochs = False  # epochs() is in use
        self._loop = 0  # of batches() within the epoch
        self._is_done = False
        self._knows_exit = False  # the script was told to leave
        self._feeds = FeedCache()
        self._feed: Feed | None = None  # of the loop that was begun last
        self._is_armed = False
        self._meta = b"{}"
        self._present: object = None  # the loop over batches() that was begun last
        self._reducers = Reducers(self._modules)
        self._resumed: resume.ResumePoint | None = None
        self._membership = Membership(self._guard, self._modules)
        wants_resume = str(is_recover).lower() in {"1", "true"}
        folder = wishes.greet(self._guard, wants_resume=wants_resume)
        if folder is not None:
            self._go_on(resume.restored(self._ledger.pieces, folder, told))
        tell(self.callbacks, "begin", self)

    # --- for the script -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The newest commit: updates that are complete, over all epochs.

        An epoch's end that changed weights itself counts, too.
        """
        return self._ledger.step

    @property
    def loss(self) -> float | None:
        """The last loss: what the script set, else what it called ``backward`` on."""
        return self._under_way.loss

    @loss.setter
    def loss(self, value: torch.Tensor | float) -> None:
        self._under_way.loss = value

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs that are still to be trained, of ``count`` in all.

        Raises:
            GracefulExit: as of :meth:`batches`.
            TypeError: ``count`` is no whole number.
            ValueError: it was called before, to its end.
        """
        if not isinstance(count, int):
            raise TypeError(f"epochs() takes the count of all epochs, not {count!r}")
        if self._is_done:
            raise ValueError("epochs() was called again: give the count of all epochs at once")
        self._counts_epochs = True
        for epoch in range(self.epoch, count):
            self.epoch, self._loop, self.batch = epoch, 0, 0
            if self._resumed is not None:
                resume.begin_epoch(self._resumed)
            self._ledger.private.begin_epoch()
            tell(self.callbacks, "epoch_begin", self)
            yield epoch
            if self._knows_exit:
                return
            self._pause()
            if not self._loop and not self._under_way.is_watched and self.rank == 0:
                log.warning("nothing is saved of epoch %d: loop over state.batches(loader)", epoch)
            tell(self.callbacks, "epoch_end", self)
        self.finish()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches that are still to be trained in this epoch.

        Sets the sampler's epoch if :meth:`epochs` counts them, skips what was consumed before, and
        makes every return for the next batch a commit if the state was updated: by an optimizer or,
        where there is none, by the script.

        Raises:
            GracefulExit: the job leaves, as somebody asked; the step is saved.
        """
        self._pause()
        loop, self._loop = self._loop, self._loop + 1
        point = self._resumed
        if point is not None and loop < point.loop:
            return  # this loop was over when the state was saved
        self._resumed = None
        mine = self._present = object()
        feed = self._feed = self._feeds.of(loader)
        feed.is_kept = self._guard.is_on and not self._guard.why_fixed
        self.batches_per_epoch = feed.length
        epoch = self.epoch if self._counts_epochs else None
        batches = resume.opened(point, feed, epoch, self._ledger, self.rank)
        self.batch, feed.place = feed.consumed, (self.epoch, loop)
        if point is not None:
            self._feeds.let_go(feed)
        is_over, opened = point is not None and point.is_over, self.batch
        may_raise = True
        self._set_meta(feed, loop, is_over=is_over)
        self._arm(feed)
        if is_over:
            log.warning(NOTHING_LEFT, self.epoch)
            batches.close(is_over=True)
            return
        try:
            self._boundary()
            self._ledger.begin_loop(self.epoch, self.batch)
            while self._present is mine:
                try:
                    batch = self._next(batches, feed, loop)
                except StopIteration:
                    is_over = True
                    if point is not None and self.batch == opened:
                        log.warning(NOTHING_LEFT, self.epoch)
                    return
                yield batch
            raise ValueError(NESTED)
        except GeneratorExit:
            is_over, may_raise = is_left_at_will(sys._getframe(1)), False  # noqa: SLF001
            raise
        finally:
            batches.close(is_over=is_over)
            if is_over and self._present is mine:  # else by an exception, perhaps within a step
                self._set_meta(feed, loop, is_over=True)
                self._under_way.enter(Phase.IDLE)
                self._boundary(may_raise=may_raise)

    @property
    def should_exit(self) -> bool:
        """For a script with its own loop: whether to leave now, asked once a step.

            while not state.should_exit:
                ...                               # one step, its update included

        To read it is the end of the step, as the return for the next batch of :meth:`batches` is.
        Read it before the first step, too, when the model is wrapped: the state is guarded from
        there on, and put back if this run resumes; ``state.step`` and, within an epoch of
        :meth:`epochs`, ``state.batch`` say where to go on. Once it is true the step is saved, on
        all ranks the same, and it stays true.
        """
        self._step_alone()
        self._knows_exit = self._pause(may_raise=False)
        return self._knows_exit

    def save(self) -> None:
        """Save a checkpoint of the newest step, by ``ModelCheckpoint``; on all ranks at one step.

        This is the end of the step, too. A step that is saved already is not saved again.
        """
        self._step_alone()
        self.exit.save(self)

    def finish(self) -> None:
        """Training is over: the last commit, the callbacks' end. ``epochs`` and ``run`` call it."""
        if self._knows_exit:
            return  # the script leaves as it was told to, and training is not over
        self._pause()
        self._end()
        self._guard.is_done = True  # first: whoever is asked to stay from now on stays here
        self._pause()
        if self._is_done:
            return
        self._is_done = True
        if self._saboteur is not None:
            self._saboteur.disarm()
        tell(self.callbacks, "end", self)
        if self._witness is not None and self._ledger.page is not None:
            self._witness.finish(self.step, *self._ledger.digests())

    def begin_run(self) -> None:
        """The training function is about to be entered for the first time. For ``run``."""
        self._membership.begin()

    def hold(self, error: str) -> bool:
        """After a failure, stay while it is saved; whether to :meth:`rejoin`. For ``run``."""
        return self._guard.raised(error)

    def rejoin(self) -> None:
        """Go on with new peers, from the checkpoint that the agent has in memory. For ``run``."""
        order, was_torn = self._membership.leave(self._reducers.forget())
        self._under_way.forget(order.attempt)
        is_whole = not was_torn and not self._ledger.is_touched()
        live = (self.step, self._guard.digest) if is_whole else None
        point = resume.restored(self._ledger.pieces, Path(order.path), self._guard.told, live)
        self._ledger.begin_again(point.step)
        self.batch, self._loop, self._present, self._is_done = 0, 0, None, False
        self._is_armed = False
        self._go_on(point)
        self.exit.rejoined()
        tell(self.callbacks, "rejoined", self)
        self._membership.join()

    # --- the machine ----------------------------------------------------------------------------

    def _go_on(self, point: resume.ResumePoint) -> None:
        """From where a checkpoint says; its replicated state is put back already."""
        self._resumed = point
        self._reducers.expect(point.ready_orders, are_none=bool(point.quick_digest))
        self.epoch = point.epoch
        self._ledger.step, self._ledger.usual = point.step, point.usual
        self._ledger.private.late |= point.late
        if not point.quick_digest:  # else it is in memory only
            self._guard.resumed_step = point.step

    def _facts(self) -> dict[str, Any]:
        return {"loop": self._loop - 1, "ready_orders": self._reducers.orders()}

    def _modules(self) -> list[torch.nn.Module]:
        return [module for piece in self._ledger.pieces for module in piece.modules]

    def _next(self, batches: Iterator[Any], feed: Feed, loop: int) -> Any:
        self._boundary()
        self._under_way.enter(Phase.DATA)
        batch = next(batches)
        if self._reducers.is_expecting:
            self._reducers.rehearse()
        self.batch += 1
        if feed.is_stateful:
            self._set_meta(feed, loop, is_over=False)
        if self.callbacks:
            tell(self.callbacks, "step_begin", self)
        self._ledger.beat(self.epoch, self.batch, Phase.FORWARD)
        self._under_way.enter(Phase.FORWARD)
        return batch

    def _set_meta(self, feed: Feed, loop: int, *, is_over: bool) -> None:
        place = self._ledger.private.place_of(feed)
        said = {"loop": loop, "is_over": is_over, "place": place, "feed": feed.meta()}
        if self._ledger.buffers.unsaved:
            said["unsaved"] = sorted(self._ledger.buffers.unsaved)
        self._meta = json.dumps(said).encode()

    def _position(self) -> Position:
        return Position(self.epoch, self.batch, self._meta)

    def _arm(self, feed: Feed) -> None:
        """Everything that will be in the state is made by now: watch it, and let it be saved."""
        self._under_way.watch()
        self._is_armed = True
        is_wanted = self._guard.is_on or self._witness is not None or places_of(self.callbacks)
        if is_wanted and not self._ledger.private.turn_to(feed):
            page = self._ledger.open(self.rank, self._guard.told.attempt, feed, self._position())
            self._guard.register(page, self.step)
            os.close(page)
        tell(self.callbacks, "armed", self)

    def _boundary(self, *, may_raise: bool = True) -> None:
        """The script is back for its next batch: a commit, if there was an update."""
        if self._under_way.is_due():
            self._commit()
        if self._guard.gate.is_shut:
            self._pause(may_raise=may_raise)

    def _pause(self, *, may_raise: bool = True) -> bool:
        """Stay as long as somebody wants it; whether to leave."""
        is_over = self._guard.gate.is_shut and self.exit.meet(self)
        if is_over and may_raise:
            raise GracefulExit
        return is_over

    def _step_alone(self) -> None:
        """The script's own loop, not one over :meth:`batches`, is at the end of a step."""
        if not self._is_armed:  # nor is there one that was begun
            feed = Feed(())
            feed.begin(None)
            self._set_meta(feed, 0, is_over=False)
            if self._resumed is not None:  # it stays: a loop over batches() may follow yet
                self.batch = self._resumed.batch
                resume.put_back(self._resumed, self._ledger, self.rank)
            self._arm(feed)
            self._ledger.begin_loop(self.epoch, self.batch)
        if self._under_way.is_due():
            if self._present is None:
                self._resumed = None
                self.batch += 1
            self._commit()
        if self._reducers.is_expecting and self._present is None:
            self._reducers.rehearse()

    def _end(self) -> None:
        """Make the end of training a commit, behind which nothing is trained any more."""
        point, self._resumed = self._resumed, None
        is_due = self._under_way.has_updated or (not self._is_done and self._ledger.is_touched())
        if point is None and not is_due:
            return
        self.batch = 0
        self._meta = json.dumps({"loop": 0 if self._counts_epochs else self._loop}).encode()
        position = self._position()._replace(epoch=self.epoch + self._counts_epochs)
        if point is None:
            self._commit(position)
        else:  # all had been trained when the state was saved
            resume.put_back(point, self._ledger, self.rank)
            self._arm(Feed(()))

    def _commit(self, position: Position | None = None) -> None:
        self._under_way.has_updated = False
        self._reducers.learn()
        position = position or Position(self.epoch, self.batch, self._meta)
        self._guard.gate.commit(partial(self._ledger.commit, position))
        self._ledger.beat(*position[:2], self._under_way.phase)
        if self._feed is not None:
            self._feed.settle()
        if self._witness is not None:
            self._witness.commit(self.step, time.monotonic())
        if self.callbacks:
            tell(self.callbacks, "step_end", self)
        self._under_way.end()
