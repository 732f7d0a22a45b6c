"""A checkpoint in memory: complete or given up, readable by others, written to disk as a dump."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.checkpoints import NAME, saved
from support.dump_desk import STEP, Desk, QueuedFileThread, _result

from agent.controller import actions as do
from agent.controller import events as ev
from agent.dump import memory as room
from agent.dump.draft import DumpDraft, DumpOrder, private_nbytes
from agent.dump.flush import MemoryFlush
from agent.dump.folder import FolderTarget
from agent.dump.memory import MemoryTarget
from agent.dump.summary import dump_summary
from agent.dump.target import AbandonedError, LostStateError, SavedDump
from agent.hooks.status_pages import StatusPages
from worker_hooks.contract import protocol, status_page
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.contract.status_page import Entry
from worker_hooks.storage import manifest, safetensors_file

ENTRIES = (Entry("rng", "U8", (8,), 8),)


def files():
    """Open descriptors of checkpoints in memory."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # what lists them
            count += "msrun-memory" in os.readlink(f"/proc/self/fd/{fd}")
    return count


@pytest.fixture(autouse=True)
def _all_is_freed(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)
    yield
    gc.collect()
    assert files() == 0


@pytest.fixture
def pages():
    """Of ranks 0, at step 12, and 1, at step 11; rank 2 has none."""
    kept = StatusPages()
    for rank, step in ((0, STEP), (1, STEP - 1)):
        fd = status_page.create(rank, 0, ENTRIES)
        one = status_page.Page(fd)
        one.write(step, 1, 5, b"{}", lambda to, n=rank: ctypes.memset(to, n, 8), is_commit=True)
        kept.keep(rank, 0, fd)
    del one
    yield kept
    kept.clear()  # the maps go with them


def written(place, rank, dump_id=1, attempt=0):
    """A rank wrote its shard, as its hooks do."""
    head = safetensors_file.header([Entry("w", "U8", (4,), 4)], {})
    with open(place, "r+b") as file:
        file.write(head + bytes([rank] * 4))
    return protocol.Written(rank, attempt, dump_id, "", len(head) + 4, "", "quick")


def order(*shards, variants=((0,),)):
    return DumpOrder({one.rank: one for one in shards}, variants, (), 3, 0, "rec", "rank 2 died")


def begun(pages, ranks):
    memory = MemoryTarget(STEP, private_nbytes(pages.all()), 0)
    memory.begin()
    return memory, DumpDraft(memory, STEP, ranks, pages.all())


def complete(pages, *, variants=((0,),)):
    memory, draft = begun(pages, (0, 1, 2))
    ranks = [rank for writers in variants for rank in writers]
    shards = [written(memory.place_of(rank), rank) for rank in ranks]
    draft.write_private(lambda _: None)
    return memory, draft, draft.commit(order(*shards, variants=variants))


def content_of(folder, shard):
    return (folder / shard.file).read_bytes()[shard.at :][: shard.nbytes]


@pytest.mark.parametrize("is_inline", [True, False])
def test_others_read_all_of_it_by_its_path(pages, monkeypatch, is_inline):
    monkeypatch.setattr(room, "SMALL", 1 << 20 if is_inline else 0)
    memory, draft, saved = complete(pages, variants=((0,), (1,)))
    assert memory.is_inline == is_inline
    found = manifest.read(Path(saved.path))
    assert (found.kind, found.step, found.epoch, found.batch) == ("memory", STEP, 1, 5)
    assert (found.world_size, found.record_id, found.digest) == (3, "rec", "quick")
    assert found.without_private == saved.without_private == (2,)
    assert found.stale_private == saved.stale_private == (1,)
    assert draft.position == (2, 5)
    held = set()
    for shard in found.shards:
        content = content_of(Path(saved.path).parent, shard)
        assert len(content) == shard.nbytes
        held.add((shard.kind, shard.rank, shard.variant, content[-4:]))
    assert held == {
        ("replicated", 0, 0, b"\0\0\0\0"),
        ("replicated", 1, 1, b"\1\1\1\1"),
        ("private", 0, 0, b"\0\0\0\0"),
        ("private", 1, 0, b"\1\1\1\1"),
    }
    assert sum(shard.nbytes for shard in found.shards) == saved.nbytes
    # a descriptor for each of 16,384 ranks would be more than a process may have
    assert len({shard.file for shard in found.shards if shard.kind == "private"}) == 1
    memory.close()
    memory.close()


