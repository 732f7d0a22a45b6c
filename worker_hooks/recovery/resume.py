"""Resumes from a checkpoint: replicated state at once, private state when the data is opened.

A rank's randomness and buffers are restored only before the first batch, because what the script
does before that (it wraps its model, it makes its loaders) draws random numbers and broadcasts.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from worker_hooks.changes.observer import Audited
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.script_record import BUFFERS, SCRIPT
from worker_hooks.data.feed import Batches, Feed
from worker_hooks.recovery import load
from worker_hooks.rng.randomness import Randomness, derive
from worker_hooks.script.own import ResizedBuffers
from worker_hooks.script.values import Script
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.state.private import EPOCH, placed
from worker_hooks.state.registry import Piece
from worker_hooks.state.snapshot import version
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.commit import EARLY_BUFFERS
from worker_hooks.storage.find import search
from worker_hooks.storage.manifest import Manifest
from worker_hooks.tensors.shard import digest_like
from worker_hooks.tensors.tensor_bytes import to_bytes

log = logging.getLogger("msrun")

NOT_AGAIN = (
    ": what it changed of these after TrainState() it has to change again before the loop that it "
    "continues"
)
UNSAVED = (
    "buffers that changed their size, or are no plain tensors, are not saved as of step {}: {}; "
    "resume from an older checkpoint, or say state.ignore(...) of them"
)
PEERS = 8  # other ranks whose private state is read where the rank's own is not enough


class LoadedPrivate(NamedTuple):
    """The private state of a rank when the checkpoint was made."""

    step: int
    batch: int
    is_commit: bool  # else as of the last backward of the step
    meta: dict[str, Any]
    tensors: dict[str, Tensor]
    has_early_buffers: bool = False  # those on a device are as of that backward

    @property
    def loop(self) -> int:
        """Which of an epoch's loops the rank was in."""
        return int(self.meta.get("loop", 0))

    @property
    def is_over(self) -> bool:
        """Whether that loop was over."""
        return bool(self.meta.get("is_over", False))

    def contents(self) -> dict[str, bytes]:
        """The tensors' bytes by name, which are states of random number generators."""
        contents = {name: bytes(to_bytes(tensor)) for name, tensor in self.tensors.items()}
        return placed(contents, int(self.meta.get("place", 0)))


class SavedVariables(NamedTuple):
    """The variables of the script's frames in a checkpoint."""

    frames: Sequence[Any] = ()  # the loop's and those around it: name, changed and other variables
    before: Mapping[str, Sequence[Any]] = {}  # as of the ends of earlier loops of the epoch
    of_peers: Sequence[str] = ()  # a peer's, because this rank died within the step
    lacking: Sequence[str] = ()  # lack, for that reason, what the step did to them last
    is_behind: bool = False  # as of the step before, because no rank came to its commit


class ResumePoint(NamedTuple):
    """Where training continues, and what is known of the state there."""

    step: int
    epoch: int
    batch: int  # batches that each rank had consumed in the loop
    ranks: tuple[int, int]  # their count then, and now
    loop: int  # of batches() within the epoch
    is_over: bool  # all of the loop was trained
    feed: Mapping[str, Any]  # :meth:`Feed.meta`
    variables: SavedVariables
    private: LoadedPrivate | None
    is_own: bool  # the private state is this rank's
    typical_changes: tuple[Any, ...] | None
    late_buffers: frozenset[str]
    changing: frozenset[str]  # tensors that are not as of a commit until the next update
    audited: Audited | None  # by a rank that lives
    ready_orders: Sequence[list[int] | None]
    saved: load.LoadedState
    folder: Path | None  # where it is, or will be; None: in memory only, as others live on
    quick_digest: str  # of the replicated state if it is in memory, else empty
    fingerprints: tuple[Any, ...]  # of the pieces, after the state had been restored
    deferred: frozenset[str] = frozenset()  # pieces that lack something until the loop
    peer: LoadedPrivate | None = None  # of a rank that had committed, if this one had not

    @property
    def loss(self) -> str:
        """The last loss of this rank, or of the rank whose private state it has; empty: none."""
        return "" if self.private is None else str(self.private.meta.get("loss", ""))

    @property
    def is_in_memory(self) -> bool:
        """Whether the checkpoint was read in memory."""
        return bool(self.quick_digest)


