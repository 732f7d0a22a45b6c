"""A copy in the agent's memory is what a dump in memory would be, or there is none."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from support.copied_rank import LONG_S, CopiedRank, Memory
from support.gates import until

from worker_hooks.contract import protocol
from worker_hooks.guard import state_copier
from worker_hooks.guard.gate import FreezeResult
from worker_hooks.recovery.load import open_dump
from worker_hooks.state.committed_state import Position
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import PRIVATE, REPLICATED, Shard
from worker_hooks.storage.memory_dump import HERE
from worker_hooks.tensors.shard import quick_digest, write_quick


@pytest.fixture
def rank():
    one = CopiedRank()
    yield one
    one.close()


class Slow:
    """Lets the copier stop in the middle of the state until the test lets it go on."""

    def __init__(self, monkeypatch):
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        advance = state_copier._Task.advance

        def slow(task, nbytes):
            self.is_there.set()
            assert self.may_go_on.wait(LONG_S)
            advance(task, nbytes)

        monkeypatch.setattr(state_copier._Task, "advance", slow)


@pytest.fixture
def slow(rank, monkeypatch):  # noqa: ARG001  it ends before the rank does
    slow = Slow(monkeypatch)
    yield slow
    slow.may_go_on.set()


def refused(rank, step, why):
    found = rank.answer()
    assert found._replace(cpu_s=0.0) == protocol.Copied(3, 1, step, why_not=found.why_not)
    assert why in found.why_not
    return found


def opened(rank, answer):
    files = [str(file) for file in rank.memory.files]
    shards = (
        Shard(files[0], 3, REPLICATED, answer.nbytes, ""),
        Shard(files[1], 3, PRIVATE, answer.private_nbytes, ""),
    )
    about = manifests.Manifest(
        manifests.DUMP_KIND,
        step=answer.step,
        epoch=answer.epoch - 1,
        batch=answer.batch,
        world_size=4,
        attempt=1,
        record_id="r",
        reason="",
        shards=tuple(shards),
        digest=answer.digest,
    ).completed()
    return open_dump(HERE, about)


def test_it_is_what_a_dump_in_memory_holds(rank):
    for file in rank.memory.files:
        os.pwrite(file, b"x" * 100_000, 0)  # an older, longer copy
    rank.step(2)
    rank.order(3)
    rank.step()
    answer = rank.answer()
    assert answer.why_not == ""
    assert (answer.rank, answer.attempt, answer.step, answer.is_final) == (3, 1, 3, False)
    assert (answer.epoch, answer.batch) == rank.committed.position(3) == (5, 3)
    assert answer.cpu_s > 0
    replica, record = rank.committed.replica(3), rank.committed.page.record(3)
    assert answer.digest == quick_digest(replica)
    dumped = Memory()
    written = write_quick(Path(dumped.paths[0]), replica, 0, 1, lambda _: None)
    state, private = rank.memory.contents()
    assert state == dumped.contents()[0]
    dumped.close()
    assert (answer.nbytes, answer.private_nbytes) == (len(state), len(private))
    assert written.digest == answer.digest
    assert private.endswith(record.payload)
    saved = opened(rank, answer)
    assert torch.equal(saved.tensors["model.weight"], rank.net.weight)
    about, _ = saved.private(3)
    assert (about["step"], about["batch"], about["is_commit"]) == (3, 3, True)
    rank.step(2)  # nothing is in the way any more
    assert not rank.gate.needs_slow_path


def test_a_part_is_one_of_the_parts_and_the_digest_is_of_all(rank):
    sizes, digests = [], set()
    rank.step()
    for part in (0, 1):
        rank.order(rank.committed.step, part, 2)
        rank.gate.pause()
        answer = rank.answer()
        assert answer.why_not == ""
        sizes.append(len(rank.memory.contents()[0]))
        digests.add(answer.digest)
    assert len(digests) == 1
    rank.order(rank.committed.step, 0, 1)
    rank.gate.pause()
    rank.answer()
    assert max(sizes) < len(rank.memory.contents()[0])


def test_the_next_update_waits_for_it_and_what_is_before_does_not(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    rank.net(torch.ones(1, 8)).sum().backward()
    torch.rand(3)
    rank.committed.under_way(Position(4, 2))
    was = rank.net.weight.detach().clone()
    thread = threading.Thread(target=rank.step)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    slow.may_go_on.set()
    thread.join(LONG_S)
    answer = rank.answer()
    assert answer.why_not == ""
    saved = opened(rank, answer)
    assert torch.equal(saved.tensors["model.weight"], was)
    assert not torch.equal(saved.tensors["model.weight"], rank.net.weight)
    assert saved.private(3)[0]["step"] == 1


def test_what_changes_between_a_commit_and_an_update_is_read_from_its_copy(rank, slow):
    rank.committed.changes.begin(0)
    rank.committed.resume_at(0, None, frozenset(), frozenset({"model.bias"}))
    rank.order(1)
    rank.step()
    was = rank.net.bias.detach().clone()
    assert slow.is_there.wait(LONG_S)
    with torch.no_grad():
        rank.net.bias += 1
    slow.may_go_on.set()
    answer = rank.answer()
    assert answer.why_not == ""
    assert torch.equal(opened(rank, answer).tensors["model.bias"], was)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_state_that_the_script_changes_is_not_copied(rank, slow, is_late):
    rank.step()
    if not is_late:
        with torch.no_grad():
            rank.net.weight.clamp_(-0.01, 0.01)
    rank.order(1)
    rank.gate.pause()
    if is_late:
        assert slow.is_there.wait(LONG_S)
        with torch.no_grad():
            rank.net.weight.clamp_(-0.01, 0.01)
    slow.may_go_on.set()
    refused(rank, 1, "changed")
    rank.step()


def test_nor_one_of_which_another_commit_was_made_meanwhile(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    rank.boundary()  # weights that the script itself has changed
    slow.may_go_on.set()
    refused(rank, 1, "")
    rank.step()


def test_nor_one_that_is_not_trusted(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    rank.why_not = "an optimizer runs in another thread"
    slow.may_go_on.set()
    refused(rank, 1, "another thread")
    rank.order(1)
    refused(rank, 1, "another thread")


def test_a_step_that_is_over_is_refused_at_once(rank):
    rank.step(2)
    rank.order(1)
    refused(rank, 1, "begun to change step 1")
    assert not rank.gate.needs_slow_path
    rank.order(3, is_done=True)
    refused(rank, 3, "training is over")


def test_a_step_that_the_gate_missed_is_refused(rank):
    rank.step(2)
    rank.order(3)
    rank.gate._step = lambda: 4
    rank.gate.pause()
    refused(rank, 3, "begun to change step 3")
    rank.gate._step = lambda: rank.committed.step
    rank.step()


def test_a_state_on_an_accelerator_never_is(rank):
    rank.committed.device = object()
    rank.order(1)
    answer = rank.answer()
    assert (answer.why_not, answer.is_final) == ("the state is on an accelerator", True)
    assert not rank.gate.needs_slow_path
    assert rank.copier._thread is None


def test_a_page_without_the_commit_is_not_enough(rank):
    rank.step()
    rank.order(2)
    rank.committed.page.close()
    rank.committed.forget()
    rank.step()
    refused(rank, 2, "the status page has no commit of step 2")


# --- giving up --------------------------------------------------------------------------------


def test_it_is_given_up_at_once_when_the_ranks_are_frozen(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    thread = threading.Thread(target=rank.step)
    thread.start()
    until(lambda: rank.gate._updates == 0)
    began = time.monotonic()
    rank.copier.give_up("the ranks were frozen")
    assert rank.gate.close(LONG_S, lambda: False) is FreezeResult.WHOLE
    assert time.monotonic() - began < 1.0
    step = rank.committed.step
    rank.gate.open()
    thread.join(LONG_S)
    assert rank.committed.step == 2
    assert step in {1, 2}
    assert rank.answers.empty()  # it is answered when nothing is written any more
    slow.may_go_on.set()
    refused(rank, 1, "the ranks were frozen")


def test_a_large_copy_ends_behind_the_piece_at_which_it_was_given_up(monkeypatch):
    advance = state_copier._Task.advance

    def slow(task, nbytes):
        time.sleep(0.2)
        advance(task, nbytes)

    monkeypatch.setattr(state_copier._Task, "advance", slow)
    rank = CopiedRank(width=4096)  # 128 MiB with the momentum: 32 pieces
    rank.order(1)
    rank.step()
    began = time.monotonic()
    rank.copier.give_up("the ranks were frozen")
    refused(rank, 1, "the ranks were frozen")
    assert time.monotonic() - began < 3.0
    rank.close()


def test_a_copy_that_has_not_begun_is_given_up_by_the_listener(rank):
    rank.order(5)
    rank.copier.give_up("the job exits")
    refused(rank, 5, "the job exits")
    assert not rank.gate.needs_slow_path
    rank.step(5)
    assert rank.answers.empty()


def test_a_newer_order_replaces_an_older_one(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    rank.order(2)
    slow.may_go_on.set()
    rank.step()
    refused(rank, 1, "another step")
    assert rank.answer().why_not == ""
    rank.step()


def test_an_answer_is_of_the_attempt_of_its_order(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    rank.copier.give_up("the rank joins another process group")
    rank.env = rank.env._replace(attempt=2)
    rank.order(2)
    slow.may_go_on.set()
    rank.step()
    assert [rank.answer().attempt, rank.answer().attempt] == [1, 2]


def test_the_process_does_not_end_while_its_memory_is_read(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    threading.Timer(0.1, slow.may_go_on.set).start()
    rank.copier.await_end()
    assert rank.copier._last.is_over.is_set()
    refused(rank, 1, "the process exits")
    began = time.monotonic()
    rank.copier.await_end()
    assert time.monotonic() - began < 0.5


# --- failures ---------------------------------------------------------------------------------


def test_without_room_there_is_no_copy_and_training_goes_on(rank):
    rank.memory.paths[0] = "/dev/full"
    rank.order(1)
    rank.step()
    refused(rank, 1, "No space left")
    rank.step()
    assert not rank.gate.needs_slow_path


def test_files_that_do_not_exist_any_more(rank):
    rank.memory.paths[1] = "/proc/self/fd/999999"
    before = len(os.listdir("/proc/self/fd"))
    rank.order(1)
    refused(rank, 1, "No such file")
    assert len(os.listdir("/proc/self/fd")) == before
    rank.step()


def test_whatever_goes_wrong_the_main_thread_goes_on(rank, monkeypatch):
    def broken(*_):
        raise SystemExit("at the worst moment")

    with monkeypatch.context() as patched:
        patched.setattr(state_copier, "save", broken)
        rank.order(1)
        rank.step()
        refused(rank, 1, "at the worst moment")
    rank.step()
    rank.order(3)
    rank.step()
    assert rank.answer().why_not == ""


def test_without_a_thread_there_is_no_copy(rank, monkeypatch):
    def none_left(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    rank.order(1)
    refused(rank, 1, "can't start new thread")
    rank.step()


def test_no_file_stays_open(rank):
    rank.order(1)
    rank.step()
    rank.answer()
    before = len(os.listdir("/proc/self/fd"))
    for step in range(2, 6):
        rank.order(step)
        rank.step()
        rank.answer()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_copies_nothing_and_is_not_blocked(rank, slow):
    rank.order(1)
    rank.step()
    assert slow.is_there.wait(LONG_S)
    own = rank.copier._last.state
    pid = os.fork()
    if not pid:
        try:
            rank.gate.reset()  # as Guard's
            rank.copier.forget()
            assert not os.path.exists(f"/proc/self/fd/{own}")
            rank.step(2)
            rank.order(rank.committed.step)  # nobody would, but nothing breaks
            rank.gate.pause()
            slow.may_go_on.set()
            os._exit(bool(rank.answer().why_not))
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    slow.may_go_on.set()
    assert rank.answer().why_not == ""


def test_copies_at_any_moment_are_of_one_step():
    """The main thread waits for nothing but the gate; each copy is of its own step."""
    rank, made, refused, is_over = CopiedRank(width=64), 0, 0, threading.Event()

    def train():
        while not is_over.is_set():
            rank.step()

    thread = threading.Thread(target=train)
    thread.start()
    while made < 40:
        step = rank.committed.step + 1 + made % 3
        rank.order(step)
        answer = rank.answer()
        if answer.why_not:
            assert "begun to change" in answer.why_not
            refused += 1
            continue
        made += 1
        saved = opened(rank, answer)
        assert saved.private(3)[0]["step"] == step
        # all gradients are ones, so the momentum tells the step
        wanted = sum(0.9**number for number in range(step))
        momenta = [name for name in saved.tensors if "momentum" in name]
        assert len(momenta) == 2
        for found in map(saved.tensors.__getitem__, momenta):
            assert found.min().item() == found.max().item() == pytest.approx(wanted, rel=1e-4)
    is_over.set()
    thread.join()
    assert refused < 400
    rank.close()
