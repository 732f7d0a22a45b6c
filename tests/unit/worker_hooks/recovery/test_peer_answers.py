"""Ranks that save without msrun: what their files make up, and when that is not the state of all."""

from __future__ import annotations

import pytest

from worker_hooks.contract.protocol import Digested, Written
from worker_hooks.recovery.peer_answers import (
    is_writer,
    joined,
    joined_parts,
    parts_to_write,
    shard_of,
)
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


# --- no rank is a replica of another one, but each part of the state has several holders ----------

PARTS = ((0, 1), (0, 2), (1, 3), (2, 3))


def parted(digests, wrote=(), total=4):
    """By rank a note; ``digests``: a letter for each of its parts, a dot for a rank that is dead."""
    found = answers(LONE, "".join("." if each == "." else " " for each in digests), ())
    for rank, note in found.items():
        parts = tuple(part for part in PARTS if rank in part)
        files = [shard(rank) if (rank, part) in wrote else None for part in parts]
        shares = [*zip(digests[rank], files, strict=False)]
        found[rank] = note._replace(parts=parts, total=total, shares=shares)
    return found


WROTE = {(0, (0, 1)), (0, (0, 2)), (3, (1, 3)), (2, (2, 3))}


def test_parts_are_written_one_by_one_if_a_rank_is_dead_whose_state_others_have_between_them():
    assert parts_to_write(0, parted(["ab", ".", "bd", "cd"])) == PARTS
    assert parts_to_write(2, parted([".", "ac", "bd", "."])) == PARTS


@pytest.mark.parametrize(
    "notes",
    [
        parted(["ab", "ac", "bd", "cd"]),  # each writes all that it has, as its group
        parted(["ab", ".", "bd", "."]),  # what 1 and 3 held is lost
        parted(["ab", ".", "bd", "cd"], total=5),  # so is what 1 had alone
        answers(PAIRS, "a.ab"),
        answers(UNKNOWN, "a.aa"),
    ],
)
def test_else_they_are_not(notes):
    assert parts_to_write(0, notes) == ()


def test_a_rank_that_is_behind_holds_no_part():
    notes = parted(["ab", ".", "bd", "cd"])
    notes[3] = notes[3]._replace(step=6)
    assert parts_to_write(0, notes) == ()


def test_a_leader_that_knows_no_parts_does_not_write_them():
    notes = parted(["ab", ".", "bd", "cd"])
    notes[0] = notes[0]._replace(parts=(), total=0)
    assert parts_to_write(0, notes) == ()
    assert parts_to_write(2, notes) == ()  # nobody else tells of what 0 and 1 hold


def test_of_each_part_one_holder_writes():
    notes = parted(["ab", ".", "bd", "cd"])
    wrote = {
        (rank, part)
        for rank, note in notes.items()
        for part in note.parts
        if is_writer(rank, 0, notes, part)
    }
    assert wrote == WROTE


def test_the_parts_make_up_the_state():
    state = joined_parts(parted(["ab", ".", "bd", "cd"], WROTE), 0, PARTS)
    assert state.holders == PARTS
    assert [each.rank for each in state.shards] == [0, 0, 3, 2]
    assert [each.variant for each in state.shards] == [0, 1, 2, 3]
    assert (state.digest, state.odd, state.why_not) == ("a", (), "")


@pytest.mark.parametrize(
    ("digests", "wrote", "why"),
    [
        (["ab", ".", "xd", "cd"], WROTE, "the ranks hold different states"),
        (["ab", ".", "bd", "cd"], WROTE - {(3, (1, 3))}, "nobody saves the state of rank 1, 3"),
        (["ab", ".", "bd", "."], WROTE, "nobody saves the state of rank 1, 3"),
    ],
)
def test_they_do_not_if_one_is_missing_or_in_doubt(digests, wrote, why):
    state = joined_parts(parted(digests, wrote), 0, PARTS)
    assert state.why_not.startswith(why)
    assert not state.shards
