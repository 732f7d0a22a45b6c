"""``msrun drill``: injects faults into a job and proves that nothing was lost.

The job runs once undisturbed, then once for each drill, always from the beginning and in folders of
its own; every rank's results are compared bit for bit. A drill kills or stops ranks, or requests
the job's exit as a person does (``--graceful``) or as Slurm and Kubernetes do before they kill
everything (``--preempt``); then ``msrun --resume`` continues it.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.spec.job_spec import UsageError
from agent.workers.processes import become_subreaper
from msrun.cluster.namespaces import ClusterError, refusal
from msrun.drill import fault_options, table
from msrun.drill.fault_options import FaultOrder
from msrun.drill.random_faults import RandomFaults, draw
from msrun.job.request import parse
from msrun.options.argv import scan
from msrun.terminal.progress import say
from msrun.terminal.table import show_json
from msrun.trials.history import DrillHistory, read
from msrun.trials.node_fault import AnyFault, NodeDeed, NodesOfDrill
from msrun.trials.node_trial import NodesTrial, meeting
from msrun.trials.trial import Command, Trial
from msrun.trials.verdict import (
    TrialOutcome,
    check_reference,
    judge,
    why_not_deterministic,
)
from worker_hooks.drill.plan import Deed, Fault

RESTARTS = 3  # unless the user sets a number: several faults may strike in one drill
SLOWDOWN = 10  # a drill may take so many times as long as the undisturbed run ...
SLACK_S = 60.0  # ... plus this
BROKEN_EXIT = 1


class DrillOptions(NamedTuple):
    """What the user wants, whatever the faults are."""

    job: tuple[str, ...] = ()  # words after ``msrun``: the job's, or options alone
    seed: int = 0
    timeout_s: float | None = None  # of each run, or of a marathon without a step
    as_json: bool = False
    keep: bool = False
    size: NodesOfDrill = NodesOfDrill(1)


def drill(
    drills: Sequence[FaultOrder | RandomFaults], options: DrillOptions, environ: Mapping[str, str]
) -> int:
    """Run the drills and show their results.

    Returns:
        0 if every promise was kept, else 1.

    Raises:
        UsageError: one sentence on what is wrong; nothing was started.
        KeyboardInterrupt: it was interrupted; everything it started is gone.
    """
    if not drills:
        raise UsageError(
            "msrun drill: no fault is given: use --kill, --stop, --graceful, --preempt, --cut, "
            "--poweroff, --random or --faults"
        )
    command, size = Command.of(scan(options.job)), options.size
    of_node_0 = (*meeting(size.nodes), "--node-rank=0") if size.nodes > 1 else ()
    request = parse(command.words(of_node_0) if of_node_0 else options.job, environ)
    if request.dry_run:
        raise UsageError("msrun drill: a dry run trains nothing to compare: remove --dry-run")
    if request.origin is not None:
        raise UsageError("msrun drill: its runs start from the beginning: remove --resume")
    world_size = request.job.world_size
    if size.nodes > 1:
        drills = [*map(fault_options.on_nodes, drills)]
    fault_options.check(drills, world_size, size.nodes)
    if size.nodes > 1 and (why := refusal()):
        raise UsageError(f"msrun drill: {why}, or leave out --nodes")
    if not request.job.dump.restarts_explicit:
        command = command._replace(options=(*command.options, f"--max-restarts={RESTARTS}"))
    return in_folder(
        lambda folder: _Session(
            folder, command, environ, world_size, drills, options, bool(request.job.shadows)
        ).run(),
        is_kept=options.keep,
    )


def in_folder(drills: Callable[[Path], int], *, is_kept: bool) -> int:
    """Run drills in a new folder, which stays if it is to be kept or their exit code is not 0.

    Returns:
        their exit code.

    Raises:
        KeyboardInterrupt: they were interrupted; everything they started is gone.
    """
    folder = Path(tempfile.mkdtemp(prefix="msrun-drill-"))
    become_subreaper()
    try:
        with _stoppable():
            code = drills(folder)
            is_kept = is_kept or code != 0
            return code
    finally:
        if is_kept:
            say(f"logs of the drills are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and a closed terminal end a drill as Ctrl-C does."""
    before = {
        signum: signal.signal(signum, signal.default_int_handler)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


class _Session(NamedTuple):
    """The runs of one ``msrun drill``, one after the other."""

    folder: Path
    command: Command
    environ: Mapping[str, str]
    world_size: int
    drills: Sequence[FaultOrder | RandomFaults]
    options: DrillOptions
    has_shadows: bool = False

    def run(self) -> int:
        """Run all drills and show their results; the exit code."""
        with table.DrillBar() as bar:
            bar.doing("the undisturbed run")
            trial = self._trial(self.folder / "reference")
            try:
                ended = trial.run(self.environ, self.options.timeout_s)
            except ClusterError as error:
                why = f"msrun drill: the nodes of this drill cannot be made: {error}"
                raise UsageError(why) from error
            reference = read(trial.folder)
            trouble = check_reference(reference, ended.exit_code, self.world_size)
            orders = () if trouble else tuple(self._orders(reference.last_step))
            bar.expect(len(orders) + 1)
            within_s = self.options.timeout_s or SLOWDOWN * ended.took_s + SLACK_S
            outcomes = []
            for number, order in enumerate(orders, 1):
                bar.doing(order.words)
                outcomes.append(self._drill(number, order, reference, within_s))
            doubt = ""
            if any(outcome.differs for outcome in outcomes):
                bar.doing("the undisturbed run once more")
                doubt = self._compare_again(reference, within_s)
        facts = {
            "steps": reference.last_step,
            "took_s": ended.took_s,
            "trouble": trouble,
            "not_deterministic": doubt,
        }
        self._show(facts, outcomes)
        return BROKEN_EXIT if trouble or any(outcome.broken for outcome in outcomes) else 0

    def _compare_again(self, reference: DrillHistory, within_s: float) -> str:
        """Why the undisturbed run is no measure; empty: it is one, or does not end once more."""
        trial = self._trial(self.folder / "reference_again")
        trial.run(self.environ, within_s)
        return why_not_deterministic(reference, read(trial.folder))

    def _orders(self, steps: int) -> Iterator[FaultOrder]:
        for drill in self.drills:
            if isinstance(drill, FaultOrder):
                yield drill
            else:
                yield from map(FaultOrder, self._draw(drill, steps))

    def _draw(self, lots: RandomFaults, steps: int) -> tuple[tuple[AnyFault, ...], ...]:
        nodes = self.options.size.nodes
        return draw(lots, self.world_size, steps, nodes, has_shadows=self.has_shadows)

    def _trial(self, folder: Path, faults: Sequence[AnyFault] = ()) -> Trial | NodesTrial:
        size = self.options.size
        if size.nodes > 1:
            return NodesTrial(folder, self.command, size, faults)
        return Trial(folder, self.command, [one for one in faults if isinstance(one, Fault)])

    def _drill(
        self, number: int, order: FaultOrder, reference: DrillHistory, within_s: float
    ) -> TrialOutcome:
        trial = self._trial(self.folder / f"{number:03}", order.faults)
        preemptions = {Deed.PREEMPT, NodeDeed.PREEMPT}
        graces = (fault.grace_s for fault in order.faults if fault.deed in preemptions)
        ended = trial.run(self.environ, within_s + sum(graces))
        outcome = judge(
            order.faults,
            reference,
            read(trial.folder),
            exit_code=ended.exit_code,
            departures=ended.departures,
            left=ended.left,
            took_s=ended.took_s,
        )
        if not outcome.broken and not self.options.keep:
            shutil.rmtree(trial.folder, ignore_errors=True)  # dumps are as large as the state
        return outcome

    def _show(self, reference: dict[str, object], outcomes: Sequence[TrialOutcome]) -> None:
        if self.options.as_json:
            show_json(table.as_json(reference, outcomes))
            return
        if reference["trouble"]:
            say(str(reference["trouble"]))
        else:
            table.show(outcomes)
            if reference["not_deterministic"]:
                say(str(reference["not_deterministic"]))
