"""Ranks of another node write a checkpoint to its memory, for the controller's or for its own."""

import contextlib
import os
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace

import pytest
from support.jobs import poll
from support.memory_nodes import DEADLINE_S

from agent.dump.memory import MemoryTarget
from agent.nodes.run_messages import SaveFar, SaveHere, pack_said
from agent.nodes.transfer import Span, fetch, memory_files
from agent.spread import far_writes, room
from agent.spread.far_writes import MemoryInboxes
from agent.spread.node_writes import NodeWrites
from agent.spread.parts import LARGE
from worker_hooks.contract import protocol

# --- what a rank of another node writes for the controller's --------------------------------------


class Far:
    """Rank 4 of another node writes into a target on the controller's."""

    def __init__(self):
        self.calls, self.told, self.progressed = SimpleQueue(), [], []
        self.target = MemoryTarget(7, 0, 0)
        self.inboxes = MemoryInboxes(self._soon, self.progressed.append, self._taken)
        self.kept = []
        self.writes = NodeWrites("127.0.0.1", self.kept.append)
        self.refused = []

    def ordered(self, *about):
        raise AssertionError(about)

    def _soon(self, call, *args):
        self.calls.put(lambda: call(*args))

    def _taken(self, _dump_id, path, file, is_cut):
        if not self.target.take(path, file, is_cut=is_cut):
            os.close(file)
            self.refused.append(path)

    def order(self, number=0):
        save = protocol.Save(1, 7, self.target.place_of(4), 0, 1, is_quick=True, round=number)
        return self.inboxes.order(4, save)

    def write(self, order, content=b"state" * 1000):
        ((_, save),) = self.writes.orders(order, 0, {})
        Path(save.folder).write_bytes(content)
        return protocol.Written(4, 0, 1, "", len(content), "", "d", save.round)

    def give(self, written):
        return self.writes.take(written, self._soon, self.told.append, self.ordered)

    def run_until(self, holds):
        while not holds():
            self.calls.get(timeout=DEADLINE_S)()

    def close(self):
        self.inboxes.close()
        self.writes.close()
        self.target.close()


@pytest.fixture
def far():
    one = Far()
    yield one
    one.close()


def test_what_a_rank_writes_elsewhere_is_here_before_it_is_told(far):
    written = far.write(far.order())
    assert far.give(written)
    far.run_until(lambda: far.told)
    assert far.told == [written]
    shard = far.target.accept(written, 0)
    assert os.pread(int(shard.file), 10, 0) == b"statestate"


def test_its_sender_hears_nothing_before_the_loop_has_taken_the_file(far):
    """What it says then may be read by a turn that is queued already: ahead of a queued call."""
    written = far.write(far.order())
    far.give(written)
    take = far.calls.get(timeout=DEADLINE_S)
    with pytest.raises(Empty):
        far.calls.get(timeout=0.2)()  # a faulty sender is slow at worst: then this proves nothing
    take()
    far.run_until(lambda: far.told)
    assert far.told == [written]


def test_a_loop_that_stands_still_is_a_place_that_fails(far, monkeypatch):
    monkeypatch.setattr(far_writes, "SILENCE_S", 0.01)
    far.give(far.write(far.order()))
    take = far.calls.get(timeout=DEADLINE_S)
    far.inboxes.close()
    far.run_until(lambda: far.told)
    (failed,) = far.told
    assert isinstance(failed, protocol.SaveFailed)
    take()


def test_of_two_orders_to_a_rank_the_newer_one_counts(far):
    old = far.order()
    first = far.write(old, b"old")
    second = far.write(far.order(1), b"newer")
    assert not far.give(first)  # it is handed on, and is no answer to what was asked last
    assert far.give(second)
    far.run_until(lambda: far.told)
    assert far.told == [second]
    assert far.target.accept(second, 0).nbytes == 5


def test_what_comes_to_an_abandoned_dump_is_closed(far):
    order = far.order()
    far.target.abandon()
    far.give(far.write(order))
    far.run_until(lambda: far.told)
    assert len(far.refused) == 1


def test_a_controller_that_takes_nothing_is_a_place_that_fails(far):
    order = far.order()
    far.inboxes.close()
    far.give(far.write(order))
    far.run_until(lambda: far.told)
    (failed,) = far.told
    assert (failed.rank, failed.dump_id, failed.is_place, failed.round) == (4, 1, True, 0)
    assert "cannot be brought to the controller: " in failed.why


def test_a_node_without_room_says_so(far, monkeypatch):
    monkeypatch.setattr(room, "free_bytes", lambda: 1 << 20)
    ((rank, failed),) = far.writes.orders(far.order(3), 9, {4: 1 << 30})
    assert (rank, failed.rank, failed.attempt, failed.dump_id) == (4, 4, 9, 1)
    assert (failed.is_place, failed.round) == (True, 3)
    assert "no room for the state" in failed.why


