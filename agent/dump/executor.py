"""Carries out a dump that was decided: orders to the ranks, their answers as events, the commit.

It goes to a folder or, so that only the lost ranks need to be started again, to the agent's memory.
What is there may be written to a folder later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from agent.controller import actions as do
from agent.controller import events as ev
from agent.dump.disk import DiskDump, DumpOrder, SavedDump
from agent.dump.flush import MemoryFlush
from agent.dump.memory import MemoryDump
from agent.dump.replies import Answer, Replies
from agent.dump.summary import dump_summary
from agent.dump.unfinished_folder import AbandonedError
from agent.hooks.handshake import Handshake
from agent.hooks.rank_links import RankLinks
from agent.hooks.status_pages import StatusPages
from agent.machine.free_memory import free_bytes, needed, shortage
from agent.records.file_thread import FileThread
from agent.spec.job_spec import JobSpec
from worker_hooks.contract import protocol
from worker_hooks.contract.layout import CheckpointLayout, DumpLayout

T = TypeVar("T")

PROGRESS_S = 0.5  # between two signs of life of the scribe


class _Dump(NamedTuple):
    """A dump under way in one place."""

    action: do.SaveRanks  # the first order
    draft: DiskDump | MemoryDump | MemoryFlush
    began_s: float  # monotonic


class _Kept(NamedTuple):
    """The checkpoint in memory that is complete."""

    action: do.SaveRanks  # the first order
    memory: MemoryDump


class DumpExecutor:
    """At most one dump at a time."""

    def __init__(
        self,
        spec: JobSpec,
        fallback: Path,
        links: RankLinks,
        pages: StatusPages,
        greeting: Handshake,
        scribe: FileThread,
        post: Callable[[ev.Event], None],
        say: Callable[[str], None],
        call_later: Callable[..., object],
    ) -> None:
        """Take the parts.

        Args:
            spec: the job.
            fallback: where dumps go when the script's folder cannot be written.
            links: carry the orders.
            pages: hold the ranks' private state.
            greeting: knows where ranks save to.
            scribe: does the file work.
            post: decides on an event.
            say: tells people one sentence.
            call_later: the loop's.
        """
        self._spec = spec
        self._fallback = fallback
        self._links = links
        self._pages = pages
        self._greeting = greeting
        self._scribe = scribe
        self._post = post
        self._say = say
        self._call_later = call_later
        self._attempt = 0
        self._dump_id = -1
        self._dump: _Dump | None = None
        self._is_begun = False  # its folder is there
        self._frozen_s: float | None = None  # monotonic: the order to freeze; or all stood still
        self._why = ""  # the failure that the dump answers
        self._trouble = ""  # with the place that was tried last
        self._order: do.SaveRanks | None = None  # the newest
        self._kept: _Kept | None = None
        self._spent: list[MemoryDump] = []  # were given up, but ranks may still write there
        self._answers = Replies(links, post, self._note)

    def begin(self, attempt: int) -> None:
        """An attempt begins."""
        self._attempt = attempt

    # --- what is decided ------------------------------------------------------------------------

    def hold(self, action: do.HoldRanks) -> None:
        """Order ranks to stay at the end of their step."""
        self._open(action)
        for rank in action.ranks:
            self._links.send(rank, protocol.Hold(action.dump_id))

    def proceed(self, action: do.ProceedRanks) -> None:
        """Order ranks that stay to go on to the end of one step."""
        self._frozen_s = None  # how long they train until then is not the dump's time
        for rank in action.ranks:
            self._links.send(rank, protocol.Proceed(action.dump_id, action.step))

    def _open(self, action: do.HoldRanks | do.FreezeRanks) -> None:
        if action.dump_id != self._dump_id:
            self._dump_id = action.dump_id
            self._frozen_s = time.monotonic()
            self._why = action.reason
            self._answers.begin(action.dump_id)

    def freeze(self, action: do.FreezeRanks) -> None:
        """Order ranks to begin no update."""
        self._open(action)
        newest = max(self._pages.newest_step(rank) or 0 for rank in self._spec.ranks_here)
        order = protocol.Freeze(action.dump_id, self._spec.dump.update_grace_s, newest)
        for rank in action.ranks:
            self._links.send(rank, order)

    def save(self, action: do.SaveRanks) -> None:
        """Order ranks to digest now, and to write once the folder is there."""
        if self._frozen_s is None:
            self._frozen_s = time.monotonic()
        order = protocol.Save(action.dump_id, action.step, "", is_quick=_is_quick(action))
        for rank in action.digesters:
            self._tell(rank, action.round, order)
        dump = self._dump
        if dump is not None and _place(dump.action) == _place(action):
            self._order = action
            if self._is_begun:
                self._tell_writers(dump.draft, action)
            return
        self.abandon()
        self._order = action
        if _is_quick(action):
            self._remember(action)
            return
        layout = self._layout(action, action.place)
        if layout is None:
            self._fail(action, "the script names no ckpt_save_path")
            return
        draft = DiskDump(layout, action.step, self._spec.ranks_here, self._pages.all())
        self._is_begun = False
        begun = self._dump = _Dump(action, draft, time.monotonic())
        self._scribe.do(draft.begin, lambda done: self._on_begun(begun, done))
        self._call_later(self._spec.dump.stall_s / 2, self._lose_patience, begun)

    def _remember(self, action: do.SaveRanks) -> None:
        """To memory: nothing has to be made first, and no disk is waited for."""
        memory = MemoryDump(action.step, self._spec.ranks_here, self._pages.all())
        if why := self._lack(memory):
            self._fail(action, why)
            return
        self._dump = _Dump(action, memory, time.monotonic())
        self._is_begun = True
        self._tell_writers(memory, action)
        if not memory.is_small:
            self._scribe.leave_behind()  # its disk may be slow
        self._do(memory, lambda: memory.write_private(_Pace(self._scribe, self._advance)))

    def _lack(self, memory: MemoryDump) -> str:
        """Why the memory has no room for it: the kernel would kill ranks. Empty: it has."""
        sizes = self._answers.frozen
        gone = len(self._spec.ranks_here) - len(sizes)
        wanted = needed(*max(sizes.values(), default=(0, 0)), memory.private_nbytes, gone)
        return shortage(wanted, free_bytes())

    def _do(
        self,
        draft: DiskDump | MemoryDump | MemoryFlush,
        job: Callable[[], T],
        done: Callable[[T | Exception], object] = lambda _: None,
    ) -> None:
        """Do it in the scribe's thread, unless it is done sooner than that would begin."""
        if not (isinstance(draft, MemoryDump) and draft.is_small):
            self._scribe.do(job, done)
            return
        try:
            result: T | Exception = job()
        except Exception as error:  # noqa: BLE001  as the scribe does
            result = error
        done(result)

    def _layout(
        self, action: do.SaveRanks, place: int, memory: MemoryDump | None = None
    ) -> DumpLayout | None:
        """The folder to save into, under its name; ``None``: the script names none."""
        writers, step, record_id = action.writers, action.step, self._spec.record_id
        if place:
            return DumpLayout.of_step(self._fallback, step, record_id)
        wish = self._greeting.breakpoint(writers) if action.is_raised else None
        if wish is not None:
            known = memory and memory.position
            position = known or self._pages.position(writers, step)
            if position is not None:  # without one there is no such name
                return CheckpointLayout(*wish, *position, record_id, is_breakpoint=True).place
        folder = self._greeting.place(writers)
        return DumpLayout.of_step(Path(folder), step, record_id) if folder else None

    def _lose_patience(self, dump: _Dump) -> None:
        """Before the writers are blamed, who have not even been told."""
        if self._dump is dump and not self._is_begun and self._order is not None:
            why = f"no folder can be made within {self._spec.dump.stall_s / 2:g} s"
            assert isinstance(dump.draft, DiskDump)
            self._fail(self._order, f"{why}: {dump.draft.layout.folder.parent}")

    def _on_begun(self, dump: _Dump, done: Exception | None) -> None:
        if self._dump is not dump or self._order is None:
            return
        draft = dump.draft
        assert isinstance(draft, DiskDump)
        if done is not None:
            self._fail(self._order, _words(done))
            return
        self._is_begun = True
        self._tell_writers(draft, self._order)
        pace = _Pace(self._scribe, self._advance)
        self._scribe.do(lambda: draft.write_private(pace), lambda _: None)

    def _advance(self) -> None:
        if self._order is not None:
            self._post(ev.DumpProgressed(self._order.writers[0], self._order.dump_id))

    def _note(self, trouble: str) -> None:
        self._trouble = trouble

    def _fail(self, action: do.SaveRanks, why: str) -> None:
        self._trouble = why
        self._post(ev.SaveFailed(action.writers[0], action.dump_id, why, True, action.round))

    def _tell_writers(
        self, draft: DiskDump | MemoryDump | MemoryFlush, action: do.SaveRanks
    ) -> None:
        assert not isinstance(draft, MemoryFlush)
        parts, is_quick = len(action.writers), draft.is_quick
        try:
            places = [draft.place_of(rank) for rank in action.writers]
        except OSError as error:  # no descriptor is left
            self._fail(action, _words(error))
            return
        for part, (rank, place) in enumerate(zip(action.writers, places, strict=True)):
            about = action.dump_id, action.step, place, part, parts, is_quick
            self._tell(rank, action.round, protocol.Save(*about))

    def _tell(self, rank: int, number: int, order: protocol.Save) -> None:
        self._answers.owe(rank, number, is_quick=order.is_quick)
        self._links.send(rank, order)

    def commit(self, action: do.CommitDump) -> None:
        """Complete the dump; answered by exactly one DumpCommitted or CommitFailed."""
        if action.from_memory:
            self._write_down(action)
            return
        dump = self._dump
        if dump is None or isinstance(dump.draft, MemoryFlush):
            self._post(ev.CommitFailed(action.dump_id, "it was given up", is_place=False))
            return
        draft, began_s = dump.draft, time.monotonic()
        order = DumpOrder(
            written=dict(self._answers.written),
            variants=action.variants,
            odd=action.odd,
            world_size=self._spec.world_size,
            attempt=self._attempt,
            record_id=self._spec.record_id,
            reason=self._why,
        )
        self._do(
            draft,
            lambda: draft.commit(order),
            lambda done: self._on_committed(dump, action, began_s, done),
        )

    def _write_down(self, action: do.CommitDump) -> None:
        """To a folder, what is in memory: nobody else is needed."""
        self.abandon()
        kept = self._kept
        if kept is None:
            why = "there is no checkpoint in memory"
            self._post(ev.CommitFailed(action.dump_id, why, is_place=False))
            return
        layout = self._layout(kept.action, action.place, kept.memory)
        if layout is None:
            why = self._trouble = "the script names no ckpt_save_path"
            self._post(ev.CommitFailed(action.dump_id, why, is_place=True))
            return
        try:
            draft = MemoryFlush(kept.memory, layout)
        except OSError as error:
            self._post(ev.CommitFailed(action.dump_id, _words(error), is_place=False))
            return
        began_s = time.monotonic()
        dump = self._dump = _Dump(kept.action, draft, began_s)
        progress = ev.DumpProgressed(kept.action.writers[0], action.dump_id)
        pace = _Pace(self._scribe, lambda: self._post(progress))
        self._scribe.do(
            lambda: draft.write(pace),
            lambda done: self._on_committed(dump, action, began_s, done),
        )

    def _on_committed(
        self, dump: _Dump, action: do.CommitDump, began_s: float, done: SavedDump | Exception
    ) -> None:
        is_gone = self._dump is not dump
        if is_gone and isinstance(dump.draft, MemoryDump):
            done = AbandonedError("it was given up")  # and its memory is free
        if isinstance(done, Exception):
            is_place = isinstance(done, OSError)
            self._trouble = _words(done)
            self._post(ev.CommitFailed(action.dump_id, _words(done), is_place))
            return
        if not is_gone:
            self._dump = None
        if isinstance(dump.draft, MemoryDump):
            self._keep(_Kept(dump.action, dump.draft))
        now_s = time.monotonic()
        since_s = began_s if action.from_memory else self._frozen_s or began_s
        trouble = self._trouble if action.place > 0 else ""
        for sentence in dump_summary(action, done, now_s - since_s, trouble):
            self._say(sentence)
        self._post(
            ev.DumpCommitted(
                action.dump_id,
                done.path,
                nbytes=done.nbytes,
                write_s=round(began_s - dump.began_s, 4),
                commit_s=round(now_s - began_s, 4),
            )
        )

    def _keep(self, kept: _Kept) -> None:
        if self._kept is not None:
            self._kept.memory.close()
        self._kept = kept

    def forget(self) -> None:
        """Free the checkpoint in memory; nobody will be told of it, or writes to one given up."""
        if self._kept is not None:
            self._kept.memory.close()
            self._kept = None
        for memory in self._spent:
            memory.close()
        self._spent.clear()

    def abandon(self) -> None:
        """Give up the dump under way, if any, and remove what was written of it."""
        self._order = None
        if self._dump is not None:
            draft, self._dump = self._dump.draft, None
            draft.abandon()
            self._do(draft, draft.remove)
            if isinstance(draft, MemoryDump):
                self._spent.append(draft)
            else:
                self._scribe.leave_behind()  # its disk may answer no more

    def hear(self, answer: Answer) -> None:
        """A rank answers."""
        self._answers.hear(answer)


class _Pace:
    """Tells of progress now and then; called in the scribe's thread."""

    def __init__(self, scribe: FileThread, tell: Callable[[], None]) -> None:
        self._scribe = scribe
        self._tell = tell
        self._next_s = time.monotonic() + PROGRESS_S

    def __call__(self, _nbytes: int) -> None:
        if time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + PROGRESS_S
            self._scribe.tell(self._tell)


def _is_quick(action: do.SaveRanks) -> bool:
    return action.place == do.MEMORY


def _place(action: do.SaveRanks) -> tuple[int, int, int]:
    return action.dump_id, action.step, action.place


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return repr(error)
