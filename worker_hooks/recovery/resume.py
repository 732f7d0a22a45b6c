"""Goes on from a checkpoint: replicated state at once, private state when the data is opened.

A rank's randomness and buffers are put back as late as the first batch, because what the script
does in between, wrapping its model or making its loaders, draws and broadcasts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from worker_hooks.contract.env import RankEnv
from worker_hooks.data.feed import Batches, Feed
from worker_hooks.recovery import load
from worker_hooks.rng.randomness import Randomness, derive
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.state.private import EPOCH, placed
from worker_hooks.state.registry import Piece
from worker_hooks.state.snapshot import version
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.find import search
from worker_hooks.storage.manifest import Manifest
from worker_hooks.tensors.shard import quick_digest
from worker_hooks.tensors.tensor_bytes import to_bytes

log = logging.getLogger("msrun")

PEERS = 8  # ranks whose private state is read where one's own does not say all


class LoadedPrivate(NamedTuple):
    """What a rank had for itself when the checkpoint was made."""

    step: int
    batch: int
    is_commit: bool  # else it is as of the step's last backward
    meta: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def loop(self) -> int:
        """Which of an epoch's loops the rank was in."""
        return int(self.meta.get("loop", 0))

    @property
    def is_over(self) -> bool:
        """Whether that loop was left."""
        return bool(self.meta.get("is_over", False))

    def octets(self) -> dict[str, bytes]:
        """The tensors' bytes: of randomness, which is no numbers."""
        octets = {name: bytes(to_bytes(tensor)) for name, tensor in self.tensors.items()}
        return placed(octets, int(self.meta.get("place", 0)))


class ResumePoint(NamedTuple):
    """Where training goes on."""

    step: int
    epoch: int
    batch: int  # consumed in the loop by each rank
    ranks: tuple[int, int]  # how many there were, and are
    loop: int  # of batches() within the epoch
    is_over: bool  # the loop was left
    feed: Mapping[str, Any]  # what the loader said of itself
    private: LoadedPrivate | None
    is_own: bool  # the private state was this rank's
    usual: tuple[Any, ...] | None
    late: frozenset[str]
    ready_orders: Sequence[list[int] | None]
    saved: load.LoadedState
    quick_digest: str  # of the replicated state, if it lies in memory; else empty
    looks: tuple[Any, ...]  # of the pieces, when the state had been put back


def find(*places: str) -> Path | None:
    """The newest verified checkpoint in some folders; what is damaged is said and left out."""
    found = search(Path(place) for place in places if place)
    for remark in found.remarks:
        log.warning("%s", remark)
    return None if found.newest is None else found.newest.path


def restored(
    pieces: Sequence[Piece], folder: Path, env: RankEnv, live: tuple[int, str] | None = None
) -> ResumePoint:
    """Put the replicated state of a verified checkpoint back.

    Args:
        pieces: what is registered.
        folder: the checkpoint's; of one in memory, its manifest's file.
        env: who this process is.
        live: the step that the registered tensors are whole as of, and their digest; of a
            checkpoint with both they are not read.

    Raises:
        OSError: a file cannot be read.
        ValueError: it does not fit what was registered.
    """
    manifest = manifests.read(folder)
    if manifests.is_in_memory(folder):
        saved = load.hold(folder.parent, manifest)
    else:
        saved = load.load(folder, _whole(folder, manifest))
    manifest = saved.manifest
    _forget_gradients(pieces)
    load.restore(pieces, saved, is_live=live == (manifest.step, manifest.digest))
    facts = json.loads(saved.metadata["facts"])
    own = _private(saved, env.rank)
    late = frozenset(facts.get("late", ()))
    if own is not None and not own.is_commit:
        own.tensors.update((name, saved.tensors[name]) for name in late & saved.tensors.keys())
    was, step = manifest.world_size, manifest.step
    if env.rank < was and own is None:
        log.warning("rank %d: its randomness was not saved and begins anew", env.rank)
    is_sure = own is not None and own.is_commit and own.step == step
    peers = [] if is_sure else list(islice(_peers(saved, env.rank, was), PEERS))
    known = [one for one in (own, *peers) if one is not None and one.step == step]
    place = next(iter(known or peers), own)
    batch = manifest.batch if place is None else place.batch
    meta = {} if place is None else place.meta
    loop = int(meta.get("loop", facts.get("loop", 0)))
    usual = facts.get("usual")
    return ResumePoint(
        step=step,
        epoch=manifest.epoch,
        batch=batch,
        ranks=(was, env.world_size),
        loop=loop,
        # a rank that died before its commit could not say that its loop would end with it
        is_over=any(one.is_over for one in known if one.is_commit and one.loop == loop),
        feed=meta.get("feed", {}),
        private=own or place,
        is_own=own is not None,
        usual=None if usual is None else tuple(usual),
        late=late,
        ready_orders=facts.get("ready_orders", ()),
        saved=saved,
        quick_digest=manifest.digest if manifest.kind == manifests.MEMORY_KIND else "",
        looks=tuple(map(_look, pieces)),
    )


