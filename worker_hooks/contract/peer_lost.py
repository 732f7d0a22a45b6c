"""Whether an error says that a peer was lost: it is the consequence of another failure. Pure."""

from __future__ import annotations

import re

_PEER_LOST = re.compile(
    r"Connection closed by peer"
    r"|Read error \[.*Connection reset by peer"
    r"|writev? .*Broken pipe"
    r"|connectFullMesh failed"
    r"|Timed out waiting \d+ ?ms for (?:recv|send) operation"
    r"|Application timeout caused pair closure"
    r"|failed to pass monitoredBarrier"
    r"|DistNetworkError|DistStoreError"
    r"|(?:TCPStore|sendBytes|recvValue|recvVector)"
    r".*(?:Broken pipe|Connection (?:reset|was) |timeout)"
    r"|remote process exited or there was a network error"
    r"|atchdog caught collective operation timeout"
    r"|socketPollConnect|socketStartConnect|socketProgress"
    r"|NCCL communicator was aborted"
    r"|ncclRemoteError",
    re.DOTALL,
)


def says_peer_lost(error: str) -> bool:
    """Whether the text of an exception names the loss of a peer or of the store."""
    return _PEER_LOST.search(error) is not None


def with_consequence(cause: str, consequence: str) -> str:
    """A failure with the exception that it caused, unless that only says that a peer was lost."""
    return cause if says_peer_lost(consequence) else f"{cause} ({consequence})"
