"""The manifest of a dump: the files in the folder and their checksums.

It is written last; nobody trusts a folder without one, or with one that does not fit its files.
Standard library only: the agent reads and writes it, too.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract.atomic_file import read_small, write_atomic
from worker_hooks.contract.layout import MANIFEST
from worker_hooks.storage.one_state import IncompleteStateError, check_complete
from worker_hooks.storage.safetensors_file import Header, read_header, sha256_of

FORMAT = 1
_LINEAGE = 100  # runs of a long chain that are kept
_THREADS = 8  # more do not make a disk faster
_MOST_SHOWN = 8  # ranks named in a sentence
_END_S = 1 << 40  # seconds since the epoch, later than any clock
_RANKS = ("odd", "without_private", "stale_private")
_NUMBERS = (*_RANKS, "absent")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_IN_MEMORY = re.compile(r"/proc/\d+/fd/\d+")


REPLICATED, PRIVATE = "replicated", "private"
COPY = "copy"  # a complete model beside the replicated one, which it can replace


class Shard(NamedTuple):
    """One file. ``file`` is relative to the folder; ``kind`` is replicated, private or copy.

    ``sha256`` is the checksum of :mod:`worker_hooks.storage.checksum`.
    """

    file: str
    rank: int
    kind: str
    nbytes: int
    sha256: str
    variant: int = 0  # of the replicated state, if there are several: see Manifest.holders
    at: int = 0  # where it begins in the file: in memory all private ones are in one
    is_early: bool = False  # in memory: a private one as of its rank's backward, before its commit


class Manifest(NamedTuple):
    """One checkpoint. Steps and epochs as the script counts; times are seconds since the epoch."""

    kind: str  # DUMP_KIND, CHECKPOINT_KIND or MEMORY_KIND
    step: int
    epoch: int
    batch: int
    world_size: int
    attempt: int
    record_id: str
    reason: str
    saved_at: float = 0.0
    shards: tuple[Shard, ...] = ()
    digest: str = ""  # in memory, of replica groups: one for each variant, joined by ","
    odd: tuple[int, ...] = ()
    without_private: tuple[int, ...] = ()  # ranks whose private state is lost
    stale_private: tuple[int, ...] = ()  # ranks whose private state is of an earlier step
    holders: tuple[tuple[int, ...], ...] = ()  # by variant the ranks whose state it is; none: all
    is_disputed: bool = False  # replicas disagreed without a majority: which one is right?
    lineage: tuple[str, ...] = ()  # record ids of the runs that the run resumed, newest first
    absent: tuple[int, ...] = ()  # in memory: variants whose tensors are on other nodes
    heads: tuple[Shard, ...] = ()  # in memory: files whose headers count in place of the shards'
    format: int = FORMAT

    def completed(self, ranks: Iterable[int] | None = None) -> Manifest:
        """The same of a checkpoint that is completed now.

        ``ranks`` are those whose private state belongs to it, all by default: one without a private
        file among the shards has lost its private state.
        """
        private = {shard.rank for shard in self.shards if shard.kind == PRIVATE}
        ranks = range(self.world_size) if ranks is None else ranks
        lost = tuple(rank for rank in ranks if rank not in private)
        return self._replace(saved_at=time.time(), without_private=lost)


DUMP_KIND = "dump"
CHECKPOINT_KIND = "checkpoint"  # a periodic one
MEMORY_KIND = "memory"  # in no folder: each shard is an open file of the agent, by its number


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into the folder, durably.

    Raises:
        OSError: it cannot be written; there is none then, or the previous one.
    """
    write_atomic(folder / MANIFEST, encode(manifest))


def encode(manifest: Manifest, *, is_for_people: bool = True) -> bytes:
    """The content of the manifest's file.

    json's quick encoder does not indent: of thousands of ranks it takes a tenth of the time.
    """
    fields = manifest._asdict()
    for name in ("absent", "heads"):
        if not fields[name]:
            del fields[name]  # as of all that is on a disk
    for name in ("shards", "heads") if manifest.heads else ("shards",):
        fields[name] = list(map(_fields, sorted(fields[name])))
    indent = 1 if is_for_people else None
    return (json.dumps(fields, indent=indent, sort_keys=True) + "\n").encode()


_sorted = json.JSONEncoder(sort_keys=True).encode


