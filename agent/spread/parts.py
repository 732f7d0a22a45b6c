"""Parts of a checkpoint in memory: what a node needs of it, and where it lies in files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from agent.nodes.transfer import Span
from worker_hooks.storage.manifest import PRIVATE, Manifest, Shard
from worker_hooks.storage.memory_dump import head_size

PEERS = 8  # other ranks whose private state a rank may need, as worker_hooks.recovery.resume
LARGE = 1 << 20  # bytes of tensors: those of a smaller one go to all nodes


class NodeParts:
    """What a node needs of a checkpoint in memory: its ranks' state, and what its ranks alone have.

    A rank that died before its commit lacks what it would have drawn since: it takes that from the
    ranks that come next. The whole checkpoint is for nodes that save it if node 0 is lost.
    """

    def __init__(self, manifest: Manifest) -> None:
        """``manifest``: of the whole."""
        self._manifest = manifest
        self._private = {each.rank: each for each in manifest.shards if each.kind == PRIVATE}
        self._shared = shared(manifest)

    def of(self, ranks: range) -> Manifest:
        """The part for a node with these ranks."""
        world = self._manifest.world_size
        behind = (rank % world for rank in range(ranks.stop, ranks.start + world))
        wanted = (*ranks, *islice(filter(self._private.__contains__, behind), PEERS))
        private = tuple(self._private[rank] for rank in wanted if rank in self._private)
        return self._manifest._replace(shards=(*self._shared, *private))


def heads_of(manifest: Manifest) -> tuple[int, ...]:
    """Of each file that is not private how many bytes precede its tensors; none: they are few."""
    files = shared(manifest)
    heads = tuple(min(each.nbytes, head_size(int(each.file), each.at)) for each in files)
    return heads if sum(each.nbytes for each in files) - sum(heads) >= LARGE else ()


def shared(manifest: Manifest) -> list[Shard]:
    """The files that are not private, in the order in which they are sent."""
    return sorted(each for each in manifest.shards if each.kind != PRIVATE)


def spans_of(manifest: Manifest) -> list[Span]:
    """What its shards are in, in the order in which it is sent: what adjoins is one."""
    return _joined((int(each.file), each.at, each.nbytes) for each in manifest.shards)


def split(manifest: Manifest, heads: Sequence[int]) -> tuple[list[Span], list[Span]]:
    """All but the tensors of files that are not private, and these, file by file.

    ``heads``: as of the order.

    Raises:
        ValueError: heads of other files.
    """
    now = [(int(s.file), s.at, s.nbytes) for s in manifest.shards if s.kind == PRIVATE]
    later = []
    for shard, head in zip(shared(manifest), heads, strict=True):
        if not 0 <= head <= shard.nbytes:
            raise ValueError(f"the head of {shard} cannot have {head} bytes")
        now.append((int(shard.file), shard.at, head))
        later.append(Span(int(shard.file), shard.at + head, shard.nbytes - head))
    return _joined(now), later


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