def test_nobody_changes_what_is_complete(pages):
    memory, _, saved = complete(pages)
    file = Path(saved.path).parent / manifest.read(Path(saved.path)).shards[0].file
    with open(file, "r+b", buffering=0) as late, pytest.raises(PermissionError):
        late.write(b"x")
    with pytest.raises(PermissionError):
        os.truncate(file, 1)
    memory.close()


def test_a_shard_that_is_not_as_long_as_was_said_is_no_commit(pages):
    memory, draft = begun(pages, (0,))
    shard = written(memory.place_of(0), 0)
    with pytest.raises(OSError, match="bytes instead of 7"):
        draft.commit(order(shard._replace(nbytes=7)))
    memory.close()


def test_an_order_that_is_given_again_has_a_file_of_its_own(pages):
    memory, draft = begun(pages, (0,))
    first = memory.place_of(0)
    written(first, 0)
    second = memory.place_of(0)
    assert first != second
    assert os.stat(first).st_size == 0
    with open(first, "r+b", buffering=0) as late, pytest.raises(PermissionError):
        late.write(b"what nobody wants any more")
    draft.commit(order(written(second, 0)))
    memory.close()


def test_what_is_given_up_takes_no_memory_and_its_numbers_stay_taken(pages):
    memory, draft = begun(pages, (0, 1))
    place = memory.place_of(0)
    shard = written(place, 0)
    draft.write_private(lambda _: None)
    memory.abandon()
    memory.remove()
    with open(place, "r+b", buffering=0) as late, pytest.raises(PermissionError):
        late.write(b"x")
    draft.write_private(lambda _: None)
    with pytest.raises(AbandonedError):
        draft.commit(order(shard))
    assert files() == 2
    memory.close()


def test_without_descriptors_it_is_said_at_the_commit(pages, monkeypatch):
    memory, draft = begun(pages, (0, 1))
    shard = written(memory.place_of(0), 0)

    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    draft.write_private(lambda _: None)
    with pytest.raises(OSError, match="open files"):
        draft.commit(order(shard))
    memory.close()


def flushed(flush, advance):
    """What came of it."""
    files, found = QueuedFileThread(), []
    flush.start(files.do, advance, found.append)
    files.work()
    (told,) = found
    return told


def test_it_is_written_to_disk_as_any_dump(pages, tmp_path):
    memory, draft, saved = complete(pages, variants=((1, 0),))
    layout = DumpLayout.of_step(tmp_path / "ckpt", STEP, "rec")
    flush, done = MemoryFlush(draft.manifest, FolderTarget(layout)), []
    memory.close()  # it goes on
    assert flushed(flush, done.append) == saved._replace(path=str(layout.folder))
    found = manifest.read(layout.folder)
    assert manifest.verify(layout.folder, found) == []
    assert (found.kind, found.step, found.epoch, found.digest) == ("dump", STEP, 1, "")
    assert {shard.file for shard in found.shards} == {
        *(f"rank_{rank}/ttp_rank_{rank}-2_5.safetensors" for rank in (0, 1)),
        *(f"rank_{rank}/private_rank_{rank}.safetensors" for rank in (0, 1)),
    }
    assert (layout.folder / "rank_1/private_rank_1.safetensors").read_bytes()[-8:] == b"\1" * 8
    assert sum(done) == saved.nbytes
    assert os.listdir(tmp_path / "ckpt") == [layout.folder.name]


