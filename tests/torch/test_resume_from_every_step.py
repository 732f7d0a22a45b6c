"""Every way of training is gone on with from each of its commits, in one process and without kills.

What is saved is what a rank's agent would save: the replica as the listener sees it, and the page.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from support.jobs import WORKERS
from support.training_kinds import all_kinds

from worker_hooks import TrainState
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.guard.guard import Guard
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.storage import commit
from worker_hooks.storage.manifest import Manifest, Shard
from worker_hooks.tensors import shard
from worker_hooks.training import torch_hooks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated"),
    pytest.mark.filterwarnings("ignore:Detected call of"),
]

# These are killed for real elsewhere, and slow here; of the last one nothing is ever saved.
ELSEWHERE = {"compiled", "compiled_outer", "workers", "workers_stay", "stream_worker", "captured"}
ELSEWHERE.add("curriculum")  # no class of a data set is a script's here
SOME = {1, 12, 13, 18, 25}  # an epoch has 12 batches
LATE = (19, 24)  # in the second epoch: what changes between epochs was seen
# The first one's gradients are made within its update. The second's break is behind the update, and
# what the third does seldom may be behind it, too. The next two's weights change between the steps.
# What a variable gets behind the update is known with the commit only. The last ones have something
# that never changes, but might, and draw behind backward.
NEVER_LATE = {
    *("closure", "early", "seldom", "variables", "swapped", "weights_by_epoch"),
    *("catches", "new_loaders", "tied", "types", "average_logged", "noise", "late_luck"),
    *("late_stats", "thawed"),
}
# Their schedules' lengths are those of three ranks.
FOR_THREE = {"schedules"}
KINDS = [kind for kind in all_kinds() if kind not in ELSEWHERE | FOR_THREE]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(WORKERS))
        patched.delenv("RANK", raising=False)
        import train_kinds

        gc.freeze()  # every run looks through all that is not
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        patched.setattr(train_kinds.time, "sleep", lambda _: None)
        patched.setattr(os, "fsync", lambda _: None)
        patched.setattr(os, "fdatasync", lambda _: None)
        patched.setattr(Guard, "is_on", property(lambda _: True))  # so there is a page
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield train_kinds
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def save(committed: CommittedState, step: int, place: Path) -> None:
    assert committed.page is not None
    record = committed.page.record(step)
    assert record is not None
    layout = DumpLayout.of_step(place, step)
    commit.make_folder(layout)
    file = DumpLayout.shard(0, *committed.position(step))
    (layout.unfinished / file).parent.mkdir()
    done = shard.write(layout.unfinished / file, committed.replica(step), 0, 1, lambda _: None)
    entries = committed.page.entries
    private = commit.write_private(layout.unfinished, 0, entries, record, lambda _: None)
    written = Shard(file, 0, "replicated", done.nbytes, done.sha256)
    where = {"epoch": record.epoch, "batch": record.batch}
    about = {"kind": "dump", "record_id": "", "reason": "", "digest": done.digest}
    manifest = Manifest(
        step=step,
        **where,
        **about,
        world_size=1,
        attempt=0,
        saved_at=0.0,
        shards=(written, private),
    )
    commit.commit(layout, manifest)


class Trainings:
    """Runs of one kind, each from its beginning or from something saved."""

    def __init__(self, script: ModuleType, kind: str, tmp: Path) -> None:
        self._script, self._kind, self._tmp = script, kind, tmp
        self._count = 0

    def run(
        self, make: Callable[..., TrainState], ckpt: Path | None = None
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Losses and final digests of a whole run or of the rest of one."""
        self._count += 1
        out = self._tmp / f"out {self._count}"
        out.mkdir()
        self._script.TrainState = make
        told = argparse.Namespace(out=out, plain=False, ckpt=str(ckpt or self._tmp))
        job = self._script.Job(self._kind, told)
        try:
            self._script.KINDS[self._kind](job)
            job.end()
        finally:
            job.notes.close()
            torch_hooks._watchers.remove(job.made._loop.tracker.backward_begins)
            self._script.TrainState = TrainState
        losses: dict[str, str] = {}
        for line in (out / f"{self._kind}.0.jsonl").read_text().splitlines():
            losses |= json.loads(line)
        return losses, json.loads((out / f"{self._kind}.0.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_from_each_commit_the_rest_is_the_same(
    kind: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = Trainings(script, kind, tmp_path)
    commit = CommittedState.commit

    def and_save(committed: CommittedState, position: object) -> None:
        commit(committed, position)
        save(committed, committed.step, tmp_path / f"step {committed.step}")

    monkeypatch.setattr(CommittedState, "commit", and_save)
    losses, end = trainings.run(TrainState)
    monkeypatch.setattr(CommittedState, "commit", commit)
    last = max(int(path.name.split()[1]) for path in tmp_path.glob("step *"))
    for step in sorted(SOME | {last - 1, last}):
        rest, found = trainings.run(partial(TrainState, is_recover=True), tmp_path / f"step {step}")
        assert found == end, step
        assert rest.items() <= losses.items(), step
    gc.collect()


@pytest.mark.parametrize(
    "kind",
    sorted({*KINDS} - NEVER_LATE),
)
def test_from_before_a_commit_too_when_its_step_is_complete(
    kind: str, script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks sit behind the update and none comes to its commit."""
    trainings = Trainings(script, kind, tmp_path)
    commit = CommittedState.commit

    def save_and(committed: CommittedState, position: object) -> None:
        if committed.step + 1 in LATE:
            assert committed.is_complete()
            save(committed, committed.step + 1, tmp_path / f"step {committed.step + 1}")
        commit(committed, position)

    monkeypatch.setattr(CommittedState, "commit", save_and)
    losses, end = trainings.run(TrainState)
    monkeypatch.setattr(CommittedState, "commit", commit)
    for step in LATE:
        rest, found = trainings.run(partial(TrainState, is_recover=True), tmp_path / f"step {step}")
        assert found == end, step
        assert rest.items() <= losses.items(), step
    gc.collect()
