"""Faults strike for real, once, where they were asked to; witnesses write what can be compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.jobs import poll

from worker_hooks.contract.env import DRILL, RankEnv
from worker_hooks.contract.layout import DrillLayout
from worker_hooks.contract.status_page import Phase
from worker_hooks.drill import inject, trace
from worker_hooks.drill.inject import DrillError, FaultInjector
from worker_hooks.drill.plan import LAUNCHER, Deed, DrillPlan, Fault, Moment, OrderedFault
from worker_hooks.drill.trace import TrainingTrace
from worker_hooks.training.startup import read_env

ROOT = Path(__file__).parents[4]
STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.UPDATED)

# Plays a rank: five phases a step, an "update" of 200 calls of C, each noted in a file. A long step
# waits for its fault, which a busy machine may have strike late.
RANK = """
import os, sys, time
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import Phase
from worker_hooks.drill import trace
from worker_hooks.drill.inject import FaultInjector
from worker_hooks.drill.plan import DrillPlan
env = RankEnv.read(os.environ)._replace(rank=int(sys.argv[1]), attempt=int(sys.argv[2]))
injector = FaultInjector.of(DrillPlan.decode(env.drill), env)
said = open(sys.argv[3], "a", buffering=1)
for step in range(1, 7):
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE, Phase.UPDATED):
        print(step, phase.name, file=said)
        if injector: injector.phase_begins(phase, step)
        if phase is Phase.UPDATE:
            def update():
                for number in range(200): os.getpid()
                print(step, "DONE", file=said)
            update()
        elif phase is Phase.DATA:
            ends = time.monotonic() + (20 if str(step) == os.environ.get("LONG_STEP") else 0.02)
            while time.monotonic() < ends: time.sleep(0.001)
"""

# Besides, a thread that writes as long as it may run, and a handler of signals.
BESIDE = """
import signal, sys, threading, time
signal.signal(signal.SIGUSR1, lambda *_: None)
beside = open(sys.argv[4], "a", buffering=1)
def write():
    while True: print("beside", file=beside); time.sleep(0.001)
threading.Thread(target=write, daemon=True).start()
"""


def plan(folder, *faults):
    return DrillPlan(str(folder), "", faults)


def rank_env(rank, attempt=0):
    return RankEnv(rank, 8, attempt, "run", "", "")


def play(tmp_path, *faults, rank=0, attempt=0, long_step=0):
    """The rank's exit code and the last thing it said."""
    said = tmp_path / "said"
    told = {**os.environ, DRILL: plan(tmp_path, *faults).encode(), "PYTHONPATH": str(ROOT)}
    told["LONG_STEP"] = str(long_step)
    done = subprocess.run(
        [sys.executable, "-S", "-c", RANK, str(rank), str(attempt), said],
        env=told,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        timeout=30,
        check=False,
    )
    return done.returncode, said.read_text().splitlines()[-1], done.stderr.decode()


def mark(tmp_path, index=0):
    return json.loads(DrillLayout(tmp_path).struck(index).read_text())


@pytest.mark.parametrize(
    ("moment", "last"),
    [
        (Moment.DATA, "4 DATA"),
        (Moment.FORWARD, "4 FORWARD"),
        (Moment.BACKWARD, "4 BACKWARD"),
        (Moment.UPDATE, "4 UPDATE"),  # begun and not DONE: inside of it
        (Moment.COMMIT, "4 UPDATED"),
    ],
)
def test_a_rank_dies_of_the_signal_in_the_phase(tmp_path, moment, last):
    code, said, _ = play(tmp_path, Fault(0, 4, moment))
    assert (code, said) == (-signal.SIGKILL, last)
    assert mark(tmp_path)["step"] == 4


def test_a_moment_between_phases_is_a_share_of_the_step_before(tmp_path):
    code, said, _ = play(tmp_path, Fault(0, 4, Moment.ANY, delay=0.5), long_step=4)
    assert (code, said) == (-signal.SIGKILL, "4 DATA")


