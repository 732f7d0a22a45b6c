"""Guards the state of a job's ranks: what their hooks say becomes events, decisions become words.

The lines are ``agent.hooks.rank_links``, greetings ``agent.hooks.handshake``, farewells
``agent.hooks.exiting_ranks``, dumps ``agent.dump.executor``. Nothing is decided here.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from agent.controller import actions as do
from agent.controller import events as ev
from agent.controller.states import JobState
from agent.hooks.exiting_ranks import ExitingRanks
from agent.hooks.rank_links import Loop, RankLinks, Said
from agent.hooks.status_pages import StatusPages
from agent.records.file_thread import FileThread
from agent.records.journal import Journal
from agent.spec.job_spec import JobSpec
from agent.text.sanitize import encodable
from agent.workers.processes import is_exiting
from agent.workers.worker import Worker
from worker_hooks.contract import protocol

if TYPE_CHECKING:  # a job without hooks starts earlier without them
    from agent.dump.executor import DumpExecutor
    from agent.health.monitor import HealthMonitor
    from agent.hooks.handshake import Handshake

CLOSE_S = 5.0  # for file work that nobody waits for any more

# fmt: off
Action = (
    do.Tell | do.HoldRanks | do.FreezeRanks | do.SaveRanks | do.CommitDump | do.AbandonDump
    | do.RefuseRanks | do.ForgetMemory
)
# fmt: on


class AgentPort(Protocol):
    """The supervisor, as far as it is needed here."""

    def post(self, event: ev.Event) -> None:
        """Decide on an event."""

    def announce(self) -> None:
        """Take in every start that has happened already."""

    def settle(self) -> None:
        """Take in every start and death that has happened already."""

    def worker(self, rank: int) -> Worker:
        """A rank of the present attempt."""

    def spare(self, pid: int) -> None:
        """If the agent dies, this process is to be left its time to save."""

    def watch(self, path: str) -> None:
        """A graceful exit may be asked for in this file."""


class HooksBridge:
    """The agent's side of the hooks, for a whole job."""

    def __init__(
        self,
        spec: JobSpec,
        fallback: Path,
        door: socket.socket,
        journal: Journal,
        say: Callable[[str], None],
        keep_place: Callable[[str], None],
    ) -> None:
        """Take the parts; nothing is heard before :meth:`attach`.

        Args:
            spec: the job.
            fallback: where dumps go when the script's folder cannot be written.
            door: where hooks connect to.
            journal: what is written about the run.
            say: tells people one sentence.
            keep_place: remembers a folder that the run saves into; does file work.
        """
        self._spec = spec
        self._fallback = fallback
        self._say = say
        self._keep_place = keep_place
        self._journal = journal
        self._links = RankLinks(door, spec.ranks_here, journal)
        self._pages = StatusPages()
        self._scribe: FileThread
        self._greeting: Handshake | None = None  # nobody has hooks
        self._saving: DumpExecutor | None = None
        self._lookout: HealthMonitor | None = None
        self._state = JobState.NEW
        self._attempt = 0
        self._resume = ""
        self._steps: dict[int, int] = {}  # rank -> its step when it registered
        self._training: set[int] = set()  # registered, and neither gone nor about to go
        self._leavers = ExitingRanks(self._links, self._pages, self._training)
        self._raised: set[int] = set()

    def attach(self, loop: Loop, ward: AgentPort) -> None:
        """Listen on ``loop``."""
        self._ward = ward
        self._loop = loop
        self._scribe = FileThread(loop.call_soon_threadsafe)
        self._leavers.attach(loop.call_later)
        self._links.attach(loop, self._on_message, self._on_lost)

    def begin(self, attempt: int, resume: str) -> None:
        """An attempt begins; ``resume``: the checkpoint it goes on from, or empty."""
        self._attempt, self._resume = attempt, resume
        self._links.begin(attempt)
        if self._greeting is not None and self._saving is not None:
            self._greeting.begin(attempt, resume)
            self._saving.begin(attempt)

    def expect(self, action: do.PrepareRanks) -> None:
        """These newcomers may greet before their attempt begins."""
        self._links.expect(action.attempt, action.ranks)

    def renew(self, action: do.ReplaceRanks, port: int) -> None:
        """Newcomers join the survivors of the last attempt, who are told so, and where."""
        assert self._greeting is not None
        assert self._saving is not None
        self._attempt = action.attempt
        self._links.renew(action.attempt, action.survivors)
        self._greeting.renew(action.attempt, action.path, action.newcomers)
        self._saving.begin(action.attempt)
        self._leavers.end_patience()
        for rank in action.newcomers:
            self._pages.drop(rank)
            self._steps.pop(rank, None)
            self._training.discard(rank)
            self._raised.discard(rank)
            self._leavers.take_back(rank)
        order = protocol.Rejoin(action.attempt, action.path, action.reason, port)
        self._tell(action.survivors, order)
        for rank in action.survivors:
            if not self._links.pid(rank):
                self._ward.post(ev.RankUnreachable(rank, action.attempt))
        self._links.admit()

    def _wake(self) -> Handshake:
        """The first script with hooks is there."""
        from agent.dump.executor import DumpExecutor
        from agent.failure import post_mortem  # noqa: F401  a restart must not wait for it
        from agent.health.monitor import HealthMonitor
        from agent.hooks.handshake import Handshake

        spec, fallback, links = self._spec, self._fallback, self._links
        self._greeting = Handshake(
            spec.dump,
            fallback,
            links,
            self._scribe,
            self._searched,
            self._say,
            self._keep_place,
            spec.record_id,
        )
        self._saving = DumpExecutor(
            spec,
            fallback,
            links,
            self._pages,
            self._greeting,
            self._scribe,
            self._ward.post,
            self._say,
            self._loop.call_later,
        )
        told = self._journal, self._say, self._ward
        self._lookout = HealthMonitor(spec.timeouts.hang_s, self._pages, links, *told, self._loop)
        self._greeting.begin(self._attempt, self._resume)
        self._saving.begin(self._attempt)
        return self._greeting

    def end_attempt(self) -> None:
        """Every rank is gone."""
        self._links.end()
        self._pages.clear()
        self._steps.clear()
        self._leavers.clear()
        self._training.clear()
        self._raised.clear()
        if self._lookout is not None:
            self._lookout.forget()
        if self._saving is not None:
            self._saving.forget()

    def close(self) -> None:
        """The job is over."""
        if self._saving is not None:
            self._saving.forget()
        self._links.close()
        self._scribe.close(CLOSE_S)

    def decided(self, state: JobState) -> None:
        """The job is in this state now."""
        self._state = state
        self._leavers.decided(state)
        self._watch()

    def hear_out(self, rank: int) -> int | None:
        """Take in what a dead rank said last; its newest commit, if it had any.

        Others may have registered before it died, and not been heard yet: they hold its state.
        """
        self._links.hear_out(rank)
        self._links.catch_up(other for other in self._spec.ranks_here if other not in self._steps)
        self._training.discard(rank)
        self.refresh({rank: self._ward.worker(rank)})
        step = self._pages.newest_step(rank)
        return self._steps.get(rank) if step is None else step

    @property
    def is_needed(self) -> bool:
        """Whether any rank of this attempt has a state to save."""
        return bool(self._steps)

    def refresh(self, workers: Mapping[int, Worker]) -> None:
        """Note in ``workers`` how far they are."""
        for rank, beat in self._pages.beats(workers).items():
            workers[rank].beat = beat
        if self._lookout is not None:
            self._lookout.refresh(workers)

    def _watch(self) -> None:
        if self._lookout is not None:
            are_all = len(self._training) == self._spec.nproc
            self._lookout.watch(self._state, self._training, are_all=are_all)

    def act(self, action: Action) -> None:
        """Carry out a decision; it was made because of what hooks said."""
        assert self._saving is not None
        assert self._greeting is not None
        match action:
            case do.Tell():
                self._note(action)
                self._tell(action.ranks, action.message)
            case do.HoldRanks():
                self._saving.hold(action)
            case do.FreezeRanks():
                self._saving.freeze(action)
            case do.SaveRanks():
                self._saving.save(action)
            case do.CommitDump():
                self._saving.commit(action)
            case do.AbandonDump():
                self._saving.abandon()
            case do.ForgetMemory():
                self._saving.forget()
            case do.RefuseRanks():
                self._greeting.refuse(action.ranks, action.reason)

    def _note(self, action: do.Tell) -> None:
        """What the agent itself has to know of a message that it hands on."""
        assert self._saving is not None
        assert self._greeting is not None
        match action.message:
            case protocol.Release():
                for rank in action.ranks:
                    self._ward.worker(rank).is_released = rank in self._raised
            case protocol.Proceed(step=step):
                self._leavers.agreed = step
                self._saving.proceed()
            case protocol.GoOn():
                self._greeting.go_on()
            case _:
                pass

    def _tell(self, ranks: Sequence[int], message: protocol.Message) -> None:
        for rank in ranks:
            self._links.send(rank, message)

    # --- what ranks say -------------------------------------------------------------------------

    def _on_message(self, message: Said, fds: list[int]) -> None:  # noqa: C901  a row for each kind
        if isinstance(message, protocol.Registered):
            self._register(message, fds)
            return
        for fd in fds:
            os.close(fd)
        match message:
            case protocol.Hello():
                if message.exit_file:
                    self._ward.watch(message.exit_file)
                (self._greeting or self._wake()).greet(message)
            case protocol.ExitRequested():
                self._ward.settle()
                self._ward.post(message._replace(why=encodable(message.why)))
            case protocol.Raised():
                self._ward.settle()
                self._raised.add(message.rank)
                self._ward.post(message._replace(error=encodable(message.error)))
            case protocol.Rejoining():
                self._raised.discard(message.rank)
                self._leavers.take_back(message.rank)
                self._ward.settle()
                self._ward.post(message)
            case protocol.Leaving(rank, _, is_done):
                self._leave(rank, is_done=is_done)
                self._watch()
            case protocol.Stack():
                if self._lookout is not None:
                    self._lookout.hear(message)
            case _:
                if self._saving is not None:
                    self._saving.hear(message)

    def _searched(self, event: ev.Event) -> None:
        self._ward.settle()  # the start of who asked may not have been announced yet
        self._ward.post(event)

    def _register(self, message: protocol.Registered, fds: list[int]) -> None:
        rank = message.rank
        try:
            if len(fds) != 1:
                raise ValueError(f"rank {rank} sent {len(fds)} pages")  # noqa: TRY301
            self._pages.keep(rank, message.attempt, fds.pop())
        except (ValueError, OSError) as error:
            self._links.drop(rank, str(error))
            return
        finally:
            for fd in fds:
                os.close(fd)
        if not self._spec.dump.ttp:
            return
        self._ward.announce()  # before it is heard of; its death comes after it
        self._steps[rank] = message.step
        self._training.add(rank)
        self._ward.spare(self._links.pid(rank))
        self._ward.post(message._replace(why_fixed=encodable(message.why_fixed)))

    def _leave(self, rank: int, *, is_done: bool) -> None:
        self._training.discard(rank)
        self._leavers.add(rank, is_done=is_done)
        self._ward.settle()  # a death that happened before may make its state the last one
        self._leavers.let_go()

    def _on_lost(self, rank: int, pid: int) -> None:
        attempt = self._attempt
        self._leavers.forget(rank)
        self._ward.settle()
        if attempt != self._attempt:
            return  # its end was the last one's
        worker = self._ward.worker(rank)
        if worker.exit_code is None and not (pid == worker.pid and is_exiting(pid)):
            self._training.discard(rank)
            if self._leavers.has_finished(rank) and self._state is JobState.HOLDING:
                return  # it is about to end, which disturbs nobody
            self._ward.post(ev.RankUnreachable(rank, attempt))