def _whole(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest without models that are damaged where another stands in for them."""
    models = manifests.models(manifest)
    if len(models) == 1:
        return manifest
    return next((one for one in models if not manifests.verify(folder, one)), manifest)


def _forget_gradients(pieces: Sequence[Piece]) -> None:
    """Have those that a new process would have; an optimizer's are set when it is put back."""
    for piece in pieces:
        for tensor in piece.tensors().values():
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = None


def _peers(saved: load.LoadedState, rank: int, world_size: int) -> Iterator[LoadedPrivate]:
    """What the other ranks had, the next ones first, until one is known as of its commit."""
    for shift in range(rank >= world_size, world_size):
        other = (rank + shift) % world_size
        one = None if other == rank else _private(saved, other)
        if one is not None:
            yield one
            if one.is_commit and one.step == saved.manifest.step:
                return


def begin_epoch(point: ResumePoint) -> None:
    """Let the script draw before its loop what it drew there when the epoch began."""
    octets = point.private.octets() if point.private is not None and point.is_own else {}
    began = {name: each for name, each in octets.items() if name.startswith(EPOCH)}
    Randomness().restore({name.removeprefix(EPOCH): each for name, each in began.items()})


def opened(
    point: ResumePoint | None, feed: Feed, epoch: int | None, committed: CommittedState, rank: int
) -> Batches:
    """Open a loop's data; at a point where it was left, with all state as it was then.

    Args:
        point: where training goes on; ``None``: the loop begins.
        feed: of the loop's loader.
        epoch: as the script counts; ``None``: it does so by itself.
        committed: of the state.
        rank: whose state it is.

    Raises:
        OSError: a file of the checkpoint cannot be read any more.
    """
    if point is None:
        feed.begin(epoch)
        return feed.open()
    batches = feed.open_again((point.epoch, point.loop), point.batch)
    if batches is None:
        feed.begin(epoch)
        batches = feed.open(_consumed(point, feed, rank), point.feed, _octets(point, rank))
    put_back(point, committed, rank)
    return batches


def put_back(point: ResumePoint, committed: CommittedState, rank: int) -> None:
    """Put private state back, and what the script has changed of the rest before its loop.

    What stands before the loop is done a second time after a resume: a schedule's step, say.

    Raises:
        OSError: a file of the checkpoint cannot be read any more.
        RuntimeError: what was put back from memory is something else.
    """
    # what was put back, or stayed since the survivors were compared, may have changed unseen
    if point.quick_digest or tuple(map(_look, committed.pieces)) != point.looks:
        # a broadcast of equal weights, as by DDP, moves their versions and nothing else
        is_same = _is_same(point, committed)
        mine = [piece for piece in committed.pieces if not (is_same and piece.is_compared)]
        load.restore(mine, point.saved, is_all=not is_same)
        if point.quick_digest and not is_same and not _is_same(point, committed):
            raise RuntimeError(f"step {point.step} is not what it was when it was put back")
    private = point.private
    if private is None:
        return
    unsaved = private.meta.get("unsaved", ())  # they changed their size after they were first seen
    kept = {name: each for name, each in private.tensors.items() if name not in unsaved}
    committed.buffers.restore(kept)
    missed = Randomness().restore(_octets(point, rank))
    if missed:
        log.warning("randomness that was not saved begins anew: %s", ", ".join(missed))


def _is_same(point: ResumePoint, committed: CommittedState) -> bool:
    """Whether the replicated state is known to be, bit for bit, what was saved."""
    return bool(point.quick_digest) and quick_digest(committed.present()) == point.quick_digest


def _consumed(point: ResumePoint, feed: Feed, rank: int) -> int:
    """Batches of each rank that make up what all ranks have seen of the loop."""
    was, now = point.ranks
    size = int(point.feed.get("batch_size", 1)) * was, feed.batch_size * now
    if was == now:
        return point.batch
    batch, rest = divmod(point.batch * size[0], size[1])
    if rest and rank == 0:
        log.warning("%d ranks instead of %d: some samples are seen twice", now, was)
    return batch


def _octets(point: ResumePoint, rank: int) -> dict[str, bytes]:
    if point.private is None:
        return {}
    octets = point.private.octets()
    return octets if point.is_own else octets | derive(octets, rank)


def _look(piece: Piece) -> tuple[Any, ...]:
    """What differs when a piece was changed."""
    value, small = piece.encode(piece.snapshot())
    octets = {name: bytes(to_bytes(tensor)) for name, tensor in small.items()}
    # a step's marks leave out what a step changes anyway: most weights, all of an optimizer's
    versions = list(map(version, piece.tensors().values()))
    return piece.marks(), versions, json.dumps(value), octets


def _private(saved: load.LoadedState, rank: int) -> LoadedPrivate | None:
    found = saved.private(rank)
    if found is None:
        return None
    record, tensors = found
    step, batch = int(record["step"]), int(record["batch"])
    return LoadedPrivate(step, batch, bool(record["is_commit"]), record["meta"], tensors)
