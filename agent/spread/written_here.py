"""Another node: what its ranks have written to its memory of a checkpoint that is being made.

If the digest of the checkpoint is that of what they wrote, it need not come from the controller's
node.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import NamedTuple

from agent.nodes.transfer import close_all
from worker_hooks.contract import protocol


class WrittenPart(NamedTuple):
    """A file of one part of the state, as ``rank`` has written it."""

    rank: int
    file: int  # its descriptor
    nbytes: int


class WrittenStates(NamedTuple):
    """States of a step, each whole."""

    step: int
    parts: dict[str, tuple[WrittenPart, ...]]  # by the state's digest
    spare: list[int]  # files of others, which are not whole; to free large ones takes long

    @property
    def files(self) -> list[int]:
        """Those of the states, by their descriptors."""
        return [part.file for parts in self.parts.values() for part in parts]

    def keep(self, digests: Collection[str]) -> None:
        """Free all that is not of these states."""
        while self.spare:
            os.close(self.spare.pop())
        for digest in self.parts.keys() - digests:
            close_all(part.file for part in self.parts.pop(digest))

    def close(self) -> None:
        """Free the memory."""
        self.keep(())


class WrittenHere:
    """Takes files, and hands on those that make up a whole state."""

    def __init__(self) -> None:
        """Nothing is written yet."""
        self._step = 0
        # digest of the state, in how many parts -> by part
        self._states: dict[tuple[str, int], dict[int, WrittenPart]] = {}

    def add(self, save: protocol.Save, written: protocol.Written, file: int) -> None:
        """Take a file, whose descriptor is this object's from now on.

        Args:
            save: the order by which it was written.
            written: the rank's answer.
        """
        if save.step != self._step:
            self.forget()
            self._step = save.step
        parts = self._states.setdefault((written.digest, save.parts), {})
        if (before := parts.get(save.part)) is not None:
            os.close(before.file)
        parts[save.part] = WrittenPart(written.rank, file, written.nbytes)

    def take(self) -> WrittenStates:
        """Those of which every part is here, and all else; it is the caller's."""
        found = WrittenStates(self._step, {}, [])
        for (digest, count), parts in self._states.items():
            if len(parts) == count and digest not in found.parts:
                found.parts[digest] = tuple(parts[part] for part in sorted(parts))
            else:
                found.spare.extend(part.file for part in parts.values())
        self._states.clear()
        return found

    def forget(self) -> None:
        """Free the memory."""
        self.take().close()