def join_threads():
    """They close what they have open, those of earlier tests as well."""
    for thread in threading.enumerate():
        if thread.name.startswith("msrun-"):
            thread.join(DEADLINE_S)


def test_no_file_stays_open(far):
    join_threads()
    before = len(os.listdir("/proc/self/fd"))
    written = far.write(far.order())
    far.give(written)
    far.run_until(lambda: far.told)
    far.write(far.order(1))
    far.close()
    join_threads()
    far.target.close()
    assert len(os.listdir("/proc/self/fd")) == before


# --- what ranks write to the memory of their own node ---------------------------------------------

ASKED = protocol.Save(3, 7, "", is_quick=True, round=2)
SIZES = {4: LARGE, 5: LARGE, 6: 9}


class Here:
    """Ranks 4 and 5 hold the same, rank 6 something else; they write to their node's memory."""

    def __init__(self):
        self.told, self.ordered = [], []
        self.writes = NodeWrites("127.0.0.1", self.told.append)

    def order(self, save=ASKED, sizes=SIZES):
        order = SaveHere(((4, 5), (6,)), pack_said(save))
        return dict(self.writes.orders(order, 0, sizes))

    def write(self, save, rank, digest="d", content=b"part of it", nbytes=None):
        """Whether what the rank answers is heard here."""
        Path(save.folder).write_bytes(content)
        nbytes = len(content) if nbytes is None else nbytes
        about = rank, 0, save.dump_id, "", nbytes, "", digest
        return self.hear(protocol.Written(*about, save.round, save.share))

    def hear(self, answer):
        order = lambda *about: self.ordered.append(about)  # noqa: E731
        return self.writes.take(answer, None, self.told.append, order)


@pytest.fixture
def here():
    one = Here()
    yield one
    one.writes.close()
    poll(lambda: files_written() == [])  # a thread that sends lets go of it as it ends


def files_written():
    """Open ones that ranks write to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # what lists them
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [name for name in found if "msrun-memory-7-rank-" in name]


def contents(parts):
    """What is in the files, which are the caller's."""
    found = [(part.rank, part.nbytes, os.pread(part.file, 99, 0)) for part in parts]
    for part in parts:
        os.close(part.file)
    return found


def test_those_that_hold_the_same_share_it_out_and_say_what_they_hold(here):
    orders = here.order()
    shares = {rank: (save.part, save.parts) for rank, save in orders.items()}
    assert shares == {4: (0, 2), 5: (1, 2), 6: (0, 1)}
    assert here.write(orders[5], 5, content=b"second")
    assert here.write(orders[4], 4, content=b"first")
    assert here.write(orders[6], 6, digest="other", content=b"all")
    digests = {4: "d", 5: "d", 6: "other"}
    assert here.told == [
        protocol.Digested(rank, 0, 3, digests[rank], round=2) for rank in (5, 4, 6)
    ]
    states = here.writes.here.take()
    assert (states.step, states.spare) == (7, [])
    assert {digest: contents(parts) for digest, parts in states.parts.items()} == {
        "d": [(4, 5, b"first"), (5, 6, b"second")],
        "other": [(6, 3, b"all")],
    }
    assert not here.writes.here.take().parts


def test_a_state_that_is_not_whole_is_none(here):
    orders = here.order()
    here.write(orders[4], 4)
    here.write(orders[5], 5, digest="of a rank whose memory is broken")
    states = here.writes.here.take()
    assert states.parts == {}
    assert len(states.spare) == 2
    states.close()


def test_a_file_that_is_not_as_long_as_was_said_is_none(here):
    orders = here.order()
    assert here.write(orders[6], 6, nbytes=3)
    assert here.told[0].digest == "d"  # what the rank holds it may have said all the same
    assert here.writes.here.take().parts == {}


@pytest.mark.parametrize("lack", ["room", "size", "descriptors"])
def test_where_it_is_not_worth_it_or_cannot_be_ranks_only_say_what_they_hold(
    here, monkeypatch, lack
):
    sizes = dict.fromkeys(SIZES, 9) if lack == "size" else SIZES
    if lack == "room":
        monkeypatch.setattr(room, "free_bytes", lambda: LARGE)
    if lack == "descriptors":
        made, create = [], os.memfd_create

        def scarce(*about):
            if made:
                raise OSError(24, "Too many open files")
            made.append(create(*about))
            return made[0]

        monkeypatch.setattr(os, "memfd_create", scarce)
    assert here.order(sizes=sizes) == dict.fromkeys((4, 5, 6), ASKED)


