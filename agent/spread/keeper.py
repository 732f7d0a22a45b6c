"""Another node keeps the newest checkpoint in memory that the controller's node has sent."""

from __future__ import annotations

import os
import threading
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from agent.dump.beside import manifest_file
from agent.dump.room import SPARE, shortage
from agent.machine.loop_calls import CallSoon
from agent.nodes.run_messages import MemoryTaken, TakeMemory
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import Span, close_all, fetch, memory_files, seal
from agent.spread.parts import spans_of, split
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import held
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.storage import manifest as manifests
from worker_hooks.storage.manifest import Shard

FORGOTTEN = "msrun has the state no longer"
NOWHERE = "/proc/0/fd/0"  # in memory, as paths there are, but of no process


class _Copy:
    """A checkpoint in memory of this node."""

    def __init__(self, order: TakeMemory, host: str, security: Security) -> None:
        """Fetch it.

        Raises:
            OSError: it does not come, or there is no room for it.
            ValueError: the order is not to be understood.
        """
        self._manifest = manifests.decode(order.manifest)
        self._spans = spans_of(self._manifest)
        now, later = self._spans, list[Span]()
        if order.heads:
            now, later = split(self._manifest, order.heads)
        self._rest, self._key = later, bytes.fromhex(order.rest)
        self._from = host, order.port, security
        _check_room(now)
        name = f"msrun-memory-{self._manifest.step}"
        sizes = [span.nbytes or 0 for span in self._spans]
        self._files = memory_files(sizes, name)
        self._begins = [span[:2] for span in self._spans]
        self._described: list[int] = []  # files of the manifest
        try:
            fetch(host, order.port, bytes.fromhex(order.key), self._here(now), security)
            if not later:
                seal(self._files)
            self._describe()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Of its manifest, as ranks here open it."""
        return held(self._described[-1])

    @property
    def is_partial(self) -> bool:
        """Whether the tensors have yet to come."""
        return bool(self._rest)

    def has(self, inode: int) -> bool:
        """Whether one of its files has this inode."""
        return any(os.fstat(file).st_ino == inode for file in self._files)

    def opened(self) -> list[int]:
        """Its files by descriptors of their own, which whoever fills them closes.

        Raises:
            OSError: no descriptor is left.
        """
        found: list[int] = []
        try:
            found.extend(map(os.dup, self._files))
        except OSError:
            close_all(found)
            raise
        return found

    def bring(self, files: Sequence[int]) -> None:
        """Fetch the tensors. In a thread: the copy may be closed meanwhile.

        ``files``: as :meth:`opened`.

        Raises:
            OSError: they do not come, or there is no room for them.
        """
        _check_room(self._rest)
        host, port, security = self._from
        fetch(host, port, self._key, self._here(self._rest, files), security)
        seal(files)  # here: of a large one it takes as long as a turn of the loop must not

    def complete(self) -> None:
        """They are there: whoever opens it from now on finds all of it.

        Raises:
            OSError: no descriptor is left.
        """
        self._rest = []
        self._describe()

    def close(self) -> None:
        """Free the memory, once no rank has it open."""
        close_all((*self._files, *self._described))
        self._files, self._described = [], []

    def _here(self, spans: Iterable[Span], files: Sequence[int] = ()) -> Iterator[Span]:
        """Where parts of the controller's files are here; ``files``: other numbers of the same."""
        for file, begin, nbytes in spans:
            number, at = self._place(file, begin)
            yield Span((files or self._files)[number], at, nbytes)

    def _place(self, file: int, at: int) -> tuple[int, int]:
        """Which of the files has what the controller has there, and from where on."""
        number = bisect(self._begins, (file, at)) - 1
        return number, at - self._spans[number].at

    def _describe(self) -> None:
        """Write the manifest with the numbers of this process."""

        def here(shard: Shard) -> Shard:
            number, at = self._place(int(shard.file), shard.at)
            return shard._replace(file=str(self._files[number]), at=at)

        shards = tuple(map(here, self._manifest.shards))
        here_all = self._manifest._replace(shards=shards, is_partial=self.is_partial)
        name = f"msrun-memory-{self._manifest.step}-manifest"
        self._described.append(manifest_file(here_all, name))


class MemoryKeeper:
    """Another node: keeps the newest checkpoint that the controller's node has sent."""

    def __init__(
        self,
        host: str,
        call_soon: CallSoon,
        tell: Callable[[MemoryTaken], None],
        security: Security = PLAIN,
    ) -> None:
        """Keep nothing yet.

        Args:
            host: address of the controller's node.
            call_soon: the loop's method that another thread may call.
        """
        self._security = security
        self._host = host
        self._call_soon = call_soon
        self._tell = tell
        self._copy: _Copy | None = None
        self._wanted = ""
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
        return self._copy.path if self._copy is not None and path == self._wanted else NOWHERE

    def take(self, order: TakeMemory) -> None:
        """Fetch a checkpoint, in a thread; the one before is forgotten."""
        self.forget()
        self._wanted = order.path
        threading.Thread(target=self._fetch, args=(order,), name="msrun-fetch", daemon=True).start()

    def move(self, host: str) -> None:
        """The controller's node is another machine, which knows nothing of what is kept here."""
        self.forget()
        self._host = host

    def forget(self) -> None:
        """Free the memory."""
        self._wanted = ""
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
            threading.Thread(
                target=self._bring, args=(copy, files), name="msrun-bring", daemon=True
            ).start()

    def _bring(self, copy: _Copy, files: list[int]) -> None:
        why = ""
        try:
            copy.bring(files)
        except OSError as error:
            why = describe_os_error(error)
        finally:
            close_all(files)
        self._call_soon(self._brought, copy, why)

    def _brought(self, copy: _Copy, why_not: str) -> None:
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

    def _fetch(self, order: TakeMemory) -> None:
        copy, why = None, ""
        try:
            copy = _Copy(order, self._host, self._security)
        except (OSError, ValueError, TypeError, KeyError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else repr(error)
        self._call_soon(self._keep, order, copy, why)

    def _keep(self, order: TakeMemory, copy: _Copy | None, why_not: str) -> None:
        if order.path != self._wanted:  # another one was ordered meanwhile, or none any more
            if copy is not None:
                copy.close()
            return
        self._copy = copy
        self._tell(MemoryTaken(order.path, why_not))


def _check_room(spans: Iterable[Span]) -> None:
    """Raise an ``OSError`` if there is no memory for so much."""
    wanted = sum(span.nbytes or 0 for span in spans)
    if why := shortage(wanted + SPARE, free_bytes()):
        raise OSError(why)
