"""Ranks agree through files: what becomes complete, what never does, and what may be deleted."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import newest
from support.jobs import poll
from support.tensors import tensors_of

from worker_hooks.checkpoint import finalize as commits
from worker_hooks.checkpoint import rank_comparison, rank_writer
from worker_hooks.checkpoint.finalize import finalize
from worker_hooks.checkpoint.planner import PlannedCheckpoint
from worker_hooks.checkpoint.rank_comparison import compare_ranks, remove_all_else
from worker_hooks.checkpoint.rank_writer import failure_file, report_failure, write_part
from worker_hooks.checkpoint.save_plan import (
    CheckpointError,
    OwnShare,
    SaveOrder,
    SaveRules,
    Share,
    decode,
    encode,
)
from worker_hooks.contract.atomic_file import read_small
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.contract.status_page import CommitRecord, Entry
from worker_hooks.storage import merged_file
from worker_hooks.storage.find import candidates
from worker_hooks.storage.group_info import restore_group_info_list
from worker_hooks.storage.manifest import read, sound_model, verify
from worker_hooks.tensors.placements import Box
from worker_hooks.tensors.shard import Replica, plan

quiet = lambda _nbytes: None  # noqa: E731
STALL_S = 0.3


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(commits, "SIGN_S", 0.02)


class Rank:
    """One rank's part in a checkpoint of a small state."""

    def __init__(self, directory, rank, world_size, *, part=(0, 1), step=7, life="r-0", **more):
        weight = torch.arange(300_000.0) + more.pop("odd", 0)
        half = more.pop("half", None)  # of a weight that is cut over two groups
        boxes = {}
        if half is not None:
            weight = weight[:300_000].reshape(600, 500)[:, 250 * half : 250 * half + 250]
            weight = weight.contiguous()
            boxes["model.w"] = Box((600, 500), (0, 250 * half), (600, 250))
        bias = torch.ones(3) * more.pop("bias", 1)
        tensors = {"model.w": weight, "model.b": bias}
        replica = Replica(tensors, [], "{}", {}, boxes=boxes)
        self.plan = None if part is None else plan(replica, *part)
        share = None
        if self.plan is not None:
            spans = tuple((segment.nbytes, mine) for segment, mine in self.plan.segments)
            share = Share(part[1], self.plan.head.decode("latin-1"), self.plan.seed, spans, 0)
        record = CommitRecord(step, 0, step, 0, b"{}", b"", is_commit=True)
        own = OwnShare((Entry("rng", "U8", (4,), 4),), record, 4)
        keep = more.pop("keep", 5)
        rules = SaveRules(
            keep, more.pop("minutes", 0), more.pop("crc", False), more.pop("stall_s", STALL_S)
        )
        self.order = SaveOrder(
            layout=CheckpointLayout(directory, "CKP", 1, step, life),
            prefix=more.pop("prefix", "CKP"),
            step=step,
            epoch=0,
            batch=step,
            rank=rank,
            world_size=world_size,
            attempt=int(life[-1]),
            record_id=more.pop("run", "r"),
            lineage=more.pop("lineage", "before"),
            resumed_step=more.pop("resumed_step", 10**9),
            reason="a test",
            groups=more.pop("groups", ()),
            is_merged=more.pop("is_merged", False),
            share=share,
            own=own,
            rules=rules,
        )
        self.draft = PlannedCheckpoint(
            share, own, replica, self.plan, record._replace(payload=b"abc" + bytes([rank]))
        )

    def write(self):
        write_part(self.order, self.draft, quiet)
        return self

    def commit(self):
        return finalize(self.order, quiet)


def kinds(folder):
    return {shard.file: shard.kind for shard in read(folder).shards}


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_orders_survive_their_way_to_another_process(tmp_path):
    for part in ((1, 3), None):
        order = Rank(tmp_path, 1, 3, part=part).order
        assert decode(encode(order)) == order


