"""Ranks that hold one tensor with these and another one with those: what is written of each part, and read again."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.pieces import same
from torch import nn

from agent.dump.draft import DumpDraft, DumpOrder
from agent.dump.memory import MemoryTarget
from agent.ranks.parts import parts_of
from worker_hooks.contract import protocol
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.fingerprint import MOST, bundled, differences
from worker_hooks.recovery import load, resume
from worker_hooks.state.committed_state import CommittedState, Position
from worker_hooks.state.registry import labels, pieces_of
from worker_hooks.state.replication import fingerprint
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.shard_file import HAS
from worker_hooks.tensors.shard import quick_digest, write_quick

COUNT = 4
LONE = tuple((rank,) for rank in range(COUNT))


class Rank:
    """Rank r of a mesh of 2 x 2: layers are cut over its columns, each row has experts of its own."""

    def __init__(self, rank, layers=1, steps=2):
        self.model = nn.ModuleDict()
        for number in range(layers):
            for name, seed in (("layer", rank % 2), ("expert", 2 + rank // 2), ("norm", 4)):
                torch.manual_seed(10 * number + seed)
                self.model[f"{name}{number}"] = nn.Linear(3, 2, bias=False)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.committed = CommittedState(pieces_of(vars(self)), dict)
        for batch in range(steps):
            x = torch.ones(2, 3)
            sum(each(x).square().sum() for each in self.model.values()).backward()
            self.optimizer.step()
            self.committed.commit(Position(0, batch + 1))
        self.step = steps

    @property
    def texts(self):
        pieces = self.committed.pieces
        return bundled(fingerprint(pieces), labels(pieces))

    @property
    def state(self):
        return [self.model.state_dict(), self.optimizer.state_dict()]

    def zero(self):
        with torch.no_grad():
            for each in self.model.parameters():
                each.zero_()


def parts_between(ranks):
    found = differences({rank: one.texts for rank, one in enumerate(ranks)})
    values = {each.name for each in found if each.is_value}
    return parts_of(len(ranks), LONE, {each.name: each.groups for each in found}, values)


@pytest.fixture(scope="module")
def job():
    """The ranks, what they share, and a checkpoint in memory that two of them wrote."""
    ranks = [Rank(rank) for rank in range(COUNT)]
    parts = parts_between(ranks)
    memory, written, variants = MemoryTarget(2, 0, 0), {}, []
    for part, seats in zip(parts.every, parts.seats, strict=True):
        writer = next(rank for rank in part.ranks if rank in {1, 2})  # the others are dead
        seat = next(seat for seat in seats if parts.rank_of(seat) == writer)
        share = parts.owner_of(seat)[1]
        place = Path(memory.place_of(writer, share))
        done = write_quick(place, ranks[writer].committed.replica(2, part.without), 0, 1, int)
        about = writer, 0, 1, "", done.nbytes, "", done.digest, 0, share
        written[seat] = protocol.Written(*about)
        variants.append((seat,))
    holders = tuple(part.ranks for part in parts.every)
    order = DumpOrder(written, tuple(variants), (), COUNT, 0, "record", "why", holders)
    path = DumpDraft(memory, 2, range(COUNT), {}).commit(order).path
    yield SimpleNamespace(ranks=ranks, parts=parts, path=Path(path))
    memory.close()


def test_ranks_find_the_parts_and_agree_on_each(job):
    assert [part.ranks for part in job.parts.every] == [(0, 1), (0, 2), (1, 3), (2, 3)]
    for part in job.parts.every:
        held = [job.ranks[rank].committed.replica(2, part.without) for rank in part.ranks]
        assert len({quick_digest(each) for each in held}) == 1
        assert {"layer" in name for name in part.without} <= {True, False}
        names = {name.split(".")[1] for each in held for name in each.tensors if "model" in name}
        assert names == {"norm0", "expert0" if part.ranks in {(0, 1), (2, 3)} else "layer0"}
        assert json.loads(held[0].metadata[HAS]) == sorted(held[0].tensors)


@pytest.mark.parametrize("rank", range(COUNT))
def test_a_new_rank_has_its_tensors_from_several_others(job, rank):
    one = Rank(rank, steps=0)
    one.zero()
    told = RankEnv(rank, COUNT, 1, "record", "", "")
    point = resume.restore_replicated(one.committed.pieces, job.path, told)
    one.committed.begin_again(point.step)
    assert same(one.state, job.ranks[rank].state)
    resume.restore_for_loop(point, one.committed, rank)  # nothing has changed since
    assert same(one.state, job.ranks[rank].state)


@pytest.mark.parametrize("rank", range(COUNT))
def test_one_that_holds_its_parts_reads_nothing(job, rank, monkeypatch):
    told, mine = RankEnv(rank, COUNT, 1, "record", "", ""), job.ranks[rank].committed
    every = [part.without for part in job.parts.every if rank in part.ranks]
    digests = ",".join(quick_digest(mine.replica(2, without)) for without in every)
    monkeypatch.setattr(load.StoredTensor, "read_into", None)
    resume.restore_replicated(mine.pieces, job.path, told, (2, digests))


def test_a_state_that_changed_since_it_was_restored_is_noticed(job):
    one = Rank(0, steps=0)
    told = RankEnv(0, COUNT, 1, "record", "", "")
    point = resume.restore_replicated(one.committed.pieces, job.path, told)
    one.committed.begin_again(point.step)
    with torch.no_grad():
        one.model["expert0"].weight[0, 0] += 1
    resume.restore_for_loop(point, one.committed, 0)  # puts it right
    assert same(one.state, job.ranks[0].state)


def test_a_part_that_is_missing_is_named(job):
    about = manifests.read(job.path)
    lacking = about._replace(holders=tuple(r for r in about.holders if 3 not in r))
    with pytest.raises(ValueError, match="does not hold the part of rank 3"):
        manifests.variants_of(lacking, 3, COUNT)


def test_the_parts_of_thousands_of_tensors_are_found():
    ranks = [Rank(rank, layers=60, steps=1) for rank in range(COUNT)]
    assert len(fingerprint(ranks[0].committed.pieces)) > 2 * MOST
    assert len(ranks[0].texts) < MOST
    found = parts_between(ranks)
    assert [part.ranks for part in found.every] == [(0, 1), (0, 2), (1, 3), (2, 3)]
    held = ranks[0].committed.replica(1, found.every[0].without).tensors
    assert {name.split(".")[1].rstrip("0123456789") for name in held if "model" in name} == {
        "expert",
        "norm",
    }
    assert quick_digest(ranks[0].committed.replica(1, found.every[0].without)) == quick_digest(
        ranks[1].committed.replica(1, found.every[0].without)
    )
