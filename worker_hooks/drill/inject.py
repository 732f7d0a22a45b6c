"""Strikes the very process it lives in, at the moment a drill asked for, with the real thing.

Only a drill makes one; ordinary training never imports it. A mark on disk precedes each strike:
restarted attempts read the same plan and must not repeat it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from worker_hooks.contract.env import DRILL
from worker_hooks.contract.layout import DrillLayout
from worker_hooks.contract.status_page import Phase
from worker_hooks.drill.plan import LAUNCHER, Deed, DrillPlan, Fault, Moment

log = logging.getLogger("msrun")

FIRST_STEP_S = 0.02  # how long a step is taken to last before one was seen
FIRST_CALLS = 40  # as many calls of C an update is taken to make before one was seen

_MOMENTS = {
    Phase.DATA: {Moment.DATA},
    Phase.FORWARD: {Moment.FORWARD},
    Phase.BACKWARD: {Moment.BACKWARD},
    Phase.UPDATED: {Moment.COMMIT, Moment.UPDATE},  # an update that was over too soon
}


class DrillError(RuntimeError):
    """The exception a drill was asked to raise."""


class FaultInjector:
    """One rank's faults of a drill."""

    def __init__(self, layout: DrillLayout, faults: Mapping[int, Fault], attempt: int) -> None:
        """``faults``: the rank's own, by their index in the plan."""
        self._layout = layout
        self._faults = dict(faults)
        self.attempt = attempt
        self._step = 0  # under way
        self._begun = 0.0  # when that was, monotonic; 0: unknown
        self._step_s = FIRST_STEP_S
        self._calls = 0  # of C, in the update under way
        self._update_calls = FIRST_CALLS  # in the last one
        self._profile: Any = None  # what the script itself had set
        self._is_counting = False
        self._timers: list[threading.Timer] = []

    @staticmethod
    def from_env(environ: Mapping[str, str], rank: int, attempt: int) -> FaultInjector | None:
        """The saboteur of this rank; ``None`` where no drill wants anything of it any more.

        Raises:
            ValueError: the drill is unreadable.
        """
        plan = DrillPlan.decode(environ.get(DRILL, ""))
        if plan is None:
            return None
        faults = {
            index: fault
            for index, fault in enumerate(plan.faults)
            if rank == max(0, fault.rank)
            and (fault.attempt is None or fault.attempt >= attempt)  # a rank may live to see it
            and not plan.layout.struck(index).exists()
        }
        return FaultInjector(plan.layout, faults, attempt) if faults else None

    def at(self, phase: Phase, step: int) -> None:
        """The main thread enters ``phase`` of ``step``, the one that is committed next.

        Raises:
            DrillError: that was asked for.
        """
        if step != self._step:
            self._note_commit(step)
        if self._is_counting:
            self._end_count()
        moments = _MOMENTS.get(phase, ())
        for index, fault in tuple(self._faults.items()):
            if fault.attempt not in {None, self.attempt}:
                continue
            if fault.moment is Moment.UPDATE and phase is Phase.UPDATE:
                # the update before is counted, too, to know the middle of this one
                if step >= fault.step - 1 and not self._is_counting:
                    self._count(index if step >= fault.step else None, fault)
            elif step < fault.step:
                continue
            elif fault.moment is Moment.ANY:
                self._arm(index, fault)
            elif fault.moment in moments:
                self._strike(index, fault)

    def at_dump(self) -> None:
        """A dump is written or digested; called in the listener's thread."""
        for index, fault in tuple(self._faults.items()):
            if fault.moment is Moment.DUMP and fault.attempt in {None, self.attempt}:
                self._strike(index, fault)

    def disarm(self) -> None:
        """Training is over: what has not struck by now does not any more."""
        self._faults.clear()
        for timer in self._timers:
            timer.cancel()
        if self._is_counting:
            self._end_count()

    def _note_commit(self, step: int) -> None:
        now = time.monotonic()
        if self._begun:
            self._step_s = now - self._begun
        self._step, self._begun = step, now

    # --- any moment: a timer wherever the main thread is by then ----------------------------------

    def _arm(self, index: int, fault: Fault) -> None:
        del self._faults[index]
        timer = threading.Timer(fault.delay * self._step_s, self._strike_from_aside, (index, fault))
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _strike_from_aside(self, index: int, fault: Fault) -> None:
        self._strike(index, fault, aside=True)

    # --- inside an update: after a share of its calls of C, between two of its operations ---------

    def _count(self, index: int | None, fault: Fault) -> None:
        """Count the update's calls; at the fault's share of them strike, if ``index`` is given."""
        self._calls, last = 0, int(fault.delay * self._update_calls)
        self._profile, self._is_counting = sys.getprofile(), True

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            if event == "c_call":
                self._calls += 1
                if index is not None and self._calls > last:
                    self._end_count()
                    self._strike(index, fault)

        sys.setprofile(count)

    def _end_count(self) -> None:
        sys.setprofile(self._profile)
        self._is_counting = False
        self._update_calls = self._calls

    # --- the deed ---------------------------------------------------------------------------------

    def _strike(self, index: int, fault: Fault, *, aside: bool = False) -> None:
        self._faults.pop(index, None)
        pid = os.getpid() if fault.rank != LAUNCHER else self._launcher()
        if not self._claim(index, fault, pid):
            return
        match fault.deed:
            case Deed.SIGNAL | Deed.REQUEST | Deed.PREEMPT:  # the drill kills, once grace is over
                _leave_no_core()
                os.kill(pid, fault.number)
            case Deed.EXIT:
                os._exit(fault.number)
            case Deed.STOP:
                _stop(pid, fault.for_s)
            case Deed.RAISE if aside:
                _raise_in_main_thread()
            case Deed.RAISE:
                raise DrillError(fault.words)

    def _launcher(self) -> int:
        try:
            return int(self._layout.launcher.read_text())
        except (OSError, ValueError):
            return os.getppid()

    def _claim(self, index: int, fault: Fault, pid: int) -> bool:
        """Mark the fault as struck; false if it was, or if that cannot be known."""
        mark = {
            "time": time.time(),
            "at": time.monotonic(),
            "step": self._step,
            "attempt": self.attempt,
            "pid": pid,
            "fault": fault.words,
        }
        try:
            with open(self._layout.struck(index), "x") as file:
                json.dump(mark, file)
        except OSError as error:
            if not isinstance(error, FileExistsError):
                log.warning("the drill cannot strike: %s", error)
            return False
        return True


def _leave_no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _stop(pid: int, for_s: float) -> None:
    """Stop a process for a while; when this returns, it was stopped.

    Who stops and wakes it is one orphan, which ends by itself: no child of this rank that a script
    could meet, and nobody can be woken before he sleeps. Its output ends with the signal.
    """
    acts = f"kill -STOP {pid}; exec >/dev/null; sleep {for_s}; kill -CONT {pid}"
    orders = f"({acts}) </dev/null 2>/dev/null &"
    subprocess.run(["/bin/sh", "-c", orders], stdout=subprocess.PIPE, check=True)


def _raise_in_main_thread() -> None:
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident or 0), ctypes.py_object(DrillError)
    )