def newest_checkpoint(*places: str) -> Path | None:
    """The newest verified checkpoint in some folders; the log names damaged ones."""
    found = search(Path(place) for place in places if place)
    for remark in found.remarks:
        log.warning("%s", remark)
    return None if found.newest is None else found.newest.path


def _cannot_bring(_inode: int, _variants: Collection[int]) -> Collection[int]:
    raise OSError("the state is on another node, and nobody is there to be asked for it")


def restore_replicated(
    pieces: Sequence[Piece],
    folder: Path,
    env: RankEnv,
    live: tuple[int, str] | None = None,
    *,
    bring: load.Bring = _cannot_bring,
    is_new: bool = False,
    saved_in: str = "",
) -> ResumePoint:
    """Restore the replicated state of a verified checkpoint.

    Args:
        folder: the checkpoint's; if it is in memory, the file of its manifest.
        live: the step that the registered tensors are whole as of, and their digest; if the
            checkpoint has the same, they are not read.
        bring: fetches the tensors of a checkpoint in memory, given an inode of it, if this node
            lacks them: they are not read of what is live.
        saved_in: the folder to which a checkpoint in memory is being written, as all ranks restart.
        is_new: the script has only begun. What it had changed later, a group added to an optimizer
            or a layer to a model, it may change again before its loop.

    Raises:
        OSError: a file cannot be read.
        ValueError: the checkpoint does not fit what was registered.
    """
    manifest = manifests.read(folder)
    is_in_memory = manifests.is_in_memory(folder)
    if is_in_memory:
        saved = load.open_in_memory(folder.parent, manifest, env.rank, bring)
    else:
        variants = load.variants_for(folder, manifest, env.rank, env.world_size)
        saved = load.open_dump(folder, _without_damaged_models(folder, manifest), variants)
    manifest = saved.manifest
    _forget_gradients(pieces)
    facts = json.loads(saved.metadata["facts"])
    deferred = load.restore(
        pieces,
        saved,
        is_live=live == (manifest.step, saved.digest),
        may_follow=facts.get("reshaped", ()) if is_new else (),
    )
    own = _private(saved, env.rank)
    late_buffers = frozenset(facts.get("late", ()))
    if own is not None and own.has_early_buffers:
        on_device = late_buffers.intersection(facts.get("late_on_device", late_buffers))
        own.tensors.update((name, saved.tensors[name]) for name in on_device & saved.tensors.keys())
    was, step = manifest.world_size, manifest.step
    if env.rank < was and own is None:
        log.warning("rank %d: its randomness was not saved and begins anew", env.rank)
    is_sure = own is not None and own.is_commit and own.step == step
    peers = [] if is_sure else list(islice(_peers(saved, env.rank, was), PEERS))
    known = [one for one in (own, *peers) if one is not None and one.step == step]
    nearest = next(iter(known or peers), own)
    batch = manifest.batch if nearest is None else nearest.batch
    meta = {} if nearest is None else nearest.meta
    loop = int(meta.get("loop", facts.get("loop", 0)))
    typical_changes, audited = facts.get("usual"), facts.get("audited")
    return ResumePoint(
        step=step,
        epoch=manifest.epoch,
        batch=batch,
        ranks=(was, env.world_size),
        loop=loop,
        # a rank that died before its commit did not know yet that its loop ended there
        is_over=any(one.is_over for one in known if one.is_commit and one.loop == loop),
        feed=meta.get("feed", {}),
        variables=_variables(own, known, nearest),
        private=own or nearest,
        is_own=own is not None,
        typical_changes=None if typical_changes is None else tuple(typical_changes),
        late_buffers=late_buffers,
        changing=frozenset(facts.get("changing", ())),
        # a script that is started anew may be another
        audited=Audited(*audited) if is_in_memory and audited and not saved_in else None,
        ready_orders=facts.get("ready_orders", ()),
        saved=saved,
        folder=Path(saved_in) if saved_in else None if is_in_memory else Path(saved.folder),
        quick_digest=saved.digest if manifest.kind == manifests.MEMORY_KIND else "",
        fingerprints=tuple(map(_fingerprint, pieces)),
        deferred=deferred,
        peer=next((one for one in peers if one.step == step and _is_settled(one)), None),
    )