class QuickEncoder:
    """As :func:`encode` not for people, of manifests that differ in their shards alone."""

    def __init__(self, manifest: Manifest) -> None:
        """``manifest``: any of them."""
        text = encode(manifest._replace(shards=()), is_for_people=False).decode()
        # in a string of JSON there is no such quotation mark
        self._before, _, self._behind = text.partition('"shards": []')
        self._known: dict[Shard, str] = {}

    def __call__(self, shards: Iterable[Shard]) -> str:
        """The text with these shards."""
        known = self._known
        texts = []
        for shard in sorted(shards):
            if (text := known.get(shard)) is None:
                text = known[shard] = _sorted(_fields(shard))
            texts.append(text)
        return f'{self._before}"shards": [{", ".join(texts)}]{self._behind}'


def _fields(shard: Shard) -> dict[str, Any]:
    """A shard as JSON; on a disk each has a file of its own."""
    fields = shard._asdict()
    for name in ("at", "is_early"):
        if not fields[name]:
            del fields[name]
    return fields


def is_in_memory(path: Path) -> bool:
    """Whether this is the manifest of a checkpoint in the agent's memory, ``/proc/<pid>/fd/<n>``.

    Its shards' files are named by their own descriptors, beside it.
    """
    return _IN_MEMORY.fullmatch(str(path)) is not None


def read(place: Path) -> Manifest:
    """The manifest of a checkpoint; whether the files fit it is not checked.

    ``place``: the folder; of a checkpoint in memory the manifest itself.

    Raises:
        ValueError: there is none, or it is not one of ours; the message says which.
    """
    try:
        text = read_small(place if is_in_memory(place) else place / MANIFEST)
    except FileNotFoundError:
        raise ValueError(f"it has no {MANIFEST}: not saved by msrun, or never completed") from None
    except OSError as error:
        raise ValueError(f"its {MANIFEST} cannot be read ({error.strerror})") from None
    return decode(text)