def test_a_rank_that_cannot_write_only_says_what_it_holds(here):
    orders = here.order()
    failed = protocol.SaveFailed(4, 0, 3, "No space left on device", is_place=True, round=2)
    assert here.hear(failed)
    assert (here.ordered, here.told) == ([(4, ASKED)], [])
    here.write(orders[5], 5)
    states = here.writes.here.take()
    assert states.parts == {}
    states.close()


def test_a_rank_that_cannot_say_what_it_holds_is_heard_by_the_controller(here):
    here.order()
    assert not here.hear(protocol.SaveFailed(4, 0, 3, "it changed", is_place=False, round=2))
    assert not here.hear(protocol.SaveFailed(4, 0, 3, "again", is_place=True, round=2))
    assert (here.ordered, here.told) == ([], [])


def test_what_is_ordered_of_another_dump_frees_what_was_written(here):
    orders = here.order()
    here.write(orders[6], 6)
    here.write(orders[4], 4)
    again = here.order(ASKED._replace(dump_id=4, step=8))
    with pytest.raises(PermissionError):  # the number of its file is no other one's
        here.write(orders[5], 5)
    late = protocol.SaveFailed(5, 0, 3, "Operation not permitted", is_place=True, round=2)
    assert not here.hear(late)  # it is handed on, and counts for nothing there
    here.write(again[6], 6, digest="new")
    states = here.writes.here.take()
    assert (states.step, *states.parts) == (8, "new")
    states.close()


def test_an_order_that_is_given_again_counts_as_well(here):
    first, second = here.order(), here.order(ASKED._replace(round=3))
    for orders in (first, second):
        assert here.write(orders[6], 6)
    assert [each.round for each in here.told] == [2, 3]
    assert contents(here.writes.here.take().parts["d"]) == [(6, 10, b"part of it")]


def test_what_goes_to_the_controllers_node_stays_here_too(far):
    written = far.write(far.order())
    far.give(written)
    far.run_until(lambda: far.told)
    assert far.told == [written]
    states = far.writes.here.take()
    found = {digest: contents(parts) for digest, parts in states.parts.items()}
    assert found == {"d": [(4, 5000, b"state" * 19 + b"stat")]}
    assert states.step == 7
    assert far.kept == []  # so few bytes come from the controller's node


def fetched(kept):
    """What a node fetches that was told of a file; ``None``: nothing."""
    (file,) = memory_files(1, "fetched")
    try:
        fetch("127.0.0.1", kept.port, bytes.fromhex(kept.key), [Span(file, 0, kept.nbytes)])
        return os.pread(file, kept.nbytes, 0)
    except OSError:
        return None
    finally:
        os.close(file)