def test_it_says_whose_private_state_is_of_before_its_commit_and_a_disk_does_not(pages, tmp_path):
    """Only such ranks read what peers have; what is on a disk is read by older versions, too."""
    pages.all()[1].write(STEP, 1, 5, b"{}", lambda to: ctypes.memset(to, 1, 8), is_commit=False)
    memory, draft, _ = complete(pages)
    found = manifest.decode(manifest.encode(draft.manifest))
    assert {each.rank for each in found.shards if each.is_early} == {1}
    layout = DumpLayout.of_step(tmp_path / "ckpt", STEP, "rec")
    flush = MemoryFlush(draft.manifest, FolderTarget(layout))
    memory.close()
    flushed(flush, lambda _: None)
    assert "is_early" not in (layout.folder / "manifest.json").read_text()


def test_two_parts_that_a_rank_wrote_are_two_files_on_disk(pages, tmp_path):
    memory, draft, _ = complete(pages, variants=((0,), (1,)))
    shards = (each._replace(rank=0) for each in draft.manifest.shards if each.kind != "private")
    told = draft.manifest._replace(shards=tuple(shards), holders=((0, 1), (0,)), world_size=2)
    layout = DumpLayout.of_step(tmp_path, STEP, "rec")
    flush = MemoryFlush(told, FolderTarget(layout))
    memory.close()
    flushed(flush, lambda _: None)
    found = manifest.read(layout.folder)
    contents = {shard.variant: content_of(layout.folder, shard)[-4:] for shard in found.shards}
    assert contents == {0: b"\0\0\0\0", 1: b"\1\1\1\1"}
    assert len({shard.file for shard in found.shards}) == 2


def test_a_flush_that_is_given_up_leaves_nothing(pages, tmp_path):
    memory, draft, _ = complete(pages)
    folder = FolderTarget(DumpLayout.of_step(tmp_path, STEP, "rec"))
    told = flushed(MemoryFlush(draft.manifest, folder), lambda _: folder.abandon())
    assert isinstance(told, AbandonedError)
    folder.remove()
    assert os.listdir(tmp_path) == []
    memory.close()


def test_only_in_memory_files_go_without_a_checksum(tmp_path):
    shard = manifest.Shard("7", 0, "replicated", 3, "")
    about = manifest.Manifest("dump", 1, 0, 1, 1, 0, "rec", "why", 1.0, (shard,))
    manifest.write(tmp_path, about)
    with pytest.raises(ValueError, match="cannot be"):
        manifest.read(tmp_path)
    assert not manifest.is_in_memory(tmp_path)
    assert not manifest.is_in_memory(Path("/proc/1/fd/../fd/2"))


def test_it_is_announced_when_it_is_on_disk():
    commit = do.CommitDump(1, 412, do.MEMORY, ((1,),), (2,), "why")
    saved = SavedDump("/proc/1/fd/7", 10_400_000, (3,), ())
    told = dump_summary(commit, saved, 1)
    assert not any("/proc" in one for one in told)
    assert any("rank 2 differs" in one for one in told)
    down = do.CommitDump(1, 412, 0, ((1,),), (2,), "why", from_memory=True)
    told = dump_summary(down, saved._replace(path="/ckpt/x"), 0.094)
    assert told == ["step 412 saved from memory in 0.09 s (10.4 MB): /ckpt/x"]


# --- orders and answers ---------------------------------------------------------------------------


@pytest.fixture
def desk(pages, tmp_path):
    desk = Desk(pages, tmp_path)
    yield desk
    desk.saving.abandon()
    desk.saving.forget()
    desk.files.jobs.clear()


def test_what_is_inline_waits_for_no_thread(desk, tmp_path):
    told = desk.save()
    assert told[1] == protocol.Save(1, STEP, "", is_quick=True)
    assert (told[0].part, told[0].parts, told[0].is_quick) == (0, 1, True)
    desk.saving.hear(written(told[0].folder, 0))
    desk.saving.hear(protocol.Digested(1, 0, 1, "quick"))
    assert [type(event) for event in desk.posted] == [protocol.Written, protocol.Digested]
    assert not desk.files.jobs
    event = desk.commit()
    assert manifest.read(Path(event.path)).reason == "rank 2 died"
    assert files() == 3
    assert desk.places.completed == []  # memory is no place that must be there
    event = desk.commit(0, from_memory=True)
    assert desk.places.completed == [(event.path, STEP)]
    assert event.path == str(tmp_path / "ckpt" / f"tft_saved_checkpoints-step_{STEP}")
    assert desk.said[-1].startswith(f"step {STEP} saved from memory in ")
    desk.saving.forget()
    assert files() == 0
    assert isinstance(desk.commit(0, from_memory=True), ev.CommitFailed)


