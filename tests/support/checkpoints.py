"""Checkpoints made by hand: complete, verified, and without a single tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from worker_hooks.storage.find import FoundCheckpoint, search
from worker_hooks.storage.manifest import Manifest, Shard, write

NAME = "tft_saved_checkpoints-step_"
SHARD = "rank_0/ttp_rank_0-0_7.safetensors"
OTHER = "rank_1/private_rank_1.safetensors"


def newest(folder: Path, say: Callable[[str], object]) -> FoundCheckpoint | None:
    """The newest checkpoint that can be trusted; ``say`` hears of each that cannot."""
    found = search((folder,))
    for remark in found.remarks:
        say(remark)
    return found.newest


def shard(folder: Path, file: str, data: bytes, kind: str) -> Shard:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return Shard(file, 0, kind, len(data), hashlib.sha256(data).hexdigest())


def saved(
    parent: Path,
    name: str = "",
    *,
    step: int = 7,
    saved_at: float = 1.0,
    run: str = "r1",
    lost: tuple[int, ...] = (),
    stale: tuple[int, ...] = (),
    digest: str = "d",
) -> Path:
    """A complete checkpoint of two files."""
    folder = parent / (name or f"{NAME}{step}")
    shards = (
        shard(folder, SHARD, b"x" * 3000, "replicated"),
        shard(folder, OTHER, os.urandom(5000), "private"),
    )
    made = Manifest(
        "dump", step, 0, 7, 2, 0, run, "a reason", saved_at, shards, digest, (1,), lost, stale
    )
    write(folder, made)
    return folder


def flipped(path: Path) -> None:
    """The file with one bit changed."""
    data = bytearray(path.read_bytes())
    data[1234] ^= 1
    path.write_bytes(data)
