"""The checkpoint that ranks resume from comes to nodes that do not have it, from node 0.

As a job begins all nodes are told which one it is; for later attempts, and for what a script asks
for itself, a rank of another node hears of it once it is there.

Nodes may share the folder of the checkpoints, or each has a disk of its own: then what node 0 has
saved is nowhere else. All nodes are told the checksum of its manifest, so no node takes another
checkpoint of the same name for it. A node that lacks it fetches all its files, compares their
checksums, and completes the folder under the same path as on node 0. Then it deletes old ones
beside it, as node 0 does when it has saved one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from agent.machine.loop_calls import CallSoon
from agent.machine.threads import begin_thread
from agent.nodes.messages import Newer, SeekNewer
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import MemoryServer, asked, fill, received
from agent.spec.job_spec import UsageError
from worker_hooks.contract.atomic_file import FOLDER_MODE, describe_os_error
from worker_hooks.contract.layout import DUMP, MANIFEST, DumpLayout
from worker_hooks.storage import commit, manifest, retention
from worker_hooks.storage.manifest import Manifest

if TYPE_CHECKING:
    from worker_hooks.storage.find import FoundCheckpoint

MOST_BYTES = 1 << 30  # of a manifest
LOOK_S = 0.2  # between two looks for it
SEEN_S = 3.0  # until a file server shows everywhere what was saved on one node, as a rule

_completing = threading.Lock()  # one checkpoint at a time, of all fetches of this process


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
            with contextlib.suppress(OSError):
                os.listdir(self.path.parent)  # some file systems keep in mind what was not there
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


class NewerHere:
    """What a node that waits has saved of a run that node 0 resumes, and node 0 has not."""

    def __init__(self, security: Security) -> None:
        """``security``: of the connections."""
        self._security = security
        self._servers: list[CheckpointServer] = []

    def answer(self, asked: SeekNewer) -> Newer:
        """The newest dump in this folder, if it is newer; node 0 can fetch it from now on."""
        found = _newer(asked)
        if found is None:
            return Newer()
        newer = Newer(found.manifest.step, str(found.path))
        if self._security.is_both_ways:
            with contextlib.suppress(ValueError, OSError):
                self._servers.append(CheckpointServer(found.path, self._security))
                return newer._replace(place=self._servers[-1].place.told())
        return newer

    def close(self) -> None:
        """The job begins, or does not."""
        for server in self._servers:
            server.close()


def _newer(asked: SeekNewer) -> FoundCheckpoint | None:
    """Where all nodes share the folder there is none, and its names alone are read."""
    from worker_hooks.storage.find import Verify, search  # rarely needed

    try:
        names = [name for name in os.listdir(asked.folder) if name.startswith(DUMP)]
    except OSError:
        return None
    numbers = ((name, re.match(r"\d+", name.removeprefix(DUMP))) for name in names)
    later = [name for name, found in numbers if found and int(found[0]) > asked.step]
    paths = [Path(asked.folder, name) for name in later]
    return search(paths, verify=Verify.QUICK, runs=(asked.run,), above=asked.step).newest


class CheckpointOffers:
    """Node 0: what ranks of an attempt resume from can be had here. Files are read in threads."""

    def __init__(self, call_soon: CallSoon, security: Security) -> None:
        """``security``: of the connections."""
        self._call_soon = call_soon
        self._security = security
        self._servers: dict[str, CheckpointServer | None] = {}  # None: it cannot be read
        self._waiting: dict[str, list[Callable[[CheckpointPlace | None], object]]] = {}
        self._is_closed = False

    def begin(self) -> None:
        """Another attempt: what has a path now may be another checkpoint."""
        for server in filter(None, self._servers.values()):
            server.close()
        self._servers.clear()
        self._waiting.clear()

    def close(self) -> None:
        """The job is over."""
        self.begin()
        self._is_closed = True

    def place(self, path: str, told: Callable[[CheckpointPlace | None], object]) -> None:
        """``told`` takes where this checkpoint is to be had; ``None``: it cannot be read."""
        if path in self._servers:
            told(_place(self._servers[path]))
        elif path in self._waiting:
            self._waiting[path].append(told)
        else:
            waiting = self._waiting[path] = [told]

            def read() -> None:
                try:
                    server = CheckpointServer(Path(path), self._security)
                except (OSError, ValueError):
                    server = None
                self._call_soon(self._known, path, waiting, server)

            try:
                begin_thread("msrun-offer", read)
            except OSError:
                self._known(path, waiting, None)

    def _known(
        self,
        path: str,
        waiting: list[Callable[[CheckpointPlace | None], object]],
        server: CheckpointServer | None,
    ) -> None:
        if self._waiting.get(path) is not waiting or self._is_closed:
            if server is not None:
                server.close()
            return
        del self._waiting[path]
        self._servers[path] = server
        for told in waiting:
            told(_place(server))


def _place(server: CheckpointServer | None) -> CheckpointPlace | None:
    return None if server is None else server.place


class CheckpointFetcher:
    """Another node: has what its ranks resume from brought here, in threads."""

    def __init__(
        self, call_soon: CallSoon, security: Security, say: Callable[[str], None], keep: int
    ) -> None:
        """Nothing is awaited yet.

        Args:
            call_soon: the loop's method that another thread may call.
            security: of the connections.
            say: prints one sentence for people.
            keep: how many checkpoints stay beside one that was copied, that included; 0: all.
        """
        self._call_soon = call_soon
        self._keep = keep
        self._security = security
        self._say = say
        self._waiting: dict[CheckpointPlace, list[Callable[[str], object]]] = {}

    def have(
        self, place: CheckpointPlace, host: str, patience_s: float, done: Callable[[str], object]
    ) -> None:
        """Have a checkpoint on this node.

        Args:
            place: which it is, and where it is to be had.
            host: address of node 0.
            patience_s: until it may appear by itself.
            done: takes why it cannot be had; empty: it is here.
        """
        if place in self._waiting:
            self._waiting[place].append(done)
            return
        self._waiting[place] = [done]

        def say(sentence: str) -> None:
            self._call_soon(self._say, sentence)

        def bring() -> None:
            why = ""
            try:
                have_checkpoint(place, host, self._security, say, patience_s, self._keep)
            except UsageError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001  a rank waits for the answer
                why = f"the checkpoint {place.path} cannot be copied: {error!r}"
            self._call_soon(self._end, place, why)

        try:
            begin_thread("msrun-checkpoint", bring)
        except OSError as error:
            self._end(place, f"the checkpoint {place.path} cannot be copied: {error.strerror}")

    def _end(self, place: CheckpointPlace, why: str) -> None:
        for done in self._waiting.pop(place):
            done(why)


def have_checkpoint(
    place: CheckpointPlace,
    host: str,
    security: Security,
    say: Callable[[str], None],
    patience_s: float,
    keep: int,
    owner: str = "node 0",
) -> None:
    """Wait until a checkpoint is seen on this node, or else copy it from another one.

    Args:
        place: which it is, and where it is to be had.
        host: address of the node that has it.
        security: of the connection.
        say: prints one sentence for people.
        patience_s: until it may appear by itself: file servers are late.
        keep: how many checkpoints stay beside one that was copied, that included; 0: all.
        owner: who has it, for people.

    Raises:
        UsageError: it is not to be had.
    """
    until_s = time.monotonic() + patience_s
    while not place.is_here():
        if time.monotonic() < until_s:
            time.sleep(LOOK_S)
            continue
        node = socket.gethostname()
        say(f"{place.path} is not on this node ({node}): it is copied from {owner}")
        try:
            found = _fetch(place, host, security)
        except _OtherError:
            raise UsageError(
                f"{place.path} on {node} is not the checkpoint of {owner}, another run has saved "
                "it: move it away"
            ) from None
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the checkpoint {place.path} cannot be copied to {node}: {error}"
            ) from error
        try:
            _remove_old(place.path, found, keep)
        except OSError as error:
            say(f"an old checkpoint cannot be deleted: {describe_os_error(error)}")
        return


def _remove_old(newest: Path, found: Manifest, keep: int) -> None:
    """Delete the oldest checkpoints beside one that was copied, of its run and of that one's past.

    What they saved of later steps stays: somebody may have gone back on purpose.
    """
    if not keep or not newest.name.startswith(DUMP):
        return  # a ModelCheckpoint deletes its own
    runs = (found.record_id, *found.lineage)
    past = [
        (path, one)
        for path, one in retention.present(newest.parent)
        if path.name.startswith(DUMP) and one.record_id in runs and one.step <= found.step
    ]
    for path in retention.chosen(past, keep, 0, (), runs, newest):
        retention.remove(path)


def _fetch(place: CheckpointPlace, host: str, security: Security) -> Manifest:
    """Bring a checkpoint to this node, under its path.

    Raises:
        OSError, ValueError: it did not come whole, or cannot be written; nothing is left of it.
        _OtherError: another run has saved a checkpoint under this path here.
    """
    if not 0 < place.nbytes < MOST_BYTES:
        raise OSError(f"its manifest would have {place.nbytes} bytes")
    with asked(host, place.port, bytes.fromhex(place.key), security) as connection:
        content = received(connection, place.nbytes)
        if hashlib.sha256(content).hexdigest() != place.sha256:
            raise OSError("what came is another checkpoint")
        found = manifest.decode(content)
        # a later attempt may fetch while an earlier one still does, in the same process
        who = f"{socket.gethostname()}-{os.getpid()}-{threading.get_native_id()}"
        layout = DumpLayout(place.path, f"{found.record_id}-{who}")
        commit.make_folder(layout)
        try:
            _take(layout.unfinished, found, connection)
            _complete(place, layout, found)
        finally:
            shutil.rmtree(layout.unfinished, ignore_errors=True)
    return found


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
    with _completing:
        if place.is_here():
            return  # another node of the same disk was first, or an earlier attempt
        if layout.folder.exists() and not _is_of(layout.folder, found.record_id):
            raise _OtherError(str(layout.folder))
        commit.commit(layout, found)


def _is_of(folder: Path, record_id: str) -> bool:
    """Whether this run has saved what is there: it is set aside then, not removed."""
    try:
        return manifest.read(folder).record_id == record_id
    except ValueError:
        return False
