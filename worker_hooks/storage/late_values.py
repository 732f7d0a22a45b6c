"""What the script of a rank keeps, if the rank died before a commit that its peers reached.

The page of such a rank has its values, and the variables of its loop that training depends on, as
its last backward began; its other variables as of the commit before. What no rank has ever changed
between backward and commit is known with that. Of the rest the peers tell: if all of them had what
it had, and have the same now, then so would it; if none of them changed a value in the step, then
neither would it. Otherwise nobody knows the value. If training does not depend on it, the rank's
own stays, which lacks the step, or a peer's is taken where the rank has none; else the step cannot
be continued bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from worker_hooks.contract import script_record
from worker_hooks.contract.script_record import OWN, SCRIPT, ScriptRecord
from worker_hooks.contract.status_page import CommitRecord, Entry
from worker_hooks.storage.late_entries import UnknownStateError

_MISSING = object()


class _Frame(NamedTuple):
    """The variables of one function around the loop, as JSON by name."""

    name: str
    changed: Mapping[str, Any] = {}  # since training began
    others: Mapping[str, Any] = {}
    steering: frozenset[str] = frozenset()  # training depends on them
    moving: frozenset[str] = frozenset()  # of those, were ever changed by a step
    late: frozenset[str] = frozenset()  # of those, were ever changed between backward and commit
    results: frozenset[str] = frozenset()  # of those: only what training returns depends on them
    # of those, differ at backward from the commit before; ``None`` in all: was not read there
    since: Mapping[str, Any] | None = None

    def knows(self, name: str) -> bool:
        """Whether the value of a variable as backward began is known."""
        return self.since is not None and self.since.get(name, _MISSING) is not None

    def get(self, name: str) -> Any:
        """The value of a variable, comparable bit by bit; ``None``: it is not there."""
        found = self.changed.get(name, self.others.get(name, _MISSING))
        return None if found is _MISSING else json.dumps(found)


class _Completed(NamedTuple):
    """A rank's frame as of the end of the step in which it died."""

    frame: list[Any]  # as it is saved
    of_peers: list[str]  # variables that are a peer's
    lacking: list[str]  # variables that lack what the step did to them behind backward


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
    earlier: Callable[[int, int], CommitRecord | None],
    entries: Mapping[int, Sequence[Entry]],
    step: int,
) -> dict[int, CommitRecord]:
    """The records with the variables of all ranks as of the commit of ``step``.

    The arguments are those of :func:`late_entries.completed`.

    Raises:
        UnknownStateError: some rank's cannot be known, and training depends on them.
    """
    found = dict(records)
    present = {rank: one for rank, one in records.items() if one.step == step}
    if all(one.is_commit for one in present.values()):
        return found
    ranks = {rank: _read(one, entries[rank]) for rank, one in present.items()}
    peers = [rank for rank, one in ranks.items() if one.has_variables]
    olds = [_read(earlier(rank, step - 1)).frames for rank in peers]
    news = [ranks[rank].frames for rank in peers]
    scripts = [one.script for one in ranks.values() if one.has_values]
    behind = [str(rank) for rank, one in ranks.items() if not one.is_commit]
    who = (
        f"rank{'s' * (len(behind) > 1)} {', '.join(behind)} did not reach the commit of step {step}"
    )
    for rank, mine in ranks.items():
        if scripts and not mine.has_values:
            before = _read(earlier(rank, step - 1), entries[rank])
            _refuse_unknown(who, mine.script, scripts, before)
        if peers and mine.frames and not mine.has_variables:
            older = _read(earlier(rank, step - 2)).frames
            frames, of_peers, lacking = list[Any](), list[str](), list[str]()
            for place, frame in enumerate(mine.frames):
                one = _completed(
                    who,
                    frame,
                    _alike(older, place, frame.name),
                    [_alike(each, place, frame.name) for each in olds],
                    [_alike(each, place, frame.name) for each in news],
                )
                frames.append(one.frame)
                of_peers += one.of_peers
                lacking += one.lacking
            about = {"frames": frames, "of_peers": of_peers, "lacking": lacking}
            meta = {**mine.meta, **about, "is_settled": True}
            found[rank] = present[rank]._replace(meta=json.dumps(meta).encode())
    return found


