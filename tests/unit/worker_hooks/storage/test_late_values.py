"""The script's values of a rank that died before its commit: its own, its peers', or unknown."""

from __future__ import annotations

import json

import pytest

from worker_hooks.contract import script_record
from worker_hooks.contract.status_page import CommitRecord, Entry
from worker_hooks.storage.late_entries import UnknownStateError
from worker_hooks.storage.late_values import completed

STEP = 7


def record(
    step=STEP,
    *,
    is_commit=True,
    steering=(),
    moving=(),
    late=(),
    results=(),
    since=None,
    script=b"",
    meta=None,
    **variables,
):
    """One rank's: its loop's variables, those with a capital letter have never changed."""
    changed = {name: value for name, value in variables.items() if name.islower()}
    others = {name: value for name, value in variables.items() if not name.islower()}
    frames = [["train", changed, others]]
    about = {
        "frames": frames,
        "steering": [sorted(steering)],
        "moving": [sorted(moving)],
        "late": [sorted(late)],
        "results": [sorted(results)],
        **({} if since is None else {"since": [since]}),
        "batch": 3,
    }
    meta = json.dumps(about).encode() if meta is None else meta
    return CommitRecord(step, 0, 3, 0, meta, script, is_commit)


def after(dead, *peers, earlier=None):
    """The dead rank's meta, when each peer is given by its records of the commit before and now.

    ``earlier``: the dead rank's records of the two commits before, the newest first.
    """
    records = {0: dead, **{rank: now for rank, (_, now) in enumerate(peers, 1)}}
    before = {(rank, STEP - 1): then for rank, (then, _) in enumerate(peers, 1)}
    before |= {(0, STEP - 1 - back): one for back, one in enumerate(earlier or ())}
    entries = {
        rank: (Entry("script", "U8", (len(one.payload),), len(one.payload)),)
        for rank, one in records.items()
    }
    found = completed(records, lambda *which: before.get(which), entries, STEP)
    assert all(found[rank] == records[rank] for rank in range(1, len(peers) + 1))
    return json.loads(found[0].meta)


def dead(**more):
    return record(is_commit=False, **more)


def peer(then, now, **more):
    return record(STEP - 1, **more, **then), record(**more, **now)


def test_where_all_had_the_same_and_have_the_same_so_would_it():
    one = peer({"n": [6, {}]}, {"n": [7, {}]})
    found = after(dead(n=[6, {}], Lr=[1, {}], steering=["n"]), one, one)
    assert found["frames"] == [["train", {"n": [7, {}]}, {"Lr": [1, {}]}]]
    assert (found["is_settled"], found["of_peers"], found["batch"]) == (True, [], 3)


def test_what_no_peer_has_changed_stays_the_ranks_own():
    peers = peer({"best": 0.5}, {"best": 0.5}), peer({"best": 0.25}, {"best": 0.25})
    found = after(dead(best=0.75, steering=["best"]), *peers)
    assert found["frames"] == [["train", {"best": 0.75}, {}]]
    assert found["of_peers"] == []


def test_a_variable_that_a_peer_alone_has_by_now_is_taken_where_all_have_it():
    found = after(dead(), peer({}, {"loss": 1.5}), peer({}, {"loss": 1.5}))
    assert found["frames"] == [["train", {"loss": 1.5}, {}]]
    gone = after(dead(tmp=1), peer({"tmp": 1}, {}))
    assert gone["frames"] == [["train", {}, {}]]


def test_one_peer_alone_is_believed_where_both_had_made_the_same_change_before():
    one = peer({"n": 6}, {"n": 7})
    mine = dead(n=6, steering=["n"])
    earlier = record(STEP - 1, n=6), record(STEP - 2, n=5)
    assert after(mine, one, earlier=earlier)["frames"] == [["train", {"n": 7}, {}]]
    with pytest.raises(UnknownStateError):  # equal so far, as neither has ever changed it
        after(mine, one, earlier=(record(STEP - 1, n=6), record(STEP - 2, n=6)))


