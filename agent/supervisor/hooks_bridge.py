"""Between the supervisor and the ranks' hooks: messages become events, actions become messages.

The links are ``agent.hooks.rank_links``, the answers to Hello ``agent.hooks.handshake``, ranks that
want to exit ``agent.hooks.exiting_ranks``, dumps ``agent.dump.executor``. Nothing is decided here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.dump.target import OtherNodes
from agent.hooks import shared_folders
from agent.hooks.exiting_ranks import ExitingRanks
from agent.hooks.page_copies import PageCopies
from agent.hooks.peer_pages import SharedPages
from agent.hooks.rank_links import Loop, RankLinks, Relay, Said
from agent.hooks.rank_processes import RankProcesses
from agent.hooks.services import Services
from agent.hooks.status_pages import StatusPages
from agent.hooks.update_clearances import ClearedNode, UpdateClearances
from agent.hooks.update_votes import UpdateVotes
from agent.machine.file_thread import FileThread
from agent.machine.loop_calls import OnceATurn
from agent.records.journal import Journal
from agent.records.run_record import KeptRecord
from agent.spec.job_spec import CopyMode, JobSpec
from agent.supervisor.job_view import Action, AgentPort, Holders
from agent.text.sanitize import encodable
from agent.text.wording import NOT_KEPT, ONE_NODE_ONLY
from agent.workers.processes import is_exiting
from agent.workers.worker import Worker
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error

if TYPE_CHECKING:
    from agent.hooks.page_copies import Send
    from agent.nodes.run_messages import FolderMarked, PagesKept, PagesTold, UpdatesReady
    from agent.supervisor.guarding import Guarding

WRAPPER_S = 0.5  # until a wrapper ends whose rank has died
CLOSE_S = 5.0  # for file work that nobody waits for any more


class HooksBridge:
    """The agent's side of the hooks, for a whole job."""

    def __init__(
        self,
        spec: JobSpec,
        fallback: Path,
        listener: socket.socket,
        journal: Journal,
        say: Callable[[str], None],
        kept: KeptRecord,
    ) -> None:
        """Take the parts; nothing is heard before :meth:`attach`.

        Args:
            fallback: where dumps go when the script's folder cannot be written.
            journal: what is written about the run.
            say: prints one sentence for people.
            kept: remembers where the run saves, and what it began from; does file work.
        """
        self._spec = spec
        self._world, self._here = spec.world_size, spec.ranks_here  # each time they are counted
        self._fallback = fallback
        self._journal = journal
        self._say = say
        self._say_once = lru_cache(maxsize=None)(say)  # a new rank 0 warns of what the old one did
        self._record = kept
        self._links = RankLinks(listener, spec.ranks_here, journal)
        self._pages = StatusPages()
        self._shared = SharedPages(self._links, self._pages, spec.ranks_here)
        here = partial(self.updates_ready, spec.node_rank)
        lost_here = spec.ranks_near if spec.nnodes > 1 else ()  # nobody else could keep anything
        self._copies = PageCopies(self._pages, lost_here, say, here)
        self._guarding: Guarding | None = None  # no rank has hooks yet
        self._state = JobState.NEW
        self._attempt = 0
        self._began = 0  # the attempt in which all ranks were started last
        self._resume = ""
        self._steps: dict[int, int] = {}  # rank -> its step when it registered
        self._training: set[int] = set()  # registered, and neither gone nor about to exit
        self._processes = RankProcesses(spec.ranks_here, self._links.pid)
        self._exiting = ExitingRanks(self._links, self._pages, self._processes, self._training, say)
        self._raised: set[int] = set()
        self._holders = Holders()
        self._is_loss_said = False  # that the memory of a killed rank is not kept
        self._not_shared: dict[str, protocol.NotShared] = {}  # by folder
        self._alike: dict[int, protocol.Replicated] = {}  # by rank, of those in a replica group
        self._others: OtherNodes | None = None
        links, own, all_of = self._links, spec.ranks_here, spec.world_size
        self._votes: UpdateVotes | UpdateClearances = UpdateVotes(links, own, journal)
        if spec.nnodes > 1:
            self._votes = UpdateClearances(links, all_of, own, journal, spec.silence_s)

    def attach(self, loop: Loop, agent: AgentPort) -> None:
        """Listen on ``loop``."""
        self._agent = agent
        self._settle = OnceATurn(loop.call_soon, agent.settle)
        self._services = Services(
            loop=loop,
            post=agent.post,
            say=self._say,
            journal=self._journal,
            files=FileThread(loop.call_soon_threadsafe),
        )
        self._processes.attach(loop)
        self._exiting.attach(loop.call_later)
        if isinstance(self._votes, UpdateClearances):
            self._votes.attach(loop.call_later, loop.call_soon)
        self._links.attach(loop, self._on_message, self._on_lost)

    def _load(self) -> Guarding:
        """What a job with hooks needs, once the first rank has some."""
        if self._guarding is None:
            from agent.supervisor.guarding import guarding

            loaded = self._guarding = guarding(
                self._spec,
                self._fallback,
                self._links,
                self._pages,
                self._processes,
                self._agent.worker,
                self._exiting.finished,
                self._agent.wake,
                self._record,
                self._services,
            )
            if self._spec.dump.copies is CopyMode.LIVE and self._spec.nnodes > 1:
                self._say(ONE_NODE_ONLY)
            loaded.dumps.others = self._others
            loaded.handshake.begin(self._attempt, self._resume)
            loaded.dumps.begin(self._attempt)
        return self._guarding

    # --- attempts -------------------------------------------------------------------------------

    def begin(self, attempt: int, resume: str) -> None:
        """An attempt begins; ``resume``: the checkpoint that it resumes from, or empty."""
        self._attempt, self._resume = attempt, resume
        self._began = attempt
        self._links.begin(attempt)
        if self._guarding is not None:
            memory = self._guarding.dumps.beside.path_of(resume)
            self._guarding.handshake.begin(attempt, resume, memory)
            self._guarding.dumps.begin(attempt)

    def expect(self, action: do.PrepareRanks) -> None:
        """These newcomers may say Hello before their attempt begins."""
        self._links.expect(action.attempt, action.ranks)

    def renew(self, action: do.ReplaceRanks, port: int) -> None:
        """Newcomers join the survivors of the last attempt, which rejoin them at ``port``."""
        guarding = self._load()
        self._attempt = action.attempt
        self._links.renew(action.attempt, action.survivors)
        guarding.handshake.renew(action.attempt, action.path, action.newcomers)
        guarding.dumps.begin(action.attempt)
        self._votes.close()
        self._exiting.stop_looking()
        for rank in action.newcomers:
            self._pages.drop(rank)
            self._steps.pop(rank, None)
            self._training.discard(rank)
            self._raised.discard(rank)
            self._exiting.take_back(rank)
        guarding.kept.replace(action.newcomers)
        self._processes.forget(action.newcomers)
        self._tell(
            action.survivors, protocol.Rejoin(action.attempt, action.path, action.reason, port)
        )
        for rank in action.survivors:
            if not self._links.has(rank):
                self._agent.post(ev.RankUnreachable(rank, action.attempt))
        self._links.admit()

    def end_attempt(self) -> None:
        """Every rank is gone."""
        self._links.end()
        self._pages.clear()
        self._copies.forget()
        self._processes.forget(range(self._world))
        self._steps.clear()
        self._exiting.clear()
        self._training.clear()
        self._raised.clear()
        self._votes.close()
        if self._guarding is not None:
            self._guarding.health.forget()
            self._guarding.kept.close()
            self._guarding.dumps.copies.forget()
            self._guarding.dumps.forget()

    def close(self) -> None:
        """The job is over."""
        self._votes.close()
        if self._guarding is not None:
            self._guarding.kept.close()
            self._guarding.dumps.copies.forget()
            self._guarding.dumps.forget()
            self._guarding.dumps.close()
        self._links.close()
        self._services.files.close(CLOSE_S)

    def decided(self, state: JobState, holders: Holders) -> None:
        """The job is in this state now.

        Args:
            holders: whose state any other rank may save.
        """
        self._state = state
        if state is JobState.RUNNING:
            self._votes.open(self._attempt, self._steps, is_cut=holders.is_cut)
        if _told(holders) != _told(self._holders):
            self._holders, self._alike = holders, holders.told()
            for rank in self._steps:
                self._links.send(rank, self.replicated(rank))
        if self._guarding is not None:
            self._guarding.dumps.copies.decided(state, holders.to_copy)
            if state in {JobState.RUNNING, JobState.REPLACING}:  # others hold it, or msrun does
                self._guarding.kept.drop_dead()
        self._exiting.decided(state)
        self._watch()

    def catch_up(self) -> None:
        """Take in what living ranks of this node have said by now."""
        self._links.catch_up(self._here)

    def hear_out(self, rank: int) -> int | None:
        """Take in the last messages of a dead rank; its newest commit, if it had any.

        Others may have registered before it died, and not been heard yet: they hold its state.
        """
        self._links.hear_out(rank)
        self._links.catch_up(other for other in self._here if other not in self._steps)
        self._training.discard(rank)
        self.refresh({rank: self._agent.worker(rank)})
        step = self._pages.newest_step(rank)
        return self._steps.get(rank) if step is None else step

    def kept_steps(self, rank: int) -> tuple[int, ...]:
        """The steps that the memory of a dead rank holds whole, the newest first."""
        steps = () if self._guarding is None else self._guarding.kept.steps(rank)
        self._pages.complete(rank, steps)
        return steps

    @property
    def keepers(self) -> frozenset[int]:
        """Processes that keep the memory of ranks, and end with the attempt."""
        return frozenset() if self._guarding is None else self._guarding.kept.keepers

    def newest_step(self) -> int:
        """The newest step that a rank of the job has committed; 0: none."""
        return self._pages.newest_of_all()

    def has_finished(self, rank: int) -> bool:
        """Whether a rank's script had ended, and the rank was on its way out."""
        return self._exiting.has_finished(rank)

    @property
    def is_needed(self) -> bool:
        """Whether any rank of this attempt has a state to save."""
        return bool(self._steps)

    def refresh(self, workers: Mapping[int, Worker]) -> None:
        """Note in ``workers`` how far they are."""
        for rank, beat in self._pages.beats(workers).items():
            workers[rank].beat = beat
        if self._guarding is not None:
            self._guarding.health.refresh(workers)

    def _watch(self) -> None:
        if self._guarding is not None:
            are_all = len(self._training) == self._world
            self._guarding.health.watch(self._state, self._training, are_all=are_all)
            self._guarding.stopped.watch(self._state)

    # --- ranks of other nodes -------------------------------------------------------------------

    def relay(self, send: Relay) -> None:
        """Ranks of other nodes are sent to by ``send``."""
        self._links.relay_others(send)

    def hear_relayed(self, message: Said) -> None:
        """Take in what a rank of another node has said."""
        self._links.hear_relayed(message)

    def mirror(self, rank: int, attempt: int, page: bytes) -> None:
        """Take a rank's status page as it was on its node; an old one only in its own place."""
        if attempt != self._attempt and not self._pages.has_page(rank, attempt):
            return
        try:
            self._pages.keep_copy(rank, attempt, page)
        except (ValueError, OSError) as error:
            self._journal.event("LinkRefused", rank=rank, why=str(error))
        else:
            self._copies.show(rank)

    def copy_pages(self, send: Send | None) -> None:
        """Keep copies of this node's pages on another one, by ``send``; ``None``: there is none."""
        self._copies.begin(send)

    def clear_over(self, nodes: Iterable[int], others: Sequence[ClearedNode]) -> None:
        """Updates wait until the ranks of all ``nodes`` are ready; ``others``: all but this one."""
        assert isinstance(self._votes, UpdateClearances)
        self._votes.over(nodes, others)

    def updates_ready(self, node: int, told: UpdatesReady | PagesKept | PagesTold) -> None:
        """The ranks of a node are ready for the update of a step."""
        from agent.nodes.run_messages import UpdatesReady  # a job of one node starts without it

        assert isinstance(self._votes, UpdateClearances)
        if node == self._spec.node_rank and isinstance(told, UpdatesReady):
            self._copies.confirm_step(told.attempt, told.step)  # it is lost with this msrun
        else:
            self._votes.ready(node, told.attempt, told.step)

    def dump_with(self, others: OtherNodes) -> None:
        """What other nodes do for dumps."""
        self._others = others

    def take_memory(self, dump_id: int, path: str, file: int, is_cut: bool) -> None:
        """What a rank of another node has written to memory is here, in the place of ``path``."""
        if self._guarding is None:
            os.close(file)
        else:
            self._guarding.dumps.take(dump_id, path, file, is_cut=is_cut)

    def mirror_news(self, rank: int, attempt: int, pieces: Iterable[tuple[int, bytes]]) -> None:
        """Take what a rank has written to its page."""
        self._pages.mirror_news(rank, attempt, pieces)
        self._copies.tell(rank)

    def mirror_beats(
        self,
        now_ns: int,
        beats: Mapping[int, bytes],
        processes: Mapping[int, bytes],
        inspection: int,
    ) -> None:
        """Take how far the ranks of another node are at ``now_ns`` of its clock.

        Args:
            now_ns: monotonic.
            beats: those heartbeats that have changed.
            processes: those of all its ranks that live, packed.
            inspection: the newest one that had come there.
        """
        self._pages.mirror_beats(now_ns, beats)
        self._processes.tell(processes, inspection)

    @property
    def has_common_folder(self) -> bool:
        """Whether all nodes save into the same one, as far as is known."""
        return not self._holders.apart

    def folder_marked(
        self, message: FolderMarked, node: str, looks: int = shared_folders.LOOKS
    ) -> None:
        """A rank of another node saves where this file was made: look whether it is seen here."""

        def looked(is_seen: bool | Exception) -> None:
            if is_seen is True or message.attempt < self._began:  # it is marked again since
                return
            if looks > 1:
                again = partial(self.folder_marked, message, node, looks - 1)
                self._services.loop.call_later(shared_folders.LOOK_S, again)
                return
            folder = encodable(os.path.dirname(message.path))
            why = shared_folders.NOT_SHARED.format(folder=folder, node=node)
            self._agent.post(ev.FolderApart(why))
            self._not_shared[folder] = protocol.NotShared(folder, why)
            self._tell(tuple(self._steps), self._not_shared[folder])
            within = () if self._guarding is None else self._guarding.handshake.checkpoints
            if place := next((each for each in within if Path(each).is_relative_to(folder)), ""):
                lost = shared_folders.NEVER_COMPLETE.format(folder=encodable(place), node=node)
                self._say(lost)

        self._services.files.do(lambda: shared_folders.take(message.path), looked)

    def lost_elsewhere(self, rank: int, attempt: int) -> None:
        """A rank of another node has closed its link, and is alive."""
        if attempt != self._attempt or self._agent.worker(rank).exit_code is not None:
            return
        self._links.unlink(rank)
        self._exiting.forget(rank)
        self._training.discard(rank)
        if not (self._exiting.has_finished(rank) and self._state is JobState.HOLDING):
            self._agent.post(ev.RankUnreachable(rank, attempt))

    # --- what is decided ------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Carry out a decision; it was made because of what hooks said."""
        guarding = self._load()
        match action:
            case do.Tell():
                self._note(action, guarding)
                self._tell(action.ranks, action.message)
            case do.HoldRanks():
                guarding.dumps.hold(action)
            case do.FreezeRanks():
                self._votes.freeze()
                guarding.dumps.freeze(action)
            case do.SaveRanks():
                guarding.dumps.save(action)
            case do.CommitDump():
                guarding.dumps.commit(action)
            case do.AbandonDump():
                guarding.dumps.abandon()
            case do.ForgetMemory():
                guarding.dumps.forget()
            case do.RefuseRanks():
                guarding.handshake.refuse(action.ranks, action.reason)

    def _note(self, action: do.Tell, guarding: Guarding) -> None:
        """What the agent itself has to know of a message that it hands on."""
        match action.message:
            case protocol.Release():
                for rank in action.ranks:
                    self._agent.worker(rank).is_released = rank in self._raised
            case protocol.Proceed(step=step):
                self._exiting.agreed = step
                guarding.dumps.proceed()
            case protocol.EndNotes(why):
                guarding.kept.give_up(why)
            case protocol.GoOn():
                self._votes.go_on()
                guarding.handshake.go_on()

    def _tell(self, ranks: Sequence[int], message: protocol.Message) -> None:
        self._links.send_all(ranks, message)

    # --- what ranks say -------------------------------------------------------------------------

    def _on_message(  # noqa: C901, PLR0912  a row for each kind
        self, message: Said, fds: list[int]
    ) -> None:
        if isinstance(message, protocol.Registered):
            self._register(message, fds)
            return
        self._copies.hear(message)
        if isinstance(message, protocol.PageWritten):
            self._copies.tell(message.rank)
            if message.ready and (step := self._votes.ready_here(message.rank, message.ready)):
                self._copies.confirm_step(self._attempt, step)
            return
        if isinstance(message, protocol.Unprotected):
            self._warn(message)
            return
        if isinstance(message, protocol.VoteOpened):
            self._votes.hear(message)
            if message.is_cut:
                self._agent.post(message._replace(why_not=encodable(message.why_not)))
            return
        match message:
            case protocol.Hello():
                if message.exit_file:
                    self._agent.watch(message.exit_file)
                self._load().handshake.greet(message)
            case protocol.ExitRequested():
                self._agent.settle()
                self._agent.post(message._replace(why=encodable(message.why)))
            case protocol.Raised():
                self._settle(is_sure=message.rank in self._here)
                self._raised.add(message.rank)
                if (error := encodable(message.error)) != message.error:
                    message = message._replace(error=error)
                self._agent.post(message)
            case protocol.Fingerprinted():
                self._agent.post(_encodable(message))
            case protocol.Rejoining():
                self._raised.discard(message.rank)
                self._exiting.take_back(message.rank)
                self._settle(is_sure=message.rank in self._here)
                self._agent.post(message)
            case protocol.Leaving(rank, _, is_done):
                self._leave(rank, is_done=is_done)
                self._watch()
            case protocol.NotesMeasured():
                self._agent.post(message._replace(why_not=encodable(message.why_not)))
            case protocol.CheckpointCompleted(_, _, step, path):
                self._load().handshake.complete(path, step)
            case protocol.Copied():
                self._load().dumps.copies.hear(message)
            case protocol.Stack():
                self._load().health.hear(message)
            case protocol.BringMemory(rank, _, inode):  # ranks here were told of no copy
                self._links.send(rank, protocol.MemoryBrought(inode, "it is not known"))
            case _:
                self._load().dumps.hear(message)

    def _warn(self, message: protocol.Unprotected) -> None:
        text = encodable(message.text)
        if message.is_refused:
            self._agent.post(ev.StartRefused(message.attempt, text, ()))
        else:
            self._say_once(text)

    def _register(self, message: protocol.Registered, fds: list[int]) -> None:
        rank = message.rank
        self._copies.hear(message)
        if rank in self._here:
            why = self._pages.receive(rank, message.attempt, fds)
        else:
            why = "" if self._pages.has_page(rank, message.attempt) else f"rank {rank} sent no page"
        if why:
            self._links.drop(rank, why)
            return
        if not self._spec.dump.ttp:
            return
        if rank in self._here:
            self._agent.announce()  # the start comes before this message, the death after it
            self._agent.protect(self._links.pid(rank))
            self._copies.show(rank)
            message = self._kept(message)
        known, self._steps[rank] = self._steps.get(rank), message.step
        self._training.add(rank)
        self._shared.share(self._attempt, self._services.loop)
        if why := message.not_replaceable_why:
            message = message._replace(not_replaceable_why=encodable(why))
        self._agent.post(message)
        if known is None:  # who lives on knows it
            self._links.send(rank, self.replicated(rank))
            for folder in self._not_shared.values():
                self._links.send(rank, folder)
        if len(self._steps) == self._world:
            self._load().dumps.beside.all_joined()

    def _kept(self, message: protocol.Registered) -> protocol.Registered:
        """Open the memory that is to outlive a rank; what is known of it then."""
        why = encodable(message.not_kept_why)
        if over := message.keeper and self._load().kept.why_over:  # it replaces another rank
            self._links.send(message.rank, protocol.EndNotes(over))
            return message._replace(keeper=0)
        if message.keeper:
            try:
                self._load().kept.keep(message.rank, message.keeper, message.board)
            except OSError as error:
                message, why = message._replace(keeper=0), describe_os_error(error)
        if why and self._spec.dump.copies is CopyMode.LIVE and not self._is_loss_said:
            self._is_loss_said = True
            self._say(NOT_KEPT.format(message.rank, why))
        return message._replace(not_kept_why=why)

    def replicated(self, rank: int) -> protocol.Replicated:
        """What a rank knows of who holds its state."""
        return self._alike.get(rank, protocol.Replicated(self._holders.why_not_alone))

    def _leave(self, rank: int, *, is_done: bool) -> None:
        self._training.discard(rank)
        self._exiting.add(rank, is_done=is_done)
        self._agent.post(ev.RankExiting(rank, self._attempt))
        self._agent.settle()  # an earlier death may make this rank's state the last one
        self._exiting.let_go()

    def _on_lost(self, rank: int, pid: int) -> None:
        attempt = self._attempt
        self._exiting.forget(rank)
        self._agent.settle()
        if attempt != self._attempt:
            return  # its end was the last attempt's
        worker = self._agent.worker(rank)
        if worker.exit_code is None and not (pid == worker.pid and is_exiting(pid)):
            self._training.discard(rank)
            if self._exiting.has_finished(rank) and self._state is JobState.HOLDING:
                return  # it is about to end, which disturbs nobody
            if pid != worker.pid and is_exiting(pid):  # its wrapper will exit as well
                self._services.loop.call_later(WRAPPER_S, self._note_unreachable, rank, attempt)
                return
            self._agent.post(ev.RankUnreachable(rank, attempt))

    def _note_unreachable(self, rank: int, attempt: int) -> None:
        if attempt == self._attempt and self._agent.worker(rank).exit_code is None:
            self._agent.post(ev.RankUnreachable(rank, attempt))


def _encodable(said: protocol.Fingerprinted) -> protocol.Fingerprinted:
    """Thousands of ranks say the same, and it stays the same object then."""
    texts = {encodable(str(name)): str(text) for name, text in said.texts.items()}
    problem = encodable(said.problem)
    if texts == said.texts and problem == said.problem:
        return said
    return said._replace(texts=texts, problem=problem)


def _told(holders: Holders) -> tuple[object, ...]:
    """What ranks are told of it."""
    return holders.why_not_alone, holders.alike, holders.parts
