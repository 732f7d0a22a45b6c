"""Which checkpoints are found in a folder, and which of them is the newest to be trusted."""

from __future__ import annotations

import os

import pytest
from support.checkpoints import NAME, OTHER, SHARD, flipped, newest, saved

from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage import commit
from worker_hooks.storage.find import Verify, candidates, search, search_of_run
from worker_hooks.storage.manifest import read


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path)


def without_manifest(folder):
    (folder / "manifest.json").unlink()


def test_candidates_come_newest_step_first_then_newest_time(tmp_path):
    base = "tft_saved_checkpoints-step_"
    for name, step, at in [("9", 9, 1), ("10", 10, 5), ("10_replaced_1", 10, 2), ("2", 200, 1)]:
        saved(tmp_path, base + name, step=step, saved_at=at)
    (tmp_path / f"{base}300_tmp").mkdir()
    (tmp_path / f"{base}8").mkdir()
    (tmp_path / f"{base}x").mkdir()
    (tmp_path / f"{base}77").write_text("a file")
    (tmp_path / "runs").mkdir()
    found = candidates(tmp_path)
    assert [path.name.removeprefix(base) for path, _ in found] == [
        "300_tmp", "2", "10", "10_replaced_1", "9", "8",
    ]  # fmt: skip
    assert found[0][1] == "it is unfinished"
    assert found[1][1].step == 200
    assert "no manifest.json" in found[5][1]


def test_periodic_checkpoints_are_candidates_by_their_manifest(tmp_path):
    saved(tmp_path, step=9)
    saved(tmp_path, "CKP-1_3", step=103)
    saved(tmp_path, "other name", step=50)
    without_manifest(
        saved(tmp_path, "CKP-1_2", step=102)
    )  # foreign: nobody says that it is a checkpoint
    saved(tmp_path, "CKP-1_4_tmp", step=104)
    for name in ("CKP-1_5.r1_tmp", "a-b-1_5_breakpoint_tmp", "mine_tmp", "CKP-1_6.removed_tmp"):
        (tmp_path / name).mkdir()
    saved(tmp_path, "CKP-1_7.removed_tmp", step=107)
    (tmp_path / "latest").symlink_to("CKP-1_3")
    found = {path.name: found for path, found in candidates(tmp_path)}
    assert list(found)[:3] == ["CKP-1_3", "other name", "tft_saved_checkpoints-step_9"]
    assert set(list(found)[3:]) == {"CKP-1_4_tmp", "CKP-1_5.r1_tmp", "a-b-1_5_breakpoint_tmp"}
    assert {each for each in found.values() if isinstance(each, str)} == {"it is unfinished"}
    assert (newest(tmp_path, lambda _: None) or ())[0] == tmp_path / "CKP-1_3"
    assert [path.name for path, _ in candidates(tmp_path / "CKP-1_4_tmp")] == ["CKP-1_4_tmp"]


def test_what_is_being_deleted_is_no_candidate_even_by_its_own_name(tmp_path):
    folder = saved(tmp_path, "tft_saved_checkpoints-step_7.removed_tmp")
    assert candidates(folder) == candidates(tmp_path) == []


def test_a_checkpoint_itself_is_its_only_candidate(folder):
    assert [path for path, _ in candidates(folder)] == [folder]
    renamed = folder.rename(folder.parent / "mine")
    assert [path for path, _ in candidates(renamed)] == [renamed]


def test_a_folder_that_is_not_there_has_no_candidates(tmp_path):
    assert candidates(tmp_path / "nowhere") == []
    (tmp_path / "file").touch()
    assert candidates(tmp_path / "file") == []


def test_a_checkpoint_that_is_found_twice_is_one(folder):
    assert len(candidates(folder, folder.parent, folder.parent / ".")) == 1


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_named(tmp_path):
    base = "tft_saved_checkpoints-step_"
    saved(tmp_path, base + "1", step=1)
    good = saved(tmp_path, base + "2", step=2)
    flipped(saved(tmp_path, base + "3", step=3) / OTHER)
    without_manifest(saved(tmp_path, base + "4", step=4))
    saved(tmp_path, base + "5_tmp", step=5)
    said = []
    path, found = newest(tmp_path, said.append)
    assert (path, found.step) == (good, 2)
    assert said == [
        f"{tmp_path}/{base}5_tmp is skipped: it is unfinished",
        f"{tmp_path}/{base}4 is skipped: it has no manifest.json: not saved by msrun, or never completed",
        f"{tmp_path}/{base}3 is skipped: {OTHER} was altered (its checksum differs)",
    ]


