"""A rank's guard in a graceful exit, with an agent that is played by the test."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time

import pytest
from support.played_agent import Agent, Source

from worker_hooks.callbacks.graceful_exit import ExitControl, GracefulExit
from worker_hooks.callbacks.protocol import CallbackList
from worker_hooks.contract import protocol
from worker_hooks.contract.env import RankEnv
from worker_hooks.guard import guard as guards
from worker_hooks.guard.guard import Guard, StartupOptions

LONG_S = 20.0
WHO = 3, 1  # rank, attempt


@pytest.fixture(name="agent")
def _agent():
    agent = Agent()
    yield agent
    agent.close()


def unconnected(env):
    return Guard(
        env, Source(), StartupOptions(), before_dump=lambda: None, when_agent_died=lambda _: None
    )


@pytest.fixture(name="guard")
def _guard(agent, monkeypatch):
    monkeypatch.setattr(guards, "_guarded", set())
    monkeypatch.setattr(guards, "DYING_S", 0.01)
    monkeypatch.setattr(guards.exit_hooks, "install_exit_hooks", lambda _: None)
    told = RankEnv(*WHO[:1], 8, WHO[1], secrets.token_hex(4), agent.name, "")
    alone = []
    guard = Guard(
        told,
        Source(),
        StartupOptions("/ckpt", "/exit.json", (signal.SIGUSR1,), ("/checkpoints", "/more"), "Net"),
        before_dump=lambda: None,
        when_agent_died=alone.append,
    )
    guard.greet(wants_resume=False)
    with open("/dev/null", "rb") as page:
        guard.register(page.fileno(), 0)
    assert agent.hear() == protocol.Registered(*WHO, 0, compares=True)
    yield guard
    guard._wakeup.restore()
    agent.link.shutdown(socket.SHUT_RDWR)
    guard._listener.join(LONG_S)
    guard._wakeup._close()
    guard.peers.forget()
    guard._link.forget()
    assert alone == []


class Training:
    """A main thread that steps until it is to leave."""

    def __init__(self, guard, steps=10**9):
        self.guard, self.steps, self.left = guard, steps, False
        self.exit = ExitControl(guard, CallbackList([self]), ())
        self.asked_at = []
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def exit_requested(self, state):
        self.asked_at.append(state.guard.source.step)

    def _run(self):
        gate, source = self.guard.gate, self.guard.source
        for _ in range(self.steps):
            assert self.go.acquire(timeout=LONG_S)
            gate.begin_update()
            gate.end_update()
            gate.commit(source.note)
            if self.exit.wait(self):
                self.left = True
                return

    def step(self, count=1):
        for _ in range(count):
            self.go.release()


def until(condition):
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_says_what_a_resume_and_a_request_need_to_know(agent, guard):
    assert guard.is_on
    assert agent.hello.exit_file == "/exit.json"
    assert (agent.hello.checkpoints, agent.hello.breakpoints) == ("/checkpoints", "Net")


def test_held_let_on_arrived_left(agent, guard):
    training = Training(guard)
    training.step(2)
    until(lambda: guard.source.step == 2)
    agent.tell(protocol.Hold(1))
    assert agent.hear() == protocol.Standing(*WHO, 1, 3)
    training.step(9)
    until(lambda: guard.gate.is_held)
    agent.hears_nothing()
    agent.tell(protocol.Proceed(1, 4))
    assert agent.hear() == protocol.Frozen(*WHO, 1, 4, True)
    assert (guard.source.step, training.asked_at) == (4, [])
    agent.tell(protocol.Leave(1, 4, "asked"))
    training.thread.join(LONG_S)
    assert training.left
    assert training.asked_at == [4]
    assert guard.exit_order == protocol.Leave(1, 4, "asked")
    guard.hold_exit()  # as at the process's exit: nobody is waited for
    guard.hold_exception("late")
    agent.hears_nothing()


def test_who_is_there_already_says_so_at_once(agent, guard):
    training = Training(guard)
    agent.tell(protocol.Hold(1))
    assert agent.hear() == protocol.Standing(*WHO, 1, 1)
    training.step()
    until(lambda: guard.gate.is_held)
    agent.tell(protocol.Proceed(1, 1))
    assert agent.hear() == protocol.Frozen(*WHO, 1, 1, True)
    agent.tell(protocol.Leave(1, 1, ""))
    training.thread.join(LONG_S)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_death_elsewhere_is_answered_as_ever(agent, guard, is_late):
    training = Training(guard)
    agent.tell(protocol.Hold(1))
    agent.hear()
    training.step()
    until(lambda: guard.gate.is_held)
    if is_late:
        agent.tell(protocol.Proceed(1, 2))
        until(lambda: not guard.gate.is_held)
    agent.tell(protocol.Freeze(2, LONG_S, 1))
    assert agent.hear() == protocol.Frozen(*WHO, 2, 1, True, "", 5, 4, 1)
    training.step()
    agent.hears_nothing()
    assert guard.source.step == 1
    agent.tell(protocol.Freeze(2, LONG_S, 2))  # a peer had an update under way, and has made it
    assert agent.hear() == protocol.Frozen(*WHO, 2, 2, True, "", 5, 4, 2)
    assert guard.source.step == 2
    agent.tell(protocol.Leave(2, 2, ""))
    training.thread.join(LONG_S)


def test_weights_that_a_callback_changed_at_the_step_are_not_called_whole(agent, guard):
    training = Training(guard)
    agent.tell(protocol.Hold(1))
    agent.hear()
    training.step()
    until(lambda: guard.gate.is_held)
    guard.source.changed = "a changed after step 1"
    agent.tell(protocol.Proceed(1, 1))
    found = agent.hear()
    assert (found.step, found.is_whole) == (1, False)
    assert found.why == "a changed after step 1"
    agent.tell(protocol.Leave(1, 1, ""))
    training.thread.join(LONG_S)


def test_a_training_that_is_over_stays_where_it_is(agent, guard):
    guard.source.step, guard.is_done = 7, True
    agent.tell(protocol.Hold(1))
    assert agent.hear() == protocol.Standing(*WHO, 1, 7)
    agent.tell(protocol.Proceed(1, 7))
    assert agent.hear() == protocol.Frozen(*WHO, 1, 7, True)
    agent.hears_nothing()


def test_a_training_that_is_over_holds_nobody_who_goes_further(agent, guard):
    guard.source.step, guard.is_done = 7, True
    agent.tell(protocol.Hold(1))
    agent.hear()
    agent.tell(protocol.Proceed(1, 8))
    agent.hears_nothing()
    assert guard.gate.pause() is False
    heard = []

    def release():
        heard.append(agent.hear())
        agent.tell(protocol.Release("bye"))

    releasing = threading.Thread(target=release)
    releasing.start()
    guard.hold_exit()  # as at any exit
    releasing.join(LONG_S)
    assert heard == [protocol.Leaving(*WHO, True)]


def test_a_signal_is_a_request(agent, guard):
    os.kill(os.getpid(), signal.SIGUSR1)
    assert agent.hear() == protocol.ExitRequested(*WHO, "rank 3 received SIGUSR1")
    guard.request_exit("so it is")
    assert agent.hear() == protocol.ExitRequested(*WHO, "so it is")


def test_when_the_line_closes_training_goes_on_and_the_signal_ends_it_again(agent, guard):
    training = Training(guard)
    agent.tell(protocol.Hold(1))
    agent.hear()
    training.step()
    until(lambda: guard.gate.is_held)
    agent.link.shutdown(socket.SHUT_RDWR)
    training.step()
    until(lambda: guard.source.step == 2)
    guard._listener.join(LONG_S)
    pid = os.fork()
    if not pid:
        signal.pause()
    os.kill(pid, signal.SIGUSR1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGUSR1
    guard.gate.exit()
    training.step()
    training.thread.join(LONG_S)


def test_without_an_agent_a_request_ends_the_process_itself_after_its_step():
    told = RankEnv(0, 1, 0, "", "", "")
    guard = unconnected(told)
    training = Training(guard)
    guard.request_exit("asked")
    training.step(5)
    training.thread.join(LONG_S)
    assert (training.left, guard.source.step) == (True, 1)


def test_it_ends_with_0_and_is_no_exception_of_the_scripts():
    assert GracefulExit().code == 0
    assert not issubclass(GracefulExit, Exception)


@pytest.mark.parametrize(("attempt", "is_long"), [(0, False), (1, True)])
def test_a_newcomer_waits_for_its_welcome_while_a_state_is_saved(monkeypatch, attempt, is_long):
    waits = []
    monkeypatch.setattr(
        guards.AgentLink, "ask", lambda _self, _hello, within_s: waits.append(within_s)
    )
    name = f"msrun-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.bind(f"\0{name}")
        door.listen()
        guard = unconnected(RankEnv(3, 4, attempt, "run", name, ""))
        assert guard.greet(wants_resume=False) is None
    assert (waits[0] > 600) is is_long


def test_a_rank_whose_line_breaks_as_it_tells_of_a_page_begins_no_update(guard, monkeypatch):
    """Its listener hears of it, too: if msrun is dead, it saves what must not change meanwhile."""

    def refuse(*_):
        raise BrokenPipeError

    guard.gate.block_updates()
    with monkeypatch.context() as patched, open("/dev/null", "rb") as page:
        patched.setattr(guard._link, "send", refuse)
        guard.register(page.fileno(), 4)
    assert guard.gate.needs_slow_path
    assert not guard._released.is_set()
    guard.gate.open()
