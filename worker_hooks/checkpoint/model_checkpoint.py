"""The callback that saves checkpoints: MindSpore's ``ModelCheckpoint``.

config = CheckpointConfig(save_checkpoint_steps=100, keep_checkpoint_max=5, async_save=True)
state = TrainState(..., callbacks=[ModelCheckpoint("LeNet", "checkpoints", config)])
"""

from __future__ import annotations

import atexit
import logging
import os
from pathlib import Path

from worker_hooks.checkpoint import incarnation, numbering, schedule
from worker_hooks.checkpoint.async_writer import AsyncWriter
from worker_hooks.checkpoint.config import CheckpointConfig
from worker_hooks.checkpoint.context import CheckpointContext, CheckpointedTraining
from worker_hooks.checkpoint.finalize import WrittenParts, finalize
from worker_hooks.checkpoint.overdue import OverdueCheckpoint
from worker_hooks.checkpoint.passing_failures import PassingFailures
from worker_hooks.checkpoint.planner import PlannedCheckpoint, plan_checkpoint
from worker_hooks.checkpoint.rank_comparison import compare_ranks
from worker_hooks.checkpoint.rank_writer import write_part
from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder, SaveRules, is_passing
from worker_hooks.contract.fingerprint import bundled
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.contract.protocol import runs_of
from worker_hooks.guard.exit_hooks import after_uncaught, describe
from worker_hooks.state.replication import COMMITS, fingerprint

log = logging.getLogger("msrun")

NOT_SHARED = (
    "a ModelCheckpoint in {} cannot become complete: {}. Give it a folder that all nodes share, or "
    "leave it out"
)
STALL_S = 1800.0  # without any rank's progress, until rank 0 gives a checkpoint up


