"""What ranks write when they save without msrun: one of them leads, the others follow."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from worker_hooks.contract import protocol
from worker_hooks.contract.layout import DUMP, UNFINISHED, DumpLayout
from worker_hooks.contract.left_pages import leave_page, unclaim
from worker_hooks.contract.status_page import Page
from worker_hooks.guard.guard import Guard
from worker_hooks.recovery import joint_dump, peer_answers
from worker_hooks.recovery.joint_dump import PartRequest
from worker_hooks.recovery.left_state import Groups, LeftPlan, left_steps, plan_left, write_left
from worker_hooks.recovery.peer_notes import PeerNote, PeerNotes
from worker_hooks.storage import commit, private_records
from worker_hooks.storage.late_entries import UnknownStateError
from worker_hooks.storage.manifest import DUMP_KIND, Manifest, Shard
from worker_hooks.storage.memory_dump import HeldDump

log = logging.getLogger("msrun")

LOOK_S = 0.01  # between two looks at the notes: not every file system reports changes
PATIENCE = 3  # times that a rank may give no sign: a disk that stood still goes on
LEAVE_S = 5.0  # for the others, to see that the dump is complete

_SILENT: Mapping[str, Any] = {"digest": "", "written": None, "shares": ()}
"""What a note says that tells nothing of its rank's state."""


def elsewhere(guard: Guard) -> set[int]:
    """Ranks on other nodes, which may be gone."""
    if guard.env.nodes <= 1:
        return set()
    return set(range(guard.env.world_size)) - {guard.env.rank, *guard.peers}


def listed(ranks: Iterable[int]) -> str:
    """They, for people."""
    return ", ".join(map(str, sorted(ranks)))


class _PrivateStates(NamedTuple):
    """What a dump has of the ranks' private states."""

    shards: tuple[Shard, ...]
    stale: tuple[int, ...] = ()  # ranks whose is of an earlier step
    why_lost: str = ""


