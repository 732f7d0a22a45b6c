"""`msrun checkpoints list`, `verify` and `prune`, as a person or a program calls them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.checkpoints import NAME, OTHER, SHARD, flipped, saved

from agent.spec.job_spec import UsageError
from msrun.checkpoints.list import COLUMNS
from msrun.commands import run
from worker_hooks.contract.layout import REMOVED
from worker_hooks.contract.status_page import Entry
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage import retention
from worker_hooks.storage.manifest import read, verify, write
from worker_hooks.storage.safetensors_file import header


def foreign(path, name="w", metadata=()):
    """A safetensors file that no manifest names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header([Entry(name, "F32", (2, 3), 24)], dict(metadata)) + bytes(24))
    return path


def periodic(parent, step, **more):
    """A periodic checkpoint of one prefix, the higher step the newer."""
    folder = saved(parent, f"CKP-0_{step}", step=step, saved_at=float(step), **more)
    write(folder, read(folder)._replace(kind="checkpoint", epoch=3, batch=step))
    return folder


@pytest.fixture
def call(capfd):
    """`msrun checkpoints WORDS`: its exit code and what it said on stdout."""

    def call(*words):
        code = run(["checkpoints", *map(str, words)])
        return code, capfd.readouterr().out

    return call


def rows(text):
    return {line.split()[-1]: line.split() for line in text.partition("\n\n")[0].splitlines()[1:]}


# --- list --------------------------------------------------------------------------------------


def test_a_folder_s_content_is_listed_newest_first(call, tmp_path):
    now = time.time()
    saved(tmp_path, step=9, saved_at=now - 125)
    periodic(tmp_path, 12)
    foreign(tmp_path / "rank_0" / "Net_train.safetensors", metadata={"step": "4", "epoch": "x"})
    (tmp_path / "CKP-0_13_tmp").mkdir()
    saved(tmp_path, f"CKP-0_1{REMOVED}")
    code, out = call(tmp_path)
    assert code == 0
    assert tuple(out.split()[:10]) == COLUMNS
    found = rows(out)
    assert list(found) == [
        "CKP-0_12", f"{NAME}9", "CKP-0_13_tmp", f"CKP-0_1{REMOVED}", "rank_0/Net_train.safetensors",
    ]  # fmt: skip
    assert found["CKP-0_12"][:4] == ["12", "4", "12", "checkpoint"]
    assert found[f"{NAME}9"][3] == "dump"
    assert " 2 min 5 s " in out
    assert found[f"{NAME}9"][-3:-1] == ["yes", "-"]
    assert found["CKP-0_13_tmp"][3] == "checkpoint"
    assert found["CKP-0_13_tmp"][-3:-1] == ["no", "-"]
    assert found["rank_0/Net_train.safetensors"][:4] == ["4", "-", "-", "foreign"]
    assert found["rank_0/Net_train.safetensors"][-3:-1] == ["yes", "header"]
    assert "CKP-0_13_tmp: unfinished" in out
    assert call("list", tmp_path) == (code, out)


def test_a_project_s_folder_lists_what_is_saved_below_it(call, tmp_path):
    saved(tmp_path / "run" / "ckpt", step=9)
    saved(tmp_path / "other", step=7)
    saved(tmp_path / ".cache", step=8)
    (tmp_path / "a/b/c").mkdir(parents=True)
    saved(tmp_path / "a/b/c", step=6)
    found = rows(call(tmp_path)[1])
    assert [name for name in found if name.endswith(NAME + found[name][0])] == [
        f"run/ckpt/{NAME}9",
        f"other/{NAME}7",
    ]
    assert not [name for name in found if name.startswith(("run/", "other/")) and "rank_" in name]
    with pytest.raises(UsageError, match="holds no complete checkpoint"):
        call("prune", "--keep=1", "--yes", tmp_path)


def test_a_link_to_a_checkpoint_is_no_second_one(call, tmp_path):
    periodic(tmp_path, 1)
    (tmp_path / "latest").symlink_to("CKP-0_1")
    assert list(rows(call(tmp_path)[1])) == ["CKP-0_1"]


def test_damage_is_told_and_is_exit_code_1(call, tmp_path):
    os.truncate(periodic(tmp_path, 1) / SHARD, 10)
    foreign(tmp_path / "a.safetensors").write_bytes(b"no")
    code, out = call(tmp_path)
    assert code == 1
    assert rows(out)["CKP-0_1"][-3:-1] == ["no", "damaged"]
    assert f"damaged: CKP-0_1: {SHARD} has 10 bytes instead of 3000\n" in out
    assert "damaged: a.safetensors: ends before its header does\n" in out


