"""Another node keeps the newest checkpoint in memory that the controller's node has sent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

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

Brought = Callable[[str, tuple[int, ...]], object]
"""Takes why tensors cannot be brought (empty: they are here), and whose are absent by now."""


class _Waiting(NamedTuple):
    """Somebody waits for tensors of states."""

    wanted: frozenset[int]
    done: Brought

    def lacks(self, copy: MemoryCopy) -> frozenset[int]:
        """What has yet to come."""
        return self.wanted & {*copy.absent}


class MemoryKeeper:
    """Another node: keeps the newest checkpoint that the controller's node has sent."""

    def __init__(
        self,
        host: str,
        call_soon: CallSoon,
        tell: Callable[[MemoryTaken], None],
        came: Callable[[int, tuple[int, ...]], object],
        ranks: Collection[int],
        written: WrittenHere,
        security: Security = PLAIN,
    ) -> None:
        """Keep nothing yet.

        Args:
            host: address of the controller's node.
            call_soon: the loop's method that another thread may call.
            tell: takes what to say to the controller.
            came: hears, once tensors have come, by which inode ranks know the copy, and of which
                states they are still absent.
            ranks: of this node.
            written: what ranks here write of it.
            security: of the connections between nodes.
        """
        self._came = came
        self._ranks = ranks
        self._written = written
        self._security = security
        self._host = host
        self._call_soon = call_soon
        self._tell = tell
        self._copy: MemoryCopy | None = None
        self._order: TakeMemory | None = None  # the newest
        self._waiting: list[_Waiting] = []
        self._is_fetching = False  # for some of these
        self.is_controllers = False
        """Whether the controller is in this process: its memory is this one's."""

    @property
    def path(self) -> str:
        """Of what is here; empty: nothing, or it is the controller's."""
        return "" if self._copy is None or self.is_controllers else self._copy.path

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
        self._is_fetching = False
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.done(FORGOTTEN, ())

    def lacks(self) -> bool:
        """Whether tensors that ranks here resume from have yet to come."""
        return self._copy is not None and bool(self._own(self._copy))

    def _own(self, copy: MemoryCopy) -> tuple[int, ...]:
        own = {*copy.own_of(self._ranks)}
        return tuple(variant for variant in copy.absent if variant in own)

    def bring(self, inode: int, variants: Collection[int], done: Brought) -> None:
        """A rank reads tensors of a copy: have them here.

        Args:
            inode: of a file of it, which the rank has open.
            variants: of which states.
            done: hears what came of it.
        """
        if self._copy is not None and self._copy.has(inode):
            self._have(_Waiting(frozenset(variants), done))
        else:
            done(FORGOTTEN, ())

    def bring_own(self, done: Callable[[str], object]) -> None:
        """Have all tensors here that ranks of this node resume from.

        ``done``: takes why they cannot be brought; empty: they are here.
        """
        if self._copy is None:
            done(FORGOTTEN)
        else:
            own = frozenset(self._own(self._copy))
            self._have(_Waiting(own, lambda why, _: done(why)))

    def complete(self) -> None:
        """The ranks do not train again yet: have here what this node is to save otherwise."""
        if self._copy is not None and self._order is not None and self._order.late:
            self._have(_Waiting(frozenset(self._order.late), lambda *_: None))

    def _have(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self._go_on()

    def _go_on(self) -> None:
        """Answer those whose tensors are here, and fetch what others wait for."""
        copy = self._copy
        if copy is None or self._is_fetching:
            return
        lacking = [(each, each.lacks(copy)) for each in self._waiting]
        self._waiting = [each for each, lacks in lacking if lacks]
        for each in (each for each, lacks in lacking if not lacks):
            each.done("", copy.absent)
        if self._waiting and not self._is_fetching:
            # one after the other: what fails for one need not fail for all
            self._begin(copy, tuple(sorted(self._waiting[0].lacks(copy))))

    def _begin(self, copy: MemoryCopy, variants: tuple[int, ...]) -> None:
        """Fetch tensors of these states, in a thread."""
        self._is_fetching = True
        try:
            files = copy.opened()
        except OSError as error:
            self._fail(variants, describe_os_error(error))
            return

        def bring() -> None:
            why = ""
            try:
                copy.bring(variants, files)
            except OSError as error:
                why = describe_os_error(error)
            finally:
                close_all(files)
            self._call_soon(self._brought, copy, variants, why)

        try:
            begin_thread("msrun-bring", bring)
        except OSError as error:
            close_all(files)
            self._fail(variants, describe_os_error(error))

    def _brought(self, copy: MemoryCopy, variants: tuple[int, ...], why_not: str) -> None:
        if copy is not self._copy:  # who waited for it has been told
            return
        if not why_not:
            try:
                copy.complete(variants)
            except OSError as error:
                why_not = describe_os_error(error)
        if why_not:
            self._fail(variants, why_not)
            return
        self._is_fetching = False
        for inode in copy.inodes:
            self._came(inode, copy.absent)
        self._go_on()

    def _fail(self, variants: Collection[int], why_not: str) -> None:
        """What is fetched does not come: nobody waits for that any more."""
        self._is_fetching = False
        over = [each for each in self._waiting if not each.wanted.isdisjoint(variants)]
        self._waiting = [each for each in self._waiting if each.wanted.isdisjoint(variants)]
        absent = () if self._copy is None else self._copy.absent
        for each in over:
            each.done(why_not, absent)
        self._go_on()

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
