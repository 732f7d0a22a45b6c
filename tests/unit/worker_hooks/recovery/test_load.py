"""A dump is read back, whole or in parts, and nothing is touched unless all of it fits."""

import json
import os
import weakref

import pytest
import torch
from support.pieces import OPTIMIZERS, bits, same, step, trained
from torch import nn
from torch.optim import lr_scheduler as lrs

from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import CommitRecord, Entry, Page, create
from worker_hooks.recovery import load as restores
from worker_hooks.recovery import resume
from worker_hooks.state.buffers import Buffers
from worker_hooks.state.registry import pieces_of
from worker_hooks.storage import commit
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import Manifest, Shard
from worker_hooks.tensors import shard, tensor_bytes

MANIFEST = Manifest("dump", 7, 2, 3, 2, 0, "id", "a test", 0.0, ())


class Meter:
    def __init__(self, value):
        self.state = {"sum": torch.tensor([value])}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def write(folder, pieces, parts=1, more=None, facts=None):
    """A dump of these pieces, in so many parts."""
    tensors, values, objects, own = dict(more or {}), {}, {}, []
    for piece in pieces:
        value, small = piece.encode(piece.snapshot())
        tensors |= piece.tensors()
        if piece.is_compared:
            values[piece.name], tensors = value, tensors | small
        else:
            objects[piece.name] = value
            own += [
                (tensor_bytes.entry_of(name, each), tensor_bytes.to_bytes(each))
                for name, each in small.items()
            ]
    shards = []
    for part in range(parts):
        told = {"objects": json.dumps(objects), "facts": json.dumps(facts or {"part": part})}
        replica = shard.Replica(tensors, own, json.dumps({"pieces": values}), told)
        rank = (part + 1) % parts  # of three, the second has what is the writer's own
        file = f"rank_{rank}/x.safetensors"
        (folder / file).parent.mkdir(parents=True)
        done = shard.write(folder / file, replica, part, parts, lambda _: None)
        shards.append(Shard(file, rank, "replicated", done.nbytes, done.sha256))
    shards.append(Shard("rank_9/odd.safetensors", 9, "replicated", 1, "", variant=1))
    return MANIFEST._replace(shards=tuple(sorted(shards)))


def objects(seed, steps):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model, optimizer = trained(OPTIMIZERS["AdamW-amsgrad"], steps, model=model)
    scheduler = lrs.MultiStepLR(optimizer, [1, 3 + seed])
    table = torch.randn(700, 500, generator=torch.Generator().manual_seed(seed))  # large: is cut
    flat = torch.randn(1, 1, 400_000, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "table": table,
        "flat": flat,
        "meter": Meter(float(seed)),
    }


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_dump_is_put_back(tmp_path, parts):
    one, two = objects(1, 3), objects(2, 0)
    manifest = write(tmp_path, pieces_of(one), parts)
    saved = restores.open_dump(tmp_path, manifest)
    assert json.loads(saved.metadata["facts"]) == {"part": 0}
    assert len(saved.tensors) == len(set(saved.tensors))
    restores.restore(pieces_of(two), saved)
    for name in ("model", "optimizer", "scheduler", "meter"):
        assert same(one[name].state_dict(), two[name].state_dict()), name
    assert bits(one["table"]) == bits(two["table"])
    assert bits(one["flat"]) == bits(two["flat"])
    for each in (one, two):
        step(each["model"], each["optimizer"], 2, seed=5)
    assert same(one["model"].state_dict(), two["model"].state_dict())


def test_what_a_file_says_besides_is_the_same_on_all_nodes(tmp_path):
    """What ranks do together depends on it, as on DDP's orders; in memory files have any number."""
    manifest = write(tmp_path, pieces_of({"table": torch.randn(700, 500)}), 2)
    found = [restores.open_dump(tmp_path, manifest).metadata["facts"]]
    names = {each.file: f"{9 - each.rank}" for each in manifest.shards}
    for file in [each.file for each in manifest.shards[:2]]:
        (tmp_path / file).rename(tmp_path / names[file])
    renamed = tuple(each._replace(file=names[each.file]) for each in manifest.shards)
    found.append(restores.open_dump(tmp_path, manifest._replace(shards=renamed)).metadata["facts"])
    assert found == ['{"part": 1}'] * 2


