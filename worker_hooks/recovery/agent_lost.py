"""What ranks do when msrun itself was killed: hold, save by themselves, and exit.

All ranks find their connection closed at about the same time, and hold at their next commit. Then
all are whole at the same step, because no rank can finish the next collective alone; a rank that is
already inside that collective stays there, and is whole. They agree through notes in a folder next
to the checkpoints: the lowest whole rank leads and writes the replicated state, every rank writes
its own private state, and the leader completes the dump when everything is written.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from worker_hooks.contract import protocol
from worker_hooks.contract.layout import DUMP, UNFINISHED, DumpLayout
from worker_hooks.guard.guard import Guard
from worker_hooks.recovery.peer_notes import PeerNote, PeerNotes
from worker_hooks.storage import commit, manifest
from worker_hooks.storage.manifest import REPLICATED, Shard

log = logging.getLogger("msrun")

LOOK_S = 0.01  # between two looks at the notes: not every file system reports changes
LATE_S = 20.0  # without any sign: ranks that have not settled by then never will
LAST_LOOK_S = 1.0  # at a main thread that may be blocked after a complete update
EXIT = 1


def save_without_agent(guard: Guard) -> None:
    """Save the state of this rank and its peers, and end the process. Runs in the listener."""
    path = None
    try:
        path = _save(guard)
    except OSError as error:
        log.error("msrun is gone, and nothing could be saved: %s", error)  # noqa: TRY400
    except Exception:
        log.exception("msrun is gone, and saving failed")
    finally:
        if path:
            log.error("msrun is gone; saved: %s; resume with: msrun --resume", path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT)


def _save(guard: Guard) -> str | None:
    welcome, env = guard.welcome, guard.env
    assert welcome is not None
    guard.gate.hold()
    name = f"{DUMP}alone-{env.record_id}-{env.attempt}{UNFINISHED}"
    notes, place = _open_notes(guard, name)
    _settle(guard, notes, welcome.update_grace_s)
    ranks = _await_all(notes, guard)
    whole = {rank: note for rank, note in ranks.items() if note.is_whole}
    step = max((note.step for note in whole.values()), default=0)
    if step <= guard.resumed_step:
        log.error(_why_nothing(ranks, step, guard.resumed_step))
        return None
    dump = _DumpWithoutAgent(guard, notes, step, welcome.stall_s)
    saved = dump.save([place, *([welcome.fallback] if place != welcome.fallback else [])])
    if saved is not None and dump.leads:
        shutil.rmtree(notes.folder, ignore_errors=True)
    return saved


def _open_notes(guard: Guard, name: str) -> tuple[PeerNotes, str]:
    assert guard.welcome is not None
    try:
        notes, place = (
            PeerNotes(Path(guard.options.ckpt_save_path, name), guard.env.rank),
            guard.options.ckpt_save_path,
        )
        notes.tell(step=guard.source.step)
    except OSError:
        if not guard.welcome.fallback:
            raise
        place = guard.welcome.fallback
        notes = PeerNotes(Path(place, name), guard.env.rank)
        notes.tell(step=guard.source.step)
    return notes, place


def _settle(guard: Guard, notes: PeerNotes, grace_s: float) -> None:
    """Wait until this rank's state will not change any more, then describe it in its note."""
    gate, source = guard.gate, guard.source
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not gate.is_held:
        step = source.step
        others = [note for note in notes.read().values() if note.is_settled]
        if not gate.is_torn and any(note.step <= step for note in others):
            break  # that peer holds: no collective after this commit can be finished
        if not gate.is_torn and len(guard.live_ranks()) < guard.env.world_size:
            break  # a peer is dead: the same
        if step != notes.mine.step:
            notes.tell(step=step)
        time.sleep(LOOK_S)
    step, is_whole, why = guard.freeze(max(LAST_LOOK_S, deadline - time.monotonic()))
    notes.tell(step=step, is_settled=True, is_whole=is_whole, why=why)


def _await_all(notes: PeerNotes, guard: Guard) -> dict[int, PeerNote]:
    """The settled notes of all ranks that exist, or of those that settle in time."""
    while True:
        ranks = notes.read()
        settled = {rank: note for rank, note in ranks.items() if note.is_settled}
        if settled.keys() >= guard.live_ranks() or notes.last_sign_s() > LATE_S:
            return settled
        time.sleep(LOOK_S)


def _why_nothing(ranks: dict[int, PeerNote], step: int, resumed: int) -> str:
    if step and step == resumed:
        return f"msrun is gone; step {step} is saved already; resume with: msrun --resume"
    torn = "; ".join(f"rank {rank}: {note.why}" for rank, note in ranks.items() if note.why)
    return f"msrun is gone; nothing to save ({torn or 'no step was committed'})"


