"""Files of ranks that hold parts of a state: torch reads them as one, and what lacks a part is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.checkpoints import flipped
from support.jobs import WORKERS, Launcher, side_by_side
from support.warm_python import WarmPython
from torch.distributed.checkpoint import HuggingFaceStorageReader

from msrun.commands import run
from worker_hooks import restore_group_info_list
from worker_hooks.storage import manifest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.warm,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
]
SCRIPT = WORKERS / "train_hsdp.py"
STEPS = 9


@pytest.fixture(scope="module")
def resumed(launcher: Launcher) -> tuple[Path, dict[str, torch.Tensor]]:
    """The dump of eight ranks of which one was killed, and the state that they resumed from."""
    folder = launcher.tmp / "hsdp"
    folder.mkdir()
    job = launcher.start(
        "--worker_num=8",
        "--max-restarts=1",
        "--max_replacements=0",
        *(SCRIPT, STEPS, "--copies=2"),
        "--die",
        1,
        5,
        log_dir=folder / "logs",
        cwd=folder,
        XDG_STATE_HOME=str(folder / "state"),
    )
    ended = job.wait()
    assert ended.code == 0, ended
    (dump,) = (folder / "dumps").iterdir()
    (whole,) = folder.glob("resumed-*.safetensors")
    made = manifest.read(dump)
    assert whole.name == f"resumed-{made.step}.safetensors"
    assert sorted(made.holders) == [(rank, rank + 4) for rank in range(4)]
    assert restore_group_info_list(str(dump / "rank_1/group_info.pb")) == [1, 5]  # the dead one's
    return dump, load_file(whole)


@pytest.fixture
def copied(resumed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(resumed[0], tmp_path / "dump", symlinks=True))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def test_one_process_of_torch_loads_it(resumed: tuple[Path, dict[str, torch.Tensor]]) -> None:
    dump, wanted = resumed
    found = {name: torch.full_like(each, 7.0) for name, each in wanted.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(dump)), no_dist=True)
    same(found, wanted)


RANK = """
import math, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

folder, whole, store, rank = *sys.argv[1:4], int(sys.argv[4])
wanted = load_file(whole)
for shape in ((2,), (3,), (2, 2)):
    if rank >= (world := math.prod(shape)):
        continue
    place = f"file://{store}-{world}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    mesh, found = init_device_mesh("cpu", shape), {}
    for name, each in wanted.items():
        found[name] = torch.zeros_like(each)
        if each.dim():
            ways = [Shard(0), Shard(each.dim() - 1)][-len(shape):]
            found[name] = distribute_tensor(found[name], mesh, ways)
    dcp.load(found, storage_reader=HuggingFaceStorageReader(folder))
    for name, tensor in found.items():
        tensor = tensor.full_tensor() if tensor.dim() else tensor
        assert torch.equal(tensor, wanted[name]), name
    dist.destroy_process_group()
    print("equal", shape, flush=True)
