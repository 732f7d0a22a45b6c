"""The listener has the state copied, and stays free for what is more urgent."""

from __future__ import annotations

import os
import signal
import socket
import threading

import pytest
from support.copied_rank import LONG_S, CopiedRank
from support.gates import until
from support.played_agent import Agent

from worker_hooks.contract import protocol
from worker_hooks.guard import guard as guards
from worker_hooks.guard import state_copier
from worker_hooks.guard.guard import Guard, StartupOptions

WHO = 3, 1  # rank, attempt


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    agent.close()


@pytest.fixture
def rank():
    one = CopiedRank()
    yield one
    one.close()


@pytest.fixture
def guard(agent, rank, monkeypatch):
    """Guards the rank's state, which trains behind its gate from now on."""
    monkeypatch.setattr(guards, "_guarded", set())
    monkeypatch.setattr(guards, "DYING_S", 0.01)
    monkeypatch.setattr(guards.exit_hooks, "install_exit_hooks", lambda _: None)
    monkeypatch.setattr(Guard, "_catch_signals", lambda _: None)
    monkeypatch.setattr(Guard, "_eject", lambda one, _: one.gate.eject())
    guard = Guard(
        rank.env._replace(hooks=agent.name),
        rank.committed,
        StartupOptions(),
        before_dump=lambda: None,
        when_agent_died=lambda _: None,
    )
    rank.gate = guard.gate
    guard.gate._step = lambda: rank.committed.step
    guard.greet(wants_resume=False)
    with open("/dev/null", "rb") as page:
        guard.register(page.fileno(), 0)
    agent.hear()
    yield guard
    agent.link.shutdown(socket.SHUT_RDWR)
    guard._listener.join(LONG_S)
    guard._copier.await_end()
    guard.peers.forget()
    guard._link.forget()


@pytest.fixture
def in_the_middle(guard, monkeypatch):  # noqa: ARG001  it ends before the guard does
    """A copy stops when it has begun, until the second event is set."""
    is_there, may_go_on = threading.Event(), threading.Event()
    advance = state_copier._Task.advance

    def slow(task, nbytes):
        is_there.set()
        assert may_go_on.wait(LONG_S)
        advance(task, nbytes)

    monkeypatch.setattr(state_copier._Task, "advance", slow)
    yield is_there, may_go_on
    may_go_on.set()


def order(agent, rank, step):
    agent.tell(protocol.Copy(step, *rank.memory.paths, 0, 1))


def ordered(agent, rank, step):
    """The same, and the listener has obeyed."""
    order(agent, rank, step)
    until(lambda: rank.gate.needs_slow_path)


@pytest.mark.usefixtures("guard")
def test_it_is_answered_when_it_is_there(agent, rank):
    ordered(agent, rank, 2)
    rank.step(3)
    found = agent.hear()
    assert (found.rank, found.attempt, found.step, found.why_not) == (*WHO, 2, "")
    assert [found.nbytes, found.private_nbytes] == list(map(len, rank.memory.contents()))
    order(agent, rank, 2)
    assert "had begun to change step 2" in agent.hear().why_not


def test_a_freeze_in_the_middle_is_answered_at_once(agent, rank, in_the_middle):
    is_there, may_go_on = in_the_middle
    ordered(agent, rank, 1)
    rank.step()
    assert is_there.wait(LONG_S)
    agent.tell(protocol.Freeze(7, LONG_S, 1))
    found = agent.hear()
    assert (found.dump_id, found.step, found.is_whole) == (7, 1, True)
    may_go_on.set()
    assert agent.hear().why_not == "the ranks were frozen"
    agent.tell(protocol.GoOn(1))
    rank.step()


@pytest.mark.usefixtures("guard")
def test_a_rank_that_is_to_catch_up_is_not_stopped_by_a_copy(agent, rank, in_the_middle):
    """A peer has committed step 2: this rank may, too, though it was to be copied at step 1."""
    is_there, may_go_on = in_the_middle
    ordered(agent, rank, 1)
    rank.step()
    assert is_there.wait(LONG_S)
    thread = threading.Thread(target=rank.step)
    thread.start()
    agent.tell(protocol.Freeze(7, LONG_S, 2))
    found = agent.hear()
    assert (found.step, found.is_whole) == (2, True)
    may_go_on.set()
    agent.hear()
    agent.tell(protocol.GoOn(1))
    thread.join(LONG_S)