def test_an_integrated_checkpoint_is_one_model_and_everyone_s_own(tmp_path):
    Rank(tmp_path, 2, 3, part=None).write()
    Rank(tmp_path, 1, 3, part=None).write()
    first = Rank(tmp_path, 0, 3).write()
    done = first.commit()
    folder = tmp_path / "CKP-1_7"
    assert (done.folder, done.warnings) == (str(folder), ())
    assert kinds(folder) == {
        "rank_0/CKP-1_7.safetensors": "replicated",
        **{f"rank_{rank}/private_rank_{rank}.safetensors": "private" for rank in range(3)},
    }
    assert names(folder) == ["CKP-1_7.safetensors", "manifest.json", "rank_0", "rank_1", "rank_2"]
    assert verify(folder, read(folder)) == []
    assert names(tmp_path) == ["CKP-1_7"]


def test_parts_make_up_the_model_once(tmp_path):
    ranks = [Rank(tmp_path, rank, 3, part=(rank, 3)).write() for rank in range(3)]
    ranks[0].commit()
    folder = tmp_path / "CKP-1_7"
    assert sorted(kinds(folder).values()) == ["private"] * 3 + ["replicated"] * 3
    rows = sum(
        each.tensor.numel()
        for path in folder.glob("*.safetensors")
        for each in tensors_of(path)
        if each.name == "model.w"
    )
    assert rows == 300_000


def test_copies_stand_in_for_a_damaged_model(tmp_path):
    for rank in (1, 2):
        Rank(tmp_path, rank, 3).write()
    Rank(tmp_path, 0, 3).write().commit()
    folder = tmp_path / "CKP-1_7"
    assert sorted(kinds(folder).values()) == ["copy", "copy", *["private"] * 3, "replicated"]
    assert [path.name for path in folder.glob("*.safetensors")] == ["CKP-1_7.safetensors"]
    assert os.readlink(folder / "CKP-1_7.safetensors") == "rank_0/CKP-1_7.safetensors"
    for rank in range(3):
        with open(folder / f"rank_{rank}/CKP-1_7.safetensors", "r+b") as file:
            said = []
            path, found = newest(tmp_path, said.append)
            (model,) = (shard for shard in found.shards if shard.kind == "replicated")
            assert (path, model.rank) == (folder, rank)
            assert len(said) == bool(rank)
            file.seek(5000)
            file.write(b"\xff\xff")
    assert newest(tmp_path, said.append) is None


def test_a_replica_that_differs_is_no_copy(tmp_path):
    Rank(tmp_path, 1, 3).write()
    Rank(tmp_path, 2, 3).write()
    done = Rank(tmp_path, 0, 3, odd=1).write().commit()
    found = read(tmp_path / "CKP-1_7")
    assert found.odd == (0,) and "rank 0 differs" in done.warnings[0]
    assert [shard.rank for shard in found.shards if shard.kind == "replicated"] == [1]
    # nor does it stand in for a model that is damaged later
    held = {one.rank: one.kind for one in found.shards if one.kind != "private"}
    assert held == {1: "replicated", 2: "copy"}


def test_parts_of_replicas_that_differ_make_up_nothing(tmp_path):
    Rank(tmp_path, 1, 2, part=(1, 2), odd=1).write()
    first = Rank(tmp_path, 0, 2, part=(0, 2)).write()
    with pytest.raises(CheckpointError, match=r"different states \(rank 0 against rank 1\)"):
        first.commit()
    assert names(tmp_path) == []


def compare_in_background(layout, rank, ranks):
    """A rank that has said what it holds, and awaits the others."""
    words = layout, (rank, ranks), {}, quiet, 60.0
    thread = threading.Thread(target=compare_ranks, args=words, daemon=True)
    thread.start()
    poll((layout.unfinished / f"rank_{rank}.holds.json").exists)
    return thread