def test_old_dumps_of_the_run_go_once_a_newer_one_is_complete(desk, tmp_path):
    for step in (1, 2, 3, 4):
        saved(tmp_path / "ckpt", step=step, run="rec")
    saved(tmp_path / "ckpt", step=5, run="other")
    desk.places.resumed = str(tmp_path / "ckpt" / f"{NAME}2")
    desk.saving.hear(written(desk.save()[0].folder, 0))
    desk.commit()
    assert len(os.listdir(tmp_path / "ckpt")) == 5  # in memory it replaces none
    desk.commit(0, from_memory=True)
    left = {path.name.removeprefix(NAME) for path in (tmp_path / "ckpt").iterdir()}
    assert left == {"2", "3", "4", "5", str(STEP)}


def test_a_place_that_fails_for_what_is_in_memory_is_followed_by_the_fallback(desk, tmp_path):
    desk.saving.hear(written(desk.save()[0].folder, 0))
    desk.commit()
    (tmp_path / "ckpt").write_text("in the way")
    event = desk.commit(0, from_memory=True)
    assert isinstance(event, ev.CommitFailed)
    assert event.is_place
    event = desk.commit(1, from_memory=True)
    assert event.path.startswith(str(tmp_path / "dumps"))
    assert "Not a directory" in desk.said[-1] or "File exists" in desk.said[-1]


# --- all ranks restart from it while it is written -----------------------------------------------


@pytest.fixture
def early(desk):
    """It is in memory, and on its way to its folder; what it was before is freed with the attempt."""
    desk.saving.hear(written(desk.save()[0].folder, 0))
    desk.commit()
    desk.before = desk.commit(0, from_memory=True, is_early=True)
    desk.saving.forget()
    yield desk
    desk.files.work()
    desk.saving.close()
    gc.collect()
    assert files() == 0


def read(memory):
    """The files of a checkpoint in memory, as a rank finds them."""
    about, folder = manifest.read(Path(memory)), Path(memory).parent
    return {(one.kind, one.rank): content_of(folder, one) for one in about.shards}


def test_ranks_find_it_in_memory_until_it_is_written_and_all_have_it(early, tmp_path):
    folder = str(tmp_path / "ckpt" / f"{NAME}{STEP}")
    assert early.before == ev.DumpCommitted(1, folder, is_early=True)
    memory = early.saving.beside.path_of(folder)
    found = read(memory)
    assert found.keys() == {("private", 0), ("private", 1), ("replicated", 0)}
    assert early.saving.beside.path_of(folder) == memory  # they failed again
    assert early.places.completed == []
    early.files.work()
    assert early.places.completed == [(folder, STEP)]
    assert early.posted[-1] == ev.CheckpointWritten(1, STEP, folder)
    assert manifest.verify(Path(folder), manifest.read(Path(folder))) == []
    assert early.said[-1].startswith(f"step {STEP} saved from memory in ")
    assert read(memory) == found  # a rank may be late
    early.saving.beside.all_joined()
    assert files() == 0


def test_who_has_it_needs_no_memory_but_for_the_folder(early, tmp_path):
    folder = str(tmp_path / "ckpt" / f"{NAME}{STEP}")
    assert early.saving.beside.path_of(folder)
    early.saving.beside.all_joined()
    assert files() > 0
    early.files.work()
    assert files() == 0
    assert early.saving.beside.path_of(folder) == ""


