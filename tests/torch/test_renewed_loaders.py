"""Iterators of DataLoaders go on in a copy of their process as if they had kept their workers."""

import subprocess

import pytest
import torch
from support.jobs import WORKERS
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe

from worker_hooks.data.renewed_workers import why_not

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


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


class Pipe(MapDataPipe):
    def __getitem__(self, index):
        return index


class Unlike:
    """A loader of somebody else."""

    multiprocessing_context = None
    dataset = (1, 2)
    _dataset_kind, pin_memory = 0, False


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        ([1, 2], {}, ""),
        (Stream(), {}, "for an IterableDataset, whose place cannot be noted"),
        (Pipe(), {}, "for a data pipe of torchdata"),
        ([1, 2], {"in_order": False}, "in_order=False"),
        ([1, 2], {"multiprocessing_context": "spawn"}, "started by spawn, not by fork"),
        ([1, 2], {"multiprocessing_context": "forkserver"}, "started by forkserver, not by fork"),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_why_workers_of_a_loader_cannot_be_started_anew(data, options, reason):
    told = why_not(DataLoader(data, num_workers=2, **options))
    assert reason in told
    assert bool(told) == bool(reason)


def test_other_ways_of_sharing_memory_and_loaders_of_others(monkeypatch):
    loader = DataLoader([1, 2], num_workers=1, pin_memory=True)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert "pins memory for an accelerator" in why_not(loader)
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: "file_system")
    assert "by files of names (set_sharing_strategy)" in why_not(loader)
    monkeypatch.undo()
    assert "workers of a Unlike are not started as torch's own" in why_not(Unlike())