def decode(text: str | bytes) -> Manifest:
    """The manifest that :func:`encode` wrote.

    Raises:
        ValueError: it is none of ours.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"its {MANIFEST} is damaged: it is not JSON") from None
    if not isinstance(fields, dict) or not _is_number(fields.get("format")):
        raise ValueError(f"its {MANIFEST} was not written by msrun")
    if fields["format"] > FORMAT:
        raise ValueError(
            f"its {MANIFEST} has format {fields['format']}, known are those up to {FORMAT}: "
            "update msrun"
        )
    try:
        manifest = _built(fields)
    except (TypeError, KeyError):
        raise ValueError(f"its {MANIFEST} is damaged: it lacks fields, or has unknown") from None
    if (manifest.absent or manifest.heads) and manifest.kind != MEMORY_KIND:
        raise ValueError(f"its {MANIFEST} is damaged: it is partial, which none on a disk is")
    odd = _odd_field(manifest)
    if odd:
        raise ValueError(f"its {MANIFEST} is damaged: {odd} cannot be")
    return manifest


def _built(fields: dict[str, Any]) -> Manifest:
    shards, heads = (
        tuple(Shard(**shard) for shard in found)
        for found in (fields["shards"], fields.get("heads", ()))
    )
    ranks = {name: tuple(fields[name]) for name in _RANKS}
    absent = tuple(fields.get("absent", ()))
    holders = tuple(map(tuple, fields.get("holders", ())))
    told = {"shards": shards, "heads": heads, "holders": holders, "absent": absent}
    built = Manifest(**{**fields, **told, **ranks})
    return built._replace(lineage=tuple(built.lineage))


def _odd_field(manifest: Manifest) -> str | None:
    """The first field with an impossible value."""
    for name in ("step", "epoch", "batch", "attempt"):
        value = getattr(manifest, name)
        if not _is_number(value):
            return f"{name}={value!r}"
    if not (_is_number(manifest.world_size) and manifest.world_size):
        return f"world_size={manifest.world_size!r}"
    at = manifest.saved_at
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < _END_S:
        return f"saved_at={at!r}"
    for name in ("kind", "record_id", "reason", "digest", "lineage"):
        value = getattr(manifest, name)
        if not all(isinstance(text, str) for text in (value if name == "lineage" else (value,))):
            return f"{name}={value!r}"
    for name in _NUMBERS:
        if not all(_is_number(one) for one in getattr(manifest, name)):
            return f"{name}={getattr(manifest, name)!r}"
    if not all(_is_number(rank) for ranks in manifest.holders for rank in ranks):
        return f"holders={manifest.holders!r}"
    is_quick = manifest.kind == MEMORY_KIND
    files = (*manifest.shards, *manifest.heads)
    return next((repr(one) for one in files if not _is_sound(one, is_quick)), None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_sound(shard: Shard, is_quick: bool) -> bool:
    numbers = (shard.rank, shard.nbytes, shard.variant, shard.at)
    texts = (shard.file, shard.kind, shard.sha256)
    return (
        all(_is_number(number) for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and isinstance(shard.is_early, bool)
        and bool(shard.file)
        and shard.file.isprintable()
        and (_SHA256.fullmatch(shard.sha256) is not None or (is_quick and not shard.sha256))
    )


def verify(
    folder: Path,
    manifest: Manifest,
    advance: Callable[[int], None] | None = None,
    quick: bool = False,
) -> list[str]:
    """What is wrong with the folder's files; empty if they are what the manifest says.

    Args:
        advance: called with the number of bytes read, by several threads.
        quick: check existence and sizes only.
    """
    flaws = list(_damages(folder, manifest, advance, quick).values())
    return flaws if quick or flaws else _holes(folder, manifest)


def _damages(
    folder: Path,
    manifest: Manifest,
    advance: Callable[[int], None] | None = None,
    quick: bool = False,
) -> dict[str, str]:
    """What is wrong with each damaged file; without a name: with the list of them."""
    if not manifest.shards:
        return {"": "its manifest names no file"}
    files = [shard.file for shard in manifest.shards]
    if len({os.path.normpath(file) for file in files}) < len(files):
        return {"": "its manifest names a file twice"}
    damages = {shard.file: _misplaced(folder, shard) for shard in manifest.shards}
    if not quick:
        from concurrent.futures import ThreadPoolExecutor  # hashing releases the GIL

        whole = [shard for shard in manifest.shards if damages[shard.file] is None]
        whole.sort(key=lambda shard: -shard.nbytes)
        threads = max(1, min(_THREADS, len(whole), os.cpu_count() or 1))
        with ThreadPoolExecutor(threads, "msrun-verify") as pool:
            found = pool.map(lambda shard: _altered(folder, shard, manifest, advance), whole)
            damages.update({shard.file: one for shard, one in zip(whole, found, strict=True)})
        for shard in whole:
            damages[shard.file] = damages[shard.file] or _of_other_step(folder, shard, manifest)
    return {file: damage for file, damage in damages.items() if damage is not None}


def _misplaced(folder: Path, shard: Shard) -> str | None:
    """Why the shard is not a file of the right size in the folder."""
    root = os.path.realpath(folder)
    real = os.path.realpath(os.path.join(root, shard.file))
    if os.path.isabs(shard.file) or not real.startswith(root + os.sep):
        return f"{shard.file} is outside the folder"
    try:
        found = os.stat(real)
    except FileNotFoundError:
        return f"{shard.file} is missing"
    except OSError as error:
        return f"{shard.file} cannot be read ({error.strerror})"
    if not stat.S_ISREG(found.st_mode):
        return f"{shard.file} is not a file"
    if found.st_size != shard.nbytes:
        return f"{shard.file} has {found.st_size} bytes instead of {shard.nbytes}"
    return None


def _altered(
    folder: Path, shard: Shard, manifest: Manifest, advance: Callable[[int], None] | None
) -> str | None:
    """Why the bytes are not those that were written."""
    try:
        digest = sha256_of(folder / shard.file, advance or (lambda _nbytes: None))
    except OSError as error:
        return f"{shard.file} cannot be read ({error.strerror})"
    if digest == shard.sha256:
        return None
    other = next((one.file for one in manifest.shards if one.sha256 == digest), None)
    if other is not None:
        return f"{shard.file} is a copy of {other}, which never had the same content"
    return f"{shard.file} was altered (its checksum differs)"


def _of_other_step(folder: Path, shard: Shard, manifest: Manifest) -> str | None:
    """Why a private state does not belong to the manifest, which somebody may have edited."""
    if shard.kind != PRIVATE or shard.rank in manifest.stale_private:
        return None
    try:
        step = read_header(folder / shard.file).metadata.get("step", "")
    except (OSError, ValueError):  # its bytes are as they were written: of another version
        return None
    if step in {"", str(manifest.step)}:
        return None
    return f"{shard.file} is of step {step}, but its {MANIFEST} says {manifest.step}"


def _holes(folder: Path, manifest: Manifest) -> list[str]:
    """What the state lacks, although each file is as it was written: a name was taken out here."""
    try:
        check_whole(folder, manifest)
    except OSError as error:
        return [f"{error.filename} cannot be read ({error.strerror})"]
    except IncompleteStateError as error:
        return [f"it does not hold a whole state: {error}"]
    return []


def check_whole(folder: Path, manifest: Manifest) -> None:
    """Prove by the headers that the files hold every part of every tensor.

    What the replicas disagreed about is not checked: nobody resumes from it.

    Raises:
        OSError: a file cannot be read.
        IncompleteStateError: they do not; the message says what is missing.
    """
    if manifest.is_disputed:
        return
    try:
        groups = files_by_group(folder, manifest)
    except ValueError as error:
        if manifest.holders:
            raise IncompleteStateError(str(error)) from None
        return  # one file has all, and is as it was written: of another version
    check_complete(groups, manifest.holders)


def files_by_group(folder: Path, manifest: Manifest) -> list[list[tuple[Path, Header]]]:
    """The files of the state with their headers, for each of the holders; by default for one.

    Raises:
        OSError: one cannot be read.
        ValueError: one is no safetensors file.
    """
    found: list[list[tuple[Path, Header]]] = [[] for _ in manifest.holders or [()]]
    for shard in manifest.shards:
        if shard.kind == REPLICATED and shard.variant < len(found):
            path = folder / shard.file
            found[shard.variant].append((path, read_header(path)))
    return found


def past(found: Manifest, known: Iterable[str] = (), own: str = "") -> tuple[str, ...]:
    """The runs whose training a run continues that resumes from this checkpoint, newest first.

    ``own``: the run's own record id: it resumes from this checkpoint again.
    """
    runs = dict.fromkeys((found.record_id, *found.lineage, *known))
    return tuple(run for run in runs if run not in {"", own})[:_LINEAGE]


def sound_model(folder: Path, manifest: Manifest) -> Manifest | None:
    """The manifest of a whole model without its copies; ``None``: too much is damaged.

    Where replica groups hold different states, any one undamaged file of each group is enough.
    """
    copies = [shard for shard in manifest.shards if shard.kind == COPY]
    first = manifest._replace(shards=tuple(one for one in manifest.shards if one.kind != COPY))
    damages = _damages(folder, first)
    shards = list(first.shards)
    damaged = [one for one in shards if one.file in damages]
    if len(damaged) < len(damages) or any(one.kind != REPLICATED for one in damaged):
        return None
    for variant in sorted({shard.variant for shard in damaged}):
        of_group = (one for one in copies if one.variant == variant)
        sound = (one for one in of_group if not _damages(folder, manifest._replace(shards=(one,))))
        if (copy := next(sound, None)) is None:
            return None
        shards = [one for one in shards if (one.kind, one.variant) != (REPLICATED, variant)]
        shards.append(copy._replace(kind=REPLICATED))
    made = manifest._replace(shards=tuple(shards))
    return None if _holes(folder, made) else made


def variants_of(manifest: Manifest, rank: int, world_size: int) -> tuple[int, ...]:
    """Which variants of the state a rank resumes from: together they have all that it holds.

    Raises:
        ValueError: none is this rank's; the message says why.
    """
    if manifest.is_disputed:
        raise ValueError(describe_dispute(manifest))
    if not manifest.holders:
        return (0,)
    if manifest.world_size != world_size:
        raise ValueError(
            f"each of {manifest.world_size} ranks saved its own part of the state: {world_size} "
            "ranks cannot resume from it"
        )
    found = tuple(at for at, ranks in enumerate(manifest.holders) if rank in ranks)
    if not found:
        raise ValueError(f"it does not hold the part of rank {rank}")
    return found


def describe_dispute(manifest: Manifest) -> str:
    """Who held what, when replicas disagreed without a majority."""
    files = {shard.variant: shard.file for shard in manifest.shards if shard.kind == REPLICATED}
    sides = (
        f"{files.get(at, 'a lost file')} of rank {', '.join(map(str, ranks))}"
        for at, ranks in enumerate(manifest.holders)
    )
    return f"the replicas disagreed without a majority: {' against '.join(sides)}"


def describe_private(manifest: Manifest) -> list[str]:
    """Whose private state a checkpoint lacks, or has as of an earlier step: a sentence each."""
    sentences = []
    for ranks, what in (
        (manifest.without_private, "were not saved, and begin anew"),
        (manifest.stale_private, f"are of a step before {manifest.step}"),
    ):
        if ranks:
            more = ", ..." if len(ranks) > _MOST_SHOWN else ""
            which = ", ".join(map(str, ranks[:_MOST_SHOWN])) + more
            many = "s" if len(ranks) > 1 else ""
            whose = f"the random numbers, buffers and data position of rank{many} {which}"
            sentences.append(f"{whose} {what}")
    return sentences