def test_other_nodes_may_fetch_what_stays_here(far):
    """The controller knows of it before it hears the rank's answer."""
    content = bytes(range(256)) * (LARGE // 256)
    written = far.write(far.order(), content)
    far.give(written)
    (kept,) = far.kept
    assert kept[:6] == (1, "d", 0, 1, 4, LARGE)
    far.run_until(lambda: far.told)
    assert fetched(kept) == content
    far.writes.here.take().close()  # the copy here has no use for it
    assert fetched(kept) == content
    far.writes.close()
    assert fetched(kept) is None


def test_what_a_node_has_for_others_as_well_is_freed_for_the_next_dump(here):
    orders = here.order()
    here.write(orders[4], 4, content=b"x" * LARGE)
    here.write(orders[5], 5, content=b"y" * LARGE)
    one, _, other, _ = here.told
    assert [one[:4], other[:4]] == [(3, "d", 0, 2), (3, "d", 1, 2)]
    assert [fetched(one), fetched(other)] == [b"x" * LARGE, b"y" * LARGE]
    here.order(ASKED._replace(dump_id=4))
    assert fetched(one) is fetched(other) is None
    here.told.clear()


FILE = b"\x02" + bytes(7) + b"{}" + bytes(range(256)) * (LARGE // 256)


def test_a_node_whose_certificate_is_for_dialling_offers_nothing(far):
    far.writes._security = SimpleNamespace(
        is_both_ways=False, dialled=lambda connection: connection
    )
    order = far.order()._replace(is_left=True)
    far.give(far.write(order, b"x" * LARGE))
    far.run_until(lambda: far.told)
    assert os.fstat(far.target._written[4, 0]).st_size == LARGE  # all of it has gone there
    assert far.kept == []
    far.writes.here.take().close()


def left(far, content=FILE):
    """What a rank has written of which only the header has gone to the controller's node."""
    far.give(far.write(far.order()._replace(is_left=True), content))
    far.run_until(lambda: far.told)
    file = far.target._written[4, 0]
    assert os.pread(file, os.fstat(file).st_size, 0) == b"\x02" + bytes(7) + b"{}"
    return far.kept[0]


def test_what_only_this_node_has_is_there_until_the_second_dump_after_it(far):
    """Until the next one is made, all may return to this one."""
    kept = left(far)
    for dump, is_there in ((2, True), (3, False)):
        save = protocol.Save(dump, 8, "", is_quick=True)
        far.writes.orders(SaveHere(((4,),), pack_said(save)), 0, {})
        assert (fetched(kept) is not None) == is_there


@pytest.mark.parametrize("lack", ["room", "memory"])
def test_what_only_this_node_has_makes_room_for_nothing(far, monkeypatch, lack):
    kept = left(far)
    if lack == "memory":
        far.writes.free()
    else:
        monkeypatch.setattr(room, "free_bytes", lambda: 0)
        ((_, answer),) = far.writes.orders(far.order(1), 0, {})
        assert answer.is_place
    assert fetched(kept) == FILE


def test_a_node_without_sockets_keeps_it_for_itself(here, request):
    orders = here.order()
    request.getfixturevalue("no_threads")
    here.write(orders[6], 6, content=b"x" * LARGE)
    assert [type(each) for each in here.told] == [protocol.Digested]
    states = here.writes.here.take()
    assert [*states.parts] == ["d"]
    states.close()


def has_room_for(monkeypatch, nbytes):
    """Besides what is written to files that are there."""

    def free():
        sizes = [0]
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # what lists them
                if "msrun-memory-7-rank-" in os.readlink(f"/proc/self/fd/{fd}"):
                    sizes.append(os.fstat(int(fd)).st_size)
        return room.SPARE + nbytes - sum(sizes)

    monkeypatch.setattr(room, "free_bytes", free)


def test_what_others_have_yet_to_write_takes_room_too(here, monkeypatch):
    has_room_for(monkeypatch, 3 * LARGE // 2)
    orders = here.order()
    assert all(save.parts for save in orders.values())
    assert here.order(ASKED._replace(round=3))[4].parts == 0
    for rank in (4, 5):
        here.write(orders[rank], rank, content=b"x" * (LARGE // 2))
    assert here.order(ASKED._replace(round=4))[4].parts == 0


def far_order(here, rank=5):
    """What is ordered to a rank that writes for the controller's memory."""
    save = protocol.Save(3, 7, "/proc/1/fd/9", 0, 1, is_quick=True, round=9)
    order = SaveFar(rank, pack_said(save), 1, "00")
    return dict(here.writes.orders(order, 0, SIZES))[rank]


def test_what_would_save_time_makes_room_for_what_is_needed(here, monkeypatch):
    has_room_for(monkeypatch, 3 * LARGE // 2)
    orders = here.order()
    here.write(orders[4], 4, content=b"x" * (LARGE // 2))
    with open(orders[5].folder, "wb") as half:
        half.write(b"x" * 10)
    assert isinstance(far_order(here), protocol.Save)
    assert here.writes.here.take().parts == {}
    with pytest.raises(PermissionError):
        here.write(orders[6], 6)
    failed = protocol.SaveFailed(6, 0, 3, "Operation not permitted", is_place=True, round=2)
    assert here.hear(failed)
    assert here.ordered == [(6, ASKED)]
    about = protocol.Written(5, 0, 3, "", LARGE // 2, "", "d", 2)  # it had written all of it
    assert here.hear(about)
    assert here.told[-1] == protocol.Digested(5, 0, 3, "d", 2)
    assert here.writes.here.take().parts == {}


def test_where_there_is_no_room_for_what_is_needed_that_is_said(here, monkeypatch):
    has_room_for(monkeypatch, LARGE // 2)
    failed = far_order(here)
    assert failed.is_place
    assert "no room for the state" in failed.why


def test_what_a_dead_rank_was_to_write_takes_no_room(here, monkeypatch):
    has_room_for(monkeypatch, 5 * LARGE // 4)
    here.order()
    for rank in (4, 5, 6):
        here.writes.forget(rank)
    assert files_written() == []
    assert all(save.parts for save in here.order().values())


def test_of_what_could_not_be_placed_as_a_whole_nothing_is_left(here, monkeypatch):
    made, create = [], os.memfd_create

    def scarce(*about):
        if len(made) == 2:
            raise OSError(24, "Too many open files")
        made.append(create(*about))
        return made[-1]

    with monkeypatch.context() as changed:
        changed.setattr(os, "memfd_create", scarce)
        assert here.order()[4].parts == 0
    assert not here.hear(protocol.SaveFailed(4, 0, 3, "any", is_place=True, round=2))


def test_without_a_thread_what_a_rank_wrote_is_not_brought(far, request):
    order = far.order()
    request.getfixturevalue("no_threads")
    assert far.give(far.write(order))
    (failed,) = far.told
    assert failed.is_place
    assert "Resource temporarily unavailable" in failed.why
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        far.order()
