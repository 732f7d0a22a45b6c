"""The hooks of the ranks of one node, where the controller is on another one.

What ranks say is handed on to the controller's node, and what that answers to them. Status pages
stay here; what is new on them is told before what a rank says of it, when it has ended, and now and
then.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import Any

from agent.controller import actions as do
from agent.controller.states import JobState
from agent.dump.node_copies import NodeCopies
from agent.hooks.node_clearance import NodeClearance
from agent.hooks.orphaned_pages import OrphanedPages
from agent.hooks.page_copies import MOST_SHOWN, TOO_LARGE, CopiedPages
from agent.hooks.peer_pages import RESEND_S, SharedPages
from agent.hooks.rank_links import Loop, RankLinks, Said
from agent.hooks.shared_folders import FolderMarks
from agent.hooks.standing_words import StandingWords
from agent.hooks.status_pages import StatusPages
from agent.machine.file_thread import FileThread
from agent.machine.process_use import ProcessNews
from agent.nodes.run_messages import (
    Beats,
    FolderMarked,
    ForHooks,
    FromRank,
    PageNews,
    PageSeen,
    PagesKept,
    PagesLeft,
    PagesTold,
    RankUnlinked,
    RunMessage,
    SaveFar,
    SaveHere,
    ToRank,
    ToRanks,
    UpdatesCleared,
    UpdatesReady,
    WriteCopy,
    pack_said,
    unpack_said,
)
from agent.records.journal import Journal
from agent.records.run_record import KeptRecord
from agent.spec.job_spec import JobSpec
from agent.spread.keeper import Brought
from agent.spread.node_writes import NodeWrites
from agent.supervisor.hooks_bridge import CLOSE_S, WRAPPER_S
from agent.supervisor.job_view import Action, AgentPort, Holders
from agent.text.wording import sized
from agent.workers.processes import is_exiting
from agent.workers.worker import Worker
from worker_hooks.contract import protocol
from worker_hooks.contract.left_pages import notes_folder
from worker_hooks.contract.status_page import Phase
from worker_hooks.storage.manifest import is_in_memory

CHANGED_BY = protocol.Frozen | protocol.Standing | protocol.Leaving
"""A rank says this once its page holds what matters."""

WAITS = protocol.Raised | protocol.Leaving | protocol.ExitRequested
ANSWERS = protocol.Release | protocol.Leave | protocol.Dismiss | protocol.Rejoin | protocol.Hold
"""What a rank has said when it waits, and what it waits for."""


class HooksRelay:
    """Has the methods of :class:`~agent.supervisor.hooks_bridge.HooksBridge`."""

    def __init__(
        self,
        spec: JobSpec,
        listener: socket.socket,
        journal: Journal,
        kept: KeptRecord,
        send: Callable[[RunMessage], None],
        writes: NodeWrites,
    ) -> None:
        """Take the parts; nothing is heard before :meth:`attach`.

        Args:
            journal: what is written about the run.
            kept: remembers where the run saves, for a resume that is begun on this node.
            writes: what ranks write to memory.
        """
        self.writes = writes
        """What ranks write to memory."""
        self._copied = NodeCopies(spec.ranks_here)
        self._frozen: dict[int, int] = {}  # rank -> bytes of its state
        self._links = RankLinks(listener, spec.ranks_here, journal)
        self._pages = StatusPages()
        self._shared = SharedPages(self._links, self._pages, spec.ranks_here)
        self._copies = CopiedPages(self._links, spec.ranks_here)
        self._orphaned = OrphanedPages(spec.job_id, self._pages, self._copies)
        self._clearance = NodeClearance(self._links, spec.ranks_here, spec.silence_s)
        self._send = send
        self._record = kept
        self._mark_name = f".msrun-{spec.job_id}-node-{spec.node_rank}"
        self._job_id = spec.job_id
        self._places: dict[int, tuple[str, ...]] = {}  # rank -> where it saves
        self._save_to: dict[int, str] = {}  # rank -> the first of these, without a controller
        self._attempt = 0
        self._large: set[int] = set()  # ranks whose page does not fit a frame, which was said
        self.ranks = spec.ranks_here
        """Those of this node."""
        self._may_save = spec.dump.ttp
        self._told: dict[int, bytes] = {}  # rank -> the heartbeat that was told last
        self._inspection = 0  # the newest one
        self._forsaken = ""  # why nobody decides any more
        self._words = StandingWords()
        self._greeted: set[int] = set()  # ranks that were welcomed
        self._halted: set[int] = set()  # ranks that wait for an order
        self._pending: dict[int, Said] = {}  # rank -> what it has said, and waits for the answer
        self._left: set[int] = set()  # ranks whose scripts have ended
        self._resume = ""  # the checkpoint that this attempt has resumed from
        self._alone: Callable[[Said], None] | None = None  # takes what nobody there can answer
        self.as_here: Callable[[protocol.Message], protocol.Message] = lambda message: message
        """What is said of the memory of the controller's node, of the copy on this one."""
        self.bring_memory: Callable[[int, Collection[int], Brought], None]
        """Fetches tensors of that copy; takes an inode of it, the states, and who hears of it."""
        self._is_brief = False  # the last controller's node is lost, with ranks
        self.meets_at = ""
        """Where ranks meet that rejoin others, if that is another machine than at the beginning."""

    def attach(self, loop: Loop, agent: AgentPort) -> None:
        """Listen on ``loop``."""
        self._loop = loop
        self._agent = agent
        self._files = FileThread(loop.call_soon_threadsafe)
        self._marks = FolderMarks(self._mark_name, self._files)
        self._links.attach(loop, self._on_message, self._on_lost)

    def begin(self, attempt: int, resume: str) -> None:
        """An attempt begins; ``resume``: the checkpoint that it resumes from, or empty."""
        self._attempt, self._resume = attempt, resume
        self._links.begin(attempt)
        self._marks.begin()

    def end_attempt(self) -> None:
        """Every rank is gone."""
        self._words.clear()
        self._greeted.clear()
        self._halted.clear()
        self._pending.clear()
        self._left.clear()
        self._is_brief = False
        self._links.end()
        self._pages.clear()
        self._copies.clear()
        self._clearance.close()
        self.writes.close()
        self._copied.close()

    def close(self) -> None:
        """The job is over."""
        self.writes.close()
        self._clearance.close()
        self._copied.close()
        self._links.close()
        self._files.close(CLOSE_S)
        self._marks.close()

    def expect(self, action: do.PrepareRanks) -> None:
        """These newcomers may say Hello before their attempt begins."""
        self._links.expect(action.attempt, action.ranks)

    def renew(self, action: do.ReplaceRanks, port: int) -> None:  # noqa: ARG002  Rejoin has it
        """Newcomers join the survivors of the last attempt."""
        self._attempt = action.attempt
        self._links.renew(action.attempt, action.survivors)
        self._clearance.close()
        if self._is_brief:  # all resume from what the lost node's ranks had, too
            self._is_brief = False
            self._copies.leave(self._loop)
        for rank in action.newcomers:
            self._words.drop(rank)
            self._greeted.discard(rank)
            self._halted.discard(rank)
            self._pending.pop(rank, None)
            self._pages.drop(rank)
            self._copies.drop(rank)
        self._links.admit()

    def act(self, action: Action) -> None:
        """What is said to ranks comes by :meth:`tell`."""

    def decided(self, state: JobState, holders: Holders) -> None:
        """Nothing is known here of what the ranks hold."""

    def watch(self, is_in_doubt: Callable[[], bool]) -> None:
        """Look at the line to the controller's node while ranks wait for it."""
        self._clearance.attach(
            self._loop.call_later,
            is_in_doubt,
            lambda step: self._send(UpdatesReady(self._attempt, step)),
        )

    def hear(self, message: ForHooks) -> None:
        """What the controller's node has for the hooks here."""
        match message:
            case ToRank():
                self.tell(message.rank, self.as_here(unpack_said(message.message)))
            case ToRanks():
                said = self.as_here(unpack_said(message.message))
                for rank in message.ranks or self.ranks:
                    self.tell(rank, said)
            case SaveFar() | SaveHere():
                self._save_to_memory(message)
            case UpdatesCleared():
                if message.attempt == self._attempt and not self._is_brief:
                    self._clearance.take(message)
            case PagesTold():
                self._send(PagesKept(message.attempt, message.step))
            case WriteCopy():
                self._copied.write(message, self._files, self._send)
            case PagesLeft():
                self._copies.leave(self._loop)
            case _:  # of a rank there
                self._copies.take(message, self._loop)

    def tell(  # noqa: C901, PLR0912  a row for each kind
        self, rank: int, message: protocol.Message
    ) -> None:
        """Hand a message on to a rank."""
        if isinstance(message, ANSWERS):
            self._pending.pop(rank, None)
        match message:
            case protocol.OpenVote():
                self._hand_board(rank, message, self._attempt)
                return
            case protocol.Copy():
                placed = self._copied.placed(rank, self._attempt, message)
                if isinstance(placed, protocol.Copied):
                    self._say(placed)
                    return
                message = placed
            case protocol.Save(is_quick=False):
                self.writes.free()  # nobody takes it from memory
            case protocol.Freeze():
                self._halted.add(rank)
                self._show(rank)
            case protocol.Welcome() if rank in self._greeted:
                return  # another controller answers what was said to the one before
            case protocol.Replicated() if self._is_brief:
                return  # it learns only now what the one before knew, and has told
            case protocol.Welcome():
                self._greeted.add(rank)
                if message.resume and not is_in_memory(Path(message.resume)):
                    self._resume = message.resume  # which the rank has asked for, or the job
            case protocol.Hold() | protocol.Rejoin():
                self._halted.add(rank)
                if self.meets_at and isinstance(message, protocol.Rejoin):
                    message = message._replace(host=self.meets_at)
            case protocol.GoOn() | protocol.Proceed():
                self._halted.discard(rank)
            case protocol.Inspect(id=inspection) if inspection != self._inspection:
                self._inspection = inspection
                self.tell_beats()  # what is known of the ranks there is a second old
            case _:
                pass
        self._links.send(rank, message)

    def _hand_board(self, rank: int, order: protocol.OpenVote, attempt: int) -> None:
        """Hand a rank the board of this node, once the kernel takes the descriptor."""
        if attempt == self._attempt and not self._clearance.hand(rank, order):
            self._loop.call_later(RESEND_S, self._hand_board, rank, order, attempt)

    def _save_to_memory(self, order: SaveFar | SaveHere) -> None:
        """Have ranks write to this node's memory."""
        for rank, said in self.writes.orders(order, self._attempt, self._frozen):
            if isinstance(said, protocol.Save):
                self.tell(rank, said)
            else:
                self._say(said)

    @property
    def are_calm(self) -> bool:
        """Whether no rank waits for the controller, but to be let go at its end."""
        return self._wait_but_for(protocol.Leaving)

    @property
    def may_wait(self) -> bool:
        """The same if another controller is there at once: who has raised holds its state."""
        return self._wait_but_for(protocol.Leaving | protocol.Raised)

    def _wait_but_for(self, kinds: Any) -> bool:
        is_all = all(isinstance(each, kinds) for each in self._pending.values())
        return is_all and self._words.ranks <= self._greeted and not self._halted

    @property
    def are_in_a_step(self) -> bool:
        """Whether ranks are in the middle of a step, which takes all others."""
        return any(phase is not Phase.IDLE for phase in self._pages.phases().values())

    @property
    def are_in_script(self) -> bool:
        """Whether none has come to the end of its script, as far as they have said."""
        return not self._left

    @property
    def may_save(self) -> bool:
        """Whether ranks save their state when something fails."""
        return self._may_save

    @property
    def resume(self) -> str:
        """The checkpoint that this attempt has resumed from, or empty."""
        return self._resume

    def be_alone(self, disturbed: Callable[[Said], None] | None, *, briefly: bool = False) -> None:
        """The ranks train on without the controller; ``None``: it is there again.

        Args:
            disturbed: takes what a rank says that only the controller could answer.
            briefly: there is another one at once, or nobody trains on: who waits goes on waiting.
        """
        self._alone = disturbed
        if briefly:
            self._is_brief = True
            self._clearance.doubt()
        elif disturbed is not None:
            self._clearance.stop()
            for rank in tuple(self._pending):
                self._let_go(rank)

    def _let_go(self, rank: int) -> None:
        self._pending.pop(rank, None)
        self._links.send(rank, protocol.Release("the script has ended"))

    def say_again(self) -> None:
        """Tell another controller what ranks have said that is still true."""
        self._marks.begin()  # it may be on another machine, with other folders
        for message, page in self._copies.told():  # of the node that was the controller's
            self._say(message._replace(attempt=self._attempt), page)
        for message in (each for rank in self._words.ranks for each in self._words.of(rank)):
            page = b""
            if isinstance(message, protocol.Registered):
                self._pages.news(message.rank)  # what the page has, and perhaps less
                page = self._page(message.rank)
            self._say(message._replace(attempt=self._attempt), page)
            if isinstance(message, protocol.Registered):
                self._mark(message)
        for message in self._pending.values():
            self._say(message)

    def places(self) -> tuple[str, ...]:
        """Where ranks here save without a controller."""
        return tuple(sorted({*self._save_to.values()}))

    def notes_folders(self) -> tuple[Path, ...]:
        """Where ranks of the job talk to each other once no controller is there."""
        return tuple(notes_folder(place, self._job_id) for place in self.places())

    def leave_pages(
        self, ranks: Iterable[int], *, is_last: bool = False, is_late: bool = False
    ) -> None:
        """Leave what these dead ranks alone had to others; ``is_last``: no rank lives here."""
        self._orphaned.leave(ranks, self._save_to, self._files, is_late=is_late)
        if is_last:
            self._orphaned.leave_copies(self.places(), self._files)

    def forsake(self, why: str, *, is_proven: bool, memory: str = "") -> tuple[int, ...]:
        """The controller's node is gone: no rank waits for an order; these save by themselves.

        ``is_proven``: its msrun has ended. ``memory``: where this node has its copy of the newest
        checkpoint in memory; empty: nowhere.
        """
        self._forsaken, self._alone = why, None
        self.writes.free()
        saving = self._pages.all().keys() if self._may_save else set()
        for rank in self.ranks:
            alone = protocol.SaveAlone(why, is_proven, memory)
            self._links.send(rank, alone if rank in saving else protocol.Release(why))
        return tuple(saving)

    def newest_step(self) -> int:
        """The newest step that a rank here has committed; 0: none."""
        return self._pages.newest_of_all()

    def forget_pages(self) -> None:
        """The run is over: nobody takes its pages for those of this msrun's next one."""
        self._pages.clear()

    keepers: frozenset[int] = frozenset()

    def kept_steps(self, rank: int) -> tuple[int, ...]:  # noqa: ARG002
        """No step: no memory is kept on several nodes."""
        return ()

    def catch_up(self) -> None:
        """Hand on what living ranks of this node have said by now."""
        self._links.catch_up(self.ranks)

    def hear_out(self, rank: int) -> int | None:
        """Hand on the last messages of a dead rank, and its page; its commit is read there."""
        self._links.hear_out(rank)
        self._show(rank)
        self.writes.forget(rank)
        return None

    def has_finished(self, rank: int) -> bool:  # noqa: ARG002
        """The controller's node knows."""
        return False

    @property
    def is_needed(self) -> bool:
        """Whether heartbeats change by themselves."""
        return bool(self._pages.all())

    def refresh(self, workers: Mapping[int, Worker]) -> None:
        """Note in ``workers`` how far they are."""
        for rank, beat in self._pages.beats(workers).items():
            workers[rank].beat = beat

    def tell_beats(self) -> None:
        """Hand on how far the ranks are, what their processes do, and what they have written.

        This node may be gone in the next moment.
        """
        beats = self._pages.raw_beats()
        moved = {rank: beat for rank, beat in beats.items() if self._told.get(rank) != beat}
        self._told = beats
        for rank in beats:
            # a device writes whenever it comes to it
            if rank in moved or self._pages.has_device_areas(rank):
                self._show(rank)
        alive = [each for each in self._agent.workers() if each.is_alive]
        if not (beats or alive):
            return
        self._send(
            Beats.of(
                monotonic_ns(),
                moved,
                {w.rank: ProcessNews.of(self._links.pid(w.rank) or w.pid).packed() for w in alive},
                self._inspection,
            )
        )

    def _show(self, rank: int) -> None:
        """Hand on what a rank has written since the last time.

        What a device writes comes and goes without a number: such a page is handed on as a whole.
        """
        if not self._pages.has_device_areas(rank):
            self._tell_news(rank)
        elif page := self._page(rank):
            self._send(PageSeen.of(rank, self._attempt, page))

    def _page(self, rank: int) -> bytes:
        """A rank's page; empty: it has none, or a frame has no room for it."""
        page = self._pages.packed(rank)
        if len(page) <= MOST_SHOWN:
            return page
        if rank not in self._large:
            self._large.add(rank)
            text = TOO_LARGE.format(rank, sized(len(page)))
            self._send(FromRank(pack_said(protocol.Unprotected(rank, self._attempt, text))))
        return b""

    def _on_message(self, message: Said, fds: list[int]) -> None:
        if isinstance(message, protocol.PageWritten):
            self._tell_news(message.rank)
            if message.ready and (step := self._clearance.ready(message.rank, message.ready)):
                self._send(UpdatesReady(self._attempt, step))
            return
        if isinstance(message, protocol.BringMemory):
            self.bring_memory(message.inode, message.variants, partial(self._tell_brought, message))
            return
        page = b""
        if isinstance(message, protocol.Registered):
            if why := self._pages.receive(message.rank, message.attempt, fds):
                self._links.drop(message.rank, why)
                return
            self._large.discard(message.rank)
            self._pages.news(message.rank)  # what the page has, and perhaps less
            page = self._page(message.rank)
        elif isinstance(message, CHANGED_BY):
            self._show(message.rank)
        self._agent.announce()  # a start comes before what the rank says
        if self._forsaken:
            self._answer(message)
            return
        self._remember(message)
        if self._alone is not None:
            self._hear_alone(message, self._alone)
        else:
            self._hand_on(message, page)
        if isinstance(message, protocol.Registered):
            self._mark(message)
            self._shared.share(self._attempt, self._loop)
            self._copies.registered(message.rank, self._loop)

    def _tell_brought(
        self, asked: protocol.BringMemory, why_not: str, absent: tuple[int, ...]
    ) -> None:
        if asked.attempt == self._attempt:  # else its number may be another process's
            self._links.send(asked.rank, protocol.MemoryBrought(asked.inode, why_not, list(absent)))

    def _remember(self, message: Said) -> None:
        """Keep what another controller would have to know."""
        if isinstance(message, WAITS):
            self._pending[message.rank] = message
        if isinstance(message, protocol.Leaving):
            self._left.add(message.rank)
        if isinstance(message, protocol.Rejoining):
            self._pending.pop(message.rank, None)
        if isinstance(message, protocol.Hello):
            self._left.discard(message.rank)
            self._greeted.discard(message.rank)  # another process, which waits for its own answer
        self._words.hear(message)

    def _hear_alone(self, message: Said, disturbed: Callable[[Said], None]) -> None:
        match message:
            case protocol.Raised() | protocol.Leaving() if self._is_brief:
                pass  # it waits for the other one
            case protocol.Hello() | protocol.Raised():  # who has raised holds its state
                disturbed(message)
            case protocol.ExitRequested():
                disturbed(message)
                self._answer(message)
            case protocol.Leaving():
                self._let_go(message.rank)

    def _hand_on(self, message: Said, page: bytes) -> None:
        match message:
            case protocol.Hello():
                self._learn(message)
            case protocol.Frozen():
                self._frozen[message.rank] = message.nbytes
            case protocol.Written() | protocol.SaveFailed():
                if self.writes.take(message, self._files.tell, self._say, self.tell):
                    return
            case protocol.Copied() if why := self._copied.why_unsound(message):
                self._links.drop(message.rank, why)
                return
            case _:
                pass
        self._say(message, page)

    def _say(self, message: Said, page: bytes = b"") -> None:
        if page:
            self._send(PageSeen.of(message.rank, message.attempt, page))
        self._send(FromRank(pack_said(message)))

    def _learn(self, hello: protocol.Hello) -> None:
        if hello.exit_file:
            self._agent.watch(hello.exit_file)
        if hello.ckpt_save_path:
            self._save_to[hello.rank] = os.path.abspath(hello.ckpt_save_path)
        places = filter(None, (hello.ckpt_save_path, hello.checkpoints))
        self._places[hello.rank] = tuple(dict.fromkeys(places))
        for place in self._places[hello.rank]:
            self._files.do(partial(self._record.add_place, place), lambda _: None)

    def _mark(self, message: protocol.Registered) -> None:
        """Have the controller's node look whether it sees where a rank saves."""
        rank, attempt = message.rank, message.attempt
        for place in self._places.get(rank, ()):
            told = partial(FolderMarked, rank, attempt)
            self._marks.mark(place, lambda path, told=told: self._send(told(path)))  # type: ignore[misc]

    def _answer(self, message: Said) -> None:
        """What is to be said without a controller."""
        match message:
            case protocol.ExitRequested():  # the rank has caught msrun's own signal
                self._links.send(message.rank, protocol.Dismiss(self._forsaken))
            case protocol.Raised() | protocol.Leaving():
                self._links.send(message.rank, protocol.Release(self._forsaken))

    def _tell_news(self, rank: int) -> None:
        if rank in self._large:
            return
        if pieces := self._pages.news(rank):
            self._send(PageNews.of(rank, self._attempt, pieces))

    def _on_lost(self, rank: int, pid: int) -> None:
        attempt = self._attempt
        self._agent.settle()
        if attempt != self._attempt:
            return  # its end was the last attempt's
        worker = self._agent.worker(rank)
        if worker.exit_code is None and not (pid == worker.pid and is_exiting(pid)):
            if pid != worker.pid and is_exiting(pid):  # its wrapper will exit as well
                self._loop.call_later(WRAPPER_S, self._note_unlinked, rank, attempt)
                return
            self._send(RankUnlinked(rank, attempt))

    def _note_unlinked(self, rank: int, attempt: int) -> None:
        if attempt == self._attempt and self._agent.worker(rank).exit_code is None:
            self._send(RankUnlinked(rank, attempt))
