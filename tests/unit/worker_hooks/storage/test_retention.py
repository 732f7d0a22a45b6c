"""Only what a rule lets go is deleted, and a deletion that is killed leaves nothing half-trusted."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from support.checkpoints import saved

from worker_hooks.contract.layout import REMOVED
from worker_hooks.storage import retention
from worker_hooks.storage.find import candidates
from worker_hooks.storage.manifest import Manifest, read, verify
from worker_hooks.storage.retention import chosen, leftovers, present, remove, sweep

MINUTE = 60.0


def one(name, at, step=0, run="r1", attempt=0):
    made = Manifest("checkpoint", step, 0, 0, 1, attempt, run, "", at, ())
    return Path(name), made


def gone(found, keep_max=0, per_minutes=0, spared=(), lineage=(), last=None):
    last = last and Path(last)
    return [str(path) for path in chosen(found, keep_max, per_minutes, spared, lineage, last)]


# --- choosing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_max", "expected"),
    [(1, "a b c"), (2, "a b"), (3, "a"), (4, ""), (9, ""), (0, "")],
)
def test_the_oldest_go_however_the_list_is_ordered(keep_max, expected):
    found = [one("c", 30.0), one("a", 10.0), one("d", 40.0), one("b", 20.0)]
    assert gone(found, keep_max) == expected.split()


def test_in_a_run_the_step_decides_whatever_the_clock_said():
    assert gone([one("b", 10.0, step=2), one("a", 10.0, step=3)], 1) == ["b"]
    set_back = [one("a", 900.0, step=1), one("b", 901.0, step=2), one("c", 5.0, step=3)]
    assert gone(set_back, 1) == ["a", "b"]
    assert gone(set_back, 2) == ["a"]


def test_a_clock_that_was_set_back_an_hour_costs_no_checkpoint_of_those_just_saved():
    kept, clock = [], 100_000.0
    for step in range(1, 12):
        clock += 60.0 if step != 6 else -3600.0
        kept.append(one(str(step), clock, step=step))
        going = chosen(kept, 3, 0, last=kept[-1][0])
        kept = [each for each in kept if each[0] not in going]
    assert [str(path) for path, _ in kept] == ["9", "10", "11"]


def test_an_attempt_that_went_back_saves_newer_ones():
    found = [one("early", 10.0, step=40), one("lost", 20.0, step=50)]
    found += [one("again", 5.0, step=45, attempt=1)]
    assert gone(found, 1, last="again") == ["lost", "early"]


def test_a_run_that_resumed_another_is_newer_though_its_steps_and_its_clock_are_not():
    found = [one("old run", 99.0, step=900, run="b"), one("just saved", 10.0, step=1, run="c")]
    assert gone(found, 1, lineage=("c", "b", "a")) == ["old run"]
    assert gone(found, 1, lineage=("b", "c")) == ["just saved"]


def test_of_runs_whose_order_is_unknown_the_one_that_saved_last_is_newer():
    anew = [one("old run", 10.0, step=900), one("just saved", 99.0, step=1, run="r2")]
    assert gone(anew, 1) == ["old run"]


def test_what_lies_ahead_of_the_one_just_saved_was_given_up():
    found = [one(str(step), 100.0, step=step, run="") for step in (300, 310, 400, 900)]
    assert gone(found, 2, last="310") == ["400", "900"]


def test_a_mark_of_the_minutes_rule_is_no_later_than_the_clock_says():
    found = [one("a", 9000.0, step=1), one("b", 10.0, step=2), one("c", 50.0, step=3)]
    found += [one("d", 195.0, step=4), one("e", 200.0, step=5)]
    assert gone(found, per_minutes=3) == ["c"]


def test_what_is_spared_stays_and_is_counted():
    found = [one("a", 1.0), one("b", 2.0), one("c", 3.0)]
    assert gone(found, 1, spared=[Path("a")]) == ["b"]


@pytest.mark.parametrize("keep_max", [0, 1, 5])
def test_nothing_has_nothing_to_go(keep_max):
    assert gone([], keep_max, 3) == []
    assert gone([one("a", 1.0)], keep_max, 3) == []


@pytest.mark.parametrize(
    ("minutes", "expected"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "1 2 4 5"),  # 0, 3, 6 are marks, 7 is the newest
        ([0, 3, 6], ""),
        ([0, 2.9, 3], "2.9"),
        ([0, 50, 51, 52.5], "51"),
        ([5, 5, 5], "5"),  # saved at once: the first is the mark, the last the newest
    ],
)
def test_one_stays_for_each_few_minutes_and_the_newest(minutes, expected):
    found = [one(f"{at}/{nr}", at * MINUTE + 1e9) for nr, at in enumerate(minutes)]
    assert [name.split("/")[0] for name in gone(found, per_minutes=3)] == expected.split()


def test_pruning_after_each_save_keeps_the_same_marks_as_pruning_once():
    times = [at * MINUTE * 0.7 + 1e9 for at in range(40)]
    kept = []
    for at in times:
        kept.append(one(str(at), at))
        going = chosen(kept, 0, 3)
        kept = [each for each in kept if each[0] not in going]
    everything = [one(str(at), at) for at in times]
    assert [path for path, _ in everything if path not in chosen(everything, 0, 3)] == [
        path for path, _ in kept
    ]


def test_keep_max_comes_before_minutes():
    found = [one(str(at), at * MINUTE) for at in range(10)]
    assert len(gone(found, keep_max=2, per_minutes=1)) == 8


# --- finding -----------------------------------------------------------------------------------


def test_only_complete_checkpoints_of_the_prefix_are_counted(tmp_path):
    for name in ("CKP-1_5", "CKP-1_6_breakpoint", "CKP-1_5_replaced_1", "CKP_1-1_5", "XCKP-1_5"):
        saved(tmp_path, name)
    saved(tmp_path, f"CKP-1_7{REMOVED}")
    saved(tmp_path, "CKP-1_8_tmp")
    saved(tmp_path)
    (tmp_path / "CKP-1_9").mkdir()
    (tmp_path / "CKP-2_0").symlink_to("CKP-1_5")
    (tmp_path / "CKP-2_1").write_text("a file")
    assert [path.name for path, _ in present(tmp_path, "CKP")] == [
        "CKP-1_5", "CKP-1_5_replaced_1", "CKP-1_6_breakpoint",
    ]  # fmt: skip
    assert [path.name for path, _ in present(tmp_path, "C.P")] == []
    assert tmp_path / "CKP-1_5" in dict(present(tmp_path))
    assert len(present(tmp_path)) == 6  # not the unfinished one, though it has a manifest
    assert present(tmp_path / "nowhere") == []


# --- deleting ----------------------------------------------------------------------------------


def test_a_deletion_leaves_nothing_and_its_neighbours(tmp_path):
    gone_one, stays = saved(tmp_path, "CKP-1_5"), saved(tmp_path, "CKP-1_6")
    remove(gone_one)
    assert os.listdir(tmp_path) == ["CKP-1_6"]
    assert verify(stays, read(stays)) == []
    remove(gone_one)  # another process was quicker
    assert os.listdir(tmp_path) == ["CKP-1_6"]


def test_a_link_is_deleted_and_not_what_it_leads_to(tmp_path):
    real = saved(tmp_path / "elsewhere", "CKP-1_5")
    link = tmp_path / "CKP-1_5"
    link.symlink_to(real)
    remove(link)
    assert os.listdir(tmp_path) == ["elsewhere"]  # nor is there a link by another name
    assert verify(real, read(real)) == []


def test_the_name_is_gone_for_good_before_the_first_file_is(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(retention, "fsync_folder", lambda path: calls.append(f"fsync {path.name}"))
    for module, name in ((os, "rename"), (os, "unlink"), (shutil, "rmtree")):
        real = getattr(module, name)

        def noted(*args, _real=real, _name=name, **kwargs):
            calls.append(f"{_name} {Path(args[0]).name}")
            return _real(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)
    remove(saved(tmp_path / "all", "CKP-1_5"))
    at = calls.index("rename CKP-1_5")
    assert calls[at : at + 3] == ["rename CKP-1_5", "fsync all", "unlink manifest.json"]


@pytest.mark.parametrize("point", range(1, 12))
def test_killed_at_any_call_it_is_whole_or_not_trusted_and_the_next_sweep_clears_it(
    tmp_path, point
):
    path, stays = saved(tmp_path, "CKP-1_5"), saved(tmp_path, "CKP-1_6")
    if (child := os.fork()) == 0:
        left = point

        def counted(real):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    os._exit(7)
                return real(*args, **kwargs)

            return call

        for name in ("rename", "unlink", "rmdir", "fsync", "open"):
            setattr(os, name, counted(getattr(os, name)))
        remove(path)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7
    found = dict(candidates(tmp_path))
    assert verify(stays, found.pop(stays)) == []
    for found_path, manifest in found.items():
        assert (found_path, verify(found_path, manifest)) == (path, [])
    assert len(leftovers(tmp_path)) + len(found) == 1
    sweep(tmp_path)
    remove(path)
    assert os.listdir(tmp_path) == ["CKP-1_6"]


def test_what_a_killed_deletion_left_is_no_hindrance_to_the_next(tmp_path):
    saved(tmp_path, f"CKP-1_5{REMOVED}")
    remove(saved(tmp_path, "CKP-1_5"))
    assert os.listdir(tmp_path) == []
    saved(tmp_path, f"CKP-1_5{REMOVED}")
    assert sweep(tmp_path) == [tmp_path / f"CKP-1_5{REMOVED}"]
    assert os.listdir(tmp_path) == []
    assert sweep(tmp_path / "nowhere") == []


def test_what_cannot_be_deleted_is_an_error_and_no_checkpoint(tmp_path, monkeypatch):
    """Root may delete everything, so the refusal is played."""
    path = saved(tmp_path, "CKP-1_5")

    def refuse(name, **_):
        raise PermissionError(errno.EACCES, "not yours", name)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        with pytest.raises(PermissionError):
            remove(path)
    assert present(tmp_path) == []
    assert leftovers(tmp_path)
    sweep(tmp_path)
    assert leftovers(tmp_path) == []


def test_a_folder_that_cannot_be_renamed_stays_whole(tmp_path, monkeypatch):
    path = saved(tmp_path, "CKP-1_5")
    monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no")))
    with pytest.raises(PermissionError):
        remove(path)
    assert verify(path, read(path)) == []
