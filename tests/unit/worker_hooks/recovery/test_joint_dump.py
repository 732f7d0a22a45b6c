"""A dump in memory of which each node has a part: the ranks save it between them without node 0."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save

from worker_hooks.contract import protocol
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.recovery import agent_lost, joint_dump, unaided_dump
from worker_hooks.recovery.joint_dump import PartRequest
from worker_hooks.recovery.peer_notes import PeerNote, PeerNotes
from worker_hooks.recovery.unaided_dump import UnaidedDump
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import MEMORY_KIND, PRIVATE, REPLICATED, Manifest, Shard
from worker_hooks.storage.memory_dump import HERE, HeldDump

STEP, WORLD = 7, 6  # rank 0 is lost with its node
HOLDERS = ((0, 3), (1, 4), (2, 5))
LONG_S = 30.0


def state(variant):
    return torch.full((5,), float(variant))


class Alone(list):
    """The other ranks of a node: none."""

    copied = frozenset()


class Node:
    """One rank's node, and what it has of the dump."""

    def __init__(
        self, folder, rank, states, private=(), *, step=STEP, stall_s=LONG_S, is_told=True
    ):
        self.opened, self.folder = [], folder
        shards = [
            self.shard(REPLICATED, HOLDERS[variant][0], variant, state(variant))
            for variant in range(len(HOLDERS))
        ]
        shards += [self.shard(PRIVATE, each, 0, torch.tensor([each])) for each in (rank, *private)]
        absent = tuple({*range(len(HOLDERS))} - {*states})
        about = "a", (), (), (), HOLDERS
        made = Manifest(
            MEMORY_KIND, step, 0, 7, WORLD, 1, "r1", "a reason", 0.0, tuple(shards), *about
        )
        self.held = HeldDump(HERE, made._replace(absent=absent))
        self.notes = PeerNotes(folder / "notes", rank)
        self.guard = SimpleNamespace(
            memory=self.held if is_told else None,
            offered=None if is_told else self.held,
            env=SimpleNamespace(rank=rank, world_size=WORLD, nodes=WORLD, record_id="r1"),
            peers=Alone(),
            source=SimpleNamespace(page=None, step=step),
            gate=SimpleNamespace(is_held=True),
            freeze=lambda _: (step, True, ""),
            resumed_step=0,
            replicated=protocol.Replicated("", (), ()),
        )
        agent_lost._settle(self.guard, self.notes, LONG_S)
        self.dump = UnaidedDump(self.guard, self.notes, stall_s)
        self.dump._leave_pages = lambda *_: None

    def shard(self, kind, rank, variant, tensor):
        content = save({"a": tensor})
        self.opened.append(file := os.memfd_create("part"))
        os.pwrite(file, content, 0)
        return Shard(str(file), rank, kind, len(content), "", variant)

    def save(self):
        return self.dump.save([str(self.folder)])

    def close(self):
        self.held.close()
        for file in self.opened:
            os.close(file)


@pytest.fixture
def node(tmp_path):
    made = []

    def make(*about, **how):
        made.append(Node(tmp_path, *about, **how))
        return made[-1]

    yield make
    for each in made:
        each.close()


def save_all(*nodes):
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [each.result(LONG_S) for each in [pool.submit(node.save) for node in nodes]]


def check_saved(tmp_path, private):
    layout = DumpLayout.of_step(tmp_path, STEP)
    made = manifests.read(layout.folder)
    assert not manifests.verify(layout.folder, made)
    assert (made.kind, made.step, made.holders, made.absent) == ("dump", STEP, HOLDERS, ())
    shared = {shard.variant: shard.file for shard in made.shards if shard.kind == REPLICATED}
    assert sorted(shared) == [0, 1, 2]
    for variant, file in shared.items():
        assert load_file(layout.folder / file)["a"].equal(state(variant))
    assert {shard.rank for shard in made.shards if shard.kind == PRIVATE} == private
    assert made.without_private == tuple(sorted({*range(WORLD)} - private))


def test_nodes_that_have_parts_save_all_of_it(tmp_path, node, caplog):
    """Nobody has all; each writes what its node has, and its own private state."""
    found = save_all(node(1, [1]), node(2, [2], [0]), node(3, [0, 1]))
    assert len({*found}) == 1
    check_saved(tmp_path, {0, 1, 2, 3})
    assert "data position of rank 4, 5 are lost" in caplog.text


def test_each_node_writes_but_what_it_was_asked_for(tmp_path, node):
    save_all(node(1, [0, 1, 2], [0, 2, 3]), node(2, [1, 2], [4, 5]), node(3, [0]))
    check_saved(tmp_path, {*range(WORLD)})
    names = {path.name for path in tmp_path.rglob("ttp_rank*") if not path.is_symlink()}
    assert names == {f"ttp_rank_1-1_7{part}.safetensors" for part in ("", "-part1", "-part2")}