def test_an_attempt_after_it_was_written_reads_the_folder(early, tmp_path):
    folder = str(tmp_path / "ckpt" / f"{NAME}{STEP}")
    early.files.work()
    assert early.saving.beside.path_of(folder) == ""
    assert files() == 0


def test_where_the_folder_takes_nothing_the_fallback_does(early, tmp_path):
    (tmp_path / "ckpt").write_text("in the way")
    early.files.work()
    told = early.posted[-1]
    assert told.path.startswith(str(tmp_path / "dumps"))
    assert not told.why_not
    assert manifest.verify(Path(told.path), manifest.read(Path(told.path))) == []
    assert "Not a directory" in early.said[-1] or "File exists" in early.said[-1]
    early.saving.beside.all_joined()


def test_where_no_folder_takes_it_that_is_said_and_it_stays_in_memory(early, tmp_path):
    for name in ("ckpt", "dumps"):
        (tmp_path / name).write_text("in the way")
    memory = early.saving.beside.path_of(early.before.path)
    early.files.work()
    assert early.posted[-1].why_not
    assert early.said[-1].startswith(f"step {STEP} is not saved: ")
    early.saving.beside.all_joined()
    assert early.saving.beside.path_of(early.before.path) == memory  # for the next failure
    assert read(memory)


def test_another_dump_does_not_disturb_it(early, tmp_path):
    early.saving.freeze(do.FreezeRanks((0, 1), 2, "rank 2 died again"))
    early.saving.save(do.SaveRanks(2, STEP + 1, (0,), (1,), 0, ""))
    early.saving.abandon()
    early.files.work()
    assert early.posted[-1] == ev.CheckpointWritten(
        1, STEP, str(tmp_path / "ckpt" / f"{NAME}{STEP}")
    )
    early.saving.beside.all_joined()


def test_the_end_of_the_job_waits_for_it(early, tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(early.saving.close()))
    thread.start()
    early.files.work()
    thread.join(60)
    assert done == [None]
    assert manifest.read(tmp_path / "ckpt" / f"{NAME}{STEP}").step == STEP


def test_the_end_of_the_job_waits_for_no_dead_disk(early, tmp_path, monkeypatch):
    monkeypatch.setattr(
        early.saving,
        "_spec",
        early.saving._spec._replace(dump=early.saving._spec.dump._replace(stall_s=0.3)),
    )
    early.saving.close()  # nothing works
    assert (
        early.said[-1]
        == f"step {STEP} is not saved: {tmp_path / 'ckpt' / f'{NAME}{STEP}'} takes nothing more"
    )


def test_large_private_state_is_written_by_the_thread(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "SMALL", 0)
    desk = Desk(pages, tmp_path)
    assert 0 not in desk.save()
    desk.files.work(1)
    desk.saving.hear(written(dict(desk.lines.sent)[0].folder, 0))
    assert len(desk.files.jobs) == 1
    assert {shard.kind for shard in manifest.read(Path(desk.commit().path)).shards} == {
        "replicated",
        "private",
    }
    desk.saving.forget()


def test_from_memory_to_a_folder_the_late_answer_counts_for_neither(desk):
    late = desk.save()[0].folder
    told = desk.save(place=0, number=1)
    assert not told[1].is_quick
    desk.files.work()
    assert os.stat(late).st_size == 0
    assert files() > 0  # the rank may still look for the number it was told
    desk.posted.clear()
    desk.saving.hear(protocol.SaveFailed(0, 0, 1, "no memory", True))
    assert desk.posted == [protocol.SaveFailed(0, 0, 1, "no memory", True, 0)]
    desk.saving.hear(protocol.Written(0, 0, 1, "", 5, "", "quick"))  # it owes a file with a name
    assert len(desk.lines.dropped) == 1


def test_a_checkpoint_that_is_given_up_in_its_commit_is_none(pages, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "SMALL", 0)
    desk = Desk(pages, tmp_path)
    desk.save()
    desk.files.work(1)
    desk.saving.hear(written(dict(desk.lines.sent)[0].folder, 0))
    desk.saving.commit(do.CommitDump(1, STEP, do.MEMORY, ((0,),), (), "why"))
    desk.posted.clear()
    for job, done in list(desk.files.jobs):
        result = _result(job)
        desk.saving.abandon()
        done(result)
    assert [type(event) for event in desk.posted] == [ev.CommitFailed]
    desk.saving.forget()


