"""What rank 0 does for all ranks: waits for their files, completes the folder, deletes old ones.

Standard library only. The manifest is the last file, the rename after it completes the checkpoint,
and nothing is deleted before that is on the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from worker_hooks.checkpoint import incarnation, rank_writer
from worker_hooks.checkpoint.rank_comparison import remove_all_else
from worker_hooks.checkpoint.rank_writer import Advance, RankPart, describe_error
from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder, is_passing
from worker_hooks.contract.layout import CheckpointLayout
from worker_hooks.storage import commit, merged_file, retention
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import CHECKPOINT_KIND, COPY, REPLICATED, Manifest, Shard
from worker_hooks.storage.one_state import IncompleteStateError

LOOK_S = 0.02  # between two looks for other ranks' files: not every file system reports changes
SIGN_S = 0.5  # between two looks at the progress of other ranks
STALE_S = 3600.0  # an unfinished folder without a change for so long is abandoned


class WrittenParts(NamedTuple):
    """A complete checkpoint."""

    folder: str
    warnings: tuple[str, ...]  # about what failed besides


def finalize(order: SaveOrder, advance: Advance) -> WrittenParts:
    """Complete the checkpoint that all ranks write their parts of.

    ``order``: rank 0's. ``advance``: called on progress, and while other ranks are awaited.

    Raises:
        CheckpointError: it cannot be completed; what was written is removed.
    """
    try:
        parts = _await_parts(order, advance)
        folder, warnings = _complete(order, parts)
    except (OSError, CheckpointError, IncompleteStateError) as error:
        remove_all_else(order.layout.unfinished)
        if isinstance(error, CheckpointError):
            raise
        why = describe_error(error)
        raise CheckpointError(
            f"{order.final.folder} cannot be saved: {why}", is_passing=is_passing(error)
        ) from error
    if order.groups and order.is_merged:
        warnings += _merge(folder, advance)
    try:
        warnings += prune(order, folder, advance)
    except OSError as error:
        warnings.append(f"an old checkpoint cannot be deleted: {describe_error(error)}")
    return WrittenParts(str(folder), tuple(warnings))


def prune(order: SaveOrder, newest: Path, advance: Advance) -> Iterator[str]:
    """Delete old checkpoints if the new one is sound; yield a sentence for what prevents it.

    Raises:
        OSError: a checkpoint cannot be deleted.
    """
    directory, rules = order.layout.directory, order.rules
    retention.sweep(directory)
    for path in abandoned(order):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    present = retention.present(directory, order.prefix)
    found = retention.of_lineage(present, order.runs, order.resumed_step)  # others may be alive
    if any(one.is_disputed for path, one in found if path == newest):
        return
    going = retention.chosen(found, rules.keep_max, rules.per_minutes, (), order.runs, newest)
    if not going:
        return
    # if it would be the only one, its files' contents are verified; else their existence
    is_quick = len(found) - len(going) > 1
    damages = manifests.verify(newest, manifests.read(newest), advance, quick=is_quick)
    if damages:
        yield f"{newest} is damaged, so none is deleted: {damages[0]}"
        return
    for path in going:
        retention.remove(path)
        advance(0)


def abandoned(order: SaveOrder) -> list[Path]:
    """Unfinished folders of earlier incarnations of this training, and of runs long dead."""
    now = os.stat(order.final.folder).st_ctime  # by the file system's clock
    found = []
    for path in order.layout.directory.iterdir():
        owner = incarnation.owner_of(path, order.layout.prefix)
        if not owner or owner == order.layout.record_id:
            continue
        is_past = incarnation.is_past(owner, order.record_id, order.attempt)
        is_over = is_past or owner.rpartition("-")[0] in order.runs[1:]
        if is_over or now - max(_change_times(path), default=now) > STALE_S:
            found.append(path)
    return found


def _await_parts(order: SaveOrder, advance: Advance) -> dict[int, RankPart]:
    """What each rank has written.

    Raises:
        CheckpointError: a rank has failed, or no rank makes progress any more.
    """
    layout, stall_s = order.layout, order.rules.stall_s
    parts: dict[int, RankPart] = {}
    sizes: list[tuple[str, int, int]] = []
    heard, looked = time.monotonic(), 0.0
    while True:
        for rank in set(range(order.world_size)) - parts.keys():
            part = rank_writer.read_part(layout, rank)
            if part is not None:
                parts[rank] = part
        if len(parts) == order.world_size:
            break
        now = time.monotonic()
        if now - looked > SIGN_S:
            looked = now
            if (seen := _file_sizes(layout)) != sizes:
                sizes, heard = seen, now
        advance(0)
        if now - heard > stall_s:
            late = sorted(set(range(order.world_size)) - parts.keys())
            raise CheckpointError(
                f"{layout.folder} cannot be saved: rank {', '.join(map(str, late))} did not write "
                f"its part and gave no sign for {stall_s:g} s"
            )
        time.sleep(LOOK_S)
    steps = {rank: part.step for rank, part in parts.items() if part.step != order.step}
    if steps:
        raise CheckpointError(f"{layout.folder} cannot be saved: ranks are at other steps: {steps}")
    return parts


def _complete(order: SaveOrder, parts: dict[int, RankPart]) -> tuple[Path, list[str]]:
    """Complete the folder; return it, and a sentence for each thing that is wrong with it."""
    digests = {rank: part.digest for rank, part in parts.items() if part.digest}
    if order.groups:
        return _complete_groups(order, parts)
    (digest, count), *others = Counter(digests.values()).most_common()
    if others and 2 * count <= len(digests):
        return _complete_disputed(order, parts, digests)
    odd = sorted(rank for rank, each in digests.items() if each != digest)
    is_split = order.share is not None and order.share.parts > 1
    if is_split and odd:
        raise CheckpointError(
            f"{order.layout.folder} cannot be saved: rank {', '.join(map(str, odd))} differs from "
            "the others, so that their parts make up no model"
        )
    shards = [shard for rank in sorted(parts) for shard in parts[rank].shards]
    first = next((one for one in shards if one.kind == COPY and one.rank not in odd), None)
    shards = [
        one._replace(kind=REPLICATED) if one is first or (is_split and one.kind == COPY) else one
        for one in shards
        if one.kind != COPY or one.rank not in odd
    ]
    folder = _commit(order, _manifest(order, shards, digest)._replace(odd=tuple(odd)))
    return folder, [f"{folder}: rank {rank} differs from most replicas" for rank in odd]


def _complete_disputed(
    order: SaveOrder, parts: dict[int, RankPart], digests: dict[int, str]
) -> tuple[Path, list[str]]:
    """Keep what each side wrote: nobody knows which one is right, and nobody resumes from it."""
    sides: dict[str, list[int]] = {}
    for rank, digest in sorted(digests.items()):
        sides.setdefault(digest, []).append(rank)
    holders = tuple(map(tuple, sides.values()))
    if order.share is not None and order.share.parts > 1:
        said = " against ".join(f"rank {', '.join(map(str, ranks))}" for ranks in holders)
        raise CheckpointError(
            f"{order.layout.folder} cannot be saved: the ranks hold different states ({said}), so "
            "that their parts make up no model"
        )
    shards = []
    for rank in sorted(parts):
        side = next((at for at, ranks in enumerate(holders) if rank in ranks), 0)
        for one in parts[rank].shards:
            if one.kind != COPY:
                shards.append(one)
            elif all(other.kind != REPLICATED or other.variant != side for other in shards):
                shards.append(one._replace(kind=REPLICATED, variant=side))
    made = _manifest(order, shards, "")._replace(holders=holders, is_disputed=True)
    folder = _commit(order, made)
    return folder, [f"{folder} is no place to resume from: {manifests.describe_dispute(made)}"]


def _complete_groups(order: SaveOrder, parts: dict[int, RankPart]) -> tuple[Path, list[str]]:
    """Complete the folder in which each replica group wrote what it holds."""
    holders: list[tuple[int, ...]] = []
    shards: list[Shard] = []
    warnings = []
    for group in order.groups:
        sides: dict[str, list[int]] = {}
        for rank in group:  # the first one has written, and stands for those that have not
            digest = parts[rank].digest or parts[group[0]].digest
            sides.setdefault(digest, []).append(rank)
        if len(sides) > 1:
            said = " against ".join(f"rank {', '.join(map(str, one))}" for one in sides.values())
            if any(parts[rank].parts > 1 for rank in group):
                raise CheckpointError(
                    f"{order.layout.folder} cannot be saved: ranks that held the same state differ "
                    f"now ({said}), so that their parts make up none"
                )
            warnings.append(f"ranks that held the same state differ now: {said}")
        for ranks in sides.values():
            shards += _files_of(ranks, parts, len(holders))
            holders.append(tuple(ranks))
    made = _manifest(order, shards, "")._replace(holders=tuple(holders))
    return _commit(order, made), warnings


def _files_of(ranks: list[int], parts: dict[int, RankPart], variant: int) -> Iterator[Shard]:
    """The files of a replica group."""
    has_all = False
    for rank in ranks:
        for one in parts[rank].shards:
            if one.kind != COPY:
                yield one
                continue
            kind = COPY if has_all else REPLICATED
            has_all = parts[rank].parts == 1
            yield one._replace(kind=kind, variant=variant)


def _merge(folder: Path, advance: Advance) -> Iterator[str]:
    """Write what the groups hold together into one file; yield why there is none."""
    try:
        why = merged_file.add_to(folder, manifests.read(folder), advance)
    except (OSError, ValueError) as error:
        why = describe_error(error)
    if why:
        yield f"checkpoints have no merged file (integrated_save): {why}"


def _manifest(order: SaveOrder, shards: list[Shard], digest: str) -> Manifest:
    return Manifest(
        CHECKPOINT_KIND,
        step=order.step,
        epoch=order.epoch,
        batch=order.batch,
        world_size=order.world_size,
        attempt=order.attempt,
        record_id=order.record_id,
        reason=order.reason,
        shards=tuple(shards),
        digest=digest,
        lineage=order.runs[1:],
    ).completed()


def _commit(order: SaveOrder, made: Manifest) -> Path:
    place, shards = order.final.place, made.shards
    for shard in shards:
        _check_size(order.layout.unfinished, shard)
    if place.unfinished != order.layout.unfinished:
        commit.move(order.layout.unfinished, place.unfinished)
    try:
        return commit.commit(place, made, order.runs)
    except OSError:
        shutil.rmtree(place.unfinished, ignore_errors=True)
        raise


def _check_size(folder: Path, shard: Shard) -> None:
    nbytes = os.lstat(folder / shard.file).st_size
    if nbytes != shard.nbytes:
        raise CheckpointError(f"{folder / shard.file} has {nbytes} bytes instead of {shard.nbytes}")


def _file_sizes(layout: CheckpointLayout) -> list[tuple[str, int, int]]:
    """The files that are being written, with their sizes and times."""
    found = []
    for path in layout.unfinished.rglob("*"):
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_size, stat.st_mtime_ns))
    return sorted(found)


def _change_times(folder: Path) -> Iterator[float]:
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(OSError):
            yield path.lstat().st_ctime
