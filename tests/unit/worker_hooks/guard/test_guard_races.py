"""What the guard must not be fooled by: each case was once a state called whole that was not."""

from __future__ import annotations

import os
import signal
import threading
import time
from queue import SimpleQueue
from types import SimpleNamespace

import pytest
import torch
from support.played_agent import Source
from torch import nn

from worker_hooks.contract import protocol
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.rank_lines import ENDS_ITSELF
from worker_hooks.distributed import abort
from worker_hooks.guard import far_tensors
from worker_hooks.guard.gate import FreezeResult, Gate
from worker_hooks.guard.guard import Guard, StartupOptions
from worker_hooks.recovery import agent_lost
from worker_hooks.recovery.peer_notes import PeerNotes
from worker_hooks.state.committed_state import CommittedState, Position, _moved
from worker_hooks.state.device_state import HeldStep
from worker_hooks.state.registry import pieces_of
from worker_hooks.state.snapshot import NotSavableError, UnreadableState

LONG_S = 30.0

# --- the gate ---------------------------------------------------------------------------------


def closed(gate: Gate, grace_s: float) -> FreezeResult:
    found: list[FreezeResult] = []
    listener = threading.Thread(target=lambda: found.append(gate.close(grace_s, lambda: True)))
    listener.start()
    listener.join()
    return found[0]


def test_once_it_is_called_updated_no_further_update_begins():
    gate = Gate()
    gate.begin_update()
    gate.end_update()
    assert closed(gate, LONG_S) is FreezeResult.UPDATED
    begun = threading.Thread(target=gate.begin_update)
    begun.start()
    begun.join(0.1)
    assert begun.is_alive()
    gate.open()
    begun.join(LONG_S)
    assert not begun.is_alive()


def test_an_update_that_failed_is_over_with_the_next_commit():
    gate = Gate()
    gate.begin_update()  # an exception in the optimizer: torch calls no hook behind it
    gate.begin_update()
    gate.end_update()
    gate.commit(lambda: None)
    gate.begin_update()
    gate.end_update()
    assert closed(gate, 3.0) is FreezeResult.UPDATED


# --- the ledger -------------------------------------------------------------------------------


def stepped(committed: CommittedState, batch: int) -> None:
    committed.updated(1)
    committed.commit(Position(0, batch))


def test_what_changes_twice_in_a_step_is_not_complete_after_the_first_time():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    things = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    committed = CommittedState(pieces_of(things), dict)
    committed.begin_loop(0, 0)
    for each in net.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    for batch in (2, 4):
        scheduler.step()  # by batch, and an update is two batches
        optimizer.step()
        committed.updated(1)
        assert batch == 2 or not committed.is_complete()
        scheduler.step()
        assert batch == 2 or committed.is_complete()
        committed.commit(Position(0, batch))


def test_what_changes_between_two_loops_is_not_expected_of_a_step():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    committed = CommittedState(pieces_of({"model": net, "optimizer": optimizer}), dict)
    committed.begin_loop(0, 0)
    for batch in (1, 0, 2):  # the commit before a loop's first batch is of no batch
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        for _ in range(1 if batch else 3):
            optimizer.step()
            committed.updated(1)
        assert batch != 2 or committed.is_complete()
        committed.commit(Position(0, batch))


def test_a_commit_that_is_interrupted_does_not_look_like_a_complete_step(monkeypatch):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    committed = CommittedState(pieces_of({"model": net, "optimizer": optimizer}), dict)
    committed.begin_loop(0, 0)

    def interrupted(*_told):
        raise KeyboardInterrupt

    for batch in (1, 2):
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        committed.updated(1)
        if batch == 1:
            committed.commit(Position(0, batch))
    monkeypatch.setattr(committed, "_note", interrupted)
    assert committed.is_complete()
    with pytest.raises(KeyboardInterrupt):
        committed.commit(Position(0, 2))
    assert not (committed.is_complete() and committed.step == 2)


def test_state_made_for_inference_can_be_saved():
    with torch.inference_mode():
        table = torch.zeros(4)
    committed = CommittedState(pieces_of({"table": table}), dict)
    assert committed.version(0) == 0


class Moody:
    """An object whose state cannot be told from the second commit on."""

    def __init__(self):
        self.asked = 0

    def state_dict(self):
        self.asked += 1
        if self.asked > 8:
            raise RuntimeError("not now")
        return {"a": 1}

    def load_state_dict(self, state):
        pass


def test_an_object_that_fails_later_fails_the_dump_and_not_the_training():
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    things = {"model": net, "optimizer": optimizer, "moody": Moody()}
    committed = CommittedState(pieces_of(things), dict)
    committed.begin_loop(0, 0)
    for batch in range(1, 5):
        stepped(committed, batch)
    assert not committed.is_complete()
    with pytest.raises(RuntimeError, match="moody"):
        committed.replica(4)


def test_a_change_of_any_kind_counts_as_one():
    broken = UnreadableState("not now")
    moves = [_moved(5, 2), _moved(2, 5), _moved(broken, 3), _moved(3, broken), _moved("b", "a")]
    assert moves == [3, 1, 1, 1, 1]


# --- the notes --------------------------------------------------------------------------------


def test_a_clock_that_is_set_makes_nobody_late(tmp_path, monkeypatch):
    notes = PeerNotes(tmp_path, 0)
    notes.tell(step=1)
    assert notes.silent_s(0) < 5.0
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600.0)  # or a server of files ahead of us
    assert notes.silent_s(0) < 5.0
    monkeypatch.setattr(time, "time", lambda: now() - 3600.0)
    time.sleep(0.05)
    assert 0.05 <= notes.silent_s(0) < 5.0


