"""Copies of the state in memory: when one is ordered, when it counts, and what becomes of it."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.controller import events as ev
from agent.controller.states import JobState
from agent.dump import copies as copying
from agent.dump.copies import (
    LEAST_S,
    MOST_AHEAD,
    MOST_MISSES,
    NOTICE_S,
    SOONER,
    MemoryCopies,
    ahead,
    interval,
    pause_s,
)
from agent.spec.job_spec import CopyMode, JobSpec, Program, ProgramKind
from worker_hooks.contract import protocol
from worker_hooks.storage.manifest import PRIVATE

TWO = ((0, 1),)
CUT = ((0,), (1,))


class Pages:
    """Both ranks are as far, and a step takes as long."""

    def __init__(self):
        self.step, self.step_s, self.since_s = 5, 0.1, 0.3

    def newest_commits(self, ranks):
        at_ns = time.monotonic_ns() - int(self.since_s * 1e9)
        return [(self.step, at_ns) for _ in ranks] if self.step else []

    def paces(self, ranks):
        return {rank: [SimpleNamespace(step_ns=int(self.step_s * 1e9))] for rank in ranks}


class Room:
    def __init__(self, every=3):
        program = Program("x", (), ProgramKind.SCRIPT, "python")
        spec = JobSpec(program, 2, "run", "rec")
        spec = spec._replace(dump=spec.dump._replace(copies=CopyMode.COPY, copy_every=every))
        self.sent, self.dropped, self.posted, self.noted, self.later = [], [], [], [], []
        self.pages = Pages()
        links = SimpleNamespace(
            send=lambda rank, message: self.sent.append((rank, message)),
            drop=lambda rank, why: self.dropped.append((rank, why)),
        )
        services = SimpleNamespace(
            loop=SimpleNamespace(call_later=lambda *call: self.later.append(call)),
            post=self.posted.append,
            journal=SimpleNamespace(event=lambda name, **fields: self.noted.append((name, fields))),
        )
        self.copies = MemoryCopies(spec, links, self.pages, services)

    def run(self, groups=TWO):
        self.copies.decided(JobState.RUNNING, groups)

    def orders(self):
        """By rank, those that were sent since this was asked last."""
        found, self.sent[:] = dict(self.sent), []
        return found

    def wake(self):
        for _, what, *args in [self.later.pop(0) for _ in [*self.later]]:
            what(*args)

    def answer(self, orders, digests=("a", "a"), **more):
        """The ranks write ``state N`` and ``own N`` for what they were ordered."""
        for rank, order in orders.items():
            state, private = f"state {rank}".encode(), f"own {rank}".encode()
            Path(order.state).write_bytes(state)
            Path(order.private).write_bytes(private)
            said = {"nbytes": len(state), "private_nbytes": len(private), "cpu_s": 0.001}
            about = {"epoch": 2, "batch": 7, "digest": digests[rank], **said, **more}
            about["files"] = order.files
            self.copies.hear(protocol.Copied(rank, 0, order.step, **about))


def written(manifest):
    return {
        (shard.kind == PRIVATE, shard.rank): os.pread(int(shard.file), shard.nbytes, 0)
        for shard in manifest.shards
    }


@pytest.fixture
def room():
    before = set(os.listdir("/proc/self/fd"))
    made = Room()
    yield made
    made.copies.forget()
    assert set(os.listdir("/proc/self/fd")) == before


def test_each_of_a_replica_group_copies_its_part(room):
    room.run()
    orders = room.orders()
    assert {rank: (one.step, one.part, one.parts) for rank, one in orders.items()} == {
        0: (8, 0, 2),
        1: (8, 1, 2),
    }
    room.answer(orders)
    assert room.posted == [ev.StateCopied(0, 8, 3, TWO, 2 * len("state 0own 0"))]
    manifest, elsewhere, files = room.copies.newest(8, "rank 1 died")
    assert (elsewhere, files) == (None, 1)
    assert (manifest.step, manifest.epoch, manifest.batch, manifest.holders) == (8, 1, 7, ())
    assert written(manifest) == {
        (True, 0): b"own 0",
        (True, 1): b"own 1",
        (False, 0): b"state 0",
        (False, 1): b"state 1",
    }
    assert room.copies.newest(7, "") is None


def test_those_of_different_parts_copy_all_of_theirs(room):
    room.run(CUT)
    orders = room.orders()
    assert {(one.part, one.parts) for one in orders.values()} == {(0, 1)}
    room.answer(orders, digests=("a", "b"))
    manifest = room.copies.newest(8, "").manifest
    assert manifest.holders == CUT
    assert {(each.rank, each.variant) for each in manifest.shards if each.kind != PRIVATE} == {
        (0, 0),
        (1, 1),
    }


def test_the_next_copy_goes_to_other_files_and_the_newest_stays_until_it_is_complete(room):
    room.run()
    first = room.orders()
    room.answer(first)
    room.pages.step = 8
    room.wake()
    second = room.orders()
    assert {one.step for one in second.values()} == {11}
    assert {one.state for one in second.values()}.isdisjoint(one.state for one in first.values())
    assert room.copies.newest(8, "") is not None
    room.answer(second)
    assert room.copies.newest(8, "") is None
    assert room.copies.newest(11, "") is not None
    room.pages.step = 11
    room.wake()
    third = room.orders()
    assert {one.state for one in third.values()} == {one.state for one in first.values()}


@pytest.mark.parametrize("digests", [("a", "b"), ("b", "a")])
def test_replicas_that_differ_are_no_copy(room, digests):
    room.run()
    room.answer(room.orders(), digests)
    assert room.posted == []
    assert room.noted == [("CopyMissed", {"step": 8, "why": "the replicas 0, 1 differ"})]


def test_a_copy_that_one_rank_could_not_make_is_none_and_the_next_is_ordered_earlier(room):
    room.run()
    orders = room.orders()
    room.answer({0: orders[0]})
    assert room.posted == []
    room.copies.hear(protocol.Copied(1, 0, 8, why_not="it had passed step 8", files=1))
    assert room.noted == [("CopyMissed", {"step": 8, "why": "it had passed step 8"})]
    assert room.orders() == {}
    room.wake()
    (step,) = {one.step for one in room.orders().values()}
    assert step == 5 + 2 * 3


def test_what_a_rank_cannot_have_written_ends_its_line(room):
    room.run()
    room.answer({0: room.orders()[0]}, nbytes=3)
    assert room.dropped == [(0, "it copied 7 bytes and says 3")]
    assert room.posted == []


def test_answers_to_what_is_over_count_for_nothing(room):
    room.run()
    orders = room.orders()
    room.copies.decided(JobState.FREEZING, TWO)
    room.copies.hear(protocol.Copied(0, 0, 8, 7, 5, "a", files=1))
    room.run()
    again = room.orders()
    # a rank that reads its old order late finds no file of the new one under its numbers
    files = [{path for one in each.values() for path in one[1:3]} for each in (orders, again)]
    assert files[0].isdisjoint(files[1])
    assert {one.step for one in again.values()} == {8}
    late = protocol.Copied(0, 0, 8, 7, 5, "a", files=1)  # to the first order
    room.copies.hear(late)
    room.copies.hear(late._replace(attempt=1, files=2))  # of an attempt that is none of ours
    assert (room.posted, room.dropped) == ([], [])
    room.answer(again)
    assert [said.step for said in room.posted] == [8]


def test_what_is_copied_while_it_becomes_unknown_who_holds_the_same_is_no_copy(room):
    room.run()
    orders = room.orders()
    room.run(())
    room.answer(orders)
    assert room.posted == []
    assert room.orders() == {}
    room.run()
    room.wake()
    assert len(room.orders()) == 2


def test_a_copy_outlives_what_interrupts_the_next_one(room):
    room.run()
    room.answer(room.orders())
    room.copies.decided(JobState.FREEZING, TWO)
    room.copies.begin(1)
    assert written(room.copies.newest(8, "").manifest)[False, 1] == b"state 1"


def test_a_state_that_can_never_be_copied_is_said_once(room):
    room.run()
    room.orders()
    room.copies.hear(protocol.Copied(1, 0, 8, why_not="it is elsewhere", is_final=True, files=1))
    assert room.posted == [ev.StateCopied(0, 8, why_not="it is elsewhere")]
    room.run()
    room.wake()
    assert room.orders() == {}


def test_who_misses_without_end_is_said_not_to_be_copied(room):
    room.run()
    for count in range(1, MOST_MISSES + 1):
        assert room.posted == []
        room.answer(orders := room.orders(), why_not=f"it changed, {count}")
        assert len(orders) == 2
        room.wake()
    (said,) = room.posted
    assert (
        said.why_not == f"{MOST_MISSES} times in a row, the last time as it changed, {MOST_MISSES}"
    )
    assert room.orders() == {}


def test_a_copy_that_comes_about_ends_the_misses(room):
    room.run()
    for _ in range(3):
        for _ in range(MOST_MISSES - 1):
            room.answer(room.orders(), why_not="it changed")
            room.wake()
        room.pages.step += 3
        room.answer(room.orders())
        room.wake()
    assert {said.why_not for said in room.posted} == {""}


def test_nothing_is_ordered_before_the_first_commit(room):
    room.pages.step = None
    room.run()
    assert room.orders() == {}
    room.pages.step = 1
    room.wake()
    assert len(room.orders()) == 2


def test_what_is_due_later_is_not_ordered_yet():
    room = Room(every=100)
    room.run()
    first = room.orders()
    assert {one.step for one in first.values()} == {8}  # as soon as can be
    room.answer(first)
    room.wake()
    assert room.orders() == {}
    room.pages.step = 106
    room.wake()
    assert {one.step for one in room.orders().values()} == {109}
    room.copies.forget()


def test_the_next_is_due_by_the_clock_however_long_steps_are(monkeypatch):
    """A step may take seconds where those before took milliseconds."""
    clock = [1000.0]
    monkeypatch.setattr(copying.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(copying.time, "monotonic_ns", lambda: int(clock[0] * 1e9))
    made = Room(every=0)
    made.pages.step_s = 0.001
    made.run()
    first = made.orders()
    made.answer(first)
    (said,) = made.posted
    assert said.every == round(LEAST_S / 0.001)
    assert made.orders() == {}
    assert [left_s for left_s, *_ in made.later] == [LEAST_S]
    clock[0] += LEAST_S
    made.pages.step += 5  # 2,000 steps were expected
    made.wake()
    second = {one.step for one in made.orders().values()}
    assert len(second) == 1
    assert 0 < min(second) - made.pages.step < 200
    made.copies.forget()


def test_no_descriptor_is_left(room, monkeypatch):
    def refuse(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    room.run()
    (said,) = room.posted
    assert said.why_not == "the agent has no descriptor left"


def test_how_often_short_steps_are_copied_is_said_as_it_is():
    made = Room(every=1)
    made.pages.step_s = 0.02
    made.run()
    made.answer(made.orders())
    (said,) = made.posted
    assert said.every == ahead(0.02, 0.001, SOONER * NOTICE_S[1]) == 4
    made.copies.forget()


def test_an_order_is_ahead_of_its_commit():
    first = NOTICE_S[1]
    assert [ahead(step_s, 0.0, first) for step_s in (1.0, 0.05, 0.01)] == [1, 2, 7]
    assert ahead(1.0, 1.0, first) == 3
    late = [ahead(0.05, 0.05, first * 2**misses) for misses in range(7)]
    assert late == [3, 7, 10, 18, 34, 66, 130]
    assert ahead(0.0001, 10.0, NOTICE_S[2]) == MOST_AHEAD


def test_where_the_next_commit_is_far_away_the_copy_is_of_that():
    first = NOTICE_S[1]
    assert [ahead(10.0, since_s, first) for since_s in (0.1, 3.0, 4.9, 9.0, 60.0)] == [
        1,
        1,
        1,
        2,
        3,
    ]
    assert [ahead(1.0, 0.1, first * 2**misses) for misses in range(7)] == [1, 1, 1, 1, 2, 4, 7]


def test_where_orders_come_in_time_each_step_is_copied():
    """Of steps of 50 ms, once ranks were seen to hear of a copy quickly; a late order undoes that."""
    made = Room(every=1)
    made.pages.step_s, made.pages.since_s = 0.05, 0.005
    made.run()
    distances = []
    for _ in range(12):
        made.wake()
        orders = made.orders()
        (step,) = {one.step for one in orders.values()}
        distances.append(step - made.pages.step)
        made.pages.step = step
        made.answer(orders)
    assert (distances[0], distances[-3:]) == (3, [1, 1, 1])
    made.wake()
    made.answer(made.orders(), why_not="it had passed")
    for _ in range(4):
        made.wake()
        made.answer(made.orders(), why_not="it had passed")
    made.wake()
    (step,) = {one.step for one in made.orders().values()}
    assert step - made.pages.step > 3
    made.copies.forget()


def test_copies_take_a_share_of_the_time():
    assert interval(1.0, pause_s(0.0), 0) == 2  # each copy leaves a line in the logs
    assert interval(5.0, pause_s(0.0), 0) == 1
    assert interval(1.0, pause_s(0.2), 0) == 20
    assert interval(0.01, pause_s(0.001), 0) == 200
    assert interval(1.0, pause_s(5.0), 4) == 4


def test_copies_of_thousands_of_ranks_on_other_nodes_leave_the_controller_time():
    assert [pause_s(0.0, far) for far in (0, 64, 500)] == [LEAST_S] * 3
    assert 60 < pause_s(0.0, 16_376) < 70