def test_checksums_are_compared_only_when_asked(call, tmp_path):
    flipped(periodic(tmp_path, 1) / OTHER)
    periodic(tmp_path, 2)
    code, out = call(tmp_path)
    assert (code, rows(out)["CKP-0_1"][-2]) == (0, "-")
    code, out = call("list", "--verify", tmp_path)
    assert code == 1
    assert [rows(out)[name][-2] for name in ("CKP-0_1", "CKP-0_2")] == ["damaged", "yes"]


def test_json_says_the_same_to_programs(call, tmp_path):
    periodic(tmp_path, 2, run="r7")
    flipped(periodic(tmp_path, 1) / OTHER)
    foreign(tmp_path / "a.safetensors")
    (tmp_path / "CKP-0_13_tmp").mkdir()
    code, out = call("list", "--json", tmp_path)
    found = json.loads(out)
    assert (code, [one["verified"] for one in found]) == (0, [None] * 4)
    code, out = call("list", "--verify", "--json", tmp_path)
    found = json.loads(out)
    assert code == 1
    assert [one["verified"] for one in found] == [True, False, None, None]
    assert [one["is_complete"] for one in found] == [True, True, False, True]
    first = found[0]
    assert (first["step"], first["epoch"], first["batch"], first["world_size"]) == (2, 3, 2, 2)
    assert (first["record_id"], first["path"]) == ("r7", str(tmp_path / "CKP-0_2"))
    assert (first["kind"], first["saved_at"], first["nbytes"] > 8000) == ("checkpoint", 2.0, True)
    assert found[1]["damages"] == [f"{OTHER} was altered (its checksum differs)"]


