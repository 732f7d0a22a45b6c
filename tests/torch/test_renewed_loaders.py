"""Iterators of DataLoaders go on in a copy of their process as if they had kept their workers."""

import subprocess

import pytest
from support.jobs import WORKERS

pytestmark = [pytest.mark.torch, pytest.mark.warm]


def run(warm_python, case):
    words = [*warm_python.words, str(WORKERS / "renew_loaders.py"), case]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)


@pytest.mark.parametrize("case", ["broken", "whole", "persistent", "lazy"])
def test_batches_are_those_of_an_iterator_that_was_left_alone(warm_python, case):
    done = run(warm_python, case)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done


def test_workers_that_are_not_understood_are_children_that_nobody_knows(warm_python):
    assert run(warm_python, "strange").stdout == "the same\n"


def test_a_batch_that_is_another_one_is_no_silent_difference(warm_python):
    """Its data depend on a number that is in no copy as it was, and that no look finds."""
    done = run(warm_python, "secretive")
    assert done.returncode == 1, done
    assert "of a DataLoader makes another batch than before a rank died" in done.stderr
