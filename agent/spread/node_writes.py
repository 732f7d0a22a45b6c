"""Another node: its ranks write a checkpoint to its memory, and msrun has a use for it.

What no rank of the controller's node holds is brought there. What the node would have to fetch
stays here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from agent.machine.loop_calls import CallSoon
from agent.machine.threads import begin_thread
from agent.nodes.run_messages import SaveFar, SaveHere, unpack_said
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import give
from agent.spread.parts import LARGE
from agent.spread.room import check_room
from agent.spread.written_here import WrittenHere
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import held

Answer = protocol.Written | protocol.Digested | protocol.SaveFailed


def not_written(rank: int, attempt: int, save: protocol.Save, why: str) -> protocol.SaveFailed:
    """The answer to an order to write to memory, which came to nothing because of the place."""
    about = rank, attempt, save.dump_id
    return protocol.SaveFailed(*about, why, is_place=True, round=save.round, share=save.share)


class _Owed(NamedTuple):
    """What a rank is to write."""

    save: protocol.Save  # as the rank is told
    file: int
    far: SaveFar | None  # the order to bring it to the controller's node; None: it stays here


class NodeWrites:
    """Orders it, and hears what came of it."""

    def __init__(self, host: str, security: Security = PLAIN) -> None:
        """Order nothing yet.

        Args:
            host: address of the controller's node.
            security: of the connections to it.
        """
        self._host = host
        self._security = security
        self._dump_id = -1
        self._owed: dict[tuple[int, int, int], _Owed] = {}  # by rank, share and round
        self.here = WrittenHere()
        """What is written, and stays."""

    def move(self, host: str) -> None:
        """The controller's node is another machine, which has ordered nothing yet."""
        self.close()
        self._host = host

    def orders(
        self, order: SaveFar | SaveHere, attempt: int, sizes: Mapping[int, int]
    ) -> list[tuple[int, protocol.Save | protocol.SaveFailed]]:
        """By rank what to order, or what to answer in its place.

        Args:
            order: of the controller's node.
            attempt: that of the ranks.
            sizes: of the states of ranks, in bytes.
        """
        save = unpack_said(order.message)
        assert isinstance(save, protocol.Save)
        if save.dump_id != self._dump_id:
            self.close()
            self._dump_id = save.dump_id
        if isinstance(order, SaveHere):
            return self._orders_here(save, order.groups, sizes)
        try:
            check_room(sizes.get(order.rank, 0))
            return [(order.rank, self._place(order.rank, save, order))]
        except OSError as error:
            why = describe_os_error(error)
            return [(order.rank, not_written(order.rank, attempt, save, why))]

    def _orders_here(
        self, save: protocol.Save, groups: tuple[tuple[int, ...], ...], sizes: Mapping[int, int]
    ) -> list[tuple[int, protocol.Save | protocol.SaveFailed]]:
        """Without room, or for what is sent to all nodes, ranks only say what they hold."""
        state = sum(max(sizes.get(rank, 0) for rank in group) for group in groups)
        try:
            if state >= LARGE:
                check_room(state)
                return [
                    (rank, self._place(rank, save._replace(part=part, parts=len(group))))
                    for group in groups
                    for part, rank in enumerate(group)
                ]
        except OSError:
            pass  # what was placed is freed with what is written
        return [(rank, save) for group in groups for rank in group]

    def _place(self, rank: int, save: protocol.Save, far: SaveFar | None = None) -> protocol.Save:
        """The order to a rank, with a file for it in the memory of this process.

        Raises:
            OSError: no descriptor is left.
        """
        if far is not None:  # what was ordered before counts no more
            for known, owed in tuple(self._owed.items()):
                if known[:2] == (rank, save.share) and owed.far is not None:
                    self._forget(known)
        name = f"msrun-memory-{save.step}-rank-{rank}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        save = save._replace(folder=held(file))
        self._owed[rank, save.share, save.round] = _Owed(save, file, far)
        return save

    def take(
        self,
        answer: protocol.Written | protocol.SaveFailed,
        call_soon: CallSoon,
        tell: Callable[[Answer], object],
        order: Callable[[int, protocol.Save], object],
    ) -> bool:
        """Whether a rank answers to what was ordered here, and no more is to be said of it.

        Args:
            call_soon: the loop's method that another thread may call.
            tell: takes what to say to the controller's node, at once or later.
            order: takes a rank, and what it is to do instead.
        """
        about = answer.rank, answer.share, answer.round
        found = self._owed.get(about)
        if found is None or found.save.dump_id != answer.dump_id:
            return False
        del self._owed[about]
        if isinstance(answer, protocol.SaveFailed):
            os.close(found.file)
            if found.far is not None or not answer.is_place:
                return False
            order(answer.rank, found.save._replace(folder="", part=0, parts=0))
        elif found.far is not None:
            self._give(found.far, found, answer, call_soon, tell)
        else:
            self._keep(found.save, answer, found.file)
            tell(_digested(answer))
        return True

    def _keep(self, save: protocol.Save, written: protocol.Written, file: int) -> None:
        if os.fstat(file).st_size == written.nbytes:
            self.here.add(save, written, file)
        else:
            os.close(file)

    def _give(
        self,
        order: SaveFar,
        owed: _Owed,
        written: protocol.Written,
        call_soon: CallSoon,
        tell: Callable[[Answer], object],
    ) -> None:
        """Bring what was written to the controller's node, in a thread."""
        if order.is_kept:
            with contextlib.suppress(OSError):  # without a descriptor it is fetched
                self._keep(owed.save, written, os.dup(owed.file))

        def give_it() -> None:
            key, answer = bytes.fromhex(order.key), written
            try:
                with open(owed.file, "rb") as readable:  # closes it
                    give(self._host, order.port, key, readable, lambda _: None, self._security)
            except OSError as error:
                why = describe_os_error(error)
                why = f"what it wrote cannot be brought to the controller: {why}"
                call_soon(tell, not_written(written.rank, written.attempt, owed.save, why))
            else:
                call_soon(tell, answer)

        try:
            begin_thread("msrun-give", give_it)
        except OSError as error:
            os.close(owed.file)
            why = describe_os_error(error)
            tell(not_written(written.rank, written.attempt, owed.save, why))

    def _forget(self, about: tuple[int, int, int]) -> None:
        os.close(self._owed.pop(about).file)

    def close(self) -> None:
        """Nothing is to be written any more, and nothing of it is needed."""
        for about in tuple(self._owed):
            self._forget(about)
        self.here.forget()


def _digested(written: protocol.Written) -> protocol.Digested:
    """What a rank says that writes nothing for the controller."""
    return protocol.Digested(
        written.rank,
        written.attempt,
        written.dump_id,
        written.digest,
        round=written.round,
        share=written.share,
    )
