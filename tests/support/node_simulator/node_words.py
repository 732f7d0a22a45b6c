"""What a simulated node says as it comes, and how long it waits."""

from __future__ import annotations

from agent.nodes.messages import Join
from agent.nodes.roster import OwnNode

LOOK_S = 0.5  # real nodes look more often
CHALLENGE_S = 10.0  # that who dials waits for a word
SAVE_S = 15.0  # at most, until the ranks of a node have saved
LAST_CALL_S = 10.0  # that enough nodes wait for more
SEEK_S = 0.1
START_S = 60.0  # that a node 0 which was started again waits for the others


def join_of(own: OwnNode) -> Join:
    """What it says to who lets nodes in."""
    fields = (own.run_id, own.record_id, own.node_rank, own.nproc, own.host, own.pid)
    join = Join(*fields, own.version, "", "", "", own.is_spare, 1)
    return join._replace(survived=own.survived, living=own.living)