def test_what_a_rank_cannot_write_all_hear(tmp_path):
    second = Rank(tmp_path, 1, 2, part=None)
    (second.order.layout.unfinished / "rank_1").mkdir(parents=True)
    (second.order.layout.unfinished / "rank_1/private_rank_1.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        second.write()
    first = Rank(tmp_path, 0, 2).write()
    with pytest.raises(CheckpointError, match=r"rank 1: .*Is a directory"):
        first.commit()
    assert names(tmp_path) == []


@pytest.mark.parametrize(("number", "passes"), [(errno.ENOSPC, True), (errno.EACCES, False)])
@pytest.mark.parametrize("has_room", [True, False], ids=["", "not even for the reason"])
def test_all_hear_whether_what_failed_may_pass(tmp_path, monkeypatch, has_room, number, passes):
    error = OSError(number, os.strerror(number))

    def refuse(*_, **__):
        raise error

    second, first = Rank(tmp_path, 1, 2, part=None), Rank(tmp_path, 0, 2).write()
    with monkeypatch.context() as patched:
        patched.setattr(rank_writer.commit, "write_private", refuse)
        if not has_room:
            patched.setattr(rank_writer, "write_atomic", refuse)
        with pytest.raises(CheckpointError, match=os.strerror(number)) as told:
            second.write()
    assert told.value.is_passing == passes
    assert ("MB to write" in str(told.value)) == passes
    why = os.strerror(number) if has_room else "it had no room to say why"
    with pytest.raises(CheckpointError, match=f"rank 1: {why}") as heard:
        first.commit()
    assert heard.value.is_passing == (passes or not has_room)


@pytest.mark.parametrize("others", [0, 2])
def test_a_part_of_what_rank_0_gave_up_is_given_up(tmp_path, monkeypatch, others):
    second = Rank(tmp_path, 1, 2, part=None)
    unfinished = second.order.layout.unfinished
    for rank in range(others):
        compare_in_background(second.order.layout, rank, others)

    def remove(*_, **__):
        remove_all_else(unfinished)
        assert unfinished.exists() == bool(others)
        (unfinished / "rank_1/private").write_bytes(b"")

    monkeypatch.setattr(rank_writer.commit, "write_private", remove)
    with pytest.raises(CheckpointError, match="rank 0 could not write") as told:
        second.write()
    assert told.value.is_passing


def test_a_rank_that_cannot_say_what_it_holds_keeps_nobody_waiting(tmp_path, monkeypatch):
    layout = CheckpointLayout(tmp_path, "CKP", 1, 7, "r-0")

    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(rank_comparison, "write_atomic", refuse)
        with pytest.raises(OSError, match="No space left"):
            compare_ranks(layout, (1, 2), {}, quiet, 60.0)
    with pytest.raises(CheckpointError, match="rank 1: No space left") as told:
        compare_ranks(layout, (0, 2), {}, quiet, 60.0)
    assert told.value.is_passing


def test_a_rank_that_fails_after_it_compared_has_compared(tmp_path, monkeypatch):
    """Else one rank alone would compare again at the next checkpoint, and wait for the others."""
    layout = CheckpointLayout(tmp_path, "CKP", 1, 7, "r-0")
    looks = []

    def read_late(path):
        if looks or path.name != "rank_1.holds.json":
            return read_small(path)
        looks.append(path)
        compare_ranks(layout, (1, 2), {}, quiet, 60.0)
        report_failure(failure_file(layout, 1), "no room", passes=True)
        raise FileNotFoundError(path)  # when rank 0 looked, it was not there yet

    monkeypatch.setattr(rank_comparison, "read_small", read_late)
    assert compare_ranks(layout, (0, 2), {}, quiet, 60.0).difference == ""


def test_a_slow_rank_learns_what_the_others_hold_though_they_gave_up(tmp_path):
    first, second = Rank(tmp_path, 0, 3), Rank(tmp_path, 1, 3, part=None)
    layout = first.order.layout
    threads = [compare_in_background(layout, rank, 3) for rank in (0, 1)]
    (layout.unfinished / "rank_1/private_rank_1.safetensors").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="Is a directory"):
        second.write()
    with pytest.raises(CheckpointError, match="Is a directory"):
        first.write().commit()
    assert compare_ranks(layout, (2, 3), {}, quiet, 60.0).difference == ""
    for thread in threads:
        thread.join()
    remove_all_else(layout.unfinished)
    left = {path.name for path in layout.unfinished.iterdir()}
    assert left == {f"rank_{rank}.holds.json" for rank in range(3)}


def test_a_rank_that_never_comes_is_named(tmp_path):
    Rank(tmp_path, 1, 3, part=None).write()
    first = Rank(tmp_path, 0, 3).write()
    with pytest.raises(CheckpointError, match="rank 2 did not write its part"):
        first.commit()
    assert names(tmp_path) == []