class UnaidedDump:
    """One rank's part in a dump without an agent."""

    def __init__(self, guard: Guard, notes: PeerNotes, stall_s: float) -> None:
        self._guard = guard
        self._notes = notes
        self._stall_s = stall_s
        self._rank = guard.env.rank
        self.stuck: set[int] = set()  # leaders that gave no sign for too long
        self._tried: set[Path] = set()  # folders that this rank made
        self._seen: dict[int, PeerNote] = {}
        self._waits_until_s = 0.0
        self.leads = False

    def save(self, places: list[str]) -> str | None:
        """Take part until the dump is complete; its folder, or ``None`` if it cannot be."""
        while (path := self._notes.saved()) is None:
            found = self._notes.read()
            self._seen |= found
            leader = self._leader(found)
            if leader is None:
                if not self._is_worth_waiting(found):
                    return self._notes.saved()
            elif leader == self._rank:
                # a leader that is stuck may be so because of its disk
                self._lead(places[::-1] if self.stuck else places)
            else:
                self._follow(leader, found)
            self._notes.touch()
            time.sleep(LOOK_S)
        return path

    def _leader(self, notes: Mapping[int, PeerNote]) -> int | None:
        """Who writes: of those that hold the newest step who does so already, else the lowest.

        A dump in memory precedes what ranks hold: it was compared when it was made.
        """
        signs = {rank: self._notes.silent_s(rank) <= self._stall_s for rank in notes}
        complete = joint_dump.complete(
            {rank: note for rank, note in notes.items() if signs[rank] or rank == self._rank}
        )
        able = [
            (-note.step, not note.leads, not note.is_memory, -len(note.states), rank)
            for rank, note in notes.items()
            if (note.is_whole or (note.is_memory and note.memory in complete))
            and note.step > self._guard.resumed_step
            and not note.failed
        ]
        leaders = [rank for *_, rank in sorted(able)]
        for rank in leaders:
            if rank != self._rank and not signs[rank]:
                if rank not in self.stuck:
                    log.error("rank %d was to save, and gives no sign", rank)
                self.stuck.add(rank)
            if rank not in self.stuck:
                return rank
        # without another one it counts that a rank has given a sign again
        awake = next((rank for rank in leaders if signs[rank]), None)
        self.stuck.discard(-1 if awake is None else awake)
        return awake

    def _is_worth_waiting(self, notes: Mapping[int, PeerNote]) -> bool:
        """Whether ranks have a dump in memory between them, and one of them gives no sign."""
        now_s, others = time.monotonic(), notes.keys() - {self._rank}
        is_silent = any(self._notes.silent_s(rank) > self._stall_s for rank in others)
        if not is_silent or not joint_dump.complete(notes):
            self._waits_until_s = 0.0
        elif not self._waits_until_s:
            self._waits_until_s = now_s + PATIENCE * self._stall_s
        return now_s < self._waits_until_s

    def why_nothing(self, resumed: int) -> str:
        """Why nothing was saved, as a part of a sentence."""
        step = max((note.step for note in self._seen.values() if note.is_whole), default=0)
        if step and step == resumed:
            return f"step {step} is saved already; resume with: msrun --resume"
        reasons = [
            f"rank {rank}: {why}"
            for rank, note in sorted(self._seen.items())
            if (why := note.failed or note.why)
        ]
        reasons += [f"rank {rank} gave no sign for {self._stall_s:g} s" for rank in self.stuck]
        return f"nothing is saved ({'; '.join(reasons) or 'no step was committed'})"

    def await_others(self) -> None:
        """Wait until the others have seen that the dump is complete, and left."""
        until_s = time.monotonic() + LEAVE_S
        while len(self._notes.read()) > 1 and time.monotonic() < until_s:
            time.sleep(LOOK_S)

    def clean_up(self) -> None:
        """Remove the notes, and what other leaders left, when nobody needs them any more."""
        for folder in {self._notes.folder.parent, *(path.parent for path in self._tried)}:
            for path in folder.glob(f"{DUMP}*.{self._guard.env.record_id}-*{UNFINISHED}"):
                shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            unclaim(self._notes.folder.parent, self._guard.env.record_id)
        shutil.rmtree(self._notes.folder, ignore_errors=True)

    def _lead(self, places: list[str]) -> None:
        self.leads = True
        why, env, newest, parts = "", self._guard.env, self._notes.mine.step, self._parts()
        plan = None if parts else self._plan()
        step = newest if plan is None else plan.step
        for place in filter(None, places):
            # of its own: another leader may have died amid a file of its folder, or not quite
            owner = f"{env.record_id}-{self._rank}"
            layout = DumpLayout.of_step(Path(place), step, owner)
            self._tried.add(layout.unfinished)
            try:
                commit.make_folder(layout)
                # then nobody else is to write
                is_memory = self._notes.mine.is_memory or step < newest
                self._notes.tell(
                    leads=str(layout.unfinished),
                    is_memory=is_memory,
                    by_parts=bool(parts),
                    requests=self._requests(),
                )
                if self._guard.memory is not None:
                    self._write_memory(layout, self._guard.memory)
                else:
                    self._write(layout, step, plan, parts)
            except OSError as error:
                why = f"{error.strerror}: {place}"
                log.error("rank %d cannot save: %s", self._rank, why)  # noqa: TRY400
                shutil.rmtree(layout.unfinished, ignore_errors=True)  # notes need some room, too
            except Exception as error:
                why = repr(error)
                log.exception("rank %d cannot save", self._rank)
                shutil.rmtree(layout.unfinished, ignore_errors=True)
                break
            else:
                if self._notes.mine.failed:  # all others have answered: nobody writes to it
                    shutil.rmtree(layout.unfinished, ignore_errors=True)
                return
        self._notes.tell(failed=why or "no folder to save to")

    def _parts(self) -> Groups:
        """The parts to write one by one, where no rank that lives holds all that a dead one did."""
        if self._guard.memory is not None:
            return ()
        return peer_answers.parts_to_write(self._rank, self._notes.read())

    def _plan(self) -> LeftPlan | None:
        """What of the state is read in memory, as no rank that lives holds it."""
        guard, notes, step = self._guard, self._notes.read(), self._notes.mine.step
        if guard.memory is not None or not (known := peer_answers.groups_of(notes)):
            return None
        if elsewhere(guard):  # a page of another node tells of processes there
            return None
        groups = [*known, *((rank,) for rank in sorted(guard.peers.gone().difference(*known)))]
        whole = [rank for rank, note in notes.items() if note.is_whole and note.step == step]
        if all({*whole} & {*group} for group in groups):
            return None
        left = left_steps(self._pages())
        found = plan_left(step, groups, whole, left)
        if found is not None and found.step > guard.resumed_step:
            return found
        there = (f"rank {rank}: {listed(steps) or 'none'}" for rank, steps in sorted(left.items()))
        log.error("steps that are left in memory: %s", "; ".join(there))
        return None

    def _pages(self) -> dict[int, Page]:
        page, near = self._guard.source.page, self._guard.peers.pages()
        if page is not None:
            near[self._rank] = page
        copies = {rank: near.pop(rank) for rank in self._guard.peers.copied & near.keys()}
        return copies | self._notes.pages(self._guard.env.attempt) | near

    def _requests(self) -> tuple[PartRequest, ...]:
        """What of a dump in memory this rank lacks, as it leads, and is to have from others."""
        if self._guard.memory is None:
            return ()
        notes = self._notes.read()
        silent = {rank for rank in notes if self._notes.silent_s(rank) > self._stall_s}
        there = {rank: notes[rank] for rank in notes.keys() - silent}
        return joint_dump.requests(self._rank, there | {self._rank: self._notes.mine})

    def _write_memory(self, layout: DumpLayout, held: HeldDump) -> None:
        mine, folder = self._notes.mine, str(layout.unfinished)
        own = joint_dump.own(self._rank, mine)
        written = joint_dump.write(held, own, layout.unfinished, self._advance)
        if mine.requests:
            self._notes.tell(folder=folder)
            answers = self._await_answers(folder, {rank for rank, *_ in mine.requests})
            written += tuple(Shard(**each) for note in answers.values() for each in note.files)
        if joint_dump.lacking(mine, written):
            ranks = listed(rank for rank, states, _ in mine.requests if states)
            why = f"rank {ranks} did not write all that only its node has of the state"
            self._notes.tell(failed=why)
            log.error("step %d is not saved by rank %d: %s", mine.step, self._rank, why)
            return
        about = held.on_disk(DUMP_KIND, written)
        if self._complete(layout, about):
            self._say_lost(about, _PrivateStates(()))

    def _write(self, layout: DumpLayout, step: int, plan: LeftPlan | None, parts: Groups) -> None:
        guard, env = self._guard, self._guard.env
        folder, others = str(layout.unfinished), dict[int, PeerNote]()
        if step == self._notes.mine.step:
            answer = self._answer(folder, self._rank, self._notes.read())
            own = self._private(folder, step)
            self._notes.tell(**answer, private=own, folder=folder)
            others = self._await_answers(folder)
        pages = self._pages()
        for rank, alike in () if plan is None else plan.readers.items():
            place = layout.shard(rank, *guard.source.position(step))
            left = write_left(pages[rank], step, layout.unfinished, place, self._advance)
            others[rank] = left._replace(alike=alike)
        if parts:
            state = peer_answers.joined_parts(others, self._rank, parts)
        else:
            why = guard.replicated.why_not
            state = peer_answers.joined(others, self._rank, env.world_size, why)
        if state.why_not:
            self._notes.tell(failed=state.why_not)
            log.error("step %d is not saved by rank %d: %s", step, self._rank, state.why_not)
            return
        given = [Shard(**note.private) for note in others.values() if note.private]
        private = self._complete_private(layout, step, given)
        epoch, batch = guard.source.position(step)
        assert guard.welcome is not None
        lineage = protocol.runs_of(guard.welcome.lineage)
        about = Manifest(
            DUMP_KIND,
            step=step,
            epoch=epoch - 1,
            batch=batch,
            world_size=env.world_size,
            attempt=env.attempt,
            record_id=env.record_id,
            reason="the controller's node was lost" if env.is_controlled else "msrun was killed",
            shards=(*state.shards, *private.shards),
            digest=state.digest,
            odd=state.odd,
            holders=state.holders,
            stale_private=private.stale,
            lineage=lineage,
        ).completed()
        if self._complete(layout, about):
            self._say_lost(about, private)

    def _complete(self, layout: DumpLayout, about: Manifest) -> bool:
        """Make the folder the saved step, and say so; whether it is, as no other one is as good."""
        path, is_kept = commit.complete(layout, about, about.lineage)
        self._notes.announce(str(path), about.step)
        return not is_kept

    def _say_lost(self, about: Manifest, private: _PrivateStates) -> None:
        for ranks, what in (
            (about.without_private, f"are lost{private.why_lost and ': '}{private.why_lost}"),
            (about.stale_private, f"are of a step before {about.step}"),
        ):
            if ranks:
                whose = f"the random numbers, buffers and data position of rank {listed(ranks)}"
                log.error("step %d: %s %s", about.step, whose, what)

    def _await_answers(
        self, folder: str, among: Collection[int] | None = None
    ) -> dict[int, PeerNote]:
        """The notes of the ranks that have written their part, when no other one will.

        ``among``: who is to write one; ``None``: all.
        """
        while True:
            notes = self._notes.read()
            if among is not None:
                notes = {rank: note for rank, note in notes.items() if rank in among}
            # one that leads by itself, as this rank seemed stuck, writes all into its own folder;
            # one that led in vain follows, and may hold another state
            waited = [
                rank
                for rank, note in notes.items()
                if note.folder != folder and (note.failed or note.leads in {"", folder})
            ]
            if all(self._notes.silent_s(rank) > self._stall_s for rank in waited):
                return {rank: note for rank, note in notes.items() if note.folder == folder}
            self._notes.touch()
            time.sleep(LOOK_S)

    def _complete_private(
        self, layout: DumpLayout, step: int, given: Collection[Shard]
    ) -> _PrivateStates:
        """What the ranks wrote, and of those that wrote nothing what their pages have."""
        pages, ranks, why = self._pages(), range(self._guard.env.world_size), ""
        try:
            records = private_records.completed(pages, ranks, step)
        except UnknownStateError as error:
            why = str(error)
            found = {rank: private_records.record(page, step) for rank, page in pages.items()}
            records = {
                rank: one for rank, one in found.items() if one is not None and one.is_commit
            }
        shards, stale = list(given), []
        for rank in sorted(records.keys() - {shard.rank for shard in given}):
            record, entries = records[rank], pages[rank].entries
            try:
                shards.append(
                    commit.write_private(layout.unfinished, rank, entries, record, self._advance)
                )
            except (ValueError, TypeError, KeyError):
                continue  # a page that describes itself wrongly is as good as none
            if record.step != step:
                stale.append(rank)
        return _PrivateStates(tuple(shards), tuple(stale), why)

    def _follow(self, leads: int, notes: Mapping[int, PeerNote]) -> None:
        """Write this rank's part of the state into the leader's folder, once."""
        leader, mine = notes[leads], self._notes.mine
        folder = leader.leads
        if not folder or mine.folder == folder:
            return
        answer, private, files = dict(_SILENT), None, tuple[Shard, ...]()
        try:
            if leader.is_memory:
                files = self._requested(leader)
            else:
                if mine.is_whole and mine.step == leader.step and not mine.is_memory:
                    answer = self._answer(folder, leads, notes)
                private = self._private(folder, leader.step)
        except OSError as error:  # the leader's folder: the leader fails, too
            log.error("rank %d cannot save its part of the state: %s", self._rank, error)  # noqa: TRY400
        except RuntimeError:
            log.exception("rank %d cannot compare its state", self._rank)
        if leads in elsewhere(self._guard) and not leader.is_memory:
            self._leave_pages(notes, () if private else (self._rank,))
        told = [shard._asdict() for shard in files]
        self._notes.tell(**answer, folder=folder, private=private, files=told)

    def _requested(self, leader: PeerNote) -> tuple[Shard, ...]:
        """Write what the leader of a dump in memory lacks, and this rank was asked for."""
        held, written = self._guard.memory or self._guard.offered, tuple[Shard, ...]()
        for request in (PartRequest(*each) for each in leader.requests):
            if held is not None and request.rank == self._rank:
                written += joint_dump.write(held, request, Path(leader.leads), self._advance)
        return written

    def _answer(self, folder: str, leads: int, notes: Mapping[int, PeerNote]) -> dict[str, Any]:
        """Write or digest what this rank holds; what its note says of that."""
        leader, shares = notes[leads], list[tuple[str, dict[str, object] | None]]()
        parts = notes[self._rank].parts if leader.by_parts else ((),)
        for share, part in enumerate(parts):
            writes = peer_answers.is_writer(self._rank, leads, notes, part)
            order = protocol.Save(0, leader.step, folder, parts=int(writes), share=share)
            if part:
                order = order._replace(without=self._guard.replicated.without[share])
            told = self._guard.save(order, self._advance)
            shares.append((told.digest, peer_answers.shard_of(told)))
        if leader.by_parts:
            return {**_SILENT, "shares": shares}
        ((digest, written),) = shares
        return {**_SILENT, "digest": digest, "written": written}

    def _leave_pages(self, notes: Mapping[int, PeerNote], without: Collection[int]) -> None:
        """Leave a leader on another node the pages of ranks that write nothing, which are here.

        Args:
            notes: of the ranks that answer.
            without: this rank, if it did not reach the end of the step: what it would have there is
                known from its page and those of others.
        """
        guard, source = self._guard, self._guard.source
        pages = guard.peers.pages()
        if source.page is not None:
            pages[self._rank] = source.page
        silent = pages.keys() - notes.keys()
        if guard.peers.copied & notes.keys():
            silent -= guard.peers.copied  # their node is there: it has the pages themselves
        if self._rank != min(notes.keys() & {self._rank, *guard.peers}):
            silent = set()
        for rank in silent.union(without) & pages.keys():
            try:
                leave_page(self._notes.folder, rank, pages[rank].content())
            except OSError as error:
                log.error("rank %d cannot leave the page of rank %d: %s", self._rank, rank, error)  # noqa: TRY400

    def _private(self, folder: str, step: int) -> dict[str, object] | None:
        """Write this rank's private state, if it is that of the step's end."""
        page, mine = self._guard.source.page, self._notes.mine
        record = None if page is None else page.record(step)
        is_known = record is not None and (
            record.is_commit or (mine.is_whole and mine.step == step and not mine.is_memory)
        )
        if page is None or record is None or not is_known:
            return None
        shard = commit.write_private(Path(folder), self._rank, page.entries, record, self._advance)
        return shard._asdict()

    def _advance(self, _nbytes: int) -> None:
        self._notes.touch()
