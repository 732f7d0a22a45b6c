"""Groups and layers that a script adds in training: saved as of a commit, put back where they are added again."""

import json

import pytest
import torch
from support.pieces import same
from torch import nn

from worker_hooks.recovery import load
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of
from worker_hooks.storage.manifest import Manifest, Shard
from worker_hooks.tensors import shard

MADE = Manifest("dump", 1, 1, 1, 1, 0, "id", "a test", 0.0, ())


class Objects:
    """A model whose head is trained first; both are given to the optimizer in the end."""

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model[1].parameters(), lr=0.1)
        self.committed = CommittedState(pieces_of(vars(self)), dict)
        self.step = 0

    def train(self):
        self.model(torch.ones(2, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.committed.commit(Position(0, self.step))

    def add_group(self):
        self.optimizer.add_param_group({"params": self.model[0].parameters(), "lr": 0.3})

    def add_layer(self):
        self.model.append(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
        self.optimizer.add_param_group({"params": self.model[2].parameters()})

    @property
    def state(self):
        return [self.model.state_dict(), self.optimizer.state_dict()]


def saved(folder, one):
    """The newest commit as a checkpoint on disk."""
    replica = one.committed.replica(one.step)
    done = shard.write(folder / "x", replica, 0, 1, lambda _: None)
    manifest = MADE._replace(shards=(Shard("x", 0, "replicated", done.nbytes, done.sha256),))
    return load.open_dump(folder, manifest)


def weights(one):
    return [each.detach().clone() for each in one.model.parameters()]


CHANGES = {"a group": Objects.add_group, "a layer": Objects.add_layer}
NAMES = {"a group": ["optimizer"], "a layer": ["model", "optimizer"]}


@pytest.mark.parametrize("name", CHANGES)
def test_a_commit_is_without_what_was_added_behind_it(tmp_path, name):
    one, two = Objects(), Objects(2)
    one.train()
    before = one.state
    digest = shard.quick_digest(one.committed.replica(1))
    CHANGES[name](one)
    assert one.committed.why_changed() == ""
    assert shard.quick_digest(one.committed.replica(1)) == digest  # a peer may not have added it
    load.restore(two.committed.pieces, saved(tmp_path, one))
    assert same(two.state, before)


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_added_is_restored_once_the_script_has_added_it_again(tmp_path, name):
    one, two = Objects(), Objects(2)
    one.train()
    CHANGES[name](one)
    one.train()
    dump = saved(tmp_path, one)
    told = json.loads(dump.metadata["facts"])["reshaped"]
    assert told == NAMES[name]

    first = weights(two)
    with pytest.raises(ValueError, match=r"optimizer had groups of \[2, [24]\] parameters and has"):
        load.restore(two.committed.pieces, dump)
    assert same(first, weights(two))
    assert load.restore(two.committed.pieces, dump, may_follow=told) == set(told)
    assert same(weights(two), weights(one)[:4])
    assert two.optimizer.param_groups[0]["lr"] == 0.1
    moments = [two.optimizer.state[each]["exp_avg"] for each in two.model[1].parameters()]
    assert same(
        moments, [one.optimizer.state[each]["exp_avg"] for each in one.model[1].parameters()]
    )

    CHANGES[name](two)
    assert load.restore(two.committed.pieces, dump) == set()
    assert same(
        [*weights(two), two.optimizer.state_dict()], [*weights(one), one.optimizer.state_dict()]
    )


def test_a_checkpoint_that_never_fitted_is_refused_at_once(tmp_path):
    one, two = Objects(), Objects(2)
    one.add_group()
    one.committed = CommittedState(
        pieces_of({"model": one.model, "optimizer": one.optimizer}), dict
    )
    one.train()
    dump = saved(tmp_path, one)
    told = json.loads(dump.metadata["facts"])["reshaped"]
    assert told == []
    with pytest.raises(ValueError, match=r"optimizer had groups of \[2, 2\] parameters"):
        load.restore(two.committed.pieces, dump, may_follow=told)


def test_layers_without_parameters_belong_to_a_model_that_was_changed(tmp_path):
    one, two = Objects(), Objects(2)
    one.model.append(nn.ReLU())
    one.train()
    dump = saved(tmp_path, one)
    with pytest.raises(ValueError, match=r"on one side only: model\.2"):
        load.restore(two.committed.pieces, dump)
    two.model.append(nn.ReLU())
    load.restore(two.committed.pieces, dump)
    assert same(two.state, one.state)
