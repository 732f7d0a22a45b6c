"""What torch's own distributed checkpoints wrote as safetensors shards is merged, too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.jobs import DEADLINE_S
from support.warm_python import WarmPython

from msrun.commands import run

pytestmark = pytest.mark.torch

RANK = """
import sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

folder, store, rank, world = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(1)
whole = {"rows": torch.randn(7, 5), "columns": torch.randn(4, 6), "both": torch.randn(3)}
places = {"rows": Shard(0), "columns": Shard(1), "both": Replicate()}
state = {name: distribute_tensor(whole[name], mesh, [places[name]]) for name in whole}
dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
if rank == 0:
    torch.save(whole, store + ".whole")
dist.destroy_process_group()
"""


def test_shards_along_any_dimension(
    tmp_path: Path, warm_python: WarmPython, capfd: pytest.CaptureFixture[str]
) -> None:
    line = [*warm_python.words, "-c", RANK, tmp_path / "dcp", tmp_path / "store"]
    ranks = [subprocess.Popen([*line, str(rank), "3"]) for rank in range(3)]
    try:
        assert [rank.wait(DEADLINE_S) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert run(["checkpoints", "verify", str(tmp_path / "dcp")]) == 0
    out = str(tmp_path / "out.safetensors")
    assert run(["checkpoints", "merge", str(tmp_path / "dcp"), "-o", out]) == 0
    found, whole = load_file(out), torch.load(tmp_path / "store.whole")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    capfd.readouterr()
