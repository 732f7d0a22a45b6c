"""A checkpoint as one file: what was registered, in what a module's load_state_dict takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.checkpoints import flipped
from support.sharded_states import Held, begun, columns
from support.stored_states import Net, stored, trained
from torch import nn

from agent.spec.job_spec import UsageError
from worker_hooks.storage import checksum, commit, merged_file, safetensors_file
from worker_hooks.storage.manifest import Manifest, Shard

ROOT = Path(__file__).parents[4]


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("parts", [1, 3])
def test_a_model_loads_it_strictly_and_bit_for_bit(call, tmp_path, net, parts):
    optimizer = trained(net)
    folder = stored(tmp_path / "ckpt", {"model": net, "optimizer": optimizer}, parts=parts)
    code, out, err = call("merge", "--only=model", folder)
    assert (code, err) == (0, "")
    assert out.startswith("CKP-1_7-model.safetensors: 12 tensors, 4.5 MB")
    other = Net()
    other.load_state_dict(load_file("CKP-1_7-model.safetensors"))
    same(other.state_dict(), net.state_dict())
    with safe_open("CKP-1_7-model.safetensors", framework="pt") as file:
        told = file.metadata()
    assert (told["step"], told["kind"], told["format"]) == ("7", "checkpoint", "pt")
    assert not {"rest", "DCP_SHARDING_INFO"} & told.keys()


def test_all_of_it_keeps_its_names_and_what_is_no_tensor(call, tmp_path, net):
    optimizer = trained(net)
    folder = stored(tmp_path / "ckpt", {"model": net, "optimizer": optimizer})
    assert call("merge", folder, "-o", "all.safetensors")[0] == 0
    found = load_file("all.safetensors")
    assert {name.partition(".")[0] for name in found} == {"model", "optimizer"}
    assert len([name for name in found if name.startswith("optimizer")]) >= 3 * 5
    same(
        {f"model.{name}": each for name, each in net.state_dict().items()},
        {name: each for name, each in found.items() if name.startswith("model")},
    )
    with safe_open("all.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["rest"])["pieces"].keys() == {"model", "optimizer"}
    assert safetensors_file.read_header(Path("all.safetensors")).data_offset % 64 == 0


def test_whole_copies_on_every_rank_are_one(call, tmp_path, net):
    folder = stored(tmp_path / "ckpt", {"model": net}, whole_each=True)
    assert call("merge", "--only=model", folder)[0] == 0
    same(load_file("CKP-1_7-model.safetensors"), net.state_dict())


def test_of_several_checkpoints_the_newest_whole_one_is_taken(call, tmp_path, net):
    for step in (1, 2, 3):
        folder = stored(tmp_path / "ckpt", {"model": net}, step=step)
    flipped(folder / "rank_0" / "CKP-1_3.safetensors")
    code, out, err = call("merge", tmp_path / "ckpt")
    assert (code, out.partition(":")[0]) == (0, "CKP-1_2.safetensors")
    assert "CKP-1_3 is damaged: rank_0/CKP-1_3.safetensors was altered" in err
    code, _, err = call("merge", folder)
    assert (code, os.path.exists("CKP-1_3.safetensors")) == (1, False)
    assert "is complete: no file was written" in err


def test_objects_in_a_list_have_their_own_names(call, tmp_path):
    two = [nn.Linear(2, 3), nn.Linear(3, 1)]
    folder = stored(tmp_path / "ckpt", {"model": two, "ema": torch.ones(2)}, parts=1)
    assert call("merge", "--only=model.1", folder, "-o", "one")[0] == 0
    same(load_file("one"), two[1].state_dict())
    assert call("merge", "--only=model", folder, "-o", "two")[0] == 0
    same(load_file("two"), nn.ModuleList(two).state_dict())
    assert call("merge", "--only=ema", folder, "-o", "three")[0] == 0
    same(load_file("three"), {"ema": torch.ones(2)})
    with pytest.raises(UsageError, match=r"has no mode: it has ema, model.0, model.1"):
        call("merge", "--only=mode", folder, "-o", "four")
    assert not os.path.exists("four")


def test_buffers_that_are_not_in_the_state_dict_are_left_out(call, tmp_path):
    net = nn.Module()
    net.register_buffer("kept", torch.ones(2))
    net.register_buffer("cache", torch.ones(3), persistent=False)

    more = {"transient": ["model.cache"]}
    folder = stored(tmp_path / "ckpt", {"model": net}, parts=1, more=more)
    assert call("merge", "--only=model", folder)[0] == 0
    same(load_file("CKP-1_7-model.safetensors"), net.state_dict())


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra_state = nn.Linear(1, 1)  # a name to stumble over

    def get_extra_state(self):
        return {"seen": torch.ones(3)}

    def set_extra_state(self, state):
        pass


def test_extra_state_is_left_out_and_that_is_said(call, tmp_path):
    folder = stored(tmp_path / "ckpt", {"model": Extra()}, parts=1)
    code, _, err = call("merge", "--only=model", folder)
    assert code == 0
    assert "the extra state of model is not written: load with strict=False" in err
    assert load_file("CKP-1_7-model.safetensors").keys() == {
        "weight", "extra_state.weight", "extra_state.bias",
    }  # fmt: skip


def test_types_that_the_format_lacks_are_said(call, tmp_path):
    folder = stored(tmp_path / "ckpt", {"z": torch.ones(4, dtype=torch.complex128)}, parts=1)
    code, _, err = call("merge", folder)
    assert (code, "safetensors has no C128: z is written as F64" in err) == (0, True)
    assert load_file("CKP-1_7.safetensors")["z"].shape == (4, 2)
    (entry,) = safetensors_file.read_header(Path("CKP-1_7.safetensors")).entries
    assert (entry.dtype, entry.shape) == ("C128", (4,))


# --- foreign files -----------------------------------------------------------------------------


def test_files_of_another_program_are_merged(call, tmp_path, net):
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    names = sorted(state)
    (tmp_path / "hub").mkdir()
    for number, some in enumerate((names[:4], names[4:])):
        save_file(
            {name: state[name] for name in some}, tmp_path / "hub" / f"m-{number}.safetensors"
        )
    assert call("merge", tmp_path / "hub", "-o", "m")[0] == 0
    same(load_file("m"), net.state_dict())
    assert call("merge", tmp_path / "hub" / "m-0.safetensors", "-o", "m0")[0] == 0
    assert sorted(load_file("m0")) == names[:4]
    assert call("merge", "--only=wide", tmp_path / "hub", "-o", "wide")[0] == 0
    same(load_file("wide"), net.wide.state_dict())
    save_file({names[0]: state[names[0]]}, tmp_path / "hub" / "again.safetensors")
    with pytest.raises(UsageError, match="name one of them"):
        call("merge", tmp_path / "hub", "-o", "again")
    (tmp_path / "hub" / "again.safetensors").write_bytes(b"x")
    code, _, err = call("merge", tmp_path / "hub", "-o", "again")
    assert (code, "again.safetensors is damaged" in err) == (1, True)


# --- writing -----------------------------------------------------------------------------------


def test_a_file_that_is_there_is_replaced_only_by_force(call, tmp_path, net):
    folder = stored(tmp_path / "ckpt", {"model": net})
    out = tmp_path / "out.safetensors"
    out.write_text("precious")
    with pytest.raises(UsageError, match="exists: --force replaces it"):
        call("merge", folder, "-o", out)
    assert out.read_text() == "precious"
    assert call("merge", "--force", "--only=model", folder, "-o", out)[0] == 0
    same(load_file(out), net.state_dict())


def test_one_that_appears_meanwhile_is_not_replaced(call, tmp_path, net, monkeypatch):
    folder, out = stored(tmp_path / "ckpt", {"model": net}), tmp_path / "out.safetensors"
    real = safetensors_file.write

    def slow(*args):
        out.write_text("precious")
        return real(*args)

    monkeypatch.setattr(safetensors_file, "write", slow)
    with pytest.raises(UsageError, match="exists"):
        call("merge", folder, "-o", out)
    assert out.read_text() == "precious"
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "out.safetensors"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("ckpt/CKP-1_7/more.safetensors", "is in the checkpoint itself"),
        ("ckpt/CKP-1_7/rank_0/CKP-1_7.safetensors", "is in the checkpoint itself"),
        ("ckpt", "is a folder"),
        ("nowhere/x.safetensors", "the folder of .* does not exist"),
    ],
)
def test_a_place_that_cannot_be_meant_is_refused(call, tmp_path, net, place, said):
    folder = stored(tmp_path / "ckpt", {"model": net})
    with pytest.raises(UsageError, match=said):
        call("merge", "--force", folder, "-o", tmp_path / place)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_trouble_leaves_the_old_file_and_nothing_else(
    call, tmp_path, net, monkeypatch, error, name
):
    folder, out = stored(tmp_path / "ckpt", {"model": net}), tmp_path / "out.safetensors"
    out.write_text("old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, name, fail)
    raised = UsageError if isinstance(error, OSError) else KeyboardInterrupt
    try:
        code = call("merge", "--force", folder, "-o", out)[0]
    except raised as said:
        assert raised is KeyboardInterrupt or "No space left on device" in str(said)
    else:
        assert (code, raised) == (130, KeyboardInterrupt)  # click says so
    assert out.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "out.safetensors"]


# --- groups of ranks ---------------------------------------------------------------------------


def test_the_parts_of_all_groups_are_one_file(call, tmp_path):
    bias = Held((3,), b"abc")
    groups = [{"model.w": columns(at, 3, 700, 30), "model.b": bias} for at in range(3)]
    folder = commit.commit(*begun(tmp_path / "ckpt", groups))
    code, out, err = call("merge", "--only=model", folder, "-o", "all.safetensors")
    assert (code, err) == (0, "")
    assert out.startswith("all.safetensors: 2 tensors")
    found = load_file("all.safetensors")
    row = torch.arange(90, dtype=torch.uint8)
    assert torch.equal(found["w"], row.expand(700, 90))
    assert bytes(found["b"].tolist()) == b"abc"
    assert call("merge", folder, "-o", "whole.safetensors")[0] == 0
    with safe_open("whole.safetensors", framework="pt") as file:
        assert file.keys() == ["model.b", "model.w"]
        assert not {"rest", "objects", "DCP_SHARDING_INFO"} & file.metadata().keys()


@pytest.mark.parametrize("name", ["model.b", "model.w", ""])
def test_a_merged_file_that_was_altered_is_named_and_can_be_made_again(call, tmp_path, name):
    """Readers of other programs take it for the state; no manifest has its checksum."""
    groups = [
        {"model.w": columns(at, 3, 700, 30), "model.b": Held((3,), b"abc")} for at in (0, 1, 2)
    ]
    folder = commit.commit(*begun(tmp_path / "ckpt", groups))
    made = commit.manifests.read(folder)
    assert merged_file.add_to(folder, made, lambda _: None) == ""
    assert call("verify", folder)[0] == 0
    path = folder / f"{folder.name}.safetensors"
    octets = bytearray(path.read_bytes())
    place = {"model.b": len(octets) - 63000 - 1, "model.w": len(octets) - 1, "": 9}[name]
    octets[place] ^= 1
    path.write_bytes(octets)
    code, out, _ = call("verify", folder)
    what = (
        f"was altered: {name} is not that of the ranks' files" if name else "cannot be compared: "
    )
    assert (code, f"{path.name} {what}" in out) == (1, True), out
    assert call("list", "--verify", folder)[0] == 1
    assert commit.manifests.verify(folder, made) == []  # a resume needs no such file
    assert call("merge", folder, "-o", "again.safetensors")[0] == 0
    path.write_bytes(Path("again.safetensors").read_bytes())
    assert call("verify", folder)[0] == 0


def test_a_merged_file_of_another_checkpoint_is_named(call, tmp_path):
    folder, other = (
        commit.commit(*begun(tmp_path / name, [{name: columns(0, 1, 7, 3)}])) for name in ("a", "b")
    )
    for each in (folder, other):
        assert merged_file.add_to(each, commit.manifests.read(each), lambda _: None) == ""
    name = f"{folder.name}.safetensors"
    (folder / name).write_bytes((other / name).read_bytes())
    code, out, _ = call("verify", folder)
    assert (code, f"{name} has other tensors than the ranks' files" in out) == (1, True), out


def test_states_of_a_pipeline_are_not_merged(call, tmp_path):
    groups = [{"model.w": Held((3,), data)} for data in (b"abc", b"abd")]
    folder = commit.commit(*begun(tmp_path / "ckpt", groups))
    with pytest.raises(UsageError, match=r"no parts of one: model.w is not the same in all groups"):
        call("merge", folder, "-o", "all.safetensors")
    assert not os.path.exists("all.safetensors")


def test_a_checkpoint_with_a_hole_is_named(call, tmp_path):
    groups = [{"model.w": columns(at, 3, 700, 30)} for at in range(3)]
    layout, made = begun(tmp_path / "ckpt", groups)
    folder = commit.commit(layout, made)
    edited = made._replace(shards=made.shards[:2], holders=made.holders[:2])
    commit.manifests.write(folder, edited)
    code, _, err = call("merge", folder, "-o", "all.safetensors")
    assert (code, "parts of model.w are missing" in err) == (1, True)
    code, out, _ = call("verify", folder)
    assert (code, "does not hold a whole state: parts of model.w are missing" in out) == (1, True)


MERGE = """
import re
from msrun.commands import run
import msrun.checkpoints.merge, msrun.checkpoints.catalog, concurrent.futures.thread, hashlib
def peak():  # kB; getrusage would tell of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
before = peak()
code = run(["checkpoints", "merge", "ckpt", "-o", "out.safetensors"])
print(code, peak() - before)
"""


@pytest.mark.parametrize(
    ("parts", "rows", "columns"),
    [
        (2, 500, 48_000),  # long runs of bytes
        (16, 94_000, 32),  # short ones, of many files, each of a group of its own
    ],
)
def test_a_large_state_takes_little_memory(tmp_path, parts, rows, columns):
    """192 MB, cut along the second dimension: no two rows of a part follow each other."""
    folder = tmp_path / "ckpt" / "CKP-1_7"
    shards = []
    for part in range(parts):
        place = {
            "saved_offsets": [0, part * columns],
            "global_shape": [rows, parts * columns],
            "distributed": True,
        }
        entry = safetensors_file.Entry("t", "F32", (rows, columns), rows * columns * 4)
        head = safetensors_file.header([entry], {"DCP_SHARDING_INFO": json.dumps({"t": place})})
        file = folder / f"rank_{part}" / "CKP-1_7.safetensors"
        file.parent.mkdir(parents=True)
        file.write_bytes(head)
        os.truncate(file, len(head) + entry.nbytes)  # a hole: no disk is used
        name = str(file.relative_to(folder))
        sha256 = checksum.of_file(file, lambda _: None)
        shards.append(Shard(name, part, "replicated", file.stat().st_size, sha256, part))
    made = Manifest("checkpoint", 7, 1, 7, parts, 0, "r", "", 1.0, tuple(shards), "d")
    commit.manifests.write(folder, made._replace(holders=tuple((one,) for one in range(parts))))
    done = subprocess.run(
        [sys.executable, "-c", MERGE], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    code, kilobytes = map(int, done.stdout.splitlines()[-1].split())
    assert code == 0
    assert 0 < kilobytes < 80_000
    assert (tmp_path / "out.safetensors").stat().st_size > 192_000_000
    (tmp_path / "out.safetensors").unlink()
