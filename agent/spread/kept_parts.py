"""Another node: lets nodes that start ranks fetch what its ranks have written to its memory."""

from __future__ import annotations

from agent.nodes.run_messages import PartKept
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import MemoryServer, Span
from worker_hooks.contract import protocol


class KeptParts:
    """What can be fetched; the files stay in memory as long as it can."""

    def __init__(self, security: Security = PLAIN) -> None:
        """Nothing can."""
        self._security = security
        self._server: MemoryServer | None = None

    def offer(self, save: protocol.Save, written: protocol.Written, file: int) -> PartKept:
        """Let a file be fetched; what the controller is to know of it.

        Args:
            save: the order by which it was written.
            written: the rank's answer.
            file: its descriptor, which stays the caller's.

        Raises:
            OSError: no socket can be opened.
        """
        if self._server is None:
            self._server = MemoryServer(lambda _: None, self._security)
        key = self._server.offer([Span(file, 0, written.nbytes)])
        about = save.dump_id, written.digest, save.part, save.parts
        return PartKept(*about, written.rank, written.nbytes, self._server.port, key.hex())

    def forget(self) -> None:
        """Free the memory, once nobody is amid it."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
