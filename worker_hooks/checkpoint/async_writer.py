"""Training's side of the process that writes checkpoints in the background."""

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
from worker_hooks.checkpoint.save_plan import CheckpointError, SaveOrder, encode
from worker_hooks.checkpoint.staging import StagingBuffer
from worker_hooks.checkpoint.writer_process import ERROR, FOLDER, ORDER, PASSES, ROOM, WARNINGS
from worker_hooks.machine.free_memory import free_bytes

SILENT_S = 600.0  # without a sign of progress; a single fsync can take long
END_S = 10.0
SPARE = 256 << 20  # bytes that are left to everybody else, at most
CHECK_S = 0.05  # between two checks for other events, in a wait
_LOOK_S = 0.0005  # between two looks at an accelerator's copy
_ROOT = str(Path(__file__).parents[2])
_CODE = (
    "import sys; sys.path.insert(0, sys.argv.pop()); "
    "from worker_hooks.checkpoint.writer_process import main; main()"
)


class AsyncWriter:
    """One process, with at most one order at a time."""

    def __init__(self) -> None:
        """Start the process, which takes a millisecond here; it is ready after a few dozen.

        Raises:
            OSError: it cannot be started.
        """
        self.staging = StagingBuffer()
        run = [sys.executable, "-I", "-S", "-c", _CODE]
        try:
            self._process = subprocess.Popen(
                [*run, str(self.staging.fd), str(os.getpid()), _ROOT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(self.staging.fd,),
            )
        except BaseException:
            self.staging.close()
            raise
        self._order: SaveOrder | None = None
        self._copying: Sequence[torch.Event] = ()  # events that must precede sending the order
        self._is_sent = False
        self._received = b""  # an incomplete line
        self._received_at = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether an order is under way."""
        return self._order is not None

    def shortage(self, nbytes: int, ranks: int) -> str:
        """What memory is missing for a copy of the state, in words; empty: none, or it is unknown.

        Memory that is not there would be noticed by the kernel's out-of-memory killer only.
        ``ranks``: this one and those that ask for as much memory of this host after it.
        """
        wanted = max(0, nbytes - self.staging.nbytes) * ranks
        free = free_bytes() if wanted else None  # as a rule the memory is there from the last save
        if free is None or wanted + min(wanted, SPARE) <= free:
            return ""
        copies = "a copy of the state takes" if ranks == 1 else f"{ranks} copies of the state take"
        gib = [f"{each / (1 << 30):.2f} GiB" for each in (wanted, free)]
        return f"{copies} {gib[0]}, and {gib[1]} of memory are free"

    def reserve(self, nbytes: int) -> None:
        """Have the memory allocated in the background, before it is needed.

        Raises:
            CheckpointError: there is not enough, or the process is gone.
        """
        if nbytes > self.staging.nbytes:
            try:
                self.staging.grow(nbytes)
            except OSError as error:
                raise CheckpointError(f"no memory for a copy of the state: {error}") from error
            self._send({ROOM: nbytes})

    def begin(self, order: SaveOrder, copying: Sequence[torch.Event]) -> None:
        """Have the content of the staging buffer written.

        ``copying``: the events after which the buffer is complete.

        Raises:
            CheckpointError: the process is gone.
        """
        self._order, self._copying, self._is_sent = order, copying, False
        self._send_order(wait=False)

    def poll(self) -> WrittenParts | None:
        """The result of the order; ``None``: there is none yet, or no order. Never waits.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        if self._order is None or not self._send_order(wait=False):
            return None
        return self._receive(0.0)

    def wait(self, check: Callable[[], None] = lambda: None) -> WrittenParts | None:
        """Wait for the result of the order; ``None``: there is no order.

        ``check``: called regularly; if it raises, the wait ends and the order stays.

        Raises:
            CheckpointError: the checkpoint could not be saved.
        """
        if self._order is None:
            return None
        self._send_order(wait=True)
        while (done := self._receive(CHECK_S)) is None:
            check()
            if time.monotonic() - self._received_at > SILENT_S:
                order = self._order
                self._process.kill()
                self._order = None
                raise CheckpointError(
                    f"{order.layout.folder} cannot be saved: its writer made no progress for "
                    f"{SILENT_S:g} s"
                )
        return done

    def give_up(self) -> None:
        """Kill the process, and free the memory."""
        self._process.kill()
        self._order = None
        self.close()

    def close(self) -> None:
        """End the process, and free the memory."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.staging.close()

    def _send_order(self, *, wait: bool) -> bool:
        """Send the order when the copy is complete; whether it is sent."""
        assert self._order is not None
        if self._is_sent:
            return True
        while not all(event.query() for event in self._copying):
            if not wait:
                return False
            time.sleep(_LOOK_S)
        self._is_sent, self._received_at = True, time.monotonic()
        self._send({ORDER: encode(self._order)})
        return True

    def _send(self, fields: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._raise_gone()

    def _receive(self, within_s: float) -> WrittenParts | None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while select.select([fd], [], [], within_s)[0]:
            octets = os.read(fd, 1 << 16)
            if not octets:
                self._raise_gone()
            self._received_at = time.monotonic()
            *lines, self._received = (self._received + octets).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if message:
                    self._order = None
                    if ERROR in message:
                        raise CheckpointError(message[ERROR], is_passing=message[PASSES])
                    return WrittenParts(message[FOLDER], tuple(message[WARNINGS]))
            within_s = 0.0
        return None

    def _raise_gone(self) -> None:
        order, self._order = self._order, None
        code = self._process.wait(END_S)
        what = "a checkpoint" if order is None else str(order.layout.folder)
        end = f"signal {-code}" if code < 0 else f"exit status {code}"
        raise CheckpointError(f"{what} cannot be saved: its writer is gone ({end})")