def test_a_rank_that_gets_on_is_waited_for(tmp_path):
    """Its file grows for longer than the patience with one that does not."""
    patient = {"stall_s": 3.0}  # a busy machine may let the thread below wait for a while
    first, second = Rank(tmp_path, 0, 2, **patient).write(), Rank(tmp_path, 1, 2, part=None)
    growing = second.order.layout.unfinished / "rank_1"
    growing.mkdir()
    grown = threading.Event()

    def grow():
        for number in range(20):
            (growing / "growing").write_bytes(b"x" * number)
            grown.wait(0.2)
        second.write()

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        assert first.commit().folder == str(tmp_path / "CKP-1_7")
    finally:
        thread.join()


def test_a_part_of_another_step_is_none(tmp_path):
    odd = Rank(tmp_path, 1, 2, part=None)
    odd.order = odd.order._replace(step=8)
    odd.write()
    with pytest.raises(CheckpointError, match="other steps"):
        Rank(tmp_path, 0, 2).write().commit()


def test_an_earlier_life_mixes_with_nothing_and_is_swept(tmp_path):
    Rank(tmp_path, 1, 2, part=None, life="r-0").write()
    Rank(tmp_path, 1, 2, part=None, life="other-0").write()
    Rank(tmp_path, 1, 2, part=None, life="r-2", step=8).write()
    Rank(tmp_path, 0, 2, life="before-3", step=9).write()
    (tmp_path / ".CKP.r-0.due_tmp").touch()
    (tmp_path / "CKP-1_3.removed_tmp").mkdir()
    first = Rank(tmp_path, 0, 2, life="r-1").write()
    with pytest.raises(CheckpointError, match="rank 1 did not"):
        first.commit()
    Rank(tmp_path, 1, 2, part=None, life="r-1").write()
    Rank(tmp_path, 0, 2, life="r-1").write().commit()
    assert names(tmp_path) == ["CKP-1_7", "CKP-1_7.other-0_tmp", "CKP-1_8.r-2_tmp"]


def test_what_nobody_wrote_into_for_long_is_swept(tmp_path, monkeypatch):
    Rank(tmp_path, 0, 1, life="other-0").write()
    monkeypatch.setattr(commits, "STALE_S", -1.0)
    Rank(tmp_path, 0, 1).write().commit()
    assert names(tmp_path) == ["CKP-1_7"]


def test_the_newest_stay_whatever_life_they_are_of(tmp_path):
    for step in range(1, 6):
        Rank(tmp_path, 0, 1, step=step, life=f"r-{step % 2}", keep=2).write().commit()
    assert names(tmp_path) == ["CKP-1_4", "CKP-1_5"]
    Rank(tmp_path, 0, 1, step=9, prefix="CKP_1", keep=1).write().commit()
    assert names(tmp_path) == ["CKP-1_4", "CKP-1_5", "CKP_1-1_9"]
    assert [path.name for path, _ in candidates(tmp_path)] == ["CKP_1-1_9", "CKP-1_5", "CKP-1_4"]


def test_the_same_step_again_is_moved_aside_first(tmp_path):
    Rank(tmp_path, 0, 1).write().commit()
    Rank(tmp_path, 0, 1).write().commit()
    assert names(tmp_path) == ["CKP-1_7", "CKP-1_7_replaced_1"]


def test_the_checkpoints_of_another_run_are_not_touched_though_prefix_and_names_are_the_same(
    tmp_path,
):
    for step in (1, 2, 3):
        for run in ("r", "other"):
            Rank(tmp_path, 0, 1, step=step, run=run, life=f"{run}-0", keep=1).write().commit()
    Rank(tmp_path, 0, 1, step=4, keep=2).write().commit()
    left = {path.name: read(path).record_id for path in tmp_path.iterdir()}
    assert left == {"CKP-1_3": "r", "CKP-1_3_beside_1": "other", "CKP-1_4": "r"}
    assert newest(tmp_path, pytest.fail).path.name == "CKP-1_4"


