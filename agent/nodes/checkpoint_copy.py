"""The checkpoint that a job resumes from comes to nodes that do not have it, from node 0.

Nodes may share the folder of the checkpoints, or each has a disk of its own: then what node 0 has
saved is nowhere else. All nodes are told the checksum of its manifest, so no node takes another
checkpoint of the same name for it. A node that lacks it fetches all its files, compares their
checksums, and completes the folder under the same path as on node 0.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import MemoryServer, dialled, fill, received
from agent.spec.job_spec import UsageError
from worker_hooks.contract.atomic_file import FOLDER_MODE
from worker_hooks.contract.layout import MANIFEST, DumpLayout
from worker_hooks.storage import commit, manifest
from worker_hooks.storage.manifest import Manifest

MOST_BYTES = 1 << 30  # of a manifest
LOOK_S = 0.2  # between two looks for it


class _OtherError(Exception):
    """Another checkpoint has its path here."""


class CheckpointPlace(NamedTuple):
    """Where a checkpoint is to be had, and which it is."""

    path: Path
    sha256: str  # of its manifest
    nbytes: int  # of that
    port: int
    key: str

    def is_here(self) -> bool:
        """Whether this very checkpoint can be read on this node."""
        try:
            content = (self.path / MANIFEST).read_bytes()
        except OSError:
            return False
        return hashlib.sha256(content).hexdigest() == self.sha256

    def told(self) -> dict[str, object]:
        """As a part of what all nodes are told."""
        return {**self._asdict(), "path": str(self.path)}

    @classmethod
    def read(cls, told: object) -> Self | None:
        """What :meth:`told` said; ``None``: nothing of the kind."""
        if not isinstance(told, Mapping):
            return None
        return cls(
            Path(str(told["path"])),
            str(told["sha256"]),
            int(told["nbytes"]),
            int(told["port"]),
            str(told["key"]),
        )


class CheckpointServer:
    """Node 0: sends one checkpoint to nodes that lack it, until it is closed."""

    def __init__(self, path: Path, security: Security = PLAIN) -> None:
        """Listen at a free port.

        Raises:
            ValueError: the checkpoint cannot be read.
            OSError: no socket can be opened.
        """
        try:
            content = (path / MANIFEST).read_bytes()
        except OSError as error:
            raise ValueError(f"its {MANIFEST} cannot be read ({error.strerror})") from None
        shards = manifest.decode(content).shards
        self._server = MemoryServer(lambda _: None, security)
        key = self._server.offer_paths((path / MANIFEST, *(path / shard.file for shard in shards)))
        digest = hashlib.sha256(content).hexdigest()
        self.place = CheckpointPlace(path, digest, len(content), self._server.port, key.hex())

    def close(self) -> None:
        """Send it to nobody any more."""
        self._server.close()


def have_checkpoint(
    place: CheckpointPlace,
    host: str,
    security: Security,
    say: Callable[[str], None],
    patience_s: float,
) -> None:
    """Wait until a checkpoint is seen on this node, or else copy it from node 0.

    Args:
        place: which it is, and where it is to be had.
        host: address of node 0.
        security: of the connection.
        say: prints one sentence for people.
        patience_s: until it may appear by itself: file servers are late.

    Raises:
        UsageError: it is not to be had.
    """
    until_s = time.monotonic() + patience_s
    while not place.is_here():
        if time.monotonic() < until_s:
            time.sleep(LOOK_S)
            continue
        node = socket.gethostname()
        say(f"{place.path} is not on this node ({node}): it is copied from node 0")
        try:
            _fetch(place, host, security)
        except _OtherError:
            raise UsageError(
                f"{place.path} on {node} is not the checkpoint of node 0, another run has saved "
                "it: move it away"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the checkpoint {place.path} cannot be copied to {node}: {error}"
            ) from error
        return


def _fetch(place: CheckpointPlace, host: str, security: Security) -> None:
    """Bring a checkpoint to this node, under its path.

    Raises:
        OSError, ValueError: it did not come whole, or cannot be written; nothing is left of it.
        _OtherError: another run has saved a checkpoint under this path here.
    """
    if not 0 < place.nbytes < MOST_BYTES:
        raise OSError(f"its manifest would have {place.nbytes} bytes")
    with dialled(host, place.port, security) as connection:
        connection.sendall(bytes.fromhex(place.key))
        content = received(connection, place.nbytes)
        if hashlib.sha256(content).hexdigest() != place.sha256:
            raise OSError("what came is another checkpoint")
        found = manifest.decode(content)
        layout = DumpLayout(place.path, f"{found.record_id}-{socket.gethostname()}-{os.getpid()}")
        commit.make_folder(layout)
        try:
            _take(layout.unfinished, found, connection)
            _complete(place, layout, found)
        finally:
            shutil.rmtree(layout.unfinished, ignore_errors=True)


def _take(folder: Path, found: Manifest, connection: socket.socket) -> None:
    for shard in found.shards:
        if os.path.isabs(shard.file) or ".." in Path(shard.file).parts:
            raise OSError(f"{shard.file} is outside of the checkpoint")
        path = folder / shard.file
        path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        with open(path, "wb") as file:
            fill(file.fileno(), connection, shard.nbytes, lambda _: None)
            os.fsync(file.fileno())
    if flaws := manifest.verify(folder, found):
        raise OSError(f"what came is damaged: {flaws[0]}")


def _complete(place: CheckpointPlace, layout: DumpLayout, found: Manifest) -> None:
    if place.is_here():
        return  # another node of the same disk was first
    if layout.folder.exists() and not _is_of(layout.folder, found.record_id):
        raise _OtherError(str(layout.folder))
    commit.commit(layout, found)


def _is_of(folder: Path, record_id: str) -> bool:
    """Whether this run has saved what is there: it is set aside then, not removed."""
    try:
        return manifest.read(folder).record_id == record_id
    except ValueError:
        return False
