"""Old dumps go once a newer one is complete: the run's own, and never one that is needed."""

from __future__ import annotations

import os

import pytest
from support.checkpoints import NAME, SHARD, saved

from agent.dump.old_dumps import remove_old
from worker_hooks.storage.manifest import read, write

RUNS = ("c", "b")


def dumps(folder, *steps, run="c", **more):
    return [saved(folder, step=step, run=run, **more) for step in steps]


def left(folder):
    return sorted(int(name.removeprefix(NAME)) for name in os.listdir(folder))


@pytest.mark.parametrize(
    ("keep", "stay"), [(1, [5]), (3, [3, 4, 5]), (5, [1, 2, 3, 4, 5]), (0, [1, 2, 3, 4, 5])]
)
def test_the_newest_stay(tmp_path, keep, stay):
    *_, newest = dumps(tmp_path, 1, 2, 3, 4, 5)
    assert remove_old(newest, keep, RUNS, 9, ()) == ""
    assert left(tmp_path) == stay


def test_those_of_a_resumed_run_are_older_and_those_of_others_are_not_counted(tmp_path):
    dumps(tmp_path, 8, 9, run="b")
    dumps(tmp_path, 1, 2, 20, run="other")
    *_, newest = dumps(tmp_path, 3, 4)
    assert remove_old(newest, 3, RUNS, 9, ()) == ""
    assert left(tmp_path) == [1, 2, 3, 4, 9, 20]


def test_what_the_resumed_run_saved_of_later_steps_is_neither_counted_nor_deleted(tmp_path):
    """Somebody went back to step 8; what was trained from there before is another course."""
    dumps(tmp_path, 7, 8, 50, 60, run="b")
    *_, newest = dumps(tmp_path, 9, 10)
    assert remove_old(newest, 3, RUNS, 8, ()) == ""
    assert left(tmp_path) == [8, 9, 10, 50, 60]


def test_the_one_that_ranks_resume_from_stays(tmp_path):
    old, _, newest = dumps(tmp_path, 1, 2, 3)
    assert remove_old(newest, 1, RUNS, 9, {old}) == ""
    assert left(tmp_path) == [1, 3]


def test_nothing_goes_for_one_that_nobody_can_resume_from(tmp_path):
    *_, disputed = dumps(tmp_path, 1, 2, 3)
    write(disputed, read(disputed)._replace(is_disputed=True))
    assert remove_old(disputed, 1, RUNS, 9, ()) == ""
    (damaged,) = dumps(tmp_path, 4)
    (damaged / SHARD).unlink()
    assert remove_old(damaged, 1, RUNS, 9, ()) == ""
    assert remove_old(tmp_path / f"{NAME}9", 1, RUNS, 9, ()) == ""  # it is gone
    assert left(tmp_path) == [1, 2, 3, 4]


def test_periodic_checkpoints_are_left_alone(tmp_path):
    saved(tmp_path, "CKP-1_1", step=1, run="c")
    made = saved(tmp_path, "CKP-1_2_breakpoint", step=2, run="c")
    assert remove_old(made, 1, RUNS, 9, ()) == ""
    *_, newest = dumps(tmp_path, 3, 4)
    assert remove_old(newest, 1, RUNS, 9, ()) == ""
    assert sorted(os.listdir(tmp_path)) == ["CKP-1_1", "CKP-1_2_breakpoint", f"{NAME}4"]


def test_what_cannot_be_deleted_is_one_sentence(tmp_path, monkeypatch):
    def no(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr("agent.dump.old_dumps.retention.remove", no)
    old, newest = dumps(tmp_path, 1, 2)
    why = remove_old(newest, 1, RUNS, 9, ())
    assert why == f"an old dump cannot be deleted: Operation not permitted: {old}"
