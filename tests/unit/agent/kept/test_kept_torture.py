"""Whatever a script does to its memory: what is read of it has each byte, and what is not is refused."""

import os
import subprocess

import pytest
from support.kept_process import ROOT

TORTURE = "from support import kept_torture; kept_torture.torture({seed}, lambda n: n == {lives})"
MUTANTS = {
    "proofs are believed": "LeftMemory._is_proven = lambda *_: True",
    "an update that has begun is not looked at": (
        "BoardWriter.tear = lambda *_: None; LeftMemory._is_proven = lambda *_: True"
    ),
    "copies may be overwritten while they are shown": "StateMapper.commit_begins = lambda *_: None",
}


def outcome(python, seed, lives, mutant=""):
    names = (
        "from worker_hooks.machine.left_memory import LeftMemory\n"
        "from worker_hooks.kept.state_mapper import StateMapper\n"
        "from worker_hooks.machine.kept_memory import BoardWriter\n"
    )
    code = f"{names}{mutant}\nimport torch; torch.set_num_threads(1)\n"
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    return subprocess.run(
        [*python.words, "-c", code + TORTURE.format(seed=seed, lives=lives)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("seed", "lives"), [(1, 6), (1000, 100)], ids=["a few", "many"])
def test_each_byte_is_found_as_it_was_or_nothing(warm_python, seed, lives):
    ended = outcome(warm_python, seed, lives)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_broken_reader_is_noticed(warm_python, mutant):
    """It may take more lives where the processors are busy: fewer ranks die amid a change."""
    told = (outcome(warm_python, seed, 60, mutant).stderr for seed in range(1, 302, 60))
    assert any("TortureError: seed" in each for each in told)
