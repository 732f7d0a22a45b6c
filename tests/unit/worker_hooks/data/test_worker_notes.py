"""Notes of workers outlive them: who makes a batch again is compared with who made it first."""

import os

from worker_hooks.data.worker_notes import REMEMBERED, WorkerNotes


def test_a_batch_is_compared_with_the_first_of_its_number():
    notes = WorkerNotes(2)
    assert not notes.is_other(0, 0, 11)
    assert not notes.is_other(0, 0, 11)
    assert notes.is_other(0, 0, 12)
    assert notes.is_other(0, 0, 0)  # the first one stays
    assert not notes.is_other(1, 0, 12)  # of another worker
    assert not notes.is_other(1, 1, 0)


def test_what_is_long_ago_is_not_compared():
    notes = WorkerNotes(1)
    assert not notes.is_other(0, 5, 1)
    assert not notes.is_other(0, 5 + REMEMBERED, 2)
    assert not notes.is_other(0, 5, 3)


def test_what_a_child_notes_is_seen_by_all():
    notes = WorkerNotes(3)
    assert notes.change() == ""
    if not (child := os.fork()):
        notes.is_other(2, 7, 5)
        notes.tell_change(2, "dataset." + "é" * 400)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert notes.is_other(2, 7, 6)
    assert notes.change().startswith("dataset.é")
