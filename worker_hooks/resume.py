"""Goes on from a checkpoint: replicated state at once, private state when the data is opened.

A rank's randomness and buffers are put back as late as the first batch, because what the script
does in between, wrapping its model or making its loaders, draws and broadcasts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from worker_hooks import manifest as manifests
from worker_hooks import restore
from worker_hooks.env import Told
from worker_hooks.ledger import Ledger
from worker_hooks.loader import Batches, Feed
from worker_hooks.octets import to_bytes
from worker_hooks.pieces import Piece
from worker_hooks.rng import Randomness, derive

log = logging.getLogger("msrun")


class Private(NamedTuple):
    """What a rank had for itself when the checkpoint was made."""

    batch: int
    meta: dict[str, Any]
    tensors: dict[str, Tensor]

    def octets(self) -> dict[str, bytes]:
        """The tensors' bytes: of randomness, which is no numbers."""
        return {name: bytes(to_bytes(tensor)) for name, tensor in self.tensors.items()}


class Point(NamedTuple):
    """Where training goes on."""

    step: int
    epoch: int
    batch: int  # consumed in the loop
    loop: int  # of batches() within the epoch
    is_over: bool  # the loop was left
    feed: Mapping[str, Any]  # what the loader said of itself
    private: Private | None
    is_own: bool  # the private state was this rank's
    usual: tuple[Any, ...] | None
    ready_orders: Sequence[list[int] | None]


def find(path: str) -> Path | None:
    """The newest verified checkpoint in a folder; what is damaged is said and left out."""
    found = manifests.newest(Path(path), lambda sentence: log.warning("%s", sentence))
    return None if found is None else found[0]


def restored(pieces: Sequence[Piece], folder: Path, told: Told) -> Point:
    """Put the replicated state of a verified checkpoint back.

    Raises:
        OSError: a file cannot be read.
        ValueError: it does not fit what was registered.
    """
    manifest = manifests.read(folder)
    saved = restore.load(folder, manifest)
    restore.restore(pieces, saved)
    was, facts = manifest.world_size, json.loads(saved.metadata["facts"])
    private = _private(saved, told.rank)
    is_own = private is not None
    if told.rank < was and not is_own:
        log.warning("rank %d: its randomness was not saved and begins anew", told.rank)
    lenders = (_private(saved, (told.rank + shift) % was) for shift in range(was))
    private = next((one for one in lenders if one is not None), None)
    batch = manifest.batch if private is None else private.batch
    if was != told.world_size:
        batch, rest = divmod(batch * was, told.world_size)
        if rest and told.rank == 0:
            log.warning("%d ranks instead of %d: some samples are seen twice", told.world_size, was)
    meta = {} if private is None else private.meta
    usual = facts.get("usual")
    return Point(
        step=manifest.step,
        epoch=manifest.epoch,
        batch=batch,
        loop=int(meta.get("loop", facts.get("loop", 0))),
        is_over=bool(meta.get("is_over", False)),
        feed=meta.get("feed", {}),
        private=private,
        is_own=is_own,
        usual=None if usual is None else tuple(usual),
        ready_orders=facts.get("ready_orders", ()),
    )


def reopen(point: Point, feed: Feed, epoch: int, ledger: Ledger, rank: int) -> Batches:
    """Open the loop's data where it was left, and put private state back as of then."""
    feed.begin(epoch)
    private = point.private
    if private is None:
        return feed.open(point.batch, point.feed, {})
    octets = private.octets()
    if not point.is_own:
        octets |= derive(octets, rank)
    batches = feed.open(point.batch, point.feed, octets)
    unsaved = private.meta.get("unsaved", ())  # they changed their size after they were first seen
    kept = {name: each for name, each in private.tensors.items() if name not in unsaved}
    ledger.buffers.restore(kept)
    missed = Randomness().restore(octets)
    if missed:
        log.warning("randomness that was not saved begins anew: %s", ", ".join(missed))
    return batches


def _private(saved: restore.Saved, rank: int) -> Private | None:
    found = saved.private(rank)
    if found is None:
        return None
    record, tensors = found
    return Private(int(record["batch"]), record["meta"], tensors)
