"""Two jobs by turns, and memory at hand: what the rows speed and large of the benchmark rest on."""

import fcntl
import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts/benchmarks"))

import paired_jobs
import spare_memory
from processes import PROC, field
from step_board import Board
from workers.board import LINE


class Training:
    """A trial whose two ranks finish a step of 30 ms each time somebody waits, if they may."""

    def __init__(self, folder):
        self.output = folder / "output"
        self._folder, self._gate = folder, folder / "gate"
        self._step, self._at_s = 0, time.monotonic()

    def ends_within(self, _seconds):
        with self._gate.open("ab") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._step += 1
        self._at_s += 0.03
        with (self._folder / "board").open("ab") as board:
            for rank in range(2):
                board.write(LINE.pack(rank, 0, 10 + rank, self._step, 0, self._at_s))


def test_a_turn_tells_the_time_of_a_step_and_leaves_the_gate_shut(tmp_path):
    trial = Training(tmp_path)
    with (tmp_path / "gate").open("wb") as gate:
        job = paired_jobs.Job(Board(trial), gate)
        job.hold()
        with pytest.raises(BlockingIOError):
            trial.ends_within(0)
        for _ in range(2):
            assert job.take_turn() == pytest.approx(0.03)
            with pytest.raises(BlockingIOError):
                trial.ends_within(0)
        assert len(job.board.lines) >= 2 * 2 * (paired_jobs.LEAST + 1)


def test_certainty_is_that_of_the_mean():
    said = paired_jobs.certainty([0.98, 1.0, 1.02])
    assert said == "1.000 +- 0.023 in the mean of 3 (two standard errors)"


def children():
    return set((PROC / f"self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("share, extra", [(0, 16 << 20), (1, 0)], ids=["some", "all there is"])
def test_memory_is_held_and_given_back_unless_too_little_is_left(share, extra):
    size = share * field(PROC / "meminfo", "MemAvailable") * 1024 + extra
    before = children()
    with spare_memory.held(size):
        held = children() - before
        assert len(held) == (not share)
        assert all(field(PROC / pid / "status", "VmRSS") * 1024 > size for pid in held)
    assert children() <= before  # of these some may have ended, which other tests have left
