"""A node waits for all others, or goes to the one that does: real doors on this machine."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent.arrivals import takeover as module
from agent.arrivals.late import LateGuests
from agent.arrivals.successors import HEAD, Successors, Takeover
from agent.arrivals.takeover import AttemptClaim, SuccessorWatch, TakeoverDoor
from agent.launch.doors import Address
from agent.machine.file_thread import FileThread
from agent.nodes.join import JoinedNode, join
from agent.nodes.messages import Begin, LivingRanks
from agent.nodes.roster import OwnNode
from agent.nodes.run_messages import NodeFacts
from agent.spec.spent_budget import SpentBudget
from agent.workers.master_port import listen_in_reserve
from worker_hooks.contract.left_pages import ALONE, claim

NODES = 3
LIVING = LivingRanks("job", 1, 4, "", "", 0, (), "program", 6, 0)


class Place:
    """Node 1, which waits for node 2 and itself; node 0 has ended, or has not."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.loop = asyncio.new_event_loop()
        self.files = FileThread(self.loop.call_soon_threadsafe)
        self.listeners = [listen_in_reserve("127.0.0.1") for _ in range(NODES)]
        self.ports = [each.getsockname()[1] for each in self.listeners]
        self.doors = {rank: Address("127.0.0.1", port) for rank, port in enumerate(self.ports)}
        facts = [
            NodeFacts(r, f"mn{r}", "127.0.0.1", 2, 9, door=p) for r, p in enumerate(self.ports)
        ]
        self.begin = Begin(tuple(facts), {HEAD: 1, "store_port": 4321})
        self.lines, self.ended, self.gave_up, self.spent = None, [], [], []

    def lead(self):
        self.guests = LateGuests(self.listeners[1], "1.0", b"")
        self.door = TakeoverDoor(
            Takeover(LIVING, 0, range(NODES)),
            self.guests,
            self.begin,
            self.doors,
            AttemptClaim("job", 4, (self.folder,)),
            self.files,
            self.loop,
            self._decides,
            lambda: self.gave_up.append(1),
            self.spent.append,
        )
        return self.door

    def _decides(self, guests, lines):
        assert guests is self.guests
        self.lines = dict(lines)
        if len(self.ended) == NODES - 1:
            self.loop.stop()

    def dial(self, rank, **other):
        """As the msrun of node ``rank`` does."""
        living = LIVING._replace(node_rank=rank, **other)
        own = OwnNode(rank, 2, f"mn{rank}", 100 + rank, "", f"r{rank}", "1.0", living=living)
        own = own._replace(spent=SpentBudget(replaced=rank))

        def go(address, opened):
            return join(*address, own, bytes, None, lambda _: None, is_once=True, opened=opened)

        return go

    def watch(self, rank, **other):
        """Node ``rank`` looks for its new controller."""

        def over(what, *_):
            self.ended.append((rank, what))
            watch.close()
            is_decided = all(isinstance(each, str) for _, each in self.ended) or self.lines
            if len(self.ended) == NODES - 1 and is_decided:
                self.loop.stop()

        watch = SuccessorWatch(
            Successors(rank, 0, range(NODES)),
            rank,
            self.doors,
            self.dial(rank, **other),
            self.lead,
            self.loop,
            over,
            over,
        )

    def run(self):
        self.loop.call_later(20.0, self.loop.stop)
        self.loop.run_forever()
        return sorted(self.ended)

    def close(self):
        for line in (self.lines or {}).values():
            line.connection.close()
        for _, each in self.ended:
            if isinstance(each, JoinedNode):
                each.line.connection.close()
        if self.lines is not None:
            self.guests.close(None)
        for each in self.listeners:
            each.close()
        self.loop.close()


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 1.0)
    monkeypatch.setattr(module, "LONGEST_S", 2.0)
    place = Place(tmp_path)
    yield place
    place.files.close(5.0)
    place.close()


def test_all_come_to_the_first_that_is_left(place, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 20.0)
    monkeypatch.setattr(module, "LONGEST_S", 20.0)
    place.listeners[0].close()
    place.watch(2)
    place.watch(1)
    found = place.run()
    assert [rank for rank, _ in found] == [1, 2]
    assert {*place.lines} == {1, 2}
    assert place.gave_up == []
    assert {each.replaced for each in place.spent} == {1, 2}  # as each of them knows
    for rank, joined in found:
        assert (joined.node_rank, joined.settings[HEAD]) == (rank, 1)


def test_nobody_decides_as_long_as_node_0_listens(place):
    place.watch(2)
    place.watch(1)
    assert place.run() == [(1, module.NOT_YET), (2, module.NOT_YET)]
    assert (place.lines, place.gave_up) == (None, [])  # it has not even begun to wait


def test_nobody_decides_where_another_node_is_gone_as_well(place):
    place.listeners[0].close()
    place.listeners[2].close()
    place.ended.append((2, "gone"))
    place.watch(1)
    (_, why), _ = place.run()
    assert isinstance(why, str)
    assert (place.lines, place.gave_up) == (None, [1])


def test_nobody_decides_where_ranks_of_node_0_have_begun_to_save(place):
    assert claim(Path(place.folder), "job", 4, ALONE)
    place.listeners[0].close()
    place.watch(2)
    place.watch(1)
    assert all(isinstance(why, str) for _, why in place.run())
    assert (place.lines, place.gave_up) == (None, [1])


def test_one_that_knows_another_attempt_is_none_of_them(place):
    place.listeners[0].close()
    place.watch(2, attempt=3)
    place.watch(1)
    (_, first), (_, second) = place.run()
    assert module.OTHER in second
    assert isinstance(first, str)
    assert (place.lines, place.gave_up) == (None, [1])


def test_a_watch_that_is_closed_says_nothing(place):
    entered, go_on = threading.Event(), threading.Event()

    def dial(_, opened):
        entered.set()
        go_on.wait(20.0)
        opened(SimpleNamespace())
        raise AssertionError

    place.listeners[0].close()
    said = []
    watch = SuccessorWatch(
        Successors(2, 0, range(NODES)), 2, place.doors, dial, print, place.loop, said.append, print
    )
    while not entered.is_set():
        place.loop.run_until_complete(asyncio.sleep(0.01))
    watch.close()
    go_on.set()
    for each in threading.enumerate():
        if each.name == "msrun-successor":
            each.join(20.0)
    place.loop.run_until_complete(asyncio.sleep(0.0))  # takes what it has told
    assert said == []
