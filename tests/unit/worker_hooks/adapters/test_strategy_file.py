"""MindSpore's strategy file, as one rank writes it for all; its peers are torch's fake ones."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from worker_hooks import ParallelStrategy, TrainState

# DTensor remembers what a rank of a mesh has, for all equal meshes: so each is a process of its own
RANKS = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from worker_hooks import ParallelStrategy, TrainState

world, plan = 8, {"0": ColwiseParallel(), "2": RowwiseParallel()}

def cut(net, way):
    if way == "hsdp":
        mesh = dist.init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "parts"))
        fully_shard(net, mesh=mesh)
    if way in {"tp", "both"}:
        mesh = dist.init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(net, mesh["tensor"], plan)
    if way == "both":
        fully_shard(net, mesh=mesh["data"])

def train(way, rank, config):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4))
    cut(net, way)
    TrainState(model=net, callbacks=[ParallelStrategy(config)])
    with open(f"{way}.{rank}", "w") as file:
        shapes = {f"model.{name}": [*getattr(each, "_local_tensor", each).shape]
                  for name, each in net.named_parameters()}
        json.dump(shapes, file)

for way, rank, config, said in json.loads(sys.argv[1]):
    if not (pid := os.fork()):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        train(way, rank, config)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, (way, rank)
"""

WAYS = ("hsdp", "tp", "both", "whole")
SIZES = {"model.0.weight": 60, "model.0.bias": 10, "model.2.weight": 40, "model.2.bias": 4}
SEEN = (0, 1, 3, 6)  # ranks that are played


@pytest.fixture(scope="module")
def folder(tmp_path_factory, warm_python):
    """In which some ranks of every way have been."""
    made = tmp_path_factory.mktemp("ranks")
    rows = [
        (way, rank, {"save_file": f"strategies/{way}.json"}, "first")
        for way in WAYS
        for rank in SEEN
    ]
    then = {"load_file": "strategies/hsdp.json"}
    rows += [
        ("hsdp", 3, {"save_file": "rank_{rank}.json"}, "first"),
        ("hsdp", 0, then, "same"),
        ("both", 1, then, "rank 1"),
        ("tp", 0, then, "other"),
    ]
    done = subprocess.run(
        [*warm_python.words, "-c", RANKS, json.dumps(rows)],
        cwd=made,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return made


def layouts_in(path):
    return json.loads(path.read_text())["parallel_layout_item"]


@pytest.mark.parametrize("way", WAYS)
def test_rank_0_knows_the_parts_of_all_ranks(way, folder):
    file = folder / "strategies" / f"{way}.json"
    content = json.loads(file.read_text())
    assert (content["current_stage"], content["parallel_strategy_item"]) == (0, {})
    layouts = content["parallel_layout_item"]
    assert layouts.keys() == SIZES.keys()
    for rank in SEEN:
        parts = json.loads((folder / f"{way}.{rank}").read_text())
        for name, layout in layouts.items():
            box = layout.get("boxes", {}).get(str(rank), ["", layout["tensor_shape"]])
            assert box[1] == parts[name], (name, rank)
    for name, layout in layouts.items():
        boxes = {json.dumps(box): box for box in layout.get("boxes", {}).values()}
        sizes = [torch.Size(size).numel() for _, size in boxes.values()]
        assert sum(sizes) == SIZES[name] or not boxes  # no hole, and nothing twice


EXPECTED = {
    # way, parameter: ranks of the mesh; by dimension of the parameter, that of the mesh from the
    # right; into how many parts FSDP cuts it
    ("hsdp", "model.0.weight"): ([2, 4], [-1, -1], 4),
    ("tp", "model.0.weight"): ([2], [0, -1], 0),
    ("tp", "model.2.weight"): ([2], [-1, 0], 0),
    ("tp", "model.2.bias"): ([2], [-1], 0),
    ("both", "model.0.weight"): ([4, 2], [0, -1], 4),
    ("both", "model.2.weight"): ([4, 2], [-1, 0], 4),
    ("whole", "model.0.weight"): ([1], [-1, -1], 0),
}


@pytest.mark.parametrize(("way", "name"), EXPECTED)
def test_what_is_cut_has_mindspores_keys(way, name, folder):
    layout = layouts_in(folder / "strategies" / f"{way}.json")[name]
    shards = layout["opt_weight_shard_size"]
    assert (layout["dev_matrix"], layout["tensor_map"], shards) == EXPECTED[way, name]
    assert (layout["field"], layout["opt_weight_shard_step"]) == (0, 0)


def test_each_rank_writes_if_the_file_has_its_number(folder):
    layout = layouts_in(folder / "rank_3.json")["model.0.weight"]
    assert layout["tensor_shape"] == [1, 6]  # of 3, 3, 3 and 1 rows
    assert not (folder / "rank_{rank}.json").exists()


def test_it_says_what_is_another_than_in_an_earlier_run(folder):
    assert "layout" not in (folder / "same").read_text()
    assert "layout" not in (folder / "rank 1").read_text()  # rank 0 says it for all
    said = (folder / "other").read_text()
    file = "strategies/hsdp.json"
    assert f"the layout is another one than in {file}: model.0.bias is cut into 5 over 2" in said
    assert "model.2.bias is cut into 4 over 2 ranks, and was cut into 1 over 2x4 ranks" in said
    assert said.rstrip().endswith("; 1 more differs")


def test_what_is_not_trained_is_left_out_if_nothing_else_is_said(tmp_path):
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    net[0].requires_grad_(False)
    for is_only in (True, False):
        config = {"save_file": str(tmp_path / "file"), "only_trainable_params": is_only}
        TrainState(model=net, callbacks=[ParallelStrategy(config)])
        found = layouts_in(tmp_path / "file")
        assert ("model.0.weight" in found) != is_only
        assert "model.1.weight" in found


def test_training_goes_on_if_it_cannot_be_written(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    config = {"save_file": tmp_path / "file" / "strategy.json"}
    TrainState(model=nn.Linear(2, 1), callbacks=[ParallelStrategy(config)])
    assert "strategy.json is not written: " in caplog.text


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ("strategy.json", TypeError, "strategy_ckpt_config must be a dict, not 'strategy.json'"),
        ({"file": "a"}, ValueError, "strategy_ckpt_config has 'file', but knows"),
        ({"save_file": 3}, TypeError, "save_file must be a path, not 3"),
        ({"save_file": ""}, TypeError, "save_file must be a path, not ''"),
        ({"only_trainable_params": 1}, TypeError, "only_trainable_params must be True or False"),
        ({"load_file": "/nowhere"}, ValueError, "load_file /nowhere cannot be read (No such file"),
    ],
)
def test_what_is_wrong_is_refused(config, error, says):
    with pytest.raises(error) as found:
        ParallelStrategy(config)
    assert says in str(found.value)


@pytest.mark.parametrize("text", ["", "{", "{}", '{"parallel_layout_item": 3}'])
def test_another_file_is_refused(text, tmp_path):
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match="is no strategy file in JSON"):
        ParallelStrategy({"load_file": tmp_path / "file"})
