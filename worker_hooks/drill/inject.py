"""Injects a drill's faults into its own process: real signals, exits, stops and exceptions.

Ordinary training never imports this module. A mark on disk precedes each strike, because restarted
attempts read the same plan and must not repeat it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import DrillLayout
from worker_hooks.contract.status_page import Phase
from worker_hooks.drill.observer import StepObserver
from worker_hooks.drill.plan import LAUNCHER, Deed, DrillPlan, Fault, Moment, OrderedFault
from worker_hooks.machine.thread_frames import main_frame

log = logging.getLogger("msrun")

FIRST_STEP_S = 0.02  # assumed length of a step until one was measured
FIRST_CALLS = 40  # assumed count of an update's C calls until one was measured

_MOMENTS = {
    Phase.DATA: {Moment.DATA},
    Phase.FORWARD: {Moment.FORWARD},
    Phase.BACKWARD: {Moment.BACKWARD},
    Phase.UPDATED: {Moment.COMMIT, Moment.UPDATE},  # the update ended before its fault was due
}


class DrillError(RuntimeError):
    """The exception that a fault raises."""


class FaultInjector(StepObserver):
    """Injects the faults of one rank."""

    def __init__(
        self,
        layout: DrillLayout,
        faults: Mapping[int, Fault],
        attempt: int,
        orders: Path | None = None,
        *,
        is_threaded: bool = True,
    ) -> None:
        """Prepare.

        Args:
            faults: the rank's own, by their index.
            orders: where others may appear.
            is_threaded: the process may have a thread; else the kernel sends signals in time.
        """
        self._is_threaded = is_threaded
        self._layout = layout
        self._orders = orders
        self._faults = dict(faults)
        self._attempt = attempt
        self._step = 0  # under way
        self._step_began = 0.0  # monotonic; 0: unknown
        self._step_s = FIRST_STEP_S
        self._calls = 0  # C calls of the update under way
        self._update_calls = FIRST_CALLS  # C calls of the last update
        self._previous_profile: Any = None  # the script's own profile function
        self._is_counting = False
        self._timers: list[threading.Timer] = []

    @staticmethod
    def of(plan: DrillPlan, env: RankEnv, *, is_threaded: bool = True) -> FaultInjector | None:
        """The injector for this rank; ``None`` if the plan has no fault left for it."""
        faults = {
            index: fault
            for index, fault in enumerate(plan.faults)
            if env.rank == max(0, fault.rank)
            # a rank may live on into the fault's attempt
            and (fault.attempt is None or fault.attempt >= env.attempt)
            and not plan.layout.struck(index).exists()
        }
        orders = plan.layout.order(env.rank) if plan.takes_orders else None
        if not faults and orders is None:
            return None
        return FaultInjector(plan.layout, faults, env.attempt, orders, is_threaded=is_threaded)

    def attempt_begins(self, attempt: int) -> None:
        """Faults of this attempt strike from now on."""
        self._attempt = attempt
        self._step_began = 0.0  # what went by meanwhile was no step

    def phase_begins(self, phase: Phase, step: int) -> None:
        """Strike if a fault is due here.

        Raises:
            DrillError: the fault is an exception.
        """
        if step != self._step:
            self._measure_step(step)
        if self._is_counting:
            self._end_count()
        if self._orders is not None:
            self._take(self._orders)
        for index, fault in tuple(self._faults.items()):
            if fault.attempt in {None, self._attempt}:
                self._meet(index, fault, phase, step)

    def _meet(self, index: int, fault: Fault, phase: Phase, step: int) -> None:
        """Strike now, later in this step, or not at all yet."""
        if fault.moment is Moment.UPDATE and phase is Phase.UPDATE:
            # the previous update is counted, too, to know the middle of this one
            if step >= fault.step - 1 and not self._is_counting:
                self._count(index if step >= fault.step else None, fault)
        elif step < fault.step:
            return
        elif fault.moment is Moment.ANY:
            self._start_timer(index, fault)
        elif fault.moment in _MOMENTS.get(phase, ()):
            self._strike(index, fault)

    def dump_begins(self) -> None:
        """Strike if a fault is due in a dump."""
        for index, fault in tuple(self._faults.items()):
            if fault.moment is Moment.DUMP and fault.attempt in {None, self._attempt}:
                self._strike(index, fault)

    def training_ends(self) -> None:
        """Cancel the faults that have not struck."""
        self._faults.clear()
        for timer in self._timers:
            timer.cancel()
        if self._is_counting:
            self._end_count()

    def _take(self, orders: Path) -> None:
        """Read and remove the order that a drill has put there meanwhile."""
        try:
            content = orders.read_bytes()
            orders.unlink()
        except OSError:  # no order, as nearly always
            return
        number, fault = OrderedFault.decode(content)
        self._faults[number] = fault

    def _measure_step(self, step: int) -> None:
        now = time.monotonic()
        if self._step_began:
            self._step_s = now - self._step_began
        self._step, self._step_began = step, now

    # --- any moment: a timer strikes wherever the main thread is by then --------------------------

    def _start_timer(self, index: int, fault: Fault) -> None:
        del self._faults[index]
        after_s = fault.delay * self._step_s
        if not self._is_threaded and fault.deed is Deed.SIGNAL and fault.rank != LAUNCHER:
            if self._claim(index, fault, os.getpid()):
                self._correct(index, time.monotonic() + after_s)
                _disable_core_dump()
                _signal_after(fault.number, after_s)
            return
        timer = threading.Timer(after_s, self._strike, (index, fault), {"in_timer": True})
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    # --- inside an update: after a share of its C calls, so between two of its operations ---------

    def _count(self, index: int | None, fault: Fault) -> None:
        """Count the update's C calls; with an ``index``, strike at the fault's share of them."""
        self._calls, last = 0, int(fault.delay * self._update_calls)
        self._previous_profile, self._is_counting = sys.getprofile(), True

        def count(_frame: FrameType, event: str, _argument: object) -> None:
            if event == "c_call":
                self._calls += 1
                if index is not None and self._calls > last:
                    self._end_count()
                    self._strike(index, fault)

        sys.setprofile(count)

    def _end_count(self) -> None:
        sys.setprofile(self._previous_profile)
        self._is_counting = False
        self._update_calls = self._calls

    # --- the strike -------------------------------------------------------------------------------

    def _strike(self, index: int, fault: Fault, *, in_timer: bool = False) -> None:
        self._faults.pop(index, None)
        pid = os.getpid() if fault.rank != LAUNCHER else self._launcher()
        if not self._claim(index, fault, pid):
            return
        match fault.deed:
            # of a preemption, the drill itself sends SIGKILL when the grace is over
            case Deed.SIGNAL | Deed.REQUEST | Deed.PREEMPT:
                _disable_core_dump()
                os.kill(pid, fault.number)
            case Deed.EXIT:
                os._exit(fault.number)
            case Deed.STOP:
                self._correct(index, _stop(pid, fault.for_s))
            case Deed.HOLD:
                _hold_interpreter()
            case Deed.RAISE if in_timer:
                _raise_in_main_thread()
            case Deed.RAISE:
                raise DrillError(fault.words)

    def _launcher(self) -> int:
        try:
            return int(self._layout.launcher.read_text())
        except (OSError, ValueError):
            return os.getppid()

    def _claim(self, index: int, fault: Fault, pid: int) -> bool:
        """Mark the fault as struck; false if it is marked already, or if marking fails."""
        mark = {
            "time": time.time(),
            "at": time.monotonic(),
            "step": self._step,
            "attempt": self._attempt,
            "pid": pid,
            "fault": fault.words,
        }
        try:
            with open(self._layout.struck(index), "x") as file:
                json.dump(mark, file)
        except OSError as error:
            if not isinstance(error, FileExistsError):
                log.warning("the drill cannot inject its fault: %s", error)
            return False
        return True

    def _correct(self, index: int, at: float) -> None:
        """Write when a fault struck in fact: from a timer, the main thread trained meanwhile."""
        path = self._layout.struck(index)
        mark = json.loads(path.read_bytes())
        mark |= {"time": mark["time"] + at - mark["at"], "at": at}
        write_atomic(path, json.dumps(mark).encode(), durable=False)


class _SignalEvent(ctypes.Structure):
    """``struct sigevent`` of signal.h."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),  # SIGEV_SIGNAL is 0
        ("rest", ctypes.c_char * 48),
    )