@pytest.mark.parametrize(
    ("deed", "number", "code"),
    [
        (Deed.SIGNAL, signal.SIGSEGV, -signal.SIGSEGV),
        (Deed.SIGNAL, signal.SIGABRT, -signal.SIGABRT),
        (Deed.EXIT, 7, 7),
        (Deed.RAISE, 0, 1),
    ],
)
def test_every_deed_is_the_real_thing(tmp_path, deed, number, code):
    ended, said, err = play(tmp_path, Fault(0, 2, Moment.FORWARD, deed, number))
    assert (ended, said) == (code, "2 FORWARD")
    assert ("DrillError: exception in rank 0" in err) == (deed is Deed.RAISE)
    assert not list(tmp_path.glob("core*"))


def test_an_exception_reaches_the_main_thread_from_a_timer(tmp_path):
    ended, said, err = play(tmp_path, Fault(0, 3, Moment.ANY, Deed.RAISE), long_step=3)
    assert (ended, said) == (1, "3 DATA")
    assert mark(tmp_path)["step"] == 3
    assert "DrillError" in err


def test_an_exception_that_a_destructor_ignores_is_raised_again(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    begun, struck = threading.Thread.start, threading.Event()

    def start_slowly(thread):  # as on a busy machine
        begun(thread)
        for _ in range(50):
            time.sleep(0.001)

    class Slow:
        def __del__(self):
            struck.set()
            while True:  # until it is raised here
                pass

    def strike():
        struck.wait()
        inject._raise_in_main_thread()

    striker = threading.Thread(target=strike)
    striker.start()
    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with pytest.raises(DrillError):
        thing = Slow()
        del thing
        striker.join()
        give_up_s = time.monotonic() + 60
        while time.monotonic() < give_up_s:
            pass


def test_a_fault_strikes_once_whatever_the_attempt(tmp_path):
    fault = Fault(0, 3, Moment.FORWARD)
    assert play(tmp_path, fault)[0] == -signal.SIGKILL
    assert play(tmp_path, fault, attempt=1)[:2] == (0, "6 UPDATED")


def test_other_ranks_attempts_and_jobs_are_left_alone(tmp_path):
    made = plan(tmp_path, Fault(1, 3), Fault(0, 3, attempt=1))
    assert FaultInjector.of(made, rank_env(0, attempt=2)) is None
    assert FaultInjector.of(made, rank_env(0, attempt=1)) is not None
    injector = FaultInjector.of(made, rank_env(0, attempt=0))
    injector.phase_begins(Phase.FORWARD, 3)  # of another attempt than that of the fault
    assert FaultInjector.of(made, rank_env(1, attempt=5)) is not None


def test_only_a_drill_has_observers_and_redirects_folders(tmp_path):
    env, observers = read_env({"RANK": "1"})
    assert (observers, env.redirected("/mine")) == ((), "/mine")
    made = DrillPlan(str(tmp_path), "/drill", (Fault(1, 3),))
    env, observers = read_env({"RANK": "1", DRILL: made.encode()})
    observers[-1].close()
    assert [type(each) for each in observers] == [FaultInjector, TrainingTrace]
    assert env.redirected("/mine") == "/drill"
    env, observers = read_env({"RANK": "0", DRILL: made._replace(ckpt="").encode()})
    observers[-1].close()
    assert [type(each) for each in observers] == [TrainingTrace]
    assert env.redirected("/mine") == "/mine"
    with pytest.raises(ValueError, match="unreadable drill"):
        read_env({DRILL: "{}"})


def test_a_step_that_is_never_reached_again_is_struck_at_the_next(tmp_path):
    injector = FaultInjector(DrillLayout(tmp_path), {0: Fault(0, 5, Moment.DATA, Deed.RAISE)}, 1)
    with pytest.raises(DrillError):
        injector.phase_begins(Phase.DATA, 6)


def test_a_dump_is_struck_whatever_its_step(tmp_path):
    injector = FaultInjector(
        DrillLayout(tmp_path), {0: Fault(0, 90, Moment.DUMP, Deed.STOP, for_s=0.01)}, 0
    )
    injector.phase_begins(Phase.DATA, 3)
    struck_pids = []
    injector._claim = lambda _index, _fault, pid: struck_pids.append(pid)
    injector.dump_begins()
    injector.dump_begins()
    assert struck_pids == [os.getpid()]


@pytest.mark.parametrize(
    ("deed", "number"),
    [
        (Deed.SIGNAL, signal.SIGKILL),
        (Deed.REQUEST, signal.SIGUSR1),
        (Deed.PREEMPT, signal.SIGTERM),  # what follows is the drill's
    ],
)
def test_rank_0_strikes_the_launcher(tmp_path, deed, number):
    with subprocess.Popen(["sleep", "60"]) as target:
        DrillLayout(tmp_path).launcher.write_text(str(target.pid))
        fault = Fault(LAUNCHER, 2, Moment.BACKWARD, deed, number)
        code, said, _ = play(tmp_path, fault)
        assert target.wait(10) == -number
    assert (code, said) == (0, "6 UPDATED")
    assert mark(tmp_path)["pid"] == target.pid


def children():
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def test_a_stopped_rank_goes_on_by_itself_and_leaves_nobody(tmp_path):
    before = children()
    code, said, _ = play(tmp_path, Fault(0, 2, Moment.FORWARD, Deed.STOP, for_s=0.3))
    assert (code, said) == (0, "6 UPDATED")
    assert set(children()) <= set(before)


STOPPED = """
import os, time
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import Phase
from worker_hooks.drill.inject import FaultInjector
from worker_hooks.drill.plan import DrillPlan
env = RankEnv.read(os.environ)._replace(rank=0, attempt=0)
injector = FaultInjector.of(DrillPlan.decode(env.drill), env)
injector.phase_begins(Phase.DATA, 2)
before, ends = time.monotonic(), time.monotonic() + 20
while (now := time.monotonic()) - before < 0.25 and now < ends:
    before = now
injector._timers[0].join(20)  # writes when it struck
print(before, now)
"""


def test_the_mark_of_a_stop_is_not_older_than_what_the_rank_still_did(tmp_path):
    fault = Fault(0, 2, Moment.ANY, Deed.STOP, delay=1.0, for_s=0.3)
    told = {**os.environ, DRILL: plan(tmp_path, fault).encode(), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-S", "-c", STOPPED]
    done = subprocess.run(words, env=told, cwd=tmp_path, stdout=subprocess.PIPE, check=True)
    last, first = map(float, done.stdout.split())
    # the timer's thread holds the GIL from there to the stop, so the rank does nothing in between
    assert last <= mark(tmp_path)["at"] <= first


# --- orders, which come while the rank trains -----------------------------------------------------


def ordered(tmp_path, deed, moment=Moment.BACKWARD):
    order = OrderedFault(7, Fault(0, 0, moment, deed, 0))
    layout = DrillLayout(tmp_path)
    layout.order(0).write_bytes(order.encode())
    return FaultInjector(layout, {}, 2, layout.order(0))


def test_an_ordered_fault_strikes_at_its_moment_in_any_step_and_once(tmp_path):
    injector = ordered(tmp_path, Deed.RAISE)
    injector.phase_begins(Phase.FORWARD, 41)
    assert not DrillLayout(tmp_path).order(0).exists()
    with pytest.raises(DrillError):
        injector.phase_begins(Phase.BACKWARD, 41)
    mark = json.loads(DrillLayout(tmp_path).struck(7).read_bytes())
    assert (mark["step"], mark["attempt"]) == (41, 2)
    injector.phase_begins(Phase.BACKWARD, 42)


def test_a_rank_looks_for_orders_only_if_the_plan_says_so(tmp_path):
    made = plan(tmp_path)
    assert FaultInjector.of(made, rank_env(0)) is None
    assert FaultInjector.of(made._replace(takes_orders=True), rank_env(0)) is not None


def test_whoever_holds_the_interpreter_lets_no_thread_run_whatever_signals_come(tmp_path):
    """A pause, for one, would end with the first signal."""
    held = plan(tmp_path, Fault(0, 3, Moment.FORWARD, Deed.HOLD))
    said = tmp_path / "beside"
    rank = subprocess.Popen(
        [sys.executable, "-S", "-c", BESIDE + RANK, "0", "0", tmp_path / "said", said],
        env={**os.environ, DRILL: held.encode(), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )

    def grew() -> bool:
        before = said.stat().st_size
        time.sleep(0.5)
        return said.stat().st_size > before

    try:
        poll(said.exists)
        poll(lambda: DrillLayout(tmp_path).struck(0).exists() and not grew())
        for _ in range(3):
            rank.send_signal(signal.SIGUSR1)
        assert not grew()
        assert rank.poll() is None
    finally:
        rank.kill()
        rank.wait()


def test_what_did_not_strike_in_training_does_not_afterwards(tmp_path):
    injector = FaultInjector(
        DrillLayout(tmp_path), {0: Fault(0, 2, Moment.ANY, Deed.EXIT, 9, delay=1.0)}, 0
    )
    injector._step_s = 60.0
    injector.phase_begins(Phase.DATA, 2)
    (timer,) = injector._timers
    injector.training_ends()
    timer.join(5)
    assert not timer.is_alive()
    assert not DrillLayout(tmp_path).struck(0).exists()


def test_a_profiler_of_the_script_stays_in_place(tmp_path):
    seen = []
    sys.setprofile(lambda *event: seen.append(event[1]))
    mine = sys.getprofile()
    try:
        injector = FaultInjector(DrillLayout(tmp_path), {0: Fault(0, 9, Moment.UPDATE)}, 0)
        for phase in STEP:
            injector.phase_begins(phase, 8)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)


def test_a_plan_survives_its_journey():
    fault = Fault(3, 50, Moment.BACKWARD, Deed.EXIT, 7, 1, 0.25, 3.0, 4.0)
    sent = DrillPlan("/f", "/c", (fault, fault._replace(deed=Deed.PREEMPT)), takes_orders=True)
    assert DrillPlan.decode(sent.encode()) == sent
    assert OrderedFault.decode(OrderedFault(3, fault).encode()) == OrderedFault(3, fault)
    assert DrillPlan.decode("") is None


# --- witnesses ----------------------------------------------------------------------------------


class Tensor:
    """As much of a tensor as a trace asks for."""

    def __init__(self, *values):
        self.values = values

    def detach(self):
        return self

    def numel(self):
        return len(self.values)

    def double(self):
        return self

    def sum(self):
        return Tensor(sum(self.values))

    def __float__(self):
        (value,) = self.values
        return value


def test_a_witness_writes_lines_that_are_whole_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "time", SimpleNamespace(monotonic=lambda: 12.5))
    seen = TrainingTrace(plan(tmp_path), RankEnv(3, 8, 2, "mine", "", ""))
    seen.backward_begins(7, 0.1)
    seen.backward_begins(7, Tensor(1.0, 2.0))
    seen.backward_begins(7, None)
    seen.committed(7)
    lines = [json.loads(line) for line in DrillLayout(tmp_path).lines(3).read_text().splitlines()]
    assert {tuple(line.pop("of")) for line in lines} == {("mine", 2)}
    assert lines[0] == {"life": 2, "run": "mine", "at": 12.5}
    assert lines[1:] == [
        {"loss": (0.1).hex(), "step": 7},
        {"loss": (3.0).hex(), "step": 7},
        {"commit": 7, "at": 12.5},
    ]
    seen.training_ended(7, "ab", "cd")
    said = json.loads(DrillLayout(tmp_path).final(3).read_text())
    assert said == {"step": 7, "digest": "ab", "private_digest": "cd"}
    seen.close()
