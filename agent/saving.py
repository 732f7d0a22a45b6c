"""Carries out a dump that was decided: orders to the ranks, their answers as events, the commit."""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from agent import actions as do
from agent import events as ev
from agent.announcement import sentences
from agent.dump import Draft, Order, Saved
from agent.greeting import Greeting
from agent.links import Links
from agent.pages import Pages
from agent.scribe import Scribe
from agent.spec import JobSpec
from worker_hooks import protocol
from worker_hooks.layout import CheckpointLayout, DumpLayout

PROGRESS_S = 0.5  # between two signs of life of the scribe
_FILE = re.compile(r"rank_(\d+)/[\w.-]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Answer = (
    protocol.Standing
    | protocol.Frozen
    | protocol.Written
    | protocol.Digested
    | protocol.SaveFailed
    | protocol.Progress
)


class _Dump(NamedTuple):
    """A dump under way in one place."""

    action: do.SaveRanks  # the first order
    draft: Draft
    began_s: float  # monotonic


class Saving:
    """At most one dump at a time."""

    def __init__(
        self,
        spec: JobSpec,
        fallback: Path,
        links: Links,
        pages: Pages,
        greeting: Greeting,
        scribe: Scribe,
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
        self._owed: defaultdict[int, deque[int]] = defaultdict(deque)  # rank -> rounds to answer
        self._written: dict[int, protocol.Written] = {}

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
            self._owed.clear()
            self._written.clear()

    def freeze(self, action: do.FreezeRanks) -> None:
        """Order ranks to begin no update."""
        self._open(action)
        for rank in action.ranks:
            grace_s = self._spec.dump.update_grace_s
            self._links.send(rank, protocol.Freeze(action.dump_id, grace_s))

    def save(self, action: do.SaveRanks) -> None:
        """Order ranks to digest now, and to write once the folder is there."""
        if self._frozen_s is None:
            self._frozen_s = time.monotonic()
        for rank in action.digesters:
            self._tell(rank, action.round, protocol.Save(action.dump_id, action.step, ""))
        dump = self._dump
        if dump is not None and _place(dump.action) == _place(action):
            self._order = action
            if self._is_begun:
                self._tell_writers(dump.draft, action)
            return
        self.abandon()
        self._order = action
        layout = self._layout(action)
        if layout is None:
            self._fail(action, "the script names no ckpt_save_path")
            return
        draft = Draft(layout, action.step, self._spec.ranks_here, self._pages.all())
        self._is_begun = False
        begun = self._dump = _Dump(action, draft, time.monotonic())
        self._scribe.do(draft.begin, lambda done: self._on_begun(begun, done))
        self._call_later(self._spec.dump.stall_s / 2, self._lose_patience, begun)

    def _layout(self, action: do.SaveRanks) -> DumpLayout | None:
        """The folder to save into, under its name; ``None``: the script names none."""
        writers, step, record_id = action.writers, action.step, self._spec.record_id
        if action.place:
            return DumpLayout.of_step(self._fallback, step, record_id)
        wish = self._greeting.breakpoint(writers) if action.is_raised else None
        # without a position there is no such name
        if wish is not None and (position := self._pages.position(writers, step)) is not None:
            return CheckpointLayout(*wish, *position, record_id, is_breakpoint=True).place
        place = self._greeting.place(writers)
        return DumpLayout.of_step(Path(place), step, record_id) if place else None

    def _lose_patience(self, dump: _Dump) -> None:
        """Before the writers are blamed, who have not even been told."""
        if self._dump is dump and not self._is_begun and self._order is not None:
            why = f"no folder can be made within {self._spec.dump.stall_s / 2:g} s"
            self._fail(self._order, f"{why}: {dump.draft.layout.folder.parent}")

    def _on_begun(self, dump: _Dump, done: Exception | None) -> None:
        if self._dump is not dump or self._order is None:
            return
        if done is not None:
            self._fail(self._order, _words(done))
            return
        self._is_begun = True
        self._tell_writers(dump.draft, self._order)
        pace = _Pace(self._scribe, self._advance)
        self._scribe.do(lambda: dump.draft.write_private(pace), lambda _: None)

    def _advance(self) -> None:
        if self._order is not None:
            self._post(ev.DumpProgressed(self._order.writers[0], self._order.dump_id))

    def _fail(self, action: do.SaveRanks, why: str) -> None:
        self._trouble = why
        self._post(ev.SaveFailed(action.writers[0], action.dump_id, why, True, action.round))

    def _tell_writers(self, draft: Draft, action: do.SaveRanks) -> None:
        folder, parts = str(draft.layout.unfinished), len(action.writers)
        for part, rank in enumerate(action.writers):
            order = protocol.Save(action.dump_id, action.step, folder, part, parts)
            self._tell(rank, action.round, order)

    def _tell(self, rank: int, number: int, order: protocol.Save) -> None:
        self._owed[rank].append(number)
        self._links.send(rank, order)

    def commit(self, action: do.CommitDump) -> None:
        """Complete the dump; answered by exactly one DumpCommitted or CommitFailed."""
        dump = self._dump
        if dump is None:
            self._post(ev.CommitFailed(action.dump_id, "it was given up", is_place=False))
            return
        order = Order(
            written=dict(self._written),
            variants=action.variants,
            odd=action.odd,
            world_size=self._spec.world_size,
            attempt=self._attempt,
            record_id=self._spec.record_id,
            reason=self._why,
        )
        began_s = time.monotonic()
        self._scribe.do(
            lambda: dump.draft.commit(order),
            lambda done: self._on_committed(dump, action, began_s, done),
        )

    def _on_committed(
        self, dump: _Dump, action: do.CommitDump, began_s: float, done: Saved | Exception
    ) -> None:
        if isinstance(done, Exception):
            is_place = isinstance(done, OSError)
            self._trouble = _words(done)
            self._post(ev.CommitFailed(action.dump_id, _words(done), is_place))
            return
        if self._dump is dump:
            self._dump = None
        now_s = time.monotonic()
        trouble = self._trouble if action.place else ""
        for sentence in sentences(action, done, now_s - (self._frozen_s or began_s), trouble):
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

    def abandon(self) -> None:
        """Give up the dump under way, if any, and remove what was written of it."""
        self._order = None
        if self._dump is not None:
            draft, self._dump = self._dump.draft, None
            draft.abandon()
            self._scribe.do(draft.remove, lambda _: None)
            self._scribe.leave_behind()  # its disk may answer no more

    # --- what ranks answer ----------------------------------------------------------------------

    def hear(self, answer: Answer) -> None:
        """Turn an answer into an event, if it is of the present dump.

        A rank answers its orders to save one after the other, each once.
        """
        if answer.dump_id != self._dump_id:
            return
        match answer:
            case protocol.Standing(rank, _, dump_id, step):
                self._post(ev.RankStanding(rank, dump_id, step))
            case protocol.Frozen(rank, _, dump_id, step, is_whole, why):
                self._post(ev.RankFrozen(rank, dump_id, step, is_whole, _clean(why)))
            case protocol.Progress(rank, _, dump_id):
                self._post(ev.DumpProgressed(rank, dump_id))
            case _ if not self._owed[answer.rank]:
                self._links.drop(answer.rank, f"nobody asked: {answer}"[:300])
            case protocol.Written():
                self._on_written(answer, self._owed[answer.rank].popleft())
            case protocol.Digested(rank, _, dump_id, digest):
                self._owed[rank].popleft()
                self._post(ev.StateDigested(rank, dump_id, digest))
            case protocol.SaveFailed(rank, _, dump_id, why, is_place):
                number = self._owed[rank].popleft()
                self._trouble = _clean(why) if is_place else self._trouble
                self._post(ev.SaveFailed(rank, dump_id, _clean(why), is_place, number))

    def _on_written(self, written: protocol.Written, number: int) -> None:
        file = _FILE.fullmatch(written.file)
        is_ours = file is not None and int(file[1]) == written.rank
        if not is_ours or not _SHA256.fullmatch(written.sha256) or written.nbytes < 0:
            self._links.drop(written.rank, f"it wrote what cannot be: {written}"[:300])
            return
        self._written[written.rank] = written
        self._post(ev.ShardWritten(written.rank, written.dump_id, written.digest, number))


class _Pace:
    """Tells of progress now and then; called in the scribe's thread."""

    def __init__(self, scribe: Scribe, tell: Callable[[], None]) -> None:
        self._scribe = scribe
        self._tell = tell
        self._next_s = time.monotonic() + PROGRESS_S

    def __call__(self, _nbytes: int) -> None:
        if time.monotonic() > self._next_s:
            self._next_s = time.monotonic() + PROGRESS_S
            self._scribe.tell(self._tell)


def _place(action: do.SaveRanks) -> tuple[int, int, int]:
    return action.dump_id, action.step, action.place


def _clean(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may spell and no stream can encode."""
    return text.encode(errors="replace").decode()


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror or error}{where}"
    return repr(error)
