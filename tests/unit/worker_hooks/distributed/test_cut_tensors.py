"""What a new rank can repeat alone of what was sent in front of run."""

import json
import os
import subprocess

import pytest
from support.jobs import ROOT

pytestmark = pytest.mark.warm
CUT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from worker_hooks.distributed import cut_tensors, process_group, rehearsal

rank, place, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
if what == "alone":
    rehearsal.install()
    store = None
else:
    store = dist.FileStore(place, 2)
cut_tensors.install()
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
whole = torch.arange(6.0).reshape(3, 2) + (10 * rank if what == "own" else 0)
parts = [distribute_tensor(whole.clone(), mesh, [how]) for how in (Shard(0), Shard(1), Replicate())]
if what == "sum":
    dist.all_reduce(torch.ones(1), group=mesh.get_group("tp"))
if what == "gather":
    parts[0].full_tensor()
repeatable = cut_tensors.end()
print(json.dumps({
    "parts": [part.to_local().tolist() for part in parts],
    "is_early": what != "alone" and process_group._have_communicated(repeatable),
    "is_over": not hasattr(sys.modules[cut_tensors.MODULE], "_msrun_cut_tensors"),
}), flush=True)
"""


def cut(python, tmp_path, what, ranks=(0, 1)):
    processes = [
        subprocess.Popen(
            [*python.words, "-c", CUT, str(rank), str(tmp_path / "store"), what],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    return [json.loads(process.communicate(timeout=60)[0]) for process in processes]


@pytest.mark.parametrize(
    ("what", "is_early"),
    [
        ("equal", [False, False]),
        ("own", [False, True]),
        ("sum", [True] * 2),
        ("gather", [True] * 2),
    ],
)
def test_only_parts_that_a_rank_has_itself_are_repeatable(warm_python, tmp_path, what, is_early):
    told = cut(warm_python, tmp_path, what)
    assert [each["is_early"] for each in told] == is_early
    assert all(each["is_over"] for each in told)


def test_a_new_rank_alone_has_the_same_parts(warm_python, tmp_path):
    told = cut(warm_python, tmp_path, "equal")
    assert [cut(warm_python, tmp_path, "alone", [rank])[0]["parts"] for rank in (0, 1)] == [
        each["parts"] for each in told
    ]
