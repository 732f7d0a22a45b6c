"""What a training script makes of its model and optimizer so that nothing of them is ever lost.

    state = TrainState(model=net, optimizer=opt, scheduler=sched, ckpt_save_path="checkpoints")
    for epoch in state.epochs(5):
        for x, y in state.batches(loader):
            loss = loss_fn(model(x), y); loss.backward(); opt.step(); opt.zero_grad()

A *commit* is the moment the loop comes back for its next batch after an optimizer's update.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from worker_hooks import ddp, orphan, resume, shard, tft
from worker_hooks.env import Told
from worker_hooks.fault import Plan
from worker_hooks.guard import Guard
from worker_hooks.ledger import Ledger, Position
from worker_hooks.loader import Feed
from worker_hooks.page import Phase
from worker_hooks.pieces import pieces_of
from worker_hooks.rng import TORCH
from worker_hooks.sabotage import Saboteur
from worker_hooks.watch import watch_backward, watch_optimizer
from worker_hooks.witness import Witness

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
        self._loop = 0  # of batches() within the epoch
        self._phase = Phase.IDLE
        self._has_updated = False
        self._loss: torch.Tensor | float | None = None
        self._loss_is_told = False
        self._is_done = False
        self._feeds: dict[int, Feed] = {}
        self._meta = b"{}"
        self._is_watching = False
        self._has_looked = False
        self._ddps: list[Any] = []
        self._ready_orders: Sequence[list[int] | None] = ()
        welcome = self._guard.greet(wants_resume=bool(is_recover)) if self._is_wanted() else None
        if welcome is None and told.rank == 0:
            log.warning("TrainState: nothing guards this run; start it with msrun, and msrun will")
        self._resumed: resume.Point | None = None
        folder = Path(welcome.resume) if welcome is not None and welcome.resume else None
        if welcome is None and is_recover and path:
            folder = resume.find(path)
        if folder is not None:
            self._resumed = resume.restored(self._ledger.pieces, folder, told)
            self._ready_orders = self._resumed.ready_orders
            self.epoch = self._resumed.epoch
            self._ledger.step = self._resumed.step
            self._ledger.usual = self._resumed.usual
            self._guard.resumed_step = self._resumed.step
        for callback in self.callbacks:
            _call(callback, "begin", self)

    # --- for the script -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The newest commit: optimizer updates that are complete, over all epochs."""
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
        """Epochs that are still to be trained, of ``count`` in all."""
        for epoch in range(self.epoch, count):
            self.epoch, self._loop, self.batch = epoch, 0, 0
            for callback in self.callbacks:
                _call(callback, "epoch_begin", self)
            yield epoch
            self._boundary()
            for callback in self.callbacks:
                _call(callback, "epoch_end", self)
        self.finish()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches that are still to be trained in this epoch.

        Sets the sampler's epoch, skips what was consumed before, and makes every return for the
        next batch a commit if an optimizer has updated.
        """
        self._boundary()
        loop, self._loop = self._loop, self._loop + 1
        point = self._resumed
        if point is not None and loop < point.loop:
            return  # this loop was over when the state was saved
        self._resumed = None
        feed = self._feeds.setdefault(id(loader), Feed(loader))
        self.batches_per_epoch = feed.length
        if point is None:
            feed.begin(self.epoch)
            self.batch = 0
            batches = feed.open()
        else:
            batches = resume.reopen(point, feed, self.epoch, self._ledger, self.rank)
            self.batch = point.batch
        self._set_meta(feed, loop, is_over=False)
        self._arm(feed)
        if point is not None and point.is_over:
            batches.close()
            return
        try:
            while True:
                self._boundary()
                self._enter(Phase.DATA)
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                if self._ready_orders:
                    self._rehearse()
                self.batch += 1
                if feed.is_stateful:
                    self._set_meta(feed, loop, is_over=False)
                for callback in self.callbacks:
                    _call(callback, "step_begin", self)
                self._enter(Phase.FORWARD)
                yield batch
        finally:
            self._set_meta(feed, loop, is_over=True)
            batches.close()
            self._enter(Phase.IDLE)
            if self._has_updated and self._ledger.is_complete():
                self._boundary()  # the script left its loop between an update and the next batch

    def commit(self) -> None:
        """Make the present moment a commit, in a loop that does not use :meth:`batches`."""
        self._boundary()

    def finish(self) -> None:
        """Training is over: the last commit, the callbacks' end. ``epochs`` and ``run`` call it."""
        self._boundary()
        if self._is_done:
            return
        self._is_done = self._guard.is_done = True
        if self._saboteur is not None:
            self._saboteur.disarm()
        for callback in self.callbacks:
            _call(callback, "end", self)
        if self._witness is not None and self._ledger.page is not None:
            self._testify(self._witness)

    def hold(self, error: str) -> None:
        """Stay until the state is saved, if it is to be: the script failed. Called by ``run``."""
        self._guard.raised(error)

    # --- the machine ----------------------------------------------------------------------------

    def _is_wanted(self) -> bool:
        return tft.is_enabled(os.environ)

    def _save_path(self, given: str | os.PathLike[str] | None) -> str:
        offered = [getattr(callback, "ckpt_save_path", None) for callback in self.callbacks]
        if self._drill is not None and self._drill.ckpt:
            return self._drill.ckpt  # the user's own folder is none of a drill's business
        path = next((path for path in (given, *offered) if path), None)
        return "" if path is None else os.path.abspath(path)

    def _facts(self) -> dict[str, Any]:
        return {
            "loop": self._loop - 1,
            "ready_orders": [ddp.ready_order(one) for one in self._ddps],
        }

    def _rehearse(self) -> None:
        """Before the first step after a resume: gradients are summed in the order they were."""
        orders, self._ready_orders = self._ready_orders, ()
        self._ddps = ddp.find_all(self._modules())
        for one, order in zip(self._ddps, orders, strict=False):
            ddp.rehearse(one, order)

    def _modules(self) -> list[torch.nn.Module]:
        return [module for piece in self._ledger.pieces for module in piece.modules]

    def _learn(self) -> None:
        if not self._has_looked:
            self._has_looked = True
            self._ddps = ddp.find_all(self._modules())
        for one in self._ddps:
            ddp.learn(one)

    def _testify(self, witness: Witness) -> None:
        """For a drill: what this rank has come to."""
        seen = hashlib.sha256()
        buffers = {entry.name for entry in self._ledger.buffers.entries}
        for entry, octets in self._ledger.private(self.step):
            if entry.name in buffers or entry.name == TORCH:
                seen.update(octets)  # what only unseeded sources drew differs between any two runs
        replicated = shard.digest(self._ledger.replica(self.step), lambda _: None)
        witness.finish(self.step, replicated, seen.hexdigest())

    def _set_meta(self, feed: Feed, loop: int, *, is_over: bool) -> None:
        said = {"loop": loop, "is_over": is_over, "feed": feed.meta()}
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
        if is_wanted and not self._ledger.is_open_for(feed):
            page = self._ledger.open(self.rank, self._told.attempt, feed, self._position())
            self._guard.register(page, self.step)
            os.close(page)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._ledger.beat(self._position(), phase)
        if self._saboteur is not None:
            self._saboteur.at(phase, self._ledger.step + 1)

    def _began_backward(self, root: torch.Tensor) -> None:
        if not self._loss_is_told and root.numel() == 1:
            self._loss = root.detach()
        if self._witness is not None:
            self._witness.loss(self.step + 1, root)
        if self._phase is not Phase.UPDATE:  # a closure's backward is a part of the update
            self._ledger.under_way(self._position())
            self._enter(Phase.BACKWARD)

    def _begin_update(self) -> None:
        self._guard.gate.begin_update()
        self._enter(Phase.UPDATE)

    def _ended_update(self, index: int) -> Callable[[], None]:
        def ended() -> None:
            self._ledger.updated(index)
            self._has_updated = True
            self._guard.gate.end_update()
            self._enter(Phase.UPDATED)

        return ended

    def _boundary(self) -> None:
        """The script is back for its next batch: a commit, if there was an update."""
        if not self._has_updated:
            self._guard.gate.pause()
            return
        self._has_updated = False
        self._learn()
        self._guard.gate.commit(lambda: self._ledger.commit(self._position()))
        if self._witness is not None:
            self._witness.commit(self.step, time.monotonic())
        for callback in self.callbacks:
            _call(callback, "step_end", self)
        self._loss_is_told = False
        self._guard.gate.pause()

    def _at_dump(self) -> None:
        if self._saboteur is not None:
            self._saboteur.at_dump()


def _call(callback: Any, moment: str, state: TrainState) -> None:
    method = getattr(callback, moment, None)
    if method is not None:
        method(state)
