"""The agent's side of the forkserver: start it, order workers, receive its answers.

Its death is an event like any other (``agent.workers.starter`` handles it); running workers do not
depend on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from agent.workers.master_port import loopback_host
from agent.workers.order_batches import batches
from worker_hooks.contract import protocol, wire

_ROOT = Path(__file__).parents[2]
_WARM = _ROOT / "agent/forkserver"
_COLD_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from agent.forkserver import server; server.serve_cold(sys.argv[2])"
)


class WarmStart(NamedTuple):
    """What a warm forkserver needs to know about the script."""

    argv: tuple[str, ...]  # the interpreter's command line, exactly that of a cold worker
    preload: tuple[str, ...]  # imported before the first fork
    later: tuple[str, ...]  # imported after it, so that a restart finds it warm
    search_path: str  # what will be sys.path[0] for the script


class ForkserverClient:
    """One forkserver process and the link to it."""

    def __init__(
        self,
        warmth: WarmStart | None,
        environ: Mapping[str, str],
        record_id: str,
        log: Path | None,
        *,
        is_ours: bool,
    ) -> None:
        """Describe it; nothing starts yet.

        Args:
            warmth: what it preloads; ``None``: nothing, it starts fresh interpreters.
            environ: the part of the workers' environment that is the same for all.
            log: where its own output goes; ``None``: to msrun's streams.
            is_ours: fresh workers run the interpreter that runs msrun.
        """
        self.warmth = warmth
        self._environ = dict(environ)
        self._record_id = record_id
        self._log = log
        self._is_ours = is_ours
        self._files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the agent may raise its own
        self.link: socket.socket | None = None
        self.pid = 0
        self.ready = False
        self._waiting: deque[protocol.StartWorkers] = deque()
        self._unanswered: set[int] = set()  # ranks of the batch that was sent

    def cooled(self) -> ForkserverClient:
        """A forkserver that preloads nothing, for when a warm one is of no use."""
        cold = ForkserverClient(
            None, self._environ, self._record_id, self._log, is_ours=self._is_ours
        )
        cold._files = self._files
        return cold

    @property
    def environ(self) -> Mapping[str, str]:
        """The part of the workers' environment that the process has."""
        return self._environ

    def know(self, environ: Mapping[str, str]) -> None:
        """More of the workers' environment; the process has it once it is started again."""
        self._environ |= environ

    def start(self) -> None:
        """Start the process; Ready arrives on the link.

        Raises:
            OSError: no process or socket could be created.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        orders: dict[str, object] = {
            "fd": theirs.fileno(),
            "agent_pid": os.getpid(),
            "record_id": self._record_id,
            "preload": [],
        }
        environ = dict(self._environ)
        if self.warmth is None:
            root = str(_ROOT)
            orders["site"] = str(_WARM) if self._is_ours else None
            argv = [sys.executable, "-I", "-S", "-c", _COLD_START, root, json.dumps(orders)]
        else:
            argv = list(self.warmth.argv)
            orders["preload"] = self.warmth.preload
            orders["search_path"] = self.warmth.search_path
            orders["pythonpath"] = environ.get("PYTHONPATH")
            environ["MSRUN_FORKSERVER"] = json.dumps(orders)
            environ["PYTHONPATH"] = os.pathsep.join(
                filter(None, (str(_WARM), environ.get("PYTHONPATH")))
            )
        try:
            self.pid = self._spawn(argv, environ, theirs)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self.link = ours
        self.ready = False

    def _spawn(self, argv: list[str], environ: dict[str, str], link: socket.socket) -> int:
        log = None if self._log is None else _open_log(self._log)
        try:
            process = subprocess.Popen(
                argv,
                env=environ,
                stdout=log,
                stderr=log,
                pass_fds=(link.fileno(),),
                start_new_session=True,
            )
        finally:
            if log is not None:
                os.close(log)
        with contextlib.suppress(OSError):  # it is dead already: its link reports that
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, self._files)
        process.returncode = 0  # it is reaped with all other children; Popen must not try
        return process.pid

    def order(
        self, attempt: int, workers: Sequence[protocol.WorkerOrder], *, keeps: bool = False
    ) -> None:
        """Order workers; each is answered by Forked or ForkFailed.

        One batch at a time: with thousands of ranks both sides would fill the link and block.
        ``keeps``: workers of earlier attempts stay alive.

        Raises:
            OSError: the forkserver is gone.
        """
        self._waiting.extend(batches(attempt, workers, keeps=keeps))
        self._order_next()

    def recall(self) -> tuple[protocol.WorkerOrder, ...]:
        """Take back the orders that were not sent yet."""
        recalled = tuple(order for batch in self._waiting for order in batch.workers)
        self._waiting.clear()
        return recalled

    def _order_next(self) -> None:
        if self._waiting and not self._unanswered:
            batch = self._waiting.popleft()
            self._unanswered = {order.rank for order in batch.workers}
            self._send(batch)

    def warm_up(self) -> None:
        """Import what a restart will need, while nobody waits."""
        if self.warmth is not None and self.warmth.later:
            self._send(protocol.Preload(self.warmth.later))

    def order_store(self, attempt: int, listener: socket.socket) -> None:
        """Hand a listening socket to a new store host; answered by StoreForked.

        Raises:
            OSError: the forkserver is gone.
        """
        order = protocol.StartStore(attempt, loopback_host(listener), listener.getsockname()[1])
        self._send(order, [listener.fileno()])

    def begin_anew(self) -> None:
        """None of the workers is left: their process ids may become those of others.

        Raises:
            OSError: the forkserver is gone.
        """
        self._send(
            protocol.StartWorkers(-1, ())
        )  # of no attempt: those of all others are forgotten

    def protect(self, pid: int) -> None:
        """Let a worker live for a while if the agent dies.

        Raises:
            BlockingIOError: the link is full; its writability tells when to try again.
            OSError: the forkserver is gone.
        """
        if self.link is None:
            raise BrokenPipeError("the forkserver is not running")
        wire.send(self.link, protocol.ProtectWorker(pid))

    def _send(self, message: protocol.Message, fds: Sequence[int] = ()) -> None:
        if self.link is None:
            raise BrokenPipeError("the forkserver is not running")
        self.link.setblocking(True)
        self.link.settimeout(60)
        try:
            wire.send(self.link, message, fds)
        finally:
            self.link.setblocking(False)

    def receive(self, deliver: Callable[[protocol.Message], None]) -> bool:
        """Deliver every message that has arrived; False when the forkserver is gone."""
        while self.link is not None:
            try:
                message, _ = wire.receive(self.link)
            except BlockingIOError:
                return True
            if message is None:
                return False
            match message:
                case protocol.Ready():
                    self.ready = True
                case protocol.Forked() | protocol.ForkFailed():
                    self._unanswered.discard(message.rank)
                    with contextlib.suppress(OSError):  # it is gone: the next receive reports that
                        self._order_next()
                case _:
                    pass
            deliver(message)
        return False

    def take_last(self, deliver: Callable[[protocol.Message], None]) -> None:
        """Refuse all further messages and deliver what has arrived: those processes run.

        A child that has not introduced itself cannot do so any more, and exits.
        """
        self.ready = False
        self._waiting.clear()
        if self.link is not None:
            with contextlib.suppress(OSError):  # the other end is closed
                self.link.shutdown(socket.SHUT_RDWR)
            self.receive(lambda said: None if isinstance(said, protocol.Ready) else deliver(said))
            self.ready = False

    def forget(self) -> None:
        """Close the link: the process exits then, if it is alive."""
        if self.link is not None:
            self.link.close()
            self.link = None
        self.ready = False
        self._waiting.clear()
        self._unanswered.clear()


def _open_log(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # a full disk: the journal reports that
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
