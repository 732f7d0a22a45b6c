"""What ranks are told at their first word: all the same, and nothing that cannot be trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.stand_ins import Links, QueuedFileThread, services

from agent.controller import events as ev
from agent.hooks import handshake as handshake_module
from agent.hooks.handshake import Handshake
from agent.records import complete_checkpoint
from agent.spec.job_spec import DumpSpec
from worker_hooks.contract.protocol import Hello, Welcome
from worker_hooks.storage.manifest import Manifest, Shard, encode, write

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # sha256 of abc


class Desk:
    def __init__(self, fallback, lineage=()):
        self.links, self.files, self.told, self.kept = Links(), QueuedFileThread(), [], []
        self.posted, self.record = [], SimpleNamespace(complete=None)
        self.handshake = Handshake(
            DumpSpec(update_grace_s=3, stall_s=4, lineage=lineage),
            "rec",
            fallback,
            self.links,
            SimpleNamespace(
                add_place=self.kept.append,
                resumed=self.resumed,
                present=self.record,
                complete=self.complete,
                write=lambda: self.kept.append("written"),
            ),
            services(post=self.posted.append, say=self.told.append, files=self.files),
        )
        self.handshake.begin(0, "")

    def complete(self, done):
        self.record.complete = done

    def resumed(self, *began_from):
        self.began_from = began_from

    def hello(self, rank, path, *, wants_resume=False, periodic=""):
        hello = Hello(rank, 0, 1, str(path), wants_resume, checkpoints=str(periodic))
        self.handshake.greet(hello)

    def welcome(self, rank):
        (said,) = self.links.said[rank]
        return said


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "dumps")


def dump(folder: Path, step: int, content: bytes = b"abc", by: str = "rec"):
    made = folder / f"tft_saved_checkpoints-step_{step}"
    (made / "rank_0").mkdir(parents=True)
    (made / "rank_0" / "x").write_bytes(content)
    shard = Shard("rank_0/x", 0, "replicated", 3, ABC)
    write(made, Manifest("dump", step, 0, 1, 1, 0, by, "why", 1.0, (shard,)))
    return made


def test_a_rank_is_told_the_times_and_where_to_save(desk, tmp_path):
    desk.hello(0, tmp_path / "ckpt")
    assert desk.welcome(0) == Welcome("", "", str(tmp_path / "dumps"), 3, 4)


MEMORY = "/proc/5/fd/9"


def test_ranks_read_in_memory_what_is_being_written(desk, tmp_path):
    desk.handshake.begin(1, "/ckpt/step_7", MEMORY)
    desk.hello(0, tmp_path)
    assert (desk.welcome(0).resume, desk.welcome(0).folder) == (MEMORY, "/ckpt/step_7")
    assert not desk.welcome(0).is_barred
    assert desk.handshake.resumed == "/ckpt/step_7"
    desk.handshake.begin(2, "/ckpt/step_7")
    desk.hello(1, tmp_path)
    assert (desk.welcome(1).resume, desk.welcome(1).folder) == ("/ckpt/step_7", "")


@pytest.mark.parametrize("step", [6, 7, 8])
def test_of_what_is_in_memory_and_what_the_run_has_saved_the_newer_counts(desk, tmp_path, step):
    saved = dump(tmp_path / "periodic", step)
    about = Manifest("memory", 7, 0, 1, 1, 0, "rec", "why", 1.0, ())
    file = os.memfd_create("manifest")
    os.write(file, encode(about))
    memory = f"/proc/{os.getpid()}/fd/{file}"
    desk.handshake.begin(1, "/ckpt/step_7", memory)
    desk.hello(0, tmp_path / "ckpt", periodic=tmp_path / "periodic")
    desk.files.work()
    os.close(file)
    found = desk.welcome(0)
    assert found.resume == (str(saved) if step == 8 else memory)
    assert found.folder == ("" if step == 8 else "/ckpt/step_7")
    assert [each.step for each in desk.posted] == ([8] if step == 8 else [])


def test_an_attempt_that_resumes_tells_every_rank(desk, tmp_path):
    desk.handshake.begin(1, "/ckpt/step_7")
    desk.hello(0, tmp_path)
    desk.hello(1, "", wants_resume=True)
    assert desk.welcome(0).resume == desk.welcome(1).resume == "/ckpt/step_7"


def test_newcomers_join_from_memory_at_once_and_are_barred(desk, tmp_path):
    dump(tmp_path, 12)
    desk.handshake.begin(0, "/ckpt/step_7")
    desk.hello(0, tmp_path)
    desk.hello(1, "/b")
    desk.handshake.renew(1, "/proc/5/fd/9", [1])
    assert desk.handshake.place((1,)) == str(tmp_path)  # a survivor's is known as before
    desk.hello(1, "/c", periodic=tmp_path, wants_resume=True)
    welcome = Welcome("/proc/5/fd/9", "", str(tmp_path / "dumps"), 3, 4, is_barred=True)
    assert desk.links.said[1][1:] == [welcome]
    assert desk.handshake.place((1,)) == "/c"
    desk.handshake.go_on()
    desk.hello(1, "/c")  # a new state: what is in memory is forgotten by then
    assert desk.links.said[1][2] == welcome._replace(resume="/ckpt/step_7", is_barred=False)


def test_where_ranks_save_is_remembered_once(desk, tmp_path):
    for rank, path in enumerate(("/a", "/b", "/a", "")):
        desk.hello(rank, path)
    desk.files.work()
    assert desk.kept == ["/a", "/b", str(tmp_path / "dumps")]  # the last names no folder
    assert desk.handshake.place((1, 0)) == "/b"
    assert desk.handshake.place((3,)) == "/a"  # that of another rank
    desk.handshake.begin(1, "")
    assert desk.handshake.place((1,)) == ""


def test_a_script_that_asks_itself_goes_on_from_the_newest(desk, tmp_path):
    dump(tmp_path, 3)
    newest = dump(tmp_path, 12)
    for rank in (0, 1):
        desk.hello(rank, tmp_path, wants_resume=True)
    assert desk.links.said == {}
    desk.hello(2, tmp_path)
    assert desk.welcome(2).resume == ""
    desk.files.work()
    assert desk.welcome(0).resume == desk.welcome(1).resume == str(newest)
    desk.hello(3, tmp_path, wants_resume=True)  # late: the answer is known
    assert desk.welcome(3).resume == str(newest)
    assert desk.told == []
    assert desk.posted == [ev.CheckpointFound(0, str(newest), 12)]


def test_a_damaged_one_is_named_and_the_next_is_taken(desk, tmp_path):
    good = dump(tmp_path, 3)
    dump(tmp_path, 12, b"abd")
    desk.hello(0, tmp_path, wants_resume=True)
    desk.files.work()
    assert desk.welcome(0).resume == str(good)
    assert len(desk.told) == 1
    assert "step_12 is skipped" in desk.told[0]


def test_when_none_can_be_trusted_that_is_decided_on_before_anybody_is_told(desk, tmp_path):
    dump(tmp_path, 12, b"abd")
    for rank in (1, 0):
        desk.hello(rank, tmp_path, wants_resume=True)
    desk.files.work()
    (refused,) = desk.posted
    assert refused == ev.StartRefused(0, refused.why, (1, 0))
    assert "can be trusted" in refused.why
    assert desk.links.said == {}
    assert all("is skipped" in sentence for sentence in desk.told)  # the refusal comes last
    desk.handshake.refuse((0, 1), refused.why)
    desk.hello(2, tmp_path, wants_resume=True)  # late: the answer is known
    for rank in range(3):
        assert desk.welcome(rank)[:2] == ("", refused.why)
    desk.handshake.begin(1, "")
    desk.hello(3, tmp_path, wants_resume=True)
    assert 3 not in desk.links.said


def test_when_nothing_was_ever_saved_it_begins_anew(desk, tmp_path):
    desk.hello(0, tmp_path / "ckpt", wants_resume=True)
    desk.files.work()
    assert desk.welcome(0)[:2] == ("", "")
    assert desk.posted == []


def away(desk, tmp_path, monkeypatch):
    """Ranks begin again whose newest checkpoint is in a folder that is not there."""
    monkeypatch.setattr(complete_checkpoint, "LOOK_S", 0.0)
    gone = tmp_path / "away" / "Net-1_9"
    desk.handshake.complete(str(gone), 9)
    desk.handshake.begin(1, "")
    return gone


@pytest.mark.parametrize("is_older_there", [False, True])
@pytest.mark.parametrize("wants_resume", [False, True])
def test_no_attempt_begins_from_an_older_state_than_is_known_to_be_saved(
    desk, tmp_path, monkeypatch, wants_resume, is_older_there
):
    monkeypatch.setattr(complete_checkpoint, "LATE_S", 0.0)
    gone = away(desk, tmp_path, monkeypatch)
    if is_older_there:
        dump(tmp_path / "ckpt", 7)
    periodic = "" if wants_resume else tmp_path / "away"
    desk.hello(0, tmp_path / "ckpt", wants_resume=wants_resume, periodic=periodic)
    desk.files.work()
    assert desk.links.said == {}
    (refused,) = desk.posted
    assert refused == ev.StartRefused(1, refused.why, (0,))
    assert f"{gone} (step 9), is not there" in refused.why
    assert refused.why.endswith("Once it is back: msrun --resume")


def test_a_folder_that_comes_back_soon_is_awaited(desk, tmp_path, monkeypatch):
    gone = away(desk, tmp_path, monkeypatch)
    desk.hello(0, tmp_path / "ckpt", periodic=gone.parent)
    made, looked = [], handshake_module.search

    def search(*where, **how):
        if not made:
            made.append(looked(*where, **how))
            dump(gone.parent, 9)
            return made[0]
        return looked(*where, **how)

    monkeypatch.setattr(handshake_module, "search", search)
    desk.files.work()
    assert made[0].newest is None
    assert desk.welcome(0).resume == f"{gone.parent}/tft_saved_checkpoints-step_9"


def test_a_checkpoint_that_is_complete_is_remembered_and_written_down(desk):
    desk.handshake.complete("/ckpt/Net-1_9", 9)
    assert desk.record.complete == ("/ckpt/Net-1_9", 9)
    desk.files.work()
    assert desk.kept == ["written"]


def test_when_the_first_save_was_killed_it_begins_anew_and_says_so(desk, tmp_path):
    (tmp_path / "tft_saved_checkpoints-step_3_tmp").mkdir()
    desk.hello(0, tmp_path, wants_resume=True)
    desk.files.work()
    assert desk.welcome(0)[:2] == ("", "")
    assert desk.posted == []
    assert desk.told == [
        f"{tmp_path}/tft_saved_checkpoints-step_3_tmp is skipped: it is unfinished",
        f"there is nothing to resume in {tmp_path}: training begins anew",
    ]


def test_the_fallback_is_searched_too(desk, tmp_path):
    found = dump(tmp_path / "dumps", 4)
    desk.hello(0, tmp_path / "ckpt", wants_resume=True)
    desk.files.work()
    assert desk.welcome(0).resume == str(found)


def test_a_search_for_an_attempt_that_is_over_answers_nobody(desk, tmp_path):
    dump(tmp_path, 4)
    desk.hello(0, tmp_path, wants_resume=True)
    desk.handshake.begin(1, "")
    desk.files.work()
    assert desk.links.said == {}
    assert desk.posted == []


def test_a_search_that_fails_is_said(desk, tmp_path, monkeypatch):
    monkeypatch.setattr("agent.hooks.handshake.search", lambda _: json.loads("{"))
    desk.hello(0, tmp_path, wants_resume=True)
    desk.files.work()
    assert "cannot be searched" in desk.posted[0].why


# --- periodic checkpoints


def test_the_folder_of_periodic_checkpoints_is_searched_and_remembered(desk, tmp_path):
    dump(tmp_path / "ckpt", 3)
    newest = dump(tmp_path / "periodic", 12)
    desk.hello(0, tmp_path / "ckpt", wants_resume=True, periodic=tmp_path / "periodic")
    desk.files.work()
    assert desk.welcome(0).resume == str(newest)
    assert desk.kept == [str(tmp_path / "ckpt"), str(tmp_path / "periodic")]


def test_they_alone_are_enough(desk, tmp_path):
    newest = dump(tmp_path / "periodic", 12)
    desk.hello(0, "", wants_resume=True, periodic=tmp_path / "periodic")
    desk.files.work()
    assert desk.welcome(0).resume == str(newest)


def test_a_restart_goes_on_from_what_the_run_saved_after_its_dump(desk, tmp_path):
    older = dump(tmp_path / "ckpt", 3)
    newest = dump(tmp_path / "periodic", 12)
    dump(tmp_path / "periodic", 20, by="another")
    desk.handshake.begin(1, str(older))
    for rank in (0, 1):
        desk.hello(rank, tmp_path / "ckpt", periodic=tmp_path / "periodic")
    desk.files.work()
    desk.hello(2, tmp_path / "ckpt", periodic=tmp_path / "periodic")  # the answer is known
    assert {desk.welcome(rank).resume for rank in range(3)} == {str(newest)}
    assert desk.posted == [ev.CheckpointFound(1, str(newest), 12)]


def test_a_restart_compares_checksums_and_names_what_is_damaged(desk, tmp_path):
    sound = dump(tmp_path / "periodic", 12)
    damaged = dump(tmp_path / "periodic", 16)
    (damaged / "rank_0" / "x").write_bytes(b"abd")
    desk.handshake.begin(1, str(dump(tmp_path / "ckpt", 3)))
    desk.hello(0, tmp_path / "ckpt", periodic=tmp_path / "periodic")
    desk.files.work()
    assert desk.welcome(0).resume == str(sound)
    assert desk.posted == [ev.CheckpointFound(1, str(sound), 12)]
    assert desk.told == [f"{damaged} is skipped: rank_0/x was altered (its checksum differs)"]


def test_ranks_are_told_which_runs_they_continue(tmp_path):
    desk = Desk(tmp_path / "dumps", lineage=("before", "first"))
    desk.hello(0, tmp_path)
    assert desk.welcome(0).lineage == "before:first"
    dump(tmp_path / "other", 3, by="someone")
    desk.hello(1, tmp_path / "other", wants_resume=True)
    desk.files.work()
    assert desk.welcome(1).lineage == "someone:before:first"
    desk.files.work()
    assert desk.began_from == (("someone", "before", "first"), 3)  # for a resume to come
    assert (desk.welcome(0).resumed_step, desk.welcome(1).resumed_step) == (0, 3)


def test_a_restart_keeps_its_dump_when_that_is_newer(desk, tmp_path):
    newest = dump(tmp_path / "ckpt", 13)
    dump(tmp_path / "periodic", 12)
    desk.handshake.begin(1, str(newest))
    desk.hello(0, tmp_path / "ckpt", periodic=tmp_path / "periodic")
    desk.files.work()
    assert desk.welcome(0).resume == str(newest)
    assert desk.posted == []


def test_a_restart_takes_nothing_that_is_not_the_runs_own(desk, tmp_path):
    dump(tmp_path / "periodic", 20, by="another")
    desk.handshake.begin(1, "")
    desk.hello(0, "", periodic=tmp_path / "periodic")
    desk.files.work()
    assert desk.welcome(0).resume == ""
    assert desk.posted == []


def test_a_run_that_went_back_does_not_restart_from_what_the_run_before_it_saved_later(tmp_path):
    desk = Desk(tmp_path / "dumps", lineage=("before",))
    chosen = dump(tmp_path / "periodic", 10, by="before")
    dump(tmp_path / "periodic", 20, by="before")  # another course of training
    desk.handshake.begin(1, str(chosen))
    desk.hello(0, "", periodic=tmp_path / "periodic")
    desk.files.work()
    assert desk.welcome(0).resume == str(chosen)


def test_the_first_attempt_does_not_go_on_unasked(desk, tmp_path):
    dump(tmp_path / "periodic", 20)
    desk.hello(0, "", periodic=tmp_path / "periodic")
    assert desk.welcome(0).resume == ""
