"""What a training script makes of its model and optimizer, so that no step of theirs is lost.

    state = TrainState(model=net, optimizer=opt, scheduler=sched, ckpt_save_path="checkpoints")
    for epoch in state.epochs(5):
        for x, y in state.batches(loader):
            loss = loss_fn(model(x), y); loss.backward(); opt.step(); opt.zero_grad()

A *commit* is the moment when the loop returns for its next batch after an optimizer's update.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from worker_hooks.callbacks.graceful_exit import ExitControl, GracefulExit
from worker_hooks.callbacks.protocol import CallbackList
from worker_hooks.checkpoint.context import CheckpointContext
from worker_hooks.checkpoint.save_plan import CheckpointError
from worker_hooks.contract import protocol
from worker_hooks.data import set_attributes
from worker_hooks.guard.exit_hooks import describe
from worker_hooks.recovery import resume
from worker_hooks.recovery.rejoin import Membership
from worker_hooks.recovery.resume import ResumePoint
from worker_hooks.script.own import OwnValues
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.state.registry import pieces_of
from worker_hooks.storage import manifest
from worker_hooks.training import startup
from worker_hooks.training.loop import DataLoop

log = logging.getLogger("msrun")
Batch = TypeVar("Batch")

SAVED_AS_LEFT = (
    "save() saves a step as its loop left it: what the script has changed since belongs to the "
    "next step, and a resume repeats it"
)


NO_STEP = (
    "in the first epoch nothing of what is registered was updated, so there is no step that could "
    "be saved, and no rank is replaced: give TrainState what is trained"
)

is_one_made = False
"""The script of this process has made a ``TrainState``: to import the class protects nothing."""


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
        """Register what must survive; load a checkpoint if this run resumes.

        Args:
            model: a module, or a list, tuple or dict of modules; wrapped or not.
            optimizer: an optimizer, or several.
            scheduler: a learning rate scheduler, or several.
            scaler: a gradient scaler.
            ckpt_save_path: the folder dumps are written to; default: a callback's.
            callbacks: LossMonitor, TimeMonitor, TFTRegister, or any object with members of
                ``worker_hooks.callbacks.protocol.Callback``.
            is_recover: resume from the newest verified checkpoint in ``ckpt_save_path`` even when
                msrun did not ask for it; without one, training begins at the beginning.
            objects: tensors, and anything else with ``state_dict`` and ``load_state_dict``; of a
                small object each rank keeps its own state, the rest is the same on all ranks.

        Raises:
            TypeError: something cannot be registered; the message names it.
            ValueError: a checkpoint does not fit what was registered.
            SystemExit: msrun was asked to resume and no checkpoint can be trusted.
        """
        global is_one_made  # noqa: PLW0603  there is one process
        is_one_made = True
        self._callbacks = CallbackList(callbacks)
        named = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        given = {name: thing for name, thing in (named | objects).items() if thing is not None}
        if not given:
            raise ValueError("TrainState() has nothing to save: give model=..., optimizer=...")
        env, self._observers = startup.read_env(os.environ)
        self.rank, self.world_size = env.rank, env.world_size
        self._committed = CommittedState(pieces_of(given), self._facts)
        self._committed.private.script.exclude([self, *given.values()])
        self._guard, folder = startup.connect(
            startup.options_of(self._callbacks, ckpt_save_path, env),
            env,
            self._committed,
            self._observers,
            wants_resume=str(is_recover).lower() in {"1", "true"},
        )
        startup.keep_memory(self._committed, self._guard)
        self.exit = ExitControl(self._guard, self._callbacks, self._committed.pieces)
        self._loop = DataLoop(
            self,
            self._committed,
            self._guard,
            self.exit,
            self._callbacks,
            self._observers,
            given,
        )
        self._membership = Membership(self._guard, self._committed.modules)
        self._is_done = False  # training is over
        self._is_exiting = False  # the script knows that it is to exit
        self.checkpoint_context = CheckpointContext(env, self._guard, self._committed)
        if folder is not None:
            pieces, welcome = self._committed.pieces, self._guard.welcome
            saved_in = "" if welcome is None else welcome.folder
            self._resume_at(
                resume.restore_replicated(
                    pieces,
                    folder,
                    env,
                    bring=self._guard.far_tensors.bring,
                    is_new=True,
                    saved_in=saved_in,
                )
            )
        self._callbacks.tell("begin", self)

    # --- for the script ---------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The newest commit: updates that are complete, over all epochs.

        What the script changes between two loops belongs to the step that follows.
        """
        return self._committed.step

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0."""
        return self._loop.epoch

    @epoch.setter
    def epoch(self, value: int) -> None:  # for a script that counts its epochs itself
        self._loop.epoch = value

    @property
    def batch(self) -> int:
        """Batches that were handed out in the current loop."""
        return self._loop.batch

    @property
    def batches_per_epoch(self) -> int | None:
        """As the loader says; ``None``: it does not, or there was no loop yet."""
        return self._loop.batches_per_epoch

    @property
    def loss(self) -> float | None:
        """The last loss: what the script set, else what it called ``backward`` on.

        It is kept at each commit. Of a loss on a device it is not, as that would wait for the
        device, nor of one that is no plain number (a tuple, a DTensor): there it is ``None`` after
        a replacement or resume, until the next ``backward``.
        """
        return self._loop.tracker.loss

    @loss.setter
    def loss(self, value: torch.Tensor | float) -> None:
        self._loop.tracker.loss = value

    @property
    def own(self) -> OwnValues:
        """Values of this rank that the script assigns, saved at each commit.

            state.own.setdefault(best=0.0)         # at the begin of train
            state.own.best = max(state.own.best, accuracy)

        Numbers, texts, tensors, arrays, random number generators, and containers of these, up to
        64 KiB each. They are there again after a replacement, a restart and a resume.
        """
        return self._committed.private.script.own

    @property
    def shared(self) -> OwnValues:
        """As :attr:`own`, of values that all ranks hold alike: a new rank is given them, too."""
        return self._committed.private.script.shared

    def ignore(self, *names: str) -> None:
        """Leave these variables of the script alone: they are neither saved nor named."""
        self._committed.private.script.ignored.update(names)

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs that are still to be trained, of ``count`` in all.

        Raises:
            GracefulExit: as :meth:`batches`.
            TypeError: ``count`` is no integer.
            ValueError: it was called before, to its end.
        """
        if not isinstance(count, int):
            raise TypeError(f"epochs() takes the count of all epochs, not {count!r}")
        if self._is_done:
            raise ValueError("epochs() was called again: give the count of all epochs at once")
        for epoch in range(self.epoch, count):
            self._loop.begin_epoch(epoch)
            self._callbacks.tell("epoch_begin", self)
            yield epoch
            if self._is_exiting:
                return
            self._loop.pause()
            if self._loop.is_unused and self.rank == 0:
                log.warning("nothing is saved of epoch %d: loop over state.batches(loader)", epoch)
            elif epoch == 0 == self.step and self.rank == 0 and self._guard.is_on:
                self._guard.say_unprotected(NO_STEP, is_refused=False)
            self._callbacks.tell("epoch_end", self)
        self.finish()

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The loader's batches that are still to be trained in this epoch.

        Sets the sampler's epoch if :meth:`epochs` counts them and skips what was consumed before.
        Every return for the next batch is a commit if the state was updated: by an optimizer or,
        where there is none, by the script.

        Raises:
            GracefulExit: the job exits on request; the step is saved.
        """
        return self._loop.batches(loader)

    @property
    def should_exit(self) -> bool:
        """For a script with its own loop: whether to exit now, to be read once a step.

            while not state.should_exit:
                ...                               # one step, its update included

        To read it is the end of the step, as the return for the next batch of :meth:`batches` is.
        Read it before the first step, too, when the model is wrapped: from then on the state is
        guarded, and it is restored if this run resumes; ``state.step`` and, within an epoch of
        :meth:`epochs`, ``state.batch`` say where to continue. When it becomes true, the step is
        saved, the same on all ranks, and it stays true.
        """
        self._loop.end_step()
        self._is_exiting = self._loop.pause(may_raise=False)
        return self._is_exiting

    def save(self) -> None:
        """Save a checkpoint of the newest step, by ``ModelCheckpoint``; on all ranks at one step.

        This is the end of the step, too. A step that is saved already is not saved again.
        """
        self._loop.end_step()
        if self._committed.is_touched():
            self._loop.tracker.say(SAVED_AS_LEFT)
        self.exit.save(self)

    def finish(self) -> None:
        """Training is over: the last commit, the callbacks' end. ``epochs`` and ``run`` call it."""
        if self._is_exiting:
            return  # the script exits on request, and training is not over
        self._loop.pause()
        self._loop.end(is_again=self._is_done)
        self._guard.is_done = True  # first: an order to hold that comes now holds this rank here
        self._loop.pause()
        if self._is_done:
            return
        self._is_done = True
        if self.rank == 0 and self.step == self._guard.resumed_step != 0:
            log.warning("training had come to its end already: step %d is the last", self.step)
        for observer in self._observers:
            observer.training_ends()
        self._callbacks.tell("end", self)
        if self._observers and self._committed.page is not None:
            digests = self._committed.digests()
            for observer in self._observers:
                observer.training_ended(self.step, *digests)

    def exclude_replacement(self, why: str) -> None:
        """Say why no rank can be replaced alone, for a loop that a framework owns.

        Args:
            why: what the script does, as the end of a sentence; before the first loop.
        """
        self._guard.not_replaceable_why = why

    # --- for run() --------------------------------------------------------------------------------

    def begin_run(self, train: Callable[..., Any]) -> None:
        """The training function is about to be entered for the first time."""
        self._membership.begin()
        self._loop.begin_run(train)
        set_attributes.note_first(self._committed.private.script.owners())

    def end_run(self) -> None:
        """The training function has returned.

        Raises:
            GracefulExit: because the job exits, and not as training is over.
        """
        self.finish()
        if self._is_exiting:
            raise GracefulExit

    def hold(self, error: Exception) -> bool:
        """After a failure, wait while the state is saved; whether to :meth:`rejoin`."""
        # a new rank would owe the same checkpoint, and find the same folder
        is_of_folder = isinstance(error.__cause__, OSError)
        is_futile = isinstance(error, CheckpointError) and (error.is_passing or is_of_folder)
        return self._guard.hold_exception(describe(error), is_futile=is_futile)

    def rejoin(self) -> None:
        """Continue with new peers, from the checkpoint that the agent has in memory."""
        order, was_torn = self._membership.leave(self._loop.reducers.forget())
        for observer in self._observers:
            observer.attempt_begins(order.attempt)
        self._loop.tracker.abandon()
        is_whole = not was_torn and self._committed.is_as_committed()
        live = (self.step, str(self._guard.digests)) if is_whole else None
        env = self._guard.env
        pieces, bring = self._committed.pieces, self._guard.far_tensors.bring
        point = resume.restore_replicated(pieces, Path(order.path), env, live, bring=bring)
        self._committed.begin_again(point.step)
        self._loop.restart()
        self._committed.private.script.rewind()
        self._is_done = False
        self._resume_at(point)
        self.exit.rejoined()
        self._callbacks.tell("rejoined", self)
        self._membership.join()

    def _facts(self) -> dict[str, Any]:
        return self._loop.facts()

    def _resume_at(self, point: ResumePoint) -> None:
        """Continue where a checkpoint says; its replicated state is restored already."""
        resume.restore_script(point, self._committed, has_objects=True)
        self._committed.resume_at(
            point.step,
            point.typical_changes,
            point.late_buffers,
            point.changing,
            point.audited,
        )
        self._loop.resume_at(point)
        env = self._guard.env
        context = self.checkpoint_context._replace(env=env)
        if point.folder is None:
            self.checkpoint_context = context._replace(memory_step=point.step)
            return
        if not point.is_in_memory:  # else it is being written, and may never be
            self._guard.resumed_step = point.step
        welcome, found = self._guard.welcome, point.saved.manifest
        known = () if welcome is None else protocol.runs_of(welcome.lineage)
        runs = manifest.past(found, known, own=env.record_id)
        is_restart = found.record_id == env.record_id
        self.checkpoint_context = context._replace(
            resumed_folder=point.folder,
            lineage=":".join(runs),
            resumed_step=welcome.resumed_step if welcome and is_restart else point.step,
        )
