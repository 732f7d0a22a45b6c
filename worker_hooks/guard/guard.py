"""Guards one rank's state: keeps the line to the agent, freezes the gate, saves when told to.

The listener is a thread of its own because the main thread may sit in a collective that a dead
peer never joins. It reads the live state only while the gate is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol

from worker_hooks.contract import protocol, wire
from worker_hooks.contract.env import RankEnv
from worker_hooks.contract.status_page import Page
from worker_hooks.distributed import abort, stacks
from worker_hooks.guard import exit_hooks
from worker_hooks.guard import save as saving
from worker_hooks.guard.agent_link import ANSWER_S, VERIFY_S, AgentLink
from worker_hooks.guard.gate import Gate, Stand
from worker_hooks.guard.liveness_socket import LivenessSocket
from worker_hooks.guard.signal_wakeup import SignalWakeup
from worker_hooks.storage.durable_file import ThrottledProgress

log = logging.getLogger("msrun")

PR_SET_PDEATHSIG = 1  # linux/prctl.h
DYING_S = 1.0  # from a closed line to the end of the agent that closed it by dying
LOOK_S = 1.0


_guarded: set[int] = set()  # this process, once the agent has welcomed it


class StateSource(saving.SaveSource, Protocol):
    """Whose state is guarded."""

    @property
    def step(self) -> int:
        """The newest commit."""

    @property
    def page(self) -> Page | None:
        """Its status page."""

    def is_complete(self) -> bool:
        """Whether the update after the commit changed all that a step usually changes."""

    def is_touched(self) -> bool:
        """Whether live state was changed since the commit, by an optimizer or by the script."""

    def nbytes(self) -> tuple[int, int]:
        """About how large the replicated state is, and what of it is in ordinary memory."""

    def forget(self) -> None:
        """Write to no page any more."""


class StartupOptions(NamedTuple):
    """What a training wants of its guard. Paths are absolute; an empty text means none."""

    ckpt_save_path: str = ""  # where dumps are saved
    exit_file: str = ""  # the JSON file in which a graceful exit can be requested
    exit_signals: tuple[int, ...] = ()  # signals to this process that request a graceful exit
    checkpoints: tuple[str, ...] = ()  # where periodic checkpoints are saved
    breakpoints: str = ""  # prefix of an exception's dump in the first of those folders


class Guard:
    """One rank's guard; without a connection it guards nothing and costs nothing."""

    def __init__(
        self,
        env: RankEnv,
        source: StateSource,
        options: StartupOptions,
        *,
        before_dump: Callable[[], None],
        when_agent_died: Callable[[Guard], None],
    ) -> None:
        """Prepare; :meth:`greet` connects.

        Args:
            env: who this process is.
            source: the state.
            options: what the training wants.
            before_dump: called in the listener before the state is digested or written.
            when_agent_died: called in the listener; saves the state and ends the process.
        """
        self.gate = Gate(lambda: source.step)
        self.welcome: protocol.Welcome | None = None
        self.env = env
        self.source = source
        self.options = options
        self._before_dump = before_dump
        self._when_agent_died = when_agent_died
        self._signal: int | None = None  # that came last
        self._link: AgentLink | None = None
        self._beacon: LivenessSocket | None = None
        self._listener: threading.Thread | None = None
        self._wakeup: SignalWakeup | None = None
        self._released = threading.Event()
        self.is_done = False  # training is over
        self.resumed_step = 0  # saved already, in the checkpoint this attempt began from
        self.left: protocol.Leave | None = None  # the order with which a graceful exit ends
        self.why_fixed = ""  # why this rank can join no other group; empty: it can
        self._rejoin: protocol.Rejoin | None = None  # ordered, and not obeyed yet
        self._turning = threading.Lock()  # from one attempt to the next
        self._out = threading.Event()  # the main thread has come to its top for the order
        self._pid = os.getpid()
        self._frozen: int | None = None  # the state's version, where it was torn but complete
        self.digest = ""  # quick, of the state that was compared last

    @property
    def is_on(self) -> bool:
        """Whether somebody will save this state."""
        return self._link is not None

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
        try:
            # a newcomer may be early: it is answered when the survivors' state is saved
            is_patient = wants_resume or self.env.attempt > 0
            answer = link.ask(hello, VERIFY_S if is_patient else ANSWER_S)
        except (OSError, wire.ProtocolError) as error:
            log.warning("nothing guards rank %d: %s", self.env.rank, error)
            answer = None
        if not isinstance(answer, protocol.Welcome):  # e.g. a child of a rank: the rank is guarded
            link.forget()
            return None
        if answer.refusal:
            log.error("%s", answer.refusal)
            raise SystemExit(2)
        self._link, self.welcome = link, answer
        if answer.is_barred:
            self.gate.bar()
        _guarded.add(self._pid)
        os.register_at_fork(after_in_child=self._forget)
        return answer

    def register(self, page: int, step: int) -> None:
        """From now on the state can be saved. Called in the main thread; again for a new page."""
        if self._link is None:
            return
        try:
            self._link.send(protocol.Registered(*self._who, step, self.why_fixed), [page])
        except OSError:
            self._give_up("the line to msrun broke")
            return
        if self._listener is None:
            # the kernel would kill this thread's process with msrun, before it could save
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
            self._beacon = LivenessSocket(self.env)
            self._catch()
            self._listener = threading.Thread(target=self._listen, name="msrun", daemon=True)
            self._listener.start()
            exit_hooks.install_exit_hooks(self)

    def _catch(self) -> None:
        """From now on somebody hears the signals that ask for an exit.

        SIGTERM is one of them unless the script has a use for it: Slurm and systemd send it to all
        processes of a job at once, and the state must not die with all who hold it.
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
                "a signal to rank %d alone is no request to exit: %s", *self._who[:1], error
            )

    def request_exit(self, why: str) -> None:
        """Ask that the whole job leaves gracefully; without an agent, that this process does."""
        if self._link is not None:
            self._say(protocol.ExitRequested(*self._who, why))
        else:
            self.gate.hold_at(self.source.step + 1, self.gate.leave)

    # --- the main thread ------------------------------------------------------------------------

    def raised(self, error: str) -> bool:
        """Hold the main thread, which has come to its top, until nothing is to be saved.

        Returns:
            Whether it is to :meth:`rejoin`.
        """
        if self._is_guarding() and not self._released.is_set():
            self.gate.note_raised()
            with self._turning:
                if self._rejoin is None:  # else what failed is over already
                    self._say(protocol.Raised(*self._who, error[:2000]))
            self._await_release()
        return self._rejoin is not None

    def rejoin(self) -> tuple[protocol.Rejoin, bool]:
        """From now on be a rank of the attempt that was ordered; the main thread is at its top.

        Returns:
            The order, and whether an update was under way.
        """
        with self._turning:
            order, self._rejoin = self._rejoin, None
            assert order is not None
            self._out.set()
            self.env = self.env._replace(attempt=order.attempt)
            self._released.clear()
            was_torn = self.gate.is_torn
            self.gate.enter()
        self.is_done, self._frozen = False, None
        self._say(protocol.Rejoining(*self._who))
        return order, was_torn

    def leave(self) -> None:
        """Hold the main thread, which is about to exit, while its state may still be needed."""
        if self._is_guarding() and not self._released.is_set():
            self.gate.note_raised()
            self._say(protocol.Leaving(*self._who, self.is_done))
            self._await_release()
        if self._is_guarding() and self._wakeup is not None:
            self._wakeup.restore()  # soon nobody reads what it tells

    @property
    def _who(self) -> tuple[int, int]:
        return self.env.rank, self.env.attempt

    def _is_guarding(self) -> bool:
        return self._link is not None and self._listener is not None and os.getpid() == self._pid

    def _await_release(self) -> None:
        """Every wait of the agent is bounded, and the listener ends this process if it is gone."""
        while not self._released.wait(LOOK_S):
            if self._listener is None or not self._listener.is_alive():
                return

    def _forget(self) -> None:
        """In a forked child: it is no rank."""
        if self._link is not None:
            self._link.forget()
            self._link = None
        if self._beacon is not None:
            self._beacon.close()
        self.source.forget()  # the page is the parent's
        self.gate.forget()

    # --- the listener ---------------------------------------------------------------------------

    def _listen(self) -> None:
        assert self._link is not None
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            other = -1 if self._wakeup is None else self._wakeup.fileno
            while (message := self._link.listen(other, self._awake)) is not None:
                self._obey(message)
            if self.left is None and self._link.is_agent_dead(DYING_S):
                self._when_agent_died(self)
        except Exception:
            log.exception("the guard of rank %d failed", self.env.rank)
        finally:
            self._give_up("")

    def _obey(self, message: protocol.Message) -> None:
        match message:
            case protocol.Freeze():
                self._freeze(message)
            case protocol.Save():
                self._save(message)
            case protocol.Release():
                self._released.set()
            case protocol.Rejoin():
                self._turn(message)
            case protocol.GoOn():
                self.gate.open()
            case protocol.Inspect():
                self._say(stacks.inspect(*self._who, message))
            case protocol.Hold() | protocol.Proceed() | protocol.Leave() | protocol.Dismiss():
                self._exit(message)
            case _:
                log.warning("msrun said what only a newer version understands: %s", message)

    def _turn(self, order: protocol.Rejoin) -> None:
        """Take the main thread to its top, wherever it is; it will :meth:`rejoin`."""
        assert self._link is not None
        is_out = threading.Event()
        with self._turning:
            self._rejoin, self._out = order, is_out
            self.gate.eject()
            self._released.set()
            # the main thread gets no further than here before this is over: it makes new sockets
            abort.unblock(self._link.agent_pid)
        threading.Thread(target=abort.end_if_stuck, args=(is_out,), daemon=True).start()

    def _exit(
        self, order: protocol.Hold | protocol.Proceed | protocol.Leave | protocol.Dismiss
    ) -> None:
        match order:
            case protocol.Hold():
                step = self.gate.hold_next(lambda: self.is_done)
                self._say(protocol.Standing(*self._who, order.dump_id, step))
            case protocol.Proceed():
                self._proceed(order)
            case protocol.Leave():
                self.left = order
                self._released.set()
                self.gate.leave()
            case protocol.Dismiss():
                if self._wakeup is not None:
                    self._wakeup.give_way(self._signal)

    def _give_up(self, why: str) -> None:
        if why:
            log.warning("nothing guards rank %d any more: %s", self.env.rank, why)
        self._released.set()
        self.gate.open()
        if self._wakeup is not None:
            self._wakeup.give_way()

    def _awake(self) -> None:
        """A signal has come."""
        assert self._wakeup is not None
        for number in self._wakeup.take():
            self._signal = number
            self.request_exit(f"rank {self.env.rank} received {signal.Signals(number).name}")

    def _proceed(self, order: protocol.Proceed) -> None:
        """Let the main thread come to the step that all agreed on; tell when it is there."""

        def arrived() -> None:
            is_whole = not self.source.is_touched()
            why = "" if is_whole else f"the script itself changed the state after step {order.step}"
            self._say(protocol.Frozen(*self._who, order.dump_id, order.step, is_whole, why))

        self._frozen = None
        self.gate.hold_at(order.step, arrived)
        is_there = self.is_done and self.source.step == order.step
        if is_there and self.gate.take_arrival():  # it may never come by a boundary again
            arrived()

    def _say(self, message: protocol.Message) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):  # the listener hears the closed line
                self._link.send(message)

    def freeze(self, grace_s: float, newest: int = 0) -> tuple[int, bool, str]:
        """Close the gate: the step the state is whole as of, whether it is, and why not."""
        source = self.source
        stand = self.gate.close(grace_s, source.is_complete, source.is_touched, newest)
        step = self.source.step + (stand is Stand.UPDATED)
        self._frozen = self.source.version() if stand is Stand.UPDATED else None
        why = ""
        if stand is Stand.TORN:
            who = "an optimizer" if self.gate.is_torn else "the script itself"
            why = f"{who} began to update after step {step} and did not reach its commit"
        return step, stand is not Stand.TORN, why

    def _freeze(self, order: protocol.Freeze) -> None:
        step, is_whole, why = self.freeze(order.update_grace_s, order.step)
        nbytes = self.source.nbytes() if is_whole else (0, 0)
        self._say(protocol.Frozen(*self._who, order.dump_id, step, is_whole, why, *nbytes))

    def _save(self, order: protocol.Save) -> None:
        def tell(nbytes: int) -> None:
            self._say(protocol.Progress(*self._who, order.dump_id, nbytes))

        try:
            self._before_dump()
            done = self.save(order, ThrottledProgress(tell))
        except Exception as error:  # noqa: BLE001  an OSError is not one of ours, either
            self._say(saving.failed(self._who, order, error))
        else:
            self._say(done)

    def save(
        self, order: protocol.Save, advance: Callable[[int], None]
    ) -> protocol.Written | protocol.Digested:
        """As :func:`worker_hooks.guard.save.save`, of this rank."""
        done = saving.save(self.source, self._who, order, self._frozen, advance)
        self.digest = done.digest
        return done