def test_no_whole_checkpoint_is_none(folder):
    said = []
    os.unlink(folder / SHARD)
    assert newest(folder, said.append) is None
    assert said == [f"{folder} is skipped: {SHARD} is missing"]


def test_how_closely_a_checkpoint_is_looked_at_is_the_searcher_s_choice(tmp_path):
    old = saved(tmp_path, step=7)
    flipped(saved(tmp_path, step=8) / OTHER)
    (saved(tmp_path, step=9) / SHARD).unlink()
    found = {verify: search((tmp_path,), verify=verify) for verify in Verify}
    steps = {verify: result.newest.manifest.step for verify, result in found.items()}
    assert steps == {Verify.FULL: 7, Verify.QUICK: 8, Verify.NONE: 9}
    assert found[Verify.FULL].newest.path == old
    assert [len(found[verify].remarks) for verify in Verify] == [2, 1, 0]


def test_what_other_runs_saved_is_left_out(tmp_path):
    for step, run in ((7, "mine"), (8, "other"), (9, "other")):
        saved(tmp_path, step=step, run=run)
    found = search((tmp_path,), runs={"mine"})
    assert found.newest.manifest.step == 7
    assert [one.manifest.step for one in found.foreign] == [9, 8]
    assert found.remarks == ()
    assert search((tmp_path,)).newest.manifest.step == 9


@pytest.mark.parametrize(
    ("lineage", "until", "step"),
    [
        (("mine",), None, 7),
        (("mine", "first"), 5, 7),  # of its own, although an earlier one would do
        (("new", "mine", "first"), 7, 7),
        (("new", "first"), 5, 5),  # what the first run saved later is not its past
        (("new", "first"), None, 6),
        (("new",), None, None),  # a step of another run is none of its own
    ],
)
def test_a_run_resumes_from_what_it_or_those_before_it_saved(tmp_path, lineage, until, step):
    for number, run in ((5, "first"), (6, "first"), (7, "mine"), (9, "other")):
        saved(tmp_path, step=number, run=run)
    newest = search_of_run([tmp_path], lineage, until).newest
    assert (newest and newest.manifest.step) == step


def test_an_unfinished_checkpoint_is_no_damaged_one(tmp_path):
    saved(tmp_path, "tft_saved_checkpoints-step_5_tmp", step=5)
    found = search((tmp_path,))
    assert (found.newest, len(found.remarks), found.has_damaged) == (None, 1, False)
    flipped(saved(tmp_path, step=4) / OTHER)
    assert search((tmp_path,)).has_damaged


def test_a_dump_of_another_run_keeps_its_name_and_is_found_beside_the_new_one(tmp_path):
    """A job must never resume from what another job saved under the path that it remembers."""

    def draft():
        return saved(tmp_path, f"{NAME}7.r2_tmp", run="r2")

    theirs = saved(tmp_path, run="r1")
    made = read(draft())
    layout = DumpLayout(theirs, "r2")
    beside = commit.commit(layout, made)
    assert (beside.name, read(theirs).record_id) == (f"{NAME}7_beside_1", "r1")
    assert {path.name for path, _ in candidates(tmp_path)} == {theirs.name, beside.name}
    found = search((tmp_path,), runs=("r2",)).newest
    assert found is not None and found.path == beside
    draft()
    assert commit.commit(layout, made, lineage=("r1",)) == theirs
    assert read(theirs).record_id == "r2"
    assert read(theirs.with_name(f"{NAME}7_replaced_1")).record_id == "r1"


def test_what_is_not_above_a_step_is_not_looked_at(tmp_path):
    saved(tmp_path, step=7)
    flipped(saved(tmp_path, step=8) / OTHER)
    found = search((tmp_path,), above=7)
    assert (found.newest, found.has_damaged) == (None, True)
    assert search((tmp_path,), above=8) == (None, (), False, ())
