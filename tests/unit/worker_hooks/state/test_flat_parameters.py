"""Parameters that torch's FullyShardedDataParallel has cut: a rank's part is read at any moment."""

import pytest
import torch
from support.meshes import mesh_seen_by
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from worker_hooks.state.registry import pieces_of
from worker_hooks.state.replica import PieceReader
from worker_hooks.tensors import placements
from worker_hooks.tensors.placements import GATHERED, HELD_GROUP, why_gathered, why_group_held

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def octets(tensor):
    return tensor.detach().clone().numpy().tobytes()


class Training:
    """Two flat parameters, one inside of the other's module, and an optimizer of both."""

    def __init__(self, *, use_orig_params):
        def cut(module):
            return FullyShardedDataParallel(
                module, device_id=torch.device("cpu"), use_orig_params=use_orig_params
            )

        torch.manual_seed(1)
        self.inner = cut(nn.Linear(8, 16))
        self.net = cut(nn.Sequential(self.inner, nn.Tanh(), nn.Linear(16, 4)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.pieces = pieces_of({"model": self.net, "optimizer": self.optimizer})
        self.reader = PieceReader(self.pieces)
        self.seen = []

    @property
    def tensors(self):
        return self.pieces[0].tensors()

    def content(self):
        return {name: octets(each) for name, each in self.tensors.items()}

    def look(self, *_):
        self.seen.append((self.content(), self.reader.marks()[0]))

    def backward(self):
        out = self.net(torch.ones(4, 8))
        out.square().mean().backward()

    def update(self):
        parts = self.reader.find_parts()[1]
        for each in self.net.parameters():
            if each.grad is not None:
                each.grad.fill_(1.0)  # nobody was there to add the others'
        self.optimizer.step()
        torch.autograd.graph.increment_version(parts)


@pytest.fixture(params=[False, True], ids=["flat", "original"])
def training(request):
    with mesh_seen_by(1):
        yield Training(use_orig_params=request.param)


def test_within_a_step_parts_are_as_they_were_and_an_update_changes_them(training):
    training.backward()
    training.update()
    rest, marks = training.content(), training.reader.marks()[0]
    same = training.tensors
    now = {n: part for n, part in rest.items() if part}
    held = [octets(each) for each in training.net.parameters() if each.numel()]
    assert sorted(now.values()) == sorted(held)
    training.inner.register_forward_hook(training.look)
    training.inner.register_full_backward_hook(training.look)
    training.backward()
    training.look()
    assert training.seen == [(rest, marks)] * 3
    assert training.tensors is same
    training.update()
    training.look()
    changed, later = training.seen[-1]
    assert all(changed[name] != rest[name] for name in now)
    assert later > marks


def test_changes_by_the_script_are_counted(training):
    training.backward()
    training.update()
    training.reader.find_parts()
    marks = training.reader.marks()[0]
    with torch.no_grad():
        for each in training.net.parameters():
            each.mul_(2)
    assert training.reader.marks()[0] > marks


def test_a_part_that_fsdp_keeps_in_other_memory_is_found_there(training):
    training.backward()
    training.update()
    flat = training.inner._handle.flat_param
    old = training.tensors
    flat._local_shard = flat.data = flat.data.clone().fill_(5)
    if training.inner._handle._use_orig_params:
        training.inner._handle._use_sharded_views()
    new = training.tensors
    assert new is not old
    assert new.keys() == old.keys()
    assert {value for name in new if ".0." in name for value in new[name].tolist()} == {5.0}


def test_a_restored_state_is_in_the_parameters(training):
    training.backward()
    with torch.no_grad():
        for each in training.tensors.values():
            each.fill_(3)
    assert {v for each in training.net.parameters() for v in each.tolist()} == {3.0}


def test_what_another_torch_keeps_elsewhere_is_read_between_steps_alone(training, monkeypatch):
    assert why_gathered([training.net]) == ""
    assert why_group_held([training.net]) == HELD_GROUP
    assert why_group_held([nn.Linear(1, 1)]) == ""
    monkeypatch.setattr(placements, "_flat", None)
    monkeypatch.delattr(training.inner._handle, "flat_param")
    assert why_gathered([training.net]) == GATHERED