def test_what_changed_between_two_loops_is_there_already():
    found = after(dead(size=16, steering=["size"]), peer({"size": 8}, {"size": 16}))
    assert found["frames"] == [["train", {"size": 16}, {}]]


def test_what_the_rank_alone_used_to_change_is_unknown():
    peers = [peer({"bad": 0}, {"bad": 0})] * 2
    mine = {"bad": 3, "steering": ["bad"]}
    assert after(dead(**mine), *peers)["frames"] == [["train", {"bad": 3}, {}]]
    with pytest.raises(UnknownStateError):
        after(dead(**mine, moving=["bad"]), *peers)
    with pytest.raises(UnknownStateError):
        values_after(script({"own.n": 5}, {}), script({}, {}, late=()), script({}, {}, late=()))


def test_what_nobody_changes_behind_backward_is_known_as_it_was_there():
    """A batch fetched ahead, another one on each rank."""
    peers = [peer({"x": 10 * rank, "n": rank}, {"x": 10 * rank + 1, "n": rank}) for rank in (1, 2)]
    mine = {"x": 0, "n": 0, "steering": ["x", "n"], "moving": ["x"]}
    with pytest.raises(UnknownStateError):
        after(dead(**mine), *peers)
    assert after(dead(**mine, since={"x": 5}), *peers)["frames"] == [
        ["train", {"n": 0, "x": 5}, {}]
    ]
    for unknown in ({"since": {"x": None}}, {"since": {"x": 5}, "late": ["x"]}):
        with pytest.raises(UnknownStateError):
            after(dead(**mine, **unknown), *peers)
    late = peer({"x": 1}, {"x": 2}, late=["x"])  # a peer has changed it behind backward
    with pytest.raises(UnknownStateError):
        after(dead(**mine, since={"x": 5}), late)


@pytest.mark.parametrize(
    ("mine", "peers"),
    [
        ({"best": 0.5}, [({"best": 0.25}, {"best": 0.125})]),  # it had another one
        ({"best": 0.5}, [({"best": 0.5}, {"best": 0.1}), ({"best": 0.5}, {"best": 0.2})]),
        ({"best": 0.5}, [({"best": 0.5}, {"best": 0.1}), ({"best": 0.5}, {"best": 0.5})]),
        ({}, [({}, {"best": 0.1}), ({}, {"best": 0.2})]),
    ],
)
def test_what_training_depends_on_is_refused_where_nobody_knows_it(mine, peers):
    pairs = [peer(*pair) for pair in peers]
    with pytest.raises(UnknownStateError, match=r"rank 0 did not reach the commit of step 7, best"):
        after(dead(**mine, steering=["best"]), *pairs)
    for about in ({}, {"steering": ["best"], "results": ["best"]}):  # it is printed, or returned
        found = after(dead(**mine, **about), *pairs)
        kind, holder = ("lacking", mine) if mine else ("of_peers", peers[0][1])
        assert (found[kind], found["frames"][0][1]) == (["best"], holder)


def test_a_peer_without_the_commit_before_tells_nothing():
    now = record(n=7)
    with pytest.raises(UnknownStateError):
        after(dead(n=6, steering=["n"]), (None, now))


def test_other_functions_and_records_that_cannot_be_read_are_left_alone():
    strange = record(STEP - 1, meta=b"{"), record(meta=b"{")
    assert after(dead(n=6), strange)["frames"] == [["train", {"n": 6}, {}]]
    other = json.dumps({"frames": [["other", {"n": 9}, {}]], "steering": [[]]}).encode()
    found = after(dead(n=6), (record(STEP - 1, meta=other), record(meta=other)))
    assert found["frames"] == [["train", {"n": 6}, {}]]
    kept = dead(meta=b"{")
    records = {0: kept, 1: record(n=1)}
    assert completed(records, lambda *_: None, {0: (), 1: ()}, STEP) == records