# --- a second order to rejoin -----------------------------------------------------------------


def test_nobody_watches_a_main_thread_any_more_once_it_has_rejoined(tmp_path, monkeypatch):
    """A second peer may die before this rank has obeyed the first order: it rejoins only once."""
    watches: SimpleQueue[threading.Event] = SimpleQueue()
    monkeypatch.setattr(abort, "end_if_stuck", lambda is_out, _store: watches.put(is_out))
    monkeypatch.setattr(abort, "unblock", lambda _store: 0)
    told = RankEnv(rank=0, world_size=2, attempt=0, record_id="races", hooks="", drill="")
    options = StartupOptions(str(tmp_path))
    guard = Guard(
        told, Complete(), options, before_dump=lambda: None, when_agent_died=lambda _: None
    )
    monkeypatch.setattr(guard, "_send", lambda _message: None)
    monkeypatch.setattr(guard, "_link", SimpleNamespace(is_agent_dead=lambda _within_s: False))
    watched = []
    for attempt in (1, 2):
        guard._eject(protocol.Rejoin(attempt, "/somewhere", "a peer died"))
        watched.append(watches.get(timeout=LONG_S))
    assert not watched[1].is_set()
    assert guard.rejoin()[0].attempt == 2
    assert [each.is_set() for each in watched] == [True, True]


def test_nobody_waits_for_an_answer_that_no_thread_can_hear(tmp_path, monkeypatch):
    monkeypatch.setattr(far_tensors, "LOOK_S", 0.001)
    guard = guard_of(Complete(), tmp_path)
    guard._listener = threading.Thread(target=lambda: None)
    guard._listener.start()
    guard._listener.join(LONG_S)
    monkeypatch.setattr(guard, "_link", SimpleNamespace(send=lambda _: None))  # of a dead msrun
    with pytest.raises(OSError, match="msrun cannot be asked"):
        guard.far_tensors.bring(77, [0])


# --- without msrun ----------------------------------------------------------------------------


class Complete(Source):
    """A state whose update is done, with its rank in a collective that nobody will finish."""

    def __init__(self):
        super().__init__()
        self.step = 4

    def is_complete(self):
        return True


def guard_of(source, folder, world_size=2):
    told = RankEnv(0, world_size=world_size, attempt=0, record_id="races", hooks="", drill="")
    return Guard(
        told,
        source,
        StartupOptions(str(folder)),
        before_dump=lambda: None,
        when_agent_died=lambda _: None,
    )


def test_an_orphan_that_is_done_with_its_update_has_nothing_to_lose(tmp_path):
    guard = guard_of(Complete(), tmp_path, world_size=1)
    notes = PeerNotes(tmp_path, 0)
    notes.tell(step=4)
    guard.gate.begin_update()
    guard.gate.end_update()
    settling = threading.Thread(target=lambda: agent_lost._settle(guard, notes, 0.3))
    settling.start()
    settling.join()
    assert (notes.mine.step, notes.mine.is_whole) == (5, True), notes.mine.why


# --- with accelerators ------------------------------------------------------------------------


class OnDevice(Complete):
    """A state on a device that stands as the test says."""

    device = True

    def __init__(self, held: HeldStep) -> None:
        super().__init__()
        self.held = held
        self.changes = SimpleNamespace(is_idle=False)
        self.were_held = []

    def settle_devices(self, _grace_s, *, is_updated, is_held=False):  # noqa: ARG002
        self.changes.is_idle = is_held
        self.were_held.append(is_held)
        return self.held

    def nbytes(self):
        return 8, 0


@pytest.mark.parametrize(
    ("held", "answer"),
    [
        (HeldStep(3), (3, True, "")),  # the device is a commit behind
        (HeldStep(5), (5, True, "")),  # its update is done, and only the commit is missing
        (HeldStep(4, "its device did not come to the end of step 5"), (4, False, "its device did not come to the end of step 5")),
    ],
)  # fmt: skip
def test_what_is_frozen_is_what_the_device_holds(tmp_path, held, answer):
    assert guard_of(OnDevice(held), tmp_path).freeze(1.0) == answer


@pytest.mark.parametrize("held", [HeldStep(3), HeldStep(4, "its device did not come to the end")])
def test_a_graceful_exit_saves_what_the_device_has_come_to(tmp_path, held):
    """No freeze has looked at the device: the main thread is held at a boundary."""
    source = OnDevice(held)
    source.device = SimpleNamespace(is_settled=False)
    guard = guard_of(source, tmp_path)
    order = protocol.Save(1, 4, str(tmp_path), 0, 0)
    with pytest.raises(NotSavableError, match=held.why_not or "its device holds step 3"):
        guard.save(order, lambda _: None)
    assert source.were_held == [True]
    assert not source.changes.is_idle  # from now on a device may wait for a peer


def test_a_rank_whose_device_has_failed_ends_itself(tmp_path, capfd):
    """Its error stays: it would raise again wherever it enters the script."""
    held = HeldStep(4, "its device reports an error: CUDA error: ECC\nCompile it", is_failed=True)
    pid = os.fork()
    if pid == 0:
        guard_of(OnDevice(held), tmp_path)._freeze(protocol.Freeze(1, 1.0, 5))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"msrun: {ENDS_ITSELF}its device reports an error: CUDA error: ECC Compile it"
