"""``msrun drill --marathon``: one job that lives through all kinds of faults in random order.

The drill strikes from outside with real signals, and waits until every rank trains again. What only
a rank can do to itself (an exception, an exit with 0, an interpreter that is held) it is ordered to
do by a file. When msrun itself is gone, the drill types ``msrun --resume``, as a person would.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import UsageError
from msrun.drill import table
from msrun.drill.marathon_job import TEMPORARY, Census, MarathonJob, StuckError
from msrun.drill.marathon_verdict import (
    MarathonEnd,
    MarathonOutcome,
    MarathonStrike,
    judge_marathon,
)
from msrun.drill.patterns import CATALOGUE
from msrun.drill.random_faults import GAP, MARATHON_KINDS, MarathonFault, draw_marathon
from msrun.drill.session import BROKEN_EXIT, DrillOptions, in_folder
from msrun.job.request import parse
from msrun.options.argv import scan
from msrun.terminal.progress import say
from msrun.trials.history import DrillHistory, read
from msrun.trials.trial import Command, Trial
from msrun.trials.verdict import check_reference
from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.layout import REMOVED, REPLACED, UNFINISHED
from worker_hooks.drill.plan import Deed, Fault, OrderedFault

LOOK_S = 0.005  # between two looks at what the job does
STEP_S = 0.02  # a fault strikes within this time, about a step, after its steps were made
SETTLED_STEPS = 2  # that each rank makes after a fault until the job counts as training again
PATIENCE_S = 240.0
ENDS_IN_A_ROW = 4  # so many ends of msrun without training
BUDGET = 1_000_000  # restarts and replacements: a marathon ends none of its own accord
LOG = "marathon.jsonl"
TORCHS_OWN = "torchinductor_"  # a cache that torch keeps from one job to the next
OWN_SCRIPT = CATALOGUE / "everything.py"
OWN_RANKS = 4


def drill(number: int, options: DrillOptions, environ: Mapping[str, str]) -> int:
    """Run a marathon of so many faults and show its result.

    Returns:
        0 if every promise was kept, else 1.

    Raises:
        UsageError: one sentence on what is wrong; nothing was started.
        KeyboardInterrupt: it was interrupted; everything it started is gone.
    """
    given = Command.of(scan(options.job))
    is_own = not given.program
    budget = (f"--max-restarts={BUDGET}", f"--max-replacements={BUDGET}")
    job = (f"--worker-num={OWN_RANKS}", *options.job, str(OWN_SCRIPT)) if is_own else options.job
    request = parse(job, environ)
    if request.dry_run or request.origin is not None:
        raise UsageError("msrun drill: a marathon starts from the beginning, and trains")
    command = Command.of(scan(job))
    command = command._replace(options=(*command.options, *budget))

    def run(folder: Path) -> int:
        session = _Session(folder, command, environ, request.job.world_size, number, options)
        outcome = session.run_own() if is_own else session.run_users()
        if outcome is None:
            return BROKEN_EXIT
        table.show_marathon(outcome, as_json=options.as_json)
        return BROKEN_EXIT if outcome.broken else 0

    return in_folder(run, is_kept=options.keep)


class _Session(NamedTuple):
    """A marathon, and the undisturbed run that it is compared with."""

    folder: Path
    command: Command
    environ: Mapping[str, str]
    world_size: int
    number: int  # of faults
    options: DrillOptions

    @property
    def last(self) -> Path:
        """Tells its last step to the drill's own script."""
        return self.folder / "last_step"

    def run_own(self) -> MarathonOutcome | None:
        """The drill's own script: its last step is told to it when all faults have struck."""
        command, place = self.command, self.folder / "marathon"
        options = ("--epochs=1000000000", f"--last={self.last}")
        job = command._replace(program=(*command.program, *options, f"--ckpt={place / 'ckpt'}"))
        rounds = tuple(draw_marathon(self.number, self.options.seed, self.world_size))
        ended = self._run(
            MarathonJob(place, job, self.environ, self.world_size, keeps_ckpt=True), rounds
        )
        history = read(place)
        newest = history.last_step or ended.job.newest  # a job that was given up is compared, too
        self._tell_last(newest)
        reference = command._replace(
            program=(*command.program, *options, f"--ckpt={self.folder / 'reference/ckpt'}")
        )
        whole = self._undisturbed(reference) if newest else None
        return self._judge(ended, whole or DrillHistory({}, {}), history)

    def run_users(self) -> MarathonOutcome | None:
        """A job of the user's, which ends by itself: the faults are spread over its steps."""
        whole = self._undisturbed(self.command)
        if whole is None:
            return None
        gap = min(GAP, whole.last_step / (2 * self.number))
        rounds = tuple(draw_marathon(self.number, self.options.seed, self.world_size, gap))
        place = self.folder / "marathon"
        job = MarathonJob(place, self.command, self.environ, self.world_size, keeps_ckpt=False)
        return self._judge(self._run(job, rounds), whole, read(place))

    def _undisturbed(self, command: Command) -> DrillHistory | None:
        """The run to compare with; ``None``, and said why: there is nothing to compare with."""
        trial = Trial(self.folder / "reference", command)
        ended = trial.run(self.environ, None)
        history = read(trial.folder)
        if trouble := check_reference(history, ended.exit_code, self.world_size):
            say(trouble)
            return None
        return history

    def _run(self, job: MarathonJob, rounds: Sequence[tuple[MarathonFault, ...]]) -> _Ended:
        began = time.monotonic()
        patience_s = self.options.timeout_s or PATIENCE_S
        marathon, code, trouble = Marathon(job, self.world_size, patience_s), None, ""
        try:
            with table.DrillBar() as bar:
                bar.expect(len(rounds))
                bar.doing("the job starts")
                for strike in marathon.run(rounds):
                    bar.doing(strike.words)
                    self._note(strike)
                bar.doing("the last steps")
                self._tell_last(job.newest)
                code = marathon.finish()
        except StuckError as error:
            trouble = str(error)
            if marathon.strikes:
                last = marathon.strikes[-1]
                trouble += f" (at step {last.step}: {last.words})"
        finally:
            left = job.close()
        struck = sum(len(strike.faults) for strike in marathon.strikes)
        if not trouble and struck < self.number:
            trouble = f"the job ended after {struck} of {self.number} faults: let it train longer"
        logs = [path for path in (job.folder / "logs").rglob("*") if path.is_file()]
        end = MarathonEnd(
            code,
            trouble,
            left=left,
            zombies=marathon.census.zombies,
            left_files=tuple(_left_files(job.folder)),
            log_files=len(logs),
            log_mb=sum(path.stat().st_size for path in logs) / 1e6,
            took_s=time.monotonic() - began,
        )
        return _Ended(marathon, job, end)

    def _note(self, strike: MarathonStrike) -> None:
        """Write a line for a strike as soon as the job trains again: the marathon may be killed."""
        line = {**strike._asdict(), "faults": strike.words}
        with (self.folder / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _tell_last(self, step: int) -> None:
        write_atomic(self.last, str(step).encode(), durable=False)

    def _judge(self, ended: _Ended, whole: DrillHistory, history: DrillHistory) -> MarathonOutcome:
        return judge_marathon(
            self.options.seed,
            self.number,
            ended.marathon.strikes,
            ended.job.exits,
            ended.marathon.census.growths(),
            ended.end,
            whole,
            history,
        )


class _Ended(NamedTuple):
    marathon: Marathon
    job: MarathonJob
    end: MarathonEnd


def _left_files(folder: Path) -> Iterator[str]:
    """Unfinished files, and temporary ones, that nobody has removed."""
    for path in (folder / TEMPORARY).iterdir():
        if not path.name.startswith(TORCHS_OWN):
            yield path.name
    for path in (folder / "ckpt").iterdir():
        if path.name.endswith((UNFINISHED, REMOVED)) or REPLACED in path.name:
            yield path.name


class Marathon:
    """Injects the faults one after the other."""

    def __init__(self, job: MarathonJob, world_size: int, patience_s: float) -> None:
        """``patience_s``: so long the job may do no step before the marathon gives up."""
        self._job = job
        self._world_size = world_size
        self._patience_s = patience_s
        self._number = 0  # of orders to ranks
        self._continues: list[tuple[float, int]] = []  # (when, pid): ends of stops
        self._marks: list[int] = []  # numbers of orders that have not struck
        self._ends = 0  # of msrun, that faults must still lead to
        self._ends_in_a_row = 0
        self._since = 0.0  # steps after this moment count
        self._deadline = 0.0
        self._hangs = 0  # how often the job had to be stopped since the last strike
        self.census = Census()
        self.strikes: list[MarathonStrike] = []
        self.is_over = False  # the job has ended by itself

    def run(self, rounds: Sequence[tuple[MarathonFault, ...]]) -> Iterator[MarathonStrike]:
        """Inject all faults; the job still trains afterwards, unless it is over.

        Raises:
            StuckError: the job does not train any more.
        """
        self._job.start()
        self._await(SETTLED_STEPS)
        for faults in rounds:
            self._since = time.monotonic()
            self._await(max(1, faults[0].gap))
            if self.is_over:
                return
            self._wait(time.monotonic() + faults[0].delay * STEP_S)
            yield self._strike(faults)

    def finish(self) -> int | None:
        """Wait for the end of the job; its exit code.

        Raises:
            StuckError: it does not end.
        """
        newest = -1
        while not self.is_over:
            if self._job.newest > newest:
                newest, self._deadline = self._job.newest, time.monotonic() + self._patience_s
            self._look()
        return self._job.last_exit

    def _strike(self, faults: tuple[MarathonFault, ...]) -> MarathonStrike:
        job, missed = self._job, []
        job.look()
        strike = MarathonStrike(faults, time.time(), time.monotonic(), job.newest)
        for index, fault in enumerate(faults):
            if index:
                self._wait(strike.at + fault.after_s)
            if not self._inject(fault):
                missed.append(index)
        struck_at = time.monotonic()
        strike = strike._replace(missed=tuple(missed))
        self.strikes.append(strike)  # in case that the job never trains again
        self._await(SETTLED_STEPS)
        strike = strike._replace(took_s=time.monotonic() - struck_at, hangs=self._hangs)
        self._hangs = 0
        self.strikes[-1] = strike
        self.census.look(job, self._world_size)
        return strike

    # --- one fault --------------------------------------------------------------------------------

    def _inject(self, fault: MarathonFault) -> bool:
        """Strike; false if there is no such process."""
        job, kind = self._job, MARATHON_KINDS[fault.kind]
        if kind.deed is not None:
            self._order(fault, kind.deed)
            return True
        match fault.kind:
            case "newcomer":
                return self._kill_with_newcomer(fault)
            case "stopped":
                return self._signal(job.rank(fault.ranks[0]), signal.SIGSTOP)
            case "paused":
                return self._pause(job.rank(fault.ranks[0]), fault.for_s)
            case "forkserver":
                return self._signal(job.forkserver(), signal.SIGKILL)
            case "forkserver_stopped":
                return self._signal(job.forkserver(), signal.SIGSTOP)
            case "store":
                return self._signal(job.store(), signal.SIGKILL)
            case "msrun" | "graceful":
                return self._end_msrun(fault)
            case "msrun_paused":
                return self._pause(None if job.has_ended() else job.pid, fault.for_s)
        pids = [job.rank(rank) for rank in fault.ranks]
        hit = [self._signal(pid, signal.SIGKILL) for pid in pids]
        return any(hit)

    def _order(self, fault: MarathonFault, deed: Deed) -> None:
        (rank,) = fault.ranks
        wanted = Fault(rank=rank, step=0, moment=fault.moment, deed=deed, number=0)
        order = OrderedFault(self._number, wanted)
        write_atomic(self._job.layout.order(rank), order.encode(), durable=False)
        self._marks.append(self._number)
        self._number += 1

    def _kill_with_newcomer(self, fault: MarathonFault) -> bool:
        job, (rank,) = self._job, fault.ranks
        first = job.rank(rank)
        if not self._signal(first, signal.SIGKILL):
            return False
        self._deadline = time.monotonic() + self._patience_s
        while (newcomer := job.newcomer(rank, first or 0)) is None:
            self._look()
            if self.is_over:  # the rank was killed after its training, and is not replaced
                return False
        self._wait(time.monotonic() + fault.after_s)
        return self._signal(newcomer if job.rank(rank) == newcomer else None, signal.SIGKILL)

    def _end_msrun(self, fault: MarathonFault) -> bool:
        if self._job.has_ended():
            return False
        self._ends += 1
        number = signal.SIGKILL if fault.kind == "msrun" else signal.SIGTERM
        return self._signal(self._job.pid, number)

    def _pause(self, pid: int | None, for_s: float) -> bool:
        if not self._signal(pid, signal.SIGSTOP):
            return False
        self._continues.append((time.monotonic() + for_s, pid or 0))
        return True

    def _signal(self, pid: int | None, signum: int) -> bool:
        if pid is None:
            return False
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return False
        self._since = time.monotonic()
        return True

    # --- waiting ----------------------------------------------------------------------------------

    def _await(self, steps: int) -> None:
        """Wait until every fault has struck and each rank has made so many steps since."""
        self._deadline = time.monotonic() + self._patience_s
        while not self.is_over:
            self._look()
            if not self._is_pending() and self._job.trained(steps, self._since):
                self._ends_in_a_row = 0
                return

    def _is_pending(self) -> bool:
        for number in tuple(self._marks):
            if self._job.layout.struck(number).exists():
                self._marks.remove(number)
                self._since = time.monotonic()
        return bool(self._marks or self._continues or self._ends)

    def _wait(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self._job.look()
            self._continue()
            time.sleep(min(left, LOOK_S))

    def _look(self) -> None:
        """One look at everything; resume the job if its msrun is gone, or if nothing happens."""
        self._job.look()
        self._continue()
        if time.monotonic() > self._deadline:
            self._hangs += 1
            self._job.cancel()
        if self._job.has_ended():
            self._resume()
            self._deadline = time.monotonic() + self._patience_s
        time.sleep(LOOK_S)

    def _continue(self) -> None:
        now = time.monotonic()
        for due, pid in tuple(self._continues):
            if now >= due:
                self._continues.remove((due, pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
                self._since = now

    def _resume(self) -> None:
        went = self._job.end_run(self._patience_s)
        if self._job.has_succeeded():
            self.is_over = True
            return
        self._job.exits.append(went)
        self._ends = max(0, self._ends - 1)
        self._ends_in_a_row += 1
        if self._ends_in_a_row >= ENDS_IN_A_ROW:
            raise StuckError(
                f"msrun ended {ENDS_IN_A_ROW} times in a row without a step, the last time with "
                f"exit code {went.exit_code}: {went.reason}"
            )
        self._job.resume()
        self._since = time.monotonic()
