"""What a checkpoint or a file holds, for people and for programs, from its headers alone."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from support.sharded_states import Held, begun, columns
from support.stored_states import stored

from worker_hooks.storage import commit


def test_a_checkpoint_s_facts_and_tensors_are_shown(call, tmp_path, net):
    stored(tmp_path / "ckpt", {"model": net}, step=6)
    folder = stored(tmp_path / "ckpt", {"model": net})
    code, out, _ = call("show", tmp_path / "ckpt")
    assert code == 0
    assert f"path       {folder}\n" in out
    assert "beside     1 other: " in out
    assert "step       7 (epoch 2, batch 7)\n" in out
    assert "tensors    12, 4.5 MB" in out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["model.wide.weight"][:3] == ["F32", "[800,", "700]"]
    assert int(lines["model.wide.weight"][-1]) + int(lines["model.tied.weight"][-1]) > 2
    assert lines["model.scale"] == ["F32", "[]", "4", "bytes", "1"]
    assert lines["rank_2/CKP-1_7.safetensors"][:2] == ["2", "replicated"]
    assert (
        lines["rank_2/CKP-1_7.safetensors"][-2] == "MB"
        or "kB" in lines["rank_2/CKP-1_7.safetensors"]
    )


def test_json_shows_every_tensor(call, tmp_path, net):
    folder = stored(tmp_path / "ckpt", {"model": net})
    code, out, _ = call("show", "--json", folder)
    (found,) = json.loads(out)
    assert (code, found["step"], found["damages"], len(found["shards"])) == (0, 7, [], 3)
    tensors = {one["name"]: one for one in found["tensors"]}
    assert tensors["model.wide.weight"]["shape"] == [800, 700]
    assert tensors["model.wide.weight"]["nbytes"] == 800 * 700 * 4
    assert len(tensors) == 12


def test_a_single_file_is_shown_with_its_metadata(call, tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(2, 3)}, file, {"note": "n" * 300})
    code, out, _ = call("show", file)
    assert code == 0
    assert "kind       foreign\n" in out
    assert f'metadata   note="{"n" * 200}... (300 in all)"\n' in out
    assert "w       F32    [2, 3]  24 bytes  1\n" in out
    code, out, _ = call("show", "--json", file)
    assert json.loads(out)[0]["metadata"] == {"note": "n" * 300}


def test_damage_that_headers_show_is_exit_code_1(call, tmp_path, net):
    folder = stored(tmp_path / "ckpt", {"model": net})
    (folder / "rank_1" / "CKP-1_7.safetensors").unlink()
    code, out, _ = call("show", folder)
    assert (code, "damaged    rank_1/CKP-1_7.safetensors is missing\n" in out) == (1, True)
    (tmp_path / "junk.safetensors").write_bytes(b"x" * 100)
    code, out, _ = call("show", tmp_path / "junk.safetensors")
    assert (code, "damaged    " in out) == (1, True)
    (tmp_path / "CKP-1_9_tmp").mkdir()
    code, out, _ = call("show", tmp_path / "CKP-1_9_tmp")
    assert (code, "damaged    it is not complete\n" in out) == (1, True)


def test_tensors_of_groups_are_shown_whole(call, tmp_path):
    groups = [{"w": columns(at, 2, 10, 8), "b": Held((3,), b"abc")} for at in range(2)]
    groups[1]["own"] = Held((2,), b"ab")
    groups[1]["b"] = Held((3,), b"xyz")
    folder = commit.commit(*begun(tmp_path / "ckpt", groups))
    code, out, _ = call("show", folder)
    assert code == 0
    assert "groups     each of 2 groups of ranks wrote what it holds\n" in out
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line}
    assert lines["tensor"][-2:] == ["parts", "groups"]
    assert lines["w"] == ["U8", "[10,", "16]", "160", "bytes", "2", "2"]
    assert lines["b"] == ["U8", "[3]", "3", "bytes", "1", "2"]
    assert lines["own"] == ["U8", "[2]", "2", "bytes", "1", "1"]
    code, out, _ = call("show", "--json", folder)
    told = {one["name"]: (one["parts"], one["groups"]) for one in json.loads(out)[0]["tensors"]}
    assert told == {"w": (2, 2), "b": (1, 2), "own": (1, 1)}