def _variables(
    own: LoadedPrivate | None, known: Sequence[LoadedPrivate], nearest: LoadedPrivate | None
) -> SavedVariables:
    """The rank's own as of the step, or those of a peer that came to its commit."""
    there = next((one for one in known if one.is_commit or one.meta.get("is_settled")), None)
    source = there or nearest
    if source is None:
        return SavedVariables()
    frames, before = source.meta.get("frames", ()), source.meta.get("before", {})
    of_peers = source.meta.get("of_peers", ())
    if own is not None and source is not own:
        of_peers = [name for _, changed, _ in frames for name in changed]
    lacking = source.meta.get("lacking", ())
    return SavedVariables(frames, before, of_peers, lacking, is_behind=there is None)


def _without_damaged_models(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest with a whole model, if there are copies that can replace a damaged one."""
    if all(shard.kind != manifests.COPY for shard in manifest.shards):
        return manifest
    return manifests.sound_model(folder, manifest) or manifest


def _forget_gradients(pieces: Sequence[Piece]) -> None:
    """Drop gradients, as in a new process; restoring an optimizer sets those that it had."""
    for piece in pieces:
        for tensor in piece.tensors().values():
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = None


def _peers(saved: load.LoadedState, rank: int, world_size: int) -> Iterator[LoadedPrivate]:
    """The private states of other ranks, the next rank first, up to one as of its commit."""
    for shift in range(world_size):
        other = (rank + shift) % world_size
        one = None if other == rank else _private(saved, other)
        if one is not None:
            yield one
            if one.is_commit and one.step == saved.manifest.step:
                return


def begin_epoch(point: ResumePoint) -> None:
    """Let the script draw before its loop the same numbers as when the epoch began."""
    contents = point.private.contents() if point.private is not None and point.is_own else {}
    began = {name: each for name, each in contents.items() if name.startswith(EPOCH)}
    Randomness().restore({name.removeprefix(EPOCH): each for name, each in began.items()})


def open_data(
    point: ResumePoint | None, feed: Feed, epoch: int | None, committed: CommittedState, rank: int
) -> Batches:
    """Open a loop's data; at a resume point, restore the state that precedes the next batch.

    Args:
        point: where training continues; ``None``: the loop begins.
        epoch: as the script counts; ``None``: the script itself tells its samplers.
        rank: the number of this rank.

    Raises:
        OSError: a file of the checkpoint cannot be read any more.
    """
    if point is None:
        feed.begin(epoch)
        return feed.open()
    batches = feed.open_again((point.epoch, point.loop), point.batch)
    if batches is not None:
        feed.restore_script(_own_bytes(point, rank))
    else:
        feed.restore_set(point.feed, is_open=False)
        feed.begin(epoch)
        batches = feed.open(_consumed(point, feed, rank), point.feed, _own_bytes(point, rank))
        feed.restore_set(point.feed, is_open=True)
    restore_for_loop(point, committed, rank)
    feed.restore_others(point.feed.get("begun", ()))
    return batches


def restore_for_loop(point: ResumePoint, committed: CommittedState, rank: int) -> None:
    """Restore private state, and again what the script has changed of the rest before its loop.

    After a resume the code before the loop runs a second time: a step of a schedule, for example.

    Raises:
        OSError: a file of the checkpoint cannot be read any more.
        RuntimeError: the state that was restored from memory is not the one that was compared.
        ValueError: the script has not changed its objects again as it had before.
    """
    # tensors that were not read, as survivors agreed on them, may have changed unnoticed
    is_same = tuple(map(_fingerprint, committed.pieces)) == point.fingerprints
    if point.is_in_memory or point.deferred or not is_same:
        # a broadcast of equal weights, as by DDP, changes nothing but their versions
        is_unchanged = _is_unchanged(point, committed)
        changed = [piece for piece in committed.pieces if not (is_unchanged and piece.is_compared)]
        try:
            load.restore(changed, point.saved, is_all=not is_unchanged)
        except ValueError as error:
            raise ValueError(f"{error}{NOT_AGAIN * bool(point.deferred)}") from error
        if point.is_in_memory and not is_unchanged and not _is_unchanged(point, committed):
            raise RuntimeError(f"the state of step {point.step} has changed since it was restored")
    private = point.private
    if private is None:
        return
    committed.buffers.unfinished = ()
    committed.buffers.restore(_buffers_of(private))
    restore_script(point, committed, is_last=True, has_objects=True)
    values = _script(private).record.values
    kept = {ResizedBuffers.name_of(each) for each in values if each.startswith(BUFFERS)}
    lacking = committed.buffers.needed({*private.meta.get("unsaved", ())} - kept)
    lacking = [name for name in lacking if not committed.private.script.is_ignored(name)]
    if lacking:
        raise ValueError(UNSAVED.format(point.step, ", ".join(lacking)))
    missed = Randomness().restore(_own_bytes(point, rank))
    if missed:
        log.warning("randomness that was not saved begins anew: %s", ", ".join(missed))


def restore_own_loop(point: ResumePoint, feed: Feed, committed: CommittedState, rank: int) -> None:
    """As :func:`restore_for_loop`, for a loop of the script's own, which reads no loader.

    ``feed``: stands for the loader; it has the script's own generators.

    Raises:
        OSError, RuntimeError: as :func:`restore_for_loop`.
    """
    restore_for_loop(point, committed, rank)
    feed.restore_script(_own_bytes(point, rank))
    feed.restore_others(point.feed.get("begun", ()))


def restore_script(
    point: ResumePoint,
    committed: CommittedState,
    *,
    is_last: bool = False,
    has_objects: bool = False,
) -> None:
    """Restore the values that the script keeps for itself.

    This is done when training begins, because the script uses them before its loop, and again when
    the loop is there, because the script has assigned some anew. Registered objects are restored
    where the replicated state is, which has them as its writer had them: with another number of
    ranks they stay so.
    """
    if point.private is not None:
        if not is_last:  # what the script wraps before its loop may be compared between the ranks
            committed.buffers.unfinished = tuple(f"{each}." for each in point.deferred)
            committed.buffers.restore(_buffers_of(point.private), are_all=False)
        peer = None if point.peer is None or _is_settled(point.private) else _script(point.peer)
        script = _script(point.private)
        kept = committed.private.script
        is_mine = point.is_own and point.ranks[0] == point.ranks[1]
        kept.restore(
            *(script, peer),
            is_own=point.is_own,
            is_last=is_last,
            has_objects=has_objects and is_mine,
        )


def _buffers_of(private: LoadedPrivate) -> dict[str, Tensor]:
    """What the page had of buffers, without those whose size had changed after it was made."""
    unsaved = private.meta.get("unsaved", ())
    return {name: each for name, each in private.tensors.items() if name not in unsaved}


def _is_settled(private: LoadedPrivate) -> bool:
    """Whether the script's values are those of a commit."""
    return private.is_commit or _script(private).record.is_settled


def _script(private: LoadedPrivate) -> Script:
    octets = private.tensors.get(SCRIPT)
    return Script.split(b"" if octets is None else bytes(to_bytes(octets)))


def _is_unchanged(point: ResumePoint, committed: CommittedState) -> bool:
    """Whether the replicated state is known to be that of the checkpoint, bit for bit."""
    if not point.is_in_memory:
        return False
    present, saved = committed.present(), point.saved
    return all(
        digest_like(digest, present.only(names)) == digest
        for digest, names in zip(saved.digests, saved.names, strict=True)
    )


def _consumed(point: ResumePoint, feed: Feed, rank: int) -> int:
    """How many batches of each present rank make up what all ranks had consumed of the loop."""
    was, now = point.ranks
    size = int(point.feed.get("batch_size", 1)) * was, feed.batch_size * now
    if was == now:
        return point.batch
    batch, rest = divmod(point.batch * size[0], size[1])
    if rest and rank == 0:
        log.warning("%d ranks instead of %d: some samples are trained twice", now, was)
    return batch


def _own_bytes(point: ResumePoint, rank: int) -> dict[str, bytes]:
    if point.private is None:
        return {}
    contents = point.private.contents()
    return contents if point.is_own else contents | derive(contents, rank)


def _fingerprint(piece: Piece) -> tuple[Any, ...]:
    """A value that differs if the piece was changed."""
    value, small = piece.encode(piece.snapshot())
    contents = {name: bytes(to_bytes(tensor)) for name, tensor in small.items()}
    # marks leave out most weights and all tensors of an optimizer
    versions = list(map(version, piece.tensors().values()))
    return piece.marks(), versions, json.dumps(value), contents


def _private(saved: load.LoadedState, rank: int) -> LoadedPrivate | None:
    found = saved.private(rank)
    if found is None:
        return None
    record, tensors = found
    step, batch = int(record["step"]), int(record["batch"])
    is_commit, is_early = bool(record["is_commit"]), EARLY_BUFFERS in record
    return LoadedPrivate(step, batch, is_commit, record["meta"], tensors, is_early)
