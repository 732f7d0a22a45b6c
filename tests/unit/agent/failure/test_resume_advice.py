"""The last words of a job that did not succeed."""

from __future__ import annotations

import os

import pytest
from support.checkpoints import OTHER, saved

from agent.failure.resume_advice import KeptCheckpoint, ResumeAdvice, as_json, resume_advice
from agent.records import run_record
from agent.records.run_record import Record


@pytest.fixture
def environ(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def remember(places, name, started, cwd="/here", **fields) -> Record:
    made = Record(name, "job", os.getpid(), 1, "/logs", ("msrun", "t.py"), cwd, started)
    made = made._replace(**fields)
    run_record.write(run_record.writable_folder(places), made)
    return made


@pytest.mark.parametrize(
    ("others", "is_away", "command"),
    [
        ([], False, "msrun --resume"),
        ([("old", 1, "/here"), ("far", 9, "/there")], False, "msrun --resume"),
        ([("new", 9, "/here")], False, "msrun --resume mine"),
        ([], True, "msrun --resume mine"),
    ],
)
def test_the_last_line_is_what_to_type(environ, tmp_path, others, is_away, command):
    record = remember(environ, "mine", 5, checkpoints=(str(tmp_path),))
    for name, started, cwd in others:
        remember(environ, name, started, cwd)
    folder = saved(tmp_path, step=412)
    found = resume_advice(str(folder), "", record, environ, is_away=is_away)
    assert found.text.split("\n") == [
        f"msrun: saved: step 412, 2 ranks, {folder}",
        f"msrun: to resume: {command}",
    ]
    assert as_json(found) == {
        "saved": {"step": 412, "world_size": 2, "path": str(folder), "command": command},
        "lost": None,
        "gave_up": None,
        "not_replaced": None,
    }


OTHER_NODES_THERE = (
    "msrun: start the other nodes with the line that started them, but with {} and without "
    "--node-rank, and this one with the next:"
)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_node_that_took_the_part_of_node_0_says_where_all_are_to_meet(environ, tmp_path, is_away):
    """With the line that started it it would join a node 0 that begins anew."""
    record = remember(environ, "mine", 5, checkpoints=(str(tmp_path),))
    folder, place = saved(tmp_path, step=412), "--master-addr=10.0.0.2 --master-port=29500"
    found = resume_advice(
        str(folder),
        "",
        record,
        environ,
        is_away=is_away,
        has_other_nodes=True,
        meets_at=("10.0.0.2", 29500),
    )
    assert found.text.split("\n")[1:] == [
        OTHER_NODES_THERE.format(place),
        f"msrun: to resume: msrun --node-rank=0 {place} --resume{' mine' * is_away}",
    ]


def test_what_was_lost_comes_first_and_the_older_checkpoint_is_named(environ, tmp_path):
    good = saved(tmp_path, step=3, run="mine")
    (saved(tmp_path, step=4, run="mine") / OTHER).unlink()
    saved(tmp_path, step=5, run="another")  # which a resume of this run would not take
    record = remember(environ, "mine", 5, checkpoints=("/nowhere", str(tmp_path)))
    found = resume_advice(None, "step 9 is not saved: \x1b[2J", record, environ, is_away=False)
    assert found.text.split("\n") == [
        "msrun: lost: step 9 is not saved: \\x1b[2J",
        f"msrun: older checkpoint: step 3, 2 ranks, {good}",
        "msrun: to resume: msrun --resume",
    ]


def test_without_any_checkpoint_there_is_nothing_to_type(environ, tmp_path):
    record = remember(environ, "mine", 5, checkpoints=(str(tmp_path),))
    found = resume_advice(None, "no step was committed", record, environ, is_away=False)
    assert found.text == "msrun: lost: no step was committed; no older checkpoint remains"
    none = {"saved": None, "gave_up": None, "not_replaced": None}
    assert as_json(found) == {**none, "lost": "no step was committed"}
    gone = resume_advice(str(tmp_path / "gone"), "", record, environ, is_away=False)
    assert gone == ResumeAdvice(None, "", "")


@pytest.mark.parametrize(
    ("key", "words", "why"),
    [
        (
            "gave_up",
            "gave up",
            "3 attempts in a row reached no commit after step 412 (2 of 5 restarts left unused)",
        ),
        ("not_replaced", "not replaced", "rank 3 died three times at step 412"),
    ],
)
def test_why_there_was_no_restart_and_why_nobody_was_replaced(environ, tmp_path, key, words, why):
    record = remember(environ, "mine", 5, checkpoints=(str(tmp_path),))
    folder = saved(tmp_path, step=412)
    found = resume_advice(str(folder), "", record, environ, is_away=False, **{key: why})
    assert found.text.split("\n") == [
        f"msrun: {words}: {why}",
        f"msrun: saved: step 412, 2 ranks, {folder}",
        "msrun: to resume: msrun --resume",
    ]
    assert as_json(found)[key] == why


def test_what_the_script_has_to_change_follows_the_reason():
    why = "the script wraps its model in DDP outside of the training function"
    (line,) = ResumeAdvice(None, "", "", not_replaced=why).text.split("\n")
    assert line == f"msrun: not replaced: {why}; move DDP(...) into train(state)"


def test_one_rank_is_one_rank():
    text = ResumeAdvice(KeptCheckpoint(1, 1, "/c"), "", "msrun --resume").text
    assert text == "msrun: saved: step 1, 1 rank, /c\nmsrun: to resume: msrun --resume"


def test_the_other_nodes_of_a_job_are_told_of_before_what_to_type_here(environ, tmp_path):
    record = remember(environ, "mine", 5, checkpoints=(str(tmp_path),))
    folder = saved(tmp_path, step=412)
    found = resume_advice(str(folder), "", record, environ, is_away=False, has_other_nodes=True)
    *_, others, here = found.text.split("\n")
    assert others.startswith("msrun: start the other nodes with the line that started them")
    assert here == "msrun: to resume: msrun --resume"
    nothing = resume_advice(
        None, "lost", record._replace(checkpoints=()), environ, is_away=False, has_other_nodes=True
    )
    assert "other nodes" not in nothing.text