def test_the_checkpoints_of_resumed_runs_are_counted_and_go_first_whatever_the_clock_said(
    tmp_path, monkeypatch
):
    clock = iter(range(900, 0, -100))
    monkeypatch.setattr(commits.manifests.time, "time", lambda: float(next(clock)))
    for run, step in (("a", 5), ("a", 6), ("b", 3), ("stranger", 7)):
        Rank(tmp_path, 0, 1, step=step, run=run, life=f"{run}-0").write().commit()
    for step in (4, 5, 6):
        done = Rank(tmp_path, 0, 1, step=step, run="c", lineage="b:a", keep=2).write().commit()
        assert done.warnings == ()
    left = {path.name: read(path).record_id for path in tmp_path.iterdir()}
    assert left == {"CKP-1_5": "c", "CKP-1_6": "c", "CKP-1_7": "stranger"}


def test_a_tie_names_nobody_and_keeps_all_sides_and_all_older_ones(tmp_path):
    Rank(tmp_path, 0, 1, step=1).write().commit()
    Rank(tmp_path, 1, 2, odd=1, keep=1).write()
    done = Rank(tmp_path, 0, 2, keep=1).write().commit()
    found = read(tmp_path / "CKP-1_7")
    assert (found.odd, found.is_disputed, found.holders) == ((), True, ((0,), (1,)))
    assert verify(tmp_path / "CKP-1_7", found) == []
    (warning,) = done.warnings
    assert "the replicas disagreed without a majority" in warning
    assert "rank 0 against" in warning and "differs" not in warning
    assert names(tmp_path) == ["CKP-1_1", "CKP-1_7"]


def test_a_tie_of_which_one_rank_wrote_the_model_names_nobody(tmp_path):
    Rank(tmp_path, 1, 2, odd=1, part=None).write()
    done = Rank(tmp_path, 0, 2).write().commit()
    found = read(tmp_path / "CKP-1_7")
    assert (found.odd, found.is_disputed) == ((), False)  # the other rank told no digest
    assert done.warnings == ()


@pytest.mark.parametrize(("keep", "left"), [(1, 2), (2, 3)])
def test_nothing_goes_if_the_new_one_is_not_sound(tmp_path, monkeypatch, keep, left):
    for step in range(1, keep + 1):
        Rank(tmp_path, 0, 1, step=step, keep=keep).write().commit()
    commit = commits.commit.commit

    def and_damage(place, manifest, lineage):
        folder = commit(place, manifest, lineage)
        with open(place.folder / "rank_0/CKP-1_7.safetensors", "r+b") as file:
            if keep == 1:  # the only one that would stay is read
                file.seek(9000)
                file.write(b"\xff\xff\xff")
            else:
                file.truncate(9000)
        return folder

    monkeypatch.setattr(commits.commit, "commit", and_damage)
    done = Rank(tmp_path, 0, 1, keep=keep).write().commit()
    assert "so none is deleted" in done.warnings[0]
    assert len(names(tmp_path)) == left


def test_an_old_one_that_cannot_go_is_a_warning(tmp_path, monkeypatch):
    Rank(tmp_path, 0, 1, step=1, keep=1).write().commit()

    def no(path):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(commits.retention, "remove", no)
    done = Rank(tmp_path, 0, 1, step=2, keep=1).write().commit()
    assert "cannot be deleted: Operation not permitted" in done.warnings[0]


def test_what_is_read_back_must_be_what_was_written(tmp_path, monkeypatch):
    Rank(tmp_path, 0, 1, step=1, crc=True).write().commit()
    monkeypatch.setattr(rank_writer, "sha256_of", lambda *_: "0" * 64)
    with pytest.raises(CheckpointError, match="what was read back"):
        Rank(tmp_path, 0, 1, step=2, crc=True).write()
    assert "CKP-1_2" not in names(tmp_path)


def test_a_file_that_shrank_is_no_checkpoint(tmp_path):
    first = Rank(tmp_path, 0, 1).write()
    os.truncate(first.order.layout.unfinished / "rank_0/CKP-1_7.safetensors", 100)
    with pytest.raises(CheckpointError, match="has 100 bytes instead"):
        first.commit()
    assert names(tmp_path) == []


# --- groups of ranks that hold different states --------------------------------------------------

GROUPS = ((0, 2), (1, 3))


