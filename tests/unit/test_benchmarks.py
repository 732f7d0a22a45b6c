"""The benchmarks' own arithmetic, and what they say of a wrong command line."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "scripts/benchmarks"
sys.path.insert(0, str(HERE))  # as for a script in that folder

import recovery  # noqa: E402
from rows import Goal, Result, Row, Samples  # noqa: E402


def bench(what: str, *words: str) -> subprocess.CompletedProcess[str]:
    script = HERE / f"{what}.py"
    return subprocess.run(
        [sys.executable, script, *words], capture_output=True, text=True, check=False
    )


def result(
    goal: Goal, left: tuple[float, ...], right: tuple[float, ...], failed: int = 0
) -> Result:
    row = Row("key", "what", lambda _: {}, goal=goal)
    return Result(row, Samples(left), Samples(right, failed))


@pytest.mark.parametrize("what", ["launch", "recover"])
def test_help_names_every_row(what):
    said = bench(what, "--help")
    assert said.returncode == 0
    keys = {"launch": "init", "recover": "again-lost"}
    assert keys[what] in said.stdout
    assert not said.stderr


@pytest.mark.parametrize(
    "words, complaint",
    [
        (["--rows", "dump,nosuch"], "no row nosuch; there are dump, again"),
        (["--kills", "0"], "--kills must be at least 1"),
        (["--nproc", "1"], "--nproc 2: a survivor saves"),
        (["--json", "/nosuch/folder/x.json"], "there is no folder /nosuch/folder"),
        (["--left", "torchrun"], "unrecognized arguments"),
    ],
)
def test_recover_refuses_and_starts_nothing(words, complaint):
    said = bench("recover", *words)
    assert said.returncode == 2
    assert complaint in said.stderr
    assert not said.stdout


@pytest.mark.parametrize(
    "goal, left, right, failed, reached",
    [
        (Goal(), (1,), (), 3, None),
        (Goal(below=150), (), (149,), 0, True),  # no other side
        (Goal(below=150), (), (150,), 0, False),
        (Goal(below=150), (), (), 3, False),
        (Goal(5), (50, 60), (10, 12), 0, True),
        (Goal(5), (50,), (11,), 0, False),
        (Goal(5), (), (11,), 0, False),  # nothing to compare with
        (Goal(zero=True), (24,), (0, 0), 0, True),
        (Goal(zero=True), (24,), (0, 0, 1), 0, False),  # the median alone would be 0
        (Goal(zero=True), (), (), 0, False),
        (Goal(zero=True, always=True), (24,), (0, 0), 1, False),
    ],
)
def test_a_goal(goal, left, right, failed, reached):
    assert result(goal, left, right, failed).reached is reached


class Output:
    """As much of a trial as a board needs."""

    def __init__(self, folder):
        self.output = folder / "output"


def test_steps_lost_are_those_finished_by_any_rank_and_begun_again_by_one(tmp_path):
    spans = [(0, 57), (0, 58), (50, 60), (49, 61), (61, 61), (61, 61)]  # three attempts of two
    (tmp_path / "board").write_bytes(b"".join(recovery.SPAN.pack(*span) for span in spans))
    board = recovery.Board(Output(tmp_path), 2)
    assert board.lost(1) == 9
    assert board.lost(2) == 0
