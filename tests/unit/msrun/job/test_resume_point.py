"""Which checkpoint a resumed run begins with, and what is said about it."""

import pytest
from support.checkpoints import flipped, saved

from agent.records.complete_checkpoint import CompleteCheckpoint
from agent.spec.job_spec import DumpSpec, UsageError
from msrun.job.resume_point import ResumeOrigin, resume_origin


def dump(origin: ResumeOrigin, said: list[str], world_size: int | None = 2) -> DumpSpec:
    return resume_origin(DumpSpec(), origin, world_size, said.append)


def test_another_number_of_ranks_is_said(tmp_path):
    saved(tmp_path, "tft_saved_checkpoints-step_5", step=5)
    said = []
    dump(ResumeOrigin((tmp_path,)), said, world_size=3)
    assert said[1].startswith("2 ranks saved it, now there are 3")


def test_the_number_of_ranks_is_not_compared_before_it_is_known(tmp_path):
    saved(tmp_path, "tft_saved_checkpoints-step_5", step=5)
    said = []
    dump(ResumeOrigin((tmp_path,)), said, world_size=None)
    assert len(said) == 1


def test_what_the_checkpoint_lacks_is_said(tmp_path):
    saved(tmp_path, lost=(1,), stale=(0,))
    said = []
    dump(ResumeOrigin((tmp_path,)), said)
    assert said[1:] == [
        "the random numbers, buffers and data position of rank 1 were not saved, and begin anew",
        "the random numbers, buffers and data position of rank 0 are of a step before 7",
    ]


def test_the_newest_whole_checkpoint_of_all_places_is_taken(tmp_path):
    base = "tft_saved_checkpoints-step_"
    best = saved(tmp_path / "b", f"{base}5", step=5)
    saved(tmp_path / "a", f"{base}4", step=4)
    bad = saved(tmp_path / "a", f"{base}6", step=6)
    flipped(bad / "rank_1" / "private_rank_1.safetensors")
    said = []
    places = (tmp_path / "a", tmp_path / "b", tmp_path / "c")
    spec = dump(ResumeOrigin(places, ("r1", "r0"), is_run=True), said)
    assert (spec.resume, spec.lineage) == (best, ("r1", "r0"))
    assert said[0].startswith(f"{bad} is skipped: ")
    assert said[1:] == [f"resuming step 5 of run r1 from {best}"]


@pytest.mark.parametrize("may_begin_anew", [False, True])
def test_a_run_whose_newest_checkpoint_is_away_is_not_begun_anew(tmp_path, may_begin_anew):
    """Not by a batch system that starts it once more, either."""
    gone = CompleteCheckpoint(str(tmp_path / "away" / "net-1_5"), 5)
    origin = ResumeOrigin(
        (tmp_path,), ("r1",), is_run=True, may_begin_anew=may_begin_anew, complete=gone
    )
    with pytest.raises(UsageError) as refused:
        dump(origin, [])
    assert str(refused.value) == gone.describe()
    older = saved(tmp_path, step=3, run="r1")
    with pytest.raises(UsageError) as refused:
        dump(origin, [])
    line = f"To begin from step 3 all the same: msrun --resume={older}"
    assert str(refused.value) == f"{gone.describe()} {line}"
    newer = saved(tmp_path, step=6, run="r1")
    assert dump(origin, []).resume == newer


def test_a_step_of_its_own_comes_before_a_later_one_of_another_run(tmp_path):
    base = "tft_saved_checkpoints-step_"
    other = saved(tmp_path, f"{base}900", step=900, run="before")
    own = saved(tmp_path, f"{base}10", step=10, run="r1")
    said = []
    assert dump(ResumeOrigin((tmp_path,), ("r2", "r1"), is_run=True), said).resume == own
    assert said == [
        f"{other} is skipped: another run saved it (before)",
        f"resuming step 10 of run r2 from {own}",
    ]
    assert dump(ResumeOrigin((tmp_path,), ("r1",)), said).resume == other
    assert dump(ResumeOrigin((own,)), said).lineage == ("r1",)


def test_another_run_s_checkpoint_is_never_taken_for_its_own(tmp_path):
    """Of another script, or of other arguments: weights would be foreign, and the exit code 0."""
    saved(tmp_path, "tft_saved_checkpoints-step_8", step=8, run="before")
    other = saved(tmp_path / "a b", "tft_saved_checkpoints-step_9", step=9, run="before")
    said = []
    with pytest.raises(UsageError) as refused:
        dump(ResumeOrigin((tmp_path, tmp_path / "a b"), ("r3",), is_run=True), said)
    assert str(refused.value) == (
        "run r3 has saved no checkpoint: nothing was started. The newest in its folder is of "
        "another run, step 9 of before; to resume from that one: "
        f"msrun --resume='{other}'"
    )
    assert said == []


def test_no_whole_checkpoint_is_one_sentence_after_what_was_skipped(tmp_path):
    (tmp_path / "tft_saved_checkpoints-step_3_tmp").mkdir()
    said = []
    with pytest.raises(
        UsageError, match=f"there is no complete checkpoint in {tmp_path}: nothing was"
    ):
        dump(ResumeOrigin((tmp_path,), ("a",), is_run=True), said)
    assert said == [f"{tmp_path}/tft_saved_checkpoints-step_3_tmp is skipped: it is unfinished"]
