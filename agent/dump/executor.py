"""Carries out a dump that was decided: orders to the ranks, their answers as events, the commit.

A dump goes to a folder or, so that only the lost ranks need to be started again, to the agent's
memory; a dump in memory may be written to a folder later. Where it goes is chosen in ``_target``
and nowhere else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from agent.controller import actions as do
from agent.controller import events as ev
from agent.dump.beside import RestartMemory, WrittenBeside
from agent.dump.copies import MemoryCopies
from agent.dump.draft import DumpDraft, DumpOrder, KeptSource, private_nbytes, state_nbytes
from agent.dump.flush import Elsewhere, MemoryFlush, Written
from agent.dump.folder import FolderTarget
from agent.dump.memory import MemoryTarget
from agent.dump.old_dumps import remove_old
from agent.dump.replies import Answer, Replies
from agent.dump.room import needed
from agent.dump.summary import dump_summary
from agent.dump.target import (
    AbandonedError,
    LostStateError,
    OtherNodes,
    SavedDump,
    Target,
)
from agent.hooks.handshake import Handshake
from agent.hooks.rank_links import RankLinks
from agent.hooks.services import Services
from agent.hooks.status_pages import StatusPages
from agent.ranks.parts import Parts, seated
from agent.spec.job_spec import JobSpec
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import CheckpointLayout, DumpLayout
from worker_hooks.contract.status_page import Page
from worker_hooks.storage.durable_file import ThrottledProgress
from worker_hooks.storage.late_entries import UnknownStateError
from worker_hooks.storage.manifest import Manifest
from worker_hooks.storage.one_state import IncompleteStateError

T = TypeVar("T")

NO_PLACE = "the script names no ckpt_save_path"


class _Dump(NamedTuple):
    """A dump in one place, under way or complete."""

    action: do.SaveRanks  # the first order
    target: Target
    draft: DumpDraft | None  # None: nobody writes, a dump in memory goes to a folder
    began_s: float  # monotonic


class _InMemory(NamedTuple):
    """A complete checkpoint in memory that is to go to a folder."""

    action: do.SaveRanks  # that it is of
    manifest: Manifest  # of the files here
    position: tuple[int, int] | None
    elsewhere: Manifest | None = None  # of files of other nodes; None: there are none
    files: int = 0  # the number of their set there


class DumpExecutor:
    """Carries out dumps, one at a time."""

    def __init__(
        self,
        spec: JobSpec,
        fallback: Path,
        links: RankLinks,
        pages: StatusPages,
        handshake: Handshake,
        services: Services,
    ) -> None:
        """Take the parts.

        ``fallback``: where dumps go when the script's folder cannot be written.
        """
        self._spec = spec
        self._ranks = tuple(range(spec.world_size))
        self._fallback = fallback
        self._links = links
        self._pages = pages
        self._handshake = handshake
        self._services = services
        self.copies = MemoryCopies(spec, links, pages, services)
        self._post = services.post
        self._file_thread = services.files
        self._attempt = 0
        self._dump_id = -1
        self._dump: _Dump | None = None
        self._is_begun = False  # ranks may write to the target
        self._frozen_s: float | None = None  # monotonic: the order to freeze; or all stood still
        self._failure = ""  # that the dump answers
        self._place_trouble = ""  # with the place that was tried last
        self._order: do.SaveRanks | None = None  # the newest
        self._kept: _Dump | None = None  # the complete dump in memory
        self._abandoned: list[Target] = []  # ranks may still look for their files there
        self.beside = RestartMemory()
        self.kept: KeptSource | None = None  # what killed ranks have left
        self.others: OtherNodes | None = None
        """What other nodes do; ``None``: there are none."""
        self._replies = Replies(links, services.post, self._note_trouble)

    def begin(self, attempt: int) -> None:
        """An attempt begins."""
        self._attempt = attempt
        self.copies.begin(attempt)

    # --- what is decided ------------------------------------------------------------------------

    def hold(self, action: do.HoldRanks) -> None:
        """Order ranks to stop at the end of their step."""
        self._open(action)
        self._links.send_all(action.ranks, protocol.Hold(action.dump_id))

    def proceed(self) -> None:
        """Held ranks are ordered to train to the end of one step."""
        self._frozen_s = None  # how long they train until then is not the dump's time

    def _open(self, action: do.HoldRanks | do.FreezeRanks) -> None:
        if action.dump_id != self._dump_id:
            self._dump_id = action.dump_id
            self._frozen_s = time.monotonic()
            self._failure = action.reason
            self._replies.begin(action.dump_id)

    def freeze(self, action: do.FreezeRanks) -> None:
        """Order ranks to begin no update; those that froze too early may go on a little."""
        self._open(action)
        committed = [self._pages.newest_step(rank) or 0 for rank in self._ranks]
        newest = max(*committed, action.step)  # a step that lacks only its commit is on no page
        order = protocol.Freeze(action.dump_id, self._spec.dump.update_grace_s, newest)
        self._links.send_all(action.ranks, order)

    def save(self, action: do.SaveRanks) -> None:
        """Order ranks to digest now, and to write once the place is ready."""
        if self._frozen_s is None:
            self._frozen_s = time.monotonic()
        self._replies.ask_digesters(action, self._parts(action))
        present = self._dump
        if present is not None and _place(present.action) == _place(action):
            self._order = action
            if self._is_begun:
                self._send_writers(present.target, action)
            return
        self.abandon()
        self._order = action
        self._is_begun = False
        pages = self._pages.all()
        target = self._target(action, pages)
        if target is None:
            self._fail(action, NO_PLACE)
            return
        draft = DumpDraft(target, action.step, self._ranks, pages)
        dump = self._dump = _Dump(action, target, draft, time.monotonic())
        self._file_thread.continue_in_new_thread()  # the disk of an earlier job may be slow
        self._do(target, target.begin, lambda done: self._on_begun(dump, draft, done))
        if not self._is_begun:
            self._services.loop.call_later(self._spec.dump.stall_s / 2, self._check_begun, dump)

    def _target(self, action: do.SaveRanks, pages: Mapping[int, Page]) -> Target | None:
        """Where a dump goes; ``None``: the script names no folder."""
        if action.place == do.MEMORY:
            sizes, private = self._replies.frozen, private_nbytes(pages)
            _, host = max(sizes.values(), default=(0, 0))
            state = state_nbytes(self._written_here(action), self._parts(action), sizes)
            gone = len(self._ranks) - len(sizes)
            held = 0 if self.kept is None else self.kept.held_nbytes()
            wanted = needed(state=state, host=host, private=private, gone=gone, held=held)
            return MemoryTarget(action.step, private_nbytes=private, needed_nbytes=wanted)
        return self._folder(action, action.place)

    def _written_here(self, action: do.SaveRanks) -> do.SaveRanks:
        """Without what stays in the memory of other nodes."""
        if self.others is None:
            return action
        stays, owners = self.others.stays, self._parts(action).owner_of
        groups = action.groups or (action.writers,)
        here = tuple(group for group in groups if len(group) != 1 or not stays(*owners(group[0])))
        if len(here) == len(groups):
            return action
        return replace(action, groups=here or ((),))

    def _folder(
        self, action: do.SaveRanks, place: int, position: tuple[int, int] | None = None
    ) -> FolderTarget | None:
        """The folder to save into; ``position`` of the step, if it is known without the pages."""
        writers, step = self._parts(action).ranks_of(action.writers), action.step
        record_id = self._spec.saves_as
        lineage = self._handshake.lineage
        if place:
            return FolderTarget(DumpLayout.of_step(self._fallback, step, record_id), lineage)
        wanted = self._handshake.breakpoint(writers) if action.is_raised else None
        if wanted is not None:
            position = position or self._pages.position(writers, step)
            if position is not None:  # without one there is no such name
                directory, prefix = wanted
                epoch, batch = position
                layout = CheckpointLayout(
                    directory, prefix, epoch, batch, record_id=record_id, is_breakpoint=True
                )
                return FolderTarget(layout.place, lineage)
        folder = self._handshake.place(writers)
        if not folder:
            return None
        return FolderTarget(DumpLayout.of_step(Path(folder), step, record_id), lineage)

    def _do(
        self,
        target: Target,
        job: Callable[[], T],
        done: Callable[[T | Exception], object] = lambda _: None,
    ) -> None:
        """Do file work in its thread, or at once if a thread would only delay it."""
        if not target.is_inline:
            self._file_thread.do(job, done)
            return
        try:
            result: T | Exception = job()
        except Exception as error:  # noqa: BLE001  as the file thread does
            result = error
        done(result)

    def _check_begun(self, dump: _Dump) -> None:
        """Blame the place before the writers are blamed: they have no order yet."""
        if self._dump is dump and not self._is_begun and self._order is not None:
            why = f"nothing can be written within {self._spec.dump.stall_s / 2:g} s"
            self._fail(self._order, f"{why}: {dump.target.name}")

    def _on_begun(self, dump: _Dump, draft: DumpDraft, failure: Exception | None) -> None:
        if self._dump is not dump or self._order is None:
            return
        if failure is not None:
            self._dump = None
            self._fail(self._order, _describe(failure))
            return
        self._is_begun = True
        self._send_writers(dump.target, self._order)
        progress = self._progress(self._on_progress)
        self._do(dump.target, lambda: draft.write_private(progress))

    def _progress(self, tell: Callable[[], None]) -> ThrottledProgress:
        """An ``advance`` for file work; ``tell`` is called in the loop."""
        return ThrottledProgress(lambda _: self._file_thread.tell(tell))

    def _on_progress(self) -> None:
        if self._order is not None:
            self._post(ev.DumpProgressed(self._order.dump_id))

    def _note_trouble(self, why: str) -> None:
        self._place_trouble = why

    def _fail(self, action: do.SaveRanks, why: str) -> None:
        """Answer for a writer that gets no order, because there is no place to write to."""
        self._place_trouble = why
        rank, share = self._parts(action).owner_of(action.writers[0])
        failed = protocol.SaveFailed(rank, self._attempt, action.dump_id, why, is_place=True)
        self._post(failed._replace(round=action.round, share=share))

    def _send_writers(self, target: Target, action: do.SaveRanks) -> None:
        parts = self._parts(action)
        try:
            places = [target.place_of(*parts.owner_of(seat)) for seat in action.writers]
        except OSError as error:  # no descriptor is left
            self._fail(action, _describe(error))
            return
        self._replies.ask_writers(action, parts, places)

    def _parts(self, action: do.SaveRanks) -> Parts:
        """What the seats of an action are in."""
        return seated(len(self._ranks), action.parts) if action.parts else Parts()

    def commit(self, action: do.CommitDump) -> None:
        """Complete the dump; answered by exactly one DumpCommitted or CommitFailed."""
        if action.is_kept and (self._kept is None or self._kept.action.dump_id != action.dump_id):
            self._read_kept(action)
            return
        if action.from_memory:
            self._flush(action)
            return
        dump = self._dump
        if dump is None or (draft := dump.draft) is None:
            self._post(ev.CommitFailed(action.dump_id, str(AbandonedError()), is_place=False))
            return
        parts = self._parts(dump.action)
        written = {parts.seat(*who): each for who, each in self._replies.written.items()}
        order = self._order_of(action, written)
        began_s = time.monotonic()
        self._do(
            dump.target,
            lambda: draft.commit(order),
            lambda done: self._on_committed(dump, action, began_s, done),
        )

    def _order_of(
        self, action: do.CommitDump, written: Mapping[int, protocol.Written]
    ) -> DumpOrder:
        return DumpOrder(
            written=written,
            variants=action.variants,
            odd=action.odd,
            world_size=self._spec.world_size,
            attempt=self._attempt,
            record_id=self._spec.saves_as,
            reason=self._failure,
            holders=action.holders,
            is_disputed=action.is_disputed,
        )

    def _read_kept(self, action: do.CommitDump) -> None:
        """Make a dump in memory of what killed ranks have left, then go on from there."""
        self.abandon()
        self._frozen_s = self._frozen_s or time.monotonic()
        kept = self.kept
        assert kept is not None
        reading = kept.reading(action, self._pages.all(), self._ranks)
        order = self._order_of(action, {})
        dump = self._dump = _Dump(reading.save, reading.target, reading.draft, time.monotonic())
        progress = self._progress(lambda: self._post(ev.DumpProgressed(action.dump_id)))

        def done(result: SavedDump | Exception) -> None:
            if self._dump is not dump:
                return  # it was abandoned, and is closed with others
            self._dump = None
            if isinstance(result, Exception):  # a step before may lie there, too
                why = f"what killed ranks have left in memory cannot be read: {_describe(result)}"
                dump.target.close()
                self._post(ev.CommitFailed(action.dump_id, why, is_place=False, is_state=True))
                return
            kept.drop_dead()
            self._keep(dump)
            self._flush(action)

        self._file_thread.continue_in_new_thread()
        self._file_thread.do(lambda: reading.run(order, progress), done)

    def _flush(self, action: do.CommitDump) -> None:
        """Write the dump in memory to a folder: no rank is needed."""
        self.abandon()
        kept = self._copied(action) if action.is_copy else self._remembered()
        if kept is None:
            why = "there is no checkpoint in memory"
            self._post(ev.CommitFailed(action.dump_id, why, is_place=False))
            return
        target = self._folder(kept.action, action.place, kept.position)
        if target is None:
            self._place_trouble = NO_PLACE
            self._post(ev.CommitFailed(action.dump_id, NO_PLACE, is_place=True))
            return
        if action.is_early:
            self._begin_beside(action, kept, target)
            return
        try:
            flush = MemoryFlush(kept.manifest, target, self._elsewhere(action, kept, target))
        except OSError as error:
            self._post(ev.CommitFailed(action.dump_id, _describe(error), is_place=False))
            return
        began_s = time.monotonic()
        dump = self._dump = _Dump(kept.action, target, None, began_s)
        event = ev.DumpProgressed(action.dump_id)
        progress = self._progress(lambda: self._post(event))
        flush.start(
            partial(self._do, target),
            progress,
            lambda done: self._on_committed(dump, action, began_s, done),
        )

    def _begin_beside(self, action: do.CommitDump, kept: _InMemory, target: FolderTarget) -> None:
        """All ranks restart from memory; it is written meanwhile, by no dump's leave."""
        began_s, places = time.monotonic(), range(action.place + 1, self._spec.dump.places)
        others = (self._folder(kept.action, place, kept.position) for place in places)
        try:
            beside = WrittenBeside(kept.manifest, [target, *filter(None, others)])
        except OSError as error:
            self._post(ev.CommitFailed(action.dump_id, _describe(error), is_place=False))
            return
        self.beside.begin(beside)
        self._file_thread.continue_in_new_thread()  # the next dump does not wait for this one
        self._file_thread.do(
            lambda: beside.write(lambda _: None),
            lambda done: self._on_written(beside, action, began_s, done),
        )
        self._post(ev.DumpCommitted(action.dump_id, beside.folder, is_early=True))

    def _on_written(
        self,
        beside: WrittenBeside,
        action: do.CommitDump,
        began_s: float,
        done: SavedDump | Exception,
    ) -> None:
        if isinstance(done, Exception):
            why = _describe(done)
            self._services.say(
                f"step {action.step} is not saved: {why}; it stays in msrun's memory, from which "
                "all ranks restart, as long as msrun lives"
            )
            beside.is_lost = True
            written = ev.CheckpointWritten(action.dump_id, action.step, beside.folder, why)
        else:
            seconds = time.monotonic() - began_s
            for sentence in dump_summary(action, done, seconds, beside.trouble):
                self._services.say(sentence)
            written = ev.CheckpointWritten(action.dump_id, action.step, done.path)
            self._handshake.complete(done.path, action.step)
            self._remove_old(Path(done.path))
            beside.is_written = True
        self.beside.free()
        self._post(written)

    def close(self) -> None:
        """The job is over: what is being written gets the time for it."""
        self.beside.close(self._services.say, self._spec.dump.stall_s)

    def _elsewhere(
        self, action: do.CommitDump, kept: _InMemory, target: FolderTarget
    ) -> Elsewhere | None:
        """What writes the files that other nodes have; ``None``: they have none."""
        others, far, manifest = self.others, kept.elsewhere, kept.manifest
        if others is None:
            return None
        if far is not None:
            folder = str(target.layout.folder)
            return partial(others.gather, action.dump_id, kept.files, far, folder)
        if not manifest.absent:
            return None
        write = others.collect(manifest)
        progress = self._progress(lambda: self._post(ev.DumpProgressed(action.dump_id)))

        def elsewhere(done: Callable[[Written], None]) -> None:
            self._file_thread.continue_in_new_thread()  # beside what is in this node's memory
            self._file_thread.do(lambda: write(target, progress), done)

        return elsewhere

    def _remembered(self) -> _InMemory | None:
        """The dump in memory."""
        kept = self._kept
        if kept is None or kept.draft is None or kept.draft.manifest is None:
            return None
        return _InMemory(kept.action, kept.draft.manifest, kept.draft.position)

    def _copied(self, action: do.CommitDump) -> _InMemory | None:
        """The newest copy."""
        found = self.copies.newest(action.step, self._failure)
        if found is None:
            return None
        manifest, elsewhere, files = found
        self._frozen_s = self._frozen_s or time.monotonic()
        save = do.SaveRanks(
            action.dump_id, action.step, action.variants[0], (), action.place, action.reason
        )
        position = manifest.epoch + 1, manifest.batch
        return _InMemory(save, manifest, position, elsewhere, files)

    def _on_committed(
        self, dump: _Dump, action: do.CommitDump, began_s: float, done: SavedDump | Exception
    ) -> None:
        if not isinstance(done, Exception) and not dump.target.is_complete:
            done = AbandonedError()  # while the commit was under way
        if isinstance(done, Exception):
            is_place = isinstance(done, OSError)
            self._place_trouble = _describe(done)
            is_state = isinstance(done, UnknownStateError | IncompleteStateError)
            self._post(ev.CommitFailed(action.dump_id, _describe(done), is_place, is_state))
            return
        if action.place == do.MEMORY and self.others is not None and dump.draft is not None:
            manifest = dump.draft.manifest
            assert manifest is not None
            self.others.spread(
                action.dump_id,
                done.path,
                manifest,
                lambda why: self._on_spread(dump, action, began_s, done, why),
            )
            return
        self._tell_committed(dump, action, began_s, done)

    def _on_spread(
        self, dump: _Dump, action: do.CommitDump, began_s: float, done: SavedDump, why: str
    ) -> None:
        if not dump.target.is_complete:
            why = str(AbandonedError())
        if why:
            self._post(ev.CommitFailed(action.dump_id, why, is_place=True))
            return
        self._tell_committed(dump, action, began_s, done)

    def _tell_committed(
        self, dump: _Dump, action: do.CommitDump, began_s: float, done: SavedDump
    ) -> None:
        if self._dump is dump:
            self._dump = None
        if action.place == do.MEMORY:
            self._keep(dump)
        now_s = time.monotonic()
        since_s = began_s if action.from_memory else self._frozen_s or began_s
        trouble = self._place_trouble if action.place > 0 else ""
        ranks_of = self._parts(dump.action).ranks_of
        wrote = replace(action, variants=tuple(map(ranks_of, action.variants)))
        for sentence in dump_summary(wrote, done, now_s - since_s, trouble):
            self._services.say(sentence)
        self._post(
            ev.DumpCommitted(
                action.dump_id,
                done.path,
                nbytes=done.nbytes,
                write_s=round(began_s - dump.began_s, 4),
                commit_s=round(now_s - began_s, 4),
                stale=tuple(done.stale_private),
            )
        )
        if action.place != do.MEMORY:
            self._handshake.complete(done.path, action.step)
            self._remove_old(Path(done.path))

    def _remove_old(self, newest: Path) -> None:
        """Make room for the next dump; the checkpoint that ranks are resuming from stays."""
        keep, until = self._spec.dump.keep, self._handshake.resumed_step
        runs = (self._spec.saves_as, *self._handshake.lineage)
        spared = {Path(path) for path in (self._handshake.resumed,) if path}

        def told(why: str | Exception) -> None:
            if why:
                self._services.say(str(why))

        self._file_thread.do(lambda: remove_old(newest, keep, runs, until, spared), told)

    def _keep(self, kept: _Dump | None) -> None:
        if self._kept is not None:
            self._kept.target.close()
        self._kept = kept

    def forget(self) -> None:
        """Free the dump in memory; no rank will be sent there, or writes to an abandoned one."""
        self._keep(None)
        if self.kept is not None:
            self.kept.free_replaced()
        for target in self._abandoned:
            target.close()
        self._abandoned.clear()

    def abandon(self) -> None:
        """Abandon the dump under way, if any, and remove what was written of it."""
        self._order = None
        if self._dump is not None:
            target, self._dump = self._dump.target, None
            target.abandon()
            self._do(target, target.remove)
            self._abandoned.append(target)
            self._file_thread.continue_in_new_thread()  # the disk may no longer answer

    def take(self, dump_id: int, path: str, file: int, *, is_cut: bool) -> None:
        """What a rank of another node has written to memory is here.

        Paths are used again by later dumps. ``is_cut``: it may be the header alone.
        """
        is_present = self._dump is not None and self._dump.action.dump_id == dump_id
        target = self._dump.target if self._dump is not None and is_present else None
        if not (isinstance(target, MemoryTarget) and target.take(path, file, is_cut=is_cut)):
            os.close(file)

    def hear(self, answer: Answer) -> None:
        """A rank answers."""
        self._replies.hear(answer)


def _place(action: do.SaveRanks) -> tuple[int, int, int]:
    return action.dump_id, action.step, action.place


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return describe_os_error(error)
    sentences = AbandonedError | LostStateError | UnknownStateError | IncompleteStateError
    is_sentence = isinstance(error, sentences)
    return str(error) if is_sentence else repr(error)
