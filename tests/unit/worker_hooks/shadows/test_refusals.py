"""What a copy of a process would lack is refused, each with its reason."""

import importlib
import sys
from types import SimpleNamespace

import pytest

from worker_hooks.shadows import cuts
from worker_hooks.shadows.refusals import Facts, why_not

FINE = Facts(world_size=2, has_groups=True, backends=frozenset({"gloo"}), need=10, free=20)


def test_a_plain_training_on_cpus_can_be_copied():
    assert not why_not(FINE)
    assert not why_not(Facts())  # one rank needs no group
    assert not why_not(FINE._replace(free=None))  # the kernel shows no limit


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"is_guarded": True}, "the script has a TrainState"),
        ({"is_main_thread": False}, "a thread that is not the main one"),
        ({"devices": ("cuda",)}, "the script uses cuda"),
        ({"threads": ("writer", "sender")}, "lack its threads: writer, sender"),
        ({"children": 2}, "2 child processes"),
        ({"children": 1}, "1 child process beside workers"),
        ({"loaders": "a DataLoader has"}, "a DataLoader has"),
        ({"shared": ("/dev/shm/a",)}, "memory that other processes share: /dev/shm/a"),
        ({"has_groups": False}, "no process group"),
        ({"backends": frozenset({"gloo", "nccl"})}, "process groups of nccl"),
        ({"is_sharded": True}, "sharded (FSDP, DTensor)"),
        ({"has_sent": True}, "sends from rank to rank"),
        ({"pending": 1}, "has begun and not ended"),
        ({"openmp": "libomp.so cannot end its threads"}, "libomp.so cannot"),
        ({"need": 5 << 20, "free": 3 << 20}, "5 MiB of memory may be needed"),
    ],
)
def test_each_of_these_is_refused(change, reason):
    assert reason in why_not(FINE._replace(**change))


def test_a_class_that_is_imported_protects_nothing(monkeypatch):
    """As by ``try: from msrun import TrainState``, or by a preload that saw it in a source."""
    assert "is_one_made" in vars(importlib.import_module(cuts.TRAIN_STATE))
    module = SimpleNamespace(is_one_made=False)
    monkeypatch.setitem(sys.modules, cuts.TRAIN_STATE, module)
    assert not cuts.is_guarded()
    module.is_one_made = True
    assert cuts.is_guarded()
    monkeypatch.delitem(sys.modules, cuts.TRAIN_STATE)
    assert not cuts.is_guarded()