def _refuse_unknown(
    who: str, mine: ScriptRecord, peers: Sequence[ScriptRecord], before: _Rank
) -> None:
    """Of globals and objects; the rank itself takes those that are known from a peer.

    Args:
        who: tells which ranks did not reach which commit.
        mine: the rank's, as its last backward began.
        peers: those of the others at the step's end.
        before: of the rank, at the commit before.
    """
    late = mine.late.union(*(one.late for one in peers))
    printed = mine.printed.union(*(one.printed for one in peers))
    for name in sorted(late - printed):
        olds, news = [one.was.get(name) for one in peers], [one.now.get(name) for one in peers]
        had = mine.was.get(name, olds[0])  # the rank compares what it has never changed
        is_one = {had} == set(olds) and len(set(news)) == 1 and news[0] is not None
        # one peer alone proves little, unless both had made the same change in the step before
        has_moved = before.script.was.get(name) not in {None, had}
        # of what is said to be of the rank alone, peers that left theirs alone tell nothing
        is_silent = olds == news and name.startswith(OWN)
        is_known = is_one and not is_silent and (olds == news or len(peers) > 1 or has_moved)
        is_still = olds == news and name not in mine.late
        if not is_known and not is_still:
            raise _unknown(who, name)


def _completed(
    who: str,
    mine: _Frame,
    before: _Frame,
    olds: Sequence[_Frame],
    news: Sequence[_Frame],
) -> _Completed:
    """The rank's frame as of the step's end.

    Args:
        who: tells which ranks did not reach which commit.
        mine: as of the commit before.
        before: as of the commit before that.
        olds: of the peers, as of the commit before.
        news: the same as of the step's end.
    """
    changed, others = dict(mine.changed), dict(mine.others)
    of_peers, lacking = [], []
    late = mine.late.union(*(one.late for one in news))
    for name in dict.fromkeys(
        name for one in (mine, *news) for name in (*(one.since or ()), *one.changed, *one.others)
    ):
        if name in mine.steering - late and mine.knows(name):
            if mine.since and name in mine.since:
                others.pop(name, None)
                changed[name] = mine.since[name]
            continue
        had, then = mine.get(name), [one.get(name) for one in olds]
        now = [one.get(name) for one in news]
        is_one = {had} == set(then) and len(set(now)) == 1
        # one peer alone proves little, unless both had made the same change in the step before
        has_moved = before.get(name) not in {None, had}
        is_known = is_one and (then == now or len(news) > 1 or has_moved)
        # its own holds; it is newer than the commit before where a loop began in between
        if {had} == set(now) or (then == now and name not in mine.moving):
            continue
        if not is_known:
            if name in mine.steering - mine.results:
                raise _unknown(who, name)
            if then == now:
                continue
            if had is not None and not is_one:
                lacking.append(name)
                continue
            of_peers.append(name)
        others.pop(name, None)
        changed.pop(name, None)
        if now[0] is not None:
            changed[name] = json.loads(now[0])
    return _Completed([mine.name, changed, others], of_peers, lacking)


def _unknown(who: str, name: str) -> UnknownStateError:
    name = name.rpartition(".<locals>.")[2]
    return UnknownStateError(
        f"{who}, {name} changes between backward and the commit, and what it would be cannot be "
        "told from the other ranks: change it before backward, or call "
        f'state.ignore("{name.rpartition(".")[2]}") if training does not depend on it'
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
        frames = meta.get("frames", [])
        none: list[list[str]] = [[]] * len(frames)
        since = meta.get("since") or [None] * len(frames)
        found = [
            _Frame(
                name,
                {**changed},
                {**others},
                steering=frozenset(steering),
                moving=frozenset(moving),
                late=frozenset(late),
                results=frozenset(results),
                since=at_backward,
            )
            for (name, changed, others), steering, moving, late, results, at_backward in zip(
                frames,
                *(meta.get(each) or none for each in ("steering", "moving", "late", "results")),
                since,
                strict=True,
            )
        ]
        return _Rank(meta, found, script_record.split(octets), record.is_commit)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return nothing


def _alike(frames: Sequence[_Frame], place: int, name: str) -> _Frame:
    """The same function's in another record; empty: it is not in there."""
    if place < len(frames) and frames[place].name == name:
        return frames[place]
    return _Frame(name)