"""


def test_ranks_of_torch_on_other_meshes_load_their_parts(
    resumed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, warm_python: WarmPython
) -> None:
    dump, wanted = resumed
    (whole,) = dump.parents[1].glob("resumed-*.safetensors")
    words = [*warm_python.words, "-c", RANK, dump, whole, tmp_path / "store"]
    said = [each.splitlines() for each in side_by_side(words, 4)]
    on = ["equal (2,)", "equal (3,)", "equal (2, 2)"]
    assert said == [on, on, on[1:], on[2:]]
    assert len(wanted) == 4 * 4


@pytest.mark.parametrize(
    ("ranks", "copies", "more"),
    [(4, 1, ()), (3, 1, ("--backwards",)), (2, 2, ()), (1, 0, ("--backwards",))],
)
def test_other_ranks_resume_from_it(
    resumed: tuple[Path, dict[str, torch.Tensor]],
    launcher: Launcher,
    tmp_path: Path,
    ranks: int,
    copies: int,
    more: tuple[str, ...],
) -> None:
    dump, wanted = resumed
    job = launcher.start(
        f"--worker_num={ranks}",
        f"--resume={dump}",
        *(SCRIPT, STEPS, f"--copies={copies}", *more),
        cwd=tmp_path,
        XDG_STATE_HOME=str(tmp_path / "state"),
    )
    ended = job.wait()
    assert ended.code == 0, ended
    (found,) = tmp_path.glob("resumed-*.safetensors")
    same(load_file(found), wanted)


def test_it_is_merged_into_one_file(
    resumed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    dump, wanted = resumed
    assert run(["checkpoints", "merge", str(dump), "-o", str(tmp_path / "all")]) == 0
    same(load_file(tmp_path / "all"), wanted)


def test_a_lost_part_is_named(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    made = manifest.read(copied)
    file = next(one.file for one in made.shards if one.variant == 1)
    (copied / file).unlink()
    assert run(["checkpoints", "verify", str(copied)]) == 1
    assert f"damaged: dump: {file} is missing" in capfd.readouterr().out
    manifest.write(
        copied,
        made._replace(
            shards=tuple(one for one in made.shards if one.file != file), holders=made.holders[:1]
        ),
    )
    assert run(["checkpoints", "verify", str(copied)]) == 1
    assert "it does not hold a whole state: parts of model.0." in capfd.readouterr().out


def test_a_flipped_bit_is_named(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = next(one.file for one in manifest.read(copied).shards if one.variant == 1)
    flipped(copied / file)
    assert run(["checkpoints", "verify", str(copied)]) == 1
    assert f"{file} was altered (its checksum differs)" in capfd.readouterr().out
    assert run(["checkpoints", "merge", str(copied), "-o", str(copied.parent / "all")]) == 1
    assert not (copied.parent / "all").exists()


def trained(
    launcher: Launcher, folder: Path, *words: object, way: str = ""
) -> tuple[dict[str, torch.Tensor], str]:
    """What a training that saves every four steps ends with, and what msrun says."""
    folder.mkdir(exist_ok=True)
    (folder / "end.safetensors").unlink(missing_ok=True)
    job = launcher.start(
        "--worker_num=4",
        *words,
        SCRIPT,
        STEPS,
        "--every=4",
        *([way] if way else []),
        log_dir=folder / "logs",
        cwd=folder,
        XDG_STATE_HOME=str(folder / "state"),
    )
    ended = job.wait()
    assert ended.code == 0, ended
    assert "no merged file" not in ended.err
    return load_file(folder / "end.safetensors"), ended.err


def test_lost_files_of_ranks_are_resumed_from_their_groups(launcher: Launcher) -> None:
    """MindSpore's fault recovery, in which a person copies the file of rank 2 for rank 0."""
    folder = launcher.tmp / "each"
    wanted, _ = trained(launcher, folder)
    newest, earlier = folder / f"periodic/hsdp-1_{STEPS}", folder / "earlier"
    earlier.mkdir()
    old = (folder / "periodic/hsdp-1_4").rename(earlier / "hsdp-1_4")
    for rank, ranks in enumerate([[0, 2], [1, 3], [0, 2], [1, 3]]):
        assert restore_group_info_list(str(newest / f"rank_{rank}/group_info.pb")) == ranks

    # as it is done there
    shutil.copy(newest / "rank_2" / f"{newest.name}.safetensors", newest / "rank_0")
    assert manifest.verify(newest, manifest.read(newest)) == []

    # and without that
    for rank in (0, 1):
        (old / f"rank_{rank}/hsdp-1_4.safetensors").unlink()
    found, said = trained(launcher, folder, f"--resume={earlier}")
    same(found, wanted)
    assert (folder / "resumed-4.safetensors").exists()
    assert "is whole without damaged files that others equal" in said


@pytest.mark.parametrize("way", ["--integrated", "--split", "--async"])
def test_checkpoints_of_groups_are_read_and_resumed_from(launcher: Launcher, way: str) -> None:
    folder = launcher.tmp / f"periodic{way}"
    wanted, _ = trained(launcher, folder, way=way)
    newest = folder / f"periodic/hsdp-1_{STEPS}"
    made = manifest.read(newest)
    assert made.holders == ((0, 2), (1, 3))
    assert manifest.verify(newest, made) == []
    writers = [one.rank for one in made.shards if one.kind == "replicated"]
    assert writers == ([0, 1, 2, 3] if way == "--split" else [0, 1])
    found = {name: torch.full_like(each, 7.0) for name, each in wanted.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(newest)), no_dist=True)
    same(found, wanted)
    merged = newest / f"{newest.name}.safetensors"
    assert merged.is_file() == (way == "--integrated")
    if way == "--integrated":
        same(load_file(merged), wanted)
    earlier = folder / "earlier"
    earlier.mkdir()
    (folder / "periodic/hsdp-1_4").rename(earlier / "hsdp-1_4")
    same(trained(launcher, folder, f"--resume={earlier}", way=way)[0], wanted)
    assert (folder / "resumed-4.safetensors").exists()
