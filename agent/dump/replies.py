"""What ranks answer to the orders of a dump: checked here, then posted as it is.

A rank that answers what nobody asked, or what cannot be, is dropped. A rank answers each order to
save once.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from agent.controller import events as ev
from agent.hooks.rank_links import RankLinks
from agent.text.sanitize import encodable
from worker_hooks.contract import protocol

_FILE = re.compile(r"rank_(\d+)/[\w.-]+\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Answer = (
    protocol.Standing
    | protocol.Frozen
    | protocol.Written
    | protocol.Digested
    | protocol.SaveFailed
    | protocol.Progress
)


class Replies:
    """Those to one dump at a time."""

    def __init__(
        self, links: RankLinks, post: Callable[[ev.Event], None], note: Callable[[str], None]
    ) -> None:
        """Expect nothing yet.

        Args:
            links: used to drop a rank that sends an impossible answer.
            post: decides on an event.
            note: takes the reason why a place failed.
        """
        self._links = links
        self._post = post
        self._note = note
        self._dump_id = -1
        self._owed: dict[tuple[int, int], protocol.Save] = {}  # by rank and round
        self.written: dict[int, protocol.Written] = {}  # by rank, the newest
        self.frozen: dict[int, tuple[int, int]] = {}  # bytes of states, on the host

    def begin(self, dump_id: int) -> None:
        """From now on only answers to this dump count."""
        self._dump_id = dump_id
        self._owed.clear()
        self.written.clear()
        self.frozen.clear()

    def expect(self, rank: int, order: protocol.Save) -> None:
        """A rank was ordered to save."""
        self._owed[rank, order.round] = order

    def hear(self, answer: Answer) -> None:
        """Post an answer, if it is to the present dump and can be true."""
        if answer.dump_id != self._dump_id:
            return
        match answer:
            case protocol.Frozen(rank=rank):
                self.frozen[rank] = answer.nbytes, answer.host_nbytes
                self._post(answer._replace(why=encodable(answer.why)))
            case protocol.Standing() | protocol.Progress():
                self._post(answer)
            case _:
                self._hear_of_save(answer, self._owed.pop((answer.rank, answer.round), None))

    def _hear_of_save(
        self,
        answer: protocol.Written | protocol.Digested | protocol.SaveFailed,
        order: protocol.Save | None,
    ) -> None:
        if order is None:
            self._links.drop(answer.rank, f"nobody asked: {answer}"[:300])
            return
        match answer:
            case protocol.Written() if not _is_sound(answer, order):
                self._links.drop(answer.rank, f"it wrote what cannot be: {answer}"[:300])
            case protocol.Written():
                self.written[answer.rank] = answer
                self._post(answer)
            case protocol.Digested():
                self._post(answer)
            case protocol.SaveFailed():
                failed = answer._replace(why=encodable(answer.why))
                if failed.is_place:
                    self._note(failed.why)
                self._post(failed)


def _is_sound(written: protocol.Written, order: protocol.Save) -> bool:
    """Whether a rank may have written this: a part in memory has no name and no checksum."""
    if order.is_quick:
        return not written.file and not written.sha256 and written.nbytes >= 0
    file = _FILE.fullmatch(written.file)
    is_ours = file is not None and int(file[1]) == written.rank
    return is_ours and _SHA256.fullmatch(written.sha256) is not None and written.nbytes >= 0
