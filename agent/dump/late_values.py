"""What the script of a rank keeps, if the rank died before a commit that its peers reached.

The page of such a rank has its values as its last backward began, and its loop's variables as of
the commit before. Its peers tell the rest: if all of them had what it had, and have the same now,
then so would it; if none of them changed a value in the step, then neither would it. Otherwise
nobody knows the value. If it is only printed, a peer's does; else the step cannot be continued bit
for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agent.dump.target import UnknownStateError
from worker_hooks.contract import script_record
from worker_hooks.contract.script_record import SCRIPT, ScriptRecord
from worker_hooks.contract.status_page import CommitRecord, Entry

_MISSING = object()


class _Frame(NamedTuple):
    """The variables of one function around the loop, as JSON by name."""

    name: str
    changed: Mapping[str, Any]  # since training began
    others: Mapping[str, Any]
    steering: frozenset[str]  # training depends on them

    def get(self, name: str) -> Any:
        """The value of a variable, comparable bit by bit; ``None``: it is not there."""
        found = self.changed.get(name, self.others.get(name, _MISSING))
        return None if found is _MISSING else json.dumps(found)


class _Rank(NamedTuple):
    """What one rank's record says."""

    meta: Mapping[str, Any]
    frames: Sequence[_Frame]
    script: ScriptRecord
    is_commit: bool

    @property
    def has_variables(self) -> bool:
        """Whether its loop's variables are those of the step's end."""
        return self.is_commit or bool(self.meta.get("is_settled"))

    @property
    def has_values(self) -> bool:
        """Whether its globals and objects are those of the step's end."""
        return self.is_commit or self.script.is_settled


def completed(
    records: Mapping[int, CommitRecord],
    before: Callable[[int], CommitRecord | None],
    entries: Mapping[int, Sequence[Entry]],
    step: int,
) -> dict[int, CommitRecord]:
    """The records with the variables of all ranks as of the commit of ``step``.

    Args:
        records: by rank; that of a rank that died before the commit is not one of a commit.
        before: returns a rank's record of the commit before, if there is one.
        entries: by rank: what the payload of its record holds.
        step: those of another step stay as they are.

    Raises:
        UnknownStateError: some rank's cannot be known, and training depends on them.
    """
    found = dict(records)
    present = {rank: one for rank, one in records.items() if one.step == step}
    if all(one.is_commit for one in present.values()):
        return found
    ranks = {rank: _read(one, entries[rank]) for rank, one in present.items()}
    peers = [rank for rank, one in ranks.items() if one.has_variables]
    olds = [_read(before(rank)).frames for rank in peers]
    news = [ranks[rank].frames for rank in peers]
    scripts = [one.script for one in ranks.values() if one.has_values]
    for rank, mine in ranks.items():
        if scripts and not mine.has_values:
            _refuse_unknown(rank, step, mine.script, scripts)
        if peers and mine.frames and not mine.has_variables:
            frames, of_peers = list[Any](), list[str]()
            for place, frame in enumerate(mine.frames):
                was = [_alike(one, place, frame.name) for one in olds]
                now = [_alike(one, place, frame.name) for one in news]
                one, names = _completed(rank, step, frame, was, now)
                frames.append(one)
                of_peers += names
            meta = {**mine.meta, "frames": frames, "is_settled": True, "of_peers": of_peers}
            found[rank] = present[rank]._replace(meta=json.dumps(meta).encode())
    return found


def _refuse_unknown(
    rank: int, step: int, mine: ScriptRecord, peers: Sequence[ScriptRecord]
) -> None:
    """Of globals and objects; the rank itself takes those that are known from a peer."""
    late = mine.late.union(*(one.late for one in peers))
    printed = mine.printed.union(*(one.printed for one in peers))
    for name in sorted(late - printed):
        olds, news = [one.was.get(name) for one in peers], [one.now.get(name) for one in peers]
        had = mine.was.get(name, olds[0])  # the rank compares what it has never changed
        is_known = {had} == set(olds) and len(set(news)) == 1 and news[0] is not None
        if not is_known and olds != news:
            raise _unknown(rank, step, name)


def _completed(
    rank: int, step: int, mine: _Frame, olds: Sequence[_Frame], news: Sequence[_Frame]
) -> tuple[list[Any], list[str]]:
    """The rank's frame as of the step's end, and the names of what is a peer's there."""
    changed, others = dict(mine.changed), dict(mine.others)
    of_peers = []
    for name in dict.fromkeys(
        name for one in (mine, *news) for name in (*one.changed, *one.others)
    ):
        had, then, now = (
            mine.get(name),
            {one.get(name) for one in olds},
            [n.get(name) for n in news],
        )
        is_known = {had} == then and len(set(now)) == 1
        if (is_known and had == now[0]) or [one.get(name) for one in olds] == now:
            continue  # its own holds
        if not is_known:
            if name in mine.steering:
                raise _unknown(rank, step, name)
            of_peers.append(name)
        others.pop(name, None)
        changed.pop(name, None)
        if now[0] is not None:
            changed[name] = json.loads(now[0])
    return [mine.name, changed, others], of_peers


def _unknown(rank: int, step: int, name: str) -> UnknownStateError:
    name = name.rpartition(".<locals>.")[2]
    return UnknownStateError(
        f"rank {rank} died before its commit of step {step}, {name} changes between backward and "
        "the commit, and what it would be cannot be told from the other ranks: change it before "
        f'backward, or call state.ignore("{name.rpartition(".")[2]}") if training does not depend '
        "on it"
    )


def _read(record: CommitRecord | None, entries: Sequence[Entry] = ()) -> _Rank:
    """What cannot be read is taken as if it were not there, as it is when it is restored."""
    nothing = _Rank({}, (), ScriptRecord(), record is not None and record.is_commit)
    if record is None:
        return nothing
    at, octets = 0, b""
    for entry in entries:
        if entry.name == SCRIPT:
            octets = record.payload[at : at + entry.nbytes]
        at += entry.nbytes
    try:
        meta = json.loads(record.meta)
        steering = meta.get("steering", [])
        frames = [
            _Frame(name, changed, others, frozenset(names))
            for (name, changed, others), names in zip(meta.get("frames", []), steering, strict=True)
        ]
        return _Rank(meta, frames, script_record.split(octets), record.is_commit)
    except (ValueError, TypeError, KeyError, AttributeError):
        return nothing


def _alike(frames: Sequence[_Frame], place: int, name: str) -> _Frame:
    """The same function's in another record; empty: it is not in there."""
    if place < len(frames) and frames[place].name == name:
        return frames[place]
    return _Frame(name, {}, {}, frozenset())
