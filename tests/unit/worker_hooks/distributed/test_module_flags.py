"""Which parts of a module train: taken up, and put back on both sides of the making of a DDP."""

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from worker_hooks.distributed import module_flags
from worker_hooks.distributed.module_flags import TRAINED, TRAINING, Flags, ReducedParameters


@pytest.fixture(autouse=True)
def reduced(monkeypatch):
    """What this process knows of DDPs; there is none."""
    monkeypatch.setattr(module_flags, "REDUCED", ReducedParameters())
    module_flags.REDUCED.watch()


@pytest.fixture(autouse=True)
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Process:
    """A script's model, and what its flags are read and written by."""

    def __init__(self):
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
        self.is_in_loop = False
        self.flags = Flags(self.net, lambda: self.is_in_loop)

    def read(self):
        return {key: self.flags.get(key, None) for key in self.flags}

    def write(self, saved, *, is_in_loop):
        self.is_in_loop = is_in_loop
        for key, text in saved.items():
            self.flags[key] = text

    def trained(self):
        return [each.requires_grad for each in self.net.parameters()]


def test_flags_that_were_set_once_come_back():
    old, new = Process(), Process()
    old.net[0].requires_grad_(False)
    old.net[1].eval()
    new.write(old.read(), is_in_loop=True)
    assert new.trained() == [False, False, True, True, True]
    assert [each.training for each in new.net.modules()] == [True, True, False, True]
    assert old.read() == new.read() == {TRAINING: "1101", TRAINED: "00333"}


def test_what_does_not_change_is_the_same_object():
    one = Process()
    was = one.read()
    assert all(one.read()[key] is text for key, text in was.items())
    one.net[0].weight.requires_grad_(False)
    assert one.read()[TRAINED] != was[TRAINED]
    assert one.read()[TRAINING] is was[TRAINING]


def test_a_parameter_that_was_replaced_is_looked_at():
    one = Process()
    one.read()
    one.net[0].weight = nn.Parameter(one.net[0].weight.detach(), requires_grad=False)
    assert one.read()[TRAINED] == "03333"


def test_before_the_ddp_is_made_flags_are_as_when_it_was_made_and_behind_it_as_at_the_step():
    old = Process()
    old.net[2].requires_grad_(False)
    ddp = DistributedDataParallel(old.net)
    old.net[0].requires_grad_(False)  # DDP reduces it all the same
    saved = old.read()
    assert saved[TRAINED] == "22330"
    del ddp
    new = Process()
    new.write(saved, is_in_loop=False)
    assert new.trained() == [True, True, True, True, False]
    again = DistributedDataParallel(new.net)
    new.write(saved, is_in_loop=True)
    assert new.trained() == old.trained() == [False, False, True, True, False]
    assert new.read() == saved
    assert module_flags.REDUCED.is_superseded(again) is False


def test_a_ddp_that_does_not_reduce_what_is_trained_is_refused():
    old, new = Process(), Process()
    ddp = DistributedDataParallel(old.net)
    new.net[0].requires_grad_(False)  # at the top of its script
    other = DistributedDataParallel(new.net)
    with pytest.raises(RuntimeError, match="2 parameters are trained that the present DDP does"):
        new.write(old.read(), is_in_loop=True)
    module_flags.REDUCED.forget()  # both are gone
    new.write(old.read(), is_in_loop=True)
    del ddp, other


def test_other_layers_are_refused():
    saved = Process().read()
    one = Process()
    one.flags = Flags(nn.Linear(2, 2), lambda: True)
    with pytest.raises(ValueError, match="had 4 flags, and has 1"):
        one.write(saved, is_in_loop=True)
