"""What ranks are ordered to save, and what they answer: checked here, then posted as it is.

A rank that answers what nobody asked, or what cannot be, is dropped. A rank answers each order to
save once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from agent.controller import actions as do
from agent.controller import events as ev
from agent.hooks.rank_links import RankLinks
from agent.ranks.parts import Parts
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
    """Sends the orders of one dump at a time, and checks the answers."""

    def __init__(
        self, links: RankLinks, post: Callable[[ev.Event], None], note: Callable[[str], None]
    ) -> None:
        """Expect nothing yet.

        Args:
            links: carry the orders; a rank that sends an impossible answer is dropped.
            note: takes the reason why a place failed.
        """
        self._links = links
        self._post = post
        self._note = note
        self._dump_id = -1
        self._owed: dict[tuple[int, int, int], protocol.Save] = {}  # by rank, round and share
        self.written: dict[tuple[int, int], protocol.Written] = {}  # by rank and share, the newest
        self.frozen: dict[int, tuple[int, int]] = {}  # bytes of states, on the host

    def begin(self, dump_id: int) -> None:
        """From now on only answers to this dump count."""
        self._dump_id = dump_id
        self._owed.clear()
        self.written.clear()
        self.frozen.clear()

    def ask_digesters(self, action: do.SaveRanks, parts: Parts) -> None:
        """Have the digesters of an action say what they hold of the parts that they are in."""
        self._ask(action, parts, dict.fromkeys(action.digesters, ("", 0, 0)))

    def ask_writers(self, action: do.SaveRanks, parts: Parts, places: Sequence[str]) -> None:
        """Have the writers write it, each to its place; those of a part share it out."""
        place_of = dict(zip(action.writers, places, strict=True))
        slices = {
            seat: (place_of[seat], number, len(group))
            for group in action.groups or (action.writers,)
            for number, seat in enumerate(group)
        }
        self._ask(action, parts, slices)

    def _ask(
        self, action: do.SaveRanks, parts: Parts, slices: Mapping[int, tuple[str, int, int]]
    ) -> None:
        without = parts.without() if parts.are_shared else {}
        alike: dict[object, tuple[protocol.Save, list[int]]] = {}
        for seat, (folder, part, count) in slices.items():
            rank, share = parts.owner_of(seat)
            lacking = without.get(seat, ())
            about = folder, part, count, share, tuple(lacking)
            if about not in alike:
                order = protocol.Save(
                    action.dump_id,
                    action.step,
                    folder,
                    part=part,
                    parts=count,
                    is_quick=action.place == do.MEMORY,
                    round=action.round,
                    share=share,
                    without=list(lacking),
                )
                alike[about] = order, []
            order, ranks = alike[about]
            self._owed[rank, order.round, share] = order
            ranks.append(rank)
        for order, ranks in alike.values():
            self._links.send_all(ranks, order)

    def hear(self, answer: Answer) -> None:
        """Post an answer, if it is to the present dump and can be true."""
        if answer.dump_id != self._dump_id:
            return
        match answer:
            case protocol.Frozen(rank=rank):
                self.frozen[rank] = answer.nbytes, answer.host_nbytes
                if answer.why:  # as a rule there is none, and ranks are thousands
                    answer = answer._replace(why=encodable(answer.why))
                self._post(answer)
            case protocol.Standing() | protocol.Progress():
                self._post(answer)
            case _:
                order = self._owed.pop((answer.rank, answer.round, answer.share), None)
                self._hear_of_save(answer, order)

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
                self.written[answer.rank, answer.share] = answer
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