def test_where_ranks_of_a_node_wrote_files_of_their_own_other_headers_count(tmp_path):
    facts, found = {"there": {"loop": 1}, "here": {"loop": 2}}, {}
    for place, value in (("there", 0.0), ("here", 1.0)):
        folder = tmp_path / place
        manifest = write(folder, pieces_of({"a": torch.full((3,), value)}), facts=facts[place])
        shards = [each for each in manifest.shards if not each.variant]
        found[place] = [each._replace(file=f"{place}/{each.file}") for each in shards]
    manifest = MANIFEST._replace(shards=tuple(found["here"]), heads=tuple(found["there"]))
    saved = restores.open_dump(tmp_path, manifest)
    assert json.loads(saved.metadata["facts"]) == facts["there"]
    assert saved.tensors["a"].tolist() == [1, 1, 1]


def test_tensors_are_read_when_they_are_asked_for(tmp_path):
    manifest = write(tmp_path, pieces_of({"a": torch.ones(3), "b": torch.zeros(2)}))
    saved = restores.open_dump(tmp_path, manifest)
    assert set(saved.tensors) == {"a", "b"}
    one = saved.tensors["a"]
    one.fill_(5)
    assert saved.tensors["a"].tolist() == [1, 1, 1]  # new memory each time
    os.truncate(tmp_path / manifest.shards[0].file, manifest.shards[0].nbytes - 4)
    with pytest.raises(ValueError, match="ends too early"):
        [saved.tensors[name] for name in ("a", "b")]


def test_a_dump_that_lacks_a_part_is_refused(tmp_path):
    manifest = write(tmp_path, pieces_of({"table": torch.randn(700, 500)}), 3)
    for lost in manifest.shards[:3]:
        rest = tuple(each for each in manifest.shards if each != lost)
        with pytest.raises(ValueError, match="parts of table are missing"):
            restores.open_dump(tmp_path, manifest._replace(shards=rest))


def test_a_dump_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no state that msrun wrote"):
        restores.open_dump(tmp_path, MANIFEST)


def test_another_programs_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    foreign = MANIFEST._replace(shards=(Shard("x.safetensors", 0, "replicated", 1, ""),))
    with pytest.raises(ValueError, match="holds no state that msrun wrote"):
        restores.open_dump(tmp_path, foreign)
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": "[3]"})
    with pytest.raises(ValueError, match="is not a JSON object"):
        restores.open_dump(tmp_path, foreign)


def test_nothing_is_touched_if_something_does_not_fit(tmp_path):
    one = objects(1, 3)
    manifest = write(tmp_path, pieces_of(one | {"ema": nn.Linear(1, 1)}))
    torch.manual_seed(9)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    before = [each.clone() for each in model.parameters()]
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    two = {
        "model": model,
        "optimizer": optimizer,
        "table": torch.zeros(700, 500),
        "rate": torch.ones(1),
    }
    with pytest.raises(ValueError, match="does not fit this script") as error:
        restores.restore(pieces_of(two), restores.open_dump(tmp_path, manifest))
    assert str(error.value).removeprefix(f"{tmp_path} does not fit this script: ").split("; ") == [
        "it has no rate",
        "it has ema, flat, meter, scheduler, which is not registered",
        "model.2.bias is float32[3] there and float32[2] here",
        "model.2.weight is float32[3, 6] there and float32[2, 6] here",
        "optimizer had groups of [2, 2] parameters and has [1]",
    ]
    assert same(before, [each.detach() for each in model.parameters()])
    assert not two["table"].any()


def test_names_within_names_go_to_the_right_piece(tmp_path):
    one = {
        "model": nn.Linear(1, 1),
        "model.gen": nn.Linear(2, 2),
        "w": torch.ones(2),
        "w.0": torch.ones(3),
    }
    two = {
        "model": nn.Linear(1, 1),
        "model.gen": nn.Linear(2, 2),
        "w": torch.zeros(2),
        "w.0": torch.zeros(3),
    }
    restores.restore(pieces_of(two), restores.open_dump(tmp_path, write(tmp_path, pieces_of(one))))
    assert same(one["model.gen"].state_dict(), two["model.gen"].state_dict())
    assert two["w.0"].tolist() == [1, 1, 1]


