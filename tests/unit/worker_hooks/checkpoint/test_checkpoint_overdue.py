"""What is owed when all went on from memory: whatever the moment, all ranks come to rank 0's word."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace

import pytest

from worker_hooks.checkpoint import schedule
from worker_hooks.checkpoint.async_writer import AsyncWriter
from worker_hooks.checkpoint.config import CheckpointConfig
from worker_hooks.checkpoint.model_checkpoint import ModelCheckpoint
from worker_hooks.checkpoint.overdue import OverdueCheckpoint
from worker_hooks.checkpoint.save_plan import CheckpointError
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.guard.gate import EjectedError
from worker_hooks.storage import commit
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import CHECKPOINT_KIND, DUMP_KIND, Manifest

RANKS = 3
STEP = 12
RUN, ATTEMPT = "run-7", 2
nothing = lambda: None  # noqa: E731


@pytest.fixture(autouse=True)
def undurable(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def told(rank=0):
    names = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    return RankEnv.read(names)._replace(record_id=RUN, attempt=ATTEMPT)


def debt(directory, rank=0, look=nothing, within_s=10):
    layout = CheckpointLayout(directory, "Net", 1, STEP, f"{RUN}-{ATTEMPT}")
    return OverdueCheckpoint(layout, told(rank), STEP, look, within_s)


def manifest(step, *, run=RUN, ago_s=0.0, kind=CHECKPOINT_KIND):
    return Manifest(kind, step, 0, step, RANKS, 0, run, "", time.time() - ago_s, ())


def complete(directory, step, name="", **facts):
    folder = directory / (name or f"Net-1_{step}")
    folder.mkdir(parents=True)
    manifests.write(folder, manifest(step, **facts))


def at_once(*works):
    """All in threads of their own; what each returned, or raised."""
    found = [None] * len(works)

    def do(index):
        try:
            found[index] = works[index]()
        except CheckpointError as error:
            found[index] = error

    threads = [threading.Thread(target=do, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return found


# --- by what all decide -----------------------------------------------------------------------------

STEPS = {"save_checkpoint_steps": 4}
BESIDE = {"save_checkpoint_steps": 5, "async_save": True}
TIME = {"save_checkpoint_steps": 0, "save_checkpoint_seconds": 60}


@pytest.mark.parametrize(
    ("config", "there", "is_owed"),
    [
        (STEPS, [], True),
        (STEPS, [{"step": 8}], True),
        (STEPS, [{"step": STEP}], False),
        (STEPS, [{"step": STEP, "name": "Net_3-1_12"}], False),  # of a run in a used folder
        (STEPS, [{"step": STEP, "run": "another"}], True),
        (STEPS, [{"step": STEP, "name": "Other-1_12"}], True),
        (STEPS, [{"step": STEP, "kind": DUMP_KIND, "name": "Net-1_12_breakpoint"}], True),
        ({"save_checkpoint_steps": 5}, [], False),  # 10 was waited for, and 15 is to come
        (BESIDE, [{"step": 5}], True),  # 10 was given up
        (BESIDE, [{"step": 10}], False),
        ({**BESIDE, "save_checkpoint_steps": 13}, [], False),
        (TIME, [], True),
        (TIME, [{"step": 3, "ago_s": 61}], True),
        (TIME, [{"step": 3, "ago_s": 99}, {"step": 9, "ago_s": 5}], False),
        (TIME, [{"step": STEP, "ago_s": 99}], False),
        (TIME, [{"step": 9, "ago_s": -500}], False),  # a clock was set back
        ({"save_checkpoint_steps": 0}, [], False),
    ],
)
def test_all_ranks_save_what_was_due_and_is_not_there(
    tmp_path, monkeypatch, config, there, is_owed
):
    for each in there:
        complete(tmp_path, **each)
    monkeypatch.setattr(ModelCheckpoint, "_save", lambda self, step, _: self.seen.append(step))

    policies = []

    def rank(number):
        saving = ModelCheckpoint("Net", tmp_path, CheckpointConfig(**config))
        saving.seen = []
        saving._context = SimpleNamespace(
            env=told(number),
            memory_step=STEP,
            guard=SimpleNamespace(gate=SimpleNamespace(raise_if_ejected=nothing), not_shared={}),
            committed=SimpleNamespace(position=lambda step: (1, step)),
        )
        state = SimpleNamespace(rank=number, world_size=RANKS, step=STEP)

        def work():
            time.sleep(random.Random(number).random() / 50)
            saving.armed(state)
            saving.armed(state)  # at the next loop
            policies.append(saving._schedule)
            return saving.seen

        return work

    assert at_once(*map(rank, range(RANKS))) == [[STEP] * is_owed] * RANKS
    for each in policies:
        each.close()
    assert not list(tmp_path.glob(".*"))


def test_the_time_goes_on_from_the_checkpoint_before(tmp_path):
    complete(tmp_path, 9, ago_s=40)
    assert debt(tmp_path).passed_s() == pytest.approx(40, abs=5)
    now = [100.0]
    seconds = schedule.Seconds(60, lambda: now[0], passed_s=40)
    assert not seconds.is_due(1)
    now[0] += 20
    assert seconds.is_due(2)
    assert not seconds.is_due(3)


# --- how they agree ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_writer_of_an_earlier_life_makes_no_difference(tmp_path, seed):
    """It completes the folder at any moment, or never; then and only then nothing is owed."""
    chance = random.Random(seed)
    pauses = [chance.random() / 100 for _ in range(RANKS + 1)]
    old = CheckpointLayout(tmp_path, "Net", 1, STEP, f"{RUN}-{ATTEMPT - 1}")
    commit.make_folder(old.place)

    def writer():
        time.sleep(pauses[-1])
        try:
            commit.commit(old.place, manifest(STEP))
        except OSError:
            return False
        return True

    def rank(number):
        def work():
            time.sleep(pauses[number])
            mine = debt(tmp_path, number)
            if number == 0:
                mine.remove_older_incarnations()
            return mine.is_saved(STEP)

        return work

    *answers, is_complete = at_once(*map(rank, range(RANKS)), writer)
    assert answers == [is_complete] * RANKS
    assert not old.unfinished.exists()
    assert debt(tmp_path).layout.unfinished.exists() == (not is_complete)
    assert debt(tmp_path).is_saved(STEP) == is_complete


def test_the_fence_takes_nothing_else_away(tmp_path):
    complete(tmp_path, 8)
    kept = ["Net-1_12.other-0_tmp", f"Net-1_12.{RUN}-{ATTEMPT}_tmp", f"Old-1_12.{RUN}-0_tmp"]
    torn = [f"Net-1_8.{RUN}-0_tmp", f"Net_2-1_12.{RUN}-1_tmp"]
    for name in kept + torn:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank_0.part.json").touch()
    (tmp_path / f".Net.{RUN}-1.due_tmp").touch()
    debt(tmp_path).remove_older_incarnations()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, "Net-1_8"])
    debt(tmp_path / "none").remove_older_incarnations()


def test_rank_0_is_not_waited_for_for_ever(tmp_path):
    with pytest.raises(CheckpointError, match=r"Net-1_12 cannot be saved: rank 0 gave no sign"):
        debt(tmp_path, 1, within_s=0.01).is_saved(STEP)


def ejected():
    raise EjectedError


def test_who_is_taken_out_waits_for_nobody(tmp_path):
    with pytest.raises(EjectedError):
        debt(tmp_path, 1, ejected).is_saved(STEP)
    background = AsyncWriter()
    background._order, background._is_sent = SimpleNamespace(), True
    with pytest.raises(EjectedError):
        background.wait(ejected)
    background.give_up()