def test_the_next_checkpoint_replaces_the_last(desk):
    for _ in range(2):
        desk.saving.hear(written(desk.save()[0].folder, 0))
        desk.commit()
    assert files() == 3


def test_a_dump_that_lacks_a_part_of_a_tensor_is_refused_for_what_it_lacks(desk, tmp_path):
    desk.save(place=0)
    desk.files.work()
    place = {"w": {"saved_offsets": [0], "global_shape": [8], "distributed": True}}
    head = safetensors_file.header(
        [Entry("w", "U8", (4,), 4)], {"DCP_SHARDING_INFO": json.dumps(place)}
    )
    folder, file = Path(dict(desk.lines.sent)[0].folder), DumpLayout.shard(0, 1, 5)
    (folder / file).parent.mkdir(exist_ok=True)
    done = safetensors_file.write(folder / file, head, [bytes(4)], lambda _: None)
    desk.saving.hear(protocol.Written(0, 0, 1, file, done.nbytes, done.sha256, "d"))
    desk.posted.clear()
    desk.saving.commit(do.CommitDump(1, STEP, 0, ((0,),), (), "why", holders=((0, 1, 2),)))
    desk.files.work()
    (event,) = desk.posted
    assert event == ev.CommitFailed(1, "parts of w are missing", is_place=False, is_state=True)
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == [folder.name]


@pytest.mark.parametrize(("step", "newest"), [(0, STEP), (STEP + 1, STEP + 1)])
def test_ranks_hear_of_the_newest_step_when_they_are_frozen(tmp_path, pages, step, newest):
    """Of the pages; or of one that a rank has made and not committed, and another may reach."""
    desk = Desk(pages, tmp_path)
    desk.saving.freeze(do.FreezeRanks((1,), 1, "", step))
    assert desk.lines.sent == [(1, protocol.Freeze(1, 10.0, newest))]


class LeftMemory:
    """What killed ranks have left, of which some steps cannot be read."""

    def __init__(self, pages, unread):
        self.pages, self.unread = pages, unread
        self.freed = self.freed_replaced = 0

    def reading(self, action, _pages, _every):
        memory, draft = begun(self.pages, (0, 1, 2))
        save = do.SaveRanks(action.dump_id, STEP, (0,), (), do.MEMORY, "")

        def run(order, _advance):
            if action.step in self.unread:
                raise LostStateError("that of ranks 0, 1 is not the same")
            draft.write_private(lambda _: None)
            shard = written(memory.place_of(0), 0)
            return draft.commit(order._replace(written={0: shard}))

        return SimpleNamespace(save=save, target=memory, draft=draft, run=run)

    def held_nbytes(self):
        return 0

    def drop_dead(self):
        self.freed += 1

    def free_replaced(self):
        self.freed_replaced += 1


def test_memory_of_killed_ranks_is_there_until_a_step_of_it_was_read(pages, tmp_path):
    desk = Desk(pages, tmp_path)
    left = desk.saving.kept = LeftMemory(pages, {STEP + 1})
    why = "what killed ranks have left in memory cannot be read: that of ranks 0, 1 is not the same"
    for dump, step, freed in ((2, STEP + 1, 0), (3, STEP, 1)):
        order = do.CommitDump(dump, step, 0, ((0,),), (), "why", from_memory=True, is_kept=True)
        desk.saving.commit(order)
        desk.files.work()
        assert left.freed == freed
    first, second = (each for each in desk.posted if not isinstance(each, ev.DumpProgressed))
    assert first == ev.CommitFailed(2, why, is_place=False, is_state=True)
    assert isinstance(second, ev.DumpCommitted)
    assert left.freed_replaced == 0
    desk.saving.forget()
    assert left.freed_replaced == 1