class ModelCheckpoint:
    """Saves the state regularly, and deletes old checkpoints."""

    def __init__(
        self,
        prefix: str = "CKP",
        directory: str | os.PathLike[str] | None = None,
        config: CheckpointConfig | None = None,
    ) -> None:
        """Take MindSpore's arguments.

        Args:
            prefix: folders are ``{prefix}-{epoch}_{step in the epoch}``; both count from 1.
            directory: the same for all ranks; made if needed; ``None``: the working directory.
            config: when and how; ``None``: the defaults.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: the prefix cannot be a part of a file name.
        """
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be text, not {prefix!r}")
        if not prefix or "/" in prefix or not prefix.isprintable():
            raise ValueError(f"prefix must be a part of a file's name, not {prefix!r}")
        if not isinstance(directory, str | os.PathLike | None):
            raise TypeError(f"directory must be a path, not {directory!r}")
        if not isinstance(config, CheckpointConfig | None):
            raise TypeError(f"config must be a CheckpointConfig, not {config!r}")
        self._prefix = prefix
        self._directory = Path(os.path.realpath(os.fspath(directory or ".")))
        self._config = config or CheckpointConfig()
        self._schedule: schedule.SaveSchedule | None = None
        self._writer: AsyncWriter | None = None
        self._incarnation = ""
        self._final_prefix: str | None = None  # the prefix with its number, once it is known
        self._step = 0  # saved, being saved, or resumed from
        self._is_short = False  # there is no memory for a copy
        self._warned: set[str] = set()
        # of ranks that hold different states; none: all hold one; None: not compared yet
        self._groups: tuple[tuple[int, ...], ...] | None = None
        self._failures = PassingFailures()
        self._context: CheckpointContext
        self._pid = os.getpid()

    @property
    def checkpoints(self) -> str:
        """The directory as an absolute path."""
        return str(self._directory)

    @property
    def breakpoints(self) -> str:
        """The prefix of what msrun saves there when an exception ends training; or empty."""
        return self._prefix if self._config.exception_save else ""

    # --- the moments of a training --------------------------------------------------------------

    def begin(self, state: CheckpointedTraining) -> None:
        """Everything is registered.

        Raises:
            ValueError: the configuration is impossible in this job.
        """
        self._context = context = state.checkpoint_context
        # not memory_step: nobody has saved it, and all ranks must agree on what is saved
        self._step, self._pid = context.guard.resumed_step, os.getpid()
        self._schedule, self._incarnation, self._final_prefix = None, "", None
        self._groups = None
        self._directory = Path(context.env.redirected(str(self._directory)))
        if context.env.world_size > 1:
            self._check_peers(context)
        if self._config.exception_save and not context.guard.is_on:
            after_uncaught(self._at_exception)
        if self._config.async_save:
            try:
                self._writer = AsyncWriter()
            except OSError as error:
                log.warning("async_save waits for each save: %s", error)
            else:
                atexit.register(self._at_exit)

    def step_end(self, state: CheckpointedTraining) -> None:
        """Save if a checkpoint is due.

        Raises:
            CheckpointError: it cannot be saved, or the previous one could not be saved, and the
                next one could not be, either. A disk that is full or fails ends no training: that
                is said, and the next checkpoint is tried when it is due.
        """
        self._poll()
        if self._schedule is None:
            self._schedule = self._make_schedule(state)
        if self._schedule.is_due(state.step):
            with self._failures.said(self._context.guard):
                self._save(state.step, self._reason())
        elif self._writer is not None and not (self._writer.staging.nbytes or self._is_short):
            self._background(self._plan(state.step).nbytes)

    def rejoined(self, state: CheckpointedTraining) -> None:
        """A dead rank was replaced: give up what was being saved together with it.

        Raises:
            OSError: another writer cannot be started.
        """
        self._context = state.checkpoint_context
        if self._schedule is not None:
            self._schedule.close()
        self._schedule, self._incarnation, self._groups = None, "", None
        if self._writer is not None and self._writer.is_busy:
            log.warning("the checkpoint of step %d is given up: a rank died meanwhile", self._step)
            self._writer.give_up()
            self._writer = AsyncWriter()
        self._step = 0  # as in the new rank, which does not know what was saved
        self._failures = PassingFailures()

    def armed(self, state: CheckpointedTraining) -> None:
        """After a replacement, save the checkpoint that was due when the rank died, if missing.

        By steps that is this step, if it was due. With ``async_save`` this step also replaces the
        last one that was due, whose saving was given up. By time it is this step, if the time since
        the last checkpoint has passed.

        Raises:
            CheckpointError: it cannot be saved.
        """
        step = self._context.memory_step
        if self._schedule is None and step:
            with self._failures.said(self._context.guard):
                if self._is_overdue(state, step):
                    self._save(step, f"{self._reason()}, made up for")

    def end(self, state: CheckpointedTraining) -> None:
        """Save the last step, and wait until everything is saved.

        Raises:
            CheckpointError: it cannot be saved.
        """
        try:
            self._save_newest(state, "the end of training", is_end=True)
        finally:
            if self._schedule is not None:
                self._schedule.close()
            self._close_writer()

    # --- for scripts and other callbacks ---------------------------------------------------------

    def save_now(self, state: CheckpointedTraining, reason: str = "asked for") -> None:
        """Save the newest commit, unless it is saved; all ranks must call this at the same step.

        Returns when this rank's part is on the disk; on rank 0, when the checkpoint is complete.

        Raises:
            CheckpointError: it cannot be saved, or the script has changed the state since.
        """
        self._save_newest(state, reason)

    def _save_newest(
        self, state: CheckpointedTraining, reason: str, *, is_end: bool = False
    ) -> None:
        self._finish_previous()
        step = state.step
        self._failures.raise_that_of(step)
        if step > self._step:
            if step == self._context.memory_step and self._overdue(step).is_saved(step):
                self._step = step
                return
            self._save(step, reason, is_end=is_end)
            self.wait()

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: it failed.
        """
        if self._writer is not None:
            self._done(self._writer.wait(self._check_others))

    # --- internals ------------------------------------------------------------------------------

    def _check_peers(self, context: CheckpointContext) -> None:
        env = context.env
        if self._directory.name == f"rank_{env.rank}":
            raise ValueError(
                f"directory must be the same for all ranks: give {self._directory.parent}, and "
                "each has its folder in it"
            )
        if self._config.save_checkpoint_seconds and env.local_world_size < env.world_size:
            raise ValueError(
                "save_checkpoint_seconds needs all ranks on one host, where they share rank 0's "
                "clock: give save_checkpoint_steps"
            )
        if self._config.exception_save and not context.guard.is_on:
            raise ValueError(
                "exception_save needs msrun where there are several ranks: they would save "
                "different steps"
            )

    def _poll(self) -> None:
        if self._writer is not None and self._writer.is_busy:
            self._check_shared()
            with self._failures.said(self._context.guard):
                self._done(self._writer.poll())

    def _finish_previous(self) -> None:
        with self._failures.said(self._context.guard):
            self.wait()

    def _done(self, done: WrittenParts | None) -> None:
        if done is not None:
            self._failures.saved(self._context.guard, done.folder)
        self._warn(done)

    def _warn(self, done: WrittenParts | None) -> None:
        for warning in () if done is None else done.warnings:
            if warning not in self._warned:
                log.warning("%s", warning)
            self._warned.add(warning)

    def _reason(self) -> str:
        steps = self._config.save_checkpoint_steps
        if steps:
            return f"every {steps} steps"
        return f"every {self._config.save_checkpoint_seconds} s"

    def _is_overdue(self, state: CheckpointedTraining, step: int) -> bool:
        """Whether all ranks are to save the step that they resumed from; begin the schedule."""
        every, seconds = self._config.save_checkpoint_steps, self._config.save_checkpoint_seconds
        overdue, passed_s, is_overdue = self._overdue(step), 0.0, False
        if state.rank == 0:
            overdue.remove_older_incarnations()
        if seconds:
            passed_s = overdue.passed_s() if state.rank == 0 else 0.0
            is_overdue = not overdue.is_not_due(passed_s < seconds, self._announcement_file())
        elif every:
            due = step - step % every
            was_due = due == step or (self._config.async_save and due > 0)
            is_overdue = was_due and not overdue.is_saved(due)
        self._schedule = self._make_schedule(state, 0.0 if is_overdue else passed_s)
        return is_overdue

    def _overdue(self, step: int) -> OverdueCheckpoint:
        where = self._layout(step), self._context.env, step
        return OverdueCheckpoint(*where, self._check_others, STALL_S)

    def _save(self, step: int, reason: str, *, is_end: bool = False) -> None:
        self._check_shared()
        self._finish_previous()
        # behind the last step no update follows that gradients could wait for
        if (why := self._context.committed.why_pending) and not is_end:
            log.warning("step %d is not saved: %s", step, why)
            return
        resumed = self._context.memory_step
        is_trial = 0 < resumed < step <= resumed + COMMITS
        self._failures.attempt(step)
        if self._groups is None or is_trial:
            self._groups = self._compare(step)
        if is_trial and self._groups:  # the agent is about to undo the replacement
            self._groups = None
            log.warning("step %d is not saved: the ranks differ since one was replaced", step)
            return
        # first: all ranks count a step as tried, whichever of them could not write
        self._step = step
        plan = self._plan(step)
        order = self._order(step, plan, reason)
        if order.rank == 0:
            self._failures.begin(order.layout.unfinished)
        writer = self._background(plan.nbytes)
        if writer is None:
            self._write(order, plan)
        else:
            ready = () if plan.replica is None else plan.replica.access.ready
            writer.begin(order, writer.staging.fill(plan.tensors, plan.octets, ready))

    def _background(self, nbytes: int) -> AsyncWriter | None:
        """The process that writes, with memory for a copy; ``None``: this save is waited for."""
        if self._writer is None:
            return None
        env, config = self._context.env, self._config
        is_each = self._groups or config.remove_redundancy or not config.integrated_save
        # at the first save all ranks ask; one that replaces another asks alone
        is_alone = not is_each or self._context.memory_step
        ranks = 1 if is_alone else env.local_world_size - env.rank % env.local_world_size
        if why := self._writer.shortage(nbytes, ranks):
            if not self._is_short:
                log.warning("async_save waits for its saves while memory is short: %s", why)
            self._is_short = True
            return None
        self._is_short = False
        self._writer.reserve(nbytes)
        return self._writer

    def _compare(self, step: int) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that hold different states; none: all hold the same."""
        env = self._context.env
        if env.world_size == 1:
            return ()
        layout = self._layout(step)
        try:
            committed = self._context.committed
            texts = bundled(fingerprint(committed.pieces, access=committed.reading.queued()))
            ranks = env.rank, env.world_size
            found = compare_ranks(layout, ranks, texts, self._check_others, STALL_S)
        except (OSError, TypeError) as error:
            raise CheckpointError(
                f"{layout.folder} cannot be saved: {error}", is_passing=is_passing(error)
            ) from error
        if not found.difference:
            return ()
        if env.rank == 0:
            who = "rank" if len(found.groups) == env.world_size else "group of ranks"
            log.warning("each %s saves a state of its own: %s", who, found.difference)
        return found.groups

    def _write(self, order: SaveOrder, plan: PlannedCheckpoint) -> None:
        write_part(order, plan, self._check_others)
        if order.rank == 0:
            self._done(finalize(order, self._check_others))

    def _check_others(self, _nbytes: int = 0) -> None:
        """Call while other ranks are awaited.

        Raises:
            EjectedError: one of them may be dead.
            CheckpointError: they write to other disks.
        """
        self._context.guard.gate.raise_if_ejected()
        self._check_shared()

    def _check_shared(self) -> None:
        folder, known = self._directory, self._context.guard.not_shared
        why = next((why for place, why in known.items() if folder.is_relative_to(place)), "")
        if not why:
            return
        writer, self._writer = self._writer, None
        if writer is not None:  # it would wait for other ranks
            writer.give_up()
        raise CheckpointError(NOT_SHARED.format(folder, why))

    def _plan(self, step: int) -> PlannedCheckpoint:
        env, committed = self._context.env, self._context.committed
        everyone = tuple(range(env.world_size))
        group = next((one for one in self._groups or () if env.rank in one), everyone)
        at = group.index(env.rank)
        part: tuple[int, int] | None = 0, 1
        if self._config.remove_redundancy:
            part = at, len(group)
        elif self._config.integrated_save and at:
            part = None
        epoch, _ = committed.position(step)
        return plan_checkpoint(committed, step, part, self._config.appended(epoch, step))

    def _order(
        self, step: int, plan: PlannedCheckpoint, reason: str, *, is_breakpoint: bool = False
    ) -> SaveOrder:
        env = self._context.env
        epoch, batch = self._context.committed.position(step)
        layout = self._layout(step)._replace(is_breakpoint=is_breakpoint)
        config = self._config
        return SaveOrder(
            layout=layout,
            prefix=self._find_prefix() if env.rank == 0 else self._prefix,
            step=step,
            epoch=epoch - 1,
            batch=batch,
            rank=env.rank,
            world_size=env.world_size,
            attempt=env.attempt,
            record_id=env.record_id,
            lineage=self._context.lineage,
            resumed_step=self._context.resumed_step,
            reason=reason,
            groups=self._groups or (),
            is_merged=config.integrated_save,
            share=plan.share,
            own=plan.own,
            rules=SaveRules(
                config.keep_checkpoint_max,
                config.keep_checkpoint_per_n_minutes,
                config.crc_check,
                STALL_S,
            ),
        )

    def _layout(self, step: int) -> CheckpointLayout:
        where = self._context.committed.position(step)
        return CheckpointLayout(self._directory, self._prefix, *where, self._incarnation_name())

    def _incarnation_name(self) -> str:
        self._incarnation = self._incarnation or incarnation.current(self._context.env)
        return self._incarnation

    def _find_prefix(self) -> str:
        if self._final_prefix is None:
            env, resumed = self._context.env, self._context.resumed_folder
            try:
                self._final_prefix = numbering.choose_prefix(
                    self._directory,
                    self._prefix,
                    env.record_id,
                    resumed,
                    runs_of(self._context.lineage),
                )
            except OSError as error:
                raise CheckpointError(
                    f"{self._directory} cannot be read: {error}", is_passing=is_passing(error)
                ) from error
        return self._final_prefix

    def _make_schedule(
        self, state: CheckpointedTraining, passed_s: float = 0.0
    ) -> schedule.SaveSchedule:
        config, ranks = self._config, (state.rank, state.world_size)
        periods = config.save_checkpoint_steps, config.save_checkpoint_seconds
        try:
            return schedule.make_schedule(*periods, ranks, self._announcement_file, passed_s)
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be written to: {error}") from error

    def _announcement_file(self) -> Path:
        return schedule.announcement_file(self._directory, self._prefix, self._incarnation_name())

    # --- the ends of the process ------------------------------------------------------------------

    def _at_exception(self, error: BaseException) -> None:
        """Save the state after an exception if it is whole; for a rank without peers."""
        if not isinstance(error, Exception) or os.getpid() != self._pid:
            return
        try:
            self.wait()
        except CheckpointError as failure:
            log.error("%s", failure)  # noqa: TRY400  the traceback above is the script's
        try:
            step, is_whole, why = self._context.freeze_failed()
            if not is_whole:
                log.error("the state at the exception is not saved: %s", why)
            elif step > self._step:
                plan = self._plan(step)
                order = self._order(step, plan, describe(error), is_breakpoint=True)
                self._write(order, plan)
                log.error("saved: step %d, %s", step, order.final.folder)
        except CheckpointError as failure:
            log.error("%s", failure)  # noqa: TRY400  the same

    def _at_exit(self) -> None:
        """Training did not reach its end, or the script did not call ``finish``."""
        if os.getpid() != self._pid:  # in a forked child, the writer is its parent's
            return
        try:
            if self._writer is not None:
                self._warn(self._writer.wait())
        except CheckpointError as error:
            log.error("%s", error)  # noqa: TRY400  a traceback would not help
        self._close_writer()

    def _close_writer(self) -> None:
        atexit.unregister(self._at_exit)
        background, self._writer = self._writer, None
        if background is not None:
            background.close()
