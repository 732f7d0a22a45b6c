"""Checkpoints of replica groups, written without torch: each group has parts, and what all hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.layout import DumpLayout
from worker_hooks.contract.status_page import Entry
from worker_hooks.storage import safetensors_file
from worker_hooks.storage.manifest import DUMP_KIND, REPLICATED, Manifest, Shard

STEP = 7


class Held(NamedTuple):
    """What a file has of a tensor of bytes; ``whole``: the shape of the distributed one."""

    shape: tuple[int, ...]
    data: bytes
    at: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()


def columns(part: int, parts: int, rows: int, width: int) -> Held:
    """A group's columns of a table in which each byte is its column's number."""
    first = part * width
    row = bytes((first + at) % 251 for at in range(width))
    return Held((rows, width), row * rows, (0, first), (rows, parts * width))


def begun(parent: Path, groups: Sequence[Mapping[str, Held]]) -> tuple[DumpLayout, Manifest]:
    """An unfinished dump: the file of each group, and the manifest that would complete it."""
    layout = DumpLayout(parent / f"tft_saved_checkpoints-step_{STEP}", "r1")
    shards = []
    for number, tensors in enumerate(groups):
        entries = [Entry(name, "U8", one.shape, len(one.data)) for name, one in tensors.items()]
        places: dict[str, dict[str, Any]] = {
            name: {"saved_offsets": list(one.at or (0,) * len(one.shape))}
            | ({"global_shape": list(one.whole), "distributed": True} if one.whole else {})
            for name, one in tensors.items()
        }
        rest = json.dumps({"pieces": {"model": None}})
        told = {"DCP_SHARDING_INFO": json.dumps(places), "rest": rest, "objects": "{}"}
        file = DumpLayout.shard(number, 1, STEP)
        path = layout.unfinished / file
        path.parent.mkdir(parents=True)
        head = safetensors_file.header(entries, told)
        chunks = [one.data for one in tensors.values()]
        done = safetensors_file.write(path, head, chunks, lambda _: None)
        shards.append(Shard(file, number, REPLICATED, done.nbytes, done.sha256, number))
    made = Manifest(
        DUMP_KIND,
        step=STEP,
        epoch=0,
        batch=STEP,
        world_size=len(groups),
        attempt=0,
        record_id="r1",
        reason="",
        shards=tuple(shards),
        digest="",
        holders=tuple((number,) for number in range(len(groups))),
    ).completed()
    return layout, made
