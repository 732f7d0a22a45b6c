"""Which part of a distributed tensor each rank has: as torch says, and without asking anybody."""

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from worker_hooks.state.module import ModulePiece
from worker_hooks.tensors.placements import (
    SavedPart,
    box_of,
    distributed,
    is_distributed,
    managed,
    part_of,
    restored,
    save_placements,
    spans_of,
)

MESH = (2, 2, 2)
PLACES = list(itertools.product(range(2), range(2), range(2)))


@pytest.fixture
def world():
    """Makes one process stand for any rank of eight; collectives return at once."""

    def make(rank):
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        return init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard", "tp"))

    yield make
    dist.destroy_process_group()


def ranges(spans):
    return [list(itertools.chain(*[range(*span) for span in one])) for one in spans]


@pytest.mark.parametrize("seed", range(40))
def test_each_place_has_what_torch_says_and_all_have_everything_once(seed):
    draw = random.Random(seed)
    mesh = [draw.choice((1, 2, 3)) for _ in range(draw.choice((1, 2, 3)))]
    shape = [draw.randint(1, 13) for _ in range(draw.choice((1, 2)))]
    placements = [draw.choice([Replicate(), Shard(draw.randrange(len(shape)))]) for _ in mesh]
    seen = dict.fromkeys(itertools.product(*map(range, shape)), 0)
    for place in itertools.product(*map(range, mesh)):
        spans = spans_of(shape, mesh, place, placements)
        size, offset = _compute_local_shape_and_global_offset(
            torch.Size(shape), mesh, list(place), placements
        )
        assert [sum(stop - start for start, stop in one) for one in spans] == list(size)
        assert all(len(one) == 1 for one in spans)
        if 0 not in size:
            assert [one[0][0] for one in spans] == list(offset)
        for each in itertools.product(*ranges(spans)):
            seen[each] += 1
    copies = 1
    for count, placement in zip(mesh, placements, strict=True):
        copies *= count if isinstance(placement, Replicate) else 1
    assert set(seen.values()) == {copies}


UNEVEN = {  # rows and columns of a tensor of (7, 3)
    (0, 0): ((0, 4), (0, 2)),
    (0, 1): ((0, 4), (2, 3)),
    (1, 0): ((4, 7), (0, 2)),
    (1, 1): ((4, 7), (2, 3)),
}


def test_uneven_in_two_dimensions():
    for place in PLACES:
        rows, columns = spans_of((7, 3), MESH, place, [Replicate(), Shard(0), Shard(1)])
        assert (rows, columns) == tuple([each] for each in UNEVEN[place[1:]])


def test_more_places_than_rows_leave_some_with_nothing():
    found = [spans_of((1, 3), MESH, each, [Replicate(), Shard(0), Shard(0)])[0] for each in PLACES]
    assert found == [[(0, 1)], [(1, 1)], [(1, 1)], [(1, 1)]] * 2


def test_data_parallel_over_tensor_parallel_cuts_what_the_latter_has_cut():
    """As torch's FSDP does over ``parallelize_module``; measured there, for ten rows."""
    placements = [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]
    found = {place: spans_of((10, 6), MESH, place, placements)[0] for place in PLACES[:4]}
    assert found == {
        (0, 0, 0): [(0, 3)],
        (0, 0, 1): [(5, 8)],
        (0, 1, 0): [(3, 5)],
        (0, 1, 1): [(8, 10)],
    }


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.second(self.first(x).relu()))


def parallel(mesh, *, has_tensor_parallelism=True):
    torch.manual_seed(0)
    net = Two()
    if has_tensor_parallelism:
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
    fully_shard(net.first, mesh=mesh["replicate", "shard"])
    fully_shard(net, mesh=mesh["replicate", "shard"])
    return net


