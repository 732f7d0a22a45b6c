"""torch's distributed checkpoints read a dump as it is, into any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.jobs import side_by_side
from support.tensors import tensors_of
from support.warm_python import WarmPython
from torch.distributed.checkpoint import HuggingFaceStorageReader

from worker_hooks.tensors.shard import Replica, write
from worker_hooks.tensors.tensor_bytes import entry_of, to_bytes

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
]

MAKE = '''
import torch

def state():
    """What a model and its optimizer hold, with the shapes and types that give trouble."""
    torch.manual_seed(1)
    wide = torch.randn(1200, 500)
    return {
        "model.weight": wide,
        "model.half": torch.randn(900, 700).bfloat16().t(),
        "model.table": torch.randn(1, 600, 700),
        "optimizer.exp_avg": torch.randn(1200, 500),
        "optimizer.step": torch.tensor(7.0),
        "optimizer.count": torch.tensor(3),
        "optimizer.none": torch.zeros(0, 5),
        "model.flag": torch.tensor([True, False]),
        "model.complex": torch.randn(5, 3, dtype=torch.complex64),
        "model.small": torch.arange(5, dtype=torch.uint8),
        "model.scale": torch.ones(4).to(torch.float8_e4m3fn),
    }
'''
made: dict[str, object] = {}
exec(MAKE, made)
state = made["state"]


def dumped(folder: Path, parts: int) -> Path:
    """A complete folder: shards by rank, and links to them for readers of one level."""
    mean = torch.arange(4.0)
    replica = Replica(state(), [(entry_of("model.mean", mean), to_bytes(mean))], "{}", {})
    for part in range(parts):
        file = f"rank_{2 * part}/ttp_rank_{2 * part}-1_5.safetensors"
        (folder / file).parent.mkdir(parents=True)
        write(folder / file, replica, part, parts, lambda _nbytes: None)
        (folder / Path(file).name).symlink_to(file)
    (folder / "manifest.json").write_text("{}")
    return folder


@pytest.mark.parametrize("parts", [1, 3])
def test_one_process_loads_it(tmp_path: Path, parts: int) -> None:
    folder = dumped(tmp_path / "dump", parts)
    stored = [each for file in folder.glob("*.safetensors") for each in tensors_of(file)]
    cut = {each.name for each in stored if tuple(each.tensor.shape) != each.global_shape}
    assert len(cut) == parts - 1
    wanted = {**state(), "model.mean": torch.arange(4.0)}
    target = {
        name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in wanted.items()
    }
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in wanted.items():
        assert bytes(to_bytes(target[name])) == bytes(to_bytes(tensor)), name


RANK = (
    MAKE
    + """
import sys
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

folder, store, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
places = {"model.weight": Shard(0), "model.half": Shard(1), "model.table": Shard(1),
          "optimizer.exp_avg": Shard(1), "model.small": Shard(0)}
wanted = state()
target = {
    name: distribute_tensor(torch.zeros_like(wanted[name]), mesh, [place])
    for name, place in places.items()
}
target["optimizer.step"] = torch.tensor(0.0)
target["model.flag"] = torch.zeros(2, dtype=torch.bool)
dcp.load(target, storage_reader=HuggingFaceStorageReader(folder))
for name, tensor in target.items():
    whole = tensor.full_tensor() if name in places else tensor
    assert torch.equal(whole, wanted[name]), name
dist.destroy_process_group()
print("equal", rank)
"""
)


@pytest.mark.parametrize("parts", [1, 3])
def test_another_number_of_ranks_loads_its_shards(
    tmp_path: Path, warm_python: WarmPython, parts: int
) -> None:
    folder = dumped(tmp_path / "dump", parts)
    words = [*warm_python.words, "-c", RANK, folder, tmp_path / "store"]
    said = side_by_side(words, 2)
    assert said == ["equal 0\n", "equal 1\n"]