class _DumpWithoutAgent:
    """One rank's part in a dump without an agent."""

    def __init__(self, guard: Guard, notes: PeerNotes, step: int, stall_s: float) -> None:
        self._guard = guard
        self._notes = notes
        self._step = step
        self._stall_s = stall_s
        self._rank = guard.env.rank
        self.leads = False

    def save(self, places: list[str]) -> str | None:
        """Take part until the dump is complete; its folder, or ``None`` if it cannot be."""
        while (path := self._notes.saved()) is None:
            notes = self._notes.read()
            leaders = [
                rank
                for rank, note in sorted(notes.items())
                if note.is_whole and note.step == self._step and not note.failed
            ]
            if not leaders or self._notes.last_sign_s() > self._stall_s:
                return None
            if leaders[0] == self._rank:
                self._lead(places)
            else:
                self._follow(notes[leaders[0]].leads)
            time.sleep(LOOK_S)
        return path

    def _lead(self, places: list[str]) -> None:
        self.leads = True
        why = ""
        for place in filter(None, places):
            try:
                env = self._guard.env
                self._write(DumpLayout.of_step(Path(place), self._step, env.record_id))
            except OSError as error:
                why = f"{error.strerror}: {place}"
                log.error("rank %d cannot save: %s", self._rank, why)  # noqa: TRY400
            except Exception as error:
                why = repr(error)
                log.exception("rank %d cannot save", self._rank)
                break
            else:
                return
        self._notes.tell(failed=why or "no folder to save to")

    def _write(self, layout: DumpLayout) -> None:
        guard, env = self._guard, self._guard.env
        commit.make_folder(layout)
        folder = str(layout.unfinished)
        self._notes.tell(leads=folder)
        order = protocol.Save(dump_id=0, step=self._step, folder=folder, part=0, parts=1)
        written = guard.save(order, self._advance)
        assert isinstance(written, protocol.Written)
        self._notes.tell(digest=written.digest, private=self._private(folder), folder=folder)
        others = self._await_private(folder)
        digests = Counter(note.digest for note in others.values() if note.digest)
        common, count = digests.most_common(1)[0]
        if 2 * count <= digests.total() and len(digests) > 1:
            self._notes.tell(failed="the ranks hold different states, and msrun is gone")
            log.error("step %d is not saved: ranks hold different states", self._step)
            return
        if common != written.digest and count > digests.total() // 2:
            self._notes.tell(failed="it differs from most replicas")
            log.error("rank %d differs from the other replicas: another rank saves", self._rank)
            return
        shard = Shard(written.file, self._rank, REPLICATED, written.nbytes, written.sha256)
        private = [Shard(**note.private) for note in others.values() if note.private]
        epoch, batch = guard.source.position(self._step)
        about = manifest.new(
            manifest.DUMP_KIND,
            step=self._step,
            epoch=epoch - 1,
            batch=batch,
            world_size=env.world_size,
            attempt=env.attempt,
            record_id=env.record_id,
            reason="msrun was killed",
            shards=(shard, *private),
            digest=written.digest,
            odd=(
                rank
                for rank, note in sorted(others.items())
                if note.digest and note.digest != written.digest
            ),
        )
        self._notes.announce(str(commit.commit(layout, about)), self._step)

    def _await_private(self, folder: str) -> dict[int, PeerNote]:
        """The notes of all living ranks when each has written its part, or progress has stopped."""
        while True:
            notes = self._notes.read()
            if all(note.folder == folder for note in notes.values()):
                return notes
            if self._notes.last_sign_s() > self._stall_s:
                return {rank: note for rank, note in notes.items() if note.folder == folder}
            time.sleep(LOOK_S)

    def _follow(self, folder: str) -> None:
        """Write this rank's private state into the leader's folder, once."""
        if not folder or self._notes.mine.folder == folder:
            return
        digest = ""
        if self._notes.mine.is_whole and self._notes.mine.step == self._step:
            order = protocol.Save(dump_id=0, step=self._step, folder=folder)
            answer = self._guard.save(order, self._advance)
            assert isinstance(answer, protocol.Digested)
            digest = answer.digest
        private: dict[str, Any] | None = None
        try:
            private = self._private(folder)
        except OSError as error:  # the leader's folder: the leader fails, too
            log.error("rank %d cannot save its private state: %s", self._rank, error)  # noqa: TRY400
        self._notes.tell(folder=folder, digest=digest, private=private)

    def _private(self, folder: str) -> dict[str, Any] | None:
        page = self._guard.source.page
        record = None if page is None else page.record(self._step)
        if page is None or record is None:
            return None
        shard = commit.write_private(Path(folder), self._rank, page.entries, record, self._advance)
        return shard._asdict()

    def _advance(self, _nbytes: int) -> None:
        self._notes.touch()
