"""Parts of a checkpoint in memory: what a node needs of it, and where it lies in files."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from agent.nodes.transfer import Span
from worker_hooks.storage.manifest import PRIVATE, Manifest, Shard
from worker_hooks.storage.memory_dump import head_size

PEERS = 8  # other ranks whose private state a rank may need, as worker_hooks.recovery.resume
LARGE = 1 << 20  # bytes of tensors: those of a smaller one go to all nodes, if these are few
MOST_TO_ALL = 64 << 20  # bytes, together, of what goes to all nodes though most do not read it


class NodeParts:
    """What a node needs of a checkpoint in memory: its ranks' state, and what its ranks alone have.

    A rank that died before its commit lacks what it would have drawn since: it takes that from the
    ranks that come next, and nobody else reads those. The whole checkpoint is for nodes that save
    it if node 0 is lost.
    """

    def __init__(self, manifest: Manifest) -> None:
        """``manifest``: of the whole."""
        self._manifest = manifest
        self._private = {each.rank: each for each in manifest.shards if each.kind == PRIVATE}
        stale = {*manifest.stale_private}
        self._sure = {
            rank for rank, each in self._private.items() if not (each.is_early or rank in stale)
        }
        self._shared = shared(manifest)

    def of(self, ranks: range) -> Manifest:
        """The part for a node with these ranks."""
        wanted = (*ranks, *(() if self._sure.issuperset(ranks) else self._behind(ranks)))
        private = tuple(self._private[rank] for rank in wanted if rank in self._private)
        return self._manifest._replace(shards=(*self._shared, *private))

    def _behind(self, ranks: range) -> Iterable[int]:
        world = self._manifest.world_size
        behind = (rank % world for rank in range(ranks.stop, ranks.start + world))
        return islice(filter(self._private.__contains__, behind), PEERS)


def heads_of(manifest: Manifest, nodes: int) -> tuple[int, ...]:
    """Of each file that is not private how many bytes precede its tensors; none: all is sent.

    ``nodes``: to how many they would go.
    """
    files = shared(manifest)
    heads = tuple(min(each.nbytes, head_size(int(each.file), each.at)) for each in files)
    tensors = sum(each.nbytes for each in files) - sum(heads)
    is_much = tensors >= min(LARGE, MOST_TO_ALL // nodes)
    return heads if is_much or manifest.absent else ()


def shared(manifest: Manifest) -> list[Shard]:
    """The files that are not private, in the order in which they are sent."""
    return sorted(each for each in manifest.shards if each.kind != PRIVATE)


def spans_of(manifest: Manifest) -> list[Span]:
    """What its shards are in: what adjoins is one."""
    return _joined((int(each.file), each.at, each.nbytes) for each in manifest.shards)


class Pieces(NamedTuple):
    """What a node gets of a checkpoint."""

    alike: list[Span]  # as all nodes do: files that are not private, or their heads
    own: list[Span]  # what its ranks alone have
    later: list[Span]  # the tensors of the former, file by file, if their heads are all it gets

    @property
    def now(self) -> list[Span]:
        """What is sent at once, in this order."""
        return [*self.alike, *self.own]


def split(manifest: Manifest, heads: Sequence[int] = ()) -> Pieces:
    """The pieces of a part of a checkpoint.

    ``heads``: as of the order; none: all of it is sent at once.

    Raises:
        ValueError: heads of other files.
    """
    files, alike, later = shared(manifest), [], []
    for shard, head in zip(files, heads or [each.nbytes for each in files], strict=True):
        if not 0 <= head <= shard.nbytes:
            raise ValueError(f"the head of {shard} cannot have {head} bytes")
        alike.append((int(shard.file), shard.at, head))
        if heads:
            later.append(Span(int(shard.file), shard.at + head, shard.nbytes - head))
    return Pieces(_joined(alike), private_of(manifest), later)


def private_of(manifest: Manifest) -> list[Span]:
    """Those of a part that its ranks alone have."""
    return _joined((int(s.file), s.at, s.nbytes) for s in manifest.shards if s.kind == PRIVATE)


def size_of(spans: Iterable[Span]) -> int:
    """How many bytes they have."""
    return sum(span.nbytes or 0 for span in spans)


def content_of(spans: Iterable[Span]) -> bytes:
    """What is in them."""
    return b"".join(os.pread(file, nbytes or 0, at) for file, at, nbytes in spans)


def digests_of(manifest: Manifest) -> list[str]:
    """By variant what tells whether other files have the same state."""
    return manifest.digest.split(",") if manifest.holders else [manifest.digest]


def variants_of(manifest: Manifest, ranks: Collection[int]) -> tuple[int, ...]:
    """The states that these ranks resume from."""
    if not manifest.holders:
        return (0,)
    return tuple(
        variant
        for variant, holders in enumerate(manifest.holders)
        if any(rank in ranks for rank in holders)
    )


def _joined(pieces: Iterable[tuple[int, int, int]]) -> list[Span]:
    """Pieces of files as spans."""
    found: list[Span] = []
    present, begin, end = -1, 0, 0
    for file, at, nbytes in sorted(pieces):
        if file != present or at != end:
            if present >= 0:
                found.append(Span(present, begin, end - begin))
            present, begin = file, at
        end = at + nbytes
    if present >= 0:
        found.append(Span(present, begin, end - begin))
    return found
