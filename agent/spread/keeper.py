"""Another node keeps the newest checkpoint in memory that the controller's node has sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent.machine.loop_calls import CallSoon
from agent.machine.threads import begin_thread
from agent.nodes.run_messages import MemoryTaken, TakeMemory
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import close_all
from agent.spread.memory_copy import MemoryCopy
from agent.spread.written_here import WrittenHere, WrittenStates
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.storage import manifest as manifests

FORGOTTEN = "msrun has the state no longer"
NOWHERE = "/proc/0/fd/0"  # in memory, as paths there are, but of no process


class MemoryKeeper:
    """Another node: keeps the newest checkpoint that the controller's node has sent."""

    def __init__(
        self,
        host: str,
        call_soon: CallSoon,
        tell: Callable[[MemoryTaken], None],
        written: WrittenHere,
        security: Security = PLAIN,
    ) -> None:
        """Keep nothing yet.

        Args:
            host: address of the controller's node.
            call_soon: the loop's method that another thread may call.
            tell: takes what to say to the controller.
            written: what ranks here write of it.
            security: of the connections to the controller's node.
        """
        self._written = written
        self._security = security
        self._host = host
        self._call_soon = call_soon
        self._tell = tell
        self._copy: MemoryCopy | None = None
        self._order: TakeMemory | None = None  # the newest
        self._waiting: list[Callable[[str], object]] = []  # for its tensors
        self.is_controllers = False
        """Whether the controller is in this process: its memory is this one's."""

    def as_here(self, message: protocol.Message) -> protocol.Message:
        """What the controller's node says of its memory, as of the copy here."""
        match message:
            case protocol.Rejoin(path=path) if manifests.is_in_memory(Path(path)):
                return message._replace(path=self._here(path))
            case protocol.Welcome(resume=path) if manifests.is_in_memory(Path(path)):
                return message._replace(resume=self._here(path))
            case _:
                return message

    def _here(self, path: str) -> str:
        """The same number of a process here would be another file, if that process is not this."""
        if self.is_controllers:
            return path
        order, copy = self._order, self._copy
        return NOWHERE if copy is None or order is None or path != order.path else copy.path

    def take(self, order: TakeMemory) -> None:
        """Fetch a checkpoint, in a thread; the one before is forgotten."""
        self.forget()
        self._order, written = order, self._written.take()
        try:
            begin_thread("msrun-fetch", self._fetch, order, written)
        except OSError as error:
            written.close()
            self._keep(order, None, describe_os_error(error))

    def move(self, host: str) -> None:
        """The controller's node is another machine, which knows nothing of what is kept here."""
        self.forget()
        self._host = host

    def forget(self) -> None:
        """Free the memory."""
        self._order = None
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()
        self._answer(FORGOTTEN)

    @property
    def lacks_tensors(self) -> bool:
        """Whether those of the copy have yet to come."""
        return self._copy is not None and self._copy.is_partial

    def bring(self, inode: int, done: Callable[[str], object]) -> None:
        """A rank reads tensors of a copy: have them here.

        Args:
            inode: of a file of it, which the rank has open.
            done: takes why they cannot be brought; empty: they are here.
        """
        if self._copy is not None and self._copy.has(inode):
            self.bring_all(done)
        else:
            done(FORGOTTEN)

    def bring_all(self, done: Callable[[str], object]) -> None:
        """Have the tensors of the newest copy here; ``done`` as for :meth:`bring`."""
        copy = self._copy
        if copy is None:
            done(FORGOTTEN)
        elif not copy.is_partial:
            done("")
        elif self._waiting:
            self._waiting.append(done)
        else:
            try:
                files = copy.opened()
            except OSError as error:
                done(describe_os_error(error))
                return
            self._waiting.append(done)
            try:
                begin_thread("msrun-bring", self._bring, copy, files)
            except OSError as error:
                close_all(files)
                self._answer(describe_os_error(error))

    def _bring(self, copy: MemoryCopy, files: list[int]) -> None:
        why = ""
        try:
            copy.bring(files)
        except OSError as error:
            why = describe_os_error(error)
        finally:
            close_all(files)
        self._call_soon(self._brought, copy, why)

    def _brought(self, copy: MemoryCopy, why_not: str) -> None:
        if copy is not self._copy:  # who waited for it has been told
            return
        if not why_not:
            try:
                copy.complete()
            except OSError as error:
                why_not = describe_os_error(error)
        self._answer(why_not)

    def _answer(self, why_not: str) -> None:
        waiting, self._waiting = self._waiting, []
        for done in waiting:
            done(why_not)

    def _fetch(self, order: TakeMemory, written: WrittenStates) -> None:
        copy, why = None, ""
        try:
            copy = MemoryCopy(order, self._host, self._security, written)
        except OSError as error:
            why = describe_os_error(error)
        except Exception as error:  # noqa: BLE001  the controller waits for the answer
            why = repr(error)
        self._call_soon(self._keep, order, copy, why)

    def _keep(self, order: TakeMemory, copy: MemoryCopy | None, why_not: str) -> None:
        if order is not self._order:  # another one was ordered meanwhile, or none any more
            if copy is not None:
                copy.close()
            return
        self._copy = copy
        self._tell(MemoryTaken(order.path, why_not))