def grouped(tmp_path, parts, **more):
    """Ranks 0 and 2 hold the left half of a weight, ranks 1 and 3 the right one."""
    odd = more.pop("odd", {})
    bias = more.pop("bias", {})
    return [
        Rank(tmp_path, rank, 4, part=part, half=rank % 2, groups=GROUPS, odd=odd.get(rank, 0),
             bias=bias.get(rank, 1), **more).write()
        for rank, part in enumerate(parts)
    ]  # fmt: skip


def links(folder):
    return sorted(path.name for path in folder.glob("*.safetensors") if path.is_symlink())


LOWEST = [(0, 1), (0, 1), None, None]
WHOLE = [(0, 1)] * 4
SPLIT = [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("parts", [LOWEST, WHOLE, SPLIT])
def test_each_group_has_its_state_in_it_once(tmp_path, parts):
    first, *_ = grouped(tmp_path, parts)
    folder = Path(first.commit().folder)
    made = read(folder)
    assert made.holders == GROUPS
    assert verify(folder, made) == []
    state = [one for one in made.shards if one.kind == "replicated"]
    writers = {0: 0, 1: 1} if parts is not SPLIT else {0: 0, 2: 0, 1: 1, 3: 1}
    assert {one.rank: one.variant for one in state} == writers
    assert len(links(folder)) == len(writers)
    copies = [one.rank for one in made.shards if one.kind == "copy"]
    assert copies == ([2, 3] if parts is WHOLE else [])


def test_a_group_s_copy_stands_in_for_its_damaged_file(tmp_path):
    first, *_ = grouped(tmp_path, WHOLE)
    folder = Path(first.commit().folder)
    (folder / "rank_1" / "CKP-1_7.safetensors").unlink()
    sound = sound_model(folder, read(folder))
    assert {one.rank for one in sound.shards if one.kind != "private"} == {0, 3}
    assert restore_group_info_list(str(folder / "rank_1" / "group_info.pb")) == [1, 3]


@pytest.mark.parametrize("parts", [LOWEST, SPLIT])
def test_what_groups_hold_is_one_file_in_place_of_links(tmp_path, parts):
    first, *_ = grouped(tmp_path, parts, is_merged=True)
    done = first.commit()
    folder = Path(done.folder)
    assert (done.warnings, links(folder)) == ((), [])
    found = load_file(folder / "CKP-1_7.safetensors")
    assert torch.equal(found["model.w"], torch.arange(300_000.0).reshape(600, 500))
    assert torch.equal(found["model.b"], torch.ones(3))
    assert verify(folder, read(folder)) == []
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


def test_what_is_no_single_state_has_no_merged_file(tmp_path):
    first, *_ = grouped(tmp_path, LOWEST, is_merged=True, bias={1: 2})
    done = first.commit()
    (said,) = done.warnings
    assert said.endswith("(integrated_save): model.b is not the same in all groups of ranks")
    assert not list(Path(done.folder).glob("*.safetensors"))


def test_a_full_disk_leaves_the_links(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    first, *_ = grouped(tmp_path, LOWEST, is_merged=True)
    monkeypatch.setattr(merged_file, "write", full)
    done = first.commit()
    assert "no merged file (integrated_save): " in done.warnings[0]
    assert len(links(Path(done.folder))) == 2


def test_ranks_of_a_group_that_differ_keep_their_own(tmp_path):
    first, *_ = grouped(tmp_path, WHOLE, odd={2: 1})
    done = first.commit()
    assert done.warnings == ("ranks that held the same state differ now: rank 0 against rank 2",)
    assert read(Path(done.folder)).holders == ((0,), (2,), (1, 3))
    assert links(Path(done.folder)) == []
    first, *_ = grouped(tmp_path, SPLIT, odd={2: 1}, step=8)
    with pytest.raises(CheckpointError, match=r"rank 0 against rank 2.*parts make up none"):
        first.commit()


def test_a_group_without_its_part_is_no_checkpoint(tmp_path):
    grouped(tmp_path, LOWEST)
    Rank(tmp_path, 1, 4, half=0, groups=GROUPS).write()
    first = Rank(tmp_path, 0, 4, half=0, groups=GROUPS).write()
    with pytest.raises(CheckpointError, match=r"cannot be saved: parts of model\.w are missing"):
        first.commit()
    assert names(tmp_path) == []
