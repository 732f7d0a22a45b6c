"""The token by which the nodes of a job know each other: given, or made by the nodes.

Where Slurm starts the nodes and nobody gives a token, node 0 makes one: a file in the user's state
folder, which the nodes of a cluster share as a rule. Whether they do is seen and not guessed: every
other node leaves a mark there, and node 0 makes no token before it has found one. The others read
the file only when node 0 has answered: by then it is there, and is that of this start of the job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent.records.run_record import writable_folder
from agent.spec.job_spec import ClusterSpec, UsageError
from worker_hooks.contract.atomic_file import write_atomic
from worker_hooks.contract.env import TOKEN

FOLDER = "tokens"  # beside the run records
PATIENCE_S = 5.0  # of node 0, until another node has left its mark
LOOK_S = 0.05  # between two looks for it
KEPT_S = 30 * 86_400.0  # what a killed msrun has left is deleted after so long
_BYTES = 32
_TRIES = 3  # to write into a folder that others remove when it is empty
_MARK = "node-"


class JobToken:
    """The token of one job, for one node."""

    def __init__(
        self, cluster: ClusterSpec, environ: Mapping[str, str], known: bytes = b""
    ) -> None:
        """Look at what is given.

        Args:
            cluster: says where the token is, or which name one has that the nodes make.
            known: the one that they have made, if this node has been in the job.

        Raises:
            UsageError: the file with the token is unfit.
        """
        self._given = _given(cluster, environ)
        self._known = known
        self._folder: Path | None = None
        if cluster.own_token and not self._given and cluster.tls_config is None:
            with contextlib.suppress(UsageError):  # no folder can be written to
                self._folder = writable_folder(environ).parent / FOLDER / cluster.own_token

    @property
    def is_own(self) -> bool:
        """Whether the nodes make it, so that it may change."""
        return self._folder is not None

    def read(self) -> bytes:
        """The token as it is now; empty: there is none."""
        if self._folder is None:
            return self._given
        with contextlib.suppress(OSError):  # node 0 may have ended, and other nodes go on
            self._known = (self._folder / "token").read_bytes().strip()
        return self._known

    def make(self, patience_s: float = PATIENCE_S) -> None:
        """Make one, if it is for the nodes to do so and they share the folder: this is node 0.

        ``patience_s``: until another node must have shown that it sees the folder.
        """
        if self._folder is None or self.read():  # that of a node 0 that was killed
            return
        _delete_old(self._folder.parent)
        look = self._folder / ".look"
        with contextlib.suppress(OSError):  # then the nodes have none
            if _is_shared(look, patience_s):
                text = os.urandom(_BYTES).hex() + "\n"
                write_atomic(self._folder / "token", text.encode(), private=True)
        _remove(look)

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Show node 0 that this node sees the folder."""
        mark = None
        if self._folder is not None:
            mark = self._folder / f"{_MARK}{socket.gethostname()}-{os.getpid()}"
            with contextlib.suppress(OSError):
                _write(mark)
        try:
            yield
        finally:
            if mark is not None:
                _remove(mark)

    def forget(self) -> None:
        """Delete the token that the nodes have made: no node joins any more."""
        if self._folder is not None:
            _remove(self._folder / "token")


def _is_shared(look: Path, patience_s: float) -> bool:
    """Whether another node leaves its mark in time beside ``look``, which this one leaves there.

    Raises:
        OSError: this node cannot write there.
    """
    until_s = time.monotonic() + patience_s
    while True:
        # a client of NFS shows a folder as it was half a minute ago, unless it changes it
        look.unlink(missing_ok=True)
        _write(look)
        if any(name.startswith(_MARK) for name in os.listdir(look.parent)):
            return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(LOOK_S)


def _given(cluster: ClusterSpec, environ: Mapping[str, str]) -> bytes:
    if cluster.token_file is None:
        engines = environ.get(cluster.token_variable, "") if cluster.token_variable else ""
        return (environ.get(TOKEN) or engines).encode()
    try:
        token = cluster.token_file.read_bytes().strip()
    except OSError as error:
        raise UsageError(
            f"--token-file {cluster.token_file} cannot be read ({error.strerror})"
        ) from error
    if not token:
        raise UsageError(f"--token-file {cluster.token_file} is empty")
    return token


def _write(path: Path) -> None:
    """Make an empty file, and its folder.

    Raises:
        OSError: it cannot be made.
    """
    for left in reversed(range(_TRIES)):
        try:
            for level in (path.parent.parent, path.parent):
                level.mkdir(mode=0o700, exist_ok=True)
            path.touch(mode=0o600)
        except FileNotFoundError:  # another node was the last in the folder
            if not left:
                raise
        else:
            return


def _remove(path: Path) -> None:
    """Delete a file, and its folder if nothing else is there."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _delete_old(folder: Path) -> None:
    """Delete what is left of jobs whose msruns were killed."""
    with contextlib.suppress(OSError):
        for old in folder.iterdir():
            if time.time() - old.stat().st_mtime > KEPT_S:
                import shutil  # slow to import, rarely needed

                shutil.rmtree(old, ignore_errors=True)