def _signal_after(number: int, seconds: float) -> None:
    """Have the kernel send this process a signal; the timer is not inherited by its children."""
    libc, timer = ctypes.CDLL(None, use_errno=True), ctypes.c_void_p()
    event = _SignalEvent(None, number, 0)
    times = (ctypes.c_long * 4)(0, 0, int(seconds), max(1, int(seconds % 1 * 1e9)))
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    libc.timer_settime(timer, 0, times, None)


def _disable_core_dump() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _stop(pid: int, for_s: float) -> float:
    """Stop a process for ``for_s`` seconds; returns when it was stopped (monotonic).

    An orphaned shell waits for the stop, so SIGCONT cannot come before it, and this rank has no
    child that the script could wait for. ``run`` returns when the shell closes its output.
    """
    is_stopped = f"grep -q '^State:.T' /proc/{pid}/status"
    waits = f"until {is_stopped}; do [ -d /proc/{pid} ] || exit; sleep 0.01; done"
    commands = f"exec >/dev/null; {waits}; sleep {for_s}; kill -CONT {pid}"
    in_background = f"({commands}) </dev/null 2>/dev/null &"
    subprocess.run(["/bin/sh", "-c", in_background], stdout=subprocess.PIPE, check=True)
    at = time.monotonic()
    os.kill(pid, signal.SIGSTOP)  # neither call lets another thread of this process run
    return at


def _hold_interpreter() -> None:
    """Keep the interpreter's lock forever, without processor time.

    The call waits for a lock that it holds itself; a signal does not interrupt it, as it would
    interrupt a pause.
    """
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the interpreter's lock
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked pthread_mutex_t
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _raise_in_main_thread() -> None:
    """Raise where the main thread is, and again where that is a destructor, which ignores it."""
    previous = sys.unraisablehook

    def ignored(unraisable: sys.UnraisableHookArgs) -> None:
        if unraisable.exc_type is DrillError:
            threading.Thread(target=_raise_after, args=(ignored.__code__,), daemon=True).start()
        else:
            previous(unraisable)

    sys.unraisablehook = ignored
    _raise_soon()


def _raise_after(code: CodeType) -> None:
    """Raise once the main thread has left this code, which would ignore the exception as well."""
    while True:
        if all(each.f_code is not code for each, _ in traceback.walk_stack(main_frame())):
            return _raise_soon()
        time.sleep(0.001)


def _raise_soon() -> None:
    ident = threading.main_thread().ident
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(ident or 0), ctypes.py_object(DrillError)
    )
