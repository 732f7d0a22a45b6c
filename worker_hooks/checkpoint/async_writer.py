"""Training's end of the line to the process that writes beside it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from worker_hooks.checkpoint.finalize import WrittenParts
from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder, encoded
from worker_hooks.checkpoint.staging import StagingBuffer
from worker_hooks.checkpoint.writer_process import ERROR, FOLDER, ORDER, ROOM, WARNINGS

SILENT_S = 600.0  # without a sign of life; a single fsync can take long
END_S = 10.0
GLANCE_S = 0.05  # between two looks for anything else, in a wait
_LOOK_S = 0.0005  # between two looks at a copy that an accelerator makes
_ROOT = str(Path(__file__).parents[2])
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop()); "
    "from worker_hooks.checkpoint.writer_process import main; main()"
)


class AsyncWriter:
    """One process, and at most one order at a time."""

    def __init__(self) -> None:
        """Start the process; it costs a millisecond here, and is ready in a few dozen.

        Raises:
            OSError: it cannot be started.
        """
        self.room = StagingBuffer()
        run = [sys.executable, "-I", "-S", "-c", _CODE]
        try:
            self._process = subprocess.Popen(
                [*run, str(self.room.fd), str(os.getpid()), _ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self.room.fd,),
            )
        except BaseException:
            self.room.close()
            raise
        self._order: SaveOrder | None = None
        self._copying: Sequence[torch.Event] = ()  # what must have happened before it is told
        self._is_told = False
        self._heard = b""  # of a line that has not ended
        self._heard_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether an order is under way."""
        return self._order is not None

    def make_room(self, nbytes: int) -> None:
        """Have the memory taken beside training, before it is needed.

        Raises:
            CheckpointError: there is none, or the process is gone.
        """
        if nbytes > self.room.nbytes:
            try:
                self.room.grow(nbytes)
            except OSError as error:
                raise CheckpointError(f"no memory for a copy of the state: {error}") from error
            self._tell({ROOM: nbytes})

    def begin(self, order: SaveOrder, copying: Sequence[torch.Event]) -> None:
        """Have the order carried out, from what is in the room.

        Args:
            order: what to do.
            copying: what must have happened before the room holds it all.

        Raises:
            CheckpointError: the process is gone.
        """
        self._order, self._copying, self._is_told = order, copying, False
        self._hand_over(wait=False)

    def poll(self) -> WrittenParts | None:
        """What became of the order; ``None``: nothing yet, or there is none. Never waits.

        Raises:
            CheckpointError: it could not be carried out.
        """
        if self._order is None or not self._hand_over(wait=False):
            return None
        return self._hear(0.0)

    def wait(self, look: Callable[[], None] = lambda: None) -> WrittenParts | None:
        """The same when it is known; ``None``: there is no order.

        Args:
            look: called now and then; what it raises ends the wait, and the order goes on.

        Raises:
            CheckpointError: it could not be carried out.
        """
        if self._order is None:
            return None
        self._hand_over(wait=True)
        while (done := self._hear(GLANCE_S)) is None:
            look()
            if time.monotonic() - self._heard_at > SILENT_S:
                order = self._order
                self._process.kill()
                self._order = None
                raise CheckpointError(
                    f"{order.layout.folder} cannot be saved: its writer gave no sign for "
                    f"{SILENT_S:g} s"
                )
        return done

    def give_up(self) -> None:
        """End the process whatever it is at, and give the memory back."""
        self._process.kill()
        self._order = None
        self.close()

    def close(self) -> None:
        """End the process, and give the memory back."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.room.close()

    def _hand_over(self, *, wait: bool) -> bool:
        """Tell the order once the copy is complete; whether that is done."""
        assert self._order is not None
        if self._is_told:
            return True
        while not all(event.query() for event in self._copying):
            if not wait:
                return False
            time.sleep(_LOOK_S)
        self._is_told, self._heard_at = True, time.monotonic()
        self._tell({ORDER: encoded(self._order)})
        return True

    def _tell(self, fields: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._raise_gone()

    def _hear(self, within_s: float) -> WrittenParts | None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while select.select([fd], [], [], within_s)[0]:
            octets = os.read(fd, 1 << 16)
            if not octets:
                self._raise_gone()
            self._heard_at = time.monotonic()
            *lines, self._heard = (self._heard + octets).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if said:
                    self._order = None
                    if ERROR in said:
                        raise CheckpointError(said[ERROR])
                    return WrittenParts(said[FOLDER], tuple(said[WARNINGS]))
            within_s = 0.0
        return None

    def _raise_gone(self) -> None:
        order, self._order = self._order, None
        code = self._process.wait(END_S)
        what = "a checkpoint" if order is None else str(order.layout.folder)
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise CheckpointError(f"{what} cannot be saved: its writer is gone ({end})")
