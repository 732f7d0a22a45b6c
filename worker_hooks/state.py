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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from worker_hooks import orphan, resume, tft
from worker_hooks.callbacks import tell
from worker_hooks.env import ENABLE_TFT, Told
from worker_hooks.fault import Plan
from worker_hooks.feeds import Feeds
from worker_hooks.guard import Guard
from worker_hooks.ledger import Ledger, Position
from worker_hooks.loader import Batches, Feed
from worker_hooks.page import Phase
from worker_hooks.pieces import pieces_of
from worker_hooks.reducers import Reducers
from worker_hooks.sabotage import Saboteur
from worker_hooks.watch import is_left_at_will, watch_backward, watch_optimizer
from worker_hooks.witness import Witness

log = logging.getLogger("msrun")
Batch = TypeVar("Batch")

NOTHING_LEFT = (
    "all batches of a loop in epoch %d had been trained before the resume: what follows the loop "
    "runs now, without variables that the loop would have set"
)
NESTED = (
    "batches() was called within a loop over batches(): a commit has one place in the data; loop "
    "over the other loader itself"
)


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
        self._told = told = Told.read(os.environ)
        self._drill = Plan.decode(told.drill)
        self._saboteur = Saboteur.from_env(os.environ, told.rank, told.attempt)
        self._witness = Witness.from_env(os.environ, told.rank)
        path = self._save_path(ckpt_save_path)
        self._ledger = Ledger(pieces_of(given), self._facts)
        self._guard = Guard(told, self._ledger, path, self._at_dump, orphan.end)
        self.rank, self.world_size = told.rank, told.world_size
        self.epoch = 0  # as the script counts, from 0
        self.batch = 0  # handed out in the present loop
        self.batches_per_epoch: int | None = None
        self._counts_epochs = False  # epochs() is in use
        self._loop = 0  # of batches() within the epoch
        self._phase = Phase.IDLE
        self._has_updated = False
        self._has_gradients = False  # of a backward that no update has used yet
        self._loss: torch.Tensor | float | None = None
        self._loss_is_told = False
        self._is_done = False
        self._feeds = Feeds()
        self._meta = b"{}"
        self._present: object = None  # the loop over batches() that was begun last
        self._is_watching = False
        self._reducers = Reducers(self._modules)
        wants_resume = str(is_recover).lower() in {"1", "true"}
        is_wanted = tft.is_enabled(os.environ)
        welcome = self._guard.greet(wants_resume=wants_resume) if is_wanted else None
        if told.rank == 0:
            self._say_what_is_saved(is_guarded=welcome is not None, is_wanted=is_wanted, path=path)
        self._resumed: resume.Point | None = None
        folder = Path(welcome.resume) if welcome is not None and welcome.resume else None
        if welcome is None and wants_resume and path:
            folder = resume.find(path)
        if folder is not None:
            self._resumed = resume.restored(self._ledger.pieces, folder, told)
            self._reducers.expected = self._resumed.ready_orders
            self.epoch = self._resumed.epoch
            self._ledger.step = self._resumed.step
            self._ledger.usual = self._resumed.usual
            self._ledger.private.late |= self._resumed.late
            self._guard.resumed_step = self._resumed.step
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
        value = self._loss
        return float(value.item()) if isinstance(value, torch.Tensor) else value

    @loss.setter
    def loss(self, value: torch.Tensor | float) -> None:
        self._loss = value.detach() if isinstance(value, torch.Tensor) else value
        self._loss_is_told = True

    def epochs(self, count: int) -> Iterator[int]:
        """Epochs that are still to be trained, of ``count`` in all.

        Raises:
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
            self._guard.gate.pause()
            if not self._loop and not self._is_watching and self.rank == 0:
                log.warning("nothing is saved of epoch %d: loop over state.batches(loader)", epoch)
            tell(self.callbacks, "epoch_end", self)
        self.finish()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches that are still to be trained in this epoch.

        Sets the sampler's epoch if :meth:`epochs` counts them, skips what was consumed before, and
        makes every return for the next batch a commit if the state was updated: by an optimizer or,
        where there is none, by the script.
        """
        self._guard.gate.pause()
        loop, self._loop = self._loop, self._loop + 1
        point = self._resumed
        if point is not None and loop < point.loop:
            return  # this loop was over when the state was saved
        self._resumed = None
        mine = self._present = object()
        feed = self._feeds.of(loader)
        self.batches_per_epoch = feed.length
        batches = self._opened(feed, point)
        is_over, opened = point is not None and point.is_over, self.batch
        self._set_meta(feed, loop, is_over=is_over)
        self._arm(feed)
        if is_over:
            log.warning(NOTHING_LEFT, self.epoch)
            batches.close()
            return
        try:
            self._boundary()
            self._ledger.begin_loop()
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
            is_over = is_left_at_will(sys._getframe(1))  # noqa: SLF001
            raise
        finally:
            batches.close()
            if is_over and self._present is mine:  # else by an exception, perhaps within a step
                self._set_meta(feed, loop, is_over=True)
                self._enter(Phase.IDLE)
                self._boundary()

    def finish(self) -> None:
        """Training is over: the last commit, the callbacks' end. ``epochs`` and ``run`` call it."""
        self._end()
        self._guard.gate.pause()
        if self._is_done:
            return
        self._is_done = self._guard.is_done = True
        if self._saboteur is not None:
            self._saboteur.disarm()
        tell(self.callbacks, "end", self)
        if self._witness is not None and self._ledger.page is not None:
            self._witness.finish(self.step, *self._ledger.digests())

    def hold(self, error: str) -> None:
        """Stay until the state is saved, if it is to be: the script failed. Called by ``run``."""
        self._guard.raised(error)

    # --- the machine ----------------------------------------------------------------------------

    def _say_what_is_saved(self, *, is_guarded: bool, is_wanted: bool, path: str) -> None:
        """Once a run, by rank 0."""
        if not is_wanted:
            log.warning("TrainState: nothing guards this run: %s says so", ENABLE_TFT)
        elif not is_guarded and not self._told.hooks:
            log.warning(
                "TrainState: nothing guards this run; under msrun a dead rank loses nothing"
            )
        elif not is_guarded:
            log.warning("TrainState: nothing guards this state: its rank has another one")
        elif not path:
            log.warning("TrainState: no ckpt_save_path: what is saved goes to the run's log folder")

    def _save_path(self, given: str | os.PathLike[str] | None) -> str:
        offered = [getattr(callback, "ckpt_save_path", None) for callback in self.callbacks]
        if self._drill is not None and self._drill.ckpt:
            return self._drill.ckpt  # the user's own folder is none of a drill's business
        path = next((path for path in (given, *offered) if path), None)
        return "" if path is None else os.path.abspath(path)

    def _facts(self) -> dict[str, Any]:
        return {
            "loop": self._loop - 1,
            "ready_orders": self._reducers.orders(),
        }

    def _modules(self) -> list[torch.nn.Module]:
        return [module for piece in self._ledger.pieces for module in piece.modules]

    def _opened(self, feed: Feed, point: resume.Point | None) -> Batches:
        epoch = self.epoch if self._counts_epochs else None
        if point is not None:
            batches = resume.reopen(point, feed, epoch, self._ledger, self.rank)
        else:
            feed.begin(epoch)
            batches = feed.open()
        self.batch = feed.consumed
        return batches

    def _next(self, batches: Iterator[Any], feed: Feed, loop: int) -> Any:
        self._boundary()
        self._enter(Phase.DATA)
        batch = next(batches)
        if self._reducers.expected:
            self._reducers.rehearse()
        self.batch += 1
        if feed.is_stateful:
            self._set_meta(feed, loop, is_over=False)
        if self.callbacks:
            tell(self.callbacks, "step_begin", self)
        self._ledger.beat(self.epoch, self.batch, Phase.FORWARD)
        self._enter(Phase.FORWARD)
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
        if not self._is_watching:
            self._is_watching = True
            watch_backward(self._began_backward)
            for index, piece in enumerate(self._ledger.pieces):
                for optimizer in piece.optimizers:
                    watch_optimizer(optimizer, self._begin_update, self._ended_update(index))
        is_wanted = self._guard.is_on or self._witness is not None
        if is_wanted and not self._ledger.private.turn_to(feed):
            page = self._ledger.open(self.rank, self._told.attempt, feed, self._position())
            self._guard.register(page, self.step)
            os.close(page)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._ledger.enter(phase)
        if self._saboteur is not None:
            self._saboteur.at(phase, self._ledger.step + 1)

    def _began_backward(self, root: torch.Tensor) -> None:
        if not self._loss_is_told and root.numel() == 1:
            self._loss = root.detach()
        if self._witness is not None:
            self._witness.loss(self.step + 1, root)
        if self._phase is not Phase.UPDATE:  # a closure's backward is a part of the update
            self._has_gradients = True
            self._ledger.under_way(self._position())
            self._enter(Phase.BACKWARD)

    def _begin_update(self, *_: Any) -> None:
        self._guard.gate.begin_update()
        self._enter(Phase.UPDATE)

    def _ended_update(self, index: int) -> Callable[..., None]:
        def ended(*_: Any) -> None:
            self._ledger.updated(index)
            self._has_updated, self._has_gradients = True, False
            self._guard.gate.end_update()
            self._enter(Phase.UPDATED)

        return ended

    def _boundary(self) -> None:
        """The script is back for its next batch: a commit, if there was an update."""
        if self._has_updated or (self._is_training() and self._ledger.is_touched()):
            self._commit()
        self._guard.gate.pause()

    def _is_training(self) -> bool:
        """Whether changed weights are an update: for a validation they are changed for a while.

        Neither are they while gradients wait for an optimizer: those would be lost in a resume.
        """
        if self._has_gradients and any(piece.optimizers for piece in self._ledger.pieces):
            return False
        module = next(iter(self._modules()), None)
        return torch.is_grad_enabled() and (module is None or module.training)

    def _end(self) -> None:
        """Make the end of training a commit, behind which nothing is trained any more."""
        point, self._resumed = self._resumed, None
        is_due = self._has_updated or (not self._is_done and self._ledger.is_touched())
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
        self._has_updated = False
        self._reducers.learn()
        position = position or Position(self.epoch, self.batch, self._meta)
        self._guard.gate.commit(partial(self._ledger.commit, position))
        self._ledger.beat(*position[:2], self._phase)
        if self._witness is not None:
            self._witness.commit(self.step, time.monotonic())
        if self.callbacks:
            tell(self.callbacks, "step_end", self)
        self._loss_is_told = False

    def _at_dump(self) -> None:
        if self._saboteur is not None:
            self._saboteur.at_dump()
