"""What a survivor reads of the checkpoint in memory: nothing that it is known to hold."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.pieces import same
from torch import nn

from agent.dump.beside import manifest_file
from agent.dump.draft import DumpDraft, DumpOrder
from agent.dump.memory import MemoryTarget
from worker_hooks.contract import protocol
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.layout import held
from worker_hooks.recovery import load, resume
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import pieces_of
from worker_hooks.storage import manifest as manifests
from worker_hooks.tensors.shard import quick_digest, write_quick

TOLD = RankEnv(1, 2, 1, "record", "", "")
STEPS = 2


class Replica:
    """One rank's state after two steps; the same for all ranks."""

    def __init__(self):
        torch.manual_seed(1)
        tail = (nn.Linear(3, 3) for _ in range(4))  # more parameters than are looked at each step
        self.model = nn.Sequential(nn.Linear(150, 150), nn.Linear(150, 3), *tail)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.table = torch.randn(300, 301)
        self.committed = CommittedState(pieces_of(vars(self)), dict)
        for batch in range(STEPS):
            self.model(torch.ones(2, 150)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.committed.commit(Position(0, batch + 1))

    @property
    def state(self):
        things = (self.model, self.optimizer, self.scheduler)
        return [*(thing.state_dict() for thing in things), self.table]

    @property
    def places(self):
        """Where each tensor of the large state is."""
        found = (piece.tensors() for piece in self.committed.pieces)
        return {name: each.data_ptr() for tensors in found for name, each in tensors.items()}

    @property
    def moments(self):
        return self.optimizer.state[self.model[0].weight]


@pytest.fixture(scope="module")
def saved():
    """A checkpoint in memory that another rank wrote: its path, the digest, what it holds."""
    memory, other = MemoryTarget(STEPS, 0, 0), Replica()
    place = Path(memory.place_of(0))
    done = write_quick(place, other.committed.replica(STEPS), 0, 1, lambda _: None)
    written = protocol.Written(0, 0, 1, "", done.nbytes, "", done.digest)
    order = DumpOrder({0: written}, ((0,),), (), 2, 0, "record", "why")
    path = DumpDraft(memory, STEPS, (0, 1), {}).commit(order).path
    yield SimpleNamespace(path=Path(path), digest=done.digest, state=other.state)
    memory.close()


@pytest.fixture
def costs(monkeypatch):
    """Bytes that were read, and digests that were taken."""
    costs = SimpleNamespace(nbytes=0, digests=0)
    read_into = load.StoredTensor.read_into

    def read(stored, tensor, **options):
        costs.nbytes += tensor.nbytes
        read_into(stored, tensor, **options)

    def digest(_, replica):
        costs.digests += 1
        return quick_digest(replica)

    monkeypatch.setattr(load.StoredTensor, "read_into", read)
    monkeypatch.setattr(resume, "digest_like", digest)
    return costs


def test_a_survivor_that_holds_it_reads_nothing(saved, costs):
    one = Replica()
    places, live = one.places, (STEPS, quick_digest(one.committed.replica(STEPS)))
    point = resume.restore_replicated(one.committed.pieces, saved.path, TOLD, live)
    resume.restore_for_loop(point, one.committed, 1)
    assert (costs.nbytes, costs.digests) == (0, 1)
    assert same(one.state, saved.state)
    assert one.places == places


@pytest.fixture
def partial(saved):
    """The same where the tensors are on another node, and what asks for them."""
    manifest = manifests.read(saved.path)._replace(absent=(0,))
    file = manifest_file(manifest, "partial")
    inode = (saved.path.parent / min(manifest.shards).file).stat().st_ino
    found = SimpleNamespace(path=Path(held(file)), inode=inode, asked=[])

    def bring(*about):
        found.asked.append(about)
        return ()

    found.bring = bring
    yield found
    os.close(file)


def test_tensors_that_are_on_another_node_are_asked_for_if_they_are_read(saved, partial, costs):
    pieces = Replica().committed.pieces
    told = {"live": (STEPS, saved.digest), "bring": partial.bring}
    resume.restore_replicated(pieces, partial.path, TOLD, **told)
    assert (costs.nbytes, partial.asked) == (0, [])
    for count in (1, 2):
        resume.restore_replicated(pieces, partial.path, TOLD, **told | {"live": None})
        assert costs.nbytes
        assert partial.asked == [(partial.inode, [0])] * count


def test_tensors_that_cannot_be_brought_are_not_taken_for_what_is_there(partial):
    def fail(*_):
        raise OSError("no room")

    for told, why in (
        ({"bring": fail}, "no room"),
        ({"bring": lambda *_: (0,)}, "on another node"),
        ({}, "nobody is there"),
    ):
        with pytest.raises(OSError, match=why):
            resume.restore_replicated(Replica().committed.pieces, partial.path, TOLD, **told)


def test_what_the_script_changes_before_its_loop_is_asked_for(saved, partial, costs):
    one = Replica()
    told = {"live": (STEPS, saved.digest), "bring": partial.bring}
    point = resume.restore_replicated(one.committed.pieces, partial.path, TOLD, **told)
    load_model(one)
    resume.restore_for_loop(point, one.committed, 1)
    assert partial.asked
    assert costs.nbytes
    assert same(one.state, saved.state)


def corrupt(one):
    one.table[299, 300] += 1e-3


def corrupt_moments(one):
    one.moments["exp_avg"][0, 0] = 3


@pytest.mark.parametrize("change", [corrupt, corrupt_moments])
def test_one_whose_state_is_another_reads_all_of_it(saved, costs, change):
    one = Replica()
    change(one)
    one.committed.commit(Position(0, 3))  # it trained with it, unknown to anybody
    one.committed.step = STEPS
    digest = quick_digest(one.committed.present())
    assert digest != saved.digest
    point = resume.restore_replicated(one.committed.pieces, saved.path, TOLD, (STEPS, digest))
    large = sum(each.nbytes for p in one.committed.pieces for each in p.tensors().values())
    assert costs.nbytes == large
    resume.restore_for_loop(point, one.committed, 1)
    assert (costs.nbytes, costs.digests) == (large, 1)
    assert same(one.state, saved.state)


@pytest.mark.parametrize("live", [None, (STEPS - 1, None), (STEPS, "")])
def test_one_that_is_not_known_to_hold_it_reads_it(saved, costs, live):
    one = Replica()
    if live and live[1] is None:
        live = live[0], saved.digest
    resume.restore_replicated(one.committed.pieces, saved.path, TOLD, live)
    assert costs.nbytes > 500_000


def load_model(one):
    one.model.load_state_dict({name: -each for name, each in one.model.state_dict().items()})


def load_moments(one):
    state = one.optimizer.state_dict()
    for each in state["state"].values():
        each["exp_avg"] = torch.ones_like(each["exp_avg"])
    one.optimizer.load_state_dict(state)


CHANGES = {
    "weights": lambda one: one.model[5].bias.mul_(2),
    "one weight": lambda one: one.model[0].weight[149, 149].add_(1),
    "a tensor": lambda one: one.table[0].zero_(),
    "moments": lambda one: one.moments["exp_avg_sq"].zero_(),
    "a counter": lambda one: one.moments["step"].add_(1),
    "the schedule": lambda one: one.scheduler.step(),
    "the rate": lambda one: one.optimizer.param_groups[0].update(lr=3.0),
    "another model": load_model,
    "other moments": load_moments,
    "no moments": lambda one: one.optimizer.state.clear(),
    "nothing": lambda _: None,
}
UNSEEN = {  # by what a commit looks at
    **CHANGES,
    "a weight's data": lambda one: one.model[0].weight.data.clamp_(-0.01, 0.01),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_what_changes_behind_the_comparison_is_put_back(saved, name):
    one = Replica()
    live = STEPS, quick_digest(one.committed.replica(STEPS))
    with torch.no_grad():
        UNSEEN[name](one)
    point = resume.restore_replicated(one.committed.pieces, saved.path, TOLD, live)
    resume.restore_for_loop(point, one.committed, 1)
    assert same(one.state, saved.state)


@pytest.mark.parametrize(
    ("name", "is_live"), [*((name, True) for name in CHANGES), ("moments", False)]
)
def test_what_the_script_changes_before_its_loop_is_put_back(saved, name, is_live):
    one = Replica()
    live = STEPS, saved.digest if is_live else "quick-another"
    point = resume.restore_replicated(one.committed.pieces, saved.path, TOLD, live)
    with torch.no_grad():
        CHANGES[name](one)
    resume.restore_for_loop(point, one.committed, 1)
    assert same(one.state, saved.state)