def test_a_rank_that_was_blocked_at_the_end_of_its_step_counts_as_one_that_committed():
    now = record(is_commit=False, n=7)
    settled = now._replace(meta=json.dumps({**json.loads(now.meta), "is_settled": True}).encode())
    earlier = record(STEP - 1, n=6), record(STEP - 2, n=5)
    found = after(dead(n=6, steering=["n"]), (record(STEP - 1, n=6), settled), earlier=earlier)
    assert found["frames"] == [["train", {"n": 7}, {}]]


def test_where_nobody_came_to_the_end_all_stay_as_they_are():
    records = {0: dead(n=1), 1: dead(n=2), 2: record(STEP - 1, n=2)}
    assert completed(records, lambda *_: None, dict.fromkeys(records, ()), STEP) == records


def script(was, now, late=("own.n",), printed=(), is_settled=False):
    return script_record.join(
        {}, [], b"", was=was, now=now, late=late, printed=printed, is_settled=is_settled
    )


def values_after(mine, *peers, before=b""):
    mine = mine.ljust(len(before), b"\0")  # a page has room
    after(
        dead(script=mine, meta=b"{}"),
        *[(None, record(script=one, meta=b"{}")) for one in peers],
        earlier=[record(STEP - 1, script=before.ljust(len(mine), b"\0"), meta=b"{}")],
    )


def test_values_are_known_where_all_had_the_same_and_have_the_same():
    moved = script({"own.n": 1}, {"own.n": 2})
    values_after(script({"own.n": 1}, {}), moved, moved)
    values_after(script({"own.n": 1}, {}), moved, before=script({"own.n": 0}, {"own.n": 1}))
    values_after(script({}, {}, late=()), moved, moved)  # it never changed
    values_after(script({"own.n": 5}, {}, late=()), script({"own.n": 1}, {"own.n": 1}))
    values_after(script({"own.n": 5}, {}, is_settled=True), moved)


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_said_to_be_of_the_rank_alone_is_not_known_from_peers_that_left_it(count):
    """A local value may be the same everywhere by chance, until the step in which it is not."""

    def own(name, *values, late=None):
        return script(*({name: one} for one in values), late=[name] if late is None else late)

    for name, is_known in (
        ("state.own.n", False),
        ("state.shared.n", True),
        ("train.py:3 n", True),
    ):
        still = [own(name, 1, 1)] * count
        if is_known:
            values_after(own(name, 1, 1), *still)
        else:
            with pytest.raises(UnknownStateError, match=r"state\.own\.n changes between backward"):
                values_after(own(name, 1, 1), *still)
        values_after(own(name, 1, 1, late=()), *still)  # it never changed it there itself
        moved = [own(name, 1, 2)] * 2
        values_after(own(name, 1, 1), *moved)


def test_of_a_value_too_one_peer_alone_proves_little():
    mine, moved = script({"own.n": 1}, {}), script({"own.n": 1}, {"own.n": 2})
    with pytest.raises(UnknownStateError):
        values_after(mine, moved, before=script({"own.n": 1}, {"own.n": 1}))


@pytest.mark.parametrize(
    ("mine", "peers"),
    [
        ({"own.n": 5}, [({"own.n": 1}, {"own.n": 2})]),
        ({"own.n": 1}, [({"own.n": 1}, {"own.n": 2}), ({"own.n": 1}, {"own.n": 3})]),
        ({"own.n": 1}, [({"own.n": 1}, {})] * 2),  # it cannot be saved any more
    ],
)
def test_values_that_nobody_knows_are_refused_unless_they_are_only_printed(mine, peers):
    with pytest.raises(UnknownStateError, match=r'own\.n changes .*state\.ignore\("n"\)'):
        values_after(script(mine, {}), *[script(*one) for one in peers])
    values_after(
        script(mine, {}, printed=["own.n"]), *[script(*one, printed=["own.n"]) for one in peers]
    )