EACH_RANK = """
import json, os, sys, traceback
import torch
import torch.distributed as dist
from test_placements import MESH, FakeStore, init_device_mesh, parallel, torchs_box
from worker_hooks.tensors.placements import box_of, part_of

def one(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    net = parallel(init_device_mesh("cpu", MESH, mesh_dim_names=("replicate", "shard", "tp")))
    for name, each in net.named_parameters():
        box, size = box_of(name, each), list(part_of(each).shape)
        assert (size, list(box.offset)) == torchs_box(each), name
        line = json.dumps([name, rank, list(box.whole), list(box.offset), size])
        os.write(1, line.encode() + bytes([10]))  # at once: others write, too

for rank in range(8):  # torch's cache of meshes leaves out the rank: each needs its own process
    if not os.fork():
        try:
            one(rank)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def torchs_box(tensor):
    mesh = tensor.device_mesh
    size, offset = _compute_local_shape_and_global_offset(
        tensor.shape, mesh.shape, list(mesh.get_coordinate()), tensor.placements
    )
    return list(size), list(offset)


def test_a_module_in_three_dimensions():
    done = subprocess.run(
        [sys.executable, "-c", EACH_RANK],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = {}
    for line in done.stdout.splitlines():
        name, rank, whole, offset, size = json.loads(line)
        found.setdefault(name, {}).setdefault(json.dumps([whole, offset, size]), []).append(rank)
    assert {name: sorted(map(sorted, each.values())) for name, each in found.items()} == {
        "first.weight": (four := [[0, 4], [1, 5], [2, 6], [3, 7]]),
        "first.bias": four,
        "second.weight": four,
        "second.bias": (two := [[0, 1, 4, 5], [2, 3, 6, 7]]),
        "norm.weight": two,
        "norm.bias": two,
    }, done.stderr


def test_inside_a_step_fsdp_has_the_parameters_that_its_modules_lack(world):
    net = parallel(world(3), has_tensor_parallelism=False)
    before = dict(net.named_parameters())
    seen = []

    def look(module, _args):
        held = managed(net)
        seen.append({key: held[id(net.first), key].tensor for key in ("weight", "bias")})
        assert module.weight is not before["first.weight"]

    net.first.register_forward_pre_hook(look)
    net(torch.zeros(2, 6)).sum()
    assert seen[0] == {"weight": before["first.weight"], "bias": before["first.bias"]}
    holders = managed(net)
    assert len(holders) == 6
    one = holders[id(net.norm), "bias"]
    assert one.holder[one.key] is one.tensor


def test_another_torch_is_refused(world, monkeypatch):
    net = parallel(world(0), has_tensor_parallelism=False)
    monkeypatch.setattr(net._get_fsdp_state(), "_fsdp_param_groups", [object()])
    with pytest.raises(
        TypeError, match=r"what FSDP has cut cannot be saved with torch .*fsdp_params"
    ):
        managed(net)


def test_what_is_no_box_is_refused_by_name(world):
    mesh = world(1)["shard", "tp"]
    whole = torch.zeros(8, 2)
    sums = DTensor.from_local(whole, mesh, [Partial(), Replicate()], run_check=False)
    with pytest.raises(TypeError, match="'a' cannot be saved: it is a sum that is not complete"):
        box_of("a", sums)
    local = torch.zeros(4, 2)
    comb = DTensor.from_local(
        local, mesh, [_StridedShard(0, split_factor=2), Replicate()], run_check=False,
        shape=whole.shape, stride=whole.stride(),
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"'b' cannot be saved: .* no consecutive rows"):
        box_of("b", comb)


def test_what_its_module_loses_in_a_step_is_refused_by_name(world):
    net = Two()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(net, world(0)["tp"], plan)
    ModulePiece("net", net)
    _pre_dp_module_transform(net)
    with pytest.raises(
        TypeError, match=r"'net\.first\.\w+' cannot be saved: .*use torch's replicate"
    ):
        ModulePiece("net", net)
    net(torch.zeros(2, 6))
    assert {*dict(net.named_parameters())} == {"norm.weight", "norm.bias"}


def test_an_ordinary_tensor_is_whole(world):
    world(0)
    assert box_of("x", torch.zeros(2)) is None
    assert not is_distributed(torch.zeros(2))
    tensor = torch.zeros(2)
    assert part_of(tensor) is tensor


def test_a_distributed_tensor_is_made_again(world):
    mesh = world(5)
    for placements in ([Replicate(), Shard(0), Shard(0)], [Replicate(), Shard(1), Shard(0)]):
        made = distribute_tensor(torch.arange(21.0).view(7, 3), mesh, placements)
        saved = save_placements("x", made)
        again = restored(SavedPart(part_of(made).clone(), saved), made)
        assert tuple(map(tuple, saved[:3])) == box_of("x", made)
        assert (again.shape, again.placements) == (made.shape, made.placements)
        assert again.stride() == made.stride()
        bits = [part_of(each).view(torch.int32) for each in (again, made)]  # also of NaN
        assert torch.equal(*bits)
        assert box_of("x", again) == box_of("x", made)


def test_a_part_in_another_tensor_is_noticed(world):
    net = parallel(world(2))
    found = distributed(iter(net.parameters()))
    assert len(found.tensors) == 6
    assert found.are_same()
    found.tensors[0]._local_tensor = found.parts[0].clone()
    assert not found.are_same()
