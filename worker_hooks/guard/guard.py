"""Guards one rank's state: keeps the connection to the agent, closes the gate, saves on order.

The listener is a thread of its own because the main thread may be blocked in a collective that a
dead peer never joins. It reads the live state only while the gate is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypedDict

from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import GROUP_INFO_FILE, RankEnv, meeting_point
from worker_hooks.distributed import abort, communicators, stacks
from worker_hooks.guard import exit_hooks
from worker_hooks.guard import save as saving
from worker_hooks.guard.agent_link import ANSWER_S, VERIFY_S, AgentLink
from worker_hooks.guard.far_tensors import FarTensors
from worker_hooks.guard.frozen_state import FrozenState
from worker_hooks.guard.gate import Gate
from worker_hooks.guard.peers import KnownPeers
from worker_hooks.guard.rank_vote import RankVote
from worker_hooks.guard.signal_wakeup import SignalWakeup
from worker_hooks.guard.state_copier import StateCopier
from worker_hooks.state.committed_state import CommittedState
from worker_hooks.storage import group_info
from worker_hooks.storage.durable_file import ThrottledProgress
from worker_hooks.storage.memory_dump import HeldDump

log = logging.getLogger("msrun")

PR_SET_PDEATHSIG = 1  # linux/prctl.h
DYING_S = 1.0  # from a closed connection to the end of the agent that closed it by dying
LOOK_S = 1.0

NOTHING_PROMISED = (
    "{}: no rank is replaced and no step is saved, because a training that goes on after a death "
    "could get other weights"
)
_guarded: set[int] = set()  # this process, once the agent has welcomed it


class _Sender(TypedDict):
    """The fields that every message to the agent has."""

    rank: int
    attempt: int


class StartupOptions(NamedTuple):
    """What a training wants of its guard. Paths are absolute; an empty text means none."""

    ckpt_save_path: str = ""  # where dumps are saved
    exit_file: str = ""  # the JSON file in which a graceful exit can be requested
    exit_signals: tuple[int, ...] = ()  # signals to this process that request a graceful exit
    checkpoints: tuple[str, ...] = ()  # where periodic checkpoints are saved
    breakpoints: str = ""  # prefix of an exception's dump in the first of those folders


class Guard:
    """One rank's guard; without a connection it guards nothing and costs nothing.

    ``TrainState`` makes it, and the main thread calls it. Of the rest, :mod:`agent_lost` and
    ``ModelCheckpoint`` freeze and save through it.
    """

    def __init__(
        self,
        env: RankEnv,
        source: CommittedState,
        options: StartupOptions,
        *,
        before_dump: Callable[[], None],
        when_agent_died: Callable[[Guard], None],
    ) -> None:
        """Prepare; :meth:`greet` connects.

        Args:
            before_dump: called in the listener before the state is digested or written.
            when_agent_died: called in the listener; saves the state and ends the process.
        """
        self.gate = Gate(lambda: source.step)
        self.welcome: protocol.Welcome | None = None
        self.env = env
        self.source = source
        self.options = options
        self.is_done = False  # training is over
        self.resumed_step = 0  # the step of the checkpoint on disk that this attempt began from
        self.exit_order: protocol.Leave | None = None  # the order that ends a graceful exit
        self.not_replaceable_why = ""  # why this rank can join no other group; empty: it can
        self.rehearses = False  # a new rank in this place has to run the script alone, up to run()
        self.why_cut_inside: Callable[[], str] = str  # as not_replaceable_why, once it has trained
        self.why_held_only = ""  # why the state can be read only while the main thread waits
        self.agent_pid = 0  # 0: there is none
        self.not_kept_why = ""  # why this process's memory dies with it, if it was not to
        self._unsafe_why = ""  # why no moment of this training is known to be whole
        self.peers = KnownPeers()
        self.memory: HeldDump | None = None
        """From the order to rejoin, or a newcomer's welcome, until GoOn: the dump that this rank
        resumes from. Until then it is the state, whatever the main thread does."""
        self.offered: HeldDump | None = None  # that of this node, once nobody decides any more
        self.far_tensors = FarTensors(
            lambda *of: self._send(protocol.BringMemory(self.env.rank, self.env.attempt, *of)),
            lambda: self._listener is not None and self._listener.is_alive(),
            self.gate.raise_if_ejected,
        )
        self.digests = saving.SaidDigests()
        self._before_dump = before_dump
        self._when_agent_died = when_agent_died
        self.is_forsaken = False  # whether the job's controller, on another node, is gone
        self.is_loss_proven = False  # its msrun has ended: its ranks know as much as this one
        self.not_shared: dict[str, str] = {}  # folders that are others on other nodes, and why
        self.replicated = protocol.Replicated("msrun had not said whether the ranks hold the same")
        """Who else holds what this rank does."""
        self._last_signal: int | None = None
        self._link: AgentLink | None = None
        self._listener: threading.Thread | None = None
        self._wakeup: SignalWakeup | None = None
        self._released = threading.Event()
        self._store = meeting_point(os.environ)
        self._rejoin_order: protocol.Rejoin | None = None  # until it is obeyed
        self._rejoin_lock = threading.Lock()  # held by what must belong to a single attempt
        self._aborting: threading.Thread | None = None  # communicators, as was ordered
        self._is_out = threading.Event()  # the main thread has obeyed the last order to rejoin
        self._pid = os.getpid()
        self._frozen = FrozenState(self.gate, source)
        self._copier = StateCopier(self.gate, source, self._send, lambda: self._unsafe_why)
        say = partial(self.say_unprotected, is_refused=False)
        self._vote = RankVote(self.gate, source, self.peers, self._tell_written, say)

    @property
    def is_on(self) -> bool:
        """Whether the agent will have this state saved."""
        return self._link is not None

    @property
    def compares(self) -> bool:
        """Whether the agent compares this rank's state with that of others."""
        return self._link is not None and self.env.world_size > 1

    def report_notes(self, cost_s: float, step_s: float, why_not: str = "") -> None:
        """Tell the agent what notes for :class:`CommitPlaces` take, or why they are of no use."""
        self._send(protocol.NotesMeasured(self.env.rank, self.env.attempt, cost_s, step_s, why_not))

    def report_checkpoint(self, step: int, path: str) -> None:
        """Tell the agent of a checkpoint that is complete."""
        self._send(protocol.CheckpointCompleted(self.env.rank, self.env.attempt, step, path))

    def report_fingerprint(
        self,
        step: int,
        texts: Mapping[str, str],
        is_late: bool,
        problem: str,
        holds: str,
        is_again: bool = False,
    ) -> None:
        """Tell the agent what this rank holds as of its newest commit."""
        held = dict(texts), is_late, problem[:500], holds, is_again
        self._send(protocol.Fingerprinted(self.env.rank, self.env.attempt, step, *held))

    def greet(self, *, wants_resume: bool) -> protocol.Welcome | None:
        """Connect to the agent; ``None``: there is none.

        Raises:
            SystemExit: the agent refuses, exit code 2.
            ValueError: another guard of this process did so before.
        """
        if not self.env.hooks:
            return None
        if self._pid in _guarded:
            raise ValueError("this process has a TrainState already: register everything in one")
        try:
            link = AgentLink(self.env.hooks)
        except OSError as error:
            log.warning("nothing guards rank %d: %s", self.env.rank, error)
            return None
        answer = self._ask_welcome(link, wants_resume=wants_resume)
        if answer is None:  # e.g. a child of a rank: the rank is guarded
            link.forget()
            return None
        if answer.refusal:
            log.error("%s", answer.refusal)
            raise SystemExit(2)
        self._link, self.welcome, self.agent_pid = link, answer, link.agent_pid
        if answer.is_barred:
            self.gate.block_updates()
            self.memory = HeldDump.at(answer.resume)
        _guarded.add(self._pid)
        os.register_at_fork(after_in_child=self._forget_in_child)
        return answer

    def _ask_welcome(self, link: AgentLink, *, wants_resume: bool) -> protocol.Welcome | None:
        hello = protocol.Hello(
            rank=self.env.rank,
            attempt=self.env.attempt,
            pid=self._pid,
            ckpt_save_path=self.options.ckpt_save_path,
            wants_resume=wants_resume,
            exit_file=self.options.exit_file,
            checkpoints=next(iter(self.options.checkpoints), ""),
            breakpoints=self.options.breakpoints,
        )
        # a replacement worker may be early: it is answered when the survivors' state is saved
        is_patient = wants_resume or self.env.attempt > 0
        try:
            answer = link.ask(hello, VERIFY_S if is_patient else ANSWER_S)
        except (OSError, wire.ProtocolError) as error:
            log.warning("nothing guards rank %d: %s", self.env.rank, error)
            return None
        return answer if isinstance(answer, protocol.Welcome) else None

    def register(self, page: int, step: int) -> None:
        """From now on the state can be saved. Called in the main thread; again for a new page."""
        if self._link is None:
            return
        kept = self.source.kept
        try:
            self._link.send(
                protocol.Registered(
                    **self._sender,
                    step=step,
                    not_replaceable_why=self.not_replaceable_why,
                    compares=self.compares,
                    rehearses=self.rehearses,
                    not_copied_why=self._copier.why_never,
                    keeper=0 if kept is None else kept.keeper,
                    board=0 if kept is None else kept.board,
                    not_kept_why=self.not_kept_why,
                ),
                [page],
            )
        except OSError:
            if self._listener is None:
                self._stop_guarding("the connection to msrun broke")
            return  # else the listener finds out, too: it saves if msrun is dead
        if self._listener is None:
            # else the kernel kills this process when msrun dies, before it could save
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
            self._catch_signals()
            self._listener = threading.Thread(target=self._listen, name="msrun", daemon=True)
            self._listener.start()
            exit_hooks.install_exit_hooks(self)

    def _catch_signals(self) -> None:
        """Turn the signals that request an exit into requests.

        SIGTERM is one of them unless the script uses it itself: Slurm and systemd send it to all
        processes of a job at once, and the state must not die with all its holders.
        """
        numbers = {*self.options.exit_signals}
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            numbers.add(signal.SIGTERM)
        if not numbers:
            return
        try:
            self._wakeup = SignalWakeup(numbers)
        except (OSError, ValueError) as error:
            log.warning(
                "a signal to rank %d alone does not request an exit: %s", self.env.rank, error
            )

    def why_unsafe(self) -> tuple[str, str]:
        """Why no step of this training may be saved, and why none may be read in live memory."""
        return self._unsafe_why, self.why_held_only

    def distrust(self, why: str) -> None:
        """From now on this rank's state counts as torn: it changes where nobody can see it."""
        self._unsafe_why = why

    def promise_nothing(self, why: str) -> None:
        """As :meth:`distrust`, for a reason that shows at the first commit, and have msrun say so.

        ``why``: empty: there is no reason.

        Raises:
            SystemExit: the script is not to train so, because of ``--strict``, exit code 2.
        """
        if not why:
            return
        self.distrust(why)
        if self.is_on and self._listener is not None:  # msrun may have said that it protects
            problem = NOTHING_PROMISED.format(why)
            self.report_fingerprint(self.source.step, {}, is_late=False, problem=problem, holds="")
        elif self.is_on and self.env.rank == 0:
            is_refused = self.env.is_strict and self._listener is None  # before the first step
            self.say_unprotected(NOTHING_PROMISED.format(why), is_refused=is_refused)

    def say_uncounted(self, why: str) -> None:
        """Have msrun say that no step of this training can be saved, as none is counted.

        Raises:
            SystemExit: the script is not to train so, because of ``--strict``, exit code 2.
        """
        if self.env.rank == 0:
            if self.env.is_strict:
                self.say_unprotected(f"not protected: {why}", is_refused=True)
            self.report_fingerprint(self.source.step, {}, is_late=False, problem=why, holds="")

    def request_exit(self, why: str) -> None:
        """Request that the whole job exits gracefully; without an agent, that this process does."""
        if self._link is not None:
            self._send(protocol.ExitRequested(**self._sender, why=why))
        else:
            self.gate.hold_at(self.source.step + 1, self.gate.exit)

    def say_unprotected(self, text: str, *, is_refused: bool) -> None:
        """Have msrun say what cannot be restored.

        Raises:
            SystemExit: the script is not to train so, exit code 2.
        """
        self._send(protocol.Unprotected(**self._sender, text=text, is_refused=is_refused))
        if is_refused:
            raise SystemExit(2)

    # --- the main thread ------------------------------------------------------------------------

    def hold_exception(self, error: str, *, is_futile: bool = False) -> bool:
        """Hold the main thread, whose training function has raised, until nothing is to be saved.

        ``is_futile``: a new rank in this one's place would fail in the same way.

        Returns:
            Whether it is to :meth:`rejoin`.
        """
        if self._is_guarding() and not self._released.is_set():
            self.gate.note_raised()
            with self._rejoin_lock:
                if self._rejoin_order is None:  # else the attempt that failed is over already
                    raised = protocol.Raised(
                        **self._sender, error=error[:2000], is_futile=is_futile
                    )
                    self._send(raised)
            self._await_release()
        return self._rejoin_order is not None

    def rejoin(self) -> tuple[protocol.Rejoin, bool]:
        """Become a rank of the attempt that was ordered; the training function was left.

        Returns:
            The order, and whether an update was under way.
        """
        with self._rejoin_lock:
            order, self._rejoin_order = self._rejoin_order, None
            assert order is not None
            self._is_out.set()
            aborting, self._aborting = self._aborting, None
            self.env = self.env._replace(attempt=order.attempt)
            host, port = self._store
            self._store = (order.host or host, order.port or port)
            self._released.clear()
            was_torn = self.gate.is_torn
            self.gate.reenter()
        communicators.await_abort(aborting)  # the lock is free: the listener hears another order
        self.is_done, self._frozen.version = False, None
        self._send(protocol.Rejoining(**self._sender))
        return order, was_torn

    def hold_exit(self) -> None:
        """Hold the main thread, which is about to exit, while its state may still be needed."""
        if self._is_guarding() and not self._released.is_set():
            self.gate.note_raised()
            self._send(protocol.Leaving(**self._sender, is_done=self.is_done))
            self._await_release()
        if self._is_guarding():
            self._copier.await_end()
            if self._wakeup is not None:
                self._wakeup.restore()  # soon nobody reads the pipe

    @property
    def _sender(self) -> _Sender:
        return {"rank": self.env.rank, "attempt": self.env.attempt}

    def _is_guarding(self) -> bool:
        return self._link is not None and self._listener is not None and os.getpid() == self._pid

    def _await_release(self) -> None:
        """Every wait of the agent is bounded, and the listener ends this process if it is gone."""
        while not self._released.wait(LOOK_S):
            if self._listener is None or not self._listener.is_alive():
                return

    def _forget_in_child(self) -> None:
        """A forked child is no rank."""
        if self._link is not None:
            self._link.forget()
            self._link = None
        self.peers.forget()
        if self.memory is not None:
            self.memory.close()
        self.source.forget()  # the page is the parent's
        self.gate.reset()
        self._copier.forget()

    # --- the listener ---------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._link is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            other = -1 if self._wakeup is None else self._wakeup.fileno
            while not self.is_forsaken:
                message, fds = self._link.listen(other, self._take_signals)
                if message is None:
                    break
                self._obey(message, fds)
            self._copier.give_up("msrun is gone")
            is_alone = self.is_forsaken or self._link.is_agent_dead(DYING_S)
            if self.exit_order is None and is_alone:
                self._is_out.set()  # else a main thread that is stuck would end the process
                self._when_agent_died(self)
        except Exception:
            log.exception("the guard of rank %d failed", self.env.rank)
        finally:
            self._stop_guarding("")

    def _obey(self, message: protocol.Message, fds: list[int]) -> None:  # noqa: C901, PLR0912  a row each
        match message:
            case protocol.Replicated():
                self.replicated = message
                group_info.tell(os.environ.get(GROUP_INFO_FILE, ""), self.env.rank, message.alike)
            case protocol.NotShared():
                self.not_shared[message.folder] = message.why
            case protocol.EndNotes():
                if (kept := self.source.kept) is not None:  # the main thread may take it away
                    kept.is_over = True
            case protocol.PeerPages():
                self.peers.learn(message.ranks, message.pids, fds)
            case protocol.OpenVote():
                self._open_vote(message, fds)
            case protocol.Copy():
                self._copier.copy(message, self.env, is_done=self.is_done)
            case protocol.Freeze():
                self._copier.give_up("the ranks were frozen")
                self._freeze(message)
            case protocol.Save():
                self._save(message)
            case protocol.Release():
                self._copier.give_up("the process exits")
                self._released.set()
            case protocol.SaveAlone(is_proven=is_proven, path=path):
                self.is_forsaken, self.is_loss_proven = True, is_proven
                self.offered = HeldDump.at(path)
            case protocol.Rejoin():
                self._copier.give_up("the rank joins another process group")
                self._eject(message)
            case protocol.MemoryBrought():
                self.far_tensors.hear(message, self.memory)
            case protocol.GoOn():
                held, self.memory = self.memory, None  # the state is what this rank holds now
                self.gate.open()
                del held  # last: to free a large one takes its time
            case protocol.Inspect():
                is_busy = self.source.device is not None and self.source.device.is_busy()
                self._send(stacks.inspect(**self._sender, order=message, is_device_busy=is_busy))
            case protocol.Hold() | protocol.Proceed() | protocol.Leave() | protocol.Dismiss():
                self._obey_exit(message)
            case _:
                log.warning("msrun sent what only a newer version understands: %s", message)

    def _open_vote(self, order: protocol.OpenVote, fds: Sequence[int]) -> None:
        for fd in fds:
            why_not = self._vote.take_part(order, fd, self.env.rank)
            opened = protocol.VoteOpened(
                **self._sender,
                step=self.source.step,
                why_not=why_not,
                why_cut_inside=self.why_cut_inside(),
                is_cut=order.is_cut,
            )
            self._send(opened)
            os.close(fd)

    def _eject(self, order: protocol.Rejoin) -> None:
        """Take the main thread out of the training function; it will :meth:`rejoin`."""
        assert self._link is not None
        is_out = threading.Event()
        # it is lost if the agent dies before the main thread has come to read it
        self.memory = HeldDump.at(order.path)
        if self.memory is None and self._link.is_agent_dead(0.0):
            return  # what this rank holds is all that is left
        with self._rejoin_lock:
            self._is_out.set()  # an order that this one replaces is obeyed with it: one watch ends
            self._rejoin_order, self._is_out = order, is_out
            self.gate.eject()
            self._released.set()
            # before the lock is free: then the main thread makes sockets of the next attempt
            abort.unblock(self._store)
            if self._aborting is None or not self._aborting.is_alive():
                self._aborting = communicators.abort()
            watched = (is_out, self._store)
        threading.Thread(target=abort.end_if_stuck, args=watched, daemon=True).start()

    def _obey_exit(
        self, order: protocol.Hold | protocol.Proceed | protocol.Leave | protocol.Dismiss
    ) -> None:
        match order:
            case protocol.Hold():
                step = self.gate.hold_next(lambda: self.is_done)
                self._send(protocol.Standing(**self._sender, dump_id=order.dump_id, step=step))
            case protocol.Proceed():
                self._proceed(order)
            case protocol.Leave():
                self._copier.give_up("the job exits")
                self.exit_order = order
                self._released.set()
                self.gate.exit()
            case protocol.Dismiss():
                self._copier.give_up("the job is being stopped")
                if self._wakeup is not None:
                    self._wakeup.give_way(self._last_signal)

    def _stop_guarding(self, why: str) -> None:
        if why:
            log.warning("nothing guards rank %d any more: %s", self.env.rank, why)
        self._copier.give_up("nothing guards the rank any more")
        self._released.set()
        self.gate.open()
        if self._wakeup is not None:
            self._wakeup.give_way()

    def _take_signals(self) -> None:
        assert self._wakeup is not None
        for number in self._wakeup.take():
            self._last_signal = number
            self.request_exit(f"rank {self.env.rank} received {signal.Signals(number).name}")

    def _proceed(self, order: protocol.Proceed) -> None:
        """Let the main thread reach the step that all ranks agreed on; report when it is there."""

        def arrived() -> None:
            why = self._unsafe_why or self.source.why_changed()
            frozen = protocol.Frozen(
                **self._sender, dump_id=order.dump_id, step=order.step, is_whole=not why, why=why
            )
            self._send(frozen)

        self._frozen.version = None
        self.gate.hold_at(order.step, arrived)
        is_there = self.is_done and self.source.step == order.step
        if is_there and self.gate.claim_arrival():  # it may never come to a boundary again
            arrived()

    def tell_page(self) -> None:
        """The record of the step under way is written. It costs the step some microseconds."""
        with contextlib.suppress(OSError):  # the page is sent on now and then, too
            self._tell_written(self._vote.backward_begins())

    def _tell_written(self, ready: int) -> None:
        if self._link is not None:
            self._link.try_send(protocol.PageWritten(**self._sender, ready=ready))

    def _send(self, message: protocol.Message) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):  # the listener notices the closed connection
                self._link.send(message)

    def freeze(self, grace_s: float, newest: int = 0) -> tuple[int, bool, str]:
        """Close the gate, as :meth:`worker_hooks.guard.frozen_state.FrozenState.freeze` says."""
        step, is_whole, why = self._frozen.freeze(grace_s, newest, self._unsafe_why)
        if is_whole and self.why_held_only and not (self.is_done or self.gate.is_waiting):
            return step, False, self.why_held_only
        return step, is_whole, why

    def _freeze(self, order: protocol.Freeze) -> None:
        step, is_whole, why = self.freeze(order.update_grace_s, order.step)
        if self._frozen.device_error:  # it stays: this process could not enter the script again
            stacks.end_process(why)  # a new process may use the device
        nbytes, host_nbytes = self.source.nbytes() if is_whole else (0, 0)
        held = step, is_whole, why, nbytes, host_nbytes, order.step
        self._send(protocol.Frozen(self.env.rank, self.env.attempt, order.dump_id, *held))

    def _save(self, order: protocol.Save) -> None:
        def report(nbytes: int) -> None:
            self._send(protocol.Progress(**self._sender, dump_id=order.dump_id, nbytes=nbytes))

        try:
            self._before_dump()
            answer = self.save(order, ThrottledProgress(report))
        except Exception as error:  # noqa: BLE001  an OSError is not one of ours, either
            self._send(saving.failed(self.env, order, error))
        else:
            self._send(answer)

    def save(
        self, order: protocol.Save, advance: Callable[[int], None]
    ) -> protocol.Written | protocol.Digested:
        """As :func:`worker_hooks.guard.save.save`, of this rank."""
        grace_s = VERIFY_S if self.welcome is None else self.welcome.update_grace_s
        answer = self._frozen.save(self.env, order, grace_s, advance)
        self.digests.note(answer)
        return answer
