"""Ranks of another node write a checkpoint into the controller's memory.

Where no rank of the controller's node holds the state, ranks of another one write it into the
memory of their own msrun, which brings it to the controller's.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from agent.dump.room import SPARE, shortage
from agent.machine.loop_calls import CallSoon
from agent.nodes.run_messages import SaveFar, pack_said, unpack_said
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import SILENCE_S, MemoryInbox, give
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import held
from worker_hooks.machine.free_memory import free_bytes
from worker_hooks.storage.durable_file import ThrottledProgress


def not_written(rank: int, attempt: int, save: protocol.Save, why: str) -> protocol.SaveFailed:
    """The answer to an order to write to memory, which came to nothing because of the place."""
    about = rank, attempt, save.dump_id
    return protocol.SaveFailed(*about, why, is_place=True, round=save.round, share=save.share)


class MemoryInboxes:
    """The controller's node: what ranks of other nodes have written comes here."""

    def __init__(
        self,
        call_soon: CallSoon,
        progressed: Callable[[int], None],
        taken: Callable[[int, str, int], None],
        security: Security = PLAIN,
    ) -> None:
        """Expect nothing yet.

        Args:
            call_soon: the loop's method that another thread may call.
            progressed: takes the dump's id as bytes come.
            taken: takes the dump's id, the path of a file in memory here, and the descriptor of one
                in its place.
        """
        self._security = security
        self._call_soon = call_soon
        self._progressed = progressed
        self._taken = taken
        self._open: dict[tuple[int, int], MemoryInbox] = {}  # by rank and share

    def order(self, rank: int, save: protocol.Save) -> SaveFar:
        """What to order the node of a rank that is to write ``save.folder``, a file in memory here.

        Raises:
            OSError: no socket can be opened.
        """
        if (before := self._open.pop((rank, save.share), None)) is not None:
            before.close()

        inbox = self._open[rank, save.share] = MemoryInbox(
            f"msrun-memory-{save.step}-rank-{rank}",
            lambda file: self._hand_over(save, file),
            ThrottledProgress(lambda _: self._call_soon(self._progressed, save.dump_id)),
            self._security,
        )
        return SaveFar(rank, pack_said(save), inbox.port, inbox.key.hex())

    def _hand_over(self, save: protocol.Save, file: int) -> None:
        """Return once the loop has taken the file: only then may its sender say that it is here.

        What it says may be read by a turn of the loop that is queued already, so a call that is
        queued now could come after it.

        Raises:
            OSError: the loop stands still.
        """
        is_here = threading.Event()

        def take() -> None:
            self._taken(save.dump_id, save.folder, file)
            is_here.set()

        self._call_soon(take)
        if not is_here.wait(SILENCE_S):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def close(self) -> None:
        """Nothing is to come any more."""
        for inbox in self._open.values():
            inbox.close()
        self._open.clear()


class MemoryGiver:
    """Another node: what its ranks have written goes to the controller's node."""

    def __init__(self, host: str, security: Security = PLAIN) -> None:
        """Give nothing yet.

        Args:
            host: address of the controller's node.
        """
        self._host = host
        self._security = security
        # rank, share -> its file
        self._owed: dict[tuple[int, int], tuple[SaveFar, protocol.Save, int]] = {}

    def move(self, host: str) -> None:
        """The controller's node is another machine, which has ordered nothing yet."""
        self.close()
        self._host = host

    def place(self, order: SaveFar, wanted: int) -> protocol.Save:
        """The order to the rank: it writes into the memory of this process.

        ``wanted``: bytes that the rank will write.

        Raises:
            OSError: there is no room for it.
        """
        save = unpack_said(order.message)
        assert isinstance(save, protocol.Save)
        self._forget(order.rank, save.share)
        if why := shortage(wanted + SPARE, free_bytes()):
            raise OSError(why)
        name = f"msrun-memory-{save.step}-rank-{order.rank}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._owed[order.rank, save.share] = order, save, file
        return save._replace(folder=held(file))

    def take(
        self,
        written: protocol.Written,
        call_soon: CallSoon,
        tell: Callable[[protocol.Written | protocol.SaveFailed], object],
    ) -> bool:
        """Whether a rank has written for the controller's node; then it goes there, in a thread.

        Args:
            call_soon: the loop's method that another thread may call.
            tell: takes the same once the controller's node has all of it, or why it has not.
        """
        found = self._owed.get((written.rank, written.share))
        if found is None or (found[1].dump_id, found[1].round) != (written.dump_id, written.round):
            return False
        del self._owed[written.rank, written.share]

        def give_it() -> None:
            answer = self._given(*found, written)
            call_soon(tell, answer)

        threading.Thread(target=give_it, name="msrun-give", daemon=True).start()
        return True

    def forget(self, rank: int) -> None:
        """Nothing is to be written by this rank any more."""
        for owner in [owner for owner in self._owed if owner[0] == rank]:
            self._forget(*owner)

    def _forget(self, rank: int, share: int) -> None:
        if (found := self._owed.pop((rank, share), None)) is not None:
            os.close(found[2])

    def close(self) -> None:
        """Nothing is to be written any more."""
        for owner in tuple(self._owed):
            self._forget(*owner)

    def _given(
        self, order: SaveFar, save: protocol.Save, file: int, written: protocol.Written
    ) -> protocol.Written | protocol.SaveFailed:
        key = bytes.fromhex(order.key)
        try:
            with open(file, "rb") as readable:  # closes it
                give(self._host, order.port, key, readable, lambda _: None, self._security)
        except OSError as error:
            why = f"what it wrote cannot be brought to the controller: {describe_os_error(error)}"
            return not_written(written.rank, written.attempt, save, why)
        return written
