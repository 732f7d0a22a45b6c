"""Who may take part: both sides prove that they know the job's token, which never travels.

Without a token on either side there is no proof, and everybody who reaches the port may join.
"""

from __future__ import annotations

import hmac
import json
import os
from enum import Enum

_NONCE_BYTES = 16


class Side(Enum):
    """Whose proof it is: one side's cannot be handed back as the other's."""

    NODE = "node"  # that dials
    CONTROLLER = "controller"  # that listens


class Proofs:
    """The proofs of one connection, which are made of what both sides said."""

    def __init__(self, run_id: str, controller_nonce: str, node_nonce: str) -> None:
        self._said = (run_id, controller_nonce, node_nonce)

    def proof(self, token: bytes, side: Side) -> str:
        """What ``side`` says if it knows ``token``; empty without a token."""
        if not token:
            return ""
        # as JSON no two different triples look alike
        text = json.dumps([side.value, *self._said]).encode()
        return hmac.digest(token, text, "sha256").hex()

    def is_proven(self, proof: str, token: bytes, side: Side) -> bool:
        """Whether ``proof`` is that of ``side``; without a token only an empty one is."""
        said = proof.encode(errors="surrogatepass")  # a stranger may send anything
        return hmac.compare_digest(said, self.proof(token, side).encode())


def new_nonce() -> str:
    """A number that was never used."""
    return os.urandom(_NONCE_BYTES).hex()


def why_unproven(who: str, proof: str, token: bytes) -> str:
    """One sentence about a node whose proof is not accepted.

    Args:
        who: the node, as text.
        proof: what it said.
        token: this job's.
    """
    if not token:
        return f"{who} has a token, the job has none: give all its nodes the same, or none"
    if not proof:
        return "this job needs a token: give MSRUN_TOKEN or --token-file"
    return f"the token of {who} is not that of the job: give all its nodes the same"
