"""Ranks that save without msrun: what their files make up, and when that is not the state of all."""

from __future__ import annotations

import pytest

from worker_hooks.contract.protocol import Digested, Written
from worker_hooks.recovery.peer_answers import is_writer, joined, shard_of
from worker_hooks.recovery.peer_notes import PeerNote

PAIRS = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
LONE = {rank: (rank,) for rank in range(4)}
ALL = dict.fromkeys(range(4), (0, 1, 2, 3))
UNKNOWN = dict.fromkeys(range(4), ())


def shard(rank):
    return shard_of(Written(rank, 0, 0, f"rank_{rank}/x.safetensors", 10, "sum", "d"))


def answers(alike, digests="abab", wrote=(0, 1)):
    """By rank: the letter of its digest; a space: it has none, and a dot: it is not there."""
    return {
        rank: PeerNote(
            1,
            7,
            is_settled=True,
            is_whole=True,
            alike=alike[rank],
            digest=letter.strip(),
            written=shard(rank) if rank in wrote else None,
        )
        for rank, letter in enumerate(digests)
        if letter != "."
    }


@pytest.mark.parametrize(
    ("alike", "digests", "wrote", "holders", "files", "odd"),
    [
        (ALL, "aaaa", (0,), (), [0], ()),
        (ALL, "aa.b", (0,), (), [0], (3,)),
        (ALL, ".aaa", (1,), (), [1], ()),  # a dead rank has replicas
        (PAIRS, "abab", (0, 1), ((0, 2), (1, 3)), [0, 1], ()),
        (PAIRS, "ab..", (0, 1), ((0, 2), (1, 3)), [0, 1], ()),
        (PAIRS, ".bab", (1, 2), ((0, 2), (1, 3)), [2, 1], ()),
        (LONE, "abcd", range(4), tuple(LONE.values()), [0, 1, 2, 3], ()),
        (LONE, "aaaa", range(4), tuple(LONE.values()), [0, 1, 2, 3], ()),  # equal by chance
        (UNKNOWN, "aaaa", (0,), (), [0], ()),
        ({**PAIRS, 2: ()}, "abab", (0, 1), ((0, 2), (1, 3)), [0, 1], ()),  # a new rank
        ({**LONE, 2: ()}, "abcd", range(4), tuple(LONE.values()), [0, 1, 2, 3], ()),
    ],
)
def test_each_group_is_written_once(alike, digests, wrote, holders, files, odd):
    found = answers(alike, digests, wrote)
    leader = min(found)
    state = joined(found, leader, 4, "nobody knows" if alike is UNKNOWN else "")
    assert state.why_not == ""
    assert state.holders == holders
    assert [each.rank for each in state.shards] == files
    assert [each.variant for each in state.shards] == list(range(len(files)))
    assert state.odd == odd
    assert state.digest == found[files[0]].digest


@pytest.mark.parametrize(
    ("alike", "digests", "wrote", "why"),
    [
        (PAIRS, "a.a.", (0,), "nobody saves the state of rank 1, 3: no rank that holds the same"),
        (PAIRS, "abab", (0,), "nobody saves the state of rank 1, 3: the rank that was to write"),
        (PAIRS, "aba ", (0,), "nobody saves the state of rank 1, 3: the rank that was to write"),
        (PAIRS, "abac", (0, 1), "the ranks hold different states"),  # who is right?
        (ALL, "aabb", (0,), "the ranks hold different states"),
        (ALL, "abbb", (0,), "rank 0 differs from most replicas"),
        (UNKNOWN, "abab", (0,), "the ranks hold different states: nobody knows"),
        (UNKNOWN, "aa.a", (0,), "nobody saves the state of rank 2: nobody knows"),
        ({**PAIRS, 3: (0, 2, 3)}, "abab", (0, 1), "the ranks disagree"),
    ],
)
def test_what_is_not_the_state_of_all_is_not_saved(alike, digests, wrote, why):
    state = joined(answers(alike, digests, wrote), 0, 4, "nobody knows" if alike is UNKNOWN else "")
    assert state.why_not.startswith(why)
    assert not state.shards


@pytest.mark.parametrize(
    ("alike", "digests", "leader", "writers"),
    [
        (ALL, "    ", 0, {0}),
        (ALL, ".   ", 1, {1}),
        (UNKNOWN, "    ", 0, {0}),
        (PAIRS, "    ", 0, {0, 1}),
        (PAIRS, "    ", 2, {2, 1}),  # rank 0 could not: its group has the next leader
        (PAIRS, " .  ", 0, {0, 3}),
        (LONE, "    ", 0, {0, 1, 2, 3}),
        ({**LONE, 2: ()}, "    ", 0, {0, 1, 2, 3}),
        ({**PAIRS, 2: ()}, "    ", 0, {0, 1}),
    ],
)
def test_who_writes(alike, digests, leader, writers):
    notes = answers(alike, digests)
    assert {rank for rank in notes if is_writer(rank, leader, notes)} == writers


def test_a_rank_that_is_behind_is_no_writer():
    notes = answers(PAIRS, "    ")
    notes[1] = notes[1]._replace(step=6)
    assert not is_writer(1, 0, notes)
    assert is_writer(3, 0, notes)


def test_what_was_only_digested_is_no_file():
    assert shard_of(Digested(0, 0, 0, "d")) is None
