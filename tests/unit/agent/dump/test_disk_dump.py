"""The agent's share of a dump: private state from the pages, the manifest, the commit by rename."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from agent.controller import actions as do
from agent.dump.draft import DumpDraft, DumpOrder
from agent.dump.folder import FolderTarget
from agent.dump.summary import dump_summary
from agent.dump.target import AbandonedError, SavedDump
from agent.machine.file_thread import THREADS, FileThread, side_by_side
from worker_hooks.contract import status_page
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.contract.protocol import Written
from worker_hooks.contract.status_page import Entry, Page
from worker_hooks.storage import manifest, safetensors_file

STEP = 12
ENTRIES = (Entry("rng", "U8", (8,), 8), Entry("mean", "F32", (2, 2), 16))


@pytest.fixture
def pages():
    """Of three ranks, at steps 12 (committed), 12 (under way) and 11."""
    opened = []

    def make(rank, step, is_commit):
        fd = status_page.create(rank, 0, ENTRIES)
        opened.append(fd)
        one = Page(fd)

        def fill(to):
            ctypes.memset(to, rank + 1, 24)

        one.write(step - 1, 1, 4, b'{"old": 1}', fill, is_commit=True)
        one.write(step, 1, 5, b'{"at": 5}', fill, is_commit=is_commit)
        return one

    made = {0: make(0, STEP, True), 1: make(1, STEP, False), 2: make(2, STEP - 1, True)}
    yield made
    made.clear()  # the maps go with them
    for fd in opened:
        os.close(fd)


def written(target, rank, digest="d"):
    """A rank wrote its shard."""
    file = DumpLayout.shard(rank, 1, 5)
    path = target.layout.unfinished / file
    path.parent.mkdir(exist_ok=True)
    head = safetensors_file.header([Entry("w", "U8", (4,), 4)], {})
    done = safetensors_file.write(path, head, [bytes([rank] * 4)], lambda _: None)
    return Written(rank, 0, 1, file, done.nbytes, done.sha256, digest)


def order(shards, variants=((0,),), odd=(), attempt=0):
    by_rank = {one.rank: one for one in shards}
    return DumpOrder(by_rank, variants, odd, 4, attempt, "rec", "rank 3 died")


def begun(folder, pages, ranks=(0, 1, 2, 3)):
    target = FolderTarget(DumpLayout.of_step(folder, STEP))
    target.begin()
    return target, DumpDraft(target, STEP, ranks, pages)


def everything(folder: Path):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_a_dump_is_complete_and_verified(tmp_path, pages):
    target, draft = begun(tmp_path / "ckpt", pages)
    draft.write_private(lambda _: None)
    saved = draft.commit(order([written(target, 0)]))
    folder = tmp_path / "ckpt" / "tft_saved_checkpoints-step_12"
    assert saved.path == str(folder)
    assert os.listdir(tmp_path / "ckpt") == [folder.name]
    found = manifest.read(folder)
    assert manifest.verify(folder, found) == []
    assert (found.step, found.epoch, found.batch, found.world_size) == (12, 1, 5, 4)
    assert (found.record_id, found.reason, found.digest) == ("rec", "rank 3 died", "d")
    assert found.without_private == (3,) == saved.without_private
    assert found.stale_private == (2,) == saved.stale_private
    assert sum(shard.nbytes for shard in found.shards) == saved.nbytes
    link = folder / "ttp_rank_0-1_5.safetensors"
    assert os.readlink(link) == "rank_0/ttp_rank_0-1_5.safetensors"
    assert everything(folder) == {
        "manifest.json",
        link.name,
        "rank_0/ttp_rank_0-1_5.safetensors",
        *(f"rank_{rank}/private_rank_{rank}.safetensors" for rank in (0, 1, 2)),
    }


def test_older_versions_read_it(tmp_path, pages):
    target, draft = begun(tmp_path / "ckpt", pages)
    draft.write_private(lambda _: None)
    saved = draft.commit(order([written(target, 0)]))
    shards = json.loads((Path(saved.path) / "manifest.json").read_text())["shards"]
    known = {"file", "rank", "kind", "nbytes", "sha256", "variant"}
    assert [each.keys() for each in shards] == [known] * 4


def test_private_state_is_the_pages_payload(tmp_path, pages):
    target, draft = begun(tmp_path, pages)
    draft.write_private(lambda _: None)
    for rank, step, is_commit in ((0, "12", "1"), (1, "12", "0"), (2, "11", "1")):
        path = target.layout.unfinished / DumpLayout.private(rank)
        with safe_open(path, "np") as file:
            metadata = file.metadata()
            assert (metadata["step"], metadata["is_commit"]) == (step, is_commit)
            assert (metadata["record"], metadata["batch"]) == ('{"at": 5}', "5")
            assert file.get_tensor("rng").tolist() == [rank + 1] * 8
            assert file.get_tensor("mean").shape == (2, 2)


def test_an_earlier_attempts_dump_of_the_step_is_moved_aside(tmp_path, pages):
    final = tmp_path / "tft_saved_checkpoints-step_12"
    for attempt, text in enumerate(("first", "second", "third")):
        if attempt:
            (final / "mark").write_text(text)
        target, draft = begun(tmp_path, pages)
        draft.commit(order([written(target, 0)], attempt=attempt))
    assert sorted(os.listdir(tmp_path)) == [
        final.name,
        f"{final.name}_replaced_1",
        f"{final.name}_replaced_2",
    ]
    assert (tmp_path / f"{final.name}_replaced_1" / "mark").read_text() == "second"
    assert (tmp_path / f"{final.name}_replaced_2" / "mark").read_text() == "third"


@pytest.mark.parametrize("digest", ["d", ""])
def test_what_the_others_of_a_job_saved_stays_when_node_0_was_cut_off(tmp_path, pages, digest):
    """They saved the step, and were about to read it: node 0 saved it, too, from its memory."""
    target, draft = begun(tmp_path, pages)
    draft.write_private(lambda _: None)
    draft.commit(order([written(target, 0, digest)]))
    final = tmp_path / "tft_saved_checkpoints-step_12"
    before = (final / "manifest.json").read_bytes()
    target, draft = begun(tmp_path, {0: pages[0], 2: pages[2]})  # it knows less
    draft.write_private(lambda _: None)
    saved = draft.commit(order([written(target, 1)], variants=((1,),)))
    assert (saved.path, target.is_complete) == (str(final), True)
    assert os.listdir(tmp_path) == [final.name]
    assert (final / "manifest.json").read_bytes() == before


def test_what_an_interrupted_dump_left_is_removed_and_complete_ones_are_not(tmp_path, pages):
    old = tmp_path / "tft_saved_checkpoints-step_12_tmp"
    (old / "rank_9").mkdir(parents=True)
    (old / "rank_9" / "half").write_text("x")
    whole = tmp_path / "tft_saved_checkpoints-step_11"
    whole.mkdir()
    (whole / "manifest.json").write_text("{}")
    begun(tmp_path, pages)
    assert everything(old) == set()
    assert everything(whole) == {"manifest.json"}


def test_what_no_variant_names_is_left_out(tmp_path, pages):
    target, draft = begun(tmp_path, pages)
    shards = [written(target, rank, f"digest{rank}") for rank in (0, 1, 2)]
    (target.layout.unfinished / "rank_2" / "ttp_half").write_text("of a writer that died")
    draft.commit(order(shards, variants=((1,), (0,)), odd=(0,)))
    found = manifest.read(target.layout.folder)
    variants = {shard.rank: shard.variant for shard in found.shards if shard.kind == "replicated"}
    assert variants == {1: 0, 0: 1}
    assert (found.digest, found.odd) == ("digest1", (0,))
    assert not (target.layout.folder / "rank_2").exists()
    links = [path.name for path in target.layout.folder.iterdir() if path.is_symlink()]
    assert links == ["ttp_rank_1-1_5.safetensors"]


def test_a_dump_split_over_writers_links_every_part(tmp_path, pages):
    target, draft = begun(tmp_path, pages)
    draft.commit(order([written(target, 0), written(target, 2)], variants=((0, 2),)))
    links = {path.name for path in target.layout.folder.iterdir() if path.is_symlink()}
    assert links == {"ttp_rank_0-1_5.safetensors", "ttp_rank_2-1_5.safetensors"}


def test_a_shard_that_is_not_as_long_as_was_said_is_no_commit(tmp_path, pages):
    target, draft = begun(tmp_path, pages)
    shard = written(target, 0)
    with open(target.layout.unfinished / shard.file, "r+b") as file:
        file.truncate(10)
    with pytest.raises(OSError, match="10 bytes instead of"):
        draft.commit(order([shard]))
    assert not target.layout.folder.exists()


def test_a_vanished_folder_is_no_commit(tmp_path, pages):
    target, draft = begun(tmp_path, pages)
    shard = written(target, 0)
    os.rename(target.layout.unfinished, tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError):
        draft.commit(order([shard]))


def test_a_vanished_parent_is_made_again(tmp_path, pages):
    begun(tmp_path / "gone" / "deeper", pages)
    assert (tmp_path / "gone" / "deeper" / "tft_saved_checkpoints-step_12_tmp").is_dir()


@pytest.mark.parametrize("what", ["file", "link", "file above"])
def test_a_place_that_cannot_be_is_an_os_error(tmp_path, pages, what):
    place = tmp_path / "ckpt"
    if what == "file above":
        place.write_text("mine")
    else:
        place.mkdir()
        unfinished = DumpLayout.of_step(place, STEP).unfinished
        unfinished.write_text("mine") if what == "file" else unfinished.symlink_to("/etc")
    with pytest.raises(OSError):
        begun(place, pages)
    assert os.path.exists("/etc/passwd")


def test_private_state_that_cannot_be_written_fails_the_commit(tmp_path, pages):
    target, draft = begun(tmp_path, pages)
    shard = written(target, 0)
    (target.layout.unfinished / "rank_1").write_text("in the way")
    draft.write_private(lambda _: None)
    with pytest.raises(OSError):
        draft.commit(order([shard]))
    assert not target.layout.folder.exists()


def test_a_page_that_describes_itself_wrongly_counts_as_lost(tmp_path, pages):
    pages[1].entries = (Entry("rng", "WRONG", (24,), 24),)
    pages[0].entries = (Entry("rng", "F32", (1,), 24),)
    target, draft = begun(tmp_path, pages)
    draft.write_private(lambda _: None)
    assert draft.commit(order([written(target, 2)], ((2,),))).without_private == (0, 1, 3)


def test_an_abandoned_dump_is_never_completed_and_leaves_nothing(tmp_path, pages):
    target, draft = begun(tmp_path, pages)
    shard = written(target, 0)
    target.abandon()
    draft.write_private(lambda _: None)
    with pytest.raises(AbandonedError):
        draft.commit(order([shard]))
    target.remove()
    assert os.listdir(tmp_path) == []


def test_what_is_not_ours_is_not_removed(tmp_path):
    target = FolderTarget(DumpLayout.of_step(tmp_path, STEP))
    target.layout.unfinished.mkdir()
    target.abandon()
    target.remove()
    assert target.layout.unfinished.is_dir()


# --- the sentences -------------------------------------------------------------------------------


def commit(variants=((1,),), odd=()):
    return do.CommitDump(1, 412, 0, variants, odd, "why")


def test_a_dump_is_announced():
    told = dump_summary(commit(), SavedDump("/ckpt/x", 10_400_000, (), ()), 0.094)
    assert told == ["step 412 saved by rank 1 in 0.09 s (10.4 MB): /ckpt/x"]
    told = dump_summary(commit(((0, 1, 5),)), SavedDump("/x", 1_230_000_000_000, (), ()), 100)
    assert told == ["step 412 saved by ranks 0, 1, 5 in 100.00 s (1.23 TB): /x"]
    assert "(999 bytes)" in dump_summary(commit(), SavedDump("/x", 999, (), ()), 1)[0]
    assert "(1 kB)" in dump_summary(commit(), SavedDump("/x", 1000, (), ()), 1)[0]


def test_silent_corruption_is_loud():
    odd = dump_summary(commit(odd=(2,)), SavedDump("/x", 1, (), ()), 1)
    assert odd[0].startswith("rank 2 differs from the other replicas at step 412")
    assert "there, unless the script trains ranks differently; the majority's" in odd[0]
    disputed = commit(((0,), (3,)))
    disputed = replace(disputed, holders=((0,), (3,)), is_disputed=True)
    torn = dump_summary(disputed, SavedDump("/x", 1, (), ()), 1)
    assert "no majority" in torn[0]
    assert "(rank 0 against rank 3): what rank 0 and rank 3 wrote is kept" in torn[0]
    assert "either the script does not train the same state on all ranks, or memory" in torn[0]


def test_lost_private_state_is_said():
    told = dump_summary(commit(), SavedDump("/x", 1, (3,), (4, 5)), 1)
    assert any("of rank 3 are lost" in one for one in told)
    assert any("of ranks 4, 5 are of a step before 412" in one for one in told)


def test_side_by_side_does_all_or_raises():
    done = []
    side_by_side(done.append, range(100))
    assert sorted(done) == list(range(100))
    side_by_side(done.append, [])
    tried = []

    def fails(item):
        tried.append(item)
        raise OSError(28, str(item))

    with pytest.raises(OSError):
        side_by_side(fails, range(100))
    assert len(tried) <= THREADS


# --- the thread ----------------------------------------------------------------------------------


def test_the_scribe_does_one_job_after_the_other_and_says_what_came_of_it():
    heard = []
    files = FileThread(lambda what, *args: what(*args))
    files.do(lambda: 1, heard.append)
    files.do(lambda: 1 / 0, heard.append)
    files.do(lambda: threading.current_thread().name, heard.append)
    files.close(5)
    assert heard[0] == 1
    assert isinstance(heard[1], ZeroDivisionError)
    assert heard[2] == "msrun-files"


def test_a_scribe_that_is_stuck_is_left_alone():
    go = threading.Event()
    files = FileThread(lambda what, *args: what(*args))
    files.do(go.wait, lambda _: None)
    files.close(0.05)
    go.set()
    files.close(5)
    files = FileThread(lambda what, *args: what(*args))
    files.close(5)  # it never had anything to do
