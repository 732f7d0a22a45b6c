"""Ranks that save without msrun: whose answer a leader waits for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support.checkpoints import OTHER, saved

from worker_hooks.contract.layout import DumpLayout
from worker_hooks.recovery import agent_lost, unaided_dump
from worker_hooks.recovery.peer_notes import PeerNotes
from worker_hooks.storage import commit, manifest

LONG_S = 60.0


@pytest.fixture
def looks(monkeypatch):
    """Set after each look at the notes."""
    seen = threading.Event()
    pause = threading.Event()
    sleeper = SimpleNamespace(
        monotonic=unaided_dump.time.monotonic, sleep=lambda s: (seen.set(), pause.wait(s))
    )
    monkeypatch.setattr(unaided_dump, "time", sleeper)
    return seen


def leader(folder):
    """Rank 0, which leads and has written its own part into ``A``."""
    notes = PeerNotes(folder, 0)
    notes.tell(step=7, is_settled=True, is_whole=True, leads="A", folder="A", digest="mine")
    guard = SimpleNamespace(env=SimpleNamespace(rank=0))
    return unaided_dump.UnaidedDump(guard, notes, stall_s=LONG_S)


def test_two_that_lead_do_not_wait_for_each_other(tmp_path):
    """The disk of the first stood still until the second took over."""
    PeerNotes(tmp_path, 1).tell(step=7, is_settled=True, is_whole=True, leads="B", folder="B")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(leader(tmp_path)._await_answers, "A").result(LONG_S / 2)
    assert found.keys() == {0}


def test_one_that_led_in_vain_answers_the_next_leader_like_any_other(tmp_path, looks):
    """It may hold another state: without its digest this rank would save its own for all."""
    first = PeerNotes(tmp_path, 1)
    first.tell(step=7, is_settled=True, is_whole=True, leads="B", folder="B", failed="disk full")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(leader(tmp_path)._await_answers, "A")
        for _ in range(2):
            looks.clear()
            assert looks.wait(LONG_S)
        assert not found.done()
        first.tell(folder="A", digest="another")
        answers = found.result(LONG_S)
    assert {rank: note.digest for rank, note in answers.items()} == {0: "mine", 1: "another"}


@pytest.mark.parametrize("is_partial", [False, True])
def test_whoever_lacks_tensors_of_the_dump_in_memory_does_not_lead(tmp_path, is_partial):
    notes = PeerNotes(tmp_path, 0)
    absent = (0,) if is_partial else ()
    about = manifest.Manifest("memory", 7, 0, 7, 1, 0, "r1", "a reason", absent=absent)
    memory = SimpleNamespace(manifest=about)
    agent_lost._settle(SimpleNamespace(memory=memory), notes, LONG_S)
    guard = SimpleNamespace(env=SimpleNamespace(rank=0), resumed_step=0)
    dump = unaided_dump.UnaidedDump(guard, notes, stall_s=LONG_S)
    found = dump._leader(notes.read())
    assert found == (None if is_partial else 0)
    dump._seen |= notes.read()
    assert ("had not come to its node" in dump.why_nothing(0)) == is_partial


# --- a step that is saved already -------------------------------------------------------------


def completed(folder, **changed):
    """Rank 0 has written the step once more; what it announces, and the manifest of that."""
    (folder / "alone").mkdir()
    layout = DumpLayout.of_step(folder, 7, "r1-0")
    commit.make_folder(layout)
    made = manifest.read(saved(folder, layout.unfinished.name, **changed))
    lead = leader(folder / "alone")
    lead._complete(layout, made)
    assert not layout.unfinished.exists()
    return lead._notes.saved()


@pytest.mark.parametrize("digest", ["d", ""], ids=["", "which was in memory before"])
@pytest.mark.parametrize("lost", [(0,), ()])
def test_what_another_part_of_the_job_saved_stays_if_it_has_no_less(tmp_path, lost, digest):
    """A node that was cut off saved its step, without what was elsewhere, over that of the others."""
    there = saved(tmp_path, digest=digest)
    content = (there / OTHER).read_bytes()
    assert completed(tmp_path, lost=lost, saved_at=9.0) == str(there)
    assert manifest.read(there).saved_at == 1.0
    assert (there / OTHER).read_bytes() == content


@pytest.mark.parametrize(
    "worse", [{"lost": (0,)}, {"stale": (1,)}, {"run": "r0"}, {"step": 8}, {"lost": (0, 1)}]
)
def test_what_has_less_gives_way(tmp_path, worse):
    name = DumpLayout.of_step(tmp_path, 7).folder.name
    there = saved(tmp_path, name, **worse)
    path = completed(tmp_path, saved_at=9.0)
    assert manifest.read(tmp_path / path).saved_at == 9.0
    assert (path == str(there)) == ("run" not in worse)


def test_a_damaged_one_gives_way(tmp_path):
    there = saved(tmp_path)
    (there / OTHER).unlink()
    assert completed(tmp_path, lost=(0,), saved_at=9.0) == str(there)
    assert manifest.read(there).saved_at == 9.0