def test_training_goes_on_before_a_checkpoint_in_memory_is_freed(agent, guard):
    """To free a large one takes its time."""
    blocked = []

    class Memory:
        def __del__(self):
            blocked.append(guard.gate._updates_blocked)

    guard.gate.block_updates()
    guard.memory = Memory()
    agent.tell(protocol.GoOn(1))
    until(lambda: blocked)
    assert blocked == [False]
    assert guard.memory is None


def test_who_saves_by_itself_has_what_its_node_has_in_memory(agent, guard, monkeypatch):
    """Before it begins: its msrun may end in the next moment."""
    seen, held = [], object()
    monkeypatch.setattr(guards.HeldDump, "at", {"/proc/7/fd/8": held}.get)
    guard._when_agent_died = lambda one: seen.append((one.is_loss_proven, one.offered))
    agent.tell(protocol.SaveAlone("node 0 is gone", True, "/proc/7/fd/8"))
    until(lambda: seen)
    assert seen == [(True, held)]
    assert guard.memory is None  # it was not told to resume from that


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize(
    ("message", "why"),
    [
        (protocol.Rejoin(2, "/nowhere", "a peer died"), "joins another process group"),
        (protocol.Release("over"), "the process exits"),
        (protocol.Leave(1, 1, "asked"), "the job exits"),
        (protocol.Dismiss("stopped"), "being stopped"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_whatever_ends_the_attempt_ends_its_copy(
    agent, rank, in_the_middle, message, why, is_begun
):
    is_there, may_go_on = in_the_middle
    ordered(agent, rank, 1)
    if is_begun:
        rank.step()
        assert is_there.wait(LONG_S)
    agent.tell(message)
    until(lambda: rank.gate._copy is None and not rank.gate._copying)  # before it is done
    may_go_on.set()
    found = agent.hear()
    assert (found.step, found.attempt) == (1, 1)
    assert why in found.why_not
    agent.tell(protocol.GoOn(2))  # a Rejoin blocks updates until then
    until(lambda: not rank.gate._copying)


def test_if_the_line_closes_training_goes_on(agent, rank, guard, in_the_middle):
    is_there, may_go_on = in_the_middle
    ordered(agent, rank, 1)
    rank.step()
    assert is_there.wait(LONG_S)
    agent.link.shutdown(socket.SHUT_RDWR)
    guard._listener.join(LONG_S)
    rank.step()
    assert not rank.gate.needs_slow_path
    may_go_on.set()


def test_the_end_of_the_process_waits_for_the_copier(agent, rank, guard, in_the_middle):
    is_there, may_go_on = in_the_middle
    ordered(agent, rank, 1)
    rank.step()
    assert is_there.wait(LONG_S)
    copier = guard._copier._thread
    agent.tell(protocol.Release("over"))
    assert guard._released.wait(LONG_S)
    threading.Timer(0.1, may_go_on.set).start()
    guard.hold_exit()
    assert not copier.is_alive()


def test_a_state_that_is_not_trusted_is_not_copied(agent, rank, guard):
    guard.distrust("an optimizer runs elsewhere")
    order(agent, rank, 1)
    assert agent.hear().why_not == "an optimizer runs elsewhere"
    rank.step()


def test_training_that_is_over_reaches_no_step(agent, rank, guard):
    guard.is_done = True
    order(agent, rank, 1)
    assert agent.hear().why_not == "training is over"


def test_a_child_that_is_forked_in_the_middle_is_not_blocked(agent, rank, guard, in_the_middle):
    is_there, may_go_on = in_the_middle
    ordered(agent, rank, 1)
    rank.step()
    assert is_there.wait(LONG_S)
    pid = os.fork()  # the guard has registered what the child does
    if not pid:
        signal.alarm(20)
        rank.step()
        os._exit(rank.gate.needs_slow_path)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    may_go_on.set()
    assert agent.hear().why_not == ""
    assert guard.is_on