def test_a_writers_buffers_in_the_shard_do_not_disturb(tmp_path):
    one, two = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    one.running_mean.fill_(4)
    buffers = {f"model.{name}": each for name, each in one.named_buffers()}
    saved = restores.open_dump(tmp_path, write(tmp_path, pieces_of({"model": one}), more=buffers))
    pieces = pieces_of({"model": two})
    restores.restore(pieces, saved)
    assert two.running_mean.tolist() == [0, 0]
    Buffers(pieces).restore(saved.tensors)
    assert same(one.state_dict(), two.state_dict())


def test_private_state_is_read_back(tmp_path):
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    module[0](torch.randn(4, 3))
    buffers = Buffers(pieces_of({"model": module}))
    fd = create(1, 0, buffers.entries)
    page = Page(fd)
    os.close(fd)
    meta = json.dumps({"loop": 0, "feed": {"x": [1]}}).encode()
    page.write(7, 2, 3, meta, lambda at: buffers.fill(at, 1), is_commit=True)
    record = page.record(7)
    done = commit.write_private(tmp_path, 1, page.entries, record, lambda _: None)
    manifest = write(tmp_path / "more", pieces_of({"w": torch.ones(1)}))
    shards = (*(each._replace(file=f"more/{each.file}") for each in manifest.shards), done)
    saved = restores.open_dump(tmp_path, manifest._replace(shards=shards))
    assert saved.private(0) is None
    told, held = saved.private(1)
    page.close()
    assert told == {
        "step": 7, "epoch": 2, "batch": 3, "is_commit": 1, "meta": {"loop": 0, "feed": {"x": [1]}}
    }  # fmt: skip
    fresh = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    Buffers(pieces_of({"model": fresh})).restore(held)
    assert same(list(fresh.buffers()), list(module.buffers()))


@pytest.mark.parametrize("is_early", [True, False])
def test_buffers_from_before_a_commit_are_replaced_where_they_change_late(tmp_path, is_early):
    entries = tensor_bytes.entry_of("model.ema", torch.ones(2)), Entry("rng", "U8", (2,), 2)
    mine = bytes(tensor_bytes.to_bytes(torch.ones(2))) + b"xy"
    record = CommitRecord(7, 2, 3, 0, b"{}", mine, is_commit=True, has_early_buffers=is_early)
    module = nn.Module()
    module.register_buffer("ema", torch.zeros(2))
    pieces = pieces_of({"model": module})
    late = {"usual": None, "late": ["model.ema"]}
    state = write(tmp_path, pieces, more={"model.ema": torch.full((2,), 9.0)}, facts=late)
    done = commit.write_private(tmp_path, 0, entries, record, lambda _: None)
    manifests.write(tmp_path, state._replace(shards=(*state.shards[:1], done)))
    env = RankEnv(0, 2, 0, "id", "", "")
    point = resume.restore_replicated(pieces, tmp_path, env, None)
    assert point.private.is_commit  # all else is as of it
    assert point.private.tensors["model.ema"].tolist() == ([9, 9] if is_early else [1, 1])


def test_tensors_are_read_to_where_they_are_else_one_is_in_memory_at_a_time(tmp_path, monkeypatch):
    one, two = objects(1, 3), objects(2, 0)
    for each in (one, two):
        each["turned"], each["other"] = each["table"].clone().t(), each["table"][:5].clone().t()
    saved = restores.open_dump(tmp_path, write(tmp_path, pieces_of(one), 2))
    read, held = restores.StoredTensor.read, []

    def counted(stored):
        tensor = read(stored)
        assert all(each() is None for each in held)
        held.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(restores.StoredTensor, "read", counted)
    kept = ("model", "table", "flat", "turned", "other")  # an optimizer's state is adopted
    two = {name: two[name] for name in kept}
    saved = saved._replace(values={name: saved.values[name] for name in kept})
    restores.restore(pieces_of(two), saved)
    assert len(held) == 2  # which do not lie in memory in their order
    assert bits(one["flat"]) == bits(two["flat"])
