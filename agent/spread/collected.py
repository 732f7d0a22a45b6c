"""The controller's node writes to a disk what of a checkpoint in memory only other nodes have."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from agent.dump.target import Advance, LostStateError, Target
from agent.nodes.run_messages import Donor, DonorFile
from agent.nodes.tls import Security
from agent.nodes.transfer import asked, received
from agent.spread.memory_copy import DONOR_S
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import DumpLayout
from worker_hooks.storage.manifest import REPLICATED, Manifest, Shard

HEAD_BYTES = 8  # of a file's header: how long it is
SILENT_S = 5.0  # without a byte: another node may have it, and a flush has 20 s without progress
_BUFFER = 4 << 20


class _NotSentError(Exception):
    """Another node has not sent what it had."""


class Collected(NamedTuple):
    """It, as it comes: it is not in this node's memory at any time."""

    manifest: Manifest
    donors: Sequence[Sequence[Donor]]  # by place in the manifest's ``absent``
    security: Security

    def write(self, target: Target, advance: Advance) -> tuple[Shard, ...]:
        """Write it. File work.

        Raises:
            OSError: the place cannot be written to.
            AbandonedError: the dump was abandoned.
            LostStateError: nobody sends a part of it.
        """
        about = self.manifest
        # of ranks whose other parts are here, see HeldDump
        shares = Counter(
            shard.rank
            for shard in about.shards
            if shard.kind == REPLICATED and shard.variant not in about.absent
        )
        found = list[Shard]()
        for variant, donors in zip(about.absent, self.donors, strict=True):
            found += self._state(variant, donors, shares, target, advance)
        return tuple(found)

    def _state(
        self,
        variant: int,
        donors: Sequence[Donor],
        shares: Counter[int],
        target: Target,
        advance: Advance,
    ) -> Sequence[Shard]:
        why = "no node is left that has it"
        for donor in donors:
            found = list[Shard]()
            advance(0)  # a node that is asked in vain takes its time
            try:
                for file in donor.files:
                    found.append(self._file(variant, file, shares[file.rank], target, advance))
                    shares[file.rank] += 1
            except _NotSentError as error:
                why = str(error)
                shares.subtract(shard.rank for shard in found)
            else:
                return found
        raise LostStateError(f"a part of the state is in the memory of other nodes: {why}")

    def _file(
        self, variant: int, file: DonorFile, share: int, target: Target, advance: Advance
    ) -> Shard:
        about = self.manifest
        name = DumpLayout.shard(file.rank, about.epoch + 1, about.batch, share)
        shard = Shard(name, file.rank, REPLICATED, 0, "", variant)
        with ExitStack() as stack:
            with _sending(file):
                where = file.host, file.port, bytes.fromhex(file.key), self.security
                connection = stack.enter_context(asked(*where, within_s=DONOR_S))
                connection.settimeout(SILENT_S)
                head = received(connection, HEAD_BYTES)
                head += received(connection, min(int.from_bytes(head, "little"), file.nbytes))
            return target.write(shard, head, _rest(connection, file, len(head)), advance)


def _rest(connection: socket.socket, file: DonorFile, begin: int) -> Iterator[bytes]:
    """The bytes of a file as they come, from one on."""
    left = file.nbytes - begin
    while left:
        wanted = min(_BUFFER, left)
        with _sending(file):
            piece = received(connection, wanted)
            if len(piece) < wanted:
                raise OSError("the other node closed the connection before all had come")
        left -= wanted
        yield piece


@contextmanager
def _sending(file: DonorFile) -> Iterator[None]:
    """An error in it is that of the node that sends, not of the disk here."""
    try:
        yield
    except OSError as error:
        raise _NotSentError(f"{file.host}: {describe_os_error(error)}") from error