@pytest.mark.parametrize("action", ["list", "show", "verify", "merge"])
def test_nothing_there_is_one_sentence(call, tmp_path, action, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, said in [("nowhere", "nowhere does not exist"), ("runs", "holds no checkpoint")]:
        with pytest.raises(UsageError, match=said):
            call(action, name)


def test_the_words_of_wrong_use_name_the_subcommand(call):
    with pytest.raises(
        UsageError, match=r"^msrun checkpoints verify: missing argument 'FOLDER', see"
    ):
        call("verify")
    with pytest.raises(UsageError, match=r"^msrun checkpoints: no such command 'verfy'"):
        call("verfy", "x")
    with pytest.raises(UsageError, match=r"^no/such does not exist$"):
        call("no/such")


def test_names_are_harmless_to_a_terminal(call, tmp_path):
    foreign(tmp_path / "a\x1b[31m.safetensors").write_bytes(b"")
    assert "\x1b" not in call(tmp_path)[1] + call("verify", tmp_path)[1]


def test_a_list_of_files_that_lacks_one_is_damage(call, tmp_path):
    foreign(tmp_path / "m-1.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "m-1.safetensors"}}))
    assert list(rows(call(tmp_path)[1])) == ["m-1.safetensors"]
    index.write_text(json.dumps({"weight_map": {"w": "m-1.safetensors", "v": "m-2.safetensors"}}))
    code, out = call("verify", tmp_path)
    assert code == 1
    assert f"damaged: {index.name}: it names m-2.safetensors, which is missing\n" in out
    index.write_text("[]")
    assert "is not a list of a model's files" in call("verify", tmp_path)[1]


# --- verify ------------------------------------------------------------------------------------


def test_whole_checkpoints_are_verified(call, tmp_path):
    periodic(tmp_path, 1)
    foreign(tmp_path / "a.safetensors")
    (tmp_path / "CKP-0_13_tmp").mkdir()
    code, out = call("verify", tmp_path)
    assert code == 0
    assert out.splitlines()[:3] == [
        "whole: CKP-0_1",
        "skipped: CKP-0_13_tmp: unfinished",
        "sound: a.safetensors: header and sizes fit; the file has no checksums",
    ]
    assert out.splitlines()[3].startswith("3 items: 2 whole, 0 damaged; 8 kB compared in 0.")


def test_each_damage_is_a_line_and_exit_code_1(call, tmp_path):
    folder = periodic(tmp_path, 1)
    flipped(folder / SHARD)
    (folder / OTHER).unlink()
    periodic(tmp_path, 2)
    code, out = call("verify", tmp_path)
    assert code == 1
    assert out.splitlines()[:3] == [
        "whole: CKP-0_2",
        f"damaged: CKP-0_1: {SHARD} was altered (its checksum differs)",
        f"damaged: CKP-0_1: {OTHER} is missing",
    ]
    code, out = call("verify", "--json", folder)
    assert code == 1
    assert [one["verified"] for one in json.loads(out)] == [False]


@pytest.mark.parametrize("words", [("verify",), ("list", "--verify")])
def test_what_training_deletes_meanwhile_is_no_damage(call, tmp_path, monkeypatch, words):
    old = periodic(tmp_path, 1)
    periodic(tmp_path, 2)
    real = manifests.verify

    def slow(folder, *args, **more):
        if old.exists() and not more.get("quick"):
            retention.remove(old)
        return real(folder, *args, **more)

    monkeypatch.setattr(manifests, "verify", slow)
    code, out = call(*words, tmp_path)
    assert (code, "CKP-0_1" in out, "CKP-0_2" in out) == (0, False, True)


def test_a_torn_manifest_is_damage(call, tmp_path):
    (periodic(tmp_path, 1) / "manifest.json").write_text("{")
    code, out = call("verify", tmp_path)
    assert (code, out.splitlines()[0]) == (
        1, "damaged: CKP-0_1: its manifest.json is damaged: it is not JSON",
    )  # fmt: skip


def test_nothing_but_unfinished_is_not_verified(call, tmp_path):
    for name in ("CKP-0_13_tmp", f"CKP-0_13{REMOVED}"):
        (tmp_path / name).mkdir()
        assert call("verify", tmp_path / name)[0] == 1
    assert call("verify", tmp_path)[0] == 1


@pytest.mark.parametrize(
    "spoil", [lambda f: os.truncate(f, f.stat().st_size - 1), lambda f: f.write_bytes(b"")]
)
def test_a_foreign_file_s_size_must_fit_its_header(call, tmp_path, spoil):
    file = foreign(tmp_path / "one" / "a.safetensors")
    assert call("verify", file)[0] == 0
    spoil(file)
    code, out = call("verify", file)
    assert (code, out.startswith("damaged: a.safetensors: ")) == (1, True)
    assert call("verify", tmp_path)[0] == 1


def test_pipes_and_deep_folders_are_not_read(call, tmp_path):
    foreign(tmp_path / "a.safetensors")
    os.mkfifo(tmp_path / "b.safetensors")
    foreign(tmp_path / "1/2/3/4/deep.safetensors")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list(rows(call(tmp_path)[1])) == ["a.safetensors"]


def test_a_cache_of_links_is_read_through_them(call, tmp_path):
    blob = foreign(tmp_path / "blobs" / "abc")
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "snapshots" / "model.safetensors").symlink_to(blob)
    assert list(rows(call(tmp_path)[1])) == ["snapshots/model.safetensors"]


# --- prune -------------------------------------------------------------------------------------


def left(folder):
    return sorted(os.listdir(folder))


def test_the_oldest_are_deleted_and_the_rest_is_whole(call, tmp_path):
    for step in range(1, 6):
        periodic(tmp_path, step)
    foreign(tmp_path / "a.safetensors")
    (tmp_path / "CKP-0_13_tmp").mkdir()
    saved(tmp_path, f"CKP-0_0{REMOVED}")
    before = left(tmp_path)
    code, out = call("prune", "--keep=2", "--dry-run", tmp_path)
    assert (code, left(tmp_path)) == (0, before)
    assert [line.split()[2] for line in out.splitlines()[:-1]] == [
        f"CKP-0_0{REMOVED}", "CKP-0_1", "CKP-0_2", "CKP-0_3",
    ]  # fmt: skip
    assert out.splitlines()[-1].endswith("2 checkpoints would stay")
    code, out = call("prune", "--keep=2", "--yes", tmp_path)
    assert (code, left(tmp_path)) == (0, ["CKP-0_13_tmp", "CKP-0_4", "CKP-0_5", "a.safetensors"])
    for step in (4, 5):
        assert verify(tmp_path / f"CKP-0_{step}", read(tmp_path / f"CKP-0_{step}")) == []
    assert call("prune", "--keep=2", "--yes", tmp_path) == (0, "nothing to delete: 2 checkpoints\n")


def test_the_newest_verified_one_stays_whatever_the_rule_says(tmp_path, capfd):
    for step in range(1, 6):
        folder = periodic(tmp_path, step)
        if step > 2:
            flipped(folder / OTHER)
    run(["checkpoints", "prune", "--keep=1", "--yes", str(tmp_path)])
    assert left(tmp_path) == ["CKP-0_2", "CKP-0_5"]
    said = capfd.readouterr().err
    assert f"CKP-0_5 is damaged: {OTHER} was altered" in said


def test_where_nothing_is_whole_nothing_is_deleted(tmp_path, capfd):
    for step in range(1, 4):
        flipped(periodic(tmp_path, step) / OTHER)
    assert run(["checkpoints", "prune", "--keep=1", "--yes", str(tmp_path)]) == 1
    assert len(left(tmp_path)) == 3
    assert "is complete: nothing is deleted" in capfd.readouterr().err


def test_the_highest_step_stays_though_it_is_the_oldest(call, tmp_path):
    """It is what a resume would take."""
    saved(tmp_path, step=900, saved_at=0.5, run="an earlier one")
    for step in range(1, 4):
        periodic(tmp_path, step)
    assert call("prune", "--keep=1", "--yes", tmp_path)[0] == 0
    assert left(tmp_path) == ["CKP-0_3", f"{NAME}900"]


def test_one_prefix_alone_may_be_meant(call, tmp_path):
    for step in range(1, 4):
        periodic(tmp_path, step)
    saved(tmp_path, step=0, saved_at=0.0)
    assert call("prune", "--keep=1", "--prefix=CKP", "--yes", tmp_path)[0] == 0
    assert left(tmp_path) == ["CKP-0_3", f"{NAME}0"]
    assert call("prune", "--keep=1", "--prefix=none", "--yes", tmp_path)[0] == 0
    assert len(left(tmp_path)) == 2


def test_minutes_are_a_rule_of_their_own(call, tmp_path):
    for step in (1, 30, 61, 90, 130):
        periodic(tmp_path, step)
    assert call("prune", "--per-minutes=1", "--yes", tmp_path)[0] == 0
    assert left(tmp_path) == ["CKP-0_1", "CKP-0_130", "CKP-0_61"]


def test_a_link_is_not_pruned(call, tmp_path):
    elsewhere = periodic(tmp_path / "archive", 1)
    (tmp_path / "ckpt").mkdir()
    for step in (2, 3):
        periodic(tmp_path / "ckpt", step)
    (tmp_path / "ckpt" / "best").symlink_to(elsewhere)
    assert call("prune", "--keep=1", "--yes", tmp_path / "ckpt")[0] == 0
    assert left(tmp_path / "ckpt") == ["CKP-0_3", "best"]
    assert verify(elsewhere, read(elsewhere)) == []


def test_only_a_leftover_can_be_cleared(call, tmp_path):
    saved(tmp_path, f"CKP-0_0{REMOVED}")
    assert call("prune", "--keep=1", "--yes", tmp_path)[0] == 0
    assert left(tmp_path) == []


def test_a_program_must_say_that_it_is_sure(call, tmp_path):
    for step in (1, 2):
        periodic(tmp_path, step)
    with pytest.raises(UsageError, match=r"1 folder .* there is no terminal to ask: give --yes"):
        call("prune", "--keep=1", tmp_path)
    assert left(tmp_path) == ["CKP-0_1", "CKP-0_2"]


@pytest.mark.parametrize("rule", [[], ["--keep=1", "--per-minutes=1"]])
def test_there_is_one_rule(call, tmp_path, rule):
    with pytest.raises(UsageError, match="give either --keep or --per-minutes"):
        call("prune", *rule, tmp_path)


def test_what_is_no_folder_of_checkpoints_is_not_pruned(call, tmp_path):
    with pytest.raises(UsageError, match="is a checkpoint itself: name the folder that holds it"):
        call("prune", "--keep=1", periodic(tmp_path, 1))
    with pytest.raises(UsageError, match="holds no complete checkpoint"):
        call("prune", "--keep=1", foreign(tmp_path / "x" / "a.safetensors").parent)


def test_a_deletion_that_fails_says_which(call, tmp_path, monkeypatch):
    for step in (1, 2):
        periodic(tmp_path, step)

    def fail(_path):
        raise PermissionError(13, "Permission denied", str(tmp_path / "CKP-0_1"))

    monkeypatch.setattr(retention, "remove", fail)
    with pytest.raises(UsageError, match=r"CKP-0_1 cannot be deleted \(Permission denied\)"):
        call("prune", "--keep=1", "--yes", tmp_path)


def test_each_option_is_explained(call):
    for action in ("list", "show", "verify", "prune", "merge"):
        assert call(action, "--help")[0] == 0


def test_paths_are_given_as_they_are(call, tmp_path, monkeypatch):
    periodic(tmp_path / "a b", 1)
    monkeypatch.chdir(tmp_path / "a b")
    assert list(rows(call(".")[1])) == ["CKP-0_1"]
    assert list(rows(call(Path("CKP-0_1"))[1])) == ["CKP-0_1"]
