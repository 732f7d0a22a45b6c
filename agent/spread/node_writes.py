"""Another node: its ranks write a checkpoint to its memory, and msrun has a use for it.

What no rank of the controller's node holds is brought there. What the node would have to fetch
stays here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from agent.machine.loop_calls import CallSoon
from agent.machine.threads import begin_thread
from agent.nodes.run_messages import PartKept, SaveFar, SaveHere, unpack_said
from agent.nodes.tls import PLAIN, Security
from agent.nodes.transfer import close_all, give
from agent.spread.kept_parts import KeptParts
from agent.spread.parts import LARGE
from agent.spread.room import check_room
from agent.spread.written_here import WrittenHere
from worker_hooks.contract import protocol
from worker_hooks.contract.atomic_file import describe_os_error
from worker_hooks.contract.layout import held
from worker_hooks.storage.memory_dump import head_size

Answer = protocol.Written | protocol.Digested | protocol.SaveFailed


def not_written(rank: int, attempt: int, save: protocol.Save, why: str) -> protocol.SaveFailed:
    """The answer to an order to write to memory, which came to nothing because of the place."""
    about = rank, attempt, save.dump_id
    return protocol.SaveFailed(*about, why, is_place=True, round=save.round, share=save.share)


class _Owed(NamedTuple):
    """What a rank is to write."""

    save: protocol.Save  # as the rank is told
    file: int
    nbytes: int  # as much as that will be at most
    far: SaveFar | None  # the order to bring it to the controller's node; None: it stays here


class NodeWrites:
    """Orders it, and hears what came of it."""

    def __init__(
        self, host: str, tell: Callable[[PartKept], object], security: Security = PLAIN
    ) -> None:
        """Order nothing yet.

        Args:
            host: address of the controller's node.
            tell: takes what to say to that besides what ranks answer.
            security: of the connections between nodes.
        """
        self._host = host
        self._tell = tell
        self._offered = KeptParts(security)  # the controller's node, or others, have it as well
        self._left = KeptParts(security)  # of which the controller's node has but the header
        self._older = KeptParts(security)  # of the dump before: it counts until this one is made
        self._security = security
        self._dump_id = -1
        self._owed: dict[tuple[int, int, int], _Owed] = {}  # by rank, share and round
        self._given_up: list[int] = []  # files whose numbers late ranks may still write to
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
            self._dump_id = save.dump_id
            self._older.forget()
            self._left, self._older = self._older, self._left
            self._forget_here()
            self._give_up(tuple(self._owed))
        if isinstance(order, SaveHere):
            return self._orders_here(save, order.groups, sizes)
        rank, share, nbytes = order.rank, save.share, sizes.get(order.rank, 0)
        of_rank = [each for each in self._owed if each[:2] == (rank, share)]
        self._give_up(each for each in of_rank if self._owed[each].far is not None)
        try:
            self._check_room(nbytes)
        except OSError:
            self.free()  # what would save time must not cost the replacement
        try:
            self._check_room(nbytes)
            return [(rank, self._place(rank, save, nbytes, order))]
        except OSError as error:
            return [(rank, not_written(rank, attempt, save, describe_os_error(error)))]

    def _orders_here(
        self, save: protocol.Save, groups: tuple[tuple[int, ...], ...], sizes: Mapping[int, int]
    ) -> list[tuple[int, protocol.Save | protocol.SaveFailed]]:
        """Without room, or for what is sent to all nodes, ranks only say what they hold."""
        largest = [max(sizes.get(rank, 0) for rank in group) for group in groups]
        before, found = {*self._owed}, list[tuple[int, protocol.Save | protocol.SaveFailed]]()
        try:
            if sum(largest) >= LARGE:
                self._check_room(sum(largest))
                for group, nbytes in zip(groups, largest, strict=True):
                    for part, rank in enumerate(group):
                        share = save._replace(part=part, parts=len(group))
                        found.append((rank, self._place(rank, share, nbytes // len(group))))
                return found
        except OSError:
            self._give_up(self._owed.keys() - before)
        return [(rank, save) for group in groups for rank in group]

    def _check_room(self, nbytes: int) -> None:
        """Whether there is room for so much besides what is being written.

        Raises:
            OSError: there is not.
        """
        owed = (each.nbytes - os.fstat(each.file).st_size for each in self._owed.values())
        wanted = nbytes + sum(max(0, to_come) for to_come in owed)
        check_room(wanted)

    def _place(
        self, rank: int, save: protocol.Save, nbytes: int, far: SaveFar | None = None
    ) -> protocol.Save:
        """The order to a rank, with a file for it in the memory of this process.

        Raises:
            OSError: no descriptor is left.
        """
        name = f"msrun-memory-{save.step}-rank-{rank}"
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        save = save._replace(folder=held(file))
        self._give_up({(rank, save.share, save.round)} & self._owed.keys())
        self._owed[rank, save.share, save.round] = _Owed(save, file, nbytes, far)
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
            self._keep(found.save, answer, found.file, self._offered)
            tell(_digested(answer))
        return True

    def _keep(
        self, save: protocol.Save, written: protocol.Written, file: int, kept: KeptParts
    ) -> bool:
        """Whether others may fetch it."""
        if os.fstat(file).st_size != written.nbytes:
            os.close(file)
            return False
        self.here.add(save, written, file)
        if not self._security.is_both_ways or written.nbytes * max(save.parts, 1) < LARGE:
            return False
        try:
            self._tell(kept.offer(save, written, file))
        except OSError:  # then it is fetched from the controller's node
            return False
        return True

    def _forget_here(self) -> None:
        self._offered.forget()
        self.here.forget()

    def _give(
        self,
        order: SaveFar,
        owed: _Owed,
        written: protocol.Written,
        call_soon: CallSoon,
        tell: Callable[[Answer], object],
    ) -> None:
        """Bring what was written to the controller's node, in a thread."""
        nbytes, is_offered = None, False
        with contextlib.suppress(OSError):  # without a descriptor it is fetched
            kept = self._left if order.is_left else self._offered
            is_offered = self._keep(owed.save, written, os.dup(owed.file), kept)
        if is_offered and order.is_left:
            nbytes = head_size(owed.file, 0)

        def give_it() -> None:
            key, answer = bytes.fromhex(order.key), written
            try:
                with open(owed.file, "rb") as readable:  # closes it
                    about = readable, lambda _: None, self._security, nbytes
                    give(self._host, order.port, key, *about)
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

    def _give_up(self, owed: Iterable[tuple[int, int, int]]) -> None:
        """Nothing is awaited of these orders: free the memory."""
        for about in tuple(owed):
            file = self._owed.pop(about).file
            _empty(file)
            self._given_up.append(file)

    def free(self) -> None:
        """Free what would stay here, but for what only this node has.

        Who writes it fails, and says what it holds.
        """
        self._forget_here()
        for about, owed in self._owed.items():
            if owed.far is None:
                _empty(owed.file)
                self._owed[about] = owed._replace(nbytes=0)

    def forget(self, rank: int) -> None:
        """A rank is dead: it writes nothing any more."""
        for about in [about for about in self._owed if about[0] == rank]:
            os.close(self._owed.pop(about).file)

    def close(self) -> None:
        """Nothing is to be written any more, and nothing of it is needed."""
        self._give_up(tuple(self._owed))
        close_all(self._given_up)
        self._given_up = []
        self._forget_here()
        self._left.forget()
        self._older.forget()


def _empty(file: int) -> None:
    """Let nothing be written any more; its number is not another file's meanwhile."""
    os.ftruncate(file, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)


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