def test_who_was_not_told_yet_to_resume_from_it_writes_what_its_node_has(tmp_path, node):
    """Or is told already to go on from there. Each alone had parts of what counts."""
    found = save_all(
        node(1, [1]), node(2, [2], [0], is_told=False), node(3, [0], is_told=False), node(4, [1])
    )
    assert len({*found}) == 1
    check_saved(tmp_path, {0, 1, 2, 3, 4})


def test_what_nobody_was_told_to_resume_from_does_not_count():
    """Then all hold the same step, and some node may have got nothing of it yet."""
    notes = {1: note([0, 1], [[1, 1]], is_memory=False), 2: note([2], [[2, 2]], is_memory=False)}
    assert joint_dump.complete(notes) == set()
    notes[1] = note([0, 1], [[1, 1]])
    assert joint_dump.complete(notes) == {"m"}


def test_who_holds_no_whole_step_leads_with_nothing_but_what_it_resumes_from(node):
    """Its own state would be half a step."""
    one = node(1, [1])
    torn = node(2, [0, 2], is_told=False)
    torn.notes.tell(is_whole=False)
    for each in (one, torn):
        assert each.dump._leader(each.notes.read()) == 1


def test_what_no_node_has_is_not_saved(tmp_path, node):
    one, two = node(1, [0]), node(2, [2])
    assert save_all(one, two) == [None, None]
    assert not list(tmp_path.glob("tft*"))
    assert "had not come to its node" in one.dump.why_nothing(0)


def test_parts_of_two_dumps_are_not_mixed(tmp_path, node):
    assert save_all(node(1, [0, 1]), node(2, [2], step=STEP - 1)) == [None, None]
    assert not list(tmp_path.glob("tft*"))


def test_one_that_gives_no_sign_is_not_awaited_forever(tmp_path, node):
    """Another node has what it was asked for, but only this one was asked; the next leader is not
    the rank that saw it fail."""
    leader = node(1, [0, 1], stall_s=0.3)
    node(2, [2])  # says what it has, and nothing more
    next_one = node(3, [0, 2], stall_s=0.3)
    found = save_all(leader, next_one)
    assert len({*found}) == 1
    check_saved(tmp_path, {1, 3})


def keep_still(*nodes):
    """They give no sign as they write, until the leader has given up; then their disks go on."""
    gave_up = threading.Event()
    for node in nodes:
        node.dump._advance = lambda _: gave_up.wait(LONG_S)
        node.notes.touch = lambda touch=node.notes.touch: gave_up.is_set() and touch()
    return gave_up


@pytest.mark.parametrize("still", [1, 2])
def test_a_disk_that_stands_still_and_goes_on_costs_nothing(tmp_path, node, still):
    """No rank can do without any other one."""
    nodes = {rank: node(rank, [variant], stall_s=0.3) for rank, variant in ((1, 0), (2, 1), (3, 2))}
    gave_up = keep_still(nodes[still])
    waits = nodes[3].dump._is_worth_waiting

    def is_worth_waiting(notes):
        found = waits(notes)
        if found:
            gave_up.set()
        return found

    nodes[3].dump._is_worth_waiting = is_worth_waiting
    found = save_all(*nodes.values())
    assert len({*found}) == 1
    check_saved(tmp_path, {1, 2, 3})


def test_one_that_never_goes_on_is_not_awaited_forever(node, monkeypatch):
    monkeypatch.setattr(unaided_dump, "PATIENCE", 0.1)
    one = node(1, [0, 1], stall_s=0.2)
    node(2, [2])  # says what it has, and nothing more
    assert save_all(one) == [None]
    assert "rank 2 did not write all that only its node has" in one.dump.why_nothing(0)


# --- who is asked for what ------------------------------------------------------------------------


def note(states, ranks, memory="m", *, is_memory=True):
    total = 3 if is_memory else 1  # of its own state
    about = {"is_settled": True, "is_memory": is_memory, "memory": memory, "total": total}
    return PeerNote(1, STEP, states=states, ranks=ranks, **about)


def test_each_state_and_each_rank_is_asked_for_once():
    notes = {
        1: note([0], [[1, 1]]),
        2: note([0, 1], [[0, 3]]),
        3: note([1, 2], [[3, 5]]),
        4: note([2], [[4, 4]]),
        5: note([0, 1, 2], [[0, 5]], "another"),
    }
    assert joint_dump.requests(1, notes) == (
        PartRequest(2, [1], [2, 0]),
        PartRequest(3, [2], [3, 5]),
        PartRequest(4, [], [4]),
    )
    assert joint_dump.complete(notes) == {"m", "another"}
    del notes[3], notes[4], notes[5]
    assert joint_dump.complete(notes) == set()
