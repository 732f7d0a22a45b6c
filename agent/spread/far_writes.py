"""The controller's node takes into its memory what ranks of other nodes write of a checkpoint.

They do where no rank of the controller's node holds the state: into the memory of their own msrun,
which brings it here, see :mod:`agent.spread.node_writes`.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from agent.machine.loop_calls import CallSoon
from agent.nodes.run_messages import SaveFar, pack_said
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import SILENCE_S, MemoryInbox
from worker_hooks.contract import protocol
from worker_hooks.storage.durable_file import ThrottledProgress


class MemoryInboxes:
    """The controller's node: what ranks of other nodes have written comes here."""

    def __init__(
        self,
        call_soon: CallSoon,
        progressed: Callable[[int], None],
        taken: Callable[[int, str, int, bool], None],
        security: Security = PLAIN,
    ) -> None:
        """Expect nothing yet.

        Args:
            call_soon: the loop's method that another thread may call.
            progressed: takes the dump's id as bytes come.
            taken: takes the dump's id, the path of a file in memory here, the descriptor of one in
                its place, and whether that may have come without its tensors.
        """
        self._security = security
        self._call_soon = call_soon
        self._progressed = progressed
        self._taken = taken
        self._open: dict[tuple[int, int], MemoryInbox] = {}  # by rank and share

    def order(self, rank: int, save: protocol.Save, *, is_left: bool = False) -> SaveFar:
        """What to order the node of a rank that is to write ``save.folder``, a file in memory here.

        ``is_left``: the tensors may stay where they are written.

        Raises:
            OSError: no socket can be opened.
        """
        if (before := self._open.pop((rank, save.share), None)) is not None:
            before.close()

        inbox = self._open[rank, save.share] = MemoryInbox(
            f"msrun-memory-{save.step}-rank-{rank}",
            lambda file: self._hand_over(save, file, is_left=is_left),
            ThrottledProgress(lambda _: self._call_soon(self._progressed, save.dump_id)),
            self._security,
        )
        return SaveFar(rank, pack_said(save), inbox.port, inbox.key.hex(), is_left)

    def _hand_over(self, save: protocol.Save, file: int, *, is_left: bool) -> None:
        """Return once the loop has taken the file: only then may its sender say that it is here.

        What it says may be read by a turn of the loop that is queued already, so a call that is
        queued now could come after it.

        Raises:
            OSError: the loop stands still.
        """
        is_here = threading.Event()

        def take() -> None:
            self._taken(save.dump_id, save.folder, file, is_left)
            is_here.set()

        self._call_soon(take)
        if not is_here.wait(SILENCE_S):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def close(self) -> None:
        """Nothing is to come any more."""
        for inbox in self._open.values():
            inbox.close()
        self._open.clear()
