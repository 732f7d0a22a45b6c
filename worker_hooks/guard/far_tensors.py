"""The tensors of a dump in memory that are on another node, until a rank here has to read them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from worker_hooks.contract import protocol
from worker_hooks.storage.memory_dump import HeldDump

LOOK_S = 1.0


class FarTensors:
    """Asks msrun for them. The main thread asks; the listener hears the answer."""

    def __init__(
        self,
        ask: Callable[[int, list[int]], object],
        is_guarding: Callable[[], bool],
        look: Callable[[], object],
    ) -> None:
        """Ask for nothing yet.

        Args:
            ask: sends the order to bring those of some states of the dump that has a file of this
                inode.
            is_guarding: whether an answer may come: somebody listens.
            look: called now and then; raises if the main thread is to resume from another dump.
        """
        self._ask = ask
        self._is_guarding = is_guarding
        self._look = look
        self._answered = threading.Condition()
        self._answers: dict[int, protocol.MemoryBrought] = {}  # by inode

    def bring(self, inode: int, variants: Collection[int]) -> list[int]:
        """Return once those of the dump that has this file, open here, are on this node.

        ``variants``: of which states.

        Returns:
            The states whose tensors are still not here.

        Raises:
            OSError: they cannot be brought.
            EjectedError: another order to rejoin has come.
        """
        with self._answered:
            self._answers.pop(inode, None)  # an earlier dump may have had it
            self._ask(inode, list(variants))
            while self._lacks(inode, variants):  # msrun waits for no byte longer than some seconds
                if not self._is_guarding():
                    raise OSError("the state is on another node, and msrun cannot be asked for it")
                self._answered.wait(LOOK_S)
                self._look()
            answer = self._answers.pop(inode)
            if answer.why_not:
                raise OSError(f"the state cannot be brought to this node: {answer.why_not}")
            return answer.absent

    def _lacks(self, inode: int, variants: Collection[int]) -> bool:
        """Whether the answer has not come yet: msrun also says when others of them are there."""
        answer = self._answers.get(inode)
        return answer is None or not (answer.why_not or {*answer.absent}.isdisjoint(variants))

    def hear(self, answer: protocol.MemoryBrought, present: HeldDump | None) -> None:
        """Take msrun's answer.

        ``present``: the dump that the rank is to resume from.
        """
        if present is not None and present.inode == answer.inode and not answer.why_not:
            present.complete(answer.absent)
        with self._answered:
            self._answers[answer.inode] = answer
            self._answered.notify_all()
