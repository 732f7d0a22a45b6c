"""The scheduler of a job that is started by hand has ended: its workers train on, and look for it.

It is dialled until it is started again. That is done in a thread, as it waits there for the other
workers. Of these it knows only by the folder that all share: if ranks elsewhere begin to save by
themselves, as one has died, ranks here have to take part.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.nodes.join import JoinedNode, NeverBegunError, NobodyThereError, RefusedError

AGAIN_S = 0.5  # from one try to the next
REFUSED_S = 10.0  # the same after it was another job's


class NotesWatch:
    """Looks whether ranks on other nodes have begun to save by themselves."""

    def __init__(
        self, folders: Sequence[Path], call_soon: Callable[..., object], begun: Callable[[], object]
    ) -> None:
        """Begin.

        Args:
            folders: in which they would leave notes.
            call_soon: the loop's method that another thread may call.
            begun: called once they have.
        """
        self._folders = folders
        self._call_soon = call_soon
        self._begun = begun
        self._is_over = threading.Event()
        threading.Thread(target=self._look, name="msrun-notes", daemon=True).start()

    def close(self) -> None:
        """Nobody wants to know any more."""
        self._is_over.set()

    def _look(self) -> None:
        while self._folders and not self._is_over.wait(AGAIN_S):
            if any(each.exists() for each in self._folders):
                with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
                    self._call_soon(self._tell)
                return

    def _tell(self) -> None:
        if not self._is_over.is_set():
            self._begun()


class SchedulerWatch:
    """Looks for the scheduler, until it is found or no longer wanted."""

    def __init__(
        self,
        join: Callable[[Callable[[socket.socket], object]], JoinedNode],
        call_soon: Callable[..., object],
        found: Callable[[JoinedNode], object],
        say: Callable[[str], None],
    ) -> None:
        """Begin.

        Args:
            join: dials it once, and waits until all workers are there; takes what takes the
                connection, and raises as :func:`agent.nodes.join.join`.
            call_soon: the loop's method that another thread may call.
            found: takes the line to it.
            say: prints one sentence for people.
        """
        self._join = join
        self._call_soon = call_soon
        self._found = found
        self._say = say
        self._is_over = threading.Event()
        self._connection: socket.socket | None = None
        threading.Thread(target=self._look, name="msrun-scheduler", daemon=True).start()

    def close(self) -> None:
        """It is not wanted any more; what is found nevertheless is closed.

        Who waits there waits no longer: this node may come again, as another one.
        """
        self._is_over.set()
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._connection.shutdown(socket.SHUT_RDWR)

    def _look(self) -> None:
        said = ""
        while not self._is_over.is_set():
            pause_s = AGAIN_S
            try:
                joined = self._join(self._open)
            except NobodyThereError:
                pass
            except (RefusedError, NeverBegunError) as error:
                pause_s = REFUSED_S
                if str(error) != said:
                    said = str(error)
                    self._tell(self._say, f"what is at the scheduler's port is none: {said}")
            else:
                self._tell(self._take, joined)
                return
            self._is_over.wait(pause_s)

    def _open(self, connection: socket.socket) -> None:
        self._connection = connection
        if self._is_over.is_set():
            raise NobodyThereError

    def _tell(self, call: Callable[..., object], about: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            self._call_soon(call, about)

    def _take(self, joined: JoinedNode) -> None:
        self._connection = None  # it is somebody else's now
        if self._is_over.is_set():
            joined.line.connection.close()
        else:
            self._found(joined)
