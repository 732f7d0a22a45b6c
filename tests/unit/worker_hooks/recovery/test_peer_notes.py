"""Notes between ranks that save without msrun: whose count, on this machine and on another one."""

import json
import os
import subprocess
import sys

import pytest
from support.status_pages import make, write

from worker_hooks.contract.left_pages import leave_page, notes_folder
from worker_hooks.recovery import peer_notes
from worker_hooks.recovery.peer_notes import PeerNotes
from worker_hooks.storage.private_records import record


@pytest.fixture
def notes(tmp_path):
    found = PeerNotes(tmp_path / "notes", 0)
    found.tell(step=3)
    return found


def another(notes, rank, pid, host=None, step=3):
    """The note of another rank."""
    told = notes.mine._replace(pid=pid, step=step, host=host or notes.mine.host)
    (notes.folder / f"rank_{rank}.json").write_text(json.dumps(told._asdict()))


@pytest.fixture
def dead():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_a_note_of_a_dead_process_does_not_count(notes, dead):
    another(notes, 1, os.getpid())
    another(notes, 2, dead)
    assert set(notes.read()) == {0, 1}


def test_a_note_of_another_machine_counts_whatever_has_its_process_id_here(notes, dead):
    another(notes, 1, dead, host="another kernel")
    assert set(notes.read()) == {0, 1}
    assert notes.read()[1].step == 3


def test_it_counts_no_longer_than_signs_of_its_writer_come(notes, dead, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr(peer_notes.time, "monotonic", lambda: now_s[0])
    another(notes, 1, dead, host="another kernel")
    assert set(notes.read()) == {0, 1}
    now_s[0] += peer_notes.AWAY_S - 1
    assert set(notes.read()) == {0, 1}
    path = notes.folder / "rank_1.json"
    sign = path.stat()
    os.utime(path, ns=(sign.st_atime_ns, sign.st_mtime_ns + 1))
    assert set(notes.read()) == {0, 1}
    now_s[0] += peer_notes.AWAY_S - 1
    assert set(notes.read()) == {0, 1}
    now_s[0] += 2
    assert set(notes.read()) == {0}


def test_what_was_saved_at_an_earlier_loss_is_not_taken_for_the_present_one(notes):
    notes.announce("checkpoints/step_2", 2)
    assert notes.saved() == "checkpoints/step_2"
    notes.forget_earlier()
    assert notes.saved() is None
    notes.announce("checkpoints/step_3", 3)
    assert notes.saved() == "checkpoints/step_3"
    notes.forget_earlier()  # it is of this rank's step
    assert notes.saved() == "checkpoints/step_3"


def test_a_note_that_is_withdrawn_is_gone(notes):
    other = PeerNotes(notes.folder, 1)
    other.tell(step=4)
    assert set(notes.read()) == {0, 1}
    other.withdraw()
    other.withdraw()
    assert set(notes.read()) == {0}


def test_the_last_one_that_saves_nothing_takes_along_what_was_left(notes):
    other = PeerNotes(notes.folder, 1)
    other.tell(step=4)
    leave_page(notes.folder, 2, b"page")
    leave_page(notes.folder, 3, b"page", is_copy=True)
    notes.withdraw()
    notes.remove_if_last()
    assert (other.left(), other.copied()) == ({2}, {3})
    other.withdraw()
    other.remove_if_last()
    assert not notes.folder.exists()


def test_what_was_saved_there_stays(notes):
    notes.announce("checkpoints/step_2", 2)
    notes.withdraw()
    notes.remove_if_last()
    assert notes.saved() == "checkpoints/step_2"


def test_the_page_of_a_dead_rank_is_left_to_those_on_other_machines(notes):
    for rank, attempt in ((2, 1), (12, 1), (3, 0)):
        fd, page = make(rank, attempt)
        write(page, 6, 6)
        leave_page(notes.folder, rank, page.content())
        os.close(fd)
    (notes.folder / "page_4").write_bytes(b"none" * 1000)
    (notes.folder / "page_x").touch()
    assert notes.left() == {2, 3, 4, 12}
    found = notes.pages(attempt=1)
    assert set(found) == {2, 12}
    assert record(found[12], 6).step == 6
    assert set(notes.read()) == {0}


def test_of_a_rank_that_may_live_a_copy_is_left(notes):
    """Its msrun may have ended alone: it is awaited, and its own page is newer."""
    for rank, step, is_copy in ((0, 6, True), (1, 6, True), (1, 7, False)):
        fd, page = make(rank, 1)
        write(page, step, step)
        leave_page(notes.folder, rank, page.content(), is_copy=is_copy)
        os.close(fd)
    assert notes.left() == {1}
    assert notes.copied() == {0, 1}
    found = notes.pages(attempt=1)
    assert {rank: record(page, 6).step for rank, page in found.items()} == {0: 6, 1: 7}


def test_all_ranks_of_a_job_find_the_same_folder(tmp_path):
    folder = notes_folder(str(tmp_path / "checkpoints"), "job")
    leave_page(folder, 2, b"")  # the first one makes it, though nothing is known of its rank
    leave_page(folder, 3, b"page")
    assert PeerNotes(folder, 0).left() == {3}
